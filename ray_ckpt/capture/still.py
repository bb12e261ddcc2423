"""Still slices: those that stay the same from save to save, such as the frozen base under an adapter.

They are saved in a shard of their own. The agent compares its digest with that of the checkpoint before, and
links the file instead of writing it. Nothing depends on the choice made here but the cost of a save: the
digest decides whether a file is shared.

A slice is still if it is of a parameter without gradient that no registered optimizer has, or of an item in
the option `static_items`. Of the latter, what a registered optimizer has is copied by each save all the same,
since torch's fused steps and those of other libraries leave the versions of tensors as they are. Slices that
each rank saves for itself under the same name are not, such as
buffers, or with `replicate="full"` all that several ranks hold: a reader of format 1 tells them apart by the
name of the rank's first shard only.
"""

from __future__ import annotations

import logging
import random
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import nn

from ray_ckpt.capture.dtensors import is_dtensor
from ray_ckpt.capture.items import elements, storage_of
from ray_ckpt.capture.overlap_guard import Stepped, optimized, stepped_storages
from ray_ckpt.capture.walk import LiveSlice, SliceKey
from ray_ckpt.format.shard import RankLayout, build_rank_layout
from ray_ckpt.texts import size_text

log = logging.getLogger("ray_ckpt")

MIN_STILL_BYTES = 1 << 20  # of a shard that may be shared: below it, another file costs more
MAX_LOOKS = 64  # elements of a slice that are compared before its copy is left out: some 30 us on a host
_LOOKS = count()  # each look compares other elements
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
MAX_CHANGES = 3  # saves that found a change in still slices; after it, each layout has one shard


class StillSlices:
    """The choice of a rank's still slices, corrected when a slice turns out to change."""

    def __init__(
        self,
        optimizers: Iterable[Stepped],
        static_items: Collection[str],
        world_size: int,
        *,
        is_full: bool = False,
    ) -> None:
        """Choose from slices of which, with `is_full`, each of the ranks that hold it saves its own bytes."""
        self.optimizers: tuple[Stepped, ...] = tuple(optimizers)
        self._static = frozenset(static_items)
        self._world_size = world_size
        self._is_full = is_full
        self._moved: set[SliceKey] = set()
        self._num_changes = 0
        self._last: tuple[tuple[object, ...], RankLayout] | None = None  # the slices before, and their layout

    @property
    def num_moved(self) -> int:
        """Number of slices that turned out to change."""
        return len(self._moved)

    def layout(self, owned: Sequence[LiveSlice], *, is_stream: bool = False) -> RankLayout:
        """Lay out the slices that a rank saves; a stream has one shard, since it is written as it comes."""
        still = [] if is_stream or self._num_changes >= MAX_CHANGES else self.choose(owned)
        if sum(live.nbytes for live in still) < MIN_STILL_BYTES:
            still = []
        chosen = {live.slice for live in still}
        moving = [live.slice for live in owned if not chosen or live.slice not in chosen]
        parts = frozenset(moving), frozenset(chosen), len(moving)
        if self._last is None or self._last[0] != parts:
            self._last = parts, build_rank_layout(moving, chosen)
        return self._last[1]

    def choose(self, slices: Iterable[LiveSlice]) -> list[LiveSlice]:
        """Return those that training is expected to leave as they are."""
        still = [live for live in slices if self._may_be_still(live) and live.slice_key not in self._moved]
        if not still:
            return still
        changing = {storage_of(param) for stepped in self.optimizers for param in optimized(stepped)}
        return [
            live
            for live in still
            if live.slice.item in self._static or storage_of(live.tensor) not in changing
        ]

    def unstepped(self, still: Sequence[LiveSlice], optimizers: Iterable[Stepped]) -> list[LiveSlice]:
        """Return those that none of the optimizers has, so that versions and looks show their changes."""
        places = stepped_storages(optimizers) if self._static else set()
        return [live for live in still if storage_of(live.tensor) not in places]

    def _may_be_still(self, live: LiveSlice) -> bool:
        leaf = live.leaf
        is_frozen = not leaf.requires_grad and isinstance(leaf, nn.Parameter)
        if not is_frozen and live.slice.item not in self._static:
            return False
        if self._is_full and len(live.ranks) > 1:
            return False
        if leaf.is_meta or live.is_inference or not live.tensor.is_contiguous():
            return False
        is_own = self._world_size > 1 and len(live.ranks) == 1
        return not is_own or is_dtensor(leaf)

    def warn_of_own(self, slices: Sequence[LiveSlice], items: Iterable[str]) -> None:
        """Log which of a rank's `items` are in `static_items` but have no slice that can be shared."""
        shared = {live.slice.item for live in slices if self._may_be_still(live)}
        if own := sorted(self._static.intersection(items) - shared):
            log.warning(
                "static_items: nothing of %s can be shared between checkpoints: each rank saves its plain"
                " tensors and its objects with state_dict for itself",
                ", ".join(own),
            )

    def note_changed(self, changed: Sequence[LiveSlice]) -> None:
        """Count slices that were taken for still among those that move, from the next layout on."""
        self._moved.update(live.slice_key for live in changed)
        self._num_changes += 1
        size_bytes = sum(live.nbytes for live in changed)
        log.warning(
            "%s was expected to stay the same but has changed; %d tensors of %s are copied by each save"
            " from now on",
            changed[0].slice.key,
            len(changed),
            size_text(size_bytes),
        )


