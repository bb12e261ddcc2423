"""Worker groups of verl, and a driver that saves and loads by the methods of verl's trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
import verl.trainer.ppo.v1.trainer_base as v1
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import create_colocated_worker_cls
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker

from tests.frameworks.verl.program import state_of, train_on

NUM_SAMPLES = 64


class TinyWorker(TrainingWorker):  # type: ignore[misc]
    """A worker of verl that trains on samples by number, and shows its state."""

    def __init__(self, config: TrainingWorkerConfig) -> None:
        if not dist.is_initialized():  # verl names a backend for the CPU and one for the device
            dist.init_process_group("gloo")
        super().__init__(config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def train(self, sample: int) -> float:
        """Make an optimizer step of the engine on a batch of `sample`; return the loss of this rank."""
        return train_on(self.engine, sample, self.rank)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def state(self) -> dict[str, Any]:
        return state_of(self.engine)


def start(configs: dict[str, TrainingWorkerConfig], ranks: int) -> dict[str, RayWorkerGroup]:
    """Start the roles in the same `ranks` processes, as verl's trainers do; return their groups by role."""
    worker = ray.remote(TinyWorker)
    classes = {role: RayClassWithInitArgs(worker, config=config) for role, config in configs.items()}
    group = RayWorkerGroup(
        resource_pool=RayResourcePool([ranks], use_gpu=False, max_colocate_count=1),
        ray_cls_with_init=create_colocated_worker_cls(classes),
        device_name="cpu",
    )
    return dict(group.spawn(prefix_set=classes.keys()))


class Driver:
    """The part of verl's PPO trainer that saves and loads, with worker groups that stand already.

    verl builds the critic before the actor, and calls the actor before the critic.
    """

    trainer_mode = "sync"
    _save_checkpoint = v1.PPOTrainer._save_checkpoint
    _load_checkpoint = v1.PPOTrainer._load_checkpoint

    def __init__(self, groups: dict[str, RayWorkerGroup], folder: Path) -> None:
        self.groups = groups
        for role in ("critic", "actor"):
            if role in groups:
                groups[role].reset()
        self.actor_rollout_wg, self.critic_wg = groups["actor"], groups.get("critic")
        self.use_critic = "critic" in groups
        self.config: Any = OmegaConf.create(
            {
                "trainer": {
                    "default_local_dir": str(folder),
                    "default_hdfs_dir": None,
                    "resume_mode": "auto",
                    "del_local_ckpt_after_load": False,
                },
                "actor_rollout_ref": {"actor": {"checkpoint": {"async_save": False}}},
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
