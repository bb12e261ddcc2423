"""The log store on objects: S3, GCS, and whatever fsspec knows that can create a name once only.

Only small objects in one request each, created with the store's own condition (S3: If-None-Match, GCS:
ifGenerationMatch=0). Answers are not trusted: a create whose answer is lost is repeated by the client
library and then refused although it has succeeded (412), and a create that meets another one may be told to
come again (409); so what is there afterwards decides.
"""

from __future__ import annotations

from typing import Protocol

from ray_ckpt.errors import FormatError
from ray_ckpt.storage.log_store import CreateResult, compare, max_bytes


class Unsupported(OSError):
    """The store has said that it does not know conditional creates, rather than that this one failed."""


class SmallObjects(Protocol):
    """Objects of one request, under names with "/". OSError says nothing about what has happened."""

    def create(self, name: str, data: bytes) -> None:
        """FileExistsError if the store says that the name is taken; Unsupported; OSError otherwise."""
        ...

    def get(self, name: str, *, max_bytes: int) -> bytes:
        """FileNotFoundError, OSError; EOFError if it has more than `max_bytes`, of which little is read."""
        ...

    def names(self, folder: str) -> tuple[str, ...]:
        """Of the objects in a folder, without it; never from a cache. OSError."""
        ...

    def remove(self, name: str) -> None:
        """Absent is fine. OSError."""
        ...


class ObjectLogStore:
    """The objects of one folder."""

    def __init__(self, objects: SmallObjects, folder: str) -> None:
        self._objects = objects
        self._folder = folder

    def create(self, name: str, data: bytes) -> CreateResult:
        absent = CreateResult.UNKNOWN
        try:
            self._objects.create(self._path(name), data)
        except Unsupported:
            absent = CreateResult.UNSUPPORTED
        except OSError:
            pass  # what is there now tells
        return compare(self, name, data, absent=absent)

    def read(self, name: str) -> bytes | None:
        try:
            return self._objects.get(self._path(name), max_bytes=max_bytes(name))
        except FileNotFoundError:
            return None
        except EOFError as error:
            raise FormatError(f"{error}.") from error

    def list(self, prefix: str = "") -> tuple[str, ...]:
        return tuple(name for name in self._objects.names(self._folder) if name.startswith(prefix))

    def delete(self, name: str) -> None:
        self._objects.remove(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"
