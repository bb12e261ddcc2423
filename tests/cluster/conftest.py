"""One cluster for all tests that do not break it: a head and three nodes with one CPU each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.local_cluster import LocalCluster
from tests.cluster.ranks import RankGroup


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("staging"), ["node-a", "node-b", "node-c"]) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def group(cluster: LocalCluster) -> Iterator[RankGroup]:
    """Two ranks of torch.distributed on two nodes, without Ray Train; each test names its own run."""
    group = RankGroup([cluster.nodes["node-a"].node_id, cluster.nodes["node-b"].node_id])
    yield group
    group.stop()


@pytest.fixture
def spare_group(cluster: LocalCluster) -> Iterator[RankGroup]:
    """Ranks for one test that leaves them out of step with each other."""
    group = RankGroup([cluster.nodes["node-a"].node_id, cluster.nodes["node-b"].node_id])
    yield group
    group.stop()


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return str(tmp_path / "storage")
