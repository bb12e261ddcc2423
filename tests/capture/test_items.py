"""Items: names, adapters, and what they refuse."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from ray_ckpt.capture.items import (
    ModuleItem,
    OptimizerItem,
    StatefulItem,
    TensorItem,
    TreeItem,
    adapt,
    clean_name,
    parameter_names,
    unwrap,
)
from ray_ckpt.capture.predict import predicted_state
from ray_ckpt.errors import UnsupportedItem

OptimizerOf = Callable[[list[Any]], torch.optim.Optimizer]


def predicted_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(v.nbytes for _, state in predicted_state(optimizer) for v in state.values())


class Wrapper(nn.Module):
    """Names its inner module as torch.compile (`_orig_mod`), FSDP1 and activation checkpointing do."""

    def __init__(self, attribute: str, inner: nn.Module) -> None:
        super().__init__()
        self.add_module(attribute, inner)


def mlp() -> Any:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("0.weight", "0.weight"),
        ("_orig_mod.0.weight", "0.weight"),
        ("layers.0._fsdp_wrapped_module.attn._checkpoint_wrapped_module.weight", "layers.0.attn.weight"),
        ("module.weight", "module.weight"),  # may be the user's own name
        ("my_orig_mod.weight", "my_orig_mod.weight"),
    ],
)
def test_wrapper_segments_are_dropped(name: str, expected: str) -> None:
    assert clean_name(name) == expected


@pytest.mark.parametrize("attribute", ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"])
def test_wrapped_and_bare_modules_have_the_same_tree(attribute: str) -> None:
    inner = mlp()
    outer = nn.Sequential(OrderedDict(body=Wrapper(attribute, inner)))
    bare = nn.Sequential(OrderedDict(body=inner))
    assert list(adapt("m", outer, {}).tree()) == list(adapt("m", bare, {}).tree())


def test_a_compiled_module_is_unwrapped() -> None:
    inner = mlp()
    compiled = Wrapper("_orig_mod", inner)
    assert unwrap(compiled) is inner
    assert list(adapt("m", compiled, {}).tree()) == list(inner.state_dict())


def test_each_kind_of_object_has_its_adapter() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    modules = {"model": model}
    objects: list[object] = [model, optimizer, scheduler, torch.zeros(2), {}, []]
    items = [adapt("x", obj, modules) for obj in objects]
    kinds = [type(item) for item in items]
    assert kinds == [ModuleItem, OptimizerItem, StatefulItem, TensorItem, TreeItem, TreeItem]
    assert [adapt("x", obj, modules).per_rank for obj in (model, optimizer, scheduler)] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("obj", [1, "text", object(), (1, 2), lambda: None, {1, 2}])
def test_other_objects_are_refused_with_the_fix(obj: object) -> None:
    with pytest.raises(UnsupportedItem, match="'thing'") as caught:
        adapt("thing", obj, {})
    assert "state_dict()" in caught.value.hint and caught.value.fields["item"] == "thing"


def test_a_live_iterator_is_refused() -> None:
    class Loader:
        _iterator: Any = None

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: Mapping[str, int]) -> None: ...

    loader = Loader()
    assert isinstance(adapt("loader", loader, {}), StatefulItem)
    loader._iterator = iter([])
    with pytest.raises(UnsupportedItem, match="being iterated") as caught:
        adapt("loader", loader, {})
    assert "after ckpt.steps()" in caught.value.hint


def test_nothing_is_copied() -> None:
    model = mlp()
    tree = adapt("m", model, {}).tree()
    assert tree["0.weight"].data_ptr() == model[0].weight.data_ptr()
    state = {"t": torch.zeros(2)}
    assert adapt("s", state, {}).tree()["t"] is state["t"]


def test_parameters_are_shared_and_buffers_are_not() -> None:
    item = adapt("m", Wrapper("_orig_mod", mlp()), {})
    assert item.is_shared(("0.weight",)) and item.is_shared(("1.bias",))
    assert not item.is_shared(("1.running_mean",))
    assert adapt("p", nn.Parameter(torch.zeros(1)), {}).is_shared(())
    assert not adapt("t", torch.zeros(1), {}).is_shared(())
    assert not adapt("d", {"t": torch.zeros(1)}, {}).is_shared(("t",))


def test_tied_weights_are_shared_under_both_names() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    item = adapt("m", model, {})
    assert item.is_shared(("0.weight",)) and item.is_shared(("1.weight",))


# -- optimizers --------------------------------------------------------------------------------------


def test_optimizer_state_is_named_by_parameter() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    item = adapt("optimizer", optimizer, {"model": Wrapper("_orig_mod", model)})
    assert item.tree()["state"] == {}
    step(model, optimizer)
    tree = item.tree()
    assert sorted(tree["state"]) == sorted(name for name, _ in model.named_parameters())
    assert set(tree["state"]["0.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert tree["state"]["0.weight"]["exp_avg"] is optimizer.state[model[0].weight]["exp_avg"]
    assert tree["param_groups"][0]["params"] == [name for name, _ in model.named_parameters()]
    assert tree["param_groups"][0]["lr"] == 1e-3


def test_several_models_put_their_item_name_before() -> None:
    actor, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    modules: dict[str, nn.Module] = {"actor": actor, "critic": critic}
    names = parameter_names(modules)
    assert set(names.values()) == {"actor.weight", "actor.bias", "critic.weight", "critic.bias"}
    item = adapt("opt", torch.optim.SGD(critic.parameters()), modules)
    assert item.tree()["param_groups"][0]["params"] == ["critic.weight", "critic.bias"]


def test_a_parameter_of_no_item_is_named() -> None:
    stranger = nn.Parameter(torch.zeros(7, 5))
    with pytest.raises(UnsupportedItem, match=r"shape \(7, 5\) that belongs to no registered item"):
        adapt("optimizer", torch.optim.SGD([stranger]), {"model": mlp()})


def test_optimizer_groups_and_values_are_loaded() -> None:
    model = mlp()
    groups: list[dict[str, Any]] = [{"params": [model[0].weight]}, {"params": [model[0].bias], "lr": 5.0}]
    saved = adapt("o", torch.optim.AdamW(groups, lr=0.5), {"m": model}).tree()
    fresh = torch.optim.AdamW([{"params": [model[0].weight]}, {"params": [model[0].bias]}], lr=0.1)
    adapt("o", fresh, {"m": model}).load(saved)
    assert [g["lr"] for g in fresh.param_groups] == [0.5, 5.0]
    assert fresh.param_groups[0]["params"] == [model[0].weight]

    other = torch.optim.AdamW([model[0].weight, model[0].bias])
    (problem,) = adapt("o", other, {"m": model}).problems(saved)
    assert "groups its parameters otherwise" in problem
    assert not adapt("o", fresh, {"m": model}).problems(saved)


def test_missing_state_is_made_as_the_optimizer_would() -> None:
    model = mlp().to("meta")
    for fused, device in ((None, "cpu"), (True, "meta")):
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.param_groups[0]["fused"] = fused
        item = adapt("o", optimizer, {"m": model})
        moment = item.allocate(("state", "0.weight", "exp_avg"), (3, 4), torch.bfloat16)
        assert (moment.device.type, moment.dtype, moment.requires_grad) == ("meta", torch.bfloat16, False)
        assert item.allocate(("state", "0.weight", "row_var"), (3, 1), torch.float32).device.type == "meta"
        assert item.allocate(("state", "0.weight", "step"), (), torch.float32).device.type == device
    assert item.allocate(("param_groups", "0", "lr"), (), torch.float32).device.type == "cpu"


# -- prediction --------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, OptimizerOf] = {
    "adam": lambda p: torch.optim.Adam(p),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "two groups": lambda p: torch.optim.SGD(
        [dict[str, Any](params=p[:1]), dict[str, Any](params=p[1:], momentum=0.9)], lr=0.1
    ),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_predicted_state_has_the_size_of_the_real_one(kind: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(40, 30), nn.LayerNorm(30), nn.Linear(30, 20)).to(dtype)
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    predicted = predicted_bytes(optimizer)
    exists = sum(v.nbytes for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()), "stepped"
    model(torch.randn(4, 40, dtype=dtype)).sum().backward()
    optimizer.step()
    actual = sum(v.nbytes for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v))
    assert predicted == actual - exists
    assert kind == "sgd" or predicted_bytes(optimizer) == 0, "all of it exists now"


def test_an_optimizer_that_cannot_be_predicted_counts_as_nothing() -> None:
    optimizer = torch.optim.LBFGS([nn.Parameter(torch.zeros(3))])
    assert predicted_bytes(optimizer) == 0


# -- trees -------------------------------------------------------------------------------------------


def test_a_tree_is_updated_in_place() -> None:
    inner: list[Any] = [1, {"x": 2}]
    state: dict[str, Any] = {"step": 0, "inner": inner, "pair": (1, 2)}
    item, saved = adapt("state", state, {}), {"step": 5, "inner": [3, {"x": 4}], "pair": (8, 9)}
    assert not item.problems(saved)
    item.load(saved)
    assert state == saved
    assert state["inner"] is inner


@pytest.mark.parametrize(
    "saved", [{}, {"a": 1, "b": [[2], 3]}, {"a": 1, "b": {"0": 1}}, {"a": [1], "b": [1]}, []]
)
def test_another_structure_is_named(saved: Any) -> None:
    (problem,) = adapt("state", {"a": 1, "b": [1]}, {}).problems(saved)
    assert problem.startswith(("a: ", "b: ", "the tree: "))


def test_a_list_of_plain_values_may_have_grown() -> None:
    losses: list[float] = []
    item, saved = adapt("state", {"losses": losses}, {}), {"losses": [0.5, 0.25]}
    assert not item.problems(saved)
    item.load(saved)
    assert losses == [0.5, 0.25]


def test_an_optimizer_over_a_bare_parameter_names_it() -> None:
    bare = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([bare], lr=0.1, momentum=0.9)
    bare.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert list(adapt("o", optimizer, {"bare": bare}).tree()["state"]) == ["bare"]


def test_module_extra_state_is_loaded() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))
            self.seen = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"seen": self.seen}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]

    first, second = Counting(), Counting()
    first.seen = 7
    ModuleItem(second).load(ModuleItem(first).tree())
    assert second.seen == 7
