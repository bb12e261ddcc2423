"""`dcp.async_save` of one rank through ray_ckpt, in turn with DCP's own stager and writer on the same state.

Stall is what the training thread loses: the call itself, and what the next optimizer step waits for after
a forward and backward pass of STEP_S. DCP's stager is the one with shared memory, warm, and its writer syncs
its files. The bytes in DCP's collectives are the plan of a rank as pickle, which is what DCP sends.
"""

from __future__ import annotations

import logging
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as _dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import ray_ckpt
from jobs.bench.context import Context
from jobs.bench.row import Reference, Row, interleaved
from jobs.bench.state import State, make_state, state_dict
from jobs.bench.training import FAR_FUTURE_STEPS, Compute, local_ray
from ray_ckpt.capture.overlap_guard import running

dcp: Any = _dcp  # its functions have no stable types

STEP_S = 0.5  # forward and backward pass while a save is copied and written
NUM_FIRST = 2  # saves of each side before the samples
NUM_TENSORS = (100, 10_000)  # in the two states whose plans are compared
LIMIT = "<= 0.3"  # of DCP's stall


def rows(context: Context) -> Iterator[Row]:
    with context.temporary() as folder, local_ray(folder):
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        cores = torch.get_num_threads()
        torch.set_num_threads(max(1, cores - 1))  # one core is spare
        logging.getLogger("torch.distributed").setLevel(logging.ERROR)
        try:
            state = make_state(context.size_bytes)
            own, stock = _Own(state, folder), _Stock(state, folder)
            for _ in range(NUM_FIRST):
                own.save()
                stock.save()
            compute = Compute(STEP_S)
            found = interleaved(
                {"own": lambda: own.stall(compute), "stock": lambda: stock.stall(compute)}, context.repeat
            )
            yield _row("dcp-stall", "stall of dcp.async_save, warm", found, reach=LIMIT)
            found = {"own": tuple(own.committed_s), "stock": tuple(stock.committed_s)}
            yield _row("dcp-commit", "time from dcp.async_save until its future is done", found)
        finally:
            torch.set_num_threads(cores)
            dist.destroy_process_group()
    few, many = (_plan_bytes(num) for num in NUM_TENSORS)
    yield Row(
        name="dcp-bytes",
        what=f"plan of a rank in DCP's collectives, {NUM_TENSORS[1]:,} tensors",
        unit="B",
        samples=(many,),
        reference=Reference(name=f"{NUM_TENSORS[0]} tensors", samples=(few,)),
        reach="<= 1",
    )


def _row(name: str, what: str, found: Any, *, reach: str = "") -> Row:
    stock = Reference(name="DCP, shared memory", samples=found["stock"])
    return Row(name=name, what=what, unit="s", samples=found["own"], reference=stock, reach=reach)


class _Side(ABC):
    """Saves of one kind; `committed_s` has the seconds of each sample until its future was done."""

    def __init__(self, state: State) -> None:
        self.model, self.optimizer = state
        self.step = 0
        self.committed_s: list[float] = []

    @abstractmethod
    def begin(self) -> Any:
        """Begin a save; return the future that is done when the checkpoint is safe."""

    def save(self) -> None:
        self.begin().result()

    def stall(self, compute: Compute) -> float:
        """Save during a step; return the seconds that the training thread lost."""
        start_s = time.perf_counter()
        done = self.begin()
        stall_s = time.perf_counter() - start_s
        done.add_done_callback(lambda _: self.committed_s.append(time.perf_counter() - start_s))
        compute()
        before_s = time.perf_counter()
        running.wait()  # as the optimizer's step does first
        stall_s += time.perf_counter() - before_s
        done.result()
        return stall_s


class _Own(_Side):
    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state)
        ray_ckpt.connect(
            run="dcp",
            storage_path=str(folder / "storage"),
            staging=str(folder / "staging"),
            memory="single",
            replicas=0,
            keep_last=1,
            every_steps=FAR_FUTURE_STEPS,
        )

    def begin(self) -> Any:
        self.step += 1
        state = state_dict(self.model, self.optimizer)
        return dcp.async_save(state, storage_writer=ray_ckpt.dcp.Writer(self.step))


class _Stock(_Side):
    def __init__(self, state: State, folder: Path) -> None:
        super().__init__(state)
        self._folder = folder / "stock"
        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=True,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
        self._stager = DefaultStager(options)

    def begin(self) -> Any:
        self.step += 1
        writer = dcp.FileSystemWriter(self._folder, sync_files=True, overwrite=True)
        state = state_dict(self.model, self.optimizer)
        saved = dcp.async_save(state, storage_writer=writer, async_stager=self._stager)
        return getattr(saved, "upload_completion", saved)


def _plan_bytes(num_tensors: int) -> float:
    """Return the bytes of the plan that a Writer gives to DCP."""
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner({f"t{index}": torch.zeros(1) for index in range(num_tensors)}, None, True)
    return float(len(pickle.dumps(ray_ckpt.dcp.Writer(1).prepare_local_plan(planner.create_local_plan()))))
