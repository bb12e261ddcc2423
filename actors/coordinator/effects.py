"""What a run's machine wants done on its log, its storage path and its nodes, and the events that answer.

Failures are answers too: the machine decides what is tried again, and when.
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

from ray_ckpt.actors.coordinator.agents import Agents, reason
from ray_ckpt.actors.coordinator.run import Run
from ray_ckpt.actors.coordinator.storage_work import delete_all, list_remote, write_description
from ray_ckpt.actors.threads import in_thread
from ray_ckpt.core import messages as m
from ray_ckpt.errors import CheckpointError, CorruptionError
from ray_ckpt.format.records import encode_record
from ray_ckpt.storage.log_store import CreateResult, create_record, read_run, trim_log, write_snapshot
from ray_ckpt.types import AttemptId

log = logging.getLogger("ray_ckpt.coordinator")

STORE_TIMEOUT_S = 30.0  # a create that takes longer is answered "unknown"
DRAIN_SLACK_S = 900.0  # for a drain, besides what its bytes take: one part at a time on a poor link
LEAST_DRAIN_BYTES_PER_S = 1 << 20  # of a node; whoever is slower is taken for stuck
REMOTE_THREADS = 4  # deletes and descriptions on storage paths, over all runs

Work: TypeAlias = (
    m.Append
    | m.Delete
    | m.DeleteOrphans
    | m.Drain
    | m.Scrub
    | m.SweepRemote
    | m.WriteDescription
    | m.WriteSnapshot
)
"""The effects that take long."""


class Effects:
    """`is_dead(node)` is called when the agent of a node turns out to be gone."""

    def __init__(self, agents: Agents, is_dead: Callable[[str], None]) -> None:
        self._agents = agents
        self._is_dead = is_dead
        # Apart from logs and questions to Ray, so that a hanging store stops none of those.
        self.remote_io = ThreadPoolExecutor(REMOTE_THREADS, thread_name_prefix="ray_ckpt-remote")

    async def perform(self, run: Run, work: Work) -> m.Event | None:
        """Do it, and return what the run's machine is to hear of it."""
        match work:
            case m.Append():
                return await self._append(run, work)
            case m.Scrub():
                return await self._scrub(run, work)
            case m.WriteSnapshot():
                return await self._write_snapshot(run, work)
            case m.Drain():
                return await self._drain(run, work)
            case m.WriteDescription():
                return await self._describe(run, work)
            case m.Delete():
                return await self._delete(run, work)
            case m.SweepRemote():
                return await self._sweep(run, work)
            case m.DeleteOrphans():
                await self._delete_orphans(run, work)
                return None

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
        """Whose coordinator has written the last epoch of the log."""
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
                self._is_dead(work.node_id)  # no rank may miss it for a while
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
        """What is not gone after it is found by the next listing."""
        try:
            await in_thread(self.remote_io, delete_all, run.remote, work)
        except (OSError, CheckpointError) as failure:
            log.warning("%s: the storage path is not tidied: %s", run.spec.name, reason(failure))


def _drain_bound_s(run: Run, attempt: AttemptId) -> float:
    """After this long another holder is asked: the first may be frozen. Twice is harmless."""
    checkpoint = run.machine.history.checkpoints[attempt.attempt]
    rate = min(LEAST_DRAIN_BYTES_PER_S, run.spec.options.drain_bytes_per_s or LEAST_DRAIN_BYTES_PER_S)
    return DRAIN_SLACK_S + checkpoint.size_bytes / rate
