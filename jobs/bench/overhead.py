"""Cost of saves in a training that is always computing: the GPT job of `jobs.train_gpt` on two ranks.

The ranks are actors on a Ray of one node, and the whole service saves them. A stretch is ten steps with a
save after the first of them, so that copying and writing happen during the other steps, or ten steps without
a save. Blocked time is what the training loop spends in the Checkpointer, by its own clock, and the time that
optimizer steps wait for captures. On a machine with one core per rank, the agent's hashing and writing slow
down the steps; only the wall time includes this.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch
import torch.distributed as dist

import ray_ckpt
from jobs.bench.context import Context, format_size
from jobs.bench.row import Machine, Reference, Row, watched
from jobs.bench.snapshot import BLOCKED_LIMIT, STEP_S, STEPS_PER_SAVE
from jobs.bench.state import state_bytes
from jobs.bench.training import FAR_FUTURE_STEPS, READY_S, local_ray
from jobs.model.text import ByteLoader, cut_blocks, read_text
from jobs.train_gpt import build_mesh, build_model, make_deterministic, parse_args, train_step

NUM_RANKS = 2
# 8.8 million parameters: with AdamW's moments 105 MB of state. A micro-batch takes about 30 GFLOP per rank.
JOB = "--layers 7 --width 320 --heads 5 --context 128 --batch 4"
SMALL_JOB = "--layers 1 --width 16 --heads 2 --context 16 --batch 1"
CALL_S = 300.0  # time limit of a stretch: ten steps of about 0.5 s on a busy machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Ten steps of one rank, in seconds: the total, and the time for which saving blocked the training."""

    seconds: float
    blocked_s: float


class Rank:
    """One rank of the GPT job with its Checkpointer, restored and ready to train."""

    def __init__(self, rank: int, job: str, folder: str) -> None:
        config = vars(parse_args(job.split()))
        make_deterministic(config["seed"])
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=NUM_RANKS
        )
        ray_ckpt.connect(
            run="overhead",
            storage_path=f"{folder}/storage",
            rank=rank,
            world_size=NUM_RANKS,
            staging=f"{folder}/staging",
            replicas=0,  # there is one node
            every_steps=FAR_FUTURE_STEPS,  # no automatic saves: the stretches call `save`
        )
        self._device = torch.device("cpu")
        self._model = build_model(config, self._device, build_mesh(config, self._device))
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        loader = ByteLoader(
            cut_blocks(read_text(), config["context"]),
            batch_size=config["batch"],
            rank=rank,
            world_size=NUM_RANKS,
            seed=config["seed"],
        )
        self._ckpt = ray_ckpt.Checkpointer(model=self._model, optimizer=self._optimizer, loader=loader)
        self._ckpt.restore()
        self._batches = iter(loader)
        self._step = 0

    def state_bytes(self) -> int:
        """Return the bytes of parameters and moments of all ranks; moments exist after the first step."""
        return state_bytes(self._model, self._optimizer)

    def wait_ready(self) -> None:
        """Wait until memory for saves is ready, so that no stretch includes this preparation."""
        deadline_s = time.monotonic() + READY_S
        while self._ckpt.setup_s is None:
            if time.monotonic() > deadline_s:
                raise TimeoutError("the arena did not become ready")
            time.sleep(0.02)

    def stretch(self, *, saves: bool, accumulate: int) -> Stretch:
        """Run ten steps of `accumulate` micro-batches. Raise RuntimeError if the save was skipped."""
        waited_s, in_ckpt_s, start_s = self._ckpt.stats.waited_s, 0.0, time.perf_counter()
        for place in range(STEPS_PER_SAVE):
            self._step += 1
            train_step(self._model, self._optimizer, self._batches, accumulate, self._device)
            done_s = time.perf_counter()
            if saves and place == 0 and not self._ckpt.save(self._step):
                raise RuntimeError("the save was skipped")
            self._ckpt.step(self._step)
            in_ckpt_s += time.perf_counter() - done_s
        waited_s = self._ckpt.stats.waited_s - waited_s
        return Stretch(seconds=time.perf_counter() - start_s, blocked_s=in_ckpt_s + waited_s)

    def settle(self) -> None:
        """Wait until the last save is on the disk and in the log, so that it delays no other stretch."""
        self._ckpt.wait("local")

    def close(self) -> None:
        self._ckpt.close()


