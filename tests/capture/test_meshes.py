"""DTensors on any mesh: what is saved of them, what is read for them, and what cannot be stored."""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from ray_ckpt.capture.dtensors import boxes_on, mesh_text
from ray_ckpt.capture.walk import DTYPES, walk
from ray_ckpt.errors import MismatchError, UnsupportedLeaf
from ray_ckpt.format.manifest import check_coverage
from tests.capture.ranks import Files, items_of, on_ranks
from tests.support.examples import examples

MESHES = ((1,), (2,), (3,), (4,), (1, 2), (2, 1), (2, 2), (1, 3), (1, 4), (4, 1))
Layout = tuple[tuple[int, ...], tuple[Placement, ...]]


def placements(num_dims: int) -> st.SearchStrategy[Placement]:
    if not num_dims:
        return st.just(Replicate())
    dims = st.integers(0, num_dims - 1)
    strided = st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), dims, st.integers(2, 3))
    return st.one_of(st.just(Replicate()), dims.map(Shard), dims.map(Shard), strided)


def is_plain(layout: Layout) -> bool:
    """Strides upon strides of one dimension are left out: they have two readings too."""
    strided = [p.dim for p in layout[1] if isinstance(p, _StridedShard)]
    return len(strided) == len(set(strided))


def layouts(num_dims: int) -> st.SearchStrategy[Layout]:
    return (
        st.sampled_from(MESHES)
        .flatmap(lambda mesh: st.tuples(st.just(mesh), st.tuples(*(placements(num_dims) for _ in mesh))))
        .filter(is_plain)
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Layout, Layout]:
    """Draw a shape, and its layouts at the save and at the restore."""
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    return shape, draw(layouts(len(shape))), draw(layouts(len(shape)))


def spread(whole: torch.Tensor, layout: Layout) -> Any:
    """Return the DTensor that torch makes of `whole`, on the rank of the caller."""
    mesh = init_device_mesh("cpu", layout[0])
    return distribute_tensor(whole, mesh, layout[1], src_data_rank=None)


S0, STRIDED = Shard(0), _StridedShard(0, split_factor=2)


@given(case=cases())
@example(case=((8,), ((2,), (STRIDED,)), ((3,), (S0,))))
@example(case=((7, 3), ((2, 2), (STRIDED, S0)), ((2, 2), (S0, STRIDED))))
@examples(60)
def test_any_layout_is_restored_on_any_other_reading_no_more_than_it_needs(
    case: tuple[tuple[int, ...], Layout, Layout],
) -> None:
    shape, there, here = case
    whole = torch.arange(1, 1 + math.prod(shape)).view(shape)
    with TemporaryDirectory() as folder:
        files = Files(Path(folder), math.prod(there[0]))

        def save(rank: int) -> None:
            files.save(items_of(state={"w": spread(whole, there)}), rank)

        def restore(rank: int) -> None:
            live = spread(torch.zeros_like(whole), here)
            items, expected = items_of(state={"w": live}), spread(whole, here).to_local()
            reader = files.load(items, rank, math.prod(here[0]))
            assert torch.equal(live.to_local(), expected)
            held, read = set(expected.flatten().tolist()), sum(part.size_bytes for part in reader.parts)
            regions = {(row.slice.offset, row.slice.shape): row.nbytes for row in files.rows if row.slice}
            needed = [nbytes for box, nbytes in regions.items() if held & set(values_in(whole, box))]
            assert read == sum(needed)
            shown = {i for _, boxes in boxes_on(live, [rank]) for box in boxes for i in values_in(whole, box)}
            assert shown in (held, set()), "what other ranks take for held here"

        on_ranks(math.prod(there[0]), save)
        check_coverage(files.rows)
        on_ranks(math.prod(here[0]), restore)


def values_in(whole: torch.Tensor, box: tuple[tuple[int, ...], tuple[int, ...]]) -> list[int]:
    inside: list[int] = whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].flatten().tolist()
    return inside


# -- kinds of tensors ----------------------------------------------------------------------------------


