"""Check the nodes of the cluster periodically, and report them to the hosts of the runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import replace

import ray

from ray_ckpt.actors.coordinator.agents import AGENT_CALL_S
from ray_ckpt.actors.coordinator.engine import Engine
from ray_ckpt.actors.coordinator.gauges import Gauges
from ray_ckpt.actors.coordinator.nodes import seen_by
from ray_ckpt.actors.coordinator.run import Run
from ray_ckpt.engine.idle_agents import IdleAgents

log = logging.getLogger("ray_ckpt.coordinator")

TICK_S = 0.5  # between two ticks of each run machine
LOOK_EVERY_S = 10.0  # between checks of the nodes' file systems


class ClusterWatch:
    """The periodic work of a coordinator: nodes, disks, idle agents, gauges."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._gauges = Gauges(engine)
        self._idle = IdleAgents()
        self._checked_s = 0.0  # when disks were last checked (monotonic)
        self._ticker: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._ticker is None:
            self._ticker = asyncio.ensure_future(self._tick_forever())

    def stop(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await self._tick()
            except Exception:
                log.exception("the coordinator's tick failed")

    async def _tick(self) -> None:
        engine = self._engine
        nodes = await engine.agents.cluster.recent()
        for run in engine.runs:
            disks, run.disks = run.disks, {}  # each reading of a disk is reported once
            run.host.handle(replace(seen_by(nodes, run.spec.options), disks=disks))
        live = nodes.live
        for node in engine.agents.nodes - live:
            engine.agents.forget(node)
        engine.notices.expire(live, time.time())
        idle = self._idle.take(engine.agents.nodes, [run.host for run in engine.runs], time.monotonic())
        engine.agents.end(idle, {run.run_uid: run.machine.epoch for run in engine.runs})
        self._gauges.set_due()
        if time.monotonic() - self._checked_s > LOOK_EVERY_S:
            self._checked_s = time.monotonic()
            engine.spawn(self._check_disks())

    async def _check_disks(self) -> None:
        agents, runs = self._engine.agents.nodes, list(self._engine.runs)
        for run in runs:
            run.seen_disks = run.disks_of(agents)
        open_on = ((run, node) for run in runs for node in run.host.nodes.opened & agents)
        await asyncio.gather(*(self._check_disk(run, node) for run, node in open_on))

    async def _check_disk(self, run: Run, node: str) -> None:
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError, KeyError):
            disk = self._engine.agents.call(node, "disk", run.run_uid)
            run.disks[node] = run.seen_disks[node] = await asyncio.wait_for(disk, AGENT_CALL_S)
