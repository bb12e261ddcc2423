"""The demo with S3: train, lose the cluster with all its disks, continue in a new cluster from the bucket.

    python -m jobs.demo.s3

The demo starts an S3 server on this machine and, in another process, a Ray cluster with a trainer. This other
process and its descendants are killed during the run, and every staging folder is deleted, so that only the
bucket is left. The exit code is 1 if the final state of the run differs from that of a run without a loss.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ray
from rich.table import Table

from jobs.demo import s3_server
from jobs.demo.comparison import (
    CALM,
    POLL_S,
    STEP_TIME_S,
    STEPS,
    TIER_NAMES,
    bytes_by_tier,
    compare_bits,
    console,
    follow,
    prepare,
    read_history,
)
from jobs.demo.local_cluster import LocalCluster, kill_family
from jobs.train_gpt import build_trainer, parse_args
from ray_ckpt.actors.client import coordinator
from ray_ckpt.actors.messages import RunSpec
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.config import RunOptions
from ray_ckpt.errors import CheckpointError
from ray_ckpt.location import Location
from ray_ckpt.types import Level, RankRestore

STORMY = "gpt-cluster-lost"
NODES = ("node-a", "node-b")
REMOTE_EVERY = 2  # checkpoints; the newest one is often on the nodes only, and is lost with the nodes
EVERY_STEPS = 10
KILL_AFTER_STEP = 53
DURABLE_STEP = 40  # its checkpoint is in the bucket when the cluster is killed; that of step 50 is not
BUCKET = "checkpoints"
START_S = 120.0  # time limit for the start of a cluster
DURABLE_S = 60.0  # time limit for a drain of some MB
LOOK_S = 1.0  # interval between two reads of the log in the bucket


class TrainingFailed(Exception):
    """The cluster's process did not end the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A run has ended; the fields describe the restore of its last group."""

    name: str
    restores: tuple[RankRestore, ...]


class Cluster:
    """A cluster of a head and two nodes, in another process, that trains one run after another."""

    def __init__(self, out: Path, storage_path: str, names: Sequence[str], log: Path) -> None:
        self.log = log
        self.done: dict[str, Done] = {}
        spawn = multiprocessing.get_context("spawn")
        self._connection, there = spawn.Pipe(duplex=False)
        process = spawn.Process(target=_run, args=(there, out, storage_path, tuple(names), log))
        process.start()
        self._pid = process.pid
        there.close()

    def wait_up(self) -> None:
        try:
            if self._connection.poll(START_S):
                self._connection.recv()
                return
        except EOFError:
            pass
        raise TrainingFailed(f"the cluster has not started; see {self.log}")

    def is_training(self, name: str) -> bool:
        try:
            while self._connection.poll():
                done = self._connection.recv()
                self.done[done.name] = done
        except EOFError:
            return False
        return name not in self.done

    def kill(self) -> None:
        """Kill the process and its descendants with SIGKILL; later calls do nothing."""
        pid, self._pid = self._pid, None
        if pid is not None:
            kill_family(pid)


