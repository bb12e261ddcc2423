"""The runs of a coordinator, and the calls that keep the service from being stopped."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from weakref import WeakValueDictionary

from ray_ckpt.actors.coordinator.run import PastRun, Run
from ray_ckpt.actors.messages import RunView, ServiceView
from ray_ckpt.engine.stopping import objections, only_here
from ray_ckpt.errors import Unavailable

MAX_PAST = 100  # finished runs that status still lists after they were put away


class Runs:
    """Open runs, and the finished runs that were put away last; both by the key of their RunSpec."""

    def __init__(self) -> None:
        self.open: dict[str, Run] = {}
        self.past: OrderedDict[str, PastRun] = OrderedDict()
        self.is_ending = False  # the service is being stopped
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._users = Counter[str]()  # number of calls that open or use a run, by the run's name

    def __iter__(self) -> Iterator[Run]:
        """Iterate over a copy, since runs may close during the iteration."""
        return iter(list(self.open.values()))

    def get(self, key: str) -> Run:
        """Return an open run, else raise Unavailable."""
        if key not in self.open:
            raise Unavailable(f"The run {key} is not open here.", hint="Open it first; the callback does.")
        return self.open[key]

    def by_uid(self, run_uid: str) -> Run:
        """Return an open run, else raise Unavailable."""
        for run in self.open.values():
            if run.run_uid == run_uid:
                return run
        raise Unavailable(f"No run with uid {run_uid} is open here.")

    def is_current(self, run: Run) -> bool:
        """Return whether `run` is open, and is not replaced by a later opening of the same run."""
        return self.open.get(run.spec.key) is run

    def put_away(self, run: Run, view: RunView) -> None:
        """Close a run and keep `view` of it for status."""
        del self.open[run.spec.key]
        finished_s = min(run.finished_s, time.monotonic())
        self.past[run.spec.key] = PastRun(
            spec=run.spec, view=view, put_away_s=time.time(), finished_s=finished_s
        )
        while len(self.past) > MAX_PAST:
            self.past.popitem(last=False)

    def turn(self, subject: str) -> asyncio.Lock:
        """Return the lock for opening a run (by its key), or for restarting the agent of a node."""
        return self._turns.setdefault(subject, asyncio.Lock())

    @contextlib.contextmanager
    def in_use(self, run_name: str) -> Iterator[None]:
        """Count this context as a reason not to stop the service."""
        self._users[run_name] += 1
        try:
            yield
        finally:
            self._users[run_name] -= 1
            self._users = +self._users

    @property
    def is_opening(self) -> bool:
        """True while a call opens a run, or a group of it."""
        return bool(self._users)

    def check_not_ending(self) -> None:
        if self.is_ending:
            raise Unavailable("The service is being stopped.", hint="Start it again with `ray-ckpt up`.")

    def objections(self, view: ServiceView, wall_s: float) -> tuple[str, ...]:
        """Return the reasons not to stop the service now; `view` shows the launchers that are dead."""
        dead = {run.where: run.owner for run in view.runs if run.state == "gone"}
        open_now = [
            reason
            for run in self
            for reason in objections(
                run.host, run.spec.name, dead_owner=dead.get(run.spec.key, ""), wall_s=wall_s
            )
        ]
        past = [p.view for key, p in self.past.items() if key not in self.open]
        left = [reason for view in past for reason in only_here(view.name, view.needed_in_cluster)]
        return (*open_now, *left, *(f"run {name} is being opened" for name in sorted(self._users)))
