"""Requirements on every log store, and the probe that finds file systems that do not fulfil them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Barrier, Lock
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ray_ckpt.core.history import RunHistory
from ray_ckpt.errors import FormatError, StoragePathError
from ray_ckpt.format import records as r
from ray_ckpt.format.digest import digest
from ray_ckpt.format.names import record_file, record_seq, snapshot_file
from ray_ckpt.storage import log_store
from ray_ckpt.storage.log_store import (
    TRIM_AFTER_S,
    CreateResult,
    LogStore,
    MemoryLogStore,
    ObjectLogStore,
    PosixLogStore,
    create_record,
    probe,
    probe_store,
    read_covered,
    read_log,
    read_run,
    trim_log,
    write_snapshot,
)
from ray_ckpt.storage.remote.fsspec_store import FsspecStore
from tests.support.examples import every_few
from tests.support.sample_run import RunLog, write_run

NUM_WRITERS = 16


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class LogStoreTests:
    """The conformance suite of the seam; a backend's test gives a fresh, empty store."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> LogStore:
        raise NotImplementedError

    def test_an_empty_store(self, store: LogStore) -> None:
        assert store.list() == ()
        assert store.read("a") is None

    def test_create_is_read_back(self, store: LogStore) -> None:
        assert store.create("a", b"1") is CreateResult.OK
        assert store.create("b", b"") is CreateResult.OK
        assert (store.read("a"), store.read("b"), store.read("c")) == (b"1", b"", None)
        assert sorted(store.list()) == ["a", "b"]

    def test_create_can_be_repeated_and_not_overwritten(self, store: LogStore) -> None:
        assert store.create("a", b"1") is CreateResult.OK
        assert store.create("a", b"1") is CreateResult.OK
        assert store.create("a", b"2") is CreateResult.EXISTS
        assert store.create("a", b"12") is CreateResult.EXISTS
        assert store.read("a") == b"1"

    def test_a_listing_can_be_narrowed(self, store: LogStore) -> None:
        for name in ("a-1", "a-2", "b-1"):
            store.create(name, b"")
        assert sorted(store.list("a-")) == ["a-1", "a-2"]
        assert store.list("c") == ()

    def test_delete_can_be_repeated(self, store: LogStore) -> None:
        store.delete("a")
        store.create("a", b"1")
        store.delete("a")
        store.delete("a")
        assert (store.read("a"), store.list()) == (None, ())
        assert store.create("a", b"2") is CreateResult.OK

    def test_the_probe_takes_it_and_leaves_nothing(self, store: LogStore) -> None:
        probe_store(store, where="here")
        assert store.list() == ()

    def test_large_objects(self, store: LogStore) -> None:
        data = bytes(range(256)) * 4096
        assert store.create("a", data) is CreateResult.OK
        assert store.read("a") == data

    def test_one_of_many_writers_wins(self, store: LogStore) -> None:
        for round_ in range(5):
            name, barrier = f"name-{round_}", Barrier(NUM_WRITERS)

            def write(
                writer: int, name: str = name, barrier: Barrier = barrier
            ) -> tuple[CreateResult, bytes | None]:
                barrier.wait()
                return store.create(name, b"writer %d" % writer), store.read(name)

            with ThreadPoolExecutor(NUM_WRITERS) as pool:
                answers = list(pool.map(write, range(NUM_WRITERS)))
            outcomes = [outcome for outcome, _ in answers]
            assert sorted(o.value for o in outcomes) == ["exists"] * (NUM_WRITERS - 1) + ["ok"]
            winner = b"writer %d" % outcomes.index(CreateResult.OK)
            assert {seen for _, seen in answers} == {winner}, "read after write, for winner and losers"

    def test_the_same_bytes_from_many_writers_are_ok_for_all(self, store: LogStore) -> None:
        with ThreadPoolExecutor(NUM_WRITERS) as pool:
            outcomes = set(pool.map(lambda _: store.create("a", b"same"), range(NUM_WRITERS)))
        assert outcomes == {CreateResult.OK}


