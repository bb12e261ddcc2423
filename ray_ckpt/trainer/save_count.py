"""The count of a rank's saves, and the optimizer steps that the rank had made at its last save and step.

The live state is that of the last save, or of the last completed step, until an optimizer steps.
"""

from __future__ import annotations

from dataclasses import replace

from ray_ckpt.capture.gradients import Window
from ray_ckpt.core.values import RankProgress, SessionKey
from ray_ckpt.format.names import make_attempt
from ray_ckpt.trainer.link import Identity
from ray_ckpt.types import AttemptId


class SaveCount:
    """The saves of one rank."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._session_key: SessionKey = (0, 0)
        self._window: Window | None = None
        self._tries: dict[int, int] = {}
        self.last_step = 0  # the last step for which a save was begun
        self._step_before: int | None = None  # the saved step before that; None: there is none
        self._updates: tuple[int, ...] = ()  # number of steps of each optimizer at the last save
        self._updates_of_step: tuple[int, ...] = ()  # at the last completed step, also in a group with parts
        self._num_steps = self._num_counted = 0  # completed steps, and those with a step of an optimizer

    def restore(self, step: int, session_key: SessionKey, window: Window) -> None:
        """Begin a session after `step`; `window` counts the optimizer steps from now on."""
        self.last_step, self._session_key, self._window = step, session_key, window
        self._updates = self._num_updates()
        self.completed(is_new=False)

    def attempt(self, step: int) -> AttemptId:
        """Return the id of the next attempt to save `step`."""
        epoch, session = self._session_key
        count, uid = self._tries.get(step, 0), self._identity.run_uid
        self._tries = {step: count + 1}
        return make_attempt(run_uid=uid, epoch=epoch, session=session, step=step, attempt=count)

    def begun(self, step: int) -> None:
        """Note that a save of `step` has begun, of the live state."""
        if step != self.last_step or self._step_before is None:
            self._step_before = self.last_step
        self._updates, self.last_step = self._num_updates(), step

    def completed(self, *, is_new: bool) -> None:
        """Note that the live state is that of the last completed step; `is_new` at the first call for it."""
        steps = self._window.steps_of_each if self._window else ()
        self._num_steps += is_new
        self._num_counted += is_new and sum(steps) > sum(self._updates_of_step)
        self._updates_of_step = steps

    def why_later(self, *, has_gone_on: bool) -> str:
        """Return why the live state is later than that of the last completed step; "" if it seems to be that.

        `has_gone_on`: a loop over `steps` has begun another step. That decides if less than half of the
        completed steps had a step of an optimizer: one may run no hooks, or be replayed in a graph.
        """
        if self._window is not None and self._window.steps_of_each != self._updates_of_step:
            return "an optimizer has stepped"
        is_counted = 2 * self._num_counted >= max(self._num_steps, 1)
        return "the loop has gone on" if has_gone_on and not is_counted else ""

    def is_same_state(self) -> bool:
        """Return whether no optimizer has stepped since the last save."""
        return self._num_updates() == self._updates

    @property
    def has_updates(self) -> bool:
        """True if a step of an optimizer was counted before the last save."""
        return any(self._updates)

    def _num_updates(self) -> tuple[int, ...]:
        """Count the steps of each optimizer so far; of none in a group with parts, whose ranks differ."""
        return self._window.steps_of_each if self._window and not self._identity.parts else ()

    def progress(self, measured: RankProgress, *, is_over: bool) -> RankProgress:
        """Return the measured progress of this rank with its saves. May be called from any thread.

        Ranks are compared by the optimizer with the most steps.
        """
        return replace(
            measured,
            saved_before=self._step_before,
            updates=max(self._num_updates(), default=0),
            saved_updates=max(self._updates, default=0),
            is_over=is_over,
        )
