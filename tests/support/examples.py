"""The numbers of Hypothesis examples: a quarter of them in `make test`, all in `make test-slow`."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import settings

ALL_ENV = "RAY_CKPT_ALL_EXAMPLES"  # "1": play all examples
SHARE = 4


def examples(count: int = 100, **options: Any) -> settings:
    """Return settings with `count` examples, or with a quarter of them unless ALL_ENV is set."""
    is_all = os.environ.get(ALL_ENV) == "1"
    return settings(max_examples=count if is_all else max(1, count // SHARE), deadline=None, **options)
