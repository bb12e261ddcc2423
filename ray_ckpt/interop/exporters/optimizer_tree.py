"""The form of an optimizer's item that other trainers can take."""

from __future__ import annotations

from typing import Any

from ray_ckpt.errors import ConfigError


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


def _are_states(states: Any) -> bool:
    return isinstance(states, dict) and all(isinstance(state, dict) for state in states.values())


def _are_groups(groups: Any) -> bool:
    return isinstance(groups, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    )
