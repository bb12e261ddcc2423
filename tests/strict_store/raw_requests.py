"""Requests that no client library would send."""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import ClientError


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


def send(
    endpoint: str, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
) -> Answer:
    """Send a request as it is, without a signature."""
    connection = http.client.HTTPConnection(urlsplit(endpoint).netloc, timeout=30)
    try:
        connection.request(method, path, body, dict(headers or {}))
        response = connection.getresponse()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


class _Signer(S3SigV4Auth):  # type: ignore[misc]  # botocore has no types
    payload_text = ""

    def payload(self, request: Any) -> str:
        return self.payload_text or str(super().payload(request))


def send_signed(
    endpoint: str,
    method: str,
    path: str,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    *,
    payload: str = "",
) -> Answer:
    """Send a request signed for S3. `payload`: a value of x-amz-content-sha256 other than the correct one."""
    request = AWSRequest(method, f"{endpoint}{path}", dict(headers or {}), body)
    signer = _Signer(Credentials("strict", "strict-secret"), "s3", "us-east-1")
    signer.payload_text = payload
    signer.add_auth(request)
    return send(endpoint, method, path, body, dict(request.headers.items()))


@contextmanager
def refused(code: str, status: int) -> Iterator[pytest.ExceptionInfo[Any]]:
    """botocore's error with this code and HTTP status."""
    with pytest.raises(ClientError) as caught:
        yield caught
    response = caught.value.response
    assert (response["Error"]["Code"], response["ResponseMetadata"]["HTTPStatusCode"]) == (code, status)
