"""The seam between a Checkpointer and its node's agent.

Whoever launches the ranks provides a `Link`: the Ray Train callback, or `ray_ckpt.connect`. The Checkpointer
itself does not depend on Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol

from ray_ckpt.config import RunOptions
from ray_ckpt.core.awaited import Awaited
from ray_ckpt.core.node_messages import SaveOutcome
from ray_ckpt.core.values import RankProgress
from ray_ckpt.errors import CheckpointError
from ray_ckpt.format.shard import ShardLayout
from ray_ckpt.plan.restore import RowKey
from ray_ckpt.preemption.notice import Notice
from ray_ckpt.restore.reader import RestoreTicket, SharedRows
from ray_ckpt.types import AttemptId, GroupPart, Level, RankRestore, ranks_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The rank, its run and its group; constant for the life of the link."""

    run_uid: str
    run_name: str
    rank: int
    world_size: int
    node_id: str
    parts: tuple[GroupPart, ...] = ()  # of a group of several, in the order of their ranks
    part: str = ""  # the part of this rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that may hold the same tensors, this one included: those of its part, or all."""
        return tuple(ranks_of(self.parts, self.part, self.world_size))


ArenaMode = Literal["double", "single", "stream"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaGrant:
    """Memory of the agent for one rank's captures.

    double: two buffers, so that a save does not wait for the one before it; single: one; stream: a ring that
    the agent writes to disk while the rank fills it, for states too large for a copy in memory.
    """

    mode: ArenaMode
    paths: tuple[str, ...]  # one per buffer
    size_bytes: int  # of the shard that fits


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedShard:
    """A rank's capture, complete in its arena, or of a stream about to come; and the state file's bytes."""

    attempt: AttemptId
    rank: int
    state: bytes
    replicated: tuple[str, ...]  # the ranks must agree on these: `<what>:<value>`, compared by `<what>`
    metrics: Mapping[str, float] | None  # rank 0 only
    buffer: int  # of the grant
    layout: ShardLayout | None  # None: the same as that of the last shard in this buffer
    layout_signature: str
    mesh: str  # of its DTensors, as `SaveFacts`
    stall_s: float  # for which the save has blocked training until now
    capture_s: float  # since it began


class RankLink(Protocol):
    """A rank's view of its agent. Methods that return a Future do not wait; the others answer or raise."""

    identity: Identity
    options: RunOptions

    def awaited(self) -> tuple[Awaited, ...]:
        """Return the ranks that the group waits for, as the coordinator sees it. Raises Unavailable."""
        ...

    def recover(self) -> None:
        """Have a new agent started if this one, which does not answer, is dead. Does not wait."""
        ...


class RestoreLink(RankLink, Protocol):
    """Calls for a restore."""

    def ticket(self) -> RestoreTicket:
        """Return what to restore, decided for the whole group."""
        ...

    def origin(self, session: int, epoch: int) -> RestoreTicket | None:
        """Return a ticket for the checkpoint of another run that this run begins with; None if there is none.

        `resume=URI` or `init_from` names it. Raises ConfigError or StoragePathError if it cannot be opened.
        """
        ...

    def restored(self, session: int, report: RankRestore) -> Future[RestoreTicket | None]:
        """Report that this rank has read and verified everything, or the damage that it found.

        None: all ranks have, go. A ticket: all ranks start over with this older checkpoint. RestoreError:
        none is left. Not done while ranks are missing: see `awaited`.
        """
        ...

    def fetch(
        self, session: int, wants: Mapping[RowKey, tuple[int, ...]], taken: tuple[RowKey, ...]
    ) -> SharedRows:
        """Return rows that several ranks of this node want, read once by its agent; see `restore.FetchRows`.

        Raises Unavailable if there is no agent: then the rank reads them from their sources.
        """
        ...

    def reserve(self, size_bytes: int) -> None:
        """Raise InsufficientSpace unless this rank's checkpoints of that size fit its node."""
        ...


class SaveLink(RankLink, Protocol):
    """Calls for saves and their outcomes."""

    def open_arena(self, session: int, size_bytes: int, *, named: bool = False) -> ArenaGrant:
        """Return memory for a shard of that size. Raises InsufficientSpace if there is too little.

        `named`: as a file in /dev/shm, for a rank that cannot open the agent's descriptors.
        """
        ...

    def seal(self, shard: SealedShard) -> Future[None]:
        """Hand a capture over. Done when its buffer may be captured into again."""
        ...

    def skip(self, attempt: AttemptId, reason: str) -> None:
        """Report that this rank does not take part in the attempt."""
        ...

    def outcome(self, attempt: AttemptId, level: Level) -> Future[SaveOutcome]:
        """Done when the attempt has reached `level` or was dropped."""
        ...

    def ended(self, session: int) -> Future[CheckpointError]:
        """Done, with the reason, when another launcher has taken the run over."""
        ...

    def annotate(self, step: int, metrics: Mapping[str, float], attempt: AttemptId | None) -> Future[None]:
        """Add metrics to the checkpoint of a step, after `attempt`, this rank's save of it, if that is open.

        Done when they are in the log, or with the error.
        """
        ...

    def make_durable(self) -> Future[None]:
        """Bring the newest checkpoint of the run to the storage path."""
        ...


class SignalLink(RankLink, Protocol):
    """Calls that keep the ranks of a group together."""

    def signal_page(self, *, named: bool = False) -> str:
        """Return the path of the memory in which the agent shows the agreed step (`format/save_signal.py`).

        Another one after the agent has died; raises Unavailable while there is none. `named` as in
        `open_arena`.
        """
        ...

    def progress(self, session: int, progress: RankProgress) -> None:
        """Report this rank's progress. Does not raise if the agent does not answer."""
        ...

    def reach_barrier(self, session: int, number: int) -> Future[tuple[int, ...]]:
        """Report that this rank has come to a barrier of all ranks.

        Done when all have come, or with those that did not. All ranks get the same answer: if it is empty,
        all enter the barrier, else none does.
        """
        ...

    def notify_preemption(self, notice: Notice) -> None:
        """Report that this process or machine is about to end: all ranks save. Does not wait or raise."""
        ...


class Link(RestoreLink, SaveLink, SignalLink, Protocol):
    """All calls of a Checkpointer to the agent of its node."""


class Reporter(Protocol):
    """Reports committed checkpoints to the launcher. All ranks call it at the same step: it is a barrier."""

    def report(self, newest: tuple[AttemptId, Mapping[str, float]] | None, step: int) -> int:
        """Report `newest` (rank 0's counts) and return the step at which to report next."""
        ...
