"""The ports of a node's host: work on disks, reports, memory, callers, and the events that come back.

`actors/agent` implements the ports on Ray, and `testing/` implements them with faults. No method of a port
blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.values import RankProgress, SessionKey, SessionPlan, Token
from ray_ckpt.engine.ports import Callers
from ray_ckpt.format.save_signal import SaveSignal
from ray_ckpt.types import AttemptId, Level, RankRestore, SaveFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePeer:
    """Check if a peer answers; `PeerProbed` is the answer."""

    peer: str
    until_s: float  # when probing ends; as in `ProbeDue`


NodeWork: TypeAlias = (
    n.WriteShard
    | n.WriteStepState
    | n.SendStepState
    | n.WriteFragment
    | n.SendCopy
    | n.DeleteFolder
    | n.ForgetRun
    | n.PersistEpoch
    | ProbePeer
)
"""Work on this node's disk, or with a peer."""


# -- events of the host, in addition to those of the node machine ----------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderReceived:
    """A coordinator has sent an order. The reply is sent when the order is done; Fenced if it is void.

    The reply is None, or has the folders that could not be deleted, each with its error.
    """

    token: Token
    order: n.Order


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkEnded:
    """A deletion, or the write of an epoch, has ended; the end of other work is an event of the machine."""

    work: n.DeleteFolder | n.ForgetRun | n.PersistEpoch
    token: Token  # as given to `NodeDisk.start`
    error: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerProbed:
    peer: str
    is_there: bool
    until_s: float  # when probing ends; as in `ProbeDue`


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportAnswered:
    """The coordinator has answered a report; `error` if it did not take the report, or did not answer."""

    report: m.Event
    value: object = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeAwaited:
    """A caller waits until a save has reached `level` or is dropped. The reply is a `SaveOutcome`."""

    token: Token
    attempt: AttemptId
    level: Level


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAwaited:
    """A rank of a session waits until the session is over. The reply is the reason, a CheckpointError."""

    token: Token
    session_key: SessionKey


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAwaited:
    """A rank waits until the session with which it was connected, or a later one of its group, has begun."""

    token: Token
    session_key: SessionKey


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerLeft:
    """A caller does not wait any more."""

    token: Token


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgressed:
    session_key: SessionKey
    rank: int
    progress: RankProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMet:
    """A rank waits at a barrier for all ranks of its group. The reply has the ranks that did not come."""

    token: Token
    session_key: SessionKey
    rank: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivorCame:
    """A rank offers the tensors of finished steps for a salvage. The reply is a `Salvage`."""

    token: Token
    session_key: SessionKey
    rank: int
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskAwaited:
    """A rank waits until it is asked for an offer. The reply False means that its session is over."""

    token: Token
    session_key: SessionKey


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRestored:
    """A rank has restored, and waits for the group. The reply False means that a new session has begun."""

    token: Token
    session_key: SessionKey
    report: RankRestore


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeDue:
    """A silent peer is probed again, for the last time after `until_s`."""

    peer: str
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressDue:
    """The progress that a node's ranks have reported is forwarded."""

    session_key: SessionKey


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierDue:
    """A barrier is reported, with the ranks that have come, unless it has ended."""

    session_key: SessionKey
    number: int
    is_repeated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingDue:
    """The ranks that have restored and wait for others are reported again."""

    session_key: SessionKey


SessionTimer: TypeAlias = ProgressDue | BarrierDue | WaitingDue
NodeHostEvent: TypeAlias = (
    OrderReceived
    | WorkEnded
    | PeerProbed
    | ReportAnswered
    | OutcomeAwaited
    | EndAwaited
    | SessionAwaited
    | CallerLeft
    | RankProgressed
    | RankMet
    | SurvivorCame
    | AskAwaited
    | RankRestored
    | ProbeDue
    | SessionTimer
)


# -- ports ---------------------------------------------------------------------------------------------


class NodeDisk(Protocol):
    def start(self, work: NodeWork, token: Token = "") -> None:
        """Begin work; an event of the machine, WorkEnded (with the token) or PeerProbed is the answer."""


class NodeCoordinator(Protocol):
    def report(self, event: m.Event, may_wait_s: float = 0.0) -> None:
        """Report to the run's coordinator. An empty token is replaced by one of the coordinator.

        A relay may keep the report for `may_wait_s`, to send it together with others.

        `ReportAnswered` follows if ranks wait for an answer to the report. Its value is the reply of the
        coordinator's machine; for progress, the ranks that the group waits for. The failure of any other
        report is only logged.
        """


class NodeMemory(Protocol):
    """The memory that the node's ranks map."""

    def begin(self, plan: SessionPlan) -> None:
        """Prepare the restore of a new session, and free the memory of the restore before it.

        What the ranks of this node will most likely read may be read ahead, into memory that is freed with
        that of the restore.
        """

    def release(self, attempt: AttemptId, rank: int) -> None:
        """Let the rank capture into its arena again."""

    def facts(self, attempt: AttemptId) -> SaveFacts:
        """Return the facts of a save that is being reported as stored."""

    def show(self, signal: SaveSignal | None) -> None:
        """Show the step after which all ranks save, or none."""

    def free_restore(self) -> None:
        """Free the memory of the restore: the ranks have their state."""

    def free_arenas(self) -> None:
        """Free the arenas of an earlier group."""

    def free(self) -> None:
        """Free all memory of the run."""


class NodeClock(Protocol):
    def now_s(self) -> float:
        """Return monotonic seconds."""

    def later(self, delay_s: float, event: NodeHostEvent) -> None:
        """Send an event to the host after a time."""


class NodePorts(NodeDisk, NodeCoordinator, NodeMemory, Callers, NodeClock, Protocol):
    """All ports of a node's host."""
