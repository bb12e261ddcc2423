"""Arenas on the agent's side: shared memory that ranks map, within the limits of the node.

An arena is a memfd, which needs no name and no room in /dev/shm; ranks map it through /proc. If ranks may
not open the agent's files there (ptrace rules, another PID namespace), the arena is a file in /dev/shm. The
size of an arena is fixed, and all blocks of a file in /dev/shm are allocated at once, so that SIGBUS kills no
rank.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ray_ckpt.actors.agent.shared_memory import SHM_FOLDER, shared_memory
from ray_ckpt.errors import InsufficientSpace, Unavailable
from ray_ckpt.format.arena_page import RING_BLOCK_BYTES, RING_BYTES, ArenaPage, ring_block
from ray_ckpt.format.save_signal import PAGE_BYTES, write_flag
from ray_ckpt.format.shard import RankLayout
from ray_ckpt.storage.local.pages import map_shared, populate, seal_writes
from ray_ckpt.trainer.link import ArenaGrant, ArenaMode
from ray_ckpt.types import ARENA_PAGE_BYTES, AttemptId

log = logging.getLogger("ray_ckpt.agent")

MEMORY_RESERVE = 0.05  # share of free memory that arenas leave unused
DOUBLE_SHARE = 0.25  # `auto` takes two buffers if both fit into this share of free memory
SINGLE_SHARE = 0.7  # `auto` takes one buffer up to this share, else a ring; later data loaders need the rest
STREAM_POLL_S = 0.001  # between checks for a block, which takes some milliseconds to fill
STREAM_STALL_S = 60.0  # longest wait for a block of a stream; after it, the rank counts as dead or stuck
ARENA_GIVEN_BYTES = 1 << 20  # beyond the requested size, for a header that grows a little
_BESIDES_BYTES = ARENA_GIVEN_BYTES + ARENA_PAGE_BYTES  # bytes of a buffer besides the shard
_MODES: Mapping[str, ArenaMode] = {"double": "double", "single": "single", "stream": "stream"}
COPIES: Mapping[ArenaMode, int] = {"double": 2, "single": 1, "stream": 0}


class ArenaMemory:
    """One buffer of a rank: room for shards of `size_bytes` together, or a ring."""

    def __init__(self, rank: int, size_bytes: int, *, named: bool = False) -> None:
        self.size_bytes = size_bytes
        total = ARENA_PAGE_BYTES + size_bytes
        self._file, self.path, self.memory = shared_memory(rank, total, named=named)
        self._named = self.path if named else None
        self.page = ArenaPage(self.memory)
        self.layout: RankLayout | None = None
        self._still: tuple[AttemptId, str] | None = None  # who copied the still slices, and their digest
        self._lock = threading.Lock()  # guards the fields below
        self._is_populating = False
        self._is_closed = False

    @property
    def is_named(self) -> bool:
        """True if the memory is a file in /dev/shm."""
        return self._named is not None

    def populate(self) -> None:
        """Allocate all pages, which takes a second per GB or more; end early when the memory is closed."""
        with self._lock:
            if self._is_closed or self.memory.readonly:  # a sealed capture has all its pages
                return
            self._is_populating = True
        try:
            for populated in populate(self.memory, file=self._file):
                if self._is_closed:
                    break
                self.page.populated_bytes = populated
        finally:
            with self._lock:
                self._is_populating = False
                if self._is_closed:
                    self._release()

    def seal_writes(self) -> bool:
        """Have the kernel refuse each further write; False while a process maps the memory for writing.

        The rank of a group that is over no longer writes; nothing else proves that it is gone.
        """
        with self._lock:
            if self._is_closed or self._is_populating or self.is_named:
                return False
            if not self.memory.readonly:
                reader = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
                try:  # the kernel counts each mapping of a writable descriptor as one for writing
                    self.memory = map_shared(reader, 0, len(self.memory))
                finally:
                    os.close(reader)
                self.page = ArenaPage(self.memory)
            return seal_writes(self._file)

    def data(self, layout: RankLayout, number: int = 0) -> memoryview:
        """Return the bytes of a shard file, the first one unless `number` is given."""
        start = ARENA_PAGE_BYTES + layout.starts[number]
        return self.memory[start : start + layout.shards[number].size_bytes]

    def is_laid_out(self, layout: RankLayout) -> bool:
        """Return whether the headers of that layout are in place."""
        headers = (shard.header for shard in layout.shards)
        return all(self.data(layout, k)[: len(header)] == header for k, header in enumerate(headers))

    def keeps_still(self, copied: AttemptId, digest: str) -> bool:
        """Return whether the still slices have the bytes that an earlier capture had; note their digest.

        `copied` is the capture that copied them: those since have left them out. True for the first capture
        with these slices that was stored.
        """
        if self._still is None or self._still[0] != copied:
            self._still = copied, digest
        return self._still[1] == digest

    def stream(self, layout: RankLayout, attempt: str) -> Iterator[memoryview]:
        """Yield the bytes of the shard file in blocks as the rank fills the ring; cut the last block to size.

        The rank may overwrite a block once the next one has been requested. Unavailable if the rank gives
        up or stalls.
        """
        left, index = layout.size_bytes, 0
        while left > 0:
            self._await_block(index, attempt, is_last=left <= RING_BLOCK_BYTES)
            take = min(left, RING_BLOCK_BYTES)
            yield self.memory[ring_block(index)][:take]
            left, index = left - take, index + 1
            self._check_stream(attempt)  # otherwise the ring's counters could belong to another stream
            self.page.done_blocks = index

    def _await_block(self, index: int, attempt: str, *, is_last: bool) -> None:
        deadline_s = time.monotonic() + STREAM_STALL_S
        while True:
            is_filled = self.page.filled_blocks > index and (not is_last or self.page.sealed == attempt)
            self._check_stream(attempt)
            if is_filled:
                return
            if time.monotonic() > deadline_s:
                raise Unavailable("The rank stopped filling the stream of its state.")
            time.sleep(STREAM_POLL_S)

    def _check_stream(self, attempt: str) -> None:
        if self.page.is_given_up or self.page.stream != attempt:
            raise Unavailable("The rank gave up the stream of its state.")

    def close(self) -> None:
        """Drop the memory; it is freed when no process maps it and no view of it is left in this process."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._named is not None:
                with contextlib.suppress(FileNotFoundError):
                    Path(self._named).unlink()
            if not self._is_populating:
                self._release()

    def _release(self) -> None:
        if not self.memory.readonly:
            self.page.populated_bytes = len(self.memory)  # no rank waits for more memory
        os.close(self._file)


