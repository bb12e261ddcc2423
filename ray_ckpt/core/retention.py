"""Which checkpoints stay. Decided from records alone, so that a restart decides the same."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ray_ckpt.types import CheckpointInfo, Level


@dataclass(frozen=True, slots=True, kw_only=True)
class Retirement:
    attempt: str
    reason: str


def choose_retirements(
    *,
    live: Sequence[CheckpointInfo],
    lineage: Sequence[CheckpointInfo],
    keep_last: int,
    busy: Collection[str],
) -> tuple[Retirement, ...]:
    """What may go, oldest first. `live` and `lineage` are in log order; `busy` attempts are never chosen.

    Stays: the last `keep_last` of the lineage, and for each level the newest that has reached it, so that
    no level loses its protection before a newer checkpoint offers it. Of the checkpoints off the lineage
    (their session was superseded by one that resumed from earlier) only the newest of a level that the
    lineage has not reached stays.
    """
    kept = {c.id.attempt for c in lineage[-keep_last:]} | set(busy)
    on_lineage = {c.id.attempt for c in lineage}
    for level in Level:
        reached = [c for c in lineage if c.level >= level]
        others = [c for c in live if c.level >= level]
        if newest := (reached or others)[-1:]:
            kept.add(newest[0].id.attempt)
    return tuple(
        Retirement(
            attempt=c.id.attempt,
            reason=f"older than the last {keep_last}" if c.id.attempt in on_lineage else "off the lineage",
        )
        for c in live
        if c.id.attempt not in kept
    )
