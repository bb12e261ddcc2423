"""`ray_ckpt.open(path).load(...)`: any part of a durable checkpoint without a cluster, whole or in place."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import struct
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import ray_ckpt
from ray_ckpt.analysis import diff
from ray_ckpt.capture.adapt import adapt
from ray_ckpt.capture.classes import classes_of
from ray_ckpt.capture.items import Item
from ray_ckpt.capture.walk import walk
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.catalog.load import OpenedRun
from ray_ckpt.errors import CheckpointError, ConfigError, CorruptionError, MismatchError, RestoreError
from ray_ckpt.format import names, records, zstd
from ray_ckpt.format.zstd import parse_table as zstd_parse_table
from ray_ckpt.location import Location
from ray_ckpt.restore import extents
from ray_ckpt.restore import reader as restore
from ray_ckpt.storage.remote.tier import open_store
from ray_ckpt.verify.content import verify_files
from tests.servers.stores import BUCKET, bucket_url
from tests.servers.strict_store import Fault, Flip, Match, Status, StrictStore, Truncate
from tests.support.sample_model import Sample
from tests.support.sample_run import (
    RankState,
    RunLog,
    SampleRun,
    assemble,
    compress_shards,
    copy_to,
    make_checkpoint,
    write_run,
)

SHARD = "shard-00001-of-00002.safetensors"
WEIGHT = "model.blocks.0.weight"  # of 8 rows: rank 0 has saved the first half, rank 1 the second


@pytest.fixture
def run(tmp_path: Path) -> SampleRun:
    """10, 30 and 50 are durable; 50 is the newest, 20 and 40 are in the cluster only."""
    return write_run(tmp_path, steps=(10, 20, 30, 40, 50), durable=(10, 30, 50))


@pytest.fixture
def opened(run: SampleRun) -> OpenedRun:
    return ray_ckpt.open(run.folder)


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return the array that the sample run keeps: bfloat16 as its bits."""
    array: npt.NDArray[Any] = (
        tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    ).numpy()
    return array


