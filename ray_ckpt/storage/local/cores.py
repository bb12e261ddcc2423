"""Cores that are available to this process."""

from __future__ import annotations

import contextlib
import os

from ray_ckpt.storage.local.memory import cgroups


def available_cores() -> float:
    """Return the cores that this process may use, by its affinity and by the CPU quotas of its cgroups.

    Limits of Kubernetes are quotas: the affinity then has all cores of the machine.
    """
    cores = float(len(os.sched_getaffinity(0)))
    for folder, is_v2 in cgroups("cpu"):
        with contextlib.suppress(OSError, ValueError):
            if is_v2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if float(quota) > 0:  # "max", or -1: no limit
                cores = min(cores, float(quota) / float(period))
    return cores
