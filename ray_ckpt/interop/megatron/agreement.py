"""Agreement of all ranks before a save: errors, common state, and the names of all tensors.

A rank holds a part of the names, as with pipeline parallelism. Each rank's tree has them all, so that any
rank can describe and load a checkpoint alone. Names are exchanged at the first save and when they change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch.distributed as dist

from ray_ckpt.capture.items import BoxedTensor
from ray_ckpt.errors import CheckpointError
from ray_ckpt.format.digest import digest

Boxes: TypeAlias = Mapping[str, Mapping[str, BoxedTensor]]
"""Boxes of this rank by item and name."""
Names: TypeAlias = Mapping[str, tuple[str, ...]]
"""Names of the tensors of all ranks, by item."""

_known: tuple[tuple[str, ...], Names] = ((), {})  # digests of each rank's names, and the names together


def agree(prepare: Callable[[], tuple[Boxes, bytes]]) -> tuple[Boxes, Names, bytes]:
    """Return what `prepare` returns on this rank, the names of all ranks, and the second result of rank 0.

    Raises the first CheckpointError of any rank on all ranks.
    """
    boxes: Boxes = {}
    data, error = b"", None
    try:
        boxes, data = prepare()
    except CheckpointError as found:
        error = found
    mine = {item: sorted(found) for item, found in boxes.items()}
    everyone = _gathered((error, digest(json.dumps(mine).encode()), data if dist.get_rank() == 0 else b""))
    if errors := [found for found, _, _ in everyone if found is not None]:
        raise errors[0]
    return boxes, _names(mine, tuple(found for _, found, _ in everyone)), everyone[0][2]


def _names(mine: Mapping[str, list[str]], digests: tuple[str, ...]) -> Names:
    global _known
    if _known[0] != digests:  # on all ranks alike
        everyone = _gathered(mine)
        together = {item: dict.fromkeys(n for names in everyone for n in names[item]) for item in mine}
        _known = digests, {item: tuple(sorted(names)) for item, names in together.items()}
    return _known[1]


def _gathered(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone
