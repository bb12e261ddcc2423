"""Readings of the nodes' disks: agents read on request, as often as a coordinator can afford."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import math
import random
import uuid
from collections import deque
from collections.abc import Iterable, Sequence

import ray

from ray_ckpt.actors.coordinator.agents import AGENT_CALL_S
from ray_ckpt.actors.coordinator.engine import Engine
from ray_ckpt.actors.coordinator.run import Run
from ray_ckpt.actors.messages import PassedAnswers, PassedOrder

LOOK_EVERY_S = 10.0  # between two readings of a disk; in a large cluster, of the fullest disks
IDLE_EVERY_S = 60.0  # between readings for a run without a group, for metrics only: its files do not grow
MAX_AT_A_TICK = 12  # calls in one tick; more nodes are read with one call through a relay


class DiskReadings:
    """The nodes whose disks are to be read; those of runs without a group get what is left of a tick."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._due: deque[tuple[Run, str]] = deque()
        self._idle: deque[tuple[Run, str]] = deque()  # of runs without a group
        self._looked_s = -math.inf  # when nodes were last added (monotonic)
        self._idle_s = -math.inf  # when nodes of runs without a group were last added (monotonic)

    def begin_due(self, now_s: float) -> None:
        """Begin the readings of one tick: first those of the fullest disks, then those of the next nodes."""
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now_s
            if self._due:
                self._due.extendleft(self._fullest())
            else:
                self._due.extend(self._all(has_group=True))
        if now_s - self._idle_s >= IDLE_EVERY_S and not self._idle:
            self._idle_s = now_s
            self._idle.extend(self._all(has_group=False))
        engine = self._engine
        by_run: dict[Run, list[str]] = {}
        for _ in range(min(len(self._due) + len(self._idle), max(MAX_AT_A_TICK, engine.relay_nodes))):
            run, node = (self._due or self._idle).popleft()
            if node in run.host.nodes.opened and node in engine.agents.nodes:
                by_run.setdefault(run, []).append(node)
        for run, nodes in by_run.items():
            if len(nodes) > MAX_AT_A_TICK:
                engine.spawn(_read_through_relay(engine, run, nodes))
            else:
                for node in nodes:
                    engine.spawn(read_disk(engine, run, node, AGENT_CALL_S))

    def _all(self, *, has_group: bool) -> Iterable[tuple[Run, str]]:
        agents = self._engine.agents.nodes
        for run in self._engine.runs:
            if run.machine.view.has_group == has_group:
                run.seen_disks = run.disks_of(agents)
                yield from ((run, node) for node in sorted(run.host.nodes.opened & agents))

    def _fullest(self) -> list[tuple[Run, str]]:
        """Return the nodes with the fullest disks, by the last readings, for runs that have a group."""
        read = (
            (disk.free_bytes / max(disk.total_bytes, 1), node, run)
            for run in self._engine.runs
            if run.machine.view.has_group
            for node, disk in run.seen_disks.items()
        )
        fullest = heapq.nsmallest(MAX_AT_A_TICK, read, key=lambda found: found[:2])
        return [(run, node) for _, node, run in fullest]


async def read_disk(engine: Engine, run: Run, node: str, wait_s: float) -> None:
    """Read the space of a node's disks for the run; keep the last reading if the agent does not answer.

    An agent that is found dead is replaced: perhaps no rank runs on its node that has noticed it.
    """
    try:
        disk = engine.agents.call(node, "disk", run.run_uid)
        run.disks[node] = run.seen_disks[node] = await asyncio.wait_for(disk, wait_s)
    except ray.exceptions.ActorDiedError:
        if node in run.host.nodes.opened:  # else it was idle, and has ended in the meantime
            engine.spawn(engine.restart_agent(node))
    except (ray.exceptions.RayError, TimeoutError, KeyError):
        return


async def _read_through_relay(engine: Engine, run: Run, nodes: Sequence[str]) -> None:
    """Read the disks of the nodes through one of them as a relay; drop answers that come too late."""
    numbered = tuple(enumerate(nodes))
    order = PassedOrder(nodes=numbered, method="disk", arguments=(run.run_uid,))
    with contextlib.suppress(ray.exceptions.RayError, TimeoutError, KeyError):
        answer = engine.agents.call(random.choice(nodes), "pass_on", uuid.uuid4().hex, (order,))
        found: PassedAnswers = await asyncio.wait_for(answer, AGENT_CALL_S)
        disks = {node: found.values[number] for number, node in numbered if number in found.values}
        run.disks |= disks
        run.seen_disks |= disks
