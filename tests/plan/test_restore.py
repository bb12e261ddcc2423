"""Restore plans against numpy: any saved sharding into any other gives the same global tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from ray_ckpt.format.digest import digest
from ray_ckpt.format.names import STILL, shard_file, shard_files
from ray_ckpt.plan.restore import RestorePlan, plan_restore
from ray_ckpt.types import ManifestRow, Slice
from tests.support.examples import examples

Box: TypeAlias = tuple[tuple[int, int], ...]  # (offset, size) per dimension
Array: TypeAlias = npt.NDArray[Any]


def part(name: str, shape: Sequence[int], box: Box, *, dtype: str = "I64") -> Slice:
    return Slice(
        item="model",
        name=name,
        dtype=dtype,
        global_shape=tuple(shape),
        offset=tuple(offset for offset, _ in box),
        shape=tuple(size for _, size in box),
    )


def rows(slices: Iterable[Slice], *, file: str = "shard-00000-of-00001.safetensors") -> list[ManifestRow]:
    found, at = [], 4096
    for piece in slices:
        nbytes = 8 * piece.num_elements
        found.append(
            ManifestRow(
                kind="slice", file=file, byte_offset=at, nbytes=nbytes, digest=digest(b""), slice=piece
            )
        )
        at += nbytes
    return found


def region(starts: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def execute(plan: RestorePlan, targets: Sequence[Slice], tensors: dict[str, Array]) -> list[Array]:
    """Return the content of each target after the plan; -1 where nothing was copied."""
    filled = [np.full(target.shape, -1, np.int64) for target in targets]
    for read in plan.reads:
        piece = read.row.slice
        assert piece is not None
        source = tensors[piece.name][region(piece.offset, piece.shape)]
        for copy in read.copies:
            filled[copy.target][region(copy.target_start, copy.shape)] = source[
                region(copy.source_start, copy.shape)
            ]
    return filled


@dataclass(frozen=True, slots=True)
class Case:
    tensors: dict[str, Array]
    saved: list[Slice]
    wanted: list[Slice]


@st.composite
def cuts(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """Draw a cut of `size` elements into pieces, some of them empty."""
    inner = draw(st.lists(st.integers(0, size), max_size=3))
    ends = [0, *sorted(inner), size]
    return [(a, b - a) for a, b in pairwise(ends)]


@st.composite
def shardings(draw: st.DrawFn, name: str, shape: Sequence[int]) -> list[Slice]:
    grid = [draw(cuts(size)) for size in shape]
    boxes = {box for box in product(*grid) if all(n for _, n in box) or not prod(shape)}
    return [part(name, shape, box) for box in sorted(boxes)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tensors: dict[str, Array] = {}
    saved: list[Slice] = []
    wanted: list[Slice] = []
    for index, shape in enumerate(draw(st.lists(st.lists(st.integers(0, 7), max_size=3), max_size=4))):
        name = f"t{index}"
        tensors[name] = np.arange(prod(shape), dtype=np.int64).reshape(shape) + 1000 * index
        pieces = draw(shardings(name, shape))
        saved += pieces + draw(st.lists(st.sampled_from(pieces), max_size=2) if pieces else st.just([]))
        wanted += draw(shardings(name, shape))
    return Case(tensors, draw(st.permutations(saved)), draw(st.permutations(wanted)))


@examples(200)
@given(cases())
def test_any_sharding_restores_into_any_other(case: Case) -> None:
    plan = plan_restore(case.wanted, rows(case.saved))
    assert plan.problems == ()
    for target, array in zip(case.wanted, execute(plan, case.wanted, case.tensors), strict=True):
        expected = case.tensors[target.name][region(target.offset, target.shape)]
        np.testing.assert_array_equal(array, expected)


@examples(100)
@given(cases())
def test_a_region_saved_twice_is_read_once(case: Case) -> None:
    plan = plan_restore(case.wanted, [*rows(case.saved), *rows(case.saved, file="shard-00001-of-00002")])
    regions = [(read.row.slice.key, read.row.slice.offset) for read in plan.reads if read.row.slice]
    assert len(set(regions)) == len(regions)
    assert plan.size_bytes == sum(a.nbytes for a in case.tensors.values())


@examples(100)
@given(cases(), st.randoms(use_true_random=False))
def test_a_missing_piece_is_a_problem_that_names_its_tensor(case: Case, random: Any) -> None:
    pieces = [piece for piece in set(case.saved) if piece.num_elements]
    if not pieces:
        return
    lost = random.choice(sorted(pieces, key=repr))
    plan = plan_restore(case.wanted, rows([piece for piece in case.saved if piece != lost]))
    assert plan.problems
    assert all(problem.startswith(lost.key) for problem in plan.problems)


def test_a_read_serves_every_target_that_needs_it() -> None:
    (row,) = rows([part("w", (4,), ((0, 4),))])
    targets = [part("w", (4,), ((0, 2),)), part("w", (4,), ((2, 2),))]
    (read,) = plan_restore(targets, [row]).reads
    assert read.row == row
    assert [(c.target, c.source_start, c.target_start, c.shape) for c in read.copies] == [
        (0, (0,), (0,), (2,)),
        (1, (2,), (0,), (2,)),
    ]


def test_only_what_is_wanted_is_read() -> None:
    saved = rows([part("w", (4,), ((0, 2),)), part("w", (4,), ((2, 2),)), part("unused", (9,), ((0, 9),))])
    plan = plan_restore([part("w", (4,), ((2, 1),))], saved)
    assert [read.row for read in plan.reads] == [saved[1]]
    assert plan.size_bytes == 16


def test_headers_and_states_are_no_tensors() -> None:
    header = ManifestRow(kind="header", file="shard", byte_offset=0, nbytes=4096, digest=digest(b""))
    assert plan_restore([], [header]) == RestorePlan(reads=(), problems=())


def test_problems_name_the_differences() -> None:
    here = part("w", (4, 2), ((0, 4), (0, 2)))
    cases = {
        "model.w: not in the checkpoint": [replace(here, name="v")],
        "model.w: shape (2, 4) in the checkpoint, (4, 2) here": [part("w", (2, 4), ((0, 2), (0, 4)))],
        "model.w: dtype BF16 in the checkpoint, I64 here": [replace(here, dtype="BF16")],
        "model.w: 6 of 8 elements were saved": [part("w", (4, 2), ((0, 3), (0, 2)))],
    }
    for problem, saved in cases.items():
        assert plan_restore([here], rows(saved)).problems == (problem,)
    assert len(plan_restore([here, replace(here, name="v")], []).problems) == 2


def test_overlapping_pieces_do_not_hide_a_gap() -> None:
    saved = rows([part("w", (4,), ((0, 3),)), part("w", (4,), ((2, 1),))])
    assert plan_restore([part("w", (4,), ((0, 4),))], saved).problems, "element 3 was never saved"


def test_a_region_is_read_near_the_rank() -> None:
    """Own file, then a file of a rank on the node, then the first."""
    part = Slice(item="m", name="w", dtype="F32", global_shape=(4,), offset=(0,), shape=(4,))
    rows = [
        ManifestRow(kind="slice", file=file, byte_offset=8, nbytes=16, digest="0" * 32, slice=part)
        for file in ("first", "near", "other", "own", "near too")
    ]

    def source(own: str, *near: str) -> str:
        (read,) = plan_restore([part], rows, own_files=(own,), near_files=near).reads
        return read.row.file

    assert source("own", "near", "own") == "own"
    assert source("none", "near", "near too") == "near"
    assert source("none") == "first"


def test_each_rank_of_a_node_reads_a_region_from_any_shard_of_its_own() -> None:
    part = Slice(item="m", name="w", dtype="F32", global_shape=(4,), offset=(0,), shape=(4,))
    rows = [
        ManifestRow(
            kind="slice",
            file=shard_file(rank, 2, STILL),
            byte_offset=8,
            nbytes=16,
            digest="0" * 32,
            slice=part,
        )
        for rank in range(2)
    ]
    near = [file for rank in range(2) for file in shard_files(rank, 2)]
    for rank in range(2):
        (read,) = plan_restore([part], rows, own_files=shard_files(rank, 2), near_files=near).reads
        assert read.row.file == shard_file(rank, 2, STILL)
