"""Ranks that others wait for, with several on each node: who is missing, and when that is misuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_ckpt.core import messages as m
from ray_ckpt.core.awaited import MAX_NAMED, awaited_restore
from ray_ckpt.core.barriers import BARRIER_S, MAX_ENDED
from ray_ckpt.core.captures import MAX_CAPTURES
from ray_ckpt.core.missing_ranks import STAYS_OUT_S
from ray_ckpt.core.progress import FRESH_S
from ray_ckpt.core.values import Captured, RankProgress
from ray_ckpt.errors import CheckpointError, RunSuperseded, SaveNotCollective, Unavailable
from ray_ckpt.format.save_signal import SaveSignal
from ray_ckpt.types import AttemptId
from tests.core.driver import Harness, of


def opened(nodes: str = "a", *, ranks_per_node: int = 2, **options: Any) -> Harness:
    run = Harness(nodes, ranks_per_node=ranks_per_node, **{"replicas": 0, **options})
    run.open(nodes)
    return run


def at(step: int, saved_step: int = 0, **more: Any) -> RankProgress:
    return RankProgress(step=step, saved_step=saved_step, **more)


def progress(
    run: Harness, ranks: dict[int, RankProgress], *captured: tuple[AttemptId, tuple[int, ...]]
) -> tuple[m.Effect, ...]:
    """Report the progress of a node's ranks; return the effects of the report and of a tick 1 s later."""
    reported = tuple(Captured(attempt=attempt, ranks=ranks) for attempt, ranks in captured)
    event = m.RanksProgressed(session_key=run.plan.session_key, ranks=ranks, captured=reported)
    return (*run.feed(event), *run.tick(1.0))


def errors(effects: tuple[m.Effect, ...]) -> list[CheckpointError | None]:
    return [publish.error for publish in of(effects, m.NotifyOutcome)]


PASSED = {
    "it is beyond the step": at(11),
    "it saved the steps around it": at(12, 12, saved_before=8),
    "its optimizer is beyond that of a rank that saved": at(0, updates=11),
    "its loop is over": at(7, is_over=True),
}


@pytest.mark.parametrize("why", PASSED)
def test_a_rank_that_never_comes_is_found_on_one_node(why: str) -> None:
    run = opened()
    attempt = run.attempt(10)
    saver = at(10, 10, saved_before=0, updates=10, saved_updates=10)
    effects = progress(run, {0: saver, 1: PASSED[why]}, (attempt, (0,)))
    (error,) = errors(effects)
    assert isinstance(error, SaveNotCollective) and error.fields == {"step": 10, "missing_ranks": (1,)}
    assert not errors(progress(run, {0: saver, 1: PASSED[why]}, (attempt, (0,)))), "reported once"


COMES = {
    "it is in the step": at(9, updates=10),
    "it has completed the step and is about to save it": at(10, updates=10),
    "it has saved it, and its capture is on its way": at(13, 10, saved_before=0, updates=13),
    "it evaluates": at(9, since_s=600.0, updates=10),
}


@pytest.mark.parametrize("why", COMES)
def test_a_rank_that_may_still_come_is_not_accused(why: str) -> None:
    run = opened(attempt_timeout_s=60)
    attempt = run.attempt(10)
    ranks = {0: at(10, 10, saved_before=0, updates=10, saved_updates=10), 1: COMES[why]}
    for _ in range(90):
        assert not errors(progress(run, ranks, (attempt, (0,))))
    run.feed(run.stored(attempt, "a"))
    assert [c.step for c in run.machine.history.lineage()] == [10], "and then it is a checkpoint"


def test_a_rank_that_lives_and_does_nothing_is_found_after_a_while() -> None:
    run = opened()
    attempt, waited_s = run.attempt(10), 0.0
    found: list[CheckpointError | None] = []
    while not found:
        found = errors(progress(run, {0: at(10, 10, saved_before=0), 1: at(0)}, (attempt, (0,))))
        waited_s += 1.0
        assert waited_s < STAYS_OUT_S + 5.0
    assert waited_s > STAYS_OUT_S and isinstance(found[0], SaveNotCollective)


def test_it_is_found_also_if_its_node_forgets_older_saves() -> None:
    run = opened()
    found: list[CheckpointError | None] = []
    for step in range(10, 10 + int(STAYS_OUT_S) + 5):
        saver = at(step, step, saved_before=step - 1)
        found += errors(progress(run, {0: saver, 1: at(0)}, (run.attempt(step), (0,))))
    assert isinstance(found[0], SaveNotCollective)


