"""Creates and transfers while the store loses answers, refuses, hangs or cuts: never a wrong answer or byte.

The strict store goes wrong by rules that count requests, so a run can be repeated. Waits between tries are
milliseconds here.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from ray_ckpt.errors import CorruptionError
from ray_ckpt.format.digest import digest
from ray_ckpt.format.names import shard_file
from ray_ckpt.location import Location
from ray_ckpt.storage.log_store import CreateResult, LogStore, ObjectLogStore
from ray_ckpt.storage.remote.tier import RemoteTier, open_objects
from ray_ckpt.types import FileEntry
from tests.servers.patience import REQUEST_S, TRIES, lose_patience
from tests.servers.stores import bucket_url
from tests.servers.strict_store import (
    Delay,
    DropAfter,
    DropBefore,
    Fault,
    Flip,
    Hang,
    Match,
    Slow,
    Status,
    StrictStore,
    Truncate,
)
from tests.servers.strict_store.faults import Action
from tests.support.examples import every_few

MIB = 1 << 20
NUM_WRITERS = 16
CREATES = Match(operation="PutObject")
READS = Match(operation="GetObject")
PARTS = Match(operation="UploadPart")
COMPLETION = Match(operation="CompleteMultipartUpload")
BUCKETS = ("s3", "gs")
REFUSALS: tuple[Action, ...] = (
    DropBefore(),
    Status(409, "ConditionalRequestConflict"),
    Status(429),
    Status(500),
    Status(503),
    Hang(),
)
UPLOAD_FAULTS: tuple[tuple[Fault, ...], ...] = (
    (Fault(match=PARTS, action=Status(503), every=2),),
    (
        Fault(match=PARTS, action=Status(500), every=3),
        Fault(match=PARTS, action=DropBefore(), every=4),
    ),
    (Fault(match=PARTS, action=DropAfter(), every=2),),
    (Fault(match=PARTS, action=Hang(), times=2, every=2),),
    (Fault(match=COMPLETION, action=DropAfter(), times=1),),
    (Fault(match=COMPLETION, action=Status(503), times=2),),
    (Fault(match=COMPLETION, action=Status(200), times=1),),
    (
        Fault(match=Match(operation="CreateMultipartUpload"), action=DropAfter(), times=1),
        Fault(match=Match(operation="HeadObject"), action=Status(500), times=2),
    ),
)


@pytest.fixture
def quick(credentials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that give up soon."""
    lose_patience(monkeypatch)


def location_of(kind: str, strict: StrictStore) -> tuple[Location, dict[str, str]]:
    """Make a bucket on the strict store; return its location and options for a kind of store."""
    bucket = f"b{uuid.uuid4().hex}"
    strict.make_bucket(bucket)
    options = {"backend": "fsspec"} if kind.startswith("fsspec") else {}
    scheme = kind.removeprefix("fsspec-")
    return Location.parse(bucket_url(scheme, strict.endpoint, "runs", bucket)), options


def new_log(kind: str, strict: StrictStore) -> LogStore:
    _, small = open_objects(*location_of(kind, strict))
    return ObjectLogStore(small, "log")


def data_of(name: str, writer: int) -> bytes:
    return f"{name} by writer {writer}".encode()


def race(log: LogStore, creates: list[tuple[str, int]]) -> list[CreateResult]:
    with ThreadPoolExecutor(NUM_WRITERS) as pool:
        return list(pool.map(lambda c: log.create(c[0], data_of(*c)), creates))


def check_outcomes(log: LogStore, creates: list[tuple[str, int]], outcomes: list[CreateResult]) -> None:
    """Check, when the store answers again, that earlier answers were true, also by repeated creates."""
    winners: dict[str, int] = {}
    for (name, writer), first in zip(creates, outcomes, strict=True):
        there = log.read(name)
        now = log.create(name, data_of(name, writer))
        assert now in (CreateResult.OK, CreateResult.EXISTS)
        assert first in (now, CreateResult.UNKNOWN), f"{name} by {writer}: {first} and then {now}"
        if there is not None:
            assert (now is CreateResult.OK) == (there == data_of(name, writer))
        if now is CreateResult.OK:
            assert winners.setdefault(name, writer) == writer
    assert set(winners) == {name for name, _ in creates}
    assert sorted(log.list()) == sorted(winners)


