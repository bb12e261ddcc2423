"""Training on real ranks with gloo, whose replicas are watched: `python -m tests.capture.watched_ranks`.

Without a flipped bit there must be no finding, however long the run is; the exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pickle
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ray_ckpt.capture.replica_watch import WINDOWS
from ray_ckpt.config import RunOptions
from ray_ckpt.core.replica_findings import finding, merged
from ray_ckpt.trainer.checkpointer import Checkpointer
from ray_ckpt.types import Watched
from tests.capture.gloo import group
from tests.capture.local import LocalLink

REPLICAS = 3
SHARDS = {"ddp": 1, "hsdp": 2}  # ranks that share one replica
SECONDS_PER_SAVE = 0.5  # longest, with many ranks on few cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training of `saves` steps with a save after each; a bit of a rank flips before one of them."""

    kind: str
    saves: int
    flip_at: int = 0  # the step; 0: never
    flip_rank: int = 1

    @property
    def world_size(self) -> int:
        return REPLICAS * SHARDS[self.kind]


def findings(run: Run, folder: Path) -> Mapping[int, str]:
    """Train on processes, each of which stands for a node; return the findings by step."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ranks = range(run.world_size)
    processes = [context.Process(target=_rank, args=(rank, run, folder)) for rank in ranks]
    for process in processes:
        process.start()
    deadline_s = time.monotonic() + 60 + run.saves * SECONDS_PER_SAVE
    for process in processes:
        process.join(max(0.0, deadline_s - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    assert [process.exitcode for process in processes] == [0] * run.world_size
    reports = [pickle.loads((folder / f"watched-{rank}.pickle").read_bytes()) for rank in ranks]
    found: dict[int, str] = {}
    for step in range(1, run.saves + 1):
        nodes = {f"node{rank}": merged({rank: reports[rank][step]}) for rank in ranks}
        assert all(nodes.values()), f"step {step}: a rank compares nothing"
        if text := finding(nodes):
            found[step] = text
    return found


def _rank(rank: int, run: Run, folder: Path) -> None:
    torch.set_num_threads(1)
    with group(rank, run.world_size, folder / "rendezvous"):
        model = _model(run)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        link = LocalLink(RunOptions(), rank=rank, world_size=run.world_size)
        ckpt = Checkpointer(link=link, model=model, optimizer=optimizer)
        ckpt.restore()
        inputs = torch.Generator().manual_seed(rank)
        watched: dict[int, tuple[Watched, ...]] = {}
        for step in range(1, run.saves + 1):
            if step == run.flip_at and rank == run.flip_rank:
                _flip(model)
            optimizer.zero_grad()
            model(torch.randn(4, 16, generator=inputs)).square().sum().backward()
            optimizer.step()
            assert ckpt.save(step)
            ckpt.wait("local")
            watched[step] = link.sealed.pop().watched
            link.files.clear()
        ckpt.close()
        (folder / f"watched-{rank}.pickle").write_bytes(pickle.dumps(watched))


def _model(run: Run) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Tanh(), nn.Linear(24, 6))
    if run.kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (REPLICAS, SHARDS[run.kind]), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh)


def _flip(model: Any) -> None:
    """Flip one bit of the last weight, high in the mantissa."""
    weight = list(model.parameters())[-2]
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    with torch.no_grad():
        local.view(torch.int32).view(-1)[3] ^= 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.capture.watched_ranks", description=__doc__)
    parser.add_argument("--kind", choices=SHARDS, default="ddp")
    parser.add_argument("--saves", type=int, default=10_000, help="steps, each with a save (default 10,000)")
    parser.add_argument("--flip-at", type=int, default=0, help="step before which a bit flips (never)")
    chosen = parser.parse_args()
    run = Run(kind=chosen.kind, saves=chosen.saves, flip_at=chosen.flip_at)
    with tempfile.TemporaryDirectory() as folder:
        found = findings(run, Path(folder))
    for step, text in list(found.items())[:WINDOWS]:
        print(f"step {step}: {text}")
    print(f"{run.kind}, {run.world_size} ranks, {run.saves} saves: {len(found)} findings")
    return 1 if found and not run.flip_at else 0


if __name__ == "__main__":
    sys.exit(main())
