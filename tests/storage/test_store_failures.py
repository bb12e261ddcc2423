"""Buckets in odd circumstances: variables of others, changed keys, forks, stores that lack a call."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

import pytest

from ray_ckpt.catalog.catalog import find_runs
from ray_ckpt.errors import ConfigError, StoragePathError, Unavailable
from ray_ckpt.format.digest import Digester, digest
from ray_ckpt.location import Location
from ray_ckpt.restore.sources import Remote
from ray_ckpt.storage.checkpoint_files import readable
from ray_ckpt.storage.log_store import CreateResult
from ray_ckpt.storage.remote import object_store, s3
from ray_ckpt.storage.remote.tier import RemoteTier
from ray_ckpt.types import FileEntry
from tests.servers.programs import ACCESS_KEY, SECRET_KEY
from tests.servers.stores import BUCKET, bucket_url, s3_client
from tests.servers.strict_store import StrictStore
from tests.servers.strict_store.faults import Delay, Fault, Match, Status

DIRECTORY = "000000000010-0123456789abcdef"
SHARD = "shard-00000-of-00001.safetensors"
CHILD_S = 20.0


@pytest.fixture(autouse=True)
def keys(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def tier(strict: StrictStore) -> RemoteTier:
    return RemoteTier(Location.parse(bucket_url("s3", strict.endpoint, uuid.uuid4().hex)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_ENDPOINT", "http://127.0.0.1:9"),
        ("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9"),
        ("AWS_SKIP_SIGNATURE", "true"),
        ("AWS_CONDITIONAL_PUT", "disabled"),
        ("AWS_S3_EXPRESS", "true"),
        ("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true"),
        ("AWS_BUCKET", "other"),
    ],
)
def test_variables_of_the_client_library_lead_nowhere_else(
    tier: RemoteTier, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    tier.put(DIRECTORY, SHARD, b"1")
    assert tier.log.create("a", b"1") is CreateResult.OK
    assert tier.log.create("a", b"2") is CreateResult.EXISTS
    assert list(tier.uploads()) == [] and tier.size(DIRECTORY, SHARD) == 1


def test_keys_in_a_file_are_read_again(
    strict: StrictStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents live for weeks, and keys in ~/.aws/credentials for an hour."""
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(s3, "CREDENTIALS_S", 0.0)
    tier = RemoteTier(Location.parse(bucket_url("s3", strict.endpoint, uuid.uuid4().hex)))
    file.write_text(f"[default]\naws_access_key_id={ACCESS_KEY}\naws_secret_access_key=expired\n")
    with pytest.raises(OSError, match="403"):
        tier.put(DIRECTORY, SHARD, b"1")
    file.write_text(f"[default]\naws_access_key_id={ACCESS_KEY}\naws_secret_access_key={SECRET_KEY}\n")
    tier.put(DIRECTORY, SHARD, b"1")
    assert list(tier.uploads()) == [], "also by the other client"


