"""The restore of one session on one node: the ticket, and rows that ranks share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ray_ckpt.actors.agent.manifest_memory import ManifestMemory
from ray_ckpt.actors.agent.node import Node
from ray_ckpt.actors.agent.prefetch import Prefetch, has_spare_cores
from ray_ckpt.actors.agent.priority import yield_to_training
from ray_ckpt.actors.agent.restore_sources import SourceFinder
from ray_ckpt.actors.agent.shared_reads import SharedReads
from ray_ckpt.actors.threads import BriefThreads
from ray_ckpt.core.values import SessionKey, SessionPlan
from ray_ckpt.errors import CheckpointError, InsufficientSpace, NewerFormat, Unavailable, named_text
from ray_ckpt.plan.restore import RowKey
from ray_ckpt.restore.reader import RestoreTicket, SharedRows
from ray_ckpt.types import RankRestore

if TYPE_CHECKING:
    from ray_ckpt.actors.agent.run import NodeRun

log = logging.getLogger("ray_ckpt.agent")

RESTORE_THREADS = 3  # of a restore: for the own ticket, the whole one, and rows that ranks share
PREFETCH_S = 600.0  # without a request for a ticket; longer than Ray waits for a group's processes
END_S = 120.0  # to read files ahead that are begun when ranks want their ticket: they wait OPEN_S for it
STALL_S = 5.0  # without progress of a prefetch; then the ranks read by themselves, from other sources too


class NodeRestore:
    """The restore of one session on this node."""

    def __init__(self, node: Node, run: NodeRun, plan: SessionPlan, *, num_others: int = 0) -> None:
        """Begin to read ahead if the option says so; other runs have `num_others` ranks on this node."""
        self._node = node
        self._run = run
        self._plan = plan
        # Separate threads for each restore, since a peer or the storage path may hang; at the priority of the
        # ranks, which wait for them.
        self._threads = BriefThreads(RESTORE_THREADS, "ray_ckpt-restore")
        self._tickets: dict[tuple[bool, bool], asyncio.Task[RestoreTicket | None]] = {}
        self._newest: RestoreTicket | None = None  # the ticket that has the largest part of the manifest
        self._memories: list[ManifestMemory] = []
        self._is_freed = False
        self._shared: SharedReads | None = None
        self._is_superseded = False
        self._prefetching: asyncio.Task[None] | None = None
        self._unused: asyncio.TimerHandle | None = None  # frees what was prefetched; see `_keep_prefetched`
        mode, num_ranks = run.spec.options.prefetch, _num_ranks(plan, node.node_id)
        reads = mode == "always" or (mode == "auto" and has_spare_cores(num_ranks + num_others))
        self._free = run.memory.freeing.add
        self._prefetch = Prefetch(run.memory.arenas, node.prefetch_room, reads=reads)
        if plan.resume is not None and num_ranks and mode != "never":
            self._prefetching = asyncio.ensure_future(self._run_prefetch())
            self._keep_prefetched()

    async def ticket(
        self, *, named: bool = False, is_whole: bool = False, early: bool = False
    ) -> RestoreTicket:
        """Return the ticket of this node's ranks; the manifest is fetched once for all these ranks.

        Unless the whole ticket is wanted, the ticket may have this node's own fragment only. With `named` the
        manifest is a file in /dev/shm, and nothing is prefetched: the ranks cannot map the agent's memory.
        Reading ahead ends with this call, unless the restore comes later: then it is `early`.
        """
        if early:
            self._keep_prefetched()
        else:
            await self._end_prefetch()
        ticket = None if is_whole else await self._shared_ticket(named, False)
        if ticket is None:
            ticket = await self._shared_ticket(named, True)
        assert ticket is not None
        return ticket if named or early else self._prefetch.merged(ticket)

    @property
    def prefetched_bytes(self) -> int:
        """Memory that prefetched files take until the ranks have restored."""
        return self._prefetch.size_bytes

    def completed(self, report: RankRestore) -> RankRestore:
        """Return a rank's report with the nodes whose bad bytes the agent has read for its ranks."""
        shared = self._shared.bad_nodes if self._shared is not None else set[str]()
        found = self._prefetch.bad_nodes | shared | set(report.bad_nodes)
        return replace(report, bad_nodes=tuple(sorted(found)))

    async def _run_prefetch(self) -> None:
        """Read ahead what the ranks of this node will most likely restore; see `Prefetch`."""
        threads = BriefThreads(1, "ray_ckpt-prefetch", yield_to_training)
        try:
            ticket = await self._shared_ticket(False, False)
            await self._run.memory.freeing.wait()  # or too little memory would be found
            if ticket is not None and await threads.run(self._prefetch.run, ticket):
                whole = await self._shared_ticket(False, True)
                assert whole is not None
                await threads.run(self._prefetch.run, whole)
        except Exception:
            log.exception("nothing more is read ahead; the ranks read by themselves")

    def _keep_prefetched(self) -> None:
        """Keep what is prefetched for PREFETCH_S from now on."""
        if self._unused is not None:
            self._unused.cancel()
        if not self._is_freed:
            self._unused = asyncio.get_running_loop().call_later(PREFETCH_S, self._free, self._prefetch.close)

    async def _end_prefetch(self) -> None:
        """Wait for the files that are being read ahead, as long as there is progress, and up to END_S."""
        self._prefetch.end()
        self._keep_prefetched()
        task, seen = self._prefetching, -1
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + END_S
        while task is not None and not task.done() and self._prefetch.done_bytes != seen:
            if loop.time() > deadline_s:
                self._prefetch.give_up()
                break
            seen = self._prefetch.done_bytes
            await asyncio.wait({task}, timeout=STALL_S)

    async def _shared_ticket(self, named: bool, is_whole: bool) -> RestoreTicket | None:
        key = (named, is_whole)
        if key not in self._tickets:
            self._tickets[key] = asyncio.ensure_future(self._make_ticket(named=named, is_whole=is_whole))
        making = self._tickets[key]
        is_final = False
        try:
            ticket = await asyncio.shield(making)
            is_final = ticket is None or not ticket.is_unreachable
        finally:
            if making.done() and not is_final and self._tickets.get(key) is making:
                del self._tickets[key]  # a rank that asks again gets what is reached, or fits, then
        return ticket

    async def fetch(
        self,
        session_key: SessionKey,
        rank: int,
        wants: Mapping[RowKey, tuple[int, ...]],
        taken: tuple[RowKey, ...],
    ) -> SharedRows:
        """Read rows that several ranks of this node want, once for all of them; see `SharedReads.fetch`."""
        ticket = self._newest
        if (
            ticket is None
            or ticket.checkpoint is None
            or ticket.session_key != session_key
            or self._is_superseded
            or self._is_freed
        ):
            raise Unavailable(f"Session {session_key[1]} restores nothing here.")
        if self._shared is None:
            try:
                self._shared = SharedReads(ticket, threads=self._threads)
            except OSError as error:
                raise Unavailable(f"The manifest cannot be mapped: {error}.") from error
        return await self._shared.fetch(rank, wants, taken)

    def supersede(self) -> None:
        """End the restore, because a new session begins."""
        self._is_superseded = True
        self.close_shared()

    def close_shared(self) -> None:
        """Free the memory that ranks map: shared rows, prefetched files, and the manifest.

        A thread frees most of it; `RankMemory.freeing` waits for that.
        """
        self._is_freed = True
        self._free(self._prefetch.close)
        if self._unused is not None:
            self._unused.cancel()
        if self._shared is not None:
            self._shared.close()
            self._shared = None
        memories, self._memories = self._memories, []
        self._free(partial(_close_all, memories))

    async def _make_ticket(self, *, named: bool, is_whole: bool) -> RestoreTicket | None:
        """Make a ticket; None if this node's own fragment is wanted and does not suffice."""
        run, plan = self._run, self._plan
        ticket = partial(RestoreTicket, session_key=plan.session_key)
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
                named=named,
            )
            make = finder.ticket if is_whole else finder.own_ticket
            found = await self._threads.run(make, plan)
        except (OSError, CheckpointError) as error:  # handled like a bad slice: the whole group falls back
            if not is_whole:
                log.warning("this node's own fragment cannot be used: %s", error_text(error))
                return None
            if isinstance(error, InsufficientSpace | NewerFormat):
                raise  # no damage: an older checkpoint would need as much, or the newer version can read it
            damage = (f"manifest of step {plan.resume.checkpoint.step}: {error_text(error)}",)
            unreachable = isinstance(error, OSError | Unavailable)
            return ticket(checkpoint=plan.resume.checkpoint, damage=damage, is_unreachable=unreachable)
        return None if found is None else self._taken(*found)

    def _taken(self, ticket: RestoreTicket, memory: ManifestMemory) -> RestoreTicket:
        """Keep the memory of a ticket until `close_shared`."""
        if self._is_freed:
            memory.close()  # no rank waits for this ticket any more
            return ticket
        self._memories.append(memory)
        if self._newest is None or not self._newest.is_whole:
            self._newest = ticket
            if self._shared is not None:
                self._shared.use(ticket)
        return ticket


def _close_all(memories: list[ManifestMemory]) -> None:
    while memories:
        memories.pop().close()


def _num_ranks(plan: SessionPlan, node_id: str) -> int:
    return next((len(node.ranks) for node in plan.nodes if node.node_id == node_id), 0)


def error_text(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else named_text(error)
