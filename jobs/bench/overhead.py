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
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import ray
import torch
import torch.distributed as dist

from jobs.bench.context import Context
from jobs.bench.row import Reference, Row, interleaved
from jobs.bench.state import state_bytes
from jobs.bench.training import Saves, local_ray
from jobs.model.text import ByteLoader, cut_blocks, read_text
from jobs.train_gpt import build_mesh, build_model, make_deterministic, parse_args, train_step
from ray_ckpt.texts import size_text

NUM_RANKS = 2
# 8.8 million parameters: with AdamW's moments 105 MB of state. A micro-batch takes about 30 GFLOP per rank.
JOB = "--layers 7 --width 320 --heads 5 --context 128 --batch 4"
SMALL_JOB = "--layers 1 --width 16 --heads 2 --context 16 --batch 1"
STEP_S = 0.5  # shortest training step for which BLOCKED_LIMIT is required
STEPS_PER_SAVE = 10
BLOCKED_LIMIT = 2.0  # limit of blocked time, in % of the time of ten steps
CALL_S = 300.0  # time limit of a stretch: ten steps of about 0.5 s on a busy machine


class Stretch(NamedTuple):
    """Ten steps of one rank, in seconds: the total, and the time for which saving blocked the training."""

    seconds: float
    blocked_s: float


class TrainingRank:
    """One rank of the GPT job with its Checkpointer, restored and ready to train."""

    def __init__(self, rank: int, job: str, folder: str) -> None:
        config = vars(parse_args(job.split()))
        make_deterministic(config["seed"])
        init = f"file://{folder}/meeting"
        dist.init_process_group("gloo", init_method=init, rank=rank, world_size=NUM_RANKS)
        self._device = torch.device("cpu")
        self._model = build_model(config, self._device, build_mesh(config, self._device))
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        ranks = {"rank": rank, "world_size": NUM_RANKS}
        blocks = cut_blocks(read_text(), config["context"])
        loader = ByteLoader(blocks, batch_size=config["batch"], seed=config["seed"], **ranks)
        items = {"model": self._model, "optimizer": self._optimizer, "loader": loader}
        self._saves = Saves(items, Path(folder), "overhead", **ranks)
        self._batches = iter(loader)

    def make_ready(self) -> int:
        """Wait for the memory for saves; return the bytes of parameters and moments of all ranks."""
        self._saves.wait_ready()
        return state_bytes(self._model, self._optimizer)

    def stretch(self, *, saves: bool, accumulate: int) -> Stretch:
        """Run ten steps of `accumulate` micro-batches. Raise RuntimeError if the save was skipped."""
        ckpt = self._saves.ckpt
        waited_s, in_ckpt_s, start_s = ckpt.stats.waited_s, 0.0, time.perf_counter()
        for place in range(STEPS_PER_SAVE):
            train_step(self._model, self._optimizer, self._batches, accumulate, self._device)
            done_s = time.perf_counter()
            if saves and place == 0:
                self._saves.save()
            else:
                self._saves.step += 1
            ckpt.step(self._saves.step)
            in_ckpt_s += time.perf_counter() - done_s
        blocked_s = in_ckpt_s + ckpt.stats.waited_s - waited_s
        seconds = time.perf_counter() - start_s
        if saves:  # otherwise the save would delay the next stretch
            self._saves.settle()
        return Stretch(seconds, blocked_s)

    def close(self) -> None:
        self._saves.close()


def rows(context: Context) -> Iterator[Row]:
    job, step_s = (SMALL_JOB, 0.0) if context.quick else (JOB, STEP_S)
    with context.temporary() as folder, local_ray(folder):
        make = ray.remote(TrainingRank).options(num_cpus=1)
        ranks: list[Any] = [make.remote(rank, job, str(folder)) for rank in range(NUM_RANKS)]
        accumulate, saving = 1, []

        def call(method: str, **arguments: Any) -> list[Any]:
            calls = [getattr(rank, method).remote(**arguments) for rank in ranks]
            return list(ray.get(calls, timeout=CALL_S))

        def plain() -> float:
            return slowest(call("stretch", saves=False, accumulate=accumulate))

        def save() -> float:
            saving.append(call("stretch", saves=True, accumulate=accumulate))
            return slowest(saving[-1])

        plain()  # the first step makes the optimizer's state
        accumulate = max(1, math.ceil(step_s * STEPS_PER_SAVE / plain()))
        num_bytes = call("make_ready")[0]
        save()  # the first save of a run
        saving.clear()
        samples = interleaved({"without": plain, "with": save}, context.repeat)
        call("close")
    yield blocked_row(saving, num_bytes)
    yield wall_row(samples["with"], samples["without"])


def blocked_row(stretches: Sequence[Sequence[Stretch]], num_bytes: int) -> Row:
    """Compare the blocked share of each stretch, of the rank that was blocked longest, with its limit."""
    step_s = median(map(slowest, stretches)) / STEPS_PER_SAVE
    return Row(
        name="overhead-blocked",
        what=f"what one save per {STEPS_PER_SAVE} steps blocks of the GPT job",
        unit="%",
        samples=tuple(100 * max(one.blocked_s for one in ranks) / slowest(ranks) for ranks in stretches),
        reference=Reference(name="limit", samples=(BLOCKED_LIMIT,)),
        reach="<= 1",
        note=f"{NUM_RANKS} ranks, steps of {step_s:.2g} s, {size_text(num_bytes)} of state",
    )


def wall_row(saving: Sequence[float], plain: Sequence[float]) -> Row:
    """Compare the wall time of the stretches with that of stretches without a save, taken in turn."""
    pairs = [one / other for one, other in zip(saving, plain, strict=True)]
    return Row(
        name="overhead-wall",
        what=f"{STEPS_PER_SAVE} steps of it with a save, by the clock on the wall",
        unit="s",
        samples=tuple(saving),
        reference=Reference(name="without", samples=tuple(plain)),
        note=f"pair by pair {median(pairs):.3f}, from {min(pairs):.3f} to {max(pairs):.3f}; "
        f"{NUM_RANKS} ranks and the agent, which hashes and writes, share {os.cpu_count()} cores",
    )


def slowest(ranks: Sequence[Stretch]) -> float:
    """Return the seconds of the slowest rank in a stretch."""
    return max(one.seconds for one in ranks)
