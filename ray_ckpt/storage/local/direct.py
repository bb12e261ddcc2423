"""Reading and writing large files with O_DIRECT, past the page cache, with several blocks in flight.

A checkpoint is written once and rarely read on the same node. In the page cache the file would displace the
trainer's data, and a write would wait until the kernel has cleared pages. A writer keeps `DEPTH` write
requests of `BLOCK_BYTES` in flight while the calling thread hashes, so the digest of a file takes no
additional time.

All bytes are copied through a small pool of aligned buffers in huge pages, even from page-aligned memory that
the device could read directly. The reason is that a virtual disk reads 4 KiB pages that are scattered over
the machine's memory (an arena) at half its speed or less, and a process cannot find out whether pages are
scattered. The hash then reads the copied bytes from the processor's cache. Measured, in GB/s: huge pages 4.3,
scattered pages 2.2, scattered pages copied and hashed 3.9. The caller may overwrite a chunk as soon as the
next chunk is requested.

If the file system refuses O_DIRECT, and for a last page that is not full, the same calls use the page cache
and drop the pages of the file from the cache afterwards. Files are published as in `files.py`: the caller
renames the temporary file. An error is never retried on the same inode.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from typing_extensions import Buffer

from ray_ckpt.errors import LOST_BYTES, CorruptionError
from ray_ckpt.format.digest import Digester, digest
from ray_ckpt.storage.local import files

PAGE_BYTES = 4096  # alignment that every block device accepts for memory, offsets and lengths
BLOCK_BYTES = 8 << 20  # per request: smaller requests measured slower, larger ones no faster
DEPTH = 4  # write requests per file: 2 keep the device busy, 4 do so even if a thread is late (measured)
READ_AHEAD = 8  # read requests per file: enough for a reader that hashes and copies (measured)
COPY_BYTES = 1 << 20  # copied, then hashed in the CPU's cache: smaller pieces cost too many calls
MAX_IDLE_BUFFERS = 10  # 80 MiB for the next files, one reader or two writers: new memory is slow


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Digests and size of a written file."""

    digest: str
    size_bytes: int
    spans: tuple[str, ...] = ()  # the digest of each requested span, in order


def write_direct(
    directory: Path,
    chunks: Iterable[Buffer],
    *,
    size_bytes: int | None = None,
    spans: Sequence[tuple[int, int]] = (),
) -> tuple[Path, Written]:
    """Write `chunks` to a new fsynced temporary file in `directory`, and hash them on the way.

    If `size_bytes` is given, the space is reserved first, so that a full disk fails before any byte is
    written. `spans` are (offset, nbytes), disjoint and in ascending order. The iterator may overwrite a
    chunk as soon as the next chunk is requested.

    Raise CorruptionError if the total size of `chunks` is not `size_bytes`; ValueError if a span is out of
    order or outside the file; OSError if the disk fails. After any exception the file is deleted.
    """
    path = files.temporary_name(directory)
    file = _File(path, partial(_create, path))
    try:
        try:
            hashes = _Hashes(spans)
            if size_bytes:
                reserve(file.fd, size_bytes)
            with ThreadPoolExecutor(DEPTH, thread_name_prefix="ray_ckpt-write") as pool:
                writer = _Writer(file, pool, hashes)
                for chunk in chunks:
                    writer.add(memoryview(chunk).cast("B"))
                    if size_bytes is not None and writer.size_bytes > size_bytes:
                        break
                if size_bytes not in (None, writer.size_bytes):
                    raise CorruptionError(f"{writer.size_bytes} bytes arrived for a file of {size_bytes}.")
                written = writer.end()
            os.fsync(file.fd)
        finally:
            file.close()
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    return path, written


def hashed(data: memoryview, spans: Sequence[tuple[int, int]] = ()) -> Written:
    """Return the digests that `write_direct` would return for `data`, which is not written.

    All digests are of the same bytes, even if another process changes `data` meanwhile.
    """
    hashes = _Hashes(spans)
    for offset in range(0, data.nbytes, COPY_BYTES):
        hashes.update(memoryview(bytes(data[offset : offset + COPY_BYTES])))
    return hashes.end(data.nbytes)


def read_blocks_direct(
    path: Path, offset: int = 0, nbytes: int | None = None, *, within: Path | None = None
) -> Iterator[memoryview]:
    """Yield the bytes of `path` from `offset`, read from the medium, in blocks of at most BLOCK_BYTES.

    Each view is valid until the next view is requested; up to READ_AHEAD further blocks are read meanwhile.
    The file is opened by `files.open_file`. If O_DIRECT is refused, the file's pages are dropped
    from the page cache before and after the read. Raise EOFError if the file is too short.
    """
    file = _File(path, partial(files.open_file, path, within=within))
    try:
        end = os.fstat(file.fd).st_size if nbytes is None else offset + nbytes
        if end - offset <= BLOCK_BYTES - offset % PAGE_BYTES:  # a single block needs no thread
            if end > offset:
                with _BUFFERS.acquire() as buffer:
                    file.read(_Range(offset, end), buffer)
                    yield _part(buffer, offset, end)
        else:
            yield from _read_ahead(file, offset, end)
    finally:
        file.close()


