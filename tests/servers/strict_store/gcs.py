"""GCS's own part of the XML API: bearer tokens, generations, x-goog-hash.

Sources: Google Cloud Storage documentation, "XML API": "Request headers and query string parameters", "HTTP
status and error codes", "XML API multipart uploads".
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from tests.servers.strict_store.api import Expected, Request, expected_digest
from tests.servers.strict_store.http1 import Head, Headers
from tests.servers.strict_store.objects import Objects
from tests.servers.strict_store.records import Condition, IfGeneration, StoredObject, StoreError
from tests.servers.strict_store.xml_api import XmlApi

_GENERATION = "x-goog-if-generation-match"
_WRITES = ("PutObject", "CopyObject", "DeleteObject")  # operations that know preconditions
_NOT_HERE = ("x-goog-if-metageneration-match", "x-goog-acl", "x-goog-encryption-", "x-amz-")


class Gcs(XmlApi):
    vendor = "x-goog-"
    own_query = frozenset({"generation"})
    misses_deleted = True

    def __init__(self, objects: Objects, token: str) -> None:
        super().__init__(objects)
        self._token = token

    def authorize(self, request: Request) -> None:
        check_token(request.head, self._token)

    def check_headers(self, request: Request) -> None:
        for name in request.head.headers:
            if name.startswith(_NOT_HERE):
                raise StoreError("NotImplemented", Header=name)
        if _GENERATION in request.head.headers and request.operation not in _WRITES:
            raise StoreError("NotImplemented", message=f"{request.operation} knows no preconditions")
        if "generation" in request.head.query and request.operation not in ("GetObject", "HeadObject"):
            raise StoreError("NotImplemented", message=f"{request.operation} of a generation")

    def condition(self, request: Request) -> Condition | None:
        return generation_condition(request.head.headers.get(_GENERATION))

    def object_headers(self, stored: StoredObject, head: Head) -> Headers:
        return (
            ("x-goog-generation", str(stored.generation)),
            ("x-goog-metageneration", "1"),
            ("x-goog-stored-content-length", str(stored.size)),
            ("x-goog-hash", goog_hash(stored)),
        )

    def expected(self, request: Request) -> Sequence[Expected]:
        headers = request.head.headers
        sums = goog_hashes(headers.get("x-goog-hash", ""))
        if "content-md5" in headers:
            sums.append(("md5", headers["content-md5"]))
        return [expected_digest(name, text) for name, text in sums]


def goog_hash(stored: StoredObject) -> str:
    """CRC-32C of every object; an MD5 where the object was sent in one piece, if it is known."""
    return f"crc32c={stored.crc32c}" + (f",md5={stored.md5}" if stored.md5 else "")


def goog_hashes(text: str) -> list[tuple[str, str]]:
    """Return names and base64 texts of x-goog-hash."""
    sums = []
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        if name not in ("crc32c", "md5"):
            raise StoreError("InvalidDigest", message=f"{name!r} is no digest of GCS's")
        sums.append((name, value))
    return sums


def generation_condition(text: str | None) -> Condition | None:
    if text is None:
        return None
    if not text.isdecimal():
        raise StoreError("InvalidArgument", message="a generation is a number")
    return IfGeneration(int(text))


def check_token(head: Head, token: str) -> None:
    if not hmac.compare_digest(head.headers.get("authorization", ""), f"Bearer {token}"):
        raise StoreError("AuthenticationRequired", message="Invalid Credentials")
