"""Programs that train in a cluster of a test, each a process of its own, as a user's script is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jobs.demo.local_cluster import LocalCluster, kill_family

PROJECT = Path(__file__).parents[2]


@contextmanager
def program(
    cluster: LocalCluster, log: Path, module: str, *arguments: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `python -m module`, which ends with the block at the latest; its output is appended to `log`."""
    env = {**os.environ, "RAY_ADDRESS": cluster.address}
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], cwd=PROJECT, env=env, stdout=out, stderr=out
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            kill_family(process.pid)
        process.wait()
