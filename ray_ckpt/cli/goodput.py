"""`ray-ckpt goodput`: the parts of a run's wall time."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from ray_ckpt.analysis.goodput import (
    CAUSES,
    COLOURS,
    Goodput,
    Interruption,
    Seconds,
    measure_goodput,
)
from ray_ckpt.analysis.report.document import goodput_json
from ray_ckpt.analysis.report.facts import (
    clocks_text,
    estimate_text,
    measured_percent,
    phase_text,
    range_text,
)
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.cli.options import JsonOption, PathArgument, StorageOption, option, store_options
from ray_ckpt.cli.output import FittedTable, Output, print_json, stdout
from ray_ckpt.errors import ConfigError, missing_package
from ray_ckpt.storage.output_file import output_file, whole_file
from ray_ckpt.texts import count_text, duration_text, local_time_text, printable

MAX_SHOWN = 50  # newest interruptions in the table; the JSON output has all
FIGURE_INCHES = (8, 5)
DPI = 120
HOUR_S, DAY_S = 3600.0, 86400.0
UNITS = (
    ("days", 2 * DAY_S, DAY_S),
    ("hours", 7200.0, HOUR_S),
    ("minutes", 120.0, 60.0),
)  # unit, least wall time for which it is used, seconds per unit
MAX_TITLE = 60  # characters of a run's name that fit into the picture


def goodput(
    path: PathArgument,
    plot: Annotated[
        Path | None,
        option("--plot", "Write a PNG: steps over time, and the parts of it.", "FILE"),
    ] = None,
    force: Annotated[bool, option("--force", "Replace the file if it exists.")] = False,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how a run spent its time: goodput = time of steps whose effect survived / wall time.

    Times are measured where the log has a session's restore, first and last step, stalls and end. A session
    without these (one at work, or one whose coordinator died with it) is estimated, with bounds. The time
    between a finished session and the next one is not counted.

    Example: `ray-ckpt goodput /shared/runs/gpt --plot goodput.png`
    """
    if plot is not None and plot.suffix.lower() != ".png":
        raise ConfigError(f"{plot} is not the name of a PNG.", hint="End it in .png.", path=str(plot))
    file = None if plot is None else output_file(plot, force=force)
    catalog = Catalog(path, store_options(storage_option))
    known = catalog.list(all=True)
    found = measure_goodput(catalog.sessions, known)
    if file is not None:
        with whole_file(file) as temporary:
            temporary.write_bytes(draw(catalog.run_name, found))
    if as_json:
        run = {"run_name": catalog.run_name, "run_uid": catalog.run_uid}
        print_json({**run, **_json(found)})
    else:
        _print(stdout(), catalog.run_name, found)


def _json(found: Goodput) -> dict[str, Any]:
    return {
        "goodput": None if found.ratios is None else dataclasses.asdict(found.ratios),
        "lost_s": dataclasses.asdict(found.lost),
        **goodput_json(found),
        "step": found.step,
        "steps_lost": found.steps_lost,
        "step_s": found.step_s,
        "interruptions": [dataclasses.asdict(i) for i in found.interruptions],
    }


def _print(console: Output, run_name: str, found: Goodput) -> None:
    headline = f"run {run_name}  {_share(found)}  wall {duration_text(found.wall_s)}{_measured(found)}"
    console.print_line(headline)
    pace = "unknown" if found.step_s is None else f"{found.step_s:.3g} s"
    more = f", {count_text(found.steps_lost, 'committed step')} lost" if found.steps_lost else ""
    console.print_line(f"step {found.step}{more}; a step takes {pace}")
    headers = ("cause", "time", "share", "what")
    table = FittedTable(*headers, right=(1, 2), whole=(1, 2), gives_way=(3,))
    rows = [("goodput", found.productive, "steps whose effect survived")]
    rows += [(cause, time, CAUSES[cause]) for cause, time in found.badput.items()]
    for name, time, what in rows:
        part = f"{100 * time.estimate / found.wall_s:.1f} %" if found.wall_s else ""
        if time.high or not name.startswith("down_"):
            table.add(name, range_text(time), part, what)
    console.print(table)
    if found.wall_s and measured_percent(found) < 100:
        note = "Times that are not in the log are estimated, with bounds; see `docs/operations/goodput.md`."
        console.print_line(note)
    if found.not_counted_s:
        idle = duration_text(found.not_counted_s)
        console.print_line(f"not counted: {idle} after the run had finished or before its first training")
    if found.interruptions:
        _print_interruptions(console, found)
    if clocks := clocks_text(found):
        console.print_line(clocks)


