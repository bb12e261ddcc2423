"""What several ranks of a node restore alike is read once: the agent reads it into memory that they map.

Each rank asks for its shared rows in the order of their places in the checkpoint's files, and says with each
question which ones it has copied since the last. A row is read, and verified, when the first rank asks for
it, and its memory is used again when every rank that wants it has copied it. Memory is bounded; what does
not fit has to wait for ranks that are behind.

That cannot hang: a rank holds nothing while it asks, and it is only made to wait for memory if none of that
memory waits for it. So whoever is waited for is copying, or has not come yet; and after SPACE_WAIT_S, or for
a row that is too large, a rank is told to read by itself, which is always right and only slower.
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
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np

from ray_ckpt.plan.restore import RowKey, row_key
from ray_ckpt.restore.reader import Bytes, FlatSink, RestoreTicket, SharedRows, SourceReader
from ray_ckpt.storage.local.memory import available_memory_bytes
from ray_ckpt.storage.local.pages import make_huge
from ray_ckpt.types import ManifestRow, Tier

log = logging.getLogger("ray_ckpt.agent")

MAX_SHARED_BYTES = 4 << 30  # a large row has to fit as a whole; only what is used is ever touched
SHARED_MEMORY_PART = 8  # and at most this part of the memory that is free, since arenas need the rest
LOAD_BYTES = 64 << 20  # read before the ranks are told: they copy one while the next is being read
SPACE_WAIT_S = 15.0  # for ranks that are behind: they may still be building their model
ALIGNMENT_BYTES = 64  # of a row in memory: a cache line


@dataclass(slots=True)
class _Row:
    """A row that has memory; `waiting` are the ranks that have not copied it yet."""

    row: ManifestRow
    offset: int
    waiting: set[int]
    is_ready: bool = False
    is_bad: bool = False  # no source had it intact


@dataclass(slots=True)
class _Space:
    """Memory by first fit, the lowest first, so that no more of it is touched than is needed at a time."""

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
    """The shared rows of one restore on one node. Methods run in the agent's event loop, reads in `pool`."""

    def __init__(self, ticket: RestoreTicket, *, pool: Executor, capacity_bytes: int | None = None) -> None:
        assert ticket.checkpoint is not None
        self._ticket = ticket
        self._attempt = ticket.checkpoint.id
        self._pool = pool
        self._known = {row_key(row): row for fragment in ticket.fragments for row in fragment.rows}
        capacity = capacity_bytes or min(MAX_SHARED_BYTES, available_memory_bytes() // SHARED_MEMORY_PART)
        self._space = _Space(max(ALIGNMENT_BYTES, capacity - capacity % ALIGNMENT_BYTES))
        self._fd = os.memfd_create("ray_ckpt-shared", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, self._space.size_bytes)
        self._huge_bytes = 0  # as far as huge pages have been asked for
        self._lock = threading.Lock()  # of the descriptor, which a thread may be using when it is closed
        self._memory: Bytes = np.frombuffer(mmap.mmap(self._fd, self._space.size_bytes), np.uint8)
        self._rows: dict[RowKey, _Row] = {}
        self._refused: dict[RowKey, set[int]] = {}
        self._origin: dict[str, tuple[Tier, str]] = {}
        self._queue: deque[_Row] = deque()
        self._loader: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._space_wait_s = SPACE_WAIT_S
        self._is_closed = False
        self.bytes_read = 0  # from sources, by this agent
        self.bytes_served = 0  # to ranks

    async def fetch(
        self, rank: int, wants: Mapping[RowKey, tuple[int, ...]], taken: Sequence[RowKey]
    ) -> SharedRows:
        """Some of the rows that `rank` wants, each with the ranks that want it; see FetchRows."""
        self._take(rank, taken)
        never = tuple(place for place in wants if not self._can_hold(place))
        if never:
            return SharedRows(refused=never)
        deadline_s = _now_s() + self._space_wait_s
        while wants and not self._is_closed:
            asked = self._join(rank, wants)
            bad = [place for place, row in asked.items() if row.is_bad]
            ready = {place: row for place, row in asked.items() if row.is_ready}
            if bad or ready:
                self._take(rank, bad)
                return self._answer(ready, bad)
            if not asked:
                if self._waits_for(rank):
                    break
                if _now_s() >= deadline_s:
                    self._space_wait_s = 0.0  # a rank is stuck or gone: nobody waits for it again
                    break
            await self._change(deadline_s if not asked else None)
        for place in wants:
            self._refused.setdefault(place, set()).add(rank)
        return SharedRows(refused=tuple(wants))

    def close(self) -> None:
        """Give everything up; whoever still asks has to read by itself."""
        if not self._is_closed:
            self._is_closed = True
            self._queue.clear()
            with self._lock:
                os.close(self._fd)  # the memory goes when the last rank has unmapped it
            self._memory = np.empty(0, np.uint8)
            self._report()

    def _can_hold(self, place: RowKey) -> bool:
        known = self._known.get(place)
        return known is not None and 0 < known.nbytes <= self._space.size_bytes

    def _join(self, rank: int, wants: Mapping[RowKey, tuple[int, ...]]) -> dict[RowKey, _Row]:
        """The wanted rows that have memory; new ones get it in order, up to the first that does not fit."""
        asked: dict[RowKey, _Row] = {}
        is_full = False
        for place, ranks in wants.items():
            row = self._rows.get(place)
            if row is None and not is_full:
                row = self._add(place, {*ranks, rank})
                is_full = row is None
            if row is not None:
                row.waiting.add(rank)
                asked[place] = row
        return asked

    def _add(self, place: RowKey, ranks: set[int]) -> _Row | None:
        known = self._known[place]
        offset = self._space.take(known.nbytes)
        if offset is None:
            return None
        waiting = ranks - self._refused.get(place, set())
        row = self._rows[place] = _Row(row=known, offset=offset, waiting=waiting)
        self._queue.append(row)
        if self._loader is None or self._loader.done():
            self._loader = asyncio.ensure_future(self._load())
        return row

    def _take(self, rank: int, places: Iterable[RowKey]) -> None:
        """The rank has these; a row that all have gives its memory back."""
        for place in places:
            row = self._rows.get(place)
            if row is None:
                continue
            row.waiting.discard(rank)
            if not row.waiting:
                del self._rows[place]
                self._space.give(row.offset, row.row.nbytes)
                self._report()

    def _waits_for(self, rank: int) -> bool:
        return any(rank in row.waiting for row in self._rows.values())

    def _answer(self, ready: Mapping[RowKey, _Row], bad: Sequence[RowKey]) -> SharedRows:
        self.bytes_served += sum(row.row.nbytes for row in ready.values())
        return SharedRows(
            path=f"/proc/{os.getpid()}/fd/{self._fd}",
            offsets={place: row.offset for place, row in ready.items()},
            origin={place[0]: self._origin[place[0]] for place in ready},
            refused=tuple(bad),
        )

    async def _load(self) -> None:
        """Read what is queued, in the order in which it was asked for."""
        while self._queue:
            batch = [self._queue.popleft()]
            size = batch[0].row.nbytes
            while self._queue and size + self._queue[0].row.nbytes <= LOAD_BYTES:
                batch.append(self._queue.popleft())
                size += batch[-1].row.nbytes
            good: set[RowKey] = set()
            try:
                loop = asyncio.get_running_loop()
                good = await loop.run_in_executor(self._pool, self._read, self._memory, batch)
            except Exception:
                log.exception("reading for all ranks of this node failed; each reads by itself")
            for row in batch:
                row.is_ready = row_key(row.row) in good
                row.is_bad = not row.is_ready
            self._report()

    def _read(self, memory: Bytes, batch: Sequence[_Row]) -> set[RowKey]:
        """The places of the rows that are in memory now, verified. Runs in a thread."""
        self._make_huge(max(row.offset + row.row.nbytes for row in batch))
        places = {row_key(row.row): memory[row.offset : row.offset + row.row.nbytes] for row in batch}
        good: set[RowKey] = set()
        ticket = self._ticket
        reader = SourceReader(
            self._attempt, ticket.sources, credentials=ticket.credentials, remote=ticket.remote
        )
        reader.read([row.row for row in batch], lambda row: _Landed(places[row_key(row)], row_key(row), good))
        for part in sorted(reader.parts, key=lambda part: part.size_bytes):
            self._origin[part.file] = (part.tier, part.where)
        self.bytes_read += sum(part.size_bytes for part in reader.parts)
        return good

    def _make_huge(self, end: int) -> None:
        """Memory is cheaper in huge pages, to fill and for each rank to map; more of it than one batch."""
        with self._lock:
            if end > self._huge_bytes and not self._is_closed:
                end = min(self._space.size_bytes, end + LOAD_BYTES)
                make_huge(self._fd, self._huge_bytes, end)
                self._huge_bytes = end

    async def _change(self, deadline_s: float | None) -> None:
        """Until something is different, or the time is up."""
        changed = self._changed
        timeout_s = None if deadline_s is None else max(0.0, deadline_s - _now_s())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), timeout_s)

    def _report(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class _Landed(FlatSink):
    """A row's memory; notes when the row is there."""

    def __init__(self, destination: Bytes, place: RowKey, good: set[RowKey]) -> None:
        super().__init__(destination)
        self._place = place
        self._good = good

    def finish(self) -> None:
        self._good.add(self._place)


def _aligned(size: int) -> int:
    return size + -size % ALIGNMENT_BYTES


def _now_s() -> float:
    return asyncio.get_running_loop().time()
