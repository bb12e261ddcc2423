"""Ranks of a group: a known state, captures into the real arena, and the real reading of a restore."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Executor
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ray_ckpt.actors.threads import in_thread
from ray_ckpt.capture.adapt import adapt
from ray_ckpt.capture.arena import Arena
from ray_ckpt.capture.items import BoxedTensor, Item
from ray_ckpt.capture.walk import walk
from ray_ckpt.config import RunOptions
from ray_ckpt.core.values import SessionKey
from ray_ckpt.format.digest import digest
from ray_ckpt.format.shard import RankLayout, build_layout
from ray_ckpt.format.tree import encode_tree
from ray_ckpt.plan.restore import RowKey
from ray_ckpt.restore.reader import RestoreTicket, SharedRows
from ray_ckpt.trainer.item_reader import ItemReader
from ray_ckpt.trainer.link import Identity, SealedShard
from ray_ckpt.types import AttemptId, RankRestore
from tests.transport.peers import UID

if TYPE_CHECKING:
    from tests.actors.prefetch_restarts.nodes import Machine

LAYERS = {f"layer{k}": (64, 272 + 8 * k) for k in range(4)}  # above 64 KiB: ranks share out who saves them
WHOLE = {**LAYERS, "bias": (16,)}
CUT = (36, 300)  # a matrix of which each rank, or each pair of ranks, holds some rows
CALL_S = 20.0  # longest call of a rank's thread


@lru_cache(maxsize=1024)
def content(state: str, key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the known values of a tensor in a state."""
    random = np.random.default_rng(int(digest(f"{state} {key}".encode())[:16], 16))
    return torch.from_numpy(random.random(shape, dtype=np.float32))


class Position:
    """Own state of each rank."""

    def __init__(self) -> None:
        self.state = ""
        self.noise = torch.zeros(40)

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state, "noise": self.noise}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state, self.noise = state["state"], state["noise"]


