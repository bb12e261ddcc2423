"""Base class of items whose state belongs to the rank and is restored by `load` alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch


class PerRankItem(ABC):
    """Common methods of items whose ranks share nothing."""

    per_rank = True

    @abstractmethod
    def load(self, tree: Any) -> None: ...

    def load_for_new_rank(self, tree: Any, rank: int) -> None:
        """Load initial state on a rank without state in the checkpoint; `tree` is the tree of rank 0."""
        self.load(tree)

    def problems(self, saved: Any) -> list[str]:
        return []

    def is_shared(self, path: tuple[str, ...]) -> bool:
        return False

    def is_replaced(self, path: tuple[str, ...]) -> bool:
        return True

    def changes_in_step(self, path: tuple[str, ...]) -> bool:
        return False

    def allocate(self, path: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="cpu")
