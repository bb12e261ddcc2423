"""Requirements on every store, over real servers: suites for files, for the log and for the remote tier.

A store that differs is named with its reason in `DIFFERENCES`, and is expected to differ.
"""

from __future__ import annotations

import errno
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from typing_extensions import Buffer

from ray_ckpt.errors import ConfigError, CorruptionError, StorageNotShared, StoragePathError
from ray_ckpt.format import records, zstd
from ray_ckpt.format.digest import digest
from ray_ckpt.format.names import fragment_file, record_file, shard_file
from ray_ckpt.location import Location
from ray_ckpt.storage.log_store import CreateResult, LogStore, create_record, read_log
from ray_ckpt.storage.remote import gcs, s3
from ray_ckpt.storage.remote.file_store import FileStore, Upload, read_whole
from ray_ckpt.storage.remote.object_store import PART_BYTES
from ray_ckpt.storage.remote.tier import RemoteTier, open_objects
from ray_ckpt.types import FileEntry
from tests.servers.patience import lose_patience
from tests.servers.providers import Tokens
from tests.servers.proxy import proxy
from tests.servers.stores import BUCKET, GcsStranger, Store, bucket_url, make_bucket
from tests.servers.strict_store import Fault, Match, Status, StrictStore
from tests.storage.test_log_store import NUM_WRITERS, LogStoreTests

pytestmark = pytest.mark.usefixtures("credentials")

SLOW = pytest.mark.slow
# Less strict servers; libraries without our requests (quick in test_lost_responses.py, test_canary.py).
SLOW_STORES = ("ministack", "moto", "s3fs", "gcsfs", "fsspec-s3", "fsspec-gcs")
STORES = (
    *("posix", "strict-s3", "strict-gcs"),
    *(pytest.param(store, marks=SLOW) for store in SLOW_STORES),
)
PAGED_STORES = (pytest.param("posix", marks=SLOW), *STORES[1:])  # a folder's listing has no pages
DIFFERENCES = {
    ("ministack", "test_s3_refuses_what_was_not_signed"): "ministack verifies no signatures",
    ("moto", "test_s3_refuses_what_was_not_signed"): "moto verifies no signatures",
    ("moto", "test_s3_refuses_what_has_another_checksum"): "moto verifies no checksums",
    ("moto", "test_uploads_are_dated"): "moto dates all uploads 2010",
    ("gcsfs", "test_a_file_is_copied_within_the_store"): "fsspec does not say which file systems copy",
    ("s3fs", "test_a_file_is_copied_within_the_store"): "fsspec does not say which file systems copy",
    (
        "posix",
        "test_uploads_of_others_are_ended_if_they_are_of_our_files",
    ): "a temporary file has a random name",
} | {
    (store, test): "fsspec does not list unfinished uploads"
    for store in ("s3fs", "gcsfs", "fsspec-gcs")
    for test in (
        "test_uploads_of_others_are_listed_by_folder_and_ended",
        "test_uploads_of_others_are_ended_if_they_are_of_our_files",
        "test_uploads_are_dated",
    )
}
MIB = 1 << 20
SIZES = (
    *(0, 16 * MIB, 16 * MIB + 1),
    *(pytest.param(nbytes, marks=SLOW) for nbytes in (1, 5 * MIB - 1, 40 * MIB)),
)
ODD_BYTES = 1_000_003  # of a block that fits no part
CLOCK_S = 60.0  # by which a store's clock may differ from ours: they are on one machine


@pytest.fixture(params=STORES)
def any_store(request: pytest.FixtureRequest, open_store: Callable[[str], Store]) -> Store:
    """One store after the other, opened once; a test has a folder of its own in it."""
    expect_difference(request, request.param)
    return open_store(request.param)


def expect_difference(request: pytest.FixtureRequest, store: str) -> None:
    reason = DIFFERENCES.get((store, request.node.originalname))
    if reason is not None:
        request.node.add_marker(pytest.mark.xfail(strict=True, reason=reason))


@pytest.fixture
def store(any_store: Store) -> Store:
    return any_store


@pytest.fixture
def folder() -> str:
    return f"f{uuid.uuid4().hex[:8]}"


