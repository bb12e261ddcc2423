"""A small GPT over bytes, its tensor-parallel plan and its learning-rate schedule.

Plain PyTorch, without Ray and without checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

VOCABULARY = 256  # bytes


class Block(nn.Module):
    """One pre-norm transformer block: [batch, time, width] to the same shape."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm_1 = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.norm_1(x)))
        y: Tensor = x + self.dropout(self.mlp(self.norm_2(x)))
        return y

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return y

    def split(self, x: Tensor) -> Tensor:
        """Reshape [batch, time, width] to [batch, heads, time, width / heads], for the heads of this rank."""
        heads: Tensor = x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # type: ignore[no-untyped-call]
        return heads


class GPT(nn.Module):
    """A model from bytes, int64 [batch, time], to the logits of each next byte, [batch, time, 256]."""

    def __init__(self, *, layers: int, width: int, heads: int, context: int, dropout: float = 0.1) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
        self.heads = heads
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(init_weights)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embed(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Replicated(ParallelStyle):
    """Replicate the module: every rank of the mesh holds and computes all of it.

    Its parameters become DTensors like all others, without which clip_grad_norm_ refuses to add their norms.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> Any:
            return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

        def leave(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, input_fn=enter, output_fn=leave)


def tensor_parallel(model: GPT, mesh: DeviceMesh) -> None:
    """Split attention heads, the layers of MLPs and the vocabulary over the ranks of a 1-D mesh, in place.

    Between these layers all activations, and therefore the logits and the loss, are whole and the same on
    each rank of the mesh. All ranks need the same inputs and the same random numbers for dropout. Raise
    ValueError if the ranks cannot share the heads evenly.
    """
    if model.heads % mesh.size():
        raise ValueError(f"{model.heads} heads cannot be shared by {mesh.size()} tensor-parallel ranks")
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),  # each rank has rows: a part of the vocabulary
        "position": Replicated(),
        "norm": Replicated(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    plan |= {f"blocks.*.{name}": Replicated() for name in ("norm_1", "norm_2")}
    plan |= {f"blocks.*.{name}": ColwiseParallel() for name in ("query", "key", "value", "mlp.0")}
    plan |= {f"blocks.*.{name}": RowwiseParallel() for name in ("out", "mlp.2")}
    parallelize_module(model, mesh, plan)


def init_weights(module: nn.Module) -> None:
    """Initialise as GPT-2 does, without its scaling by depth."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def next_byte_loss(model: nn.Module, inputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy in nats, a float32 scalar; inputs and targets are int64 [batch, time]."""
    logits = model(inputs).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


@dataclass
class WarmupCosine:
    """A factor of the base learning rate: linear over `warmup` steps, then a cosine to `floor` at `total`.

    A class and not a lambda, so that LambdaLR saves these three numbers with its state. On resume the saved
    numbers replace new ones: a prolonged run keeps its first schedule, and stays at `floor` after the end of
    the schedule.
    """

    warmup: int
    total: int
    floor: float = 0.1

    def __call__(self, done: int) -> float:
        if done < self.warmup:
            return (done + 1) / self.warmup
        progress = min(1.0, (done - self.warmup) / max(1, self.total - self.warmup))
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))
