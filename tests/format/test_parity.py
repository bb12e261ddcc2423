"""The layout of parity files: which bytes are in which stripe, and headers that are damaged."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ckpt.errors import FormatError, NewerFormat
from ray_ckpt.format import jsontext
from ray_ckpt.format.names import STILL, fragment_file, is_still_name, parity_file, shard_file
from ray_ckpt.format.parity import ParityHeader, Span, decode_header, encode_header, is_decodable
from ray_ckpt.types import AttemptId, FileEntry, ParityGroup

GOLDEN = Path(__file__).parent.parent / "golden"
ATTEMPT = AttemptId(run_uid="ab" * 16, session=3, step=40, attempt="cd" * 8, epoch=2)


def _header(
    sizes: list[list[int]], parity: int = 2, position: int = 1, still: int | None = None
) -> ParityHeader:
    """Return a header of files with these sizes, of which those at `still` are still shards."""
    members, num_nodes = tuple(range(1, len(sizes) + 1)), len(sizes) + 1

    def name(member: int, at: int) -> str:
        if at == still:
            return shard_file(9 * member + at, 999, STILL)
        return f"state-{9 * member + at:05d}-of-00999.json" if at else fragment_file(member, num_nodes)

    files = tuple(
        tuple(
            FileEntry(name=name(member, at), size_bytes=size, digest=f"{at:032x}")
            for at, size in enumerate(of_member)
        )
        for member, of_member in zip(members, sizes, strict=True)
    )
    group = ParityGroup(members=members, parity=parity)
    return ParityHeader(
        attempt=ATTEMPT,
        num_nodes=num_nodes,
        group=group,
        position=position,
        files=files,
        has_still=any(is_still_name(file.name) for files_of in files for file in files_of),
    )


SIZES = st.lists(st.lists(st.integers(0, 9000), min_size=1, max_size=4).filter(any), min_size=4, max_size=9)


@given(sizes=SIZES, parity=st.sampled_from([1, 2]), still=st.sampled_from([None, 1]))
def test_each_byte_of_each_member_is_in_one_stripe(
    sizes: list[list[int]], parity: int, still: int | None
) -> None:
    header = _header(sizes, parity, still=still)
    group = header.group
    found = {file.name: bytearray(file.size_bytes) for files in header.files for file in files}
    assert len(header.layers) == 1 + header.has_still
    for layer, stripe in product(header.layers, range(group.size)):
        segment = layer.segment_bytes
        assert segment % 4096 == 0
        members = group.data_of(stripe)
        assert len(members) == group.num_data
        assert {group.place(stripe + i) for i in range(parity)}.isdisjoint(members)
        assert [group.exponent(stripe, at) for at in members] == list(reversed(range(group.num_data)))
        for position in members:
            assert group.stripe_of(position, group.segment_in(stripe, position)) == stripe
            span = Span(stripe=stripe, offset=0, size=segment)
            for file, offset, size, at in layer.pieces(position, span):
                assert 0 <= at <= segment - size
                for byte in range(offset, offset + size):
                    found[file][byte] += 1
    assert all(set(counts) <= {1} for counts in found.values())


@given(sizes=SIZES, still=st.sampled_from([None, 1]), data=st.data())
def test_the_spans_of_a_range_are_the_bytes_of_the_range(
    sizes: list[list[int]], still: int | None, data: st.DataObject
) -> None:
    header = _header(sizes, still=still)
    file = data.draw(st.sampled_from([file for files in header.files for file in files if file.size_bytes]))
    offset = data.draw(st.integers(0, file.size_bytes - 1))
    size = data.draw(st.integers(1, file.size_bytes - offset))
    layer, at = header.layers[header.number_of(file.name)], offset
    position = layer.position_of(file.name)
    for span in layer.spans(file.name, [(offset, size)], 3000):
        assert span.size <= 3000
        ((name, start, nbytes, inside),) = layer.pieces(position, span)
        assert (name, start, nbytes, inside) == (file.name, at, span.size, 0)
        at += span.size
    assert at == offset + size
    with pytest.raises(FormatError, match="ends at byte"):
        list(layer.spans(file.name, [(offset, file.size_bytes)], 3000) if offset else [])
        list(layer.spans(file.name, [(0, file.size_bytes + 1)], 3000))


@pytest.mark.parametrize("parity", [1, 2])
@pytest.mark.parametrize("size", [3, 4, 8])
def test_any_lost_nodes_up_to_the_parity_can_be_computed_and_no_more(parity: int, size: int) -> None:
    group = ParityGroup(members=tuple(range(size)), parity=parity)
    for count in range(size + 1):
        for lost in map(frozenset, combinations(range(size), count)):
            assert is_decodable(group, lost, lost) is (count <= parity)
    assert is_decodable(group, frozenset({0}), frozenset()) and not is_decodable(
        group, frozenset({0}), frozenset(range(size))
    )


@pytest.mark.parametrize(("still", "version"), [(None, 1), (1, 2)])
def test_a_header_is_read_as_it_was_written_also_by_later_versions(still: int | None, version: int) -> None:
    header = _header([[5000, 20], [100], [0], [70, 9000, 1]], still=still)
    data = encode_header(header)
    assert len(data) % 4096 == 0 and decode_header(data + b"blocks") == header
    assert header.name == parity_file(2, 5)
    golden = GOLDEN / f"parity-{version}.bin"
    if not golden.exists():
        golden.write_bytes(data)
    assert golden.read_bytes() == data


def test_still_shards_are_coded_apart() -> None:
    header = _header([[5000, 20], [100], [0], [70, 9000, 1]], still=1)
    moving, still = header.layers
    assert [[file.size_bytes for file in files] for files in moving.files] == [[5000], [100], [0], [70, 1]]
    assert [[file.size_bytes for file in files] for files in still.files] == [[20], [], [], [9000]]
    assert (moving.parity_file(1), still.parity_file(1)) == (header.name, parity_file(2, 5, STILL))
    assert header.size_bytes(still) == 2 * 8192 + 32, "two blocks and their digest, without a header"
    other = replace(
        header, attempt=replace(ATTEMPT, attempt="ef" * 8), files=(header.files[0], *header.files[1:])
    )
    assert other.layers[1] == still, "the same for each checkpoint with these shards"


def test_damaged_and_newer_headers_are_refused() -> None:
    header = _header([[5000, 20], [100], [0], [70, 9000, 1]])
    data = encode_header(header)
    for at in (0, 8, 60, 400, len(data) - 1):
        damaged = bytearray(data)
        damaged[at] ^= 0x01
        with pytest.raises(FormatError):
            decode_header(bytes(damaged))
    with pytest.raises(FormatError):
        decode_header(data[:4095])
    group = ParityGroup(members=(1, 2, 2, 4), parity=2)
    with pytest.raises(FormatError, match="no group"):
        decode_header(encode_header(replace(header, group=group)))
    files = (header.files[0], (), *header.files[1:])
    with pytest.raises(FormatError, match="fragments of its members"):
        decode_header(encode_header(replace(header, files=files)))
    files = ((*header.files[0], header.files[0][-1]), *header.files[1:])
    with pytest.raises(FormatError, match="lists a file twice"):
        decode_header(encode_header(replace(header, files=files)))
    still = _header([[5000, 20], [100], [0], [70, 9000, 1]], still=1)
    with pytest.raises(FormatError, match="no still shard"):
        decode_header(encode_header(replace(still, files=tuple(files[:1] for files in still.files))))
    body = jsontext.dumps_sealed({"format": 3}, what="", max_bytes=1000)
    newer = (len(body).to_bytes(8, "little") + body).ljust(4096)
    with pytest.raises(NewerFormat):
        decode_header(newer)
