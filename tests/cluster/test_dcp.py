"""DCP's own functions with the Writer and the Reader, on real nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from jobs.demo.local_cluster import LocalCluster
from tests.cluster import dcp_program
from tests.cluster.ranks import RankGroup

pytestmark = pytest.mark.cluster


def on(cluster: LocalCluster, nodes: str, function: Callable[..., Any], *args: Any) -> Sequence[Any]:
    """Run a function on a new group, rank k on the k-th of these nodes."""
    group = RankGroup([cluster.nodes[f"node-{name}"].node_id for name in nodes])
    try:
        return group.run(function, *args)
    finally:
        group.stop()


def test_saves_of_two_ranks_are_loaded_by_three(cluster: LocalCluster, storage: str) -> None:
    options = {"every_steps": 1000, "remote_every": 1000}
    saved = on(cluster, "ab", dcp_program.train_and_save, "dcp", storage, options)
    loaded = on(cluster, "abc", dcp_program.load_and_go_on, "dcp", storage, options)
    for rank in loaded:
        assert rank["step"] == 4
        assert rank["state"]["step"] == 4
        assert rank["state"]["more"]["losses"] == [4.5]
        assert rank["state"]["more"]["pair"] == (1, "two")
        assert torch.equal(rank["state"]["more"]["table"], torch.arange(6.0))
        for name, tensor in saved[0]["at_4"].items():
            assert torch.equal(rank["loaded"][name], tensor), name
