"""Set the gauges of all runs periodically, since Ray's endpoints drop gauges that are not set again."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor

from ray_ckpt import telemetry
from ray_ckpt.actors.coordinator.engine import Engine
from ray_ckpt.actors.coordinator.overview import disk_samples, goodput_samples
from ray_ckpt.actors.coordinator.run import Run
from ray_ckpt.actors.metrics import GAUGES_EVERY_S
from ray_ckpt.actors.threads import in_thread
from ray_ckpt.telemetry import Sample

NODE_S = 0.002  # period per node: every 20 s at 10,000 nodes, since gauges visit all nodes
GOODPUT_EVERY_S = 60.0  # between computations over the whole log
REPORT_FINISHED_S = 1200.0  # longer than the 15 minutes that the alert on silent runs examines
FINISHED = 2.0  # value of the metric run_active


class Gauges:
    """Gauges of open runs, and of runs that have finished recently."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # A separate thread, since computing goodput of a long log takes seconds.
        self._goodput_io = ThreadPoolExecutor(1, thread_name_prefix="ray_ckpt-goodput")
        self._due_s = 0.0  # when gauges are next due (monotonic)

    def set_due(self) -> None:
        """Set all gauges, unless they were set within the last GAUGES_EVERY_S, or longer with many nodes."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + max(GAUGES_EVERY_S, len(self._engine.agents.nodes) * NODE_S)
        for past in self._engine.runs.past.values():
            self._report_finished(past.spec.name, now_s - past.finished_s)
        for run in self._engine.runs:
            if run.machine.is_open:
                self._set(run, now_s)

    def _set(self, run: Run, now_s: float) -> None:
        if run.machine.view.end_cause == "finished":
            run.finished_s = min(run.finished_s, now_s)
            self._report_finished(run.spec.name, now_s - run.finished_s)
            return
        run.finished_s = math.inf
        if now_s >= run.goodput_s:
            run.goodput_s = math.inf  # until this computation has ended
            self._engine.spawn(self._update_goodput(run))
        disks = run.disks_of(self._engine.agents.nodes)
        for sample in (*run.machine.view.gauges(), *disk_samples(disks, run.spec.options), *run.goodput):
            self._engine.meters.record(run.spec.name, sample)

    def _report_finished(self, name: str, since_s: float) -> None:
        if since_s < REPORT_FINISHED_S:
            self._engine.meters.record(name, Sample(metric=telemetry.ACTIVE, value=FINISHED))

    async def _update_goodput(self, run: Run) -> None:
        try:
            history = run.machine.history.copy()
            run.goodput = await in_thread(self._goodput_io, goodput_samples, history)
        finally:
            run.goodput_s = time.monotonic() + GOODPUT_EVERY_S
