"""Detect that the launcher of a run, a Ray job or an actor (Ray Train's controller), has died."""

from __future__ import annotations

import asyncio
import math
import time

from ray_ckpt.actors import ray_cluster
from ray_ckpt.actors.coordinator.engine import Engine
from ray_ckpt.actors.coordinator.run import Run
from ray_ckpt.actors.threads import in_thread
from ray_ckpt.core import messages as m

OWNER_GONE_S = 10.0  # until Ray reports an ended launcher as dead; a launcher still alive keeps the run
OWNER_POLL_S = 0.5  # between checks during OWNER_GONE_S
OWNER_DEAD_S = 30.0  # until a dead launcher's session ends; a node's death is noticed sooner, in 14 s


class Launchers:
    """The processes that own the runs of a service."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def is_alive(self, owner: str) -> bool:
        return await in_thread(self._engine.control_io, ray_cluster.is_alive, owner)

    async def await_dead(self, run: Run, owner: str) -> str:
        """Wait for the launcher that owns the run to die, so that `owner` may take over the run.

        Return the dead launcher, or "" if no other launcher owns the run, or if that launcher is still alive
        after OWNER_GONE_S.
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
        """End the sessions whose launchers have been dead for OWNER_DEAD_S, so that status shows the end.

        Only launchers that end their runs themselves, such as Ray Train's controller, are checked. A job may
        end long before the detached actors of the job.
        """
        for run in self._engine.runs:
            owner = run.machine.view.owner
            if not ray_cluster.is_controller(owner):
                continue
            if await self.is_alive(owner):
                run.dead_owner = ("", math.inf)
            elif run.dead_owner[0] != owner:
                run.dead_owner = (owner, time.monotonic())
                plan = run.machine.plan  # the group's processes got SIGTERM, but their nodes may stay
                nodes = {node.node_id for node in plan.nodes} if plan else set()
                self._engine.draining.forget_signals(nodes)
            elif time.monotonic() - run.dead_owner[1] >= OWNER_DEAD_S:
                self._engine.handle(run, m.OwnerDied(owner=owner))
