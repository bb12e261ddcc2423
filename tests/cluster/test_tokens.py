"""A cluster whose Ray has turned tokens on, as `ray.init()` does, and `ray-ckpt` from another shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.sample_run import write_run

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

START_S = 90.0
COMMAND_S = 90.0
DRIVER = """
import sys
import ray
ray.init(num_cpus=1, include_dashboard=False, logging_level="error", _temp_dir=sys.argv[1])
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


class Guarded:
    """A cluster of a driver in another process. `home` has its token."""

    def __init__(self, address: str, home: Path) -> None:
        self.address = address
        self.home = home

    def ray_ckpt(self, *args: object, **environment: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return subprocess.run(
            [sys.executable, "-m", "ray_ckpt.cli", *map(str, args)],
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            env={**clean, "HOME": str(self.home), **environment},
        )


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    home = tmp_path_factory.mktemp("home")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with (
        tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder,  # its path is short
        subprocess.Popen(
            [sys.executable, "-c", DRIVER, folder],
            env={**clean, "HOME": str(home), "RAY_CKPT_METADATA": "off"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as driver,
    ):
        assert driver.stdin is not None and driver.stdout is not None
        address = driver.stdout.readline().strip()
        assert (home / ".ray" / "auth_token").exists(), "Ray has turned tokens on"
        yield Guarded(address, home)
        driver.stdin.close()
        driver.wait(START_S)


def as_json(done: subprocess.CompletedProcess[str]) -> Any:
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_the_token_of_this_user_is_found(guarded: Guarded) -> None:
    assert as_json(guarded.ray_ckpt("up", "--address", guarded.address, "--json"))["started"]
    for environment in ({"RAY_ADDRESS": guarded.address}, {"RAY_AUTH_MODE": "token"}):
        view = as_json(guarded.ray_ckpt("status", "--address", guarded.address, "--json", **environment))
        assert view["runs"] == []
    assert "No run is open" in guarded.ray_ckpt("top", "--once", "--address", guarded.address).stdout
    token = (guarded.home / ".ray" / "auth_token").read_text()
    environment = {"HOME": "/nonexistent", "RAY_AUTH_TOKEN": token}
    view = as_json(guarded.ray_ckpt("status", "--address", guarded.address, "--json", **environment))
    assert view["runs"] == []


def test_without_the_token_an_error_shows_what_ray_needs(guarded: Guarded, tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs")
    wrong = {"RAY_AUTH_TOKEN": "ab" * 32}
    for environment in ({"HOME": str(tmp_path)}, {"RAY_AUTH_MODE": "disabled"}, wrong):
        for args in (("status",), ("pin", run.folder, 10, "--owner", "me")):
            done = guarded.ray_ckpt(*args, "--address", guarded.address, **environment)
            assert (done.returncode, done.stdout) == (2, "")
            assert f"The Ray cluster at {guarded.address} wants its token: " in done.stderr
            assert "missing or incorrect. Set RAY_AUTH_MODE=token, and give the token" in done.stderr
    done = guarded.ray_ckpt("status", "--address", guarded.address, HOME=str(tmp_path), RAY_AUTH_MODE="token")
    assert done.returncode == 2 and "couldn't find an authentication token" in done.stderr
