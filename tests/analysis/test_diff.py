"""`ray-ckpt diff` and its module: what differs between two checkpoints, by torch's own arithmetic."""

from __future__ import annotations

import json
import math
import shutil
import threading
import tracemalloc
import uuid
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import ray_ckpt.analysis.diff
from ray_ckpt.analysis.diff import BAND_BYTES, TensorDiff, compare, to_arrow
from ray_ckpt.analysis.diff_values import MAX_VALUE_CHARS
from ray_ckpt.capture.walk import DTYPE_NAMES
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.cli import app, main
from ray_ckpt.errors import ConfigError, CorruptionError
from ray_ckpt.format import records
from ray_ckpt.location import Location
from ray_ckpt.plan.regions import Box, flat_parts
from ray_ckpt.storage.remote.tier import open_store
from ray_ckpt.types import Slice
from tests.servers.stores import bucket_url
from tests.servers.strict_store import StrictStore
from tests.support.sample_run import (
    RankState,
    RunLog,
    SampleRun,
    assemble,
    compress_shards,
    copy_to,
    write_run,
)

State = Mapping[str, torch.Tensor]


def boxes(shape: tuple[int, ...], cut: str, count: int) -> list[Box]:
    """Cut a tensor into `count` parts: rows, columns, or flat elements, each in several boxes."""
    whole = (0,) * len(shape), shape
    if not math.prod(shape) or not shape:
        return [whole]
    if cut == "flat":
        ends = [math.prod(shape) * k // count for k in range(count + 1)]
        return [part.box for first, last in pairwise(ends) for part in flat_parts(shape, first, last)]
    axis = 0 if cut == "rows" else len(shape) - 1
    ends = [shape[axis] * k // count for k in range(count + 1)]
    found = []
    for start, stop in pairwise(ends):
        offset, size = [0] * len(shape), list(shape)
        offset[axis], size[axis] = start, stop - start
        found.append((tuple(offset), tuple(size)))
    return [box for box in found if math.prod(box[1])]


def save(
    log: RunLog,
    step: int,
    state: State,
    *,
    parts: int = 1,
    cut: str = "rows",
    values: Mapping[str, Any] | None = None,
) -> None:
    """Save a durable checkpoint of whole tensors by their full names, each box by another rank."""
    ranks: list[list[tuple[Slice, bytes]]] = [[]]
    for key, tensor in state.items():
        for rank, (offset, shape) in enumerate(boxes(tuple(tensor.shape), cut, parts)):
            part = tensor[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
            found = Slice(
                item=key.partition(".")[0],
                name=key.partition(".")[2],
                dtype=DTYPE_NAMES[tensor.dtype],
                global_shape=tuple(tensor.shape),
                offset=offset,
                shape=shape,
            )
            raw = part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            if rank == len(ranks):
                ranks.append([])
            ranks[rank].append((found, raw))
    saved = assemble(log.attempt(1, step), [RankState(slices=own, items=values or {}) for own in ranks])
    log.commit(saved)
    log.drain(saved)


@pytest.fixture
def log(tmp_path: Path) -> RunLog:
    log = RunLog(folder=tmp_path / "gpt")
    log.create()
    log.session(1, after=None, world_size=1, num_nodes=1)
    return log


def diffs(log: RunLog, a: int = 1, b: int = 2, **options: Any) -> dict[str, TensorDiff]:
    catalog = Catalog(log.folder)
    return {found.name: found for found in compare(catalog[a], catalog[b], **options)}


def expected(a: torch.Tensor, b: torch.Tensor) -> dict[str, float]:
    """Compute the expected comparison with torch, in double precision."""
    kind = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.to(kind).flatten(), b.to(kind).flatten()
    pairs = [torch.view_as_real(t).flatten() if t.is_complex() else t for t in (x, y)]
    return {
        "norm_a": x.norm().item(),
        "norm_b": y.norm().item(),
        "norm_diff": (y - x).norm().item(),
        "relative": ((y - x).norm() / x.norm()).item(),
        "max_abs": (y - x).abs().max().item(),
        "cosine": torch.cosine_similarity(pairs[0], pairs[1], dim=0).item(),
    }


def assert_numbers(found: TensorDiff, a: torch.Tensor, b: torch.Tensor) -> None:
    for name, value in expected(a, b).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-12, abs=1e-14), (found.name, name)


FLOATS = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64)


def random_state(seed: int) -> dict[str, torch.Tensor]:
    """Return a tensor of every dtype, a scalar, an empty one, and one of three dimensions."""
    random = torch.Generator().manual_seed(seed)
    found = {}
    for dtype in FLOATS:
        made = torch.randn(
            12, 10, generator=random, dtype=torch.complex64 if dtype.is_complex else torch.float32
        )
        found[f"model.{dtype}"] = made.to(dtype)
    for dtype in (*INTEGERS, torch.uint64, torch.bool):
        found[f"model.{dtype}"] = torch.randint(
            0, 2 if dtype is torch.bool else 100, (12, 10), generator=random
        ).to(dtype)
    found["model.scalar"] = torch.tensor(1.5 + seed)
    found["model.empty"] = torch.zeros(0, 3)
    found["model.cube"] = torch.randn(3, 5, 7, generator=random)
    return found


# Numbers

SLOW = pytest.mark.slow  # between the others of a matrix


@pytest.mark.parametrize(
    "cuts",
    [
        pytest.param(("rows", "rows"), marks=SLOW),
        ("rows", "columns"),
        pytest.param(("flat", "columns"), marks=SLOW),
        ("flat", "rows"),
    ],
)
@pytest.mark.parametrize(
    "worlds", [(1, 1), pytest.param((2, 3), marks=SLOW), pytest.param((4, 1), marks=SLOW), (5, 7)]
)
@pytest.mark.parametrize("band_bytes", [BAND_BYTES, pytest.param(64, marks=SLOW), 24])
def test_every_dtype_cut_and_world_gives_what_torch_gives(
    log: RunLog,
    monkeypatch: pytest.MonkeyPatch,
    cuts: tuple[str, str],
    worlds: tuple[int, int],
    band_bytes: int,
) -> None:
    monkeypatch.setattr(ray_ckpt.analysis.diff, "BAND_BYTES", band_bytes)
    monkeypatch.setattr(ray_ckpt.analysis.diff, "CHUNK_ELEMENTS", 7)
    a, b = random_state(1), random_state(2)
    save(log, 1, a, parts=worlds[0], cut=cuts[0])
    save(log, 2, b, parts=worlds[1], cut=cuts[1])
    found = diffs(log)
    assert list(found) == sorted(a)
    for name, diff in found.items():
        if name == "model.empty":
            assert (diff.status, diff.norm_a) == ("equal", None)
            continue
        one, other = a[name], b[name]
        assert diff.status == "changed"
        assert (diff.dtype_a, diff.shape_a) == (DTYPE_NAMES[one.dtype], tuple(one.shape))
        assert_numbers(diff, one, other)
        bits = [
            t.contiguous().reshape(-1).view(torch.uint8).view(-1, one.element_size()) for t in (one, other)
        ]
        assert diff.num_different == (bits[0] != bits[1]).any(1).sum().item()


def test_the_same_numbers_in_another_layout_are_equal(log: RunLog) -> None:
    state = random_state(1)
    save(log, 1, state, parts=2)
    save(log, 2, state, parts=3, cut="columns")
    found = diffs(log)
    assert {diff.status for diff in found.values()} == {"equal"}
    assert found["model.cube"].norm_diff == 0 and found["model.cube"].cosine == pytest.approx(1)


def test_nan_and_infinities_are_counted_and_left_out(log: RunLog) -> None:
    a, b = torch.arange(1.0, 9.0), torch.arange(2.0, 10.0)
    a[0], b[1], b[2], b[3] = math.nan, math.inf, -math.inf, math.nan
    z = torch.tensor([1 + 1j, complex(math.nan, 1), complex(1, math.inf)])
    save(log, 1, {"model.w": a, "model.z": z, "model.all": torch.ones(3)})
    save(log, 2, {"model.w": b, "model.z": torch.ones(3) * (1 + 0j), "model.all": torch.full((3,), math.nan)})
    found = diffs(log)
    w = found["model.w"]
    assert (w.nan_a, w.inf_a, w.nan_b, w.inf_b, w.num_different) == (1, 0, 1, 2, 8)
    assert w.norm_a == pytest.approx(a[1:].double().norm().item())
    assert w.norm_b == pytest.approx(b[[0, 4, 5, 6, 7]].double().norm().item())
    assert w.norm_diff == pytest.approx((b[4:] - a[4:]).norm().item()) and w.max_abs == 1
    assert w.cosine == pytest.approx(torch.cosine_similarity(a[4:].double(), b[4:].double(), dim=0).item())
    assert (found["model.z"].nan_a, found["model.z"].inf_a, found["model.z"].max_abs) == (1, 1, 1)
    spoilt = found["model.all"]
    assert (spoilt.nan_b, spoilt.norm_b, spoilt.cosine, spoilt.is_finite) == (3, 0, None, False)


def test_nan_with_the_same_bits_is_equal(log: RunLog) -> None:
    tensor = torch.tensor([1.0, math.nan])
    save(log, 1, {"model.w": tensor})
    save(log, 2, {"model.w": tensor}, parts=2)
    assert diffs(log)["model.w"].status == "equal"


def test_large_integers_differ_by_exactly_one(log: RunLog) -> None:
    """Where float64 holds even numbers only, and where a difference does not fit the dtype."""
    a = {"model.i": torch.tensor([2**60, -(2**63)]), "model.u": torch.tensor([2**64 - 1], dtype=torch.uint64)}
    b = {"model.i": torch.tensor([2**60 + 1, -(2**63)]), "model.u": torch.tensor([0], dtype=torch.uint64)}
    save(log, 1, a)
    save(log, 2, b)
    save(log, 3, {"model.i": torch.tensor([2**60, 2**63 - 1])})
    found = diffs(log)
    assert (found["model.i"].max_abs, found["model.i"].norm_diff, found["model.i"].num_different) == (1, 1, 1)
    assert found["model.u"].max_abs == 2.0**64
    assert diffs(log, b=3)["model.i"].max_abs == 2.0**64


def test_norms_of_numbers_whose_squares_overflow_or_vanish(log: RunLog) -> None:
    large = torch.tensor([3e200, 4e200], dtype=torch.float64)
    save(log, 1, {"model.w": large, "model.v": torch.zeros(2, dtype=torch.float64)})
    save(log, 2, {"model.w": large * 2, "model.v": large * 1e-300 * 1e-100})
    found = diffs(log)
    assert [found["model.w"].norm_a, found["model.w"].relative] == pytest.approx([5e200, 1])
    assert found["model.v"].norm_b == pytest.approx(5e-200)
    assert found["model.v"].relative == math.inf


# What changed but numbers


def test_names_shapes_and_dtypes_that_differ(log: RunLog) -> None:
    a, b = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)), torch.ones(4, 4)
    save(log, 1, {"model.gone": a, "model.w": a, "model.cast": a, "model.same": a, "model.flat": a})
    save(
        log,
        2,
        {"model.new": b, "model.w": b[:2], "model.cast": a.bfloat16(), "model.same": a, "model.flat": b},
    )
    found = diffs(log)
    assert {name.removeprefix("model."): diff.status for name, diff in found.items()} == {
        "cast": "dtype",
        "flat": "changed",
        "gone": "only_a",
        "new": "only_b",
        "same": "equal",
        "w": "shape",
    }
    assert (found["model.w"].shape_a, found["model.w"].shape_b, found["model.w"].norm_a) == (
        (4, 4),
        (2, 4),
        None,
    )
    assert (found["model.cast"].dtype_a, found["model.cast"].dtype_b) == ("F32", "BF16")
    assert_numbers(found["model.cast"], a, a.bfloat16())
    assert found["model.cast"].num_different == (a.double() != a.bfloat16().double()).sum().item()
    assert found["model.gone"].dtype_b is None and found["model.new"].shape_a is None


