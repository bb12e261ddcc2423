"""The interface under the remote tier: files of any size under names, in a folder or in an object store.

Names are relative to the store's root; "/" separates their parts. All writers of a name write the same bytes,
so a repeated write is harmless; no file is ever changed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from typing_extensions import Buffer

from ray_ckpt.storage.local import files
from ray_ckpt.storage.local.direct import read_blocks_direct, write_direct

Blocks: TypeAlias = Generator[memoryview, None, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """An entry of a listing."""

    name: str
    size_bytes: int
    modified_s: float  # Unix time of the last write, by the store's clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Children:
    """The direct entries of a folder, in any order; names are relative to the store's root."""

    folders: tuple[str, ...]
    files: tuple[StoredFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """An unfinished write, which takes space but is not a file yet. The writer may be dead."""

    name: str
    id: str
    started_s: float  # Unix time of the first request, by the store's clock


class UnlistableKey(OSError):
    """An object of another program stops a listing, because the client library refuses its key."""


class FileStore(Protocol):
    """A store of files, safe for threads. If it fails, it raises OSError with a text without secrets."""

    where: str
    """The root of the store, for messages."""

    def put(self, name: str, blocks: Iterable[Buffer], *, max_bytes: int) -> int:
        """Store a whole file durably, in place of an existing file, and return the size in bytes.

        `blocks` contain at most `max_bytes`. A block may change once the next block is taken. Exceptions
        from `blocks` propagate; the partial upload is aborted. Raise OSError if the store does not accept the
        bytes, or if the stored file has another size afterwards.
        """
        ...

    def copy(self, source: str, name: str) -> int:
        """Copy a file within the store, so that no byte passes through this process; return its size.

        The copy may share its bytes with the source, since no file is ever changed. Raise FileNotFoundError,
        Unsupported if the store cannot do this, or OSError if it fails or the copy has another size.
        """
        ...

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> Blocks:
        """Yield the bytes of the ranges (offset, nbytes), one after the other, in blocks of any size.

        A block is valid until the next block is taken. Raise FileNotFoundError, OSError or EOFError.
        """
        ...

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, None if it is absent. Raise OSError if the store fails."""
        ...

    def modified_s(self, name: str) -> float:
        """Return the Unix time of the last write by the store's clock. Raise FileNotFoundError or OSError."""
        ...

    def list(self, folder: str = "") -> Iterator[StoredFile]:
        """Yield the files below a folder, at any depth, in any order. An absent folder has no files."""
        ...

    def children(self, folder: str = "") -> Children:
        """Return the direct entries of a folder, none if absent. Object stores have no empty folders."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Delete files, in any order. An absent file is not an error."""
        ...

    def uploads(self, folder: str = "") -> Iterator[Upload]:
        """Yield the unfinished uploads below a folder."""
        ...

    def abort(self, upload: Upload) -> None:
        """Abort an upload and free its space. An absent upload is not an error."""
        ...


def read_whole(store: FileStore, name: str, *, max_bytes: int) -> bytes:
    """Read a small file. Raise FileNotFoundError, OSError, or EOFError if it has more than `max_bytes`."""
    size = store.size(name)
    if size is None:
        raise FileNotFoundError(f"{store.where}/{name} is not there")
    if size > max_bytes:
        raise EOFError(f"{store.where}/{name} has {size} bytes; the format allows {max_bytes}")
    return b"".join(map(bytes, store.read(name, [(0, size)])))


def children_of(store: FileStore, folder: str) -> Children:
    """Return the direct entries of a folder below a store's root. OSError if the store itself is away.

    A storage path that is not mounted would else look like one whose files have been deleted.
    """
    found = store.children(folder)
    if not found.folders and not found.files:
        next(store.list(folder), None)
    return found


class PosixFiles:
    """Files in a folder of a shared file system that all nodes mount, or of a local disk.

    The folder must exist. It is not created, because it may be on a file system that is not mounted yet.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.where = str(root)

    def put(self, name: str, blocks: Iterable[Buffer], *, max_bytes: int) -> int:
        path = self._root / name
        self._check_root()
        files.make_dirs(path.parent)
        temporary, written = write_direct(path.parent, blocks)
        files.publish(temporary, path)
        return written.size_bytes

    def copy(self, source: str, name: str) -> int:
        path = self._root / name
        self._check_root()
        files.make_dirs(path.parent)
        files.link(self._root / source, path)
        return files.size_of(path)

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> Blocks:
        try:
            for offset, nbytes in ranges:
                yield from read_blocks_direct(self._root / name, offset, nbytes, within=self._root)
        except FileNotFoundError:
            self._check_root()
            raise

    def size(self, name: str) -> int | None:
        try:
            return files.size_of(self._root / name)
        except (FileNotFoundError, NotADirectoryError):
            self._check_root()
            return None

    def modified_s(self, name: str) -> float:
        return (self._root / name).stat().st_mtime

    def list(self, folder: str = "") -> Iterator[StoredFile]:
        for path, name in self._walk(folder):
            if not files.is_temporary(path.name):
                with contextlib.suppress(FileNotFoundError):
                    stat = path.stat()
                    yield StoredFile(name=name, size_bytes=stat.st_size, modified_s=stat.st_mtime)

    def children(self, folder: str = "") -> Children:
        """Return the direct entries. A link counts as its target; `files.open_file` checks links to read."""
        try:
            paths = sorted((self._root / folder).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            paths = []
        folders, found = [], []
        for path in paths:
            name = path.relative_to(self._root).as_posix()
            with contextlib.suppress(
                FileNotFoundError, PermissionError
            ):  # the file was deleted meanwhile, or is a link to files of others
                if path.is_dir():
                    folders.append(name)
                elif path.is_file() and not files.is_temporary(path.name):
                    stat = path.stat()
                    found.append(StoredFile(name=name, size_bytes=stat.st_size, modified_s=stat.st_mtime))
        return Children(folders=tuple(folders), files=tuple(found))

    def delete(self, names: Sequence[str]) -> None:
        """Delete files, and folders that become empty. Deleted files stay deleted after a crash."""
        self._check_root()
        folders = set()
        for name in names:
            path = self._root / name
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()
            folders.add(path.parent)
        for folder in folders - {self._root}:
            with contextlib.suppress(OSError):  # the folder is not empty, or is gone already
                folder.rmdir()
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                files.fsync_dir(folder if folder.is_dir() else folder.parent)

    def uploads(self, folder: str = "") -> Iterator[Upload]:
        for path, name in self._walk(folder):
            if files.is_temporary(path.name):
                with contextlib.suppress(FileNotFoundError):
                    yield Upload(name=name, id=name, started_s=path.stat().st_mtime)

    def abort(self, upload: Upload) -> None:
        path = self._root / upload.name
        if files.is_temporary(path.name):
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # the folder is not empty, or is gone already
                path.parent.rmdir()

    def _check_root(self) -> None:
        if not self._root.is_dir():
            raise OSError(f"{self._root} is not there; is it mounted?")

    def _walk(self, folder: str) -> Iterator[tuple[Path, str]]:
        top = self._root / folder
        if not top.is_dir():
            self._check_root()
        for parent, folders, found in os.walk(top, onerror=_unless_gone) if top.is_dir() else ():
            folders.sort()
            for path in (Path(parent, name) for name in sorted(found)):
                if path.is_file() and not path.is_symlink():
                    yield path, path.relative_to(self._root).as_posix()


def _unless_gone(error: OSError) -> None:
    """Raise the error of a listing, unless the folder was deleted meanwhile or is one of others."""
    if not isinstance(error, FileNotFoundError | PermissionError):
        raise error
