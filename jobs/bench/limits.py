"""Limits of the machine, against which the other rows are measured.

Copying memory that has been touched before, writing and reading a disk around the page cache, and a bare
socket to another process on this machine. Memory touched for the first time is a row too: it is far slower,
and the reason why the arena is touched before the first save.
"""

from __future__ import annotations

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
from jobs.bench.disk import huge_buffer, raw_read, raw_write
from jobs.bench.row import Row, gb_per_s, measure
from jobs.bench.wire import raw_socket

Bytes = npt.NDArray[np.uint8]
PAGE = mmap.PAGESIZE


class Limits:
    """Two warm buffers of `size_bytes` (whole pages) in huge pages, and a file of that size in `folder`.

    Each method moves all of it once and returns the seconds. `close` releases the buffers and the file.
    """

    def __init__(self, size_bytes: int, folder: Path) -> None:
        self.size_bytes = -(-size_bytes // PAGE) * PAGE
        self.path = folder / "raw"
        self._source, self._target = huge_buffer(self.size_bytes), huge_buffer(self.size_bytes)
        self._from: Bytes = np.frombuffer(self._source, np.uint8)
        self._to: Bytes = np.frombuffer(self._target, np.uint8)

    def memcpy_s(self, threads: int = 1) -> float:
        if threads == 1:
            return _timed(partial(np.copyto, self._to, self._from))
        part = -(-self.size_bytes // threads)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(abs, range(threads)))  # starts the threads
            starts = range(0, self.size_bytes, part)
            return _timed(lambda: list(pool.map(lambda at: self._copy(at, part), starts)))

    def write_s(self) -> float:
        """Return the seconds to write a new file to stable storage."""
        self.path.unlink(missing_ok=True)
        return raw_write(self.path, self._source)

    def read_s(self) -> float:
        """Return the seconds to read the file of `write_s` from the disk, not from memory."""
        return raw_read(self.path, self._target)

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        del self._from, self._to, self._source, self._target

    def _copy(self, at: int, nbytes: int) -> None:
        np.copyto(self._to[at : at + nbytes], self._from[at : at + nbytes])


def fresh_memory_s(size_bytes: int) -> float:
    """Return the seconds to touch memory that is new to this process."""
    with mmap.mmap(-1, size_bytes) as memory:
        pages: Bytes = np.frombuffer(memory, np.uint8)[::PAGE]
        try:
            return _timed(partial(pages.fill, 1))
        finally:
            del pages  # otherwise the memory could not be released


def rows(context: Context) -> Iterator[Row]:
    size, cores = context.size_bytes, os.cpu_count() or 1
    with context.temporary() as folder:
        limits = Limits(size, folder)
        try:
            yield _limit("memcpy", "copy of warm memory, one thread", limits.memcpy_s, context)
            yield _limit(
                "memcpy-threads",
                f"copy of warm memory, {cores} threads",
                partial(limits.memcpy_s, cores),
                context,
            )
            yield _limit(
                "raw-write", "O_DIRECT write of warm memory to a new file, fsynced", limits.write_s, context
            )
            yield _limit("raw-read", "O_DIRECT read into warm memory", limits.read_s, context)
        finally:
            limits.close()
    yield _limit("fresh-memory", "touching new memory", lambda: fresh_memory_s(size), context)
    yield _limit(
        "socket", "bare socket, warm memory to warm memory", lambda: raw_socket(size, tls=False), context
    )
    yield _limit("socket-tls", "the same with TLS", lambda: raw_socket(size, tls=True), context)


def _limit(name: str, what: str, sample: Callable[[], float], context: Context) -> Row:
    convert = partial(gb_per_s, size_bytes=context.size_bytes)
    return measure(name, what, "GB/s", sample, repeat=context.repeat, convert=convert)


def _timed(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s
