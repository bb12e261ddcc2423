"""The coordinator's record of notices that a node is about to go."""

from __future__ import annotations

import time
from dataclasses import replace

from ray_ckpt.actors.coordinator.draining_nodes import MAX_NOTICE_S, NOTICE_HOLDS_S, DrainingNodes
from ray_ckpt.preemption.notice import Notice


def draining_by(*notices: Notice) -> DrainingNodes:
    draining = DrainingNodes()
    for notice in notices:
        draining.add("n", notice)
    return draining


def test_of_several_notices_the_soonest_counts_whatever_their_order() -> None:
    now_s = time.time()
    soon, late, vague = (
        Notice("sigterm", "", now_s + 25),
        Notice("aws", "", now_s + 120),
        Notice("gcp", "", None),
    )
    assert draining_by(soon, late, vague).left_s({})["n"] < 26
    assert draining_by(vague, late, soon).left_s({})["n"] < 26
    assert draining_by(late).left_s({"n": 3.0, "m": 4.0}) == {"n": 3.0, "m": 4.0}  # Ray knows better


def test_a_deadline_in_ten_years_expires_unless_it_is_repeated() -> None:
    draining = draining_by(Notice("aws", "", time.time() + 3e8))
    (view,) = draining.views()
    assert view.in_s is not None and view.in_s > 2e8
    (notified,) = draining._notified.values()
    assert notified.until_s <= time.time() + MAX_NOTICE_S + NOTICE_HOLDS_S


def test_nodes_that_are_gone_and_notices_that_are_not_repeated_expire() -> None:
    draining = draining_by(Notice("aws", "", time.time() + 5))
    draining.expire({"n"})
    assert draining.nodes == {"n"}
    draining.expire({"m"})
    assert not draining.nodes
    draining = draining_by(Notice("aws", "", None))
    (key,) = draining._notified
    draining._notified[key] = replace(draining._notified[key], until_s=time.time() - 1)
    draining.expire({"n"})
    assert not draining.nodes


def test_a_signal_to_a_process_of_the_last_group_does_not_count_for_the_next() -> None:
    now_s = time.time()
    draining = draining_by(Notice("sigterm", "", now_s + 25), Notice("aws", "", now_s + 120))
    draining.forget_signals({"m"})
    assert len(draining.views()) == 2
    draining.forget_signals({"n"})
    assert [view.source for view in draining.views()] == ["aws"]
