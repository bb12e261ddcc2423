"""Messages of the transport: requests as JSON, bytes as one-column record batches.

At most about 10 MiB of one stream are in flight, in both processes and their kernels, however slow the
receiver is: HTTP/2 gives a stream a window of a few MiB, each end holds one more message, and a message is
written only after the previous message has been sent.
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
CHUNK_BYTES = 2 << 20  # per message: 1 to 4 MiB are equally fast; larger messages exceed the CPU's caches
TOKEN_HEADER = "authorization"
TOKEN_PREFIX = "Bearer "
NOT_HERE = -1  # the size of a file that a peer does not have
BYTES_WANTED = "bytes"  # answer to a put request with `is_link` if the peer lacks that file; no digest
REFUSED = b"refused"  # sent with an error that would occur again in a retry
LOST = b"lost"  # sent with an error about a file that is not here, or not whole; a retry fails too
ALTERED = b"altered"  # sent with an error about bytes that differ from their digest
SMALL_BYTES = 64 << 10  # smaller blocks are merged: a message takes as long as a copy of a few MiB
KEPT_BLOCK_BYTES = 31 << 20  # just below 32 MiB, the largest block to which glibc adapts
MAX_RANGES = 10_000  # ranges in one request: the rows of an extent, `restore.extents.EXTENT_ROWS`
MAX_REQUEST_BYTES = 1 << 20  # size of a request: twice the size of MAX_RANGES ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class FileName:
    """The name of a checkpoint's file, checked on both ends, so that no path leaves the folder (P9)."""

    run_uid: str
    directory: str
    file: str

    def __post_init__(self) -> None:
        names.check_run_uid(self.run_uid)
        names.check_directory(self.directory)
        names.check_file(self.file)


@dataclass(frozen=True, slots=True, kw_only=True)
class PutRequest:
    """A request to store a file. The receiver checks size and digest and answers with the computed digest.

    The receiver answers when it obeys `epoch`, that of the sender, or a higher one. With `is_link`, no bytes
    follow: the receiver links the file to the same one in another checkpoint, or answers with BYTES_WANTED.
    With `is_repair` too, it compares the bytes of that one with the digest before.
    """

    name: FileName
    size_bytes: int
    digest: str
    epoch: int = 0
    is_link: bool = False
    is_repair: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GetRequest:
    """A request for byte ranges (offset, size) of a file; without ranges, for all bytes or for the size."""

    name: FileName
    ranges: tuple[tuple[int, int], ...]


def encode_request(request: PutRequest | GetRequest) -> bytes:
    return json.dumps(asdict(request)).encode()


def decode_put(data: bytes) -> PutRequest:
    """Return the put request in `data`. Raise FormatError if there is none."""
    fields = _fields(data)
    return PutRequest(
        name=_name(fields),
        size_bytes=jsontext.integer(fields.get("size_bytes"), "size_bytes"),
        digest=jsontext.hex_digest(fields.get("digest"), "digest"),
        epoch=jsontext.integer(fields.get("epoch"), "epoch"),
        is_link=jsontext.boolean(fields.get("is_link"), "is_link"),
        is_repair=jsontext.boolean(fields.get("is_repair"), "is_repair"),
    )


def decode_get(data: bytes) -> GetRequest:
    """Return the get request in `data`. Raise FormatError if there is none."""
    fields = _fields(data)
    ranges = jsontext.array(fields.get("ranges"), "ranges")
    if len(ranges) > MAX_RANGES:
        raise FormatError(f"A get request of {len(ranges)} ranges; at most {MAX_RANGES} are served.")
    return GetRequest(name=_name(fields), ranges=tuple(map(_range, ranges)))


def check_ranges(request: GetRequest, size_bytes: int) -> None:
    """Raise FormatError if the ranges of a request exceed the file, or have more bytes than the file."""
    requested_bytes = sum(size for _, size in request.ranges)
    end = max((offset + size for offset, size in request.ranges), default=0)
    if max(requested_bytes, end) > size_bytes:
        raise FormatError(
            f"A get request of {requested_bytes} bytes up to byte {end} of {request.name.file}, "
            f"which ends at byte {size_bytes}."
        )


def batch(chunk: bytes | memoryview) -> pa.RecordBatch:
    """Return a chunk as a record batch, without a copy."""
    data = pa.py_buffer(chunk)
    offsets = pa.py_buffer(struct.pack("=qq", 0, len(chunk)))
    column = pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, data])
    return pa.RecordBatch.from_arrays([column], schema=CHUNK_SCHEMA)


def chunks(reader: Iterable[Any]) -> Iterator[memoryview]:
    """Yield the chunks of a stream, without a copy. A chunk stays valid as long as it is referenced.

    Raise FormatError if the peer sends anything else; no memory outside the message is read.
    """
    for item in reader:
        try:
            item.data.validate(full=True)
            (chunk,) = item.data.column(0)
            view = memoryview(chunk.as_buffer())
        except (AttributeError, IndexError, TypeError, ValueError) as error:  # Arrow's own are ValueErrors
            raise FormatError("A peer sent something that is not a chunk.") from error
        yield view


def split(blocks: Iterable[Buffer]) -> Iterator[memoryview]:
    """Yield the bytes of `blocks` in views of at most CHUNK_BYTES."""
    for block in blocks:
        view = memoryview(block).cast("B")
        for start in range(0, view.nbytes, CHUNK_BYTES):
            yield view[start : start + CHUNK_BYTES]


def gathered(blocks: Iterable[Buffer]) -> Iterator[memoryview]:
    """Yield the bytes of `blocks` in chunks of at most CHUNK_BYTES; merge runs of small blocks."""
    chunk = bytearray()
    for piece in split(blocks):
        is_small = piece.nbytes < SMALL_BYTES
        if chunk and (not is_small or len(chunk) + piece.nbytes > CHUNK_BYTES):
            yield memoryview(chunk)
            chunk = bytearray()  # a new buffer: the caller may still reference the old one
        if is_small:
            chunk += piece
        else:
            yield piece
    if chunk:
        yield memoryview(chunk)


def keep_freed_memory() -> None:
    """Make malloc keep up to 64 MiB of freed memory for the next messages instead of returning it each time.

    gRPC allocates memory for each arriving message, and the first touch of new memory is several times slower
    than a copy. glibc raises its mmap threshold when a large block is freed (mallopt(3), M_MMAP_THRESHOLD);
    most programs with tensors have already freed such a block. This function allocates and frees one without
    touching it, so no memory is used. Other C libraries are not affected.
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
