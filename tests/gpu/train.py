"""A training on one CUDA device, as a program that can be killed: each step is a line of a journal.

    python -m tests.gpu.train RUN STORAGE JOURNAL --kind amp --steps 30

A step is a function of the state before it, so a run that was killed has the lines of a calm run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else sums of cuBLAS differ from run to run

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import ray_ckpt

KINDS = ("amp", "fsdp2", "graph", "zero1", "zero2", "zero3")
WIDTH, BATCH = 64, 32
DEVICE = torch.device("cuda")


class Net(nn.Module):
    """Convolution, normalization with running statistics, and dropout, which draws from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.first, self.drop = nn.Linear(8 * WIDTH, WIDTH), nn.Dropout(0.2)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.conv(x.unsqueeze(1)))).flatten(1)
        y: Tensor = self.last(self.drop(torch.relu(self.first(hidden))))
        return (y - x).square().mean()


class Wide(nn.Module):
    """Only layers that FSDP2, ZeRO and graphs take."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(3))
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return (y - x).float().square().mean()


def batch_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, generator=generator).to(DEVICE)


class Loop:
    """A loop of one kind: the items to save, and a function that makes a step and returns its loss."""

    items: dict[str, Any]
    step: Callable[[int], Tensor]

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        if kind == "amp":
            self._amp()
        elif kind == "fsdp2":
            self._fsdp2()
        elif kind == "graph":
            self._graph()
        else:
            self._zero(int(kind.removeprefix("zero")))

    def _amp(self) -> None:
        """Train in fp16; the first scales overflow, so some steps are skipped."""
        model = Net().to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**30, growth_interval=6)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7)
        self.items = {"model": model, "optimizer": optimizer, "scaler": scaler, "schedule": schedule}

        def step(number: int) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss: Tensor = model(batch_of(number))
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            return loss

        self.step = step

    def _fsdp2(self) -> None:
        model: Any = Wide().to(DEVICE)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.items = {"model": model, "optimizer": optimizer}

        def step(number: int) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(batch_of(number))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss

        self.step = step

    def _graph(self) -> None:
        """Replay whole steps from a CUDA graph, under the lock, since no hook runs."""
        model = Wide().to(DEVICE)
        model.layers.eval()  # no dropout: a graph keeps the state of its generator for itself
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
        x = batch_of(0)

        def whole() -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss: Tensor = model(x)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return loss

        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                whole()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = whole()
        self.items = {"model": model, "optimizer": optimizer}

        def step(number: int) -> Tensor:
            x.copy_(batch_of(number))
            with self.ckpt.lock():
                graph.replay()
            return loss.clone()

        self.step = step

    def _zero(self, stage: int) -> None:
        """Train a DeepSpeed engine in fp16 with dynamic loss scaling."""
        import deepspeed

        deepspeed.init_distributed(dist_backend="nccl", dist_init_required=False)
        model = Wide()
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_clipping": 1.0,
            "fp16": {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 6},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 8},
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
        self.items = {"engine": engine}

        def step(number: int) -> Tensor:
            loss: Tensor = engine(batch_of(number).half())
            engine.backward(loss)
            engine.step()
            return loss

        self.step = step

    def run(self, run: str, storage: str, journal: Path, steps: int, pace_s: float) -> None:
        ray_ckpt.connect(run=run, storage_path=storage, rank=0, world_size=1, every_steps=3)
        self.ckpt = ray_ckpt.Checkpointer(**self.items)
        for step in self.ckpt.steps(total=steps):
            loss = self.step(step)
            self.ckpt.step(step)
            time.sleep(pace_s)
            with journal.open("a") as file:
                line = {"pid": os.getpid(), "step": step, "loss": float(loss.detach()).hex()}
                print(json.dumps(line), file=file)
        self.ckpt.save(steps)
        self.ckpt.wait("durable")
        with journal.open("a") as file:
            print(json.dumps({"digest": self._digest()}), file=file)
        self.ckpt.close()

    def _digest(self) -> str:
        """Return a digest of all that the device holds: parameters, buffers, moments, and the next draw."""
        found = hashlib.sha256()
        owner = self.items.get("engine") or self.items["model"]
        optimizer = owner.optimizer.optimizer if "engine" in self.items else self.items["optimizer"]
        tensors = [*owner.state_dict().values()] if "engine" not in self.items else [*owner.parameters()]
        tensors += [t for each in optimizer.state.values() for t in each.values() if isinstance(t, Tensor)]
        for tensor in [*tensors, torch.rand(8, device=DEVICE)]:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            found.update(local.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("storage")
    parser.add_argument("journal", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="amp")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds that each step takes longer")
    chosen = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(0)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    Loop(chosen.kind).run(chosen.run, chosen.storage, chosen.journal, chosen.steps, chosen.pace)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
