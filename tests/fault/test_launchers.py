"""Two launchers that use one run name: in one cluster, and in two that share the storage path. P3."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray

from jobs.demo.local_cluster import LocalCluster, kill_family
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.types import SessionEnd
from tests.cluster.test_loss import PROJECT, TINY, losses
from tests.fault.conftest import MakeRig
from tests.fault.driver import driver
from tests.fault.rig import Rig, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
PAIR = ("node-a", "node-b")
STEPS = 200  # half a minute, in which a second launcher starts
LONG_S = 120.0


def test_a_second_launcher_waits_for_the_end_of_the_first(make_rig: MakeRig) -> None:
    rig = make_rig("shared", every_steps=1, remote_every=1000, max_block_s=1.0)
    with driver(rig.cluster, rig.job, PAIR) as first:
        rig.wait_commits(2)
        with driver(rig.cluster, rig.job, PAIR, restarts=0) as second:
            wait_for(second.ended, what="the second launcher gives up")
        assert second.errors == ["RunInUse"]
        assert not first.ended() and not first.errors
        rig.wait_commits(2)
    newest = rig.commits()[-1].step
    assert rig.restore(PAIR) >= newest


def test_the_end_of_the_session_of_a_dead_launcher_is_recorded(no_cluster: None, tmp_path: Path) -> None:
    """Ray Train's controller dies with its driver. A job of plain actors may end before they do."""
    with LocalCluster(tmp_path / "cluster", PAIR) as cluster:
        rig = Rig(cluster, tmp_path, "plain", every_steps=1, remote_every=1000, max_block_s=1.0)
        with driver(cluster, rig.job, PAIR):
            rig.wait_commits(2)
        with train_gpt(cluster, tmp_path, "first"):
            wait_for(lambda: any(line["step"] >= 30 for line in losses(tmp_path / "first.jsonl")))
        wait_for(lambda: _ends(tmp_path)[-1] is not None, what="the end of the session")
        ended = _ends(tmp_path)[-1]
        last_step = max(line["step"] for line in losses(tmp_path / "first.jsonl"))
        assert ended is not None and ended.cause == "launcher"
        assert 12 <= ended.step <= last_step, "by the reports of its ranks, one per second"
        assert rig.catalog.sessions[-1].ended is None
        with train_gpt(cluster, tmp_path, "second") as second:
            assert second.wait(LONG_S) == 0
        assert [end and end.cause for end in _ends(tmp_path)] == ["launcher", "finished"]


def test_a_run_that_moved_to_another_cluster_does_not_come_back(no_cluster: None, tmp_path: Path) -> None:
    """The newer cluster wins once and for all; the ranks of the older one stop, and its restarts too."""
    with LocalCluster(tmp_path / "one", PAIR) as one:
        rig = Rig(one, tmp_path, "moved", every_steps=1, remote_every=2, keep_last=50, max_block_s=1.0)
        with driver(one, rig.job, PAIR) as first:
            rig.wait_commits(3)
            ray.shutdown()  # of this process; the launcher has a connection of its own
            with LocalCluster(tmp_path / "two", PAIR) as two, driver(two, rig.job, PAIR) as second:
                wait_for(first.ended, what="the first launcher gives up")
                wait_for(lambda: len(rig.catalog.sessions) == 2, what="the second one's session")
                rig.wait_commits(5)
                assert not second.ended() and not second.errors
                assert len(rig.catalog.sessions) == 2, "nobody has taken the run back"
                rig.check()
    assert set(first.errors) == {"RunSuperseded"}
    services = [s.service for s in rig.catalog.sessions]
    assert services == sorted(services, key=services.index), "each service had the run once"


def test_ray_train_stops_when_its_run_has_moved(no_cluster: None, tmp_path: Path) -> None:
    """The same with the callback and Ray Train's own restarts."""
    with LocalCluster(tmp_path / "one", PAIR) as one:
        ray.shutdown()
        with LocalCluster(tmp_path / "two", PAIR) as two, train_gpt(one, tmp_path, "first") as first:
            wait_for(lambda: any(line["step"] >= 12 for line in losses(tmp_path / "first.jsonl")))
            with train_gpt(two, tmp_path, "second") as second:
                assert second.wait(LONG_S) == 0
            assert first.wait(LONG_S) != 0
    assert "RunSuperseded" in (tmp_path / "first.log").read_text()
    services = [s.service for s in Catalog(tmp_path / "moved").sessions]
    assert services == sorted(services, key=services.index) and len(set(services)) == 2
    done = {line["step"]: line["loss"] for line in losses(tmp_path / "first.jsonl")}
    again = {line["step"]: line["loss"] for line in losses(tmp_path / "second.jsonl")}
    assert max(again) == STEPS > max(done)
    assert all(done[step] == again[step] for step in done.keys() & again.keys())


def _ends(root: Path) -> list[SessionEnd | None]:
    return [session.ended for session in Catalog(root / "moved").sessions]


@contextmanager
def train_gpt(cluster: LocalCluster, root: Path, who: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the main job in a process of its own, with a history and a log for each launcher."""
    command = [sys.executable, "-m", "jobs.train_gpt", "--storage-path", str(root), "--name", "moved"]
    command += ["--history", str(root / f"{who}.jsonl"), *TINY.split(), "--steps", str(STEPS)]
    env = {**os.environ, "RAY_ADDRESS": cluster.address}
    with (root / f"{who}.log").open("wb") as out:
        process = subprocess.Popen(command, cwd=PROJECT, env=env, stdout=out, stderr=out)
    try:
        yield process
    finally:
        if process.poll() is None:
            kill_family(process.pid)
        process.wait()
