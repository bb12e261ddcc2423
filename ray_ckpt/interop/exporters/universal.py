"""Export of a checkpoint as a Universal Checkpoint of DeepSpeed, which every stage of ZeRO loads.

Each parameter has a folder with `fp32.pt` and one file for each tensor of its state, as in
deepspeed/checkpoint/ds_to_universal.py for ZeRO 1 and 2; the loader of ZeRO 3 takes the same files. Nothing
but plain values and tensors is pickled, so the loss scaler is not among them.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import torch

from ray_ckpt.catalog.export import export_folder
from ray_ckpt.catalog.lazy_tensor import LazyTensor
from ray_ckpt.catalog.load import OpenedCheckpoint
from ray_ckpt.errors import ConfigError
from ray_ckpt.format.tree import TensorRef
from ray_ckpt.interop.exporters.optimizer_tree import STEP, check_optimizer, common_step
from ray_ckpt.interop.exporters.trees import check_whole, with_tensors
from ray_ckpt.types import ProgressCallback

LATEST_FILE = "latest_universal"
_COUNTED = ("global_samples", "skipped_steps")  # by the engine
MODEL_FILE = "mp_rank_00_model_states.pt"
ZERO3_FILE = f"zero_pp_rank_0_{MODEL_FILE}"  # the name that ZeRO 3 looks for
ZERO, OPTIMIZER_FILE = "zero", "optimizer_state.pt"
DEEPSPEED_VERSION = "0.19.8"  # whose files these are; loaders want some version
UNIVERSAL_VERSION = 0.4


def export_universal(
    checkpoint: OpenedCheckpoint,
    tensors: Mapping[str, LazyTensor],
    out: Path,
    *,
    item: str | None = None,
    force: bool = False,
    progress: ProgressCallback | None = None,
) -> tuple[Path, ...]:
    """Write a durable checkpoint to the folder `out` and return the files. Memory holds one parameter.

    `item` is the model, `model` by default; the item `optimizer` has its state by parameter names. Items
    `scheduler` and `client`, and the counters of `deepspeed`, go along. `progress` is called with the bytes
    of each tensor.

    Raises ConfigError if an item is missing, or has state that DeepSpeed does not load, if only other ranks
    have some of its tensors, or if `out` cannot be used; RestoreError or CorruptionError for damage; OSError
    if `out` cannot be written.
    """
    state = _State.of(checkpoint, tensors, item or "model")
    tag = f"global_step{checkpoint.step}"
    if (out / tag).exists():
        raise ConfigError(f"{out / tag} exists.", hint="Give another folder, or delete it.")
    written: list[Path] = []
    with export_folder(out, force=force) as folder:
        for name, value in _files(state, checkpoint, progress or (lambda nbytes: None)):
            path = folder / tag / name
            path.parent.mkdir(parents=True, exist_ok=True)
            _save(with_tensors(value, tensors), path)
            written.append(out / tag / name)
        (folder / LATEST_FILE).write_text(tag)
    return (*written, out / LATEST_FILE)


@dataclass(slots=True)
class _State:
    """The parameters that are trained, by name, with their groups; and other tensors of the model."""

    model: Mapping[str, LazyTensor]
    groups: Sequence[Mapping[str, Any]]
    states: Mapping[str, Mapping[str, Any]]
    tensors: Mapping[str, LazyTensor]
    shared: dict[str, str] = field(default_factory=dict)  # further names of a parameter, with the first one

    @classmethod
    def of(cls, checkpoint: OpenedCheckpoint, tensors: Mapping[str, LazyTensor], item: str) -> _State:
        trees = checkpoint.saved().trees
        refs = _dict(trees, item)
        optimizer = _dict(trees, "optimizer")
        check_whole(trees, tensors, (item, "optimizer", "scheduler", "client"))
        check_optimizer(optimizer)
        if not {"state", "param_groups"} <= optimizer.keys():
            raise ConfigError("The item 'optimizer' has no state or no param_groups.")
        model = {name: tensors[ref.key] for name, ref in refs.items() if isinstance(ref, TensorRef)}
        found = cls(model, optimizer["param_groups"], optimizer["state"], tensors)
        found._check()
        owners = {refs[name].key: name for name in found.trained}
        found.shared = {
            name: owners[ref.key]
            for name, ref in refs.items()
            if isinstance(ref, TensorRef) and owners.get(ref.key, name) != name
        }
        return found

    @property
    def trained(self) -> list[str]:
        return [name for group in self.groups for name in group["params"]]

    def _check(self) -> None:
        for name in self.trained:
            if name not in self.model:
                raise ConfigError(
                    f"The optimizer has the parameter {name!r}, which the model does not have.",
                    hint="State by number is exported after a restore and a save.",
                )
            if Path(str(name)).name != name:
                raise ConfigError(f"The parameter {name!r} cannot be the name of a folder.")

    def state(self, name: str) -> Iterator[tuple[str, LazyTensor]]:
        """Yield the tensors of a parameter's state. Raise ConfigError for what DeepSpeed does not load."""
        for key, value in self.states.get(name, {}).items():
            lazy = self.tensors[value.key] if isinstance(value, TensorRef) else None
            if lazy is None or (key != STEP and lazy.shape != self.model[name].shape):
                raise ConfigError(
                    f"optimizer.state.{name}.{key} has no value for each element of the parameter, "
                    "so DeepSpeed does not load it.",
                    hint="Export an optimizer with moments, such as Adam.",
                )
            yield key, lazy

    def step(self) -> Any:
        """Return the steps of the optimizer, None without any. Raise ConfigError if parameters differ."""
        found = common_step({name: dict(self.state(name)) for name in self.trained}, self.tensors)
        return None if found is None else torch.tensor(found)


