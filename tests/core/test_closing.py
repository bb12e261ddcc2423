"""Stories of how a finished run is put away, and of who opens it meanwhile."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from ray_ckpt.core import closing, context
from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.closing import AGAIN_S, MAX_TRIES, WANTED_S
from ray_ckpt.core.node_machine import NodeMachine
from ray_ckpt.core.retention import decide_at_end
from ray_ckpt.errors import RunSuperseded, Unavailable
from ray_ckpt.format import records as r
from ray_ckpt.types import AttemptId, Level
from tests.core.driver import Harness, of, one, ops

GRACE_S = 60.0


def finished(*, steps: tuple[int, ...] = (10, 20, 30), has_failed: bool = False, **options: Any) -> Harness:
    """Return a run that its launcher has ended; the last step is durable, the others are on nodes only."""
    run = Harness("ab", **{"retire_grace_s": GRACE_S, "remote_every": 1000, **options})
    run.open("ab")
    for step in steps:
        run.save(step)
    run.drain_all(run.feed(m.FinishRequested(token="end", ends_group=True, has_failed=has_failed)))
    assert run.machine.history.lineage()[-1].level is Level.DURABLE
    assert run.machine.plan is None
    return run


def carry_out(run: Harness, effects: tuple[m.Effect, ...]) -> tuple[m.Effect, ...]:
    """Deletes, drains and listings are done, and what follows from that."""
    done = effects
    while done:
        reported: list[m.Effect] = []
        for delete in of(done, m.Delete):
            reported += run.feed(m.DeleteEnded(attempt=delete.attempt, place=delete.place, error=None))
        reported += run.drain_all(done)
        for listing in of(done, m.SweepRemote):
            reported += run.feed(m.RemoteListed(number=listing.number))
        done = tuple(reported)
        effects += done
    return effects


def rest(run: Harness, seconds: float) -> tuple[m.Effect, ...]:
    """Let time pass, and carry out all effects."""
    return carry_out(run, run.tick(seconds))


def states(run: Harness) -> dict[int, str]:
    return {c.step: c.state for c in run.machine.history.checkpoints.values()}


def evicted(effects: tuple[m.Effect, ...]) -> set[tuple[AttemptId, str]]:
    return {(evict.attempt, evict.node_id) for evict in of(effects, m.Evict)}


def test_copies_go_after_the_grace_and_the_run_when_all_is_done() -> None:
    run = finished()
    last = run.machine.history.lineage()[-1].id
    assert not [*of(rest(run, GRACE_S - 1.0), m.Evict), *of(rest(run, 0.5), m.PutAway)]
    effects = rest(run, 1.0)
    assert evicted(effects) == {(last, "a"), (last, "b")}
    assert {op.reason for op in ops(effects) if isinstance(op, r.Retired)} == {"the run has finished"}
    assert not of(effects, m.PutAway), "what is retired is not gone from the storage path"
    effects = rest(run, GRACE_S)
    assert states(run) == {10: "collected", 20: "collected", 30: "live"}
    assert one(effects, m.PutAway).kept == () and run.machine.is_closing
    assert of(run.feed(m.PutAwayEnded(error=None)), m.CloseRun)


def test_many_checkpoints_of_a_finished_run_are_not_visited_at_each_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = finished(keep_every=10)
    monkeypatch.setattr(context, "LIVE_VISITED_PER_S", 1)
    looks = Mock(wraps=decide_at_end)
    monkeypatch.setattr(closing, "decide_at_end", looks)
    effects = run.tick(GRACE_S)
    for _ in range(8):
        effects += run.tick(0.25)
    assert looks.call_count == 1
    effects += carry_out(run, effects)
    for _ in range(4):
        effects += rest(run, 3.0)
    assert {attempt.step for attempt, _ in evicted(effects)} == {10, 20, 30}
    assert of(effects, m.PutAway)


def test_a_run_that_failed_or_is_at_work_keeps_what_it_has() -> None:
    failed = finished(has_failed=True)
    assert not of(rest(failed, 100 * GRACE_S), m.Evict) and not failed.machine.is_closing
    assert set(states(failed).values()) == {"live"}
    lost = Harness("ab", retire_grace_s=GRACE_S)
    lost.open("ab")
    lost.save(10)
    lost.feed(m.OwnerDied(owner=lost.plan.owner))
    assert not of(rest(lost, 100 * GRACE_S), m.Evict) and not lost.machine.is_closing


def test_an_option_keeps_the_copies_and_the_run_is_closed_all_the_same() -> None:
    run = finished(keep_local_at_end=True)
    effects = rest(run, GRACE_S)
    assert not of(effects, m.Evict) and not ops(effects)
    live = run.machine.history.live()
    assert one(effects, m.PutAway).kept == tuple(sorted(c.directory for c in live)) and len(live) == 3


def test_what_a_pin_or_a_policy_keeps_is_drained_before_the_nodes_are_emptied() -> None:
    run = finished(keep_best=("loss", "max", 1))  # the first has the highest loss
    (second,) = [c for c in run.machine.history.live() if c.step == 20]
    run.feed(m.PinRequested(token="pin", attempt=second.id.attempt, owner="paper", expires_at_s=None))
    effects = run.tick(GRACE_S)
    assert {drain.attempt.step for drain in of(effects, m.Drain)} == {10, 20}
    assert {attempt.step for attempt, _ in evicted(effects)} == {30}
    assert not of(effects, m.PutAway)
    effects = carry_out(run, effects)
    assert {attempt.step for attempt, _ in evicted(effects)} == {10, 20, 30}
    assert states(run) == {10: "live", 20: "live", 30: "live"}
    assert {c.level for c in run.machine.history.live()} == {Level.DURABLE}
    assert of((*effects, *rest(run, GRACE_S)), m.PutAway)


def test_nodes_are_needed_until_what_is_kept_was_uploaded() -> None:
    """Agents end on nodes that are not needed, and the nodes may go with the only copies."""
    run = finished(keep_best=("loss", "max", 1))
    assert run.machine.view.needed_nodes() == frozenset("ab")
    effects = run.tick(GRACE_S)
    assert {drain.attempt.step for drain in of(effects, m.Drain)} == {10}
    assert run.machine.view.needed_nodes() == frozenset("ab")
    carry_out(run, effects)
    assert run.machine.view.needed_nodes() == frozenset()


@pytest.mark.parametrize("has_failed", [False, True])
def test_the_holders_of_what_is_pinned_are_needed_after_the_end(has_failed: bool) -> None:
    run = finished(has_failed=has_failed)
    assert run.machine.view.needed_nodes() == frozenset()
    (second,) = [c for c in run.machine.history.live() if c.step == 20]
    run.feed(m.PinRequested(token="pin", attempt=second.id.attempt, owner="paper", expires_at_s=None))
    assert run.machine.view.needed_nodes() == frozenset("ab")


def test_what_is_needed_and_cannot_be_drained_stays_where_it_is() -> None:
    run = finished()
    (second,) = [c for c in run.machine.history.live() if c.step == 20]
    run.feed(m.PinRequested(token="pin", attempt=second.id.attempt, owner="paper", expires_at_s=None))
    run.lose("b")  # with the only copy of its fragment, but for that on a
    run.machine._context.holders.remove(second.id.attempt, 1, "a", run.now_s)
    effects = (*rest(run, GRACE_S), *rest(run, GRACE_S))
    assert one(effects, m.PutAway).kept == (second.directory,)
    assert states(run)[20] == "live" and (second.id, "a") not in evicted(effects)


def test_a_store_that_is_away_keeps_the_run_open_until_it_is_back() -> None:
    run = finished(keep_every=10)
    effects = run.tick(GRACE_S)
    for _ in range(5):
        drains = of(effects, m.Drain)
        effects = tuple(e for drain in drains for e in run.drained(drain, error="away"))
        effects += run.tick(GRACE_S)
        assert drains and not of(effects, m.PutAway)
    effects = carry_out(run, effects)
    assert of((*effects, *rest(run, GRACE_S)), m.PutAway)


def test_a_group_that_comes_in_the_grace_finds_the_copies() -> None:
    run = finished()
    run.tick(GRACE_S - 1.0)
    start = one(run.open("ab"), m.StartSession)
    assert start.plan.resume is not None and all(start.plan.resume.holders)
    assert not of(rest(run, 100 * GRACE_S), m.Evict) and not run.machine.is_closing


def test_a_launcher_that_opens_the_run_has_time_to_start_its_group() -> None:
    run = finished()
    run.tick(GRACE_S - 1.0)
    run.feed(m.RunWanted())
    assert not of(rest(run, WANTED_S - 1.0), m.Evict)
    assert of(rest(run, 1.0), m.Evict), "it never came"


def test_a_group_that_comes_too_late_opens_the_run_anew_and_late_orders_are_refused() -> None:
    run = finished()
    rest(run, GRACE_S)
    rest(run, GRACE_S)
    old = run.machine.epoch
    assert run.machine.is_closing
    fail = one(run.feed(run.group("ab")), m.Fail)
    assert isinstance(fail.error, Unavailable) and "put away" in str(fail.error)
    assert not run.feed(m.RunWanted())
    run.start_coordinator()
    start = one(run.open("ab"), m.StartSession)
    assert start.plan.resume is not None and start.plan.resume.checkpoint.step == 30
    assert run.machine.epoch > old


def test_a_restarted_coordinator_puts_away_what_its_predecessor_had_not() -> None:
    run = finished()
    run.start_coordinator()
    assert run.machine.view.end_cause == "finished"
    run.feed(m.NodesJoined(inventories=run.inventories()))
    assert not of(rest(run, GRACE_S - 1.0), m.Evict)
    assert {attempt.step for attempt, _ in evicted(rest(run, 1.0))} == {30}
    assert of(rest(run, GRACE_S), m.PutAway)


def test_a_restarted_coordinator_drains_the_newest_checkpoint_of_a_failed_run() -> None:
    """It finds no group; the request is that of its recovery, since the launcher makes none."""
    run = Harness("ab", remote_every=1000, retire_grace_s=GRACE_S)
    run.open("ab")
    run.save(10)
    end = m.FinishRequested(token="end", ends_group=True, has_failed=True)
    assert of(run.feed(end), m.Drain)
    run.start_coordinator()
    run.feed(m.NodesJoined(inventories=run.inventories()))
    drains = run.feed(end)
    assert {drain.attempt.step for drain in of(drains, m.Drain)} == {10}
    assert run.machine.view.needed_nodes() == {"a", "b"} and run.machine.view.end_cause is None
    run.drain_all(drains)
    assert run.machine.history.lineage()[-1].level is Level.DURABLE
    assert run.machine.view.end_cause == "process" and not of(rest(run, 10 * GRACE_S), m.PutAway)


def test_a_finished_group_whose_nodes_missed_the_end_is_not_found_at_work() -> None:
    run = Harness("ab", retire_grace_s=GRACE_S)
    run.open("ab")
    plan = run.plan
    run.drain_all((*run.save(10), *run.feed(m.FinishRequested(token="end", ends_group=True))))
    run.start_coordinator()
    run.feed(m.GroupRecovered(plan=plan, inventories=run.inventories()))
    assert run.machine.plan is None and run.machine.view.end_cause == "finished"


def test_a_group_of_another_launcher_after_a_finished_one_is_found_at_work() -> None:
    run = finished()
    run.feed(run.group("ab", owner="other"))
    plan = run.plan
    run.start_coordinator()
    assert run.machine.view.end_cause is None
    run.feed(m.GroupRecovered(plan=plan, inventories=run.inventories()))
    assert run.machine.plan == plan
    assert not of(rest(run, 100 * GRACE_S), m.PutAway)


def test_nodes_that_do_not_answer_get_the_order_again_but_not_for_ever() -> None:
    run = finished(steps=(30,))
    rest(run, GRACE_S)
    assert run.machine.is_closing
    for _ in range(MAX_TRIES - 1):
        assert not run.feed(m.PutAwayEnded(error="node a does not answer"))
        assert not run.tick(AGAIN_S - 1.0)
        assert of(run.tick(1.0), m.PutAway)
    effects = run.feed(m.PutAwayEnded(error="node a does not answer"))
    assert "node a" in one(effects, m.Warn).text and of(effects, m.CloseRun)


def test_a_run_without_a_checkpoint_is_closed_too() -> None:
    run = Harness("ab", retire_grace_s=GRACE_S)
    run.open("ab")
    run.feed(m.FinishRequested(token="end", ends_group=True))
    assert of(rest(run, GRACE_S), m.PutAway)


@pytest.mark.parametrize("mode", ["held", "silent"])
def test_nothing_is_deleted_before_the_log_has_it(mode: Any) -> None:
    run = finished()
    run.store_mode = mode
    effects = run.tick(GRACE_S)
    assert ops(effects) and not of(effects, m.Delete) and not of(effects, m.PutAway)


def test_a_run_that_somebody_else_has_by_now_is_left_to_them() -> None:
    run = finished()
    other = Harness("cd", store=run.store, service="west")
    other.feed(other.group("cd", owner="west-driver"))
    effects = run.tick(GRACE_S)
    assert of(effects, m.StepDown) and not of(effects, m.Delete) and not of(effects, m.PutAway)


def test_callers_that_wait_for_a_session_on_a_node_are_answered_when_it_is_over() -> None:
    run = Harness("ab")
    run.open("ab")
    machine = NodeMachine(epoch=1)
    machine.handle(n.SessionStarted(plan=run.plan, node_id="a", epoch=1))
    ended, forget = machine.handle(n.RunPutAway(kept=("x",), epoch=1))
    assert isinstance(ended, n.EndSession) and isinstance(ended.error, RunSuperseded)
    assert forget == n.ForgetRun(kept=("x",)) and machine.plan is None
