"""Check the nodes of the cluster periodically, and report them to the hosts of the runs."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from ray_ckpt.actors.coordinator.disks import DiskReadings
from ray_ckpt.actors.coordinator.engine import Engine
from ray_ckpt.actors.coordinator.gauges import Gauges
from ray_ckpt.actors.coordinator.nodes import seen_by
from ray_ckpt.engine.idle_agents import IdleAgents

log = logging.getLogger("ray_ckpt.coordinator")

TICK_S = 0.5  # between two ticks of each run machine
IDLE_NODE_S = 0.001  # period of the search for idle agents, per node; the search takes 2 us per node


class ClusterWatch:
    """The periodic work of a coordinator: nodes, disks, idle agents, gauges."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._gauges = Gauges(engine)
        self._idle = IdleAgents()
        self._disks = DiskReadings(engine)
        self._idle_due_s = 0.0  # when idle agents are looked for next (monotonic)
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
            disks, run.disks = run.disks, {}  # each reading of a disk is passed to the machine once
            try:
                run.host.handle(replace(seen_by(nodes, run.spec.options), disks=disks))
            except Exception:  # the other runs go on
                log.exception("%s: the coordinator's tick failed", run.spec.name)
        live = nodes.live
        for node in engine.agents.nodes - live:
            engine.agents.forget(node)
        engine.notices.expire(live, time.time())
        if time.monotonic() >= self._idle_due_s:
            self._idle_due_s = time.monotonic() + len(engine.agents.nodes) * IDLE_NODE_S
            self._end_idle()
        self._gauges.set_due()
        self._disks.begin_due(time.monotonic())

    def _end_idle(self) -> None:
        engine, hosts = self._engine, [run.host for run in self._engine.runs]
        agents, is_opening = engine.agents.nodes, engine.runs.is_opening
        for node in self._idle.take(agents, hosts, time.monotonic(), is_opening=is_opening):
            engine.spawn(engine.end_agent(node))
