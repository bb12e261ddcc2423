"""The seam under the commit log: create-if-absent, read, list, delete. Nothing else is assumed of a store.

A store must give: a create that succeeds for exactly one writer per name and is visible entirely or not
at all; read-after-write; listing of what was there before the call. It need not give compare-and-swap or
rename. `probe_store` finds those that do not keep this.

A run's log on such a store is records, numbered without gaps, and snapshots that stand in for the records
up to their number. Record 0 names the run and is never deleted. Other records are deleted once an old
snapshot covers them (`trim_log`). A number at or below a snapshot counts as taken even when its record is
absent, so that no writer replaces a deleted record (`create_record`; SlateDB RFC-0026).
"""

from __future__ import annotations

import contextlib
import enum
import gc
import logging
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, TypeAlias

from ray_ckpt.core.history import RunHistory
from ray_ckpt.errors import FormatError, NewerFormat, StoragePathError
from ray_ckpt.format import names
from ray_ckpt.format.digest import digest
from ray_ckpt.format.records import MAX_RECORD_BYTES, Create, LogRecord, decode_record
from ray_ckpt.format.snapshot import MAX_SNAPSHOT_BYTES, LogSnapshot, decode_snapshot, encode_snapshot
from ray_ckpt.storage.local import files

log = logging.getLogger("ray_ckpt")

PROBE_PREFIX = "probe-"  # of the names that a probe leaves if it is killed; no reader takes them for records
READ_TRIES = 3  # of a log whose records are trimmed while it is read: each time a reader a day late
TRIM_AFTER_S = 24 * 3600.0  # age of a snapshot before the records that it covers go: for readers at work
TRIM_BATCH = 2000  # names that one `trim_log` deletes: more than is written between two snapshots


class CreateResult(enum.Enum):
    """The answer to a create."""

    OK = "ok"  # these bytes are there now, durably, under this name
    EXISTS = "exists"  # other bytes are there
    UNKNOWN = "unknown"  # no clear answer: do not acknowledge, do not clean up, try again
    UNSUPPORTED = "unsupported"  # the store has no conditional create; nothing was stored


class LogStore(Protocol):
    """Small immutable objects under flat names.

    Every call may be repeated. `create` with bytes that are there already is OK, and looks itself when an
    answer was unclear; it raises nothing. Nothing is promised about how long a call takes.
    """

    def create(self, name: str, data: bytes) -> CreateResult: ...

    def read(self, name: str) -> bytes | None:
        """Return the object's bytes, None if it is absent. OSError if the store gives no answer.

        FormatError if it is larger than the format allows, of which little is read, or no file at all.
        """
        ...

    def list(self, prefix: str = "") -> tuple[str, ...]:
        """Return the existing names in any order, perhaps without those created meanwhile. OSError."""
        ...

    def delete(self, name: str) -> None:
        """Delete the object. An absent one is not an error. OSError if the store gives no answer."""
        ...


class MemoryLogStore:
    """The reference model."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def create(self, name: str, data: bytes) -> CreateResult:
        return CreateResult.OK if self.objects.setdefault(name, data) == data else CreateResult.EXISTS

    def read(self, name: str) -> bytes | None:
        return self.objects.get(name)

    def list(self, prefix: str = "") -> tuple[str, ...]:
        return tuple(name for name in list(self.objects) if name.startswith(prefix))

    def delete(self, name: str) -> None:
        self.objects.pop(name, None)


class PosixLogStore:
    """A directory, which must exist: creating it could write below a mount point that is not mounted.

    create = fsynced unique temporary, `link()` to the name, fsync of the directory.

    `link()` refuses an existing name on every POSIX file system including NFS, where its answer may be
    lost: so any error is resolved by comparing what is there.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def create(self, name: str, data: bytes) -> CreateResult:
        temporary: Path | None = None
        try:
            temporary = files.write_temporary(self._directory, [data])
            files.fsync_dir(self._directory)  # the record that this one follows may be another writer's
            os.link(temporary, self._directory / name)
        except OSError:
            pass  # the stored file decides
        finally:
            with contextlib.suppress(OSError):
                if temporary is not None:
                    temporary.unlink()
        outcome = compare(self, name, data, absent=CreateResult.UNKNOWN)
        if outcome is CreateResult.OK:
            try:
                files.fsync_dir(self._directory)
            except OSError:
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


