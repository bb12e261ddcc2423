"""Rows from files, arenas and peers into memory: verified, and from the next source if one is bad."""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from typing_extensions import Buffer

from ray_ckpt.errors import FormatError, Unavailable
from ray_ckpt.format.digest import digest
from ray_ckpt.format.names import make_attempt, shard_file
from ray_ckpt.plan.restore import RowKey, row_key
from ray_ckpt.restore import extents, sources
from ray_ckpt.restore import reader as restore
from ray_ckpt.restore.reader import Bytes, FileSource, FlatSink, ProgressLog, SharedRows, Sink, SourceReader
from ray_ckpt.restore.sources import Peers
from ray_ckpt.transport.client import PeerClient
from ray_ckpt.transport.server import PeerServer
from ray_ckpt.transport.wire import FileName, PutRequest
from ray_ckpt.types import ARENA_PAGE_BYTES, ManifestRow, Slice, Tier
from tests.support.examples import examples
from tests.transport.peers import KEYS

ATTEMPT = make_attempt(run_uid="0" * 32, session=1, step=10, attempt=0)
HEADER = 100  # bytes before the first row, as a file's header
FILE = shard_file(0, 1)


@dataclass(slots=True)
class Checkpoint:
    """Files of known rows, with any number of copies."""

    folder: Path
    files: dict[str, bytes] = field(default_factory=dict)
    rows: list[ManifestRow] = field(default_factory=list)

    @classmethod
    def make(cls, folder: Path, *sizes: Sequence[int], seed: int = 0) -> Checkpoint:
        """Make one file per list of row sizes."""
        made, noise = cls(folder), np.random.default_rng(seed)
        for index, file_sizes in enumerate(sizes):
            file = shard_file(index, len(sizes))
            data = noise.bytes(HEADER + sum(file_sizes))
            at = HEADER
            for number, size in enumerate(file_sizes):
                made.rows.append(row(file, at, data[at : at + size], f"t{number}"))
                at += size
            made.files[file] = data
        return made

    def copy(self, name: str, bad: Sequence[RowKey] = (), *, tier: Tier = "local") -> dict[str, FileSource]:
        """Return one source of each file, with the first byte of each row in `bad` flipped."""
        sources = {}
        for file, good in self.files.items():
            data = bytearray(good)
            for place in bad:
                if place[0] == file:
                    data[place[1]] ^= 1
            path = self.folder / f"{name}-{file}"
            page = ATTEMPT.attempt.encode().ljust(ARENA_PAGE_BYTES, b"\0") if tier == "memory" else b""
            path.write_bytes(page + data)
            sources[file] = FileSource(tier=tier, where=name, path=str(path))
        return sources

    def reader(self, *copies: dict[str, FileSource], **options: object) -> SourceReader:
        sources = {file: tuple(copy[file] for copy in copies if file in copy) for file in self.files}
        options.setdefault("credentials", None)
        return SourceReader(ATTEMPT, sources, **options)  # type: ignore[arg-type]

    def bytes_of(self, place: RowKey, size: int) -> bytes:
        return self.files[place[0]][place[1] : place[1] + size]

    def places(self) -> list[RowKey]:
        return [row_key(each) for each in self.rows]


def row(file: str, at: int, data: bytes, name: str) -> ManifestRow:
    part = Slice(item="m", name=name, dtype="U8", global_shape=(len(data),), offset=(0,), shape=(len(data),))
    return ManifestRow(
        kind="slice", file=file, byte_offset=at, nbytes=len(data), digest=digest(data), slice=part
    )


class Memory:
    """Memory for rows, and the rows that the reader has reported as intact."""

    def __init__(self, rows: Sequence[ManifestRow]) -> None:
        self.bytes: dict[RowKey, Bytes] = {row_key(each): np.zeros(each.nbytes, np.uint8) for each in rows}
        self.finished: list[RowKey] = []

    def sink_for(self, wanted: ManifestRow) -> Sink:
        return _Noting(self, row_key(wanted))

    def content(self) -> dict[RowKey, bytes]:
        return {place: data.tobytes() for place, data in self.bytes.items()}


