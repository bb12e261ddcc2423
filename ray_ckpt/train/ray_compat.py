"""Every private import from Ray Train, in one place; `tests/train/test_ray_compat.py` holds its contract.

Ray 2.56 to 2.60. Before 2.56 an error in `after_controller_start` does not reach the driver as what it is,
and before 2.55 `before_controller_shutdown` is not awaited. The callback base classes are DeveloperAPI but
only importable from `_internal`.
"""

from __future__ import annotations

from ray.train.v2._internal.execution.callback import (
    ControllerCallback,
    WorkerCallback,
    WorkerGroupCallback,
)
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2._internal.execution.controller.state import ErroredState, ShuttingDownState

__all__ = ["ControllerCallback", "WorkerCallback", "WorkerGroupCallback", "has_failed", "has_validation"]


def has_failed(state: object) -> bool:
    """Whether a controller that comes into that state gives the run up."""
    return isinstance(state, ShuttingDownState) and isinstance(state.next_state, ErroredState)


def has_validation() -> bool:
    """Whether the trainer of this worker has a ValidationConfig; `report` refuses to validate without one."""
    return bool(get_train_context().has_validation_fn)
