"""JSON of the format: canonical writing, and typed reading of fields.

One spelling per value: sorted keys, UTF-8, no NaN literals, no repeated keys, a newline at the end. For
malformed input only FormatError is raised, with the names of the document and the field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Mapping
from functools import cache
from math import isfinite
from typing import Any, TypeVar

import numpy as np

from ray_ckpt.errors import FormatError, NewerFormat
from ray_ckpt.format.digest import digest

FORMAT_VERSION = 1
MAX_INT = 2**63 - 1  # the limit of an int64 column; larger sizes do not occur
MAX_VALUES_BYTES = 400 * 2**20  # memory for the values of one document: ten million numbers

_DIGEST = re.compile(r"[0-9a-f]{32}\Z")
_VALUE_BYTES = {b"{": 240, b"[": 96, b":": 48, b",": 40, b'"': 28}
"""Bytes of memory in CPython for the value that a character of JSON begins: a dict of one item, a list, an
item of a dict, a number with the slot for it, half a string."""
_BLOCK_BYTES = 1 << 20
_NON_FINITE = ("nan", "inf", "-inf")
Pairs = list[tuple[str, Any]]
T = TypeVar("T")


def dumps(document: object, *, what: str, max_bytes: int, indent: int | None = None) -> bytes:
    """Return `document` as UTF-8 JSON with sorted keys and a final newline. Raise FormatError."""
    try:
        data = _encoder(indent).encode(document).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"{what} cannot be written as JSON: {error}.") from error
    check_size(data, what=what, max_bytes=max_bytes)
    return data


@cache
def _encoder(indent: int | None) -> json.JSONEncoder:
    return json.JSONEncoder(ensure_ascii=False, allow_nan=False, sort_keys=True, indent=indent)


def loads(
    data: bytes,
    *,
    what: str,
    max_bytes: int,
    hook: Callable[[Pairs], Any] | None = None,
    final_newline: bool = True,
) -> Any:
    """Return the value of a JSON text; `hook` builds objects from (key, value) pairs. Raise FormatError."""
    check_size(data, what=what, max_bytes=max_bytes)
    if final_newline and not data.endswith(b"\n"):
        raise FormatError(f"{what} is cut short: it does not end in a newline.")
    check_values(data, what=what)
    try:
        return json.loads(data.decode(), object_pairs_hook=hook or unique_keys, parse_constant=_refuse)
    except NewerFormat as error:
        raise newer(what, error.fields["found"]) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise FormatError(f"{what} is not valid: {error}") from error


def dumps_sealed(
    document: Mapping[str, Any], *, what: str, max_bytes: int, indent: int | None = None
) -> bytes:
    """Return the text of `dumps` with a field `digest`: the digest of the text without this field."""
    body = digest(dumps(document, what=what, max_bytes=max_bytes))
    return dumps({**document, "digest": body}, what=what, max_bytes=max_bytes, indent=indent)


def loads_sealed(
    data: bytes, *, what: str, max_bytes: int, indent: int | None = None, newest: int | None = None
) -> dict[str, Any]:
    """Return the document of `dumps_sealed` without `digest`, after a check of the format version.

    The version is at most `newest`, else FORMAT_VERSION.

    Raise FormatError unless `data` are exactly the bytes that `dumps_sealed` writes for the document.
    """
    document = mapping(loads(data, what=what, max_bytes=max_bytes), what)
    check_version(document.get("format"), what, newest)
    return _unsealed(document, data, what=what, max_bytes=max_bytes, indent=indent)


def loads_if_sealed(
    data: bytes,
    *,
    what: str,
    max_bytes: int,
    known: Container[str],
    indent: int | None = None,
    final_newline: bool = True,
) -> dict[str, Any]:
    """Return the document of `dumps_sealed` without `digest`, or an older document without that field.

    An older document has only fields in `known`, because all writers of other fields also seal the document.
    Therefore a change of any byte of a sealed document, even in the name `digest`, raises FormatError.
    """
    document = mapping(loads(data, what=what, max_bytes=max_bytes, final_newline=final_newline), what)
    if "digest" in document:
        return _unsealed(document, data, what=what, max_bytes=max_bytes, indent=indent)
    if unknown := sorted(name for name in document if name not in known):
        raise FormatError(
            f"{what} is damaged: it has no digest, and a field {_shown(unknown[0])}.", what=what
        )
    return document


def _unsealed(
    document: dict[str, Any], data: bytes, *, what: str, max_bytes: int, indent: int | None
) -> dict[str, Any]:
    """Return `document` without `digest`, after a check against `data`."""
    document.pop("digest", None)
    if dumps_sealed(document, what=what, max_bytes=max_bytes, indent=indent) != data:
        raise FormatError(f"{what} is damaged: it does not match its own digest.", what=what)
    return document


def check_size(data: bytes, *, what: str, max_bytes: int) -> None:
    if len(data) > max_bytes:
        raise FormatError(f"{what} has {len(data)} bytes; the format allows {max_bytes}.")


def check_values(data: bytes, *, what: str) -> None:
    """Raise FormatError if the values of a JSON text would take more than MAX_VALUES_BYTES of memory.

    Three bytes of text can be a dict of 240 bytes, so the size of a text does not bound its values.
    """
    if len(data) * max(_VALUE_BYTES.values()) <= MAX_VALUES_BYTES:
        return
    most = sum(size * data.count(char) for char, size in _VALUE_BYTES.items())
    if most > MAX_VALUES_BYTES and (found := _values_bytes(data)) > MAX_VALUES_BYTES:
        raise FormatError(
            f"{what} has {len(data)} bytes of text whose values take about {found >> 20} MiB; "
            f"the format allows {MAX_VALUES_BYTES >> 20}."
        )


def _values_bytes(data: bytes) -> int:
    """Return the memory of the values of a JSON text; characters within strings do not count."""
    text = data.replace(rb"\\", b"").replace(rb"\"", b"")  # then each quotation mark begins or ends a string
    found, in_string = 0, np.False_
    for offset in range(0, len(text), _BLOCK_BYTES):
        block = np.frombuffer(text[offset : offset + _BLOCK_BYTES], np.uint8)
        inside = np.logical_xor.accumulate(block == ord('"')) ^ in_string
        in_string = inside[-1]
        for char, size in _VALUE_BYTES.items():
            is_char = block == ord(char)
            found += size * int(np.count_nonzero(is_char if char == b'"' else is_char & ~inside))
    return found


def check_version(value: object, what: str, newest: int | None = None) -> None:
    """Raise NewerFormat if format `value` is newer than this code; FormatError if it is no version."""
    version, newest = integer(value, f"{what}: format", low=1), newest or FORMAT_VERSION
    if version > newest:
        found = f"it is in format {version}, and this one reads up to format {newest}"
        raise newer(what, found, format=version)


def refuse_newer(data: bytes, *, what: str, max_bytes: int) -> None:
    """Raise NewerFormat if the sealed document `data` is of a newer format, whatever other fields it has.

    All other errors are raised later by `loads_sealed`.
    """
    try:
        document = loads(data, what=what, max_bytes=max_bytes)
    except FormatError:
        return
    version = document.get("format") if isinstance(document, dict) else None
    if type(version) is int and version > FORMAT_VERSION:
        check_version(version, what)


def newer(what: str, found: str, **fields: object) -> NewerFormat:
    """Return the error for `what` with `found`, which only a newer ray_ckpt writes."""
    return NewerFormat(
        f"{what} is of a newer version; update ray_ckpt: {found}.",
        hint="Nothing is damaged.",
        found=found,
        **fields,
    )


def unique_keys(pairs: Pairs) -> dict[str, Any]:
    """Return a JSON object as a dict. Raise FormatError if a key occurs twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise FormatError("an object has the same key twice")
    return result


