"""Engines of DeepSpeed, and plain loops, that tests run on ranks: they train, save and restore."""

from __future__ import annotations

import os
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"  # read at the import of DeepSpeed

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ray_ckpt
from ray_ckpt.interop.deepspeed.partitions import link_state

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
    False  # else each environment compiles it for minutes
)
VOCABULARY = 11
OPTIONS = {"every_steps": 1000, "remote_every": 1000}
STAGES = (1, 2, 3)
MOMENTS = ("exp_avg", "exp_avg_sq")


class Net(nn.Module):
    """Odd shapes, tied weights, frozen parameters, a buffer and dropout."""

    def __init__(self, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False).to(dtype)
        self.first, self.norm, self.second = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.head = nn.Linear(5, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.dropout = nn.Dropout(0.1)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen.add_(0.25)
        hidden = self.frozen(self.embed(tokens))
        hidden = self.second(torch.relu(self.norm(self.first(self.dropout(hidden)))))
        logits: Tensor = self.head(hidden) * self.scale
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups of the trainable parameters: with weight decay and without it."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    plain = [p for n, p in named if n.endswith("bias") or n == "scale"]
    return [
        {"params": [p for n, p in named if not (n.endswith("bias") or n == "scale")], "weight_decay": 0.1},
        {"params": plain, "weight_decay": 0.0},
    ]


def tokens_of(step: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + dist.get_rank())
    return torch.randint(VOCABULARY, (2, 6), generator=generator)


def config_of(stage: int, **zero: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 0.05}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 1000,
            "stage3_param_persistence_threshold": 8,
            "sub_group_size": 40,
            **zero,
        },
    }


def build_engine(config: dict[str, Any], optimizer: Any = torch.optim.AdamW) -> Any:
    world = os.environ
    world["RANK"], world["LOCAL_RANK"] = str(dist.get_rank()), str(dist.get_rank())
    world["WORLD_SIZE"] = str(dist.get_world_size())
    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)
    torch.manual_seed(0)
    model = Net()
    built = optimizer(groups_of(model), lr=0.05)
    engine, *_ = deepspeed.initialize(model=model, optimizer=built, config=config, dist_init_required=False)
    torch.manual_seed(dist.get_rank())
    return engine


def connect(run: str, storage: str, **options: Any) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ray_ckpt.connect(
        run=run, storage_path=storage, rank=rank, world_size=world_size, **{**OPTIONS, **options}
    )


def train_step(engine: Any, step: int) -> float:
    total = 0.0
    for micro in range(engine.gradient_accumulation_steps()):
        loss = engine(tokens_of(step, micro))
        engine.backward(loss)
        engine.step()
        total += float(loss.detach())
    return total


def state_of(engine: Any) -> dict[str, Any]:
    """Return the whole state, gathered by DeepSpeed's own functions; every rank calls this."""
    link_state(engine.optimizer)  # with two groups DeepSpeed links the state of the first only
    found: dict[str, Any] = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            found[name] = safe_get_full_fp32_param(param).clone()
            for key in MOMENTS:
                found[f"{name}.{key}"] = safe_get_full_optimizer_state(param, key).clone()
        with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
            found[f"{name}.16"] = param.detach().clone()
    found["seen"] = engine.module.seen.clone()
    return found


def numbers_of(engine: Any) -> dict[str, Any]:
    base = engine.optimizer.optimizer
    return {
        "counters": [engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps],
        "lr": [group["lr"] for group in base.param_groups],
        "steps": sorted({float(state["step"]) for state in base.state.values()}),
        "schedule": engine.lr_scheduler.state_dict(),
        "scale": engine.optimizer.loss_scale,
        "draw": float(torch.rand(1)),
    }


def run_engine(
    run: str, storage: str, config: dict[str, Any], total: int, optimizer: Any = torch.optim.AdamW
) -> dict[str, Any]:
    """Restore, train to step `total`, save there, and return losses, state and numbers."""
    connect(run, storage)
    engine = build_engine(config, optimizer)
    ckpt = ray_ckpt.Checkpointer(engine=engine)
    losses = {}
    for step in ckpt.steps(total=total):
        losses[step] = train_step(engine, step)
        ckpt.step(step)
    ckpt.close()
    found = {"losses": losses, "numbers": numbers_of(engine), "state": state_of(engine)}
    engine.destroy()
    return found


def restore_engine(
    run: str, storage: str, config: dict[str, Any], optimizer: Any = torch.optim.AdamW
) -> dict[str, Any]:
    """Restore, return the state, and train a step and save it."""
    connect(run, storage)
    engine = build_engine(config, optimizer)
    ckpt = ray_ckpt.Checkpointer(engine=engine)
    info = ckpt.restore()
    assert info is not None
    found = {"step": info.step, "numbers": numbers_of(engine), "state": state_of(engine)}
    found["loss"] = train_step(engine, info.step + 1)
    ckpt.save(info.step + 1)
    ckpt.wait("local")
    found["after"] = state_of(engine)
    ckpt.close()
    engine.destroy()
    return found


def restore_fsdp2(run: str, storage: str) -> dict[str, Any]:
    """Restore in FSDP2 with a plain optimizer, and train a step and save it."""
    connect(run, storage)
    torch.manual_seed(1)
    model: Any = Net(dtype=torch.bfloat16)
    for layer in (model.first, model.second):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.5, foreach=False)  # a part is sharded
    scheduler = Counted(optimizer)
    ckpt = ray_ckpt.Checkpointer(model=model, optimizer=optimizer, scheduler=scheduler)
    info = ckpt.restore()
    assert info is not None
    found = {"step": info.step, "state": plain_state(model, optimizer), "schedule": scheduler.state}
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.01) if param.requires_grad else None
    optimizer.step()
    ckpt.save(info.step + 1)
    ckpt.wait("local")
    found["after"] = plain_state(model, optimizer)
    ckpt.close()
    return found


def run_stages(storage: str, totals: dict[str, int]) -> dict[str, Any]:
    """Train runs with ZeRO 1, 2 and 3 to these steps; return `run_engine` of each by its name.

    ZeRO 3 comes last: from its first engine on, the process has another torch.nn.functional.linear, which
    rounds otherwise.
    """
    return {
        f"{run}-{stage}": run_engine(f"{run}-{stage}", storage, config_of(stage), total)
        for stage in STAGES
        for run, total in totals.items()
    }


def restore_stages(storage: str, stages: dict[str, int]) -> dict[str, Any]:
    """Return `restore_engine` for runs with the stage of each."""
    return {run: restore_engine(run, storage, config_of(stage)) for run, stage in stages.items()}


class Counted:
    """A schedule with the state of DeepSpeed's WarmupLR."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.state: dict[str, Any] = {"last_batch_iteration": -1}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def plain_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found: dict[str, Any] = {"seen": model.seen}
    for name, param in model.named_parameters():
        if param.requires_grad:
            found[name] = param.detach()
            found |= {f"{name}.{key}": optimizer.state[param][key] for key in MOMENTS}
        else:
            found[f"{name}.16"] = param.detach()
    return {k: v.full_tensor() if isinstance(v, DTensor) else v.clone() for k, v in found.items()}
