"""The ports of a run's host on Ray: calls to agents, and work in threads on the log and the storage path.

An order of the host becomes a call of an agent's method, and an exception becomes a `Failure`. This module
decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Iterator, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import ray

from ray_ckpt.actors import ray_cluster
from ray_ckpt.actors.coordinator.nodes import seen_by
from ray_ckpt.actors.coordinator.storage_work import delete_all, list_remote, write_description
from ray_ckpt.actors.failures import failure_of, reason
from ray_ckpt.actors.messages import OpenRun, PassedAnswers, PassedOrder, PutAwayRun, SessionStart
from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.values import SessionPlan, Token
from ray_ckpt.engine.deletes import NodeDeletes
from ray_ckpt.engine.ports import (
    Answered,
    Call,
    Failure,
    HostEvent,
    LauncherSeen,
    OpenOnNode,
    StorageEffect,
    UpdatePeer,
)
from ray_ckpt.engine.relays import ORDERS_S, Batch, OrderRelays, relay_size
from ray_ckpt.format.records import encode_record
from ray_ckpt.storage.log_store import CreateResult, create_record, read_run, trim_log, write_snapshot
from ray_ckpt.telemetry import Sample

if TYPE_CHECKING:
    from ray_ckpt.actors.coordinator.engine import Engine
    from ray_ckpt.actors.coordinator.run import Run

log = logging.getLogger("ray_ckpt.coordinator")

SEND_AGAIN_S = (2.0, 8.0, 30.0)  # pauses before an order is sent again: a connection breaks for seconds
STORE_TIMEOUT_S = 30.0  # to create a log record; a longer create has the outcome "unknown"


class RayPorts:
    """The ports of one run; tasks of the engine do the work that takes long."""

    def __init__(self, engine: Engine, run: Run) -> None:
        self._engine = engine
        self._run = run
        self._relays = OrderRelays(engine.relay_nodes)
        self._calls: list[Call] = []  # begun at this moment, not sent yet
        self._packed: tuple[SessionPlan, int, bytes] | None = None  # plan, changes of addresses, bytes

    # -- agents --------------------------------------------------------------------------------------

    def call(self, call: Call) -> None:
        if not self._calls:
            asyncio.get_running_loop().call_soon(self._send)
        self._calls.append(call)

    def _send(self) -> None:
        """Send the calls that were begun together, through relays if they are many."""
        calls, self._calls = self._calls, []
        agents = self._engine.agents.cards.keys()
        self._relays.size = relay_size(self._engine.relay_nodes, len(agents))
        for part in self._relays.divide(calls, agents, time.monotonic()):
            if isinstance(part, Batch):
                self._engine.spawn(self._pass_on(part))
            else:
                self._call(part)

    def _call(self, call: Call) -> None:
        try:
            answer = self._begin(call)
        except KeyError:
            failure = Failure(text="there is no agent", is_dead=True)
            self._run.host.handle(Answered(to=call, failure=failure))
            return
        self._engine.spawn(self._await(call, answer))

    async def _pass_on(self, batch: Batch) -> None:
        """Send calls through a relay; repeat without it those that it does not deliver or answer in time."""
        agents, name, begun_s = self._engine.agents, uuid.uuid4().hex, time.monotonic()
        orders = tuple(self._passed(batch))
        try:
            while batch.calls:
                answer = agents.call(batch.relay, "pass_on", name, orders)
                answers: PassedAnswers = await asyncio.wait_for(answer, ORDERS_S)
                orders, waited_s = (), time.monotonic() - begun_s
                for number, value in answers.values.items():
                    self._end(batch.answered(number), value, None)
                for number, failure in answers.failures.items():
                    self._end(batch.answered(number), None, failure)
                for number in answers.undelivered:
                    if (call := batch.answered(number)) is not None:
                        self._call(call)
                late = [number for number, call in batch.calls.items() if waited_s > call.bound_s]
                for number in late:
                    self._end(batch.answered(number), None, Failure(text="it did not answer in time"))
        except (ray.exceptions.RayError, TimeoutError, KeyError) as error:
            log.warning("relay %s does not answer: %s", batch.relay[:12], reason(error))
            self._relays.failed(batch.relay, time.monotonic())
        for call in batch.give_up():
            self._call(call)

    def _passed(self, batch: Batch) -> Iterator[PassedOrder]:
        """Yield the calls of a batch as orders; those that have no address are sent without the relay."""
        alike: dict[object, list[tuple[int, Call]]] = {}
        for number, call in batch.calls.items():
            order = call.order
            same = order if isinstance(order, n.DeleteOrdered) else id(order)
            alike.setdefault(same, []).append((number, call))
        for calls in alike.values():
            try:
                method, arguments = self._method(calls[0][1], relay=batch.relay)
            except KeyError:
                for number, call in calls:
                    batch.answered(number)
                    self._call(call)
                continue
            nodes = tuple((number, call.node) for number, call in calls)
            yield PassedOrder(nodes=nodes, method=method, arguments=arguments)

    def agents(self) -> Set[str]:
        return self._engine.agents.nodes

    def revive(self, node: str) -> None:
        self._engine.spawn(self._engine.restart_agent(node))

    def _begin(self, call: Call) -> Awaitable[Any]:
        """Call the agent's method that carries out an order; KeyError if there is no agent."""
        method, arguments = self._method(call)
        if isinstance(call.order, OpenOnNode | n.RunPutAway):
            return self._engine.agents.request(call.node, method, *arguments)
        return self._engine.agents.call(call.node, method, *arguments)

    def _method(self, call: Call, *, relay: str = "") -> tuple[str, tuple[Any, ...]]:
        """Return the method of the agent that carries out an order, and its arguments."""
        run, cards, uid = self._run, self._engine.agents.cards, self._run.run_uid
        epoch = run.host.machine.epoch
        match call.order:
            case OpenOnNode(epoch=epoch, known=known):
                order = OpenRun(spec=run.spec, run_uid=uid, nonce=run.nonce, epoch=epoch, known=known)
                return "open_run", (order,)
            case n.RunPutAway(kept=kept, epoch=epoch):
                return "put_away", (PutAwayRun(spec=run.spec, run_uid=uid, kept=kept, epoch=epoch),)
            case n.SessionStarted(plan=plan, epoch=epoch):
                packed = self._pack(plan)
                return "start_session", (
                    SessionStart(packed=packed, spec=run.spec, epoch=epoch, relay=relay),
                )
            case n.CoordinatorReturned(epoch=epoch):
                return "coordinator_returned", (uid, epoch)
            case n.SessionEnded(session_key=session_key, error=error, epoch=epoch, frees=frees):
                return "end_session", (uid, session_key, error, epoch, frees)
            case n.OutcomeNotified(attempt=attempt, level=level, error=problem, epoch=epoch):
                return "notify_outcome", (uid, attempt, level, problem, epoch)
            case n.SaveStepAnnounced(session_key=session_key, signal=signal, epoch=epoch):
                return "announce_save_step", (uid, session_key, signal, epoch)
            case n.SurvivorsAsked(session_key=session_key, epoch=epoch):
                return "ask_survivors", (uid, session_key, epoch)
            case n.SalvageOrdered(salvage=salvage, epoch=epoch):
                return "order_salvage", (uid, salvage, epoch)
            case n.CopyOrdered(attempt=attempt, node_index=index, holder=holder, epoch=epoch):
                return "replicate", (uid, attempt, index, holder, cards[holder].endpoint, epoch)
            case n.DeleteOrdered(directories=directories, evicted=evicted, epoch=epoch):
                return "delete", (uid, directories, evicted, epoch)
            case m.Code(places=places):
                nodes = {node for held in (*places.fragments, *places.parities) for node in held}
                endpoints = {node: cards[node].endpoint for node in nodes & cards.keys()}
                return "compute", (uid, call.order, endpoints, epoch)
            case m.Drain(attempt=attempt, node_index=index, items=items) if items:
                return "upload_items", (uid, attempt, index, items, epoch)
            case m.Drain(attempt=attempt, node_index=index, like=like, is_urgent=is_urgent):
                return "drain", (uid, attempt, index, like, epoch, is_urgent)
            case m.Scrub(attempt=attempt, node_index=index, place=place) if place == m.REMOTE:
                num_nodes = run.machine.history.checkpoints[attempt.attempt].num_nodes
                return "scrub_remote", (uid, attempt, num_nodes, index)
            case m.Scrub(attempt=attempt, node_index=index):
                return "scrub", (uid, attempt, index, epoch)
            case n.RunReleased(session_key=session_key, is_finished=is_finished, epoch=epoch):
                return "release_run", (uid, session_key, is_finished, epoch)
            case UpdatePeer(node=node):
                return "update_peer", (uid, node, cards[node].endpoint)
            case order:
                raise TypeError(f"no agent takes {order!r}")

    def _pack(self, plan: SessionPlan) -> bytes:
        """Return the plan and the addresses of all agents in bytes, made once for all nodes of a group."""
        agents, known = self._engine.agents, self._packed
        if known is None or known[0] is not plan or known[1] != agents.num_changes:
            packed = SessionStart.pack(plan, agents.endpoints)
            known = self._packed = (plan, agents.num_changes, packed)
        return known[2]

    async def _await(self, call: Call, answer: Awaitable[Any]) -> None:
        value, failure = None, None
        try:
            value = await asyncio.wait_for(answer, None if math.isinf(call.bound_s) else call.bound_s)
            if value is None and isinstance(call.order, OpenOnNode | n.RunPutAway):
                failure = Failure(text="its agent does not answer")
        except TimeoutError:
            failure = Failure(text=f"its agent has not answered within {call.bound_s:g} s")
        except Exception as error:
            failure = failure_of(error)
        self._end(call, value, failure)

    def _end(self, call: Call | None, value: object, failure: Failure | None) -> None:
        """Answer a call, unless the host does not need the answer; None: it has been answered before."""
        if call is None or (failure is None and not call.is_awaited):
            return
        is_noted = failure is not None and isinstance(call.work, NodeDeletes | None)
        if failure is not None and is_noted and not isinstance(call.order, OpenOnNode):
            order = type(call.order).__name__
            log.warning("node %s did not take %s: %s", call.node[:12], order, failure.text)
        if value and isinstance(call.order, n.DeleteOrdered):
            log.warning("node %s did not delete %s", call.node[:12], value)
        self._run.host.handle(Answered(to=call, value=value, failure=failure))
        if failure is not None and isinstance(call.order, n.OutcomeNotified | n.RunReleased):
            self._send_again(call, failure)

    def _send_again(self, call: Call, failure: Failure) -> None:
        """Send what an agent waits for again after a pause, at most once for each of SEND_AGAIN_S."""
        number = call.num_tries
        if number < len(SEND_AGAIN_S) and failure.epoch is None and not failure.is_dead:
            again = replace(call, num_tries=number + 1)
            asyncio.get_running_loop().call_later(SEND_AGAIN_S[number], self._call_again, again)

    def _call_again(self, call: Call) -> None:
        order, run = call.order, self._run
        assert isinstance(order, n.OutcomeNotified | n.RunReleased)
        if order.epoch == run.host.machine.epoch and call.node in self.agents():
            self.call(call)

    # -- storage -------------------------------------------------------------------------------------

    def start(self, work: StorageEffect) -> None:
        if isinstance(work, m.Append):
            self._engine.spawn(self._append(work))
        else:
            self._engine.spawn(self._work(work))

    async def _append(self, work: m.Append) -> None:
        run, record, service, why = self._run, work.record, "", ""
        outcome: Literal["ok", "exists", "unknown"] = "unknown"
        try:
            create = run.log_threads.run(create_record, run.store, record.seq, encode_record(record))
            match await asyncio.wait_for(create, STORE_TIMEOUT_S):
                case CreateResult.OK:
                    outcome = "ok"
                case CreateResult.EXISTS:
                    outcome = "exists"
                    service = await asyncio.wait_for(self._last_service(), STORE_TIMEOUT_S)
            if outcome == "unknown":
                why = run.store.last_error
                missing = await asyncio.wait_for(run.log_threads.run(run.remote.missing), STORE_TIMEOUT_S)
                why = missing or why
        except Exception as error:  # without an answer, the log would wait for ever
            log.warning("%s: record %d: %s", run.spec.name, record.seq, reason(error))
        run.host.handle(m.Appended(seq=record.seq, outcome=outcome, service=service, reason=why))

    async def _last_service(self) -> str:
        """Return the service whose coordinator wrote the last epoch of the log."""
        history, records = await self._run.log_threads.run(read_run, self._run.store)
        for record, record_digest in records:
            history.apply(record, record_digest)
        return history.service

    async def _work(self, work: StorageEffect) -> None:
        value, failure = None, None
        try:
            value = await self._in_thread(work)
        except Exception as error:
            failure = failure_of(error)
            name = self._run.spec.name
            if isinstance(work, m.DeleteOrphans):
                log.warning("%s: orphans on the storage path are left: %s", name, failure.text)
        self._run.host.handle(Answered(to=work, value=value, failure=failure))

    async def _in_thread(self, work: StorageEffect) -> object:
        run, threads = self._run, self._run.storage_threads
        match work:
            case m.WriteSnapshot():
                snapshot = run.machine.history.to_snapshot(time.time())
                await threads.run(write_snapshot, run.store, snapshot)
                await threads.run(trim_log, run.store, time.time())
            case m.WriteDescription(checkpoint=checkpoint, exported=exported):
                await threads.run(write_description, run.remote, checkpoint, exported)
            case m.Delete(directory=directory):
                await threads.run(run.remote.delete, directory)
            case m.SweepRemote():
                return await threads.run(list_remote, run.remote, work)
            case m.DeleteOrphans():  # the next listing finds the orphans that could not be deleted
                await threads.run(delete_all, run.remote, work)
        return None

    # -- cluster, callers, clock -----------------------------------------------------------------------

    def look(self) -> None:
        self._engine.spawn(self._look())

    async def _look(self) -> None:
        nodes = await self._engine.agents.cluster.now()  # a node of the group may just have joined
        self._run.host.handle(seen_by(nodes, self._run.spec.options))

    def look_for(self, owner: str) -> None:
        self._engine.spawn(self._look_for(owner))

    async def _look_for(self, owner: str) -> None:
        is_alive = await self._engine.is_alive(owner)
        ends_runs = ray_cluster.is_controller(owner)
        self._run.host.handle(LauncherSeen(owner=owner, is_alive=is_alive, ends_runs=ends_runs))

    def reply(self, token: Token, value: object) -> None:
        self._run.callers.reply(token, value)

    def fail(self, token: Token, error: Exception) -> None:
        self._run.callers.fail(token, error)

    def now_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()

    def later(self, delay_s: float, event: HostEvent) -> None:
        asyncio.get_running_loop().call_later(delay_s, self._run.host.handle, event)

    # -- process -------------------------------------------------------------------------------------

    def step_down(self, error: Exception, *, ends_process: bool) -> None:
        log.error("%s This coordinator steps down.", error)
        self._engine.drop(self._run, ends_process=ends_process)

    def close(self) -> None:
        self._engine.close(self._run)

    def warn(self, warning: m.Warn) -> None:
        name = self._run.spec.name
        if warning.is_expected:
            log.info("%s: %s", name, warning.text)
            return
        log.warning("%s: %s", name, warning.text)
        self._run.warning = (warning.text, time.time())

    def observe(self, event: m.Event) -> None:
        pass

    def measure(self, samples: tuple[Sample, ...]) -> None:
        for sample in samples:
            self._engine.meters.record(self._run.spec.name, sample)
