"""Ranks that run torch.distributed in plain Ray actors, as a test can steer them, and a small model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

CALL_S = 120.0


class Rank:
    """One rank: runs the functions that a test sends it."""

    def join(self, rank: int, world_size: int, meeting: str) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


class RankGroup:
    """`len(nodes)` ranks, rank k on `nodes[k]`."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self.actors = [
            ray.remote(Rank)
            .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
            .remote()
            for node in nodes
        ]
        self._folder = TemporaryDirectory()  # a file: another process may take a port before rank 0 listens
        meeting = f"{self._folder.name}/meet"
        ray.get([a.join.remote(k, len(nodes), meeting) for k, a in enumerate(self.actors)], timeout=CALL_S)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `function(*args)` on every rank at once; raise the first error, with its own type."""
        calls = [actor.run.remote(function, *args) for actor in self.actors]
        try:
            return list(ray.get(calls, timeout=CALL_S))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def stop(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        self._folder.cleanup()


class Training:
    """A small model with everything that an exact resume needs, sharded over the ranks by FSDP2.

    It has `frozen` numbers without gradient, which each save finds unchanged.
    """

    def __init__(
        self,
        run: str,
        storage: str,
        *,
        width: int = 16,
        shard_norm: bool = True,
        frozen: int = 0,
        **options: Any,
    ) -> None:
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.distributed.fsdp import fully_shard

        import ray_ckpt

        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        ray_ckpt.connect(run=run, storage_path=storage, rank=self.rank, world_size=self.world_size, **options)
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 3)
        )
        for layer in (0, 1, 3) if shard_norm else (0, 3):
            fully_shard(self.model[layer])
        if frozen:
            self.model.register_parameter("frozen", nn.Parameter(torch.randn(frozen), requires_grad=False))
        learned = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(learned, lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.extra: dict[str, Any] = {"ema": torch.zeros(4), "names": ["a", "b"], "count": 0}
        torch.manual_seed(self.rank)
        self.ckpt = ray_ckpt.Checkpointer(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, extra=self.extra
        )

    def step(self) -> float:
        """Make one optimizer step on random data; return the loss."""
        import torch

        loss = self.model(torch.randn(4, 8)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.extra["ema"].mul_(0.9).add_(loss.detach())
        self.extra["count"] += 1
        return float(loss.detach())

    def train(self, total: int) -> list[float]:
        """Restore, train up to step `total`, and return the losses of the steps done."""
        losses = []
        for step in self.ckpt.steps(total=total):
            losses.append(self.step())
            self.ckpt.step(step, metrics={"loss": losses[-1]})
        self.ckpt.close()
        return losses
