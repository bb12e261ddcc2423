"""DCP's names and forms of the entries of a state dict; its private functions are called here only."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element, traverse_state_dict

from ray_ckpt.capture.boxes import boxed
from ray_ckpt.errors import ConfigError
from ray_ckpt.format.tree import TensorRef


def flat(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """Return the entries of a nested state dict by DCP's names, and their paths; also of a saved state.

    Raises ConfigError if two entries have the same name, since names are the keys joined with dots.
    """
    entries: dict[str, Any] = {}
    paths: dict[str, tuple[Any, ...]] = {}

    def note(path: Any, value: Any) -> None:
        name = ".".join(map(str, path))
        if name in entries:
            raise ConfigError(
                f"The state dict has two entries {name!r}, at {paths[name]} and {path}.",
                hint="Rename one of their keys: DCP joins keys with dots.",
            )
        entries[name], paths[name] = value, path

    traverse_state_dict(dict(state), note, keep_traversing=_is_leaf)
    return entries, paths


def nested(entries: Mapping[str, Any], paths: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return the nested state dict of flat entries; keys of dicts are strings."""
    state: dict[str, Any] = {}
    for name, value in entries.items():
        set_element(state, paths[name], value)
    return state


def _is_leaf(value: Any) -> Any:
    return isinstance(value, torch.Tensor | TensorRef)


def is_tensor(value: Any) -> bool:
    """Return whether a live entry is a tensor, or names boxes of one."""
    return isinstance(value, torch.Tensor) or boxed(value, ()) is not None


def as_bytes(value: Any) -> io.BytesIO:
    """Return a value in the form in which DCP's planners take objects; the bytes stay in this process."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data
