"""Parity groups on real nodes: two of four nodes are lost, and the same run goes on without a drain."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from typer.testing import CliRunner

from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.actors.client import coordinator
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.cli import app
from ray_ckpt.types import Level
from tests.cluster.ranks import RankGroup, Training

pytestmark = pytest.mark.cluster
OPTIONS: dict[str, Any] = {"parity": (2, 2), "every_steps": 2, "remote_every": 1000, "max_block_s": 20.0}
WIDTH = 4096  # 0.5 MB of state
WAIT_S = 60.0


def train(run: str, storage: str, total: int) -> list[float]:
    return Training(run, storage, width=WIDTH, **OPTIONS).train(total)


def train_until(run: str, storage: str, last: int) -> list[float]:
    """Train up to step `last` and leave the run unfinished."""
    training, losses = Training(run, storage, width=WIDTH, **OPTIONS), []
    for step in training.ckpt.steps(total=100):
        losses.append(training.step())
        training.ckpt.step(step)
        if step == last:
            break
    return losses


def used_bytes(root: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in root.glob(f"node-*/*/0*/{pattern}"))


@pytest.mark.slow
def test_two_of_four_nodes_are_lost_and_the_run_goes_on(no_cluster: None, tmp_path: Path) -> None:
    storage = str(tmp_path)
    with LocalCluster(tmp_path / "staging", ["node-a", "node-b", "node-c", "node-d"]) as cluster:

        def group(*names: str) -> RankGroup:
            return RankGroup([cluster.nodes[f"node-{name}"].node_id for name in names])

        ranks = group("a", "b", "c", "d")
        calm = ranks.run(train, "calm", storage, 8)
        before = ranks.run(train_until, "broken", storage, 6)
        deadline_s = time.monotonic() + WAIT_S
        saved = Catalog(f"{storage}/broken")
        while (newest := saved.newest(Level.REPLICATED)) is None or newest.info.step < 6:
            assert time.monotonic() < deadline_s
            time.sleep(0.2)
            saved = Catalog(f"{storage}/broken")
        assert newest.info.replicas == 2 and newest.info.level is Level.REPLICATED
        data, parity = (used_bytes(tmp_path / "staging", f"{kind}*") for kind in ("[!p]", "parity-"))
        assert 0.8 * data < parity < 1.3 * data  # 2/2 of the data, and headers
        status = ray.get(coordinator().status.remote(f"{storage}/broken"), timeout=30)
        assert {node.tier for node in status.exposure} == {"peer"}
        for command in (["verify", "--plan"], ["drill", "--lose-node", cluster.nodes["node-b"].node_id]):
            arguments = [
                command[0],
                f"{storage}/broken",
                *command[1:],
                "--address",
                cluster.address,
                "--json",
            ]
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 0, result.output
            assert {c["parity"] for c in json.loads(result.stdout)["checkpoints"]} == {"2+2"}
        for name in ("node-b", "node-d"):
            cluster.kill(name, wipe=True)
        for name in ("node-e", "node-f"):
            cluster.add(name)
        after = group("a", "e", "c", "f").run(train, "broken", storage, 8)
        restored = ray.get(coordinator().status.remote(f"{storage}/broken"), timeout=30).restores
    assert [b + a for b, a in zip(before, after, strict=True)] == calm
    parts = [part for rank in restored for part in rank.parts if "shard" in part.file]
    assert "peer" in {part.tier for part in parts}  # computed for the restore, or by repair before it
    assert {part.tier for part in parts} <= {"memory", "local", "peer"}
