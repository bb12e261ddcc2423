"""Saves postponed to the end of an accumulation window, in which gradients wait for an optimizer step."""

from __future__ import annotations

import logging

from ray_ckpt.capture.gradients import Window

log = logging.getLogger("ray_ckpt")

MAX_POSTPONED = 1_000  # steps of an accumulation window; gradients that wait longer are never used


class Postponing:
    """Decides for each save of a rank whether it is postponed."""

    def __init__(self, window: Window, *, partial_grads: bool) -> None:
        self._window = window
        self._partial_grads = partial_grads
        self._num_steps = 0  # steps for which a save has waited

    @property
    def is_active(self) -> bool:
        """True while a save waits for the end of the window."""
        return self._num_steps > 0

    def postpone(self) -> bool:
        """Return True if the save that is due now waits for the end of the window."""
        if self._partial_grads or not self._window.is_open():
            self._num_steps = 0
        else:
            self._num_steps += 1
            if self._num_steps > MAX_POSTPONED:
                log.warning("gradients have waited for %d steps; the save waits no longer", MAX_POSTPONED)
                self._num_steps = 0
        return self.is_active
