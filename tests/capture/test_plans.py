"""A save's plan is made once, and follows tensors that are replaced, moved, resized or added."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ray_ckpt.capture.trees import TreeItem
from ray_ckpt.capture.walk import Walked, walk
from ray_ckpt.errors import UnsupportedLeaf
from ray_ckpt.format.tree import encode_tree
from ray_ckpt.trainer.checkpointer import Checkpointer
from tests.capture.local import LocalLink


def _count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of times that an owner is sought for each slice, as its only element."""
    calls, owned = [0], Walked.owned

    def counted(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        return owned(*args, **options)

    monkeypatch.setattr(Walked, "owned", counted)
    return calls


def test_random_state_in_new_tensors_makes_no_new_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    link, tensors = LocalLink(), {f"t{i}": torch.full((3,), float(i)) for i in range(10)}
    ckpt = Checkpointer(link=link, tensors=tensors)
    ckpt.restore()
    ckpt.save(1)
    calls = _count(monkeypatch)
    states = {}
    for step in (2, 3):
        torch.manual_seed(step)
        states[step] = torch.get_rng_state()
        ckpt.save(step)
        ckpt.flush()
    ckpt.close()
    assert calls == [0], "the plan of the first save is that of the others"
    for step, state in states.items():
        assert torch.equal(link.tensors(step)["rank0.rng.torch_cpu"], state)


class _State(TreeItem):
    """State as other frameworks give it: an optimizer's step may change each tensor, as far as is known."""

    def changes_in_step(self, path: tuple[str, ...]) -> bool:
        return True


@pytest.mark.parametrize(("shape", "num_plans"), [((), 0), ((1,), 0), ((5,), 2)])
def test_a_step_count_in_a_new_tensor_makes_no_new_plan(
    shape: tuple[int, ...], num_plans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A larger tensor makes one, as it may be one of an optimizer by now, to be copied beside training."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.grad = torch.ones_like(model.weight)
    link, state = LocalLink(), {"weight": model.weight, "step": torch.full(shape, 1.0)}
    ckpt = Checkpointer(link=link, state=_State(state), model=model, optimizer=optimizer)
    ckpt.restore()
    optimizer.step()
    ckpt.save(1)
    calls, made = _count(monkeypatch), []
    for step in (2, 3):
        made.append(torch.full(shape, float(step)))  # the last one stays, so that this one is in other memory
        state["step"] = made[-1]
        ckpt.save(step)
        state["step"].fill_(-1.0)  # it is copied before `save` returns
        optimizer.step()
        ckpt.flush()
    ckpt.close()
    assert calls == [num_plans]
    for step in (2, 3):
        (saved,) = (tensor for key, tensor in link.tensors(step).items() if key.endswith("state.step"))
        assert torch.equal(saved, torch.full(shape, float(step)))


def _replaced(tensors: dict[str, Any]) -> None:
    tensors["t3"] = torch.full((3,), 33.0)


def _moved(tensors: dict[str, Any]) -> None:
    tensors["t3"].data = torch.full((3,), 34.0)


def _resized(tensors: dict[str, Any]) -> None:
    tensors["t3"].data = torch.full((5, 2), 35.0)


def _of_another_dtype(tensors: dict[str, Any]) -> None:
    tensors["t3"].data = torch.full((3,), 36, dtype=torch.int64)


def _turned(tensors: dict[str, Any]) -> None:
    tensors["t5"].data = tensors["t5"].data.t()


def _of_another_dtype_in_the_same_memory(tensors: dict[str, Any]) -> None:
    tensors["t3"].data = tensors["t3"].data.view(torch.int32)


def _conjugated(tensors: dict[str, Any]) -> None:
    """Only a bit of the tensor is another one."""
    tensors["t6"].data = tensors["t6"].data.conj()


def _negated(tensors: dict[str, Any]) -> None:
    tensors["t3"].data = torch._neg_view(tensors["t3"].data)


def _added(tensors: dict[str, Any]) -> None:
    tensors["new"] = torch.full((7,), 37.0)


def _removed(tensors: dict[str, Any]) -> None:
    del tensors["t3"]


def _swapped(tensors: dict[str, Any]) -> None:
    tensors["t3"], tensors["t4"] = tensors["t4"], tensors["t3"]


def _a_view_of_a_parameter(tensors: dict[str, Any]) -> None:
    tensors["t3"] = tensors["weight of the model"].detach()[0, :3]


@pytest.mark.parametrize(
    "change",
    [
        _replaced,
        _moved,
        _resized,
        _of_another_dtype,
        _of_another_dtype_in_the_same_memory,
        _turned,
        _conjugated,
        _negated,
        _added,
        _removed,
        _swapped,
        _a_view_of_a_parameter,
    ],
)
def test_a_plan_follows_what_has_changed(change: Callable[[dict[str, Any]], None]) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tensors = {f"t{i}": torch.full((3,), float(i)) for i in range(40)}  # a block of them
    tensors["t5"] = torch.arange(9.0).view(3, 3)
    tensors["t6"] = torch.full((3,), 1 + 2j)
    link = LocalLink()
    ckpt = Checkpointer(link=link, tensors=tensors, model=model, optimizer=optimizer)
    ckpt.restore()
    for step in (1, 2):
        ckpt.save(step)
        ckpt.flush()
    given = {**tensors, "weight of the model": model.weight}
    change(given)
    given.pop("weight of the model")
    tensors.clear()
    tensors.update(given)
    ckpt.save(3)
    with torch.no_grad():
        expected = {f"rank0.tensors.{name}": value.clone() for name, value in tensors.items()}
        expected |= {f"model.{name}": value.clone() for name, value in model.named_parameters()}
        expected = {key.replace("rank0.tensors", _prefix(link)): v for key, v in expected.items()}
    ckpt.flush()
    ckpt.close()
    found = {k: v for k, v in link.tensors(3).items() if not k.startswith("rank0.rng")}
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype and torch.equal(found[key], value), key


def _key_is_a_number(tree: dict[str, Any]) -> None:
    tree["inner"] = {(7 if name == "t7" else name): tensor for name, tensor in tree["inner"].items()}


def _renamed(tree: dict[str, Any]) -> None:
    tree["inner"] = {("new" if name == "t7" else name): tensor for name, tensor in tree["inner"].items()}


def _another_object_in_the_same_memory(tree: dict[str, Any]) -> None:
    tree["inner"]["t3"] = tree["inner"]["t3"].detach()


def _other_order(tree: dict[str, Any]) -> None:
    tree["inner"] = dict(reversed(tree["inner"].items()))


def _a_list(tree: dict[str, Any]) -> None:
    tree["inner"] = list(tree["inner"].values())


def _a_tuple_and_a_number(tree: dict[str, Any]) -> None:
    tree["inner"] = (*tree["inner"].values(), 7)


def _first_elsewhere(tree: dict[str, Any]) -> None:
    inner = tree.pop("inner")
    tree.update({"before": [inner["t3"]], "inner": inner})


def _the_same_twice(tree: dict[str, Any]) -> None:
    tree["inner"]["t3"] = tree["inner"]["t4"]


def _nothing(tree: dict[str, Any]) -> None:
    pass


@pytest.mark.parametrize(
    "change",
    [
        _nothing,
        _key_is_a_number,
        _renamed,
        _another_object_in_the_same_memory,
        _other_order,
        _a_list,
        _a_tuple_and_a_number,
        _first_elsewhere,
        _the_same_twice,
    ],
)
def test_a_walk_that_has_seen_a_container_finds_what_a_first_walk_finds(
    change: Callable[[dict[str, Any]], None],
) -> None:
    _compare_walks({"step": 1, "inner": {f"t{i}": torch.full((3,), float(i)) for i in range(40)}}, change)


def _compare_walks(tree: dict[str, Any], change: Callable[[dict[str, Any]], None]) -> Walked:
    """Compare two walks after a change, one of which follows others. Return the last of these."""

    def walked(before: Walked | None) -> Walked:
        return walk({"tree": TreeItem(tree)}, rank=0, world_size=1, before=before)

    first = walked(None)
    assert encode_tree(dict(first.trees), kept=first.kept) == encode_tree(dict(first.trees))
    seen = walked(first)
    assert encode_tree(dict(seen.trees), kept=seen.kept) == encode_tree(dict(seen.trees))
    change(tree)
    tree["step"] = 2
    again, fresh = walked(seen), walked(None)
    assert encode_tree(dict(again.trees), kept=again.kept) == encode_tree(dict(fresh.trees))
    assert [live.slice for live in again.slices] == [live.slice for live in fresh.slices]
    assert again.held.keys() == fresh.held.keys()
    for mine, other in zip(again.slices, fresh.slices, strict=True):
        assert mine.leaf is other.leaf and torch.equal(mine.tensor, other.tensor)
    return seen


def _of_another_inner_dict(tree: dict[str, Any]) -> None:
    tree["state"]["p4"]["exp_avg"] = tree["state"]["p3"].pop("exp_avg")


def _between_inner_dicts(tree: dict[str, Any]) -> None:
    """The tensors, and their inner names, come in the same order."""
    state = tree["state"]
    state["p4"] = {"square": state["p3"].pop("square"), "exp_avg": state["p4"]["exp_avg"]}


def _an_inner_list(tree: dict[str, Any]) -> None:
    tree["state"]["p4"] = [*tree["state"]["p4"].values()]


def _a_number(tree: dict[str, Any]) -> None:
    tree["state"]["p4"]["count"] = 7


def _an_inner_key_is_a_number(tree: dict[str, Any]) -> None:
    tree["state"]["p4"] = {1: tree["state"]["p4"]["exp_avg"]}


def _an_inner_name(tree: dict[str, Any]) -> None:
    tree["state"]["p4"] = {"average": tree["state"]["p4"]["exp_avg"]}


def _an_outer_name(tree: dict[str, Any]) -> None:
    tree["state"] = {("q" if name == "p4" else name): inner for name, inner in tree["state"].items()}


def _an_empty_dict(tree: dict[str, Any]) -> None:
    tree["state"]["p99"] = {}


def _one_less(tree: dict[str, Any]) -> None:
    del tree["state"]["p4"]["exp_avg"]


def _new_memory(tree: dict[str, Any]) -> None:
    tree["state"]["p4"]["exp_avg"].data = torch.full((3,), -1.0)


def _new_dicts(tree: dict[str, Any]) -> None:
    """As an optimizer's state is given in each save."""
    tree["state"] = {name: dict(inner) for name, inner in tree["state"].items()}


@pytest.mark.parametrize(
    "change",
    [
        _new_dicts,
        _of_another_inner_dict,
        _between_inner_dicts,
        _an_inner_list,
        _a_number,
        _an_inner_key_is_a_number,
        _an_inner_name,
        _an_outer_name,
        _an_empty_dict,
        _one_less,
        _new_memory,
    ],
)
@pytest.mark.parametrize("num_names", [2, 20])
def test_a_walk_that_has_seen_dicts_in_a_dict_finds_what_a_first_walk_finds(
    num_names: int, change: Callable[[dict[str, Any]], None]
) -> None:
    """With 20 names the inner dicts are blocks too."""
    names = ("exp_avg", "square", *(f"n{i}" for i in range(2, num_names)))
    state = {f"p{i}": {name: torch.full((3,), float(i)) for name in names} for i in range(40)}
    tree: dict[str, Any] = {"step": 1, "state": state}
    seen = _compare_walks(tree, change)
    assert ("tree", "state") in seen.blocks


@pytest.fixture(params=["its parts", "an empty part of some"])
def dtensors(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """The state of parameters that are cut over 4 ranks, with a step count each; this is the last rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    mesh = init_device_mesh("cpu", (4,))

    def cut(rows: int) -> DTensor:
        here = torch.full((rows // 4, 2), float(rows))
        return DTensor.from_local(
            here, mesh, [Shard(0)], run_check=False, shape=torch.Size((rows, 2)), stride=(2, 1)
        )

    rows = [8] * 40 if request.param == "its parts" else [8] * 39 + [0]
    yield {f"p{i}": {"exp_avg": cut(each), "step": torch.tensor(1.0)} for i, each in enumerate(rows)}
    dist.destroy_process_group()


def _a_new_local_tensor(tree: dict[str, Any]) -> None:
    tree["state"]["p4"]["exp_avg"]._local_tensor = torch.full((2, 2), -1.0)


def _new_memory_of_a_local_tensor(tree: dict[str, Any]) -> None:
    tree["state"]["p4"]["exp_avg"]._local_tensor.data = torch.full((2, 2), -1.0)


def _a_new_dtensor(tree: dict[str, Any]) -> None:
    tree["state"]["p4"]["exp_avg"] = tree["state"]["p4"]["exp_avg"].clone()


def _a_plain_one(tree: dict[str, Any]) -> None:
    tree["state"]["p4"]["exp_avg"] = tree["state"]["p4"]["exp_avg"]._local_tensor


@pytest.mark.parametrize(
    "change",
    [_nothing, _new_dicts, _a_new_local_tensor, _new_memory_of_a_local_tensor, _a_new_dtensor, _a_plain_one],
)
def test_a_walk_that_has_seen_dtensors_finds_what_a_first_walk_finds(
    change: Callable[[dict[str, Any]], None], dtensors: dict[str, Any]
) -> None:
    seen = _compare_walks({"step": 1, "state": dtensors}, change)
    assert ("tree", "state") in seen.blocks


def test_a_name_that_comes_twice_is_refused_beside_a_container_that_is_known() -> None:
    tree: dict[str, Any] = {"inner": {f"t{i}": torch.zeros(3) for i in range(40)}}

    def walked(before: Walked | None) -> Walked:
        return walk({"tree": TreeItem(tree)}, rank=0, world_size=1, before=before)

    seen = walked(None)
    tree.update({"inner.t3": torch.zeros(3), "inner": tree.pop("inner")})
    with pytest.raises(UnsupportedLeaf, match=r"tree\.inner\.t3"):
        walked(seen)


def _prefix(link: LocalLink) -> str:
    """Return the prefix of the keys of the dict's tensors."""
    return next(key for key in link.tensors(1) if key.endswith(".t0")).removesuffix(".t0")
