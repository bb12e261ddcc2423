"""Items: adapters of registered objects, each with a tree whose leaves are live tensors.

`tree()` returns the state of an item as nested dicts and lists whose leaves are the item's tensors, not
copied; `load(tree)` sets a restored tree. Existing tensors are restored in place before `load`, so `load`
sets only the rest of the tree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DistributedSampler

from ray_ckpt.capture.torch_private import EXTRA_STATE_SUFFIX, places
from ray_ckpt.capture.wrappers import clean_name, names_in, plain_names, unwrap
from ray_ckpt.data import load_loader_state, loader_problems, loader_state
from ray_ckpt.errors import UnsupportedItem
from ray_ckpt.format.tree import TensorRef


class Item(ABC):
    """An adapter around a registered object."""

    per_rank: ClassVar[bool] = False
    """True if each rank has its own state; the names of its tensors then begin with `rank<k>.`."""

    @abstractmethod
    def tree(self) -> Any: ...

    @abstractmethod
    def load(self, tree: Any) -> None: ...

    def load_for_new_rank(self, tree: Any, rank: int) -> None:
        """Load initial state on a rank without state in the checkpoint; `tree` is the tree of rank 0."""
        self.load(tree)

    is_partial: ClassVar[bool] = False
    """True if the item may be loaded with a part of its saved state, and without the other saved items."""

    def wanted(self, saved: Any) -> Any:
        """Return the part of a saved tree (with TensorRef leaves) that is to be loaded."""
        return saved

    def renamed(self, saved: Any) -> Any:
        """Return a saved tree (with TensorRef leaves) under the names of this object."""
        return saved

    def problems(self, saved: Any) -> list[str]:
        """Return why a saved tree (with TensorRef leaves) does not fit; called before a byte is read."""
        return []

    def is_shared(self, path: tuple[str, ...]) -> bool:
        """Return whether all ranks hold the same bytes at `path` by construction, so that one copy is enough.

        True for parameters and optimizer state. Buffers (BatchNorm) and a user's own tensors may differ
        between ranks, so each rank saves its own.
        """
        return False

    def is_replaced(self, path: tuple[str, ...]) -> bool:
        """Return whether `load` needs a new tensor for `path`; else the live tensor is filled."""
        return self.per_rank

    def has_grown(self, leaf: Leaf, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Return whether a saved tensor of that kind replaces a live leaf that training has made larger."""
        return False

    def changes_in_step(self, path: tuple[str, ...]) -> bool:
        """Return whether the tensor at `path` is of a kind that only an optimizer's step changes."""
        return self.is_shared(path)

    @property
    def rules(self) -> object:
        """Return a value that is equal for items with the same `is_shared` and `changes_in_step`."""
        return type(self)

    def is_accumulating(self) -> bool:
        """Return whether gradients, which the item does not save, wait for an optimizer step."""
        return False

    def allocate(self, path: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return memory for a saved leaf that does not exist yet, on the device that the item uses."""
        return torch.zeros(shape, dtype=dtype, device="cpu")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoxedTensor:
    """Boxes of a global tensor of `shape` in this rank's memory, as FSDP1 or `boxes` finds them.

    A part is the offset of a box, and the box's live memory in the box's shape: views of `base`, a tensor
    that the owner keeps. Without parts other ranks hold the whole tensor. `ranks` hold the same boxes, and
    one of them saves; without ranks, others save. If the memory moves, a new BoxedTensor is made. `counted`
    has the version counter that counts changes of the boxes, if the counters of the parts do not.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    base: torch.Tensor | None = None
    parts: tuple[tuple[tuple[int, ...], torch.Tensor], ...] = ()
    ranks: tuple[int, ...] = ()
    counted: torch.Tensor | None = None


Leaf: TypeAlias = torch.Tensor | BoxedTensor
"""A leaf of an item's tree that holds a tensor."""


class NewItem(Item):
    """An item without a live object: it accepts any saved state, with whole tensors on the CPU."""

    def __init__(self) -> None:
        self.state: Any = None
        self.num_tensors = 0

    def tree(self) -> Any:
        return None

    def load(self, tree: Any) -> None:
        self.state = tree

    def is_replaced(self, path: tuple[str, ...]) -> bool:
        return True

    def allocate(self, path: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.num_tensors += 1
        return torch.empty(shape, dtype=dtype, device="cpu")


class ModuleItem(Item):
    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._clean = names_in(module)
        self._parameters = {self._clean(n) for n, _ in module.named_parameters(remove_duplicate=False)}
        self._names: tuple[tuple[str, ...], tuple[str, ...]] = (), ()  # full and clean names before
        self._copies: frozenset[str] = frozenset()  # clean names of tensors that a state_dict hook has made

    def tree(self) -> Any:
        state = self._module.state_dict(keep_vars=True)  # the same objects at each call, but for copies
        if (names := tuple(state)) != self._names[0]:
            self._clean = names_in(self._module)
            self._names = names, tuple(map(self._clean, names))
            self._copies = frozenset(map(self._clean, _copies(self._module, state)))
            ids = set(map(id, self._module.parameters()))  # a hook of the module may name them otherwise
            self._parameters |= {self._clean(name) for name in names if id(state[name]) in ids}
        return dict(zip(self._names[1], state.values(), strict=True))

    def load(self, tree: Any) -> None:
        """Load what was not filled in place, such as tensors that hooks of the module divide and join."""
        extra = {k: v for k, v in tree.items() if self.is_replaced((k,)) or not isinstance(v, torch.Tensor)}
        if extra:
            names = {self._clean(k): k for k in self._module.state_dict()}
            self._module.load_state_dict({names[k]: v for k, v in extra.items()}, strict=False)

    def renamed(self, saved: Any) -> Any:
        """Return the saved state under the names here, also if it has those of a wrapped model."""
        if not isinstance(saved, Mapping) or not all(isinstance(name, str) for name in saved):
            return saved
        here = {name: name for name in self.tree()}
        full, clean = self._names
        names = plain_names(saved, here | dict(zip(map(clean_name, full), clean, strict=True)))
        plain = {names[name]: value for name, value in saved.items()}
        return plain if len(plain) == len(saved) else saved

    def problems(self, saved: Any) -> list[str]:
        if not isinstance(saved, Mapping):
            return ["is a module here, and none in the checkpoint"]
        here = self.tree().keys()
        gone = [f"{name}: in the checkpoint, not in the model" for name in saved if name not in here]
        return gone + [f"{name}: not in the checkpoint" for name in here if name not in saved]

    def is_shared(self, path: tuple[str, ...]) -> bool:
        return ".".join(path) in self._parameters

    def is_replaced(self, path: tuple[str, ...]) -> bool:
        return is_extra_state(path[0]) or path[0] in self._copies


def _copies(module: nn.Module, state: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names in a state_dict of tensors outside of the memory of parameters and buffers."""
    live = [tensor for tensor in (*module.parameters(), *module.buffers()) if not is_lazy(tensor)]
    known, memory = {id(tensor) for tensor in live}, {storage_of(tensor) for tensor in live} | {0}
    for name, value in state.items():
        is_tensor = isinstance(value, torch.Tensor) and not is_extra_state(name) and not is_lazy(value)
        if is_tensor and id(value) not in known and storage_of(value) not in memory:
            yield name


class TensorItem(Item):
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def tree(self) -> Any:
        return self._tensor

    def load(self, tree: Any) -> None:
        pass  # the tensor was restored in place

    def problems(self, saved: Any) -> list[str]:
        return [] if isinstance(saved, TensorRef) else ["is a tensor here, and none in the checkpoint"]

    def is_shared(self, path: tuple[str, ...]) -> bool:
        return isinstance(self._tensor, nn.Parameter)


class StatefulItem(Item):
    """An object with state_dict and load_state_dict: scheduler, scaler, sampler, loader.

    The state may differ between ranks (data position), so each rank saves its own state. The object's
    load_state_dict decides whether saved state fits; only Batches and loaders of torchdata are checked here,
    before anything is loaded.
    """

    per_rank = True

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def tree(self) -> Any:
        return loader_state(self.obj)

    def load(self, tree: Any) -> None:
        load_loader_state(self.obj, tree)

    def problems(self, saved: Any) -> list[str]:
        return loader_problems(self.obj, saved)


class SchedulerItem(StatefulItem):
    """A scheduler of torch, whose load_state_dict silently accepts the state of another class."""

    def problems(self, saved: Any) -> list[str]:
        return _scheduler_problems(self.tree(), saved)


class ScalerItem(StatefulItem):
    """A torch.amp.GradScaler; an enabled scaler refuses the empty state of a disabled scaler."""

    def problems(self, saved: Any) -> list[str]:
        if not isinstance(saved, Mapping) or (saved and not saved.keys() >= self.tree().keys()):
            return ["is a GradScaler here, and none in the checkpoint"]
        if self.tree() and not saved:
            return ["the scaler was disabled when the checkpoint was saved, and is enabled here"]
        return []


class SamplerItem(Item):
    """A DistributedSampler: {"epoch"}.

    A DistributedSampler has no position within an epoch, so the epoch begins again after a restore. The
    batches of a `ray_ckpt.data.GlobalBatchSampler` also save the position.
    """

    per_rank = True

    def __init__(self, sampler: DistributedSampler[Any]) -> None:
        self.obj = sampler

    def tree(self) -> Any:
        return {"epoch": self.obj.epoch}

    def load(self, tree: Any) -> None:
        self.obj.set_epoch(tree["epoch"])

    def problems(self, saved: Any) -> list[str]:
        is_one = isinstance(saved, Mapping) and "epoch" in saved
        return [] if is_one else ["is a DistributedSampler here, and none in the checkpoint"]


@dataclass(frozen=True, slots=True, eq=False)
class PartitionedOptimizer:
    """An optimizer over `partitions`, which are in its groups during its steps only."""

    optimizer: torch.optim.Optimizer
    partitions: tuple[torch.Tensor, ...]


IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Entries of a group that choose an implementation, for the devices of this process: they stay as built."""


AS_BUILT = IMPLEMENTATION | {"params", "param_names"}
"""Entries of a group that a restore leaves; the live parameters may have another order."""


OTHER_GROUPS = "its groups have other parameters than in the checkpoint"  # a problem of an optimizer


class BaseOptimizerItem(Item):
    """An optimizer with state by parameter name: {"state": {name: {...}}, "param_groups": [...]}.

    State that belongs to no parameter, which few optimizers have, is in "common", by its key.
    """

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        self._name = name
        self.optimizer = optimizer
        self._group_of: dict[int, Mapping[str, Any]] = {}  # by id of a parameter, since the last walk

    @property
    def kind(self) -> type[torch.optim.Optimizer]:
        """The class that defines the names in the state: that of the optimizer inside wrappers."""
        return type(inmost(self.optimizer))

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        """The groups of the optimizer with the tensors that it optimizes."""
        return self.optimizer.param_groups

    @property
    def stepped(self) -> torch.optim.Optimizer | PartitionedOptimizer:
        """The optimizer whose steps change the tensors of this item."""
        return self.optimizer

    @property
    @abstractmethod
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """The optimized tensors, by the names of their saved state."""

    @abstractmethod
    def _group_names(self) -> list[list[str]]:
        """Return the parameter names of each group; UnsupportedItem if no registered item owns one."""

    @abstractmethod
    def _state(self) -> dict[str, Any]: ...

    @abstractmethod
    def _load_state(self, saved: Mapping[str, Any]) -> None:
        """Set the state in an optimizer without state."""

    def tree(self) -> Any:
        self._group_of = {}
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": names}
            for group, names in zip(self.optimizer.param_groups, self._group_names(), strict=True)
        ]
        common = self._common()
        return {"state": self._state(), "param_groups": groups} | ({"common": common} if common else {})

    def _common(self) -> dict[Any, Any]:
        state: Mapping[Any, Any] = self.optimizer.state
        return {key: value for key, value in state.items() if type(key) in (str, int)}

    def load(self, tree: Any) -> None:
        common = tree.get("common") or self._common()
        self.optimizer.state.clear()  # live state that was not saved does not belong to the saved step
        self._load_state(tree["state"])
        self.optimizer.state.update(common)
        for group, values in zip(self.optimizer.param_groups, tree["param_groups"], strict=True):
            group.update({k: v for k, v in values.items() if k not in AS_BUILT})

    def problems(self, saved: Any) -> list[str]:
        if not is_optimizer_state(saved):
            return ["is an optimizer here, and none in the checkpoint"]
        return [OTHER_GROUPS] if self.has_other_groups(saved) else []

    def has_other_groups(self, saved: Any, without: Set[str] = frozenset()) -> bool:
        """Return whether the groups have other parameters than the saved ones, those in `without` aside."""
        groups = self._group_names(), [group["params"] for group in saved["param_groups"]]
        here, there = ([set(names) - without for names in each] for each in groups)
        return here != there  # sets: the order depends on wrappers

    def is_shared(self, path: tuple[str, ...]) -> bool:
        return path[:1] != ("common",)

    def changes_in_step(self, path: tuple[str, ...]) -> bool:
        return path[0] == "state"  # a tensor in a group, such as a learning rate, may change in a schedule

    def _allocate_for(
        self, param: torch.Tensor, key: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a tensor for state: laid out like the parameter if it has that shape, else on that device.

        `step` stays on the CPU unless the group is fused or capturable, as in torch's load_state_dict.
        """
        if tuple(param.shape) == shape and key != "step":
            # Not zeroed: the threads that read the saved bytes fill, and first touch, all of the memory.
            return torch.empty_like(param, dtype=dtype, requires_grad=False).detach()
        if not self._group_of:
            self._group_of = {id(p): group for group in self.param_groups for p in group["params"]}
        group = self._group_of[id(param)]
        on_device = key != "step" or group.get("fused") or group.get("capturable")
        return torch.zeros(shape, dtype=dtype, device=param.device if on_device else "cpu")

    def _without_owner(self, param: torch.Tensor, hint: str) -> UnsupportedItem:
        return UnsupportedItem(
            f"{self._name!r} optimizes a parameter of shape {tuple(param.shape)} "
            "that belongs to no registered item.",
            hint=hint,
            item=self._name,
        )


class OptimizerItem(BaseOptimizerItem):
    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        owners: Mapping[str, nn.Module | nn.Parameter],
    ) -> None:
        super().__init__(name, optimizer)
        self._owners = owners
        self._names: dict[int, str] = {}  # by id, of the parameters in the groups
        self._params: dict[str, torch.Tensor] = {}
        self._places: list[dict[str, Any]] = []  # of parameters and modules in the owners
        self._placed: tuple[list[str], list[int]] = [], []  # as of `_contents`, when the names were made
        self._group_names()

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        return self._params

    def _group_names(self) -> list[list[str]]:
        groups = [group["params"] for group in self.optimizer.param_groups]
        are_known = self._names.keys() == {id(param) for params in groups for param in params}
        if not are_known or self._placed != _contents(self._places):
            known = parameter_names(self._owners)
            modules = [owner for owner in self._owners.values() if isinstance(owner, nn.Module)]
            self._places = list(chain.from_iterable(map(places, modules)))
            self._placed = _contents(self._places)
            # A parameter may be out of its module for a while, as FSDP2's are; then it keeps its name.
            if not are_known or self._names.keys() <= known.keys():
                self._rename(chain.from_iterable(groups), known)
        return [[self._names[id(param)] for param in params] for params in groups]

    def _rename(self, params: Iterable[torch.Tensor], known: Mapping[int, str]) -> None:
        self._names, self._params = {}, {}
        for param in params:
            if id(param) not in known:
                raise self._without_owner(
                    param,
                    "Register its module too: Checkpointer(model=model, optimizer=optimizer). "
                    "Build the optimizer after fully_shard(), which replaces parameters.",
                )
            self._names[id(param)] = known[id(param)]
            self._params[known[id(param)]] = param

    def renamed(self, saved: Any) -> Any:
        """Return the state by parameter names, also if an import has it by number, as torch's state_dict.

        The i-th number in the saved groups is the i-th parameter in the groups of the live optimizer. Names
        of parameters that were saved in a wrapper become plain.
        """
        if isinstance(saved, Mapping) and "param_groups" in saved:
            saved = {"state": {}, **saved}  # DCP leaves out an empty one
        if not is_optimizer_state(saved):
            return saved
        groups, here = saved["param_groups"], self._group_names()
        numbers = [group["params"] for group in groups]
        are_numbers = {type(number) for each in numbers for number in each} == {int}
        if not are_numbers:
            names = plain_names(map(str, chain(*numbers)), names_by_clean_name(self._owners, self._params))
            if len(set(names.values())) < len(names):
                return saved
            here = [[names[str(name)] for name in each] for each in numbers]
        elif list(map(len, numbers)) != list(map(len, here)):
            return saved
        else:
            names = {str(k): name for k, name in zip(chain(*numbers), chain(*here), strict=True)}
        return {
            **saved,
            "state": {names.get(str(k), str(k)): values for k, values in saved["state"].items()},
            "param_groups": [{**group, "params": own} for group, own in zip(groups, here, strict=True)],
        }

    def _state(self) -> dict[str, Any]:
        state = self.optimizer.state
        return {name: dict(state[param]) for name, param in self._params.items() if param in state}

    def _load_state(self, saved: Mapping[str, Any]) -> None:
        for name, state in saved.items():
            self.optimizer.state[self._params[name]] = state

    def allocate(self, path: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        param = self._params.get(path[1]) if len(path) > 2 and path[0] == "state" else None
        if param is None:
            return torch.zeros(shape, dtype=dtype, device="cpu")
        return self._allocate_for(param, path[-1], shape, dtype)


def is_optimizer_state(saved: Any) -> bool:
    """Return whether a saved tree is that of an optimizer; an item may have another kind of object now."""
    return isinstance(saved, Mapping) and {"state", "param_groups"} <= saved.keys()


def parameter_names(
    owners: Mapping[str, nn.Module | nn.Parameter],
    names_in: Callable[[nn.Module], Callable[[str], str]] = names_in,
) -> dict[int, str]:
    """Return parameter names by id: the FQN, preceded by the item's name if there are several owners."""
    several = len(owners) > 1
    names: dict[int, str] = {}
    for item, owner in owners.items():
        if isinstance(owner, nn.Parameter):
            names.setdefault(id(owner), item)
            continue
        module = unwrap(owner)
        clean = names_in(module)
        for name, param in module.named_parameters():
            names.setdefault(id(param), f"{item}.{clean(name)}" if several else clean(name))
    return names


def _contents(places: Sequence[dict[str, Any]]) -> tuple[list[str], list[int]]:
    """Return names in `places` and the ids of what they name.

    Each save compares these: to name all parameters anew takes many times as long.
    """
    return [*chain.from_iterable(places)], [*map(id, chain.from_iterable(map(dict.values, places)))]


def names_by_clean_name(
    owners: Mapping[str, nn.Module | nn.Parameter], params: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    """Return the names in `params` as `plain_names` needs them."""
    before = parameter_names(owners, lambda module: clean_name)
    return {before[id(param)]: name for name, param in params.items()}


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a DTensor, or the tensor itself."""
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor.detach()
    with torch.no_grad():  # autograd would double the time
        local: torch.Tensor = to_local()
        return local.detach()


def elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a local tensor in one dimension, a view if possible, so that bytes can be read.

    Torch gives no view of the bytes of a conjugate or negative view, nor of one element with another stride:
    these are copied.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return flat if flat.stride() == (1,) else flat.clone(memory_format=torch.contiguous_format)


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of the memory behind this rank's part of a tensor; 0 for an empty one."""
    return local_tensor(tensor).untyped_storage().data_ptr()


def inmost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer inside wrappers, such as those of Accelerate and Lightning."""
    inner = next((o for o in vars(optimizer).values() if isinstance(o, torch.optim.Optimizer)), None)
    return optimizer if inner is None or inner.state is not optimizer.state else inmost(inner)


def has_own_state_dict(obj: object) -> bool:
    """Return whether an optimizer's class defines `state_dict`, which may have state that is not saved.

    It is not called: that of a sharded optimizer may wait for all ranks.
    """
    if not isinstance(obj, torch.optim.Optimizer):
        return False
    return type(inmost(obj)).state_dict is not torch.optim.Optimizer.state_dict


def is_extra_state(name: str) -> bool:
    """Return whether `name` belongs to extra state, which `get_extra_state` creates anew at each call."""
    return name.rpartition(".")[2] == EXTRA_STATE_SUFFIX


def _scheduler_problems(here: Mapping[str, Any], saved: Any, where: str = "") -> list[str]:
    """Return public attributes and inner schedulers that are not in the checkpoint."""
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
