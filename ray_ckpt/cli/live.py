"""Functions of the commands that call the service of a Ray cluster: reach the service, print its state.

Ray is imported with the first call, not before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.text import Text

from ray_ckpt.cli.output import FittedTable, Output, status_remarks
from ray_ckpt.errors import CheckpointError, ConfigError, ServiceError
from ray_ckpt.format.names import SERVICE_DIR
from ray_ckpt.location import Location, locate
from ray_ckpt.texts import age_text, count_text, printable
from ray_ckpt.types import parity_text
from ray_ckpt.verify.live_manifest import SHORT_ID

if TYPE_CHECKING:
    from ray_ckpt.actors.messages import AgentCard, DrainingView, NodeView, RunView, ServiceView

NO_SERVICE = "This Ray cluster has no checkpoint service."
START_HINT = "A training starts it, and so does `ray-ckpt up`."
MAX_NODES = 32  # rows of a run's table of nodes; nodes with the most steps at risk come first
LEVELS = ("local", "replicated", "durable")
STATE_STYLES = {"training": "green", "gone": "yellow", "failed": "yellow"}


# Reaching it


@contextmanager
def service_if_any(address: str | None) -> Iterator[tuple[Any | None, CheckpointError | None]]:
    """Yield (service, None), or (None, reason) if the cluster has no reachable service.

    A named cluster that does not answer is an error. A cluster that was found on this machine may belong to
    somebody else, so its refusal or silence is only a reason.
    """
    from ray_ckpt.actors import attach

    why: CheckpointError | None = None
    with ExitStack() as stack:
        try:
            stack.enter_context(attach.attached(address))
            service = attach.find_service()
            if service is None:
                why = ConfigError(NO_SERVICE, hint=START_HINT)
        except (ConfigError, ServiceError) as error:
            if address is not None or (attach.is_named(None) and isinstance(error, ServiceError)):
                raise
            service, why = None, error
        yield service, why


@contextmanager
def running_service(address: str | None) -> Iterator[Any]:
    """Yield the service of the cluster. Raise ConfigError if there is no cluster, or no service in it."""
    from ray_ckpt.actors import attach

    with attach.attached(address):
        service = attach.find_service()
        if service is None:
            raise ConfigError(NO_SERVICE, hint=START_HINT)
        yield service


def overview_of(service: Any) -> ServiceView:
    """Return the service's overview. Raise Unavailable if it does not answer."""
    from ray_ckpt.actors import attach

    return attach.overview(service)


def runs_named(view: ServiceView, wanted: str) -> tuple[RunView, ...]:
    """Return the runs with this name, or else the run at `<storage_path>/<name>`."""
    return tuple(run for run in view.runs if run.name == wanted) or runs_at(view, wanted)


def run_location(path: str) -> Location:
    """Return the run's location in the form that its coordinator uses."""
    found = locate(path)
    return found.parent if found.name == SERVICE_DIR else found


def runs_at(view: ServiceView, path: str) -> tuple[RunView, ...]:
    """Return the run at `<storage_path>/<name>` if the service has it open."""
    try:
        places = str(locate(path)), str(run_location(path))
    except CheckpointError:  # no path
        return ()
    return tuple(run for run in view.runs if run.where in places)


# Printing


def service_line(view: ServiceView) -> str:
    return printable(
        f"service  ray_ckpt {view.version}, protocol {view.protocol}, Ray {view.ray_version}; coordinator on "
        f"node {short(view.coordinator_node)} ({view.coordinator_host}), up {age_text(view.up_s)}; "
        f"{len(view.agents)} agent(s) on {len(view.nodes)} node(s)"
        + ("" if view.is_encrypted else "; not encrypted")
    )


def runs_table(runs: Iterable[RunView]) -> FittedTable:
    headers = ("run", "state", "session", "ranks", "step", *LEVELS, "at risk", "missing", "drains")
    table = FittedTable(*headers, right=(2, 3, 4, 9, 10), fold=(0,), gives_way=(2, 3, 10, 6, 9, 5))
    for run in runs:
        table.add(
            run.name,
            run.state,
            "-" if run.session is None else run.session,
            run.world_size or "-",
            run.step or "-",
            *(_newest_text(run, level) for level in LEVELS),
            _risk_text(run.nodes),
            run.copies_missing,
            len(run.drains),
            style=STATE_STYLES.get(run.state),
        )
    return table


