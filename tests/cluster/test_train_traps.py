"""Faults around a callback of Ray Train, on real Ray: each trap of Ray Train has a test that names it.

`research` for these is Ray's own source: hooks that raise end the run, `report` is a barrier, pointers are
deleted by number, callbacks are copied into every process.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
from ray.train.torch import TorchTrainer

import ray_ckpt
from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.errors import CheckpointError, ConfigError, NotConnected, RunInUse, ServiceError
from ray_ckpt.train import CheckpointCallback, open_checkpoint
from ray_ckpt.types import Level

pytestmark = pytest.mark.cluster
GATE_S = 60.0  # that a training loop waits for a test
AfterStep = Callable[[int], None]


def train_loop(config: dict[str, Any]) -> dict[str, int | None]:
    """Train with a step that is an addition; return the first and the last step of this group."""
    import torch

    from ray_ckpt.train import report
    from ray_ckpt.trainer import reports

    if config["reports_each_save"]:
        report.REPORT_EVERY_S, report.FIRST_STEPS, reports.FIRST_REPORT_STEPS = 0.0, 1, 1
    weight = torch.nn.Parameter(torch.zeros(3))
    ckpt = ray_ckpt.Checkpointer(weight=weight)
    done: list[int] = []
    for step in ckpt.steps(total=config["steps"]):
        assert weight.detach().tolist() == [step - 1.0] * 3, "restored what belongs to the step before"
        with torch.no_grad(), ckpt.lock():
            weight.add_(1)
        done.append(step)
        ckpt.step(step, metrics={"loss": 1.0 / step})
        config["after"](step)
    return {"first": done[0] if done else None, "last": done[-1] if done else None}


def nothing(step: int) -> None:
    """Do nothing after a step."""


def make_trainer(
    storage: Path,
    name: str,
    *,
    steps: int = 4,
    workers: int = 1,
    after: AfterStep = nothing,
    callbacks: list[Any] | None = None,
    reports_each_save: bool = False,
    max_failures: int = 0,
    trainer: dict[str, Any] | None = None,
    **run_config: Any,
) -> TorchTrainer:
    default = [CheckpointCallback(every_steps=1, replicas=0, remote_every=1)]
    return TorchTrainer(
        train_loop,
        train_loop_config={"steps": steps, "after": after, "reports_each_save": reports_each_save},
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=str(storage),
            callbacks=default if callbacks is None else callbacks,
            failure_config=ray.train.FailureConfig(max_failures=max_failures),
            **run_config,
        ),
        **(trainer or {}),
    )


def cause(error: BaseException | None) -> CheckpointError | None:
    """Our error behind what `fit` raised."""
    if error is None or isinstance(error, CheckpointError):
        return error
    causes = [*getattr(error, "worker_failures", {}).values()]
    causes += [getattr(error, name, None) for name in ("controller_failure", "cause", "__cause__")]
    return next(filter(None, map(cause, causes)), None)


def steps_of(run: Path) -> list[int]:
    return [view.info.step for view in Catalog(run)]


def await_file(path: Path) -> None:
    deadline_s = time.monotonic() + GATE_S
    while not path.exists():
        assert time.monotonic() < deadline_s, f"{path.name} does not come"
        time.sleep(0.05)


# -- several trainers ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_trainers_at_once_share_the_service_and_a_third_does_not_get_a_name_that_is_in_use(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    def until_open(name: str) -> AfterStep:
        def after(step: int) -> None:
            if step == 2:
                (tmp_path / f"{name}-is-there").touch()
                await_file(tmp_path / "gate")

        return after

    storage = tmp_path / "runs"
    with ThreadPoolExecutor(2) as pool:
        fits = {
            name: pool.submit(make_trainer(storage, name, after=until_open(name)).fit) for name in ("a", "b")
        }
        try:
            for name in fits:
                await_file(tmp_path / f"{name}-is-there")
            with pytest.raises(ray.train.TrainingFailedError) as caught:
                make_trainer(storage, "a").fit()
        finally:
            (tmp_path / "gate").touch()
        results = {name: fit.result() for name, fit in fits.items()}
    assert isinstance(cause(caught.value), RunInUse)
    for name, result in results.items():
        assert result.return_value == {"first": 1, "last": 4}
        assert steps_of(storage / name)[-1] == 4
        assert open_checkpoint(result.checkpoint).step == 4
    assert len(Catalog(storage / "a").sessions) == 1, "the third one changed nothing"


# -- callbacks -------------------------------------------------------------------------------------------


class OpensLate(CheckpointCallback):
    """Something nobody expected happens in its hooks, so many times."""

    surprises = 1

    def _open(self) -> Any:
        if self.surprises > 0:
            self.surprises -= 1
            raise RuntimeError("surprise")
        return super()._open()


@pytest.mark.slow
def test_a_hook_that_raises_does_not_end_the_run_and_the_next_one_opens_it(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    result = make_trainer(tmp_path, "late", callbacks=[OpensLate(every_steps=1, replicas=0)]).fit()
    assert result.return_value == {"first": 1, "last": 4}
    assert steps_of(tmp_path / "late")[-1] == 4


@pytest.mark.slow
def test_a_hook_that_raises_again_counts_as_a_failure_of_the_workers_and_is_retried(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    def late() -> CheckpointCallback:
        callback = OpensLate(every_steps=1, replicas=0)
        callback.surprises = 2
        return callback

    with pytest.raises(ray.train.TrainingFailedError) as caught:
        make_trainer(tmp_path, "late", callbacks=[late()]).fit()
    problem = cause(caught.value)
    assert isinstance(problem, ServiceError) and "RuntimeError: surprise" in str(problem)
    result = make_trainer(tmp_path, "late", callbacks=[late()], max_failures=1).fit()
    assert result.return_value == {"first": 1, "last": 4}


@pytest.mark.slow
def test_the_environment_activates_the_callback_without_a_change_to_the_driver(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TRAIN_CALLBACKS", "ray_ckpt.train.CheckpointCallback")
    monkeypatch.setenv("RAY_CKPT_OPTIONS", '{"every_steps": 2, "replicas": 0, "keep_last": 7}')

    def slowly(step: int) -> None:
        time.sleep(0.5)  # else a save may be overtaken by the next

    result = make_trainer(tmp_path, "env", steps=6, callbacks=[], after=slowly).fit()
    assert result.return_value == {"first": 1, "last": 6}
    assert steps_of(tmp_path / "env") == [2, 4, 6], "as the options set it"
    assert result.checkpoint is not None and open_checkpoint(result.checkpoint).step == 6


@pytest.mark.slow
def test_an_explicit_callback_wins_over_that_of_the_environment_and_the_group_is_opened_once(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TRAIN_CALLBACKS", "ray_ckpt.train.CheckpointCallback")
    monkeypatch.setenv("RAY_CKPT_OPTIONS", '{"every_steps": 2, "replicas": 0}')
    explicit = CheckpointCallback(every_steps=3, keep_last=7)
    result = make_trainer(tmp_path, "both", steps=6, callbacks=[explicit]).fit()
    assert result.return_value == {"first": 1, "last": 6}
    assert steps_of(tmp_path / "both") == [3, 6]
    assert len(Catalog(tmp_path / "both").sessions) == 1


@pytest.mark.slow
def test_one_callback_object_serves_several_runs(cluster: LocalCluster, tmp_path: Path) -> None:
    callback = CheckpointCallback(every_steps=1, replicas=0)
    for name in ("first", "second"):
        result = make_trainer(tmp_path, name, steps=2, callbacks=[callback]).fit()
        assert result.return_value == {"first": 1, "last": 2}
        assert steps_of(tmp_path / name)[-1] == 2


@pytest.mark.slow
def test_local_mode_runs_no_callbacks_and_the_checkpointer_names_what_is_missing(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    with pytest.raises(NotConnected, match="num_workers=0"):
        make_trainer(tmp_path, "local", workers=0).fit()


# -- failures --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_reports_of_the_user_stay_in_step_with_ours(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """Ours come between those of the user, on all ranks in the same order; both are barriers."""

    def after(step: int) -> None:
        rank = ray.train.get_context().get_world_rank()
        ray.train.report({"mine": step, "rank": rank})
        died = tmp_path / "died"
        if step == 5 and rank == 1 and not died.exists():
            died.touch()
            os._exit(1)

    result = make_trainer(
        tmp_path / "runs", "killed", steps=8, workers=2, after=after, reports_each_save=True, max_failures=1
    ).fit()
    assert result.return_value is not None and 4 <= result.return_value["first"] <= 6
    assert result.return_value["last"] == 8
    assert result.metrics is not None and result.metrics["step"] == 8
    assert open_checkpoint(result.checkpoint).step == 8
    assert len(Catalog(tmp_path / "runs" / "killed").sessions) == 2


@pytest.mark.slow
def test_without_failures_allowed_a_new_driver_of_the_same_name_continues_despite_rays_file(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    def breaks(step: int) -> None:
        if step == 3:
            raise ValueError("out of luck")

    run = tmp_path / "broken"
    with pytest.raises(ray.train.TrainingFailedError, match="out of luck"):
        make_trainer(tmp_path, "broken", steps=6, after=breaks, reports_each_save=True).fit()
    assert steps_of(run)[-1] == 3
    (run / "checkpoint_manager_snapshot.json").unlink()
    result = make_trainer(tmp_path, "broken", steps=6).fit()
    assert result.return_value == {"first": 4, "last": 6}
    # Nothing is left to do, and Ray's file leads to the last checkpoint.
    again = make_trainer(tmp_path, "broken", steps=6).fit()
    assert again.return_value == {"first": None, "last": None}
    assert open_checkpoint(again.checkpoint).step == 6
    assert again.checkpoint.path == result.checkpoint.path


@pytest.mark.slow
def test_a_worker_killed_without_failures_allowed_costs_no_committed_step(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    def dies(step: int) -> None:
        if step == 4:
            os._exit(1)

    with pytest.raises(ray.train.TrainingFailedError):
        make_trainer(tmp_path, "dead", steps=6, after=dies).fit()
    result = make_trainer(tmp_path, "dead", steps=6).fit()
    assert result.return_value is not None and result.return_value["first"] in (4, 5)
    assert result.return_value["last"] == 6


# -- pointers --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ray_keeps_and_scores_pointers_while_our_retention_keeps_checkpoints_elsewhere(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """num_to_keep deletes pointers; a directory that is gone by then would end the run."""

    def slowly(step: int) -> None:
        time.sleep(0.5)  # so that each save is committed at the next one

    elsewhere = tmp_path / "elsewhere"
    result = make_trainer(
        tmp_path / "ray",
        "scored",
        steps=8,
        after=slowly,
        reports_each_save=True,
        callbacks=[
            CheckpointCallback(
                storage_path=str(elsewhere), every_steps=1, replicas=0, remote_every=1, keep_last=2
            )
        ],
        checkpoint_config=ray.train.CheckpointConfig(
            num_to_keep=3, checkpoint_score_attribute="loss", checkpoint_score_order="max"
        ),
    ).fit()
    assert result.return_value == {"first": 1, "last": 8}
    best = result.best_checkpoints
    assert sorted(metrics["step"] for _, metrics in best)[0] == 1 and len(best) == 3, "the highest losses"
    pointers = {path.name for path in (tmp_path / "ray" / "scored").glob("ray_ckpt_*")}
    assert {Path(found.path).name for found, _ in best} < pointers and len(pointers) == 4, "and the last"
    assert open_checkpoint(result.checkpoint).step == 8
    assert open_checkpoint(result.checkpoint).load("weight").tolist() == [8.0] * 3
    again = ray.train.Result.from_path(str(tmp_path / "ray" / "scored"))
    assert open_checkpoint(again.checkpoint).step == 8
    pointer = json.loads((Path(again.checkpoint.path) / "pointer.json").read_text())
    assert pointer["run"] == str(elsewhere / "scored")
    kept = ", ".join(
        str(c.step) for c in Catalog(elsewhere / "scored").checkpoints if c.level is Level.DURABLE
    )
    oldest = min(best, key=lambda found: found[1]["step"])[0]
    with pytest.raises(ConfigError, match=f"step [12]. The nearest durable steps? (is|are) {kept}"):
        open_checkpoint(oldest)


@pytest.mark.slow
def test_a_validation_function_gets_pointers_that_it_can_open(cluster: LocalCluster, tmp_path: Path) -> None:
    def slowly(step: int) -> None:
        time.sleep(1.0)

    result = make_trainer(
        tmp_path,
        "validated",
        steps=3,
        after=slowly,
        reports_each_save=True,
        trainer={"validation_config": ray.train.ValidationConfig(fn=validate)},
    ).fit()
    scores = {metrics["step"]: metrics["sum"] for _, metrics in result.best_checkpoints}
    assert scores[3] == 9.0 and all(score == 3.0 * step for step, score in scores.items())


def validate(checkpoint: ray.train.Checkpoint) -> dict[str, float]:
    """Validate in a task of Ray Train, in a process of its own."""
    return {"sum": float(open_checkpoint(checkpoint, wait_s=GATE_S).load("weight").sum())}
