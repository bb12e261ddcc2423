"""Reader of a checkpoint's rows, from the cheapest intact source straight to their targets.

Rows are gathered into extents that several threads read; the bytes of an extent arrive in order, and each
piece is hashed and copied while the piece is in the CPU cache. A target may therefore hold wrong bytes for a
while: either bytes from the next source overwrite the wrong bytes, or the row is listed in `damage`, and then
the targets must not be used. Memory is bounded by the buffers of a few threads, whatever the size of the
checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ray_ckpt.core.values import GroupPlaces, SessionKey
from ray_ckpt.errors import CheckpointError, CorruptionError, FormatError, Unavailable, is_lost
from ray_ckpt.format.blocks import BlockCutter
from ray_ckpt.format.digest import Digester, digest
from ray_ckpt.plan.restore import RowKey, row_key
from ray_ckpt.restore.extents import Extent, Tally, cut_extents, first_rows, rows_by_file
from ray_ckpt.restore.manifest import ManifestRef
from ray_ckpt.restore.parity import PARITY, Coded, GroupReader, GroupSources, further_ways, group_sources
from ray_ckpt.restore.sources import ByteSource, Disk, Mapped, Peer, Peers, Remote
from ray_ckpt.storage.remote.tier import RemoteRef, RemoteTier
from ray_ckpt.texts import tier_text
from ray_ckpt.transport.credentials import Credentials
from ray_ckpt.transport.sending import Limiter
from ray_ckpt.transport.wire import FileName
from ray_ckpt.types import (
    ARENA_PAGE_BYTES,
    AttemptId,
    CheckpointInfo,
    ManifestRow,
    RestoredPart,
    Tier,
)

PIECE_BYTES = 2 << 20  # hashed and then copied: small enough for a cache, long enough for stores that stream
FETCH_BYTES = 256 << 20  # requested from the node's agent at a time
MIN_RELEASED_BYTES = 256 << 10  # of a copy without the GIL: to get it back costs more than a smaller copy
PROGRESS_S = 1.0  # between two calls of `progress`
LOG_EVERY_S = 5.0  # between two lines about a long restore
BUSY_ROUNDS = 5  # of reading from busy peers, none of which served a row; a peer lets each wait for 20 s
MAX_REJECTED = 200  # notes about bad rows and sources; more notes would repeat these

Bytes: TypeAlias = npt.NDArray[np.uint8]


def num_threads(tier: Tier) -> int:
    """Return the number of extents to read at a time from a tier.

    Reads from memory keep every core busy, up to 8: more threads wait for the interpreter's lock longer than
    they copy, as jobs/bench/results/h100.md shows. A disk read has a read-ahead, so two extents suffice: the
    start of one extent overlaps with the other extent, and more extents would only hold more buffers. Peers
    and stores have a high latency and many disks.
    """
    if tier == "memory":
        return min(8, len(os.sched_getaffinity(0)))
    return 2 if tier == "local" else 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSource:
    """A copy of a file: at a path on this node, at a peer's endpoint, or on the run's storage path.

    With `is_verified` the copy is in memory at `path`, and the node's agent has compared it with its digests
    there. If the agent has read the file ahead, `tier` and `where` are those of the source that it read.
    """

    tier: Tier
    where: str  # node id or storage path, for messages
    path: str = ""
    endpoint: str = ""
    is_verified: bool = False
    base: int = ARENA_PAGE_BYTES  # of the file's first byte, in memory
    group: GroupSources | None = None  # the file is computed from those of other peers

    @property
    def is_in_memory(self) -> bool:
        return self.is_verified or self.tier == "memory"


def parity_sources(
    index: int, groups: Iterable[GroupPlaces], num_nodes: int, endpoints: Mapping[str, str]
) -> list[FileSource]:
    """Return the sources that compute the files of a fragment, if its group has parity files."""
    return [
        FileSource(tier="peer", where=PARITY, group=sources)
        for places in groups
        if index in places.group.members and any(places.parities)
        for sources in group_sources(places, num_nodes, endpoints)
    ]


def further_sources(sources: Iterable[FileSource]) -> Iterator[FileSource]:
    """Yield the sources to read after all others, of a file that may be computed: see `further_ways`."""
    coded = next((source for source in sources if source.group is not None), None)
    if coded is not None and coded.group is not None:
        for way in further_ways(coded.group):
            yield replace(coded, group=way)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreTicket:
    """Input of a restore on one rank: checkpoint, manifest, and each file's sources, best source first.

    If `is_whole` is false, manifest and sources are those of this node's own fragment, and a rank that needs
    more requests the whole ticket.
    """

    session_key: SessionKey
    checkpoint: CheckpointInfo | None
    manifest: ManifestRef | None = None
    sources: Mapping[str, tuple[FileSource, ...]] = field(default_factory=dict)
    credentials: Credentials | None = field(default=None, repr=False)
    storage: RemoteRef | None = None  # for remote sources
    damage: tuple[str, ...] = ()  # reasons why the manifest cannot be read; then there is nothing to restore
    is_unreachable: bool = False  # the manifest may be intact at a source that was not reached
    node_ranks: tuple[int, ...] = ()  # the ranks of this node
    is_whole: bool = True

    @property
    def remote(self) -> RemoteTier | None:
        """The tier for remote sources, opened with this process's credentials."""
        return self.storage.open() if self.storage is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRows:
    """Rows that the node's agent has read for all its ranks, in memory that a rank can map.

    A requested row that is in neither `offsets` nor `refused` will be available later.
    """

    path: str = ""
    offsets: Mapping[RowKey, int] = field(default_factory=dict)
    origin: Mapping[str, tuple[Tier, str]] = field(default_factory=dict)  # by file: tier and `where`
    refused: tuple[RowKey, ...] = ()  # rows that the rank must read itself


