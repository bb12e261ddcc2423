"""S3, as botocore and hand-made requests see it."""

from __future__ import annotations

import hashlib
import random
import threading
from typing import Any

import pytest

from tests.servers.strict_store import StrictStore
from tests.servers.strict_store.checksums import S3_CHECKSUMS, digest_of, to_text
from tests.servers.strict_store.server import Server, Settings
from tests.strict_store.conftest import s3_client
from tests.strict_store.raw_requests import refused, send, send_signed

_MIB = 1 << 20


def _put_parts(
    s3: Any, bucket: str, key: str, *sizes: int, algorithm: str = "CRC32"
) -> tuple[str, list[dict[str, Any]]]:
    """Parts of zeros. The upload's id, and the parts as its completion names them."""
    where = {"Bucket": bucket, "Key": key}
    upload = s3.create_multipart_upload(**where, Metadata={"who": "me"}, ChecksumAlgorithm=algorithm)[
        "UploadId"
    ]
    where["UploadId"] = upload
    parts = []
    for number, size in enumerate(sizes, 1):
        answer = s3.upload_part(**where, PartNumber=number, Body=bytes(size), ChecksumAlgorithm=algorithm)
        sums = {name: text for name, text in answer.items() if name.startswith("Checksum")}
        parts.append({"PartNumber": number, "ETag": answer["ETag"], **sums})
    return upload, parts


def _complete(s3: Any, bucket: str, key: str, upload: str, parts: Any, **options: Any) -> Any:
    return s3.complete_multipart_upload(
        Bucket=bucket, Key=key, UploadId=upload, MultipartUpload={"Parts": parts}, **options
    )


# -- objects


@pytest.mark.parametrize("key", ["plain", "a b+c/ü&<>'\"", "x" * 1024, "dir/", "//a", "%41~!*()"])
def test_an_object_comes_back_under_any_name(s3: Any, bucket: str, key: str) -> None:
    s3.put_object(Bucket=bucket, Key=key, Body=b"hello", ContentType="text/x", Metadata={"who": "me"})
    answer = s3.get_object(Bucket=bucket, Key=key)
    assert answer["Body"].read() == b"hello"
    assert (answer["ContentType"], answer["Metadata"]) == ("text/x", {"who": "me"})
    assert answer["ETag"] == f'"{hashlib.md5(b"hello").hexdigest()}"'
    assert [entry["Key"] for entry in s3.list_objects_v2(Bucket=bucket)["Contents"]] == [key]


def test_ranges(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"0123456789")

    def get(wanted: str) -> tuple[bytes, str | None]:
        answer = s3.get_object(Bucket=bucket, Key="k", Range=wanted)
        return answer["Body"].read(), answer.get("ContentRange")

    assert get("bytes=2-4") == (b"234", "bytes 2-4/10")
    assert get("bytes=7-") == (b"789", "bytes 7-9/10")
    assert get("bytes=-3") == (b"789", "bytes 7-9/10")
    assert get("bytes=8-99") == (b"89", "bytes 8-9/10")
    with refused("InvalidRange", 416):
        get("bytes=10-")


def test_what_is_not_there(s3: Any, bucket: str) -> None:
    with refused("NoSuchKey", 404):
        s3.get_object(Bucket=bucket, Key="k")
    with refused("404", 404):
        s3.head_object(Bucket=bucket, Key="k")
    with refused("NoSuchBucket", 404):
        s3.put_object(Bucket="nowhere", Key="k", Body=b"")
    with refused("KeyTooLongError", 400):
        s3.put_object(Bucket=bucket, Key="ü" * 513, Body=b"")
    s3.delete_object(Bucket=bucket, Key="k")


def test_buckets(s3: Any, bucket: str) -> None:
    s3.create_bucket(Bucket="mine")
    with refused("BucketAlreadyOwnedByYou", 409):
        s3.create_bucket(Bucket="mine")
    assert {"mine", bucket} <= {entry["Name"] for entry in s3.list_buckets()["Buckets"]}
    s3.head_bucket(Bucket="mine")
    assert s3.get_bucket_location(Bucket="mine")["LocationConstraint"] is None
    s3.put_object(Bucket="mine", Key="k", Body=b"")
    with refused("BucketNotEmpty", 409):
        s3.delete_bucket(Bucket="mine")
    s3.delete_objects(Bucket="mine", Delete={"Objects": [{"Key": "k"}, {"Key": "never"}]})
    s3.delete_bucket(Bucket="mine")


