"""A small GPT over bytes and its learning-rate schedule: plain PyTorch, nothing about Ray or checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # bytes


class Block(nn.Module):
    """One pre-norm transformer block, [batch, time, width] to the same."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.norm_1(x)))
        y: Tensor = x + self.dropout(self.mlp(self.norm_2(x)))
        return y

    def attend(self, x: Tensor) -> Tensor:
        # [batch, time, 3 * width] -> three of [batch, heads, time, width / heads]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return y


class GPT(nn.Module):
    """Bytes, int64 [batch, time], to the logits of the byte after each, [batch, time, 256]."""

    def __init__(self, *, layers: int, width: int, heads: int, context: int, dropout: float = 0.1) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is not a multiple of heads {heads}")
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


def init_weights(module: nn.Module) -> None:
    """As in GPT-2, without its scaling by depth."""
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
    """Factor of the base learning rate: linear over `warmup` steps, then a cosine to `floor` at `total`.

    A class and not a lambda, so that LambdaLR saves these three numbers with its state. On resume they win
    over newly built ones: a longer run keeps the schedule it began with, and stays at `floor` at its end.
    """

    warmup: int
    total: int
    floor: float = 0.1

    def __call__(self, done: int) -> float:
        if done < self.warmup:
            return (done + 1) / self.warmup
        progress = min(1.0, (done - self.warmup) / max(1, self.total - self.warmup))
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))
