"""Other models, other dtypes, other world sizes: what users bring besides the example."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.types import Level
from tests.cluster.ranks import RankGroup, Training

pytestmark = pytest.mark.cluster


class Counter:
    """An object of a user's own, as a sampler or an EMA would be."""

    def __init__(self, start: int) -> None:
        self.count = start
        self.history: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        import torch

        return {"count": self.count, "history": tuple(self.history), "mask": torch.tensor([self.count])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.history = state["count"], list(state["history"])
        assert state["mask"].tolist() == [self.count]


def zoo(run: str, storage: str, restores: bool) -> dict[str, Any]:
    """Train a DDP model with tied weights, odd tensors, two optimizers, an object; return the live state."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import ray_ckpt

    rank = dist.get_rank()
    ray_ckpt.connect(run=run, storage_path=storage, rank=rank, world_size=dist.get_world_size())
    torch.manual_seed(0 if not restores else 99)
    inner = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7, bias=False))
    inner[2].weight = inner[0].weight
    model = nn.parallel.DistributedDataParallel(torch.compile(inner, backend="eager"))
    head = nn.Linear(6, 2).to(torch.bfloat16)
    one = torch.optim.AdamW(inner.parameters(), lr=0.05)
    two = torch.optim.SGD(head.parameters(), lr=0.05, momentum=0.9)
    odd = {
        "bool": torch.tensor([True, False]) if not restores else torch.tensor([False, False]),
        "complex": torch.full((2, 3), 1 + 2j if not restores else 0j, dtype=torch.complex64),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.5 + rank if not restores else 0.0),
        "strided": torch.arange(12.0).view(3, 4).t() if not restores else torch.zeros(3, 4).t(),
        "int8": torch.full((5,), -3 if not restores else 0, dtype=torch.int8),
        "nested": [{"a": 1, "pair": (1, 2.5)}, None, b"bytes"]
        if not restores
        else [{"a": 0, "pair": ()}, 1, b""],
    }
    counter = Counter(10 * rank)
    ckpt = ray_ckpt.Checkpointer(
        model=model, head=head, optimizer=one, head_optimizer=two, odd=odd, counter=counter
    )
    for step in ckpt.steps(total=3):
        loss = (
            model(torch.tensor([1, 2, 3])).square().mean()
            + head(torch.ones(6).bfloat16()).float().square().mean()
        )
        loss.backward()
        one.step()
        two.step()
        one.zero_grad()
        two.zero_grad()
        counter.count += 1
        counter.history.append(float(loss))
        ckpt.step(step, metrics={"loss": loss, "note": "not a number"})
    ckpt.close()
    tensors = {f"model.{k}": v for k, v in inner.state_dict().items()}
    tensors |= {f"head.{k}": v for k, v in head.state_dict().items()}
    tensors |= {f"odd.{k}": v for k, v in odd.items() if isinstance(v, torch.Tensor)}
    for name, optimizer in (("one", one), ("two", two)):
        for index, state in enumerate(optimizer.state.values()):
            tensors |= {f"{name}.{index}.{k}": v for k, v in state.items() if isinstance(v, torch.Tensor)}
    seen: dict[str, Any] = {k: (str(v.dtype), v.tolist()) for k, v in tensors.items()}
    return {
        **seen,
        "nested": odd["nested"],
        "count": counter.count,
        "tied": inner[2].weight is inner[0].weight,
    }


def test_a_zoo_of_state_comes_back_as_it_was(group: RankGroup, storage: str) -> None:
    saved = group.run(zoo, "zoo", storage, False)
    restored = group.run(zoo, "zoo", storage, True)
    assert restored == saved
    assert [r["count"] for r in restored] == [3, 13], "each rank has its own"
    assert [r["odd.scalar"][1] for r in restored] == [3.5, 4.5]


def train(run: str, storage: str, total: int) -> list[float]:
    return Training(run, storage, every_steps=2).train(total)


def weights(run: str, storage: str) -> dict[str, Any]:
    training = Training(run, storage)
    info = training.ckpt.restore()
    training.ckpt.close()
    state = {
        k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in training.model.state_dict().items()
    }
    moments = [
        s["exp_avg"].full_tensor().tolist() for s in training.optimizer.state.values() if "exp_avg" in s
    ]
    shared = {k: v.tolist() for k, v in state.items() if "running" not in k and "tracked" not in k}
    return {"step": info.step if info else None, "moments": moments, **shared}


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_another_world_size_reshards(
    group: RankGroup, cluster: LocalCluster, storage: str, world_size: int
) -> None:
    group.run(train, "shape", storage, 4)
    expected = group.run(weights, "shape", storage)[0]
    nodes = [cluster.nodes[f"node-{name}"].node_id for name in "abc"][:world_size]
    other = RankGroup(nodes)
    results = other.run(weights, "shape", storage)
    other.stop()
    assert all(result == expected for result in results) and expected["step"] == 4


def alone(run: str, storage: str, total: int) -> int:
    """Train in one process that holds everything."""
    import torch

    import ray_ckpt

    ray_ckpt.connect(run=run, storage_path=storage)
    model = torch.nn.Linear(4, 4)
    ckpt = ray_ckpt.Checkpointer(model=model)
    done = 0
    for step in ckpt.steps(total=total):
        done += 1
        ckpt.step(step)
        if step == 5:
            break
    ckpt.wait("durable")
    ckpt.close()
    return done


@pytest.mark.slow  # 6 s; test_readme.py has one process alone
def test_one_process_alone_and_a_break_that_saves_the_last_step(cluster: LocalCluster, storage: str) -> None:
    run = ray.remote(alone).options(num_cpus=0)
    assert ray.get(run.remote("alone", storage, 9), timeout=60) == 5
    newest = Catalog(f"{storage}/alone").newest(Level.DURABLE)
    assert newest is not None and newest.info.step == 5
    assert ray.get(run.remote("alone", storage, 9), timeout=60) == 4
