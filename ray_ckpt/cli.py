"""`ray-ckpt`: look at the checkpoints of a run, verify them, see what retention would do, and go back to an
older one, on any machine that reaches the storage path.

Needs no cluster. Reads only, through the catalog, but for `rollback`, which writes two records to the log.
Everything is there as JSON too, for scripts.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

import ray_ckpt
from ray_ckpt.catalog import (
    REQUESTS_AT_A_TIME,
    Catalog,
    CheckpointView,
    Damage,
    VerifyReport,
    find_runs,
    to_datetime,
)
from ray_ckpt.config import RunOptions
from ray_ckpt.core.retention import (
    Decision,
    Policy,
    RetentionView,
    decide,
    from_text,
    pinned_by,
    policies_of,
    to_text,
)
from ray_ckpt.errors import CheckpointError, ConfigError, RunInUse
from ray_ckpt.format import jsontext, names
from ray_ckpt.location import Location
from ray_ckpt.rollback import QUIET_S, LogTail, Rollback, open_log, plan_rollback, roll_back
from ray_ckpt.types import CheckpointInfo, Level, SessionInfo
from ray_ckpt.verify import CheckpointFiles, files_at, readable, verify_files

EXIT_DAMAGED = 1
EXIT_USAGE = 2
PIPE_WIDTH = 250  # columns of a table that no terminal bounds; wide enough for the longest rows

_AGO = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Look at the checkpoints of a run, verify them, see what retention would do, and go back to an "
    "older one. Needs no cluster.",
    epilog="PATH is a folder or a URL: `/shared/runs/gpt`, `s3://bucket/runs/gpt`, `gs://bucket/runs/gpt`. "
    "Credentials come from the environment, a profile or a role. "
    "Exit codes: 0 fine, 1 damage found, 2 wrong usage or nothing there to read.",
)

PathArgument = Annotated[
    str, typer.Argument(metavar="PATH", help="The run: `<storage_path>/<run name>`.", show_default=False)
]
StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="NAME=VALUE",
        help="How to open a URL, such as profile=training; no secrets. Repeatable.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def main(argv: Sequence[str] | None = None) -> None:
    """The console script. Exits with 0, 1 (damage) or 2 (usage, or an error that its message explains)."""
    try:
        app(args=argv)
    except (CheckpointError, OSError) as error:
        print(f"ray-ckpt: {_plain(str(error))}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ray-ckpt {ray_ckpt.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def _options(given: Iterable[str] | None) -> dict[str, str]:
    """`profile=training` as an option of the store."""
    if any("=" not in text for text in given or ()):  # it is not shown: it may be a secret
        raise ConfigError("A --storage-option has no value.", hint="Give NAME=VALUE.")
    return dict(text.partition("=")[::2] for text in given or ())


def _keep(name: str, text: str, metavar: str | None = None) -> Any:
    """An option of `gc` that says what to keep."""
    panel = "Another policy than the last session's"
    return typer.Option(name, help=text, metavar=metavar, show_default=False, rich_help_panel=panel)


# ls


@app.command()
def ls(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="The run, `<storage_path>/<run name>`, or a storage path with several runs.",
            show_default=False,
        ),
    ],
    all: Annotated[bool, typer.Option("--all", help="Also what is lost, retired or deleted.")] = False,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the checkpoints of a run, oldest first, or the runs of a storage path.

    `*` marks the newest checkpoint, which a restart resumes from; `+` the others on its lineage.

    Example: `ray-ckpt ls /shared/runs/gpt --all`
    """
    options = _options(storage_option)
    try:
        catalog = Catalog(path, options)
    except ConfigError:
        if not (runs := find_runs(path, options)):
            raise
        with ThreadPoolExecutor(REQUESTS_AT_A_TIME) as pool:
            _list_runs(list(pool.map(lambda run: _run_summary(run, options), runs)), as_json)
    else:
        _list_checkpoints(catalog, all, as_json)


