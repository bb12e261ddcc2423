"""Sharded state dicts of Megatron-core as items of a checkpoint.

Names are the keys of the ShardedTensors, which do not depend on the layout. Keys `optimizer.<...>` and
`chained_<k>.<...>` belong to the item `optimizer`, all others to `model`; of these,
`optimizer.state.<entry>.<key of a weight>` is the state of that weight, as of an optimizer of torch. A
ShardedObject is stored as the bytes of its plain form in the item `objects`, by its unique key, so that any
rank can load it; an import has objects as plain values. Common state, which is the same on all ranks, is the
item `common`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from ray_ckpt.capture.load import SavedState, tensor_refs
from ray_ckpt.capture.walk import DTYPES, replace_refs
from ray_ckpt.errors import MismatchError, UnsupportedItem
from ray_ckpt.format.tree import TensorRef
from ray_ckpt.interop.megatron import values
from ray_ckpt.interop.megatron.agreement import Boxes, Path, Paths

MODEL, OPTIMIZER, OBJECTS, COMMON = "model", "optimizer", "objects", "common"
_STATE = re.compile(r"optimizer\.state\.([^.]+)\.(.+)")
_OF_OPTIMIZER = re.compile(r"optimizer\.|chained_\d+\.")


class TensorsItem(Item):
    """Tensors of one item by their paths in it, as boxes in live memory."""

    is_partial = True

    def __init__(self, name: str, boxes: Mapping[Path, BoxedTensor]) -> None:
        self._name, self._boxes = name, boxes

    def tree(self) -> Any:
        return _nested(self._boxes)

    def load(self, tree: Any) -> None:
        """Do nothing: the boxes have been filled."""

    def wanted(self, saved: Any) -> Any:
        """Return the tensors that this rank wants, also those that the rank which saved `saved` had not."""
        return _nested({path: TensorRef(_full_name(self._name, path)) for path in self._boxes})

    def changes_in_step(self, path: Path) -> bool:
        return True  # the optimizers of the process show which tensors do


def _nested(entries: Mapping[Path, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for (*above, last), value in entries.items():
        inner = tree
        for key in above:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return tree


def _full_name(item: str, path: Path) -> str:
    return ".".join((item, *path))


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
    if not isinstance(state, dict | list):
        yield state
    for child in _children(state):
        yield from leaves(child)


def _children(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def filled(state: Any, value_of: Callable[[Any], Any]) -> Any:
    """Return nested dicts and lists with `value_of` each value in its place."""
    if isinstance(state, dict):
        return {key: filled(child, value_of) for key, child in state.items()}
    if isinstance(state, list):
        return [filled(child, value_of) for child in state]
    return value_of(state)


def places_of(key: str) -> list[tuple[str, Path]]:
    """Return the item and the path of a ShardedTensor's key, and after it another one that an import has."""
    if match := _STATE.fullmatch(key):
        return [(OPTIMIZER, ("state", match[2], match[1])), (OPTIMIZER, (key,))]
    return [(OPTIMIZER if _OF_OPTIMIZER.match(key) else MODEL, (key,))]


def key_of(path: Path) -> str:
    """Return the key at a path of `places_of`."""
    return path[0] if len(path) == 1 else f"optimizer.state.{path[2]}.{path[1]}"


# Saving


def saved_boxes(state: Any) -> Boxes:
    """Return what this rank saves of a sharded state dict, by item and path.

    Raises UnsupportedLeaf for a tensor or an object that cannot be stored.
    """
    found: dict[str, dict[Path, BoxedTensor]] = {MODEL: {}, OPTIMIZER: {}, OBJECTS: {}}
    tensors: dict[tuple[str, Path], list[BoxedTensor]] = {}
    for leaf in leaves(state):
        if isinstance(leaf, ShardedObject):
            found[OBJECTS].setdefault((leaf.unique_key,), _absent())
            if is_main_replica(leaf.replica_id):
                data = bytearray(values.encode(leaf.data, leaf.key))
                found[OBJECTS][leaf.unique_key,] = _box_of(torch.frombuffer(data, dtype=torch.uint8))
        else:
            tensors.setdefault(places_of(leaf.key)[0], []).append(_mine(leaf))
    for (item, path), boxes in tensors.items():
        found[item][path] = _joined(boxes)
    return found


def _mine(tensor: ShardedTensor) -> BoxedTensor:
    """Return the box of a tensor, without parts unless this rank saves it."""
    found = boxed(tensor, (tensor.key,))
    assert found is not None, "ShardedTensors have boxes"
    return found if found.ranks else replace(found, base=None, parts=())


def _joined(boxed_tensors: Sequence[BoxedTensor]) -> BoxedTensor:
    """Return the boxes of all, each box once: several tensors may be parts of one, such as layers."""
    parts: dict[Any, tuple[tuple[int, ...], torch.Tensor]] = {}
    for each in boxed_tensors:
        for part in each.parts:
            parts.setdefault(_region(part), part)
    base = next((each.base for each in boxed_tensors if each.base is not None), None)
    ranks = next((each.ranks for each in boxed_tensors if each.ranks), ())
    return replace(boxed_tensors[0], base=base, parts=tuple(parts.values()), ranks=ranks)


def _region(part: tuple[tuple[int, ...], torch.Tensor]) -> tuple[Any, ...]:
    return part[0], tuple(part[1].shape)


def _box_of(tensor: torch.Tensor) -> BoxedTensor:
    """Return the box of a whole tensor that this rank holds."""
    parts = (((0,) * tensor.dim(), tensor),)
    return BoxedTensor(
        shape=tuple(tensor.shape), dtype=tensor.dtype, base=tensor, parts=parts, ranks=(dist.get_rank(),)
    )