def test_every_dtype_and_an_empty_and_a_0d_dtensor_move_between_layouts(tmp_path: Path) -> None:
    def state(layout: Layout, *, is_filled: bool) -> dict[str, Any]:
        made: dict[str, torch.Tensor] = {
            name: (torch.arange(15) % 2 if dtype is torch.bool else torch.arange(1, 16)).to(dtype).view(5, 3)
            for name, dtype in DTYPES.items()
        }
        made |= {"empty": torch.empty(0, 3), "flat": torch.empty(4, 0)}
        alike = (layout[0], tuple(Replicate() for _ in layout[0]))
        spreaded = {name: spread(value, layout) for name, value in made.items()}
        spreaded["scalar"] = spread(torch.tensor(3.0), alike)
        if not is_filled:
            for value in spreaded.values():
                value.to_local().zero_()
        return spreaded

    there, here = ((3,), (Shard(0),)), ((2, 2), (Shard(1), Shard(0)))
    files = Files(tmp_path, 3)
    on_ranks(3, lambda rank: files.save(items_of(state=state(there, is_filled=True)), rank))
    check_coverage(files.rows)

    def restore(rank: int) -> None:
        live, right = state(here, is_filled=False), state(here, is_filled=True)
        files.load(items_of(state=live), rank, 4)
        for name, value in live.items():
            pair = [t.to_local().contiguous().view(-1).view(torch.uint8) for t in (value, right[name])]
            assert torch.equal(*pair), name

    on_ranks(4, restore)


def test_what_cannot_be_stored_is_named_with_the_way_out() -> None:
    def refuse(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        partial = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
        with pytest.raises(UnsupportedLeaf, match=r"model\.weight has placements .*Partial") as caught:
            walk(items_of(model=holding(partial)), rank=rank, world_size=2)
        assert caught.value.hint is not None and "redistribute" in caught.value.hint
        local, whole = torch.ones(3), torch.Size((8,))
        wrong = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole, stride=(1,))
        with pytest.raises(UnsupportedLeaf, match=r"local tensor of shape \(3,\).* make \(4,\)"):
            walk(items_of(state={"w": wrong}), rank=rank, world_size=2)

    on_ranks(2, refuse)
    with pytest.raises(UnsupportedLeaf, match="complex128") as caught:
        walk(items_of(state={"w": torch.zeros(2, dtype=torch.complex128)}), rank=0, world_size=1)
    assert caught.value.hint is not None and "view_as_real" in caught.value.hint


def test_a_checkpoint_is_described_by_its_meshes() -> None:
    def look(rank: int) -> None:
        named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        plain = init_device_mesh("cpu", (4,))
        leaves: list[object] = [torch.zeros(2), "text", None]
        assert mesh_text(leaves) == ""
        for mesh in (named, plain, named["tensor"]):
            leaves += [distribute_tensor(torch.arange(8.0), mesh, src_data_rank=None)] * 2
        assert mesh_text(leaves) == "4, data=2 tensor=2, tensor=2"

    on_ranks(4, look)


