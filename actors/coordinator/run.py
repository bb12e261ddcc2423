"""One run of a coordinator: the run's machine and log, and the calls that wait for the machine."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any

from ray_ckpt.actors.coordinator.group_parts import PendingGroup
from ray_ckpt.actors.messages import RunSpec, RunView
from ray_ckpt.actors.threads import BriefThreads
from ray_ckpt.core.run_machine import RunMachine
from ray_ckpt.core.values import DiskSpace, Token
from ray_ckpt.storage.log_store import LogStore
from ray_ckpt.telemetry import Sample

LOG_THREADS = 4  # per run; this many calls to a hung store may be in flight before others wait


class Run:
    """State of an open run, without decisions; the classes of this folder read and set the fields."""

    def __init__(self, spec: RunSpec, service: str) -> None:
        self.spec = spec
        self.remote = spec.storage.open()
        self.machine = RunMachine(options=spec.options, writer=uuid.uuid4().hex, service=service)
        self.ticked_s = -math.inf  # when the time was last sent to the machine (monotonic)
        self.nonce = uuid.uuid4().hex
        self.waiting: dict[Token, asyncio.Future[Any]] = {}
        # Separate threads for each run, so that a hanging store delays no other run.
        self.log_threads = BriefThreads(LOG_THREADS, f"ray_ckpt-log-{spec.name[:32]}")
        self.opened: set[str] = set()  # nodes whose agents have opened this run
        self.opening: set[str] = set()  # nodes that ticks skip: opening, failed, or idle
        self.was_open = False  # the epoch of this coordinator has been in the log
        self.is_ready = False  # the run has been opened on the nodes
        self.is_released = False  # the launcher has ended the run, and the agents were notified
        self.dead_owner: tuple[str, float] = ("", math.inf)  # a dead launcher, and when its death was found
        self.disks: dict[str, DiskSpace] = {}  # by node, read since the last report to the machine
        self.seen_disks: dict[str, DiskSpace] = {}  # by node, by the last reading, for status
        self.warning: tuple[str, float] = ("", 0.0)  # the machine's last warning, and its Unix time
        self.finished_s = math.inf  # when the run was first seen to be finished (monotonic)
        self.goodput: tuple[Sample, ...] = ()  # computed from the log
        self.goodput_s = 0.0  # when goodput is to be computed again (monotonic)
        self.changed = asyncio.Condition()
        self.pending_group: PendingGroup | None = None

    @property
    def store(self) -> LogStore:
        """The log's store. `probe_log` opens it in a thread, as a new client may read files or connect."""
        return self.remote.log

    @property
    def run_uid(self) -> str:
        return self.machine.history.run_uid

    def reply(self, token: Token, value: Any) -> None:
        """Set the result of the call that waits for `token`, if the call still waits."""
        if (future := self.waiting.get(token)) and not future.done():
            future.set_result(value)

    def fail(self, token: Token, error: Exception) -> None:
        if (future := self.waiting.get(token)) and not future.done():
            future.set_exception(error)

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
