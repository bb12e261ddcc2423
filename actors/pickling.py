"""Fast pickling of the records that a coordinator receives by the thousand."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")

_SETTERS: dict[type, tuple[Callable[[object, Any], None], ...]] = {}  # by class, in the order of the fields


def pickle_quickly(*classes: type) -> None:
    """Make pickle store objects of these classes as the values of their fields, without the names.

    The classes are frozen dataclasses with slots and at least two fields. Without this function, `dataclass`
    lists the fields again for each object, which takes most of the time of a report.
    """
    for cls in classes:
        names = [field.name for field in fields(cls)]
        _SETTERS[cls] = tuple(vars(cls)[name].__set__ for name in names)  # the object is frozen
        copyreg.pickle(cls, _reducer(cls, attrgetter(*names)))


def _reducer(cls: type[T], values: Callable[[T], Any]) -> Callable[[T], tuple[Any, ...]]:
    return lambda record: (_rebuild, (cls, values(record)))


def _rebuild(cls: type[T], values: tuple[Any, ...]) -> T:
    record = object.__new__(cls)
    for set_field, value in zip(_SETTERS[cls], values, strict=True):
        set_field(record, value)
    return record