def read_written(path: Path, offset: int = 0, nbytes: int | None = None) -> Iterator[memoryview]:
    """Yield the bytes of a file that was written durably, as `read_blocks_direct` does.

    Raise CorruptionError if the medium has lost bytes of the file. Another disk error is an OSError.
    """
    try:
        yield from read_blocks_direct(path, offset, nbytes)
    except OSError as error:
        if error.errno not in LOST_BYTES:
            raise
        raise CorruptionError(f"{path.name} cannot be read: {error}.", file=path.name) from error


class _Range(NamedTuple):
    """A range of bytes in a file: the offset of the first byte and of the byte after the last."""

    start: int
    end: int


def _read_ahead(file: _File, offset: int, end: int) -> Iterator[memoryview]:
    """Yield the blocks of a range in order, while the next READ_AHEAD blocks are read."""
    starts = range(offset - offset % PAGE_BYTES, end, BLOCK_BYTES)
    ranges = (_Range(max(start, offset), min(start + BLOCK_BYTES, end)) for start in starts)
    num_buffers = min(READ_AHEAD + 1, len(starts))  # plus one that the caller uses
    with contextlib.ExitStack() as acquired:  # releases the buffers after the threads have ended
        buffers = deque(acquired.enter_context(_BUFFERS.acquire()) for _ in range(num_buffers))
        with ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="ray_ckpt-read") as pool:
            reads: deque[tuple[Future[None], _Range, mmap.mmap]] = deque()

            def start_read() -> None:
                wanted = next(ranges, None)
                if wanted is not None:
                    buffer = buffers.popleft()
                    reads.append((pool.submit(file.read, wanted, buffer), wanted, buffer))

            try:
                for _ in range(num_buffers):
                    start_read()
                while reads:
                    read, wanted, buffer = reads.popleft()
                    read.result()
                    yield _part(buffer, *wanted)
                    buffers.append(buffer)
                    start_read()
            finally:
                for read, _, _ in reads:
                    read.cancel()


def _part(buffer: mmap.mmap, start: int, end: int) -> memoryview:
    """Return the range's bytes in `buffer`, whose first byte is at a page boundary of the file."""
    shift = start % PAGE_BYTES
    return memoryview(buffer)[shift : shift + end - start]


class _Writer:
    """A writer that cuts chunks into blocks, hashes the bytes, and keeps up to DEPTH writes in flight."""

    def __init__(self, file: _File, pool: ThreadPoolExecutor, hashes: _Hashes) -> None:
        self._file = file
        self._pool = pool
        self._hashes = hashes
        self._offset = 0  # offset of the next block in the file, a multiple of PAGE_BYTES
        self._block: mmap.mmap | None = None  # the block that is being filled
        self._filled = 0  # bytes in that block
        self._writes: deque[tuple[Future[None], mmap.mmap]] = deque()  # in flight, each with its block

    @property
    def size_bytes(self) -> int:
        return self._offset + self._filled

    def add(self, chunk: memoryview) -> None:
        for offset in range(0, chunk.nbytes, COPY_BYTES):
            self._gather(chunk[offset : offset + COPY_BYTES])

    def end(self) -> Written:
        """Write the last block, wait for all blocks, and return the digests."""
        size = self.size_bytes
        rest = self._filled % PAGE_BYTES
        tail = self._block[self._filled - rest : self._filled] if self._block else b""
        self._filled -= rest
        self._flush()
        while self._writes:
            self._finish_one()
        if tail:
            self._file.write_tail(tail, size - rest)
        return self._hashes.end(size)

    def _gather(self, piece: memoryview) -> None:
        while piece.nbytes:
            if self._block is None:
                self._block = _BUFFERS.take()
            nbytes = min(piece.nbytes, BLOCK_BYTES - self._filled)
            copy = memoryview(self._block)[self._filled : self._filled + nbytes]
            np.copyto(np.frombuffer(copy, np.uint8), np.frombuffer(piece[:nbytes], np.uint8))
            self._hashes.update(copy)  # not `piece`, which the caller may change after the copy
            self._filled += nbytes
            if self._filled == BLOCK_BYTES:
                self._flush()
            piece = piece[nbytes:]

    def _flush(self) -> None:
        """Submit the current block."""
        block, self._block = self._block, None
        if block is None:
            return
        while len(self._writes) >= DEPTH:
            self._finish_one()
        done = self._pool.submit(self._file.write, memoryview(block)[: self._filled], self._offset)
        self._writes.append((done, block))
        self._offset += self._filled
        self._filled = 0

    def _finish_one(self) -> None:
        done, block = self._writes.popleft()
        done.result()
        _BUFFERS.give(block)


