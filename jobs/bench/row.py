"""One row of the bench: the measured quantity, its samples, its reference, and its target.

`measure` makes every row that is sampled. A row is compared with a limit that is a plain number, or with
something measured in the same run, its samples taken in turn with those of the row. The ratio is that of the
medians, both in the row's unit. The row states whether more or less is better: a speed has to reach ">= 0.85"
of its reference, a cost "<= 1.15".
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal, TypeAlias

Sampler: TypeAlias = Callable[[], float]
REACH = re.compile(r"(<=|>=) (\d+(?:\.\d+)?)")


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
    skipped: str = ""
    note: str = ""
    load: float = field(default_factory=lambda: os.getloadavg()[0])  # runnable processes, mean of a minute

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
    def ratio(self) -> float | None:
        """Median over the median of the reference."""
        if self.median is None or self.reference is None or not self.reference.median:
            return None
        return self.median / self.reference.median

    @property
    def verdict(self) -> Literal["pass", "miss", "skipped", "-"]:
        if self.skipped:
            return "skipped"
        match = REACH.fullmatch(self.reach)
        if match is None or self.ratio is None:
            return "-"
        bound = float(match[2])
        return "pass" if (self.ratio <= bound if match[1] == "<=" else self.ratio >= bound) else "miss"

    def to_json(self) -> dict[str, Any]:
        found = asdict(self) | {"median": self.median, "spread": spread(self.samples), "ratio": self.ratio}
        if self.reference:
            found["reference"] |= {"median": self.reference.median, "spread": spread(self.reference.samples)}
        return found | {"verdict": self.verdict}


def measure(
    name: str,
    what: str,
    unit: str,
    sample: Sampler,
    *,
    repeat: int,
    beside: tuple[str, Sampler] | None = None,
    limit: float | None = None,
    reach: str = "",
    size_bytes: int = 0,
    note: str = "",
) -> Row:
    """Measure a row `repeat` times, in turn with the sampler `beside` it, or to compare it with a number.

    The median may be at most `limit`, in `unit`; without limit and `reach` the row is for reading only. With
    `size_bytes` the samplers return the seconds for moving so many bytes, and the row is in GB/s. The first
    calls of samplers count: a caller for whom they are slow makes them before.
    """
    samplers = {"": sample} if beside is None else {"": sample, beside[0]: beside[1]}
    samples = interleaved(samplers, repeat)
    if size_bytes:
        samples = {key: gb_per_s(found, size_bytes) for key, found in samples.items()}
    reference = None if limit is None else Reference(name="limit", samples=(limit,))
    if beside is not None:
        reference = Reference(name=beside[0], samples=samples[beside[0]])
    reach = reach or ("" if limit is None else "<= 1")
    own = samples[""]
    return Row(name=name, what=what, unit=unit, samples=own, reference=reference, reach=reach, note=note)


def skipped(name: str, what: str, reason: str | BaseException) -> Row:
    """Make a row that cannot be measured here; `reason` is one line, or an error."""
    if isinstance(reason, BaseException):
        first = str(reason).strip().partition("\n")[0]
        reason = f"{type(reason).__name__}: {first}" if first else type(reason).__name__
    return Row(name=name, what=what, skipped=reason)


def interleaved(samplers: Mapping[str, Sampler], repeat: int) -> dict[str, tuple[float, ...]]:
    """Call each sampler once, in the given order, in each of `repeat` rounds.

    A slow phase of the machine then falls on all of them.
    """
    rounds = [[sample() for sample in samplers.values()] for _ in range(repeat)]
    return dict(zip(samplers, zip(*rounds, strict=True), strict=True))


def gb_per_s(seconds: Iterable[float], size_bytes: int) -> tuple[float, ...]:
    """Convert seconds per move of `size_bytes` to gigabytes (10^9 bytes) per second."""
    return tuple(size_bytes / each / 1e9 for each in seconds)


def spread(samples: tuple[float, ...]) -> float | None:
    """Return the largest sample less the smallest, over the median; None for a single sample."""
    middle = median(samples) if len(samples) > 1 else 0.0
    return (max(samples) - min(samples)) / middle if middle else None


def core_rates(work: Callable[[], object], size_bytes: int, times: int, repeat: int) -> tuple[float, ...]:
    """Return GB/s of this thread's CPU time, `repeat` samples of `times` calls for `size_bytes` each."""
    work()
    found = []
    for _ in range(repeat):
        start_s = time.thread_time()
        for _ in range(times):
            work()
        found.append(size_bytes * times / (time.thread_time() - start_s) / 1e9)
    return tuple(found)
