"""Any other store that fsspec knows and that the probe lets through. S3 and GCS have clients of their own.

A put goes to the name itself in one stream: whoever reads it before its end finds the wrong size or digest,
and a checkpoint exists only once the log says so.
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
from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile
from typing_extensions import Buffer

from ray_ckpt.errors import ConfigError
from ray_ckpt.location import Location
from ray_ckpt.storage.remote.file_store import Blocks, Children, StoredFile, Upload
from ray_ckpt.storage.remote.object_log import Unsupported
from ray_ckpt.storage.remote.object_store import short_error, too_large

BLOCK_BYTES = 16 << 20  # gathered by fsspec before it sends them
READ_BYTES = 8 << 20  # asked for at a time


class FsspecStore:
    """`FileStore` and `SmallObjects` below one root."""

    def __init__(
        self, location: Location, options: Mapping[str, str], fs: AbstractFileSystem | None = None
    ) -> None:
        self.where = location.bare
        if fs is None:
            fs, self._root = _open(location, options)
        else:
            self._root = location.path
        self._fs = fs

    # -- FileStore ---------------------------------------------------------------------------------------

    def put(self, name: str, blocks: Iterable[Buffer], *, max_bytes: int) -> int:
        path, sent = self._path(name), 0
        with _os_errors(self.where, name):
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            file = self._fs.open(path, "wb", block_size=BLOCK_BYTES)
        try:
            for block in blocks:
                with _os_errors(self.where, name):
                    sent += file.write(memoryview(block).cast("B"))
            with _os_errors(self.where, name):
                file.close()
        except BaseException:
            self._throw_away(file, path)
            raise
        size = self.size(name)
        if size != sent:
            raise OSError(f"{self.where}/{name}: the store has {size} bytes of {sent} that were sent.")
        return sent

    def _throw_away(self, file: Any, path: str) -> None:
        """A file that is not written to its end."""
        with contextlib.suppress(Exception):
            if isinstance(file, AbstractBufferedFile):
                file.closed = True  # closing it would put what there is of it in place of what was there
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
        """Some stores refuse a range that begins beyond the end, each in its own way."""
        try:
            with _os_errors(self.where, name):
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
        self._fs.invalidate_cache()
        try:
            with _os_errors(self.where, name):
                size = self._fs.info(self._path(name))["size"]
                return None if size is None else int(size)
        except FileNotFoundError:
            return None

    def modified_s(self, name: str) -> float:
        self._fs.invalidate_cache()
        with _os_errors(self.where, name):
            return _modified_s(self._fs.info(self._path(name)))

    def list(self, folder: str = "") -> Iterator[StoredFile]:
        self._fs.invalidate_cache()
        with _os_errors(self.where, folder):
            try:
                found = self._fs.find(self._path(folder), detail=True)
            except FileNotFoundError:
                return
        for path, info in found.items():
            yield self._stored(path, info)

    def children(self, folder: str = "") -> Children:
        self._fs.invalidate_cache()
        with _os_errors(self.where, folder):
            try:
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
        yield from ()  # fsspec does not tell

    def abort(self, upload: Upload) -> None:
        pass

    # -- SmallObjects ------------------------------------------------------------------------------------

    def create(self, name: str, data: bytes) -> None:
        if getattr(self._fs.pipe_file, "__func__", None) is AbstractFileSystem.pipe_file:
            raise Unsupported(f"{self.where}: its file system looks whether a name is taken, then writes it.")
        with _os_errors(self.where, name):
            self._fs.pipe_file(self._path(name), data, mode="create")

    def get(self, name: str, *, max_bytes: int) -> bytes:
        size = self.size(name) or 0
        if size > max_bytes:
            raise too_large(self.where, name, size, max_bytes)
        with _os_errors(self.where, name):
            return bytes(self._fs.cat_file(self._path(name)))

    def names(self, folder: str) -> tuple[str, ...]:
        return tuple(file.name.removeprefix(f"{folder}/") for file in self.list(folder))

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), _os_errors(self.where, name):
            self._fs.rm_file(self._path(name))

    def _stored(self, path: str, info: Mapping[str, Any]) -> StoredFile:
        size_bytes = int(info.get("size") or 0)
        return StoredFile(name=self._name(path), size_bytes=size_bytes, modified_s=_modified_s(info))

    def _name(self, path: str) -> str:
        return str(path).strip("/").removeprefix(self._root.strip("/")).strip("/")

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}".rstrip("/")


def _open(location: Location, options: Mapping[str, str]) -> tuple[AbstractFileSystem, str]:
    try:
        fs, root = fsspec.core.url_to_fs(str(location), **options)
    except (ImportError, ValueError, TypeError) as error:
        raise ConfigError(
            f"The storage path {location.scheme}:// cannot be opened: {error}.",
            hint="Install the fsspec implementation of that scheme on every node, or check storage_options.",
        ) from None
    fs.use_listings_cache = False
    return fs, str(root)


@contextlib.contextmanager
def _os_errors(where: str, name: str) -> Iterator[None]:
    """File systems raise what their client libraries raise; the status behind it counts."""
    try:
        yield
    except (OSError, EOFError) as error:
        if _is_unsupported(error):
            raise Unsupported(f"{where}/{name}: {short_error(error)}") from None
        raise
    except Exception as error:
        kind = Unsupported if _is_unsupported(error) else OSError
        raise kind(f"{where}/{name}: {type(error).__name__}: {short_error(error)}") from None


def _is_unsupported(error: Exception) -> bool:
    if isinstance(error, NotImplementedError) or getattr(error, "errno", None) == errno.ENOSYS:
        return True
    response: Any = getattr(error.__cause__, "response", None)  # of botocore
    if not isinstance(response, Mapping):
        return False
    return bool(response.get("ResponseMetadata", {}).get("HTTPStatusCode") == HTTPStatus.NOT_IMPLEMENTED)


def _modified_s(info: Mapping[str, Any]) -> float:
    """By the store's clock; now if it does not tell, which makes everything too young to be an orphan."""
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
