"""The plan of a restore from the manifest of a large group: CPU time and memory of an agent and of a rank.

All fragments are real files on the agent's own disk, so the time to fetch them from peers is left out. The
ranks are processes of their own. One rank is measured; the memory of a node is that of its agent and of RANKS
such ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path

from jobs.bench.context import Context
from jobs.bench.fragments import RANKS, Fleet
from jobs.bench.row import Reference, Row, measure
from ray_ckpt.actors.agent.restore_sources import SourceFinder
from ray_ckpt.core.values import ResumePoint, SessionNode, SessionPlan
from ray_ckpt.format.digest import digest
from ray_ckpt.format.manifest import decode_columns
from ray_ckpt.format.names import fragment_file, shard_files
from ray_ckpt.plan.restore import plan_restore
from ray_ckpt.restore.reader import RestoreTicket
from ray_ckpt.storage.local.disks import Disks
from ray_ckpt.storage.remote.tier import RemoteRef
from ray_ckpt.transport.credentials import ServiceKeys
from ray_ckpt.types import CheckpointInfo

NUM_NODES = 1000
NUM_SLICES = 1500  # of a rank: 12,000 rows of a node
QUICK_NODES, QUICK_SLICES = 4, 60
NODE, NODE_INDEX = "a" * 56, 1
AGENT_LIMIT_S, RANK_LIMIT_S, SAME_LIMIT_S, NODE_LIMIT_GB, COPY_LIMIT_MS = 8.0, 3.0, 0.5, 3.0, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCost:
    """CPU seconds of a rank to plan, and the growth of the rank's own memory in bytes."""

    cpu_s: float
    memory_bytes: int


class Planning:
    """A checkpoint of a fleet on the disk of one node, and that node's agent."""

    def __init__(self, fleet: Fleet, root: Path, disks: Disks) -> None:
        self.fleet = fleet
        self._root = root
        self._disks = disks
        self._folder = root / fleet.attempt.run_uid / fleet.attempt.directory
        self._checkpoint: CheckpointInfo = fleet.write(self._folder)

    def plan(self, world_size: int) -> SessionPlan:
        """Return a session of `world_size` ranks; it has the saved shape if that many ranks saved."""
        num_nodes = self.fleet.num_nodes
        names = [fragment_file(index, num_nodes) for index in range(num_nodes)]
        resume = ResumePoint(
            checkpoint=self._checkpoint,
            holders=tuple((NODE,) for _ in names),
            fragments=tuple(digest((self._folder / name).read_bytes()) for name in names),
        )
        nodes = tuple(
            SessionNode(
                node_id=NODE if index == NODE_INDEX else f"{index:056x}",
                node_index=index,
                ranks=tuple(range(index * RANKS, (index + 1) * RANKS)),
                holders=(),
            )
            for index in range(num_nodes)
        )
        return SessionPlan(run_uid="0" * 32, session=2, world_size=world_size, nodes=nodes, resume=resume)

    @contextmanager
    def ticket(self, plan: SessionPlan, *, is_whole: bool) -> Iterator[tuple[RestoreTicket, float, int]]:
        """Make a ticket as the agent does; yield it with the CPU seconds and the bytes in shared memory."""
        finder = SourceFinder(
            run_uid="0" * 32,
            node_id=NODE,
            credentials=ServiceKeys.make(datetime.now(UTC)).credentials("0" * 32),
            arenas={},
            staging=self._disks,
            storage=RemoteRef(storage_path=str(self._root), run_name="bench"),
            endpoints={},
        )
        started_s = time.process_time()
        found = finder.ticket(plan) if is_whole else finder.own_ticket(plan)
        used_s = time.process_time() - started_s
        assert found is not None
        ticket, memory = found
        try:
            yield ticket, used_s, memory.size_bytes
        finally:
            memory.close()

    def hold(self, staging: Path) -> Path:
        """Put one complete fragment into a staging folder, with sparse files as shards and states."""
        folder = staging / self.fleet.attempt.run_uid / self.fleet.attempt.directory
        folder.mkdir(parents=True)
        name = fragment_file(NODE_INDEX, self.fleet.num_nodes)
        data = (self._folder / name).read_bytes()
        (folder / name).write_bytes(data)
        for file in decode_columns(data)[0].files:
            with (folder / file.name).open("wb") as opened:
                opened.truncate(file.size_bytes)
        staging.chmod(0o700)
        return staging


