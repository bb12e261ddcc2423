"""Reading a checkpoint's bytes from the cheapest intact source, straight to where they belong.

Rows are gathered into extents that some threads read at a time; the bytes of an extent arrive in order, and
each piece is hashed and copied while it is in the cache. A destination may therefore hold bytes that turn out
to be wrong: they are overwritten from the next source, or the row is named in `damage` and nobody may go on.
Memory is bounded by what a few threads have in hand, whatever the size of the checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ray_ckpt.errors import CheckpointError, CorruptionError, FormatError, Unavailable
from ray_ckpt.format.digest import Digester, digest
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
    Fragment,
    ManifestRow,
    RestoredPart,
    Tier,
)

PIECE_BYTES = 2 << 20  # hashed and then copied: fits a cache, and is long enough to be copied past it
EXTENT_BYTES: Mapping[Tier, int] = {
    "memory": 32 << 20,  # starts at once: small enough for every thread to have a share
    "local": 256 << 20,  # each fills its own read-ahead first: measured, 64 MiB cost a fifth of the speed
    "peer": 64 << 20,  # a request is cheap, and a shard is to come in several streams
    "remote": 64 << 20,  # several streams in each, and a share for every thread
}  # read by one thread at a time
EXTENT_ROWS = 10_000  # of one task: bounds a request to a peer
GAP_BYTES: Mapping[Tier, int] = {
    "memory": 64 << 10,
    "local": 64 << 10,
    "peer": 64 << 10,
    "remote": 1 << 20,  # an object store answers after tens of milliseconds
}  # between rows: reading over it costs less than another request
FETCH_BYTES = 256 << 20  # asked of the node's agent at a time
PROGRESS_S = 1.0  # between two calls of `progress`
LOG_EVERY_S = 5.0  # between two lines about a long restore
MAX_REJECTED = 200  # notes kept about bad rows and sources; the rest would say the same

Place: TypeAlias = tuple[str, int]  # of a row: its file, and where its bytes begin in it
Bytes: TypeAlias = npt.NDArray[np.uint8]


def num_threads(tier: Tier) -> int:
    """Extents read at a time from a tier.

    Memory keeps every core busy. A disk read has its own read-ahead, so two are enough to hide one's start
    behind the other, and more would only hold more buffers. Peers and remote folders answer late and have
    many disks.
    """
    if tier == "memory":
        return min(16, len(os.sched_getaffinity(0)))
    return 2 if tier == "local" else 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One place that holds a file: a path on this node, a peer's endpoint, or the run's storage path."""

    tier: Tier
    where: str  # for people: a node id or a storage path
    path: str = ""
    endpoint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreTicket:
    """What a rank needs to restore: the checkpoint, its manifest, and each file's sources, best first."""

    session: int
    epoch: int  # of the coordinator that opened the session
    checkpoint: CheckpointInfo | None
    fragments: tuple[Fragment, ...] = ()
    sources: Mapping[str, tuple[Source, ...]] = field(default_factory=dict)
    credentials: Credentials | None = field(default=None, repr=False)
    storage: RemoteRef | None = None  # of the sources that are remote
    damage: tuple[str, ...] = ()  # why the manifest itself cannot be had; then there is nothing to read
    node_ranks: tuple[int, ...] = ()  # the ranks of this node

    @property
    def remote(self) -> RemoteTier | None:
        """Where remote sources are read; opened here, with this process's credentials."""
        return self.storage.open() if self.storage is not None else None


