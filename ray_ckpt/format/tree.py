"""Training state without pickle: a tree of plain values as one line of JSON, and back, exactly.

Plain dicts with str keys, lists, str, int, float, bool and None are plain JSON. Everything else is an object
with one tag, such as `{"$tuple": [1, 2]}`. Types are compared exactly, not with isinstance: a subclass may
have more data than the base class. A value of any other type is refused, with the path of the value.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from ray_ckpt.errors import FormatError, UnsupportedLeaf
from ray_ckpt.format.jsontext import Pairs, check_values, loads, newer, unique_keys
from ray_ckpt.format.short import ShortRepr

MAX_TREE_BYTES = 64 * 2**20  # size of the JSON; larger data belongs in tensors, which are not parsed
MAX_DEPTH = 100  # nested containers; real states have about 10 levels, the JSON parser allows about 900
MAX_VALUES = 10_000_000  # values in one tree; bounds the expansion of shared references
IMPORTED_FROM = "imported_from"  # key of the state file of an import, with format, version and source

ENUMS: Mapping[str, type[Enum]] = {}
"""Enums that a tree may contain, by the stored name of the enum; members are stored by name."""

_FACTORIES: Mapping[str, type[Any]] = {t.__name__: t for t in (bool, dict, float, int, list, set, str, tuple)}
_PLAIN_INT_BITS = 63  # larger ints are stored in hex, since some readers refuse them as numbers
_DTYPE_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}\Z")
_HEX_INT = re.compile(r"-?0x[0-9a-f]+\Z")
_NUMPY_DTYPE = re.compile(
    r"([<>|][biufcSU][1-9]\d{0,8}|[<>][mM]8(\[\d{0,6}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)\Z"
)

_SHORT = ShortRepr()
_SHORT.maxstring = _SHORT.maxlong = 80


@dataclass(frozen=True)
class TensorRef:
    """A tensor in the shard file, under the safetensors key `key`."""

    key: str


@dataclass(frozen=True)
class TorchDtype:
    """A torch dtype by name, such as `float32`."""

    name: str


class Kept:
    """The JSON of an immutable container, written when a tree first contains it."""

    __slots__ = ("num_values", "text", "value")

    def __init__(self, value: Collection[Any]) -> None:
        self.value = value
        self.text: str | None = None
        self.num_values = 0


def encode_tree(value: object, kept: Mapping[int, Kept] | None = None) -> bytes:
    """Return `value` as one line of UTF-8 JSON. Equal trees in equal order give equal bytes.

    `kept` has the containers whose JSON is kept for later calls, by `id` of the container.

    Raise UnsupportedLeaf, with the path in `fields["path"]`, for a value that only pickle could store, a
    container inside itself, more than MAX_DEPTH levels, MAX_VALUES values, MAX_TREE_BYTES bytes, or values
    that exceed a reader's limit of memory.
    """
    encoder = _Encoder(kept or {})
    try:
        data = encoder.text(value).encode() + b"\n"
    except RecursionError as error:
        raise encoder.refuse("is nested deeper than the stack allows") from error
    if len(data) > MAX_TREE_BYTES:
        raise UnsupportedLeaf(
            f"The state without its tensors takes {len(data)} bytes; at most {MAX_TREE_BYTES} are stored.",
            hint="Keep large arrays as tensors.",
            path="",
        )
    try:
        check_values(data, what="The state without its tensors")
    except FormatError as error:
        raise UnsupportedLeaf(error.message, hint="Keep large arrays as tensors.", path="") from error
    return data


def decode_tree(data: bytes) -> Any:
    """Return the value in `data` from `encode_tree`; no code from the data runs. Raise FormatError."""
    return loads(data, what="The state tree", max_bytes=MAX_TREE_BYTES, hook=_object)


def decode_state(data: bytes) -> dict[str, Any]:
    """Return the document of a state file: a rank's items by name, and notes about them.

    Raise FormatError, also for a tree that is not such a document.
    """
    document = decode_tree(data)
    if type(document) is not dict or type(document.get("items")) is not dict:
        raise FormatError("The state tree has no items.")
    if type(document.get("classes", {})) is not dict or not _is_parts(document.get("parts", [])):
        raise FormatError("The state tree has classes or parts of another kind.")
    return document


def _is_parts(value: Any) -> bool:
    return type(value) is list and all(
        type(part) is dict
        and part.keys() == {"name", "world_size"}
        and type(part["name"]) is str
        and type(part["world_size"]) is int
        for part in value
    )


# Writing


class _Encoder:
    """One walk over a tree, with the current path for errors."""

    def __init__(self, kept: Mapping[int, Kept]) -> None:
        self._kept = kept
        self._used: list[str] = []  # texts of the kept containers in this tree
        self._path: list[str | int | None] = []  # None: an element of a set
        self._open: set[int] = set()  # ids of the containers around the current value
        self._num_values = 0

    def text(self, value: Any) -> str:
        return self._filled(self.encode(value))

    def _filled(self, encoded: Any) -> str:
        """Return the JSON of an encoded value, with the text of each kept container in its place."""
        text = _dumps(encoded)
        return _USED.sub(lambda found: self._used[int(found[1])], text) if self._used else text

    def encode(self, value: Any) -> Any:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise self.refuse(f"is beyond the {MAX_VALUES} values that one state may have")
        if (leaf := _LEAVES.get(type(value))) is not None:
            return leaf(value)
        if type(value) in _CONTAINERS:
            return self._container(value)
        if (found := _rare(value)) is not None:
            return found
        raise self.refuse(f"is {_type_name(value)}, which only pickle could store")

    def refuse(self, reason: str) -> UnsupportedLeaf:
        path = _path_text(self._path)
        return UnsupportedLeaf(
            f"{path or 'The state'} {reason}.",
            hint="Give the object that holds it a state_dict() and load_state_dict() of plain values,"
            " or leave it out.",
            path=path,
        )

    def _container(self, value: Collection[Any]) -> Any:
        if id(value) in self._open:
            raise self.refuse("contains itself")
        if len(self._open) == MAX_DEPTH:
            raise self.refuse(f"is nested deeper than {MAX_DEPTH} levels")
        if (kept := self._kept.get(id(value))) is not None:
            return self._use(kept)
        self._open.add(id(value))
        result = self._content(value)
        self._open.discard(id(value))
        return result

    def _content(self, value: Collection[Any]) -> Any:
        return self._mapping(value) if isinstance(value, dict) else self._sequence(value)

    def _use(self, kept: Kept) -> Any:
        """Return a placeholder for the text of `kept` until the end; no tree contains such an object."""
        if kept.text is None:
            num_before = self._num_values
            kept.text = self._filled(self._content(kept.value))  # it may contain other kept ones
            kept.num_values = self._num_values - num_before
        else:
            self._num_values += kept.num_values
        self._used.append(kept.text)
        return {"$kept": len(self._used) - 1}

    def _sequence(self, value: Collection[Any]) -> Any:
        if isinstance(value, (set, frozenset)):
            items = sorted((self._child(None, item) for item in value), key=json.dumps)
        else:
            items = [self._child(index, item) for index, item in enumerate(value)]
        return items if type(value) is list else {f"${type(value).__name__}": items}

    def _mapping(self, value: dict[Any, Any]) -> Any:
        pairs = [(self._key(key), self._child(key, item)) for key, item in value.items()]
        if type(value) is defaultdict:
            return {"$defaultdict": [self._factory(value), pairs]}
        if type(value) is dict and all(type(key) is str and key[:1] != "$" for key, _ in pairs):
            return dict(pairs)
        return {f"${type(value).__name__}": pairs}

    def _child(self, step: str | int | None, value: Any) -> Any:
        self._path.append(step)
        result = self.encode(value)
        self._path.pop()
        return result

    def _key(self, key: object) -> Any:
        if type(key) not in (str, int):
            raise self.refuse(f"has a key that is {_type_name(key)}; keys must be str or int")
        return _LEAVES[type(key)](key)

    def _factory(self, value: defaultdict[Any, Any]) -> str | None:
        factory = value.default_factory
        for name, known in _FACTORIES.items():
            if factory is known:
                return name
        if factory is not None:
            raise self.refuse("is a defaultdict with a factory of its own, which only pickle could store")
        return None


_USED = re.compile(r'\{"\$kept": (\d+)\}')  # never inside a string, since JSON escapes quotes there


def _dumps(tree: Any) -> str:
    return json.dumps(tree, ensure_ascii=False, allow_nan=False)


_CONTAINERS = frozenset({list, tuple, set, frozenset, dict, OrderedDict, Counter, defaultdict})


def _b64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _write_int(value: int) -> Any:
    return value if value.bit_length() <= _PLAIN_INT_BITS else {"$int": hex(value)}


def _write_float(value: float) -> Any:
    if math.isfinite(value):
        return value
    return {"$float": str(value) if math.isinf(value) else f"nan:{struct.pack('>d', value).hex()}"}


def _write_str(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:  # lone surrogates, as in undecodable file names
        return {"$str": _b64(value.encode("utf-8", "surrogatepass"))}
    return value


_LEAVES: Mapping[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: _write_int,
    float: _write_float,
    str: _write_str,
    bytes: lambda value: {"$bytes": _b64(value)},
    bytearray: lambda value: {"$bytearray": _b64(value)},
    complex: lambda value: {"$complex": [_write_float(value.real), _write_float(value.imag)]},
    TensorRef: lambda value: {"$tensor": _write_str(value.key)},
    np.str_: lambda value: {"$numpy.str": _write_str(str(value))},
    np.bytes_: lambda value: {"$numpy.bytes": _b64(bytes(value))},
}


def _rare(value: Any) -> Any:
    """Return the JSON of a value whose type has many members, or None for other types."""
    if type(value) is TorchDtype and _DTYPE_NAME.match(value.name):
        return {"$dtype": value.name}
    if type(value) is np.ndarray and (dtype := _dtype_text(value.dtype)):
        return {"$numpy": {"dtype": dtype, "shape": list(value.shape), "data": _b64(value.tobytes())}}
    if isinstance(value, np.generic) and (dtype := _dtype_text(value.dtype)):
        return {"$numpy.scalar": {"dtype": dtype, "shape": [], "data": _b64(value.tobytes())}}
    if isinstance(value, np.dtype) and (dtype := _dtype_text(value)):
        return {"$numpy.dtype": dtype}
    if isinstance(value, Enum):
        return _write_enum(value)
    return None


def _dtype_text(dtype: np.dtype[Any]) -> str | None:
    """Return numpy's name of a plain dtype; None for objects, records and other types."""
    known = _NUMPY_DTYPE.match(dtype.str) and np.dtype(dtype.str) == dtype
    return dtype.str if known else None


