"""Finished runs: what stays of them, on the nodes and in the processes of the service, and who comes back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import ray

from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.actors import names
from ray_ckpt.actors.attach import overview
from ray_ckpt.actors.client import annotate, coordinator, get_result
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.types import Level
from tests.cluster.many_runs import MIB, NODES, PUT_AWAY_S, many_runs, staged, wait_put_away
from tests.cluster.ranks import RankGroup, Training

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
RUNS = 10
GROWTH = 3  # threads or descriptors: Ray's own come and go
HEAP_GROWTH_BYTES = 6 * MIB  # over as many runs again; a leak of one run's 0.8 MB shows
FINISH_S = 60.0


def train(run: str, storage: str, total: int, options: dict[str, Any]) -> int:
    """Train, and return the restored step."""
    training = Training(run, storage, every_steps=1, max_block_s=20.0, **options)
    training.train(total)
    return training.ckpt.resume_step()


def finish(storage: str, run: str, *, has_failed: bool = False) -> None:
    get_result(coordinator().finish.remote(f"{storage}/{run}", FINISH_S, has_failed), FINISH_S + 30.0)


def test_many_runs_leave_nothing_behind(no_cluster: None, tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "staging", NODES) as cluster:
        first, last = many_runs(cluster, str(tmp_path / "storage"), 2 * RUNS, look_every=RUNS)
        assert not [*staged(cluster)]
        for process, found in last.items():
            before = first[process]
            assert found.threads <= before.threads + GROWTH, process
            assert found.descriptors <= before.descriptors + GROWTH, process
            assert found.heap_bytes <= before.heap_bytes + HEAP_GROWTH_BYTES, process


def test_what_an_option_or_a_failure_keeps_is_found_by_the_next_group(
    group: RankGroup, cluster: LocalCluster, storage: str
) -> None:
    options = {"retire_grace_s": 0.5, "remote_every": 1000}
    group.run(train, "failed", storage, 4, options)
    finish(storage, "failed", has_failed=True)
    group.run(train, "kept", storage, 4, {**options, "keep_local_at_end": True})
    finish(storage, "kept")
    group.run(train, "gone", storage, 4, options)
    finish(storage, "gone")
    wait_put_away("kept", "gone")
    for run, wanted in (("failed", 3), ("kept", 3), ("gone", 0)):
        found = [*staged(cluster, Catalog(f"{storage}/{run}").run_uid)]
        assert len({path.parent.name for path in found if path.name.startswith("manifest")}) == wanted, run
        assert bool(found) == bool(wanted)
    live = Catalog(f"{storage}/gone").checkpoints
    assert [(c.step, c.level) for c in live] == [(4, Level.DURABLE)]
    for run in ("failed", "kept", "gone"):
        assert group.run(train, run, storage, 6, options) == [4, 4]


@pytest.mark.parametrize("grace_s", [0.0, 0.6])
def test_a_run_may_be_opened_at_any_time_while_it_is_put_away(
    group: RankGroup, cluster: LocalCluster, storage: str, grace_s: float
) -> None:
    options = {"retire_grace_s": grace_s, "remote_every": 3, "keep_last": 2}
    for turn in range(6):
        assert group.run(train, "again", storage, 2 * turn + 2, options) == [2 * turn] * 2
        finish(storage, "again")
        time.sleep(0.25 * turn)  # each turn comes at another moment
    wait_put_away("again")
    catalog = Catalog(f"{storage}/again")
    assert not [*staged(cluster, catalog.run_uid)]
    assert [c.step for c in catalog.checkpoints if c.level is Level.DURABLE][-1] == 12
    assert not [c for c in catalog.list(all=True) if c.state in ("lost", "retired")]


def test_a_run_that_was_put_away_still_answers(group: RankGroup, cluster: LocalCluster, storage: str) -> None:
    group.run(train, "put-away", storage, 4, {"retire_grace_s": 0.0})
    finish(storage, "put-away")
    wait_put_away("put-away")
    (view,) = [run for run in overview(coordinator()).runs if run.name == "put-away"]
    assert (view.state, view.is_put_away, view.live, view.nodes) == ("finished", True, 1, ())
    annotate(run="put-away", storage_path=storage, step=4, metrics={"score": 0.5})
    assert Catalog(f"{storage}/put-away").checkpoints[-1].metrics["score"] == 0.5
    finish(storage, "put-away")


def test_a_coordinator_and_agents_that_die_in_the_grace_put_it_away_all_the_same(
    no_cluster: None, tmp_path: Path
) -> None:
    storage = str(tmp_path / "storage")
    with LocalCluster(tmp_path / "staging", NODES) as cluster:
        group = RankGroup([cluster.nodes[name].node_id for name in NODES])
        group.run(train, "orphan", storage, 4, {"retire_grace_s": 8.0})
        finish(storage, "orphan")
        assert [*staged(cluster)]
        agent = names.agent_name(cluster.nodes[NODES[0]].node_id)
        ray.kill(ray.get_actor(agent, namespace=names.NAMESPACE))
        ray.kill(coordinator(), no_restart=False)
        deadline_s = time.monotonic() + PUT_AWAY_S
        while left := [*staged(cluster)]:  # the next coordinator first has to find the run
            assert time.monotonic() < deadline_s, left
            time.sleep(0.2)
        assert [c.step for c in Catalog(f"{storage}/orphan").checkpoints] == [4]
        group.stop()
