"""No secret leaves the process but to the store it is for (P10): a canary is looked for everywhere else.

A process is given credentials that hold a marked value, does all that it can with a store, well and badly,
and then the value must not be found in any log, error, repr, pickle or stored byte: as it is, as a URL or
base64 has it. The logs of client libraries at DEBUG are theirs; `LEAKING` names those that log it.
"""

from __future__ import annotations

import base64
import json
import logging
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest

from ray_ckpt.config import RunOptions
from ray_ckpt.errors import CheckpointError, ConfigError, StorageNotShared
from ray_ckpt.format.digest import digest
from ray_ckpt.format.names import shard_file
from ray_ckpt.location import Location, storage_options
from ray_ckpt.storage.log_store import CreateResult
from ray_ckpt.storage.remote.tier import RemoteRef, RemoteTier
from ray_ckpt.types import FileEntry
from tests.servers.patience import lose_patience
from tests.servers.programs import ACCESS_KEY
from tests.servers.providers import Tokens
from tests.servers.stores import bucket_url, fsspec_location
from tests.servers.strict_store import DropAfter, Fault, Match, Status, Truncate
from tests.servers.strict_store.server import Server, Settings
from tests.support.examples import every_few

CANARY = "C4n4ry+Sings/At=Dawn"  # with what URLs and base64 write in another way
SESSION = f"{CANARY}-session"
KINDS = ("s3", "gs", "s3fs", "gcsfs", "fsspec-s3", "fsspec-gs")
LEAKING = {"botocore.auth", "botocore.endpoint"}
"""Loggers of libraries that write session tokens at DEBUG, as parts of requests: leave them off."""
DIRECTORY = "000000000010-0123456789abcdef"
SHARD = shard_file(0, 1)
MIB = 1 << 20
FAULTS = (
    Fault(action=Status(503)),
    Fault(action=Status(403)),
    Fault(action=Status(400, "InvalidToken")),
    Fault(action=DropAfter(), every=2),
    Fault(match=Match(operation="GetObject"), action=Truncate(1)),
)


def spellings(secret: str) -> set[str]:
    """Return spellings of a secret: plain, in a URL, in JSON, in hex, in base64 anywhere in a longer text."""
    data = secret.encode()
    found = {secret, quote(secret), quote(secret, safe=""), quote_plus(secret), data.hex()}
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        for shift in range(3):
            text = encode(b"x" * shift + data).decode()
            found.add(text[4 if shift else 0 : -4])  # the ends depend on what stands beside it
    return found


SPELLINGS = spellings(CANARY)


def secrets_in(text: str) -> list[str]:
    return sorted(spelling for spelling in SPELLINGS if spelling in text)


@dataclass
class Watch(logging.Handler):
    """All that was logged, by logger."""

    logged: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    errors: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(level=0)

    __hash__ = object.__hash__

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{record.getMessage()} {record.args!r}"
        if record.exc_info:
            text += "".join(traceback.format_exception(*record.exc_info))
        self.logged.setdefault((record.name, record.levelno), []).append(text)

    def attempt(self, call: Callable[[], object]) -> None:
        """Do it, and keep what it raises."""
        try:
            call()
        except Exception as error:
            self.errors.append(error)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Every logger at DEBUG."""
    watch, root = Watch(), logging.getLogger()
    level = root.level
    root.addHandler(watch)
    root.setLevel(logging.DEBUG)
    for name in ("botocore", "urllib3", "s3fs", "gcsfs", "fsspec", "ray_ckpt", "google.auth"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.DEBUG)
        monkeypatch.setattr(logging.getLogger(name), "disabled", False)
    yield watch
    root.removeHandler(watch)
    root.setLevel(level)


@pytest.fixture
def server(
    credentials: None, tokens: Tokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Server]:
    """A store for which the canary is the right secret; and it is in the environment."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    monkeypatch.setenv("AWS_SESSION_TOKEN", SESSION)
    monkeypatch.setenv("A_SECRET_OPTION", CANARY)
    monkeypatch.setattr(tokens, "token", CANARY)
    lose_patience(monkeypatch, tries=1)
    settings = Settings(secret_key=CANARY, token=CANARY, buckets=("test",), directory=tmp_path / "store")
    with Server(settings) as server:
        yield server


