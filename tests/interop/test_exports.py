"""Exports for other trainers of checkpoints that they cannot take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.catalog.test_export import export
from tests.catalog.test_load import items_of, save
from tests.interop.imports import imported
from tests.support.sample_run import RunLog

WEIGHTS = {"w": torch.ones(2)}
GROUP = {"lr": 0.1, "params": ["w"]}


@pytest.mark.parametrize("form", ["torch_dist", "universal"])
@pytest.mark.parametrize(
    "optimizer",
    [
        [{"state": {}, "param_groups": []}],
        {"state": [1], "param_groups": [GROUP]},
        {"state": {"w": 1}, "param_groups": [GROUP]},
        {"state": {}, "param_groups": 3},
        {"state": {}, "param_groups": [{"lr": 0.1}]},
    ],
    ids=["several", "list", "no state", "no groups", "no parameters"],
)
def test_an_optimizer_of_another_form_is_named(
    form: str, optimizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"model": WEIGHTS, "optimizer": optimizer}, tmp_path / "step_3.pt")
    imported("pt", tmp_path / "step_3.pt", tmp_path / "runs/gpt")
    assert export(tmp_path / "runs/gpt", tmp_path / "out", "--to", form) == 2
    assert "item 'optimizer'" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["objects", "common"])
def test_an_item_that_has_a_name_of_megatron_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"model": WEIGHTS, name: [1]}, tmp_path / "step_3.pt")
    imported("pt", tmp_path / "step_3.pt", tmp_path / "runs/gpt")
    assert export(tmp_path / "runs/gpt", tmp_path / "out", "--to", "torch_dist") == 2
    assert f"item '{name}' is no dict" in capsys.readouterr().err


@pytest.mark.parametrize(("steps", "expected"), [((2.0, 2.0), 2), ((2.0, 1.0), None), ((), 3)])
def test_megatron_gets_the_steps_of_the_optimizer(
    steps: tuple[float, ...], expected: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run may have begun from weights alone, or a loss scaler may have skipped steps."""
    model = {"a": torch.ones(2), "b": torch.ones(2)}
    states = {name: {"step": torch.tensor(step)} for name, step in zip(model, steps, strict=False)}
    optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": ["a", "b"]}]}
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "step_3.pt")
    imported("pt", tmp_path / "step_3.pt", tmp_path / "runs/gpt")
    done = export(tmp_path / "runs/gpt", tmp_path / "out", "--to", "torch_dist")
    if expected is None:
        assert done == 2 and "Parameters have taken [1.0, 2.0] steps" in capsys.readouterr().err
        return
    common = torch.load(tmp_path / "out/common.pt")
    assert common["optimizer"]["optimizer"]["state"] == {"common_step": expected} and common["iteration"] == 3


def test_groups_of_megatron_need_no_parameters(tmp_path: Path) -> None:
    optimizer = {"state": {"w": {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]}
    state = {"model": WEIGHTS, "optimizer": optimizer, "common": {"iteration": 3}}
    torch.save(state, tmp_path / "step_3.pt")
    imported("pt", tmp_path / "step_3.pt", tmp_path / "runs/gpt")
    assert export(tmp_path / "runs/gpt", tmp_path / "out", "--to", "torch_dist") == 0


def test_tensors_in_the_groups_of_an_optimizer_are_exported(tmp_path: Path) -> None:
    """As of `AdamW(parameters, lr=torch.tensor(0.125))`, whose state is restored by torch alone."""
    betas = (torch.tensor(0.5), torch.tensor(0.75))
    group = {"lr": torch.tensor(0.125), "betas": betas, "dtype": torch.bfloat16, "params": ["w"]}
    state = {"w": {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}}
    client = {"carry": (torch.zeros(2),), "dtype": torch.float16}
    whole = {"model": WEIGHTS, "optimizer": {"state": state, "param_groups": [group]}, "client": client}
    torch.save(whole, tmp_path / "step_3.pt")
    imported("pt", tmp_path / "step_3.pt", tmp_path / "runs/gpt")
    for form in ("universal", "torch_dist"):
        assert export(tmp_path / "runs/gpt", tmp_path / form, "--to", form) == 0
    folder = tmp_path / "universal/global_step3"
    saved = torch.load(folder / "zero/optimizer_state.pt")
    common = torch.load(tmp_path / "torch_dist/common.pt")
    groups = (saved["param_groups"], saved["optimizer_state_dict"]["param_groups"])
    for (found,) in (*groups, common["optimizer"]["optimizer"]["param_groups"]):
        assert found == {**group, "params": [0]}
    kept = torch.load(folder / "mp_rank_00_model_states.pt")
    assert kept["dtype"] is torch.float16 and kept["carry"][0].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("form", "lacking"),
    [("dcp", 2), ("universal", 1), ("torch_dist", 1), ("dcp --item model", 1), ("dcp --item optimizer", 0)],
)
def test_tensors_that_only_other_ranks_have_are_not_left_out(
    form: str, lacking: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a pipeline; the data of each rank is its own."""
    ranks = []
    for rank in range(2):
        stage = {"critic": {"v": torch.ones(1)}} if rank else {}
        model = {f"layers.{rank}": torch.ones(2)}
        optimizer = {"state": {}, "param_groups": [{"lr": 0.1, "params": ["layers.0"]}]}
        ranks.append(items_of(model=model, optimizer=optimizer, **stage))
    save(RunLog(folder=tmp_path / "gpt"), ranks)
    done = export(tmp_path / "gpt", tmp_path / "out", "--to", *form.split())
    if not lacking:
        assert done == 0
        return
    error = capsys.readouterr().err
    first = "critic.v" if lacking == 2 else "model.layers.1"
    assert done == 2 and not (tmp_path / "out").exists()
    count = "2 tensors, such as" if lacking == 2 else "1 tensor:"
    assert f"Rank 0 lacks {count} {first}, which" in error and "--to safetensors" in error
