"""Limits of the machine, against which other rows are measured: warm memory, a disk around the page cache.

The raw loops of the disk move 8 MiB requests from four threads, to and from memory in huge pages, which was
the fastest of all block sizes (1 to 32 MiB), thread counts (1 to 8) and kinds of memory that were tried. They
compute no hashes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from jobs.bench.context import Context
from jobs.bench.row import Row, measure

RAW_BLOCK_BYTES = 8 << 20
RAW_THREADS = 4
Bytes = npt.NDArray[np.uint8]


class Limits:
    """Two warm buffers of `size_bytes` (whole pages) in huge pages, and a file of that size in `folder`.

    Each method moves all of it once and returns the seconds. `close` releases the buffers and the file.
    """

    def __init__(self, size_bytes: int, folder: Path) -> None:
        self.size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.path = folder / "raw"
        self.source, self.target = huge_buffer(self.size_bytes), huge_buffer(self.size_bytes)

    def memcpy_s(self, threads: int = 1, source: memoryview | None = None) -> float:
        """Return the seconds to copy `source`, by default the buffer of this object, in `threads` parts."""
        data: Bytes = np.frombuffer(self.source if source is None else source, np.uint8)
        into = self.target[: data.size]
        part = -(-data.size // threads)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(abs, range(threads)))  # starts the threads
            started_s = time.perf_counter()
            list(
                pool.map(
                    lambda at: _copy(into[at : at + part], data[at : at + part]), range(0, data.size, part)
                )
            )
            return time.perf_counter() - started_s

    def write_s(self) -> float:
        """Return the seconds to write a new file to stable storage."""
        self.path.unlink(missing_ok=True)
        started_s = time.perf_counter()
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, self.size_bytes)
            self._in_blocks(self.source, partial(os.pwrite, fd))
            os.fsync(fd)
        finally:
            os.close(fd)
        return time.perf_counter() - started_s

    def read_s(self) -> float:
        """Return the seconds to read the file of `write_s` from the disk, not from memory."""
        started_s = time.perf_counter()
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            self._in_blocks(self.target, lambda block, offset: os.preadv(fd, [block], offset))
        finally:
            os.close(fd)
        return time.perf_counter() - started_s

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        del self.source, self.target

    def _in_blocks(self, buffer: memoryview, move: Callable[[memoryview, int], int]) -> None:
        def one(offset: int) -> None:
            block = buffer[offset : offset + RAW_BLOCK_BYTES]
            while block.nbytes:
                moved = move(block, offset)
                block, offset = block[moved:], offset + moved

        with ThreadPoolExecutor(RAW_THREADS) as pool:
            list(pool.map(one, range(0, self.size_bytes, RAW_BLOCK_BYTES)))


def huge_buffer(size_bytes: int) -> memoryview:
    """Return pre-faulted, page-aligned random bytes, in huge pages if the system has them."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    fill(view)
    return view


def fill(memory: memoryview) -> None:
    """Fill `memory` with noise, which no disk can compress."""
    noise = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    view: Bytes = np.frombuffer(memory, np.uint8)
    for at in range(0, len(view), len(noise)):
        view[at : at + len(noise)] = noise[: len(view) - at]


def rows(context: Context) -> Iterator[Row]:
    cores = os.cpu_count() or 1
    with context.temporary() as folder, contextlib.closing(Limits(context.size_bytes, folder)) as limits:
        for name, what, sample in (
            ("memcpy", "copy of warm memory, one thread", limits.memcpy_s),
            ("memcpy-threads", f"copy of warm memory, {cores} threads", partial(limits.memcpy_s, cores)),
            ("raw-write", "O_DIRECT write of warm memory to a new file, fsynced", limits.write_s),
            ("raw-read", "O_DIRECT read into warm memory", limits.read_s),
        ):
            yield measure(name, what, "GB/s", sample, repeat=context.repeat, size_bytes=limits.size_bytes)


def _copy(into: memoryview, data: Bytes) -> None:
    np.copyto(np.frombuffer(into, np.uint8), data)
