"""Equality of states, without an import of verl."""

from __future__ import annotations

from typing import Any

import torch


def same(one: Any, other: Any) -> bool:
    """Return whether two states are equal, bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
