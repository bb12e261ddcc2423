"""Unpickled values as the tree of an item, with the tensors of an archive as slices to be read.

Types of values are kept exactly, but a torch.Size becomes a tuple; what `format/tree.py` cannot store is
refused with its path. A tensor with several names in an item is stored once, with the first name, as a
capture does.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from ray_ckpt.errors import UnsupportedLeaf
from ray_ckpt.format.short import key_text
from ray_ckpt.format.tree import MAX_DEPTH, MAX_VALUES, TensorRef, TorchDtype
from ray_ckpt.interop.importers.archive import TorchArchive
from ray_ckpt.interop.importers.numpy_values import numpy_value
from ray_ckpt.interop.importers.source import Imported, ReadSlice
from ray_ckpt.interop.importers.tensors import DTYPES, StridedTensor, refused, sizes, tensor_of
from ray_ckpt.interop.importers.unpickler import Foreign, interpreting, kind_of
from ray_ckpt.types import Slice

MAX_VALUES_BYTES = 256 << 20  # of texts, bytes, sets and arrays, each counted wherever it stands
_SMALL_BYTES = 100  # of a leaf that is not counted, since the number of leaves is bounded

_FACTORIES: Mapping[str, Callable[[], Any]] = {
    f"builtins.{kind.__name__}": kind for kind in (bool, dict, float, int, list, set, str, tuple)
}

_MAPPINGS = ("collections.OrderedDict", "collections.defaultdict")


def entries_of(value: Any) -> dict[Any, Any] | None:
    """Return the entries of an unpickled dict, None for other values."""
    if type(value) is dict:
        return value
    return dict(value.entries) if kind_of(value) in _MAPPINGS and not isinstance(value, type) else None


class Values:
    """Reader of the values of archives into one Imported."""

    def __init__(
        self,
        imported: Imported,
        *,
        convert: Callable[[tuple[Slice, ReadSlice]], tuple[Slice, ReadSlice]] = lambda found: found,
    ) -> None:
        """`convert` gets each tensor that a value has, and may give it another dtype."""
        self._imported = imported
        self._convert = convert
        self._count = 0  # of the values that were visited
        self._num_values = 0  # of all values that were given
        self._nbytes = 0
        self._refs: dict[tuple[str, TorchArchive, StridedTensor], TensorRef] = {}  # by item and memory
        self._keys: set[str] = set()

    def take(self, value: Any, archive: TorchArchive, path: tuple[str, ...]) -> Any:
        """Return the tree of a value at a path, whose first name is the item, and add its tensors.

        Raise UnsupportedLeaf, with the path, for a value that cannot be stored; CorruptionError for one that
        torch.save does not write.
        """
        with interpreting(str(archive.path)):
            self._num_values += _num_values(value, {}, MAX_DEPTH)
            if self._num_values > MAX_VALUES:  # before minutes are spent on a few bytes
                raise refused(path, f"has more than {MAX_VALUES} values")
            return self._visit(value, path, archive)

    def add(self, slices: Iterable[tuple[Slice, ReadSlice]]) -> TensorRef:
        """Add the slices of one tensor and return the reference to it."""
        made = dict(slices)
        (key,) = {part.key for part in made}
        if key in self._keys:
            raise UnsupportedLeaf(
                f"Two tensors would be stored under the name {key}.",
                hint="Rename one of their keys; names are joined with dots.",
                path=key,
            )
        self._keys.add(key)
        self._imported.tensors.update(made)
        return TensorRef(key)

    def _visit(self, value: Any, path: tuple[str, ...], archive: TorchArchive) -> Any:
        self._count += 1
        if self._count > MAX_VALUES or len(path) > MAX_DEPTH:
            raise refused(path, f"is beyond {MAX_VALUES} values or {MAX_DEPTH} levels")
        child = partial(self._child, path, archive)
        if type(value) is dict:
            return {self._key(key, path): child(key, each) for key, each in value.items()}
        if type(value) in (list, tuple):
            return type(value)(child(index, each) for index, each in enumerate(value))
        if kind := kind_of(value):
            value = self._foreign(kind, value, path, archive)
        return self._charged(value, path)

    def _charged(self, value: Any, path: tuple[str, ...]) -> Any:
        """Return a leaf. Values that stand in many places would take far more memory than the pickle."""
        self._nbytes += max(0, sys.getsizeof(value) - _SMALL_BYTES)
        if self._nbytes > MAX_VALUES_BYTES:
            raise refused(path, f"is beyond {MAX_VALUES_BYTES} bytes of values that are no tensors")
        return value

    def _child(self, path: tuple[str, ...], archive: TorchArchive, key: Any, value: Any) -> Any:
        return self._visit(value, (*path, key_text(key)), archive)

    def _key(self, key: Any, path: tuple[str, ...]) -> Any:
        if type(key) not in (str, int):
            raise refused(path, f"has a key that is {kind_of(key) or type(key).__name__}, not str or int")
        return key

    def _foreign(self, kind: str, value: Any, path: tuple[str, ...], archive: TorchArchive) -> Any:
        if isinstance(value, type):
            if kind in DTYPES:
                return TorchDtype(kind.removeprefix("torch."))
            raise refused(path, f"is the name {kind}")
        if "_rebuild_" in kind:
            return self._tensor(value, path, archive)
        if kind.startswith("collections."):
            child = partial(self._child, path, archive)
            return _collection(kind, value, {self._key(k, path): child(k, v) for k, v in _pairs(value)})
        if (found := numpy_value(value)) is not None or (found := _plain(kind, value.args)) is not None:
            return found
        raise refused(path, f"is a {kind}")

    def _tensor(self, value: Foreign, path: tuple[str, ...], archive: TorchArchive) -> TensorRef:
        tensor = tensor_of(value, path)
        memory = path[0], archive, tensor
        if memory not in self._refs:
            part = Slice(
                item=path[0],
                name=".".join(path[1:]),
                dtype=tensor.dtype,
                global_shape=tensor.shape,
                offset=(0,) * len(tensor.shape),
                shape=tensor.shape,
            )
            self._refs[memory] = self.add([self._convert((part, tensor.reader(archive)))])
        return self._refs[memory]


def _num_values(value: Any, known: dict[int, int], max_depth: int) -> int:
    """Return the number of values in a tree, in time that grows with its distinct containers.

    A container counts at each of its places. Values deeper than `max_depth`, and places within itself, do
    not count.
    """
    children: Iterable[Any] = ()
    if type(value) is dict:
        children = value.values()
    elif type(value) in (list, tuple):
        children = value
    elif kind_of(value).startswith("collections.") and not isinstance(value, type):
        children = [child for _, child in _pairs(value)]
    if not max_depth or not children:
        return 1
    if id(value) not in known:
        known[id(value)] = 0
        known[id(value)] = 1 + sum(_num_values(child, known, max_depth - 1) for child in children)
    return known[id(value)]


def _pairs(value: Foreign) -> list[tuple[Any, Any]]:
    """Return the entries of a dict of another class."""
    given = [dict(arg) for arg in value.args if isinstance(arg, dict)]
    return [*(pair for each in given for pair in each.items()), *value.entries]


def _collection(kind: str, value: Foreign, entries: dict[Any, Any]) -> Any:
    if kind == "collections.Counter":
        return Counter(entries)
    if kind == "collections.OrderedDict":
        return OrderedDict(entries)
    factory = value.args[0] if value.args else None
    return defaultdict(None if factory is None else _FACTORIES[kind_of(factory)], entries)


def _plain(kind: str, args: tuple[Any, ...]) -> Any:
    """Return a value of a builtin class that a pickle names; None for other kinds."""
    match kind, args:
        case "torch.Size", _:
            return sizes(args[0]) if args else ()
        case (("builtins.set" | "builtins.frozenset"), (list() as values,)):
            return set(values) if kind.endswith(".set") else frozenset(values)
        case "builtins.complex", (float(), float()):
            return complex(*args)
        case "builtins.bytes", ():
            return b""
        case "_codecs.encode", (str() as text, "latin1" | "latin-1"):
            return text.encode("latin-1")
        case "builtins.bytearray", (bytes() as data,):
            return bytearray(data)
        case "builtins.bytearray", (str() as text, "latin-1"):
            return bytearray(text, "latin-1")
        case "builtins.bytearray", (Foreign(kind="_codecs.encode" as inner, args=encoded),):
            return bytearray(_plain(inner, encoded))
    return None
