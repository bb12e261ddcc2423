"""Google Cloud Storage through the XML API; google-auth finds the application default credentials."""

from __future__ import annotations

import base64
import os
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import quote

import google.auth
import google.auth.exceptions
import google_crc32c
import requests
from google.auth.transport.requests import Request
from obstore.store import GCSStore
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from ray_ckpt.errors import ConfigError
from ray_ckpt.location import Location
from ray_ckpt.storage.remote.file_store import Upload
from ray_ckpt.storage.remote.object_store import (
    LOG_REQUEST_S,
    MAX_TRIES,
    Checksum,
    client_options,
    retry_config,
    short_error,
)

SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"
ENDPOINT = "https://storage.googleapis.com"
EMULATOR_ENV = "STORAGE_EMULATOR_HOST"  # Google's clients read it too; an emulator gets no credentials
REQUEST_S = 30.0  # time for a request without a body
TOKEN_S = LOG_REQUEST_S  # time for a token, for which requests of the log wait too
BACKOFF_S = 0.2  # wait before the first retry, doubled for each further one: 6 s in all
UPLOADS_PER_PAGE = 1000  # the largest page of a listing by GCS


class GcsBucket:
    """See `object_store.Bucket`."""

    def __init__(self, location: Location, options: Mapping[str, str]) -> None:
        self.where = location.bare
        self._bucket = location.bucket
        self._prefix = f"{location.key}/" if location.key else ""
        self._endpoint, is_anonymous = server_of(location, options)
        self._lock = threading.Lock()
        self._credentials = None if is_anonymous else _credentials(location)
        self._session = requests.Session()
        self._session.auth = self._sign
        self._session.mount(self._endpoint, HTTPAdapter(max_retries=_retries()))

    def connect(self, *, request_s: int, retry_s: int, stall_s: int | None = None) -> GCSStore:
        config: Any = {"base_url": self._endpoint}
        if self._credentials is None:
            config |= {"skip_signature": True}
        return GCSStore(
            self._bucket,
            prefix=self._prefix.rstrip("/") or None,
            config=config,
            client_options=client_options(request_s, stall_s=stall_s),
            retry_config=retry_config(retry_s),
            credential_provider=None if self._credentials is None else self._provide,
        )

    def checksum(self) -> Checksum | None:
        return google_crc32c.Checksum()  # type: ignore[no-untyped-call]

    def has_checksum(self, name: str, checksum: Checksum | None) -> bool:
        """Compare with the CRC32C that GCS computes for every object; an emulator may have none."""
        stored = self._crc32c(name)
        return checksum is None or stored is None or stored == base64.b64encode(checksum.digest()).decode()

    def _crc32c(self, name: str) -> str | None:
        answer = self._send("HEAD", name)
        sums = dict(
            part.strip().partition("=")[::2] for part in answer.headers.get("x-goog-hash", "").split(",")
        )
        return sums.get("crc32c")

    def has_equal_checksums(self, one: str, other: str) -> bool:
        return self._crc32c(one) == self._crc32c(other)

    def copy_parts(self, source: str, name: str, size_bytes: int) -> bool:
        return False  # within a bucket GCS copies objects of any size in one request

    def uploads(self, folder: str) -> Iterator[Upload]:
        query = {"uploads": "", "max-uploads": str(UPLOADS_PER_PAGE)}
        query["prefix"] = f"{self._prefix}{folder}/" if folder else self._prefix
        while True:
            try:
                page = ElementTree.fromstring(self._send("GET", None, query).content)
                yield from [self._upload(found) for found in page.findall("{*}Upload")]
            except (ElementTree.ParseError, ValueError) as error:
                raise OSError(f"{self.where}: its uploads cannot be listed: {short_error(error)}") from None
            if page.findtext("{*}IsTruncated", "") != "true":
                return
            markers = ("key-marker", "{*}NextKeyMarker"), ("upload-id-marker", "{*}NextUploadIdMarker")
            following = {name: page.findtext(found, "") for name, found in markers}
            if not following["key-marker"] or following.items() <= query.items():
                raise OSError(f"{self.where}: its uploads cannot be listed: a page has no next one")
            query |= following

    def _upload(self, found: ElementTree.Element) -> Upload:
        started = datetime.fromisoformat(found.findtext("{*}Initiated", ""))
        return Upload(
            name=found.findtext("{*}Key", "").removeprefix(self._prefix),
            id=found.findtext("{*}UploadId", ""),
            started_s=(started if started.tzinfo else started.replace(tzinfo=UTC)).timestamp(),
        )

    def abort(self, upload: Upload) -> None:
        self._send("DELETE", upload.name, {"uploadId": upload.id}, absent_is_fine=True)

    def _send(
        self,
        method: str,
        name: str | None,
        query: Mapping[str, str] | None = None,
        *,
        absent_is_fine: bool = False,
    ) -> requests.Response:
        where = f"{self._endpoint}/{self._bucket}"
        if name is not None:
            where += "/" + quote(f"{self._prefix}{name}")
        try:
            answer = self._session.request(method, where, params=query, timeout=REQUEST_S)
        except (requests.RequestException, google.auth.exceptions.GoogleAuthError) as error:
            raise OSError(f"{self.where}: {short_error(error)}") from None
        if answer.ok or (absent_is_fine and answer.status_code == requests.codes.not_found):
            return answer
        raise OSError(f"{self.where}/{name or ''}: the store answered {answer.status_code} to {method}")

    def _sign(self, request: Any) -> Any:
        if self._credentials is not None:
            request.headers["Authorization"] = f"Bearer {self._provide()['token']}"
        return request

    def _provide(self) -> Any:
        """Return a valid token for obstore."""
        credentials = self._credentials
        assert credentials is not None
        with self._lock:
            if not credentials.valid:
                credentials.refresh(partial(Request(), timeout=TOKEN_S))
            expiry = credentials.expiry
        return {"token": credentials.token, "expires_at": expiry.replace(tzinfo=UTC) if expiry else None}


def _retries() -> Retry:
    """Return the same retries as obstore makes. Every request here is idempotent."""
    return Retry(
        total=MAX_TRIES - 1,
        backoff_factor=BACKOFF_S,
        backoff_jitter=BACKOFF_S,
        status_forcelist=(408, 429, 500, 502, 503, 504),
        raise_on_status=False,
        respect_retry_after_header=False,  # a server may request a wait of any length
    )


def _credentials(location: Location) -> Any:
    try:
        return google.auth.default(scopes=[SCOPE])[0]
    except (
        google.auth.exceptions.GoogleAuthError,
        AttributeError,  # the key file has other JSON than an object
    ) as error:
        raise no_credentials(location, error) from None


def no_credentials(location: Location, error: Exception) -> ConfigError:
    return ConfigError(
        f"This process has no Google credentials for {location}: {short_error(error)}",
        hint="Give every node GOOGLE_APPLICATION_CREDENTIALS, the account of its machine, or log in by "
        "`gcloud auth application-default login`.",
    )


def server_of(location: Location, options: Mapping[str, str]) -> tuple[str, bool]:
    """Return the URL of the server, and whether requests are sent without credentials."""
    emulator = os.environ.get(EMULATOR_ENV)
    endpoint = location.endpoint or options.get("endpoint_url") or emulator or ENDPOINT
    is_anonymous = options.get("anonymous") == "true" or endpoint == emulator
    scheme = "http" if endpoint == emulator else "https"  # other servers get a token, so HTTPS
    return (endpoint if "://" in endpoint else f"{scheme}://{endpoint}").rstrip("/"), is_anonymous
