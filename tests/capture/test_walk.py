"""Items as slices: names, ownership, and values that cannot be stored."""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

from ray_ckpt.capture.adapt import adapt
from ray_ckpt.capture.dtensors import holders
from ray_ckpt.capture.items import Item
from ray_ckpt.capture.walk import DTYPE_NAMES, LiveSlice, Walked, bytes_digest, walk
from ray_ckpt.errors import FormatError, UnsupportedLeaf
from ray_ckpt.format.shard import ITEMSIZE
from ray_ckpt.format.tree import TensorRef, TorchDtype
from ray_ckpt.types import SMALL_TENSOR_BYTES, Slice
from tests.capture.local import resolve_leaves


def items_of(**objects: Any) -> dict[str, Item]:
    modules = {name: obj for name, obj in objects.items() if isinstance(obj, nn.Module)}
    return {name: adapt(name, obj, modules) for name, obj in objects.items()}


def keys(walked: Walked) -> list[str]:
    return sorted(live.slice.key for live in walked.slices)


def test_tensors_are_named_by_item_and_path() -> None:
    model = nn.Linear(3, 2)
    tree = {"ema": [torch.zeros(1), {"x": torch.zeros(2)}], "step": 3}
    walked = walk(items_of(model=model, state=tree, scale=torch.ones(())), rank=0, world_size=1)
    assert keys(walked) == ["model.bias", "model.weight", "scale", "state.ema.0", "state.ema.1.x"]
    assert walked.trees["state"] == {
        "ema": [TensorRef("state.ema.0"), {"x": TensorRef("state.ema.1.x")}],
        "step": 3,
    }
    by_key = {live.slice.key: live for live in walked.slices}
    assert by_key["model.weight"].slice == Slice(
        item="model", name="weight", dtype="F32", global_shape=(2, 3), offset=(0, 0), shape=(2, 3)
    )
    assert by_key["model.weight"].tensor.data_ptr() == model.weight.data_ptr()
    assert not by_key["model.weight"].tensor.requires_grad
    assert by_key["scale"].slice.name == "" and by_key["scale"].nbytes == 4


def test_tensors_are_free_without_a_collection_of_garbage_after_a_walk() -> None:
    tree = {"state": [torch.zeros(1)]}
    tensor = weakref.ref(tree["state"][0])
    walk(items_of(tree=tree), rank=0, world_size=1)
    del tree
    assert tensor() is None


def test_stateful_items_are_named_by_rank() -> None:
    class Sampler:
        def state_dict(self) -> dict[str, Any]:
            return {"seed": 1, "order": torch.arange(3)}

        def load_state_dict(self, state: Any) -> None: ...

    walked = walk(items_of(sampler=Sampler()), rank=2, world_size=4)
    assert keys(walked) == ["rank2.sampler.order"]
    assert walked.slices[0].ranks == (2,)
    assert walked.trees["sampler"]["order"] == TensorRef("rank2.sampler.order")


def test_the_dtypes_are_those_of_the_format() -> None:
    assert set(DTYPE_NAMES.values()) == set(ITEMSIZE)
    for dtype, name in DTYPE_NAMES.items():
        assert torch.empty(1, dtype=dtype).element_size() == ITEMSIZE[name]


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.ones(3).to_sparse(), "sparse_coo"),
    ],
)
def test_tensors_that_cannot_be_stored_are_named(tensor: torch.Tensor, what: str) -> None:
    with pytest.raises(UnsupportedLeaf, match=f"state.deep.x is .*{what}") as caught:
        walk(items_of(state={"deep": {"x": tensor}}), rank=0, world_size=1)
    assert caught.value.fields["path"] == "state.deep.x" and caught.value.hint


def test_a_module_without_memory_is_refused_with_the_fix() -> None:
    """A restore into it would do nothing, and no save of it could succeed."""
    with pytest.raises(UnsupportedLeaf, match=r"^model\.weight is on the device meta.*to_empty"):
        walk(items_of(model=nn.Linear(2, 2, device="meta")), rank=0, world_size=1)


def test_a_lazy_module_without_shapes_is_refused_by_name() -> None:
    model = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
    with pytest.raises(UnsupportedLeaf, match=r"^model\.0\.weight has no shape yet.*with a batch"):
        walk(items_of(model=model), rank=0, world_size=1)
    model(torch.ones(3, 4))
    assert "model.0.weight" in keys(walk(items_of(model=model), rank=0, world_size=1))


