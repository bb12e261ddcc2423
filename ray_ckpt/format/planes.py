"""Frames of a compressed file in which numbers are split into byte planes; FORMAT.md section 10.

The bytes of floating-point numbers differ in kind: sign and exponent repeat, the mantissa is noise. zstd
finds little in a mixture. The first bytes of all numbers make up one plane, the second ones another, and so
on; a plane that shrinks is compressed, the others are stored as they are. The idea is that of ZipNN (arXiv
2411.05239). Each frame is judged by a sample of its bytes, so a file may have frames of all kinds. Only zstd
finds blocks that occur twice in a frame, so both are compared if such blocks are likely.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

if TYPE_CHECKING:
    import zstandard

MAGIC = b"RCbp"  # first bytes of a frame; a frame of zstd has others
ELEMENT_SIZES = (2, 4, 8)  # bytes of a number; fp8 has a single plane, which is a frame of zstd
MAX_PLANE_RATIO = 0.9  # stored divided by raw; a plane above it is stored raw, which costs no core time
MIN_GAIN = 0.02  # of a frame's bytes, by which planes have to beat zstd alone
SAMPLE_BYTES = 16 << 10  # of each piece of a sample
NUM_SAMPLES = 3  # pieces of a frame: some 0.3 ms of a core for each 4 MiB
REPEAT_STEP = 1 << 10  # bytes; blocks that repeat are mostly at a multiple: 0.1 ms of a core for each 4 MiB
MAX_REPEATS = 0.25  # of the words at these places; above it zstd alone is tried on the whole frame

_HEADER = struct.Struct("<4sB3xI")  # magic, element size, low 32 bits of the xxh64 of the raw bytes
_SIZE = struct.Struct("<I")  # stored bytes of a plane

Bytes = npt.NDArray[np.uint8]


def plane_compressor() -> zstandard.ZstdCompressor:
    """Return a compressor for planes, which hardly searches for repeated bytes.

    Exponents are skewed numbers without order, for which Huffman's code is what helps. On a plane of normal
    fp32 it is 2.8 times as fast as level 1 of zstd, and stores 8 % less.
    """
    import zstandard

    parameters = zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST,
        min_match=7,
        hash_log=6,
        window_log=17,
        write_content_size=True,
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


class DamagedPlanes(ValueError):
    """A frame of planes that no writer makes, or with other bytes than were written."""


def is_planes(stored: memoryview) -> bool:
    """Return whether a stored frame begins as one of planes."""
    return bytes(stored[: len(MAGIC)]) == MAGIC


def encode_frame(
    raw: memoryview, compressor: zstandard.ZstdCompressor, alone: zstandard.ZstdCompressor
) -> bytes:
    """Return the stored frame of `raw`: in byte planes, or by zstd `alone` if that is about as good."""
    data = np.frombuffer(raw, np.uint8)
    element_size = _best_element_size(data, compressor, alone)
    if element_size == 1:
        return alone.compress(raw)
    planes = [_stored_plane(plane, compressor) for plane in _split(data, element_size)]
    checksum = xxhash.xxh64_intdigest(data.data) & 0xFFFFFFFF
    sizes = b"".join(_SIZE.pack(len(plane)) for plane in planes)
    rest = data[len(data) - len(data) % element_size :].tobytes()
    stored = b"".join((_HEADER.pack(MAGIC, element_size, checksum), sizes, *planes, rest))
    return min(alone.compress(raw), stored, key=len) if _may_repeat(data) else stored


def decode_frame(stored: memoryview, raw_nbytes: int, decompressor: zstandard.ZstdDecompressor) -> memoryview:
    """Return the raw bytes of a stored frame of planes, `raw_nbytes` of them.

    Raise DamagedPlanes, before memory is allocated for sizes that cannot be, and `zstandard.ZstdError`.
    """
    if stored.nbytes < _HEADER.size:
        raise DamagedPlanes(f"it has {stored.nbytes} bytes")
    _, element_size, checksum = _HEADER.unpack_from(stored)
    if element_size not in ELEMENT_SIZES:
        raise DamagedPlanes(f"its numbers have {element_size} bytes")
    count, num_rest = divmod(raw_nbytes, element_size)
    start = _HEADER.size + element_size * _SIZE.size
    if stored.nbytes < start:
        raise DamagedPlanes(f"it has {stored.nbytes} bytes")
    sizes = [_SIZE.unpack_from(stored, _HEADER.size + at * _SIZE.size)[0] for at in range(element_size)]
    if max(sizes) > count or start + sum(sizes) + num_rest != stored.nbytes:
        raise DamagedPlanes(f"its planes have {sizes} bytes, of {raw_nbytes} raw bytes")
    raw = np.empty(raw_nbytes, np.uint8)
    numbers = raw[: count * element_size].reshape(-1, element_size)
    ends = list(accumulate(sizes, initial=start))
    found = (_raw_plane(stored[at:end], count, decompressor) for at, end in pairwise(ends))
    if element_size == 2:  # twice as fast as two strided copies
        (low, high), pairs = found, raw[: count * 2].view("<u2")
        np.left_shift(high, 8, out=pairs, dtype="<u2")
        np.bitwise_or(pairs, low, out=pairs)
    else:
        for at, plane in enumerate(found):
            numbers[:, at] = plane
    raw[count * element_size :] = np.frombuffer(stored[ends[-1] :], np.uint8)
    if xxhash.xxh64_intdigest(raw.data) & 0xFFFFFFFF != checksum:
        raise DamagedPlanes("its checksum differs")
    return raw.data


def _best_element_size(
    data: Bytes, compressor: zstandard.ZstdCompressor, alone: zstandard.ZstdCompressor
) -> int:
    """Return the size of the numbers with the smallest stored sample; 1 if zstd alone is about as good."""
    sample = _sample(data)
    best, fewest = 1, len(alone.compress(sample.data)) - MIN_GAIN * len(sample)
    for element_size in ELEMENT_SIZES:
        if len(sample) >= element_size:
            stored = sum(len(_stored_plane(plane, compressor)) for plane in _split(sample, element_size))
            if stored < fewest:
                best, fewest = element_size, stored
    return best


def _may_repeat(data: Bytes) -> bool:
    """Return True if many of the words at multiples of REPEAT_STEP are equal, as in blocks that occur twice.

    The sample has pieces that are too short for such blocks, and planes too little of a window.
    """
    rows = data[: len(data) - len(data) % REPEAT_STEP].reshape(-1, REPEAT_STEP)
    words = np.sort(np.ascontiguousarray(rows[:, :8]).view(np.uint64), axis=None)
    return int(np.count_nonzero(words[1:] == words[:-1])) > MAX_REPEATS * len(words)


def _sample(data: Bytes) -> Bytes:
    """Return some pieces of the bytes, each from a multiple of the largest element size."""
    largest = ELEMENT_SIZES[-1]
    if len(data) <= NUM_SAMPLES * SAMPLE_BYTES:
        return data[: len(data) - len(data) % largest or len(data)]
    step = (len(data) - SAMPLE_BYTES) // NUM_SAMPLES
    starts = (at * step - at * step % largest for at in range(1, NUM_SAMPLES + 1))
    return np.concatenate([data[start : start + SAMPLE_BYTES] for start in starts])


def _split(data: Bytes, element_size: int) -> Iterator[Bytes]:
    """Yield the planes of the whole numbers in `data`."""
    numbers = data[: len(data) - len(data) % element_size].reshape(-1, element_size)
    for at in range(element_size):
        yield np.ascontiguousarray(numbers[:, at])


def _stored_plane(plane: Bytes, compressor: zstandard.ZstdCompressor) -> bytes | memoryview:
    """Return the stored bytes of a plane: a frame of zstd, or the plane itself if it does not shrink."""
    stored = compressor.compress(plane.data)
    return stored if len(stored) <= MAX_PLANE_RATIO * len(plane) else plane.data


def _raw_plane(stored: memoryview, count: int, decompressor: zstandard.ZstdDecompressor) -> Bytes:
    import zstandard

    if stored.nbytes == count:
        return np.frombuffer(stored, np.uint8)
    if zstandard.get_frame_parameters(stored).content_size != count:  # the size that is allocated
        raise DamagedPlanes(f"a plane of {count} bytes declares another size")
    return np.frombuffer(decompressor.decompress(stored, allow_extra_data=False), np.uint8)
