"""The notice of a preemption, from any source."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Notice:
    """An announcement that this machine or process is about to end."""

    source: str
    """aws, gcp, azure or sigterm."""
    text: str
    """For people; composed by this package, it quotes nothing from a service."""
    deadline_s: float | None
    """Unix seconds until which it should stay; it may stay longer. None: it may end at any moment."""


def left_s(ends_s: float) -> float:
    """Return the seconds until `ends_s` of the monotonic clock. Raise TimeoutError if `ends_s` has passed."""
    left_s = ends_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
