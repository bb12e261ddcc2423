"""A rank's side of an arena: shared memory of the agent with the layout of the shard file.

The rank maps the arena through /proc/<agent pid>/fd/<n>; the memory lives as long as a process maps it.
format/arena_page.py describes the first page.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import torch

from ray_ckpt.capture.items import elements
from ray_ckpt.capture.walk import DTYPES
from ray_ckpt.errors import StateError, Unavailable
from ray_ckpt.format.arena_page import RING_BLOCK_BYTES, RING_BLOCKS, ArenaPage, ring_block
from ray_ckpt.format.shard import PlacedSlice, RankLayout
from ray_ckpt.storage.local.pages import keep_from_children, map_shared, populate
from ray_ckpt.types import ARENA_PAGE_BYTES

POPULATE_POLL_S = 0.05  # between two checks whether the agent has allocated the memory
POPULATE_WAIT_S = 600.0  # after this time the agent counts as stuck, and the first save has the page faults
RING_POLL_S = 0.0005  # a block of a ring takes some milliseconds to write
RING_STALL_S = 60.0  # if no block is written for this long, the disk or the agent is stuck


class Mapping:
    """A mapped arena file: its state page, and its bytes as one uint8 tensor."""

    def __init__(self, path: str) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.memory = map_shared(fd, 0, os.fstat(fd).st_size, writable=True)
            keep_from_children(self.memory)
        finally:
            os.close(fd)
        self.page = ArenaPage(self.memory)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self._lock = threading.Lock()  # guards the two fields below
        self._pinned_for: torch.device | None = None
        self._is_given_up = False

    def populate(self) -> None:
        """Fill this process's page table once the agent has allocated the memory.

        Otherwise the first save would take a page fault for each page, and be 3 to 50 times slower than later
        saves. This call releases the GIL. The first save takes the faults of pages that the agent did not
        allocate in time.
        """
        deadline_s = time.monotonic() + POPULATE_WAIT_S
        while self.page.populated_bytes < len(self.memory) and time.monotonic() < deadline_s:
            if self._is_given_up:
                return
            time.sleep(POPULATE_POLL_S)
        for _ in populate(self.memory):
            pass

    def pin(self, device: torch.device) -> None:
        """Register the memory with CUDA, once, so that copies from `device` run asynchronously at full speed.

        RuntimeError if CUDA refuses (a low RLIMIT_MEMLOCK).
        """
        with self._lock, torch.cuda.device(device):
            if self._is_given_up:
                return
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = cudart.cudaHostRegister(self.bytes.data_ptr(), self.bytes.numel(), 0)
            if int(code) != 0:
                raise RuntimeError(f"cudaHostRegister of {self.bytes.numel()} bytes failed with {code}")
            self._pinned_for = device

    def give_up(self) -> None:
        """Unregister the memory from CUDA, before the memory is unmapped. No copy may be running."""
        with self._lock:
            self._is_given_up = True
            if self._pinned_for is not None:
                with torch.cuda.device(self._pinned_for):
                    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                    cudart.cudaHostUnregister(self.bytes.data_ptr())
                self._pinned_for = None


class Arena:
    """Memory for the whole shard files of a rank, with a tensor view for each slice."""

    def __init__(self, path: str) -> None:
        self.mapping = Mapping(path)
        self.capacity_bytes = self.mapping.bytes.numel() - ARENA_PAGE_BYTES
        self.layout: RankLayout | None = None
        self.views: tuple[torch.Tensor, ...] = ()

    def lay_out(self, layout: RankLayout) -> None:
        """Write the headers and make the views. StateError if the shards do not fit."""
        if layout.size_bytes > self.capacity_bytes:
            raise StateError(f"Shards of {layout.size_bytes} bytes need a larger arena.")
        self.mapping.page.unseal()
        views: list[torch.Tensor] = []
        for start, shard in zip(layout.starts, layout.shards, strict=True):
            base = ARENA_PAGE_BYTES + start
            views += (self._view(placed, base) for placed in shard.slices)
            header = torch.frombuffer(bytearray(shard.header), dtype=torch.uint8)
            self.mapping.bytes[base : base + len(shard.header)].copy_(header)
        self.layout, self.views = layout, tuple(views)

    def begin(self) -> None:
        self.mapping.page.unseal()

    def seal(self, attempt: str) -> None:
        self.mapping.page.seal(attempt)

    def _view(self, placed: PlacedSlice, base: int) -> torch.Tensor:
        start = base + placed.byte_offset
        raw = self.mapping.bytes[start : start + placed.nbytes]
        return raw.view(DTYPES[placed.slice.dtype]).view(placed.slice.shape)


class Ring:
    """A rank's side of a stream: blocks of the shard file in order, which the agent writes as blocks arrive.

    For hosts whose memory cannot hold a copy of the state. The state must not change until the stream has
    ended.
    """

    def __init__(self, path: str) -> None:
        self.mapping = Mapping(path)
        self._filled = 0  # number of filled blocks
        self._in_block = 0  # filled bytes of the current block
        self._is_over: Callable[[], bool] = lambda: False

    def begin(self, attempt: str, is_over: Callable[[], bool]) -> None:
        """Start a stream; `is_over` returns whether the agent has stopped reading the stream."""
        self.mapping.page.unseal()
        self.mapping.page.begin_stream(attempt)
        self._filled = self._in_block = 0
        self._is_over = is_over

    def write(self, tensor: torch.Tensor) -> None:
        """Append a tensor's bytes. Unavailable if the agent stops reading."""
        flat = elements(tensor).view(torch.uint8)
        start = 0
        while start < flat.numel():
            room = self._room()
            take = min(room.numel(), flat.numel() - start)
            room[:take].copy_(flat[start : start + take])
            start += take
            self._in_block += take
            if self._in_block == RING_BLOCK_BYTES:
                self._publish()

    def end(self, attempt: str) -> None:
        """Publish the last block and seal the stream."""
        if self._in_block:
            self._publish()
        self.mapping.page.seal(attempt)

    def give_up(self) -> None:
        self.mapping.page.give_up()

    def _room(self) -> torch.Tensor:
        page, deadline_s = self.mapping.page, time.monotonic() + RING_STALL_S
        while self._filled - page.done_blocks >= RING_BLOCKS:
            if self._is_over() or time.monotonic() > deadline_s:
                raise Unavailable("The agent stopped reading the stream of this rank's state.")
            time.sleep(RING_POLL_S)
        return self.mapping.bytes[ring_block(self._filled)][self._in_block :]

    def _publish(self) -> None:
        self._filled, self._in_block = self._filled + 1, 0
        self.mapping.page.filled_blocks = self._filled
