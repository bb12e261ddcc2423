"""`ray-ckpt top`: a live view of the service of a Ray cluster."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from ray_ckpt.cli.live import (
    agents_table,
    leaving_line,
    overview_of,
    run_details,
    running_service,
    runs_named,
    runs_table,
    service_line,
)
from ray_ckpt.cli.options import AddressOption, JsonOption, RunArgument, option
from ray_ckpt.cli.output import print_json, stdout
from ray_ckpt.errors import ConfigError, Unavailable
from ray_ckpt.texts import local_time_text, printable

if TYPE_CHECKING:
    from ray_ckpt.actors.messages import ServiceView

MAX_SILENT = 5  # calls in a row without an answer; a coordinator that died is back within seconds


def top(
    run: RunArgument = None,
    address: AddressOption = None,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.2, max=3600.0, help="Seconds between two updates.")
    ] = 1.0,
    once: Annotated[bool, option("--once", "Print once and exit; the default without a terminal.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Watch the checkpoint service: saves and drains in progress, exposure of each node, lag of each level.

    Ctrl-C ends it. With --json it prints the state once, as `status` does.

    Example: `ray-ckpt top gpt`
    """
    console = stdout()
    with running_service(address) as service:
        view = _look(service, run)
        if console.is_terminal and not once and not as_json:
            _watch(console, service, run, interval_s)
            return
    if as_json:
        print_json(dataclasses.asdict(view))
    else:
        console.print(frame(view, run))


def frame(view: ServiceView, run: str | None) -> RenderableType:
    """Return a view of the service: details of `run`, or of the only run; a row for each of several runs."""
    parts: list[RenderableType] = [Text(service_line(view)), *map(leaving_line, view.leaving)]
    busy = [found for found in view.runs if found.saves or found.drains or found.state == "training"]
    if not view.runs:
        parts.append(Text("No run is open."))
    elif run is None and len(view.runs) > 1:
        parts.append(runs_table(view.runs))
        parts += map(run_details, busy)
    else:
        parts += map(run_details, view.runs)
    if run is None and view.agents:
        parts.append(agents_table(view.agents))
    return Group(*parts)


def _look(service: Any, run: str | None) -> ServiceView:
    """Return the service's overview, only of `run` if given. Raise ConfigError if that run is not open."""
    view = overview_of(service)
    if run is None:
        return view
    if not (found := runs_named(view, run)):
        known = ", ".join(sorted({known.name for known in view.runs})) or "none"
        raise ConfigError(
            f"The service has no run {run} open.",
            hint=f"It has: {known}. `ray-ckpt status PATH` reads a log.",
        )
    return dataclasses.replace(view, runs=found)


def _watch(console: Console, service: Any, run: str | None, interval_s: float) -> None:
    """Update the view until Ctrl-C. Raise Unavailable after MAX_SILENT calls without an answer."""
    picture, silent = frame(_look(service, run), run), 0
    with Live(picture, console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
        try:
            while True:
                note = f"{local_time_text(time.time())}  every {interval_s:g} s, Ctrl-C ends it"
                live.update(Group(Text(note, style="dim"), picture), refresh=True)
                time.sleep(interval_s)
                try:
                    picture, silent = frame(_look(service, run), run), 0
                except Unavailable as error:
                    silent += 1
                    if silent >= MAX_SILENT:
                        raise
                    live.update(Group(Text(printable(str(error)), style="red"), picture), refresh=True)
        except KeyboardInterrupt:
            return
