"""The save signal as a rank sees it, and the pace that the rank reports.

Reading the signal costs one read of memory. The memory belongs to the agent; after the agent has died there
is another page, which `refresh` finds, outside the training thread.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections import deque
from collections.abc import Callable
from statistics import median

from ray_ckpt.core.values import RankProgress
from ray_ckpt.errors import CheckpointError
from ray_ckpt.format.save_signal import PAGE_BYTES, is_urgent, read_flag, step_of
from ray_ckpt.trainer.link import SignalLink

log = logging.getLogger("ray_ckpt")

PACE_STEPS = 5  # their median is the pace, so that an evaluation between two of them does not count


class SaveSignals:
    """One per Checkpointer. `look` and `completed` belong to the training thread."""

    def __init__(self, link: SignalLink) -> None:
        self._link = link
        self._path = ""
        self._memory: memoryview | None = None
        self._reached = 0  # the last flag whose step this rank was at
        self._missed = 0  # the last flag whose step had passed when this rank saw it
        self._completed_s: float | None = None
        self._steps_s: deque[float] = deque(maxlen=PACE_STEPS)
        self._step_s = 0.0
        self.wake: Callable[[], None] = lambda: None  # has progress reported at once

    def look(self, step: int) -> bool:
        """Return True if all ranks save after `step`, which this rank has just completed."""
        flag = read_flag(self._memory) if self._memory is not None else 0
        signal_step = step_of(flag)
        if signal_step == 0 or step < signal_step:
            return False
        if step == signal_step:
            self._reached = flag
            return True
        if flag not in (self._reached, self._missed):
            self._missed = flag
            self.wake()
        return False

    def is_at(self, step: int) -> bool:
        """Return True if `look` has found `step` to be an agreed one."""
        return step_of(self._reached) == step

    @property
    def is_urgent(self) -> bool:
        """The last agreed step that this rank was at is an emergency save."""
        return is_urgent(self._reached)

    def completed(self) -> None:
        """Note that a step is complete, to measure the time of steps."""
        now_s = time.monotonic()
        if self._completed_s is not None:
            self._steps_s.append(now_s - self._completed_s)
            self._step_s = median(self._steps_s)
        self._completed_s = now_s

    def progress(self, *, step: int, saved_step: int, stall_s: float) -> RankProgress:
        """Return this rank's progress. May be called from any thread."""
        completed_s = self._completed_s
        return RankProgress(
            step=step,
            saved_step=saved_step,
            since_s=time.monotonic() - completed_s if completed_s is not None else 0.0,
            step_s=self._step_s,
            missed=self._missed,
            stall_s=stall_s,
        )

    def refresh(self) -> None:
        """Map the page of the current agent; have an agent started if there is none. May wait for it."""
        try:
            path = self._link.signal_page()
            if path != self._path:
                try:
                    memory = _map(path)
                except OSError:  # /proc does not lead there: ptrace rules, or another PID namespace
                    path = self._link.signal_page(named=True)
                    memory = _map(path)
                self._path, self._memory = path, memory
        except CheckpointError as error:
            log.debug("no save signals for now: %s", error)
            self._link.recover()
        except OSError as error:
            log.warning("saves by time and emergency saves are off: %s", error)

    def close(self) -> None:
        """Release the page; `look` finds no step from here on."""
        self._path, self._memory = "", None


def _map(path: str) -> memoryview:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return memoryview(mmap.mmap(file, PAGE_BYTES, prot=mmap.PROT_READ))
    finally:
        os.close(file)
