"""This rank's regions of a tensor that is not cut into boxes: what FSDP1 leaves of a parameter."""

from __future__ import annotations

from typing import TypeAlias

import torch

PlacedPart: TypeAlias = tuple[tuple[int, ...], torch.Tensor]
"""Where a region begins in its tensor, and its live memory, which has the region's shape."""


class Pieces:
    """Regions of a tensor of `shape` in this rank's memory; none if other ranks hold all of it.

    `parts` are views of `base`, which is whatever the owner keeps. `ranks` hold the same regions. Not changed
    once made: memory that moves makes new Pieces.
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
