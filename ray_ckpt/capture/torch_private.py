"""Private names of torch, each behind one function; those of FSDP1 are in `fsdp1.Fsdp1Unit`.

tests/capture/test_torch_private_names.py checks each of them, so that a release of torch that moves a name
fails there with a sentence about that name.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA_STATE_SUFFIX
from torch.optim.lr_scheduler import LRScheduler, SequentialLR
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

WRAPPER_SEGMENTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Segments that wrappers add to the names of parameters."""

__all__ = ["EXTRA_STATE_SUFFIX", "DataDependentOutputException", "FakeTensorMode"]


# -- tensors -----------------------------------------------------------------------------------------


def version(tensor: torch.Tensor) -> int:
    """Return the tensor's version, which torch increments at each change in place."""
    return tensor._version


def all_versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the versions of tensors, in order, in a loop that calls no Python function."""
    return list(map(_VERSION, tensors))


_VERSION = attrgetter("_version")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, or the tensor itself."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def is_around_one_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor wraps other tensors, of which exactly one has its shape and dtype.

    That one has the values then, as under a collective that is still running; others are scales and the like.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        return False
    inside = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [(part.shape, part.dtype) for part in inside].count((tensor.shape, tensor.dtype)) == 1


def is_sharded_tensor(value: object) -> bool:
    """Return whether a value is a ShardedTensor of torch.distributed."""
    api = sys.modules.get("torch.distributed._shard.sharded_tensor.api")
    return api is not None and isinstance(value, api.ShardedTensor)


def is_updated_in_backward(param: torch.Tensor) -> bool:
    """Return whether a hook may update the parameter as soon as its gradient exists."""
    return bool(getattr(param, "_post_accumulate_grad_hooks", None))


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target in one call, which holds the GIL at its start and end only."""
    torch._foreach_copy_(targets, sources)


# -- modules -----------------------------------------------------------------------------------------


def own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the module's own parameters, as they are registered."""
    return ((name, param) for name, param in module._parameters.items() if param is not None)


def places(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the live dicts of modules and of parameters in a module and those inside it; no empty ones."""
    for inside in module.modules():
        for place in (inside._modules, inside._parameters):
            if isinstance(place, dict) and place:  # those of a scripted module are in C++, and stay
                yield place


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the module's own buffers that are in its state_dict."""
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def compiled_module(module: nn.Module) -> nn.Module | None:
    """Return the module that torch.compile wrapped as `module`, or None."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


def has_hidden_gradients(module: Any) -> bool:
    """Return whether an FSDP2 module keeps gradients that are not reduced, or by half of the mesh only.

    Unreduced gradients come with `set_requires_gradient_sync(False)`, partly reduced gradients with
    `set_requires_all_reduce(False)`.
    """
    return any(
        group._partial_reduce_output is not None
        or any(
            param.unsharded_accumulated_grad is not None
            or getattr(getattr(param, "_unsharded_param", None), "grad", None) is not None
            for param in group.fsdp_params
        )
        for group in module._get_fsdp_state()._fsdp_param_groups
    )


# -- schedulers --------------------------------------------------------------------------------------


def inner_schedulers(scheduler: Any) -> Sequence[LRScheduler]:
    """Return the schedulers inside a SequentialLR or ChainedScheduler; none for other schedulers."""
    return list(getattr(scheduler, "_schedulers", ()))


def active_scheduler(scheduler: LRScheduler) -> LRScheduler:
    """Return the innermost scheduler of a SequentialLR that is active at its position."""
    while isinstance(scheduler, SequentialLR):
        scheduler = scheduler._schedulers[bisect_right(scheduler._milestones, scheduler.last_epoch)]
    return scheduler


def set_last_lrs(scheduler: LRScheduler, lrs: list[Any]) -> None:
    """Set the rates that `get_last_lr` returns."""
    scheduler._last_lr = lrs


def closed_form_lrs(scheduler: LRScheduler | None) -> list[Any] | None:
    """Return the rates at the scheduler's position if it can compute them directly."""
    closed_form = getattr(scheduler, "_get_closed_form_lr", None)
    return None if closed_form is None else list(closed_form())


# -- data loaders ------------------------------------------------------------------------------------


def iterator_class() -> type:
    """Return the base class of iterators over a DataLoader."""
    return _BaseDataLoaderIter


def num_batches_read(iterator: Any) -> int:
    return int(iterator._num_yielded)


def is_map_style(iterator: Any) -> bool:
    """Return whether the iterator's dataset is read by index."""
    return bool(iterator._dataset_kind == _DatasetKind.Map)


def is_iterated(loader: object) -> bool:
    """Return whether a loader already keeps an iterator."""
    return getattr(loader, "_iterator", None) is not None
