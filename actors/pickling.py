"""Fast pickling of the records that a coordinator takes by the thousand."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")

_SETTERS: dict[type, tuple[Callable[[object, Any], None], ...]] = {}  # by class, in the order of the fields


def pickle_quickly(*classes: type) -> None:
    """Pickle frozen dataclasses with slots and at least two fields by the values of their fields alone.

    `dataclass` collects the fields anew for each object, which is most of the time that a report takes.
    """
    for cls in classes:
        names = [field.name for field in fields(cls)]
        _SETTERS[cls] = tuple(vars(cls)[name].__set__ for name in names)  # a frozen object has no other way
        copyreg.pickle(cls, _reducer(cls, attrgetter(*names)))


def _reducer(cls: type[T], values: Callable[[T], Any]) -> Callable[[T], tuple[Any, ...]]:
    return lambda record: (_rebuild, (cls, values(record)))


def _rebuild(cls: type[T], values: tuple[Any, ...]) -> T:
    record = object.__new__(cls)
    for set_field, value in zip(_SETTERS[cls], values, strict=True):
        set_field(record, value)
    return record