def place_of(row: ManifestRow) -> Place:
    return row.file, row.byte_offset


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Rows that the node's agent has read for all its ranks, in memory that a rank can map.

    A row that was asked for and is in neither `offsets` nor `refused` will be there later.
    """

    path: str = ""
    offsets: Mapping[Place, int] = field(default_factory=dict)
    origin: Mapping[str, tuple[Tier, str]] = field(default_factory=dict)  # of each file: tier and where
    refused: tuple[Place, ...] = ()  # the rank has to read them by itself


Fetch: TypeAlias = Callable[[Mapping[Place, tuple[int, ...]], tuple[Place, ...]], Shared]
"""Ask the agent for rows, each with the ranks of the node that want it, and say which ones this rank has
copied since. Blocks until some of them are there or refused. CheckpointError if there is no agent."""

Progress: TypeAlias = Callable[[int, int, Tier], None]
"""Told bytes read, bytes wanted and the tier that is being read; from one thread, about once a second."""


class Sink(Protocol):
    """Where the bytes of one row go. A row that has to be read again gets another sink."""

    def write(self, view: memoryview) -> None:
        """The next bytes; `view` is only valid during the call."""
        ...

    def finish(self) -> None:
        """All bytes were there and had the row's digest."""
        ...


SinkFor: TypeAlias = Callable[[ManifestRow], Sink]


class FlatSink:
    """Bytes into memory as they come."""

    def __init__(self, destination: Bytes) -> None:
        self._destination = destination
        self._at = 0

    def write(self, view: memoryview) -> None:
        end = self._at + view.nbytes
        np.copyto(self._destination[self._at : end], np.frombuffer(view, np.uint8))  # releases the GIL
        self._at = end

    def finish(self) -> None:
        pass


