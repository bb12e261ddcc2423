"""One cluster for all tests of this folder that leave it as they found it: a head and three nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from jobs.demo.local_cluster import LocalCluster
from tests.fault.rig import Rig

for name, value in (("AWS_ACCESS_KEY_ID", "strict"), ("AWS_SECRET_ACCESS_KEY", "strict-secret")):
    os.environ.setdefault(name, value)  # of the strict store, for the nodes as for this process
NODES = ("node-a", "node-b", "node-c")
MakeRig = Callable[..., Rig]


class Home:
    """The shared cluster, started by the first test that needs it; missing nodes are brought back."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._starts = 0
        self._cluster: LocalCluster | None = None

    def start(self) -> LocalCluster:
        if self._cluster is None:
            ray.shutdown()  # this process may be connected to another folder's cluster
            self._starts += 1
            self._cluster = LocalCluster(self._root / f"staging-{self._starts}", NODES)
        for name in NODES:
            if name not in self._cluster.nodes:
                self._cluster.add(name)
        return self._cluster

    def stop(self) -> None:
        if self._cluster is not None:
            self._cluster.shutdown()
        self._cluster = None
        ray.shutdown()


@pytest.fixture(scope="package")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    home = Home(tmp_path_factory.mktemp("home"))
    yield home
    home.stop()


@pytest.fixture
def no_cluster(home: Home) -> None:
    """Disconnect for tests that start clusters of their own: a process is connected to one at a time."""
    home.stop()


@pytest.fixture
def make_rig(home: Home, tmp_path: Path) -> Iterator[MakeRig]:
    """A run in the shared cluster: `make_rig("name", every_steps=2)`."""
    rigs: list[Rig] = []

    def make(run: str, **options: Any) -> Rig:
        rigs.append(Rig(home.start(), tmp_path, run, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.stop()
