"""Modules in torch.distributed.fsdp.FullyShardedDataParallel, and their optimizers.

FSDP1 flattens the parameters of a module into one tensor and cuts this tensor evenly: a rank holds a range of
elements of a parameter, which consists of up to 2 * dims - 1 boxes. Each rank saves its boxes as slices of
the parameter under the parameter's own name, and saves optimizer state of the parameter's shape in the same
way. A checkpoint has no trace of FSDP1, and is interchangeable with those of FSDP2 and of whole tensors.

torch's own functions, SHARDED_STATE_DICT and get_model_state_dict(), gather every parameter from all ranks
and cut the parameter again. They copy the state. A rank whose save is skipped would miss the gather, so the
gather would be matched with the next collective of that rank. Therefore this module reads the private
metadata of FlatParameter (torch/distributed/fsdp/_flat_param.py), all of it in Fsdp1Unit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ray_ckpt.capture.flat import BoxMemo, Entry, FlatName, FlatOptimizerItem, FlatUnit, flat_boxes
from ray_ckpt.capture.items import BoxedTensor, ModuleItem, parameter_names
from ray_ckpt.capture.torch_private import EXTRA_STATE_SUFFIX, own_parameters, persistent_buffers
from ray_ckpt.capture.wrappers import clean_name, unwrap
from ray_ckpt.errors import UnsupportedItem

_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"


def fsdp1_modules(module: nn.Module) -> list[Any]:
    """Return the FullyShardedDataParallel modules in `module`, itself included, without importing FSDP1."""
    if _FSDP1 not in sys.modules:
        return []
    kind = sys.modules[_FSDP1].FullyShardedDataParallel
    return [inside for inside in module.modules() if isinstance(inside, kind)]


class Fsdp1Unit(FlatUnit):
    """Parameters that one FSDP1 module has flattened, and this rank's shard of them.

    UnsupportedItem, naming the item, if the shard does not show where each parameter is.
    """

    def __init__(self, item: str, fsdp: Any) -> None:
        self.handle = fsdp._handle
        self.flat = self.handle.flat_param
        replicas = getattr(fsdp, "_inter_node_pg", None)
        self._group = dist.get_process_group_ranks(self.handle.process_group)
        self._replicas = dist.get_process_group_ranks(replicas) if replicas is not None else None
        if any(extension is not None for extension in self.flat._param_extensions):
            raise UnsupportedItem(
                f"{item!r} has FullyShardedDataParallel over parameters that are sharded already.",
                hint="Use torch.distributed.fsdp.fully_shard() together with tensor parallelism.",
                item=item,
            )
        if not all(self.flat._contiguities):
            raise UnsupportedItem(
                f"{item!r} has FullyShardedDataParallel over parameters that are not contiguous.",
                hint="Make them contiguous() before wrapping them.",
                item=item,
            )

    @property
    def local(self) -> torch.Tensor:
        """The shard of this rank with its padding, also while the whole parameter is gathered."""
        shard: torch.Tensor = getattr(self.flat, "_local_shard", self.flat.data)
        return shard.detach()

    @property
    def is_sharded(self) -> bool:
        return bool(self.handle.uses_sharded_strategy)

    def shape(self, index: int) -> tuple[int, ...]:
        return tuple(self.flat._shapes[index])

    def is_here(self, index: int) -> bool:
        """Return whether this rank holds elements of a parameter."""
        return bool(self.flat._shard_param_infos[index].in_shard)

    def numel_here(self, index: int) -> int:
        return self.flat._shard_param_infos[index].numel_in_shard or 0

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """The ranks with the same shard."""
        if not self.is_sharded:
            return tuple(sorted(self._group))
        return tuple(sorted(self._replicas)) if self._replicas else (dist.get_rank(),)

    def users(self, index: int) -> tuple[int, ...]:
        """Return the ranks of the shard group that hold elements of a parameter."""
        if not self.is_sharded:
            return self.holders
        real = [at for at, is_padding in enumerate(self.flat._is_padding_mask) if not is_padding]
        start, last = self.handle._get_flat_param_offsets()[real[index]]
        size = self.local.numel()
        return tuple(
            sorted(
                rank for at, rank in enumerate(self._group) if at * size <= last and start < (at + 1) * size
            )
        )

    def everyone(self) -> tuple[int, ...]:
        """Return the ranks of the shard group."""
        return tuple(sorted(self._group))

    def pieces(self, index: int, tensor: torch.Tensor, *, is_shard: bool) -> BoxedTensor:
        """Return one parameter's regions in `tensor`, which holds this rank's elements of the parameter.

        With `is_shard` it is cut like the flat parameter, and holds elements of other parameters too.
        """
        shape, info = self.shape(index), self.flat._shard_param_infos[index]
        if not info.in_shard:
            return BoxedTensor(shape=shape, dtype=tensor.dtype, base=tensor)
        here = tensor.narrow(0, info.offset_in_shard, info.numel_in_shard) if is_shard else tensor
        start = info.intra_param_start_idx
        return flat_boxes(shape, start, here, base=tensor, ranks=self.holders)

    def owners(self) -> list[tuple[nn.Module, str]]:
        """Return the module and the name of each flattened parameter."""
        return [(info.module, info.param_name) for info in self.flat._param_infos]

    def tied(self) -> Iterator[tuple[tuple[nn.Module, str], tuple[nn.Module, str]]]:
        """Yield the first owner and another owner of each parameter that has several owners."""
        for info in self.flat._shared_param_infos:
            yield (info.prim_module, info.prim_param_name), (info.module, info.param_name)

    def optimized(self, index: int) -> torch.Tensor:
        """Return the tensor in the optimizer: the parameter with use_orig_params, else the flat parameter."""
        tensor: torch.Tensor = self.flat if self.flat._params is None else self.flat._params[index]
        return tensor


def flat_units(item: str, module: nn.Module) -> list[Fsdp1Unit]:
    return [Fsdp1Unit(item, fsdp) for fsdp in fsdp1_modules(module) if fsdp._handle is not None]


def flat_names(module: nn.Module, units: list[Fsdp1Unit]) -> dict[str, FlatName]:
    """Return each flattened parameter by name; a tied parameter by each of its names."""
    by_module: dict[int, dict[str, FlatName]] = {}
    for unit in units:
        for index, (inside, name) in enumerate(unit.owners()):
            by_module.setdefault(id(inside), {})[name] = FlatName(unit, index)
        for (first, first_name), (inside, name) in unit.tied():
            by_module.setdefault(id(inside), {})[name] = by_module[id(first)][first_name]
    return {
        clean_name(f"{prefix}.{name}" if prefix else name): flat
        for prefix, inside in module.named_modules(remove_duplicate=False)
        for name, flat in by_module.get(id(inside), {}).items()
    }


class Fsdp1ModuleItem(ModuleItem):
    """A module that contains FSDP1 modules, saved with the names that it has without FSDP1.

    The module's state_dict() is not called, since state_dict() gathers parameters; so its hooks and
    `_save_to_state_dict` of inner modules do not run.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(module)
        units = flat_units(name, module)
        self._flats = flat_names(module, units)
        self._flat_ids = {id(unit.flat) for unit in units}
        self._parameters = {*self._flats, *(n for n, _ in self._whole_parameters())}
        self._memo = BoxMemo()

    def tree(self) -> Any:
        state: dict[str, Any] = {}
        made: dict[tuple[int, int], BoxedTensor] = {}  # shared by tied names
        for name, flat in self._flats.items():
            place = (id(flat.unit), flat.index)
            if place not in made:
                made[place] = self._piece_of(name, flat)
            state[name] = made[place]
        state.update(self._whole_parameters())
        for prefix, inside in self._module.named_modules(remove_duplicate=False):
            state |= {_join(prefix, name): buffer for name, buffer in persistent_buffers(inside)}
        return state | {name: inside.get_extra_state() for name, inside in self._with_extra_state()}

    def load(self, tree: Any) -> None:
        for name, inside in self._with_extra_state():
            inside.set_extra_state(tree[name])

    def _with_extra_state(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the state_dict name and the module of each module with extra state."""
        for prefix, inside in self._module.named_modules(remove_duplicate=False):
            if type(inside).get_extra_state is not nn.Module.get_extra_state:
                yield _join(prefix, EXTRA_STATE_SUFFIX), inside

    def _piece_of(self, name: str, flat: FlatName) -> BoxedTensor:
        local = flat.unit.local

        def pieces() -> BoxedTensor:
            # `local` was made through `.data`, which gives it a version counter of its own.
            counted = flat.unit.optimized(flat.index).detach()
            return replace(flat.unit.pieces(flat.index, local, is_shard=True), counted=counted)

        return self._memo.get((name,), local, pieces)

    def _whole_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that are not flattened: ignored by FSDP1, or outside of it."""
        for prefix, inside in self._module.named_modules(remove_duplicate=False):
            for name, param in own_parameters(inside):
                full = _join(prefix, name)
                if id(param) not in self._flat_ids and full not in self._flats:
                    yield full, param


class Fsdp1OptimizerItem(FlatOptimizerItem):
    """An optimizer over parameters of FSDP1.

    Without use_orig_params the optimizer has the flat parameters.
    """

    cutter = "FullyShardedDataParallel"

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        owners: Mapping[str, nn.Module | nn.Parameter],
    ) -> None:
        super().__init__(name, optimizer)
        self._members = _members(name, owners)
        self._entries: dict[int, Entry] = {}
        self._groups()

    def _groups(self) -> list[list[Entry]]:
        groups = self.optimizer.param_groups
        return [[self._entry(param) for param in group["params"]] for group in groups]

    def _entry(self, param: torch.Tensor) -> Entry:
        if id(param) in self._entries:
            return self._entries[id(param)]
        if id(param) not in self._members:
            hint = "Register its module too, and build the optimizer after wrapping the module."
            raise self._without_owner(param, hint)
        return self._entries.setdefault(id(param), Entry(param, self._members[id(param)]))


def _members(
    item: str, owners: Mapping[str, nn.Module | nn.Parameter]
) -> dict[int, dict[str, FlatName | None]]:
    """Return the parameters in each tensor of an optimizer, by id of the tensor."""
    found: dict[int, dict[str, FlatName | None]] = {}
    whole = parameter_names(owners)
    for owner_name, owner in owners.items():
        if not isinstance(owner, nn.Module):
            continue
        prefix = f"{owner_name}." if len(owners) > 1 else ""
        named: dict[tuple[int, int], str] = {}
        for name, flat in flat_names(unwrap(owner), flat_units(item, owner)).items():
            if named.setdefault((id(flat.unit), flat.index), name) != name:
                continue  # a tied parameter keeps its first name
            found.setdefault(id(flat.unit.optimized(flat.index)), {})[prefix + name] = flat
    for tensor_id, name in whole.items():
        found.setdefault(tensor_id, {name: None})
    return found


def _join(prefix: str, name: str) -> str:
    return clean_name(f"{prefix}.{name}" if prefix else name)
