"""What commands print: tables, JSON, and words for times and sizes."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from ray_ckpt.catalog import CheckpointView, Damage, VerifyReport, to_datetime
from ray_ckpt.core.retention import pinned_by
from ray_ckpt.format import jsontext
from ray_ckpt.types import CheckpointInfo, Level

PIPE_WIDTH = 250  # columns of a table that no terminal bounds; wide enough for the longest rows
MIN_WIDTH = 60  # columns; COLUMNS=0 means that nobody knows, and no table can be read in fewer

MAX_ROWS = 1000  # checkpoints in a table, the newest: each takes 0.6 ms to lay out, and nobody reads more

_AGO = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def info_json(view: CheckpointView) -> dict[str, Any]:
    info = view.info
    return {
        "step": info.step,
        "attempt": info.id.attempt,
        "session": info.id.session,
        "state": info.state,
        "level": info.level.label,
        "replicas": info.replicas,
        "world_size": info.world_size,
        "mesh": info.mesh,
        "num_nodes": info.num_nodes,
        "size_bytes": info.size_bytes,
        "committed_at_s": info.committed_at_s,
        "root_digest": info.root_digest,
        "metrics": jsontext.metrics_json(info.metrics),
        "pins": dict(info.pins),
        "verified_at_s": info.verified_at_s,
        "drilled_at_s": info.drilled_at_s,
        "drill": info.drill or None,
        "stall_s": info.stall_s,
        "capture_s": info.capture_s,
        "local_s": info.local_s,
        "replicate_s": info.replicate_s,
        "durable_at_s": info.durable_at_s,
        "path": view.where,
    }


def report_json(report: VerifyReport) -> dict[str, Any]:
    return {
        "folder": report.where,
        "ok": report.ok,
        "num_files": report.num_files,
        "num_slices": report.num_slices,
        "size_bytes": report.size_bytes,
        "damages": [damage_json(damage) for damage in report.damages],
    }


def damage_json(damage: Damage) -> dict[str, str]:
    return {"file": damage.file, "where": damage.where, "detail": damage.detail}


def print_json(document: object) -> None:
    typer.echo(json.dumps(document, indent=1, allow_nan=False))


def stdout() -> Console:
    """Stdout as it is now. Text is printed as it stands: no markup, and wide when nothing bounds it."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        width = max(MIN_WIDTH, int(columns))
    else:
        on_terminal = sys.stdout is not None and sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if on_terminal else PIPE_WIDTH
    return Console(file=sys.stdout, markup=False, highlight=False, emoji=False, width=width)


def make_table(
    *headers: str, right: Sequence[int] = (), whole: Sequence[int] = (), header: bool = True
) -> Table:
    """Of the columns those in `right` are aligned there, and those in `whole` stay on one line."""
    table = Table(box=box.SIMPLE_HEAD if header else None, show_header=header, pad_edge=False)
    for index, name in enumerate(headers):
        table.add_column(
            name,
            justify="right" if index in right else "left",
            no_wrap=index in whole,
            overflow="ellipsis" if index in whole else "fold",
        )
    return table


def add_row(table: Table, *cells: object, style: str | None = None) -> None:
    table.add_row(*(plain(str(cell)) for cell in cells), style=style)


def plain(text: str) -> str:
    """`text` without control characters: names in a log or manifest must not drive a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def level_text(info: CheckpointInfo) -> str:
    if info.level is Level.DURABLE:
        return info.level.label
    copies = f"({info.replicas})" if info.level is Level.REPLICATED else ""
    return f"{info.level.label}{copies}" + (", in cluster" if info.state == "live" else "")


def metrics_text(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.5g}" for name, value in sorted(metrics.items()))


def pins_text(info: CheckpointInfo) -> str:
    """`eval, nightly until 2026-09-21 14:13:20, old (expired)`."""
    holding = pinned_by(info, time.time())
    return ", ".join(
        f"{owner} (expired)"
        if owner not in holding
        else owner
        if end_s is None
        else f"{owner} until {moment_text(end_s)}"
        for owner, end_s in sorted(info.pins.items())
    )


def when_text(time_s: float) -> str:
    """`3 min ago, 2026-09-21 14:13:20` in the local time zone; `?` for what no calendar holds."""
    if to_datetime(time_s) is None:
        return "?"
    return f"{span_text(time.time() - time_s)} ago, {moment_text(time_s)}"


def span_text(span_s: float) -> str:
    """`3 min`: rounded down, in the largest unit that it fills."""
    count, unit = next(((int(span_s // n), unit) for unit, n in _AGO if span_s >= n), (0, "s"))
    return f"{count} {unit}"


def moment_text(time_s: float) -> str:
    moment = to_datetime(time_s)
    return "?" if moment is None else f"{moment.astimezone():%Y-%m-%d %H:%M:%S}"
