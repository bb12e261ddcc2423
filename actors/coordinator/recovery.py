"""Take over the runs of a coordinator that died, from its agents, which are still alive."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace

import ray

from ray_ckpt.actors.coordinator.engine import Engine
from ray_ckpt.actors.coordinator.opening import RunOpener
from ray_ckpt.actors.messages import OpenedRun
from ray_ckpt.errors import CheckpointError, RunConflict, RunSuperseded

log = logging.getLogger("ray_ckpt.coordinator")

TAKE_OVER_AGAIN_S = 5.0  # until a restarted coordinator again tries to open a log


class Recovery:
    """Recovery of a restarted coordinator; the first call of `ready` begins the recovery."""

    def __init__(self, engine: Engine, opener: RunOpener) -> None:
        self._engine = engine
        self._opener = opener
        self._found: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Wait until the agents of an earlier coordinator have been found."""
        if self._found is None:
            self._found = asyncio.ensure_future(self._find_agents())
        await asyncio.shield(self._found)

    async def _find_agents(self) -> None:
        runs: dict[str, OpenedRun] = {}
        for card in await self._engine.agents.find():
            for run in card.runs:
                known = runs.get(run.spec.key)
                newest = max((r for r in (known, run) if r is not None), key=_session_key)
                epoch = max(known.epoch, run.epoch) if known is not None else run.epoch
                runs[run.spec.key] = replace(newest, epoch=epoch)
        for run in runs.values():
            self._engine.spawn(self._take_over(run))

    async def _take_over(self, found: OpenedRun) -> None:
        """Claim the log of a run that was open, and continue with its current group."""
        log.warning("%s: this coordinator takes over from one that died", found.spec.name)
        with self._engine.runs.in_use(found.spec.name):
            await self._claim(found)

    async def _claim(self, found: OpenedRun) -> None:
        """Try to open the run until it is open, unless another service or run owns the log."""
        while True:
            try:
                await self._opener.open(found.spec, owner=None, is_wanted=False, found=found.plan)
                return
            except RunSuperseded as error:
                log.error("%s", error)
                await self._end_session(found, error)
                return
            except RunConflict as error:
                log.error("%s The run is left alone.", error)
                return
            except (CheckpointError, OSError) as error:
                log.warning("%s: cannot take over yet: %s", found.spec.name, error)
                await asyncio.sleep(TAKE_OVER_AGAIN_S)

    async def _end_session(self, found: OpenedRun, error: CheckpointError) -> None:
        """End the session of a group whose run another service has taken over."""
        if found.plan is None:
            return
        agents = self._engine.agents
        for node in {n.node_id for n in found.plan.nodes} & agents.nodes:
            with contextlib.suppress(ray.exceptions.RayError):
                order = (found.run_uid, found.plan.session_key, error, found.epoch)
                await agents.call(node, "end_session", *order)


def _session_key(run: OpenedRun) -> tuple[int, int]:
    return run.plan.session_key if run.plan else (0, 0)
