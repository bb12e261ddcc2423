"""Frames of byte planes: every byte comes back, numbers shrink, and damage gives an error, nothing else."""

from __future__ import annotations

import struct
import tracemalloc
from random import Random

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ray_ckpt.errors import CorruptionError
from ray_ckpt.format import planes, zstd
from ray_ckpt.format.planes import DamagedPlanes, decode_frame, encode_frame, plane_compressor
from ray_ckpt.format.zstd import FRAME_BYTES
from tests.format.test_zstd import read_all
from tests.support.examples import examples

GOLDEN = bytes.fromhex(
    "5243627004000000542b5526180000001800000018000000110000000004080c1014181c2024282c3034383c4044484c"
    "5054585c0105090d1115191d2125292d3135393d4145494d5155595d02060a0e12161a1e22262a2e32363a3e42464a4e"
    "52565a5e28b52ffd2018450000103f3f01000ac002"
)


def normal(count: int, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.02, count).astype(np.float32)


def bf16(values: np.ndarray) -> np.ndarray:
    return (values.view("<u4") >> 16).astype("<u2")


def compressed(raw: bytes) -> bytes:
    return b"".join(zstd.encode([raw], 1))


def stored(raw: bytes) -> bytes:
    """Return the frame of planes of `raw`."""
    alone = zstandard.ZstdCompressor(level=1)
    found = encode_frame(memoryview(raw), plane_compressor(), alone)
    assert planes.is_planes(memoryview(found))
    return found


def read(frame: bytes, raw_nbytes: int) -> bytes:
    return bytes(decode_frame(memoryview(frame), raw_nbytes, zstandard.ZstdDecompressor()))


@pytest.mark.parametrize(
    ("values", "most"),
    [
        (normal(1 << 20), 0.86),
        (normal(1 << 20) ** 2, 0.86),
        (bf16(normal(1 << 20)), 0.7),
        (normal(1 << 20).astype(np.float64), 0.55),
        (bf16(normal(1 << 20)).astype("<u4") << 16, 0.4),  # bf16 in fp32
        (np.arange(1 << 18, dtype="<i8"), 0.3),
    ],
    ids=["fp32", "squares", "bf16", "fp32 in fp64", "bf16 in fp32", "integers"],
)
@pytest.mark.parametrize("cut", [0, 1, 3])
def test_numbers_shrink_and_come_back(values: np.ndarray, most: float, cut: int) -> None:
    raw = values.tobytes()[: values.nbytes - cut]
    found = compressed(raw)
    assert len(found) <= most * len(raw) and planes.is_planes(memoryview(found))
    assert read_all(found) == raw
    with pytest.raises(zstandard.ZstdError):  # a stock decoder refuses it, and returns no other bytes
        zstandard.ZstdDecompressor().decompress(found)


