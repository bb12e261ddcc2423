"""The choice of the commits that are drained to the storage path regularly, by number or by time.

The choice depends only on the order and the times of all commits in the log. So a restarted coordinator
chooses the same commits, and continues the drains that the previous coordinator left unfinished.
"""

from __future__ import annotations

from collections.abc import Mapping

from ray_ckpt.types import CheckpointInfo, Level


class DrainPolicy:
    """The count of all commits in log order, including those of earlier coordinators."""

    def __init__(self) -> None:
        self._count = 0
        self._last_s: float | None = None  # Unix time of the last due commit, or of the first commit
        self._due: list[str] = []  # attempts that may still need a drain; at most the live ones remain

    def committed(self, checkpoint: CheckpointInfo, *, every: int | None, every_s: float | None) -> bool:
        """Count a commit; return True if it is due: every `every`-th commit, and one each `every_s` seconds.

        The time between the last due commit and this one counts in both directions, because a wrong clock may
        have given the last due commit a time far in the future.
        """
        now_s = checkpoint.committed_at_s
        last_s = now_s if self._last_s is None else self._last_s
        self._count += 1
        is_due = every is not None and self._count % every == 0
        is_due |= every_s is not None and abs(now_s - last_s) >= every_s
        self._last_s = now_s if is_due else last_s
        if is_due:
            self._due.append(checkpoint.id.attempt)
        return is_due

    def undrained(self, checkpoints: Mapping[str, CheckpointInfo]) -> tuple[CheckpointInfo, ...]:
        """Return the due checkpoints that are live and not durable, newest first."""
        due = [checkpoints[name] for name in self._due]
        due = [c for c in due if c.state == "live" and c.level < Level.DURABLE]
        self._due = [c.id.attempt for c in due]
        return tuple(reversed(due))
