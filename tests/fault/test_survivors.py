"""Ranks and nodes die; those that are left save the last step, exactly, or nobody does."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import ray

from jobs.demo.local_cluster import LocalCluster
from tests.fault.conftest import Home
from tests.fault.rig import wait_for
from tests.fault.survivors import (
    Task,
    Trainers,
    check_lines,
    fit,
    last_step,
    lines,
    saved_steps,
    wait_for_step,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
KILLS = int(os.environ.get("RAY_CKPT_KILLS", "12"))  # of the random test; 200 take 40 to 80 minutes
STEPS_PER_KILL = 7
PACE_S = 0.2  # of a step, most of which passes before its forward pass as in most trainings
SALVAGE_S = 12.0  # for the decision, the capture and the commit


class Scene:
    """A run on named nodes of the shared cluster, and the lines of the same run without faults."""

    def __init__(self, home: Home, nodes: list[str], task: Task) -> None:
        self.cluster, self.nodes, self.task = home.start(), nodes, task
        calm = replace(task, run=f"{task.run}-calm", journal=f"{task.journal}-calm", pace_s=0.0)
        off = {**task.options, "salvage": False, "salvage_copy": False}
        trainers = Trainers(self.ids(), replace(calm, options=off))
        assert trainers.wait() == [task.total] * len(nodes)
        trainers.stop()
        self.calm = [{x["step"]: x for x in lines(calm, k)} for k in range(len(nodes))]

    def ids(self) -> list[str]:
        return [self.cluster.nodes[name].node_id for name in self.nodes]

    def train(self) -> Trainers:
        return Trainers(self.ids(), self.task)

    def kill_rank(self, trainers: Trainers, rank: int) -> None:
        os.kill(trainers.pids[rank], signal.SIGKILL)

    def wait_saved(self, step: int) -> bool:
        """Wait until a step, or the one before, is in the log; False if that does not happen."""
        end_s = time.monotonic() + SALVAGE_S
        while time.monotonic() < end_s:
            if saved_steps(self.task)[-1:] >= [step]:
                return True
            time.sleep(0.05)
        return False

    def wait_restored(self, num_lines: int) -> int:
        """Wait for a step of rank 0 after so many lines; return the step before it, which was restored."""
        wait_for(lambda: len(lines(self.task, 0)) > num_lines, what="a step after a restart")
        return int(lines(self.task, 0)[num_lines]["step"]) - 1

    def finish(self) -> None:
        """Train to the end without faults and pauses, and compare every line of the run with the calm run."""
        trainers = Trainers(self.ids(), replace(self.task, pace_s=0.0))
        assert trainers.wait() == [self.task.total] * len(self.nodes)
        trainers.stop()
        for rank, calm in enumerate(self.calm):
            check_lines(self.task, rank, calm)
        done = {line["step"] for rank in range(len(self.calm)) for line in lines(self.task, rank)}
        assert done == set(range(1, self.task.total + 1))


def make_task(tmp_path: Path, run: str, total: int, **options: object) -> Task:
    kind = str(options.pop("kind", "ddp"))
    return Task(
        run=run,
        storage=str(tmp_path / "runs"),
        journal=str(tmp_path / run),
        total=total,
        kind=kind,
        options=dict(options),
    )


@pytest.mark.parametrize("loses_node", [False, True])
def test_replicas_with_shards_save_for_a_lost_replica(home: Home, tmp_path: Path, loses_node: bool) -> None:
    scene = Scene(
        home, ["node-a", "node-a", "node-b", "node-b"], make_task(tmp_path, "hsdp", 24, kind="hsdp")
    )
    trainers = scene.train()
    wait_for_step(scene.task, 0, 8)
    if loses_node:
        scene.cluster.kill("node-b", wipe=True)
    else:
        scene.kill_rank(trainers, 3)
    time.sleep(0.5)
    done = last_step(scene.task, 4)
    assert scene.wait_saved(done - 1)
    trainers.stop()
    home.start()
    scene.finish()


@pytest.mark.parametrize("kind", ["ddp", "hsdp"])
def test_with_copies_a_rank_that_dies_within_a_step_costs_that_step(
    home: Home, tmp_path: Path, kind: str
) -> None:
    """The others are one step further, and nobody has the dead rank's own state of that step."""
    task = make_task(tmp_path, f"copies-{kind}", 16, kind=kind, salvage_copy=True)
    scene = Scene(home, ["node-a", "node-a", "node-b", "node-b"], task)
    trainers = Trainers(scene.ids(), replace(task, dies_at=(3, 8)))
    wait_for_step(task, 0, 8)
    assert scene.wait_saved(7)
    trainers.stop()
    scene.finish()
    assert saved_steps(task) == [7, 16]


