"""Shared memory of an agent that ranks map: a memfd, or a file in /dev/shm."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from pathlib import Path

from ray_ckpt.storage.local.pages import map_shared

SHM_FOLDER = Path("/dev/shm")
MAX_SWEPT = 10  # files in a row that other agents remove before they are locked; one is rare


def shared_memory(rank: int, size: int, *, named: bool) -> tuple[int, str, memoryview]:
    """Make and map shared memory; return its file, the path and the mapping. An OSError leaves nothing."""
    fd, path = named_file(rank, size) if named else _memfd(rank, size)
    try:
        return fd, path, map_shared(fd, 0, size, writable=True)
    except OSError:
        os.close(fd)
        if named:
            Path(path).unlink(missing_ok=True)
        raise


def _memfd(rank: int, size: int) -> tuple[int, str]:
    fd = os.memfd_create(f"ray_ckpt-rank{rank}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd, f"/proc/{os.getpid()}/fd/{fd}"


def named_file(rank: int, size: int) -> tuple[int, str]:
    """Make a file in /dev/shm with all blocks allocated. OSError if there is too little room."""
    sweep_named_files()
    fd, path = _locked_file(rank)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError:
        os.close(fd)
        path.unlink(missing_ok=True)
        raise
    return fd, str(path)


def _locked_file(rank: int) -> tuple[int, Path]:
    """Make an empty file; its lock is held as long as the agent lives, for the sweeps of other agents."""
    for _ in range(MAX_SWEPT):
        path = SHM_FOLDER / f"ray_ckpt-{os.getuid()}-rank{rank}-{secrets.token_hex(8)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)  # a sweep that found the file before has the lock for a moment
        if os.fstat(fd).st_nlink:
            return fd, path
        os.close(fd)
    raise OSError(errno.EBUSY, f"other agents have removed {MAX_SWEPT} new files")


def sweep_named_files() -> None:
    """Remove the files in /dev/shm whose agents are dead."""
    for path in SHM_FOLDER.glob(f"ray_ckpt-{os.getuid()}-rank*"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(fd)
