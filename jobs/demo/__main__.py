"""The demo: train, lose a node during the run, continue, and compare bit for bit with a run without a loss.

    python -m jobs.demo

The demo starts a Ray cluster of a head and three nodes on this machine, trains the GPT of `jobs.train_gpt`
twice on two of the nodes, kills one node in the second run and wipes the disk of that node. The exit code is
1 if anything differs.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import ray
from rich.table import Table

from jobs.demo.comparison import (
    CALM,
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
from jobs.demo.local_cluster import LocalCluster
from jobs.train_gpt import build_trainer, parse_args
from ray_ckpt.actors.client import coordinator
from ray_ckpt.actors.messages import RunSpec, RunStatus
from ray_ckpt.config import RunOptions
from ray_ckpt.errors import CheckpointError
from ray_ckpt.format.records import Commit, LogRecord, Promote, Retired, Session
from ray_ckpt.types import Level

EVERY_STEPS = 5
DURABLE_STEPS = 10  # every second checkpoint is durable and kept: enough points to draw curves
KILL_AFTER_STEP = 43  # some steps after a checkpoint, so that the run must repeat steps
STORMY = "gpt-with-failure"


class Watch:
    """A watch on a run from outside: steps through the history file, checkpoints through the log."""

    def __init__(self, cluster: LocalCluster, out: Path, name: str, trainer: threading.Thread) -> None:
        self.cluster = cluster
        self.name = name
        self.history = out / f"{name}.jsonl"
        self.spec = RunSpec(name=name, storage_path=str(out / "storage"), options=RunOptions())
        self.step = 0
        self.status: RunStatus | None = None
        self.steps_of: dict[str, int] = {}
        self._trainer = trainer
        self._seen = 0

    def is_running(self) -> bool:
        return self._trainer.is_alive()

    def poll(self) -> list[str]:
        """Return new log records as lines to print."""
        self.step = max((line["step"] for line in read_history(self.history)), default=0)
        try:
            self.status = ray.get(coordinator().status.remote(self.spec.key), timeout=10)
        except (CheckpointError, ray.exceptions.RayError):
            return []  # the run is not open yet
        records = [r for r in self.status.records if r.seq >= self._seen]
        self._seen += len(records)
        return [line for r in records if (line := self.describe(r))]

    def describe(self, record: LogRecord) -> str:
        match record.op:
            case Commit(step=step, attempt=attempt, size_bytes=size, level=level):
                self.steps_of[attempt] = step
                label = Level(level).label
                return f"[green]●[/] step {step:3d}  {size / 1e6:.1f} MB {label}: {self.places(attempt)}"
            case Promote(attempt=attempt) if record.op.level >= Level.DURABLE:
                return f"[blue]◆[/] step {self.steps_of.get(attempt, 0):3d}  is on the storage path too"
            case Retired(attempt=attempt):
                return f"[dim]○ step {self.steps_of.get(attempt, 0):3d}  no longer needed, deleted[/]"
            case Session(session=number, resumed_from=attempt) if attempt:
                step = self.steps_of.get(attempt, 0)
                return f"[yellow]▶[/] session {number}: the group starts again from step {step}"
        return ""

    def places(self, attempt: str) -> str:
        status = self.status
        if status is None:
            return ""
        holders = status.holders.get(attempt, {})
        parts = []
        for node in status.nodes:
            copies = [n for n in holders.get(node.node_index, ()) if n != node.node_id]
            names = ", ".join(self.cluster.name_of(n) for n in copies) or "-"
            ranks = ", ".join(map(str, node.ranks))
            parts.append(f"shard {ranks} on {self.cluster.name_of(node.node_id)} (copy: {names})")
        return "; ".join(parts)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jobs.demo", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("demo-out"), help="folder for runs and staging, wiped"
    )
    out = parser.parse_args(argv).out.absolute()
    prepare(out)
    os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_ACTOR_RECONCILIATION", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "1")
    started = time.monotonic()
    console.rule("[bold]ray_ckpt: lose a node, lose nothing")
    console.print(
        "Starting a Ray cluster on this machine: a head and three nodes, each with its own disk folder ..."
    )
    with LocalCluster(out / "staging", ["node-a", "node-b", "node-c"]) as cluster:
        console.print(f"Four nodes are up after {time.monotonic() - started:.0f} s.\n")
        console.rule("1. A calm run", align="left")
        with training(cluster, out, CALM) as watch:
            follow(watch)
        console.print()
        console.rule("2. The same run, and a node dies", align="left")
        with training(cluster, out, STORMY) as watch:
            times = kill_in_the_middle(watch, cluster)
            follow(watch)
            times |= note_recovery(watch, times)
        status = watch.status
    assert status is not None
    console.print()
    console.rule("3. Was anything lost?", align="left")
    failures = compare(out, status, times)
    console.print(f"\nThe demo took {time.monotonic() - started:.0f} s.")
    if failures:
        for failure in failures:
            console.print(f"[red]✗ {failure}[/]")
        return 1
    console.print("[bold green]✓ Every loss and every bit of the final state are those of the calm run.[/]\n")
    run = os.path.relpath(out / "storage" / STORMY)
    console.print(f"Look at it yourself:  [bold].venv/bin/ray-ckpt ls {run}[/]")
    console.print(f"Check its bytes:      [bold].venv/bin/ray-ckpt verify {run}[/]")
    return 0


@contextmanager
def training(cluster: LocalCluster, out: Path, name: str) -> Iterator[Watch]:
    """Train in a thread while the caller watches."""
    options = f"--name {name} --steps {STEPS} --workers 2 --every-steps {EVERY_STEPS}"
    options += f" --remote-every {DURABLE_STEPS // EVERY_STEPS} --keep-every {DURABLE_STEPS}"
    args = parse_args([*options.split(), "--step-time-s", str(STEP_TIME_S), "--eval-every", str(STEPS)])
    args.storage_path, args.history = str(out / "storage"), str(out / f"{name}.jsonl")
    errors: list[BaseException] = []

    def fit() -> None:
        try:
            build_trainer(args).fit()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=fit, name="trainer", daemon=True)
    thread.start()
    watch = Watch(cluster, out, name, thread)
    yield watch
    thread.join()
    for line in watch.poll():
        console.print("  " + line)
    if errors:
        raise errors[0]


def kill_in_the_middle(watch: Watch, cluster: LocalCluster) -> dict[str, float]:
    follow(watch, until=KILL_AFTER_STEP)
    assert watch.status is not None
    victim = cluster.name_of(watch.status.nodes[-1].node_id)
    killed_at = time.time()
    cluster.kill(victim, wipe=True)
    console.print(
        f"  [bold red]✗ step {watch.step}: kill -9 of {victim}: raylet, worker and agent are gone, "
        "and its disk folder is wiped.[/]"
    )
    return {"killed": killed_at, "step": float(watch.step)}


def note_recovery(watch: Watch, times: Mapping[str, float]) -> dict[str, float]:
    status = watch.status
    assert status is not None
    sessions = [r for r in status.records if isinstance(r.op, Session)]
    again = [line for line in read_history(watch.history) if line["time"] > sessions[-1].time_s]
    for rank in status.restores:
        for part in rank.parts:
            where = watch.cluster.name_of(part.where) if part.tier in ("peer", "local", "memory") else ""
            console.print(
                f"  rank {rank.rank} read {part.file:36} {part.size_bytes / 1e6:6.2f} MB "
                f"from {TIER_NAMES[part.tier]} {where} in {part.seconds * 1e3:.0f} ms"
            )
    return {
        "session": sessions[-1].time_s - times["killed"],
        "restore": max((rank.seconds for rank in status.restores), default=0.0),
        "first step": (again[0]["time"] - times["killed"]) if again else float("nan"),
        "repeated": times["step"] - (again[0]["step"] - 1) if again else float("nan"),
    }


def compare(out: Path, status: RunStatus, times: Mapping[str, float]) -> list[str]:
    """Check everything that should hold after the failure; return a line for each thing that does not."""
    tiers = bytes_by_tier(status.restores)
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_row("the group was started again", f"{times['session']:.1f} s after the kill")
    table.add_row("reading and verifying its state took", f"{times['restore'] * 1e3:.0f} ms")
    table.add_row("the first new step was done", f"{times['first step']:.1f} s after the kill")
    table.add_row("steps done twice", f"{times['repeated']:.0f} (a checkpoint every {EVERY_STEPS} steps)")
    for tier, size in sorted(tiers.items()):
        table.add_row(f"restored from {TIER_NAMES[tier]}", f"{size / 1e6:.2f} MB")
    failures = compare_bits(table, out, out / "storage", STORMY)
    console.print(table)
    if "remote" in tiers or not tiers.get("peer"):
        failures.append(f"the lost shard should have come from a peer, but bytes came from {tiers}")
    return failures


if __name__ == "__main__":
    sys.exit(main())
