"""A store that outlives its process: a file per body, and a small one for each thing that refers to bodies.

    bodies/<name>                      the bytes of one request
    buckets|objects|uploads|parts/<sha256 of the name>.json

Each file is complete and on the disk (fsync, rename, fsync of its folder) before the change is made in memory
and the request is answered. Files without a reference, left by a crash, are removed when the folder is
opened.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from tests.servers.strict_store.records import Blob, Contents, Kind, Part, StoredObject, Upload

_MAP_BYTES = 1 << 20  # bodies from here on are served from the page cache, not kept in memory
_KINDS: tuple[Kind, ...] = ("buckets", "objects", "uploads", "parts")


class Folder:
    """The records of `Objects`, in a folder that no other process uses."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        for name in ("bodies", *_KINDS):
            (directory / name).mkdir(parents=True, exist_ok=True)

    def write_body(self, name: str, data: memoryview) -> memoryview:
        path = self._directory / "bodies" / name
        _write(path, data)
        return _read_body(path) if len(data) >= _MAP_BYTES else data

    def write(self, kind: Kind, name: str, value: object) -> None:
        text = json.dumps({"name": name, "value": _plain(value)})
        path = self._path(kind, name)
        unfinished = path.with_suffix(".tmp")
        _write(unfinished, text.encode())
        unfinished.rename(path)
        _sync_directory(path.parent)

    def remove(self, kind: Kind, name: str) -> None:
        path = self._path(kind, name)
        path.unlink(missing_ok=True)
        _sync_directory(path.parent)

    def forget(self, blobs: Sequence[Blob]) -> None:
        for blob in blobs:
            (self._directory / "bodies" / blob.name).unlink(missing_ok=True)

    def load(self) -> Contents:
        for unfinished in self._directory.glob("*/*.tmp"):
            unfinished.unlink()
        buckets = tuple(str(name) for name, _ in self._read("buckets"))
        objects = tuple(
            (name.partition("/")[0], self._stored(value)) for name, value in self._read("objects")
        )
        used = {blob.name for _, stored in objects for blob in stored.blobs}
        uploads = {name: Upload(**value) for name, value in self._read("uploads")}
        for name, value in self._read("parts"):
            part = Part(**{**value, "blob": self._blob(value["blob"])})
            upload = uploads.get(name.partition("/")[0])
            if part.blob.name in used or upload is None:  # completed or aborted, and not all of it removed
                self.remove("parts", name)
            else:
                upload.parts[part.number] = part
                used.add(part.blob.name)
        for path in (self._directory / "bodies").iterdir():
            if path.name not in used:
                path.unlink()
        return Contents(buckets=buckets, objects=objects, uploads=tuple(uploads.values()))

    def _read(self, kind: Kind) -> Iterator[tuple[str, Any]]:
        for path in sorted((self._directory / kind).glob("*.json")):
            entry = json.loads(path.read_bytes())
            yield entry["name"], entry["value"]

    def _path(self, kind: Kind, name: str) -> Path:
        return self._directory / kind / f"{hashlib.sha256(name.encode()).hexdigest()}.json"

    def _stored(self, value: Mapping[str, Any]) -> StoredObject:
        return StoredObject(**{**value, "blobs": tuple(self._blob(blob) for blob in value["blobs"])})

    def _blob(self, value: Mapping[str, Any]) -> Blob:
        data = _read_body(self._directory / "bodies" / value["name"])
        digests = {name: bytes.fromhex(text) for name, text in value["digests"].items()}
        return Blob(name=value["name"], data=data, digests=digests)


def _plain(value: object) -> object:
    """Return the value for JSON, without the bytes of blobs and the parts of uploads, which have files."""
    match value:
        case Blob():
            return {"name": value.name, "digests": {name: d.hex() for name, d in value.digests.items()}}
        case tuple():
            return [_plain(item) for item in value]
        case Mapping():
            return {name: _plain(item) for name, item in value.items()}
        case _ if is_dataclass(value):
            names = [item.name for item in fields(value) if item.name != "parts"]
            return {name: _plain(getattr(value, name)) for name in names}
    return value


def _write(path: Path, data: bytes | memoryview) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    _sync_directory(path.parent)


def _read_body(path: Path) -> memoryview:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < _MAP_BYTES:
            return memoryview(file.read())
        return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