def _run(connection: Connection, out: Path, storage_path: str, names: Sequence[str], log: Path) -> None:
    """Run a cluster and its trainings in this process, with all output in `log`."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_ACTOR_RECONCILIATION", "0")
    with LocalCluster(out / "staging", NODES):
        connection.send("up")
        for name in names:
            options = f"--name {name} --steps {STEPS} --workers {len(NODES)} --every-steps {EVERY_STEPS}"
            options += f" --remote-every {REMOTE_EVERY} --step-time-s {STEP_TIME_S} --eval-every {STEPS}"
            paths = ["--storage-path", storage_path, "--history", str(out / f"{name}.jsonl")]
            build_trainer(parse_args([*options.split(), *paths])).fit()
            spec = RunSpec(name=name, storage_path=storage_path, options=RunOptions())
            connection.send(Done(name=name, restores=ray.get(coordinator().status.remote(spec.key)).restores))


@contextmanager
def cluster(out: Path, storage_path: str, names: Sequence[str], log: Path) -> Iterator[Cluster]:
    started = time.monotonic()
    console.print("Starting a Ray cluster: a head and two nodes, each with its own disk folder ...")
    found = Cluster(out, storage_path, names, log)
    try:
        found.wait_up()
        console.print(f"It is up after {time.monotonic() - started:.0f} s.\n")
        yield found
    finally:
        found.kill()


class Watch:
    """A watch on a run from outside: steps through the history file, checkpoints through the bucket only."""

    def __init__(self, cluster: Cluster, out: Path, storage_path: str, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.run = str(Location.parse(storage_path) / name)
        self.history = out / f"{name}.jsonl"
        self.step = 0
        self._next_seq = 0
        self._looked_s = 0.0

    def is_running(self) -> bool:
        return self.cluster.is_training(self.name)

    def poll(self) -> list[str]:
        """Return new entries of the log as lines to print."""
        self.step = max((line["step"] for line in read_history(self.history)), default=0)
        if time.monotonic() < self._looked_s + LOOK_S:
            return []
        self._looked_s = time.monotonic()
        try:
            catalog = Catalog(self.run)
            events = catalog.events().to_pylist()
        except CheckpointError:
            return []  # the run has not begun yet
        sizes = {info.id.attempt: info.size_bytes for info in catalog.list(all=True)}
        fresh = [event for event in events if event["seq"] >= self._next_seq]
        self._next_seq += len(fresh)
        return [line for event in fresh if (line := describe(event, sizes.get(event["attempt"], 0)))]

    def follow(self, until: int = STEPS) -> None:
        """Wait until step `until` or the end of the training. Raise TrainingFailed if it ends early."""
        follow(self, until)
        self.print_new()
        if self.step < until or (until == STEPS and self.name not in self.cluster.done):
            raise TrainingFailed(f"{self.name} ended at step {self.step}; see {self.cluster.log}")

    def print_new(self) -> None:
        """Read steps and log again, and print the news."""
        self._looked_s = 0.0
        for line in self.poll():
            console.print("  " + line)

    def wait_durable(self, step: int) -> None:
        """Wait until a checkpoint of `step` or a later step is in the bucket."""
        deadline_s = time.monotonic() + DURABLE_S
        while (newest := Catalog(self.run).newest(Level.DURABLE)) is None or newest.info.step < step:
            if time.monotonic() > deadline_s:
                raise TrainingFailed(
                    f"step {step} of {self.name} did not become durable; see {self.cluster.log}"
                )
            time.sleep(POLL_S)


def describe(event: Mapping[str, Any], size_bytes: int) -> str:
    """Return a row of the log as a line, or an empty text."""
    match event["op"]:
        case "commit":
            return f"[green]●[/] step {event['step']:3d}  {size_bytes / 1e6:.1f} MB {event['level']}"
        case "promote" if event["level"] == Level.DURABLE.label:
            return f"[blue]◆[/] step {event['step']:3d}  is in the bucket"
        case "retired":
            return f"[dim]○ step {event['step']:3d}  deleted: {event['text']}[/]"
        case "session" if event["text"].startswith("from step"):
            return f"[yellow]▶[/] the group starts again {event['text']}"
    return ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jobs.demo.s3", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="folder for staging and logs, wiped"
    )
    parser.add_argument(
        "--server",
        choices=s3_server.KINDS,
        default="ministack" if s3_server.tool("ministack") else "strict",
        help="the S3 server (default here: %(default)s)",
    )
    arguments = parser.parse_args(argv)
    out = arguments.out.absolute()
    prepare(out)
    started = time.monotonic()
    console.rule("[bold]ray_ckpt: lose the cluster, keep the bucket")
    with s3_server.running(arguments.server, BUCKET) as server:
        console.print(f"An S3 server, {arguments.server}, listens at {server.endpoint}.")
        try:
            failures = play(out, server.url("runs"))
        except TrainingFailed as error:
            failures = [str(error)]
        console.print(f"\nThe demo took {time.monotonic() - started:.0f} s.")
        for failure in failures:
            console.print(f"[red]✗ {failure}[/]")
        if failures:
            return 1
        console.print(
            "[bold green]✓ Every loss and every bit of the final state are those of the calm run.[/]\n"
        )
        run = str(Location.parse(server.url("runs")) / STORMY)
        return max(show("ls", run), show("verify", run))


def play(out: Path, storage_path: str) -> list[str]:
    """Play both runs; return a line for each thing that does not hold in the end."""
    with cluster(out, storage_path, (CALM, STORMY), out / "cluster-1.log") as first:
        console.rule("1. A calm run", align="left")
        Watch(first, out, storage_path, CALM).follow()
        console.print()
        console.rule("2. The same run, and the whole cluster dies", align="left")
        watch = Watch(first, out, storage_path, STORMY)
        watch.follow(until=KILL_AFTER_STEP)
        watch.wait_durable(DURABLE_STEP)
        first.kill()
        lost_at = time.time()
        watch.print_new()
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
    with cluster(out, storage_path, (STORMY,), out / "cluster-2.log") as watch.cluster:
        watch.follow()
    console.print()
    console.rule("4. Was anything lost?", align="left")
    return compare(out, storage_path, watch.cluster.done[STORMY].restores, lost_at)


def compare(out: Path, storage_path: str, restores: Sequence[RankRestore], lost_at: float) -> list[str]:
    """Check everything that should hold after the loss; return a line for each thing that does not."""
    tiers = bytes_by_tier(restores)
    steps = read_history(out / f"{STORMY}.jsonl")
    again = [line["time"] - lost_at for line in steps if line["time"] > lost_at]
    seconds = max((rank.seconds for rank in restores), default=0.0)
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_row("reading and verifying its state took", f"{seconds * 1e3:.0f} ms")
    table.add_row("the first new step was done", f"{min(again, default=float('nan')):.1f} s after the loss")
    every = EVERY_STEPS * REMOTE_EVERY
    table.add_row("steps done twice", f"{len(steps) - STEPS} (one in the bucket every {every} steps)")
    for tier, size in sorted(tiers.items()):
        table.add_row(f"restored from {TIER_NAMES[tier]}", f"{size / 1e6:.2f} MB")
    failures = compare_bits(table, out, Location.parse(storage_path), STORMY)
    console.print(table)
    if set(tiers) != {"remote"}:
        failures.append(f"the state should have come from the bucket alone, but bytes came from {tiers}")
    return failures


def show(command: str, run: str) -> int:
    """Run `ray-ckpt` on a run in the bucket from this process, outside any cluster; return the exit code."""
    arguments = ["ray-ckpt", command, run]
    console.print(f"[bold]$ {shlex.join(arguments)}[/]")
    return subprocess.run([sys.executable, "-m", "ray_ckpt.cli", *arguments[1:]]).returncode


if __name__ == "__main__":
    sys.exit(main())
