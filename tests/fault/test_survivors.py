"""Ranks and nodes die; those that are left save the last step, exactly, or say why they do not."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ray_ckpt.catalog.catalog import Catalog
from tests.fault.conftest import Home
from tests.fault.rig import wait_for
from tests.fault.survivors import Task, Trainers, lines

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def calm_lines(home: Home, task: Task, nodes: list[str]) -> list[dict[int, tuple[str, str]]]:
    """Train without faults; return loss and digest by step, for each rank."""
    cluster = home.start()
    calm = replace(task, run=f"{task.run}-calm", journal=f"{task.journal}-calm", pace_s=0.0)
    trainers = Trainers([cluster.nodes[name].node_id for name in nodes], calm)
    assert trainers.wait() == [task.total] * len(nodes)
    trainers.stop()
    return [{x["step"]: (x["loss"], x["state"]) for x in lines(calm, k)} for k in range(len(nodes))]


def test_after_the_death_of_a_rank_its_last_step_is_saved_by_the_others(home: Home, tmp_path: Path) -> None:
    nodes = ["node-a", "node-a", "node-b"]
    task = Task(run="one", storage=str(tmp_path / "runs"), journal=str(tmp_path / "one"), total=30)
    calm = calm_lines(home, task, nodes)
    ids = [home.start().nodes[name].node_id for name in nodes]
    trainers = Trainers(ids, task)
    wait_for(lambda: len(lines(task, 1)) >= 10, what="ten steps")
    os.kill(trainers.group.pids[1], signal.SIGKILL)
    start_s = time.monotonic()
    name = tmp_path / "runs" / "one"
    wait_for(lambda: Catalog(name).list(all=True), within_s=20.0, what="a salvage")
    print(f"survivors ended after {time.monotonic() - start_s:.1f} s")
    trainers.stop()
    done = lines(task, 1)[-1]["step"]
    saved = [c.step for c in Catalog(tmp_path / "runs" / "one").list(all=True)]
    print("done", done, "saved", saved)
    assert saved and saved[-1] >= done
    again = Trainers(ids, task)
    assert again.wait() == [task.total] * 3
    again.stop()
    for rank in range(3):
        found = lines(task, rank)
        for line in found:
            assert (line["loss"], line["state"]) == calm[rank][line["step"]], (rank, line["step"])
        assert len(found) <= task.total + 1
