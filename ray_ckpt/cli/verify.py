"""`ray-ckpt verify`: checks every byte of checkpoints, or proves from metadata that they can be restored."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import typer
from rich.filesize import decimal

from ray_ckpt.catalog.catalog import Catalog, CheckpointView, Damage, VerifyReport
from ray_ckpt.catalog.runs import is_run
from ray_ckpt.cli.live import run_location
from ray_ckpt.cli.options import (
    EXIT_DAMAGED,
    EXIT_USAGE,
    JsonOption,
    StorageOption,
    argument,
    option,
    store_options,
)
from ray_ckpt.cli.output import (
    FittedTable,
    damage_json,
    print_json,
    remarks,
    remarks_json,
    report_json,
    stdout,
)
from ray_ckpt.cli.progress import byte_bar, count_bar
from ray_ckpt.core.loss_scenarios import LiveCheckpoint
from ray_ckpt.errors import CheckpointError, ConfigError, NewerFormat
from ray_ckpt.format import names
from ray_ckpt.storage.checkpoint_files import CheckpointFiles, files_at, readable
from ray_ckpt.texts import count_text, printable, steps_text
from ray_ckpt.types import CheckpointInfo, Level, ParityGroup
from ray_ckpt.verify.content import verify_files
from ray_ckpt.verify.copies import num_copies, verify_copies
from ray_ckpt.verify.drill import choose
from ray_ckpt.verify.plan import Holder, PlanReport, verify_plan

R = TypeVar("R", VerifyReport, PlanReport)
T = TypeVar("T")


def verify(
    path: Annotated[
        str,
        argument("PATH", "The run, or the directory of one checkpoint, which may be a copy."),
    ],
    step: Annotated[
        int | None,
        option("--step", "This step instead of the newest durable (with --address: live) one."),
    ] = None,
    all: Annotated[
        bool,
        option(
            "--all",
            "All durable checkpoints of the run, and the items that lost ones have left on the storage path; "
            "with --address: all live checkpoints.",
        ),
    ] = False,
    plan: Annotated[
        bool,
        option("--plan", "Prove from the manifest that it can be restored; read no tensors."),
    ] = False,
    nodes: Annotated[bool, option("--nodes", "With --plan: also what each node saved and holds.")] = False,
    address: Annotated[
        str | None,
        option(
            "--address",
            "With --plan: also check what the nodes of this Ray cluster hold; `auto` names the cluster "
            "of this machine.",
            "HOST:PORT",
        ),
    ] = None,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read every byte of a checkpoint and compare it with its digest.

    Prints one line for each damage: file, tensor slice, problem. Exits with 0 if everything is as it was
    saved, 1 if anything is damaged, and 2 if there is nothing to verify, files cannot be read, as without
    permission, or a checkpoint is of a newer version. Checkpoints that the run retires meanwhile are skipped.
    Steps that are in the cluster only are named, with `--all`, and not verified.

    `--plan` takes seconds for any size: it reads the manifest, the list of files and their headers, and
    proves that every element of every tensor is there exactly once. It does not see damage inside files.
    `--address` also proves checkpoints that are in the cluster only, by checking every copy on every node. An
    incomplete copy gives exit code 1, even if the others are enough to restore; so does an extra file in the
    folder that a reader might take for the checkpoint's.

    Example: `ray-ckpt verify /shared/runs/gpt --all`
    """
    _check_options(step, all, plan, nodes, address)
    if address is not None:
        _show_plans(_plans_in_cluster(path, step, all, address), nodes, as_json)
        return
    targets, left_out = _targets(path, store_options(storage_option), step, all)
    if plan:
        plans = _reports(targets, lambda t: verify_plan(t.files, root_digest=t.root_digest))
        _show_plans(plans, nodes, as_json, left_out)
        return
    with byte_bar("verifying", sum(target.size_bytes for target in targets)) as bar:
        found = _reports(
            targets, lambda t: verify_files(t.files, root_digest=t.root_digest, progress=bar.advance)
        )
    _show(found, report_json, _print_report, as_json, left_out)


