"""How many examples tests play: a part of them in `make test`, all in `make test-slow`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

ALL_ENV = "RAY_CKPT_ALL_EXAMPLES"  # "1": play all examples of Hypothesis
SHARE = 4  # in `make test`, one example of so many


def examples(count: int = 100, **options: Any) -> settings:
    """Return settings of Hypothesis with `count` examples, or with one of SHARE unless ALL_ENV is set."""
    is_all = os.environ.get(ALL_ENV) == "1"
    return settings(max_examples=count if is_all else max(1, count // SHARE), deadline=None, **options)


def every_few(values: Iterable[Any], few: int = SHARE) -> list[Any]:
    """Return parameters of a test; all but the first of each `few` values are slow. A tuple has several."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow if at % few else ()
        )
        for at, value in enumerate(values)
    ]
