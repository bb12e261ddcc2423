"""S3 and servers with its API. botocore finds credentials, profile, region and endpoint.

Therefore ray_ckpt can open each bucket that `aws s3 ls` can list: with credentials from environment
variables, from a profile with single sign-on or with a role to assume, or from a container or instance role.
Credentials stay in this process and are renewed before they expire.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import botocore.exceptions
import botocore.loaders
import botocore.session
from botocore import UNSIGNED
from botocore.config import Config
from botocore.credentials import RefreshableCredentials
from obstore.store import S3Store

from ray_ckpt.errors import ConfigError
from ray_ckpt.location import Location
from ray_ckpt.storage.remote.file_store import Upload
from ray_ckpt.storage.remote.object_store import Checksum, client_options, retry_config, short_error

CREDENTIALS_S = 600  # time between two reads of static credentials; botocore itself renews those of roles
AMAZON = ".amazonaws.com"
DEFAULT_REGION = "us-east-1"
RETRIES = {"max_attempts": 5, "mode": "standard"}  # of botocore, for requests about uploads: 15 s at most
MAX_COPY_BYTES = 5 << 30  # largest object that one CopyObject copies: the limit of S3
COPY_PART_BYTES = 1 << 30  # of a larger one: S3 copies a part of this size within the read time-out
CHECKSUMS = ("signature", "sha256", "crc64nvme")
"""Checksums by which S3 checks each part. signature: the SHA-256 that SigV4 signs, which every S3 server
supports; crc64nvme: the cheapest, on Amazon's endpoints."""


_LOADER = botocore.loaders.create_loader()  # shared, because reading the API's description is slow


class S3Bucket:
    """See `object_store.Bucket`."""

    def __init__(self, location: Location, options: Mapping[str, str]) -> None:
        self.where = location.bare
        self._bucket = location.bucket
        self._prefix = f"{location.key}/" if location.key else ""
        self._options = options
        self._is_anonymous = options.get("anonymous") == "true"
        self._lock = threading.Lock()
        self._location = location
        self._read_at_s = 0.0
        self._renew()
        self._checksum = options.get("checksum", "crc64nvme" if self._is_amazon else "signature")
        if self._checksum not in CHECKSUMS:
            raise ConfigError(
                f"The storage option checksum is {self._checksum!r}.",
                hint=f"Set it to one of {', '.join(CHECKSUMS)}.",
            )

    def _renew(self) -> None:
        """Read the environment and the vendor's files again, because keys may have changed."""
        location, options = self._location, self._options
        try:
            session = _session(options.get("profile"))
            credentials = None if self._is_anonymous else _credentials(session, location)
            ca_bundle = session.get_config_variable("ca_bundle")  # AWS_CA_BUNDLE, for a private CA
            roots = Path(ca_bundle).read_bytes() if ca_bundle else None
            region = location.region or options.get("region") or session.get_config_variable("region")
            client = session.create_client(
                "s3",
                region_name=region or DEFAULT_REGION,
                endpoint_url=location.endpoint or options.get("endpoint_url"),
                config=_config(self._is_anonymous),
            )
        except (botocore.exceptions.BotoCoreError, ValueError, OSError) as error:
            if isinstance(error, ConfigError):
                raise
            raise unusable_settings(location, error) from None
        self._read_at_s = time.monotonic()
        self._credentials, self._roots, self._client = credentials, roots, client
        self._is_amazon = client.meta.endpoint_url.endswith(AMAZON)

    def connect(self, *, request_s: int, retry_s: int, stall_s: int | None = None) -> S3Store:
        endpoint = self._client.meta.endpoint_url
        config: Any = {  # all explicit: obstore reads variables that botocore ignores
            "region": self._client.meta.region_name,
            "endpoint": endpoint,
            "aws_endpoint_url_s3": endpoint,
            "virtual_hosted_style_request": False,
            "conditional_put": "etag",
            "s3_express": False,
            "request_payer": False,
            "skip_signature": self._is_anonymous,
        }
        if self._checksum != "signature":
            config |= {"checksum_algorithm": self._checksum, "unsigned_payload": True}
        if sse := self._options.get("sse"):
            config |= {"server_side_encryption": sse}
        if key_id := self._options.get("sse_kms_key_id"):
            config |= {"sse_kms_key_id": key_id}
        return S3Store(
            self._bucket,
            prefix=self._prefix.rstrip("/") or None,
            config=config,
            client_options=client_options(request_s, stall_s=stall_s, roots=self._roots),
            retry_config=retry_config(retry_s),
            credential_provider=None if self._is_anonymous else self._provide,
        )

    def checksum(self) -> Checksum | None:
        return None

    def has_checksum(self, name: str, checksum: Checksum | None) -> bool:
        return True

    def has_equal_checksums(self, one: str, other: str) -> bool:
        return True  # S3 compares the checksum of an object with that of its copy

    def copy_parts(self, source: str, name: str, size_bytes: int) -> bool:
        """Copy an object that CopyObject refuses for its size."""
        if size_bytes <= MAX_COPY_BYTES:
            return False
        target = {"Bucket": self._bucket, "Key": f"{self._prefix}{name}"}
        origin = {"Bucket": self._bucket, "Key": f"{self._prefix}{source}"}
        try:
            upload = self._client.create_multipart_upload(**target, **self._encryption())
            target["UploadId"] = upload["UploadId"]
            parts = []
            for number, start in enumerate(range(0, size_bytes, COPY_PART_BYTES), 1):
                end = min(start + COPY_PART_BYTES, size_bytes) - 1
                part = self._client.upload_part_copy(
                    **target, PartNumber=number, CopySource=origin, CopySourceRange=f"bytes={start}-{end}"
                )
                parts.append({"PartNumber": number, "ETag": part["CopyPartResult"]["ETag"]})
            self._client.complete_multipart_upload(**target, MultipartUpload={"Parts": parts})
        except Exception as error:  # also for an answer of a server that lacks what the API promises
            if "UploadId" in target:
                with contextlib.suppress(OSError):
                    self.abort(Upload(name=name, id=target["UploadId"], started_s=0.0))
            raise OSError(f"{self.where}/{name}: {type(error).__name__}: {short_error(error)}") from None
        return True

    def _encryption(self) -> dict[str, str]:
        """Return the settings that obstore sends with its own uploads."""
        names = {"ServerSideEncryption": "sse", "SSEKMSKeyId": "sse_kms_key_id"}
        return {name: value for name, key in names.items() if (value := self._options.get(key))}

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
        """Return the current credentials for obstore. Static ones are read again after CREDENTIALS_S."""
        with self._lock:
            is_old = time.monotonic() - self._read_at_s >= CREDENTIALS_S
            if is_old and not isinstance(self._credentials, RefreshableCredentials):
                with contextlib.suppress(ConfigError):  # the old credentials may still be valid
                    self._renew()
            assert self._credentials is not None
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
        raise no_profile(profile or session.profile) from None
    return session


