"""Agents that cannot reach each other, on nodes in network namespaces: see `tests.fault.partitions`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fault import partitions
from tests.fault.namespaces import why_not
from tests.fault.rig import wait_for

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(bool(reason := why_not()), reason=reason or "there are network namespaces"),
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short name, since sockets have theirs in it."""
    found = Path(tempfile.mkdtemp(prefix="cuts-"))
    yield found
    shutil.rmtree(found)


@pytest.mark.timeout(300)
def test_saves_go_on_while_two_agents_cannot_reach_each_other(no_cluster: None, folder: Path) -> None:
    """P1 and P2 with a silent link: a third node is free to hold the copies."""
    rows = partitions.run((("one-way", 70.0), ("two-way", 35.0)), (1.0, 4.0), folder, within_s=280.0)
    print(partitions.table(rows))
    assert len(rows) == 4
    assert not [problem for row in rows for problem in row.problems()], partitions.table(rows)


def test_nothing_is_left_of_a_cluster_in_namespaces(no_cluster: None, folder: Path) -> None:
    """Neither namespaces nor processes, also if whoever has made them is killed."""
    program = f"""
import pathlib, time
from tests.fault.namespaces import Namespaces
with Namespaces(pathlib.Path({os.fspath(folder)!r}), ()) as net:
    net.python("-c", "import time; time.sleep(1000)")
    print("up", flush=True)
    time.sleep(1000)
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None and maker.stdout.readline() == "up\n"
        prefix = f"rckpt-{maker.pid}-"
        spaces = [name for name in _namespaces() if name.startswith(prefix)]
        pids = _pids(spaces)
        assert spaces and pids
        maker.kill()
    wait_for(lambda: not any(name.startswith(prefix) for name in _namespaces()), what="they are deleted")
    wait_for(lambda: not any(map(psutil.pid_exists, pids)), what="their processes are gone")  # and reaped


def _namespaces() -> list[str]:
    lines = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [line.split()[0] for line in lines]


def _pids(spaces: list[str]) -> list[int]:
    found = [subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True) for name in spaces]
    return [int(pid) for done in found for pid in done.stdout.split()]
