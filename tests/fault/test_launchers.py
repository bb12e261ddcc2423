"""Two launchers that use one run name: in one cluster, and in two that share the storage path. P3."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from jobs.local_cluster import LocalCluster
from ray_ckpt.catalog import Catalog
from tests.cluster.test_loss import losses, training
from tests.fault.conftest import MakeRig
from tests.fault.driver import driver
from tests.fault.rig import Rig, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
PAIR = ("node-a", "node-b")


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


def test_a_run_that_moved_to_another_cluster_does_not_come_back(no_cluster: None, tmp_path: Path) -> None:
    """The newer cluster wins once and for all; the ranks of the older one stop, and its restarts too."""
    with LocalCluster(tmp_path / "one", PAIR) as one:
        rig = Rig(one, tmp_path, "moved", every_steps=1, remote_every=2, keep_last=50, max_block_s=1.0)
        with driver(one, rig.job, PAIR) as first:
            rig.wait_commits(3)
            ray.shutdown()  # of this process; the launcher has a connection of its own
            with LocalCluster(tmp_path / "two", PAIR) as two, driver(two, rig.job, PAIR) as second:
                wait_for(first.ended, what="the first launcher gives up")
                sessions = len(rig.catalog.sessions)
                rig.wait_commits(5)
                assert not second.ended() and not second.errors
                assert len(rig.catalog.sessions) == sessions, "nobody has taken the run back"
                rig.check()
    assert set(first.errors) == {"RunSuperseded"}
    services = [s.service for s in rig.catalog.sessions]
    assert services == sorted(services, key=services.index), "each service had the run once"


def test_ray_train_stops_when_its_run_has_moved(no_cluster: None, tmp_path: Path) -> None:
    """The same with the callback and Ray Train's own restarts."""
    with LocalCluster(tmp_path / "one", PAIR) as one, training(one, tmp_path, "moved") as (first, history):
        wait_for(lambda: any(line["step"] >= 12 for line in losses(history)))
        ray.shutdown()  # of this process; the launcher has a connection of its own
        with LocalCluster(tmp_path / "two", PAIR) as two:
            (tmp_path / "moved.jsonl").rename(tmp_path / "first.jsonl")
            with training(two, tmp_path, "moved") as (second, history):
                assert second.wait(2 * 90.0) == 0
            assert first.wait(60.0) != 0
    log = (tmp_path / "moved.log").read_text()
    assert "RunSuperseded" in log
    services = [s.service for s in Catalog(tmp_path / "moved").sessions]
    assert services == sorted(services, key=services.index) and len(set(services)) == 2
    done = {line["step"]: line["loss"] for line in losses(tmp_path / "first.jsonl")}
    assert all(done.get(line["step"], line["loss"]) == line["loss"] for line in losses(history))
