"""Tickets of one node: made once for its ranks, the whole one on demand, their memory freed at the end."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from ray_ckpt.actors.agent import restoring, shared_reads
from ray_ckpt.actors.agent.arena import ArenaMemory, make_arena
from ray_ckpt.actors.agent.manifest_memory import ManifestMemory
from ray_ckpt.actors.agent.memory import RankMemory
from ray_ckpt.actors.agent.ports import RayNodePorts
from ray_ckpt.actors.agent.prefetch import Prefetch, PrefetchRoom
from ray_ckpt.actors.agent.restore_sources import SourceFinder
from ray_ckpt.actors.agent.restoring import NodeRestore
from ray_ckpt.actors.threads import in_thread
from ray_ckpt.errors import CheckpointError, InsufficientSpace, NewerFormat, Unavailable
from ray_ckpt.format.names import fragment_file, shard_file
from ray_ckpt.plan.restore import row_key
from ray_ckpt.restore.manifest import MappedManifest
from ray_ckpt.restore.reader import RestoreTicket
from ray_ckpt.storage.local.disks import Disks
from ray_ckpt.storage.remote.tier import RemoteRef
from ray_ckpt.types import RankRestore
from tests.actors.test_restore_sources import digests, manifest_files, plan_of
from tests.support.peer_nodes import A, Nodes, both, sample
from tests.support.sample_run import SampleCheckpoint
from tests.transport.peers import KEYS, UID

DISK_THREADS = 2


class Stage:
    """The fields of the agent of A that a NodeRestore reads."""

    def __init__(self, stack: ExitStack, nodes: Nodes, saved: SampleCheckpoint, *, is_proven: bool) -> None:
        (nodes.root / A).chmod(0o700)
        self.plan = plan_of(saved, fragments=digests(saved) if is_proven else ())
        self.run: Any = SimpleNamespace(
            run_uid=UID,
            memory=RankMemory(),
            machine=SimpleNamespace(here=None),
            staging=stack.enter_context(closing(Disks([nodes.root / A]))),
            spec=SimpleNamespace(
                storage=RemoteRef(storage_path=str(nodes.root), run_name="gpt"),
                options=SimpleNamespace(prefetch="always"),
            ),
            endpoints=nodes.endpoints,
        )
        pool = stack.enter_context(ThreadPoolExecutor(DISK_THREADS))
        self.node: Any = SimpleNamespace(
            node_id=A, credentials=KEYS.credentials, disk_io=pool, prefetch_room=PrefetchRoom()
        )

    def restore(self) -> NodeRestore:
        return NodeRestore(self.node, self.run, self.plan)


@pytest.fixture
def saved(nodes: Nodes) -> SampleCheckpoint:
    found = sample(10)
    both(nodes, found)
    return found


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def path_of(ticket: RestoreTicket) -> Path:
    assert isinstance(ticket.manifest, MappedManifest)
    return Path(ticket.manifest.path)


def run_in_loop(work: Awaitable[None]) -> None:
    """Run a test, then wait for the threads that free memory, and check that no manifest is left."""

    async def main() -> None:
        await asyncio.wait_for(work, 60)
        if rest := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(rest, timeout=30)

    before = manifest_files()
    asyncio.run(main())
    assert manifest_files() == before


def test_ranks_do_not_wait_for_ever_for_a_prefetch_that_makes_progress(
    stack: ExitStack, nodes: Nodes, saved: SampleCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks give up waiting for their ticket after some minutes, and with it their restore."""
    monkeypatch.setattr(restoring, "STALL_S", 0.5)
    monkeypatch.setattr(restoring, "END_S", 0.1)
    begun, given_up = threading.Event(), threading.Event()

    def read_slowly(prefetch: Prefetch, _ticket: RestoreTicket) -> bool:
        begun.set()
        while not given_up.wait(0.005):
            prefetch.done_bytes += 1
        return False

    monkeypatch.setattr(Prefetch, "run", read_slowly)
    monkeypatch.setattr(Prefetch, "give_up", lambda _: given_up.set())
    stage = Stage(stack, nodes, saved, is_proven=True)

    async def story() -> None:
        restore = stage.restore()
        try:
            while not begun.is_set():
                await asyncio.sleep(0.01)
            assert not (await restore.ticket()).is_whole and given_up.is_set()
        finally:
            given_up.set()
            restore.close_shared()

    run_in_loop(story())


