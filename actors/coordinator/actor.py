"""The coordinator: one detached Ray actor per service. It serves many runs; a RunMachine decides for each.

Agents, launchers and the command line call the methods of this class. `Engine` runs the machines, `RunOpener`
and `Recovery` open runs, `ClusterWatch` checks the nodes, and `StatusReader` computes views for status. Each
run has separate threads for the run's log, so that a hanging store delays no other run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import ray

from ray_ckpt.actors import names
from ray_ckpt.actors.agent.priority import collect_seldom, settle_heap
from ray_ckpt.actors.coordinator.engine import Engine, RunSession, failed
from ray_ckpt.actors.coordinator.opening import RunOpener
from ray_ckpt.actors.coordinator.recovery import Recovery
from ray_ckpt.actors.coordinator.run import Run
from ray_ckpt.actors.coordinator.status import StatusReader
from ray_ckpt.actors.coordinator.watch import ClusterWatch
from ray_ckpt.actors.messages import (
    DrillSources,
    GatheredAnswer,
    GatheredReport,
    GroupCard,
    Joined,
    RunSpec,
    RunStatus,
    ServiceView,
)
from ray_ckpt.catalog.uri import Origin, find_origin
from ray_ckpt.config import is_encrypted, relay_nodes
from ray_ckpt.core import messages as m
from ray_ckpt.core.awaited import Awaited
from ray_ckpt.core.log_requests import checkpoint_to_pin, checkpoint_to_unpin
from ray_ckpt.core.values import GroupNode, SessionKey, Token
from ray_ckpt.engine.ports import GroupRequested, HostEvent, OwnerChecked, PartRequested, ServiceEnding
from ray_ckpt.errors import ConfigError, ServiceError, Unavailable
from ray_ckpt.format.records import Drilled
from ray_ckpt.preemption.notice import Notice
from ray_ckpt.transport.credentials import ServiceKeys
from ray_ckpt.types import (
    UNKNOWN_LAUNCH,
    CheckpointInfo,
    Exposure,
    GroupPart,
    LaunchTimes,
    Level,
    RankRestore,
)

log = logging.getLogger("ray_ckpt.coordinator")

LAST_RECORDS_S = 10.0  # wait for records in flight at a stop; the next service finds later ones too
LAST_RECORDS_POLL_S = 0.5
ENDING_S = 120.0  # after shut_down; an actor that the caller has not killed by then exits
FEW_NODES = 1_000  # of a group whose objects are collected as any others


class Coordinator:
    """Endpoints of the service. Calls name a run by its key (`RunSpec.key`), calls of agents by its uid."""

    def __init__(self) -> None:
        self._problem: ConfigError | None = None  # error in this node's environment, raised by `hello`
        encrypt, num_relayed = True, 0
        try:
            encrypt, num_relayed = is_encrypted(), relay_nodes()
        except ConfigError as error:
            self._problem = error
        collect_seldom()
        keys = ServiceKeys.make(datetime.now(UTC), encrypt=encrypt)
        self.engine = Engine(keys, relay_nodes=num_relayed)
        self._watch = ClusterWatch(self.engine)
        self._opener = RunOpener(self.engine, self._watch.start)
        self._recovery = Recovery(self.engine, self._opener)
        self._status = StatusReader(self.engine)
        if ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None:
            self.engine.spawn(self._recovery.begin())

    async def hello(self) -> int:
        """Return the protocol version, once this coordinator is ready."""
        if self._problem is not None:
            raise self._problem
        self.engine.runs.check_not_ending()
        await self._recovery.ready()
        return names.PROTOCOL_VERSION

    # -- launchers -----------------------------------------------------------------------------------

    async def open_run(self, spec: RunSpec, owner: str) -> str:
        """Open the run's log, start agents on all live nodes, check every path. Return the run uid.

        RunInUse or RunSuperseded if `owner` may not own the run.
        """
        runs = self.engine.runs
        runs.check_not_ending()
        with runs.in_use(spec.name):
            await self._recovery.ready()
            uid = await self._opener.open(spec, owner=owner)
            run = runs.get(spec.key)
            await self.engine.request(run, lambda token: OwnerChecked(token=token, owner=owner))
            return uid

    async def open_group(
        self,
        key: str,
        nodes: tuple[GroupNode, ...],
        resume: Any,
        owner: str,
        launch: LaunchTimes = UNKNOWN_LAUNCH,
    ) -> Joined:
        """Begin a training group: choose its checkpoint, log its session, send the plan to its nodes."""
        self.engine.runs.check_not_ending()
        run = self.engine.runs.get(key)
        with self.engine.runs.in_use(run.spec.name):
            return await self._join(
                run,
                lambda token: GroupRequested(
                    token=token, nodes=nodes, resume=resume, owner=owner, launch=launch
                ),
            )

    async def _join(self, run: Run, request: Callable[[Token], HostEvent]) -> Joined:
        origin = await self._find_origin(run)
        plan = await self.engine.request(run, request)
        if len(plan.nodes) > FEW_NODES:
            settle_heap()
        return Joined(
            run_uid=run.run_uid,
            spec=run.spec,
            session_key=plan.session_key,
            world_size=plan.world_size,
            nodes={rank: node.node_id for node in plan.nodes for rank in node.ranks},
            origin=origin if plan.resume is None else None,
        )

    async def _find_origin(self, run: Run) -> Origin | None:
        """Return the checkpoint of another run with which a run without checkpoints begins.

        ConfigError or StoragePathError if the options name a checkpoint that does not exist.
        """
        spec = run.spec
        if run.machine.history.lineage() and spec.options.resume != "never":
            return None
        return await run.storage_threads.run(find_origin, spec.options, spec.storage)

    async def open_part(
        self,
        key: str,
        parts: tuple[GroupPart, ...],
        part: str,
        nodes: tuple[str, ...],
        resume: Any,
        owner: str,
    ) -> Joined:
        """Join one of several worker groups that form one group; `nodes` has the node of each rank of `part`.

        The last part to arrive opens the group. A part that joins again replaces its earlier entry.
        """
        self.engine.runs.check_not_ending()
        run = self.engine.runs.get(key)
        with self.engine.runs.in_use(run.spec.name):
            joined = await self._join(
                run,
                lambda token: PartRequested(
                    token=token, parts=parts, part=part, nodes=nodes, resume=resume, owner=owner
                ),
            )
        return replace(joined, parts=parts)

    async def salvage(self, key: str) -> None:
        """Let the survivors of a group that has lost ranks save the last step; return when that has ended."""
        await self._recovery.settled(key)
        run = await self._opener.reach(key)
        await self.engine.request(run, lambda token: m.SalvageRequested(token=token))

    async def finish(
        self, key: str, timeout_s: float, has_failed: bool = False, owner: str = ""
    ) -> CheckpointInfo | None:
        """End or give up the run; return its last checkpoint once that checkpoint is durable.

        RunSuperseded if another launcher than `owner` has the run.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._recovery.settled(key), timeout_s)
        run = await self._opener.reach(key)
        end = partial(m.FinishRequested, owner=owner, ends_group=True, has_failed=has_failed)
        asked = self.engine.request(run, lambda token: end(token=token))
        try:
            newest: CheckpointInfo | None = await asyncio.wait_for(asked, timeout_s)
        except TimeoutError:
            raise _unfinished(run, timeout_s) from None
        return newest

    # -- command line, users -----------------------------------------------------------------------------

    async def status(self, key: str) -> RunStatus:
        return await self._status.status(await self._opener.reach(key))

    async def exposure(self, key: str) -> tuple[Exposure, ...]:
        return (await self._opener.reach(key)).machine.view.exposure()

    async def overview(self) -> ServiceView:
        await self._recovery.ready()
        return await self._status.overview()

    async def shut_down(self, force: bool) -> ServiceView:
        """End all agents, and return the view before that; the caller then kills this actor.

        Without `force`, ServiceError if a group is at work or a needed checkpoint is only on the nodes'
        disks; then nothing has changed. No files are deleted: the next service finds them.
        """
        engine, view = self.engine, await self.overview()
        if (reasons := engine.runs.objections(view, time.time())) and not force:
            raise ServiceError(
                f"The service is in use: {'; '.join(reasons)}.",
                hint="End the training and wait for its drains (`ray-ckpt status`), or give --force: files "
                "stay on the nodes' disks, and the next service finds them there.",
            )
        engine.runs.is_ending = True
        engine.agents.close()
        for run in engine.runs:
            run.host.handle(ServiceEnding())
        asyncio.get_running_loop().call_later(ENDING_S, os._exit, 1)
        self._watch.stop()
        until_s = time.monotonic() + LAST_RECORDS_S
        while any(run.machine.view.records_waiting for run in engine.runs) and time.monotonic() < until_s:
            await asyncio.sleep(LAST_RECORDS_POLL_S)
        engine.agents.end_all()
        return view

    async def pin(self, key: str, step: int, owner: str, expires_in_s: float | None) -> CheckpointInfo:
        """Pin the newest checkpoint of a step for `owner`, and return it.

        ConfigError if no checkpoint of the step is live.
        """
        run = await self._opener.reach(key)
        end_s = None if expires_in_s is None else time.time() + expires_in_s
        attempt = checkpoint_to_pin(run.machine.history, step).id.attempt
        await self.engine.request(
            run, lambda token: m.PinRequested(token=token, attempt=attempt, owner=owner, expires_at_s=end_s)
        )
        return run.machine.history.checkpoints[attempt]

    async def unpin(self, key: str, step: int, owner: str) -> CheckpointInfo:
        """End a pin of `owner`, and return the checkpoint."""
        run = await self._opener.reach(key)
        attempt = checkpoint_to_unpin(run.machine.history, step, owner).id.attempt
        await self.engine.request(
            run, lambda token: m.UnpinRequested(token=token, attempt=attempt, owner=owner)
        )
        return run.machine.history.checkpoints[attempt]

    async def drain(self, key: str, attempt: str) -> None:
        """Order the upload of a checkpoint to the storage path, due or not; do not wait for its end."""
        run = await self._opener.reach(key)
        await self.engine.request(run, lambda token: m.DrainRequested(token=token, attempt=attempt))

    async def drill_sources(self, key: str) -> DrillSources:
        """Return the locations of the run's checkpoints, for drills. Unavailable if the run is not open."""
        await self._recovery.ready()
        return await self._status.drill_sources(await self._opener.reach(key))

    async def record_drill(self, key: str, result: Drilled) -> None:
        """Append the result of a drill to the log; return when the record is in the log."""
        run = await self._opener.reach(key)
        await self.engine.request(run, lambda token: m.DrillEnded(token=token, result=result))

    async def annotate(self, key: str, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to the newest live checkpoint of a step; see `m.AnnotateRequested`."""
        await self._annotate(await self._opener.reach(key), step, metrics)

    async def _annotate(self, run: Run, step: int, metrics: Mapping[str, float]) -> None:
        await self.engine.request(
            run, lambda token: m.AnnotateRequested(token=token, step=step, metrics=metrics)
        )

    # -- agents --------------------------------------------------------------------------------------

    async def gathered(self, reports: tuple[GatheredReport, ...]) -> tuple[GatheredAnswer, ...]:
        """Handle reports that a relay has gathered, in order, and answer each."""
        if any(report.waits for report in reports):
            return tuple(await asyncio.gather(*map(self._answered, reports)))
        take = self.engine.take
        return tuple([take(report) or await self._answered(report) for report in reports])

    async def _answered(self, report: GatheredReport) -> GatheredAnswer:
        try:
            return GatheredAnswer(value=await getattr(self, report.method)(*report.arguments))
        except Exception as error:  # the other reports of the message are answered
            return GatheredAnswer(error=failed(report, error))

    async def node_stored(self, event: m.NodeStored) -> None:
        self._handle(event.attempt.run_uid, event)

    async def replica_ended(self, event: m.ReplicaEnded) -> None:
        self._handle(event.attempt.run_uid, event)

    async def save_refused(self, event: m.SaveRefused) -> None:
        self._handle(event.attempt.run_uid, event)

    async def survivors_reported(self, run_uid: str, event: m.SurvivorsReported) -> None:
        """Record what a node has for a salvage."""
        await self._recovery.ready()
        self._handle(run_uid, event)

    async def ranks_progressed(self, run_uid: str, event: m.RanksProgressed) -> tuple[Awaited, ...]:
        """Record the progress of a node's ranks, and return the ranks that the group waits for."""
        await self._recovery.ready()
        return self._handle(run_uid, event).machine.view.awaited()

    async def ranks_restored(self, run_uid: str, event: m.RanksRestored) -> tuple[Awaited, ...] | None:
        """Record ranks that have restored. Return the ranks that the group waits for; None: all have `go`."""
        await self._recovery.ready()
        view = self._handle(run_uid, event).machine.view
        return None if view.has_go(event.session_key) else view.awaited()

    def _handle(self, run_uid: str, event: m.Event) -> Run:
        run = self.engine.runs.by_uid(run_uid)
        run.host.handle(event)
        return run

    async def ranks_met(
        self, run_uid: str, session_key: SessionKey, number: int, ranks: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Wait at a barrier for the ranks of other nodes. Return the ranks that did not come."""
        await self._recovery.ready()
        answer: m.BarrierAnswer = await self.engine.request(
            self.engine.runs.by_uid(run_uid),
            lambda token: m.BarrierReached(token=token, session_key=session_key, number=number, ranks=ranks),
        )
        return answer.missing

    async def node_restored(
        self, run_uid: str, session_key: SessionKey, node_id: str, ranks: tuple[RankRestore, ...]
    ) -> bool:
        """Wait until all ranks have restored. Return False if a new session has begun instead.

        False is also the answer to a report that the node has repeated in the meantime.
        """
        await self._recovery.ready()
        answer = await self.engine.request(
            self.engine.runs.by_uid(run_uid),
            lambda token: m.NodeRestored(token=token, session_key=session_key, node_id=node_id, ranks=ranks),
        )
        return answer is None

    async def annotate_by_uid(self, run_uid: str, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics that a rank has sent; see `annotate`."""
        await self._recovery.ready()
        await self._annotate(self.engine.runs.by_uid(run_uid), step, metrics)

    async def restart_agent(self, node: str, group: GroupCard | None) -> None:
        """Start a new agent on a node if the node's agent, which a rank has reported as dead, is dead.

        Continue with the group of the rank if no agent has reported the group; RunConflict if another service
        or run owns the log.
        """
        await self._recovery.ready()
        await self.engine.restart_agent(node)
        if group is not None:
            await self._recovery.find_group(group)

    async def node_preempted(self, node: str, notice: Notice, of: RunSession | None = None) -> None:
        """Record a notice that a node is about to go, for the group of a process or for all runs."""
        self.engine.add_notice(node, notice, of)

    async def make_durable(self, run_uid: str, attempt: str, timeout_s: float) -> None:
        """Wait until a checkpoint is durable. Unavailable if that fails, or takes longer than `timeout_s`."""
        await self._recovery.settled(run_uid)
        await self.engine.request(
            self.engine.runs.by_uid(run_uid),
            lambda token: m.DrainRequested(token=token, attempt=attempt, within_s=timeout_s),
        )


def _unfinished(run: Run, timeout_s: float) -> Unavailable:
    newest = next(reversed(run.machine.history.lineage()), None)
    if run.machine.view.records_waiting:
        cause = "its log takes no records"
        hint = "What is saved stays on its nodes; check that the storage path is healthy."
    elif run.machine.view.saves_underway:
        cause = "its last save has not ended"
        hint = "See the coordinator's log for what it waits for; raise finish_timeout_s."
    elif newest is not None and newest.level < Level.DURABLE:
        cause = "its last checkpoint is not on the storage path"
        hint = "It stays on its nodes and is drained later; raise finish_timeout_s."
    else:
        cause, hint = "its end is not answered", "Nothing is lost; raise finish_timeout_s."
    return Unavailable(f"Run {run.spec.name}: {cause} in {timeout_s:.0f} s.", hint=hint)
