"""A loop with an engine of DeepSpeed that saves under Ray Train and through ray_ckpt.

    python -m jobs.train_deepspeed --steps 40 --stage 3

ZeRO of the stage shards the model over two workers. Run it again with more --steps, with another --stage or
number of --workers, or kill a worker: it goes on from its newest checkpoint. docs/guides/deepspeed.md shows
what differs from the same loop without ray_ckpt.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

import ray_ckpt
from ray_ckpt.train import CheckpointCallback

WIDTH = 16
BATCH = 8  # samples of a rank in a micro-batch
EVERY = 5  # steps between two saves


def build_engine(stage: int) -> Any:
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"  # read at the import
    import deepspeed
    from deepspeed.ops import __compatible_ops__ as compiled

    if not torch.cuda.is_available():
        compiled["deepspeed_shm_comm"] = False  # it would be compiled for minutes
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 1))
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    return engine


def train_loop(config: dict[str, Any]) -> None:
    engine = build_engine(config["stage"])
    ckpt = ray_ckpt.Checkpointer(engine=engine)
    losses = Path(config["out"]) / f"losses-{dist.get_rank()}.jsonl"
    for step in ckpt.steps(total=config["steps"]):
        loss = train_step(engine, step)
        with losses.open("a") as file:
            print(json.dumps([step, loss]), file=file)
        ckpt.step(step, metrics={"loss": loss})
    ckpt.close()


def train_step(engine: Any, step: int) -> float:
    """Train one step on data that depend only on the step, the micro-batch and the rank."""
    total = 0.0
    for micro in range(engine.gradient_accumulation_steps()):
        generator = torch.Generator().manual_seed(1000 * step + 100 * micro + dist.get_rank())
        data = torch.randn(BATCH, WIDTH, generator=generator).to(engine.device)
        loss = (engine(data.bfloat16()).float() - data.sum(1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
        total += float(loss.detach())
    return total


def build_trainer(
    name: str, storage_path: str, steps: int, out: str, *, stage: int = 3, workers: int = 2
) -> TorchTrainer:
    """Build the trainer of one run; each worker adds its losses to a file in the folder `out`."""
    has_gpu = torch.cuda.is_available()
    return TorchTrainer(
        train_loop,
        train_loop_config={"steps": steps, "stage": stage, "out": out},
        torch_config=TorchConfig(backend="nccl" if has_gpu else "gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=workers, use_gpu=has_gpu),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=storage_path,
            callbacks=[CheckpointCallback(every_steps=EVERY, remote_every=2)],
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.train_deepspeed",
        description="A loop with an engine of DeepSpeed through ray_ckpt.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--name", default="deepspeed", help="run name")
    parser.add_argument(
        "--storage-path", default="~/ray_ckpt_runs", help="folder that all nodes share, or s3://"
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps in all")
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3), help="stage of ZeRO")
    parser.add_argument("--workers", type=int, default=2, help="number of ranks")
    parser.add_argument("--out", default=".", help="folder for the losses")
    args = parser.parse_args(argv)
    path = args.storage_path
    storage = path if "://" in path else str(Path(path).expanduser().absolute())
    out = str(Path(args.out).absolute())
    build_trainer(args.name, storage, args.steps, out, stage=args.stage, workers=args.workers).fit()
    print(f"{args.steps} steps; ray-ckpt ls {storage}/{args.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
