"""`ray-ckpt goodput`: what became of a run's time."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ray_ckpt.catalog import Catalog
from ray_ckpt.cli.options import JsonOption, PathArgument, StorageOption, store_options
from ray_ckpt.cli.output import add_row, make_table, moment_text, plain, print_json, stdout
from ray_ckpt.errors import ConfigError
from ray_ckpt.goodput import CAUSES, Goodput, Interruption, Seconds, estimate_goodput

MAX_SHOWN = 50  # interruptions in a table, the last ones; JSON has all
FIGURE_INCHES = (8, 5)
DPI = 120
HOUR_S = 3600.0
COLOURS = ("#2a7f4f", "#e0a030", "#c0392b", "#5b6c7d", "#a98bc0")  # goodput, then CAUSES in order


def goodput(
    path: PathArgument,
    plot: Annotated[
        Path | None,
        typer.Option(help="Write a PNG there: steps over time, and the parts.", show_default=False),
    ] = None,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Estimate a run's goodput: time of steps whose effect survived / wall time, and where the rest went.

    From the log alone, which has commits and openings of sessions and no steps: each time is an estimate
    between two bounds. Time between two commits counts as steps, stalls included. Every session after the
    first one counts as an interruption, for the log does not tell a failure from an end.

    Example: `ray-ckpt goodput /shared/runs/gpt --plot goodput.png`
    """
    catalog = Catalog(path, store_options(storage_option))
    found = estimate_goodput(catalog.sessions, catalog.list(all=True))
    if plot is not None:
        write_plot(plot, catalog.run_name, found)
    if as_json:
        print_json({"run_name": catalog.run_name, "run_uid": catalog.run_uid, **_json(found)})
    else:
        _print(stdout(), catalog.run_name, found)


def _json(found: Goodput) -> dict[str, Any]:
    ratios = found.ratios
    return {
        "goodput": None if ratios is None else dataclasses.asdict(ratios),
        "wall_s": found.wall_s,
        "productive_s": dataclasses.asdict(found.productive),
        "lost_s": dataclasses.asdict(found.lost),
        "badput_s": {cause: dataclasses.asdict(time) for cause, time in found.badput.items()},
        "step": found.step,
        "steps_lost": found.steps_lost,
        "step_s": found.step_s,
        "clock_back_s": found.clock_back_s,
        "interruptions": [dataclasses.asdict(i) for i in found.interruptions],
    }


def _print(console: Console, run_name: str, found: Goodput) -> None:
    ratios = found.ratios
    share = "unknown: the log has one moment" if ratios is None else _percent(ratios)
    console.print(plain(f"run {run_name}  goodput {share}  wall {_span(found.wall_s)}"), soft_wrap=True)
    pace = "unknown" if found.step_s is None else f"{found.step_s:.3g} s"
    more = f", {found.steps_lost} committed steps lost" if found.steps_lost else ""
    console.print(f"step {found.step}{more}; a step with its share of stalls takes {pace}", soft_wrap=True)
    table = make_table("time", "estimate", "share", "at least", "at most", "what", right=(1, 2, 3, 4))
    rows = [("goodput", found.productive, "steps whose effect survived")]
    rows += [(cause, time, CAUSES[cause]) for cause, time in found.badput.items()]
    for name, time, what in rows:
        part = f"{100 * time.estimate / found.wall_s:.1f} %" if found.wall_s else ""
        add_row(table, name, _span(time.estimate), part, _span(time.low), _span(time.high), what)
    console.print(table)
    if found.interruptions:
        _print_interruptions(console, found)
    if found.clock_back_s:
        note = f"Clocks went back by up to {_span(found.clock_back_s)}; that time is missing here."
        console.print(note, soft_wrap=True)


def _print_interruptions(console: Console, found: Goodput) -> None:
    shown = found.interruptions[-MAX_SHOWN:]
    if len(shown) < len(found.interruptions):
        hidden = len(found.interruptions) - len(shown)
        console.print(f"{hidden} earlier interruptions are in --json only.", soft_wrap=True)
    table = make_table("sessions", "next one opened", "steps lost", "time to recover", right=(2, 3))
    for each in shown:
        recovery = "none: no commit" if each.recovery is None else _estimate(each.recovery)
        sessions = f"{each.after_session} to {each.session}"
        add_row(table, sessions, moment_text(each.opened_at_s), _steps(each), recovery)
    console.print(table)


def _steps(each: Interruption) -> str:
    if each.steps_lost is None:
        return f"{each.known_steps_lost} or more"
    lost = each.steps_lost
    return f"{lost.estimate:.0f} ({lost.low:.0f} to {lost.high:.0f})"


def _percent(ratios: Seconds) -> str:
    return f"{100 * ratios.estimate:.1f} % ({100 * ratios.low:.1f} to {100 * ratios.high:.1f} %)"


def _estimate(time: Seconds) -> str:
    return f"{_span(time.estimate)} ({_span(time.low)} to {_span(time.high)})"


def _span(time_s: float) -> str:
    """`12.3 s`, `4.5 min`, `6.7 h`."""
    for unit_s, unit in ((HOUR_S, "h"), (60.0, "min")):
        if time_s >= 2 * unit_s:
            return f"{time_s / unit_s:.1f} {unit}"
    return f"{time_s:.1f} s"


def write_plot(path: Path, run_name: str, found: Goodput) -> None:
    """A PNG: steps over time, green where they survived, and the parts of the wall time below. ConfigError
    without matplotlib, OSError if the file cannot be written."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib.", hint="pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.collections import LineCollection

    figure, (steps, parts) = pyplot.subplots(
        2, 1, figsize=FIGURE_INCHES, gridspec_kw={"height_ratios": (4, 1)}
    )
    start_s = found.progress[0].time_s if found.progress else 0.0
    lines, colours = [], []
    for before, after in pairwise(found.progress):
        if before.session == after.session:
            lines.append([((point.time_s - start_s) / HOUR_S, point.step) for point in (before, after)])
            colours.append(COLOURS[0] if after.survived else COLOURS[2])
    steps.add_collection(LineCollection(lines, colors=colours, linewidths=1.2))
    steps.autoscale_view()
    openings = [(each.opened_at_s - start_s) / HOUR_S for each in found.interruptions]
    whole = steps.get_xaxis_transform()
    steps.vlines(openings, 0, 1, transform=whole, color="0.7", linewidth=0.8, linestyle=":")
    steps.set_xlabel("hours", fontsize=8)
    steps.set_ylabel("step", fontsize=8)
    steps.set_title(plain(run_name).replace("$", r"\$"), fontsize=9)
    left = 0.0
    times = (found.productive, *found.badput.values())
    for name, time, colour in zip(("goodput", *found.badput), times, COLOURS, strict=True):
        share = 100 * time.estimate / found.wall_s if found.wall_s else 0.0
        label = f"{name.replace('_', ' ')} {share:.1f} %"
        parts.barh([0], [share], left=[left], color=colour, label=label)
        left += share
    parts.set_xlim(0, 100)
    parts.set_yticks([])
    parts.set_xlabel("% of wall time, estimated", fontsize=8)
    parts.legend(fontsize=7, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    for axis in (steps, parts):
        axis.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=DPI, format="png")
    pyplot.close(figure)
