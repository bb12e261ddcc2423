"""The save signal as read by a rank, and the pace that the rank reports.

Reading the signal costs one read of memory. The memory is a page that belongs to the agent; after the agent
has died, `refresh` finds the page of the new agent, outside the training thread.
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

PACE_STEPS = 5  # the pace is the median of these steps, so an evaluation between two steps has no effect
URGENT_BLOCK_S = 10.0  # wait of an emergency save for the previous save


class SaveSignals:
    """The save signals of one Checkpointer. Only the training thread calls `look` and `completed`."""

    def __init__(self, link: SignalLink) -> None:
        self._link = link
        self._path = ""
        self._memory: memoryview | None = None
        self._logged = ""  # the last reason for which there was no page
        self._reached = 0  # the last flag that this rank read at the step of the flag
        self._missed = 0  # the last flag that this rank read after the step of the flag
        self._completed_s: float | None = None
        self._steps_s: deque[float] = deque(maxlen=PACE_STEPS)
        self._step_s = 0.0
        self.wake: Callable[[], None] = lambda: None  # makes the progress thread report at once

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
        """Return True if `look` has found that all ranks save after `step`."""
        return step_of(self._reached) == step

    def block_s(self, max_block_s: float) -> float:
        """Return for how long a save may wait for the previous one; `max_block_s` if nothing is urgent."""
        return max(max_block_s, URGENT_BLOCK_S) if is_urgent(self._reached) else max_block_s

    def completed(self) -> None:
        """Note that a step is complete, to measure the time between steps."""
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
        """Map the page of the current agent; request an agent if there is none. May wait for the agent."""
        try:
            path = self._link.signal_page()
            if path != self._path:
                try:
                    memory = _map(path)
                except OSError:  # no access through /proc: ptrace rules, or another PID namespace
                    path = self._link.signal_page(named=True)
                    memory = _map(path)
                self._path, self._memory = path, memory
        except CheckpointError as error:
            log.debug("no save signals for now: %s", error)
            self._link.recover()
        except (OSError, ValueError) as error:  # ValueError: the file is no page, and too small
            if str(error) != self._logged:
                self._logged = str(error)
                log.warning("saves by time and emergency saves are off: %s", error)

    def close(self) -> None:
        """Release the page; after this call `look` finds no step."""
        self._path, self._memory = "", None


def _map(path: str) -> memoryview:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return memoryview(mmap.mmap(file, PAGE_BYTES, prot=mmap.PROT_READ))
    finally:
        os.close(file)
