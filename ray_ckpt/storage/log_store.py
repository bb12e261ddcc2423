"""The interface between the commit log and its store: create-if-absent, read, list and delete.

A store must provide: a create that succeeds for exactly one writer per name and is visible completely or not
at all; read-after-write; a listing of all objects that existed before the call. Compare-and-swap and rename
are not needed. `probe_store` detects stores that do not provide this.

A run's log on such a store consists of records, numbered without gaps, and of snapshots, each of which
replaces the records up to its number. Record 0 names the run and is never deleted. Other records are deleted
once an old snapshot covers them (`trim_log`). A number at or below a snapshot counts as taken even when its
record is missing, so that no writer replaces a deleted record (`create_record`; SlateDB RFC-0026).
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, TypeAlias

from ray_ckpt.collector import collector_paused
from ray_ckpt.core.history import RunHistory
from ray_ckpt.errors import FormatError, NewerFormat, StoragePathError
from ray_ckpt.format import names
from ray_ckpt.format.digest import digest
from ray_ckpt.format.records import MAX_RECORD_BYTES, Create, LogRecord, decode_record
from ray_ckpt.format.snapshot import MAX_SNAPSHOT_BYTES, LogSnapshot, decode_snapshot, encode_snapshot
from ray_ckpt.storage.local import files

log = logging.getLogger("ray_ckpt")

PROBE_PREFIX = "probe-"  # begins the names of probe files, so that readers do not take them for records
READ_TRIES = 3  # tries to read a log, since another process may trim records during a try
TRIM_AFTER_S = 24 * 3600.0  # age of a snapshot before the covered records are deleted: readers may need them
TRIM_BATCH = 2000  # names that one `trim_log` call deletes: more than are created between two snapshots


class CreateResult(enum.Enum):
    """The answer to a create."""

    OK = "ok"  # the object has exactly these bytes and is durable
    EXISTS = "exists"  # the object has other bytes
    UNKNOWN = "unknown"  # no clear answer: do not acknowledge, do not clean up, try again
    UNSUPPORTED = "unsupported"  # the store has no conditional create; nothing was stored


class LogStore(Protocol):
    """Small immutable objects under flat names.

    Every call may be repeated. `create` returns OK if the object exists with the same bytes; after an
    unclear answer, `create` reads the object to find the result. `create` never raises. The duration of a
    call has no limit.
    """

    last_error: str  # of the last create: what the store has answered; "" if it has taken the object

    def create(self, name: str, data: bytes) -> CreateResult: ...

    def read(self, name: str) -> bytes | None:
        """Return the object's bytes, None if it does not exist. Raise OSError if the store does not answer.

        Raise FormatError if the object is larger than the format allows or is not a file.
        """
        ...

    def list(self, prefix: str = "") -> tuple[str, ...]:
        """Return the names in any order; names created during the call may be missing. Raise OSError."""
        ...

    def delete(self, name: str) -> None:
        """Delete the object if it exists. Raise OSError if the store does not answer."""
        ...


class MemoryLogStore:
    """A log store in memory, the reference model for tests."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.last_error = ""

    def create(self, name: str, data: bytes) -> CreateResult:
        return CreateResult.OK if self.objects.setdefault(name, data) == data else CreateResult.EXISTS

    def read(self, name: str) -> bytes | None:
        return self.objects.get(name)

    def list(self, prefix: str = "") -> tuple[str, ...]:
        return tuple(name for name in list(self.objects) if name.startswith(prefix))

    def delete(self, name: str) -> None:
        self.objects.pop(name, None)


