"""The header of a safetensors file: names, dtypes, shapes and positions of its tensors, with every check.

See https://huggingface.co/docs/safetensors. Files of torch's HuggingFaceStorageWriter hold slices; their
header also has the offset of each slice in its tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from ray_ckpt.capture.walk import DTYPES
from ray_ckpt.errors import CorruptionError, FormatError
from ray_ckpt.format import jsontext
from ray_ckpt.format.shard import ITEMSIZE, MAX_HEADER_BYTES, METADATA_KEY, OFFSETS_KEY, SHARDING_KEY
from ray_ckpt.interop.importers.source import ReadSlice, cut_short, file_size, read_bytes, read_range

LENGTH_BYTES = 8  # the length of the header, little-endian


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor, or a slice of a tensor, in a safetensors file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    saved_offsets: tuple[int, ...] | None  # of a slice in its tensor
    at: int
    nbytes: int

    @property
    def read(self) -> ReadSlice:
        return partial(read_range, self.path, self.at, self.nbytes)


def read_header(path: Path) -> tuple[StoredTensor, ...]:
    """Return the tensors of a file. Raise CorruptionError, with its name, if anything does not fit."""
    size = file_size(path)
    if size < LENGTH_BYTES:
        raise cut_short(path)
    length = int.from_bytes(read_bytes(path, 0, LENGTH_BYTES), "little")
    if length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
        raise CorruptionError(f"{path} is no safetensors file, or is cut short.", file=str(path))
    try:
        return _tensors(path, read_bytes(path, LENGTH_BYTES, length), size)
    except FormatError as error:
        raise error.at(str(path), "Copy the file again.") from error


def _tensors(path: Path, header: bytes, size: int) -> tuple[StoredTensor, ...]:
    entries = _object(header, "The header")
    metadata = jsontext.mapping(entries.pop(METADATA_KEY, {}), METADATA_KEY)
    sharding = metadata.get(SHARDING_KEY)
    offsets = _object(sharding.encode(), SHARDING_KEY) if isinstance(sharding, str) else {}
    begin = LENGTH_BYTES + len(header)
    return tuple(_tensor(path, name, entry, offsets, begin, size) for name, entry in entries.items())


def _tensor(
    path: Path, name: str, entry: object, offsets: Mapping[str, Any], begin: int, size: int
) -> StoredTensor:
    found = jsontext.mapping(entry, name)
    dtype, shape = jsontext.text(found.get("dtype"), name), _numbers(found.get("shape"), name)
    span = _numbers(found.get("data_offsets"), name)
    if dtype not in DTYPES:
        raise FormatError(f"{name} has the dtype {dtype[:40]!r}, which is not supported.")
    if len(span) != 2 or begin + span[1] > size or span[1] - span[0] != prod(shape) * ITEMSIZE[dtype]:
        raise FormatError(f"{name} does not have the bytes of its shape in the file.")
    saved = offsets.get(name)
    return StoredTensor(
        path=path,
        name=name,
        dtype=dtype,
        shape=shape,
        saved_offsets=None
        if saved is None
        else _numbers(jsontext.mapping(saved, name).get(OFFSETS_KEY), name),
        at=begin + span[0],
        nbytes=span[1] - span[0],
    )


def _object(data: bytes, what: str) -> dict[str, Any]:
    found = jsontext.loads(data, what=what, max_bytes=MAX_HEADER_BYTES, final_newline=False)
    return jsontext.mapping(found, what)


def _numbers(value: object, what: str) -> tuple[int, ...]:
    return tuple(jsontext.integer(number, what) for number in jsontext.array(value, what))