def _check_options(step: int | None, all: bool, plan: bool, nodes: bool, address: str | None) -> None:
    if nodes and not plan:
        raise ConfigError("--nodes goes with --plan.", hint="Give both.")
    if address is not None and not plan:
        raise ConfigError(
            "--address goes with --plan.", hint="Give both; `ray-ckpt drill` reads every byte in a cluster."
        )
    if step is not None and all:
        raise ConfigError("--step and --all exclude each other.", hint="Give one of them.")


@dataclass(frozen=True, slots=True)
class _Looked(Generic[R]):
    """A report, and what the log or the cluster knows of its checkpoint, if it was found there."""

    report: R
    info: CheckpointInfo | None = None
    groups: tuple[ParityGroup, ...] = ()


_Found: TypeAlias = tuple[Sequence[_Looked[R]], Sequence[NewerFormat]]
"""Reports, and the errors of checkpoints of a newer version, which cannot be verified."""


def _plans_in_cluster(path: str, step: int | None, all: bool, address: str) -> _Found[PlanReport]:
    """Verify the plans of live checkpoints, including the copies on nodes."""
    from ray_ckpt.actors.attach import attached  # Ray takes seconds to import
    from ray_ckpt.actors.live_run import LiveRun

    with attached(address):
        run = LiveRun(str(run_location(path)))
        chosen = choose(run.sources.live, step)
        if not all:
            chosen = (tuple(known for known in chosen if known.on_lineage) or chosen)[-1:]
        with count_bar("verifying copies", sum(map(num_copies, chosen))) as bar:

            def look(known: LiveCheckpoint) -> _Looked[PlanReport] | None:
                report = verify_copies(known, run.reach, retry=run.again, progress=bar.advance)
                groups = tuple(places.group for places in known.groups)
                return None if report is None else _Looked(report, known.checkpoint, groups)

            return _each(chosen, look)


def _reports(targets: Iterable[_Target], look: Callable[[_Target], R]) -> _Found[R]:
    """Look at all targets; skip damaged ones that the run has deleted in the meantime."""

    def check_once(target: _Target) -> _Looked[R] | None:
        report = look(target)
        if not report.ok and target.is_deleted():
            return None
        return _Looked(report, target.view.info if target.view is not None else None)

    return _each(targets, check_once)


def _each(things: Iterable[T], look: Callable[[T], _Looked[R] | None]) -> _Found[R]:
    """Collect the reports of `look` for `things`; `look` returns None for a retired checkpoint."""
    reports: list[_Looked[R]] = []
    newer: list[NewerFormat] = []
    for thing in things:
        try:
            report = look(thing)
        except NewerFormat as error:
            newer.append(error)
        else:
            reports += [] if report is None else [report]
    if not reports and newer:
        raise newer[0]
    if not reports:
        raise ConfigError(
            "All checkpoints were retired while they were verified.",
            hint="`ray-ckpt ls` shows what is live.",
        )
    return reports, newer


def _show_plans(found: _Found[PlanReport], nodes: bool, as_json: bool, left_out: Sequence[int] = ()) -> None:
    _show(found, partial(_plan_json, nodes=nodes), partial(_print_plan, nodes=nodes), as_json, left_out)


