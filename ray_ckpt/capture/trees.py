"""Dicts and lists of plain values and tensors, as users register them: what training adds to them comes back.

The saved tree counts where training has filled or extended the live one: an empty container, None, more keys,
a longer list or tensor. A difference that would lose something live, or that shows another program, is a
problem: a live key that was not saved, a shorter list, or another number of tensors. Lists of plain values
may have any length, and a live container without tensors becomes None if None was saved: programs change such
values as they go.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, MutableMapping, MutableSequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from ray_ckpt.capture.items import Item, Leaf
from ray_ckpt.capture.walk import leaf_of
from ray_ckpt.format.digest import digest
from ray_ckpt.format.short import key_text
from ray_ckpt.format.tree import TensorRef

_VALUES = frozenset({int, float, str, bool, bytes, type(None)})  # of long lists, mostly


class TreeItem(Item):
    """A dict or list of plain values and tensors, updated in place.

    Tensors, NumPy arrays of the saved shape and dtype, sets and bytearrays are filled, since the program may
    hold them under other names too. In a list that has another length now they are replaced.
    """

    def __init__(self, tree: Any) -> None:
        self._tree = tree

    def tree(self) -> Any:
        return self._tree

    def fill(self, tree: Any) -> None:
        """Copy what is no tensor into the live arrays, sets and bytearrays; called before tensors are read.

        Call it for all items before `load` of the first one: what shared memory in the program when it was
        built, and did not when it was saved, is replaced by `load` then.
        """
        _fill(self._tree, tree)

    def load(self, tree: Any) -> None:
        if _is_container(self._tree):
            _assign(self._tree, tree)

    def problems(self, saved: Any) -> list[str]:
        if _is_container(saved) or isinstance(saved, bytearray):
            return _problems(self._tree, saved, "")
        return [f"is a {type(self._tree).__name__} here, and none in the checkpoint"]

    def has_grown(self, leaf: Leaf, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Return whether the live tensor is empty, or has fewer rows of the same dtype than the saved one."""
        if type(leaf) is not torch.Tensor or leaf.requires_grad or leaf.shape == shape:
            return False
        rows, saved_rows = (tuple(each[1:]) for each in (leaf.shape, shape))
        is_longer = leaf.dim() == len(shape) and rows == saved_rows and len(leaf) < shape[0]
        return not leaf.numel() or (is_longer and leaf.dtype == dtype)


def _problems(target: Any, saved: Any, path: str) -> list[str]:
    """Return why a saved tree does not fit a live one; leaves may differ."""
    if isinstance(target, MutableMapping) and isinstance(saved, Mapping):
        return _mapping_problems(target, saved, path)
    if isinstance(target, MutableSequence) and _is_container(target) and isinstance(saved, list):
        if len(target) == len(saved):
            pairs = zip(target, saved, strict=True)
            return [p for i, (a, b) in enumerate(pairs) for p in _problems(a, b, f"{path}.{i}")]
        is_plain = all(map(_is_plain, chain(target, saved)))
        is_alike = not _has_tensors(target) and (len(target) < len(saved) or is_plain)
    elif isinstance(target, bytearray) and not path:  # the item itself
        is_alike = isinstance(saved, bytearray)
    elif saved is None:
        is_alike = not (_is_container(target) and _has_tensors(target))
    else:
        is_alike = target is None or not (_is_container(target) or _is_container(saved))
    return (
        []
        if is_alike
        else [f"{path.removeprefix('.') or 'the tree'}: has another structure in the checkpoint"]
    )


def _mapping_problems(target: MutableMapping[Any, Any], saved: Mapping[Any, Any], path: str) -> list[str]:
    if not target:
        return []

    def name(key: Any) -> str:
        return f"{path}.{key_text(key)}".removeprefix(".")

    has_any_keys = isinstance(target, Counter | defaultdict)  # of what it has met
    found = [f"{name(key)}: not in the checkpoint" for key in target if not has_any_keys and key not in saved]
    if not has_any_keys and any(map(_has_tensors, target.values())):  # then one more is of another program
        added = (key for key in saved if key not in target and _has_tensors(saved[key]))
        found += [f"{name(key)}: in the checkpoint, not here" for key in added]
    return found + [p for k in target if k in saved for p in _problems(target[k], saved[k], f".{name(k)}")]


def _is_container(value: Any) -> bool:
    """Return whether a value is a dict or list; a bytearray is a plain value."""
    return isinstance(value, MutableMapping | MutableSequence) and not isinstance(value, bytearray)


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, tuple) or _is_container(value):
        return any(map(_has_tensors, value))
    return isinstance(value, TensorRef) or leaf_of(value, ()) is not None


def _assign(target: Any, value: Any) -> None:
    """Put `value` into the containers of `target`; `_problems` has found none."""
    known = target
    if isinstance(target, MutableMapping):
        if not target.keys() <= value.keys():  # a Counter or a defaultdict
            known = dict(target)
            target.clear()
        pairs: Iterable[tuple[Any, Any]] = value.items()
    elif len(target) != len(value) or all(map(_is_plain, chain(target, value))):
        pairs = zip(target, value, strict=False)
        kept = [new if type(new) in _VALUES else _kept(here, new) for here, new in pairs]
        target[:] = kept + value[len(kept) :]
        return
    else:
        pairs = enumerate(value)
    for key, new in pairs:
        here = known[key] if isinstance(known, MutableSequence) or key in known else None
        if _is_container(here) and _is_container(new):
            _assign(here, new)
            new = here
        else:
            new = _kept(here, new)
        if new is not here or known is not target:
            target[key] = new


def _fill(here: Any, new: Any) -> None:
    """Copy saved arrays, sets and bytearrays into the live ones in the same places."""
    if isinstance(here, np.ndarray):
        if _is_alike(here, new) and here.flags.writeable:
            np.copyto(here, new)
    elif isinstance(here, set):
        if isinstance(new, set):
            here.clear()
            here.update(new)
    elif isinstance(here, bytearray):
        if isinstance(new, bytearray):
            here[:] = new
    elif isinstance(here, MutableMapping) and isinstance(new, Mapping):
        for key in here.keys() & new.keys():
            _fill(here[key], new[key])
    elif isinstance(here, tuple | MutableSequence) and isinstance(new, tuple | list):
        for old, saved in zip(here, new, strict=False):
            if type(saved) not in _VALUES:
                _fill(old, saved)


def _kept(here: Any, new: Any) -> Any:
    """Return the live value if `_fill` has made it equal to the saved one, else the saved value.

    An array in two places may have been two in the checkpoint: then it is not equal to both. Nor need an
    array be that has the memory of a tensor.
    """
    if isinstance(here, np.ndarray):
        return here if _is_alike(here, new) and _bits(here) == _bits(new) else new
    if isinstance(here, set | bytearray):
        return here if type(here) is type(new) and here == new else new
    if type(here) is type(new) is tuple and len(here) == len(new):
        return tuple(map(_kept, here, new))
    return new


def _bits(array: np.ndarray) -> str:
    return digest(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _is_alike(here: np.ndarray, new: Any) -> bool:
    """Return whether a saved value is an array of the shape and dtype of a live one."""
    return isinstance(new, np.ndarray) and (here.shape, here.dtype) == (new.shape, new.dtype)


def _is_plain(value: Any) -> bool:
    leaves = (str, bytes, bytearray, int, float, complex, bool, type(None), np.generic, np.ndarray)
    return isinstance(value, leaves) or (type(value) is tuple and all(map(_is_plain, value)))
