"""The layout of a shard: a safetensors file whose data begins at a multiple of 4096 bytes.

The header is complete before any tensor byte exists, so that each byte is written directly to its position.
The header also has the offset of each slice in the global tensor, for torch's HuggingFaceStorageReader; see
https://huggingface.co/docs/safetensors and torch.distributed.checkpoint._hf_utils.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ray_ckpt.errors import FormatError
from ray_ckpt.format.digest import digest
from ray_ckpt.format.jsontext import MAX_INT, newer
from ray_ckpt.types import Slice

ALIGNMENT_BYTES = 4096  # the alignment that O_DIRECT needs on every common disk
MAX_HEADER_BYTES = 100_000_000  # size of the JSON: the limit of the safetensors library
METADATA_KEY = "__metadata__"
SHARDING_KEY = "DCP_SHARDING_INFO"  # torch.distributed.checkpoint._hf_utils.CUSTOM_METADATA_KEY
OFFSETS_KEY = "saved_offsets"  # ... SAVED_OFFSETS_KEY

ITEMSIZE: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes per element of the safetensors dtypes that fill whole bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedSlice:
    """A slice and the position of its bytes; `byte_offset` counts from the start of the file."""

    slice: Slice
    byte_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """Positions of all slices in a shard.

    `header` is the beginning of the file, a multiple of 4096 bytes; the slices follow it without gaps.
    """

    header: bytes
    slices: tuple[PlacedSlice, ...]
    size_bytes: int

    @property
    def signature(self) -> str:
        """The digest of the header, equal for equal layouts."""
        return digest(self.header)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """The shards of a rank, one behind the other in memory.

    The first shard has the slices that move. If the rank has still slices, which stay the same from save to
    save, a second shard has these. Each shard begins at a multiple of 4096 bytes.
    """

    shards: tuple[ShardLayout, ...]

    @property
    def starts(self) -> tuple[int, ...]:
        """The position of each shard's first byte."""
        starts = [0]
        for shard in self.shards[:-1]:
            starts.append(_aligned(starts[-1] + shard.size_bytes))
        return tuple(starts)

    @property
    def slices(self) -> tuple[PlacedSlice, ...]:
        """The slices of all shards, in the order of their bytes."""
        return tuple(placed for shard in self.shards for placed in shard.slices)

    @property
    def num_moving(self) -> int:
        """The number of slices in the first shard."""
        return len(self.shards[0].slices)

    @property
    def size_bytes(self) -> int:
        return self.starts[-1] + self.shards[-1].size_bytes

    @property
    def signature(self) -> str:
        """The digest of all headers, equal for equal layouts."""
        return digest(b"".join(shard.header for shard in self.shards))


def _aligned(size_bytes: int) -> int:
    return size_bytes + -size_bytes % ALIGNMENT_BYTES


def build_rank_layout(moving: Iterable[Slice], still: Iterable[Slice] = ()) -> RankLayout:
    """Lay out a rank's shards; see `build_layout`. Without still slices there is one shard."""
    parts = [moving, still] if (still := tuple(still)) else [moving]
    return RankLayout(shards=tuple(map(build_layout, parts)))


def check_slice(part: Slice) -> int:
    """Return the size of `part`. Raise NewerFormat for an unknown dtype, FormatError outside the tensor."""
    if part.dtype not in ITEMSIZE:
        raise newer(part.key, f"its dtype is {part.dtype[:80]!r}", key=part.key)
    if not len(part.global_shape) == len(part.offset) == len(part.shape):
        raise FormatError(f"{part.key}: global shape, offset and shape differ in dimensions.", key=part.key)
    for total, start, size in zip(part.global_shape, part.offset, part.shape, strict=True):
        if start < 0 or size < 0 or start + size > total or total > MAX_INT:
            raise FormatError(
                f"{part.key}: {part.shape} at {part.offset} is not inside {part.global_shape}.", key=part.key
            )
    nbytes = part.num_elements * ITEMSIZE[part.dtype]
    if not part.item or part.key == METADATA_KEY or nbytes > MAX_INT:
        raise FormatError(f"{part.key!r} cannot be stored under this name or size.", key=part.key)
    return nbytes


def build_layout(slices: Iterable[Slice]) -> ShardLayout:
    """Lay `slices` out in one file without gaps: wider dtypes first, then by key, each naturally aligned.

    The first of several slices of a tensor has the tensor's key in the header; the others have other names.
    The result depends on the slices only, not on their order. Raise FormatError for a slice that occurs
    twice or that `check_slice` refuses, and for a header of more than MAX_HEADER_BYTES.
    """
    ordered = sorted(((check_slice(part), part) for part in slices), key=lambda pair: _rank(pair[1]))
    entries: dict[str, Any] = {}
    sharding: dict[str, Any] = {}
    position, starts, before = 0, [], None
    for nbytes, part in ordered:
        name = part.key if part.key not in entries else _further(part)
        if name in entries or (part.key, part.offset) == before:
            raise FormatError(f"{part.key} stands twice in one shard.", key=part.key)
        before = part.key, part.offset
        starts.append(position)
        span = [position, position := position + nbytes]
        entries[name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": span}
        sharding[name] = {OFFSETS_KEY: list(part.offset)}
    header = _header(entries, sharding)
    placed = (
        PlacedSlice(slice=part, byte_offset=len(header) + start, nbytes=nbytes)
        for start, (nbytes, part) in zip(starts, ordered, strict=True)
    )
    return ShardLayout(header=header, slices=tuple(placed), size_bytes=len(header) + position)


def _rank(part: Slice) -> tuple[int, str, tuple[int, ...]]:
    return -ITEMSIZE[part.dtype], part.key, part.offset


def _further(part: Slice) -> str:
    """Return the header name of a second or later slice of a tensor."""
    return f"{part.key}@{','.join(map(str, part.offset))}"


def _header(entries: Mapping[str, Any], sharding: Mapping[str, Any]) -> bytes:
    metadata = {"format": "pt", SHARDING_KEY: json.dumps(sharding, separators=(",", ":"))}
    try:
        body = json.dumps(
            {METADATA_KEY: metadata, **entries}, ensure_ascii=False, separators=(",", ":")
        ).encode()
    except UnicodeEncodeError as error:
        raise FormatError(f"A tensor's name is not valid text: {error}.") from error
    body += b" " * (-(8 + len(body)) % ALIGNMENT_BYTES)
    if len(body) > MAX_HEADER_BYTES:
        raise FormatError(
            f"The header of a shard with {len(entries)} slices takes {len(body)} bytes;"
            f" safetensors allows {MAX_HEADER_BYTES}.",
            hint="Spread the tensors over more ranks, or use shorter names.",
        )
    return len(body).to_bytes(8, "little") + body
