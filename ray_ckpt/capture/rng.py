"""Random state of this process: python, numpy, torch on the CPU and on every CUDA device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class RngItem:
    """Registered by itself on every rank."""

    per_rank = True

    def tree(self) -> Any:
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=True),
            "torch_cpu": torch.get_rng_state(),
            "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else [],
        }

    def load(self, tree: Any) -> None:
        random.setstate(tree["python"])
        np.random.set_state(tree["numpy"])
        torch.set_rng_state(tree["torch_cpu"])
        if tree["cuda"] and torch.cuda.device_count() == len(tree["cuda"]):
            torch.cuda.set_rng_state_all(tree["cuda"])

    def problems(self, saved: Any) -> list[str]:
        return []

    def is_shared(self, path: tuple[str, ...]) -> bool:
        return False

    def changes_in_step(self, path: tuple[str, ...]) -> bool:
        return False

    def allocate(self, path: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)
