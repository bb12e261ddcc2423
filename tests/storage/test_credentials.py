"""Where credentials and endpoints come from: the environment of the process, in each of its usual forms."""

from __future__ import annotations

import json
import stat
import sys
import time
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import requests

from ray_ckpt.errors import ConfigError
from ray_ckpt.location import Location
from ray_ckpt.storage.remote import object_store, s3
from ray_ckpt.storage.remote.file_store import FileStore
from ray_ckpt.storage.remote.s3 import S3Bucket
from ray_ckpt.storage.remote.tier import open_objects
from tests.servers.programs import ACCESS_KEY, SECRET_KEY
from tests.servers.providers import Tokens, answering
from tests.servers.stores import BUCKET, bucket_url, make_bucket
from tests.servers.strict_store import StrictStore

AWS_KEYS = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
WAIT_S = 20.0  # for credentials that are requested once more


@pytest.fixture(autouse=True)
def none_at_all(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> dict[str, str]:
    """Remove all credentials of this process; each test sets its own."""
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "STORAGE_EMULATOR_HOST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for name in (*AWS_KEYS, "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    return environment


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in AWS_KEYS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def account(none_at_all: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    name = "GOOGLE_APPLICATION_CREDENTIALS"
    monkeypatch.setenv(name, none_at_all[name])


def open_at(storage_path: str, options: dict[str, str] | None = None) -> FileStore:
    return open_objects(Location.parse(storage_path), options or {})[0]


def works(files: FileStore) -> bool:
    name = f"works/{uuid.uuid4().hex}"
    files.put(name, [b"1"], max_bytes=1)
    return files.size(name) == 1 and list(files.uploads("works")) == []


def url(scheme: str, strict: StrictStore) -> str:
    return bucket_url(scheme, strict.endpoint, "credentials")


def write_config(tmp_path: Path, profile: str, **settings: str) -> None:
    lines = [f"[profile {profile}]", *(f"{name} = {value}" for name, value in settings.items())]
    (tmp_path / "config").write_text("\n".join(lines) + "\n")


def provider(tmp_path: Path, answer: dict[str, Any]) -> str:
    """Return a program that prints keys, as external providers do; it counts its calls."""
    (tmp_path / "answer.json").write_text(json.dumps(answer))
    script = tmp_path / "provider"
    script.write_text(
        f"#!{sys.executable} -I\n"
        "import pathlib\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "with open(folder / 'calls', 'a') as calls: calls.write('x')\n"
        "print((folder / 'answer.json').read_text())\n"
    )
    script.chmod(stat.S_IRWXU)
    return str(script)


def keys_until(seconds: float, secret: str = SECRET_KEY) -> dict[str, Any]:
    expiration = datetime.now(UTC) + timedelta(seconds=seconds)
    answer = {"Version": 1, "AccessKeyId": ACCESS_KEY, "SecretAccessKey": secret}
    return answer | {"Expiration": expiration.isoformat()}


class TestS3:
    def test_keys_in_the_environment(self, strict: StrictStore, keys: None) -> None:
        assert works(open_at(url("s3", strict)))

    @pytest.mark.parametrize("by", ["option", "variable"])
    def test_a_profile_whose_keys_a_program_gives(
        self, strict: StrictStore, tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        script = provider(tmp_path, keys_until(3600))
        write_config(tmp_path, "training", credential_process=script)
        if by == "variable":
            monkeypatch.setenv("AWS_PROFILE", "training")
        files = open_at(url("s3", strict), {"profile": "training"} if by == "option" else {})
        assert all(works(files) for _ in range(5))
        assert len((tmp_path / "calls").read_text()) == 1

    def test_keys_that_expire_are_requested_again(
        self, strict: StrictStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The same store object goes on, with the keys that the program gives by then."""
        monkeypatch.setattr(s3, "CREDENTIALS_S", 1)
        write_config(tmp_path, "training", credential_process=provider(tmp_path, keys_until(2, "old")))
        files = open_at(url("s3", strict), {"profile": "training"})
        with pytest.raises(PermissionError, match="SignatureDoesNotMatch"):
            works(files)
        (tmp_path / "answer.json").write_text(json.dumps(keys_until(3600)))
        assert works_soon(files)

    def test_the_role_of_a_container(self, strict: StrictStore, monkeypatch: pytest.MonkeyPatch) -> None:
        answer = keys_until(3600) | {"Token": "a-session-token"}
        with answering(lambda: answer) as uri:
            monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", uri)
            assert works(open_at(url("s3", strict)))

    def test_none_is_an_error_that_names_the_setting(self, strict: StrictStore) -> None:
        with pytest.raises(ConfigError, match=f"no AWS credentials for s3://{BUCKET}/credentials") as caught:
            open_at(url("s3", strict))
        for way in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "storage_options['profile']", "role", "runtime_env"):
            assert way in caught.value.hint

    def test_a_profile_that_is_not_there(self, strict: StrictStore, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ConfigError, match="no AWS profile 'absent'") as caught:
            open_at(url("s3", strict), {"profile": "absent"})
        assert "~/.aws/config" in caught.value.hint
        monkeypatch.setenv("AWS_PROFILE", "absent-too")
        with pytest.raises(ConfigError, match="no AWS profile 'absent-too'"):
            open_at(url("s3", strict))

    def test_a_provider_that_fails(self, strict: StrictStore, tmp_path: Path) -> None:
        write_config(tmp_path, "training", credential_process="/bin/false")
        with pytest.raises(ConfigError, match="cannot be had") as caught:
            open_at(url("s3", strict), {"profile": "training"})
        assert len(str(caught.value).splitlines()) == 1

    @pytest.mark.parametrize("answer", [[], None, {"Version": 1, "AccessKeyId": 1}])
    def test_a_provider_that_gives_no_keys(self, strict: StrictStore, tmp_path: Path, answer: Any) -> None:
        write_config(tmp_path, "training", credential_process=provider(tmp_path, answer))
        with pytest.raises(ConfigError, match="cannot be had"):
            open_at(url("s3", strict), {"profile": "training"})

    def test_anonymous(self, strict: StrictStore, ministack: str) -> None:
        with pytest.raises(PermissionError):
            works(open_at(url("s3", strict), {"anonymous": "true"}))
        make_bucket(ministack)
        assert works(open_at(bucket_url("s3", ministack, "credentials"), {"anonymous": "true"}))

    @pytest.mark.parametrize("by", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "profile", "option"])
    def test_where_the_endpoint_comes_from(
        self, strict: StrictStore, keys: None, tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options = {}
        if by == "profile":
            write_config(tmp_path, "training", endpoint_url=strict.endpoint, region="eu-north-1")
            options = {"profile": "training"}
            for name in AWS_KEYS:
                monkeypatch.delenv(name)
            settings = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY}
            write_config(tmp_path, "training", endpoint_url=strict.endpoint, region="eu-north-1", **settings)
        elif by == "option":
            options = {"endpoint_url": strict.endpoint, "region": "eu-north-1"}
        else:
            monkeypatch.setenv(by, strict.endpoint)
        assert works(open_at(f"s3://{BUCKET}/credentials", options))

    def test_the_storage_path_knows_the_endpoint_best(
        self, strict: StrictStore, keys: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        assert works(open_at(url("s3", strict), {"endpoint_url": "http://127.0.0.1:9"}))

    @pytest.mark.parametrize(
        "endpoint",
        [
            "https://s3.dualstack.eu-west-1.amazonaws.com",
            "https://bucket.vpce-1a.s3.eu-west-1.vpce.amazonaws.com",
            "https://minio.example",
            None,
        ],
    )
    def test_an_endpoint_that_is_not_the_usual_one_is_used(
        self, keys: None, endpoint: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
        if endpoint is not None:
            monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        store = S3Bucket(Location.parse("s3://bucket/x"), {}).connect(request_s=1, retry_s=1)
        config: Any = store.config
        wanted = endpoint or "https://s3.eu-west-1.amazonaws.com"
        assert (config["endpoint"], config["region"]) == (wanted, "eu-west-1")

    @pytest.mark.parametrize("nbytes", [1, 17 << 20])
    @pytest.mark.parametrize(
        "options", [{"sse": "AES256"}, {"sse": "aws:kms", "sse_kms_key_id": "arn:aws:kms:key/1"}]
    )
    def test_encryption_at_rest_is_requested(
        self, strict: StrictStore, keys: None, options: dict[str, str], nbytes: int
    ) -> None:
        bucket = f"b{uuid.uuid4().hex}"
        strict.make_bucket(bucket)
        files = open_at(bucket_url("s3", strict.endpoint, "runs", bucket), options)
        files.put("a", [bytes(nbytes)], max_bytes=nbytes)
        [stored] = strict.objects(bucket)
        headers = {name.lower(): value for name, value in stored["headers"].items()}
        assert headers["x-amz-server-side-encryption"] == options["sse"]
        if "sse_kms_key_id" in options:
            key_id = headers["x-amz-server-side-encryption-aws-kms-key-id"]
            assert key_id == options["sse_kms_key_id"]

    def test_a_checksum_that_nobody_knows(self, strict: StrictStore, keys: None) -> None:
        with pytest.raises(ConfigError, match="crc99") as caught:
            open_at(url("s3", strict), {"checksum": "crc99"})
        assert "crc64nvme" in caught.value.hint


class TestGcs:
    def test_a_service_account(self, strict: StrictStore, tokens: Tokens, account: None) -> None:
        given = tokens.given
        files = open_at(url("gs", strict))
        assert all(works(files) for _ in range(5))
        assert tokens.given == given + 1

    def test_a_token_that_expires_is_requested_again(
        self, strict: StrictStore, tokens: Tokens, account: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tokens, "valid_s", 2)
        monkeypatch.setattr(tokens, "token", "old")
        files = open_at(url("gs", strict))
        with pytest.raises(PermissionError):
            works(files)
        monkeypatch.setattr(tokens, "token", "strict-token")
        assert works_soon(files)

    def test_none_is_an_error_that_names_the_setting(self, strict: StrictStore) -> None:
        with pytest.raises(ConfigError, match=f"no Google credentials for gs://{BUCKET}") as caught:
            open_at(url("gs", strict))
        for way in ("GOOGLE_APPLICATION_CREDENTIALS", "account of its machine", "gcloud auth"):
            assert way in caught.value.hint

    @pytest.mark.parametrize("text", ["", "{}", "[]", '{"type": "service_account", "private_key": "x"}'])
    def test_a_key_file_that_is_none(
        self, strict: StrictStore, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "account.json"
        path.write_text(text)
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
        with pytest.raises(ConfigError) as caught:
            open_at(url("gs", strict))
        assert len(str(caught.value).splitlines()) == 1

    def test_a_token_that_cannot_be_had_is_an_os_error(
        self, strict: StrictStore, account: None, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files = open_at(url("gs", strict))
        monkeypatch.setattr(tokens, "answer", lambda: {"error": "invalid_grant"})
        for call in (lambda: works(files), lambda: list(files.uploads())):
            with pytest.raises(OSError) as caught:
                call()
            assert len(str(caught.value).splitlines()) == 1

    def test_a_token_takes_no_longer_than_a_request_of_the_log(
        self, strict: StrictStore, account: None, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All requests wait for it, those of the log too."""
        limits, send = [], requests.Session.request

        def noted(session: requests.Session, method: str, url: str, **options: Any) -> requests.Response:
            if url == tokens.uri:
                limits.append(options["timeout"])
            return send(session, method, url, **options)

        monkeypatch.setattr(requests.Session, "request", noted)
        assert works(open_at(url("gs", strict)))
        assert limits and max(limits) <= object_store.LOG_REQUEST_S

    def test_anonymous(self, strict: StrictStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """The strict store takes nobody without a token, so a refusal means that none was sent."""
        for call in calls_without_a_token(open_at(url("gs", strict), {"anonymous": "true"})):
            with pytest.raises(OSError, match=r"40[13]"):
                call()

    @pytest.mark.parametrize("with_scheme", [True, False])
    def test_an_emulator_is_found_by_its_variable_and_gets_no_token(
        self, strict: StrictStore, account: None, with_scheme: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        endpoint = strict.endpoint if with_scheme else strict.endpoint.removeprefix("http://")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)
        for call in calls_without_a_token(open_at(f"gs://{BUCKET}/credentials")):
            with pytest.raises(OSError, match=r"40[13]"):
                call()

    def test_the_endpoint_may_be_an_option(self, strict: StrictStore, account: None) -> None:
        assert works(open_at(f"gs://{BUCKET}/credentials", {"endpoint_url": strict.endpoint}))


def calls_without_a_token(files: FileStore) -> list[Any]:
    return [lambda: files.size("a"), lambda: list(files.uploads())]


def works_soon(files: FileStore) -> bool:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        try:
            return works(files)
        except PermissionError:
            time.sleep(0.1)
    return False