def _absent() -> BoxedTensor:
    """Return a tensor of which other ranks save all; the trees of all ranks have all names."""
    return BoxedTensor(shape=(1,), dtype=torch.uint8)


def items_to_save(mine: Boxes, paths: Paths, common: Any) -> dict[str, Item]:
    """Return the items of a save with the paths of all ranks."""
    items: dict[str, Item] = {
        item: TensorsItem(item, {path: mine[item].get(path) or _absent() for path in paths[item]})
        for item in (MODEL, OPTIMIZER, OBJECTS)
    }
    return {**items, COMMON: CommonItem(common)}


# Loading


@dataclass(slots=True)
class Wanted:
    """Boxes and values that a load fills for a sharded state dict."""

    boxes: dict[str, dict[Path, BoxedTensor]]
    _bytes: dict[str, torch.Tensor] = field(default_factory=dict)  # of objects, by unique key
    _plain: dict[str, Any] = field(default_factory=dict)  # objects of an import
    _found: dict[tuple[str, Path], list[BoxedTensor]] = field(default_factory=dict)  # of the state dict
    _twins: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # (filled, equal to it)

    @classmethod
    def of(cls, state: Any, saved: SavedState) -> Wanted:
        """Return what this rank wants. Tensors without data get memory on the CPU.

        Raises MismatchError if the checkpoint lacks a key.
        """
        wanted = cls({item: {} for item in (MODEL, OPTIMIZER, OBJECTS) if item in saved.trees})
        missing = [
            leaf.key
            for leaf in leaves(state)
            if not (wanted._add_object if isinstance(leaf, ShardedObject) else wanted._add)(leaf, saved)
        ]
        if missing:
            raise MismatchError(
                f"The checkpoint lacks {len(missing)} keys, such as {', '.join(missing[:5])}.",
                hint="Build the model and the optimizer format of the run that saved it, or load with "
                "another `strict`.",
                problems=tuple(missing),
            )
        for (item, path), boxes in wanted._found.items():
            wanted.boxes[item][path] = wanted._joined(boxes)
        return wanted

    @property
    def items(self) -> dict[str, Item]:
        return {item: TensorsItem(item, boxes) for item, boxes in self.boxes.items()}

    def _add(self, tensor: ShardedTensor, saved: SavedState) -> bool:
        """Add a tensor of the state dict; return whether the checkpoint has it."""
        for item, path in places_of(tensor.key):
            part = saved.slices.get(_full_name(item, path))
            if part is not None and item in self.boxes:
                self._found.setdefault((item, path), []).append(_to_fill(tensor, part.global_shape))
                return True
        return False

    def _add_object(self, obj: ShardedObject, saved: SavedState) -> bool:
        """Add an object of the state dict; return whether the checkpoint has it."""
        name = obj.unique_key
        found = saved.trees.get(OBJECTS, {}).get(name)

        def memory(ref: TensorRef, path: Path) -> torch.Tensor:
            part = saved.slices[ref.key]
            tensor = torch.empty(part.global_shape, dtype=DTYPES[part.dtype])
            self.boxes[OBJECTS][name, *path] = _box_of(tensor)
            return tensor

        if isinstance(found, TensorRef):
            self._bytes[name] = memory(found, ())
        elif isinstance(found, list) and len(found) == 1 and name not in self._plain:
            (self._plain[name],) = replace_refs(found, memory)
        return name in self._bytes or name in self._plain

    def _joined(self, boxed_tensors: Sequence[BoxedTensor]) -> BoxedTensor:
        """Return the boxes of all; a box that comes again is filled from its first tensor, after the load."""
        joined = _joined(boxed_tensors)
        first = {_region(part): part[1] for part in joined.parts}
        parts = (part for each in boxed_tensors for part in each.parts)
        self._twins += [(first[_region(p)], p[1]) for p in parts if p[1] is not first[_region(p)]]
        return joined

    def loaded(self, state: Any) -> Any:
        """Return the state dict with loaded values, when all boxes are filled."""
        for source, target in self._twins:
            target.copy_(source)
        return filled(state, self._value)

    def _value(self, leaf: Any) -> Any:
        if not isinstance(leaf, ShardedObject):
            return leaf.data
        if leaf.unique_key in self._plain:
            return self._plain[leaf.unique_key]
        return values.decode(self._bytes[leaf.unique_key].numpy().tobytes())


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
    for item in (MODEL, OPTIMIZER):
        for path, ref in tensor_refs(saved.trees.get(item, {})).items():
            part = saved.slices.get(ref.key)
            if part is not None and len(path) in (1, 3):
                key = key_of(path)
                meta = torch.empty(part.global_shape, dtype=DTYPES[part.dtype], device="meta")
                found[key] = ShardedTensor.from_rank_offsets(key, meta).without_data()
    names = saved.trees.get(OBJECTS, {}) if with_objects else ()
    return found | {name: ShardedObject.empty_from_unique_key(name) for name in names}


RESHARDABLE = ("dp_reshardable", "fully_reshardable")
_FORMAT_KEYS = ("param_state_sharding_type", "distrib_optim_sharding_type")


def check_formats(common: Any) -> None:
    """Raise UnsupportedItem if common state names an optimizer format that cannot be resharded."""
    if isinstance(common, dict):
        found = [common[key] for key in _FORMAT_KEYS if isinstance(common.get(key), str)]
        if bad := [name for name in found if name not in RESHARDABLE]:
            raise UnsupportedItem(
                f"The optimizer state has the format {bad[0]!r}, which ray_ckpt does not save.",
                hint='Use metadata={"distrib_optim_sharding_type": ...} with fully_reshardable, or with '
                "dp_reshardable, for which tensor and pipeline parallelism stay as they are.",
                item=OPTIMIZER,
            )
    for child in _children(common):
        check_formats(child)
