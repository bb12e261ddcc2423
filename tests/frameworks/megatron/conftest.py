"""One node and groups of ranks that the tests share: each process takes long to import Megatron."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.demo.local_cluster import LocalCluster
from tests.cluster.ranks import RankGroup
from tests.frameworks.megatron import program


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    cluster = LocalCluster(tmp_path_factory.mktemp("staging"), ["node-a"])
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="package")
def pair(cluster: LocalCluster) -> Iterator[RankGroup]:
    """Two ranks that no test ends."""
    group = RankGroup([cluster.nodes["node-a"].node_id] * 2)
    group.run(program.set_tensor_parallelism, 1)  # a call has a limit of time, which imports take a part of
    yield group
    group.stop()


@pytest.fixture(scope="package")
def single(cluster: LocalCluster) -> Iterator[RankGroup]:
    """One rank that no test ends."""
    group = RankGroup([cluster.nodes["node-a"].node_id])
    group.run(program.set_tensor_parallelism, 1)
    yield group
    group.stop()


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return str(tmp_path / "storage")


@pytest.fixture
def folders(tmp_path: Path) -> str:
    """The folder in which Megatron looks for folders of checkpoints."""
    return str(tmp_path / "folders")
