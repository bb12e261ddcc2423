"""The methods of a node's agent that the ranks of the node call: restores, memory, saves and liveness."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from ray_ckpt.actors.agent.node import Node
from ray_ckpt.actors.agent.run import require
from ray_ckpt.actors.agent.runs import NodeRuns
from ray_ckpt.actors.messages import GroupCard
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.awaited import Awaited
from ray_ckpt.core.step_states import keep
from ray_ckpt.core.values import RankProgress, Salvage, SessionKey
from ray_ckpt.engine.node_ports import (
    AskAwaited,
    EndAwaited,
    OutcomeAwaited,
    RankMet,
    RankProgressed,
    RankRestored,
    SurvivorCame,
)
from ray_ckpt.errors import CheckpointError, Unavailable
from ray_ckpt.plan.restore import RowKey
from ray_ckpt.preemption.notice import Notice
from ray_ckpt.restore.reader import RestoreTicket, SharedRows
from ray_ckpt.trainer.link import ArenaGrant, SealedShard, StepState
from ray_ckpt.types import AttemptId, Level, RankRestore

MAX_ANNOTATING = 64  # waiting annotations of a run; each holds a call and the call's metrics
COORDINATOR_AGAIN_S = 1.0  # until a coordinator that Ray is about to restart is asked again
OUTCOME_SLACK_S = 60.0  # added to the time-outs of an attempt; bounds a call that gets no answer


class RankEndpoints:
    """The methods of an agent for ranks. The agent sets the fields: Ray binds no inherited constructor."""

    _node: Node
    _runs: NodeRuns
    _service: str

    # -- restore and memory ------------------------------------------------------------------------------

    async def get_ticket(
        self, run_uid: str, session_key: SessionKey, named: bool, early: bool = False
    ) -> RestoreTicket:
        """Return the ticket of this node's ranks: the checkpoint to restore, and its sources.

        `session_key` and `named` are as in `reserve`, the latter for the manifest; `early` is as in
        `NodeRestore.ticket`.
        """
        restore = await self._runs.get(run_uid).current_restore(session_key)
        return await restore.ticket(named=named, early=early)

    async def get_whole_ticket(self, run_uid: str, session_key: SessionKey, named: bool) -> RestoreTicket:
        """Return the ticket with the manifest of all nodes. RunSuperseded if the session is over."""
        run = self._runs.get(run_uid)
        run.check_session(session_key)
        return await require(run.restore).ticket(named=named, is_whole=True)

    async def fetch(
        self,
        run_uid: str,
        session_key: SessionKey,
        rank: int,
        wants: Mapping[RowKey, tuple[int, ...]],
        taken: tuple[RowKey, ...],
    ) -> SharedRows:
        """Read rows that several ranks of this node want, once for all these ranks."""
        restore = await self._runs.get(run_uid).current_restore(session_key)
        return await restore.fetch(session_key, rank, wants, taken)

    async def report_restored(
        self, run_uid: str, session_key: SessionKey, report: RankRestore, named: bool
    ) -> RestoreTicket | None:
        """Wait until all ranks have restored, or return a ticket that the rank restores instead."""
        run = self._runs.get(run_uid)
        if run.restore is not None:
            report = run.restore.completed(report)
        is_over = await run.request(
            lambda token: RankRestored(token=token, session_key=session_key, report=report)
        )
        return None if is_over else await self.get_ticket(run_uid, session_key, named)

    async def reserve(
        self, run_uid: str, session_key: SessionKey, rank: int, size_bytes: int, named: bool
    ) -> None:
        """Raise InsufficientSpace unless the arena fits in memory, and two checkpoints with copies on disk.

        Waits for the session with which the rank was connected to begin; RunSuperseded if its group is over.
        `named` means that the arena has to be in /dev/shm.
        """
        run = self._runs.get(run_uid)
        await run.current_restore(session_key)
        await run.memory.freeing.wait()
        run.reserve(rank, size_bytes, named=named)

    async def open_arena(
        self, run_uid: str, session_key: SessionKey, rank: int, size_bytes: int, named: bool
    ) -> ArenaGrant:
        """Make shared memory for a rank; it replaces the rank's earlier arena."""
        run = self._runs.get(run_uid)
        run.check_session(session_key)
        arena = await run.memory.open(
            rank,
            size_bytes,
            mode=run.spec.options.memory,
            named=named,
            is_current=lambda: run.host.plan is not None and run.host.plan.session_key == session_key,
            pool=self._node.disk_io,
        )
        return arena.grant()

    async def describe_group(self, run_uid: str) -> GroupCard:
        """Return the group at work, which a rank keeps in case that all agents are lost."""
        return GroupCard(service=self._service, run=self._runs.get(run_uid).opened())

    async def signal_page(self, run_uid: str, named: bool) -> str:
        """Return the path of the save signal's page, which ranks map; `named` is as in `reserve`."""
        return self._runs.get(run_uid).memory.signal_page(named=named)

    # -- saves and liveness --------------------------------------------------------------------------------

    async def seal(self, run_uid: str, shard: SealedShard) -> bool:
        """Take over a capture; return, as `SaveLink.seal`, when the rank may capture into the arena again."""
        run = self._runs.get(run_uid)
        plan, at = run.machine.plan, shard.attempt
        # The arena is gone, or is that of another rank.
        is_over = run.machine.is_over((at.epoch, at.session)) if plan is None else not plan.has(at)
        if not is_over and not run.memory.take_layout(shard):
            reason = f"the arena of rank {shard.rank} is gone"
            await self.skip(run_uid, shard.attempt, shard.rank, reason)
            raise Unavailable(f"Step {shard.attempt.step}: {reason}.")
        run.captures.seal(shard)
        event = n.ShardSealed(
            attempt=shard.attempt,
            rank=shard.rank,
            replicated=shard.replicated,
            metrics=shard.metrics,
            watched=shard.watched,
        )
        run.host.handle(event)
        return await run.captures.wait_released(shard)

    async def keep_state(self, run_uid: str, session_key: SessionKey, state: StepState) -> None:
        """Keep the own state of a rank after a step, of this node or of a peer, for a salvage."""
        run = self._runs.get(run_uid)
        if run.machine.plan is not None and run.machine.plan.session_key == session_key:
            keep(run.step_states, state.rank, state.step, state)
            kept = n.StepStateKept(
                session_key=session_key, rank=state.rank, step=state.step, holds=state.holds
            )
            run.host.handle(kept)

    async def await_question(self, run_uid: str, session_key: SessionKey) -> bool:
        """Wait until the ranks of this node are asked for an offer. Return False if the session is over."""
        run = self._runs.get(run_uid)
        asked: bool = await run.request(lambda token: AskAwaited(token=token, session_key=session_key))
        return asked

    async def offer_survivor(
        self, run_uid: str, session_key: SessionKey, rank: int, steps: tuple[int, ...]
    ) -> Salvage:
        """Take the offer of a rank for a salvage, and return the decision."""
        run = self._runs.get(run_uid)
        decided: Salvage = await run.request(
            lambda token: SurvivorCame(token=token, session_key=session_key, rank=rank, steps=steps)
        )
        return decided

    async def skip(self, run_uid: str, attempt: AttemptId, rank: int, reason: str) -> None:
        """Record that a rank cannot save."""
        self._runs.get(run_uid).host.handle(n.SaveFailed(attempt=attempt, rank=rank, reason=reason))

    async def await_outcome(self, run_uid: str, attempt: AttemptId, level: Level) -> n.SaveOutcome:
        """Wait until the save has reached `level`, or was dropped.

        Raises TimeoutError after a limit; then a caller with time left calls again. A save that is under way
        on this node has no limit: its files may take minutes to write, and its outcome comes.
        """
        run = self._runs.get(run_uid)
        options = run.spec.options
        limit_s = options.attempt_timeout_s + options.goal_timeout_s + OUTCOME_SLACK_S
        while True:
            was_saving = run.machine.is_saving(attempt)
            waited = run.request(lambda token: OutcomeAwaited(token=token, attempt=attempt, level=level))
            try:
                outcome: n.SaveOutcome = await asyncio.wait_for(waited, limit_s)
                return outcome
            except TimeoutError:
                if not was_saving and not run.machine.is_saving(attempt):
                    raise  # else it may have been committed at this moment, or its copies have just begun

    async def await_session_end(self, run_uid: str, session_key: SessionKey) -> CheckpointError:
        """Wait until the session is over, and return the reason."""
        run = self._runs.get(run_uid)
        error: CheckpointError = await run.request(
            lambda token: EndAwaited(token=token, session_key=session_key)
        )
        return error

    async def annotate(
        self, run_uid: str, step: int, metrics: Mapping[str, float], attempt: AttemptId | None
    ) -> None:
        """Add metrics to the checkpoint of a step, once the rank's save of it has been committed."""
        run = self._runs.get(run_uid)
        if run.annotating >= MAX_ANNOTATING:
            raise Unavailable(f"{MAX_ANNOTATING} annotations wait already.")
        run.annotating += 1
        try:
            if attempt is not None:
                outcome = await self.await_outcome(run_uid, attempt, Level.LOCAL)
                if outcome.error is not None:
                    raise outcome.error
            await self._node.request("annotate_by_uid", run_uid, step, metrics)
        finally:
            run.annotating -= 1

    async def make_durable(self, run_uid: str, attempt: AttemptId, timeout_s: float) -> None:
        """Wait until a checkpoint is on the storage path; if the coordinator dies, ask the next one."""
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                left_s = max(0.0, end_s - time.monotonic())
                await self._node.request("make_durable", run_uid, attempt.attempt, left_s)
                return
            except Unavailable as error:
                is_reached = error.fields.get("reached", True)
                if is_reached or time.monotonic() + COORDINATOR_AGAIN_S > end_s:
                    raise
            await asyncio.sleep(COORDINATOR_AGAIN_S)

    async def report_progress(
        self, run_uid: str, session_key: SessionKey, rank: int, progress: RankProgress
    ) -> str:
        """Record the progress of a rank. For rank 0, return what is missing on the storage path, or ""."""
        run = self._runs.get(run_uid)
        if rank == 0 and run.missing_is_due():
            self._node.spawn(run.check_missing())
        run.host.handle(RankProgressed(session_key=session_key, rank=rank, progress=progress))
        return run.missing if rank == 0 else ""

    async def awaited_ranks(self, run_uid: str) -> tuple[Awaited, ...]:
        """Return the ranks that the group waits for, by the coordinator's last answer."""
        return self._runs.get(run_uid).host.awaited

    async def await_barrier(
        self, run_uid: str, session_key: SessionKey, rank: int, number: int
    ) -> tuple[int, ...]:
        """Wait at a barrier for all ranks of the group. Return the ranks that did not come."""
        run = self._runs.get(run_uid)
        missing: tuple[int, ...] = await run.request(
            lambda token: RankMet(token=token, session_key=session_key, rank=rank, number=number)
        )
        return missing

    async def notify_preemption(self, run_uid: str, session_key: SessionKey, notice: Notice) -> None:
        """Report that a process of a run is about to go; `session_key` is as in `reserve`."""
        await self._node.report("node_preempted", self._node.node_id, notice, (run_uid, session_key))