def assert_saved(run: SampleRun, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
    """Assert that these are tensors of that step, by their full names."""
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(as_array(tensor), run.checkpoints[step].tensors[name], err_msg=name)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def place_of(run: SampleRun, step: int, key: str, rank: int = 1) -> int:
    """Return the offset at which the bytes of a slice begin in the shard of `rank`."""
    file = names.shard_file(rank, 2)
    rows = (row for fragment in run.checkpoints[step].fragments for row in fragment.rows)
    return next(r.byte_offset for r in rows if r.slice and r.slice.key == key and r.file == file)


# What is given back


def test_a_whole_checkpoint_has_the_state_of_its_items(
    run: SampleRun, opened: OpenedRun, caplog: pytest.LogCaptureFixture
) -> None:
    state = opened.load()
    assert not caplog.records
    assert list(state) == ["model", "optimizer", "scheduler", "loader", "rng"]
    assert_saved(run, 50, {f"model.{name}": tensor for name, tensor in state["model"].items()})
    moments = state["optimizer"]["state"]["blocks.0.weight"]
    assert_saved(run, 50, {f"optimizer.state.blocks.0.weight.{n}": tensor for n, tensor in moments.items()})
    (group,) = state["optimizer"]["param_groups"]
    assert group == {"lr": 1e-3, "betas": (0.9, 0.95), "params": ["blocks.0.weight"]}
    assert state["scheduler"] == {"last_epoch": 50}
    assert state["loader"] == {"position": 400}
    assert_saved(run, 50, {"rank0.rng.torch": state["rng"]["torch"]})


def test_one_item_is_read_alone(run: SampleRun, opened: OpenedRun) -> None:
    state = opened.load("model", step=30)
    assert sorted(state) == ["blocks.0.bias", "blocks.0.weight", "head", "unused"]
    assert state["head"].dtype == torch.bfloat16 and state["unused"].shape == (0, 3)
    assert_saved(run, 30, {f"model.{name}": tensor for name, tensor in state.items()})


def test_patterns_give_tensors_by_their_full_names(run: SampleRun, opened: OpenedRun) -> None:
    found = opened.load("*.weight*")
    assert list(found) == [WEIGHT, *(f"optimizer.state.blocks.0.weight.{n}" for n in ("exp_avg", "step"))]
    assert_saved(run, 50, found)
    assert list(opened.load(WEIGHT)) == [WEIGHT]
    several = opened.load(["model.head", "rank?.rng.*", "model.h*"])
    assert list(several) == ["model.head", "rank0.rng.torch", "rank1.rng.torch"]
    assert_saved(run, 50, several)


def test_a_durable_checkpoint_is_read_behind_a_newer_one_of_its_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Session 2 has saved step 40 again, in the cluster only."""
    run = write_run(tmp_path, durable=(10, 40), resume_at=10, resumed_steps=(20,))
    run.log.commit(make_checkpoint(run.log.attempt(2, 40)))
    saved = run.checkpoints[40].attempt
    catalog = Catalog(run.folder)
    found = catalog.find(40)
    assert found is not None and (found.info.id.session, found.where) == (2, None)
    for _ in range(2):
        assert catalog[40].info.id == saved and catalog[40][WEIGHT].load().shape == (8, 6)
    (message,) = caplog.messages
    assert "session 2, is in the cluster only; the durable one of session 1 is read" in message
    assert saved.directory in message
    run_opened = ray_ckpt.open(run.folder)
    assert run_opened.choose(40).info.id == saved and run_opened.load("model", step=40)
    with pytest.raises(ConfigError, match="step 20 in the cluster only"):
        run_opened.load(step=20)


def test_a_name_with_brackets_is_found_as_it_is(tmp_path: Path) -> None:
    log = RunLog(folder=tmp_path / "gpt")
    save(log, [items_of(state={"a[0]": torch.ones(2), "a0": torch.zeros(2)})])
    opened = ray_ckpt.open(log.folder)
    assert list(opened.load("state.a[0]")) == ["state.a[0]"]


def test_what_ranks_have_for_themselves_is_given_by_rank(run: SampleRun, opened: OpenedRun) -> None:
    for rank in range(2):
        assert opened.load("loader", rank=rank) == {"position": 400 + rank}
        assert_saved(run, 50, {f"rank{rank}.rng.torch": opened.load("rng", rank=rank)["torch"]})
    with pytest.raises(ConfigError, match=r"no rank 2\. Give 0 to 1"):
        opened.load("loader", rank=2)


def test_buffers_that_differ_between_ranks_are_those_of_the_rank(tmp_path: Path) -> None:
    log, model = RunLog(folder=tmp_path / "gpt"), nn.BatchNorm1d(2)
    ranks = []
    for rank in range(2):
        other = nn.BatchNorm1d(2)
        other.running_mean = torch.full((2,), float(rank))
        ranks.append(items_of(model=other))
    save(log, ranks)
    opened = ray_ckpt.open(log.folder)
    for rank in range(2):
        assert opened.load("model", rank=rank)["running_mean"].tolist() == [rank] * 2
        assert opened.load("*.running_mean", rank=rank)["model.running_mean"].tolist() == [rank] * 2
    opened.load(into={"model": model})
    assert model.running_mean is not None and model.running_mean.tolist() == [0, 0]


def test_tensors_of_other_forms_on_other_ranks_are_those_of_the_rank(tmp_path: Path) -> None:
    log, seen = RunLog(folder=tmp_path / "gpt"), [torch.ones(2), torch.ones(5), torch.ones(2, 3).double()]
    save(log, [items_of(data={"seen": tensor}) for tensor in seen])
    opened = ray_ckpt.open(log.folder)
    for rank, tensor in enumerate(seen):
        assert torch.equal(opened.load("data", rank=rank)["seen"], tensor)
        assert torch.equal(opened.load("data.*", rank=rank)["data.seen"], tensor)


def test_parts_that_only_other_ranks_have_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log, weight = RunLog(folder=tmp_path / "gpt"), torch.ones(2)
    save(log, [items_of(stages={"first": weight}), items_of(stages={"second": weight})])
    opened = ray_ckpt.open(log.folder)
    with caplog.at_level(logging.WARNING, "ray_ckpt"):
        assert list(opened.load("stages")) == ["first"]
    assert "rank 0 has 1 of the 2 tensors of stages; load('stages.*') gives them all" in caplog.text
    assert list(opened.load("stages.*")) == ["stages.first", "stages.second"]


@pytest.mark.parametrize("what", [None, "model", "model.*"])
def test_compressed_shards_are_read_as_any(run: SampleRun, opened: OpenedRun, what: str | None) -> None:
    plain = opened.load(what)
    compress_shards(run.directory(50))
    assert repr(ray_ckpt.open(run.folder).load(what)) == repr(plain)


# Which checkpoint


def test_a_step_that_cannot_be_read_from_here_is_named(run: SampleRun, opened: OpenedRun) -> None:
    hint = r"step 40 in the cluster only\. The nearest durable steps are 10, 30, 50"
    with pytest.raises(ConfigError, match=hint):
        opened.load(step=40)
    hint = r"no live checkpoint of step 41\. The nearest live steps are 10, 20, 30, 40"
    with pytest.raises(ConfigError, match=hint):
        opened.load(step=41)


def test_a_run_with_nothing_durable_is_reported_as_such(tmp_path: Path) -> None:
    run = write_run(tmp_path, durable=())
    hint = (
        r"Only the nodes have steps 10, 20, 30, 40\. Read one in the cluster by "
        r"ray_ckpt\.open_in_cluster\(RUN\); "
        r'or let the training call ckpt\.wait\("durable"\), or set a smaller remote_every'
    )
    with pytest.raises(ConfigError, match=rf"gpt has no durable checkpoint\. {hint}"):
        ray_ckpt.open(run.folder).load()
    with pytest.raises(ConfigError, match=rf"step 40 in the cluster only\. {hint}"):
        ray_ckpt.open(run.folder).load(step=40)
    branch = write_run(tmp_path, "branch", durable=(40,), resume_at=10, resumed_steps=(20,))
    opened = ray_ckpt.open(branch.folder)
    with pytest.raises(ConfigError, match=r"on its lineage\. The nearest durable step is 40"):
        opened.load()
    assert opened.load("scheduler", step=40) == {"last_epoch": 40}


def test_the_newest_is_that_of_the_log_as_it_was_read(run: SampleRun, opened: OpenedRun) -> None:
    run.log.append(records.Retired(attempt=run.checkpoints[50].attempt.attempt, reason="test"))
    assert opened.load("scheduler") == {"last_epoch": 50}
    opened.catalog.refresh()
    assert opened.load("scheduler") == {"last_epoch": 30}


def test_what_was_deleted_since_is_missing_with_a_hint(run: SampleRun, opened: OpenedRun) -> None:
    shutil.rmtree(run.directory(50))
    with pytest.raises(CorruptionError, match=r"is missing\..* read the log again"):
        opened.load()


# What is refused


def test_unknown_names_are_answered_with_the_nearest(opened: OpenedRun) -> None:
    with pytest.raises(
        ConfigError, match=r"no item 'modle'\. It has loader, model, optimizer, rng, scheduler"
    ):
        opened.load("modle")
    with pytest.raises(ConfigError, match=r"called 'model\.blcks\.\*'\. Did you mean .*0\.weight"):
        opened.load(["model.*", "model.blcks.*"])
    with pytest.raises(ConfigError, match=r"Known: model\.\*, optimizer\.\*, rank0\.\*, rank1\.\*"):
        opened.load("zzzz.*")


@pytest.mark.parametrize("what", [b"model", 1, [b"model"], ["model.head", 1]])
def test_names_of_another_type_are_refused(opened: OpenedRun, what: Any) -> None:
    for load in (opened.load, opened.choose(50).load):
        with pytest.raises(ConfigError, match="is no name"):
            load(what)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": "30"}, "step is '30', which is not an integer"),
        ({"step": 30.0}, "step is 30.0, which is not an integer"),
        ({"step": True}, "step is True"),
        ({"rank": "1"}, "rank is '1', which is not an integer"),
        ({"rank": 1.5}, "rank is 1.5"),
        ({"what": ["model"]}, r"'model' is no tensor of step 50, .* load\('model'\) .* 'model\.\*' means"),
        ({"what": ["model.*", "loader"]}, "'loader' is no tensor"),
    ],
)
def test_arguments_of_other_types_are_refused(
    opened: OpenedRun, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        opened.load(**arguments)
    assert opened.load("scheduler", step=np.int64(30), rank=np.int32(1))  # type: ignore[call-overload]


@pytest.mark.parametrize("options", ["backend", ["backend"], (("backend", "fsspec"),)])
def test_storage_options_are_a_mapping(run: SampleRun, options: Any) -> None:
    with pytest.raises(ConfigError, match=r"storage_options is not a mapping .* Give a dict"):
        ray_ckpt.open(run.folder, options)


@pytest.mark.parametrize("steps", [30, "30", ["30"], [30.0]])
def test_steps_of_a_table_are_several_integers(opened: OpenedRun, steps: Any) -> None:
    for table in ("checkpoints", "shards"):
        with pytest.raises(ConfigError, match=r"steps is .*integer"):
            opened.catalog.to_arrow(table, steps=steps)


def test_names_and_objects_exclude_each_other(opened: OpenedRun) -> None:
    anything: Any = opened.load
    for arguments in ({"what": "model"}, {"rank": 1}):
        with pytest.raises(ConfigError, match="itself names the items"):
            anything(into={"model": nn.Linear(1, 1)}, **arguments)


def test_an_object_without_its_item_cannot_be_filled(opened: OpenedRun) -> None:
    load: Any
    for load in (opened.load, opened.choose(30).load):
        with pytest.raises(ConfigError, match=r'is Linear, and not the objects .* into=\{"model": model\}'):
            load(into=nn.Linear(1, 1))


def test_damage_is_named_and_only_what_it_touches_is_lost(run: SampleRun, opened: OpenedRun) -> None:
    flip(run.directory(50) / SHARD, place_of(run, 50, WEIGHT))
    for what in (None, "model", WEIGHT):
        with pytest.raises(RestoreError, match=r"blocks\.0\.weight\[4:8, 0:6\]: .*wrong digest") as caught:
            opened.load(what)
        assert caught.value.fields["damage"] == (f"{SHARD}: {WEIGHT}[4:8, 0:6]",)
    assert_saved(run, 50, opened.load("model.head"))


def test_a_damaged_frame_of_a_compressed_shard_is_an_error(run: SampleRun, opened: OpenedRun) -> None:
    compress_shards(run.directory(50))
    flip(run.directory(50) / f"{SHARD}.zst", 200)
    with pytest.raises(RestoreError, match="Frame 0 of a compressed file is damaged"):
        opened.load("model")


@pytest.mark.parametrize("harm", ["a frame", "a table", "a long table"])
def test_a_seek_table_is_parsed_once(
    run: SampleRun, opened: OpenedRun, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many slices are read, by whatever reads them; with its time, a table is read again."""
    step = run.directory(50)
    compress_shards(step)
    path = step / f"{SHARD}.zst"
    if harm == "a frame":
        flip(path, 200)
    elif harm == "a table":
        flip(path, path.stat().st_size - 20)
    else:
        path.write_bytes(seek_table(zstd.MAX_FRAMES))
    parsed: list[int] = []

    def parse_table(tail: bytes, stored_size: int) -> zstd.SeekTable:
        parsed.append(stored_size)
        return zstd_parse_table(tail, stored_size)

    monkeypatch.setattr(zstd, "parse_table", parse_table)
    monkeypatch.setattr(extents, "EXTENT_BYTES", dict.fromkeys(extents.EXTENT_BYTES, 1))
    monkeypatch.setattr(restore, "num_threads", lambda tier: 1)
    view = opened.catalog[50]
    comparison = diff.compare(opened.catalog[30], view)
    readers: tuple[Callable[[], object], ...] = (
        lambda: opened.load("model.*"),
        lambda: view.tensors()[WEIGHT].load(),
        lambda: view.tensors()["model.head"].load(),
    )
    shards = 2
    for read in readers:
        for _ in range(3):
            with contextlib.suppress(CheckpointError):
                read()
    assert len(parsed) <= 2 * shards, "one of the run, one of the view"
    assert {found.status for found in comparison} & {"damaged"}
    verify_files(view.files())
    assert len(parsed) <= 4 * shards
    os.utime(path, (1, 1))
    with contextlib.suppress(CheckpointError):
        opened.load(WEIGHT)
    with contextlib.suppress(CheckpointError):
        opened.load(WEIGHT)
    assert len(parsed) <= 5 * shards


def seek_table(num_frames: int) -> bytes:
    """Return the seek table of a compressed file that declares many frames of one byte, and has none."""
    entries = struct.pack("<II", 1, zstd.FRAME_BYTES) * num_frames
    footer = struct.pack("<IBI", num_frames, 0, 0x8F92EAB1)
    header = struct.pack("<II", 0x184D2A5E, len(entries) + len(footer))
    return bytes(num_frames) + header + entries + footer


def test_a_damaged_state_file_is_an_error(run: SampleRun, opened: OpenedRun) -> None:
    flip(run.directory(50) / "state-00001-of-00002.json", 50)
    with pytest.raises(RestoreError, match=r"state-00001-of-00002\.json: state"):
        opened.load("loader", rank=1)
    assert opened.load("loader") == {"position": 400}


def test_another_manifest_than_that_of_the_log_is_refused(run: SampleRun) -> None:
    shutil.rmtree(run.directory(50))
    shutil.copytree(run.directory(30), run.directory(50))
    with pytest.raises(CorruptionError, match="not match the commit in the log"):
        ray_ckpt.open(run.folder).load()


# In place


def items_of(**objects: Any) -> dict[str, Item]:
    modules = {name: obj for name, obj in objects.items() if isinstance(obj, nn.Module)}
    return {name: adapt(name, obj, modules) for name, obj in objects.items()}


def save(log: RunLog, ranks: list[dict[str, Item]], step: int = 10) -> None:
    """Save a new run whose only checkpoint has the state of these ranks, each with its items."""
    log.create()
    log.session(1, after=None, world_size=len(ranks), num_nodes=1)
    states = []
    for rank, items in enumerate(ranks):
        walked = walk(items, rank=rank, world_size=len(ranks))
        slices = [(live.slice, live.tensor.contiguous()) for live in walked.owned(rank)]
        raw = [(part, tensor.view(-1).view(torch.uint8).numpy().tobytes()) for part, tensor in slices]
        states.append(RankState(slices=raw, items=walked.trees, classes=classes_of(items)))
    saved = assemble(log.attempt(1, step), states, metrics={"loss": 0.5})
    log.commit(saved)
    log.drain(saved)


class Training:
    """A model, its optimizer and what else a small run has."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model: Any = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5)
        self.inputs = torch.randn(16, 6, generator=generator)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss: torch.Tensor = self.model(self.inputs).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            losses.append(loss.item())
        return losses


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Training, OpenedRun]:
    """A training after four steps, saved by two ranks."""
    training, log = Training(0), RunLog(folder=tmp_path / "gpt")
    training.train(4)
    save(log, [items_of(**training.objects) for _ in range(2)])
    return training, ray_ckpt.open(log.folder)


def test_live_objects_go_on_where_the_saved_ones_were(trained: tuple[Training, OpenedRun]) -> None:
    training, opened = trained
    other = Training(1)
    other.inputs = training.inputs
    places = [parameter.data_ptr() for parameter in other.model.parameters()]
    random = torch.get_rng_state()
    info = opened.load(into=other.objects)
    assert torch.equal(torch.get_rng_state(), random), "random state is not touched"
    assert [parameter.data_ptr() for parameter in other.model.parameters()] == places
    assert (info.step, info.metrics, set(info.bytes_by_tier())) == (10, {"loss": 0.5}, {"remote"})
    assert other.train(3) == training.train(3)


def test_some_items_can_be_filled_and_the_others_left(trained: tuple[Training, OpenedRun]) -> None:
    training, opened = trained
    other = Training(1)
    opened.load(into={"model": other.model})
    assert torch.equal(other.model[0].weight, training.model[0].weight)
    assert not other.optimizer.state


def test_what_does_not_fit_is_listed_and_nothing_is_changed(trained: tuple[Training, OpenedRun]) -> None:
    _, opened = trained
    other: Any = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    before = other[0].weight.detach().clone()
    with pytest.raises(MismatchError) as caught:
        opened.load(into={"model": other})
    assert len(caught.value.fields["problems"]) == 3
    assert torch.equal(other[0].weight, before)
    with pytest.raises(MismatchError, match="lacks 'ema', which is registered here"):
        opened.load(into={"ema": {"a": 1}})


def test_damage_leaves_the_rest_of_the_objects_as_it_was(trained: tuple[Training, OpenedRun]) -> None:
    _, opened = trained
    (shard,) = Path(opened.catalog[10].where or "").glob("shard-00000-*")
    flip(shard, shard.stat().st_size - 1)
    other = Training(1)
    with pytest.raises(RestoreError, match="1 parts of step 10 cannot be read"):
        opened.load(into=other.objects)
    assert not other.optimizer.state and other.scheduler.last_epoch == 0


@pytest.fixture
def rank_1_of_4() -> Iterator[None]:
    """This process as one rank of a group that is not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("rank_1_of_4")
def test_a_rank_of_a_group_reads_its_part_only(run: SampleRun, opened: OpenedRun) -> None:
    model = Sample(8, sharded=True)
    info = opened.load(into={"model": model}, step=30)
    saved = run.checkpoints[30].tensors
    weight: Any = model.blocks[0].weight
    np.testing.assert_array_equal(weight.to_local().detach().numpy(), saved[WEIGHT][2:4])
    np.testing.assert_array_equal(as_array(model.head.detach()), saved["model.head"])
    whole = opened.load(into={"model": Sample(8, sharded=False)}, step=30)
    read, of_all = (sum(i.bytes_by_tier().values()) for i in (info, whole))
    assert of_all - read == 4 * 6 * 4, "the half of the weight that the other rank has saved"


@pytest.mark.slow  # two processes that load torch
def test_ranks_take_what_rank_0_finds_newest(tmp_path: Path) -> None:
    """Rank 1 has read the log before step 30 was there."""
    run = write_run(tmp_path, steps=(10,), durable=(10,))
    newer = write_run(tmp_path / "newer", steps=(10, 30), durable=(10, 30))
    code = """
import shutil, sys, ray_ckpt
import torch.distributed as dist
from tests.support.sample_model import Sample
rank, folder, newer, store = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
opened = ray_ckpt.open(folder)
dist.barrier()
if rank == 0:
    shutil.copytree(newer, folder, dirs_exist_ok=True)
    opened.catalog.refresh()
print(opened.load(into={"model": Sample(8, sharded=False)}).step)
dist.destroy_process_group()
"""
    folders = [str(run.folder), str(newer.folder), str(tmp_path / "store")]
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, rank, *folders], stdout=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    assert [rank.communicate(timeout=200)[0] for rank in ranks] == ["30\n", "30\n"]