FetchRows: TypeAlias = Callable[[Mapping[RowKey, tuple[int, ...]], tuple[RowKey, ...]], SharedRows]
"""Function that requests rows from the agent, each row with the ranks of the node that want it, and reports
the rows that this rank has copied since the last call. The function blocks until some rows are available or
refused. CheckpointError if there is no agent."""

RestoreProgress: TypeAlias = Callable[[int, int, Tier], None]
"""Called with bytes read, bytes wanted and the current tier, from one thread, about once a second."""


class Sink(Protocol):
    """Target of the bytes of one row. A row that is read again gets a new sink."""

    def write(self, view: memoryview) -> None:
        """Take the next bytes; `view` is valid during the call only."""
        ...

    def finish(self) -> None:
        """Complete the row after all bytes have arrived and matched the row's digest."""
        ...


SinkFor: TypeAlias = Callable[[ManifestRow], Sink]


class FlatSink:
    """Sink that copies bytes into memory as the bytes arrive."""

    def __init__(self, destination: Bytes) -> None:
        self._destination = destination
        self._at = 0

    def write(self, view: memoryview) -> None:
        end = self._at + view.nbytes
        if view.nbytes < MIN_RELEASED_BYTES:
            self._destination.data[self._at : end] = view.cast("B")
        else:
            np.copyto(self._destination[self._at : end], np.frombuffer(view, np.uint8))  # releases the GIL
        self._at = end

    def finish(self) -> None:
        pass


