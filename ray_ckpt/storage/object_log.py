"""The log store on an object store, through fsspec.

Only small objects in one request each, created with the store's own condition (S3: If-None-Match, GCS:
ifGenerationMatch=0). Answers are not trusted: a create whose answer is lost is repeated by the client
library and then refused although it has succeeded, so what is there afterwards decides.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fsspec import AbstractFileSystem

from ray_ckpt.storage.log_store import Outcome, compare


class ObjectLogStore:
    """Objects directly below `root`, such as "bucket/runs/gpt/ray_ckpt/log". Listings are never cached."""

    def __init__(self, fs: AbstractFileSystem, root: str) -> None:
        self._fs = fs
        self._root = root.rstrip("/")

    def create(self, name: str, data: bytes) -> Outcome:
        absent = Outcome.UNKNOWN
        try:
            self._fs.pipe_file(self._path(name), data, mode="create")
        except Exception as error:  # file systems raise what their client libraries raise
            if _is_unsupported(error):
                absent = Outcome.UNSUPPORTED
        return compare(self, name, data, absent=absent)

    def read(self, name: str) -> bytes | None:
        try:
            return bytes(self._fs.cat_file(self._path(name)))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise _os_error(error) from error

    def list(self, prefix: str = "") -> tuple[str, ...]:
        self._fs.invalidate_cache(self._root)
        try:
            found = self._fs.find(self._root, prefix=prefix)
        except FileNotFoundError:
            return ()
        except Exception as error:
            raise _os_error(error) from error
        listed = (str(path).rsplit("/", 1)[-1] for path in found)
        return tuple(name for name in listed if name.startswith(prefix))

    def delete(self, name: str) -> None:
        try:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name))
        except Exception as error:
            raise _os_error(error) from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


def _is_unsupported(error: Exception) -> bool:
    """The store has said that it does not know conditional creates, rather than that this one failed."""
    if isinstance(error, NotImplementedError) or getattr(error, "errno", None) == errno.ENOSYS:
        return True
    response: Any = getattr(error.__cause__, "response", None)  # of botocore
    if not isinstance(response, Mapping):
        return False
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return bool(status == HTTPStatus.NOT_IMPLEMENTED)


def _os_error(error: Exception) -> OSError:
    return error if isinstance(error, OSError) else OSError(f"{type(error).__name__}: {error}")
