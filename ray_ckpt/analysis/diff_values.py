"""Comparison of the plain values in two states, tensors aside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ray_ckpt.format.digest import digest
from ray_ckpt.format.short import ShortRepr
from ray_ckpt.format.tree import TensorRef, encode_tree

MAX_SEQUENCE = 16  # elements of a list that are compared one by one; a longer list is one value
MAX_VALUE_CHARS = 60  # characters of a displayed value
DIGEST_CHARS = 8  # characters of a digest, displayed where only digests distinguish two values


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDiff:
    """A differing plain value of rank 0's state, shortened for display; None where it does not exist."""

    name: str
    a: str | None
    b: str | None


_GONE = object()
_SHORT = ShortRepr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = MAX_VALUE_CHARS


def value_diffs(a: Any, b: Any, path: str) -> Iterator[ValueDiff]:
    """Yield the values that differ below `path`, tensors aside."""
    if isinstance(a, TensorRef) and isinstance(b, TensorRef):
        return
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys((*a, *b)):
            text = key if isinstance(key, str) else f"[{_SHORT.repr(key)}]"
            below = f"{path}.{text}" if path and isinstance(key, str) else f"{path}{text}"
            yield from value_diffs(a.get(key, _GONE), b.get(key, _GONE), below)
    elif type(a) is type(b) and isinstance(a, list | tuple) and _is_short(a) and _is_short(b):
        for index in range(max(len(a), len(b))):
            one, other = (side[index] if index < len(side) else _GONE for side in (a, b))
            yield from value_diffs(one, other, f"{path}[{index}]")
    elif not _is_same(a, b):
        text_a, text_b = _shown_apart(a, b)
        yield ValueDiff(name=path, a=text_a, b=text_b)


def _is_short(values: Sequence[Any]) -> bool:
    """Return whether elements are compared one by one; a long list, such as a random state, is one value."""
    return len(values) <= MAX_SEQUENCE or any(isinstance(v, dict | list | tuple) for v in values)


def _is_same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_is_same, a, b))
    return bool(a == b) or (a != a and b != b)


def _shown(value: Any) -> str | None:
    if value is _GONE:
        return None
    text = f"tensor {value.key}" if isinstance(value, TensorRef) else _SHORT.repr(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 3]}..."


def _shown_apart(a: Any, b: Any) -> tuple[str | None, str | None]:
    """Return texts of two values that differ, with the first difference if their short texts are equal."""
    text_a, text_b = _shown(a), _shown(b)
    if text_a != text_b:
        return text_a, text_b
    if not isinstance(a, list | tuple | str | bytes):
        return f"{text_a} (digest {_digest_of(a)})", f"{text_b} (digest {_digest_of(b)})"
    if len(a) != len(b):
        return f"{text_a} ({len(a)} long)", f"{text_b} ({len(b)} long)"
    at = next(k for k, pair in enumerate(zip(a, b, strict=True)) if not _is_same(*pair))
    part_a, part_b = _shown_apart(a[at], b[at])
    return f"{text_a} ([{at}]: {part_a})", f"{text_b} ([{at}]: {part_b})"


def _digest_of(value: Any) -> str:
    return digest(encode_tree(value))[:DIGEST_CHARS]
