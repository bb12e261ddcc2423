"""Items: names, adapters, and what they refuse."""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from ray_ckpt.capture import predict
from ray_ckpt.capture.adapt import adapt
from ray_ckpt.capture.gradients import GradientsItem, Window
from ray_ckpt.capture.items import (
    Item,
    ModuleItem,
    OptimizerItem,
    SchedulerItem,
    StatefulItem,
    TensorItem,
    parameter_names,
)
from ray_ckpt.capture.predict import predicted_state
from ray_ckpt.capture.trees import TreeItem
from ray_ckpt.capture.walk import walk
from ray_ckpt.capture.wrappers import clean_name, unwrap
from ray_ckpt.errors import UnsupportedItem, UnsupportedLeaf
from ray_ckpt.format.tree import decode_tree, encode_tree
from tests.capture.local import resolve_leaves

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


@pytest.fixture
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("wrap", [nn.DataParallel, nn.parallel.DistributedDataParallel])
def test_wrappers_for_data_parallel_training_leave_no_trace(wrap: Callable[[nn.Module], nn.Module]) -> None:
    inner = nn.ModuleDict({"module": nn.Linear(2, 2)})
    for outer, bare in (
        (wrap(inner), inner),
        (nn.ModuleDict({"a": wrap(inner)}), nn.ModuleDict({"a": inner})),
        (Wrapper("_orig_mod", nn.Sequential(wrap(inner))), nn.Sequential(inner)),
        (AveragedModel(wrap(inner)), AveragedModel(inner)),
    ):
        items = [adapt("m", module, {}) for module in (outer, bare)]
        names = list(items[1].tree())
        assert list(items[0].tree()) == names and any(map(items[0].is_shared, ((n,) for n in names)))
        optimizer = torch.optim.SGD(outer.parameters())
        assert adapt("o", optimizer, {"m": outer}).tree()["param_groups"][0]["params"] == [
            name for name, _ in bare.named_parameters()
        ]


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("wrap", [nn.DataParallel, nn.parallel.DistributedDataParallel])
@pytest.mark.parametrize("is_average", [False, True])
def test_names_that_were_saved_with_a_wrapper_inside_a_module_become_those_of_here(
    wrap: Callable[[nn.Module], nn.Module], is_average: bool
) -> None:
    wrapped = wrap(nn.Linear(2, 2))
    model = AveragedModel(wrapped) if is_average else nn.ModuleDict({"a": wrapped, "b": nn.Linear(2, 2)})
    optimizer = sgd(list(model.parameters()))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    owners = {"m": model}
    items = [adapt("m", model, {}), adapt("o", optimizer, owners)]
    here = [item.tree() for item in items]
    group = here[1]["param_groups"][0]
    saved_names = dict(zip(map(clean_name, here[0]), model.state_dict(), strict=True))
    saved = [
        {saved_names[name]: value for name, value in here[0].items()},
        {
            "state": {saved_names[name]: value for name, value in here[1]["state"].items()},
            "param_groups": [{**group, "params": [saved_names[name] for name in group["params"]]}],
        },
    ]
    assert saved != here
    assert [item.renamed(tree) for item, tree in zip(items, saved, strict=True)] == here
    assert [item.renamed(tree) for item, tree in zip(items, here, strict=True)] == here
    gradients = GradientsItem(owners, window=Window([]), world_size=1)
    before = {
        "world_size": 1,
        "gradients": dict.fromkeys(saved[1]["param_groups"][0]["params"], 1),
        "layouts": {},
    }
    assert gradients.renamed(before) == {**before, "gradients": dict.fromkeys(group["params"], 1)}


def test_state_of_an_optimizer_under_the_names_of_a_wrapped_model_is_renamed() -> None:
    model = nn.Linear(2, 2)
    item = adapt("o", torch.optim.SGD(model.parameters(), lr=0.1), {"m": model})
    (group,) = item.tree()["param_groups"]
    wrapped = {**group, "params": ["module.weight", "module.bias"]}
    saved = {"state": {"module.weight": {"a": 1}}, "param_groups": [wrapped]}
    assert item.renamed(saved) == {"state": {"weight": {"a": 1}}, "param_groups": [group]}
    clash = {**saved, "param_groups": [{**group, "params": ["weight", "_orig_mod.weight"]}]}
    assert item.renamed(clash) == clash


