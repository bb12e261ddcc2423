"""The picture of a run: rows relative to their targets, and peers as multiples of the limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs.bench.peers.catalogue import OURS
from jobs.bench.row import REACH, Row

INCHES_PER_BAR = 0.24
TITLE_INCHES = 0.3  # above the panels
WIDTH_INCHES = 10.0
DPI = 110
PASS, MISS = "#2a7f62", "#b3362b"
KINDS = {
    "blocked-first": "#c9a227",
    "blocked": "#e07a1f",
    "complete": "#33658a",
    "load-memory": "#8fb8de",
    "load": "#6a4c93",
}


def write_plot(path: Path, rows: Sequence[Row], facts: Mapping[str, Any]) -> None:
    """Write a PNG to `path`. Raise ValueError if no row has a value to draw."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    reaching = [row for row in rows if row.ratio and REACH.fullmatch(row.reach)]
    beside = [row for row in rows if row.ratio and row.extra.get("kind") in KINDS]
    panels = [(draw, some) for draw, some in ((_draw_reach, reaching), (_draw_peers, beside)) if some]
    if not panels:
        raise ValueError("nothing to draw: no row has been compared with anything")
    heights = [INCHES_PER_BAR * len(some) + 1.0 for _, some in panels]
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(WIDTH_INCHES, sum(heights)), height_ratios=heights, squeeze=False
    )
    for axis, (draw, some) in zip(axes[:, 0], panels, strict=True):
        draw(axis, some)
    figure.suptitle(f"{facts['cpu']}, {facts['cores']} cores; {facts['date'][:10]}", fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 1 - TITLE_INCHES / figure.get_figheight()))
    figure.savefig(path, dpi=DPI, format="png")
    pyplot.close(figure)


def margin(row: Row) -> float:
    """Return a row's ratio relative to its target: 1 just reaches the target, 2 is twice as good."""
    match = REACH.fullmatch(row.reach)
    assert match is not None and row.ratio
    return row.ratio / float(match[2]) if match[1] == ">=" else float(match[2]) / row.ratio


def _draw_reach(axis: Any, rows: Sequence[Row]) -> None:
    names = [f"{row.name}  {row.ratio:.2f} {row.reach}" for row in rows]
    colours = [PASS if row.verdict == "pass" else MISS for row in rows]
    _bars(axis, names, [margin(row) for row in rows], colours)
    axis.set_title("What has to be reached (1: just reached; to the right is better)", fontsize=9)


def _draw_peers(axis: Any, rows: Sequence[Row]) -> None:
    """Draw the peers grouped by kind of row, the best peer first."""
    kinds = list(KINDS)
    placed = sorted(rows, key=lambda row: (kinds.index(row.extra["kind"]), row.ratio or 0.0))
    names = [f"{row.extra['kind']}: {row.extra['peer']}  {row.median:.3g} {row.unit}" for row in placed]
    _bars(axis, names, [row.ratio or 0.0 for row in placed], [KINDS[row.extra["kind"]] for row in placed])
    for label, row in zip(axis.get_yticklabels(), placed, strict=True):
        label.set_fontweight("bold" if row.extra["peer"] == OURS else "normal")
    axis.set_title("Multiples of a copy, write or read of the same bytes (to the left is better)", fontsize=9)


def _bars(axis: Any, names: Sequence[str], values: Sequence[float], colours: Sequence[str]) -> None:
    axis.barh(range(len(names)), [value - 1 for value in values], left=1, color=colours, height=0.7)
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.set_xscale("log")
    axis.axvline(1, color="black", linewidth=0.8)
    axis.tick_params(axis="x", labelsize=7)
    axis.grid(axis="x", alpha=0.3)
