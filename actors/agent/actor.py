"""The node agent: a Ray actor with a node's arenas and staging folders; writes, copies and serves shards.

Each node has one agent: a detached actor, pinned to the node. The host of each run (`engine.NodeHost`) makes
the decisions, and `RayNodePorts` carries them out. The coordinator and this node's ranks call the methods of
this class.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from functools import partial

import ray

from ray_ckpt.actors.agent.coding import compute
from ray_ckpt.actors.agent.files import inventory, scrub, upload
from ray_ckpt.actors.agent.item_files import upload_items
from ray_ckpt.actors.agent.node import Node
from ray_ckpt.actors.agent.peer_files import PeerFiles
from ray_ckpt.actors.agent.relay import OrderRelay, RelayEndpoints
from ray_ckpt.actors.agent.run import require
from ray_ckpt.actors.agent.runs import NodeRuns
from ray_ckpt.actors.messages import (
    AgentCard,
    GroupCard,
    OpenRun,
    PutAwayRun,
    RunSpec,
    ServiceCard,
    SessionStart,
)
from ray_ckpt.actors.threads import in_thread
from ray_ckpt.config import ADDRESS_ENV, transport_ports
from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.awaited import Awaited
from ray_ckpt.core.ownership import RunMark
from ray_ckpt.core.step_states import keep
from ray_ckpt.core.values import (
    DiskSpace,
    Inventory,
    ItemsPart,
    RankProgress,
    Salvage,
    ScrubResult,
    SessionKey,
)
from ray_ckpt.engine.node_ports import (
    AskAwaited,
    EndAwaited,
    OutcomeAwaited,
    RankMet,
    RankProgressed,
    RankRestored,
    SurvivorCame,
)
from ray_ckpt.errors import CheckpointError, ConfigError, Unavailable
from ray_ckpt.format import zstd
from ray_ckpt.format.save_signal import SaveSignal
from ray_ckpt.plan.restore import RowKey
from ray_ckpt.preemption.notice import Notice
from ray_ckpt.restore.reader import RestoreTicket, SharedRows
from ray_ckpt.storage.local.scrub import verify_stored
from ray_ckpt.trainer.link import ArenaGrant, SealedShard, StepState
from ray_ckpt.transport.credentials import ServiceKeys
from ray_ckpt.transport.server import PeerServer
from ray_ckpt.types import AttemptId, Level, RankRestore

log = logging.getLogger("ray_ckpt.agent")

MAX_ANNOTATING = 64  # waiting annotations of a run; each holds a call and the call's metrics
OUTCOME_SLACK_S = 60.0  # added to the time-outs of an attempt; bounds a call that gets no answer
EXIT_AFTER_S = 0.5  # so that the answer is sent before the process ends


class NodeAgent(RelayEndpoints):
    """Endpoints of a node. Orders of the coordinator carry an epoch; a stale epoch raises Fenced."""

    def __init__(self, node_id: str, keys: ServiceKeys, service: str) -> None:
        actual = ray.get_runtime_context().get_node_id()
        if actual != node_id:
            raise RuntimeError(f"agent of node {node_id} was started on {actual}")
        self._service = service
        self._node = Node(node_id, keys)
        self._runs = NodeRuns(self._node)
        self._orders, self._reports = OrderRelay(self._node.agents), self._node.reports
        self._server: PeerServer | None = None
        self._problem: ConfigError | None = None  # error in this node's environment, raised by `card`
        try:
            self._server = PeerServer(
                os.environ.get(ADDRESS_ENV) or ray.util.get_node_ip_address(),
                keys=keys,
                files=PeerFiles(self._runs.open),
                ports=transport_ports(),
            )
        except ConfigError as error:
            self._problem = error

    async def card(self) -> AgentCard:
        if self._server is None:
            raise self._problem or Unavailable("The agent has no server.")
        endpoint, staging = self._server.endpoint, self._runs.staging_text()
        return AgentCard(node_id=self._node.node_id, endpoint=endpoint, staging=staging)

    async def describe(self) -> ServiceCard:
        """Return the service and the runs of this agent, for a restarted coordinator."""
        return ServiceCard(keys=self._node.keys, service=self._service, runs=self._runs.opened())

    async def exit(self, orders: Mapping[str, n.ExitOrdered] | None) -> None:
        """End this process, so that the autoscaler may remove the node, which holds nothing needed.

        The memory in /dev/shm is given back; ranks that have mapped it keep it.
        `orders` are those of the coordinator's runs, by run uid; None ends the agent in any case. RunInUse if
        a group is at work here of which the coordinator does not know; Fenced if a run here obeys a newer
        coordinator.
        """
        if orders is not None:
            for run_uid, run in list(self._runs.open.items()):
                unknown = n.ExitOrdered(session_key=(0, 0), epoch=run.machine.epoch)
                await run.obey(orders.get(run_uid, unknown))
        log.info("nothing here is needed any more; this agent ends")
        for run in list(self._runs.open.values()):
            run.host.ports.free()
        asyncio.get_running_loop().call_later(EXIT_AFTER_S, os._exit, 0)

    # -- the coordinator's calls: runs and sessions ------------------------------------------------------

    async def read_marks(self, spec: RunSpec) -> tuple[RunMark, ...]:
        """Return the marks on this node's disk of runs of this name and storage path."""
        return await self._runs.read_marks(spec)

    async def open_run(self, order: OpenRun) -> Inventory:
        """Check the staging folder and the storage path of a run, and return the run's files on this node."""
        async with self._runs.turn(order.run_uid):  # `put_away` of the run may be at work
            run = await self._runs.take_up(order.spec, order.run_uid)
            run.use(order.spec)
            await run.obey(n.EpochSeen(epoch=order.epoch))
        self._node.watch_cloud()
        if order.spec.options.compress is not None:
            zstd.check_installed()
        await run.check_threads.run(run.check_storage, order.nonce, self._node.node_id)
        return await self.inventory(order.run_uid)

    async def put_away(self, order: PutAwayRun) -> bool:
        """Delete all files of a finished run except `order.kept`, and close the run.

        Fenced if the order is stale; OSError if the disk fails.
        """
        async with self._runs.turn(order.run_uid):
            run = await self._runs.take_up(order.spec, order.run_uid)
            await run.obey(n.RunPutAway(kept=order.kept, epoch=order.epoch))
        return True

    async def inventory(self, run_uid: str) -> Inventory:
        return await in_thread(self._node.disk_io, inventory, self._runs.get(run_uid))

    async def disk(self, run_uid: str) -> DiskSpace:
        """Return the space of the file systems of the run's staging folders."""
        staging = self._runs.get(run_uid).staging
        return DiskSpace(free_bytes=staging.free_bytes(), total_bytes=staging.total_bytes())

    async def start_session(self, start: SessionStart) -> None:
        plan, endpoints = start.unpack()
        run = self._runs.get(plan.run_uid)
        run.starts[plan.session_key] = (start.spec, endpoints)
        try:
            await run.obey(n.SessionStarted(plan=plan, node_id=self._node.node_id, epoch=start.epoch))
            if run.machine.plan == plan:  # the order may be repeated, with other addresses
                run.take_start(plan)
                self._node.route.use(start.relay)
        finally:
            run.starts.pop(plan.session_key, None)

    async def coordinator_returned(self, run_uid: str, epoch: int) -> None:
        await self._runs.get(run_uid).obey(n.CoordinatorReturned(epoch=epoch))

    async def end_session(
        self, run_uid: str, session_key: SessionKey, error: CheckpointError, epoch: int
    ) -> None:
        """End the session of this node's ranks: the run has another owner."""
        order = n.SessionEnded(session_key=session_key, error=error, epoch=epoch)
        await self._runs.get(run_uid).obey(order)

    async def update_peer(self, run_uid: str, node: str, endpoint: str) -> None:
        """Use a new address of another agent."""
        self._runs.get(run_uid).endpoints[node] = endpoint

    async def release_run(self, run_uid: str, session_key: SessionKey, is_finished: bool, epoch: int) -> None:
        """Free the memory of a run that is over; the run's checkpoints stay on disk for now."""
        order = n.RunReleased(session_key=session_key, is_finished=is_finished, epoch=epoch)
        await self._runs.get(run_uid).obey(order)

    # -- the coordinator's calls: checkpoints --------------------------------------------------------------

    async def announce_save_step(
        self, run_uid: str, session_key: SessionKey, signal: SaveSignal, epoch: int
    ) -> None:
        """Show the ranks of this node the step after which all ranks save."""
        order = n.SaveStepAnnounced(session_key=session_key, signal=signal, epoch=epoch)
        await self._runs.get(run_uid).obey(order)

    async def ask_survivors(self, run_uid: str, session_key: SessionKey, epoch: int) -> None:
        """Ask the ranks of this node for offers, and report what this node has for a salvage."""
        await self._runs.get(run_uid).obey(n.SurvivorsAsked(session_key=session_key, epoch=epoch))

    async def order_salvage(self, run_uid: str, salvage: Salvage, epoch: int) -> None:
        """Take part in a salvage as decided."""
        await self._runs.get(run_uid).obey(n.SalvageOrdered(salvage=salvage, epoch=epoch))

    async def notify_outcome(
        self,
        run_uid: str,
        attempt: AttemptId,
        level: Level | None,
        error: CheckpointError | None,
        epoch: int,
    ) -> None:
        event = n.OutcomeNotified(attempt=attempt, level=level, error=error, epoch=epoch)
        await self._runs.get(run_uid).obey(event)

    async def replicate(
        self, run_uid: str, attempt: AttemptId, node_index: int, holder: str, endpoint: str, epoch: int
    ) -> None:
        run = self._runs.get(run_uid)
        run.endpoints[holder] = endpoint
        order = n.CopyOrdered(attempt=attempt, node_index=node_index, holder=holder, epoch=epoch)
        await run.obey(order)

    async def compute(self, run_uid: str, order: m.Code, endpoints: dict[str, str], epoch: int) -> None:
        """Make a parity file, or the files of a lost member of a parity group, on this node.

        CorruptionError or Unavailable if the files of the other members do not suffice; OSError if the disk
        fails.
        """
        run, node = self._runs.get(run_uid), self._node
        await run.obey(n.EpochSeen(epoch=epoch))
        credentials = node.credentials(run_uid)
        sent = await in_thread(node.code_io, compute, run, order, endpoints, credentials, node.copies)
        node.count_bytes(run.spec.name, "parity", sent)

    async def drain(self, run_uid: str, attempt: AttemptId, node_index: int, like: str, epoch: int) -> None:
        """Copy one fragment's files from this node to the storage path, the fragment itself last.

        `like` is as in the order `Drain`.

        CorruptionError if a file on this node is damaged or missing, OSError if the store or the disk fails.
        """
        run = self._runs.get(run_uid)
        await run.obey(n.EpochSeen(epoch=epoch))
        work = partial(upload, run, attempt, node_index, like, self._node.copies)
        sent = await run.drain(attempt, node_index, work)
        self._node.count_bytes(run.spec.name, "remote", *sent)

    async def upload_items(
        self, run_uid: str, attempt: AttemptId, node_index: int, items: str, epoch: int
    ) -> ItemsPart:
        """Upload some items of one fragment from this node, in files of their own.

        CorruptionError if a file on this node is damaged or missing, OSError if the store or the disk fails.
        """
        run, copies = self._runs.get(run_uid), self._node.copies
        await run.obey(n.EpochSeen(epoch=epoch))
        part = await run.item_threads.run(upload_items, run, attempt, node_index, items, copies)
        self._node.count_bytes(run.spec.name, "remote", part.size_bytes)
        return part

    async def uploads(self, run_uid: str) -> dict[str, int]:
        """Return, by attempt, the bytes that unfinished uploads have sent to the storage path."""
        return self._runs.get(run_uid).uploaded_bytes()

    async def delete(self, run_uid: str, directories: tuple[str, ...], epoch: int) -> dict[str, str]:
        """Delete folders. Return the folders that are left, with the error of each."""
        order = n.DeleteOrdered(directories=directories, epoch=epoch)
        return await self._runs.get(run_uid).obey(order) or {}

    async def scrub(self, run_uid: str, attempt: AttemptId, node_index: int, epoch: int) -> ScrubResult:
        """Read this node's copy of a fragment and its files from the disk; move bad files to quarantine.

        OSError if a file cannot be read at all.
        """
        run = self._runs.get(run_uid)
        await run.obey(n.EpochSeen(epoch=epoch))
        return await in_thread(self._node.disk_io, scrub, run, attempt, node_index)

    async def scrub_remote(
        self, run_uid: str, attempt: AttemptId, num_nodes: int, node_index: int
    ) -> ScrubResult:
        """Read a fragment's files on the storage path; bad files are to be uploaded again."""
        run = self._runs.get(run_uid)
        blocks = partial(run.remote.blocks, attempt.directory)
        damage = await run.check_threads.run(verify_stored, blocks, node_index, num_nodes)
        return ScrubResult(damage=damage)

    # -- the ranks' calls: restore and memory ------------------------------------------------------------

    async def get_ticket(self, run_uid: str, named: bool) -> RestoreTicket:
        """Return the ticket of this node's ranks: the checkpoint to restore, and its sources.

        `named` is as in `reserve`, for the manifest.
        """
        return await (await self._runs.get(run_uid).current_restore()).ticket(named=named)

    async def get_whole_ticket(self, run_uid: str, session: int, named: bool) -> RestoreTicket:
        """Return the ticket with the manifest of all nodes. RunSuperseded if the session is over."""
        run = self._runs.get(run_uid)
        run.check_session(session)
        return await require(run.restore).ticket(named=named, is_whole=True)

    async def fetch(
        self,
        run_uid: str,
        session: int,
        rank: int,
        wants: Mapping[RowKey, tuple[int, ...]],
        taken: tuple[RowKey, ...],
    ) -> SharedRows:
        """Read rows that several ranks of this node want, once for all these ranks."""
        return await (await self._runs.get(run_uid).current_restore()).fetch(session, rank, wants, taken)

    async def report_restored(
        self, run_uid: str, session: int, report: RankRestore, named: bool
    ) -> RestoreTicket | None:
        """Wait until all ranks have restored, or return a ticket that the rank restores instead."""
        run = self._runs.get(run_uid)
        if run.restore is not None:
            report = run.restore.completed(report)
        is_over = await run.request(lambda token: RankRestored(token=token, session=session, report=report))
        return None if is_over else await self.get_ticket(run_uid, named)

    async def reserve(self, run_uid: str, rank: int, size_bytes: int, named: bool) -> None:
        """Raise InsufficientSpace unless the arena fits in memory, and two checkpoints with copies on disk.

        `named` means that the arena has to be in /dev/shm.
        """
        self._runs.get(run_uid).reserve(rank, size_bytes, named=named)

    async def open_arena(
        self, run_uid: str, session: int, rank: int, size_bytes: int, named: bool
    ) -> ArenaGrant:
        """Make shared memory for a rank; it replaces the rank's earlier arena."""
        run = self._runs.get(run_uid)
        run.check_session(session)
        arena = await run.memory.open(
            rank,
            size_bytes,
            mode=run.spec.options.memory,
            named=named,
            is_current=lambda: run.machine.plan is not None and run.machine.plan.session == session,
            pool=self._node.disk_io,
        )
        return arena.grant()

    async def describe_group(self, run_uid: str) -> GroupCard:
        """Return the group at work, which a rank keeps in case that all agents are lost."""
        return GroupCard(service=self._service, run=self._runs.get(run_uid).opened())

    async def signal_page(self, run_uid: str, named: bool) -> str:
        """Return the path of the save signal's page, which ranks map; `named` is as in `reserve`."""
        return self._runs.get(run_uid).memory.signal_page(named=named)

    # -- the ranks' calls: saves and liveness --------------------------------------------------------------

    async def seal(self, run_uid: str, shard: SealedShard) -> None:
        """Take over a capture; return when the rank may capture into the arena again."""
        run = self._runs.get(run_uid)
        if not run.memory.take_layout(shard):
            reason = f"the arena of rank {shard.rank} is gone"
            await self.skip(run_uid, shard.attempt, shard.rank, reason)
            raise Unavailable(f"Step {shard.attempt.step}: {reason}.")
        run.captures.seal(shard)
        event = n.ShardSealed(
            attempt=shard.attempt,
            rank=shard.rank,
            replicated=shard.replicated,
            metrics=shard.metrics,
            watched=shard.watched,
        )
        run.host.handle(event)
        await run.captures.wait_released(shard)

    async def keep_state(self, run_uid: str, session_key: SessionKey, state: StepState) -> None:
        """Keep the own state of a rank after a step, of this node or of a peer, for a salvage."""
        run = self._runs.get(run_uid)
        if run.machine.plan is not None and run.machine.plan.session_key == session_key:
            keep(run.step_states, state.rank, state.step, state)
            kept = n.StepStateKept(
                session_key=session_key, rank=state.rank, step=state.step, holds=state.holds
            )
            run.host.handle(kept)

    async def await_question(self, run_uid: str, session: int) -> bool:
        """Wait until the ranks of this node are asked for an offer. Return False if the session is over."""
        run = self._runs.get(run_uid)
        asked: bool = await run.request(lambda token: AskAwaited(token=token, session=session))
        return asked

    async def offer_survivor(self, run_uid: str, session: int, rank: int, step: int) -> Salvage:
        """Take the offer of a rank for a salvage, and return the decision."""
        run = self._runs.get(run_uid)
        decided: Salvage = await run.request(
            lambda token: SurvivorCame(token=token, session=session, rank=rank, step=step)
        )
        return decided

    async def skip(self, run_uid: str, attempt: AttemptId, rank: int, reason: str) -> None:
        """Record that a rank cannot save."""
        self._runs.get(run_uid).host.handle(n.SaveFailed(attempt=attempt, rank=rank, reason=reason))

    async def await_outcome(self, run_uid: str, attempt: AttemptId, level: Level) -> n.SaveOutcome:
        """Wait until the save has reached `level`, or was dropped."""
        run = self._runs.get(run_uid)
        options = run.spec.options
        limit_s = options.attempt_timeout_s + options.goal_timeout_s + OUTCOME_SLACK_S
        outcome: n.SaveOutcome = await asyncio.wait_for(
            run.request(lambda token: OutcomeAwaited(token=token, attempt=attempt, level=level)), limit_s
        )
        return outcome

    async def await_session_end(self, run_uid: str, session: int) -> CheckpointError:
        """Wait until the session is over, and return the reason."""
        run = self._runs.get(run_uid)
        error: CheckpointError = await run.request(lambda token: EndAwaited(token=token, session=session))
        return error

    async def annotate(
        self, run_uid: str, step: int, metrics: Mapping[str, float], attempt: AttemptId | None
    ) -> None:
        """Add metrics to the checkpoint of a step, once the rank's save of it has been committed."""
        run = self._runs.get(run_uid)
        if run.annotating >= MAX_ANNOTATING:
            raise Unavailable(f"{MAX_ANNOTATING} annotations wait already.")
        run.annotating += 1
        try:
            if attempt is not None:
                outcome = await self.await_outcome(run_uid, attempt, Level.LOCAL)
                if outcome.error is not None:
                    raise outcome.error
            await self._node.request("annotate_by_uid", run_uid, step, metrics)
        finally:
            run.annotating -= 1

    async def make_durable(self, run_uid: str) -> None:
        await self._node.request("make_durable", run_uid)

    async def report_progress(self, run_uid: str, session: int, rank: int, progress: RankProgress) -> str:
        """Record the progress of a rank. For rank 0, return what is missing on the storage path, or ""."""
        run = self._runs.get(run_uid)
        if rank == 0 and run.missing_is_due():
            self._node.spawn(run.check_missing())
        run.host.handle(RankProgressed(session=session, rank=rank, progress=progress))
        return run.missing if rank == 0 else ""

    async def awaited_ranks(self, run_uid: str) -> tuple[Awaited, ...]:
        """Return the ranks that the group waits for, by the coordinator's last answer."""
        return self._runs.get(run_uid).host.awaited

    async def await_barrier(self, run_uid: str, session: int, rank: int, number: int) -> tuple[int, ...]:
        """Wait at a barrier for all ranks of the group. Return the ranks that did not come."""
        run = self._runs.get(run_uid)
        missing: tuple[int, ...] = await run.request(
            lambda token: RankMet(token=token, session=session, rank=rank, number=number)
        )
        return missing

    async def notify_preemption(self, notice: Notice) -> None:
        """Report that this node, or a rank on it, is about to go."""
        await self._node.report("node_preempted", self._node.node_id, notice)
