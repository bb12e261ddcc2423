"""s3fs and gcsfs under schemes for which ray_ckpt has no clients of its own: so it opens them by fsspec."""

from __future__ import annotations

from gcsfs import GCSFileSystem
from s3fs import S3FileSystem


class PlainS3(S3FileSystem):  # type: ignore[misc]
    protocol = ("s3fs",)


class PlainGcs(GCSFileSystem):  # type: ignore[misc]
    protocol = ("gcsfs",)
