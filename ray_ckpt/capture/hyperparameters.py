"""Comparison of the hyperparameters in a checkpoint with those of the restarted program.

Loading state silently replaces a learning rate that was edited before the restart by the saved one.
This module notes the settings of registered optimizers, schedulers and GradScalers before state is loaded,
compares them afterwards, and puts back the settings that a user wants to keep as built.

A setting is an argument of a constructor. A scheduler's settings are the attributes with the names of
constructor parameters. An optimizer's settings are the entries of its groups, except for entries in
`defaults` that no constructor takes: these entries hold progress (`d` of Prodigy, `k` of schedule-free
optimizers). The rule also works for classes that this package has no code for. Everything else is left alone.

The entries that a schedule sets in the groups belong to it: if it begins as built, so do they.

A loop that sets `group["lr"]` itself leaves no trace of the initial rate: the current rate then differs
because of progress, and is listed.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Number
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
)
from torch.optim.swa_utils import SWALR

from ray_ckpt.capture.items import IMPLEMENTATION
from ray_ckpt.capture.torch_private import (
    active_scheduler,
    closed_form_lrs,
    inner_schedulers,
    set_last_lrs,
)
from ray_ckpt.errors import ConfigError
from ray_ckpt.format.short import ShortRepr
from ray_ckpt.texts import did_you_mean

MAX_ELEMENTS = 1_000  # elements of a tensor that is a setting; larger tensors are state

_NO_SETTING = IMPLEMENTATION | {"params", "param_names", "step"}
"""`step`: the counter of optimizers of apex."""
_UNLIKE_PARAMETERS = frozenset(
    {"base_lrs", "total_size", "step_ratio", "schedule_phases", "anneal_func_type"}
)
"""Settings of torch's schedulers without a constructor parameter of the same name."""
_GOES_WITH = {"max_lr": "lr", "min_lr": "lr", "schedule_phases": "total_steps", "step_ratio": "total_size"}
"""Settings that are kept together, since one makes no sense without the other."""
_RATES = frozenset({"lr", "max_lr", "min_lr"})
_OF_SCHEDULES = _RATES | {"initial_lr", "swa_lr", "base_momentum", "max_momentum"}
"""Entries of a group that torch's schedulers set, besides the momentum or first beta of a cycle."""

