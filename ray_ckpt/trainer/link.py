"""The interface between a Checkpointer and the agent of its node.

The launcher of the ranks provides a `Link`: the Ray Train callback, or `ray_ckpt.connect`. The Checkpointer
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
from ray_ckpt.core.values import RankProgress, Salvage, SessionKey
from ray_ckpt.errors import CheckpointError
from ray_ckpt.format.shard import RankLayout
from ray_ckpt.location import Location
from ray_ckpt.plan.restore import RowKey
from ray_ckpt.preemption.notice import Notice
from ray_ckpt.restore.reader import RestoreTicket, SharedRows
from ray_ckpt.types import AttemptId, GroupPart, Level, RankRestore, Slice, Watched, ranks_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The rank, its run and its group; they stay the same for the life of the link."""

    run_uid: str
    run_name: str
    rank: int
    world_size: int
    node_id: str
    parts: tuple[GroupPart, ...] = ()  # parts of the group, in the order of their ranks; () if undivided
    part: str = ""  # the part of this rank
    storage_path: str = ""
    node_ranks: tuple[int, ...] = ()  # the ranks on this node; () if not known

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks, this rank included, that may hold the same tensors: those of the same part, or all."""
        return tuple(ranks_of(self.parts, self.part, self.world_size))

    @property
    def where(self) -> str:
        """The URI of the run: the run's name behind the storage path, and before its URL parameters."""
        return str(Location.parse(self.storage_path) / self.run_name)


