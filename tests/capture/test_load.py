"""State through files and back, in one process: capture, safetensors and JSON on disk, then `load_items`."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DistributedSampler

from ray_ckpt.capture import walk as walk_module
from ray_ckpt.capture.adapt import adapt
from ray_ckpt.capture.arena import Arena
from ray_ckpt.capture.items import Item
from ray_ckpt.capture.load import load_items
from ray_ckpt.capture.rng import RngItem
from ray_ckpt.capture.walk import DTYPES, LiveSlice, slices_of, walk
from ray_ckpt.errors import MismatchError
from ray_ckpt.format.digest import digest
from ray_ckpt.format.names import make_attempt, shard_file
from ray_ckpt.format.shard import build_rank_layout
from ray_ckpt.format.tree import decode_tree, encode_tree
from ray_ckpt.plan.restore import RowKey, row_key
from ray_ckpt.restore.manifest import ListedRows
from ray_ckpt.restore.reader import FetchRows, FileSource, SharedRows, SourceReader
from ray_ckpt.types import ARENA_PAGE_BYTES, ManifestRow
from tests.restore.test_manifest import row_columns

ATTEMPT = make_attempt(run_uid="0" * 32, session=1, step=10, attempt=0)


@pytest.fixture(autouse=True)
def own_random_state() -> Iterator[None]:
    before = RngItem().tree()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    RngItem().load(before)


def items_of(**objects: Any) -> dict[str, Item]:
    modules = {name: obj for name, obj in objects.items() if isinstance(obj, nn.Module)}
    return {name: adapt(name, obj, modules) for name, obj in objects.items()}


@dataclass(slots=True)
class Saved:
    """A checkpoint in a folder; `world_size` ranks save one after another."""

    folder: Path
    world_size: int = 1
    rows: list[ManifestRow] = field(default_factory=list)
    states: dict[int, Any] = field(default_factory=dict)

    def save(self, items: Mapping[str, Item], *, rank: int = 0, full: bool = False) -> Saved:
        walked = walk(items, rank=rank, world_size=self.world_size)
        owned = {live.slice.key: live for live in walked.owned(rank, full=full)}
        layout = build_rank_layout(live.slice for live in owned.values())
        path = self.folder / f"arena-{rank}"
        path.write_bytes(bytes(ARENA_PAGE_BYTES + layout.size_bytes))
        arena = Arena(str(path))
        arena.lay_out(layout)
        for placed, view in zip(layout.slices, arena.views, strict=True):
            view.copy_(owned[placed.slice.key].tensor)
        arena.seal(ATTEMPT.attempt)
        data, file = path.read_bytes()[ARENA_PAGE_BYTES:], shard_file(rank, self.world_size)
        (self.folder / file).write_bytes(data)
        self.rows += [
            ManifestRow(
                kind="slice",
                file=file,
                byte_offset=placed.byte_offset,
                nbytes=placed.nbytes,
                digest=digest(data[placed.byte_offset : placed.byte_offset + placed.nbytes]),
                slice=placed.slice,
            )
            for placed in layout.slices
        ]
        tree = {"step": 10, "world_size": self.world_size, "items": dict(walked.trees)}
        self.states[rank] = decode_tree(encode_tree(tree))
        return self

    @property
    def files(self) -> list[str]:
        return sorted({row.file for row in self.rows})

    def reader(self, *folders: Path, fetch: FetchRows | None = None) -> SourceReader:
        places = folders or (self.folder,)
        sources = {
            file: tuple(FileSource(tier="local", where=f.name, path=str(f / file)) for f in places)
            for file in self.files
        }
        return SourceReader(ATTEMPT, sources, credentials=None, fetch=fetch)

    def load(
        self,
        items: Mapping[str, Item],
        *,
        reader: SourceReader | None = None,
        rank: int = 0,
        world_size: int | None = None,
        node_ranks: Sequence[int] = (),
    ) -> SourceReader:
        reader = reader or self.reader()
        state = self.states[rank if rank in self.states else 0]
        world_size = world_size or self.world_size
        finish = load_items(
            items,
            state,
            ListedRows(self.rows),
            reader,
            rank=rank,
            world_size=world_size,
            node_ranks=node_ranks,
        )
        if not reader.damage:
            finish()
        return reader

    def damage(self, folder: Path, key: str) -> None:
        """Flip a byte of a tensor in the copy that lies in `folder`."""
        row = next(row for row in self.rows if row.slice and row.slice.key == key)
        data = bytearray((folder / row.file).read_bytes())
        data[row.byte_offset] ^= 1
        (folder / row.file).write_bytes(data)


class Training:
    """Everything a small run has."""

    def __init__(self) -> None:
        self.model: Any = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5)
        self.state: dict[str, Any] = {"epoch": 0, "ema": torch.zeros(2), "best": [float("inf"), None]}

    @property
    def items(self) -> dict[str, Item]:
        named = items_of(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, state=self.state
        )
        return {**named, "rng": RngItem()}

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            loss = self.model(torch.randn(16, 6)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.state["epoch"] += 1
            losses.append(loss.item())
            self.state["ema"].mul_(0.9).add_(losses[-1])
            self.state["best"][0] = min(self.state["best"][0], losses[-1] + random.random())
        return losses

    def everything(self) -> list[Any]:
        optimizer = self.optimizer.state_dict()
        states = [v for s in optimizer["state"].values() for v in s.values()]
        tensors = [*self.model.state_dict().values(), *states, self.state["ema"]]
        return [*(t.tolist() for t in tensors), optimizer["param_groups"], self.scheduler.state_dict()]


def test_a_run_continues_on_exactly_its_trajectory(tmp_path: Path) -> None:
    first = Training()
    first.train(5)
    saved = Saved(tmp_path).save(first.items)
    losses = first.train(5)

    torch.manual_seed(99)
    second = Training()
    assert not second.optimizer.state, "a fresh optimizer has no state to fill"
    reader = saved.load(second.items)
    assert not reader.damage and not reader.rejected
    assert second.state["epoch"] == 5
    assert second.train(5) == losses, "dropout and data continue where they were"
    assert second.everything() == first.everything()


def test_tensors_are_restored_in_place(tmp_path: Path) -> None:
    first, second = Training(), Training()
    first.train(2)
    second.train(1)
    places = [t.data_ptr() for t in second.model.state_dict().values()]
    moments = second.optimizer.state[second.model[0].weight]["exp_avg"]
    Saved(tmp_path).save(first.items).load(second.items)
    assert [t.data_ptr() for t in second.model.state_dict().values()] == places
    assert second.optimizer.state[second.model[0].weight]["exp_avg"] is moments
    assert second.everything() == first.everything()


def test_tensors_of_an_earlier_walk_are_not_cut_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Training(), Training()
    first.train(2)
    saved = Saved(tmp_path).save(first.items)
    items = second.items
    before = walk(items, rank=0, world_size=1)
    second.state["ema"] = torch.zeros(2)  # has moved since
    cut: list[str] = []

    def counted(leaf: Any, *, item: str, **place: Any) -> Iterator[LiveSlice]:
        cut.append(item)
        return slices_of(leaf, item=item, **place)

    monkeypatch.setattr(walk_module, "slices_of", counted)
    reader = saved.reader()
    load_items(items, saved.states[0], ListedRows(saved.rows), reader, rank=0, world_size=1, before=before)()
    assert not reader.damage and second.everything() == first.everything()
    assert "state" in cut and not {"model", "optimizer"} & set(cut)


def test_training_goes_on_after_a_restore_in_inference_mode(tmp_path: Path) -> None:
    run = Training()
    run.train(1)
    saved = Saved(tmp_path).save(run.items)
    losses = run.train(3)
    there = Training()
    with torch.inference_mode():
        saved.load(there.items)
    assert there.train(3) == losses


def test_every_byte_is_read_once_and_counted(tmp_path: Path) -> None:
    training = Training()
    training.train(1)
    saved = Saved(tmp_path).save(training.items)
    reader = saved.load(Training().items)
    assert sum(part.size_bytes for part in reader.parts) == sum(row.nbytes for row in saved.rows)
    assert {(part.tier, part.where) for part in reader.parts} == {("local", tmp_path.name)}


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_a_save_and_keep_their_own(tmp_path: Path, world_size: int) -> None:
    training = Training()
    training.train(2)
    saved = Saved(tmp_path, world_size)
    own = []
    for rank in range(world_size):
        with torch.no_grad():
            training.model[1].running_mean.fill_(rank)
        torch.manual_seed(rank)
        saved.save(training.items, rank=rank)
        own.append(torch.rand(3).tolist())
    weights = [row for row in saved.rows if row.slice and row.slice.key == "model.0.weight"]
    assert len(weights) == 1, "one replica saves it"
    for rank in range(world_size):
        other = Training()
        saved.load(other.items, rank=rank)
        assert torch.equal(other.model[0].weight, training.model[0].weight)
        assert other.model[1].running_mean.tolist() == [rank] * 8
        assert torch.rand(3).tolist() == own[rank]


OWN: list[list[torch.Tensor]] = [
    [torch.full((3,), 1.0), torch.full((5,), 2.0)],  # by rank
    [torch.full((3,), 1.0), torch.zeros(0)],
    [torch.full((3,), 1.0), torch.full((2, 2), 2.0)],
    [torch.full((3,), 1.0), torch.full((3,), 2)],
]


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("is_built", [False, True])
@pytest.mark.parametrize("in_columns", [False, True])
def test_tensors_of_ranks_may_have_different_shapes_and_dtypes(
    tmp_path: Path, own: list[torch.Tensor], is_built: bool, in_columns: bool
) -> None:
    """Such as samples that each rank has collected. A list that is built empty has no shape to compare."""
    saved = Saved(tmp_path, 2)
    for rank in range(2):
        saved.save(items_of(state={"x": [own[rank]]}), rank=rank)
    by_rank = [[row for row in saved.rows if row.file == file] for file in saved.files]
    rows = row_columns(by_rank) if in_columns else ListedRows(saved.rows)
    for rank in range(2):
        state = {"x": [torch.zeros_like(own[rank])] if is_built else []}
        load = partial(load_items, items_of(state=state), saved.states[rank], rows)
        load(saved.reader(), rank=rank, world_size=2)()
        (found,) = state["x"]
        assert torch.equal(found, own[rank]) and found.dtype == own[rank].dtype
    wrong = items_of(state={"x": [torch.zeros_like(own[0])[None]]})
    with pytest.raises(MismatchError, match=r"state\.x\.0: .* in the checkpoint, .* here"):
        load_items(wrong, saved.states[1], rows, saved.reader(), rank=1, world_size=2)


def test_more_ranks_than_saved_get_the_shared_state(tmp_path: Path) -> None:
    training = Training()
    training.train(2)
    saved = Saved(tmp_path, 2)
    for rank in range(2):
        saved.save(training.items, rank=rank)
    other = Training()
    items = {name: item for name, item in other.items.items() if name != "rng"}
    saved.load(items, rank=3, world_size=4)
    assert other.everything() == training.everything()


# -- what does not fit -------------------------------------------------------------------------------


def test_differences_are_listed_before_anything_is_read(tmp_path: Path) -> None:
    saved = Saved(tmp_path).save(items_of(model=nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))))
    other = nn.Sequential(nn.Linear(4, 5), nn.Linear(3, 2, dtype=torch.float64), nn.Linear(2, 2))
    before = {k: v.clone() for k, v in other.state_dict().items()}
    reader = saved.reader()
    with pytest.raises(MismatchError) as caught:
        saved.load(items_of(model=other), reader=reader)
    assert set(caught.value.fields["problems"]) == {
        "model.0.weight: shape (3, 4) in the checkpoint, (5, 4) here",
        "model.0.bias: shape (3,) in the checkpoint, (5,) here",
        "model.1.weight: dtype F32 in the checkpoint, F64 here",
        "model.1.bias: dtype F32 in the checkpoint, F64 here",
        "model.2.weight: not in the checkpoint",
        "model.2.bias: not in the checkpoint",
    }
    assert "6 differences" in str(caught.value) and "model.2.bias" in str(caught.value)
    assert not reader.parts
    assert all(torch.equal(v, before[k]) for k, v in other.state_dict().items())


def test_a_parameter_that_is_gone_here_is_a_difference(tmp_path: Path) -> None:
    saved = Saved(tmp_path).save(items_of(model=nn.Linear(4, 3)))
    with pytest.raises(MismatchError, match=r"model\.bias"):
        saved.load(items_of(model=nn.Linear(4, 3, bias=False)))


class Named(nn.Module):
    """A body, and a head under the given name."""

    def __init__(self, name: str, width: int = 2) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.add_module(name, nn.Linear(2, width))


def test_a_renamed_layer_is_a_difference_of_the_model_alone(tmp_path: Path) -> None:
    def items(name: str, groups: int = 1) -> dict[str, Item]:
        model = Named(name)
        params = list(model.parameters())
        each = [{"params": params[: len(params) // groups]}, {"params": params[len(params) // groups :]}]
        return items_of(model=model, optimizer=torch.optim.AdamW(each[:groups], lr=0.1))

    saved = Saved(tmp_path).save(items("head"))
    with pytest.raises(MismatchError) as caught:
        saved.load(items("cls"))
    assert caught.value.fields["problems"] == (
        "model.head.weight: in the checkpoint, not in the model",
        "model.head.bias: in the checkpoint, not in the model",
        "model.cls.weight: not in the checkpoint",
        "model.cls.bias: not in the checkpoint",
    )
    assert "load_state_dict" in caught.value.hint and "init_from" in caught.value.hint
    assert "anew" not in caught.value.hint
    with pytest.raises(MismatchError, match=r"5 differences: .*optimizer: its groups have other") as caught:
        saved.load(items("cls", groups=2))
    assert "load_state_dict" in caught.value.hint and 'anew=("optimizer",)' in caught.value.hint


def test_one_difference_is_a_singular(tmp_path: Path) -> None:
    saved = Saved(tmp_path).save(items_of(model=nn.Linear(2, 2, bias=False)))
    with pytest.raises(MismatchError, match=r"does not fit, 1 difference: model\.weight: shape") as caught:
        saved.load(items_of(model=nn.Linear(2, 3, bias=False)))
    assert "load_state_dict" in caught.value.hint


def test_names_of_other_wrappers_are_left_out_if_no_two_become_one(tmp_path: Path) -> None:
    state = {"module._orig_mod.weight": torch.ones(1, 1), "module.bias": torch.ones(1)}
    model = nn.Linear(1, 1)
    Saved(tmp_path).save(items_of(model=state)).load(items_of(model=model))
    assert model.weight.item() == model.bias.item() == 1
    clash = Saved(tmp_path).save(items_of(model={**state, "module.weight": torch.ones(1, 1)}))
    for other in (clash, Saved(tmp_path).save(items_of(model={1: torch.ones(1)}))):
        with pytest.raises(MismatchError, match=r"model\.weight: not in the checkpoint"):
            other.load(items_of(model=model))
    inner = nn.ModuleDict({"module": nn.Linear(1, 1)})
    saved = Saved(tmp_path).save(items_of(model=inner))
    saved.load(items_of(model=nn.ModuleDict({"module": nn.Linear(1, 1)})))


def test_other_items_are_named(tmp_path: Path) -> None:
    saved = Saved(tmp_path).save(items_of(model=nn.Linear(1, 1), state={"a": 1}))
    with pytest.raises(MismatchError, match=r"lacks 'ema', .* It has 'state', which is not reg") as caught:
        saved.load(items_of(model=nn.Linear(1, 1), ema={"a": 1}))
    assert 'anew=("ema", "state")' in caught.value.hint and "another name" in caught.value.hint
    assert caught.value.fields == {"missing": ("ema",), "unexpected": ("state",)}


def test_gradients_of_a_window_are_no_item_to_leave_out(tmp_path: Path) -> None:
    saved = Saved(tmp_path).save(items_of(model=nn.Linear(1, 1), gradients={"a": 1}))
    load = partial(load_items, items_of(model=nn.Linear(1, 1)), saved.states[0], ListedRows(saved.rows))
    with pytest.raises(MismatchError, match="has 'gradients', which is not registered here") as caught:
        load(saved.reader(), rank=0, world_size=1, anew=("gradients",))
    assert "partial_grads=True" in caught.value.hint and "anew" not in caught.value.hint


class Counts(torch.optim.SGD):
    """An optimizer with state of its own."""

    def step(self, closure: Any = None) -> None: ...  # type: ignore[override]


def test_a_tensor_at_several_places_is_one_tensor_again(tmp_path: Path) -> None:
    """As a count that an optimizer keeps once for all parameters; torch's own save and load keep it too."""
    count, model = torch.ones(()), nn.Linear(2, 2)
    optimizer = Counts(model.parameters(), lr=0.1)
    for param in model.parameters():
        optimizer.state[param] = {"count": count, "own": count.clone()}
    more = {"x": [count, count]}
    saved = Saved(tmp_path).save(items_of(model=model, optimizer=optimizer, more=more))
    other, fresh = nn.Linear(2, 2), {"x": list[torch.Tensor]()}
    later = Counts(other.parameters(), lr=0.1)
    saved.load(items_of(model=other, optimizer=later, more=fresh))
    one, two = (later.state[param] for param in other.parameters())
    assert one["count"] is two["count"] and one["count"] == 1 and one["own"] is not two["own"]
    assert fresh["x"][0] is fresh["x"][1] and fresh["x"][0] is not one["count"]


