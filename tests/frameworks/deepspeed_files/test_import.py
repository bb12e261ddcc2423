"""`ray-ckpt import deepspeed` and `universal`: directories that DeepSpeed 0.19.8 wrote on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ray_ckpt
from tests.capture.ranks import on_ranks
from tests.frameworks.deepspeed_files.saved import STEPS, Saved, assert_equal
from tests.frameworks.deepspeed_files.train import Net, groups_of, make_model
from tests.interop.imports import restore

pytestmark = pytest.mark.timeout(1200)  # the first training compiles for 90 s of one core


def test_weights_are_those_of_zero_to_fp32(saved: Saved) -> None:
    model = ray_ckpt.open(saved.runs / "deepspeed").load("model")
    assert model.keys() == make_model(1).state_dict().keys()
    assert model.keys() - saved.fp32.keys() <= {"frozen"}, "which zero_to_fp32 drops under ZeRO 1"
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
    info = restore(saved.runs / form, model=model, optimizer=optimizer, scheduler=scheduler)
    assert info.step == STEPS and [group["lr"] for group in optimizer.param_groups] == saved.seen[0]["lrs"]
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor.to(state[name].dtype)) for name, tensor in saved.fp32.items())
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
