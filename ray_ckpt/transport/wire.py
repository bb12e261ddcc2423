"""What the two ends of the transport share: requests as JSON, bytes as one-column record batches."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from ray_ckpt.errors import FormatError
from ray_ckpt.format import names

CHUNK_SCHEMA = pa.schema([("chunk", pa.large_binary())])
CHUNK_BYTES = 4 << 20  # per message: well below gRPC's limits, large enough to be fast
MAX_RANGES = 1_000_000  # in one request; more slices than any one file has


@dataclass(frozen=True, slots=True, kw_only=True)
class FileName:
    """A file of a checkpoint of a run; checked on both ends, so it cannot leave its folder (P9)."""

    run_uid: str
    directory: str
    file: str

    def __post_init__(self) -> None:
        names.check_run_uid(self.run_uid)
        names.check_directory(self.directory)
        names.check_file(self.file)


@dataclass(frozen=True, slots=True, kw_only=True)
class PutRequest:
    name: FileName
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GetRequest:
    """Byte ranges (offset, size) of one file; no ranges: the whole file."""

    name: FileName
    ranges: tuple[tuple[int, int], ...]


def encode_request(request: PutRequest | GetRequest) -> bytes:
    return json.dumps(asdict(request)).encode()


def decode_put(data: bytes) -> PutRequest:
    fields = _fields(data)
    try:
        size, digest = int(fields["size_bytes"]), str(fields["digest"])
        return PutRequest(name=FileName(**fields["name"]), size_bytes=size, digest=digest)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"Not a put request: {error}.") from error


def decode_get(data: bytes) -> GetRequest:
    fields = _fields(data)
    try:
        ranges = tuple((int(offset), int(size)) for offset, size in fields["ranges"])
        name = FileName(**fields["name"])
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"Not a get request: {error}.") from error
    if len(ranges) > MAX_RANGES or any(offset < 0 or size < 0 for offset, size in ranges):
        raise FormatError("A get request with impossible ranges.")
    return GetRequest(name=name, ranges=ranges)


def batch(chunk: bytes | memoryview) -> pa.RecordBatch:
    """One chunk as a record batch, not copied."""
    data = pa.py_buffer(chunk)
    offsets = pa.py_buffer(memoryview(bytearray(16)).cast("q"))
    memoryview(offsets).cast("B")[8:16] = len(chunk).to_bytes(8, "little")
    column = pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, data])
    return pa.RecordBatch.from_arrays([column], schema=CHUNK_SCHEMA)


def split(blocks: Iterator[bytes]) -> Iterator[memoryview]:
    """Blocks cut to at most CHUNK_BYTES each."""
    for block in blocks:
        view = memoryview(block)
        for start in range(0, view.nbytes, CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]


def regroup(chunks: Iterator[memoryview], sizes: Sequence[int]) -> Iterator[bytearray]:
    """The bytes of `chunks` cut into pieces of `sizes`. FormatError if they do not add up."""
    rest = memoryview(b"")
    for size in sizes:
        piece, filled = bytearray(size), 0
        while filled < size:
            if not rest.nbytes:
                rest = next(chunks, memoryview(b""))
                if not rest.nbytes:
                    raise FormatError(f"A peer sent {filled} of {size} bytes.")
            take = min(size - filled, rest.nbytes)
            piece[filled : filled + take] = rest[:take]
            rest, filled = rest[take:], filled + take
        yield piece


def _fields(data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except ValueError as error:
        raise FormatError("Not a request of this protocol.") from error
    if not isinstance(fields, dict):
        raise FormatError("Not a request of this protocol.")
    return fields
