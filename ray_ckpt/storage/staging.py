"""One node's local tier: <staging>/<run uid>/<checkpoint directory>/<files>, owned by one agent at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import Buffer

from ray_ckpt.config import STAGING_ENV
from ray_ckpt.errors import FormatError, InsufficientSpace, StagingError
from ray_ckpt.format import names
from ray_ckpt.format.digest import digest
from ray_ckpt.format.manifest import decode_fragment
from ray_ckpt.storage import files
from ray_ckpt.storage.remote import delete_checkpoint_dir
from ray_ckpt.types import FileEntry, Fragment

LOCK_WAIT_S = 20.0  # a killed agent's lock is free within seconds; a live owner's never


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A fragment that is complete here: its manifest file and every file that it lists are present."""

    fragment: Fragment
    entry: FileEntry


class Staging:
    """The staging folder. Holds an exclusive lock on it until closed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        try:
            files.make_dirs(root)
            self._check_owner()
            self._lock = self._take_lock()
            try:
                files.write_temporary(root, [b"probe"]).unlink()
            except OSError:
                self._lock.close()
                raise
        except OSError as error:
            raise StagingError(
                f"The staging folder {root} cannot be used: {error}.",
                hint=f"Make it writable for the user that runs Ray, or set staging= or {STAGING_ENV}.",
                path=str(root),
            ) from error

    def close(self) -> None:
        self._lock.close()

    # -- space ---------------------------------------------------------------------------------------

    def check_space(self, needed_bytes: int, *, reserve_bytes: int, what: str) -> None:
        """InsufficientSpace unless `needed_bytes` fit and `reserve_bytes` stay free."""
        free = files.free_bytes(self.root)
        if free - reserve_bytes < needed_bytes:
            raise InsufficientSpace(
                f"{what} needs {needed_bytes:,} bytes in {self.root}, which has {free:,} free "
                f"and keeps {reserve_bytes:,} in reserve.",
                hint="Free space there, point staging= to a larger disk, or lower replicas or reserve_bytes.",
                path=str(self.root),
                needed_bytes=needed_bytes,
                free_bytes=free,
            )

    # -- files ---------------------------------------------------------------------------------------

    def path(self, run_uid: str, directory: str, file: str) -> Path:
        return self.folder(run_uid, directory) / names.check_file(file)

    def folder(self, run_uid: str, directory: str) -> Path:
        return self.root / names.check_run_uid(run_uid) / names.check_directory(directory)

    def put(self, run_uid: str, directory: str, file: str, chunks: Iterable[Buffer]) -> Path:
        """Write one file of a checkpoint durably."""
        path = self.path(run_uid, directory, file)
        files.make_dirs(path.parent)
        files.write_file(path, chunks)
        return path

    def delete(self, run_uid: str, directory: str) -> None:
        """Delete one checkpoint's files, data before manifests. Absent is fine."""
        delete_checkpoint_dir(self.folder(run_uid, directory))

    # -- what is here --------------------------------------------------------------------------------

    def holdings(self, run_uid: str) -> Iterator[Holding]:
        """Every fragment of the run that is complete here, decided by its own list of files and sizes."""
        for folder in self._folders(run_uid):
            for path in sorted(folder.glob("manifest-*.parquet")):
                if holding := _holding(path, run_uid):
                    yield holding

    def directories(self, run_uid: str) -> tuple[str, ...]:
        """Every checkpoint folder of the run, complete or not."""
        return tuple(folder.name for folder in self._folders(run_uid))

    def _folders(self, run_uid: str) -> list[Path]:
        run = self.root / names.check_run_uid(run_uid)
        with contextlib.suppress(FileNotFoundError):
            return sorted(p for p in run.iterdir() if names.is_directory_name(p.name) and p.is_dir())
        return []

    # -- ownership -----------------------------------------------------------------------------------

    def _check_owner(self) -> None:
        found = self.root.lstat()
        if stat.S_ISLNK(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise StagingError(
                f"The staging folder {self.root} is a link, or others own it or can write to it.",
                hint="Use a folder of your own with mode 0700.",
                path=str(self.root),
            )

    def _take_lock(self) -> _Lock:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                return _Lock(self.root / "agent.lock")
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StagingError(
                        f"Another agent owns the staging folder {self.root}.",
                        hint="Give each node its own folder: put {node_id} into staging=, "
                        f"or set {STAGING_ENV} differently on each node.",
                        path=str(self.root),
                    ) from None
                time.sleep(0.2)


class _Lock:
    """An exclusive flock; the kernel frees it when the process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, files.FILE_MODE)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise

    def close(self) -> None:
        os.close(self._fd)


def _holding(path: Path, run_uid: str) -> Holding | None:
    try:
        data = path.read_bytes()
        fragment = decode_fragment(data)
    except (OSError, FormatError):
        return None
    if fragment.attempt.run_uid != run_uid or fragment.attempt.directory != path.parent.name:
        return None
    for file in fragment.files:
        try:
            if (path.parent / file.name).stat().st_size != file.size_bytes:
                return None
        except OSError:
            return None
    return Holding(
        fragment=fragment, entry=FileEntry(name=path.name, size_bytes=len(data), digest=digest(data))
    )