def test_values_of_rank_0_that_differ_are_named(log: RunLog) -> None:
    random = tuple(range(625))
    common = {"name": "adam", "nan": math.nan, "betas": (0.9, 0.95)}
    save(log, 1, {}, values={"optimizer": {"param_groups": [{"lr": 0.1, **common}]}, "rng": random, "old": 1})
    values = {
        "optimizer": {"param_groups": [{"lr": 0.2, **common}]},
        "rng": (*random[:-1], 0),
        "new": {"x": "y"},
    }
    save(log, 2, {}, values=values)
    catalog = Catalog(log.folder)
    found = {diff.name: (diff.a, diff.b) for diff in compare(catalog[1], catalog[2]).values()}
    assert found.pop("rng")[0] == "(0, 1, 2, 3, 4, 5, ...) ([624]: 624)"
    assert found == {
        "optimizer.param_groups[0].lr": ("0.1", "0.2"),
        "old": ("1", None),
        "new": (None, "{'x': 'y'}"),
    }
    assert compare(catalog[1], catalog[1]).values() == ()


def test_values_are_bounded_and_short(log: RunLog) -> None:
    save(log, 1, {}, values={"x": {f"k{n}": "a" * 500 for n in range(ray_ckpt.analysis.diff.MAX_VALUES + 5)}})
    save(log, 2, {}, values={"x": {}})
    catalog = Catalog(log.folder)
    found = compare(catalog[1], catalog[2]).values()
    assert len(found) == ray_ckpt.analysis.diff.MAX_VALUES
    assert max(len(diff.a or "") for diff in found) <= MAX_VALUE_CHARS


