"""`ray-ckpt status`: the state of the service of a Ray cluster, or else the content of a run's log."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.filesize import decimal

from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.cli.live import (
    LEVELS,
    overview_of,
    print_service,
    runs_named,
    service_if_any,
)
from ray_ckpt.cli.options import AddressOption, JsonOption, RunArgument, StorageOption, store_options
from ray_ckpt.cli.output import FittedTable, print_json, status_remarks, stdout
from ray_ckpt.errors import NoRun, ServiceError
from ray_ckpt.texts import age_text, printable, steps_text
from ray_ckpt.types import Level


def status(
    run: RunArgument = None,
    address: AddressOption = None,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the state of the checkpoint service: all runs, or one run in detail.

    Shows the last step, the newest checkpoint of each level and its age, the steps that the death of a node
    would cost, missing copies, saves and drains in progress, disks, leaving nodes and the last warning. For a
    PATH that no service here has open, it shows the content of the log, with a note.

    Example: `ray-ckpt status /shared/runs/gpt`
    """
    options = store_options(storage_option)
    view, why = None, None
    try:
        with service_if_any(address) as (service, why):
            view = None if service is None else overview_of(service)
    except ServiceError as error:
        if run is None or address is not None:
            raise
        why = error
    if view is not None and (run is None or runs_named(view, run)):
        runs = view.runs if run is None else runs_named(view, run)
        if as_json:
            print_json({**dataclasses.asdict(view), "runs": [dataclasses.asdict(found) for found in runs]})
        else:
            print_service(stdout(), view, runs, details=run is not None)
        return
    if run is None:
        assert why is not None, "without a service there is a reason"
        raise why
    reason = why.message if why else "The service has not opened this run."
    try:
        _print_log(run, options, reason, as_json)
    except NoRun as error:
        if "/" in run:
            raise
        raise NoRun(  # a name, which only a service knows, and no path
            f"{reason} {error.message}",
            hint="Give the run's path, <storage_path>/<run name>; or name its cluster: --address HOST:PORT.",
            **error.fields,
        ) from None


def _print_log(path: str, options: Mapping[str, str], why: str, as_json: bool) -> None:
    """Print the state of a run by its log, with the reason `why` no service has it."""
    catalog = Catalog(path, options)
    now_s, sessions, exported = time.time(), catalog.sessions, catalog.exported
    newest = {level.label: catalog.newest(level) for level in Level}
    document: dict[str, Any] = {
        "source": "log",
        "why": why,
        "run_name": catalog.run_name,
        "run_uid": catalog.run_uid,
        "where": catalog.where,
        "session": sessions[-1].session if sessions else None,
        "checkpoints": dict(Counter(info.state for info in catalog.list(all=True))),
        "bytes_on_storage": sum(c.size_bytes for c in catalog.checkpoints if c.level >= Level.DURABLE)
        + sum(c.exported_bytes for c in catalog.list(all=True) if c.kept_items),
        "newest": [
            {"level": level, "step": view.info.step, "age_s": now_s - view.info.committed_at_s}
            for level, view in newest.items()
            if view is not None
        ],
        "exported": [
            {"items": info.exported, "step": info.step, "age_s": now_s - info.committed_at_s}
            for info in (exported,)
            if info is not None
        ],
        "in_cluster_only": [info.step for info in catalog.checkpoints if info.level < Level.DURABLE],
        "parity": next((info.parity for info in reversed(catalog.lineage)), "") or None,
        "shared_bytes": next((info.shared_bytes for info in reversed(catalog.lineage)), 0),
        "suspect": catalog.suspect_text,
        "damaged": [info.step for info in catalog.checkpoints if info.damaged],
    }
    if as_json:
        print_json(document)
        return
    console = stdout()
    console.print_line(f"By the log alone: {printable(why)}")
    number = "no session yet" if not sessions else f"session {sessions[-1].session}"
    console.print_line(f"run {catalog.run_name}  uid {catalog.run_uid}  {catalog.where}")
    counts = ", ".join(f"{count} {state}" for state, count in document["checkpoints"].items()) or "none"
    size = f"{decimal(document['bytes_on_storage'])} kept, before sharing and compression"
    console.print_line(f"{number}  checkpoints: {counts}  on the storage path: {size}")
    table = FittedTable("level", "newest step", "age", right=(1,))
    known = {found["level"]: (found["step"], age_text(found["age_s"])) for found in document["newest"]}
    for level in LEVELS:
        table.add(level, *known.get(level, "--"))
    console.print(table)
    for found in document["exported"]:
        age = age_text(found["age_s"])
        console.print_line(f"exported: {found['items']} of step {found['step']}, saved {age} ago")
    if document["in_cluster_only"]:
        steps = steps_text(document["in_cluster_only"])
        console.print_line(f"not on the storage path: step(s) {steps}")
    if document["parity"]:
        console.print_line(f"the newest save is in parity groups ({document['parity']})")
    for remark in status_remarks(document["shared_bytes"], document["suspect"], document["damaged"]):
        console.print_line(remark)
