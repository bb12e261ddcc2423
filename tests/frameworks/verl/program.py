"""Worker groups of verl with tiny models, and a driver that saves and loads by the methods of verl's trainer.

The worker groups, workers, engines and models are those of verl and Transformers, on the CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
import verl.trainer.ppo.v1.trainer_base as v1
from omegaconf import OmegaConf
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import LlamaConfig, LlamaForCausalLM
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import create_colocated_worker_cls
from verl.trainer.config import CheckpointConfig
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
from verl.utils import tensordict_utils
from verl.workers.config import (
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker

TYPES = {"actor": "language_model", "critic": "value_model"}
FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
NUM_SAMPLES = 64


def write_model(folder: Path) -> str:
    """Write a tiny Llama with dropout, as `save_pretrained` does; return its folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_dropout=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


class TinyWorker(TrainingWorker):  # type: ignore[misc]
    """A worker of verl that trains on samples by number, and shows its state."""

    def __init__(self, config: TrainingWorkerConfig) -> None:
        if not dist.is_initialized():  # verl names a backend for the CPU and one for the device
            dist.init_process_group("gloo")
        super().__init__(config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def train(self, sample: int) -> float:
        """Make an optimizer step of the engine on a batch of `sample`; return the loss of this rank."""
        with self.engine.train_mode():
            output = self.engine.train_batch(_batch(sample, self.rank), loss_function=_loss)
        self.engine.lr_scheduler_step()
        return float(output["loss"][0])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def state(self) -> dict[str, Any]:
        """Return whole tensors of the model and of the optimizer, the learning rate, and a random number."""
        engine = self.engine
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model: Any
        optimizer: Any
        model, optimizer = get_state_dict(engine.module, engine.optimizer, options=options)
        moments = {
            f"{name}.{kind}": value.clone()
            for name, values in optimizer.get("state", {}).items()
            for kind, value in values.items()
        }
        return {
            "model": {name: value.clone() for name, value in model.items()},
            "moments": moments,
            "rate": engine.lr_scheduler.get_last_lr(),
            "steps": engine.lr_scheduler.last_epoch,
            "random": torch.get_rng_state(),
            "manager": type(engine.checkpoint_manager).__module__,
        }


def _batch(sample: int, rank: int) -> Any:
    generator = torch.Generator().manual_seed(100 * sample + rank)
    ids = [torch.randint(0, 64, (length,), generator=generator) for length in (5, 7)]

    def nested(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(values, layout=torch.jagged)

    return tensordict_utils.get_tensordict(
        {
            "input_ids": nested(ids),
            "position_ids": nested([torch.arange(len(each)) for each in ids]),
            "loss_mask": nested([torch.ones(len(each)) for each in ids]),
        },
        non_tensor_dict={
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": 2,
            "temperature": 1.0,
            "use_remove_padding": False,
            "pad_mode": "no_padding",
            "global_token_num": [12],
        },
    )


def _loss(model_output: Any, data: Any, dp_group: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    found = model_output["log_probs" if "log_probs" in model_output else "values"]
    return (found.values().float() - 1).square().mean(), {}


def config_of(role: str, model: str, *, strategy: str, **checkpoint: Any) -> TrainingWorkerConfig:
    return TrainingWorkerConfig(
        model_type=TYPES[role],
        model_config=HFModelConfig(
            path=model,
            load_tokenizer=False,
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "sdpa"},
        ),
        engine_config=FSDPEngineConfig(strategy=strategy, use_torch_compile=False, mixed_precision=FP32),
        optimizer_config=FSDPOptimizerConfig(
            lr=1e-2, total_training_steps=40, lr_warmup_steps=2, lr_scheduler_type="cosine", min_lr_ratio=0.1
        ),
        checkpoint_config=CheckpointConfig(**checkpoint),
    )


def start(
    configs: dict[str, TrainingWorkerConfig], ranks: int, environment: dict[str, str]
) -> dict[str, RayWorkerGroup]:
    """Start the roles in the same `ranks` processes, as verl's trainers do; return their groups by role."""
    worker = ray.remote(TinyWorker)
    classes = {role: RayClassWithInitArgs(worker, config=config) for role, config in configs.items()}
    group = RayWorkerGroup(
        resource_pool=RayResourcePool([ranks], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=create_colocated_worker_cls(classes),
        device_name="cpu",
        worker_env=environment,
    )
    return dict(group.spawn(prefix_set=classes.keys()))


class Driver:
    """The part of verl's PPO trainer that saves and loads, with worker groups that stand already.

    verl builds the critic before the actor, and calls the actor before the critic.
    """

    trainer_mode = "sync"
    _save_checkpoint = v1.PPOTrainer._save_checkpoint
    _load_checkpoint = v1.PPOTrainer._load_checkpoint

    def __init__(self, groups: dict[str, RayWorkerGroup], folder: Path, **trainer: Any) -> None:
        self.groups = groups
        for role in ("critic", "actor"):
            if role in groups:
                groups[role].reset()
        self.actor_rollout_wg, self.critic_wg = groups["actor"], groups.get("critic")
        self.use_critic = "critic" in groups
        is_async = trainer.pop("async_save", False)
        self.config: Any = OmegaConf.create(
            {
                "trainer": {
                    "default_local_dir": str(folder),
                    "default_hdfs_dir": None,
                    "resume_mode": "auto",
                    "del_local_ckpt_after_load": False,
                    **trainer,
                },
                "actor_rollout_ref": {"actor": {"checkpoint": {"async_save": is_async}}},
            }
        )
        self.checkpoint_callback = CheckpointCallback()
        self.train_dataloader = StatefulDataLoader(
            torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(1)).tolist(), batch_size=1
        )
        self.global_steps = 0
        self.losses: list[Any] = []
        self._load_checkpoint()
        self._samples = iter(self.train_dataloader)

    def train(self, until: int, *, save_every: int = 2) -> None:
        while self.global_steps < until:
            self.global_steps += 1
            sample = int(next(self._samples)[0])
            self.losses.append([sample, *(group.train(sample) for group in self.groups.values())])
            if self.global_steps % save_every == 0:
                self._save_checkpoint()

    def states(self) -> dict[str, list[dict[str, Any]]]:
        return {role: group.state() for role, group in self.groups.items()}

    def kill(self) -> None:
        """End all ranks at once."""
        for worker in {worker for group in self.groups.values() for worker in group.workers}:
            ray.kill(worker)


def same(one: Any, other: Any) -> bool:
    """Return whether two states are equal, bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
