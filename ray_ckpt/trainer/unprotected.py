"""The limit on training without a new checkpoint.

A save that fails never stops training by itself. With `unprotected_after` training ends when it has
continued without a new checkpoint for the given time or number of failed saves, so that a failure does not
cost more than the user accepts.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

from ray_ckpt.errors import Unprotected

log = logging.getLogger("ray_ckpt")

MAX_COUNTED = 10_000  # failed saves; a higher limit is lowered to this number


class UnprotectedGuard:
    """Counts failed saves, and time since the last checkpoint, on one rank after the restore."""

    def __init__(self, limit: timedelta | int | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the option `unprotected_after` as `limit`."""
        self._limit = limit
        self._clock = clock
        self._failed: deque[int] = deque(maxlen=MAX_COUNTED)
        self._reason = ""
        self.renew()

    def renew(self, step: int = 0) -> None:
        """Restart the time: the save of `step` has become a checkpoint, or training begins."""
        self._since_s = self._clock()
        self._failed = deque((s for s in self._failed if s > step), MAX_COUNTED)
        self._has_warned = False

    def failed(self, step: int, reason: str) -> None:
        """Count the save of `step`, which was skipped or dropped. Calls may come late and in any order."""
        self._failed.append(step)
        self._reason = reason

    def check(self, step: int) -> None:
        """Warn once when half of the limit is used up; raise Unprotected at the limit. Call between steps."""
        if self._limit is None:
            return
        used = self._used()
        if used < 0.5:
            return
        what = f"{len(self._failed)} saves have failed and {self._clock() - self._since_s:.0f} s have passed"
        what += " since the newest checkpoint"
        why = f"; the last one: {self._reason}" if self._failed else ""
        if used >= 1.0:
            raise Unprotected(
                f"Training ends at step {step}: {what}, and unprotected_after is {self._limit}{why}.",
                hint="Remove the cause that keeps checkpoints from being saved (see the warnings in this "
                "log), then start again: training continues from the newest checkpoint.",
                step=step,
            )
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s; training ends when unprotected_after (%s) is over%s", what, self._limit, why)

    def _used(self) -> float:
        """Return the fraction of the limit that is used up."""
        if isinstance(self._limit, timedelta):
            return (self._clock() - self._since_s) / self._limit.total_seconds()
        assert self._limit is not None
        return len(self._failed) / min(self._limit, MAX_COUNTED)
