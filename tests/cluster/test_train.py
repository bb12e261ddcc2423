"""The callback inside Ray Train, and the main job as a submitted job."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
from ray.job_submission import JobStatus, JobSubmissionClient
from ray.train.torch import TorchTrainer

from jobs.demo.local_cluster import LocalCluster
from jobs.train_gpt import build_trainer, main, parse_args
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.errors import ConfigError
from ray_ckpt.train import CheckpointCallback
from ray_ckpt.types import Level

pytestmark = pytest.mark.cluster
TINY = "--layers 1 --width 16 --heads 2 --context 16 --batch 2 --accumulate 2 --workers 2 --eval-every 100"
JOB_S = 180.0
PROJECT = Path(__file__).parents[2]


def tiny_args(storage: Path, name: str, steps: int, *more: str) -> Any:
    args = ["--storage-path", str(storage), "--name", name, "--steps", str(steps), *TINY.split(), *more]
    return parse_args(args)


def history(path: Path) -> dict[int, str]:
    return {line["step"]: line["loss"] for line in map(json.loads, path.read_text().splitlines())}


@pytest.mark.slow
def test_a_new_driver_resumes_exactly_and_ray_sees_our_checkpoints(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    calm, broken = tmp_path / "calm.jsonl", tmp_path / "broken.jsonl"
    build_trainer(tiny_args(tmp_path, "calm", 12, "--every-steps", "4", "--history", str(calm))).fit()
    args = ("--every-steps", "4", "--history", str(broken))
    partial = tiny_args(tmp_path, "broken", 12, *args)
    partial.steps = 12
    # The schedule knows the total, so a run that stops early is one whose training loop breaks off.
    trainer = build_trainer(partial)
    trainer.train_loop_per_worker = _until_step_six
    trainer.run_config.failure_config = ray.train.FailureConfig(max_failures=0)
    with pytest.raises(ray.train.TrainingFailedError):
        trainer.fit()
    result = build_trainer(tiny_args(tmp_path, "broken", 12, *args)).fit()
    assert history(calm) == history(broken)
    ends = [session.ended for session in Catalog(tmp_path / "broken").sessions]
    assert [(end.cause, end.step) for end in ends if end] == [("process", 6), ("finished", 12)]

    assert result.checkpoint is not None and result.metrics is not None
    assert result.metrics["step"] == 12
    with result.checkpoint.as_directory() as folder:
        pointer = json.loads((Path(folder) / "pointer.json").read_text())
    newest = Catalog(tmp_path / "broken").newest(Level.DURABLE)
    assert newest is not None and newest.info.id.attempt == pointer["attempt"]
    assert (pointer["step"], newest.info.step) == (12, 12)
    again = ray.train.Result.from_path(str(tmp_path / "broken"))
    assert again.checkpoint is not None and again.checkpoint.path == result.checkpoint.path


def _until_step_six(config: dict[str, Any]) -> None:
    """Run the main job's loop, with a failure after step 6 that no restart survives."""
    import time

    import ray_ckpt
    from jobs.train_gpt import train_loop

    original = ray_ckpt.Checkpointer.step

    def step(self: Any, number: int, metrics: Any = None) -> None:
        original(self, number, metrics)
        if number == 6:
            time.sleep(3.0)  # ranks report progress once a second, and agents gather it for another second
            raise RuntimeError("out of luck")

    ray_ckpt.Checkpointer.step = step  # type: ignore[method-assign,assignment]
    train_loop(config)


@pytest.mark.slow
def test_a_wrong_storage_path_ends_the_run_before_workers_start(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    trainer = TorchTrainer(
        lambda: None,
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        run_config=ray.train.RunConfig(
            name="bad name!", storage_path=str(tmp_path), callbacks=[CheckpointCallback()]
        ),
    )
    with pytest.raises(Exception, match="cannot be a folder name") as caught:
        trainer.fit()
    from jobs.train_gpt import find_config_error

    assert isinstance(find_config_error(caught.value), ConfigError)


def test_the_main_job_reports_what_is_wrong_with_its_storage_path(
    cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["--storage-path", str(tmp_path / "file"), "--name", "x", "--steps", "2"]) == 1
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.slow
def test_the_main_job_runs_as_a_submitted_job(cluster: LocalCluster, tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("ray")), "job", "submit", "--address", cluster.dashboard]
    command += ["--no-wait", "--submission-id", "main-job", "--working-dir", ".", "--"]
    job = f"python -m jobs.train_gpt --storage-path {tmp_path} --name job --steps 6 --every-steps 3 {TINY}"
    subprocess.run([*command, *job.split()], cwd=PROJECT, check=True, capture_output=True, timeout=JOB_S)
    client = JobSubmissionClient(cluster.dashboard)
    deadline = time.monotonic() + JOB_S
    while not (status := client.get_job_status("main-job")).is_terminal():
        assert time.monotonic() < deadline, client.get_job_logs("main-job")
        time.sleep(1)
    logs = client.get_job_logs("main-job")
    assert status == JobStatus.SUCCEEDED, logs
    assert "ray-ckpt ls" in logs
    newest = Catalog(tmp_path / "job").newest(Level.DURABLE)
    assert newest is not None and newest.info.step == 6 and not newest.verify()