def holding(tensor: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(tensor)
    return module


def test_uneven_parts_that_two_layouts_would_read_otherwise_are_refused() -> None:
    """38 rows over 4 x 4 ranks: DTensor and fully_shard both give one rank a single row, but not the same."""

    def look(rank: int) -> list[int] | str:
        placed = (_StridedShard(0, split_factor=4), Shard(0))
        tensor = distribute_tensor(
            torch.arange(38), init_device_mesh("cpu", (4, 4)), placed, src_data_rank=None
        )
        assert not list(boxes_on(tensor, range(16))), "no rank can compute the parts of the others"
        try:
            slices = walk(items_of(state={"w": tensor}), rank=rank, world_size=16).slices
        except UnsupportedLeaf as error:
            return str(error)
        assert torch.equal(torch.cat([s.tensor for s in slices] or [torch.arange(0)]), tensor.to_local())
        return sorted(
            i for s in slices for i in range(s.slice.offset[0], s.slice.offset[0] + s.slice.shape[0])
        )

    found = on_ranks(16, look)
    refused = [rank for rank, answer in enumerate(found) if isinstance(answer, str)]
    assert refused and "Pad the dimension" in str(found[refused[0]])
    whole = [i for answer in found if not isinstance(answer, str) for i in answer]
    assert len(whole) == len(set(whole)), "what is not refused is right"


def test_a_dtensor_on_some_of_the_ranks_is_saved_by_these(tmp_path: Path) -> None:
    files = Files(tmp_path, 4)

    def save(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        first = mesh["b"] if rank < 2 else None
        whole = torch.arange(5.0)
        state = {"w": distribute_tensor(whole, first, [Shard(0)], src_data_rank=None)} if first else {}
        files.save(items_of(state=state), rank)

    on_ranks(4, save)
    check_coverage(files.rows)
    live = {"w": torch.zeros(5)}
    files.load(items_of(state=live), 0, 1)
    assert live["w"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


# -- items of a rank's own -----------------------------------------------------------------------------


class Average:
    """An averaged model as users write one: its state_dict holds the tensors of the model."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.count = torch.zeros(())

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": {"weight": self.weight}, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["shadow"]["weight"] is not self.weight:
            self.weight.copy_(state["shadow"]["weight"])
        self.count = state["count"]


@pytest.mark.parametrize("there", [None, ((4,), (S0,)), ((2, 2), (Replicate(), Shard(1)))])
@pytest.mark.parametrize("here", [None, ((3,), (S0,)), ((2,), (Replicate(),))])
def test_dtensors_of_a_per_rank_item_are_of_all_ranks(
    tmp_path: Path, there: Layout | None, here: Layout | None
) -> None:
    whole = torch.arange(1.0, 16.0).view(5, 3)

    def make(layout: Layout | None, value: torch.Tensor) -> Average:
        return Average(value.clone() if layout is None else spread(value, layout))

    world_size = math.prod(there[0]) if there else 1
    files = Files(tmp_path, world_size)

    def save(rank: int) -> None:
        average = make(there, whole)
        average.count.fill_(rank)
        files.save(items_of(ema=average), rank)

    on_ranks(world_size, save)
    check_coverage(files.rows)

    def restore(rank: int) -> None:
        average = make(here, torch.zeros_like(whole))
        files.load(items_of(ema=average), rank, math.prod(here[0]) if here else 1)
        expected = make(here, whole)
        pair = (average.weight, expected.weight)
        assert torch.equal(*(t.to_local() if isinstance(t, DTensor) else t for t in pair))
        assert average.count.item() == (rank if rank < world_size else 0)

    on_ranks(math.prod(here[0]) if here else 1, restore)


# -- tied weights --------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self, *, is_tied: bool, equal: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight
        elif equal:
            self.head.weight.data.copy_(self.embed.weight.data)


def test_tied_weights_are_saved_once_and_restored_tied(tmp_path: Path) -> None:
    model, other = Tied(is_tied=True), Tied(is_tied=True)
    files = Files(tmp_path, 1)
    files.save(items_of(model=model), 0)
    assert [row.slice.key for row in files.rows if row.slice] == ["model.embed.weight"]
    reader = files.load(items_of(model=other), 0, 1)
    assert other.head.weight is other.embed.weight and torch.equal(other.head.weight, model.head.weight)
    assert sum(part.size_bytes for part in reader.parts) == 60


def test_tied_weights_fill_those_that_are_not_tied_here(tmp_path: Path) -> None:
    model, other = Tied(is_tied=True), Tied(is_tied=False, equal=False)
    files = Files(tmp_path, 1)
    files.save(items_of(model=model), 0)
    reader = files.load(items_of(model=other), 0, 1)
    assert other.head.weight is not other.embed.weight
    assert torch.equal(other.head.weight, model.head.weight)
    assert torch.equal(other.embed.weight, model.head.weight)
    assert sum(part.size_bytes for part in reader.parts) == 60, "read once"


@pytest.mark.parametrize("equal", [True, False])
def test_weights_that_are_tied_here_only_fit_if_they_were_equal(tmp_path: Path, equal: bool) -> None:
    model, other = Tied(is_tied=False, equal=equal), Tied(is_tied=True)
    files = Files(tmp_path, 1)
    files.save(items_of(model=model), 0)
    before = other.head.weight.detach().clone()
    if equal:
        reader = files.load(items_of(model=other), 0, 1)
        assert torch.equal(other.head.weight, model.head.weight)
        assert sum(part.size_bytes for part in reader.parts) == 60, "one of the two is read"
        return
    with pytest.raises(MismatchError, match=r"model\.head\.weight: is one tensor with model\.embed\.weight"):
        files.load(items_of(model=other), 0, 1)
    assert torch.equal(other.head.weight, before)


def test_values_that_share_a_tensor_come_apart_into_two_that_do_not(tmp_path: Path) -> None:
    """A shared step counter is an example: two states that each count with it must not count twice."""
    shared = torch.ones(2)
    files = Files(tmp_path, 1)
    files.save(items_of(state={"a": shared, "b": shared}), 0)
    live = {"a": torch.zeros(2), "b": torch.zeros(2)}
    files.load(items_of(state=live), 0, 1)
    live["a"].add_(1)
    assert live["b"].tolist() == [1.0, 1.0]
