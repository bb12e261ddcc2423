"""The rows that a rank makes from columns give the plan that all rows give, for any two layouts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ckpt.actors.agent.manifest_memory import ManifestMemory
from ray_ckpt.errors import FormatError, RestoreError
from ray_ckpt.format.manifest import decode_places, encode_columns, rows_table
from ray_ckpt.format.names import make_attempt, shard_file, state_file
from ray_ckpt.plan.restore import plan_restore
from ray_ckpt.restore import manifest
from ray_ckpt.restore.manifest import (
    MAX_KEPT_ROWS,
    ListedRows,
    MappedFragment,
    MappedManifest,
    PartialRows,
    RowColumns,
)
from ray_ckpt.types import Fragment, ManifestRow, Slice

ATTEMPT = make_attempt(run_uid="0" * 32, session=1, step=1, attempt=0)
RANKS = 4
SHAPES: dict[str, tuple[int, ...]] = {"a": (8,), "b": (6, 4), "c": (), "d": (0, 3), "e": (4, 3, 2), "f": (5,)}


def file_of(rows: Sequence[ManifestRow]) -> bytes:
    """Return rows as the file of a fragment, which need not have all rows of its files."""
    fragment = fragment_of(rows)
    return encode_columns(fragment.metadata, rows_table([fragment]))


def row_columns(fragments: Sequence[Sequence[ManifestRow]]) -> RowColumns:
    files = [file_of(rows) for rows in fragments]
    return RowColumns((decode_places(data)[1], pa.py_buffer(data)) for data in files)


def fragment_of(rows: Sequence[ManifestRow]) -> Fragment:
    return Fragment(
        attempt=ATTEMPT,
        node_index=0,
        num_nodes=1,
        world_size=RANKS,
        ranks=(),
        files=(),
        rows=tuple(rows),
    )


def slice_of(name: str, box: Sequence[tuple[int, int]], dtype: str = "F32") -> Slice:
    return Slice(
        item="model" if name < "d" else "optimizer",
        name=name,
        dtype=dtype,
        global_shape=SHAPES[name],
        offset=tuple(start for start, _ in box),
        shape=tuple(end - start for start, end in box),
    )


@st.composite
def saved(draw: st.DrawFn) -> list[list[ManifestRow]]:
    """Return rows of two nodes with two ranks each: tensors cut by grids, some regions saved by several."""
    by_rank: list[list[Slice]] = [[] for _ in range(RANKS)]
    for name, shape in SHAPES.items():
        cuts = [sorted({0, total, *draw(st.sets(st.integers(0, total), max_size=2))}) for total in shape]
        for box in product(*(list(pairwise(cut)) or [(0, 0)] for cut in cuts)):
            for rank in draw(st.sets(st.integers(0, RANKS - 1), min_size=1)):
                by_rank[rank].append(slice_of(name, box))
    fragments: list[list[ManifestRow]] = [[], []]
    for rank, parts in enumerate(by_rank):
        file, at = shard_file(rank, RANKS), 8
        rows = [ManifestRow(kind="header", file=file, byte_offset=0, nbytes=8, digest="0" * 32)]
        for part in draw(st.permutations(parts)):
            nbytes = 4 * prod(part.shape)
            digest = f"{rank:016x}{at:016x}"
            rows.append(
                ManifestRow(kind="slice", file=file, byte_offset=at, nbytes=nbytes, digest=digest, slice=part)
            )
            at += nbytes + 1
        state = state_file(rank, RANKS)
        rows.append(ManifestRow(kind="state", file=state, byte_offset=0, nbytes=3, digest="1" * 32))
        fragments[rank // 2] += rows
    return fragments


@st.composite
def wanted(draw: st.DrawFn) -> list[Slice]:
    targets = []
    for name in draw(st.lists(st.sampled_from(sorted(SHAPES)), max_size=6)):
        box = [sorted(draw(st.tuples(*[st.integers(0, total)] * 2))) for total in SHAPES[name]]
        targets.append(slice_of(name, [(a, b) for a, b in box], draw(st.sampled_from(["F32", "F32", "I32"]))))
    if draw(st.booleans()):
        targets.append(Slice(item="model", name="z", dtype="F32", global_shape=(2,), offset=(0,), shape=(2,)))
    if draw(st.booleans()):
        targets.append(Slice(item="model", name="b", dtype="F32", global_shape=(6,), offset=(0,), shape=(6,)))
    return targets


@given(
    fragments=saved(),
    targets=wanted(),
    rank=st.integers(0, RANKS),
    near=st.sets(st.integers(0, RANKS)),
    num_kept=st.sampled_from([0, 3, MAX_KEPT_ROWS]),
)
def test_columns_give_the_plan_of_all_rows(
    fragments: list[list[ManifestRow]], targets: list[Slice], rank: int, near: set[int], num_kept: int
) -> None:
    with patch.object(manifest, "MAX_KEPT_ROWS", num_kept):
        check_columns(fragments, targets, rank, near)


def check_columns(
    fragments: list[list[ManifestRow]], targets: list[Slice], rank: int, near: set[int]
) -> None:
    every_row = [row for rows in fragments for row in rows]
    own_files = (shard_file(rank, RANKS),) if rank < RANKS else ()
    rows = row_columns(fragments)
    near_files = [shard_file(k, RANKS) for k in near if k < RANKS]
    plan_of = partial(plan_restore, targets, own_files=own_files, near_files=near_files)
    assert plan_of(rows.meeting(targets, (*own_files, *near_files))) == plan_of(every_row)
    listed, keys = ListedRows(every_row), [target.key for target in targets]
    assert rows.first_of(keys) == listed.first_of(keys)
    for key in keys:
        assert list(rows.of_key(key)) == list(listed.of_key(key))
    for row in every_row:
        assert list(rows.of_file(row.file)) == list(listed.of_file(row.file))
    assert list(rows.of_file("shard-00009-of-00010")) == []
    assert list(rows.rows()) == every_row
    assert set(rows.files()) == set(listed.files())
    for item in (None, "model", "no item"):
        assert rows.keys(item) == listed.keys(item)


def test_a_row_that_is_taken_twice_is_made_once() -> None:
    region = slice_of("a", [(0, 8)])
    row = ManifestRow(
        kind="slice", file=shard_file(0, 1), byte_offset=0, nbytes=32, digest="0" * 32, slice=region
    )
    rows = row_columns([[row]])
    assert rows.meeting([region])[0] is rows.first_of([region.key])[region.key]


def test_a_tensor_that_all_ranks_saved_gives_few_rows() -> None:
    region, fragments = slice_of("a", [(0, 8)]), []
    for rank in range(100):
        file = shard_file(rank, 100)
        fragments.append(
            [ManifestRow(kind="slice", file=file, byte_offset=0, nbytes=32, digest="0" * 32, slice=region)]
        )
    rows = row_columns(fragments)
    assert [row.file for row in rows.meeting([region])] == [shard_file(0, 100)]
    preferred = rows.meeting([region], [shard_file(7, 100)])
    assert [row.file for row in preferred] == [shard_file(0, 100), shard_file(7, 100)]


@given(fragments=saved())
def test_mapped_rows_are_those_that_were_written(fragments: list[list[ManifestRow]]) -> None:
    with closing(ManifestMemory()) as memory:
        for rows in fragments:
            data = file_of(rows)
            memory.add(decode_places(data)[1], data)
        mapped = memory.seal().open()
        for rows in fragments:
            for file in {row.file for row in rows}:
                assert list(mapped.of_file(file)) == [row for row in rows if row.file == file]


@pytest.mark.parametrize(
    "broken",
    [
        {"digest": "x" * 32},
        {"nbytes": 31},
        {"byte_offset": -1},
        {"kind": "state"},
        {"file": "state-00000-of-00004.json"},
        {"slice": Slice(item="model", name="a", dtype="F32", global_shape=(8,), offset=(1,), shape=(8,))},
        {"slice": Slice(item="model", name="a", dtype="F32", global_shape=(8,), offset=(-1,), shape=(8,))},
        {"slice": Slice(item="model", name="a", dtype="F32", global_shape=(8,), offset=(0, 0), shape=(8,))},
        {"slice": Slice(item="model", name="a", dtype="F32", global_shape=(8, 1), offset=(0,), shape=(8,))},
    ],
)
def test_a_rank_refuses_a_row_that_breaks_a_rule(broken: dict[str, Any]) -> None:
    """The agent leaves the check of rows to the rank that takes them."""
    region = slice_of("a", [(0, 8)])
    right = ManifestRow(
        kind="slice", file="shard-00000-of-00004", byte_offset=8, nbytes=32, digest="0" * 32, slice=region
    )
    assert list(row_columns([[right]]).meeting([region])) == [right]
    with pytest.raises(FormatError):
        row_columns([[replace(right, **broken)]]).meeting([region])


def test_a_part_is_completed_once_and_its_errors_reach_the_caller() -> None:
    region = slice_of("a", [(0, 8)])
    row = ManifestRow(kind="slice", file="f", byte_offset=0, nbytes=32, digest="0" * 32, slice=region)
    calls: list[int] = []

    def fetch() -> ListedRows:
        calls.append(1)
        if len(calls) == 1:
            raise RestoreError("No source.")
        return ListedRows([row])

    rows = PartialRows(ListedRows([]), fetch)
    assert rows.of_file("f") == [] == list(rows.meeting([region]))
    with pytest.raises(RestoreError):
        rows.complete()
    assert rows.complete() and not rows.complete() and len(calls) == 2
    assert rows.of_file("f") == [row] == list(rows.of_key(region.key))
    assert rows.first_of([region.key, "x"]) == {region.key: row}


@pytest.mark.parametrize("data", [b"", b"x" * 100, bytes(5000)])
def test_memory_that_has_no_manifest_any_more_is_an_error_of_the_system(tmp_path: Path, data: bytes) -> None:
    """After a session the agent's descriptor may become another file; the rank then falls back."""
    (tmp_path / "memory").write_bytes(data)
    for places in ([(0, 50)], [(0, 100), (4000, 500)]):
        parts = tuple(MappedFragment(places=part, file=(0, 8)) for part in places)
        with pytest.raises(OSError):
            MappedManifest(path=str(tmp_path / "memory"), parts=parts).open()
