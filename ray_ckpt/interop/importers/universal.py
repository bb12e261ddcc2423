"""A Universal Checkpoint of DeepSpeed: one folder for each parameter, one file for each tensor of its state.

Made from ZeRO 1 or 2, a file has a dict with a tensor of the parameter's shape, and the step is a file. Made
from ZeRO 3, a file has a flat tensor, and the step is in `optimizer_state.pt`; the shapes are in the files of
model states.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from ray_ckpt.errors import ConfigError, CorruptionError
from ray_ckpt.interop.importers.archive import TorchArchive
from ray_ckpt.interop.importers.source import Imported
from ray_ckpt.interop.importers.unpickler import damaged, interpreting
from ray_ckpt.interop.importers.values import entries_of
from ray_ckpt.interop.importers.zero import (
    MASTER,
    OPTIMIZER,
    STEP,
    GroupState,
    ModelStates,
    Param,
    PickledDict,
    described,
    entries,
    ranked_files,
    stage_of,
)

FOLDER, OPTIMIZER_FILE = "zero", "optimizer_state.pt"
_SPLIT = ("sub_param_shape", "vocab_tensor", "is_expert_param")  # whose shapes depend on the parallelism


def read_universal(source: Path) -> Imported:
    """Return the checkpoint in a folder, with the items of `deepspeed.read_tag`, whose errors it raises."""
    if not (source / FOLDER).is_dir():
        raise ConfigError(
            f"{source} is no Universal Checkpoint: it has no folder {FOLDER}.",
            hint="Give the folder in latest_universal, or `ray-ckpt import deepspeed` a folder of ZeRO.",
        )
    model = ModelStates([PickledDict.read(path) for path in ranked_files(source, "model")])
    optimizer = PickledDict.read(source / FOLDER / OPTIMIZER_FILE)
    for name, param in model.params.items():
        _take_files(param, name, source / FOLDER / name)
    _check_complete(model, source / FOLDER)
    with interpreting(optimizer.where):
        if stage_of(optimizer.entries) == 3:
            _take_steps(model, optimizer)
        groups, others = optimizer.entries["param_groups"], described(optimizer.entries)
    imported = Imported(format="universal", source=source, version=model.version)
    model.add(imported, groups, others)
    return imported


def _take_files(param: Param, name: str, folder: Path) -> None:
    """Add the files of a parameter. Raise CorruptionError if the parameter itself is missing."""
    if Path(name).name != name or name.startswith("."):
        raise damaged(str(folder.parent), f"the parameter {name!r} has no folder of its own")
    if not (folder / f"{MASTER}.pt").exists():
        path = folder / f"{MASTER}.pt"
        raise CorruptionError(f"{path} is missing.", hint="Copy the whole checkpoint.", file=str(path))
    others = (path for path in sorted(folder.glob("*.pt")) if path.stem != MASTER)
    for path in (folder / f"{MASTER}.pt", *others):
        archive = TorchArchive(path, form="deepspeed")
        with interpreting(str(path)):
            state = GroupState(archive)
            found = _tensor(archive.value(), path)
            if path.stem == STEP:
                param.values[STEP] = found, archive
                continue
            state.add(MASTER, found, (OPTIMIZER, name, path.stem))
            if len(state.flats[MASTER]) != prod(param.shape):
                raise ValueError(f"it has {len(state.flats[MASTER])} elements, not {prod(param.shape)}")
            param.parts[path.stem] = [state.flats[MASTER]]


def _check_complete(model: ModelStates, folder: Path) -> None:
    """Raise CorruptionError if a parameter has some of the files of others; one without state has none."""
    keys = {name: {*param.parts, *param.values} for name, param in model.params.items()}
    every = set().union(*keys.values())
    for name, own in keys.items():
        if own != {MASTER} and own != every:
            path = folder / name / f"{min(every - own)}.pt"
            raise CorruptionError(f"{path} is missing.", hint="Copy the whole checkpoint.", file=str(path))


def _tensor(value: Any, path: Path) -> Any:
    found = entries_of(value)
    if found is None:
        return value
    if any(found.get(key) for key in _SPLIT):
        raise ConfigError(
            f"{path} is cut by tensor or expert parallelism, which is not imported.",
            hint="Data parallelism with ZeRO 1, 2 or 3 is.",
        )
    return found["param"]


def _take_steps(model: ModelStates, optimizer: PickledDict) -> None:
    state: Mapping[Any, Any] = entries(entries(optimizer.entries["optimizer_state_dict"])["state"])
    for index, shapes in enumerate(model.groups):
        for name in shapes:
            if STEP in entries(state.get(index)):
                model.params[name].values[STEP] = state[index][STEP], optimizer.archive
