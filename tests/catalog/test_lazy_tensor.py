"""`catalog[step][name]`: one tensor, whole or in part, reading no more than that takes."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ray_ckpt.capture.walk import DTYPE_NAMES
from ray_ckpt.catalog import checkpoint, lazy_tensor
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.catalog.lazy_tensor import BLOCK_BYTES, GAP_BYTES, LazyTensor
from ray_ckpt.catalog.load import open as open_run
from ray_ckpt.catalog.tables import MAX_HTML_ROWS
from ray_ckpt.errors import ConfigError, CorruptionError, StoragePathError
from ray_ckpt.format.manifest import take_rows
from ray_ckpt.location import Location
from ray_ckpt.restore import manifest
from ray_ckpt.storage.checkpoint_files import CheckpointFile
from ray_ckpt.storage.remote.file_store import Blocks, PosixFiles
from ray_ckpt.storage.remote.tier import open_store
from ray_ckpt.types import ManifestRow, Slice
from tests.catalog.test_load import requests, settled
from tests.servers.stores import bucket_url
from tests.servers.strict_store import Fault, Flip, Match, StrictStore
from tests.support.sample_run import (
    RankState,
    RunLog,
    SampleRun,
    assemble,
    compress_shards,
    copy_to,
    write_run,
)

WEIGHT = "model.blocks.0.weight"  # (8, 6): rank 0 has saved the first half, rank 1 the second


@pytest.fixture
def run(tmp_path: Path) -> SampleRun:
    return write_run(tmp_path)


def saved_as(tensor: torch.Tensor) -> Any:
    """Return the array that the sample run keeps: bfloat16 as its bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def write_tensor(folder: Path, tensor: torch.Tensor, cuts: Sequence[tuple[slice, ...]]) -> Catalog:
    """Return a run with `model.w`, of which each rank has saved one box."""
    log = RunLog(folder=folder / "cut")
    log.create()
    log.session(1, after=None, world_size=len(cuts), num_nodes=1)
    ranks = []
    for cut in cuts:
        bounds = [part.indices(size) for part, size in zip(cut, tensor.shape, strict=True)]
        part = Slice(
            item="model",
            name="w",
            dtype=DTYPE_NAMES[tensor.dtype],
            global_shape=tuple(tensor.shape),
            offset=tuple(start for start, _, _ in bounds),
            shape=tuple(stop - start for start, stop, _ in bounds),
        )
        data = tensor[cut].reshape(-1).view(torch.uint8).numpy().tobytes()
        ranks.append(RankState(slices=[(part, data)], items={}))
    saved = assemble(log.attempt(1, 1), ranks)
    log.commit(saved)
    log.drain(saved)
    return Catalog(log.folder)


