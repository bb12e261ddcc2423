"""Optimizers over flattened parameters: parameters that are joined into one tensor, which is cut over ranks.

A rank holds a range of elements of a parameter, which consists of up to 2 * dims - 1 boxes. FSDP1 and ZeRO
cut in this way; a `FlatUnit` is one such tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch

from ray_ckpt.capture.items import BaseOptimizerItem, BoxedTensor
from ray_ckpt.errors import UnsupportedLeaf
from ray_ckpt.plan.regions import flat_parts


class FlatUnit(ABC):
    """Parameters that are joined into one flat tensor, and this rank's shard of it."""

    flat: Any
    """The flat tensor, which the optimizer has unless it has the parameters themselves."""

    @property
    @abstractmethod
    def local(self) -> torch.Tensor:
        """The shard of this rank with its padding."""

    @abstractmethod
    def shape(self, index: int) -> tuple[int, ...]:
        """Return the shape of a whole parameter."""

    @abstractmethod
    def is_here(self, index: int) -> bool:
        """Return whether this rank holds elements of a parameter."""

    @abstractmethod
    def numel_here(self, index: int) -> int:
        """Return the number of a parameter's elements on this rank."""

    @abstractmethod
    def users(self, index: int) -> tuple[int, ...]:
        """Return the ranks of the shard group that hold elements of a parameter."""

    @abstractmethod
    def everyone(self) -> tuple[int, ...]:
        """Return the ranks of the shard group."""

    def optimized(self, index: int) -> torch.Tensor:
        """Return the tensor in the optimizer that a parameter belongs to."""
        tensor: torch.Tensor = self.flat
        return tensor

    @abstractmethod
    def pieces(self, index: int, tensor: torch.Tensor, *, is_shard: bool) -> BoxedTensor:
        """Return one parameter's regions in `tensor`, which holds this rank's elements of the parameter.

        With `is_shard` it is cut like the flat tensor, and holds elements of other parameters too.
        """


def flat_boxes(
    shape: tuple[int, ...],
    start: int,
    here: torch.Tensor,
    *,
    base: torch.Tensor,
    ranks: tuple[int, ...],
) -> BoxedTensor:
    """Return the boxes of `here`: one-dimensional, elements `start` and on of a tensor of `shape`.

    `here` is a view of `base`; `ranks` hold the same elements.
    """
    found = flat_parts(shape, start, start + here.numel())
    parts = tuple((offset, here.narrow(0, at, prod(size)).view(size)) for (offset, size), (at,) in found)
    return BoxedTensor(shape=shape, dtype=here.dtype, base=base, parts=parts, ranks=ranks)


@dataclass(frozen=True, slots=True)
class FlatName:
    """One parameter of a unit."""

    unit: FlatUnit
    index: int


class BoxMemo:
    """Cache that returns the same BoxedTensor while a tensor has not moved, since walks compare by id."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, ...], tuple[torch.Tensor, int, BoxedTensor]] = {}

    def get(self, path: tuple[str, ...], of: torch.Tensor, make: Callable[[], BoxedTensor]) -> BoxedTensor:
        before = self._made.get(path)
        if before is None or before[0].shape != of.shape or before[1] != of.data_ptr():
            before = self._made[path] = (of, of.data_ptr(), make())
        return before[2]


class Entry:
    """One tensor in an optimizer's groups, and the parameters inside by name, flattened or not."""

    def __init__(self, param: torch.Tensor, members: Mapping[str, FlatName | None]) -> None:
        self.param = param
        self.members = members
        self.is_flat = any(flat is not None and flat.unit.flat is param for flat in members.values())

    def is_here(self) -> bool:
        """Return whether this rank has elements of the tensor, and thus optimizer state."""
        return self.is_flat or all(
            flat is None or flat.unit.is_here(flat.index) for flat in self.members.values()
        )

    def local_shape(self, flat: FlatName) -> tuple[int, ...]:
        """Return the local shape of state with an element for each element of the parameter."""
        return tuple(flat.unit.local.shape) if self.is_flat else (flat.unit.numel_here(flat.index),)

    def pieces(self, flat: FlatName, value: torch.Tensor) -> BoxedTensor:
        return flat.unit.pieces(flat.index, value, is_shard=self.is_flat)

    def alike(self, flat: FlatName) -> tuple[int, ...]:
        """Return the ranks with the same state for scalars, such as the step."""
        return flat.unit.everyone() if self.is_flat else flat.unit.users(flat.index)