def _print_interruptions(console: Output, found: Goodput) -> None:
    shown = found.interruptions[-MAX_SHOWN:]
    if len(shown) < len(found.interruptions):
        hidden = count_text(len(found.interruptions) - len(shown), "earlier interruption")
        console.print_line(f"Without {hidden}; --json has all.")
    headers = ("sessions", "cause", "last known", "next one opened", "steps lost", "time to recover")
    table = FittedTable(*headers, right=(4, 5), whole=(0, 2, 3, 4), gives_way=(2, 3))
    for each in shown:
        recovery = "none: no steps" if each.recovery is None else range_text(each.recovery)
        sessions = f"{each.after_session} to {each.session}"
        moments = (local_time_text(each.last_known_s), local_time_text(each.opened_at_s))
        cause = "rollback" if each.is_rollback else "import" if each.is_import else each.cause or "unknown"
        table.add(sessions, cause, *moments, _steps(each), recovery)
    console.print(table)
    if any(each.phases for each in shown):
        _print_phases(console, shown)


def _print_phases(console: Output, shown: Sequence[Interruption]) -> None:
    table = FittedTable("sessions", "phases of the recovery", whole=(0,))
    for each in (each for each in shown if each.phases):
        spent = (f"{phase_text(name)} {duration_text(time_s)}" for name, time_s in each.phases.items())
        table.add(f"{each.after_session} to {each.session}", ", ".join(spent))
    console.print(table)
    console.print_line("A phase ends with the moment of its name; see `docs/operations/goodput.md`.")


def _steps(each: Interruption) -> str:
    if each.steps_lost is None:
        return f"{each.known_steps_lost} or more"
    return estimate_text(each.steps_lost)


def _share(found: Goodput) -> str:
    """Return a text such as `goodput 43.2 % (40.1 to 45.0 %)`."""
    ratios = found.ratios
    return f"goodput {'unknown: the log has one moment' if ratios is None else _percent(ratios)}"


def _measured(found: Goodput) -> str:
    return f"  measured {measured_percent(found)} % of it" if found.wall_s else ""


def _percent(ratios: Seconds) -> str:
    low, share, high = (f"{100 * ratio:.1f}" for ratio in (ratios.low, ratios.estimate, ratios.high))
    return f"{share} %" if low == high else f"{share} % ({low} to {high} %)"


def draw(run_name: str, found: Goodput) -> bytes:
    """Draw a PNG of steps over time, with dotted lost steps, and of the parts of the wall time below.

    Time that is not counted is left out. Raise ConfigError if matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise missing_package("matplotlib", "plot", "--plot") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.collections import LineCollection

    figure, (steps, parts) = pyplot.subplots(
        2, 1, figsize=FIGURE_INCHES, gridspec_kw={"height_ratios": (4, 1)}
    )
    begins_s = _beginnings(found)
    unit, _, unit_s = next((u for u in UNITS if found.wall_s >= u[1]), ("seconds", 0.0, 1.0))
    lines, colours, styles = [], [], []
    for before, after in pairwise(found.progress):
        if before.session == after.session and after.step > before.step:
            begin_s = begins_s[after.session]
            lines.append([((point.time_s - begin_s) / unit_s, point.step) for point in (before, after)])
            colours.append(COLOURS["goodput" if after.survived else "lost_steps"])
            styles.append("solid" if after.survived else (0, (1.5, 0.7)))
    steps.add_collection(LineCollection(lines, colors=colours, linestyles=styles, linewidths=1.8))
    steps.autoscale_view()
    openings = [(each.opened_at_s - begins_s[each.session]) / unit_s for each in found.interruptions]
    whole = steps.get_xaxis_transform()
    steps.vlines(openings, 0, 1, transform=whole, color="0.7", linewidth=0.8, linestyle=":")
    steps.set_xlabel(unit, fontsize=8)
    steps.set_ylabel("step", fontsize=8)
    title = f"{_short(printable(run_name))}\n{_share(found)}{_measured(found)}"
    steps.set_title(title.replace("$", r"\$"), fontsize=9)
    left = 0.0
    spent = {"goodput": found.productive, **found.badput}
    for name, time in spent.items():
        share = 100 * time.estimate / found.wall_s if found.wall_s else 0.0
        if share:
            label = f"{name.replace('_', ' ')} {share:.1f} %"
            parts.barh([0], [share], left=[left], color=COLOURS[name], label=label)
        left += share
    parts.set_xlim(0, 100)
    parts.set_yticks([])
    parts.set_xlabel("% of wall time", fontsize=8)
    if left:
        parts.legend(fontsize=7, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    for axis in (steps, parts):
        axis.tick_params(labelsize=7)
    figure.tight_layout()
    data = io.BytesIO()
    figure.savefig(data, dpi=DPI, format="png")
    pyplot.close(figure)
    return data.getvalue()


def _beginnings(found: Goodput) -> dict[int, float]:
    """Return, for each session, the Unix time at which the drawing of the session begins."""
    begin_s = found.spans[0].opened_s if found.spans else 0.0
    begins_s = {span.session: begin_s for span in found.spans[:1]}
    for before, after in pairwise(found.spans):
        begin_s += after.opened_s - before.closed_s
        begins_s[after.session] = begin_s
    return begins_s


def _short(name: str) -> str:
    """Return the beginning and the end of a name that is too long for the picture."""
    half = (MAX_TITLE - 3) // 2
    return name if len(name) <= MAX_TITLE else f"{name[:half]}...{name[-half:]}"