def test_of_two_nodes_the_rank_and_not_its_node_is_named() -> None:
    run = opened("ab")
    attempt = run.attempt(10)
    run.feed(run.stored(attempt, "a"))
    saved = at(10, 10, saved_before=0)
    assert not errors(progress(run, {2: saved, 3: at(9, 5, saved_before=0)}, (attempt, (2,))))
    (awaited,) = (*run.tick(10.0), *run.machine.view.awaited())[-1:]
    assert awaited.ranks == (3,)  # type: ignore[union-attr]
    (error,) = errors(run.tick(60.0))
    assert isinstance(error, Unavailable) and "Rank(s) 3 did not finish" in str(error)
    assert "rank 3 has completed step 9 last" in str(error)


def test_a_rank_that_was_past_an_agreed_step_is_no_misuse() -> None:
    run = opened(every_s=100.0)
    progress(run, {0: at(5), 1: at(5)})
    run.tick(101.0)
    (named,) = of(run.transcript, m.AnnounceSaveStep)
    assert isinstance(named.signal, SaveSignal)
    step = named.signal.step
    effects = progress(run, {0: at(step, step, saved_before=0), 1: at(step + 1)}, (run.attempt(step), (0,)))
    (error,) = errors(effects)
    assert isinstance(error, Unavailable) and not isinstance(error, SaveNotCollective)


def test_late_or_repeated_progress_opens_nothing_again() -> None:
    run = opened()
    attempt = run.attempt(10)
    run.save(10)
    ranks = {0: at(12, 10, saved_before=0), 1: at(12, 10, saved_before=0)}
    assert not errors(progress(run, ranks, (attempt, (0,))))
    refused = run.attempt(20)
    run.feed(m.SaveRefused(attempt=refused, ranks=(1,), reason="busy"))
    assert not errors(progress(run, {0: at(21, 20), 1: at(21, 10)}, (refused, (0,))))
    other = run.attempt(30)
    run.open("a")
    assert not errors(progress(run, {0: at(31, 30), 1: at(31, 10)}, (other, (0,))))
    assert not run.machine.view.awaited() and not run.machine._attempts


def test_captures_that_are_no_longer_reported_are_forgotten_and_bounded() -> None:
    run = opened()
    for step in range(1, 3 * MAX_CAPTURES):
        progress(run, {}, (run.attempt(step), (0,)))
    assert len(run.machine._progress.captures._found) <= MAX_CAPTURES
    run.tick(FRESH_S + 1.0)
    assert not run.machine.view.awaited()


def test_a_save_that_lacks_a_rank_does_not_hold_up_the_end_of_the_run() -> None:
    run = opened()
    run.save(10)
    progress(run, {0: at(20, 20, saved_before=10), 1: at(19, 10, saved_before=0)}, (run.attempt(20), (0,)))
    run.feed(m.FinishRequested(token="finish", ends_group=True))
    for drain in of(run.transcript, m.Drain):
        run.drained(drain)
    description = of(run.transcript, m.WriteDescription)[-1]
    run.feed(m.DescriptionWritten(attempt=description.checkpoint.id, error=None))
    assert "finish" in [reply.token for reply in of(run.transcript, m.Reply)]


# -- the restore -----------------------------------------------------------------------------------------


def test_a_restore_names_the_ranks_that_it_waits_for() -> None:
    run = Harness("ab", ranks_per_node=2)
    run.feed(run.group("ab"))
    session_key = run.plan.session_key
    run.feed(
        m.RanksRestored(session_key=session_key, node_id="a", ranks=(0,)),
        m.RanksRestored(session_key=session_key, node_id="a", ranks=(0,)),
    )
    assert not run.machine.view.awaited(), "they may only be slow"
    effects = run.tick(6.0)
    (awaited,) = run.machine.view.awaited()
    assert (awaited.what, awaited.ranks, awaited.speaker) == ("restore", (1, 2, 3), 0)
    assert "make a Checkpointer" in awaited.text and not of(effects, m.Warn)
    run.feed(m.RanksRestored(session_key=session_key, node_id="a", ranks=(0, 1)))
    effects = run.tick(10.0)
    (awaited,) = run.machine.view.awaited()
    assert awaited.ranks == (2, 3)
    assert [warn.text for warn in of(effects, m.Warn)] == [awaited.text]
    assert not of(run.tick(600.0), m.Warn), "logged once"
    run.feed(m.RanksRestored(session_key=(9, 9), node_id="b", ranks=(2,)))
    assert run.machine.view.awaited()[0].ranks == (2, 3)
    for node in "ab":
        assert not run.machine.view.has_go(session_key)
        run.feed(run.restored(node))
    assert run.machine.view.has_go(session_key) and not run.machine.view.has_go((9, 9))
    run.feed(m.RanksRestored(session_key=session_key, node_id="a", ranks=(0,)))
    run.tick(10.0)
    assert not run.machine.view.awaited()


