"""`ray-ckpt import deepspeed` and `universal`: directories that DeepSpeed 0.19.8 wrote on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ray_ckpt
from tests.capture.ranks import on_ranks
from tests.frameworks.deepspeed_files.ranks import run, to_universal, train
from tests.frameworks.deepspeed_files.train import Net, groups_of, make_model
from tests.interop.imports import imported, restore

STAGES = {1: ("--bf16",), 2: (), 3: ("--bf16",)}
STEPS = 3
TAG = f"global_step{STEPS}"
FP32 = """
import sys, torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as whole
torch.save({name: tensor.clone() for name, tensor in whole(*sys.argv[1:3]).items()}, sys.argv[3])
"""


class Saved:
    """A training of one stage: its folder, and what DeepSpeed's own tools make of it."""

    def __init__(self, folder: Path, stage: int) -> None:
        self.seen = train(folder / "ds", 2, "--stage", stage, "--steps", STEPS, *STAGES[stage])
        self.tag = folder / "ds" / TAG
        self.universal = to_universal(self.tag, folder / "universal" / TAG)
        run("-c", FP32, folder / "ds", TAG, folder / "fp32.pt")
        self.fp32 = torch.load(folder / "fp32.pt", weights_only=True)
        self.runs = folder / "runs"
        self.runs.mkdir()
        for form, source in (("deepspeed", self.tag), ("universal", self.universal)):
            self.__dict__[f"{form}_items"] = imported(form, source, self.runs / form)["items"]


_made: dict[int, Saved] = {}


@pytest.fixture(params=STAGES, ids=lambda stage: f"zero{stage}")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    stage: int = request.param
    if stage not in _made:
        _made[stage] = Saved(tmp_path_factory.mktemp(f"zero{stage}"), stage)
    return _made[stage]


def flat(value: Any, path: str = "") -> dict[str, Any]:
    inner = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    )
    if inner is None:
        return {path: value}
    return {name: leaf for key, each in inner for name, leaf in flat(each, f"{path}/{key}").items()}


def assert_equal(one: Any, other: Any) -> None:
    mine, theirs = flat(one), flat(other)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == theirs[name].dtype and torch.equal(value, theirs[name]), name
        else:
            assert value == theirs[name], name


def test_weights_are_those_of_zero_to_fp32(saved: Saved) -> None:
    model = ray_ckpt.open(saved.runs / "deepspeed").load("model")
    assert model.keys() == saved.fp32.keys() == make_model(1).state_dict().keys()
    for name, tensor in saved.fp32.items():
        assert torch.equal(model[name], tensor.to(model[name].dtype)), name
        assert model[name].dtype in (torch.float32, torch.int64), "a buffer counts"


def test_moments_are_those_of_ds_to_universal(saved: Saved) -> None:
    optimizer = ray_ckpt.open(saved.runs / "deepspeed").load("optimizer")
    trained = {name for name, param in make_model(1).named_parameters() if param.requires_grad}
    assert optimizer["state"].keys() == trained
    for name, state in optimizer["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            there = torch.load(saved.universal / "zero" / name / f"{key}.pt", weights_only=True)
            tensor = there["param"] if isinstance(there, dict) else there
            assert torch.equal(state[key].flatten(), tensor.flatten()), (name, key)
        assert state["step"].item() == STEPS and state["step"].dtype == torch.float32
    assert len({id(state["step"]) for state in optimizer["state"].values()}) == len(trained)


def test_both_forms_of_a_checkpoint_are_equal(saved: Saved) -> None:
    one, other = (ray_ckpt.open(saved.runs / form).load() for form in ("deepspeed", "universal"))
    assert one.keys() == other.keys() == {"model", "optimizer", "scheduler", "deepspeed", "client"}
    assert_equal(one, other)


def test_counters_scheduler_and_client_state_come_along(saved: Saved) -> None:
    state = ray_ckpt.open(saved.runs / "deepspeed").load()
    assert state["client"] == {"note": [1, "a"], "seen": 18}
    assert state["deepspeed"]["global_steps"] == STEPS == saved.seen[0]["steps"]
    assert state["deepspeed"]["loss_scaler"]["class"] == "LossScaler"
    assert [group["lr"] for group in state["optimizer"]["param_groups"]] == saved.seen[0]["lrs"]
    assert state["scheduler"]["last_epoch"] == STEPS


@pytest.mark.parametrize("form", ["deepspeed", "universal"])
def test_a_plain_training_goes_on_from_it(saved: Saved, form: str) -> None:
    model = make_model(1)
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with pytest.warns(UserWarning, match="client"):
        info = restore(saved.runs / form, model=model, optimizer=optimizer, scheduler=scheduler)
    assert info.step == STEPS and [group["lr"] for group in optimizer.param_groups] == saved.seen[0]["lrs"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, saved.fp32[name].to(tensor.dtype)), name
    model(torch.ones(6, 5)).square().mean().backward()
    optimizer.step()
    assert {state["step"].item() for state in optimizer.state.values()} == {STEPS + 1}


def test_it_is_restored_into_fsdp2_on_three_ranks(saved: Saved) -> None:
    def read(rank: int) -> dict[str, torch.Tensor]:
        model: Any = Net()
        model.frozen.requires_grad = True  # of one kind in a unit of FSDP
        fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
        optimizer = torch.optim.AdamW(groups_of_names(model), lr=0.01)
        ray_ckpt.open(saved.runs / "deepspeed").load(into={"model": model, "optimizer": optimizer})
        state = {
            f"{name}.{key}": value
            for name, param in model.named_parameters()
            for key, value in optimizer.state.get(param, {}).items()
        }
        found = {**model.state_dict(), **state}
        return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in found.items()}

    moments = ray_ckpt.open(saved.runs / "deepspeed").load("optimizer")["state"]
    for found in on_ranks(3, read):
        for name, tensor in saved.fp32.items():
            assert torch.equal(found[name], tensor.to(found[name].dtype)), name
        for name, state in moments.items():
            assert all(torch.equal(found[f"{name}.{key}"], tensor) for key, tensor in state.items()), name


def groups_of_names(model: Any) -> list[dict[str, Any]]:
    """Return the groups of `groups_of`, without the parameter that DeepSpeed did not train."""
    trained = [param for name, param in model.named_parameters() if name != "frozen"]
    return [{"params": [p for p in trained if p.dim() > 1]}, {"params": [p for p in trained if p.dim() < 2]}]