def test_copies(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="a b", Body=b"x", Metadata={"who": "me"})
    s3.copy_object(Bucket=bucket, Key="c", CopySource={"Bucket": bucket, "Key": "a b"})
    s3.delete_object(Bucket=bucket, Key="a b")
    answer = s3.get_object(Bucket=bucket, Key="c")
    assert (answer["Body"].read(), answer["Metadata"]) == (b"x", {"who": "me"})


def test_encryption_that_is_requested_is_remembered(s3: Any, store: StrictStore, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"", ServerSideEncryption="aws:kms", SSEKMSKeyId="key-1")
    assert s3.head_object(Bucket=bucket, Key="k")["SSEKMSKeyId"] == "key-1"
    assert store.objects(bucket)[0]["headers"]["x-amz-server-side-encryption"] == "aws:kms"


def test_what_is_not_implemented_is_refused(s3: Any, bucket: str) -> None:
    with refused("NotImplemented", 501):
        s3.get_object_acl(Bucket=bucket, Key="k")
    with refused("NotImplemented", 501):
        s3.get_object(Bucket=bucket, Key="k", VersionId="1")
    with refused("NotImplemented", 501):
        s3.put_object(Bucket=bucket, Key="k", Body=b"", ChecksumMD5="AAAA")
    with refused("AccessControlListNotSupported", 400):
        s3.put_object(Bucket=bucket, Key="k", Body=b"", ACL="private")


def test_the_clock_can_be_set_off(s3: Any, store: StrictStore, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="now", Body=b"")
    store.set_clock_offset(86_400)
    s3.put_object(Bucket=bucket, Key="tomorrow", Body=b"")
    now, tomorrow = (entry["LastModified"] for entry in s3.list_objects_v2(Bucket=bucket)["Contents"])
    assert 86_390 < (tomorrow - now).total_seconds() < 86_460


# -- listings


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("prefix", "delimiter"), [("", ""), ("", "/"), ("b/", "/"), ("a", ""), ("b/a", "/")])
def test_pages_of_a_listing_make_the_listing(
    s3: Any, bucket: str, version: int, prefix: str, delimiter: str
) -> None:
    chance = random.Random(1)
    keys = {"/".join(chance.choices("ab ", k=chance.randint(1, 4))) for _ in range(40)}
    for key in keys:
        s3.put_object(Bucket=bucket, Key=key, Body=b"")
    found, rolled = _expected_listing(keys, prefix, delimiter)

    pages = s3.get_paginator("list_objects" if version == 1 else "list_objects_v2").paginate(
        Bucket=bucket, Prefix=prefix, Delimiter=delimiter, PaginationConfig={"PageSize": 3}
    )
    listed, prefixes = [], []
    for page in pages:
        entries = [entry["Key"] for entry in page.get("Contents", ())]
        more = [entry["Prefix"] for entry in page.get("CommonPrefixes", ())]
        assert len(entries) + len(more) <= 3
        listed += entries
        prefixes += more
    assert (listed, prefixes) == (found, rolled)


def _expected_listing(keys: set[str], prefix: str, delimiter: str) -> tuple[list[str], list[str]]:
    found: set[str] = set()
    rolled: set[str] = set()
    for key in keys:
        if key.startswith(prefix):
            head, cut, _ = key[len(prefix) :].partition(delimiter or "\0")
            (rolled if cut else found).add(prefix + head + cut)
    return sorted(found), sorted(rolled)


# -- conditions


def test_a_name_is_created_once(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"1", IfNoneMatch="*")
    with refused("PreconditionFailed", 412) as caught:
        s3.put_object(Bucket=bucket, Key="k", Body=b"2", IfNoneMatch="*")
    assert caught.value.response["Error"]["Condition"] == "If-None-Match"
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"1"
    s3.delete_object(Bucket=bucket, Key="k")
    s3.put_object(Bucket=bucket, Key="k", Body=b"3", IfNoneMatch="*")