def test_ranks_share_tickets_and_the_end_frees_them(
    stack: ExitStack,
    nodes: Nodes,
    saved: SampleCheckpoint,
) -> None:
    stage = Stage(stack, nodes, saved, is_proven=True)

    async def story() -> None:
        restore = stage.restore()
        own, again = await asyncio.gather(restore.ticket(), restore.ticket())
        assert own is again and not own.is_whole
        whole = await restore.ticket(is_whole=True)
        assert whole.is_whole and len(whole.sources) == 2 * len(own.sources)
        assert await restore.ticket(is_whole=True) is whole
        named = await restore.ticket(named=True)
        paths = [path_of(ticket) for ticket in (own, whole, named)]
        assert all(path.exists() for path in paths) and paths[2].parent == Path("/dev/shm")
        restore.close_shared()
        await stage.run.memory.freeing.wait()
        assert not any(path.exists() for path in paths)
        with pytest.raises(Unavailable, match="restores nothing here"):
            await restore.fetch((9, 9), 0, {}, ())
        late = stage.restore()
        late.close_shared()
        assert not path_of(await late.ticket()).exists(), "made after the end"

    run_in_loop(story())


@pytest.mark.parametrize(("prefetch", "is_read"), [("always", True), ("never", False)])
def test_files_are_read_ahead_if_the_option_says_so(
    stack: ExitStack, nodes: Nodes, saved: SampleCheckpoint, prefetch: str, is_read: bool
) -> None:
    stage = Stage(stack, nodes, saved, is_proven=True)
    stage.run.spec.options.prefetch = prefetch

    async def story() -> None:
        restore = stage.restore()
        if restore._prefetching is not None:
            await restore._prefetching
        ticket = await restore.ticket()
        assert all(sources[0].is_verified == is_read for sources in ticket.sources.values())
        assert bool(restore.prefetched_bytes) == is_read
        named = await restore.ticket(named=True)
        assert not any(sources[0].is_verified for sources in named.sources.values()), "cannot be mapped"
        restore.close_shared()
        await stage.run.memory.freeing.wait()
        assert not restore.prefetched_bytes

    run_in_loop(story())


