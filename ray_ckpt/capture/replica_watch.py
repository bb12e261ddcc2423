"""Digests of what a rank holds in common with other ranks, a part at each save, to find replicas that drift.

Replicas stay equal because each of them applies the same gradients to the same bytes. A flipped bit in the
memory of a device, a faulty unit or a missing all-reduce ends that silently. So each save compares one of
WINDOWS parts of the bytes: after WINDOWS saves all bytes were compared. The bytes are read where they are, in
the training thread's stream on an accelerator, or with the copy of the tensor on a CPU.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeAlias

import torch

from ray_ckpt.capture.items import elements
from ray_ckpt.capture.walk import LiveSlice
from ray_ckpt.format.digest import Digester, digest
from ray_ckpt.types import Watched

WINDOWS = 53  # 2 % of the bytes at each save; prime, so that saves at any regular distance reach every window
MAX_PIECES = 8  # digests of one group in one report: about 100 bytes for each rank
MAX_GROUPS = 8  # groups of replicas of a rank, those with most bytes; a mesh has one or two by dimension
SUM_ELEMENTS = 1 << 21  # elements that are summed at once: 50 MB of device memory
_HEX = 8  # digits of a digest: one of 4e9 differences is missed
_GROUP_HEX = 16  # digits that name a group: two groups with one name would be a finding without a cause
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd: 2**64 / golden ratio, as int64
_INTS = {1: torch.uint8, 2: torch.int16}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """The slices that the same ranks hold, as indexes, with the end of each in the bytes of the group."""

    ranks: tuple[int, ...]
    label: str  # digest of `ranks`, of which there may be thousands
    indexes: tuple[int, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """The elements `begin` to `end` of a slice in row-major order."""

    index: int
    begin: int
    end: int


class ReplicaWatch:
    """The windows of one rank's slices. The same slices on other ranks have the same windows."""

    def __init__(self, slices: Sequence[LiveSlice], *, every_steps: int | None = None) -> None:
        """Prepare the windows for saves of `slices`, which are due each `every_steps` steps, or by time."""
        self._stride = every_steps if every_steps and every_steps % WINDOWS == 0 else 1
        by_ranks: dict[tuple[int, ...], list[int]] = {}
        for index, live in enumerate(slices):
            if len(live.ranks) > 1 and live.nbytes:
                by_ranks.setdefault(live.ranks, []).append(index)
        groups = []
        for ranks, indexes in by_ranks.items():
            indexes.sort(key=lambda index: slices[index].slice_key)
            ends = tuple(accumulate(slices[index].nbytes for index in indexes))
            label = digest(json.dumps(ranks).encode())
            groups.append(_Group(ranks=ranks, label=label, indexes=tuple(indexes), ends=ends))
        self._groups = sorted(groups, key=lambda group: (-group.ends[-1], group.ranks))[:MAX_GROUPS]

    def window(self, step: int) -> int:
        """Return the number of the window that the save of `step` compares; the same on all ranks."""
        return step // self._stride % WINDOWS

    def digests(self, slices: Sequence[LiveSlice], step: int, rank: int) -> WindowDigests:
        """Return the digests, not yet computed, for the save of `step`; `slices` are alike the first ones."""
        window = self.window(step)
        found = []
        for group in self._groups:
            chunks = tuple(_chunks(group, slices, window))
            if chunks:
                found.append(_GroupDigests(group, chunks, slices, window, rank))
        return WindowDigests(found)


