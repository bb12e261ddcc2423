"""Shards read ahead: verified in memory that nobody can change, given up without harm, and freed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_ckpt.actors.agent import prefetch as module
from ray_ckpt.actors.agent.arena import ArenaMemory, RankArena
from ray_ckpt.actors.agent.prefetch import Prefetch, PrefetchRoom
from ray_ckpt.format.names import shard_file
from ray_ckpt.restore.reader import FileSource, FlatSink, RestoreTicket, SourceReader
from ray_ckpt.restore.sources import Mapped
from ray_ckpt.types import ARENA_PAGE_BYTES, ManifestRow
from tests.actors.test_restore_sources import digests, finder, plan_of
from tests.support.peer_nodes import A, B, Nodes, both, flip, sample
from tests.support.sample_run import SampleCheckpoint


@pytest.fixture
def saved(nodes: Nodes) -> SampleCheckpoint:
    found = sample(10)
    both(nodes, found)
    return found


@pytest.fixture
def ticket(nodes: Nodes, saved: SampleCheckpoint) -> Iterator[RestoreTicket]:
    """The ticket of the rank on A, which has all files on its disk."""
    with finder(nodes, A) as found:
        made = found.own_ticket(plan_of(saved, fragments=digests(saved)))
        assert made is not None
        with closing(made[1]):
            yield made[0]


def open_files() -> int:
    """Return the number of this process's memory files; other tests may close other descriptors now."""
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            count += str(path.readlink()).startswith("/memfd:")
    return count


def run(
    ticket: RestoreTicket, arenas: dict[int, RankArena] | None = None, room: PrefetchRoom | None = None
) -> Prefetch:
    prefetch = Prefetch(arenas or {}, room or PrefetchRoom())
    prefetch.run(ticket)
    return prefetch


def read(ticket: RestoreTicket, file: str, *, wrong_digests: bool = False) -> tuple[bytes, SourceReader]:
    """Read a whole file as a rank does; return its bytes and the reader."""
    assert ticket.manifest is not None and ticket.checkpoint is not None
    rows = ticket.manifest.open().of_file(file)
    data = np.zeros(max(row.byte_offset + row.nbytes for row in rows), np.uint8)
    reader = SourceReader(ticket.checkpoint.id, ticket.sources, credentials=ticket.credentials)

    def sink_for(row: ManifestRow) -> FlatSink:
        return FlatSink(data[row.byte_offset : row.byte_offset + row.nbytes])

    wanted = [replace(row, digest="0" * 32) for row in rows] if wrong_digests else rows
    reader.read(wanted, sink_for)
    return data.tobytes(), reader


def test_a_rank_copies_what_was_read_ahead_and_compares_nothing_again(
    ticket: RestoreTicket, saved: SampleCheckpoint
) -> None:
    with closing(run(ticket)) as prefetch:
        merged = prefetch.merged(ticket)
        assert prefetch.size_bytes > sum(map(len, (saved.files[file] for file in merged.sources)))
        for file, sources in merged.sources.items():
            first = sources[0]
            assert (first.is_verified, first.tier, first.where) == (True, "local", A), "its source is named"
            assert sources[1:] == ticket.sources[file], "the other sources stay"
            data, reader = read(merged, file)
            assert data == saved.files[file] and not reader.rejected and reader.parts[0].tier == "local"
            assert read(merged, file, wrong_digests=True)[0] == saved.files[file], "no digest is compared"
            with pytest.raises(OSError, match="Operation not permitted"):
                os.pwrite(os.open(first.path, os.O_RDWR), b"x", ARENA_PAGE_BYTES)


def test_files_come_from_the_next_source_if_the_disk_is_damaged(
    nodes: Nodes, ticket: RestoreTicket, saved: SampleCheckpoint
) -> None:
    file = shard_file(0, 2)
    flip(nodes.folder(A, saved) / file)
    with closing(run(ticket)) as prefetch:
        merged = prefetch.merged(ticket)
        assert merged.sources[file][0].is_verified and read(merged, file)[0] == saved.files[file]