def _list_checkpoints(catalog: Catalog, all: bool, as_json: bool) -> None:
    newest = catalog.newest()
    last = newest.info.id.attempt if newest else ""
    lineage = {c.id.attempt for c in catalog.lineage}
    rows = [
        {
            **_info_json(view),
            "newest": view.info.id.attempt == last,
            "on_lineage": view.info.id.attempt in lineage,
        }
        for view in catalog.views(all=all)
    ]
    if as_json:
        _print_json({"run_name": catalog.run_name, "run_uid": catalog.run_uid, "checkpoints": rows})
        return
    table = _table(
        "", "step", "level", "state", "session", "world", "size", "when", "metrics", right=(1, 4, 5, 6)
    )
    for info, row in zip(catalog.list(all=all), rows, strict=True):
        mark = "*" if row["newest"] else "+" if row["on_lineage"] else ""
        cells = (info.step, _level(info), info.state, info.id.session, info.world_size)
        _add(
            table,
            mark,
            *cells,
            decimal(info.size_bytes),
            _when(info.committed_at_s),
            _metrics(info.metrics),
            style="bold" if row["newest"] else None if row["on_lineage"] else "dim",
        )
    console = _console()
    console.print(f"run {catalog.run_name}  uid {catalog.run_uid}  sessions {len(catalog.sessions)}")
    console.print(table if rows else "No live checkpoints." if not all else "No checkpoints.")


def _run_summary(run: Location, options: Mapping[str, str]) -> dict[str, Any]:
    """A run as a row; one that cannot be read does not hide the others."""
    try:
        catalog = Catalog(run, options)
    except CheckpointError as error:
        return {"run_name": run.name, "error": error.message}
    newest = catalog.newest()
    return {
        "run_name": run.name,
        "live_checkpoints": len(catalog),
        "newest_step": newest.info.step if newest else None,
        "newest_level": newest.info.level.label if newest else None,
        "in_cluster": newest.where is None if newest else None,
        "committed_at_s": newest.info.committed_at_s if newest else None,
    }


