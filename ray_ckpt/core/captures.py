"""Captures: attempts that only some ranks have captured, as nodes report before the attempt is stored.

A node stores an attempt when all ranks of the node have written their part. Without captures, no report
would reach the coordinator about an attempt in which one rank of each node takes no part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ray_ckpt.core.values import Captured, RankProgress
from ray_ckpt.types import AttemptId

MAX_CAPTURES = 16  # attempts; each rank has two buffers, so ranks are seldom more attempts apart
MAX_UPDATES = 64  # steps whose number of optimizer steps is kept


@dataclass(slots=True)
class _Capture:
    attempt: AttemptId
    since_s: float
    reported_s: float
    ranks: set[int] = field(default_factory=set)


class Captures:
    """Captures of one session. Nodes repeat their reports well within `fresh_s`."""

    def __init__(self, fresh_s: float) -> None:
        self._fresh_s = fresh_s
        self._found: dict[str, _Capture] = {}
        self._updates: dict[int, int] = {}  # step -> optimizer steps that ranks had made at its save

    def reported(self, captured: Iterable[Captured], ranks: Iterable[RankProgress], now_s: float) -> None:
        """Note the captures of some ranks of a node, and the progress of its ranks."""
        for reported in captured:
            new = _Capture(reported.attempt, since_s=now_s, reported_s=now_s)
            capture = self._found.setdefault(reported.attempt.attempt, new)
            capture.reported_s = now_s
            capture.ranks.update(reported.ranks)
        _limit(self._found, MAX_CAPTURES)
        for progress in ranks:
            if progress.saved_updates:
                known = self._updates.pop(progress.saved_step, 0)
                self._updates[progress.saved_step] = max(known, progress.saved_updates)
        _limit(self._updates, MAX_UPDATES)

    def forget(self, attempt: str) -> None:
        self._found.pop(attempt, None)

    def fresh(self, now_s: float) -> Iterator[AttemptId]:
        """Return the attempts that a node still reports as incomplete; forget others, stored or settled."""
        self._found = {name: c for name, c in self._found.items() if now_s - c.reported_s <= self._fresh_s}
        return iter([capture.attempt for capture in self._found.values()])

    def ranks_of(self, attempt: str) -> set[int]:
        """Return the ranks that have captured an attempt, by the reports."""
        capture = self._found.get(attempt)
        return set() if capture is None else capture.ranks

    def since_s(self, attempt: str, default_s: float) -> float:
        """Return the time of the first report of an attempt, at most `default_s`."""
        capture = self._found.get(attempt)
        return default_s if capture is None else min(capture.since_s, default_s)

    def has_passed(self, progress: RankProgress, step: int) -> bool:
        """Return True if a rank has passed `step` without saving it; steps only rise, so the rank never will.

        One proof is the number of optimizer steps, which is the same on all ranks at a step: this rank has
        made more of them than another rank had made when that rank saved the step.
        """
        if progress.saved_step == step:
            return False
        between = progress.saved_before is not None and progress.saved_before < step < progress.saved_step
        went_on = progress.step > step and progress.saved_step < step
        updates = self._updates.get(step, 0)
        trained_on = progress.saved_step < step and 0 < updates < progress.updates
        return between or went_on or trained_on or (progress.is_over and progress.saved_step < step)


def _limit(found: dict[str, _Capture] | dict[int, int], most: int) -> None:
    """Forget the oldest entries of `found` beyond `most`."""
    while len(found) > most:
        del found[next(iter(found))]  # type: ignore[arg-type]
