"""Arrays and scalars of numpy in a pickle, of plain numbers in little-endian order."""

from __future__ import annotations

import re
from math import prod
from typing import Any

import numpy as np

from ray_ckpt.interop.importers.unpickler import Foreign, kind_of

_ROOM = r"numpy\.(_core|core)\.multiarray\."  # `core` before numpy 2
SCALAR, ARRAY = re.compile(_ROOM + "scalar"), re.compile(_ROOM + "_reconstruct")
_PLAIN = re.compile(r"[biufc]\d{1,2}")


def numpy_value(value: Foreign) -> Any:
    """Return the array or the scalar that numpy would rebuild; None for other kinds and dtypes.

    Raise ValueError or TypeError if it is damaged.
    """
    if SCALAR.fullmatch(value.kind):
        shape, is_fortran, (dtype, data) = (), False, value.args
    elif ARRAY.fullmatch(value.kind):
        _, shape, dtype, is_fortran, data = value.state
    else:
        return None
    found = _dtype(dtype)
    if found is None:
        return None
    raw = _bytes(data)
    if type(shape) is not tuple or prod(shape) * found.itemsize != len(raw):
        raise ValueError("an array does not have the bytes of its shape")
    array = np.frombuffer(raw, found).reshape(shape, order="F" if is_fortran else "C")
    return array[()] if SCALAR.fullmatch(value.kind) else array.copy()


def _dtype(value: Any) -> np.dtype[Any] | None:
    code, order = value.args[0], value.state[1]
    is_plain = kind_of(value) == "numpy.dtype" and _PLAIN.fullmatch(code) and order in ("<", "|")
    return np.dtype(order + code) if is_plain else None


def _bytes(value: Any) -> bytes:
    """Return bytes, which old protocols write as text."""
    if kind_of(value) == "builtins.bytes":  # none
        return b""
    if kind_of(value) == "_codecs.encode":
        return str(value.args[0]).encode("latin-1")
    if type(value) is not bytes:
        raise TypeError("an array has no bytes")
    return value
