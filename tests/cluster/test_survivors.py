"""A rank of DDP dies: the other saves its last step, and the run goes on exactly from there."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.demo.local_cluster import LocalCluster
from tests.fault.rig import wait_for
from tests.fault.survivors import Task, Trainers, check_lines, lines, saved_steps, wait_for_step

pytestmark = [pytest.mark.cluster, pytest.mark.slow]  # 30 s


def test_after_the_death_of_a_rank_its_last_step_is_saved_by_the_other(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    nodes = [cluster.nodes[name].node_id for name in ("node-a", "node-b")]
    task = Task(
        run="survivors", storage=str(tmp_path / "runs"), journal=str(tmp_path / "it"), total=24, pace_s=0.15
    )
    calm = replace(task, run="calm", journal=str(tmp_path / "calm"), pace_s=0.0)
    trainers = Trainers(nodes, calm)
    assert trainers.wait() == [24] * 2
    trainers.stop()

    trainers = Trainers(nodes, task)
    wait_for_step(task, 1, 8)
    os.kill(trainers.pids[1], signal.SIGKILL)
    wait_for(lambda: saved_steps(task), what="a save by the survivors")
    trainers.stop()
    assert saved_steps(task) == [lines(task, 1)[-1]["step"]]
    trainers = Trainers(nodes, task)
    assert trainers.wait() == [24] * 2
    trainers.stop()
    for rank in range(2):
        check_lines(task, rank, {line["step"]: line for line in lines(calm, rank)})
        assert len(lines(task, rank)) == 24, "no step was repeated"