class Reads:
    """How many bytes are read of shards."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[int] = []  # from several threads
        read = PosixFiles.read

        def counted(store: PosixFiles, name: str, ranges: Sequence[tuple[int, int]]) -> Blocks:
            if "shard-" in name:
                self.found.extend(nbytes for _, nbytes in ranges)
            return read(store, name, ranges)

        monkeypatch.setattr(PosixFiles, "read", counted)


@pytest.mark.parametrize("compressed", [False, True])
def test_every_tensor_is_what_was_saved(run: SampleRun, compressed: bool) -> None:
    if compressed:
        compress_shards(run.directory(30))
    view = Catalog(run.folder)[30]
    assert set(view) == set(run.checkpoints[30].tensors)
    for name, array in run.checkpoints[30].tensors.items():
        lazy = view[name]
        assert (lazy.shape, lazy.ndim, lazy.nbytes) == (array.shape, array.ndim, array.nbytes)
        tensor = lazy.load()
        assert tensor.dtype == lazy.dtype
        np.testing.assert_array_equal(saved_as(tensor), array, err_msg=name)


def test_basic_indices_are_those_of_torch(tmp_path: Path) -> None:
    """Any box, step and layout, against the tensor itself; a seed replays a failure."""
    chance = random.Random(7)
    whole = torch.arange(9 * 7 * 5, dtype=torch.float32).reshape(9, 7, 5)
    cuts = [np.s_[0:4, 0:7, 0:5], np.s_[4:9, 0:3, 0:5], np.s_[4:9, 3:7, 0:2], np.s_[4:9, 3:7, 2:5]]
    lazy = write_tensor(tmp_path, whole, cuts)[1]["model.w"]

    def part(size: int) -> Any:
        if chance.random() < 0.3:
            return chance.randrange(-size, size)
        first, end = (chance.choice([None, chance.randrange(-size - 2, size + 3)]) for _ in range(2))
        return slice(first, end, chance.choice([None, 1, 2, 3]))

    for _ in range(300):
        index: Any = tuple(part(size) for size in whole.shape[: chance.randrange(4)])
        if chance.random() < 0.3:
            index = (..., *(part(size) for size in whole.shape[chance.randrange(4) :]))
        torch.testing.assert_close(lazy[index], whole[index], rtol=0, atol=0, msg=str(index))


def test_wrong_indices_are_refused(run: SampleRun) -> None:
    lazy = Catalog(run.folder)[30][WEIGHT]
    for index in (8, -9, (0, 0, 0), (..., ...)):
        with pytest.raises(IndexError):
            lazy[index]
    with pytest.raises(ValueError, match="greater than zero"):
        lazy[::-1]
    for other in (None, True, "a", [0, 1], torch.tensor([True, False])):
        with pytest.raises(TypeError, match=r"load\(\) first"):
            lazy[other]


@pytest.mark.parametrize("make", [torch.tensor, np.array], ids=["torch", "numpy"])
def test_an_array_of_one_index_is_no_int(tmp_path: Path, make: Any) -> None:
    """`operator.index` takes such a tensor; torch keeps its dimension, and takes a mask as one."""
    whole = torch.arange(6.0).reshape(1, 3, 2)
    lazy = write_tensor(tmp_path, whole, [np.s_[:, :, :]])[1]["model.w"]
    for array in ([0], [[0]], [True], [False], True, False):
        for index in (make(array), (..., make(array))):
            with pytest.raises(TypeError, match=r"load\(\) first"):
                lazy[index]
    assert torch.equal(lazy[make(0), make(-1)], whole[0, -1])
    assert torch.equal(lazy[0, np.int64(1)], whole[0, 1])


def test_rows_are_iterated_over_and_nothing_is_looked_for(tmp_path: Path) -> None:
    whole = torch.arange(6.0).reshape(3, 2)
    lazy = write_tensor(tmp_path / "rows", whole, [np.s_[:, :]])[1]["model.w"]
    assert torch.equal(torch.stack(list(lazy)), whole)
    assert list(lazy[0:0]) == []
    scalar = write_tensor(tmp_path / "scalar", torch.tensor(7.0), [()])[1]["model.w"]
    with pytest.raises(TypeError, match="without dimensions"):
        iter(scalar)
    for tensor in (lazy, scalar):
        with pytest.raises(TypeError, match=r"load\(\) first"):
            7.0 in tensor  # noqa: B015


def test_only_what_is_wanted_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    whole = torch.zeros(64, 128 << 10)  # rows of 512 KiB
    lazy = write_tensor(tmp_path, whole, [np.s_[0:32, :], np.s_[32:64, :]])[1]["model.w"]
    for index, nbytes in (
        (np.s_[3:5], 2 << 19),
        (np.s_[31:33], 2 << 19),
        (np.s_[::32], 2 << 19),
        (np.s_[:, 0], 64 * 4),
        (np.s_[7, 10:20], 40),
        (np.s_[0:0], 0),
    ):
        reads.found.clear()
        lazy[index]
        assert sum(reads.found) == nbytes, index
    assert whole.shape[1] * 4 > GAP_BYTES  # else whole rows are cheaper


def test_whole_slices_are_verified_and_parts_cannot_be(run: SampleRun) -> None:
    view = Catalog(run.folder)[30]
    row = next(r for f in view.fragments() for r in f.rows if r.slice and r.slice.key == WEIGHT)
    path = run.directory(30) / row.file
    data = bytearray(path.read_bytes())
    data[row.byte_offset] ^= 1
    path.write_bytes(data)
    for read in (view[WEIGHT].load, lambda: view[WEIGHT][0:4]):
        with pytest.raises(CorruptionError, match=r"model\.blocks\.0\.weight\[0:4, 0:6\] differs"):
            read()
    view[WEIGHT][4:8]  # another slice
    assert view[WEIGHT][0:2].shape == (2, 6)


def test_missing_and_cut_files_are_named(run: SampleRun) -> None:
    view = Catalog(run.folder)[30]
    row = next(r for f in view.fragments() for r in f.rows if r.slice and r.slice.key == WEIGHT)
    path = run.directory(30) / row.file
    lazy = view[WEIGHT]
    lazy[0]
    path.write_bytes(path.read_bytes()[: row.byte_offset + 8])
    with pytest.raises(CorruptionError, match=row.file):
        lazy.load()
    path.unlink()
    with pytest.raises(CorruptionError, match=f"{row.file} is missing"):
        Catalog(run.folder)[30][WEIGHT].load()


def test_what_is_deleted_meanwhile_is_reported_as_deleted(run: SampleRun) -> None:
    opened, unopened = (Catalog(run.folder)[30] for _ in range(2))
    lazy = opened[WEIGHT]
    lazy[0]
    unread = unopened[WEIGHT]
    shutil.rmtree(run.directory(30))
    for read in (lazy.load, unread.load):
        with pytest.raises((StoragePathError, CorruptionError), match="deleted since the log was read"):
            read()


def test_a_thread_that_meets_damage_does_not_disturb_the_others(run: SampleRun) -> None:
    tensors = Catalog(run.folder)[30].tensors()
    file = "shard-00000-of-00002.safetensors"
    known = tensors.open(file)

    class Forgotten(dict[str, CheckpointFile]):
        """Files that another thread forgets once this thread has found its file among them."""

        def __contains__(self, name: object) -> bool:
            tensors._opened = {}
            return super().__contains__(name)

    tensors._opened = Forgotten({file: known})
    assert tensors.open(file) is known


def test_wrong_names_list_the_nearest(run: SampleRun) -> None:
    view = Catalog(run.folder)[30]
    with pytest.raises(ConfigError, match=r"Did you mean model\.blocks\.0\.weight"):
        view["model.blocks.0.weigth"]
    assert WEIGHT in view and "nope" not in view
    tensors, default = view.tensors(), object()
    assert tensors.get("nope") is None and tensors.get("nope", default) is default
    assert tensors.get(WEIGHT).shape == (8, 6)
    with pytest.raises(ConfigError, match="in the cluster only"):
        Catalog(run.folder)[20][WEIGHT]


def test_torch_and_numpy_take_it(run: SampleRun) -> None:
    lazy: LazyTensor = Catalog(run.folder)[30][WEIGHT]
    assert torch.equal(torch.as_tensor(lazy), lazy.load())
    np.testing.assert_array_equal(np.asarray(lazy), lazy.load().numpy())
    assert len(lazy) == 8 and WEIGHT in repr(lazy) and "F32" in repr(lazy)
    half = Catalog(run.folder)[30]["model.head"]
    assert torch.as_tensor(half).dtype == half.dtype == torch.bfloat16


def test_what_numpy_has_no_dtype_for_comes_through_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        whole = torch.arange(-3.0, 3.0).reshape(2, 3).to(dtype)
        lazy = write_tensor(tmp_path / str(dtype), whole, [np.s_[:, :]])[1]["model.w"]
        reads.found.clear()
        with pytest.raises(ConfigError, match=r"numpy does not have\. .*lazy\.load\(\)\.float\(\)"):
            np.asarray(lazy)
        assert reads.found == []
        for wanted in (np.float32, np.float64, "int8"):
            found = np.asarray(lazy, dtype=wanted)
            assert found.dtype == wanted
            np.testing.assert_array_equal(found, whole.float().numpy())


def test_a_notebook_shows_it_without_reading(run: SampleRun, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    view = Catalog(run.folder)[30]
    shown = view[WEIGHT]._repr_html_()
    assert "(8, 6)" in shown and "F32" in shown and "shard-00000-of-00002.safetensors, shard-00001" in shown
    shown = view.tensors()._repr_html_()
    assert shown.count("<tr>") == 1 + len(view.tensors()) and "8 tensors of" in shown
    assert shown.index(WEIGHT) < shown.index("model.unused"), "the largest first"
    assert reads.found == []


def test_of_many_tensors_the_largest_are_shown(tmp_path: Path) -> None:
    log = RunLog(folder=tmp_path / "many")
    log.create()
    log.session(1, after=None, world_size=1, num_nodes=1)
    slices = []
    for k in range(MAX_HTML_ROWS + 5):
        part = Slice(item="m", name=f"<b>{k}", dtype="U8", global_shape=(k,), offset=(0,), shape=(k,))
        slices.append((part, bytes(k)))
    saved = assemble(log.attempt(1, 1), [RankState(slices=slices, items={})])
    log.commit(saved)
    log.drain(saved)
    shown = Catalog(log.folder)[1].tensors()._repr_html_()
    assert shown.count("<tr>") == 1 + MAX_HTML_ROWS and "and 5 smaller ones" in shown
    assert "<b>" not in shown and "&lt;b&gt;24" in shown and "&lt;b&gt;4<" not in shown


def test_the_manifest_is_read_once(run: SampleRun, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = Catalog(run.folder)
    catalog[30][WEIGHT]
    monkeypatch.setattr(checkpoint, "decode_places", None)
    catalog[30]["model.head"]


def test_only_the_rows_of_wanted_tensors_are_made(run: SampleRun, monkeypatch: pytest.MonkeyPatch) -> None:
    every = [row for fragment in Catalog(run.folder)[30].fragments() for row in fragment.rows]
    made: list[ManifestRow] = []

    def take(*args: Any) -> tuple[ManifestRow, ...]:
        rows = take_rows(*args)
        made.extend(rows)
        return rows

    def fail(data: bytes) -> None:
        raise AssertionError("all rows are made")

    monkeypatch.setattr(checkpoint, "decode_fragment", fail)
    monkeypatch.setattr(manifest, "take_rows", take)
    of_weight = [row for row in every if row.slice is not None and row.slice.key == WEIGHT]
    view = Catalog(run.folder)[30]
    assert view[WEIGHT].num_slices == len(of_weight)
    assert made == of_weight
    made.clear()
    open_run(run.folder).load([WEIGHT], step=30)
    assert set(made) >= set(of_weight)
    assert len({row.file for row in set(made) - set(of_weight)}) <= 1, "others are those of the own file only"
    monkeypatch.setattr(lazy_tensor, "MAX_SEARCHES", 2)
    for name in view:
        rows = [row for row in every if row.slice is not None and row.slice.key == name]
        assert view[name].num_slices == len(rows)


def test_another_thread_may_want_another_tensor_at_the_same_time(
    run: SampleRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = Catalog(run.folder)[30].tensors()
    make = tensors._make_rows

    def overtaken(name: str) -> Any:
        found = make(name)
        tensors._rows = {}  # another thread had read it before, and sets it now
        return found

    monkeypatch.setattr(tensors, "_make_rows", overtaken)
    assert tensors[WEIGHT].num_slices > 0


@pytest.mark.slow  # a process that loads torch, and 128 MiB
def test_memory_does_not_grow_with_what_is_not_wanted(tmp_path: Path) -> None:
    """Some columns of 128 MiB are read, and all of it is written to a file, in blocks of BLOCK_BYTES."""
    write_tensor(tmp_path, torch.ones(1 << 15, 1 << 10), [np.s_[:, :]])
    code = """
