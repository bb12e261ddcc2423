"""The content and the errors of a store: plain records, without behaviour."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

from tests.servers.strict_store.checksums import DIGESTS, digest_of, to_text

Conditions = Literal["enforced", "ignored", "501"]

# Codes of S3's error responses (Amazon S3 API reference, "Error responses") and their HTTP status.
_STATUS = {
    "AccessControlListNotSupported": 400,
    "AccessDenied": 403,
    "AuthenticationRequired": 401,  # GCS
    "AuthorizationHeaderMalformed": 400,
    "BadDigest": 400,
    "BucketAlreadyOwnedByYou": 409,
    "BucketNotEmpty": 409,
    "ConditionalRequestConflict": 409,
    "EntityTooLarge": 400,
    "EntityTooSmall": 400,
    "IncompleteBody": 400,
    "InternalError": 500,
    "InvalidAccessKeyId": 403,
    "InvalidArgument": 400,
    "InvalidDigest": 400,
    "InvalidPart": 400,
    "InvalidPartOrder": 400,
    "InvalidRange": 416,
    "InvalidRequest": 400,
    "KeyTooLongError": 400,
    "MalformedTrailerError": 400,
    "MalformedXML": 400,
    "MissingContentLength": 411,
    "NoSuchBucket": 404,
    "NoSuchKey": 404,
    "NoSuchUpload": 404,
    "NotImplemented": 501,
    "NotModified": 304,
    "PreconditionFailed": 412,
    "SignatureDoesNotMatch": 403,
    "SlowDown": 503,
    "TooManyRequests": 429,
    "XAmzContentSHA256Mismatch": 400,
}


class StoreError(Exception):
    """A refusal, under S3's code for it. `details` become elements of the answer, such as Condition."""

    def __init__(self, code: str, *, message: str = "", status: int | None = None, **details: str) -> None:
        super().__init__(message or code)
        self.code = code
        self.message = message or code
        self.status = _STATUS[code] if status is None else status
        self.details = details


@dataclass(frozen=True, slots=True)
class IfAbsent:
    """S3: If-None-Match: *, GCS: generation 0."""

    name: str = "If-None-Match"


@dataclass(frozen=True, slots=True)
class IfETag:
    etag: str
    name: str = "If-Match"


@dataclass(frozen=True, slots=True)
class IfGeneration:
    generation: int
    name: str = "ifGenerationMatch"


Condition = IfAbsent | IfETag | IfGeneration


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """The bytes of one request, and what is known of their digests: one at least."""

    name: str
    data: memoryview
    digests: Mapping[str, bytes]

    @property
    def etag(self) -> str:
        """An MD5 as on AWS where it is known, which it is of small bodies and where the client has sent one.

        AWS promises no MD5 either (SSE-KMS has none). No client takes the other form for one.
        """
        if "md5" in self.digests:
            return self.digests["md5"].hex()
        name = next(name for name in DIGESTS if name in self.digests)
        return f"{name}-{self.digests[name].hex()}"


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """`headers`: what the client wants to have back. `checksums`: base64 by name, such as crc32."""

    key: str
    blobs: tuple[Blob, ...]
    etag: str
    generation: int
    modified_s: float
    headers: Mapping[str, str] = field(default_factory=dict)
    checksums: Mapping[str, str] = field(default_factory=dict)
    checksum_type: str = "FULL_OBJECT"

    @cached_property
    def size(self) -> int:
        return sum(len(blob.data) for blob in self.blobs)

    @cached_property
    def crc32c(self) -> str:
        """The checksum of the whole object, as base64."""
        known = self.blobs[0].digests.get("crc32c") if len(self.blobs) == 1 else None
        return to_text(known or digest_of("crc32c", *(blob.data for blob in self.blobs)))

    @property
    def md5(self) -> str | None:
        """The digest as base64, if the object was sent in one piece and the digest is known."""
        known = self.blobs[0].digests.get("md5") if len(self.blobs) == 1 else None
        return to_text(known) if known else None

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes from `start` to before `stop`."""
        for blob in self.blobs:
            size = len(blob.data)
            if start < size and stop > 0:
                yield blob.data[max(start, 0) : stop]
            start, stop = start - size, stop - size


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    number: int
    blob: Blob
    modified_s: float
    checksums: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Upload:
    """`checksum_type`: COMPOSITE, FULL_OBJECT, or empty: what the parts' algorithm has by itself."""

    upload_id: str
    bucket: str
    key: str
    initiated_s: float
    headers: Mapping[str, str] = field(default_factory=dict)
    checksum_type: str = ""
    parts: dict[int, Part] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartName:
    """One line of a request to complete an upload."""

    number: int
    etag: str
    checksums: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A part of a listing. `last`: the last key or prefix in it, after which the next page goes on."""

    objects: tuple[StoredObject, ...]
    prefixes: tuple[str, ...]
    truncated: bool
    last: str


Kind = Literal["buckets", "objects", "uploads", "parts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """All that a store holds. `objects` beside the names of their buckets."""

    buckets: tuple[str, ...] = ()
    objects: tuple[tuple[str, StoredObject], ...] = ()
    uploads: tuple[Upload, ...] = ()


class Keeper(Protocol):
    """Keeps what must outlive the process. All but `write_body` are called with the store's lock held."""

    def write_body(self, name: str, data: memoryview) -> memoryview:
        """Write a body; return the same bytes as they are read from now on."""

    def write(self, kind: Kind, name: str, value: object) -> None:
        """Write a value before the change is made in memory; `name` identifies it among those of its kind."""

    def remove(self, kind: Kind, name: str) -> None: ...

    def forget(self, blobs: Sequence[Blob]) -> None:
        """Delete blobs to which nothing refers any more."""

    def load(self) -> Contents: ...


class Memory:
    """A store in memory, which ends with the process."""

    def write_body(self, name: str, data: memoryview) -> memoryview:
        return data

    def write(self, kind: Kind, name: str, value: object) -> None:
        pass

    def remove(self, kind: Kind, name: str) -> None:
        pass

    def forget(self, blobs: Sequence[Blob]) -> None:
        pass

    def load(self) -> Contents:
        return Contents()
