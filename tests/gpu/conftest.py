"""Collection of the tests that need a CUDA device: only `make test-gpu` runs them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.demo.local_cluster import LocalCluster


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Ignore this folder unless RAY_CKPT_GPU is set, which `make test-gpu` does."""
    return None if os.environ.get("RAY_CKPT_GPU") else True


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("staging"), ["node"], cpus=4) as cluster:
        yield cluster