_SHORT = ShortRepr()
_SHORT.maxtuple = _SHORT.maxdict = 6
_SHORT.maxstring = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A hyperparameter with another value in the checkpoint. Values are plain, sequences are tuples.

    For an optimizer with several parameter groups the values are tuples, with one element per group.
    """

    name: str
    built: Any
    saved: Any
    is_kept: bool
    """True: reset to the value as built; False: the saved value stays."""

    def __str__(self) -> str:
        which = "kept as built" if self.is_kept else "restored as saved"
        return f"{self.name}: built {_SHORT.repr(self.built)}, saved {_SHORT.repr(self.saved)}; {which}"


class Hyperparameters:
    """The settings of optimizers, schedulers and GradScalers, by names such as "optimizer.lr"."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        """Note what registered objects (item name -> live object) were built with, before state is loaded.

        An object whose settings cannot be read is left out.
        """
        self._objects = objects
        self._sources: dict[str, _Source] = {}
        for name, obj in objects.items():
            self._sources |= _sources(name, obj)
        self._leaders: dict[str, str] = {}  # name -> the name of the setting with which it is kept
        self._hidden: set[str] = set()  # base_lrs: duplicates of an optimizer's lr
        self._silent: set[str] = set()  # an lr that cannot be distinguished from progress
        for prefix, source in self._sources.items():
            here = {key: _GOES_WITH[key] for key in source.built if key in _GOES_WITH}
            self._leaders |= {f"{prefix}.{key}": f"{prefix}.{leader}" for key, leader in here.items()}
            if isinstance(source, _OptimizerSource):
                self._join(f"{prefix}.lr", source)

    def _join(self, lr: str, source: _OptimizerSource) -> None:
        """Note how schedulers of this optimizer use the learning rate named `lr`."""
        for prefix, scheduler in self._schedulers_of(source.optimizer).items():
            self._leaders |= {f"{prefix}.{key}": lr for key in ("base_lrs", "max_lrs")}
            if _same(scheduler.built.get("base_lrs"), source.initial_lrs):
                self._hidden.add(f"{prefix}.base_lrs")
            if isinstance(scheduler.obj, ReduceLROnPlateau) and None in source.initial_lrs:
                self._silent.add(lr)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all hyperparameters: "optimizer.lr", "scheduler.T_max", "scheduler.0.T_max"."""
        every = (f"{prefix}.{key}" for prefix, source in self._sources.items() for key in source.built)
        return tuple(name for name in every if name not in self._hidden)

    def check(self, keep: Collection[str]) -> None:
        """Raise ConfigError if an entry of `keep`, a name or an fnmatch pattern, matches no name."""
        names = self.names
        for entry in keep:
            if not any(fnmatchcase(name, entry) for name in names):
                raise ConfigError(
                    f"keep={entry!r} matches no hyperparameter of the registered objects.",
                    hint=did_you_mean(entry, names),
                    entry=entry,
                )

    def loaded(self, keep: Collection[str], begun: Set[str] = frozenset()) -> tuple[Changed, ...]:
        """Return the differences after state was loaded; reset the settings that `keep` matches; called once.

        If the items in `begun` are all schedules of an optimizer, reset what these set in its groups.

        With a scheduler, `lr` means `initial_lr`. If it is kept, the current rate becomes the rate of the new
        schedule at the restored position. With one torch scheduler or a SequentialLR, the result equals a run
        that had the new rate from the beginning; several schedulers of one optimizer scale the rate, so it is
        equal if none has a floor (`eta_min`). With ReduceLROnPlateau alone, only a kept `lr` is listed.

        Other settings, such as `T_max`, apply from the scheduler's next step on. Schedulers that compute a
        rate from the previous rate (CosineAnnealingLR, StepLR, LinearLR) do not follow the curve of a run
        from the beginning; others (LambdaLR, cycles, warm restarts) follow that curve at once.
        """
        changed: list[Changed] = []
        kept: dict[str, list[str]] = {}
        differences = list(self._differences())
        for source in self._begun_with(begun):
            source.begin_schedules()
        left = {(prefix, key): now for prefix, key, _, now in self._differences()}
        for prefix, key, built, saved in differences:
            name, is_left = f"{prefix}.{key}", (prefix, key) in left
            is_kept = not is_left or self._is_kept(name, keep)
            if is_left and is_kept:
                kept.setdefault(prefix, []).append(key)
            if name not in self._hidden and (is_kept or name not in self._silent):
                value = left.get((prefix, key), saved)
                changed.append(Changed(name=name, built=built, saved=value, is_kept=is_kept))
        self._put_back(kept)
        return tuple(changed)

    def _begun_with(self, begun: Set[str]) -> Iterator[_OptimizerSource]:
        """Yield the optimizers that have schedules, all of which are in `begun`.

        If another schedule goes on as saved, the current rate shows its position and stays.
        """
        if not begun:
            return
        groups = {name: _scheduled_groups(obj) for name, obj in self._objects.items()}
        for source in self._sources.values():
            if isinstance(source, _OptimizerSource):
                names = {name for name, each in groups.items() if each is source.optimizer.param_groups}
                if names and names <= begun:
                    yield source

    def _differences(self) -> Iterator[tuple[str, str, Any, Any]]:
        """Yield object name, key, and plain values as built and now, of each setting that differs."""
        for prefix, source in self._sources.items():
            now = source.now()
            for key, built in source.built.items():
                if key in now and _is_plain(now[key]) and not _same(built, now[key]):
                    yield prefix, key, _plain(built), _plain(now[key])

    def _is_kept(self, name: str, keep: Collection[str]) -> bool:
        names = (name, self._leaders.get(name, name))
        return any(fnmatchcase(known, entry) for known in names for entry in keep)

    def _put_back(self, kept: Mapping[str, list[str]]) -> None:
        """Reset the keys of each object, then the learning rates, also in schedulers."""
        moved = [
            (source, _Position(source.optimizer, self._schedulers_of(source.optimizer).values()))
            for prefix, source in self._sources.items()
            if isinstance(source, _OptimizerSource) and not _RATES.isdisjoint(kept.get(prefix, ()))
        ]
        for prefix, keys in kept.items():
            self._sources[prefix].put_back(keys)
        for source, position in moved:
            source.set_lrs(position.lrs())
            for scheduler in self._schedulers_of(source.optimizer).values():
                lrs = [copy.deepcopy(group["lr"]) for group in source.optimizer.param_groups]
                set_last_lrs(scheduler.obj, lrs)

    def _schedulers_of(self, optimizer: Optimizer) -> dict[str, _SchedulerSource]:
        """Return the optimizer's registered schedulers, and those inside them, by name."""
        return {
            name: source
            for name, source in self._sources.items()
            if isinstance(source, _SchedulerSource) and getattr(source.obj, "optimizer", None) is optimizer
        }


