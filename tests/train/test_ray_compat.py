"""The contract with Ray: the private names that we use, as far as inspection shows.

Needs no cluster: `python -m pytest tests/train/test_ray_compat.py` under another Ray shows within seconds
if that version changed a name. `tests/train/other_ray.sh VERSION` does that, and trains with it. Contracts
that need a cluster are in tests/cluster/test_ray_compat.py.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import ray._private.gcs_utils
import ray._private.services
import ray._private.state
import ray.train
import ray.train.collective
from ray import cloudpickle
from ray.core.generated import gcs_service_pb2
from ray.train.torch import TorchTrainer
from ray.train.v2.api.callback import RayTrainCallback, UserCallback

from ray_ckpt.actors import ray_cluster
from ray_ckpt.train import CheckpointCallback, WarmWorkers
from ray_ckpt.train import ray_compat as compat

OLDEST, NEWEST = (2, 56), (2, 60)
EXECUTION = "ray.train.v2._internal.execution"
HOOKS = {
    "after_controller_start": (compat.ControllerCallback, ["self", "train_run_context"]),
    "after_controller_state_update": (compat.ControllerCallback, ["self", "previous_state", "current_state"]),
    "before_controller_shutdown": (compat.ControllerCallback, ["self"]),
    "before_controller_execute_failure_decision": (compat.ControllerCallback, ["self", "failure_decision"]),
    "before_controller_execute_resize_decision": (compat.ControllerCallback, ["self", "resize_decision"]),
    "after_worker_group_shutdown": (compat.WorkerGroupCallback, ["self", "worker_group_context"]),
    "before_init_train_context": (compat.WorkerGroupCallback, ["self", "workers"]),
    "after_init_train_context": (compat.WorkerCallback, ["self"]),
    "before_worker_shutdown": (compat.WorkerCallback, ["self"]),
}


def parameters_of(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def fields_of(module: str, name: str) -> set[str]:
    """Return the field names of a dataclass of Ray's."""
    return {field.name for field in dataclasses.fields(getattr(importlib.import_module(module), name))}


def test_this_is_a_ray_version_that_was_tested() -> None:
    major, minor = ray.__version__.split(".")[:2]
    assert OLDEST <= (int(major), int(minor)) <= NEWEST


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_have_the_signature_that_we_override(name: str) -> None:
    base, parameters = HOOKS[name]
    for cls in (base, CheckpointCallback, WarmWorkers):
        assert parameters_of(getattr(cls, name)) == parameters
    is_async = inspect.iscoroutinefunction(getattr(base, name))
    assert inspect.iscoroutinefunction(getattr(CheckpointCallback, name)) == is_async


def test_a_controller_that_gives_up_differs_from_one_that_is_done() -> None:
    states = importlib.import_module(f"{EXECUTION}.controller.state")
    error = ray.train.TrainingFailedError("out of luck")
    errored = states.ErroredState(training_failed_error=error)
    assert compat.has_failed(states.ShuttingDownState(next_state=errored))
    assert not compat.has_failed(states.ShuttingDownState(next_state=states.FinishedState()))
    assert not compat.has_failed(states.RestartingState(training_failed_error=error))


def test_the_callbacks_are_of_the_kind_that_gets_every_hook() -> None:
    for callback in (CheckpointCallback, WarmWorkers):
        assert issubclass(callback, RayTrainCallback)
        assert not issubclass(callback, UserCallback), "Ray gives those two hooks only"


def test_a_trainer_hands_on_callbacks_of_the_run_config_and_of_the_environment_in_that_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_TRAIN_CALLBACKS", "ray_ckpt.train.CheckpointCallback")
    callbacks = importlib.import_module("ray.train.v2._internal.callbacks.env_callback")
    (from_environment,) = callbacks._initialize_env_callbacks()
    assert isinstance(from_environment, CheckpointCallback)
    source = inspect.getsource(TorchTrainer._create_default_callbacks)
    environment, run_config = "_initialize_env_callbacks()", "not isinstance(cb, UserCallback)"
    assert 0 < source.index(environment) < source.index(run_config)


def test_the_controller_gives_hooks_to_callbacks_by_their_kind() -> None:
    module = importlib.import_module(f"{EXECUTION}.controller")
    source = inspect.getsource(module.TrainController)
    assert "isinstance(c, ControllerCallback)" in source
    assert "(WorkerGroupCallback, WorkerCallback, TrainContextCallback)" in source
    assert re.search(r"await .*async_invoke\(\s*\"before_controller_shutdown\"", source), "it is awaited"
    started = inspect.getsource(module.TrainController._start)
    assert re.search(r"_run_controller_hook\(\s*\"after_controller_start\"", started), "it reports errors"


def test_hooks_of_workers_run_when_the_training_context_is_there() -> None:
    module = importlib.import_module(f"{EXECUTION}.worker_group.worker")
    source = inspect.getsource(module.RayTrainWorker.init_train_context)
    assert 0 < source.index("set_train_context(context)") < source.index("after_init_train_context()")
    assert "before_worker_shutdown()" in inspect.getsource(module.RayTrainWorker.shutdown)
    assert not inspect.iscoroutinefunction(module.RayTrainWorker.init_train_context), "the main thread"


