"""Files in a bucket of S3 or GCS, through obstore: bounded memory, parts in parallel, no event loop.

A large file is uploaded in parts. S3 checks each part on arrival, with a checksum that is sent with the part.
For GCS the CRC32C that GCS computes for the whole object is compared afterwards. Then the sizes are compared.
A part that fails is sent again after a random wait that doubles each time; a file that fails is aborted. A
killed process leaves an upload, which `uploads` lists and `abort` frees. `design/0015` explains, with
measurements, why obstore is used.

The log uses a separate client with short time-outs. The coordinator, which writes the log, transfers no
shards, so a transfer never delays a commit.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from typing_extensions import Buffer

from ray_ckpt.storage.local.direct import BLOCK_BYTES, new_buffer
from ray_ckpt.storage.log_store import Unsupported
from ray_ckpt.storage.parallel import map_in_order
from ray_ckpt.storage.remote.file_store import Blocks, Children, StoredFile, UnlistableKey, Upload

PART_BYTES = 16 << 20  # part of an upload: larger parts cost more to resend, smaller parts need more calls
PARTS_IN_FLIGHT = 8  # parts of one file: the cores of a client and a bucket handle 8 without a queue
IN_FLIGHT_BYTES = PARTS_IN_FLIGHT * PART_BYTES  # limit for one file, also when parts must be larger
MAX_PARTS = 10_000  # parts of one upload: the limit of S3 and GCS
GET_BYTES = 16 << 20  # per request: large enough to be efficient, small enough to repeat quickly
READ_AHEAD = 2  # requests that a reader sends ahead; a restore has four readers
AHEAD_S = 0.02  # shortest response time for reading ahead; below it the threads cost more than they save
CHUNK_BYTES = 256 << 10  # read from a response at a time: fits the CPU's cache; larger ones measured slower
DELETES = 8  # concurrent requests of one `delete`: a checkpoint of 1000 ranks has thousands of files
PUT_S = 900  # time for one part: 16 parts may share a node's link of 300 KB/s
GET_S = 600  # time for one range
STALL_S = 30  # time without a byte of a response; not for parts, which are answered only when complete
CONNECT_S = 5  # time to open a connection
MAX_TRIES = 6  # tries of one request, with random waits that double; then the whole drain is repeated
RETRY_S = 60  # time for all tries of a request
LOG_REQUEST_S = 10  # time for a log request: the coordinator treats a create as unknown after 30 s
LOG_RETRY_S = 15  # time for all tries of a log request
MAX_ERROR_CHARS = 300  # characters of a server's text that an error message contains


_forked = False  # true in a forked process: obstore's threads are missing, so a request would never end


def _note_fork() -> None:
    global _forked
    _forked = True


os.register_at_fork(after_in_child=_note_fork)
_STATUS = re.compile(r"status code: (\d+)([^:\n]*)")  # the status in messages of obstore
_KINDS: Mapping[int, type[OSError] | type[EOFError]] = {  # where obstore has no class, or not always
    401: PermissionError,
    403: PermissionError,
    416: EOFError,
    501: Unsupported,
}
Block: TypeAlias = npt.NDArray[np.uint8]


class Checksum(Protocol):
    """A checksum of bytes in order."""

    def update(self, chunk: Any) -> None: ...

    def digest(self) -> bytes: ...


class Bucket(Protocol):
    """A bucket of S3 or GCS, with the calls that obstore lacks."""

    where: str

    def connect(self, *, request_s: int, retry_s: int, stall_s: int | None = None) -> Any:
        """Open the prefix with obstore. A request fails after `stall_s` without a byte of its response."""
        ...

    def checksum(self) -> Checksum | None:
        """Return a checksum to compare with the store's; None if the store checks each part on arrival."""
        ...

    def has_checksum(self, name: str, checksum: Checksum | None) -> bool:
        """Return whether the checksum that the store has for the object equals `checksum`. Raise OSError."""
        ...

    def has_equal_checksums(self, one: str, other: str) -> bool:
        """Return whether the store has the same checksum for two objects. Raise OSError."""
        ...

    def copy_parts(self, source: str, name: str, size_bytes: int) -> bool:
        """Copy a large object in parts; return False if the store copies it in one request."""
        ...

    def uploads(self, folder: str) -> Iterator[Upload]: ...

    def abort(self, upload: Upload) -> None: ...


