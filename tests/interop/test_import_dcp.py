"""`ray-ckpt import dcp`: directories that torch.distributed.checkpoint wrote, restored anywhere."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, zeros

import ray_ckpt
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.errors import CheckpointError, ConfigError, CorruptionError, UnsupportedLeaf
from ray_ckpt.interop.importers.dcp import read_directory
from tests.capture.ranks import on_ranks
from tests.catalog.test_export import export
from tests.interop.imports import assert_same, imported, make, restore, trained

dcp: Any = checkpoint
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
WHOLE = torch.arange(1.0, 71.0).view(14, 5)


def save(state: dict[str, Any], folder: Path, **options: Any) -> Path:
    dcp.save(state, checkpoint_id=folder, no_dist=True, **options)
    return folder


def test_states_by_parameter_names_restore_through_a_checkpointer(tmp_path: Path) -> None:
    model, optimizer = trained()
    states = get_state_dict(model, optimizer)
    source = save({"model": states[0], "optimizer": states[1]}, tmp_path / "step_12")
    found = imported("dcp", source, tmp_path / "runs/gpt")
    assert (found["step"], found["items"], found["session"]) == (12, ["model", "optimizer"], 1)
    other = make(1)
    assert restore(tmp_path / "runs/gpt", model=other[0], optimizer=other[1]).step == 12
    assert_same((model, optimizer), other)


def test_states_by_number_go_to_the_parameters_in_the_order_of_the_groups(tmp_path: Path) -> None:
    model, optimizer = trained()
    source = save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint-3"
    )
    imported("dcp", source, tmp_path / "gpt")
    saved = ray_ckpt.open(tmp_path / "gpt").load("optimizer")
    assert [group["params"] for group in saved["param_groups"]] == [[0, 1], [2, 3]]
    other = make(1)
    restore(tmp_path / "gpt", model=other[0], optimizer=other[1])
    assert_same((model, optimizer), other)
    assert other[1].param_groups[1]["lr"] == 0.5


def test_an_optimizer_without_state_is_restored(tmp_path: Path) -> None:
    model, optimizer = make(0, torch.optim.SGD)
    source = save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "3")
    imported("dcp", source, tmp_path / "gpt")
    other = make(1, torch.optim.SGD)
    other[1].param_groups[0]["lr"] = 7.0
    restore(tmp_path / "gpt", model=other[0], optimizer=other[1])
    assert other[1].param_groups[0]["lr"] == 0.1


def test_chunks_of_ranks_are_slices_and_load_on_another_number_of_ranks(tmp_path: Path) -> None:
    def write(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        cut = distribute_tensor(WHOLE.clone(), mesh, [Shard(0)], src_data_rank=None)
        whole = distribute_tensor(WHOLE.clone(), mesh, [Replicate()], src_data_rank=None)
        dcp.save({"model": {"cut": cut, "whole": whole}, "n": 3}, checkpoint_id=tmp_path / "9")

    on_ranks(2, write)
    imported("dcp", tmp_path / "9", tmp_path / "gpt")
    rows = [row.slice for f in Catalog(tmp_path / "gpt")[9].fragments() for row in f.rows if row.slice]
    assert sorted((part.name, part.offset, part.shape) for part in rows) == [
        ("cut", (0, 0), (7, 5)),
        ("cut", (7, 0), (7, 5)),
        ("whole", (0, 0), (14, 5)),
    ]
    run = ray_ckpt.open(tmp_path / "gpt")
    assert run.load("n") == 3 and torch.equal(run.load("model.cut")["model.cut"], WHOLE)

    def read(rank: int) -> list[torch.Tensor]:
        mesh = init_device_mesh("cpu", (3,))
        model = {name: zeros(14, 5, device_mesh=mesh, placements=[Shard(1)]) for name in ("cut", "whole")}
        ray_ckpt.open(tmp_path / "gpt").load(into={"model": model})
        return [tensor.full_tensor() for tensor in model.values() if isinstance(tensor, DTensor)]

    for tensors in on_ranks(3, read):
        assert len(tensors) == 2 and all(torch.equal(tensor, WHOLE) for tensor in tensors)


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning")  # of the other rank, now
def test_metadata_of_each_rank_is_merged(tmp_path: Path) -> None:
    def write(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        cut = distribute_tensor(WHOLE.clone(), mesh, [Shard(0)], src_data_rank=None)
        dcp.save(
            {"model": {"cut": cut, "same": torch.ones(3)}, "rank": 5},
            checkpoint_id=tmp_path / "9",
            use_collectives=False,
        )

    on_ranks(2, write)
    assert not (tmp_path / "9/.metadata").exists()
    imported("dcp", tmp_path / "9", tmp_path / "gpt")
    state = ray_ckpt.open(tmp_path / "gpt").load()
    assert torch.equal(state["model"]["cut"], WHOLE) and torch.equal(state["model"]["same"], torch.ones(3))
    assert state["rank"] == 5
    (tmp_path / "9/__1.metadata").unlink()
    with pytest.raises(CorruptionError, match=r"35 elements of model\.cut are in no slice"):
        imported("dcp", tmp_path / "9", tmp_path / "other")


def test_values_lists_and_layouts_come_as_they_were_saved(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.int16)
    state = {
        "extra": {
            "tables": [torch.full((2,), 5.0), {"deep": torch.zeros(0, 3)}],
            "names": ["a", ("b", 1.5)],
            "dtype": torch.bfloat16,
            "scalar": torch.tensor(3, dtype=torch.int64),
            "turned": base.view(4, 6).t(),
            "part": base.view(4, 6)[1:3, 2:4],
            "half": torch.ones(3, dtype=torch.float8_e4m3fn),
        },
        "step": 12,
    }
    imported("dcp", save(state, tmp_path / "2"), tmp_path / "gpt")
    found = ray_ckpt.open(tmp_path / "gpt").load()
    mine, theirs = state["extra"], found["extra"]
    assert isinstance(mine, dict) and found["step"] == 12 and theirs["names"] == mine["names"]
    assert theirs["dtype"] is torch.bfloat16
    for name in ("scalar", "turned", "part", "half"):
        assert (
            torch.equal(theirs[name].float(), mine[name].float()) and theirs[name].dtype == mine[name].dtype
        )
    assert torch.equal(theirs["tables"][0], mine["tables"][0]) and theirs["tables"][1]["deep"].shape == (0, 3)


def test_names_that_are_no_items_are_one_item(tmp_path: Path) -> None:
    model, _ = trained()
    imported("dcp", save(model.state_dict(), tmp_path / "2"), tmp_path / "gpt")
    state = ray_ckpt.open(tmp_path / "gpt").load()
    assert state.keys() == {"state"} and state["state"].keys() == model.state_dict().keys()


def test_our_own_export_comes_back(tmp_path: Path) -> None:
    model, optimizer = trained()
    source = save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "1")
    imported("dcp", source, tmp_path / "gpt")
    assert export(tmp_path / "gpt", tmp_path / "out-4", "--to", "dcp") == 0
    imported("dcp", tmp_path / "out-4", tmp_path / "again")
    first, second = (ray_ckpt.open(tmp_path / name).load() for name in ("gpt", "again"))
    assert first["model"].keys() == second["model"].keys()
    assert all(torch.equal(each, second["model"][name]) for name, each in first["model"].items())


# -- what is refused -----------------------------------------------------------------------------------


def _cut(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1000])


def _flip(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))


def _edit(folder: Path, change: Callable[[Metadata], None]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _no_chunk(metadata: Metadata) -> None:
    entry: Any = metadata.state_dict_metadata["model.w"]
    entry.chunks[0].sizes = torch.Size((13, 5))


def _no_place(metadata: Metadata) -> None:
    storage: Any = metadata.storage_data
    storage.popitem()


def _transforms(metadata: Metadata) -> None:
    next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]


def _elsewhere(metadata: Metadata) -> None:
    next(iter(metadata.storage_data.values())).relative_path = "../other/__0_0.distcp"


def _sparse(metadata: Metadata) -> None:
    entry: Any = metadata.state_dict_metadata["model.w"]
    entry.properties.dtype = torch.complex128


DAMAGES: dict[str, tuple[Callable[[Path], object], type[CheckpointError], str]] = {
    "a file is missing": (lambda d: (d / "__0_0.distcp").unlink(), CorruptionError, "distcp is missing"),
    "a file is short": (_cut, CorruptionError, "distcp is cut short"),
    "no metadata": (lambda d: (d / ".metadata").unlink(), ConfigError, "it has no .metadata"),
    "cut metadata": (
        lambda d: (d / ".metadata").write_bytes((d / ".metadata").read_bytes()[:-30]),
        CorruptionError,
        r"\.metadata is damaged",
    ),
    "other metadata": (
        lambda d: (d / ".metadata").write_bytes(pickle.dumps({"a": 1})),
        CorruptionError,
        "it has dict in place of",
    ),
    "not covered": (lambda d: _edit(d, _no_chunk), CorruptionError, "5 elements of model.w are in no slice"),
    "in no file": (lambda d: _edit(d, _no_place), CorruptionError, "is in no file"),
    "compressed": (lambda d: _edit(d, _transforms), ConfigError, "is stored with zstd"),
    "another folder": (lambda d: _edit(d, _elsewhere), CorruptionError, "leads out of the folder"),
    "a dtype": (lambda d: _edit(d, _sparse), UnsupportedLeaf, "model.w is a tensor of torch.complex128"),
    "zeros": (_flip, ConfigError, "is no archive of torch.save"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_incomplete_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    damage, kind, message = DAMAGES[name]
    source = save({"model": {"w": WHOLE.clone()}, "n": 3}, tmp_path / "1")
    damage(source)
    with pytest.raises(kind, match=message):
        imported("dcp", source, tmp_path / "gpt")
    assert not (tmp_path / "gpt").exists()


def test_a_damaged_tensor_leaves_no_run(tmp_path: Path) -> None:
    source = save({"model": {"w": WHOLE.clone()}}, tmp_path / "1")
    _flip(source)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        imported("dcp", source, tmp_path / "gpt")
    with pytest.raises(ConfigError, match=r"no run at|no records"):
        Catalog(tmp_path / "gpt")
    assert not [*tmp_path.rglob("*.safetensors")] and not [*tmp_path.rglob(".tmp-*")]


class Evil:
    def __reduce__(self) -> Any:
        return os.system, (f"touch {os.environ['RAY_CKPT_EVIL']}",)


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that exists after hostile code ran."""
    monkeypatch.setenv("RAY_CKPT_EVIL", str(tmp_path / "trace"))
    return tmp_path / "trace"


