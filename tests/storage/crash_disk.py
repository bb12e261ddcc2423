"""Disks after a power loss: record the file operations of real code, and lose power after any of them.

`recording(root)` notes every change that code makes below `root` through `os` (and so through pathlib), in
any thread, and `crashes` gives the directory trees that may be found after a power loss at each point. The
disk is as weak as POSIX allows:

- bytes of a file are safe once the file was fsynced; of later writes any subset may be there, of each of them
  any prefix, and the size may be there before the bytes, which then read as zeros;
- a change of a directory (create, link, rename, unlink, mkdir, rmdir) is safe once the directory was fsynced;
  of later ones any subset may have been done, each of them entirely or not at all. A rename between two
  directories is two changes: both names may be left, or none.

Journaling file systems promise more; `test_power_loss.py` runs on them.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from ray_ckpt.storage.local import direct

Fact: TypeAlias = tuple[str, ...]
"""Something that was acknowledged, such as ("held", directory, file): from there on it must be true."""

Image: TypeAlias = tuple[tuple[str, bytes | None], ...]
"""A directory tree: (relative path, bytes of the file or None for a folder), parents first."""

ROOT = 0  # the inode of the recorded folder


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes from `offset` of a file."""

    inode: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Grow:
    """Room set aside: the file has at least this size from here on, and zeros where nothing was written."""

    inode: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a directory: each name is an inode from here on, or is gone (None)."""

    directory: int
    names: tuple[tuple[str, int | None], ...]
    makes_folder: bool = False


@dataclass(frozen=True, slots=True)
class Sync:
    """fsync of a file or directory."""

    inode: int


@dataclass(frozen=True, slots=True)
class Noted:
    """No operation, but a note that `fact` was acknowledged."""

    fact: Fact


Operation: TypeAlias = Write | Grow | Change | Sync | Noted


class ProcessDied(BaseException):
    """The recorded process was killed: nothing of it runs any more, no handler either."""


class CrashDisk:
    """Records what the process does below `root`. Made by `recording`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.operations: list[Operation] = []
        self._actions: dict[int, Callable[[], None]] = {}
        self._inodes: dict[str, int] = {str(root): ROOT}  # by path
        self._open_files: dict[int, int] = {}  # descriptor -> inode
        self._real_files: dict[int, tuple[int, int] | None] = {}  # descriptor -> device, inode
        self._killed: set[int] = set()  # descriptors that `kill` has closed; owners may do it again
        self._dead = False
        self._lock = threading.RLock()  # one operation at a time; what happens before one is not in it

    def note(self, *fact: str) -> None:
        """Record that `fact` is acknowledged now."""
        self.operations.append(Noted(fact))

    def at(self, index: int, action: Callable[[], None]) -> None:
        """Run `action` once, just before the first operation that has at least `index` others before it."""
        self._actions[index] = action

    def kill(self) -> None:
        """End the process: use as an action. Its descriptors and locks go, the page cache stays."""
        with self._lock:
            self._dead = True
            for fd in tuple(self._open_files):
                self._open_files.pop(fd)
                if _real_file(fd) == self._real_files.pop(fd):  # else a file object has closed it before
                    self._killed.add(fd)
                    _REAL["close"](fd)
        raise ProcessDied

    def restart(self) -> None:
        """Begin the next process."""
        self._dead = False

    # -- the functions of `os` -------------------------------------------------------------------------

    def open(self, path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        where = self._inside(path)
        if where is None:
            fd = int(_REAL["open"](path, flags, mode, **more))
            self._killed.discard(fd)
            return fd
        with self._operation():
            fd = int(_REAL["open"](path, flags, mode, **more))
            if where not in self._inodes:
                self._add(where)
            self._open_files[fd] = self._inodes[where]
            self._real_files[fd] = _real_file(fd)
            self._killed.discard(fd)
            return fd

    def write(self, fd: int, data: Any) -> int:
        if fd not in self._open_files:
            return int(_REAL["write"](fd, data))
        with self._operation():
            offset = os.lseek(fd, 0, os.SEEK_CUR)
            return self._written(fd, offset, data, int(_REAL["write"](fd, data)))

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        if fd not in self._open_files:
            return int(_REAL["pwrite"](fd, data, offset))
        with self._operation():
            return self._written(fd, offset, data, int(_REAL["pwrite"](fd, data, offset)))

    def reserve(self, fd: int, size_bytes: int) -> None:
        """`direct.reserve`, which is not in `os`."""
        if fd not in self._open_files:
            _RESERVE(fd, size_bytes)
            return
        with self._operation():
            _RESERVE(fd, size_bytes)
            self.operations.append(Grow(self._open_files[fd], size_bytes))

    def fsync(self, fd: int) -> None:
        if fd not in self._open_files:
            _REAL["fsync"](fd)
            return
        with self._operation():
            _REAL["fsync"](fd)
            self.operations.append(Sync(self._open_files[fd]))

    def close(self, fd: int) -> None:
        with self._lock:
            if fd in self._killed:  # the number may be another thread's by now
                self._killed.discard(fd)
            elif not self._dead or fd in self._open_files:
                self._open_files.pop(fd, None)
                self._real_files.pop(fd, None)
                _REAL["close"](fd)

    def link(self, src: Any, dst: Any, **more: Any) -> None:
        source, target = self._inside(src), self._inside(dst)
        if not source or not target:
            _REAL["link"](src, dst, **more)
            return
        with self._operation():
            _REAL["link"](src, dst, **more)
            self._change({target: self._inodes[source]})

    def rename(self, src: Any, dst: Any, **more: Any) -> None:
        source, target = self._inside(src), self._inside(dst)
        if not source or not target:
            _REAL["rename"](src, dst, **more)
            return
        with self._operation():
            _REAL["rename"](src, dst, **more)
            if self._inodes[source] != self._inodes.get(target):  # else both names stay, by POSIX
                self._change({source: None, target: self._inodes[source]})

    def unlink(self, path: Any, **more: Any) -> None:
        self._remove("unlink", path, more)

    def rmdir(self, path: Any, **more: Any) -> None:
        self._remove("rmdir", path, more)

    def mkdir(self, path: Any, mode: int = 0o777, **more: Any) -> None:
        where = self._inside(path)
        if not where:
            _REAL["mkdir"](path, mode, **more)
            return
        with self._operation():
            _REAL["mkdir"](path, mode, **more)
            self._add(where, folder=True)

    # -- what was done ---------------------------------------------------------------------------------

    def check_complete(self) -> None:
        """Assert that the recorded operations make the existing tree: none went past the recorder."""
        after = _Disk()
        for operation in self.operations:
            after.apply(operation)
        assert after.image(EVERYTHING) == read_image(self.root), "an operation was not recorded"

    def _remove(self, how: str, path: Any, more: dict[str, Any]) -> None:
        where = self._inside(path)
        if not where:
            _REAL[how](path, **more)
            return
        with self._operation():
            _REAL[how](path, **more)
            self._change({where: None})

    def _written(self, fd: int, offset: int, data: Any, count: int) -> int:
        self.operations.append(Write(self._open_files[fd], offset, bytes(memoryview(data)[:count])))
        return count

    def _add(self, where: str, *, folder: bool = False) -> None:
        self._change({where: len(self.operations) + 1}, makes_folder=folder)

    def _change(self, names: dict[str, int | None], *, makes_folder: bool = False) -> None:
        parents = {path: os.path.dirname(path) for path in names}  # noqa: PTH120
        changes = {
            parent: tuple((os.path.basename(p), names[p]) for p in names if parents[p] == parent)  # noqa: PTH119
            for parent in parents.values()
        }
        for parent, entries in changes.items():
            self.operations.append(Change(self._inodes[parent], entries, makes_folder))
        for path, inode in names.items():
            if inode is None:
                del self._inodes[path]
            else:
                self._inodes[path] = inode

    @contextlib.contextmanager
    def _operation(self) -> Iterator[None]:
        """Wrap an operation and its record; run the actions that are due before it."""
        while (action := self._due()) is not None:
            action()
        with self._lock:
            if self._dead:
                raise ProcessDied
            yield

    def _due(self) -> Callable[[], None] | None:
        with self._lock:
            if self._dead:
                raise ProcessDied
            due = next((index for index in self._actions if index <= len(self.operations)), None)
            return None if due is None else self._actions.pop(due)

    def _inside(self, path: Any) -> str | None:
        where = os.path.abspath(os.fspath(path))  # noqa: PTH100
        return where if where == str(self.root) or where.startswith(f"{self.root}/") else None


_RECORDED = ("open", "write", "pwrite", "fsync", "close", "link", "rename", "unlink", "rmdir", "mkdir")
_REAL: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in _RECORDED}
_RESERVE = direct.reserve


