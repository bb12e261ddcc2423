"""Ranks of one node that want the same rows: read once, in bounded memory, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import errno
import mmap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from ray_ckpt.actors.agent import shared_reads
from ray_ckpt.actors.agent.shared_reads import SharedReads, _aligned, _Space
from ray_ckpt.actors.threads import BriefThreads
from ray_ckpt.plan.restore import RowKey, row_key
from ray_ckpt.restore import reader as restore
from ray_ckpt.restore.manifest import ListedRows
from ray_ckpt.restore.reader import FetchRows, FileSource, RestoreTicket, SharedRows, SourceReader
from ray_ckpt.types import CheckpointInfo, Fragment, Level, ManifestRow
from tests.actors.prefetch_restarts.memory import descriptors
from tests.restore.test_reader import ATTEMPT, Checkpoint, Memory, check
from tests.support.examples import examples

Sharers = Mapping[RowKey, tuple[int, ...]]


def ticket_of(checkpoint: Checkpoint, sources: Mapping[str, FileSource]) -> RestoreTicket:
    fragment = Fragment(
        attempt=ATTEMPT,
        node_index=0,
        num_nodes=1,
        world_size=1,
        ranks=(0,),
        files=(),
        rows=tuple(checkpoint.rows),
    )
    info = CheckpointInfo(
        id=ATTEMPT,
        seq=1,
        level=Level.LOCAL,
        world_size=1,
        num_nodes=1,
        size_bytes=1,
        root_digest="",
        committed_at_s=0.0,
        metrics={},
    )
    given_sources = {file: (source,) for file, source in sources.items()}
    return RestoreTicket(
        session_key=(1, 1), checkpoint=info, manifest=ListedRows(fragment.rows), sources=given_sources
    )


class Agent:
    """The agent's event loop in a thread, without Ray."""

    def __init__(self, ticket: RestoreTicket, capacity_bytes: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        threads = BriefThreads(1, "test")
        self.shared = self._call(lambda: SharedReads(ticket, threads=threads, capacity_bytes=capacity_bytes))
        self.peak_bytes = 0

    def fetch_of(self, rank: int, before: Callable[[], None] = lambda: None) -> FetchRows:
        def fetch(wants: Sharers, taken: Sequence[RowKey]) -> SharedRows:
            before()
            requested = asyncio.run_coroutine_threadsafe(self.shared.fetch(rank, wants, taken), self._loop)
            answer = requested.result(20)
            used = sum(size for _, size in self.shared._space.free)
            self.peak_bytes = max(self.peak_bytes, self.shared._space.size_bytes - used)
            return answer

        return fetch

    def close(self) -> None:
        self._call(self.shared.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Callable[[], object]) -> SharedReads:
        async def run() -> object:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(20)  # type: ignore[return-value]


@contextmanager
def agent(checkpoint: Checkpoint, sources: Mapping[str, FileSource], capacity: int) -> Iterator[Agent]:
    opened = Agent(ticket_of(checkpoint, sources), capacity)
    try:
        yield opened
    finally:
        opened.close()


def wait_for(event: threading.Event) -> None:
    event.wait()


def restore_all(
    checkpoint: Checkpoint,
    sources: dict[str, FileSource],
    opened: Agent,
    wanted: Mapping[int, Sequence[ManifestRow]],
    *,
    late: Mapping[int, Callable[[], None]] | None = None,
) -> dict[int, tuple[SourceReader, Memory]]:
    """Restore every rank in a thread of its own; `late` is called before each request of a rank."""
    holders: dict[RowKey, set[int]] = {}
    for rank, rows in wanted.items():
        for row in rows:
            holders.setdefault(row_key(row), set()).add(rank)
    sharers = {place: tuple(sorted(ranks)) for place, ranks in holders.items() if len(ranks) > 1}

    def one(rank: int) -> tuple[SourceReader, Memory]:
        fetch = opened.fetch_of(rank, (late or {}).get(rank, lambda: None))
        reader, memory = checkpoint.reader(sources, fetch=fetch), Memory(wanted[rank])
        reader.read(wanted[rank], memory.sink_for, sharers)
        return reader, memory

    with ThreadPoolExecutor(len(wanted)) as pool:
        return dict(zip(wanted, pool.map(one, wanted), strict=True))


def test_what_all_ranks_hold_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore, "FETCH_BYTES", 4000)
    monkeypatch.setattr(shared_reads, "LOAD_BYTES", 2000)
    checkpoint = Checkpoint.make(tmp_path, [500] * 40, [90] * 50)
    sources, total = checkpoint.copy("disk"), 500 * 40 + 90 * 50
    with agent(checkpoint, sources, 8000) as opened:
        done = restore_all(checkpoint, sources, opened, dict.fromkeys(range(3), checkpoint.rows))
        for reader, memory in done.values():
            check(checkpoint, checkpoint.rows, memory, reader)
            assert {(part.tier, part.where) for part in reader.parts} == {("local", "disk")}
            assert not reader.rejected
        assert opened.shared.bytes_read == total, "1x, whatever the number of ranks"
        assert opened.shared.bytes_served == 3 * total
        assert 0 < opened.peak_bytes <= 8000
        assert not opened.shared._rows, "nothing is left in memory"


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_ranks_that_share_any_rows_all_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    """No waiting in circles: a fetch that takes 20 s fails the test, and SPACE_WAIT_S is beyond that."""
    monkeypatch.setattr(shared_reads, "SPACE_WAIT_S", 100.0)
    monkeypatch.setattr(restore, "FETCH_BYTES", data.draw(st.integers(1, 900), label="window"))
    monkeypatch.setattr(shared_reads, "LOAD_BYTES", data.draw(st.integers(1, 900), label="load"))
    checkpoint = Checkpoint.make(
        tmp_path, *data.draw(st.lists(st.lists(st.integers(1, 300), max_size=9), min_size=1, max_size=2))
    )
    rows = st.lists(st.sampled_from(checkpoint.rows), unique_by=row_key) if checkpoint.rows else st.just([])
    wanted = {rank: data.draw(rows, label=f"rank {rank}") for rank in range(data.draw(st.integers(2, 4)))}
    sources = checkpoint.copy("disk")
    with agent(checkpoint, sources, data.draw(st.integers(64, 1500), label="capacity")) as opened:
        done = restore_all(checkpoint, sources, opened, wanted)
        for rank, (reader, memory) in done.items():
            check(checkpoint, wanted[rank], memory, reader)
        assert not opened.shared._rows
        assert opened.shared.bytes_read <= sum(row.nbytes for row in checkpoint.rows)


