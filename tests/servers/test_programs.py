"""Servers of the tests are found, or an error shows how to install them; they never outlive the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.servers import programs
from tests.servers.programs import GUARD, program

WAIT_S = 20.0


def wait_until(what: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def child_of(process: psutil.Process) -> psutil.Process:
    wait_until(process.children)
    [child] = process.children()
    return child


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # between the two questions
        return True


def test_a_missing_program_is_an_error_with_the_way_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(programs, "HOME", tmp_path)
    with pytest.raises(RuntimeError, match=r"run `make \.venv-servers/\.ready`"):
        program("ministack")


def test_a_server_ends_when_it_is_no_longer_wanted() -> None:
    with subprocess.Popen([sys.executable, "-I", GUARD, "sleep", "600"], stdin=subprocess.PIPE) as guard:
        server = child_of(psutil.Process(guard.pid))
        assert not is_gone(server) and guard.stdin is not None
        guard.stdin.close()
        guard.wait(WAIT_S)
    wait_until(lambda: is_gone(server))


def test_a_server_ends_when_the_tests_are_killed() -> None:
    command = [sys.executable, "-I", str(GUARD), "sleep", "600"]
    code = f"import subprocess as s, time; s.Popen({command!r}, stdin=s.PIPE); time.sleep(600)"
    tests = subprocess.Popen([sys.executable, "-c", code])
    server = child_of(child_of(psutil.Process(tests.pid)))
    os.kill(tests.pid, signal.SIGKILL)
    tests.wait()
    wait_until(lambda: is_gone(server))


def test_a_server_that_does_not_start_is_an_error_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    broken = tmp_path / "bin" / "ministack"
    broken.write_text("#!/bin/sh\necho no such option\nexit 2\n")
    broken.chmod(0o700)
    monkeypatch.setattr(programs, "HOME", tmp_path)
    with (
        pytest.raises(RuntimeError, match="ministack does not answer:\nno such option"),
        programs.ministack(tmp_path),
    ):
        pass
