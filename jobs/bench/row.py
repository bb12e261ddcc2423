"""One row of the bench: what was measured, how often, and the limit that it is compared with.

Every number is a cost, so less is better, and a row passes if the median is at most its limit. A limit is a
target of DESIGN, or a peer that was measured in the same run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the machine was like while a row was measured; a busy one makes other numbers."""

    cores: int
    load: float  # processes that wanted a core, mean of the minute before
    cpu_share: float  # CPU time of this process over wall time; well below 1 for pure computing: disturbed


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`samples` and `limit` are in `unit`; without samples `skipped` says why."""

    name: str
    what: str
    unit: str
    samples: tuple[float, ...] = ()
    limit: float | None = None  # none: for reading only
    machine: Machine | None = None
    skipped: str = ""

    @property
    def median(self) -> float | None:
        return median(self.samples) if self.samples else None

    @property
    def spread(self) -> float | None:
        """The largest sample less the smallest, over the median."""
        middle = self.median
        return (max(self.samples) - min(self.samples)) / middle if middle else None

    @property
    def ratio(self) -> float | None:
        """Of the median to the limit."""
        middle = self.median
        return None if middle is None or self.limit is None else middle / self.limit

    @property
    def verdict(self) -> str:
        if self.skipped:
            return "skipped"
        if self.ratio is None:
            return "-"
        return "pass" if self.ratio <= 1 else "miss"

    def to_json(self) -> dict[str, Any]:
        machine = self.machine
        return {
            "name": self.name,
            "what": self.what,
            "unit": self.unit,
            "samples": list(self.samples),
            "median": self.median,
            "spread": self.spread,
            "limit": self.limit,
            "ratio": self.ratio,
            "verdict": self.verdict,
            "skipped": self.skipped,
            "cores": machine.cores if machine else None,
            "load": machine.load if machine else None,
            "cpu_share": machine.cpu_share if machine else None,
        }


def measure(
    name: str, what: str, unit: str, sample: Callable[[], float], *, repeat: int, limit: float | None = None
) -> Row:
    """Take `repeat` samples; what they need is to be made ready before."""
    load, cpu_s, wall_s = os.getloadavg()[0], time.process_time(), time.perf_counter()
    samples = tuple(sample() for _ in range(repeat))
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    machine = Machine(cores=os.cpu_count() or 1, load=load, cpu_share=cpu_s / wall_s)
    return Row(name=name, what=what, unit=unit, samples=samples, limit=limit, machine=machine)
