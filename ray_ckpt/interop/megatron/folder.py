"""The folder of a checkpoint that Megatron's callers look for: a reference to a checkpoint of a run.

It has `metadata.json`, by which Megatron recognises a checkpoint, and `ray_ckpt.json` with the run and the
step. Megatron itself first writes common state into it, as a pickle, which a save takes over and deletes.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, maybe_load_config, save_config
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

from ray_ckpt.errors import ConfigError, UnsupportedItem, text_of
from ray_ckpt.interop.dcp.session import current

BACKEND, VERSION = "ray_ckpt", 1  # in metadata.json
REFERENCE = "ray_ckpt.json"
TRACKER = "latest_checkpointed_iteration.txt"  # of Megatron's training loop
MAX_REFERENCE_BYTES = 64 << 10  # a URI and a number take less than 1 KiB
_STEP = re.compile(r"(\d+)/*\Z")


def step_of(folder: str | os.PathLike[str]) -> int:
    """Return the step at the end of a folder's name; ConfigError if there is none."""
    found = _STEP.search(os.fspath(folder))
    if found is None or int(found[1]) < 1:
        raise ConfigError(
            f"The folder {os.fspath(folder)!r} does not end with a step.",
            hint="Save to folders such as iter_0000100: the number is the step of the checkpoint.",
        )
    return int(found[1])


def take_common(folder: str | os.PathLike[str]) -> Any:
    """Return the common state that Megatron has just written to a folder, and delete the file."""
    path = Path(folder, COMMON_STATE_FNAME)
    if not path.exists():
        return {}
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise UnsupportedItem(
            f"The common state has a value that only pickle can load: {error}",
            hint="Leave it out of the state dict, or put plain values in its place.",
            item="common",
        ) from error
    path.unlink()
    return state


def write_reference(folder: str | os.PathLike[str], where: str, step: int) -> None:
    """Write the run and the step of a checkpoint to its folder."""
    text = json.dumps({"run": where, "step": step})
    _replace(Path(folder, REFERENCE), text)


def read_reference(folder: str | os.PathLike[str]) -> tuple[str, int]:
    """Return the run and the step of a folder; ConfigError if it is none of ours."""
    path = Path(folder, REFERENCE)
    try:
        with path.open(encoding="utf-8") as file:
            found = json.loads(file.read(MAX_REFERENCE_BYTES))
        run, step = found["run"], found["step"]
        if not isinstance(run, str) or type(step) is not int:
            raise ValueError("not a run and a step")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} names no checkpoint of ray_ckpt: {error}.",
            hint="Load a folder that ray_ckpt.megatron.SaveStrategy or ray_ckpt.megatron.resume_folder left.",
        ) from error
    return run, step


def is_ours(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder refers to a checkpoint of ray_ckpt."""
    config = maybe_load_config(os.fspath(folder))
    return config is not None and config.sharded_backend == BACKEND


def resume_folder(save_dir: str | os.PathLike[str]) -> str | None:
    """Return the folder below `save_dir` from which the run goes on: its newest intact checkpoint.

    None in a new run. All ranks call it, in a run, with torch.distributed initialized. The folder and the
    file latest_checkpointed_iteration.txt are written anew, since a run may have a newer checkpoint than
    they name, or an older one. Raises NotConnected outside a run, OSError on all ranks if `save_dir` cannot
    be written.
    """
    session = current()
    if not (step := session.step):
        return None
    folder, failure = Path(save_dir, f"iter_{step:07d}"), None
    if dist.get_rank() == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_reference(folder, session.where, step)
            save_config(CheckpointingConfig(BACKEND, VERSION), str(folder))
            _replace(Path(save_dir, TRACKER), str(step))
        except Exception as error:
            failure = error
    problem = ["" if failure is None else text_of(failure)]
    dist.broadcast_object_list(problem, src=0)  # the other ranks wait for the folder, or for the error
    if failure is not None:
        raise failure
    if problem[0]:
        raise OSError(f"Rank 0 cannot write {save_dir}: {problem[0]}")
    return str(folder)


def _replace(path: Path, text: str) -> None:
    whole = path.with_name(f".{path.name}.new")
    whole.write_text(text, encoding="utf-8")
    whole.replace(path)
