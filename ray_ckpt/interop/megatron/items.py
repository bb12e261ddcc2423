"""Sharded state dicts of Megatron-core as items of a checkpoint.

Names are the keys of the ShardedTensors, which do not depend on the layout: `optimizer.<...>` and
`chained_<k>.<...>` belong to the item `optimizer`, all other tensors to `model`. A ShardedObject is stored
as the bytes of its plain form in the item `objects`, by its unique key, so that any rank can load it; the
common state, which is the same on all ranks, is the item `common`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)

from ray_ckpt.capture.boxes import boxed
from ray_ckpt.capture.items import BoxedTensor, Item
from ray_ckpt.capture.load import SavedState
from ray_ckpt.capture.walk import DTYPES
from ray_ckpt.errors import MismatchError, UnsupportedItem
from ray_ckpt.format.tree import TensorRef
from ray_ckpt.interop.megatron import values
from ray_ckpt.interop.megatron.agreement import Boxes, Names

MODEL, OPTIMIZER, OBJECTS, COMMON = "model", "optimizer", "objects", "common"
_CHAINED = re.compile(r"chained_\d+\.")


class TensorsItem(Item):
    """Tensors of one item by name, as boxes in live memory."""

    is_partial = True

    def __init__(self, name: str, boxes: Mapping[str, BoxedTensor]) -> None:
        self._name, self._boxes = name, boxes

    def tree(self) -> Any:
        return dict(self._boxes)

    def load(self, tree: Any) -> None:
        """Do nothing: the boxes have been filled."""

    def wanted(self, saved: Any) -> Any:
        """Return the tensors that this rank wants, also those that the rank which saved `saved` had not."""
        return {name: TensorRef(f"{self._name}.{name}") for name in self._boxes}

    def changes_in_step(self, path: tuple[str, ...]) -> bool:
        return True  # the optimizers of the process show which tensors do


class CommonItem(Item):
    """Common state in its plain form."""

    is_partial = True

    def __init__(self, tree: Any) -> None:
        self._tree = tree

    def tree(self) -> Any:
        return self._tree

    def load(self, tree: Any) -> None:
        """Do nothing: common state has been read before the load."""


def leaves(state: Any) -> Iterator[Any]:
    """Yield the values in nested dicts and lists."""
    if isinstance(state, dict | list):
        for child in state.values() if isinstance(state, dict) else state:
            yield from leaves(child)
    else:
        yield state


def filled(state: Any, value_of: Callable[[Any], Any]) -> Any:
    """Return nested dicts and lists with `value_of` each value in its place."""
    if isinstance(state, dict):
        return {key: filled(child, value_of) for key, child in state.items()}
    if isinstance(state, list):
        return [filled(child, value_of) for child in state]
    return value_of(state)


def place_of(key: str) -> tuple[str, str]:
    """Return the item of a ShardedTensor's key, and its name there."""
    if key.startswith(f"{OPTIMIZER}."):
        return OPTIMIZER, key.removeprefix(f"{OPTIMIZER}.")
    return (OPTIMIZER if _CHAINED.match(key) else MODEL), key


def key_of(item: str, name: str) -> str:
    """Return the key at a place of `place_of`."""
    return f"{OPTIMIZER}.{name}" if item == OPTIMIZER and not _CHAINED.match(name) else name


# Saving


def saved_boxes(state: Any) -> dict[str, dict[str, BoxedTensor]]:
    """Return what this rank saves of a sharded state dict, by item and name.

    Raises UnsupportedLeaf for a tensor or an object that cannot be stored.
    """
    found: dict[str, dict[str, BoxedTensor]] = {MODEL: {}, OPTIMIZER: {}, OBJECTS: {}}
    for leaf in leaves(state):
        if isinstance(leaf, ShardedObject):
            found[OBJECTS].setdefault(leaf.unique_key, _no_parts((1,), torch.uint8))
            if is_main_replica(leaf.replica_id):
                data = bytearray(values.encode(leaf.data, leaf.key))
                found[OBJECTS][leaf.unique_key] = _box_of(torch.frombuffer(data, dtype=torch.uint8))
        else:
            item, name = place_of(leaf.key)
            found[item][name] = _joined(found[item].get(name), _mine(leaf))
    return found


def _mine(tensor: ShardedTensor) -> BoxedTensor:
    """Return the box of a tensor, without parts unless this rank saves it."""
    found = boxed(tensor, (tensor.key,))
    assert found is not None, "ShardedTensors have boxes"
    return found if found.ranks else replace(found, base=None, parts=())


def _joined(one: BoxedTensor | None, other: BoxedTensor) -> BoxedTensor:
    """Return the boxes of both, each box once: several tensors may be parts of one, such as layers."""
    if one is None:
        return other
    new = tuple(part for part in other.parts if _region(part) not in set(map(_region, one.parts)))
    base = one.base if one.base is not None else other.base
    return replace(one, base=base, parts=one.parts + new, ranks=one.ranks or other.ranks)


def _region(part: tuple[tuple[int, ...], torch.Tensor]) -> tuple[Any, ...]:
    return part[0], tuple(part[1].shape)


def _box_of(tensor: torch.Tensor) -> BoxedTensor:
    """Return the box of bytes that this rank holds."""
    parts = (((0,), tensor),)
    return BoxedTensor(
        shape=tuple(tensor.shape), dtype=tensor.dtype, base=tensor, parts=parts, ranks=(dist.get_rank(),)
    )


def _no_parts(shape: tuple[int, ...], dtype: torch.dtype) -> BoxedTensor:
    return BoxedTensor(shape=shape, dtype=dtype)


