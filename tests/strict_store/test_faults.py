"""Each fault, as a client meets it."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from botocore.exceptions import ClientError, ConnectionClosedError, HTTPClientError

from tests.servers.strict_store import (
    Delay,
    Down,
    DropAfter,
    DropBefore,
    Fault,
    Flip,
    Hang,
    Match,
    Slow,
    Status,
    StrictStore,
    Truncate,
)
from tests.servers.strict_store.faults import Action, Faults
from tests.strict_store.conftest import s3_client
from tests.strict_store.raw_requests import refused, send

_ACTIONS: list[Action] = [
    Status(503),
    Status(429, "RequestLimitExceeded"),
    DropBefore(),
    DropAfter(),
    Truncate(7),
    Flip(byte=3, bit=2),
    Slow(1000),
    Delay(0.5),
    Hang(),
    Down(),
]


def _bodies(s3: Any, bucket: str) -> dict[str, bytes]:
    listed = s3.list_objects_v2(Bucket=bucket).get("Contents", ())
    return {e["Key"]: s3.get_object(Bucket=bucket, Key=e["Key"])["Body"].read() for e in listed}


@pytest.mark.parametrize("action", _ACTIONS, ids=lambda action: type(action).__name__)
def test_a_fault_survives_json(action: Action) -> None:
    fault = Fault(
        match=Match(method="PUT", operation="PutObject", key="a.*"), action=action, times=3, every=2
    )
    assert Fault.from_json(fault.to_json()) == fault


def test_a_rule_fires_on_every_kth_match_so_many_times() -> None:
    faults = Faults()
    faults.add(Fault(match=Match(method="PUT", key="^a"), action=DropBefore(), every=3, times=2))
    requests = [("PUT", "a"), ("GET", "a"), ("PUT", "ba")] + [("PUT", f"a{n}") for n in range(11)]
    fired = [key for method, key in requests if faults.of(method, "PutObject", key)]
    assert fired == ["a1", "a4"]
    assert faults.fired() == {"1": 2}


def test_what_is_no_fault_is_refused(store: StrictStore) -> None:
    for body in (
        b"{}",
        b"[",
        b'{"action": {"kind": "explode"}}',
        b'{"action": {"kind": "hang"}, "every": 0}',
        b'{"action": {"kind": "hang"}, "match": {"key": "("}}',
    ):
        assert send(store.endpoint, "POST", "/__strict__/faults", body).status == 400
    assert store.faults_fired() == {}


@pytest.mark.parametrize(
    ("status", "code"),
    [(500, "InternalError"), (503, "SlowDown"), (429, "TooManyRequests"), (501, "NotImplemented")],
)
def test_a_status_is_answered_and_nothing_is_applied(
    s3: Any, store: StrictStore, bucket: str, status: int, code: str
) -> None:
    store.add_fault(Fault(match=Match(operation="PutObject"), action=Status(status), times=1))
    with refused(code, status):
        s3.put_object(Bucket=bucket, Key="k", Body=b"x" * 100_000)
    assert store.keys(bucket) == []
    s3.put_object(Bucket=bucket, Key="k", Body=b"2")
    with pytest.raises(ClientError, match="ConditionalRequestConflict"):
        store.add_fault(Fault(match=Match(key="^k$"), action=Status(409), times=1))
        s3.put_object(Bucket=bucket, Key="k", Body=b"3", IfNoneMatch="*")


def test_a_completion_may_fail_inside_a_200(s3: Any, store: StrictStore, bucket: str) -> None:
    upload = s3.create_multipart_upload(Bucket=bucket, Key="k")["UploadId"]
    part = s3.upload_part(Bucket=bucket, Key="k", UploadId=upload, PartNumber=1, Body=b"x")
    store.add_fault(
        Fault(match=Match(operation="CompleteMultipartUpload"), action=Status(200, "InternalError"))
    )
    with pytest.raises(ClientError, match="InternalError"):
        parts = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
        s3.complete_multipart_upload(Bucket=bucket, Key="k", UploadId=upload, MultipartUpload=parts)
    assert store.keys(bucket) == []


def test_gcs_is_refused_in_its_own_way(store: StrictStore, bucket: str) -> None:
    store.add_fault(Fault(match=Match(operation="HeadObject"), action=Status(429)))
    answer = send(
        store.endpoint, "GET", f"/storage/v1/b/{bucket}/o/k", headers={"authorization": "Bearer strict-token"}
    )
    assert (answer.status, b"rateLimitExceeded" in answer.body) == (429, True)


def test_a_request_is_dropped_before_it_is_applied(s3: Any, store: StrictStore, bucket: str) -> None:
    store.add_fault(Fault(match=Match(operation="PutObject"), action=DropBefore(), times=1))
    with pytest.raises(HTTPClientError):
        s3.put_object(Bucket=bucket, Key="k", Body=b"1")
    assert store.keys(bucket) == []


def test_an_answer_is_dropped_after_the_request_is_applied(s3: Any, store: StrictStore, bucket: str) -> None:
    store.add_fault(Fault(match=Match(operation="PutObject"), action=DropAfter(), times=1))
    before = store.stats()["requests"].get("PutObject", {}).get(0, 0)
    with pytest.raises(HTTPClientError):
        s3.put_object(Bucket=bucket, Key="k", Body=b"1", IfNoneMatch="*")
    assert _bodies(s3, bucket) == {"k": b"1"}
    assert store.stats()["requests"]["PutObject"][0] == before + 1
    with refused("PreconditionFailed", 412):
        s3.put_object(Bucket=bucket, Key="k", Body=b"1", IfNoneMatch="*")


def test_a_client_that_repeats_a_dropped_create_is_refused(store: StrictStore, bucket: str) -> None:
    store.add_fault(Fault(match=Match(operation="PutObject"), action=DropAfter(), times=1))
    repeats = s3_client(store.endpoint, attempts=3)
    with refused("PreconditionFailed", 412):
        repeats.put_object(Bucket=bucket, Key="k", Body=b"1", IfNoneMatch="*")
    assert store.keys(bucket) == ["k"]
    repeats.close()


def test_a_body_is_cut_short(s3: Any, store: StrictStore, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"0123456789")
    store.add_fault(Fault(match=Match(operation="GetObject"), action=Truncate(4), times=1))
    answer = s3.get_object(Bucket=bucket, Key="k")
    assert answer["ContentLength"] == 10
    with pytest.raises(Exception, match="IncompleteRead"):
        answer["Body"].read()
    assert s3.get_object(Bucket=bucket, Key="k")["Body"].read() == b"0123456789"


def test_one_bit_of_a_body_is_flipped(s3: Any, store: StrictStore, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"0123456789")
    store.add_fault(Fault(match=Match(operation="GetObject"), action=Flip(byte=12, bit=0), every=2))

    def get() -> bytes:
        answer = s3.get_object(Bucket=bucket, Key="k", Range="bytes=0-9", ChecksumMode="DISABLED")
        return bytes(answer["Body"].read())

    assert [get(), get()] == [b"0123456789", b"0133456789"]


def test_a_flipped_bit_does_not_fit_the_checksum(s3: Any, store: StrictStore, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="k", Body=b"0123456789", ChecksumAlgorithm="CRC32")
    store.add_fault(Fault(match=Match(operation="GetObject"), action=Flip(byte=2)))
    with pytest.raises(Exception, match="Expected checksum"):
        s3.get_object(Bucket=bucket, Key="k")["Body"].read()


def test_bodies_are_slow_both_ways(s3: Any, store: StrictStore, bucket: str) -> None:
    store.add_fault(Fault(match=Match(key="^slow$"), action=Slow(1_000_000)))
    start = time.monotonic()
    s3.put_object(Bucket=bucket, Key="slow", Body=bytes(200_000))
    middle = time.monotonic()
    s3.get_object(Bucket=bucket, Key="slow")["Body"].read()
    assert min(middle - start, time.monotonic() - middle) >= 0.19


def test_a_request_is_applied_late(s3: Any, store: StrictStore, bucket: str) -> None:
    store.add_fault(Fault(match=Match(key="^late$"), action=Delay(0.3), times=1))
    late = threading.Thread(target=s3.put_object, kwargs={"Bucket": bucket, "Key": "late", "Body": b"1"})
    start = time.monotonic()
    late.start()
    seen = store.keys(bucket)
    assert not seen or time.monotonic() - start >= 0.3
    late.join()
    assert time.monotonic() - start >= 0.3
    assert store.keys(bucket) == ["late"]


def test_a_request_hangs_until_the_client_gives_up(store: StrictStore, bucket: str) -> None:
    store.add_fault(Fault(match=Match(operation="PutObject"), action=Hang()))
    impatient = s3_client(store.endpoint, read_timeout=0.2)
    with pytest.raises(HTTPClientError, match="timeout"):
        impatient.put_object(Bucket=bucket, Key="k", Body=b"1")
    assert store.keys(bucket) == []
    impatient.close()


def test_a_store_that_is_down_cuts_everybody_off_until_it_is_back(
    s3: Any, store: StrictStore, bucket: str
) -> None:
    store.add_fault(Fault(match=Match(key="^hangs$"), action=Hang()))
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(ConnectionClosedError):  # no timeout
            s3.put_object(Bucket=bucket, Key="hangs", Body=b"1")
        ended.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not store.stats()["in_flight"]:
        time.sleep(0.01)
    down = store.add_fault(Fault(action=Down()))
    waiting.join()
    assert ended.is_set()
    for _ in range(2):
        with pytest.raises(HTTPClientError):
            s3.put_object(Bucket=bucket, Key="k", Body=b"1")
    assert store.keys(bucket) == []
    store.remove_fault(down)
    s3.put_object(Bucket=bucket, Key="k", Body=b"1")
