"""DTensors in pickles: the boxes that a rank has, from their placements, without a process group."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from ray_ckpt.format import jsontext
from ray_ckpt.interop.importers.tensors import StridedTensor, refused, sizes, tensor_of
from ray_ckpt.interop.importers.unpickler import Foreign, kind_of
from ray_ckpt.plan.regions import Cut, cut_parts

DTENSORS = ("torch.distributed.tensor.DTensor", "torch.distributed._tensor.api.DTensor")


class Held(NamedTuple):
    """A box of a global tensor: its offset, and the elements of it in the archive."""

    offset: tuple[int, ...]
    tensor: StridedTensor


def is_dtensor(value: Any) -> bool:
    return kind_of(value).endswith("_rebuild_from_type_v2") and kind_of(value.args[1]) in DTENSORS


def held_by(value: Foreign, path: tuple[str, ...]) -> tuple[tuple[int, ...], list[Held]]:
    """Return the shape of a DTensor and the boxes of it in this archive, none if the rank has no elements.

    Raise UnsupportedLeaf for a placement that does not show the box, ValueError if the local tensor has
    another shape than its placements.
    """
    attributes, slots = value.args[3] if type(value.args[3]) is tuple else (value.args[3], None)
    fields = {**(attributes or {}), **(slots or {})}
    spec, local = fields["_spec"].state, tensor_of(fields["_local_tensor"], path)
    shape = sizes(spec["tensor_meta"].args[0])
    cuts = list(_cuts(spec, path))
    local_shape, regions = cut_parts(shape, cuts)
    if local.shape != local_shape and 0 not in local_shape:
        raise ValueError(f"{'.'.join(path)} has the local shape {list(local.shape)}, not {list(local_shape)}")
    if len(regions) > 1:
        raise refused(path, "is sharded in strides")
    return shape, [Held(box[0], replace(local, shape=box[1])) for box, _ in regions]


def _cuts(spec: dict[str, Any], path: tuple[str, ...]) -> list[Cut]:
    mesh = spec["mesh"].state
    counts, at = _mesh_shape(mesh, path), sizes(mesh["_coordinate_on_dim"])
    placements, cuts = spec["placements"], []
    if not len(placements) == len(counts) == len(at):
        raise ValueError(f"{'.'.join(path)} has {len(placements)} placements on a mesh of {list(counts)}")
    _check_order(spec.get("shard_order") or (), path)
    for placement, count, index in zip(placements, counts, at, strict=True):
        kind = kind_of(placement).rpartition(".")[2]
        if kind == "Shard":
            cuts.append(Cut(jsontext.integer(placement.state["dim"], "a dimension"), count, index))
        elif kind != "Replicate":
            raise refused(path, f"has the placement {kind or placement!r}")
    return cuts


def _mesh_shape(mesh: dict[str, Any], path: tuple[str, ...]) -> tuple[int, ...]:
    if "_layout" not in mesh:  # before torch 2.13
        return tensor_of(mesh["mesh"], path).shape
    return tuple(_size(axis.state["shape"]) for axis in mesh["_layout"].state["axes"])


def _size(shape: Any) -> int:
    lengths: tuple[int, ...] = sizes(shape if type(shape) is tuple else (shape,))
    return prod(lengths)


def _check_order(order: Any, path: tuple[str, ...]) -> None:
    """Raise UnsupportedLeaf unless dimensions of the mesh cut a tensor in their order."""
    for entry in order:
        axes = sizes(entry.args[1])
        if list(axes) != sorted(axes):
            raise refused(path, "is sharded in another order than that of its mesh")