def reference(kind: str, endpoint: str, bucket: str = "test") -> RemoteRef:
    """Return a run's remote tier as it travels between processes."""
    if kind in ("s3", "gs"):
        return RemoteRef(storage_path=bucket_url(kind, endpoint, "runs", bucket), run_name="gpt")
    if (scheme := kind.removeprefix("fsspec-")) != kind:
        url = bucket_url(scheme, endpoint, "runs", bucket)
        return RemoteRef(storage_path=url, run_name="gpt", options=(("backend", "fsspec"),))
    location, options = fsspec_location(kind, endpoint, "runs", bucket)
    if kind == "s3fs":
        options |= {"key": "env:AWS_ACCESS_KEY_ID", "secret": "env:A_SECRET_OPTION"}
    return RemoteRef(storage_path=str(location), run_name="gpt", options=tuple(sorted(options.items())))


def use(tier: RemoteTier, watch: Watch, path: Path) -> None:
    """Use a storage path in all ways in which a run does."""
    data = path.read_bytes()
    entry = FileEntry(name=SHARD, size_bytes=len(data), digest=digest(data))
    for call in (
        lambda: tier.probe_log(),
        lambda: tier.leave_nonce("nonce"),
        lambda: tier.check_shared("nonce", node="n1"),
        lambda: tier.check_shared("other", node="n1"),
        lambda: tier.put_file(DIRECTORY, entry, path),
        lambda: tier.put_file(DIRECTORY, entry, path, level=1),
        lambda: list(tier.blocks(DIRECTORY, SHARD)),
        lambda: tier.read_whole(DIRECTORY, SHARD, max_bytes=1),
        lambda: list(tier.read(DIRECTORY, SHARD, [(len(data), 10)])),
        lambda: tier.put(DIRECTORY, "checkpoint.json", b"{}"),
        lambda: tier.files_of(DIRECTORY),
        lambda: tier.directories(),
        lambda: tier.now_s(),
        lambda: list(tier.uploads()),
        lambda: tier.abort(DIRECTORY, SHARD, "no-upload"),
        lambda: tier.log.create("a", b"1"),
        lambda: tier.log.read("b"),
        lambda: tier.log.list(),
        lambda: tier.log.delete("a"),
        lambda: tier.delete("000000000020-0123456789abcdef"),
        lambda: tier.files.children(),
    ):
        watch.attempt(call)


def all_of(error: BaseException) -> str:
    """Return all that can be printed of an error and of its causes, and the bytes that Ray would send."""
    texts = [str(error), repr(error), "".join(traceback.format_exception(error))]
    if isinstance(error, CheckpointError):
        texts += [error.hint, repr(error.fields), pickle.dumps(error).decode("latin-1")]
    for cause in (error.__cause__, error.__context__):
        if cause is not None:
            texts.append(all_of(cause))
    return "\n".join(texts)


def check(watch: Watch, capfd: pytest.CaptureFixture[str]) -> set[str]:
    """Assert that the canary appears nowhere; return the library loggers that have logged it all the same."""
    for error in watch.errors:
        assert not secrets_in(all_of(error)), f"{type(error).__name__}"
    output = capfd.readouterr()
    assert not secrets_in(output.out + output.err)
    leaking = {logger for logger, texts in watch.logged.items() if secrets_in("\n".join(texts))}
    assert leaking <= {(name, logging.DEBUG) for name in LEAKING}
    return {name for name, _ in leaking}


