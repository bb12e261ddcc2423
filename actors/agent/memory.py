"""Memory that the ranks of this node map: arenas to capture into, and the page of the save signal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from functools import partial
from weakref import WeakSet

from ray_ckpt.actors.agent.arena import (
    COPIES,
    ArenaMemory,
    RankArena,
    ShmRoom,
    SignalPage,
    choose_mode,
    make_arena,
)
from ray_ckpt.actors.threads import BriefThreads, in_thread
from ray_ckpt.errors import InsufficientSpace, Unavailable
from ray_ckpt.storage.local.memory import available_memory_bytes
from ray_ckpt.trainer.link import SealedShard


class Freeing:
    """Memory that a thread frees, because the kernel takes 0.2 s per GiB, and ranks wait for answers."""

    def __init__(self) -> None:
        self._threads = BriefThreads(1, "ray_ckpt-free")
        self._last: asyncio.Future[None] | None = None

    def add(self, close: Callable[[], None]) -> None:
        """Call `close()` in the thread. It must drop all references to the memory."""
        self._last = asyncio.ensure_future(self._threads.run(close))

    async def wait(self) -> None:
        """Wait until all memory that was added is free."""
        if self._last is not None:
            await asyncio.wait({self._last})


class RankMemory:
    """Arenas by rank. In all methods, `named` means that the memory has to be in /dev/shm; see `arena`."""

    def __init__(self, node: WeakSet[RankMemory] | None = None) -> None:
        """Join the memories of the other runs of the node, which share its free memory."""
        self.arenas: dict[int, RankArena] = {}
        self.freeing = Freeing()
        self._node = WeakSet[RankMemory]() if node is None else node
        self._node.add(self)
        self._reserved: dict[int, int] = {}  # size of each rank's arena, made or not yet made
        self._copies = 1  # buffers of each arena that is not made yet
        self._opening = asyncio.Lock()  # one arena at a time, so that free memory is measured right
        self._page: SignalPage | None = None  # made at the first request
        self._signal = 0  # value shown on the page; 0: none

    def reserve(
        self,
        rank: int,
        size_bytes: int,
        *,
        ranks: Collection[int],
        mode: str,
        named: bool,
        prefetched_bytes: int = 0,
    ) -> None:
        """Raise InsufficientSpace unless the arenas of all `ranks` of the node will fit.

        `prefetched_bytes` of memory will be free before an arena is opened.
        """
        self._reserved = {k: size for k, size in self._reserved.items() if k in ranks} | {rank: size_bytes}
        try:
            chosen = choose_mode(
                mode,
                all_bytes=sum(self._reserved.values()),
                free_bytes=self._free_bytes() + prefetched_bytes,
                ranks=len(self._reserved),
                room=ShmRoom.measure(self._named_bytes()) if named else None,
            )
        except InsufficientSpace:
            del self._reserved[rank]  # its group ends, and takes no memory from other runs
            raise
        self._copies = COPIES[chosen]

    async def open(
        self,
        rank: int,
        size_bytes: int,
        *,
        mode: str,
        named: bool,
        is_current: Callable[[], bool],
        pool: Executor,
    ) -> RankArena:
        """Make the arena of a rank; it replaces the rank's earlier arena.

        InsufficientSpace if the arena does not fit. Unavailable if another caller has opened the rank's arena
        in the meantime, or if `is_current()` is false once the arena is made.
        """
        if rank in self.arenas:
            self.freeing.add(partial(_close_all, {rank: self.arenas.pop(rank)}))
        self._reserved[rank] = size_bytes
        async with self._opening:
            await self.freeing.wait()
            make = partial(
                make_arena,
                rank,
                size_bytes,
                mode=mode,
                all_bytes=sum(self._reserved.values()),
                free_bytes=self._free_bytes(),
                named=named,
                ranks=len(self._reserved),
                taken_bytes=self._named_bytes(),
            )
            made = asyncio.ensure_future(in_thread(pool, make))
            try:
                arena = await asyncio.shield(made)
            except asyncio.CancelledError:
                made.add_done_callback(_close_unused)
                raise
            if rank in self.arenas or not is_current():
                arena.close()
                raise Unavailable("This rank's memory was opened again meanwhile, or its session is over.")
            self.arenas[rank] = arena
        arena.start_populating()
        return arena

    def signal_page(self, *, named: bool) -> str:
        """Return the path of the page that shows the save signal."""
        if self._page is None or (named and self._page.path.startswith("/proc/")):
            old, self._page = self._page, SignalPage(named=named)
            self._page.show(self._signal)
            if old is not None:
                old.close()
        return self._page.path

    def show(self, signal: int) -> None:
        """Show the step after which all ranks save; 0 means none."""
        self._signal = signal
        if self._page is not None:
            self._page.show(signal)

    def buffer_of(self, shard: SealedShard) -> ArenaMemory | None:
        """Return the buffer that holds a capture, or None if this agent does not have the buffer."""
        arena = self.arenas.get(shard.rank)
        if arena is None or shard.buffer >= len(arena.buffers):
            return None
        return arena.buffers[shard.buffer]

    def take_layout(self, shard: SealedShard) -> bool:
        """Keep the layout of a capture. Return False if this agent lacks the memory or its layout.

        Both are missing if this agent was started after the rank got its arena, or if a message was lost.
        """
        buffer = self.buffer_of(shard)
        if buffer is None:
            return False
        if shard.layout is not None:
            buffer.layout = shard.layout
        return buffer.layout is not None and buffer.layout.signature == shard.layout_signature

    def free_arenas(self, *, is_left: bool = False) -> None:
        """Free all arenas, in a thread; with `is_left`, also what the ranks have reserved, which are gone."""
        arenas = dict(self.arenas)
        self.arenas.clear()
        self.freeing.add(partial(_close_all, arenas))
        if is_left:
            self._reserved = {}

    def close(self) -> None:
        """Free all memory at once; no rank uses the memory any more."""
        _close_all(self.arenas)
        self._reserved = {}
        if self._page is not None:
            self._page.close()
            self._page = None

    def _free_bytes(self) -> int:
        """Return the bytes that arenas of the run may take, including the bytes that they already take.

        Groups of several runs begin in the same seconds, so what the arenas of the others will take is not
        free, although their pages are allocated later.
        """
        own_bytes = sum(arena.populated_bytes for arena in self.arenas.values())
        others_bytes = sum(other._unfilled_bytes() for other in self._node if other is not self)
        return max(0, available_memory_bytes() + own_bytes - others_bytes)

    def _unfilled_bytes(self) -> int:
        """Return the bytes that arenas of the run will take beyond those that they already take."""
        not_made = sum(size for rank, size in self._reserved.items() if rank not in self.arenas)
        return self._copies * not_made + sum(arena.unfilled_bytes for arena in self.arenas.values())

    def _named_bytes(self) -> int:
        """Return the bytes that arenas of the run take in /dev/shm."""
        return sum(arena.named_bytes for arena in self.arenas.values())


def _close_all(arenas: dict[int, RankArena]) -> None:
    while arenas:
        arenas.popitem()[1].close()


def _close_unused(made: asyncio.Future[RankArena]) -> None:
    """Free the memory of a call that was cancelled."""
    if not made.cancelled() and made.exception() is None:
        made.result().close()
