"""Read the shards of a restore ahead, while processes start, import and build their models.

A session tells an agent what its ranks will most likely read: in the same shape the shards of this node, and
for tensors that all ranks hold, those of other nodes too. A shard in an arena is verified where it is; others
are read from their best source into memory and verified there. The kernel then lets no process change the
memory (a write seal), so a rank copies it without comparing digests again. A rank that wants something else,
or comes before a shard is there, reads as without prefetching.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from ray_ckpt.actors.agent.arena import ArenaMemory, RankArena
from ray_ckpt.actors.agent.priority import yield_to_training
from ray_ckpt.errors import CheckpointError
from ray_ckpt.format.names import shard_files
from ray_ckpt.restore.manifest import SavedRows
from ray_ckpt.restore.reader import Bytes, FileSource, FlatSink, RestoreTicket, SourceReader, prefetch_seal
from ray_ckpt.storage.local.cores import available_cores
from ray_ckpt.storage.local.memory import available_memory_bytes
from ray_ckpt.storage.local.pages import make_huge, map_shared, seal_writes
from ray_ckpt.types import ARENA_PAGE_BYTES, SMALL_TENSOR_BYTES, CheckpointInfo, ManifestRow

log = logging.getLogger("ray_ckpt.agent")

MEMORY_SHARE = 0.5  # limit for a node, of its free memory; the arenas that follow a restore need as much
MEMORY_RESERVE = 0.1  # share of free memory that stays free beside the states of the ranks
MAX_THREADS = 8  # files at a time, at most one for each rank of the node, as many as ranks would read
MAX_OTHER_FILES = 64  # shards of other nodes: a larger group shares its state by sharding, not by copies
CORES_PER_RANK = 2  # of a rank that starts: its own, and one for data loaders and the rest of the node
WRITERS_S = 5.0  # longest wait for processes of the last group to unmap an arena
POLL_S = 0.05  # between tries to seal an arena
WORTH = 0.25  # part of a file that must be there when the ranks come, for them to wait for the rest


class PrefetchRoom:
    """The memory of a node that the prefetches of all its runs share. Call methods from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards all fields, those of the shares too
        self._shares: list[_Share] = []
        self._taken_bytes = 0  # prefetched files of all runs
        self._filled_bytes = 0  # of these, files that are whole, which are not in the free memory any more

    def join(self) -> _Share:
        """Measure the free memory for another prefetch, before its ranks have their state."""
        with self._lock:
            share = _Share(available_memory_bytes() + self._filled_bytes)
            self._shares.append(share)
            return share

    def leave(self, share: _Share) -> None:
        """Forget a prefetch whose ranks have their state, which the others then find in use."""
        with self._lock:
            self._shares.remove(share)
            free_bytes = available_memory_bytes() + self._filled_bytes
            for other in self._shares:
                other.free_bytes = min(other.free_bytes, free_bytes)

    def take(self, share: _Share, nbytes: int) -> bool:
        """Reserve memory for a file; False if it is beyond the limit, or if a rank's state may need it."""
        with self._lock:
            taken_bytes = self._taken_bytes + nbytes
            states_bytes = sum(other.state_bytes for other in self._shares)
            limit_bytes = MEMORY_SHARE * share.free_bytes
            left_bytes = (1 - MEMORY_RESERVE) * share.free_bytes - states_bytes
            if taken_bytes > min(limit_bytes, left_bytes):
                return False
            self._taken_bytes = taken_bytes
            return True

    def fill(self, nbytes: int) -> None:
        """Note that a file is whole."""
        with self._lock:
            self._filled_bytes += nbytes

    def give(self, nbytes: int, *, is_filled: bool) -> None:
        """Give the memory of a file back."""
        with self._lock:
            self._taken_bytes -= nbytes
            self._filled_bytes -= nbytes if is_filled else 0


@dataclass(slots=True, eq=False)
class _Share:
    """A prefetch of a PrefetchRoom."""

    free_bytes: int  # beside prefetched files, when it began; less once another prefetch has left
    state_bytes: int = 0  # what the state of its ranks will take if it is in the memory of the host


