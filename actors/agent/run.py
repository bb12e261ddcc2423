"""One run on a node: the run's machine, disks, memory and session."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from ray_ckpt.actors.agent.captures import Captures
from ray_ckpt.actors.agent.memory import RankMemory
from ray_ckpt.actors.agent.priority import DrainRateLimiter, yield_to_training
from ray_ckpt.actors.agent.session import NodeSession
from ray_ckpt.actors.messages import RunSpec
from ray_ckpt.actors.threads import BriefThreads
from ray_ckpt.core.node_machine import NodeMachine
from ray_ckpt.core.values import SessionNode, SessionPlan
from ray_ckpt.errors import CheckpointError, RunSuperseded, Unavailable
from ray_ckpt.storage.local.disks import Disks
from ray_ckpt.transport.sending import Limiter

DRAIN_THREADS = 2  # concurrent uploads; each holds some 200 MiB of parts and read-ahead
MISSING_LOOK_S = 5.0  # between checks, by the node of rank 0, that the log is still at its place
T = TypeVar("T")


class NodeRun:
    """State of a run on this node. Only the machine makes decisions."""

    def __init__(self, spec: RunSpec, run_uid: str, staging: Disks) -> None:
        self.run_uid = run_uid
        self.staging = staging
        self.use(spec)
        # Separate threads for each run, since the storage path of another run may hang.
        self.drain_threads = BriefThreads(DRAIN_THREADS, "ray_ckpt-drain", yield_to_training)
        self.uploads: dict[tuple[str, int], DrainRateLimiter] = {}  # by attempt and fragment
        self.machine = NodeMachine(epoch=staging.epoch(run_uid))
        self.memory = RankMemory()
        self.captures = Captures()
        self.session: NodeSession | None = None  # the last session that began on this node
        self.started = asyncio.Event()  # a session has begun
        self.ordering = asyncio.Lock()  # held while an epoch is made durable
        self.endpoints: dict[str, str] = {}  # addresses of agents, by node
        self.annotating = 0  # number of annotations that wait for a save, or for the log
        self.checked_nonce = ""  # nonce of the coordinator for which the storage path was last checked
        self.is_over = False  # the launcher has ended the run
        self.is_finished = False  # the launcher has not given the run up, so the run will be put away
        self._changed = asyncio.Condition()  # notified of outcomes, and of the end of a session
        self._end: tuple[int, CheckpointError] | None = None  # the last session that ended, and the reason
        self.missing = ""  # what is missing on the storage path; see `RemoteTier.missing`
        self._missing_s = 0.0  # when `missing` was last checked (monotonic); inf during a check

    @property
    def plan(self) -> SessionPlan | None:
        """The plan of the group at work."""
        return None if self.is_over else self.machine.plan

    def require_plan(self) -> SessionPlan:
        """Return the plan of the session, else raise Unavailable."""
        return require(self.machine.plan)

    def require_here(self) -> SessionNode:
        """Return this node's part of the plan, else raise Unavailable."""
        return require(self.machine.here)

    def check_session(self, session: int) -> None:
        if self.require_plan().session != session:
            raise RunSuperseded("A newer session owns this run.")

    def use(self, spec: RunSpec) -> None:
        """Take over the spec of a launcher; its options may differ from the last launcher's."""
        self.spec = spec
        self.remote = spec.storage.open()
        self.limiter = Limiter(spec.options.replicate_bytes_per_s)
        self.drain_limiter = Limiter(spec.options.drain_bytes_per_s)

    def check_space(self, needed_bytes: int, *, what: str, is_one_file: bool = True) -> None:
        reserve_bytes = self.spec.options.reserve_bytes
        self.staging.check_space(
            needed_bytes, reserve_bytes=reserve_bytes, what=what, is_one_file=is_one_file
        )

    def persist_epoch(self, epoch: int) -> None:
        """Write the epoch to disk; block until the write is durable."""
        name, path = self.spec.name, self.spec.storage_path
        self.staging.write_mark(self.run_uid, run_name=name, storage_path=path, epoch=epoch)

    def release(self, *, is_finished: bool) -> None:
        """Free the memory of a run that is over; the run's checkpoints stay on disk for now."""
        self.is_over, self.is_finished = True, is_finished
        self.close()

    def close(self) -> None:
        if self.session is not None:
            self.session.restore.close_shared()
        self.memory.close()

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

    async def end_session(self, session: int, error: CheckpointError) -> None:
        async with self._changed:
            self._end = (session, error)
            self._changed.notify_all()

    async def notify_outcomes(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def await_end(self, session: int) -> CheckpointError:
        """Wait until a session has ended, and return the reason."""
        return await self.wait_for(lambda: self._end[1] if self._end and self._end[0] >= session else None)

    async def wait_for(self, find: Callable[[], T | None]) -> T:
        """Wait until `find` returns a value, such as an outcome or a session's end; return that value."""
        async with self._changed:
            await self._changed.wait_for(lambda: find() is not None)
            return require(find())


def require(value: T | None) -> T:
    """Return a value that exists while a group is at work on this node; else raise Unavailable."""
    if value is None:
        raise Unavailable("The run has no session here.")
    return value