def test_a_file_without_a_source_is_left_to_the_ranks_and_others_are_read_ahead(
    ticket: RestoreTicket,
) -> None:
    first, *others = ticket.sources
    with closing(run(replace(ticket, sources={**ticket.sources, first: ()}))) as prefetch:
        merged = prefetch.merged(ticket)
        assert merged.sources[first] == ticket.sources[first]
        assert others and all(merged.sources[file][0].is_verified for file in others)


def test_a_file_that_no_source_has_intact_is_left_to_the_ranks(
    nodes: Nodes, ticket: RestoreTicket, saved: SampleCheckpoint
) -> None:
    """They report the damage, and the group falls back."""
    file = shard_file(0, 2)
    for node in (A, B):
        flip(nodes.folder(node, saved) / file)
    with closing(run(ticket)) as prefetch:
        merged = prefetch.merged(ticket)
        assert merged.sources[file] == ticket.sources[file]
        assert read(merged, file)[1].damage


def test_what_other_nodes_share_is_read_ahead_with_the_whole_ticket(
    nodes: Nodes, saved: SampleCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the other node, its shard with whole tensors, and not its ranks' state files."""
    monkeypatch.setattr(module, "SMALL_TENSOR_BYTES", 1)
    with finder(nodes, A) as found:
        plan = plan_of(saved, fragments=digests(saved))
        own, whole = found.own_ticket(plan), found.ticket(plan)
        assert own is not None
        with closing(own[1]), closing(whole[1]), closing(Prefetch({}, PrefetchRoom())) as prefetch:
            assert prefetch.run(own[0]), "there is more"
            assert not prefetch.run(whole[0])
            ahead = {f for f, sources in prefetch.merged(whole[0]).sources.items() if sources[0].is_verified}
            assert ahead == {*own[0].sources, shard_file(1, 2)}


def test_memory_is_bounded_and_freed(ticket: RestoreTicket, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_files()
    prefetch = run(ticket)
    path = prefetch.merged(ticket).sources[shard_file(0, 2)][0].path
    assert Path(path).exists()
    prefetch.close()
    assert not prefetch.size_bytes and prefetch.merged(ticket) is ticket
    prefetch.run(ticket)
    assert not prefetch.size_bytes, "closed for good"
    assert ticket.checkpoint is not None
    for free_bytes in (0, 6_000, 13_000):  # a shard of 6,200 bytes, and as much for the rank's tensors
        monkeypatch.setattr(module, "available_memory_bytes", lambda free_bytes=free_bytes: free_bytes)
        with closing(run(ticket)) as empty:
            assert not empty.merged(ticket).sources[shard_file(0, 2)][0].is_verified
    monkeypatch.setattr(module, "available_memory_bytes", lambda: 40_000)
    with closing(run(ticket)) as enough:
        assert enough.merged(ticket).sources[shard_file(0, 2)][0].is_verified
    assert open_files() == before


def test_the_runs_of_a_node_share_one_bound(ticket: RestoreTicket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file takes 10,300 bytes, and what the ranks of each run will hold is 6,200 bytes."""
    file, room, free_bytes = shard_file(0, 2), PrefetchRoom(), 40_000
    monkeypatch.setattr(module, "available_memory_bytes", lambda: free_bytes - room._filled_bytes)

    def has_file(prefetch: Prefetch) -> bool:
        return prefetch.merged(ticket).sources[file][0].is_verified

    first, second, third = (run(ticket, room=room) for _ in range(3))
    assert [has_file(prefetch) for prefetch in (first, second, third)] == [True, False, False]
    assert sum(prefetch.size_bytes for prefetch in (first, second, third)) <= free_bytes / 2
    first.close()
    second.run(ticket)
    assert has_file(second) and not has_file(third)
    free_bytes = 20_000  # the ranks of the second run have their state
    second.close()
    free_bytes = 40_000
    third.run(ticket)
    assert not has_file(third), "measured once more at the end of the second"
    third.close()
    with closing(run(ticket, room=room)) as last:
        assert has_file(last), "nothing is left of the others"


def test_memory_that_the_kernel_does_not_give_is_given_back(
    ticket: RestoreTicket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOMEM, "injected")

    before = open_files()
    monkeypatch.setattr(os, "ftruncate", fail)
    with closing(run(ticket)) as prefetch:
        assert prefetch.merged(ticket) == ticket and open_files() == before
        assert not prefetch._room._taken_bytes and not prefetch._room._filled_bytes


def test_close_ends_a_prefetch_at_work(ticket: RestoreTicket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is being read when the prefetch is closed leaves no memory."""
    before = open_files()
    prefetch, began, may_go_on = Prefetch({}, PrefetchRoom()), threading.Event(), threading.Event()

    def slow_huge(fd: int, start: int, end: int) -> int:
        began.set()
        assert may_go_on.wait(10)
        return end

    monkeypatch.setattr(module, "make_huge", slow_huge)
    thread = threading.Thread(target=prefetch.run, args=(ticket,))
    thread.start()
    assert began.wait(10)
    prefetch.close()
    may_go_on.set()
    thread.join(10)
    assert not thread.is_alive() and not prefetch.size_bytes and prefetch.merged(ticket) is ticket
    assert open_files() == before


def held_writes(
    monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> tuple[threading.Semaphore, threading.Semaphore]:
    """Hold each write of a row after the first `num_rows`; return a count of writes and what lets them go."""
    seen, may_go_on, write = threading.Semaphore(0), threading.Semaphore(num_rows), module._Landing.write

    def slow_write(landing: module._Landing, view: memoryview) -> None:
        seen.release()
        assert may_go_on.acquire(timeout=10)
        write(landing, view)

    monkeypatch.setattr(module._Landing, "write", slow_write)
    return seen, may_go_on


@pytest.mark.parametrize(("num_rows", "is_kept"), [(0, False), (1, True)])
def test_ranks_wait_for_a_file_only_if_a_good_part_of_it_is_there(
    ticket: RestoreTicket, monkeypatch: pytest.MonkeyPatch, num_rows: int, is_kept: bool
) -> None:
    """The first row of a shard is two thirds of it."""
    seen, may_go_on = held_writes(monkeypatch, num_rows)
    with closing(Prefetch({}, PrefetchRoom())) as prefetch:
        thread = threading.Thread(target=prefetch.run, args=(ticket,))
        thread.start()
        for _ in range(num_rows + 1):
            assert seen.acquire(timeout=10)
        prefetch.end()
        may_go_on.release(1_000)
        thread.join(10)
        assert prefetch.merged(ticket).sources[shard_file(0, 2)][0].is_verified == is_kept


def test_a_file_that_is_half_read_can_be_given_up(
    ticket: RestoreTicket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks do not wait for the prefetch for ever, even if it makes progress; no other source is tried."""
    seen, may_go_on = held_writes(monkeypatch, 1)
    turns, extents = set[int](), SourceReader._extents

    def noted(reader: SourceReader, left: Any, turn: int) -> Any:
        turns.add(turn)
        return extents(reader, left, turn)

    monkeypatch.setattr(SourceReader, "_extents", noted)
    with closing(Prefetch({}, PrefetchRoom())) as prefetch:
        thread = threading.Thread(target=prefetch.run, args=(ticket,))
        thread.start()
        assert seen.acquire(timeout=10) and seen.acquire(timeout=10)
        prefetch.end()
        prefetch.give_up()
        may_go_on.release(1_000)
        thread.join(10)
        assert prefetch.merged(ticket) is ticket and not prefetch.size_bytes
    assert turns == {0}


def test_memory_that_can_be_changed_is_compared_in_any_case(saved: SampleCheckpoint) -> None:
    """A rank does not take the agent's word for it: the kernel has to refuse writes."""
    row = next(row for fragment in saved.fragments for row in fragment.rows if row.nbytes)
    fd = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.pwrite(fd, b"seal" + b"x" * row.nbytes, 0)
    memory = Mapped(f"/proc/self/fd/{fd}", base=4, seal=b"seal", is_verified=True)
    memory.open()
    assert not memory.is_verified
    memory.close()
    os.close(fd)


class Rank:
    """An arena with a file of a checkpoint as its capture."""

    def __init__(self, saved: SampleCheckpoint, file: str) -> None:
        data = saved.files[file]
        self.buffer = ArenaMemory(0, len(data))
        self.buffer.memory[ARENA_PAGE_BYTES : ARENA_PAGE_BYTES + len(data)] = data
        self.buffer.page.seal(saved.attempt.attempt)
        self.arena = RankArena("single", (self.buffer,))


def in_arena(nodes: Nodes, saved: SampleCheckpoint, rank: Rank) -> FileSource:
    return FileSource(tier="memory", where=A, path=rank.buffer.path)


def test_an_arena_is_verified_in_place_once_its_writer_is_gone(
    nodes: Nodes, ticket: RestoreTicket, saved: SampleCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WRITERS_S", 0.3)
    file = shard_file(0, 2)
    rank = Rank(saved, file)
    ticket = replace(
        ticket, sources={**ticket.sources, file: (in_arena(nodes, saved, rank), *ticket.sources[file])}
    )
    code = """if True:
        import mmap, sys
        with open(sys.argv[1], "r+b") as file:
            kept = mmap.mmap(file.fileno(), 0)
        print(flush=True)
        input()
    """
    with subprocess.Popen(
        [sys.executable, "-c", code, rank.buffer.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None and writer.stdout.readline()
        with closing(run(ticket, {0: rank.arena})) as prefetch:
            assert not prefetch.merged(ticket).sources[file][0].is_verified, "its writer lives"
        assert rank.buffer.page.sealed == saved.attempt.attempt, "the capture is as it was"
        writer.kill()
    with closing(run(ticket, {0: rank.arena})) as prefetch:
        merged = prefetch.merged(ticket)
        first = merged.sources[file][0]
        assert first.is_verified and first.tier == "memory" and first.path == rank.buffer.path
        assert read(merged, file, wrong_digests=True)[0] == saved.files[file]
    rank.arena.close()
    assert not Path(first.path).exists()


def mapped_arenas() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:ray_ckpt-rank")


def test_the_memory_of_an_arena_is_free_once_the_group_has_its_state(
    nodes: Nodes, ticket: RestoreTicket, saved: SampleCheckpoint
) -> None:
    """The prefetch of a session lives as long as the session; it must not keep the arenas of the last one."""
    before, file = mapped_arenas(), shard_file(0, 2)
    rank = Rank(saved, file)
    sources = {**ticket.sources, file: (in_arena(nodes, saved, rank), *ticket.sources[file])}
    prefetch = run(replace(ticket, sources=sources), {0: rank.arena})
    assert mapped_arenas() == before + 1
    prefetch.close()
    rank.arena.close()
    del rank
    assert mapped_arenas() == before and not prefetch.size_bytes


def test_a_busy_node_verifies_its_arenas_and_reads_no_file(
    nodes: Nodes, ticket: RestoreTicket, saved: SampleCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = shard_file(0, 2)
    rank = Rank(saved, file)
    sources = {**ticket.sources, file: (in_arena(nodes, saved, rank), *ticket.sources[file])}
    ticket = replace(ticket, sources=sources)
    with closing(Prefetch({0: rank.arena}, PrefetchRoom(), reads=False)) as prefetch:
        assert not prefetch.run(ticket), "nothing more with the whole ticket"
        verified = {name for name, found in prefetch.merged(ticket).sources.items() if found[0].is_verified}
        assert verified == {file} and not prefetch.size_bytes
    rank.arena.close()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert module.has_spare_cores(7) and not module.has_spare_cores(8)


def test_an_arena_with_a_wrong_byte_is_not_verified(
    nodes: Nodes, ticket: RestoreTicket, saved: SampleCheckpoint
) -> None:
    file = shard_file(0, 2)
    rank = Rank(saved, file)
    rank.buffer.memory[-1] ^= 1
    ticket = replace(
        ticket, sources={**ticket.sources, file: (in_arena(nodes, saved, rank), *ticket.sources[file])}
    )
    with closing(run(ticket, {0: rank.arena})) as prefetch:
        merged = prefetch.merged(ticket)
        assert not merged.sources[file][0].is_verified
        assert read(merged, file)[0] == saved.files[file], "from the disk"
    rank.arena.close()
