"""Open runs on the nodes of a cluster, and describe these nodes to the runs' machines."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor
from dataclasses import dataclass

from ray_ckpt.actors import ray_cluster
from ray_ckpt.actors.coordinator.agents import Agents
from ray_ckpt.actors.coordinator.draining_nodes import DrainingNodes
from ray_ckpt.actors.coordinator.run import Run
from ray_ckpt.actors.messages import OpenRun, SessionStart
from ray_ckpt.actors.threads import in_thread
from ray_ckpt.core import messages as m
from ray_ckpt.core.values import Inventory, SessionPlan
from ray_ckpt.errors import StorageNotShared, StoragePathError

log = logging.getLogger("ray_ckpt.coordinator")


@dataclass(frozen=True, slots=True)
class RunNodes:
    """The agents of a service, and the nodes that are about to go."""

    agents: Agents
    draining: DrainingNodes
    control_io: Executor

    async def open_on_all(
        self, run: Run, *, checks_storage: bool = False
    ) -> tuple[dict[str, Inventory], m.NodesSeen]:
        """Start missing agents, open the run on all live nodes, and return each node's inventory.

        Raises the configuration error of any node. If a node's new agent does not find the storage path, this
        is an error only with `checks_storage`; otherwise the node is left out, since the path may be away for
        a while.
        """
        nodes = await self.agents.live_nodes()
        answers = await asyncio.gather(*(self.open_on(run, node) for node in nodes), return_exceptions=True)
        inventories: dict[str, Inventory] = {}
        for node, answer in zip(nodes, answers, strict=True):
            if isinstance(answer, StorageNotShared | StoragePathError) and not checks_storage:
                log.warning("node %s is left out for now: %s", node[:12], answer)
            elif isinstance(answer, BaseException):
                raise answer
            elif answer is not None:
                inventories[node] = answer
        run.opened, run.opening, run.is_ready = set(inventories), set(), True
        found = await self.nodes_now(run)
        return inventories, self.seen(found, frozenset(inventories))

    async def open_on(self, run: Run, node: str) -> Inventory | None:
        """Open the run on one node. Return the node's inventory, or None if the node's agent is dying."""
        order = OpenRun(spec=run.spec, run_uid=run.run_uid, nonce=run.nonce, epoch=run.machine.history.epoch)
        inventory: Inventory | None = await self.agents.request(node, "open_run", order)
        return inventory

    async def nodes_now(self, run: Run) -> ray_cluster.NodesNow:
        """Return the cluster's nodes, with the failure domains of the run's options."""
        return await in_thread(self.control_io, ray_cluster.nodes_now, run.spec.options.failure_domain)

    def seen(self, nodes: ray_cluster.NodesNow, live: frozenset[str]) -> m.NodesSeen:
        """Return the state of all nodes, since each placement considers all nodes."""
        return m.NodesSeen(
            live=live,
            draining=nodes.draining | self.draining.nodes,
            left_s=self.draining.left_s(nodes.left_s),
            domains=nodes.domains,
        )

    def session_start(self, run: Run, plan: SessionPlan) -> SessionStart:
        return SessionStart(
            plan=plan, spec=run.spec, endpoints=self.agents.endpoints, epoch=run.machine.epoch
        )
