"""Wrappers around modules, and what they add to the names of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

from torch import nn

from ray_ckpt.capture.torch_private import WRAPPER_SEGMENTS, compiled_module

PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)
"""Wrappers that have the wrapped module as `module`."""


def clean_name(name: str) -> str:
    """`name` without the segments that torch.compile, FSDP1 and activation checkpointing add."""
    return ".".join(s for s in name.split(".") if s not in WRAPPER_SEGMENTS)


def names_in(module: nn.Module) -> Callable[[str], str]:
    """Return the function that leaves out of a name in `module` what wrappers, also inside it, have added."""
    parallel = (
        f"{clean_name(name)}.module".removeprefix(".")
        for name, inside in module.named_modules(remove_duplicate=False)
        if isinstance(inside, PARALLEL)
    )
    if not (added := set(parallel)):
        return clean_name

    def clean(name: str) -> str:
        segments = clean_name(name).split(".")
        paths = accumulate(segments, lambda path, segment: f"{path}.{segment}")
        return ".".join(s for s, path in zip(segments, paths, strict=True) if path not in added)

    return clean


def plain_names(saved: Iterable[str], here: Mapping[str, str]) -> dict[str, str]:
    """Return saved names of parameters as this process has them, by the saved ones.

    Other tools save the segments that wrappers add, and the `module.` of DistributedDataParallel. `here` has
    the names in this process by their `clean_name`, which keeps that of PARALLEL inside a module, as earlier
    checkpoints do.
    """
    found = {name: clean_name(name) for name in saved}
    if not set(found.values()) <= set(here.values()):
        found = {name: here.get(clean, clean) for name, clean in found.items()}
    if all(map(_is_wrapped, found.values())) and not any(map(_is_wrapped, here.values())):
        found = {name: clean.removeprefix("module.") for name, clean in found.items()}
    return found


def _is_wrapped(name: str) -> bool:
    return name.startswith("module.")


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside PARALLEL, an engine of DeepSpeed, torch.compile or Lightning's Fabric."""
    while True:
        if isinstance(module, PARALLEL) or is_deepspeed_engine(module):
            inner: object = module.module
        elif _is_a(module, "fabric.wrappers", "_FabricModule"):
            inner = getattr(module, "_forward_module", None)
        else:
            inner = compiled_module(module)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def is_deepspeed_engine(obj: object) -> bool:
    """Return whether an object is an engine of DeepSpeed, without importing DeepSpeed."""
    return _is_a(obj, "deepspeed.runtime.engine", "DeepSpeedEngine")


def _is_a(obj: object, module: str, name: str) -> bool:
    kinds = ((kind.__module__, kind.__name__) for kind in type(obj).__mro__)
    return any(kind == name and where.endswith(module) for where, kind in kinds)
