"""The log store on objects: S3, GCS, and file systems of fsspec that can create a name exactly once.

Each object is small and takes one request, which creates it with the store's own condition (S3:
If-None-Match, GCS: ifGenerationMatch=0). Responses are not trusted. When one is lost, the client library
repeats the create, and the store refuses it although the first one succeeded (412); two creates at once may
both get a conflict (409). So the object that is stored afterwards decides.
"""

from __future__ import annotations

from typing import Protocol

from ray_ckpt.errors import FormatError
from ray_ckpt.storage.log_store import CreateResult, compare, max_bytes


class Unsupported(OSError):
    """The store does not support conditional creates."""


class SmallObjects(Protocol):
    """Objects of one request each, under names with "/". After an OSError the outcome is unknown."""

    def create(self, name: str, data: bytes) -> None:
        """Create an object. FileExistsError if the name is taken; Unsupported; OSError otherwise."""
        ...

    def get(self, name: str, *, max_bytes: int) -> bytes:
        """Read an object. FileNotFoundError, OSError; EOFError, before much is read, beyond `max_bytes`."""
        ...

    def names(self, folder: str) -> tuple[str, ...]:
        """Return the names of the objects in a folder, relative to it and never from a cache. OSError."""
        ...

    def remove(self, name: str) -> None:
        """Delete an object. An absent one is not an error. OSError."""
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
            pass  # the stored object decides
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
