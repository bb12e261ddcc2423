"""The coordinator's process with the agents of a large cluster: CPU, bytes and memory, with Ray's part.

The coordinator is the real actor on a local Ray. `Crowd` actors play the agents of up to CROWD_NODES nodes
each: they answer orders and send the reports that agents send, without files and ranks. The bench also
provides the list of the cluster's nodes, since Ray has only one. To count the bytes that the coordinator
sends, its messages are pickled a second time, in a group that is not timed.
"""

from __future__ import annotations

import asyncio
import pickle
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import ray

from jobs.bench.context import Context
from jobs.bench.coordinator import RANKS_PER_NODE, stored
from jobs.bench.row import Row, measure
from jobs.bench.training import local_ray
from ray_ckpt.actors import names
from ray_ckpt.actors.agent.node import Node
from ray_ckpt.actors.agent.priority import collect_seldom
from ray_ckpt.actors.agent.relay import GATHER_S, ReportRelay
from ray_ckpt.actors.coordinator.actor import Coordinator
from ray_ckpt.actors.coordinator.agents import Agents
from ray_ckpt.actors.coordinator.nodes import NodeList
from ray_ckpt.actors.messages import (
    AgentCard,
    GatheredReport,
    OpenRun,
    PassedAnswers,
    PassedOrder,
    RunSpec,
    SessionStart,
)
from ray_ckpt.actors.ray_cluster import NodesNow, owner_here
from ray_ckpt.config import RunOptions, relay_nodes
from ray_ckpt.core import messages as m
from ray_ckpt.core.progress import progress_period_s
from ray_ckpt.core.values import (
    DiskSpace,
    GroupNode,
    Inventory,
    RankProgress,
    SessionNode,
    SessionPlan,
    StoredFragment,
)
from ray_ckpt.engine.node_session import PROGRESS_WAITS
from ray_ckpt.engine.relays import relay_size
from ray_ckpt.errors import CheckpointError
from ray_ckpt.format.names import make_attempt
from ray_ckpt.transport.credentials import ServiceKeys
from ray_ckpt.types import AttemptId, Level, RankRestore

SIZES = (100, 1_000, 4_000, 10_000)  # nodes
QUICK_SIZES = (8,)
CROWD_NODES = 512  # nodes played by one actor, at most
CALL_S = 900.0  # longest answer of the coordinator or of a crowd
REST_S = 10.0  # training without a save
WARM_SAVES = 2  # afterwards, each commit retires a checkpoint
CPU_LIMIT_S, REST_LIMIT, OPEN_LIMIT_S, OPEN_LIMIT_GB, COMMIT_LIMIT_S = 1.5, 0.05, 10.0, 0.5, 2.0
KILLED_LIMIT_S = 3.0
LIMITS_AT = 10_000  # nodes at which the limits hold


# -- the agents ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Member:
    """One node of a crowd."""

    node_id: str
    here: SessionNode | None = None
    relay: str = ""
    agent: Node | None = None  # the real sender of reports, through the relay that is killed
    held: dict[str, tuple[AttemptId, tuple[SessionNode, ...]]] = field(default_factory=dict)  # by folder


