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


class Agreement:
    """The agreement of the saves of one strategy."""

    def __init__(self) -> None:
        self._digests: tuple[str, ...] = ()  # of the names of each rank, at the last save
        self._names: Names = {}

    def agree(self, prepare: Callable[[], tuple[Boxes, bytes]]) -> tuple[Boxes, Names, bytes]:
        """Return what `prepare` returns on this rank, the names of all ranks, and the bytes of rank 0.

        Raises the first CheckpointError of any rank on all ranks.
        """
        boxes: Boxes = {}
        data, error = b"", None
        try:
            boxes, data = prepare()
        except CheckpointError as found:
            error = found
        mine = {item: sorted(found) for item, found in boxes.items()}
        own = digest(json.dumps(mine).encode())
        everyone = _gathered((error, own, data if dist.get_rank() == 0 else b""))
        if errors := [found for found, _, _ in everyone if found is not None]:
            raise errors[0]
        return boxes, self._together(mine, tuple(found for _, found, _ in everyone)), everyone[0][2]

    def _together(self, mine: Mapping[str, list[str]], digests: tuple[str, ...]) -> Names:
        if self._digests != digests:  # on all ranks alike
            everyone = _gathered(mine)
            union = {item: {name for names in everyone for name in names[item]} for item in mine}
            self._digests, self._names = digests, {item: tuple(sorted(n)) for item, n in union.items()}
        return self._names


def _gathered(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone
