"""The objects of a torchtitan Trainer as items of a checkpoint.

torchtitan's own state dicts are made for its files: hooks divide fused weights into copies, the state dict of
an OptimizersContainer takes a step to make state, and that of a loader has a pickle. The items are the live
tensors under the names of the parameters, and plain values.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ray_ckpt.capture.items import Item, ModuleItem, OptimizerItem
from ray_ckpt.capture.torch_private import own_parameters, persistent_buffers
from ray_ckpt.capture.wrappers import clean_name
from ray_ckpt.errors import CheckpointError, UnsupportedItem
from ray_ckpt.interop.importers.unpickler import kind_of, unpickle

UNPICKLED = "unpickled"  # key of the value of a pickle in the saved state of a loader
LOADER = "dataloader"
EXCLUDE = f"--checkpoint.exclude_from_loading {LOADER} begins the data anew"


class ModelItem(ModuleItem):
    """A module by its live parameters and persistent buffers; hooks of its state_dict are not called."""

    def __init__(self, module: nn.Module, *, is_partial: bool = False) -> None:
        """Take a module. Raises UnsupportedItem if it has extra state, which only a state_dict shows.

        With `is_partial`, the checkpoint may have items that are not loaded.
        """
        super().__init__(module)
        self.is_partial = is_partial  # type: ignore[misc]
        for name, each in module.named_modules():
            if type(each).get_extra_state is not nn.Module.get_extra_state:
                raise UnsupportedItem(
                    f"The module {name} ({type(each).__name__}) has extra state, which cannot be saved.",
                    hint="Use a module without get_extra_state.",
                    item="model",
                )

    def tree(self) -> Any:
        state: dict[str, torch.Tensor] = {}
        for prefix, module in self._module.named_modules(remove_duplicate=False):
            if isinstance(module, FSDPModule):
                module.reshard()  # after a forward pass without a backward pass, parameters are whole
            for name, tensor in (*own_parameters(module), *persistent_buffers(module)):
                state[clean_name(f"{prefix}.{name}" if prefix else name)] = tensor
        return state

    def load(self, tree: Any) -> None:
        """Do nothing: the live tensors were filled."""


class LoaderItem(Item):
    """The position of a loader of torchtitan: its state, with the values of pickles in place of their bytes.

    A saved pickle is never loaded. The values go through a pickle made anew, in memory, to the loader.
    """

    per_rank = True

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def tree(self) -> Any:
        return _without_pickles(self._loader.state_dict(), LOADER)

    def load(self, tree: Any) -> None:
        self._loader.load_state_dict(_with_pickles(tree))

    def problems(self, saved: Any) -> list[str]:
        """Return why the loader cannot continue: data are divided over the ranks that it had."""
        if _has_bytes(saved):
            return ["has bytes in the checkpoint, which are not taken for a pickle"]
        here, there = _shard(self._loader.state_dict()), _shard(saved)
        if here == there:
            return []
        return [f"is that of {there} in the checkpoint, of {here} here; {EXCLUDE}"]


def optimizer_items(optimizers: Any, model: nn.Module) -> dict[str, Item]:
    """Return the optimizers of an OptimizersContainer as `optimizer`, `optimizer_1`, and so on.

    Their state is under the names of the parameters. Raises UnsupportedItem for a class that is not torch's.
    """
    found: dict[str, Item] = {}
    for k, optimizer in enumerate(optimizers):
        kind = type(optimizer)
        if not kind.__module__.startswith("torch.optim."):
            raise UnsupportedItem(
                f"The optimizer {kind.__name__} is not torch's and may have state that is not seen.",
                hint="Use Adam or AdamW in optimizer.param_groups.",
                item="optimizer",
            )
        name = "optimizer" if k == 0 else f"optimizer_{k}"
        found[name] = OptimizerItem(name, optimizer, {"model": model})
    return found


def call_at_iteration(loader: Any, call: Callable[[], None]) -> None:
    """Call `call` each time that the loader has made an iterator, which draws a random number."""
    kind = type(loader)

    def iterate(self: Any) -> Any:
        iterator = kind.__iter__(self)
        call()
        return iterator

    loader.__class__ = type(kind.__name__, (kind,), {"__iter__": iterate, "__module__": kind.__module__})


def _shard(state: Mapping[str, Any]) -> str:
    """Return the part of the data to which a loader's state belongs, as torchtitan names it."""
    ranks = [key for key in state if isinstance(key, str) and key.startswith("dp_rank_")]
    return f"{', '.join(ranks)} of {state['world_size']}" if ranks and "world_size" in state else "all ranks"


def _without_pickles(value: Any, path: str) -> Any:
    if isinstance(value, bytes):
        return {UNPICKLED: _plain(_unpickled(value, path), path)}
    if isinstance(value, dict):
        return {key: _without_pickles(each, f"{path}.{key}") for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_pickles(each, f"{path}.{k}") for k, each in enumerate(value))
    return value


def _unpickled(data: bytes, path: str) -> Any:
    try:
        return unpickle(data, form="pt", where=path)
    except CheckpointError as error:
        raise _refused(path, error.message) from error


def _plain(value: Any, path: str) -> Any:
    """Return an unpickled value. Raises UnsupportedItem if it has anything but builtin values."""
    if kind := kind_of(value) or ("bytes" if isinstance(value, bytes) else ""):
        raise _refused(path, f"{path} has {kind}.")
    if isinstance(value, dict):
        return {key: _plain(each, f"{path}.{key}") for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(each, f"{path}.{k}") for k, each in enumerate(value))
    return value


def _refused(path: str, reason: str) -> UnsupportedItem:
    return UnsupportedItem(
        f"The state of the loader cannot be saved without pickle: {reason}",
        hint="Let its data set return plain values from state_dict: numbers, texts, lists and dicts.",
        item=path,
    )


def _with_pickles(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {UNPICKLED}:
            return pickle.dumps(value[UNPICKLED])
        return {key: _with_pickles(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_with_pickles, value))
    return value


def _has_bytes(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_bytes, value.values()))
    return isinstance(value, bytes) or (type(value) in (list, tuple) and any(map(_has_bytes, value)))
