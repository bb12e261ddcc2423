"""`ray-ckpt rollback` between two trainings of a service that has had the run open all the time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from ray_ckpt.actors.client import coordinator
from ray_ckpt.catalog.catalog import Catalog
from tests.cluster.ranks import RankGroup, Training

pytestmark = pytest.mark.cluster


def train(run: str, storage: str, total: int) -> tuple[int, list[float]]:
    """Train; return the steps and the losses."""
    losses = Training(run, storage, every_steps=2, keep_last=5).train(total)
    return len(losses), losses


def test_the_next_training_goes_on_from_before_the_spike(group: RankGroup, storage: str) -> None:
    group.run(train, "spiked", storage, 8)
    where = f"{storage}/spiked"
    ray.get(coordinator().finish.remote(where, 60.0), timeout=90)
    command = [sys.executable, "-m", "ray_ckpt.cli", "rollback", where, "--before", "6"]
    done = subprocess.run(
        [*command, "--yes", "--quiet-s", "0", "--json"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 4
    results = group.run(train, "spiked", storage, 10)
    assert {steps for steps, _ in results} == {6}, "5 to 10: one try is enough"
    catalog = Catalog(Path(where))
    newest = catalog.newest()
    assert newest is not None and newest.info.step == 10
    assert [c.step for c in catalog.list() if c.id.session == newest.info.id.session] == [6, 8, 10]