class _Hashes:
    """Digests of a file and of spans of the file, computed from the bytes in order."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        end = 0
        for offset, nbytes in spans:
            if offset < end or nbytes < 0:
                raise ValueError(f"The span at {offset} of {nbytes} bytes begins before byte {end}.")
            end = offset + nbytes
        self._spans = spans
        self._file = Digester()
        self._at = 0  # bytes hashed so far
        self._found: list[str] = []
        self._open: Digester | None = None  # of a span that began in an earlier block

    def update(self, block: memoryview) -> None:
        self._file.update(block)
        start, end = self._at, self._at + block.nbytes
        while len(self._found) < len(self._spans):
            offset, nbytes = self._spans[len(self._found)]
            if offset >= end:
                break
            part = block[max(offset, start) - start : offset + nbytes - start]
            if self._open is None and offset + nbytes <= end:
                self._found.append(digest(part))
                continue
            self._open = self._open or Digester()
            self._open.update(part)
            if offset + nbytes > end:
                break
            self._found.append(self._open.hexdigest())
            self._open = None
        self._at = end

    def end(self, size_bytes: int) -> Written:
        """Return all digests. Empty spans may lie at the end of the file."""
        rest = self._spans[len(self._found) :]
        if self._open is not None or any(span != (size_bytes, 0) for span in rest):
            raise ValueError(f"A span lies beyond the end of the file, which has {size_bytes} bytes.")
        spans = (*self._found, *(digest(b"") for _ in rest))
        return Written(digest=self._file.hexdigest(), size_bytes=size_bytes, spans=spans)


class _File:
    """A file opened with O_DIRECT, or without it if the file system does not support it.

    `read` and `write` may run in several threads at once.
    """

    def __init__(self, path: Path, opened: Callable[..., int]) -> None:
        """Open the file by `opened(flags=...)`; `flags` are added to the flags of `opened`."""
        self._path = path
        self._is_direct = True
        try:
            self.fd = opened(flags=os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.fd = opened(flags=0)
            self._use_cache()

    def close(self) -> None:
        try:
            if not self._is_direct:
                self._forget_cached()
        finally:
            os.close(self.fd)

    def write(self, block: memoryview, offset: int) -> None:
        """Write all of `block`, whose address, size and offset are multiples of PAGE_BYTES."""
        while block.nbytes:
            count = self._try(os.pwrite, block, offset)
            if not self._is_direct:
                os.posix_fadvise(self.fd, offset, count, os.POSIX_FADV_DONTNEED)  # starts to write the pages
            block, offset = block[count:], offset + count

    def write_tail(self, data: bytes, offset: int) -> None:
        """Write the last, partial page through the page cache, after all other writes."""
        self._use_cache()
        while data:
            count = os.pwrite(self.fd, data, offset)
            data, offset = data[count:], offset + count

    def read(self, wanted: _Range, buffer: mmap.mmap) -> None:
        """Read the pages of a range into `buffer`. Raise EOFError if the file ends within the range."""
        start = wanted.start - wanted.start % PAGE_BYTES
        size = wanted.end + -wanted.end % PAGE_BYTES - start
        view, got = memoryview(buffer), 0
        while start + got < wanted.end:
            count = self._try(os.preadv, [view[got:size]], start + got)
            if not count:
                raise EOFError(f"{self._path} ends at byte {max(start + got, wanted.start)}")
            got += count

    def _forget_cached(self) -> None:
        """Drop from the page cache the file's pages that are already on the medium."""
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _try(self, call: Callable[[int, Any, int], int], data: Any, offset: int) -> int:
        """Call `call`; if the file system refuses O_DIRECT with EINVAL, call it again without O_DIRECT."""
        was_direct = self._is_direct
        try:
            return call(self.fd, data, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not was_direct:
                raise
        self._use_cache()
        return call(self.fd, data, offset)

    def _use_cache(self) -> None:
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self._is_direct = False  # set after the flag is changed, because other threads read the field
        self._forget_cached()


def _create(path: Path, *, flags: int) -> int:
    """Create a file to write. Without O_DIRECT it may exist: a refused open may have created it."""
    is_new = os.O_EXCL if flags & os.O_DIRECT else 0
    wanted = flags | is_new | os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, wanted, files.FILE_MODE)


def reserve(fd: int, size_bytes: int) -> None:
    """Reserve `size_bytes` in the file system. Raise OSError if there is not enough space.

    `os.posix_fallocate` is not used, because that call writes to each block if it cannot reserve.
    """
    while _LIBC.fallocate(fd, 0, 0, size_bytes):
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOSYS):
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def new_buffer(size_bytes: int) -> mmap.mmap:
    """Return private memory at a page boundary, in huge pages if the kernel has some."""
    buffer = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


class _Buffers:
    """A pool of page-aligned buffers of BLOCK_BYTES, because the first access to new memory is slow."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[mmap.mmap] = []

    def take(self) -> mmap.mmap:
        with self._lock:
            while self._idle:
                buffer = self._idle.pop()
                if len(buffer) == BLOCK_BYTES:
                    return buffer
        return new_buffer(BLOCK_BYTES)

    def give(self, buffer: mmap.mmap) -> None:
        """Give an unused buffer back to the pool; a full pool frees the buffer."""
        with self._lock:
            if len(self._idle) < MAX_IDLE_BUFFERS:
                self._idle.append(buffer)

    @contextlib.contextmanager
    def acquire(self) -> Iterator[mmap.mmap]:
        buffer = self.take()
        try:
            yield buffer
        finally:
            self.give(buffer)


_BUFFERS = _Buffers()
