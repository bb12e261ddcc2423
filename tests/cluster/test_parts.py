"""Two worker groups of one run, an actor and a critic, that commit a step together."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray
import torch

import ray_ckpt
from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.actors.client import coordinator
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.errors import ConfigError
from tests.cluster.ranks import RankGroup

pytestmark = pytest.mark.cluster
PARTS = {"actor": 2, "critic": 1}


def train(run: str, storage: str, part: str, parts: dict[str, int], total: int) -> dict[str, Any]:
    """Train this part's sharded model; return the restored state, and sums of the final state."""
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    rank, world_size = dist.get_rank(), dist.get_world_size()
    ray_ckpt.connect(
        run=run,
        storage_path=storage,
        rank=rank,
        world_size=world_size,
        part=part,
        parts=parts,
        every_steps=3,
        replicas=1,
    )
    torch.manual_seed(len(part))
    model = nn.Linear(6, 5)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    count = {"steps": 0}
    items: dict[str, Any] = {part: model, f"{part}_optimizer": optimizer, f"{part}_count": count}
    ckpt = ray_ckpt.Checkpointer(**items)
    steps = ckpt.steps(total=total)
    restored = count["steps"]
    torch.manual_seed(100 * rank + len(part) + restored)
    for step in steps:
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        count["steps"] += 1
        ckpt.step(step)
    ckpt.close()
    whole = {name: p.full_tensor().detach() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    return {"restored": restored, "count": count["steps"], "model": whole}


def run_parts(groups: dict[str, RankGroup], run: str, storage: str, total: int) -> dict[str, list[Any]]:
    parts = {name: len(group.actors) for name, group in groups.items()}
    with ThreadPoolExecutor(len(groups)) as pool:
        requested = {
            name: pool.submit(group.run, train, run, storage, name, parts, total)
            for name, group in groups.items()
        }
        return {name: answer.result() for name, answer in requested.items()}


def groups_on(cluster: LocalCluster, nodes: dict[str, Sequence[str]]) -> dict[str, RankGroup]:
    return {part: RankGroup([cluster.nodes[n].node_id for n in names]) for part, names in nodes.items()}


@pytest.mark.slow
def test_an_actor_and_a_critic_commit_and_come_back_together(cluster: LocalCluster, storage: str) -> None:
    groups = groups_on(cluster, {"actor": ["node-a", "node-b"], "critic": ["node-b"]})
    first = run_parts(groups, "rl", storage, 6)
    assert {r["restored"] for found in first.values() for r in found} == {0}
    again = run_parts(groups, "rl", storage, 9)
    assert {r["restored"] for found in again.values() for r in found} == {6}
    assert {r["count"] for found in again.values() for r in found} == {9}
    checkpoints = Catalog(f"{storage}/rl").list(all=True)
    assert [c.step for c in checkpoints] == [3, 6, 9] and {c.world_size for c in checkpoints} == {3}
    for group in groups.values():
        group.stop()

    others = groups_on(cluster, {"actor": ["node-c"], "critic": ["node-a", "node-c"]})
    resized = run_parts(others, "rl", storage, 9)  # nothing is left to do: what is restored stays
    assert {r["restored"] for found in resized.values() for r in found} == {9}
    for part, found in resized.items():
        for name, tensor in found[0]["model"].items():
            assert torch.equal(tensor, again[part][0]["model"][name]), (part, name)
    for group in others.values():
        group.stop()

    ray.get(coordinator().finish.remote(f"{storage}/rl", 60.0), timeout=90)
    opened = ray_ckpt.open(f"{storage}/rl").load()
    assert opened["actor"]["weight"].shape == opened["critic"]["weight"].shape == (5, 6)
    assert opened["critic_count"] == {"steps": 9}


def test_a_part_that_is_unknown_or_has_another_size_is_an_error(storage: str) -> None:
    with pytest.raises(ConfigError, match="actor"):
        ray_ckpt.connect(run="rl", storage_path=storage, part="actor", parts={"critic": 1})
    with pytest.raises(ConfigError, match="2 ranks"):
        ray_ckpt.connect(
            run="rl", storage_path=storage, world_size=2, part="actor", parts=PARTS | {"actor": 1}
        )
