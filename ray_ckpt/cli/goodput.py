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
from ray_ckpt.goodput import (
    MEASURED_CAUSES,
    Goodput,
    Interruption,
    Seconds,
    estimate_goodput,
    measure_goodput,
)

MAX_SHOWN = 50  # interruptions in a table, the last ones; JSON has all
FIGURE_INCHES = (8, 5)
DPI = 120
HOUR_S, DAY_S = 3600.0, 86400.0
UNITS = (
    ("days", 2 * DAY_S, DAY_S),
    ("hours", 7200.0, HOUR_S),
    ("minutes", 120.0, 60.0),
)  # from, seconds in it
GOOD, LOST = "#2a7f4f", "#c0392b"
COLOURS = {
    "restore": "#3d7ea6",
    "startup": "#e0a030",
    "stalls": "#8c5aa0",
    "lost_steps": LOST,
    "down_finished": "#b8c0c8",
    "down_process": "#5b6c7d",
    "down_node": "#39444f",
    "down_preemption": "#7f93a6",
    "down_replaced": "#99a3ad",
    "down_launcher": "#abb4bd",
    "down_unknown": "#cfd5da",
    "no_commit": "#d9b3a6",
}  # of MEASURED_CAUSES
SAME_S = 0.05  # a time that is printed alike is not printed as bounds


