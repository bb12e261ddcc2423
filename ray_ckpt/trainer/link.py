"""The seam between a Checkpointer and its node's agent.

Whoever launches the ranks provides a `Link`: the Ray Train callback, or `ray_ckpt.connect`. The
Checkpointer itself knows no Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol

from ray_ckpt.config import RunOptions
from ray_ckpt.core.awaited import Awaited
from ray_ckpt.core.messages import RankProgress
from ray_ckpt.core.node_machine import SaveOutcome
from ray_ckpt.errors import CheckpointError
from ray_ckpt.format.shard import ShardLayout
from ray_ckpt.plan.restore import RowKey
from ray_ckpt.preemption.notice import Notice
from ray_ckpt.restore.reader import RestoreTicket, SharedRows
from ray_ckpt.types import AttemptId, GroupPart, Level, RankRestore, ranks_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this rank is, for the whole life of the link."""

    run_uid: str
    run_name: str
    rank: int
    world_size: int
    node_id: str
    parts: tuple[GroupPart, ...] = ()  # of a group of several, in the order of their ranks
    part: str = ""  # the one that this rank is of

    @property
    def ranks(self) -> tuple[int, ...]:
        """This rank and those that may hold the same tensors: of its part, or all."""
        return tuple(ranks_of(self.parts, self.part, self.world_size))


ArenaMode = Literal["double", "single", "stream"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaGrant:
    """Memory of the agent's for one rank's captures.

    double: two buffers, so that a save does not wait for the one before it; single: one; stream: a ring that
    the agent writes to disk while the rank fills it, for states that memory does not hold a copy of.
    """

    mode: ArenaMode
    paths: tuple[str, ...]  # one per buffer
    size_bytes: int  # of the shard that fits


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedShard:
    """A rank's capture, ready in its arena, and the state file's bytes. Of a stream: about to come."""

    attempt: AttemptId
    rank: int
    state: bytes
    replicated: tuple[str, ...]  # what the ranks must agree on: `<what>:<value>`, only like is compared
    metrics: Mapping[str, float] | None  # rank 0 only
    buffer: int  # of the grant
    layout: ShardLayout | None  # None: as in the last one in this buffer
    layout_signature: str
    mesh: str  # of its DTensors, as `SaveFacts`
    stall_s: float  # for which the save has held training up until now
    capture_s: float  # since it began


class Link(Protocol):
    """A rank's view of its agent. Methods that return a Future do not wait; the others answer or raise."""

    identity: Identity
    options: RunOptions

    def ticket(self) -> RestoreTicket:
        """What to restore, decided for the whole group."""
        ...

    def origin(self, session: int, epoch: int) -> RestoreTicket | None:
        """What a run without a checkpoint begins with: one of another run (`resume=URI`, `init_from`).

        None: nothing. ConfigError or StoragePathError if it cannot be opened any more.
        """
        ...

    def restored(self, session: int, report: RankRestore) -> Future[RestoreTicket | None]:
        """This rank has read and verified everything, or reports damage. None: all ranks have, go.

        A ticket: all ranks start over with this older checkpoint. RestoreError: none is left. Not done while
        ranks are missing: see `awaited`.
        """
        ...

    def awaited(self) -> tuple[Awaited, ...]:
        """Ranks that others of the group wait for by now, as the coordinator sees it. Unavailable."""
        ...

    def reach_barrier(self, session: int, number: int) -> Future[tuple[int, ...]]:
        """This rank has come to a barrier of all ranks. Done when all have, or with those that did not come.

        All ranks get the same answer; with an empty one all enter the barrier, else none does.
        """
        ...

    def fetch(
        self, session: int, wants: Mapping[RowKey, tuple[int, ...]], taken: tuple[RowKey, ...]
    ) -> SharedRows:
        """Rows that several ranks of this node want, read once by its agent; see `restore.FetchRows`.

        Unavailable if there is no agent: the rank reads them by itself.
        """
        ...

    def reserve(self, size_bytes: int) -> None:
        """InsufficientSpace unless this rank's checkpoints of that size fit its node."""
        ...

    def open_arena(self, session: int, size_bytes: int, *, named: bool = False) -> ArenaGrant:
        """Memory for a shard of that size. InsufficientSpace if there is too little.

        `named`: as a file in /dev/shm, for a rank that cannot open the agent's descriptors.
        """
        ...

    def signal_page(self, *, named: bool = False) -> str:
        """Path of the memory in which the agent shows the agreed step (`format/agreed.py`).

        Another one after the agent has died; Unavailable while there is none. `named` as for `open_arena`.
        """
        ...

    def seal(self, shard: SealedShard) -> Future[None]:
        """Hand a capture over. Done when the arena may be captured into again."""
        ...

    def outcome(self, attempt: AttemptId, level: Level) -> Future[SaveOutcome]:
        """Done when the attempt has reached `level` or was dropped."""
        ...

    def ended(self, session: int) -> Future[CheckpointError]:
        """Done, with the reason, when the run has gone over to somebody else."""
        ...

    def skip(self, attempt: AttemptId, reason: str) -> None:
        """This rank does not take part in the attempt."""
        ...

    def progress(self, session: int, progress: RankProgress) -> None:
        """Where this rank is; says nothing if the agent does not answer."""
        ...

    def notify_preemption(self, notice: Notice) -> None:
        """This process, or its machine, is about to go: have all ranks save. Does not wait or raise."""
        ...

    def annotate(self, step: int, metrics: Mapping[str, float], attempt: AttemptId | None) -> Future[None]:
        """Add metrics to the checkpoint of a step; `attempt`, this rank's save of it, is waited for.

        None: no save of that step is on its way. Done when they are in the log, or with the error.
        """
        ...

    def recover(self) -> None:
        """The agent does not answer: have a new one started if it is dead. Does not wait."""
        ...

    def make_durable(self) -> Future[None]:
        """Bring the newest checkpoint of the run to the storage path."""
        ...


class Reporter(Protocol):
    """Tells the launcher of committed checkpoints. Called by all ranks at the same step, a barrier."""

    def report(self, newest: tuple[AttemptId, Mapping[str, float]] | None, step: int) -> int:
        """Report `newest` (rank 0's counts) and return the step at which to report next."""
        ...