@pytest.mark.usefixtures("rank_1_of_4")
def test_a_rank_takes_what_became_durable_after_it_had_read_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has read the log later, when step 20 was no longer in the cluster only."""
    run = write_run(tmp_path, steps=(10, 20), durable=(10,))
    opened = ray_ckpt.open(run.folder)
    run.log.drain(run.checkpoints[20])

    def from_rank_0(objects: list[Any], src: int) -> None:
        objects[0] = run.checkpoints[20].attempt.attempt

    monkeypatch.setattr(dist, "broadcast_object_list", from_rank_0)
    assert opened.load(into={"model": Sample(8, sharded=False)}).step == 20


# Without a cluster


def test_nothing_of_ray_is_loaded_and_torch_with_the_first_tensor(run: SampleRun) -> None:
    code = f"""
import sys, ray_ckpt
loaded = lambda: [name for name in ("ray", "torch") if name in sys.modules]
print(loaded())
opened = ray_ckpt.open({str(run.folder)!r})
print(loaded())
opened.load()
print(loaded())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "[]", "['torch']"]


# From a bucket


@pytest.fixture
def at_s3(run: SampleRun, strict: StrictStore, credentials: None) -> str:
    return upload(run, strict)


def upload(run: SampleRun, strict: StrictStore) -> str:
    """Return the run in a bucket, under a name of its own."""
    url = bucket_url("s3", strict.endpoint, f"open/{uuid.uuid4().hex}/gpt")
    copy_to(open_store(Location.parse(url), None)[0], run.folder)
    return url