def test_patterns_choose_tensors(log: RunLog) -> None:
    save(log, 1, random_state(1))
    assert list(diffs(log, b=1, only=["model.sc*", "model.cube"])) == ["model.cube", "model.scalar"]
    assert list(diffs(log, b=1, only="model.sc*")) == ["model.scalar"], "no pattern for each letter"
    with pytest.raises(ConfigError, match="'nope'"):
        diffs(log, b=1, only=["model.*", "nope"])


def test_rows_for_arrow_and_pandas(log: RunLog) -> None:
    save(log, 1, random_state(1))
    save(log, 2, random_state(2))
    table = to_arrow(diffs(log).values())
    assert table.num_rows == len(random_state(1))
    row = next(row for row in table.to_pylist() if row["name"] == "model.cube")
    assert (row["status"], row["shape_a"], row["nan_a"]) == ("changed", [3, 5, 7], 0)
    assert to_arrow([]).schema == table.schema


# Reading


def shards(log: RunLog) -> list[Path]:
    return sorted(log.folder.rglob("shard-*.safetensors*"))


def test_what_is_equal_by_digest_is_not_read(log: RunLog) -> None:
    """No shard is read: all are deleted."""
    state = random_state(1)
    save(log, 1, state, parts=2)
    save(log, 2, state, parts=2)
    for shard in shards(log):
        shard.unlink()
    read: list[int] = []
    found = diffs(log, progress=read.append)
    assert {diff.status for diff in found.values()} == {"equal"} and not read


