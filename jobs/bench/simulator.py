"""Speed of the simulator: random schedules with all faults and with the checks after each event."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count

from jobs.bench.context import Context
from jobs.bench.row import Row, measure
from ray_ckpt.testing.schedules import NUM_EVENTS, play

NUM_SCHEDULES = 50  # per sample; schedules differ
QUICK_SCHEDULES = 2


def rows(context: Context) -> Iterator[Row]:
    num_schedules, seeds = QUICK_SCHEDULES if context.quick else NUM_SCHEDULES, count()

    def schedule_ms() -> float:
        started_s = time.process_time()
        for _ in range(num_schedules):
            play(next(seeds))
        return (time.process_time() - started_s) * 1e3 / num_schedules

    what = f"CPU of a schedule of {NUM_EVENTS} events with its checks, mean of {num_schedules}"
    yield measure("schedule", what, "ms", schedule_ms, repeat=context.repeat)
