"""Parity groups on real nodes: two nodes of a group are lost, and the same run goes on without a drain."""

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
from ray_ckpt.actors.live_run import LiveRun
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.cli import app
from ray_ckpt.core.parity_files import tolerance
from ray_ckpt.types import Level
from tests.cluster.ranks import RankGroup, Training

pytestmark = pytest.mark.cluster
OPTIONS: dict[str, Any] = {"every_steps": 2, "remote_every": 1000, "max_block_s": 20.0}
WIDTH = 65_536  # 9 MB of state: the headers of parity files are less than 1 % of it
FROZEN = 4 << 20  # numbers, 16 MiB: each node has some
WAIT_S = 60.0


def training(run: str, storage: str, parity: tuple[int, int], frozen: int = 0) -> Training:
    return Training(run, storage, width=WIDTH, parity=parity, frozen=frozen, **OPTIONS)


def train(run: str, storage: str, parity: tuple[int, int], total: int) -> list[float]:
    return training(run, storage, parity).train(total)


def train_until(run: str, storage: str, parity: tuple[int, int], last: int, frozen: int = 0) -> list[float]:
    """Train up to step `last` and leave the run unfinished."""
    group, losses = training(run, storage, parity, frozen), []
    for step in group.ckpt.steps(total=100):
        losses.append(group.step())
        group.ckpt.step(step)
        if step == last:
            break
    return losses


def used_bytes(root: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in root.glob(f"*/0*/{pattern}"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("names", "parity"), [("abcd", (2, 2)), ("abcdefgh", (6, 2))])
def test_two_nodes_of_a_group_are_lost_and_the_run_goes_on(
    no_cluster: None, tmp_path: Path, names: str, parity: tuple[int, int]
) -> None:
    storage = str(tmp_path)
    with LocalCluster(tmp_path / "staging", [f"node-{name}" for name in names]) as cluster:

        def group(names: str) -> RankGroup:
            return RankGroup([cluster.nodes[f"node-{name}"].node_id for name in names])

        ranks = group(names)
        calm = ranks.run(train, "calm", storage, parity, 8)
        before = ranks.run(train_until, "broken", storage, parity, 6)
        deadline_s = time.monotonic() + WAIT_S
        saved = Catalog(f"{storage}/broken")
        while (newest := saved.newest(Level.REPLICATED)) is None or newest.info.step < 6:
            assert time.monotonic() < deadline_s
            time.sleep(0.2)
            saved = Catalog(f"{storage}/broken")
        assert newest.info.replicas == 2 and newest.info.level is Level.REPLICATED
        k, m = parity
        nodes = [node.staging for node in cluster.nodes.values()]
        largest = max(used_bytes(node, "[!p]*") for node in nodes)  # node 0 has the buffers of the norm too
        coded = sum(used_bytes(node, "parity-*") for node in nodes)
        assert 1.0 < coded / (largest * len(names) * m / k) < 1.02, "the parity of the largest, and headers"
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
            assert {c["parity"] for c in json.loads(result.stdout)["checkpoints"]} == {f"{k}+{m}"}
        for name in ("node-b", "node-d"):
            cluster.kill(name, wipe=True)
        for name in ("node-x", "node-y"):
            cluster.add(name)
        after = group(names.replace("b", "x").replace("d", "y")).run(train, "broken", storage, parity, 8)
        restored = ray.get(coordinator().status.remote(f"{storage}/broken"), timeout=30).restores
    assert [b + a for b, a in zip(before, after, strict=True)] == calm
    parts = [part for rank in restored for part in rank.parts if "shard" in part.file]
    assert "peer" in {part.tier for part in parts}  # computed for the restore, or by repair before it
    assert {part.tier for part in parts} <= {"memory", "local", "peer"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_members_that_share_a_node_part_when_another_joins(no_cluster: None, tmp_path: Path) -> None:
    """Four nodes are a group; one is lost, and for a while there is none to take its place."""
    uri = f"{tmp_path}/shared"

    def tolerated(wanted: int) -> None:
        """Wait until the files of step 4 allow for as many losses."""
        deadline_s = time.monotonic() + WAIT_S
        while (found := tolerated_losses(uri, step=4)) != wanted:
            assert time.monotonic() < deadline_s, found
            time.sleep(0.5)

    with LocalCluster(tmp_path / "staging", ["node-a", "node-b", "node-c"]) as cluster:

        def train_to(last: int) -> None:
            group = RankGroup([node.node_id for node in cluster.nodes.values()])
            group.run(train_until, "shared", str(tmp_path), (2, 2), last, FROZEN)

        assert len(cluster.nodes) == 4, "with the head node, so that no node is free"
        train_to(4)
        tolerated(2)
        for node in cluster.nodes.values():
            (still, _) = sorted(node.staging.glob("*/0*/parity-*.1-of-00004.bin"))
            assert still.stat().st_nlink == 2, "of steps 2 and 4"
        cluster.kill("node-c", wipe=True)
        train_to(6)
        tolerated(1)  # computed again, beside another member
        cluster.add("node-x")
        tolerated(2)
        assert used_bytes(cluster.nodes["node-x"].staging, "parity-*") > 0


def tolerated_losses(uri: str, step: int) -> int:
    """Return the number of nodes whose loss the files on nodes allow for."""
    found = [live for live in LiveRun(uri).sources.live if live.checkpoint.step == step]
    return min(tolerance(places) for live in found for places in live.groups)