class _Noting(FlatSink):
    def __init__(self, memory: Memory, place: RowKey) -> None:
        super().__init__(memory.bytes[place])
        self._memory, self._place = memory, place

    def finish(self) -> None:
        self._memory.finished.append(self._place)


def read(reader: SourceReader, rows: Sequence[ManifestRow], **options: object) -> Memory:
    memory = Memory(rows)
    reader.read(rows, memory.sink_for, **options)  # type: ignore[arg-type]
    return memory


def check(checkpoint: Checkpoint, rows: Sequence[ManifestRow], memory: Memory, reader: SourceReader) -> None:
    """Assert that each requested row is there, once."""
    assert not reader.damage
    assert sorted(memory.finished) == sorted(row_key(each) for each in rows)
    for each in rows:
        place = row_key(each)
        assert memory.bytes[place].tobytes() == checkpoint.bytes_of(place, each.nbytes)
    assert sum(part.size_bytes for part in reader.parts) == sum(each.nbytes for each in rows)


def small_extents(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    monkeypatch.setattr(extents, "EXTENT_BYTES", dict.fromkeys(extents.EXTENT_BYTES, size_bytes))


# -- what is read ------------------------------------------------------------------------------------


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_each_row_comes_from_the_first_source_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.lists(st.integers(1, 300), max_size=12), min_size=1, max_size=3))
    for module, name, limit in ((restore, "PIECE_BYTES", 70), (extents, "EXTENT_ROWS", 4)):
        monkeypatch.setattr(module, name, data.draw(st.integers(1, limit), label=name))
    gap_bytes = data.draw(st.integers(1, 30), label="GAP_BYTES")
    monkeypatch.setattr(extents, "GAP_BYTES", dict.fromkeys(extents.GAP_BYTES, gap_bytes))
    small_extents(monkeypatch, data.draw(st.integers(1, 200), label="extent"))
    checkpoint = Checkpoint.make(tmp_path, *sizes)
    tiers: list[Tier] = data.draw(st.lists(st.sampled_from(["memory", "local", "remote"]), max_size=3))
    full = [row_key(each) for each in checkpoint.rows if each.nbytes]
    subsets = st.lists(st.sampled_from(full), unique=True) if full else st.just([])
    bad = [set(data.draw(subsets)) for _ in tiers]
    copies = [
        checkpoint.copy(f"c{i}", sorted(b), tier=t) for i, (t, b) in enumerate(zip(tiers, bad, strict=True))
    ]
    wanted = data.draw(st.lists(st.sampled_from(checkpoint.rows), unique_by=row_key)) if full else []
    reader = checkpoint.reader(*copies)
    memory = read(reader, wanted)
    lost = [each for each in wanted if all(row_key(each) in b for b in bad)]
    assert reader.damage == [f"{r.file}: {r.label}" for r in sorted(lost, key=row_key)]
    assert sorted(memory.finished) == sorted({row_key(r) for r in wanted} - {row_key(r) for r in lost})
    for place in memory.finished:
        size = memory.bytes[place].size
        assert memory.bytes[place].tobytes() == checkpoint.bytes_of(place, size)
    came = {f"c{i}": 0 for i in range(len(tiers))}
    for each in wanted:
        for i, b in enumerate(bad):
            if row_key(each) not in b:
                came[f"c{i}"] += each.nbytes
                break
    counted = {where: sum(p.size_bytes for p in reader.parts if p.where == where) for where in came}
    assert counted == came


def test_one_row_by_itself(tmp_path: Path) -> None:
    checkpoint = Checkpoint.make(tmp_path, [5, 10])
    place = row_key(checkpoint.rows[1])
    reader = checkpoint.reader(checkpoint.copy("one", [place]))
    assert reader.read_bytes(checkpoint.rows[0]) == checkpoint.bytes_of((FILE, HEADER), 5)
    assert not reader.damage
    assert reader.read_bytes(checkpoint.rows[1]) is None
    assert reader.damage == [f"{FILE}: m.t1[0:10]"]


