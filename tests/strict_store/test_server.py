"""The process: its start, its output, and the files that outlive it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.servers.strict_store import StrictStore
from tests.servers.strict_store.server import Server, Settings
from tests.strict_store.conftest import s3_client
from tests.strict_store.raw_requests import refused, send

_MIB = 1 << 20


def test_the_command_prints_where_it_listens_and_ends_with_its_input() -> None:
    command = [sys.executable, "-m", "tests.servers.strict_store", "--bucket", "b", "--until-eof"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        line = process.stdout.readline()
        assert line.startswith("listening on http://127.0.0.1:")
        assert StrictStore(line.split()[-1]).keys("b") == []
        process.stdin.close()
        assert process.wait(20) == 0


def test_a_store_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="did not start"), StrictStore.process(directory=tmp_path / "file"):
        pass


def test_requests_and_bytes_are_counted() -> None:
    with Server(Settings(buckets=("b",))) as server:
        s3 = s3_client(server.endpoint)
        s3.put_object(Bucket="b", Key="k", Body=bytes(100_000))
        s3.get_object(Bucket="b", Key="k")["Body"].read()
        with refused("NoSuchKey", 404):
            s3.get_object(Bucket="b", Key="no")
        s3.close()
        stats = StrictStore(server.endpoint).stats()
    assert stats["requests"] == {"PutObject": {200: 1}, "GetObject": {200: 1, 404: 1}}
    assert 100_000 < stats["bytes_in"] < 110_000 and 100_000 < stats["bytes_out"] < 110_000
    assert stats["most_in_flight"] == 1


def test_what_the_admin_interface_does_not_know() -> None:
    with Server() as server:
        assert send(server.endpoint, "GET", "/__strict__/nothing").status == 404
        with pytest.raises(ValueError, match="NoSuchBucket"):
            StrictStore(server.endpoint).keys("nowhere")


def test_what_is_no_http_ends_the_connection_and_not_the_store() -> None:
    import socket

    with Server() as server:
        address = urlsplit(server.endpoint)
        for junk in (b"\r\n\r\nhello\r\n", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 300, b"x" * 100_000):
            with socket.create_connection((address.hostname, address.port), timeout=10) as client:
                try:
                    client.sendall(junk)
                    assert client.recv(100) == b""
                except ConnectionError:
                    pass
        assert send(server.endpoint, "GET", "/__strict__/stats").status == 200


def test_the_parts_may_be_made_smaller_for_a_test() -> None:
    with Server(Settings(buckets=("b",), min_part_bytes=3)) as server:
        s3 = s3_client(server.endpoint)
        upload = s3.create_multipart_upload(Bucket="b", Key="k")["UploadId"]
        parts = []
        for number, body in enumerate((b"abc", b"def", b"g"), 1):
            etag = s3.upload_part(Bucket="b", Key="k", UploadId=upload, PartNumber=number, Body=body)["ETag"]
            parts.append({"PartNumber": number, "ETag": etag})
        s3.complete_multipart_upload(Bucket="b", Key="k", UploadId=upload, MultipartUpload={"Parts": parts})
        assert s3.get_object(Bucket="b", Key="k")["Body"].read() == b"abcdefg"
        s3.close()


def test_objects_and_uploads_in_a_folder_outlive_a_killed_store(tmp_path: Path) -> None:
    big = bytes(range(256)) * (6 * _MIB // 256)
    with StrictStore.process(directory=tmp_path, buckets=("b", "empty")) as store:
        s3 = s3_client(store.endpoint)
        for key, body in (("small", b"1"), ("small", b"2"), ("big", big), ("gone", b"x")):
            s3.put_object(Bucket="b", Key=key, Body=body, Metadata={"who": "me"})
        s3.delete_object(Bucket="b", Key="gone")
        uploads = [
            s3.create_multipart_upload(Bucket="b", Key=key)["UploadId"] for key in ("open", "done", "not")
        ]
        etags = [
            s3.upload_part(Bucket="b", Key=key, UploadId=upload, PartNumber=1, Body=big)["ETag"]
            for key, upload in zip(("open", "done", "not"), uploads, strict=True)
        ]
        _complete(s3, "done", uploads[1], etags[1])
        s3.abort_multipart_upload(Bucket="b", Key="not", UploadId=uploads[2])
        before = store.objects("b")
        s3.close()
        store.kill()
    with StrictStore.process(directory=tmp_path, buckets=("b",)) as store:
        s3 = s3_client(store.endpoint)
        assert store.objects("b") == before
        assert [entry["Name"] for entry in s3.list_buckets()["Buckets"]] == ["b", "empty"]
        assert s3.get_object(Bucket="b", Key="small")["Body"].read() == b"2"
        assert s3.get_object(Bucket="b", Key="big")["Metadata"] == {"who": "me"}
        assert [entry["upload_id"] for entry in store.uploads("b")] == [uploads[0]]
        _complete(s3, "open", uploads[0], etags[0])
        for key in ("big", "done", "open"):
            assert s3.get_object(Bucket="b", Key=key)["Body"].read() == big
        s3.close()
    assert len(list((tmp_path / "bodies").iterdir())) == 4


def test_what_a_crash_has_left_is_removed(tmp_path: Path) -> None:
    with StrictStore.process(directory=tmp_path, buckets=("b",)) as store:
        s3 = s3_client(store.endpoint)
        s3.put_object(Bucket="b", Key="k", Body=b"1")
        with refused("PreconditionFailed", 412):
            s3.put_object(Bucket="b", Key="k", Body=b"2", IfNoneMatch="*")
        s3.close()
    kept = [path.name for path in (tmp_path / "bodies").iterdir()]
    assert len(kept) == 1
    (tmp_path / "bodies" / "written-and-not-referred-to").write_bytes(b"x")
    (tmp_path / "objects" / "half.tmp").write_bytes(b"{")
    orphan = {
        "name": "no-upload/1",
        "value": {"number": 1, "blob": _blob(kept[0]), "modified_s": 0, "checksums": {}},
    }
    (tmp_path / "parts" / f"{hashlib.sha256(b'no-upload/1').hexdigest()}.json").write_text(json.dumps(orphan))
    with StrictStore.process(directory=tmp_path) as store:
        assert store.keys("b") == ["k"]
    assert [path.name for path in (tmp_path / "bodies").iterdir()] == kept
    assert [path.suffix for name in ("objects", "parts") for path in (tmp_path / name).iterdir()] == [".json"]


def _blob(name: str) -> dict[str, object]:
    return {"name": name, "digests": {}}


def _complete(s3: object, key: str, upload: str, etag: str) -> None:
    parts = {"Parts": [{"PartNumber": 1, "ETag": etag}]}
    s3.complete_multipart_upload(Bucket="b", Key=key, UploadId=upload, MultipartUpload=parts)  # type: ignore[attr-defined]


def test_a_store_can_be_killed() -> None:
    with StrictStore.process() as store:
        store.kill()
        with pytest.raises(OSError):
            store.stats()
