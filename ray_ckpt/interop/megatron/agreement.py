"""Agreement of all ranks before a save or a load: errors, common state, and the names of all tensors.

A rank holds a part of the names, as with pipeline parallelism. Each rank's tree has them all, so that any
rank can describe and load a checkpoint alone. Paths are exchanged at the first save and when they change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist

from ray_ckpt.capture.items import BoxedTensor
from ray_ckpt.errors import CheckpointError
from ray_ckpt.format.digest import digest

Path: TypeAlias = tuple[str, ...]
"""Keys that lead to a tensor in the tree of an item."""
Boxes: TypeAlias = Mapping[str, Mapping[Path, BoxedTensor]]
"""Boxes of this rank by item and path."""
Paths: TypeAlias = Mapping[str, tuple[Path, ...]]
"""Paths of the tensors of all ranks, by item."""


Result = TypeVar("Result")
Note = TypeVar("Note")


class Agreement:
    """The agreement of the saves of one strategy."""

    def __init__(self) -> None:
        self._digests: tuple[str, ...] = ()  # of the paths of each rank, at the last save
        self._paths: Paths = {}

    def agree(self, prepare: Callable[[], tuple[Boxes, bytes]]) -> tuple[Boxes, Paths, bytes]:
        """Return what `prepare` returns on this rank, the paths of all ranks, and the bytes of rank 0.

        Raises the first CheckpointError of any rank on all ranks.
        """

        def notes(prepared: tuple[Boxes, bytes]) -> tuple[str, bytes]:
            own = digest(json.dumps(_sorted(prepared[0])).encode())
            return own, prepared[1] if dist.get_rank() == 0 else b""

        (boxes, _), everyone = together(prepare, notes)
        return boxes, self._together(_sorted(boxes), tuple(own for own, _ in everyone)), everyone[0][1]

    def _together(self, mine: Mapping[str, list[Path]], digests: tuple[str, ...]) -> Paths:
        if self._digests != digests:  # on all ranks alike
            everyone = _gathered(mine)
            union = {item: {path for paths in everyone for path in paths[item]} for item in mine}
            self._digests, self._paths = (
                digests,
                {item: tuple(sorted(paths)) for item, paths in union.items()},
            )
        return self._paths


def together(prepare: Callable[[], Result], note: Callable[[Result], Note]) -> tuple[Result, list[Note]]:
    """Return what `prepare` returns on this rank, and the notes of all ranks on their results.

    Raises the first CheckpointError of any rank on all ranks, so that none waits for one that has failed.
    """
    try:
        result = prepare()
    except CheckpointError as error:
        _raise_first(_gathered((error, None)))
        raise
    everyone = _gathered((None, note(result)))
    _raise_first(everyone)
    return result, [found for _, found in everyone]


def _raise_first(everyone: list[tuple[CheckpointError | None, Any]]) -> None:
    for error, _ in everyone:
        if error is not None:
            raise error


def _sorted(boxes: Boxes) -> dict[str, list[Path]]:
    return {item: sorted(found) for item, found in boxes.items()}


def _gathered(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone
