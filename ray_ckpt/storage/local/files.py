"""Writing and reading files so that a power loss leaves them whole or absent.

The order is: unique temporary name, write, fsync, rename, fsync of the directory. An error from write,
fsync or rename is never retried on the same inode, because Linux reports a failed write-back only once
(PostgreSQL's fsyncgate, 2018). The temporary file is removed and the error is raised.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from typing_extensions import Buffer

from ray_ckpt.errors import CorruptionError
from ray_ckpt.format.digest import Digester

FILE_MODE = 0o600  # only the owner may read, because weights are private
DIR_MODE = 0o700
IO_BLOCK_BYTES = 8 << 20  # large enough for the full speed of a disk, small enough for a buffer
_TMP_PREFIX = ".tmp-"
TEMPORARIES = f"{_TMP_PREFIX}*"  # glob pattern of temporary files


class NotRegular(OSError):
    """A path names a folder, a named pipe, a device or a link instead of a file."""


def is_temporary(name: str) -> bool:
    """Return whether a file of this name is the temporary file of a write."""
    return name.startswith(_TMP_PREFIX)


def fsync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_dirs(path: Path, *, mode: int = DIR_MODE) -> None:
    """Create `path` and all missing parent folders durably."""
    if path.is_dir():
        return
    make_dirs(path.parent, mode=mode)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=mode)
    fsync_dir(path.parent)


def temporary_name(directory: Path) -> Path:
    """Return a unique temporary path in `directory`."""
    return directory / f"{_TMP_PREFIX}{uuid.uuid4().hex}"


def write_temporary(directory: Path, chunks: Iterable[Buffer]) -> Path:
    """Write small `chunks` to a new fsynced temporary file in `directory`; delete it after an error.

    Use `direct.write_direct` for large data.
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
    """Write `chunks` to `path` durably and atomically. Its directory must exist."""
    publish(write_temporary(path.parent, chunks), path)


def publish(temporary: Path, path: Path) -> None:
    """Rename a temporary file durably. The file is visible shortly before it is durable."""
    try:
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    fsync_dir(path.parent)


def link(source: Path, path: Path) -> None:
    """Give the file `source` the second name `path`, durably and atomically, in place of an existing file.

    The folder of `path` must exist. Raise OSError if the source is gone or no regular file, or if the file
    system makes no links or no more of them; nothing has changed then.
    """
    _check_regular(source, _stat(source, follow=False).st_mode)
    temporary = temporary_name(path.parent)
    with contextlib.suppress(FileExistsError):  # NFS repeats a request whose answer was lost
        os.link(source, temporary)
    publish(temporary, path)
    temporary.unlink(missing_ok=True)  # a rename to another name of the same file does nothing


def checked(chunks: Iterable[Buffer], *, size_bytes: int, digest: str, what: str) -> Iterator[Buffer]:
    """Yield `chunks`; raise CorruptionError at the end if the total size or the digest differs."""
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


def open_file(path: Path, *, within: Path | None = None, flags: int = 0) -> int:
    """Open a regular file to read. Raise OSError, without blocking, for a named pipe, a device or a folder.

    A link is followed only if its target is in the folder `within`, which may itself be a link; without
    `within` no link is followed. All files of a run, a staging folder or a storage path are opened by this
    function.
    """
    if within is None:
        flags |= os.O_NOFOLLOW
    _check_regular(path, _stat(path, follow=within is not None).st_mode)  # an open of a device may act
    fd = os.open(path, flags | os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check_regular(path, os.fstat(fd).st_mode)
        if within is not None and not _lies_in(fd, path, within):
            raise NotRegular(f"{path} is a link that leads out of {within}")
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_small(path: Path, max_bytes: int, *, within: Path | None = None) -> bytes:
    """Read a small file, opened by `open_file`. Raise EOFError if it has more than `max_bytes`."""
    fd = open_file(path, within=within)
    with os.fdopen(fd, "rb", buffering=0) as file:
        size = os.fstat(fd).st_size
        if size <= max_bytes:
            data = file.read(size + 1)
            while len(data) <= max_bytes and (more := file.read(max_bytes + 1 - len(data))):
                data += more
            size = max(size, len(data))
    if size > max_bytes:
        raise EOFError(f"{path} has {size} bytes; the format allows {max_bytes}")
    return data


def size_of(path: Path) -> int:
    """Return the size of a regular file or of a link's target. Raise OSError."""
    found = _stat(path, follow=True)
    _check_regular(path, found.st_mode)
    return found.st_size


def _stat(path: Path, *, follow: bool) -> os.stat_result:
    try:
        return path.stat(follow_symlinks=follow)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotRegular(f"{path} is a link to itself, not a file") from error
        raise


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise NotRegular(f"{path} is {_kind(mode)}, not a file")


def _kind(mode: int) -> str:
    for is_kind, name in (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISLNK, "a link"),
        (stat.S_ISFIFO, "a named pipe"),
        (stat.S_ISSOCK, "a socket"),
    ):
        if is_kind(mode):
            return name
    return "a device"


def _lies_in(fd: int, path: Path, folder: Path) -> bool:
    real = f"{os.path.realpath(folder)}/"
    with contextlib.suppress(OSError):  # there may be no /proc
        if os.readlink(f"/proc/self/fd/{fd}").startswith(real):  # noqa: PTH115
            return True
    return os.path.realpath(path).startswith(real)


def total_bytes(path: Path) -> int:
    """Return the size of the file system of `path`."""
    stat = os.statvfs(path)
    return stat.f_blocks * stat.f_frsize


def free_bytes(path: Path) -> int:
    """Return the bytes that this user may still write to the file system of `path`."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def _write_all(fd: int, view: memoryview) -> None:
    while view.nbytes:
        written = os.write(fd, view[:IO_BLOCK_BYTES])
        view = view[written:]