class CreatesOnce(MemoryFileSystem):  # type: ignore[misc]
    """fsspec's file system in memory with an atomic create, as object stores have it. Keeps its own objects.

    `after` is what a create does once it is carried out.
    """

    cachable = False

    def __init__(self) -> None:
        super().__init__(skip_instance_cache=True)
        self.store: dict[str, Any] = {}  # the one of the class is shared, and so are its folders
        self.pseudo_dirs = [""]
        self.lock = Lock()
        self.before: Callable[[], object] = bool
        self.after: Callable[[], object] = bool

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self.before()
        with self.lock:
            super().pipe_file(path, value, mode=mode, **kwargs)
        self.after()


class IgnoresConditions(CreatesOnce):
    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, value, mode="overwrite")


class StaleListings(CreatesOnce):
    """A store whose listings are cached unless a call forbids it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}

    def find(self, path: str, **kwargs: Any) -> Any:
        if path not in self.seen:
            self.seen[path] = super().find(path, **kwargs)
        return self.seen[path]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.seen.clear()


class LosesSight(CreatesOnce):
    def find(self, path: str, **kwargs: Any) -> Any:
        return {}


class KeepsAll(CreatesOnce):
    def rm_file(self, path: str) -> None:
        pass


def on(fs: MemoryFileSystem) -> ObjectLogStore:
    """Return the log store on a file system of fsspec."""
    return ObjectLogStore(FsspecStore("memory://bucket", fs, "bucket/runs/gpt/ray_ckpt"), "log")


class ClientError(Exception):
    """Stands for botocore's ClientError."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP {status}")
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}, "Error": {"Code": str(status)}}


def failing(error: BaseException, cause: BaseException | None = None) -> Callable[[], object]:
    def fail() -> None:
        raise error from cause

    return fail


