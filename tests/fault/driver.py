"""A launcher in a process of its own, in the cluster of RAY_ADDRESS, as somebody's training script is.

`python -m tests.fault.driver LAUNCH` (JSON) trains, starts the group again after a failure up to `restarts`
times, and prints the name of each error that ended a group.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray

from jobs.demo.local_cluster import LocalCluster, kill_family
from ray_ckpt.errors import CheckpointError
from tests.fault.ranks import Group, Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The training that a launcher starts; `nodes` are node ids, one rank each."""

    job: dict[str, Any]
    nodes: tuple[str, ...]
    restarts: int = 3


class Driver:
    """A running launcher, seen from the test."""

    def __init__(self, cluster: LocalCluster, job: Job, nodes: tuple[str, ...], **options: Any) -> None:
        launch = Launch(job=asdict(job), nodes=tuple(cluster.nodes[n].node_id for n in nodes), **options)
        env = {**os.environ, "RAY_ADDRESS": cluster.address}
        command = [sys.executable, "-m", "tests.fault.driver", json.dumps(asdict(launch))]
        self.log = Path(job.journal).with_name(f"driver-{uuid.uuid4().hex}.log")
        with self.log.open("wb") as out:
            root = Path(__file__).parents[2]
            self.process = subprocess.Popen(command, cwd=root, env=env, stdout=out, stderr=out)

    @property
    def errors(self) -> list[str]:
        """Names of the errors that ended its groups so far."""
        lines = self.log.read_text().splitlines()
        return [line.split()[1] for line in lines if line.startswith("ended: ")]

    def ended(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        if not self.ended():
            kill_family(self.process.pid)
        self.process.wait()


@contextmanager
def driver(cluster: LocalCluster, job: Job, nodes: tuple[str, ...], **options: Any) -> Iterator[Driver]:
    """Start a launcher that ends with the block at the latest."""
    launched = Driver(cluster, job, nodes, **options)
    try:
        yield launched
    finally:
        launched.kill()


def main(launch: Launch) -> int:
    ray.init(logging_level="warning")
    job = Job(**launch.job)
    for _ in range(1 + launch.restarts):
        group = Group(launch.nodes)
        group.start(job)
        try:
            group.result(timeout_s=None)
        except (CheckpointError, ray.exceptions.RayError) as error:
            print(f"ended: {type(error).__name__} {error}", flush=True)
        else:
            print("ended: done", flush=True)
            return 0
        finally:
            group.stop()
    return 1


if __name__ == "__main__":
    sys.exit(main(Launch(**json.loads(sys.argv[1]))))
