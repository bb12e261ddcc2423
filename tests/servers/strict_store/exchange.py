"""One request from its head to the last byte of the answer, and the faults on the way."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

import numpy as np

from tests.servers.strict_store.api import Api, Request, check_digests
from tests.servers.strict_store.checksums import DIGESTS, Digest
from tests.servers.strict_store.faults import (
    Action,
    Delay,
    Down,
    DropAfter,
    DropBefore,
    Faults,
    Flip,
    Hang,
    Slow,
    Status,
    Truncate,
)
from tests.servers.strict_store.http1 import BadBody, Connection, Fill, Head, Response, body_of
from tests.servers.strict_store.objects import MAX_BODY_BYTES
from tests.servers.strict_store.records import StoreError
from tests.servers.strict_store.stats import Stats

_PIECE_BYTES = 512 << 10  # received and digested at once: stays in a core's cache
_ARRAY_BYTES = 1 << 20  # bodies from here on lie in memory that nobody clears first
_JOINED_BYTES = 64 << 10  # answers up to here leave in one piece with their head
_PACED_BYTES = 16 << 10  # between two looks at the pace
_USUAL_CODES = {
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    429: "TooManyRequests",
    500: "InternalError",
    501: "NotImplemented",
    503: "SlowDown",
}
_A = TypeVar("_A", bound=Action)


class Dropped(Exception):
    """A fault has it that the client gets no answer, or no more of it."""


class Exchange:
    """One request and its answer; call `run` once."""

    def __init__(self, head: Head, api: Api, connection: Connection, faults: Faults, stats: Stats) -> None:
        self._head = head
        self._api = api
        self._connection = connection
        self._faults = faults
        self._stats = stats
        self._operation = head.method
        self._actions: Sequence[Action] = ()
        self._raw, self._length = body_of(head, connection)
        self._keeps_alive = head.keeps_alive

    def run(self, now_s: float) -> bool:
        """Answer the request; return whether another may follow on this connection. Dropped: none may."""
        with self._stats.request():
            response = self._counted()
            self._send(response, now_s)
        return self._keeps_alive

    def _counted(self) -> Response:
        """Return the response, counted before it is sent, so that its receiver finds it in the counts."""
        status = 0
        try:
            response = self._respond()
            if self._planned(DropAfter):
                raise Dropped
            status = response.status
            return response
        finally:
            self._stats.answered(self._operation, status)

    def _respond(self) -> Response:
        try:
            request = self._api.parse(self._head)
            self._operation = request.operation
            self._api.authorize(request)
            self._actions = self._faults.of(self._head.method, request.operation, request.key)
            if self._planned(DropBefore) or self._planned(Down):
                raise Dropped
            self._read_body(request)
            self._suffer()
            check_digests(request, self._api.expected(request))
            return self._api.handle(request)
        except BadBody as error:
            self._keeps_alive = False
            with suppress(BadBody):
                self._drain()
            return self._api.refuse(self._head, StoreError("IncompleteBody", message=str(error)))
        except StoreError as error:
            self._drop_body()
            return self._api.refuse(self._head, error)

    def _suffer(self) -> None:
        """Apply the faults for a request that has arrived entirely, before the request is carried out."""
        if delay := self._planned(Delay):
            time.sleep(delay.seconds)
        if self._planned(Hang):
            self._connection.wait_for_end()
            raise Dropped
        if status := self._planned(Status):
            code = status.code or _USUAL_CODES.get(status.status, "InternalError")
            raise StoreError(code, status=status.status, message="a requested fault")

    def _planned(self, kind: type[_A]) -> _A | None:
        return next((action for action in self._actions if isinstance(action, kind)), None)

    # -- the request's body

    def _read_body(self, request: Request) -> None:
        headers = self._head.headers
        says_length = "content-length" in headers or "transfer-encoding" in headers
        if request.operation in ("PutObject", "UploadPart") and not says_length:
            raise StoreError("MissingContentLength")
        fill, length = self._api.decoded(request, self._raw, self._length)
        if length is not None and length > MAX_BODY_BYTES:
            raise StoreError("EntityTooLarge")
        digests = {name: DIGESTS[name]() for name in self._api.digest_names(request, length)}
        if self._head.expects_continue:
            self._connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        if slow := self._planned(Slow):
            fill = _paced(fill, slow.bytes_per_s)
        states = tuple(digests.values())
        request.body = _collect(fill, states) if length is None else _receive(fill, length, states)
        self._drain()
        request.digests = {name: state.digest() for name, state in digests.items()}

    def _drop_body(self) -> None:
        """Drop the body after a refusal, since a client that still sends would not read the answer."""
        if self._head.expects_continue:
            self._keeps_alive = False  # it may or may not send now
        else:
            self._drain()

    def _drain(self) -> None:
        scratch = memoryview(bytearray(_JOINED_BYTES))
        while self._raw(scratch):
            pass

    # -- the answer

    def _send(self, response: Response, now_s: float) -> None:
        head, *body = response.message(now_s=now_s, keep_alive=self._keeps_alive)
        if flip := self._planned(Flip):
            body = [_flipped(body, flip)]
        truncate = self._planned(Truncate)
        if truncate:
            body = [b"".join(body)[: truncate.keep_bytes]]
        if slow := self._planned(Slow):
            self._send_paced((head, *body), slow.bytes_per_s)
        elif sum(map(len, body)) <= _JOINED_BYTES:
            self._connection.send(b"".join((head, *body)))
        else:
            self._connection.send(head, *body)
        if truncate:
            raise Dropped

    def _send_paced(self, pieces: Iterable[bytes | memoryview], bytes_per_s: int) -> None:
        for piece in pieces:
            for at in range(0, len(piece), _PACED_BYTES):
                part = piece[at : at + _PACED_BYTES]
                self._connection.send(part)
                time.sleep(len(part) / bytes_per_s)


def _receive(fill: Fill, length: int, digests: Sequence[Digest]) -> memoryview:
    buffer = memoryview(bytearray(length)) if length < _ARRAY_BYTES else np.empty(length, np.uint8).data
    at = 0
    while at < length:
        count = _fill_piece(fill, buffer[at : at + _PIECE_BYTES])
        if not count:
            raise BadBody(f"the body has {at} bytes instead of {length}")
        for digest in digests:
            digest.update(buffer[at : at + count])
        at += count
    if fill(memoryview(bytearray(1))):
        raise BadBody(f"the body has more than {length} bytes")
    return buffer


def _collect(fill: Fill, digests: Sequence[Digest]) -> memoryview:
    """Read a body of unknown length."""
    body = bytearray()
    piece = memoryview(bytearray(_PIECE_BYTES))
    while count := fill(piece):
        for digest in digests:
            digest.update(piece[:count])
        body += piece[:count]
        if len(body) > MAX_BODY_BYTES:
            raise StoreError("EntityTooLarge")
    return memoryview(body)


def _fill_piece(fill: Fill, piece: memoryview) -> int:
    at = 0
    while at < len(piece) and (count := fill(piece[at:])):
        at += count
    return at


def _paced(fill: Fill, bytes_per_s: int) -> Fill:
    def slowly(view: memoryview) -> int:
        count = fill(view[:_PACED_BYTES])
        time.sleep(count / bytes_per_s)
        return count

    return slowly


def _flipped(body: Sequence[bytes | memoryview], flip: Flip) -> bytes:
    whole = bytearray(b"".join(body))
    if whole:
        whole[flip.byte % len(whole)] ^= 1 << flip.bit
    return bytes(whole)
