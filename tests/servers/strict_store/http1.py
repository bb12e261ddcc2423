"""HTTP/1.1 as far as object store clients speak it (RFC 9112), on blocking sockets.

A body is a `Fill`: a function that puts bytes into a buffer, as many as there are, and answers 0 at the end.
Encodings are fills around fills, and the bytes of a large body go from the socket into their last place.
"""

from __future__ import annotations

import contextlib
import json
import socket
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import cached_property
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, unquote

Fill = Callable[[memoryview], int]
Headers = tuple[tuple[str, str], ...]

MAX_LINE_BYTES = 16 << 10  # a key of 1 KiB, three times as long when quoted, with room for a query
MAX_HEADERS = 200
_BUFFER_BYTES = 64 << 10
_SMALL_BYTES = 1 << 20  # a body that is read in one go


class Disconnected(Exception):
    """The other side has gone, or has sent what is no HTTP."""


class BadBody(Exception):
    """The body does not match its headers. The connection cannot be used after it."""


@dataclass(frozen=True)
class Head:
    method: str
    target: str
    version: str
    headers: Mapping[str, str]  # names in lower case, repeated ones joined by commas

    @property
    def raw_path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def raw_query(self) -> str:
        return self.target.partition("?")[2]

    @cached_property
    def path(self) -> str:
        return unquote(self.raw_path)

    @cached_property
    def query(self) -> Mapping[str, str]:
        return dict(parse_qsl(self.raw_query, keep_blank_values=True))

    @property
    def keeps_alive(self) -> bool:
        return self.version == "HTTP/1.1" and self.headers.get("connection", "").lower() != "close"

    @property
    def expects_continue(self) -> bool:
        return self.headers.get("expect", "").lower() == "100-continue"


