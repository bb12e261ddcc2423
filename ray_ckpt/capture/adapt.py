"""Adapters for the objects that a user registers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from ray_ckpt.capture.engines import adapt_part
from ray_ckpt.capture.fsdp1 import Fsdp1ModuleItem, Fsdp1OptimizerItem, fsdp1_modules
from ray_ckpt.capture.items import (
    Item,
    ModuleItem,
    OptimizerItem,
    SamplerItem,
    ScalerItem,
    SchedulerItem,
    StatefulItem,
    TensorItem,
)
from ray_ckpt.capture.rng import generator_item
from ray_ckpt.capture.torch_private import is_iterated
from ray_ckpt.capture.trees import TreeItem
from ray_ckpt.capture.wrappers import unwrap
from ray_ckpt.errors import UnsupportedItem


def adapt(name: str, obj: object, owners: Mapping[str, nn.Module | nn.Parameter]) -> Item:
    """Return the adapter for `obj`; UnsupportedItem if it cannot be saved. `owners` hold the parameters."""
    if isinstance(obj, Item):
        return obj
    if (part := adapt_part(name, obj, owners)) is not None:
        return part
    if isinstance(obj, nn.Module | torch.optim.Optimizer):
        return _adapt_torch(name, obj, owners)
    if isinstance(obj, torch.Tensor):
        return TensorItem(obj)
    if (generator := generator_item(obj)) is not None:
        return generator
    if callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None)):
        _refuse_live_iterator(name, obj)
        return _stateful_item(obj)
    if isinstance(obj, DistributedSampler):
        return SamplerItem(obj)
    if isinstance(obj, MutableMapping | MutableSequence):
        return TreeItem(obj)
    reason, hint = _reason_and_hint(obj)
    raise UnsupportedItem(
        f"The item {name!r} ({type(obj).__name__}) cannot be saved{reason}.", hint=hint, item=name
    )


def _adapt_torch(
    name: str, obj: nn.Module | torch.optim.Optimizer, owners: Mapping[str, nn.Module | nn.Parameter]
) -> Item:
    if isinstance(obj, nn.Module):
        module = unwrap(obj)
        return Fsdp1ModuleItem(name, module) if fsdp1_modules(module) else ModuleItem(module)
    _refuse_hidden_state(name, obj)
    if any(isinstance(owner, nn.Module) and fsdp1_modules(owner) for owner in owners.values()):
        return Fsdp1OptimizerItem(name, obj, owners)
    return OptimizerItem(name, obj, owners)


def _stateful_item(obj: object) -> StatefulItem:
    if isinstance(obj, LRScheduler):
        return SchedulerItem(obj)
    return ScalerItem(obj) if isinstance(obj, torch.amp.GradScaler) else StatefulItem(obj)


_EXACT_POSITION = (
    "Register and iterate ray_ckpt.data.GlobalBatchSampler(...).batches(loader), or use a torchdata "
    "StatefulDataLoader: they have state_dict() and load_state_dict()."
)


def _reason_and_hint(obj: object) -> tuple[str, str]:
    """Return why an object cannot be saved, "" if its class is unknown, and a hint."""
    match obj:
        case Iterator():
            return ": the position of an iterator cannot be read", _EXACT_POSITION
        case DataLoader() | Sampler():
            return ": it does not know how far it has been read", _EXACT_POSITION
    if type(obj).__module__.startswith("ray.data"):
        return "", (
            "Ray Data exposes neither the position in a shard nor a repeatable order: do not register it, "
            "or read samples by number with ray_ckpt.data.GlobalBatchSampler."
        )
    return "", "Give it state_dict() and load_state_dict(), or put plain values into a dict."


def _refuse_hidden_state(name: str, optimizer: torch.optim.Optimizer) -> None:
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}  # by name: an import of the module takes long
    if not kinds.isdisjoint(("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer")):
        raise UnsupportedItem(
            f"The optimizer {name!r} ({type(optimizer).__name__}) has inner state that cannot be saved.",
            hint="Use torch's fully_shard, which also shards optimizer state, with a plain optimizer.",
            item=name,
        )


def _refuse_live_iterator(name: str, obj: object) -> None:
    if is_iterated(obj):
        raise UnsupportedItem(
            f"The loader {name!r} is already being iterated, so a restored position would have no effect.",
            hint="Call iter(loader) after ckpt.steps() or ckpt.restore().",
            item=name,
        )
