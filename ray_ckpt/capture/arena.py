"""The arena: shared memory of the agent's, laid out as the shard file, that a rank captures into.

    byte 0      state page: 16 hex digits of the attempt that is sealed here, or zeros while being written
    byte 4096   the shard file, header first

The rank maps it through /proc/<agent pid>/fd/<n>; it lives as long as its last mapper.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import torch

from ray_ckpt.capture.walk import DTYPES
from ray_ckpt.errors import StateError
from ray_ckpt.format.shard import PlacedSlice, ShardLayout
from ray_ckpt.types import ARENA_PAGE_BYTES

_EMPTY = b"\0" * 16


class Arena:
    """This rank's mapping of its arena, with one tensor view per slice."""

    def __init__(self, path: str, layout: ShardLayout) -> None:
        self.layout = layout
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(fd, ARENA_PAGE_BYTES + layout.size_bytes)
        finally:
            os.close(fd)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._views = [self._view(placed) for placed in layout.slices]
        self._map[ARENA_PAGE_BYTES : ARENA_PAGE_BYTES + len(layout.header)] = layout.header

    def capture(self, tensors: Sequence[torch.Tensor], attempt: str) -> int:
        """Copy `tensors`, in the order of the layout's slices, and seal them as `attempt`. Returns bytes."""
        if len(tensors) != len(self._views):
            raise StateError(f"The layout has {len(self._views)} slices, the state has {len(tensors)}.")
        self._map[: len(_EMPTY)] = _EMPTY
        with torch.no_grad():
            for view, tensor in zip(self._views, tensors, strict=True):
                view.copy_(tensor)
        self._map[: len(_EMPTY)] = attempt.encode()
        return self.layout.size_bytes

    def _view(self, placed: PlacedSlice) -> torch.Tensor:
        start = ARENA_PAGE_BYTES + placed.byte_offset
        raw = self._bytes[start : start + placed.nbytes]
        return raw.view(DTYPES[placed.slice.dtype]).view(placed.slice.shape)