def test_an_empty_row_is_whole_whatever_becomes_of_the_one_at_its_place(tmp_path: Path) -> None:
    checkpoint = Checkpoint.make(tmp_path, [0, 5, 0])
    reader = checkpoint.reader(checkpoint.copy("bad", [(FILE, HEADER)]))
    assert [reader.read_bytes(each) for each in checkpoint.rows] == [b"", None, b""]
    reader = checkpoint.reader(checkpoint.copy("bad", [(FILE, HEADER)]))
    reader.read(checkpoint.rows, lambda row: FlatSink(np.empty(row.nbytes, np.uint8)))
    assert reader.damage == [f"{FILE}: m.t1[0:5]"]


def test_thousands_of_small_rows(tmp_path: Path) -> None:
    checkpoint = Checkpoint.make(tmp_path, [3] * 5000, [64] * 5000)
    for tier in ("memory", "local"):
        reader = checkpoint.reader(checkpoint.copy(tier, tier=tier))
        check(checkpoint, checkpoint.rows, read(reader, checkpoint.rows), reader)
        assert len(reader.parts) == 2, "one per file"


def test_a_row_larger_than_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint.make(tmp_path, [7, extents.EXTENT_BYTES["memory"] + 5, 7])
    for tier in ("memory", "local"):
        reader = checkpoint.reader(checkpoint.copy(tier, tier=tier))
        check(checkpoint, checkpoint.rows, read(reader, checkpoint.rows), reader)


def test_an_error_of_a_sink_is_not_taken_for_one_of_the_source(tmp_path: Path) -> None:
    checkpoint = Checkpoint.make(tmp_path, [10] * 50)
    reader = checkpoint.reader(checkpoint.copy("one"), checkpoint.copy("two"))

    def broken(_: ManifestRow) -> Sink:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        reader.read(checkpoint.rows, broken)
    assert not reader.rejected
    assert not [t for t in threading.enumerate() if t.name.startswith("ray_ckpt-restore")]


# -- arenas ------------------------------------------------------------------------------------------


class Recapture(FlatSink):
    """The arena is captured into again as soon as this row arrives."""

    def __init__(self, destination: Bytes, arena: Path) -> None:
        super().__init__(destination)
        self._arena = arena

    def write(self, view: memoryview) -> None:
        super().write(view)
        with self._arena.open("r+b") as file:
            file.write(bytes(16))


def test_an_arena_that_is_captured_into_meanwhile_gives_nothing(tmp_path: Path) -> None:
    checkpoint = Checkpoint.make(tmp_path, [50] * 20)
    arena, disk = checkpoint.copy("arena", tier="memory"), checkpoint.copy("disk")
    memory = Memory(checkpoint.rows)
    middle = row_key(checkpoint.rows[10])

    def sink_for(wanted: ManifestRow) -> Sink:
        if row_key(wanted) == middle:
            return Recapture(memory.bytes[middle], Path(arena[FILE].path))
        return memory.sink_for(wanted)

    reader = checkpoint.reader(arena, disk)
    reader.read(checkpoint.rows, sink_for)
    assert not reader.damage
    assert {part.where for part in reader.parts} == {"disk"}, "no row that was read before counts"
    assert "newer capture" in reader.rejected[0]
    assert set(memory.finished) == set(checkpoint.places()) - {middle}


@pytest.mark.parametrize("harm", ["another seal", "too short", "empty", "gone"])
def test_an_arena_that_is_not_what_it_should_be(tmp_path: Path, harm: str) -> None:
    checkpoint = Checkpoint.make(tmp_path, [50] * 20)
    arena, disk = checkpoint.copy("arena", tier="memory"), checkpoint.copy("disk")
    path = Path(arena[FILE].path)
    data = path.read_bytes()
    path.unlink()
    if harm != "gone":
        changed = {"another seal": b"x" * 16 + data[16:], "too short": data[:-60], "empty": b""}
        path.write_bytes(changed[harm])
    reader = checkpoint.reader(arena, disk)
    check(checkpoint, checkpoint.rows, read(reader, checkpoint.rows), reader)
    assert reader.rejected
    assert ("arena" in {p.where for p in reader.parts}) == (harm == "too short"), "its whole rows are good"


