"""Fast pickling of the records that a coordinator receives by the thousand."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Collection
from dataclasses import fields
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any, TypeVar

T = TypeVar("T")
NUM_SHARED = 1024  # records that are built once for all messages: the attempts of some hundred runs


def pickle_quickly(*classes: type, shared: Collection[type] = ()) -> None:
    """Pickle frozen dataclasses with slots and at least two fields by the values of their fields alone.

    `dataclass` collects the fields again for each object, which is most of the time that a report takes.
    Equal records of the classes in `shared` become one object where they are unpickled; their values must be
    hashable.
    """
    for cls in classes:
        build = _shared if cls in shared else _rebuild
        copyreg.pickle(cls, _reducer(cls, build, attrgetter(*(field.name for field in fields(cls)))))


def _reducer(
    cls: type[T], build: Callable[..., Any], values: Callable[[T], Any]
) -> Callable[[T], tuple[Any, ...]]:
    return lambda record: (build, (cls, values(record)))


def _rebuild(cls: Any, values: tuple[Any, ...]) -> Any:
    """Return a record. The process that unpickles need not have called `pickle_quickly`."""
    record = object.__new__(cls)
    for set_field, value in zip(_setters(cls), values, strict=True):
        set_field(record, value)
    return record


@lru_cache(NUM_SHARED)
def _shared(cls: Any, values: tuple[Any, ...]) -> Any:
    return _rebuild(cls, values)


@cache  # of the few classes that are pickled quickly
def _setters(cls: type) -> tuple[Callable[[object, Any], None], ...]:
    """Return the setters of the fields, in order: a frozen object has no other way to be filled."""
    return tuple(vars(cls)[field.name].__set__ for field in fields(cls))