def test_a_rank_that_never_comes_costs_one_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_reads, "SPACE_WAIT_S", 0.05)
    monkeypatch.setattr(restore, "FETCH_BYTES", 256)
    checkpoint = Checkpoint.make(tmp_path, [64] * 64)
    sources = checkpoint.copy("disk")
    with agent(checkpoint, sources, 512) as opened:
        sharers = dict.fromkeys(checkpoint.places(), (0, 1))
        reader, memory = checkpoint.reader(sources, fetch=opened.fetch_of(0)), Memory(checkpoint.rows)
        reader.read(checkpoint.rows, memory.sink_for, sharers)
        check(checkpoint, checkpoint.rows, memory, reader)
        assert opened.shared.bytes_read == 512, "what found room"
        assert opened.shared._space_wait_s == 0.0


def test_a_rank_that_is_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore, "FETCH_BYTES", 256)
    checkpoint = Checkpoint.make(tmp_path, [64] * 64)
    sources = checkpoint.copy("disk")
    with agent(checkpoint, sources, 512) as opened:
        is_full = threading.Event()
        threading.Timer(0.1, is_full.set).start()
        done = restore_all(
            checkpoint,
            sources,
            opened,
            dict.fromkeys(range(2), checkpoint.rows),
            late={1: lambda: wait_for(is_full)},
        )
        for reader, memory in done.values():
            check(checkpoint, checkpoint.rows, memory, reader)
        assert opened.shared.bytes_read == 64 * 64


