"""Megatron-core's `dist_checkpointing` with the strategies of ray_ckpt, on a real node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.demo.local_cluster import LocalCluster
from tests.cluster.ranks import RankGroup
from tests.frameworks.megatron import program

OPTIONS = {"remote_every": 1000}


def on(cluster: LocalCluster, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a function on a new group of ranks."""
    group = RankGroup([cluster.nodes["node-a"].node_id] * ranks)
    try:
        return group.run(function, *args)
    finally:
        group.stop()


def test_a_run_goes_on_exactly_with_the_same_and_with_other_tensor_parallelism(
    cluster: LocalCluster, storage: str, tmp_path: Path
) -> None:
    def train(run: str, tp: int, last: int) -> list[Any]:
        return on(cluster, tp, program.train, run, storage, str(tmp_path / run), tp, last, OPTIONS)

    train("calm", 2, 8)
    assert all(rank["step"] == 0 for rank in train("broken", 2, 3))
    same = train("broken", 2, 6)
    (other,) = train("broken", 1, 8)
    assert [rank["step"] for rank in same] == [3, 3] and other["step"] == 6
    calm, broken = (program.whole(f"{storage}/{run}@8") for run in ("calm", "broken"))
    assert calm.keys() == broken.keys() and len(calm) > 30
    for name, tensor in calm.items():
        assert torch.equal(tensor, broken[name]), name
