"""Search for live objects that an exact resume needs and that are not registered.

A Checkpointer has no reference to a scheduler that a loop creates. The garbage collector lists all objects,
and instances of a few classes of torch refer to the optimizer or the parameters that they belong to.
Instances of a user's own classes are not found, nor are objects that `gc.freeze()` hides from the collector.

Unknown objects are examined by `type()` only, which, unlike `__class__`, runs no code of these objects.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DistributedSampler

from ray_ckpt.capture.torch_private import is_map_style, iterator_class, num_batches_read
from ray_ckpt.capture.wrappers import unwrap

MAX_NAMED = 20  # objects per call; after these are registered the next call finds the others
MAX_INSIDE = 10_000  # objects whose references are followed: milliseconds
MAX_DEPTH = 8  # references in a row; an attribute may count for two, through __dict__
MAX_ELEMENTS = 1_000  # of a container that is searched; longer ones hold data

_CLOSED = (str, bytes, torch.Tensor, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
"""Types whose references are not followed: plain data, and types that lead to the whole process."""
_CONTAINERS = (dict, list, tuple, set, frozenset)


def find_gaps(objects: Mapping[str, object]) -> tuple[list[str], list[str]]:
    """Return a phrase for each live object that is missing in `objects`, and for each early iterator.

    At most MAX_NAMED each. An early iterator, over a plain DataLoader, exists before a restore and ignores
    the restored position.

    The search for missing objects finds schedulers of a registered optimizer, enabled GradScalers, optimizers
    of registered parameters, AveragedModels with the shapes of a registered module, torchdata
    StatefulDataLoaders, and DistributedSamplers that shuffle; it leaves out objects that a registered object
    or another found object holds, since the holder saves them. An optimizer saves one inside it only if both
    have the same state.

    The search examines every object that the collector tracks, in 0.1 s for a million. If the search finds
    something, it collects garbage (0.2 s) and starts again, to leave out objects that only a reference cycle
    holds.
    """
    found = _phrases(objects)
    if any(found):
        gc.collect()
        found = _phrases(objects)
    return found


def live_optimizers() -> list[Optimizer]:
    """Return all live optimizers of the process; the search takes 0.1 s for a million objects."""
    kinds = _and_subclasses(Optimizer)
    return [obj for obj in gc.get_referrers(*kinds) if type(obj) in kinds]


def _and_subclasses(kind: type) -> list[type]:
    children: list[type] = type.__subclasses__(kind)
    return [kind, *(inner for child in children for inner in _and_subclasses(child))]


def _phrases(objects: Mapping[str, object]) -> tuple[list[str], list[str]]:
    suspects, iterators = _suspects()
    return _missing(objects, suspects), [
        f"a DataLoader is already being iterated ({_read_text(found)} batches are read)"
        for found in iterators
        if is_map_style(found) and not type(found).__module__.startswith("torchdata")
    ][:MAX_NAMED]


def _read_text(iterator: Any) -> str:
    """Return `1 of 4`, or `1` if the sampler has no length."""
    try:
        return f"{num_batches_read(iterator)} of {len(iterator)}"
    except Exception:  # raised by a sampler of another package
        return str(num_batches_read(iterator))


def _missing(objects: Mapping[str, object], suspects: Sequence[Any]) -> list[str]:
    covered = set(map(id, objects.values())) | _held_by(objects.values())
    for suspect in suspects:
        covered |= _held_by([suspect]) - {id(suspect)}
    owners = _Owners(objects)
    phrases: list[str] = []
    for suspect in (suspect for suspect in suspects if id(suspect) not in covered):
        with contextlib.suppress(Exception):  # of a partly initialized object
            phrases += filter(None, [_phrase(suspect, owners)])
    return phrases[:MAX_NAMED]


def _suspects() -> tuple[list[Any], list[Any]]:
    """Return every live object of a class that an exact resume may need, and every DataLoader's iterator."""
    bases: list[type] = [LRScheduler, Optimizer, AveragedModel, DistributedSampler, torch.amp.GradScaler]
    torchdata = sys.modules.get("torchdata.stateful_dataloader")
    if torchdata is not None:
        bases.append(torchdata.StatefulDataLoader)
    iterators = set(_and_subclasses(iterator_class()))
    wanted = {id(kind): kind for base in bases for kind in _and_subclasses(base)}
    # Found by the reference of each object to its class. A list of all objects would also hold a tuple that
    # another thread is building, and CPython would fail that thread (_PyTuple_Resize).
    live = gc.get_referrers(*wanted.values(), *iterators)
    return (
        [obj for obj in live if id(type(obj)) in wanted],
        [obj for obj in live if type(obj) in iterators],
    )


def _held_by(roots: Iterable[object]) -> set[int]:
    """Return the ids of objects that `roots` hold and would save: attributes and elements, at any depth."""
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
    except Exception:  # partly initialized, or with attributes that raise
        return []


def _references(obj: Any) -> Iterable[Any]:
    if _is(obj, *_CLOSED) or (_is(obj, *_CONTAINERS) and len(obj) > MAX_ELEMENTS):
        return []
    if _is(obj, nn.Module):  # its state_dict has the state of its modules only
        return (child for child in obj.modules() if child is not obj)
    if _is(obj, Optimizer):  # it saves its own state, which may be that of an optimizer inside
        return (inner for inner in _inner_optimizers(obj) if inner.state is obj.state)
    if _is(obj, LRScheduler):  # a scheduler does not save its optimizer
        return (child for child in vars(obj).values() if not _is(child, Optimizer))
    return gc.get_referents(obj)


def _inner_optimizers(optimizer: Optimizer) -> list[Any]:
    """Return the optimizers that an optimizer wraps."""
    return [child for child in vars(optimizer).values() if _is(child, Optimizer)]


def _is(obj: object, *classes: type) -> bool:
    return issubclass(type(obj), classes)


class _Owners:
    """Registered names by optimizer, by parameter and by the shapes of a model."""

    def __init__(self, objects: Mapping[str, object]) -> None:
        self.optimizers: dict[int, str] = {}
        self.params: dict[int, str] = {}
        self.shapes: dict[tuple[torch.Size, ...], str] = {}
        for name, obj in objects.items():
            if isinstance(obj, Optimizer):
                self.optimizers |= {id(o): name for o in (obj, *_inner_optimizers(obj))}
            elif isinstance(obj, nn.Parameter):
                self.params[id(obj)] = name
            elif isinstance(obj, nn.Module):
                params = list(unwrap(obj).parameters())
                self.params |= {id(param): name for param in params}
                self.shapes.setdefault(tuple(param.shape for param in params), name)


def _phrase(suspect: Any, owners: _Owners) -> str | None:
    kind, owner = type(suspect).__name__, None
    if _is(suspect, LRScheduler):
        owner = owners.optimizers.get(id(suspect.optimizer))
        return owner and f"a learning-rate scheduler ({kind}) of the registered optimizer {owner!r}"
    if _is(suspect, Optimizer):
        if any(id(inner) in owners.optimizers for inner in _inner_optimizers(suspect)):
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
