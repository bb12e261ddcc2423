"""A checkpoint that no storage path has yet, opened from the nodes that hold it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ray_ckpt
from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.errors import ConfigError, RestoreError
from tests.cluster.ranks import RankGroup, Training
from tests.fault.rig import flip, shards

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
NODES = ("node-a", "node-b", "node-c")


def train(storage: str) -> dict[str, torch.Tensor]:
    """Train to step 4, which every rank's node and another one then hold; return the weights."""
    options: dict[str, Any] = {"every_steps": 2, "remote_every": 1000, "replicas": 1, "scrub_bytes_per_s": 0}
    training = Training("gpt", storage, **options)
    training.train(4)
    state: dict[str, Any] = training.model.state_dict()
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in state.items()}


@pytest.fixture
def group(cluster: LocalCluster) -> Iterator[RankGroup]:
    group = RankGroup([cluster.nodes[node].node_id for node in NODES])
    yield group
    group.stop()


def test_a_step_that_only_nodes_have_is_read_from_any_intact_copy(
    cluster: LocalCluster, group: RankGroup, storage: str
) -> None:
    path = f"{storage}/gpt"
    weights = group.run(train, storage)[0]
    with pytest.raises(ConfigError, match="no durable checkpoint"):
        ray_ckpt.open(path).load("model")
    opened = ray_ckpt.open_in_cluster(path)
    assert (opened.step, opened.run.catalog.run_name) == (4, "gpt")
    assert ray_ckpt.open_in_cluster(path, step=2).step == 2
    with pytest.raises(ConfigError, match="no live checkpoint of step 3"):
        ray_ckpt.open_in_cluster(path, step=3)

    def assert_read() -> None:
        found = opened.load("model")
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weights[name]) for name in weights)

    assert_read()
    folder = f"{opened.info.id.run_uid}/{opened.info.directory}"
    copies = [file for node in NODES for file in shards(cluster.nodes[node].staging / folder, rank=0)]
    assert len(copies) == 2
    flip(copies[0])
    assert_read()
    flip(copies[1])
    with pytest.raises(RestoreError, match="step 4 cannot be read"):
        opened.load("model")