@pytest.mark.parametrize(
    ("options", "variable", "value"),
    [
        ({"endpoint_url": "localhost:9000"}, "AWS_REGION", "us-east-1"),
        ({"region": "us east 1"}, "AWS_REGION", "us-east-1"),
        ({}, "AWS_CONFIG_FILE", "BROKEN"),
        ({}, "AWS_CA_BUNDLE", "/nowhere/ca.pem"),
        ({}, "AWS_PROFILE", "nobody"),
    ],
)
def test_settings_that_cannot_be_used_are_config_errors_and_a_source_that_is_refused(
    options: dict[str, str], variable: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text("[broken")
    monkeypatch.setenv(variable, str(tmp_path / "config") if value == "BROKEN" else value)
    tier = RemoteTier(Location.parse("s3://bucket/x"), options)
    for call in (lambda: tier.log, lambda: tier.size(DIRECTORY, SHARD)):
        with pytest.raises(ConfigError) as caught:
            call()
        assert caught.value.hint
    with pytest.raises(Unavailable) as refused:
        Remote(tier, DIRECTORY, SHARD).open()
    assert refused.value.fields["refused"], "another source may do"


@pytest.mark.parametrize("status", [400, 403, 405, 501])
def test_a_store_that_does_not_list_uploads_still_deletes(
    tier: RemoteTier, strict: StrictStore, status: int
) -> None:
    strict.add_fault(Fault(action=Status(status), match=Match(operation="ListMultipartUploads")))
    tier.put(DIRECTORY, SHARD, b"1")
    tier.delete(DIRECTORY)
    assert tier.files_of(DIRECTORY) == {}


def test_a_forked_child_gets_an_error_instead_of_waiting_for_ever(tier: RemoteTier) -> None:
    tier.put(DIRECTORY, SHARD, b"1")
    child = os.fork()
    if not child:
        try:
            tier.put(DIRECTORY, SHARD, b"2")
        except OSError as error:
            os._exit(7 if "spawn" in str(error) else 1)
        os._exit(0)
    deadline_s = time.monotonic() + CHILD_S
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline_s:
            os.kill(child, 9)
            os.waitpid(child, 0)
            raise AssertionError("the child hangs")
        time.sleep(0.05)
    assert os.waitstatus_to_exitcode(ended[1]) == 7


def test_errors_of_one_kind_have_one_text(tier: RemoteTier, strict: StrictStore) -> None:
    """Or each try of a store that is away would be a warning of its own."""
    gone = RemoteTier(Location.parse("s3://bucket/x?endpoint_override=127.0.0.1:9&scheme=http"))
    texts = set()
    for _ in range(2):
        with pytest.raises(OSError) as caught:
            gone.log.read("a")
        texts.add(str(caught.value))
    assert len(texts) == 1, texts


def test_a_file_entry_that_is_empty_goes_there_and_back(tier: RemoteTier, tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.write_bytes(b"")
    entry = FileEntry(name=SHARD, size_bytes=0, digest=digest(b""))
    assert tier.put_file(DIRECTORY, entry, path) == 0
    assert list(tier.blocks(DIRECTORY, SHARD)) == [] and tier.size(DIRECTORY, SHARD) == 0


@pytest.mark.parametrize("key", ["{0}//x", "{0}/run/ray_ckpt/checkpoints//x", "{0}/../x"])
def test_an_object_of_others_that_stops_a_listing_is_named(strict: StrictStore, key: str) -> None:
    """Other programs make such keys; obstore lists no folder that has one."""
    root = uuid.uuid4().hex
    url = bucket_url("s3", strict.endpoint, root)
    tier = RemoteTier(Location.parse(url) / "run" / "ray_ckpt")
    tier.put(DIRECTORY, SHARD, b"1")
    s3_client(strict.endpoint).put_object(Bucket=BUCKET, Key=key.format(root), Body=b"1")
    with pytest.raises(StoragePathError) as caught:
        if "checkpoints" in key:
            with readable(tier.root):
                tier.delete(DIRECTORY)
        else:
            find_runs(url)
    assert key.format(root).removesuffix("x") in caught.value.message
    assert "another program" in caught.value.hint and "credentials" not in caught.value.hint
    assert find_runs(url, {"backend": "fsspec"}) == (), "as the hint says"


def test_an_answer_that_is_requested_ahead_may_wait_for_a_slow_reader(
    strict: StrictStore, tier: RemoteTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drill with a rate limit leaves such answers unread for minutes."""
    data = os.urandom(3 * object_store.GET_BYTES)  # the sockets between hold less than one of these answers
    tier.put(DIRECTORY, SHARD, data)
    monkeypatch.setattr(object_store, "STALL_S", 0.5)
    strict.add_fault(Fault(action=Delay(2 * object_store.AHEAD_S), match=Match(operation="GetObject")))
    slow = RemoteTier(tier.root)
    digester, read_bytes = Digester(), 0
    for block in slow.read(DIRECTORY, SHARD, [(0, len(data))]):
        if read_bytes <= object_store.GET_BYTES < read_bytes + block.nbytes:
            time.sleep(2 * object_store.STALL_S)  # two answers wait
        digester.update(block)
        read_bytes += block.nbytes
    assert digester.hexdigest() == digest(data)
