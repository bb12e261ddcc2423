"""`ray-ckpt import torch_dist` and `export --to torch_dist`, with Megatron-core on the other side."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ray_ckpt
from ray_ckpt.errors import CheckpointError, ConfigError, CorruptionError
from ray_ckpt.format.tree import TensorRef
from tests.catalog.test_export import export
from tests.hostile.samples import SAMPLES
from tests.interop.imports import imported, restore
from tests.interop.megatron import STACKED, STEPS, load, make, save, step, trained, weights

ITEMS = ["model", "optimizer", "objects", "common"]


slow = pytest.mark.slow  # the import of Megatron-core takes seconds


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron") / f"iter_{STEPS:07}"
    save(folder)
    return folder


@pytest.fixture(scope="module")
def run(source: Path) -> Path:
    run = source.parent / "runs/gpt"
    found = imported("torch_dist", source, run)
    assert (found["step"], found["items"]) == (STEPS, ITEMS)
    return run


@slow
def test_a_plain_training_goes_on_from_it(run: Path) -> None:
    (model, optimizer), (mine, other) = trained(), make(1)
    held = torch.nn.ModuleDict({"layers": torch.nn.Module()})
    held.update(dict(mine.named_children()))
    held["layers"].w = torch.nn.Parameter(torch.zeros(2, 3, 4))
    restore(run, model=held, optimizer=other)
    assert torch.equal(held["layers"].w, STACKED)
    for _ in range(2):
        for a, b in zip(model.parameters(), mine.parameters(), strict=True):
            assert torch.equal(a, b)
            assert all(torch.equal(optimizer.state[a][k], v) for k, v in other.state[b].items())
        step(model, optimizer)
        step(mine, other)


@slow
def test_objects_and_arguments_are_plain_values(run: Path) -> None:
    state = ray_ckpt.open(run).load()
    assert state["objects"] == {"layers._extra_state/shard_0_1": [{"amax": [0]}]}
    assert state["common"]["args"] == {"hidden": 6, "backend": 1, "kind": 1}
    assert state["common"]["iteration"] == STEPS
    assert state["optimizer"]["param_groups"][0]["params"] == [0, 1, 2, 3]


@slow
def test_megatron_reads_the_export(run: Path, tmp_path: Path) -> None:
    assert export(run, tmp_path / "out", "--to", "torch_dist") == 0
    tensors = weights(*trained())
    loaded = load(tmp_path / "out", tensors)
    assert all(torch.equal(loaded["model"][key], tensor) for key, tensor in tensors.items())
    assert loaded["iteration"] == STEPS and loaded["args"]["hidden"] == 6
    imported("torch_dist", tmp_path / "out", tmp_path / "again", "--step", STEPS)
    one, two = (ray_ckpt.open(path).load() for path in (run, tmp_path / "again"))
    assert torch.equal(one["model"]["layers.w"], two["model"]["layers.w"])
    assert one["objects"] == two["objects"] and one["common"] == two["common"]


@slow
def test_megatron_reads_a_plain_training(tmp_path: Path) -> None:
    model, optimizer = trained()
    names: dict[Any, str] = {param: name for name, param in model.named_parameters()}
    groups = [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    state = {names[param]: values for param, values in optimizer.state.items()}
    plain = {"model": model.state_dict(), "optimizer": {"state": state, "param_groups": groups}}
    torch.save(plain, tmp_path / f"step_{STEPS}.pt")
    imported("pt", tmp_path / f"step_{STEPS}.pt", tmp_path / "gpt")
    assert export(tmp_path / "gpt", tmp_path / "out", "--to", "torch_dist") == 0
    tensors = weights(model, optimizer)
    loaded = load(tmp_path / "out", tensors)
    assert all(torch.equal(loaded["model"][key], tensor) for key, tensor in tensors.items())
    assert loaded["optimizer"]["optimizer"]["state"] == {"common_step": STEPS}


@slow
def test_values_that_our_strategies_saved_are_exported_as_those_of_megatron(tmp_path: Path) -> None:
    from ray_ckpt.interop.exporters.torch_dist import MARK
    from ray_ckpt.interop.importers.torch_dist import read_torch_dist
    from ray_ckpt.interop.megatron import values

    assert values.MARK == MARK
    args = Namespace(width=2)
    data = values.encode({"noise": torch.arange(3), "seen": [1]}, "rng")
    state = {
        "model": {"w": torch.ones(2)},
        "objects": {"rng/shard_0_1": torch.frombuffer(bytearray(data), dtype=torch.uint8)},
        "common": values.plain(values.encode({"args": args, "iteration": 7}, "common")),
    }
    torch.save(state, tmp_path / "step_7.pt")
    imported("pt", tmp_path / "step_7.pt", tmp_path / "runs/gpt")
    out = tmp_path / "iter_0000007"
    assert export(tmp_path / "runs/gpt", out, "--to", "torch_dist") == 0
    assert torch.load(out / "common.pt", weights_only=False) == {"args": args, "iteration": 7}
    (found,) = read_torch_dist(out).items["objects"]["rng/shard_0_1"]
    assert found["seen"] == [1] and isinstance(found["noise"], TensorRef)


@slow
def test_values_may_be_views_of_other_memory() -> None:
    from ray_ckpt.interop.megatron import values

    views = [torch.arange(5.0).reshape(1, 5)[:, 2], torch.tensor([1 + 2j]).conj(), torch.ones(2, 3).T]
    found = values.decode(values.encode(views, "rng"))
    assert all(torch.equal(a, b) for a, b in zip(found, views, strict=True))


@slow
def test_two_ranks_of_megatron_become_one(tmp_path: Path) -> None:
    folder = tmp_path / "iter_7"
    words = [sys.executable, "-m", "tests.interop.megatron", str(folder)]
    ranks = [subprocess.Popen([*words, str(rank), "2"]) for rank in range(2)]
    assert [rank.wait(200) for rank in ranks] == [0, 0]
    imported("torch_dist", folder, tmp_path / "gpt")
    state = ray_ckpt.open(tmp_path / "gpt").load()
    for key, tensor in trained()[0].state_dict().items():
        assert torch.equal(state["model"][key], tensor), key
    assert torch.equal(state["model"]["layers.w"], STACKED)
    assert sorted(state["objects"]) == [f"layers._extra_state/shard_{rank}_2" for rank in range(2)]


def test_a_directory_of_two_ranks_is_read(tmp_path: Path) -> None:
    SAMPLES["torch_dist"][1](tmp_path / "iter_7")
    imported("torch_dist", tmp_path / "iter_7", tmp_path / "gpt")
    state = ray_ckpt.open(tmp_path / "gpt").load()
    assert torch.equal(state["model"]["w"], torch.arange(1.0, 61.0).view(10, 6))
    assert torch.equal(state["model"]["layers.x"], torch.tensor([[0.0] * 4, [1.0] * 4]))
    assert state["optimizer"]["state"]["w"]["step"] == 5 and state["common"]["iteration"] == 7
    assert state["objects"]["layers._extra_state/shard_1_2"] == [{"a": 1}]


class Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit(3)",)


DAMAGES: dict[str, tuple[Callable[[Path], object], type[CheckpointError], str]] = {
    "no config": (lambda d: (d / "metadata.json").unlink(), ConfigError, "it has no metadata.json"),
    "another format": (
        lambda d: (d / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        ConfigError,
        "names the format 'zarr'",
    ),
    "no common": (lambda d: (d / "common.pt").unlink(), CorruptionError, "common.pt is missing"),
    "hostile": (
        lambda d: torch.save({"a": Evil()}, d / "common.pt"),
        ConfigError,
        "common.pt has builtins.exec",
    ),
    "another kind": (lambda d: torch.save([1], d / "common.pt"), CorruptionError, "common.pt is damaged"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_incomplete_or_hostile_is_refused(name: str, tmp_path: Path) -> None:
    damage, kind, message = DAMAGES[name]
    folder = tmp_path / "iter_1"
    SAMPLES["torch_dist"][1](folder)
    damage(folder)
    with pytest.raises(kind, match=message):
        imported("torch_dist", folder, tmp_path / "gpt")
    assert not (tmp_path / "gpt").exists()
