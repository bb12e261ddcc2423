"""Arithmetic of a comparison: norms, the largest change, cosine, NaN and infinities of two arrays.

Numbers are compared in float64, differences of integers exactly.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

_NUMPY = {"F": "f", "C": "c", "I": "i", "U": "u"}  # numpy's kind by the first letter of a safetensors dtype
_F8 = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}


def numbers_of(bits: Array, dtype: str) -> Array:
    """Convert elements exactly to int64, uint64, float64 or complex128."""
    if dtype == "BOOL":
        return np.not_equal(bits, 0).astype(np.int64)
    if dtype == "BF16":  # the upper half of a float32
        upper: Array = bits.astype(np.uint32) << 16
        return upper.view(np.float32).astype(np.float64)
    if dtype in _F8:
        values: Array = _f8_values(dtype)[bits]
        return values
    found: Array = bits.view(f"{_NUMPY[dtype[0]]}{bits.itemsize}")
    if dtype == "U64":
        return found
    wide = {"f": np.float64, "c": np.complex128, "i": np.int64, "u": np.int64}[found.dtype.kind]
    return found.astype(wide)


@lru_cache
def _f8_values(dtype: str) -> npt.NDArray[np.float64]:
    """Return the value of each byte, by torch, which is imported only here."""
    import torch

    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values: npt.NDArray[np.float64] = every.view(getattr(torch, _F8[dtype])).to(torch.float64).numpy()
    return values


class ElementSums:
    """Statistics of the elements that were compared so far."""

    def __init__(self, dtype_a: str, dtype_b: str) -> None:
        self._dtypes = dtype_a, dtype_b
        self.num_different = 0
        self._norms = {"a": 0.0, "b": 0.0, "diff": 0.0, "both_a": 0.0, "both_b": 0.0}
        self._max_abs = self._dot = 0.0
        self._nan, self._inf = [0, 0], [0, 0]

    def add(self, bits_a: Array, bits_b: Array) -> None:
        """Add the next elements of both sides, given as unsigned integers of their size."""
        a, b = numbers_of(bits_a, self._dtypes[0]), numbers_of(bits_b, self._dtypes[1])
        if self._dtypes[0] == self._dtypes[1]:
            different = bits_a != bits_b
        else:
            different = (a != b) & ~(np.isnan(a) & np.isnan(b))
        self.num_different += int(np.count_nonzero(different))
        if a.dtype == b.dtype and a.dtype.kind in "iu":
            # as an unsigned integer the difference is exact, although the subtraction may wrap
            gap = np.where(a > b, a - b, b - a).view(np.uint64).astype(np.float64)
            self._add_both(a.astype(np.float64), b.astype(np.float64), gap)
            return
        kind = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
        a, b = a.astype(kind, copy=False), b.astype(kind, copy=False)
        finite_a, finite_b = self._count(0, a), self._count(1, b)
        both = finite_a & finite_b
        if both.all():
            self._add_both(a, b, _gap(a, b))
            return
        self._add_norm("a", a[finite_a])
        self._add_norm("b", b[finite_b])
        a, b = a[both], b[both]
        self._add_compared(a, b, _gap(a, b))

    def numbers(self) -> dict[str, Any]:
        """Return the fields of a TensorDiff."""
        norms = self._norms
        size, gap = norms["a"], norms["diff"]
        return {
            "num_different": self.num_different,
            "norm_a": size,
            "norm_b": norms["b"],
            "norm_diff": gap,
            "relative": gap / size if size else math.inf if gap else 0.0,
            "max_abs": self._max_abs,
            "cosine": self._cosine(),
            "nan_a": self._nan[0],
            "nan_b": self._nan[1],
            "inf_a": self._inf[0],
            "inf_b": self._inf[1],
        }

    def _cosine(self) -> float | None:
        a, b = self._norms["both_a"], self._norms["both_b"]
        if not (a and b and math.isfinite(self._dot)):
            return None
        found = self._dot / a / b
        return max(-1.0, min(1.0, found)) if math.isfinite(found) else None

    def _count(self, side: int, values: Array) -> npt.NDArray[np.bool_]:
        """Return a mask of the finite elements, and count the others."""
        finite: npt.NDArray[np.bool_] = np.isfinite(values)
        if not finite.all():
            nan = int(np.count_nonzero(np.isnan(values)))
            self._nan[side] += nan
            self._inf[side] += int(np.count_nonzero(~finite)) - nan
        return finite

    def _add_both(self, a: Array, b: Array, gap: Array) -> None:
        self._add_norm("a", a)
        self._add_norm("b", b)
        self._add_compared(a, b, gap)

    def _add_compared(self, a: Array, b: Array, gap: Array) -> None:
        if not gap.size:
            return
        self._add_norm("both_a", a)
        self._add_norm("both_b", b)
        self._add_norm("diff", gap)
        self._max_abs = max(self._max_abs, float(gap.max()))
        with np.errstate(over="ignore", invalid="ignore"):
            self._dot += float(np.dot(a.view(np.float64), b.view(np.float64)))

    def _add_norm(self, name: str, values: Array) -> None:
        self._norms[name] = math.hypot(self._norms[name], _norm(values.view(np.float64)))


def _gap(a: Array, b: Array) -> Array:
    with np.errstate(over="ignore"):
        found: Array = np.abs(b - a)
    return found


def _norm(values: npt.NDArray[np.float64]) -> float:
    """Return the L2 norm, even if the squares exceed the range of float64."""
    with np.errstate(over="ignore", under="ignore"):
        square = float(np.dot(values, values))
    if 1e-280 < square < math.inf or not values.size:
        return math.sqrt(square)
    largest = float(np.abs(values).max())
    if not largest or math.isinf(largest):
        return largest
    scaled = values / largest
    return largest * math.sqrt(float(np.dot(scaled, scaled)))
