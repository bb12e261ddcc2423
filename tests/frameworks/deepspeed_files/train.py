"""A rank of a training with DeepSpeed on CPUs: `python -m tests.frameworks.deepspeed_files.train FOLDER ...`.

It loads a Universal Checkpoint, if one is named, trains, and saves, all with DeepSpeed itself. Each rank
writes its losses beside the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class Net(nn.Module):
    """A model with odd shapes, one element, a frozen parameter, a buffer and tied weights."""

    mean: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.second = nn.Linear(7, 7)
        self.tied = nn.Linear(7, 7, bias=False)
        self.tied.weight = self.second.weight
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.frozen = nn.Parameter(torch.arange(9.0).view(3, 3) / 7, requires_grad=False)
        self.register_buffer("mean", torch.zeros(7))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.tied(self.second(self.norm(self.first(x)).tanh())) * self.scale
        self.mean.lerp_(hidden.detach().float().mean(0).to(self.mean.dtype), 0.5)
        self.count += 1
        return hidden[:, :3] @ self.frozen.to(hidden.dtype)


def make_model(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups, with and without decay."""
    trained = [param for param in model.parameters() if param.requires_grad]
    dims = {param: len(getattr(param, "ds_shape", param.shape)) for param in trained}
    return [
        {"params": [param for param in trained if dims[param] > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if dims[param] < 2], "weight_decay": 0.0, "lr": 0.02},
    ]


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def config(stage: int, *, is_bf16: bool, universal: bool) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 6,
        "zero_optimization": {"stage": stage, "sub_group_size": 40},
        "bf16": {"enabled": is_bf16},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": universal},
    }


def make_engine(arguments: argparse.Namespace) -> Any:
    import deepspeed

    made = config(arguments.stage, is_bf16=arguments.bf16, universal=bool(arguments.load))
    with deepspeed.zero.Init(config_dict_or_path=made, enabled=arguments.stage == 3):
        model = make_model(arguments.seed)
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=made)
    engine.module.universal_checkpoint_info = {}
    return engine


def train(engine: Any, first: int, last: int, rank: int, *, is_bf16: bool) -> list[float]:
    losses = []
    for step in range(first, last):
        x = batch(step, rank)
        loss = engine(x.bfloat16() if is_bf16 else x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--load", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    engine = make_engine(arguments)
    if arguments.load:
        engine.load_checkpoint(str(arguments.load))
    losses = train(engine, arguments.first, arguments.first + arguments.steps, rank, is_bf16=arguments.bf16)
    engine.save_checkpoint(str(arguments.folder), client_state={"note": [1, "a"], "seen": 18})
    seen = {
        "losses": losses,
        "steps": engine.global_steps,
        "lrs": [group["lr"] for group in engine.optimizer.param_groups],
    }
    (arguments.folder / f"seen-{rank}.json").write_text(json.dumps(seen))
    dist.barrier()


if __name__ == "__main__":
    main()