def test_shards_without_replicas_are_not_saved(home: Home, tmp_path: Path) -> None:
    scene = Scene(home, ["node-a", "node-b"], make_task(tmp_path, "fsdp", 16, kind="fsdp"))
    trainers = scene.train()
    wait_for_step(scene.task, 0, 6)
    scene.kill_rank(trainers, 1)
    assert not scene.wait_saved(1)
    trainers.stop()
    scene.finish()
    assert saved_steps(scene.task) == [16]


def test_ray_train_lets_survivors_save_before_it_ends_a_group(home: Home, tmp_path: Path) -> None:
    cluster, task = home.start(), make_task(tmp_path, "train", 40)
    calm = replace(task, run="train-calm", journal=f"{task.journal}-calm", pace_s=0.0)
    ray.get(fit.remote(calm, 2), timeout=180)
    training = fit.remote(replace(task, pace_s=0.15), 2)
    wait_for_step(task, 1, 12)
    workers_of_ray_train(cluster)[-1].kill()
    ray.get(training, timeout=180)
    for rank in range(2):
        check_lines(task, rank, {x["step"]: x for x in lines(calm, rank)})
        assert len(lines(task, rank)) <= 41, "one step was repeated at most"


def workers_of_ray_train(cluster: LocalCluster) -> list[psutil.Process]:
    raylets = [node.handle.all_processes["raylet"][0].process.pid for node in cluster.nodes.values()]
    processes = [p for pid in raylets for p in psutil.Process(pid).children()]
    return [p for p in processes if any("RayTrainWorker" in part for part in p.cmdline())]


@pytest.mark.timeout(120 + 45 * KILLS)  # 35 s each on a slow machine
def test_a_kill_costs_one_step_at_most(home: Home, tmp_path: Path) -> None:
    """Ranks and nodes die at random times; each restart repeats one finished step at most.

    Some kills hit the moment between a step and the arrival of the dead rank's own state; then the others
    save their copies of the step before.
    """
    nodes = ["node-a", "node-a", "node-b", "node-c"]
    total = STEPS_PER_KILL * KILLS + 20
    task = replace(make_task(tmp_path, "random", total, every_steps=10, salvage_copy=True), pace_s=PACE_S)
    scene = Scene(home, nodes, task)
    chance, found = random.Random(7), Counter[str]()
    restored = done = 0
    what = ""
    for kill in range(KILLS):
        before = len(lines(scene.task, 0))
        trainers = scene.train()
        restored = scene.wait_restored(before)
        if what:
            found[f"{what}: {done - restored} step(s) lost"] += 1
            print(f"the death of a {what} after step {done} costs {done - restored} step(s)")
        wait_for_step(scene.task, 0, restored + chance.randint(2, STEPS_PER_KILL - 1))
        time.sleep(chance.uniform(0.0, 2 * PACE_S))
        what = "node" if kill % 3 == 2 else "rank"
        if what == "rank":
            scene.kill_rank(trainers, chance.randrange(len(nodes)))
        else:
            scene.cluster.kill(chance.choice(["node-b", "node-c"]), wipe=True)
        time.sleep(0.5)
        done = max(lines(scene.task, rank)[-1]["step"] for rank in range(len(nodes)))
        scene.wait_saved(done - 1)
        trainers.stop()
        home.start()
    print(f"{KILLS} kills: {dict(found)}")
    assert not [text for text in found if int(text.split()[1]) > 1]
    scene.finish()
