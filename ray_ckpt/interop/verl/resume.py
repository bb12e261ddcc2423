"""The step from which verl's trainer resumes: the newest committed one in the run's log.

verl reads the step from its tracker file, which the driver writes and which may be missing or late. The log
has each commit, so the log decides, and the tracker is corrected.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.errors import NoRun
from ray_ckpt.interop.verl.settings import Settings, write_tracker
from ray_ckpt.location import Location

log = logging.getLogger("ray_ckpt")


def committed_steps(settings: Settings, root: Path) -> Sequence[int]:
    """Return the steps to which the run can resume, the newest first; () if there is no run.

    Raises ConfigError if an option is wrong, StoragePathError if the log cannot be read, FormatError if it is
    damaged.
    """
    storage_path, run = settings.run_of(root)
    try:
        catalog = Catalog(Location.parse(storage_path) / run, settings.options.get("storage_options"))
    except NoRun:
        return ()
    return [checkpoint.step for checkpoint in reversed(catalog.lineage)]


def latest_folder(settings: Settings, path: str) -> str | None:
    """Return verl's folder of the step to resume from, `global_step_N`; None if the run has no checkpoint.

    verl writes the position in the data, `data.pt`, behind the commit of a step. The newest step that has it
    is taken; if none has it, the newest step, for which verl begins with the first samples.
    """
    root = Path(path).absolute()
    steps = committed_steps(settings, root)
    if not steps:
        return None
    folders = [root / f"global_step_{step}" for step in steps]
    chosen = next((k for k, folder in enumerate(folders) if any(folder.glob("data*.pt"))), 0)
    if chosen:
        log.warning(
            "step %d has no data.pt, the position in the data: step %d is resumed",
            steps[0],
            steps[chosen],
        )
    folders[chosen].mkdir(parents=True, exist_ok=True)
    write_tracker(root, steps[chosen])
    return str(folders[chosen])