class Prefetch:
    """The shards of one session that this node has verified in memory.

    All methods may be called while `run` is at work in another thread.
    """

    def __init__(self, arenas: Mapping[int, RankArena], room: PrefetchRoom, *, reads: bool = True) -> None:
        """Prefetch files into memory only if `reads`; captures in arenas are verified in any case."""
        self._arenas = dict(arenas)
        self._room = room
        self._reads = reads
        self._lock = threading.Lock()  # guards the fields below
        self._share: _Share | None = None  # from the first `run` to `close`
        self._is_ending = False  # no file is begun any more
        self._is_closed = False
        self._memories: dict[str, _FileMemory] = {}  # by file; those that are being filled belong to `run`
        self._sources: dict[str, FileSource] = {}  # by file; verified
        self._at_work: dict[str, _Progress] = {}  # by file
        self.bad_nodes: set[str] = set()  # whose disks had bad bytes
        self.done_bytes = 0  # verified so far, for a caller that waits while there is progress

    def run(self, ticket: RestoreTicket) -> bool:
        """Verify the ticket's files in memory; return when that is done, or soon after `end`. Blocks.

        Return whether there is more to prefetch with the whole ticket.
        """
        if ticket.manifest is None:
            return False
        rows = ticket.manifest.open()
        files = _likely_files(ticket, rows)
        with self._lock:
            if not self._is_closed:
                self._share = self._share or self._room.join()
                self._share.state_bytes = _state_bytes(ticket, rows, files)
        threads = min(MAX_THREADS, max(1, len(ticket.node_ranks)))
        with ThreadPoolExecutor(threads, "ray_ckpt-prefetch", yield_to_training) as pool:
            list(pool.map(lambda file: self._try(ticket, file, rows.of_file(file)), files))
        is_shared = any(has_shared_tensors(rows.of_file(file)) for file in files)
        return is_shared and self._reads and not ticket.is_whole and not self._is_ending

    def end(self) -> None:
        """Begin no more files, and give up those with most of the work left: the ranks are there.

        Together they read as fast as the agent, and from memory a copy follows what the agent reads.
        """
        with self._lock:
            self._is_ending = True
            for progress in self._at_work.values():
                left = progress.size_bytes - progress.done_bytes
                progress.is_given_up |= progress.is_in_arena or left > (1 - WORTH) * progress.size_bytes

    def give_up(self) -> None:
        """Begin no more files, and give up those that are being read."""
        with self._lock:
            self._is_ending = True
            for progress in self._at_work.values():
                progress.is_given_up = True

    def merged(self, ticket: RestoreTicket) -> RestoreTicket:
        """Return the ticket with the prefetched files as first sources."""
        with self._lock:
            found = {file: source for file, source in self._sources.items() if file in ticket.sources}
        if not found:
            return ticket
        ahead = {file: (source, *ticket.sources[file]) for file, source in found.items()}
        return replace(ticket, sources={**ticket.sources, **ahead})

    @property
    def size_bytes(self) -> int:
        """Memory that the prefetched files take, beside arenas."""
        with self._lock:
            return sum(memory.size_bytes for memory in self._memories.values())

    def close(self) -> None:
        """Stop, and free the memory; it stays while a rank maps it."""
        self.give_up()
        with self._lock:
            self._is_closed = True
            filled = [self._memories.pop(file) for file in self._sources if file in self._memories]
            self._sources.clear()
            self._arenas = {}  # each keeps its memory for as long as it is referenced
            share, self._share = self._share, None
        for memory in filled:
            self._free(memory, is_filled=True)
        if share is not None:
            self._room.leave(share)

    def _free(self, memory: _FileMemory, *, is_filled: bool) -> None:
        memory.close()
        self._room.give(memory.size_bytes, is_filled=is_filled)

    def _try(self, ticket: RestoreTicket, file: str, rows: Sequence[ManifestRow]) -> None:
        if self._is_ending or file in self._sources or not rows or not ticket.sources[file]:
            return
        try:
            self._prefetch(ticket, file, rows)
        except (OSError, CheckpointError) as error:
            log.info("%s is not read ahead: %s", file, error)
        finally:
            with self._lock:
                self._at_work.pop(file, None)

    def _prefetch(self, ticket: RestoreTicket, file: str, rows: Sequence[ManifestRow]) -> None:
        first = ticket.sources[file][0]
        if first.tier == "memory":
            buffer = self._buffer_at(first.path)
            if buffer is not None and self._await_seal(buffer) and self._read(ticket, file, [first], rows):
                with self._lock:
                    self._sources[file] = replace(first, is_verified=True)
            return
        if not self._reads:
            return
        assert ticket.checkpoint is not None
        size_bytes = ARENA_PAGE_BYTES + _size_bytes(rows)
        with self._lock:
            if self._share is None or not self._room.take(self._share, size_bytes):
                return
            try:
                memory = self._memories[file] = _FileMemory(ticket.checkpoint, file, size_bytes)
            except OSError:
                self._room.give(size_bytes, is_filled=False)
                raise
        origin: FileSource | None = None
        try:
            origin = self._read(ticket, file, ticket.sources[file], rows, memory.bytes())
        finally:
            with self._lock:
                if origin is not None and memory.seal() and not self._is_closed:
                    self._room.fill(memory.size_bytes)
                    self._sources[file] = replace(
                        origin,
                        path=memory.path,
                        endpoint="",
                        is_verified=True,
                        base=ARENA_PAGE_BYTES,
                        group=None,  # the bytes are computed already
                    )
                else:
                    del self._memories[file]
                    self._free(memory, is_filled=False)

    def _read(
        self,
        ticket: RestoreTicket,
        file: str,
        sources: Sequence[FileSource],
        rows: Sequence[ManifestRow],
        target: Bytes | None = None,
    ) -> FileSource | None:
        """Verify all rows, into `target` if given. Return the source of most bytes, None if a row is bad."""
        assert ticket.checkpoint is not None
        reader = SourceReader(
            ticket.checkpoint.id, {file: sources}, credentials=ticket.credentials, remote=ticket.remote
        )
        progress = _Progress(sum(row.nbytes for row in rows), is_in_arena=target is None)
        with self._lock:
            progress.is_given_up = self._is_ending
            self._at_work[file] = progress
        try:
            reader.read(rows, lambda row: _Landing(self, progress, row, target))
        except _GivenUp:
            return None
        finally:
            self.bad_nodes |= reader.bad_nodes
        for note in reader.rejected if not progress.is_given_up else ():
            log.warning("restore ahead: %s", note)
        if reader.damage or progress.is_given_up:
            return None
        part = max(reader.parts, key=lambda part: part.size_bytes, default=None)
        used = (s for s in sources if part is not None and (s.tier, s.where) == (part.tier, part.where))
        return next(used, sources[0])

    def _buffer_at(self, path: str) -> ArenaMemory | None:
        buffers = (buffer for arena in self._arenas.values() for buffer in arena.buffers)
        return next((buffer for buffer in buffers if buffer.path == path), None)

    def _await_seal(self, buffer: ArenaMemory) -> bool:
        """Wait until no process maps an arena for writing; return False if one keeps it."""
        deadline_s = time.monotonic() + WRITERS_S
        while not buffer.seal_writes():
            if self._is_ending or time.monotonic() > deadline_s:
                return False
            time.sleep(POLL_S)
        return True


