"""S3's own part of the XML API: signatures, checksums, conditions.

Sources: Amazon S3 API reference for headers and error codes; Amazon S3 user guide, "Add preconditions to S3
operations with conditional requests" and "Checking object integrity".
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.servers.strict_store.api import Expected, Request, expected_digest
from tests.servers.strict_store.checksums import S3_CHECKSUMS
from tests.servers.strict_store.http1 import Fill, Head, Headers
from tests.servers.strict_store.objects import Objects
from tests.servers.strict_store.records import Condition, IfAbsent, IfETag, StoredObject, StoreError
from tests.servers.strict_store.signing import (
    SIGNED_CHUNKS,
    UNSIGNED_CHUNKS,
    AwsChunked,
    Credential,
    check_signature,
)
from tests.servers.strict_store.xml_api import XmlApi

_CHECKSUM = "x-amz-checksum-"
_CHECKSUMS = {_CHECKSUM + name for name in (*S3_CHECKSUMS, "algorithm", "mode", "type")}
_NOT_HERE = (
    "x-amz-tagging",
    "x-amz-object-lock-",
    "x-amz-server-side-encryption-customer-",
    "x-amz-website-",
)
_OWNER_ACL = "bucket-owner-full-control"  # changes nothing
_HEX_SHA256 = 64  # letters


class S3(XmlApi):
    vendor = "x-amz-"
    own_query = frozenset({"x-id"})  # the operation's name, which some SDKs add
    misses_deleted = False

    def __init__(self, objects: Objects, credential: Credential) -> None:
        super().__init__(objects)
        self._credential = credential

    def authorize(self, request: Request) -> None:
        request.signer = check_signature(request.head, self._credential)

    def check_headers(self, request: Request) -> None:
        headers = request.head.headers
        self._check_checksums_came(request)
        for name in headers:
            if name.startswith(_NOT_HERE) or (name.startswith(_CHECKSUM) and name not in _CHECKSUMS):
                raise StoreError("NotImplemented", Header=name)
            if name.startswith("x-amz-grant-"):
                raise StoreError("AccessControlListNotSupported")
        # As of a bucket whose owner owns all objects, the default since April 2023.
        if headers.get("x-amz-acl", _OWNER_ACL) != _OWNER_ACL:
            raise StoreError("AccessControlListNotSupported")

    def _check_checksums_came(self, request: Request) -> None:
        headers = request.head.headers
        came = bool(self._checksums(request))
        trailer = headers.get("x-amz-trailer", "").lower()
        if trailer and trailer not in request.trailers:
            raise StoreError("MalformedTrailerError")
        if request.operation == "DeleteObjects" and not came and "content-md5" not in headers:
            raise StoreError("InvalidRequest", message="Content-MD5 or a checksum is missing")
        sends = request.operation in ("PutObject", "UploadPart")
        if sends and not came and "x-amz-sdk-checksum-algorithm" in headers:
            raise StoreError("InvalidRequest", message="a checksum is named and not sent")

    def condition(self, request: Request) -> Condition | None:
        headers = request.head.headers
        none_match, match = headers.get("if-none-match"), headers.get("if-match")
        if none_match is not None and (
            match is not None or none_match != "*" or request.head.method == "DELETE"
        ):
            raise StoreError("NotImplemented", Header="If-None-Match")
        if none_match is not None:
            return IfAbsent()
        return None if match is None else IfETag(match.strip('"'))

    def object_headers(self, stored: StoredObject, head: Head) -> Headers:
        if head.headers.get("x-amz-checksum-mode", "").upper() != "ENABLED" or "range" in head.headers:
            return ()
        return self._checksum_headers(stored.checksums, stored.checksum_type)

    def decoded(self, request: Request, fill: Fill, length: int | None) -> tuple[Fill, int | None]:
        payload = request.head.headers.get("x-amz-content-sha256", "")
        if not payload.startswith("STREAMING-"):
            return fill, length
        if payload not in (*SIGNED_CHUNKS, UNSIGNED_CHUNKS):
            raise StoreError("NotImplemented", Header="x-amz-content-sha256")
        decoded = request.head.headers.get("x-amz-decoded-content-length", "")
        if not decoded.isdecimal():
            raise StoreError("MissingContentLength", message="x-amz-decoded-content-length is missing")
        trailers: dict[str, str] = {}
        request.trailers = trailers
        signer = request.signer if payload in SIGNED_CHUNKS else None
        has_trailers = payload.endswith("-TRAILER")
        return AwsChunked(fill, signer=signer, trailers=trailers if has_trailers else None), int(decoded)

    def digest_names(self, request: Request, length: int | None) -> Sequence[str]:
        trailer = request.head.headers.get("x-amz-trailer", "").lower()
        names = set(super().digest_names(request, length))
        names.update(name for name in S3_CHECKSUMS if trailer == _CHECKSUM + name)
        return sorted(names)

    def expected(self, request: Request) -> Sequence[Expected]:
        headers = request.head.headers
        found = []
        payload = headers.get("x-amz-content-sha256", "")
        if len(payload) == _HEX_SHA256:
            found.append(_payload_sha256(payload))
        elif not payload.startswith("STREAMING-") and payload != "UNSIGNED-PAYLOAD":
            raise StoreError("InvalidArgument", message="x-amz-content-sha256 is none of the known values")
        if "content-md5" in headers:
            found.append(expected_digest("md5", headers["content-md5"]))
        # On completion these are of the object, not of the request's body.
        if request.operation != "CompleteMultipartUpload":
            checksums = self._checksums(request)
            found += [expected_digest(name, text) for name, text in checksums.items()]
        return found


def _payload_sha256(text: str) -> Expected:
    try:
        digest = bytes.fromhex(text)
    except ValueError as error:
        raise StoreError("InvalidArgument", message="x-amz-content-sha256 is no hash") from error
    return Expected(name="sha256", digest=digest, code="XAmzContentSHA256Mismatch")
