"""The node agent: owns a node's arenas and staging folder, writes, copies and serves shards.

One per node, detached and pinned to it. Decisions are the NodeMachine's; this carries its effects out.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import ray

from ray_ckpt import telemetry
from ray_ckpt.actors import names
from ray_ckpt.actors.agent.arena import RankArena, ShmRoom, SignalPage, choose_mode, make_arena
from ray_ckpt.actors.agent.files import answers, held_fragment, scrub, send_copy, store_shard, upload
from ray_ckpt.actors.agent.peer_files import Served
from ray_ckpt.actors.agent.priority import ActiveCopies, limit_heaps, trim_heaps, yield_to_training
from ray_ckpt.actors.agent.restore_sources import SourceFinder
from ray_ckpt.actors.agent.run import BarrierWait, NodeRun, Reported, require
from ray_ckpt.actors.agent.shared_reads import SharedReads
from ray_ckpt.actors.messages import (
    AgentCard,
    OpenedRun,
    OpenRun,
    PutAwayRun,
    RunSpec,
    ServiceCard,
    SessionStart,
)
from ray_ckpt.actors.metrics import Meters
from ray_ckpt.config import ADDRESS_ENV, staging_roots, transport_ports
from ray_ckpt.core import node_machine as n
from ray_ckpt.core.awaited import Awaited
from ray_ckpt.core.barriers import BARRIER_S
from ray_ckpt.core.messages import DiskSpace, Inventory, RankProgress, ReplicaEnded, SessionKey, SessionPlan
from ray_ckpt.core.ownership import RunMark
from ray_ckpt.errors import (
    CheckpointError,
    ConfigError,
    Fenced,
    RunConflict,
    RunSuperseded,
    Unavailable,
    named_text,
)
from ray_ckpt.format import zstd
from ray_ckpt.format.digest import digest
from ray_ckpt.format.manifest import encode_fragment
from ray_ckpt.format.names import fragment_file
from ray_ckpt.format.save_signal import SaveSignal
from ray_ckpt.plan.restore import RowKey
from ray_ckpt.preemption.cloud import CloudNotices
from ray_ckpt.preemption.notice import Notice
from ray_ckpt.restore.reader import RestoreTicket, SharedRows
from ray_ckpt.storage.local.disks import Disks
from ray_ckpt.storage.local.memory import available_memory_bytes
from ray_ckpt.storage.local.scrub import verify_stored
from ray_ckpt.telemetry import Sample
from ray_ckpt.trainer.link import ArenaGrant, SealedShard
from ray_ckpt.transport.credentials import ServiceKeys
from ray_ckpt.transport.server import PeerServer
from ray_ckpt.types import AttemptId, FileEntry, Fragment, Level, RankRestore, SaveFacts

log = logging.getLogger("ray_ckpt.agent")

DISK_THREADS = 4  # local work at a time; more only queue at the device
STREAM_THREADS = 64  # one per rank of a node: a stream runs as long as its rank copies, others would wait
PEER_THREADS = 4  # copies on their way at a time
PROBE_THREADS = 2  # questions to peers that were silent at a time; a copy has few holders
PROBE_EVERY_S = 2.0  # between two of them to one peer, each of PROBE_S: copies are to be complete soon after
PROBE_S = 3.0  # for an answer to one
PROBE_FOR_S = 3600.0  # then the next copy asks: a node that is gone is not asked for as long as a run lasts
REMOTE_THREADS = 4  # questions and scrubs on storage paths at a time
MAX_REPORTED = 16  # saves of which that is kept until they are stored; those that were dropped give way
MAX_ANNOTATING = 64  # annotations of a run that wait; each holds a call and its metrics
MISSING_LOOK_S = 5.0  # between looks, by the node of rank 0, whether the log is where it was
OUTCOME_SLACK_S = 60.0  # an attempt is settled within its own time-outs; this bounds a forgotten question
RETIRE_AFTER_S = 0.5  # time for the answer to leave
MAX_BARRIERS = 16  # whose end late ranks are told; the coordinator knows of more
BARRIER_GATHER_S = 1.0  # for all ranks of a node to come to a barrier; then those that are there are told
RESTORED_AGAIN_S = 2.0  # how often ranks that wait with their restore are told again, per node
PROGRESS_GATHER_S = 0.9  # ranks speak once a second, each in its own phase; this gathers those of a node


class NodeAgent:
    """See the module. Methods are called by this node's ranks and by the coordinator."""

    def __init__(self, node_id: str, keys: ServiceKeys, service: str) -> None:
        actual = ray.get_runtime_context().get_node_id()
        if actual != node_id:
            raise RuntimeError(f"agent of node {node_id} was started on {actual}")
        self._node_id = node_id
        self._keys = keys
        self._service = service
        self._runs: dict[str, NodeRun] = {}
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._stagings: dict[tuple[Path, ...], Disks] = {}
        self._staging_lock = threading.Lock()  # a folder is locked once, whoever asks
        # Apart from each other, so that a hanging store or peer never stops what is local.
        limit_heaps()
        self._stream_io = ThreadPoolExecutor(STREAM_THREADS, "ray_ckpt-stream", yield_to_training)
        self._disk_io = ThreadPoolExecutor(DISK_THREADS, "ray_ckpt-disk", yield_to_training)
        self._peer_io = ThreadPoolExecutor(PEER_THREADS, "ray_ckpt-peer", yield_to_training)
        self._probe_io = ThreadPoolExecutor(PROBE_THREADS, "ray_ckpt-probe", yield_to_training)
        self._remote_io = ThreadPoolExecutor(REMOTE_THREADS, "ray_ckpt-remote", yield_to_training)
        self._cloud_io = ThreadPoolExecutor(1, "ray_ckpt-cloud")
        self._watches_cloud = False
        self._copies = ActiveCopies()
        self._meters = Meters()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: PeerServer | None = None
        self._problem: ConfigError | None = None  # of this node's environment; told to whoever asks first
        try:
            self._server = PeerServer(
                os.environ.get(ADDRESS_ENV) or ray.util.get_node_ip_address(),
                keys=keys,
                files=Served(self._runs),
                ports=transport_ports(),
            )
        except ConfigError as error:
            self._problem = error
        self._coordinator: Any = None

    async def card(self) -> AgentCard:
        roots = ", ".join(str(root) for roots in self._stagings for root in roots)
        if self._server is None:
            raise self._problem or Unavailable("The agent has no server.")
        return AgentCard(node_id=self._node_id, endpoint=self._server.endpoint, staging=roots)

    async def describe(self) -> ServiceCard:
        """For a restarted coordinator."""
        runs = [run for run in self._runs.values() if run.is_finished or not run.is_over]
        return ServiceCard(
            keys=self._keys,
            service=self._service,
            runs=tuple(
                OpenedRun(spec=run.spec, run_uid=run.run_uid, plan=run.plan, epoch=run.machine.epoch)
                for run in runs
            ),
        )

    async def exit(self) -> None:
        """Nothing on this node is needed: end, so that Ray may give the node back."""
        log.info("nothing here is needed any more; this agent ends")
        asyncio.get_running_loop().call_later(RETIRE_AFTER_S, os._exit, 0)

    # -- the coordinator's calls -----------------------------------------------------------------------

    async def read_marks(self, spec: RunSpec) -> tuple[RunMark, ...]:
        """What this node's disk remembers of runs of this name and storage path."""
        staging: Disks = await self._in_thread(self._disk_io, self._open_staging, spec)
        marks: tuple[RunMark, ...] = await self._in_thread(
            self._disk_io, staging.marks, spec.name, spec.storage_path
        )
        return marks

    async def open_run(self, order: OpenRun) -> Inventory:
        """Check the staging folder and the storage path of a run, and tell what is here of it."""
        async with self._turn(order.run_uid):  # it may be put away at the moment
            run = await self._take_up(order.spec, order.run_uid)
            run.use(order.spec)
            await self._obey(run, n.EpochSeen(epoch=order.epoch))
        if not self._watches_cloud:
            self._watches_cloud = True
            self._spawn(self._watch_cloud(CloudNotices.from_environment()))
        if order.spec.options.compress is not None:
            zstd.check_installed()
        if run.checked_nonce != order.nonce:  # once per coordinator: a hiccup later must not end a group
            await self._in_thread(self._remote_io, run.remote.check_shared, order.nonce, node=self._node_id)
            run.checked_nonce = order.nonce
        return await self.inventory(order.run_uid)

    async def put_away(self, order: PutAwayRun) -> bool:
        """Delete what is here of a finished run but `order.kept`, and forget the run. Fenced, OSError."""
        async with self._turn(order.run_uid):
            run = await self._take_up(order.spec, order.run_uid)
            await self._obey(run, n.RunPutAway(kept=order.kept, epoch=order.epoch))
        return True

    async def _take_up(self, spec: RunSpec, run_uid: str) -> NodeRun:
        if run_uid not in self._runs:
            staging = await self._in_thread(self._disk_io, self._open_staging, spec)
            self._runs[run_uid] = NodeRun(spec, run_uid, staging)
        return self._runs[run_uid]

    def _run(self, run_uid: str) -> NodeRun:
        if run_uid not in self._runs:
            raise Unavailable(f"Run {run_uid} is not open on node {self._node_id[:12]}.")
        return self._runs[run_uid]

    def _turn(self, run_uid: str) -> asyncio.Lock:
        """Held while the run is taken up here, or put away: files of the one are not to meet the other's."""
        return self._turns.setdefault(run_uid, asyncio.Lock())

    async def inventory(self, run_uid: str) -> Inventory:
        run = self._run(run_uid)
        held = await self._in_thread(self._disk_io, lambda: tuple(run.staging.holdings(run_uid)))
        directories = await self._in_thread(self._disk_io, run.staging.directories, run_uid)
        held = [h for h in held if not run.machine.is_deleted(h.fragment.attempt.attempt)]
        return Inventory(
            fragments=tuple(map(held_fragment, held)),
            directories=directories,
            plan=run.plan,
            disk=run.staging.disk,
        )

    async def disk(self, run_uid: str) -> DiskSpace:
        """The file system of the run's staging folder."""
        staging = self._run(run_uid).staging
        return DiskSpace(free_bytes=staging.free_bytes(), total_bytes=staging.total_bytes())

    async def start_session(self, start: SessionStart) -> None:
        run = self._run(start.plan.run_uid)
        order = n.SessionStarted(plan=start.plan, node_id=self._node_id, epoch=start.epoch)
        ended = run.machine.plan
        await self._obey(run, order)
        if run.machine.plan is not start.plan:
            return  # late words about a group that has ended
        if ended is not None and ended.session_key < start.plan.session_key:
            await self._end(run, ended.session, RunSuperseded("A newer training group has opened this run."))
        if run.machine.here is None:  # no rank is here any more, so nobody will ask for what they left
            run.close_arenas()
        run.use(start.spec)
        run.endpoints, run.is_over, run.is_finished = dict(start.endpoints), False, False
        if ended is None or ended.session_key < start.plan.session_key:
            run.show(0)
        run.restored = {}
        run.ticket = None
        run.awaited, run.met = (), 0
        run.end_barriers(RunSuperseded("A newer session owns this run."))
        run.end_shared_reads()
        previous, run.decision = run.decision, asyncio.get_running_loop().create_future()
        if previous is not None and not previous.done():
            previous.set_result(False)
        run.started.set()

    async def notify_outcome(
        self,
        run_uid: str,
        attempt: AttemptId,
        level: Level | None,
        error: CheckpointError | None,
        epoch: int,
    ) -> None:
        event = n.OutcomeNotified(attempt=attempt, level=level, error=error, epoch=epoch)
        await self._obey(self._run(run_uid), event)

    async def coordinator_returned(self, run_uid: str, epoch: int) -> None:
        await self._obey(self._run(run_uid), n.CoordinatorReturned(epoch=epoch))

    async def end_session(
        self, run_uid: str, session_key: SessionKey, error: CheckpointError, epoch: int
    ) -> None:
        """The run is somebody else's from here on."""
        await self._obey(
            self._run(run_uid), n.SessionEnded(session_key=session_key, error=error, epoch=epoch)
        )

    async def update_peers(self, run_uid: str, endpoints: Mapping[str, str]) -> None:
        """Other agents have new addresses."""
        self._run(run_uid).endpoints |= dict(endpoints)

    async def release_run(self, run_uid: str, is_finished: bool) -> None:
        """The run is over: its checkpoints stay on disk for now, its memory is given back."""
        run = self._run(run_uid)
        run.is_over, run.is_finished = True, is_finished
        run.give_memory_back()

    async def replicate(
        self, run_uid: str, attempt: AttemptId, node_index: int, holder: str, endpoint: str, epoch: int
    ) -> None:
        run = self._run(run_uid)
        run.endpoints[holder] = endpoint
        await self._obey(
            run, n.CopyOrdered(attempt=attempt, node_index=node_index, holder=holder, epoch=epoch)
        )

    async def announce_save_step(
        self, run_uid: str, session_key: SessionKey, signal: SaveSignal, epoch: int
    ) -> None:
        """All ranks of the session are to save after this step."""
        await self._obey(
            self._run(run_uid), n.SaveStepAnnounced(session_key=session_key, signal=signal, epoch=epoch)
        )

    async def drain(self, run_uid: str, attempt: AttemptId, node_index: int, epoch: int) -> None:
        """Copy one fragment's files from here to the storage path, the fragment last.

        CorruptionError if a file here is damaged, OSError if the store or the disk fails.
        """
        run = self._run(run_uid)
        await self._obey(run, n.EpochSeen(epoch=epoch))
        sent = await run.drain_threads.run(upload, run, attempt, node_index, self._copies)
        self._count_bytes(run, "remote", sent)

    async def uploads(self, run_uid: str) -> dict[str, int]:
        """Bytes that have left for the storage path, of the fragments that are on their way; by attempt."""
        sent: dict[str, int] = {}
        for (attempt, _), pace in list(self._run(run_uid).uploads.items()):
            sent[attempt] = sent.get(attempt, 0) + pace.sent_bytes
        return sent

    async def delete(self, run_uid: str, directories: tuple[str, ...], epoch: int) -> None:
        await self._obey(self._run(run_uid), n.DeleteOrdered(directories=directories, epoch=epoch))

    async def scrub(self, run_uid: str, attempt: AttemptId, node_index: int, epoch: int) -> tuple[str, ...]:
        """Read this node's copy of a fragment and its files from the disk; bad files go to quarantine.

        Returns what differs from its digest. OSError if a file cannot be read at all.
        """
        run = self._run(run_uid)
        await self._obey(run, n.EpochSeen(epoch=epoch))
        damage: tuple[str, ...] = await self._in_thread(self._disk_io, scrub, run, attempt, node_index)
        return damage

    async def scrub_remote(
        self, run_uid: str, attempt: AttemptId, num_nodes: int, node_index: int
    ) -> tuple[str, ...]:
        """Read a fragment's files on the storage path. What is bad there is uploaded again, not moved."""
        remote = self._run(run_uid).remote
        damage: tuple[str, ...] = await self._in_thread(
            self._remote_io, verify_stored, partial(remote.blocks, attempt.directory), node_index, num_nodes
        )
        return damage

    # -- the ranks' calls ------------------------------------------------------------------------------

    async def get_ticket(self, run_uid: str) -> RestoreTicket:
        """What this node's ranks restore; fragments are fetched once for all of them."""
        run = self._run(run_uid)
        await asyncio.wait_for(run.started.wait(), 60.0)
        if run.ticket is None:
            run.ticket = asyncio.ensure_future(self._make_ticket(run))
        return await asyncio.shield(run.ticket)

    async def fetch(
        self,
        run_uid: str,
        session: int,
        rank: int,
        wants: Mapping[RowKey, tuple[int, ...]],
        taken: tuple[RowKey, ...],
    ) -> SharedRows:
        """Rows of the checkpoint that is being restored which several ranks here want, read once."""
        run = self._run(run_uid)
        ticket = await self.get_ticket(run_uid)
        if ticket.checkpoint is None or ticket.session != session:
            raise Unavailable(f"Session {session} restores nothing here.")
        if run.shared is None:
            run.shared = SharedReads(ticket, pool=self._disk_io)
        return await run.shared.fetch(rank, wants, taken)

    async def restored(self, run_uid: str, session: int, report: RankRestore) -> RestoreTicket | None:
        """Wait for all ranks of the group; None is `go`, a ticket starts over with an older checkpoint."""
        run = self._run(run_uid)
        plan, here, decision = require(run.machine.plan), run.machine.here, run.decision
        if here is None or decision is None or plan.session != session:
            raise RunSuperseded("A newer session owns this run.")
        run.restored[report.rank] = report
        if len(run.restored) == len(here.ranks):
            self._spawn(self._report_restored(run, plan, decision, tuple(run.restored.values())))
        if len(run.restored) == 1:
            self._spawn(self._report_waiting(run, plan, decision))
        if await asyncio.shield(decision):
            return None
        return await self.get_ticket(run_uid)

    async def reserve(self, run_uid: str, rank: int, size_bytes: int, named: bool) -> None:
        """InsufficientSpace unless memory takes the arena and the disk two checkpoints with copies.

        `named`: the arena has to be in /dev/shm.
        """
        run = self._run(run_uid)
        ranks = run.machine.here.ranks if run.machine.here else (rank,)
        run.reserved = {k: size for k, size in run.reserved.items() if k in ranks} | {rank: size_bytes}
        choose_mode(
            run.spec.options.memory,
            all_bytes=sum(run.reserved.values()),
            free_bytes=self._free_memory(run),
            ranks=len(run.reserved),
            room=ShmRoom.look(run.named_bytes) if named else None,
        )
        needed = 2 * size_bytes * len(ranks) * (1 + run.spec.options.replicas)
        run.check_space(needed, what="Two checkpoints with copies", is_one_file=False)

    async def open_arena(
        self, run_uid: str, session: int, rank: int, size_bytes: int, named: bool
    ) -> ArenaGrant:
        """SharedRows memory for a rank; what was there before is given up."""
        run = self._run(run_uid)
        self._check_session(run, session)
        if (old := run.arenas.pop(rank, None)) is not None:
            old.close()
        run.reserved[rank] = size_bytes
        async with run.arena_lock:  # or another rank's memory would be neither free nor taken
            arena: RankArena = await self._in_thread(
                self._disk_io,
                make_arena,
                rank,
                size_bytes,
                mode=run.spec.options.memory,
                all_bytes=sum(run.reserved.values()),
                free_bytes=self._free_memory(run),
                named=named,
                ranks=len(run.reserved),
                taken_bytes=run.named_bytes,
            )
            if rank in run.arenas or require(run.machine.plan).session != session:
                arena.close()
                raise Unavailable("Another one has asked for this rank's memory meanwhile.")
            run.arenas[rank] = arena
        arena.start_populating()
        return ArenaGrant(
            mode=arena.mode,
            paths=tuple(buffer.path for buffer in arena.buffers),
            size_bytes=arena.buffers[0].size_bytes,
        )

    async def signal_page(self, run_uid: str, named: bool) -> str:
        """Where a rank of this node maps the word of the agreed step; `named` as for an arena."""
        run = self._run(run_uid)
        if run.page is None or (named and run.page.path.startswith("/proc/")):
            old, run.page = run.page, SignalPage(named=named)
            run.page.show(run.word)
            if old is not None:
                old.close()
        return run.page.path

    def _check_session(self, run: NodeRun, session: int) -> None:
        if require(run.machine.plan).session != session:
            raise RunSuperseded("A newer session owns this run.")

    def _free_memory(self, run: NodeRun) -> int:
        """Bytes that arenas of the run may take, with those that they have taken."""
        return available_memory_bytes() + sum(arena.populated_bytes for arena in run.arenas.values())

    async def seal(self, run_uid: str, shard: SealedShard) -> None:
        """Take over a capture. Returns when the arena may be captured into again."""
        run, key = self._run(run_uid), (shard.attempt.attempt, shard.rank)
        buffer = run.buffer_of(shard)
        if shard.layout is not None and buffer is not None:
            buffer.layout = shard.layout
        known = buffer.layout if buffer is not None else None
        if known is None or known.signature != shard.layout_signature:
            # This agent was started after the rank got its arena, or a message was lost.
            reason = f"the arena of rank {shard.rank} is gone"
            await self.skip(run_uid, shard.attempt, shard.rank, reason)
            raise Unavailable(f"Step {shard.attempt.step}: {reason}.")
        released = run.released.setdefault(key, asyncio.Event())
        run.sealed[key] = shard
        run.reported.setdefault(shard.attempt.attempt, Reported()).add(shard)
        while len(run.reported) > MAX_REPORTED:
            del run.reported[next(iter(run.reported))]
        event = n.ShardSealed(
            attempt=shard.attempt, rank=shard.rank, replicated=shard.replicated, metrics=shard.metrics
        )
        await self._handle(run, event)
        await released.wait()
        run.released.pop(key, None)

    async def ended(self, run_uid: str, session: int) -> CheckpointError:
        """Why the session is over, when it is."""
        run = self._run(run_uid)
        async with run.settled:
            await run.settled.wait_for(lambda: run.end is not None and run.end[0] >= session)
        return require(run.end)[1]  # type: ignore[no-any-return]

    async def outcome(self, run_uid: str, attempt: AttemptId, level: Level) -> n.SaveOutcome:
        """How the attempt ended: `level` reached, or dropped."""
        run = self._run(run_uid)

        def known() -> n.SaveOutcome | None:
            found = run.machine.outcomes.get(attempt.attempt)
            settled = found is not None and (found.error is not None or (found.level or 0) >= level)
            return found if settled else None

        async with run.settled:
            options = run.spec.options
            limit_s = options.attempt_timeout_s + options.goal_timeout_s + OUTCOME_SLACK_S
            await asyncio.wait_for(run.settled.wait_for(lambda: known() is not None), limit_s)
        outcome: n.SaveOutcome = require(known())
        return outcome

    async def skip(self, run_uid: str, attempt: AttemptId, rank: int, reason: str) -> None:
        await self._handle(self._run(run_uid), n.SaveFailed(attempt=attempt, rank=rank, reason=reason))

    async def progress(self, run_uid: str, session: int, rank: int, progress: RankProgress) -> str:
        """Take it, and tell the rank what is missing of the storage path; empty if nothing is known to be."""
        run = self._run(run_uid)
        if rank == 0 and time.monotonic() - run.looked_s > MISSING_LOOK_S:
            run.looked_s = float("inf")  # one look at a time
            self._spawn(self._report_missing(run))
        is_first = not run.progress
        run.progress[rank] = progress
        if is_first:
            self._spawn(self._forward_progress(run, session))
        return run.missing if rank == 0 else ""

    async def _report_missing(self, run: NodeRun) -> None:
        try:
            run.missing = await run.drain_threads.run(run.remote.missing)
        finally:
            run.looked_s = time.monotonic()

    async def notify_preemption(self, notice: Notice) -> None:
        """This node, or a rank on it, is about to go."""
        await self._report("node_preempted", self._node_id, notice)

    async def annotate(
        self, run_uid: str, step: int, metrics: Mapping[str, float], attempt: AttemptId | None
    ) -> None:
        """Add metrics to the checkpoint of a step, when the rank's save of it has been committed."""
        run = self._run(run_uid)
        if run.annotating >= MAX_ANNOTATING:
            raise Unavailable(f"{MAX_ANNOTATING} annotations wait already.")
        run.annotating += 1
        try:
            if attempt is not None and (error := (await self.outcome(run_uid, attempt, Level.LOCAL)).error):
                raise error
            await self._ask("annotate_by_uid", run_uid, step, metrics)
        finally:
            run.annotating -= 1

    async def _watch_cloud(self, notices: CloudNotices) -> None:
        """Pass on what the cloud says of this machine, again and again as long as it says so."""
        while not notices.is_over:
            if (notice := await self._in_thread(self._cloud_io, notices.poll)) is not None:
                await self.notify_preemption(notice)
            await asyncio.sleep(notices.poll_s)

    async def make_durable(self, run_uid: str) -> None:
        await self._ask("make_durable", run_uid)

    async def _forward_progress(self, run: NodeRun, session: int) -> None:
        """One message per node for all of its ranks."""
        await asyncio.sleep(PROGRESS_GATHER_S)
        ranks, run.progress = run.progress, {}
        plan = run.machine.plan
        if plan is not None and plan.session == session:
            captured, met = run.machine.incomplete(), run.met
            await self._report_awaited(run, "ranks_progressed", plan.session_key, ranks, captured, met)

    async def _report_awaited(self, run: NodeRun, method: str, *args: Any) -> None:
        """Tell the coordinator of this node's ranks, and keep its answer: whom the group waits for."""
        try:
            run.awaited = await self._ask(method, run.run_uid, *args)
        except CheckpointError as error:
            log.warning("the coordinator did not take %s: %s", method, error)

    async def awaited_ranks(self, run_uid: str) -> tuple[Awaited, ...]:
        """Whom the group waits for, as the coordinator has told last."""
        return self._runs[run_uid].awaited

    async def await_all(self, run_uid: str, session: int, rank: int, number: int) -> tuple[int, ...]:
        """Wait until all ranks of the group have come to a barrier. Returns who did not, () if all have."""
        run = self._runs[run_uid]
        plan, here = require(run.machine.plan), require(run.machine.here)
        self._check_session(run, session)
        barrier = run.barriers.get(number)
        if barrier is None:
            barrier = run.barriers[number] = BarrierWait()
            while len(run.barriers) > MAX_BARRIERS:
                del run.barriers[next(iter(run.barriers))]
            self._spawn(self._report_met(run, plan, number, barrier, wait_s=BARRIER_GATHER_S))
        barrier.ranks.add(rank)
        if barrier.ranks == set(here.ranks):
            self._spawn(self._report_met(run, plan, number, barrier))
        missing: tuple[int, ...] = await asyncio.shield(barrier.missing)
        return missing

    async def _report_met(
        self, run: NodeRun, plan: SessionPlan, number: int, barrier: BarrierWait, *, wait_s: float = 0.0
    ) -> None:
        """One message when all ranks here have come, and one before if that takes long."""
        await asyncio.wait({barrier.missing}, timeout=wait_s)
        if barrier.is_reported or barrier.missing.done():
            return
        barrier.is_reported = len(barrier.ranks) == len(require(run.machine.here).ranks)
        ranks, end_s = tuple(sorted(barrier.ranks)), time.monotonic() + BARRIER_S
        while True:  # whoever the coordinator lets in while this node does not hear of it waits there for us
            try:
                missing = await self._ask("ranks_met", run.run_uid, plan.session_key, number, ranks)
                break
            except CheckpointError as error:
                if barrier.missing.done():
                    return
                if isinstance(error, RunConflict) or time.monotonic() > end_s:
                    barrier.missing.set_exception(error)
                    return
                await asyncio.sleep(BARRIER_GATHER_S)
        if not barrier.missing.done():
            barrier.missing.set_result(missing)
            run.met = run.met if missing else max(run.met, number)

    # -- effects ---------------------------------------------------------------------------------------

    async def _handle(self, run: NodeRun, event: n.NodeEvent) -> None:
        for effect in run.machine.handle(event):
            await self._carry_out(run, effect)

    async def _obey(self, run: NodeRun, order: n.Order) -> None:
        """Do what a coordinator says; Fenced if a newer one has spoken here."""
        effects = run.machine.handle(order)
        for refused in effects:
            if isinstance(refused, n.RefuseOrder):
                raise Fenced(
                    f"Node {self._node_id[:12]} obeys epoch {refused.epoch}, not {order.epoch}.",
                    epoch=refused.epoch,
                )
        async with run.ordering:  # nobody acts on an epoch before it is durable
            if effects and isinstance(effects[0], n.PersistEpoch):
                await self._carry_out(run, effects[0])
                effects = effects[1:]
        for effect in effects:
            await self._carry_out(run, effect)

    async def _end(self, run: NodeRun, session: int, error: CheckpointError) -> None:
        """Tell whoever asked how long the session lasts."""
        async with run.settled:
            run.end = (session, error)
            run.settled.notify_all()

    async def _carry_out(self, run: NodeRun, effect: n.NodeEffect) -> None:
        match effect:
            case n.WriteShard():
                self._spawn(self._write_shard(run, effect))
            case n.WriteFragment(fragment=fragment):
                self._spawn(self._write_fragment(run, fragment))
            case n.SendCopy():
                self._spawn(self._send_copy(run, effect))
            case n.ReportCopied():
                self._spawn(self._report("replica_ended", self._replica_ended(effect)))
            case n.CheckPeer(peer=peer):
                self._spawn(self._probe(run, peer))
            case n.Release(attempt=attempt, rank=rank):
                if (attempt.attempt, rank) in run.reading:
                    return  # the end of the write releases it
                run.sealed.pop((attempt.attempt, rank), None)
                if event := run.released.get((attempt.attempt, rank)):
                    event.set()
            case n.ResolveSave():
                async with run.settled:
                    run.settled.notify_all()
            case n.DeleteFolder(directory=directory):
                await self._in_thread(self._disk_io, run.staging.delete, run.run_uid, directory)
            case n.ForgetRun(kept=kept):
                run.give_memory_back()
                await self._in_thread(self._disk_io, run.staging.forget, run.run_uid, kept)
                del self._runs[run.run_uid]
                await self._in_thread(self._disk_io, trim_heaps)
            case n.PersistEpoch(epoch=epoch):
                await self._in_thread(self._disk_io, run.persist_epoch, epoch)
            case n.ShowSaveSignal(signal=signal):
                run.show(signal.word)
            case n.EndSession(session=session, error=error):
                if run.decision is not None and not run.decision.done():
                    run.decision.set_exception(error)
                run.end_barriers(error)
                await self._end(run, session, error)
            case n.ReportStored():
                reported = run.reported.pop(effect.attempt.attempt, None)
                await self._report(
                    "node_stored",
                    effect.attempt,
                    effect.node_index,
                    self._node_id,
                    effect.files,
                    effect.replicated,
                    effect.metrics,
                    effect.epoch,
                    reported.facts() if reported is not None else SaveFacts(),
                )
            case n.ReportRefused(attempt=attempt, ranks=ranks, reason=reason):
                await self._report("save_refused", attempt, ranks, reason)

    async def _write_shard(self, run: NodeRun, effect: n.WriteShard) -> None:
        shard = run.sealed.get((effect.attempt.attempt, effect.rank))
        if shard is None:
            return
        key = (shard.attempt.attempt, shard.rank)
        if key in run.reading:
            return
        run.reading.add(key)
        arena = run.arenas.get(shard.rank)
        pool = self._stream_io if arena is not None and arena.mode == "stream" else self._disk_io
        try:
            files, rows = await self._in_thread(pool, store_shard, run, shard)
        except Exception as error:  # whatever it was, the rank must get its arena back
            event: n.NodeEvent = n.SaveFailed(attempt=shard.attempt, rank=shard.rank, reason=_reason(error))
        else:
            event = n.ShardWritten(attempt=shard.attempt, rank=shard.rank, files=files, rows=rows)
            self._count_bytes(run, "local", sum(file.size_bytes for file in files))
        finally:
            run.reading.discard(key)
        await self._handle(run, event)

    async def _write_fragment(self, run: NodeRun, fragment: Fragment) -> None:
        name = fragment_file(fragment.node_index, fragment.num_nodes)
        try:
            data = await self._in_thread(self._disk_io, encode_fragment, fragment)
            await self._in_thread(
                self._disk_io, run.staging.put, run.run_uid, fragment.attempt.directory, name, [data]
            )
        except Exception as error:
            event: n.NodeEvent = n.SaveFailed(
                attempt=fragment.attempt, rank=fragment.ranks[0], reason=_reason(error)
            )
        else:
            entry = FileEntry(name=name, size_bytes=len(data), digest=digest(data))
            event = n.FragmentWritten(attempt=fragment.attempt, entry=entry)
        await self._handle(run, event)

    async def _send_copy(self, run: NodeRun, effect: n.SendCopy) -> None:
        error, is_unreachable = None, False
        try:
            credentials = self._keys.credentials(run.run_uid)
            sent = await self._in_thread(self._peer_io, send_copy, run, effect, credentials, self._copies)
            self._count_bytes(run, "peer", sent)
        except Exception as failure:  # the coordinator must hear of it in any case
            error = _reason(failure)
            is_unreachable = isinstance(failure, Unavailable) and bool(failure.fields.get("unreachable"))
        event = n.CopyEnded(
            attempt=effect.attempt,
            node_index=effect.node_index,
            holder=effect.holder,
            epoch=effect.epoch,
            error=error,
            is_unreachable=is_unreachable,
        )
        await self._handle(run, event)

    def _replica_ended(self, copied: n.ReportCopied) -> ReplicaEnded:
        return ReplicaEnded(
            attempt=copied.attempt,
            node_index=copied.node_index,
            holder=copied.holder,
            error=copied.error,
            epoch=copied.epoch,
            source=self._node_id,
            is_unreachable=copied.is_unreachable,
        )

    async def _probe(self, run: NodeRun, peer: str) -> None:
        """Ask a silent peer until it answers, so that no save has to find out."""
        credentials, end_s = self._keys.credentials(run.run_uid), time.monotonic() + PROBE_FOR_S
        is_there = False
        while not is_there and not run.is_over and time.monotonic() < end_s:
            await asyncio.sleep(PROBE_EVERY_S)
            is_there = await self._in_thread(self._probe_io, answers, run, peer, credentials, PROBE_S)
        await self._handle(run, n.PeerReturned(peer=peer))

    def _count_bytes(self, run: NodeRun, tier: str, size: int) -> None:
        labels = {"tier": tier, "node": self._node_id}
        self._meters.record(run.spec.name, Sample(metric=telemetry.SAVE_BYTES, value=size, labels=labels))

    # -- restore ---------------------------------------------------------------------------------------

    async def _make_ticket(self, run: NodeRun) -> RestoreTicket:
        plan = require(run.machine.plan)
        if plan.resume is None:
            return RestoreTicket(session=plan.session, epoch=plan.epoch, checkpoint=None)
        try:
            finder = SourceFinder(
                run_uid=run.run_uid,
                node_id=self._node_id,
                credentials=self._keys.credentials(run.run_uid),
                arenas=run.arenas,
                staging=run.staging,
                storage=run.spec.storage,
                endpoints=run.endpoints,
            )
            ticket: RestoreTicket = await self._in_thread(self._disk_io, finder.ticket, plan)
        except (OSError, CheckpointError) as error:  # as bad as a bad slice: the group falls back together
            damage = (f"manifest of step {plan.resume.checkpoint.step}: {_reason(error)}",)
            return RestoreTicket(
                session=plan.session, epoch=plan.epoch, checkpoint=plan.resume.checkpoint, damage=damage
            )
        return ticket

    async def _report_waiting(self, run: NodeRun, plan: SessionPlan, decision: asyncio.Future[bool]) -> None:
        """Tell which ranks here have restored, again and again while they wait for others."""
        while True:
            await asyncio.wait({decision}, timeout=RESTORED_AGAIN_S)
            if decision.done() or run.decision is not decision:
                return
            ranks = tuple(sorted(run.restored))
            await self._report_awaited(run, "ranks_restored", plan.session_key, self._node_id, ranks)

    async def _report_restored(
        self, run: NodeRun, plan: SessionPlan, decision: asyncio.Future[bool], ranks: tuple[RankRestore, ...]
    ) -> None:
        try:
            go = await self._ask("node_restored", plan.run_uid, plan.session_key, self._node_id, ranks)
        except CheckpointError as error:
            if not decision.done():
                decision.set_exception(error)
            return
        if go and not decision.done():
            run.end_shared_reads()
            run.close_arenas()  # of the session before; a zombie of it must not write into ours
            decision.set_result(True)

    # -- plumbing --------------------------------------------------------------------------------------

    def _open_staging(self, spec: RunSpec) -> Disks:
        roots = staging_roots(spec.options.staging, self._node_id)
        with self._staging_lock:
            if roots not in self._stagings:
                self._stagings[roots] = Disks(roots)
            return self._stagings[roots]

    async def _in_thread(
        self, pool: ThreadPoolExecutor, work: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, partial(work, *args, **kwargs))

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _report(self, method: str, *args: Any) -> None:
        """Ask and survive: a coordinator that is away costs this save, never the agent."""
        try:
            await self._ask(method, *args)
        except CheckpointError as error:
            log.warning("the coordinator did not take %s: %s", method, error)

    async def _ask(self, method: str, *args: Any) -> Any:
        for _ in range(2):  # once more with a new handle, if the coordinator was restarted under its name
            if self._coordinator is None:
                try:
                    self._coordinator = ray.get_actor(names.COORDINATOR, namespace=names.NAMESPACE)
                except ValueError:
                    break
            try:
                return await getattr(self._coordinator, method).remote(*args)
            except ray.exceptions.RayTaskError as error:
                raise (
                    error.cause if isinstance(error.cause, CheckpointError) else Unavailable(str(error))
                ) from None
            except ray.exceptions.RayError:
                self._coordinator = None
        raise Unavailable(f"The coordinator did not answer {method}.")


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else named_text(error)


async def _logged(work: Awaitable[None]) -> None:
    try:
        await work
    except Exception:
        log.exception("background work of the agent failed")
