"""S3 and what speaks its API. Credentials, profile, region and endpoint as botocore finds them.

So what `aws s3 ls` can see, ray_ckpt can: environment variables, a profile with single sign-on or a role to
assume, container and instance roles. They stay in this process and are asked for again before they expire.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import botocore.exceptions
import botocore.loaders
import botocore.session
from obstore.store import S3Store

from ray_ckpt.errors import ConfigError
from ray_ckpt.location import Location
from ray_ckpt.storage.file_store import Upload
from ray_ckpt.storage.object_store import Checksum, client_options, retry_config, short_error

CREDENTIALS_S = 600  # after which botocore is asked again; it renews what expires by itself
AMAZON = ".amazonaws.com"
DEFAULT_REGION = "us-east-1"
RETRIES = {"max_attempts": 5, "mode": "standard"}  # of botocore, for uploads: 15 s at most
CHECKSUMS = ("signature", "sha256", "crc64nvme")
"""How S3 is to check each part. signature: by the SHA-256 that SigV4 signs, which every S3 server knows;
crc64nvme: the cheapest, on Amazon's."""


_LOADER = (
    botocore.loaders.create_loader()
)  # of the API's description: takes longer to read than anything else


class S3Bucket:
    """See `object_store.Bucket`."""

    def __init__(self, location: Location, options: Mapping[str, str]) -> None:
        self.where = location.bare
        self._bucket = location.bucket
        self._prefix = f"{location.key}/" if location.key else ""
        self._options = options
        self._is_anonymous = options.get("anonymous") == "true"
        self._lock = threading.Lock()
        session = _session(options.get("profile"))
        self._credentials = None if self._is_anonymous else _credentials(session, location)
        self._ca_bundle = session.get_config_variable(
            "ca_bundle"
        )  # AWS_CA_BUNDLE, of a store with its own CA
        self._client = session.create_client(
            "s3",
            region_name=location.region
            or options.get("region")
            or session.get_config_variable("region")
            or DEFAULT_REGION,
            endpoint_url=location.endpoint or options.get("endpoint_url"),
            config=_config(self._is_anonymous),
        )
        endpoint = self._client.meta.endpoint_url
        self._endpoint = None if endpoint in _usual_endpoints(self._client.meta.region_name) else endpoint
        self._checksum = options.get("checksum", "crc64nvme" if endpoint.endswith(AMAZON) else "signature")
        if self._checksum not in CHECKSUMS:
            raise ConfigError(
                f"The storage option checksum is {self._checksum!r}.",
                hint=f"Set it to one of {', '.join(CHECKSUMS)}.",
            )

    def connect(self, *, request_s: int, retry_s: int) -> S3Store:
        config: Any = {"region": self._client.meta.region_name}
        if self._endpoint:
            config |= {"endpoint": self._endpoint, "virtual_hosted_style_request": False}
        if self._checksum != "signature":
            config |= {"checksum_algorithm": self._checksum, "unsigned_payload": True}
        if sse := self._options.get("sse"):
            config |= {"server_side_encryption": sse}
        if key_id := self._options.get("sse_kms_key_id"):
            config |= {"sse_kms_key_id": key_id}
        if self._is_anonymous:
            config |= {"skip_signature": True}
        return S3Store(
            self._bucket,
            prefix=self._prefix.rstrip("/") or None,
            config=config,
            client_options=client_options(request_s, ca_bundle=self._ca_bundle),
            retry_config=retry_config(retry_s),
            credential_provider=None if self._is_anonymous else self._provide,
        )

    def checksum(self) -> Checksum | None:
        return None

    def has_checksum(self, name: str, checksum: Checksum | None) -> bool:
        return True

    def uploads(self, folder: str) -> Iterator[Upload]:
        prefix = f"{self._prefix}{folder}/" if folder else self._prefix
        pages = self._client.get_paginator("list_multipart_uploads").paginate(
            Bucket=self._bucket, Prefix=prefix
        )
        try:
            for page in pages:
                for found in page.get("Uploads", ()):
                    yield Upload(
                        name=found["Key"].removeprefix(self._prefix),
                        id=found["UploadId"],
                        started_s=found["Initiated"].timestamp(),
                    )
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
            raise OSError(f"{self.where}: its uploads cannot be listed: {short_error(error)}") from None

    def abort(self, upload: Upload) -> None:
        try:
            self._client.abort_multipart_upload(
                Bucket=self._bucket, Key=f"{self._prefix}{upload.name}", UploadId=upload.id
            )
        except self._client.exceptions.NoSuchUpload:
            pass
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
            raise OSError(f"{self.where}/{upload.name}: {short_error(error)}") from None

    def _provide(self) -> Any:
        """The credentials of now, for obstore."""
        assert self._credentials is not None
        with self._lock:
            now = self._credentials.get_frozen_credentials()
        return {
            "access_key_id": now.access_key,
            "secret_access_key": now.secret_key,
            "token": now.token,
            "expires_at": datetime.now(UTC) + timedelta(seconds=CREDENTIALS_S),
        }


def _session(profile: str | None) -> Any:
    session = botocore.session.Session(profile=profile)
    session.register_component("data_loader", _LOADER)
    try:
        session.get_scoped_config()
    except botocore.exceptions.ProfileNotFound:
        raise ConfigError(
            f"There is no AWS profile {profile or session.profile!r} here.",
            hint="Put it into ~/.aws/config of every node, or change AWS_PROFILE or storage option profile.",
        ) from None
    return session


def _usual_endpoints(region: str) -> tuple[str, ...]:
    """Those that obstore finds by itself; others of Amazon's (in a VPC, FIPS, dual stack) it must be told."""
    return f"https://s3.{region}{AMAZON}", f"https://s3{AMAZON}"


def _credentials(session: Any, location: Location) -> Any:
    try:
        found = session.get_credentials()
    except (botocore.exceptions.BotoCoreError, ValueError) as error:  # ValueError: what it got is no JSON
        raise ConfigError(f"The AWS credentials for {location} cannot be had: {short_error(error)}") from None
    if found is None:
        raise ConfigError(
            f"This process has no AWS credentials for {location}.",
            hint="Give every node AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile (AWS_PROFILE or "
            "storage_options['profile']) or a role; in `ray job submit` by runtime_env's env_vars.",
        )
    return found


def _config(is_anonymous: bool) -> Any:
    from botocore import UNSIGNED
    from botocore.config import Config

    signature = {"signature_version": UNSIGNED} if is_anonymous else {}
    return Config(
        connect_timeout=5, read_timeout=30, retries=RETRIES, s3={"addressing_style": "auto"}, **signature
    )
