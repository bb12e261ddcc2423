"""An algorithm of RLlib, saved by the block of docs/guides/tune-rllib.md, that goes on in another process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.catalog.catalog import Catalog

ROOT = Path(__file__).parents[3]
PROGRAM = """
import json, sys
import numpy as np, ray, torch
from ray.rllib.algorithms.ppo import PPOConfig
from tests.cluster.test_code_blocks import RLLIB
from tests.support.code_blocks import find, run_python

storage, total, out = sys.argv[1:]
ray.init(address="auto", logging_level="warning")
config = (
    PPOConfig()
    .environment("CartPole-v1")
    .env_runners(num_env_runners=0)
    .training(train_batch_size=128, minibatch_size=64, num_epochs=1)
    .debugging(seed=3)
)
found = run_python(find(*RLLIB), {"config": config}, {"/shared/runs": storage, "total=100": "total=" + total})
weights = found["algorithm"].get_module().state_dict()
lifetime = found["algorithm"].metrics.peek(("env_runners", "num_env_steps_sampled_lifetime"))
iteration = found["algorithm"].training_iteration
with open(out, "w") as file:
    json.dump({
        "iteration": iteration, "lifetime": lifetime,
        "weights": {k: v.tolist() for k, v in weights.items()},
    }, file)
"""


def train(cluster: LocalCluster, storage: Path, total: int, out: Path) -> dict[str, Any]:
    """Train in a process of its own up to iteration `total`."""
    import os

    env = {**os.environ, "RAY_ADDRESS": cluster.address, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(storage), str(total), str(out)], cwd=ROOT, env=env, check=True
    )
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.timeout(600)
def test_an_algorithm_goes_on_where_it_was(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    with LocalCluster(tmp_path / "nodes", ["node-a"], cpus=2) as cluster:
        begun = train(cluster, storage, 2, tmp_path / "2.json")
        resumed = train(cluster, storage, 2, tmp_path / "again.json")  # no step is left
        assert resumed["weights"] == begun["weights"], (
            "restored bit for bit, by a process that trains nothing"
        )
        more = train(cluster, storage, 4, tmp_path / "4.json")
    newest = Catalog(storage / "ppo").newest()
    assert newest is not None and newest.info.step == 4
    assert (begun["iteration"], more["iteration"]) == (2, 4)
    assert more["lifetime"] == 2 * begun["lifetime"], "counters go on"
    assert more["weights"] != begun["weights"]
