"""The trials of docs/guides/tune-rllib.md, of which one dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.catalog.catalog import Catalog
from tests.cluster.test_code_blocks import TUNE
from tests.support.code_blocks import find, run_python

DIES_AT = 15


def build(config: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    return model, torch.optim.SGD(model.parameters(), lr=config["lr"])


class Step:
    """Trains a step; the first trial that comes to step DIES_AT dies there, once."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.count = 0  # in this process

    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        self.count += 1
        if self.count == DIES_AT:
            try:
                (self.out / "died").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
            except FileExistsError:
                pass
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())


@pytest.mark.cluster
@pytest.mark.slow
def test_a_trial_that_dies_goes_on_from_its_checkpoint(no_cluster: None, tmp_path: Path) -> None:
    storage = str(tmp_path / "storage")
    given = {"build": build, "train_step": Step(tmp_path)}
    here = {"/shared/runs": storage, "total=1000": "total=20"}
    with LocalCluster(tmp_path / "nodes", ["node-a", "node-b"]):
        results = run_python(find(*TUNE), given, here)["results"]
    assert not results.errors and (tmp_path / "died").exists()
    runs = [Catalog(f"{storage}/search-{result.metrics['trial_id']}") for result in results]
    newest = [checkpoint.info for run in runs if (checkpoint := run.newest()) is not None]
    assert [info.step for info in newest] == [20, 20]
    resumed = [[session.resumed_from is not None for session in run.sessions] for run in runs]
    assert sorted(resumed) == [[False], [False, True]], "the trial that died, and no other"
    assert len({info.metrics["loss"] for info in newest}) == 2, "two learning rates"