def test_each_kind_of_object_has_its_adapter() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    modules = {"model": model}
    objects: list[object] = [model, optimizer, scheduler, torch.zeros(2), {}, []]
    items = [adapt("x", obj, modules) for obj in objects]
    kinds = [type(item) for item in items]
    assert kinds == [ModuleItem, OptimizerItem, SchedulerItem, TensorItem, TreeItem, TreeItem]
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


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: iter([1, 2]), "position of an iterator"),
        (lambda: (x for x in range(3)), "position of an iterator"),
        (lambda: iter(DataLoader([1, 2])), "position of an iterator"),  # type: ignore[arg-type]
        (lambda: DataLoader([1, 2]), "how far it has been read"),  # type: ignore[arg-type]
        (lambda: RandomSampler([1, 2]), "how far it has been read"),
    ],
)
def test_what_has_no_position_is_refused_with_what_has_one(make: Callable[[], object], reason: str) -> None:
    """Made in the test: an iterator that lives on is named by every Checkpointer of the process."""
    with pytest.raises(UnsupportedItem, match=reason) as caught:
        adapt("data", make(), {})
    assert ".batches(loader)" in caught.value.hint and "StatefulDataLoader" in caught.value.hint


def test_the_iterator_of_ray_data_is_refused_with_a_way_around() -> None:
    shard = type("DataIterator", (), {"__module__": "ray.data.iterator"})()
    with pytest.raises(UnsupportedItem) as caught:
        adapt("shard", shard, {})
    assert "Ray Data exposes neither" in caught.value.hint


def test_a_distributed_sampler_has_its_epoch() -> None:
    first: Any = DistributedSampler([0] * 8, 2, 1)  # type: ignore[arg-type]
    second: Any = DistributedSampler([0] * 8, 2, 1)  # type: ignore[arg-type]
    first.set_epoch(3)
    resume({"sampler": first}, {"sampler": second})
    assert list(second) == list(first) and second.epoch == 3

    class Own(DistributedSampler[int]):
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: Mapping[str, int]) -> None: ...

    assert type(adapt("sampler", Own([0] * 8, 2, 1), {})) is StatefulItem  # type: ignore[arg-type]


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


def test_the_state_of_a_removed_group_is_not_saved() -> None:
    """No group of the restarted program has its parameters, so that nothing could load it."""

    def unfrozen() -> tuple[nn.ModuleList, torch.optim.AdamW]:
        model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        return model, torch.optim.AdamW([{"params": list(part.parameters())} for part in model])

    model, optimizer = unfrozen()
    item = adapt("o", optimizer, {"m": model})
    step(nn.Sequential(*model), optimizer)
    del optimizer.param_groups[1]
    saved = item.tree()
    assert sorted(saved["state"]) == ["0.bias", "0.weight"]
    assert sorted(item.parameters) == ["0.bias", "0.weight"]  # type: ignore[attr-defined]
    model, optimizer = unfrozen()
    del optimizer.param_groups[1]
    again = adapt("o", optimizer, {"m": model})
    assert not again.problems(saved)
    again.load(saved)
    assert len(optimizer.state) == 2


def _blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)))


def _modules_change_places(model: Any) -> None:
    model[0], model[1] = model[1], model[0]


def _inner_modules_change_places(model: Any) -> None:
    model[0][1], model[1][0] = model[1][0], model[0][1]


def _parameters_change_places(model: Any) -> None:
    model[0][0].weight, model[1][1].weight = model[1][1].weight, model[0][0].weight


def _a_module_is_renamed(model: Any) -> None:
    model._modules["head"] = model._modules.pop("1")


@pytest.mark.parametrize(
    "change",
    [
        _modules_change_places,
        _inner_modules_change_places,
        _parameters_change_places,
        _a_module_is_renamed,
    ],
)
def test_the_state_of_parameters_that_change_places_has_their_new_names(
    change: Callable[[nn.Module], None],
) -> None:
    model = _blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    item = adapt("optimizer", optimizer, {"model": model})
    step(model, optimizer)
    item.tree()
    change(model)
    tree, here = item.tree(), dict(model.named_parameters())
    assert tree["state"].keys() == here.keys()
    for name, param in here.items():
        assert tree["state"][name]["momentum_buffer"] is optimizer.state[param]["momentum_buffer"]
    named = [here[name] for name in tree["param_groups"][0]["params"]]
    assert list(map(id, named)) == list(map(id, optimizer.param_groups[0]["params"]))


