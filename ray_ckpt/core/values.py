"""Values that the messages of the machines carry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ray_ckpt.config import Resume
from ray_ckpt.types import AttemptId, CheckpointInfo, FileEntry, ParityGroup

Token: TypeAlias = str  # the identifier of a caller that waits for a reply
SessionKey: TypeAlias = tuple[int, int]  # the epoch in which a session began, and the session's number

GOES_ON = "the save of this step that has begun goes on"  # why a rank refuses a second save of the step
STILL_WRITING = "the save before it is still being written"  # skip reason; metrics count by this text


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNode:
    """A node of a training group and the ranks on it."""

    node_id: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFragment:
    """Fragment `node_index` of an attempt, complete on a node with all files of the fragment."""

    attempt: AttemptId
    node_index: int
    num_nodes: int
    fragment: FileEntry
    size_bytes: int  # of the fragment and all files that it lists
    ranks: tuple[int, ...] = ()
    replicated: tuple[str, ...] = ()
    metrics: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubResult:
    """The result of reading a copy of a fragment: the files that differ from their digests.

    `shared` are other fragments on that node, by attempt and index, that have lost a bad file with it.
    `mended` are files that differed and were written anew, from the same file of another checkpoint.
    """

    damage: tuple[str, ...] = ()
    mended: tuple[str, ...] = ()
    shared: tuple[tuple[AttemptId, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredParity:
    """The parity file of node `node_index` of an attempt, complete on a node."""

    attempt: AttemptId
    node_index: int
    group: ParityGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlaces:
    """The live nodes that hold the files of a parity group of an attempt.

    `fragments` has for each member, by position, the nodes with its fragment and all files of the fragment;
    `parities` the nodes with its parity file.
    """

    group: ParityGroup
    fragments: tuple[tuple[str, ...], ...]
    parities: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpace:
    """The size and use, in bytes, of the file system with a node's staging folder."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The inventory of one node: its complete fragments, and all its checkpoint folders of a run.

    Folders that are being deleted are left out. `session_key` is that of the group at work on the node, if
    any. `plan` is its plan, if the coordinator that asks does not know that session: plans are large.
    `disk` identifies the staging folder: a machine that returns has a new node id, but its copies must count
    only once.
    """

    fragments: tuple[StoredFragment, ...]
    directories: tuple[str, ...]
    session_key: SessionKey | None = None
    plan: SessionPlan | None = None
    disk: str = ""
    parities: tuple[StoredParity, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionNode:
    """A node in a session: its index in the manifest and the holders of its copies."""

    node_id: str
    node_index: int
    ranks: tuple[int, ...]
    holders: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """The checkpoint that a group restores, and the holders of each fragment (remote if durable).

    `fragments` are the digests of the committed fragments, proven by the root digest in the log; empty if the
    inventories of the nodes did not prove them. `groups` are the parity groups from which fragments without a
    holder, or with a damaged copy, can be computed.
    """

    checkpoint: CheckpointInfo
    holders: tuple[tuple[str, ...], ...]
    fragments: tuple[str, ...] = ()
    groups: tuple[GroupPlaces, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan:
    """The session of a group, as sent to the group's nodes when the session is in the log."""

    run_uid: str
    session: int
    world_size: int
    nodes: tuple[SessionNode, ...]
    resume: ResumePoint | None
    owner: str = ""  # the launcher of the group
    epoch: int = 0  # epoch of the coordinator that opened the session
    groups: tuple[ParityGroup, ...] = ()  # the parity groups of its saves; () without the option `parity`
    chosen_by: Resume = "auto"  # the launcher's choice of a checkpoint, for the case that it is damaged
    left: tuple[SessionKey, ...] = ()  # sessions that this group has left for another checkpoint

    @property
    def session_key(self) -> SessionKey:
        """Key that sorts sessions, logged or not, in the order in which they were opened."""
        return self.epoch, self.session

    def continues(self, session_key: SessionKey) -> bool:
        """Return True if a session is this one, or one that this group has left for another checkpoint."""
        return session_key == self.session_key or session_key in self.left

    def group_of(self, node_index: int) -> ParityGroup | None:
        """Return the parity group of a node, or None."""
        return next((group for group in self.groups if node_index in group.members), None)

    def has(self, attempt: AttemptId) -> bool:
        """Return True if the attempt belongs to this session."""
        return attempt.run_uid == self.run_uid and (attempt.epoch, attempt.session) == self.session_key


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """The last completed optimizer step of a rank, and the rank's last saved step (-1: none)."""

    step: int
    saved_step: int
    since_s: float = 0.0  # seconds since the last completed step
    step_s: float = 0.0  # duration of a recent step, in seconds; 0: not measured yet
    missed: int = 0  # number of the last save signal that the rank read too late for its step
    stall_s: float = 0.0  # seconds for which the rank's last save held up training
    saved_before: int | None = None  # the step saved before `saved_step`; None: not reported
    updates: int = 0  # optimizer steps since the restore; 0: optimizers cannot be watched
    saved_updates: int = 0  # value of `updates` at the rank's last save
    is_over: bool = False  # the rank's training loop has ended: no more saves


@dataclass(frozen=True, slots=True, kw_only=True)
class Salvage:
    """The decision on a salvage: a save of a finished step by ranks that outlive others of their group.

    `savers` capture what they hold in common with other ranks; the own state of all other ranks comes from
    `nodes`, which keep it for them. Without an attempt nothing is saved, for `reason`.
    """

    session_key: SessionKey
    attempt: AttemptId | None = None
    savers: tuple[int, ...] = ()
    nodes: tuple[SessionNode, ...] = ()  # nodes that write a fragment, with the ranks in it
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """Ranks of a node that have captured an attempt, while other ranks of the node have not."""

    attempt: AttemptId
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemsPart:
    """Some items of one fragment, as a node has uploaded them.

    `source` is the fragment of the whole checkpoint from which they were taken; `fragment` lists the uploaded
    files, and `size_bytes` is the size of all of these.
    """

    source: FileEntry
    fragment: FileEntry
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedUpload:
    """A multipart upload on the storage path, begun `age_s` seconds ago by the store's clock.

    `directory` is a checkpoint's, or one of some items of a checkpoint.
    """

    directory: str
    file: str
    upload_id: str
    age_s: float
