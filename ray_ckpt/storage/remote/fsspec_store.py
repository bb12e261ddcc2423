"""A file system of fsspec as a store: for URLs that ray_ckpt has no client for.

`fsspec_buckets` builds the optional backend of S3 and GCS on it. A put writes in one stream
to the final name, without a temporary file. An early reader finds the wrong size or digest; a checkpoint
exists only once the log has its record.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from http import HTTPStatus
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt
from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile
from typing_extensions import Buffer

from ray_ckpt.errors import ConfigError
from ray_ckpt.location import Location
from ray_ckpt.storage.log_store import Unsupported
from ray_ckpt.storage.remote.file_store import Blocks, Children, StoredFile, Upload
from ray_ckpt.storage.remote.object_store import Checksum, part_size, short_error, too_large

READ_BYTES = 8 << 20  # bytes of one read request
UNCACHED = {"use_listings_cache": False, "skip_instance_cache": True}  # not shared with the user's instances


class FsspecStore:
    """`FileStore` and `SmallObjects` below the folder `root` of a file system."""

    def __init__(self, where: str, fs: AbstractFileSystem, root: str) -> None:
        self.where = where
        self._fs = fs
        self._root = root

    @classmethod
    def open(cls, location: Location, options: Mapping[str, str]) -> FsspecStore:
        """Open the file system that fsspec has for the scheme of `location`. Raise ConfigError or OSError."""
        try:
            fs, root = fsspec.core.url_to_fs(str(location), **UNCACHED, **options)
        except OSError:
            raise  # the server may answer later
        except Exception as error:  # the errors of client libraries have no common class
            raise ConfigError(
                f"The storage path {location.scheme}:// cannot be opened: {type(error).__name__}: "
                f"{short_error(error)}.",
                hint="Install the fsspec implementation of that scheme on every node, or check "
                "storage_options.",
            ) from None
        return cls(location.bare, fs, str(root))

    # -- FileStore ---------------------------------------------------------------------------------------

    def put(self, name: str, blocks: Iterable[Buffer], *, max_bytes: int) -> int:
        path, sent, checksum = self._path(name), 0, self._checksum()
        with self._errors(name):
            self._make_parent(path)
            part_bytes = part_size(max_bytes)
            file = self._fs.open(path, "wb", block_size=part_bytes)
        try:
            for block in blocks:
                view = memoryview(block).cast("B")
                if checksum is not None and view.nbytes:
                    checksum.update(_read_only(view))
                while view.nbytes:
                    nbytes = min(
                        view.nbytes, part_bytes - sent % part_bytes
                    )  # ends at the boundary of a part, so that all parts have the same size
                    with self._errors(name):
                        file.write(view[:nbytes])
                    view, sent = view[nbytes:], sent + nbytes
            with self._errors(name):
                file.close()
        except BaseException:
            self._discard(file, path)
            raise
        info = self._info(name)
        size = None if info is None else info["size"]
        if info is None or size != sent or not self._has_checksum(info, checksum):
            raise OSError(f"{self.where}/{name}: the store has {size} bytes, or other ones, of {sent} sent.")
        return sent

    def copy(self, source: str, name: str) -> int:
        raise Unsupported(f"{self.where}: the file system has no copy of its own that is known to stay there")

    def _make_parent(self, path: str) -> None:
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _checksum(self) -> Checksum | None:
        """Return a checksum to compare with the store's checksum; None if the store has none."""
        return None

    def _has_checksum(self, info: Mapping[str, Any], checksum: Checksum | None) -> bool:
        return True

    def _discard(self, file: Any, path: str) -> None:
        """Remove a file that was not completely written."""
        with contextlib.suppress(Exception):
            if isinstance(file, AbstractBufferedFile):
                file.closed = True  # a real close would store the incomplete file
                file.discard()
            else:
                file.close()
                self._fs.rm_file(path)

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> Blocks:
        for offset, nbytes in ranges:
            end = offset + nbytes
            for start in range(offset, end, READ_BYTES):
                yield memoryview(self._get(name, start, min(start + READ_BYTES, end)))

    def _get(self, name: str, start: int, stop: int) -> bytes:
        """Read one range. For a range beyond the end, each store raises a different error."""
        try:
            with self._errors(name):
                data: bytes = self._fs.cat_file(self._path(name), start=start, end=stop)
        except FileNotFoundError:
            raise
        except OSError:
            size = self.size(name)
            if size is None or size > start:
                raise
            data = b""
        if len(data) != stop - start:
            raise EOFError(f"{self.where}/{name} ends at byte {start + len(data)}")
        return data

    def size(self, name: str) -> int | None:
        info = self._info(name)
        return None if info is None or info["size"] is None else int(info["size"])

    def modified_s(self, name: str) -> float:
        if (info := self._info(name)) is None:
            raise FileNotFoundError(f"{self.where}/{name} is not there")
        return _modified_s(info)

    def _info(self, name: str) -> Mapping[str, Any] | None:
        self._fs.invalidate_cache()
        try:
            with self._errors(name):
                info: Mapping[str, Any] = self._fs.info(self._path(name))
        except FileNotFoundError:
            return None
        return info

    def list(self, folder: str = "") -> Iterator[StoredFile]:
        self._fs.invalidate_cache()
        try:
            with self._errors(folder):
                found = self._fs.find(self._path(folder), detail=True)
        except FileNotFoundError:
            return
        for path, info in found.items():
            yield self._stored(path, info)

    def children(self, folder: str = "") -> Children:
        self._fs.invalidate_cache()
        try:
            with self._errors(folder):
                found = self._fs.ls(self._path(folder), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return Children(folders=(), files=())
        return Children(
            folders=tuple(self._name(info["name"]) for info in found if info["type"] == "directory"),
            files=tuple(self._stored(info["name"], info) for info in found if info["type"] == "file"),
        )

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self.remove(name)

    def uploads(self, folder: str = "") -> Iterator[Upload]:
        yield from ()  # fsspec cannot list unfinished uploads

    def abort(self, upload: Upload) -> None:
        pass

    # -- SmallObjects ------------------------------------------------------------------------------------

    def create(self, name: str, data: bytes) -> None:
        if getattr(self._fs.pipe_file, "__func__", None) is AbstractFileSystem.pipe_file:
            raise Unsupported(f"{self.where}: its file system looks whether a name is taken, then writes it.")
        with self._errors(name):
            self._fs.pipe_file(self._path(name), data, mode="create")

    def get(self, name: str, *, max_bytes: int) -> bytes:
        size = self.size(name) or 0
        if size > max_bytes:
            raise too_large(self.where, name, size, max_bytes)
        with self._errors(name):
            return bytes(self._fs.cat_file(self._path(name)))

    def names(self, folder: str) -> tuple[str, ...]:
        return tuple(file.name.removeprefix(f"{folder}/") for file in self.list(folder))

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), self._errors(name):
            self._fs.rm_file(self._path(name))

    # -- names and errors --------------------------------------------------------------------------------

    def _stored(self, path: str, info: Mapping[str, Any]) -> StoredFile:
        size_bytes = int(info.get("size") or 0)
        return StoredFile(name=self._name(path), size_bytes=size_bytes, modified_s=_modified_s(info))

    def _name(self, path: str) -> str:
        return str(path).strip("/").removeprefix(self._root.strip("/")).strip("/")

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}".rstrip("/")

    @contextlib.contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Raise each error of the file system as the matching OSError, with a message of one line."""
        try:
            yield
        except Exception as error:
            kind = _kind(error)
            if kind is FileNotFoundError:
                self._check_root()
            raise kind(f"{self.where}/{name}: {type(error).__name__}: {short_error(error)}") from None

    def _check_root(self) -> None:
        """Raise OSError if a file is not found because the bucket does not exist."""


def _read_only(view: memoryview) -> npt.NDArray[np.uint8]:
    """Return a read-only array over the same memory; google_crc32c accepts no writable buffers."""
    array = np.frombuffer(view, np.uint8)
    array.flags.writeable = False
    return array


_KINDS = (FileNotFoundError, FileExistsError, PermissionError, NotADirectoryError)
_DENIED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


def _kind(error: Exception) -> type[OSError]:
    """Return the OSError class for an error, from the class of the error or from the HTTP status."""
    status = _status(error)
    is_unknown = isinstance(error, NotImplementedError) or getattr(error, "errno", None) == errno.ENOSYS
    if is_unknown or status == HTTPStatus.NOT_IMPLEMENTED:
        return Unsupported
    if status in _DENIED or str(error).startswith("Forbidden:"):  # gcsfs has no class for 403
        return PermissionError
    return next((kind for kind in _KINDS if isinstance(error, kind)), OSError)


def _status(error: Exception) -> int | None:
    """Return the HTTP status of an error of gcsfs, or of the botocore error that caused an error of s3fs."""
    code = getattr(error, "code", None)
    response: Any = getattr(error.__cause__ or error, "response", None)
    if isinstance(response, Mapping):
        code = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return code if isinstance(code, int) else None


def _modified_s(info: Mapping[str, Any]) -> float:
    """Return the file's time by the store's clock; now if unknown, so that no sweep deletes the file."""
    for key in ("LastModified", "last_modified", "mtime", "modified", "updated", "created"):
        value = info.get(key)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return time.time()
