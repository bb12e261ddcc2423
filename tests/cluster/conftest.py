"""One cluster for all tests that do not break it: a head and three nodes with one CPU each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.config import RELAY_NODES_ENV
from tests.cluster.ranks import RankGroup

HERE = Path(__file__).parent
OF_FRAMEWORKS = {f"test_{name}.py" for name in ("accelerate", "four_hooks", "huggingface", "lightning")}
TWO_NODES, ONE_NODE = "ab", "aa"  # where rank 0 and rank 1 are
everywhere = pytest.mark.parametrize(  # on one node as newcomers have it; two take as long again
    "spare_group",
    [pytest.param(TWO_NODES, id="two nodes", marks=pytest.mark.slow), pytest.param(ONE_NODE, id="one node")],
    indirect=True,
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files with slow tests only whose imports take 7 s, if no slow test is wanted."""
    is_left_out = collection_path.name in OF_FRAMEWORKS and "not slow" in config.option.markexpr
    return True if is_left_out else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the tests that stop the shared cluster behind those that use it, so that it starts once."""
    places = [k for k, item in enumerate(items) if item.path.parent == HERE]
    ordered = sorted((items[k] for k in places), key=lambda item: "no_cluster" in _fixtures(item))
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


def _fixtures(item: pytest.Item) -> Sequence[str]:
    return getattr(item, "fixturenames", ())


class Shared:
    """The cluster that tests share, started by the first that needs it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._starts = 0
        self.cluster: LocalCluster | None = None
        self.group: RankGroup | None = None

    def start(self) -> LocalCluster:
        if self.cluster is None:
            self._starts += 1
            names = ["node-a", "node-b", "node-c"]
            os.environ[RELAY_NODES_ENV] = (
                "2"  # orders to all four nodes go through relays, to two they do not
            )
            self.cluster = LocalCluster(self._root / f"staging-{self._starts}", names)
        return self.cluster

    def stop(self) -> None:
        if self.cluster is not None:
            self.cluster.shutdown()
        self.cluster = self.group = None


@pytest.fixture(scope="package")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    shared = Shared(tmp_path_factory.mktemp("shared"))
    yield shared
    shared.stop()


@pytest.fixture
def cluster(shared: Shared) -> LocalCluster:
    return shared.start()


@pytest.fixture
def no_cluster(shared: Shared) -> None:
    """Disconnect from the shared cluster, for tests that start their own: a process has one connection."""
    shared.stop()


@pytest.fixture
def group(shared: Shared, cluster: LocalCluster) -> RankGroup:
    """Two ranks of torch.distributed on two nodes, without Ray Train; each test names its own run."""
    if shared.group is None:
        shared.group = RankGroup([cluster.nodes["node-a"].node_id, cluster.nodes["node-b"].node_id])
    return shared.group


@pytest.fixture(params=[TWO_NODES])
def spare_group(cluster: LocalCluster, request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    """Ranks for one test that leaves them out of step with each other; the parameter has a node for each."""
    group = RankGroup([cluster.nodes[f"node-{letter}"].node_id for letter in request.param])
    yield group
    group.stop()


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return str(tmp_path / "storage")
