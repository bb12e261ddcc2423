"""Stories of the node machine: shard files, then the fragment, then the report, then copies."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from ray_ckpt.core import node_messages as n
from ray_ckpt.core.node_machine import MAX_SETTLED, MAX_UNSETTLED, NodeMachine
from ray_ckpt.core.step_states import salvage_of
from ray_ckpt.core.values import Salvage, SessionNode, SessionPlan
from ray_ckpt.errors import CheckpointError, RunSuperseded, Unavailable
from ray_ckpt.format.digest import digest
from ray_ckpt.format.names import make_attempt, shard_file
from ray_ckpt.format.save_signal import SaveSignal
from ray_ckpt.types import AttemptId, FileEntry, Level, ManifestRow

UID = digest(b"run")
MANIFEST = FileEntry(name="manifest-00000-of-00002.parquet", size_bytes=5, digest=digest(b"m"))


def plan(session: int = 1) -> SessionPlan:
    nodes = (
        SessionNode(node_id="a", node_index=0, ranks=(0, 1), holders=("b", "c")),
        SessionNode(node_id="b", node_index=1, ranks=(2,), holders=("a",)),
    )
    return SessionPlan(run_uid=UID, session=session, world_size=3, nodes=nodes, resume=None)


def started(node: str = "a") -> NodeMachine:
    machine = NodeMachine(epoch=1)
    begin = n.BeginSession(plan=plan(), replaced=None)
    assert machine.handle(n.SessionStarted(plan=plan(), node_id=node, epoch=1)) == (begin,)
    return machine


def attempt(step: int, *, session: int = 1) -> AttemptId:
    return make_attempt(run_uid=UID, session=session, step=step, attempt=0)


def sealed(at: AttemptId, rank: int, *, replicated: str = "same") -> n.ShardSealed:
    metrics = {"loss": 0.5} if rank == 0 else None
    return n.ShardSealed(attempt=at, rank=rank, replicated=(replicated,), metrics=metrics)


def written(at: AttemptId, rank: int) -> n.ShardWritten:
    file = FileEntry(name=shard_file(rank, 3), size_bytes=8, digest=digest(bytes([rank])))
    row = ManifestRow(kind="header", file=file.name, byte_offset=0, nbytes=8, digest=file.digest)
    return n.ShardWritten(attempt=at, rank=rank, files=(file,), rows=(row,))


def published(
    at: AttemptId, level: Level | None = None, error: CheckpointError | None = None
) -> n.OutcomeNotified:
    return n.OutcomeNotified(attempt=at, level=level, error=error, epoch=1)


def test_a_save_goes_through_its_phases_in_order() -> None:
    machine, at = started(), attempt(10)
    assert machine.handle(sealed(at, 1)) == (n.WriteShard(attempt=at, rank=1),)
    assert machine.handle(sealed(at, 0)) == (n.WriteShard(attempt=at, rank=0),)
    second, first = written(at, 1), written(at, 0)
    assert machine.handle(second) == (n.Release(attempt=at, rank=1),)
    release, write = machine.handle(first)
    assert release == n.Release(attempt=at, rank=0)
    assert isinstance(write, n.WriteFragment)
    fragment = write.fragment
    assert (fragment.node_index, fragment.num_nodes, fragment.world_size, fragment.ranks) == (0, 2, 3, (0, 1))
    assert fragment.files == (*first.files, *second.files), "in rank order, whoever was first"
    assert fragment.rows == (*first.rows, *second.rows)

    assert machine.handle(n.FragmentWritten(attempt=at, entry=MANIFEST)) == (
        n.ReportStored(
            epoch=1,
            attempt=at,
            node_index=0,
            fragment=MANIFEST,
            size_bytes=MANIFEST.size_bytes + sum(file.size_bytes for file in fragment.files),
            replicated=("same",),
            metrics={"loss": 0.5},
        ),
        n.SendCopy(epoch=1, attempt=at, node_index=0, holder="b"),
        n.SendCopy(epoch=1, attempt=at, node_index=0, holder="c"),
    )
    done = machine.handle(published(at, Level.LOCAL))
    assert done == (n.ResolveSave(attempt=at, level=Level.LOCAL, error=None),)
    assert machine.handle(published(at, Level.DURABLE)) == (
        n.ResolveSave(attempt=at, level=Level.DURABLE, error=None),
    )
    assert machine.outcomes[at.attempt] == n.SaveOutcome(level=Level.DURABLE, error=None)


def test_a_new_coordinator_gets_reports_of_what_is_complete_here() -> None:
    machine, at, open_ = started("b"), attempt(10), attempt(20)
    machine.handle(sealed(at, 2))
    machine.handle(written(at, 2))
    first = machine.handle(n.FragmentWritten(attempt=at, entry=MANIFEST))
    machine.handle(sealed(open_, 2))
    assert machine.handle(n.CoordinatorReturned(epoch=1)) == first
    machine.handle(published(at, Level.LOCAL))
    assert machine.handle(n.CoordinatorReturned(epoch=1)) == ()


def test_a_rank_that_seals_twice_is_written_once() -> None:
    machine, at = started(), attempt(10)
    machine.handle(sealed(at, 0))
    assert machine.handle(sealed(at, 0)) == ()


def test_ranks_of_a_node_that_differ_are_reported() -> None:
    machine, at = started(), attempt(10)
    for rank in (0, 1):
        machine.handle(sealed(at, rank, replicated=f"digest-{rank}"))
        machine.handle(written(at, rank))
    report = machine.handle(n.FragmentWritten(attempt=at, entry=MANIFEST))[0]
    assert isinstance(report, n.ReportStored) and report.replicated == ("digest-0", "digest-1")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_dropped_attempt_is_deleted_whoever_still_writes(rank: int) -> None:
    machine, at, error = started(), attempt(10), Unavailable("no")
    machine.handle(sealed(at, 0))
    assert machine.handle(published(at, error=error)) == (
        n.ResolveSave(attempt=at, level=None, error=error),
        n.DeleteFolder(directory=at.directory),
    )
    if rank == 0:  # was writing
        assert machine.handle(written(at, 0)) == (
            n.Release(attempt=at, rank=0),
            n.DeleteFolder(directory=at.directory),
        )
    else:  # comes late
        assert machine.handle(sealed(at, 1)) == (
            n.Release(attempt=at, rank=1),
            n.ResolveSave(attempt=at, level=None, error=error),
        )
    assert machine.handle(n.FragmentWritten(attempt=at, entry=MANIFEST)) == (
        n.DeleteFolder(directory=at.directory),
    )


def test_a_failed_rank_refuses_for_the_node_once() -> None:
    machine, at = started(), attempt(10)
    machine.handle(sealed(at, 0))
    release, report, settle, delete = machine.handle(n.SaveFailed(attempt=at, rank=1, reason="disk full"))
    assert release == n.Release(attempt=at, rank=1)
    assert report == n.ReportRefused(attempt=at, ranks=(1,), reason="disk full")
    assert isinstance(settle, n.ResolveSave) and isinstance(settle.error, Unavailable)
    assert delete == n.DeleteFolder(directory=at.directory)
    assert machine.handle(n.SaveFailed(attempt=at, rank=0, reason="too")) == (
        n.Release(attempt=at, rank=0),
        delete,  # a write that had begun may have made the folder again
    )


def test_a_new_session_ends_saves_but_leaves_their_files() -> None:
    """The saves may have been committed a moment ago; the coordinator deletes orphans later."""
    machine, at = started(), attempt(10)
    machine.handle(sealed(at, 0))
    settle, begin = machine.handle(n.SessionStarted(plan=plan(2), node_id="a", epoch=1))
    assert isinstance(settle, n.ResolveSave) and isinstance(settle.error, RunSuperseded)
    assert begin == n.BeginSession(plan=plan(2), replaced=(0, 1))


@pytest.mark.parametrize("node", ["b", "z"])
def test_a_rank_of_another_node_or_session_is_released_at_once(node: str) -> None:
    machine = started(node)
    for at in (attempt(10), attempt(10, session=7)):
        release, settle = machine.handle(sealed(at, 0))
        assert release == n.Release(attempt=at, rank=0)
        assert isinstance(settle, n.ResolveSave) and isinstance(settle.error, RunSuperseded)


def test_a_save_of_another_session_has_its_error_as_the_outcome() -> None:
    """Also of a session that is newer than the one which the node has: a new coordinator does not know it."""
    machine, at = started(), attempt(10, session=7)
    machine.handle(sealed(at, 0))
    outcome = machine.outcome(at, Level.LOCAL)
    assert outcome is not None and isinstance(outcome.error, RunSuperseded) and not outcome.is_deleted


def test_a_save_on_an_agent_without_a_session_fails_and_does_not_end_its_ranks() -> None:
    machine, at = NodeMachine(epoch=1), attempt(10)
    release, settle = machine.handle(sealed(at, 0))
    assert release == n.Release(attempt=at, rank=0)
    assert isinstance(settle, n.ResolveSave) and isinstance(settle.error, Unavailable)


def test_an_outcome_for_a_holder_deletes_its_copy() -> None:
    machine, at, error = started("z"), attempt(10), Unavailable("dropped")
    assert n.DeleteFolder(directory=at.directory) in machine.handle(published(at, error=error))
    assert n.DeleteFolder(directory=at.directory) not in machine.handle(published(at, Level.REPLICATED))


def test_outcomes_are_bounded() -> None:
    machine = started()
    for step in range(MAX_SETTLED + 10):
        machine.handle(published(attempt(step), Level.LOCAL))
    assert len(machine.outcomes) == MAX_SETTLED
    assert attempt(MAX_SETTLED + 9).attempt in machine.outcomes


def test_an_unknown_event_is_an_error() -> None:
    with pytest.raises(TypeError, match="unknown event"):
        NodeMachine().handle("hello")  # type: ignore[arg-type]


def test_the_last_orders_of_a_fenced_coordinator_are_void() -> None:
    """Otherwise a late drop would delete a checkpoint that the next coordinator has committed."""
    machine, at = started("z"), attempt(10)
    machine.handle(n.EpochPersisted(epoch=2))
    error = Unavailable("dropped by the old one")
    refused = machine.handle(n.OutcomeNotified(attempt=at, level=None, error=error, epoch=1))
    assert refused == (n.RefuseOrder(epoch=2),)
    (settle,) = machine.handle(n.OutcomeNotified(attempt=at, level=Level.LOCAL, error=None, epoch=2))
    assert settle == n.ResolveSave(attempt=at, level=Level.LOCAL, error=None)


def test_a_drop_that_is_repeated_deletes_what_came_back() -> None:
    """A copy that was on its way when its attempt was dropped."""
    machine, at, error = started("z"), attempt(10), Unavailable("dropped")
    machine.handle(n.OutcomeNotified(attempt=at, level=None, error=error, epoch=1))
    assert machine.handle(n.OutcomeNotified(attempt=at, level=None, error=error, epoch=1)) == (
        n.DeleteFolder(directory=at.directory),
    )
    assert machine.handle(n.OutcomeNotified(attempt=at, level=Level.LOCAL, error=None, epoch=1)) == ()


# -- orders and sessions -----------------------------------------------------------------------------


def every_order(epoch: int) -> list[n.Order]:
    """Return an order of each kind, as a coordinator of that epoch sends it about session 1."""
    at = attempt(10)
    session = replace(plan(), epoch=epoch)
    return [
        n.SessionStarted(plan=session, node_id="a", epoch=epoch),
        n.SessionEnded(session_key=(0, 1), error=RunSuperseded("over"), epoch=epoch),
        n.OutcomeNotified(attempt=at, level=None, error=Unavailable("dropped"), epoch=epoch),
        n.EpochSeen(epoch=epoch),
        n.ExitOrdered(session_key=(epoch + 1, 1), epoch=epoch),
        n.CoordinatorReturned(epoch=epoch),
        n.CopyOrdered(attempt=at, node_index=0, holder="b", epoch=epoch),
        n.DeleteOrdered(directories=(at.directory,), epoch=epoch),
        n.SaveStepAnnounced(
            session_key=session.session_key, signal=SaveSignal(step=20, number=1), epoch=epoch
        ),
        n.SurvivorsAsked(session_key=session.session_key, epoch=epoch),
        n.SalvageOrdered(salvage=Salvage(session_key=session.session_key), epoch=epoch),
        n.RunReleased(session_key=session.session_key, is_finished=True, epoch=epoch),
        n.RunPutAway(kept=(), epoch=epoch),
    ]


def complete(machine: NodeMachine, at: AttemptId) -> tuple[n.NodeEffect, ...]:
    """Let both ranks of node a seal and write; the fragment is then on the disk."""
    for rank in (0, 1):
        machine.handle(sealed(at, rank))
        machine.handle(written(at, rank))
    return machine.handle(n.FragmentWritten(attempt=at, entry=MANIFEST))


def test_the_stories_of_orders_have_every_kind() -> None:
    assert {type(order) for order in every_order(1)} == set(get_args(n.Order))


@pytest.mark.parametrize("order", every_order(1), ids=lambda order: type(order).__name__)
def test_no_order_of_a_lower_epoch_is_obeyed(order: n.Order) -> None:
    machine, at = NodeMachine(epoch=2), attempt(10)
    machine.handle(n.SessionStarted(plan=plan(), node_id="a", epoch=2))
    reported = complete(machine, at)
    before = (machine.plan, machine.here, machine.epoch, dict(machine.outcomes))
    assert machine.handle(order) == (n.RefuseOrder(epoch=2),)
    assert (machine.plan, machine.here, machine.epoch, dict(machine.outcomes)) == before
    assert machine.handle(n.CoordinatorReturned(epoch=2)) == reported, "and its save is as it was"


@pytest.mark.parametrize("order", every_order(3), ids=lambda order: type(order).__name__)
def test_a_higher_epoch_is_on_disk_before_what_it_orders_is_done(order: n.Order) -> None:
    machine, at = started(), attempt(10)
    reported = complete(machine, at)
    for _ in range(2):  # also if the disk did not take it the first time
        assert machine.handle(order) == (n.PersistEpoch(epoch=3),)
        assert (machine.plan, machine.epoch, machine.is_released) == (plan(), 1, False)
        assert machine.handle(n.CoordinatorReturned(epoch=1)) == reported
    assert machine.handle(n.EpochPersisted(epoch=3)) == ()
    assert machine.epoch == 3
    assert n.PersistEpoch(epoch=3) not in machine.handle(order), "once is enough"


@pytest.mark.parametrize(("session_key", "exits"), [((0, 0), False), ((0, 1), False), ((0, 2), True)])
def test_an_agent_exits_if_its_group_is_older_than_all_that_the_coordinator_knows(
    session_key: tuple[int, int], exits: bool
) -> None:
    machine = started()
    order = n.ExitOrdered(session_key=session_key, epoch=1)
    assert machine.handle(order) == (() if exits else (n.RefuseExit(),))
    machine.handle(n.RunReleased(session_key=(0, 1), is_finished=True, epoch=1))
    assert machine.handle(order) == (), "no group is at work"


def test_a_restarted_agent_obeys_no_lower_epoch_than_before() -> None:
    machine = NodeMachine(epoch=7)
    assert machine.handle(n.EpochSeen(epoch=6)) == (n.RefuseOrder(epoch=7),)
    assert machine.handle(n.EpochSeen(epoch=7)) == ()


@pytest.mark.parametrize(
    ("first", "then", "wins"),
    [
        ((1, 4), (2, 3), "then"),  # the fourth of epoch 1 never came into the log
        ((2, 3), (1, 4), "first"),
        ((1, 3), (2, 3), "then"),
        ((2, 3), (1, 3), "first"),
        ((2, 3), (2, 4), "then"),
        ((2, 4), (2, 3), "first"),
    ],
)
def test_of_two_plans_the_one_that_was_opened_later_is_at_work(
    first: tuple[int, int], then: tuple[int, int], wins: str
) -> None:
    """Whatever the order in which they come; first the epoch counts, then the number."""
    machine, plans = NodeMachine(epoch=5), {}
    for name, (epoch, session) in {"first": first, "then": then}.items():
        plans[name] = replace(plan(session), epoch=epoch)
        machine.handle(n.SessionStarted(plan=plans[name], node_id="a", epoch=5))
    assert machine.plan == plans[wins]


def test_attempts_of_a_session_with_the_same_number_are_not_taken() -> None:
    machine = NodeMachine(epoch=2)
    machine.handle(n.SessionStarted(plan=replace(plan(), epoch=2), node_id="a", epoch=2))
    other = make_attempt(run_uid=UID, epoch=1, session=1, step=10, attempt=0)
    release, settle = machine.handle(sealed(other, 0))
    assert release == n.Release(attempt=other, rank=0)
    assert isinstance(settle, n.ResolveSave) and isinstance(settle.error, RunSuperseded)


def test_an_ended_session_settles_its_saves_and_takes_no_more() -> None:
    machine, stored, open_ = started(), attempt(10), attempt(20)
    complete(machine, stored)
    machine.handle(sealed(open_, 0))
    error = RunSuperseded("another cluster has the run")
    assert machine.handle(n.SessionEnded(session_key=(0, 1), error=error, epoch=1)) == (
        n.ResolveSave(attempt=stored, level=None, error=error),
        n.ResolveSave(attempt=open_, level=None, error=error),
        n.EndSession(session_key=(0, 1), error=error),
    )
    assert machine.plan is None and machine.here is None
    assert not machine.is_deleted(stored.attempt), "it may have been committed; files stay"
    assert machine.handle(written(open_, 0)) == (n.Release(attempt=open_, rank=0), n.FreeMemory())
    late = attempt(30)
    release, settle = machine.handle(sealed(late, 0))
    assert release == n.Release(attempt=late, rank=0)
    assert isinstance(settle, n.ResolveSave) and isinstance(settle.error, RunSuperseded)
    assert machine.handle(n.CoordinatorReturned(epoch=1)) == ()


def test_the_end_of_an_older_session_leaves_the_one_at_work() -> None:
    machine = started()
    machine.handle(n.SessionStarted(plan=plan(2), node_id="a", epoch=1))
    assert machine.handle(n.SessionEnded(session_key=(0, 1), error=RunSuperseded("over"), epoch=1)) == ()
    assert machine.plan == plan(2)


def test_a_late_start_of_a_session_that_is_over_begins_nothing() -> None:
    machine = started()
    late = n.SessionStarted(plan=plan(), node_id="a", epoch=1)
    assert machine.handle(late) == (), "it is at work"
    machine.handle(n.SessionStarted(plan=plan(2), node_id="a", epoch=1))
    assert machine.handle(late) == ()
    assert machine.plan == plan(2)
    machine.handle(n.SessionEnded(session_key=(0, 2), error=RunSuperseded("over"), epoch=1))
    for session in (1, 2):
        assert machine.handle(n.SessionStarted(plan=plan(session), node_id="a", epoch=1)) == ()
    assert machine.plan is None
    (begin,) = machine.handle(n.SessionStarted(plan=plan(3), node_id="a", epoch=1))
    assert begin == n.BeginSession(plan=plan(3), replaced=None)


@pytest.mark.parametrize("fails", [False, True])
def test_a_released_run_keeps_its_memory_until_shards_are_written_from_it(fails: bool) -> None:
    """The last save of a run that has failed would be lost otherwise."""
    machine, at = started(), attempt(10)
    for rank in (0, 1):
        machine.handle(sealed(at, rank))
    released = n.RunReleased(session_key=(0, 1), is_finished=False, epoch=1)
    assert not [effect for effect in machine.handle(released) if isinstance(effect, n.FreeMemory)]
    assert n.FreeMemory() not in machine.handle(written(at, 0))
    failed = n.SaveFailed(attempt=at, rank=1, reason="no space")
    effects = machine.handle(failed if fails else written(at, 1))
    assert effects.count(n.FreeMemory()) == 1
    assert any(isinstance(effect, n.WriteFragment) for effect in effects) != fails


@pytest.mark.parametrize("fails", [False, True])
def test_the_memory_of_an_ended_session_is_freed_after_the_writes_from_it(fails: bool) -> None:
    machine, at = started(), attempt(10)
    for rank in (0, 1):
        machine.handle(sealed(at, rank))
    ended = n.SessionEnded(session_key=(0, 1), error=RunSuperseded("over"), epoch=1)
    for order in (ended, ended):  # the second one is repeated
        assert n.FreeMemory() not in machine.handle(order)
    assert n.FreeMemory() not in machine.handle(written(at, 0))
    failed = n.SaveFailed(attempt=at, rank=1, reason="no space")
    assert n.FreeMemory() in machine.handle(failed if fails else written(at, 1))
    assert n.FreeMemory() in machine.handle(ended), "memory of ranks that came late"


def test_the_memory_of_an_ended_session_stays_while_the_next_group_may_need_it() -> None:
    machine, over = started(), RunSuperseded("over")
    kept = n.SessionEnded(session_key=(0, 1), error=over, epoch=1, frees=False)
    assert machine.handle(kept) == (n.EndSession(session_key=(0, 1), error=over),)
    ended = n.SessionEnded(session_key=(0, 1), error=over, epoch=1)
    assert n.FreeMemory() in machine.handle(ended), "that group trains"


def test_the_memory_of_a_session_that_begins_is_not_freed_for_an_earlier_one() -> None:
    machine, at = started(), attempt(10)
    machine.handle(sealed(at, 0))
    ended = n.SessionEnded(session_key=(0, 1), error=RunSuperseded("over"), epoch=1)
    machine.handle(ended)
    machine.handle(n.SessionStarted(plan=plan(2), node_id="a", epoch=1))
    assert machine.handle(ended) == (), "a late order"
    assert n.FreeMemory() not in machine.handle(written(at, 0))


def test_a_run_is_released_only_after_its_last_session() -> None:
    machine = started()
    machine.handle(n.SessionStarted(plan=plan(2), node_id="a", epoch=1))
    late = n.RunReleased(session_key=(0, 1), is_finished=True, epoch=1)
    assert machine.handle(late) == () and not machine.is_released
    released = replace(late, session_key=(0, 2))
    end, free = machine.handle(released)
    assert isinstance(end, n.EndSession) and (end.session_key, free) == ((0, 2), n.FreeMemory())
    assert (machine.is_released, machine.is_finished, machine.plan) == (True, True, plan(2))
    assert machine.handle(n.SessionStarted(plan=plan(2), node_id="a", epoch=1)) == (), "a repeated order"
    assert machine.is_released
    machine.handle(n.SessionStarted(plan=plan(3), node_id="a", epoch=1))
    assert not machine.is_released and not machine.is_finished


def test_a_save_of_a_session_that_is_over_has_an_outcome_for_whoever_waits() -> None:
    machine, at, open_ = started(), attempt(10), attempt(20)
    assert machine.outcome(at, Level.LOCAL) is None
    machine.handle(sealed(open_, 0))
    machine.handle(n.SessionStarted(plan=plan(2), node_id="a", epoch=1))
    for over in (at, open_):
        outcome = machine.outcome(over, Level.LOCAL)
        assert outcome is not None and isinstance(outcome.error, RunSuperseded)
    assert machine.outcome(at, Level.REPLICATED) is None, "the checkpoint that the session restored"
    machine.handle(published(at, Level.DURABLE))
    for level in Level:
        outcome = machine.outcome(at, level)
        assert outcome is not None and outcome.level is Level.DURABLE
    assert machine.outcome(attempt(30, session=2), Level.LOCAL) is None


def test_what_is_being_deleted_is_not_part_of_the_inventory() -> None:
    machine, at = started(), attempt(10)
    complete(machine, at)
    assert not machine.is_deleted(at.attempt)
    machine.handle(published(at, error=Unavailable("dropped")))
    assert machine.is_deleted(at.attempt)


def test_a_level_does_not_bring_back_what_a_session_has_ended_but_a_drop_removes_it() -> None:
    machine, at = started(), attempt(10)
    complete(machine, at)
    machine.handle(n.SessionStarted(plan=plan(2), node_id="a", epoch=1))
    assert not machine.is_deleted(at.attempt)
    assert machine.handle(published(at, Level.LOCAL)) == ()
    assert machine.handle(published(at, error=Unavailable("dropped"))) == (
        n.DeleteFolder(directory=at.directory),
    )
    assert machine.is_deleted(at.attempt)


@pytest.mark.parametrize("late", ["shard", "fragment"])
def test_files_of_a_save_that_a_new_session_ended_stay_for_the_coordinator_to_judge(late: str) -> None:
    """The save may have been committed from an inventory while the agent was still busy."""
    machine, at = started(), attempt(10)
    for rank in (0, 1):
        machine.handle(sealed(at, rank))
    machine.handle(n.SessionStarted(plan=plan(2), node_id="a", epoch=1))
    if late == "shard":
        assert machine.handle(written(at, 0)) == (n.Release(attempt=at, rank=0),)
    else:
        assert machine.handle(n.FragmentWritten(attempt=at, entry=MANIFEST)) == ()


def test_a_fragment_that_is_reported_after_its_commit_stays() -> None:
    machine, at = started(), attempt(10)
    for rank in (0, 1):
        machine.handle(sealed(at, rank))
        machine.handle(written(at, rank))
    machine.handle(published(at, Level.LOCAL))
    assert machine.handle(n.FragmentWritten(attempt=at, entry=MANIFEST)) == ()


def test_copies_and_deletes_are_done_as_ordered() -> None:
    machine, at = started("z"), attempt(10)
    assert machine.handle(n.CopyOrdered(attempt=at, node_index=1, holder="b", epoch=1)) == (
        n.SendCopy(epoch=1, attempt=at, node_index=1, holder="b", is_repair=True),
    )
    assert machine.handle(n.DeleteOrdered(directories=(at.directory, attempt(20).directory), epoch=1)) == (
        n.DeleteFolder(directory=at.directory),
        n.DeleteFolder(directory=attempt(20).directory),
    )


def test_an_evicted_attempt_is_still_wanted_on_the_storage_path() -> None:
    machine, evicted, retired = started("z"), attempt(10), attempt(20)
    names = (evicted.directory, retired.directory)
    machine.handle(n.DeleteOrdered(directories=names, evicted=names[:1], epoch=1))
    machine.handle(n.DeleteOrdered(directories=names, evicted=names, epoch=1))  # late
    assert machine.is_deleted(evicted.attempt) and machine.is_deleted(retired.attempt)
    assert (machine.is_unwanted(evicted.attempt), machine.is_unwanted(retired.attempt)) == (False, True)
    machine.handle(n.DeleteOrdered(directories=names, epoch=1))
    assert machine.is_unwanted(evicted.attempt)


def test_without_a_coordinator_only_the_newest_saves_are_waited_for() -> None:
    machine = started()
    settled = [
        effect
        for step in range(1, MAX_UNSETTLED + 3)
        for effect in machine.handle(sealed(attempt(step), 0))
        if isinstance(effect, n.ResolveSave)
    ]
    assert [settle.attempt.step for settle in settled] == [1, 2]
    assert all(isinstance(settle.error, Unavailable) for settle in settled)
    assert not machine.is_deleted(attempt(1).attempt), "it may have been committed"


def test_an_unreachable_peer_is_waited_for_once_and_probed_until_it_answers() -> None:
    machine = started()
    sent = machine.handle(n.CopyOrdered(attempt=attempt(1), node_index=0, holder="b", epoch=1))
    assert sent == (n.SendCopy(epoch=1, attempt=attempt(1), node_index=0, holder="b", is_repair=True),)
    silent = n.CopyEnded(
        attempt=attempt(1), node_index=0, holder="b", epoch=1, error="silent", is_unreachable=True
    )
    reported = n.ReportCopied(
        attempt=attempt(1), node_index=0, holder="b", epoch=1, error="silent", is_unreachable=True
    )
    assert machine.handle(silent) == (n.CheckPeer(peer="b"), reported)
    assert machine.handle(silent) == (reported,), "it is probed already"
    assert not machine.reaches("b")
    (at_once,) = machine.handle(n.CopyOrdered(attempt=attempt(2), node_index=0, holder="b", epoch=1))
    assert isinstance(at_once, n.ReportCopied)
    assert (at_once.attempt, at_once.is_unreachable) == (attempt(2), True)
    (other,) = machine.handle(n.CopyOrdered(attempt=attempt(2), node_index=0, holder="c", epoch=1))
    assert isinstance(other, n.SendCopy)
    assert machine.handle(n.PeerReturned(peer="b")) == ()
    (again,) = machine.handle(n.CopyOrdered(attempt=attempt(2), node_index=0, holder="b", epoch=1))
    assert isinstance(again, n.SendCopy)


def test_a_copy_that_fails_for_another_reason_proves_nothing_about_the_link_to_its_holder() -> None:
    machine = started()
    ended = n.CopyEnded(attempt=attempt(1), node_index=0, holder="b", epoch=1, error="disk full")
    assert machine.handle(ended) == (
        n.ReportCopied(attempt=attempt(1), node_index=0, holder="b", epoch=1, error="disk full"),
    )
    assert machine.reaches("b")


def test_a_late_outcome_does_not_lower_the_level() -> None:
    machine, at = started(), attempt(10)
    machine.handle(published(at, Level.DURABLE))
    machine.handle(published(at, Level.LOCAL))
    assert machine.outcome(at, Level.DURABLE) is not None


RELEASED = n.RunReleased(session_key=(0, 1), is_finished=False, epoch=1)


def salvaging(machine: NodeMachine) -> AttemptId:
    """Let a node write a salvage: the state of rank 1 is written, that of rank 0 is only captured."""
    at = salvage_of(plan(), 7)
    here = SessionNode(node_id="a", node_index=0, ranks=(0, 1), holders=())
    decided = Salvage(session_key=plan().session_key, attempt=at, savers=(0,), nodes=(here,))
    machine.handle(n.SalvageOrdered(salvage=decided, epoch=1))
    machine.handle(written(at, 1))
    machine.handle(sealed(at, 0))
    return at


def test_no_memory_is_freed_while_a_survivor_is_written() -> None:
    machine = started()
    at = salvaging(machine)
    assert n.FreeMemory() not in machine.handle(RELEASED)
    assert n.FreeMemory() in machine.handle(written(at, 0))


def test_the_memory_is_freed_after_a_salvage() -> None:
    machine = started()
    machine.handle(written(salvaging(machine), 0))
    assert n.FreeMemory() in machine.handle(RELEASED)


def test_the_memory_is_freed_after_a_drop() -> None:
    machine, at = started("b"), attempt(10)
    machine.handle(sealed(at, 2))
    machine.handle(RELEASED)
    dropped = machine.handle(published(at, error=Unavailable("x")))
    assert n.FreeMemory() in (*dropped, *machine.handle(written(at, 2)))


@pytest.mark.parametrize("step", [10, 80])
def test_a_second_rank_of_a_save_forgets_no_save(step: int) -> None:
    machine = started()
    for each in range(10, 10 * (MAX_UNSETTLED + 1), 10):
        machine.handle(sealed(attempt(each), 0))
    assert not [x for x in machine.handle(sealed(attempt(step), 1)) if isinstance(x, n.ResolveSave)]
