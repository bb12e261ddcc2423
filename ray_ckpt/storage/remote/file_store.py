"""The seam under the remote tier: files of any size under names, in a folder or in an object store.

Names are relative to the store's root and made of parts joined by "/". A name is only ever written with the
same bytes, by whoever and however often: so a repeated write is harmless, and there is no update.
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
    """What a listing says of a file."""

    name: str
    size_bytes: int
    modified_s: float  # Unix time by the store's clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Children:
    """What lies directly in a folder, in any order: names as everywhere, from the store's root on."""

    folders: tuple[str, ...]
    files: tuple[StoredFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """A write that has begun and not ended; whoever made it may be dead. It holds space and is no file."""

    name: str
    id: str
    started_s: float  # Unix time by the store's clock


class FileStore(Protocol):
    """Used from several threads at once. A store that fails or is away is an OSError without secrets."""

    where: str
    """The root, for people."""

    def put(self, name: str, blocks: Iterable[Buffer], *, max_bytes: int) -> int:
        """Store a file entirely, durably, and in place of what is there; returns its size.

        There are at most `max_bytes` to come. A block may change as soon as the next one is asked for. What
        `blocks` raises comes through, and no upload is left of it. OSError if the store does not take them,
        or has another number of bytes afterwards.
        """
        ...

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> Blocks:
        """The bytes of the ranges (offset, nbytes), one after the other, in blocks of any size.

        A block is valid until the next one is asked for. FileNotFoundError, OSError, EOFError.
        """
        ...

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if it is not there. OSError if that cannot be told."""
        ...

    def modified_s(self, name: str) -> float:
        """When a file was written, as Unix time by the store's clock. FileNotFoundError, OSError."""
        ...

    def list(self, folder: str = "") -> Iterator[StoredFile]:
        """The files below a folder, however deep, in any order; none if it is not there."""
        ...

    def children(self, folder: str = "") -> Children:
        """One level of a folder; nothing if it is not there. On an object store a folder has files in it."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """These files are gone afterwards, in any order; absent is fine."""
        ...

    def uploads(self, folder: str = "") -> Iterator[Upload]:
        """Unfinished uploads of files below a folder."""
        ...

    def abort(self, upload: Upload) -> None:
        """End an upload and free what it holds; absent is fine."""
        ...


def read_whole(store: FileStore, name: str, *, max_bytes: int) -> bytes:
    """A small file. FileNotFoundError, OSError; EOFError if it has more than `max_bytes`."""
    size = store.size(name)
    if size is None:
        raise FileNotFoundError(f"{store.where}/{name} is not there")
    if size > max_bytes:
        raise EOFError(f"{store.where}/{name} has {size} bytes; the format allows {max_bytes}")
    return b"".join(map(bytes, store.read(name, [(0, size)])))


class PosixFiles:
    """A folder: a shared file system that all nodes mount, or a local disk.

    It must be there: what would make it anew would write below a mount that is away.
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
        """Links count as what they point to. Which of them are read, `files.open_file` says."""
        try:
            paths = sorted((self._root / folder).iterdir())
        except (FileNotFoundError, NotADirectoryError):
            paths = []
        folders, found = [], []
        for path in paths:
            name = path.relative_to(self._root).as_posix()
            with contextlib.suppress(FileNotFoundError, PermissionError):  # gone, or a link to others' files
                if path.is_dir():
                    folders.append(name)
                elif path.is_file() and not files.is_temporary(path.name):
                    stat = path.stat()
                    found.append(StoredFile(name=name, size_bytes=stat.st_size, modified_s=stat.st_mtime))
        return Children(folders=tuple(folders), files=tuple(found))

    def delete(self, names: Sequence[str]) -> None:
        """Folders that are empty then go too, and what was recorded as gone does not come back."""
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
