"""Another number of ranks continues the same training.

The user sets the number, or Ray Train has lost or found a node. All ranks do what only one of them needs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import ray_ckpt
from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.actors.client import coordinator
from ray_ckpt.actors.messages import RunStatus
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.format.manifest import decode_fragment
from ray_ckpt.types import Level, ManifestRow
from tests.cluster import elastic
from tests.cluster.program import program
from tests.cluster.ranks import RankGroup
from tests.cluster.regression import (
    Regression,
    State,
    assert_same_bits,
    assert_same_training,
    batch_of,
    reference,
    seen_after,
)
from tests.fault.rig import flip

pytestmark = pytest.mark.cluster
WAIT_S = 120.0  # Ray Train looks for other nodes every 20 s, and gives a group up to a minute to start


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The state that a rank restored, the state that it used, and its state at each save, unsharded."""

    restored_step: int
    restored: State
    tiers: tuple[str, ...]
    shares: list[list[int]]
    saved: dict[int, State]


def go_on(run: str, storage: str, total: int, options: dict[str, Any]) -> RankReport:
    """Restore, train up to step `total`, which is saved, and wait until it has its copies."""
    training = Regression()
    rank, world_size = training.rank, training.world_size
    ray_ckpt.connect(run=run, storage_path=storage, rank=rank, world_size=world_size, **options)
    ckpt = ray_ckpt.Checkpointer(model=training.model, optimizer=training.optimizer, batches=training.batches)
    info = ckpt.restore()
    first = info.step if info else 0
    restored, shares, saved = training.full_state(), [], {}
    for step, share in zip(range(first + 1, total + 1), training.batches, strict=False):
        training.step(share)
        shares.append(list(share))
        if ckpt.due(step):
            saved[step] = training.full_state()
        ckpt.step(step)
    ckpt.wait("replicated")
    ckpt.close()
    tiers = tuple(info.bytes_by_tier()) if info else ()
    return RankReport(restored_step=first, restored=restored, tiers=tiers, shares=shares, saved=saved)


def trained(
    cluster: LocalCluster, nodes: Sequence[str], storage: str, run: str, total: int, **options: Any
) -> list[RankReport]:
    """Train a new group, rank k on the k-th of these nodes; return the result of each rank."""
    group = RankGroup([cluster.nodes[name].node_id for name in nodes])
    try:
        return group.run(go_on, run, storage, total, options)
    finally:
        group.stop()


def together(shares: Sequence[Sequence[list[int]]]) -> list[list[int]]:
    """Return the samples of each step, those of the first rank first."""
    return [list(itertools.chain.from_iterable(step)) for step in zip(*shares, strict=True)]


@pytest.mark.slow
def test_four_two_and_three_ranks_train_as_one_process_does(cluster: LocalCluster, storage: str) -> None:
    """Each group goes on bit for bit from what the one before had, and where it was in the data."""
    options = {"every_steps": 4, "remote_every": 1000, "max_block_s": 20.0}
    before: State = {}
    done = 0
    for total, names in ((8, "aabb"), (16, "bc"), (24, "abc")):
        results = trained(cluster, [f"node-{n}" for n in names], storage, "sizes", total, **options)
        assert [rank.restored_step for rank in results] == [done] * len(names)
        for rank in results:
            assert "remote" not in rank.tiers
            if done:
                assert_same_bits(rank.restored, before)
                assert_same_training(rank.restored, reference(done))
        assert together([rank.shares for rank in results]) == [
            batch_of(s) for s in range(done + 1, total + 1)
        ]
        before, done = results[0].saved[total], total
    assert_same_training(before, reference(24))
    assert before["model.seen"].tolist() == seen_after(24)


def status_of(storage: str, run: str) -> RunStatus:
    status: RunStatus = ray.get(coordinator().status.remote(f"{storage}/{run}"), timeout=30)
    return status