class PosixLogStore:
    """A log in a directory, which must exist.

    The directory is not created here, because it may be on a file system that is not mounted yet.
    A create writes and fsyncs a unique temporary file, links it to the name, and fsyncs the directory.
    `link()` refuses an existing name on every POSIX file system, including NFS. On NFS the answer of `link()`
    may be lost, so the stored bytes are compared after any error.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.last_error = ""

    def create(self, name: str, data: bytes) -> CreateResult:
        temporary: Path | None = None
        self.last_error = ""
        try:
            temporary = files.write_temporary(self._directory, [data])
            files.fsync_dir(self._directory)  # another writer may have created the previous record
            os.link(temporary, self._directory / name)
        except OSError as error:  # the comparison with the stored file gives the result
            self.last_error = f"{error.strerror or error}: {self._directory}"  # a file name is random
        finally:
            with contextlib.suppress(OSError):
                if temporary is not None:
                    temporary.unlink()
        outcome = compare(self, name, data, absent=CreateResult.UNKNOWN)
        if outcome is CreateResult.OK:
            try:
                files.fsync_dir(self._directory)
            except OSError as error:
                self.last_error = str(error)
                return CreateResult.UNKNOWN
        return outcome

    def read(self, name: str) -> bytes | None:
        try:
            return files.read_small(self._directory / name, max_bytes(name), within=self._directory)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (files.NotRegular, EOFError) as error:
            raise FormatError(f"{error}.") from error

    def list(self, prefix: str = "") -> tuple[str, ...]:
        try:
            found = os.listdir(self._directory)  # noqa: PTH208
        except (FileNotFoundError, NotADirectoryError):
            return ()
        return tuple(name for name in found if name.startswith(prefix) and not files.is_temporary(name))

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (self._directory / name).unlink()


class Unsupported(OSError):
    """The store does not support conditional creates."""


class SmallObjects(Protocol):
    """Small objects under names with "/", one request per call. After an OSError the result is unknown."""

    def create(self, name: str, data: bytes) -> None:
        """Create an object. Raise FileExistsError if the name exists, Unsupported, or another OSError."""
        ...

    def get(self, name: str, *, max_bytes: int) -> bytes:
        """Read an object. Raise FileNotFoundError, OSError, or EOFError soon if it exceeds `max_bytes`."""
        ...

    def names(self, folder: str) -> tuple[str, ...]:
        """Return the names in `folder`, relative to the folder, never from a cache. Raise OSError."""
        ...

    def remove(self, name: str) -> None:
        """Delete an object; an absent object is not an error. Raise OSError."""
        ...


class ObjectLogStore:
    """A log store in a folder of S3, GCS, or a file system of fsspec whose create refuses existing names.

    An object is created by one conditional request (S3: If-None-Match, GCS: ifGenerationMatch=0). Responses
    are not trusted. When a response is lost, the client library repeats the create, and the store refuses the
    second create although the first one succeeded (412); two creates at the same time may both get a conflict
    (409). Therefore the object that is stored afterwards is read and compared.
    """

    def __init__(self, objects: SmallObjects, folder: str) -> None:
        self._objects = objects
        self._folder = folder
        self.last_error = ""

    def create(self, name: str, data: bytes) -> CreateResult:
        absent, self.last_error = CreateResult.UNKNOWN, ""
        try:
            self._objects.create(self._path(name), data)
        except OSError as error:  # the comparison with the stored object gives the result
            self.last_error = str(error)
            if isinstance(error, Unsupported):
                absent = CreateResult.UNSUPPORTED
        return compare(self, name, data, absent=absent)

    def read(self, name: str) -> bytes | None:
        try:
            return self._objects.get(self._path(name), max_bytes=max_bytes(name))
        except FileNotFoundError:
            return None
        except EOFError as error:
            raise FormatError(f"{error}.") from error

    def list(self, prefix: str = "") -> tuple[str, ...]:
        return tuple(name for name in self._objects.names(self._folder) if name.startswith(prefix))

    def delete(self, name: str) -> None:
        self._objects.remove(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"


def max_bytes(name: str) -> int:
    """Return the largest size that the format allows for an object of this name."""
    return MAX_SNAPSHOT_BYTES if names.snapshot_seq(name) is not None else MAX_RECORD_BYTES


def compare(store: LogStore, name: str, data: bytes, *, absent: CreateResult) -> CreateResult:
    """Compare `data` with the stored object and return the result of the create.

    A record is another writer's only if it is intact: damaged bytes are UNKNOWN, since a proxy may have
    damaged the answer, and the object may have exactly `data`.
    """
    try:
        there = store.read(name)
        if there is None or there == data:
            return absent if there is None else CreateResult.OK
        if names.record_seq(name) is not None:
            decode_record(there)
    except NewerFormat:
        return CreateResult.EXISTS
    except FormatError as error:
        if names.record_seq(name) is None:
            return CreateResult.EXISTS
        store.last_error = f"{name} was read with damaged bytes: {error.message}"
        return CreateResult.UNKNOWN
    except OSError as error:
        store.last_error = str(error)
        return CreateResult.UNKNOWN
    return CreateResult.EXISTS


def probe(directory: Path) -> None:
    """Prove that the file system of `directory` can hold a commit log. Raise StoragePathError if not."""
    try:
        files.make_dirs(directory)
        files.write_temporary(directory, [b"1"]).unlink()  # raises the cause of a failure; `create` does not
    except OSError as error:
        raise not_writable(str(directory), error) from error
    probe_store(PosixLogStore(directory), where=str(directory))


def probe_store(store: LogStore, *, where: str) -> None:
    """Prove that `store` meets the requirements of a log store. Raise StoragePathError, with `where`, if not.

    One name is created twice with different bytes. The second create must be refused; the first object must
    stay, be listed, and disappear when it is deleted.
    """
    name = f"{PROBE_PREFIX}{uuid.uuid4().hex}"
    try:
        store.read(name)  # raises the cause of a failure; `create` only returns UNKNOWN
        first, second, kept = store.create(name, b"1"), store.create(name, b"2"), store.read(name)
        listed = name in store.list(PROBE_PREFIX)
        store.delete(name)
        gone = store.read(name) is None and name not in store.list(PROBE_PREFIX)
    except OSError as error:
        raise not_writable(where, error) from error
    if (first, second, kept) != (CreateResult.OK, CreateResult.EXISTS, b"1"):
        raise StoragePathError(
            f"{where} cannot hold a commit log: create gave {first.value}, "
            f"a second create of the same name {second.value}.",
            hint="It must be writable and create a name once only (POSIX: hard links; object stores: "
            "If-None-Match or ifGenerationMatch); choose another storage_path.",
            path=where,
        )
    if not (listed and gone):
        raise StoragePathError(
            f"{where} cannot hold a commit log: it does not {'delete' if listed else 'list'} what it has.",
            hint="Reading, listing and deleting must be allowed and consistent; choose another storage_path.",
            path=where,
        )


def not_writable(where: str, error: OSError) -> StoragePathError:
    """Return the error for a storage path that cannot be written."""
    return StoragePathError(
        f"The storage path {where} cannot be written: {error}.",
        hint="Give the user that runs Ray write access to it, or choose another storage_path.",
        path=where,
    )


# A run's log


Records: TypeAlias = tuple[tuple[LogRecord, str], ...]
"""Records in order, each with the digest of its bytes; `RunHistory.apply` checks that they are linked."""


def read_run(store: LogStore) -> tuple[RunHistory, Records]:
    """Return the history of the newest intact snapshot and the records after this snapshot.

    Without an intact snapshot, return an empty history and all records. A damaged snapshot is skipped if the
    records from an older snapshot, or from record 0, continue beyond the damaged snapshot without a gap.
    Raise FormatError if they do not, or if a record is damaged; OSError if the store cannot be read.
    """
    for _ in range(READ_TRIES):
        history, damage = _newest_history(store)
        records = read_log(store, start=history.next_seq)
        seq = history.next_seq + len(records)
        newest = max(_snapshots(store), default=-1)  # listed last, to notice records trimmed meanwhile
        if seq > newest:
            return history, records
    if isinstance(damage, NewerFormat):
        raise damage
    raise FormatError(
        f"The log has no record {seq}, but a snapshot of record {newest} that cannot be used.",
        hint="Restore the missing or damaged file from a backup; a shorter history would be wrong.",
    ) from damage


def read_log(store: LogStore, *, start: int = 0) -> Records:
    """Return the records from `start` to the first missing one, each with the digest of its bytes.

    The end is found by reading record after record, because a listing may lack the newest names. Raise
    OSError if the store cannot be read, FormatError if a record is damaged.
    """
    found: list[tuple[LogRecord, str]] = []
    while (record := _read_record(store, start + len(found))) is not None:
        found.append(record)
    return tuple(found)


def _read_record(store: LogStore, seq: int) -> tuple[LogRecord, str] | None:
    """Return a record and the digest of its bytes; None if it is missing. Raise OSError or FormatError."""
    name = names.record_file(seq)
    try:
        data = store.read(name)
        return None if data is None else (decode_record(data), digest(data))
    except FormatError as error:
        hint = error.hint or "Restore that file from a backup; no record after it can be trusted."
        message = f"Record {name} of the log cannot be read. {error.message}"
        raise type(error)(message, hint=hint, **error.fields) from error


def read_covered(store: LogStore, history: RunHistory) -> Records:
    """Return the records before `history.next_seq` that still exist: record 0 and the most recent records.

    Each record contains the digest of the previous record. If a record does not have this digest, it and all
    earlier records are left out and a warning is logged: the record is damaged or missing, or a stalled
    writer created it in place of a deleted record.
    Raise OSError and FormatError like `read_log`.
    """
    found: list[tuple[LogRecord, str]] = []
    seq, wanted = history.next_seq - 1, history.last_digest
    while seq >= 0 and (covered := _read_covered(store, seq, wanted)) is not None:
        found.append((covered, wanted))
        seq, wanted = seq - 1, covered.prev
    if seq >= 0 and (first := _read_record(store, 0)) is not None:
        found.append(first)
    return tuple(reversed(found))


def _read_covered(store: LogStore, seq: int, wanted: str) -> LogRecord | None:
    """Return record `seq` if its bytes have the digest `wanted`, else None."""
    name, reason = names.record_file(seq), "it is not the record that the next one follows"
    try:
        data = store.read(name)
    except FormatError as error:
        data, reason = b"", str(error)
    if data is None:
        if not any(0 < older < seq for older in _record_seqs(store)):
            return None  # trimmed, since the oldest records are deleted first
        data, reason = b"", "it is missing"
    if digest(data) == wanted:
        return decode_record(data)
    log.warning("The log up to %s is left out; a snapshot covers it. %s: %s", name, name, reason)
    return None


def create_record(store: LogStore, seq: int, data: bytes) -> CreateResult:
    """Create record `seq`. Return EXISTS also if a snapshot covers this number.

    The snapshots are listed after the create. The number of a deleted record is therefore recognized, even if
    this writer was stalled for a long time.
    """
    outcome = store.create(names.record_file(seq), data)
    if outcome is not CreateResult.OK:
        return outcome
    try:
        covered = any(snapshot >= seq for snapshot in _snapshots(store))
    except OSError as error:
        store.last_error = str(error)
        return CreateResult.UNKNOWN
    return CreateResult.EXISTS if covered else CreateResult.OK


def write_snapshot(store: LogStore, snapshot: LogSnapshot) -> CreateResult:
    """Store a snapshot of the log. EXISTS also means success: the stored snapshot covers the same records.

    Raise FormatError if the history is too large for a snapshot; the log then continues without one.
    """
    return store.create(names.snapshot_file(snapshot.seq), encode_snapshot(snapshot))


def trim_log(store: LogStore, now_s: float) -> int:
    """Delete at most TRIM_BATCH records and snapshots that an old snapshot replaces; return the number.

    Repeat the call to delete more. P is the newest intact snapshot that was made before `now_s` -
    TRIM_AFTER_S (Unix time), but never the newest snapshot of the log. The records 1 to P and the snapshots
    before P are deleted. The snapshots after P are deleted too, except the first intact one (the P of a later
    call) and the last two. Nothing is deleted while the newest snapshot is damaged: a single damaged file
    must not cause a loss of records. Raise OSError if the store fails.
    """
    found, run_uid = _snapshots(store), _run_uid(store)
    read = {seq: _read_snapshot(store, seq, run_uid) for seq in found}
    sound = {seq: snapshot for seq, snapshot in read.items() if isinstance(snapshot, LogSnapshot)}
    if not found or found[-1] not in sound:
        return 0
    boundary = max(
        (seq for seq in found[:-1] if seq in sound and sound[seq].time_s <= now_s - TRIM_AFTER_S), default=-1
    )
    after = [seq for seq in sound if seq > boundary]
    kept = {boundary, *after[:1], *found[-2:]}
    going = [names.snapshot_file(seq) for seq in found if seq not in kept]
    going += [names.record_file(seq) for seq in sorted(_record_seqs(store)) if 0 < seq <= boundary]
    for name in going[:TRIM_BATCH]:
        store.delete(name)
    return len(going[:TRIM_BATCH])


def _record_seqs(store: LogStore) -> Iterator[int]:
    """Yield the numbers of the stored records, in any order."""
    return (seq for name in store.list() if (seq := names.record_seq(name)) is not None)


def _newest_history(store: LogStore) -> tuple[RunHistory, FormatError | None]:
    """Return the history of the newest intact snapshot, and the error of the newest damaged one after it."""
    run_uid, damage = _run_uid(store), None
    for seq in reversed(_snapshots(store)):
        snapshot = _read_snapshot(store, seq, run_uid)
        if isinstance(snapshot, LogSnapshot):
            return RunHistory.from_snapshot(snapshot), damage
        damage = damage or snapshot
    return RunHistory(), damage


def _read_snapshot(store: LogStore, seq: int, run_uid: str) -> LogSnapshot | FormatError:
    """Return the snapshot up to record `seq` of the run, or the error if the snapshot is damaged."""
    name = names.snapshot_file(seq)
    try:
        data = store.read(name)
        if data is None:
            return FormatError(f"{name} is missing.")
        with collector_paused():
            snapshot = decode_snapshot(data)
    except NewerFormat as error:
        return error.at(name)
    except FormatError as error:
        return error
    if (snapshot.seq, snapshot.run_uid) != (seq, run_uid):
        return FormatError(f"{name} is of record {snapshot.seq} of run {snapshot.run_uid}.")
    return snapshot


def _run_uid(store: LogStore) -> str:
    """Return the uid of the run from record 0, or "" without record 0. Raise FormatError if it is damaged."""
    first = _read_record(store, 0)
    op = None if first is None else first[0].op
    return op.run_uid if isinstance(op, Create) else ""


def _snapshots(store: LogStore) -> list[int]:
    """Return the numbers of the stored snapshots, in ascending order."""
    found = store.list(names.SNAPSHOT_PREFIX)
    return sorted(seq for name in found if (seq := names.snapshot_seq(name)) is not None)
