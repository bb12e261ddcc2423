"""Data-parallel training under an elastic Ray Train: `python -m tests.cluster.elastic_survivors PATH FOLDER`.

FOLDER/log gets a line of each rank at its restore, FOLDER/step has the last step of rank 0. It ends when
FOLDER/stop is there.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn

import ray_ckpt
from ray_ckpt.train import CheckpointCallback

RUN = "elastic-survivors"
STEP_S = 0.1


def train_loop(config: dict[str, Any]) -> None:
    folder, context = Path(config["folder"]), ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    model = nn.Linear(64, 64)
    replica = prepare_model(model, move_to_device=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ckpt = ray_ckpt.Checkpointer(model=model, optimizer=optimizer)
    info = ckpt.restore()
    step = info.step if info else 0
    with (folder / "log").open("a") as log:
        log.write(f"{step} of {world_size}\n")
    is_over = torch.zeros(1)
    while not is_over.item():
        step += 1
        replica(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(STEP_S)
        ckpt.step(step)
        if rank == 0:
            (folder / "step").write_text(str(step))
        is_over.fill_(float((folder / "stop").exists()))
        if world_size > 1:
            torch.distributed.all_reduce(is_over)


def main(storage_path: str, folder: str) -> None:
    ray.init(logging_level="warning")
    TorchTrainer(
        train_loop,
        train_loop_config={"folder": folder},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=(1, 3), elastic_resize_monitor_interval_s=1.0),
        run_config=ray.train.RunConfig(
            name=RUN,
            storage_path=storage_path,
            callbacks=[CheckpointCallback(every_steps=100_000, salvage=True, salvage_copy=True)],
            failure_config=ray.train.FailureConfig(max_failures=20),
        ),
    ).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