class TestObjects(LogStoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> LogStore:
        return on(CreatesOnce())

    @pytest.mark.parametrize(
        "error",
        [TimeoutError("no answer"), FileExistsError("412"), OSError(errno.EINVAL, "412"), KeyError("x")],
    )
    def test_a_create_that_is_carried_out_and_reported_as_failed(self, error: Exception) -> None:
        fs = CreatesOnce()
        store = on(fs)
        fs.after = failing(error)
        assert store.create("a", b"1") is CreateResult.OK
        assert store.create("a", b"2") is CreateResult.EXISTS
        assert store.read("a") == b"1"

    @pytest.mark.parametrize("change", [lambda data: data[:-9], lambda data: b"?" + data[1:], lambda _: b""])
    def test_a_record_that_is_read_with_damaged_bytes_is_no_record_of_another_writer(
        self, monkeypatch: pytest.MonkeyPatch, change: Callable[[bytes], bytes]
    ) -> None:
        """As through a proxy that shortens the bodies of answers."""
        store = on(CreatesOnce())
        writer = Writer(store)
        writer.write_to(2)
        with monkeypatch.context() as patch:
            whole = store.read
            patch.setattr(store, "read", lambda name: change(whole(name) or b""))
            assert writer.write(r.Note(text="mine")) is CreateResult.UNKNOWN
            assert "00002.json was read with damaged bytes" in store.last_error
        other = replace(writer.record(r.Note(text="other")), writer="other")
        assert create_record(store, 2, r.encode_record(other)) is CreateResult.EXISTS
        assert writer.write(r.Note(text="mine")) is CreateResult.OK

    def test_the_last_error_is_that_of_the_last_create(self) -> None:
        fs = CreatesOnce()
        store = on(fs)
        fs.before = failing(PermissionError("AccessDenied"))
        assert store.create("a", b"1") is CreateResult.UNKNOWN
        assert "AccessDenied" in store.last_error
        fs.before = bool
        assert store.create("a", b"1") is CreateResult.OK
        assert store.last_error == ""

    @pytest.mark.parametrize(
        ("error", "outcome"),
        [
            (TimeoutError("no answer"), CreateResult.UNKNOWN),
            (RuntimeError("closed"), CreateResult.UNKNOWN),
            (OSError(errno.EBUSY, "409"), CreateResult.UNKNOWN),
            (NotImplementedError("mode"), CreateResult.UNSUPPORTED),
            (OSError(errno.ENOSYS, "501"), CreateResult.UNSUPPORTED),
        ],
    )
    def test_a_create_that_leaves_nothing(self, error: Exception, outcome: CreateResult) -> None:
        fs = CreatesOnce()
        store = on(fs)
        fs.before = failing(error)
        assert store.create("a", b"1") is outcome
        fs.before = bool
        assert store.create("a", b"1") is CreateResult.OK
        fs.before = failing(error)
        assert (store.create("a", b"1"), store.create("a", b"2")) == (CreateResult.OK, CreateResult.EXISTS)

    @pytest.mark.parametrize(
        ("status", "outcome"),
        [(501, CreateResult.UNSUPPORTED), (503, CreateResult.UNKNOWN), (409, CreateResult.UNKNOWN)],
    )
    def test_the_status_behind_an_error_counts(self, status: int, outcome: CreateResult) -> None:
        fs = CreatesOnce()
        fs.before = failing(OSError("translated"), ClientError(status))
        assert on(fs).create("a", b"1") is outcome

    def test_what_cannot_be_read_is_unknown_and_an_os_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise RuntimeError("session is closed")

        fs = CreatesOnce()
        store = on(fs)
        store.create("a", b"1")
        for call in ("cat_file", "find", "rm_file"):
            monkeypatch.setattr(fs, call, refuse)
        assert store.create("a", b"1") is CreateResult.UNKNOWN
        for request in (lambda: store.read("a"), store.list, lambda: store.delete("a")):
            with pytest.raises(OSError, match="session is closed"):
                request()

    def test_listings_are_fresh(self) -> None:
        mine, others = StaleListings(), CreatesOnce()
        mine.store, mine.pseudo_dirs = others.store, others.pseudo_dirs
        store = on(mine)
        for name in ("a", "b"):
            on(others).create(name, b"")
            assert name in store.list()

    @pytest.mark.parametrize(
        ("fs", "reason"),
        [
            (IgnoresConditions(), "second create of the same name ok"),
            (LosesSight(), "does not list"),
            (KeepsAll(), "does not delete"),
        ],
    )
    def test_the_probe_refuses_stores_that_cannot_hold_a_log(self, fs: Any, reason: str) -> None:
        with pytest.raises(StoragePathError, match=reason) as caught:
            probe_store(on(fs), where="s3://bucket")
        assert caught.value.hint and caught.value.fields["path"] == "s3://bucket"

    @pytest.mark.parametrize(
        ("error", "reason"),
        [(NotImplementedError(), "create gave unsupported"), (PermissionError("403"), "create gave unknown")],
    )
    def test_the_probe_refuses_stores_that_create_nothing(self, error: Exception, reason: str) -> None:
        fs = CreatesOnce()
        fs.before = failing(error)
        with pytest.raises(StoragePathError, match=reason):
            probe_store(on(fs), where="s3://bucket")


class TestMemory(LogStoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> LogStore:
        return MemoryLogStore()


class TestPosix(LogStoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> LogStore:
        (tmp_path / "run" / "log").mkdir(parents=True)
        return PosixLogStore(tmp_path / "run" / "log")

    def test_a_mount_that_is_away_is_not_written_below(self, tmp_path: Path) -> None:
        """P3: what would be written there is hidden when the mount is back, and the log has a gap."""
        store = PosixLogStore(tmp_path / "mount" / "run" / "log")
        assert store.create("a", b"1") is CreateResult.UNKNOWN
        assert not (tmp_path / "mount").exists()

    def test_nothing_but_the_objects_is_left(self, tmp_path: Path) -> None:
        store = PosixLogStore(tmp_path)
        store.create("a", b"1")
        store.create("a", b"2")
        assert names_in(tmp_path) == ["a"]

    def test_a_crashed_writers_temporary_is_no_object(self, tmp_path: Path) -> None:
        (tmp_path / ".tmp-x").write_bytes(b"half")
        assert PosixLogStore(tmp_path).list() == ()

    def test_a_lost_answer_of_link_is_resolved_by_looking(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """NFS: the first LINK is carried out and its answer is lost; the retransmission gets EEXIST."""
        link = os.link

        def twice(source: Path, target: Path) -> None:
            link(source, target)
            link(source, target)

        monkeypatch.setattr(os, "link", twice)
        store = PosixLogStore(tmp_path)
        assert store.create("a", b"1") is CreateResult.OK
        assert store.create("a", b"2") is CreateResult.EXISTS

    def test_a_retry_on_a_full_disk_is_not_acknowledged_without_an_fsync(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first try linked the file and could not make that durable; the retry finds it there."""
        from ray_ckpt.storage.local import files

        def fail(*_: object) -> None:
            raise OSError(errno.ENOSPC, "injected")

        store = PosixLogStore(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(files, "fsync_dir", fail)
            assert store.create("a", b"1") is CreateResult.UNKNOWN
            patch.setattr(files, "write_temporary", fail)
            assert store.create("a", b"1") is CreateResult.UNKNOWN
        assert store.create("a", b"1") is CreateResult.OK

    @pytest.mark.parametrize("call", ["write", "fsync", "link"])
    def test_io_errors_are_unknown_and_leave_no_temporary(
        self, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object, **__: object) -> None:
            raise OSError(errno.EIO, "injected")

        store = PosixLogStore(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            assert store.create("a", b"1") is CreateResult.UNKNOWN
        assert names_in(tmp_path) == []
        assert store.create("a", b"1") is CreateResult.OK

    def test_a_directory_fsync_that_fails_is_not_acknowledged(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from ray_ckpt.storage.local import files

        def fail(_: Path) -> None:
            raise OSError(errno.EIO, "injected")

        store = PosixLogStore(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(files, "fsync_dir", fail)
            assert store.create("a", b"1") is CreateResult.UNKNOWN
            assert "injected" in store.last_error
        assert store.create("a", b"1") is CreateResult.OK

    def test_a_store_below_a_file_is_empty_and_takes_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        store = PosixLogStore(tmp_path / "file" / "log")
        assert store.create("a", b"1") is CreateResult.UNKNOWN
        assert (store.read("a"), store.list()) == (None, ())


def test_the_probe_accepts_this_file_system_and_leaves_nothing(tmp_path: Path) -> None:
    probe(tmp_path / "run" / "log")
    assert names_in(tmp_path / "run" / "log") == []


def test_the_probe_refuses_a_path_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoragePathError, match="cannot be written") as caught:
        probe(tmp_path / "file" / "log")
    assert caught.value.hint and caught.value.fields["path"].endswith("file/log")


@pytest.mark.parametrize("error", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
def test_the_probe_refuses_a_file_system_without_hard_links(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(error, "no hard links")

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(StoragePathError, match="cannot hold a commit log"):
        probe(tmp_path)
    assert names_in(tmp_path) == []


def test_the_probe_refuses_a_path_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, so the refusal is injected where the kernel would give it."""
    opened: Any = os.open

    def refuse(path: object, flags: int, *args: int) -> Any:
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "denied")
        return opened(path, flags, *args)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StoragePathError, match=r"cannot be written: .*denied"):
        probe(tmp_path)


def test_a_log_is_read_to_its_tail(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=(10, 20))
    store = PosixLogStore(run.folder / "ray_ckpt" / "log")
    log = read_log(store)
    assert [record.seq for record, _ in log] == list(range(run.log.seq))
    assert isinstance(log[0][0].op, r.Create)
    assert log[-1][1] == run.log.prev
    assert read_log(store, start=3) == log[3:]
    assert read_log(store, start=99) == ()
    assert read_log(MemoryLogStore()) == ()


def test_a_damaged_record_is_an_error_not_the_tail() -> None:
    store = MemoryLogStore()
    store.create(record_file(0), b"{}")
    with pytest.raises(FormatError):
        read_log(store)


def test_the_digest_is_that_of_the_bytes(tmp_path: Path) -> None:
    log = RunLog(folder=tmp_path / "run")
    log.create()
    data = (tmp_path / "run" / "ray_ckpt" / "log" / record_file(1)).read_bytes()
    (_, (_, found)) = read_log(PosixLogStore(tmp_path / "run" / "ray_ckpt" / "log"))
    assert found == digest(data) == log.prev


# Snapshots

UID = "ab" * 16


class Writer:
    """Writes a log of notes, and snapshots of it."""

    def __init__(self, store: LogStore) -> None:
        self.store = store
        self.history = RunHistory()

    def record(self, op: r.Op) -> r.LogRecord:
        history = self.history
        return r.LogRecord(
            seq=history.next_seq, epoch=1, writer="w", prev=history.last_digest, time_s=0.0, op=op
        )

    def write(self, op: r.Op) -> CreateResult:
        record = self.record(op)
        data = r.encode_record(record)
        outcome = create_record(self.store, record.seq, data)
        if outcome is CreateResult.OK:
            self.history.apply(record, digest(data))
        return outcome

    def write_to(self, next_seq: int) -> None:
        while (seq := self.history.next_seq) < next_seq:
            create = r.Create(run_uid=UID, run_name="gpt", format=1)
            assert self.write(r.Note(text=f"{seq}") if seq else create) is CreateResult.OK

    def snapshot(self, time_s: float) -> int:
        assert write_snapshot(self.store, self.history.to_snapshot(time_s)) is CreateResult.OK
        return self.history.next_seq - 1

    @classmethod
    def opened(cls, store: LogStore) -> Writer:
        """Another one, at the tail."""
        writer = cls(store)
        writer.history = replayed(store)
        return writer


def replayed(store: LogStore) -> RunHistory:
    history, records = read_run(store)
    for record, record_digest in records:
        history.apply(record, record_digest)
    return history


def same(one: RunHistory, other: RunHistory) -> bool:
    return one.to_snapshot(0.0) == other.to_snapshot(0.0)


def kept(store: LogStore) -> tuple[list[int], list[int]]:
    """Return the numbers of the existing records and snapshots."""
    records = sorted(seq for name in store.list() if (seq := record_seq(name)) is not None)
    return records, log_store._snapshots(store)


def trim_all(store: LogStore, now_s: float) -> None:
    while trim_log(store, now_s):
        pass


def damage(store: MemoryLogStore, name: str) -> None:
    data = bytearray(store.objects[name])
    data[data.index(b"epoch")] ^= 1  # elsewhere are bytes of Parquet that mean nothing
    store.objects[name] = bytes(data)


@pytest.fixture
def trimmed() -> tuple[MemoryLogStore, Writer]:
    """Snapshots of 10, 20 and 30 and a tail to 34; records 1 to 10 are gone."""
    store = MemoryLogStore()
    writer = Writer(store)
    for time_s in (0.0, 100.0, 200.0):
        writer.write_to(writer.history.next_seq + (11 if time_s == 0.0 else 10))
        writer.snapshot(time_s)
    writer.write_to(35)
    trim_all(store, TRIM_AFTER_S)
    assert kept(store) == ([0, *range(11, 35)], [10, 20, 30])
    return store, writer


def test_an_empty_log_is_an_empty_history() -> None:
    history, records = read_run(MemoryLogStore())
    assert (history.next_seq, records) == (0, ())


def test_a_run_is_read_from_its_newest_snapshot(trimmed: tuple[MemoryLogStore, Writer]) -> None:
    store, writer = trimmed
    history, records = read_run(store)
    assert history.next_seq == 31 and [record.seq for record, _ in records] == [31, 32, 33, 34]
    assert same(replayed(store), writer.history)


def test_a_damaged_snapshot_is_passed_over(trimmed: tuple[MemoryLogStore, Writer]) -> None:
    store, writer = trimmed
    damage(store, snapshot_file(30))
    history, records = read_run(store)
    assert history.next_seq == 21 and len(records) == 14
    assert same(replayed(store), writer.history)


def test_without_a_sound_snapshot_the_records_are_read_from_the_beginning() -> None:
    store = MemoryLogStore()
    writer = Writer(store)
    writer.write_to(8)
    writer.snapshot(0.0)
    damage(store, snapshot_file(7))
    history, records = read_run(store)
    assert (history.next_seq, len(records)) == (0, 8)


def test_damage_that_leaves_a_hole_is_an_error_not_a_shorter_log(
    trimmed: tuple[MemoryLogStore, Writer],
) -> None:
    store, _ = trimmed
    for seq in (10, 20, 30):
        damage(store, snapshot_file(seq))
    with pytest.raises(FormatError, match="no record 1, but a snapshot of record 30") as caught:
        read_run(store)
    assert isinstance(caught.value.__cause__, FormatError) and caught.value.hint


def test_a_log_without_its_first_record_is_refused(trimmed: tuple[MemoryLogStore, Writer]) -> None:
    store, _ = trimmed
    store.delete(record_file(0))
    with pytest.raises(FormatError, match="no record 0"):
        read_run(store)
    assert trim_log(store, 1e9) == 0


def test_a_snapshot_of_another_run_or_number_is_not_taken() -> None:
    store = MemoryLogStore()
    writer = Writer(store)
    writer.write_to(5)
    snapshot = writer.history.to_snapshot(0.0)
    write_snapshot(store, replace(snapshot, run_uid="cd" * 16))
    store.objects[snapshot_file(3)] = store.objects[snapshot_file(4)]
    history, records = read_run(store)
    assert (history.next_seq, len(records)) == (0, 5)


def test_a_writer_whose_number_is_below_a_snapshot_has_lost(trimmed: tuple[MemoryLogStore, Writer]) -> None:
    """Stalled before its create, it finds the number free again: the record there was trimmed."""
    store, writer = trimmed
    for seq in (1, 5, 10):
        stale = replace(writer.record(r.Note(text="late")), seq=seq)
        assert create_record(store, seq, r.encode_record(stale)) is CreateResult.EXISTS
    assert same(replayed(store), writer.history)
    trim_all(store, TRIM_AFTER_S)
    assert kept(store)[0] == [0, *range(11, 35)], "and what it wrote goes again"
    assert create_record(store, 30, store.objects[record_file(30)]) is CreateResult.EXISTS, (
        "the boundary itself"
    )
    assert writer.write(r.Note(text="next")) is CreateResult.OK


def test_two_writers_around_a_snapshot() -> None:
    """One writes a snapshot and is passed by the other; each number goes to one of them."""
    store = MemoryLogStore()
    first = Writer(store)
    first.write_to(10)
    second = Writer.opened(store)
    assert first.write(r.Note(text="first")) is CreateResult.OK
    assert second.write(r.Note(text="second")) is CreateResult.EXISTS
    first.snapshot(0.0)
    assert second.write(r.Note(text="second again")) is CreateResult.EXISTS
    second = Writer.opened(store)
    assert second.write(r.Note(text="second at last")) is CreateResult.OK
    assert first.write(r.Note(text="first, late")) is CreateResult.EXISTS
    assert write_snapshot(store, first.history.to_snapshot(5.0)) is CreateResult.EXISTS
    assert same(replayed(store), second.history)


def test_a_create_is_not_confirmed_while_the_snapshots_cannot_be_listed() -> None:
    class Blind(MemoryLogStore):
        def list(self, prefix: str = "") -> tuple[str, ...]:
            raise OSError(errno.EIO, "injected")

    assert create_record(Blind(), 0, b"x") is CreateResult.UNKNOWN


def test_nothing_young_is_trimmed_and_the_last_two_snapshots_stay() -> None:
    store = MemoryLogStore()
    writer = Writer(store)
    writer.write_to(10)
    writer.snapshot(0.0)
    trim_all(store, 1e12)
    assert kept(store) == (list(range(10)), [9]), "a single snapshot stands for nothing yet"
    writer.write_to(20)
    writer.snapshot(60.0)
    trim_all(store, TRIM_AFTER_S - 1)
    assert kept(store) == (list(range(20)), [9, 19])
    trim_all(store, TRIM_AFTER_S)
    assert kept(store) == ([0, *range(10, 20)], [9, 19])
    trim_all(store, 1e12)
    assert kept(store) == ([0, *range(10, 20)], [9, 19]), "the newest is nobody's boundary"


@pytest.mark.slow  # 3 s; the test of a damaged one has thinning too
def test_many_snapshots_a_day_are_thinned_and_the_log_is_still_trimmed() -> None:
    store = MemoryLogStore()
    writer = Writer(store)
    for hour in range(60):
        writer.write_to(10 * hour + 10)
        writer.snapshot(3600.0 * hour)
        trim_all(store, 3600.0 * hour)
        records, snapshots = kept(store)
        assert len(snapshots) <= 4 and len(records) <= 500
    assert same(replayed(store), writer.history)


def test_records_stay_while_the_newest_snapshot_is_damaged() -> None:
    store = MemoryLogStore()
    writer = Writer(store)
    for seq in (10, 20, 30):
        writer.write_to(seq)
        writer.snapshot(0.0)
    damage(store, snapshot_file(29))
    trim_all(store, 1e9)
    assert kept(store) == (list(range(30)), [9, 19, 29])
    writer.write_to(40)
    writer.snapshot(1.0)
    trim_all(store, 1e9)
    assert kept(store) == ([0, *range(20, 40)], [19, 29, 39])
    assert same(replayed(store), writer.history)


def test_a_damaged_snapshot_does_not_stop_the_trimming_for_ever() -> None:
    store = MemoryLogStore()
    writer = Writer(store)
    for hour in range(0, 60, 2):
        writer.write_to(2 * hour + 2)
        seq = writer.snapshot(3600.0 * hour)
        if hour in (0, 30):
            damage(store, snapshot_file(seq))
        trim_all(store, 3600.0 * hour)
    records, snapshots = kept(store)
    assert len(records) <= 100 and len(snapshots) <= 4
    assert same(replayed(store), writer.history)


def test_a_trim_is_bounded_and_may_stop_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_store, "TRIM_BATCH", 3)
    store = MemoryLogStore()
    writer = Writer(store)
    for time_s in range(4):
        writer.write_to(writer.history.next_seq + 5)
        writer.snapshot(float(time_s))
    while (count := trim_log(store, 1e9)) > 0:
        assert count <= 3
        assert same(replayed(store), writer.history)
    assert kept(store) == ([0, *range(15, 20)], [14, 19])


class TrimsMeanwhile(MemoryLogStore):
    """A store on which another process sometimes adds snapshots and trims before a read."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.random = random
        self.writer = Writer(self)
        self.is_read = False

    def read(self, name: str) -> bytes | None:
        if self.is_read and self.random.randrange(6) == 0:
            self.is_read = False
            self.writer.write_to(self.writer.history.next_seq + self.random.randrange(1, 6))
            if self.random.randrange(2):
                self.writer.snapshot(0.0)
            trim_log(self, 1e9)
            self.is_read = True
        return super().read(name)


@pytest.mark.parametrize("seed", every_few(range(30)))
def test_a_reader_never_sees_a_hole_as_the_tail(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However far the log moves on and is trimmed while it is read, the answer is a state that it had."""
    monkeypatch.setattr(log_store, "READ_TRIES", 1000)  # here a day passes in a moment
    store = TrimsMeanwhile(Random(seed))
    store.writer.write_to(20)
    before = store.writer.history.next_seq
    store.is_read = True
    history = replayed(store)
    store.is_read = False
    assert before <= history.next_seq <= store.writer.history.next_seq
    assert int(history.writer == "w") and history.run_uid == UID
    after = Writer.opened(store)
    assert same(after.history, store.writer.history)


def test_a_reader_that_meets_a_trimmed_record_starts_over() -> None:
    class Slow(MemoryLogStore):
        trim_at = ""

        def read(self, name: str) -> bytes | None:
            if name == self.trim_at:
                self.trim_at = ""
                for _ in range(2):
                    writer.write_to(writer.history.next_seq + 10)
                    writer.snapshot(0.0)
                trim_all(self, 1e9)
            return super().read(name)

    store = Slow()
    writer = Writer(store)
    writer.write_to(10)
    store.trim_at = record_file(5)
    history, _ = read_run(store)
    assert history.next_seq == 30


def test_covered_records_that_are_still_there_are_proven(
    trimmed: tuple[MemoryLogStore, Writer], caplog: pytest.LogCaptureFixture
) -> None:
    store, writer = trimmed
    history, _ = read_run(store)
    late = replace(writer.record(r.Note(text="late")), seq=10)
    create_record(store, 10, r.encode_record(late))
    covered = read_covered(store, history)
    assert [record.seq for record, _ in covered] == [0, *range(11, 31)]
    assert covered == (read_log(store)[0], *read_log(store, start=11)[:20])
    assert record_file(10) in caplog.text
    assert read_covered(store, RunHistory()) == ()


def test_a_covered_record_that_is_damaged_is_named(
    trimmed: tuple[MemoryLogStore, Writer], caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = trimmed
    history, _ = read_run(store)
    assert [record.seq for record, _ in read_covered(store, history)] == [0, *range(11, 31)]
    assert not caplog.text, "what was trimmed is no damage"
    store.objects[record_file(20)] = store.objects[record_file(20)][:-3]
    assert [record.seq for record, _ in read_covered(store, history)] == [0, *range(21, 31)]
    assert record_file(20) in caplog.text
    del store.objects[record_file(25)]
    assert [record.seq for record, _ in read_covered(store, history)] == [0, *range(26, 31)]
    assert f"{record_file(25)}: it is missing" in caplog.text
