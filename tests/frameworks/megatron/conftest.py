"""One node that the tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.demo.local_cluster import LocalCluster


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    cluster = LocalCluster(tmp_path_factory.mktemp("staging"), ["node-a"])
    yield cluster
    cluster.shutdown()


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return str(tmp_path / "storage")
