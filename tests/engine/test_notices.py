"""The record of notices that a node is about to go."""

from __future__ import annotations

from ray_ckpt.engine.notices import MAX_NOTICE_S, NOTICE_HOLDS_S, Notices
from ray_ckpt.preemption.notice import Notice

NOW_S = 1_790_000_000.0


def draining_by(*notices: Notice) -> Notices:
    draining = Notices()
    for notice in notices:
        draining.add("n", notice, NOW_S)
    return draining


def test_of_several_notices_the_soonest_counts_whatever_their_order() -> None:
    soon, late, vague = (
        Notice("sigterm", "", NOW_S + 25),
        Notice("aws", "", NOW_S + 120),
        Notice("gcp", "", None),
    )
    assert draining_by(soon, late, vague).left_s("", {}, NOW_S)["n"] < 26
    assert draining_by(vague, late, soon).left_s("", {}, NOW_S)["n"] < 26
    by_ray = {"n": 3.0, "m": 4.0}
    assert draining_by(late).left_s("", by_ray, NOW_S) == by_ray, "Ray knows better"


def test_a_deadline_in_ten_years_expires_unless_it_is_repeated() -> None:
    draining = draining_by(Notice("aws", "", NOW_S + 3e8))
    ((_, _, in_s),) = draining.leaving(NOW_S)
    assert in_s is not None and in_s > 2e8
    draining.expire({"n"}, NOW_S + MAX_NOTICE_S + NOTICE_HOLDS_S - 1)
    assert draining.nodes("")
    draining.expire({"n"}, NOW_S + MAX_NOTICE_S + NOTICE_HOLDS_S)
    assert not draining.nodes("")


def test_nodes_that_are_gone_and_notices_that_are_not_repeated_expire() -> None:
    draining = draining_by(Notice("aws", "", NOW_S + 5))
    draining.expire({"n"}, NOW_S)
    assert draining.nodes("") == {"n"}
    draining.expire({"m"}, NOW_S)
    assert not draining.nodes("")
    draining = draining_by(Notice("aws", "", None))
    draining.expire({"n"}, NOW_S + NOTICE_HOLDS_S)
    assert not draining.nodes("")


def test_a_signal_to_a_process_of_the_last_group_does_not_count_for_the_next() -> None:
    draining = draining_by(Notice("sigterm", "", NOW_S + 25), Notice("aws", "", NOW_S + 120))
    draining.forget_signals("", {"m"})
    assert len(draining.leaving(NOW_S)) == 2
    draining.forget_signals("", {"n"})
    assert [source for _, source, _ in draining.leaving(NOW_S)] == ["aws"]


def test_a_signal_counts_only_for_the_run_whose_process_got_it() -> None:
    draining = Notices()
    draining.add("n", Notice("sigterm", "", NOW_S + 25), NOW_S, "run A")
    draining.add("m", Notice("aws", "", NOW_S + 120), NOW_S)
    assert draining.nodes("run A") == {"n", "m"} and draining.nodes("run B") == {"m"}
    assert draining.left_s("run B", {}, NOW_S).keys() == {"m"}
    draining.forget_signals("run B", {"n", "m"})
    assert draining.left_s("run A", {}, NOW_S).keys() == {"n", "m"}
