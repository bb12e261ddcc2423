"""A loop that saves with torch.distributed.checkpoint (DCP), under Ray Train and through ray_ckpt.

    python -m jobs.train_dcp --steps 40

Model and optimizer are sharded by FSDP2 over two workers. Run it again with more --steps, or kill a worker:
it goes on from its newest checkpoint. docs/guides/dcp.md shows what differs from the same loop without
ray_ckpt.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as _dcp
from ray.train.torch import TorchConfig, TorchTrainer
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

import ray_ckpt
from ray_ckpt.train import CheckpointCallback

dcp: Any = _dcp  # its functions have no stable types
WIDTH = 16
EVERY = 5  # steps between two saves


class App(Stateful):
    """Model and optimizer, as torch's tutorials wrap them for DCP."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


def train_loop(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    beside = dist.new_group(backend="gloo")  # async_save has collectives beside those of training
    state: dict[str, Any] = {"app": App(model, optimizer), "step": 0}
    reader = ray_ckpt.dcp.Reader()
    if reader.step:
        dcp.load(state, storage_reader=reader)
    saved: Any = None
    for step in range(state["step"] + 1, config["steps"] + 1):
        loss = train_step(model, optimizer, step)
        if step % EVERY == 0 or step == config["steps"]:
            if saved is not None:
                saved.result()  # raises the error of the save before
            writer = ray_ckpt.dcp.Writer(step, metrics={"loss": loss})
            saved = dcp.async_save({**state, "step": step}, storage_writer=writer, process_group=beside)
    if saved is not None:
        saved.result()
    whole = model[0].weight.full_tensor()
    if dist.get_rank() == 0:
        (Path(config["out"]) / f"weight-{config['steps']}.txt").write_text(str(whole.flatten().tolist()))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Train one step on data that depend only on the step and the rank."""
    data = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
    loss: Tensor = (model(data) - data.sum(1, keepdim=True)).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def build_trainer(name: str, storage_path: str, steps: int, out: str) -> TorchTrainer:
    """Build the trainer of one run; `out` is the folder for the trained weight."""
    return TorchTrainer(
        train_loop,
        train_loop_config={"steps": steps, "out": out},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=storage_path,
            callbacks=[CheckpointCallback(remote_every=2)],
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.train_dcp",
        description="A loop with torch.distributed.checkpoint through ray_ckpt.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--name", default="dcp", help="run name")
    parser.add_argument(
        "--storage-path", default="~/ray_ckpt_runs", help="folder that all nodes share, or s3://"
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps in all")
    parser.add_argument("--out", default=".", help="folder for the trained weight")
    args = parser.parse_args(argv)
    path = args.storage_path
    storage = path if "://" in path else str(Path(path).expanduser().absolute())
    build_trainer(args.name, storage, args.steps, str(Path(args.out).absolute())).fit()
    print(f"{args.steps} steps; ray-ckpt ls {storage}/{args.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
