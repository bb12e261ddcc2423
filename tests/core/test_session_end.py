"""The end of a session in the log, and the time that its ranks have reported."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace

import pytest

from ray_ckpt import telemetry
from ray_ckpt.core import messages as m
from ray_ckpt.core.values import GOES_ON, STILL_WRITING, RankProgress
from ray_ckpt.errors import ConfigError
from ray_ckpt.format import records as r
from ray_ckpt.telemetry import Metric, Sample
from ray_ckpt.types import SaveFacts
from tests.core.driver import START_S, Harness, of, one


def reported(run: Harness, step: int, *, saved: int = -1, since_s: float = 0.0, stall_s: float = 0.0) -> None:
    plan = run.plan
    progress = RankProgress(step=step, saved_step=saved, since_s=since_s, step_s=2.0, stall_s=stall_s)
    for node in plan.nodes:
        run.feed(m.RanksProgressed(session_key=plan.session_key, ranks=dict.fromkeys(node.ranks, progress)))


def ends(run: Harness) -> list[r.Ended]:
    return [op for op in run.records if isinstance(op, r.Ended)]


def samples(run: Harness, metric: Metric) -> list[Sample]:
    return [sample for sample in run.machine.take_samples() if sample.metric is metric]


def test_the_times_are_those_that_ranks_reported() -> None:
    run = Harness("ab")
    run.open("ab")
    opened_s = run.now_s
    run.tick(11.0)
    reported(run, 5, saved=4, since_s=1.0, stall_s=0.5)  # five steps of 2 s: the first one began at 0 s
    reported(run, 5, saved=4, since_s=1.0, stall_s=0.75)  # its optimizer waited, too
    run.tick(10.0)
    reported(run, 9, saved=8, since_s=3.0, stall_s=0.25)
    run.tick(60.0)
    run.open("ab")
    (ended,) = ends(run)
    start_s = START_S + opened_s
    assert (ended.session, ended.cause, ended.step) == (1, "process", 9)
    assert ended.first_at_s == pytest.approx(start_s, abs=1.0)
    assert ended.last_at_s == pytest.approx(start_s + 18.0, abs=1.0)
    assert ended.stalled_s == pytest.approx(1.0)


def test_each_cause_is_recognized() -> None:
    run = Harness("abc")
    run.open("ab")
    run.open("ab")
    run.lose("b")
    run.open("ac")
    run.feed(m.NodesSeen(live=frozenset("ac"), draining=frozenset("c")))
    run.lose("c")
    run.open("a")
    run.feed(m.FinishRequested(token="end", ends_group=True))
    assert [ended.cause for ended in ends(run)] == ["process", "node", "preemption", "finished"]
    assert [s.labels["cause"] for s in samples(run, telemetry.INTERRUPTIONS)] == [
        "process",
        "node",
        "preemption",
    ]


def test_a_notice_that_came_to_nothing_is_not_why_a_later_process_failed() -> None:
    run = Harness("ab")
    run.open("ab")
    run.feed(m.NodesSeen(live=frozenset("ab"), draining=frozenset("b")))
    run.feed(m.NodesSeen(live=frozenset("ab"), draining=frozenset()))
    run.open("ab")
    assert [ended.cause for ended in ends(run)] == ["process"]


def test_a_launcher_that_exits_while_its_last_checkpoint_drains_has_finished() -> None:
    """The launcher waits no longer than finish_timeout_s."""
    run = Harness("ab")
    run.open("ab")
    effects = list(run.save(10))
    effects += run.feed(m.FinishRequested(token="end", ends_group=True))
    run.feed(m.OwnerDied(owner=run.plan.owner))
    assert not ends(run) and run.machine.view.end_cause is None
    run.drain_all(effects)
    assert [ended.cause for ended in ends(run)] == ["finished"]
    assert run.machine.view.end_cause == "finished"
    run.open("ab")
    assert run.machine.view.end_cause is None


@pytest.mark.parametrize("node", ["", "b"])
def test_a_launcher_that_gives_up_ends_its_session(node: str) -> None:
    run = Harness("ab")
    run.open("ab")
    if node:
        run.lose(node)
    effects = run.feed(m.FinishRequested(token="end", ends_group=True, has_failed=True))
    assert [ended.cause for ended in ends(run)] == ["node" if node else "process"]
    assert [e.token for e in effects if isinstance(e, m.Reply)] == ["end"]
    assert run.machine.view.end_cause == "process" and not run.machine.view.owner
    assert len(samples(run, telemetry.INTERRUPTIONS)) == 1


def test_a_dead_launcher_keeps_no_repair_waiting_for_the_log() -> None:
    run = Harness("ab")
    run.open("ab")
    run.store_mode = "held"
    run.save(10)
    assert run.machine.view.records_waiting == 1
    run.feed(m.OwnerDied(owner=run.plan.owner))
    assert run.machine.view.records_waiting == 1
    run.confirm()
    run.feed(m.OwnerDied(owner=run.plan.owner))
    assert [ended.cause for ended in ends(run)] == ["launcher"]


def test_a_dead_launchers_group_stays_while_nodes_may_still_write_a_save() -> None:
    run = Harness("ab", attempt_timeout_s=60.0)
    run.open("ab")
    reported(run, 10, saved=10)
    owner = run.plan.owner
    run.feed(m.OwnerDied(owner=owner))
    for seconds in (0.0, 50.0):
        run.tick(seconds)
        run.feed(m.OwnerDied(owner=owner))
        assert run.machine.view.owner == owner
    run.tick(11.0)
    run.feed(m.OwnerDied(owner=owner))
    assert not run.machine.view.owner, "its ranks died in mid-save"


def test_a_dead_launchers_group_ends_once_its_saves_have() -> None:
    """Its nodes are no longer needed, and agents free the memory of its captures."""
    run = Harness("ab", attempt_timeout_s=60.0, remote_every=1000)
    run.open("ab")
    run.save(10)
    run.feed(run.stored(run.attempt(20), "a"))
    owner = run.plan.owner
    for _ in range(2):
        run.feed(m.OwnerDied(owner=owner))
        assert run.machine.view.owner == owner, "one node has stored the step, and the other may"
    assert not of(run.transcript, m.Drain)
    run.tick(61.0)
    effects = run.feed(m.OwnerDied(owner=owner))
    assert not run.machine.view.owner and run.machine.view.end_cause == "launcher"
    assert {drain.attempt.step for drain in of(effects, m.Drain)} == {10}, "as a run that failed does"
    run.drain_all(effects)
    assert not run.machine.view.needed_nodes() and not run.machine.is_closing
    run.open("ab")
    assert run.machine.view.end_cause is None


@pytest.mark.parametrize("node", ["", "b"])
def test_a_launcher_that_died_for_good_ends_its_session(node: str) -> None:
    """The record must be there even if no launcher returns for hours."""
    run = Harness("ab")
    run.open("ab")
    reported(run, 7)
    if node:
        run.lose(node)
    run.feed(m.OwnerDied(owner="somebody else"))
    assert not ends(run)
    run.feed(m.OwnerDied(owner=run.plan.owner))
    run.feed(m.OwnerDied(owner=run.plan.owner))
    (ended,) = ends(run)
    assert (ended.session, ended.cause, ended.step) == (1, "node" if node else "launcher", 7)
    assert len(samples(run, telemetry.INTERRUPTIONS)) == 1
    assert [s.value for s in run.machine.view.gauges() if s.metric is telemetry.ACTIVE] == [0.0]
    run.open("a")
    assert [s.value for s in run.machine.view.gauges() if s.metric is telemetry.ACTIVE] == [1.0]
    assert ends(run) == [ended]


def test_a_session_without_reports_ended_after_its_last_save() -> None:
    run = Harness("ab")
    run.open("ab")
    run.save(10)
    run.open("ab")
    (ended,) = ends(run)
    assert (ended.step, ended.first_at_s, ended.last_at_s) == (10, None, None)


def test_a_restarted_coordinator_does_not_claim_to_know_the_beginning() -> None:
    run = Harness("ab")
    run.open("ab")
    run.save(10)
    plan = run.plan
    run.start_coordinator()
    run.feed(m.GroupRecovered(plan=plan, inventories=run.inventories()))
    reported(run, 12)
    run.open("ab")
    (ended,) = ends(run)
    assert (ended.step, ended.first_at_s, ended.stalled_s) == (12, None, None)
    assert ended.last_at_s is not None


@pytest.mark.parametrize("is_finish", [True, False])
def test_a_session_ends_once_also_if_the_coordinator_dies_behind_that_record(is_finish: bool) -> None:
    """The next one takes the group for one at work, and knows less of it."""
    run = Harness("ab")
    run.open("ab")
    plan = run.plan
    reported(run, 9)
    if is_finish:
        run.feed(m.FinishRequested(token="end", ends_group=True))
    else:
        run.store_mode = "held"
        run.feed(run.group("ab"))
        run.confirm(hold_next=True)  # the new session's record is never written
        run.store_mode, run.held = "ok", []
    (ended,) = ends(run)
    assert ended.step == 9 and ended.last_at_s is not None
    run.start_coordinator()
    run.feed(m.GroupRecovered(plan=plan, inventories=run.inventories()))
    effects = run.feed(m.FinishRequested(token="again", ends_group=True))
    run.open("ab")
    assert ends(run)[:1] == [ended]
    assert [e.session for e in ends(run)] == [1]
    assert [e.token for e in effects if isinstance(e, m.Reply)] == ["again"]
    assert not samples(run, telemetry.INTERRUPTIONS)


def test_a_session_whose_successor_waits_for_the_log_does_not_end_behind_it() -> None:
    """Damage has begun session 3; a group that opens before that is in the log ends neither it nor 2."""
    run = Harness("ab")
    run.open("ab")
    run.save(10)
    run.save(20)
    run.feed(run.group("ab"))
    run.store_mode = "held"
    run.feed(run.restored("a"), run.restored("b", damage=["x"]))
    run.feed(run.group("ab"))
    run.store_mode = "ok"
    run.confirm()
    assert [op.session for op in run.records if isinstance(op, r.Session)][:3] == [1, 2, 3]
    assert [e.session for e in ends(run)] == [1]


def test_nodes_that_join_are_no_agents_that_died() -> None:
    run = Harness("ab")
    run.open("ab")
    run.live.add("c")
    run.feed(m.NodesJoined(inventories={"c": run.disks["b"].inventory()}), m.NodesSeen(live=frozenset("abc")))
    assert not [s for s in samples(run, telemetry.FAILURES) if s.value]
    run.feed(m.NodesJoined(inventories={"b": run.disks["b"].inventory()}))
    assert [(s.value, s.labels["cause"]) for s in samples(run, telemetry.FAILURES)] == [(1, "agent")]


@pytest.mark.parametrize("text", ["a path \udc80", "a" * (r.MAX_RECORD_BYTES - 200)])
def test_what_the_log_cannot_hold_is_refused_and_holds_nothing_up(text: str) -> None:
    run = Harness("ab")
    run.open("ab")
    run.save(10)
    (checkpoint,) = run.machine.history.live()
    attempt = checkpoint.id.attempt
    drilled = r.Drilled(attempt=attempt, scenario="x", passed=True, seconds=1.0, read_bytes={}, text=text)
    effects = run.feed(
        m.DrillEnded(token="drill", result=drilled),
        m.PinRequested(token="pin", attempt=attempt, owner="me", expires_at_s=math.inf),
    )
    failed = [e for e in effects if isinstance(e, m.Fail)]
    assert [e.token for e in failed] == ["drill", "pin"]
    assert all(isinstance(e.error, ConfigError) for e in failed)
    run.save(20)
    assert [c.step for c in run.machine.history.live()] == [10, 20]


def test_a_commit_has_the_times_of_the_slowest_node() -> None:
    run = Harness("ab")
    run.open("ab")
    attempt = run.attempt(10)
    for node, stall_s in (("a", 0.5), ("b", 0.25)):
        facts = SaveFacts(stall_s=stall_s, capture_s=1.0 - stall_s, local_s=2.0, shared_bytes=70)
        run.feed(replace(run.stored(attempt, node), facts=facts))
    run.tick(3.0)
    run.feed(run.copied(attempt, "a", "b"), run.copied(attempt, "b", "a"))
    (checkpoint,) = run.machine.history.live()
    assert (checkpoint.stall_s, checkpoint.capture_s, checkpoint.local_s) == (0.5, 0.75, 2.0)
    assert checkpoint.replicate_s == pytest.approx(3.0, abs=0.1)
    assert checkpoint.shared_bytes == 140, "of all nodes together"
    phases = {s.labels["phase"]: s.value for s in samples(run, telemetry.PHASE)}
    assert phases.keys() == {"capture", "local", "replicate", "commit"}


def test_lag_and_exposure_are_gauges() -> None:
    run = Harness("ab")
    run.open("ab")
    run.save(10)
    reported(run, 14, saved=10)
    found = {(s.metric.name, *s.labels.values()): s.value for s in run.machine.view.gauges()}
    assert found["last_step",] == 14
    assert (found["lag_steps", "replicated"], found["lag_steps", "durable"]) == (4, 14)
    assert found["saved_step", "replicated"] == 10
    assert (found["steps_at_risk", "a"], found["steps_at_risk", "b"]) == (4, 4)


def warnings_of(effects: Iterable[m.Effect]) -> list[str]:
    return [e.text for e in effects if isinstance(e, m.Warn) and "skipped" in e.text]


def test_saves_that_take_longer_than_the_time_between_them_and_are_all_committed_warn_of_nothing() -> None:
    run = Harness("ab", every_steps=10)
    run.open("ab")
    for step in (10, 20, 30):
        reported(run, step, saved=step)  # ten steps of 2 s
        attempt = run.attempt(step)
        for node in "ab":
            facts = SaveFacts(stall_s=0.0, capture_s=15.0, local_s=15.0)
            run.feed(replace(run.stored(attempt, node), facts=facts))
        effects = run.feed(run.copied(attempt, "a", "b"), run.copied(attempt, "b", "a"))
        assert not [e for e in effects if isinstance(e, m.Warn)]
    assert not samples(run, telemetry.SKIPPED_SAVES)


def test_skipped_saves_are_counted_and_logged_again_when_twice_as_many() -> None:
    run = Harness("ab", every_steps=10)
    run.open("ab")
    warnings = []
    for step in range(10, 90, 10):
        if step % 20:
            warnings += warnings_of(run.save(step))
            continue
        skip = m.SaveRefused(attempt=run.attempt(step), ranks=(1,), reason=STILL_WRITING)
        warnings += warnings_of(run.feed(skip, replace(skip, ranks=(0,))))
    assert [re.findall(r"\d+ of \d+", text) for text in warnings] == [["1 of 2"], ["2 of 4"], ["4 of 8"]]
    assert len(samples(run, telemetry.SKIPPED_SAVES)) == 4


def test_a_save_that_a_rank_refuses_for_another_reason_is_not_called_skipped() -> None:
    run = Harness("ab", every_steps=10)
    run.open("ab")
    assert not warnings_of(
        run.feed(m.SaveRefused(attempt=run.attempt(10), ranks=(1,), reason="the disk is full"))
    )
    assert not samples(run, telemetry.SKIPPED_SAVES)


@pytest.mark.parametrize("is_early", [True, False])
def test_a_second_save_of_a_step_whose_save_goes_on_is_not_counted_as_lost(is_early: bool) -> None:
    """`step` and `save` for one step; each rank refuses the second, since another may have begun it."""
    run = Harness("ab", every_steps=10)
    run.open("ab")
    second = run.attempt(10, number=1)
    refused = [m.SaveRefused(attempt=second, ranks=(rank,), reason=GOES_ON) for rank in (0, 1)]
    effects = run.feed(*refused) if is_early else ()
    effects += run.save(10)
    effects += () if is_early else run.feed(*refused)
    metrics = {sample.metric for sample in run.machine.take_samples()}
    assert not of(effects, m.Warn) and telemetry.FAILURES not in metrics
    assert [c.step for c in run.machine.history.lineage()] == [10]
    (outcome,) = [told for told in of(effects, m.NotifyOutcome) if told.attempt == second]
    assert outcome.error is not None and set(outcome.nodes) == {"a", "b"}
    (late,) = of(run.feed(run.stored(second, "a")), m.NotifyOutcome)
    assert (late.attempt, late.nodes) == (second, ("a",)) and late.error is not None


def test_a_second_save_of_a_step_that_a_node_has_stored_is_lost_with_a_warning() -> None:
    run = Harness("ab", every_steps=10)
    run.open("ab")
    second = run.attempt(10, number=1)
    run.feed(run.stored(second, "a"))
    (warning,) = of(run.feed(m.SaveRefused(attempt=second, ranks=(1,), reason=GOES_ON)), m.Warn)
    assert "Step 10 was not saved" in warning.text


def test_skipped_saves_of_an_earlier_group_do_not_count() -> None:
    run = Harness("ab", every_steps=10)
    run.open("ab")
    run.feed(m.SaveRefused(attempt=run.attempt(10), ranks=(1,), reason=STILL_WRITING))
    run.open("ab")
    effects = run.feed(m.SaveRefused(attempt=run.attempt(20), ranks=(1,), reason=STILL_WRITING))
    assert ["1 of 1" in text for text in warnings_of(effects)] == [True]


def begin_from_another_run(run: Harness, step: int) -> None:
    run.feed(run.group("ab"))
    for node in run.plan.nodes:
        event = run.restored(node.node_id)
        ranks = tuple(replace(rank, origin_step=step, seconds=4.0) for rank in event.ranks)
        run.feed(replace(event, ranks=ranks))


def test_the_steps_of_another_run_are_none_of_the_session() -> None:
    """The run continues from step 50,000 of another run: 80 steps of 2 s, the first one at once."""
    run = Harness("ab")
    begin_from_another_run(run, 50_000)
    (restored,) = [op for op in run.records if isinstance(op, r.Restored)]
    assert (restored.session, restored.seconds, restored.origin_step) == (1, 4.0, 50_000)
    restored_s = START_S + run.now_s
    reported(run, 50_000)
    run.tick(160.0)
    reported(run, 50_080)
    run.tick(10.0)
    run.open("ab")
    (ended,) = ends(run)
    assert ended.step == 50_080
    assert ended.last_at_s == pytest.approx(restored_s + 160.0, abs=1.0)
    assert ended.first_at_s == pytest.approx(restored_s, abs=1.0)


def test_a_session_that_made_no_step_after_another_runs_ends_where_it_began() -> None:
    run = Harness("ab")
    begin_from_another_run(run, 50_000)
    run.open("ab")
    (ended,) = ends(run)
    assert (ended.step, ended.first_at_s, ended.last_at_s) == (50_000, None, None)
    assert run.plan.resume is None, "the next one begins as this one did"


def test_a_node_that_did_not_get_the_answer_to_its_restore_is_answered_again() -> None:
    """The other nodes do not report once more."""
    run = Harness("ab")
    run.feed(run.group("ab"))
    run.feed(run.restored("a"), run.restored("b"))
    effects = run.feed(run.restored("a"))
    assert one(effects, m.Reply).token == "restored-a"
    assert run.machine.view.is_training
