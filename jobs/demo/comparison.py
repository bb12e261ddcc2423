"""Code of both demonstrations: watch a training, and compare its run with a run that lost nothing."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.location import Location
from ray_ckpt.types import RankRestore, Tier

STEPS = 70
STEP_TIME_S = 0.25
MARKER = ".ray_ckpt-demo"  # only a folder with this file in it is wiped
POLL_S = 0.3
CALM = "gpt-calm"  # name of the run that loses nothing
TIER_NAMES: Mapping[Tier, str] = {
    "memory": "its own memory",
    "local": "its own disk",
    "peer": "a peer's disk",
    "remote": "the storage path",
}

console = Console(highlight=False, soft_wrap=True)


class Followed(Protocol):
    """A training that is watched."""

    step: int

    def is_running(self) -> bool: ...

    def poll(self) -> list[str]:
        """Update `step`; return the news as lines to print."""
        ...


def prepare(out: Path) -> None:
    if out.exists() and any(out.iterdir()) and not (out / MARKER).exists():
        sys.exit(f"{out} is not a folder of this demo and not empty; choose another one with --out")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / MARKER).touch()


def follow(watch: Followed, until: int = STEPS) -> None:
    """Show progress until step `until` is done or the training has ended."""
    columns = (
        TextColumn("  training"),
        BarColumn(30),
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
    )
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("steps", total=STEPS)
        while watch.is_running() and (watch.step < until or until >= STEPS):
            for line in watch.poll():
                progress.console.print("  " + line)
            progress.update(task, completed=watch.step)
            time.sleep(POLL_S)


def bytes_by_tier(restores: Iterable[RankRestore]) -> dict[Tier, int]:
    found: dict[Tier, int] = {}
    for part in (part for rank in restores for part in rank.parts):
        found[part.tier] = found.get(part.tier, 0) + part.size_bytes
    return found


def compare_bits(table: Table, out: Path, runs: Path | Location, name: str) -> list[str]:
    """Compare the run `name` with the calm run: add the counts to the table, return the differences."""
    calm = {line["step"]: line["loss"] for line in read_history(out / f"{CALM}.jsonl")}
    stormy = read_history(out / f"{name}.jsonl")
    differing = [line["step"] for line in stormy if line["loss"] != calm[line["step"]]]
    before, after = final_digests(str(runs / CALM)), final_digests(str(runs / name))
    different = sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k))
    table.add_row("losses compared, bit for bit", f"{len(stormy)}, of which {len(differing)} differ")
    table.add_row(
        "slices and states of the last step compared", f"{len(after)}, of which {len(different)} differ"
    )
    failures = []
    if differing or {line["step"] for line in stormy} != set(calm):
        failures.append(f"losses differ at steps {differing[:10]}, or steps are missing")
    if different or not after:
        failures.append(f"the final state differs in {different[:5]}")
    return failures


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
