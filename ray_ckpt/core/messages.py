"""The run machine's events, in the past tense, and effects, in the imperative; `requests` has the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ray_ckpt.config import Resume
from ray_ckpt.core.history import RunHistory
from ray_ckpt.core.requests import AnnotateRequested as AnnotateRequested
from ray_ckpt.core.requests import DrainRequested as DrainRequested
from ray_ckpt.core.requests import DrillEnded as DrillEnded
from ray_ckpt.core.requests import FinishRequested as FinishRequested
from ray_ckpt.core.requests import PinRequested as PinRequested
from ray_ckpt.core.requests import SalvageRequested as SalvageRequested
from ray_ckpt.core.requests import UnpinRequested as UnpinRequested
from ray_ckpt.core.values import (
    Captured,
    DiskSpace,
    GroupNode,
    GroupPlaces,
    Inventory,
    ItemsPart,
    RankProgress,
    Salvage,
    SessionKey,
    SessionPlan,
    Token,
    UnfinishedUpload,
)
from ray_ckpt.errors import CheckpointError
from ray_ckpt.format.records import Exported, LogRecord
from ray_ckpt.format.save_signal import SaveSignal
from ray_ckpt.types import (
    UNKNOWN_LAUNCH,
    AttemptId,
    CheckpointInfo,
    FileEntry,
    LaunchTimes,
    Level,
    ParityGroup,
    RankRestore,
    SaveFacts,
    Watched,
)

# -- events ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    now_s: float  # monotonic seconds, used for all time-outs
    wall_s: float  # Unix seconds, only for the times in records


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOpened:
    records: tuple[tuple[LogRecord, str], ...]  # each record with the digest of its bytes
    history: RunHistory | None = None  # from the snapshot before `records`; None: `records` are the whole log
    run_name: str
    fresh_uid: str  # the run's uid if the log is empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    seq: int
    outcome: Literal["ok", "exists", "unknown"]
    service: str = ""  # for "exists": the service that wrote the log's last epoch; "" if not known
    reason: str = ""  # for "unknown": the store's error, "" if not known


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesSeen:
    live: frozenset[str]
    draining: frozenset[str] = frozenset()  # live nodes that will leave soon
    left_s: Mapping[str, float] = field(default_factory=dict)  # draining node -> seconds until it leaves
    domains: Mapping[str, str] = field(default_factory=dict)  # node -> rack or zone; "" if not known
    spares: frozenset[str] = frozenset()  # live nodes with the label of spares
    replica_nodes: frozenset[str] = frozenset()  # live nodes with the label of option `replica_nodes`
    disks: Mapping[str, DiskSpace] = field(default_factory=dict)  # by node; empty: not measured this time


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOpened:
    token: Token
    nodes: tuple[GroupNode, ...]
    inventories: Mapping[str, Inventory]  # by live node
    resume: Resume
    owner: str = ""  # the launcher's id, the same for all groups that the launcher opens
    dead_owner: str = ""  # a launcher that was found dead; its group may be ended
    launch: LaunchTimes = UNKNOWN_LAUNCH
    asked_s: float = math.inf  # when the nodes were asked for the inventories, by the clock of `Ticked`


@dataclass(frozen=True, slots=True, kw_only=True)
class InventoryTaken:
    """The answer to RequestInventory."""

    token: Token
    inventories: Mapping[str, Inventory]  # by live node


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesJoined:
    """Nodes joined or got a new agent during a session; the disks of these nodes may not be empty."""

    inventories: Mapping[str, Inventory]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecovered:
    """A restarted coordinator has found a group at work; the agents sent the group's plan and inventories."""

    plan: SessionPlan
    inventories: Mapping[str, Inventory]  # by live node


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStored:
    """A node has fsynced its ranks' files and its fragment, which lists them; `size_bytes` is that of all."""

    attempt: AttemptId
    node_index: int
    node_id: str
    fragment: FileEntry
    size_bytes: int
    replicated: tuple[str, ...]  # `<name>:<value>` of content that all ranks share; one value for each name
    metrics: Mapping[str, float] | None  # from the node of rank 0
    epoch: int | None = None  # the epoch that the node obeyed; None: this coordinator found the files
    facts: SaveFacts = field(default_factory=SaveFacts)  # about the node's ranks
    watched: tuple[Watched, ...] = ()  # see `core/replica_findings`


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaEnded:
    attempt: AttemptId
    node_index: int
    holder: str
    error: str | None
    fragment: FileEntry | None = None  # the version of the fragment that the holder has now
    epoch: int | None = None  # the epoch that the source obeyed when the copy began; None: see NodeStored
    source: str = ""  # the node that sent the copy; "" if not known
    is_unreachable: bool = False  # the holder did not answer the source; the holder's disk may be good
    is_damage: bool = False  # perhaps of the source's copy; see `node_messages.CopyEnded`


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeEnded:
    """A node has stored the parity file of a member of a group, or a lost member's files; see `Code`."""

    attempt: AttemptId
    node_index: int
    node_id: str
    is_parity: bool
    group: ParityGroup
    error: str | None
    is_damage: bool = False  # the bytes that were computed are not those of the member


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
    captured: tuple[Captured, ...] = ()  # incomplete captures, in each message until they are complete
    met: int = 0  # the highest number of a barrier that ranks of the node have entered; 0: none
    distinct: tuple[RankProgress, ...] = field(init=False, compare=False)
    """The progress of all ranks, without duplicates of objects that ranks share, as in a relay's report."""

    def __post_init__(self) -> None:
        distinct = {id(progress): progress for progress in self.ranks.values()}
        object.__setattr__(self, "distinct", tuple(distinct.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksRestored:
    """These ranks of a node have read their state and wait for other ranks; repeated while they wait."""

    session_key: SessionKey
    node_id: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierReached:
    """Ranks of a node have reached a barrier that all ranks are to enter, and wait for the other ranks.

    The reply is a `BarrierAnswer`, sent when all ranks have come or the barrier is given up.
    """

    token: Token
    session_key: SessionKey
    number: int  # the barrier's number: the same on all ranks, and higher than the previous barrier's
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierAnswer:
    """The ranks missing at a barrier: if there are any, no rank enters the barrier, else all ranks do."""

    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivorsReported:
    """A node reports its part of a salvage; each report replaces the node's last one.

    `offers` are the finished steps whose tensors its ranks offer. `kept` has, by rank and step, the classes
    of the ranks whose own state the node keeps. `was_decided`: it has an order for a salvage of the session.
    """

    session_key: SessionKey
    node_id: str
    offers: Mapping[int, tuple[int, ...]]
    kept: Mapping[int, Mapping[int, str]]
    was_decided: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRestored:
    """Each rank of a node has restored and verified its state, or lists the parts that no source provided."""

    token: Token
    session_key: SessionKey  # the session for which the ranks restore
    node_id: str
    ranks: tuple[RankRestore, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainEnded:
    attempt: AttemptId
    node_index: int
    node_id: str
    error: str | None
    is_damage: bool = False  # True: the node's own files differ from the commit; False: the store failed
    items: str = ""  # as in the order
    part: ItemsPart | None = None  # the result of an order with items


@dataclass(frozen=True, slots=True, kw_only=True)
class DescriptionWritten:
    attempt: AttemptId
    error: str | None
    is_damage: bool = False  # the files on the storage path differ from the commit
    exported: Exported | None = None  # as in the order


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteListed:
    """The answer to SweepRemote: checkpoint directories and unfinished uploads under the run's prefix.

    Other names are ignored. `directories` maps each directory to the seconds since the last write into it, by
    the store's clock.
    """

    number: int
    directories: Mapping[str, float] = field(default_factory=dict)
    uploads: tuple[UnfinishedUpload, ...] = ()
    error: str | None = None  # if set, `directories` and `uploads` mean nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteEnded:
    attempt: str
    place: str  # a node id, or REMOTE
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderRefused:
    """A node refused an order because the node obeys a coordinator with this higher epoch."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubEnded:
    """A place has compared its copy of a fragment with the digests and has quarantined bad files."""

    attempt: AttemptId
    node_index: int
    place: str  # a node id, or REMOTE
    damage: tuple[str, ...]  # the files that differ; empty: every byte is as it was committed
    error: str | None  # the reason why the copy could not be read; the copy may still be good
    # fragments on the same node that have lost a bad file too, because they share it by a hard link
    shared: tuple[tuple[AttemptId, int], ...] = ()
    mended: tuple[str, ...] = ()  # files that differed and were written anew


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerDied:
    """The run's launcher has been dead for longer than it takes to notice the loss of a node."""

    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotWritten:
    seq: int
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWanted:
    """A launcher has opened the run and will open a group once the training processes have started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PutAwayEnded:
    """All live nodes have put the run away, or at least one has failed to (`error`)."""

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
    | CodeEnded
    | SaveRefused
    | RanksProgressed
    | RanksRestored
    | BarrierReached
    | SalvageRequested
    | SurvivorsReported
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
    """Create this record in the store; answer with Appended, also if the store does not respond."""

    record: LogRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestInventory:
    """Take the inventory of all live nodes again after a second; answer with InventoryTaken."""

    token: Token  # the caller whose group waits


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSession:
    """Send the plan to the nodes in it, then send it as the reply to `tokens`."""

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
    """Send the outcome of an attempt to these nodes; `error` is set if the attempt was dropped."""

    attempt: AttemptId
    level: Level | None
    error: CheckpointError | None
    nodes: tuple[str, ...]
    epoch: int  # this coordinator's epoch; nodes ignore messages with an older epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnounceSaveStep:
    """Show the ranks of these nodes the step after which all ranks save; there is no answer."""

    session_key: SessionKey
    signal: SaveSignal
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskSurvivors:
    session_key: SessionKey  # `SurvivorsReported` is the answer
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSalvage:
    salvage: Salvage  # the decision
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate:
    attempt: AttemptId
    node_index: int
    source: str
    holder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Let a node pull from the members of a parity group what it needs, and store the result.

    `is_parity`: the parity file of member `node_index`, from the files of the others. Otherwise the files of
    that member, from a node that has them, or else from what is left of the group. CodeEnded is the answer.
    """

    attempt: AttemptId
    num_nodes: int
    node_index: int
    node_id: str
    is_parity: bool
    places: GroupPlaces
    read_bytes: int  # about what the node has to read
    is_anew: bool = False  # links no parity of still shards that was made before, which may be wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Upload a fragment and its files from a node to the storage path; `items` alone to their own directory.

    `like` is a folder of a durable checkpoint; still shards that it lists alike are copied within the store.
    """

    attempt: AttemptId
    node_index: int
    node_id: str
    like: str = ""
    items: str = ""
    is_urgent: bool = False  # other uploads do not delay it


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteDescription:
    """Compare the fragments on the storage path with the root digest, then write checkpoint.json."""

    checkpoint: CheckpointInfo
    exported: Exported | None = None  # the items whose directory this is about; None: the whole checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    attempt: str
    directory: str
    place: str  # a node id, or REMOTE


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRemote:
    """List unfinished uploads and checkpoint directories on the storage path; answer with RemoteListed."""

    number: int
    uploads_only: bool = False  # True: skip the directories, which cost a request for every 1000 files


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteOrphans:
    """Delete these directories of the storage path and abort these uploads; there is no answer."""

    directories: tuple[str, ...]
    uploads: tuple[UnfinishedUpload, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteLocalOrphans:
    """Delete folders on a node that belong to no live checkpoint and no open attempt."""

    node_id: str
    directories: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict:
    """Delete a node's files of a checkpoint that other places still have; there is no answer."""

    attempt: AttemptId
    node_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PutAway:
    """Order every live node to delete all folders of the run except `kept`, and to forget the run."""

    kept: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseRun:
    """Forget the run, which has finished and was put away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrub:
    """Compare a copy of a fragment and all files in it with their digests; quarantine bad files."""

    attempt: AttemptId
    node_index: int
    place: str  # a node id, or REMOTE


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSnapshot:
    """Write a snapshot of the history up to record `seq`; answer with SnapshotWritten."""

    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Supersede:
    """End the session on these nodes with `error`: another group or service has the run."""

    nodes: tuple[str, ...]
    session_key: SessionKey
    error: CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Warn:
    """Log a warning. `is_expected`: no action is needed, because the run's options cause the warning."""

    text: str
    is_expected: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDown:
    """Stop acting on this run, because another coordinator owns the log."""

    error: CheckpointError
    is_foreign: bool  # True: the owner belongs to another service; False: a newer coordinator of this service


Effect: TypeAlias = (
    Append
    | RequestInventory
    | StartSession
    | Reply
    | Fail
    | NotifyOutcome
    | AnnounceSaveStep
    | AskSurvivors
    | OrderSalvage
    | Replicate
    | Code
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
