"""One Ray node for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from jobs.demo.local_cluster import LocalCluster
from tests.cluster import ranks

ranks.CALL_S = 400.0  # a call imports DeepSpeed first, which takes long on a busy machine
Ranks = Callable[..., Sequence[Any]]


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with LocalCluster(tmp_path_factory.mktemp("staging"), ["node"], cpus=4) as cluster:
        yield cluster.nodes["node"].node_id


@pytest.fixture(scope="session")
def on_ranks(node: str) -> Ranks:
    """Return a function that runs a function on new processes: `on_ranks(2, function, *args)`."""

    def run(num_ranks: int, function: Callable[..., Any], *args: Any) -> Sequence[Any]:
        group = ranks.RankGroup([node] * num_ranks)
        try:
            return group.run(function, *args)
        finally:
            group.stop()

    return run


@pytest.fixture(scope="session")
def storage(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("storage"))
