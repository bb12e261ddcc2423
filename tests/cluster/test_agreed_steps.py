"""Saves by time and in an emergency: the coordinator names a step, and all ranks save after it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.actors.client import coordinator
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.preemption.notice import Notice
from ray_ckpt.types import CheckpointInfo
from tests.cluster.ranks import RankGroup

pytestmark = pytest.mark.cluster
STEP_S = 0.005
SKEW = 1.03  # each rank is slower than the one before by this factor, and nothing holds them together


def idle_along(run: str, storage: str, seconds: float, options: dict[str, Any]) -> dict[str, Any]:
    """Make steps of 5 ms without communication between ranks; return the steps that this rank saved."""
    import torch
    import torch.distributed as dist

    import ray_ckpt

    rank = dist.get_rank()
    ray_ckpt.connect(run=run, storage_path=storage, rank=rank, world_size=dist.get_world_size(), **options)
    state: dict[str, Any] = {"x": torch.zeros(10_000), "step": 0}
    ckpt = ray_ckpt.Checkpointer(state=state)
    end_s, saved = None, []
    for step in ckpt.steps(total=1_000_000):
        state["x"] += 1
        state["step"] = step
        before = ckpt.stats.saved
        ckpt.step(step)
        saved += [step] if ckpt.stats.saved > before else []
        end_s = end_s or time.monotonic() + seconds
        if time.monotonic() > end_s:
            break
        time.sleep(STEP_S * SKEW**rank)
    stats = ckpt.stats
    ckpt.flush()
    return {"saved": saved, "step": step, "stats": (stats.saved, stats.skipped, stats.dropped)}


def read_back(run: str, storage: str, options: dict[str, Any]) -> tuple[int, float, int]:
    """Return the restored step, and the step in the state."""
    import torch
    import torch.distributed as dist

    import ray_ckpt

    ray_ckpt.connect(
        run=run, storage_path=storage, rank=dist.get_rank(), world_size=dist.get_world_size(), **options
    )
    state: dict[str, Any] = {"x": torch.zeros(10_000), "step": 0}
    ckpt = ray_ckpt.Checkpointer(state=state)
    info = ckpt.restore()
    assert info is not None
    ckpt.close()
    return info.step, float(state["x"].mean()), state["step"]


def commits(storage: str, run: str) -> list[CheckpointInfo]:
    return list(Catalog(f"{storage}/{run}").list(all=True))


@pytest.mark.slow
def test_every_save_by_time_of_skewed_ranks_is_complete_or_dropped(
    spare_group: RankGroup, storage: str
) -> None:
    options = {"every_s": 1.0, "attempt_timeout_s": 10.0, "replicas": 1}
    ranks = spare_group.run(idle_along, "skewed", storage, 6.0, options)
    committed = [c.step for c in commits(storage, "skewed")]
    together = set(ranks[0]["saved"]) & set(ranks[1]["saved"])
    assert len(committed) >= 2, (committed, ranks)
    assert set(committed) <= together, "a commit has a part of every rank"
    assert committed == sorted(committed)
    restored = spare_group.run(read_back, "skewed", storage, options)
    assert {step for step, _, _ in restored} == {committed[-1]}
    assert all(step == mean == at for step, mean, at in restored), "no checkpoint mixes steps"


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
def announce(cluster_node: str, after_s: float, left_s: float) -> None:
    time.sleep(after_s)
    notice = Notice(source="test", text="maintenance", deadline_s=time.time() + left_s)
    ray.get(coordinator().node_preempted.remote(cluster_node, notice))


@pytest.fixture
def doomed(no_cluster: None, tmp_path: Path) -> Iterator[LocalCluster]:
    """A separate cluster, since a node with a notice counts as leaving for a while afterwards."""
    with LocalCluster(tmp_path / "staging", ["node-a", "node-b", "node-c"]) as cluster:
        yield cluster


@pytest.mark.slow
def test_ranks_save_again_and_again_once_a_node_is_about_to_go(doomed: LocalCluster, storage: str) -> None:
    cluster, leaving = doomed, doomed.nodes["node-a"].node_id
    spare_group = RankGroup([leaving, cluster.nodes["node-b"].node_id])
    options = {"every_steps": 1_000_000, "attempt_timeout_s": 10.0, "replicas": 1}
    notice = announce.remote(leaving, 8.0, 60.0)
    spare_group.run(idle_along, "leaving", storage, 18.0, options)
    ray.get(notice)
    found = commits(storage, "leaving")
    assert len(found) >= 2, "an emergency save, and further ones"
    status = ray.get(coordinator().status.remote(f"{storage}/leaving"), timeout=30)
    stay = {node.node_id for name, node in cluster.nodes.items() if name != "node-a"}
    newest = found[-1].id.attempt
    assert all(set(nodes) & stay for nodes in status.holders[newest].values()), "nothing is on it alone"
    for name in ("node-b", "node-c"):  # groups that open while it leaves; of four nodes two get copies
        alone = RankGroup([cluster.nodes[name].node_id])
        alone.run(idle_along, f"on-{name}", storage, 0.1, {**options, "replicas": 2})
        alone.stop()
        (node,) = ray.get(coordinator().status.remote(f"{storage}/on-{name}"), timeout=30).nodes
        assert len(node.holders) == 2 and leaving not in node.holders


@pytest.mark.slow
def test_a_rank_that_gets_sigterm_has_all_ranks_save(doomed: LocalCluster, storage: str) -> None:
    """No save was due by the cadence; the other rank lives on the other node."""
    spare_group = RankGroup([doomed.nodes["node-a"].node_id, doomed.nodes["node-b"].node_id])
    pids = spare_group.run(os.getpid)
    options = {"every_steps": 1_000_000, "attempt_timeout_s": 10.0, "replicas": 1}
    calls = [
        actor.run.remote(idle_along, "announced", storage, 15.0, options) for actor in spare_group.actors
    ]
    time.sleep(8)
    before = len(commits(storage, "announced"))
    os.kill(pids[1], signal.SIGTERM)
    results = ray.get(calls, timeout=60)
    assert before == 0 and len(commits(storage, "announced")) >= 2
    assert all(result["stats"][0] >= 2 for result in results), "both ranks, and the loop went on"
