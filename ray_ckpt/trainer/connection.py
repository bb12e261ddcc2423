"""How the Checkpointers of this process reach their agent, and how a rank says where it is."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray_ckpt.core.messages import RankProgress
from ray_ckpt.errors import CheckpointError
from ray_ckpt.trainer.link import Link, Reporter
from ray_ckpt.trainer.save_signal import SaveSignals
from ray_ckpt.trainer.waiting import WaitingLog

if TYPE_CHECKING:
    from ray_ckpt.trainer.probe import ResumeProbe

log = logging.getLogger("ray_ckpt")

PROGRESS_S = 1.0  # how often a rank says where it is, from a thread of its own
REFRESH_S = 5.0  # how often it asks its agent for the page of agreed steps (a new agent has another one),
# and for whom the group waits


@dataclass(frozen=True, slots=True)
class Connection:
    """A link, or why there is none."""

    link: Link | None = None
    reporter: Reporter | None = None
    probe: ResumeProbe | None = None  # what looks at each step of a comparison (`check_resume`)
    problem: CheckpointError | None = None


_connection = Connection()


def set_connection(connection: Connection) -> None:
    """Make this the connection of Checkpointers that this process builds from now on."""
    global _connection
    _connection = connection


def get_connection() -> Connection:
    return _connection


class ProgressThread:
    """Tells the agent once a second where this rank is, and people whom it waits for, off the training."""

    def __init__(
        self, link: Link, session: int, where: Callable[[], RankProgress], signals: SaveSignals
    ) -> None:
        self._link = link
        self._session = session
        self._where = weakref.WeakMethod(where)  # a Checkpointer that is dropped ends its thread
        self._signals = signals
        self._words = WaitingLog(link, "save", "report")
        signals.wake = self.wake
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray_ckpt-progress", daemon=True)
        self._thread.start()

    def send(self) -> None:
        """Say it now; whatever goes wrong here must not end the thread or the training."""
        where = self._where()
        if where is None:
            self._stop.set()
            return
        try:
            self._link.progress(self._session, where())
        except Exception as error:
            log.debug("progress was not told: %s", error)

    def wake(self) -> None:
        """Have it said soon, without waiting."""
        self._wake.set()

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()
        self._thread.join(PROGRESS_S)

    def _run(self) -> None:
        refreshed_s = -REFRESH_S
        while not self._stop.is_set():
            if time.monotonic() - refreshed_s >= REFRESH_S:
                self._signals.refresh()
                self._words.log_waiting()
                refreshed_s = time.monotonic()
            self._wake.wait(PROGRESS_S)
            self._wake.clear()
            if not self._stop.is_set():
                self.send()