def test_only_what_may_differ_is_read_once(log: RunLog) -> None:
    state = random_state(1)
    save(log, 1, state, parts=2)
    save(log, 2, {**state, "model.cube": state["model.cube"] + 1}, parts=2)
    catalog, read = Catalog(log.folder), list[int]()
    comparison = compare(catalog[1], catalog[2], progress=read.append)
    assert {diff.status for diff in comparison} == {"equal", "changed"}
    assert sum(read) == comparison.size_bytes == 2 * 4 * 3 * 5 * 7


@pytest.mark.slow  # 3 s
def test_a_tensor_larger_than_a_band_is_never_whole_in_memory(
    log: RunLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    band_bytes = BAND_BYTES // 2
    monkeypatch.setattr(ray_ckpt.analysis.diff, "BAND_BYTES", band_bytes)
    a = torch.randn(1024, 16 * 1024, generator=torch.Generator().manual_seed(1))
    b = a * 1.001
    save(log, 1, {"model.w": a})
    save(log, 2, {"model.w": b}, parts=2, cut="columns")
    numbers, size = expected(a, b), a.numel() * 4
    del a, b
    tracemalloc.start()
    try:
        found = diffs(log)["model.w"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size == 8 * band_bytes and peak < 4 * band_bytes, (size, peak)
    assert found.norm_diff == pytest.approx(numbers["norm_diff"], rel=1e-10)
    assert found.cosine == pytest.approx(numbers["cosine"], rel=1e-10)


@pytest.mark.parametrize("cut", ["rows", "columns", "flat"])
def test_damage_is_found_in_any_layout_and_ends_nothing(
    log: RunLog, monkeypatch: pytest.MonkeyPatch, cut: str
) -> None:
    monkeypatch.setattr(ray_ckpt.analysis.diff, "BAND_BYTES", 24)
    save(log, 1, random_state(1), parts=2, cut=cut)
    save(log, 2, random_state(2), parts=3)
    shard = shards(log)[1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    bad = [diff for diff in diffs(log).values() if diff.status == "damaged"]
    assert len(bad) == 1 and bad[0].norm_a is None
    assert bad[0].detail.startswith("A: ") and f"{shard.name}: {bad[0].name}[" in bad[0].detail


def test_a_shard_that_is_missing_or_cut_off_is_damage(log: RunLog) -> None:
    save(log, 1, {"model.w": torch.ones(2000)})
    save(log, 2, {"model.w": torch.zeros(2000)})
    first, second = shards(log)
    second.write_bytes(second.read_bytes()[:-4])
    found = diffs(log)["model.w"]
    assert found.status == "damaged" and found.detail.startswith(f"B: {second}") and "ends" in found.detail
    first.unlink()
    found = diffs(log)["model.w"]
    assert found.status == "damaged" and "missing" in found.detail


@pytest.mark.parametrize("when", ["before", "between", "values"])
def test_what_is_deleted_meanwhile_is_no_damage(log: RunLog, when: str) -> None:
    for step in (1, 2):
        save(log, step, {"model.w": torch.full((4,), float(step))}, values={"s": {"lr": step}})
    a, b = Catalog(log.folder)[1], Catalog(log.folder)[2]
    comparison = None if when == "before" else compare(a, b)
    log.append(records.Retired(attempt=b.info.id.attempt, reason="old"))
    assert b.path is not None
    shutil.rmtree(b.path)
    with pytest.raises(ConfigError, match=r"B: step 2 in .* has been deleted meanwhile"):
        if comparison is None:
            compare(a, b)
        elif when == "values":
            comparison.values()
        else:
            list(comparison)


def test_long_values_are_shown_where_they_differ(log: RunLog) -> None:
    numbers, letters = list(range(100)), "x" * 200
    key = np.arange(624, dtype=np.uint32)
    before = {"rng": numbers, "text": letters, "key": key, "seed": 7**100, "deep": [numbers, numbers]}
    changed = {
        "rng": [*numbers[:50], -1, *numbers[51:]],
        "text": letters + "x",
        "key": np.where(key == 300, np.uint32(0), key),
        "seed": 7**100 + 10**40,
        "deep": [numbers, [*numbers[:-1], "last"]],
    }
    for step, values in ((1, before), (2, changed)):
        save(log, step, {"model.w": torch.zeros(1)}, values={"s": values})
    catalog = Catalog(log.folder)
    found = {diff.name.removeprefix("s."): diff for diff in compare(catalog[1], catalog[2]).values()}
    assert all(diff.a and diff.b and diff.a != diff.b for diff in found.values()) and len(found) == 5
    rng, text, deep = found["rng"], found["text"], found["deep[1]"]
    assert (rng.a or "").endswith(" ([50]: 50)") and (rng.b or "").endswith(" ([50]: -1)")
    assert (text.a or "").endswith(" (200 long)") and (text.b or "").endswith(" (201 long)")
    assert (deep.a or "").endswith(" ([99]: 99)") and (deep.b or "").endswith(" ([99]: 'last')")
    assert max(len(diff.b or "") for diff in found.values()) < 2 * MAX_VALUE_CHARS


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (10**5000, -(10**5000)),
        (10**9000, 10**9000 + 10**4500),
        ([10**5000, 1], [10**5000, 2]),
        ({10**5000}, {10**5000 + 1}),
        ({10**5000: 1}, {10**5000: 2}),
        (OrderedDict({10**5000: [10**6000]}), OrderedDict({10**5000: 3})),
        (defaultdict(list, {3: [10**5000] * 100}), defaultdict(list, {3: [*[10**5000] * 99, 7]})),
        (Counter({10**5000: 1}), Counter({10**5000: 10**6000})),
        ((10**5000, {"a": (10**5000,)}), [10**5000]),
    ],
    ids=range(9),
)
def test_ints_of_any_length_are_compared(log: RunLog, before: object, after: object) -> None:
    """Python writes no int of more than 4,300 digits in decimal."""
    for step, value in ((1, before), (2, after)):
        save(log, step, {"model.w": torch.zeros(1)}, values={"x": value})
    catalog = Catalog(log.folder)
    (found,) = compare(catalog[1], catalog[2]).values()
    assert found.name.startswith("x") and found.a != found.b
    assert max(len(found.name), len(found.a or ""), len(found.b or "")) < 3 * MAX_VALUE_CHARS
    assert compare(catalog[1], catalog[1]).values() == ()
    lines = CliRunner().invoke(app, ["diff", str(log.folder), "1", "2"])
    assert lines.exception is None, lines.exception


def test_damaged_values_are_an_error(log: RunLog) -> None:
    save(log, 1, {}, values={"x": 1})
    save(log, 2, {}, values={"x": 2})
    path = sorted(log.folder.rglob("state-*"))[1]
    path.write_bytes(path.read_bytes().replace(b"2", b"3"))
    catalog = Catalog(log.folder)
    with pytest.raises(CorruptionError, match=r"B: .*digest"):
        compare(catalog[1], catalog[2]).values()


def test_compressed_shards_are_compared_as_any(log: RunLog) -> None:
    a, b = random_state(1), random_state(2)
    save(log, 1, a, parts=2)
    save(log, 2, b)
    before = diffs(log)
    for folder in {shard.parent for shard in shards(log)}:
        compress_shards(folder)
    assert diffs(log) == before


def test_a_damaged_frame_of_a_compressed_shard_is_damage(log: RunLog) -> None:
    save(log, 1, {"model.w": torch.ones(5000)})
    save(log, 2, {"model.w": torch.arange(5000.0)})
    for folder in {shard.parent for shard in shards(log)}:
        compress_shards(folder)
    shard = shards(log)[1]
    for position in (200, -1):  # in the frame, in the table at its end
        data = bytearray(shard.read_bytes())
        data[position] ^= 1
        shard.write_bytes(data)
        found = diffs(log)["model.w"]
        assert found.status == "damaged" and found.detail.startswith(f"B: {shard.with_suffix('')}: ")


def test_leaving_early_ends_the_threads(log: RunLog) -> None:
    save(log, 1, random_state(1))
    save(log, 2, random_state(2))
    catalog = Catalog(log.folder)
    found = iter(compare(catalog[1], catalog[2]))
    next(found)
    found.close()  # type: ignore[attr-defined]
    assert not [t for t in threading.enumerate() if t.name.startswith("ray_ckpt-diff")]


# The command


@pytest.fixture
def run(tmp_path: Path) -> SampleRun:
    return write_run(tmp_path, steps=(10, 20, 30), durable=(10, 30))


def cli(*args: object) -> Any:
    return CliRunner().invoke(app, ["diff", *map(str, args)])


def test_the_command_shows_what_moved_most_first(run: SampleRun) -> None:
    result = cli(run.folder, 10, 30)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("A: step 10, ") and lines[1].startswith("B: step 30, ")
    rows = [line.split() for line in lines if " changed " in line]
    assert rows[0][0] == "model.head"  # it has an infinity
    moved = [float(row[2]) for row in rows[1:]]
    assert len(moved) == 6 and moved == sorted(moved, reverse=True)
    assert "scheduler.last_epoch" in result.stdout and "model.unused" not in result.stdout
    assert lines[-1] == "8 tensors: 7 changed, 1 equal, 1 with NaN or infinities; 2 values differ"
    assert "model.unused" in cli(run.folder, 10, 30, "--all").stdout


def test_the_command_has_an_example() -> None:
    assert "Example: ray-ckpt diff" in cli("--help").stdout


def test_the_command_as_json(run: SampleRun) -> None:
    document = json.loads(cli(run.folder, 10, 30, "--json", "--only", "model.*").stdout)
    assert (document["ok"], document["a"]["step"], document["b"]["step"]) == (True, 10, 30)
    assert document["summary"]["changed"] == 3 and document["summary"]["equal"] == 1
    assert document["b"]["path"] == str(run.directory(30))
    found = {row["name"]: row for row in document["tensors"]}
    assert found["model.unused"]["status"] == "equal" and found["model.blocks.0.bias"]["num_different"] == 6
    assert {"name": "scheduler.last_epoch", "a": "10", "b": "30"} in document["values"]


def test_checkpoints_of_two_runs_by_their_uris(run: SampleRun, tmp_path: Path) -> None:
    other = write_run(tmp_path, "other", steps=(10,), durable=(10,), world_size=3)
    for second in (f"{other.folder}@10", other.folder, other.directory(10)):
        document = json.loads(cli(f"{run.folder}@10", second, "--json").stdout)
        assert document["b"]["path"] == str(other.directory(10))
        assert (document["summary"]["changed"], document["summary"]["only_b"]) == (0, 1)


def test_damage_exits_with_1(run: SampleRun, capsys: pytest.CaptureFixture[str]) -> None:
    shard = sorted(run.directory(30).glob("shard-*"))[0]
    data = bytearray(shard.read_bytes())
    data[4100] ^= 1
    shard.write_bytes(data)
    result = cli(run.folder, 10, 30)
    assert result.exit_code == 1 and "damaged" in result.stdout and shard.name in result.stdout
    result = cli(run.folder, 10, 30, "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["ok"] is False
    manifest = sorted(run.directory(30).glob("manifest-*"))[0]
    manifest.write_bytes(b"")
    with pytest.raises(SystemExit) as caught:
        main(["diff", str(run.folder), "10", "30"])
    out, err = capsys.readouterr()
    assert caught.value.code == 1 and manifest.name in err and not out


@pytest.mark.parametrize(
    "args", [("10",), ("ten", "30"), ("10", "20"), ("10", "31"), ("10", "30", "--only", "no")]
)
def test_wrong_usage_is_a_config_error(run: SampleRun, args: Sequence[str]) -> None:
    result = cli(run.folder, *args)
    assert isinstance(result.exception, ConfigError) and result.exception.hint


def test_names_do_not_drive_the_terminal(log: RunLog) -> None:
    for step in (1, 2):
        save(log, step, {"model.\x1b[31mw": torch.ones(2) * step}, values={"x": {"\x1b[2J": f"\x1b{step}"}})
    text = cli(log.folder, 1, 2).stdout
    assert "\x1b" not in text and "[31mw" in text and "[2J" in text


def test_a_bucket_gives_what_a_folder_does(
    run: SampleRun, tmp_path: Path, strict: StrictStore, credentials: None
) -> None:
    storage = Location.parse(bucket_url("s3", strict.endpoint, f"diff/{uuid.uuid4().hex}"))
    copy_to(open_store(storage, None)[0], tmp_path)
    here = json.loads(cli(run.folder, 10, 30, "--json").stdout)
    for args in ((storage / "gpt", 10, 30), (storage / "gpt@10", storage / "gpt@30")):
        there = json.loads(cli(*args, "--json").stdout)
        assert there["tensors"] == here["tensors"] and there["values"] == here["values"]