class _OptimizerSource:
    """Settings of an optimizer's groups; groups that are added later have no settings."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        takes = _parameters(type(optimizer)) | {"lr"}
        skipped = _NO_SETTING | {key for key in optimizer.defaults if key not in takes}
        self._live = [dict(group) for group in optimizer.param_groups]  # with their live tensors
        self._built = [
            copy.deepcopy({k: v for k, v in group.items() if k not in skipped and _is_plain(v)})
            for group in optimizer.param_groups
        ]
        self.initial_lrs = [group.get("initial_lr") for group in self._built]
        self.built = self._listed(self._built)

    def now(self) -> dict[str, Any]:
        return self._listed(self.optimizer.param_groups)

    def _listed(self, groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Return settings by key: the value of one group, or a tuple of the values of several."""
        found: dict[str, list[Any]] = {}
        for built, group in zip(self._built, groups, strict=False):
            for key in built:
                if key != "initial_lr" and not (key == "momentum" and _is_cycled(built)):
                    found.setdefault(key, []).append(_setting(key, built, group))
        return {key: v[0] if len(self._built) == 1 else tuple(v) for key, v in found.items()}

    def put_back(self, keys: Collection[str]) -> None:
        """Reset settings to the values as built; for an `lr` with a schedule, reset the initial rate."""
        for live, built, group in zip(self._live, self._built, self.optimizer.param_groups, strict=False):
            for key in (k for k in keys if k in built):
                if key == "betas" and _is_cycled(built):
                    group[key] = (group[key][0], *_restored(live[key][1:], built[key][1:]))
                else:
                    name = _rate_key(built, group) if key == "lr" else key
                    group[name] = _restored(live[name], built[name])

    def begin_schedules(self) -> None:
        """Reset the entries that schedules have set, and remove those that were not there as built."""
        for live, built, group in zip(self._live, self._built, self.optimizer.param_groups, strict=False):
            if _is_cycled(group) and "betas" in self.optimizer.defaults and "betas" in built:
                group["betas"] = (_restored(live["betas"][0], built["betas"][0]), *group["betas"][1:])
            elif _is_cycled(group) and "momentum" in built:
                group["momentum"] = _restored(live["momentum"], built["momentum"])
            for key in _OF_SCHEDULES:
                if key in built:
                    group[key] = _restored(live[key], built[key])
                elif key not in live:
                    group.pop(key, None)

    def set_lrs(self, lrs: Iterable[Any]) -> None:
        """Set the current rates, one per group."""
        for live, group, lr in zip(self._live, self.optimizer.param_groups, lrs, strict=False):
            if "lr" in live:
                group["lr"] = _restored(live["lr"], lr)


def _setting(key: str, built: Mapping[str, Any], group: Mapping[str, Any]) -> Any:
    """Return the part of `group[key]` that schedules do not change."""
    if key == "lr":
        return group.get(_rate_key(built, group))
    value = group.get(key, built[key])
    return value[1:] if key == "betas" and _is_cycled(built) else value


def _rate_key(built: Mapping[str, Any], group: Mapping[str, Any]) -> str:
    return "initial_lr" if "initial_lr" in built and "initial_lr" in group else "lr"


