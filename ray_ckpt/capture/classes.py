"""Checks that saved state of optimizers and schedulers fits the classes of the live ones.

torch's `load_state_dict` accepts state of any class: SGD keeps the moments of AdamW for ever, RMSprop raises
a KeyError in its first step. Therefore a checkpoint records the class of each optimizer and scheduler. The
names in the saved state are compared with the names that the live class uses; a step of a twin optimizer
shows the latter (`predict.used_keys`). If these names are unknown before the first step, the classes are
compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Set
from typing import Any, TypeAlias

from ray_ckpt.capture.items import BaseOptimizerItem, Item, SchedulerItem, inmost, is_optimizer_state
from ray_ckpt.capture.predict import is_torch_step, used_keys
from ray_ckpt.capture.torch_private import inner_schedulers
from ray_ckpt.errors import MismatchError

MAX_NAMED = 5  # names of state in one message

_RATES = ("lr", "initial_lr")
Classes: TypeAlias = Mapping[str, str]
"""`<module>.<class>` by the name of an item; the name of an inner scheduler is like `scheduler.0`."""


def classes_of(items: Mapping[str, Item]) -> dict[str, str]:
    """Return the classes of the optimizers and torch's schedulers among `items`."""
    found: dict[str, str] = {}
    for name, item in items.items():
        if isinstance(item, BaseOptimizerItem):
            found[name] = _path(item.kind)
        elif isinstance(item, SchedulerItem):
            found |= scheduler_classes(name, item.obj)
    return found


def class_problems(name: str, item: Item, saved: Any, classes: Classes) -> Iterator[str]:
    """Yield the reasons why `saved`, from a checkpoint with these classes, does not fit the item."""
    if isinstance(item, SchedulerItem):
        yield from _scheduler_problems(name, item.obj, classes)
    elif isinstance(item, BaseOptimizerItem) and is_optimizer_state(saved):
        problem = _optimizer_problem(item, saved, classes.get(name, ""))
        if problem is not None:
            yield f"{name}: {problem}"


def difference(name: str, item: Item, classes: Classes) -> str | None:
    """Return a text with the two classes of an item that has another class in the checkpoint, else None."""
    for key, path in classes_of({name: item}).items():
        if key in classes and not _is_same(classes[key], path):
            return f"{key} {_both(classes[key], path)}"
    return None


def taken(name: str, item: Item, saved: Any, classes: Classes) -> Any:
    """Return the saved tree of an item; if the class differs, without settings that the live class lacks.

    Settings are constructor arguments, and entries that a scheduler sets. Other entries of a group define the
    class: AdamW is an Adam with `decoupled_weight_decay`.
    """
    if not isinstance(item, BaseOptimizerItem) or difference(name, item, classes) is None:
        return saved
    optimizer = item.optimizer
    takes = inspect.signature(item.kind.__init__).parameters
    groups = [
        {k: v for k, v in values.items() if k in group and (k in takes or k not in optimizer.defaults)}
        for group, values in zip(optimizer.param_groups, saved["param_groups"], strict=True)
    ]
    return {**saved, "param_groups": groups}


def rates_of(item: Item, saved: Any) -> Any:
    """Return the saved learning rates for an optimizer that begins anew; they show the schedule's position.

    None for other items, and if the groups differ.
    """
    if not isinstance(item, BaseOptimizerItem) or not isinstance(saved, dict) or "param_groups" not in saved:
        return None
    groups, saved_groups = item.optimizer.param_groups, saved["param_groups"]
    if len(groups) != len(saved_groups):
        return None
    rates = [
        {key: there[key] for key in _RATES if key in here and key in there}
        for here, there in zip(groups, saved_groups, strict=True)
    ]
    return {"param_groups": rates}


def take_rates(item: Item, rates: Any) -> None:
    """Put the result of `rates_of` into the optimizer's groups."""
    assert isinstance(item, BaseOptimizerItem)
    for group, values in zip(item.optimizer.param_groups, rates["param_groups"], strict=True):
        group.update(values)


