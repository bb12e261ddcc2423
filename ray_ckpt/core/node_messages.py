"""The node machine's events, in the past tense, and effects, in the imperative."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ray_ckpt.core.values import Salvage, SessionKey, SessionPlan
from ray_ckpt.errors import CheckpointError
from ray_ckpt.format.save_signal import SaveSignal
from ray_ckpt.types import AttemptId, FileEntry, Fragment, Level, ManifestRow, Watched


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOutcome:
    """The outcome of an attempt so far: the level reached, or the error of its drop."""

    level: Level | None
    error: CheckpointError | None
    is_deleted: bool = False  # the files on this node are deleted or about to be deleted


# -- events ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStarted:
    plan: SessionPlan
    node_id: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnded:
    """Another group or owner has the run; this session and all earlier sessions are over."""

    session_key: SessionKey
    error: CheckpointError
    epoch: int
    frees: bool = True  # False: a group that has not restored yet may need what is in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSealed:
    """A rank has captured its state into its arena."""

    attempt: AttemptId
    rank: int
    replicated: tuple[str, ...]  # see `SealedShard.replicated`
    metrics: Mapping[str, float] | None
    watched: tuple[Watched, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStateKept:
    """The own state of a rank after a step is kept on this node; `holds` is the class of the rank."""

    session_key: SessionKey
    rank: int
    step: int
    holds: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivorOffered:
    """A rank has the tensors of finished steps, and each of these steps may be saved."""

    session_key: SessionKey
    rank: int
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardWritten:
    attempt: AttemptId
    rank: int
    files: tuple[FileEntry, ...]
    rows: tuple[ManifestRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed:
    """A rank skipped the attempt, or the rank's files or the fragment could not be written."""

    attempt: AttemptId
    rank: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentWritten:
    attempt: AttemptId
    entry: FileEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyEnded:
    """A copy has arrived on its holder, or has failed."""

    attempt: AttemptId
    node_index: int
    holder: str
    epoch: int  # the epoch that this node obeyed when the copy began
    error: str | None
    fragment: FileEntry | None = None  # the version of the fragment that was sent; None after an error
    is_unreachable: bool = False  # the holder gave no sign of life for some seconds
    is_damage: bool = False  # perhaps of the source: a file is gone, or came with other bytes in each try


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReturned:
    """A peer that could not be reached has answered, or is no longer probed."""

    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeNotified:
    """The coordinator of `epoch` has reported the outcome of an attempt."""

    attempt: AttemptId
    level: Level | None
    error: CheckpointError | None
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPersisted:
    """The epoch is durable on this node; from now on the node refuses orders of lower epochs."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSeen:
    """A coordinator whose fence is in the log has sent only its epoch."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitOrdered:
    """The coordinator needs nothing on this node, and knows no group of this session or a later one."""

    session_key: SessionKey
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorReturned:
    """A new coordinator has taken over the run, without the reports that the old coordinator received."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOrdered:
    """Send the files of a fragment from this node to another node."""

    attempt: AttemptId
    node_index: int
    holder: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteOrdered:
    """Checkpoint folders are to be deleted; those in `evicted` are of checkpoints on the storage path."""

    directories: tuple[str, ...]
    evicted: tuple[str, ...] = ()
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStepAnnounced:
    """All ranks of a session are to save after this step."""

    session_key: SessionKey
    signal: SaveSignal
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivorsAsked:
    """A group may have lost ranks: the coordinator requests what this node has for a salvage."""

    session_key: SessionKey
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SalvageOrdered:
    """The coordinator has decided on a salvage."""

    salvage: Salvage
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReleased:
    """The launcher has ended the run or is dead; this session and all earlier ones are over. Files stay."""

    session_key: SessionKey
    is_finished: bool  # the launcher has not given the run up, so the run will be put away
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPutAway:
    """The run has finished: this node needs to keep only these folders of the run."""

    kept: tuple[str, ...]
    epoch: int


Order: TypeAlias = (
    SessionStarted
    | SessionEnded
    | OutcomeNotified
    | EpochSeen
    | ExitOrdered
    | CoordinatorReturned
    | CopyOrdered
    | DeleteOrdered
    | SaveStepAnnounced
    | SurvivorsAsked
    | SalvageOrdered
    | RunReleased
    | RunPutAway
)
"""Messages of a coordinator; void if their epoch is below the node's epoch, the highest that is durable."""


