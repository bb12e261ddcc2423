"""Plain records that all packages share. No IO; methods only derive values."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal, TypeAlias, get_args

MetricValue: TypeAlias = float


MAX_PARITY_DATA = 32  # members with data in a stripe; a repair of one reads all others
MAX_PARITY = 2  # sums of a stripe: a third one needs another code than P and Q


class Level(enum.IntEnum):
    """Durability of a committed checkpoint; each level also survives what the lower ones survive."""

    LOCAL = 1  # fsynced on the node of every rank: survives process death
    REPLICATED = 2  # also on `replicas` other nodes: survives the loss of that many nodes
    DURABLE = 3  # on the storage path: survives the cluster

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A box of a global tensor.

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
        """The tensor's name in a safetensors header, flattened as in torch's DCP."""
        return f"{self.item}.{self.name}" if self.name else self.item

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


RowKind: TypeAlias = Literal["header", "slice", "state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestRow:
    """A byte range of a file of a checkpoint, and its digest (xxh3-128, 32 hex digits).

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
        """The text for this byte range in messages."""
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
class ParityGroup:
    """Nodes of a checkpoint whose files can be computed from each other; see `format/parity.py`.

    `members` are their indexes by position in the group; the files of any `parity` members may be lost.
    """

    members: tuple[int, ...]
    parity: int

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def num_data(self) -> int:
        """Number of members with data in one stripe."""
        return self.size - self.parity

    def place(self, position: int) -> int:
        return position % self.size

    def stripe_of(self, position: int, segment: int) -> int:
        """Return the stripe with a segment of a member."""
        return self.place(position + 1 + segment)

    def segment_in(self, stripe: int, position: int) -> int:
        """Return the segment of a member that is in a stripe; a member with parity there has none."""
        return self.place(stripe - position - 1)

    def exponent(self, stripe: int, position: int) -> int:
        """Return the weight of a member in the Q of a stripe, as an exponent of 2."""
        return self.num_data - 1 - self.segment_in(stripe, position)

    def data_of(self, stripe: int) -> tuple[int, ...]:
        """Return the positions with data in a stripe, from the highest exponent to exponent 0."""
        return tuple(self.place(stripe - 1 - back) for back in range(self.num_data))


def parity_text(groups: Iterable[ParityGroup]) -> str:
    """Return a text such as `6+2`: the files of two of eight nodes may be lost; "" without groups."""
    return ", ".join(dict.fromkeys(f"{group.num_data}+{group.parity}" for group in groups))