def two_for_each_name(names: int, seed: int) -> list[tuple[str, int]]:
    creates = [(f"{name:05d}", writer) for name in range(names) for writer in range(2)]
    Random(seed).shuffle(creates)
    return creates


class TestCreates:
    @pytest.mark.parametrize("kind", BUCKETS)
    @pytest.mark.parametrize("names", [50, pytest.param(500, marks=pytest.mark.slow)])
    def test_creates_whose_answers_are_lost(
        self, kind: str, names: int, strict: StrictStore, quick: None
    ) -> None:
        """Every other request is carried out and not answered, so the client's own next try is refused."""
        log, creates = new_log(kind, strict), two_for_each_name(names, seed=1)
        fault = strict.add_fault(Fault(match=CREATES, action=DropAfter(), every=2))
        outcomes = race(log, creates)
        assert strict.faults_fired()[fault] >= len(creates) // 2  # each create is at least one request
        strict.clear_faults()
        assert set(outcomes) == {CreateResult.OK, CreateResult.EXISTS}
        assert outcomes.count(CreateResult.OK) == names
        check_outcomes(log, creates, outcomes)

    @pytest.mark.parametrize(
        ("kind", "names"),
        [
            ("s3", 60),
            pytest.param("gs", 100, marks=pytest.mark.slow),
            pytest.param("fsspec-s3", 10, marks=pytest.mark.slow),
            pytest.param("fsspec-s3", 20, marks=pytest.mark.slow),
            ("fsspec-gs", 10),
            pytest.param("s3", 400, marks=pytest.mark.slow),
            pytest.param("gs", 400, marks=pytest.mark.slow),
            pytest.param("fsspec-s3", 40, marks=pytest.mark.slow),
        ],
    )
    def test_all_that_goes_wrong_at_once(
        self, kind: str, names: int, strict: StrictStore, quick: None
    ) -> None:
        log, creates = new_log(kind, strict), two_for_each_name(names, seed=2)
        actions: list[tuple[Action, int]] = [
            (DropAfter(), 3),
            (DropBefore(), 5),
            (Status(409, "ConditionalRequestConflict"), 7),
            (Status(503), 6),
            (Status(500), 11),
        ]
        faults = [strict.add_fault(Fault(match=CREATES, action=a, every=every)) for a, every in actions]
        strict.add_fault(Fault(match=READS, action=Status(503), every=4))
        strict.add_fault(Fault(match=READS, action=Truncate(3), every=9))
        if kind != "fsspec-gs":  # gcsfs tries six times, whatever the answer
            strict.add_fault(Fault(match=CREATES, action=Hang(), every=37, times=4))
        outcomes = race(log, creates)
        fired = strict.faults_fired()
        assert all(fired[fault] > 0 for fault in faults)
        strict.clear_faults()
        assert (
            CreateResult.UNSUPPORTED not in outcomes
            and outcomes.count(CreateResult.UNKNOWN) < len(creates) // 2
        )
        check_outcomes(log, creates, outcomes)

    @pytest.mark.parametrize(
        ("kind", "action"),
        [*((BUCKETS[0], action) for action in REFUSALS), *every_few((BUCKETS[1], a) for a in REFUSALS)],
        ids=lambda value: (
            value if isinstance(value, str) else f"{type(value).__name__}-{getattr(value, 'status', '')}"
        ),
    )
    def test_what_was_not_carried_out_is_unknown_until_it_is_repeated(
        self, kind: str, action: Action, strict: StrictStore, quick: None
    ) -> None:
        log = new_log(kind, strict)
        strict.add_fault(Fault(match=CREATES, action=action))
        begun = time.monotonic()
        assert log.create("a", b"1") is CreateResult.UNKNOWN
        assert time.monotonic() - begun < TRIES * REQUEST_S + 5
        assert log.list() == ()
        strict.clear_faults()
        assert (log.create("a", b"1"), log.create("a", b"2")) == (CreateResult.OK, CreateResult.EXISTS)

    @pytest.mark.parametrize("kind", BUCKETS)
    def test_what_nobody_answers_for_is_unknown_and_stays_what_it_is(
        self, kind: str, strict: StrictStore, quick: None
    ) -> None:
        log = new_log(kind, strict)
        strict.add_fault(Fault(match=CREATES, action=DropAfter()))
        strict.add_fault(Fault(match=READS, action=Status(503)))
        assert (log.create("a", b"1"), log.create("a", b"2")) == (CreateResult.UNKNOWN, CreateResult.UNKNOWN)
        strict.clear_faults()
        assert (log.create("a", b"2"), log.create("a", b"1")) == (CreateResult.EXISTS, CreateResult.OK)

    @pytest.mark.parametrize("kind", BUCKETS)
    def test_a_record_that_arrives_late_is_seen_by_the_next_try(
        self, kind: str, strict: StrictStore, quick: None
    ) -> None:
        """The request outlives its client: it is carried out after the create was called unclear."""
        log = new_log(kind, strict)
        strict.add_fault(Fault(match=CREATES, action=Delay(REQUEST_S + 0.5), times=1))
        first = log.create("a", b"1")
        assert first is CreateResult.OK or first is CreateResult.UNKNOWN
        end = time.monotonic() + 10
        while log.read("a") is None:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert (log.create("a", b"2"), log.create("a", b"1")) == (CreateResult.EXISTS, CreateResult.OK)