# -- peers -------------------------------------------------------------------------------------------


class Files:
    """A peer's files; `trouble` is called before each read."""

    def __init__(self, sources: dict[str, FileSource]) -> None:
        self._sources = sources
        self.trouble: Callable[[], None] = lambda: None
        self.num_reads = 0

    def put(self, request: PutRequest, chunks: object) -> str:
        raise AssertionError

    def read(self, name: FileName, offset: int, nbytes: int | None) -> Iterator[Buffer]:
        self.num_reads += 1
        self.trouble()
        data = Path(self._sources[name.file].path).read_bytes()
        assert nbytes is not None
        for at in range(offset, offset + nbytes, 1000):
            yield data[at : min(at + 1000, offset + nbytes)]

    def size(self, name: FileName) -> int | None:
        return Path(self._sources[name.file].path).stat().st_size


@dataclass(slots=True)
class PeerRig:
    checkpoint: Checkpoint
    files: Files
    server: PeerServer

    @property
    def sources(self) -> dict[str, FileSource]:
        endpoint = self.server.endpoint
        return dict.fromkeys(self.checkpoint.files, FileSource(tier="peer", where="p", endpoint=endpoint))

    def reader(self, *copies: dict[str, FileSource]) -> SourceReader:
        return self.checkpoint.reader(*copies, credentials=KEYS.credentials(ATTEMPT.run_uid))


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[PeerRig]:
    checkpoint = Checkpoint.make(tmp_path, [700] * 40, [10] * 300)
    bad = [row_key(checkpoint.rows[3])]
    files = Files(checkpoint.copy("peer", bad))
    server = PeerServer("127.0.0.1", keys=KEYS, files=files)
    yield PeerRig(checkpoint, files, server)
    server.shutdown()