def test_a_restarted_coordinator_names_the_ranks_that_a_restore_waits_for() -> None:
    run = Harness("ab")
    run.feed(run.group("ab"))
    plan = run.plan
    run.start_coordinator()
    run.feed(m.GroupRecovered(plan=plan, inventories=run.inventories()))
    assert not run.machine.view.is_training
    run.feed(m.RanksRestored(session_key=plan.session_key, node_id="a", ranks=(0,)))
    run.tick(6.0)
    assert [(found.what, found.ranks) for found in run.machine.view.awaited()] == [("restore", (1,))]
    other = m.RanksProgressed(session_key=(9, 9), ranks={0: at(1)})
    run.feed(other)
    assert not run.machine.view.is_training
    run.feed(replace(other, session_key=plan.session_key))
    run.tick(1.0)
    assert run.machine.view.is_training and not run.machine.view.awaited(), "they have `go` by now"


def test_a_group_that_has_restored_trains_also_for_a_restarted_coordinator() -> None:
    """While it may restore, its checkpoint is kept and repair waits."""
    run = Harness("ab")
    run.open("ab")
    run.save(10)
    run.feed(run.group("ab"))
    plan = run.plan
    for is_training in (False, True):
        run.start_coordinator()
        run.feed(m.GroupRecovered(plan=plan, inventories=run.inventories()))
        assert run.machine.view.is_training == is_training
        run.feed(run.restored("a"), run.restored("b"))
        assert run.machine.view.is_training


def test_the_ranks_of_a_text_are_bounded() -> None:
    awaited = awaited_restore(tuple(range(2, 10_000)), 7.0)
    assert awaited.ranks == tuple(range(2, 2 + MAX_NAMED)) and awaited.speaker == 0
    assert "2, 3, " in awaited.text and "and 9978 more" in awaited.text and len(awaited.text) < 300
    assert awaited_restore((0, 1, 5), 7.0).speaker == 2


# -- meetings --------------------------------------------------------------------------------------------


def met(run: Harness, number: int, *ranks: int) -> tuple[m.Effect, ...]:
    session_key, token = run.plan.session_key, f"{number} {ranks}"
    return run.feed(m.BarrierReached(token=token, session_key=session_key, number=number, ranks=ranks))


def replies(effects: tuple[m.Effect, ...]) -> dict[str, object]:
    return {r.token: r.value.missing for r in of(effects, m.Reply) if isinstance(r.value, m.BarrierAnswer)}


def test_a_barrier_is_entered_when_all_have_come() -> None:
    run = opened("ab")
    assert not replies(met(run, 10, 0)) and not replies(met(run, 10, 0, 1))
    assert replies(met(run, 10, 2, 3)) == {"10 (0,)": (), "10 (0, 1)": (), "10 (2, 3)": ()}
    assert replies(met(run, 10, 2, 3)) == {"10 (2, 3)": ()}, "a repeated request"


def test_a_barrier_that_a_rank_does_not_come_to_is_entered_by_nobody() -> None:
    run = opened("ab")
    met(run, 10, 0, 1)
    met(run, 10, 2)
    assert not replies(run.tick(BARRIER_S))
    effects = run.tick(1.0)
    assert replies(effects) == {"10 (0, 1)": (3,), "10 (2,)": (3,)}
    assert "rank(s) 3 did not come" in of(effects, m.Warn)[0].text
    assert replies(met(run, 10, 2, 3)) == {"10 (2, 3)": (3,)}, "who comes late does not enter it either"
    assert replies(met(run, 20, 0, 1)) == {}, "the next one is another"
    run.tick(6.0)
    assert [(a.what, a.step, a.ranks) for a in run.machine.view.awaited()] == [("report", 20, (2, 3))]


def test_those_who_were_let_in_by_the_coordinator_before_are_not_left_alone() -> None:
    run = opened("ab")
    met(run, 10, 2, 3)
    reported = m.RanksProgressed(session_key=run.plan.session_key, ranks={0: at(10)}, met=10)
    assert replies(run.feed(reported)) == {"10 (2, 3)": ()}
    assert not replies(run.feed(reported)), "the reply is sent once"


def test_meetings_are_of_one_session_and_bounded() -> None:
    run = opened("a")
    met(run, 10, 0)
    old = run.plan.session_key
    run.open("a")
    effects = (*run.transcript, *run.tick(0.0))
    assert [f.token for f in of(effects, m.Fail) if isinstance(f.error, RunSuperseded)] == ["10 (0,)"]
    (fail,) = of(run.feed(m.BarrierReached(token="old", session_key=old, number=10, ranks=(1,))), m.Fail)
    assert isinstance(fail.error, RunSuperseded)
    for number in range(1, 2 * MAX_ENDED):
        met(run, number, 0, 1)
    assert len(run.machine._barriers._ended) == MAX_ENDED and not run.machine._barriers._open
