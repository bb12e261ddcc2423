"""Compressed files: any range as it was, any zstd reads them, and damage never gets further than an error."""

from __future__ import annotations

import io
import shutil
import struct
import subprocess
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from random import Random

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import Buffer

from ray_ckpt.errors import CorruptionError, FormatError
from ray_ckpt.format import zstd
from ray_ckpt.format.zstd import FRAME_BYTES, Blocks, SeekableReader, encode
from tests.support.examples import examples

ENTRY_BYTES = 8
FOOTER_BYTES = 9
HEADER_BYTES = 8


def sample_bytes(size_bytes: int) -> bytes:
    """Quick to compress, and different at every multiple of 1 KiB."""
    rows = np.empty((size_bytes // 1024 + 1, 128), np.uint64)
    rows[:] = np.random.default_rng(0).integers(0, 2**64, 128, np.uint64)
    rows[:, 0] = np.arange(len(rows))
    return rows.tobytes()[:size_bytes]


RAW = sample_bytes(3 * FRAME_BYTES + 5000)
STORED = b"".join(encode([RAW], 1))
SMALL = np.random.default_rng(1).integers(0, 32, 500, np.uint8).tobytes()  # of one frame


class Store:
    """A stored file, read in blocks of a size; a block is overwritten when the next one is requested."""

    def __init__(self, data: bytes, block_bytes: int = 1_000_000) -> None:
        self.data = data
        self.block_bytes = block_bytes
        self.requested: list[list[tuple[int, int]]] = []
        self.closed = 0

    def read(self, ranges: Sequence[tuple[int, int]]) -> Blocks:
        assert ranges and all(nbytes > 0 for _, nbytes in ranges)  # object stores refuse others
        self.requested.append(list(ranges))
        wanted = b"".join(self.data[offset : offset + nbytes] for offset, nbytes in ranges)
        try:
            for start in range(0, len(wanted), self.block_bytes):
                block = bytearray(wanted[start : start + self.block_bytes])
                yield memoryview(block)
                block[:] = bytes(len(block))
        finally:
            self.closed += 1

    def reader(self) -> SeekableReader:
        return SeekableReader(self.read, len(self.data))


def gather(blocks: Iterator[memoryview]) -> bytes:
    return b"".join(map(bytes, blocks))


def read_all(data: bytes) -> bytes:
    reader = Store(data).reader()
    return gather(reader.read([(0, reader.raw_size)]))


def cut(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = sorted({0, len(data), *(place % (len(data) + 1) for place in cuts)})
    return [data[start:end] for start, end in pairwise(places)]


def footer(num_frames: int, descriptor: int = 0, magic: int = 0x8F92EAB1) -> bytes:
    return struct.pack("<IBI", num_frames, descriptor, magic)


def table(
    *entries: tuple[int, int], descriptor: int = 0, magic: int = 0x8F92EAB1, skippable: int = 0x184D2A5E
) -> bytes:
    body = b"".join(struct.pack("<II", *entry) for entry in entries)
    body += footer(len(entries), descriptor, magic)
    return struct.pack("<II", skippable, len(body)) + body


def frame_of(raw: bytes, *, checksum: bool = True, says_size: bool = True) -> bytes:
    return zstandard.ZstdCompressor(level=1, write_checksum=checksum, write_content_size=says_size).compress(
        raw
    )


# -- what is written ---------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [1, 3])
@pytest.mark.parametrize("size", [0, 1, 999, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, len(RAW)])
def test_files_come_back_and_do_not_depend_on_how_they_are_cut(size: int, level: int) -> None:
    raw = RAW[:size]
    stored = b"".join(encode([raw], level))
    assert read_all(stored) == raw
    for block_bytes in (700_001, FRAME_BYTES):
        blocks = (raw[start : start + block_bytes] for start in range(0, size, block_bytes))
        assert b"".join(encode(blocks, level)) == stored


@given(st.binary(max_size=2000), st.lists(st.integers(0, 2000), max_size=8), st.integers(1, 300))
@examples(200)
def test_small_files_come_back_from_blocks_of_any_size(raw: bytes, cuts: list[int], block_bytes: int) -> None:
    stored = b"".join(encode(cut(raw, cuts), 1))
    store = Store(stored, block_bytes)
    assert gather(store.reader().read([(0, len(raw))])) == raw


def test_blocks_may_be_of_any_type_and_empty() -> None:
    numbers = np.arange(1000, dtype=np.float32)
    blocks: list[Buffer] = [numbers.data, np.empty(0, np.float32).data, b"", bytearray(b"end")]
    assert read_all(b"".join(encode(blocks, 1))) == numbers.tobytes() + b"end"


@pytest.mark.parametrize("raw", [b"", SMALL, RAW])
def test_the_library_reads_them_as_one_stream(raw: bytes) -> None:
    stored = io.BytesIO(b"".join(encode([raw], 1)))
    assert zstandard.ZstdDecompressor().stream_reader(stored, read_across_frames=True).read() == raw


@pytest.mark.skipif(shutil.which("zstd") is None, reason="no zstd command here")
@pytest.mark.parametrize("raw", [b"", SMALL, RAW])
def test_the_command_line_tool_reads_them(raw: bytes) -> None:
    stored = b"".join(encode([raw], 1))
    assert subprocess.run(["zstd", "-dc"], input=stored, capture_output=True, check=True).stdout == raw


def test_the_layout_is_that_of_the_published_format() -> None:
    stored = b"".join(encode([RAW], 1))
    num_frames = struct.unpack("<I", stored[-FOOTER_BYTES:-5])[0]
    entries = list(
        struct.iter_unpack("<II", stored[-FOOTER_BYTES - num_frames * ENTRY_BYTES : -FOOTER_BYTES])
    )
    assert [raw for _, raw in entries] == [FRAME_BYTES] * 3 + [5000]
    assert stored.endswith(table(*entries))
    ends = list(accumulate(nbytes for nbytes, _ in entries))
    for start, end, (_, raw_nbytes) in zip([0, *ends], ends, entries, strict=False):
        parameters = zstandard.get_frame_parameters(stored[start:end])
        assert (parameters.content_size, parameters.has_checksum, parameters.dict_id) == (raw_nbytes, True, 0)
    assert ends[-1] + len(table(*entries)) == len(stored)


@pytest.mark.parametrize("size", [0, 1, 500, 130_000, 3 * FRAME_BYTES + 1])
@pytest.mark.parametrize("level", [-1, 1, 3, 9])
def test_bytes_without_order_grow_by_no_more_than_the_bound(size: int, level: int) -> None:
    raw = Random(size).randbytes(size)
    stored = b"".join(encode([raw], level))
    assert len(raw) < len(stored) <= zstd.max_encoded_bytes(size)
    assert read_all(stored) == raw


def test_a_file_with_more_frames_than_a_reader_takes_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zstd, "MAX_FRAMES", 1)
    assert list(encode([RAW[:FRAME_BYTES]], 1))
    with pytest.raises(FormatError, match="cannot be compressed"):
        list(encode([RAW[: FRAME_BYTES + 1]], 1))


def test_an_error_of_the_blocks_comes_through() -> None:
    def blocks() -> Iterator[bytes]:
        yield SMALL
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(encode(blocks(), 1))


# -- what pays ---------------------------------------------------------------------------------------


def _normal() -> np.ndarray:
    return np.random.default_rng(2).normal(0, 0.02, 1 << 20).astype(np.float32)


@pytest.mark.parametrize(
    ("make", "worth"),
    [
        (lambda: _normal().tobytes(), True),
        (lambda: Random(3).randbytes(1 << 20), False),
        (lambda: (_normal().view(np.uint32) >> 16).astype(np.uint16).tobytes(), True),  # cut to bf16
        (lambda: bytes(1 << 20), True),
    ],
    ids=["fp32", "random", "bf16", "zeros"],
)
def test_what_pays_is_compressed(make: Callable[[], bytes], worth: bool) -> None:
    assert zstd.pays(zstd.estimate([make()], 1)) is worth


def test_nothing_does_not_pay() -> None:
    assert zstd.estimate([], 1) == 1.0
    assert not zstd.pays(zstd.estimate([b""], 1))


@given(st.integers(0, 1 << 45))
def test_samples_are_spread_over_the_file(size: int) -> None:
    ranges = zstd.sample_ranges(size)
    assert ranges == zstd.sample_ranges(size)
    assert sum(nbytes for _, nbytes in ranges) == min(size, zstd.NUM_SAMPLES * zstd.SAMPLE_BYTES)
    for number, (offset, nbytes) in enumerate(ranges):
        part = size // len(ranges)
        assert number * part <= offset and offset + nbytes <= (number + 1) * part + size % len(ranges)


def test_a_header_is_not_taken_for_a_part_of_the_file() -> None:
    assert zstd.sample_ranges(1 << 30)[0][0] > 64 << 20


def test_samples_meet_tensors_that_alternate() -> None:
    """Two tensors of 4 MiB in turn, 32 pairs: parts of equal length alone would meet one kind only."""
    kinds = {offset // (4 << 20) % 2 for offset, _ in zstd.sample_ranges(256 << 20)}
    assert kinds == {0, 1}


# -- ranges ------------------------------------------------------------------------------------------

near_borders = st.sampled_from([0, FRAME_BYTES, 2 * FRAME_BYTES, 3 * FRAME_BYTES, len(RAW)]).flatmap(
    lambda border: st.integers(max(0, border - 3), min(len(RAW), border + 3))
)
rising = st.lists(st.one_of(near_borders, st.integers(0, len(RAW))), min_size=2, max_size=12).map(sorted)


@given(rising, st.booleans(), st.sampled_from([4096, 100_003, 10 << 20]))
@examples(60)
def test_ranges_are_slices(places: list[int], gaps: bool, block_bytes: int) -> None:
    ranges = [(start, end - start) for start, end in pairwise(places)][:: 2 if gaps else 1]
    store = Store(STORED, block_bytes)
    assert gather(store.reader().read(ranges)) == b"".join(RAW[o : o + n] for o, n in ranges)
    assert store.closed == len(store.requested)


def test_frames_are_read_once_and_neighbours_together() -> None:
    store = Store(STORED)
    ranges = [(5, 10), (100, FRAME_BYTES), (FRAME_BYTES + 200, 1), (3 * FRAME_BYTES + 7, 20), (len(RAW), 0)]
    assert gather(store.reader().read(ranges)) == b"".join(RAW[o : o + n] for o, n in ranges)
    starts = zstd.parse_table(STORED, len(STORED)).starts
    assert store.requested[1:] == [[(0, starts[2]), (starts[3], starts[4] - starts[3])]]


def test_ranges_in_neighbouring_frames_are_requested_together() -> None:
    store = Store(STORED)
    ranges = [(0, 10), (FRAME_BYTES, 10)]
    assert gather(store.reader().read(ranges)) == RAW[:10] + RAW[FRAME_BYTES : FRAME_BYTES + 10]
    assert len(store.requested[1]) == 1


def test_empty_ranges_request_nothing() -> None:
    store = Store(STORED)
    reader = store.reader()
    assert list(reader.read([])) == list(reader.read([(0, 0), (7, 0), (len(RAW), 0)])) == []
    assert len(store.requested) == 1


def test_views_stay_as_they_are_while_more_is_read() -> None:
    views = list(Store(STORED).reader().read([(0, len(RAW))]))
    assert [view.nbytes for view in views] == [FRAME_BYTES] * 3 + [5000]
    assert b"".join(views) == RAW


@pytest.mark.parametrize("ranges", [[(10, 5), (14, 1)], [(10, 5), (0, 1)], [(-1, 1)], [(5, -1)]])
def test_ranges_that_do_not_rise_are_a_mistake(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="must rise"):
        list(Store(STORED).reader().read(ranges))


@pytest.mark.parametrize("wanted", [(len(RAW), 1), (0, len(RAW) + 1), (1 << 50, 1)])
def test_a_range_behind_the_end_is_an_early_end(wanted: tuple[int, int]) -> None:
    with pytest.raises(EOFError, match=f"ends at byte {len(RAW)}"):
        next(Store(STORED).reader().read([wanted]))


def test_a_reader_that_stops_early_closes_what_it_reads_from() -> None:
    store = Store(STORED, 1000)
    blocks = store.reader().read([(0, len(RAW))])
    next(blocks)
    assert store.closed == 1  # the table
    blocks.close()
    assert store.closed == 2


def test_threads_share_a_reader() -> None:
    reader = Store(STORED).reader()

    def check(seed: int) -> bool:
        places = sorted(Random(seed).choices(range(len(RAW)), k=4))
        ranges = [(places[0], places[1] - places[0]), (places[2], places[3] - places[2])]
        return gather(reader.read(ranges)) == b"".join(RAW[o : o + n] for o, n in ranges)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(check, range(24)))


def test_a_table_that_the_first_read_does_not_hold_is_read_whole() -> None:
    frame = frame_of(bytes(FRAME_BYTES))
    num_frames = zstd.TAIL_BYTES // ENTRY_BYTES
    entries = table(*[(len(frame), FRAME_BYTES)] * num_frames)
    store = Store(frame * num_frames + entries)
    reader = store.reader()
    assert [nbytes for [(_, nbytes)] in store.requested] == [zstd.TAIL_BYTES, len(entries)]
    assert reader.raw_size == num_frames * FRAME_BYTES
    assert gather(reader.read([(reader.raw_size - 10, 10)])) == bytes(10)


def test_a_whole_file_is_decoded_in_a_stream() -> None:
    seek = zstd.parse_table(STORED, len(STORED))
    start, nbytes = seek.stored(range(seek.num_frames))
    blocks = cut(STORED[start : start + nbytes], range(0, nbytes, 50_001))
    assert gather(zstd.decode(blocks, seek, range(seek.num_frames))) == RAW


# -- damage ------------------------------------------------------------------------------------------


def test_a_file_cut_short_anywhere_is_refused() -> None:
    stored = b"".join(encode([SMALL], 1))
    for size in range(len(stored)):
        with pytest.raises(FormatError):
            read_all(stored[:size])
    for size in range(len(STORED) - 100, len(STORED)):
        with pytest.raises(FormatError):
            read_all(STORED[:size])


def test_no_flipped_bit_gives_other_bytes() -> None:
    """A few bits of a frame mean nothing to zstd; all others, and all of the table, are found."""
    stored = b"".join(encode([SMALL], 1))
    silent = []
    for bit in range(len(stored) * 8):
        damaged = bytearray(stored)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            assert read_all(bytes(damaged)) == SMALL
            silent.append(bit)
        except CorruptionError:
            pass
    assert len(silent) <= 8 and max(silent, default=0) < 8 * (len(stored) - len(table((0, 0))))


def test_each_flipped_bit_of_the_table_of_several_frames_is_found() -> None:
    end = len(STORED) - HEADER_BYTES - 4 * ENTRY_BYTES - FOOTER_BYTES
    last_raw_size = range(len(STORED) - FOOTER_BYTES - 4, len(STORED) - FOOTER_BYTES)
    for place in range(end, len(STORED)):
        for bit in range(8):
            damaged = bytearray(STORED)
            damaged[place] ^= 1 << bit
            if place in last_raw_size:  # only the frame and the manifest show it
                with pytest.raises(CorruptionError):
                    _last_byte(bytes(damaged))
            else:
                with pytest.raises(FormatError):
                    zstd.parse_table(bytes(damaged), len(damaged))


def _last_byte(stored: bytes) -> bytes:
    reader = Store(stored).reader()
    return gather(reader.read([(reader.raw_size - 1, 1)]))


LIES = {
    "another magic": (table((9, 1), magic=0x8F92EAB0), "seek table"),
    "another skippable frame": (table((9, 1), skippable=0x184D2A50), "does not begin"),
    "checksums in the table": (table((9, 1), descriptor=0x80), "descriptor 128"),
    "reserved bits": (table((9, 1), descriptor=0x04), "descriptor 4"),
    "a frame too large": (table((9, FRAME_BYTES + 1)), "do not hold"),
    "a frame of 4 GiB": (table((9, 2**32 - 1)), "do not hold"),
    "a frame of nothing": (table((9, 0)), "do not hold"),
    "a short frame in the middle": (table((4, FRAME_BYTES - 1), (5, 1)), "do not hold"),
    "a frame that takes no byte": (table((0, FRAME_BYTES), (9, 1)), "of no byte"),
    "a frame that takes too many": (table((zstd.MAX_STORED_BYTES + 1, 1)), "of no byte"),
    "too few stored bytes": (table((8, 1)), "end at byte 8"),
    "too many stored bytes": (table((10, 1)), "end at byte 10"),
    "no frames": (table(), "end at byte 0"),
    "more frames than the file has bytes": (table((9, 1))[:-9] + footer(5), "table of 5 frames"),
    "more frames than there may be": (table()[:-9] + footer(2**32 - 1), "table of 4294967295 frames"),
}


@pytest.mark.parametrize(("end", "message"), LIES.values(), ids=LIES)
def test_tables_that_lie_are_refused(end: bytes, message: str) -> None:
    stored = b"any bytes" + end
    with pytest.raises(FormatError, match=message):
        zstd.parse_table(stored, len(stored))


def test_the_number_of_frames_is_bounded_whatever_the_size() -> None:
    with pytest.raises(FormatError, match="seek table of"):
        zstd.table_nbytes(footer(zstd.MAX_FRAMES + 1), 1 << 60)
    assert zstd.table_nbytes(footer(zstd.MAX_FRAMES), 1 << 60) < 9 << 20


def test_part_of_a_table_is_refused() -> None:
    with pytest.raises(FormatError, match="of a seek table"):
        zstd.parse_table(STORED[-20:], len(STORED))


def _declaring(frame: bytes, size: int) -> bytes:
    """Return a frame whose header declares another size; both take four bytes there."""
    at = zstandard.frame_header_size(frame) - 4
    return frame[:at] + struct.pack("<I", size) + frame[at + 4 :]


RAW_BYTES = 1 << 20  # size by the table, for the frames below
GOOD = frame_of(RAW[:RAW_BYTES])
WIDE = struct.pack("<IBBI", zstandard.MAGIC_NUMBER, 0x84, 17 << 3, RAW_BYTES)  # RFC 8878, 3.1.1.1
BAD_FRAMES = {
    "declares little and is a bomb": _declaring(frame_of(bytes(64 << 20)), RAW_BYTES),
    "declares that it is a bomb": frame_of(bytes(64 << 20)),
    "declares 4 GiB": _declaring(GOOD, 2**32 - 1),
    "declares more than it has": _declaring(frame_of(RAW[: RAW_BYTES - 1]), RAW_BYTES),
    "has another size": frame_of(RAW[: RAW_BYTES - 1]),
    "does not declare its size": frame_of(RAW[:RAW_BYTES], says_size=False),
    "has no checksum": frame_of(RAW[:RAW_BYTES], checksum=False),
    "is to be skipped": struct.pack("<II", 0x184D2A5E, RAW_BYTES) + bytes(RAW_BYTES),
    "is two": GOOD + GOOD,
    "has something behind it": GOOD + b"x",
    "is cut short": GOOD[:-1],
    "is cut after its header": GOOD[: zstandard.frame_header_size(GOOD)],
    "wants a window of 128 MiB and is cut short": WIDE,
    "is not one": b"x" * 100,
    "is too short for one": b"x",
}


@pytest.mark.parametrize("frame", BAD_FRAMES.values(), ids=BAD_FRAMES)
def test_bad_frames_are_refused_in_the_memory_of_a_good_one(frame: bytes) -> None:
    stored = frame + table((len(frame), RAW_BYTES))
    reader = Store(stored).reader()
    assert reader.raw_size == RAW_BYTES
    tracemalloc.start()
    try:
        with pytest.raises(CorruptionError, match=r"^Frame 0 .* is damaged: ") as caught:
            gather(reader.read([(0, 1)]))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.fields == {"frame": 0, "end": zstd.FRAME_BYTES}
    assert peak_bytes < 3 * len(frame) + RAW_BYTES + (1 << 20)


def test_a_window_larger_than_a_frame_is_refused() -> None:
    with pytest.raises(CorruptionError, match="too much memory"):
        _last_byte(WIDE + table((len(WIDE), RAW_BYTES)))


def test_damage_is_found_in_the_frames_that_are_read() -> None:
    starts = zstd.parse_table(STORED, len(STORED)).starts
    damaged = bytearray(STORED)
    damaged[int(starts[1]) + 1000] ^= 1
    reader = Store(bytes(damaged)).reader()
    assert gather(reader.read([(0, FRAME_BYTES)])) == RAW[:FRAME_BYTES]
    assert gather(reader.read([(2 * FRAME_BYTES, 100)])) == RAW[2 * FRAME_BYTES : 2 * FRAME_BYTES + 100]
    blocks = reader.read([(0, len(RAW))])
    assert bytes(next(blocks)) == RAW[:FRAME_BYTES]
    with pytest.raises(CorruptionError, match="Frame 1 "):
        next(blocks)


@pytest.mark.parametrize(
    ("change", "message"),
    [(-1, "it has [1-9].* of .* bytes"), (1, "more bytes than"), (-(10**9), "it has 1 of .* bytes")],
    ids=["less", "more", "hardly any"],
)
def test_a_store_that_gives_another_number_of_bytes_is_found(change: int, message: str) -> None:
    store, wrong = Store(STORED), False

    def read(ranges: Sequence[tuple[int, int]]) -> Blocks:
        (offset, nbytes), *_ = ranges
        return store.read([(offset, max(1, nbytes + change))] if wrong else ranges)

    reader = SeekableReader(read, len(STORED))
    wrong = True
    with pytest.raises(CorruptionError, match=message):
        gather(reader.read([(0, FRAME_BYTES)]))
    store.data += b"x"
    with pytest.raises(CorruptionError):
        SeekableReader(read, len(STORED))


def test_an_error_of_the_store_comes_through() -> None:
    store = Store(STORED)
    reader = store.reader()
    store.data = STORED[:1]

    def fails(ranges: Sequence[tuple[int, int]]) -> Blocks:
        raise ConnectionResetError("gone")
        yield

    with pytest.raises(ConnectionResetError):
        SeekableReader(fails, len(STORED))
    with pytest.raises(CorruptionError):
        gather(reader.read([(0, 1)]))


@given(st.binary(max_size=400))
@examples(300)
def test_nonsense_is_never_more_than_an_error(data: bytes) -> None:
    for stored in (data, data + table((len(data), 300))):
        with pytest.raises(CorruptionError):
            read_all(stored)
