"""The contract with Ray Train's internals: says at once when a Ray version moves one."""

from __future__ import annotations

import inspect
import time
from typing import Any

import pytest
import ray
from ray.train.v2.api.callback import RayTrainCallback, UserCallback

from jobs.local_cluster import LocalCluster
from ray_ckpt.actors import ray_state
from ray_ckpt.train import CheckpointCallback
from ray_ckpt.train import ray_compat as compat

HOOKS = {
    "after_controller_start": (compat.ControllerCallback, ["self", "train_run_context"]),
    "before_controller_shutdown": (compat.ControllerCallback, ["self"]),
    "before_init_train_context": (compat.WorkerGroupCallback, ["self", "workers"]),
    "after_init_train_context": (compat.WorkerCallback, ["self"]),
    "before_worker_shutdown": (compat.WorkerCallback, ["self"]),
}


def test_this_is_a_ray_version_that_was_tested() -> None:
    assert ray.__version__.startswith("2.60.")


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_have_the_signature_that_we_override(name: str) -> None:
    base, parameters = HOOKS[name]
    for cls in (base, CheckpointCallback):
        assert list(inspect.signature(getattr(cls, name)).parameters) == parameters
    is_async = inspect.iscoroutinefunction(getattr(base, name))
    assert inspect.iscoroutinefunction(getattr(CheckpointCallback, name)) == is_async


def test_the_callback_is_of_the_kind_that_gets_every_hook() -> None:
    assert issubclass(CheckpointCallback, RayTrainCallback)
    assert not issubclass(CheckpointCallback, UserCallback), "Ray gives those two hooks only"


def test_ray_tells_of_nodes_their_labels_and_those_that_leave(cluster: LocalCluster) -> None:
    ids = {node.node_id for node in cluster.nodes.values()}
    now = ray_state.nodes_now("ray.io/node-id")
    assert ids <= set(now.live)
    assert {node: now.domains[node] for node in ids} == {node: node for node in ids}, (
        "the label is the domain"
    )
    assert now.draining == frozenset()
    assert set(ray_state.nodes_now("none").domains.values()) == {""}


def test_ray_tells_whether_a_launcher_lives(cluster: LocalCluster) -> None:
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
