"""Durations of saves, for the metrics and for decisions that depend on the durations."""

from __future__ import annotations

import statistics
from collections import deque

from ray_ckpt import telemetry
from ray_ckpt.core.attempts import Attempt
from ray_ckpt.core.context import Context
from ray_ckpt.types import CheckpointInfo

LATENCIES = 16  # the last commits whose latencies count


class SaveTimes:
    """Durations of the last saves, over all sessions of this coordinator."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._latencies_s: deque[float] = deque(maxlen=LATENCIES)
        self.last_save_s = 0.0  # from the last save's start to the save's commit; 0: no save yet

    @property
    def latency_s(self) -> float:
        """Approximate seconds from a capture to its commit; 0 before the first commit.

        The first report of an attempt comes when a node has written its part. The copies after that report
        take about as long as the writing before it, so the value is twice the median of the last LATENCIES.
        """
        return 2 * statistics.median(self._latencies_s) if self._latencies_s else 0.0

    def committed(self, attempt: Attempt, checkpoint: CheckpointInfo) -> None:
        """Measure a save whose commit is now in the log."""
        now_s, measure = self._context.now_s, self._context.measure
        self._latencies_s.append(now_s - attempt.started_s)
        phases_s = {
            "capture": checkpoint.capture_s,
            "local": checkpoint.local_s,
            "replicate": checkpoint.replicate_s or 0.0,
            "commit": now_s - attempt.commit_s,
        }
        measure(telemetry.SAVES, outcome="committed")
        if checkpoint.stall_s is not None:
            measure(telemetry.STALL, checkpoint.stall_s)
        for phase, time_s in phases_s.items():
            if time_s is not None:
                measure(telemetry.PHASE, time_s, phase=phase)
        self.last_save_s = sum(time_s or 0.0 for time_s in phases_s.values())
