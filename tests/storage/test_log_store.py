"""What every log store must do, and the probe that finds file systems that cannot."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from ray_ckpt.errors import FormatError, StoragePathError
from ray_ckpt.format import records as r
from ray_ckpt.format.digest import digest
from ray_ckpt.format.names import record_file
from ray_ckpt.storage.log_store import LogStore, MemoryLogStore, Outcome, PosixLogStore, probe, read_log
from tests.sample_run import RunLog, write_run

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
        assert store.create("a", b"1") is Outcome.OK
        assert store.create("b", b"") is Outcome.OK
        assert (store.read("a"), store.read("b"), store.read("c")) == (b"1", b"", None)
        assert sorted(store.list()) == ["a", "b"]

    def test_create_can_be_repeated_and_not_overwritten(self, store: LogStore) -> None:
        assert store.create("a", b"1") is Outcome.OK
        assert store.create("a", b"1") is Outcome.OK
        assert store.create("a", b"2") is Outcome.EXISTS
        assert store.create("a", b"12") is Outcome.EXISTS
        assert store.read("a") == b"1"

    def test_large_objects(self, store: LogStore) -> None:
        data = bytes(range(256)) * 4096
        assert store.create("a", data) is Outcome.OK
        assert store.read("a") == data

    def test_one_of_many_writers_wins(self, store: LogStore) -> None:
        for round_ in range(5):
            name, barrier = f"name-{round_}", Barrier(NUM_WRITERS)

            def write(
                writer: int, name: str = name, barrier: Barrier = barrier
            ) -> tuple[Outcome, bytes | None]:
                barrier.wait()
                return store.create(name, b"writer %d" % writer), store.read(name)

            with ThreadPoolExecutor(NUM_WRITERS) as pool:
                answers = list(pool.map(write, range(NUM_WRITERS)))
            outcomes = [outcome for outcome, _ in answers]
            assert sorted(o.value for o in outcomes) == ["exists"] * (NUM_WRITERS - 1) + ["ok"]
            winner = b"writer %d" % outcomes.index(Outcome.OK)
            assert {seen for _, seen in answers} == {winner}, "read after write, for winner and losers"

    def test_the_same_bytes_from_many_writers_are_ok_for_all(self, store: LogStore) -> None:
        with ThreadPoolExecutor(NUM_WRITERS) as pool:
            outcomes = set(pool.map(lambda _: store.create("a", b"same"), range(NUM_WRITERS)))
        assert outcomes == {Outcome.OK}


class TestMemory(LogStoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> LogStore:
        return MemoryLogStore()


class TestPosix(LogStoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> LogStore:
        return PosixLogStore(tmp_path / "run" / "log")

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
        """NFS: the first LINK is carried out, its answer lost, the retransmission says EEXIST."""
        link = os.link

        def twice(source: Path, target: Path) -> None:
            link(source, target)
            link(source, target)

        monkeypatch.setattr(os, "link", twice)
        store = PosixLogStore(tmp_path)
        assert store.create("a", b"1") is Outcome.OK
        assert store.create("a", b"2") is Outcome.EXISTS

    @pytest.mark.parametrize("call", ["write", "fsync", "link"])
    def test_io_errors_are_unknown_and_leave_no_temporary(
        self, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object, **__: object) -> None:
            raise OSError(errno.EIO, "injected")

        store = PosixLogStore(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            assert store.create("a", b"1") is Outcome.UNKNOWN
        assert names_in(tmp_path) == []
        assert store.create("a", b"1") is Outcome.OK

    def test_a_directory_fsync_that_fails_is_not_acknowledged(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from ray_ckpt.storage import files

        def fail(_: Path) -> None:
            raise OSError(errno.EIO, "injected")

        store = PosixLogStore(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(files, "fsync_dir", fail)
            assert store.create("a", b"1") is Outcome.UNKNOWN
        assert store.create("a", b"1") is Outcome.OK

    def test_a_store_below_a_file_is_empty_and_takes_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"")
        store = PosixLogStore(tmp_path / "file" / "log")
        assert store.create("a", b"1") is Outcome.UNKNOWN
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
    with pytest.raises(StoragePathError):
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