def test_a_peer_gives_rows_and_what_is_bad_there_comes_from_the_next(
    peer: PeerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_extents(monkeypatch, 3000)
    checkpoint, reader = peer.checkpoint, peer.reader(peer.sources, peer.checkpoint.copy("disk"))
    check(checkpoint, checkpoint.rows, read(reader, checkpoint.rows), reader)
    assert [p.size_bytes for p in reader.parts if p.where == "disk"] == [700]
    assert len(reader.rejected) == 1 and "m.t3" in reader.rejected[0]
    assert reader.bad_nodes == {"p"}


def test_rows_far_apart_are_one_request(peer: PeerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extents, "GAP_BYTES", dict.fromkeys(extents.GAP_BYTES, 0))
    rows = peer.checkpoint.rows[4:40:2]
    reader = peer.reader(peer.sources)
    check(peer.checkpoint, rows, read(reader, rows), reader)
    assert peer.files.num_reads == len(rows), "nothing between them was read"


def test_a_connection_that_breaks_once_is_made_again(peer: PeerRig) -> None:
    def once() -> None:
        if peer.files.num_reads == 1:
            raise RuntimeError("cut")  # not a refusal: the stream just ends

    peer.files.trouble = once
    rows = peer.checkpoint.rows[40:]
    reader = peer.reader(peer.sources)
    check(peer.checkpoint, rows, read(reader, rows), reader)
    assert reader.rejected, "the damage is reported all the same"


def test_a_busy_peer_is_asked_again_and_is_not_gone(peer: PeerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    (busy, _), read_file = peer.checkpoint.files, peer.files.read
    tried: list[str] = []

    def read_or_wait(name: FileName, offset: int, nbytes: int | None) -> Iterator[Buffer]:
        if name.file == busy:
            tried.append(busy)
            raise Unavailable("others read here", refused=False)
        return read_file(name, offset, nbytes)

    monkeypatch.setattr(peer.files, "read", read_or_wait)
    reader = peer.reader(peer.sources, peer.checkpoint.copy("disk"))
    check(peer.checkpoint, peer.checkpoint.rows, read(reader, peer.checkpoint.rows), reader)
    assert len(tried) == sources.PEER_TRIES
    assert not reader._peers.gone, "it may give other files"


def test_nobody_waits_twice_for_a_peer_that_is_gone(peer: PeerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    small_extents(monkeypatch, 1)
    requested: list[str] = []

    class Gone:
        def __init__(self, endpoint: str, *, credentials: object) -> None:
            requested.append(endpoint)
            raise Unavailable("no route")

    monkeypatch.setattr(sources, "PeerClient", Gone)
    reader = peer.reader(peer.sources, peer.checkpoint.copy("disk"))
    check(peer.checkpoint, peer.checkpoint.rows, read(reader, peer.checkpoint.rows), reader)
    assert len(requested) <= sources.PEER_TRIES * restore.num_threads("peer"), "those under way, not all 340"


def test_nobody_waits_twice_for_a_peer_that_hangs(peer: PeerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that has lasted too long is not repeated; other calls to this peer would last as long."""
    small_extents(monkeypatch, 1)
    requested: list[int] = []

    def hang(_peer: PeerClient, _name: FileName, ranges: Sequence[tuple[int, int]], **_: float) -> None:
        requested.append(len(ranges))
        raise Unavailable("Deadline Exceeded", refused=True, answered=False)

    monkeypatch.setattr(PeerClient, "read", hang)
    reader = peer.reader(peer.sources, peer.checkpoint.copy("disk"))
    check(peer.checkpoint, peer.checkpoint.rows, read(reader, peer.checkpoint.rows), reader)
    assert len(requested) <= restore.num_threads("peer")
    again = SourceReader(
        ATTEMPT,
        {file: (source,) for file, source in peer.sources.items()},
        credentials=KEYS.credentials(ATTEMPT.run_uid),
        gone=reader._peers.gone,
    )
    requested.clear()
    again.read(peer.checkpoint.rows, lambda row: FlatSink(np.empty(row.nbytes, np.uint8)))
    assert not requested and len(again.damage) == len(peer.checkpoint.rows), "both readers know that"


def test_a_peer_that_is_busy_for_long_is_no_damage(peer: PeerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer to most calls is that it serves others, as long as a large group reads."""
    small_extents(monkeypatch, 1)
    read_file, calls = peer.files.read, itertools.count()

    def read_seldom(name: FileName, offset: int, nbytes: int | None) -> Iterator[Buffer]:
        if next(calls) % 7:
            raise Unavailable("others read here", refused=False)
        return read_file(name, offset, nbytes)

    monkeypatch.setattr(peer.files, "read", read_seldom)
    reader, rows = peer.reader(peer.sources), peer.checkpoint.rows[4:14]
    check(peer.checkpoint, rows, read(reader, rows), reader)
    assert not reader.damage


NOT_HERE = FileNotFoundError(errno.ENOENT, "no such file")
BAD_SECTOR = OSError(errno.EIO, "a bad sector")
MANY_FILES = OSError(errno.EMFILE, "too many open files")


@pytest.mark.parametrize(
    ("error", "is_unreachable"),
    [
        (Unavailable("the run is not open here"), True),
        (Unavailable("others read here", refused=False), True),
        (MANY_FILES, True),
        (NOT_HERE, False),
        (BAD_SECTOR, False),
        (FormatError("a header of another file"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_peer_that_does_not_have_a_row_is_told_from_one_that_cannot_send_it_now(
    peer: PeerRig, monkeypatch: pytest.MonkeyPatch, error: Exception, is_unreachable: bool
) -> None:
    monkeypatch.setattr(peer.files, "read", Mock(side_effect=error))
    reader, rows = peer.reader(peer.sources), peer.checkpoint.rows[:2]
    reader.read(rows, lambda row: FlatSink(np.empty(row.nbytes, np.uint8)))
    assert len(reader.damage) == 2 and reader.is_unreachable == is_unreachable


@pytest.mark.parametrize("answers", [True, False])
def test_rows_are_unreachable_only_if_each_of_them_may_be_intact_somewhere(
    peer: PeerRig, answers: bool
) -> None:
    if not answers:
        peer.server.shutdown()
    rows = peer.checkpoint.rows[3:5]  # the first is bad at the peer
    reader = peer.reader(peer.checkpoint.copy("disk", [row_key(row) for row in rows]), peer.sources)
    assert not reader.is_unreachable
    reader.read(rows, lambda row: FlatSink(np.empty(row.nbytes, np.uint8)))
    assert len(reader.damage) == (1 if answers else 2)
    assert reader.is_unreachable == (not answers)
    reader.read_bytes(replace(rows[0], file="shard-00009-of-00010.safetensors"))
    assert not reader.is_unreachable, "no source has this one"


def test_a_connection_that_breaks_before_the_damage_is_seen_leaves_damage(peer: PeerRig) -> None:
    def once() -> None:
        if peer.files.num_reads == 1:
            raise RuntimeError("cut")

    peer.files.trouble = once
    reader = peer.reader(peer.sources)
    assert reader.read_bytes(peer.checkpoint.rows[3]) is None
    assert peer.files.num_reads == 2 and not reader.is_unreachable


def test_a_peer_whose_address_is_not_known_is_not_reached(peer: PeerRig) -> None:
    nowhere = {file: replace(source, endpoint="") for file, source in peer.sources.items()}
    reader = peer.reader(nowhere)
    reader.read_bytes(peer.checkpoint.rows[0])
    assert reader.is_unreachable and not reader._peers.gone


@pytest.mark.parametrize(
    ("error", "is_unreachable"),
    [
        (TimeoutError("503 SlowDown"), True),
        (BAD_SECTOR, True),  # of a network file system whose server did not answer
        (EOFError("it ends early"), True),
        (MANY_FILES, True),
        (NOT_HERE, False),
    ],
)
def test_a_store_that_does_not_answer_is_not_reached(
    tmp_path: Path, error: Exception, is_unreachable: bool
) -> None:
    checkpoint = Checkpoint.make(tmp_path, [100])
    tier = Mock(read=Mock(side_effect=error))
    reader = checkpoint.reader({FILE: FileSource(tier="remote", where="s3://b")}, remote=tier)
    assert reader.read_bytes(checkpoint.rows[0]) is None
    assert reader.is_unreachable == is_unreachable


def test_a_peer_that_only_says_that_it_is_busy_is_no_source(
    peer: PeerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def refuse(name: FileName, offset: int, nbytes: int | None) -> Iterator[Buffer]:
        tried.append(name.file)
        raise Unavailable("others read here", refused=False)

    monkeypatch.setattr(peer.files, "read", refuse)
    reader, rows = peer.reader(peer.sources), peer.checkpoint.rows[:1]
    reader.read(rows, lambda row: FlatSink(np.empty(row.nbytes, np.uint8)))
    assert len(reader.damage) == 1
    assert len(tried) == sources.PEER_TRIES * restore.BUSY_ROUNDS


@pytest.mark.parametrize(
    ("fields", "num_calls", "is_gone"),
    [
        ({"refused": True, "answered": True}, 1, False),
        ({"refused": False, "answered": True}, 2, False),
        ({"refused": True, "answered": False}, 1, True),
        ({"refused": False, "answered": False}, 2, True),
    ],
)
def test_a_small_file_is_requested_again_unless_that_is_useless(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], num_calls: int, is_gone: bool
) -> None:
    calls: list[str] = []

    def fail(_peer: PeerClient, name: FileName, *, max_bytes: int) -> bytes:
        calls.append(name.file)
        raise Unavailable("no", **fields)

    monkeypatch.setattr(PeerClient, "read_file", fail)
    name = FileName(run_uid=ATTEMPT.run_uid, directory=ATTEMPT.directory, file=FILE)
    with closing(Peers(KEYS.credentials(ATTEMPT.run_uid))) as peers:
        for _ in range(2):
            with pytest.raises(Unavailable):
                peers.read_small("grpc+tls://127.0.0.1:1", name, max_bytes=10)
        assert len(calls) == (num_calls if is_gone else 2 * num_calls)
        assert bool(peers.gone) == is_gone


def test_without_credentials_a_peer_is_no_source(peer: PeerRig) -> None:
    reader = peer.checkpoint.reader(peer.sources, peer.checkpoint.copy("disk"))
    check(peer.checkpoint, peer.checkpoint.rows, read(reader, peer.checkpoint.rows), reader)
    assert "no credentials" in reader.rejected[0]


# -- what the agent gives ----------------------------------------------------------------------------


def test_rows_of_the_agent_are_verified_and_an_agent_that_fails_is_done_without(tmp_path: Path) -> None:
    checkpoint = Checkpoint.make(tmp_path, [30] * 9)
    places = checkpoint.places()
    memory = bytearray(300)
    for index, place in enumerate(places[:3]):
        memory[index * 64 : index * 64 + 30] = checkpoint.bytes_of(place, 30)
    memory[64] ^= 1
    (tmp_path / "shared").write_bytes(memory)
    requested: list[tuple[list[RowKey], tuple[RowKey, ...]]] = []

    def fetch(wants: dict[RowKey, tuple[int, ...]], taken: tuple[RowKey, ...]) -> SharedRows:
        requested.append((list(wants), taken))
        if len(requested) == 2:
            raise Unavailable("the agent died")
        offsets = {place: 64 * i for i, place in enumerate(places[:3])}
        origin: dict[str, tuple[Tier, str]] = {FILE: ("remote", "bucket")}
        return SharedRows(path=str(tmp_path / "shared"), offsets=offsets, origin=origin, refused=(places[3],))

    reader = checkpoint.reader(checkpoint.copy("disk"), fetch=fetch)
    memory_ = read(reader, checkpoint.rows, sharers=dict.fromkeys(places[:8], (0, 1)))
    check(checkpoint, checkpoint.rows, memory_, reader)
    assert requested == [(places[:8], ()), (places[4:8], tuple(places[:3]))]
    assert {(p.where, p.size_bytes) for p in reader.parts} == {("bucket", 60), ("disk", 210)}
    assert "wrong digest" in reader.rejected[0] and "the agent died" in reader.rejected[1]


def test_rows_in_an_arena_are_not_requested_from_the_agent(tmp_path: Path) -> None:
    checkpoint = Checkpoint.make(tmp_path, [30] * 3)

    def fetch(wants: object, taken: object) -> SharedRows:
        raise AssertionError

    reader = checkpoint.reader(checkpoint.copy("arena", tier="memory"), fetch=fetch)
    memory = read(reader, checkpoint.rows, sharers=dict.fromkeys(checkpoint.places(), (0, 1)))
    check(checkpoint, checkpoint.rows, memory, reader)


# -- progress ----------------------------------------------------------------------------------------


def test_progress_is_reported_from_the_reading_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "PROGRESS_S", 0.0)
    calls: list[tuple[int, int, str, str]] = []

    def progress(done: int, total: int, tier: Tier) -> None:
        calls.append((done, total, tier, threading.current_thread().name))

    checkpoint = Checkpoint.make(tmp_path, [1000] * 10)
    reader = checkpoint.reader(checkpoint.copy("disk"), progress=progress)
    read(reader, checkpoint.rows)
    assert calls[-1] == (10_000, 10_000, "local", threading.current_thread().name)
    assert [done for done, *_ in calls] == sorted(done for done, *_ in calls)


def test_a_long_restore_logs_its_progress() -> None:
    now_s = 100.0
    lines: list[str] = []
    log = ProgressLog(7, log=lines.append, clock=lambda: now_s)
    for second in range(13):
        now_s = 100.0 + second
        log(second * 2_000_000_000, 40_000_000_000, "peer")
    assert lines == [
        "restoring step 7: 10.0 of 40.0 GB, 2 GB/s, from other nodes",
        "restoring step 7: 20.0 of 40.0 GB, 2 GB/s, from other nodes",
    ]