def _list_runs(rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    if as_json:
        _print_json({"runs": rows})
        return
    table = _table("run", "live checkpoints", "newest step", "level", "when", right=(1, 2))
    for row in rows:
        if "error" in row:
            _add(table, row["run_name"], "", "", row["error"], "", style="red")
        elif row["newest_step"] is None:
            _add(table, row["run_name"], row["live_checkpoints"], "", "", "")
        else:
            level = row["newest_level"] + (", in cluster" if row["in_cluster"] else "")
            when = _when(row["committed_at_s"])
            _add(table, row["run_name"], row["live_checkpoints"], row["newest_step"], level, when)
    _console().print(table)


# show


@app.command()
def show(
    path: PathArgument,
    step: Annotated[int, typer.Argument(metavar="STEP", help="The step.", show_default=False)],
    slices: Annotated[bool, typer.Option("--slices", help="Also every slice: where its bytes are.")] = False,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one checkpoint: what the log says, its files, and its tensors by item.

    Of several attempts at a step it takes the newest live one, on the lineage if there is one.

    Example: `ray-ckpt show /shared/runs/gpt 3000 --slices`
    """
    catalog = Catalog(path, _options(storage_option))
    view = catalog.find(step, all=True) or catalog[step]
    document = {"run_name": catalog.run_name, "run_uid": catalog.run_uid, **_info_json(view)}
    if view.where is not None:
        document |= _content_json(view, slices)
    if as_json:
        _print_json(document)
        return
    console = _console()
    facts = _table("", "", header=False)
    for key in ("run_name", "run_uid", "step", "attempt", "session", "state"):
        _add(facts, key.replace("_", " "), document[key])
    _add(facts, "level", _level(view.info))
    _add(facts, "world", f"{view.info.world_size} ranks on {view.info.num_nodes} nodes")
    _add(facts, "size", f"{decimal(view.info.size_bytes)} ({view.info.size_bytes} bytes)")
    _add(facts, "when", _when(view.info.committed_at_s))
    _add(facts, "root digest", view.info.root_digest)
    _add(facts, "metrics", _metrics(view.info.metrics))
    _add(facts, "pins", _pins(view.info) or "none")
    verified_at_s = view.info.verified_at_s
    _add(facts, "last verified", "never" if verified_at_s is None else _when(verified_at_s))
    _add(facts, "path", view.where or "none: it has no files on the storage path")
    console.print(facts)
    if view.where is not None:
        _print_content(console, document)


def _content_json(view: CheckpointView, slices: bool) -> dict[str, Any]:
    """What only the files can tell."""
    description, table = view.description(), view.slices()
    rows = table.filter(_is_slice(table))
    grouped = rows.group_by("item", use_threads=False).aggregate(
        [("name", "count_distinct"), ("name", "count"), ("nbytes", "sum"), ("dtype", "distinct")]
    )
    items = [
        {
            "item": row["item"],
            "tensors": row["name_count_distinct"],
            "slices": row["name_count"],
            "size_bytes": row["nbytes_sum"],
            "dtypes": sorted(row["dtype_distinct"]),
        }
        for row in grouped.to_pylist()
    ]
    content: dict[str, Any] = {
        "files": [
            {"name": f.name, "size_bytes": f.size_bytes, "digest": f.digest} for f in description.files
        ],
        "items": sorted(items, key=lambda item: str(item["item"])),
    }
    if slices:
        content["slices"] = rows.drop_columns(["kind"]).to_pylist()
    return content


def _is_slice(table: Any) -> Any:
    import pyarrow.compute as pc

    return pc.equal(table["kind"], "slice")


def _print_content(console: Console, document: Mapping[str, Any]) -> None:
    table = _table("file", "size", right=(1,))
    for file in document["files"]:
        _add(table, file["name"], decimal(file["size_bytes"]))
    console.print(table)
    table = _table("item", "tensors", "slices", "size", "dtypes", right=(1, 2, 3))
    for item in document["items"]:
        size = decimal(item["size_bytes"])
        _add(table, item["item"], item["tensors"], item["slices"], size, " ".join(item["dtypes"]))
    console.print(table)
    if "slices" in document:
        table = _table(
            "tensor", "dtype", "global shape", "offset", "shape", "file", "at byte", "bytes", right=(6, 7)
        )
        for part in document["slices"]:
            key = f"{part['item']}.{part['name']}" if part["name"] else part["item"]
            shapes = (part["global_shape"], part["offset"], part["shape"])
            _add(table, key, part["dtype"], *shapes, part["file"], part["byte_offset"], part["nbytes"])
        console.print(table)


# verify


@app.command()
def verify(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="The run, or the directory of one checkpoint, wherever it was copied to.",
            show_default=False,
        ),
    ],
    step: Annotated[
        int | None, typer.Option(help="This step instead of the newest durable one.", show_default=False)
    ] = None,
    all: Annotated[bool, typer.Option("--all", help="All durable checkpoints of the run.")] = False,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read every byte of a checkpoint and compare it with its digest.

    Prints a line per damage: file, tensor slice, what is wrong. Exits with 0 if all is as it was saved,
    1 if anything is damaged, 2 if there is nothing to verify.

    Example: `ray-ckpt verify /shared/runs/gpt --all && echo "safe to delete the old run"`
    """
    targets = _targets(path, _options(storage_option), step, all)
    reports: list[VerifyReport] = []
    with _progress(targets) as advance:
        for target in targets:
            report = verify_files(target.files, root_digest=target.root_digest, progress=advance)
            reports.append(report)
    if as_json:
        _print_json({"ok": _all_ok(reports), "checkpoints": [_report_json(r) for r in reports]})
    else:
        for report in reports:
            _print_report(report)
    if not _all_ok(reports):
        raise typer.Exit(EXIT_DAMAGED)


def _all_ok(reports: Iterable[VerifyReport]) -> bool:
    return not any(report.damages for report in reports)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """What to verify: files, and the root digest in the log if there is one."""

    files: CheckpointFiles
    root_digest: str | None
    size_bytes: int


def _targets(path: str, options: Mapping[str, str], step: int | None, all: bool) -> tuple[_Target, ...]:
    if step is not None and all:
        raise ConfigError("--step and --all exclude each other.", hint="Give one of them.")
    files = files_at(path, options)
    with readable(files.location):
        is_checkpoint, size_bytes = _is_checkpoint(files), files.size_bytes
    if is_checkpoint:
        if step is not None or all:
            raise ConfigError(
                f"{path} is one checkpoint.", hint="Leave out --step and --all, or name its run."
            )
        return (_Target(files=files, root_digest=None, size_bytes=size_bytes),)
    catalog = Catalog(path, options)
    durable = [view for view in catalog if view.where is not None]
    if step is not None:
        durable = [view for view in (catalog[step],) if view.where is not None]
    elif not all:
        durable = [view for view in (catalog.newest(Level.DURABLE),) if view is not None] or durable[-1:]
    if not durable:
        what = "it has no durable checkpoint" if step is None else f"step {step} is in the cluster only"
        raise ConfigError(
            f"Nothing to verify in run {catalog.run_name}: {what}.",
            hint="Only durable checkpoints can be read here; see `ray-ckpt ls`.",
        )
    return tuple(
        _Target(files=view.files(), root_digest=view.info.root_digest, size_bytes=view.info.size_bytes)
        for view in durable
    )


def _is_checkpoint(files: CheckpointFiles) -> bool:
    """Whether they are the files of one checkpoint, damaged or renamed perhaps."""
    if not files.names:
        return False
    return names.is_directory_name(files.location.name) or any(map(names.is_file_name, files.names))


@contextmanager
def _progress(targets: Iterable[_Target]) -> Iterator[Any]:
    """A bar on stderr, if that is a terminal; gives the function that moves it by bytes."""
    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=sum(target.size_bytes for target in targets))
        yield lambda nbytes: bar.advance(task, nbytes)


def _print_report(report: VerifyReport) -> None:
    console = _console()
    verdict = "ok" if report.ok else f"DAMAGED ({len(report.damages)} findings)"
    read = f"{report.num_files} files, {report.num_slices} slices, {decimal(report.size_bytes)}"
    console.print(_plain(f"{report.where}: {verdict}; read {read}"), soft_wrap=True)
    for damage in report.damages:
        line = f"{damage.file}: {damage.where}: {damage.detail}"
        console.print(_plain(line), style="red", soft_wrap=True)


# gc


@app.command()
def gc(
    path: PathArgument,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show it, change nothing. Required.")] = False,
    keep_last: Annotated[int | None, _keep("--keep-last", "The last so many; 3 if not given.")] = None,
    keep_every: Annotated[int | None, _keep("--keep-every", "The first from each multiple of it.")] = None,
    keep_every_s: Annotated[
        float | None, _keep("--keep-every-s", "The first of each period of so many seconds.")
    ] = None,
    keep_best: Annotated[
        str | None, _keep("--keep-best", "The best, such as loss:min:2.", "METRIC:MODE:COUNT")
    ] = None,
    keep_milestones: Annotated[
        list[float] | None,
        _keep("--keep-milestone", "The first from this part of --total-steps. Repeatable.", "FRACTION"),
    ] = None,
    total_steps: Annotated[int | None, _keep("--total-steps", "Steps of the whole run.")] = None,
    keep_epochs: Annotated[bool, _keep("--keep-epochs", "The last of each finished epoch.")] = False,
    ttl_s: Annotated[float | None, _keep("--ttl-s", "None older than so many seconds.")] = None,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show which live checkpoints retention would give up, which would stay, and why.

    Takes the policy of the last training session, or the one given by options, which are those of
    `CheckpointCallback`. The service of a running training does the work; it keeps what is in use besides.

    Example: `ray-ckpt gc /shared/runs/gpt --dry-run --keep-last 3 --keep-every 1000`
    """
    if not dry_run:
        raise ConfigError(
            "Checkpoints are deleted only by the service of a running training.",
            hint="Add --dry-run to see what it would delete, and why.",
        )
    catalog = Catalog(path, _options(storage_option))
    options = {
        "keep_last": keep_last,
        "keep_every": keep_every,
        "keep_every_s": keep_every_s,
        "keep_best": _best(keep_best) if keep_best is not None else None,
        "keep_milestones": tuple(keep_milestones or ()) or None,
        "total_steps": total_steps,
        "keep_epochs": keep_epochs or None,
        "ttl_s": ttl_s,
    }
    policies = _policies(catalog, {name: value for name, value in options.items() if value is not None})
    view = RetentionView(live=catalog.checkpoints, lineage=catalog.lineage, now_s=time.time())
    decisions = decide(view, policies)
    if as_json:
        _print_json(
            {
                "run_name": catalog.run_name,
                "run_uid": catalog.run_uid,
                "policy": to_text(policies),
                "checkpoints": [_decision_json(catalog.view(d.checkpoint), d) for d in decisions],
            }
        )
    else:
        _print_decisions(catalog, policies, decisions)


def _best(text: str) -> tuple[str, str, int]:
    """`loss:min:2` as the option of a run."""
    head, _, count = text.rpartition(":")
    metric, _, mode = head.rpartition(":")
    if not metric or not re.fullmatch("[0-9]{1,9}", count):
        hint = "Give METRIC:MODE:COUNT, such as loss:min:2."
        raise ConfigError(f"--keep-best is {text!r}.", hint=hint, option="keep_best")
    return metric, mode, int(count)


def _policies(catalog: Catalog, options: Mapping[str, Any]) -> tuple[Policy, ...]:
    """Those that the options choose, else those of the last session."""
    if options:
        return policies_of(RunOptions.parse(**options))
    policies = from_text(catalog.sessions[-1].retention) if catalog.sessions else ()
    if not policies:
        raise ConfigError(
            f"The log of run {catalog.run_name} names no retention policy.",
            hint="Give one by options, such as --keep-last 3.",
        )
    return policies


def _decision_json(view: CheckpointView, decision: Decision) -> dict[str, Any]:
    return {**_info_json(view), "kept": decision.kept, "reasons": list(decision.reasons)}


def _print_decisions(catalog: Catalog, policies: Iterable[Policy], decisions: Sequence[Decision]) -> None:
    table = _table("", "step", "level", "session", "size", "when", "why", right=(1, 3, 4))
    for decision in decisions:
        info = decision.checkpoint
        _add(
            table,
            "stays" if decision.kept else "goes",
            info.step,
            _level(info),
            info.id.session,
            decimal(info.size_bytes),
            _when(info.committed_at_s),
            ", ".join(decision.reasons),
            style=None if decision.kept else "red",
        )
    going = [decision.checkpoint for decision in decisions if not decision.kept]
    console = _console()
    console.print(_plain(f"run {catalog.run_name}  policy {to_text(policies)}"), soft_wrap=True)
    console.print(table if decisions else "No live checkpoints.")
    if decisions:
        size = decimal(sum(info.size_bytes for info in going))
        console.print(f"{len(going)} of {len(decisions)} would go, {size}; nothing was changed.")


# rollback


@app.command()
def rollback(
    path: PathArgument,
    before: Annotated[
        int | None, typer.Option(help="To the newest step of the lineage below this.", show_default=False)
    ] = None,
    to: Annotated[
        int | None,
        typer.Option(help="To exactly this step, on another branch if need be.", show_default=False),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    even_if_at_work: Annotated[
        bool, typer.Option("--even-if-at-work", help="Also if a training may be at work; it is stopped.")
    ] = False,
    quiet_s: Annotated[
        float, typer.Option(help="A run is idle if its log has no record of the last so many seconds.")
    ] = QUIET_S,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go back to an older checkpoint: the next training of the run goes on from it, on a new branch.

    For a loss spike, say. Later checkpoints stay until the first save of that training; then they are
    deleted, but for pinned ones. Until then, `--to` one of them undoes it. A training that is at work is
    stopped: it loses the run at its next save. The log is no proof: one that saves seldom looks idle.

    Example: `ray-ckpt rollback /shared/runs/gpt --before 3000`
    """
    tier, tail = open_log(path, _options(storage_option))
    plan = plan_rollback(tail.history, before=before, to=to)
    is_at_work = tail.is_at_work(time.time(), quiet_s)
    if is_at_work and not even_if_at_work:
        raise RunInUse(
            f"Run {tail.history.run_name} may be at work: {_last_record(tail)}.",
            hint="Stop its training and wait, or give --even-if-at-work: it would be stopped.",
        )
    notes = [*plan.notes()]
    if is_at_work:
        notes.append(f"{_last_record(tail)}: a training that is at work is stopped.".capitalize())
    if not as_json:
        _print_plan(plan, notes)
    if not plan.is_done:
        if not yes:
            _confirm(f"Go back to step {plan.checkpoint.step}?")
        tier.probe_log()
    session = roll_back(tier.log, plan, now_s=time.time())
    if as_json:
        _print_json(_rollback_json(plan, session, notes))
        return
    done = "was open already" if plan.is_done else "is open"
    _console().print(
        f"Session {session.session} {done}; start a new training of the run: it goes on from step "
        f"{plan.checkpoint.step}. It may be the one that had it, if that tries again.",
        soft_wrap=True,
    )


def _last_record(tail: LogTail) -> str:
    past_s = max(0.0, time.time() - (tail.last_s or 0.0))
    return f"its log has a record of {past_s:.0f} s ago"


def _confirm(question: str) -> None:
    """ConfigError if the answer is not yes, or nobody is there to give one."""
    try:
        is_sure = typer.confirm(question, err=True)
    except typer.Abort:
        typer.echo(err=True)  # after the question
        is_sure = False
    if not is_sure:
        raise ConfigError("Nothing was changed.", hint="Answer y, or give --yes.")


def _print_plan(plan: Rollback, notes: Iterable[str]) -> None:
    console = _console()
    history, info = plan.history, plan.checkpoint
    console.print(_plain(f"run {history.run_name}  uid {history.run_uid}"), soft_wrap=True)
    console.print(
        f"session {plan.session} goes on from step {info.step}, {_level(info)}, saved "
        f"{_when(info.committed_at_s)}",
        soft_wrap=True,
    )
    if plan.left_aside:
        table = _table("left aside", "level", "session", "when", "metrics", right=(0, 2))
        for left in plan.left_aside:
            cells = (left.step, _level(left), left.id.session, _when(left.committed_at_s))
            _add(table, *cells, _metrics(left.metrics))
        console.print(table)
        console.print("They are deleted after the first save of the next training, but for pinned ones.")
    for note in notes:
        console.print(_plain(note), soft_wrap=True)


def _rollback_json(plan: Rollback, session: SessionInfo, notes: Sequence[str]) -> dict[str, Any]:
    return {
        "run_name": plan.history.run_name,
        "run_uid": plan.history.run_uid,
        "session": session.session,
        "step": plan.checkpoint.step,
        "attempt": plan.checkpoint.id.attempt,
        "level": plan.checkpoint.level.label,
        "left_aside": [
            {"step": info.step, "attempt": info.id.attempt, "level": info.level.label}
            for info in plan.left_aside
        ],
        "was_done": plan.is_done,
        "notes": list(notes),
    }


# Output


def _info_json(view: CheckpointView) -> dict[str, Any]:
    info = view.info
    return {
        "step": info.step,
        "attempt": info.id.attempt,
        "session": info.id.session,
        "state": info.state,
        "level": info.level.label,
        "replicas": info.replicas,
        "world_size": info.world_size,
        "num_nodes": info.num_nodes,
        "size_bytes": info.size_bytes,
        "committed_at_s": info.committed_at_s,
        "root_digest": info.root_digest,
        "metrics": jsontext.metrics_json(info.metrics),
        "pins": dict(info.pins),
        "verified_at_s": info.verified_at_s,
        "path": view.where,
    }


def _report_json(report: VerifyReport) -> dict[str, Any]:
    return {
        "folder": report.where,
        "ok": report.ok,
        "num_files": report.num_files,
        "num_slices": report.num_slices,
        "size_bytes": report.size_bytes,
        "damages": [_damage_json(damage) for damage in report.damages],
    }


def _damage_json(damage: Damage) -> dict[str, str]:
    return {"file": damage.file, "where": damage.where, "detail": damage.detail}


def _print_json(document: object) -> None:
    typer.echo(json.dumps(document, indent=1, allow_nan=False))


def _console() -> Console:
    """Stdout as it is now. Text is printed as it stands: no markup, and wide when nothing bounds it."""
    bounded = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(markup=False, highlight=False, emoji=False, width=None if bounded else PIPE_WIDTH)


def _table(*headers: str, right: Sequence[int] = (), header: bool = True) -> Table:
    table = Table(box=box.SIMPLE_HEAD if header else None, show_header=header, pad_edge=False)
    for index, name in enumerate(headers):
        table.add_column(name, justify="right" if index in right else "left", overflow="fold")
    return table


def _add(table: Table, *cells: object, style: str | None = None) -> None:
    table.add_row(*(_plain(str(cell)) for cell in cells), style=style)


def _plain(text: str) -> str:
    """`text` without control characters: names in a log or manifest must not drive a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _level(info: CheckpointInfo) -> str:
    if info.level is Level.DURABLE:
        return info.level.label
    copies = f"({info.replicas})" if info.level is Level.REPLICATED else ""
    return f"{info.level.label}{copies}" + (", in cluster" if info.state == "live" else "")


def _metrics(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.5g}" for name, value in sorted(metrics.items()))


def _pins(info: CheckpointInfo) -> str:
    """`eval, nightly until 2026-09-21 14:13:20, old (expired)`."""
    holding = pinned_by(info, time.time())
    return ", ".join(
        f"{owner} (expired)"
        if owner not in holding
        else owner
        if end_s is None
        else f"{owner} until {_moment(end_s)}"
        for owner, end_s in sorted(info.pins.items())
    )


def _when(time_s: float) -> str:
    """`3 min ago, 2026-09-21 14:13:20` in the local time zone; `?` for what no calendar holds."""
    if to_datetime(time_s) is None:
        return "?"
    past_s = time.time() - time_s
    count, unit = next(((int(past_s // n), unit) for unit, n in _AGO if past_s >= n), (0, "s"))
    return f"{count} {unit} ago, {_moment(time_s)}"


def _moment(time_s: float) -> str:
    moment = to_datetime(time_s)
    return "?" if moment is None else f"{moment.astimezone():%Y-%m-%d %H:%M:%S}"


if __name__ == "__main__":
    main()