@pytest.mark.parametrize("compressed", [False, True])
def test_a_bucket_gives_what_a_folder_does(
    run: SampleRun, strict: StrictStore, credentials: None, compressed: bool
) -> None:
    plain = ray_ckpt.open(run.folder)
    if compressed:
        compress_shards(run.directory(50))
    opened = ray_ckpt.open(upload(run, strict))
    assert repr(opened.load()) == repr(plain.load())
    assert repr(opened.load("*.weight*")) == repr(plain.load("*.weight*"))
    model = Sample(8, sharded=False)
    info = opened.load(into={"model": model})
    assert_saved(run, 50, {f"model.{name}": tensor for name, tensor in model.state_dict().items()})
    assert {(part.tier, part.where) for part in info.parts} == {("remote", opened.catalog[50].where)}


def test_gcs_gives_it_too(run: SampleRun, strict: StrictStore, credentials: None) -> None:
    url = bucket_url("gs", strict.endpoint, f"open/{uuid.uuid4().hex}/gpt")
    copy_to(open_store(Location.parse(url), None)[0], run.folder)
    assert_saved(run, 50, ray_ckpt.open(url).load("*"))


def test_a_small_tensor_of_a_large_checkpoint_costs_a_few_requests(
    tmp_path: Path, strict: StrictStore, credentials: None
) -> None:
    run = write_run(tmp_path, steps=(10, 20), durable=(10, 20), world_size=4, num_nodes=2, rows=100_000)
    url = upload(run, strict)
    before = settled(strict)
    opened = ray_ckpt.open(url)
    after_open = settled(strict)
    assert_saved(run, 20, opened.load("model.blocks.0.bias"))
    after = settled(strict)
    assert requests(before, after_open) <= 18, "the log of 7 records"
    assert requests(after_open, after) <= 5, "a listing, checkpoint.json, two fragments, a range"
    assert after["bytes_out"] - after_open["bytes_out"] < 50_000, "of 10 MB"
    assert_saved(run, 20, opened.load("model.blocks.0.weight"))
    assert requests(after, settled(strict)) == 4, "the manifest is known, and each rank's part is a range"