def _scheduled_groups(obj: object) -> object:
    """Return the groups whose rates a schedule sets, also one inside a wrapper; None for other objects."""
    schedule = getattr(obj, "scheduler", obj)
    if not hasattr(schedule, "get_last_lr"):
        return None
    return getattr(getattr(schedule, "optimizer", None), "param_groups", None)


def _is_cycled(group: Mapping[str, Any]) -> bool:
    """Return whether OneCycleLR or CyclicLR changes the momentum or the first beta."""
    return "base_momentum" in group and "max_momentum" in group


class _SchedulerSource:
    """Settings of one scheduler, without those of inner schedulers."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self.obj = scheduler
        takes = _parameters(type(scheduler)) - {"last_epoch"}
        self._attributes = {
            name.lstrip("_"): name
            for name, value in vars(scheduler).items()
            if _is_scheduler_setting(name.lstrip("_"), takes) and _is_plain(value)
        }
        self.built = {key: copy.deepcopy(getattr(scheduler, name)) for key, name in self._attributes.items()}

    def now(self) -> dict[str, Any]:
        here = vars(self.obj)
        return {key: here[name] for key, name in self._attributes.items() if name in here}

    def put_back(self, keys: Collection[str]) -> None:
        for key in keys:
            setattr(self.obj, self._attributes[key], copy.deepcopy(self.built[key]))
        if isinstance(self.obj, CosineAnnealingWarmRestarts) and not {"T_0", "T_mult"}.isdisjoint(keys):
            self.obj.T_cur, self.obj.T_i = _cycle(max(self.obj.last_epoch, 0), self.obj.T_0, self.obj.T_mult)
        if isinstance(self.obj, CyclicLR | ReduceLROnPlateau | SWALR):
            self.obj.load_state_dict(self.obj.state_dict())  # derives other attributes from the settings


def _is_scheduler_setting(key: str, parameters: Collection[str]) -> bool:
    """Return whether an attribute is a setting; attributes may have the plural of a parameter's name."""
    return key in _UNLIKE_PARAMETERS or key in parameters or key.removesuffix("s") in parameters


def _cycle(epoch: int, first: int, growth: int) -> tuple[int, int]:
    """Return the position of `epoch` in its cycle, and that cycle's length; lengths grow by `growth`."""
    if growth == 1:
        return epoch % first, first
    length = first
    while epoch >= length:
        epoch, length = epoch - length, length * growth
    return epoch, length