def test_a_parameter_that_is_out_of_its_module_for_a_while_keeps_its_name() -> None:
    """As sharded parameters of FSDP2 are while they are gathered."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    item = adapt("optimizer", optimizer, {"model": model})
    step(model, optimizer)
    names, weight = item.tree()["state"].keys(), model[0].weight
    model[0].weight = nn.Parameter(torch.zeros(4, 4))
    assert item.tree()["state"].keys() == names
    model[0].weight = weight
    assert item.tree()["state"].keys() == names


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
    assert "its groups have other parameters" in problem
    assert not adapt("o", fresh, {"m": model}).problems(saved)


def test_what_chooses_an_implementation_stays_as_built() -> None:
    """An optimizer for CUDA graphs, or one that is fused, may go on with another one on another device."""
    model = mlp()
    first = torch.optim.AdamW(model.parameters(), capturable=True, foreach=True)
    saved = adapt("o", first, {"m": model}).tree()
    fresh = torch.optim.AdamW(model.parameters(), fused=True)
    adapt("o", fresh, {"m": model}).load(saved)
    (group,) = fresh.param_groups
    assert (group["capturable"], group["foreach"], group["fused"]) == (False, None, True)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    fresh.step()


def test_names_in_a_group_stay_those_of_its_parameters() -> None:
    model = mlp()
    named = list(model.named_parameters())
    saved = adapt("o", torch.optim.SGD(named, lr=0.1), {"m": model}).tree()
    fresh = torch.optim.SGD(named[::-1], lr=0.2)
    item = adapt("o", fresh, {"m": model})
    assert not item.problems(saved)
    item.load(saved)
    (group,) = fresh.param_groups
    assert (group["param_names"], group["lr"]) == ([name for name, _ in named[::-1]], 0.1)


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


def test_a_setting_that_is_a_tensor_is_made_on_the_cpu_whatever_the_default_device() -> None:
    model = mlp()
    item = adapt("o", torch.optim.AdamW(model.parameters()), {"m": model})
    with torch.device("meta"):
        made = item.allocate(("param_groups", "0", "lr"), (), torch.float32)
    assert made.device.type == "cpu"


@pytest.mark.filterwarnings("ignore")  # of its import
def test_an_optimizer_that_hides_its_state_is_refused() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        model = nn.Linear(2, 2)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    finally:
        dist.destroy_process_group()
    with pytest.raises(
        UnsupportedItem, match=r"'optimizer' .ZeroRedundancyOptimizer. has inner state"
    ) as caught:
        adapt("optimizer", optimizer, {"model": model})
    assert "fully_shard" in caught.value.hint


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


def test_parameters_of_one_shape_are_predicted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step over tensors without memory takes some ms for each of them."""
    stepped: list[int] = []
    original = predict._step_of_twin

    def counted(kind: Any, group: Any, params: list[torch.Tensor]) -> list[Any]:
        stepped.append(len(params))
        return original(kind, group, params)

    monkeypatch.setattr(predict, "_step_of_twin", counted)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(50)), nn.Linear(3, 2, dtype=torch.float64))
    groups = [dict[str, Any](params=[p], lr=0.1 / n) for n, p in enumerate(model.parameters(), 1)]
    for optimizer in (torch.optim.AdamW(model.parameters()), torch.optim.AdamW(groups)):
        found = list(predicted_state(optimizer))
        assert stepped == [4]
        assert {id(param) for param, _ in found} == set(map(id, model.parameters()))
        assert all(s["exp_avg"].shape == p.shape and s["exp_avg"].dtype == p.dtype for p, s in found)
        stepped.clear()
        assert (
            len(predict.used_keys(optimizer.param_groups, torch.optim.AdamW, optimizer.param_groups)) == 102
        )
        assert sum(stepped) == 2, "one of each number of dimensions"
        stepped.clear()
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert not list(predicted_state(optimizer)) and not stepped


def test_groups_with_other_settings_are_predicted_alone() -> None:
    params = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
    groups = [dict[str, Any](params=[p], momentum=m) for p, m in zip(params, (0.0, 0.9, 0.9), strict=True)]
    found = {id(param): set(state) for param, state in predicted_state(torch.optim.SGD(groups, lr=0.1))}
    assert [found.get(id(param), set()) for param in params] == [
        set(),
        {"momentum_buffer"},
        {"momentum_buffer"},
    ]