def test_a_subclass_whose_values_are_computed_is_refused() -> None:
    """A copy of it reads one of its tensors, or what they stand for, and a restore writes that into all."""
    two = TwoTensor(torch.ones(3), torch.full((3,), 2.0))  # type: ignore[no-untyped-call]
    with pytest.raises(UnsupportedLeaf, match=r"^state\.x is a .*TwoTensor.*Save the tensors inside"):
        walk(items_of(state={"x": two}), rank=0, world_size=1)
    waited_for = AsyncCollectiveTensor(torch.ones(3))
    assert keys(walk(items_of(state={"x": waited_for}), rank=0, world_size=1)) == ["state.x"]


@pytest.mark.parametrize("num", [1, 20])
def test_a_tensor_whose_storage_was_freed_is_refused(num: int) -> None:
    """To copy it would end the process."""
    items = items_of(state=[torch.ones(3) for _ in range(num)])
    before = walk(items, rank=0, world_size=1)
    items["state"].tree()[0].untyped_storage().resize_(0)
    with pytest.raises(UnsupportedLeaf, match=r"^state\.0 has no memory"):
        walk(items, rank=0, world_size=1, before=before)


def test_two_tensors_cannot_have_one_name() -> None:
    """The layout of one rank would refuse it; with two ranks, each with one tensor, no layout would."""
    clash = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    with pytest.raises((UnsupportedLeaf, ValueError)):
        walk(items_of(state=clash), rank=0, world_size=2)


def test_endless_and_deep_trees_are_refused_by_name() -> None:
    endless: dict[str, Any] = {"a": 1}
    endless["b"] = [endless]
    deep: list[Any] = []
    for _ in range(2000):
        deep = [deep]
    for tree in (endless, deep):
        with pytest.raises(UnsupportedLeaf, match=r"^state contains itself or is nested too deep") as caught:
            walk(items_of(state=tree), rank=0, world_size=1)
        assert caught.value.hint and caught.value.fields["path"] == "state"


def test_keys_of_any_length_name_tensors() -> None:
    """Python writes no int of more than 4,300 digits in decimal."""
    walked = walk(items_of(state={10**5000: torch.zeros(1), 7: 1}), rank=0, world_size=1)
    assert keys(walked) == [f"state.{10**5000:#x}"]


@pytest.mark.parametrize("name", ["load", "nothing", "nn"])
def test_a_dtype_that_torch_has_not_is_refused(name: str) -> None:
    with pytest.raises(FormatError, match=f"dtype '{name}'"):
        resolve_leaves({"dtype": TorchDtype(name)}, {})


def test_trees_come_back_as_they_were() -> None:
    tensor = torch.zeros(2)
    tree = {
        "a": OrderedDict(x=1, y=tensor),
        "b": Counter("hello"),
        "c": defaultdict(list, k=[1, (2, torch.bfloat16)]),
        3: None,
    }
    walked = walk(items_of(state=tree), rank=0, world_size=1)
    back = resolve_leaves(walked.trees["state"], {"state.a.y": tensor})
    assert back == tree
    assert [type(back[k]) for k in tree] == [type(v) for v in tree.values()]
    assert back["a"]["y"] is tensor


# -- who saves what ----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 8))
def test_what_all_hold_is_saved_exactly_once_and_evenly(sizes: list[int], world_size: int) -> None:
    model = nn.ParameterDict({f"p{i}": nn.Parameter(torch.empty(size)) for i, size in enumerate(sizes)})
    items = items_of(model=model)
    walks = [walk(items, rank=rank, world_size=world_size) for rank in range(world_size)]
    owned = [walked.owned(rank) for rank, walked in enumerate(walks)]
    assert sorted(s.slice.key for share in owned for s in share) == keys(walks[0])
    loads = [sum(s.nbytes for s in share) for share in owned]
    assert max(loads) - min(loads) <= 4 * max(sizes, default=0), "one tensor is the finest share"