def _write_enum(value: Enum) -> Any:
    for name, kind in ENUMS.items():
        if type(value) is kind and value.name in kind.__members__:
            return {"$enum": [name, value.name]}
    return None


def _type_name(value: object) -> str:
    kind = type(value)
    return (
        f"a {kind.__module__}.{kind.__qualname__}"
        if kind.__module__ != "builtins"
        else f"a {kind.__qualname__}"
    )


def _path_text(path: Iterable[str | int | None]) -> str:
    text = ""
    for step in path:
        if step is None:
            text += "{}"
        elif isinstance(step, str) and step.isidentifier():
            text += f".{step}" if text else step
        else:
            text += f"[{_SHORT.repr(step)}]"
    return text


# Reading: `_object` is called for each JSON object, inner objects first


def _object(pairs: Pairs) -> Any:
    tag, payload = next((pair for pair in pairs if pair[0].startswith("$")), ("", None))
    if not tag:
        return unique_keys(pairs)
    if len(pairs) != 1:
        raise FormatError(f"an object with {tag[:80]!r} has other keys")
    if tag not in _READERS:
        raise newer("A value", f"its tag is {tag[:80]!r}")
    try:
        return _READERS[tag](payload)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, MemoryError) as error:
        raise FormatError(f"{tag}: {error}") from error


