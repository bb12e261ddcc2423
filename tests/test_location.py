"""Storage paths: one spelling each, and never a secret in one."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ray_ckpt
from ray_ckpt.config import RunOptions
from ray_ckpt.errors import ConfigError
from ray_ckpt.location import Location, locate, resolve_options, storage_options


@pytest.mark.parametrize(
    ("text", "spelling", "child"),
    [
        ("/a/b", "/a/b", "/a/b/gpt"),
        ("/a//b/../c/", "/a/c", "/a/c/gpt"),
        ("file:///a/b", "/a/b", "/a/b/gpt"),
        ("s3://bucket", "s3://bucket", "s3://bucket/gpt"),
        ("s3a://bucket/x/", "s3://bucket/x", "s3://bucket/x/gpt"),
        ("gcs://bucket/x/y", "gs://bucket/x/y", "gs://bucket/x/y/gpt"),
        ("S3://bucket/x y/ü=1+2", "s3://bucket/x y/ü=1+2", "s3://bucket/x y/ü=1+2/gpt"),
        (
            "s3://bucket/x/?scheme=http&endpoint_override=localhost%3A9000",
            "s3://bucket/x?endpoint_override=localhost:9000&scheme=http",
            "s3://bucket/x/gpt?endpoint_override=localhost:9000&scheme=http",
        ),
        ("sftp://me@host/x/", "sftp://me@host/x", "sftp://me@host/x/gpt"),
    ],
)
def test_a_storage_path_has_one_spelling(text: str, spelling: str, child: str) -> None:
    location = Location.parse(text)
    assert (str(location), str(location / "gpt")) == (spelling, child)
    assert Location.parse(spelling) == location
    assert (location / "gpt").parent == location and (location / "gpt").name == "gpt"
    assert pickle.loads(pickle.dumps(location)) == location


def test_the_parts_of_a_bucket_url() -> None:
    location = Location.parse("s3://bucket/a/b?endpoint_override=localhost:9000&scheme=http&region=eu-west-1")
    assert (location.bucket, location.key, location.region) == ("bucket", "a/b", "eu-west-1")
    assert location.endpoint == "http://localhost:9000"
    assert Location.parse("s3://bucket?endpoint_override=localhost:9000").endpoint == "https://localhost:9000"
    assert Location.parse("gs://bucket?endpoint_override=http://x:1").endpoint == "http://x:1"
    assert Location.parse("s3://bucket").endpoint is None


def test_a_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Location.parse("~/runs").folder == tmp_path / "runs"


@pytest.mark.parametrize(
    "text",
    [
        "relative/path",
        "",
        "s3://",
        "s3:///key",
        "s3://b",
        "s3://bucket/../other",
        "s3://bucket/a//b",
        "s3://bucket/a%2e",
        "s3://bucket/a#b",
        "s3://bucket/a\nb",
        "s3://bucket/a\ud800",
        "s3://bucket/a?region=b&region=a",
        "sftp://host/x?y=1",
        "/a\0b",
        "/a\ud800",
        "~\0",
        "~\ud800",
        "file:///a\0b",
    ],
)
def test_what_is_no_storage_path_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Location.parse(text)
    assert caught.value.hint


@pytest.mark.parametrize("text", ["a\0b", "~\0", "\ud800"])
def test_a_relative_path_that_no_file_can_have_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no file can have"):
        locate(text)


def test_a_folder_whose_name_is_no_text_is_a_location() -> None:
    assert Location.parse("/a\udcff").folder == Path("/a\udcff")


@pytest.mark.parametrize(
    "text",
    [
        "s3://AKIA:hunter2@bucket/x",
        "s3://hunter2@bucket",
        "gs://bucket?access_token=hunter2",
        "s3://bucket/x?secret_key=hunter2",
        "sftp://me:hunter2@host/x",
        "sftp://me:pa/hunter2@host/x",
        "s3://AKIA:abc/hunter2@bucket/p",
        "s3://AKIA:hunter2?x@bucket/p",
        " s3://AKIA:hunter2@bucket/p",
        "simplecache::s3://key:hunter2@bucket",
        "s3://bucket?endpoint_override=http://me:hunter2@host",
        "ftp://host/x?password=hunter2",
    ],
)
def test_secrets_in_a_url_are_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Location.parse(text)
    assert "hunter2" not in f"{caught.value}{caught.value!r}{caught.value.fields}"


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://bucket", {"secret_access_key": "hunter2"}),
        ("s3://bucket", {"key": "hunter2"}),
        ("gs://bucket", {"token": "hunter2"}),
        ("gs://bucket", {"sse": "hunter2"}),
        ("sftp://host/x", {"password": "hunter2"}),
        ("abfs://host/x", {"sas_token": "hunter2"}),
        ("abfs://host/x", {"account_key": "hunter2"}),
        ("/folder", {"profile": "hunter2"}),
        ("abfs://host/x", {"connection_string": "AccountKey=hunter2"}),
        ("abfs://host/x", {"accountKey": "hunter2"}),
        ("sftp://host/x", {"pwd": "hunter2"}),
        ("sftp://host/x", {"passphrase": "hunter2"}),
        ("sftp://host/x", {"proxy": "http://me:hunter2@host"}),
        ("s3://bucket", {"endpoint_url": "http://me:hunter2@host"}),
    ],
)
def test_options_that_hold_secrets_are_refused_and_not_repeated(url: str, options: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        storage_options(Location.parse(url), options)
    assert caught.value.hint and "hunter2" not in f"{caught.value}{caught.value!r}{caught.value.fields}"


@pytest.mark.parametrize("url", ["s3://bucket/x", "gs://bucket/x"])
def test_a_backend_that_is_not_known_is_refused(url: str) -> None:
    assert storage_options(Location.parse(url), {"backend": "fsspec"}) == {"backend": "fsspec"}
    with pytest.raises(ConfigError, match="option backend is not one of obstore, fsspec"):
        storage_options(Location.parse(url), {"backend": "boto3"})


def test_options_may_name_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    options = storage_options(
        Location.parse("sftp://host/x"), {"password": "env:SFTP_PASSWORD", "port": "22"}
    )
    monkeypatch.delenv("SFTP_PASSWORD", raising=False)
    with pytest.raises(ConfigError, match="SFTP_PASSWORD"):
        resolve_options(options)
    monkeypatch.setenv("SFTP_PASSWORD", "hunter2")
    assert resolve_options(options) == {"password": "hunter2", "port": "22"}
    assert "hunter2" not in repr(options)


def test_a_run_takes_names_and_texts_only() -> None:
    assert RunOptions.parse(storage_options={"profile": "training"}, compress=3, drain_bytes_per_s=1)
    for bad in ({"profile": 3}, ["profile"], "profile"):
        with pytest.raises(ConfigError, match="storage_options"):
            RunOptions.parse(storage_options=bad)
    for level in (0, 20, "3"):
        with pytest.raises(ConfigError, match="compress"):
            RunOptions.parse(compress=level)


@given(st.text(max_size=60))
def test_any_text_is_a_location_or_an_error_of_ours(text: str) -> None:
    for candidate in (text, f"s3://{text}", f"gs://bucket/{text}", f"file://{text}", f"x://{text}"):
        try:
            location = Location.parse(candidate)
        except ConfigError:
            continue
        assert Location.parse(str(location)) == location


def test_an_empty_path_is_not_the_working_directory() -> None:
    assert locate(".") == locate(Path.cwd())
    with pytest.raises(ConfigError, match="The path is empty"):
        locate("")


@pytest.mark.parametrize("path", [None, 5, b"/tmp", ["/tmp"]])
def test_a_path_that_is_no_text_is_refused(path: Any) -> None:
    for use in (locate, Location.parse, ray_ckpt.open):
        with pytest.raises(ConfigError, match=f"The path is of type {type(path).__name__}") as caught:
            use(path)
        assert "pathlib.Path" in str(caught.value.hint)
