"""The ports of a node's host on Ray: work in threads of the agent, calls to the coordinator, and memory.

An effect of the machine becomes a call in a thread, and an exception becomes an event. This module decides
nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from ray_ckpt.actors.agent.files import (
    may_be_damage,
    peer_answers,
    put_fragment,
    send_copy,
    store_shard,
    store_step_state,
)
from ray_ckpt.actors.agent.node import Node
from ray_ckpt.actors.agent.priority import trim_heaps
from ray_ckpt.actors.agent.restoring import NodeRestore, error_text
from ray_ckpt.actors.agent.still_files import check_copied
from ray_ckpt.actors.threads import in_thread
from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.values import SessionPlan, Token
from ray_ckpt.engine.node_ports import (
    NodeHostEvent,
    NodeWork,
    PeerProbed,
    ProbePeer,
    ReportAnswered,
    WorkEnded,
)
from ray_ckpt.errors import CheckpointError, Unavailable
from ray_ckpt.format.save_signal import SaveSignal
from ray_ckpt.types import AttemptId, FileEntry, Fragment, SaveFacts

if TYPE_CHECKING:
    from ray_ckpt.actors.agent.run import NodeRun

log = logging.getLogger("ray_ckpt.agent")

PROBE_S = 3.0  # longest wait for the answer to a probe


class RayNodePorts:
    """The ports of one run; tasks of the agent do the work that takes long."""

    def __init__(self, node: Node, run: NodeRun, runs: dict[str, NodeRun]) -> None:
        self._node = node
        self._run = run
        self._runs = runs  # the open runs of the node, by uid

    # -- work ------------------------------------------------------------------------------------------

    def start(self, work: NodeWork, token: Token = "") -> None:
        match work:
            case n.WriteShard():
                self._node.spawn(self._write_shard(work))
            case n.WriteStepState():
                self._node.spawn(self._write_step_state(work))
            case n.SendStepState():
                self._node.spawn(self._send_step_state(work))
            case n.WriteFragment(fragment=fragment):
                self._node.spawn(self._write_fragment(fragment))
            case n.SendCopy():
                self._node.spawn(self._send_copy(work))
            case ProbePeer():
                self._node.spawn(self._probe(work))
            case _:
                self._node.spawn(self._work(work, token))

    async def _work(self, work: n.DeleteFolder | n.ForgetRun | n.PersistEpoch, token: Token) -> None:
        run, pool, failure = self._run, self._node.disk_io, None
        try:
            match work:
                case n.DeleteFolder(directory=directory):
                    await in_thread(pool, run.staging.delete, run.run_uid, directory)
                case n.PersistEpoch(epoch=epoch):
                    await self._node.inventory_io.run(run.persist_epoch, epoch)
                case n.ForgetRun(kept=kept):
                    await in_thread(pool, run.staging.forget, run.run_uid, kept)
                    self._runs.pop(run.run_uid, None)
                    await in_thread(pool, trim_heaps)
        except Exception as error:
            failure = error
        run.host.handle(WorkEnded(work=work, token=token, error=failure))

    async def _write_shard(self, work: n.WriteShard) -> None:
        run = self._run
        shard = run.captures.begin_write(work.attempt, work.rank)
        if shard is None:
            return
        arena, buffer = run.memory.arenas.get(shard.rank), run.memory.buffer_of(shard)
        is_stream = arena is not None and arena.mode == "stream"
        pool = self._node.stream_io if is_stream else self._node.disk_io
        try:
            stored = await in_thread(pool, store_shard, run, shard)
            check_copied(run, buffer, shard, stored.files)
        except Exception as error:  # after any error, the rank must get its arena back
            event: n.NodeEvent = n.SaveFailed(
                attempt=shard.attempt, rank=shard.rank, reason=error_text(error)
            )
        else:
            event = n.ShardWritten(
                attempt=shard.attempt, rank=shard.rank, files=stored.files, rows=stored.rows
            )
            self._node.count_bytes(run.spec.name, "local", stored.written_bytes, stored.shared_bytes)
            run.captures.note_shared(shard.attempt, stored.shared_bytes)
        finally:
            run.captures.end_write(shard)
        run.host.handle(event)

    async def _write_step_state(self, work: n.WriteStepState) -> None:
        run, attempt, rank = self._run, work.attempt, work.rank
        state = run.step_states.get(rank, {}).get(attempt.step)
        try:
            if state is None:
                raise Unavailable(f"the own state of rank {rank} is gone")
            stored = await in_thread(self._node.disk_io, store_step_state, run, attempt, state)
        except Exception as error:
            event: n.NodeEvent = n.SaveFailed(attempt=attempt, rank=rank, reason=error_text(error))
        else:
            event = n.ShardWritten(attempt=attempt, rank=rank, files=stored.files, rows=stored.rows)
        run.host.handle(event)

    async def _send_step_state(self, work: n.SendStepState) -> None:
        """Send the newest state of a rank to a peer, one at a time: a slow peer misses older ones."""
        run, node, sent, sending = self._run, self._node, -1, self._run.sending_states
        if work.rank in sending:
            return
        sending.add(work.rank)
        try:
            while (agent := (await node.agents.find([work.peer])).get(work.peer)) is not None:
                states = run.step_states.get(work.rank, {})  # newer ones may have come during the lookup
                if (newest := max(states, default=-1)) <= sent:
                    return
                sent = newest
                await agent.keep_state.remote(run.run_uid, work.session_key, states[newest])
        except (ray.exceptions.RayError, CheckpointError) as error:
            node.agents.forget(work.peer)
            log.debug("peer %s keeps no state: %s", work.peer[:12], error)
        finally:
            sending.discard(work.rank)

    async def _write_fragment(self, fragment: Fragment) -> None:
        run, pool = self._run, self._node.disk_io
        try:
            entry = await in_thread(pool, put_fragment, run, fragment)
        except Exception as error:
            event: n.NodeEvent = n.SaveFailed(
                attempt=fragment.attempt, rank=fragment.ranks[0], reason=error_text(error)
            )
        else:
            event = n.FragmentWritten(attempt=fragment.attempt, entry=entry)
        run.host.handle(event)

    async def _send_copy(self, work: n.SendCopy) -> None:
        node, run, error = self._node, self._run, None
        is_unreachable = is_damage = False
        fragment: FileEntry | None = None
        try:
            credentials = node.credentials(run.run_uid)
            fragment, *sent = await in_thread(node.peer_io, send_copy, run, work, credentials, node.copies)
            node.count_bytes(run.spec.name, "peer", *sent)
        except Exception as failure:  # after any error, the coordinator must get a report
            error = error_text(failure)
            is_unreachable = isinstance(failure, Unavailable) and bool(failure.fields.get("unreachable"))
            is_damage = may_be_damage(failure)
        run.host.handle(
            n.CopyEnded(
                attempt=work.attempt,
                node_index=work.node_index,
                holder=work.holder,
                epoch=work.epoch,
                error=error,
                fragment=fragment,
                is_unreachable=is_unreachable,
                is_damage=is_damage,
            )
        )

    async def _probe(self, work: ProbePeer) -> None:
        node, run, is_there = self._node, self._run, False
        try:
            credentials = node.credentials(run.run_uid)
            is_there = await in_thread(node.probe_io, peer_answers, run, work.peer, credentials, PROBE_S)
        finally:
            run.host.handle(PeerProbed(peer=work.peer, is_there=is_there, until_s=work.until_s))

    # -- coordinator -----------------------------------------------------------------------------------

    def report(self, event: m.Event, may_wait_s: float = 0.0) -> None:
        self._node.spawn(self._report(event, may_wait_s))

    async def _report(self, event: m.Event, may_wait_s: float) -> None:
        node, uid = self._node, self._run.run_uid
        answer: Any = None
        try:
            match event:
                case m.NodeStored() | m.ReplicaEnded():
                    method = "node_stored" if isinstance(event, m.NodeStored) else "replica_ended"
                    is_wanted = partial(self._run.machine.is_saving, event.attempt)
                    await node.report(method, event, is_wanted=is_wanted)
                case m.SaveRefused():
                    await node.report("save_refused", event)
                case m.SurvivorsReported():
                    await node.report("survivors_reported", uid, event)
                case m.RanksProgressed():
                    answer = await node.request("ranks_progressed", uid, event, may_wait_s=may_wait_s)
                case m.RanksRestored():
                    answer = await node.request("ranks_restored", uid, event)
                case m.BarrierReached(session_key=key, number=number, ranks=ranks):
                    missing = await node.request("ranks_met", uid, key, number, ranks)
                    answer = m.BarrierAnswer(missing=missing)
                case m.NodeRestored(session_key=key, node_id=node_id, ranks=restored):
                    go = await node.request("node_restored", uid, key, node_id, restored)
                    answer = None if go else False
        except CheckpointError as error:
            self._run.host.handle(ReportAnswered(report=event, error=error))
        else:
            self._run.host.handle(ReportAnswered(report=event, value=answer))

    # -- memory ----------------------------------------------------------------------------------------

    def begin(self, plan: SessionPlan) -> None:
        run = self._run
        if run.restore is not None:
            run.restore.supersede()
        run.take_start(plan)
        run.step_states, run.sending_states = {}, set()  # a peer of the last session may hang
        others = (r.machine for r in self._runs.values() if r is not run and not r.machine.is_released)
        num_others = sum(len(other.here.ranks) for other in others if other.here is not None)
        run.restore = NodeRestore(self._node, run, plan, num_others=num_others)

    def release(self, attempt: AttemptId, rank: int) -> None:
        self._run.captures.release(attempt, rank)

    def facts(self, attempt: AttemptId) -> SaveFacts:
        return self._run.captures.facts(attempt)

    def show(self, signal: SaveSignal | None) -> None:
        self._run.memory.show(0 if signal is None else signal.word)

    def free_restore(self) -> None:
        if self._run.restore is not None:
            self._run.restore.close_shared()

    def free_arenas(self) -> None:
        self._run.memory.free_arenas(is_left=self._run.machine.here is None)

    def free(self) -> None:
        self.free_restore()
        self.free_arenas()
        self._run.memory.close()

    # -- callers, clock --------------------------------------------------------------------------------

    def reply(self, token: Token, value: object) -> None:
        self._run.callers.reply(token, value)

    def fail(self, token: Token, error: Exception) -> None:
        self._run.callers.fail(token, error)

    def now_s(self) -> float:
        return time.monotonic()

    def later(self, delay_s: float, event: NodeHostEvent) -> None:
        asyncio.get_running_loop().call_later(delay_s, self._run.host.handle, event)
