"""check_resume on real Ray: its results for loops that resume exactly, and for loops that do not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import ray.train
import torch
from ray.train.torch import TorchConfig
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel

import ray_ckpt
from jobs.demo.local_cluster import LocalCluster
from jobs.train_gpt import PARALLEL, find_config_error
from jobs.verify_resume import check, parse
from ray_ckpt.errors import ConfigError, ResumeError
from ray_ckpt.train.check import ResumeCheck, check_resume

pytestmark = pytest.mark.cluster
AT, STEPS = 3, 3


def loop(config: dict[str, Any]) -> None:
    """Train a small model, alike on each rank; `flaw` spoils its resume."""
    flaw = config["flaw"]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = LambdaLR(optimizer, lambda done: 0.9**done)
    items: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if flaw == "forgotten scheduler":
        del items["scheduler"]
    ema = AveragedModel(model) if flaw == "forgotten average" else None
    scale = 1.0
    ckpt = ray_ckpt.Checkpointer(**items)
    for step in ckpt.steps(total=config["total"]):
        scale += 0.5 if flaw == "forgotten counter" else 0.0
        if flaw == "chance":
            scale += int.from_bytes(os.urandom(4)) / 2**32
        optimizer.zero_grad()
        loss = (model(torch.full((2, 4), step / 10)) * scale).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if ema is not None:
            ema.update_parameters(model)
        ckpt.step(step)
        if flaw == "late draw":
            torch.rand(1)


def checked(storage: Path, flaw: str = "", *, workers: int = 1, total: int = 100) -> ResumeCheck:
    return check_resume(
        loop,
        config={"flaw": flaw, "total": total},
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        torch_config=TorchConfig(backend="gloo"),
        at=AT,
        steps=STEPS,
        storage_path=str(storage),
    )


@pytest.mark.slow
def test_a_loop_that_resumes_exactly_passes(cluster: LocalCluster, tmp_path: Path) -> None:
    found = checked(tmp_path, workers=2)
    found.raise_for_difference()
    assert found and found.difference is None
    assert (found.num_ranks, found.num_states) == (2, 2 + STEPS)
    assert found.seconds.keys() == {"first", "second"}
    assert sorted(file.name for file in found.folder.iterdir()) == [
        "first-0.jsonl",
        "first-1.jsonl",
        "second-0.jsonl",
        "second-1.jsonl",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flaw", "cause", "runs"),
    [
        ("late draw", "changed after the step", 2),
        ("forgotten scheduler", "settings", 2),
        ("forgotten counter", "missing", 3),
        ("chance", "chance", 3),
    ],
)
def test_what_spoils_a_resume_is_named(
    cluster: LocalCluster, tmp_path: Path, flaw: str, cause: str, runs: int
) -> None:
    found = checked(tmp_path, flaw)
    assert found.difference is not None
    assert (found.difference.step, found.difference.cause) == (AT + 1, cause), found
    assert len(found.seconds) == runs
    with pytest.raises(ResumeError, match="Likely cause"):
        found.raise_for_difference()


@pytest.mark.slow
def test_what_is_not_compared_is_in_the_answer(cluster: LocalCluster, tmp_path: Path) -> None:
    found = checked(tmp_path, "forgotten average")
    assert found
    assert [text.partition(" is not")[0] for text in found.warnings] == [
        "an averaged model (AveragedModel) of the registered module 'model'"
    ]
    assert "Not compared, for it is not registered: an averaged model" in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", PARALLEL)
def test_the_example_resumes_exactly(cluster: LocalCluster, tmp_path: Path, parallel: str) -> None:
    if parallel == "2d":  # four ranks
        cluster.add("node-d")
    try:
        workers = 4 if parallel == "2d" else 2
        found = check(parallel, workers, parse(["--at", "4", "--steps", "4"]), str(tmp_path))
    finally:
        if parallel == "2d":
            cluster.kill("node-d", wipe=True)
    found.raise_for_difference()
    assert found.num_ranks == workers


@pytest.mark.slow
def test_a_loop_that_is_too_short_is_an_error(cluster: LocalCluster, tmp_path: Path) -> None:
    with pytest.raises(ray.train.TrainingFailedError) as caught:
        checked(tmp_path, total=AT + STEPS - 1)
    assert "runs 5 steps, and 6 are to be compared" in str(find_config_error(caught.value))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"storage_path": "s3://bucket/runs"}, "is not a folder"),
        ({"scaling_config": ray.train.ScalingConfig(num_workers=(1, 2))}, "one number of workers"),
        ({"at": 0}, "cannot be compared"),
        ({"resume": "auto"}, "chooses what is resumed"),
        ({"evry_steps": 3}, "evry_steps"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    scaling = ray.train.ScalingConfig(num_workers=1)
    good: dict[str, Any] = {"scaling_config": scaling, "at": 1, "steps": 1, "storage_path": str(tmp_path)}
    with pytest.raises(ConfigError, match=words):
        check_resume(loop, **{**good, **change})
