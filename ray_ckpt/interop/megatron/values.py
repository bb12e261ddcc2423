"""Values of Megatron's state dicts as plain values, without pickle, and back.

Common state and ShardedObjects hold values that a state tree has no form for. Each of these becomes a dict
with the key MARK; nothing but the kinds listed here is made again from one.
"""

from __future__ import annotations

import io
from argparse import Namespace
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import PosixPath
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.safe_globals import SAFE_GLOBALS

from ray_ckpt.capture.dtensors import is_dtensor
from ray_ckpt.capture.items import elements
from ray_ckpt.capture.walk import DTYPE_NAMES, DTYPES, map_leaves, replace_refs
from ray_ckpt.errors import FormatError, UnsupportedLeaf
from ray_ckpt.format.short import key_text
from ray_ckpt.format.tree import TensorRef, decode_tree, encode_tree

MARK = "ray_ckpt.megatron"
ENUMS = {kind.__name__: kind for kind in SAFE_GLOBALS if isinstance(kind, type) and issubclass(kind, Enum)}
NAMESPACES: Mapping[str, type[Any]] = {kind.__name__: kind for kind in (Namespace, SimpleNamespace)}


def encode(value: Any, name: str) -> bytes:
    """Return a value as the text of a state tree; UnsupportedLeaf, with `name`, if only pickle could."""
    try:
        return encode_tree(_plain(value, (name,)))
    except UnsupportedLeaf as error:
        raise UnsupportedLeaf(
            f"{name}: {error.message}",
            hint="Megatron's state dict must hold it as a tensor or as plain values.",
            path=name,
        ) from error


def decode(data: bytes) -> Any:
    """Return the value of `encode`; FormatError if the data is damaged. No code from the data runs."""
    return restored(decode_tree(data))


def plain(data: bytes) -> Any:
    """Return the plain form in the data of `encode`, as an item stores it."""
    return decode_tree(data)


def restored(tree: Any) -> Any:
    """Return the value of a plain form; FormatError for a form that `encode` does not make."""
    return _made(replace_refs(tree, _refuse_tensor))


def _plain(value: Any, path: tuple[str, ...]) -> Any:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value, path)
    if kind in NAMESPACES.values():
        return {MARK: kind.__name__, "value": _plain(vars(value), path)}
    if ENUMS.get(kind.__name__) is kind:
        return {MARK: "Enum", "class": kind.__name__, "value": value.name}
    if kind is io.BytesIO:
        return {MARK: "BytesIO", "value": value.getvalue()}
    if kind is PosixPath:
        return {MARK: "Path", "value": str(value)}
    if kind is torch.Size:
        return tuple(value)
    if isinstance(value, dict) and (MARK in value or any(type(key) not in (str, int) for key in value)):
        pairs = [[_plain(k, path), _plain(v, (*path, key_text(k)))] for k, v in value.items()]
        return {MARK: "dict", "value": pairs}
    return map_leaves(value, _plain, path)


def _plain_tensor(tensor: torch.Tensor, path: tuple[str, ...]) -> Any:
    if is_dtensor(tensor) or tensor.layout != torch.strided or tensor.dtype not in DTYPE_NAMES:
        raise UnsupportedLeaf(
            f"{'.'.join(path)} is a {type(tensor).__name__} outside a ShardedTensor.",
            hint="Wrap it in a ShardedTensor; save a state dict of DTensors through ray_ckpt.dcp.",
            path=".".join(path),
        )
    flat = elements(tensor.cpu())
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return {MARK: "Tensor", "dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "value": data}


def _made(value: Any) -> Any:
    if isinstance(value, dict) and MARK in value:
        try:
            return _MAKERS[value[MARK]](value)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            raise FormatError(f"A value of Megatron's state cannot be made: {error}.") from error
    if isinstance(value, torch.dtype):
        return value
    return map_leaves(value, lambda child, _: _made(child), ())


def _tensor(value: Mapping[str, Any]) -> torch.Tensor:
    data, dtype = bytearray(value["value"]), DTYPES[value["dtype"]]
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(value["shape"])


_MAKERS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "Tensor": _tensor,
    "Enum": lambda value: ENUMS[value["class"]].__members__[value["value"]],
    "BytesIO": lambda value: io.BytesIO(value["value"]),
    "Path": lambda value: PosixPath(value["value"]),
    "dict": lambda value: {_made(key): _made(item) for key, item in value["value"]},
    "Namespace": lambda value: Namespace(**_made(value["value"])),
    "SimpleNamespace": lambda value: SimpleNamespace(**_made(value["value"])),
}


def _refuse_tensor(ref: TensorRef, path: tuple[str, ...]) -> Any:
    raise FormatError(f"{'.'.join(path)} is a tensor, where Megatron's common state has plain values.")
