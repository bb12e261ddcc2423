"""The ways that bytes take on real nodes: memory modes, and ranks of one node that want the same."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
import ray
import torch

import ray_ckpt
from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.actors.client import coordinator
from ray_ckpt.types import RankRestore
from tests.cluster.ranks import RankGroup, Training

pytestmark = pytest.mark.cluster


def train(run: str, storage: str, total: int, options: dict[str, Any]) -> list[float]:
    return Training(run, storage, **options).train(total)


def restores(storage: str, run: str) -> tuple[RankRestore, ...]:
    found: tuple[RankRestore, ...] = ray.get(
        coordinator().status.remote(f"{storage}/{run}"), timeout=30
    ).restores
    return found


@pytest.mark.parametrize(
    ("memory", "overlap"),
    [
        ("double", True),
        pytest.param("single", True, marks=pytest.mark.slow),
        ("stream", True),
        pytest.param("stream", False, marks=pytest.mark.slow),
    ],
)
def test_every_memory_mode_resumes_the_same_run(
    group: RankGroup, storage: str, memory: str, overlap: bool
) -> None:
    run = f"{memory}-{overlap}"
    options = {"memory": memory, "overlap": overlap, "every_steps": 1, "max_block_s": 20.0}
    calm = group.run(train, f"{run}-calm", storage, 8, options)
    group.run(train, run, storage, 5, options)
    rest = group.run(train, run, storage, 8, options)
    assert [losses[5:] for losses in calm] == rest
    tiers = {part.tier for rank in restores(storage, run) for part in rank.parts if "shard" in part.file}
    assert ("memory" in tiers) == (memory != "stream") and tiers <= {"memory", "local"}


def alike(run: str, storage: str, seed: int, total: int) -> tuple[dict[str, torch.Tensor], int]:
    """Restore a model of 8 MB, whole on every rank; save step `total` if there is no checkpoint.

    Returns the model's state and the bytes that this process has read from disks.
    """
    import torch.distributed as dist

    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    options: dict[str, Any] = {"memory": "stream", "replicas": 0, "every_steps": 1}
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ray_ckpt.connect(run=run, storage_path=storage, rank=rank, world_size=world_size, **options)
    ckpt = ray_ckpt.Checkpointer(model=model)
    before = psutil.Process().io_counters().read_bytes
    for step in ckpt.steps(total=total):
        ckpt.step(step)
    read_bytes = psutil.Process().io_counters().read_bytes - before
    ckpt.close()
    return {key: value.clone() for key, value in model.state_dict().items()}, read_bytes


@pytest.mark.slow  # 5 s; tests/actors/test_shared_reads.py is quick
def test_what_several_ranks_of_a_node_want_is_read_once(cluster: LocalCluster, storage: str) -> None:
    node = cluster.nodes["node-c"].node_id
    ranks = RankGroup([node, node])
    try:
        saved, _ = ranks.run(alike, "alike", storage, 1, 1)[0]
        for found, read_bytes in ranks.run(alike, "alike", storage, 2, 1):
            assert all(torch.equal(found[key], value) for key, value in saved.items())
            assert read_bytes < 1 << 20, "the rank has read the model by itself"
        parts = [part for rank in restores(storage, "alike") for part in rank.parts if "shard" in part.file]
        assert {part.tier for part in parts} == {"local"}
    finally:
        ranks.stop()