def _real_file(fd: int) -> tuple[int, int] | None:
    """Return device and inode of an open descriptor; None if it is closed."""
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def recording(root: Path) -> Iterator[CrashDisk]:
    """Record what this process does below `root`, which exists and is empty."""
    disk = CrashDisk(root)
    with pytest.MonkeyPatch.context() as patch:
        for name in _RECORDED:
            patch.setattr(os, name, getattr(disk, name))
        patch.setattr(direct, "reserve", disk.reserve)
        yield disk


# What may be left


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """A power loss after the first `index` operations: the tree that is left, and the facts noted before."""

    index: int
    image: Image
    noted: frozenset[Fact]


def crashes(operations: Sequence[Operation], *, seed: int, random_choices: int) -> Iterator[Crash]:
    """Yield outcomes after each operation: no unsynced change left, all left, and `random_choices` others."""
    disk, rng = _Disk(), random.Random(seed)
    choices = (NOTHING, EVERYTHING, *[_at_random(rng)] * random_choices)
    noted = frozenset[Fact]()
    for index in range(len(operations) + 1):
        for choice in choices:
            yield Crash(index=index, image=disk.image(choice), noted=noted)
        if index < len(operations):
            operation = operations[index]
            disk.apply(operation)
            if isinstance(operation, Noted):
                noted |= {operation.fact}


