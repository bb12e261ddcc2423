"""Agreed steps: what is due by time, or because a node leaves, becomes a step that all ranks reach."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from ray_ckpt.core import messages as m
from ray_ckpt.core.save_steps import LEAST_AHEAD, MAX_REACH_S
from ray_ckpt.core.values import RankProgress, SessionPlan
from ray_ckpt.errors import SaveNotCollective, Unavailable
from ray_ckpt.format.save_signal import SaveSignal, is_urgent, read_flag, step_of, write_flag
from tests.core.driver import Harness, of, one
from tests.support.examples import every_few


def reported(run: Harness, step: int, *, ranks: Iterable[int] = (0, 1), **fields: float) -> m.RanksProgressed:
    progress = RankProgress(step=step, saved_step=0, **fields)  # type: ignore[arg-type]
    return m.RanksProgressed(session_key=run.plan.session_key, ranks=dict.fromkeys(ranks, progress))


def training(**options: Any) -> Harness:
    run = Harness("ab", **{"every_s": 60.0, **options})
    run.open("ab")
    return run


def leave(run: Harness, node: str = "a", **left_s: float) -> tuple[m.Effect, ...]:
    return run.feed(
        m.NodesSeen(live=frozenset(run.live), draining=frozenset({node}), left_s=left_s), run.ticked
    )


# -- the signal --------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 999_999_999_999, (1 << 48) - 1])
@pytest.mark.parametrize("urgent", [False, True])
def test_a_signal_keeps_step_and_urgency(step: int, urgent: bool) -> None:
    memory = memoryview(bytearray(8))
    signal = SaveSignal(step=step, number=(1 << 15) - 1, urgent=urgent)
    write_flag(memory, signal.word)
    assert (step_of(read_flag(memory)), is_urgent(read_flag(memory))) == (step, urgent)
    assert signal.word != SaveSignal(step=step, number=1, urgent=urgent).word


# -- by time -----------------------------------------------------------------------------------------


def test_a_step_ahead_of_the_fastest_rank_is_named_when_time_is_up() -> None:
    run = training()
    run.feed(reported(run, 100, ranks=[0], step_s=0.5), reported(run, 103, ranks=[1], step_s=0.5))
    assert not of(run.tick(59), m.AnnounceSaveStep)
    run.feed(reported(run, 200, ranks=[0], step_s=0.5), reported(run, 203, ranks=[1], step_s=0.5))
    named = one(run.tick(1), m.AnnounceSaveStep)
    assert named.nodes == ("a", "b") and not named.signal.urgent
    assert 203 + LEAST_AHEAD <= named.signal.step <= 203 + 8, (
        "3 s at most: ranks report late, and signals travel"
    )


def test_a_slow_step_is_left_time_to_end() -> None:
    run = training()
    run.feed(reported(run, 10, step_s=30.0, since_s=5.0))
    assert one(run.tick(60), m.AnnounceSaveStep).signal.step == 10 + 3, "two are over by now"


def test_no_step_is_announced_without_a_report_of_the_ranks_or_without_the_option() -> None:
    assert not of(training().tick(100), m.AnnounceSaveStep)
    run = training(every_s=None)
    run.feed(reported(run, 5, step_s=0.1))
    assert not of(run.tick(1000), m.AnnounceSaveStep)


def test_the_next_one_is_named_an_interval_after_the_last() -> None:
    run = training()
    run.feed(reported(run, 100, step_s=1.0))
    first = one(run.tick(60), m.AnnounceSaveStep).signal
    run.save(first.step)
    run.feed(reported(run, first.step, step_s=1.0))
    assert not of(run.tick(59), m.AnnounceSaveStep)
    second = one(run.tick(1), m.AnnounceSaveStep).signal
    assert second.step > first.step and second.word != first.word


def test_a_rank_that_is_past_the_step_makes_it_void_and_gets_a_later_one() -> None:
    run = training()
    run.feed(reported(run, 100, step_s=0.005))
    first = one(run.tick(60), m.AnnounceSaveStep).signal
    run.feed(run.stored(run.attempt(first.step), "a"))
    effects = run.feed(reported(run, first.step + 50, ranks=[1], step_s=0.005, missed=first.word))
    (dropped,) = of(effects, m.NotifyOutcome)
    assert isinstance(dropped.error, Unavailable) and not isinstance(dropped.error, SaveNotCollective)
    assert "had passed step" in str(dropped.error)
    second = one(run.tick(0.5), m.AnnounceSaveStep).signal
    assert second.step - (first.step + 50) > (first.step - 100) / 60, "further ahead than before"


def test_a_report_of_an_older_step_does_not_void_a_new_one() -> None:
    run = training()
    run.feed(reported(run, 100, step_s=0.1))
    first = one(run.tick(60), m.AnnounceSaveStep).signal
    run.feed(reported(run, first.step + 1, step_s=0.1, missed=first.word))
    second = one(run.tick(0.5), m.AnnounceSaveStep).signal
    run.feed(reported(run, first.step + 2, step_s=0.1, missed=first.word))
    assert not of(run.tick(0.5), m.AnnounceSaveStep)
    run.save(second.step)
    assert run.records[-1].step == second.step  # type: ignore[union-attr]


def test_a_step_that_nobody_saves_is_given_up() -> None:
    """The ranks are in an evaluation, or at the end of their loop."""
    run = training()
    run.feed(reported(run, 100, step_s=1.0))
    run.tick(60)
    assert not of(run.tick(5), m.AnnounceSaveStep)
    run.tick(30)
    assert of(run.tick(60), m.AnnounceSaveStep)


def test_a_rank_that_saves_alone_is_still_found() -> None:
    run = training(every_s=None)
    run.feed(run.stored(run.attempt(10), "a"))
    (dropped,) = of(run.feed(reported(run, 11, ranks=[1])), m.NotifyOutcome)
    assert isinstance(dropped.error, SaveNotCollective)


def test_a_restarted_coordinator_announces_other_signals() -> None:
    run = training()
    run.feed(reported(run, 100, step_s=1.0))
    first = one(run.tick(60), m.AnnounceSaveStep).signal
    plan = run.plan
    run.start_coordinator()
    run.feed(m.GroupRecovered(plan=plan, inventories=run.inventories()), progress_at(plan, 100))
    second = one(run.tick(60), m.AnnounceSaveStep).signal
    assert second.word != first.word


def progress_at(plan: SessionPlan, step: int) -> m.RanksProgressed:
    progress = RankProgress(step=step, saved_step=0, step_s=1.0)
    return m.RanksProgressed(session_key=plan.session_key, ranks=dict.fromkeys((0, 1), progress))


# -- when a node leaves ------------------------------------------------------------------------------


def test_a_node_that_leaves_has_a_step_named_at_once() -> None:
    run = training(every_s=None)
    run.feed(reported(run, 100, step_s=2.0, since_s=0.1))
    named = one(leave(run), m.AnnounceSaveStep).signal
    assert named.urgent and named.step == 102


def test_one_save_follows_the_other_until_the_node_is_gone() -> None:
    run = training(every_s=None)
    run.feed(reported(run, 100, step_s=0.1))
    first = one(leave(run), m.AnnounceSaveStep).signal
    assert not of(run.tick(0.5), m.AnnounceSaveStep)
    run.save(first.step)
    run.feed(reported(run, first.step + 1, step_s=0.1))
    second = one(run.tick(0.5), m.AnnounceSaveStep).signal
    assert second.urgent and second.step > first.step
    run.save(second.step)
    run.feed(m.NodesSeen(live=frozenset("ab")))
    assert not of(run.tick(5), m.AnnounceSaveStep), "it stays after all"


@pytest.mark.parametrize("was_stored", [True, False])
def test_a_save_that_was_dropped_between_two_looks_makes_way_for_the_next(was_stored: bool) -> None:
    run = training(every_s=None)
    run.feed(reported(run, 100, step_s=0.1))
    attempt = run.attempt(one(leave(run, a=30.0), m.AnnounceSaveStep).signal.step)
    stored = [run.stored(attempt, "a")] if was_stored else []
    run.feed(*stored, m.SaveRefused(attempt=attempt, ranks=(1,), reason="no room"))
    named = one(run.tick(0.5), m.AnnounceSaveStep).signal
    assert named.urgent and named.step > attempt.step


def test_a_save_that_cannot_be_complete_in_time_is_not_begun() -> None:
    run = training(every_s=None)
    run.feed(reported(run, 100, step_s=20.0))
    effects = leave(run, a=15.0)
    assert not of(effects, m.AnnounceSaveStep)
    assert "leave in 15 s; another save would take" in one(effects, m.Warn).text
    assert not of(run.tick(0.5), m.Warn), "reported once"


def test_a_node_that_is_still_there_after_its_time_keeps_nobody_from_saving() -> None:
    run = training(every_s=None)
    run.feed(reported(run, 100, step_s=5.0))
    assert of(leave(run, a=0.0), m.AnnounceSaveStep)


def test_a_save_with_time_enough_is_begun() -> None:
    run = training(every_s=None)
    run.feed(reported(run, 100, step_s=5.0))
    assert of(leave(run, a=30.0), m.AnnounceSaveStep)


def test_a_node_that_leaves_without_ranks_is_none_of_the_groups_business() -> None:
    run = Harness("abc")
    run.open("ab")
    run.feed(reported(run, 100, step_s=1.0))
    assert not of(leave(run, "c"), m.AnnounceSaveStep)


# -- ranks that are never in step --------------------------------------------------------------------


@dataclass(slots=True)
class SimulatedRank:
    step_s: float
    step: int = 0
    saved: list[int] = field(default_factory=list)
    word: int = 0  # on its node's page
    reached: int = 0
    missed: int = 0
    since_s: float = 0.0


def play(seed: int, *, ranks: int = 4, seconds: float = 240.0) -> tuple[Harness, list[SimulatedRank]]:
    """Simulate ranks of different speed without a barrier; signals and progress arrive within a second."""
    rng = Random(seed)
    run = Harness("abcd"[:ranks], every_s=10.0, attempt_timeout_s=20.0)
    nodes = "abcd"[:ranks]
    run.open(nodes)
    pace = rng.choice([0.005, 0.02, 0.3, 2.0])
    group = [SimulatedRank(pace * rng.uniform(1.0, 1.02)) for _ in range(ranks)]
    count = itertools.count()
    todo: list[tuple[float, int, object]] = []

    def at(time_s: float, what: object) -> None:
        heapq.heappush(todo, (time_s, next(count), what))

    def do(effects: Iterable[m.Effect]) -> None:
        for named in of(effects, m.AnnounceSaveStep):
            for k in range(ranks):
                at(run.now_s + rng.uniform(0.0, 1.0), ("shown", k, named.signal.word))

    for k, rank in enumerate(group):
        at(rng.uniform(0, rank.step_s), ("step", k))
        at(rng.uniform(0, 1), ("report", k))
    at(0.5, ("tick",))
    while todo and todo[0][0] < seconds:
        run.now_s, _, what = heapq.heappop(todo)
        match what:
            case ("tick",):
                do(run.tick())
                at(run.now_s + 0.5, what)
            case ("shown", int(k), int(word)):
                group[k].word = word
            case ("report", int(k)):
                rank = group[k]
                progress = RankProgress(
                    step=rank.step,
                    saved_step=rank.saved[-1] if rank.saved else -1,
                    since_s=run.now_s - rank.since_s,
                    step_s=rank.step_s if rank.step > 1 else 0.0,
                    missed=rank.missed,
                )
                at(run.now_s + rng.uniform(0.0, 1.0), ("arrived", k, progress))
                at(run.now_s + 1.0, what)
            case ("arrived", int(k), progress):
                do(
                    run.feed(
                        run.ticked, m.RanksProgressed(session_key=run.plan.session_key, ranks={k: progress})
                    )
                )
            case ("stored", int(k), int(step)):
                attempt = run.attempt(step)
                here = run.plan.nodes[k]
                do(run.feed(run.ticked, run.stored(attempt, here.node_id)))
                do(run.feed(*(run.copied(attempt, here.node_id, h) for h in here.holders)))
            case ("step", int(k)):
                rank = group[k]
                rank.step, rank.since_s = rank.step + 1, run.now_s
                signal = step_of(rank.word)
                if signal == rank.step:
                    rank.reached = rank.word
                    rank.saved.append(rank.step)
                    at(run.now_s + rng.uniform(0.01, 0.3), ("stored", k, rank.step))
                elif 0 < signal < rank.step and rank.word not in (rank.reached, rank.missed):
                    rank.missed = rank.word
                    at(run.now_s + rng.uniform(0.0, 0.2), ("report", k))
                at(run.now_s + rank.step_s, what)
    return run, group


@pytest.mark.parametrize("seed", every_few(range(40), 20))
def test_every_attempt_of_skewed_ranks_is_complete_or_dropped(seed: int) -> None:
    run, group = play(seed)
    everywhere = set.intersection(*(set(rank.saved) for rank in group))
    somewhere = set.union(*(set(rank.saved) for rank in group))
    committed = {c.step for c in run.machine.history.checkpoints.values()}
    assert committed <= everywhere
    last = max(somewhere, default=0)
    dropped = {p.attempt.step for p in of(run.transcript, m.NotifyOutcome) if p.error is not None}
    assert somewhere - everywhere <= dropped | {last}, "a part of a save stays nowhere"
    assert not [p for p in of(run.transcript, m.NotifyOutcome) if isinstance(p.error, SaveNotCollective)]
    interval_s = 10.0 + 2 * MAX_REACH_S if len(somewhere) > len(everywhere) + 3 else 25.0
    assert len(committed) >= 240.0 / interval_s - 2, "time goes by, and checkpoints come"


# -- what a hostile reading has found ------------------------------------------------------------------


@pytest.mark.parametrize("sees_it", [True, False])
def test_a_step_that_a_dead_coordinator_named_is_no_misuse(sees_it: bool) -> None:
    run = training()
    run.feed(reported(run, 100, step_s=0.1))
    named, plan = one(leave(run, a=30.0), m.AnnounceSaveStep).signal, run.plan
    run.start_coordinator()
    run.feed(m.GroupRecovered(plan=plan, inventories=run.inventories()))
    run.feed(run.stored(run.attempt(named.step), "a"))
    missed = named.word if sees_it else 0
    effects = run.feed(reported(run, named.step + 5, ranks=[1], step_s=0.1, missed=missed))
    (dropped,) = of(effects, m.NotifyOutcome)
    assert isinstance(dropped.error, Unavailable) and not isinstance(dropped.error, SaveNotCollective)


def test_after_a_coordinator_has_died_a_step_that_is_due_by_number_is_misuse_as_before() -> None:
    run = training(every_steps=10)
    plan = run.plan
    run.start_coordinator()
    run.feed(m.GroupRecovered(plan=plan, inventories=run.inventories()))
    run.feed(run.stored(run.attempt(20), "a"))
    (dropped,) = of(run.feed(reported(run, 25, ranks=[1], step_s=0.1)), m.NotifyOutcome)
    assert isinstance(dropped.error, SaveNotCollective)


def test_an_evaluation_puts_an_emergency_save_neither_far_away_nor_off() -> None:
    run = training(every_s=None)
    run.feed(reported(run, 1000, step_s=0.5, since_s=600.0))
    assert one(leave(run, a=120.0), m.AnnounceSaveStep).signal.step <= 1010


def test_the_time_since_the_last_report_of_the_ranks_is_not_needed_again() -> None:
    run = training(every_s=None)
    run.feed(reported(run, 100, step_s=0.3, since_s=0.2))
    run.tick(1.5)
    assert of(leave(run, a=3.2), m.AnnounceSaveStep), "3.9 s after the reports, and 2.2 s from now"


def test_no_step_is_named_while_all_nodes_still_write_the_last_one() -> None:
    run = training(every_s=None)
    run.feed(reported(run, 100, step_s=0.5))
    first = one(leave(run, a=120.0), m.AnnounceSaveStep).signal.step
    captured = RankProgress(step=first + 1, saved_step=first, step_s=0.5)
    for _ in range(45):
        effects = run.tick(1.0) + run.feed(
            m.RanksProgressed(session_key=run.plan.session_key, ranks={0: captured, 1: captured})
        )
        assert not of(effects, m.AnnounceSaveStep)
    run.save(first)
    assert of(run.tick(0.5), m.AnnounceSaveStep)


@pytest.mark.parametrize("left_s", [{"a": 30.0}, {}], ids=["past its time", "without a time"])
def test_a_node_that_is_to_go_and_stays_has_no_saves_without_end(left_s: dict[str, float]) -> None:
    run = training(every_s=None)
    step = num_saves = 0
    for second in range(1800):
        step += 2
        run.feed(reported(run, step, step_s=0.5))
        for named in of(
            leave(run, "a", **{n: max(0.0, s - second) for n, s in left_s.items()}), m.AnnounceSaveStep
        ):
            step, num_saves = named.signal.step, num_saves + 1
            run.save(step)
        run.now_s += 1.0
    assert 0 < num_saves < 200


def test_saves_of_an_emergency_do_not_change_the_pace_of_auto() -> None:
    run = training(every_s="auto")
    step = 1
    for _ in range(8):
        step, run.now_s = step + 10, run.now_s + 5
        calm = RankProgress(step=step, saved_step=step, step_s=0.5, stall_s=0.05)
        run.feed(m.RanksProgressed(session_key=run.plan.session_key, ranks={0: calm, 1: calm}), run.ticked)
        run.save(step)
    before_s = run.machine._intervals.interval_s
    assert before_s is not None
    for _ in range(20):
        waits = RankProgress(step=step, saved_step=0, step_s=0.5, stall_s=10.0)
        run.feed(m.RanksProgressed(session_key=run.plan.session_key, ranks={0: waits, 1: waits}))
        for named in of(leave(run, a=100.0), m.AnnounceSaveStep):
            step = named.signal.step
            run.save(step)
        run.now_s += 1
    assert run.machine._intervals.interval_s == pytest.approx(before_s, rel=0.2)
