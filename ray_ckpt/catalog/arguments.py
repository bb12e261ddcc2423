"""Checks of the numbers that readers of checkpoints take: steps and ranks."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from ray_ckpt.errors import ConfigError


def whole(value: Any, name: str) -> int:
    """Return an integer as an int, also one of NumPy, which tables contain. Raise ConfigError for others."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise ConfigError(f"{name} is {value!r}, which is not an integer.", hint="Give an int.")


def whole_numbers(values: Any, name: str) -> set[int]:
    """Return several integers. Raise ConfigError unless `values` is an iterable of them."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise ConfigError(
            f"{name} is {values!r}, and not several integers.", hint=f"Give a list, such as {name}=[10, 20]."
        )
    return {whole(value, f"an element of {name}") for value in values}