def max_bytes(name: str) -> int:
    """Return the largest size that the format allows for an object of this name."""
    return MAX_SNAPSHOT_BYTES if names.snapshot_seq(name) is not None else MAX_RECORD_BYTES


def compare(store: LogStore, name: str, data: bytes, *, absent: CreateResult) -> CreateResult:
    """Return the outcome of a create of `data`, from the object that is stored now."""
    try:
        there = store.read(name)
    except FormatError:
        return CreateResult.EXISTS
    except OSError:
        return CreateResult.UNKNOWN
    if there is None:
        return absent
    return CreateResult.OK if there == data else CreateResult.EXISTS


def probe(directory: Path) -> None:
    """Prove that the file system of `directory` can hold a commit log; StoragePathError if it cannot."""
    try:
        files.make_dirs(directory)
        files.write_temporary(directory, [b"1"]).unlink()  # says why if it cannot: a create does not
    except OSError as error:
        raise not_writable(str(directory), error) from error
    probe_store(PosixLogStore(directory), where=str(directory))


def probe_store(store: LogStore, *, where: str) -> None:
    """Prove that `store` keeps the promises of a log store; StoragePathError, naming `where`, if it does not.

    Creates one name twice with different bytes: the second must be refused and the first stay, be listed,
    and go when it is deleted.
    """
    name = f"{PROBE_PREFIX}{uuid.uuid4().hex}"
    try:
        store.read(name)  # says why if nothing can be: a create only says that it does not know
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
    """Return the error of a storage path that cannot be written."""
    return StoragePathError(
        f"The storage path {where} cannot be written: {error}.",
        hint="Give the user that runs Ray write access to it, or choose another storage_path.",
        path=where,
    )


# A run's log


Records: TypeAlias = tuple[tuple[LogRecord, str], ...]
"""Records in order, each with the digest of its bytes; `RunHistory.apply` checks that they are linked."""


def read_run(store: LogStore) -> tuple[RunHistory, Records]:
    """Return the history up to the newest intact snapshot, or an empty one, and the records after it.

    A snapshot that is damaged is passed over, as long as an older one or record 0 and the records from there
    on lead past it. FormatError if they do not, or if a record is damaged; OSError if the store cannot be
    read. An empty log is an empty history.
    """
    for _ in range(READ_TRIES):
        history, damage = _newest_history(store)
        records = read_log(store, start=history.next_seq)
        seq = history.next_seq + len(records)
        newest = max(_snapshots(store), default=-1)  # looked at last: a record trimmed meanwhile is no tail
        if seq > newest:
            return history, records
    if isinstance(damage, NewerFormat):
        raise damage
    raise FormatError(
        f"The log has no record {seq}, but a snapshot of record {newest} that cannot be used.",
        hint="Bring the missing or damaged file back from a backup; no shorter history is true.",
    ) from damage


def read_log(store: LogStore, *, start: int = 0) -> Records:
    """Every record from `start` to the first that is not there, each with the digest of its bytes.

    The tail is found by opening numbers, since a listing may lag. OSError if the store cannot be read,
    FormatError if a record is damaged.
    """
    found: list[tuple[LogRecord, str]] = []
    while (record := _read_record(store, start + len(found))) is not None:
        found.append(record)
    return tuple(found)


def _read_record(store: LogStore, seq: int) -> tuple[LogRecord, str] | None:
    """Return a record with the digest of its bytes, None if absent. OSError; FormatError that names it."""
    name = names.record_file(seq)
    try:
        data = store.read(name)
        return None if data is None else (decode_record(data), digest(data))
    except FormatError as error:
        hint = error.hint or "Bring that file back from a backup; nothing after it can be trusted."
        message = f"Record {name} of the log cannot be read. {error.message}"
        raise type(error)(message, hint=hint, **error.fields) from error


