"""`ray-ckpt drill`: rehearse a loss by reading the files that would survive it and comparing digests."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.cli.live import run_location
from ray_ckpt.cli.options import (
    EXIT_DAMAGED,
    JsonOption,
    PathArgument,
    StorageOption,
    option,
    rate,
    store_options,
)
from ray_ckpt.cli.output import (
    FittedTable,
    is_narrow,
    level_text,
    print_json,
    remarks,
    remarks_json,
    stdout,
)
from ray_ckpt.cli.progress import byte_bar
from ray_ckpt.core.loss_scenarios import REMOTE_ONLY, LiveCheckpoint, lose_node, lose_rack
from ray_ckpt.errors import ConfigError
from ray_ckpt.location import Location, locate
from ray_ckpt.storage.checkpoint_files import readable
from ray_ckpt.storage.remote.tier import RemoteTier
from ray_ckpt.texts import count_text, printable
from ray_ckpt.transport.sending import Limiter
from ray_ckpt.types import Tier
from ray_ckpt.verify.drill import CheckpointDrill, DrillReport, TierRead, choose
from ray_ckpt.verify.drill import drill as read_what_is_left
from ray_ckpt.verify.live_manifest import ReadAccess

_TIERS: tuple[Tier, ...] = ("local", "peer", "remote")
_STYLES = {"passed": "green", "failed": "red", "not covered": "yellow"}


def drill(
    path: PathArgument,
    node: Annotated[
        str | None,
        option("--lose-node", "The id of a node, or its beginning.", "NODE"),
    ] = None,
    rack: Annotated[
        str | None,
        option("--lose-rack", "A failure domain: all nodes whose label has this value.", "DOMAIN"),
    ] = None,
    remote_only: Annotated[
        bool,
        option("--remote-only", "All nodes: only the storage path is left."),
    ] = False,
    step: Annotated[int | None, option("--step", "Only this step instead of all live ones.")] = None,
    max_rate: Annotated[
        str | None,
        option("--max-rate", "Limit of all reads together, such as 200MB/s; default: none.", "BYTES/S"),
    ] = None,
    address: Annotated[
        str | None,
        option(
            "--address",
            "The Ray cluster; default: the one of this machine. With --remote-only a cluster is used "
            "only if it is named here; `auto` names that of this machine.",
            "HOST:PORT",
        ),
    ] = None,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Rehearse a loss: read all live checkpoints from what it would leave, and keep nothing.

    Every byte is read as a restore reads it and compared with its digest. The exit code is 1 if a checkpoint
    does not survive a loss that its level covers (replicated: the loss of as many nodes as it has replicas;
    durable: of all nodes), and 2 if all checkpoints were retired during the drill. Without `--step` the
    checkpoint from which the run would continue is shown too. No node, arena or file is changed. Results are
    recorded in the run's log, except without a cluster, where only `--remote-only` works.

    Example: `ray-ckpt drill /shared/runs/gpt --lose-node 3f2a`
    """
    if (node is not None) + (rack is not None) + remote_only != 1:
        raise ConfigError(
            "A drill needs one loss to rehearse.",
            hint="Give --lose-node NODE, --lose-rack DOMAIN or --remote-only.",
        )
    max_bytes_per_s = rate(max_rate)
    options = store_options(storage_option)
    location = run_location(path)
    if remote_only and address is None:
        report = _without_cluster(path, options, step, max_bytes_per_s)
        unrecorded: tuple[str, ...] = ("it was read without the cluster; use --address auto",)
    else:
        report, unrecorded = _in_cluster(str(location), node, rack, step, address, max_bytes_per_s)
    _show(location, report, unrecorded, as_json)


def _show(location: Location, report: DrillReport, unrecorded: tuple[str, ...], as_json: bool) -> None:
    """Print the report, and exit with EXIT_DAMAGED if it has failed."""
    if as_json:
        print_json({"run": str(location), "recorded": not unrecorded, **report_json(report)})
    else:
        print_report(location.name, report)
    for reason in unrecorded:
        print(f"ray-ckpt: not in the run's log: {printable(reason)}", file=sys.stderr)
    if report.failed:
        raise typer.Exit(EXIT_DAMAGED)


def _without_cluster(
    path: str, options: Mapping[str, str], step: int | None, max_bytes_per_s: int | None
) -> DrillReport:
    catalog = Catalog(path, options)
    remote = RemoteTier(locate(catalog.where), options)
    live = _live(catalog)
    reach = ReadAccess(remote=remote, limiter=Limiter(max_bytes_per_s))

    def again(known: LiveCheckpoint) -> tuple[LiveCheckpoint, ReadAccess] | None:
        catalog.refresh()
        found = (c for c in _live(catalog) if c.checkpoint.id == known.checkpoint.id)
        return next(((c, reach) for c in found), None)

    with readable(remote.root), byte_bar("drilling", _size(choose(live, step))) as bar:
        return read_what_is_left(
            live, REMOTE_ONLY, reach, step=step, last_step=None, retry=again, progress=bar.advance
        )


def _size(chosen: Iterable[LiveCheckpoint]) -> int:
    """Return the bytes of all chosen checkpoints."""
    return sum(live.checkpoint.size_bytes for live in chosen)


