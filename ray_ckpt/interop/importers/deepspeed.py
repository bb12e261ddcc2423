"""A tag directory of DeepSpeed with ZeRO 1, 2 or 3: the parts of all ranks as slices of whole tensors.

Each rank has the flat fp32 parameters of its partition and optimizer state of the same length. Under ZeRO 1
and 2 a partition is a range of the flattened group, and the file has the place of each parameter in it; under
ZeRO 3 each parameter is cut for itself, in equal parts of which the last ones are padded.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, prod
from pathlib import Path
from typing import Any

from ray_ckpt.errors import ConfigError
from ray_ckpt.format import jsontext
from ray_ckpt.interop.importers.source import Imported
from ray_ckpt.interop.importers.unpickler import Foreign, interpreting
from ray_ckpt.interop.importers.zero import (
    MASTER,
    OPTIMIZER,
    GroupState,
    ModelStates,
    PickledDict,
    described,
    entries,
    ranked_files,
    stage_of,
)


def read_tag(source: Path) -> Imported:
    """Return the checkpoint in the folder of a tag.

    The items are `model` and `optimizer`, by parameter names, with `scheduler`, `deepspeed` (the engine's
    counters and loss scaler) and `client` if there is a client state. Raise ConfigError for a folder of
    another kind or a training that is not supported, UnsupportedLeaf for a value that a checkpoint cannot
    hold, CorruptionError if a file is missing or damaged.
    """
    optimizers = [PickledDict.read(path) for path in ranked_files(source, "optim")]
    model = ModelStates([PickledDict.read(path) for path in ranked_files(source, "model")])
    with interpreting(optimizers[0].where):
        first = entries(optimizers[0].entries["optimizer_state_dict"])
        stage = stage_of(first)
    imported = Imported(format="deepspeed", source=source, version=model.version)
    for rank, file in enumerate(optimizers):
        with interpreting(file.where):
            found = entries(file.entries["optimizer_state_dict"])
            _check(found, stage, len(optimizers), file.where)
            if stage < 3 and len(optimizers) > 1:
                _check_order(file.entries.get("ds_config"), file.where)
            if stage == 3:
                _take_cut(model, found, file, rank, len(optimizers))
            else:
                _take_ranges(model, found, file)
    with interpreting(optimizers[0].where):
        groups, others = _base(first, stage)["param_groups"], described(first)
    model.add(imported, groups, others)
    return imported


def _check(optimizer: Mapping[Any, Any], stage: int, num_files: int, where: str) -> None:
    count = optimizer["partition_count"]
    if (max(count) if isinstance(count, list) else count) != num_files:
        raise ValueError(f"it is of {count} ranks, and there are files of {num_files}")
    if stage_of(optimizer) != stage:
        raise ValueError("it is of another stage of ZeRO than the other files")
    if optimizer.get("ds_zero_partition_groups"):
        raise ConfigError(f"{where} has partitions of experts, which are not imported.")
    if stage < 3 and not isinstance(optimizer["base_optimizer_state"], dict):
        raise ConfigError(
            f"{where} is an elastic checkpoint, which has no hyperparameters.",
            hint="Save it again with zero_optimization.elastic_checkpoint=false.",
        )


def _check_order(config: Any, where: str) -> None:
    """Raise ConfigError if the partitions are in another order than the places in the file say.

    DeepSpeed 0.19.8 counts these places in the order of the group (runtime/zero/stage_1_and_2.py,
    `_create_param_mapping`), and fills partitions in turns if this option is set.
    """
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    if isinstance(zero, dict) and zero.get("round_robin_gradients"):
        raise ConfigError(
            f"{where} is of a training with zero_optimization.round_robin_gradients, whose partitions "
            f"are not in the order that the file says.",
            hint="Load it in DeepSpeed, and save it again with round_robin_gradients=false.",
        )


def _base(optimizer: Mapping[Any, Any], stage: int) -> dict[Any, Any]:
    """Return the state dict of the optimizer of torch."""
    return entries(optimizer["optimizer_state_dict" if stage == 3 else "base_optimizer_state"])


def _take_ranges(model: ModelStates, optimizer: Mapping[Any, Any], file: PickledDict) -> None:
    """Add a partition of ZeRO 1 or 2, whose parts follow those of lower ranks."""
    masters, state = optimizer["single_partition_of_fp32_groups"], entries(_base(optimizer, 1)["state"])
    for index, mapping in enumerate(optimizer["param_slice_mappings"]):
        group = _group_state(file, masters[index], state.get(index))
        for name, address in entries(mapping).items():
            start, count = _place(address)
            model.params[name].take(group, start, count)


def _place(address: Any) -> tuple[int, int]:
    """Return the first element and the number of elements of a `fragment_address`."""
    if not isinstance(address, Foreign):
        raise TypeError("a parameter has no place in its partition")
    return jsontext.integer(address.state["start"], "start"), jsontext.integer(
        address.state["numel"], "numel"
    )


def _take_cut(
    model: ModelStates, optimizer: Mapping[Any, Any], file: PickledDict, rank: int, world_size: int
) -> None:
    """Add a partition of ZeRO 3."""
    masters, state = optimizer["fp32_flat_groups"], entries(_base(optimizer, 3)["state"])
    if len(masters) != len(model.groups):
        raise ValueError(f"it has {len(masters)} groups, and the model {len(model.groups)}")
    for index, shapes in enumerate(model.groups):
        group, at = _group_state(file, masters[index], state.get(index)), 0
        for name, shape in shapes.items():
            size = ceil(prod(shape) / world_size)
            model.params[name].take(group, at, max(0, min(size, prod(shape) - rank * size)))
            at += size
        if at != len(group.flats[MASTER]):
            raise ValueError(f"group {index} has {len(group.flats[MASTER])} elements, not {at}")


def _group_state(file: PickledDict, master: Any, state: Any) -> GroupState:
    group = GroupState(file.archive)
    group.add(MASTER, master, (OPTIMIZER,))
    for key, value in entries(state).items():
        group.add(key, value, (OPTIMIZER, "state"))
    return group