def _dict(trees: Mapping[str, Any], item: str) -> dict[str, Any]:
    tree = trees.get(item)
    if not isinstance(tree, dict):
        raise ConfigError(f"There is no item {item!r} that is a dict.", hint=f"There are {sorted(trees)}.")
    return tree


def _files(
    state: _State, checkpoint: OpenedCheckpoint, progress: ProgressCallback
) -> Iterator[tuple[str, Any]]:
    """Yield the names and the contents of the files."""
    step = state.step()
    for name in state.trained:
        progress(state.model[name].nbytes)
        yield f"{ZERO}/{name}/fp32.pt", {"param": state.model[name].load().float(), "cat_dim": 0}
        for key, lazy in state.state(name):
            progress(lazy.nbytes)
            value = lazy.load()
            yield f"{ZERO}/{name}/{key}.pt", value if key == STEP else {"param": value, "cat_dim": 0}
    yield f"{ZERO}/{OPTIMIZER_FILE}", _optimizer(state, step)
    model = _model(state, checkpoint, progress)
    yield MODEL_FILE, model
    yield ZERO3_FILE, {**model, "module": {}}


def _optimizer(state: _State, step: Any) -> dict[str, Any]:
    groups = [{**group, "params": [index]} for index, group in enumerate(state.groups)]
    flat = {"state": {0: {} if step is None else {STEP: step}}, "param_groups": groups}
    return {
        "zero_stage": 1,
        "ds_version": DEEPSPEED_VERSION,
        "partition_count": 1,
        "param_groups": groups,
        "optimizer_state_dict": flat,  # the place where ZeRO 3 looks
    }


def _model(state: _State, checkpoint: OpenedCheckpoint, progress: ProgressCallback) -> dict[str, Any]:
    """Return the model states: shapes, counters, and the tensors that are not trained."""
    trees = checkpoint.saved().trees
    optimizer = trees.get("optimizer")
    engine = trees.get("deepspeed") or (optimizer.get("engine") if isinstance(optimizer, dict) else None)
    known = engine if isinstance(engine, dict) else {}
    counters = {"global_samples": 0, "skipped_steps": 0, **{k: known[k] for k in _COUNTED if k in known}}
    counters["global_steps"] = checkpoint.step
    others = state.model.keys() - {*state.trained, *state.shared}
    client = checkpoint.load("client") if isinstance(trees.get("client"), dict) else {}
    return {
        **client,
        "module": OrderedDict((name, _mapped(state.model[name], progress)) for name in sorted(others)),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [
            OrderedDict((name, torch.Size(state.model[name].shape)) for name in group["params"])
            for group in state.groups
        ],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": state.shared,
        "lr_scheduler": checkpoint.load("scheduler") if "scheduler" in trees else None,
        **counters,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": DEEPSPEED_VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": UNIVERSAL_VERSION},
    }


def _mapped(lazy: LazyTensor, progress: ProgressCallback) -> torch.Tensor:
    """Return a tensor in a file without a name, which takes no memory that the kernel cannot free."""
    progress(lazy.nbytes)
    if not lazy.nbytes:
        return lazy.load()
    with TemporaryFile() as file:
        os.posix_fallocate(file.fileno(), 0, lazy.nbytes)
        place = np.memmap(file, np.uint8, "r+", shape=(*lazy.shape, lazy.itemsize))
    lazy.read_into(place)
    return torch.from_numpy(place.reshape(-1)).view(lazy.dtype).view(lazy.shape)


def _save(value: Any, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())
