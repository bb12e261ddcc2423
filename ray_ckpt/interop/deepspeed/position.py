"""The position of an engine: its counters, its loss scale, and what its base optimizer counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
SCALES = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Fields of a dynamic loss scaler that change during training."""
FORCED = "_is_gradient_accumulation_boundary"
"""The engine's attribute of what `set_gradient_accumulation_boundary` was given; None: nothing."""
UNMANAGED = "_unmanaged_backward_count"
"""The engine's number of backward passes since the last step, if the loop decides about steps."""


def of(engine: Any) -> dict[str, Any]:
    """Return the counters, and the state of a dynamic loss scaler; {} for a constant scale."""
    return {**{name: getattr(engine, name) for name in COUNTERS}, "loss_scaler": _scales(engine)}


def _scales(engine: Any) -> dict[str, Any]:
    scaler = engine.optimizer.loss_scaler
    return {name: getattr(scaler, name) for name in SCALES} if scaler.dynamic else {}


def restore(engine: Any, saved: Mapping[str, Any]) -> None:
    """Set the result of `of`. A number of batches in a step that differs begins its window anew."""
    for name in COUNTERS:
        setattr(engine, name, saved[name])
    _align(engine)
    if engine.optimizer.loss_scaler.dynamic:
        for name, value in saved["loss_scaler"].items():
            setattr(engine.optimizer.loss_scaler, name, value)


def begin_at(engine: Any, num_steps: int) -> None:
    """Set the counters as if the engine had made that many steps of its present size."""
    engine.global_steps, engine.skipped_steps = num_steps, 0
    engine.global_samples = num_steps * engine.train_batch_size()
    engine.micro_steps = num_steps * engine.gradient_accumulation_steps()


def _align(engine: Any) -> None:
    per_step = engine.gradient_accumulation_steps()
    if engine.micro_steps % per_step:
        engine.micro_steps = engine.global_steps * per_step


def is_accumulating(engine: Any) -> bool:
    """Return whether batches of an accumulation window wait for more."""
    if (is_boundary := getattr(engine, FORCED)) is not None:
        return not is_boundary
    if not engine.managed_gradient_accumulation():
        return bool(getattr(engine, UNMANAGED))
    return bool(engine.micro_steps % engine.gradient_accumulation_steps())


def torch_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Return the class of torch with the state of a base optimizer; its own class if there is none."""
    if not counts_in_python(optimizer):
        return type(optimizer)
    return torch.optim.AdamW if getattr(optimizer, "adam_w_mode", True) else torch.optim.Adam


def counts_in_python(optimizer: Any) -> bool:
    """Return whether an optimizer is an Adam of DeepSpeed, whose state counts steps in Python's numbers."""
    return type(optimizer).__module__.startswith("deepspeed.ops.adam") and hasattr(optimizer, "adam_w_mode")