def _show(
    found: _Found[R],
    to_json: Callable[[R], dict[str, Any]],
    show: Callable[[R], None],
    as_json: bool,
    left_out: Sequence[int],
) -> None:
    """Print all reports and errors, and exit unless everything is ok."""
    reports, newer = found
    failed = [looked.report for looked in reports if not looked.report.ok]
    is_damaged = not all(report.is_unread for report in failed)
    if as_json:
        checkpoints = [to_json(each.report) | remarks_json(each.info, each.groups) for each in reports]
        ok = not (failed or newer)
        print_json({"ok": ok, "checkpoints": checkpoints, "in_cluster_only": left_out})
    else:
        for looked in reports:
            show(looked.report)
            if (info := looked.info) is not None:
                for remark in remarks(info, looked.groups):
                    stdout().print_line(f"Step {info.step}: {remark}.")
                if info.state == "lost":
                    stdout().print_line(f"Step {info.step}: the nodes have lost the other items.")
        if left_out:
            count = count_text(len(left_out), "step")
            stdout().print_line(f"Not verified: {count} in the cluster only ({steps_text(left_out)}).")
    for error in newer:
        print(f"ray-ckpt: {printable(str(error))}", file=sys.stderr)
    if failed or newer:
        raise typer.Exit(EXIT_DAMAGED if is_damaged else EXIT_USAGE)


@dataclass(frozen=True, slots=True)
class _Target:
    """Files to verify, and their checkpoint in a run's log, if there is one."""

    files: CheckpointFiles
    size_bytes: int
    view: CheckpointView | None = None

    @property
    def root_digest(self) -> str | None:
        return self.view.root_digest if self.view is not None else None

    def is_deleted(self) -> bool:
        """Return whether the checkpoint is deleted in the run's current log; False if it is unreadable."""
        with contextlib.suppress(CheckpointError):
            return self.view is not None and self.view.is_deleted()
        return False


def _targets(
    path: str, options: Mapping[str, str], step: int | None, all: bool
) -> tuple[Sequence[_Target], Sequence[int]]:
    """Return the targets and, with `all`, the steps of live checkpoints that are only in the cluster."""
    files = files_at(path, options)
    with readable(files.location):
        is_checkpoint, size_bytes = _is_checkpoint(files), files.size_bytes
    if is_checkpoint and not is_run(files.location, options):
        if step is not None or all:
            raise ConfigError(
                f"{path} is one checkpoint.", hint="Leave out --step and --all, or name its run."
            )
        return [_Target(files, size_bytes)], []
    catalog = Catalog(path, options)
    durable = [view for view in catalog if view.where is not None]
    if step is not None:
        durable = [view for view in (catalog[step],) if view.where is not None]
    elif all:
        durable += [view for view in map(catalog.view, catalog.lost_exported) if view.where is not None]
    else:
        durable = [view for view in (catalog.newest(Level.DURABLE),) if view is not None] or durable[-1:]
    if not durable:
        what = "it has no durable checkpoint" if step is None else f"step {step} is in the cluster only"
        hint = "Only durable ones can be read here, see `ray-ckpt ls`; "
        if catalog.lost_exported:
            hint += "`--all` verifies the items that lost checkpoints have left; "
        raise ConfigError(
            f"Nothing to verify in run {catalog.run_name}: {what}.",
            hint=f"{hint}`--plan --address auto` proves on the cluster what its nodes hold.",
        )
    left_out = sorted({view.info.step for view in catalog if view.info.level < Level.DURABLE}) if all else []
    return [_Target(view.files(), view.size_bytes, view) for view in durable], left_out


def _is_checkpoint(files: CheckpointFiles) -> bool:
    """Return whether `files` are those of one checkpoint, even if damaged or renamed."""
    if not files.names:
        return False
    return names.is_directory_name(files.location.name) or any(map(names.is_file_name, files.names))


def _plan_json(report: PlanReport, nodes: bool) -> dict[str, Any]:
    document = {
        "folder": report.where,
        "ok": report.ok,
        "is_restorable": report.is_restorable,
        "world_sizes": "any" if report.is_restorable else None,
        "saved_world_size": report.world_size,
        "num_files": report.num_files,
        "size_bytes": report.size_bytes,
        "tensor_bytes": report.tensor_bytes,
        "only_items": report.only_items or None,
        "read_bytes": report.read_bytes,
        "items": [asdict(item) for item in report.items],
        "damages": [damage_json(damage) for damage in report.damages],
        "holders": [_holder_json(holder) for holder in report.holders],
    }
    return document | ({"nodes": [asdict(node) for node in report.nodes]} if nodes else {})