class SignalPage:
    """The page of the save signal, which this node's ranks map and read (`format/save_signal.py`)."""

    def __init__(self, *, named: bool = False) -> None:
        self._file, self.path, self._memory = shared_memory(0, PAGE_BYTES, named=named)

    def show(self, flag: int) -> None:
        write_flag(self._memory, flag)

    def close(self) -> None:
        """Drop the page; ranks that have mapped it keep it."""
        if not self.path.startswith("/proc/"):
            Path(self.path).unlink(missing_ok=True)
        os.close(self._file)


@dataclass(slots=True)
class RankArena:
    """The buffers of one rank."""

    mode: ArenaMode
    buffers: tuple[ArenaMemory, ...]

    @property
    def populated_bytes(self) -> int:
        return sum(buffer.page.populated_bytes for buffer in self.buffers)

    @property
    def unfilled_bytes(self) -> int:
        """Bytes that will be taken from the free memory; a file in /dev/shm has taken all of its bytes."""
        anonymous = (buffer for buffer in self.buffers if not buffer.is_named)
        return sum(len(buffer.memory) - buffer.page.populated_bytes for buffer in anonymous)

    @property
    def named_bytes(self) -> int:
        """Bytes in /dev/shm."""
        return sum(len(buffer.memory) for buffer in self.buffers if buffer.is_named)

    def grant(self) -> ArenaGrant:
        """Return the description of the buffers that the rank maps."""
        paths = tuple(buffer.path for buffer in self.buffers)
        return ArenaGrant(mode=self.mode, paths=paths, size_bytes=self.buffers[0].size_bytes)

    def chunks(self, buffer: ArenaMemory, attempt: str, number: int = 0) -> Iterable[memoryview]:
        """Return the bytes of a shard file; the bytes of a stream can be read only once."""
        layout = buffer.layout
        assert layout is not None
        return buffer.stream(layout, attempt) if self.mode == "stream" else [buffer.data(layout, number)]

    def check(self, buffer: ArenaMemory, attempt: str) -> None:
        """Raise Unavailable unless `buffer` holds `attempt` in the layout that the rank has sent."""
        if buffer.page.sealed != attempt:
            raise Unavailable(f"The rank captured into its arena again before {attempt} was written.")
        layout = buffer.layout
        if self.mode != "stream" and layout is not None and not buffer.is_laid_out(layout):
            raise Unavailable(f"The rank laid its arena out anew before {attempt} was written.")

    def find(self, attempt: str) -> ArenaMemory | None:
        """Return the buffer that holds a complete capture of `attempt`."""
        if self.mode == "stream":
            return None
        return next((b for b in self.buffers if b.layout is not None and b.page.sealed == attempt), None)

    def start_populating(self) -> None:
        def work() -> None:
            try:
                for buffer in self.buffers:
                    buffer.populate()
            except OSError as error:  # the first save then has the page faults, or fails without memory
                log.warning("an arena has no memory yet: %s", error)

        threading.Thread(target=work, name="ray_ckpt-populate", daemon=True).start()

    def close(self) -> None:
        for buffer in self.buffers:
            buffer.close()


