"""Two live coordinators: one is frozen, Ray starts another, and then the first thaws. P3 and P5."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.actors import names
from ray_ckpt.actors.coordinator.actor import Coordinator
from ray_ckpt.storage.local.scrub import verify_fragment
from tests.fault.rig import Rig, frozen, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
THAW_S = 20.0  # within which the old coordinator must have found out and ended
NODES = ("node-a", "node-b", "node-c")


def test_a_coordinator_that_was_frozen_is_fenced_and_ends(no_cluster: None, tmp_path: Path) -> None:
    """No checkpoint is committed twice, lost or deleted wrongly, although both act for a while."""
    with LocalCluster(tmp_path / "staging", NODES) as cluster:
        _start_coordinator(cluster.nodes["node-c"].node_id)
        rig = Rig(cluster, tmp_path, "frozen", every_steps=1, remote_every=3, keep_last=2, max_block_s=1.0)
        rig.train(["node-a", "node-b"])
        rig.wait_commits(5)
        raylet = rig.raylet("node-c")
        (old,) = rig.actors("Coordinator", ["node-c"])
        with frozen(raylet):
            with frozen(old):
                before = rig.epoch()
                took_s = wait_for(lambda: rig.epoch() > before, what="a second coordinator")
                print(f"a second coordinator claimed the log {took_s:.1f} s after the first froze")
                rig.wait_commits(5)
            ended_s = wait_for(lambda: _is_dead(old), within_s=THAW_S, what="the old one has ended")
            print(f"the old one ended {ended_s:.1f} s after it thawed")
            rig.wait_commits(5)
        assert rig.group is not None and not rig.group.ended()
        assert "steps down" in _log_of(old.pid)
        _check_copies(rig)
        newest = rig.commits()[-1].step
        assert rig.restore(["node-a", "node-b"]) >= newest
        rig.stop()


def _start_coordinator(node_id: str) -> None:
    """Start it as the service would, but on a node that is not the head, so that Ray may start another."""
    handle = (
        ray.remote(Coordinator)
        .options(
            name=names.COORDINATOR,
            namespace=names.NAMESPACE,
            lifetime="detached",
            num_cpus=0.1,  # without any, Ray 2.60 does not look at a soft affinity
            max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=True),
        )
        .remote()
    )
    ray.get(handle.hello.remote(), timeout=60)


def _is_dead(process: psutil.Process) -> bool:
    """Also while its parent, which is frozen, has not reaped it."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _log_of(pid: int) -> str:
    logs = Path("/tmp/ray/session_latest/logs")
    return "".join(path.read_text() for path in logs.glob(f"worker-*-{pid}.err"))


def _check_copies(rig: Rig) -> None:
    """Assert that every copy in the coordinator's table is there, byte for byte."""
    for checkpoint in rig.catalog.lineage[-1:]:
        for index, holders in rig.holders(checkpoint).items():
            assert holders
            for name in holders:
                folder = rig.staged(name, checkpoint)
                assert not verify_fragment(folder.joinpath, index, checkpoint.num_nodes), os.fspath(folder)