def test_an_object_is_replaced_while_it_is_the_one_that_was_read(s3: Any, bucket: str) -> None:
    with refused("NoSuchKey", 404):
        s3.put_object(Bucket=bucket, Key="k", Body=b"1", IfMatch="abc")
    first = s3.put_object(Bucket=bucket, Key="k", Body=b"1")["ETag"]
    second = s3.put_object(Bucket=bucket, Key="k", Body=b"2", IfMatch=first)["ETag"]
    with refused("PreconditionFailed", 412) as caught:
        s3.put_object(Bucket=bucket, Key="k", Body=b"3", IfMatch=first)
    assert caught.value.response["Error"]["Condition"] == "If-Match"
    with refused("PreconditionFailed", 412):
        s3.get_object(Bucket=bucket, Key="k", IfMatch=first)
    with refused("PreconditionFailed", 412):
        s3.delete_object(Bucket=bucket, Key="k", IfMatch=first)
    s3.delete_object(Bucket=bucket, Key="k", IfMatch=second)


def test_of_sixteen_that_create_a_name_one_wins(store: StrictStore, bucket: str) -> None:
    s3 = s3_client(store.endpoint, max_pool_connections=16)
    for name in range(5):
        start = threading.Barrier(16)
        won: list[int] = []

        def create(me: int, name: str = str(name), start: threading.Barrier = start, won: Any = won) -> None:
            start.wait()
            try:
                s3.put_object(Bucket=bucket, Key=name, Body=bytes([me]), IfNoneMatch="*")
            except s3.exceptions.ClientError as error:
                assert error.response["Error"]["Code"] == "PreconditionFailed"
            else:
                won.append(me)

        threads = [threading.Thread(target=create, args=(me,)) for me in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert s3.get_object(Bucket=bucket, Key=str(name))["Body"].read() == bytes(won)
    s3.close()


def test_a_store_may_ignore_conditions() -> None:
    with Server(Settings(conditions="ignored", buckets=("b",))) as server:
        s3 = s3_client(server.endpoint)
        for body in (b"1", b"2"):
            s3.put_object(Bucket="b", Key="k", Body=body, IfNoneMatch="*")
        assert s3.get_object(Bucket="b", Key="k")["Body"].read() == b"2"
        s3.close()


def test_a_store_may_refuse_conditions() -> None:
    with Server(Settings(conditions="501", buckets=("b",))) as server:
        s3 = s3_client(server.endpoint)
        with refused("NotImplemented", 501):
            s3.put_object(Bucket="b", Key="k", Body=b"", IfNoneMatch="*")
        s3.put_object(Bucket="b", Key="k", Body=b"")
        s3.close()


# -- uploads in parts


def test_parts_make_an_object_when_the_upload_is_completed(s3: Any, store: StrictStore, bucket: str) -> None:
    upload, parts = _put_parts(s3, bucket, "k", 5 * _MIB, 5 * _MIB, 3)
    with refused("NoSuchKey", 404):
        s3.get_object(Bucket=bucket, Key="k")
    assert [entry["upload_id"] for entry in store.uploads(bucket)] == [upload]

    etag = _complete(s3, bucket, "k", upload, parts)["ETag"]
    answer = s3.get_object(Bucket=bucket, Key="k", Range=f"bytes={5 * _MIB - 1}-{10 * _MIB}")
    assert (answer["Body"].read(), answer["Metadata"]) == (bytes(5 * _MIB + 2), {"who": "me"})
    assert (answer["ETag"], etag.endswith('-3"')) == (etag, True)
    assert s3.head_object(Bucket=bucket, Key="k")["ContentLength"] == 10 * _MIB + 3
    assert store.uploads(bucket) == []
    with refused("NoSuchUpload", 404):
        _complete(s3, bucket, "k", upload, parts)


def test_what_is_wrong_with_parts_is_refused(s3: Any, bucket: str) -> None:
    upload, parts = _put_parts(s3, bucket, "k", 5 * _MIB - 1, 5 * _MIB, 3)
    with refused("EntityTooSmall", 400):
        _complete(s3, bucket, "k", upload, parts)
    with refused("InvalidPartOrder", 400):
        _complete(s3, bucket, "k", upload, [parts[2], parts[1]])
    with refused("InvalidPart", 400):
        _complete(s3, bucket, "k", upload, [{**parts[1], "ETag": '"no"'}])
    with refused("InvalidPart", 400):
        _complete(s3, bucket, "k", upload, [{**parts[1], "PartNumber": 7}])
    with refused("MalformedXML", 400):
        _complete(s3, bucket, "k", upload, [])
    with refused("NoSuchUpload", 404):
        _complete(s3, bucket, "another", upload, parts[1:])
    _complete(s3, bucket, "k", upload, parts[1:])


def test_a_completion_may_have_a_condition(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"")
    upload, parts = _put_parts(s3, bucket, "k", 1)
    with refused("PreconditionFailed", 412):
        _complete(s3, bucket, "k", upload, parts, IfNoneMatch="*")
    s3.delete_object(Bucket=bucket, Key="k")
    _complete(s3, bucket, "k", upload, parts, IfNoneMatch="*")


def test_an_upload_that_was_aborted_is_gone(s3: Any, bucket: str) -> None:
    upload, parts = _put_parts(s3, bucket, "k", 1)
    s3.abort_multipart_upload(Bucket=bucket, Key="k", UploadId=upload)
    with refused("NoSuchUpload", 404):
        _complete(s3, bucket, "k", upload, parts)
    with refused("NoSuchUpload", 404):
        s3.upload_part(Bucket=bucket, Key="k", UploadId=upload, PartNumber=1, Body=b"")
    with refused("NoSuchUpload", 404):
        s3.abort_multipart_upload(Bucket=bucket, Key="k", UploadId=upload)


def test_uploads_and_parts_are_listed_in_pages(s3: Any, bucket: str) -> None:
    begun = [(key, _put_parts(s3, bucket, key)[0]) for key in ("a/1", "a/1", "a/2", "a/2", "a/2", "b")]
    pages = s3.get_paginator("list_multipart_uploads").paginate(
        Bucket=bucket, Prefix="a/", PaginationConfig={"PageSize": 2}
    )
    assert [(u["Key"], u["UploadId"]) for page in pages for u in page["Uploads"]] == begun[:5]

    upload, parts = _put_parts(s3, bucket, "k", 1, 2, 3)
    listed = s3.get_paginator("list_parts").paginate(
        Bucket=bucket, Key="k", UploadId=upload, PaginationConfig={"PageSize": 2}
    )
    found = [(p["PartNumber"], p["Size"], p["ETag"]) for page in listed for p in page.get("Parts", ())]
    assert found == [(part["PartNumber"], part["PartNumber"], part["ETag"]) for part in parts]


# -- integrity


@pytest.mark.parametrize("name", S3_CHECKSUMS)
def test_a_wrong_checksum_is_refused(store: StrictStore, bucket: str, name: str) -> None:
    body = b"the body"
    header = f"x-amz-checksum-{name}"
    right, wrong = to_text(digest_of(name, body)), to_text(digest_of(name, b"another"))
    path = f"/{bucket}/k"
    assert b"<Code>BadDigest" in send_signed(store.endpoint, "PUT", path, body, {header: wrong}).body
    assert b"<Code>InvalidDigest" in send_signed(store.endpoint, "PUT", path, body, {header: "AAAA"}).body
    assert store.keys(bucket) == []
    assert send_signed(store.endpoint, "PUT", path, body, {header: right}).status == 200
    got = send_signed(store.endpoint, "GET", path, headers={"x-amz-checksum-mode": "ENABLED"})
    assert (got.headers[header], got.headers["x-amz-checksum-type"]) == (right, "FULL_OBJECT")
    assert header not in send_signed(store.endpoint, "GET", path).headers


def test_a_wrong_md5_and_a_wrong_hash_of_the_payload_are_refused(store: StrictStore, bucket: str) -> None:
    md5 = {"content-md5": to_text(hashlib.md5(b"another").digest())}
    answer = send_signed(store.endpoint, "PUT", f"/{bucket}/k", b"body", md5)
    assert (answer.status, b"<Code>BadDigest" in answer.body) == (400, True)
    another = hashlib.sha256(b"another").hexdigest()
    answer = send_signed(store.endpoint, "PUT", f"/{bucket}/k", b"body", payload=another)
    assert (answer.status, b"<Code>XAmzContentSHA256Mismatch" in answer.body) == (400, True)
    assert store.keys(bucket) == []


def _send_chunked(store: StrictStore, path: str, chunks: bytes, trailer: str = "crc32") -> bytes:
    headers = {"content-encoding": "aws-chunked", "x-amz-decoded-content-length": "4"}
    headers["x-amz-trailer"] = f"x-amz-checksum-{trailer}"
    payload = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
    return send_signed(store.endpoint, "PUT", path, chunks, headers, payload=payload).body


def test_checksums_may_come_behind_the_body(s3: Any, store: StrictStore, bucket: str) -> None:
    path = f"/{bucket}/k"
    right = to_text(digest_of("crc32", b"body")).encode()
    assert b"BadDigest" in _send_chunked(
        store, path, b"4\r\nbody\r\n0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n"
    )
    assert b"MalformedTrailer" in _send_chunked(store, path, b"4\r\nbody\r\n0\r\n\r\n")
    assert b"IncompleteBody" in _send_chunked(store, path, b"5\r\nbody!\r\n0\r\n\r\n")
    assert b"IncompleteBody" in _send_chunked(store, path, b"3\r\nbod\r\n0\r\n\r\n")
    assert b"IncompleteBody" in _send_chunked(store, path, b"4\r\nbody??0\r\n\r\n")
    assert store.keys(bucket) == []
    assert not _send_chunked(
        store, path, b"1\r\nb\r\n3\r\nody\r\n0\r\nx-amz-checksum-crc32:%s\r\n\r\n" % right
    )
    answer = s3.get_object(Bucket=bucket, Key="k")
    assert (answer["Body"].read(), answer.get("ContentEncoding")) == (b"body", None)


def test_the_checksum_of_parts_is_composite(s3: Any, bucket: str) -> None:
    upload, parts = _put_parts(s3, bucket, "k", 5 * _MIB, 3, algorithm="SHA256")
    wrong = [parts[0], {**parts[1], "ChecksumSHA256": parts[0]["ChecksumSHA256"]}]
    with refused("InvalidPart", 400):
        _complete(s3, bucket, "k", upload, wrong)
    _complete(s3, bucket, "k", upload, parts)
    answer = s3.head_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    digests = [hashlib.sha256(bytes(size)).digest() for size in (5 * _MIB, 3)]
    assert answer["ChecksumSHA256"] == to_text(hashlib.sha256(b"".join(digests)).digest()) + "-2"
    assert answer["ChecksumType"] == "COMPOSITE"


@pytest.mark.parametrize("name", ["crc32", "crc64nvme"])
def test_the_crc_of_a_whole_object_is_checked_on_completion(s3: Any, bucket: str, name: str) -> None:
    field = f"Checksum{name.upper()}"
    created = s3.create_multipart_upload(
        Bucket=bucket, Key="k", ChecksumAlgorithm=name.upper(), ChecksumType="FULL_OBJECT"
    )
    upload, body = created["UploadId"], random.Random(2).randbytes(5 * _MIB + 11)
    parts = []
    for number, piece in enumerate((body[: 5 * _MIB], body[5 * _MIB :]), 1):
        given = {field: to_text(digest_of(name, piece))}
        answer = s3.upload_part(
            Bucket=bucket, Key="k", UploadId=upload, PartNumber=number, Body=piece, **given
        )
        parts.append({"PartNumber": number, "ETag": answer["ETag"], **given})
    with refused("BadDigest", 400):
        _complete(s3, bucket, "k", upload, parts, **{field: to_text(digest_of(name, b"another"))})
    right = to_text(digest_of(name, body))
    assert _complete(s3, bucket, "k", upload, parts, **{field: right})[field] == right


# -- credentials


def test_who_has_not_the_secret_gets_nothing(store: StrictStore, bucket: str) -> None:
    wrong = s3_client(store.endpoint, secret="another")
    with refused("SignatureDoesNotMatch", 403):
        wrong.put_object(Bucket=bucket, Key="k", Body=b"")
    unknown = s3_client(store.endpoint, access_key="another")
    with refused("InvalidAccessKeyId", 403):
        unknown.list_objects_v2(Bucket=bucket)
    assert send(store.endpoint, "GET", f"/{bucket}/k").status == 403
    assert send(store.endpoint, "PUT", f"/{bucket}/k", b"x" * 100_000).status == 403
    assert store.keys(bucket) == []
