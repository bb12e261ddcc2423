"""Regions of a tensor that is not cut into boxes, such as a parameter flattened by FSDP1."""

from __future__ import annotations

from typing import TypeAlias

import torch

PlacedPart: TypeAlias = tuple[tuple[int, ...], torch.Tensor]
"""Offset of a region in the tensor, and the region's live memory, in the region's shape."""


class FlatShard:
    """Regions of a tensor of `shape` in this rank's memory; none if other ranks hold the whole tensor.

    `parts` are views of `base`, a tensor that the owner keeps. `ranks` hold the same regions. A FlatShard is
    immutable: if the memory moves, a new FlatShard is made.
    """

    __slots__ = ("base", "dtype", "parts", "ranks", "shape")

    def __init__(
        self,
        *,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        base: torch.Tensor | None = None,
        parts: tuple[PlacedPart, ...] = (),
        ranks: tuple[int, ...] = (),
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.base = base
        self.parts = parts
        self.ranks = ranks
