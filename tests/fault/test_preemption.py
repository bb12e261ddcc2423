"""A node of a Ray Train run is about to go: what is saved before it does, and what is repeated after."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated import autoscaler_pb2

from jobs.demo.local_cluster import LocalCluster
from jobs.train_gpt import build_trainer, parse_args
from ray_ckpt.catalog.catalog import Catalog
from tests.fault.conftest import Home

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
TINY = "--layers 1 --width 16 --heads 2 --context 16 --batch 2 --accumulate 2 --workers 2 --eval-every 1000"
STEPS = 160
STEP_S = 0.3
NOTICE_S = 30.0
AFTER_S = (
    2.5  # a save's commit and the next look at it, and how late Ray Train ends the group: nothing is kept
)
GONE_S = 3.0  # after its time is over; Ray Train looks every 0.5 s, and calls an earlier death a failure


def fit(history: Path, storage: Path, name: str, *, max_failures: int, steps: int, step_s: float) -> Any:
    args = ["--storage-path", str(storage), "--name", name, "--steps", str(steps), *TINY.split()]
    args += ["--every-steps", "100000", "--step-time-s", str(step_s), "--history", str(history)]
    trainer = build_trainer(parse_args(args))
    trainer.run_config.failure_config = ray.train.FailureConfig(max_failures=max_failures)
    return trainer.fit()


@ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
def fit_in_cluster(history: str, storage: str, **options: Any) -> int:
    return int(fit(Path(history), Path(storage), "broken", **options).return_value["step"])


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_step(path: Path, step: int, *, within_s: float) -> None:
    end_s = time.monotonic() + within_s
    while not any(line["step"] >= step for line in lines(path)):
        assert time.monotonic() < end_s, f"step {step} is not reached"
        time.sleep(0.2)


def drain(cluster: LocalCluster, node_id: str, *, notice_s: float) -> None:
    """Drain a node, as the node itself does at SIGTERM, or an autoscaler at a preemption."""
    accepted, why = GcsClient(address=cluster.address).drain_node(
        node_id,
        autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
        "spot instance",
        int((time.time() + notice_s) * 1000),
    )
    assert accepted, why


@pytest.mark.parametrize("max_failures", [0, 2])
def test_a_drain_notice_costs_the_steps_of_one_save_at_most(
    home: Home, tmp_path: Path, max_failures: int
) -> None:
    """No save was due by the cadence, so all that is kept is what the notice has led to."""
    cluster = home.start()
    calm, broken = tmp_path / "calm.jsonl", tmp_path / "broken.jsonl"
    fit(calm, tmp_path, "calm", max_failures=0, steps=STEPS, step_s=0.0)
    training = fit_in_cluster.remote(
        str(broken), str(tmp_path), max_failures=max_failures, steps=STEPS, step_s=STEP_S
    )
    wait_for_step(broken, 10, within_s=90)
    ranks = {n.node_id for n in cluster.nodes.values()} & _nodes_of_ranks()
    leaving = sorted(ranks)[0]
    name = cluster.name_of(leaving)
    drain(cluster, leaving, notice_s=NOTICE_S)
    time.sleep(NOTICE_S + GONE_S)
    cluster.kill(name, wipe=True)
    assert ray.get(training, timeout=180) == STEPS
    done = lines(broken)
    saved = [c.step for c in Catalog(tmp_path / "broken").list(all=True)]
    steps = [line["step"] for line in done]
    repeated = len(steps) - len(set(steps))
    emergency = [s for s in saved if s < STEPS]
    assert len(emergency) >= 2, "one as often as a save completes"
    gaps = [b - a for a, b in itertools.pairwise(emergency)]
    assert repeated <= max(gaps) + AFTER_S / STEP_S, (repeated, saved)
    for line in done:  # also the steps that were done twice
        assert {x["step"]: x["loss"] for x in lines(calm)}[line["step"]] == line["loss"]


def _nodes_of_ranks() -> set[str]:
    from ray.util.state import list_actors

    actors = list_actors(filters=[("class_name", "=", "RayTrainWorker"), ("state", "=", "ALIVE")])
    return {str(actor.node_id) for actor in actors}