def _live(catalog: Catalog) -> tuple[LiveCheckpoint, ...]:
    """Return the live checkpoints in the log, which does not record the nodes that hold copies."""
    lineage = {c.id.attempt for c in catalog.lineage}
    return tuple(
        LiveCheckpoint(checkpoint=c, holders=((),) * c.num_nodes, on_lineage=c.id.attempt in lineage)
        for c in catalog.checkpoints
    )


def _in_cluster(
    key: str,
    node: str | None,
    rack: str | None,
    step: int | None,
    address: str | None,
    max_bytes_per_s: int | None,
) -> tuple[DrillReport, tuple[str, ...]]:
    """Return the report, and the reasons why parts of the report are not in the log."""
    from ray_ckpt.actors.attach import attached  # Ray takes seconds to import
    from ray_ckpt.actors.live_run import RunDrills

    with attached(address):
        run = RunDrills(key, max_bytes_per_s=max_bytes_per_s)
        scenario, domains = REMOTE_ONLY, run.sources.domains
        if node is not None:
            scenario = lose_node(node, domains.keys())
        elif rack is not None:
            scenario = lose_rack(rack, domains)
        with byte_bar("drilling", _size(choose(run.sources.live, step))) as bar:
            report = run.drill(scenario, step=step, progress=bar.advance)
    return report, tuple(run.unrecorded)


# Output


def report_json(report: DrillReport) -> dict[str, Any]:
    return {
        "scenario": report.scenario.name,
        "nodes_lost": sorted(report.scenario.lost),
        "passed": report.passed,
        "is_covered": report.is_covered,
        "resume_step": report.resume.step if report.resume is not None else None,
        "steps_lost": report.steps_lost,
        "last_step": report.last_step,
        "tiers": _tiers_json(report.reads),
        "checkpoints": [_result_json(result) for result in report.results],
    }


def _result_json(result: CheckpointDrill) -> dict[str, Any]:
    return {
        "step": result.checkpoint.step,
        "attempt": result.checkpoint.id.attempt,
        "level": result.checkpoint.level.label,
        "verdict": result.verdict,
        "is_covered": result.is_covered,
        "on_lineage": result.on_lineage,
        "seconds": result.seconds,
        **remarks_json(result.checkpoint, result.groups),
        "tiers": _tiers_json(result.reads),
        "problems": list(result.problems),
        "notes": list(result.notes),
    }


def _tiers_json(reads: Mapping[Tier, TierRead]) -> dict[str, dict[str, float]]:
    return {
        tier: {"size_bytes": r.size_bytes, "seconds": r.seconds, "bytes_per_s": r.bytes_per_s}
        for tier, r in reads.items()
    }


def print_report(run_name: str, report: DrillReport) -> None:
    console = stdout()
    verdict = "FAILED" if report.failed else "passed"
    if not report.is_covered:
        verdict = "no checkpoint must survive this loss"
    console.print_line(f"run {run_name}  {report.scenario.name}: {verdict}")
    brief, headers = is_narrow(console), ("step", "level", "verdict", "seconds", *_TIERS)
    table = FittedTable(*headers, right=(0, 3, 4, 5, 6), whole=(4, 5, 6), gives_way=(3, 1))
    for result in report.results:
        cells = (_read_text(result.reads.get(tier), brief=brief) for tier in _TIERS)
        seconds = f"{result.seconds:.2f}" if result.seconds else "-"
        style = _STYLES.get(result.verdict)
        info = result.checkpoint
        table.add(info.step, level_text(info, brief=brief), result.verdict, seconds, *cells, style=style)
    console.print(table)
    for result in report.results:
        for line in (*result.problems, *(f"{note} (another copy was read instead)" for note in result.notes)):
            style = "red" if result.verdict == "failed" else "yellow"
            console.print_line(f"step {result.checkpoint.step}: {line}", style=style)
        for line in remarks(result.checkpoint, result.groups):
            console.print_line(f"step {result.checkpoint.step}: {line}")
    console.print_line(_conclusion(report))


def _read_text(read: TierRead | None, *, brief: bool) -> str:
    """Return a text such as `1.2 GB at 2.1 GB/s`; if `brief`, without the speed."""
    if read is None:
        return "-"
    size = decimal(read.size_bytes)
    return size if brief else f"{size} at {decimal(int(read.bytes_per_s))}/s"


def _conclusion(report: DrillReport) -> str:
    if not report.is_whole:
        return "The checkpoint from which the run would continue is shown only without --step."
    if report.steps_lost is None:
        return "The step that is left after this loss is unknown: newer checkpoints have been retired."
    lost = _lost_text(report.steps_lost, is_least=report.last_step is None)
    if report.resume is None:
        return f"After this loss no checkpoint is left to continue from: {lost}."
    return f"After this loss the run would continue from step {report.resume.step}: {lost}."


def _lost_text(num_steps: int, *, is_least: bool) -> str:
    if not num_steps:
        rest = "no saved step would be lost; the number of later steps is unknown"
        return rest if is_least else "no step would be lost"
    return f"{'at least ' if is_least else ''}{count_text(num_steps, 'step')} would be lost"
