"""The count of completed optimizer steps.

The step is the name of a checkpoint, and ranks agree on saves by the step alone. A count that restarts in
each epoch, or stands still while training continues, would give two states the same name. The call that
passes such a number raises an error.
"""

from __future__ import annotations

import logging
from typing import Any, Literal, TypeAlias

from ray_ckpt.arguments import whole_number
from ray_ckpt.errors import ConfigError

log = logging.getLogger("ray_ckpt")

NUM_SILENT = 10  # steps of a loop without any call, after which a call was most likely forgotten
MAX_STEP = 999_999_999_999  # a checkpoint's folder name has twelve digits for the step
HINT = "Count completed optimizer steps over the whole run: epochs and restarts do not begin a new count."

Call: TypeAlias = Literal["step", "due", "save"]


class StepCount:
    """The completed steps of one rank."""

    def __init__(self, *, salvages: bool = False) -> None:
        """Begin at step 0. With `salvages`, the first call of `save` warns if `step` was not called."""
        self._salvages = salvages
        self.last = 0  # the last completed step
        self.restored = 0
        self.begun = 0  # the last step that a loop over `steps` has begun
        self._num = 0  # number of steps completed since the restore
        self._num_saves = 0  # number of these steps for which only `save` was called
        self._stepped = 0  # the last step for which `step` was called
        self._saved = 0  # the last step that a call of `save` has captured

    def restore(self, step: int) -> None:
        """Continue after `step`; 0: training begins."""
        self.last = self.restored = step

    def warn_if_none_left(self, total: int) -> None:
        """Warn if a run that was restored has all of `total` steps."""
        if 0 < total <= self.last:
            log.warning(
                "step %d was restored and total=%d: no step is left; a larger total trains on",
                self.last,
                total,
            )

    def is_passed_over(self, step: int) -> bool:
        """Return True if a loop goes on without a call for `step`; warn once if it has had no call at all."""
        if self._num == 0 and step == self.restored + NUM_SILENT:
            log.warning(
                "step, due and save were not called in the first %d steps of the loop: nothing is saved "
                "without ckpt.step(step) at the end of its body",
                NUM_SILENT,
            )
        return step > self.last

    def end(self, total: int) -> None:
        """Note the end of a loop of `total` steps; log an error if no call has named the last one."""
        if self.last < total:
            log.error("the loop ended without ckpt.step(%d): the state after that step is not saved", total)

    @property
    def has_gone_on(self) -> bool:
        """True if a loop over `steps` has begun a step after the last completed one."""
        return self.begun > self.last

    def complete(self, value: Any, call: Call, is_same: bool = False) -> tuple[int, bool]:
        """Return the step that the argument of `call` names, and True if this step is new.

        Raises ConfigError unless the argument is an integer above the previous step. Several calls may name
        the same step: `due` or `step` and then `save`, and `save` again until the step has been captured, or
        as long as no optimizer step has followed (`is_same`).
        """
        step = whole_number(value, "The step", hint=HINT)
        is_new = step > self.last
        if not is_new and not self._may_repeat(step, call, is_same):
            raise ConfigError(self._why_refused(step), hint=HINT)
        if step > MAX_STEP:
            raise ConfigError(f"Step {step} is above {MAX_STEP:,}.", hint=HINT)
        if is_new:
            self.last = step
            self._num += 1
            self._num_saves += call == "save"
        if call == "step":
            self._stepped = step
        elif call == "save" and self._salvages and not self._stepped:
            self._salvages = False
            log.warning(
                "salvage is set, but step was not called before this save: a loop that calls only due and "
                "save keeps no step for a salvage"
            )
        return step, is_new

    def captured(self) -> None:
        """Note that a call of `save` has captured the last step."""
        self._saved = self.last

    def _may_repeat(self, step: int, call: Call, is_same: bool) -> bool:
        if step != self.last or self._num == 0:
            return False
        return {"step": step != self._stepped, "due": True, "save": step != self._saved or is_same}[call]

    def _why_refused(self, step: int) -> str:
        if step < 1:
            return f"Step {step} is not a completed optimizer step: the first one is step 1."
        if self._num == 0:
            return f"Step {step} does not come after step {self.restored}, which was restored."
        if step == self.last:
            return f"Step {step} comes twice."
        return f"Step {step} comes after step {self.last}."

    def mark(self) -> str:
        """Return `<how>:<number>`: the number of steps counted since the restore, the same on all ranks.

        `<how>` is `saves` in a loop that calls only `save`, and `steps` in a loop that calls `step` or `due`.
        Only marks of the same kind are compared, because one rank may call `due` on behalf of the others.
        """
        return f"saves:{self._num}" if self._num == self._num_saves else f"steps:{self._num}"