def _chunks(group: _Group, slices: Sequence[LiveSlice], window: int) -> Iterator[_Chunk]:
    """Yield the elements whose first byte is in a window of a group's bytes."""
    total = group.ends[-1]
    low, high = total * window // WINDOWS, total * (window + 1) // WINDOWS
    for at in range(bisect_right(group.ends, low), len(group.ends)):
        live = slices[group.indexes[at]]
        start, size = group.ends[at] - live.nbytes, live.tensor.element_size()
        if start >= high:
            return
        begin, end = (max(0, -(-(edge - start) // size)) for edge in (low, high))
        end = min(end, live.tensor.numel())
        if begin < end:
            yield _Chunk(index=group.indexes[at], begin=begin, end=end)


class _GroupDigests:
    """The digests of one group in one window; tensors beyond MAX_PIECES are digested together."""

    def __init__(
        self,
        group: _Group,
        chunks: tuple[_Chunk, ...],
        slices: Sequence[LiveSlice],
        window: int,
        rank: int,
    ) -> None:
        count = min(len(chunks), MAX_PIECES)
        self.pieces: list[list[tuple[_Chunk, LiveSlice]]] = [[] for _ in range(count)]
        for number, chunk in enumerate(chunks):
            self.pieces[number * count // len(chunks)].append((chunk, slices[chunk.index]))
        described = [
            [
                *(live.slice.key, live.slice.offset, live.slice.shape, live.slice.dtype),
                *(chunk.begin, chunk.end, _is_on_host(live)),
            ]
            for piece in self.pieces
            for chunk, live in piece
        ]
        label = json.dumps([window, group.label, described, [len(piece) for piece in self.pieces]])
        self.group = digest(label.encode())[:_GROUP_HEX]
        self.names = tuple(map(_name, self.pieces)) if rank == group.ranks[0] else ()


def _name(piece: Sequence[tuple[_Chunk, LiveSlice]]) -> str:
    keys = list(dict.fromkeys(live.slice.key for _, live in piece))
    return keys[0] if len(keys) == 1 else f"{keys[0]} to {keys[-1]} ({len(keys)} tensors)"


_Place: TypeAlias = tuple[int, int, int]
"""The numbers of a group, of a piece in it, and of a chunk in that."""


@dataclass(slots=True)
class WindowDigests:
    """Digests of one save: `add_now` and `complete` read the bytes, `reports` returns the digests."""

    _groups: list[_GroupDigests]
    _parts: dict[_Place, bytes] = field(default_factory=dict)  # digests
    _copied: list[tuple[list[_Place], torch.Tensor, Any]] = field(default_factory=list)
    _versions: dict[_Place, tuple[int, int]] = field(default_factory=dict)  # of what `complete` reads
    _changed: set[int] = field(default_factory=set)  # groups with a tensor that changed before it was read

    def add_now(self, background: Set[str]) -> None:
        """Read bytes that may change at any time; begin to read those on a device, and wait for nothing."""
        on_devices: dict[torch.device, list[tuple[_Place, torch.Tensor]]] = {}
        with torch.no_grad():
            for place, chunk, live in self._all():
                if not _is_on_host(live):
                    on_devices.setdefault(live.tensor.device, []).append((place, _flat(chunk, live)))
            for device, found in on_devices.items():
                self._begin_sums(device, found)
            for place, chunk, live in self._all():
                if _is_on_host(live) and live.slice.key in background:
                    self._versions[place] = live.versions
                elif _is_on_host(live):
                    self._parts[place] = _host_digest(chunk, live)

    def complete(self) -> None:
        """Read the other bytes; called before they may change.

        If the training changes one all the same, without `ckpt.lock()`, ranks may read it before or after.
        """
        with torch.no_grad():
            for place, chunk, live in self._all():
                if place not in self._parts and _is_on_host(live):
                    self._parts[place] = _host_digest(chunk, live)
                    if live.versions != self._versions[place]:
                        self._changed.add(place[0])

    def reports(self) -> tuple[Watched, ...]:
        """Return the digests of each group in which no tensor has changed; wait for those of a device."""
        for places, sums, event in self._copied:
            if event is not None:
                event.synchronize()
            for place, value in zip(places, sums.tolist(), strict=True):
                self._parts[place] = digest(value.to_bytes(8, "little", signed=True)).encode()
        self._copied = []
        return tuple(
            Watched(
                group=group.group,
                digests=tuple(self._text(at, number, piece) for number, piece in enumerate(group.pieces)),
                names=group.names,
            )
            for at, group in enumerate(self._groups)
            if at not in self._changed
        )

    def _text(self, at: int, number: int, piece: Sequence[object]) -> str:
        found = Digester()
        for chunk in range(len(piece)):
            found.update(self._parts[at, number, chunk])
        return found.hexdigest()[:_HEX]

    def _all(self) -> Iterator[tuple[_Place, _Chunk, LiveSlice]]:
        for at, group in enumerate(self._groups):
            for number, piece in enumerate(group.pieces):
                for place, (chunk, live) in enumerate(piece):
                    yield (at, number, place), chunk, live

    def _begin_sums(self, device: torch.device, found: Sequence[tuple[_Place, torch.Tensor]]) -> None:
        """Enqueue the sums on a device and their copies to the host, behind the work of this thread."""
        sums = device_sums([flat for _, flat in found])
        event = None
        if device.type == "cuda":
            host = torch.empty(len(found), dtype=torch.int64, device="cpu", pin_memory=True)
            sums = host.copy_(sums, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
        self._copied.append(([place for place, _ in found], sums, event))


def _is_on_host(live: LiveSlice) -> bool:
    return bool(live.tensor.is_cpu)


def _flat(chunk: _Chunk, live: LiveSlice) -> torch.Tensor:
    return elements(live.tensor)[chunk.begin : chunk.end]


def _host_digest(chunk: _Chunk, live: LiveSlice) -> bytes:
    return digest(_flat(chunk, live).view(torch.uint8).numpy().data).encode()


def device_sums(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the integers in each tensor's bytes, each times an odd number, modulo 2**64.

    The tensors are of one dimension, not empty and on one device; the sums are int64, in one tensor there. A
    sum is exact, so its order does not matter. A change of one integer, such as a flipped bit, always changes
    the sum; changes of several cancel each other by a rare coincidence only.
    """
    all_ints = [flat.view(_INTS.get(flat.element_size(), torch.int32)) for flat in flats]
    count = min(SUM_ELEMENTS, max(map(len, all_ints)))
    weights = torch.arange(count, dtype=torch.int64, device=flats[0].device).mul_(_FACTOR).bitwise_or_(1)
    sums = []
    for ints in all_ints:
        parts = (ints[begin : begin + SUM_ELEMENTS] for begin in range(0, len(ints), SUM_ELEMENTS))
        first, *others = (part.to(torch.int64).mul_(weights[: len(part)]).sum() for part in parts)
        for other in others:
            first.mul_(_FACTOR).add_(other)
        sums.append(first)
    return torch.stack(sums)
