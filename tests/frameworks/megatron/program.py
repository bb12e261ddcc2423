"""Functions that ranks run in the tests of Megatron-core.

`dist_checkpointing` calls torch.cuda.synchronize, and its queue of saves torch.cuda.current_device; both fail
in a build of torch for the CPU, so they are replaced. The forward of a GPTModel needs CUDA: steps take
gradients that are a function of each weight and the step, the same for any layout.
"""

from __future__ import annotations

import os
import time
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ray_ckpt

CPU: Any = torch.device("cpu")
torch.cuda.synchronize = lambda *args, **kwargs: None
torch.cuda.current_device = lambda: CPU

with warnings.catch_warnings():  # of packages for GPUs that are not installed
    warnings.simplefilter("ignore")
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as groups
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        optim_state_to_sharding_state,
    )
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend

LAYERS, WIDTH, VOCABULARY = 2, 16, 64
STAGE_S = 2.0  # in which the other rank has captured its part


def build_gpt(tp: int, *, seed: int, vocabulary: int = VOCABULARY) -> Any:
    """Return a model with gated MLPs, of which Megatron makes ShardedTensorFactories."""
    if not groups.model_parallel_is_initialized():
        groups.initialize_model_parallel(tensor_model_parallel_size=tp)
    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=4,
        use_cpu_initialization=True,
        gated_linear_unit=True,
        add_bias_linear=False,
        tensor_model_parallel_size=tp,
        params_dtype=torch.float32,
    )
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=vocabulary, max_sequence_length=8)


def connect(run: str, storage: str, options: dict[str, Any]) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ray_ckpt.connect(
        run=run, storage_path=storage, rank=rank, world_size=world_size, **{"every_steps": 1000, **options}
    )


class Training:
    """A tiny GPT with AdamW, as Megatron's training loop saves and loads it."""

    def __init__(self, tp: int, *, seed: int) -> None:
        self.tp = tp
        self.model = build_gpt(tp, seed=seed)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.1)
        for param in self.parameters:  # as Megatron does before a load
            zeros = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
            self.optimizer.state[param] = {"step": torch.tensor(0.0), **zeros}

    def step(self, number: int) -> None:
        for param in self.parameters:
            param.grad = torch.sin(3 * param.detach() + number)
        self.optimizer.step()

    def sharded(self, step: int) -> dict[str, Any]:
        """Return Megatron's sharded state dict, with common data, objects and a local object."""
        model = self.model.sharded_state_dict()
        optimizer = self.optimizer.state_dict()
        ids = get_param_id_to_sharded_param_map(model, self.parameters)
        optim_state_to_sharding_state(optimizer, ids, exclude_keys="step")
        optimizer["state"]["common_step"] = self.optimizer.state[self.parameters[0]]["step"]
        rank = groups.get_tensor_model_parallel_rank()
        generator = {"torch": torch.get_rng_state(), "rank": rank, "pair": (rank, b"x")}
        return {
            "model": model,
            "optimizer": optimizer,
            "rng_state": ShardedObject("rng_state", [generator], (self.tp,), (rank,)),
            "local": LocalNonpersistentObject(f"of rank {rank}"),
            "args": Namespace(lr=0.1, dtype=torch.bfloat16, backend=AttnBackend.auto, betas=(0.9, 0.99)),
            "iteration": step,
            "tp": self.tp,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        common_step = state["optimizer"]["state"].pop("common_step")
        for values in state["optimizer"]["state"].values():
            values["step"] = common_step.clone()
        self.optimizer.load_state_dict(state["optimizer"])


def whole(uri: str) -> dict[str, torch.Tensor]:
    """Return the tensors of model and optimizer in a durable checkpoint, by full name."""
    return dict(ray_ckpt.open(uri).load(["model.*", "optimizer.*"]))


def train(
    run: str, storage: str, folders: str, tp: int, last: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Go on from the newest checkpoint to step `last`, which is saved durably; return what was loaded."""
    connect(run, storage, options)
    training = Training(tp, seed=0)
    seen: dict[str, Any] = {"step": 0}
    if folder := ray_ckpt.megatron.resume_folder(folders):
        seen = resume(training, folder)
    for step in range(seen["step"] + 1, last + 1):
        training.step(step)
        if step % 2 == 0 and step < last:
            save(training, folders, step, ray_ckpt.megatron.SaveStrategy())
    save(training, folders, last, ray_ckpt.megatron.SaveStrategy(level="durable"))
    return {**seen, "draw": float(torch.rand(1))}


def resume(training: Training, folder: str) -> dict[str, Any]:
    """Load a folder as Megatron's training loop does; return common state and the values of objects."""
    first = dist_checkpointing.load_common_state_dict(folder)
    state = training.sharded(0)
    for key in ("iteration", "args"):
        del state[key]
    if first["tp"] != training.tp:
        del state["rng_state"]  # Megatron has no random state for another layout either
    del state["tp"], state["optimizer"]["state"]["common_step"], state["optimizer"]["param_groups"]
    loaded = dist_checkpointing.load(state, folder, sharded_strategy=ray_ckpt.megatron.LoadStrategy())
    assert loaded["iteration"] == first["iteration"]
    training.load(loaded)
    seen = {key: loaded.get(key) for key in ("args", "local", "rng_state", "content_metadata")}
    return {**seen, "step": loaded["iteration"], "folder": folder}


def save(training: Training, folders: str, step: int, strategy: Any, *, asynchronous: bool = False) -> Any:
    folder = Path(folders, f"iter_{step:07d}")
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return dist_checkpointing.save(
        training.sharded(step),
        str(folder),
        sharded_strategy=strategy,
        async_sharded_save=asynchronous,
        content_metadata={"distrib_optim_sharding_type": "fully_reshardable"},
    )
