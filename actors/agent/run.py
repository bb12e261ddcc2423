"""One run on a node: the run's host, disks and memory, and the callers of the host."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakSet

from ray_ckpt.actors.agent.captures import Captures
from ray_ckpt.actors.agent.memory import RankMemory
from ray_ckpt.actors.agent.priority import DrainRateLimiter, yield_to_training
from ray_ckpt.actors.agent.restoring import NodeRestore
from ray_ckpt.actors.callers import Callers
from ray_ckpt.actors.messages import OpenedRun, RunSpec
from ray_ckpt.actors.threads import BriefThreads
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.node_machine import NodeMachine
from ray_ckpt.core.values import SessionKey, SessionNode, SessionPlan, Token
from ray_ckpt.engine.node_host import NodeHost
from ray_ckpt.engine.node_ports import CallerLeft, NodeHostEvent, OrderReceived, SessionAwaited
from ray_ckpt.errors import AgentLost, InsufficientSpace, RunSuperseded, Unavailable
from ray_ckpt.storage.local.direct import Written
from ray_ckpt.storage.local.disks import Disks
from ray_ckpt.trainer.link import StepState
from ray_ckpt.transport.sending import Limiter
from ray_ckpt.types import AttemptId, FileEntry

log = logging.getLogger("ray_ckpt.agent")

CHECK_THREADS = 2  # concurrent checks and scrubs of the storage path
DRAIN_THREADS = 2  # concurrent uploads; each holds some 200 MiB of parts and read-ahead
START_S = 60.0  # longest wait of ranks that request their ticket for a session to begin
EPOCH_S = 20.0  # longest wait for an epoch to become durable; then the peer, whose call may last, retries
MISSING_LOOK_S = 5.0  # between checks of rank 0's node that the log is still at its place
T = TypeVar("T")


class NodeRun:
    """State of a run on this node. Only the host makes decisions."""

    def __init__(
        self,
        spec: RunSpec,
        run_uid: str,
        staging: Disks,
        host: Callable[[NodeRun, NodeMachine], NodeHost],
        memories: WeakSet[RankMemory] | None = None,
    ) -> None:
        """Make the run; `memories` are those of all runs of this node."""
        self.run_uid = run_uid
        self.staging = staging
        self.use(spec)
        # Separate threads for each run, since the storage path of another run may hang.
        self.check_threads = BriefThreads(CHECK_THREADS, "ray_ckpt-remote", yield_to_training)
        self.drain_threads = BriefThreads(DRAIN_THREADS, "ray_ckpt-drain", yield_to_training)
        self.urgent_threads = BriefThreads(1, "ray_ckpt-urgent", yield_to_training)  # before other drains
        self.item_threads = BriefThreads(1, "ray_ckpt-items", yield_to_training)  # do not wait for drains
        self._drains: dict[tuple[str, int, str], object] = {}  # the last order by attempt, fragment, items
        self.uploads: dict[tuple[str, int], DrainRateLimiter] = {}  # by attempt and fragment
        self.memory = RankMemory(memories)
        self.captures = Captures()
        self.step_states: dict[int, dict[int, StepState]] = {}  # rank -> step -> state, for a salvage
        self.sending_states: set[int] = set()  # ranks whose states are on their way to a peer
        self.restore: NodeRestore | None = None  # of the last session that began on this node
        self.still: dict[
            str, tuple[tuple[tuple[int, int], ...], Written]
        ] = {}  # digests of ranks' still shards
        # file -> the session in which an earlier still shard was read, its entry, device and inode
        self.read_still: dict[str, tuple[SessionKey | None, FileEntry, tuple[int, int]]] = {}
        self.bad_still: dict[str, tuple[SessionKey | None, FileEntry, tuple[int, int]]] = {}  # found damaged
        # position in a parity group -> checkpoints here whose parity of still shards is not to be linked
        self.unlinked: dict[int, set[str]] = {}
        self.mended: dict[FileEntry, str] = {}  # still shards that were mended, and in which folder
        self.endpoints: dict[str, str] = {}  # addresses of agents, by node
        self._warned_of_space: SessionKey | None = None  # the last session that was warned of a full disk
        self.annotating = 0  # number of annotations that wait for a save, or for the log
        self.checked_nonce = ""  # nonce of the coordinator for which the storage path was last checked
        self.missing = ""  # what is missing on the storage path; see `RemoteTier.missing`
        self._missing_s = 0.0  # time of the last check of `missing` (monotonic); inf during a check
        self.starts: dict[SessionKey, tuple[RunSpec, dict[str, str]]] = {}  # orders that are being handled
        self.callers = Callers(lambda token: self.host.handle(CallerLeft(token=token)))
        self._loop = asyncio.get_running_loop()
        self.host = host(self, NodeMachine(epoch=staging.epoch(run_uid)))

    @property
    def machine(self) -> NodeMachine:
        return self.host.machine

    def opened(self) -> OpenedRun:
        """Return the run as an agent reports it to a coordinator that may not know it."""
        return OpenedRun(
            spec=self.spec,
            run_uid=self.run_uid,
            plan=self.host.plan,
            epoch=self.machine.epoch,
            is_finished=self.machine.is_finished,
            failed=self.machine.failed,
        )

    async def request(self, event: Callable[[Token], NodeHostEvent]) -> Any:
        """Handle an event with a fresh token, and return the host's reply or raise its error."""
        return await self.callers.request(lambda token: self.host.handle(event(token)))

    async def current_restore(self, session_key: SessionKey) -> NodeRestore:
        """Return the restore of the session at work; wait for it to begin.

        RunSuperseded unless the group with that session, which it may have left, is at work.
        """
        begins = self.request(lambda token: SessionAwaited(token=token, session_key=session_key))
        try:
            await asyncio.wait_for(begins, START_S)
        except TimeoutError:  # an agent that has replaced another one may take stock of its disks for longer
            raise AgentLost(f"The group's session did not begin within {START_S:.0f} s.") from None
        return require(self.restore)

    async def obey(self, order: n.Order) -> dict[str, str] | None:
        """Carry out an order of a coordinator; return the folders that could not be deleted.

        Fenced if this node obeys a newer coordinator.
        """
        left: dict[str, str] | None = await self.request(
            lambda token: OrderReceived(token=token, order=order)
        )
        return left

    def reach_epoch(self, epoch: int) -> None:
        """Block until this node obeys `epoch` or a higher one; not for the thread of the event loop.

        OSError if the disk does not take the epoch; Unavailable after EPOCH_S, so that the peer tries again.
        """
        if epoch > self.machine.epoch:
            obeyed = asyncio.run_coroutine_threadsafe(self.obey(n.EpochSeen(epoch=epoch)), self._loop)
            try:
                obeyed.result(EPOCH_S)
            except TimeoutError:
                if obeyed.done():
                    raise  # of the disk
                raise Unavailable(f"epoch {epoch} is not durable here yet", refused=False) from None

    def require_plan(self) -> SessionPlan:
        """Return the plan of the session, else raise AgentLost."""
        return require(self.machine.plan)

    def require_here(self) -> SessionNode:
        """Return this node's part of the plan, else raise AgentLost."""
        return require(self.machine.here)

    def check_session(self, session_key: SessionKey) -> None:
        if self.require_plan().session_key != session_key:
            raise RunSuperseded("A newer session owns this run.")

    def use(self, spec: RunSpec) -> None:
        """Use the spec of a new launcher, whose options may differ from those of the last one."""
        self.spec = spec
        self.remote = spec.storage.open()
        self.limiter = Limiter(spec.options.replicate_bytes_per_s)
        self.drain_limiter = Limiter(spec.options.drain_bytes_per_s)

    def take_start(self, plan: SessionPlan) -> None:
        """Use the options and addresses that were sent with a plan."""
        if (start := self.starts.pop(plan.session_key, None)) is not None:
            spec, self.endpoints = start
            self.use(spec)

    def check_storage(self, nonce: str, node: str) -> None:
        """Check the storage path once per coordinator, since a later fault must not end a group. Blocks."""
        if self.checked_nonce != nonce:
            self.remote.check_shared(nonce, node=node)
            self.checked_nonce = nonce

    async def drain(
        self,
        attempt: AttemptId,
        node_index: int,
        upload: Callable[[], T],
        *,
        items: str = "",
        is_urgent: bool = False,
    ) -> T:
        """Return `upload()`, run in a drain thread; Unavailable if it is ordered again before it begins.

        With `items`, the upload is of these items of the fragment. Uploads of items and urgent ones each have
        a thread beside those of drains.

        A coordinator repeats an order that is not answered in time. While the storage path hangs, repeated
        orders wait for a thread, and all but the last one would then upload the same bytes again.
        """
        key, order = (attempt.attempt, node_index, items), object()
        drains = self.urgent_threads if is_urgent else self.drain_threads
        threads = self.item_threads if items else drains
        self._drains[key] = order

        def begin() -> T:
            if self._drains.get(key) is not order:
                raise Unavailable(f"the upload of step {attempt.step} was ordered again")
            return upload()

        try:
            return await threads.run(begin)
        finally:
            if self._drains.get(key) is order:
                del self._drains[key]

    def uploaded_bytes(self) -> dict[str, int]:
        """Return, by attempt, the bytes that unfinished uploads have sent."""
        sent: dict[str, int] = {}
        for (attempt, _), pace in list(self.uploads.items()):
            sent[attempt] = sent.get(attempt, 0) + pace.sent_bytes
        return sent

    def reserve(self, rank: int, size_bytes: int, *, named: bool) -> None:
        """Raise InsufficientSpace unless the arena of a rank and two checkpoints with copies fit.

        On disk that holds for a run without a checkpoint. A later group also has the files of earlier
        checkpoints, which retention deletes as new ones come; a save that does not fit costs that save only.
        """
        ranks = self.machine.here.ranks if self.machine.here else (rank,)
        options = self.spec.options
        self.memory.reserve(
            rank,
            size_bytes,
            ranks=ranks,
            mode=options.memory,
            named=named,
            prefetched_bytes=self.restore.prefetched_bytes if self.restore is not None else 0,
        )
        needed = math.ceil(2 * size_bytes * len(ranks) * (1 + self._copied_ratio()))
        try:
            self.check_space(needed, what="Two checkpoints with copies", is_one_file=False)
        except InsufficientSpace as error:
            plan = self.machine.plan
            if plan is None or plan.resume is None or plan.resume.checkpoint.id.run_uid != self.run_uid:
                raise
            if self._warned_of_space != plan.session_key:
                self._warned_of_space = plan.session_key
                log.warning("saves of this group may not fit on this node: %s", error)

    def _copied_ratio(self) -> float:
        """Bytes that this node stores for other nodes, for each byte of its own: more in a small group."""
        plan, here = self.machine.plan, self.machine.here
        if plan is not None and here is not None and self.spec.options.replica_nodes:
            return sum(here.node_id in node.holders for node in plan.nodes)  # other nodes hold none, ever
        group = plan.group_of(here.node_index) if plan is not None and here is not None else None
        return self.spec.options.copied_ratio if group is None else group.parity / group.num_data

    def check_space(self, needed_bytes: int, *, what: str, is_one_file: bool = True) -> None:
        reserve_bytes = self.spec.options.reserve_bytes
        self.staging.check_space(
            needed_bytes, reserve_bytes=reserve_bytes, what=what, is_one_file=is_one_file
        )

    def persist_epoch(self, epoch: int) -> None:
        """Write the epoch to disk; block until the write is durable."""
        name, path = self.spec.name, self.spec.storage_path
        self.staging.write_mark(self.run_uid, run_name=name, storage_path=path, epoch=epoch)

    async def check_missing(self) -> None:
        """Check the storage path, and set `missing`."""
        try:
            self.missing = await self.drain_threads.run(self.remote.missing)
        finally:
            self._missing_s = time.monotonic()

    def missing_is_due(self) -> bool:
        """Return whether to call `check_missing` now; False while a check is running."""
        is_due = time.monotonic() - self._missing_s > MISSING_LOOK_S
        if is_due:
            self._missing_s = float("inf")
        return is_due


def require(value: T | None) -> T:
    """Return a value that exists while a group is at work on this node; else raise AgentLost."""
    if value is None:
        raise AgentLost("The run has no session here.")
    return value