class SourceReader:
    """Reader of a checkpoint's rows, at the rate of `limiter`.

    `parts` has the bytes by file and source, `damage` the rows without an intact source, `rejected` notes
    about bad rows and sources, `bad_nodes` the nodes whose disks had bad rows. `is_unreachable` is true if
    there is damage, and for each row of it a source that was not reached and may be intact.
    """

    def __init__(
        self,
        attempt: AttemptId,
        sources: Mapping[str, Sequence[FileSource]],
        *,
        credentials: Credentials | None,
        remote: RemoteTier | None = None,
        fetch: FetchRows | None = None,
        progress: RestoreProgress | None = None,
        limiter: Limiter | None = None,
        gone: set[str] | None = None,
    ) -> None:
        """Readers with one `gone` share what they learn: the addresses of peers that no longer answer."""
        self._attempt = attempt
        self._sources = sources
        self._remote = remote
        self._fetch = fetch
        self._meter = _Meter(progress)
        self._limiter = limiter or Limiter()
        self._peers = Peers(credentials, self._limiter.slowest_bytes_per_s, gone)
        self._maps: dict[tuple[str, int], Mapped] = {}  # by path and position
        self._groups: dict[GroupSources, GroupReader] = {}
        self._lock = threading.Lock()
        self._busy: set[str] = set()  # files with a source that answered, and could not serve
        self._unreached: set[str] = set()  # files with a source that was not reached
        self._miscomputed: set[RowKey] = set()  # rows that a parity group has computed wrong
        self._is_lost = False  # all sources of a row have answered, and none has it intact
        self.parts: list[RestoredPart] = []
        self.damage: list[str] = []
        self.rejected: list[str] = []
        self.bad_nodes: set[str] = set()

    def read(
        self,
        rows: Iterable[ManifestRow],
        sink_for: SinkFor,
        sharers: Mapping[RowKey, tuple[int, ...]] | None = None,
    ) -> None:
        """Write each row to its sink and verify the row; add rows without an intact source to `damage`.

        Several threads call `sink_for` and the sinks, but only one thread at a time those of one row.
        `sharers` has the rows that several ranks of this node want; these rows are first requested from the
        agent. An empty row needs no source.
        """
        rows = list(rows)
        for row in rows:
            if not row.nbytes:
                sink_for(row).finish()
        left = rows_by_file(row for row in rows if row.nbytes)
        self._meter.begin(sum(row.nbytes for wanted in left.values() for row in wanted))
        with contextlib.ExitStack() as stack:
            stack.callback(self._unmap)
            stack.callback(self._peers.close)
            pools = _Pools(stack)
            if sharers and self._fetch is not None:
                self._read_shared(left, sink_for, sharers, pools, self._fetch)
            self._read_in_turns(left, sink_for, pools)
        for file in sorted(left):
            self.damage += [f"{file}: {row.label}" for row in left[file]]
            self._is_lost |= bool(left[file]) and file not in self._unreached

    @property
    def is_unreachable(self) -> bool:
        return bool(self.damage) and not self._is_lost

    def _read_in_turns(self, left: dict[str, list[ManifestRow]], sink_for: SinkFor, pools: _Pools) -> None:
        """Read the rows in `left` from their sources, and again while busy sources serve some of them.

        A peer serves some reads at a time, and lets another one wait before it answers that it is busy. When
        a large group reads from few peers, that is no damage.
        """
        rounds_left, wanted = BUSY_ROUNDS, left
        while rounds_left and wanted:
            num_rows = sum(map(len, wanted.values()))
            self._busy.clear()
            self._unreached.difference_update(wanted)
            turn, extents = 0, self._extents(wanted, 0)
            while extents:
                self._read_extents(extents, sink_for, pools, left)
                wanted = {file: left[file] for file in wanted}
                turn, extents = turn + 1, self._extents(wanted, turn + 1)
            wanted = {file: left[file] for file in self._busy if left[file]}
            has_progress = sum(map(len, wanted.values())) < num_rows
            rounds_left = BUSY_ROUNDS if has_progress else rounds_left - 1

    def read_bytes(self, row: ManifestRow) -> bytes | None:
        """Return a row's verified bytes; None if no source has intact bytes."""
        data, damaged = np.empty(row.nbytes, np.uint8), len(self.damage)
        self.read([row], lambda _: FlatSink(data))
        return None if len(self.damage) > damaged else data.tobytes()

    def _extents(self, left: Mapping[str, Sequence[ManifestRow]], turn: int) -> list[Extent]:
        """Cut the remaining rows, for source number `turn` of each file; [] if no file has such a source."""
        extents: list[Extent] = []
        for file in sorted(left):
            source = self._source(file, turn) if left[file] else None
            if source is not None:
                tally = Tally(file, source.tier, source.where, is_prefetched=source.is_verified)
                placed = ((row.byte_offset, row) for row in left[file])
                extents += cut_extents(self._byte_source(source, file), tally, placed)
        return extents

    def _source(self, file: str, turn: int) -> FileSource | None:
        """Return source number `turn` of a file, the further ones last; None if there are fewer."""
        sources = self._sources.get(file, ())
        if turn < len(sources):
            return sources[turn]
        return next(islice(further_sources(sources), turn - len(sources), None), None)

    def _byte_source(self, source: FileSource, file: str) -> ByteSource:
        if source.is_in_memory:
            seal = self._attempt.attempt.encode()
            if source.tier != "memory":
                seal = prefetch_seal(self._attempt, file)
            return self._mapped(source.path, base=source.base, seal=seal, is_verified=source.is_verified)
        if source.group is not None:
            if source.group not in self._groups:
                group = GroupReader(self._attempt, source.group, self._peers, self._limiter)
                self._groups[source.group] = group
            return Coded(self._groups[source.group], file, source.group.left_out)
        if source.tier == "peer":
            name = FileName(run_uid=self._attempt.run_uid, directory=self._attempt.directory, file=file)
            return Peer(self._peers, source.endpoint, name)
        if source.tier == "remote" and self._remote is not None:
            return Remote(self._remote, self._attempt.directory, file)
        return Disk(Path(source.path))

    def _mapped(self, path: str, *, base: int, seal: bytes, is_verified: bool = False) -> Mapped:
        new = Mapped(path, base=base, seal=seal, is_verified=is_verified)
        return self._maps.setdefault((path, base), new)

    def _unmap(self) -> None:
        while self._maps:
            self._maps.popitem()[1].close()

    def _read_shared(
        self,
        left: dict[str, list[ManifestRow]],
        sink_for: SinkFor,
        sharers: Mapping[RowKey, tuple[int, ...]],
        pools: _Pools,
        fetch: FetchRows,
    ) -> None:
        """Read the rows that the agent shares. All ranks request them in the same order: see SharedReads."""
        wanted = {
            key: row
            for file in sorted(left)
            if not any(source.is_in_memory for source in self._sources.get(file, ()))
            for row in left[file]
            if (key := row_key(row)) in sharers
        }
        taken: tuple[RowKey, ...] = ()
        try:
            while wanted:
                shared = fetch({key: sharers[key] for key in first_rows(wanted, FETCH_BYTES)}, taken)
                taken = tuple(shared.offsets)
                if not taken and not shared.refused:
                    raise Unavailable("The agent returned no rows.")
                self._read_extents(self._shared_extents(shared, wanted), sink_for, pools, left)
                for key in (*taken, *shared.refused):
                    wanted.pop(key, None)
            if taken:
                fetch({}, taken)
        except CheckpointError as error:
            self._reject(f"reading together with the other ranks of this node: {error}")

    def _shared_extents(self, shared: SharedRows, wanted: Mapping[RowKey, ManifestRow]) -> list[Extent]:
        files: dict[str, list[tuple[int, ManifestRow]]] = {}
        for key, offset in shared.offsets.items():
            files.setdefault(key[0], []).append((offset, wanted[key]))
        memory = self._mapped(shared.path, base=0, seal=b"")
        return [
            extent
            for file, placed in files.items()
            for extent in cut_extents(
                memory, Tally(file, *shared.origin[file]), sorted(placed, key=itemgetter(0))
            )
        ]

    def _read_extents(
        self, extents: Sequence[Extent], sink_for: SinkFor, pools: _Pools, left: dict[str, list[ManifestRow]]
    ) -> None:
        """Read all extents; remove the rows that are done from `left`."""
        futures = [pools.of(extent).submit(self._read_extent, extent, sink_for) for extent in extents]
        while True:
            done, waiting = wait(futures, timeout=PROGRESS_S, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            self._meter.report()
            if not waiting:
                break
        finished: dict[str, set[int]] = {}
        for extent in extents:
            finished.setdefault(extent.tally.file, set()).update(row.byte_offset for row in extent.done)
        for file, offsets in finished.items():
            left[file] = [row for row in left[file] if row.byte_offset not in offsets]
        tallies = {id(extent.tally): extent.tally for extent in extents}.values()
        self.parts += [tally.part() for tally in tallies if tally.size_bytes]

    def _read_extent(self, extent: Extent, sink_for: SinkFor) -> None:
        tally, start_s = extent.tally, time.monotonic()
        self._meter.tier = tally.tier
        for tries_left in reversed(range(extent.source.tries)):
            try:
                self._read_rows(extent, sink_for)
                break
            except (OSError, EOFError, Unavailable) as error:
                self._reject(f"{tally.file} on {tally.source_text}: {error}")
                fields = error.fields if isinstance(error, Unavailable) else {}
                if tries_left and not fields.get("refused"):
                    continue
                if not is_lost(error, is_remote=tally.tier == "remote"):
                    self._unreached.add(tally.file)
                if not fields.get("answered"):
                    extent.source.give_up()
                elif not fields.get("refused"):
                    self._busy.add(tally.file)
                break
        with self._lock:
            tally.add(sum(row.nbytes for row in extent.done), start_s, time.monotonic())

    def _read_rows(self, extent: Extent, sink_for: SinkFor) -> None:
        """Read the remaining rows. Rows that were read before an error count as done."""
        extent.source.open()
        intact: list[tuple[ManifestRow, Sink]] = []
        try:
            while extent.left:
                try:
                    with contextlib.closing(extent.source.read(extent.ranges())) as blocks:
                        self._verify(extent, BlockCutter(self._paced(blocks)), sink_for, intact)
                except CorruptionError as error:  # of a compressed frame: rows after it may be intact
                    is_table = isinstance(error, FormatError)
                    extent.drop_until(math.inf if is_table else error.fields.get("end", 0))
                    self._reject(f"{extent.tally.file} on {extent.tally.source_text}: {error}")
        finally:
            extent.source.check()
            for row, sink in intact:
                sink.finish()
                extent.done.append(row)

    def _paced(self, blocks: Iterable[memoryview]) -> Iterator[memoryview]:
        for block in blocks:
            self._limiter.wait(block.nbytes)
            yield block

    def _verify(
        self, extent: Extent, blocks: BlockCutter, sink_for: SinkFor, intact: list[tuple[ManifestRow, Sink]]
    ) -> None:
        at = extent.start
        while extent.left:
            for _ in blocks.pieces(extent.gap(at)):
                pass
            start, row = extent.left[0]
            sink = self._read_intact(row, blocks, sink_for, is_verified=extent.source.is_verified)
            extent.left.popleft()
            at = start + row.nbytes
            if sink is not None:
                intact.append((row, sink))
                if row_key(row) in self._miscomputed:
                    self.bad_nodes.update(extent.source.left_out)
            else:
                if isinstance(extent.source, Coded):
                    self._miscomputed.add(row_key(row))
                elif extent.tally.tier in ("local", "peer"):
                    self.bad_nodes.add(extent.tally.where)
                self._reject(f"{row.file}: {row.label} on {extent.tally.source_text}: wrong digest")
        blocks.at_end()  # the source checks here that it has sent all bytes, and no more

    def _read_intact(
        self, row: ManifestRow, blocks: BlockCutter, sink_for: SinkFor, *, is_verified: bool
    ) -> Sink | None:
        """Write the next row's bytes to the row's sink; return None if the digest of the bytes is wrong."""
        if is_verified:
            sink = sink_for(row)
            for piece in blocks.pieces(row.nbytes, PIECE_BYTES):
                sink.write(piece)
                self._meter.add(piece.nbytes)
            return sink
        whole = blocks.take_whole(row.nbytes) if row.nbytes <= PIECE_BYTES else None
        if whole is not None:  # a fast path for thousands of small rows
            if digest(whole) != row.digest:
                return None
            sink = sink_for(row)
            sink.write(whole)
            self._meter.add(row.nbytes)
            return sink
        state, sink = Digester(), sink_for(row)
        for piece in blocks.pieces(row.nbytes, PIECE_BYTES):
            state.update(piece)
            sink.write(piece)
            self._meter.add(piece.nbytes)
        return sink if state.hexdigest() == row.digest else None

    def _reject(self, note: str) -> None:
        with self._lock:
            if len(self.rejected) < MAX_REJECTED and note not in self.rejected:
                self.rejected.append(note)


def prefetch_seal(attempt: AttemptId, file: str) -> bytes:
    """Return the first bytes of memory with a file that an agent has read ahead."""
    return f"{file} {attempt.attempt}\n".encode()


class ProgressLog:
    """Logger of a restore's progress, every LOG_EVERY_S if the restore takes longer than that."""

    def __init__(
        self, step: int, *, log: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._step = step
        self._log = log
        self._clock = clock
        self._logged_s = clock()
        self._logged_bytes = 0

    def __call__(self, done_bytes: int, total_bytes: int, tier: Tier) -> None:
        now_s = self._clock()
        if now_s - self._logged_s < LOG_EVERY_S:
            return
        rate = max(0, done_bytes - self._logged_bytes) / (now_s - self._logged_s)
        self._logged_s, self._logged_bytes = now_s, done_bytes
        self._log(
            f"restoring step {self._step}: {done_bytes / 1e9:.1f} of {total_bytes / 1e9:.1f} GB, "
            f"{rate / 1e9:.2g} GB/s, from {tier_text(tier)}"
        )


# -- threads and progress -----------------------------------------------------------------------------


class _Pools:
    """Threads per tier, started when the tier is first read, so that no tier waits for a slower tier."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._pools: dict[Tier, ThreadPoolExecutor] = {}

    def of(self, extent: Extent) -> ThreadPoolExecutor:
        tier = extent.speed_tier
        if tier not in self._pools:
            pool = ThreadPoolExecutor(num_threads(tier), thread_name_prefix=f"ray_ckpt-restore-{tier}")
            self._stack.callback(partial(pool.shutdown, cancel_futures=True))
            self._pools[tier] = pool
        return self._pools[tier]


class _Meter:
    """Counter of bytes that calls `progress` every PROGRESS_S."""

    def __init__(self, progress: RestoreProgress | None) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._done = self._total = 0
        self._reported_s = 0.0
        self.tier: Tier = "memory"

    def begin(self, total_bytes: int) -> None:
        self._done, self._total, self._reported_s = 0, total_bytes, time.monotonic()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes

    def report(self) -> None:
        now_s = time.monotonic()
        if self._progress is not None and now_s - self._reported_s >= PROGRESS_S:
            self._reported_s = now_s
            self._progress(min(self._done, self._total), self._total, self.tier)
