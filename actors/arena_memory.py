"""Shared memory on the agent's side: one memfd per rank, checked against what the node can give."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

from ray_ckpt.errors import InsufficientSpace
from ray_ckpt.format.shard import ShardLayout
from ray_ckpt.types import ARENA_PAGE_BYTES

MEMORY_RESERVE = 0.05  # share of memory that arenas never take


class ArenaMemory:
    """One rank's arena on the agent's side: a memfd that the rank maps too."""

    def __init__(self, rank: int, layout: ShardLayout) -> None:
        self.layout = layout
        size = ARENA_PAGE_BYTES + layout.size_bytes
        check_memory(size)
        self._fd = os.memfd_create(f"ray_ckpt-rank{rank}", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, size)
        self._map = mmap.mmap(self._fd, size)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def sealed(self) -> str:
        """The attempt whose capture is complete here, or an empty string."""
        return self._map[:16].strip(b"\0").decode()

    def data(self) -> memoryview:
        """The shard file's bytes."""
        return memoryview(self._map)[ARENA_PAGE_BYTES:]

    def close(self) -> None:
        os.close(self._fd)
        with contextlib.suppress(BufferError):  # a write still reads it; the kernel frees it afterwards
            self._map.close()


def available_memory_bytes() -> int:
    """Memory that this process may still take: the machine's, or what its cgroup leaves of it."""
    with open("/proc/meminfo") as file:  # noqa: PTH123
        free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            free = min(free, int(Path(limit).read_text()) - int(Path(usage).read_text()))
    return free


def check_memory(size_bytes: int) -> None:
    free = available_memory_bytes()
    if size_bytes > free * (1 - MEMORY_RESERVE):
        raise InsufficientSpace(
            f"The arena needs {size_bytes:,} bytes of shared memory; {free:,} are available on this node.",
            hint="Put fewer ranks on a node, shard the state over more ranks, or give the node more memory.",
            needed_bytes=size_bytes,
            free_bytes=free,
        )
