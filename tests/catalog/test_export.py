"""`ray-ckpt export`: what it writes is read back by stock readers, bit for bit."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ray_ckpt
from ray_ckpt.analysis.diff import compare
from ray_ckpt.catalog import export as export_module
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.catalog.export import INDEX_FILE, export_safetensors, export_torch
from ray_ckpt.catalog.lazy_tensor import BLOCK_BYTES
from ray_ckpt.cli import main
from tests.analysis.test_diff import save
from tests.catalog.test_lazy_tensor import upload, write_tensor
from tests.servers.strict_store import Fault, Flip, Match, StrictStore
from tests.support.sample_run import RankState, RunLog, SampleRun, assemble, make_checkpoint, write_run

READ_AHEAD_BYTES = 96 << 20  # of a disk, and some slack


@pytest.fixture
def run(tmp_path: Path) -> SampleRun:
    return write_run(tmp_path, durable=(10, 30))


def export(*args: object) -> int:
    """Run a command; return its exit code."""
    try:
        main(["export", *map(str, args)])
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code
    return 0


def assert_saved(run: SampleRun, step: int, found: dict[str, Any], prefix: str = "") -> None:
    for name, tensor in found.items():
        bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
        np.testing.assert_array_equal(bits.numpy(), run.checkpoints[step].tensors[prefix + name], name)


@pytest.mark.parametrize("window_bytes", [1, 30, 100, 1 << 20])
def test_any_window_of_a_file_gives_the_same_bytes(
    run: SampleRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window_bytes: int
) -> None:
    monkeypatch.setattr(export_module, "WINDOW_BYTES", window_bytes)
    (file,) = export_safetensors(ray_ckpt.Catalog(run.folder)[30], tmp_path / "out")
    assert_saved(run, 30, load_file(file))


def test_safetensors_of_all_items_have_full_names(run: SampleRun, tmp_path: Path) -> None:
    assert export(run.folder, tmp_path / "out") == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert set(found) == set(run.checkpoints[30].tensors)
    assert_saved(run, 30, found)


def test_files_are_split_and_indexed(run: SampleRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert export(run.folder, out, "--step", 10, "--item", "model", "--max-file", "100B") == 0
    index = json.loads((out / INDEX_FILE).read_text())
    found: dict[str, Any] = {}
    for file in sorted(set(index["weight_map"].values())):
        part = load_file(out / file)
        assert all(index["weight_map"][name] == file for name in part)
        found |= part
    assert {f"model.{name}" for name in found} == {
        name for name in run.checkpoints[10].tensors if name.startswith("model.")
    }
    assert_saved(run, 10, found, "model.")
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())


@pytest.mark.parametrize("form", ["safetensors", "torch"])
@pytest.mark.parametrize("step", [(), ("--step", 10)])
def test_of_a_step_that_was_saved_twice_the_durable_one_is_taken(
    tmp_path: Path, form: str, step: tuple[object, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """The second one is in the cluster only."""
    run = write_run(tmp_path, steps=(10,), durable=(10,))
    run.log.commit(make_checkpoint(run.log.attempt(1, 10)))
    assert export(run.folder, tmp_path / "out", "--to", form, *step) == 0
    assert ("the durable one of session 1 is read" in caplog.text) == bool(step)


def test_patterns_choose(run: SampleRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(run.folder, tmp_path / "out", "--only", "model.blocks.*", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["step"] == 30
    found = load_file(document["files"][0]["file"])
    assert set(found) == {"model.blocks.0.weight", "model.blocks.0.bias"}


def test_a_name_that_looks_like_a_pattern_means_itself(tmp_path: Path) -> None:
    """The name is taken literally everywhere; as a pattern it would match the other tensor."""
    log = RunLog(folder=tmp_path / "gpt")
    log.create()
    log.session(1, after=None, world_size=1, num_nodes=1)
    name, other = "model.layers[0].w", "model.layers0.w"
    save(log, 1, {name: torch.zeros(2), other: torch.ones(2)})
    view = ray_ckpt.Catalog(log.folder)[1]
    assert list(ray_ckpt.open(log.folder).load([name])) == [name]
    assert compare(view, view, only=[name]).names == (name,)
    export_safetensors(view, tmp_path / "out", only=[name])
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {name}
    export_safetensors(view, tmp_path / "both", only=[name, "model.layers[0-9].w"])
    assert set(load_file(tmp_path / "both" / "model.safetensors")) == {name, other}


def test_a_tensor_with_the_name_of_the_metadata_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone it would write a file that no reader opens; by its full name it is a tensor like others."""
    log = RunLog(folder=tmp_path / "gpt")
    log.create()
    log.session(1, after=None, world_size=1, num_nodes=1)
    save(log, 1, {"model.__metadata__": torch.ones(2), "model.w": torch.zeros(2)})
    assert export(log.folder, tmp_path / "out", "--item", "model") == 2
    assert "__metadata__" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert export(log.folder, tmp_path / "out") == 0
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"model.__metadata__", "model.w"}


