"""Public views of saves and drains that are on their way."""

from __future__ import annotations

from typing import Any

from ray_ckpt.core import messages as m
from ray_ckpt.core.attempts import SaveUnderway
from ray_ckpt.core.drain import PATIENT_TRIES, DrainUnderway
from ray_ckpt.core.values import RankProgress, SessionPlan
from tests.core.driver import Harness, of


def progressed(run: Harness, *ranks: tuple[int, int], step_s: float = 0.5) -> None:
    """Rank k has completed and saved the k-th of these steps."""
    ranks_now = {
        k: RankProgress(step=step, saved_step=saved, step_s=step_s) for k, (step, saved) in enumerate(ranks)
    }
    run.feed(m.RanksProgressed(session_key=run.plan.session_key, ranks=ranks_now))


def saves(run: Harness) -> tuple[SaveUnderway, ...]:
    return run.machine.view.saves_underway


def drains_of(run: Harness) -> tuple[DrainUnderway, ...]:
    return run.machine.view.drains_underway


def opened(**options: Any) -> Harness:
    run = Harness("ab", **options)
    run.open("ab")
    return run


def test_a_save_is_seen_from_its_capture_to_its_commit() -> None:
    run = opened(replicas=1)
    assert saves(run) == () and run.machine.view.step_s == 0
    progressed(run, (10, 10), (10, 0))
    (save,) = saves(run)
    assert (save.step, save.phase, save.ranks_captured, save.ranks_stored) == (10, "writing", 1, 0)
    assert (save.world_size, save.age_s) == (2, None)
    attempt = run.attempt(10)
    run.feed(run.stored(attempt, "a"))
    run.tick(3.0)
    (save,) = saves(run)
    assert (save.phase, save.ranks_captured, save.ranks_stored, save.age_s) == ("writing", 1, 1, 3.0)
    assert (save.copies, save.copies_awaited, save.size_bytes) == (0, 1, 200)
    run.feed(run.stored(attempt, "b"), run.copied(attempt, "a", "b"))
    (save,) = saves(run)
    assert (save.phase, save.ranks_stored, save.copies, save.copies_awaited) == ("copying", 2, 1, 1)
    run.store_mode = "held"
    run.feed(run.copied(attempt, "b", "a"))
    assert [save.phase for save in saves(run)] == ["committing"]
    assert run.machine.view.records_waiting == 1
    run.confirm()
    assert saves(run) == () and run.machine.view.records_waiting == 0


def test_what_a_rank_saved_before_is_no_save_on_its_way() -> None:
    run = opened()
    run.save(10)
    progressed(run, (12, 10), (12, 10))
    assert saves(run) == () and run.machine.view.last_step == 12
    run.open("ab")  # ranks report that they have saved the restored step
    progressed(run, (10, 10), (10, 10))
    assert saves(run) == ()
    run.start_coordinator()  # and a new coordinator has the log only
    run.feed(m.GroupRecovered(plan=_plan(run), inventories=run.inventories()))
    progressed(run, (10, 10), (10, 10))
    assert saves(run) == ()


def _plan(run: Harness) -> SessionPlan:
    (plan,) = of(run.transcript, m.StartSession)[-1:]
    return plan.plan


def test_a_dropped_save_is_not_on_its_way() -> None:
    run = opened()
    progressed(run, (10, 10), (10, 10))
    run.feed(m.SaveRefused(attempt=run.attempt(10), ranks=(1,), reason="busy"))
    assert saves(run) == ()


def test_the_pace_is_the_median_of_the_ranks() -> None:
    run = opened()
    progressed(run, (3, 0), (3, 0), step_s=0.25)
    assert run.machine.view.step_s == 0.25


def test_a_drain_is_seen_until_it_is_described() -> None:
    run = opened(remote_every=1)
    effects = run.save(10)
    first, second = of(effects, m.Drain)
    run.tick(4.0)
    (drain,) = drains_of(run)
    assert (drain.step, drain.state, drain.fragments, drain.fragments_done) == (10, "uploading", 2, 0)
    assert (set(drain.nodes), drain.size_bytes, drain.tries, drain.started_s) == ({"a", "b"}, 400, 1, 4.0)
    run.drained(first)
    assert [drain.fragments_done for drain in drains_of(run)] == [1]
    run.drained(second)
    assert [drain.state for drain in drains_of(run)] == ["describing"]
    assert [c.step for c in run.machine.view.in_cluster_only] == [10]
    run.feed(m.DescriptionWritten(attempt=first.attempt, error=None))
    assert drains_of(run) == () and run.machine.view.in_cluster_only == ()


def test_a_drain_that_the_store_does_not_take_is_failing() -> None:
    run = opened(remote_every=1)
    drains = of(run.save(10), m.Drain)
    for _ in range(PATIENT_TRIES):
        assert [drain.state for drain in drains_of(run)] == ["uploading"]
        failed = [e for drain in drains for e in run.drained(drain, error="away")]
        drains = of([*failed, *run.tick(120.0)], m.Drain)
    assert [drain.state for drain in drains_of(run)] == ["failing"]


def test_drains_beyond_those_that_are_active_wait_for_their_turn() -> None:
    run = opened(remote_every=1, keep_last=10)
    for step in (10, 20, 30):
        run.save(step)
    assert [(d.step, d.state, d.started_s is None) for d in drains_of(run)] == [
        (10, "uploading", False),
        (20, "uploading", False),
        (30, "waiting", True),
    ]


def test_draining_nodes_are_shown_with_their_remaining_time() -> None:
    run = opened()
    run.feed(m.NodesSeen(live=frozenset("ab"), draining=frozenset("a"), left_s={"a": 30.0}))
    run.tick(10.0)
    assert run.machine.view.leaving == {"a": 20.0}
    run.feed(m.NodesSeen(live=frozenset("ab"), draining=frozenset("b")))
    assert run.machine.view.leaving == {"b": None}
