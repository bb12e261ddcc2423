"""Every private import from Ray Train, in one place; `tests/cluster/test_ray_compat.py` holds its contract.

Tested with Ray 2.60. The callback base classes are DeveloperAPI but only importable from `_internal`.
"""

from __future__ import annotations

from ray.train.v2._internal.execution.callback import (
    ControllerCallback,
    WorkerCallback,
    WorkerGroupCallback,
)

__all__ = ["ControllerCallback", "WorkerCallback", "WorkerGroupCallback"]