def test_each_frame_is_judged_by_itself() -> None:
    """A file of several items, as a rank saves them: numbers, noise, narrower numbers, text."""
    noise = Random(5).randbytes(FRAME_BYTES)
    text = b"the same words again " * (FRAME_BYTES // 21)
    parts = [normal(FRAME_BYTES // 4).tobytes(), noise, bf16(normal(FRAME_BYTES // 2)).tobytes(), text]
    found = compressed(b"".join(parts))
    table = zstd.parse_table(found, len(found))
    frames = [memoryview(found)[table.starts[at] : table.starts[at + 1]] for at in range(4)]
    assert [planes.is_planes(frame) for frame in frames] == [True, False, True, False]
    assert frames[0].nbytes < 0.86 * FRAME_BYTES < FRAME_BYTES <= frames[1].nbytes
    assert frames[2].nbytes < 0.7 * FRAME_BYTES and frames[3].nbytes < 0.01 * FRAME_BYTES
    assert read_all(found) == b"".join(parts)


@pytest.mark.parametrize("nbytes", [256 << 10, 100 << 10])
def test_blocks_that_repeat_at_a_distance_are_stored_once(nbytes: int) -> None:
    raw = (normal(nbytes // 4).tobytes() * (FRAME_BYTES // nbytes + 1))[:FRAME_BYTES]
    found = compressed(raw)
    assert len(found) < 1.1 * nbytes and read_all(found) == raw


def test_zeros_beside_numbers_do_not_take_the_gain_of_planes() -> None:
    raw = normal(FRAME_BYTES // 8).tobytes() + bytes(FRAME_BYTES // 2)
    assert len(stored(raw)) < 0.86 * FRAME_BYTES / 2
    assert len(zstandard.ZstdCompressor(level=1).compress(raw)) > 0.9 * FRAME_BYTES / 2


@given(st.binary(max_size=3000), st.sampled_from([1, 7, 300]))
@examples(300)
def test_any_bytes_come_back(raw: bytes, times: int) -> None:
    assert read_all(compressed(raw * times)) == raw * times


def test_a_frame_that_is_written_is_read_for_ever() -> None:
    raw = bytes(at % 251 if at % 4 < 3 else 63 for at in range(96))
    assert read(GOLDEN, 96) == raw


def test_no_flipped_bit_gives_other_bytes() -> None:
    raw = normal(200).tobytes() + b"end"
    frame = stored(raw)
    silent = 0
    for bit in range(len(frame) * 8):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            assert read(bytes(damaged), len(raw)) == raw
            silent += 1
        except (DamagedPlanes, zstandard.ZstdError):
            pass
    assert silent <= 32 + 24 + 8, "the magic, which is_planes reads, the padding, and a reserved bit of zstd"
    for size in range(len(frame)):
        with pytest.raises((DamagedPlanes, zstandard.ZstdError)):
            read(frame[:size], len(raw))
    with pytest.raises(DamagedPlanes):
        read(frame + b"x", len(raw))


def _frame(raw: bytes, element_size: int, parts: list[bytes], sizes: list[int] | None = None) -> bytes:
    checksum = xxhash.xxh64_intdigest(raw) & 0xFFFFFFFF
    head = struct.pack("<4sB3xI", planes.MAGIC, element_size, checksum)
    return head + struct.pack(f"<{len(parts)}I", *(sizes or map(len, parts))) + b"".join(parts)


def test_a_frame_made_by_hand_is_read() -> None:
    raw = bytes(range(12))
    assert read(_frame(raw, 4, [raw[at::4] for at in range(4)]), 12) == raw
    packed = plane_compressor().compress(bytes(100))
    raw = b"".join(bytes([at, 0]) for at in range(100)) + b"z"
    assert read(_frame(raw, 2, [raw[:200:2], packed, b"z"][:2]) + b"z", 201) == raw


BIG = plane_compressor().compress(bytes(1 << 30 >> 4))
LIES = {
    "no element size": _frame(bytes(8), 0, []),
    "an odd element size": _frame(bytes(9), 3, [bytes(3)] * 3),
    "planes that are too long": _frame(bytes(8), 2, [bytes(5), bytes(3)]),
    "sizes beyond the frame": _frame(bytes(8), 2, [bytes(4)] * 2, [4, 1 << 31]),
    "a plane that is too short": _frame(bytes(8), 2, [bytes(4), bytes(3)]),
    "a plane that grows": _frame(bytes(1 << 20), 2, [bytes(1 << 19), BIG]),
    "a plane of another size": _frame(bytes(80), 2, [bytes(40), plane_compressor().compress(bytes(39))]),
    "another checksum": _frame(bytes(7), 2, [b"abcd", bytes(4)]),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_frame_that_lies_is_refused_before_it_takes_memory(lie: str) -> None:
    nbytes = 1 << 20 if lie == "a plane that grows" else 80 if lie == "a plane of another size" else 8
    tracemalloc.start()
    with pytest.raises((DamagedPlanes, zstandard.ZstdError)):
        read(LIES[lie], nbytes)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_damage_is_named_by_the_frame() -> None:
    raw = normal(FRAME_BYTES // 2).tobytes()
    found = bytearray(compressed(raw))
    table = zstd.parse_table(bytes(found), len(found))
    found[int(table.starts[1]) + 5000] ^= 1
    with pytest.raises(CorruptionError, match="Frame 1 of a compressed file is damaged"):
        read_all(bytes(found))
