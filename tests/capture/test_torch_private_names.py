"""Private names of torch, each through the function that uses it, in the torch that is installed.

A failure means that a release of torch has moved or renamed something: change the function in
`ray_ckpt/capture/torch_private.py`, or `Fsdp1Unit` in `ray_ckpt/capture/fsdp1.py`, and nothing else.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, SequentialLR, StepLR
from torch.utils.data import DataLoader

from ray_ckpt.capture import torch_private
from ray_ckpt.capture.fsdp1 import Fsdp1Unit

ON_CPU: dict[str, Any] = {"device_id": torch.device("cpu"), "sharding_strategy": ShardingStrategy.NO_SHARD}
"""For FSDP1 in a world of one rank, where it warns of other strategies."""


def moved(name: str) -> str:
    return f"torch {torch.__version__} has moved or changed {name}: adapt the function that this test calls."


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def has_attributes(obj: object, names: str) -> None:
    for name in names.split():
        assert hasattr(obj, name), moved(f"{type(obj).__name__}.{name}")


# -- tensors -----------------------------------------------------------------------------------------


def test_a_change_in_place_is_counted() -> None:
    tensor = torch.zeros(2)
    before = torch_private.version(tensor)
    tensor.add_(1)
    assert torch_private.version(tensor) > before, moved("Tensor._version")


def test_a_wrapper_names_the_tensors_inside_it() -> None:
    wrapper = AsyncCollectiveTensor(torch.ones(3))
    assert torch_private.is_around_one_tensor(wrapper), moved("AsyncCollectiveTensor.__tensor_flatten__")
    assert not torch_private.is_around_one_tensor(torch.ones(3))


def test_a_dtensor_has_its_local_tensor(one_rank: None) -> None:
    local = torch.ones(3)
    tensor = DTensor.from_local(local, init_device_mesh("cpu", (1,)), [Replicate()])
    assert torch_private.local_part(tensor).data_ptr() == local.data_ptr(), moved("DTensor._local_tensor")
    assert torch_private.local_part(local) is local


def test_a_hook_after_accumulation_is_seen() -> None:
    param: Any = nn.Parameter(torch.zeros(2))
    assert not torch_private.is_updated_in_backward(param)
    param.register_post_accumulate_grad_hook(lambda _: None)
    assert torch_private.is_updated_in_backward(param), moved("Tensor._post_accumulate_grad_hooks")


def test_many_tensors_are_copied_at_once() -> None:
    targets, sources = [torch.zeros(2), torch.zeros(1)], [torch.ones(2), torch.full((1,), 7.0)]
    torch_private.copy_all(targets, sources)
    assert all(map(torch.equal, targets, sources)), moved("torch._foreach_copy_")


def test_fake_tensors_have_shapes_and_no_values() -> None:
    with torch_private.FakeTensorMode(allow_non_fake_inputs=True):
        tensor = torch.empty(1 << 50)
        with pytest.raises(torch_private.DataDependentOutputException):
            tensor.sum().item()
    assert tensor.shape == (1 << 50,), moved("torch._subclasses.fake_tensor.FakeTensorMode")


# -- modules -----------------------------------------------------------------------------------------


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: Any) -> None:
        pass


def test_parameters_and_buffers_of_a_module() -> None:
    module = WithExtraState(2, 2, bias=False)
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("left_out", torch.zeros(1), persistent=False)
    assert [name for name, _ in torch_private.own_parameters(module)] == ["weight"], moved(
        "Module._parameters"
    )
    assert [name for name, _ in torch_private.persistent_buffers(module)] == ["kept"], moved(
        "Module._non_persistent_buffers_set"
    )
    assert torch_private.EXTRA_STATE_SUFFIX in module.state_dict(), moved("_EXTRA_STATE_KEY_SUFFIX")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_the_places_of_modules_and_parameters() -> None:
    inside, scripted = nn.Linear(2, 2, bias=False), torch.jit.script(nn.Linear(1, 1))
    module = nn.Sequential(OrderedDict(a=inside, b=nn.ReLU(), c=scripted))
    found = list(torch_private.places(module))
    assert found[0] is module._modules, moved("Module._modules")
    assert found[1] is inside._parameters and len(found) == 2, moved("Module._parameters")


def test_the_module_inside_a_compiled_one() -> None:
    module = nn.Linear(1, 1)
    compiled: Any = torch.compile(module, backend="eager")
    assert torch_private.compiled_module(compiled) is module, moved("OptimizedModule._orig_mod")
    assert torch_private.compiled_module(module) is None


def test_gradients_that_fsdp2_has_not_reduced_are_seen(one_rank: None) -> None:
    module: Any = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    module(torch.ones(1, 2)).sum().backward()
    assert not torch_private.has_hidden_gradients(module), moved("FSDPParamGroup's fields")
    module.set_requires_gradient_sync(False)
    module(torch.ones(1, 2)).sum().backward()
    assert torch_private.has_hidden_gradients(module), moved(
        "FSDPModule._get_fsdp_state()._fsdp_param_groups, FSDPParam._unsharded_param"
    )
    (group,) = module._get_fsdp_state()._fsdp_param_groups
    has_attributes(group, "_partial_reduce_output fsdp_params")
    for param in group.fsdp_params:
        has_attributes(param, "unsharded_accumulated_grad")


def test_names_in_wrapped_modules(one_rank: None) -> None:
    inner = nn.Linear(1, 1)
    compiled: Any = torch.compile(inner, backend="eager")
    wrapped = (compiled, checkpoint_wrapper(inner), FullyShardedDataParallel(inner, **ON_CPU))
    for module in wrapped:
        ((segment, _),) = module.named_children()
        assert segment in torch_private.WRAPPER_SEGMENTS, moved(f"the name of a module in {type(module)}")


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_flat_parameters_of_fsdp1(one_rank: None, use_orig_params: bool) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    wrapped: Any = FullyShardedDataParallel(module, use_orig_params=use_orig_params, **ON_CPU)
    has_attributes(wrapped, "_handle")
    has_attributes(wrapped._handle, "flat_param process_group uses_sharded_strategy _get_flat_param_offsets")
    has_attributes(
        wrapped._handle.flat_param,
        "_param_extensions _contiguities _shapes _shard_param_infos _is_padding_mask _param_infos "
        "_shared_param_infos _params",
    )
    unit = Fsdp1Unit("model", wrapped)
    wanted = {"0.weight": (2, 3), "0.bias": (2,), "1.weight": (3, 2), "1.bias": (3,)}
    names = {id(inside): prefix for prefix, inside in module.named_modules()}
    owners = [f"{names[id(inside)]}.{name}" for inside, name in unit.owners()]
    assert {name: unit.shape(at) for at, name in enumerate(owners)} == wanted, moved("FlatParameter._shapes")
    for at in range(len(owners)):
        has_attributes(
            unit.flat._shard_param_infos[at],
            "in_shard offset_in_shard numel_in_shard intra_param_start_idx intra_param_end_idx",
        )
        assert unit.users(at) == (0,), moved("FlatParamHandle._get_flat_param_offsets")
        assert unit.numel_here(at) == torch.Size(unit.shape(at)).numel(), moved("_ShardParamInfo")
        assert (unit.optimized(at) is unit.flat) is not use_orig_params, moved("FlatParameter._params")


# -- schedulers and loaders --------------------------------------------------------------------------


def test_schedulers_inside_others() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    first, second = StepLR(optimizer, 2), CosineAnnealingLR(optimizer, 9)
    both = SequentialLR(optimizer, [first, second], milestones=[1])
    assert list(torch_private.inner_schedulers(both)) == [first, second], moved("SequentialLR._schedulers")
    assert torch_private.active_scheduler(both) is first
    optimizer.step()
    both.step()
    assert torch_private.active_scheduler(both) is second, moved("SequentialLR._milestones")
    chained = ChainedScheduler([first], optimizer)
    assert list(torch_private.inner_schedulers(chained)) == [first], moved("ChainedScheduler._schedulers")
    assert not torch_private.inner_schedulers(first)


def test_rates_of_a_scheduler() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = StepLR(optimizer, 2, gamma=0.5)
    assert torch_private.closed_form_lrs(scheduler) == [1.0], moved("LRScheduler._get_closed_form_lr")
    assert torch_private.closed_form_lrs(None) is None
    torch_private.set_last_lrs(scheduler, [0.25])
    assert scheduler.get_last_lr() == [0.25], moved("LRScheduler._last_lr")


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_iterators_over_a_loader(workers: int) -> None:
    data: Any = [1, 2, 3]
    how: dict[str, Any] = (
        {"persistent_workers": True, "multiprocessing_context": "spawn"} if workers else {}
    )  # no fork with threads
    loader: Any = DataLoader(data, num_workers=workers, **how)
    assert not torch_private.is_iterated(loader)
    iterator = iter(loader)
    next(iterator)
    assert isinstance(iterator, torch_private.iterator_class()), moved("_BaseDataLoaderIter")
    assert torch_private.num_batches_read(iterator) == 1, moved("_BaseDataLoaderIter._num_yielded")
    assert torch_private.is_map_style(iterator), moved("_DatasetKind.Map")
    assert torch_private.is_iterated(loader) is (workers > 0), moved("DataLoader._iterator")


# -- the list ----------------------------------------------------------------------------------------

PRIVATE = (
    "_version _local_tensor _post_accumulate_grad_hooks _foreach_copy_ _orig_mod _subclasses _get_fsdp_state "
    "_non_persistent_buffers_set _schedulers _milestones _last_lr _num_yielded _dataset_kind _DatasetKind"
)


@cache
def _modules() -> dict[Path, str]:
    """Return the texts of the package's modules."""
    return {path: path.read_text() for path in Path(torch_private.__file__).parents[1].rglob("*.py")}


@pytest.mark.parametrize("name", PRIVATE.split())
def test_a_private_name_is_used_in_one_module(name: str) -> None:
    use = re.compile(rf"(?<!self)\.{name}\b|getattr\([^)]*\"{name}\"")
    used_in = {path.name for path, text in _modules().items() if use.search(text)}
    assert used_in <= {"torch_private.py"}, f"{name} is private to torch: use it in torch_private.py only"