def test_bad_rows_and_rows_too_large_are_left_to_the_ranks(tmp_path: Path) -> None:
    checkpoint = Checkpoint.make(tmp_path, [50, 60, 5000, 70])
    bad = row_key(checkpoint.rows[1])
    sources = checkpoint.copy("disk", [bad])
    other = checkpoint.copy("other")
    with agent(checkpoint, sources, 1024) as opened:
        sharers = dict.fromkeys(checkpoint.places(), (0, 1))
        for rank in (0, 1):
            reader = checkpoint.reader(sources, other, fetch=opened.fetch_of(rank))
            memory = Memory(checkpoint.rows)
            reader.read(checkpoint.rows, memory.sink_for, sharers)
            check(checkpoint, checkpoint.rows, memory, reader)
            assert [(p.where, p.size_bytes) for p in reader.parts] == [
                ("disk", 120),
                ("disk", 5000),
                ("other", 60),
            ]
        assert opened.shared.bytes_read == 120


def test_at_the_end_everything_is_given_up(tmp_path: Path) -> None:
    checkpoint = Checkpoint.make(tmp_path, [64] * 8)
    sources = checkpoint.copy("disk")
    with agent(checkpoint, sources, 4096) as opened:
        wants = dict.fromkeys(checkpoint.places(), (0, 1))
        answer = opened.fetch_of(0)(wants, ())
        assert len(answer.offsets) == 8
        taken = opened.fetch_of(0)(dict.fromkeys(checkpoint.places()[:1], (0, 1)), tuple(checkpoint.places()))
        assert len(taken.offsets) == 1, "rank 1 has not had it yet"
        opened._call(opened.shared.close)
        assert opened.fetch_of(1)(wants, ()).refused == tuple(wants)
        assert not Path(answer.path).exists() or "ray_ckpt-shared" not in str(Path(answer.path).readlink())


def test_who_waits_for_room_at_the_end_is_sent_away(tmp_path: Path) -> None:
    checkpoint = Checkpoint.make(tmp_path, [64] * 9)
    with agent(checkpoint, checkpoint.copy("disk"), 512) as opened:
        places = checkpoint.places()
        opened.fetch_of(0)(dict.fromkeys(places[:8], (0, 1)), ())
        threading.Timer(0.05, lambda: opened._call(opened.shared.close)).start()
        last = dict.fromkeys(places[8:], (0, 1))
        assert opened.fetch_of(0)(last, tuple(places[:8])).refused == tuple(places[8:])


@examples(100)
@given(st.integers(1, 30), st.lists(st.tuples(st.booleans(), st.integers(1, 500)), max_size=40))
def test_space_is_never_given_twice_and_none_is_lost(blocks: int, steps: list[tuple[bool, int]]) -> None:
    space = _Space(64 * blocks)
    held: list[tuple[int, int]] = []
    for is_take, number in steps:
        if is_take:
            offset = space.take(number)
            if offset is not None:
                end = offset + _aligned(number)
                assert end <= space.size_bytes
                assert all(end <= at or at + _aligned(size) <= offset for at, size in held)
                held.append((offset, number))
        elif held:
            space.give(*held.pop(number % len(held)))
    while held:
        space.give(*held.pop())
    assert space.free == [(0, space.size_bytes)]


def test_memory_that_cannot_be_mapped_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticket = ticket_of(Checkpoint.make(tmp_path, [500], [90]), {})

    def refuse(*_: object) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "no address space")

    monkeypatch.setattr(mmap, "mmap", refuse)
    before = descriptors()
    with pytest.raises(OSError, match="no address space"):
        SharedReads(ticket, threads=BriefThreads(1, "read"))
    assert descriptors() == before
