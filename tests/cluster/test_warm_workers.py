"""After a loss, the ranks of the next group of Ray Train are processes that waited for it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray.train
from ray.train.torch import TorchTrainer

from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.train import CheckpointCallback, WarmWorkers
from ray_ckpt.train.warm import MODULES_ENV

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]
WAIT_S = 120.0
MODULE = "colorsys"  # of the standard library; nothing else imports it


def wait_for(what: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + WAIT_S
    while not (found := what()):
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    return found


def train_loop(config: dict[str, Any]) -> None:
    import sys

    import torch

    import ray_ckpt

    had_module = MODULE in sys.modules
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    checkpointer = ray_ckpt.Checkpointer(model=model)
    info = checkpointer.restore()
    step = info.step if info is not None else 0
    lines, rank = Path(config["lines"]), ray.train.get_context().get_world_rank()
    entered = {"rank": rank, "pid": os.getpid(), "step": step, "had_module": had_module}
    entered["threads"] = torch.get_num_threads()
    entered["node"] = ray.get_runtime_context().get_node_id()
    with lines.open("a") as file:
        file.write(json.dumps(entered) + "\n")
    while not (lines.parent / "stop").exists():
        checkpointer.step(step := step + 1)
        time.sleep(0.1)


def test_the_ranks_of_the_next_group_have_waited_for_it(
    no_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # so torch starts with as many threads as cores
    lines = tmp_path / "lines.jsonl"
    warm = WarmWorkers(MODULE)
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"lines": str(lines)},
        scaling_config=ray.train.ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
        run_config=ray.train.RunConfig(
            name="warm",
            storage_path=str(tmp_path),
            worker_runtime_env=warm.runtime_env(),
            callbacks=[CheckpointCallback(every_steps=5), warm],
            failure_config=ray.train.FailureConfig(max_failures=-1),
        ),
    )

    def entered(groups: int) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
        return found[2 * groups - 2 :] if len(found) == 2 * groups else []

    with LocalCluster(tmp_path / "staging", ["node-a", "node-b", "node-c"], cpus=4) as cluster:

        def waiting() -> set[int]:
            return cluster.idle_processes(MODULES_ENV)

        job = threading.Thread(target=trainer.fit)
        job.start()
        first = wait_for(lambda: entered(1))
        before = wait_for(lambda: len(found := waiting()) == 3 and found)
        os.kill(first[1]["pid"], signal.SIGKILL)
        second = wait_for(lambda: entered(2))
        assert {rank["pid"] for rank in second} <= before
        before = wait_for(lambda: len(found := waiting()) == 3 and found - before and found)
        cluster.kill(cluster.name_of(second[1]["node"]), wipe=True)
        third = wait_for(lambda: entered(3))
        (tmp_path / "stop").touch()
        job.join(WAIT_S)
    assert {rank["pid"] for rank in third} <= before
    assert all(rank["had_module"] for rank in (*first, *second, *third))
    assert all(rank["threads"] == 1 for rank in (*first, *second, *third))
    assert all(rank["step"] > 0 for rank in (*second, *third))
