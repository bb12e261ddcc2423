"""Walk over items: the slices that this rank holds, those that it saves, and the trees around them."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapreplace
from itertools import chain
from operator import attrgetter, is_
from typing import Any, TypeAlias

import torch
from torch.nn.parameter import is_lazy

from ray_ckpt.capture.boxes import boxed
from ray_ckpt.capture.dtensors import holders, is_dtensor, parts_here
from ray_ckpt.capture.items import BoxedTensor, Item, Leaf, elements, local_tensor
from ray_ckpt.capture.torch_private import is_around_one_tensor, local_part, version
from ray_ckpt.errors import FormatError, UnsupportedLeaf
from ray_ckpt.format.digest import digest
from ray_ckpt.format.short import key_text
from ray_ckpt.format.tree import Kept, TensorRef, TorchDtype
from ray_ckpt.types import SMALL_TENSOR_BYTES, Slice

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
DTYPES: Mapping[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}
MIN_BLOCK_TENSORS = 16  # fewest tensors in a container compared as a whole; fewer are as fast one by one
SliceKey: TypeAlias = tuple[str, tuple[int, ...]]
"""Identity of a slice on a rank: tensor name and offset. A rank may hold several slices of a tensor."""


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class LiveSlice:
    """A slice and its live local tensor. `ranks` hold the same bytes; one of them saves it."""

    slice: Slice
    tensor: torch.Tensor
    path: tuple[str, ...]
    ranks: tuple[int, ...]
    leaf: torch.Tensor
    """The leaf in the item: `tensor` itself, the DTensor around `tensor`, or `counted` of a BoxedTensor. The
    leaf's version counts changes."""
    changes_in_step: bool = False
    """True if only an optimizer's step is expected to change it."""

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def slice_key(self) -> SliceKey:
        return self.slice.key, self.slice.offset

    @property
    def is_inference(self) -> bool:
        """True if torch does not count the changes of the tensor, so that it has no `versions`."""
        return self.leaf.is_inference() or self.tensor.is_inference()

    @property
    def versions(self) -> tuple[int, int]:
        """The counts of changes in place, of the leaf and of `tensor`, without those through `.data`.

        Raises RuntimeError for an inference tensor.
        """
        return version(self.leaf), version(self.tensor)

    @property
    def is_small_and_plain(self) -> bool:
        """True for a whole tensor of less than SMALL_TENSOR_BYTES that is not cut over ranks.

        A copy on each node costs less than to fetch the fragments of all nodes.
        """
        return (
            self.nbytes < SMALL_TENSOR_BYTES
            and self.slice.shape == self.slice.global_shape
            and not is_dtensor(self.leaf)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLeaf:
    """A leaf of an item's tree and its slices on this rank; no slice if other ranks hold the whole tensor."""

    leaf: Leaf
    slices: tuple[LiveSlice, ...]
    memory: tuple[Any, ...]

    def is_still(self, leaf: Leaf) -> bool:
        """Return whether `leaf` is the object from which the slices were made, still in the same memory."""
        return leaf is self.leaf and self.memory == _memory(leaf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A container of tensors, or of dicts of them, and its slices; later walks compare it as a whole.

    A walk takes some microseconds for a single tensor, but a tenth of that for a tensor in a block: a block
    is compared by loops inside torch's functions, which create no objects for the garbage collector.
    """

    kind: type
    names: tuple[Any, ...]  # as of `plain_tensors`
    leaves: tuple[torch.Tensor, ...]
    local: tuple[torch.Tensor, ...]  # in the memory of the leaves, which they keep alive
    dtypes: list[torch.dtype]
    addresses: list[int]  # 0 after the memory of a storage was freed
    devices: list[int]  # -1 is the CPU
    signs: tuple[list[bool], list[bool]]  # as of `_signs`
    keys: dict[int, str]  # tensor keys by id of the leaf

    held: dict[str, HeldLeaf]
    slices: tuple[LiveSlice, ...]
    refs: Kept

    def is_still(self, value: Any) -> bool:
        """Return whether `value` has the same names for the same objects in the same memory."""
        found = plain_tensors(value) if type(value) is self.kind else None
        if found is None or len(found[1]) != len(self.leaves) or found[0] != self.names:
            return False
        if not all(map(is_, found[1], self.leaves)):
            return False
        local = _local_parts(found[1])
        return (
            list(map(torch.Tensor.get_device, local)) == self.devices  # torch compares memory of one only
            and list(map(_DTYPE, local)) == self.dtypes
            and list(map(torch.Tensor.data_ptr, local)) == self.addresses
            and _signs(local, self.dtypes) == self.signs
            and all(map(torch.Tensor.is_set_to, local, self.local))
        )

    def is_alone(self, keys: Mapping[int, str], held: Mapping[str, HeldLeaf]) -> bool:
        """Return whether no tensor and no name of this block is among those of a walk."""
        return keys.keys().isdisjoint(self.keys.keys()) and held.keys().isdisjoint(self.held.keys())


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """All slices of this rank, and the items as trees with TensorRef in place of tensors.

    `held` has every leaf by key, including leaves without a slice on this rank. `blocks` has, by item and
    path, the containers that hold only tensors.
    """

    slices: tuple[LiveSlice, ...]
    trees: Mapping[str, Any]
    held: Mapping[str, HeldLeaf] = field(default_factory=dict)
    blocks: Mapping[tuple[str, ...], Block] = field(default_factory=dict)

    @property
    def kept(self) -> dict[int, Kept]:
        """Containers in `trees` that stay the same objects from walk to walk, by id."""
        return {id(block.refs.value): block.refs for block in self.blocks.values()}

    @property
    def by_slice_key(self) -> dict[SliceKey, LiveSlice]:
        return {live.slice_key: live for live in self.slices}

    def owned(
        self, rank: int, node_ranks: Sequence[int] = (), *, full: bool = False
    ) -> tuple[LiveSlice, ...]:
        """Return the slices that `rank` saves: its own slices, and its share of common slices.

        If the ranks on the node of `rank` are given, small plain tensors are saved once on each node, so that
        the fragment of a node is enough for a restore of the same shape. With `full` all slices are returned.
        """
        if full:
            return self.slices
        mine = [live for live in self.slices if live.ranks == (rank,)]
        here, shared = frozenset(node_ranks), list[LiveSlice]()
        first_here: dict[int, int] = {}  # by id: most slices share one tuple of ranks, which may be long
        for live in (live for live in self.slices if len(live.ranks) > 1):
            if not (node_ranks and live.is_small_and_plain):
                shared.append(live)
                continue
            if id(live.ranks) not in first_here:
                first_here[id(live.ranks)] = min(here.intersection(live.ranks))
            if first_here[id(live.ranks)] == rank:
                mine.append(live)
        loads: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # heaps of (bytes, rank)
        heaps: dict[int, list[tuple[int, int]]] = {}  # the same by id
        for live in sorted(shared, key=lambda s: (-s.nbytes, *s.slice_key)):
            if id(live.ranks) not in heaps:
                heaps[id(live.ranks)] = loads.setdefault(live.ranks, [(0, k) for k in sorted(live.ranks)])
            heap = heaps[id(live.ranks)]
            size_bytes, owner = heap[0]
            heapreplace(heap, (size_bytes + live.nbytes, owner))
            if owner == rank:
                mine.append(live)
        return tuple(mine)

    def shared(self, everyone: tuple[int, ...]) -> list[LiveSlice]:
        """Return the slices that all ranks in `everyone`, the ranks of this rank's part, hold."""
        return [s for s in self.slices if s.ranks == everyone] if len(everyone) > 1 else []

    def shared_digest(self, everyone: tuple[int, ...], contents: Mapping[SliceKey, str]) -> str:
        """Return a digest of the slices that these ranks share, to compare before these slices are divided.

        The digest covers names, dtypes, places, and the digests of bytes in `contents`: if parameters that
        are no DTensors differed between ranks, all copies except one would be lost.
        """
        lines = sorted(
            [*s.slice_key, s.slice.dtype, s.slice.shape, contents.get(s.slice_key, "")]
            for s in self.shared(everyone)
        )
        return digest(json.dumps(lines).encode())


def walk(
    items: Mapping[str, Item], *, rank: int, world_size: int, first: int = 0, before: Walked | None = None
) -> Walked:
    """Return the tensors of `items` as slices of this rank, not copied; UnsupportedLeaf for a bad leaf.

    The `world_size` ranks from `first` on, which is torch.distributed's rank 0, may hold the same tensors.

    A tensor with several names in an item (tied weights) occurs once, with the first name. A DTensor belongs
    to the whole group, even in an item whose state belongs to one rank. Tensors that have not moved since the
    walk `before` keep their slices; if no tensor has moved, `slices` is the same object.
    """
    everyone = tuple(range(first, first + world_size))
    known = before.held if before is not None else {}
    known_blocks = before.blocks if before is not None else {}
    held: dict[str, HeldLeaf] = {}
    blocks: dict[tuple[str, ...], Block] = {}
    all_slices: list[LiveSlice] = []

    def visit_item(name: str, item: Item) -> Any:
        keys: dict[int, str] = {}  # tensor keys of this item's leaves, by id

        def visit(value: Any, path: tuple[str, ...]) -> Any:
            leaf = leaf_of(value, (name, *path))
            if leaf is None:
                return visit_container(value, path)  # noqa: F821
            if id(value) not in keys:
                prefix, inner = place_in(name, item, leaf, path, rank)
                name_in = ".".join(inner)
                key = f"{prefix}.{name_in}" if name_in else prefix  # as `Slice.key`
                if key in held:
                    raise UnsupportedLeaf(
                        f"Two tensors would be stored under the name {key}.",
                        hint="Rename one of their keys; names are joined with dots.",
                        path=key,
                    )
                keys[id(value)] = key
                held_before = known.get(key)
                if held_before is not None and held_before.is_still(leaf):
                    held[key] = held_before
                else:
                    ranks = everyone if item.is_shared(path) else (rank,)
                    changes = item.changes_in_step(path)
                    slices = slices_of(
                        leaf, item=prefix, path=inner, ranks=ranks, changes_in_step=changes, first=first
                    )
                    held[key] = HeldLeaf(leaf=leaf, slices=tuple(slices), memory=_memory(leaf))
                all_slices.extend(held[key].slices)
            return TensorRef(keys[id(value)])

        def visit_container(value: Any, path: tuple[str, ...]) -> Any:
            at = (name, *path)
            block = known_blocks.get(at)
            if block is not None and block.is_still(value) and block.is_alone(keys, held):
                keys.update(block.keys)
                held.update(block.held)
                all_slices.extend(block.slices)
                blocks[at] = block
                return block.refs.value
            num_before = len(keys)
            refs = map_leaves(value, visit, path)
            if (made := _block_of(value, refs, keys, held, len(keys) - num_before)) is not None:
                blocks[at] = made
            return refs

        try:
            return visit(item.tree(), ())
        finally:
            del visit_container  # a cycle of two functions would keep the tensors until garbage is collected

    trees: dict[str, Any] = {}
    for name, item in items.items():
        try:
            trees[name] = visit_item(name, item)
        except RecursionError as error:
            raise UnsupportedLeaf(
                f"{name} contains itself or is nested too deep.",
                hint="Save a tree of plain values.",
                path=name,
            ) from error
    slices = tuple(all_slices)
    if before is not None and len(slices) == len(before.slices) and all(map(is_, slices, before.slices)):
        slices = before.slices
    return Walked(slices=slices, trees=trees, held=held, blocks=blocks)


def plain_tensors(value: Any) -> tuple[tuple[Any, ...], tuple[torch.Tensor, ...]] | None:
    """Return the names and the tensors of a container that has only tensors, or only dicts of them.

    These are plain ones and DTensors.

    The names are the keys of a dict, () for a list or tuple, and for dicts in a dict, such as the state of an
    optimizer, the keys of the outer one and a tuple with those of each inner one.
    """
    kind, names = type(value), tuple[Any, ...]()
    if kind in (dict, OrderedDict):
        names, values = tuple(value), tuple(value.values())
        if set(map(type, names)) != {str}:
            return None
        if set(map(type, values)) == {dict}:
            inner = tuple(map(tuple, values))
            if set(map(type, chain.from_iterable(inner))) != {str}:
                return None
            names, values = (names, inner), tuple(chain.from_iterable(map(dict.values, values)))
    elif kind in (list, tuple):
        values = tuple(value)
    else:
        return None
    if len(values) < MIN_BLOCK_TENSORS:
        return None
    others = set(map(type, values)).difference(_PLAIN)
    return (names, values) if not others or others == _dtensor_type() else None


def _dtensor_type() -> set[type]:
    module = sys.modules.get("torch.distributed.tensor")  # not imported: there is no DTensor
    return set() if module is None else {module.DTensor}


def _local_parts(leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    is_plain = set(map(type, leaves)) <= {*_PLAIN}
    return leaves if is_plain else tuple(map(local_part, leaves))


def _block_of(
    value: Any,
    refs: Any,
    keys: Mapping[int, str],
    held: Mapping[str, HeldLeaf],
    num_new: int,
) -> Block | None:
    """Return the block of a visited container with `num_new` new tensors.

    None if a tensor of the container has a name elsewhere, or if the container is no block.
    """
    found = plain_tensors(value)
    if found is None:
        return None
    names, leaves = found
    local = _local_parts(leaves)
    dtypes = list(map(_DTYPE, local))
    kinds = {part.device.type for part in local}
    if not set(map(type, local)) <= {*_PLAIN} or not kinds <= {*_COMPARED_ON}:
        return None
    mine = {id(leaf): keys[id(leaf)] for leaf in leaves}
    if len(mine) != num_new or not all(held[mine[id(leaf)]].leaf is leaf for leaf in leaves):
        return None
    return Block(
        kind=type(value),
        names=names,
        leaves=leaves,
        local=tuple(part.detach() for part in local),
        dtypes=dtypes,
        addresses=list(map(torch.Tensor.data_ptr, local)),
        devices=list(map(torch.Tensor.get_device, local)),
        signs=_signs(local, dtypes),
        keys=mine,
        held={key: held[key] for key in mine.values()},
        slices=tuple(chain.from_iterable(held[key].slices for key in mine.values())),
        refs=Kept(refs),
    )


def leaf_of(value: Any, path: Sequence[str]) -> Leaf | None:
    """Return the tensor behind a value of a tree, with its boxes if it names them; None if it is none."""
    if type(value) in _PLAIN:
        return value  # type: ignore[no-any-return]
    found = boxed(value, path)
    return found if found is not None else value if isinstance(value, torch.Tensor) else None


def place_in(
    name: str, item: Item, leaf: Leaf, path: tuple[str, ...], rank: int
) -> tuple[str, tuple[str, ...]]:
    """Return the prefix and the names under which a leaf of an item is stored."""
    return (f"rank{rank}", (name, *path)) if item.per_rank and not is_global(leaf) else (name, path)


def is_global(leaf: Leaf) -> bool:
    """Return whether the leaf is this rank's part of a tensor that is cut over ranks."""
    return isinstance(leaf, BoxedTensor) or is_dtensor(leaf)


def _memory(leaf: Leaf) -> tuple[Any, ...]:
    """Return address and layout of a leaf's bytes; () for a BoxedTensor, which is immutable."""
    if isinstance(leaf, BoxedTensor):
        return ()
    local = local_part(leaf)
    return local.data_ptr(), local.shape, local.stride(), local.dtype, local.is_conj(), local.is_neg()


def _signs(tensors: Sequence[torch.Tensor], dtypes: list[torch.dtype]) -> tuple[list[bool], list[bool]]:
    """Return which tensors are conjugate and which are negative views: memory and layout do not show it."""
    is_complex = any(dtype.is_complex for dtype in set(dtypes))
    conjugate = list(map(torch.Tensor.is_conj, tensors)) if is_complex else []
    return conjugate, list(map(torch.Tensor.is_neg, tensors))


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SCALARS = {str, int, float, bool, type(None)}
_DTYPE = attrgetter("dtype")
_COMPARED_ON = ("cpu", "cuda")  # devices on which torch compares tensors by address


def map_leaves(value: Any, visit: Any, path: tuple[str, ...]) -> Any:
    """Rebuild plain dicts, lists and tuples with `visit(child, path)`; torch dtypes become TorchDtype."""
    kind = type(value)
    if isinstance(value, dict) and kind.__module__ in ("builtins", "collections"):
        mapped = {k: visit(v, (*path, key_text(k))) for k, v in value.items()}
        return mapped if kind is dict else _same_kind(value, mapped)
    if kind is list or kind is tuple:
        if set(map(type, value)) <= _SCALARS:  # such as the names of all parameters
            return kind(value)
        return kind(visit(v, (*path, str(i))) for i, v in enumerate(value))
    if isinstance(value, torch.dtype):
        return TorchDtype(str(value).removeprefix("torch."))
    return value


def _same_kind(value: Any, mapped: dict[Any, Any]) -> Any:
    copy = value.copy()
    copy.clear()
    for key, item in mapped.items():
        copy[key] = item
    return copy


def replace_refs(tree: Any, found: Callable[[TensorRef, tuple[str, ...]], Any]) -> Any:
    """Rebuild a saved tree with `found(ref, path)` in place of each TensorRef, and with torch's dtypes.

    Values that are loaded already, such as dtypes of torch, stay as they are.
    """
    return _replaced(found, tree, ())


def _replaced(found: Callable[[TensorRef, tuple[str, ...]], Any], value: Any, path: tuple[str, ...]) -> Any:
    if isinstance(value, TensorRef):
        return found(value, path)
    if isinstance(value, TorchDtype):
        return _dtype(value.name)
    if isinstance(value, torch.dtype):
        return value
    # An inner function that calls itself would be a cycle, which keeps the tensors of `found` alive.
    return map_leaves(value, partial(_replaced, found), path)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise FormatError(f"The state has the dtype {name!r}, which this version of torch does not have.")
    return found


def slices_of(
    leaf: Leaf,
    *,
    item: str,
    path: Sequence[str],
    ranks: tuple[int, ...],
    changes_in_step: bool = False,
    first: int = 0,
) -> Iterator[LiveSlice]:
    """Yield the slices of one tensor on this rank; none for the empty local part of a sharded tensor.

    `ranks` are the holders of a plain tensor; other tensors list their own holders, in the numbers of
    torch.distributed, where `first` is rank 0. UnsupportedLeaf, with the name, for a tensor that cannot be
    stored.
    """
    name, label = ".".join(path), ".".join((item, *path))
    _check_storable(leaf, label)

    def live(tensor: torch.Tensor, offset: tuple[int, ...], version_of: torch.Tensor) -> LiveSlice:
        return LiveSlice(
            slice=Slice(
                item=item,
                name=name,
                dtype=DTYPE_NAMES[leaf.dtype],
                global_shape=tuple(leaf.shape),
                offset=offset,
                shape=tuple(tensor.shape),
            ),
            tensor=tensor,
            path=tuple(path),
            ranks=ranks,
            leaf=version_of,
            changes_in_step=changes_in_step,
        )

    if isinstance(leaf, BoxedTensor):
        ranks = tuple(first + rank for rank in leaf.ranks)
        for offset, tensor in leaf.parts:
            yield live(tensor, offset, tensor if leaf.counted is None else leaf.counted)
    elif is_dtensor(leaf):
        ranks = tuple(first + rank for rank in holders(leaf))
        local = local_tensor(leaf)
        for part in parts_here(leaf, name=label):
            offset, shape = part.box
            inside = tuple(slice(at, at + size) for at, size in zip(part.local_offset, shape, strict=True))
            yield live(local if local.shape == shape else local[inside], offset, leaf)
    else:
        yield live(local_tensor(leaf), (0,) * leaf.dim(), leaf)


_FIXES = {
    torch.complex128: "Save torch.view_as_real(tensor) in its place, which shares its memory: for a "
    "parameter, make that one the parameter.",
    torch.complex32: "Save torch.view_as_real(tensor) in its place, which shares its memory.",
}


def _check_storable(leaf: Leaf, name: str) -> None:
    if isinstance(leaf, torch.Tensor) and leaf.is_meta:
        raise UnsupportedLeaf(
            f"{name} is on the device meta, and has no memory.",
            hint="Call module.to_empty(device=...) before the restore.",
            path=name,
        )
    if isinstance(leaf, torch.Tensor) and is_lazy(leaf):
        raise UnsupportedLeaf(
            f"{name} has no shape yet: its module is lazy.",
            hint="Call the module with a batch before the Checkpointer and the optimizer are made.",
            path=name,
        )
    layout = leaf.layout if isinstance(leaf, torch.Tensor) else torch.strided
    if leaf.dtype in DTYPE_NAMES and layout == torch.strided:
        if isinstance(leaf, torch.Tensor):
            _check_memory(local_part(leaf), name)
        return
    fix = "Convert it to a dense tensor of a standard dtype before saving."
    raise UnsupportedLeaf(
        f"{name} is a tensor of {leaf.dtype} and {layout}, which cannot be stored.",
        hint=_FIXES.get(leaf.dtype, fix),
        path=name,
    )


def _check_memory(local: torch.Tensor, name: str) -> None:
    """Raise UnsupportedLeaf if a copy would crash, or would convert the values of a subclass both ways."""
    has_address = local.device.type in _COMPARED_ON
    if not has_address or not local.numel() or local.data_ptr() or is_around_one_tensor(local):
        return
    kind = type(local)
    if kind in _PLAIN:
        raise UnsupportedLeaf(
            f"{name} has no memory: its storage was freed.",
            hint="Give it memory and values before a save or a restore.",
            path=name,
        )
    raise UnsupportedLeaf(
        f"{name} is a {kind.__module__}.{kind.__qualname__}, whose values are computed from other tensors.",
        hint="Save the tensors inside it, in a dict or by an object with state_dict() and load_state_dict().",
        path=name,
    )


def bytes_digest(tensor: torch.Tensor) -> str:
    """Return the digest of a tensor's bytes in row-major order; "" for an empty one."""
    flat = elements(tensor).cpu()
    return digest(flat.view(torch.uint8).numpy().data) if flat.numel() else ""