class BucketFiles:
    """A `FileStore` below a prefix of a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._store = bucket.connect(request_s=GET_S, retry_s=RETRY_S, stall_s=STALL_S)
        self._uploads = bucket.connect(request_s=PUT_S, retry_s=RETRY_S)
        self.where = bucket.where

    def put(self, name: str, blocks: Iterable[Buffer], *, max_bytes: int) -> int:
        checksum = self._bucket.checksum()
        sent = _Sent(checksum)
        part_bytes = part_size(max_bytes)
        try:
            with as_os_errors(self.where, name):
                obstore.put(
                    self._uploads,
                    name,
                    sent.blocks(blocks),
                    use_multipart=max_bytes > PART_BYTES,
                    chunk_size=part_bytes,
                    max_concurrency=max(1, min(PARTS_IN_FLIGHT, IN_FLIGHT_BYTES // part_bytes)),
                )
                size = int(obstore.head(self._store, name)["size"])
        except OSError:
            if sent.source_error is not None:
                raise sent.source_error from None
            raise
        if size != sent.size_bytes or not self._bucket.has_checksum(name, checksum):
            raise OSError(  # not deleted: another holder may have replaced the object meanwhile
                f"{self.where}/{name}: the store has {size} bytes, or other ones, of {sent.size_bytes} sent."
            )
        return size

    def copy(self, source: str, name: str) -> int:
        with as_os_errors(self.where, name):
            source_size = int(obstore.head(self._store, source)["size"])
            if not self._bucket.copy_parts(source, name, source_size):
                obstore.copy(self._uploads, source, name)
            size = int(obstore.head(self._store, name)["size"])
        if size != source_size or not self._bucket.has_equal_checksums(source, name):
            raise OSError(f"{self.where}/{name}: the store has {size} bytes, or other ones, of {source}.")
        return size

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> Blocks:
        requests = iter(_requests(ranges))
        for request in requests:
            start_s = time.monotonic()
            answer = self._request(name, *request)
            is_far = time.monotonic() - start_s > AHEAD_S
            yield from self._stream(name, answer, *request)
            if is_far:
                yield from self._read_ahead(name, requests)

    def _read_ahead(self, name: str, requests: Iterator[tuple[int, int]]) -> Blocks:
        with ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="ray_ckpt-get") as pool:
            requested: deque[tuple[Future[Any], tuple[int, int]]] = deque()
            try:
                for request in requests:
                    requested.append((pool.submit(self._request, name, *request), request))
                    if len(requested) > READ_AHEAD:
                        yield from self._next(name, requested)
                while requested:
                    yield from self._next(name, requested)
            finally:
                for answer, _ in requested:
                    answer.cancel()

    def _request(self, name: str, offset: int, nbytes: int) -> Any:
        """Send a request and return the response; the bytes stay in the connection until they are read."""
        with as_os_errors(self.where, name):
            return obstore.get(self._store, name, options={"range": (offset, offset + nbytes)})

    def _next(self, name: str, requested: deque[tuple[Future[Any], tuple[int, int]]]) -> Blocks:
        answer, request = requested.popleft()
        yield from self._stream(name, answer.result(), *request)

    def _stream(self, name: str, answer: Any, offset: int, nbytes: int) -> Blocks:
        """Yield the bytes of a response in small chunks that are still in the processor's cache."""
        got = 0
        with as_os_errors(self.where, name):
            for chunk in answer.stream(min_chunk_size=CHUNK_BYTES):
                view = memoryview(chunk)
                got += view.nbytes
                yield view
        if got != nbytes:
            raise EOFError(f"{self.where}/{name} ends at byte {offset + got}")

    def size(self, name: str) -> int | None:
        try:
            with as_os_errors(self.where, name):
                return int(obstore.head(self._store, name)["size"])
        except FileNotFoundError:
            return None

    def modified_s(self, name: str) -> float:
        with as_os_errors(self.where, name):
            return float(obstore.head(self._store, name)["last_modified"].timestamp())

    def list(self, folder: str = "") -> Iterator[StoredFile]:
        with as_os_errors(self.where, folder):
            for page in obstore.list(self._store, prefix=folder or None):
                yield from map(_stored, page)

    def children(self, folder: str = "") -> Children:
        with as_os_errors(self.where, folder):
            found = obstore.list_with_delimiter(self._store, prefix=folder or None)
        files = tuple(map(_stored, found["objects"]))
        return Children(folders=tuple(found["common_prefixes"]), files=files)

    def delete(self, names: Sequence[str]) -> None:
        for _ in map_in_order(self._delete, names, threads=DELETES, name="delete"):
            pass

    def _delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), as_os_errors(self.where, name):
            obstore.delete(self._store, name)

    def uploads(self, folder: str = "") -> Iterator[Upload]:
        return self._bucket.uploads(folder)

    def abort(self, upload: Upload) -> None:
        self._bucket.abort(upload)


