"""The state that all save and restore rows move: a GPT's parameters and AdamW's moments, of a given size.

Twelve blocks, as many tensors as a real model of that depth has, and the skew of a real one: a few embeddings
and matrices hold nearly all bytes, two thirds of the tensors are vectors. It needs torch only, so that
processes of other environments make the same state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

NUM_BLOCKS = 12
WIDTH_STEP = 16  # widths are multiples of this number
MOMENTS = ("exp_avg", "exp_avg_sq")
SEED = 20
State = tuple[nn.Module, torch.optim.AdamW]


def make_state(size_bytes: int, *, fill: float | None = None) -> State:
    """Make a model and its optimizer of `size_bytes` to within a row of the embedding, at least about 1 MiB.

    Moments are as AdamW makes them. All memory has noise, the same in every process, or the value `fill`,
    which takes less time. The model is never run.
    """
    width, vocabulary = _dimensions(size_bytes // (torch.float32.itemsize * (1 + len(MOMENTS))))
    with torch.device("meta"):
        block = nn.TransformerEncoderLayer(width, nhead=1, dim_feedforward=4 * width)
        blocks = nn.TransformerEncoder(block, NUM_BLOCKS, nn.LayerNorm(width), enable_nested_tensor=False)
        meta = nn.ModuleDict({"embedding": nn.Embedding(vocabulary, width), "blocks": blocks})
    model = meta.to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=False)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0),
            **{name: torch.empty_like(parameter, requires_grad=False) for name in MOMENTS},
        }
    generator = torch.Generator().manual_seed(SEED)
    for tensor in tensors(model, optimizer):
        if fill is not None:
            tensor.fill_(fill)
        elif tensor.dim():
            tensor.normal_(0, 0.02, generator=generator)
    return model, optimizer


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Return all tensors of the state, in a fixed order."""
    for parameter in model.parameters():
        yield parameter.data
        yield from (value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor))


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    return sum(tensor.nbytes for tensor in tensors(model, optimizer))


def state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state as most programs save it, with the live tensors."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def advance(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Change one element of every tensor, the least work that makes each save differ."""
    for tensor in tensors(model, optimizer):
        tensor.view(-1)[:1].add_(1)


def wipe(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for tensor in tensors(model, optimizer):
        tensor.zero_()


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    """Return one sum over the bits of each tensor, which is equal before a save and after its load."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    found = tensors(model, optimizer)
    return tuple(int(each.view(-1).view(widths[each.itemsize]).sum()) for each in found)


def _dimensions(num_parameters: int) -> tuple[int, int]:
    """Return width and rows of the embedding; blocks take about three quarters, the embedding the rest."""
    ideal = math.sqrt(0.75 * num_parameters / (12 * NUM_BLOCKS))
    width = max(WIDTH_STEP, round(ideal / WIDTH_STEP) * WIDTH_STEP)
    blocks = NUM_BLOCKS * (12 * width * width + 13 * width) + 2 * width
    return width, max(1, round((num_parameters - blocks) / width))
