"""Ends a worker of Ray Train, alone or with its node, once in a run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import ray

NODE_S = 60.0  # until the node of this process is killed


def end_once(marker: Path, *, with_node: bool) -> None:
    """Kill this process, or name its node in `marker` and wait to be killed; nothing if `marker` is there."""
    if marker.exists():
        return
    if with_node:
        whole = marker.with_suffix(".tmp")
        whole.write_text(ray.get_runtime_context().get_node_id())
        whole.rename(marker)
        time.sleep(NODE_S)
    marker.write_text("killed")
    os.kill(os.getpid(), signal.SIGKILL)