def test_nothing_refers_to_predicted_parameters_when_they_are_swapped() -> None:
    """torch refuses to swap a parameter with weak references, as `Module.to` does if it is set to."""
    model = nn.Linear(3, 3)
    assert predicted_bytes(torch.optim.AdamW(model.parameters()))
    assert not [ref for param in model.parameters() for ref in weakref.getweakrefs(param)]


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
    "saved", [{}, {"a": 1}, {"a": 1, "b": {"0": 1}}, {"a": [1], "b": [1]}, {"c": 1, "b": [1]}, [], None]
)
def test_another_structure_is_named(saved: Any) -> None:
    for problem in (found := adapt("state", {"a": 1, "b": [1]}, {}).problems(saved)):
        assert problem.startswith(("a: ", "b: ", "the tree: ", "is a dict here"))
    assert found


@pytest.mark.parametrize(
    ("built", "other", "where"),
    [
        ([{"loss": 1}, {"loss": 2}], [{"loss": 1}], "found"),
        ([[1], [2]], [], "found"),
        (defaultdict(list, a=[1, 2]), {"a": {"x": 1}}, "found.a"),
        (defaultdict(list, a=[1, 2], b=[]), {"a": {"x": 1}, "c": []}, "found.a"),
    ],
)
def test_what_a_container_would_lose_is_named(built: Any, other: Any, where: str) -> None:
    problems = adapt("state", {"found": built}, {}).problems(decode_tree(encode_tree({"found": other})))
    assert problems == [f"{where}: has another structure in the checkpoint"]


@pytest.mark.parametrize(
    ("built", "grown"),
    [
        ([0.5, (1, 2)], [0.5]),
        ([], [(1, 0.5), (2, 0.25)]),
        ([], [{"loss": 0.5}, {"loss": 0.25}]),
        ([], [np.float32(0.5), [1, [2]]]),
        ([], [0.5, 0.25]),
        ([(0, 1.0)], [(0, 1.0), (1, np.float32(0.5))]),
        ([{"loss": 1.0}], [{"loss": 0.5}, {"loss": 0.25}]),
        ({"a": 0, "b": {"c": 1}}, {"a": 1, "b": {"c": 2, "d": [3]}, "e": {}}),
        ({}, {"a": 1, "b": {"c": [2]}}),
        (Counter(x=1), Counter(x=3, y=2)),
        (defaultdict(list, x=[1]), defaultdict(list, y=[(2, 3)])),
        (defaultdict(list, x=[1], z=[2]), defaultdict(list, x=[3], y=[(2, 3)])),
    ],
)
def test_a_container_that_fills_in_training_may_have_grown(built: Any, grown: Any) -> None:
    """A run whose program begins with an empty history could otherwise never be resumed."""
    item = adapt("state", {"found": built}, {})
    saved = decode_tree(encode_tree({"found": grown}))
    assert not item.problems(saved)
    item.load(saved)
    assert built == grown and item.tree()["found"] is built


@pytest.mark.parametrize(
    ("built", "later"),
    [(None, {"loss": 0.5}), (None, [1, [2]]), ({"loss": 0.5}, None), ([1], None), (None, 1), (0.5, None)],
)
def test_a_value_that_training_has_set_comes_back(built: Any, later: Any) -> None:
    state = {"best": built}
    item = adapt("state", state, {})
    saved = decode_tree(encode_tree({"best": later}))
    assert not item.problems(saved)
    item.load(saved)
    assert state == {"best": later}


def test_an_optimizer_over_a_bare_parameter_names_it() -> None:
    bare = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([bare], lr=0.1, momentum=0.9)
    bare.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert list(adapt("o", optimizer, {"bare": bare}).tree()["state"]) == ["bare"]


# -- continuation: saved through the walk, loaded into fresh objects, the same bits from there on -------


def resume(saved: Mapping[str, Any], fresh: Mapping[str, Any]) -> None:
    """Bring `fresh` to the state of `saved`, through the bytes that a state file would hold."""
    before, after = items_of(saved), items_of(fresh)
    walked = walk(before, rank=0, world_size=1)
    trees = decode_tree(encode_tree(dict(walked.trees)))
    live = {part.slice.key: part.leaf for part in walk(after, rank=0, world_size=1).slices}
    tensors: dict[str, torch.Tensor] = {}
    for part in walked.slices:
        name, path = (
            (part.path[0], part.path[1:]) if part.slice.item == "rank0" else (part.slice.item, part.path)
        )
        target = None if after[name].is_replaced(path) else live.get(part.slice.key)
        if target is None:
            target = after[name].allocate(path, part.slice.global_shape, part.tensor.dtype)
        with torch.no_grad():
            tensors[part.slice.key] = target.copy_(part.tensor)
    for name, item in after.items():
        assert not item.problems(trees[name])
        item.load(resolve_leaves(trees[name], tensors))


