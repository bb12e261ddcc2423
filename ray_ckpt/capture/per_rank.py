"""What items have in common whose state is the rank's own and is put back by `load` alone."""

from __future__ import annotations

from typing import Any

import torch


class PerRankItem:
    """The part of an Item that does not depend on the object: nothing in it is shared between ranks."""

    per_rank = True

    def load(self, tree: Any) -> None:
        raise NotImplementedError

    def load_for_new_rank(self, tree: Any, rank: int) -> None:
        """Put back what a rank starts with that the checkpoint has no state of. `tree` is rank 0's."""
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
