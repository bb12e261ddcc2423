"""Attempts that only some ranks have captured, as nodes report them before they have stored anything.

A node stores an attempt when all of its ranks have written it. Without this the coordinator would not know
of an attempt that one rank of each node stays out of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ray_ckpt.core.values import Captured, RankProgress
from ray_ckpt.types import AttemptId

MAX_CAPTURES = 16  # attempts; the ranks of a node have two buffers each, so they are seldom further apart
STALE_S = 10.0  # nodes repeat a report each second; an older one was stored or settled by now
MAX_UPDATES = 64  # steps whose number of optimizer steps is known


@dataclass(slots=True)
class _Capture:
    attempt: AttemptId
    since_s: float
    reported_s: float
    ranks: set[int] = field(default_factory=set)


class Captures:
    """Captures of one session."""

    def __init__(self) -> None:
        self._found: dict[str, _Capture] = {}
        self._updates: dict[int, int] = {}  # step -> optimizer steps that ranks had made when they saved it

    def reported(self, captured: Iterable[Captured], ranks: Mapping[int, RankProgress], now_s: float) -> None:
        """Note the captures of some ranks of a node, and the progress of its ranks."""
        for reported in captured:
            new = _Capture(reported.attempt, since_s=now_s, reported_s=now_s)
            capture = self._found.setdefault(reported.attempt.attempt, new)
            capture.reported_s = now_s
            capture.ranks.update(reported.ranks)
        _limit(self._found, MAX_CAPTURES)
        for progress in ranks.values():
            if progress.saved_updates:
                known = self._updates.pop(progress.saved_step, 0)
                self._updates[progress.saved_step] = max(known, progress.saved_updates)
        _limit(self._updates, MAX_UPDATES)

    def forget(self, attempt: str) -> None:
        self._found.pop(attempt, None)

    def fresh(self, now_s: float) -> Iterator[AttemptId]:
        """Return the attempts that still lack ranks of a node; forget the others."""
        self._found = {name: c for name, c in self._found.items() if now_s - c.reported_s <= STALE_S}
        return iter([capture.attempt for capture in self._found.values()])

    def ranks_of(self, attempt: str) -> set[int]:
        """Return the ranks that are known to have captured an attempt."""
        capture = self._found.get(attempt)
        return set() if capture is None else capture.ranks

    def since_s(self, attempt: str, default_s: float) -> float:
        """Return the time of the first report of an attempt."""
        capture = self._found.get(attempt)
        return default_s if capture is None else min(capture.since_s, default_s)

    def has_passed(self, progress: RankProgress, step: int) -> bool:
        """Return True if a rank that has not captured `step` never will: steps rise, and it is beyond it.

        One proof: its optimizers have made more steps than those of a rank that had saved the step, and all
        ranks make the same number.
        """
        if progress.saved_step == step:
            return False
        between = progress.saved_before is not None and progress.saved_before < step < progress.saved_step
        went_on = progress.step > step and progress.saved_step < step
        updates = self._updates.get(step, 0)
        trained_on = progress.saved_step < step and 0 < updates < progress.updates
        return between or went_on or trained_on or (progress.is_over and progress.saved_step < step)


def _limit(found: dict[str, _Capture] | dict[int, int], most: int) -> None:
    """Forget the oldest ones."""
    while len(found) > most:
        del found[next(iter(found))]  # type: ignore[arg-type]
