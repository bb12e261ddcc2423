"""Servers that are started when a test first needs them, and end with the last test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.servers import programs, stores
from tests.servers.providers import Tokens, token_server
from tests.servers.stores import BUCKET, Store
from tests.servers.strict_store import StrictStore


@pytest.fixture(scope="session")
def servers_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs of the servers, and what some of them store."""
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="session")
def ministack(servers_folder: Path) -> Iterator[str]:
    with programs.ministack(servers_folder) as url:
        yield url


@pytest.fixture(scope="session")
def moto(servers_folder: Path) -> Iterator[str]:
    with programs.moto(servers_folder) as url:
        yield url


@pytest.fixture(scope="session")
def rclone(servers_folder: Path) -> Iterator[str]:
    with programs.rclone(servers_folder) as url:
        yield url


@pytest.fixture(scope="session")
def strict_process() -> Iterator[StrictStore]:
    """One strict store for all tests; `strict` removes its faults after each test."""
    with StrictStore.process(buckets=(BUCKET,)) as store:
        yield store


@pytest.fixture
def strict(strict_process: StrictStore) -> Iterator[StrictStore]:
    yield strict_process
    strict_process.clear_faults()
    strict_process.set_clock_offset(0.0)


@pytest.fixture(scope="session")
def tokens() -> Iterator[Tokens]:
    """Where service accounts get their tokens from."""
    with token_server() as running:
        yield running


@pytest.fixture(scope="session")
def environment(servers_folder: Path, tokens: Tokens) -> dict[str, str]:
    """Credentials for all servers, in variables."""
    return stores.environment(servers_folder, tokens.uri)


@pytest.fixture
def credentials(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has credentials for all servers, and no others."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="session")
def open_store(
    request: pytest.FixtureRequest, environment: dict[str, str], servers_folder: Path
) -> Callable[[str], Store]:
    """Return a store by its name; the same one for all callers."""

    def strict_url() -> str:
        process: StrictStore = request.getfixturevalue("strict_process")
        return process.endpoint

    openers: dict[str, Callable[[], Store]] = {
        "posix": lambda: stores.folder_store("posix", servers_folder / "posix"),
        "ministack": lambda: stores.s3_store("ministack", request.getfixturevalue("ministack")),
        "moto": lambda: stores.s3_store("moto", request.getfixturevalue("moto")),
        "strict-s3": lambda: stores.s3_store("strict-s3", strict_url()),
        "strict-gcs": lambda: stores.gcs_store("strict-gcs", strict_url()),
        "fsspec-s3": lambda: stores.s3_store("fsspec-s3", strict_url(), {"backend": "fsspec"}),
        "fsspec-gcs": lambda: stores.gcs_store("fsspec-gcs", strict_url(), {"backend": "fsspec"}),
        "s3fs": lambda: stores.fsspec_store("s3fs", request.getfixturevalue("ministack")),
        "gcsfs": lambda: stores.fsspec_store("gcsfs", strict_url()),
    }
    opened: dict[str, Store] = {}

    def open_(name: str) -> Store:
        if name not in opened:
            with pytest.MonkeyPatch.context() as patch:
                for variable, value in environment.items():
                    patch.setenv(variable, value)
                opened[name] = openers[name]()
        return opened[name]

    return open_
