"""ray_ckpt without Ray Train: the same Checkpointer in plain Ray actors, as RL frameworks start them.

    python -m jobs.train_actors ddp            # two actors that run torch.distributed among themselves
    python -m jobs.train_actors rank-zero      # the same, where rank 0 alone saves what all have alike
    python -m jobs.train_actors single         # one process
    python -m jobs.train_actors actor-critic   # two worker groups of one run that commit a step together

Checkpoints need `ray_ckpt.connect` in each rank, then a Checkpointer as ever. Run it again with
more --steps: it goes on from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ray_ckpt

KINDS = ("ddp", "rank-zero", "single", "actor-critic")
PARTS = {"actor": 2, "critic": 1}
WIDTH = 16


class Rank:
    """An actor that is one process of a group."""

    def join(self, rank: int, world_size: int, port: int) -> None:
        """Become rank `rank` of torch.distributed; here all ranks are on one machine."""
        torch.set_num_threads(1)
        init = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world_size)

    def run(self, loop: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
        return loop(*args)


def train_ddp(run: str, storage: str, steps: int) -> dict[str, Any]:
    """Train with DDP; every rank saves its share of the common state, and its own random state."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ray_ckpt.connect(run=run, storage_path=storage, rank=rank, world_size=world_size, every_steps=5)
    model, optimizer = build(seed=0)
    ckpt = ray_ckpt.Checkpointer(model=model, optimizer=optimizer)
    losses = []
    for step in ckpt.steps(total=steps):
        losses.append(train_step(model, optimizer, step))
        ckpt.step(step, metrics={"loss": losses[-1]})
    return {"steps": len(losses), "weight": weight_of(model)}


def train_rank_zero(run: str, storage: str, steps: int) -> dict[str, Any]:
    """Train with DDP; only rank 0 connects, as a process with all state, and sends the restored state."""
    rank = dist.get_rank()
    model, optimizer = build(seed=0)
    first = 1
    ckpt = None
    if rank == 0:
        ray_ckpt.connect(run=run, storage_path=storage, every_steps=5)
        ckpt = ray_ckpt.Checkpointer(model=model, optimizer=optimizer)
        info = ckpt.restore()
        first = 1 if info is None else info.step + 1
    state = [(first, model.state_dict(), optimizer.state_dict())]
    dist.broadcast_object_list(state, src=0)
    first, *states = state[0]
    if rank > 0:
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
    for step in range(first, steps + 1):
        loss = train_step(model, optimizer, step)
        if ckpt is not None:
            ckpt.step(step, metrics={"loss": loss})
    if ckpt is not None:
        ckpt.finish()
        ckpt.close()
    return {"steps": steps + 1 - first, "weight": weight_of(model)}


def train_single(run: str, storage: str, steps: int) -> dict[str, Any]:
    ray_ckpt.connect(run=run, storage_path=storage, every_steps=5)
    model, optimizer = build(seed=0, wrap=False)
    ckpt = ray_ckpt.Checkpointer(model=model, optimizer=optimizer)
    done = 0
    for step in ckpt.steps(total=steps):
        ckpt.step(step, metrics={"loss": train_step(model, optimizer, step)})
        done += 1
    return {"steps": done, "weight": weight_of(model)}


def train_part(run: str, storage: str, steps: int, part: str) -> dict[str, Any]:
    """Train one of two groups, each with its own torch.distributed; a checkpoint holds both groups."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ray_ckpt.connect(
        run=run,
        storage_path=storage,
        rank=rank,
        world_size=world_size,
        part=part,
        parts=PARTS,
        every_steps=5,
    )
    model, optimizer = build(seed=len(part))
    items: dict[str, Any] = {part: model, f"{part}_optimizer": optimizer}
    ckpt = ray_ckpt.Checkpointer(**items)
    done = 0
    for step in ckpt.steps(total=steps):
        train_step(model, optimizer, step)
        ckpt.step(step)
        done += 1
    return {"steps": done, "weight": weight_of(model)}


def build(*, seed: int, wrap: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    if wrap:
        model = nn.parallel.DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Train one step on data that depend only on the step and the rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    data = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))
    loss: Tensor = (model(data) - data.sum(1, keepdim=True)).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def weight_of(model: nn.Module) -> list[float]:
    parameters: list[float] = next(model.parameters()).detach().flatten().tolist()
    return parameters


# -- groups of actors --------------------------------------------------------------------------------


def start_group(size: int) -> list[Any]:
    """Start `size` actors that are the ranks of one torch.distributed group."""
    actors = [ray.remote(Rank).options(num_cpus=0).remote() for _ in range(size)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.get([actor.join.remote(rank, size, port) for rank, actor in enumerate(actors)])
    return actors


def run_kind(kind: str, run: str, storage: str, steps: int) -> list[dict[str, Any]]:
    """Start the group, train, and return the result of each rank."""
    if kind == "actor-critic":
        groups = {part: start_group(size) for part, size in PARTS.items()}
        calls = [
            actor.run.remote(train_part, run, storage, steps, part)
            for part, actors in groups.items()
            for actor in actors
        ]
    elif kind == "single":
        calls = [ray.remote(Rank).options(num_cpus=0).remote().run.remote(train_single, run, storage, steps)]
    else:
        loop = {"ddp": train_ddp, "rank-zero": train_rank_zero}[kind]
        calls = [actor.run.remote(loop, run, storage, steps) for actor in start_group(2)]
    results: list[dict[str, Any]] = ray.get(calls)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.train_actors",
        description="ray_ckpt without Ray Train, in plain Ray actors.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--name", help="run name; by default the kind")
    parser.add_argument(
        "--storage-path", default="~/ray_ckpt_runs", help="folder that all nodes share, or s3://"
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps in all")
    args = parser.parse_args(argv)
    path = args.storage_path
    storage = path if "://" in path else str(Path(path).expanduser().absolute())
    if not ray.is_initialized():
        ray.init()
    name = args.name or args.kind
    results = run_kind(args.kind, name, storage, args.steps)
    done = max(result["steps"] for result in results)
    print(f"{done} steps done, from step {args.steps - done} to {args.steps}; ray-ckpt ls {storage}/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
