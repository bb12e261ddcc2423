"""`ray-ckpt doctor`: checks that this machine, and a storage path, are fit for checkpoints."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from itertools import chain
from typing import Annotated

import typer
from rich.console import Console

from ray_ckpt.cli.doctor_checks import Check, check_machine, check_staging, check_store
from ray_ckpt.cli.options import EXIT_DAMAGED, JsonOption, StorageOption, argument, option, store_options
from ray_ckpt.cli.output import FittedTable, print_json, stdout
from ray_ckpt.config import MIB
from ray_ckpt.location import locate

STYLES = {"warn": "yellow", "fail": "bold red"}
MAX_SIZE_MIB = 65_536  # size of the file that measures a disk


def doctor(
    path: Annotated[
        str | None,
        argument("PATH", "A storage path to check too: a small folder is written there and removed."),
    ] = None,
    staging: Annotated[
        list[str] | None,
        option(
            "--staging",
            "A staging folder, as the run's option `staging`; RAY_CKPT_STAGING wins. Repeatable.",
            "FOLDER",
        ),
    ] = None,
    size: Annotated[
        int,
        typer.Option(
            metavar="MIB",
            min=0,
            max=MAX_SIZE_MIB,
            help="Measure each disk with a temporary file of this size; 0: do not measure.",
        ),
    ] = 256,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine: memory, staging folders, disk speed, ports; with PATH a store too.

    Shows the measurements and advice. It checks the machine on which it runs: run it on each kind of node.
    Exits with 1 if a check has failed. Files that it writes are removed.

    Example: `ray-ckpt doctor s3://bucket/runs`
    """
    options = store_options(storage_option)
    where = None if path is None else locate(path)
    wanted = check_staging(tuple(staging) if staging else None, size_bytes=size * MIB)
    checks = chain(check_machine(), wanted, () if where is None else check_store(where, options))
    began_s = time.monotonic()
    found = list(_shown(checks))
    ok = all(check.state != "fail" for check in found)
    if as_json:
        print_json({"ok": ok, "checks": [dataclasses.asdict(check) for check in found]})
    else:
        table = FittedTable("check", "", "found", "what to do", fold=(0, 2, 3))
        for check in found:
            table.add(check.name, check.state, check.found, check.advice, style=STYLES.get(check.state))
        console = stdout()
        console.print(table)
        console.print_line(f"{len(found)} checks in {time.monotonic() - began_s:.1f} s")
    if not ok:
        raise typer.Exit(EXIT_DAMAGED)


def _shown(checks: Iterator[Check]) -> Iterator[Check]:
    """Run the checks; if stderr is a terminal, show there the number of finished checks."""
    console = Console(stderr=True, markup=False, emoji=False)
    if not console.is_terminal:
        yield from checks
        return
    with console.status("checking this machine") as status:
        for number, check in enumerate(checks, start=1):
            status.update(f"{number} checks done")
            yield check