def items_of(objects: Mapping[str, Any]) -> dict[str, Item]:
    owners = {name: obj for name, obj in objects.items() if isinstance(obj, nn.Module | nn.Parameter)}
    return {name: adapt(name, obj, owners) for name, obj in objects.items()}


class Run:
    """A model, an optimizer of some kind, and what else steps with them."""

    def __init__(self, make: OptimizerOf, then: Callable[[Any], Any] | None = None) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        self.optimizer: Any = make(list(self.model.parameters()))
        self.other = then(self) if then is not None else None
        self.objects = {"model": self.model, "optimizer": self.optimizer}
        if self.other is not None:
            self.objects["other"] = self.other

    def steps(self, first: int, last: int) -> list[Any]:
        """Losses and learning rates of each step, and what the parameters are in the end."""
        seen: list[Any] = []
        for step in range(first, last):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))

            def closure(x: torch.Tensor = x) -> Any:
                self.optimizer.zero_grad()
                loss = self.model(x).square().mean()
                loss.backward()
                return loss.detach()

            loss = self.optimizer.step(closure)
            if isinstance(self.other, lr_scheduler.ReduceLROnPlateau):
                self.other.step(loss)
            elif isinstance(self.other, lr_scheduler.LRScheduler | lr_scheduler.ChainedScheduler):
                self.other.step()
            elif isinstance(self.other, AveragedModel):
                self.other.update_parameters(self.model)
            seen.append((loss.item(), [float(group["lr"]) for group in self.optimizer.param_groups]))
        averaged = self.other.state_dict() if isinstance(self.other, AveragedModel) else {}
        return [*seen, *(v.tolist() for v in (self.model.state_dict() | averaged).values())]


def sgd(params: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def check_continuation(make: OptimizerOf, then: Callable[[Any], Any] | None = None) -> None:
    whole = Run(make, then)
    whole.steps(0, 5)
    resumed = Run(make, then)
    resume(whole.objects, resumed.objects)
    expected = whole.steps(5, 12)
    assert resumed.steps(5, 12) == expected
    assert torch.tensor(expected[6][0]).isfinite(), "no comparison of nothing with nothing"


FOREIGN: dict[str, OptimizerOf] = {
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2, history_size=3),
    "lbfgs with line search": lambda p: torch.optim.LBFGS(p, max_iter=2, line_search_fn="strong_wolfe"),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2]),
    "adam with a tensor for a learning rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "asgd": lambda p: torch.optim.ASGD(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "rprop": lambda p: torch.optim.Rprop(p),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_optimizers_with_state_of_their_own_kind_continue(kind: str) -> None:
    check_continuation(FOREIGN[kind])


class Decay:
    """A schedule that is an object; LambdaLR saves its attributes."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 0.9**self.calls


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "callable object": lambda o: lr_scheduler.LambdaLR(o, Decay()),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 10)], [6]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=30),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 8), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, scale_fn=lambda x: 1 / (1 + x)),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "averaging": lambda o: SWALR(o, 0.05, anneal_epochs=8),
}


class Damped(torch.optim.SGD):
    """Has state that belongs to no parameter, under a name of its own, as torch's load_state_dict allows."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        state: Any = self.state
        common = state["common"]
        common["count"] = common.get("count", 0) + 1
        common["sum"] = common.get("sum", torch.zeros(())) + loss
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad * group["lr"] * common["sum"] / common["count"])
        return loss


def test_state_of_an_optimizer_that_belongs_to_no_parameter_continues() -> None:
    check_continuation(Damped)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedulers_continue(kind: str) -> None:
    check_continuation(sgd, lambda run: SCHEDULES[kind](run.optimizer))


def test_schedulers_of_a_learning_rate_that_is_a_tensor_continue() -> None:
    check_continuation(
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
        lambda run: lr_scheduler.CosineAnnealingLR(run.optimizer, 20),
    )