def plan_of_rank(ticket: RestoreTicket, fleet: Fleet, rank: int, world_size: int) -> RankCost:
    """Plan the restore of a rank as `load_items` does; runs in a process of its own."""
    before, started_s = _anonymous_bytes(), time.process_time()
    assert ticket.manifest is not None
    rows = ticket.manifest.open()
    targets = fleet.targets(rank, world_size)
    first = rows.first_of(target.key for target in targets)
    own_files = shard_files(rank, world_size)
    plan = plan_restore(targets, rows.meeting(targets, own_files), own_files=own_files)
    used_s = time.process_time() - started_s
    assert not plan.problems and len(first) == len(targets) and plan.reads
    return RankCost(cpu_s=used_s, memory_bytes=max(0, _anonymous_bytes() - before))


def rows(context: Context) -> Iterator[Row]:
    fleet = Fleet(
        num_nodes=QUICK_NODES if context.quick else context.num_nodes or NUM_NODES,
        num_slices=QUICK_SLICES if context.quick else NUM_SLICES,
    )
    root = context.folder / f"fragments-{fleet.num_nodes}-{fleet.num_slices}"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with closing(Disks([root])) as disks, ProcessPoolExecutor(1, get_context("spawn")) as ranks:
        rig = Planning(fleet, root, disks)
        ranks.submit(os.getpid).result()
        other = fleet.world_size - fleet.world_size // 8  # every rank then needs parts of several slices
        yield from _planned(context, rig, ranks, other, "other")
        yield from _planned(context, rig, ranks, fleet.world_size, "same")
    with context.temporary() as folder:
        yield _copied(context, rig.hold(folder / "staging"), fleet)


def _planned(
    context: Context, rig: Planning, ranks: ProcessPoolExecutor, world_size: int, name: str
) -> Iterator[Row]:
    fleet, plan, is_whole = rig.fleet, rig.plan(world_size), name == "other"
    memory_gb: list[float] = []
    rank_s: list[float] = []

    def agent_s() -> float:
        before = _anonymous_bytes()
        with rig.ticket(plan, is_whole=is_whole) as (ticket, used_s, shared_bytes):
            own_bytes = max(0, _anonymous_bytes() - before)
            rank = plan.nodes[NODE_INDEX].ranks[0]
            cost = ranks.submit(plan_of_rank, ticket, fleet, rank, world_size).result()
        rank_s.append(cost.cpu_s)
        memory_gb.append((shared_bytes + own_bytes + RANKS * cost.memory_bytes) / 1e9)
        return used_s

    what = f"{fleet.num_nodes:,} nodes x {RANKS * fleet.num_slices:,} slices, {name} shape"
    agent_limit_s, rank_limit_s = (AGENT_LIMIT_S, RANK_LIMIT_S) if is_whole else (SAME_LIMIT_S, SAME_LIMIT_S)
    agent = measure(
        f"ticket-{name}-agent",
        f"CPU of an agent: {what}",
        "s",
        agent_s,
        repeat=context.repeat,
        limit=agent_limit_s,
    )
    yield agent
    yield replace(
        agent,
        name=f"ticket-{name}-rank",
        what=f"CPU of a rank: {what}",
        samples=tuple(rank_s),
        reference=Reference(name="limit", samples=(rank_limit_s,)),
    )
    yield replace(
        agent,
        name=f"ticket-{name}-memory",
        what=f"memory of agent and {RANKS} ranks: {what}",
        unit="GB",
        samples=tuple(memory_gb),
        reference=Reference(name="limit", samples=(NODE_LIMIT_GB,)),
    )


def _copied(context: Context, staging: Path, fleet: Fleet) -> Row:
    """Measure the work of a newly started agent before the first byte of a copy."""

    def copy_ms() -> float:
        with closing(Disks([staging])) as disks:
            started_s = time.process_time()
            (held,) = disks.holdings(fleet.attempt.run_uid, directory=fleet.attempt.directory)
            used_s = time.process_time() - started_s
            assert held.fragment.node_index == NODE_INDEX
        return 1000 * used_s

    what = f"CPU of an agent before the first byte of a copy, fragment of {RANKS * fleet.num_slices:,} slices"
    return measure("ticket-copy", what, "ms", copy_ms, repeat=context.repeat, limit=COPY_LIMIT_MS)


def _anonymous_bytes() -> int:
    """Return the bytes of this process that belong to no file, so without memory that the agent shares."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("the kernel does not know the memory of this process")