import resource, sys, numpy as np, torch
from ray_ckpt import Catalog
lazy = Catalog(sys.argv[1])[1]["model.w"]
lazy[0, 0]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert lazy[:, 5].sum() == 1 << 15
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "cut")]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert grown < 4 * BLOCK_BYTES


# From a bucket


@pytest.mark.parametrize("compressed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_bucket_gives_what_a_folder_does(
    run: SampleRun, strict: StrictStore, credentials: None, compressed: bool
) -> None:
    if compressed:
        compress_shards(run.directory(30))
    url = upload(run.folder, strict)
    for name, array in run.checkpoints[30].tensors.items():
        lazy = Catalog(url)[30][name]
        np.testing.assert_array_equal(saved_as(lazy.load()), array, err_msg=name)
        if array.ndim == 2 and len(array):
            np.testing.assert_array_equal(saved_as(lazy[1::2, -2:]), array[1::2, -2:], err_msg=name)


def test_a_part_in_a_bucket_costs_its_bytes_and_one_request(
    tmp_path: Path, strict: StrictStore, credentials: None
) -> None:
    whole = torch.arange(64 * (32 << 10), dtype=torch.float32).reshape(64, -1)  # rows of 128 KiB
    write_tensor(tmp_path, whole, [np.s_[0:32, :], np.s_[32:64, :]])
    lazy = Catalog(upload(tmp_path / "cut", strict))[1]["model.w"]
    lazy[0, :1]  # now the folder has been listed
    before = settled(strict)
    assert torch.equal(lazy[7:9], whole[7:9])
    after = settled(strict)
    assert requests(before, after) == 1
    assert 2 << 17 <= after["bytes_out"] - before["bytes_out"] < 3 << 17