def test_hostile_metadata_runs_nothing(tmp_path: Path, trace: Path) -> None:
    source = save({"model": {"w": WHOLE.clone()}}, tmp_path / "1")
    _edit(source, lambda metadata: setattr(metadata, "planner_data", Evil()))
    assert not trace.exists()
    with pytest.raises(ConfigError, match=r"has posix\.system, which is not on the list"):
        imported("dcp", source, tmp_path / "gpt")
    assert not trace.exists() and not (tmp_path / "gpt").exists()


@pytest.mark.parametrize(("value", "name"), [(Evil(), r"posix\.system"), (io.BytesIO(b"1"), r"_io\.BytesIO")])
def test_a_hostile_object_runs_nothing(value: object, name: str, tmp_path: Path, trace: Path) -> None:
    source = save({"model": {"w": WHOLE.clone()}, "hostile": [value]}, tmp_path / "1")
    assert not trace.exists()
    with pytest.raises(ConfigError, match=rf"has {name}, which"):
        imported("dcp", source, tmp_path / "gpt")
    assert not trace.exists() and not (tmp_path / "gpt").exists()


def test_megatron_keeps_its_plans_in_the_metadata(tmp_path: Path) -> None:
    planner: Any = dcp.DefaultSavePlanner()
    source = save({"model": {"w": WHOLE.clone()}}, tmp_path / "1", planner=planner)
    _edit(source, lambda metadata: setattr(metadata, "all_local_plans", [planner.plan]))
    assert b"WriteItem" in (source / ".metadata").read_bytes()
    assert len(read_directory(source).tensors) == 1


