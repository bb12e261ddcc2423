"""The restore of one session on one node: the ticket, rows that ranks share, and the group's decision."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ray_ckpt.actors.agent.node import Node
from ray_ckpt.actors.agent.restore_sources import SourceFinder
from ray_ckpt.actors.agent.shared_reads import SharedReads
from ray_ckpt.actors.threads import in_thread
from ray_ckpt.core import messages as m
from ray_ckpt.core.values import SessionPlan
from ray_ckpt.errors import CheckpointError, RunSuperseded, Unavailable, named_text
from ray_ckpt.plan.restore import RowKey
from ray_ckpt.restore.reader import RestoreTicket, SharedRows
from ray_ckpt.types import RankRestore

if TYPE_CHECKING:
    from ray_ckpt.actors.agent.run import NodeRun

RESTORED_AGAIN_S = 2.0  # between a node's reports of its ranks that have restored and wait for others


class NodeRestore:
    """The restore of one session on this node.

    `report_awaited(method, event)` calls the coordinator, and keeps the ranks that the group waits for.
    """

    def __init__(
        self, node: Node, run: NodeRun, report_awaited: Callable[[str, m.Event], Awaitable[None]]
    ) -> None:
        self._node = node
        self._run = run
        self._report_awaited = report_awaited
        self._restored: dict[int, RankRestore] = {}
        self._ticket: asyncio.Task[RestoreTicket] | None = None
        self._shared: SharedReads | None = None
        self._is_superseded = False
        # True: all ranks have restored; False: a new session has begun
        self._decision: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def ticket(self) -> RestoreTicket:
        """Return the ticket of this node's ranks; the manifest is fetched once for all these ranks."""
        if self._ticket is None:
            self._ticket = asyncio.ensure_future(self._make_ticket())
        return await asyncio.shield(self._ticket)

    async def fetch(
        self,
        session: int,
        rank: int,
        wants: Mapping[RowKey, tuple[int, ...]],
        taken: tuple[RowKey, ...],
    ) -> SharedRows:
        """Read rows that several ranks of this node want, once for all of them; see `SharedReads.fetch`."""
        ticket = await self.ticket()
        if ticket.checkpoint is None or ticket.session != session or self._is_superseded:
            raise Unavailable(f"Session {session} restores nothing here.")
        if self._shared is None:
            self._shared = SharedReads(ticket, pool=self._node.disk_io)
        return await self._shared.fetch(rank, wants, taken)

    async def wait(self, session: int, report: RankRestore) -> bool:
        """Report that a rank has restored, and wait for all ranks of the group.

        Return False if a new session has begun instead.
        """
        plan, here = self._run.require_plan(), self._run.machine.here
        if here is None or plan.session != session:
            raise RunSuperseded("A newer session owns this run.")
        self._restored[report.rank] = report
        if len(self._restored) == len(here.ranks):
            self._node.spawn(self._report_restored(plan, tuple(self._restored.values())))
        if len(self._restored) == 1:
            self._node.spawn(self._report_waiting(plan))
        return await asyncio.shield(self._decision)

    def supersede(self) -> None:
        """End the restore, because a new session begins."""
        self._is_superseded = True
        self.close_shared()
        if not self._decision.done():
            self._decision.set_result(False)

    def fail(self, error: CheckpointError) -> None:
        if not self._decision.done():
            self._decision.set_exception(error)

    def close_shared(self) -> None:
        """Free the memory of shared rows."""
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    async def _make_ticket(self) -> RestoreTicket:
        run, plan = self._run, self._run.require_plan()
        ticket = partial(RestoreTicket, session=plan.session, epoch=plan.epoch)
        if plan.resume is None:
            return ticket(checkpoint=None)
        try:
            finder = SourceFinder(
                run_uid=run.run_uid,
                node_id=self._node.node_id,
                credentials=self._node.credentials(run.run_uid),
                arenas=run.memory.arenas,
                staging=run.staging,
                storage=run.spec.storage,
                endpoints=run.endpoints,
            )
            return await in_thread(self._node.disk_io, finder.ticket, plan)
        except (OSError, CheckpointError) as error:  # handled like a bad slice: the whole group falls back
            damage = (f"manifest of step {plan.resume.checkpoint.step}: {error_text(error)}",)
            return ticket(checkpoint=plan.resume.checkpoint, damage=damage)

    async def _report_waiting(self, plan: SessionPlan) -> None:
        """Report the ranks that have restored, repeatedly while they wait for others."""
        while True:
            await asyncio.wait({self._decision}, timeout=RESTORED_AGAIN_S)
            if self._decision.done():
                return
            ranks = tuple(sorted(self._restored))
            event = m.RanksRestored(session_key=plan.session_key, node_id=self._node.node_id, ranks=ranks)
            await self._report_awaited("ranks_restored", event)

    async def _report_restored(self, plan: SessionPlan, ranks: tuple[RankRestore, ...]) -> None:
        """Report that all ranks of this node have restored, and take the group's decision."""
        order = (plan.run_uid, plan.session_key, self._node.node_id, ranks)
        try:
            go = await self._node.request("node_restored", *order)
        except CheckpointError as error:
            self.fail(error)
            return
        if go and not self._decision.done():
            self.close_shared()
            self._run.memory.close_arenas()  # processes of the last session may still write into its arenas
            self._decision.set_result(True)


def error_text(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else named_text(error)