def settled(strict: StrictStore) -> dict[str, Any]:
    """Return the store's counts with all requests, each of which is counted after its answer."""
    while (stats := strict.stats())["in_flight"]:
        pass
    return stats


def requests(before: Mapping[str, Any], after: Mapping[str, Any]) -> int:
    """Answered in between."""
    totals = [sum(sum(by.values()) for by in stats["requests"].values()) for stats in (before, after)]
    return totals[1] - totals[0]


def test_requests_are_repeated_if_their_answers_fail_or_end_too_early(
    run: SampleRun, strict: StrictStore, at_s3: str
) -> None:
    opened = ray_ckpt.open(at_s3)
    match = Match(operation="GetObject", key=SHARD)
    strict.add_fault(Fault(action=Truncate(100), match=match, times=1))
    strict.add_fault(Fault(action=Status(503), match=match, times=2))
    assert_saved(run, 50, opened.load(WEIGHT))


def test_bytes_that_change_on_the_way_are_an_error(run: SampleRun, strict: StrictStore, at_s3: str) -> None:
    opened = ray_ckpt.open(at_s3)
    strict.add_fault(Fault(action=Flip(5), match=Match(operation="GetObject", key=SHARD)))
    with pytest.raises(RestoreError, match="wrong digest") as caught:
        opened.load(WEIGHT)
    assert len(caught.value.fields["damage"]) == 1 and BUCKET in str(caught.value)
