"""One run on a node: its machine, its memory and disks, and what its ranks and its coordinator wait for."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from ray_ckpt.actors.agent.arena import ArenaMemory, RankArena, SignalPage
from ray_ckpt.actors.agent.priority import DrainRateLimiter, yield_to_training
from ray_ckpt.actors.agent.shared_reads import SharedReads
from ray_ckpt.actors.messages import RunSpec
from ray_ckpt.actors.threads import BriefThreads
from ray_ckpt.core import node_machine as n
from ray_ckpt.core.awaited import Awaited
from ray_ckpt.core.messages import RankProgress, SessionPlan
from ray_ckpt.errors import CheckpointError, Unavailable
from ray_ckpt.restore.reader import RestoreTicket
from ray_ckpt.storage.local.disks import Disks
from ray_ckpt.trainer.link import SealedShard
from ray_ckpt.transport.sending import Limiter
from ray_ckpt.types import RankRestore, SaveFacts

DRAIN_THREADS = 2  # fragments on their way to storage paths: each holds some 200 MiB of parts and read-ahead


@dataclass(slots=True)
class Reported:
    """What the ranks here have told of a save."""

    mesh: str = ""
    stall_s: float = 0.0
    capture_s: float = 0.0
    sealed_s: float = 0.0  # when the last rank's capture came (monotonic)

    def add(self, shard: SealedShard) -> None:
        self.mesh = self.mesh or shard.mesh
        self.stall_s = max(self.stall_s, shard.stall_s)
        self.capture_s = max(self.capture_s, shard.capture_s)
        self.sealed_s = time.monotonic()

    def facts(self) -> SaveFacts:
        """When all is stored."""
        local_s = time.monotonic() - self.sealed_s
        return SaveFacts(mesh=self.mesh, stall_s=self.stall_s, capture_s=self.capture_s, local_s=local_s)


class BarrierWait:
    """Ranks of this node that have come to a barrier; `missing` is done when all of the group have met."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.is_reported = False  # that all ranks here have come
        self.missing: asyncio.Future[tuple[int, ...]] = asyncio.get_running_loop().create_future()


class NodeRun:
    """See the module. It decides nothing; the agent and `node_files` read and set what is here."""

    def __init__(self, spec: RunSpec, run_uid: str, staging: Disks) -> None:
        self.run_uid = run_uid
        self.staging = staging
        self.use(spec)
        # Of its own: the storage path of another run may hang.
        self.drain_threads = BriefThreads(DRAIN_THREADS, "ray_ckpt-drain", yield_to_training)
        self.uploads: dict[
            tuple[str, int], DrainRateLimiter
        ] = {}  # attempt and fragment that are on their way
        self.machine = n.NodeMachine(epoch=staging.epoch(run_uid))
        self.end: tuple[int, CheckpointError] | None = None  # the last session that ended here, and why
        self.endpoints: dict[str, str] = {}
        self.arenas: dict[int, RankArena] = {}
        self.arena_lock = asyncio.Lock()  # one rank's memory at a time is looked for and taken
        self.page: SignalPage | None = None  # made when the first rank asks for it
        self.word = 0  # what it shows
        self.sealed: dict[tuple[str, int], SealedShard] = {}
        self.reported: dict[str, Reported] = {}  # by attempt, until it is stored
        self.released: dict[tuple[str, int], asyncio.Event] = {}
        self.reading: set[tuple[str, int]] = set()  # captures that are being written; their memory is in use
        self.settled = asyncio.Condition()
        self.ordering = asyncio.Lock()
        self.ticket: asyncio.Task[RestoreTicket] | None = None
        self.shared: SharedReads | None = None  # of the restore that is going on
        self.restored: dict[int, RankRestore] = {}
        self.decision: asyncio.Future[bool] | None = None  # True: go; False: a new session has started
        self.started = asyncio.Event()
        self.awaited: tuple[Awaited, ...] = ()  # whom the group waits for, as the coordinator has told last
        self.barriers: dict[int, BarrierWait] = {}  # by number
        self.met = 0  # the highest number of one that all ranks have come to
        self.progress: dict[int, RankProgress] = {}
        self.missing = ""  # of the storage path; see `RemoteTier.missing`
        self.looked_s = 0.0  # for that (monotonic)
        self.annotating = 0  # annotations that wait for a save, or for the log
        self.reserved: dict[int, int] = {}  # bytes of each rank's coming arena
        self.checked_nonce = ""
        self.is_over = False  # its launcher has ended it
        self.is_finished = False  # and has not given it up: it is going to be put away

    @property
    def plan(self) -> SessionPlan | None:
        """Of the group at work."""
        return None if self.is_over else self.machine.plan

    def use(self, spec: RunSpec) -> None:
        """What the run is from here on; another launcher may have given it other options."""
        self.spec = spec
        self.remote = spec.storage.open()
        self.limiter = Limiter(spec.options.replicate_bytes_per_s)
        self.drain_limiter = Limiter(spec.options.drain_bytes_per_s)

    def check_space(self, needed_bytes: int, *, what: str, is_one_file: bool = True) -> None:
        reserve_bytes = self.spec.options.reserve_bytes
        self.staging.check_space(
            needed_bytes, reserve_bytes=reserve_bytes, what=what, is_one_file=is_one_file
        )

    @property
    def named_bytes(self) -> int:
        """What arenas of the run take of /dev/shm."""
        return sum(arena.named_bytes for arena in self.arenas.values())

    def persist_epoch(self, epoch: int) -> None:
        """Blocks until it is durable."""
        name, path = self.spec.name, self.spec.storage_path
        self.staging.write_mark(self.run_uid, run_name=name, storage_path=path, epoch=epoch)

    def buffer_of(self, shard: SealedShard) -> ArenaMemory | None:
        """The memory that a capture is in, unless this agent does not have it."""
        arena = self.arenas.get(shard.rank)
        if arena is None or shard.buffer >= len(arena.buffers):
            return None
        return arena.buffers[shard.buffer]

    def show(self, word: int) -> None:
        """The agreed step, where this node's ranks look; 0: none."""
        self.word = word
        if self.page is not None:
            self.page.show(word)

    def give_memory_back(self) -> None:
        """No rank is left that would use it."""
        self.end_shared_reads()
        self.close_arenas()
        if self.page is not None:
            self.page.close()
            self.page = None

    def close_arenas(self) -> None:
        while self.arenas:
            self.arenas.popitem()[1].close()

    def end_barriers(self, error: CheckpointError) -> None:
        barriers, self.barriers = self.barriers, {}
        for barrier in barriers.values():
            if not barrier.missing.done():
                barrier.missing.set_exception(error)

    def end_shared_reads(self) -> None:
        if self.shared is not None:
            self.shared.close()
            self.shared = None


def require(value: Any) -> Any:
    """`value`, that there is while a group is at work here; else Unavailable."""
    if value is None:
        raise Unavailable("The run has no session here.")
    return value