class _ScalerSource:
    """Settings of a GradScaler; a disabled GradScaler has none."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self.built = self.now() if scaler.is_enabled() else {}

    def now(self) -> dict[str, Any]:
        return {
            "growth_factor": self._scaler.get_growth_factor(),
            "backoff_factor": self._scaler.get_backoff_factor(),
            "growth_interval": self._scaler.get_growth_interval(),
        }

    def put_back(self, keys: Collection[str]) -> None:
        for key in keys:
            getattr(self._scaler, f"set_{key}")(self.built[key])


_Source: TypeAlias = _OptimizerSource | _SchedulerSource | _ScalerSource


def _sources(name: str, obj: object) -> dict[str, _Source]:
    """Return the sources of an object and its inner schedulers by name; none if the object cannot be read."""
    try:
        if isinstance(obj, Optimizer):
            return {name: _OptimizerSource(obj)}
        if isinstance(obj, torch.amp.GradScaler):
            return {name: _ScalerSource(obj)}
        if not isinstance(obj, LRScheduler):
            return {}
        found: dict[str, _Source] = {name: _SchedulerSource(obj)}
        for i, scheduler in enumerate(inner_schedulers(obj)):
            found |= _sources(f"{name}.{i}", scheduler)
    except Exception:  # raised by a class of another package
        return {}
    return found


class _Position:
    """Positions of an optimizer's learning rates in their schedules, taken before a setting is reset.

    A rate of torch's schedulers is a floor plus a fraction of the distance to the initial rate. The reset
    keeps this fraction.
    """

    def __init__(self, optimizer: Optimizer, sources: Collection[_SchedulerSource]) -> None:
        inner = {id(scheduler) for source in sources for scheduler in inner_schedulers(source.obj)}
        outer = [source.obj for source in sources if id(source.obj) not in inner]
        self._optimizer = optimizer
        self._active = active_scheduler(outer[0]) if len(outer) == 1 else None
        self._floor = _floor(self._active)
        self._rates = [(_number(g.get("initial_lr")), _number(g.get("lr"))) for g in optimizer.param_groups]

    def lrs(self) -> list[Any]:
        """Return the rates at this position for the current initial rates, one per group."""
        has_more = isinstance(self._active, OneCycleLR | CyclicLR)  # rates other than the initial rate count
        needs_curve = has_more or any(start == self._floor for start, _ in self._rates)
        curve = dict(enumerate(_on_curve(self._active))) if needs_curve else {}
        groups = enumerate(self._optimizer.param_groups)
        return [curve[i] if has_more and i in curve else self._lr(i, group, curve) for i, group in groups]

    def _lr(self, i: int, group: Mapping[str, Any], curve: Mapping[int, Any]) -> Any:
        (start, lr), new, floor = self._rates[i], _number(group.get("initial_lr")), _floor(self._active)
        if start is None or start == new:
            return group.get("lr")
        if start == self._floor:  # then the rate does not show the position
            return curve.get(i, new)
        if lr == start:
            return new  # without rounding
        return floor + (lr - self._floor) * (new - floor) / (start - self._floor)


def _floor(scheduler: LRScheduler | None) -> float:
    if isinstance(scheduler, CosineAnnealingLR | CosineAnnealingWarmRestarts):
        return float(scheduler.eta_min)
    return 0.0


def _on_curve(scheduler: LRScheduler | None) -> list[Any]:
    """Return the rates at the scheduler's position, or [] if the scheduler cannot compute the rates."""
    try:
        if (lrs := closed_form_lrs(scheduler)) is not None:
            return lrs
        if isinstance(scheduler, CosineAnnealingWarmRestarts | CyclicLR | LambdaLR | OneCycleLR):
            with warnings.catch_warnings(action="ignore"):  # warnings about a call outside of step()
                return list(scheduler.get_lr())  # also sets a cycled momentum
    except Exception:  # beyond the end of a shortened schedule, or in a user's function
        pass
    return []


def _restored(live: Any, value: Any) -> Any:
    """Return `value`, written into the tensors of `live`, which a captured graph may read."""
    if isinstance(live, torch.Tensor):
        with torch.no_grad():
            return live.copy_(torch.as_tensor(value))
    if isinstance(live, tuple | list):
        make = getattr(type(live), "_make", type(live))  # a named tuple takes its fields one by one
        return make([_restored(*pair) for pair in zip(live, value, strict=True)])
    return copy.deepcopy(value)


def _parameters(kind: type) -> set[str]:
    """Return the parameter names of the constructors of a class and its bases."""
    made = (vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base))
    return {name for init in made for name in inspect.signature(init).parameters}


def _is_plain(value: Any) -> bool:
    """Return whether a value can be a setting: a plain value, or a container of plain values."""
    if isinstance(value, torch.Tensor):
        return value.numel() <= MAX_ELEMENTS
    if isinstance(value, Mapping):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    return (
        value is None
        or isinstance(value, str | Number)
        or (_is_sequence(value) and all(map(_is_plain, value)))
    )


def _is_sequence(value: Any) -> bool:
    return isinstance(value, tuple | list)


def _same(one: Any, other: Any) -> bool:
    """Compare two plain values; a tensor equals its number, a tuple an equal list, NaN another NaN."""
    for tensor, value in ((one, other), (other, one)):
        if isinstance(tensor, torch.Tensor):
            if not isinstance(value, torch.Tensor | Number):
                return False
            try:
                a, b = (torch.as_tensor(v, dtype=tensor.dtype, device="cpu") for v in (tensor, value))
            except (TypeError, ValueError, RuntimeError):  # the dtype cannot hold this number
                return False
            return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
    if _is_sequence(one) and _is_sequence(other):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other) or bool(one != one and other != other)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _plain(value: Any) -> Any:
    """Return a value with numbers for tensors and tuples for sequences."""
    if isinstance(value, torch.Tensor):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {key: _plain(element) for key, element in value.items()}
    return tuple(map(_plain, value)) if _is_sequence(value) else value
