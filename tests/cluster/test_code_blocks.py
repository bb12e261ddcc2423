"""The Python blocks of the documents that need Ray, in one story on one cluster."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import ray_ckpt
from jobs.demo.free_ports import free_port
from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.actors import names
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.data import GlobalBatchSampler
from tests.cluster.ranks import Rank
from tests.support.code_blocks import find, run_python

GUIDES, OPERATIONS = "docs/guides", "docs/operations"
TRAINING = (f"{GUIDES}/training-loop.md", "from ray.train.torch import TorchTrainer\nimport ray_ckpt")
RESULT = (f"{GUIDES}/ray-train.md", "open_checkpoint(result.checkpoint)")
CHECK = (f"{GUIDES}/resume.md", "ray_ckpt.check_resume(")
ACTORS = (f"{GUIDES}/launchers.md", "@ray.remote(num_gpus=1)")
PART = (f"{GUIDES}/launchers.md", 'part="critic"')
SAMPLER = (f"{GUIDES}/resume.md", "GlobalBatchSampler(len(dataset)")
LOCK = (f"{GUIDES}/memory.md", "ckpt.lock()")
WHILE_IT_RUNS = (f"{OPERATIONS}/watching.md", "ray_ckpt.exposure(**run)")
FIND_ACTORS = (f"{OPERATIONS}/service.md", 'names.agent_name("<node id>")')
STATUS = (f"{OPERATIONS}/service.md", "coordinator().status")
FINISH = (f"{OPERATIONS}/runbook.md", "finish_run(")
STOP = (f"{OPERATIONS}/service.md", "ray.kill(")
TUNE = (f"{GUIDES}/tune-rllib.md", "tune.Tuner(")  # test_tune.py runs it
RLLIB = (f"{GUIDES}/tune-rllib.md", "build_algo()")  # tests/frameworks/rllib runs it
PARTS = (
    TRAINING,
    RESULT,
    CHECK,
    ACTORS,
    PART,
    SAMPLER,
    LOCK,
    WHILE_IT_RUNS,
    FIND_ACTORS,
    STATUS,
    FINISH,
    STOP,
    TUNE,
    RLLIB,
)
CALL_S = 200.0
AGAIN = {'ray.init(address="auto")': 'ray.init(address="auto", ignore_reinit_error=True)'}

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def build(config: object = None, *, parallel: bool = False) -> Any:
    torch.manual_seed(0)
    head = nn.Linear(4, 4)
    model: nn.Module = nn.Sequential()
    model.head = head
    if parallel:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    if config is None:
        return model, optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    sampler = GlobalBatchSampler(64, global_batch=4, rank=rank, world_size=world_size)
    data: Any = list(torch.ones(64, 4))
    loader = sampler.batches(DataLoader(data, batch_sampler=sampler))
    return model, optimizer, scheduler, loader


def train_step(model: Any, optimizer: Any, *more: Any) -> float:
    *_, batch = (None, *more) if more else (torch.ones(2, 4),)
    loss = getattr(model, "module", model).head(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def run_part(place: tuple[str, str], given: Mapping[str, Any], replace: Mapping[str, str]) -> dict[str, Any]:
    return run_python(find(*place), given, replace)


def with_sampler_and_lock(storage: str) -> None:
    ray_ckpt.connect(run="sampler", storage_path=storage)
    model, optimizer = build()
    found = run_part(
        SAMPLER,
        {
            "DataLoader": DataLoader,
            "dataset": list(torch.ones(64, 4)),
            "rank": 0,
            "world_size": 1,
            "model": model,
            "optimizer": optimizer,
            "train_step": train_step,
            "ray_ckpt": ray_ckpt,
        },
        {"total=10_000": "total=10", "num_workers=4": "num_workers=0"},
    )
    run_part(LOCK, {"ckpt": found["ckpt"], "torch": torch, "model": model}, {})
    found["ckpt"].close()


def with_a_part(storage: str, part: str) -> None:
    model, optimizer = build()
    given = {"rank": 0, "world_size": 1, "model": model, "optimizer": optimizer, "ray_ckpt": ray_ckpt}
    sizes = {'{"actor": 8, "critic": 2}': '{"actor": 1, "critic": 1}', "/shared/runs": storage}
    if part == "actor":  # as the comment in the block requires
        sizes |= {
            'part="critic"': 'part="actor"',
            "critic=model, critic_optimizer=": "actor=model, actor_opt=",
        }
    found = run_part(PART, given, sizes)
    assert list(found["ckpt"].steps(total=1)) == [1]
    found["ckpt"].close()


def with_actors(storage: str, cluster: LocalCluster) -> list[Any]:
    given = {"ray": ray, "dist": dist, "ray_ckpt": ray_ckpt, "build": build, "train_step": train_step}
    here = {"num_gpus=1": "num_cpus=1", "nccl": "gloo", "/shared/runs": storage}
    workers = [run_part(ACTORS, given, here)["Worker"].remote() for _ in range(2)]
    address = f"tcp://127.0.0.1:{free_port()}"
    ray.get([w.train.remote(k, 2, address) for k, w in enumerate(workers)], timeout=CALL_S)
    return workers


def test_the_blocks_that_need_ray_run(no_cluster: None, tmp_path: Path) -> None:
    storage, other = str(tmp_path / "trained"), str(tmp_path / "connected")
    with LocalCluster(tmp_path / "nodes", ["node-a", "node-b"], cpus=2) as cluster:
        given = {"build": partial(build, parallel=True), "train_step": train_step}
        here = {
            '{"steps": 10_000}': '{"steps": 200}',
            "num_workers=8, use_gpu=True": "num_workers=2",
            "keep_last=3": "keep_last=3, remote_every=1",
            "/shared/runs": storage,
            ', staging="/mnt/nvme/ray_ckpt"': "",  # each node of this machine has its own
            "\nTorchTrainer(": "\ntrainer = TorchTrainer(",  # the next block ends it with fit()
            "\n).fit()": "\n)",
        }
        trained = run_part(TRAINING, given, here)
        run_part(RESULT, {"trainer": trained["trainer"]}, {})
        newest = Catalog(Path(storage) / "gpt").newest()
        assert newest is not None and newest.info.step == 200
        given = {"train_loop": trained["train_loop"], "ray_ckpt": ray_ckpt, "ray": ray}
        run_part(CHECK, given, {"/shared/runs": storage})

        workers = with_actors(other, cluster)
        run_part(WHILE_IT_RUNS, {}, {**AGAIN, "/shared/runs": other, "step=3000": "step=1000"})
        node_id = cluster.nodes["node-a"].node_id
        found = run_part(FIND_ACTORS, {}, {**AGAIN, "<node id>": node_id})
        assert found["names"] is names
        status = run_part(STATUS, {}, {**AGAIN, "/shared/runs": other})["status"]
        assert status.copies_missing == 0
        run_part(FINISH, {}, {**AGAIN, "/shared/runs": other})
        for worker in workers:
            ray.kill(worker)

        ranks = [ray.remote(Rank).options(num_cpus=0).remote() for _ in range(2)]
        ray.get(ranks[0].run.remote(with_sampler_and_lock, other), timeout=CALL_S)
        calls = [r.run.remote(with_a_part, other, p) for r, p in zip(ranks, ("actor", "critic"), strict=True)]
        ray.get(calls, timeout=CALL_S)

        run_part(STOP, {}, AGAIN)
        left = {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}
        assert names.COORDINATOR not in left
