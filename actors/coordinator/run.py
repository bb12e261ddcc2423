"""One run of a coordinator: its machine, its store, its log's threads, and those who wait for an answer."""

from __future__ import annotations

import asyncio
import math
import uuid
from dataclasses import dataclass, replace
from typing import Any

from ray_ckpt.actors.messages import Joined, RunSpec, RunView
from ray_ckpt.actors.threads import BriefThreads
from ray_ckpt.core import messages as m
from ray_ckpt.core.run_machine import RunMachine
from ray_ckpt.storage.log_store import LogStore
from ray_ckpt.telemetry import Sample
from ray_ckpt.types import GroupPart

LOG_THREADS = 4  # per run: calls of a hung store under way, before further ones wait for those


@dataclass(slots=True)
class ComingParts:
    """Parts of a group that wait for the others."""

    parts: tuple[GroupPart, ...]
    nodes: dict[str, tuple[str, ...]]  # part -> the node of each of its ranks
    joined: asyncio.Future[Joined]


class Run:
    """See the module. It decides nothing; `Coordinator` and `Effects` read and set what is here."""

    def __init__(self, spec: RunSpec, service: str) -> None:
        self.spec = spec
        self.remote = spec.storage.open()
        self.machine = RunMachine(options=spec.options, writer=uuid.uuid4().hex, service=service)
        self.ticked_s = -math.inf  # when the machine was told the time (monotonic)
        self.nonce = uuid.uuid4().hex
        self.waiting: dict[m.Token, asyncio.Future[Any]] = {}
        # Of its own, so that a hanging store stops no other run.
        self.log_threads = BriefThreads(LOG_THREADS, f"ray_ckpt-log-{spec.name[:32]}")
        self.opened: set[str] = set()  # nodes whose agent knows this run
        self.opening: set[str] = set()  # nodes that were asked, or could not
        self.is_fenced_in = False  # its fence has been in the log
        self.is_ready = False  # nodes have been asked to open it
        self.is_resting = False  # its launcher has ended it, and agents know that it needs them no more
        self.dead: tuple[str, float] = ("", math.inf)  # its launcher, and since when it is (monotonic)
        self.disks: dict[str, m.DiskSpace] = {}  # looked at since the machine was told
        self.seen_disks: dict[str, m.DiskSpace] = {}  # the last look at each node, for people
        self.warning: tuple[str, float] = ("", 0.0)  # the last one of the machine's, and its Unix time
        self.finished_s = math.inf  # when it was first seen to be finished (monotonic)
        self.goodput: tuple[Sample, ...] = ()  # by the log
        self.goodput_s = 0.0  # when that is to be looked at again (monotonic)
        self.changed = asyncio.Condition()
        self.coming: ComingParts | None = None

    @property
    def store(self) -> LogStore:
        """Opened by the probe, in a thread: making a client may read files and ask servers."""
        return self.remote.log

    @property
    def run_uid(self) -> str:
        return self.machine.history.run_uid


@dataclass(frozen=True, slots=True, kw_only=True)
class PastRun:
    """A finished run that has been put away, as far as people ask for it."""

    spec: RunSpec
    view: RunView
    put_away_s: float  # Unix time
    finished_s: float  # when it was first seen to be finished (monotonic)

    def view_at(self, now_s: float) -> RunView:
        """How it is at Unix time `now_s`."""
        past_s = now_s - self.put_away_s
        newest = tuple(replace(found, age_s=found.age_s + past_s) for found in self.view.newest)
        warned_s = self.view.warning_age_s
        return replace(
            self.view, newest=newest, warning_age_s=None if warned_s is None else warned_s + past_s
        )
