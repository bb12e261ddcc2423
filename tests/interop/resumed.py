"""A training that goes on from an imported run: `python -m ... STORAGE KIND TOTAL KILL_AT OUT`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ray_ckpt
from tests.frameworks.deepspeed_files.train import groups_of, make_model
from tests.interop import megatron

RUN = "gpt"


def _small() -> tuple[nn.Module, torch.optim.Optimizer, int]:
    """Return the model of `tests.hostile.samples`, with other weights."""
    torch.manual_seed(8)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2, bias=False))
    return model, torch.optim.AdamW(model.parameters(), lr=0.5), 4


def _weights() -> tuple[nn.Module, torch.optim.Optimizer, int]:
    model, _, width = _small()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), width


def _net() -> tuple[nn.Module, torch.optim.Optimizer, int]:
    model = make_model(8)
    return model, torch.optim.AdamW(groups_of(model), lr=0.5), 5


class _Stacked(nn.Sequential):
    """The model of `tests.interop.megatron` beside its stacked layer, which is not used."""

    def __init__(self) -> None:
        super().__init__(*megatron.make(8)[0].children())
        self.layers = nn.Module()
        self.layers.w = nn.Parameter(torch.zeros_like(megatron.STACKED))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self[0], self[1], self[2]):
            x = layer(x)
        return x


def _megatron() -> tuple[nn.Module, torch.optim.Optimizer, int]:
    model = _Stacked()
    trained = [param for name, param in model.named_parameters() if name != "layers.w"]
    return model, torch.optim.AdamW(trained, lr=0.5), 4


MAKERS: Mapping[str, Callable[[], tuple[nn.Module, torch.optim.Optimizer, int]]] = {
    "small": _small,
    "weights": _weights,
    "net": _net,
    "megatron": _megatron,
}
"""Functions that return a model, its optimizer and the width of its input."""


def objects_of(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the items that the run has."""
    return {"model": model} if kind == "weights" else {"model": model, "optimizer": optimizer}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, width: int, number: int) -> None:
    """Train on data that depend on the step alone."""
    data = torch.randn(6, width, generator=torch.Generator().manual_seed(number))
    model(data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    storage, kind, total, kill_at, out = sys.argv[1:]
    torch.set_num_threads(1)
    ray_ckpt.connect(run=RUN, storage_path=storage, every_steps=1)
    model, optimizer, width = MAKERS[kind]()
    ckpt = ray_ckpt.Checkpointer(**objects_of(kind, model, optimizer))
    first = ckpt.resume_step()
    for number in ckpt.steps(total=int(total)):
        step(model, optimizer, width, number)
        ckpt.step(number)
        if number == int(kill_at):
            ckpt.wait()
            os.kill(os.getpid(), signal.SIGKILL)
    ckpt.close()
    torch.save({"first": first, "model": model.state_dict()}, Path(out))


if __name__ == "__main__":
    main()
