"""Regions of a DTensor on each rank.

DTensor's own functions (`__create_chunk_list__`, `_compute_local_shape_and_global_offset`) return one box per
rank: the first index and the number of indices along each dimension. Two layouts have other regions:

- Strided shards in general: `_StridedShard(0, split_factor=2)` over 2 ranks gives rank 0 rows 0, 1, 4 and 5
  of 8.
- Parameters of fully_shard over tensor parallelism that do not divide evenly. Their placements
  (_StridedShard, Shard), read from the left as DTensor does, differ from the real cut: first by tensor
  parallelism, then by FSDP. An example is 7 rows over 3 x 2 ranks. There DTensor's geometry and torch's
  checkpoints are wrong (torch 2.13); the shapes of the local tensors show the real cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any, TypeGuard

import torch

from ray_ckpt.capture.torch_private import local_part
from ray_ckpt.errors import UnsupportedLeaf
from ray_ckpt.plan.regions import Box, Cut, Region, cut_parts

MAX_LAYOUTS = 4096  # cached layouts: a model has some dozens of shapes, each on the ranks of a node
MAX_LINES = 64  # cached lists of ranks, each with its mesh: one for each way of sharding
MAX_MESHES = 3  # in the description of a checkpoint; a program has one or two meshes


def is_dtensor(leaf: object) -> TypeGuard[torch.Tensor]:
    return isinstance(leaf, torch.Tensor) and hasattr(leaf, "device_mesh") and hasattr(leaf, "placements")


def parts_here(tensor: Any, *, name: str) -> tuple[Region, ...]:
    """Return this rank's regions of a DTensor, in the order of the local tensor; none outside of the mesh.

    UnsupportedLeaf, with `name`, if the regions are ambiguous.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise _unsupported(
            name,
            f"has placements {tuple(tensor.placements)}: the values of its ranks are not reduced yet",
            "Save tensor.redistribute(placements=[Replicate(), ...]) in its place.",
        )
    coordinate, local = tensor.device_mesh.get_coordinate(), local_part(tensor)
    if coordinate is None:
        return ()
    layout = (tuple(tensor.shape), _cuts(tensor.placements, tensor.device_mesh.shape, tuple(coordinate)))
    readings = {_read(*layout, strides_last=False), _read(*layout, strides_last=True)}
    # An empty local tensor may have any shape that is empty.
    fitting = [
        parts
        for shape, parts in readings
        if shape == tuple(local.shape) or (prod(shape) == 0 and local.numel() == 0)
    ]
    if not fitting:
        raise _unsupported(
            name,
            f"has a local tensor of shape {tuple(local.shape)}, where placements {tuple(tensor.placements)} "
            f"over a mesh of {tuple(tensor.device_mesh.shape)} make {readings.pop()[0]}",
            "Make it with distribute_tensor(), or give DTensor.from_local() its global shape.",
        )
    if len(set(fitting)) > 1:
        raise _unsupported(
            name,
            f"is cut unevenly with placements {tuple(tensor.placements)}, from which DTensor and fully_shard "
            "derive different regions of the same shape",
            "Pad the dimension to a multiple of the number of ranks that shard it.",
        )
    return fitting[0]


def mesh_text(leaves: Iterable[Any]) -> str:
    """Return the device meshes of the DTensors among `leaves`, largest first: `data=4 tensor=2`.

    Without dimension names: `4x2`. At most MAX_MESHES, separated by commas; "" if there is no DTensor.
    """
    meshes: set[Any] = {getattr(leaf, "device_mesh", None) for leaf in leaves} - {None}
    texts = sorted({(-mesh.size(), _mesh_text(mesh)) for mesh in meshes})
    return ", ".join(text for _, text in texts[:MAX_MESHES])


def _mesh_text(mesh: Any) -> str:
    sizes, names = tuple(mesh.shape), mesh.mesh_dim_names
    if not names:
        return "x".join(map(str, sizes))
    return " ".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))


def holders(tensor: Any) -> tuple[int, ...]:
    """Return the ranks with the same regions: those that differ along replicated mesh dimensions only."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    sides = zip(tensor.placements, coordinate, strict=True)
    line = tuple(None if placement.is_replicate() else at for placement, at in sides)
    return _ranks_along(mesh, mesh.get_rank(), line)


@lru_cache(MAX_LINES)
def _ranks_along(mesh: Any, rank: int, line: tuple[int | None, ...]) -> tuple[int, ...]:
    """Return the ranks of a mesh that have these coordinates; None stands for any.

    torch computes `mesh.mesh` anew at each access. It depends on the rank: parts of one mesh that different
    ranks see are equal as keys.
    """
    index = tuple(slice(None) if at is None else at for at in line)
    return tuple(sorted(mesh.mesh[index].flatten().tolist()))


def boxes_on(tensor: Any, ranks: Iterable[int]) -> Iterator[tuple[int, tuple[Box, ...]]]:
    """Yield each rank of `ranks` inside the mesh, with the rank's regions of a DTensor.

    Yield nothing if the regions depend on how the tensor was made, which only the local tensors show.
    """
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    for rank in ranks:
        coordinate = tuple((mesh.mesh == rank).nonzero().flatten().tolist())
        if coordinate:
            cuts = _cuts(tensor.placements, mesh.shape, coordinate)
            if _is_twofold(shape, cuts):
                return
            yield rank, tuple(part.box for part in _read(shape, cuts, strides_last=False)[1])


def _cuts(
    placements: Iterable[Any], mesh_shape: Sequence[int], coordinate: tuple[int, ...]
) -> tuple[Cut, ...]:
    """Return the cut of each sharded mesh dimension, from the left."""
    return tuple(
        Cut(placement.dim, count, index, getattr(placement, "split_factor", 1))
        for placement, count, index in zip(placements, mesh_shape, coordinate, strict=True)
        if hasattr(placement, "dim")
    )


def _is_twofold(shape: tuple[int, ...], cuts: tuple[Cut, ...]) -> bool:
    """Return whether the two readings may differ on some rank, because of uneven or nested strides."""
    strided = [cut.dim for cut in cuts if cut.strides > 1]
    return len(strided) > len(set(strided)) or any(
        shape[dim] % prod(cut.count for cut in cuts if cut.dim == dim) for dim in strided
    )


@lru_cache(MAX_LAYOUTS)
def _read(
    shape: tuple[int, ...], cuts: tuple[Cut, ...], *, strides_last: bool
) -> tuple[tuple[int, ...], tuple[Region, ...]]:
    """Return local shape and regions, as DTensor reads placements or as fully_shard cuts (`strides_last`).

    fully_shard records the number of existing chunks as the strides of its own cut. Without strides both
    readings are the same.
    """
    if strides_last:
        cuts = _undone(cuts)
    return cut_parts(shape, cuts)


def _undone(cuts: tuple[Cut, ...]) -> tuple[Cut, ...]:
    """Return the cuts in the order in which fully_shard over tensor parallelism makes them."""
    first, last = [], []
    for at, cut in enumerate(cuts):
        chunks = prod(other.count for other in cuts[at + 1 :] if other.dim == cut.dim)
        if cut.strides > 1 and cut.strides == chunks:
            last.append(replace(cut, strides=1))
        else:
            first.append(cut)
    return (*first, *reversed(last))


def _unsupported(name: str, what: str, fix: str) -> UnsupportedLeaf:
    return UnsupportedLeaf(f"{name} {what}.", hint=fix, path=name)
