"""Perform the long effects of a run's machine: on the run's log, storage path and nodes.

The event that answers an effect reports a failure; the machine decides what to try again, and when.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeAlias

import ray

from ray_ckpt.actors.coordinator.agents import AGENT_CALL_S, reason
from ray_ckpt.actors.coordinator.run import Run
from ray_ckpt.actors.coordinator.run_nodes import RunNodes
from ray_ckpt.actors.coordinator.storage_work import delete_all, list_remote, write_description
from ray_ckpt.actors.messages import PutAwayRun
from ray_ckpt.actors.threads import in_thread
from ray_ckpt.core import messages as m
from ray_ckpt.errors import CheckpointError, CorruptionError, Fenced, Unavailable
from ray_ckpt.format.records import encode_record
from ray_ckpt.storage.log_store import CreateResult, create_record, read_run, trim_log, write_snapshot
from ray_ckpt.types import AttemptId

log = logging.getLogger("ray_ckpt.coordinator")

STORE_TIMEOUT_S = 30.0  # to create a log record; a longer create has the outcome "unknown"
DRAIN_SLACK_S = 900.0  # time of a drain besides that for its bytes: on a poor link, parts go one by one
LEAST_DRAIN_BYTES_PER_S = 1 << 20  # a drain of a node that is slower counts as stuck
REMOTE_THREADS = 4  # for deletes and descriptions on storage paths, over all runs
INVENTORY_AGAIN_S = 1.0  # wait before an inventory is taken again

Work: TypeAlias = (
    m.Append
    | m.Delete
    | m.DeleteOrphans
    | m.Drain
    | m.PutAway
    | m.RequestInventory
    | m.Scrub
    | m.StartSession
    | m.SweepRemote
    | m.WriteDescription
    | m.WriteSnapshot
)
"""Effects that take long, so they run in tasks."""


class Effects:
    """Long effects of all runs; `is_dead(node)` is called when the agent of a node is found dead."""

    def __init__(self, nodes: RunNodes, is_dead: Callable[[str], None]) -> None:
        self._nodes = nodes
        self._agents = nodes.agents
        self._is_dead = is_dead
        # Separate from the threads for logs and calls to Ray, so that a hanging store stops neither.
        self.remote_io = ThreadPoolExecutor(REMOTE_THREADS, thread_name_prefix="ray_ckpt-remote")

    async def perform(self, run: Run, work: Work) -> tuple[m.Event, ...]:
        """Perform an effect, and return the events that answer it."""
        match work:
            case m.Append():
                return (await self._append(run, work),)
            case m.Scrub():
                return (await self._scrub(run, work),)
            case m.WriteSnapshot():
                return (await self._write_snapshot(run, work),)
            case m.Drain():
                return (await self._drain(run, work),)
            case m.WriteDescription():
                return (await self._describe(run, work),)
            case m.Delete():
                return (await self._delete(run, work),)
            case m.SweepRemote():
                return (await self._sweep(run, work),)
            case m.PutAway():
                return (await self._put_away(run, work),)
            case m.RequestInventory():
                return await self._take_inventory(run, work)
            case m.StartSession():
                await self._start_session(run, work)
            case m.DeleteOrphans():
                await self._delete_orphans(run, work)
        return ()

    async def _append(self, run: Run, work: m.Append) -> m.Appended:
        record, service, missing = work.record, "", ""
        create = run.log_threads.run(create_record, run.store, record.seq, encode_record(record))
        outcome: Literal["ok", "exists", "unknown"] = "unknown"
        try:
            match await asyncio.wait_for(create, STORE_TIMEOUT_S):
                case CreateResult.OK:
                    outcome = "ok"
                case CreateResult.EXISTS:
                    outcome = "exists"
                    service = await asyncio.wait_for(self._last_service(run), STORE_TIMEOUT_S)
            if outcome == "unknown":
                missing = await asyncio.wait_for(run.log_threads.run(run.remote.missing), STORE_TIMEOUT_S)
        except (TimeoutError, OSError, CheckpointError) as error:
            log.warning("%s: record %d: %s", run.spec.name, record.seq, reason(error))
        return m.Appended(seq=record.seq, outcome=outcome, service=service, reason=missing)

    async def _last_service(self, run: Run) -> str:
        """Return the service whose coordinator wrote the last epoch of the log."""
        history, records = await run.log_threads.run(read_run, run.store)
        for record, record_digest in records:
            history.apply(record, record_digest)
        return history.service

    async def _write_snapshot(self, run: Run, work: m.WriteSnapshot) -> m.SnapshotWritten:
        snapshot, error = run.machine.history.to_snapshot(time.time()), None
        try:
            await in_thread(self.remote_io, write_snapshot, run.store, snapshot)
            await in_thread(self.remote_io, trim_log, run.store, time.time())
        except (OSError, CheckpointError) as failure:
            error = str(failure)
        return m.SnapshotWritten(seq=work.seq, error=error)

    async def _scrub(self, run: Run, work: m.Scrub) -> m.ScrubEnded:
        attempt, index, place = work.attempt, work.node_index, work.place
        damage: tuple[str, ...] = ()
        error = None
        try:
            if place == m.REMOTE:
                num_nodes = run.machine.history.checkpoints[attempt.attempt].num_nodes
                node = secrets.choice(sorted(run.opened & self._agents.nodes))
                damage = await self._agents.call(node, "scrub_remote", run.run_uid, attempt, num_nodes, index)
            else:
                damage = await self._agents.call(
                    place, "scrub", run.run_uid, attempt, index, run.machine.epoch
                )
        except (ray.exceptions.RayError, KeyError, IndexError) as failure:
            error = reason(failure)
        return m.ScrubEnded(attempt=attempt, node_index=index, place=place, damage=damage, error=error)

    async def _drain(self, run: Run, work: m.Drain) -> m.DrainEnded:
        error, is_damage = None, False
        try:
            order = (run.run_uid, work.attempt, work.node_index, run.machine.epoch)
            uploaded = self._agents.call(work.node_id, "drain", *order)
            await asyncio.wait_for(uploaded, _drain_bound_s(run, work.attempt))
        except (ray.exceptions.RayError, KeyError, TimeoutError) as failure:
            error = reason(failure)
            is_damage = isinstance(getattr(failure, "cause", None), CorruptionError)
            if isinstance(failure, ray.exceptions.ActorDiedError | KeyError):
                self._is_dead(work.node_id)  # report the death, since perhaps no rank has noticed
        return m.DrainEnded(
            attempt=work.attempt,
            node_index=work.node_index,
            node_id=work.node_id,
            error=error,
            is_damage=is_damage,
        )

    async def _describe(self, run: Run, work: m.WriteDescription) -> m.DescriptionWritten:
        error, is_damage = None, False
        try:
            await in_thread(self.remote_io, write_description, run.remote, work.checkpoint)
        except (OSError, EOFError, CheckpointError) as failure:
            error, is_damage = str(failure), isinstance(failure, CorruptionError | EOFError)
        return m.DescriptionWritten(attempt=work.checkpoint.id, error=error, is_damage=is_damage)

    async def _delete(self, run: Run, work: m.Delete) -> m.DeleteEnded:
        error = None
        try:
            if work.place == m.REMOTE:
                await in_thread(self.remote_io, run.remote.delete, work.directory)
            elif work.place in self._agents.nodes:
                order = (run.run_uid, (work.directory,), run.machine.epoch)
                await self._agents.call(work.place, "delete", *order)
        except (OSError, ray.exceptions.RayError) as failure:
            error = reason(failure)
        return m.DeleteEnded(attempt=work.attempt, place=work.place, error=error)

    async def _sweep(self, run: Run, work: m.SweepRemote) -> m.RemoteListed:
        try:
            return await in_thread(self.remote_io, list_remote, run.remote, work)
        except (OSError, CheckpointError) as failure:
            return m.RemoteListed(number=work.number, error=reason(failure))

    async def _delete_orphans(self, run: Run, work: m.DeleteOrphans) -> None:
        """Delete orphans; the next listing finds the orphans that could not be deleted."""
        try:
            await in_thread(self.remote_io, delete_all, run.remote, work)
        except (OSError, CheckpointError) as failure:
            log.warning("%s: orphans on the storage path are left: %s", run.spec.name, reason(failure))

    async def _put_away(self, run: Run, work: m.PutAway) -> m.PutAwayEnded:
        """Make all live nodes that may hold files of the run delete them; start missing agents."""
        order = PutAwayRun(spec=run.spec, run_uid=run.run_uid, kept=work.kept, epoch=run.machine.epoch)
        nodes = (run.opened | run.opening | self._agents.nodes) & {*await self._agents.live_nodes()}
        calls = (self._agents.request(node, "put_away", order) for node in nodes)
        error = None
        for node, done in zip(nodes, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(done, Fenced):
                log.info("%s: a newer coordinator has the run on node %s", run.spec.name, node[:12])
            elif done is not True and node in await self._agents.live_nodes():
                cause = reason(done) if isinstance(done, Exception) else "its agent does not answer"
                error = f"node {node[:12]}: {cause}"
        return m.PutAwayEnded(error=error)

    async def _take_inventory(self, run: Run, work: m.RequestInventory) -> tuple[m.Event, ...]:
        await asyncio.sleep(INVENTORY_AGAIN_S)
        try:
            inventories, seen = await self._nodes.open_on_all(run)
        except (CheckpointError, ray.exceptions.RayError) as error:
            log.warning("%s: a node could not take inventory: %s", run.spec.name, error)
            return (m.InventoryTaken(token=work.token, inventories={}),)
        return seen, m.InventoryTaken(token=work.token, inventories=inventories)

    async def _start_session(self, run: Run, work: m.StartSession) -> None:
        """Send the plan to all nodes of the group, and answer the calls that wait for it."""
        start = self._nodes.session_start(run, work.plan)
        try:
            calls = [self._agents.call(n.node_id, "start_session", start) for n in work.plan.nodes]
            await asyncio.wait_for(asyncio.gather(*calls), AGENT_CALL_S)
        except (ray.exceptions.RayError, TimeoutError, KeyError) as error:
            problem = Unavailable(f"A node did not take session {work.plan.session}: {reason(error)}")
            for token in work.tokens:
                run.fail(token, problem)
            return
        for token in work.tokens:
            run.reply(token, work.plan)


def _drain_bound_s(run: Run, attempt: AttemptId) -> float:
    """Return the time after which another holder drains too, since the first holder may be frozen.

    Two uploads of one fragment do no harm.
    """
    checkpoint = run.machine.history.checkpoints[attempt.attempt]
    rate = min(LEAST_DRAIN_BYTES_PER_S, run.spec.options.drain_bytes_per_s or LEAST_DRAIN_BYTES_PER_S)
    return DRAIN_SLACK_S + checkpoint.size_bytes / rate
