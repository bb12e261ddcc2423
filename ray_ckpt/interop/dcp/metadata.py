"""DCP's description of a checkpoint, from which its planners make their plans."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ray_ckpt.capture.load import SavedState
from ray_ckpt.capture.walk import DTYPES
from ray_ckpt.format.tree import TensorRef
from ray_ckpt.interop.dcp.names import flat
from ray_ckpt.interop.dcp.state import OWN_ITEMS, WHOLE, is_whole


def metadata_of(saved: SavedState) -> Metadata:
    """Return DCP's description of a checkpoint, with one chunk for each tensor, the whole."""
    trees = {name: tree for name, tree in saved.trees.items() if name not in OWN_ITEMS}
    entries, paths = flat(trees[WHOLE] if is_whole(trees) else trees)
    described: dict[str, Any] = {}
    for name, value in entries.items():
        part = saved.slices.get(value.key) if isinstance(value, TensorRef) else None
        if part is None:
            described[name] = BytesStorageMetadata()
        else:
            size = torch.Size(part.global_shape)
            described[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=DTYPES[part.dtype]),
                size=size,
                chunks=[ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)],
            )
    return Metadata(state_dict_metadata=described, planner_data=paths)
