"""Listings of unfinished uploads from servers whose pages do not end."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from ray_ckpt.location import Location
from ray_ckpt.storage.remote.fsspec_buckets import S3FsStore
from ray_ckpt.storage.remote.fsspec_store import FsspecStore
from ray_ckpt.storage.remote.gcs import GcsBucket

MAX_CALLS = 10
NEXT = (("", ""), ("same", "same"))


def page(key: str, upload: str) -> bytes:
    return (
        "<ListMultipartUploadsResult><IsTruncated>true</IsTruncated>"
        f"<NextKeyMarker>{key}</NextKeyMarker><NextUploadIdMarker>{upload}</NextUploadIdMarker>"
        "</ListMultipartUploadsResult>"
    ).encode()


@pytest.mark.parametrize(("key", "upload"), NEXT)
def test_gcs(monkeypatch: pytest.MonkeyPatch, key: str, upload: str) -> None:
    bucket, calls = GcsBucket(Location.parse("gs://bucket/x"), {"anonymous": "true"}), count()

    def send(*request: Any) -> Any:
        assert next(calls) < MAX_CALLS
        return SimpleNamespace(content=page(key, upload))

    monkeypatch.setattr(bucket, "_send", send)
    with pytest.raises(OSError, match="cannot be listed"):
        list(bucket.uploads("a"))


@pytest.mark.parametrize(("key", "upload"), (*NEXT, (None, None)))
def test_s3fs(key: str | None, upload: str | None) -> None:
    calls, store = count(), S3FsStore.__new__(S3FsStore)

    def call_s3(method: str, **request: Any) -> dict[str, Any]:
        assert next(calls) < MAX_CALLS
        markers = {} if key is None else {"NextKeyMarker": key, "NextUploadIdMarker": upload}
        return {"IsTruncated": True, **markers}

    FsspecStore.__init__(store, "s3://bucket/x", SimpleNamespace(call_s3=call_s3), "bucket/x")
    store._bucket = "bucket"
    with pytest.raises(OSError, match="cannot be listed"):
        list(store.uploads("a"))
