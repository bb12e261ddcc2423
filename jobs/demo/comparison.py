"""Code of both demonstrations: train, watch the training, and compare its run with a calm run."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jobs.train_gpt import build_trainer, parse_args
from ray_ckpt.actors.client import coordinator
from ray_ckpt.actors.messages import RunSpec, RunStatus
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.config import RunOptions
from ray_ckpt.errors import CheckpointError
from ray_ckpt.location import Location
from ray_ckpt.types import Level, RankRestore, Tier

STEPS = 70
STEP_TIME_S = 0.25
MARKER = ".ray_ckpt-demo"  # only a folder with this file in it is wiped
POLL_S = 0.3
LOOK_S = 1.0  # interval between two reads of the log
CALM = "gpt-calm"  # name of the run that loses nothing
TIER_NAMES: Mapping[Tier, str] = {
    "memory": "its own memory",
    "local": "its own disk",
    "peer": "a peer's disk",
    "remote": "the storage path",
}

console = Console(highlight=False, soft_wrap=True)


def make_parser(prog: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=description.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder of the demo, wiped")
    return parser


def prepare(out: Path) -> None:
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        sys.exit(f"{out} is not a folder, but a link or a file; choose another one with --out")
    if out.exists() and any(out.iterdir()) and not (out / MARKER).exists():
        sys.exit(f"{out} is not a folder of this demo and not empty; choose another one with --out")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / MARKER).touch()
    os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_ACTOR_RECONCILIATION", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "1")


def train(out: Path, storage_path: str, name: str, options: str) -> None:
    """Train the run `name` on two workers of the cluster to which this process is connected."""
    options += f" --name {name} --steps {STEPS} --workers 2"
    options += f" --step-time-s {STEP_TIME_S} --eval-every {STEPS}"
    paths = ["--storage-path", storage_path, "--history", str(out / f"{name}.jsonl")]
    build_trainer(parse_args([*options.split(), *paths])).fit()


def status_of(storage_path: str, name: str) -> RunStatus:
    """Return the state of the run from the coordinator of the cluster."""
    spec = RunSpec(name=name, storage_path=storage_path, options=RunOptions())
    status: RunStatus = ray.get(coordinator().status.remote(spec.key), timeout=10)
    return status


class Watch:
    """A watch on a run from outside: steps through the history file, checkpoints through the run's log.

    `places` returns where the copies of an attempt are, as a text for the line of its commit.
    """

    def __init__(
        self,
        out: Path,
        storage_path: str,
        name: str,
        is_training: Callable[[], bool] = lambda: True,
        places: Callable[[str], str] = lambda attempt: "",
    ) -> None:
        self.run = str(Location.parse(storage_path) / name)
        self.is_training = is_training
        self.step = 0
        self._history = out / f"{name}.jsonl"
        self._places = places
        self._next_seq = 0
        self._looked_s = 0.0

    def follow(self, until: int = STEPS) -> None:
        """Show progress until step `until` is done or the training has ended, then the rest of the news."""
        columns = (
            TextColumn("  training"),
            BarColumn(30),
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        )
        with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
            task = progress.add_task("steps", total=STEPS)
            while self.is_training() and (self.step < until or until >= STEPS):
                if time.monotonic() > self._looked_s + LOOK_S:
                    self.print_log(progress.console)
                self.step = max((line["step"] for line in read_history(self._history)), default=0)
                progress.update(task, completed=self.step)
                time.sleep(POLL_S)
        self.step = max((line["step"] for line in read_history(self._history)), default=0)
        self.print_log()

    def print_log(self, on: Console = console) -> None:
        """Print the records that the log has got since the last call."""
        self._looked_s = time.monotonic()
        try:
            catalog = Catalog(self.run)
            events = catalog.events().to_pylist()
        except CheckpointError:
            return  # the run has not begun yet
        sizes = {info.id.attempt: info.size_bytes for info in catalog.list(all=True)}
        for event in (event for event in events if event["seq"] >= self._next_seq):
            if line := self._describe(event, sizes.get(event["attempt"], 0)):
                on.print("  " + line)
        self._next_seq = max((event["seq"] + 1 for event in events), default=self._next_seq)

    def _describe(self, event: Mapping[str, Any], size_bytes: int) -> str:
        match event["op"]:
            case "commit":
                line = f"[green]●[/] step {event['step']:3d}  {size_bytes / 1e6:.1f} MB {event['level']}"
                return line + self._places(event["attempt"])
            case "promote" if event["level"] == Level.DURABLE.label:
                return f"[blue]◆[/] step {event['step']:3d}  is on the storage path too"
            case "retired":
                return f"[dim]○ step {event['step']:3d}  deleted: {event['text']}[/]"
            case "session" if event["text"].startswith("from step"):
                return f"[yellow]▶[/] the group starts again {event['text']}"
        return ""


def compare(
    out: Path, storage_path: str, name: str, restores: Sequence[RankRestore], lost_at_s: float
) -> tuple[set[Tier], list[str]]:
    """Show a table of the run `name` after the loss, beside the calm run, which lost nothing.

    `lost_at_s` is the Unix time of the loss. Return the tiers from which the state was read, and a line for
    each thing that differs.
    """
    runs = Location.parse(storage_path)
    calm = {line["step"]: line["loss"] for line in read_history(out / f"{CALM}.jsonl")}
    steps = read_history(out / f"{name}.jsonl")
    events = Catalog(str(runs / name)).events().to_pylist()
    started = max(event["time"] for event in events if event["op"] == "session")
    again = [line["time"] - lost_at_s for line in steps if line["time"] > started.timestamp()]
    read_bytes: dict[Tier, int] = {}
    for part in (part for rank in restores for part in rank.parts):
        read_bytes[part.tier] = read_bytes.get(part.tier, 0) + part.size_bytes
    restore_s = max((rank.seconds for rank in restores), default=0.0)
    differing = [line["step"] for line in steps if line["loss"] != calm[line["step"]]]
    before, after = final_digests(str(runs / CALM)), final_digests(str(runs / name))
    different = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))

    table = Table(show_header=False, box=None, padding=(0, 2))
    started_s = (started - datetime.fromtimestamp(lost_at_s, UTC)).total_seconds()
    table.add_row("the group was started again", f"{started_s:.1f} s after the loss")
    table.add_row("reading and verifying its state took", f"{restore_s * 1e3:.0f} ms")
    table.add_row("the first new step was done", f"{min(again, default=float('nan')):.1f} s after the loss")
    table.add_row("steps done twice", f"{len(steps) - STEPS}")
    for tier, size in sorted(read_bytes.items()):
        table.add_row(f"restored from {TIER_NAMES[tier]}", f"{size / 1e6:.2f} MB")
    table.add_row("losses compared, bit for bit", f"{len(steps)}, of which {len(differing)} differ")
    what = "slices and states of the last step compared"
    table.add_row(what, f"{len(after)}, of which {len(different)} differ")
    console.print(table)
    failures = []
    if differing or {line["step"] for line in steps} != set(calm):
        failures.append(f"losses differ at steps {differing[:10]}, or steps are missing")
    if different or not after:
        failures.append(f"the final state differs in {different[:5]}")
    return set(read_bytes), failures


def conclude(failures: Sequence[str], started_s: float) -> int:
    """Print the result and return the exit code."""
    console.print(f"\nThe demo took {time.monotonic() - started_s:.0f} s.")
    if failures:
        for failure in failures:
            console.print(f"[red]✗ {failure}[/]")
        return 1
    console.print("[bold green]✓ Every loss and every bit of the final state are those of the calm run.[/]\n")
    return 0


def final_digests(run: str) -> dict[tuple[str, str], str]:
    """Return the digest of every slice and state file of the last checkpoint, including RNG and data."""
    rows = (row for fragment in Catalog(run)[STEPS].fragments() for row in fragment.rows)
    return {(row.file, row.label): row.digest for row in rows if row.kind != "header"}


def read_history(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines that the file has so far."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
