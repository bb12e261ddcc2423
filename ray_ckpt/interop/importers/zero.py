"""The parts that DeepSpeed's tag directories and its Universal Checkpoints have in common.

A file of model states has names and shapes of the parameters, group by group, the buffers and frozen
parameters, the scheduler and the counters. The optimizer's state is collected for each parameter by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from ray_ckpt.errors import ConfigError, CorruptionError
from ray_ckpt.format.manifest import MAX_ROWS
from ray_ckpt.interop.importers.archive import TorchArchive
from ray_ckpt.interop.importers.flat import Flat, float32, joined, widened
from ray_ckpt.interop.importers.source import Imported
from ray_ckpt.interop.importers.tensors import refused, sizes
from ray_ckpt.interop.importers.unpickler import Foreign, damaged, interpreting, kind_of
from ray_ckpt.interop.importers.values import Values, entries_of
from ray_ckpt.types import Slice

MODEL, OPTIMIZER, SCHEDULER, CLIENT, ENGINE = "model", "optimizer", "scheduler", "client", "deepspeed"
MASTER = "fp32"  # the key of a parameter itself, beside those of its state
STEP = "step"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "ds_version", "ds_config")
_LOADERS = ("data_sampler", "random_ltd")
_OWN_KEYS = {
    *_COUNTERS,
    *_LOADERS,
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "lr_scheduler", "mp_world_size", "num_experts", "ds_autoep_layers"),
    *("autoep_layers", "universal_checkpoint_info", "folding", "checkpoint_parallel_dimensions"),
}


@dataclass(frozen=True, slots=True)
class PickledDict:
    """A file of torch.save with a dict."""

    archive: TorchArchive
    entries: Mapping[Any, Any]

    @classmethod
    def read(cls, path: Path) -> PickledDict:
        """Read a file. Raise the errors of TorchArchive, or CorruptionError if it has no dict."""
        archive = TorchArchive(path, form="deepspeed")
        entries = entries_of(archive.value())
        if entries is None:
            raise damaged(str(path), "it has no dict")
        return cls(archive, entries)

    @property
    def where(self) -> str:
        return str(self.archive.path)


def entries(value: Any) -> dict[Any, Any]:
    """Return the entries of an unpickled dict, none of None. Raise TypeError for other values."""
    found = {} if value is None else entries_of(value)
    if found is None:
        raise TypeError("there is no dict where one is expected")
    return found


@dataclass(slots=True)
class Param:
    """A parameter: its elements and those of its state by key, and state that is one value for all of it."""

    shape: tuple[int, ...]
    parts: dict[str, list[Flat]] = field(default_factory=dict)
    values: dict[str, tuple[Any, TorchArchive]] = field(default_factory=dict)

    def take(self, state: GroupState, start: int, count: int) -> None:
        """Add the next `count` elements, which begin at `start` in the flat tensors of the group."""
        if count:
            for key, flat in state.flats.items():
                self.parts.setdefault(key, []).append(flat.part(start, count))
        for key, value in state.values.items():
            self.values.setdefault(key, (value, state.archive))


@dataclass(slots=True)
class GroupState:
    """The flat tensors of one group on one rank, or of one parameter, and its other values."""

    archive: TorchArchive
    flats: dict[str, Flat] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def add(self, key: Any, value: Any, path: tuple[str, ...]) -> None:
        """Add an entry: a tensor with elements for each parameter, or a value for all of them."""
        if type(key) is not str:
            raise TypeError("a key of the optimizer's state is no text")
        if "_rebuild_" not in kind_of(value):
            self.values[key] = value
            return
        flat = Flat.of(value, self.archive, (*path, key))
        if key == MASTER or len(flat) >= len(self.flats[MASTER]):
            self.flats[key] = flat
        elif len(flat) == 1:
            self.values[key] = value
        else:
            raise refused((*path, key), "has another shape than its parameters")


class ModelStates:
    """The files of model states: one, or under ZeRO 3 one of each rank."""

    def __init__(self, files: Sequence[PickledDict]) -> None:
        """Read names and shapes.

        Raise ConfigError for parallelism that is not supported, CorruptionError if a file does not fit.
        """
        self._files = files
        self._first = files[0].entries
        with interpreting(files[0].where):
            self._check()
            groups = self._first["param_shapes"]
            self.groups = [
                {str(name): sizes(shape) for name, shape in entries(group).items()} for group in groups
            ]
            self.params = {name: Param(shape) for group in self.groups for name, shape in group.items()}

    def _check(self) -> None:
        where = self._files[0].where
        for key in ("ds_autoep_layers", "autoep_layers", "folding"):
            if self._first.get(key):
                raise _unsupported(where, "experts or folded parallelism")
        if self._first.get("mp_world_size", 1) != 1:
            raise _unsupported(where, "tensor or pipeline parallelism")
        if self._first["param_shapes"] is None:
            raise ConfigError(
                f"{where} has no parameters of ZeRO.",
                hint="Stages 1, 2 and 3 are imported; import others with `ray-ckpt import pt`.",
            )

    @property
    def version(self) -> str:
        return str(self._first.get("ds_version") or "")

    def add(self, imported: Imported, param_groups: Sequence[Any], optimizer: Mapping[str, Any]) -> None:
        """Add all items.

        `param_groups` are those of the optimizer, whose parameters are numbers of groups; `optimizer` has
        other values, which describe it.
        """
        wide, plain = Values(imported, convert=widened), Values(imported)
        with interpreting(self._files[0].where):
            num_parts = sum(len(found) for param in self.params.values() for found in param.parts.values())
            if num_parts > MAX_ROWS:
                raise ConfigError(f"{imported.source} has more than {MAX_ROWS} parts of tensors.")
            imported.items[MODEL] = self._model(wide)
            imported.items[OPTIMIZER] = self._optimizer(plain, param_groups)
            imported.items.update(self._others(plain, optimizer))

    def _model(self, values: Values) -> dict[str, Any]:
        masters = {
            name: values.add(joined(MODEL, name, param.shape, param.parts.get(MASTER, ())))
            for name, param in self.params.items()
        }
        owners, tree = entries(self._first.get("shared_params")), {}
        frozen = entries(self._first.get("frozen_param_shapes"))
        for name, value in entries(self._first["module"]).items():
            if name in masters or name in owners:
                continue
            if name in frozen and is_of_one_rank(self._files[0].archive.path):
                tree[name] = values.add(map(widened, self._frozen(name, sizes(frozen[name]))))
            else:
                tree[name] = values.take(value, self._files[0].archive, (MODEL, name))
        tree |= masters
        return {**tree, **{name: tree[owner] for name, owner in owners.items() if name not in tree}}

    def _frozen(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[Slice, Any]]:
        """Yield the slices of a parameter that is not trained, of which each rank has a part under ZeRO 3.

        Raise CorruptionError if the files of some ranks are missing.
        """
        parts, rest = [], prod(shape)
        for file in self._files:
            value = entries(file.entries["frozen_param_fragments"])[name]
            flat = Flat.of(value, file.archive, (MODEL, name))
            parts.append(flat.part(0, min(len(flat), rest)))
            rest -= len(parts[-1])
        if rest:
            raise damaged(
                self._files[-1].where, f"{name} lacks {rest} elements: the next rank's file is missing"
            )
        return joined(MODEL, name, shape, parts)

    def _optimizer(self, values: Values, param_groups: Sequence[Any]) -> dict[str, Any]:
        groups = [self._group(values, index, group) for index, group in enumerate(param_groups)]
        state = {name: self._state(values, name, param) for name, param in self.params.items()}
        return {"state": {name: found for name, found in state.items() if found}, "param_groups": groups}

    def _group(self, values: Values, index: int, group: Any) -> dict[str, Any]:
        found = entries(group)
        numbers = found.pop("params")
        path = (OPTIMIZER, "param_groups", str(index))
        tree: dict[str, Any] = values.take(found, self._files[0].archive, path)
        names = [name for number in numbers for name in self.groups[number]]
        for name in names:
            if STEP in found and STEP not in self.params[name].values:
                self.params[name].values[STEP] = found[STEP], self._files[0].archive
        return {**tree, "params": names}

    def _state(self, values: Values, name: str, param: Param) -> dict[str, Any]:
        path = (OPTIMIZER, "state", name)
        state: dict[str, Any] = {
            key: values.add(joined(OPTIMIZER, ".".join((*path[1:], key)), param.shape, parts))
            for key, parts in param.parts.items()
            if key != MASTER
        }
        for key, (value, archive) in param.values.items():
            state[key] = _one(values, value, archive, (*path, key))
        return state

    def _others(self, values: Values, optimizer: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        take, archive = values.take, self._files[0].archive
        if self._first.get("lr_scheduler") is not None:
            yield SCHEDULER, take(self._first["lr_scheduler"], archive, (SCHEDULER,))
        engine = {
            key: self._first[key] for key in (*_COUNTERS, *_LOADERS) if self._first.get(key) is not None
        }
        yield ENGINE, take({**engine, **optimizer}, archive, (ENGINE,))
        if client := {key: value for key, value in self._first.items() if key not in _OWN_KEYS}:
            yield CLIENT, take(client, archive, (CLIENT,))


def _one(values: Values, value: Any, archive: TorchArchive, path: tuple[str, ...]) -> Any:
    """Return a value for a whole parameter: a tensor of its own, also for a counter that is a number."""
    item, name = path[0], ".".join(path[1:])
    if "_rebuild_" in kind_of(value):
        return values.add(joined(item, name, (), [Flat.of(value, archive, path)]))
    if path[-1] == STEP and type(value) in (int, float):
        part = Slice(item=item, name=name, dtype="F32", global_shape=(), offset=(), shape=())
        return values.add([(part, float32(value))])
    return values.take(value, archive, path)


def described(optimizer: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the plain values with which a ZeRO optimizer is saved, its loss scaler as a dict."""
    kept = ("dynamic_loss_scale", "overflow", "clip_grad", "partition_count")
    found = {key: optimizer[key] for key in kept if key in optimizer}
    scaler = optimizer.get("loss_scaler")
    if isinstance(scaler, Foreign):
        found["loss_scaler"] = {"class": scaler.kind.rpartition(".")[2], **entries(scaler.state)}
    return {**found, "zero_stage": stage_of(optimizer)}


