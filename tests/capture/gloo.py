"""Ranks as processes with gloo. A module of its own, for the server that forks them imports it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.capture.ranks import Files, items_of

TIMEOUT_S = 120.0  # of all ranks; a loaded machine takes seconds to fork and connect them


def run_processes(kind: str, world_size: int, folder: Path, files: Files | None) -> Files:
    """Run `_rank` on several processes, with one import of torch for all; return their checkpoint."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    there = files and (files.folder, files.world_size, files.rows, files.states)
    arguments = (kind, world_size, folder, there)
    processes = [context.Process(target=_rank, args=(rank, *arguments)) for rank in range(world_size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT_S)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in processes] == [0] * world_size
    together = Files(folder, world_size)
    for rank in range(world_size):
        rows, together.states[rank] = pickle.loads((folder / f"rank-{rank}.pickle").read_bytes())
        together.rows += rows
    return together


def _rank(rank: int, kind: str, world_size: int, folder: Path, before: Any) -> None:
    """Restore what was there before, compare it with the whole, take a step, and save that."""
    torch.set_num_threads(1)
    with group(rank, world_size, folder / "rendezvous"):
        model: Any = _build(kind)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=True)
        items = items_of(model=model, optimizer=optimizer)
        if before is not None:
            there, there_size, rows, states = before
            files = Files(there, there_size, rows=rows, states=states)
            files.load(items, rank, world_size)
            known = torch.load(there / "whole.pt", weights_only=True)
            for name, value in _whole(items).items():
                assert torch.equal(value, known[name]), name
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        whole = _whole(items)
        if rank == 0:
            torch.save(whole, folder / "whole.pt")
        made = Files(folder, world_size)
        made.save(items, rank)
        (folder / f"rank-{rank}.pickle").write_bytes(pickle.dumps((made.rows, made.states[rank])))


@contextlib.contextmanager
def group(rank: int, world_size: int, rendezvous: Path) -> Iterator[None]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    yield
    dist.destroy_process_group()


def _build(kind: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    match kind:
        case "ddp":
            return nn.parallel.DistributedDataParallel(model)
        case "fsdp2":
            return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        case "fsdp2 and tp":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            return fully_shard(model, mesh=mesh["dp"])
    return model


def _whole(items: Any) -> dict[str, torch.Tensor]:
    """Return every tensor, gathered by torch."""
    model, state = items["model"].tree(), items["optimizer"].tree()["state"]
    named = {**model, **{f"{name}.{key}": v for name, inner in state.items() for key, v in inner.items()}}
    return {
        name: value.full_tensor().detach() if isinstance(value, DTensor) else value.detach().clone()
        for name, value in named.items()
    }