AVERAGES: dict[str, Callable[[nn.Module], AveragedModel]] = {
    "mean": AveragedModel,
    "exponential": lambda m: AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9)),  # type: ignore[no-untyped-call]
    "with buffers": lambda m: AveragedModel(m, use_buffers=True),
}


@pytest.mark.parametrize("kind", AVERAGES)
def test_averaged_models_continue(kind: str) -> None:
    check_continuation(sgd, lambda run: AVERAGES[kind](run.model))


def test_a_users_average_continues() -> None:
    class Average:
        def __init__(self, model: nn.Module) -> None:
            self.shadow = {k: v.detach().clone() for k, v in model.state_dict().items()}
            self.updates = 0

        def state_dict(self) -> dict[str, Any]:
            return {"shadow": self.shadow, "updates": self.updates}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.shadow, self.updates = state["shadow"], state["updates"]

    first, second = Average(mlp()), Average(mlp())
    first.updates = 4
    resume({"ema": first}, {"ema": second})
    assert second.updates == 4 and second.shadow.keys() == first.shadow.keys()
    assert all(torch.equal(value, second.shadow[key]) for key, value in first.shadow.items())
    assert all(v.data_ptr() != second.shadow[k].data_ptr() for k, v in first.shadow.items() if v.numel())


def test_a_scaler_continues() -> None:
    def scaler() -> Any:
        return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

    def scales(scaler: Any, losses: list[float]) -> list[float]:
        found = []
        for loss in losses:
            param = nn.Parameter(torch.ones(2))
            optimizer = torch.optim.SGD([param], lr=0.1, foreach=False)
            scaler.scale(param.sum() * loss).backward()
            scaler.step(optimizer)
            scaler.update()
            found.append(scaler.get_scale())
        return found

    first, second, unused = scaler(), scaler(), scaler()
    resume({"scaler": unused}, {"scaler": scaler()})
    scales(first, [1.0, torch.inf, 1.0, 1.0])
    resume({"scaler": first}, {"scaler": second})
    expected = scales(first, [1.0, 1.0, torch.inf])
    assert scales(second, [1.0, 1.0, torch.inf]) == expected == [1024.0, 1024.0, 512.0]


def test_a_scaler_that_was_disabled_does_not_fit_an_enabled_one() -> None:
    on, off = (torch.amp.GradScaler("cpu", enabled=enabled) for enabled in (True, False))
    (problem,) = adapt("scaler", on, {}).problems(adapt("scaler", off, {}).tree())
    assert "disabled" in problem
    assert not adapt("scaler", off, {}).problems(adapt("scaler", on, {}).tree())
    assert not adapt("scaler", on, {}).problems(adapt("scaler", on, {}).tree())