def check_settings(items: Mapping[str, Item]) -> None:
    """Raise MismatchError if a restored optimizer lacks state that is needed by settings kept as built."""
    for name, item in items.items():
        if not isinstance(item, BaseOptimizerItem):
            continue
        optimizer = inmost(item.optimizer)
        used = used_keys(item.param_groups, item.kind, item.param_groups)
        lacking: set[str] = set()
        for param in item.parameters.values():
            if state := optimizer.state.get(param):
                lacking |= used.get(id(param), frozenset()) - state.keys()
        if lacking:
            raise MismatchError(
                f"With the settings that `keep` leaves as built, {name!r} needs {_listed(lacking)}, "
                "which the checkpoint does not have.",
                hint=f"Remove the settings that need it from `keep`, such as {name}.amsgrad.",
                problems=(f"{name}: lacks {_listed(lacking)}",),
            )


# -- optimizers ---------------------------------------------------------------------------------------


def _optimizer_problem(item: BaseOptimizerItem, saved: Any, then: str) -> str | None:
    """Return why `saved` does not fit the optimizer; `then` is the saved class, "" if unknown."""
    kind = item.kind
    used, is_certain = _used(item, saved["param_groups"])
    is_same = _is_same(then, _path(kind))
    if (is_same or not then) and not is_certain:
        return None
    unused, lacking, is_unknown = set[str](), set[str](), False
    parameters = item.parameters
    for name, state in saved["state"].items():
        if state and name in parameters:
            keys = used.get(id(parameters[name]))
            if keys is None:
                is_unknown = True
            else:
                unused |= state.keys() - keys
                lacking |= keys - state.keys()
    if is_same:
        unused.clear()  # additions of its owner
    is_unknown &= bool(then) and not any(_is_same(then, _path(base)) for base in kind.__mro__)
    does = [f"does not use {_listed(unused)}"] * bool(unused) + [f"lacks {_listed(lacking)}"] * bool(lacking)
    if not does and not is_unknown:
        return None
    reason = " and ".join(does) or "whether it can use that state is not known before its first step"
    return f"{_both(then, _path(kind))}: {reason}"


def _used(item: BaseOptimizerItem, settings: Any) -> tuple[Mapping[int, Set[str]], bool]:
    """Return the state names that the class uses, by id of the parameter, and whether they are certain.

    For a class with its own `step`, the names are those of the live state, or of the torch base class.
    """
    kind, groups = item.kind, item.param_groups
    if is_torch_step(kind):
        return used_keys(groups, kind, settings), True
    state_of = inmost(item.optimizer).state
    if live := {id(param): state.keys() for param, state in state_of.items() if state}:
        return live, False
    base = next(filter(is_torch_step, kind.__mro__), None)
    return used_keys(groups, base, settings) if base is not None else {}, False


# -- schedules ----------------------------------------------------------------------------------------


def _scheduler_problems(name: str, scheduler: object, classes: Classes) -> Iterator[str]:
    """Yield the differing torch classes. User classes may be renamed: attributes decide."""
    for key, path in scheduler_classes(name, scheduler).items():
        then = classes.get(key, "")
        if _is_torch(then) and _is_torch(path) and not _is_same(then, path):
            yield f"{key}: {_both(then, path)}"


def scheduler_classes(name: str, scheduler: Any) -> dict[str, str]:
    """Return the classes of a scheduler and of its inner schedulers."""
    found = {name: _path(type(scheduler))}
    for i, inner in enumerate(inner_schedulers(scheduler)):
        found |= scheduler_classes(f"{name}.{i}", inner)
    return found


# -- names --------------------------------------------------------------------------------------------


def _both(then: str, here: str) -> str:
    """Return a text with two classes; with modules if only the modules differ."""
    if _short(then) != _short(here):
        then, here = _short(then), _short(here)
    return f"was saved by {then or 'another class'}, and is {here} here"


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _short(path: str) -> str:
    return path.rpartition(".")[2]


def _is_torch(path: str) -> bool:
    return path.startswith("torch.optim.")


def _is_same(one: str, other: str) -> bool:
    """Return whether two paths name one class, whose module may have been renamed or moved."""
    return _short(one) == _short(other) and _is_torch(one) == _is_torch(other)


def _listed(keys: Set[str]) -> str:
    names = sorted(keys)
    return ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if names[MAX_NAMED:] else "")