def test_other_parameter_groups_leave_the_model_as_it_was(tmp_path: Path) -> None:
    """A misfit is found before any byte is read, as the docstring of `load_items` promises."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = Saved(tmp_path).save(items_of(model=model, optimizer=optimizer))
    other = nn.Linear(2, 2)
    groups: list[dict[str, Any]] = [{"params": [other.weight]}, {"params": [other.bias]}]
    before = other.weight.detach().clone()
    with pytest.raises(MismatchError, match="its groups have other parameters"):
        saved.load(items_of(model=other, optimizer=torch.optim.SGD(groups, lr=0.1)))
    assert torch.equal(other.weight, before)


def test_an_item_of_another_kind_is_a_difference(tmp_path: Path) -> None:
    """Otherwise a tensor would stay as built without a word, and others would raise a KeyError."""
    model = nn.Linear(2, 2)
    objects: dict[str, Any] = {
        "module": nn.Linear(3, 3),
        "optimizer": torch.optim.AdamW(model.parameters()),
        "tensor": torch.ones(2),
        "dict": {"a": 1},
        "list": [1, 2],
        "scaler": torch.amp.GradScaler("cpu"),
        "sampler": DistributedSampler(range(8), num_replicas=1, rank=0),  # type: ignore[arg-type]
        "generator": np.random.default_rng(0),
    }
    for kind, obj in objects.items():
        folder = tmp_path / kind
        folder.mkdir()
        saved = Saved(folder).save(items_of(model=model, x=obj))
        for other, live in objects.items():
            if other != kind:
                with pytest.raises(MismatchError, match=r"x\.|x:"):
                    saved.load(items_of(model=model, x=live))


def test_another_tree_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    saved = Saved(tmp_path).save(items_of(model=nn.Linear(2, 2), state={"a": 1}))
    other = nn.Linear(2, 2)
    before = other.weight.detach().clone()
    with pytest.raises(MismatchError, match=r"state\.b: not in the checkpoint.*anew=\(\"state\",\)"):
        saved.load(items_of(model=other, state={"b": 1}))
    assert torch.equal(other.weight, before)


def test_tensors_that_training_has_added_to_an_empty_container_come_back(tmp_path: Path) -> None:
    state = {"best": {"w": torch.arange(3.0)}, "history": [(1, torch.ones(2)), {"x": torch.zeros(0)}]}
    saved = Saved(tmp_path).save(items_of(state=state))
    fresh: dict[str, Any] = {"best": {}, "history": []}
    saved.load(items_of(state=fresh))
    assert str(fresh) == str(state)


GROWN = [
    (None, {"w": torch.ones(2), "step": 3}),
    ({"a": 1}, {"a": 2, "best": torch.ones(2)}),
    (torch.zeros(2), torch.ones(5)),
    (torch.zeros(2, 3), torch.ones(4, 3)),
    (torch.zeros(0), torch.ones(4, 3)),
    (torch.zeros(0), torch.ones(2, dtype=torch.int64)),
    ([torch.zeros(1), None], [torch.ones(2), [torch.ones(3)]]),
]


@pytest.mark.parametrize(("built", "grown"), GROWN)
def test_tensors_that_training_has_added_or_extended_come_back(
    tmp_path: Path, built: Any, grown: Any
) -> None:
    saved, fresh = Saved(tmp_path).save(items_of(state={"x": grown})), {"x": built}
    saved.load(items_of(state=fresh))
    assert str(fresh) == str({"x": grown})


OTHERS = [
    ({"a": torch.zeros(2)}, {"a": torch.ones(2), "b": torch.ones(2)}, "x.b: in the checkpoint, not here"),
    ({"a": torch.zeros(2), "b": 1}, {"b": 1}, "x.a: not in the checkpoint"),
    ({"a": torch.zeros(2)}, None, "x: has another structure"),
    ([torch.zeros(2)], [torch.ones(2)] * 2, "x: has another structure"),
    (torch.zeros(2), torch.ones(5, dtype=torch.int64), "x: "),
    (torch.zeros(3), torch.ones(2), r"x: shape \(2,\) in the checkpoint"),
    (torch.zeros(2, 3), torch.ones(4, 2), r"x: shape \(4, 2\) in the checkpoint"),
    (torch.zeros(2), torch.ones(2, 2), r"x: shape \(2, 2\) in the checkpoint"),
    (torch.zeros(2, requires_grad=True), torch.ones(3), r"x: shape \(3,\) in the checkpoint"),
]


@pytest.mark.parametrize(("built", "other", "message"), OTHERS)
def test_other_tensors_are_differences(tmp_path: Path, built: Any, other: Any, message: str) -> None:
    saved = Saved(tmp_path).save(items_of(state={"x": other}))
    with pytest.raises(MismatchError, match=rf"state\.{message}"):
        saved.load(items_of(state={"x": built}))


def test_arrays_and_sets_are_filled_in_place(tmp_path: Path) -> None:
    """A loop writes to them under its own names."""

    def built() -> tuple[list[np.ndarray], set[int], dict[str, Any]]:
        arrays, seen = [np.zeros((2, 3), dtype="f4")[:, ::2], np.zeros(2), np.zeros(3, "S4")], set[int]()
        pair = (arrays[1], 1)
        return (
            arrays,
            seen,
            {"obs": arrays[0], "pair": pair, "more": [arrays[2], {"seen": seen}, torch.zeros(1)]},
        )

    arrays, seen, state = built()
    arrays[0][:], arrays[1][:], arrays[2][:] = 3, (math.nan, -0.0), b"ab"
    seen.update((1, 5))
    saved = Saved(tmp_path).save(items_of(state=state))
    arrays, seen, fresh = built()
    saved.load(items_of(state=fresh))
    assert str(fresh) == str(state)
    assert fresh["obs"] is arrays[0] and fresh["pair"][0] is arrays[1] and fresh["more"][0] is arrays[2]
    assert fresh["more"][1]["seen"] is seen == {1, 5}


def test_what_shares_memory_only_before_the_restore_gets_its_own_values(tmp_path: Path) -> None:
    """As items that are built from one constant, and an array from which a tensor was made."""
    items = items_of(
        obs={"mean": np.full(2, 1.0), "seen": {1}},
        rew={"mean": np.full(2, 2.0), "seen": {2}},
        both={"tensor": torch.ones(3), "array": np.full(3, 2.0, np.float32)},
    )
    saved = Saved(tmp_path).save(items)
    zeros, seen, array = np.zeros(2), set[int](), np.zeros(3, np.float32)
    obs: dict[str, Any] = {"mean": zeros, "seen": seen}
    rew: dict[str, Any] = {"mean": zeros, "seen": seen}
    both: dict[str, Any] = {"tensor": torch.from_numpy(array), "array": array}
    saved.load(items_of(obs=obs, rew=rew, both=both))
    assert [obs["mean"].tolist(), rew["mean"].tolist()] == [[1.0, 1.0], [2.0, 2.0]]
    assert [obs["seen"], rew["seen"]] == [{1}, {2}]
    assert [both["tensor"].tolist(), both["array"].tolist()] == [[1.0] * 3, [2.0] * 3]


def test_arrays_in_a_defaultdict_that_has_met_more_are_filled_in_place(tmp_path: Path) -> None:
    saved = Saved(tmp_path).save(items_of(met=defaultdict(list, {"a": np.ones(2), "b": {"c": np.ones(1)}})))
    a, c = np.zeros(2), np.zeros(1)
    live: dict[str, Any] = defaultdict(list, {"more": 1, "a": a, "b": {"c": c}})
    saved.load(items_of(met=live))
    assert live == {"a": a, "b": {"c": c}} and live["a"] is a and live["b"]["c"] is c
    assert (a.tolist(), c.tolist()) == ([1.0, 1.0], [1.0])


def test_arrays_that_cannot_be_filled_are_replaced(tmp_path: Path) -> None:
    same, fixed = np.zeros(2), np.zeros(2)
    fixed.flags.writeable = False
    fresh: dict[str, Any] = {
        "one": same,
        "two": same,
        "fixed": fixed,
        "rows": np.zeros(2),
        "kind": np.zeros(2),
    }
    fresh |= {"list": [np.zeros(2)], "none": np.zeros(2), "set": {1}}
    state = {
        "one": np.ones(2),
        "two": np.full(2, 2.0),
        "fixed": np.ones(2),
        "rows": np.ones(3),
        "kind": np.ones(2, "f4"),
        "list": [np.ones(2), np.ones(1)],
        "none": None,
        "set": frozenset({2}),
    }
    first = fresh["list"][0]
    Saved(tmp_path).save(items_of(state=state)).load(items_of(state=fresh))
    assert str(fresh) == str(state)
    assert fresh["list"][0] is first and not fixed.any()


def test_a_bytearray_is_filled_in_place(tmp_path: Path) -> None:
    seen, fresh = bytearray(2), bytearray(2)
    state = {"seen": bytearray(b"abc"), "more": [bytearray(b"d")], "plain": {"n": 1}}
    saved = Saved(tmp_path).save(items_of(state=state, marks=bytearray(b"xyz")))
    live: dict[str, Any] = {"seen": seen, "more": [], "plain": {"n": 0}}
    saved.load(items_of(state=live, marks=fresh))
    assert live == state
    assert live["seen"] is seen and fresh == b"xyz"
    with pytest.raises(MismatchError, match="marks"):
        saved.load(items_of(state=live, marks=[1]))
    with pytest.raises(MismatchError, match=r"state\.plain: has another structure"):
        saved.load(items_of(state={**live, "plain": bytearray(1)}, marks=fresh))
    with pytest.raises(MismatchError, match="state: "):
        saved.load(items_of(state=bytearray(1), marks=fresh))


def test_a_tensor_under_an_empty_key_comes_back(tmp_path: Path) -> None:
    saved = Saved(tmp_path).save(items_of(state={"": torch.ones(2), "a": {"": torch.ones(3)}}))
    fresh = {"": torch.zeros(2), "a": {"": torch.zeros(3)}}
    saved.load(items_of(state=fresh))
    assert str(fresh) == str({"": torch.ones(2), "a": {"": torch.ones(3)}})


def test_a_tensor_whose_elements_share_memory_is_a_difference(tmp_path: Path) -> None:
    saved = Saved(tmp_path).save(items_of(state={"x": torch.arange(12.0).view(3, 4)}))
    with pytest.raises(MismatchError, match=r"state\.x: .* share memory.*clone"):
        saved.load(items_of(state={"x": torch.zeros(3, 1).expand(3, 4)}))
    for fine in (torch.zeros(4).expand(1, 4), torch.zeros(0, 1).expand(0, 3)):
        Saved(tmp_path).save(items_of(state=fine)).load(items_of(state=fine))


def test_tensors_in_the_same_memory_need_the_same_bytes(tmp_path: Path) -> None:
    """Otherwise one of them would silently get the bytes of the other."""
    saved = Saved(tmp_path).save(items_of(state={"a": torch.ones(4), "b": torch.zeros(4)}))
    memory = torch.full((4,), 5.0)
    with pytest.raises(MismatchError, match=r"state\.b: has the memory of state\.a here, and other bytes"):
        saved.load(items_of(state={"a": memory, "b": memory.view(2, 2).view(4)}))
    assert memory.tolist() == [5.0] * 4
    equal = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.zeros(0), "d": torch.zeros(0)}
    empty = torch.zeros(0)
    Saved(tmp_path).save(items_of(state=equal)).load(
        items_of(state={"a": memory, "b": memory.detach(), "c": empty, "d": empty.detach()})
    )
    assert memory.tolist() == [1.0] * 4
    turned = {"a": torch.tensor([1 + 2j]), "b": torch.tensor([1 - 2j])}
    live = torch.zeros(1, dtype=torch.complex64)
    Saved(tmp_path).save(items_of(state=turned)).load(items_of(state={"a": live, "b": live.conj()}))
    assert torch.equal(live, turned["a"])
    wrapped = {name: AsyncCollectiveTensor(torch.zeros(2)) for name in "ab"}
    apart = {"a": torch.ones(2), "b": torch.zeros(2)}
    Saved(tmp_path).save(items_of(state=apart)).load(items_of(state=wrapped))
    assert all(torch.equal(wrapped[name] + 0, apart[name]) for name in "ab")


def test_optimizer_state_that_was_not_saved_does_not_stay(tmp_path: Path) -> None:
    """Otherwise the restored run would continue with the moments of another run."""
    fresh, used = Training(), Training()
    saved = Saved(tmp_path).save(fresh.items)
    used.train(2)
    try:
        saved.load(used.items)
    except MismatchError:
        return
    assert not used.optimizer.state


# -- kinds of tensors --------------------------------------------------------------------------------


def test_every_kind_of_tensor_comes_back(tmp_path: Path) -> None:
    def state(fill: bool) -> dict[str, torch.Tensor]:
        made = {}
        for name, dtype in DTYPES.items():
            for shape in ((), (0, 2), (5,), (3, 4)):
                values = torch.arange(1, 1 + math.prod(shape)).view(shape) if fill else torch.zeros(shape)
                made[f"{name}{len(shape)}{math.prod(shape)}"] = values.to(dtype)
        image = torch.rand(2, 3, 4, 4) if fill else torch.zeros(2, 3, 4, 4)
        made["channels_last"] = image.to(memory_format=torch.channels_last)
        made["column"] = (torch.rand(6, 6) if fill else torch.zeros(6, 6))[:, 2]
        return made

    first, second = state(True), state(False)
    places = [tensor.data_ptr() for tensor in second.values()]
    reader = Saved(tmp_path).save(items_of(state=first)).load(items_of(state=second))
    assert not reader.damage and not reader.rejected
    for name, tensor in second.items():
        assert tensor.dtype == first[name].dtype
        right, got = (t.contiguous().reshape(-1).view(torch.uint8) for t in (first[name], tensor))
        assert torch.equal(right, got), name
    assert [tensor.data_ptr() for tensor in second.values()] == places


@pytest.fixture
def fake_world() -> Iterator[Any]:
    """A process group of any size in this one process."""

    def become(rank: int, world_size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("here", [(4, 1), (2, 2), (1, 4)])
def test_dtensors_are_filled_in_place_at_another_mesh(
    tmp_path: Path, fake_world: Any, here: tuple[int, int]
) -> None:
    """Saved by 2 ranks with uneven rows, restored by 4 in a replicated by sharded mesh.

    No operation runs on the DTensors: torch caches results by mesh, and here one process is every rank.
    """
    whole = torch.arange(35.0).reshape(7, 5)
    saved = Saved(tmp_path, 2)
    for rank in range(2):
        fake_world(rank, 2)
        rows = whole.chunk(2)[rank].clone()
        saved.save(items_of(state={"w": dtensor(rows, (2,), [Shard(0)])}), rank=rank)
    for rank in range(4):
        fake_world(rank, 4)
        mine = whole.chunk(here[1])
        column = rank % here[1]
        local = torch.zeros_like(mine[column]) if column < len(mine) else torch.zeros(0, 5)
        live = dtensor(local, here, [Replicate(), Shard(0)])
        requested: list[Mapping[RowKey, tuple[int, ...]]] = []

        def fetch(wants: Any, _: Any, requested: list[Any] = requested) -> SharedRows:
            requested.append(wants)
            return refuse(wants)

        reader = saved.reader(fetch=fetch)
        items = items_of(state={"w": live})
        saved.load(items, reader=reader, rank=rank, world_size=4, node_ranks=range(4))
        assert torch.equal(local, mine[column])
        wanted = {place: ranks for wants in requested for place, ranks in wants.items()}
        assert wanted == sharing(saved.rows, rank, here[1])


def sharing(rows: list[ManifestRow], rank: int, columns: int) -> dict[RowKey, tuple[int, ...]]:
    """Return the rows of which `rank` of four wants a part, and the other ranks that want one."""
    chunks = torch.arange(7).chunk(columns)
    found = {}
    for row in rows:
        if row.slice is not None and len(row.slice.shape) == 2:
            (first, _), (count, _) = row.slice.offset, row.slice.shape
            held = {k for k in range(4) if k % columns < len(chunks)}
            held = {k for k in held if set(chunks[k % columns].tolist()) & set(range(first, first + count))}
            if rank in held and len(held) > 1:
                found[row_key(row)] = tuple(sorted(held))
    return found


def dtensor(local: torch.Tensor, shape: tuple[int, ...], placements: list[Any]) -> Any:
    return DTensor.from_local(
        local,
        init_device_mesh("cpu", shape),
        placements,
        run_check=False,
        shape=torch.Size((7, 5)),
        stride=(5, 1),
    )


def refuse(wants: Mapping[RowKey, tuple[int, ...]]) -> SharedRows:
    return SharedRows(refused=tuple(wants))


def test_only_rows_that_ranks_hold_in_common_are_requested_from_the_agent(tmp_path: Path) -> None:
    training = Training()
    training.train(1)
    saved = Saved(tmp_path, 2)
    for rank in range(2):
        saved.save(training.items, rank=rank)
    requested: set[RowKey] = set()
    rank_sets: set[tuple[int, ...]] = set()

    def fetch(wants: Mapping[RowKey, tuple[int, ...]], taken: tuple[RowKey, ...]) -> SharedRows:
        requested.update(wants)
        rank_sets.update(wants.values())
        return refuse(wants)

    saved.load(Training().items, reader=saved.reader(fetch=fetch), rank=1, node_ranks=(0, 1, 5))
    keys = {row.slice.key for row in saved.rows if row.slice and row_key(row) in requested}
    parameters = {f"model.{name}" for name, _ in training.model.named_parameters()}
    assert {key for key in keys if key.startswith("model.")} == parameters, "no buffers"
    assert "optimizer.state.0.weight.exp_avg" in keys
    assert not [key for key in keys if key.startswith(("state", "rank"))]
    assert rank_sets == {(0, 1)}


def test_a_row_of_which_each_rank_has_a_copy_is_read_by_each_rank_alone(tmp_path: Path) -> None:
    """A rank that has none reads the copy of the first rank, together with that rank."""
    training = Training()
    training.train(1)
    saved = Saved(tmp_path, 3)
    for rank in range(3):
        saved.save(training.items, rank=rank, full=True)
    weight, lacking = "model.0.weight", shard_file(2, 3)
    saved.rows = [r for r in saved.rows if not (r.slice and r.slice.key == weight and r.file == lacking)]
    for rank in range(3):
        requested: dict[RowKey, tuple[int, ...]] = {}

        def fetch(wants: Any, _: Any, requested: dict[Any, Any] = requested) -> SharedRows:
            requested.update(wants)
            return refuse(wants)

        saved.load(Training().items, reader=saved.reader(fetch=fetch), rank=rank, node_ranks=range(3))
        (row,) = (r for r in saved.rows if r.file == shard_file(0, 3) and r.slice and r.slice.key == weight)
        assert requested == ({} if rank == 1 else {row_key(row): (0, 2)})


# -- damage ------------------------------------------------------------------------------------------


@pytest.fixture
def two_copies(tmp_path: Path) -> tuple[Training, Saved, Path, Path]:
    """A checkpoint on two disks."""
    training = Training()
    training.train(3)
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    saved = Saved(one).save(training.items)
    for file in saved.files:
        (two / file).write_bytes((one / file).read_bytes())
    return training, saved, one, two


def test_a_damaged_tensor_comes_from_the_next_source(
    two_copies: tuple[Training, Saved, Path, Path],
) -> None:
    training, saved, one, two = two_copies
    saved.damage(one, "model.0.weight")
    other = Training()
    reader = saved.load(other.items, reader=saved.reader(one, two))
    assert other.everything() == training.everything()
    assert not reader.damage
    assert len(reader.rejected) == 1 and "model.0.weight" in reader.rejected[0]
    assert [(part.where, part.size_bytes) for part in reader.parts][1] == ("two", 6 * 8 * 4)


@pytest.mark.parametrize("harm", ["truncated", "missing", "a folder"])
def test_a_source_that_ends_or_is_gone_gives_way(
    two_copies: tuple[Training, Saved, Path, Path], harm: str
) -> None:
    training, saved, one, two = two_copies
    path = one / saved.files[0]
    data = path.read_bytes()
    path.unlink()
    if harm == "truncated":
        path.write_bytes(data[:-100])
    elif harm == "a folder":
        path.mkdir()
    other = Training()
    reader = saved.load(other.items, reader=saved.reader(one, two))
    assert other.everything() == training.everything()
    assert reader.rejected and not reader.damage


def test_without_an_intact_source_the_damage_is_named_and_nothing_loaded(
    two_copies: tuple[Training, Saved, Path, Path],
) -> None:
    _, saved, one, two = two_copies
    for folder in (one, two):
        saved.damage(folder, "model.0.weight")
    other = Training()
    reader = saved.load(other.items, reader=saved.reader(one, two))
    assert reader.damage == [f"{saved.files[0]}: model.0.weight[0:8, 0:6]"]
    assert other.state["epoch"] == 0 and not other.optimizer.state


def test_an_arena_is_a_source_while_its_seal_is_the_attempts(
    two_copies: tuple[Training, Saved, Path, Path],
) -> None:
    training, saved, one, _ = two_copies

    def reader() -> SourceReader:
        memory = FileSource(tier="memory", where="here", path=str(one / "arena-0"))
        return SourceReader(ATTEMPT, dict.fromkeys(saved.files, (memory,)), credentials=None)

    other = Training()
    assert not saved.load(other.items, reader=reader()).damage
    assert other.everything() == training.everything()

    data = bytearray((one / "arena-0").read_bytes())
    data[:16] = b"fedcba9876543210"
    (one / "arena-0").write_bytes(data)
    late = saved.load(Training().items, reader=reader())
    assert len(late.damage) == len(saved.rows)
    assert "newer capture" in late.rejected[0]


class OnDevice(torch.Tensor):
    """A tensor that says it is on another device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("meta")


class Moves(TorchFunctionMode):
    """Notes the tensors that are moved to that device, and leaves them where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to and args[1] == torch.device("meta"):
            self.moved.append(args[0])
            return args[0]
        return func(*args, **(kwargs or {}))


class Average:
    """A user's object that keeps the tensors which it is given."""

    def __init__(self, tensor: torch.Tensor | None) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]


def test_new_tensors_of_an_object_are_on_the_device_of_the_live_ones(tmp_path: Path) -> None:
    saved = Saved(tmp_path).save(items_of(average=Average(torch.ones(3))))
    for built, is_moved in (
        (torch.zeros(3).as_subclass(OnDevice), True),
        (torch.zeros(3), False),
        (None, False),
    ):
        live = Average(built)
        with Moves() as moves:
            saved.load(items_of(average=live))
        assert live.tensor is not None and live.tensor.tolist() == [1.0] * 3
        assert any(tensor is live.tensor for tensor in moves.moved) == is_moved