class Crowd:
    """The agents of some nodes. A call of the coordinator names the node.

    The relay `lone` is a separate actor, which can be killed; other relays are nodes of crowds.
    """

    def __init__(self, coordinator: Any, nodes: Sequence[str], lone: str, neighbours: Any = None) -> None:
        self._coordinator, self._lone, self._neighbours = coordinator, lone, neighbours
        self._keys = ServiceKeys.make(datetime.now(UTC))
        self._members = {node: _Member(node) for node in nodes}
        self._relays: dict[str, ReportRelay] = {}  # by node; a relay and its members may be in two crowds
        self._packed = b""
        self._plan: SessionPlan | None = None
        self._holds: dict[str, list[SessionNode]] = {}  # node -> the nodes whose copies it holds
        self._reports: set[asyncio.Future[Any]] = set()  # of progress, on their way
        self._unsettled: set[str] = set()  # nodes that are not notified yet that the save is replicated
        self._settled = asyncio.Event()  # no node is in `_unsettled`
        collect_seldom()  # as agents do

    async def call(self, node: str, method: str, *args: Any) -> Any:
        """Answer an order; the answer to an order that a crowd does not play is None."""
        if method == "pass_on" and node == self._lone:
            return await self._pass(args[1])
        return self._do(node, method, args)

    async def gather(self, report: GatheredReport) -> Any:
        """Gather a report of the neighbours, as the relay that is killed."""
        return await self._relays[self._lone].gather(report)

    async def _pass(self, orders: tuple[PassedOrder, ...]) -> PassedAnswers:
        values = {}
        for order in orders:
            for number, node in order.nodes:
                to = self.call if node in self._members else self._neighbours.call.remote
                values[number] = await to(node, order.method, *order.arguments)
        return PassedAnswers(values=values)

    def _do(self, node: str, method: str, args: tuple[Any, ...]) -> Any:
        handler = getattr(self, f"_{method}", None)
        return None if handler is None else handler(self._members[node], *args)

    # -- orders ----------------------------------------------------------------------------------------

    def _card(self, member: _Member) -> AgentCard:
        number = int(member.node_id, 16)
        endpoint = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:40000"
        return AgentCard(node_id=member.node_id, endpoint=endpoint, staging="/staging")

    def _read_marks(self, member: _Member, spec: RunSpec) -> tuple[()]:
        return ()

    def _disk(self, member: _Member, run_uid: str) -> DiskSpace:
        return DiskSpace(free_bytes=1 << 40, total_bytes=1 << 41)

    def _open_run(self, member: _Member, order: OpenRun) -> Inventory:
        plan = self._plan
        fragments = tuple(
            _fragment(attempt, node, plan)
            for attempt, nodes in member.held.values()
            for node in nodes
            if plan is not None
        )
        key = plan.session_key if plan is not None else None
        return Inventory(
            fragments=fragments,
            directories=tuple(member.held),
            session_key=key,
            plan=plan if key is not None and key > order.known else None,
            disk=member.node_id,
        )

    def _start_session(self, member: _Member, start: SessionStart) -> None:
        member.relay = start.relay
        if start.relay == self._lone and member.node_id != self._lone:
            member.agent = member.agent or Node(member.node_id, self._keys)
            member.agent.route.use(start.relay)
        elif start.relay and start.relay not in self._relays:
            self._relays[start.relay] = ReportRelay(self._coordinator.gathered.remote)
        if start.packed == self._packed:  # the crowd unpacks once for all of its agents
            return
        self._packed, (self._plan, _) = start.packed, start.unpack()
        self._holds = {node: [] for node in self._members}
        for node in self._plan.nodes:
            if node.node_id in self._members:
                self._members[node.node_id].here = node
            for holder in node.holders:
                if holder in self._holds:
                    self._holds[holder].append(node)

    def _pass_on(self, member: _Member, name: str, orders: tuple[PassedOrder, ...]) -> PassedAnswers:
        return PassedAnswers(
            values={
                number: self._do(node, order.method, order.arguments)
                for order in orders
                for number, node in order.nodes
            }
        )

    def _notify_outcome(
        self,
        member: _Member,
        run_uid: str,
        attempt: AttemptId,
        level: Level | None,
        error: CheckpointError | None,
        epoch: int,
    ) -> None:
        if level == Level.REPLICATED:
            self._unsettled.discard(member.node_id)
            if not self._unsettled:
                self._settled.set()

    def _delete(self, member: _Member, run_uid: str, directories: tuple[str, ...], epoch: int) -> None:
        for directory in directories:
            member.held.pop(directory, None)

    # -- reports ---------------------------------------------------------------------------------------

    def _report(
        self, member: _Member, method: str, *args: Any, waits: bool = False, may_wait_s: float = 0.0
    ) -> Awaitable[Any]:
        if not member.relay:
            answer: Awaitable[Any] = getattr(self._coordinator, method).remote(*args)
            return answer
        if member.agent is not None:
            return member.agent.request(method, *args, may_wait_s=may_wait_s)
        report = GatheredReport(method=method, arguments=args, waits=waits, may_wait_s=may_wait_s)
        return self._relays[member.relay].gather(report)

    async def restore(self) -> None:
        """Report all ranks as restored, and wait until the group may train."""
        plan = self._plan
        assert plan is not None
        goes = []
        for member in self._members.values():
            ranks = tuple(RankRestore(rank=rank) for rank in self._here(member).ranks)
            order = (plan.run_uid, plan.session_key, member.node_id, ranks)
            goes.append(self._report(member, "node_restored", *order, waits=True))
        assert all(await asyncio.gather(*goes))

    async def save(self, step: int) -> tuple[float, float]:
        """Save a step; return when the last node had stored it, and when all were notified.

        Times are of the machine's monotonic clock, which all crowds share.
        """
        stored_s = await self.store(step)
        await self._settled.wait()
        return stored_s, time.monotonic()

    async def store(self, step: int) -> float:
        """Report a step and its copies as stored on all nodes; return the time of the last report."""
        plan = self._plan
        assert plan is not None
        attempt = make_attempt(
            run_uid=plan.run_uid, epoch=plan.epoch, session=plan.session, step=step, attempt=0
        )
        self._settled.clear()
        self._unsettled = set(self._members)
        directory, reports = attempt.directory, []
        for member in self._members.values():
            here = self._here(member)
            member.held[directory] = (attempt, (here, *self._holds[member.node_id]))
            report = stored(attempt, here, plan)
            reports.append(self._report(member, "node_stored", report))
            reports += [
                self._report(member, "replica_ended", _copied(report, holder, plan))
                for holder in here.holders
            ]
        stored_s = time.monotonic()
        await asyncio.gather(*reports)
        return stored_s

    async def train(self, seconds: float, step: int) -> None:
        """Report the progress of all ranks, as agents do, for some time: each node at its own moment.

        The last reports may still be with their relays at the end.
        """
        plan, progress = self._plan, RankProgress(step=step, saved_step=step, step_s=1.0)
        assert plan is not None
        begun_s, period_s = time.monotonic(), progress_period_s(len(plan.nodes))
        members = list(self._members.values())
        random.Random(0).shuffle(members)
        for number in range(round(seconds / period_s * len(members))):
            member = members[number % len(members)]
            await asyncio.sleep(begun_s + number / len(members) * period_s - time.monotonic())
            ranks = dict.fromkeys(self._here(member).ranks, progress)
            event = m.RanksProgressed(session_key=plan.session_key, ranks=ranks)
            sent = self._report(
                member, "ranks_progressed", plan.run_uid, event, may_wait_s=PROGRESS_WAITS * period_s
            )
            task = asyncio.ensure_future(sent)
            self._reports.add(task)
            task.add_done_callback(self._reports.discard)

    def _here(self, member: _Member) -> SessionNode:
        assert member.here is not None
        return member.here


