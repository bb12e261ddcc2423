"""Rows for people and for programs: a table, a JSON file, a page of results. `plot.py` makes the picture."""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from rich import box
from rich.console import Console, OverflowMethod
from rich.table import Table

from jobs.bench.context import Context, format_size
from jobs.bench.plot import write_plot
from jobs.bench.row import Row, spread

__all__ = ["brief", "machine_facts", "print_table", "write_json", "write_plot", "write_results"]

PIPED_WIDTH = 180  # characters per line if the output is not a terminal
PACKAGES = ("ray_ckpt", "ray", "torch", "numpy", "pyarrow", "xxhash")
Facts = Mapping[str, Any]
HEADINGS = ("row", "what", "median", "spread", "beside", "ratio", "reach", "")
RIGHT = ("median", "spread", "ratio", "reach")


def machine_facts(context: Context, command: Sequence[str]) -> dict[str, Any]:
    """Return the facts that a reader needs to trust a number or to measure it again."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "size_bytes": context.size_bytes,
        "repeat": context.repeat,
        "quick": context.quick,
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": f"{platform.system()} {platform.release()}",
        "file_system": _file_system(context.folder),
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "load": os.getloadavg()[0],
    }


def describe(facts: Facts) -> Iterator[str]:
    """Yield the facts in a few lines."""
    memory, size = format_size(facts["memory_bytes"]), format_size(facts["size_bytes"])
    versions = {"python": facts["python"], **facts["versions"]}
    yield f"{facts['cpu']}, {facts['cores']} cores, {memory}, {facts['kernel']}, {facts['file_system']}"
    yield ", ".join(f"{name} {found}" for name, found in versions.items())
    yield f"{facts['date']}, state of {size}, {facts['repeat']} samples a row, load {facts['load']:.1f}"
    if facts["quick"]:
        yield "A quick run: its numbers mean nothing."


def print_table(rows: Sequence[Row], facts: Facts, console: Console) -> None:
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    for line in describe(facts):
        console.print(line, highlight=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for heading in HEADINGS:
        right = heading in RIGHT
        overflow: OverflowMethod = "fold" if heading in ("row", "what") else "ellipsis"
        table.add_column(heading, justify="right" if right else "left", no_wrap=right, overflow=overflow)
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)


def write_json(path: Path, rows: Sequence[Row], facts: Facts) -> None:
    document = {"machine": dict(facts), "rows": [row.to_json() for row in rows]}
    path.write_text(json.dumps(document, indent=2) + "\n")


def write_results(path: Path, rows: Sequence[Row], facts: Facts, *, plot: Path | None) -> None:
    """Write a page with the command, the machine, the picture and the table."""
    machine = [f"{line}  " for line in describe(facts)]
    lines = ["# Results of the bench", "", f"    {facts['command']}", "", *machine]
    if plot is not None:
        lines += ["", f"![{plot.stem}]({os.path.relpath(plot, path.parent)})"]
    lines += [
        "",
        "`ratio` is the median over that of what stands beside it, measured in turn.",
        "`reach` is what the ratio has to be.",
        "Spread is the largest sample less the smallest, over the median.",
        "",
        _markdown_line(HEADINGS),
        _markdown_line(["---:" if heading in RIGHT else "---" for heading in HEADINGS]),
        *(_markdown_line(_cells(row)) for row in rows),
        "",
    ]
    path.write_text("\n".join(lines))


def brief(row: Row) -> str:
    """Return one line about the row, to be shown while the bench runs."""
    ratio = "" if row.ratio is None else f", {row.ratio:.2f} x {row.reference.name if row.reference else ''}"
    return f"{row.median:,.3g} {row.unit}{ratio}, {row.verdict}"


def _cells(row: Row) -> tuple[str, ...]:
    if row.skipped:
        return row.name, f"{row.what}: {row.skipped}", "", "", "", "", row.reach, row.verdict
    reference = row.reference
    return (
        row.name,
        f"{row.what} ({row.note})" if row.note else row.what,
        f"{row.median:,.3g} {row.unit}",
        _percent(row.spread),
        f"{reference.name} {reference.median:,.3g} {row.unit} {_noise(reference.samples)}".strip()
        if reference
        else "",
        "" if row.ratio is None else f"{row.ratio:.2f}",
        row.reach,
        row.verdict,
    )


def _noise(samples: tuple[float, ...]) -> str:
    return f"± {_percent(spread(samples))}" if len(samples) > 1 else ""


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _file_system(folder: Path) -> str:
    """Return the file system type of `folder`: that of the mount with the longest path above it."""
    mounts = [mount for mount in psutil.disk_partitions(all=True) if folder.is_relative_to(mount.mountpoint)]
    return max(mounts, key=lambda mount: len(mount.mountpoint)).fstype if mounts else "unknown file system"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
