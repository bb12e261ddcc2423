"""The own states of ranks after their last steps, which nodes keep for a salvage (PROTOCOL.md section 4)."""

from __future__ import annotations

from typing import TypeVar

from ray_ckpt.core.values import SessionPlan
from ray_ckpt.format.names import make_attempt
from ray_ckpt.types import AttemptId

KEPT_STEPS = 2  # steps for each rank: ranks of a group whose collective operations fail are a step apart
SALVAGE_TRY = 1 << 20  # the `try` of a salvage's attempt; no rank calls `save` so often for one step

T = TypeVar("T")


def salvage_of(plan: SessionPlan, step: int) -> AttemptId:
    """Return the id of the salvage of a step of a session."""
    return make_attempt(
        run_uid=plan.run_uid, epoch=plan.epoch, session=plan.session, step=step, attempt=SALVAGE_TRY
    )


def keep(states: dict[int, dict[int, T]], rank: int, step: int, state: T) -> None:
    """Add the state of a rank after a step; only the newest KEPT_STEPS steps of the rank stay."""
    of_rank = states.setdefault(rank, {})
    of_rank[step] = state
    while len(of_rank) > KEPT_STEPS:
        del of_rank[min(of_rank)]
