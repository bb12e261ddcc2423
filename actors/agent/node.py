"""Resources that all runs of a node agent share: threads, metrics, and the connection to the coordinator."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import ray

from ray_ckpt import telemetry
from ray_ckpt.actors import names
from ray_ckpt.actors.agent.prefetch import PrefetchRoom
from ray_ckpt.actors.agent.priority import ActiveCopies, limit_heaps, yield_to_training
from ray_ckpt.actors.agent.relay import OtherAgents, ReportRelay
from ray_ckpt.actors.failures import reason
from ray_ckpt.actors.messages import GatheredAnswer, GatheredReport
from ray_ckpt.actors.metrics import Meters
from ray_ckpt.actors.threads import BriefThreads, in_thread
from ray_ckpt.engine.relays import REPORT_S, ReportRoute
from ray_ckpt.errors import CheckpointError, Unavailable
from ray_ckpt.preemption.cloud import CloudNotices
from ray_ckpt.telemetry import Sample
from ray_ckpt.transport.credentials import Credentials, ServiceKeys

log = logging.getLogger("ray_ckpt.agent")

DISK_THREADS = 4  # concurrent local work; more would only queue at the device
INVENTORY_THREADS = 2  # concurrent openings and inventories of runs; more would only queue at the device
STREAM_THREADS = 64  # one per rank of a node, since a stream occupies its thread while the rank copies
PEER_THREADS = 4  # concurrent copies to peers
CODE_THREADS = 2  # concurrent computations for parity groups; each reads from a whole group
PROBE_THREADS = 2  # concurrent probes of silent peers; few, since a copy has few holders

REPORT_AGAIN_S = (1.0, 3.0, 10.0)  # pauses; a connection breaks for seconds, a new coordinator asks itself

REPORTS = frozenset({"node_stored", "replica_ended", "save_refused", "ranks_progressed", "ranks_restored"})
WAITING = frozenset({"ranks_met", "node_restored"})  # reports whose answer depends on other nodes


class Node:
    """Shared resources of an agent. Each pool has one purpose. Each run has threads for its storage path."""

    def __init__(self, node_id: str, keys: ServiceKeys) -> None:
        self.node_id = node_id
        self.keys = keys
        limit_heaps()
        self.stream_io = ThreadPoolExecutor(STREAM_THREADS, "ray_ckpt-stream", yield_to_training)
        self.disk_io = ThreadPoolExecutor(DISK_THREADS, "ray_ckpt-disk", yield_to_training)
        # A run or a group that opens waits for epochs, marks and inventories: not behind writes, and not at
        # their priority.
        self.inventory_io = BriefThreads(INVENTORY_THREADS, "ray_ckpt-inventory")
        self.peer_io = ThreadPoolExecutor(PEER_THREADS, "ray_ckpt-peer", yield_to_training)
        self.code_io = ThreadPoolExecutor(CODE_THREADS, "ray_ckpt-code", yield_to_training)
        self.probe_io = ThreadPoolExecutor(PROBE_THREADS, "ray_ckpt-probe", yield_to_training)
        self.copies = ActiveCopies()
        self.prefetch_room = PrefetchRoom()
        self._cloud_io = ThreadPoolExecutor(1, "ray_ckpt-cloud")
        self._watches_cloud = False
        self._meters = Meters()
        self._tasks: set[asyncio.Task[None]] = set()
        self._coordinator: Any = None
        self.route = ReportRoute()
        self._relay_failed = asyncio.Event()  # another one after each failure
        self.reports = ReportRelay(self._send_gathered)
        self.agents = OtherAgents()

    def credentials(self, run_uid: str) -> Credentials:
        return self.keys.credentials(run_uid)

    def count_bytes(self, run_name: str, tier: str, size: int, shared_bytes: int = 0) -> None:
        """Count bytes that a save has moved to a tier, and bytes that were there already."""
        labels = {"tier": tier, "node": self.node_id}
        self._meters.record(run_name, Sample(metric=telemetry.SAVE_BYTES, value=size, labels=labels))
        if shared_bytes:
            shared = Sample(metric=telemetry.SHARED_BYTES, value=shared_bytes, labels=labels)
            self._meters.record(run_name, shared)

    def spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def request(self, method: str, *args: Any, may_wait_s: float = 0.0) -> Any:
        """Call the coordinator and return its result. Unavailable if the coordinator does not answer.

        The call goes through this node's relay if there is one and the call is a report; see
        `ray_ckpt.engine.relays`. The relay may keep the report for `may_wait_s`, to send it with others.
        """
        waits = method in WAITING
        if (waits or method in REPORTS) and (relay := self.route.via(time.monotonic())):
            report = GatheredReport(method=method, arguments=args, waits=waits, may_wait_s=may_wait_s)
            call = asyncio.ensure_future(self._through(relay, report))
            try:
                if waits:
                    return await self._while_relay_answers(call)
                return await asyncio.wait_for(call, REPORT_S + may_wait_s)
            except (ray.exceptions.RayError, CheckpointError, ValueError, TimeoutError) as error:
                cause = getattr(error, "cause", None) or error  # Ray's error is of the cause's class too
                if isinstance(cause, CheckpointError) and cause.fields.get("reached", True):
                    raise cause from None
                log.warning("relay %s does not answer: %s", relay[:12], reason(error))
                self.route.failed(time.monotonic())
                self._relay_failed.set()  # the ranks' progress finds out if a relay hangs
                self._relay_failed = asyncio.Event()
        return await self._request(method, *args)

    async def _while_relay_answers(self, call: asyncio.Future[Any]) -> Any:
        """Return the answer to a call; TimeoutError if the relay fails for another report."""
        failed = asyncio.ensure_future(self._relay_failed.wait())
        try:
            await asyncio.wait({call, failed}, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            raise TimeoutError("it did not take another report")
        finally:
            failed.cancel()
            call.cancel()

    async def _through(self, relay: str, report: GatheredReport) -> Any:
        if relay == self.node_id:
            return await self.reports.gather(report)
        agent = (await self.agents.find([relay])).get(relay)
        if agent is None:
            raise ValueError("there is no such agent")
        try:
            return await agent.gather.remote(report)
        except ray.exceptions.RayError:
            self.agents.forget(relay)
            raise

    async def _send_gathered(self, reports: tuple[GatheredReport, ...]) -> tuple[GatheredAnswer, ...]:
        answers: tuple[GatheredAnswer, ...] = await self._request("gathered", reports)
        return answers

    async def _request(self, method: str, *args: Any) -> Any:
        """Call the coordinator without a relay. Unavailable with `reached=False` if it is not reached."""
        for _ in range(2):  # the second try has a new handle, for a coordinator that was restarted
            if self._coordinator is None:
                find = partial(ray.get_actor, names.COORDINATOR, namespace=names.NAMESPACE)
                try:
                    self._coordinator = await asyncio.to_thread(find)  # for a minute, if Ray does not answer
                except (ValueError, ray.exceptions.RayError):
                    break
            try:
                return await getattr(self._coordinator, method).remote(*args)
            except ray.exceptions.RayTaskError as error:
                raise (
                    error.cause if isinstance(error.cause, CheckpointError) else Unavailable(str(error))
                ) from None
            except ray.exceptions.RayError:
                self._coordinator = None
        raise Unavailable(f"The coordinator did not answer {method}.", reached=False)

    async def report(self, method: str, *args: Any, is_wanted: Callable[[], bool] = lambda: False) -> None:
        """Call the coordinator; log a failure, which may cost a save but must not end the agent.

        If the coordinator is not reached, call again after REPORT_AGAIN_S while the report `is_wanted`.
        """
        for pause_s in (*REPORT_AGAIN_S, None):
            try:
                await self.request(method, *args)
                return
            except CheckpointError as error:
                is_over = error.fields.get("reached", True) or not is_wanted()
                if pause_s is None or is_over:
                    log.warning("the coordinator did not take %s: %s", method, error)
                    return
            await asyncio.sleep(pause_s)

    def watch_cloud(self) -> None:
        """Begin to poll the cloud's metadata service for notices, unless polling has begun.

        ConfigError if the environment of the agent names no cloud that is known.
        """
        if not self._watches_cloud:
            notices = CloudNotices.from_environment()
            self._watches_cloud = True
            self.spawn(self._watch_cloud(notices))

    async def _watch_cloud(self, notices: CloudNotices) -> None:
        while not notices.is_over:
            if (notice := await in_thread(self._cloud_io, notices.poll)) is not None:
                await self.report("node_preempted", self.node_id, notice)
            await asyncio.sleep(notices.poll_s)


async def _logged(work: Awaitable[None]) -> None:
    try:
        await work
    except Exception:
        log.exception("background work of the agent failed")
