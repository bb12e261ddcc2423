"""Choice of the tensors that are copied in the background, and the hook that waits for the copy.

In a normal loop parameters and their optimizer state change in `optimizer.step()` only, so a hook before each
step keeps a copy of them consistent. Everything else (buffers, scaler and scheduler state, an EMA, frozen
parameters, parameters that are updated inside backward) is copied before `save` returns. Code that changes
parameters in another way must do so within `ckpt.lock()`. Otherwise the tensor's version counter shows the
change and the save is dropped; the counter misses changes through `.data`, which only `verify_captures`
finds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ray_ckpt.capture.items import PartitionedOptimizer, storage_of
from ray_ckpt.capture.torch_private import is_updated_in_backward
from ray_ckpt.capture.walk import LiveSlice

Stepped: TypeAlias = torch.optim.Optimizer | PartitionedOptimizer
"""An optimizer whose steps run the hook."""


class Running:
    """Copies that are running in this process; `wait` returns when live state may change again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: dict[int, Any] = {}
        self._is_hooked = False

    def add(self, copy: Any) -> None:
        with self._lock:
            if not self._is_hooked:
                # Runs outside compiled graphs. A decorator would load torch._dynamo on import, for 1 s.
                register_optimizer_step_pre_hook(torch.compiler.disable(_before_step))  # type: ignore[no-untyped-call]
                os.register_at_fork(after_in_child=self._forget)
                self._is_hooked = True
            self._copies[id(copy)] = copy

    def end(self, copy: Any) -> None:
        """Remove a copy that has ended or failed, so that nothing waits for it."""
        with self._lock:
            self._copies.pop(id(copy), None)
        copy.host_copied.set()

    def _forget(self) -> None:
        """Drop all copies in a forked child, which has no thread to end them."""
        self._lock, self._copies = threading.Lock(), {}

    def wait(self) -> None:
        if self._copies:  # read without the lock: this runs before every optimizer step
            for copy in list(self._copies.values()):
                copy.before_change()


running = Running()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Wait for copies before the step of any optimizer of this process, registered or not."""
    running.wait()


def guarded_storages(optimizers: Iterable[Stepped]) -> set[int]:
    """Return the addresses of storages that only the `step` of one of these optimizers changes.

    Left out: optimizers whose `step` runs no hooks, and parameters that are updated inside backward.
    """
    guarded: set[int] = set()
    refused: set[int] = set()
    for stepped in optimizers:
        optimizer = stepped.optimizer if isinstance(stepped, PartitionedOptimizer) else stepped
        is_hooked = runs_hooks(optimizer)
        for param in optimized(stepped):
            places = guarded if is_hooked and not is_updated_in_backward(param) else refused
            places.update(_storages(optimizer, param))
    return guarded - refused


def stepped_storages(optimizers: Iterable[Stepped]) -> set[int]:
    """Return the addresses of all storages that steps of these optimizers may change."""
    found: set[int] = set()
    for stepped in optimizers:
        optimizer = stepped.optimizer if isinstance(stepped, PartitionedOptimizer) else stepped
        for param in optimized(stepped):
            found.update(_storages(optimizer, param))
    return found


def _storages(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> Iterator[int]:
    """Yield the addresses of the storages of a parameter and its state."""
    yield storage_of(param)
    state = optimizer.state.get(param, {}) if param in optimizer.state else {}
    yield from (storage_of(value) for value in state.values() if isinstance(value, torch.Tensor))


def optimized(stepped: Stepped) -> Iterator[torch.Tensor]:
    """Yield the tensors that the steps of an optimizer change, its state aside."""
    if isinstance(stepped, PartitionedOptimizer):
        yield from stepped.partitions
        return
    for group in stepped.param_groups:
        yield from group["params"]


def runs_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `step` of the optimizer runs hooks."""
    return getattr(type(optimizer).step, "hooked", False)


def hooks_in_backward(optimizers: Iterable[Stepped]) -> int:
    """Return the number of parameters that may be updated inside backward."""
    return sum(is_updated_in_backward(param) for stepped in optimizers for param in optimized(stepped))


def _may_wait(live: LiveSlice) -> bool:
    """Return whether the slice changes in steps only, and has version counters that count changes."""
    return live.changes_in_step and not live.is_inference


def background_slices(slices: Iterable[LiveSlice], guarded: set[int]) -> set[str]:
    """Return the keys of the slices whose memory only an optimizer's step changes.

    `slices` are all slices of the rank, also those that another rank saves: a buffer may be a view of a
    parameter.
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
