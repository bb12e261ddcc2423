"""Cost of a save for the training: blocking and overlapped, the first one and the warm ones.

Measured through the whole service on a Ray of one node. Blocked time is what `save` takes plus what the next
optimizer step waits for; the memcpy beside it moves the same bytes from where they are to a warm buffer, with
as many threads as torch has.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from jobs.bench import device
from jobs.bench.context import Context
from jobs.bench.row import Reference, Row, compared, measure, skipped
from jobs.bench.training import Compute, SameBytes, Training, fill_gradients, local_ray, threads

STEP_S = 0.5  # duration of a training step, from which on DESIGN's limit on blocked time holds
STEPS_PER_SAVE = 10
BLOCKED_LIMIT = 2.0  # % of the time of ten steps, as in DESIGN
MAX_PAIRS = 3  # pairs of ten steps with and without a save; each pair takes ten seconds or more


def rows(context: Context) -> Iterator[Row]:
    with context.temporary() as folder, local_ray(folder):
        yield from _blocking(context, folder)
        yield from _overlapped(context, folder)
    yield from _device(context)


def _blocking(context: Context, folder: Path) -> Iterator[Row]:
    training = Training(context.size_bytes, folder, "blocking", overlap=False)
    ready_s = training.wait_ready()
    yield measure(
        "arena-setup",
        "memory for the arena, in the background after the start",
        "s",
        lambda: ready_s,
        repeat=1,
    )
    first_s = training.save()
    training.settle()
    training.save()
    training.settle()
    cores = torch.get_num_threads()
    memcpy = SameBytes(training.model, training.optimizer, cores)
    memcpy()

    def save() -> float:
        blocked_s = training.save()
        training.settle()
        return blocked_s

    row = compared(
        "save-blocking",
        "blocking save, warm",
        "s",
        save,
        (f"memcpy, {cores} threads", memcpy),
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
        machine=row.machine,
    )
    memcpy.close()
    training.close()


def _overlapped(context: Context, folder: Path) -> Iterator[Row]:
    cores = os.cpu_count() or 1
    with threads(max(1, cores - 1)):
        training = Training(context.size_bytes, folder, "overlapped")
        training.wait_ready()
        compute = Compute(0.05 if context.quick else STEP_S)
        memcpy = SameBytes(training.model, training.optimizer, max(1, cores - 1))
        memcpy()

        def save() -> float:
            before_s = training.ckpt.stats.waited_s
            blocked_s = training.save()
            compute()
            training.optimizer.step()  # without gradients, only the hook runs, which waits for the copy
            blocked_s += training.ckpt.stats.waited_s - before_s
            training.settle()
            return blocked_s

        save()
        row = compared(
            "save-overlapped",
            "overlapped save, with the wait before the optimizer's step; one core is spare",
            "s",
            save,
            (f"memcpy, {max(1, cores - 1)} threads", memcpy),
            repeat=context.repeat,
            reach="<= 0.15",
        )
        yield row
        yield Row(
            name="blocked-share",
            what=f"what it blocks, of {STEPS_PER_SAVE} steps of {STEP_S} s",
            unit="%",
            samples=tuple(100 * blocked_s / (STEPS_PER_SAVE * STEP_S) for blocked_s in row.samples),
            reference=Reference(name="limit", samples=(BLOCKED_LIMIT,)),
            reach="<= 1",
            machine=row.machine,
        )
        memcpy.close()

        def beside() -> float:
            training.save()
            taken_s = compute()
            training.optimizer.step()
            training.settle()
            return taken_s

        yield compared(
            "step-beside-save",
            "forward and backward while a save is copied and written",
            "s",
            beside,
            ("alone", compute),
            repeat=context.repeat,
        )
        fill_gradients(training.model, share=0.25)
        yield _ten_steps(context, training, compute)
        training.close()


def _ten_steps(context: Context, training: Training, compute: Compute) -> Row:
    """Measure the wall time of ten steps with and without one save, in interleaved pairs."""

    def ten(*, with_save: bool) -> float:
        start_s = time.perf_counter()
        for step in range(STEPS_PER_SAVE):
            compute()
            training.optimizer.step()
            if with_save and step == 0:
                training.save()
        taken_s = time.perf_counter() - start_s
        training.settle()
        return taken_s

    ten(with_save=False)
    return compared(
        "ten-steps",
        "ten steps with a real optimizer on a quarter of the parameters, and one save",
        "s",
        lambda: ten(with_save=True),
        ("without", lambda: ten(with_save=False)),
        repeat=min(context.repeat, MAX_PAIRS),
    )


def _device(context: Context) -> Iterator[Row]:
    if torch.cuda.is_available():
        yield from device.rows(context.size_bytes, context.repeat)
    else:
        yield skipped("device-copy", "from a GPU into the pinned arena", "this machine has no GPU")