@pytest.mark.slow
def test_a_bad_slice_that_one_rank_needs_takes_all_ranks_to_the_older_step(
    cluster: LocalCluster, storage: str
) -> None:
    # A ring is never read from, so that the copies on disks are all there are.
    options = {"every_steps": 4, "remote_every": 1000, "max_block_s": 20.0, "memory": "stream"}
    nodes = ["node-a", "node-b"]
    whole = trained(cluster, nodes, storage, "damaged", 8, **options)
    status = status_of(storage, "damaged")
    assert status.newest is not None and status.newest.step == 8
    folders = [n.staging / status.run_uid / status.newest.directory for n in cluster.nodes.values()]
    copies = [folder for folder in folders if folder.is_dir()]
    row = only_needed_by(copies[0], rank=1)
    for folder in copies:
        flip(folder / row.file, row.byte_offset + row.nbytes // 2)
    results = trained(cluster, nodes, storage, "damaged", 12, **options)
    assert [rank.restored_step for rank in results] == [4, 4], (copies, [rank.tiers for rank in results])
    for rank in results:
        assert_same_bits(rank.restored, whole[0].saved[4])
    assert together([rank.shares for rank in results]) == [batch_of(step) for step in range(5, 13)]
    assert_same_training(results[0].saved[12], reference(12))
    texts = Catalog(f"{storage}/damaged").events()["text"].to_pylist()
    assert any("restored step 4" in text for text in texts), texts


def only_needed_by(folder: Path, *, rank: int) -> ManifestRow:
    """Return a slice in a checkpoint's folder that only `rank` reads if as many ranks restore."""
    fragments = [decode_fragment(path.read_bytes()) for path in folder.glob("manifest-*")]
    rows = [row for fragment in fragments for row in fragment.rows if row.slice and row.nbytes]
    mine = [row for row in rows if row.file.startswith(f"shard-{rank:05d}")]
    row = next(row for row in mine if row.slice and row.slice.key == "model.inner.weight")
    assert row.slice is not None
    others = [other.slice for other in rows if other.slice and other.file != row.file]
    same = [other for other in others if other.key == row.slice.key]
    assert sum(other.shape[0] for other in same) + row.slice.shape[0] == row.slice.global_shape[0]
    return row


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, f"not within {WAIT_S:.0f} s: {what}"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_an_elastic_group_shrinks_with_a_lost_node_and_grows_when_it_is_back(
    no_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A group that Ray Train starts before it has noticed which node is gone is given up soon.
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "10")
    storage, folder = tmp_path / "storage", tmp_path / "results"
    folder.mkdir()
    nodes = ["node-a", "node-b", "node-c", "node-d"]

    def entries() -> list[elastic.Entry]:
        return elastic.read(folder)

    def steps_since(time_s: float, world_size: int) -> int:
        """Return the number of steps of groups of that size since then."""
        return len({e.step for e in entries() if e.time_s > time_s and e.world_size == world_size} - {0})

    with LocalCluster(tmp_path / "staging", nodes) as cluster:
        log = tmp_path / "program.log"
        with program(cluster, log, "tests.cluster.elastic", str(storage), str(folder)) as process:

            def going(world_size: int, since_s: float, what: str) -> None:
                wait_for(lambda: process.poll() is not None or steps_since(since_s, world_size) > 12, what)
                assert process.poll() is None, log.read_text()[-3000:]

            def replicated() -> int:
                found = Catalog(storage / elastic.RUN).newest(Level.REPLICATED)
                return found.info.step if found else 0

            going(4, 0.0, "four workers train")
            floor, lost_s = replicated(), time.time()
            cluster.kill("node-d", wipe=True)
            going(3, lost_s, "three workers train")
            floor_again, back_s = replicated(), time.time()
            cluster.add("node-d")
            going(4, back_s, "four workers train again")
            last = max(entry.step for entry in entries())
            total = elastic.EVERY_STEPS * (last // elastic.EVERY_STEPS + 10)
            elastic.set_total(folder, total)
            assert process.wait(WAIT_S) == 0, log.read_text()[-3000:]

    groups = groups_of(entries())
    repeated = sum(len(group.steps) for group in groups) - total
    print([(group.world_size, group.restored, sorted(group.tiers)) for group in groups], end=" ")
    print(f"{total} steps, {repeated} of them again")
    sizes = [group.world_size for group in groups]
    assert sizes[0] == 4 and sizes[-1] == 4 and 3 in sizes
    assert groups[sizes.index(3)].restored >= floor > 0 and groups[-1].restored >= floor_again > floor
    assert not any("remote" in group.tiers for group in groups)
    for step in range(1, total + 1):
        done = [group.steps[step] for group in groups if step in group.steps]
        assert batch_of(step) == done[-1], f"what step {step} of the run has used"
        assert all(set(used) <= set(batch_of(step)) for used in done), "a rank may have died in it"
    checkpoint = Catalog(storage / elastic.RUN).newest(Level.DURABLE)
    assert checkpoint is not None and checkpoint.info.step == total
    state = ray_ckpt.open(str(storage / elastic.RUN)).load(step=total)
    assert state["model"]["seen"].tolist() == seen_after(total), "no sample was lost or doubled"
    expected = reference(total)
    for name, tensor in state["model"].items():
        torch.testing.assert_close(tensor, expected[f"model.{name}"], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_group_that_grows_repeats_no_steps_with_salvage(no_cluster: None, tmp_path: Path) -> None:
    """No save is ever due; the ranks are asked for their last step before their group is replaced."""
    folder = tmp_path / "results"
    folder.mkdir()

    def step() -> int:
        path = folder / "step"
        return int(path.read_text() or 0) if path.exists() else 0

    def log() -> str:
        return (folder / "log").read_text() if (folder / "log").exists() else ""

    with LocalCluster(tmp_path / "staging", ["node-a", "node-b"]) as cluster:
        out = tmp_path / "program.log"
        arguments = str(tmp_path / "storage"), str(folder)
        with program(cluster, out, "tests.cluster.elastic_survivors", *arguments) as process:
            wait_for(lambda: step() > 20, "two workers train")
            before = step()
            cluster.add("node-c")
            wait_for(lambda: "of 3" in log(), "three workers train")
            (folder / "stop").touch()
            assert process.wait(WAIT_S) == 0, out.read_text()[-3000:]
    restored = {line.removesuffix(" of 3") for line in log().splitlines() if line.endswith(" of 3")}
    assert len(restored) == 1 and int(restored.pop()) > before


@dataclass(slots=True)
class Group:
    """The events of all ranks of a session."""

    world_size: int
    restored: int = 0
    tiers: set[str] = field(default_factory=set)
    steps: dict[int, list[int]] = field(default_factory=dict)  # the samples of all ranks, by rank


def groups_of(entries: Sequence[elastic.Entry]) -> list[Group]:
    groups: dict[int, Group] = {}
    for entry in sorted(entries, key=lambda entry: (entry.session, entry.rank, entry.step)):
        group = groups.setdefault(entry.session, Group(entry.world_size))
        if entry.kind == "restored":
            group.restored = entry.step
            group.tiers.update(entry.tiers)
        else:
            group.steps.setdefault(entry.step, []).extend(entry.samples)
    return list(groups.values())