DIRECTORY = "000000000010-0123456789abcdef"
SHARD = shard_file(0, 1)
SIZE = 36 * MIB  # three parts
MAX_PUTS = 8  # of one file, as a drain repeats it
PUT_S = 40.0  # for each, whatever the store does


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> tuple[FileEntry, Path]:
    """A shard on this node's disk."""
    data = Random(3).randbytes(SIZE)
    path = tmp_path_factory.mktemp("staging") / SHARD
    path.write_bytes(data)
    return FileEntry(name=SHARD, size_bytes=SIZE, digest=digest(data)), path


@pytest.fixture(params=BUCKETS)
def tier(request: pytest.FixtureRequest, strict: StrictStore, quick: None) -> RemoteTier:
    return RemoteTier(*location_of(request.param, strict))


def fault_ids(faults: object) -> str:
    assert isinstance(faults, tuple)
    return "+".join(f"{f.match.operation}-{type(f.action).__name__}" for f in faults)


def bounded(call: Callable[[], object], *, limit_s: float = PUT_S) -> Exception | None:
    """Return the OSError of a call, or None; the call must end in time."""
    begun = time.monotonic()
    try:
        call()
        error = None
    except OSError as caught:
        error = caught
    assert time.monotonic() - begun < limit_s
    return error


class TestDrains:
    @pytest.mark.parametrize(
        ("tier", "faults"),
        [  # quick ones differ between the stores
            *every_few((("s3", faults) for faults in UPLOAD_FAULTS), 3),
            *every_few((("gs", faults) for faults in (*UPLOAD_FAULTS[1:], UPLOAD_FAULTS[0])), 3),
        ],
        indirect=["tier"],
        ids=lambda value: value if isinstance(value, str) else fault_ids(value),
    )
    def test_an_upload_ends_with_the_right_bytes(
        self, tier: RemoteTier, staged: tuple[FileEntry, Path], strict: StrictStore, faults: tuple[Fault, ...]
    ) -> None:
        entry, path = staged
        numbers = [strict.add_fault(fault) for fault in faults]
        for _ in range(MAX_PUTS):
            error = bounded(lambda: tier.put_file(DIRECTORY, entry, path))
            if error is None:
                break
            assert len(str(error).splitlines()) == 1
        else:
            raise AssertionError(f"not in {MAX_PUTS} tries: {error}")
        assert all(strict.faults_fired()[number] for number in numbers)
        strict.clear_faults()
        for upload in tier.uploads():
            tier.files.abort(upload)
        assert strict.uploads(tier.root.bucket) == []
        assert b"".join(map(bytes, tier.blocks(DIRECTORY, SHARD))) == path.read_bytes()

    @pytest.mark.parametrize(
        "action",
        [Status(503), DropBefore(), pytest.param(Hang(), marks=pytest.mark.slow)],
        ids=lambda action: type(action).__name__,
    )
    def test_an_upload_that_cannot_be_leaves_no_file_and_nothing_that_is_not_listed(
        self, tier: RemoteTier, staged: tuple[FileEntry, Path], strict: StrictStore, action: Action
    ) -> None:
        entry, path = staged
        strict.add_fault(Fault(match=PARTS, action=action, every=1))
        assert bounded(lambda: tier.put_file(DIRECTORY, entry, path)) is not None
        strict.clear_faults()
        assert tier.files_of(DIRECTORY) == {}
        assert len(list(tier.uploads())) == len(strict.uploads(tier.root.bucket))
        tier.delete(DIRECTORY)
        assert strict.uploads(tier.root.bucket) == []

    @pytest.mark.parametrize(
        "faults",
        every_few(
            zip(
                [
                    (Fault(match=READS, action=Truncate(100_000), every=2),),
                    (
                        Fault(match=READS, action=Truncate(0), every=3),
                        Fault(match=READS, action=Status(503), every=2),
                    ),
                    (Fault(match=READS, action=DropBefore(), every=2),),
                    (Fault(match=READS, action=Hang(), every=3, times=1),),
                    (Fault(match=READS, action=Slow(100_000), every=2, times=1),),
                    (Fault(match=READS, action=Truncate(5)),),
                ],
                strict=True,
            ),
            3,
        ),
        ids=fault_ids,
    )
    def test_a_download_gives_the_right_bytes_or_an_error(
        self, tier: RemoteTier, staged: tuple[FileEntry, Path], strict: StrictStore, faults: tuple[Fault, ...]
    ) -> None:
        entry, path = staged
        tier.put_file(DIRECTORY, entry, path)
        data, got = path.read_bytes(), bytearray()
        for fault in faults:
            strict.add_fault(fault)
        error = bounded(lambda: got.extend(b"".join(blocks_of(tier))))
        strict.clear_faults()
        assert bytes(got) == data if error is None else len(str(error).splitlines()) == 1

    def test_answers_that_begin_late_are_requested_ahead(
        self, tier: RemoteTier, staged: tuple[FileEntry, Path], strict: StrictStore
    ) -> None:
        entry, path = staged
        tier.put_file(DIRECTORY, entry, path)
        late_s, num_ranges = 0.3, 7
        ranges = [(k * SIZE // num_ranges, 1000) for k in range(num_ranges)]
        strict.add_fault(Fault(match=READS, action=Delay(late_s)))
        begun = time.monotonic()
        got = b"".join(map(bytes, tier.read(DIRECTORY, SHARD, ranges)))
        took_s = time.monotonic() - begun
        strict.clear_faults()
        data = path.read_bytes()
        assert got == b"".join(data[offset : offset + nbytes] for offset, nbytes in ranges)
        assert took_s < num_ranges * late_s  # one after another they would take that at least

    def test_a_bit_that_flips_on_the_way_down_is_found_by_the_reader(
        self, tier: RemoteTier, tmp_path: Path, strict: StrictStore
    ) -> None:
        data = bytes(range(256)) * 40_000
        path = tmp_path / SHARD
        path.write_bytes(data)
        entry = FileEntry(name=SHARD, size_bytes=len(data), digest=digest(data))
        tier.put_file(DIRECTORY, entry, path, level=1)
        strict.add_fault(Fault(match=READS, action=Flip(byte=2000)))
        with pytest.raises(CorruptionError):
            list(tier.read(DIRECTORY, SHARD, [(0, len(data))]))
        strict.clear_faults()
        assert b"".join(map(bytes, tier.blocks(DIRECTORY, SHARD))) == data


def blocks_of(tier: RemoteTier) -> Iterator[bytes]:
    return map(bytes, tier.read(DIRECTORY, SHARD, [(0, SIZE)]))
