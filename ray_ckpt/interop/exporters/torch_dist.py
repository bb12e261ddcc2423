"""Export of a checkpoint in Megatron-core's format torch_dist, for `dist_checkpointing.load`.

Keys of weights are their names in the item `model`. State of an optimizer has the keys that Megatron's own
optimizers give it. Megatron stacks layers of equal shape into one tensor: names of a model that was not saved
by Megatron, `layers.0.weight`, are keys of one layer each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import torch

from ray_ckpt.catalog.export import export_folder
from ray_ckpt.catalog.lazy_tensor import LazyTensor
from ray_ckpt.catalog.load import OpenedCheckpoint
from ray_ckpt.errors import ConfigError
from ray_ckpt.format.tree import TensorRef
from ray_ckpt.interop.dcp.export import DATA, METADATA, WEIGHTS, write_entries
from ray_ckpt.interop.exporters.optimizer_tree import STEP, check_optimizer, common_step
from ray_ckpt.interop.exporters.trees import check_whole, with_tensors
from ray_ckpt.interop.packages import require
from ray_ckpt.types import ProgressCallback

CONFIG_FILE, COMMON_FILE = "metadata.json", "common.pt"
CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
MARK = "ray_ckpt.megatron"  # of `interop.megatron.values`, which needs Megatron-core
MODEL, OPTIMIZER, OBJECTS, COMMON = "model", "optimizer", "objects", "common"


def export_torch_dist(
    checkpoint: OpenedCheckpoint,
    tensors: Mapping[str, LazyTensor],
    out: Path,
    *,
    item: str | None = None,
    force: bool = False,
    progress: ProgressCallback | None = None,
) -> tuple[Path, ...]:
    """Write a durable checkpoint to the folder `out` and return the files. Memory holds one saved slice.

    `item` is the model, `model` by default. The values that are no shards are those of the item `common`, if
    there is one, with the groups of the optimizer and the scheduler. Other items are left out. `progress` is
    called with the bytes of each slice.

    Raises ConfigError if there is no such item, if only other ranks have some of its tensors, if the
    optimizer, the objects or the common values have a form that Megatron cannot take, or if `out` cannot be
    used; RestoreError or CorruptionError for damage;
    OSError if `out` cannot be written.
    """
    trees = checkpoint.saved().trees
    for name in (OBJECTS, COMMON):
        if not isinstance(trees.get(name, {}), dict):
            raise ConfigError(f"The item {name!r} is no dict.", hint="Save it under another name.")
    check_whole(trees, tensors, (item or MODEL, OPTIMIZER, "scheduler", OBJECTS, COMMON))
    entries = dict(_weights(trees, item or MODEL)) | dict(_optimizer(trees))
    entries |= dict(_objects(checkpoint, trees))
    common = with_tensors(_common(checkpoint, trees, tensors), tensors)
    with export_folder(out, force=force, weights=WEIGHTS, replaced=(DATA, METADATA)) as folder:
        write_entries(folder, tensors, entries, None, progress=progress)
        with (folder / COMMON_FILE).open("wb") as file:
            torch.save(common, file)
            os.fsync(file.fileno())
        (folder / CONFIG_FILE).write_text(json.dumps(CONFIG))
    return tuple(out / name for name in (DATA, METADATA, COMMON_FILE, CONFIG_FILE))


def _weights(trees: Mapping[str, Any], item: str) -> Iterator[tuple[str, TensorRef]]:
    tree = trees.get(item)
    if not isinstance(tree, dict) or not all(isinstance(value, TensorRef) for value in tree.values()):
        raise ConfigError(f"The item {item!r} is no dict of tensors.", hint=f"There are {sorted(trees)}.")
    yield from tree.items()


def _optimizer(trees: Mapping[str, Any]) -> Iterator[tuple[str, TensorRef]]:
    """Yield the state of the optimizer by Megatron's keys; the step is among the common values."""
    tree = trees.get(OPTIMIZER, {})
    check_optimizer(tree, with_groups=COMMON not in trees)  # Megatron's own groups name no parameters
    for name, state in tree.get("state", {}).items():
        for key, value in state.items():
            if key == STEP:
                continue
            if not isinstance(value, TensorRef) or not isinstance(name, str):
                raise ConfigError(
                    f"optimizer.state.{name}.{key} is no tensor of a named parameter.",
                    hint="State by number is exported after a restore and a save.",
                )
            yield f"optimizer.state.{key}.{name}", value
    yield from ((name, value) for name, value in tree.items() if isinstance(value, TensorRef))


def _objects(checkpoint: OpenedCheckpoint, trees: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the sharded objects, each as Megatron's list of one object."""
    tree = trees.get(OBJECTS, {})
    for name, value in checkpoint.load(OBJECTS).items() if tree else ():
        if isinstance(tree[name], TensorRef):  # of ray_ckpt.megatron
            yield name, [_megatron_values().decode(value.numpy().tobytes())]
        else:
            yield name, value


def _megatron_values() -> Any:
    """Return the module that makes Megatron's values; ConfigError without Megatron-core."""
    require("megatron-core", extra="megatron")
    from ray_ckpt.interop.megatron import values

    return values


def _has_mark(tree: Any) -> bool:
    """Return whether a tree has a value in the form of ray_ckpt.megatron."""
    if isinstance(tree, dict):
        return MARK in tree or any(map(_has_mark, tree.values()))
    return isinstance(tree, list | tuple) and any(map(_has_mark, tree))


def _common(
    checkpoint: OpenedCheckpoint, trees: Mapping[str, Any], tensors: Mapping[str, LazyTensor]
) -> dict[str, Any]:
    if COMMON in trees:
        found = checkpoint.load(COMMON)
        return dict(_megatron_values().restored(found) if _has_mark(found) else found)
    common: dict[str, Any] = {"iteration": checkpoint.step}
    if "scheduler" in trees:
        common["opt_param_scheduler"] = checkpoint.load("scheduler")
    if groups := trees.get(OPTIMIZER, {}).get("param_groups"):
        step = common_step(trees[OPTIMIZER].get("state", {}), tensors)
        state = {"common_step": checkpoint.step if step is None else int(step)}
        common[OPTIMIZER] = {OPTIMIZER: {"state": state, "param_groups": _numbered(groups)}}
    return common


def _numbered(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups with numbers of parameters in place of names."""
    numbers = count()
    return [{**group, "params": [next(numbers) for _ in group["params"]]} for group in groups]