NodeEvent: TypeAlias = (
    ShardSealed
    | StepStateKept
    | SurvivorOffered
    | ShardWritten
    | SaveFailed
    | FragmentWritten
    | CopyEnded
    | PeerReturned
    | EpochPersisted
    | Order
)

# -- effects -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteShard:
    attempt: AttemptId
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteStepState:
    """Write the files of a rank that takes no part in a salvage, from the state that this node keeps."""

    attempt: AttemptId
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendStepState:
    """Send the own state of a rank after a step to a peer, which keeps it too; there is no answer."""

    session_key: SessionKey
    rank: int
    step: int
    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSurvivors:
    """Report to the coordinator what this node has for a salvage."""

    session_key: SessionKey
    offers: Mapping[int, tuple[int, ...]]
    kept: Mapping[int, Mapping[int, str]]
    was_decided: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AskRanks:
    """Ask this node's ranks for an offer, also those that hang in a collective operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOffers:
    """Answer the ranks that have made an offer."""

    salvage: Salvage


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The rank may capture into its arena again."""

    attempt: AttemptId
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteFragment:
    fragment: Fragment


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportStored:
    epoch: int  # the epoch that this node obeys now
    attempt: AttemptId
    node_index: int
    fragment: FileEntry
    size_bytes: int  # of the fragment and all files that it lists
    replicated: tuple[str, ...]
    metrics: Mapping[str, float] | None
    watched: tuple[Watched, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRefused:
    attempt: AttemptId
    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCopy:
    """Send the fragment's files, then the fragment, from this node's disk; CopyEnded is the answer.

    The holder may link still shards that it has in another checkpoint; for a repair it reads them before.
    """

    epoch: int  # the epoch that this node obeys now; also sent in the report of the copy's end
    attempt: AttemptId
    node_index: int
    holder: str
    is_repair: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportCopied:
    """Report to the coordinator how a copy ended."""

    epoch: int  # the epoch that this node obeyed when the copy began
    attempt: AttemptId
    node_index: int
    holder: str
    error: str | None
    fragment: FileEntry | None = None  # see CopyEnded
    is_unreachable: bool = False
    is_damage: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPeer:
    """Probe a peer every few seconds until the peer answers; PeerReturned reports the answer."""

    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolveSave:
    """Wake the callers that wait for this attempt."""

    attempt: AttemptId
    level: Level | None
    error: CheckpointError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteFolder:
    directory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetRun:
    """Delete all folders of the run except `kept`, then all other data of the run."""

    kept: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistEpoch:
    """Make a higher epoch durable on this node, then repeat the order, which has had no effect so far."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseOrder:
    """Report to the sender of an order that this node obeys a higher epoch."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseExit:
    """A group is at work here of which the coordinator does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginSession:
    """Begin the session of a newer plan; callers that wait for the session before it get RunSuperseded."""

    plan: SessionPlan
    replaced: SessionKey | None  # the session that was at work until now


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """Free the memory that the ranks of the run have mapped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSession:
    """Fail the callers that wait for a session here."""

    session_key: SessionKey
    error: CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowSaveSignal:
    """Put the announced step on the page that this node's ranks read."""

    signal: SaveSignal


NodeEffect: TypeAlias = (
    WriteShard
    | WriteStepState
    | SendStepState
    | ReportSurvivors
    | AskRanks
    | AnswerOffers
    | Release
    | WriteFragment
    | ReportStored
    | ReportRefused
    | SendCopy
    | ReportCopied
    | CheckPeer
    | ResolveSave
    | DeleteFolder
    | ForgetRun
    | PersistEpoch
    | RefuseOrder
    | RefuseExit
    | BeginSession
    | EndSession
    | FreeMemory
    | ShowSaveSignal
)