class BucketObjects:
    """`SmallObjects` of a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._store = bucket.connect(request_s=LOG_REQUEST_S, retry_s=LOG_RETRY_S)
        self._where = bucket.where

    def create(self, name: str, data: bytes) -> None:
        with as_os_errors(self._where, name):
            obstore.put(self._store, name, data, mode="create")

    def get(self, name: str, *, max_bytes: int) -> bytes:
        with as_os_errors(self._where, name):
            answer = obstore.get(self._store, name)
            if (size := int(answer.meta["size"])) > max_bytes:
                raise too_large(self._where, name, size, max_bytes)
            return bytes(answer.bytes())

    def names(self, folder: str) -> tuple[str, ...]:
        with as_os_errors(self._where, folder):
            pages = list(obstore.list(self._store, prefix=folder))
        return tuple(found["path"].removeprefix(f"{folder}/") for page in pages for found in page)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError), as_os_errors(self._where, name):
            obstore.delete(self._store, name)


def _stored(found: Any) -> StoredFile:
    modified_s = found["last_modified"].timestamp()
    return StoredFile(name=found["path"], size_bytes=found["size"], modified_s=modified_s)


def client_options(request_s: int, *, stall_s: int | None = None, roots: bytes | None = None) -> Any:
    """Return the HTTP settings of obstore. `roots` are additional certificates to trust, in PEM.

    Plain HTTP is allowed, because the endpoint's URL decides between HTTP and HTTPS.
    """
    return {
        **({"root_certificate": roots} if roots else {}),
        "allow_http": True,
        "timeout": timedelta(seconds=request_s),
        **({"read_timeout": timedelta(seconds=stall_s)} if stall_s else {}),
        "connect_timeout": timedelta(seconds=CONNECT_S),
    }


def retry_config(retry_s: int) -> Any:
    return {"max_retries": MAX_TRIES - 1, "retry_timeout": timedelta(seconds=retry_s)}


def part_size(max_bytes: int) -> int:
    """Return the size of a part: a multiple of the block size with which MAX_PARTS parts hold the file."""
    least = max(PART_BYTES, -(-max_bytes // MAX_PARTS))
    return -(-least // BLOCK_BYTES) * BLOCK_BYTES


def _requests(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most GET_BYTES that cover the same bytes in the same order."""
    for offset, nbytes in ranges:
        for start in range(offset, offset + nbytes, GET_BYTES):
            yield start, min(GET_BYTES, offset + nbytes - start)


