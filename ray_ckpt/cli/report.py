"""`ray-ckpt report`: a run as one page of HTML."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from ray_ckpt.catalog import Catalog
from ray_ckpt.cli.options import JsonOption, PathArgument, StorageOption, store_options
from ray_ckpt.cli.output import plain, print_json, stdout
from ray_ckpt.errors import ConfigError
from ray_ckpt.report import page, read_report, to_json


def report(
    path: PathArgument,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the page there.", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a run as one page of HTML: whether it is protected, what was lost, and all that happened.

    The page needs no network and runs no script, so it can be mailed or put anywhere. It has the timeline of
    sessions, steps, saves, failures and restores; goodput and where the rest of the time went; checkpoints,
    interruptions, the phases of saves, the lineage, scrubs and drills. `--json` prints what it shows.

    Example: `ray-ckpt report /shared/runs/gpt --html gpt.html`
    """
    if html is None and not as_json:
        raise ConfigError("Nothing to write.", hint="Give --html FILE, --json, or both.")
    if html is not None and html.is_dir():
        raise ConfigError(f"{html} is a folder.", hint="Give the name of a file in it.", path=str(html))
    if html is not None and html.exists() and not force:
        raise ConfigError(f"{html} is there already.", hint="Give --force to replace it.", path=str(html))
    if html is not None and not html.parent.is_dir():
        raise ConfigError(f"There is no folder {html.parent}.", hint="Make it first.", path=str(html.parent))
    found = read_report(Catalog(path, store_options(storage_option)), time.time())
    if html is not None:
        _write(html, page(found))
    if as_json:
        print_json(to_json(found))
    else:
        stdout().print(plain(str(html)), soft_wrap=True)


def _write(path: Path, text: str) -> None:
    """All of it or nothing, so that nobody who looks meanwhile sees half a page. OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
