"""The contract with Ray, as far as only a cluster shows it; the rest is in tests/train/test_ray_compat.py."""

from __future__ import annotations

import time
import urllib.request
from typing import Any

import pytest
import ray

from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.actors import ray_cluster as ray_state
from ray_ckpt.actors.metrics import Meters
from ray_ckpt.telemetry import AT_RISK, Sample

pytestmark = pytest.mark.cluster


def test_ray_reports_nodes_their_labels_and_those_that_leave(cluster: LocalCluster) -> None:
    ids = {node.node_id for node in cluster.nodes.values()}
    now = ray_state.nodes_now()
    assert ids <= now.live
    assert {node: now.domains("ray.io/node-id")[node] for node in ids} == {node: node for node in ids}, (
        "the label is the domain"
    )
    assert now.draining == frozenset() and now.gone_at_s == {}
    assert set(now.domains("none").values()) == {""}


def test_ray_reports_whether_a_launcher_lives(cluster: LocalCluster) -> None:
    class Controller:
        def owner(self) -> str:
            return ray_state.owner_here(by_job=False)

    controller: Any = ray.remote(num_cpus=0)(Controller).remote()
    owner = ray.get(controller.owner.remote())
    assert owner.startswith("actor:") and ray_state.is_alive(owner)
    ray.kill(controller)
    deadline_s = time.monotonic() + 10
    while ray_state.is_alive(owner):
        assert time.monotonic() < deadline_s, "a killed actor is dead for Ray within seconds"
        time.sleep(0.1)
    assert ray_state.is_alive(ray_state.owner_here(by_job=True))
    assert not ray_state.is_alive("job:ffffffff") and not ray_state.is_alive("actor:" + "0" * 32)


@pytest.mark.slow
def test_a_series_of_a_gauge_is_gone_soon_after_it_was_last_set(cluster: LocalCluster) -> None:
    """The series of a node that is no longer among the worst needs no removal."""
    meters, end_s = Meters(), time.monotonic() + 90

    def seen(*nodes: str) -> set[str]:
        for node in nodes:
            meters.record("vanish", Sample(metric=AT_RISK, labels={"node": node}))
        return {
            node
            for endpoint in {f"{n['NodeManagerAddress']}:{n['MetricsExportPort']}" for n in ray.nodes()}
            for line in urllib.request.urlopen(f"http://{endpoint}/metrics").read().decode().splitlines()
            for node in ("stays", "goes")
            if 'run="vanish"' in line and f'node="{node}"' in line
        }

    while seen("stays", "goes") != {"stays", "goes"}:
        assert time.monotonic() < end_s
        time.sleep(1)
    while seen("stays") != {"stays"}:
        assert time.monotonic() < end_s
        time.sleep(1)