def run_details(run: RunView) -> Group:
    """Return all facts of a run, as `status` and `top` print them."""
    parts: list[RenderableType] = [
        _line(f"run {run.name}  {run.where}  uid {run.run_uid}"),
        _line(_at_work(run)),
        _levels_table(run),
    ]
    if run.nodes:
        parts.append(_nodes_table(run))
    if run.saves:
        parts.append(_saves_table(run))
    if run.drains:
        parts.append(_drains_table(run))
    parts += [_line(note) for note in _notes(run)]
    return Group(*parts)


def agents_table(agents: Iterable[AgentCard]) -> FittedTable:
    table = FittedTable("agent on node", "endpoint", "staging", whole=(1,), fold=(2,), gives_way=(2,))
    for agent in agents:
        table.add(short(agent.node_id), agent.endpoint, agent.staging)
    return table


def leaving_line(node: DrainingView) -> Text:
    when = "soon" if node.in_s is None else f"in {age_text(max(node.in_s, 0.0))}"
    return _line(f"node {short(node.node_id)} is about to go, {when} ({node.source})", "yellow")


def print_service(console: Output, view: ServiceView, runs: Sequence[RunView], *, details: bool) -> None:
    """Print the service and `runs`: a row for each, or with `details` tables for each."""
    console.print_line(service_line(view))
    for node in view.leaving:
        console.print(leaving_line(node))
    if not runs:
        console.print("No run is open.")
    elif details:
        for run in runs:
            console.print(run_details(run))
    else:
        console.print(runs_table(runs))
        for run in runs:
            for note in _notes(run):
                console.print_line(f"{run.name}: {note}")
    if view.agents:
        console.print(agents_table(view.agents))


def short(node_id: str) -> str:
    return printable(node_id[:SHORT_ID])


def ranks_text(ranks: Iterable[int]) -> str:
    """Return a text such as `0-3, 8`."""
    spans = []
    for _, group in groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0]):
        found = [rank for _, rank in group]
        spans.append(str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}")
    return ", ".join(spans)


def _line(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)


def _short_span(span_s: float) -> str:
    return f"{span_s:.3g} s" if span_s < 60 else age_text(span_s)


def _at_work(run: RunView) -> str:
    parts = ["its launcher is gone" if run.state == "gone" else str(run.state)]
    if run.is_put_away:
        parts.append("put away")
    if run.session is not None:
        nodes = sum(bool(node.ranks) for node in run.nodes)
        parts.append(f"session {run.session}, {run.world_size} rank(s) on {nodes} node(s)")
    if run.step:
        parts.append(f"step {run.step}")
    if run.step_s:
        parts.append(f"{run.step_s:.3g} s a step")
    if run.interval_s:
        parts.append(f"a save each {_short_span(run.interval_s)}")
    if run.parity_groups:
        groups = count_text(len(run.parity_groups), "group")
        parts.append(f"parity {parity_text(run.parity_groups)} in {groups}")
    parts.append(f"{run.live} live checkpoint(s)")
    return "  ".join(parts)


def _newest_text(run: RunView, level: str) -> str:
    found = next((newest for newest in run.newest if newest.level == level), None)
    return "-" if found is None else f"{found.step}, {age_text(found.age_s)} ago"


def _risk_text(nodes: Sequence[NodeView]) -> str:
    """Return the cost of the worst node's death: lost steps, and the tier of the newest surviving state."""
    exposed = [node.exposure for node in nodes if node.exposure is not None]
    if not exposed:
        return "-"
    worst = max(exposed, key=lambda found: found.steps_at_risk)
    return f"{worst.steps_at_risk} step(s), from {worst.tier or 'the beginning'}"


def _levels_table(run: RunView) -> FittedTable:
    table = FittedTable("level", "newest step", "age", "steps behind", right=(1, 3))
    newest = {found.level: (found.step, age_text(found.age_s), found.steps_behind) for found in run.newest}
    for level in LEVELS:
        table.add(level, *newest.get(level, "---"))
    return table