def _copied(source: m.NodeStored, holder: str, plan: SessionPlan) -> m.ReplicaEnded:
    return m.ReplicaEnded(
        attempt=source.attempt,
        node_index=source.node_index,
        holder=holder,
        error=None,
        fragment=source.fragment,
        epoch=plan.epoch,
    )


def _fragment(attempt: AttemptId, node: SessionNode, plan: SessionPlan) -> StoredFragment:
    report = stored(attempt, node, plan)
    return StoredFragment(
        attempt=attempt,
        node_index=node.node_index,
        num_nodes=len(plan.nodes),
        fragment=report.fragment,
        size_bytes=report.size_bytes,
        ranks=node.ranks,
        replicated=report.replicated,
        metrics=report.metrics,
    )


# -- the coordinator -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Resources that the coordinator's process has used since its start."""

    cpu_s: float
    rss_bytes: int
    calls: int  # to agents
    sent_bytes: int  # of arguments, while they were counted


class _Method:
    def __init__(self, agents: CrowdAgents, node: str, name: str) -> None:
        self._agents, self._node, self._name = agents, node, name

    def remote(self, *args: Any) -> Any:
        agents = self._agents
        agents.calls += 1
        if agents.counts_bytes:
            agents.sent_bytes += len(pickle.dumps(args))
        return agents.crowds[self._node].call.remote(self._node, self._name, *args)


class _Handle:
    """Stands for the handle of an agent; calls go to the agent's crowd."""

    def __init__(self, agents: CrowdAgents, node: str) -> None:
        self._agents, self._node = agents, node

    def __getattr__(self, name: str) -> _Method:
        return _Method(self._agents, self._node, name)