@pytest.mark.parametrize(
    ("num_others", "is_released", "is_read"), [(0, False, True), (3, False, False), (3, True, True)]
)
def test_ranks_of_other_runs_need_cores_too(
    stack: ExitStack,
    nodes: Nodes,
    saved: SampleCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    num_others: int,
    is_released: bool,
    is_read: bool,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    stage = Stage(stack, nodes, saved, is_proven=True)
    stage.run.spec.options.prefetch = "auto"
    stage.run.take_start = lambda plan: None
    stage.run.restore = None
    here = SimpleNamespace(ranks=range(num_others))
    other: Any = SimpleNamespace(machine=SimpleNamespace(here=here, is_released=is_released))
    idle: Any = SimpleNamespace(machine=SimpleNamespace(here=None, is_released=False))

    async def story() -> None:
        RayNodePorts(stage.node, stage.run, {"a": stage.run, "b": other, "c": idle}).begin(stage.plan)
        restore = stage.run.restore
        await restore._prefetching
        assert bool(restore.prefetched_bytes) == is_read
        restore.close_shared()
        await stage.run.memory.freeing.wait()

    run_in_loop(story())


@pytest.mark.parametrize("end", ["superseded", "restored", "unused", "released"])
def test_memory_of_a_restore_is_freed_in_a_thread(
    stack: ExitStack, nodes: Nodes, saved: SampleCheckpoint, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The kernel takes 0.2 s per GiB, in which the agent would answer nobody, nor probes of its life."""
    threads = set[str]()
    for kind in (Prefetch, ManifestMemory, ArenaMemory):

        def close(self: Any, real: Callable[[Any], None] = kind.close) -> None:
            threads.add(threading.current_thread().name)
            real(self)

        monkeypatch.setattr(kind, "close", close)
    stage = Stage(stack, nodes, saved, is_proven=True)
    ports = RayNodePorts(stage.node, stage.run, {})

    async def story() -> None:
        arena = make_arena(0, 4096, mode="single", all_bytes=1, free_bytes=1 << 30, named=False)
        stage.run.memory.arenas[0] = arena
        if end == "unused":
            monkeypatch.setattr(restoring, "PREFETCH_S", 0.0)
        restore = stage.run.restore = stage.restore()
        await restore.ticket()
        if end == "superseded":
            restore.supersede()
        elif end == "restored":
            ports.free_restore()
        elif end == "released":
            ports.free()
            assert not stage.run.memory.arenas
        await asyncio.sleep(0.05)
        await stage.run.memory.freeing.wait()
        assert not restore.prefetched_bytes
        assert len(threads) == 1 and threads.pop().startswith("ray_ckpt-free")
        if end == "released":
            assert arena.buffers[0]._is_closed, "and released at once, or when it is populated"
        restore.close_shared()
        stage.run.memory.free_arenas()
        await stage.run.memory.freeing.wait()

    run_in_loop(story())


def test_a_rank_that_only_looks_at_its_ticket_does_not_end_the_reading(
    stack: ExitStack, nodes: Nodes, saved: SampleCheckpoint
) -> None:
    """Frameworks need the step before they build the model, which takes long."""
    stage = Stage(stack, nodes, saved, is_proven=True)

    async def story() -> None:
        restore = stage.restore()
        early = await restore.ticket(early=True)
        assert restore._prefetching is not None
        await restore._prefetching
        assert restore.prefetched_bytes, "files were read after the rank had its ticket"
        assert (await restore.ticket()).session_key == early.session_key
        restore.close_shared()
        await stage.run.memory.freeing.wait()

    run_in_loop(story())


def test_a_ticket_that_did_not_fit_is_made_again(
    stack: ExitStack, nodes: Nodes, saved: SampleCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory may be short for a moment, while files are read ahead and the first ticket is made."""
    real, calls = SourceFinder.ticket, []

    def ticket(finder: SourceFinder, plan: Any) -> Any:
        calls.append(plan)
        if len(calls) == 1:
            raise InsufficientSpace("The manifest does not fit in memory.")
        return real(finder, plan)

    monkeypatch.setattr(SourceFinder, "ticket", ticket)

    async def story() -> None:
        stage = Stage(stack, nodes, saved, is_proven=False)
        stage.run.spec.options.prefetch = "never"
        restore = stage.restore()
        with pytest.raises(InsufficientSpace):
            await restore.ticket(is_whole=True)
        assert (await restore.ticket(is_whole=True)).is_whole and len(calls) == 2
        restore.close_shared()

    run_in_loop(story())


def test_without_a_proven_fragment_the_ticket_is_whole(
    stack: ExitStack,
    nodes: Nodes,
    saved: SampleCheckpoint,
) -> None:
    async def story() -> None:
        restore = Stage(stack, nodes, saved, is_proven=False).restore()
        ticket = await restore.ticket()
        assert ticket.is_whole and await restore.ticket(is_whole=True) is ticket
        restore.close_shared()

    run_in_loop(story())


def test_a_manifest_that_cannot_be_read_is_damage(
    stack: ExitStack,
    nodes: Nodes,
    saved: SampleCheckpoint,
) -> None:
    """The own fragment is intact, and is enough for ranks of the same shape."""
    for holder in nodes.endpoints:
        folder = nodes.folder(holder, saved)
        if folder.exists():
            (folder / fragment_file(1, 2)).write_bytes(b"PAR1")

    async def story() -> None:
        restore = Stage(stack, nodes, saved, is_proven=True).restore()
        own = await restore.ticket()
        assert not own.is_whole and not own.damage
        whole = await restore.ticket(is_whole=True)
        assert whole.manifest is None and "No source has manifest-00001-of-00002" in whole.damage[0]
        assert not whole.is_unreachable
        assert replace(whole, damage=()).checkpoint == own.checkpoint
        restore.close_shared()

    run_in_loop(story())


@pytest.mark.parametrize("error", [Unavailable("no source was reached"), OSError(24, "too many open files")])
def test_a_manifest_that_cannot_be_reached_now_may_be_read_later(
    stack: ExitStack, nodes: Nodes, saved: SampleCheckpoint, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    find = SourceFinder.ticket
    monkeypatch.setattr(SourceFinder, "ticket", Mock(side_effect=error))

    async def story() -> None:
        restore = Stage(stack, nodes, saved, is_proven=True).restore()
        waiting = [restore.ticket(is_whole=True) for _ in range(2)]
        for whole in await asyncio.gather(*waiting):
            assert len(whole.damage) == 1 and whole.is_unreachable
        monkeypatch.setattr(SourceFinder, "ticket", find)
        whole = await restore.ticket(is_whole=True)
        assert not whole.damage and whole.is_whole
        restore.close_shared()

    run_in_loop(story())


@pytest.mark.parametrize("error", [InsufficientSpace("no memory"), NewerFormat("written by 0.9")])
def test_what_another_step_would_not_cure_is_no_damage(
    stack: ExitStack,
    nodes: Nodes,
    saved: SampleCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    error: CheckpointError,
) -> None:
    monkeypatch.setattr(SourceFinder, "ticket", Mock(side_effect=error))

    async def story() -> None:
        restore = Stage(stack, nodes, saved, is_proven=True).restore()
        with pytest.raises(type(error)):
            await restore.ticket(is_whole=True)
        restore.close_shared()

    run_in_loop(story())


@pytest.mark.parametrize("what", ["tickets", "shared rows"])
def test_a_restore_that_hangs_takes_no_thread_from_local_work(
    stack: ExitStack, nodes: Nodes, saved: SampleCheckpoint, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A storage path or a peer may hang, while other runs of the node save."""
    reached, may_go = threading.Semaphore(0), threading.Event()
    stack.callback(may_go.set)

    def hang(*_: Any, **__: Any) -> None:
        reached.release()
        may_go.wait(30)
        raise OSError("the storage path is away")

    async def story() -> None:
        stage = Stage(stack, nodes, saved, is_proven=True)
        stage.run.spec.options.prefetch = "never"
        restores = [stage.restore() for _ in range(DISK_THREADS)]
        calls: list[asyncio.Future[Any]] = []
        if what == "shared rows":
            tickets = [await restore.ticket() for restore in restores]
            monkeypatch.setattr(shared_reads, "SourceReader", hang)
            for restore, ticket in zip(restores, tickets, strict=True):
                assert ticket.manifest is not None
                row = next(row for row in ticket.manifest.open().of_file(shard_file(0, 2)) if row.nbytes)
                fetch = restore.fetch(ticket.session_key, 0, {row_key(row): (0, 1)}, ())
                calls.append(asyncio.ensure_future(fetch))
        else:
            monkeypatch.setattr(SourceFinder, "own_ticket", hang)
            monkeypatch.setattr(SourceFinder, "ticket", hang)
            calls += [asyncio.ensure_future(restore.ticket()) for restore in restores]
        for _ in restores:
            assert await asyncio.to_thread(reached.acquire, timeout=5)
        await asyncio.wait_for(in_thread(stage.node.disk_io, int), 5)
        may_go.set()
        await asyncio.gather(*calls)
        for restore in restores:
            restore.close_shared()

    run_in_loop(story())


def test_a_request_for_rows_that_comes_after_the_end_takes_no_memory(
    stack: ExitStack, nodes: Nodes, saved: SampleCheckpoint
) -> None:
    """It may be of a rank that has died; the memory would stay until the next session."""

    async def story() -> None:
        stage = Stage(stack, nodes, saved, is_proven=True)
        restore = stage.restore()
        ticket = await restore.ticket()
        assert ticket.manifest is not None
        row = next(row for row in ticket.manifest.open().of_file(shard_file(0, 2)) if row.nbytes)
        restore.close_shared()
        with pytest.raises(Unavailable, match="restores nothing here"):
            await restore.fetch(ticket.session_key, 0, {row_key(row): (0, 1)}, ())
        await stage.run.memory.freeing.wait()

    run_in_loop(story())


def test_bad_bytes_that_the_agent_reads_ahead_are_in_the_report_of_its_ranks(
    stack: ExitStack, nodes: Nodes, saved: SampleCheckpoint
) -> None:
    shard = nodes.folder(A, saved) / shard_file(0, 2)
    shard.write_bytes(shard.read_bytes()[:-1] + bytes([shard.read_bytes()[-1] ^ 1]))

    async def story() -> None:
        stage = Stage(stack, nodes, saved, is_proven=True)
        restore = stage.restore()
        assert restore._prefetching is not None
        await restore._prefetching
        assert restore.completed(RankRestore(rank=0, bad_nodes=("x",))).bad_nodes == tuple(sorted((A, "x")))
        restore.close_shared()
        await stage.run.memory.freeing.wait()

    run_in_loop(story())
