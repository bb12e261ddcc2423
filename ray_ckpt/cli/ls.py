"""`ray-ckpt ls`: the checkpoints of a run, or the runs of a storage path."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.catalog.checkpoint import REQUESTS_AT_A_TIME
from ray_ckpt.catalog.runs import find_runs
from ray_ckpt.cli.options import EXIT_DAMAGED, JsonOption, StorageOption, argument, option, store_options
from ray_ckpt.cli.output import (
    MAX_ROWS,
    FittedTable,
    Lineage,
    info_json,
    is_narrow,
    level_text,
    print_json,
    stdout,
    when_text,
)
from ray_ckpt.cli.progress import count_bar
from ray_ckpt.errors import CheckpointError, ConfigError, CorruptionError, NewerFormat, NoRun
from ray_ckpt.location import Location, without_tilde
from ray_ckpt.storage.parallel import map_in_order
from ray_ckpt.texts import metrics_text
from ray_ckpt.types import CheckpointInfo, Level


def ls(
    path: Annotated[
        str,
        argument("PATH", "The run, `<storage_path>/<run name>`, or a storage path with several runs."),
    ],
    all: Annotated[bool, option("--all", "Also lost, retired and deleted checkpoints.")] = False,
    parquet: Annotated[
        Path | None,
        option(
            "--parquet",
            "Write the tables of the run there as Parquet files, for DuckDB or pandas, replacing older "
            "ones, and list the files.",
            "FOLDER",
        ),
    ] = None,
    step: Annotated[
        list[int] | None,
        option("--step", "With --parquet: shards and slices of this durable step only. Repeatable."),
    ] = None,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the checkpoints of a run, oldest first, or the runs of a storage path.

    `*` marks the newest checkpoint, which a restart resumes from; `+` the others on its lineage.

    `--parquet` writes all tables of one run: checkpoints, sessions, events, and shards and slices of durable
    checkpoints. Exits with 1 if a manifest, or the log of a run, is damaged.

    Example: `ray-ckpt ls /shared/runs/gpt --all`
    """
    options = store_options(storage_option)
    if step and parquet is None:
        raise ConfigError("--step goes with --parquet.", hint="`ray-ckpt show` shows one step.")
    if parquet is not None:
        if parquet == Path():  # of an empty text, too: it would overwrite files here
            raise ConfigError("--parquet has no folder.", hint="Give a new folder for the tables.")
        if re.match("[a-z0-9]+:/", str(parquet)):  # a URL whose slashes Path has merged
            raise ConfigError(f"{parquet} is not a folder.", hint="Give a folder of this machine.")
        _write_tables(Catalog(path, options), parquet, step or None, as_json)
        return
    try:
        catalog = Catalog(path, options)
    except NoRun:
        if not (runs := find_runs(path, options)):
            raise
        summaries = map_in_order(
            lambda run: _run_summary(run, options), runs, threads=REQUESTS_AT_A_TIME, name="ls"
        )
        rows = list(summaries)
        _list_runs(rows, as_json)
        if any(row.get("damaged") for row in rows):
            raise typer.Exit(EXIT_DAMAGED) from None
    else:
        _list_checkpoints(catalog, all, as_json)


def _write_tables(catalog: Catalog, folder: Path, steps: Collection[int] | None, as_json: bool) -> None:
    with count_bar("reading manifests", len(catalog.durable(steps))) as bar:
        num_rows = catalog.write_parquet(folder, steps=steps, progress=bar.advance)
    files = {name: str(without_tilde(folder) / f"{name}.parquet") for name in num_rows}
    if as_json:
        rows = [{"table": name, "file": files[name], "rows": count} for name, count in num_rows.items()]
        print_json({"run_name": catalog.run_name, "run_uid": catalog.run_uid, "tables": rows})
        return
    table = FittedTable("table", "rows", "file", right=(1,), fold=(2,))
    for name, count in num_rows.items():
        table.add(name, count, files[name])
    stdout().print(table)