class CrowdNodes(NodeList):
    """The nodes that crowds play, which Ray does not list."""

    def __init__(self, control_io: Executor, live: frozenset[str]) -> None:
        super().__init__(control_io)
        self._nodes = NodesNow(live=live, labels={}, draining=frozenset(), gone_at_s={}, read_s=0.0)

    async def recent(self) -> NodesNow:
        return self._nodes

    async def now(self) -> NodesNow:
        return self._nodes


class CrowdAgents(Agents):
    """The agents that crowds play; `crowds` has the crowd of each node."""

    crowds: dict[str, Any]
    calls = sent_bytes = 0
    counts_bytes = False

    async def find(self) -> tuple[()]:
        return ()

    def start(self, node: str) -> Any:
        return _Handle(self, node)


class FleetCoordinator(Coordinator):
    """The coordinator of a cluster whose nodes are played by crowds."""

    async def play(self, crowds: Sequence[tuple[Any, tuple[str, ...]]]) -> None:
        engine = self.engine
        self._agents = engine.agents = CrowdAgents(engine.agents.keys, engine.control_io)
        self._agents.crowds = {node: crowd for crowd, nodes in crowds for node in nodes}
        self._agents.cluster = CrowdNodes(engine.control_io, frozenset(self._agents.crowds))

    async def usage(self, counts_bytes: bool = False) -> Usage:
        """Return the resources used so far; `counts_bytes` turns the count of sent bytes on or off."""
        self._agents.counts_bytes = counts_bytes
        return Usage(
            cpu_s=time.process_time(),
            rss_bytes=psutil.Process().memory_info().rss,
            calls=self._agents.calls,
            sent_bytes=self._agents.sent_bytes,
        )


# -- the fleet -------------------------------------------------------------------------------------------