def read_covered(store: LogStore, history: RunHistory) -> Records:
    """Return the records before `history.next_seq` that are left: record 0, and those that lead up to it.

    Each is proven by the one after it. One that is not proven is left out with all before it, and logged: it
    is damaged or missing, or a stalled writer put it in the place of a deleted one. OSError and FormatError
    as in `read_log`.
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
    """Return the record `seq` of digest `wanted`; None if it is absent."""
    name, reason = names.record_file(seq), "it is not the record that the next one follows"
    try:
        data = store.read(name)
    except FormatError as error:
        data, reason = b"", str(error)
    if data is None:
        if not any(0 < older < seq for older in _record_seqs(store)):
            return None  # it was trimmed, which begins with the oldest
        data, reason = b"", "it is missing"
    if digest(data) == wanted:
        return decode_record(data)
    log.warning("The log up to %s is left out; a snapshot has what it says. %s: %s", name, name, reason)
    return None


def create_record(store: LogStore, seq: int, data: bytes) -> CreateResult:
    """Create record `seq`. EXISTS also if a snapshot covers that number: then others have passed it.

    The snapshots are looked at after the create, so a record that was deleted before it is found out, however
    long this writer was stalled.
    """
    outcome = store.create(names.record_file(seq), data)
    if outcome is not CreateResult.OK:
        return outcome
    try:
        covered = any(snapshot >= seq for snapshot in _snapshots(store))
    except OSError:
        return CreateResult.UNKNOWN
    return CreateResult.EXISTS if covered else CreateResult.OK


def write_snapshot(store: LogStore, snapshot: LogSnapshot) -> CreateResult:
    """Store a snapshot of what is in the log; EXISTS is as good, since its records are the same.

    FormatError if the history is too large for one; the log then goes on without.
    """
    return store.create(names.snapshot_file(snapshot.seq), encode_snapshot(snapshot))


def trim_log(store: LogStore, now_s: float) -> int:
    """Delete what old snapshots make superfluous, at most TRIM_BATCH names. Returns how many; call it again.

    P is the newest snapshot that was made before `now_s` - TRIM_AFTER_S (Unix time) and is not the newest of
    all. The records 1 to P go, and the snapshots before P; of those after P the first stays, which is the
    next P, and the last two. Nothing goes while the newest is not sound, and P always is: so one damaged
    file costs nothing. OSError if the store fails.
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
    """Return the history of the newest intact snapshot, and the first damage found on the way to it."""
    run_uid, damage = _run_uid(store), None
    for seq in reversed(_snapshots(store)):
        snapshot = _read_snapshot(store, seq, run_uid)
        if isinstance(snapshot, LogSnapshot):
            return RunHistory.from_snapshot(snapshot), damage
        damage = damage or snapshot
    return RunHistory(), damage


def _read_snapshot(store: LogStore, seq: int, run_uid: str) -> LogSnapshot | FormatError:
    """Return the snapshot up to record `seq` of that run, or the reason why there is none."""
    name = names.snapshot_file(seq)
    try:
        data = store.read(name)
        if data is None:
            return FormatError(f"{name} is gone.")
        with _collector_paused():
            snapshot = decode_snapshot(data)
    except NewerFormat as error:
        return error.at(name)
    except FormatError as error:
        return error
    if (snapshot.seq, snapshot.run_uid) != (seq, run_uid):
        return FormatError(f"{name} is of record {snapshot.seq} of run {snapshot.run_uid}.")
    return snapshot


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause garbage collection, which would double the time to create many objects that all stay."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _run_uid(store: LogStore) -> str:
    """Return the uid of the run that record 0 begins; empty without one. FormatError if it is damaged."""
    first = _read_record(store, 0)
    op = None if first is None else first[0].op
    return op.run_uid if isinstance(op, Create) else ""


def _snapshots(store: LogStore) -> list[int]:
    """Return the numbers of the stored snapshots, in rising order."""
    found = store.list(names.SNAPSHOT_PREFIX)
    return sorted(seq for name in found if (seq := names.snapshot_seq(name)) is not None)
