"""Accumulation windows: gradients that backward has made and no optimizer's step has used.

A checkpoint is the state after an optimizer's step, so a save moves to the end of the window (`Window`), or
takes the gradients along where they are public, in `.grad` (`GradientsItem`). They are not with FSDP, which
keeps those of a window without synchronization in buffers of its own, and not where the optimizer runs inside
backward.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ray_ckpt.capture.items import local_tensor, parameter_names
from ray_ckpt.capture.per_rank import PerRankItem
from ray_ckpt.errors import UnsupportedItem

Versions: TypeAlias = tuple[int, int]


class Window:
    """Sees whether gradients are waiting for a step. Looks at this rank only; others may see it otherwise.

    A hook after each step notes which gradients it has used: objects and version counters, 0.5 us per
    parameter. Nothing is kept alive and no device is waited for, but where a gradient differs from what was
    noted: then its values count, for `zero_grad(set_to_none=False)` leaves zeros.

    Not seen: gradients of an optimizer whose `step` runs no hooks, and changes through `.data`.
    """

    def __init__(
        self, optimizers: Iterable[torch.optim.Optimizer], modules: Iterable[nn.Module] = ()
    ) -> None:
        """`modules` are looked through for FSDP2, which hides gradients while it does not synchronize."""
        self._used = [_Used(optimizer) for optimizer in optimizers if _runs_hooks(optimizer)]
        self._sharded = [m for module in modules for m in module.modules() if _is_fsdp2(m)]
        self._last: _Used | None = None
        # Outside compiled graphs, as capture/guard.py's hook.
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
        """Steps that the optimizer with the most of them has made; 0 if none runs hooks."""
        return max((used.num_steps for used in self._used), default=0)

    def close(self) -> None:
        """Take the hooks back."""
        for handle in self._handles:
            handle.remove()

    def has_unused(self) -> bool:
        """Whether there are gradients that are not zero and that no step of their optimizer has used."""
        return _has_hidden(self._sharded) or any(used.has_unused() for used in self._used)

    def is_open(self) -> bool:
        """Whether a save should wait for a step. To be asked after each step until it says no.

        Of several optimizers one may find gradients that another's loss has left in its parameters, and drop
        them with its next zero_grad (a GAN's discriminator). They look like a window that never ends: the
        optimizer steps between two questions, and there are new ones at once. From then on, what was there at
        any optimizer's step does not count for it.
        """
        found = [used for used in self._used if used.has_unused()]
        for used in self._used:
            if used not in found:
                used.found_after = None
            elif used.found_after in (None, used.num_steps) or self._last is used:
                used.found_after = used.num_steps
            else:
                used.is_left_over = True
                used.note()
                found.remove(used)
        return bool(found) or _has_hidden(self._sharded)


class _Used:
    """An optimizer, and the gradients that its last step has used."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.num_steps = 0
        self.found_after: int | None = None  # `num_steps` when it was last found with unused gradients
        self.is_left_over = False
        self._noted: dict[int, tuple[weakref.ref[torch.Tensor], Versions]] = {}  # by id of the parameter

    def note(self) -> None:
        # The reference is weak to hold no memory, and no id, which the next gradient may have again.
        self._noted = {
            id(param): (weakref.ref(grad), _versions(grad))
            for group in self.optimizer.param_groups
            for param in group["params"]
            if (grad := param.grad) is not None
        }

    def has_unused(self) -> bool:
        changed = [
            grad
            for group in self.optimizer.param_groups
            for param in group["params"]
            if (grad := param.grad) is not None and not self._is_noted(param, grad)
        ]
        # Of an open window the first one tells mostly.
        return _any_nonzero(changed[:1]) or _any_nonzero(changed[1:])

    def _is_noted(self, param: torch.Tensor, grad: torch.Tensor) -> bool:
        ref, versions = self._noted.get(id(param), (None, None))
        return ref is not None and ref() is grad and versions == _versions(grad)


def _versions(grad: torch.Tensor) -> Versions:
    """Counters of changes in place. A DTensor counts those of its operations, FSDP2 adds to the local one."""
    version = grad._version
    return version, grad._local_tensor._version if isinstance(grad, DTensor) else version


def _any_nonzero(grads: Sequence[torch.Tensor]) -> bool:
    """Whether this rank's part of one of them has an element other than zero. Waits once for each device."""
    flags: dict[torch.device, list[torch.Tensor]] = {}
    for grad in grads:
        local = local_tensor(grad)
        values = local._values() if local.is_sparse else local
        flags.setdefault(values.device, []).append(values.any())
    return any(bool(torch.stack(found).any()) for found in flags.values())


def _runs_hooks(optimizer: torch.optim.Optimizer) -> bool:
    return getattr(type(optimizer).step, "hooked", False)


def _is_fsdp2(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # unless it was imported, there is none
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _is_fsdp1(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def _has_hidden(modules: Iterable[Any]) -> bool:
    """Whether FSDP2 keeps gradients that were not reduced (`set_requires_gradient_sync(False)`), or by half
    of its mesh only (`set_requires_all_reduce(False)`): torch 2.13, FSDPParam and FSDPParamGroup."""
    groups = [group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]
    return any(
        group._partial_reduce_output is not None
        or any(
            param.unsharded_accumulated_grad is not None
            or getattr(getattr(param, "_unsharded_param", None), "grad", None) is not None
            for param in group.fsdp_params
        )
        for group in groups
    )


# -- saving them --------------------------------------------------------------------------------------

_PLACEMENTS: Mapping[str, type[Placement]] = {t.__name__: t for t in (Replicate, Shard, Partial)}


def check_public(modules: Mapping[str, nn.Module | nn.Parameter]) -> None:
    """UnsupportedItem, with the item's name, if gradients of a window would not be in `.grad`."""
    for name, owner in modules.items():
        parts = list(owner.modules()) if isinstance(owner, nn.Module) else []
        params = list(owner.parameters()) if isinstance(owner, nn.Module) else [owner]
        if any(map(_is_fsdp1, parts)):
            _refuse(name, "FullyShardedDataParallel keeps them in a flat buffer of its own")
        if any(map(_is_fsdp2, parts)):
            _refuse(name, "fully_shard keeps them in buffers of its own while it does not synchronize")
        if any(getattr(param, "_post_accumulate_grad_hooks", None) for param in params):
            _refuse(name, "its optimizer runs inside backward and uses them up there")


def _refuse(name: str, reason: str) -> None:
    raise UnsupportedItem(
        f"The gradients of {name!r} cannot be saved in the middle of an accumulation window: {reason}.",
        hint="Leave partial_grads off: a save then moves to the end of the window.",
        item=name,
    )


class GradientsItem(PerRankItem):
    """The gradients in an accumulation window, each rank's own, by the names of the parameters.

    {"world_size": int, "gradients": {name: this rank's part}, "layouts": {name: of a DTensor}}; without
    gradients if the window is closed, so that any world size can take the checkpoint.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module | nn.Parameter], *, window: Window, world_size: int
    ) -> None:
        check_public(modules)
        names = parameter_names(modules)
        found = (o.parameters() if isinstance(o, nn.Module) else (o,) for o in modules.values())
        self._params = {names[id(param)]: param for params in found for param in params}
        self._window = window
        self._world_size = world_size

    def tree(self) -> Any:
        params = self._params if self._window.has_unused() else {}
        grads = {name: grad for name, param in params.items() if (grad := param.grad) is not None}
        return {
            "world_size": self._world_size,
            "gradients": {name: local_tensor(grad) for name, grad in grads.items()},
            "layouts": {name: _layout(name, g) for name, g in grads.items() if isinstance(g, DTensor)},
        }

    def load(self, tree: Any) -> None:
        """Set `.grad` of every parameter; None where none was saved."""
        for name, param in self._params.items():
            grad, layout = tree["gradients"].get(name), tree["layouts"].get(name)
            param.grad = grad if layout is None else _dtensor(grad, layout, param)

    def problems(self, saved: Any) -> list[str]:
        saved_by, grads, layouts = saved["world_size"], saved["gradients"], saved["layouts"]
        if grads and saved_by != self._world_size:
            return [
                f"{saved_by} ranks saved their gradients in the middle of an accumulation window, "
                f"which {self._world_size} ranks cannot take"
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


def _mesh_of(tensor: torch.Tensor) -> list[int] | None:
    return list(tensor.device_mesh.shape) if isinstance(tensor, DTensor) else None


def _layout(name: str, grad: DTensor) -> dict[str, Any]:
    """What makes a DTensor of its local part again, on the mesh of the parameter."""
    placements = [[type(p).__name__, *_arguments(name, p)] for p in grad.placements]
    return {
        "mesh": _mesh_of(grad),
        "placements": placements,
        "shape": tuple(grad.shape),
        "stride": grad.stride(),
    }


def _arguments(name: str, placement: Placement) -> list[Any]:
    if type(placement) is Shard:
        return [placement.dim]
    if type(placement) is Partial:
        return [placement.reduce_op]
    if type(placement) is Replicate:
        return []
    raise UnsupportedItem(
        f"The gradient of {name} has the placement {placement}, which cannot be saved.",
        hint="Leave partial_grads off: a save then moves to the end of the window.",
        item=name,
    )


def _dtensor(local: torch.Tensor, layout: Mapping[str, Any], param: Any) -> DTensor:
    return DTensor.from_local(
        local,
        param.device_mesh,
        [_PLACEMENTS[kind](*arguments) for kind, *arguments in layout["placements"]],
        run_check=False,
        shape=torch.Size(layout["shape"]),
        stride=tuple(layout["stride"]),
    )
