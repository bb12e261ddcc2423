"""Plain records that every room shares. No IO, no behaviour beyond small derivations."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal, TypeAlias, get_args

MetricValue: TypeAlias = float


class Level(enum.IntEnum):
    """What a committed checkpoint has reached; each level survives what the ones below it survive."""

    LOCAL = 1  # fsynced on the node of every rank: survives process death
    REPLICATED = 2  # and on `replicas` other nodes: survives the loss of that many nodes
    DURABLE = 3  # on the storage path: survives the cluster

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One N-D region of a global tensor.

    `offset` and `shape` have as many dimensions as `global_shape`; a scalar has none.
    `dtype` is the safetensors name (`F32`, `BF16`, `I64`, `U8`, ...).
    """

    item: str
    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        """The name under which the tensor stands in a safetensors header, as DCP flattens it."""
        return f"{self.item}.{self.name}" if self.name else self.item

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


RowKind: TypeAlias = Literal["header", "slice", "state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestRow:
    """A byte range of a file of the checkpoint and its digest (xxh3-128, 32 hex digits).

    The rows of a file cover each of its bytes exactly once. `slice` is set for kind "slice" only.
    """

    kind: RowKind
    file: str
    byte_offset: int
    nbytes: int
    digest: str
    slice: Slice | None = None

    @property
    def label(self) -> str:
        """What a person calls this range in an error."""
        if self.slice is None:
            return self.kind
        region = ", ".join(f"{o}:{o + n}" for o, n in zip(self.slice.offset, self.slice.shape, strict=True))
        return f"{self.slice.key}[{region}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file of a checkpoint: its name, its size in bytes and the digest of all of its bytes."""

    name: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptId:
    """One try at a save. Its directory name is never used by another attempt.

    `epoch` is that of the coordinator that opened the session: the number of a session that never came into
    the log may be used again, the two together never.
    """

    run_uid: str
    session: int
    step: int
    attempt: str
    epoch: int = 0

    @property
    def directory(self) -> str:
        return f"{self.step:012d}-{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """What one node adds to the manifest: fragment `node_index` of `num_nodes` of an attempt."""

    attempt: AttemptId
    node_index: int
    num_nodes: int
    world_size: int
    ranks: tuple[int, ...]
    files: tuple[FileEntry, ...]  # without the fragment's own file
    rows: tuple[ManifestRow, ...]
    replicated: tuple[str, ...] = ()  # digests of what its ranks hold in common with all others
    metrics: Mapping[str, MetricValue] | None = None  # from the node of rank 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFacts:
    """What ranks and nodes tell of a save: how its tensors were cut, and how long its parts took.

    `mesh` is the device mesh of its DTensors, such as "data=4 tensor=2" (`mesh_text`); "" if there is none.
    Times are seconds, of the slowest rank or node; None if nobody has said.

    `stall_s`: it held up training. `capture_s`: from its beginning until all was copied; of a stream, until
    the agent began to read. `local_s`: from a node's last capture until all of its files were fsynced.
    """

    stall_s: float | None = None
    capture_s: float | None = None
    local_s: float | None = None
    mesh: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """What the log says of one checkpoint."""

    id: AttemptId
    seq: int
    level: Level
    world_size: int
    num_nodes: int
    size_bytes: int
    root_digest: str
    committed_at_s: float  # Unix time, seconds, of the coordinator's clock: for people and for ages
    metrics: Mapping[str, MetricValue]
    state: Literal["live", "lost", "retired", "collected"] = "live"
    replicas: int = 0  # copies on other nodes that the commit or a promotion has proven
    pins: Mapping[str, float | None] = field(default_factory=dict)  # owner -> Unix time when it ends
    verified_at_s: float | None = None  # Unix time of the last scrub that found every copy good
    durable_at_s: float | None = None  # Unix time at which it was on the storage path entirely
    replicated_at_s: float | None = None  # Unix time at which copies on other nodes were proven first
    mesh: str = ""  # this and the next three: `SaveFacts` of the save
    stall_s: float | None = None
    capture_s: float | None = None
    local_s: float | None = None
    replicate_s: float | None = None  # for which its commit waited for copies, when all nodes had stored it
    drilled_at_s: float | None = None  # Unix time of the last recovery drill that read it
    drill: str = ""  # what came of that drill

    @property
    def step(self) -> int:
        return self.id.step

    @property
    def directory(self) -> str:
        return self.id.directory


EndCause: TypeAlias = Literal["finished", "process", "node", "preemption", "replaced", "launcher"]
END_CAUSES: tuple[EndCause, ...] = get_args(EndCause)
FAILURES: frozenset[EndCause | None] = frozenset(("process", "node", "preemption", "launcher"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnd:
    """How a session ended, and what its ranks had told until then.

    `cause`: its launcher finished; a process failed; a node was lost; a node left after a notice; another
    launcher took the run; its launcher died or was stopped. `step` is the last optimizer step that a rank
    completed, at Unix time `last_at_s`; at `first_at_s` the first one had begun. `stalled_s` is the time for
    which saves held up training. Times are None where nobody has said: no step was completed, or a
    coordinator died in between.
    """

    cause: EndCause
    step: int
    first_at_s: float | None = None
    last_at_s: float | None = None
    stalled_s: float | None = None


ROLLBACK_PREFIX = "rollback-"  # of the service that a rollback is for itself; a cluster's is a bare uuid


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """One training group's tenure; `parent` and `resumed_from` give the branch of the lineage it is on."""

    session: int
    parent: int | None
    resumed_from: str | None
    world_size: int
    num_nodes: int
    opened_at_s: float
    opened_by: int = 0  # the epoch of the coordinator that began it, which may be older than its record
    service: str = ""
    owner: str = ""
    retention: str = ""
    restored_at_s: float | None = None  # when all ranks had their state; None: nothing was restored
    restore_s: float | None = None  # of the slowest rank; None also in logs from before it was kept
    read_bytes: Mapping[str, float] = field(default_factory=dict)  # by that restore, from each tier
    ended: SessionEnd | None = None  # None: it is at work, or its coordinator died with it
    origin_step: int | None = None  # that of another run's checkpoint which it went on from

    @property
    def is_rollback(self) -> bool:
        """Nobody trains in it: it says what the next one goes on from."""
        return self.service.startswith(ROLLBACK_PREFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """What the death of one node would cost right now.

    `step` is the newest checkpoint that would be left, `tier` where its lost parts would come from, and
    `steps_at_risk` how many completed steps would have to be repeated. Without any: step and tier are None.
    """

    node_id: str
    step: int | None
    tier: Literal["local", "peer", "remote"] | None
    steps_at_risk: int


ProgressCallback: TypeAlias = Callable[[int], None]
"""Called with the amount done since the last call, mostly bytes; from several threads, one at a time."""
Tier: TypeAlias = Literal["memory", "local", "peer", "remote"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredPart:
    """How much of a file a rank read from where."""

    file: str
    tier: Tier
    where: str  # a node id, or a path
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRestore:
    """A rank's report after a restore: what it read, how long that took, and what no source could give.

    `origin_step` is that of another run's checkpoint which it goes on from, by `resume=URI`.
    """

    rank: int
    parts: tuple[RestoredPart, ...] = ()
    seconds: float = 0.0
    damage: tuple[str, ...] = ()
    origin_step: int | None = None


ARENA_PAGE_BYTES = 4096  # an arena's state page; the shard file follows it


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPart:
    """Ranks of a group that run torch.distributed among themselves: the actor or the critic of one run."""

    name: str
    world_size: int


def ranks_of(parts: Sequence[GroupPart], name: str, world_size: int) -> range:
    """The ranks of a part among the `world_size` of its group; all, if the group has no parts."""
    first = 0
    for part in parts:
        if part.name == name:
            return range(first, first + part.world_size)
        first += part.world_size
    return range(world_size)
