"""The runs that are open on a node, and their staging folders."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from weakref import WeakSet, WeakValueDictionary

from ray_ckpt.actors.agent.memory import RankMemory
from ray_ckpt.actors.agent.node import Node
from ray_ckpt.actors.agent.ports import RayNodePorts
from ray_ckpt.actors.agent.run import NodeRun
from ray_ckpt.actors.messages import OpenedRun, RunSpec
from ray_ckpt.config import staging_roots
from ray_ckpt.core.node_machine import NodeMachine
from ray_ckpt.core.ownership import RunMark
from ray_ckpt.engine.node_host import NodeHost
from ray_ckpt.errors import AgentLost
from ray_ckpt.storage.local.disks import Disks


class NodeRuns:
    """Open runs by uid."""

    def __init__(self, node: Node) -> None:
        self.open: dict[str, NodeRun] = {}
        self._node = node
        self._memories = WeakSet[RankMemory]()  # of all runs
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._stagings: dict[tuple[Path, ...], Disks] = {}
        self._staging_lock = threading.Lock()  # so that each folder is locked only once

    def get(self, run_uid: str) -> NodeRun:
        """Return an open run, else raise AgentLost."""
        if run_uid not in self.open:
            raise AgentLost(f"Run {run_uid} is not open on node {self._node.node_id[:12]}.")
        return self.open[run_uid]

    def turn(self, run_uid: str) -> asyncio.Lock:
        """Return the lock under which a run is opened or put away on this node."""
        return self._turns.setdefault(run_uid, asyncio.Lock())

    async def take_up(self, spec: RunSpec, run_uid: str) -> NodeRun:
        """Return the run; open it here if necessary."""
        if run_uid not in self.open:
            staging = await self._node.inventory_io.run(self._open_staging, spec)
            self.open[run_uid] = NodeRun(spec, run_uid, staging, self._host, self._memories)
        return self.open[run_uid]

    async def read_marks(self, spec: RunSpec) -> tuple[RunMark, ...]:
        staging = await self._node.inventory_io.run(self._open_staging, spec)
        return await self._node.inventory_io.run(staging.marks, spec.name, spec.storage_path)

    def _host(self, run: NodeRun, machine: NodeMachine) -> NodeHost:
        return NodeHost(machine, RayNodePorts(self._node, run, self.open), self._node.node_id)

    def opened(self) -> tuple[OpenedRun, ...]:
        """Return the open runs; those that have ended may have checkpoints on nodes only."""
        return tuple(run.opened() for run in list(self.open.values()))

    def staging_text(self) -> str:
        """Return the staging folders, separated by commas."""
        return ", ".join(str(root) for roots in self._stagings for root in roots)

    def _open_staging(self, spec: RunSpec) -> Disks:
        roots = staging_roots(spec.options.staging, self._node.node_id)
        with self._staging_lock:
            if roots not in self._stagings:
                self._stagings[roots] = Disks(roots)
            return self._stagings[roots]
