"""Boxes of a global tensor that a rank holds, computed from the cuts of the tensor.

A tensor is cut along its dimensions, once for each mesh dimension that shards it, or flattened and cut at
element numbers, as in FSDP1. In both cases a rank may hold several boxes, one after the other in its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple, TypeAlias

Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""A region of a tensor: offset and shape."""
Span: TypeAlias = tuple[int, int]
"""Indices along one dimension: the first, and their number."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A cut of dimension `dim` into `count` chunks, of which chunk `index` is kept.

    With `strides` > 1 the dimension is first cut into `strides` pieces, and chunk `index` of each piece is
    kept.
    """

    dim: int
    count: int
    index: int
    strides: int = 1


class Region(NamedTuple):
    """A box of the global tensor, and its offset in the rank's local tensor."""

    box: Box
    local_offset: tuple[int, ...]


def cut_parts(shape: Sequence[int], cuts: Iterable[Cut]) -> tuple[tuple[int, ...], tuple[Region, ...]]:
    """Return the local shape of a tensor of `shape` after `cuts`, applied in order, and its boxes.

    Chunks are cut as by torch.chunk: all chunks except the last ones have ceil(size / count) indices, and the
    last ones may have no index. An empty local tensor has no box, unless the global tensor has no elements:
    then it has one box.
    """
    spans: list[tuple[Span, ...]] = [((0, size),) for size in shape]
    for cut in cuts:
        pieces = [_chunk(spans[cut.dim], cut.strides, k) for k in range(cut.strides)]
        spans[cut.dim] = _joined(span for piece in pieces for span in _chunk(piece, cut.count, cut.index))
    local_shape = tuple(_size(found) for found in spans)
    if not prod(local_shape):
        whole = Region(((0,) * len(shape), tuple(shape)), (0,) * len(shape))
        return local_shape, () if prod(shape) else (whole,)
    return local_shape, tuple(_parts(spans))


def flat_parts(shape: Sequence[int], start: int, stop: int) -> tuple[Region, ...]:
    """Return the boxes of elements `start` to `stop` - 1 of a C-contiguous tensor, in order.

    `local_offset` is one number, counted from `start`. There are at most 2 * len(shape) - 1 boxes.
    """
    return tuple(Region(box, (first - start,)) for box, first in _flat(tuple(shape), start, stop))


def _flat(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Yield boxes, each with the number of its first element."""
    if start >= stop:
        return
    if (start, stop) == (0, prod(shape)):
        yield ((0,) * len(shape), shape), 0
        return
    rows, inner = shape[0], prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # complete rows
    if first > last:  # the range begins and ends inside one row
        yield from _in_row(shape, last, start, stop)
        return
    if start < first * inner:
        yield from _in_row(shape, first - 1, start, first * inner)
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        yield ((first, *zeros), (last - first, *shape[1:])), first * inner
    if last < rows and last * inner < stop:
        yield from _in_row(shape, last, last * inner, stop)


def _in_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[tuple[Box, int]]:
    base = row * prod(shape[1:])
    for (offset, size), first in _flat(shape[1:], start - base, stop - base):
        yield ((row, *offset), (1, *size)), base + first


def _size(spans: Iterable[Span]) -> int:
    return sum(count for _, count in spans)


def _chunk(spans: Sequence[Span], count: int, index: int) -> tuple[Span, ...]:
    """Return chunk `index` of `count` of the indices in `spans`."""
    step = -(-_size(spans) // count)
    begin, end, seen, found = index * step, (index + 1) * step, 0, []
    for start, length in spans:
        low, high = max(begin - seen, 0), min(end - seen, length)
        if low < high:
            found.append((start + low, high - low))
        seen += length
    return tuple(found)


def _joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Join neighbouring spans."""
    found: list[Span] = []
    for start, length in spans:
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((start, length))
    return tuple(found)


def _parts(spans: Sequence[Sequence[Span]]) -> Iterator[Region]:
    placed: list[list[tuple[Span, int]]] = []
    for along in spans:
        local, found = 0, []
        for span in along:
            found.append((span, local))
            local += span[1]
        placed.append(found)
    for chosen in product(*placed):
        offset = tuple(start for (start, _), _ in chosen)
        size = tuple(length for (_, length), _ in chosen)
        yield Region((offset, size), tuple(local for _, local in chosen))
