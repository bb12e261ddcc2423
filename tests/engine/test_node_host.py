"""Stories of a node's host: orders and their epochs, callers, barriers, progress, the end of a restore."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.barriers import BARRIER_S
from ray_ckpt.core.progress import PROGRESS_GATHER_S, fresh_s, progress_period_s
from ray_ckpt.core.values import RankProgress
from ray_ckpt.engine.node_host import PROBE_EVERY_S, PROBE_FOR_S
from ray_ckpt.engine.node_ports import (
    AskAwaited,
    CallerLeft,
    EndAwaited,
    NodeHostEvent,
    OutcomeAwaited,
    PeerProbed,
    ProbePeer,
    RankMet,
    RankProgressed,
    RankRestored,
    SessionAwaited,
    SurvivorCame,
)
from ray_ckpt.engine.node_session import (
    BARRIER_GATHER_S,
    MAX_BARRIERS,
    NO_COORDINATOR_S,
    RESTORED_AGAIN_S,
)
from ray_ckpt.errors import Fenced, RestoreError, RunConflict, RunInUse, RunSuperseded, Unavailable
from ray_ckpt.types import Level, RankRestore, SaveFacts
from tests.core.test_node_machine import MANIFEST, attempt, every_order, plan, published, sealed, written
from tests.engine.node_driver import NodeStory

FOLDERS = (attempt(10).directory, attempt(20).directory)
GONE = Unavailable("no coordinator")


def started(node: str = "a") -> NodeStory:
    story = NodeStory(node)
    assert story.start() is None
    story.ports.memory.clear()
    return story


def met(token: str, rank: int, number: int = 1, session: int = 1) -> RankMet:
    return RankMet(token=token, session_key=(0, session), rank=rank, number=number)


def restored(token: str, rank: int, session: int = 1) -> RankRestored:
    return RankRestored(token=token, session_key=(0, session), report=RankRestore(rank=rank))


def progressed(step: int) -> RankProgressed:
    return RankProgressed(session_key=(0, 1), rank=0, progress=RankProgress(step=step, saved_step=-1))


def went(story: NodeStory, *tokens: str) -> list[object]:
    return [story.ports.replies.get(token, "waits") for token in tokens]


# -- orders ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", every_order(3), ids=lambda order: type(order).__name__)
def test_an_order_has_no_effect_before_its_epoch_is_durable(order: n.Order) -> None:
    story = started()
    story.is_slow = True
    before = (story.host.plan, story.host.session)
    assert story.order("new", order) == "none"
    assert story.ports.works == [(n.PersistEpoch(epoch=3), "")]
    assert (story.host.plan, story.host.session) == before and not story.ports.memory
    story.is_slow = False
    story.end()
    assert story.ports.replies["new"] is None
    assert story.host.machine.epoch == 3


def test_orders_whose_epoch_cannot_be_written_fail_and_later_ones_try_again() -> None:
    story = started()
    story.is_slow = True
    full = OSError("disk full")
    assert [story.order("new", n.EpochSeen(epoch=3)), story.order("old", n.EpochSeen(epoch=2))] == [
        "none"
    ] * 2
    story.end(full)
    assert went(story, "new", "old") == [full, full]
    assert story.order("again", n.EpochSeen(epoch=2)) == "none", "nothing was obeyed"
    story.end()
    assert went(story, "again") == [None]
    assert story.host.machine.epoch == 2


def test_of_orders_that_wait_for_the_disk_those_of_lower_epochs_are_refused() -> None:
    story = started()
    story.is_slow = True
    story.order("first", n.EpochSeen(epoch=2))
    story.order("third", n.EpochSeen(epoch=4))
    story.order("second", n.EpochSeen(epoch=3))
    story.end()
    assert went(story, "first", "third", "second") == [None, "waits", "waits"]
    story.end()
    assert went(story, "third") == [None]
    refused = story.ports.replies["second"]
    assert isinstance(refused, Fenced) and refused.fields["epoch"] == 4


def test_the_order_to_exit_fails_while_a_group_is_at_work() -> None:
    story = started()
    story.order("exit", n.ExitOrdered(session_key=(0, 1), epoch=1))
    assert isinstance(story.ports.replies["exit"], RunInUse)


def test_a_deletion_is_answered_when_all_folders_are_gone_or_have_an_error() -> None:
    story = started()
    story.is_slow = True
    assert story.order("gone", n.DeleteOrdered(directories=FOLDERS, epoch=1)) == "none"
    story.end()
    assert went(story, "gone") == ["waits"]
    story.end()
    assert went(story, "gone") == [None]
    story.order("stays", n.DeleteOrdered(directories=FOLDERS, epoch=1))
    story.end(OSError("io"))
    assert went(story, "stays") == ["waits"]
    story.end()
    assert went(story, "stays") == [{FOLDERS[0]: "OSError: io"}]
    assert story.order("none", n.DeleteOrdered(directories=(), epoch=1)) is None


def test_a_run_that_cannot_be_deleted_is_not_put_away() -> None:
    story, error = started(), OSError("io")
    story.is_slow = True
    story.order("away", n.RunPutAway(kept=(), epoch=1))
    story.end(error)
    assert went(story, "away") == [error]


def test_a_run_that_is_put_away_fails_whoever_waits() -> None:
    story = started()
    story.host.handle(
        OutcomeAwaited(token="level", attempt=attempt(10), level=Level.DURABLE),
        EndAwaited(token="end", session_key=(0, 1)),
        EndAwaited(token="later", session_key=(0, 2)),
        met("barrier", 0),
        restored("restore", 0),
    )
    assert story.order("away", n.RunPutAway(kept=(), epoch=1)) is None
    for token in ("barrier", "restore", "end"):
        assert isinstance(story.ports.replies[token], RunSuperseded)
    for token in ("level", "later"):
        assert isinstance(story.ports.replies[token], Unavailable)
    assert story.ports.memory == ["free"]


# -- callers -----------------------------------------------------------------------------------------


def test_whoever_waits_for_an_outcome_is_woken_at_the_level_and_by_a_drop() -> None:
    story, at = started(), attempt(10)
    for level in Level:
        story.host.handle(OutcomeAwaited(token=level.label, attempt=at, level=level))
    story.host.handle(OutcomeAwaited(token="left", attempt=at, level=Level.LOCAL), CallerLeft(token="left"))
    story.order("1", published(at, Level.REPLICATED))
    names = [level.label for level in Level]
    outcomes = went(story, *names)
    assert [isinstance(found, n.SaveOutcome) for found in outcomes] == [True, True, False]
    assert went(story, "left") == ["waits"]
    story.host.handle(OutcomeAwaited(token="late", attempt=at, level=Level.LOCAL))
    assert went(story, "late") == [n.SaveOutcome(level=Level.REPLICATED, error=None)]
    error = Unavailable("dropped")
    story.host.handle(OutcomeAwaited(token="drop", attempt=attempt(20), level=Level.LOCAL))
    story.order("2", published(attempt(20), error=error))
    assert story.ports.replies["drop"] == n.SaveOutcome(level=None, error=error, is_deleted=True)


def test_whoever_waits_for_the_end_of_a_session_is_woken_by_that_end_alone() -> None:
    story = started()
    over = RunSuperseded("over")
    story.host.handle(EndAwaited(token="1", session_key=(0, 1)))
    story.order("old", n.SessionEnded(session_key=(0, 0), error=over, epoch=1))
    assert went(story, "1") == ["waits"]
    story.start(2)
    assert isinstance(story.ports.replies["1"], RunSuperseded)
    story.host.handle(EndAwaited(token="2", session_key=(0, 2)), EndAwaited(token="late", session_key=(0, 1)))
    assert isinstance(story.ports.replies["late"], RunSuperseded)
    story.start(1)
    story.start(2)
    assert went(story, "2") == ["waits"], "late and repeated orders"
    story.order("end", n.SessionEnded(session_key=(0, 2), error=over, epoch=1))
    assert went(story, "2") == [over]


def test_a_session_with_the_number_of_one_that_was_not_logged_is_not_over() -> None:
    story = started()
    story.start(3)
    story.host.handle(EndAwaited(token="unlogged", session_key=(0, 3)))
    again = n.SessionStarted(plan=replace(plan(3), epoch=2), node_id="a", epoch=2)
    assert story.order("again", again) is None
    assert isinstance(story.ports.replies["unlogged"], RunSuperseded)
    story.host.handle(EndAwaited(token="3", session_key=(2, 3)))
    assert went(story, "3") == ["waits"]


def test_the_ranks_of_a_session_of_the_same_number_that_was_not_logged_do_not_count() -> None:
    story = started()
    again = n.SessionStarted(plan=replace(plan(1), epoch=2), node_id="a", epoch=2)
    assert story.order("again", again) is None
    old = met("barrier", 0), restored("restore", 0)
    story.host.handle(progressed(20), *old, AskAwaited(token="question", session_key=(0, 1)))
    story.wait(PROGRESS_GATHER_S)
    assert not story.ports.reports
    for token in ("barrier", "restore", "question"):
        assert isinstance(story.ports.replies[token], RunSuperseded)


def test_ranks_wait_for_the_first_session_and_its_end_frees_the_memory() -> None:
    story = NodeStory("a")
    story.host.handle(SessionAwaited(token="early", session_key=(0, 1)))
    assert went(story, "early") == ["waits"]
    story.start()
    assert went(story, "early") == [None]
    story.start(1)
    assert story.ports.memory == ["begin 1", "show nothing"], "once"
    over = RunSuperseded("over")
    story.order("end", n.SessionEnded(session_key=(0, 1), error=over, epoch=1))
    assert story.ports.memory[2:] == ["free"], "the next group is not on this node"


# -- the end of a run --------------------------------------------------------------------------------

RELEASED = n.RunReleased(session_key=(0, 1), is_finished=False, epoch=1)
CALLS: dict[str, NodeHostEvent] = {
    "end": EndAwaited(token="end", session_key=(0, 1)),
    "question": AskAwaited(token="question", session_key=(0, 1)),
    "offer": SurvivorCame(token="offer", session_key=(0, 1), rank=0, steps=(3,)),
    "barrier": met("barrier", 0),
    "restore": restored("restore", 0),
    "save": OutcomeAwaited(token="save", attempt=attempt(10), level=Level.LOCAL),
    "level": OutcomeAwaited(token="level", attempt=attempt(20), level=Level.REPLICATED),
    "lost save": OutcomeAwaited(token="lost save", attempt=attempt(30), level=Level.LOCAL),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_waits_ends_when_the_run_is_released(call: str) -> None:
    """The ranks of a run that has failed are dead, and Ray would keep their calls for good."""
    story = started()
    story.host.handle(sealed(attempt(10), 0))  # and never by rank 1
    story.order("committed", published(attempt(20), Level.LOCAL))
    story.host.handle(CALLS[call])
    assert went(story, call) == ["waits"]
    late = n.RunReleased(session_key=(0, 0), is_finished=False, epoch=1)
    assert story.order("late", late) is None and went(story, call) == ["waits"], "another session is at work"
    assert story.order("over", RELEASED) is None
    answer = story.ports.replies[call]
    if isinstance(answer, n.SaveOutcome):
        assert answer.level is None
        answer = answer.error
    assert answer is False if call == "question" else isinstance(answer, RunSuperseded)
    story.order("again", RELEASED)
    story.start(2)  # no call is answered twice


@pytest.mark.parametrize("call", CALLS)
def test_a_call_after_the_release_of_its_run_does_not_wait(call: str) -> None:
    story = started()
    story.host.handle(sealed(attempt(10), 0))
    story.order("over", RELEASED)
    story.host.handle(CALLS[call])
    assert went(story, call) != ["waits"]


def test_a_released_run_has_no_timers_and_reports_nothing() -> None:
    story = started()
    story.host.handle(restored("restore", 0), met("barrier", 0))
    story.host.handle(progressed(1))
    story.order("over", RELEASED)
    story.wait(max(RESTORED_AGAIN_S, BARRIER_GATHER_S, PROGRESS_GATHER_S))
    assert not story.ports.timers and not story.ports.reports


def test_the_release_of_a_run_ends_no_save_and_lets_the_next_session_begin() -> None:
    """A save that is being written may still be complete, and the next group then continues from it."""
    story, at = started(), attempt(10)
    story.host.handle(sealed(at, 0), sealed(at, 1))
    story.order("over", RELEASED)
    assert not story.ports.memory, "shards are written from it"
    story.host.handle(written(at, 0), written(at, 1))
    assert story.ports.memory == ["release 0", "release 1", "free"]
    story.host.handle(n.FragmentWritten(attempt=at, entry=MANIFEST))
    (stored,) = story.ports.reports
    assert isinstance(stored, m.NodeStored)
    awaited = SessionAwaited(token="early", session_key=(0, 2))
    story.host.handle(awaited, EndAwaited(token="next", session_key=(0, 2)))
    story.start(2)
    assert went(story, "early", "next") == [None, "waits"]


# -- reports -----------------------------------------------------------------------------------------


def test_a_stored_save_is_reported_with_its_facts_and_sent_to_its_holders() -> None:
    story, at = started(), attempt(10)
    story.host.handle(sealed(at, 0), sealed(at, 1), written(at, 0), written(at, 1))
    story.host.handle(n.FragmentWritten(attempt=at, entry=MANIFEST))
    (stored,) = story.ports.reports
    assert isinstance(stored, m.NodeStored)
    assert (stored.node_id, stored.facts, stored.epoch) == ("a", SaveFacts(mesh="dp=2"), 1)
    kinds = [type(work) for work, _ in story.ports.works]
    assert kinds == [n.WriteShard, n.WriteShard, n.WriteFragment, n.SendCopy, n.SendCopy]
    assert story.ports.memory == ["release 0", "release 1"]


def test_a_silent_peer_is_probed_until_it_answers_or_for_long_enough() -> None:
    story, at = started(), attempt(10)
    silent = n.CopyEnded(attempt=at, node_index=0, holder="b", epoch=1, error="silent", is_unreachable=True)
    story.host.handle(silent)
    for is_there in (False, True):
        assert not story.host.machine.reaches("b")
        story.wait(PROBE_EVERY_S)
        probe, _ = story.ports.works.pop()
        assert isinstance(probe, ProbePeer) and probe.peer == "b"
        story.host.handle(PeerProbed(peer="b", is_there=is_there, until_s=probe.until_s))
    assert story.host.machine.reaches("b") and not story.ports.timers
    story.host.handle(silent)
    story.wait(PROBE_FOR_S)
    assert story.host.machine.reaches("b") and not story.ports.works
    story.host.handle(silent)
    story.order("over", n.RunReleased(session_key=(0, 1), is_finished=False, epoch=1))
    story.wait(PROBE_EVERY_S)
    assert story.host.machine.reaches("b") and not story.ports.works


def test_the_progress_of_all_ranks_is_one_report_of_their_session() -> None:
    story = started()
    for rank, session in ((0, 1), (1, 1), (1, 7)):
        progress = RankProgress(step=10 * session, saved_step=-1)
        story.host.handle(RankProgressed(session_key=(0, session), rank=rank, progress=progress))
    story.wait(PROGRESS_GATHER_S)
    (report,) = story.ports.reports
    assert isinstance(report, m.RanksProgressed) and report.session_key == (0, 1)
    assert {rank: progress.step for rank, progress in report.ranks.items()} == {0: 10, 1: 10}
    assert 0 < story.ports.may_wait_s < PROGRESS_GATHER_S, "each report is sent before the next one"
    story.answer(value=("awaited",))
    assert story.host.awaited == ("awaited",)  # type: ignore[comparison-overlap]
    story.host.handle(progressed(20))
    story.start(2)
    story.wait(PROGRESS_GATHER_S)
    assert not story.ports.reports, "its session is over"


def test_an_agent_that_comes_late_to_a_session_keeps_no_memory_for_its_restore() -> None:
    """Its ranks have restored with the agent before it, and report their progress."""
    story = started()
    for step in (10, 11):
        progress = RankProgress(step=step, saved_step=-1)
        story.host.handle(RankProgressed(session_key=(0, 1), rank=0, progress=progress))
    assert story.ports.memory == ["free restore"], "at the first report"


def test_a_missed_save_step_is_reported_at_once_and_progress_seldom_in_a_large_group() -> None:
    assert [progress_period_s(n) for n in (1, 1_800, 4_000, 10_000, 100_000)] == [0.9, 1.8, 4.0, 10.0, 10.0]
    assert [fresh_s(n) for n in (1, 1_800, 4_000, 10_000)] == [10.0, 10.0, 12.0, 30.0]
    story = started()
    story.host.handle(progressed(1))
    late = RankProgress(step=2, saved_step=-1, missed=7)
    story.host.handle(RankProgressed(session_key=(0, 1), rank=0, progress=late))
    assert len(story.ports.timers) == 2, "the usual one, and one for the missed step"
    story.wait(PROGRESS_GATHER_S)
    (report,) = story.ports.reports
    assert isinstance(report, m.RanksProgressed) and report.ranks == {0: late}
    assert story.ports.may_wait_s == 0, "a save step waits for it"
    story.host.handle(RankProgressed(session_key=(0, 1), rank=0, progress=late))
    story.wait(PROGRESS_GATHER_S)
    assert story.ports.may_wait_s > 0


# -- barriers ----------------------------------------------------------------------------------------


def reached(ranks: tuple[int, ...], number: int = 1) -> m.BarrierReached:
    return m.BarrierReached(token="", session_key=(0, 1), number=number, ranks=ranks)


def test_ranks_of_a_node_come_to_a_barrier_together_and_late_ones_get_the_same_answer() -> None:
    story = started()
    story.host.handle(met("0", 0))
    assert not story.ports.reports
    story.host.handle(met("1", 1))
    assert story.ports.reports == [reached((0, 1))]
    story.wait(BARRIER_GATHER_S)
    assert len(story.ports.reports) == 1
    assert went(story, "0", "1") == ["waits"] * 2
    story.answer(m.BarrierAnswer(missing=()))
    assert went(story, "0", "1") == [(), ()]
    story.host.handle(met("late", 1))
    assert went(story, "late") == [()]
    story.host.handle(progressed(1))
    story.wait(PROGRESS_GATHER_S)
    assert isinstance(report := story.ports.reports[0], m.RanksProgressed) and report.met == 1


def test_ranks_that_wait_for_another_on_their_node_are_reported_early() -> None:
    story = started()
    story.host.handle(met("1", 1))
    story.wait(BARRIER_GATHER_S)
    story.host.handle(met("0", 0))
    assert story.ports.reports == [reached((1,)), reached((0, 1))]
    story.answer(m.BarrierAnswer(missing=(2,)))
    story.answer(m.BarrierAnswer(missing=(2,)))
    assert went(story, "0", "1") == [(2,), (2,)]
    story.host.handle(progressed(1))
    story.wait(PROGRESS_GATHER_S)
    assert isinstance(report := story.ports.reports[0], m.RanksProgressed) and report.met == 0


def test_a_barrier_is_reported_again_while_no_coordinator_answers_and_then_given_up() -> None:
    story = started()
    story.host.handle(met("0", 0), met("1", 1))
    while story.ports.reports:
        assert story.ports.reports == [reached((0, 1))]
        story.answer(error=GONE)
        story.wait(BARRIER_GATHER_S)
    assert BARRIER_S < story.now_s <= BARRIER_S + 2 * BARRIER_GATHER_S
    assert went(story, "0", "1") == [GONE, GONE]
    story.host.handle(met("0 again", 0), met("0 at 2", 0, 2), met("1 at 2", 1, 2))
    assert went(story, "0 again") == [GONE]
    lost = RunConflict("the run is lost")
    story.answer(error=lost)
    assert went(story, "0 at 2", "1 at 2") == [lost, lost]


def test_a_barrier_ends_with_its_session_and_takes_no_rank_of_another() -> None:
    story = started()
    story.host.handle(met("0", 0), met("alien", 2), met("other", 0, session=7))
    assert isinstance(story.ports.replies["alien"], RunSuperseded)
    assert isinstance(story.ports.replies["other"], RunSuperseded)
    story.start(2)
    assert isinstance(story.ports.replies["0"], RunSuperseded)
    story.order("end", n.SessionEnded(session_key=(0, 2), error=RunSuperseded("over"), epoch=1))
    story.host.handle(met("none", 0, session=2))
    assert isinstance(story.ports.replies["none"], Unavailable)


def test_ranks_hang_at_no_barrier_that_is_forgotten() -> None:
    story = started()
    story.host.handle(*(met(str(number), 0, number) for number in range(MAX_BARRIERS + 1)))
    assert isinstance(story.ports.replies["0"], Unavailable)
    assert went(story, "1") == ["waits"]


# -- restores ----------------------------------------------------------------------------------------


def test_ranks_train_when_the_whole_group_has_restored() -> None:
    story = started()
    story.host.handle(restored("1", 1))
    story.wait(RESTORED_AGAIN_S)
    waiting = m.RanksRestored(session_key=(0, 1), node_id="a", ranks=(1,))
    assert story.ports.reports == [waiting]
    story.answer(value=("awaited",))
    story.host.handle(restored("0", 0))
    (report,) = story.ports.reports
    assert isinstance(report, m.NodeRestored)
    assert (report.session_key, report.node_id, len(report.ranks)) == ((0, 1), "a", 2)
    assert went(story, "0", "1") == ["waits"] * 2
    story.answer()
    assert went(story, "0", "1") == [True, True]
    assert story.ports.memory == ["free restore", "free arenas"]
    story.host.handle(restored("late", 0))
    assert went(story, "late") == [True]
    story.wait(RESTORED_AGAIN_S)
    assert not story.ports.reports and not story.ports.timers


def test_ranks_that_report_their_restore_again_after_an_error_are_reported_again() -> None:
    story = started()
    story.host.handle(restored("0", 0), restored("1", 1))
    story.answer(error=RestoreError("No checkpoint is left."))
    story.wait(RESTORED_AGAIN_S)
    assert went(story, "0", "1") != ["waits"] * 2 and not story.ports.reports and not story.ports.timers
    story.host.handle(restored("again", 0))
    story.ports.reports.clear()
    story.wait(RESTORED_AGAIN_S)
    assert [type(report) for report in story.ports.reports] == [m.RanksRestored]


@pytest.mark.parametrize("has_progress", [True, False])
def test_a_rank_trains_whose_agent_died_between_two_answers(has_progress: bool) -> None:
    """Rank 0 got `go`, and reports nothing more of its restore to the next agent, the one of this story."""
    story = started()
    if has_progress:
        story.host.handle(progressed(0))
        story.ports.timers.clear()
    story.host.handle(restored("1", 1))
    story.wait(RESTORED_AGAIN_S)
    assert went(story, "1") == ["waits"]
    story.answer(error=GONE)
    assert went(story, "1") == ["waits"]
    story.wait(RESTORED_AGAIN_S)
    story.answer(value=None)
    assert went(story, "1") == [True]
    assert "free arenas" not in story.ports.memory, "rank 0 has one of this session"
    story.wait(RESTORED_AGAIN_S)
    assert not story.ports.timers


def test_a_rank_that_goes_on_before_the_others_takes_no_memory_from_their_restores() -> None:
    """Parts that a driver restores one after the other: the first reports its progress while others read."""
    story = started()
    story.host.handle(restored("0", 0))
    story.host.handle(progressed(0))
    assert "free restore" not in story.ports.memory
    story.host.handle(restored("1", 1))
    story.ports.reports[:] = [report for report in story.ports.reports if isinstance(report, m.NodeRestored)]
    story.answer()
    assert story.ports.memory == ["free restore", "free arenas"]


def test_ranks_restore_again_when_the_group_falls_back_to_an_older_checkpoint() -> None:
    story = started()
    story.host.handle(restored("0", 0), restored("1", 1))
    story.answer(value=plan(2))
    assert went(story, "0", "1") == ["waits"] * 2, "until its plan is here"
    story.start(2, left=((0, 1),))
    assert went(story, "0", "1") == [False, False]
    assert "free arenas" not in story.ports.memory
    story.host.handle(restored("late", 0), restored("again", 0, 2))
    assert went(story, "late", "again") == [False, "waits"]


def test_ranks_restore_again_although_their_agent_died_while_the_group_fell_back() -> None:
    story = started()
    story.start(3, left=((0, 2),))
    story.host.handle(restored("left", 0, 2), restored("stray", 1, 1))
    assert went(story, "left") == [False]
    assert isinstance(story.ports.replies["stray"], RunSuperseded), "of a group that is over"


def test_a_rank_that_waits_for_its_group_is_no_rank_of_the_next_group() -> None:
    """Another rank died before it had restored, and the user started the group again."""
    story = started()
    story.host.handle(restored("0", 0))
    story.start(2)
    assert isinstance(story.ports.replies["0"], RunSuperseded)


def test_a_rank_begins_in_a_session_of_its_own_group_only() -> None:
    """One that builds its model for long may ask when the next group has opened."""
    story = NodeStory()
    for session in (1, 2, 3, 4):
        story.host.handle(SessionAwaited(token=f"early {session}", session_key=(0, session)))
    story.start(1)
    assert went(story, "early 1", "early 2") == [None, "waits"], "the agent is new and has the last plan"
    story.start(3, left=((0, 2),))
    assert went(story, "early 2", "early 3", "early 4") == [None, None, "waits"]
    for session in (1, 2, 3):
        story.host.handle(SessionAwaited(token=f"late {session}", session_key=(0, session)))
    assert isinstance(story.ports.replies["late 1"], RunSuperseded)
    assert went(story, "late 2", "late 3") == [None, None]
    story.order("end", n.SessionEnded(session_key=(0, 4), error=RunSuperseded("over"), epoch=1))
    assert isinstance(story.ports.replies["early 4"], RunSuperseded)


def test_a_restore_is_reported_until_a_coordinator_answers() -> None:
    story = started()
    story.host.handle(restored("0", 0), restored("1", 1))
    (report,) = story.ports.reports
    for error in (GONE, Fenced("Another coordinator owns the run."), Unavailable("No run is open here.")):
        story.answer(error=error)
        assert went(story, "0", "1") == ["waits"] * 2 and not story.ports.reports
        story.wait(RESTORED_AGAIN_S)
        assert story.ports.reports == [report]
    story.answer()
    assert went(story, "0", "1") == [True, True]


def test_a_coordinator_that_dies_late_in_a_restore_is_waited_for_too() -> None:
    story = started()
    story.host.handle(restored("0", 0), restored("1", 1))
    (report,) = story.ports.reports
    story.now_s += 2 * NO_COORDINATOR_S
    story.answer(error=GONE)
    assert went(story, "0", "1") == ["waits"] * 2
    story.wait(RESTORED_AGAIN_S)
    assert story.ports.reports == [report]


def test_ranks_whose_session_did_not_begin_get_the_reason() -> None:
    """The coordinator has answered with an error, and then knows nothing of the session any more."""
    story, reason = started(), Unavailable("A node did not take session 2: it is full.")
    story.host.handle(restored("0", 0), restored("1", 1))
    story.answer(error=reason)
    story.wait(RESTORED_AGAIN_S)
    story.answer(error=RunSuperseded("A newer session owns this run."))
    assert went(story, "0", "1") == [reason, reason]


def test_a_new_coordinator_hears_of_a_restore_whoever_had_its_answer() -> None:
    """The last one has answered this node and no other."""
    story = started()
    story.host.handle(restored("0", 0))
    returned = n.CoordinatorReturned(epoch=1)
    assert story.order("early", returned) is None and not story.ports.reports, "rank 1 still reads"
    story.host.handle(restored("1", 1))
    (report,) = story.ports.reports
    story.answer()
    story.order("late", returned)
    assert story.ports.reports == [report]
    story.answer()
    assert went(story, "0", "1") == [True, True]
    assert story.ports.memory.count("free restore") == 1


def test_a_restore_fails_without_a_coordinator_and_with_its_session() -> None:
    story = started()
    story.host.handle(restored("0", 0), restored("1", 1))
    story.answer(error=GONE)
    story.wait(NO_COORDINATOR_S)
    story.answer(error=GONE)
    story.wait(RESTORED_AGAIN_S)
    story.answer(error=GONE)
    assert went(story, "0", "1") == [GONE, GONE]
    story.start(2)
    story.host.handle(restored("2", 0, 2))
    over = RunSuperseded("over")
    story.order("end", n.SessionEnded(session_key=(0, 2), error=over, epoch=1))
    assert went(story, "2") == [over]
