"""A loop with Accelerate, which the tests run under Ray Train in two pieces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import ray_ckpt
from ray_ckpt.train import CheckpointCallback

EPOCHS = 3  # of 6 steps, of two batches each


def train_loop(config: dict[str, Any]) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
    from accelerate.utils import set_seed

    set_seed(0)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if config["fsdp"] else None
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(
            use_stateful_dataloader=config["is_stateful"], use_seedable_sampler=True
        ),
        fsdp_plugin=plugin,
    )
    data = TensorDataset(torch.randn(96, 8, generator=torch.Generator().manual_seed(7)))
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=4, shuffle=True)
    )
    scheduler: Any = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 4))
    position = {"epoch": 0, "batch": 0}
    ckpt = ray_ckpt.Checkpointer(**ray_ckpt.accelerate.items(accelerator), position=position)
    info = ckpt.restore()
    step = info.step if info is not None else 0
    batches = loader
    if position["batch"] and not config["is_stateful"]:
        batches = accelerator.skip_first_batches(loader, position["batch"])
    for epoch in range(position["epoch"], EPOCHS):
        position["epoch"] = epoch
        batches.set_epoch(epoch)  # a loader of skip_first_batches does not count for the one it is made of
        for (batch,) in batches:
            ckpt.restore_random_state()
            with accelerator.accumulate(model):
                loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            position["batch"] += 1
            with Path(config["out"], f"journal-{accelerator.process_index}.jsonl").open("a") as file:
                print(json.dumps([epoch, position["batch"], float(batch.sum()), float(loss)]), file=file)
            if accelerator.sync_gradients:
                step += 1
                if ckpt.due(step):
                    ckpt.save(step)
            if step == config["until"] and accelerator.sync_gradients:
                ckpt.wait("local")
                return
        position["batch"], batches = 0, loader
    ckpt.finish()
    state = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in accelerator.unwrap_model(model).state_dict().items()
    }
    if accelerator.is_main_process:
        torch.save(state, Path(config["out"], "model.pt"))


def run(name: str, storage: str, out: Path, *, until: int = 0, **config: bool) -> None:
    """Train on two workers to the end, or `until` a step after which all processes end."""
    out.mkdir(exist_ok=True)
    TorchTrainer(
        train_loop,
        train_loop_config={"fsdp": False, "is_stateful": False, **config, "until": until, "out": str(out)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name=name, storage_path=storage, callbacks=[CheckpointCallback(every_steps=2)]
        ),
    ).fit()