def has_spare_cores(num_ranks: int) -> bool:
    """Return whether this node can read ahead beside its ranks, which import, build models and load data.

    Where all cores are busy, reading ahead delays the ranks by more than it saves (decision 39).
    """
    return available_cores() > CORES_PER_RANK * num_ranks


def _likely_files(ticket: RestoreTicket, rows: SavedRows) -> list[str]:
    """Return the files that ranks of this node will most likely read.

    A ticket of this node has the files that its ranks have saved. The whole ticket adds those of other nodes
    with whole tensors, which data-parallel ranks share out among them.
    """
    if not ticket.is_whole:
        return list(ticket.sources)
    shards = (file for file in ticket.sources if rows.of_file(file))
    return [file for file in islice(shards, MAX_OTHER_FILES) if has_shared_tensors(rows.of_file(file))]


def has_shared_tensors(rows: Iterable[ManifestRow]) -> bool:
    """Return whether a file has a whole tensor that other nodes do not have, as shared ones are saved."""
    return any(
        row.slice is not None
        and row.slice.shape == row.slice.global_shape
        and row.nbytes >= SMALL_TENSOR_BYTES
        for row in rows
    )


def _state_bytes(ticket: RestoreTicket, rows: SavedRows, files: Sequence[str]) -> int:
    """Return the size of the state of the node's ranks.

    A rank holds its own shard, and what the ranks of other nodes share with it.
    """
    assert ticket.checkpoint is not None
    world_size = ticket.checkpoint.world_size
    own = {file for rank in ticket.node_ranks for file in shard_files(rank, world_size)}
    sizes = {file: _size_bytes(rows.of_file(file)) for file in {*files, *own}}
    num_ranks = len(ticket.node_ranks)
    return sum(size if file in own else size * num_ranks for file, size in sizes.items())


def _size_bytes(rows: Sequence[ManifestRow]) -> int:
    """Return the size of a file of which these are all rows."""
    return max((row.byte_offset + row.nbytes for row in rows), default=0)


@dataclass(slots=True)
class _Progress:
    """The reading of a file."""

    size_bytes: int
    is_in_arena: bool
    done_bytes: int = 0
    is_given_up: bool = False


class _GivenUp(Exception):
    """Ends a read at once. An OSError would be one of the source, and the next source would be tried."""


class _Landing(FlatSink):
    """Sink of a row of a prefetched file: into memory, or nowhere if the bytes are in place."""

    def __init__(
        self, prefetch: Prefetch, progress: _Progress, row: ManifestRow, target: Bytes | None
    ) -> None:
        here = None if target is None else target[row.byte_offset : row.byte_offset + row.nbytes]
        super().__init__(np.empty(0, np.uint8) if here is None else here)
        self._is_in_place = here is None
        self._prefetch = prefetch
        self._progress = progress

    def write(self, view: memoryview) -> None:
        if self._progress.is_given_up:
            raise _GivenUp
        if not self._is_in_place:
            super().write(view)
        self._progress.done_bytes += view.nbytes
        self._prefetch.done_bytes += view.nbytes


class _FileMemory:
    """Memory with one file, behind a page that says which file it is."""

    def __init__(self, checkpoint: CheckpointInfo, file: str, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._fd = os.memfd_create("ray_ckpt-prefetch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        try:
            os.ftruncate(self._fd, self.size_bytes)
            os.pwrite(self._fd, prefetch_seal(checkpoint.id, file), 0)
        except OSError:
            os.close(self._fd)
            raise

    def bytes(self) -> Bytes:
        """Map the file's bytes for writing, for as long as the result is referenced."""
        make_huge(self._fd, 0, self.size_bytes)
        return np.frombuffer(map_shared(self._fd, ARENA_PAGE_BYTES, self.size_bytes, writable=True), np.uint8)

    def seal(self) -> bool:
        return seal_writes(self._fd)

    def close(self) -> None:
        os.close(self._fd)
