"""The runs of a storage path: their folders, without reading their logs."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

from ray_ckpt.catalog.checkpoint import REQUESTS_AT_A_TIME
from ray_ckpt.errors import CheckpointError, NoRun
from ray_ckpt.format import names
from ray_ckpt.location import Location, StoragePath, locate
from ray_ckpt.storage.checkpoint_files import readable
from ray_ckpt.storage.parallel import map_in_order
from ray_ckpt.storage.remote.file_store import FileStore
from ray_ckpt.storage.remote.tier import open_store
from ray_ckpt.texts import count_text, did_you_mean

log = logging.getLogger("ray_ckpt")

AT_STEP = re.compile(r"(.+)@(\d{1,12})\Z")  # a run and a step of it; names of runs contain no @
MAX_FOLDERS = 1000  # folders of a storage path that are searched for runs
_MAX_NAMED_RUNS = 10  # runs that a hint names
_MAX_BESIDE = 100  # folders beside a path without a run that are searched for the hint


def find_runs(path: StoragePath, storage_options: Mapping[str, str] | None = None) -> tuple[Location, ...]:
    """Return the folders of the runs directly below a storage path, by name; empty if the path is missing.

    Only the first MAX_FOLDERS folders are searched, with one request each; a warning is logged if there are
    more, or if the permission to read some of them is missing. Raise StoragePathError if the path cannot be
    read, ConfigError if it cannot be opened.
    """
    location = locate(path)
    with readable(location):
        found, unread = _runs_in(location, open_store(location, storage_options)[0])
    if unread:
        log.warning("%s", unread)
    return found


def run_at(location: Location, storage_options: Mapping[str, str] | None) -> Location:
    """Return the folder of the run at `location`. Raise NoRun if it has no run."""
    with readable(location):
        files = open_store(location, storage_options)[0]
        if (run := _run_in(location, files)) is not None:
            return run
        found, unread = _runs_in(location, files)
    hint = "Give <storage_path>/<run name>, as in the RunConfig of the training."
    if found:
        hint = f"It holds the runs {runs_text(found)}; open {found[0]}, for example."
    else:
        beside, unread_beside = _names_beside(location, storage_options)
        unread = unread or unread_beside
        if at_step := AT_STEP.match(location.name):
            run, step = location.parent / at_step[1], at_step[2]
            hint = f"Give the run alone, {run}, and the step apart: step={step} of `load`, --step {step} of "
            hint += f"a command, or `ray-ckpt show {run} {step}`."
        elif beside:
            hint = f"Beside it are other runs. {did_you_mean(location.name, beside)}"
    raise NoRun(f"There is no run at {location}.", hint=f"{hint} {unread}".strip(), path=str(location))


def is_run(location: Location, storage_options: Mapping[str, str] | None) -> bool:
    """Return whether the folder has the log of a run. Raise StoragePathError, or ConfigError."""
    with readable(location):
        return _run_in(location, open_store(location, storage_options)[0]) is not None


def runs_text(runs: Sequence[Location]) -> str:
    """Return a text such as `bert, gpt and 3 more`."""
    more = f" and {len(runs) - _MAX_NAMED_RUNS} more" if len(runs) > _MAX_NAMED_RUNS else ""
    return ", ".join(run.name for run in runs[:_MAX_NAMED_RUNS]) + more


def _names_beside(location: Location, storage_options: Mapping[str, str] | None) -> tuple[list[str], str]:
    """Return the names and the sentence of `_runs_in` for the parent of `location`, if it can be read."""
    try:
        runs, unread = _runs_in(location.parent, open_store(location.parent, storage_options)[0], _MAX_BESIDE)
    except (CheckpointError, OSError):
        return [], ""
    return [run.name for run in runs], unread


def _runs_in(
    location: Location, files: FileStore, most: int | None = None
) -> tuple[tuple[Location, ...], str]:
    """Return the runs in the first `most` folders, and a sentence if some of these cannot be read.

    By default they are the first MAX_FOLDERS; then warn if there are more.
    """
    there = sorted(files.children().folders)
    folders = there[: most or MAX_FOLDERS]
    if most is None and len(folders) < len(there):
        log.warning("%d of the %d folders in %s were searched for runs", len(folders), len(there), location)

    def is_run_folder(folder: str) -> bool | None:
        try:
            return _has_log(files, f"{folder}/{names.SERVICE_DIR}")
        except PermissionError:  # the folder of another user
            return None

    are_runs = tuple(map_in_order(is_run_folder, folders, threads=REQUESTS_AT_A_TIME, name="runs"))
    runs = tuple(location / folder for folder, is_run in zip(folders, are_runs, strict=True) if is_run)
    return runs, _unread_text(location, are_runs.count(None))


def _unread_text(location: Location, num_unread: int) -> str:
    if not num_unread:
        return ""
    owners = "; runs are private to the user that trained" if location.is_posix else ""
    return f"No permission to read {count_text(num_unread, 'folder')} in {location}{owners}."


def _run_in(location: Location, files: FileStore) -> Location | None:
    """Return the run whose folder, or whose `ray_ckpt` folder, is `location`; `files` is the store there."""
    if _has_log(files, names.SERVICE_DIR):
        return location
    return location.parent if location.name == names.SERVICE_DIR and _has_log(files, "") else None


def _has_log(files: FileStore, folder: str) -> bool:
    log = f"{folder}/{names.LOG_DIR}" if folder else names.LOG_DIR
    return log in files.children(folder).folders
