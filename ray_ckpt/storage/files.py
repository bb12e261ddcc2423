"""Writing and reading files so that a power loss leaves them whole or absent.

The order is: unique temporary name, write, fsync, rename, fsync of the directory. An error from write,
fsync or rename is never retried on the same inode, because Linux reports a failed write-back once and
then forgets it (PostgreSQL's fsyncgate, 2018); the temporary is removed and the caller hears of it.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from typing_extensions import Buffer

from ray_ckpt.errors import CorruptionError
from ray_ckpt.format.digest import Digester

FILE_MODE = 0o600  # weights are private
DIR_MODE = 0o700
IO_BLOCK_BYTES = 8 << 20  # large enough for any disk's bandwidth, small enough to bound a buffer
_TMP_PREFIX = ".tmp-"
TEMPORARIES = f"{_TMP_PREFIX}*"  # a glob


def is_temporary(name: str) -> bool:
    """Whether a file of this name is a write that never finished."""
    return name.startswith(_TMP_PREFIX)


def fsync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_dirs(path: Path, *, mode: int = DIR_MODE) -> None:
    """Create `path` and its missing parents, each made durable in its own parent."""
    if path.is_dir():
        return
    make_dirs(path.parent, mode=mode)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=mode)
    fsync_dir(path.parent)


def temporary_name(directory: Path) -> Path:
    """A path in `directory` that no other write has."""
    return directory / f"{_TMP_PREFIX}{uuid.uuid4().hex}"


def write_temporary(directory: Path, chunks: Iterable[Buffer]) -> Path:
    """Write small `chunks` to a new fsynced temporary file in `directory`; OSError leaves nothing behind.

    Large data goes through `direct.write_direct`.
    """
    path = temporary_name(directory)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    try:
        try:
            for chunk in chunks:
                _write_all(fd, memoryview(chunk).cast("B"))
            os.fsync(fd)
        finally:
            os.close(fd)
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    return path


def write_file(path: Path, chunks: Iterable[Buffer]) -> None:
    """Make `path` hold `chunks`, durably and all at once. Its directory must exist."""
    publish(write_temporary(path.parent, chunks), path)


def publish(temporary: Path, path: Path) -> None:
    """Give a file of `write_temporary` its name, durably. Visible a moment before it is durable."""
    try:
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    fsync_dir(path.parent)


def checked(chunks: Iterable[Buffer], *, size_bytes: int, digest: str, what: str) -> Iterator[Buffer]:
    """Pass `chunks` on; CorruptionError at the end if their size or digest differs."""
    state = Digester()
    seen = 0
    for chunk in chunks:
        seen += memoryview(chunk).nbytes
        if seen > size_bytes:
            break
        state.update(chunk)
        yield chunk
    if seen != size_bytes or state.hexdigest() != digest:
        raise CorruptionError(
            f"{what} arrived with other bytes than announced ({seen} of {size_bytes} bytes).", what=what
        )


def read_blocks(path: Path, offset: int = 0, nbytes: int | None = None) -> Iterator[bytes]:
    """The bytes of `path` from `offset`, in blocks of at most IO_BLOCK_BYTES. EOFError if it is too short."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        left = os.fstat(fd).st_size - offset if nbytes is None else nbytes
        while left > 0:
            block = os.pread(fd, min(left, IO_BLOCK_BYTES), offset)
            if not block:
                raise EOFError(f"{path} ends at byte {offset}")
            yield block
            offset += len(block)
            left -= len(block)
    finally:
        os.close(fd)


def read_range(path: Path, offset: int, nbytes: int) -> bytes:
    """`nbytes` bytes of `path` from `offset`. EOFError if it is too short."""
    return b"".join(read_blocks(path, offset, nbytes))


def total_bytes(path: Path) -> int:
    """The size of the file system of `path`."""
    stat = os.statvfs(path)
    return stat.f_blocks * stat.f_frsize


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write to the file system of `path`."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def _write_all(fd: int, view: memoryview) -> None:
    while view.nbytes:
        written = os.write(fd, view[:IO_BLOCK_BYTES])
        view = view[written:]