RootOf: TypeAlias = Literal["fragments", "files"]
"""The files that a root digest covers: the fragments, which list all others, or all files (older logs)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptId:
    """One attempt at a save, with a directory name that no other attempt uses.

    `epoch` is the epoch of the coordinator that opened the session. A later session may reuse the number of a
    session that was not recorded in the log; the pair of epoch and session number is unique.
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
class FragmentMetadata:
    """The sealed metadata of a fragment: everything but its rows."""

    attempt: AttemptId
    node_index: int
    num_nodes: int
    world_size: int
    ranks: tuple[int, ...]
    files: tuple[FileEntry, ...]
    num_rows: int
    replicated: tuple[str, ...] = ()
    metrics: Mapping[str, MetricValue] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """One node's share of the manifest: fragment `node_index` of `num_nodes` of an attempt."""

    attempt: AttemptId
    node_index: int
    num_nodes: int
    world_size: int
    ranks: tuple[int, ...]
    files: tuple[FileEntry, ...]  # without the fragment's own file
    rows: tuple[ManifestRow, ...]
    replicated: tuple[str, ...] = ()  # digests of content that this node's ranks share with all others
    metrics: Mapping[str, MetricValue] | None = None  # from the node of rank 0

    @property
    def metadata(self) -> FragmentMetadata:
        return FragmentMetadata(
            attempt=self.attempt,
            node_index=self.node_index,
            num_nodes=self.num_nodes,
            world_size=self.world_size,
            ranks=self.ranks,
            files=self.files,
            num_rows=len(self.rows),
            replicated=self.replicated,
            metrics=self.metrics,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFacts:
    """The mesh and the timings of a save, reported by ranks and nodes.

    `mesh` is the device mesh of the saved DTensors, such as "data=4 tensor=2" (`mesh_text`); "" if there is
    none. Times are seconds of the slowest rank or node; None if nothing was reported.

    `stall_s`: time for which the save stalled training. `capture_s`: time from the start of the save until
    the state was copied or, with a stream, until the agent began to read. `local_s`: time from the last
    capture on a node until all files of that node were fsynced.

    `shared_bytes` are those of files that the nodes have linked to an earlier checkpoint's, all together.

    With parity: `is_rewritten` if a node has written a still shard although an earlier save had one, and
    `bad_copies` are the earlier attempts whose copy of a still shard on the node was damaged.
    """

    stall_s: float | None = None
    capture_s: float | None = None
    local_s: float | None = None
    mesh: str = ""
    shared_bytes: int = 0
    is_rewritten: bool = False
    bad_copies: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Digests of the bytes that a save compares between replicas; reports of the same `group` are compared.

    `group` is a digest of the window, the replicas and the tensors, `digests` has one for each piece of the
    window, and `names` the tensors in these pieces, from the lowest of the replicas only. `ranks` are those
    that report this.
    """

    group: str
    digests: tuple[str, ...]
    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """One checkpoint as the log describes it."""

    id: AttemptId
    seq: int
    level: Level
    world_size: int
    num_nodes: int
    size_bytes: int
    root_digest: str
    committed_at_s: float  # Unix time by the coordinator's clock, for display and for ages
    metrics: Mapping[str, MetricValue]
    state: Literal["live", "lost", "retired", "collected"] = "live"
    replicas: int = 0  # copies on other nodes, or losses that the parity groups allow for, once proven
    parity: str = ""  # those parity groups, such as `6+2`; empty if there are copies
    pins: Mapping[str, float | None] = field(default_factory=dict)  # owner -> Unix time when the pin ends
    verified_at_s: float | None = None  # Unix time of the last scrub that found every copy intact
    durable_at_s: float | None = None  # Unix time when the storage path had the whole checkpoint
    replicated_at_s: float | None = None  # Unix time at which copies on other nodes were first proven
    mesh: str = ""  # `mesh` to `local_s`: the `SaveFacts` of the save
    stall_s: float | None = None
    capture_s: float | None = None
    local_s: float | None = None
    replicate_s: float | None = None  # wait of the commit for copies after all nodes had stored their files
    drilled_at_s: float | None = None  # Unix time of the last recovery drill of this checkpoint
    drill: str = ""  # outcome of that drill
    root_of: RootOf = "fragments"  # the files that `root_digest` covers
    suspect: str = ""  # replicas that differed at this save, if any were found
    shared_bytes: int = 0  # of `size_bytes`: in files that are links to an earlier checkpoint's on the nodes
    damaged: str = ""  # fragments that are damaged or unreadable on the storage path: indices, with commas
    exported: str = ""  # items, joined by commas, that the storage path has apart from the whole checkpoint
    exported_root: str = ""  # root digest of their fragments
    exported_bytes: int = 0
    exported_at_s: float | None = None  # Unix time when the storage path had all of them

    @property
    def exported_items(self) -> tuple[str, ...]:
        return tuple(self.exported.split(",")) if self.exported else ()

    @property
    def kept_items(self) -> str:
        """`exported` while the storage path keeps these items, which it does not for a retired checkpoint."""
        return self.exported if self.state in ("live", "lost") else ""

    @property
    def flaws(self) -> tuple[str, ...]:
        """Known flaws in a word or two, for rows of tables."""
        found = {"damaged": self.damaged, "drifted apart": self.suspect}
        return tuple(flaw for flaw, finding in found.items() if finding)

    @property
    def step(self) -> int:
        return self.id.step

    @property
    def directory(self) -> str:
        return self.id.directory

    @property
    def drain_s(self) -> float | None:
        """Seconds from the commit until the whole checkpoint was on the storage path, waiting included."""
        return None if self.durable_at_s is None else max(0.0, self.durable_at_s - self.committed_at_s)


EndCause: TypeAlias = Literal["finished", "process", "node", "preemption", "replaced", "launcher"]
END_CAUSES: tuple[EndCause, ...] = get_args(EndCause)
FAILURES: frozenset[EndCause | None] = frozenset(("process", "node", "preemption", "launcher"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnd:
    """The end of a session, and the last progress that its ranks had reported.

    `cause`, in the order of EndCause: the launcher finished; a process failed; a node was lost; a node left
    after a preemption notice; another launcher took the run; the launcher died or was stopped. `step` is the
    last optimizer step that a rank completed, at Unix time `last_at_s`; the first step began at `first_at_s`.
    `stalled_s` is the time for which saves stalled training. Times are None if they were not reported, since
    no step was completed or a coordinator died in the meantime.
    """

    cause: EndCause
    step: int
    first_at_s: float | None = None
    last_at_s: float | None = None
    stalled_s: float | None = None


ROLLBACK_PREFIX = "rollback-"  # prefix of "service" in a rollback; the "service" of a cluster is a bare uuid
IMPORT_PREFIX = "import-"  # prefix of "service" in the session of an import


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTimes:
    """Moments in which a launcher replaced a failed group, as Unix times of the launcher's clock.

    The launcher noticed the failure of the previous group (`noticed_at_s`); the processes of the previous
    group had ended (`previous_ended_at_s`); the processes of the new group had started (`started_at_s`). A
    moment is None if it is unknown; the first group of a launcher has `started_at_s` only.
    """

    noticed_at_s: float | None = None
    previous_ended_at_s: float | None = None
    started_at_s: float | None = None


UNKNOWN_LAUNCH = LaunchTimes()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """The time of one training group; `parent` and `resumed_from` give its branch of the lineage.

    `noticed_at_s`, `previous_ended_at_s` and `started_at_s` are those of `LaunchTimes`.
    """

    session: int
    parent: int | None
    resumed_from: str | None
    world_size: int
    num_nodes: int
    opened_at_s: float
    opened_by: int = 0  # epoch of the coordinator that began the session; the record may have a later one
    service: str = ""
    owner: str = ""
    retention: str = ""
    restored_at_s: float | None = None  # Unix time when all ranks had state; None: no restore
    restore_s: float | None = None  # seconds of the slowest rank; None also in older logs
    read_bytes: Mapping[str, float] = field(default_factory=dict)  # bytes of the restore by tier
    ended: SessionEnd | None = None  # None: active, or the coordinator died with the session
    origin_step: int | None = None  # step of another run's checkpoint that the session started with
    noticed_at_s: float | None = None
    previous_ended_at_s: float | None = None
    started_at_s: float | None = None
    connected_at_s: float | None = None  # Unix time when the last rank was connected; None: unknown

    @property
    def is_rollback(self) -> bool:
        """True for a rollback, a session without training from which the next session continues."""
        return self.service.startswith(ROLLBACK_PREFIX)

    @property
    def is_import(self) -> bool:
        """True for an import, a session without training that has one checkpoint of another format."""
        return self.service.startswith(IMPORT_PREFIX)

    @property
    def is_offline(self) -> bool:
        """True for a session without training: a rollback or an import."""
        return self.is_rollback or self.is_import


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """The cost of losing one node at this moment.

    `step` is the step of the newest checkpoint that would be left, `tier` the tier from which the lost parts
    of that checkpoint would be read, and `steps_at_risk` the number of completed steps to repeat. `step` and
    `tier` are None if no checkpoint would be left.
    """

    node_id: str
    step: int | None
    tier: Literal["local", "peer", "remote"] | None
    steps_at_risk: int


ProgressCallback: TypeAlias = Callable[[int], None]
"""Called with the amount done since the last call, mostly bytes; several threads call it, one at a time."""
Tier: TypeAlias = Literal["memory", "local", "peer", "remote"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredPart:
    """The bytes of a file that a rank read from one source, or that the node's agent read there ahead."""

    file: str
    tier: Tier
    where: str  # a node id, or a path
    size_bytes: int
    seconds: float
    is_prefetched: bool = False  # in memory, and verified, before the rank asked


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRestore:
    """A rank's report of a restore: the parts read, the seconds taken, and the damage that is left.

    `is_unreachable`: for each part in `damage` there is a source that was not reached and may be intact.
    `bad_nodes` are ids of nodes from whose disks the rank has read bytes that differ from their digests.
    `origin_step` is the step of the other run's checkpoint that `resume=URI` named. `connected_at_s` is the
    Unix time, by the clock of the rank's node, at which the rank got its connection.
    """

    rank: int
    parts: tuple[RestoredPart, ...] = ()
    seconds: float = 0.0
    damage: tuple[str, ...] = ()
    is_unreachable: bool = False
    bad_nodes: tuple[str, ...] = ()
    origin_step: int | None = None
    connected_at_s: float | None = None


SMALL_TENSOR_BYTES = 64 << 10  # smaller whole tensors are saved on each node that has them
ARENA_PAGE_BYTES = 4096  # an arena's state page; the shard file follows it


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPart:
    """Ranks of a group with their own torch.distributed world, such as the actor or the critic of a run."""

    name: str
    world_size: int


def ranks_of(parts: Sequence[GroupPart], name: str, world_size: int) -> range:
    """Return the ranks of a part among the `world_size` of its group; all if the group has no parts."""
    first = 0
    for part in parts:
        if part.name == name:
            return range(first, first + part.world_size)
        first += part.world_size
    return range(world_size)
