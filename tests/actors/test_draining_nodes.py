"""What the coordinator makes of notices that a node is about to go."""

from __future__ import annotations

import time
from dataclasses import replace

from ray_ckpt.actors.coordinator.draining_nodes import MAX_NOTICE_S, NOTICE_HOLDS_S, DrainingNodes
from ray_ckpt.preemption.notice import Notice


def reported(*notices: Notice) -> DrainingNodes:
    leaving = DrainingNodes()
    for notice in notices:
        leaving.add("n", notice)
    return leaving


def test_of_several_notices_the_soonest_counts_whatever_their_order() -> None:
    now_s = time.time()
    soon, late, vague = (
        Notice("sigterm", "", now_s + 25),
        Notice("aws", "", now_s + 120),
        Notice("gcp", "", None),
    )
    assert reported(soon, late, vague).left_s({})["n"] < 26
    assert reported(vague, late, soon).left_s({})["n"] < 26
    assert reported(late).left_s({"n": 3.0, "m": 4.0}) == {"n": 3.0, "m": 4.0}  # Ray knows better


def test_a_time_in_ten_years_is_forgotten_unless_it_is_said_again() -> None:
    leaving = reported(Notice("aws", "", time.time() + 3e8))
    (view,) = leaving.views()
    assert view.in_s is not None and view.in_s > 2e8
    (told_,) = leaving._notified.values()
    assert told_.until_s <= time.time() + MAX_NOTICE_S + NOTICE_HOLDS_S


def test_a_node_that_is_gone_or_that_nobody_speaks_of_any_more_is_forgotten() -> None:
    leaving = reported(Notice("aws", "", time.time() + 5))
    leaving.expire({"n"})
    assert leaving.nodes == {"n"}
    leaving.expire({"m"})
    assert not leaving.nodes
    leaving = reported(Notice("aws", "", None))
    (key,) = leaving._notified
    leaving._notified[key] = replace(leaving._notified[key], until_s=time.time() - 1)
    leaving.expire({"n"})
    assert not leaving.nodes


def test_a_signal_to_a_process_of_the_last_group_says_nothing_of_the_next_one() -> None:
    now_s = time.time()
    leaving = reported(Notice("sigterm", "", now_s + 25), Notice("aws", "", now_s + 120))
    leaving.forget_signals({"m"})
    assert len(leaving.views()) == 2
    leaving.forget_signals({"n"})
    assert [view.source for view in leaving.views()] == ["aws"]
