"""State dicts of DCP as items of a checkpoint.

Each top-level entry of a state dict is an item, so `{"model": ..., "optimizer": ...}` makes the same
checkpoint as `Checkpointer(model=model, optimizer=optimizer)`. A state dict whose top-level keys cannot be
names of items, such as that of a module, becomes the one item `state`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ray_ckpt.capture.items import Item
from ray_ckpt.format.tree import TensorRef
from ray_ckpt.interop.dcp.names import flat, is_tensor, nested
from ray_ckpt.trainer.rank_items import RESERVED_ITEM

WHOLE = "state"  # the item of a state dict that is not divided
OWN_ITEMS = frozenset({"rng", "gradients"})  # items of ray_ckpt itself, which DCP does not see


class StateItem(Item):
    """One item of the state dict passed to a save or load."""

    is_partial = True

    def __init__(
        self,
        name: str,
        state: Any,
        *,
        per_rank: Sequence[str] = (),
        put: Callable[[str, Any], None] | None = None,
    ) -> None:
        """Take the state of the item `name`.

        Plain tensors under the names in `per_rank`, patterns of full names, may differ between ranks; all
        others are equal on all ranks. `put` gets the name and value of each loaded entry that is no tensor.
        """
        self._name = name
        self._state = state
        self._per_rank = per_rank
        self._put = put

    def tree(self) -> Any:
        return self._state

    def load(self, tree: Any) -> None:
        assert self._put is not None, "the item was made for a save"
        for name, value in flat({self._name: tree})[0].items():
            if not is_tensor(value):
                self._put(name, value)

    def wanted(self, saved: Any) -> Any:
        """Return the saved entries that this state has too."""
        mine = flat({self._name: self._state})[0]
        entries, paths = flat({self._name: saved})
        chosen = {name: value for name, value in entries.items() if name in mine}
        return nested(chosen, paths).get(self._name, {})

    def problems(self, saved: Any) -> list[str]:
        there, found = flat({self._name: saved})[0], []
        for name, value in flat({self._name: self._state})[0].items():
            inner = name.removeprefix(f"{self._name}.")
            if name not in there:
                found.append(f"{inner}: not in the checkpoint")
            elif is_tensor(value) != isinstance(there[name], TensorRef):
                kinds = ("a tensor", "a value") if is_tensor(value) else ("a value", "a tensor")
                found.append(f"{inner}: {kinds[0]} here, {kinds[1]} in the checkpoint")
        return found

    def is_shared(self, path: tuple[str, ...]) -> bool:
        name = ".".join((self._name, *path))
        return not any(fnmatchcase(name, pattern) for pattern in self._per_rank)

    def changes_in_step(self, path: tuple[str, ...]) -> bool:
        return True  # the optimizers of the process show which tensors do

    @property
    def rules(self) -> object:
        return type(self), tuple(self._per_rank)


def items_of(
    state: Mapping[str, Any],
    *,
    saved: Collection[str] | None = None,
    per_rank: Sequence[str] = (),
    put: Callable[[str, Any], None] | None = None,
) -> dict[str, Item]:
    """Return the items of a nested state dict; to load, divided like the items `saved` of the checkpoint."""
    is_divided = divides(state) if saved is None else not is_whole(saved)

    def put_entry(name: str, value: Any) -> None:
        assert put is not None
        put(name if is_divided else name.removeprefix(f"{WHOLE}."), value)

    divided = state if is_divided else {WHOLE: dict(state)}
    return {name: StateItem(name, tree, per_rank=per_rank, put=put_entry) for name, tree in divided.items()}


def is_whole(saved: Collection[str]) -> bool:
    """Return whether a checkpoint with these items has a state dict that was not divided."""
    return set(saved) - OWN_ITEMS == {WHOLE}


def divides(names: Iterable[str]) -> bool:
    """Return whether all top-level names of a state dict can be names of items."""
    return all(name.isidentifier() and not RESERVED_ITEM.fullmatch(name) for name in names)
