"""GCS: the XML API through obstore, the JSON API through gcsfs, and requests that neither would send."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import gcsfs
import obstore
import pytest
from google.oauth2.credentials import Credentials
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import GCSStore

from tests.servers.strict_store import StrictStore
from tests.servers.strict_store.checksums import digest_of, to_text
from tests.strict_store.raw_requests import Answer, send

_TOKEN = {"authorization": "Bearer strict-token"}


@pytest.fixture
def gcs(store: StrictStore, bucket: str) -> GCSStore:
    return GCSStore(
        bucket,
        config={"base_url": store.endpoint, "bearer_token": "strict-token"},
        client_options={"allow_http": True},
    )


@pytest.fixture
def files(store: StrictStore, bucket: str) -> gcsfs.GCSFileSystem:
    return gcsfs.GCSFileSystem(
        endpoint_url=store.endpoint, token=Credentials("strict-token"), project="p", skip_instance_cache=True
    )


def _read(gcs: GCSStore, key: str) -> bytes:
    return bytes(obstore.get(gcs, key).bytes())


# -- XML, through obstore


def test_obstore_creates_a_name_once(gcs: GCSStore) -> None:
    obstore.put(gcs, "a b/ü", b"1", mode="create")
    with pytest.raises(AlreadyExistsError):
        obstore.put(gcs, "a b/ü", b"2", mode="create")
    assert _read(gcs, "a b/ü") == b"1"
    assert bytes(obstore.get_range(gcs, "a b/ü", start=0, end=1)) == b"1"


def test_obstore_replaces_the_generation_that_it_has_read(gcs: GCSStore) -> None:
    first = obstore.put(gcs, "k", b"1")["version"]
    second = obstore.put(gcs, "k", b"2", mode={"version": first})["version"]
    assert first is not None and second is not None and int(second) > int(first)
    with pytest.raises(PreconditionError):
        obstore.put(gcs, "k", b"3", mode={"version": first})
    assert obstore.head(gcs, "k")["version"] == second
    with pytest.raises(FileNotFoundError):
        obstore.get(gcs, "k", options={"version": first})


def test_of_sixteen_that_create_a_name_through_obstore_one_wins(gcs: GCSStore) -> None:
    def create(me: int) -> bool:
        try:
            obstore.put(gcs, "k", bytes([me]), mode="create")
        except AlreadyExistsError:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        won = [me for me, created in enumerate(pool.map(create, range(16))) if created]
    assert _read(gcs, "k") == bytes(won)


def test_obstore_uploads_in_parts_and_lists(gcs: GCSStore, store: StrictStore, bucket: str) -> None:
    body = random.Random(3).randbytes((11 << 20) + 5)
    obstore.put(gcs, "dir/big", io.BytesIO(body), chunk_size=5 << 20, use_multipart=True)
    assert store.stats()["requests"]["CompleteMultipartUpload"][200] >= 1
    assert _read(gcs, "dir/big") == body
    obstore.copy(gcs, "dir/big", "other")
    listed = obstore.list_with_delimiter(gcs)
    assert (list(listed["common_prefixes"]), [meta["path"] for meta in listed["objects"]]) == (
        ["dir"],
        ["other"],
    )
    obstore.delete(gcs, ["dir/big", "other"])
    assert store.keys(bucket) == []


def _xml(store: StrictStore, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
    return send(
        store.endpoint, method, path, body, {**_TOKEN, **{k.replace("_", "-"): v for k, v in headers.items()}}
    )


def test_hashes_are_compared_and_returned(store: StrictStore, bucket: str) -> None:
    right, wrong = to_text(digest_of("crc32c", b"body")), to_text(digest_of("crc32c", b"another"))
    path = f"/{bucket}/k"
    assert b"BadDigest" in _xml(store, "PUT", path, b"body", x_goog_hash=f"crc32c={wrong}").body
    assert (
        b"BadDigest"
        in _xml(store, "PUT", path, b"body", x_goog_hash=f"crc32c={right},md5=AAAAAAAAAAAAAAAAAAAAAA==").body
    )
    assert store.keys(bucket) == []
    assert _xml(store, "PUT", path, b"body", x_goog_hash=f"crc32c={right}").status == 200
    assert f"crc32c={right}" in _xml(store, "HEAD", path).headers["x-goog-hash"]


def test_preconditions_where_there_are_none_are_refused(store: StrictStore, bucket: str) -> None:
    answer = _xml(store, "POST", f"/{bucket}/k?uploads", x_goog_if_generation_match="0")
    assert answer.status == 501
    assert _xml(store, "PUT", f"/{bucket}/k", x_goog_if_metageneration_match="1").status == 501


def test_who_has_not_the_token_gets_nothing(store: StrictStore, bucket: str) -> None:
    wrong = {"authorization": "Bearer another"}
    assert send(store.endpoint, "PUT", f"/{bucket}/k", b"body", wrong).status == 401
    answer = send(store.endpoint, "GET", f"/storage/v1/b/{bucket}/o", headers=wrong)
    assert (answer.status, json.loads(answer.body)["error"]["errors"][0]["reason"]) == (401, "authError")
    assert send(store.endpoint, "GET", f"/storage/v1/b/{bucket}").status == 401


def test_both_apis_see_the_same_objects(store: StrictStore, gcs: GCSStore, s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"1")
    assert _read(gcs, "k") == b"1"
    with pytest.raises(AlreadyExistsError):
        obstore.put(gcs, "k", b"2", mode="create")


# -- JSON, through gcsfs


def test_gcsfs_creates_a_name_once(files: gcsfs.GCSFileSystem, bucket: str) -> None:
    files.pipe_file(f"{bucket}/a b/k", b"1", mode="create", consistency="md5")
    with pytest.raises(FileExistsError):
        files.pipe_file(f"{bucket}/a b/k", b"2", mode="create")
    assert files.cat_file(f"{bucket}/a b/k") == b"1"


def test_gcsfs_uploads_in_chunks(
    files: gcsfs.GCSFileSystem, store: StrictStore, bucket: str, tmp_path: Any
) -> None:
    body = random.Random(4).randbytes((5 << 20) + 11)
    (tmp_path / "f").write_bytes(body)
    files.put_file(str(tmp_path / "f"), f"{bucket}/k", chunksize=1 << 20, consistency="md5", mode="create")
    with pytest.raises(FileExistsError):
        files.put_file(str(tmp_path / "f"), f"{bucket}/k", mode="create")
    with files.open(f"{bucket}/o", "wb", block_size=1 << 18) as out:
        out.write(body[:1_000_000])
    assert (files.cat_file(f"{bucket}/k"), files.cat_file(f"{bucket}/o")) == (body, body[:1_000_000])
    assert files.cat_file(f"{bucket}/k", start=7, end=99) == body[7:99]
    assert store.stats()["requests"]["UploadChunk"][308] >= 5


def test_gcsfs_lists_and_removes(files: gcsfs.GCSFileSystem, store: StrictStore, bucket: str) -> None:
    for name in ("a/1", "a/b/2", "c"):
        files.pipe_file(f"{bucket}/{name}", b"x")
    assert sorted(files.ls(bucket, detail=False)) == [f"{bucket}/a", f"{bucket}/c"]
    assert files.find(bucket) == [f"{bucket}/a/1", f"{bucket}/a/b/2", f"{bucket}/c"]
    assert files.info(f"{bucket}/c")["size"] == 1
    files.rm(f"{bucket}/a", recursive=True)
    assert store.keys(bucket) == ["c"]
    assert not files.exists(f"{bucket}/a/1")


def test_a_body_that_contains_the_boundary_is_refused(store: StrictStore, bucket: str) -> None:
    def insert(media: bytes) -> Answer:
        parts = b'--==0==\n\n{"name":"k"}\n--==0==\nContent-Type: text/x\n\n%s\n--==0==--' % media
        headers = {**_TOKEN, "content-type": 'multipart/related; boundary="==0=="'}
        return send(
            store.endpoint, "POST", f"/upload/storage/v1/b/{bucket}/o?uploadType=multipart", parts, headers
        )

    assert insert(b"abc\n--==0==\nrest").status == 400
    assert insert(b"abc\n--==0==--\nrest").status == 400
    assert store.keys(bucket) == []
    assert json.loads(insert(b"abc --==0==").body)["size"] == "11"


def _resume(
    store: StrictStore,
    location: str,
    body: bytes,
    content_range: str,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    parts = urlsplit(location)
    more = {**_TOKEN, "content-range": content_range, **(headers or {})}
    return send(store.endpoint, "PUT", f"{parts.path}?{parts.query}", body, more)


def test_a_resumable_upload_goes_on_where_it_was(store: StrictStore, bucket: str) -> None:
    path = f"/upload/storage/v1/b/{bucket}/o?uploadType=resumable&name=k&ifGenerationMatch=0"
    location = send(store.endpoint, "POST", path, headers=_TOKEN).headers["location"]
    step = 256 << 10
    body = random.Random(5).randbytes(2 * step + 3)
    total = len(body)

    assert _resume(store, location, body[: step + 1], f"bytes 0-{step}/{total}").status == 400
    assert _resume(store, location, body[step:], f"bytes {step}-{total - 1}/{total}").status == 400
    answer = _resume(store, location, body[:step], f"bytes 0-{step - 1}/*")
    assert (answer.status, answer.headers["range"]) == (308, f"bytes=0-{step - 1}")
    assert _resume(store, location, b"", f"bytes */{total}").headers["range"] == f"bytes=0-{step - 1}"
    assert store.keys(bucket) == []
    answer = _resume(store, location, body, f"bytes 0-{total - 1}/{total}")  # again from the start
    assert (answer.status, json.loads(answer.body)["size"]) == (200, str(total))
    assert _resume(store, location, b"", f"bytes */{total}").status == 404
    assert send(store.endpoint, "POST", path, headers=_TOKEN).status == 412


def test_the_hash_of_a_resumable_upload_is_compared_at_its_end(store: StrictStore, bucket: str) -> None:
    path = f"/upload/storage/v1/b/{bucket}/o?uploadType=resumable&name=k"
    location = send(store.endpoint, "POST", path, headers=_TOKEN).headers["location"]
    wrong = {"x-goog-hash": f"crc32c={to_text(digest_of('crc32c', b'another'))}"}
    assert _resume(store, location, b"body", "bytes 0-3/4", wrong).status == 400
    assert store.keys(bucket) == []


def test_a_resumable_upload_can_be_cancelled(store: StrictStore, bucket: str) -> None:
    path = f"/upload/storage/v1/b/{bucket}/o?uploadType=resumable&name=k"
    location = urlsplit(send(store.endpoint, "POST", path, headers=_TOKEN).headers["location"])
    assert send(store.endpoint, "DELETE", f"{location.path}?{location.query}", headers=_TOKEN).status == 499
    assert send(store.endpoint, "DELETE", f"{location.path}?{location.query}", headers=_TOKEN).status == 404