class _Sent:
    """Copies of the blocks to send, in memory that obstore may keep; counts bytes and updates the checksum.

    obstore reads a block in place until the part is sent. Therefore each block is copied into a buffer that
    obstore gets as an array; the buffer is used again once obstore has released the array.
    """

    def __init__(self, checksum: Checksum | None) -> None:
        self.size_bytes = 0
        self.source_error: OSError | None = None  # to distinguish it from an error of the store
        self._checksum = checksum
        self._idle: deque[mmap.mmap] = deque()

    def blocks(self, blocks: Iterable[Buffer]) -> Iterator[Any]:
        """Yield the same bytes in blocks of BLOCK_BYTES; the last one may be shorter."""
        try:
            yield from self._copies(blocks)
        except OSError as error:
            self.source_error = error
            raise

    def _copies(self, blocks: Iterable[Buffer]) -> Iterator[Block]:
        buffer, filled = self._take(), 0
        for block in blocks:
            view = memoryview(block).cast("B")
            while view.nbytes:
                nbytes = min(view.nbytes, BLOCK_BYTES - filled)
                target = np.frombuffer(buffer, np.uint8, nbytes, filled)
                np.copyto(target, np.frombuffer(view[:nbytes], np.uint8))
                view, filled = view[nbytes:], filled + nbytes
                if filled == BLOCK_BYTES:
                    yield self._acquire(buffer, filled)
                    buffer, filled = self._take(), 0
        if filled:
            yield self._acquire(buffer, filled)

    def _take(self) -> mmap.mmap:
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        return new_buffer(BLOCK_BYTES)

    def _acquire(self, buffer: mmap.mmap, nbytes: int) -> Block:
        lent = np.frombuffer(buffer, np.uint8, nbytes)
        lent.flags.writeable = False
        weakref.finalize(lent, self._idle.append, buffer)
        self.size_bytes += nbytes
        if self._checksum is not None:
            self._checksum.update(lent)
        return lent


def too_large(where: str, name: str, size: int, max_bytes: int) -> EOFError:
    """Return the error for an object that is larger than the format allows."""
    return EOFError(f"{where}/{name} has {size} bytes; the format allows {max_bytes}")


@contextlib.contextmanager
def as_os_errors(where: str, name: str) -> Iterator[None]:
    """Convert errors of client libraries in the block to OSError, with one line of bounded length.

    Raise FileNotFoundError for an absent object, but not for an absent bucket; FileExistsError,
    PermissionError and Unsupported by the store's answer; EOFError if a range begins beyond the end.
    """
    if _forked:
        raise OSError(
            f"{where}/{name}: this process was forked from one that has used an object store, and lacks its "
            "threads. Start it by the method spawn."
        )
    try:
        yield
    except (OSError, BaseError, NotImplementedError) as error:
        raise _kind(error)(f"{where}/{name}: {short_error(error)}") from None


def _kind(error: Exception) -> type[OSError] | type[EOFError]:
    text = str(error)
    if "NoSuchBucket" in text:
        return OSError
    if isinstance(error, AlreadyExistsError | PreconditionError):
        return FileExistsError
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return PermissionError
    if isinstance(error, NotSupportedError | NotImplementedError):
        return Unsupported
    if isinstance(error, InvalidPathError):  # our own names have no empty part, dots or control characters
        return UnlistableKey
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError
    status = _STATUS.search(text)
    return OSError if status is None else _KINDS.get(int(status[1]), OSError)


def short_error(error: Exception) -> str:
    """Return one printable line: status and code of a store's answer, or the client library's text."""
    text = str(error).partition("Debug source")[0]
    status = _STATUS.search(text)
    code = re.search(r"<Code>(\w+)</Code>(?:\s*<Message>([^<]*)</Message>)?", text)
    if status is not None:
        detail = f" {code[1]}. {code[2] or ''}" if code else ""
        text = f"the store answered {status[1]}{status[2].rstrip()}{detail}"
    elif text.startswith("Error performing") or " Error performing " in text:
        text = text.rpartition(" - ")[2]  # cuts off URLs and times, which differ each time
    line = " ".join(text.split())[:MAX_ERROR_CHARS]
    return "".join(c if c.isprintable() else "?" for c in line)
