"""Parts that the three APIs share: a request as the server passes it on, and the answer to a read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Protocol

from tests.servers.strict_store.checksums import DIGEST_BYTES, from_text, to_text
from tests.servers.strict_store.http1 import Fill, Head, Headers, Response
from tests.servers.strict_store.records import StoredObject, StoreError
from tests.servers.strict_store.signing import ChunkSigner

MD5_BYTES = 1 << 20  # larger bodies get no MD5 unless the client has made one too: it is the slowest digest
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A digest that the client has sent, and the code for a body that has another one."""

    name: str
    digest: bytes
    code: str = "BadDigest"


@dataclass(slots=True, kw_only=True)
class Request:
    """The last three are filled in by the server, when the body has come."""

    head: Head
    operation: str
    bucket: str = ""
    key: str = ""
    signer: ChunkSigner | None = None
    body: memoryview = field(default_factory=lambda: memoryview(b""))
    digests: Mapping[str, bytes] = field(default_factory=dict)
    trailers: Mapping[str, str] = field(default_factory=dict)


class Api(Protocol):
    """All methods raise StoreError; `refuse` makes the answer of it."""

    def parse(self, head: Head) -> Request: ...

    def authorize(self, request: Request) -> None: ...

    def decoded(self, request: Request, fill: Fill, length: int | None) -> tuple[Fill, int | None]:
        """Return the body without the encodings of this API, and its length if that is known beforehand."""

    def digest_names(self, request: Request, length: int | None) -> Sequence[str]:
        """Return the names of the digests to compute while the body arrives."""

    def expected(self, request: Request) -> Sequence[Expected]:
        """Return the expected digests; the request has its trailers by then."""

    def handle(self, request: Request) -> Response: ...

    def refuse(self, head: Head, error: StoreError) -> Response: ...


def expected_digest(name: str, text: str, code: str = "BadDigest") -> Expected:
    """Return the digest in a base64 text. InvalidDigest if it cannot be a digest of this kind."""
    try:
        digest = from_text(text)
    except ValueError as error:
        raise StoreError("InvalidDigest", message=f"{name} is not base64") from error
    if len(digest) != DIGEST_BYTES[name]:
        raise StoreError("InvalidDigest", message=f"{name} has {len(digest)} bytes")
    return Expected(name=name, digest=digest, code=code)


def check_digests(request: Request, expected: Sequence[Expected]) -> None:
    for want in expected:
        found = request.digests[want.name]
        if found != want.digest:
            raise StoreError(
                want.code,
                message=f"the body's {want.name} is not the one that was sent with it",
                ExpectedDigest=to_text(want.digest),
                CalculatedDigest=to_text(found),
            )


def read_response(stored: StoredObject, head: Head, headers: Headers) -> Response:
    """Answer GET and HEAD of an object, with RFC 9110's conditions and one range."""
    etag = f'"{stored.etag}"'
    if_match, if_none_match = head.headers.get("if-match"), head.headers.get("if-none-match")
    if if_match is not None and if_match not in ("*", etag, stored.etag):
        raise StoreError("PreconditionFailed", Condition="If-Match")
    if if_none_match is not None and if_none_match in ("*", etag, stored.etag):
        raise StoreError("NotModified")
    start, stop = 0, stored.size
    status = 200
    wanted = _RANGE.fullmatch(head.headers.get("range", ""))
    if wanted and any(wanted.groups()):
        start, stop = _range(*wanted.groups(), size=stored.size)
        status = 206
        headers = (*headers, ("Content-Range", f"bytes {start}-{stop - 1}/{stored.size}"))
    base = (
        ("ETag", etag),
        ("Last-Modified", formatdate(stored.modified_s, usegmt=True)),
        ("Accept-Ranges", "bytes"),
    )
    body = () if head.method == "HEAD" else tuple(stored.pieces(start, stop))
    return Response(status, (*base, *headers), body, length=stop - start)


def _range(first: str, last: str, *, size: int) -> tuple[int, int]:
    """Return the first byte of a range and the byte after its last. Source: RFC 9110, section 14.1.2."""
    if not first:
        start, stop = max(size - int(last), 0), size
    else:
        start, stop = int(first), min(int(last) + 1, size) if last else size
    if start >= stop:
        raise StoreError(
            "InvalidRange", message="The requested range is not satisfiable", ActualObjectSize=str(size)
        )
    return start, stop