def _credentials(session: Any, location: Location) -> Any:
    try:
        found = session.get_credentials()
    except (
        botocore.exceptions.BotoCoreError,
        ValueError,  # a credential provider returned invalid JSON
        AttributeError,  # it returned other JSON than an object
    ) as error:
        raise ConfigError(  # without the provider's text, which may contain a secret
            f"The AWS credentials for {location.bare} cannot be had: {type(error).__name__}.",
            hint="Ask for them by hand, such as by `aws sts get-caller-identity`, to see why.",
        ) from None
    if found is None:
        raise no_credentials(location)
    return found


def unusable_settings(location: Location, error: Exception) -> ConfigError:
    return ConfigError(
        f"{location.bare} cannot be opened with this process's AWS settings: {short_error(error)}",
        hint="Look at ~/.aws/config, the variables AWS_*, and the path's endpoint and region.",
    )


def no_profile(profile: str | None) -> ConfigError:
    return ConfigError(
        f"There is no AWS profile {profile!r} here.",
        hint="Put it into ~/.aws/config of every node, or change AWS_PROFILE or storage option profile.",
    )


def no_credentials(location: Location) -> ConfigError:
    return ConfigError(
        f"This process has no AWS credentials for {location.bare}.",
        hint="Give every node AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile (AWS_PROFILE or "
        "storage_options['profile']) or a role; in `ray job submit` by runtime_env's env_vars.",
    )


def _config(is_anonymous: bool) -> Config:
    signature = {"signature_version": UNSIGNED} if is_anonymous else {}
    return Config(
        connect_timeout=5, read_timeout=30, retries=RETRIES, s3={"addressing_style": "auto"}, **signature
    )
