"""A run under Ray Train in which ranks and nodes are killed at random is, in the end, the run without."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.types import Level
from tests.cluster.program import program
from tests.fault.rig import Rig, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
NODES = ("node-a", "node-b", "node-c", "node-d")
STEPS = 240
KILLS = 20
SEED = 6
STEP_S = 0.15
JOB = "--layers 1 --width 16 --heads 2 --context 16 --batch 2 --accumulate 2 --workers 2 --eval-every 100 "
JOB += f"--steps {STEPS} --every-steps 3 --remote-every 4 --replicas 1"
CALM_S = 120.0
RECOVERY_S = 120.0  # from a kill until the group trains again, on a busy machine; mostly some 10 s
HASTE = 0.2  # share of the kills that do not wait for the recovery from the one before
HASTE_S = 6.0  # they come within so long, while the group is made again and restores
ALL_S = 480.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """`floor` is the step that a group which begins after this kill has to have at least."""

    kind: str
    time_s: float
    floor: int


class Storm:
    """Kills ranks and nodes of a run, one at a time. The seed gives kinds and victims; when a kill strikes
    within a save or a restore is up to the machine."""

    def __init__(self, rig: Rig, history: Path, process: subprocess.Popen[bytes], seed: int) -> None:
        self._rig, self._history, self._process = rig, history, process
        self._rng = random.Random(seed)
        self._unsure_until = 0  # the last step done when a node was lost: all copies of later saves are there
        self.kills: list[Kill] = []

    def run(self) -> None:
        """Carry out all kills, spread over the steps of the run."""
        window = STEPS / (KILLS + 1)
        for k in range(KILLS):
            if k and self._rng.random() < HASTE:
                time.sleep(self._rng.uniform(0.0, HASTE_S))
            else:
                self._wait_trains(step=int(window * (k + self._rng.random())))
            self._strike()

    def _wait_trains(self, step: int) -> None:
        """Wait for a step since the last kill that is this step or a later one."""
        last_s = self.kills[-1].time_s if self.kills else 0.0

        def trains() -> bool:
            assert self._process.poll() is None, "the run ended too early"
            lines = read_lines(self._history)
            return bool(lines) and lines[-1]["time"] > last_s and lines[-1]["step"] >= step

        wait_for(trains, within_s=RECOVERY_S, what=f"step {step} after {self.kills[-1:]}")

    def _strike(self) -> None:
        kind = self._rng.choices(("rank", "node"), weights=(3, 2))[0]
        floor = self._floor()
        if kind == "rank":  # there is none for the seconds between two groups
            wait_for(self._kill_rank, within_s=RECOVERY_S, what="a worker to kill")
            self.kills.append(Kill(kind=kind, time_s=time.time(), floor=floor))
        else:
            self.kills.append(Kill(kind=kind, time_s=time.time(), floor=floor))
            self._kill_node()
        print(f"{len(self.kills):3d} {kind} killed, floor {floor}", flush=True)

    def _kill_rank(self) -> bool:
        workers = sorted(self._rig.actors("RayTrainWorker", NODES), key=lambda process: process.pid)
        if not workers:
            return False
        try:
            self._rng.choice(workers).kill()
        except psutil.NoSuchProcess:
            return False
        return True

    def _kill_node(self) -> None:
        """Kill a node with its disk, mostly one that trains; the node returns with an empty disk."""
        weights = [3 if self._rig.actors("RayTrainWorker", [name]) else 1 for name in NODES]
        name = self._rng.choices(NODES, weights)[0]
        self._rig.cluster.kill(name, wipe=True)
        self._unsure_until = max((line["step"] for line in read_lines(self._history)), default=0)
        self._rig.cluster.add(name)

    def _floor(self) -> int:
        """Return the newest step that survives a kill now: durable, or with copies made since a loss."""
        safe = [
            c.step
            for c in self._rig.commits()
            if c.level is Level.DURABLE or (c.level is Level.REPLICATED and c.step > self._unsure_until)
        ]
        return max(safe, default=0)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a history so far."""
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(x) for x in path.read_text().splitlines(keepends=True) if x.endswith("\n")]
    return []


def last_digests(run: Path) -> dict[tuple[str, str], str]:
    """Digest of every slice and state file of the last step."""
    rows = (row for fragment in Catalog(run)[STEPS].fragments() for row in fragment.rows)
    return {(row.file, row.label): row.digest for row in rows if row.kind != "header"}


def check_sessions(run: Path, kills: list[Kill]) -> None:
    """Assert that no group began with less than the kill before it had left."""
    catalog = Catalog(run)
    step_of = {c.id.attempt: c.step for c in catalog.list(all=True)}
    for session in catalog.sessions:
        step = step_of[session.resumed_from] if session.resumed_from else 0
        before = [kill for kill in kills if kill.time_s < session.opened_at_s]
        if before:
            assert step >= before[-1].floor, f"session {session.session} began at {step} after {before[-1]}"


@pytest.mark.timeout(int(ALL_S) + 60)
def test_twenty_random_kills_change_nothing(no_cluster: None, tmp_path: Path) -> None:
    started_s = time.monotonic()
    storage = tmp_path / "storage"
    calm, stormy = tmp_path / "calm.jsonl", tmp_path / "stormy.jsonl"

    def arguments(name: str, history: Path, *more: str) -> list[str]:
        return [
            "--storage-path",
            str(storage),
            "--name",
            name,
            "--history",
            str(history),
            *JOB.split(),
            *more,
        ]

    with LocalCluster(tmp_path / "staging", NODES) as cluster:
        log = tmp_path / "program.log"
        with program(cluster, log, "tests.fault.stubborn", *arguments("calm", calm)) as process:
            assert process.wait(CALM_S) == 0, log.read_text()[-3000:]
        pace = ("--step-time-s", str(STEP_S))
        with program(cluster, log, "tests.fault.stubborn", *arguments("stormy", stormy, *pace)) as process:
            storm = Storm(Rig(cluster, tmp_path, "stormy"), stormy, process, SEED)
            storm.run()
            assert process.wait(RECOVERY_S) == 0, log.read_text()[-3000:]

    expected = {line["step"]: line["loss"] for line in read_lines(calm)}
    lines = read_lines(stormy)
    kinds = Counter(kill.kind for kill in storm.kills)
    took_s = time.monotonic() - started_s
    print(
        f"{dict(kinds)}, {len(Catalog(storage / 'stormy').sessions)} sessions, "
        f"{len(lines) - STEPS} of {STEPS} steps repeated, {took_s:.0f} s"
    )
    assert kinds.total() == KILLS and min(kinds["rank"], kinds["node"]) > 0
    assert set(expected) == {line["step"] for line in lines} == set(range(1, STEPS + 1))
    assert [line for line in lines if line["loss"] != expected[line["step"]]] == []
    assert last_digests(storage / "stormy") == last_digests(storage / "calm") != {}
    assert Catalog(storage / "stormy")[STEPS].verify() == ()
    check_sessions(storage / "stormy", storm.kills)
    assert took_s < ALL_S
