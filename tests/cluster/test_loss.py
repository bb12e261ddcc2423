"""Losing one node, and losing all of them. Each test has a cluster of its own, since it breaks it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from jobs.demo.local_cluster import LocalCluster, kill_family
from ray_ckpt.actors.client import coordinator
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.types import Level

pytestmark = pytest.mark.cluster
TINY = (
    "--layers 1 --width 16 --heads 2 --context 16 --batch 2 --accumulate 2 --workers 2 --eval-every 100 "
    "--every-steps 5 --remote-every 2 --steps 40 --step-time-s 0.15"
)
WAIT_S = 90.0
PROJECT = Path(__file__).parents[2]


@contextmanager
def training(
    cluster: LocalCluster, storage: Path, name: str
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Run the main job in a process that ends with the block, as a driver ends with its machine."""
    history = storage / f"{name}.jsonl"
    command = [sys.executable, "-m", "jobs.train_gpt", "--storage-path", str(storage), "--name", name]
    command += ["--history", str(history), *TINY.split()]
    env = {**os.environ, "RAY_ADDRESS": cluster.address}
    with (storage / f"{name}.log").open("ab") as out:
        driver = subprocess.Popen(command, cwd=PROJECT, env=env, stdout=out, stderr=out)
    try:
        yield driver, history
    finally:
        if driver.poll() is None:
            kill_family(driver.pid)
        driver.wait()


def losses(history: Path) -> list[dict[str, Any]]:
    text = history.read_text() if history.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def final_digests(storage: Path, name: str) -> dict[tuple[str, str], str]:
    rows = (r for f in Catalog(storage / name)[40].fragments() for r in f.rows if r.kind != "header")
    return {(r.file, r.label): r.digest for r in rows}


@pytest.mark.slow
def test_the_whole_cluster_dies_and_a_new_one_goes_on_from_the_storage_path(
    no_cluster: None, tmp_path: Path
) -> None:
    with LocalCluster(tmp_path / "first", ["node-a", "node-b"]) as cluster:
        with training(cluster, tmp_path, "calm") as (driver, calm):
            assert driver.wait(WAIT_S) == 0
        with training(cluster, tmp_path, "broken") as (driver, broken):
            wait_for(lambda: any(line["step"] >= 23 for line in losses(broken)))
            wait_for(lambda: Catalog(tmp_path / "broken").newest(Level.DURABLE) is not None)
            kill_family(driver.pid)
            for node in ("node-a", "node-b"):
                cluster.kill(node, wipe=True)
    durable = Catalog(tmp_path / "broken").newest(Level.DURABLE)
    assert durable is not None and durable.info.step in (10, 20)
    done = max(line["step"] for line in losses(broken))
    with (
        LocalCluster(tmp_path / "second", ["node-c", "node-d"]) as cluster,
        training(cluster, tmp_path, "broken") as (driver, _),
    ):
        assert driver.wait(WAIT_S) == 0
    again = losses(broken)
    assert {line["step"]: line["loss"] for line in losses(calm)} == {
        line["step"]: line["loss"] for line in again
    }
    resumed = [line["step"] for a, line in pairwise(again) if line["step"] <= a["step"]]
    assert resumed == [durable.info.step + 1] and done < 40
    assert final_digests(tmp_path, "calm") == final_digests(tmp_path, "broken")


@pytest.mark.slow
def test_nodes_die_one_after_another(no_cluster: None, tmp_path: Path) -> None:
    """Each time the last node of the group; every loss stays the one of the run that lost nothing."""
    with LocalCluster(tmp_path / "staging", ["node-a", "node-b", "node-c", "node-d"]) as cluster:
        with training(cluster, tmp_path, "calm") as (driver, calm):
            assert driver.wait(WAIT_S) == 0
        with training(cluster, tmp_path, "broken") as (driver, broken):
            for step in (12, 27):
                wait_for(lambda step=step: any(line["step"] >= step for line in losses(broken)))
                status = ray.get(coordinator().status.remote(f"{tmp_path}/broken"), timeout=30)
                cluster.kill(cluster.name_of(status.nodes[-1].node_id), wipe=True)
            assert driver.wait(2 * WAIT_S) == 0
    expected = {line["step"]: line["loss"] for line in losses(calm)}
    assert all(line["loss"] == expected[line["step"]] for line in losses(broken))
    assert {line["step"] for line in losses(broken)} == set(expected)
    assert final_digests(tmp_path, "calm") == final_digests(tmp_path, "broken")


@pytest.mark.slow
def test_a_killed_worker_restores_from_its_node(no_cluster: None, tmp_path: Path) -> None:
    """SIGKILL of one rank's process: its node lives, and so do its agent's memory and disk."""
    with LocalCluster(tmp_path / "staging", ["node-a", "node-b"]) as cluster:
        with training(cluster, tmp_path, "worker") as (driver, history):
            wait_for(lambda: any(line["step"] >= 17 for line in losses(history)))
            ours = psutil.Process().children(recursive=True)
            workers = [p for p in ours if "RayTrainWorker" in " ".join(p.cmdline())]
            workers[0].kill()
            assert driver.wait(2 * WAIT_S) == 0
        status = ray.get(coordinator().status.remote(f"{tmp_path}/worker"), timeout=30)
    steps = [line["step"] for line in losses(history)]
    assert max(steps) == 40 and steps.count(17) == 2, "steps after 15 are done again"
    tiers = {part.tier for rank in status.restores for part in rank.parts if "shard" in part.file}
    assert "memory" in tiers and "remote" not in tiers
