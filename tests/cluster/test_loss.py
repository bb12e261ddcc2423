"""Losing one node, and losing all of them. Each test has a cluster of its own, since it breaks it."""

from __future__ import annotations

import json
import os
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from jobs.local_cluster import LocalCluster
from jobs.train_gpt import build_trainer, parse_args
from ray_ckpt.actors.service import coordinator
from ray_ckpt.catalog import Catalog
from ray_ckpt.types import Level

pytestmark = pytest.mark.cluster
TINY = (
    "--layers 1 --width 16 --heads 2 --context 16 --batch 2 --accumulate 2 --workers 2 --eval-every 100 "
    "--every-steps 5 --remote-every 2 --steps 40 --step-time-s 0.15"
)
WAIT_S = 90.0


def start(storage: Path, name: str) -> tuple[threading.Thread, Path]:
    """Train in a thread; its errors are expected when the cluster goes."""
    history = storage / f"{name}.jsonl"
    args = parse_args(
        ["--storage-path", str(storage), "--name", name, "--history", str(history), *TINY.split()]
    )
    trainer = build_trainer(args)

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException:
            return

    thread = threading.Thread(target=fit, daemon=True)
    thread.start()
    return thread, history


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


def test_the_whole_cluster_dies_and_a_new_one_goes_on_from_the_storage_path(
    no_cluster: None, tmp_path: Path
) -> None:
    with LocalCluster(tmp_path / "first", ["node-a", "node-b"]) as cluster:
        thread, calm = start(tmp_path, "calm")
        thread.join(WAIT_S)
        assert not thread.is_alive()
        thread, broken = start(tmp_path, "broken")
        wait_for(lambda: any(line["step"] >= 23 for line in losses(broken)))
        wait_for(lambda: Catalog(tmp_path / "broken").newest(Level.DURABLE) is not None)
        for node in ("node-a", "node-b"):
            cluster.kill(node, wipe=True)
    durable = Catalog(tmp_path / "broken").newest(Level.DURABLE)
    assert durable is not None and durable.info.step in (10, 20)
    done = max(line["step"] for line in losses(broken))
    with LocalCluster(tmp_path / "second", ["node-c", "node-d"]):
        thread, _ = start(tmp_path, "broken")
        thread.join(WAIT_S)
        assert not thread.is_alive()
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
        thread, calm = start(tmp_path, "calm")
        thread.join(WAIT_S)
        thread, broken = start(tmp_path, "broken")
        for step in (12, 27):
            wait_for(lambda step=step: any(line["step"] >= step for line in losses(broken)))
            status = ray.get(coordinator().status.remote(f"{tmp_path}/broken"), timeout=30)
            cluster.kill(cluster.name_of(status.nodes[-1].node_id), wipe=True)
        thread.join(2 * WAIT_S)
        assert not thread.is_alive()
    expected = {line["step"]: line["loss"] for line in losses(calm)}
    assert all(line["loss"] == expected[line["step"]] for line in losses(broken))
    assert {line["step"] for line in losses(broken)} == set(expected)
    assert final_digests(tmp_path, "calm") == final_digests(tmp_path, "broken")


@pytest.mark.slow
def test_a_killed_worker_restores_from_its_node(no_cluster: None, tmp_path: Path) -> None:
    """SIGKILL of one rank's process: its node lives, and so do its agent's memory and disk."""
    with LocalCluster(tmp_path / "staging", ["node-a", "node-b"]):
        thread, history = start(tmp_path, "worker")
        wait_for(lambda: any(line["step"] >= 17 for line in losses(history)))
        workers = [
            p for p in psutil.process_iter(["cmdline"]) if "RayTrainWorker" in " ".join(p.info["cmdline"])
        ]
        ours = [p for p in workers if any(q.pid == os.getpid() for q in p.parents())]
        ours[0].kill()
        thread.join(2 * WAIT_S)
        assert not thread.is_alive()
        status = ray.get(coordinator().status.remote(f"{tmp_path}/worker"), timeout=30)
    steps = [line["step"] for line in losses(history)]
    assert max(steps) == 40 and steps.count(17) == 2, "steps after 15 are done again"
    tiers = {part.tier for rank in status.restores for part in rank.parts if "shard" in part.file}
    assert "memory" in tiers and "remote" not in tiers
