"""Views of a service: values of its machines, no secrets."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from typing import Any

import pytest

from ray_ckpt.actors.coordinator.overview import Seen, disk_samples, run_view
from ray_ckpt.actors.messages import AgentCard, RunSpec, RunView, ServiceView
from ray_ckpt.config import GIB, RunOptions
from ray_ckpt.core import messages as m
from ray_ckpt.core.values import DiskSpace, RankProgress
from ray_ckpt.types import Watched
from tests.core.driver import START_S, Harness, of


def disk_series(disks: dict[str, DiskSpace], reserve_bytes: int = 10) -> dict[str, dict[str, float]]:
    """Return the values of the metrics of disks, by metric and label."""
    found: dict[str, dict[str, float]] = {}
    for sample in disk_samples(disks, RunOptions(reserve_bytes=reserve_bytes)):
        (label,) = sample.labels.values()
        found.setdefault(sample.metric.name, {})[label] = sample.value
    return found


def view_of(run: Harness, **seen: Any) -> RunView:
    options = {"secret_access_key": "canary"}
    spec = RunSpec(
        name="gpt", storage_path="s3://bucket/runs", options=RunOptions(storage_options=options, keep_last=10)
    )
    return run_view(spec, run.machine, Seen(**{"disks": {}, **seen}), wall_s=START_S + run.now_s)


def service(*runs: RunView) -> ServiceView:
    return ServiceView(
        version="0.1.0",
        protocol=5,
        ray_version="2.60.0",
        coordinator_node="a",
        coordinator_host="10.0.0.1",
        up_s=1.0,
        is_encrypted=True,
        nodes=("a", "b"),
        agents=(AgentCard(node_id="a", endpoint="grpc+tls://10.0.0.1:1", staging="/nvme"),),
        leaving=(),
        runs=runs,
    )


def trained(**options: Any) -> Harness:
    run = Harness("ab", keep_last=10, **options)
    run.open("ab")
    return run


def test_a_run_at_work() -> None:
    run = trained(remote_every=2)
    run.drain_all([*run.save(10), *run.save(20)])
    run.save(30)
    run.tick(60.0)
    ranks = {k: RankProgress(step=36, saved_step=30, step_s=0.5) for k in (0, 1)}
    run.feed(m.RanksProgressed(session_key=run.plan.session_key, ranks=ranks))
    disk = DiskSpace(free_bytes=50, total_bytes=1000)
    view = view_of(run, disks={"a": disk})
    assert (view.state, view.session, view.world_size, view.step, view.step_s) == ("training", 1, 2, 36, 0.5)
    assert [(n.level, n.step, n.steps_behind) for n in view.newest] == [
        ("local", 30, 6),
        ("replicated", 30, 6),
        ("durable", 20, 16),
    ]
    assert view.newest[0].age_s == 60.0
    first, second = view.nodes
    assert (first.node_id, first.ranks, first.holders, first.is_live) == ("a", (0,), ("b",), True)
    assert first.exposure is not None and (first.exposure.step, first.exposure.tier) == (30, "peer")
    assert first.disk is not None and (first.disk.is_full, first.disk.reserve_bytes) == (True, GIB)
    assert second.disk is None
    assert (view.live, view.in_cluster_only, view.needed_in_cluster) == (3, (10, 30), (30,))


def test_the_parity_groups_of_a_session_and_of_its_nodes() -> None:
    run = Harness("abcdef", parity=(2, 1), keep_last=10)
    run.open("abcde")
    view = view_of(run)
    assert view.parity_groups == run.plan.groups and len(view.parity_groups) == 2
    groups = {node.node_id: node.parity_group for node in view.nodes}
    members = [{"abcde"[at] for at in group.members} for group in view.parity_groups]
    assert [{node for node in groups if groups[node] == number} for number in (0, 1)] == members
    assert view_of(trained()).parity_groups == () and view_of(trained()).nodes[0].parity_group is None


def test_a_view_has_no_secrets_and_is_json() -> None:
    run = trained()
    run.save(10)
    text = json.dumps(dataclasses.asdict(service(view_of(run))), allow_nan=False)
    assert "canary" not in text and "s3://bucket/runs/gpt" in text
    assert "canary" not in repr(view_of(run))


def test_the_states_of_a_run() -> None:
    run = Harness("ab")
    run.store_mode = "silent"
    run.start_coordinator()
    assert view_of(run).state == "opening"
    run = Harness("ab")
    assert view_of(run).state == "idle"
    run.feed(run.group("ab"))
    assert view_of(run).state == "restoring"
    run.feed(*(run.restored(node) for node in "ab"))
    assert view_of(run).state == "training"
    assert view_of(run, owner_lives=False).state == "gone"
    run.feed(m.FinishRequested(token="end", ends_group=True))
    assert view_of(run).state == "finished"
    run.open("ab")
    run.feed(m.FinishRequested(token="failed", ends_group=True, has_failed=True))
    assert view_of(run).state == "failed"


def test_the_last_warning_has_an_age() -> None:
    run = trained()
    run.tick(50.0)
    view = view_of(run, warning="the store is silent", warned_at_s=START_S + 20.0)
    assert (view.warning, view.warning_age_s) == ("the store is silent", 30.0)
    assert view_of(run).warning_age_s is None


def save_differing(run: Harness, step: int) -> None:
    """Save a step whose replicas on the two nodes have different bytes."""
    attempt = run.attempt(step)
    for rank, name in enumerate("ab"):
        watched = (Watched(group="g", digests=(name,), names=("w",) * (rank == 0), ranks=(rank,)),)
        run.feed(replace(run.stored(attempt, name), watched=watched))
    run.feed(run.copied(attempt, "a", "b"), run.copied(attempt, "b", "a"))


def test_a_finding_about_replicas_is_shown_while_it_is_on_the_lineage() -> None:
    run = trained()
    save_differing(run, 10)
    text = view_of(run).suspect
    assert text.startswith("step 10: w: rank(s) ")
    run.save(20)
    assert view_of(run).suspect == text, "each save compares other bytes"
    run.open("ab")
    assert view_of(run).suspect == text, "step 20 may have bytes of both sides"
    save_differing(run, 30)
    later = view_of(run).suspect
    assert later.startswith("step 30: ")
    run.save(40)
    run.start_coordinator()
    assert run.machine.plan is None and view_of(run).suspect == later
    run.open("ab", resume="step:20")
    assert view_of(run).suspect == text, "step 30 is aside"
    run.open("ab", resume="never")
    assert view_of(run).suspect == ""


def test_pinned_and_draining_checkpoints_are_needed() -> None:
    run = trained(remote_every=2)
    run.save(10)
    drains = of(run.save(20), m.Drain)
    assert view_of(run).needed_in_cluster == (10, 20), "nothing is there yet"
    run.drain_all(drains)
    assert view_of(run).needed_in_cluster == ()
    attempt = run.machine.history.live()[0].id.attempt
    run.feed(m.PinRequested(token="pin", attempt=attempt, owner="me", expires_at_s=START_S + 100))
    assert view_of(run).needed_in_cluster == (10,)
    run.tick(200.0)
    assert view_of(run).needed_in_cluster == (), "the pin is over"
    run.feed(m.DrainRequested(token="drain", attempt=attempt))
    assert view_of(run).needed_in_cluster == (10,)


def test_each_disk_of_a_small_cluster_has_its_series() -> None:
    disks = {f"n{k}": DiskSpace(free_bytes=100 - k, total_bytes=100) for k in range(10)}
    found = disk_series(disks)
    assert found["disk_free_bytes"] == {node: disk.free_bytes for node, disk in disks.items()}
    assert found["disk_total_bytes"] == dict.fromkeys(disks, 100)
    assert found["disk_reserve_bytes"] == dict.fromkeys(disks, 10)
    assert found["nodes_disk_used_ratio"] == pytest.approx({"max": 0.09, "p99": 0.09})
    assert disk_series({}) == {}


def test_of_many_disks_the_fullest_have_series_and_the_same_ones_while_others_change_a_little() -> None:
    """An alert waits until a node has been full for minutes: the node's series must not come and go."""
    disks = {f"n{k:04d}": DiskSpace(free_bytes=5_000 + k % 7, total_bytes=10_000) for k in range(1_000)}
    disks |= {f"n{k:04d}": DiskSpace(free_bytes=100 * k, total_bytes=10_000) for k in range(1, 6)}
    found = disk_series(disks)
    nodes = found["disk_free_bytes"].keys()
    assert len(nodes) == 10 and nodes >= {f"n{k:04d}" for k in range(1, 6)}
    assert nodes == found["disk_total_bytes"].keys() == found["disk_reserve_bytes"].keys()
    assert found["nodes_disk_used_ratio"] == pytest.approx({"max": 0.99, "p99": 0.5})
    moved = {
        node: DiskSpace(free_bytes=disk.free_bytes - int(node[1:]) % 5, total_bytes=disk.total_bytes)
        for node, disk in disks.items()
    }
    assert disk_series(moved)["disk_free_bytes"].keys() == nodes


def test_a_disk_below_its_reserve_is_among_the_fullest_however_large_it_is() -> None:
    disks = {f"a{k}": DiskSpace(free_bytes=1_500, total_bytes=10**6) for k in range(20)}
    disks["z"] = DiskSpace(free_bytes=999, total_bytes=10**6)
    assert "z" in disk_series(disks, reserve_bytes=1_000)["disk_free_bytes"]