ArenaMode = Literal["double", "single", "stream"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaGrant:
    """Memory of the agent for one rank's captures.

    The mode `double` means two buffers, so that a save does not wait for the previous save; `single` means
    one buffer; `stream` means a ring buffer that the agent writes to disk while the rank fills it, for states
    that are too large for a copy in memory.
    """

    mode: ArenaMode
    paths: tuple[str, ...]  # one per buffer
    size_bytes: int  # size of the largest layout that fits


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedShard:
    """A rank's capture, complete in the arena or about to be streamed, and the bytes of its state file."""

    attempt: AttemptId
    rank: int
    state: bytes
    replicated: tuple[str, ...]  # `<what>:<value>`; the value of each `<what>` must be equal on all ranks
    metrics: Mapping[str, float] | None  # rank 0 only
    buffer: int  # index of the buffer in the grant
    layout: RankLayout | None  # None: same layout as the last shard in this buffer
    layout_signature: str
    mesh: str  # mesh of the DTensors, in the form of `SaveFacts`
    stall_s: float  # time for which the save has blocked training so far
    capture_s: float  # time since the save began
    watched: tuple[Watched, ...] = ()  # digests that are compared between replicas
    still_from: AttemptId | None = None  # whose capture copied the still slices; None: there are none


MAX_STEP_STATE_BYTES = 1 << 20  # of a rank's own state, which travels in a control message after each step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """The state of a rank after a step that no other rank holds, ready to be written as the rank's files."""

    rank: int
    step: int
    holds: str  # the class of the rank: a digest of the tensors that it holds in common with others
    state: bytes  # the state file
    slices: tuple[Slice, ...]
    shard: bytes  # the shard file of these slices


class RankLink(Protocol):
    """A rank's view of its agent. Methods that return a Future do not wait; the others answer or raise."""

    identity: Identity
    options: RunOptions

    def awaited(self) -> tuple[Awaited, ...]:
        """Return the ranks that the group waits for, as the coordinator reports them. Raises Unavailable."""
        ...

    def recover(self) -> None:
        """Request a new agent if the current agent, which does not answer, is dead. Does not wait."""
        ...


class RestoreLink(RankLink, Protocol):
    """Calls that a rank makes for a restore."""

    def ticket(self, *, early: bool = False) -> RestoreTicket:
        """Return the ticket of the checkpoint to restore, the same for the whole group.

        With `early` the agent goes on reading ahead, since the restore itself comes later.
        """
        ...

    def whole_ticket(self, session_key: SessionKey) -> RestoreTicket:
        """Return the ticket with the whole manifest, in place of a ticket that is not whole.

        Raises RunSuperseded if that session is over.
        """
        ...

    def origin(self, session_key: SessionKey) -> RestoreTicket | None:
        """Return a ticket for the checkpoint of another run that this run begins with; None without one.

        `resume=URI` or `init_from` names that checkpoint. Raises ConfigError or StoragePathError if the
        checkpoint cannot be opened.
        """
        ...

    def restored(self, session_key: SessionKey, report: RankRestore) -> Future[RestoreTicket | None]:
        """Report that this rank has read and verified everything, or report the damage that this rank found.

        The result None means that all ranks have verified everything and may continue. A ticket means that
        all ranks start over with this older checkpoint. RestoreError means that no checkpoint is left. The
        future is not done while ranks are missing: see `awaited`.
        """
        ...

    def fetch(
        self, session_key: SessionKey, wants: Mapping[RowKey, tuple[int, ...]], taken: tuple[RowKey, ...]
    ) -> SharedRows:
        """Return rows that several ranks of this node need and its agent reads once; see `restore.FetchRows`.

        Raises Unavailable if there is no agent: then the rank reads the rows from their sources.
        """
        ...

    def reserve(self, size_bytes: int) -> None:
        """Raise InsufficientSpace unless the captures of this rank fit in the memory of its node.

        Also unless two checkpoints fit on disk, if the run has none yet.
        """
        ...


class SaveLink(RankLink, Protocol):
    """Calls that a rank makes for saves and their outcomes."""

    def open_arena(self, session_key: SessionKey, size_bytes: int, *, named: bool = False) -> ArenaGrant:
        """Return memory for a layout of that size. Raises InsufficientSpace if there is too little memory.

        With `named` the memory is a file in /dev/shm, for a rank that cannot open the agent's descriptors.
        """
        ...

    def seal(self, shard: SealedShard) -> Future[bool]:
        """Hand a capture over to the agent. The future is done when the buffer may be used again.

        It is True if the still slices in the buffer have changed since they were copied: the save is dropped,
        and the next capture into this buffer copies them.
        """
        ...

    def skip(self, attempt: AttemptId, reason: str) -> None:
        """Report that this rank does not take part in the attempt."""
        ...

    def outcome(self, attempt: AttemptId, level: Level) -> Future[SaveOutcome]:
        """Return a future that is done when the attempt has reached `level` or was dropped.

        It has a TimeoutError after minutes if the save is not under way on this node, or `level` is higher.
        """
        ...

    def ended(self, session_key: SessionKey) -> Future[CheckpointError]:
        """Return a future that is done, with the reason, when another launcher has taken the run over."""
        ...

    def annotate(self, step: int, metrics: Mapping[str, float], attempt: AttemptId | None) -> Future[None]:
        """Add metrics to the checkpoint of a step; if `attempt` is given, wait until it is committed.

        The future is done when the metrics are in the log, or has the error.
        """
        ...

    def make_durable(self, attempt: AttemptId, timeout_s: float) -> Future[None]:
        """Copy a checkpoint to the storage path, whatever is saved after it; give up after `timeout_s`."""
        ...


class SignalLink(RankLink, Protocol):
    """Calls that keep the ranks of a group together."""

    def signal_page(self, *, named: bool = False) -> str:
        """Return the path of the memory in which the agent writes the agreed step (`format/save_signal.py`).

        After the agent has died, the path is another one. Raises Unavailable while there is no agent. `named`
        is as in `open_arena`.
        """
        ...

    def progress(self, session_key: SessionKey, progress: RankProgress) -> None:
        """Report this rank's progress. Does not raise if the agent does not answer."""
        ...

    def reach_barrier(self, session_key: SessionKey, number: int) -> Future[tuple[int, ...]]:
        """Report that this rank has reached a barrier of all ranks.

        The future is done when all ranks have reached the barrier or the wait is over; its result lists the
        ranks that are missing. All ranks get the same result: if it is empty, all ranks enter the barrier,
        otherwise no rank does.
        """
        ...

    def notify_preemption(self, notice: Notice) -> None:
        """Report that this process or machine is about to end; all ranks then save. Never waits or raises."""
        ...


class SurvivorLink(RankLink, Protocol):
    """Calls of a rank that may outlive others of its group."""

    def keep(self, session_key: SessionKey, state: StepState) -> None:
        """Send this rank's own state after a step; drop it if the agent is slow or gone. Does not wait."""
        ...

    def asked(self, session_key: SessionKey) -> Future[bool]:
        """Return a future that is done with True when this rank is to make an offer, or else with False."""
        ...

    def offer(self, session_key: SessionKey, steps: tuple[int, ...]) -> Future[Salvage]:
        """Offer the tensors of finished steps, which this rank has; the result is the decision."""
        ...


class Link(RestoreLink, SaveLink, SignalLink, SurvivorLink, Protocol):
    """All calls of a Checkpointer to the agent of its node."""


class Reporter(Protocol):
    """Reports committed checkpoints to the launcher. All ranks report at the same step: a barrier."""

    def report(self, newest: tuple[AttemptId, Mapping[str, float]] | None, step: int) -> int:
        """Report `newest` (only the value of rank 0 is used) and return the step at which to report next."""
        ...
