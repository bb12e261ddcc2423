"""The seam under the commit log: create-if-absent, read, list, delete. Nothing else is assumed of a store.

A store must give: a create that succeeds for exactly one writer per name and is visible entirely or not
at all; read-after-write. It need not give compare-and-swap, rename, or atomic listing.
"""

from __future__ import annotations

import contextlib
import enum
import os
import uuid
from pathlib import Path
from typing import Protocol

from ray_ckpt.errors import StoragePathError
from ray_ckpt.format import names
from ray_ckpt.format.digest import digest
from ray_ckpt.format.records import LogRecord, decode_record
from ray_ckpt.storage import files


class Outcome(enum.Enum):
    """The answer to a create."""

    OK = "ok"  # these bytes are there now, durably, under this name
    EXISTS = "exists"  # other bytes are there
    UNKNOWN = "unknown"  # cannot be told: do not acknowledge, do not clean up, ask again


class LogStore(Protocol):
    """Small immutable objects under flat names.

    Every call may be repeated. `create` with bytes that are there already is OK, so an unclear answer is
    resolved by calling again with the same bytes. Errors other than those below are UNKNOWN, not raised.
    """

    def create(self, name: str, data: bytes) -> Outcome: ...

    def read(self, name: str) -> bytes | None:
        """The object's bytes, None if it is not there; OSError if that cannot be told."""
        ...

    def list(self) -> tuple[str, ...]:
        """Names that exist, in any order. May miss names created during the call."""
        ...


class MemoryLogStore:
    """The reference model."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def create(self, name: str, data: bytes) -> Outcome:
        return Outcome.OK if self.objects.setdefault(name, data) == data else Outcome.EXISTS

    def read(self, name: str) -> bytes | None:
        return self.objects.get(name)

    def list(self) -> tuple[str, ...]:
        return tuple(self.objects)


class PosixLogStore:
    """A directory. create = fsynced unique temporary, `link()` to the name, fsync of the directory.

    `link()` refuses an existing name on every POSIX file system including NFS, where its answer may be
    lost: so any error is resolved by comparing what is there.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def create(self, name: str, data: bytes) -> Outcome:
        try:
            files.make_dirs(self._directory)
            temporary = files.write_temporary(self._directory, [data])
        except OSError:
            return self._compare(name, data, absent=Outcome.UNKNOWN)
        try:
            with contextlib.suppress(OSError):
                os.link(temporary, self._directory / name)
            outcome = self._compare(name, data, absent=Outcome.UNKNOWN)
            if outcome is Outcome.OK:
                files.fsync_dir(self._directory)
        except OSError:
            return Outcome.UNKNOWN
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        return outcome

    def read(self, name: str) -> bytes | None:
        try:
            return (self._directory / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def list(self) -> tuple[str, ...]:
        try:
            return tuple(n for n in os.listdir(self._directory) if not files.is_temporary(n))  # noqa: PTH208
        except (FileNotFoundError, NotADirectoryError):
            return ()

    def _compare(self, name: str, data: bytes, *, absent: Outcome) -> Outcome:
        try:
            there = self.read(name)
        except OSError:
            return Outcome.UNKNOWN
        if there is None:
            return absent
        return Outcome.OK if there == data else Outcome.EXISTS


def probe(directory: Path) -> None:
    """Prove that the file system of `directory` can hold a commit log; StoragePathError if it cannot.

    Creates one name twice with different bytes: the second must be refused and the first stay.
    """
    name = f"probe-{uuid.uuid4().hex}"
    try:
        files.make_dirs(directory)
        store = PosixLogStore(directory)
        first, second, kept = store.create(name, b"1"), store.create(name, b"2"), store.read(name)
        with contextlib.suppress(FileNotFoundError):
            (directory / name).unlink()
    except OSError as error:
        raise StoragePathError(
            f"The storage path {directory} cannot be written: {error}.",
            hint="Give the user that runs Ray write access to it, or choose another storage_path.",
            path=str(directory),
        ) from error
    if (first, second, kept) != (Outcome.OK, Outcome.EXISTS, b"1"):
        raise StoragePathError(
            f"The file system of {directory} cannot hold a commit log: "
            f"create gave {first.value}, a second create of the same name {second.value}.",
            hint="It must be writable and support hard links; choose another storage_path.",
            path=str(directory),
        )


def read_log(store: LogStore, *, start: int = 0) -> tuple[tuple[LogRecord, str], ...]:
    """Every record from `start` to the tail, each with the digest of its bytes.

    The tail is found by opening numbers, since a listing may lag. OSError if the store cannot be read,
    FormatError if a record is damaged.
    """
    found: list[tuple[LogRecord, str]] = []
    while (data := store.read(names.record_file(start + len(found)))) is not None:
        found.append((decode_record(data), digest(data)))
    return tuple(found)
