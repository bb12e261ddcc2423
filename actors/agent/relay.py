"""Agents as relays: pass orders on to other agents, and gather the reports of other agents.

`ray_ckpt.engine.relays` has the rules. A relay decides nothing: messages that it does not deliver or answer
in time are sent again without it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import ray

from ray_ckpt.actors import names
from ray_ckpt.actors.failures import failure_of, reason
from ray_ckpt.actors.messages import GatheredAnswer, GatheredReport, PassedAnswers, PassedOrder
from ray_ckpt.actors.threads import in_thread
from ray_ckpt.core.progress import merge
from ray_ckpt.engine.ports import Failure
from ray_ckpt.errors import CheckpointError, Unavailable

POLL_S = 1.0  # longest wait for new answers to a batch before the coordinator is answered
GATHER_S = 0.1  # time to gather answers to orders, or reports, before they are sent
MAX_BATCHES = 64  # batches that wait for answers; the coordinator sends older ones again without this relay
MAX_GATHERED = 1024  # reports in one message: a few of each node of a large relay

Send: TypeAlias = Callable[[tuple[GatheredReport, ...]], Awaitable[tuple[GatheredAnswer, ...]]]
_Kind: TypeAlias = tuple[bool, float]  # `waits` and `may_wait_s` of reports that are sent together
_Gathered: TypeAlias = tuple[GatheredReport, asyncio.Future[Any]]
_Merged: TypeAlias = tuple[GatheredReport, list[asyncio.Future[Any]]]


@dataclass(slots=True)
class _Batch:
    """A batch of orders; answers stay here until the coordinator requests them."""

    waiting: int  # calls without an answer
    values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)
    undelivered: list[int] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    is_complete: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self) -> PassedAnswers:
        found = PassedAnswers(values=self.values, failures=self.failures, undelivered=tuple(self.undelivered))
        self.values, self.failures, self.undelivered = {}, {}, []
        self.arrived.clear()
        return found


class OtherAgents:
    """Handles of other agents, which Ray looks up by name in a thread, since the lookup blocks."""

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}  # by node
        self._lookups = ThreadPoolExecutor(1, "ray_ckpt-lookup")

    async def find(self, nodes: Iterable[str]) -> dict[str, Any]:
        """Return the handles by node, without the nodes that have no agent."""
        wanted = frozenset(nodes)
        if not wanted <= self._handles.keys():
            self._handles |= await in_thread(self._lookups, _look_up, wanted - self._handles.keys())
        return {node: self._handles[node] for node in wanted & self._handles.keys()}

    def forget(self, node: str) -> None:
        """Look the agent up again before its next call: it may have been replaced."""
        self._handles.pop(node, None)


def _look_up(nodes: Iterable[str]) -> dict[str, Any]:
    found = {}
    for node in nodes:
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            found[node] = ray.get_actor(names.agent_name(node), namespace=names.NAMESPACE)
    return found


class OrderRelay:
    """Orders that this agent passes on."""

    def __init__(self, agents: OtherAgents) -> None:
        self._agents = agents
        self._batches: dict[str, _Batch] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def pass_on(self, name: str, orders: tuple[PassedOrder, ...]) -> PassedAnswers:
        """Pass on the orders of a new batch; return new answers of the batch, within POLL_S, perhaps none."""
        if orders:
            while len(self._batches) >= MAX_BATCHES:
                del self._batches[next(iter(self._batches))]
            batch = self._batches[name] = _Batch(sum(len(order.nodes) for order in orders))
            task = asyncio.ensure_future(self._deliver(batch, orders))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        found = self._batches.get(name)
        if found is None:
            raise Unavailable("This relay does not have the batch.")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(found.arrived.wait(), POLL_S)
            await asyncio.wait_for(found.is_complete.wait(), GATHER_S)
        if not found.waiting:
            self._batches.pop(name, None)
        return found.take()

    async def _deliver(self, batch: _Batch, orders: tuple[PassedOrder, ...]) -> None:
        """Call the agents in the order of the orders, and collect the answers as they come."""
        handles = await self._agents.find(node for order in orders for _, node in order.nodes)
        await asyncio.gather(
            *(
                self._call(batch, number, node, handles.get(node), order)
                for order in orders
                for number, node in order.nodes
            )
        )

    async def _call(
        self, batch: _Batch, number: int, node: str, agent: Any | None, order: PassedOrder
    ) -> None:
        try:
            if agent is None:
                batch.undelivered.append(number)
            else:
                batch.values[number] = await getattr(agent, order.method).remote(*order.arguments)
        except ray.exceptions.RayTaskError as error:
            batch.failures[number] = failure_of(error)
        except Exception:  # after any error, the coordinator must call the agent itself
            self._agents.forget(node)
            batch.undelivered.append(number)
        batch.waiting -= 1
        batch.arrived.set()
        if not batch.waiting:
            batch.is_complete.set()


class ReportRelay:
    """Reports that this agent gathers; `send` calls the coordinator, which answers each report.

    Reports are sent when the ones before them are answered: the busier the coordinator, the more reports
    come with each message.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._gathered: dict[_Kind, list[_Gathered]] = {}
        self._turn = asyncio.Lock()  # held while reports are with the coordinator
        self._tasks: set[asyncio.Task[None]] = set()

    async def gather(self, report: GatheredReport) -> Any:
        """Send a report together with others; return the coordinator's answer, or raise its error."""
        kind = (report.waits, report.may_wait_s)
        gathered = self._gathered.setdefault(kind, [])
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        gathered.append((report, answer))
        if len(gathered) == 1:
            task = asyncio.ensure_future(self._send_soon(kind))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await answer

    async def _send_soon(self, kind: _Kind) -> None:
        waits, may_wait_s = kind
        await asyncio.sleep(max(GATHER_S, may_wait_s))
        if waits:
            await self._send_kind(kind)
        else:
            async with self._turn:
                await self._send_kind(kind)

    async def _send_kind(self, kind: _Kind) -> None:
        waiting = [(report, sender) for report, sender in self._gathered.pop(kind) if not sender.done()]
        gathered = list(_merged(waiting))
        await asyncio.gather(
            *(
                self._send_all(gathered[at : at + MAX_GATHERED])
                for at in range(0, len(gathered), MAX_GATHERED)
            )
        )

    async def _send_all(self, gathered: list[_Merged]) -> None:
        try:
            answers = await self._send(tuple(report for report, _ in gathered))
        except Exception as error:  # after any error, no sender may wait for ever
            failure = error if isinstance(error, CheckpointError) else Unavailable(reason(error))
            answers = tuple(GatheredAnswer(error=failure) for _ in gathered)
        for (_, senders), answer in zip(gathered, answers, strict=True):
            for sender in senders:
                if sender.done():  # the sender has given up
                    continue
                if answer.error is None:
                    sender.set_result(answer.value)
                else:
                    sender.set_exception(answer.error)


class RelayEndpoints:
    """The methods of an agent as a relay. The agent sets the fields: Ray binds no inherited constructor."""

    _orders: OrderRelay
    _reports: ReportRelay

    async def pass_on(self, batch: str, orders: tuple[PassedOrder, ...]) -> PassedAnswers:
        """Pass on orders to other agents, or return further answers to the orders of an earlier call."""
        return await self._orders.pass_on(batch, orders)

    async def gather(self, report: GatheredReport) -> Any:
        """Send a report of another agent to the coordinator, together with others; return the answer."""
        return await self._reports.gather(report)


def _merged(gathered: list[_Gathered]) -> Iterator[_Merged]:
    """Yield reports with the senders that wait for the answer; all progress of a run is one report."""
    progress: dict[str, list[_Gathered]] = {}  # by run
    for report, sender in gathered:
        if report.method == "ranks_progressed":
            progress.setdefault(report.arguments[0], []).append((report, sender))
        else:
            yield report, [sender]
    for run_uid, found in progress.items():
        for event in merge([report.arguments[1] for report, _ in found]):
            senders = [s for report, s in found if event.ranks.keys() >= report.arguments[1].ranks.keys()]
            yield found[0][0]._replace(arguments=(run_uid, event)), senders
