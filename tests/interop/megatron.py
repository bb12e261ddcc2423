"""Directories that Megatron-core writes and reads, in tests without a GPU.

`python -m tests.interop.megatron FOLDER RANK WORLD_SIZE` writes one on several ranks, each with its rows.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

STEPS = 7
STACKED = torch.arange(24.0).view(2, 3, 4)


def make(seed: int = 0) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained() -> tuple[nn.Module, torch.optim.AdamW]:
    model, optimizer = make()
    for _ in range(STEPS):
        step(model, optimizer)
    return model, optimizer


@contextmanager
def megatron(rank: int, world_size: int, place: Path) -> Iterator[Any]:
    """Give `dist_checkpointing` in a process group, with two functions of torch.cuda replaced."""
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=world_size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core import dist_checkpointing

            with (
                mock.patch("torch.cuda.synchronize"),
                mock.patch("torch.cuda.current_device", lambda: "cpu"),
            ):
                yield dist_checkpointing
    finally:
        dist.destroy_process_group()


def cut(key: str, tensor: torch.Tensor, rank: int, world_size: int) -> Any:
    """Return a rank's rows of a tensor."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    rows = tensor.detach().chunk(world_size)[rank].clone()
    return ShardedTensor.from_rank_offsets(key, rows, (0, rank, world_size))


def sharded(tensors: Mapping[str, torch.Tensor], rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    return {key: cut(key, tensor, rank, world_size) for key, tensor in tensors.items()}


def weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the weights and the moments by the keys that Megatron's optimizers give them."""
    found = dict(model.state_dict())
    for name, param in model.named_parameters():
        state = optimizer.state[param]
        found |= {f"optimizer.state.{key}.{name}": state[key] for key in ("exp_avg", "exp_avg_sq")}
    return found


def save(folder: Path, rank: int = 0, world_size: int = 1) -> None:
    """Write the state of `trained`, and what else Megatron has: a stacked layer, objects, arguments."""
    with megatron(rank, world_size, folder.with_suffix(".rendezvous")) as dist_checkpointing:
        from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
        from megatron.core.enums import ModelType
        from megatron.core.transformer.enums import AttnBackend

        folder.mkdir(parents=True, exist_ok=True)
        model, optimizer = trained()
        groups = optimizer.state_dict()["param_groups"]
        layers = {
            f"layer{k}": ShardedTensor.from_rank_offsets(
                "layers.w", STACKED[k].clone(), (0, k, 2), prepend_axis_num=1
            )
            for k in range(2)
            if k % world_size == rank
        }
        state = {
            "model": sharded(weights(model, optimizer), rank, world_size) | layers,
            "extra": ShardedObject("layers._extra_state", {"amax": [rank]}, (world_size,), (rank,)),
            "optimizer": {"optimizer": {"state": {"common_step": STEPS}, "param_groups": groups}},
            "iteration": STEPS,
            "args": argparse.Namespace(
                hidden=6, backend=AttnBackend.flash, kind=ModelType.encoder_or_decoder
            ),
        }
        dist_checkpointing.save(state, str(folder))


def load(folder: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return what Megatron-core loads into zeros of these shapes, and the common values."""
    with megatron(0, 1, folder.with_suffix(".rendezvous-2")) as dist_checkpointing:
        zeros = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}
        loaded: dict[str, Any] = dist_checkpointing.load({"model": sharded(zeros)}, str(folder))
        return loaded


if __name__ == "__main__":
    save(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
