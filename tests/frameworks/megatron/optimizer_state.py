"""Megatron's own code for the formats of distributed optimizer state, without the CUDA of its constructor.

DistributedOptimizer makes tensors on "cuda" and accepts parameters of torch.cuda's types only. Here it gets
the ranges of real DDP buffers as in its constructor, and tensors on the CPU for its shards: everything that
makes, shards and loads the formats is Megatron's. State is a function of the weights, so that it can be
checked in any layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ray_ckpt
from tests.frameworks.megatron import program

with program.quiet():
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as groups
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


class OptimizerState(DistributedOptimizer):  # type: ignore[misc]
    """The state of a distributed optimizer in one of the formats."""

    def __init__(self, model: Any) -> None:
        wrapped = DistributedDataParallel(
            model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
        )
        self.optimizer = None
        self.buffers = wrapped.buffers
        self.data_parallel_group = groups.get_data_parallel_group(with_context_parallel=True)
        self.data_parallel_group_gloo = self.data_parallel_group
        self.data_parallel_group_idx = groups.get_tensor_model_parallel_rank()
        self.distributed_optimizer_instance_id = 0
        dtypes = [(buffer.param_dtype, buffer.grad_dtype) for buffer in self.buffers]
        buckets = [buffer.buckets for buffer in self.buffers]
        pairs = list(zip(dtypes, buckets, strict=True))
        self.per_bucket_numel = [{d: [b.grad_data.numel() for b in found]} for d, found in pairs]
        self.per_bucket_numel_unpadded = [{d: [b.numel_unpadded for b in found]} for d, found in pairs]
        self.gbuf_ranges = [self._build_gbuf_range_map(buffer) for buffer in self.buffers]
        self.shards = {param: _state(shard) for param, shard in self.weights().items()}

    def weights(self) -> dict[nn.Parameter, torch.Tensor]:
        """Return the part of each parameter of which this rank has the state."""
        maps = [m["param_map"] for ranges in self.gbuf_ranges for maps in ranges.values() for m in maps]
        found = {param: (param, at["param"]) for each in maps for param, at in each.items()}
        return {p: param.detach().view(-1)[at.start : at.end] for p, (param, at) in found.items()}

    def sharded(self, model: Any, form: str, *, is_loading: bool) -> dict[str, Any]:
        """Return the sharded state dict of model and optimizer in a format."""
        state = model.sharded_state_dict()
        metadata = {"distrib_optim_fully_reshardable_mem_efficient": True}
        shard = {
            "dp_reshardable": self.sharded_param_state_dp_reshardable,
            "fully_reshardable": self.sharded_param_state_fully_reshardable,
        }[form]
        optimizer = {"param_state": shard(state, is_loading, metadata)}
        if not is_loading:
            optimizer["param_state_sharding_type"] = form
        return {"model": state, "optimizer": optimizer}

    def load(self, form: str, param_state: Any) -> None:
        {
            "dp_reshardable": self.load_parameter_state_from_dp_reshardable,
            "fully_reshardable": self.load_parameter_state_from_fully_reshardable,
        }[form](param_state)

    def clear(self) -> None:
        for tensors in self.shards.values():
            for tensor in tensors.values():
                tensor.zero_()

    def is_of_weights(self) -> bool:
        """Return whether the state is that of the present weights, bit for bit."""
        return all(
            torch.equal(tensor, self.shards[param][name])
            for param, shard in self.weights().items()
            for name, tensor in _state(shard).items()
        )

    def _get_main_param_and_optimizer_states(self, model_param: Any) -> dict[str, torch.Tensor]:
        return dict(self.shards[model_param])

    def _set_main_param_and_optimizer_states(self, model_param: Any, tensors: Any) -> None:
        for name, tensor in self.shards[model_param].items():
            tensor.copy_(tensors[name])


def _state(weights: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"param": weights.clone(), "exp_avg": weights.sin(), "exp_avg_sq": weights.cos()}


def save_state(run: str, storage: str, folders: str, tp: int, form: str, options: dict[str, Any]) -> None:
    """Save model and optimizer state in a format, twice."""
    program.connect(run, storage, options)
    model = program.build_gpt(tp, seed=3)
    optimizer = OptimizerState(model)
    assert optimizer.is_of_weights()
    for step in (1, 2):
        folder = Path(folders, f"iter_{step:07d}")
        folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        state = optimizer.sharded(model, form, is_loading=False)
        strategy = ray_ckpt.megatron.SaveStrategy(level="durable")
        dist_checkpointing.save(state, str(folder), sharded_strategy=strategy)


def load_state(run: str, storage: str, folders: str, tp: int, form: str, options: dict[str, Any]) -> bool:
    """Load such a checkpoint; return whether the state is that of the loaded weights."""
    program.connect(run, storage, options)
    model = program.build_gpt(tp, seed=5)  # other weights
    optimizer = OptimizerState(model)
    optimizer.clear()
    folder = ray_ckpt.megatron.resume_folder(folders)
    assert folder is not None and folder.endswith("iter_0000002")
    state = optimizer.sharded(model, form, is_loading=True)
    loaded = dist_checkpointing.load(state, folder, sharded_strategy=ray_ckpt.megatron.LoadStrategy())
    model.load_state_dict(loaded["model"])
    assert loaded["optimizer"]["param_state_sharding_type"] == form
    optimizer.load(form, loaded["optimizer"]["param_state"])
    return optimizer.is_of_weights()
