"""Which live tensors may be copied while the next forward and backward run, and what waits for the copy.

Parameters and their optimizer state change in `optimizer.step()` and nowhere else in a normal loop, so one
hook before every optimizer's step is enough to keep a copy of them whole. Everything else (buffers, scaler
and scheduler state, an EMA, frozen parameters, parameters that are updated inside backward) is copied
before `save` returns. A change that comes another way is to be announced with `ckpt.lock()`. One that is not
is found by the tensor's version counter, and that save is given up; but no counter sees a change through
`.data`, which only `verify_captures` finds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ray_ckpt.capture.items import local_tensor
from ray_ckpt.capture.walk import LiveSlice


class Running:
    """Copies that are running in this process; `wait` returns when live state may be changed again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: dict[int, Any] = {}
        self._is_hooked = False

    def add(self, copy: Any) -> None:
        with self._lock:
            if not self._is_hooked:
                # Outside compiled graphs. Not a decorator: it would load torch._dynamo, a second, on import.
                register_optimizer_step_pre_hook(torch.compiler.disable(_before_step))  # type: ignore[no-untyped-call]
                os.register_at_fork(after_in_child=self._forget)
                self._is_hooked = True
            self._copies[id(copy)] = copy

    def end(self, copy: Any) -> None:
        """However it ended: nobody waits for it any more."""
        with self._lock:
            self._copies.pop(id(copy), None)
        copy.host_copied.set()

    def _forget(self) -> None:
        """A forked child has no thread that would ever end its parent's copies."""
        self._lock, self._copies = threading.Lock(), {}

    def wait(self) -> None:
        if self._copies:  # read without the lock: this runs before every optimizer step
            for copy in list(self._copies.values()):
                copy.before_change()


running = Running()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Runs before the step of every optimizer of this process, registered with us or not."""
    running.wait()


def guarded_storages(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Storages (by address) that hold nothing but what one of these optimizers changes, in its `step`.

    Left out: optimizers whose `step` runs no hooks, and parameters that are updated inside backward.
    """
    guarded: set[int] = set()
    refused: set[int] = set()
    for optimizer in optimizers:
        runs_hooks = getattr(type(optimizer).step, "hooked", False)
        for group in optimizer.param_groups:
            for param in group["params"]:
                places = guarded if runs_hooks and not _has_backward_hook(param) else refused
                places.add(storage_of(param))
                state = optimizer.state.get(param, {}) if param in optimizer.state else {}
                places.update(storage_of(v) for v in state.values() if isinstance(v, torch.Tensor))
    return guarded - refused


def hooks_in_backward(optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """How many parameters are updated inside backward, or may be."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return sum(_has_backward_hook(param) for group in groups for param in group["params"])


def _has_backward_hook(param: torch.Tensor) -> bool:
    return bool(getattr(param, "_post_accumulate_grad_hooks", None))


def storage_of(tensor: torch.Tensor) -> int:
    """The address of the memory behind this rank's part of a tensor; 0 of an empty one."""
    return local_tensor(tensor).untyped_storage().data_ptr()


def _may_wait(live: LiveSlice) -> bool:
    """Whether its changes come in steps only, and are counted."""
    return live.changes_in_step and not live.leaf.is_inference() and not live.tensor.is_inference()


def background_slices(slices: Iterable[LiveSlice], guarded: set[int]) -> set[str]:
    """Keys of the slices whose memory nothing but an optimizer's step changes.

    `slices` are all of the rank, also those that another rank saves: a buffer may be a view of a parameter.
    """
    if not guarded:
        return set()
    places: dict[int, list[LiveSlice]] = {}
    for live in slices:
        places.setdefault(live.tensor.untyped_storage().data_ptr(), []).append(live)
    return {
        live.slice.key
        for place, inside in places.items()
        if place in guarded and all(map(_may_wait, inside))
        for live in inside
    }
