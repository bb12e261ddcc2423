"""`ray-ckpt import verl`: files that FSDPCheckpointManager writes, restored on other ranks."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ray_ckpt
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.errors import CheckpointError, ConfigError, CorruptionError, UnsupportedLeaf
from tests.capture.ranks import on_ranks
from tests.interop.imports import imported, restore
from tests.support.examples import every_few

SHAPES = {1: (1,), 3: (3,), 4: (2, 2)}  # of the mesh by world size


def make(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 2), nn.Linear(2, 2, bias=False))
    model.register_buffer("count", torch.tensor(3))
    return model


def optimizer_of(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def write(rank: int, world_size: int, folder: Path, *, is_skyrl: bool = False) -> dict[str, torch.Tensor]:
    """Write the files of a rank as verl 0.9.1 or SkyRL 0.4.0 do; return the whole tensors."""
    names = ("dp", "fsdp")[-len(SHAPES[world_size]) :]
    mesh = init_device_mesh("cpu", SHAPES[world_size], mesh_dim_names=names)
    model = make()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    step(model, optimizer)
    scheduler.step()
    random_state = {
        "cpu": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "random": random.getstate(),
    }
    extra: dict[str, Any] = {"lr_scheduler": scheduler.state_dict(), "rng": random_state}
    if is_skyrl:
        extra |= {"client_state": {"seen": 5}, "tag": None, "world_size": world_size, "rank": rank}
    kinds = {"model": model.state_dict(), "optim": optimizer.state_dict(), "extra_state": extra}
    for kind, value in kinds.items():
        torch.save(value, folder / f"{kind}_world_size_{world_size}_rank_{rank}.pt")
    whole = {name: _whole(tensor) for name, tensor in model.state_dict().items()}
    for name, param in model.named_parameters():
        whole |= {f"{name}.{key}": _whole(tensor) for key, tensor in optimizer.state[param].items()}
    return whole


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save(world_size: int, folder: Path, *, is_skyrl: bool = False) -> dict[str, torch.Tensor]:
    folder.mkdir(parents=True)
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world_size}))
    (folder / "huggingface").mkdir()
    (folder / "huggingface/config.json").write_text('{"model_type": "llama"}')
    return on_ranks(world_size, lambda rank: write(rank, world_size, folder, is_skyrl=is_skyrl))[0]


@pytest.mark.parametrize("world_size", every_few(sorted(SHAPES, reverse=True), 2))
def test_files_of_ranks_are_restored_on_two_ranks_and_in_one_process(world_size: int, tmp_path: Path) -> None:
    source = tmp_path / "global_step_7/actor"
    whole = save(world_size, source)
    found = imported("verl", source, tmp_path / "runs/gpt")
    assert (found["step"], found["items"]) == (7, ["model", "optimizer", "scheduler", "files"])
    model = make(1)
    optimizer = optimizer_of(model)
    assert restore(tmp_path / "runs/gpt", model=model, optimizer=optimizer).step == 7
    _assert_whole(model, optimizer, whole)

    def read(rank: int) -> None:
        model = make(1)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = optimizer_of(model)
        ray_ckpt.open(tmp_path / "runs/gpt").load(into={"model": model, "optimizer": optimizer})
        _assert_whole(model, optimizer, whole)

    on_ranks(2, read)


def _assert_whole(model: Any, optimizer: torch.optim.Optimizer, whole: dict[str, torch.Tensor]) -> None:
    found = {name: _whole(tensor) for name, tensor in model.state_dict().items()}
    for name, param in model.named_parameters():
        found |= {f"{name}.{key}": _whole(value) for key, value in optimizer.state[param].items()}
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, name


def test_each_box_is_a_slice_and_replicas_are_one(tmp_path: Path) -> None:
    save(4, tmp_path / "a")
    imported("verl", tmp_path / "a", tmp_path / "runs/gpt", "--step", 3)
    rows = [row.slice for f in Catalog(tmp_path / "runs/gpt")[3].fragments() for row in f.rows if row.slice]
    assert sorted(part.shape for part in rows if part.name == "0.weight") == [(3, 4), (4, 4)]


def test_skyrl_has_more_and_an_empty_state_is_none(tmp_path: Path) -> None:
    source = tmp_path / "global_step_2/policy"
    save(3, source, is_skyrl=True)
    for rank in range(3):
        torch.save({}, source / f"optim_world_size_3_rank_{rank}.pt")
    found = imported("verl", source, tmp_path / "runs/gpt")
    assert found["items"] == ["model", "scheduler", "extra", "files"]
    state = ray_ckpt.open(tmp_path / "runs/gpt").load()
    assert state["extra"]["client_state"] == {"seen": 5} and state["scheduler"]["last_epoch"] == 1
    assert bytes(state["files"]["config.json"].numpy()) == b'{"model_type": "llama"}'


class Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit(3)",)


def _resave(path: Path, change: Any) -> None:
    value = torch.load(path, weights_only=False)
    change(value)
    torch.save(value, path)


def _named_alike(source: Path) -> None:
    for path in source.glob("model_*"):
        _resave(path, lambda state: state.update({"_orig_mod.count": torch.tensor(4)}))


def _placed(source: Path, kind: str) -> None:
    def change(state: dict[str, Any]) -> None:
        spec = state["2.weight"]._spec
        other = torch.distributed.tensor.placement_types
        spec.placements = (other.Partial() if kind == "partial" else other.Shard(1),)

    for rank in range(3):
        _resave(source / f"model_world_size_3_rank_{rank}.pt", change)


def _set_optimizer(source: Path, name: str, value: Any) -> None:
    for rank in range(3):
        path = source / f"optim_world_size_3_rank_{rank}.pt"
        _resave(path, lambda state: state["state"][0].update({name: value}))


DAMAGES: dict[str, tuple[Any, type[CheckpointError], str]] = {
    "a rank is missing": (lambda d: model_file(d).unlink(), CorruptionError, "model_.*_rank_1.pt is missing"),
    "an optimizer is missing": (
        lambda d: (d / "optim_world_size_3_rank_2.pt").unlink(),
        CorruptionError,
        "optim_.*_rank_2.pt is missing",
    ),
    "two world sizes": (
        lambda d: torch.save({}, d / "model_world_size_2_rank_0.pt"),
        ConfigError,
        r"files of \[2, 3\] ranks",
    ),
    "none": (lambda d: [path.unlink() for path in d.glob("*.pt")], ConfigError, "has no files model_world"),
    "FSDP1": (
        lambda d: (d / "fsdp_config.json").write_text('{"FSDP_version": 1}'),
        UnsupportedLeaf,
        "is of FSDP1",
    ),
    "flat": (
        lambda d: _set_optimizer(d, "exp_avg", torch.zeros(9)),
        UnsupportedLeaf,
        "state.0.exp_avg is of FSDP1",
    ),
    "partial": (lambda d: _placed(d, "partial"), ConfigError, "placement_types.*Partial, which is not"),
    "another dimension": (
        lambda d: _placed(d, "other"),
        CorruptionError,
        "rank_0.pt is damaged: .* the local",
    ),
    "names alike": (
        lambda d: _named_alike(d),
        ConfigError,
        "rank_0.pt has several tensors with the name count",
    ),
    "hostile": (lambda d: torch.save({"w": Evil()}, model_file(d)), ConfigError, "has builtins.exec, which"),
}


def model_file(folder: Path) -> Path:
    return folder / "model_world_size_3_rank_1.pt"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save(3, folder := tmp_path_factory.mktemp("verl") / "a")
    return folder


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_incomplete_or_hostile_is_refused(name: str, whole: Path, tmp_path: Path) -> None:
    damage, kind, message = DAMAGES[name]
    shutil.copytree(whole, tmp_path / "a")
    damage(tmp_path / "a")
    with pytest.raises(kind, match=message):
        imported("verl", tmp_path / "a", tmp_path / "gpt", "--step", 1)
    assert not (tmp_path / "gpt").exists()