def _exactly(value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise TypeError(f"a {type(value).__name__} stands in the wrong place")
    return value


def _read_bytes(value: Any) -> bytes:
    return base64.b64decode(_exactly(value, str), validate=True)


def _read_int(value: Any) -> int:
    if not _HEX_INT.match(_exactly(value, str)):
        raise ValueError("not a hex number")
    return int(value, 16)


def _read_float(value: Any) -> float:
    if _exactly(value, str) in ("inf", "-inf"):
        return float(value)
    prefix, bits = value[:4], bytes.fromhex(value[4:])
    (result,) = struct.unpack(">d", bits) if len(bits) == 8 else (0.0,)
    if prefix != "nan:" or not math.isnan(result):
        raise ValueError("not a float")
    return float(result)


def _read_complex(value: Any) -> complex:
    real, imag = _exactly(value, list)
    return complex(_exactly(real, float), _exactly(imag, float))


def _read_unique(kind: type[Any]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        result = kind(_exactly(value, list))
        if len(result) != len(value):
            raise ValueError("an element stands in it twice")
        return result

    return read


def _read_pairs(value: Any) -> dict[Any, Any]:
    result = {}
    for pair in _exactly(value, list):
        key, item = _exactly(pair, list)
        result[_exactly(key, str, int)] = item
    if len(result) != len(value):
        raise ValueError("a key stands in it twice")
    return result


def _read_counter(value: Any) -> Counter[Any]:
    result: Counter[Any] = Counter()
    dict.update(result, _read_pairs(value))
    return result


def _read_defaultdict(value: Any) -> defaultdict[Any, Any]:
    factory, pairs = _exactly(value, list)
    return defaultdict(None if factory is None else _FACTORIES[_exactly(factory, str)], _read_pairs(pairs))


def _read_dtype_name(value: Any) -> TorchDtype:
    if not _DTYPE_NAME.match(_exactly(value, str)):
        raise ValueError("not the name of a dtype")
    return TorchDtype(value)


def _read_numpy_dtype(value: Any) -> np.dtype[Any]:
    if not _NUMPY_DTYPE.match(_exactly(value, str)):
        raise ValueError("not a plain numpy dtype")
    dtype: np.dtype[Any] = np.dtype(value)
    return dtype


def _read_numpy(value: Any) -> np.ndarray[Any, Any]:
    dtype, data = _read_numpy_dtype(_exactly(value, dict)["dtype"]), _read_bytes(value["data"])
    shape = tuple(_exactly(size, int) for size in _exactly(value["shape"], list))
    if any(size < 0 for size in shape) or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError("shape and bytes do not agree")
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _read_numpy_scalar(value: Any) -> Any:
    array = _read_numpy(value)
    if array.shape or array.dtype.kind in "SU":
        raise ValueError("not a scalar")
    return array[()]


def _read_enum(value: Any) -> Enum:
    name, member = _exactly(value, list)
    return ENUMS[_exactly(name, str)].__members__[_exactly(member, str)]


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "$int": _read_int,
    "$float": _read_float,
    "$complex": _read_complex,
    "$str": lambda value: _read_bytes(value).decode("utf-8", "surrogatepass"),
    "$bytes": _read_bytes,
    "$bytearray": lambda value: bytearray(_read_bytes(value)),
    "$tuple": lambda value: tuple(_exactly(value, list)),
    "$set": _read_unique(set),
    "$frozenset": _read_unique(frozenset),
    "$dict": _read_pairs,
    "$OrderedDict": lambda value: OrderedDict(_read_pairs(value)),
    "$Counter": _read_counter,
    "$defaultdict": _read_defaultdict,
    "$tensor": lambda value: TensorRef(_exactly(value, str)),
    "$dtype": _read_dtype_name,
    "$numpy": _read_numpy,
    "$numpy.scalar": _read_numpy_scalar,
    "$numpy.str": lambda value: np.str_(_exactly(value, str)),
    "$numpy.bytes": lambda value: np.bytes_(_read_bytes(value)),
    "$numpy.dtype": _read_numpy_dtype,
    "$enum": _read_enum,
}