def make_arena(
    rank: int,
    size_bytes: int,
    *,
    mode: str,
    all_bytes: int,
    free_bytes: int,
    named: bool,
    ranks: int = 1,
    taken_bytes: int = 0,
) -> RankArena:
    """Make the memory of one rank; all `ranks` of the node will need `all_bytes` of `free_bytes`.

    `mode` is the option `memory`. `named` places the memory in /dev/shm, where arenas of these ranks already
    take `taken_bytes`. InsufficientSpace if the mode does not fit, or, with `auto`, if no mode fits.
    """
    room = ShmRoom.measure(taken_bytes) if named else None
    chosen = choose_mode(mode, all_bytes=all_bytes, free_bytes=free_bytes, ranks=ranks, room=room)
    modes = _SMALLER[chosen] if mode == "auto" else (chosen,)
    failure = OSError()
    for candidate in modes:  # another process may have taken the memory since `choose_mode`
        size = RING_BYTES if candidate == "stream" else size_bytes + ARENA_GIVEN_BYTES
        try:
            return RankArena(candidate, _buffers(rank, size, 2 if candidate == "double" else 1, named=named))
        except OSError as error:
            failure = error
    where = f" in {room}" if room else ""
    raise InsufficientSpace(
        f"There is no shared memory of {size:,} bytes for rank {rank}{where}: {failure}.",
        hint=SHM_HINT if room else "Give the node more memory, or set memory='stream'.",
        needed_bytes=size,
        free_bytes=room.free_bytes if room else free_bytes,
    ) from failure


def _buffers(rank: int, size: int, count: int, *, named: bool) -> tuple[ArenaMemory, ...]:
    """Make all buffers; on an OSError, close the buffers already made."""
    made: list[ArenaMemory] = []
    try:
        while len(made) < count:
            made.append(ArenaMemory(rank, size, named=named))
    except OSError:
        while made:  # the traceback keeps this frame, so an open mapping would keep the memory
            made.pop().close()
        raise
    return tuple(made)


