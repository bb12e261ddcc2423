"""Clients of URLs, by their scheme and backend. Each library is imported only where it is needed."""

from __future__ import annotations

from collections.abc import Mapping

from ray_ckpt.location import BUCKETS, Location, resolve_options
from ray_ckpt.storage.remote.file_store import FileStore
from ray_ckpt.storage.remote.object_log import SmallObjects
from ray_ckpt.storage.remote.object_store import Bucket, BucketFiles, BucketObjects


def open_objects(location: Location, options: Mapping[str, str]) -> tuple[FileStore, SmallObjects]:
    """Open a URL; return the client for shards and the one for the log."""
    options = resolve_options(options)
    if location.scheme in BUCKETS and options.get("backend") == "fsspec":
        from ray_ckpt.storage.remote.fsspec_buckets import open_buckets

        return open_buckets(location, options)
    if location.scheme == "s3":
        from ray_ckpt.storage.remote.s3 import S3Bucket

        bucket: Bucket = S3Bucket(location, options)
    elif location.scheme == "gs":
        from ray_ckpt.storage.remote.gcs import GcsBucket

        bucket = GcsBucket(location, options)
    else:
        from ray_ckpt.storage.remote.fsspec_store import FsspecStore

        other = FsspecStore.open(location, options)
        return other, other
    return BucketFiles(bucket), BucketObjects(bucket)
