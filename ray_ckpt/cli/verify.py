"""`ray-ckpt verify`: every byte against its digest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from ray_ckpt.catalog import Catalog, VerifyReport
from ray_ckpt.cli.options import EXIT_DAMAGED, JsonOption, StorageOption, store_options
from ray_ckpt.cli.output import plain, print_json, report_json, stdout
from ray_ckpt.errors import ConfigError
from ray_ckpt.format import names
from ray_ckpt.types import Level
from ray_ckpt.verify import CheckpointFiles, files_at, readable, verify_files


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
    targets = _targets(path, store_options(storage_option), step, all)
    reports: list[VerifyReport] = []
    with _progress(targets) as advance:
        for target in targets:
            report = verify_files(target.files, root_digest=target.root_digest, progress=advance)
            reports.append(report)
    if as_json:
        print_json({"ok": _all_ok(reports), "checkpoints": [report_json(r) for r in reports]})
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
    console = stdout()
    verdict = "ok" if report.ok else f"DAMAGED ({len(report.damages)} findings)"
    read = f"{report.num_files} files, {report.num_slices} slices, {decimal(report.size_bytes)}"
    console.print(plain(f"{report.where}: {verdict}; read {read}"), soft_wrap=True)
    for damage in report.damages:
        line = f"{damage.file}: {damage.where}: {damage.detail}"
        console.print(plain(line), style="red", soft_wrap=True)