class Group:
    """The ranks, called together."""

    def __init__(self, job: str, folder: Path) -> None:
        make = ray.remote(Rank).options(num_cpus=1)
        self._ranks: list[Any] = [make.remote(rank, job, str(folder)) for rank in range(NUM_RANKS)]
        self._accumulate = 1

    def make_ready(self, step_s: float) -> int:
        """Warm up, make steps take at least `step_s`, and return the bytes of the group's state."""
        self.stretch(saves=False)  # the first step makes the optimizer's state
        alone_s = seconds(self.stretch(saves=False)) / STEPS_PER_SAVE
        self._accumulate = max(1, math.ceil(step_s / alone_s))
        self._all("wait_ready")
        self.stretch(saves=True)  # the first save of a run
        return int(self._all("state_bytes")[0])

    def stretch(self, *, saves: bool) -> tuple[Stretch, ...]:
        """Run ten steps on all ranks and return the stretch of each rank."""
        found = self._all("stretch", saves=saves, accumulate=self._accumulate)
        if saves:
            self._all("settle")
        return tuple(found)

    def close(self) -> None:
        self._all("close")
        for rank in self._ranks:
            ray.kill(rank)

    def _all(self, method: str, **arguments: Any) -> list[Any]:
        calls = [getattr(rank, method).remote(**arguments) for rank in self._ranks]
        return list(ray.get(calls, timeout=CALL_S))


def rows(context: Context) -> Iterator[Row]:
    job, step_s = (SMALL_JOB, 0.0) if context.quick else (JOB, STEP_S)
    with context.temporary() as folder, local_ray(folder):
        group = Group(job, folder)
        state = group.make_ready(step_s)
        stretches: list[tuple[Stretch, ...]] = []

        def with_save() -> float:
            stretches.append(group.stretch(saves=True))
            return seconds(stretches[-1])

        samplers = {"without": lambda: seconds(group.stretch(saves=False)), "with": with_save}
        samples, machine = watched(samplers, context.repeat)
        group.close()
    yield blocked_row(stretches, machine, state)
    yield wall_row(samples["with"], samples["without"], machine)


def blocked_row(stretches: Sequence[Sequence[Stretch]], machine: Machine, state: int) -> Row:
    """Compare the blocked share of each stretch, of the rank that was blocked longest, with its limit."""
    step_s = median(map(seconds, stretches)) / STEPS_PER_SAVE
    return Row(
        name="overhead-blocked",
        what=f"what one save per {STEPS_PER_SAVE} steps blocks of the GPT job",
        unit="%",
        samples=tuple(100 * max(one.blocked_s for one in ranks) / seconds(ranks) for ranks in stretches),
        reference=Reference(name="limit", samples=(BLOCKED_LIMIT,)),
        reach="<= 1",
        machine=machine,
        note=f"{NUM_RANKS} ranks, steps of {step_s:.2g} s, {format_size(state)} of state",
    )


def wall_row(saving: Sequence[float], plain: Sequence[float], machine: Machine) -> Row:
    """Compare the wall time of the stretches with that of stretches without a save, taken in turn."""
    pairs = [one / other for one, other in zip(saving, plain, strict=True)]
    return Row(
        name="overhead-wall",
        what=f"{STEPS_PER_SAVE} steps of it with a save, by the clock on the wall",
        unit="s",
        samples=tuple(saving),
        reference=Reference(name="without", samples=tuple(plain)),
        machine=machine,
        note=f"pair by pair {median(pairs):.3f}, from {min(pairs):.3f} to {max(pairs):.3f}; "
        f"{NUM_RANKS} ranks and the agent, which hashes and writes, share {os.cpu_count()} cores",
        extra={"pairs": pairs},
    )


def seconds(ranks: Sequence[Stretch]) -> float:
    """Return the seconds of the slowest rank in a stretch."""
    return max(one.seconds for one in ranks)
