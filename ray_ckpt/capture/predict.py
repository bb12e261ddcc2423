"""Prediction of optimizer state that does not exist yet, so that the arena has room for it.

A twin of the optimizer takes a step over fake parameters, which have shapes and no memory. The live optimizer
is not stepped, and no hook runs. Only torch's own optimizers are predicted; for others the first save with
state lays out the arena again.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from ray_ckpt.capture.items import Item, OptimizerItem, local_tensor
from ray_ckpt.capture.torch_private import DataDependentOutputException, FakeTensorMode
from ray_ckpt.capture.walk import DTYPE_NAMES, LiveSlice, Walked, slices_of

_Alike: TypeAlias = dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]]
"""Parameters by local shape and dtype: their states have equal shapes."""
_REAL_DEVICES_ONLY = ("foreach", "fused", "capturable")


def with_predictions(walked: Walked, items: Mapping[str, Item], *, ranks: tuple[int, ...]) -> Walked:
    """Return `walked` with the slices of future optimizer state; their tensors are on the device "meta".

    `ranks` are the ranks that may hold the same tensors (`walk`).
    """
    predicted = [
        live
        for name, item in items.items()
        if isinstance(item, OptimizerItem)
        for live in _predicted_slices(name, item, ranks)
    ]
    return replace(walked, slices=(*walked.slices, *predicted))


def _predicted_slices(name: str, item: OptimizerItem, everyone: tuple[int, ...]) -> Iterator[LiveSlice]:
    names = {id(param): param_name for param_name, param in item.parameters.items()}
    for param, state in predicted_state(item.optimizer):
        path, local_shape = ("state", names[id(param)]), local_tensor(param).shape
        likes = list(slices_of(param, item=name, path=path, ranks=everyone, first=everyone[0]))
        for key, value in state.items():
            is_cut = value.shape == local_shape  # otherwise the state is the same on every rank
            for like in likes if is_cut else likes[:1]:
                yield _predicted(like, (*path, key), value, None if is_cut else everyone)


def _predicted(
    like: LiveSlice, path: tuple[str, ...], value: torch.Tensor, whole_on: tuple[int, ...] | None
) -> LiveSlice:
    """Return the slice of future state: cut like `like`, or whole on the given ranks."""
    place, ranks = like.slice, like.ranks
    if whole_on is not None:
        shape, ranks = tuple(value.shape), whole_on
        place = replace(place, global_shape=shape, offset=(0,) * len(shape), shape=shape)
    tensor = torch.empty(place.shape, dtype=value.dtype, device="meta")
    place = replace(place, name=".".join(path), dtype=DTYPE_NAMES[value.dtype])
    return replace(like, slice=place, tensor=tensor, leaf=tensor, path=path, ranks=ranks)


def predicted_state(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[torch.Tensor, Mapping[str, torch.Tensor]]]:
    """Yield each parameter without state, with its future state as fake tensors of local shapes."""
    found: dict[Hashable, tuple[Mapping[str, Any], _Alike]] = {}  # of groups with equal settings
    for group in optimizer.param_groups:
        _, alike = found.setdefault(_settings(group), (group, {}))
        for param in group["params"]:
            if param not in optimizer.state and param.requires_grad:
                alike.setdefault((local_tensor(param).shape, param.dtype), []).append(param)
    for like, alike in ((like, alike) for like, alike in found.values() if alike):
        states = _step_of_twin(type(optimizer), like, [params[0] for params in alike.values()])
        for params, state in zip(alike.values(), states, strict=False):
            tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
            yield from ((param, tensors) for param in params)


def _settings(group: Mapping[str, Any]) -> Hashable:
    """Return what the names and shapes of a group's state may depend on; rates change no shape."""
    left_out = {"params", "param_names", "lr", "initial_lr", "weight_decay"}
    return tuple(sorted((str(key), repr(value)) for key, value in group.items() if key not in left_out))


def used_keys(
    groups: Sequence[Mapping[str, Any]],
    kind: type[torch.optim.Optimizer],
    settings: Sequence[Mapping[str, Any]],
) -> dict[int, frozenset[str]]:
    """Return the names in the state of each parameter, by its id, after a step of `kind`.

    `settings`, by group, override those of the optimizer's `groups`. Groups that cannot be predicted are left
    out.
    """
    found: dict[int, frozenset[str]] = {}
    known: dict[Hashable, dict[int, frozenset[str]]] = {}  # by number of dimensions, for each kind of group
    for group, over in zip(groups, settings, strict=False):
        names = known.setdefault((_settings(group), _settings(over)), {})
        alike: dict[int, list[torch.Tensor]] = {}  # by number of dimensions, on which the names depend
        for param in group["params"]:
            alike.setdefault(param.dim(), []).append(param)
        firsts = [params[0] for dims, params in alike.items() if dims not in names]
        changed = {**group, **{k: v for k, v in over.items() if isinstance(v, bool | int | float)}}
        # This class may refuse settings of another class.
        if firsts:
            states = _step_of_twin(kind, changed, firsts) or _step_of_twin(kind, group, firsts)
            names.update(zip((param.dim() for param in firsts), map(frozenset, states), strict=False))
        for dims, params in alike.items():
            if dims in names:
                found |= dict.fromkeys(map(id, params), names[dims])
    return found


def is_torch_step(kind: type) -> bool:
    """Return whether the step of a class is one of torch's own."""
    step = _bare_step(kind)
    module: str = getattr(step, "__module__", None) or ""
    return module.startswith("torch.optim") and step is not torch.optim.Optimizer.step


def _bare_step(kind: type) -> Any:
    step: Any = getattr(kind, "step", None)
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _step_of_twin(
    kind: type[torch.optim.Optimizer], group: Mapping[str, Any], params: list[torch.Tensor]
) -> list[Mapping[str, Any]]:
    if not is_torch_step(kind):
        return []  # the step may communicate with other ranks
    accepted = inspect.signature(kind.__init__).parameters
    options = {k: _plain(v) for k, v in group.items() if k in accepted and k != "params"}
    options |= {k: False for k in _REAL_DEVICES_ONLY if k in options}
    locals_ = [local_tensor(param) for param in params]  # the mode would refer weakly to what it detaches
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            copies = [torch.empty(p.shape, dtype=p.dtype, requires_grad=True) for p in locals_]
            twin = kind(copies, **options)
            for copy in copies:
                copy.grad = torch.zeros_like(copy)
            # An exception because the step needs a value comes when the state exists.
            with contextlib.suppress(DataDependentOutputException):
                _bare_step(kind)(twin)  # without the user's global hooks
    except Exception:  # raised by code of another package
        return []
    return [twin.state.get(copy, {}) for copy in copies]


def _plain(option: Any) -> Any:
    """Return the number in a learning rate that is a tensor, since a fake tensor has no value."""
    return option.item() if isinstance(option, torch.Tensor) and option.numel() == 1 else option
