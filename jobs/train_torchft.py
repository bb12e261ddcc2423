"""Replica groups of torchft, in plain Ray actors, whose durable checkpoints go through ray_ckpt.

    python -m jobs.train_torchft --steps 40               # two groups of one rank
    python -m jobs.train_torchft --steps 40 --ranks 2     # two groups of two ranks

Kill a group's processes: the other groups go on, and the group comes back with their state. End the job and
run it again with more --steps: it goes on from its newest checkpoint. docs/guides/torchft.md shows what
differs from the same loop without ray_ckpt.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import ray_ckpt
from jobs.demo.free_ports import free_port

WIDTH = 8
BATCH = 8  # samples of a batch of all ranks of all groups
TIMEOUT = timedelta(seconds=30)  # of collectives; a restore of the first group must be faster
MAX_FAILURES = 5  # restarts of groups
JOIN_S = 120.0  # longest wait for all groups before the first step; imports take seconds

AfterStep = Callable[..., None]


class Rank:
    """An actor that is one rank of a replica group."""

    def join(self, lighthouse: str, port: int, group: int, rank: int, config: Mapping[str, Any]) -> None:
        """Build what trains. Once this returns, the lighthouse waits for this group before a quorum."""
        from torchft import Manager, Optimizer, ProcessGroupGloo

        groups, ranks = config["groups"], config["ranks"]
        torch.set_num_threads(1)
        meeting = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
        model, inner = build()
        batches = build_batches(rank=group * ranks + rank, world_size=groups * ranks)

        def load(state: Mapping[str, Any]) -> None:
            model.load_state_dict(state["model"])
            inner.load_state_dict(state["optimizer"])

        manager = Manager(
            pg=ProcessGroupGloo(timeout=TIMEOUT),
            load_state_dict=load,
            state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
            min_replica_size=1,
            use_async_quorum=not config["sync"],
            init_sync=False,  # all groups build the same model
            rank=rank,
            world_size=ranks,
            store_addr="127.0.0.1",
            store_port=port,
            lighthouse_addr=lighthouse,
            replica_id=f"group_{group}",
            hostname="127.0.0.1",
            timeout=TIMEOUT,
        )
        where = {"run": config["run"], "storage_path": config["storage_path"], **config["options"]}
        connect = partial(ray_ckpt.connect, rank=rank, world_size=ranks, **where)
        ckpt = ray_ckpt.torchft.ReplicaCheckpointer(
            manager, connect, group=group, groups=groups, data=batches, model=model, optimizer=inner
        )
        self.manager, self.ckpt, self.model, self.batches = manager, ckpt, model, batches
        self.optimizer = Optimizer(manager, inner)
        self.group, self.rank, self.config = group, rank, config

    def train(self, joined: None) -> dict[str, Any]:
        manager, model, optimizer, ckpt = self.manager, self.model, self.optimizer, self.ckpt
        after_step = self.config["after_step"]
        loader = ckpt.batches()
        while manager.current_step() < self.config["steps"]:
            optimizer.zero_grad()
            position = self.batches.position
            batch = next(loader)
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            loss.backward()
            average(model, manager, self.config["ranks"])
            ckpt.exchange()
            optimizer.step()
            is_done = ckpt.step(metrics={"loss": loss})
            if is_done and after_step is not None:
                after_step(manager, ckpt, self.group, self.rank, position, batch, float(loss.detach()))
        ckpt.finish()
        manager.shutdown(wait=False)
        weights = [p.detach().clone() for p in model.parameters()]
        return {**manager.state_dict(), "position": self.batches.position, "weights": weights}


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def build_batches(*, rank: int, world_size: int) -> Any:
    samples: Any = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(1))
    sampler = ray_ckpt.GlobalBatchSampler(len(samples), global_batch=BATCH, rank=rank, world_size=world_size)
    return sampler.batches(DataLoader(samples, batch_sampler=sampler))


def average(model: nn.Module, manager: Any, ranks: int) -> None:
    """Average gradients over the ranks of the group, then over the groups of the quorum."""
    for gradient in (p.grad for p in model.parameters() if p.grad is not None):
        if ranks > 1:
            dist.all_reduce(gradient)
            gradient /= ranks
        manager.allreduce(gradient).wait()


# -- groups of actors --------------------------------------------------------------------------------


def start_group(lighthouse: str, group: int, config: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Start the ranks of a group; return the actors, and the calls of `join`."""
    options = {"num_cpus": 0, "runtime_env": {"env_vars": {"RUST_LOG": "warn", "OMP_NUM_THREADS": "1"}}}
    actors = [ray.remote(Rank).options(**options).remote() for _ in range(config["ranks"])]
    port = free_port()
    return actors, [a.join.remote(lighthouse, port, group, k, config) for k, a in enumerate(actors)]


def start_training(actors: list[Any], joins: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the actors, and the calls of `train`, which fail as their `join` does."""
    return actors, [actor.train.remote(join) for actor, join in zip(actors, joins, strict=True)]


def run_groups(
    run: str,
    storage_path: str,
    steps: int,
    *,
    groups: int = 2,
    ranks: int = 1,
    sync: bool = False,
    max_failures: int = MAX_FAILURES,
    after_step: AfterStep | None = None,
    **options: Any,
) -> dict[int, dict[str, Any]]:
    """Train; start a dead group again; return the result of rank 0 of each group that came to the end.

    `after_step` is called on each rank after each committed step.
    """
    from torchft.coordination import LighthouseServer

    config = {
        "run": run,
        "storage_path": storage_path,
        "steps": steps,
        "groups": groups,
        "ranks": ranks,
        "sync": sync,
        "after_step": after_step,
        "options": {"every_steps": 5, **options},
    }
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=10_000)
    address = lighthouse.address()
    found: dict[int, dict[str, Any]] = {}
    started = {group: start_group(address, group, config) for group in range(groups)}
    joins = [call for _, calls in started.values() for call in calls]
    ray.wait(joins, num_returns=len(joins), timeout=JOIN_S)  # else the first to join would train alone
    live = {group: start_training(*calls) for group, calls in started.items()}
    while live:
        done, _ = ray.wait([call for _, calls in live.values() for call in calls])
        group = next(k for k, (_, calls) in live.items() if done[0] in calls)
        actors, calls = live.pop(group)
        try:
            found[group] = ray.get(calls)[0]
        except ray.exceptions.RayActorError:
            max_failures -= 1
            if max_failures >= 0:
                live[group] = start_training(*start_group(address, group, config))
        finally:
            for actor in actors:
                ray.kill(actor)
    lighthouse.shutdown()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.train_torchft",
        description="Replica groups of torchft whose checkpoints go through ray_ckpt.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--name", default="torchft", help="run name")
    parser.add_argument(
        "--storage-path", default="~/ray_ckpt_runs", help="folder that all nodes share, or s3://"
    )
    parser.add_argument("--steps", type=int, default=20, help="committed steps in all")
    parser.add_argument("--groups", type=int, default=2, help="replica groups")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of a group")
    args = parser.parse_args(argv)
    path = args.storage_path
    storage = path if "://" in path else str(Path(path).expanduser().absolute())
    if not ray.is_initialized():
        ray.init()
    found = run_groups(args.name, storage, args.steps, groups=args.groups, ranks=args.ranks)
    for group, state in sorted(found.items()):
        print(f"group {group}: step {state['step']}, {state['batches_committed']} batches committed")
    print(f"ray-ckpt ls {storage}/{args.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
