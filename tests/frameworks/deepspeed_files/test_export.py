"""`ray-ckpt export --to universal`: stock DeepSpeed goes on from it, at another stage and on other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ray_ckpt
from tests.catalog.test_export import export
from tests.frameworks.deepspeed_files.ranks import train
from tests.frameworks.deepspeed_files.saved import STEPS, TAG, Saved
from tests.frameworks.deepspeed_files.train import make_model
from tests.interop.imports import imported

pytestmark = pytest.mark.timeout(1200)  # the first training compiles for 90 s of one core

OTHERS = {1: (3, 3), 2: (3, 1), 3: (1, 1)}  # stage and number of ranks, by the stage that saved


def trained_states(run: Path) -> dict[str, dict[str, Any]]:
    """Return what DeepSpeed restores from a Universal Checkpoint: parameters that it trains, with moments."""
    state = ray_ckpt.open(run).load()
    names = [name for name, param in make_model(0).named_parameters() if param.requires_grad]
    return {name: {**state["optimizer"]["state"][name], "fp32": state["model"][name]} for name in names}


def test_deepspeed_loads_it_at_another_stage_on_other_ranks(
    saved: Saved, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    stage, world_size = OTHERS[request.node.callspec.params["saved"]]
    assert export(saved.runs / "deepspeed", tmp_path / "out", "--to", "universal") == 0
    words = ("--stage", stage, "--seed", 5, "--steps", 0, "--first", STEPS, "--load", tmp_path / "out")
    seen = train(tmp_path / "again", world_size, *words)
    assert seen[0]["steps"] == STEPS
    imported("deepspeed", tmp_path / f"again/{TAG}", tmp_path / "runs/again")
    one, other = trained_states(saved.runs / "deepspeed"), trained_states(tmp_path / "runs/again")
    for name, state in one.items():
        assert state.keys() == other[name].keys()
        assert all(torch.equal(tensor, other[name][key]) for key, tensor in state.items()), name
    client = ray_ckpt.open(tmp_path / "runs/again").load("scheduler")
    assert client["last_epoch"] == STEPS


def test_our_export_is_imported_again(saved: Saved, tmp_path: Path) -> None:
    assert export(saved.runs / "deepspeed", tmp_path / "out", "--to", "universal") == 0
    imported("universal", tmp_path / f"out/{TAG}", tmp_path / "runs/again")
    one, other = (
        ray_ckpt.open(run).load("model") for run in (saved.runs / "deepspeed", tmp_path / "runs/again")
    )
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
