"""The contract with Ray Train's internals: says at once when a Ray version moves one."""

from __future__ import annotations

import inspect

import pytest
import ray
from ray.train.v2.api.callback import RayTrainCallback, UserCallback

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
