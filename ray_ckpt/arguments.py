"""Checks of numbers that users pass: steps, ranks and the like."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from ray_ckpt.errors import ConfigError


def whole_number(value: Any, what: str, *, hint: str = "Give an int.") -> int:
    """Return an integer, a NumPy integer, or a tensor of one integer as an int.

    Raises ConfigError for any other value. Waits for a tensor on an accelerator.
    """
    dtype = str(getattr(value, "dtype", ""))
    try:
        if not isinstance(value, bool) and "bool" not in dtype:
            return operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise ConfigError(f"{what} is {value!r}, which is not an integer.", hint=hint)


def whole_numbers(values: Any, what: str) -> set[int]:
    """Return several integers. Raises ConfigError unless `values` is an iterable of them."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise ConfigError(
            f"{what} is {values!r}, and not several integers.", hint=f"Give a list, such as {what}=[10, 20]."
        )
    return {whole_number(value, f"an element of {what}") for value in values}
