"""Checkpoints as directories of torch.distributed.checkpoint, read by the stock package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ray_ckpt.capture.adapt import adapt
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.catalog.lazy_tensor import LazyTensor
from tests.catalog.test_export import export
from tests.catalog.test_load import save
from tests.support.sample_run import RunLog, write_run

dcp: Any = checkpoint
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture
def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model.head(model.embed(torch.arange(4))).sum().backward()
    optimizer.step()
    return model, optimizer


def test_dcp_loads_tensors_and_values(tmp_path: Path, trained: Any) -> None:
    model, optimizer = trained
    owners = {"model": model}
    items = {"model": adapt("model", model, owners), "optimizer": adapt("optimizer", optimizer, owners)}
    extra = {"names": ["a", "b"], "dtype": torch.bfloat16, "count": 3, "scale": torch.tensor(0.5)}
    save(RunLog(folder=tmp_path / "gpt"), [{**items, "extra": adapt("extra", extra, owners)}])
    assert export(tmp_path / "gpt", tmp_path / "out", "--to", "dcp") == 0

    dcp_to_torch_save(tmp_path / "out", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=False)
    assert found["extra"].keys() == extra.keys()
    assert found["extra"]["names"] == ["a", "b"] and found["extra"]["dtype"] is torch.bfloat16
    assert (found["extra"]["count"], float(found["extra"]["scale"])) == (3, 0.5)
    assert all(torch.equal(found["model"][name], each) for name, each in model.state_dict().items())
    moments = optimizer.state_dict()["state"][0]
    mine = found["optimizer"]["state"]["embed.weight"]
    assert all(torch.equal(mine[name], moments[name]) for name in moments)
    assert found["optimizer"]["param_groups"][0]["lr"] == 0.25

    into = {"model": {name: torch.zeros_like(each) for name, each in model.state_dict().items()}}
    dcp.load(into, checkpoint_id=tmp_path / "out", no_dist=True)
    assert all(torch.equal(into["model"][name], each) for name, each in model.state_dict().items())


def test_one_item_has_names_of_its_own(
    tmp_path: Path, trained: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    save(RunLog(folder=tmp_path / "gpt"), [{"model": adapt("model", trained[0], {})}])
    assert export(tmp_path / "gpt", tmp_path / "out", "--to", "dcp", "--item", "model") == 0
    assert export(tmp_path / "gpt", tmp_path / "out", "--to", "dcp", "--item", "model") == 2, "not empty"
    assert export(tmp_path / "gpt", tmp_path / "out", "--to", "dcp", "--item", "model", "--force") == 0
    assert export(tmp_path / "gpt", tmp_path / "no", "--to", "dcp", "--item", "policy") == 2
    assert export(tmp_path / "gpt", tmp_path / "no", "--to", "dcp", "--only", "model.*") == 2
    (tmp_path / "out" / "model.safetensors").touch()
    (tmp_path / "out" / "__1_0.distcp").touch()
    assert export(tmp_path / "gpt", tmp_path / "out", "--to", "dcp", "--item", "model", "--force") == 2
    assert "has other weights: __1_0.distcp." in capsys.readouterr().err
    (tmp_path / "out" / "__1_0.distcp").unlink()
    assert export(tmp_path / "gpt", tmp_path / "out", "--to", "dcp", "--item", "model", "--force") == 0
    assert (tmp_path / "out" / "model.safetensors").exists()
    into = {"embed.weight": torch.zeros(8, 4)}
    dcp.load(into, checkpoint_id=tmp_path / "out", no_dist=True)
    assert torch.equal(into["embed.weight"], trained[0].embed.weight)


def test_slices_stay_slices_and_are_read_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path, world_size=3)
    tensors = Catalog(run.folder)[30].tensors()
    sharded = max(tensors.values(), key=lambda lazy: len(lazy.slices))
    assert len(sharded.slices) == 3
    read: list[torch.Tensor] = []
    get = LazyTensor.__getitem__

    def counting(lazy: LazyTensor, index: Any) -> torch.Tensor:
        read.append(get(lazy, index))
        return read[-1]

    monkeypatch.setattr(LazyTensor, "__getitem__", counting)
    assert export(run.folder, tmp_path / "out", "--to", "dcp", "--step", 30) == 0
    metadata = dcp.FileSystemReader(tmp_path / "out").read_metadata()
    described = metadata.state_dict_metadata[sharded.name]
    assert len(described.chunks) == 3
    assert torch.Size(sharded.shape) not in {part.shape for part in read}
    into = {sharded.name: torch.zeros(sharded.shape, dtype=sharded.dtype)}
    dcp.load(into, checkpoint_id=tmp_path / "out", no_dist=True)
    assert torch.equal(into[sharded.name], sharded.load())


def test_a_tensor_of_another_form_on_another_rank_is_left_out(tmp_path: Path) -> None:
    for name, other in (
        ("long", torch.zeros(5)),
        ("wide", torch.zeros(2, 5)),
        ("double", torch.zeros(3).double()),
    ):
        items = [{"data": adapt("data", {"seen": seen}, {})} for seen in (torch.arange(3.0), other)]
        save(RunLog(folder=tmp_path / name), items)
        assert export(tmp_path / name, tmp_path / f"{name}.dcp", "--to", "dcp") == 0
        into = {"data": {"seen": torch.zeros(3)}}
        dcp.load(into, checkpoint_id=tmp_path / f"{name}.dcp", no_dist=True)
        assert into["data"]["seen"].tolist() == [0, 1, 2]


def test_tensors_in_tuples_are_exported(tmp_path: Path) -> None:
    """DCP takes a tuple as one value, whatever is in it."""
    carry = {"hidden": (torch.ones(2), torch.zeros(2)), "seen": [3, (torch.arange(2), torch.bfloat16)]}
    save(RunLog(folder=tmp_path / "gpt"), [{"carry": adapt("carry", carry, {})}])
    assert export(tmp_path / "gpt", tmp_path / "out", "--to", "dcp") == 0
    dcp_to_torch_save(tmp_path / "out", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)["carry"]
    assert [each.tolist() for each in found["hidden"]] == [[1, 1], [0, 0]]
    (count, (positions, dtype)) = found["seen"]
    assert (count, positions.tolist(), dtype) == (3, [0, 1], torch.bfloat16)


def test_damage_leaves_no_directory(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    for shard in run.directory(30).glob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        data[-100:] = bytes(100)
        shard.write_bytes(data)
    assert export(run.folder, tmp_path / "out", "--to", "dcp", "--step", 30) == 1
    assert not (tmp_path / "out").exists()
