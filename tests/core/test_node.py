"""Stories of the node machine: shard files, then the fragment, then the report, then copies."""

from __future__ import annotations

import pytest

from ray_ckpt.core import node as n
from ray_ckpt.core.messages import SessionNode, SessionPlan
from ray_ckpt.errors import CheckpointError, RunSuperseded, Unavailable
from ray_ckpt.format.digest import digest
from ray_ckpt.format.names import make_attempt, shard_file
from ray_ckpt.types import AttemptId, FileEntry, Level, ManifestRow

UID = digest(b"run")
MANIFEST = FileEntry(name="manifest-00000-of-00002.parquet", size_bytes=5, digest=digest(b"m"))


def plan(session: int = 1) -> SessionPlan:
    nodes = (
        SessionNode(node_id="a", node_index=0, ranks=(0, 1), holders=("b", "c")),
        SessionNode(node_id="b", node_index=1, ranks=(2,), holders=("a",)),
    )
    return SessionPlan(run_uid=UID, session=session, world_size=3, nodes=nodes, resume=None)


def started(node: str = "a") -> n.NodeMachine:
    machine = n.NodeMachine(epoch=1)
    assert machine.handle(n.SessionStarted(plan=plan(), node_id=node, epoch=1)) == ()
    return machine


def attempt(step: int, *, session: int = 1) -> AttemptId:
    return make_attempt(run_uid=UID, session=session, step=step, attempt=0)


def sealed(at: AttemptId, rank: int, *, replicated: str = "same") -> n.ShardSealed:
    metrics = {"loss": 0.5} if rank == 0 else None
    return n.ShardSealed(attempt=at, rank=rank, replicated=replicated, metrics=metrics)


def written(at: AttemptId, rank: int) -> n.ShardWritten:
    file = FileEntry(name=shard_file(rank, 3), size_bytes=8, digest=digest(bytes([rank])))
    row = ManifestRow(kind="header", file=file.name, byte_offset=0, nbytes=8, digest=file.digest)
    return n.ShardWritten(attempt=at, rank=rank, files=(file,), rows=(row,))


def published(at: AttemptId, level: Level | None = None, error: CheckpointError | None = None) -> n.Published:
    return n.Published(attempt=at, level=level, error=error, epoch=1)


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
        n.TellStored(
            attempt=at,
            node_index=0,
            files=(*fragment.files, MANIFEST),
            replicated=("same",),
            metrics={"loss": 0.5},
        ),
        n.SendCopy(attempt=at, node_index=0, holder="b"),
        n.SendCopy(attempt=at, node_index=0, holder="c"),
    )
    done = machine.handle(published(at, Level.LOCAL))
    assert done == (n.Settle(attempt=at, level=Level.LOCAL, error=None),)
    assert machine.handle(published(at, Level.DURABLE)) == (
        n.Settle(attempt=at, level=Level.DURABLE, error=None),
    )
    assert machine.outcomes[at.attempt] == n.Outcome(level=Level.DURABLE, error=None)


def test_a_new_coordinator_is_told_what_is_complete_here() -> None:
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


def test_ranks_of_a_node_that_differ_are_told_on() -> None:
    machine, at = started(), attempt(10)
    for rank in (0, 1):
        machine.handle(sealed(at, rank, replicated=f"digest-{rank}"))
        machine.handle(written(at, rank))
    tell = machine.handle(n.FragmentWritten(attempt=at, entry=MANIFEST))[0]
    assert isinstance(tell, n.TellStored) and tell.replicated == ("digest-0", "digest-1")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_dropped_attempt_is_deleted_whoever_still_writes(rank: int) -> None:
    machine, at, error = started(), attempt(10), Unavailable("no")
    machine.handle(sealed(at, 0))
    assert machine.handle(published(at, error=error)) == (
        n.Settle(attempt=at, level=None, error=error),
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
            n.Settle(attempt=at, level=None, error=error),
        )
    assert machine.handle(n.FragmentWritten(attempt=at, entry=MANIFEST)) == (
        n.DeleteFolder(directory=at.directory),
    )


def test_a_failed_rank_refuses_for_the_node_once() -> None:
    machine, at = started(), attempt(10)
    machine.handle(sealed(at, 0))
    release, tell, settle, delete = machine.handle(n.SaveFailed(attempt=at, rank=1, reason="disk full"))
    assert release == n.Release(attempt=at, rank=1)
    assert tell == n.TellRefused(attempt=at, ranks=(1,), reason="disk full")
    assert isinstance(settle, n.Settle) and isinstance(settle.error, Unavailable)
    assert delete == n.DeleteFolder(directory=at.directory)
    assert machine.handle(n.SaveFailed(attempt=at, rank=0, reason="too")) == (n.Release(attempt=at, rank=0),)


def test_a_new_session_ends_saves_but_leaves_their_files() -> None:
    """They may have been committed a moment ago; the coordinator names strays later."""
    machine, at = started(), attempt(10)
    machine.handle(sealed(at, 0))
    (settle,) = machine.handle(n.SessionStarted(plan=plan(2), node_id="a", epoch=1))
    assert isinstance(settle, n.Settle) and isinstance(settle.error, RunSuperseded)


@pytest.mark.parametrize("node", ["b", "z"])
def test_a_rank_of_another_node_or_session_is_released_at_once(node: str) -> None:
    machine = started(node)
    for at in (attempt(10), attempt(10, session=7)):
        release, settle = machine.handle(sealed(at, 0))
        assert release == n.Release(attempt=at, rank=0)
        assert isinstance(settle, n.Settle) and isinstance(settle.error, RunSuperseded)


def test_an_outcome_for_a_holder_deletes_its_copy() -> None:
    machine, at, error = started("z"), attempt(10), Unavailable("dropped")
    assert n.DeleteFolder(directory=at.directory) in machine.handle(published(at, error=error))
    assert n.DeleteFolder(directory=at.directory) not in machine.handle(published(at, Level.REPLICATED))


def test_outcomes_are_bounded() -> None:
    machine = started()
    for step in range(n.MAX_SETTLED + 10):
        machine.handle(published(attempt(step), Level.LOCAL))
    assert len(machine.outcomes) == n.MAX_SETTLED
    assert attempt(n.MAX_SETTLED + 9).attempt in machine.outcomes


def test_an_unknown_event_is_an_error() -> None:
    with pytest.raises(TypeError, match="unknown event"):
        n.NodeMachine().handle("hello")  # type: ignore[arg-type]


def test_the_last_words_of_a_fenced_coordinator_are_void() -> None:
    """Else a drop that arrives late would delete what the next coordinator has committed."""
    machine, at = started("z"), attempt(10)
    machine.handle(n.EpochSeen(epoch=2))
    error = Unavailable("dropped by the old one")
    refused = machine.handle(n.Published(attempt=at, level=None, error=error, epoch=1))
    assert refused == (n.RefuseOrder(epoch=2),)
    (settle,) = machine.handle(n.Published(attempt=at, level=Level.LOCAL, error=None, epoch=2))
    assert settle == n.Settle(attempt=at, level=Level.LOCAL, error=None)


def test_a_drop_that_is_repeated_deletes_what_came_back() -> None:
    """A copy that was on its way when its attempt was dropped."""
    machine, at, error = started("z"), attempt(10), Unavailable("dropped")
    machine.handle(n.Published(attempt=at, level=None, error=error, epoch=1))
    assert machine.handle(n.Published(attempt=at, level=None, error=error, epoch=1)) == (
        n.DeleteFolder(directory=at.directory),
    )
    assert machine.handle(n.Published(attempt=at, level=Level.LOCAL, error=None, epoch=1)) == ()
