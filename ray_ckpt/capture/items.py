"""Items: what a user registers, each seen as a tree whose tensor leaves are live.

`tree()` shows an item's state as nested dicts and lists with its own tensors as leaves (nothing is
copied); `load(tree)` puts a restored tree back. Tensors that exist already are restored in place before
`load`, so `load` only sets the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.utils.data import DistributedSampler

from ray_ckpt.capture.per_rank import PerRankItem
from ray_ckpt.data import loader_problems
from ray_ckpt.errors import UnsupportedItem
from ray_ckpt.format.short import key_text

_WRAPPER_SEGMENTS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


class Item(Protocol):
    """An adapter around a registered object."""

    per_rank: bool
    """Its state belongs to the rank: the tensors get names of their own, `rank<k>. ...`."""

    def tree(self) -> Any: ...

    def load(self, tree: Any) -> None: ...

    def problems(self, saved: Any) -> list[str]:
        """Why a saved tree (with TensorRef leaves) does not fit, found before anything is read."""
        ...

    def is_shared(self, path: tuple[str, ...]) -> bool:
        """Whether all ranks hold the same bytes at `path` by construction, so that one copy is enough.

        True of parameters and optimizer state. Buffers (BatchNorm) and a user's own tensors may differ
        between ranks, so each rank saves its own.
        """
        ...

    def is_replaced(self, path: tuple[str, ...]) -> bool:
        """Whether `load` wants a new tensor for `path`, shaped as saved. Else the live one is filled."""
        ...

    def changes_in_step(self, path: tuple[str, ...]) -> bool:
        """Whether the tensor at `path` changes in an optimizer's step only, as far as the item knows."""
        ...

    def allocate(self, path: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor for a leaf that was saved and does not live yet, placed as the item would place it."""
        ...


def clean_name(name: str) -> str:
    """`name` without the segments that DDP, torch.compile, FSDP1 and activation checkpointing add."""
    return ".".join(s for s in name.split(".") if s not in _WRAPPER_SEGMENTS)


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel or torch.compile."""
    while isinstance(inner := getattr(module, "_orig_mod", None), nn.Module) or (
        isinstance(module, nn.parallel.DistributedDataParallel)
        and isinstance(inner := module.module, nn.Module)
    ):
        module = inner
    return module


class ModuleItem:
    per_rank = False

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = {clean_name(n) for n, _ in module.named_parameters(remove_duplicate=False)}
        self._names: tuple[tuple[str, ...], tuple[str, ...]] = (), ()  # of the tree before: full, clean

    def tree(self) -> Any:
        state = self._module.state_dict(keep_vars=True)  # the same objects each time
        if (names := tuple(state)) != self._names[0]:
            self._names = names, tuple(map(clean_name, names))
        return dict(zip(self._names[1], state.values(), strict=True))

    def load(self, tree: Any) -> None:
        extra = {k: v for k, v in tree.items() if _is_extra_state(k) or not isinstance(v, torch.Tensor)}
        if extra:
            names = {clean_name(k): k for k in self._module.state_dict()}
            self._module.load_state_dict({names[k]: v for k, v in extra.items()}, strict=False)

    def problems(self, saved: Any) -> list[str]:
        here = self.tree().keys()
        gone = [f"{name}: in the checkpoint, not in the model" for name in saved if name not in here]
        return gone + [f"{name}: not in the checkpoint" for name in here if name not in saved]

    def is_shared(self, path: tuple[str, ...]) -> bool:
        return ".".join(path) in self._parameters

    def is_replaced(self, path: tuple[str, ...]) -> bool:
        return _is_extra_state(path[0])

    def changes_in_step(self, path: tuple[str, ...]) -> bool:
        return ".".join(path) in self._parameters

    def allocate(self, path: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)


class TensorItem:
    per_rank = False

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def tree(self) -> Any:
        return self._tensor

    def load(self, tree: Any) -> None:
        pass  # restored in place

    def problems(self, saved: Any) -> list[str]:
        return []

    def is_shared(self, path: tuple[str, ...]) -> bool:
        return isinstance(self._tensor, nn.Parameter)

    def is_replaced(self, path: tuple[str, ...]) -> bool:
        return False

    def changes_in_step(self, path: tuple[str, ...]) -> bool:
        return isinstance(self._tensor, nn.Parameter)

    def allocate(self, path: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)


class StatefulItem(PerRankItem):
    """Anything with state_dict and load_state_dict: schedulers, scalers, samplers, loaders.

    Its state may differ per rank (data position), so each rank keeps its own. What it takes is for its own
    load_state_dict to decide, but for torchdata's loaders, which find out too late.
    """

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def tree(self) -> Any:
        return self.obj.state_dict()

    def load(self, tree: Any) -> None:
        self.obj.load_state_dict(tree)

    def problems(self, saved: Any) -> list[str]:
        return loader_problems(self.obj, saved)


class SchedulerItem(StatefulItem):
    """A scheduler of torch's, whose load_state_dict takes the state of any other kind without a word."""

    def problems(self, saved: Any) -> list[str]:
        return _scheduler_problems(self.tree(), saved)


class ScalerItem(StatefulItem):
    """A torch.amp.GradScaler. A disabled one has no state, which an enabled one does not take."""

    def problems(self, saved: Any) -> list[str]:
        if self.tree() and not saved:
            return ["the scaler was disabled when the checkpoint was saved, and is enabled here"]
        return []


class SamplerItem(PerRankItem):
    """A DistributedSampler: {"epoch"}, which is all that it has.

    The position inside an epoch is not in it: after a restore the epoch begins again. The batches of a
    `ray_ckpt.data.GlobalBatchSampler` have the position too.
    """

    def __init__(self, sampler: DistributedSampler[Any]) -> None:
        self.obj = sampler

    def tree(self) -> Any:
        return {"epoch": self.obj.epoch}

    def load(self, tree: Any) -> None:
        self.obj.set_epoch(tree["epoch"])


class TreeItem:
    """A dict or list of plain values and tensors, updated in place."""

    per_rank = False

    def __init__(self, tree: Any) -> None:
        self._tree = tree

    def tree(self) -> Any:
        return self._tree

    def load(self, tree: Any) -> None:
        _assign(self._tree, tree)

    def problems(self, saved: Any) -> list[str]:
        return _structure_problems(self._tree, saved, "")

    def is_shared(self, path: tuple[str, ...]) -> bool:
        return False

    def is_replaced(self, path: tuple[str, ...]) -> bool:
        return False

    def changes_in_step(self, path: tuple[str, ...]) -> bool:
        return False

    def allocate(self, path: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)


class OptimizerItem:
    """An optimizer whose state is named by parameter: {"state": {name: {...}}, "param_groups": [...]}."""

    per_rank = False

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        owners: Mapping[str, nn.Module | nn.Parameter],
    ) -> None:
        self._name = name
        self._optimizer = optimizer
        self._owners = owners
        self._params = dict(self._named(parameter_names(owners)))

    def _refresh(self) -> None:
        """Groups may be added at any time: name their parameters too. UnsupportedItem if nobody owns them."""
        named = set(map(id, self._params.values()))
        if any(id(param) not in named for group in self._optimizer.param_groups for param in group["params"]):
            self._params = dict(self._named(parameter_names(self._owners)))

    def _named(self, names: Mapping[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in names:
                    raise UnsupportedItem(
                        f"{self._name!r} optimizes a parameter of shape {tuple(param.shape)} "
                        "that belongs to no registered item.",
                        hint="Register its module too: Checkpointer(model=model, optimizer=optimizer). "
                        "Build the optimizer after fully_shard(), which replaces parameters.",
                        item=self._name,
                    )
                yield names[id(param)], param

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """What it optimizes, by the names under which the state is saved."""
        return self._params

    def tree(self) -> Any:
        self._refresh()
        names = {id(p): n for n, p in self._params.items()}
        state = {
            n: dict(self._optimizer.state[p]) for n, p in self._params.items() if p in self._optimizer.state
        }
        groups = [
            {**{k: v for k, v in g.items() if k != "params"}, "params": [names[id(p)] for p in g["params"]]}
            for g in self._optimizer.param_groups
        ]
        return {"state": state, "param_groups": groups}

    def load(self, tree: Any) -> None:
        self._optimizer.state.clear()  # what lives here and was not saved does not belong to the saved step
        for param_name, state in tree["state"].items():
            self._optimizer.state[self._params[param_name]] = state
        for group, values in zip(self._optimizer.param_groups, tree["param_groups"], strict=True):
            group.update({k: v for k, v in values.items() if k != "params"})

    def problems(self, saved: Any) -> list[str]:
        here = [set(g["params"]) for g in self.tree()["param_groups"]]
        if here != [set(g["params"]) for g in saved["param_groups"]]:  # the order depends on wrappers
            return ["groups its parameters otherwise than the checkpoint"]
        return []

    def is_shared(self, path: tuple[str, ...]) -> bool:
        return True

    def is_replaced(self, path: tuple[str, ...]) -> bool:
        return False

    def changes_in_step(self, path: tuple[str, ...]) -> bool:
        return path[0] == "state"  # not the groups: a schedule may change a learning rate that is a tensor

    def allocate(self, path: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """State of a parameter's own shape is placed as the parameter is, other state on its device.

        `step` stays on the CPU unless the group is fused or capturable, as torch's load_state_dict does.
        """
        param = self._params.get(path[1]) if path[0] == "state" else None
        if param is None:
            return torch.zeros(shape, dtype=dtype)
        if tuple(param.shape) == shape and path[-1] != "step":
            # Not cleared: every element is read into it, by several threads, which touch its memory first.
            return torch.empty_like(param, dtype=dtype, requires_grad=False).detach()
        group = next(g for g in self._optimizer.param_groups if any(p is param for p in g["params"]))
        on_device = path[-1] != "step" or group.get("fused") or group.get("capturable")
        return torch.zeros(shape, dtype=dtype, device=param.device if on_device else "cpu")


def parameter_names(owners: Mapping[str, nn.Module | nn.Parameter]) -> dict[int, str]:
    """Name of each parameter by identity: its FQN, behind the item's name if there are several owners."""
    several = len(owners) > 1
    names: dict[int, str] = {}
    for item, owner in owners.items():
        if isinstance(owner, nn.Parameter):
            names.setdefault(id(owner), item)
            continue
        for name, param in unwrap(owner).named_parameters():
            names.setdefault(id(param), f"{item}.{clean_name(name)}" if several else clean_name(name))
    return names


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that this rank holds; any other tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    return to_local().detach() if to_local is not None else tensor.detach()


def _is_extra_state(name: str) -> bool:
    """Whether a module made the value in `get_extra_state`, just now, and wants it in `set_extra_state`."""
    return name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def _scheduler_problems(here: Mapping[str, Any], saved: Any, where: str = "") -> list[str]:
    """Attributes and inner schedulers that the checkpoint has not. Private names differ between torch's."""
    if not isinstance(saved, Mapping):
        return [f"{where}the scheduler: in the checkpoint it is none"]
    missing = sorted(key for key in here if not key.startswith("_") and key not in saved)
    if missing:
        return [f"{where}the scheduler: is of another kind in the checkpoint, without {missing}"]
    num, saved_num = len(here.get("base_lrs", ())), len(saved.get("base_lrs", ()))
    if num != saved_num:
        return [f"{where}the scheduler: has {saved_num} parameter groups in the checkpoint, {num} here"]
    inner, saved_inner = here.get("_schedulers", []), saved.get("_schedulers", [])
    if len(inner) != len(saved_inner):
        return [f"{where}the scheduler: joins {len(saved_inner)} in the checkpoint, {len(inner)} here"]
    pairs = enumerate(zip(inner, saved_inner, strict=True))
    return [p for i, (a, b) in pairs for p in _scheduler_problems(a, b, f"{where}scheduler {i} of ")]


def _structure_problems(target: Any, saved: Any, path: str) -> list[str]:
    """Where two trees of dicts and lists differ in shape. Leaves may differ, and lists without tensors."""
    here = isinstance(target, MutableMapping | MutableSequence)
    if not here and not isinstance(saved, dict | list):
        return []
    if isinstance(target, MutableMapping) and isinstance(saved, Mapping) and target.keys() == saved.keys():
        pairs = [(target[key], saved[key], f"{path}.{key_text(key)}") for key in target]
    elif isinstance(target, MutableSequence) and isinstance(saved, list) and len(target) == len(saved):
        pairs = [(a, b, f"{path}.{i}") for i, (a, b) in enumerate(zip(target, saved, strict=True))]
    elif _is_plain_list(target) and _is_plain_list(saved):
        return []  # a list of losses, say, that has grown
    else:
        return [f"{path.removeprefix('.') or 'the tree'}: has another structure in the checkpoint"]
    return [problem for pair in pairs for problem in _structure_problems(*pair)]


def _is_plain_list(value: Any) -> bool:
    leaves = (str, bytes, int, float, complex, bool, type(None))
    return isinstance(value, MutableSequence) and all(isinstance(item, leaves) for item in value)


def _assign(target: Any, value: Any) -> None:
    """Put `value` into containers of the same structure; tensors in it are those of `target` already."""
    if _is_plain_list(target) and _is_plain_list(value):
        target[:] = value
        return
    for key, new in value.items() if isinstance(value, Mapping) else enumerate(value):
        if isinstance(target[key], MutableMapping | MutableSequence):
            _assign(target[key], new)
        elif new is not target[key]:
            target[key] = new