def random_bytes(nbytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng([nbytes, seed]).bytes(nbytes)


def in_blocks(data: bytes, nbytes: int = ODD_BYTES) -> Iterator[memoryview]:
    """Yield the blocks in memory that is used again for each block, and overwritten at once."""
    buffer = bytearray(nbytes)
    for start in range(0, len(data), nbytes):
        block = data[start : start + nbytes]
        buffer[: len(block)] = block
        yield memoryview(buffer)[: len(block)]
        buffer[:] = b"\xee" * nbytes


def fails_after(data: bytes, error: BaseException) -> Iterator[Buffer]:
    yield from in_blocks(data)
    raise error


def read(files: FileStore, name: str, ranges: Sequence[tuple[int, int]]) -> bytes:
    return b"".join(map(bytes, files.read(name, ranges)))


def put(files: FileStore, name: str, data: bytes) -> None:
    assert files.put(name, in_blocks(data), max_bytes=len(data)) == len(data)


def uploads_in(files: FileStore, folder: str) -> list[Upload]:
    return list(files.uploads(folder))


class TestFiles:
    """`FileStore`."""

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_what_is_put_is_read_back(self, store: Store, folder: str, nbytes: int) -> None:
        data, name = random_bytes(nbytes), f"{folder}/a"
        put(store.files, name, data)
        assert store.files.size(name) == nbytes
        assert read(store.files, name, [(0, nbytes)]) == data
        assert abs(store.files.modified_s(name) - time.time()) < CLOCK_S
        assert store.names(folder) == [name] and uploads_in(store.files, folder) == []

    @pytest.mark.parametrize("nbytes", [0, 1000, 16 * MIB + 1])
    def test_a_file_is_copied_within_the_store(self, store: Store, folder: str, nbytes: int) -> None:
        data = random_bytes(nbytes)
        put(store.files, f"{folder}/a/x", data)
        for _ in range(2):  # a copy may be repeated
            assert store.files.copy(f"{folder}/a/x", f"{folder}/b/x") == nbytes
        store.files.delete([f"{folder}/a/x"])
        assert read(store.files, f"{folder}/b/x", [(0, nbytes)]) == data
        assert store.names(folder) == [f"{folder}/b/x"] and uploads_in(store.files, folder) == []

    @SLOW
    @pytest.mark.parametrize("name", ["ministack", "moto"])
    def test_an_object_too_large_for_one_copy_is_copied_in_parts(
        self, open_store: Callable[[str], Store], folder: str, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, data = open_store(name), random_bytes(16 * MIB + 1)
        put(store.files, f"{folder}/a", data)
        monkeypatch.setattr(s3, "MAX_COPY_BYTES", 16 * MIB)
        monkeypatch.setattr(s3, "COPY_PART_BYTES", 8 * MIB)
        assert store.files.copy(f"{folder}/a", f"{folder}/b") == len(data)
        assert read(store.files, f"{folder}/b", [(0, len(data))]) == data
        assert uploads_in(store.files, folder) == []

    def test_parts_that_a_server_does_not_copy_leave_no_upload(
        self, open_store: Callable[[str], Store], folder: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = open_store("strict-s3")  # it knows no UploadPartCopy
        put(store.files, f"{folder}/a", random_bytes(1000))
        monkeypatch.setattr(s3, "MAX_COPY_BYTES", 999)
        with pytest.raises(OSError):
            store.files.copy(f"{folder}/a", f"{folder}/b")
        assert uploads_in(store.files, folder) == [] and store.files.size(f"{folder}/b") is None

    def test_a_part_that_is_answered_with_no_result_leaves_no_upload(
        self, open_store: Callable[[str], Store], folder: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files: Any = open_store("strict-s3").files
        put(files, f"{folder}/a", random_bytes(1000))
        monkeypatch.setattr(s3, "MAX_COPY_BYTES", 999)
        monkeypatch.setattr(files._bucket._client, "upload_part_copy", lambda **_: {})
        with pytest.raises(OSError, match="CopyPartResult"):
            files.copy(f"{folder}/a", f"{folder}/b")
        assert uploads_in(files, folder) == [] and files.size(f"{folder}/b") is None

    def test_a_copy_with_other_bytes_than_its_source_fails(
        self, open_store: Callable[[str], Store], folder: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files: Any = open_store("fsspec-gcs").files
        put(files, f"{folder}/a", random_bytes(1000))
        assert files.copy(f"{folder}/a", f"{folder}/b") == 1000
        write, other = files._fs.pipe_file, random_bytes(1000, seed=1)
        monkeypatch.setattr(files._fs, "cp_file", lambda source, target: write(target, other))
        with pytest.raises(OSError, match="or other ones"):
            files.copy(f"{folder}/a", f"{folder}/b")

    def test_a_missing_file_is_not_copied(self, store: Store, folder: str) -> None:
        with pytest.raises(OSError):
            store.files.copy(f"{folder}/a", f"{folder}/b")
        assert store.files.size(f"{folder}/b") is None

    @pytest.mark.parametrize("nbytes", [0, 3])
    def test_fewer_bytes_may_come_than_were_announced(self, store: Store, folder: str, nbytes: int) -> None:
        data, name = random_bytes(nbytes), f"{folder}/a"
        assert store.files.put(name, in_blocks(data), max_bytes=3 * PART_BYTES) == nbytes
        assert read(store.files, name, [(0, nbytes)]) == data
        assert uploads_in(store.files, folder) == []

    def test_a_put_replaces_what_is_there(self, store: Store, folder: str) -> None:
        name = f"{folder}/a"
        for size in (100, PART_BYTES + 5, 0, 100):
            data = random_bytes(size, seed=size)
            put(store.files, name, data)
            assert (store.files.size(name), read(store.files, name, [(0, size)])) == (size, data)
        assert [found.name for found in store.files.list(folder)] == [name]

    def test_two_writers_of_the_same_bytes_at_once(self, store: Store, folder: str) -> None:
        data, name = random_bytes(PART_BYTES + 7), f"{folder}/a"
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda _: put(store.files, name, data), range(2)))
        assert read(store.files, name, [(0, len(data))]) == data
        assert uploads_in(store.files, folder) == []

    @pytest.mark.parametrize("sent", [0, 10, PART_BYTES + 5 * MIB])
    @pytest.mark.parametrize(
        "error", [CorruptionError("the disk lies"), OSError(errno.EIO, "the disk fails")]
    )
    def test_a_source_that_fails_leaves_neither_file_nor_upload(
        self, store: Store, folder: str, sent: int, error: Exception
    ) -> None:
        max_bytes = 40 * MIB if sent > PART_BYTES else 100
        with pytest.raises(type(error)) as caught:
            store.files.put(f"{folder}/a", fails_after(bytes(sent), error), max_bytes=max_bytes)
        assert str(caught.value) == str(error)
        assert store.files.size(f"{folder}/a") is None
        assert store.names(folder) == [] and store.uploads(folder) == []

    @pytest.mark.parametrize("sent", [10, PART_BYTES + 5 * MIB])
    def test_a_source_that_fails_leaves_the_file_that_was_there(
        self, store: Store, folder: str, sent: int
    ) -> None:
        name, data = f"{folder}/a", random_bytes(1000)
        put(store.files, name, data)
        with pytest.raises(KeyboardInterrupt):
            store.files.put(
                name,
                fails_after(bytes(sent), KeyboardInterrupt()),
                max_bytes=40 * MIB if sent > PART_BYTES else 100,
            )
        assert read_whole(store.files, name, max_bytes=len(data)) == data

    def test_ranges_in_any_order(self, store: Store, folder: str) -> None:
        data, name = random_bytes(20 * MIB), f"{folder}/a"
        put(store.files, name, data)
        end = len(data)
        for ranges in (
            [],
            [(0, 0)],
            [(5, 0), (0, 1), (end - 1, 1)],
            [(8 * MIB - 3, 7)],
            [(17 * MIB, 100), (3, 9 * MIB), (17 * MIB, 100)],
            [(at, 10) for at in range(0, end, end // 50)],
            [(0, end)],
        ):
            want = b"".join(data[offset : offset + nbytes] for offset, nbytes in ranges)
            assert read(store.files, name, ranges) == want

    @pytest.mark.parametrize("beyond", [(90, 11), (100, 1), (5000, 10)])
    def test_a_range_beyond_the_end_is_an_eof_error(
        self, store: Store, folder: str, beyond: tuple[int, int]
    ) -> None:
        put(store.files, f"{folder}/a", bytes(100))
        with pytest.raises(EOFError):
            read(store.files, f"{folder}/a", [(0, 100), beyond])

    def test_a_reader_may_leave_early(self, store: Store, folder: str) -> None:
        put(store.files, f"{folder}/a", bytes(30 * MIB))
        blocks = store.files.read(f"{folder}/a", [(0, 30 * MIB)])
        assert len(next(blocks)) > 0
        blocks.close()

    def test_what_is_not_there(self, store: Store, folder: str) -> None:
        files, name = store.files, f"{folder}/a"
        assert files.size(name) is None
        assert list(files.list(folder)) == [] and uploads_in(files, folder) == []
        assert files.children(folder).folders == () and files.children(folder).files == ()
        files.delete([name, name])
        with pytest.raises(FileNotFoundError):
            read(files, name, [(0, 1)])
        with pytest.raises(FileNotFoundError):
            files.modified_s(name)
        with pytest.raises(FileNotFoundError):
            read_whole(files, name, max_bytes=1)

    def test_deleted_files_are_gone_and_others_stay(self, store: Store, folder: str) -> None:
        for name in ("a", "ab", "b"):
            put(store.files, f"{folder}/{name}", b"1")
        store.files.delete([f"{folder}/a", f"{folder}/absent", f"{folder}/b"])
        assert store.names(folder) == [f"{folder}/ab"]
        assert [found.name for found in store.files.list(folder)] == [f"{folder}/ab"]

    def test_a_folder_is_no_prefix(self, store: Store, folder: str) -> None:
        names = ["a/x", "a/b/c", "a/b/d/e", "ab/x", "a.b/x"]
        for number, name in enumerate(names):
            put(store.files, f"{folder}/{name}", bytes(number))
        found = {f.name.removeprefix(f"{folder}/"): f.size_bytes for f in store.files.list(f"{folder}/a")}
        assert found == {"a/x": 0, "a/b/c": 1, "a/b/d/e": 2}
        children = store.files.children(f"{folder}/a")
        assert children.folders == (f"{folder}/a/b",)
        assert [f.name for f in children.files] == [f"{folder}/a/x"]
        assert sorted(store.files.children(folder).folders) == [f"{folder}/{n}" for n in ("a", "a.b", "ab")]
        assert all(abs(f.modified_s - time.time()) < CLOCK_S for f in store.files.list(folder))

    @pytest.mark.parametrize("any_store", PAGED_STORES, indirect=True)
    def test_more_files_than_a_page_of_a_listing_holds(self, store: Store, folder: str) -> None:
        names = [f"{folder}/{number // 600}/{number:04d}" for number in range(1001)]
        store.fill(names)
        assert sorted(found.name for found in store.files.list(folder)) == names
        assert len(store.files.children(f"{folder}/0").files) == 600
        assert sorted(store.files.children(folder).folders) == [f"{folder}/0", f"{folder}/1"]

    def test_any_key_that_a_storage_path_may_have(self, store: Store, folder: str) -> None:
        odd = store.below(f"{folder} a+b=c.d/é日&:@'()~!*[]{{}}^|`\"<>;,$")
        put(odd.files, "a/x", b"1")
        assert odd.names("a") == ["a/x"] == [found.name for found in odd.files.list("a")]
        assert set(odd.files.children().folders) - {"run"} == {"a"}  # a POSIX tier's folder is there
        assert read_whole(odd.files, "a/x", max_bytes=1) == b"1"
        log = odd.new_log()
        assert log.create("1", b"1") is CreateResult.OK and log.list() == ("1",)
        odd.stranger.begin(f"{odd.key}a/y")
        for upload in odd.files.uploads("a"):
            odd.files.abort(upload)
        odd.files.delete(["a/x"])
        assert odd.names("a") == []

    def test_uploads_of_others_are_listed_by_folder_and_ended(self, store: Store, folder: str) -> None:
        files = store.files
        put(files, f"{folder}/a/x", b"stays")
        for name in ("a/x", "a/y", "ab/x"):
            store.stranger.begin(f"{store.key}{folder}/{name}")
        [first, second] = sorted(uploads_in(files, f"{folder}/a"), key=lambda upload: upload.name)
        assert [upload.name for upload in (first, second)] == store.uploads(f"{folder}/a")
        for _ in range(2):
            files.abort(first)
        assert [upload.name for upload in files.uploads(f"{folder}/a")] == [second.name]
        assert len(uploads_in(files, folder)) == len(store.uploads(folder)) == 2
        assert store.names(folder) == [f"{folder}/a/x"] and files.size(f"{folder}/a/x") == 5
        for upload in uploads_in(files, folder):
            files.abort(upload)
        assert store.uploads(folder) == []

    def test_uploads_are_dated(self, store: Store, folder: str) -> None:
        store.stranger.begin(f"{store.key}{folder}/a")
        [upload] = store.files.uploads(folder)
        assert abs(upload.started_s - time.time()) < CLOCK_S


class TestLog(LogStoreTests):
    """`LogStore`."""

    @pytest.fixture
    def store(self, any_store: Store) -> LogStore:
        return any_store.new_log()

    @pytest.mark.parametrize("numbers", [5, pytest.param(100, marks=SLOW)])
    def test_writers_who_race_make_one_chain(self, store: LogStore, numbers: int) -> None:
        barrier = threading.Barrier(NUM_WRITERS)

        def write(writer: int) -> list[int]:
            barrier.wait()
            won, seq, prev = [], 0, ""
            while seq < numbers:
                record = records.LogRecord(
                    seq=seq,
                    epoch=1,
                    writer=f"w{writer}",
                    prev=prev,
                    time_s=0.0,
                    op=records.Note(text="x"),
                )
                data: bytes | None = records.encode_record(record)
                assert data is not None
                outcome = create_record(store, seq, data)
                if outcome is CreateResult.OK:
                    won.append(seq)
                else:
                    assert outcome is CreateResult.EXISTS
                    data = store.read(record_file(seq))
                    assert data is not None
                seq, prev = seq + 1, digest(data)
            return won

        with ThreadPoolExecutor(NUM_WRITERS) as pool:
            won = list(pool.map(write, range(NUM_WRITERS)))
        assert sorted(seq for seqs in won for seq in seqs) == list(range(numbers))
        log = read_log(store)
        assert all(record.seq in won[int(record.writer[1:])] for record, _ in log)
        assert all(record.prev == before for (_, before), (record, _) in pairwise(log))


@pytest.fixture
def directory() -> str:
    """Return the directory of a new checkpoint."""
    return f"{10:012d}-{uuid.uuid4().hex[:16]}"


SHARD, MANIFEST = shard_file(0, 1), fragment_file(0, 1)


def staged(tmp_path: Path, data: bytes) -> tuple[FileEntry, Path]:
    """Return a shard on this node's disk."""
    path = tmp_path / "staged"
    path.write_bytes(data)
    return FileEntry(name=SHARD, size_bytes=len(data), digest=digest(data)), path


class TestTier:
    """`RemoteTier`."""

    @pytest.mark.parametrize("level", [None, 1])
    def test_a_shard_goes_there_and_comes_back(
        self, store: Store, directory: str, tmp_path: Path, level: int | None
    ) -> None:
        data = np.random.default_rng(1).integers(0, 8, 18 * MIB + 17, np.uint8).tobytes()
        entry, path = staged(tmp_path, data)
        for _ in range(2):
            stored = store.tier.put_file(directory, entry, path, level=level)
        assert (stored < len(data) // 2) == (level is not None)
        for tier in (store.tier, RemoteTier(store.tier.root, store.options)):
            assert tier.size(directory, SHARD) == len(data)
            assert b"".join(map(bytes, tier.blocks(directory, SHARD))) == data
            ranges = [(0, 10), (zstd.FRAME_BYTES - 5, 10), (len(data) - 3, 3)]
            got = b"".join(map(bytes, tier.read(directory, SHARD, ranges)))
            assert got == b"".join(data[offset : offset + nbytes] for offset, nbytes in ranges)
        assert {name: f.size_bytes for name, f in store.tier.files_of(directory).items()} == {SHARD: stored}

    @pytest.mark.parametrize("level", [None, 1])
    def test_a_disk_that_lies_brings_nothing_there(
        self, store: Store, directory: str, tmp_path: Path, level: int | None
    ) -> None:
        entry, path = staged(tmp_path, bytes(17 * MIB))
        path.write_bytes(bytes(17 * MIB - 1) + b"x")
        with pytest.raises(CorruptionError):
            store.tier.put_file(directory, entry, path, level=level)
        assert store.tier.files_of(directory) == {} and directory not in store.tier.directories()
        assert store.uploads(f"run/ray_ckpt/checkpoints/{directory}") == []

    def test_a_delete_takes_all_that_is_ours_and_nothing_else(
        self, store: Store, directory: str, tmp_path: Path
    ) -> None:
        for name in (SHARD, MANIFEST, "checkpoint.json"):
            store.tier.put(directory, name, b"1")
        assert abs(store.tier.directories()[directory] - store.tier.now_s()) < CLOCK_S
        below = f"run/ray_ckpt/checkpoints/{directory}"
        store.files.put(f"{below}/notes.txt", [b"mine"], max_bytes=4)
        assert set(store.tier.files_of(directory)) == {SHARD, MANIFEST, "checkpoint.json"}
        for _ in range(2):
            store.tier.delete(directory)
        assert store.names(below) == [f"{below}/notes.txt"]
        assert directory not in store.tier.directories() and store.tier.size(directory, SHARD) is None

    def test_uploads_of_others_are_ended_if_they_are_of_our_files(self, store: Store, directory: str) -> None:
        below = f"run/ray_ckpt/checkpoints/{directory}"
        for name in (SHARD, SHARD + ".zst", "notes.txt"):
            store.stranger.begin(f"{store.key}{below}/{name}")
        [first, second] = store.tier.uploads(directory)
        file = first.name.rpartition("/")[2]
        store.tier.abort(directory, file, first.id)
        assert [upload.id for upload in store.tier.uploads(directory)] == [second.id]
        store.tier.delete(directory)
        assert list(store.tier.uploads(directory)) == []
        assert store.uploads(below) == [f"{below}/notes.txt"]

    def test_nodes_find_what_the_probe_has_left(self, store: Store) -> None:
        tier = RemoteTier(store.location / f"run-{uuid.uuid4().hex}" / "ray_ckpt", store.options)
        tier.probe_log()
        tier.leave_nonce("nonce-1")
        tier.check_shared("nonce-1", node="n" * 56)
        with pytest.raises(StorageNotShared):
            tier.check_shared("nonce-2", node="n" * 56)
        assert [found.name for found in tier.files.list()] == ["shared.probe"]


BUCKETS = ("s3", "gs")
FSSPEC = {"backend": "fsspec"}


@pytest.fixture(params=BUCKETS)
def scheme(request: pytest.FixtureRequest) -> str:
    scheme: str = request.param
    return scheme


@pytest.fixture(params=["obstore", pytest.param("fsspec", marks=SLOW)])
def options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Options of each backend. gcsfs has no options for shorter time-outs."""
    if request.param == "fsspec":
        lose_patience(monkeypatch, tries=2)
    return {"backend": request.param}


def lists_uploads(scheme: str, options: Mapping[str, str]) -> bool:
    return (scheme, options.get("backend")) != ("gs", "fsspec")


def calls_of(files: FileStore) -> dict[str, Callable[[], object]]:
    """Return each call of a store once, by name."""
    return {
        "put": lambda: files.put("a", [b"1"], max_bytes=1),
        "put in parts": lambda: files.put("a", [bytes(17 * MIB)], max_bytes=17 * MIB),
        "read": lambda: list(files.read("a", [(0, 1)])),
        "size": lambda: files.size("a"),
        "modified_s": lambda: files.modified_s("a"),
        "list": lambda: list(files.list("a")),
        "children": lambda: files.children("a"),
        "delete": lambda: files.delete(["a"]),
        "uploads": lambda: list(files.uploads()),
        "abort": lambda: files.abort(Upload(name="a", id="1", started_s=0.0)),
    }


def endpoint_of(store: Store) -> str:
    assert store.location.endpoint is not None
    return store.location.endpoint


def error_of(call: Callable[[], object], kind: type[OSError]) -> str:
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert len(text.splitlines()) == 1 and len(text) < 600
    return text


def open_at(url: str, options: Mapping[str, str] | None = None) -> FileStore:
    return open_objects(Location.parse(url), options or {})[0]


class TestErrors:
    """A failing store raises an OSError of the right kind, in one line, in bounded time."""

    def test_a_bucket_that_is_not_there(
        self, scheme: str, options: dict[str, str], strict: StrictStore
    ) -> None:
        calls = calls_of(open_at(bucket_url(scheme, strict.endpoint, "runs", "absent"), options))
        for name in ("size", "modified_s", "abort"):  # the answer to a HEAD does not show what is absent
            del calls[name]
        if not lists_uploads(scheme, options):
            del calls["uploads"]
        for name, call in calls.items():
            text = error_of(call, OSError)
            assert "404" in text or "NoSuchBucket" in text, name
            with pytest.raises(OSError) as caught:
                call()
            assert not isinstance(caught.value, FileNotFoundError), name

    def test_wrong_credentials(
        self,
        scheme: str,
        options: dict[str, str],
        strict: StrictStore,
        tokens: Tokens,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
        monkeypatch.setattr(tokens, "token", "not-the-token")
        for name, call in calls_of(open_at(bucket_url(scheme, strict.endpoint, "runs"), options)).items():
            if name in ("uploads", "abort") and not lists_uploads(scheme, options):
                continue
            text = error_of(call, OSError if name in ("uploads", "abort") else PermissionError)
            assert "not-the" not in text

    def test_a_server_that_is_gone(
        self, scheme: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lose_patience(monkeypatch, tries=1)
        files = open_at(bucket_url(scheme, "http://127.0.0.1:9", "runs"), options)
        for name, call in calls_of(files).items():
            if name in ("uploads", "abort") and not lists_uploads(scheme, options):
                continue
            begun = time.monotonic()
            error_of(call, OSError)
            assert time.monotonic() - begun < 5, name

    def test_a_request_to_an_overloaded_server_is_repeated(
        self,
        scheme: str,
        options: dict[str, str],
        strict: StrictStore,
        folder: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        lose_patience(monkeypatch, tries=2)
        files = open_at(bucket_url(scheme, strict.endpoint, folder), options)
        put(files, "a", b"1")
        for name, call in calls_of(files).items():
            is_sent = name != "uploads" or lists_uploads(scheme, options)
            if name not in ("delete", "abort") and is_sent:  # which leave nothing for the others
                number = strict.add_fault(Fault(action=Status(503), times=1))
                call()
                assert strict.faults_fired()[number] == 1, name

    def test_a_long_listing_of_uploads_has_pages(
        self, strict: StrictStore, folder: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gcs, "UPLOADS_PER_PAGE", 2)
        stranger = GcsStranger(strict.endpoint)
        for name in ("a", "a", "b", "c", "c"):
            stranger.begin(f"{folder}/{name}")
        files = open_at(bucket_url("gs", strict.endpoint, folder))
        found = list(files.uploads())
        assert [upload.name for upload in found] == ["a", "a", "b", "c", "c"]
        assert len({upload.id for upload in found}) == 5


class TestChecksums:
    """A bit that flips on the way up does not get there."""

    @pytest.fixture(params=["strict-s3", *(pytest.param(s, marks=SLOW) for s in ("ministack", "moto"))])
    def server(self, request: pytest.FixtureRequest, open_store: Callable[[str], Store]) -> str:
        expect_difference(request, request.param)
        return endpoint_of(open_store(request.param))

    def test_s3_refuses_what_was_not_signed(self, server: str, folder: str) -> None:
        self._is_noticed("s3", server, folder, {"checksum": "signature"}, 34 * MIB)

    def test_s3_refuses_what_has_another_checksum(self, server: str, folder: str) -> None:
        self._is_noticed("s3", server, folder, {"checksum": "sha256"}, 34 * MIB)

    @pytest.mark.parametrize("checksum", ["signature", "sha256", "crc64nvme"])
    def test_small_objects_are_checked_too(self, strict: StrictStore, folder: str, checksum: str) -> None:
        self._is_noticed("s3", strict.endpoint, folder, {"checksum": checksum}, MIB)

    @pytest.mark.parametrize("nbytes", [MIB, 34 * MIB])
    def test_on_gcs_the_checksum_of_the_object_is_compared(
        self, strict: StrictStore, folder: str, nbytes: int
    ) -> None:
        self._is_noticed("gs", strict.endpoint, folder, {}, nbytes)

    @pytest.mark.parametrize("nbytes", [MIB, 34 * MIB])
    def test_the_backend_fsspec_sends_it_again_or_refuses_it(
        self, scheme: str, nbytes: int, strict: StrictStore, folder: str
    ) -> None:
        data = random_bytes(nbytes)
        with proxy(strict.endpoint) as between:
            files = open_at(bucket_url(scheme, between.endpoint, folder), FSSPEC)
            between.flip_next(at=MIB // 2)
            if scheme == "gs":
                with pytest.raises(OSError, match="other ones"):
                    put(files, "a", data)
            put(files, "a", data)
            assert between.has_flipped() and list(files.uploads()) == []
            assert read(files, "a", [(0, nbytes)]) == data

    def test_the_backend_fsspec_knows_one_checksum(self, strict: StrictStore) -> None:
        with pytest.raises(ConfigError, match="cannot check parts by 'sha256'"):
            open_at(bucket_url("s3", strict.endpoint, "runs"), FSSPEC | {"checksum": "sha256"})

    @staticmethod
    def _is_noticed(scheme: str, server: str, folder: str, options: dict[str, str], nbytes: int) -> None:
        data = random_bytes(nbytes)
        with proxy(server) as between:
            files = open_at(bucket_url(scheme, between.endpoint, folder), options)
            between.flip_next(at=MIB // 2)
            with pytest.raises(OSError):
                put(files, "a", data)
            assert between.has_flipped()
            assert list(files.uploads()) == [] and (scheme == "gs" or files.size("a") is None)
            put(files, "a", data)
            assert read(files, "a", [(0, nbytes)]) == data


class TestProbe:
    """A store that cannot hold a commit log is refused when a run opens, with a helpful error."""

    @pytest.fixture(autouse=True)
    def hurry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lose_patience(monkeypatch, tries=2)

    def test_rclone_ignores_conditions(self, rclone: str) -> None:
        make_bucket(rclone)
        self._refuses(bucket_url("s3", rclone, "runs"), "second create of the same name ok", "If-None-Match")

    @pytest.mark.parametrize(
        ("conditions", "message"),
        [("ignored", "second create of the same name ok"), ("501", "create gave unsupported")],
    )
    def test_conditions_that_are_not_kept(
        self, scheme: str, options: dict[str, str], conditions: Literal["ignored", "501"], message: str
    ) -> None:
        with StrictStore.process(buckets=(BUCKET,), conditions=conditions) as store:
            self._refuses(
                bucket_url(scheme, store.endpoint, "runs"), message, "ifGenerationMatch", options=options
            )

    def test_a_bucket_that_is_not_there(
        self, scheme: str, options: dict[str, str], strict: StrictStore
    ) -> None:
        url = bucket_url(scheme, strict.endpoint, "runs", "absent")
        self._refuses(url, "NoSuchBucket", "absent", options=options)

    def test_credentials_that_may_only_read(
        self, scheme: str, options: dict[str, str], strict: StrictStore
    ) -> None:
        method = "PUT" if lists_uploads(scheme, options) else "POST"  # gcsfs creates by a POST
        strict.add_fault(Fault(match=Match(method=method), action=Status(403, "AccessDenied")))
        url = bucket_url(scheme, strict.endpoint, "runs")
        self._refuses(url, "create gave unknown", "writable", options=options)

    def test_a_file_system_that_looks_and_then_writes(self, tmp_path: Path) -> None:
        """fsspec's own create is no create: between the look and the write there may be another's."""
        self._refuses(f"local://{tmp_path}", "create gave unsupported", "choose another storage_path")

    @staticmethod
    def _refuses(storage_path: str, *message: str, options: Mapping[str, str] | None = None) -> None:
        root = Location.parse(storage_path) / f"run-{uuid.uuid4().hex}" / "ray_ckpt"
        tier = RemoteTier(root, options)
        with pytest.raises(StoragePathError) as caught:
            tier.probe_log()
            tier.leave_nonce("nonce")
        text = str(caught.value)
        assert all(words in text for words in message), text
        assert len(text.splitlines()) == 1 and tier.where in text and caught.value.hint
