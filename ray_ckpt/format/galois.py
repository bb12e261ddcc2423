"""Sums of a stripe's members in GF(2^8), as in RAID-6: P is the sum, Q the sum with powers of 2 as weights.

The field is that of x^8 + x^4 + x^3 + x^2 + 1 with the generator 2. Q is computed by Horner's rule, so that
the arrival of a member costs one multiplication by 2 of the sum so far, on blocks that stay in the CPU's
cache. With P and Q any two members of a stripe can be computed from the others; see H. P. Anvin,
"The mathematics of RAID-6".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

Bytes: TypeAlias = npt.NDArray[np.uint8]

_POLYNOMIAL = 0x1D  # without x^8
_BLOCK_BYTES = 128 << 10  # a block of the sum, its mask and a block of a member fit into a 512 KiB cache


def _powers() -> tuple[int, ...]:
    found = [1]
    for _ in range(254):
        found.append(found[-1] << 1 ^ (0x100 | _POLYNOMIAL if found[-1] & 0x80 else 0))
    return tuple(found)


_POWERS = _powers()
_LOG = {value: at for at, value in enumerate(_POWERS)}


class StripeSum:
    """A sum over the members of a stripe, P for `index` 0 and Q for `index` 1, in `nbytes` bytes.

    Members are added from the one with the highest exponent down to exponent 0: `begin` before each member,
    also before one that is all zeros or is left out, then `add` with its bytes at rising positions.
    """

    def __init__(self, nbytes: int, index: int) -> None:
        self._sum = np.zeros(nbytes, np.uint8)
        self._mask = np.empty(min(nbytes, _BLOCK_BYTES), np.uint8)
        self._is_weighted = index == 1
        self._doubled = nbytes  # bytes of the sum that are multiplied for the present member

    def begin(self) -> None:
        """Begin the next member."""
        if self._is_weighted:
            self._double(self._sum.size)
            self._doubled = 0

    def add(self, at: int, data: Buffer) -> None:
        """Add bytes of the present member at position `at`; no byte of a member is added twice."""
        piece = np.frombuffer(memoryview(data), np.uint8)
        for start in range(0, piece.size, _BLOCK_BYTES):
            block = piece[start : start + _BLOCK_BYTES]
            begin, end = at + start, at + start + block.size
            self._double(end)
            np.bitwise_xor(self._sum[begin:end], block, out=self._sum[begin:end])

    def finish(self) -> Bytes:
        """Return the sum, after the last member."""
        self._double(self._sum.size)
        return self._sum

    def _double(self, end: int) -> None:
        """Multiply the sum by 2 up to position `end`."""
        while self._doubled < end:
            block = self._sum[self._doubled : min(end, self._doubled + _BLOCK_BYTES)]
            mask = self._mask[: block.size]
            np.less(block.view(np.int8), 0, out=mask.view(np.bool_))  # 1 where the high bit is set
            np.multiply(mask, _POLYNOMIAL, out=mask)
            np.add(block, block, out=block)
            np.bitwise_xor(block, mask, out=block)
            self._doubled += block.size


def solve(lost: Sequence[int], sums: Mapping[int, Bytes]) -> dict[int, Bytes]:
    """Return the bytes of lost members, by their exponents.

    `sums` has, by index, the XOR of a stored sum and of the same sum over the members that are left; the
    arrays are overwritten. As many sums as lost members are needed. ValueError if there are fewer.
    """
    if len(sums) < len(lost):
        raise ValueError(f"{len(lost)} lost members cannot be computed from {len(sums)} sums")
    if len(lost) == 1:
        (exponent,) = lost
        return {exponent: sums[0] if 0 in sums else _times(sums[1], -exponent)}
    first, second = lost
    # P = a + b and Q = 2^i a + 2^j b, so P + 2^-j Q = (1 + 2^(i-j)) a
    scaled = _times(sums[1], -second)
    np.bitwise_xor(scaled, sums[0], out=scaled)
    found = _times(scaled, -_LOG[1 ^ _POWERS[(first - second) % 255]])
    return {first: found, second: np.bitwise_xor(sums[0], found, out=sums[0])}


def _times(data: Bytes, exponent: int) -> Bytes:
    """Multiply `data` by 2 to the power of `exponent`, which may be negative, in place; return it."""
    table = bytes([0, *(_POWERS[(_LOG[value] + exponent) % 255] for value in range(1, 256))])
    for start in range(0, data.size, _BLOCK_BYTES):
        block = data[start : start + _BLOCK_BYTES]
        block[:] = np.frombuffer(block.tobytes().translate(table), np.uint8)
    return data
