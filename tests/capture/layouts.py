"""One small model that only has parameters, and every way in which torch spreads it over ranks.

Uneven sizes, tied weights, and more ranks than rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ray_ckpt.capture.items import local_tensor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 7)
        self.down = nn.Linear(7, 6)
        self.scale = nn.Parameter(torch.empty(1))


class Net(nn.Module):
    """No two elements are equal, nor those of two seeds."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.conv = nn.Conv1d(6, 3, 3)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("limit", torch.tensor([float(seed), 2.0]))
        first = seed * 10_000
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.arange(first, first + param.numel()).view(param.shape))
                first += param.numel()


Wrap = Callable[[Net], nn.Module]


@dataclass(frozen=True, slots=True)
class Layout:
    """`wrap` spreads a model over `world_size` ranks; it is called on each, with an equal model."""

    world_size: int
    wrap: Wrap
    adam: Mapping[str, Any] = field(default_factory=dict)

    def build(self, seed: int) -> nn.Module:
        return self.wrap(Net(seed))

    def optimizer(self, model: nn.Module) -> torch.optim.Adam:
        """Adam with one group, of which FSDP1 makes other tensors."""
        return torch.optim.Adam(model.parameters(), lr=0.01, **self.adam)


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make a step, with gradients for the tensors of which this rank has elements, as FSDP1 does."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not (type(param) is nn.Parameter and param.dim() == 1 and param.numel() == 0):
                param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()


def locals_of(model: nn.Module) -> list[torch.Tensor]:
    """Return this rank's part of each tensor that an optimizer of the model has, without padding."""
    return [unpadded(param, param) for param in model.parameters()]


def unpadded(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return the local part of `tensor`, which is cut as `param` is."""
    local = local_tensor(tensor)
    return (
        local[: local.numel() - padding] if (padding := getattr(param, "_shard_numel_padded", 0)) else local
    )


def _single(net: Net) -> nn.Module:
    return net


def _wrapped(net: Net) -> nn.Module:
    """Activation checkpointing inside, torch.compile outside."""
    net.blocks[0] = checkpoint_wrapper(net.blocks[0])
    return torch.compile(net, backend="eager")  # type: ignore[return-value]


def _fsdp2(*mesh_shape: int) -> Wrap:
    def wrap(net: Net) -> nn.Module:
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        return net

    return wrap


def _columns(net: Net) -> nn.Module:
    """FSDP2 that shards the second dimension of what has one that divides."""
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(
        net, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 and p.shape[1] % 2 == 0 else None
    )
    return net


def _parallelized(net: Net, mesh: Any) -> Net:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in net.blocks:
        parallelize_module(block, mesh, plan)
    return net


def _tp(net: Net) -> nn.Module:
    return _parallelized(net, init_device_mesh("cpu", (dist.get_world_size(),)))


def _fsdp_tp(dp: int, tp: int) -> Wrap:
    def wrap(net: Net) -> nn.Module:
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        _parallelized(net, mesh["tp"])
        for block in net.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(net, mesh=mesh["dp"])
        return net

    return wrap


def _fsdp1(*, orig: bool, strategy: str = "FULL_SHARD", mesh_shape: tuple[int, ...] | None = None) -> Wrap:
    def wrap(net: Net) -> nn.Module:
        return FullyShardedDataParallel(
            net,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=orig,
            sharding_strategy=ShardingStrategy[strategy],
            device_mesh=init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard"))
            if mesh_shape
            else None,
            device_id=torch.device("cpu"),
        )

    return wrap


LAYOUTS: Mapping[str, Layout] = {
    "single": Layout(1, _single),
    "wrapped": Layout(1, _wrapped, {"fused": True}),
    "fsdp2 on 4": Layout(4, _fsdp2(4), {"foreach": True}),
    "fsdp2 on 3": Layout(3, _fsdp2(3), {"fused": True}),
    "fsdp2 on 2, by columns": Layout(2, _columns),
    "hsdp 2 x 2": Layout(4, _fsdp2(2, 2)),
    "tp on 2": Layout(2, _tp),
    "fsdp2 2 x tp 2": Layout(4, _fsdp_tp(2, 2)),
    "fsdp2 3 x tp 2": Layout(6, _fsdp_tp(3, 2)),
    "fsdp1 on 4": Layout(4, _fsdp1(orig=True)),
    "fsdp1 on 3, flat": Layout(3, _fsdp1(orig=False), {"fused": True}),
    "fsdp1 2 x 2": Layout(4, _fsdp1(orig=True, strategy="HYBRID_SHARD", mesh_shape=(2, 2))),
    "fsdp1 on 2, whole": Layout(2, _fsdp1(orig=False, strategy="NO_SHARD")),
}
"""7 rows over 3 x 2 ranks is what DTensor's own geometry has wrong."""
