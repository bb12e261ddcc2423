"""Accumulation windows: gradients that backward has computed and no optimizer step has used.

A checkpoint is the state after an optimizer step, so a save waits for the end of the window (`Window`), or
includes the gradients if they are public, in `.grad` (`GradientsItem`). Gradients are not public with FSDP,
which keeps unsynchronized gradients in its own buffers, nor with an optimizer that runs inside backward.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import nn

from ray_ckpt.capture.dtensors import is_dtensor
from ray_ckpt.capture.fsdp1 import fsdp1_modules
from ray_ckpt.capture.items import Item, local_tensor, names_by_clean_name, parameter_names
from ray_ckpt.capture.overlap_guard import runs_hooks
from ray_ckpt.capture.torch_private import (
    has_hidden_gradients,
    is_updated_in_backward,
    local_part,
    version,
)
from ray_ckpt.capture.wrappers import is_deepspeed_engine, plain_names
from ray_ckpt.collector import collector_paused
from ray_ckpt.errors import UnsupportedItem


class Window:
    """Detector of gradients that wait for a step, on this rank only; other ranks may have other gradients.

    A hook after each step marks the gradients that the step used: an attribute counts their changes. The hook
    keeps nothing alive and waits for no device. Values of a gradient are read only if it is another one or
    has changed, since `zero_grad(set_to_none=False)` leaves zeros. Gradients from before the first step, as a
    warm-up or the capture of a CUDA graph leaves them, wait for nothing.

    Not detected: gradients of an optimizer whose `step` runs no hooks, and changes through `.data`.
    """

    def __init__(
        self, optimizers: Iterable[torch.optim.Optimizer], modules: Iterable[nn.Module] = ()
    ) -> None:
        """Watch `optimizers`, and the FSDP2 modules in `modules`, which hide unsynchronized gradients."""
        self._used = [_Used(optimizer) for optimizer in optimizers if runs_hooks(optimizer)]
        self._sharded = [m for module in modules for m in module.modules() if _is_fsdp2(m)]
        self._last: _Used | None = None
        # The hook runs outside compiled graphs, as the hook in overlap_guard.py does.
        self._handles = [
            used.optimizer.register_step_post_hook(torch.compiler.disable(self._after_step))  # type: ignore[no-untyped-call]
            for used in self._used
        ]

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for used in self._used:
            if used.optimizer is optimizer:
                used.num_steps += 1
                used.note()
                self._last = used
            elif used.is_left_over:
                used.note()

    @property
    def num_steps(self) -> int:
        """Number of steps of the optimizer with the most steps; 0 if no optimizer runs hooks."""
        return max(self.steps_of_each, default=0)

    @property
    def steps_of_each(self) -> tuple[int, ...]:
        """Number of steps of each optimizer that runs hooks."""
        return tuple(used.num_steps for used in self._used)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def has_unused(self) -> bool:
        """Return whether nonzero gradients exist that no step of their optimizer has used."""
        return self._has_hidden() or any(used.has_unused() for used in self._used)

    def is_open(self) -> bool:
        """Return whether a save should wait for a step. Call it after each step until it returns False.

        The loss of one optimizer may leave gradients in the parameters of another optimizer, which drops
        these gradients with its next zero_grad (a GAN's discriminator). Such gradients look like a window
        that never ends: the other optimizer steps between two calls, and has new gradients at once. From then
        on, gradients that exist at any optimizer's step do not count for that optimizer.
        """
        found = [used for used in self._used if used.has_unused()]
        for used in self._used:
            if used not in found:
                used.found_after, used.is_ignored = None, False
            elif used.is_ignored:
                found.remove(used)
            elif used.found_after in (None, used.num_steps) or self._last is used:
                used.found_after = used.num_steps
            else:
                used.is_left_over = True
                used.note()
                found.remove(used)
        return bool(found) or self._has_hidden()

    def ignore_unused(self) -> None:
        """Let saves no longer wait for the gradients that are unused now, as no step will use them.

        They count again once their optimizer has none at a call of `is_open`.
        """
        for used in self._used:
            used.is_ignored = used.has_unused()

    @contextmanager
    def moved(self) -> Iterator[None]:
        """Move or cast gradients inside this context; those that were used before stay used.

        torch may swap the attributes of a tensor too, as `Module.to` does under FSDP2: the marks are lost.
        """
        before = [used.used_by() for used in self._used]
        try:
            yield
        finally:
            for used, params in zip(self._used, before, strict=True):
                used.note_moved(params)

    def _has_hidden(self) -> bool:
        return any(map(has_hidden_gradients, self._sharded))


class _Used:
    """An optimizer, and the gradients that its last step used."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.num_steps = 0
        self.found_after: int | None = None  # `num_steps` at the last call that found unused gradients
        self.is_left_over = False
        self.is_ignored = False
        self._mark = f"_ray_ckpt_used_{next(_NUMBERS)}"  # attribute of the gradients that are used
        self.note()

    def note(self) -> None:
        # An attribute holds no memory and belongs to one object, while the next gradient may reuse an id.
        # With weak references torch would refuse to swap tensors, as `Module.to` does under FSDP2.
        with collector_paused():  # 5,000 new attributes would be seven reasons to collect garbage
            for _, grad in self._gradients():
                setattr(grad, self._mark, _num_changes(grad))

    def used_by(self) -> set[int]:
        """Return the ids of the parameters whose gradients are used."""
        return {id(param) for param, grad in self._gradients() if self._is_marked(grad)}

    def note_moved(self, params: Set[int]) -> None:
        """Mark the gradients of `params`, by id, that have lost their mark; not those that have changed."""
        with collector_paused():
            for param, grad in self._gradients():
                if id(param) in params and not hasattr(grad, self._mark):
                    setattr(grad, self._mark, _num_changes(grad))

    def has_unused(self) -> bool:
        changed = [grad for _, grad in self._gradients() if not self._is_marked(grad)]
        # In an open window the first gradient is nonzero in most cases.
        return _any_nonzero(changed[:1]) or _any_nonzero(changed[1:])

    def _is_marked(self, grad: torch.Tensor) -> bool:
        return getattr(grad, self._mark, None) == _num_changes(grad)

    def _gradients(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each parameter that has a gradient, and the gradient."""
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if (grad := param.grad) is not None:
                    yield param, grad


_NUMBERS = count()


def _num_changes(grad: torch.Tensor) -> int:
    """Return the number of changes in place of a gradient, and of its local part, which FSDP2 changes."""
    local = local_part(grad)
    return version(grad) if local is grad else version(grad) + version(local)


def _any_nonzero(grads: Sequence[torch.Tensor]) -> bool:
    """Return whether a local part has a nonzero element. Waits once for each device."""
    flags: dict[torch.device, list[torch.Tensor]] = {}
    for grad in grads:
        local = local_tensor(grad)
        values = local._values() if local.is_sparse else local
        flags.setdefault(values.device, []).append(values.any())
    return any(bool(torch.stack(found).any()) for found in flags.values())


def _is_fsdp2(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported: no FSDP2 module exists
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


# -- saving them --------------------------------------------------------------------------------------


def check_public(modules: Mapping[str, nn.Module | nn.Parameter]) -> None:
    """Raise UnsupportedItem, with the item's name, if gradients of an item would not be in `.grad`."""
    for name, owner in modules.items():
        parts = list(owner.modules()) if isinstance(owner, nn.Module) else []
        params = list(owner.parameters()) if isinstance(owner, nn.Module) else [owner]
        if isinstance(owner, nn.Module) and fsdp1_modules(owner):
            _refuse(name, "FullyShardedDataParallel keeps them in its own flat buffer")
        if is_deepspeed_engine(owner):
            _refuse(name, "DeepSpeed keeps them in its own buffers")
        if any(map(_is_fsdp2, parts)):
            _refuse(name, "fully_shard keeps unsynchronized ones in its own buffers")
        if any(map(is_updated_in_backward, params)):
            _refuse(name, "its optimizer runs inside backward and uses them there")


def _refuse(name: str, reason: str) -> None:
    raise UnsupportedItem(
        f"The gradients of {name!r} cannot be saved within an accumulation window: {reason}.",
        hint="Leave partial_grads off: a save then moves to the end of the window.",
        item=name,
    )


class GradientsItem(Item):
    """Gradients of this rank within an accumulation window, by parameter name.

    {"world_size": int, "gradients": {name: local part}, "layouts": {name: layout of a DTensor}}; without
    gradients if the window is closed, so that any world size can restore the checkpoint.
    """

    per_rank = True

    def __init__(
        self, modules: Mapping[str, nn.Module | nn.Parameter], *, window: Window, world_size: int
    ) -> None:
        check_public(modules)
        names = parameter_names(modules)
        found = (o.parameters() if isinstance(o, nn.Module) else (o,) for o in modules.values())
        self._params = {names[id(param)]: param for params in found for param in params}
        self._here = names_by_clean_name(modules, self._params)
        self._window = window
        self._world_size = world_size

    def tree(self) -> Any:
        params = self._params if self._window.has_unused() else {}
        grads = {name: grad for name, param in params.items() if (grad := param.grad) is not None}
        return {
            "world_size": self._world_size,
            "gradients": {name: local_tensor(grad) for name, grad in grads.items()},
            "layouts": {name: _layout(name, g) for name, g in grads.items() if is_dtensor(g)},
        }

    def load(self, tree: Any) -> None:
        """Set `.grad` of every parameter; None where none was saved."""
        for name, param in self._params.items():
            grad, layout = tree["gradients"].get(name), tree["layouts"].get(name)
            param.grad = grad if layout is None else _dtensor(grad, layout, param)

    def renamed(self, saved: Any) -> Any:
        """Return the gradients under the names of the parameters here, as OptimizerItem does."""
        names = plain_names(saved["gradients"], self._here)
        if len(set(names.values())) < len(names):
            return saved
        parts = ("gradients", "layouts")
        return {**saved, **{part: {names[k]: v for k, v in saved[part].items()} for part in parts}}

    def problems(self, saved: Any) -> list[str]:
        saved_by, grads, layouts = saved["world_size"], saved["gradients"], saved["layouts"]
        if grads and saved_by != self._world_size:
            return [
                f"{saved_by} ranks saved their gradients within an accumulation window, "
                f"which {self._world_size} ranks cannot restore"
            ]
        params = self._params
        problems = [
            f"{name}: a gradient in the checkpoint, no parameter here" for name in grads if name not in params
        ]
        return problems + [
            f"{name}: the mesh of its gradient is {here}, in the checkpoint {there}"
            for name in grads
            if name in params
            and (here := _mesh_of(params[name])) != (there := layouts.get(name, {}).get("mesh"))
        ]

    def allocate(self, path: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        param = self._params.get(path[1])
        if param is None:
            return super().allocate(path, shape, dtype)
        local = local_tensor(param)
        if tuple(local.shape) == shape:
            return torch.empty_like(local, dtype=dtype)
        return torch.zeros(shape, dtype=dtype, device=local.device)


def _mesh_of(tensor: Any) -> list[int] | None:
    return list(tensor.device_mesh.shape) if is_dtensor(tensor) else None  # type: ignore[attr-defined]


def _layout(name: str, grad: Any) -> dict[str, Any]:
    """Return what `_dtensor` needs to rebuild a DTensor from its local part."""
    placements = [[type(p).__name__, *_arguments(name, p)] for p in grad.placements]
    return {
        "mesh": _mesh_of(grad),
        "placements": placements,
        "shape": tuple(grad.shape),
        "stride": grad.stride(),
    }


def _arguments(name: str, placement: Any) -> list[Any]:
    tensor = _dtensor_module()
    if type(placement) is tensor.Shard:
        return [placement.dim]
    if type(placement) is tensor.Partial:
        return [placement.reduce_op]
    if type(placement) is tensor.Replicate:
        return []
    raise UnsupportedItem(
        f"The gradient of {name} has the placement {placement}, which cannot be saved.",
        hint="Leave partial_grads off: a save then moves to the end of the window.",
        item=name,
    )


def _dtensor(local: torch.Tensor, layout: Mapping[str, Any], param: Any) -> torch.Tensor:
    tensor = _dtensor_module()
    kinds = {kind.__name__: kind for kind in (tensor.Replicate, tensor.Shard, tensor.Partial)}
    rebuilt: torch.Tensor = tensor.DTensor.from_local(
        local,
        param.device_mesh,
        [kinds[kind](*arguments) for kind, *arguments in layout["placements"]],
        run_check=False,
        shape=torch.Size(layout["shape"]),
        stride=tuple(layout["stride"]),
    )
    return rebuilt


def _dtensor_module() -> Any:
    """Import `torch.distributed.tensor`, which takes half a second: only a program with DTensors needs it."""
    from torch.distributed import tensor

    return tensor
