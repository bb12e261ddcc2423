"""Blocks of any size cut to any other size, and byte ranges that are joined."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ckpt.format.blocks import BlockCutter, BlocksEnded, merge_ranges

BLOCKS = st.lists(st.binary(max_size=9), max_size=9)
SIZES = st.lists(st.integers(0, 12), max_size=9)


@given(blocks=BLOCKS, sizes=SIZES)
def test_what_is_taken_is_the_stream_cut_at_the_sizes(blocks: list[bytes], sizes: list[int]) -> None:
    cutter, data = BlockCutter(blocks), b"".join(blocks)
    for start, end in pairwise(accumulate(sizes, initial=0)):
        assert bytes(cutter.take(end - start)) == data[start:end]
    assert cutter.at_end() is (sum(sizes) >= len(data))


@given(blocks=BLOCKS, sizes=SIZES, max_bytes=st.none() | st.integers(1, 5))
def test_pieces_are_the_stream_until_it_ends(
    blocks: list[bytes], sizes: list[int], max_bytes: int | None
) -> None:
    cutter, data = BlockCutter(blocks), b"".join(blocks)
    for start, end in pairwise(accumulate(sizes, initial=0)):
        pieces: list[bytes] = []
        try:
            pieces.extend(map(bytes, cutter.pieces(end - start, max_bytes)))
        except BlocksEnded:
            assert end > len(data)
        else:
            assert end <= len(data) or start == end
        assert b"".join(pieces) == data[start:end]
        assert all(0 < len(piece) <= (max_bytes or end) for piece in pieces)


def test_a_whole_piece_is_taken_only_where_one_block_has_it() -> None:
    cutter = BlockCutter([b"abcdef", b"ghi"])
    assert cutter.take_whole(2) is None, "nothing has been read yet"
    assert bytes(cutter.take(1)) == b"a"
    assert bytes(cutter.take_whole(4) or b"") == b"bcde"
    assert cutter.take_whole(2) is None
    assert bytes(cutter.take(2)) == b"fg"


@pytest.mark.parametrize(
    ("gap_bytes", "expected"),
    [(0, ((0, 5), (7, 3), (3, 2))), (2, ((0, 10), (3, 2))), (1, ((0, 5), (7, 3), (3, 2)))],
)
def test_ranges_are_joined_over_gaps(gap_bytes: int, expected: tuple[tuple[int, int], ...]) -> None:
    ranges = [(0, 2), (2, 3), (7, 3), (3, 2)]
    assert merge_ranges(ranges, gap_bytes=gap_bytes) == expected
