"""`ray-ckpt report`: a run as one page of HTML."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from ray_ckpt.analysis.report import page, read_report, to_json
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.cli.options import JsonOption, PathArgument, StorageOption, option, store_options
from ray_ckpt.cli.output import print_json, stdout
from ray_ckpt.errors import ConfigError
from ray_ckpt.storage.output_file import output_file, whole_file


def report(
    path: PathArgument,
    html: Annotated[Path | None, option("--html", "Write the page to this file.", "FILE")] = None,
    force: Annotated[bool, option("--force", "Replace the file if it exists.")] = False,
    storage_option: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write one page of HTML about a run: its protection, its losses, and its history.

    The page needs no network and runs no script, so it can be mailed or put anywhere. It has the timeline of
    sessions, steps, saves, failures and restores; goodput and the causes of lost time; checkpoints,
    interruptions, the phases of saves, the lineage, scrubs and drills. `--json` prints the same data.

    Example: `ray-ckpt report /shared/runs/gpt --html gpt.html`
    """
    if html is None and not as_json:
        raise ConfigError("Nothing to write.", hint="Give --html FILE, --json, or both.")
    file = None if html is None else output_file(html, force=force)
    found = read_report(Catalog(path, store_options(storage_option)), time.time())
    if file is not None:
        with whole_file(file) as temporary:
            temporary.write_text(page(found), encoding="utf-8")
    if as_json:
        print_json(to_json(found))
    else:
        stdout().print_line(str(html))
