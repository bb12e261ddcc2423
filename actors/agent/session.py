"""One session on one node: the progress of the node's ranks, barriers, and the restore."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from ray_ckpt.actors.agent.node import Node
from ray_ckpt.actors.agent.restoring import NodeRestore
from ray_ckpt.core import messages as m
from ray_ckpt.core.awaited import Awaited
from ray_ckpt.core.barriers import BARRIER_S
from ray_ckpt.core.values import RankProgress, SessionPlan
from ray_ckpt.errors import CheckpointError, RunConflict, RunSuperseded

if TYPE_CHECKING:
    from ray_ckpt.actors.agent.run import NodeRun

log = logging.getLogger("ray_ckpt.agent")

MAX_BARRIERS = 16  # barriers kept so that late ranks get the result; the coordinator keeps more
BARRIER_GATHER_S = 1.0  # wait for all ranks of a node at a barrier; then the ranks present are reported
PROGRESS_GATHER_S = 0.9  # time to gather the reports of a node's ranks, one per rank and second


class _Barrier:
    """Ranks of this node at a barrier; `missing` is done when the barrier has ended for the whole group."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.is_reported = False  # all ranks of this node are at the barrier, which was reported
        self.missing: asyncio.Future[tuple[int, ...]] = asyncio.get_running_loop().create_future()


class NodeSession:
    """The reports and waits of the ranks of one session. A new session gets a new object."""

    def __init__(self, node: Node, run: NodeRun) -> None:
        self.awaited: tuple[Awaited, ...] = ()  # ranks that the group waits for, by the last answer
        self.restore = NodeRestore(node, run, self._report_awaited)
        self._node = node
        self._run = run
        self._progress: dict[int, RankProgress] = {}  # by rank, until it is forwarded
        self._barriers: dict[int, _Barrier] = {}  # by the number of the barrier
        self._met = 0  # the highest barrier that all ranks have reached

    def supersede(self) -> None:
        """End the waits of this session, because a new session begins."""
        self._end_barriers(RunSuperseded("A newer session owns this run."))
        self.restore.supersede()

    def fail(self, error: CheckpointError) -> None:
        """Raise `error` in all waits."""
        self.restore.fail(error)
        self._end_barriers(error)

    def add_progress(self, session: int, rank: int, progress: RankProgress) -> None:
        """Take the progress of a rank, and forward it together with the progress of the other ranks."""
        is_first = not self._progress
        self._progress[rank] = progress
        if is_first:
            self._node.spawn(self._forward_progress(session))

    async def _forward_progress(self, session: int) -> None:
        await asyncio.sleep(PROGRESS_GATHER_S)
        ranks, self._progress = self._progress, {}
        plan = self._run.machine.plan
        if plan is not None and plan.session == session:
            event = m.RanksProgressed(
                session_key=plan.session_key,
                ranks=ranks,
                captured=self._run.machine.incomplete(),
                met=self._met,
            )
            await self._report_awaited("ranks_progressed", event)

    async def _report_awaited(self, method: str, event: m.Event) -> None:
        """Report to the coordinator, and keep the ranks that the group waits for."""
        try:
            self.awaited = await self._node.request(method, self._run.run_uid, event)
        except CheckpointError as error:
            log.warning("the coordinator did not take %s: %s", method, error)

    async def await_barrier(self, rank: int, number: int) -> tuple[int, ...]:
        """Wait at a barrier for all ranks of the group. Return the ranks that did not come."""
        plan, here = self._run.require_plan(), self._run.require_here()
        barrier = self._barriers.get(number)
        if barrier is None:
            barrier = self._barriers[number] = _Barrier()
            while len(self._barriers) > MAX_BARRIERS:
                del self._barriers[next(iter(self._barriers))]
            self._node.spawn(self._report_met(plan, number, barrier, wait_s=BARRIER_GATHER_S))
        barrier.ranks.add(rank)
        if barrier.ranks == set(here.ranks):
            self._node.spawn(self._report_met(plan, number, barrier))
        return await asyncio.shield(barrier.missing)

    async def _report_met(
        self, plan: SessionPlan, number: int, barrier: _Barrier, *, wait_s: float = 0.0
    ) -> None:
        """Report when all ranks of this node are at the barrier, and once earlier if they take long."""
        await asyncio.wait({barrier.missing}, timeout=wait_s)
        if barrier.is_reported or barrier.missing.done():
            return
        barrier.is_reported = len(barrier.ranks) == len(self._run.require_here().ranks)
        order = (self._run.run_uid, plan.session_key, number, tuple(sorted(barrier.ranks)))
        end_s = time.monotonic() + BARRIER_S
        while True:  # ranks of other nodes may have passed, and wait for this node in the next step
            try:
                missing = await self._node.request("ranks_met", *order)
                break
            except CheckpointError as error:
                if barrier.missing.done():
                    return
                if isinstance(error, RunConflict) or time.monotonic() > end_s:
                    barrier.missing.set_exception(error)
                    return
                await asyncio.sleep(BARRIER_GATHER_S)
        if not barrier.missing.done():
            barrier.missing.set_result(missing)
            self._met = self._met if missing else max(self._met, number)

    def _end_barriers(self, error: CheckpointError) -> None:
        barriers, self._barriers = self._barriers, {}
        for barrier in barriers.values():
            if not barrier.missing.done():
                barrier.missing.set_exception(error)
