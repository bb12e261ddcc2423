"""Output of commands: tables, JSON, and texts for levels, pins and times."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.filesize import decimal
from rich.table import Table

from ray_ckpt.catalog.catalog import Catalog, CheckpointView, Damage, VerifyReport
from ray_ckpt.core.retention import pinned_by
from ray_ckpt.format import jsontext
from ray_ckpt.texts import age_text, local_time_text, printable, steps_text, to_datetime
from ray_ckpt.types import CheckpointInfo, Level, ParityGroup, parity_text

PIPE_WIDTH = 1_000_000  # characters without a terminal: no line is folded
MIN_WIDTH = 60  # characters; tables are unreadable in fewer; COLUMNS=0 means unknown
NARROW = 100  # characters; on a narrower terminal, tables of checkpoints have fewer columns
MIN_FOLD = 16  # characters per line of a folded name or path; with fewer, cells become very tall
MAX_WORD = 24  # characters of the longest word that is not broken
MIN_WORD = 8  # characters to which words and names are broken before lines exceed the terminal

MAX_ROWS = 1000  # newest checkpoints in a table: layout takes 0.6 ms per row, and few people read more

_NUMBER_OR_ID = re.compile(r"\W*\d|[0-9a-f]{12}\b")  # the beginning of a number or an id


def info_json(view: CheckpointView) -> dict[str, Any]:
    info = view.info
    return {
        "step": info.step,
        "attempt": info.id.attempt,
        "session": info.id.session,
        "state": info.state,
        "level": info.level.label,
        "replicas": info.replicas,
        "parity": info.parity or None,
        "world_size": info.world_size,
        "mesh": info.mesh,
        "num_nodes": info.num_nodes,
        "size_bytes": info.size_bytes,
        "shared_bytes": info.shared_bytes,
        "exported": info.exported or None,
        "committed_at_s": info.committed_at_s,
        "root_digest": info.root_digest,
        "metrics": jsontext.metrics_json(info.metrics),
        "pins": dict(info.pins),
        "verified_at_s": info.verified_at_s,
        "drilled_at_s": info.drilled_at_s,
        "drill": info.drill or None,
        "damaged": info.damaged or None,
        "suspect": info.suspect or None,
        "stall_s": info.stall_s,
        "capture_s": info.capture_s,
        "local_s": info.local_s,
        "replicate_s": info.replicate_s,
        "durable_at_s": info.durable_at_s,
        "path": view.where,
    }


def remarks(info: CheckpointInfo, groups: Iterable[ParityGroup] = ()) -> Iterator[str]:
    """Yield what no verdict tells of a checkpoint: shared files, parity groups, damage, drift."""
    if info.shared_bytes:
        yield f"{decimal(info.shared_bytes)} were linked to an earlier checkpoint on the nodes, not written"
    if parity := parity_text(groups) or info.parity:
        yield f"its files are in parity groups ({parity})"
    if info.damaged:
        yield f"a scrub has found damage on the storage path, or cannot read it, in fragments {info.damaged}"
    if info.suspect:
        yield f"data-parallel replicas had drifted apart, {info.suspect}"


def remarks_json(info: CheckpointInfo | None, groups: Iterable[ParityGroup] = ()) -> dict[str, Any]:
    """Return the same as fields; all empty for a directory without a log."""
    known = info.parity if info is not None else ""
    return {
        "shared_bytes": info.shared_bytes if info is not None else None,
        "parity": parity_text(groups) or known or None,
        "damaged": info.damaged or None if info is not None else None,
        "suspect": info.suspect or None if info is not None else None,
    }


def status_remarks(shared_bytes: int, suspect: str, damaged: Iterable[int]) -> Iterator[str]:
    """Yield what status tells of a run: shared files of the newest save, differing replicas, damage."""
    if shared_bytes:
        yield f"{decimal(shared_bytes)} of the newest save were linked to an earlier one, not written"
    if suspect:
        yield f"data-parallel replicas have drifted apart, {suspect}"
    if steps := steps_text(damaged):
        yield f"damaged on the storage path, or not readable there: step(s) {steps}"


class Lineage:
    """The marks of a run's checkpoints: `*` for the newest one, `+` for the others on the lineage."""

    def __init__(self, catalog: Catalog) -> None:
        newest = catalog.newest()
        self.newest = newest.info.id.attempt if newest else ""
        self.attempts = {info.id.attempt for info in catalog.lineage}

    def mark(self, info: CheckpointInfo) -> str:
        return "*" if info.id.attempt == self.newest else "+" if info.id.attempt in self.attempts else ""

    def style(self, info: CheckpointInfo) -> str:
        return {"*": "bold", "": "dim"}.get(self.mark(info), "")

    def marks_json(self, info: CheckpointInfo) -> dict[str, bool]:
        attempt = info.id.attempt
        return {"newest": attempt == self.newest, "on_lineage": attempt in self.attempts}


def report_json(report: VerifyReport) -> dict[str, Any]:
    return {
        "folder": report.where,
        "ok": report.ok,
        "num_files": report.num_files,
        "num_slices": report.num_slices,
        "size_bytes": report.size_bytes,
        "only_items": report.only_items or None,
        "damages": [damage_json(damage) for damage in report.damages],
    }


def damage_json(damage: Damage) -> dict[str, str]:
    return {"file": damage.file, "where": damage.where, "detail": damage.detail}