_SMALLER: Mapping[ArenaMode, tuple[ArenaMode, ...]] = {
    "double": ("double", "single", "stream"),
    "single": ("single", "stream"),
    "stream": ("stream",),
}
"""Modes that `auto` tries, one after another."""
SHM_HINT = (
    "Enlarge /dev/shm (docker run --shm-size, a volume with medium: Memory in Kubernetes, mount -o "
    "remount,size=...). Or let ranks open the memory of their agent below /proc, which needs none of it: "
    "same user and PID namespace, and ptrace allowed (kernel.yama.ptrace_scope=0, or CAP_SYS_PTRACE)."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmRoom:
    """Space in /dev/shm for the arenas of a run, including the space that they already take."""

    free_bytes: int
    size_bytes: int

    @classmethod
    def measure(cls, taken_bytes: int = 0) -> ShmRoom:
        found = os.statvfs(SHM_FOLDER)
        free_bytes = found.f_bavail * found.f_frsize + taken_bytes
        return cls(free_bytes=free_bytes, size_bytes=found.f_blocks * found.f_frsize)

    def __str__(self) -> str:
        return f"{SHM_FOLDER}, which has {self.free_bytes:,} of {self.size_bytes:,} bytes free"


def choose_mode(
    mode: str, *, all_bytes: int, free_bytes: int, ranks: int = 1, room: ShmRoom | None = None
) -> ArenaMode:
    """Return the mode for a node whose `ranks` save `all_bytes` in total; check it unless "auto".

    `room` is the space in /dev/shm if the memory has to be there. InsufficientSpace if the mode does not fit.
    """
    needed: Mapping[ArenaMode, int] = {
        "double": 2 * (all_bytes + ranks * _BESIDES_BYTES),
        "single": all_bytes + ranks * _BESIDES_BYTES,
        "stream": ranks * (RING_BYTES + ARENA_PAGE_BYTES),
    }
    found = _mode_that_fits(needed, all_bytes, free_bytes, room) if mode == "auto" else _MODES[mode]
    if room is not None and needed[found] > room.free_bytes:
        raise InsufficientSpace(
            f"memory={mode!r} needs {needed[found]:,} bytes for the captures of this node's ranks in {room}. "
            "It has to be there, since a rank may not open the memory of its agent below /proc.",
            hint=SHM_HINT,
            needed_bytes=needed[found],
            free_bytes=room.free_bytes,
        )
    copies_bytes = COPIES[found] * all_bytes
    if mode != "auto" and copies_bytes > free_bytes * (1 - MEMORY_RESERVE):
        raise InsufficientSpace(
            f"memory={mode!r} needs {copies_bytes:,} bytes for the captures of this node's ranks; "
            f"{free_bytes:,} are available.",
            hint="Use memory='auto', put fewer ranks on a node, or give the node more memory.",
            needed_bytes=copies_bytes,
            free_bytes=free_bytes,
        )
    return found


def _mode_that_fits(
    needed: Mapping[ArenaMode, int], all_bytes: int, free_bytes: int, room: ShmRoom | None
) -> ArenaMode:
    """Return the largest mode that leaves enough memory and /dev/shm; if none, the smallest in /dev/shm."""
    if room is None:
        if 2 * all_bytes <= DOUBLE_SHARE * free_bytes:
            return "double"
        return "single" if all_bytes <= SINGLE_SHARE * free_bytes else "stream"
    shm_bytes = SINGLE_SHARE * room.free_bytes  # data loaders and NCCL use /dev/shm too
    if 2 * all_bytes <= DOUBLE_SHARE * free_bytes and needed["double"] <= shm_bytes:
        return "double"
    if all_bytes <= SINGLE_SHARE * free_bytes and needed["single"] <= shm_bytes:
        return "single"
    return min(("stream", "single"), key=needed.__getitem__)