class Rank:
    """A process of a group. `leave` stands for its end: it drops its mappings of the agent's memory."""

    def __init__(
        self,
        machine: Machine,
        rank: int,
        world_size: int,
        node_ranks: tuple[int, ...],
        session_key: SessionKey,
        *,
        options: RunOptions,
        num_cuts: int,
        named: bool,
        pool: Executor,
    ) -> None:
        self.machine = machine
        self.identity = Identity(
            run_uid=UID,
            run_name="run",
            rank=rank,
            world_size=world_size,
            node_id=machine.node_id,
            node_ranks=node_ranks,
        )
        self.options = options
        self._session_key = session_key
        self.ticket: RestoreTicket | None = None  # the one that was restored last
        self.prefetched_bytes = 0
        self.read_bytes = 0
        self._agent = machine.require_agent()  # a new agent of the node is used after `reconnect`
        self._loop = asyncio.get_running_loop()
        self._named = named
        self._pool = pool
        self._num_cuts = num_cuts
        self._model = torch.nn.ParameterDict({name: torch.zeros(shape) for name, shape in WHOLE.items()})
        self._own = Position()
        cut = rank % num_cuts
        self._rows = slice(CUT[0] * cut // num_cuts, CUT[0] * (cut + 1) // num_cuts)
        self._part = torch.zeros(self._rows.stop - self._rows.start, CUT[1])
        box = BoxedTensor(
            shape=CUT,
            dtype=torch.float32,
            base=self._part,
            parts=(((self._rows.start, 0), self._part),),
            ranks=tuple(range(cut, world_size, num_cuts)),
        )
        objects: dict[str, Any] = {"model": self._model, "cut": {"w": box}, "own": self._own}
        self.items: dict[str, Item] = {name: adapt(name, obj, {}) for name, obj in objects.items()}
        self._arenas: list[Arena] = []
        self._num_captures = 0

    # -- the known state -------------------------------------------------------------------------------

    def _expected(self, state: str, rank: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return live and known values by name; `rank` is the one whose own state is expected."""
        found = {name: (self._model[name].data, content(state, name, WHOLE[name])) for name in WHOLE}
        found["cut"] = self._part, content(state, "cut", CUT)[self._rows]
        found["own"] = self._own.noise, content(state, f"own {rank}", (40,))
        return found

    def train(self, state: str) -> None:
        """Set the live state."""
        rank = self.identity.rank
        for live, known in self._expected(state, rank).values():
            live.copy_(known)
        self._own.state = f"{state} {rank}"

    def differences(self, state: str, saved_ranks: int) -> list[str]:
        """Return the names of what differs from a known state that `saved_ranks` ranks have saved."""
        rank = self.identity.rank if self.identity.rank < saved_ranks else 0
        found = self._expected(state, rank)
        wrong = [name for name, (live, known) in found.items() if not torch.equal(live, known)]
        return wrong + ["position"] * (self._own.state != f"{state} {rank}")

    # -- saves -----------------------------------------------------------------------------------------

    async def capture(
        self, attempt: AttemptId, session_key: SessionKey, *, share: float = 1.0
    ) -> SealedShard | None:
        """Copy the state into the arena; with a `share` below 1 end in the middle, before the seal."""
        identity = self.identity
        walked = walk(self.items, rank=identity.rank, world_size=identity.world_size)
        live = {each.slice_key: each for each in walked.owned(identity.rank, identity.node_ranks)}
        layout = RankLayout(shards=(build_layout(each.slice for each in live.values()),))
        if not self._arenas:
            grant = await self._agent.open_arena(
                UID, session_key, identity.rank, layout.size_bytes, self._named
            )
            self._arenas = [Arena(path) for path in grant.paths]
        buffer = self._num_captures % len(self._arenas)
        self._num_captures += 1
        arena = self._arenas[buffer]
        if arena.layout is None:
            arena.lay_out(layout)
        arena.begin()
        pairs = list(zip(layout.slices, arena.views, strict=True))
        for placed, view in pairs[: int(len(pairs) * share)]:
            view.copy_(live[placed.slice.key, placed.slice.offset].tensor)
        if share < 1.0:
            return None
        arena.seal(attempt.attempt)
        tree = {"step": attempt.step, "world_size": identity.world_size, "items": dict(walked.trees)}
        return SealedShard(
            attempt=attempt,
            rank=identity.rank,
            state=encode_tree(tree),
            replicated=(),
            metrics=None,
            buffer=buffer,
            layout=layout,
            layout_signature=layout.signature,
            mesh="",
            stall_s=0.0,
            capture_s=0.0,
        )

    async def save(self, attempt: AttemptId, session_key: SessionKey) -> None:
        """Hand a capture over; return when the memory may be used again."""
        shard = await self.capture(attempt, session_key)
        assert shard is not None
        await self._agent.seal(UID, shard)

    def capture_on(self) -> None:
        """Begin another capture, as a process does that has not noticed the end of its group."""
        for arena in self._arenas:
            arena.begin()
            for view in arena.views:
                view.fill_(-1.0)

    def leave(self) -> None:
        """End the process: its memory is unmapped."""
        self._arenas = []

    def reconnect(self) -> None:
        """Use the new agent of this node, which has no memory of this rank yet."""
        self._agent, self._arenas, self._num_captures = self.machine.require_agent(), [], 0

    # -- the restore -----------------------------------------------------------------------------------

    async def restore(self) -> None:
        """Restore with the whole group, and load the state; raises what the agent raises."""
        ticket = await self._agent.get_ticket(UID, self._session_key, self._named)
        while True:
            report, load = await in_thread(self._pool, ItemReader(self, self.items).read_all, ticket)  # type: ignore[arg-type]
            self._count(report)
            older = await self._agent.report_restored(UID, ticket.session_key, report, self._named)
            if older is None:
                break
            ticket = older
        load()
        self.ticket = ticket

    def _count(self, report: RankRestore) -> None:
        self.read_bytes += sum(part.size_bytes for part in report.parts)
        self.prefetched_bytes += sum(part.size_bytes for part in report.parts if part.is_prefetched)

    def whole_ticket(self, session_key: SessionKey) -> RestoreTicket:
        """Return the whole ticket; called in a thread."""
        called = self._agent.get_whole_ticket(UID, session_key, self._named)
        return asyncio.run_coroutine_threadsafe(called, self._loop).result(CALL_S)

    def fetch(
        self, session_key: SessionKey, wants: Mapping[RowKey, tuple[int, ...]], taken: tuple[RowKey, ...]
    ) -> SharedRows:
        """Return rows that ranks of the node share; called in a thread."""
        called = self._agent.fetch(UID, session_key, self.identity.rank, wants, taken)
        return asyncio.run_coroutine_threadsafe(called, self._loop).result(CALL_S)