def read_image(folder: Path) -> Image:
    """Return the tree below `folder`."""
    found = folder.rglob("*")
    return tuple(sorted((str(p.relative_to(folder)), None if p.is_dir() else p.read_bytes()) for p in found))


def write_image(image: Image, folder: Path) -> None:
    """Write a tree below the empty `folder`."""
    for name, data in image:
        if data is None:
            (folder / name).mkdir(mode=0o700)
        else:
            (folder / name).write_bytes(data)


@dataclass(frozen=True, slots=True)
class _Choice:
    """The unsynced changes of directories that were done, and the unsynced bytes that are left."""

    keeps: Callable[[], bool]
    left_of: Callable[[Write], Write | None]


NOTHING = _Choice(lambda: False, lambda write: None)
EVERYTHING = _Choice(lambda: True, lambda write: write)


def _at_random(rng: random.Random) -> _Choice:
    def torn(write: Write) -> Write | None:
        cut = write.data[: rng.randint(0, len(write.data))]
        zeros = bytes(len(write.data) - len(cut))
        data = rng.choice((b"", write.data, cut, cut + zeros))
        return Write(write.inode, write.offset, data) if data else None

    return _Choice(lambda: rng.random() < 0.5, torn)


class _Disk:
    """The disk and its cache while the power is on."""

    def __init__(self) -> None:
        self._folders: dict[int, dict[str, int]] = {ROOT: {}}  # the synced entries of each
        self._unsynced: list[Change] = []
        self._files: dict[int, bytes] = {}  # the synced bytes of each
        self._writes: dict[int, list[Write | Grow]] = {}  # to each file, since then

    def apply(self, operation: Operation) -> None:
        match operation:
            case Write(inode) | Grow(inode):
                self._writes.setdefault(inode, []).append(operation)
            case Change():
                self._unsynced.append(operation)
                self._folders |= {i: {} for _, i in operation.names if i and operation.makes_folder}
            case Sync(inode):
                self._files[inode] = self._left_of(inode, EVERYTHING)
                self._writes.pop(inode, None)
                for change in self._unsynced:
                    if change.directory == inode:
                        _do(change, self._folders)
                self._unsynced = [change for change in self._unsynced if change.directory != inode]

    def image(self, choice: _Choice) -> Image:
        folders = {inode: dict(entries) for inode, entries in self._folders.items()}
        for change in self._unsynced:
            if choice.keeps():
                _do(change, folders)
        found: dict[str, bytes | None] = {}
        todo = [("", ROOT)]
        while todo:
            prefix, folder = todo.pop()
            for name, inode in folders[folder].items():
                is_folder = inode in folders
                found[prefix + name] = None if is_folder else self._left_of(inode, choice)
                if is_folder:
                    todo.append((f"{prefix}{name}/", inode))
        return tuple(sorted(found.items()))

    def _left_of(self, inode: int, choice: _Choice) -> bytes:
        data = bytearray(self._files.get(inode, b""))
        for change in self._writes.get(inode, ()):
            match change:
                case Grow(size_bytes=size) if choice.keeps():
                    data.extend(bytes(max(0, size - len(data))))
                case Write() if left := choice.left_of(change):
                    data.extend(bytes(max(0, left.offset - len(data))))
                    data[left.offset : left.offset + len(left.data)] = left.data
        return bytes(data)


def _do(change: Change, folders: dict[int, dict[str, int]]) -> None:
    entries = folders[change.directory]
    for name, inode in change.names:
        if inode is None:
            entries.pop(name, None)
        else:
            entries[name] = inode
