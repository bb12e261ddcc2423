"""The partitions of DeepSpeed's ZeRO: which elements of each parameter this rank holds, and where.

ZeRO 1 and 2 join the parameters of a group into one tensor, and cut this tensor evenly: rank r has elements
r * size and on. ZeRO 3 cuts each parameter evenly, and joins the parts of a sub-group of parameters; the last
parts are padded. In both, a rank has one range of elements of a parameter.

`param._hp_mapping`, which DeepSpeed offers to ZeRO 1 and 2, is not used: with `round_robin_gradients` it
addresses other elements than those that the tensors have.

All private names of DeepSpeed's ZeRO are in this module: `_STAGES` lists them for the check at use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from ray_ckpt.capture.flat import FlatUnit, flat_boxes
from ray_ckpt.capture.items import BoxedTensor
from ray_ckpt.errors import ConfigError

_JOINED = (
    "single_partition_of_fp32_groups",
    "real_dp_process_group",
    "round_robin_bit16_groups",
    "round_robin_bit16_meta",
    "round_robin_bit16_offsets",
    "micro_step_id",
    "update_lp_params",
    "_lazy_init_hp_params_optimizer_state",
    "_hp_optimizer_states_linked",
)
_CUT = (
    "fp32_partitioned_groups_flat",
    "fp16_groups",
    "sub_group_process_groups",
    "sub_group_to_group_id",
    "averaged_gradients",
    "_partition_all_parameters",
    "_reassign_or_swap_out_partitioned_parameters",
    "checkpoint_event_epilogue",
)
_STAGES: Mapping[str, tuple[str, ...]] = {
    "DeepSpeedZeroOptimizer": _JOINED,
    "DeepSpeedZeroOptimizer_Stage3": _CUT,
}
"""The optimizers of ZeRO 1 and 2, and of ZeRO 3, with the attributes that this module uses."""


@dataclass(frozen=True, slots=True)
class Span:
    """The elements of one parameter on this rank: `numel` from `start` on, at `offset` in its partition."""

    param: torch.nn.Parameter
    shape: tuple[int, ...]
    start: int
    offset: int
    numel: int


class Partition(FlatUnit):
    """One tensor of fp32 weights that the base optimizer steps, on this rank of `ranks`."""

    def __init__(self, flat: torch.Tensor, spans: Sequence[Span], ranks: tuple[int, ...]) -> None:
        self.flat = flat
        self.spans = spans
        self._ranks = ranks

    @property
    def local(self) -> torch.Tensor:
        tensor: torch.Tensor = self.flat
        return tensor.detach()

    def shape(self, index: int) -> tuple[int, ...]:
        return self.spans[index].shape

    def is_here(self, index: int) -> bool:
        return self.spans[index].numel > 0

    def numel_here(self, index: int) -> int:
        return self.spans[index].numel

    def users(self, index: int) -> tuple[int, ...]:
        return self._ranks

    def everyone(self) -> tuple[int, ...]:
        return self._ranks

    def pieces(self, index: int, tensor: torch.Tensor, *, is_shard: bool) -> BoxedTensor:
        return _boxes(self.spans[index], tensor)


def is_zero(optimizer: object) -> bool:
    """Return whether an engine's optimizer is one of ZeRO that this module knows; subclasses are not."""
    return type(optimizer).__name__ in _STAGES


def check_names(zero: Any) -> None:
    """Raise ConfigError if an optimizer of ZeRO lacks an attribute that is used here."""
    if missing := [name for name in _STAGES[type(zero).__name__] if not hasattr(zero, name)]:
        raise ConfigError(
            f"This version of DeepSpeed has no {', '.join(missing)}.",
            hint='pip install "ray_ckpt[deepspeed]" takes a version that works.',
        )


def partitions(zero: Any) -> list[list[Partition]]:
    """Return this rank's partitions, for each parameter group of the base optimizer."""
    found: list[list[Partition]] = [[] for _ in zero.optimizer.param_groups]
    if is_cut(zero):
        flats = zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True)
        for index, (flat, params) in enumerate(flats):
            group = zero.sub_group_process_groups[index]
            spans = list(_cut_spans(params, dist.get_rank(group)))
            partition = Partition(flat, spans, _ranks_of(group))
            found[zero.sub_group_to_group_id[index]].append(partition)
        return found
    for index, flat in enumerate(zero.single_partition_of_fp32_groups):
        group = zero.real_dp_process_group[index]
        first = dist.get_rank(group) * flat.numel()
        members = zip(
            zero.round_robin_bit16_groups[index],
            zero.round_robin_bit16_meta[index],
            zero.round_robin_bit16_offsets[index],
            strict=True,
        )
        spans = [_joined_span(p, tuple(m.shape), at - first, flat.numel()) for p, m, at in members]
        found[index].append(Partition(flat, spans, _ranks_of(group)))
    return found


def frozen(zero: Any, param: Any) -> BoxedTensor | None:
    """Return this rank's part of a parameter that ZeRO 3 cuts and does not optimize; None if it is whole."""
    if not is_cut(zero) or not hasattr(param, "ds_tensor"):
        return None
    (span,) = _cut_spans([param], dist.get_rank(param.ds_process_group))
    return _boxes(span, param.ds_tensor.detach())


def is_cut(zero: Any) -> bool:
    """Return whether the parameters themselves are cut, as in ZeRO 3."""
    return _STAGES[type(zero).__name__] is _CUT


def refresh(zero: Any) -> None:
    """Set the model's weights to the fp32 weights that were restored. All ranks call this together."""
    with torch.no_grad():
        if not is_cut(zero):
            zero.update_lp_params()
            return
        zero._partition_all_parameters()
        for index in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(index)
        zero.checkpoint_event_epilogue()  # gathers the small parameters that stay whole


def link_state(zero: Any) -> None:
    """Let DeepSpeed's own accessors, such as safe_get_full_optimizer_state, find restored state."""
    if not is_cut(zero) and zero.optimizer.state:
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def has_gradients(zero: Any) -> bool:
    """Return whether a backward pass has left gradients for a step."""
    if not is_cut(zero):
        return bool(zero.micro_step_id >= 0)  # the number of backward passes since the last step, less 1
    return any(gradients is not None for gradients in zero.averaged_gradients.values())


def _joined_span(param: torch.nn.Parameter, shape: tuple[int, ...], at: int, size: int) -> Span:
    """Return the span of a parameter whose first element is at `at`, counted from this rank's first."""
    start, stop = max(0, -at), min(prod(shape), size - at)
    return Span(param, shape, start=start, offset=max(0, at), numel=max(0, stop - start))


def _cut_spans(params: Sequence[Any], rank: int) -> Iterator[Span]:
    at = 0
    for param in params:
        size = param.ds_tensor.ds_numel
        start = rank * size
        numel = max(0, min(param.ds_numel - start, size))
        yield Span(param, tuple(param.ds_shape), start=start, offset=at, numel=numel)
        at += size


def _boxes(span: Span, tensor: torch.Tensor) -> BoxedTensor:
    if not span.numel:
        return BoxedTensor(shape=span.shape, dtype=tensor.dtype, base=tensor)
    here = tensor.narrow(0, span.offset, span.numel)
    return flat_boxes(span.shape, span.start, here, base=tensor, ranks=(dist.get_rank(),))


def _ranks_of(group: Any) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))
