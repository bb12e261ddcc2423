"""Weights that are uploaded alone by a real service, and read without it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

import ray_ckpt
from ray_ckpt.actors.client import coordinator
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.catalog.uri import CheckpointUri
from ray_ckpt.errors import ConfigError
from ray_ckpt.types import Level
from tests.cluster.ranks import RankGroup, Training

pytestmark = pytest.mark.cluster
WAIT_S = 60.0
OPTIONS: dict[str, Any] = {"every_steps": 2, "remote_every": 1000, "remote_items": ("extra", "model")}


def train(run: str, storage: str, last: int) -> dict[str, torch.Tensor]:
    """Train up to step `last`, leave the run unfinished, and return the weights."""
    training = Training(run, storage, **OPTIONS)
    for step in training.ckpt.steps(total=100):
        training.step()
        training.ckpt.step(step)
        if step == last:
            break
    state: dict[str, Any] = training.model.state_dict()
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in state.items()}


def refuse(run: str, storage: str) -> str:
    with pytest.raises(ConfigError) as caught:
        Training(run, storage, **{**OPTIONS, "remote_items": ("modle",)}).train(2)
    return f"{caught.value} {caught.value.hint}"


def test_weights_are_read_from_an_upload_that_makes_nothing_durable(group: RankGroup, storage: str) -> None:
    path = f"{storage}/weights"
    weights = group.run(train, "weights", storage, 4)[0]
    deadline_s = time.monotonic() + WAIT_S
    while (found := Catalog(path).with_items(["model"])) is None or found.info.step < 4:
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    assert found.info.level < Level.DURABLE and Catalog(path).newest(Level.DURABLE) is None
    opened = ray_ckpt.open(path)
    state = opened.load("model")
    assert state.keys() == weights.keys()
    assert all(torch.equal(state[name], weights[name]) for name in weights)
    assert opened.load("extra", step=4)["count"] == 4 and not found.verify()
    with pytest.raises(ConfigError, match="only extra, model, which training cannot resume from"):
        CheckpointUri.parse(f"{path}@4").open(None)
    view = ray.get(coordinator().overview.remote(), timeout=30)
    assert [run.exported for run in view.runs if run.where == path] == ["extra,model of step 4"]
    (folder,) = Path(path, "ray_ckpt", "checkpoints").glob("*4-*")
    assert folder.name.endswith(".extra.model")


def test_an_item_that_is_not_registered_is_refused(group: RankGroup, storage: str) -> None:
    for text in group.run(refuse, "unknown", storage):
        assert "remote_items has 'modle', which is not registered." in text and "model" in text