class FlatOptimizerItem(BaseOptimizerItem):
    """An optimizer over flattened parameters, with the same tree as OptimizerItem.

    A flat tensor in the optimizer has one state for all parameters inside. A rank without elements of a
    parameter has no state of that parameter, but the rank's tree has the names of that state.
    """

    cutter: ClassVar[str]
    """The name of the library that cuts the parameters."""

    def __init__(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(name, optimizer)
        self._memo = BoxMemo()
        self._new: dict[tuple[int, str], torch.Tensor] = {}  # state of flat parameters, during a load
        self._entry_of: dict[str, Entry] = {}  # by name of a parameter, since the last walk

    @abstractmethod
    def _groups(self) -> list[list[Entry]]:
        """Return the entries of all groups, which may grow. UnsupportedItem for unknown parameters."""

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        return {
            name: entry.param for entries in self._groups() for entry in entries for name in entry.members
        }

    def _group_names(self) -> list[list[str]]:
        return [[name for entry in entries for name in entry.members] for entries in self._groups()]

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        self._entry_of = {}
        for entries in self._groups():
            like = next((entry for entry in entries if self.optimizer.state.get(entry.param)), None)
            for entry in entries:
                for name, flat in entry.members.items():
                    if (found := self._state_of(entry, name, flat, like)) is not None:
                        state[name] = found
        return state

    def _state_of(
        self, entry: Entry, name: str, flat: FlatName | None, like: Entry | None
    ) -> dict[str, Any] | None:
        """Return the state of one parameter; without local elements, the names and shapes of `like`."""
        own = self.optimizer.state.get(entry.param)
        if flat is None:
            return dict(own) if own else None
        if own:
            return {key: self._leaf(entry, name, flat, key, value) for key, value in own.items()}
        if like is None or entry.is_here():
            return None
        return {
            key: BoxedTensor(shape=flat.unit.shape(flat.index), dtype=value.dtype)
            if isinstance(value, torch.Tensor)
            else value
            for key, value in self.optimizer.state[like.param].items()
        }

    def _leaf(self, entry: Entry, name: str, flat: FlatName, key: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if tuple(value.shape) == entry.local_shape(flat):
            return self._memo.get((name, key), value, lambda: entry.pieces(flat, value))
        if value.dim() == 0:
            return self._memo.get(
                (name, key),
                value,
                lambda: BoxedTensor(
                    shape=(),
                    dtype=value.dtype,
                    base=value,
                    parts=(((), value.detach()),),
                    ranks=entry.alike(flat),
                ),
            )
        raise UnsupportedLeaf(
            f"{self._name}.state.{name}.{key} has shape {tuple(value.shape)}, which depends on how "
            f"{self.cutter} cut the parameter.",
            hint="Use fully_shard() with this optimizer.",
            path=f"{self._name}.state.{name}.{key}",
        )

    def _load_state(self, saved: Mapping[str, Any]) -> None:
        self._new.clear()
        for entry in (entry for entries in self._groups() for entry in entries):
            state = next((saved[name] for name in entry.members if name in saved), None)
            if state is not None and entry.is_here():
                self.optimizer.state[entry.param] = {
                    key: value.base if isinstance(value, BoxedTensor) else value
                    for key, value in state.items()
                }

    def problems(self, saved: Any) -> list[str]:
        return super().problems(saved) or [
            f"state.{name}: not in the checkpoint, but state of other parameters in its flat parameter is"
            for entry in (entry for entries in self._groups() for entry in entries)
            if any(name in saved["state"] for name in entry.members)
            for name in entry.members
            if name not in saved["state"]
        ]

    def allocate(self, path: tuple[str, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        """Return memory for state: cut like the parameter if shapes are equal, else as in OptimizerItem."""
        if not self._entry_of:
            self._entry_of = {name: e for entries in self._groups() for e in entries for name in e.members}
        entry = self._entry_of.get(path[1]) if len(path) > 2 and path[0] == "state" else None
        if entry is None:
            return torch.zeros(shape, dtype=dtype, device="cpu")
        key = path[-1]
        flat = entry.members[path[1]]
        if flat is None or key == "step" or shape != flat.unit.shape(flat.index):
            return self._allocate_for(entry.param, key, shape, dtype)
        place = (id(entry.param), key)
        if not entry.is_flat or place not in self._new:
            local = torch.zeros(entry.local_shape(flat), dtype=dtype, device=flat.unit.local.device)
            self._new[place] = local
        return entry.pieces(flat, self._new[place])
