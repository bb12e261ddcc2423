"""Find out that the launcher of a run has died; it is a Ray job, or an actor (Ray Train's controller)."""

from __future__ import annotations

import asyncio
import math
import time

from ray_ckpt.actors import ray_cluster
from ray_ckpt.actors.coordinator.engine import Engine
from ray_ckpt.actors.coordinator.run import Run
from ray_ckpt.actors.threads import in_thread
from ray_ckpt.core import messages as m

OWNER_GONE_S = 10.0  # until Ray reports that a launcher that has ended is dead; one alive then keeps the run
OWNER_POLL_S = 0.5  # between checks in that time
OWNER_DEAD_S = 30.0  # until the session of a dead launcher ends; a node that died with it is noticed in 14 s


class Launchers:
    """The processes that own the runs of a service."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def is_alive(self, owner: str) -> bool:
        return await in_thread(self._engine.control_io, ray_cluster.is_alive, owner)

    async def await_dead(self, run: Run, owner: str) -> str:
        """Wait for the launcher that owns the run to die, so that `owner` may take it over.

        Return the dead launcher, or "" if nobody else owns the run or the launcher is still alive after
        OWNER_GONE_S.
        """
        deadline_s = time.monotonic() + OWNER_GONE_S
        while (rival := run.machine.view.owner) not in ("", owner):
            if not await self.is_alive(rival):
                return rival
            if time.monotonic() > deadline_s:
                break
            await asyncio.sleep(OWNER_POLL_S)
        return ""

    async def check_all(self) -> None:
        """End the sessions whose launchers have been dead for OWNER_DEAD_S, so that status shows it.

        Only launchers that end their runs themselves are checked, as Ray Train's controller does. A job may
        end long before its detached actors do.
        """
        for run in self._engine.runs:
            owner = run.machine.view.owner
            if not ray_cluster.is_controller(owner):
                continue
            if await self.is_alive(owner):
                run.dead_owner = ("", math.inf)
            elif run.dead_owner[0] != owner:
                run.dead_owner = (owner, time.monotonic())
                plan = run.machine.plan  # its processes got SIGTERM; their nodes may stay
                nodes = {node.node_id for node in plan.nodes} if plan else set()
                self._engine.draining.forget_signals(nodes)
            elif time.monotonic() - run.dead_owner[1] >= OWNER_DEAD_S:
                self._engine.handle(run, m.OwnerDied(owner=owner))