def test_a_scheduler_of_another_kind_is_a_difference() -> None:
    optimizer = sgd([nn.Parameter(torch.zeros(1))])
    items = {kind: adapt("s", make(optimizer), {}) for kind, make in SCHEDULES.items()}
    saved = {kind: decode_tree(encode_tree(item.tree())) for kind, item in items.items()}
    fits = [(a, b) for a in items for b in items if not items[a].problems(saved[b])]
    assert fits == [(a, b) for a in items for b in items if a == b or {a, b} == {"lambda", "callable object"}]
    short = lr_scheduler.SequentialLR(optimizer, [lr_scheduler.ConstantLR(optimizer)], [])
    (problem,) = adapt("s", short, {}).problems(saved["sequential"])
    assert problem == "the scheduler: joins 2 in the checkpoint, 1 here"
    (problem,) = adapt("s", short, {}).problems({**short.state_dict(), "_schedulers": [{}]})
    assert problem.startswith("scheduler 0 of the scheduler: is of another kind")


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_loader_continues_inside_an_epoch_and_into_the_next(num_workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def loader(seed: int) -> Any:
        torch.manual_seed(seed)
        return stateful(list(range(20)), batch_size=2, shuffle=True, num_workers=num_workers)

    first, second = loader(1), loader(2)
    second_item = adapt("loader", second, {})
    live = iter(first)
    for _ in range(4):
        next(live)
    walked = walk({"loader": StatefulItem(first)}, rank=0, world_size=1)  # it is being iterated by now
    tree = decode_tree(encode_tree(dict(walked.trees)))["loader"]
    second_item.load(resolve_leaves(tree, {part.slice.key: part.tensor.clone() for part in walked.slices}))
    assert not second_item.problems(tree)
    rest = [batch.tolist() for batch in live]
    assert [batch.tolist() for batch in second] == rest and len(rest) == 6
    assert sorted(number for batch in second for number in batch.tolist()) == list(range(20))


def test_several_models_and_optimizers_and_a_bare_parameter_continue() -> None:
    def build() -> dict[str, Any]:
        torch.manual_seed(3)
        actor, critic, temperature = nn.Linear(2, 2), nn.Linear(2, 1), nn.Parameter(torch.ones(1))
        return {
            "actor": actor,
            "critic": critic,
            "temperature": temperature,
            "of_actor": torch.optim.AdamW([*actor.parameters(), temperature]),
            "of_critic": torch.optim.RMSprop(critic.parameters(), momentum=0.9),
        }

    def train(objects: Mapping[str, Any]) -> list[Any]:
        for seed in range(4):
            x = torch.randn(3, 2, generator=torch.Generator().manual_seed(seed))
            loss = objects["critic"](objects["actor"](x) * objects["temperature"]).square().sum()
            loss.backward()
            for name in ("of_actor", "of_critic"):
                objects[name].step()
                objects[name].zero_grad()
        params = [*objects["actor"].parameters(), *objects["critic"].parameters(), objects["temperature"]]
        return [param.tolist() for param in params]

    first, second = build(), build()
    train(first)
    resume(first, second)
    assert train(second) == train(first)


def test_sparse_gradients_leave_state_that_continues() -> None:
    def build() -> dict[str, Any]:
        torch.manual_seed(3)
        model = nn.Embedding(10, 3, sparse=True)
        return {"model": model, "optimizer": torch.optim.SparseAdam(model.parameters())}

    def train(objects: Mapping[str, Any]) -> Any:
        for row in (1, 4, 1):
            objects["optimizer"].zero_grad()
            objects["model"](torch.tensor([row, 2])).square().sum().backward()
            objects["optimizer"].step()
        return objects["model"].weight.tolist()

    first, second = build(), build()
    train(first)
    resume(first, second)
    assert train(second) == train(first)


def test_nested_state_of_a_foreign_optimizer_lies_on_the_device_of_its_parameter() -> None:
    params = nn.Linear(4, 3).to("meta")
    item = adapt("o", torch.optim.LBFGS(params.parameters()), {"m": params})
    assert item.allocate(("state", "weight", "old_dirs", "0"), (15,), torch.float32).device.type == "meta"
    assert item.allocate(("state", "gone", "old_dirs", "0"), (15,), torch.float32).device.type == "cpu"


@pytest.mark.parametrize(
    ("value", "leaf"), [(lambda: None, "function"), (torch.nn.ReLU(), "ReLU"), (iter([]), "list_iterator")]
)
def test_an_attribute_that_only_pickle_could_save_is_named(value: Any, leaf: str) -> None:
    class Schedule(lr_scheduler.LRScheduler):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.inner = {"rule": value}
            super().__init__(optimizer)

        def get_lr(self) -> list[Any]:
            return list(self.base_lrs)

    item = adapt("schedule", Schedule(sgd([nn.Parameter(torch.zeros(1))])), {})
    with pytest.raises(UnsupportedLeaf, match=leaf) as caught:
        encode_tree(dict(walk({"schedule": item}, rank=0, world_size=1).trees))
    assert caught.value.fields["path"] == "schedule.inner.rule"
    assert "state_dict()" in caught.value.hint


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


@pytest.mark.parametrize(
    "value", [torch.arange(3, dtype=torch.uint8), {"amax": torch.ones(2), "n": 3}, b"x", None]
)
def test_extra_state_reaches_the_module_whatever_it_is(value: Any) -> None:
    class Calibrated(nn.Module):
        def __init__(self, state: Any) -> None:
            super().__init__()
            self.weight, self.state = nn.Parameter(torch.zeros(2)), state

        def get_extra_state(self) -> Any:
            return self.state.clone() if isinstance(self.state, torch.Tensor) else self.state

        def set_extra_state(self, state: Any) -> None:
            self.state = state

    empty = torch.zeros(0, dtype=torch.uint8) if isinstance(value, torch.Tensor) else None
    first, second = (nn.ModuleDict({"inner": Calibrated(state)}) for state in (value, empty))
    resume({"model": first}, {"model": second})
    found: Any = second["inner"].state
    assert str(found) == str(value) and type(found) is type(value)