# -- memory --------------------------------------------------------------------------------------------

MAX_GROWTH_MB = 600

PEAK = """
import resource, sys, torch, ray_ckpt
from ray_ckpt.cli import main
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = peak()
try:
    main(["import", *sys.argv[1:]])
except SystemExit as ended:
    assert not ended.code
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["dcp", "pt"])
def test_memory_does_not_grow_with_the_tensors(form: str, tmp_path: Path) -> None:
    """4 GB, of which two tensors have 1 GB each; `ru_maxrss` counts mapped pages."""
    if shutil.disk_usage(tmp_path).free < 12 << 30:
        pytest.skip("needs 12 GB on the disk")
    large = {f"large{k}": torch.full((256, 1 << 20), float(k)) for k in range(2)}
    small = {f"small{k}": torch.full((16, 1 << 20), float(k)) for k in range(32)}
    source = tmp_path / "step_5"
    save({"model": {**large, **small}}, source) if form == "dcp" else torch.save({**large, **small}, source)
    words = [form, str(source), str(tmp_path / "gpt")]
    ended = subprocess.run(
        [sys.executable, "-c", PEAK, *words], capture_output=True, text=True, timeout=300, check=True
    )
    assert int(ended.stdout.split()[-1]) < MAX_GROWTH_MB, ended.stdout
    found = Catalog(tmp_path / "gpt")[5]
    assert found.info.size_bytes > 4 << 30
    assert torch.equal(found["model.small7"][:1], torch.full((1, 1 << 20), 7.0))
