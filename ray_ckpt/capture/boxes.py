"""Tensors that name the boxes of a global tensor that they hold on this rank.

A DTensor derives its box from placements (`dtensors`). Other tensors have boxes of their own:

- An object with torch's protocol `_Checkpointable` (torch/distributed/_checkpointable.py) lists its boxes as
  write items. A DTensor whose local tensor has the protocol, such as LocalShardsWrapper or a shard of
  Megatron-FSDP, is cut by the protocol of the local tensor: its placements are an approximation.
- A ShardedTensor of torch.distributed lists its local shards.
- A ShardedTensor of Megatron-core (megatron/core/dist_checkpointing/mapping.py) has offset and shape.

The functions here copy nothing: each box is a view of live memory.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ray_ckpt.capture.dtensors import holders, is_dtensor
from ray_ckpt.capture.items import BoxedTensor
from ray_ckpt.capture.torch_private import is_sharded_tensor, local_part
from ray_ckpt.errors import UnsupportedLeaf

_MEGATRON = "megatron.core.dist_checkpointing.mapping"


def boxed(value: Any, path: Sequence[str]) -> BoxedTensor | None:
    """Return the boxes that `value` names itself; None if its placements or its shape show them.

    UnsupportedLeaf, with the name at `path`, for boxes that cannot be stored.
    """
    if isinstance(value, BoxedTensor):
        return value
    if is_dtensor(value):
        local = local_part(value)
        return _of_protocol(local, value, ".".join(path)) if has_protocol(local) else None
    if is_sharded_tensor(value):
        return _of_sharded_tensor(value)
    if _is_megatron(value):
        return _of_megatron(value, ".".join(path))
    return _of_protocol(value, value, ".".join(path)) if has_protocol(value) else None


def has_protocol(value: object) -> bool:
    """Return whether the class of `value` has the methods of torch's `_Checkpointable`."""
    kind = type(value)
    return hasattr(kind, "__create_write_items__") and hasattr(kind, "__get_tensor_shard__")


def _of_protocol(holder: Any, value: Any, name: str) -> BoxedTensor:
    """Return the boxes of a `holder` with the protocol, which is `value` or its local tensor."""
    items = holder.__create_write_items__(name, value)
    ranks = holders(value) if is_dtensor(value) else (_own_rank(),)
    if not items:
        return BoxedTensor(shape=tuple(value.shape), dtype=value.dtype, ranks=ranks)
    data = items[0].tensor_data
    parts = tuple(
        (tuple(item.tensor_data.chunk.offsets), holder.__get_tensor_shard__(item.index)) for item in items
    )
    for item, (_, tensor) in zip(items, parts, strict=True):
        if tuple(tensor.shape) != tuple(item.tensor_data.chunk.sizes):
            raise UnsupportedLeaf(
                f"{name}: a {type(holder).__name__} gives a shard of shape {tuple(tensor.shape)} for a "
                f"box of shape {tuple(item.tensor_data.chunk.sizes)}.",
                hint="Boxes must be dense: save the tensor in another form.",
                path=name,
            )
    return _boxed(data.size, data.properties.dtype, parts, ranks)


def _of_sharded_tensor(value: Any) -> BoxedTensor:
    metadata = value.metadata()
    parts = tuple((tuple(shard.metadata.shard_offsets), shard.tensor) for shard in value.local_shards())
    return _boxed(metadata.size, metadata.tensor_properties.dtype, parts, (_own_rank(),))


def _is_megatron(value: object) -> bool:
    mapping = sys.modules.get(_MEGATRON)  # without the module there is no object of it
    return mapping is not None and isinstance(value, mapping.ShardedTensor)


def _of_megatron(value: Any, name: str) -> BoxedTensor:
    """Return the box of Megatron's ShardedTensor; a replica other than the first is restored, not saved.

    The local tensor lacks the first `prepend_axis_num` axes of the global shape, which have length 1 here.
    """
    if getattr(value, "flattened_range", None) is not None:
        raise UnsupportedLeaf(
            f"{name} is a range of a flattened Megatron ShardedTensor.",
            hint="Use an optimizer format that can be resharded, such as fully_reshardable.",
            path=name,
        )
    replica = value.replica_id if isinstance(value.replica_id, tuple) else (value.replica_id,)
    tensor = value.data.reshape((1,) * value.prepend_axis_num + tuple(value.local_shape))
    ranks = (_own_rank(),) if not any(replica) else ()
    return _boxed(value.global_shape, value.dtype, ((tuple(value.global_offset), tensor),), ranks)


def _boxed(
    shape: Sequence[int],
    dtype: torch.dtype,
    parts: tuple[tuple[tuple[int, ...], torch.Tensor], ...],
    ranks: tuple[int, ...],
) -> BoxedTensor:
    base = parts[0][1] if parts else None
    parts = tuple((offset, tensor.detach()) for offset, tensor in parts if tensor.numel())
    return BoxedTensor(shape=tuple(shape), dtype=dtype, base=base, parts=parts, ranks=ranks)


def _own_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
