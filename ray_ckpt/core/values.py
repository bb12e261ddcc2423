"""Values that the messages of the machines carry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ray_ckpt.types import AttemptId, CheckpointInfo, FileEntry

Token: TypeAlias = str  # names a caller that waits for a reply
SessionKey: TypeAlias = tuple[int, int]  # the epoch in which a session began, and the session's number

STILL_WRITING = "the save before it is still being written"  # reason to skip a save; counted by this text


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNode:
    """A node of a training group and the ranks on it."""

    node_id: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFragment:
    """Fragment `node_index` of an attempt, complete on a node with all its files."""

    attempt: AttemptId
    node_index: int
    num_nodes: int
    ranks: tuple[int, ...] = ()
    files: tuple[FileEntry, ...] = ()  # the fragment's own file last
    replicated: tuple[str, ...] = ()
    metrics: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpace:
    """The file system of a node's staging folder, bytes."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The holdings of one node: complete fragments, and the names of all checkpoint folders of a run.

    Folders that are being deleted are left out. `plan` is that of the group at work there, if any. `disk`
    names the staging folder itself: a machine that returns has a new node id, and the same copies count once.
    """

    fragments: tuple[StoredFragment, ...]
    directories: tuple[str, ...]
    plan: SessionPlan | None = None
    disk: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionNode:
    """A node in a session: its index in the manifest and the holders of its copies."""

    node_id: str
    node_index: int
    ranks: tuple[int, ...]
    holders: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """The checkpoint that a group restores, and per fragment the nodes that hold it (remote if durable)."""

    checkpoint: CheckpointInfo
    holders: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan:
    """The session of a group, as sent to its nodes when it is in the log."""

    run_uid: str
    session: int
    world_size: int
    nodes: tuple[SessionNode, ...]
    resume: ResumePoint | None
    owner: str = ""  # the launcher of the group
    epoch: int = 0  # of the coordinator that opened it

    @property
    def session_key(self) -> SessionKey:
        """Sessions in the order in which they were opened, also those that never came into the log."""
        return self.epoch, self.session

    def has(self, attempt: AttemptId) -> bool:
        """Return True for an attempt of this session."""
        return attempt.run_uid == self.run_uid and (attempt.epoch, attempt.session) == self.session_key


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """The last completed optimizer step of a rank, and the last one that it saved (-1: none)."""

    step: int
    saved_step: int
    since_s: float = 0.0  # seconds since that step was completed
    step_s: float = 0.0  # seconds that a step took recently; 0: not known yet
    missed: int = 0  # the signal of an announced step that the rank was past when it saw it
    stall_s: float = 0.0  # seconds for which its last save held up training
    saved_before: int | None = None  # the step that it saved before `saved_step`; None: not reported
    updates: int = 0  # optimizer steps since it restored; 0: its optimizers cannot be watched
    saved_updates: int = 0  # and how many of them were made when it saved last
    is_over: bool = False  # its loop has ended: it saves nothing more


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """Ranks of a node that have captured an attempt which other ranks of that node lack."""

    attempt: AttemptId
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedUpload:
    """A multipart upload on the storage path that was begun `age_s` ago, by the store's clock."""

    directory: str
    file: str
    upload_id: str
    age_s: float