class Fleet:
    """A run on `num_nodes` nodes, and the calls by which the bench moves it."""

    def __init__(self, num_nodes: int, folder: Path) -> None:
        self.nodes = tuple(f"{index:056x}" for index in range(num_nodes))  # as long as Ray's ids
        coordinator, crowd = ray.remote(FleetCoordinator), ray.remote(Crowd).options(num_cpus=0)
        named = {"namespace": names.NAMESPACE, "num_cpus": 0}
        self.coordinator: Any = coordinator.options(name=names.COORDINATOR, **named).remote()
        size = relay_size(relay_nodes(), num_nodes)
        lone = self.nodes[min(size, num_nodes - 1)]  # the first addressee of the second group of nodes
        size = max(size, 1)  # 0: there are no relays
        width = max(CROWD_NODES // size, 1) * size  # the nodes of each other relay are in one crowd
        parts = [
            tuple(node for node in self.nodes[at : at + width] if node != lone)
            for at in range(0, num_nodes, width)
        ]
        self.crowds: list[Any] = [crowd.remote(self.coordinator, part, lone) for part in parts]
        alone = ray.remote(Crowd).options(name=names.agent_name(lone), **named)
        self.lone = alone.remote(self.coordinator, (lone,), lone, self.crowds[0])
        self.crowds.append(self.lone)
        self._get(self.coordinator.play.remote(list(zip(self.crowds, [*parts, (lone,)], strict=True))))
        options = RunOptions(retire_grace_s=0.0, scrub_bytes_per_s=0, remote_every=1_000_000, keep_last=2)
        self.spec = RunSpec(name="fleet", storage_path=str(folder / "storage"), options=options)
        self.owner, self.step = owner_here(by_job=True), 0
        self._get(self.coordinator.open_run.remote(self.spec, self.owner))
        self.open_group()
        for _ in range(WARM_SAVES):
            self.save()

    def usage(self, *, counts_bytes: bool = False) -> Usage:
        found: Usage = self._get(self.coordinator.usage.remote(counts_bytes))
        return found

    def open_group(self) -> None:
        """Open a group on all nodes; return when it may train."""
        width = RANKS_PER_NODE
        nodes = tuple(
            GroupNode(node_id=node, ranks=tuple(range(i * width, (i + 1) * width)))
            for i, node in enumerate(self.nodes)
        )
        self._get(self.coordinator.open_group.remote(self.spec.key, nodes, "auto", self.owner))
        self._get([crowd.restore.remote() for crowd in self.crowds])

    def save(self) -> float:
        """Save the next step; return the seconds from when the last node has stored to the last notice."""
        self.step += 1
        return self._wait([crowd.save.remote(self.step) for crowd in self.crowds])

    def save_without_relay(self) -> float:
        """Kill a relay, with the reports of its nodes, after its own report; return as `save` does."""
        self.step += 1
        self._get(self.lone.store.remote(self.step))
        saves = [crowd.save.remote(self.step) for crowd in self.crowds[:-1]]
        time.sleep(GATHER_S / 2)
        ray.kill(self.lone)
        del self.crowds[-1]
        return self._wait(saves)

    def _wait(self, saves: Sequence[Any]) -> float:
        stored_s, notified_s = zip(*self._get(saves), strict=True)
        seconds: float = max(notified_s) - max(stored_s)
        return seconds

    def train(self, seconds: float) -> None:
        self._get([crowd.train.remote(seconds, self.step) for crowd in self.crowds])

    def _get(self, calls: Any) -> Any:
        return ray.get(calls, timeout=CALL_S)


@contextmanager
def fleet(num_nodes: int, context: Context) -> Iterator[Fleet]:
    with context.temporary() as folder, local_ray(folder):
        yield Fleet(num_nodes, folder)


def rows(context: Context) -> Iterator[Row]:
    """Measure a save, idling, and opening a group, at each size."""
    sizes = QUICK_SIZES if context.quick else SIZES if context.num_nodes is None else (context.num_nodes,)
    for size in sizes:
        with fleet(size, context) as found:
            yield from _rows_at(found, size, context)


class _Samples:
    """Samples of the coordinator's process while a fleet works."""

    def __init__(self, fleet: Fleet, rest_s: float) -> None:
        self._fleet, self._rest_s = fleet, rest_s
        self._latencies_s: deque[float] = deque()  # of the saves that `save` has measured

    def save(self) -> float:
        before = self._fleet.usage()
        self._latencies_s.append(self._fleet.save())
        return self._fleet.usage().cpu_s - before.cpu_s

    def latency(self) -> float:
        return self._latencies_s.popleft()

    def rest(self) -> float:
        self._fleet.train(self._rest_s)  # so that relays have reports at the beginning, as at the end
        before, began_s = self._fleet.usage(), time.monotonic()
        self._fleet.train(self._rest_s)
        return (self._fleet.usage().cpu_s - before.cpu_s) / (time.monotonic() - began_s)

    def opening(self) -> float:
        before = self._fleet.usage()
        self._fleet.open_group()
        return self._fleet.usage().cpu_s - before.cpu_s

    def opening_gb(self) -> float:
        before = self._fleet.usage(counts_bytes=True)
        self._fleet.open_group()
        return (self._fleet.usage().sent_bytes - before.sent_bytes) / 1e9

    def rss_gb(self) -> float:
        return self._fleet.usage().rss_bytes / 1e9


def _rows_at(fleet: Fleet, size: int, context: Context) -> Iterator[Row]:
    samples, repeat = _Samples(fleet, 1.0 if context.quick else REST_S), context.repeat
    table: tuple[tuple[str, str, str, Callable[[], float], int, float | None], ...] = (
        ("save", "coordinator's CPU of a save", "s", samples.save, repeat, CPU_LIMIT_S),
        ("commit", "a save: last node stored to last notice", "s", samples.latency, repeat, COMMIT_LIMIT_S),
        ("rest", "coordinator's CPU per second of training", "s", samples.rest, 1, REST_LIMIT),
        ("open", "coordinator's CPU of a group's opening", "s", samples.opening, repeat, OPEN_LIMIT_S),
        ("open-bytes", "bytes sent for a group's opening", "GB", samples.opening_gb, 1, OPEN_LIMIT_GB),
        ("memory", "coordinator's memory", "GB", samples.rss_gb, 1, None),
        ("killed", "a save whose relay is killed", "s", fleet.save_without_relay, 1, KILLED_LIMIT_S),
    )
    for name, what, unit, sample, times, limit in table:  # times are upper bounds: the crowds share the cores
        yield measure(
            f"fleet-{name}-{size}",
            f"{what}, {size:,} nodes x {RANKS_PER_NODE} ranks",
            unit,
            sample,
            repeat=times,
            limit=limit if size == LIMITS_AT else None,
        )
