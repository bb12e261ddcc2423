"""Speed in numbers, each beside its limit: `python -m jobs.bench`. Exit code 1 if a limit is missed.

A row is the median of some repeats; spread is the largest less the smallest of them over the median. Load and
CPU share say how busy the machine was; on a busy one compare ratios within a run, not numbers of two runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module

from rich import box
from rich.console import Console
from rich.table import Table

from jobs.bench.row import Row

ROWS: Mapping[str, str] = {  # name -> the module with its `rows(repeat)`, loaded when wanted
    "coordinator": "jobs.bench.coordinator",
    "ray": "jobs.bench.messages",
    "catalog": "jobs.bench.catalog",
    "retention": "jobs.bench.retention",
    "simulator": "jobs.bench.simulator",
}
REPEAT = 5
PIPED_WIDTH = 160  # columns of text for a file


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=[*ROWS, "all"],
        default=["all"],
        metavar="NAME",
        help=f"which ones: {', '.join(ROWS)}, or all (default)",
    )
    parser.add_argument("--repeat", type=_count, default=REPEAT, help=f"samples per row (default {REPEAT})")
    parser.add_argument("--json", action="store_true", help="print JSON, with all samples")
    chosen = parser.parse_args(arguments)
    names = list(ROWS) if "all" in chosen.rows else chosen.rows
    rows = []
    for row in _measured(names, chosen.repeat):
        rows.append(row)
        print(f"{row.name}: {row.verdict}", file=sys.stderr)
    if chosen.json:
        print(json.dumps([row.to_json() for row in rows], indent=2))
    else:
        print_table(rows, Console())
    return 1 if any(row.verdict == "miss" for row in rows) else 0


def _measured(names: Iterable[str], repeat: int) -> Iterator[Row]:
    for name in names:
        rows: Callable[[int], Iterator[Row]] = import_module(ROWS[name]).rows
        yield from rows(repeat)


def print_table(rows: Iterable[Row], console: Console) -> None:
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for heading in ("row", "what"):
        table.add_column(heading, overflow="fold")
    for heading in ("median", "spread", "limit", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("machine", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)


def _cells(row: Row) -> tuple[str, ...]:
    machine = row.machine
    if machine is None:
        return row.name, f"{row.what}: {row.skipped}", "", "", "", "", row.verdict, ""
    return (
        row.name,
        row.what,
        f"{row.median:,.3g} {row.unit}",
        "" if row.spread is None else f"{row.spread:.0%}",
        "" if row.limit is None else f"{row.limit:g} {row.unit}",
        "" if row.ratio is None else f"{row.ratio:.2f}",
        row.verdict,
        f"{machine.cores} cores, load {machine.load:.1f}, CPU {machine.cpu_share:.0%}",
    )


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a count of samples")
    return value


if __name__ == "__main__":
    sys.exit(main())