def test_torch_gives_plain_values_too(run: SampleRun, tmp_path: Path) -> None:
    assert export(run.folder, tmp_path / "all.pt", "--to", "torch") == 0
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert found["scheduler"] == {"last_epoch": 30}
    assert_saved(run, 30, found["model"], "model.")
    assert set(found) == set(ray_ckpt.open(run.folder).load(step=30))
    assert export(run.folder, tmp_path / "model.pt", "--to", "torch", "--item", "model") == 0
    assert_saved(run, 30, torch.load(tmp_path / "model.pt", weights_only=True), "model.")


def test_torch_names_the_file_that_it_has_written(
    run: SampleRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    catalog = Catalog(run.folder)
    assert export_torch(catalog, catalog[30], Path("~/all.pt")) == (tmp_path / "all.pt",)
    assert (tmp_path / "all.pt").is_file()


def test_torch_gives_what_numpy_had_as_tensors(tmp_path: Path) -> None:
    """Each run of a Checkpointer has numpy's random state."""
    log = RunLog(folder=tmp_path / "gpt")
    log.create()
    log.session(1, after=None, world_size=1, num_nodes=1)
    key = np.arange(624, dtype=np.uint32)
    state = {"numpy": {"key": key, "pos": np.int64(3)}, "python": (3, (1, 2), None), "names": ["a", {1: 2.5}]}
    saved = assemble(log.attempt(1, 10), [RankState(slices=[], items={"rng": state})])
    log.commit(saved)
    log.drain(saved)
    assert export(log.folder, tmp_path / "all.pt", "--to", "torch") == 0
    found = torch.load(tmp_path / "all.pt", weights_only=True)["rng"]
    assert torch.equal(found["numpy"].pop("key"), torch.from_numpy(key))
    assert found == {**state, "numpy": {"pos": 3}}


def test_nothing_is_overwritten_without_force(
    run: SampleRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, file = tmp_path / "out", tmp_path / "out.pt"
    assert export(run.folder, out, "--max-file", "100B") == export(run.folder, file, "--to", "torch") == 0
    others = ["mine.txt", "model-a-of-b.safetensors", "model-00001-of-00002.safetensors.old"]
    for name in others:
        (out / name).touch()
    for args in ((out,), (file, "--to", "torch"), (file,), (out, "--to", "torch", "--force")):
        assert export(run.folder, *args) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert export(run.folder, out, "--force") == 0
    assert sorted(path.name for path in out.iterdir()) == sorted([*others, "model.safetensors"])
    assert export(run.folder, file, "--to", "torch", "--force") == 0


def test_force_deletes_only_weights_that_an_index_lists(
    run: SampleRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder of torch.distributed.checkpoint, an adapter, or shards of unknown origin may be of anyone."""
    out = tmp_path / "out"
    assert export(run.folder, out, "--max-file", "100B") == 0
    listed = sorted(path.name for path in out.iterdir())
    foreign = ["adapter_model.safetensors", "model-00001-of-00003.safetensors"]
    others = [".metadata", "__0_0.distcp", "__1_0.distcp"]
    for name in (*foreign, *others):
        (out / name).write_text("of somebody else")
    capsys.readouterr()
    assert export(run.folder, out, "--force") == 2
    assert f"{out} has other weights: {', '.join(foreign)}." in capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == sorted([*listed, *foreign, *others])
    for name in foreign:
        (out / name).unlink()
    assert export(run.folder, out, "--force") == 0
    assert sorted(path.name for path in out.iterdir()) == sorted([*others, "model.safetensors"])
    assert all((out / name).read_text() == "of somebody else" for name in others)


@pytest.mark.parametrize("index", ["", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../mine.txt"}}'])
def test_force_deletes_nothing_by_an_index_of_another_form(
    run: SampleRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], index: str
) -> None:
    out, shard = tmp_path / "out", "model-00001-of-00009.safetensors"
    out.mkdir()
    (tmp_path / "mine.txt").touch()
    (out / INDEX_FILE).write_text(index)
    (out / shard).touch()
    assert export(run.folder, out, "--force") == 2
    assert shard in capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == [shard, INDEX_FILE]
    assert (tmp_path / "mine.txt").exists()


@pytest.mark.slow  # 5 s, a process that imports torch
def test_a_disk_that_takes_no_more_is_no_damage(run: SampleRun, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ray_ckpt.cli", "export", str(run.folder), "out.pt", "--to", "torch"]
    limit = (resource.RLIMIT_FSIZE, (1000, 1000))
    done = subprocess.run(
        command, cwd=tmp_path, text=True, capture_output=True, preexec_fn=lambda: resource.setrlimit(*limit)
    )
    assert (done.returncode, done.stdout) == (2, "") and "File too large" in done.stderr
    assert done.stderr.count("\n") == 1 and not list(tmp_path.glob("*.pt")) + list(tmp_path.glob(".*"))


def test_a_folder_that_is_there_is_filled_and_stays(
    run: SampleRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder may be a mount, which cannot be replaced; its files must be written into it."""
    real, linked, here = tmp_path / "real", tmp_path / "linked", tmp_path / "here"
    for folder in (real, here):
        folder.mkdir()
    linked.symlink_to(real)
    before = {path: path.stat().st_ino for path in tmp_path.iterdir()}
    beside: set[Path] = set()

    def look(nbytes: int) -> None:
        beside.update(tmp_path.iterdir())

    files = export_safetensors(ray_ckpt.Catalog(run.folder)[30], linked, max_file_bytes=100, progress=look)
    assert beside == set(before) and linked.is_symlink()
    assert sorted(real.iterdir()) == sorted(real / file.name for file in files)
    monkeypatch.chdir(here)
    assert export(run.folder, ".") == 0
    assert capsys.readouterr().out == "model.safetensors\n"
    assert_saved(run, 30, load_file("model.safetensors"))
    assert {path: path.stat().st_ino for path in tmp_path.iterdir()} == before


def test_a_link_to_nothing_is_no_folder(
    run: SampleRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    assert export(run.folder, tmp_path / "out") == 2
    assert "is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_a_bucket_gives_what_a_folder_does(
    run: SampleRun, tmp_path: Path, strict: StrictStore, credentials: None, form: str
) -> None:
    url, to = upload(run.folder, strict), ("--to", form)
    assert export(run.folder, tmp_path / "a", *to) == export(url, tmp_path / "b", *to) == 0
    if form == "safetensors":
        (file,) = (tmp_path / "b").iterdir()
        assert file.read_bytes() == (tmp_path / "a" / file.name).read_bytes()
        assert_saved(run, 30, load_file(file))
    else:
        found = torch.load(tmp_path / "b", weights_only=True)
        assert repr(found) == repr(torch.load(tmp_path / "a", weights_only=True))
        assert_saved(run, 30, found["model"], "model.")


def test_damage_in_a_bucket_leaves_nothing(
    run: SampleRun, tmp_path: Path, strict: StrictStore, credentials: None, capsys: pytest.CaptureFixture[str]
) -> None:
    url, before = upload(run.folder, strict), sorted(tmp_path.iterdir())
    strict.add_fault(Fault(action=Flip(5), match=Match(operation="GetObject", key="shard-00001")))
    assert export(url, tmp_path / "out") == 1
    assert sorted(tmp_path.iterdir()) == before and "shard-00001" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_damage_exits_with_1_and_leaves_nothing(
    run: SampleRun, tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in run.directory(30).glob("shard-00001*"):
        data = bytearray(path.read_bytes())
        data[4100] ^= 1
        path.write_bytes(data)
    (tmp_path / "there").mkdir()
    before = sorted(tmp_path.iterdir())
    assert export(run.folder, tmp_path / "out", "--to", form) == 1
    assert sorted(tmp_path.iterdir()) == before
    if form == "safetensors":
        assert export(run.folder, tmp_path / "there") == 1
        assert not any((tmp_path / "there").iterdir())
    assert "shard-00001" in capsys.readouterr().err


def test_memory_does_not_grow_with_a_tensor(tmp_path: Path) -> None:
    """The tensor has 256 MiB. Allocations of the process are counted, not mapped pages of the file."""
    catalog = write_tensor(tmp_path, torch.ones(1 << 16, 1 << 10), [np.s_[:, :]])
    before = rss_anon_bytes()
    seen: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            seen.append(rss_anon_bytes() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        (file,) = export_safetensors(catalog[1], tmp_path / "out")
    finally:
        done.set()
        thread.join()
    assert file.stat().st_size > 1 << 28 and max(seen) < BLOCK_BYTES + READ_AHEAD_BYTES
    assert bool((load_file(file)["model.w"] == 1).all())


def rss_anon_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) << 10


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--item", "modle"), "no item 'modle'"),
        (("--only", "model.blocks.0.weigth"), "Did you mean model.blocks.0.weight"),
        (("--max-file", "0GB"), "--max-file is '0GB'"),
        (("--step", "20"), "in the cluster only"),
        (("--dtype", "bfloat16"), "--dtype goes with --to hf"),
        (("--to", "dcp", "--like", "gpt-hf"), "--like goes with --to hf"),
        (("--to", "torch", "--max-file", "1GB"), "--max-file goes with --to safetensors or hf"),
    ],
)
def test_wrong_usage_exits_with_2(
    run: SampleRun, tmp_path: Path, args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(run.folder, tmp_path / "out", *args) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()
