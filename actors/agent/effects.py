"""Feed events to the machines of the runs on a node, and carry out the effects that the machines return."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from ray_ckpt.actors.agent.files import peer_answers, send_copy, store_shard
from ray_ckpt.actors.agent.node import Node
from ray_ckpt.actors.agent.priority import trim_heaps
from ray_ckpt.actors.agent.restoring import error_text
from ray_ckpt.actors.agent.run import NodeRun
from ray_ckpt.actors.threads import in_thread
from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.errors import Fenced, Unavailable
from ray_ckpt.format.digest import digest
from ray_ckpt.format.manifest import encode_fragment
from ray_ckpt.format.names import fragment_file
from ray_ckpt.types import FileEntry, Fragment

PROBE_EVERY_S = 2.0  # between probes of a peer, short so that copies are complete soon after its return
PROBE_S = 3.0  # longest wait for the answer to a probe
PROBE_FOR_S = 3600.0  # then only the next copy probes again, since the node may be gone for good


class NodeEffects:
    """Effects of the machines on this node; `runs` are the open runs by uid."""

    def __init__(self, node: Node, runs: dict[str, NodeRun]) -> None:
        self._node = node
        self._runs = runs

    async def handle(self, run: NodeRun, event: n.NodeEvent) -> None:
        for effect in run.machine.handle(event):
            await self._carry_out(run, effect)

    async def obey(self, run: NodeRun, order: n.Order) -> None:
        """Handle an order of a coordinator. Fenced if a newer coordinator has sent an order to this node."""
        effects = run.machine.handle(order)
        for refused in effects:
            if isinstance(refused, n.RefuseOrder):
                raise Fenced(
                    f"Node {self._node.node_id[:12]} obeys epoch {refused.epoch}, not {order.epoch}.",
                    epoch=refused.epoch,
                )
        async with run.ordering:  # no order is carried out before its epoch is durable
            if effects and isinstance(effects[0], n.PersistEpoch):
                await self._carry_out(run, effects[0])
                effects = effects[1:]
        for effect in effects:
            await self._carry_out(run, effect)

    async def _carry_out(self, run: NodeRun, effect: n.NodeEffect) -> None:
        node = self._node
        match effect:
            case n.WriteShard():
                node.spawn(self._write_shard(run, effect))
            case n.WriteFragment(fragment=fragment):
                node.spawn(self._write_fragment(run, fragment))
            case n.SendCopy():
                node.spawn(self._send_copy(run, effect))
            case n.ReportCopied():
                node.spawn(node.report("replica_ended", self._replica_ended(effect)))
            case n.CheckPeer(peer=peer):
                node.spawn(self._probe(run, peer))
            case n.Release(attempt=attempt, rank=rank):
                run.captures.release(attempt, rank)
            case n.ResolveSave():
                await run.notify_outcomes()
            case n.DeleteFolder(directory=directory):
                await in_thread(node.disk_io, run.staging.delete, run.run_uid, directory)
            case n.ForgetRun(kept=kept):
                run.close()
                await in_thread(node.disk_io, run.staging.forget, run.run_uid, kept)
                del self._runs[run.run_uid]
                await in_thread(node.disk_io, trim_heaps)
            case n.PersistEpoch(epoch=epoch):
                await in_thread(node.disk_io, run.persist_epoch, epoch)
            case n.ShowSaveSignal(signal=signal):
                run.memory.show(signal.word)
            case n.EndSession(session=session, error=error):
                if run.session is not None:
                    run.session.fail(error)
                await run.end_session(session, error)
            case n.ReportStored():
                await node.report("node_stored", self._stored(run, effect))
            case n.ReportRefused(attempt=attempt, ranks=ranks, reason=reason):
                refused = m.SaveRefused(attempt=attempt, ranks=ranks, reason=reason)
                await node.report("save_refused", refused)

    async def _write_shard(self, run: NodeRun, effect: n.WriteShard) -> None:
        shard = run.captures.begin_write(effect.attempt, effect.rank)
        if shard is None:
            return
        arena = run.memory.arenas.get(shard.rank)
        is_stream = arena is not None and arena.mode == "stream"
        pool = self._node.stream_io if is_stream else self._node.disk_io
        try:
            files, rows = await in_thread(pool, store_shard, run, shard)
        except Exception as error:  # after any error, the rank must get its arena back
            event: n.NodeEvent = n.SaveFailed(
                attempt=shard.attempt, rank=shard.rank, reason=error_text(error)
            )
        else:
            event = n.ShardWritten(attempt=shard.attempt, rank=shard.rank, files=files, rows=rows)
            self._node.count_bytes(run.spec.name, "local", sum(file.size_bytes for file in files))
        finally:
            run.captures.end_write(shard)
        await self.handle(run, event)

    async def _write_fragment(self, run: NodeRun, fragment: Fragment) -> None:
        name, pool = fragment_file(fragment.node_index, fragment.num_nodes), self._node.disk_io
        try:
            data = await in_thread(pool, encode_fragment, fragment)
            put = partial(run.staging.put, run.run_uid, fragment.attempt.directory, name, [data])
            await in_thread(pool, put)
        except Exception as error:
            event: n.NodeEvent = n.SaveFailed(
                attempt=fragment.attempt, rank=fragment.ranks[0], reason=error_text(error)
            )
        else:
            entry = FileEntry(name=name, size_bytes=len(data), digest=digest(data))
            run.staging.known.add(entry.digest, fragment.metadata)  # checked when it was encoded
            event = n.FragmentWritten(attempt=fragment.attempt, entry=entry)
        await self.handle(run, event)

    async def _send_copy(self, run: NodeRun, effect: n.SendCopy) -> None:
        node, error, is_unreachable = self._node, None, False
        try:
            credentials = node.credentials(run.run_uid)
            sent = await in_thread(node.peer_io, send_copy, run, effect, credentials, node.copies)
            node.count_bytes(run.spec.name, "peer", sent)
        except Exception as failure:  # after any error, the coordinator must get a report
            error = error_text(failure)
            is_unreachable = isinstance(failure, Unavailable) and bool(failure.fields.get("unreachable"))
        event = n.CopyEnded(
            attempt=effect.attempt,
            node_index=effect.node_index,
            holder=effect.holder,
            epoch=effect.epoch,
            error=error,
            is_unreachable=is_unreachable,
        )
        await self.handle(run, event)

    def _stored(self, run: NodeRun, stored: n.ReportStored) -> m.NodeStored:
        return m.NodeStored(
            attempt=stored.attempt,
            node_index=stored.node_index,
            node_id=self._node.node_id,
            fragment=stored.fragment,
            size_bytes=stored.size_bytes,
            replicated=stored.replicated,
            metrics=stored.metrics,
            epoch=stored.epoch,
            facts=run.captures.facts(stored.attempt),
        )

    def _replica_ended(self, copied: n.ReportCopied) -> m.ReplicaEnded:
        return m.ReplicaEnded(
            attempt=copied.attempt,
            node_index=copied.node_index,
            holder=copied.holder,
            error=copied.error,
            epoch=copied.epoch,
            source=self._node.node_id,
            is_unreachable=copied.is_unreachable,
        )

    async def _probe(self, run: NodeRun, peer: str) -> None:
        """Probe a silent peer until it answers, so that no save has to wait for a peer that is gone."""
        credentials, end_s = self._node.credentials(run.run_uid), time.monotonic() + PROBE_FOR_S
        is_there = False
        while not is_there and not run.is_over and time.monotonic() < end_s:
            await asyncio.sleep(PROBE_EVERY_S)
            is_there = await in_thread(self._node.probe_io, peer_answers, run, peer, credentials, PROBE_S)
        await self.handle(run, n.PeerReturned(peer=peer))