@dataclass(frozen=True, slots=True)
class Response:
    """`length`: the value of Content-Length if there is no body, as for HEAD."""

    status: int
    headers: Headers = ()
    body: Sequence[bytes | memoryview] = field(default=())
    length: int | None = None

    @property
    def body_bytes(self) -> int:
        return sum(len(piece) for piece in self.body)

    def head(self, *, now_s: float, keep_alive: bool) -> bytes:
        lines = [f"HTTP/1.1 {self.status} {phrase(self.status)}"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        if self.status not in (204, 304):
            lines.append(f"Content-Length: {self.body_bytes if self.length is None else self.length}")
        lines.append(f"Date: {formatdate(now_s, usegmt=True)}")
        lines.append(f"Connection: {'keep-alive' if keep_alive else 'close'}")
        return "\r\n".join((*lines, "", "")).encode("utf-8", "surrogateescape")

    def message(self, *, now_s: float, keep_alive: bool) -> tuple[bytes | memoryview, ...]:
        return (self.head(now_s=now_s, keep_alive=keep_alive), *self.body)


def phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unnamed"  # GCS has one of its own, 499


def json_response(status: int, values: Mapping[str, Any], headers: Headers = ()) -> Response:
    return Response(status, (("Content-Type", "application/json"), *headers), (json.dumps(values).encode(),))


class Buffered:
    """Lines and bytes of a fill. Bytes go past the buffer while it is empty."""

    def __init__(self, fill: Fill) -> None:
        self._fill = fill
        self._buffer = bytearray(_BUFFER_BYTES)
        self._start = self._end = 0

    def readinto(self, view: memoryview) -> int:
        waiting = self._end - self._start
        if not waiting:
            return self._fill(view)
        taken = min(waiting, len(view))
        view[:taken] = memoryview(self._buffer)[self._start : self._start + taken]
        self._start += taken
        return taken

    def line(self) -> bytes:
        """Up to the next CR LF, without it."""
        while (at := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            self._more()
        line = bytes(memoryview(self._buffer)[self._start : at])
        self._start = at + 2
        return line

    def _more(self) -> None:
        waiting = self._end - self._start
        if waiting > MAX_LINE_BYTES:
            raise Disconnected
        self._buffer[:waiting] = self._buffer[self._start : self._end]
        self._start, self._end = 0, waiting
        count = self._fill(memoryview(self._buffer)[waiting:])
        if not count:
            raise Disconnected
        self._end += count


class Connection:
    """One client's connection. `received` and `sent` are called with numbers of bytes."""

    def __init__(
        self, sock: socket.socket, *, received: Callable[[int], None], sent: Callable[[int], None]
    ) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._received = received
        self._sent = sent
        self.reader = Buffered(self._fill)

    def _fill(self, view: memoryview) -> int:
        try:
            count = self._sock.recv_into(view)
        except OSError as error:
            raise Disconnected from error
        self._received(count)
        return count

    def head(self) -> Head:
        """Return the head of the next request. `Disconnected` also if the client has ended the connection."""
        line = self.reader.line() or self.reader.line()  # an empty line may come first (RFC 9112, 2.2)
        method, _, rest = line.decode("latin-1").partition(" ")
        target, _, version = rest.partition(" ")
        if version not in ("HTTP/1.1", "HTTP/1.0") or not target.startswith("/"):
            raise Disconnected
        headers: dict[str, str] = {}
        for _ in range(MAX_HEADERS):
            line = self.reader.line()
            if not line:
                return Head(method, target, version, headers)
            name, _, value = line.decode("utf-8", "surrogateescape").partition(":")
            name, value = name.lower(), value.strip()
            headers[name] = f"{headers[name]},{value}" if name in headers else value
        raise Disconnected

    def send(self, *pieces: bytes | memoryview) -> None:
        try:
            for piece in pieces:
                self._sent(len(piece))  # first, so that who has the bytes finds them counted
                self._sock.sendall(piece)
        except OSError as error:
            raise Disconnected from error

    def cut(self) -> None:
        """End it from another thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def wait_for_end(self) -> None:
        """Wait until the client gives up."""
        scratch = memoryview(bytearray(_BUFFER_BYTES))
        while self._fill(scratch):
            pass


def body_of(head: Head, connection: Connection) -> tuple[Fill, int | None]:
    """Return the request's body and its length in bytes, if that is known beforehand."""
    if "chunked" in head.headers.get("transfer-encoding", "").lower():
        return chunked(connection.reader), None
    length = head.headers.get("content-length", "0")
    if not length.isdecimal():
        raise BadBody("Content-Length is no number")
    return exactly(connection.reader, int(length)), int(length)


def small_body(head: Head, connection: Connection) -> bytes:
    fill, length = body_of(head, connection)
    if length is None or length > _SMALL_BYTES:
        raise BadBody("the body is too long here, or has no length")
    body = bytearray(length)
    at = 0
    while at < length:
        at += fill(memoryview(body)[at:])
    return bytes(body)


def exactly(source: Buffered, num_bytes: int) -> Fill:
    left = num_bytes

    def fill(view: memoryview) -> int:
        nonlocal left
        if not left:
            return 0
        count = source.readinto(view[:left])
        if not count:
            raise Disconnected
        left -= count
        return count

    return fill


def chunked(source: Buffered) -> Fill:
    """RFC 9112, section 7.1. Trailers are read and forgotten."""
    left = 0
    ended = False

    def fill(view: memoryview) -> int:
        nonlocal left, ended
        if ended:
            return 0
        if not left:
            left = hex_size(source.line().partition(b";")[0])
            if not left:
                ended = True
                while source.line():
                    pass
                return 0
        count = source.readinto(view[:left])
        if not count:
            raise Disconnected
        left -= count
        if not left and source.line():
            raise BadBody("a chunk does not end where it should")
        return count

    return fill


def hex_size(text: bytes) -> int:
    if not text or text.strip(string.hexdigits.encode()):
        raise BadBody("a chunk's size is no number")
    return int(text, 16)
