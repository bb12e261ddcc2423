"""Signatures against the worked examples of the Amazon S3 API reference, which also has the keys."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import pytest

from tests.servers.strict_store.http1 import Fill, Head
from tests.servers.strict_store.records import StoreError
from tests.servers.strict_store.signing import AwsChunked, Credential, check_signature

_CREDENTIAL = Credential("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
_SCOPE = "AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request"
_GET = {
    "host": "examplebucket.s3.amazonaws.com",
    "range": "bytes=0-9",
    "x-amz-content-sha256": hashlib.sha256(b"").hexdigest(),
    "x-amz-date": "20130524T000000Z",
}
_PUT = {
    "content-encoding": "aws-chunked",
    "content-length": "66824",
    "host": "s3.amazonaws.com",
    "x-amz-content-sha256": "STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
    "x-amz-date": "20130524T000000Z",
    "x-amz-decoded-content-length": "66560",
    "x-amz-storage-class": "REDUCED_REDUNDANCY",
}
_BODY = b"a" * 66560
_CHUNKS = (
    b"10000;chunk-signature=ad80c730a21e5b8d04586a2213dd63b9a0e99e0e2307b0ade35a65485a288648\r\n"
    + _BODY[:65536]
    + b"\r\n400;chunk-signature=0055627c9e194cb4542bae2aa5492e3c1575bbb81b612b7d234b86a503ef5497\r\n"
    + _BODY[65536:]
    + b"\r\n0;chunk-signature=b6c6ea8a5354eaf15b3cb7646744f4275b71ea724fed81ceb9323e279d449df9\r\n\r\n"
)
_TRAILED = {
    "content-encoding": "aws-chunked",
    "host": "s3.amazonaws.com",
    "x-amz-content-sha256": "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER",
    "x-amz-date": "20130524T000000Z",
    "x-amz-decoded-content-length": "66560",
    "x-amz-storage-class": "REDUCED_REDUNDANCY",
    "x-amz-trailer": "x-amz-checksum-crc32c",
}
_TRAILED_CHUNKS = (
    b"10000;chunk-signature=b474d8862b1487a5145d686f57f013e54db672cee1c953b3010fb58501ef5aa2\r\n"
    + _BODY[:65536]
    + b"\r\n400;chunk-signature=1c1344b170168f8e65b41376b44b20fe354e373826ccbbe2c1d40a8cae51e5c7\r\n"
    + _BODY[65536:]
    + b"\r\n0;chunk-signature=2ca2aba2005185cf7159c6277faf83795951dd77a3a99e6e65d5c9f85863f992\r\n"
    + b"x-amz-checksum-crc32c:sOO8/Q==\r\n"
    + b"x-amz-trailer-signature:d81f82fc3505edab99d459891051a732e8730629a2e4a59689829ca17fe2e435\r\n\r\n"
)


def _head(method: str, target: str, headers: Mapping[str, str], signature: str) -> Head:
    signed = ";".join(sorted(headers))
    text = f"AWS4-HMAC-SHA256 Credential={_SCOPE},SignedHeaders={signed},Signature={signature}"
    return Head(method, target, "HTTP/1.1", {**headers, "authorization": text})


def _get(**changed: str) -> Head:
    headers = {**_GET, **changed}
    return _head(
        "GET", "/test.txt", headers, "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    )


def _fill(data: bytes) -> Fill:
    at = 0

    def fill(view: memoryview) -> int:
        nonlocal at
        piece = data[at : at + min(len(view), 1000)]
        view[: len(piece)] = piece
        at += len(piece)
        return len(piece)

    return fill


def _decoded(head: Head, chunks: bytes, trailers: dict[str, str] | None) -> bytes:
    fill = AwsChunked(_fill(chunks), signer=check_signature(head, _CREDENTIAL), trailers=trailers)
    body, view = b"", memoryview(bytearray(5000))
    while count := fill(view):
        body += view[:count]
    return body


def _seed() -> Head:
    seed = "4f232c4386841ef735655705268965c44a0e4690baa4adea153f7db9fa80a0a9"
    return _head("PUT", "/examplebucket/chunkObject.txt", _PUT, seed)


def test_the_signature_of_a_head_is_checked() -> None:
    check_signature(_get(), _CREDENTIAL)
    with pytest.raises(StoreError, match="SignatureDoesNotMatch"):
        check_signature(_get(range="bytes=0-8"), _CREDENTIAL)


def test_signed_chunks_are_checked() -> None:
    assert _decoded(_seed(), _CHUNKS, None) == _BODY
    with pytest.raises(StoreError, match="a chunk's signature"):
        _decoded(_seed(), _CHUNKS.replace(b"aaaa\r\n400", b"aaab\r\n400"), None)


def test_signed_trailers_are_checked() -> None:
    seed = "106e2a8a18243abcf37539882f36619c00e2dfc72633413f02d3b74544bfeb8e"
    head = _head("PUT", "/examplebucket/chunkObject.txt", _TRAILED, seed)
    trailers: dict[str, str] = {}
    assert _decoded(head, _TRAILED_CHUNKS, trailers) == _BODY
    assert trailers == {"x-amz-checksum-crc32c": "sOO8/Q=="}
    with pytest.raises(StoreError, match="a chunk's signature"):
        _decoded(head, _TRAILED_CHUNKS.replace(b"sOO8", b"sOO9"), {})


def test_an_unknown_key_and_unsigned_headers_are_refused() -> None:
    with pytest.raises(StoreError, match="InvalidAccessKeyId"):
        check_signature(_get(), Credential("another", _CREDENTIAL.secret_key))
    unsigned = _get()
    headers = {**unsigned.headers, "x-amz-acl": "public-read"}
    with pytest.raises(StoreError, match="x-amz-acl"):
        check_signature(Head("GET", unsigned.target, unsigned.version, headers), _CREDENTIAL)
