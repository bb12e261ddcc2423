"""Training whose ranks may be killed one by one: each finished step of each rank is a line of a journal.

A step is a function of the state before it, so a run in which ranks died has the lines of a calm run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
import xxhash
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ray_ckpt
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.errors import ConfigError
from ray_ckpt.train import CheckpointCallback
from tests.cluster.ranks import CALL_S
from tests.fault.ranks import FaultRank
from tests.fault.rig import wait_for

STEP_S = 0.3  # the longest mean of a step on a busy machine
WIDTH = 32
WIDE = 512  # of a model whose shards are too large to be sent after each step


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A run of `kind`: "ddp", "hsdp" (two shards, replicated) or "fsdp"."""

    run: str
    storage: str
    journal: str
    total: int
    kind: str = "ddp"
    pace_s: float = 0.03  # of each step, before its forward pass
    options: dict[str, Any] = field(default_factory=dict)
    by_ray_train: bool = False
    dies_at: tuple[int, int] | None = None  # a rank, and the step that it does not report to its node

    @property
    def all_options(self) -> dict[str, Any]:
        return {"salvage": True, "every_steps": 1_000_000, **self.options}


class Training:
    """A model with all kinds of state: buffers, dropout, a scheduler, an average, and data of each rank."""

    def __init__(self, task: Task) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if not task.by_ray_train:
            ray_ckpt.connect(
                run=task.run,
                storage_path=task.storage,
                rank=self.rank,
                world_size=self.world_size,
                **task.all_options,
            )
        torch.manual_seed(0)
        width = WIDTH if task.kind == "ddp" else WIDE
        net = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, width)
        )
        self.model = _parallel(net, task.kind)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.extra: dict[str, Any] = {"ema": torch.zeros(4), "count": 0}
        torch.manual_seed(self.rank)
        random.seed(self.rank)
        self.ckpt = ray_ckpt.Checkpointer(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, extra=self.extra
        )

    def step(self) -> float:
        batch = torch.randn(4, 8) + random.random()
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.extra["ema"].mul_(0.9).add_(loss.detach())
        self.extra["count"] += 1
        return float(loss.detach())

    def digest(self) -> str:
        """Digest of everything of this rank that a restore must bring back."""
        state = [
            _plain(self.model.state_dict()),
            _plain(self.optimizer.state_dict()),
            self.scheduler.state_dict(),
            _plain(self.extra),
            _plain(torch.get_rng_state()),
            random.getstate(),
        ]
        return " ".join(str(xxhash.xxh3_64_hexdigest(repr(part).encode()))[:8] for part in state)


def _parallel(net: nn.Sequential, kind: str) -> Any:
    match kind:
        case "ddp":
            # DDP would sum its gradients in another order after the first step of a process.
            return nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
        case "hsdp":
            shape = dist.get_world_size() // 2, 2
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        case _:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (net[0], net[3]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def train(task: Task) -> int:
    """Restore, and train up to the last step; each finished step of a rank is a line of its journal."""
    training, step = Training(task), 0
    with Path(f"{task.journal}-{training.rank}").open("a") as journal:
        for step in training.ckpt.steps(total=task.total):
            time.sleep(task.pace_s)
            loss = training.step()
            if task.dies_at == (training.rank, step):
                os.kill(os.getpid(), signal.SIGKILL)
            training.ckpt.step(step)
            line = {"step": step, "loss": loss.hex(), "state": training.digest()}
            journal.write(json.dumps(line) + "\n")
            journal.flush()
    training.ckpt.close()
    return step


def lines(task: Task, rank: int) -> list[dict[str, Any]]:
    """Return the finished steps of a rank, in order of time; a last line may be cut off."""
    path = Path(f"{task.journal}-{rank}")
    texts = path.read_text().splitlines() if path.exists() else []
    return [json.loads(text) for text in texts if text.endswith("}")]


class Trainers:
    """A group of ranks on these nodes that trains a task."""

    def __init__(self, nodes: Sequence[str], task: Task) -> None:
        self._folder = TemporaryDirectory()  # meshes meet at the file too, when they are made
        actor = ray.remote(FaultRank).options
        where = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
        self._actors = [actor(num_cpus=0, scheduling_strategy=each).remote() for each in where]
        meeting = f"{self._folder.name}/meet"
        joins = [rank.join.remote(k, len(nodes), meeting) for k, rank in enumerate(self._actors)]
        self.pids: list[int] = ray.get(joins, timeout=CALL_S)
        self.calls = [rank.run.remote(train, task) for rank in self._actors]
        self._steps_s = task.total * (task.pace_s + STEP_S)

    def wait(self) -> list[Any]:
        """Wait until all ranks have ended; return their last steps, or the errors of those that failed."""
        ray.wait(self.calls, num_returns=len(self.calls), timeout=CALL_S + self._steps_s)
        found: list[Any] = []
        for call in self.calls:
            try:
                found.append(ray.get(call, timeout=0))
            except Exception as error:
                found.append(error)
        return found

    def stop(self) -> None:
        for rank in self._actors:
            ray.kill(rank)
        self._folder.cleanup()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        tensor = value.to_local() if hasattr(value, "to_local") else value
        return str(tensor.dtype), tuple(tensor.shape), tensor.detach().contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return [(str(key), _plain(value[key])) for key in sorted(value, key=str)]
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
def fit(task: Task, world_size: int) -> None:
    """Train a task by Ray Train, which starts a group again after a failure."""
    callback = CheckpointCallback(storage_path=task.storage, **task.all_options)
    TorchTrainer(
        lambda config: {"step": train(config["task"])},
        train_loop_config={"task": replace(task, by_ray_train=True)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=world_size),
        run_config=ray.train.RunConfig(
            name=task.run,
            storage_path=task.storage,
            callbacks=[callback],
            failure_config=ray.train.FailureConfig(max_failures=2),
        ),
    ).fit()


def saved_steps(task: Task) -> list[int]:
    """Return the steps of the run's commits; none before the run has begun."""
    try:
        return sorted(c.step for c in Catalog(Path(task.storage) / task.run).list(all=True))
    except ConfigError:
        return []


def last_step(task: Task, world_size: int) -> int:
    """Return the last step that any rank has finished."""
    return max((found[-1]["step"] for k in range(world_size) if (found := lines(task, k))), default=0)


def wait_for_step(task: Task, rank: int, step: int) -> None:
    wait_for(lambda: (lines(task, rank)[-1:] or [{"step": 0}])[0]["step"] >= step, what=f"step {step}")


def check_lines(task: Task, rank: int, calm: dict[int, dict[str, Any]]) -> None:
    """Compare all steps of a rank, also those that it did twice, with the same steps of a calm run.

    A rank may be killed after it has told its node that a step is finished, and before it writes the line. If
    the others then save that step, the rank has no line of it.
    """
    found = lines(task, rank)
    without_line = set(calm) - {line["step"] for line in found}
    assert without_line <= set(saved_steps(task)), f"rank {rank} left out steps {sorted(without_line)}"
    for line in found:
        assert line == calm[line["step"]], f"rank {rank}"