def test_small_plain_tensors_are_saved_once_on_each_node() -> None:
    """With them (such as step counters of optimizers), a node's fragment has all that its ranks restore."""
    large = nn.Parameter(torch.zeros(SMALL_TENSOR_BYTES // 4))
    items = items_of(model=nn.ParameterDict({"small": nn.Parameter(torch.zeros(8)), "large": large}))
    nodes = ((0, 1), (2,), (3, 4, 5))
    owned = {
        rank: [s.slice.name for s in walk(items, rank=rank, world_size=6).owned(rank, ranks)]
        for ranks in nodes
        for rank in ranks
    }
    assert [rank for rank, names in owned.items() if "small" in names] == [0, 2, 3]
    assert [rank for rank, names in owned.items() if "large" in names] == [0]


def test_what_may_differ_is_saved_by_each() -> None:
    model = nn.BatchNorm1d(3)
    items = items_of(model=model, own=torch.zeros(2), state={"t": torch.zeros(2)})
    buffers = {"model.running_mean", "model.running_var", "model.num_batches_tracked", "own", "state.t"}
    for rank in range(3):
        owned = {s.slice.key for s in walk(items, rank=rank, world_size=3).owned(rank)}
        assert buffers <= owned


def test_ownership_of_shards_and_replicas_over_a_mesh() -> None:
    """Slices held by different sets of ranks, as in HSDP: each set deals out its own."""

    def live(name: str, offset: int, ranks: tuple[int, ...]) -> LiveSlice:
        part = Slice(item="model", name=name, dtype="F32", global_shape=(8,), offset=(offset,), shape=(4,))
        return LiveSlice(slice=part, tensor=(t := torch.zeros(4)), path=(name,), ranks=ranks, leaf=t)

    found: list[tuple[str, tuple[int, ...]]] = []
    for rank in range(4):
        replicas = (0, 2) if rank % 2 == 0 else (1, 3)
        offset = 0 if rank % 2 == 0 else 4
        slices = tuple(live(name, offset, replicas) for name in "abcd")
        found += [(s.slice.name, s.slice.offset) for s in Walked(slices=slices, trees={}).owned(rank)]
    assert sorted(found) == sorted((name, (offset,)) for name in "abcd" for offset in (0, 4))


@pytest.fixture
def fake_world() -> Iterator[Any]:
    """Become any rank of a world whose collectives do nothing."""

    def become(rank: int, world_size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


def test_dtensors_of_hsdp_are_covered_exactly_once(fake_world: Any) -> None:
    """A 2 x 2 mesh, rows sharded unevenly inside, replicated outside.

    No operation runs on the DTensors: torch caches results by mesh, and here one process is every rank.
    """
    whole = torch.arange(15.0).reshape(5, 3)
    covered = torch.zeros(5, 3)
    for rank in range(4):
        fake_world(rank, 4)
        mesh = init_device_mesh("cpu", (2, 2))
        rows = whole[:3] if rank % 2 == 0 else whole[3:]
        weight = DTensor.from_local(
            rows, mesh, [Replicate(), Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        walked = walk(items_of(state={"weight": weight}), rank=rank, world_size=4)
        (live,) = walked.slices
        assert live.ranks == ((0, 2) if rank % 2 == 0 else (1, 3))
        assert live.slice.global_shape == (5, 3)
        for part in walked.owned(rank):
            (row, column), (height, width) = part.slice.offset, part.slice.shape
            covered[row : row + height, column : column + width] += 1
            assert torch.equal(part.tensor, whole[row : row + height])
    assert torch.equal(covered, torch.ones(5, 3))


@pytest.mark.parametrize("rank, expected", [(0, (0, 1)), (2, (2, 3)), (3, (2, 3))])
def test_a_part_of_a_mesh_has_the_ranks_that_this_rank_sees(
    fake_world: Any, rank: int, expected: tuple[int, ...]
) -> None:
    """Such parts are equal, also as keys of a cache, on ranks that see others."""
    for known in (0, rank):
        fake_world(known, 4)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
        found = holders(DTensor.from_local(torch.zeros(2), mesh, [Replicate()], run_check=False))
    assert found == expected


def test_an_empty_local_part_is_no_slice_and_a_partial_one_is_refused(fake_world: Any) -> None:
    fake_world(1, 2)
    mesh = init_device_mesh("cpu", (2,))
    empty = DTensor.from_local(
        torch.empty(0, 3), mesh, [Shard(0)], run_check=False, shape=torch.Size((1, 3)), stride=(3, 1)
    )
    assert walk(items_of(t=empty), rank=1, world_size=2).slices == ()
    partial = DTensor.from_local(torch.zeros(2), mesh, [Partial()], run_check=False)
    with pytest.raises(UnsupportedLeaf, match=r"^t has placements \(Partial\(sum\),\): .*redistribute"):
        walk(items_of(t=partial), rank=1, world_size=2)


# -- what must be the same everywhere ------------------------------------------------------------------


def test_the_shared_digest_covers_names_shapes_and_optionally_bytes() -> None:
    def shared(model: nn.Module, *, rank: int = 0, content: bool = False) -> str:
        walked = walk(items_of(model=model), rank=rank, world_size=2)
        contents = {s.slice_key: bytes_digest(s.tensor) for s in walked.shared((0, 1))} if content else {}
        return walked.shared_digest((0, 1), contents)

    torch.manual_seed(0)
    one, other = nn.Linear(3, 2), nn.Linear(3, 2)
    assert shared(one) == shared(one, rank=1) == shared(other)
    assert shared(one) != shared(nn.Linear(2, 3)) != shared(nn.Linear(3, 2, bias=False))
    assert shared(one, content=True) == shared(one, rank=1, content=True) != shared(other, content=True)
    norm = nn.BatchNorm1d(3)
    before = shared(norm, content=True)
    norm(torch.randn(4, 3))
    assert shared(norm, content=True) == before, "buffers may differ"