def _nodes_table(run: RunView) -> FittedTable:
    nodes, protection = run.nodes, "parity group" if run.parity_groups else "copies on"
    headers = ("node", "ranks", protection, "if it dies", "steps lost", "free", "of", "reserve", "")
    table = FittedTable(*headers, right=(4, 5, 6, 7), whole=(5, 6, 7), gives_way=(7, 6, 2, 5))
    risky = sorted(nodes, key=lambda node: -(node.exposure.steps_at_risk if node.exposure else -1))
    shown = list(nodes) if len(nodes) <= MAX_NODES else risky[:MAX_NODES]
    for node in shown:
        lost, disk = node.exposure, node.disk
        table.add(
            short(node.node_id),
            ranks_text(node.ranks) or "-",
            ", ".join(map(short, node.holders)) or ("-" if node.parity_group is None else node.parity_group),
            *("--" if lost is None else (_resume_text(lost.step, lost.tier), lost.steps_at_risk)),
            *(
                "---"
                if disk is None
                else map(decimal, (disk.free_bytes, disk.total_bytes, disk.reserve_bytes))
            ),
            _node_note(node),
            style="yellow" if _node_note(node) else None,
        )
    if len(shown) < len(nodes):
        table.add(f"{len(nodes) - len(shown)} more")
    return table


def _resume_text(step: int | None, tier: str | None) -> str:
    return "from the beginning" if step is None else f"step {step}, from {tier}"


def _node_note(node: NodeView) -> str:
    notes = [] if node.is_live else ["gone"]
    if node.is_draining:
        notes.append("leaves" + ("" if node.gone_in_s is None else f" in {age_text(max(node.gone_in_s, 0))}"))
    if node.disk is not None and node.disk.is_full:
        notes.append("disk is full")
    elif node.disk is not None and node.disk.free_bytes < node.disk.reserve_bytes:
        notes.append("reserve is used")
    return ", ".join(notes)


def _saves_table(run: RunView) -> FittedTable:
    copies = "parity files" if run.parity_groups else "copies"
    headers = ("save", "phase", "captured", "stored", copies, "bytes", "for")
    table = FittedTable(*headers, right=(2, 3, 4, 5, 6), whole=(0, 5, 6), gives_way=(2, 4))
    for save in run.saves:
        total = save.copies + save.copies_awaited
        table.add(
            f"step {save.step}",
            save.phase,
            f"{save.ranks_captured}/{save.world_size}",
            f"{save.ranks_stored}/{save.world_size}",
            f"{save.copies}/{total}" if total else "-",
            decimal(save.size_bytes),
            "-" if save.age_s is None else age_text(save.age_s),
        )
    return table


def _drains_table(run: RunView) -> FittedTable:
    headers = ("drain", "state", "fragments", "bytes", "rate", "left", "tries", "on nodes")
    table = FittedTable(*headers, right=(2, 3, 4, 5, 6), whole=(0, 3, 4, 5), gives_way=(7, 6, 2, 5, 4))
    for drain in run.drains:
        if drain.items:  # the size of the items is not known before the end
            cells = (drain.state, f"{drain.fragments_done}/{drain.fragments}", "-", "-", "-", drain.tries)
            nodes = ", ".join(map(short, drain.nodes)) or "-"
            table.add(f"step {drain.step}: {drain.items}", *cells, nodes)
            continue
        # fragments have about the same size; for unfinished ones, agents report the compressed bytes sent
        done = drain.size_bytes * drain.fragments_done // drain.fragments
        done = min(done + run.sent_bytes.get(drain.attempt, 0), drain.size_bytes)
        rate = done / drain.started_s if drain.started_s else 0.0
        table.add(
            f"step {drain.step}",
            drain.state,
            f"{drain.fragments_done}/{drain.fragments}",
            f"{decimal(done)} of {decimal(drain.size_bytes)}",
            f"{decimal(int(rate))}/s" if rate else "-",
            age_text((drain.size_bytes - done) / rate) if rate else "-",
            drain.tries,
            ", ".join(map(short, drain.nodes)) or "-",
            style="red" if drain.state == "failing" else None,
        )
    return table


def _notes(run: RunView) -> Iterator[str]:
    yield from (awaited.text for awaited in run.awaited)
    if run.copies_missing:
        what = "copies or parity files" if run.parity_groups else "copies of fragments"
        yield f"{run.copies_missing} {what} are yet to be made again"
    if run.needed_in_cluster and run.state != "training":  # during training, some checkpoints always are
        yield f"in the cluster only: step(s) {', '.join(map(str, run.needed_in_cluster[-10:]))}"
    if run.records_waiting > 1:
        yield f"{run.records_waiting} records wait for the log's store"
    yield from status_remarks(run.shared_bytes, run.suspect, run.damaged)
    if run.exported:
        yield f"exported: {run.exported}"
    if run.warning:
        yield f"last warning, {age_text(run.warning_age_s or 0.0)} ago: {run.warning}"
