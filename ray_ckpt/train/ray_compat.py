"""All private imports from Ray Train; `tests/train/test_ray_compat.py` tests their contract.

Supports Ray 2.56 to 2.60. Before 2.56 an error in `after_controller_start` reaches the driver as another
error, and before 2.55 `before_controller_shutdown` is not awaited. The callback base classes are
DeveloperAPI, but can only be imported from `_internal`.
"""

from __future__ import annotations

from typing import Any

from ray.train.v2._internal.execution.callback import (
    ControllerCallback,
    WorkerCallback,
    WorkerGroupCallback,
)
from ray.train.v2._internal.execution.context import get_train_context

__all__ = [
    "ControllerCallback",
    "WorkerCallback",
    "WorkerGroupCallback",
    "has_failed",
    "has_groups",
    "has_validation",
]


def has_failed(state: object) -> bool:
    """Return True if that state of a controller means that the run has failed."""
    # Imported here, since only the controller needs it and each worker would wait for it.
    from ray.train.v2._internal.execution.controller.state import ErroredState, ShuttingDownState

    return isinstance(state, ShuttingDownState) and isinstance(state.next_state, ErroredState)


def has_validation() -> bool:
    """Return True if this worker's trainer has a ValidationConfig, without which `report` cannot validate."""
    return bool(get_train_context().has_validation_fn)


def has_groups(train_run_context: Any) -> bool:
    """Return True if Ray Train runs replica groups and replaces single ones, as for torchft; Ray 2.60 can."""
    backend = getattr(train_run_context, "backend_config", None)
    return bool(getattr(getattr(backend, "backend_cls", None), "has_replica_groups", False))
