"""Which commits go to the storage path because it is time.

Decided from the log alone, by the order and the times of all commits, so that a restarted coordinator goes on
the same, also with what the one before it left half uploaded.
"""

from __future__ import annotations

from collections.abc import Mapping

from ray_ckpt.types import CheckpointInfo, Level


class DrainPolicy:
    """Told of every commit in log order, those of earlier coordinators included."""

    def __init__(self) -> None:
        self._count = 0
        self._last_s: float | None = None  # commit time of the last one that was due, or of the first one
        self._due: list[str] = []  # attempts that may still have to be drained; bounded by what is live

    def committed(self, checkpoint: CheckpointInfo, *, every: int, every_s: float | None) -> bool:
        """Whether this commit is due: each `every`-th, and after `every_s` seconds without.

        A last one far ahead in time was committed by a clock that was wrong.
        """
        now_s = checkpoint.committed_at_s
        last_s = now_s if self._last_s is None else self._last_s
        self._count += 1
        is_due = self._count % every == 0 or (every_s is not None and abs(now_s - last_s) >= every_s)
        self._last_s = now_s if is_due else last_s
        if is_due:
            self._due.append(checkpoint.id.attempt)
        return is_due

    def undrained(self, checkpoints: Mapping[str, CheckpointInfo]) -> tuple[CheckpointInfo, ...]:
        """Due ones that are live and not durable, newest first."""
        due = [checkpoints[name] for name in self._due]
        due = [c for c in due if c.state == "live" and c.level < Level.DURABLE]
        self._due = [c.id.attempt for c in due]
        return tuple(reversed(due))
