"""Directories of other trainers, imported, from which a training on real nodes goes on."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from typer.testing import CliRunner

import ray_ckpt
from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.cli import app
from ray_ckpt.train import CheckpointCallback
from tests.capture.ranks import on_ranks

dcp: Any = checkpoint
AT, TOTAL = 3, 5


def build() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Train on data that depend on the step only, so that all ranks have equal gradients."""
    data = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
    model(data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train_loop(config: dict[str, Any]) -> None:
    model: Any = build()[0]
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ckpt = ray_ckpt.Checkpointer(model=model, optimizer=optimizer)
    for number in ckpt.steps(total=TOTAL):
        assert number > AT, "from the imported step"
        step(model, optimizer, number)
        ckpt.step(number)
    ckpt.finish()
    weights: Any = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    if ray.train.get_context().get_world_rank() == 0:
        torch.save(weights[0], Path(config["out"], "weights.pt"))


def save_dcp(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    weights, moments = get_state_dict(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is no process group
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder, no_dist=True)


def save_verl(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Train the same steps as verl's only rank, which has FSDP2, and write its files."""
    folder.mkdir()

    def write(rank: int) -> None:
        sharded: Any = build()[0]
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",)))
        own = torch.optim.AdamW(sharded.parameters(), lr=0.1)
        for number in range(1, AT + 1):
            step(sharded, own, number)
        for kind, value in (("model", sharded), ("optim", own)):
            torch.save(value.state_dict(), folder / f"{kind}_world_size_1_rank_{rank}.pt")

    on_ranks(1, write)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "save"), [("dcp", save_dcp), ("verl", save_verl)])
def test_a_training_goes_on_from_an_imported_directory(
    form: str, save: Any, cluster: LocalCluster, storage: str, tmp_path: Path
) -> None:
    model, optimizer = build()
    for number in range(1, TOTAL + 1):
        step(model, optimizer, number)
        if number == AT:
            save(model, optimizer, tmp_path / f"step-{AT}")
    Path(storage).mkdir()
    call = ["import", form, str(tmp_path / f"step-{AT}"), f"{storage}/gpt"]
    result = CliRunner().invoke(app, call, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    TorchTrainer(
        train_loop,
        train_loop_config={"out": str(tmp_path)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="gpt", storage_path=storage, callbacks=[CheckpointCallback(every_steps=1)]
        ),
    ).fit()
    found = torch.load(tmp_path / "weights.pt", weights_only=True)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)
    sessions = Catalog(f"{storage}/gpt").sessions
    assert [session.is_import for session in sessions] == [True, False]
