"""The interface under the remote tier: files of any size under names, in a folder or in an object store.

Names are relative to the store's root; "/" separates their parts. All writers of a name write the same bytes,
so a repeated write is harmless, and there is no update.
"""

from __future__ import annotations

import contextlib
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
    modified_s: float  # Unix time by the store's clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Children:
    """The direct entries of a folder, in any order; names are relative to the store's root."""

    folders: tuple[str, ...]
    files: tuple[StoredFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """An unfinished write, whose writer may be dead. It takes space and is not a file."""

    name: str
    id: str
    started_s: float  # Unix time by the store's clock


class FileStore(Protocol):
    """Safe for threads. A store that fails or cannot be reached raises an OSError without secrets."""

    where: str
    """The root, as shown to people."""

    def put(self, name: str, blocks: Iterable[Buffer], *, max_bytes: int) -> int:
        """Store a file entirely and durably, replacing an existing one, and return its size.

        `blocks` give at most `max_bytes`. A block may change once the next one is taken. Exceptions from
        `blocks` propagate; the partial upload is aborted. OSError if the store does not take the bytes, or
        has another number of them afterwards.
        """
        ...

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> Blocks:
        """Yield the bytes of the ranges (offset, nbytes), one after the other, in blocks of any size.

        A block is valid until the next one is taken. FileNotFoundError, OSError, EOFError.
        """
        ...

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, None if it is absent. OSError without an answer."""
        ...

    def modified_s(self, name: str) -> float:
        """Return the Unix time of the last write by the store's clock. FileNotFoundError, OSError."""
        ...

    def list(self, folder: str = "") -> Iterator[StoredFile]:
        """Yield the files below a folder, at any depth and in any order; none if the folder is absent."""
        ...

    def children(self, folder: str = "") -> Children:
        """Return one level of a folder, empty if it is absent; object stores have no empty folders."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Delete files, in any order. Absent ones are not an error."""
        ...

    def uploads(self, folder: str = "") -> Iterator[Upload]:
        """Yield the unfinished uploads below a folder."""
        ...

    def abort(self, upload: Upload) -> None:
        """End an upload and free its space. An absent one is not an error."""
        ...


def read_whole(store: FileStore, name: str, *, max_bytes: int) -> bytes:
    """Read a small file. FileNotFoundError, OSError; EOFError if it has more than `max_bytes`."""
    size = store.size(name)
    if size is None:
        raise FileNotFoundError(f"{store.where}/{name} is not there")
    if size > max_bytes:
        raise EOFError(f"{store.where}/{name} has {size} bytes; the format allows {max_bytes}")
    return b"".join(map(bytes, store.read(name, [(0, size)])))


class PosixFiles:
    """A folder: a shared file system that all nodes mount, or a local disk.

    The folder must exist. Creating it could write below a mount point while the file system is not mounted.
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
        """Return one level. Links count as their targets; `files.open_file` decides which are read."""
        try:
            paths = sorted((self._root / folder).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            paths = []
        folders, found = [], []
        for path in paths:
            name = path.relative_to(self._root).as_posix()
            with contextlib.suppress(
                FileNotFoundError, PermissionError
            ):  # deleted meanwhile, or a link to files of others
                if path.is_dir():
                    folders.append(name)
                elif path.is_file() and not files.is_temporary(path.name):
                    stat = path.stat()
                    found.append(StoredFile(name=name, size_bytes=stat.st_size, modified_s=stat.st_mtime))
        return Children(folders=tuple(folders), files=tuple(found))

    def delete(self, names: Sequence[str]) -> None:
        """Delete files, and folders that become empty. After a crash no deleted file comes back."""
        self._check_root()
        folders = set()
        for name in names:
            path = self._root / name
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()
            folders.add(path.parent)
        for folder in folders - {self._root}:
            with contextlib.suppress(OSError):  # not empty, or gone already
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
            with contextlib.suppress(OSError):  # not empty, or gone already
                path.parent.rmdir()

    def _check_root(self) -> None:
        if not self._root.is_dir():
            raise OSError(f"{self._root} is not there; is it mounted?")

    def _walk(self, folder: str) -> Iterator[tuple[Path, str]]:
        top = self._root / folder
        if not top.is_dir():
            self._check_root()
        for path in sorted(top.rglob("*")) if top.is_dir() else ():
            if path.is_file() and not path.is_symlink():
                yield path, path.relative_to(self._root).as_posix()