@dataclass(frozen=True, slots=True)
class Taken:
    """The still slices whose bytes a buffer has, with the versions that they had then.

    It does not keep their tensors alive: a model may have moved to other memory since.
    """

    slices: tuple[weakref.ref[LiveSlice], ...]
    versions: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, slices: Sequence[LiveSlice]) -> Taken:
        """Note slices before they are copied."""
        return cls(tuple(map(weakref.ref, slices)), tuple(live.versions for live in slices))

    def is_here(self, slices: Sequence[LiveSlice]) -> bool:
        """Return whether each slice is still the same tensor in the same memory."""
        return all(live is known() for live, known in zip(slices, self.slices, strict=True))

    def changed(self, slices: Sequence[LiveSlice], views: Sequence[torch.Tensor]) -> list[LiveSlice]:
        """Return the slices that are known to differ from those in `views`, the memory of the buffer.

        The same tensor with another version has changed. The version misses a change through `.data`, so
        MAX_LOOKS elements are compared as well, others in each look. They show a change of half of the
        elements but for once in 2**64 looks, such as that of an average of weights or of a merged adapter.
        A tensor in other memory may differ elsewhere: see `is_here`.
        """
        found = [
            live
            for live, known, seen in zip(slices, self.slices, self.versions, strict=True)
            if live is known() and live.versions != seen
        ]
        if found:
            return found
        draws, pairs = new_draws(), zip(slices, views, strict=True)
        return [live for live, view in pairs if not torch.equal(look(live.tensor, draws), look(view, draws))]


def new_draws() -> torch.Tensor:
    """Return MAX_LOOKS integers for one look, int64; torch's own generators belong to the training."""
    chance = random.Random(next(_LOOKS))
    return torch.tensor([chance.getrandbits(62) for _ in range(MAX_LOOKS)])


def look(tensor: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Return MAX_LOOKS elements of a tensor as integers on the host, at places that `draws` chooses.

    They are integers because NaN differs from itself. Elements at regular distances would all be in one
    column of most matrices.
    """
    flat = elements(tensor)
    if not flat.numel():
        return torch.empty(0)
    kind = _INTEGERS.get(flat.element_size())
    if kind is not None:  # before the choice, which torch has not for every dtype
        flat = flat.view(kind)
    places = draws % flat.numel()
    if flat.is_cpu:
        found = flat.index_select(0, places)
    else:
        found = flat.index_select(0, places.to(flat.device)).cpu()
    return found if kind is not None else found.view(torch.uint8)
