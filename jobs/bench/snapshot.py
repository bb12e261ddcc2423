"""Cost of a save for the training: blocking and overlapped, the first one and the warm ones.

Measured through the whole service on a Ray of one node. Blocked time is what `save` takes plus what the next
optimizer step waits for; the memcpy beside it moves the same bytes from where they are to a warm buffer, with
as many threads as torch has.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch

from jobs.bench.context import Context
from jobs.bench.row import Reference, Row, measure
from jobs.bench.training import Compute, SameBytes, Training, local_ray

STEP_S = 0.5  # forward and backward pass while a save is copied and written
COUNT_S = 0.5  # seconds of counting in Python during a capture


def rows(context: Context) -> Iterator[Row]:
    with context.temporary() as folder, local_ray(folder):
        yield from _blocking(context, folder)
        cores = torch.get_num_threads()
        torch.set_num_threads(max(1, cores - 1))  # one core is spare
        try:
            yield from _overlapped(context, folder)
        finally:
            torch.set_num_threads(cores)


def _blocking(context: Context, folder: Path) -> Iterator[Row]:
    training = Training(context.size_bytes, folder, "blocking", overlap=False)
    what = "memory for the arena, in the background after the start"
    yield Row(name="arena-setup", what=what, unit="s", samples=(training.wait_ready(),))
    first_s = training.save_and_settle()
    training.save_and_settle()
    cores = torch.get_num_threads()
    memcpy = SameBytes(training.model, training.optimizer, cores)
    row = measure(
        "save-blocking",
        "blocking save, warm",
        "s",
        training.save_and_settle,
        beside=(f"memcpy, {cores} threads", memcpy),
        repeat=context.repeat,
        reach="<= 1.15",
    )
    yield row
    yield Row(
        name="save-first",
        what="the first save, blocking, once the arena is set up",
        unit="s",
        samples=(first_s,),
        reference=Reference(name="warm save", samples=row.samples),
        reach="<= 2",
    )
    memcpy.close()
    training.close()


def _overlapped(context: Context, folder: Path) -> Iterator[Row]:
    training = Training(context.size_bytes, folder, "overlapped")
    training.wait_ready()
    compute = Compute(0.05 if context.quick else STEP_S)
    spare = torch.get_num_threads()
    memcpy = SameBytes(training.model, training.optimizer, spare)

    def save() -> float:
        before_s = training.ckpt.stats.waited_s
        blocked_s = training.save()
        compute()
        training.optimizer.step()  # without gradients, only the hook runs, which waits for the copy
        blocked_s += training.ckpt.stats.waited_s - before_s
        training.settle()
        return blocked_s

    def step() -> float:
        training.save()
        taken_s = compute()
        training.optimizer.step()
        training.settle()
        return taken_s

    def count() -> float:
        training.save()
        counts_per_s = _counts_per_s()
        training.settle()
        return counts_per_s

    save()
    what = "overlapped save, with the wait before the optimizer's step; one core is spare"
    beside = (f"memcpy, {spare} threads", memcpy)
    repeat = context.repeat
    yield measure("save-overlapped", what, "s", save, beside=beside, repeat=repeat, reach="<= 0.15")
    memcpy.close()
    what = "forward and backward while a save is copied and written"
    yield measure("step-beside-save", what, "s", step, beside=("alone", compute), repeat=repeat)
    what, alone = "counting in Python while a save is copied and written", ("alone", _counts_per_s)
    name = "python-beside-save"
    yield measure(name, what, "counts/s", count, beside=alone, repeat=repeat, reach=">= 0.9")
    training.close()


def _counts_per_s() -> float:
    """Return the number that Python code counts to in a second."""
    count, start_s = 0, time.perf_counter()
    while (taken_s := time.perf_counter() - start_s) < COUNT_S:
        for _ in range(1000):
            count += 1
    return count / taken_s
