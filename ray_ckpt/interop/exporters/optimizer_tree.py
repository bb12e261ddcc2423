"""The form of an optimizer's item that other trainers can take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray_ckpt.catalog.lazy_tensor import LazyTensor
from ray_ckpt.errors import ConfigError
from ray_ckpt.format.tree import TensorRef

STEP = "step"


def check_optimizer(tree: Any, *, with_groups: bool = True) -> None:
    """Raise ConfigError unless `tree` has the form of `optimizer.state_dict()` of torch, or of parts of it.

    Groups count only `with_groups`.
    """
    has_groups = not with_groups or (isinstance(tree, dict) and _are_groups(tree.get("param_groups", [])))
    if not (isinstance(tree, dict) and _are_states(tree.get("state", {})) and has_groups):
        raise ConfigError(
            "The item 'optimizer' is no state of one optimizer by parameter names.",
            hint="Export a checkpoint whose item 'optimizer' is one optimizer of torch, or --to dcp.",
        )


def common_step(states: Mapping[str, Mapping[str, Any]], tensors: Mapping[str, LazyTensor]) -> float | None:
    """Return the steps that all parameters have taken, None without any. Raise ConfigError if they differ.

    It may be lower than the step of the checkpoint: of a run that began from weights, or skipped steps.
    """
    values = [state[STEP] for state in states.values() if STEP in state]
    found = {float(_loaded(value, tensors)) for value in values}
    if len(found) > 1:
        raise ConfigError(f"Parameters have taken {sorted(found)} steps; this format has one number for all.")
    return next(iter(found), None)


def _loaded(value: Any, tensors: Mapping[str, LazyTensor]) -> Any:
    lazy = tensors[value.key] if isinstance(value, TensorRef) else value
    return lazy.load() if isinstance(lazy, LazyTensor) else lazy


def _are_states(states: Any) -> bool:
    return isinstance(states, dict) and all(isinstance(state, dict) for state in states.values())


def _are_groups(groups: Any) -> bool:
    return isinstance(groups, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    )
