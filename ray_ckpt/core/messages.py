"""The run machine's events, in the past tense, and effects, in the imperative."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ray_ckpt.config import Resume
from ray_ckpt.core.history import RunHistory
from ray_ckpt.core.values import (
    Captured,
    DiskSpace,
    GroupNode,
    Inventory,
    RankProgress,
    SessionKey,
    SessionPlan,
    Token,
    UnfinishedUpload,
)
from ray_ckpt.errors import CheckpointError
from ray_ckpt.format.records import Drilled, LogRecord
from ray_ckpt.format.save_signal import SaveSignal
from ray_ckpt.types import AttemptId, CheckpointInfo, FileEntry, Level, RankRestore, SaveFacts

# -- events ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    now_s: float  # monotonic seconds: all time-outs
    wall_s: float  # Unix seconds: only written into records


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOpened:
    records: tuple[tuple[LogRecord, str], ...]  # with the digest of each record's bytes
    history: RunHistory | None = None  # of a snapshot that the records follow; None: they are all there is
    run_name: str
    fresh_uid: str  # used if the log is empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    seq: int
    outcome: Literal["ok", "exists", "unknown"]
    service: str = ""  # if others' bytes are there: the service of the log's last epoch, "" if not known
    reason: str = ""  # of an unknown outcome, as far as it is known


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesSeen:
    live: frozenset[str]
    draining: frozenset[str] = frozenset()  # live, but leaving
    left_s: Mapping[str, float] = field(default_factory=dict)  # of leaving nodes, if it is known
    domains: Mapping[str, str] = field(default_factory=dict)  # node -> its rack or zone; "" if not known
    disks: Mapping[str, DiskSpace] = field(default_factory=dict)  # if they have just been looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOpened:
    token: Token
    nodes: tuple[GroupNode, ...]
    inventories: Mapping[str, Inventory]  # by live node
    resume: Resume
    owner: str = ""  # the launcher: the same id over all groups that it opens
    dead_owner: str = ""  # a launcher that was found dead: its group may be ended


@dataclass(frozen=True, slots=True, kw_only=True)
class InventoryTaken:
    """The answer to RequestInventory."""

    token: Token
    inventories: Mapping[str, Inventory]  # by live node


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesJoined:
    """Nodes that joined, or got a new agent, in the middle of a session; their disks may not be empty."""

    inventories: Mapping[str, Inventory]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecovered:
    """A restarted coordinator has found a group at work: its plan and inventories, from the agents."""

    plan: SessionPlan
    inventories: Mapping[str, Inventory]  # by live node


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStored:
    """A node has fsynced its ranks' files and its fragment (the last entry of `files`)."""

    attempt: AttemptId
    node_index: int
    node_id: str
    files: tuple[FileEntry, ...]
    replicated: tuple[str, ...]  # digests of what its ranks hold in common with all others; must be one
    metrics: Mapping[str, float] | None  # from the node of rank 0
    epoch: int | None = None  # that the node obeyed when it reported; None: found by this coordinator itself
    facts: SaveFacts = field(default_factory=SaveFacts)  # of its ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaEnded:
    attempt: AttemptId
    node_index: int
    holder: str
    error: str | None
    epoch: int | None = None  # that the source obeyed when it began; None: as of NodeStored
    source: str = ""  # the node that sent it; "" if that is not known
    is_unreachable: bool = False  # the holder did not answer the source; its disk may be good


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRefused:
    """Ranks of a node did not take part in an attempt (`STILL_WRITING`, disk full, ...)."""

    attempt: AttemptId
    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksProgressed:
    session_key: SessionKey
    ranks: Mapping[int, RankProgress]
    captured: tuple[Captured, ...] = ()  # repeated with each message while it is so
    met: int = 0  # the highest number of a barrier that ranks here were let into; 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksRestored:
    """These ranks of a node have read their state, and wait for others; repeated while they do."""

    session_key: SessionKey
    node_id: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierReached:
    """Ranks of a node have come to a barrier that all ranks are to enter, and wait for the others.

    Replied with `BarrierAnswer`, when all ranks are there or the barrier is given up.
    """

    token: Token
    session_key: SessionKey
    number: int  # of the barrier, the same on all ranks and higher than that of the one before
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierAnswer:
    """The `missing` ranks did not come, so no rank enters the barrier; with none missing, all do."""

    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRestored:
    """All ranks of a node have read and verified, or name the parts that no source could give them."""

    token: Token
    session_key: SessionKey  # of the session that they restore for
    node_id: str
    ranks: tuple[RankRestore, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainEnded:
    attempt: AttemptId
    node_index: int
    node_id: str
    error: str | None
    is_damage: bool = False  # the node's own files differ from the commit; else the error is the store's


@dataclass(frozen=True, slots=True, kw_only=True)
class DescriptionWritten:
    attempt: AttemptId
    error: str | None
    is_damage: bool = False  # the files on the storage path differ from the commit


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteListed:
    """The answer to SweepRemote: checkpoint directories and unfinished uploads under the run's prefix.

    Other names are ignored. Each directory has the seconds since something was written there, by the store's
    clock.
    """

    number: int
    directories: Mapping[str, float] = field(default_factory=dict)
    uploads: tuple[UnfinishedUpload, ...] = ()
    error: str | None = None  # then nothing is known


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteEnded:
    attempt: str
    place: str  # a node id, or REMOTE
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderRefused:
    """A node obeys a coordinator with this higher epoch."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubEnded:
    """A place has read its copy of a fragment against its digests; bad files are in quarantine there."""

    attempt: AttemptId
    node_index: int
    place: str  # a node id, or REMOTE
    damage: tuple[str, ...]  # what differed; empty: every byte is as it was committed
    error: str | None  # the copy could not be read at all; its bytes may be good


@dataclass(frozen=True, slots=True, kw_only=True)
class PinRequested:
    """Keep a checkpoint for `owner`; replied when it is in the log."""

    token: Token
    attempt: str
    owner: str
    expires_at_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpinRequested:
    token: Token
    attempt: str
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    """A checkpoint that may not be due is wanted on the storage path; replied when its drain has begun."""

    token: Token
    attempt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotateRequested:
    """Add metrics to the newest live checkpoint of a step on the lineage; replied when they are in the log.

    While a save of that step is on its way, that save is annotated once it is committed.
    """

    token: Token
    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillEnded:
    """A recovery drill has read a checkpoint. Replied when that is in the log."""

    token: Token
    result: Drilled


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerDied:
    """The run's launcher has been dead long enough that the loss of a node would have been noticed first."""

    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotWritten:
    seq: int
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRequested:
    """Bring the last checkpoint of the run to the storage path, then reply."""

    token: Token
    ends_group: bool = False  # the launcher ends the run, too
    has_failed: bool = False  # the launcher has given up


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWanted:
    """A launcher has opened the run; its group follows when its processes have started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PutAwayEnded:
    """All live nodes have put the run away, or one has not: `error`."""

    error: str | None


Event: TypeAlias = (
    Ticked
    | LogOpened
    | Appended
    | NodesSeen
    | GroupOpened
    | InventoryTaken
    | GroupRecovered
    | NodesJoined
    | NodeStored
    | ReplicaEnded
    | SaveRefused
    | RanksProgressed
    | RanksRestored
    | BarrierReached
    | NodeRestored
    | DrainEnded
    | DescriptionWritten
    | RemoteListed
    | DeleteEnded
    | OrderRefused
    | ScrubEnded
    | PinRequested
    | UnpinRequested
    | AnnotateRequested
    | DrainRequested
    | DrillEnded
    | OwnerDied
    | SnapshotWritten
    | FinishRequested
    | RunWanted
    | PutAwayEnded
)

# -- effects -----------------------------------------------------------------------------------------

REMOTE = "remote"


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """Create this record in the store; answer with Appended, also when the store stays silent."""

    record: LogRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestInventory:
    """Take inventory of all live nodes again in a second; answer with InventoryTaken."""

    token: Token  # of the group that waits


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSession:
    """Send the plan to its nodes, then reply it to `tokens`."""

    tokens: tuple[Token, ...]
    plan: SessionPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    token: Token
    value: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    token: Token
    error: CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class NotifyOutcome:
    """Send the outcome of an attempt to these nodes; `error` if it was dropped."""

    attempt: AttemptId
    level: Level | None
    error: CheckpointError | None
    nodes: tuple[str, ...]
    epoch: int  # of this coordinator; nodes ignore messages of an older one


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceSaveStep:
    """Show these nodes' ranks the step after which all of them save; nobody answers."""

    session_key: SessionKey
    signal: SaveSignal
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate:
    attempt: AttemptId
    node_index: int
    source: str
    holder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    attempt: AttemptId
    node_index: int
    node_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteDescription:
    """All fragments are on the storage path: check them against the root digest, write checkpoint.json."""

    checkpoint: CheckpointInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    attempt: str
    directory: str
    place: str  # a node id, or REMOTE


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRemote:
    """List the unfinished uploads there are, and the checkpoint directories; answer with RemoteListed."""

    number: int
    uploads_only: bool = False  # directories are as many requests as there are thousands of files


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteOrphans:
    """Delete these directories of the storage path and abort these uploads; nobody answers."""

    directories: tuple[str, ...]
    uploads: tuple[UnfinishedUpload, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteLocalOrphans:
    """Delete folders on a node that belong to no live checkpoint and no open attempt."""

    node_id: str
    directories: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict:
    """Delete a node's copy of a checkpoint that lives on elsewhere; nobody answers."""

    attempt: AttemptId
    node_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PutAway:
    """Have every live node delete all folders of the run but these, and forget the run."""

    kept: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseRun:
    """Forget the run: it has finished and is put away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrub:
    """Read a copy of a fragment and all its files against their digests; quarantine bad files."""

    attempt: AttemptId
    node_index: int
    place: str  # a node id, or REMOTE


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSnapshot:
    """Create the snapshot of the history up to `seq`; answer with SnapshotWritten."""

    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Supersede:
    """Another service owns the run: these nodes end their session with `error`."""

    nodes: tuple[str, ...]
    session_key: SessionKey
    error: CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Warn:
    """Log a warning. `is_expected`: no action is needed, because the run is configured that way."""

    text: str
    is_expected: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDown:
    """Act no more on this run: another coordinator owns the log."""

    error: CheckpointError
    is_foreign: bool  # of another service; else a newer coordinator of this one, with the name and the nodes


Effect: TypeAlias = (
    Append
    | RequestInventory
    | StartSession
    | Reply
    | Fail
    | NotifyOutcome
    | AnnounceSaveStep
    | Replicate
    | Drain
    | WriteDescription
    | Delete
    | SweepRemote
    | DeleteOrphans
    | DeleteLocalOrphans
    | Evict
    | PutAway
    | CloseRun
    | Scrub
    | WriteSnapshot
    | Supersede
    | Warn
    | StepDown
)
