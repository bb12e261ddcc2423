"""The local disk: a state to fsynced files and back, compared with plain O_DIRECT loops at the disk's speed.

The raw loops move the same bytes in 8 MiB requests from four threads, to and from memory in huge pages, which
was the fastest of all block sizes (1 to 32 MiB), thread counts (1 to 8) and kinds of memory that were tried.
The raw loops compute no hashes. The writes of ray_ckpt go from an arena in shared memory (4 KiB pages, as
ranks share it), hash the file and each slice, rename, and fsync file and folder; the reads of ray_ckpt hash
each block and copy it to its destination.
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
from jobs.bench.row import Row, compared, gb_per_s
from ray_ckpt.format.digest import Digester
from ray_ckpt.format.names import make_attempt, shard_file
from ray_ckpt.storage.local.direct import read_blocks_direct
from ray_ckpt.storage.local.disks import Disks

RAW_BLOCK_BYTES = 8 << 20
RAW_THREADS = 4
PAGE_BYTES = 4096
PIECE_BYTES = 1 << 20  # bytes copied at a time, while they are in the CPU cache after hashing
NUM_SLICES = 400  # slices of the state: parameters and two moments of a model with over 100 tensors
RUN_UID = "0" * 32
ATTEMPT = make_attempt(run_uid=RUN_UID, session=1, step=1, attempt=0)
FILE = shard_file(0, 1)

Bytes = npt.NDArray[np.uint8]


def huge_buffer(size_bytes: int) -> memoryview:
    """Return warm, page-aligned memory, in huge pages if the system has them."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    fill(memory)
    return memoryview(memory)


def arena_buffer(size_bytes: int) -> memoryview:
    """Return warm shared memory like that into which a rank captures."""
    fd = os.memfd_create("ray_ckpt-bench", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size_bytes)
        memory = mmap.mmap(fd, size_bytes)
    finally:
        os.close(fd)
    fill(memory)
    return memoryview(memory)


def fill(memory: mmap.mmap) -> None:
    """Fill `memory` with noise, which no disk can compress."""
    noise = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    view: Bytes = np.frombuffer(memory, np.uint8)
    for at in range(0, len(view), len(noise)):
        view[at : at + len(noise)] = noise[: len(view) - at]


def raw_write(path: Path, buffer: memoryview) -> float:
    """Return the seconds to write and fsync `buffer`, which has aligned whole pages, as a new file."""
    started_s = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, buffer.nbytes)
        _in_blocks(buffer, lambda block, offset: os.pwrite(fd, block, offset))
        os.fsync(fd)
    finally:
        os.close(fd)
    return time.perf_counter() - started_s


def raw_read(path: Path, buffer: memoryview) -> float:
    """Return the seconds to read a file into `buffer`, which has its size and aligned whole pages."""
    started_s = time.perf_counter()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        _in_blocks(buffer, lambda block, offset: os.preadv(fd, [block], offset))
    finally:
        os.close(fd)
    return time.perf_counter() - started_s


def _in_blocks(buffer: memoryview, move: Callable[[memoryview, int], int]) -> None:
    end = buffer.nbytes - buffer.nbytes % PAGE_BYTES

    def one(offset: int) -> None:
        block = buffer[offset : min(end, offset + RAW_BLOCK_BYTES)]
        while block.nbytes:
            moved = move(block, offset)
            block, offset = block[moved:], offset + moved

    with ThreadPoolExecutor(RAW_THREADS) as pool:
        list(pool.map(one, range(0, end, RAW_BLOCK_BYTES)))


def stored(disks: Disks, buffer: memoryview, num_slices: int = NUM_SLICES) -> float:
    """Return the seconds until `buffer` is a durable checkpoint file with digests of file and slices."""
    disks.delete(RUN_UID, ATTEMPT.directory)
    step = -(-buffer.nbytes // num_slices)
    spans = [(at, min(step, buffer.nbytes - at)) for at in range(0, buffer.nbytes, step)]
    started_s = time.perf_counter()
    disks.put(RUN_UID, ATTEMPT.directory, FILE, [buffer], size_bytes=buffer.nbytes, spans=spans)
    return time.perf_counter() - started_s


def read_back(path: Path, target: memoryview) -> float:
    """Return the seconds until the file is in `target`, which is warm, and the digest is computed."""
    into: Bytes = np.frombuffer(target, np.uint8)
    state, at = Digester(), 0
    started_s = time.perf_counter()
    for block in read_blocks_direct(path):
        for offset in range(0, block.nbytes, PIECE_BYTES):
            piece = block[offset : offset + PIECE_BYTES]
            state.update(piece)
            np.copyto(into[at : at + piece.nbytes], np.frombuffer(piece, np.uint8))
            at += piece.nbytes
    state.hexdigest()
    return time.perf_counter() - started_s


def rows(context: Context) -> Iterator[Row]:
    size, convert = context.size_bytes, partial(gb_per_s, size_bytes=context.size_bytes)
    raw, arena = huge_buffer(size), arena_buffer(size)
    with context.temporary() as folder, contextlib.closing(Disks([folder / "stage"])) as disks:

        def plain_write() -> float:
            (folder / "raw").unlink(missing_ok=True)
            return raw_write(folder / "raw", raw)

        plain_write()  # the first call of each is slow and not measured
        stored(disks, arena)
        yield compared(
            "disk-write",
            "state to fsynced local files, hashes included",
            "GB/s",
            lambda: stored(disks, arena),
            ("raw O_DIRECT write", plain_write),
            repeat=context.repeat,
            reach=">= 0.85",
            convert=convert,
        )
        path = disks.path(RUN_UID, ATTEMPT.directory, FILE)
        yield compared(
            "disk-read",
            "local file into warm memory, hash included",
            "GB/s",
            lambda: read_back(path, arena),
            ("raw O_DIRECT read", lambda: raw_read(folder / "raw", raw)),
            repeat=context.repeat,
            reach=">= 0.85",
            convert=convert,
        )