@pytest.mark.parametrize("harm", ["missing", "short", "table", "form"])
def test_a_repaired_checkpoint_is_read_without_opening_the_run_again(run: SampleRun, harm: str) -> None:
    """A notebook keeps the catalog, and the tensors of its last checkpoint."""
    if harm == "table":
        compress_shards(run.directory(30))
    shard = max(run.directory(30).glob("shard-*"))
    saved, catalog = shard.read_bytes(), Catalog(run.folder)
    lazy = catalog[30][WEIGHT]
    if harm == "missing":
        shard.unlink()
    else:
        shard.write_bytes(saved[:4096] if harm == "short" else saved[:-20] + bytes(20))
        os.utime(shard, (1, 1))
    if harm == "form":
        lazy.load()
        compress_shards(run.directory(30))
        with pytest.raises(StoragePathError):
            lazy.load()
    else:
        for _ in range(2):
            with pytest.raises((CorruptionError, StoragePathError)):
                catalog[30][WEIGHT].load()
        shard.write_bytes(saved)
    for tensor in (lazy, catalog[30][WEIGHT]):
        np.testing.assert_array_equal(saved_as(tensor.load()), run.checkpoints[30].tensors[WEIGHT])


def test_damage_in_a_bucket_is_found_in_a_whole_slice(
    run: SampleRun, strict: StrictStore, credentials: None
) -> None:
    lazy = Catalog(upload(run.folder, strict))[30][WEIGHT]
    strict.add_fault(Fault(action=Flip(5), match=Match(operation="GetObject", key="shard-00001")))
    with pytest.raises(CorruptionError, match=r"s3://.*shard-00001.*differs from its digest"):
        lazy.load()


def upload(folder: Path, strict: StrictStore) -> str:
    """Return a run's folder in a bucket, under a name of its own."""
    url = bucket_url("s3", strict.endpoint, f"lazy/{uuid.uuid4().hex}/{folder.name}")
    copy_to(open_store(Location.parse(url), None)[0], folder)
    return url


def test_an_empty_slice_hides_no_other_one(tmp_path: Path) -> None:
    tensor = torch.arange(4.0)
    lazy = write_tensor(tmp_path, tensor, [(slice(0, 4),), (slice(0, 0),)])[1]["model.w"]
    assert [part.shape for part in lazy.slices] == [(4,)] and torch.equal(lazy.load(), tensor)
    empty = write_tensor(tmp_path / "empty", torch.zeros(0, 3), [(slice(None), slice(None))] * 2)
    assert [part.shape for part in empty[1]["model.w"].slices] == [(0, 3)]