def test_callbacks_are_copied_to_workers_after_the_group_has_been_opened() -> None:
    module = importlib.import_module(f"{EXECUTION}.worker_group.worker_group")
    source = inspect.getsource(module.WorkerGroup)
    opened = source.index("before_init_train_context(workers)")
    assert opened < source.index("worker_callbacks=self._worker_callbacks_to_propagate")


def test_a_worker_reports_its_rank_and_its_node() -> None:
    worker_group = f"{EXECUTION}.worker_group.worker"
    assert {"metadata", "distributed_context", "resources"} <= fields_of(worker_group, "Worker")
    assert "node_id" in fields_of(worker_group, "ActorMetadata")
    assert {"world_rank", "world_size"} <= fields_of(f"{EXECUTION}.context", "DistributedContext")


def test_the_run_context_has_the_run_config() -> None:
    assert "run_config" in fields_of(f"{EXECUTION}.context", "TrainRunContext")
    config = ray.train.RunConfig(name="run", callbacks=[CheckpointCallback()])
    assert config.name == "run" and config.storage_filesystem is None and config.storage_path
    assert len(config.callbacks) == 1 and config.worker_runtime_env == {}


def test_a_worker_knows_whether_its_trainer_validates() -> None:
    assert "has_validation_fn" in fields_of(f"{EXECUTION}.context", "TrainContext")


def test_report_takes_a_pointer_that_is_there_already() -> None:
    assert {
        "metrics",
        "checkpoint",
        "checkpoint_dir_name",
        "checkpoint_upload_mode",
        "delete_local_checkpoint_after_upload",
        "checkpoint_upload_fn",
        "validation",
    } <= set(parameters_of(ray.train.report))
    assert ray.train.CheckpointUploadMode.SYNC
    assert parameters_of(ray.train.collective.broadcast_from_rank_zero) == ["data"]
    assert parameters_of(ray.train.Checkpoint) == ["path", "filesystem"]


def test_the_storage_context_has_the_place_of_pointers() -> None:
    module = importlib.import_module("ray.train.v2._internal.execution.storage")
    storage = module.StorageContext
    source = inspect.getsource(storage)
    assert "storage_filesystem" in source and "experiment_fs_path" in source
    assert "build_checkpoint_path_from_name" in dir(storage)
    assert callable(ray.train.get_context) and "get_storage" in dir(ray.train.TrainContext)


def test_ray_reports_nodes_that_leave_actors_and_jobs() -> None:
    state = ray._private.state
    assert parameters_of(state.state.get_draining_nodes) == []
    assert "actor_id" in parameters_of(state.actors)
    assert '"State"' in inspect.getsource(type(state.state))
    jobs = inspect.getsource(state.GlobalState.job_table)
    assert '"JobID"' in jobs and '"IsDead"' in jobs


def test_ray_reports_the_cluster_to_which_it_would_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parameters_of(ray._private.services.get_ray_address_from_environment) == ["addr", "temp_dir"]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert ray_cluster.find_cluster() == "10.0.0.1:6379"
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert ray_cluster.find_cluster() is None, "one of its own"


def test_where_ray_has_never_run_there_is_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # where the last cluster's address would stand
    monkeypatch.setattr(ray._private.services, "find_gcs_addresses", set)
    assert ray_cluster.find_cluster() is None


def test_the_callback_survives_the_pickling_of_ray() -> None:
    copy = cloudpickle.loads(cloudpickle.dumps(CheckpointCallback(replicas=2)))
    assert copy._options.replicas == 2


def test_a_cluster_returns_its_id_over_a_separate_channel() -> None:
    assert parameters_of(ray._private.gcs_utils.create_gcs_channel)[0] == "address"
    assert not gcs_service_pb2.GetClusterIdRequest.DESCRIPTOR.fields
    with pytest.raises(ConnectionError):  # nobody is there
        ray_cluster.check_answers("127.0.0.1:1", 1.0)


def test_ray_finds_its_token_and_reads_its_mode_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("ab" * 32)
    script = "from ray_ckpt.actors import ray_cluster as s; import ray._raylet as r; "
    script += "print(s.use_token(), s.use_token(), r.get_authentication_mode() == r.AuthenticationMode.TOKEN)"
    environment = {**os.environ, "HOME": str(tmp_path), "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    environment.pop("RAY_AUTH_MODE", None)

    def run(**more: str) -> str:
        command = [sys.executable, "-c", script]
        return subprocess.run(
            command, env={**environment, **more}, capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()

    assert run() == "True False True"
    assert run(RAY_AUTH_MODE="disabled") == "False False False"
    for path in ("", str(tmp_path / "nowhere")):
        assert run(RAY_AUTH_TOKEN_PATH=path) == "False False False"