def print_json(document: object) -> None:
    typer.echo(json.dumps(document, indent=1, allow_nan=False))


def stdout() -> Output:
    """Return a console on the current stdout, of unlimited width without a terminal."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        width = max(MIN_WIDTH, int(columns))
    else:
        on_terminal = sys.stdout is not None and sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if on_terminal else PIPE_WIDTH
    return Output(file=sys.stdout, width=width)


class Output(Console):
    """A console without markup that does not crop long lines, because the terminal folds them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **{"crop": False, **options})

    def print_line(self, text: str, style: str | None = None) -> None:
        """Print a line that only the terminal folds, so that ids and paths can be copied from it."""
        self.print(printable(text), style=style, soft_wrap=True)


class FittedTable:
    """A table that fits its terminal; `right`, `whole`, `fold` and `gives_way` are indices of columns.

    Columns in `right` are aligned to the right. In a narrow terminal, cells are folded between words; in
    `fold`, for names and paths, at any character; in `whole` not at all. If the table still does not fit,
    columns are left out in the order of `gives_way`; then words are broken. Numbers and ids stay whole, even
    if a line is then longer than the terminal is wide.
    """

    def __init__(
        self,
        *headers: str,
        right: Collection[int] = (),
        whole: Collection[int] = (),
        fold: Collection[int] = (),
        gives_way: Sequence[int] = (),
    ) -> None:
        self._headers = headers
        self._right = right
        self._whole = whole
        self._fold = fold
        self._gives_way = gives_way
        self._rows: list[tuple[Sequence[str], str | None]] = []

    def add(self, *cells: object, style: str | None = None) -> None:
        """Add a row; cells at its end may be missing."""
        texts = [printable(str(cell)) for cell in cells]
        self._rows.append((texts + [""] * (len(self._headers) - len(cells)), style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = options.max_width
        columns = {index: self._widths(index, room) for index in range(len(self._headers))}
        for index in self._gives_way:
            if _total(least for _, least, _ in columns.values()) > room:
                del columns[index]
        widths = {index: width for index, (width, _, _) in columns.items()}
        for limit in (1, 2):  # first to whole words, then to whole numbers; the widest column shrinks first
            while _total(widths.values()) > room:
                if not (wide := [index for index in widths if widths[index] > columns[index][limit]]):
                    break
                widths[max(wide, key=widths.__getitem__)] -= 1
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for index, width in widths.items():
            table.add_column(
                self._headers[index],
                width=width,
                justify="right" if index in self._right else "left",
                no_wrap=index in self._whole,
                overflow="fold",
            )
        for cells, style in self._rows:
            table.add_row(*(cells[index] for index in widths), style=style)
        yield from console.render(table, options.update(max_width=max(room, _total(widths.values()))))

    def _widths(self, index: int, room: int) -> tuple[int, int, int]:
        """Return the width of a column unfolded, and the least that breaks no usual word, and no number."""
        cells = [self._headers[index], *(cells[index] for cells, _ in self._rows)]
        width = max(map(cell_len, cells))
        if index in self._whole:
            return width, width, width
        words = [word for cell in cells for word in cell.split()]
        longest = max(map(cell_len, words), default=0)
        least = min(longest, MIN_FOLD if index in self._fold else MAX_WORD)
        number = max((cell_len(word) for word in words if _NUMBER_OR_ID.match(word)), default=0)
        return min(width, room), least, min(least, max(number, MIN_WORD))


def _total(columns: Iterable[int]) -> int:
    """Return the width of a table with such columns, including the space between and around them."""
    widths = tuple(columns)
    return sum(widths) + 3 * len(widths) - 1


def is_narrow(console: Console) -> bool:
    return console.width < NARROW


def level_text(info: CheckpointInfo, *, brief: bool = False) -> str:
    """Return a text such as `replicated(1), in cluster, exported: model`; if `brief`, `replicated(1)`.

    With parity groups it is `replicated(2), parity 6+2, in cluster` or `durable, parity 6+2`. Flaws are
    last, also if `brief`.
    """
    copies = f"({info.replicas})" if info.level is Level.REPLICATED else ""
    parts = [f"{info.level.label}{copies}"]
    if not brief and info.parity:
        parts.append(f"parity {info.parity}")
    if not brief and info.level is not Level.DURABLE:
        parts += ["in cluster"] if info.state == "live" else []
        parts += [f"exported: {info.exported}"] if info.exported else []
    return ", ".join((*parts, *info.flaws))


def pins_text(info: CheckpointInfo) -> str:
    """Return a text such as `eval, nightly until 2026-09-21 14:13:20+02, old (expired)`."""
    holding = pinned_by(info, time.time())
    return ", ".join(
        f"{owner} (expired)"
        if owner not in holding
        else owner
        if end_s is None
        else f"{owner} until {local_time_text(end_s)}"
        for owner, end_s in sorted(info.pins.items())
    )


def when_text(time_s: float, *, brief: bool = False) -> str:
    """Return `3 min ago, 2026-09-21 14:13:20+02`; if `brief`, `3 min ago`; `?` outside the calendar."""
    if to_datetime(time_s) is None:
        return "?"
    past_s = time.time() - time_s
    ago = f"{age_text(past_s)} ago" if past_s >= 0 else f"in {age_text(-past_s)}"  # clocks differ
    return ago if brief else f"{ago}, {local_time_text(time_s)}"
