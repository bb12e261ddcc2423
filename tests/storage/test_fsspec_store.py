"""A file system of fsspec that cannot be opened."""

from __future__ import annotations

from typing import Any

import fsspec
import pytest

from ray_ckpt.errors import ConfigError
from ray_ckpt.location import Location
from ray_ckpt.storage.remote.fsspec_store import FsspecStore


class Refused(Exception):
    """An error as paramiko and the SDKs of clouds have their own."""


@pytest.fixture
def scheme() -> str:
    class Refusing(fsspec.AbstractFileSystem):  # type: ignore[misc]
        def __init__(self, error: str = "", **options: Any) -> None:
            super().__init__(**options)
            raise {"refused": Refused, "away": ConnectionRefusedError}[error]("no\nentry")

    fsspec.register_implementation("refusing", Refusing, clobber=True)
    return "refusing"


def test_an_error_of_a_client_library_is_a_config_error_of_one_line(scheme: str) -> None:
    with pytest.raises(ConfigError, match="Refused: no entry") as caught:
        FsspecStore.open(Location.parse(f"{scheme}://host/x"), {"error": "refused"})
    assert caught.value.hint and len(str(caught.value).splitlines()) == 1


def test_a_server_that_is_away_is_an_os_error(scheme: str) -> None:
    with pytest.raises(ConnectionRefusedError):
        FsspecStore.open(Location.parse(f"{scheme}://host/x"), {"error": "away"})


def test_a_scheme_of_nobody_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="nobody:// cannot be opened"):
        FsspecStore.open(Location.parse("nobody://host/x"), {})
