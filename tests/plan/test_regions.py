"""Boxes against the indices themselves."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ray_ckpt.plan.regions import Box, Cut, cut_parts, flat_parts

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def cut_shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, int, int]]]:
    """Draw a shape of at least one dimension, and (dimension, chunks, strides) of some cuts."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    cut = st.tuples(st.integers(0, len(shape) - 1), st.integers(1, 4), st.integers(1, 3))
    return shape, draw(st.lists(cut, max_size=3))


@given(cut_shapes(), st.integers(0, 63))
def test_a_cut_tensor_is_its_boxes_put_together(
    case: tuple[tuple[int, ...], list[tuple[int, int, int]]], number: int
) -> None:
    shape, wanted = case
    cuts = []
    for dim, count, strides in wanted:
        number, index = divmod(number, count)
        cuts.append(Cut(dim, count, index, strides))
    whole = np.arange(prod(shape)).reshape(shape)
    left = whole
    for cut in cuts:
        left = chunk(left, cut)
    local_shape, parts = cut_parts(shape, cuts)
    assert local_shape == left.shape
    local = np.full(local_shape, -1)
    for part in parts:
        at = tuple(slice(o, o + n) for o, n in zip(part.local_offset, part.box[1], strict=True))
        if whole.size:
            assert (local[at] == -1).all(), "no element is in two boxes"
            local[at] = region(whole, part.box)
    assert np.array_equal(local, left)
    assert len(parts) == len({part.box for part in parts}) and (not left.size or parts)


def chunk(array: np.ndarray, cut: Cut) -> np.ndarray:
    pieces = [chunks(array, cut.dim, cut.strides)[k] for k in range(cut.strides)]
    return np.concatenate([chunks(piece, cut.dim, cut.count)[cut.index] for piece in pieces], axis=cut.dim)


def chunks(array: np.ndarray, dim: int, count: int) -> list[np.ndarray]:
    """Return chunks like those of torch.chunk, with empty ones at the end."""
    step = max(1, -(-array.shape[dim] // count))
    return [
        np.take(array, range(*slice(k * step, (k + 1) * step).indices(array.shape[dim])), dim)
        for k in range(count)
    ]


def region(array: np.ndarray, box: Box) -> np.ndarray:
    return array[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]


@given(shapes, st.data())
def test_a_range_of_elements_is_its_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    size = prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    whole = np.arange(size).reshape(shape)
    parts = flat_parts(shape, start, stop)
    found = [region(whole, part.box).reshape(-1) for part in parts]
    assert np.array_equal(np.concatenate([*found, np.arange(0)]), np.arange(start, stop))
    assert [part.local_offset for part in parts] == [(int(f[0]) - start,) for f in found]
    assert len(parts) <= max(1, 2 * len(shape) - 1)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), st.lists(st.integers(0, 125), max_size=4)
)
def test_shards_of_a_flat_tensor_cover_it_once(shape: tuple[int, ...], at: list[int]) -> None:
    size = prod(shape)
    marks = sorted({0, size, *(min(mark, size) for mark in at)})
    seen = np.zeros(shape, int)
    for start, stop in pairwise(marks):
        for part in flat_parts(shape, start, stop):
            seen[tuple(slice(o, o + n) for o, n in zip(*part.box, strict=True))] += 1
    assert (seen == 1).all()


def test_a_strided_cut_has_several_boxes_and_neighbours_are_one() -> None:
    assert [part.box for part in cut_parts((8, 3), [Cut(0, 2, 0, strides=2)])[1]] == [
        ((0, 0), (2, 3)),
        ((4, 0), (2, 3)),
    ]
    assert [part.box for part in cut_parts((8, 3), [Cut(0, 1, 0, strides=2)])[1]] == [((0, 0), (8, 3))]
