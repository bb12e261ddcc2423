"""S3 and GCS through s3fs and gcsfs: `storage_options={"backend": "fsspec"}`. `design/0025` compares the two.

s3fs and gcsfs find credentials and settings themselves: in the vendors' variables and files, and in fsspec's
configuration. A log record is one conditional request; a shard is one stream of parts.
"""

from __future__ import annotations

import base64
import contextlib
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import botocore.exceptions
import fsspec
import fsspec.asyn
import google.auth.exceptions
import google_crc32c

from ray_ckpt.errors import ConfigError, missing_package
from ray_ckpt.location import Location
from ray_ckpt.storage.remote import object_store, s3
from ray_ckpt.storage.remote.file_store import Upload
from ray_ckpt.storage.remote.fsspec_store import UNCACHED, FsspecStore
from ray_ckpt.storage.remote.gcs import no_credentials as no_google_credentials
from ray_ckpt.storage.remote.gcs import server_of
from ray_ckpt.storage.remote.object_store import CONNECT_S, Checksum


class BucketStore(FsspecStore):
    """A prefix of a bucket."""

    _is_bucket_seen = False

    def create(self, name: str, data: bytes) -> None:
        with self._errors(name):
            self._fs.pipe_file(self._path(name), data, mode="create", chunksize=len(data) + 1)

    def copy(self, source: str, name: str) -> int:
        with self._errors(name):
            self._fs.cp_file(self._path(source), self._path(name))
        copied, copied_from = self._info(name), self._info(source)
        if copied is None or copied_from is None:
            raise FileNotFoundError(f"{self.where}: {source} or its copy {name} is not there")
        size = int(copied["size"])
        if size != copied_from["size"] or not self._has_equal_checksums(copied, copied_from):
            raise OSError(f"{self.where}/{name}: the store has {size} bytes, or other ones, of {source}.")
        return size

    def _has_equal_checksums(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        return True  # S3 compares the checksum of an object with that of its copy

    def _make_parent(self, path: str) -> None:
        pass  # nothing to create; s3fs would create the bucket

    def _check_root(self) -> None:
        """Raise OSError if the bucket does not exist, so that a listing of it is not reported as empty."""
        if not self._is_bucket_seen:
            try:
                self._fs.find(f"{self._root}/{uuid.uuid4().hex}")
            except FileNotFoundError:
                raise OSError(f"{self.where}: the bucket is not there (NoSuchBucket)") from None
            except Exception:  # for example no permission to list: the bucket may exist
                return
            self._is_bucket_seen = True


class S3FsStore(BucketStore):
    """S3 through s3fs. Each part is sent with a signed SHA-256, which the store checks."""

    def __init__(self, location: Location, options: Mapping[str, str], *, request_s: int) -> None:
        try:
            from s3fs import S3FileSystem
        except ImportError:
            raise missing_package("s3fs", "fsspec", "The backend fsspec for s3://") from None
        if options.get("checksum", "signature") != "signature":
            raise ConfigError(
                f"The backend fsspec cannot check parts by {options['checksum']!r}.",
                hint="Leave the storage option checksum out, or use the backend obstore.",
                option="checksum",
            )
        is_anonymous = options.get("anonymous") == "true"
        region = location.region or options.get("region")
        added = {"ServerSideEncryption": options.get("sse"), "SSEKMSKeyId": options.get("sse_kms_key_id")}
        config: dict[str, Any] = {
            "connect_timeout": CONNECT_S,
            "read_timeout": request_s,
            "retries": s3.RETRIES,
        }
        if not is_anonymous:
            config |= {
                "s3": {"payload_signing_enabled": True},
                "request_checksum_calculation": "when_required",
            }
        settings = {
            "endpoint_url": location.endpoint or options.get("endpoint_url"),
            "profile": options.get("profile"),
            "anon": is_anonymous or None,
            "client_kwargs": {"region_name": region} if region else None,
            "s3_additional_kwargs": {name: value for name, value in added.items() if value} or None,
        }
        try:
            fs = S3FileSystem(
                config_kwargs=config,
                fixed_upload_size=True,
                **{name: value for name, value in settings.items() if value is not None},
                **UNCACHED,
            )
            fs.connect()
            if not (is_anonymous or fs.key) and fsspec.asyn.sync(fs.loop, fs.session.get_credentials) is None:
                raise s3.no_credentials(location)
        except botocore.exceptions.ProfileNotFound:
            raise s3.no_profile(options.get("profile")) from None
        except (botocore.exceptions.BotoCoreError, ValueError, OSError) as error:
            if isinstance(error, ConfigError):
                raise
            raise s3.unusable_settings(location, error) from None
        super().__init__(location.bare, fs, location.path)
        self._bucket = location.bucket

    def uploads(self, folder: str = "") -> Iterator[Upload]:
        query = {"Bucket": self._bucket, "Prefix": f"{self._path(folder).partition('/')[2]}/".lstrip("/")}
        while True:
            with self._errors(folder):
                page = self._fs.call_s3("list_multipart_uploads", **query)
            for found in page.get("Uploads", ()):
                yield Upload(
                    name=self._name(f"{self._bucket}/{found['Key']}"),
                    id=found["UploadId"],
                    started_s=found["Initiated"].timestamp(),
                )
            if not page.get("IsTruncated"):
                return
            markers = ("KeyMarker", "UploadIdMarker")
            following = {name: found for name in markers if (found := page.get(f"Next{name}"))}
            if "KeyMarker" not in following or following.items() <= query.items():
                raise OSError(f"{self.where}: its uploads cannot be listed: a page has no next one")
            query |= following

    def abort(self, upload: Upload) -> None:
        key = self._path(upload.name).partition("/")[2]
        with contextlib.suppress(FileNotFoundError), self._errors(upload.name):
            self._fs.call_s3("abort_multipart_upload", Bucket=self._bucket, Key=key, UploadId=upload.id)


class GcsFsStore(BucketStore):
    """GCS through gcsfs. Puts and copies are compared by the CRC32C that GCS computes for each object.

    gcsfs sends resumable uploads. GCS does not list or bill unfinished ones, and deletes them after a week.
    """

    def __init__(self, location: Location, options: Mapping[str, str], *, request_s: int) -> None:
        try:
            from gcsfs.core import GCSFileSystem  # gcsfs.GCSFileSystem sends gRPC requests for bucket types
        except ImportError:
            raise missing_package("gcsfs", "fsspec", "The backend fsspec for gs://") from None
        endpoint, is_anonymous = server_of(location, options)
        settings = {"token": "anon" if is_anonymous else "google_default"}
        if not is_anonymous and any(
            "token" in fsspec.config.conf.get(scheme, {}) for scheme in ("gs", "gcs")
        ):
            settings = {}  # fsspec adds the settings of its configuration
        try:
            fs = GCSFileSystem(
                endpoint_url=endpoint,
                access="read_write",
                requests_timeout=request_s,
                **settings,
                **UNCACHED,
            )
        except (google.auth.exceptions.GoogleAuthError, ValueError, OSError) as error:
            raise no_google_credentials(location, error) from None
        super().__init__(location.bare, fs, location.path)

    def _checksum(self) -> Checksum | None:
        return google_crc32c.Checksum()  # type: ignore[no-untyped-call]

    def _has_checksum(self, info: Mapping[str, Any], checksum: Checksum | None) -> bool:
        stored = info.get("crc32c")  # an emulator may not compute checksums
        return stored is None or checksum is None or stored == base64.b64encode(checksum.digest()).decode()

    def _has_equal_checksums(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        return bool(one.get("crc32c") == other.get("crc32c"))


def open_buckets(location: Location, options: Mapping[str, str]) -> tuple[BucketStore, BucketStore]:
    """Open a bucket for files and, with short time-outs, for the log."""
    kind = S3FsStore if location.scheme == "s3" else GcsFsStore
    bulk_s = object_store.STALL_S if location.scheme == "s3" else object_store.PUT_S  # gcsfs: of a whole put
    return (
        kind(location, options, request_s=bulk_s),
        kind(location, options, request_s=object_store.LOG_REQUEST_S),
    )
