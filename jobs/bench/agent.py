"""Costs of the service in addition to saves: CPU when idle, memory over many saves, the GIL."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import ray

from jobs.bench.context import Context
from jobs.bench.row import Reference, Row, compared, measure
from jobs.bench.training import Training, local_ray

IDLE_S = 10.0  # seconds per sample: 0.1 % of a core is one tick of the kernel's clock
SAVES = 1000  # number of saves for which DESIGN requires flat memory
WARM_SAVES = 600  # saves before the first look at memory: after the log's first snapshot, which loads pyarrow
SMALL_BYTES = 1 << 20  # state per save; memory grows with the number of saves, not with their size
COUNT_S = 0.5  # seconds of counting in Python during a capture


def rows(context: Context) -> Iterator[Row]:
    with context.temporary() as folder, local_ray(folder):
        yield _gil(context, folder)
        training = Training(SMALL_BYTES, folder, "agent")
        training.wait_ready()
        training.save()
        training.settle()
        yield _idle(context)
        yield from _memory(context, training)
        training.close()


def _idle(context: Context) -> Row:
    """Measure the CPU time of an idle agent with an open run, less that of an actor that does nothing."""

    @ray.remote(num_cpus=0)
    class Empty:
        async def pid(self) -> int:
            return os.getpid()

    empty: Any = Empty.remote()  # type: ignore[attr-defined]
    ours, theirs = process("ray::NodeAgent"), psutil.Process(ray.get(empty.pid.remote()))

    def sample() -> float:
        before = _cpu_s(ours), _cpu_s(theirs)
        time.sleep(1.0 if context.quick else IDLE_S)
        taken = _cpu_s(ours) - before[0], _cpu_s(theirs) - before[1]
        return 100 * (taken[0] - taken[1]) / (1.0 if context.quick else IDLE_S)

    row = measure(
        "agent-idle",
        "CPU of an idle agent above an empty Ray actor",
        "% of a core",
        sample,
        repeat=min(context.repeat, 3),
        limit=0.5,
    )
    ray.kill(empty)
    return row


def _memory(context: Context, training: Training) -> Iterator[Row]:
    watched = {
        "agent": process("ray::NodeAgent"),
        "coordinator": process("ray::Coordinator"),
        "rank": psutil.Process(),
    }
    warm, last = (2, 4) if context.quick else (WARM_SAVES, SAVES)
    for _ in range(warm):
        training.save()
        training.settle()
    before = {name: _private_bytes(each) for name, each in watched.items()}
    for _ in range(last - warm):
        training.save()
        training.settle()
    for name, each in watched.items():
        yield Row(
            name=f"memory-{name}",
            what=f"memory of the {name}'s own after {last} saves",
            unit="MB",
            samples=(_private_bytes(each) / 1e6,),
            reference=Reference(name=f"after {warm}", samples=(before[name] / 1e6,)),
            reach="<= 1.1",
        )


def _gil(context: Context, folder: Path) -> Row:
    """Count in Python while captures run in the background, one after another."""
    training = Training(context.size_bytes, folder, "gil")
    training.wait_ready()
    training.save()
    training.settle()

    def beside() -> float:
        result: list[float] = []
        training.save()
        counter = threading.Thread(target=lambda: result.append(_count()))
        counter.start()
        training.optimizer.step()  # waits for the copy in this thread, while the other one counts
        counter.join()
        training.settle()
        return result[0]

    row = compared(
        "python-beside-save",
        "counting in Python while a save is copied and written",
        "counts/s",
        beside,
        ("alone", _count),
        repeat=context.repeat,
        reach=">= 0.9",
    )
    training.close()
    return row


def _count() -> float:
    """Return the number that Python code counts to in a second."""
    count, start_s = 0, time.perf_counter()
    while (taken_s := time.perf_counter() - start_s) < COUNT_S:
        for _ in range(1000):
            count += 1
    return count / taken_s


def process(title: str) -> psutil.Process:
    """Return the process of this Ray with that title."""
    return next(
        found
        for found in psutil.Process(
            ray._private.worker._global_node.all_processes["raylet"][0].process.pid
        ).children(recursive=True)
        if title in " ".join(found.cmdline())
    )


def _cpu_s(watched: psutil.Process) -> float:
    times = watched.cpu_times()
    return float(times.user + times.system)


def _private_bytes(watched: psutil.Process) -> int:
    """Return the private memory of the process, without shared arenas and libraries."""
    return int(watched.memory_full_info().uss)
