"""The demo with S3: train, lose the cluster with all its disks, continue in a new cluster from the bucket.

    python -m jobs.demo.s3

The demo starts an S3 server on this machine and, in another process, a Ray cluster with a trainer. This other
process and its descendants are killed during the run, and every staging folder is deleted, so that only the
bucket is left. The exit code is 1 if the final state of the run differs from that of a run without a loss.
"""

from __future__ import annotations

import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from jobs.demo import s3_server
from jobs.demo.comparison import (
    CALM,
    POLL_S,
    STEPS,
    Watch,
    compare,
    conclude,
    console,
    make_parser,
    prepare,
    status_of,
    train,
)
from jobs.demo.local_cluster import LocalCluster, kill_family
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.location import Location
from ray_ckpt.types import Level, RankRestore

STORMY = "gpt-cluster-lost"
NODES = ("node-a", "node-b")
OPTIONS = "--every-steps 10 --remote-every 2"  # the newest checkpoint is often on the nodes only, and is lost
KILL_AFTER_STEP = 53
DURABLE_STEP = 40  # its checkpoint is in the bucket when the cluster is killed; that of step 50 is not
BUCKET = "checkpoints"
START_S = 120.0  # time limit for the start of a cluster
DURABLE_S = 60.0  # time limit for a drain of some MB

_CLUSTERS: list[LocalCluster] = []  # of a process that runs a cluster
Training: TypeAlias = "Future[tuple[RankRestore, ...]]"
"""Its result describes the restore of the last group of the run."""


class TrainingFailed(Exception):
    """The cluster's process did not end the run."""


class Cluster:
    """A process with a cluster of a head and two nodes, which trains one run after another."""

    def __init__(self, out: Path, storage_path: str, log: Path) -> None:
        self.log = log
        self._out, self._storage_path = out, storage_path
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        self._pid: int | None = self._pool.submit(os.getpid).result(START_S)
        self._started = self._pool.submit(_start, out, log)

    def wait_up(self) -> None:
        try:
            self._started.result(START_S)
        except Exception as error:
            raise TrainingFailed(f"the cluster has not started; see {self.log}") from error

    def train(self, name: str) -> Training:
        return self._pool.submit(_train, self._out, self._storage_path, name)

    def kill(self) -> None:
        """Kill the process and its descendants with SIGKILL; later calls do nothing."""
        pid, self._pid = self._pid, None
        if pid is not None:
            kill_family(pid)
            self._pool.shutdown(wait=False, cancel_futures=True)


def _start(out: Path, log: Path) -> None:
    """Start a cluster that lives as long as this process, with all output in `log`."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    _CLUSTERS.append(LocalCluster(out / "staging", NODES))


def _train(out: Path, storage_path: str, name: str) -> tuple[RankRestore, ...]:
    train(out, storage_path, name, OPTIONS)
    return status_of(storage_path, name).restores


@contextmanager
def cluster(out: Path, storage_path: str, log: Path) -> Iterator[Cluster]:
    started = time.monotonic()
    console.print("Starting a Ray cluster: a head and two nodes, each with its own disk folder ...")
    found = Cluster(out, storage_path, log)
    try:
        found.wait_up()
        console.print(f"It is up after {time.monotonic() - started:.0f} s.\n")
        yield found
    finally:
        found.kill()


def follow(watch: Watch, training: Training, log: Path, until: int = STEPS) -> None:
    """Watch until step `until` or the end of the training. Raise TrainingFailed if it ends early."""
    watch.is_training = lambda: not training.done()
    watch.follow(until)
    if watch.step < until or (training.done() and training.exception() is not None):
        raise TrainingFailed(f"{watch.run} ended at step {watch.step}; see {log}")


def wait_durable(run: str, step: int, log: Path) -> None:
    """Wait until a checkpoint of `step` or a later step is in the bucket."""
    deadline_s = time.monotonic() + DURABLE_S
    while (newest := Catalog(run).newest(Level.DURABLE)) is None or newest.info.step < step:
        if time.monotonic() > deadline_s:
            raise TrainingFailed(f"step {step} of {run} did not become durable; see {log}")
        time.sleep(POLL_S)


def main(argv: list[str] | None = None) -> int:
    parser = make_parser("python -m jobs.demo.s3", __doc__)
    parser.add_argument(
        "--server",
        choices=s3_server.KINDS,
        default="ministack" if s3_server.tool("ministack") else "strict",
        help="the S3 server (default here: %(default)s)",
    )
    arguments = parser.parse_args(argv)
    out = arguments.out.absolute()
    prepare(out)
    started_s = time.monotonic()
    console.rule("[bold]ray_ckpt: lose the cluster, keep the bucket")
    with s3_server.running(arguments.server, BUCKET) as server:
        console.print(f"An S3 server, {arguments.server}, listens at {server.endpoint}.")
        try:
            failures = play(out, server.url("runs"))
        except TrainingFailed as error:
            failures = [str(error)]
        if code := conclude(failures, started_s):
            return code
        run = str(Location.parse(server.url("runs")) / STORMY)
        return max(show("ls", run), show("verify", run))


def play(out: Path, storage_path: str) -> list[str]:
    """Play both runs; return a line for each thing that does not hold in the end."""
    with cluster(out, storage_path, out / "cluster-1.log") as first:
        console.rule("1. A calm run", align="left")
        follow(Watch(out, storage_path, CALM), first.train(CALM), first.log)
        console.print()
        console.rule("2. The same run, and the whole cluster dies", align="left")
        watch = Watch(out, storage_path, STORMY)
        follow(watch, first.train(STORMY), first.log, until=KILL_AFTER_STEP)
        wait_durable(watch.run, DURABLE_STEP, first.log)
        first.kill()
        lost_at_s = time.time()
        watch.print_log()
        shutil.rmtree(out / "staging")
    console.print(
        f"  [bold red]✗ step {watch.step}: kill -9 of everything: head, nodes, coordinator, agents, trainer; "
        "and every staging folder is deleted.[/]\n"
    )
    console.rule("3. A new cluster, and the bucket", align="left")
    left = Catalog(watch.run).newest(Level.DURABLE)
    assert left is not None
    console.print(
        f"What is left is the bucket, with step {left.info.step}; later ones were on the nodes only."
    )
    with cluster(out, storage_path, out / "cluster-2.log") as second:
        training = second.train(STORMY)
        follow(watch, training, second.log)
    console.print()
    console.rule("4. Was anything lost?", align="left")
    tiers, failures = compare(out, storage_path, STORMY, training.result(), lost_at_s)
    if tiers != {"remote"}:
        failures.append(f"the state should have come from the bucket alone, but bytes came from {tiers}")
    return failures


def show(command: str, run: str) -> int:
    """Run `ray-ckpt` on a run in the bucket from this process, outside any cluster; return the exit code."""
    arguments = ["ray-ckpt", command, run]
    console.print(f"[bold]$ {shlex.join(arguments)}[/]")
    return subprocess.run([sys.executable, "-m", "ray_ckpt.cli", *arguments[1:]]).returncode


if __name__ == "__main__":
    sys.exit(main())
