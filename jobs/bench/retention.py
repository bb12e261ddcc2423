"""Cost of retention over a long run: of its decisions, and of their effects on nodes."""

from __future__ import annotations

import time
from collections.abc import Iterator

from jobs.bench.context import Context
from jobs.bench.long_log import EVERY_S, EVERY_STEPS, LongLog
from jobs.bench.row import Row, measure
from ray_ckpt.config import RunOptions
from ray_ckpt.core.retention import (
    RetentionView,
    choose_evictions,
    choose_evictions_for_space,
    decide,
    policies_of,
)

NUM_CHECKPOINTS = 100_000
QUICK_CHECKPOINTS = 2_000
LIMIT_S = 1.0  # the coordinator does nothing else meanwhile
DISK_BYTES = 10**16  # disk is full, so that retention also has to free space


def rows(context: Context, num_checkpoints: int = 0) -> Iterator[Row]:
    """Measure one decision from the history, with every policy in use, and the effects of the decision."""
    num_checkpoints = num_checkpoints or (QUICK_CHECKPOINTS if context.quick else NUM_CHECKPOINTS)
    log = LongLog(num_checkpoints)
    options = RunOptions(
        keep_every=10 * EVERY_STEPS,
        keep_every_s=10 * EVERY_S,
        keep_best=("loss", "min", 10),
        keep_milestones=(0.25, 0.5, 0.75),
        total_steps=num_checkpoints * EVERY_STEPS,
        keep_epochs=True,
        ttl_s=num_checkpoints * EVERY_S / 2,
    )

    def decide_s() -> float:
        started_s = time.process_time()
        view = RetentionView(live=log.history.live(), lineage=log.history.lineage(), now_s=log.now_s)
        decisions = decide(view, policies_of(options))
        evicted = choose_evictions(view, keep_local=options.keep_local)
        for_space = choose_evictions_for_space(
            view,
            held_bytes={c.id.attempt: c.size_bytes // c.num_nodes for c in view.live},
            free_bytes=0,
            total_bytes=DISK_BYTES,
            high_watermark=options.high_watermark,
            low_watermark=options.low_watermark,
        )
        used_s = time.process_time() - started_s
        assert len(decisions) == num_checkpoints and evicted and for_space
        return used_s

    what = f"CPU of retention and eviction over {num_checkpoints:,} checkpoints, all policies"
    yield measure("retention", what, "s", decide_s, repeat=context.repeat, limit=LIMIT_S)
