"""Digests of bodies as they arrive, under the names that the two APIs know them by.

CRC-64/NVME is here because neither the standard library nor google_crc32c has it: parameters from the NVM
Express NVM Command Set Specification 1.0, section 5.2.1.3.4 (reflected polynomial 0x9A6C9329AC4BC9B5, all
ones before and after), computed on many lanes of a piece at once with numpy.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import google_crc32c
import numpy as np
from numpy.typing import NDArray

try:
    from awscrt.checksums import crc64nvme as _crc64nvme
except ImportError:
    _crc64nvme = None

_CRC64_POLYNOMIAL = 0x9A6C9329AC4BC9B5
_ONES = 0xFFFF_FFFF_FFFF_FFFF
_LANE_BYTES = 128  # of a piece of CRC-64 at least: below that, joining lanes costs more than the lanes save

_Words = NDArray[np.uint64]


class Digest(Protocol):
    def update(self, data: memoryview, /) -> None: ...

    def digest(self) -> bytes: ...


class Crc32:
    def __init__(self) -> None:
        self._crc = 0

    def update(self, data: memoryview) -> None:
        self._crc = zlib.crc32(data, self._crc)

    def digest(self) -> bytes:
        return self._crc.to_bytes(4, "big")


class Crc32c:
    def __init__(self) -> None:
        self._crc = 0

    def update(self, data: memoryview) -> None:
        # An array, because the library takes no memoryview.
        self._crc = google_crc32c.extend(self._crc, np.frombuffer(data, np.uint8)) if len(data) else self._crc

    def digest(self) -> bytes:
        return self._crc.to_bytes(4, "big")


class Crc64Nvme:
    """CRC-64/NVME by awscrt if that is installed; else by numpy, at some 100 MB/s from 64 KiB on."""

    def __init__(self) -> None:
        self._register = _ONES
        self._native = 0

    def update(self, data: memoryview) -> None:
        if _crc64nvme is not None:
            self._native = _crc64nvme(data, self._native)
            return
        if len(data) < 8:
            self._register = _crc64_bytes(self._register, data)
            return
        lanes = 1
        while lanes * 2 * _LANE_BYTES <= len(data):
            lanes *= 2
        words_per_lane = -(-len(data) // (8 * lanes))
        padded = np.zeros(8 * lanes * words_per_lane, np.uint8)
        # Zeros in front change nothing while the register is zero: what it holds goes into the first bytes.
        tail = padded[padded.size - len(data) :]
        tail[:] = np.frombuffer(data, np.uint8)
        tail[:8] ^= np.frombuffer(self._register.to_bytes(8, "little"), np.uint8)
        columns = np.ascontiguousarray(padded.view("<u8").reshape(lanes, words_per_lane).T)
        registers = np.zeros(lanes, np.uint64)
        for column in columns:
            registers = _map(_WORD, registers ^ column)
        self._register = _join(registers, words_per_lane)

    def digest(self) -> bytes:
        value = self._register ^ _ONES if _crc64nvme is None else self._native
        return value.to_bytes(8, "big")


def _crc64_bytes(register: int, data: memoryview) -> int:
    for byte in data:
        register = int(_BYTE[(register ^ byte) & 0xFF]) ^ (register >> 8)
    return register


def _byte_table() -> _Words:
    table = np.arange(256, dtype=np.uint64)
    for _ in range(8):
        odd = (table & np.uint64(1)).astype(bool)
        table = (table >> np.uint64(1)) ^ np.where(odd, np.uint64(_CRC64_POLYNOMIAL), np.uint64(0))
    return table


def _word_tables(byte: _Words) -> _Words:
    """Row i: what byte i of a word does to the register once all eight bytes have gone through."""
    rows = [byte]
    for _ in range(7):
        rows.append(byte[rows[-1] & np.uint64(0xFF)] ^ (rows[-1] >> np.uint64(8)))
    return np.stack(rows[::-1])


def _map(tables: _Words, words: _Words) -> _Words:
    """Return a linear map of 64 bits, given as a table for each of the eight bytes."""
    rows = words.astype("<u8").view(np.uint8).reshape(-1, 8).T.astype(np.intp)
    out: _Words = tables[0].take(rows[0])
    for table, row in zip(tables[1:], rows[1:], strict=True):
        out ^= table.take(row)
    return out


def _compose(outer: _Words, inner: _Words) -> _Words:
    return np.stack([_map(outer, row) for row in inner])


@functools.lru_cache(maxsize=128)  # 16 KiB each; bodies come in pieces of few sizes
def _past(num_words: int) -> _Words:
    """Return the effect of `num_words` zeros on the register."""
    if num_words == 1:
        return _WORD
    half = _past(num_words // 2)
    twice = _compose(half, half)
    return _compose(_WORD, twice) if num_words % 2 else twice


def _join(registers: _Words, words_per_lane: int) -> int:
    """Join the registers of all lanes: move the left one of each pair past the right one, repeatedly."""
    while len(registers) > 1:
        registers = _map(_past(words_per_lane), registers[0::2]) ^ registers[1::2]
        words_per_lane *= 2
    return int(registers[0])


_BYTE = _byte_table()
_WORD = _word_tables(_BYTE)

DIGESTS: Mapping[str, Callable[[], Digest]] = {
    "md5": lambda: hashlib.md5(usedforsecurity=False),
    "sha1": lambda: hashlib.sha1(usedforsecurity=False),
    "sha256": hashlib.sha256,
    "crc32": Crc32,
    "crc32c": Crc32c,
    "crc64nvme": Crc64Nvme,
}
S3_CHECKSUMS = ("crc32", "crc32c", "crc64nvme", "sha1", "sha256")  # x-amz-checksum-<name>
DIGEST_BYTES = {name: len(make().digest()) for name, make in DIGESTS.items()}


def joined_crc64(digests: Iterable[bytes], sizes: Iterable[int]) -> bytes:
    """Return the CRC-64 of bodies one after the other, from those of each and their lengths in bytes."""
    crc = 0  # ones before and after cancel out where two are joined
    for digest, size in zip(digests, sizes, strict=True):
        words, rest = divmod(size, 8)
        if words:
            crc = int(_map(_past(words), np.array([crc], np.uint64))[0])
        crc = _crc64_bytes(crc, memoryview(bytes(rest))) ^ int.from_bytes(digest, "big")
    return crc.to_bytes(8, "big")


def digest_of(name: str, *pieces: memoryview | bytes) -> bytes:
    state = DIGESTS[name]()
    for piece in pieces:
        state.update(memoryview(piece))
    return state.digest()


def to_text(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def from_text(text: str) -> bytes:
    """ValueError: the text is not base64."""
    return base64.b64decode(text, validate=True)
