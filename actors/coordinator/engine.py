"""Feed events to the machines of runs, and carry out the effects that the machines return.

Every event of a run goes through `Engine.handle`. `Effects` performs long effects in tasks; the events that
answer these effects also go through `Engine.handle`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import ray

from ray_ckpt.actors.agent.priority import trim_heaps
from ray_ckpt.actors.coordinator.agents import Agents, reason
from ray_ckpt.actors.coordinator.draining_nodes import DrainingNodes
from ray_ckpt.actors.coordinator.effects import Effects, Work
from ray_ckpt.actors.coordinator.overview import view_of
from ray_ckpt.actors.coordinator.run import Run
from ray_ckpt.actors.coordinator.run_nodes import RunNodes
from ray_ckpt.actors.coordinator.runs import Runs
from ray_ckpt.actors.metrics import Meters
from ray_ckpt.actors.threads import in_thread
from ray_ckpt.core import messages as m
from ray_ckpt.core.run_machine import CLOCK_S
from ray_ckpt.core.values import Inventory, Token
from ray_ckpt.errors import Fenced
from ray_ckpt.transport.credentials import ServiceKeys

log = logging.getLogger("ray_ckpt.coordinator")

CONTROL_THREADS = 2  # for calls to Ray, which block
EXIT_AFTER_S = 0.5  # so that log lines are sent before the process ends


class Engine:
    """The open runs and the agents of a service, and the tasks between them.

    `restart_agent(node)` is called when the agent of a node is found dead.
    """

    def __init__(self, keys: ServiceKeys, restart_agent: Callable[[str], Coroutine[Any, Any, None]]) -> None:
        # Calls to Ray, logs and storage paths have separate threads, so that a hanging one stops no other.
        self.control_io = ThreadPoolExecutor(CONTROL_THREADS, thread_name_prefix="ray_ckpt-control")
        self.agents = Agents(keys, self.control_io)
        self.draining = DrainingNodes()
        self.nodes = RunNodes(self.agents, self.draining, self.control_io)
        self.effects = Effects(self.nodes, lambda node: self.spawn(restart_agent(node)))
        self.runs = Runs()
        self.meters = Meters()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def request(self, run: Run, event: Callable[[Token], m.Event]) -> Any:
        """Handle an event with a fresh token, and return the machine's reply or raise its error."""
        token = uuid.uuid4().hex
        run.waiting[token] = asyncio.get_running_loop().create_future()
        try:
            self.handle(run, event(token))
            return await run.waiting[token]
        finally:
            del run.waiting[token]

    def handle(self, run: Run, event: m.Event) -> None:
        self.advance(run)
        for effect in run.machine.handle(event):
            self._carry_out(run, effect)
        for sample in run.machine.take_samples():
            self.meters.record(run.spec.name, sample)

    def advance(self, run: Run) -> None:
        """Send the machine the time before an event, so that the machine needs no clock."""
        now_s = time.monotonic()
        if now_s - run.ticked_s < CLOCK_S:
            return
        run.ticked_s = now_s
        for effect in run.machine.handle(m.Ticked(now_s=now_s, wall_s=time.time())):
            self._carry_out(run, effect)

    async def open_on_nodes(self, run: Run, *, checks_storage: bool = False) -> dict[str, Inventory]:
        """Open the run on all live nodes; see `RunNodes.open_on_all`."""
        inventories, seen = await self.nodes.open_on_all(run, checks_storage=checks_storage)
        self.handle(run, seen)
        return inventories

    def send(self, run: Run, node: str, method: str, *args: Any) -> None:
        """Call an agent in a task. A failure is logged; the next session makes up for a lost call."""
        if node in self.agents.nodes:
            self.spawn(self._sent(run, node, method, self.agents.call(node, method, *args)))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _carry_out(self, run: Run, effect: m.Effect) -> None:
        epoch = run.machine.epoch
        match effect:
            case m.Reply(token=token, value=value):
                run.reply(token, value)
            case m.Fail(token=token, error=error):
                run.fail(token, error)
            case m.NotifyOutcome(attempt=attempt, level=level, error=problem, nodes=nodes, epoch=epoch):
                for node in nodes:
                    self.send(run, node, "notify_outcome", run.run_uid, attempt, level, problem, epoch)
            case m.AnnounceSaveStep(session_key=session_key, signal=signal, nodes=nodes):
                for node in nodes:
                    self.send(run, node, "announce_save_step", run.run_uid, session_key, signal, epoch)
            case m.Replicate(attempt=attempt, node_index=index, source=source, holder=holder):
                if (card := self.agents.cards.get(holder)) is not None:
                    order = (run.run_uid, attempt, index, holder, card.endpoint, epoch)
                    self.send(run, source, "replicate", *order)
            case m.DeleteLocalOrphans(node_id=node, directories=directories):
                self.send(run, node, "delete", run.run_uid, directories, epoch)
            case m.Evict(attempt=attempt, node_id=node):
                self.send(run, node, "delete", run.run_uid, (attempt.directory,), epoch)
            case m.CloseRun():
                self._close(run)
            case m.Supersede(nodes=nodes, session_key=session_key, error=problem):
                for node in nodes:
                    self.send(run, node, "end_session", run.run_uid, session_key, problem, epoch)
            case m.Warn(text=text, is_expected=True):
                log.info("%s: %s", run.spec.name, text)
            case m.Warn(text=text):
                log.warning("%s: %s", run.spec.name, text)
                run.warning = (text, time.time())
            case m.StepDown(error=error, is_foreign=is_foreign):
                log.error("%s This coordinator steps down.", error)
                if self.runs.is_current(run):
                    del self.runs.open[run.spec.key]
                if run.was_open and not is_foreign:
                    # A newer coordinator of this service has claimed the log. If this actor still owns the
                    # coordinator's name, Ray restarts the actor, which recovers; otherwise it only ends.
                    asyncio.get_running_loop().call_later(EXIT_AFTER_S, os._exit, 1)
            case _:
                self.spawn(self._perform(run, effect))

    async def _perform(self, run: Run, work: Work) -> None:
        for event in await self.effects.perform(run, work):
            self.handle(run, event)
        run.was_open = run.was_open or run.machine.is_open
        async with run.changed:
            run.changed.notify_all()

    def _close(self, run: Run) -> None:
        """Drop all state of a run except its view, unless the run has been opened again."""
        if not self.runs.is_current(run):
            return
        self.runs.put_away(run, replace(view_of(run, self.agents.nodes), is_put_away=True, nodes=()))
        log.info("%s: the run has finished and is put away", run.spec.name)
        self.spawn(in_thread(self.control_io, trim_heaps))

    async def _sent(self, run: Run, node: str, method: str, call: Awaitable[Any]) -> None:
        try:
            await call
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, Fenced):
                self.handle(run, m.OrderRefused(epoch=cause.fields["epoch"]))
            log.warning("node %s did not take %s: %s", node[:12], method, reason(error))

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work of the coordinator failed", exc_info=error)
