"""Check the nodes of the cluster periodically, and report changes to the machines of the runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from dataclasses import replace

import ray

from ray_ckpt.actors.coordinator.agents import AGENT_CALL_S
from ray_ckpt.actors.coordinator.engine import Engine
from ray_ckpt.actors.coordinator.gauges import Gauges
from ray_ckpt.actors.coordinator.launchers import Launchers
from ray_ckpt.actors.coordinator.run import Run
from ray_ckpt.actors.ray_cluster import NodesNow
from ray_ckpt.config import RunOptions
from ray_ckpt.core import messages as m
from ray_ckpt.errors import CheckpointError

log = logging.getLogger("ray_ckpt.coordinator")

TICK_S = 0.5  # between two ticks of each run machine
LOOK_EVERY_S = 10.0  # between checks of the nodes' file systems and of launchers


class ClusterWatch:
    """The periodic work of a coordinator: nodes, disks, launchers, idle agents, gauges."""

    def __init__(self, engine: Engine, launchers: Launchers) -> None:
        self._engine = engine
        self._launchers = launchers
        self._gauges = Gauges(engine)
        self._checked_s = 0.0  # when disks and launchers were last checked (monotonic)
        self._ticker: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._ticker is None:
            self._ticker = asyncio.ensure_future(self._tick_forever())

    def stop(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()

    async def restart_agent(self, node: str) -> None:
        """Start a new agent on a node if the node's agent, which was reported dead, is dead."""
        engine = self._engine
        async with engine.runs.turn(node):
            if not await engine.agents.is_alive(node):
                engine.agents.forget(node)
                if node in await engine.agents.live_nodes():
                    for run in engine.runs:
                        if run.machine.view.end_cause is None:
                            await self._open_on_fresh(run, (node,))

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await self._tick()
            except Exception:
                log.exception("the coordinator's tick failed")

    async def _tick(self) -> None:
        engine = self._engine
        for run in engine.runs:
            self.tick_run(run, await engine.nodes.nodes_now(run))
        live = frozenset(await engine.agents.live_nodes())
        for node in engine.agents.nodes - live:
            engine.agents.forget(node)
        engine.draining.expire(live)
        self._end_idle_agents()
        self._gauges.set_due()
        if time.monotonic() - self._checked_s > LOOK_EVERY_S:
            self._checked_s = time.monotonic()
            engine.spawn(self._check_disks())
            engine.spawn(self._launchers.check_all())

    def tick_run(self, run: Run, nodes: NodesNow) -> None:
        """Report the nodes to a run's machine; open the run on new nodes, or release it after its end."""
        engine = self._engine
        if not run.is_ready:  # the log is still being opened, so only the time is reported
            engine.advance(run)
            return
        live = frozenset(nodes.live)
        disks, run.disks = run.disks, {}  # each reading of a disk is reported once
        engine.handle(run, replace(engine.nodes.seen(nodes, live & run.opened), disks=disks))
        if (is_over := run.machine.view.end_cause is not None) != run.is_released:
            run.is_released = is_over
            for node in run.opened if is_over else ():
                engine.send(run, node, "release_run", run.run_uid, run.machine.view.end_cause == "finished")
        if is_over:
            return
        if fresh := live - run.opened - run.opening:
            run.opening |= fresh
            engine.spawn(self._open_on_fresh(run, sorted(fresh)))

    async def _open_on_fresh(self, run: Run, nodes: Iterable[str]) -> None:
        """Open the run on nodes that joined, or got a new agent, in the middle of a session."""
        for node in nodes:
            try:
                inventory = await self._engine.nodes.open_on(run, node)
                if inventory is not None:
                    run.opened.add(node)
                    run.opening.discard(node)
                    self._engine.handle(run, m.NodesJoined(inventories={node: inventory}))
                    await self._rejoin(run, node)
            except (CheckpointError, ray.exceptions.RayError) as error:  # opening the next group tries again
                log.warning("node %s cannot hold checkpoints of %s: %s", node[:12], run.spec.name, error)

    async def _rejoin(self, run: Run, node: str) -> None:
        """Send the current session to a new agent, and the agent's address to its peers."""
        engine, plan = self._engine, run.machine.plan
        if plan is None:
            return
        start = engine.nodes.session_start(run, plan)
        for peer in {n.node_id for n in plan.nodes} - {node}:
            engine.send(run, peer, "update_peers", run.run_uid, start.endpoints)
        if any(n.node_id == node for n in plan.nodes):
            await engine.agents.call(node, "start_session", start)
            await engine.agents.call(node, "coordinator_returned", run.run_uid, run.machine.epoch)

    async def _check_disks(self) -> None:
        agents, runs = self._engine.agents.nodes, list(self._engine.runs)
        for run in runs:
            run.seen_disks = run.disks_of(agents)
        await asyncio.gather(*(self._check_disk(run, node) for run in runs for node in run.opened & agents))

    async def _check_disk(self, run: Run, node: str) -> None:
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError, KeyError):
            disk = self._engine.agents.call(node, "disk", run.run_uid)
            run.disks[node] = run.seen_disks[node] = await asyncio.wait_for(disk, AGENT_CALL_S)

    def _end_idle_agents(self) -> None:
        runs = list(self._engine.runs)
        needed = {node for run in runs for node in run.machine.view.needed_nodes()}
        options = [run.spec.options for run in runs] or [RunOptions()]
        idle = self._engine.agents.end_idle(needed, max(option.agent_idle_s for option in options))
        for run in runs:
            run.opened.difference_update(idle)
            run.opening.update(idle)  # so that only the next group, not the next tick, starts agents there