def items_to_save(mine: Boxes, names: Names, common: Any) -> dict[str, Item]:
    """Return the items of a save: each rank's tree has the names of all ranks."""
    absent = _no_parts((1,), torch.uint8)
    items: dict[str, Item] = {
        item: TensorsItem(item, {name: mine[item].get(name, absent) for name in names[item]})
        for item in (MODEL, OPTIMIZER, OBJECTS)
    }
    return {**items, COMMON: CommonItem(common)}


# Loading


@dataclass(slots=True)
class Wanted:
    """Boxes and bytes that a load fills for a sharded state dict."""

    boxes: dict[str, dict[str, BoxedTensor]]
    objects: dict[str, torch.Tensor] = field(default_factory=dict)
    _twins: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # (filled, equal to it)

    @classmethod
    def of(cls, state: Any, saved: SavedState) -> Wanted:
        """Return what this rank wants. Tensors without data get memory on the CPU.

        Raises MismatchError if the checkpoint lacks a key.
        """
        wanted = cls({item: {} for item in (MODEL, OPTIMIZER, OBJECTS) if item in saved.trees})
        missing = [leaf.key for leaf in leaves(state) if not wanted._add(leaf, saved)]
        if missing:
            raise MismatchError(
                f"The checkpoint lacks {len(missing)} keys, such as {', '.join(missing[:5])}.",
                hint="Build the model and the optimizer format of the run that saved it, or load with "
                "another `strict`.",
                problems=tuple(missing),
            )
        return wanted

    @property
    def items(self) -> dict[str, Item]:
        return {item: TensorsItem(item, boxes) for item, boxes in self.boxes.items()}

    def _add(self, leaf: Any, saved: SavedState) -> bool:
        """Add a leaf of the state dict; return whether the checkpoint has it."""
        is_object = isinstance(leaf, ShardedObject)
        item, name = (OBJECTS, leaf.unique_key) if is_object else place_of(leaf.key)
        found = saved.slices.get(f"{item}.{name}")
        if found is None or item not in self.boxes:
            return False
        known = self.boxes[item].get(name)
        if not is_object:
            self.boxes[item][name] = self._joined(known, _to_fill(leaf, found.global_shape))
        elif known is None:
            tensor = self.objects[name] = torch.empty(found.global_shape, dtype=torch.uint8)
            self.boxes[item][name] = _box_of(tensor)
        return True

    def _joined(self, one: BoxedTensor | None, other: BoxedTensor) -> BoxedTensor:
        """Return the boxes of both; a box that is there already is filled from the first, after the load."""
        if one is not None:
            first = {_region(part): part[1] for part in one.parts}
            self._twins += [(first[_region(p)], p[1]) for p in other.parts if _region(p) in first]
        return _joined(one, other)

    def loaded(self, state: Any) -> Any:
        """Return the state dict with loaded values, when all boxes are filled."""
        for source, target in self._twins:
            target.copy_(source)
        return filled(state, self._value)

    def _value(self, leaf: Any) -> Any:
        if isinstance(leaf, ShardedObject):
            return values.decode(self.objects[leaf.unique_key].numpy().tobytes())
        return leaf.data


def _to_fill(tensor: ShardedTensor, shape: tuple[int, ...]) -> BoxedTensor:
    """Return the box of a tensor in a saved tensor of `shape`; if shapes may differ, the part in it."""
    if tensor.data is None:
        tensor.init_data("cpu")
    tensor.data = tensor.data.detach()
    found = boxed(tensor, (tensor.key,))
    assert found is not None, "ShardedTensors have boxes"
    if not tensor.allow_shape_mismatch or found.shape == shape or len(found.shape) != len(shape):
        return found
    tensor.data.zero_()  # as Megatron does: rows that pad a vocabulary are not in the checkpoint
    return replace(found, shape=shape, parts=tuple(filter(None, (_within(p, shape) for p in found.parts))))


def _within(
    part: tuple[tuple[int, ...], torch.Tensor], shape: tuple[int, ...]
) -> tuple[tuple[int, ...], torch.Tensor] | None:
    offset, tensor = part
    sizes = [min(size, end - at) for at, size, end in zip(offset, tensor.shape, shape, strict=True)]
    if any(size <= 0 for size in sizes):
        return None
    return offset, tensor[tuple(slice(0, size) for size in sizes)]


def described(saved: SavedState, *, with_objects: bool) -> dict[str, Any]:
    """Return Megatron's description of a checkpoint: a ShardedTensor without data for each key."""
    found: dict[str, Any] = {}
    for item in (MODEL, OPTIMIZER, OBJECTS):
        for name in saved.trees.get(item, {}):
            part = saved.slices.get(f"{item}.{name}")
            if part is None:
                continue
            if item != OBJECTS:
                key = key_of(item, name)
                meta = torch.empty(part.global_shape, dtype=DTYPES[part.dtype], device="meta")
                found[key] = ShardedTensor.from_rank_offsets(key, meta).without_data()
            elif with_objects:
                found[name] = ShardedObject.empty_from_unique_key(name)
    return found


RESHARDABLE = ("dp_reshardable", "fully_reshardable")


def check_formats(common: Any) -> None:
    """Raise UnsupportedItem if common state names an optimizer format that cannot be resharded."""
    found = common.get("param_state_sharding_type") if isinstance(common, dict) else None
    if isinstance(found, str) and found not in RESHARDABLE:
        raise UnsupportedItem(
            f"The optimizer state has the format {found!r}, which cannot be resharded.",
            hint='Use metadata={"distrib_optim_sharding_type": ...} with fully_reshardable, or with '
            "dp_reshardable, for which tensor and pipeline parallelism stay as they are.",
            item=OPTIMIZER,
        )
    if isinstance(common, dict | list):
        for child in common.values() if isinstance(common, dict) else common:
            check_formats(child)