def stage_of(optimizer: Mapping[Any, Any]) -> int:
    """Return the stage of ZeRO. Raise ValueError if it is none."""
    stage = optimizer.get("zero_stage", 1)  # which the optimizer of bf16 leaves out
    (number,) = stage.args if isinstance(stage, Foreign) else (stage,)
    if number not in (1, 2, 3):
        raise ValueError(f"the stage of ZeRO is {number!r}")
    return int(number)


_RANKED = re.compile(r"(?:(?:bf16_|fp16_)?zero_pp_rank_(\d+)_)?mp_rank_(\d+)_?(model|optim)_states\.pt")


def is_of_one_rank(path: Path) -> bool:
    """Return whether a file is one of several ranks: under ZeRO 3 each rank has its own."""
    match = _RANKED.fullmatch(path.name)
    return match is not None and match[1] is not None


def ranked_files(source: Path, kind: str) -> list[Path]:
    """Return the files of `kind`, "model" or "optim", in the order of their ranks.

    Raise ConfigError if there is none or for parallelism that is not supported, CorruptionError if one of
    them is missing.
    """
    found: dict[int, Path] = {}
    for path in sorted(source.iterdir(), reverse=True) if source.is_dir() else ():
        if path.name.startswith(("layer_", "expp_rank_", "expert_")) or path.name == "offloaded_tensors":
            raise _unsupported(str(path), "pipelines, experts or offload to NVMe")
        match = _RANKED.fullmatch(path.name)
        if match is not None and match[3] == kind:
            if int(match[2]):
                raise _unsupported(str(path), "tensor or pipeline parallelism")
            found[int(match[1] or 0)] = path
    if not found:
        raise ConfigError(
            f"{source} has no files *_{kind}_states.pt of DeepSpeed.",
            hint="Give the folder of one tag, such as checkpoints/global_step3000.",
        )
    if missing := sorted(set(range(max(found) + 1)) - set(found)):
        raise CorruptionError(
            f"{source} has no *_{kind}_states.pt of rank {missing[0]}.",
            hint="Copy the whole checkpoint.",
            file=str(source),
        )
    return [path for _, path in sorted(found.items())]


def _unsupported(where: str, what: str) -> ConfigError:
    return ConfigError(
        f"{where} is of a DeepSpeed training with {what}, which is not imported.",
        hint="Data parallelism with ZeRO 1, 2 or 3 is.",
    )
