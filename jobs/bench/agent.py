"""Costs of the service in addition to saves: CPU when idle, memory over many saves."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import psutil
import ray

from jobs.bench.context import Context
from jobs.bench.row import Reference, Row, measure
from jobs.bench.training import Training, local_ray

IDLE_S = 10.0  # seconds per sample: 0.1 % of a core is one tick of the kernel's clock
SAVES = 1000  # number of saves during which memory must not grow
WARM_SAVES = 600  # saves before the first look at memory: after the log's first snapshot, which loads pyarrow
SMALL_BYTES = 1 << 20  # state per save; memory grows with the number of saves, not with their size


def rows(context: Context) -> Iterator[Row]:
    with context.temporary() as folder, local_ray(folder):
        training = Training(SMALL_BYTES, folder, "agent")
        training.wait_ready()
        training.save_and_settle()
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
    idle_s = 1.0 if context.quick else IDLE_S

    def sample() -> float:
        before_s = _cpu_s(ours) - _cpu_s(theirs)
        time.sleep(idle_s)
        return 100 * (_cpu_s(ours) - _cpu_s(theirs) - before_s) / idle_s

    what = "CPU of an idle agent above an empty Ray actor"
    row = measure("agent-idle", what, "% of a core", sample, repeat=min(context.repeat, 3), limit=0.5)
    ray.kill(empty)
    return row


def _memory(context: Context, training: Training) -> Iterator[Row]:
    """Measure the private memory of each process, without shared arenas and libraries."""
    watched = {
        "agent": process("ray::NodeAgent"),
        "coordinator": process("ray::Coordinator"),
        "rank": psutil.Process(),
    }

    def own_mb(num_saves: int) -> dict[str, float]:
        for _ in range(num_saves):
            training.save_and_settle()
        return {name: each.memory_full_info().uss / 1e6 for name, each in watched.items()}

    warm, last = (2, 4) if context.quick else (WARM_SAVES, SAVES)
    before, after = own_mb(warm), own_mb(last - warm)
    for name in watched:
        yield Row(
            name=f"memory-{name}",
            what=f"memory of the {name}'s own after {last} saves",
            unit="MB",
            samples=(after[name],),
            reference=Reference(name=f"after {warm}", samples=(before[name],)),
            reach="<= 1.1",
        )


def process(title: str) -> psutil.Process:
    """Return the process with that title that the Ray of this process has started."""
    children = psutil.Process().children(recursive=True)
    return next(child for child in children if title in " ".join(child.cmdline()))


def _cpu_s(watched: psutil.Process) -> float:
    times = watched.cpu_times()
    return float(times.user + times.system)
