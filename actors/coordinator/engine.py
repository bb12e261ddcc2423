"""The open runs and the agents of a service, and the tasks between them.

Every event of a run goes to the run's host (`ray_ckpt.engine`), which interprets the effects of the machine;
`RayPorts` carries the effects out.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeAlias

from ray_ckpt.actors import ray_cluster
from ray_ckpt.actors.agent.priority import trim_heaps
from ray_ckpt.actors.coordinator.agents import Agents
from ray_ckpt.actors.coordinator.overview import view_of
from ray_ckpt.actors.coordinator.ports import RayPorts
from ray_ckpt.actors.coordinator.run import Run
from ray_ckpt.actors.coordinator.runs import Runs
from ray_ckpt.actors.messages import GatheredAnswer, GatheredReport, RunSpec
from ray_ckpt.actors.metrics import Meters
from ray_ckpt.actors.threads import in_thread
from ray_ckpt.core import messages as m
from ray_ckpt.core.run_machine import RunMachine
from ray_ckpt.core.values import SessionKey, Token
from ray_ckpt.engine.notices import Notices
from ray_ckpt.engine.ports import AgentDied, ExitRefused, HostEvent
from ray_ckpt.engine.run_host import RunHost
from ray_ckpt.errors import CheckpointError, RunInUse, Unavailable
from ray_ckpt.preemption.notice import Notice
from ray_ckpt.transport.credentials import ServiceKeys

log = logging.getLogger("ray_ckpt.coordinator")

CONTROL_THREADS = 2  # for calls to Ray, which block
EVENTS = frozenset({"node_stored", "replica_ended", "save_refused"})  # calls of agents without an answer
DONE = GatheredAnswer()
RunSession: TypeAlias = tuple[str, SessionKey]  # the uid of a run, and a session of the run
EXIT_AFTER_S = 0.5  # so that log lines are sent before the process ends


class Engine:
    """The open runs and the agents of a service."""

    def __init__(self, keys: ServiceKeys, *, relay_nodes: int = 0) -> None:
        # Calls to Ray have threads of their own, as each storage path has: a hanging one stops no other.
        self.control_io = ThreadPoolExecutor(CONTROL_THREADS, thread_name_prefix="ray_ckpt-control")
        self.agents = Agents(keys, self.control_io)
        self.relay_nodes = relay_nodes  # nodes per relay, at least; 0: no relays
        self.notices = Notices()
        self.runs = Runs()
        self.meters = Meters()
        self._tasks: set[asyncio.Task[Any]] = set()

    def new_run(self, spec: RunSpec) -> Run:
        """Return a run that is not open yet, with a new machine."""
        machine = RunMachine(options=spec.options, writer=uuid.uuid4().hex, service=self.agents.service)
        return Run(spec, lambda run: RunHost(machine, RayPorts(self, run), self.notices))

    async def request(self, run: Run, event: Callable[[Token], m.Event | HostEvent]) -> Any:
        """Handle an event with a fresh token, and return the host's reply or raise its error."""
        return await run.callers.request(lambda token: run.host.handle(event(token)))

    async def is_alive(self, owner: str) -> bool:
        """Return whether a launcher is alive."""
        return await in_thread(self.control_io, ray_cluster.is_alive, owner)

    async def restart_agent(self, node: str) -> None:
        """Open the runs on a node with a new agent if the node's agent was reported dead, and is dead.

        The agent may also be new, as another run has started it, and lack a run or the session of its group.
        """
        async with self.runs.turn(node):
            plans = await self.agents.plans(node)
            if plans is None:
                self.agents.forget(node)
            for run in self.runs:
                if plans is None or not run.host.nodes.is_known(node, plans):
                    run.host.handle(AgentDied(node=node))

    async def end_agent(self, node: str) -> None:
        """End an idle agent, or find the group that is at work there."""
        try:
            await self.agents.end(node, {run.run_uid: run.host.exit_order() for run in self.runs})
        except RunInUse as error:
            log.warning("%s", error)
            for run in self.runs:
                run.host.handle(ExitRefused(node=node))
        except CheckpointError as error:
            log.info("node %s: %s", node[:12], error)

    def take(self, report: GatheredReport) -> GatheredAnswer | None:
        """Handle a report that is an event of a save, and answer it; return None for any other report.

        Most reports are handled here rather than by a method of the actor, since Ray wraps each of these
        methods.
        """
        if report.method not in EVENTS:
            return None
        (event,) = report.arguments
        try:
            self.runs.by_uid(event.attempt.run_uid).host.handle(event)
        except Exception as error:  # the other reports of the message are handled
            return GatheredAnswer(error=failed(report, error))
        return DONE

    def add_notice(self, node: str, notice: Notice, of: RunSession | None) -> None:
        """Record a notice that a node is about to go, for all runs or for one.

        With `of`, a process of that run got the notice, which was connected with that session: the notice
        changes nothing for a later group.
        """
        if of is None:
            self.notices.add(node, notice, time.time())
            return
        run_uid, session_key = of
        plan = next((run.machine.plan for run in self.runs if run.run_uid == run_uid), None)
        if plan is None or plan.continues(session_key):
            self.notices.add(node, notice, time.time(), run_uid)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def drop(self, run: Run, *, ends_process: bool) -> None:
        """Drop a run that belongs to another coordinator, unless the run has been opened again here.

        If this actor still owns the coordinator's name, Ray restarts an ended process, which recovers.
        """
        if not self.runs.is_current(run):
            return
        del self.runs.open[run.spec.key]
        if ends_process:
            asyncio.get_running_loop().call_later(EXIT_AFTER_S, os._exit, 1)

    def close(self, run: Run) -> None:
        """Drop all state of a run except its view, unless the run has been opened again."""
        if not self.runs.is_current(run):
            return
        view = replace(view_of(run, self.agents.nodes), is_put_away=True, nodes=())
        self.runs.put_away(run, view)
        log.info("%s: the run has finished and is put away", run.spec.name)
        self.spawn(in_thread(self.control_io, trim_heaps))

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work of the coordinator failed", exc_info=error)


def failed(report: GatheredReport, error: Exception) -> CheckpointError:
    """Return the error with which a report is answered."""
    if isinstance(error, CheckpointError):
        return error
    log.error("the report %s has failed", report.method, exc_info=error)
    return Unavailable(f"The coordinator failed to handle {report.method}: {error}")