def _holder_json(holder: Holder) -> dict[str, Any]:
    damages = [damage_json(damage) for damage in holder.damages]
    fragments = list(holder.fragments)
    return {"where": holder.where, "node": holder.node or None, "fragments": fragments, "damages": damages}


def _print_plan(report: PlanReport, nodes: bool) -> None:
    console = stdout()
    verdict = f"{_verdict(report)}{_only_text(report)}"
    console.print_line(f"{report.where}: {verdict}; read {decimal(report.read_bytes)}")
    headers = ("item", "tensors", "slices", "size", "coverage", "notes")
    table = FittedTable(*headers, right=(1, 2, 3, 4), whole=(3, 4), fold=(0,), gives_way=(1,))
    for item in report.items:
        percent = 100 * item.num_covered / item.num_elements if item.num_elements else 100.0
        note = f"{item.num_differing} slices differ between ranks" if item.num_differing else ""
        size, coverage = decimal(item.size_bytes), f"{percent:.6g} %"
        table.add(item.item, item.num_tensors, item.num_slices, size, coverage, note)
    console.print(table)
    if nodes:
        table = FittedTable("node", "ranks", "files", "size", right=(0, 2, 3), whole=(3,))
        for node in report.nodes:
            ranks = ", ".join(map(str, node.ranks))
            table.add(node.node_index, ranks, node.num_files, decimal(node.size_bytes))
        console.print(table)
    if nodes and report.holders:
        table = FittedTable("holder", "fragments", "findings", right=(2,), fold=(0,))
        for holder in report.holders:
            table.add(holder.where, ", ".join(map(str, holder.fragments)), len(holder.damages))
        console.print(table)
    if report.is_restorable:
        console.print_line(
            f"Saved by {report.world_size} ranks, can be restored by any number: {report.num_files} files of "
            f"{decimal(report.size_bytes)}, {decimal(report.tensor_bytes)} of that tensors."
        )
    if report.holders and report.ok:
        count = sum(len(holder.fragments) for holder in report.holders)
        console.print(f"All {count} copies of its files are whole, at {len(report.holders)} holders.")
    _print_damages(report.damages)
    for holder in report.holders:
        _print_damages(holder.damages, at=f"{holder.where}: ")


def _verdict(report: PlanReport) -> str:
    if report.only_items and not report.is_unread:
        return "ok" if report.ok else f"DAMAGED ({count_text(report.num_damages, 'finding')})"
    if report.ok:
        return "can be restored"
    verdict = "CANNOT BE READ" if report.is_unread else "CANNOT BE RESTORED"
    if report.is_restorable:
        what = "copies are bad or missing" if report.holders else "its folder has changed since the save"
        verdict = f"can be restored; {'not all files can be read' if report.is_unread else what}"
    return f"{verdict} ({count_text(report.num_damages, 'finding')})"


def _only_text(report: VerifyReport | PlanReport) -> str:
    return f"; it has only {report.only_items}, for no restart" if report.only_items else ""


def _print_report(report: VerifyReport) -> None:
    console = stdout()
    bad = "CANNOT BE READ" if report.is_unread else "DAMAGED"
    verdict = "ok" if report.ok else f"{bad} ({count_text(len(report.damages), 'finding')})"
    read = f"{report.num_files} files, {report.num_slices} slices, {decimal(report.size_bytes)}"
    console.print_line(f"{report.where}: {verdict}{_only_text(report)}; read {read}")
    _print_damages(report.damages)


def _print_damages(damages: Iterable[Damage], at: str = "") -> None:
    console = stdout()
    for damage in damages:
        line = f"{at}{damage.file}: {damage.where}: {damage.detail}"
        console.print_line(line, style="red")