def integer(value: object, name: str, *, low: int = 0, high: int = MAX_INT) -> int:
    if type(value) is not int or not low <= value <= high:
        raise FormatError(f"{name} must be a whole number from {low} to {high}, not {_shown(value)}.")
    return value


def bounded(value: object, name: str, most: float) -> float:
    """Return a `number` between -`most` and `most`."""
    if not abs(found := number(value, name)) <= most:
        raise FormatError(f"{name} must be a number from {-most:g} to {most:g}, not {_shown(value)}.")
    return found


def boolean(value: object, name: str) -> bool:
    return _exactly(bool, value, name, "true or false")


def text(value: object, name: str, *, pattern: re.Pattern[str] | None = None) -> str:
    """Return `value`. Raise FormatError unless it is a UTF-8 string that matches `pattern`."""
    if type(value) is not str or (pattern is not None and not pattern.match(value)) or _surrogates(value):
        raise FormatError(f"{name} must be {'such a name' if pattern else 'text'}, not {_shown(value)}.")
    return value


def hex_digest(value: object, name: str) -> str:
    if type(value) is not str or not _DIGEST.match(value):
        raise FormatError(f"{name} must be 32 hex digits, not {_shown(value)}.")
    return value


def array(value: object, name: str) -> list[Any]:
    return _exactly(list, value, name, "a list")


def mapping(value: object, name: str) -> dict[str, Any]:
    return _exactly(dict, value, name, "an object")


def _exactly(kind: type[T], value: object, name: str, what: str) -> T:
    if type(value) is not kind:
        raise FormatError(f"{name} must be {what}, not {_shown(value)}.")
    return value


def number(value: object, name: str) -> float:
    """Return `value`, a finite float or an integer, as a float."""
    if type(value) not in (int, float) or not isfinite(result := _to_float(value, name)):
        raise FormatError(f"{name} must be a finite number, not {_shown(value)}.")
    return result


def metrics(value: object, name: str) -> dict[str, float]:
    """Return metrics from the JSON of `metrics_json`."""
    return {
        text(key, name): float(item) if item in _NON_FINITE else number(item, f"{name}.{key}")
        for key, item in mapping(value, name).items()
    }


def metrics_json(values: Mapping[str, float]) -> dict[str, float | str]:
    """Return metrics for JSON, with nan, inf and -inf as strings. Raise FormatError for other values."""
    plain = {text(key, "a metric's name"): _to_float(item, f"metrics.{key}") for key, item in values.items()}
    return {key: item if isfinite(item) else repr(item) for key, item in plain.items()}


def _to_float(value: Any, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"{name} must be a number, not {_shown(value)}.") from error


def _refuse(constant: str) -> float:
    raise FormatError(f"{constant} is not JSON")


def _surrogates(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return True
    return False


def _shown(value: object) -> str:
    """Return a short text of `value` for an error; only plain values are shown with content."""
    if type(value) in (str, int, float, bool) and not (type(value) is int and value.bit_length() > 256):
        return repr(value)[:80]
    return f"a {type(value).__name__}"
