"""The log store on objects: S3, GCS, and file systems of fsspec with a create that refuses existing names.

Each object is small and is created with one conditional request (S3: If-None-Match, GCS:
ifGenerationMatch=0). Responses are not trusted. When a response is lost, the client library repeats the
create, and the store refuses the second create although the first one succeeded (412); two creates at the
same time may both get a conflict (409). Therefore the object that is stored afterwards is read and compared.
"""

from __future__ import annotations

from typing import Protocol

from ray_ckpt.errors import FormatError
from ray_ckpt.storage.log_store import CreateResult, compare, max_bytes


class Unsupported(OSError):
    """The store does not support conditional creates."""


class SmallObjects(Protocol):
    """Small objects under names with "/", one request per call. After an OSError the result is unknown."""

    def create(self, name: str, data: bytes) -> None:
        """Create an object. Raise FileExistsError if the name exists, Unsupported, or another OSError."""
        ...

    def get(self, name: str, *, max_bytes: int) -> bytes:
        """Read an object. Raise FileNotFoundError, OSError, or EOFError soon if it exceeds `max_bytes`."""
        ...

    def names(self, folder: str) -> tuple[str, ...]:
        """Return the names in `folder`, relative to the folder, never from a cache. Raise OSError."""
        ...

    def remove(self, name: str) -> None:
        """Delete an object; an absent object is not an error. Raise OSError."""
        ...


class ObjectLogStore:
    """A log store in one folder of an object store."""

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
            pass  # the comparison with the stored object gives the result
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
