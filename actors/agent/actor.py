"""The node agent: a Ray actor with a node's arenas and staging folders; writes, copies and serves shards.

Each node has one agent: a detached actor, pinned to the node. The host of each run (`engine.NodeHost`) makes
the decisions, and `RayNodePorts` carries them out. The coordinator calls the methods of this class; ranks and
other agents call those of its base classes.
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
from ray_ckpt.actors.agent.rank_endpoints import RankEndpoints
from ray_ckpt.actors.agent.relay import OrderRelay, RelayEndpoints
from ray_ckpt.actors.agent.runs import NodeRuns
from ray_ckpt.actors.agent.still_files import scrub_stored
from ray_ckpt.actors.messages import (
    AgentCard,
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
from ray_ckpt.core.ownership import RunMark
from ray_ckpt.core.values import (
    DiskSpace,
    Inventory,
    ItemsPart,
    Salvage,
    ScrubResult,
    SessionKey,
)
from ray_ckpt.errors import CheckpointError, ConfigError, Unavailable
from ray_ckpt.format import zstd
from ray_ckpt.format.save_signal import SaveSignal
from ray_ckpt.transport.credentials import ServiceKeys
from ray_ckpt.transport.server import PeerServer
from ray_ckpt.types import AttemptId, Level

log = logging.getLogger("ray_ckpt.agent")

EXIT_AFTER_S = 0.5  # so that the answer is sent before the process ends


class NodeAgent(RankEndpoints, RelayEndpoints):
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
        runs = list(self._runs.open.values())
        for run in runs:
            run.host.ports.free()
        for run in runs:
            await run.memory.freeing.wait()
        asyncio.get_running_loop().call_later(EXIT_AFTER_S, os._exit, 0)

    # -- runs and sessions -------------------------------------------------------------------------------

    async def read_marks(self, spec: RunSpec) -> tuple[RunMark, ...]:
        """Return the marks on this node's disk of runs of this name and storage path."""
        return await self._runs.read_marks(spec)

    async def open_run(self, order: OpenRun) -> Inventory:
        """Check the staging folder and the storage path of a run, and return the run's files on this node."""
        async with self._runs.turn(order.run_uid):  # `put_away` of the run may be at work
            run = await self._runs.take_up(order.spec, order.run_uid)
            if order.epoch >= run.machine.epoch:  # before the epoch, whose mark has the names of the spec
                run.use(order.spec)
            await run.obey(n.EpochSeen(epoch=order.epoch))
        self._node.watch_cloud()
        if order.spec.options.compress is not None:
            zstd.check_installed()
        await run.check_threads.run(run.check_storage, order.nonce, self._node.node_id)
        return await self.inventory(order.run_uid, order.known)

    async def put_away(self, order: PutAwayRun) -> bool:
        """Delete all files of a finished run except `order.kept`, and close the run.

        Fenced if the order is stale; OSError if the disk fails.
        """
        async with self._runs.turn(order.run_uid):
            run = await self._runs.take_up(order.spec, order.run_uid)
            await run.obey(n.RunPutAway(kept=order.kept, epoch=order.epoch))
        return True

    async def inventory(self, run_uid: str, known: SessionKey = (0, 0)) -> Inventory:
        return await self._node.inventory_io.run(inventory, self._runs.get(run_uid), known)

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
        self, run_uid: str, session_key: SessionKey, error: CheckpointError, epoch: int, frees: bool = True
    ) -> None:
        """End the session of this node's ranks: the run has another group or owner."""
        order = n.SessionEnded(session_key=session_key, error=error, epoch=epoch, frees=frees)
        await self._runs.get(run_uid).obey(order)

    async def update_peer(self, run_uid: str, node: str, endpoint: str) -> None:
        """Use a new address of another agent."""
        self._runs.get(run_uid).endpoints[node] = endpoint

    async def release_run(self, run_uid: str, session_key: SessionKey, is_finished: bool, epoch: int) -> None:
        """Free the memory of a run that is over; the run's checkpoints stay on disk for now."""
        order = n.RunReleased(session_key=session_key, is_finished=is_finished, epoch=epoch)
        await self._runs.get(run_uid).obey(order)

    # -- checkpoints ---------------------------------------------------------------------------------------

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
        sent = await in_thread(node.code_io, compute, run, order, endpoints, credentials, node.copies, epoch)
        node.count_bytes(run.spec.name, "parity", sent)

    async def drain(
        self,
        run_uid: str,
        attempt: AttemptId,
        node_index: int,
        like: str,
        epoch: int,
        is_urgent: bool = False,
    ) -> None:
        """Copy one fragment's files from this node to the storage path, the fragment itself last.

        `like` and `is_urgent` are as in the order `Drain`.

        CorruptionError if a file on this node is damaged or missing, OSError if the store or the disk fails.
        """
        run = self._runs.get(run_uid)
        await run.obey(n.EpochSeen(epoch=epoch))
        work = partial(upload, run, attempt, node_index, like, self._node.copies)
        sent = await run.drain(attempt, node_index, work, is_urgent=is_urgent)
        self._node.count_bytes(run.spec.name, "remote", *sent)

    async def upload_items(
        self, run_uid: str, attempt: AttemptId, node_index: int, items: str, epoch: int
    ) -> ItemsPart:
        """Upload some items of one fragment from this node, in files of their own.

        CorruptionError if a file on this node is damaged or missing, OSError if the store or the disk fails.
        """
        run = self._runs.get(run_uid)
        await run.obey(n.EpochSeen(epoch=epoch))
        work = partial(upload_items, run, attempt, node_index, items, self._node.copies)
        part = await run.drain(attempt, node_index, work, items=items)
        self._node.count_bytes(run.spec.name, "remote", part.size_bytes)
        return part

    async def uploads(self, run_uid: str) -> dict[str, int]:
        """Return, by attempt, the bytes that unfinished uploads have sent to the storage path."""
        return self._runs.get(run_uid).uploaded_bytes()

    async def delete(
        self, run_uid: str, directories: tuple[str, ...], evicted: tuple[str, ...], epoch: int
    ) -> dict[str, str]:
        """Delete folders. Return the folders that are left, with the error of each."""
        order = n.DeleteOrdered(directories=directories, evicted=evicted, epoch=epoch)
        return await self._runs.get(run_uid).obey(order) or {}

    async def scrub(self, run_uid: str, attempt: AttemptId, node_index: int, epoch: int) -> ScrubResult:
        """Read this node's copy of a fragment and its files from the disk; move bad files to quarantine.

        OSError if the disk fails.
        """
        run = self._runs.get(run_uid)
        await run.obey(n.EpochSeen(epoch=epoch))
        return await in_thread(self._node.disk_io, scrub, run, attempt, node_index)

    async def scrub_remote(
        self, run_uid: str, attempt: AttemptId, num_nodes: int, node_index: int
    ) -> ScrubResult:
        """Read a fragment's files on the storage path, and mend bad ones that this node has.

        Others are to be uploaded again.
        """
        run = self._runs.get(run_uid)
        return await run.check_threads.run(scrub_stored, run, attempt, node_index, num_nodes)
