"""Export of a checkpoint as a directory that stock torch.distributed.checkpoint reads.

One file has the tensors, slice after slice as they were saved, and the other values, each as `torch.save`
writes it; `.metadata` lists them. The format is that of torch.distributed.checkpoint.FileSystemWriter.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ray_ckpt.catalog.export import export_folder
from ray_ckpt.catalog.lazy_tensor import LazyTensor
from ray_ckpt.catalog.load import OpenedCheckpoint
from ray_ckpt.errors import ConfigError
from ray_ckpt.format.tree import TensorRef
from ray_ckpt.interop.dcp.names import as_bytes, flat
from ray_ckpt.interop.dcp.state import OWN_ITEMS, WHOLE, is_whole
from ray_ckpt.interop.exporters.trees import check_whole, with_tensors
from ray_ckpt.types import ProgressCallback

METADATA, DATA = ".metadata", "__0_0.distcp"
WEIGHTS = re.compile(r"\.metadata|.*\.distcp")  # files of a directory, of any number of ranks


def export_dcp(
    checkpoint: OpenedCheckpoint,
    tensors: Mapping[str, LazyTensor],
    out: Path,
    *,
    item: str | None = None,
    force: bool = False,
    progress: ProgressCallback | None = None,
) -> tuple[Path, ...]:
    """Write a durable checkpoint to the folder `out` and return the files. Memory holds one saved slice.

    The state dict has the items by name; with `item`, it is the state of that item. Values that differ
    between ranks are those of rank 0. A tuple is one value for DCP: its tensors are loaded with it. Random
    state, which DCP does not have, is left out. `progress` is called with the bytes of each slice.

    Raises ConfigError if there is no such item, if only other ranks have some of its tensors, or if `out`
    cannot be used; RestoreError or CorruptionError for damage; OSError if `out` cannot be written.
    """
    entries, paths = flat(_state(checkpoint, tensors, item))
    with export_folder(out, force=force, weights=WEIGHTS, replaced=(DATA, METADATA)) as folder:
        write_entries(folder, tensors, entries, paths, progress=progress)
    return out / DATA, out / METADATA


def write_entries(
    folder: Path,
    tensors: Mapping[str, LazyTensor],
    entries: Mapping[str, Any],
    paths: Mapping[str, Any] | None,
    *,
    progress: ProgressCallback | None = None,
) -> None:
    """Write the two files of a directory. A TensorRef among the entries is one of `tensors`.

    `paths` are the keys of nested entries, None if names are no paths. Raise the errors of `export_dcp`.
    """
    writing = _Writing(tensors, progress or (lambda nbytes: None))
    with (folder / DATA).open("wb") as file:
        for name, value in entries.items():
            writing.add(file, name, value)
        _sync(file)
    with (folder / METADATA).open("wb") as file:
        pickle.dump(writing.metadata(paths), file)
        _sync(file)


class _Writing:
    """The entries written so far."""

    def __init__(self, tensors: Mapping[str, LazyTensor], progress: ProgressCallback) -> None:
        self._tensors = tensors
        self._progress = progress
        self._described: dict[str, Any] = {}
        self._places: dict[MetadataIndex, Any] = {}
        self._first: dict[str, str] = {}  # the first entry of each tensor; others share its bytes

    def add(self, file: IO[bytes], name: str, value: Any) -> None:
        """Write one entry."""
        if isinstance(value, TensorRef):
            self._add_tensor(file, name, value.key)
            return
        self._described[name] = BytesStorageMetadata()
        start = file.tell()
        file.write(as_bytes(with_tensors(value, self._tensors)).getbuffer())
        self._places[MetadataIndex(name)] = _place(start, file)

    def _add_tensor(self, file: IO[bytes], name: str, key: str) -> None:
        lazy = self._tensors[key]
        chunks = [
            ChunkStorageMetadata(offsets=torch.Size(part.offset), sizes=torch.Size(part.shape))
            for part in lazy.slices
        ]
        self._described[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=lazy.dtype), size=torch.Size(lazy.shape), chunks=chunks
        )
        first = self._first.setdefault(key, name)
        for index, chunk in enumerate(chunks):
            place = MetadataIndex(name, chunk.offsets, index)
            if first != name:
                self._places[place] = self._places[MetadataIndex(first, chunk.offsets, index)]
                continue
            start = file.tell()
            torch.save(lazy[_spans(chunk)], file)
            self._places[place] = _place(start, file)
            self._progress(lazy.itemsize * chunk.sizes.numel())

    def metadata(self, paths: Mapping[str, Any] | None) -> Metadata:
        return Metadata(
            state_dict_metadata=self._described,
            planner_data=None if paths is None else dict(paths),
            storage_data=self._places,
            storage_meta=StorageMeta(),
            version=filesystem.CURRENT_DCP_VERSION,
        )


def _state(
    checkpoint: OpenedCheckpoint, tensors: Mapping[str, LazyTensor], item: str | None
) -> dict[str, Any]:
    """Return the nested state dict, with TensorRef in place of tensors."""
    trees = {name: tree for name, tree in checkpoint.saved().trees.items() if name not in OWN_ITEMS}
    if item is None and is_whole(trees):
        item = WHOLE
    if item is not None and not isinstance(trees.get(item), dict):
        raise ConfigError(
            f"There is no item {item!r} that is a dict.", hint=f"There are {', '.join(sorted(trees))}."
        )
    check_whole(trees, tensors, None if item is None else (item,))
    return trees if item is None else dict(trees[item])


def _spans(chunk: ChunkStorageMetadata) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))


def _place(start: int, file: IO[bytes]) -> Any:
    return filesystem._StorageInfo(DATA, start, file.tell() - start)


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
