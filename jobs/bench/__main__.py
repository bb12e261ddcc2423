"""Measure speed and compare each number with a limit: `python -m jobs.bench`.

The exit code is 1 if a row misses its target, 2 if a row failed. A row is the median of some samples; the
spread (largest less smallest, over the median) shows how far the median can be trusted. A row is compared
with a physical limit or with a peer, measured in turn with the row. Ratios can therefore be compared between
runs, numbers only within one run. `--peers` adds other checkpoint libraries on the same state (`make bench`
installs them).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from rich.console import Console

from jobs.bench import report
from jobs.bench.context import Context
from jobs.bench.peers.catalogue import PEERS
from jobs.bench.row import Row, skipped
from jobs.demo.s3_server import KINDS
from ray_ckpt.cli.options import size
from ray_ckpt.preemption.cloud import METADATA_ENV

ROWS: Mapping[str, str] = {  # name -> module of this package, with a function `rows` or the one named
    "limits": "limits",
    "snapshot": "snapshot",
    "device": "device",
    "small": "small",
    "watch": "watch",
    "delta": "delta",
    "overhead": "overhead",
    "disk": "disk",
    "wire": "wire",
    "restoring": "restoring",
    "remote": "remote",
    "agent": "agent",
    "coordinator": "coordinator",
    "ray": "coordinator:message_rows",
    "catalog": "history:catalog_rows",
    "retention": "history:retention_rows",
    "simulator": "coordinator:schedule_rows",
    "planes": "planes",
    "parity": "parity",
    "dcp": "dcp",
    "ticket": "ticket",
    "fleet": "fleet",
    "recover": "recover",
}
# These take minutes: they run if named, or with --peers.
IF_NAMED = ("overhead", "delta", "remote", "planes", "dcp", "ticket", "fleet", "recover")
SIZE = "1GiB"
REPEAT = 5
QUICK_BYTES = 64 << 20  # state in a quick run, which must end within a minute on two cores
QUICK_REPEAT = 2  # samples per row in a quick run; a median of two still shows their spread
FOLDER = Path("bench-out")
FAILED = "failed: "  # begins the text of rows that an error kept from being measured


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0; 1 if a row misses its target; 2 if a row failed."""
    chosen = _parser().parse_args(arguments)
    os.environ.setdefault(METADATA_ENV, "off")  # agents must not query a cloud's metadata service
    chosen.folder.mkdir(parents=True, exist_ok=True)
    context = Context(
        size_bytes=min(chosen.size, QUICK_BYTES) if chosen.quick else chosen.size,
        repeat=chosen.repeat or (QUICK_REPEAT if chosen.quick else REPEAT),
        folder=chosen.folder.resolve(),
        quick=chosen.quick,
        server=chosen.server,
        num_nodes=chosen.nodes,
        peers=tuple(PEERS) if chosen.peers == [] else tuple(chosen.peers or ()),
    )
    left_out = IF_NAMED if chosen.quick or chosen.peers is None else ()
    names = chosen.only or [name for name in ROWS if name not in left_out]
    rows = []
    for row in _measured([*names, *(["peers.measure"] if context.peers else [])], context):
        print(f"{row.name}: {report.brief(row)}", file=sys.stderr, flush=True)
        rows.append(row)
    command = ["python", "-m", "jobs.bench", *(sys.argv[1:] if arguments is None else arguments)]
    facts = report.machine_facts(context, command)
    report.print_page(report.page(rows, facts), Console())
    if chosen.json:
        report.write_json(chosen.json, rows, facts)
    if chosen.plot:
        report.write_plot(chosen.plot, rows, facts)
    if chosen.results:
        plot = os.path.relpath(chosen.plot, chosen.results.parent) if chosen.plot else ""
        chosen.results.write_text(report.page(rows, facts, plot=plot))
    if any(row.skipped.startswith(FAILED) for row in rows):
        return 2
    return 1 if any(row.verdict == "miss" for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--size", type=_size, default=SIZE, help=f"state of a save, as 2GiB (default {SIZE})")
    only = f"these rows: {', '.join(ROWS)}; without it and --peers all but {' and '.join(IF_NAMED)}"
    add("--only", nargs="+", choices=ROWS, metavar="NAME", help=only)
    add("--repeat", type=_count, help=f"samples per row (default {REPEAT})")
    quick = (
        "rows as small as they can be, overhead, remote and ticket only if named; their numbers mean nothing"
    )
    add("--quick", action="store_true", help=quick)
    add("--peers", nargs="*", choices=PEERS, metavar="NAME", help=f"peers, all or of: {', '.join(PEERS)}")
    server = f"of the rows remote: {', '.join(KINDS)}, or s3://..."
    add("--server", type=_server, default=KINDS[0], help=server)
    add(
        "--nodes", type=_count, help="nodes of the rows ticket (default 1000) and fleet (default: four sizes)"
    )
    add("--folder", type=Path, default=FOLDER, help=f"on the disk to be measured (default ./{FOLDER})")
    add("--json", type=Path, metavar="FILE", help="write machine, command and rows with all samples")
    add("--plot", type=Path, metavar="FILE", help="write a picture (PNG)")
    add("--results", type=Path, metavar="FILE", help="write a page (Markdown)")
    return parser


def _measured(names: Iterable[str], context: Context) -> Iterator[Row]:
    """Yield all rows. A failed group becomes a row with the first line of the error; others are measured."""
    for name in names:
        start_s = time.monotonic()
        module, _, function = ROWS.get(name, name).partition(":")
        try:
            yield from getattr(import_module(f"jobs.bench.{module}"), function or "rows")(context)
        except Exception as error:
            traceback.print_exc()
            yield skipped(name, "its rows", f"{FAILED}{type(error).__name__}: {error}".partition("\n")[0])
        print(f"{name} took {time.monotonic() - start_s:.0f} s", file=sys.stderr, flush=True)


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a count of samples")
    return value


def _server(text: str) -> str:
    if text not in KINDS and not text.startswith("s3://"):
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(KINDS)} and no storage path on S3")
    return text


def _size(text: str) -> int:
    try:
        return size(text, option="--size")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
