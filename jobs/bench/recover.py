"""From a kill to the first new step, in phases: the same job on ray_ckpt and on `ray.train.report`.

A rank, a node with its disk, or the whole cluster is killed with SIGKILL while two data-parallel ranks train.
`ray.train.report` keeps its checkpoint in a local folder, which all simulated nodes share; ours is in memory,
on the disks of the nodes and on peers, and no durable copy is made. A phase ends when its slowest rank is
done. Our share is what the calls of ray_ckpt take: opening the run and the group, and the restore. The rows
`-warm` are of the same job with `WarmWorkers`; no process outlives the cluster.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jobs.bench.context import Context
from jobs.bench.recover_job import OWN, REPORT, STOP, WARM, WORKERS, Journal
from jobs.bench.row import Reference, Row
from jobs.demo.local_cluster import LocalCluster
from ray_ckpt.train.warm import MODULES_ENV

SMALL_BYTES = 8 << 20  # about the state of the demo
NODES = ("node-a", "node-b", "node-c")
CPUS = 4  # of each node, as Ray counts them: it ends idle processes of nodes without a free one
LOSSES = ("rank", "node", "cluster")
WAIT_S = 300.0  # for a saved checkpoint, or for the first step after a kill
POLL_S = 0.02
MAX_LOG = 10_000  # characters of the log of a job that failed
PHASES: Mapping[str, str] = {  # what the journal has at the end of a phase -> the phase
    "controller": "a new cluster and the controller of the job",
    "run opened": "run opened (ours)",
    "noticed": "loss noticed",
    "ended": "group ended",
    "started": "processes started",
    "opened": "group opened (ours)",
    "imported": "imports",
    "entered": "process group",
    "built": "model built",
    "restored": "restore (ours)",
    "step": "first step",
}
OURS = ("run opened", "opened", "restored")
OF_ALL_RANKS = ("imported", "entered", "built", "restored", "step")


def rows(context: Context) -> Iterator[Row]:
    losses = LOSSES[:1] if context.quick else LOSSES
    for size_bytes in dict.fromkeys((min(SMALL_BYTES, context.size_bytes), context.size_bytes)):
        found = {system: _recoveries(context, system, size_bytes, losses) for system in (OWN, WARM, REPORT)}
        for loss in losses:
            report = found[REPORT][loss]
            for system, ending in ((OWN, ""), (WARM, "-warm")):
                if own := found[system].get(loss):
                    name = f"recover-{loss}-{_text(size_bytes)}{ending}"
                    yield from _rows(name, loss, size_bytes, own, report)


def _rows(
    name: str,
    loss: str,
    size_bytes: int,
    own: Sequence[dict[str, float]],
    report: Sequence[dict[str, float]],
) -> Iterator[Row]:
    whole = tuple(sum(each.values()) for each in own)
    theirs = Reference(name=REPORT, samples=tuple(sum(each.values()) for each in report))
    what = f"kill -9 of a {loss} to the first new step, {_text(size_bytes)}"
    yield Row(name=name, what=what, unit="s", samples=whole, reference=theirs, reach="<= 0.8")
    share = tuple(sum(each.get(what, 0.0) for what in OURS) for each in own)
    yield Row(
        name=f"{name}-share",
        what="of it in calls of ray_ckpt",
        unit="s",
        samples=share,
        reference=Reference(name="the whole", samples=whole),
        reach="<= 0.1",
    )
    copy_s = _memcpy_s(size_bytes)
    yield Row(
        name=f"{name}-beyond",
        what=f"of it beyond one memcpy of {copy_s:.2g} s",
        unit="s",
        samples=tuple(each - copy_s for each in share),
        reference=Reference(name="limit", samples=(1.0,)),
        reach="<= 1",
    )
    for phase in PHASES:
        if any(phase in each for each in own):
            yield Row(
                name=f"{name}-{phase.replace(' ', '-')}",
                what=f"of it: {PHASES[phase]}",
                unit="s",
                samples=tuple(each.get(phase, 0.0) for each in own),
                reference=Reference(name=REPORT, samples=tuple(each.get(phase, 0.0) for each in report)),
            )


def _recoveries(
    context: Context, system: str, size_bytes: int, losses: Sequence[str]
) -> dict[str, list[dict[str, float]]]:
    """Return, for each kind of loss, the seconds of the phases of each recovery."""
    found: dict[str, list[dict[str, float]]] = {}
    with context.temporary() as folder:
        job = _Job(system, folder, size_bytes)
        try:
            for loss in losses if system != WARM else [each for each in losses if each != "cluster"]:
                found[loss] = [job.lose(loss) for _ in range(context.repeat)]
        finally:
            job.close()
    return found


class _Job:
    """A job of one system on a cluster of its own."""

    def __init__(self, system: str, folder: Path, size_bytes: int) -> None:
        self._system, self._folder, self._size_bytes = system, folder, size_bytes
        self._journal = Journal(folder / "journal.jsonl")
        os.environ["RAY_TRAIN_ENABLE_STATE_ACTOR_RECONCILIATION"] = "0"
        self._begin()

    def lose(self, loss: str) -> dict[str, float]:
        """Wait for a save, kill, and return the seconds of the phases up to the first new step."""
        since_s = max((line["at_s"] for line in self._journal.read() if line["what"] == "entered"), default=0)
        self._wait("saved", since_s)
        if self._system == WARM:
            self._wait_until_warm()
        entered = self._last("entered", 0.0)[WORKERS - 1]
        killed_s = time.time()
        if loss == "rank":
            os.kill(entered["pid"], signal.SIGKILL)
        elif loss == "node":
            name = self._cluster.name_of(entered["node"])
            self._cluster.kill(name, wipe=True)
        else:
            self._driver.kill()
            self._cluster.shutdown()
            self._begin()
        self._wait("entered", killed_s)
        entered_s = max(line["at_s"] for line in self._last("entered", killed_s).values())
        self._wait("step", entered_s)  # a process may do one more before it dies
        if loss == "node":
            self._cluster.add(name)
        return self._phases(killed_s, entered_s)

    def close(self) -> None:
        (self._folder / STOP).touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._driver.wait(WAIT_S)
        self._driver.kill()
        self._driver.wait()
        self._cluster.shutdown()

    def _begin(self) -> None:
        self._cluster = LocalCluster(self._folder / "staging", NODES, cpus=CPUS)
        command = [sys.executable, "-m", "jobs.bench.recover_job", self._system, str(self._folder)]
        with (self._folder / "driver.log").open("ab") as log:
            self._driver = subprocess.Popen(
                [*command, str(self._size_bytes)],
                env={**os.environ, "RAY_ADDRESS": self._cluster.address},
                stdout=log,
                stderr=log,
            )

    def _wait(self, what: str, since_s: float) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while len(self._last(what, since_s)) < WORKERS:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{self._system}: {what!r} did not come within {WAIT_S:.0f} s")
            if self._driver.poll() is not None:
                print((self._folder / "driver.log").read_text()[-MAX_LOG:], file=sys.stderr)
                raise RuntimeError(f"{self._system}: the job has ended before {what!r}")
            time.sleep(POLL_S)

    def _wait_until_warm(self) -> None:
        """Wait until a process waits on each node."""
        deadline_s = time.monotonic() + WAIT_S
        while len(self._cluster.idle_processes(MODULES_ENV)) < len(NODES):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no process waited on each node within {WAIT_S:.0f} s")
            time.sleep(1.0)

    def _last(self, what: str, since_s: float) -> dict[int, dict[str, Any]]:
        """Return each rank's first line of that kind after a time; for `entered` the last one."""
        found: dict[int, dict[str, Any]] = {}
        for line in self._journal.read():
            if line["what"] != what or line["at_s"] <= since_s:
                continue
            if what == "entered" or line["rank"] not in found:
                found[line["rank"]] = line
        return found

    def _phases(self, killed_s: float, entered_s: float) -> dict[str, float]:
        lines = [line for line in self._journal.read() if line["at_s"] > killed_s]
        ends_s: dict[str, float] = {}
        for phase in PHASES:
            times_s = [line["at_s"] for line in lines if line["what"] == phase]
            if phase == "step":
                times_s = [line["at_s"] for line in self._last("step", entered_s).values()]
            elif phase in OF_ALL_RANKS:
                times_s = times_s[-WORKERS:]
            if times_s:
                ends_s[phase] = max(times_s)
        found: dict[str, float] = {}
        before_s = killed_s
        for phase, end_s in ends_s.items():
            found[phase] = max(0.0, end_s - before_s)
            before_s = max(before_s, end_s)
        return found


def _memcpy_s(size_bytes: int) -> float:
    """Return the seconds of a copy of so many bytes between warm buffers, on one thread."""
    source = np.ones(min(size_bytes, 256 << 20), np.uint8)
    target = np.ones_like(source)
    start_s = time.perf_counter()
    for _ in range(3):
        np.copyto(target, source)
    return (time.perf_counter() - start_s) / 3 * size_bytes / len(source)


def _text(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.3g} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.3g} MiB"
