"""Engines of other trainers: objects that drive a model together with its optimizer.

Their adapters are in ray_ckpt.interop and are imported when the first such object is registered.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol, cast

from torch import nn

from ray_ckpt.capture.items import Item

ADAPTERS: Mapping[str, str] = {"deepspeed": "ray_ckpt.interop.deepspeed.adapter"}
"""The module with the adapter for objects of each package."""


class Adapter(Protocol):
    """The functions of an adapter's module."""

    def parts_of(self, name: str, obj: object) -> Mapping[str, object]:
        """Return the objects that are registered in place of `obj`, by item name; `obj` itself if it is none.

        UnsupportedItem, naming the feature, if an engine has state that cannot be saved.
        """

    def adapt(self, name: str, obj: object, owners: Mapping[str, nn.Module | nn.Parameter]) -> Item | None:
        """Return the item of one part; None for an object of the package that is adapted as any other."""


def parts_of(name: str, obj: object) -> Mapping[str, object]:
    """Return the objects that are registered in place of an engine, by item name; else the object itself."""
    adapter = _adapter_of(obj)
    return {name: obj} if adapter is None else adapter.parts_of(name, obj)


def adapt_part(name: str, obj: object, owners: Mapping[str, nn.Module | nn.Parameter]) -> Item | None:
    """Return the item of a part of an engine; None for other objects."""
    adapter = _adapter_of(obj)
    return None if adapter is None else adapter.adapt(name, obj, owners)


def _adapter_of(obj: object) -> Adapter | None:
    for kind in type(obj).__mro__:
        if (module := ADAPTERS.get(kind.__module__.partition(".")[0])) is not None:
            return cast(Adapter, import_module(module))
    return None