def goodput(
    path: PathArgument,
    plot: Annotated[
        Path | None,
        typer.Option(help="Write a PNG there: steps over time, and the parts.", show_default=False),
    ] = None,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what became of a run's time: goodput = time of steps whose effect survived / wall time.

    Measured, where sessions have told of their restores, first and last steps, stalls and ends. Where none
    has (an older log, a coordinator that died with its session), an estimate between two bounds stands in.
    Beside it stands what openings of sessions and commits alone would say; there, stalls count as steps. The
    time after a session that had finished, until somebody prolonged the run, is not counted.

    Example: `ray-ckpt goodput /shared/runs/gpt --plot goodput.png`
    """
    catalog = Catalog(path, store_options(storage_option))
    known = catalog.list(all=True)
    found, by_commits = measure_goodput(catalog.sessions, known), estimate_goodput(catalog.sessions, known)
    if plot is not None:
        write_plot(plot, catalog.run_name, found)
    if as_json:
        run = {"run_name": catalog.run_name, "run_uid": catalog.run_uid}
        print_json({**run, **_json(found), "by_commits": _times_json(by_commits)})
    else:
        _print(stdout(), catalog.run_name, found, by_commits)


def _json(found: Goodput) -> dict[str, Any]:
    return {
        **_times_json(found),
        "measured_s": found.measured_s,
        "not_counted_s": found.not_counted_s,
        "step": found.step,
        "steps_lost": found.steps_lost,
        "step_s": found.step_s,
        "clock_back_s": found.clock_back_s,
        "interruptions": [dataclasses.asdict(i) for i in found.interruptions],
    }


def _times_json(found: Goodput) -> dict[str, Any]:
    ratios = found.ratios
    return {
        "goodput": None if ratios is None else dataclasses.asdict(ratios),
        "wall_s": found.wall_s,
        "productive_s": dataclasses.asdict(found.productive),
        "lost_s": dataclasses.asdict(found.lost),
        "badput_s": {cause: dataclasses.asdict(time) for cause, time in found.badput.items()},
    }


def _print(console: Console, run_name: str, found: Goodput, by_commits: Goodput) -> None:
    ratios = found.ratios
    share = "unknown: the log has one moment" if ratios is None else _percent(ratios)
    told = f"  measured {100 * found.measured_s / found.wall_s:.0f} % of it" if found.wall_s else ""
    wall = f"wall {_span(found.wall_s)}"
    console.print(plain(f"run {run_name}  goodput {share}  {wall}{told}"), soft_wrap=True)
    pace = "unknown" if found.step_s is None else f"{found.step_s:.3g} s"
    more = f", {found.steps_lost} committed steps lost" if found.steps_lost else ""
    console.print(f"step {found.step}{more}; a step takes {pace}", soft_wrap=True)
    headers = ("time", "measured", "share", "by commits alone", "what")
    table = make_table(*headers, right=(1, 2, 3), whole=(1, 2, 3), gives_way=(3, 4))
    rows = [("goodput", found.productive, "steps whose effect survived")]
    rows += [(cause, time, MEASURED_CAUSES[cause]) for cause, time in found.badput.items()]
    for name, time, what in rows:
        part = f"{100 * time.estimate / found.wall_s:.1f} %" if found.wall_s else ""
        if time.high or not name.startswith("down_"):
            add_row(table, name, _estimate(time), part, _by_commits(name, by_commits), what)
    console.print(table)
    if found.measured_s < found.wall_s:
        note = "What nobody has told of is estimated, between two bounds; see `ray_ckpt/goodput.py`."
        console.print(note, soft_wrap=True)
    if found.not_counted_s:
        console.print(f"not counted: {_span(found.not_counted_s)} after it had finished", soft_wrap=True)
    if found.interruptions:
        _print_interruptions(console, found)
    if found.clock_back_s:
        size = _span(found.clock_back_s)
        note = f"Clocks differed or jumped by up to {size}; times around there are wrong by up to that much."
        console.print(note, soft_wrap=True)


def _by_commits(name: str, found: Goodput) -> str:
    """What commits alone say of it."""
    if name == "goodput":
        return _estimate(found.productive)
    if name in found.badput:
        return _estimate(found.badput[name])
    if name.startswith("down_"):
        return f"of {_estimate(found.badput['down'])}"
    return {"restore": "in startup", "stalls": "in goodput"}[name]


def _print_interruptions(console: Console, found: Goodput) -> None:
    shown = found.interruptions[-MAX_SHOWN:]
    if len(shown) < len(found.interruptions):
        hidden = len(found.interruptions) - len(shown)
        console.print(f"{hidden} earlier interruptions are in --json only.", soft_wrap=True)
    headers = ("sessions", "cause", "last known", "next one opened", "steps lost", "time to recover")
    table = make_table(*headers, right=(4, 5), whole=(0, 2, 3, 4), gives_way=(2, 3))
    for each in shown:
        recovery = "none: no steps" if each.recovery is None else _estimate(each.recovery)
        sessions = f"{each.after_session} to {each.session}"
        moments = (moment_text(each.last_known_s), moment_text(each.opened_at_s))
        cause = "rollback" if each.is_rollback else each.cause or "unknown"
        add_row(table, sessions, cause, *moments, _steps(each), recovery)
    console.print(table)


def _steps(each: Interruption) -> str:
    if each.steps_lost is None:
        return f"{each.known_steps_lost} or more"
    lost = each.steps_lost
    if lost.low == lost.high:
        return f"{lost.estimate:.0f}"
    return f"{lost.estimate:.0f} ({lost.low:.0f} to {lost.high:.0f})"


def _percent(ratios: Seconds) -> str:
    low, share, high = (f"{100 * ratio:.1f}" for ratio in (ratios.low, ratios.estimate, ratios.high))
    return f"{share} %" if low == high else f"{share} % ({low} to {high} %)"


def _estimate(time: Seconds) -> str:
    if time.high - time.low < SAME_S:
        return _span(time.estimate)
    return f"{_span(time.estimate)} ({_span(time.low)} to {_span(time.high)})"


def _span(time_s: float) -> str:
    """`12.3 s`, `4.5 min`, `6.7 h`, `3.2 d`."""
    for unit_s, unit in ((DAY_S, "d"), (HOUR_S, "h"), (60.0, "min")):
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
    unit, _, unit_s = next((u for u in UNITS if found.wall_s >= u[1]), ("seconds", 0.0, 1.0))
    lines, colours = [], []
    for before, after in pairwise(found.progress):
        if before.session == after.session and after.step > before.step:
            lines.append([((point.time_s - start_s) / unit_s, point.step) for point in (before, after)])
            colours.append(GOOD if after.survived else LOST)
    steps.add_collection(LineCollection(lines, colors=colours, linewidths=1.2))
    steps.autoscale_view()
    openings = [(each.opened_at_s - start_s) / unit_s for each in found.interruptions]
    whole = steps.get_xaxis_transform()
    steps.vlines(openings, 0, 1, transform=whole, color="0.7", linewidth=0.8, linestyle=":")
    steps.set_xlabel(unit, fontsize=8)
    steps.set_ylabel("step", fontsize=8)
    steps.set_title(plain(run_name).replace("$", r"\$"), fontsize=9)
    left = 0.0
    spent = {"goodput": found.productive, **found.badput}
    for name, time in spent.items():
        share = 100 * time.estimate / found.wall_s if found.wall_s else 0.0
        if share:
            label = f"{name.replace('_', ' ')} {share:.1f} %"
            parts.barh([0], [share], left=[left], color=COLOURS.get(name, GOOD), label=label)
        left += share
    parts.set_xlim(0, 100)
    parts.set_yticks([])
    parts.set_xlabel("% of wall time", fontsize=8)
    parts.legend(fontsize=7, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    for axis in (steps, parts):
        axis.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=DPI, format="png")
    pyplot.close(figure)
