"""One run of a coordinator: the run's host and log, and the callers of the host."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Set
from dataclasses import dataclass, replace

from ray_ckpt.actors.callers import Callers
from ray_ckpt.actors.messages import RunSpec, RunView
from ray_ckpt.actors.threads import BriefThreads
from ray_ckpt.core.run_machine import RunMachine
from ray_ckpt.core.values import DiskSpace
from ray_ckpt.engine.run_host import RunHost
from ray_ckpt.storage.log_store import LogStore
from ray_ckpt.telemetry import Sample

LOG_THREADS = 4  # per run; this many calls to a hung store may be in flight before others wait
STORAGE_THREADS = 4  # per run, for deletes, descriptions, listings and snapshots on the storage path


class Run:
    """State of an open run, without decisions; the classes of this folder read and set the fields."""

    def __init__(self, spec: RunSpec, make_host: Callable[[Run], RunHost]) -> None:
        self.spec = spec
        self.remote = spec.storage.open()
        self.nonce = uuid.uuid4().hex
        self.callers = Callers()
        # Separate threads for each run, so that a hanging store delays no other run.
        self.log_threads = BriefThreads(LOG_THREADS, f"ray_ckpt-log-{spec.name[:32]}")
        self.storage_threads = BriefThreads(STORAGE_THREADS, f"ray_ckpt-remote-{spec.name[:32]}")
        self.disks: dict[str, DiskSpace] = {}  # by node, read since the last report to the machine
        self.seen_disks: dict[str, DiskSpace] = {}  # by node, by the last reading, for status
        self.warning: tuple[str, float] = ("", 0.0)  # the machine's last warning, and its Unix time
        self.finished_s = math.inf  # when the run was first seen to be finished (monotonic)
        self.goodput: tuple[Sample, ...] = ()  # computed from the log
        self.goodput_s = 0.0  # when goodput is to be computed again (monotonic)
        self.host = make_host(self)

    @property
    def machine(self) -> RunMachine:
        return self.host.machine

    @property
    def store(self) -> LogStore:
        """The log's store. `probe_log` opens it in a thread, since a new client may read files or connect."""
        return self.remote.log

    @property
    def run_uid(self) -> str:
        return self.machine.history.run_uid

    def disks_of(self, nodes: Set[str]) -> dict[str, DiskSpace]:
        """Return the last readings of the disks of `nodes`."""
        return {node: disk for node, disk in self.seen_disks.items() if node in nodes}


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """Data kept of a finished run that has been put away, for status and metrics."""

    spec: RunSpec
    view: RunView
    put_away_s: float  # Unix time at which the run was put away
    finished_s: float  # when the run was first seen to be finished (monotonic)

    def view_at(self, now_s: float) -> RunView:
        """Return the view with ages as of Unix time `now_s`."""
        past_s = now_s - self.put_away_s
        newest = tuple(replace(found, age_s=found.age_s + past_s) for found in self.view.newest)
        warned_s = self.view.warning_age_s
        return replace(
            self.view, newest=newest, warning_age_s=None if warned_s is None else warned_s + past_s
        )