class SourceReader:
    """Reads rows of a checkpoint's files, no faster than `limiter` lets it; remembers what came from where,
    and what no source could give.
    """

    def __init__(
        self,
        attempt: AttemptId,
        sources: Mapping[str, Sequence[Source]],
        *,
        credentials: Credentials | None,
        remote: RemoteTier | None = None,
        fetch: Fetch | None = None,
        progress: Progress | None = None,
        limiter: Limiter | None = None,
    ) -> None:
        self._attempt = attempt
        self._sources = sources
        self._remote = remote
        self._fetch = fetch
        self._meter = _Meter(progress)
        self._limiter = limiter or Limiter()
        self._peers = Peers(credentials, self._limiter.slowest_bytes_per_s)
        self._maps: dict[str, Mapped] = {}
        self._lock = threading.Lock()
        self.parts: list[RestoredPart] = []
        self.damage: list[str] = []
        self.rejected: list[str] = []

    def read(
        self,
        rows: Iterable[ManifestRow],
        sink_for: SinkFor,
        sharers: Mapping[Place, tuple[int, ...]] | None = None,
    ) -> None:
        """Bring each row to its sink, verified. Rows without an intact source go to `damage`.

        `sink_for` and the sinks are called from several threads, those of one row from one at a time.
        Rows in `sharers` are wanted by these ranks of this node; the agent is asked for them first. An empty
        row needs no source.
        """
        rows = list(rows)
        for row in rows:
            if not row.nbytes:
                sink_for(row).finish()
        left = _by_file(row for row in rows if row.nbytes)
        self._meter.begin(sum(row.nbytes for wanted in left.values() for row in wanted))
        with contextlib.ExitStack() as stack:
            stack.callback(self._unmap)
            stack.callback(self._peers.close)
            pools = _Pools(stack)
            if sharers and self._fetch is not None:
                self._read_shared(left, sink_for, sharers, pools, self._fetch)
            turn, jobs = 0, self._jobs(left, 0)
            while jobs:
                self._run(jobs, sink_for, pools, left)
                turn, jobs = turn + 1, self._jobs(left, turn + 1)
        for file in sorted(left):
            self.damage += [f"{file}: {row.label}" for row in left[file]]

    def read_bytes(self, row: ManifestRow) -> bytes | None:
        """A row's bytes, verified; None if no source has them."""
        data, damaged = np.empty(row.nbytes, np.uint8), len(self.damage)
        self.read([row], lambda _: FlatSink(data))
        return None if len(self.damage) > damaged else data.tobytes()

    def _jobs(self, left: Mapping[str, Sequence[ManifestRow]], turn: int) -> list[_Job]:
        """What to read from the source number `turn` of each file. Empty if no file has so many."""
        jobs: list[_Job] = []
        for file in sorted(left):
            sources = self._sources.get(file, ())
            if turn < len(sources):
                source = sources[turn]
                tally = _Tally(file, source.tier, source.where)
                jobs += _extents(
                    self._byte_source(source, file), tally, [(r.byte_offset, r) for r in left[file]]
                )
        return jobs

    def _byte_source(self, source: Source, file: str) -> ByteSource:
        if source.tier == "peer":
            name = FileName(run_uid=self._attempt.run_uid, directory=self._attempt.directory, file=file)
            return Peer(self._peers, source.endpoint, name)
        if source.tier == "memory":
            return self._mapped(source.path, base=ARENA_PAGE_BYTES, seal=self._attempt.attempt.encode())
        if source.tier == "remote" and self._remote is not None:
            return Remote(self._remote, self._attempt.directory, file)
        return Disk(Path(source.path))

    def _mapped(self, path: str, *, base: int, seal: bytes) -> Mapped:
        return self._maps.setdefault(path, Mapped(path, base=base, seal=seal))

    def _unmap(self) -> None:
        while self._maps:
            self._maps.popitem()[1].close()

    def _read_shared(
        self,
        left: dict[str, list[ManifestRow]],
        sink_for: SinkFor,
        sharers: Mapping[Place, tuple[int, ...]],
        pools: _Pools,
        fetch: Fetch,
    ) -> None:
        """Take from the agent what it gives. All ranks ask in the order of places: see SharedReads."""
        wanted = {
            place: row
            for file in sorted(left)
            if not any(source.tier == "memory" for source in self._sources.get(file, ()))
            for row in left[file]
            if (place := place_of(row)) in sharers
        }
        taken: tuple[Place, ...] = ()
        try:
            while wanted:
                shared = fetch({place: sharers[place] for place in _window(wanted)}, taken)
                taken = tuple(shared.offsets)
                if not taken and not shared.refused:
                    raise Unavailable("The agent gave nothing.")
                self._run(self._shared_jobs(shared, wanted), sink_for, pools, left)
                for place in (*taken, *shared.refused):
                    wanted.pop(place, None)
            if taken:
                fetch({}, taken)
        except CheckpointError as error:
            self._reject(f"reading together with the other ranks of this node: {error}")

    def _shared_jobs(self, shared: Shared, wanted: Mapping[Place, ManifestRow]) -> list[_Job]:
        files: dict[str, list[tuple[int, ManifestRow]]] = {}
        for place, offset in shared.offsets.items():
            files.setdefault(place[0], []).append((offset, wanted[place]))
        way = self._mapped(shared.path, base=0, seal=b"")
        return [
            job
            for file, placed in files.items()
            for job in _extents(way, _Tally(file, *shared.origin[file]), sorted(placed, key=_start))
        ]

    def _run(
        self, jobs: Sequence[_Job], sink_for: SinkFor, pools: _Pools, left: dict[str, list[ManifestRow]]
    ) -> None:
        """Run jobs to their end and take the rows that are done out of `left`."""
        futures = [pools.of(job).submit(self._read_extent, job, sink_for) for job in jobs]
        while True:
            done, waiting = wait(futures, timeout=PROGRESS_S, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            self._meter.report()
            if not waiting:
                break
        finished: dict[str, set[int]] = {}
        for job in jobs:
            finished.setdefault(job.tally.file, set()).update(row.byte_offset for row in job.done)
        for file, offsets in finished.items():
            left[file] = [row for row in left[file] if row.byte_offset not in offsets]
        self.parts += [
            tally.part() for tally in {id(j.tally): j.tally for j in jobs}.values() if tally.size_bytes
        ]

    def _read_extent(self, job: _Job, sink_for: SinkFor) -> None:
        tally, start_s = job.tally, time.monotonic()
        self._meter.tier = tally.tier
        for tries_left in reversed(range(job.way.tries)):
            try:
                self._read_rows(job, sink_for)
                break
            except (OSError, EOFError, Unavailable) as error:
                self._reject(f"{tally.file} on {tally.tier} {tally.where}: {error}")
                if isinstance(error, Unavailable) and error.fields.get("refused"):
                    break
                if not tries_left:
                    job.way.give_up()
        with self._lock:
            tally.add(sum(row.nbytes for row in job.done), start_s, time.monotonic())

    def _read_rows(self, job: _Job, sink_for: SinkFor) -> None:
        """The rows of a job that are still to be read; those that an error comes after count all the same."""
        job.way.open()
        intact: list[tuple[ManifestRow, Sink]] = []
        try:
            while job.left:
                try:
                    with contextlib.closing(job.way.read(_ranges(job.left, job.gap_bytes))) as blocks:
                        self._verify(job, _Pieces(self._paced(blocks)), sink_for, intact)
                except CorruptionError as error:  # of a frame: the rows behind may be intact
                    is_table = isinstance(error, FormatError)
                    _leave_out(job.left, math.inf if is_table else error.fields.get("end", 0))
                    self._reject(f"{job.tally.file} on {job.tally.tier} {job.tally.where}: {error}")
        finally:
            job.way.check()
            for row, sink in intact:
                sink.finish()
                job.done.append(row)

    def _paced(self, blocks: Iterable[memoryview]) -> Iterator[memoryview]:
        for block in blocks:
            self._limiter.wait(block.nbytes)
            yield block

    def _verify(
        self, job: _Job, pieces: _Pieces, sink_for: SinkFor, intact: list[tuple[ManifestRow, Sink]]
    ) -> None:
        at = job.left[0][0] if job.left else 0
        while job.left:
            start, row = job.left[0]
            pieces.skip(_gap(at, start, job.gap_bytes))
            sink = self._read_intact(row, pieces, sink_for)
            job.left.popleft()
            at = start + row.nbytes
            if sink is not None:
                intact.append((row, sink))
            else:
                where = f"{job.tally.tier} {job.tally.where}"
                self._reject(f"{row.file}: {row.label} on {where}: wrong digest")
        pieces.end()

    def _read_intact(self, row: ManifestRow, pieces: _Pieces, sink_for: SinkFor) -> Sink | None:
        """The next row's bytes into a sink; None if they are not what was saved."""
        whole = pieces.whole(row.nbytes)
        if whole is not None:  # the way of thousands of small rows
            if digest(whole) != row.digest:
                return None
            sink = sink_for(row)
            sink.write(whole)
            self._meter.add(row.nbytes)
            return sink
        state, sink = Digester(), sink_for(row)
        for piece in pieces.take(row.nbytes):
            state.update(piece)
            sink.write(piece)
            self._meter.add(piece.nbytes)
        return sink if state.hexdigest() == row.digest else None

    def _reject(self, note: str) -> None:
        with self._lock:
            if len(self.rejected) < MAX_REJECTED and note not in self.rejected:
                self.rejected.append(note)


class ProgressLog:
    """Says how far a restore is, every LOG_EVERY_S once it takes longer than that."""

    def __init__(
        self, step: int, *, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._step = step
        self._log = say
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


# -- extents -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Tally:
    """What has come of a file from one source."""

    file: str
    tier: Tier
    where: str
    size_bytes: int = 0
    start_s: float = math.inf
    end_s: float = 0.0

    def add(self, size_bytes: int, start_s: float, end_s: float) -> None:
        self.size_bytes += size_bytes
        self.start_s, self.end_s = min(self.start_s, start_s), max(self.end_s, end_s)

    def part(self) -> RestoredPart:
        return RestoredPart(
            file=self.file,
            tier=self.tier,
            where=self.where,
            size_bytes=self.size_bytes,
            seconds=self.end_s - self.start_s,
        )


@dataclass(slots=True)
class _Job:
    """Rows that one thread reads from one source: each with where its bytes begin there, in that order."""

    way: ByteSource
    tally: _Tally
    left: deque[tuple[int, ManifestRow]]
    done: list[ManifestRow] = field(default_factory=list)

    @property
    def gap_bytes(self) -> int:
        return GAP_BYTES[self.tally.tier]


def _extents(way: ByteSource, tally: _Tally, placed: Sequence[tuple[int, ManifestRow]]) -> Iterator[_Job]:
    """Jobs of about an extent's bytes; a larger row is one alone."""
    limit = EXTENT_BYTES["memory" if isinstance(way, Mapped) else tally.tier]
    part: deque[tuple[int, ManifestRow]] = deque()
    size = 0
    for start, row in placed:
        if part and (size + row.nbytes > limit or len(part) == EXTENT_ROWS):
            yield _Job(way, tally, part)
            part, size = deque(), 0
        part.append((start, row))
        size += row.nbytes
    if part:
        yield _Job(way, tally, part)


def _leave_out(left: deque[tuple[int, ManifestRow]], end: float) -> None:
    """Drop the rows that begin before byte `end` of their file, and at least one."""
    if left:
        left.popleft()
    while left and left[0][0] < end:
        left.popleft()


def _gap(end: int, start: int, gap_bytes: int) -> int:
    """Bytes to read over between two rows; none if they are so far apart that each is asked for by itself."""
    return start - end if start - end <= gap_bytes else 0


def _ranges(placed: Iterable[tuple[int, ManifestRow]], gap_bytes: int) -> list[tuple[int, int]]:
    """(offset, size) of what covers the rows."""
    ranges: list[tuple[int, int]] = []
    for start, row in placed:
        offset, size = ranges[-1] if ranges else (start, 0)
        if start - (offset + size) <= gap_bytes and ranges:
            ranges[-1] = (offset, start + row.nbytes - offset)
        else:
            ranges.append((start, row.nbytes))
    return ranges


class _Pieces:
    """Blocks of any size, cut where rows begin and end."""

    def __init__(self, blocks: Iterator[memoryview]) -> None:
        self._blocks = blocks
        self._rest = memoryview(b"")

    def whole(self, nbytes: int) -> memoryview | None:
        """The next `nbytes` bytes if they are one piece."""
        if nbytes > min(self._rest.nbytes, PIECE_BYTES):
            return None
        piece, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return piece

    def take(self, nbytes: int) -> Iterator[memoryview]:
        """The next `nbytes` bytes in pieces of at most PIECE_BYTES. EOFError if there are fewer."""
        while nbytes:
            if not self._rest.nbytes:
                block = next(self._blocks, None)
                if block is None:
                    raise EOFError("it ends too early")
                self._rest = block
                continue
            size = min(nbytes, self._rest.nbytes, PIECE_BYTES)
            piece, self._rest = self._rest[:size], self._rest[size:]
            nbytes -= size
            yield piece

    def skip(self, nbytes: int) -> None:
        if nbytes:
            for _ in self.take(nbytes):
                pass

    def end(self) -> None:
        """Let whoever gives the blocks finish."""
        next(self._blocks, None)


def _by_file(rows: Iterable[ManifestRow]) -> dict[str, list[ManifestRow]]:
    files: dict[str, list[ManifestRow]] = {}
    for row in sorted(rows, key=place_of):
        files.setdefault(row.file, []).append(row)
    return files


def _start(placed: tuple[int, ManifestRow]) -> int:
    return placed[0]


def _window(wanted: Mapping[Place, ManifestRow]) -> Iterator[Place]:
    """The first places, of FETCH_BYTES together, but at least one."""
    size = 0
    for place, row in wanted.items():
        size += row.nbytes
        if size > FETCH_BYTES and size > row.nbytes:
            return
        yield place


# -- threads and progress -----------------------------------------------------------------------------


class _Pools:
    """Threads per tier, started when the tier is read, so that a slow one never keeps a fast one waiting."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._pools: dict[Tier, ThreadPoolExecutor] = {}

    def of(self, job: _Job) -> ThreadPoolExecutor:
        tier: Tier = "memory" if isinstance(job.way, Mapped) else job.tally.tier
        if tier not in self._pools:
            pool = ThreadPoolExecutor(num_threads(tier), thread_name_prefix=f"ray_ckpt-restore-{tier}")
            self._stack.callback(partial(pool.shutdown, cancel_futures=True))
            self._pools[tier] = pool
        return self._pools[tier]


class _Meter:
    """Counts bytes and tells of them now and then."""

    def __init__(self, progress: Progress | None) -> None:
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