def _list_checkpoints(catalog: Catalog, all: bool, as_json: bool) -> None:
    lineage = Lineage(catalog)
    if as_json:
        rows = [{**info_json(view), **lineage.marks_json(view.info)} for view in catalog.views(all=all)]
        print_json({"run_name": catalog.run_name, "run_uid": catalog.run_uid, "checkpoints": rows})
        return
    console = stdout()
    console.print(f"run {catalog.run_name}  uid {catalog.run_uid}  sessions {len(catalog.sessions)}")
    infos = catalog.list(all=all)
    left_out = max(0, len(infos) - MAX_ROWS)
    shown = [info for info in infos[:left_out] if lineage.mark(info) == "*"]  # may be old after a rollback
    shown += infos[left_out:]
    if left_out:
        console.print(f"The last {MAX_ROWS} of {len(infos)} checkpoints; --json and --parquet have all.")
    if not shown:
        console.print("No checkpoints." if all else "No live checkpoints.")
        return
    console.print(_table(shown, lineage, brief=is_narrow(console)))


def _table(infos: Iterable[CheckpointInfo], lineage: Lineage, *, brief: bool) -> FittedTable:
    """Return a row for each checkpoint; `brief` has fewer columns."""
    if brief:
        shown = "", "step", "level", "session", "size", "when", "metrics"
        table = FittedTable(*shown, right=(1, 3, 4), whole=(0, 1, 3, 4, 5), fold=(6,), gives_way=(6,))
    else:
        more = "", "step", "level", "state", "session", "world", "size", "when", "metrics"
        table = FittedTable(*more, right=(1, 4, 5, 6), whole=(6,), fold=(8,))
    for info in infos:
        cells = _brief_cells(info) if brief else _all_cells(info)
        metrics = metrics_text(info.metrics)
        table.add(lineage.mark(info), *cells, metrics, style=lineage.style(info))
    return table


def _all_cells(info: CheckpointInfo) -> tuple[object, ...]:
    cells = (info.step, level_text(info), info.state, info.id.session, info.world_size)
    return *cells, decimal(info.size_bytes), when_text(info.committed_at_s)


def _brief_cells(info: CheckpointInfo) -> tuple[object, ...]:
    level = level_text(info, brief=True) if info.state == "live" else info.state
    when = when_text(info.committed_at_s, brief=True)
    return info.step, level, info.id.session, decimal(info.size_bytes), when


def _run_summary(run: Location, options: Mapping[str, str]) -> dict[str, Any]:
    """Return the row of a run; for an unreadable run, the error, so that other runs are still listed."""
    try:
        catalog = Catalog(run, options)
    except CheckpointError as error:
        is_damaged = isinstance(error, CorruptionError) and not isinstance(error, NewerFormat)
        return {"run_name": run.name, "error": error.message, "hint": error.hint, "damaged": is_damaged}
    newest = catalog.newest()
    return {
        "run_name": run.name,
        "live_checkpoints": len(catalog),
        "newest_step": newest.info.step if newest else None,
        "newest_level": newest.info.level.label if newest else None,
        "in_cluster": newest.info.level < Level.DURABLE if newest else None,
        "newest_flaws": list(newest.info.flaws) if newest else None,
        "committed_at_s": newest.info.committed_at_s if newest else None,
    }


def _list_runs(rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json({"runs": rows})
        return
    table = FittedTable("run", "live checkpoints", "newest step", "level", "when", right=(1, 2), fold=(0,))
    for row in rows:
        if "error" in row:
            table.add(row["run_name"], "", "", row["error"], "", style="red")
        elif row["newest_step"] is None:
            table.add(row["run_name"], row["live_checkpoints"], "", "", "")
        else:
            place = ["in cluster"] if row["in_cluster"] else []
            level = ", ".join((row["newest_level"], *place, *row["newest_flaws"]))
            when = when_text(row["committed_at_s"])
            table.add(row["run_name"], row["live_checkpoints"], row["newest_step"], level, when)
    stdout().print(table)
