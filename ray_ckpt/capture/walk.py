"""From items to slices: which bytes this rank holds, which of them it saves, and the tree around them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from ray_ckpt.capture.items import Item, local_tensor
from ray_ckpt.errors import UnsupportedLeaf
from ray_ckpt.format.digest import digest
from ray_ckpt.format.tree import TensorRef, TorchDtype
from ray_ckpt.types import Slice

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
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""A region of a tensor: offset and shape."""
DTYPES: Mapping[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSlice:
    """A slice and the live local tensor behind it. `ranks` hold the same bytes; one of them saves it."""

    slice: Slice
    tensor: torch.Tensor
    path: tuple[str, ...]
    ranks: tuple[int, ...]
    leaf: torch.Tensor
    """As it stands in the item: `tensor` itself, or the DTensor around it. Its version counts changes."""
    changes_in_step: bool = False
    """Nothing but an optimizer's step is expected to change it."""

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def is_still(self, leaf: torch.Tensor) -> bool:
        """Whether `leaf` is the same object in the same memory as when this slice was made of it."""
        local = getattr(leaf, "_local_tensor", leaf)  # of a DTensor, without a node in the autograd graph
        tensor = self.tensor
        return (
            leaf is self.leaf
            and local.data_ptr() == tensor.data_ptr()
            and local.shape == tensor.shape
            and local.stride() == tensor.stride()
            and local.dtype == tensor.dtype
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """All slices of this rank, and the items as trees with TensorRef in place of tensors."""

    slices: tuple[LiveSlice, ...]
    trees: Mapping[str, Any]

    @property
    def by_key(self) -> dict[str, LiveSlice]:
        return {live.slice.key: live for live in self.slices}

    def owned(self, rank: int) -> tuple[LiveSlice, ...]:
        """The slices that `rank` saves: those it alone holds and its share of those that others hold too."""
        loads: dict[tuple[int, ...], dict[int, int]] = {}
        mine = []
        for live in sorted(self.slices, key=lambda s: (-s.nbytes, s.slice.key)):
            load = loads.setdefault(live.ranks, dict.fromkeys(live.ranks, 0))
            owner = min(load, key=lambda k: (load[k], k))
            load[owner] += live.nbytes
            if owner == rank:
                mine.append(live)
        return tuple(mine)

    def shared(self, world_size: int) -> list[LiveSlice]:
        """What this rank takes for common to all of several ranks."""
        everyone = tuple(range(world_size))
        return [s for s in self.slices if s.ranks == everyone] if world_size > 1 else []

    def shared_digest(self, world_size: int, contents: Mapping[str, str]) -> str:
        """Digest of what is common to all ranks; the same on every rank, or shares get lost.

        Over names, dtypes and shapes, and the digests of bytes in `contents`, by key: parameters that differ
        between ranks without being a DTensor would lose all copies but one.
        """
        lines = sorted(
            [s.slice.key, s.slice.dtype, list(s.slice.shape), contents.get(s.slice.key, "")]
            for s in self.shared(world_size)
        )
        return digest(json.dumps(lines).encode())


def walk(items: Mapping[str, Item], *, rank: int, world_size: int, before: Walked | None = None) -> Walked:
    """Every tensor of `items` as slices of this rank, nothing copied. UnsupportedLeaf names a bad leaf.

    What is where it was in `before` keeps its slices; if that is everything, `slices` is the same object.
    """
    slices: list[LiveSlice] = []
    keys: set[str] = set()
    everyone = tuple(range(world_size))
    known = before.by_key if before is not None else {}

    def visit(value: Any, item: Item, prefix: str, path: tuple[str, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            ranks = everyone if item.is_shared(path) else (rank,)
            key = ".".join((prefix, *path))
            if key in keys:
                raise UnsupportedLeaf(
                    f"Two tensors would be stored under the name {key}.",
                    hint="Rename one of their keys; names are joined with dots.",
                    path=key,
                )
            keys.add(key)
            live = known.get(key)
            if live is not None and live.is_still(value):
                slices.append(live)
                return TensorRef(key)
            stepped = item.changes_in_step(path)
            slices.extend(slices_of(value, item=prefix, path=path, ranks=ranks, changes_in_step=stepped))
            return TensorRef(key)
        return map_leaves(value, lambda v, p: visit(v, item, prefix, p), path)

    trees = {}
    for name, item in items.items():
        prefix, path = (f"rank{rank}", (name,)) if item.per_rank else (name, ())
        trees[name] = visit(item.tree(), item, prefix, path)
    found = tuple(slices)
    if before is not None and len(found) == len(before.slices) and all(map(is_, found, before.slices)):
        found = before.slices
    return Walked(slices=found, trees=trees)


def map_leaves(value: Any, visit: Any, path: tuple[str, ...]) -> Any:
    """Rebuild plain dicts, lists and tuples with `visit(child, path)`; torch dtypes become TorchDtype."""
    kind = type(value)
    if isinstance(value, dict) and kind.__module__ in ("builtins", "collections"):
        mapped = {k: visit(v, (*path, str(k))) for k, v in value.items()}
        return mapped if kind is dict else _same_kind(value, mapped)
    if kind is list or kind is tuple:
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


def resolve_leaves(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Put tensors and dtypes back where `walk` took them out."""

    def visit(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, TensorRef):
            return tensors[value.key]
        if isinstance(value, TorchDtype):
            return getattr(torch, value.name)
        return map_leaves(value, visit, path)

    return visit(tree, ())


def slices_of(
    tensor: torch.Tensor,
    *,
    item: str,
    path: Sequence[str],
    ranks: tuple[int, ...],
    changes_in_step: bool = False,
) -> Iterable[LiveSlice]:
    """The slices of one tensor on this rank; none for the empty local part of a sharded tensor.

    `ranks` hold a plain tensor; a DTensor knows its own holders from its mesh.
    """
    name = ".".join(path)
    if tensor.dtype not in DTYPE_NAMES or tensor.layout != torch.strided:
        raise UnsupportedLeaf(
            f"{item}.{name} is a tensor of {tensor.dtype} and {tensor.layout}, which cannot be stored.",
            hint="Convert it to a dense tensor of a standard dtype before saving.",
            path=f"{item}.{name}",
        )
    local = local_tensor(tensor)
    offset, shape = (0,) * tensor.dim(), tuple(tensor.shape)
    create_chunks = getattr(tensor, "__create_chunk_list__", None)
    if create_chunks is not None:
        is_partial = any(p.is_partial() for p in tensor.placements)  # type: ignore[attr-defined]
        chunks = [] if is_partial else create_chunks()
        if len(chunks) != 1:
            raise UnsupportedLeaf(
                f"{item}.{name} has placements {tensor.placements}, "  # type: ignore[attr-defined]
                "which do not make one region per rank.",
                hint="Redistribute it to Shard or Replicate placements before saving.",
                path=f"{item}.{name}",
            )
        offset, shape = tuple(chunks[0].offsets), tuple(chunks[0].sizes)
        ranks = _dtensor_holders(tensor)
        if local.numel() == 0 and tensor.numel() > 0:
            return ()
    return (
        LiveSlice(
            slice=Slice(
                item=item,
                name=name,
                dtype=DTYPE_NAMES[tensor.dtype],
                global_shape=tuple(tensor.shape),
                offset=offset,
                shape=shape,
            ),
            tensor=local,
            path=tuple(path),
            ranks=ranks,
            leaf=tensor,
            changes_in_step=changes_in_step,
        ),
    )


def bytes_digest(tensor: torch.Tensor) -> str:
    """Digest of a tensor's bytes in row-major order; empty for an empty one."""
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    return digest(flat.view(torch.uint8).numpy().data) if flat.numel() else ""


def boxes_on(tensor: Any, ranks: Iterable[int]) -> Iterator[tuple[int, Box]]:
    """Which region of a DTensor each of `ranks` holds, in their order; not those outside its mesh."""
    mesh = tensor.device_mesh
    for rank in ranks:
        coordinate = (mesh.mesh == rank).nonzero().flatten().tolist()
        if coordinate:
            shape, offset = _compute_local_shape_and_global_offset(
                tensor.shape, mesh.shape, coordinate, tensor.placements
            )
            yield rank, (tuple(offset), tuple(shape))


def _dtensor_holders(tensor: Any) -> tuple[int, ...]:
    """The ranks that hold the same region: those that differ only along replicated mesh dimensions."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    index = tuple(
        slice(None) if placement.is_replicate() else position
        for placement, position in zip(tensor.placements, coordinate, strict=True)
    )
    return tuple(sorted(mesh.mesh[index].flatten().tolist()))
