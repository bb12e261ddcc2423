"""Take over the runs of a coordinator that died, from its agents, which are still alive."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from dataclasses import replace

import ray

from ray_ckpt.actors.coordinator.engine import Engine
from ray_ckpt.actors.coordinator.opening import RunOpener
from ray_ckpt.actors.messages import GroupCard, OpenedRun
from ray_ckpt.core import messages as m
from ray_ckpt.core.values import SessionKey, SessionPlan
from ray_ckpt.engine.ports import GroupFound
from ray_ckpt.errors import CheckpointError, RunConflict, RunSuperseded

log = logging.getLogger("ray_ckpt.coordinator")

TAKE_OVER_AGAIN_S = 5.0  # until a restarted coordinator again tries to open a log
ASK_AGAIN_S = 60.0  # until an agent that has not answered is asked again for its runs
MAX_FAILED_TRIES = 720  # an hour of tries to open a run that has failed: its log may have been deleted
SETTLED_S = 0.2  # between looks whether a run is open
MAX_ASKED = 64  # agents that are asked again at a time; each answer may have a plan of 0.6 MB


class Recovery:
    """Recovery of a coordinator, which begins with its process.

    A coordinator finds the groups at work by the agents, or by a rank if all agents of a group are lost. It
    asks agents that do not answer again.
    """

    def __init__(self, engine: Engine, opener: RunOpener) -> None:
        self._engine = engine
        self._opener = opener
        self._found: asyncio.Task[None] | None = None
        self._claimed: dict[str, str] = {}  # runs that this coordinator tries to open, and their uids, by key

    async def begin(self) -> None:
        """Recover without a call, because agents of a finished run do not call; try again after errors."""
        while not self._engine.runs.is_ending:
            try:
                await self.ready()
                break
            except ray.exceptions.RayError as error:
                log.warning("the agents of an earlier coordinator are not found: %s", error)
                await asyncio.sleep(TAKE_OVER_AGAIN_S)

    async def ready(self) -> None:
        """Wait until the agents of an earlier coordinator have been found; after an error try again."""
        if self._found is None or (self._found.done() and self._found.exception() is not None):
            self._found = asyncio.ensure_future(self._find_agents())
        await asyncio.shield(self._found)

    async def settled(self, run: str) -> None:
        """Wait until this coordinator does not try any more to open a run that an earlier one had open.

        `run` is the key or the uid of the run.
        """
        if self._found is not None:  # a recovery has begun
            await self.ready()
        while any(run in claim and claim[0] not in self._engine.runs.open for claim in self._claimed.items()):
            await asyncio.sleep(SETTLED_S)

    async def _find_agents(self) -> None:
        runs: dict[str, OpenedRun] = {}
        for card in await self._engine.agents.find():
            for run in card.runs:
                known = runs.get(run.spec.key)
                newest = max((r for r in (known, run) if r is not None), key=_session_key)
                epoch = max(known.epoch, run.epoch) if known is not None else run.epoch
                failed = max((r.failed for r in (known, run) if r is not None and r.failed), default=None)
                runs[run.spec.key] = replace(newest, epoch=epoch, failed=failed)
        for run in runs.values():
            self._engine.spawn(self._take_up(run))
        if self._engine.agents.silent:
            self._engine.spawn(self._ask_silent())

    async def _ask_silent(self) -> None:
        """Ask the agents that have not answered again, until each of them has answered or is dead."""
        silent = self._engine.agents.silent
        while silent and not self._engine.runs.is_ending:
            now_s = time.monotonic()
            due = [node for node, asked_s in silent.items() if now_s - asked_s >= ASK_AGAIN_S]
            await asyncio.gather(*map(self._ask, due[:MAX_ASKED]))
            if not due:
                await asyncio.sleep(ASK_AGAIN_S - (now_s - min(silent.values())))

    async def _ask(self, node: str) -> None:
        """Ask an agent again, and continue with its runs if it answers."""
        runs, agents = self._engine.runs, self._engine.agents
        card = await agents.ask(node)
        if card is None:
            return
        if not (runs.open or runs.past or agents.nodes - {node}):
            agents.keys, agents.service = card.keys, card.service
        if card.service != agents.service:
            log.error("node %s: its agent is of another service, and its runs are left alone", node[:12])
            return
        log.warning("node %s: its agent has answered late, with %d run(s)", node[:12], len(card.runs))
        for run in card.runs:
            self._engine.spawn(self._take_late(GroupCard(service=card.service, run=run)))

    async def _take_late(self, card: GroupCard) -> None:
        """Continue with a run of an agent that has answered late, when no attempt to open the run goes on."""
        key = card.run.spec.key
        while key in self._claimed or self._engine.runs.turn(key).locked():
            await asyncio.sleep(TAKE_OVER_AGAIN_S)
        with contextlib.suppress(RunConflict):
            await self.find_group(card)

    async def find_group(self, card: GroupCard) -> None:
        """Continue with the group of a rank, unless the run has a group or has ended.

        RunConflict if another service or run owns the log, RunSuperseded if a newer group has the run; the
        group then has to end.
        """
        runs, found = self._engine.runs, card.run
        if (run := runs.open.get(found.spec.key)) is not None:
            if found.plan is not None:
                run.host.handle(GroupFound(plan=found.plan))
                _check_newest(found.plan, run.machine.plan)
        elif found.spec.key not in runs.past and found.spec.key not in self._claimed:
            if not (runs.open or runs.past or self._engine.agents.nodes):
                self._engine.agents.service = card.service  # the agents that kept it are lost
            await self._take_over(found)

    async def _take_up(self, found: OpenedRun) -> None:
        with contextlib.suppress(RunConflict):
            await self._take_over(found)

    async def _take_over(self, found: OpenedRun) -> None:
        """Claim the log of a run that was open, and continue with its current group; or raise RunConflict."""
        log.warning("%s: this coordinator takes over from one that died", found.spec.name)
        self._claimed[found.spec.key] = found.run_uid
        try:
            with self._engine.runs.in_use(found.spec.name):
                await self._claim(found)
        finally:
            del self._claimed[found.spec.key]

    async def _claim(self, found: OpenedRun) -> None:
        """Try to open the run until it is open. RunConflict if another service or run owns the log."""
        for number in itertools.count(1):
            try:
                await self._opener.open(found.spec, owner=None, is_wanted=False, found=found.plan)
                if found.failed is not None and found.plan is None:
                    self._engine.spawn(self._finish(found.spec.key, found.failed))
                return
            except RunSuperseded as error:
                log.error("%s", error)
                await self._end_session(found, error)
                raise
            except RunConflict as error:
                log.error("%s The run is left alone.", error)
                raise
            except (CheckpointError, OSError, ray.exceptions.RayError) as error:
                log.warning("%s: cannot take over yet: %s", found.spec.name, error)
                if found.failed is not None and found.plan is None and number >= MAX_FAILED_TRIES:
                    return
                await asyncio.sleep(TAKE_OVER_AGAIN_S)

    async def _finish(self, key: str, failed: SessionKey) -> None:
        """Request the end of a failed run again, with which its newest checkpoint is uploaded.

        Not if the log has a newer session than the one that failed: its group, on other nodes than those
        which report the failure, may be at work.
        """
        run = self._engine.runs.open.get(key)
        if run is None or run.machine.view.has_group or run.machine.view.end_cause is not None:
            return
        session = run.machine.history.session
        if session is not None and (session.opened_by, session.session) > failed:
            return
        with contextlib.suppress(CheckpointError):  # the coordinator has logged why there is no upload
            await self._engine.request(
                run, lambda token: m.FinishRequested(token=token, ends_group=True, has_failed=True)
            )

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


def _check_newest(found: SessionPlan, at_work: SessionPlan | None) -> None:
    """Raise RunSuperseded if the group at work is a newer one than the group that was found."""
    if at_work is None or at_work.continues(found.session_key) or at_work.session_key < found.session_key:
        return
    raise RunSuperseded("A newer training group has opened this run.")
