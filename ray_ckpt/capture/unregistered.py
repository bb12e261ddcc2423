"""What an exact resume needs, lives in this process, and was not registered.

Nothing tells a Checkpointer of the scheduler that a loop made beside it. The garbage collector knows all
objects, and those of a few of torch's classes are easily told: whose optimizer, whose parameters. What a user
wrote himself is not found, nor what `gc.freeze()` has taken out of the collector's sight.

Objects of strangers are looked at by their type alone, which cannot lie or raise, unlike `__class__`.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DistributedSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from ray_ckpt.capture.items import unwrap

MAX_NAMED = 20  # in one answer; who registers these is told of the others the next time
MAX_INSIDE = 10_000  # objects looked through for what they hold: milliseconds
MAX_DEPTH = 8  # references from one to the next; an attribute may count for two, by the object's __dict__
MAX_ELEMENTS = 1_000  # of a container that is looked through; longer ones hold data

_CLOSED = (str, bytes, torch.Tensor, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
"""Not looked into: plain data, and what leads to everything else in the process."""
_CONTAINERS = (dict, list, tuple, set, frozenset)


def unregistered(objects: Mapping[str, object]) -> list[str]:
    """A phrase for each live object that is missing in `objects`, the registered ones; at most MAX_NAMED.

    Named are a scheduler of a registered optimizer, an enabled GradScaler, an optimizer of registered
    parameters, an AveragedModel shaped as a registered module, a torchdata StatefulDataLoader, and a
    DistributedSampler that shuffles. Not what a registered object or another of these holds: that is for its
    holder to save.

    Looks at every object that the collector tracks, 0.1 s for a million. If it finds something it collects
    (0.2 s) and looks again: what only a reference cycle holds is not alive.
    """
    if not _phrases(objects):
        return []
    gc.collect()
    return _phrases(objects)


def early_iterators() -> list[str]:
    """Return a phrase for each live iterator over a plain DataLoader; at most MAX_NAMED.

    An iterator that exists before a restore does not go to the restored position. If one is found, collects
    and looks again, as `unregistered` does: what only a reference cycle holds is not alive.
    """
    if not _iterator_phrases():
        return []
    gc.collect()
    return _iterator_phrases()


def _iterator_phrases() -> list[str]:
    kinds = _and_subclasses(_BaseDataLoaderIter)
    live = [obj for obj in gc.get_referrers(*kinds) if type(obj) in kinds]
    return [
        f"a DataLoader is being iterated already ({found._num_yielded} of {len(found)} batches are read)"
        for found in live
        if found._dataset_kind == _DatasetKind.Map and not type(found).__module__.startswith("torchdata")
    ][:MAX_NAMED]


def _and_subclasses(kind: type) -> list[type]:
    children: list[type] = type.__subclasses__(kind)
    return [kind, *(inner for child in children for inner in _and_subclasses(child))]


def _phrases(objects: Mapping[str, object]) -> list[str]:
    suspects = _suspects()
    covered = set(map(id, objects.values())) | _held_by(objects.values())
    for suspect in suspects:
        covered |= _held_by([suspect]) - {id(suspect)}
    owners = _Owners(objects)
    missing = (_phrase_or_none(suspect, owners) for suspect in suspects if id(suspect) not in covered)
    return [phrase for phrase in missing if phrase][:MAX_NAMED]


def _suspects() -> list[Any]:
    """Every live object of a class that an exact resume may need."""
    classes: deque[type] = deque(
        (LRScheduler, Optimizer, AveragedModel, DistributedSampler, torch.amp.GradScaler)
    )
    torchdata = sys.modules.get("torchdata.stateful_dataloader")
    if torchdata is not None:
        classes.append(torchdata.StatefulDataLoader)
    wanted: dict[int, type] = {}
    while classes:
        kind = classes.popleft()
        wanted[id(kind)] = kind
        classes.extend(type.__subclasses__(kind))
    # An object refers to its class. Not from a list of all objects: while it lives, a tuple that another
    # thread is just making has a second holder, and CPython fails that thread (_PyTuple_Resize).
    return [obj for obj in gc.get_referrers(*wanted.values()) if id(type(obj)) in wanted]


def _held_by(roots: Iterable[object]) -> set[int]:
    """Ids of what `roots` hold and would save: attributes, elements, and theirs."""
    found: set[int] = set()
    level = [child for root in roots for child in _children(root)]
    for _ in range(MAX_DEPTH):
        fresh = [obj for obj in level if id(obj) not in found and not _is(obj, *_CLOSED)]
        found.update(map(id, fresh))
        if len(found) > MAX_INSIDE:
            break
        level = [child for obj in fresh for child in _children(obj)]
    return found


def _children(obj: object) -> list[Any]:
    try:
        return list(_references(obj))
    except Exception:  # half made, or its attributes are its own idea
        return []


def _references(obj: Any) -> Iterable[Any]:
    if _is(obj, *_CLOSED) or (_is(obj, *_CONTAINERS) and len(obj) > MAX_ELEMENTS):
        return []
    if _is(obj, nn.Module):  # its state_dict has that of its modules, and of nothing else
        return (child for child in obj.modules() if child is not obj)
    if _is(obj, Optimizer):  # a wrapper of another
        return (child for child in vars(obj).values() if _is(child, Optimizer))
    if _is(obj, LRScheduler):  # does not save its optimizer
        return (child for child in vars(obj).values() if not _is(child, Optimizer))
    return gc.get_referents(obj)


def _is(obj: object, *classes: type) -> bool:
    return issubclass(type(obj), classes)


class _Owners:
    """Which registered name an optimizer, a parameter or a model's shape belongs to."""

    def __init__(self, objects: Mapping[str, object]) -> None:
        self.optimizers: dict[int, str] = {}
        self.params: dict[int, str] = {}
        self.shapes: dict[tuple[torch.Size, ...], str] = {}
        for name, obj in objects.items():
            if isinstance(obj, Optimizer):
                self.optimizers |= {id(o): name for o in (obj, *_children(obj))}
            elif isinstance(obj, nn.Parameter):
                self.params[id(obj)] = name
            elif isinstance(obj, nn.Module):
                params = list(unwrap(obj).parameters())
                self.params |= {id(param): name for param in params}
                self.shapes.setdefault(tuple(param.shape for param in params), name)


def _phrase_or_none(suspect: Any, owners: _Owners) -> str | None:
    try:
        return _phrase(suspect, owners)
    except Exception:
        return None


def _phrase(suspect: Any, owners: _Owners) -> str | None:
    kind, owner = type(suspect).__name__, None
    if _is(suspect, LRScheduler):
        owner = owners.optimizers.get(id(suspect.optimizer))
        return owner and f"a learning-rate scheduler ({kind}) of the registered optimizer {owner!r}"
    if _is(suspect, Optimizer):
        if any(id(inner) in owners.optimizers for inner in _children(suspect)):
            return None
        params = (id(param) for group in suspect.param_groups for param in group["params"])
        owner = next((owners.params[param] for param in params if param in owners.params), None)
        return owner and f"an optimizer ({kind}) of parameters of the registered {owner!r}"
    if _is(suspect, AveragedModel):
        owner = owners.shapes.get(tuple(param.shape for param in suspect.module.parameters()))
        return owner and f"an averaged model ({kind}) of the registered module {owner!r}"
    if _is(suspect, torch.amp.GradScaler):
        return f"an enabled gradient scaler ({kind})" if suspect.is_enabled() else None
    if _is(suspect, DistributedSampler):
        return f"a sampler that shuffles by epoch ({kind})" if suspect.shuffle else None
    return f"a data loader that knows its position ({kind})"
