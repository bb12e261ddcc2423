"""The model and the optimizer of an engine, as items with the trees of any other model and optimizer.

`model` has the fp32 weights of what ZeRO optimizes: the 16-bit weights are rounded from them. `optimizer` has
the state of the base optimizer by parameter name. So the checkpoint is one of a plain loop, and the other way
round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ray_ckpt.capture.flat import BoxMemo, Entry, FlatName, FlatOptimizerItem
from ray_ckpt.capture.items import BoxedTensor, ModuleItem, PartitionedOptimizer, parameter_names
from ray_ckpt.errors import MismatchError
from ray_ckpt.interop.deepspeed import position
from ray_ckpt.interop.deepspeed.partitions import (
    Partition,
    frozen,
    has_gradients,
    link_state,
    partitions,
    refresh,
)


class EngineModelItem(ModuleItem):
    """The module of an engine."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine.module)
        self._zero = engine.optimizer
        self._spans: dict[int, tuple[Partition, int]] = {
            id(span.param): (partition, index)
            for group in partitions(self._zero)
            for partition in group
            for index, span in enumerate(partition.spans)
        }
        self._memo = BoxMemo()

    def tree(self) -> Any:
        state = super().tree()
        made: dict[int, Any] = {}  # shared by tied names
        for name, value in state.items():
            if id(value) not in made:
                made[id(value)] = self._leaf(name, value)
        return {name: made[id(value)] for name, value in state.items()}

    def _leaf(self, name: str, value: Any) -> Any:
        if not isinstance(value, nn.Parameter):
            return value
        if id(value) in self._spans:
            partition, index = self._spans[id(value)]
            flat = partition.local
            return self._memo.get((name,), flat, lambda: partition.pieces(index, flat, is_shard=True))
        if (found := frozen(self._zero, value)) is None:
            return value
        assert found.base is not None
        return self._memo.get((name,), found.base, lambda: found)

    def load(self, tree: Any) -> None:
        super().load({name: value for name, value in tree.items() if not isinstance(value, BoxedTensor)})
        refresh(self._zero)


class EngineOptimizerItem(FlatOptimizerItem):
    """The base optimizer of an engine: {"state", "param_groups", "engine": position and loss scale}."""

    cutter = "DeepSpeed"

    def __init__(self, name: str, engine: Any, owners: Mapping[str, nn.Module | nn.Parameter]) -> None:
        super().__init__(name, engine.optimizer.optimizer)
        self._engine = engine
        names = parameter_names(owners)
        self._entries = [
            [self._entry(names, partition) for partition in group] for group in partitions(engine.optimizer)
        ]

    def _entry(self, names: Mapping[int, str], partition: Partition) -> Entry:
        for span in partition.spans:
            if id(span.param) not in names:
                raise self._without_owner(span.param, "Register the engine itself.")
        members = {
            names[id(span.param)]: FlatName(partition, index) for index, span in enumerate(partition.spans)
        }
        return Entry(partition.flat, members)

    def _groups(self) -> list[list[Entry]]:
        return self._entries

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]:
        """The groups with all partitions, which ZeRO 3 puts there one after the other during a step."""
        return [
            {**group, "params": [entry.param for entry in entries]}
            for group, entries in zip(self.optimizer.param_groups, self._entries, strict=True)
        ]

    @property
    def kind(self) -> type[torch.optim.Optimizer]:
        return position.torch_class(self.optimizer)

    @property
    def stepped(self) -> PartitionedOptimizer:
        flats = tuple(entry.param for entries in self._entries for entry in entries)
        return PartitionedOptimizer(self.optimizer, flats)

    def is_accumulating(self) -> bool:
        return position.is_accumulating(self._engine) or has_gradients(self._engine.optimizer)

    def tree(self) -> Any:
        return {**super().tree(), "engine": position.of(self._engine)}

    def _leaf(self, entry: Entry, name: str, flat: FlatName, key: str, value: Any) -> Any:
        if key == "step" and not isinstance(value, torch.Tensor):
            value = torch.tensor(float(value))  # as torch's optimizers have it
        return super()._leaf(entry, name, flat, key, value)

    def load(self, tree: Any) -> None:
        steps = {name: _number(state["step"]) for name, state in tree["state"].items() if "step" in state}
        self._check_steps(steps)
        super().load(tree)
        if position.counts_in_python(self.optimizer):
            for state in self.optimizer.state.values():
                state["step"] = int(state["step"])
        link_state(self._engine.optimizer)
        if "engine" in tree:
            position.restore(self._engine, tree["engine"])
        else:  # of another kind of loop
            position.begin_at(self._engine, int(max(steps.values(), default=0)))

    def _check_steps(self, steps: Mapping[str, float]) -> None:
        for entry in (entry for entries in self._entries for entry in entries):
            found = {steps[name]: name for name in entry.members if name in steps}
            if len(found) > 1:
                (first, one), (second, other) = list(found.items())[:2]
                raise MismatchError(
                    f"{one} has had {first:.0f} steps and {other} {second:.0f}: DeepSpeed counts the steps "
                    "of a parameter group, not of a parameter.",
                    hint="Give parameters that are trained for another time a group of their own.",
                    problems=(f"{self._name}.state.{other}.step",),
                )


def _number(step: Any) -> float:
    tensor: Any = step.base if isinstance(step, BoxedTensor) else step
    return float(tensor)
