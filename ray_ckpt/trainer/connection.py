"""The connection of the Checkpointers of this process to the agent, and the thread that reports progress."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from ray_ckpt.core.values import RankProgress, SessionKey
from ray_ckpt.errors import CheckpointError, ConfigError, NotConnected
from ray_ckpt.trainer.link import Link, Reporter, SignalLink
from ray_ckpt.trainer.save_signal import SaveSignals
from ray_ckpt.trainer.waiting import WaitingLog

if TYPE_CHECKING:
    from ray_ckpt.trainer.probe import ResumeProbe

log = logging.getLogger("ray_ckpt")

PROGRESS_S = 1.0  # between two reports of a rank's progress by the progress thread
REFRESH_S = 5.0  # between two requests for the agent's signal page (a new agent has a new page) and for
# the list of awaited ranks


class _Checkpointer(Protocol):
    def close(self, *, leaves_loop: bool) -> None: ...


open_checkpointers: weakref.WeakSet[_Checkpointer] = weakref.WeakSet()


def close_all() -> None:
    """Flush and close every Checkpointer of this process before the worker ends."""
    for checkpointer in list(open_checkpointers):
        try:
            checkpointer.close(leaves_loop=False)  # this is not the thread of the loop
        except CheckpointError as error:
            log.warning("while closing: %s", error)


@dataclass(frozen=True, slots=True)
class Connection:
    """A link, or the reason why there is no link. It serves one restore, and the saves after it."""

    link: Link | None = None
    reporter: Reporter | None = None
    probe: ResumeProbe | None = None
    problem: CheckpointError | None = None
    used: threading.Event = field(default_factory=threading.Event)  # set when a Checkpointer has restored

    def need_link(self) -> Link:
        """Return the link. Raises the reason why there is none, such as NotConnected outside a run."""
        if self.problem is not None:
            raise self.problem
        if self.link is None:
            raise NotConnected(
                "This process belongs to no run.",
                hint="Pass CheckpointCallback(...) in ray.train.RunConfig(callbacks=[...]), "
                "or use ray_ckpt.connect(run=..., storage_path=..., rank=..., world_size=...). "
                "Ray Train with num_workers=0 runs no callbacks: use num_workers=1.",
            )
        return self.link

    def check_unused(self) -> None:
        """Raise ConfigError if a Checkpointer has restored.

        A second one would begin with the same checkpoint, however many the first one has saved since, and its
        saves would have the names of those of the first.
        """
        if self.used.is_set():
            raise ConfigError(
                "Another Checkpointer of this process has restored already.",
                hint="Register all objects as items of one Checkpointer. To train once more in this process, "
                "close it, and call ray_ckpt.connect again on all ranks.",
            )


_connection = Connection()


def set_connection(connection: Connection) -> None:
    """Make this the connection of Checkpointers that this process builds from now on."""
    global _connection
    _connection = connection


def get_connection() -> Connection:
    return _connection


class ProgressThread:
    """Reports this rank's progress to the agent every second, and logs the ranks that the group waits for."""

    def __init__(
        self,
        link: SignalLink,
        session_key: SessionKey,
        progress: Callable[[], RankProgress],
        signals: SaveSignals,
    ) -> None:
        self._link = link
        self._session_key = session_key
        self._progress = weakref.WeakMethod(progress)  # the thread ends with the Checkpointer
        self._signals = signals
        self._waiting = WaitingLog(link, "save", "report")
        signals.wake = self.wake
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ray_ckpt-progress", daemon=True)
        self._thread.start()

    def send(self) -> None:
        """Report now. Errors are only logged, because an error must not end the thread or the training."""
        progress = self._progress()
        if progress is None:
            self._stop.set()
            return
        try:
            self._link.progress(self._session_key, progress())
        except Exception as error:
            log.debug("progress was not reported: %s", error)

    def wake(self) -> None:
        """Wake the thread so that it reports soon. Does not wait."""
        self._wake.set()

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()
        self._thread.join(PROGRESS_S)

    def _run(self) -> None:
        refreshed_s = -REFRESH_S
        while not self._stop.is_set():
            if time.monotonic() - refreshed_s >= REFRESH_S:
                self._refresh()
                refreshed_s = time.monotonic()
            self._wake.wait(PROGRESS_S)
            self._wake.clear()
            if not self._stop.is_set():
                self.send()

    def _refresh(self) -> None:
        """Find the agent's page and log missing ranks. Errors are only logged, as in `send`."""
        try:
            self._signals.refresh()
            self._waiting.log_waiting()
        except Exception as error:
            log.debug("the agent's page was not found: %s", error)
