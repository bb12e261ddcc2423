"""Trainings on a CUDA device are killed and go on bit for bit."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from jobs.demo.local_cluster import LocalCluster
from tests.cluster.program import program
from tests.gpu.train import KINDS

STEPS = 24
PACE_S = 0.05
LONG_S = 180.0


def lines(journal: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []


def run(cluster: LocalCluster, folder: Path, name: str, kind: str, *more: str, kills: int = 0) -> Path:
    """Train to the end and kill the program `kills` times on the way; return the journal."""
    journal, log = folder / name, folder / f"{name}.log"
    chance = random.Random(kind)
    for killed in range(kills + 1):
        arguments = [name, str(folder / "runs"), str(journal), "--kind", kind, "--steps", str(STEPS), *more]
        begun = len(lines(journal))
        with program(cluster, log, "tests.gpu.train", *arguments) as process:
            if killed < kills:
                wanted, deadline_s = begun + chance.randint(4, 8), time.monotonic() + LONG_S
                while len(lines(journal)) < wanted:
                    assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()[-4000:]
                    time.sleep(0.005)
                process.send_signal(signal.SIGKILL)
            else:
                assert process.wait(LONG_S) == 0, log.read_text()[-4000:]
    return journal


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_training_goes_on_bit_for_bit(cluster: LocalCluster, tmp_path: Path, kind: str) -> None:
    *steps, end = lines(run(cluster, tmp_path, "calm", kind))
    calm = {line["step"]: line["loss"] for line in steps}
    assert sorted(calm) == list(range(1, STEPS + 1))
    *steps, last = lines(run(cluster, tmp_path, "killed", kind, "--pace", str(PACE_S), kills=2))
    assert {line["step"]: line["loss"] for line in steps} == calm
    for line in steps:
        assert line["loss"] == calm[line["step"]], line
    assert last == end
    firsts = {line["pid"]: line["step"] for line in reversed(steps)}
    assert len(firsts) == 3 and sorted(firsts.values())[1] > 1, f"a run began again: {firsts}"
