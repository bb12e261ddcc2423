"""Read once each row that several ranks of a node restore, into memory that these ranks map.

Each rank requests its shared rows in the order of the checkpoint's files; a request also lists the rows that
the rank has copied since its last request. A row is read and verified when the first rank requests it; the
row's memory is reused when every rank that wants the row has copied it. Memory is bounded; rows that do not
fit wait for slower ranks.

There is no deadlock: a rank holds no row during a request, and waits for memory only when it has copied all
rows in memory that it wants. So a rank waits for ranks that are copying rows, or have not started. After
SPACE_WAIT_S, or for a row that is too large, a rank reads by itself, which is correct, but slower.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import logging
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ray_ckpt.actors.threads import BriefThreads
from ray_ckpt.plan.restore import RowKey, row_key
from ray_ckpt.restore.reader import Bytes, FlatSink, RestoreTicket, SharedRows, SourceReader
from ray_ckpt.storage.local.memory import available_memory_bytes
from ray_ckpt.storage.local.pages import make_huge
from ray_ckpt.types import ManifestRow, Tier

log = logging.getLogger("ray_ckpt.agent")

MAX_SHARED_BYTES = 4 << 30  # a large row has to fit as a whole; the unused part takes no memory
SHARED_MEMORY_PART = 8  # shared rows take at most 1/8 of free memory, since arenas need the rest
LOAD_BYTES = 64 << 20  # per batch: ranks copy one batch while the next is being read
SPACE_WAIT_S = 15.0  # longest wait for slower ranks, which may still be building their model
ALIGNMENT_BYTES = 64  # alignment of a row in memory: one cache line


@dataclass(slots=True)
class _Row:
    """A row with memory; `waiting` are the ranks that have not copied it yet."""

    row: ManifestRow
    offset: int
    waiting: set[int]
    is_ready: bool = False
    is_bad: bool = False  # no source has the row intact


@dataclass(slots=True)
class _Space:
    """Allocator by first fit from the lowest offset, so that little memory is touched."""

    size_bytes: int
    free: list[tuple[int, int]] = field(default_factory=list)  # (offset, size), ascending, never adjacent

    def __post_init__(self) -> None:
        self.free = [(0, self.size_bytes)]

    def take(self, size: int) -> int | None:
        size = _aligned(size)
        for index, (offset, room) in enumerate(self.free):
            if room >= size:
                self.free[index : index + 1] = [(offset + size, room - size)] if room > size else []
                return offset
        return None

    def give(self, offset: int, size: int) -> None:
        start, end = offset, offset + _aligned(size)
        index = bisect.bisect(self.free, (start, 0))
        if index < len(self.free) and self.free[index][0] == end:
            end += self.free.pop(index)[1]
        if index and sum(self.free[index - 1]) == start:
            index -= 1
            start = self.free.pop(index)[0]
        self.free.insert(index, (start, end - start))


class SharedReads:
    """The shared rows of one restore on one node, which `threads` read. Call methods in the event loop."""

    def __init__(
        self, ticket: RestoreTicket, *, threads: BriefThreads, capacity_bytes: int | None = None
    ) -> None:
        assert ticket.checkpoint is not None
        self._attempt = ticket.checkpoint.id
        self._threads = threads
        self.use(ticket)
        capacity = capacity_bytes or min(MAX_SHARED_BYTES, available_memory_bytes() // SHARED_MEMORY_PART)
        self._space = _Space(max(ALIGNMENT_BYTES, capacity - capacity % ALIGNMENT_BYTES))
        self._fd = os.memfd_create("ray_ckpt-shared", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, self._space.size_bytes)
            self._memory: Bytes = np.frombuffer(mmap.mmap(self._fd, self._space.size_bytes), np.uint8)
        except OSError:
            os.close(self._fd)
            raise
        self._huge_bytes = 0  # size of the part with huge pages
        self._lock = threading.Lock()  # guards the descriptor, which `close` may close while a thread uses it
        self._rows: dict[RowKey, _Row] = {}
        self._refused: dict[RowKey, set[int]] = {}
        self._origin: dict[str, tuple[Tier, str]] = {}
        self._queue: deque[_Row] = deque()
        self._loader: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._space_wait_s = SPACE_WAIT_S
        self._is_closed = False
        self._gone: set[str] = set()  # peers that no longer answer; each batch of rows has a new reader
        self.bad_nodes: set[str] = set()  # whose disks had bad bytes
        self.bytes_read = 0  # bytes that this agent has read from sources
        self.bytes_served = 0  # bytes that ranks got from this agent

    def use(self, ticket: RestoreTicket) -> None:
        """Take over manifest and sources of a ticket for the same checkpoint."""
        assert ticket.manifest is not None
        self._ticket = ticket
        self._manifest = ticket.manifest.open()
        self._known: dict[str, dict[RowKey, ManifestRow]] = {}  # rows by file, as far as ranks want them

    async def fetch(
        self, rank: int, wants: Mapping[RowKey, tuple[int, ...]], taken: Sequence[RowKey]
    ) -> SharedRows:
        """Return some of the wanted rows; `wants` has the ranks that want each row. See FetchRows."""
        self._take(rank, taken)
        never = tuple(key for key in wants if not self._can_hold(key))
        if never:
            return SharedRows(refused=never)
        deadline_s = _now_s() + self._space_wait_s
        while wants and not self._is_closed:
            found = self._join(rank, wants)
            bad = [key for key, row in found.items() if row.is_bad]
            ready = {key: row for key, row in found.items() if row.is_ready}
            if bad or ready:
                self._take(rank, bad)
                return self._answer(ready, bad)
            if not found:
                if self._waits_for(rank):
                    break
                if _now_s() >= deadline_s:
                    self._space_wait_s = 0.0  # a rank is stuck or dead: wait for it only once
                    break
            await self._change(deadline_s if not found else None)
        for key in wants:
            self._refused.setdefault(key, set()).add(rank)
        return SharedRows(refused=tuple(wants))

    def close(self) -> None:
        """Free the memory; ranks that still request rows read by themselves."""
        if not self._is_closed:
            self._is_closed = True
            self._queue.clear()
            with self._lock:
                os.close(self._fd)  # the memory is freed when the last rank has unmapped it
            self._memory = np.empty(0, np.uint8)
            self._report()

    def _row(self, key: RowKey) -> ManifestRow | None:
        file = key[0]
        if file not in self._known:
            self._known[file] = {row_key(row): row for row in self._manifest.of_file(file)}
        return self._known[file].get(key)

    def _can_hold(self, key: RowKey) -> bool:
        known = self._row(key)
        return known is not None and 0 < known.nbytes <= self._space.size_bytes

    def _join(self, rank: int, wants: Mapping[RowKey, tuple[int, ...]]) -> dict[RowKey, _Row]:
        """Return the wanted rows with memory; allocate new rows in order until one does not fit."""
        found: dict[RowKey, _Row] = {}
        is_full = False
        for key, ranks in wants.items():
            row = self._rows.get(key)
            if row is None and not is_full:
                row = self._add(key, {*ranks, rank})
                is_full = row is None
            if row is not None:
                row.waiting.add(rank)
                found[key] = row
        return found

    def _add(self, key: RowKey, ranks: set[int]) -> _Row | None:
        known = self._row(key)
        assert known is not None
        offset = self._space.take(known.nbytes)
        if offset is None:
            return None
        waiting = ranks - self._refused.get(key, set())
        row = self._rows[key] = _Row(row=known, offset=offset, waiting=waiting)
        self._queue.append(row)
        if self._loader is None or self._loader.done():
            self._loader = asyncio.ensure_future(self._load())
        return row

    def _take(self, rank: int, keys: Iterable[RowKey]) -> None:
        """Record that the rank has copied rows; free each row that all its ranks have copied."""
        for key in keys:
            row = self._rows.get(key)
            if row is None:
                continue
            row.waiting.discard(rank)
            if not row.waiting:
                del self._rows[key]
                self._space.give(row.offset, row.row.nbytes)
                self._report()

    def _waits_for(self, rank: int) -> bool:
        return any(rank in row.waiting for row in self._rows.values())

    def _answer(self, ready: Mapping[RowKey, _Row], bad: Sequence[RowKey]) -> SharedRows:
        self.bytes_served += sum(row.row.nbytes for row in ready.values())
        return SharedRows(
            path=f"/proc/{os.getpid()}/fd/{self._fd}",
            offsets={key: row.offset for key, row in ready.items()},
            origin={key[0]: self._origin[key[0]] for key in ready},
            refused=tuple(bad),
        )

    async def _load(self) -> None:
        """Read the queued rows in the order of the requests."""
        while self._queue:
            batch = [self._queue.popleft()]
            size = batch[0].row.nbytes
            while self._queue and size + self._queue[0].row.nbytes <= LOAD_BYTES:
                batch.append(self._queue.popleft())
                size += batch[-1].row.nbytes
            good: set[RowKey] = set()
            try:
                good = await self._threads.run(self._read, self._memory, batch)
            except Exception:
                log.exception("reading for all ranks of this node failed; each reads by itself")
            for row in batch:
                row.is_ready = row_key(row.row) in good
                row.is_bad = not row.is_ready
            self._report()

    def _read(self, memory: Bytes, batch: Sequence[_Row]) -> set[RowKey]:
        """Read rows into memory, and return the keys of the verified rows. Runs in a thread."""
        self._make_huge(max(row.offset + row.row.nbytes for row in batch))
        parts = {row_key(row.row): memory[row.offset : row.offset + row.row.nbytes] for row in batch}
        good: set[RowKey] = set()
        ticket = self._ticket
        reader = SourceReader(
            self._attempt,
            ticket.sources,
            credentials=ticket.credentials,
            remote=ticket.remote,
            gone=self._gone,
        )
        reader.read([row.row for row in batch], lambda row: _Landed(parts[row_key(row)], row_key(row), good))
        self.bad_nodes |= reader.bad_nodes
        for part in sorted(reader.parts, key=lambda part: part.size_bytes):
            self._origin[part.file] = (part.tier, part.where)
        self.bytes_read += sum(part.size_bytes for part in reader.parts)
        return good

    def _make_huge(self, end: int) -> None:
        """Use huge pages for the next batches: they are cheaper to fill, and for each rank to map."""
        with self._lock:
            if end > self._huge_bytes and not self._is_closed:
                end = min(self._space.size_bytes, end + LOAD_BYTES)
                make_huge(self._fd, self._huge_bytes, end)
                self._huge_bytes = end

    async def _change(self, deadline_s: float | None) -> None:
        """Wait until a row has changed, or until the deadline."""
        changed = self._changed
        timeout_s = None if deadline_s is None else max(0.0, deadline_s - _now_s())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), timeout_s)

    def _report(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class _Landed(FlatSink):
    """Sink into the memory of a row; `finish` adds the row to `good`."""

    def __init__(self, destination: Bytes, key: RowKey, good: set[RowKey]) -> None:
        super().__init__(destination)
        self._key = key
        self._good = good

    def finish(self) -> None:
        self._good.add(self._key)


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT_BYTES


def _now_s() -> float:
    return asyncio.get_running_loop().time()
