"""AWS Signature Version 4 in headers, as a server checks it.

Sources: Amazon S3 API reference, "Authenticating Requests: Using the Authorization Header", and "Signature
Calculations for the Authorization Header: Transferring Payload in Multiple Chunks" with and without trailers.
The age of a request is not looked at: a store's clock may be set off on purpose. Signed URLs are not known.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, unquote_to_bytes

from tests.servers.strict_store.http1 import BadBody, Buffered, Fill, Head, hex_size
from tests.servers.strict_store.records import StoreError

_ALGORITHM = "AWS4-HMAC-SHA256"
_EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
SIGNED_CHUNKS = ("STREAMING-AWS4-HMAC-SHA256-PAYLOAD", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER")
UNSIGNED_CHUNKS = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"


@dataclass(frozen=True, slots=True)
class Credential:
    access_key: str
    secret_key: str


class ChunkSigner:
    """The chain of signatures over the chunks of one body, from the one of the request's head on."""

    def __init__(self, key: bytes, when: str, scope: str, seed: str) -> None:
        self._key = key
        self._lines = (when, scope)
        self._last = seed

    def check_chunk(self, signature: str, chunk_sha256: str) -> None:
        self._check(signature, "AWS4-HMAC-SHA256-PAYLOAD", _EMPTY_SHA256, chunk_sha256)

    def check_trailers(self, signature: str, trailers: bytes) -> None:
        self._check(signature, "AWS4-HMAC-SHA256-TRAILER", hashlib.sha256(trailers).hexdigest())

    def _check(self, signature: str, kind: str, *digests: str) -> None:
        text = "\n".join((kind, *self._lines, self._last, *digests))
        self._last = _hmac(self._key, text).hex()
        if not hmac.compare_digest(self._last, signature):
            raise StoreError("SignatureDoesNotMatch", message="a chunk's signature does not match")


def check_signature(head: Head, credential: Credential) -> ChunkSigner:
    """Check that `credential` has signed; StoreError as in S3. Return the checker of the body's chunks."""
    scheme, _, text = head.headers.get("authorization", "").partition(" ")
    if scheme != _ALGORITHM:
        raise StoreError("AccessDenied", message="the request is not signed")
    fields = dict(field.strip().partition("=")[::2] for field in text.split(","))
    access_key, _, scope = fields.get("Credential", "").partition("/")
    scope_parts = scope.split("/")
    if len(scope_parts) != 4 or scope_parts[2:] != ["s3", "aws4_request"]:
        raise StoreError("AuthorizationHeaderMalformed")
    if access_key != credential.access_key:
        raise StoreError("InvalidAccessKeyId")
    when = head.headers.get("x-amz-date", "")
    day, region = scope_parts[:2]
    if not when.startswith(day):
        raise StoreError("AccessDenied", message="x-amz-date is not of the day that is signed")
    signed = fields.get("SignedHeaders", "").split(";")
    _check_that_is_signed(head, signed)
    request = hashlib.sha256(_canonical_request(head, signed).encode("utf-8", "surrogateescape")).hexdigest()
    key = _signing_key(credential.secret_key, day, region)
    signature = _hmac(key, "\n".join((_ALGORITHM, when, scope, request))).hex()
    if not hmac.compare_digest(signature, fields.get("Signature", "")):
        raise StoreError("SignatureDoesNotMatch")
    return ChunkSigner(key, when, scope, signature)


def _check_that_is_signed(head: Head, signed: list[str]) -> None:
    needed = {"host", *(name for name in head.headers if name.startswith("x-amz-"))}
    missing = sorted(needed.difference(signed))
    if missing:
        raise StoreError("AccessDenied", message=f"headers are not signed: {', '.join(missing)}")
    if "x-amz-content-sha256" not in head.headers:
        raise StoreError("InvalidRequest", message="x-amz-content-sha256 is missing")


def _canonical_request(head: Head, signed: list[str]) -> str:
    lines = [f"{name}:{' '.join(head.headers.get(name, '').split())}" for name in signed]
    return "\n".join(
        (
            head.method,
            quote(unquote_to_bytes(head.raw_path), safe="/-_.~"),
            _canonical_query(head.raw_query),
            *lines,
            "",
            ";".join(signed),
            head.headers["x-amz-content-sha256"],
        )
    )


def _canonical_query(raw: str) -> str:
    pairs = parse_qsl(raw, keep_blank_values=True)
    quoted = sorted((quote(name, safe="-_.~"), quote(value, safe="-_.~")) for name, value in pairs)
    return "&".join(f"{name}={value}" for name, value in quoted)


def _signing_key(secret: str, day: str, region: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for text in (day, region, "s3", "aws4_request"):
        key = _hmac(key, text)
    return key


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")


class AwsChunked:
    """The body inside an aws-chunked one. `trailers`, if there are any, are filled in at its end."""

    def __init__(self, fill: Fill, *, signer: ChunkSigner | None, trailers: dict[str, str] | None) -> None:
        self._source = Buffered(fill)
        self._signer = signer
        self._trailers = trailers
        self._left = 0
        self._signature = ""
        self._sha256 = hashlib.sha256()
        self._ended = False

    def __call__(self, view: memoryview) -> int:
        if self._ended:
            return 0
        if not self._left and not self._next_chunk():
            return 0
        count = self._source.readinto(view[: self._left])
        if not count:
            raise BadBody("the body ends inside a chunk")
        if self._signer:
            self._sha256.update(view[:count])
        self._left -= count
        if not self._left:
            self._end_chunk()
        return count

    def _next_chunk(self) -> bool:
        size, _, extension = self._source.line().partition(b";")
        self._left = hex_size(size)
        self._signature = extension.decode("latin-1").removeprefix("chunk-signature=")
        if self._left:
            return True
        self._ended = True
        self._check()
        if self._trailers is not None:
            self._read_trailers(self._trailers)
        else:
            self._source.line()
        return False

    def _end_chunk(self) -> None:
        if self._source.line():
            raise BadBody("a chunk does not end where it should")
        self._check()

    def _check(self) -> None:
        if self._signer:
            self._signer.check_chunk(self._signature, self._sha256.hexdigest())
            self._sha256 = hashlib.sha256()

    def _read_trailers(self, trailers: dict[str, str]) -> None:
        while line := self._source.line():
            name, _, value = line.decode("latin-1").partition(":")
            trailers[name.strip().lower()] = value.strip()
        signature = trailers.pop("x-amz-trailer-signature", "")
        if self._signer:
            text = "".join(f"{name}:{value}\n" for name, value in trailers.items())
            self._signer.check_trailers(signature, text.encode())
