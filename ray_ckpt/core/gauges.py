"""Metrics of a run's state: the steps at risk, and the lag of each level behind training."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ray_ckpt import telemetry as t
from ray_ckpt.core.history import RunHistory
from ray_ckpt.types import Exposure, Level


def gauges(
    *,
    history: RunHistory,
    is_active: bool,
    last_step: int,
    wall_s: float,
    exposure: Sequence[Exposure],
) -> Iterator[t.Sample]:
    """Yield the samples of a run at Unix time `wall_s`.

    `last_step` is the last step that a rank has completed (0: none). If no checkpoint has reached a level,
    the lag of the level is all steps, and the time since the session opened.
    """
    session = history.session
    yield t.Sample(metric=t.ACTIVE, value=float(is_active))
    yield t.Sample(metric=t.SESSION, value=session.session if session else 0)
    yield t.Sample(metric=t.SESSION_AGE, value=max(0.0, wall_s - session.opened_at_s) if session else 0.0)
    lineage = history.lineage()
    last_step = max((last_step, *(c.step for c in lineage[-1:])))
    yield t.Sample(metric=t.STEP, value=last_step)
    for level in Level:
        newest = next((c for c in reversed(lineage) if c.level >= level), None)
        step = newest.step if newest else 0
        since_s = newest.committed_at_s if newest else session.opened_at_s if session else wall_s
        labels = {"level": level.label}
        yield t.Sample(metric=t.SAVED_STEP, value=step, labels=labels)
        yield t.Sample(metric=t.LAG_STEPS, value=max(0, last_step - step), labels=labels)
        yield t.Sample(metric=t.LAG_SECONDS, value=max(0.0, wall_s - since_s), labels=labels)
    if history.drilled_at_s is not None:
        yield t.Sample(metric=t.DRILLED_AT, value=history.drilled_at_s)
    yield from _at_risk({node.node_id: _risk(node) for node in exposure})


def _risk(node: Exposure) -> float:
    return node.steps_at_risk if node.step is not None else math.inf


def _at_risk(risks: Mapping[str, float]) -> Iterator[t.Sample]:
    """Yield the steps at risk of the worst nodes, and the spread over all nodes; -1 for all steps."""
    worst = heapq.nlargest(t.WORST_NODES, risks.items(), key=lambda item: item[1])
    nodes = (t.Sample(metric=t.AT_RISK, value=risk, labels={"node": node}) for node, risk in worst)
    for sample in (*nodes, *t.spread(t.NODES_AT_RISK, risks.values())):
        yield replace(sample, value=-1.0) if math.isinf(sample.value) else sample