def test_the_spellings_are_found_where_they_hide() -> None:
    for hidden in (
        json.dumps({"a": CANARY}),
        f"https://x/?secret={quote_plus(CANARY)}&b",
        *(base64.b64encode(f"{'x' * n}{CANARY}yz".encode()).decode() for n in range(6)),
        *(base64.urlsafe_b64encode(f"{'x' * n}{CANARY}yz".encode()).decode() for n in range(6)),
    ):
        assert secrets_in(hidden), hidden
    assert not secrets_in("c4n4ry sings at dawn")


def some_slow(*slow: str) -> list[Any]:
    return [pytest.param(kind, marks=pytest.mark.slow if kind in slow else ()) for kind in KINDS]


def staged(folder: Path, nbytes: int) -> Path:
    path = folder / "shard"
    path.write_bytes(bytes(range(256)) * (nbytes // 256))
    return path


@pytest.mark.parametrize("kind", some_slow("s3fs", "gcsfs", "fsspec-s3"))
def test_a_run_that_goes_well(
    kind: str, server: Server, watch: Watch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ref = reference(kind, server.endpoint)
    tier = pickle.loads(pickle.dumps(ref)).open()
    use(tier, watch, staged(tmp_path, 17 * MIB))
    assert {type(error) for error in watch.errors} <= {StorageNotShared, EOFError}
    assert len(tier.files_of(DIRECTORY)) > 1 and tier.log.create("still", b"works") is CreateResult.OK
    leaked = check(watch, capfd)
    assert leaked <= LEAKING and bool(leaked) == kind.endswith("s3")  # botocore logs some of them
    for path in (tmp_path / "store").rglob("*"):
        assert not secrets_in(path.name + (path.read_bytes().decode("latin-1") if path.is_file() else ""))
    options = RunOptions(storage_options=dict(ref.options))
    for text in (repr(ref), repr(options), repr(tier), repr(vars(tier)), tier.where, repr(tier.root)):
        assert not secrets_in(text)
    for value in (ref, options, tier.root):
        assert not secrets_in(pickle.dumps(value).decode("latin-1"))


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        *(("s3", fault) for fault in FAULTS),
        *every_few((("gs", fault) for fault in FAULTS), 3),
    ],
    ids=lambda value: (
        f"{type(value.action).__name__}{getattr(value.action, 'status', '')}"
        if isinstance(value, Fault)
        else value
    ),
)
def test_a_store_that_fails(
    kind: str, fault: Fault, server: Server, watch: Watch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server.add_fault(fault)
    use(reference(kind, server.endpoint).open(), watch, staged(tmp_path, MIB))
    assert watch.errors
    check(watch, capfd)


@pytest.mark.parametrize("kind", some_slow("s3fs", "gcsfs", "fsspec-s3"))
def test_a_store_that_knows_another_secret_or_is_gone(
    kind: str, server: Server, watch: Watch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Server(Settings(buckets=("test",))) as other:
        use(reference(kind, other.endpoint).open(), watch, staged(tmp_path, MIB))
    assert len(watch.errors) > 10
    use(reference(kind, "http://127.0.0.1:9").open(), watch, staged(tmp_path, MIB))
    assert len(watch.errors) > 25
    check(watch, capfd)


@pytest.mark.parametrize("kind", some_slow("s3fs", "gcsfs", "fsspec-gs"))
def test_a_bucket_that_is_not_there(
    kind: str, server: Server, watch: Watch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    use(reference(kind, server.endpoint, "absent").open(), watch, staged(tmp_path, MIB))
    assert watch.errors
    check(watch, capfd)


@pytest.mark.parametrize("secret", [quote(CANARY, safe=""), "Canary"])
@pytest.mark.parametrize(
    "text",
    [
        "s3://id:{}@bucket/runs",
        "gs://id:{}@bucket/runs",
        "sftp://id:{}@host/runs",
        "abfs://id:{}@host/runs",
        "s3://bucket/runs?secret_key={}",
        "s3://bucket/runs?access_key=x&secret_key={}&endpoint_override=x",
        "gs://bucket/runs?credentials={}",
        "sftp://host/runs?password={}",
        "s3://bucket/runs?endpoint_override=http://id:{}@host:1",
        "s3://bucket/runs?endpoint_override=id:{}@host:1",
        "https://id:{}@host/runs",
    ],
)
def test_a_storage_path_with_a_secret_is_refused_without_showing_it(text: str, secret: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Location.parse(text.format(secret))
    assert secret not in all_of(caught.value) and CANARY not in all_of(caught.value)


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("s3://bucket", {"secret": CANARY}),
        ("s3://bucket", {"aws_secret_access_key": CANARY}),
        ("s3://bucket", {"endpoint_url": f"https://id:{quote(CANARY, safe='')}@host"}),
        ("gs://bucket", {"token": CANARY}),
        ("gs://bucket", {"endpoint_url": f"https://id:{quote(CANARY, safe='')}@host"}),
        ("abfs://container", {"account_key": CANARY}),
        ("abfs://container", {"sas_token": CANARY}),
        ("abfs://container", {"connection_string": f"AccountName=x;AccountKey={CANARY}"}),
        ("sftp://host/x", {"password": CANARY}),
        ("sftp://host/x", {"passphrase": CANARY}),
        ("smb://host/x", {"pwd": CANARY}),
        ("/folder", {"password": CANARY}),
    ],
)
def test_a_storage_option_with_a_secret_is_refused_without_showing_it(
    path: str, options: dict[str, str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        storage_options(Location.parse(path), options)
    assert not secrets_in(all_of(caught.value))


def test_a_provider_that_prints_nonsense(
    credentials: None, watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output of a program for credentials is not shown, even if the output is not as expected."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    config = tmp_path / "config"
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    for number, answer in enumerate(
        (
            f"SecretAccessKey={CANARY}",
            json.dumps({"Version": 2, "SecretAccessKey": CANARY}),
            json.dumps({"Version": 1, "SecretAccessKey": CANARY}),
            json.dumps(
                {"Version": 1, "AccessKeyId": ACCESS_KEY, "SecretAccessKey": CANARY, "Expiration": "x"}
            ),
        )
    ):
        script = tmp_path / f"provider-{number}"
        script.write_text(f"#!{sys.executable} -I\nprint({answer!r})\n")
        script.chmod(0o700)
        config.write_text(f"[profile p]\ncredential_process = {script}\n")
        with pytest.raises(ConfigError) as caught:
            RemoteTier(Location.parse("s3://bucket/runs"), {"profile": "p"}).log  # noqa: B018
        assert not secrets_in(all_of(caught.value)), answer


def test_a_key_file_that_is_damaged(
    credentials: None, watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "account.json"
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
    for text in (
        f"{CANARY} is no JSON",
        json.dumps({"type": "service_account", "private_key": CANARY}),
        json.dumps(
            {
                "type": "service_account",
                "private_key": CANARY,
                "client_email": "a@b",
                "token_uri": "http://127.0.0.1:9",
            }
        ),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            RemoteTier(Location.parse("gs://bucket/runs")).log  # noqa: B018
        assert not secrets_in(all_of(caught.value)), text


def test_a_secret_by_reference_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET", CANARY)
    monkeypatch.delenv("NOT_SET", raising=False)
    options = {"username": "env:SET", "password": "env:NOT_SET"}
    with pytest.raises(ConfigError, match="NOT_SET") as caught:
        RemoteTier(Location.parse("sftp://host/runs"), options).log  # noqa: B018
    assert not secrets_in(all_of(caught.value))


def test_a_file_system_that_refuses_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET", CANARY)
    for scheme in ("sftp", "no-such-scheme", "memory"):
        tier = RemoteTier(Location.parse(f"{scheme}://host/runs"), {"an_option": "env:SET"})
        with pytest.raises((ConfigError, OSError)) as caught:
            tier.files.put("a", [b"1"], max_bytes=1)
            raise OSError("taken")
        assert not secrets_in(all_of(caught.value)), scheme
