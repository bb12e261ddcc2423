"""What the two ends of the transport share: requests as JSON, bytes as one-column record batches.

Of one stream, either way, at most some 10 MiB are on their way, in both processes and their kernels, however
slow the other end is: HTTP/2 gives a stream a window of a few MiB, each end holds one message besides, and a
message is not written before the one before has left.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from typing_extensions import Buffer

from ray_ckpt.errors import FormatError
from ray_ckpt.format import jsontext, names

CHUNK_SCHEMA = pa.schema([("chunk", pa.large_binary())])
CHUNK_BYTES = 2 << 20  # per message: 1 to 4 MiB are equally fast, larger ones leave the CPU's caches
TOKEN_HEADER = "authorization"
TOKEN_PREFIX = "Bearer "
NOT_HERE = -1  # the size of a file that a peer does not have
REFUSED = b"refused"  # goes with an error: this peer will not do it the next time either
SMALL_BYTES = 64 << 10  # copied together: a message costs as much time as a copy of some MiB
KEPT_BLOCK_BYTES = 31 << 20  # just below 32 MiB, from which on glibc adapts to nothing
MAX_RANGES = 10_000  # in one request: the rows of an extent, `restore.extents.EXTENT_ROWS`
MAX_REQUEST_BYTES = 1 << 20  # of a request: twice what MAX_RANGES take


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
    """A file to be stored; the receiver checks size and digest, and answers with the digest it computed."""

    name: FileName
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GetRequest:
    """Byte ranges (offset, size) of one file; no ranges: the whole file, or its size, as the call says."""

    name: FileName
    ranges: tuple[tuple[int, int], ...]


def encode_request(request: PutRequest | GetRequest) -> bytes:
    return json.dumps(asdict(request)).encode()


def decode_put(data: bytes) -> PutRequest:
    """The request in `data`. FormatError for anything else."""
    fields = _fields(data)
    size = jsontext.integer(fields.get("size_bytes"), "size_bytes")
    return PutRequest(
        name=_name(fields), size_bytes=size, digest=jsontext.hex_digest(fields.get("digest"), "digest")
    )


def decode_get(data: bytes) -> GetRequest:
    """The request in `data`. FormatError for anything else."""
    fields = _fields(data)
    ranges = jsontext.array(fields.get("ranges"), "ranges")
    if len(ranges) > MAX_RANGES:
        raise FormatError(f"A get request of {len(ranges)} ranges; at most {MAX_RANGES} are served.")
    return GetRequest(name=_name(fields), ranges=tuple(map(_range, ranges)))


def check_asked(request: GetRequest, size_bytes: int) -> None:
    """FormatError if the ranges of a request leave the file, or are more bytes than it has."""
    asked_bytes = sum(size for _, size in request.ranges)
    end = max((offset + size for offset, size in request.ranges), default=0)
    if max(asked_bytes, end) > size_bytes:
        raise FormatError(
            f"A get request of {asked_bytes} bytes up to byte {end} of {request.name.file}, "
            f"which ends at byte {size_bytes}."
        )


def batch(chunk: bytes | memoryview) -> pa.RecordBatch:
    """One chunk as a record batch, not copied."""
    data = pa.py_buffer(chunk)
    offsets = pa.py_buffer(struct.pack("=qq", 0, len(chunk)))
    column = pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, data])
    return pa.RecordBatch.from_arrays([column], schema=CHUNK_SCHEMA)


def chunks(reader: Iterable[Any]) -> Iterator[memoryview]:
    """The chunks of a stream, not copied; each keeps its memory as long as it is held.

    A peer may send any bytes: what is not such a stream is a FormatError, and nothing is read outside it.
    """
    for item in reader:
        try:
            item.data.validate(full=True)
            (chunk,) = item.data.column(0)
            view = memoryview(chunk.as_buffer())
        except (AttributeError, TypeError, ValueError) as error:  # Arrow's own errors are ValueErrors
            raise FormatError("A peer sent something that is not a chunk.") from error
        yield view


def split(blocks: Iterable[Buffer]) -> Iterator[memoryview]:
    """Blocks cut to at most CHUNK_BYTES each."""
    for block in blocks:
        view = memoryview(block).cast("B")
        for start in range(0, view.nbytes, CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]


def gathered(blocks: Iterable[Buffer]) -> Iterator[memoryview]:
    """The same bytes in chunks of at most CHUNK_BYTES. Runs of small blocks are copied into one."""
    chunk = bytearray()
    for piece in split(blocks):
        is_small = piece.nbytes < SMALL_BYTES
        if chunk and (not is_small or len(chunk) + piece.nbytes > CHUNK_BYTES):
            yield memoryview(chunk)
            chunk = bytearray()  # a new one: the old one may still be held
        if is_small:
            chunk += piece
        else:
            yield piece
    if chunk:
        yield memoryview(chunk)


def keep_freed_memory() -> None:
    """Have malloc keep some freed memory (64 MiB) for the next messages instead of giving it back each time.

    gRPC allocates each arriving message anew, and memory touched for the first time is several times slower
    than a copy. glibc learns from a large block that is freed that such blocks come and go (mallopt(3),
    M_MMAP_THRESHOLD); most programs with tensors have taught it that long before. Other C libraries keep what
    they want. The block itself is never touched, so it costs nothing.
    """
    np.empty(KEPT_BLOCK_BYTES, np.uint8)


def _fields(data: bytes) -> dict[str, Any]:
    what = "A request"
    found = jsontext.loads(data, what=what, max_bytes=MAX_REQUEST_BYTES, final_newline=False)
    return jsontext.mapping(found, what)


def _name(fields: dict[str, Any]) -> FileName:
    name = jsontext.mapping(fields.get("name"), "name")
    parts = {part: jsontext.text(name.get(part), part) for part in ("run_uid", "directory", "file")}
    return FileName(**parts)


def _range(value: object) -> tuple[int, int]:
    found = jsontext.array(value, "A range")
    if len(found) != 2:
        raise FormatError("A range is an offset and a size.")
    return jsontext.integer(found[0], "offset"), jsontext.integer(found[1], "size")
