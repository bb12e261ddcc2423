"""Rows for people and for programs: a page of results, also in the terminal, a picture, a JSON file."""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.markdown import Markdown

from jobs.bench.context import Context
from jobs.bench.peers.catalogue import KINDS, OURS, PEERS
from jobs.bench.row import REACH, Row, spread
from ray_ckpt.texts import size_text

PIPED_WIDTH = 180  # characters per line if the output is not a terminal
PACKAGES = ("ray_ckpt", "ray", "torch", "numpy", "pyarrow", "xxhash")
Facts = Mapping[str, Any]
HEADINGS = {"row": "---", "what": "---", "median": "---:", "spread": "---:", "beside": "---", "ratio": "---:"}
HEADINGS |= {"reach": "---:", "": "---"}
INCHES_PER_BAR = 0.24
WIDTH_INCHES = 10.0
DPI = 110
PASS, MISS = "#2a7f62", "#b3362b"


def machine_facts(context: Context, command: Sequence[str]) -> dict[str, Any]:
    """Return the facts that a reader needs to trust a number or to measure it again."""
    mounts = [m for m in psutil.disk_partitions(all=True) if context.folder.is_relative_to(m.mountpoint)]
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "size_bytes": context.size_bytes,
        "repeat": context.repeat,
        "quick": context.quick,
        "cpu": cpus[0].partition(":")[2].strip() if cpus else platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": f"{platform.system()} {platform.release()}",
        "file_system": max(mounts, key=lambda m: len(m.mountpoint)).fstype if mounts else "unknown",
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "load": os.getloadavg()[0],
    }


def page(rows: Iterable[Row], facts: Facts, *, plot: str = "") -> str:
    """Return Markdown with the command, the machine, the picture and the table."""
    versions = {"python": facts["python"], **facts["versions"]}
    memory, size = size_text(facts["memory_bytes"]), size_text(facts["size_bytes"])
    machine = (
        f"{facts['cpu']}, {facts['cores']} cores, {memory}, {facts['kernel']}, {facts['file_system']}",
        ", ".join(f"{name} {found}" for name, found in versions.items()),
        f"{facts['date']}, state of {size}, {facts['repeat']} samples a row, load {facts['load']:.1f}",
        *(["A quick run: its numbers mean nothing."] if facts["quick"] else []),
    )
    lines = ["# Results of the bench", "", f"    {facts['command']}", "", *(f"{line}  " for line in machine)]
    if plot:
        lines += ["", f"![{Path(plot).stem}]({plot})"]
    lines += [
        "",
        "`ratio` is the median over that of what stands beside it, measured in turn.",
        "`reach` is what the ratio has to be.",
        "Spread is the largest sample less the smallest, over the median.",
        "",
        *(_line(cells) for cells in (HEADINGS, HEADINGS.values(), *map(_cells, rows))),
        "",
    ]
    return "\n".join(lines)


def print_page(text: str, console: Console) -> None:
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    console.print(Markdown(text))


def write_json(path: Path, rows: Sequence[Row], facts: Facts) -> None:
    document = {"machine": dict(facts), "rows": [row.to_json() for row in rows]}
    path.write_text(json.dumps(document, indent=2) + "\n")


def write_plot(path: Path, rows: Sequence[Row], facts: Facts) -> None:
    """Draw rows relative to their targets, and peers as multiples of the limits; write a PNG to `path`.

    Raise ValueError if no row has a value to draw.
    """
    from matplotlib.figure import Figure

    reaching = [row for row in rows if row.ratio and row.reach]
    peers = [row for row in rows if row.ratio and row.name.partition("/")[0] in PEERS]
    panels = [(draw, some) for draw, some in ((_draw_reach, reaching), (_draw_peers, peers)) if some]
    if not panels:
        raise ValueError("nothing to draw: no row has been compared with anything")
    heights = [INCHES_PER_BAR * len(some) + 1.0 for _, some in panels]
    figure = Figure(figsize=(WIDTH_INCHES, sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axis, (draw, some) in zip(axes, panels, strict=True):
        draw(axis, some)
    figure.suptitle(f"{facts['cpu']}, {facts['cores']} cores; {facts['date'][:10]}", fontsize=9)
    figure.savefig(path, dpi=DPI, format="png")


def margin(row: Row) -> float:
    """Return a row's ratio relative to its target: 1 just reaches the target, 2 is twice as good."""
    match = REACH.fullmatch(row.reach)
    assert match is not None and row.ratio
    return row.ratio / float(match[2]) if match[1] == ">=" else float(match[2]) / row.ratio


def brief(row: Row) -> str:
    """Return one line about the row, to be shown while the bench runs."""
    if row.skipped:
        return row.skipped
    ratio = f", {row.ratio:.2f} x {row.reference.name}" if row.ratio is not None and row.reference else ""
    return f"{row.median:,.3g} {row.unit}{ratio}, {row.verdict}"


def _draw_reach(axis: Any, rows: Sequence[Row]) -> None:
    names = [f"{row.name}  {row.ratio:.2f} {row.reach}" for row in rows]
    colours = [PASS if row.verdict == "pass" else MISS for row in rows]
    _bars(axis, names, [margin(row) for row in rows], colours)
    axis.set_title("What has to be reached (1: just reached; to the right is better)", fontsize=9)


def _draw_peers(axis: Any, rows: Sequence[Row]) -> None:
    """Draw the peers grouped by kind of row, the best peer first."""
    placed = sorted(rows, key=lambda row: (list(KINDS).index(_kind(row)), row.ratio or 0.0))
    names = [f"{row.name}  {row.median:.3g} {row.unit}" for row in placed]
    _bars(axis, names, [row.ratio or 0.0 for row in placed], [KINDS[_kind(row)] for row in placed])
    for label, row in zip(axis.get_yticklabels(), placed, strict=True):
        label.set_fontweight("bold" if row.name.startswith(f"{OURS}/") else "normal")
    axis.set_title("Multiples of a copy, write or read of the same bytes (to the left is better)", fontsize=9)


def _bars(axis: Any, names: Sequence[str], values: Sequence[float], colours: Sequence[str]) -> None:
    axis.barh(range(len(names)), [value - 1 for value in values], left=1, color=colours, height=0.7)
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.set_xscale("log")
    axis.axvline(1, color="black", linewidth=0.8)
    axis.tick_params(axis="x", labelsize=7)
    axis.grid(axis="x", alpha=0.3)


def _kind(row: Row) -> str:
    return row.name.partition("/")[2]


def _cells(row: Row) -> Iterator[str]:
    detail = f": {row.skipped}" if row.skipped else f" ({row.note})" if row.note else ""
    yield from (row.name, f"{row.what}{detail}")
    yield "" if row.skipped else f"{row.median:,.3g} {row.unit}"
    yield _percent(row.samples)
    beside = row.reference
    yield f"{beside.name} {beside.median:,.3g} {row.unit} {_percent(beside.samples, '± ')}" if beside else ""
    yield "" if row.ratio is None else f"{row.ratio:.2f}"
    yield from (row.reach, row.verdict)


def _percent(samples: tuple[float, ...], before: str = "") -> str:
    return "" if (share := spread(samples)) is None else f"{before}{share:.0%}"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.strip().replace("|", "\\|") for cell in cells) + " |"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
