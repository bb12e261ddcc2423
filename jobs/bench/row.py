"""One row of the bench: the measured quantity, its samples, its reference, and its target.

A row is compared with a limit that is a plain number, or with something measured in the same run, its samples
taken in turn with those of the row. The ratio is that of the medians, both in the row's unit. The row
states whether more or less is better: a speed has to reach ">= 0.85" of its reference, a cost "<= 1.15".
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

Verdict = Literal["pass", "miss", "skipped", "-"]
Convert = Callable[[tuple[float, ...]], tuple[float, ...]]
REACH = re.compile(r"(<=|>=) (\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """State of the machine while a row was measured; a busy machine changes the numbers."""

    cores: int
    load: float  # mean number of runnable processes in the minute before
    cpu_share: float  # CPU time of this process over wall time; well below 1 for pure computing: disturbed


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The other side of a comparison in the unit of the row: a number, or a limit or peer of the same run."""

    name: str
    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`samples` and those of `reference` are in `unit`; without samples `skipped` has the reason.

    `reach` is ">= r" or "<= r" of the ratio to the reference, empty for a row that is for reading only.
    ValueError for anything else, or if there is nothing to compare with.
    """

    name: str
    what: str
    unit: str = ""
    samples: tuple[float, ...] = ()
    reference: Reference | None = None
    reach: str = ""
    machine: Machine | None = None
    skipped: str = ""
    note: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)  # for the JSON file only

    def __post_init__(self) -> None:
        if not self.samples and not self.skipped:
            raise ValueError(f"{self.name}: no samples, and no reason")
        if self.reach and REACH.fullmatch(self.reach) is None:
            raise ValueError(f'{self.name}: reach {self.reach!r} is neither ">= r" nor "<= r"')
        if self.reach and self.reference is None and not self.skipped:
            raise ValueError(f"{self.name}: reach {self.reach} of nothing")

    @property
    def median(self) -> float | None:
        return median(self.samples) if self.samples else None

    @property
    def spread(self) -> float | None:
        """The largest sample less the smallest, divided by the median."""
        return spread(self.samples)

    @property
    def ratio(self) -> float | None:
        """Median over the median of the reference."""
        middle, reference = self.median, self.reference
        return (
            None if middle is None or reference is None or not reference.median else middle / reference.median
        )

    @property
    def verdict(self) -> Verdict:
        if self.skipped:
            return "skipped"
        match = REACH.fullmatch(self.reach)
        if match is None or self.ratio is None:
            return "-"
        bound = float(match[2])
        return "pass" if (self.ratio <= bound if match[1] == "<=" else self.ratio >= bound) else "miss"

    def to_json(self) -> dict[str, Any]:
        machine, reference = self.machine, self.reference
        return {
            "name": self.name,
            "what": self.what,
            "unit": self.unit,
            "samples": list(self.samples),
            "median": self.median,
            "spread": self.spread,
            "reference": {
                "name": reference.name,
                "samples": list(reference.samples),
                "median": reference.median,
                "spread": spread(reference.samples),
            }
            if reference
            else None,
            "reach": self.reach,
            "ratio": self.ratio,
            "verdict": self.verdict,
            "skipped": self.skipped,
            "note": self.note,
            "extra": dict(self.extra),
            "cores": machine.cores if machine else None,
            "load": machine.load if machine else None,
            "cpu_share": machine.cpu_share if machine else None,
        }


def spread(samples: tuple[float, ...]) -> float | None:
    """Return the largest sample less the smallest, over the median; None for a single sample."""
    middle = median(samples) if len(samples) > 1 else 0.0
    return (max(samples) - min(samples)) / middle if middle else None


def gb_per_s(seconds: Iterable[float], size_bytes: int) -> tuple[float, ...]:
    """Convert seconds per move of `size_bytes` to gigabytes (10^9 bytes) per second."""
    return tuple(size_bytes / each / 1e9 for each in seconds)


def interleaved(samplers: Mapping[str, Callable[[], float]], repeat: int) -> Mapping[str, tuple[float, ...]]:
    """Call each sampler once, in the given order, in each of `repeat` rounds.

    A slow phase of the machine then falls on all of them. The caller prepares the samplers before, including
    slow first calls.
    """
    rounds = [[sample() for sample in samplers.values()] for _ in range(repeat)]
    return {name: tuple(one[place] for one in rounds) for place, name in enumerate(samplers)}


def measure(
    name: str,
    what: str,
    unit: str,
    sample: Callable[[], float],
    *,
    repeat: int,
    limit: float | None = None,
    convert: Convert | None = None,
) -> Row:
    """Measure a row beside a plain number: at most `limit`, in `unit`, or for reading only."""
    samples, machine = watched({"row": sample}, repeat)
    return Row(
        name=name,
        what=what,
        unit=unit,
        samples=convert(samples["row"]) if convert else samples["row"],
        reference=None if limit is None else Reference(name="limit", samples=(limit,)),
        reach="" if limit is None else "<= 1",
        machine=machine,
    )


def compared(
    name: str,
    what: str,
    unit: str,
    sample: Callable[[], float],
    reference: tuple[str, Callable[[], float]],
    *,
    repeat: int,
    reach: str = "",
    convert: Convert | None = None,
    note: str = "",
) -> Row:
    """Measure a row and its reference in turn; `convert` makes samples of either into `unit`."""
    samples, machine = watched({"row": sample, "reference": reference[1]}, repeat)
    own, other = samples["row"], samples["reference"]
    if convert is not None:
        own, other = convert(own), convert(other)
    beside = Reference(name=reference[0], samples=other)
    return Row(
        name=name,
        what=what,
        unit=unit,
        samples=own,
        reference=beside,
        reach=reach,
        machine=machine,
        note=note,
    )


def skipped(name: str, what: str, reason: str) -> Row:
    """Make a row that cannot be measured here; `reason` is one line."""
    return Row(name=name, what=what, skipped=reason)


def first_line(error: BaseException) -> str:
    """Return the line of a row that an error kept from running."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def watched(
    samplers: Mapping[str, Callable[[], float]], repeat: int
) -> tuple[Mapping[str, tuple[float, ...]], Machine]:
    """Return `interleaved` and the state of the machine in the meantime."""
    load, cpu_s, wall_s = os.getloadavg()[0], time.process_time(), time.perf_counter()
    samples = interleaved(samplers, repeat)
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    return samples, Machine(cores=os.cpu_count() or 1, load=load, cpu_share=cpu_s / wall_s)
