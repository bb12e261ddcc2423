"""The count of completed optimizer steps.

A checkpoint is named by its step, and ranks agree on saves by the step alone. A count that restarts with an
epoch, or one that stands still while training goes on, would give one name to two states. Such a number is
refused at the call that passes it.
"""

from __future__ import annotations

import operator
from typing import Any, Literal, TypeAlias

from ray_ckpt.errors import ConfigError

MAX_STEP = 999_999_999_999  # the name of a checkpoint's folder has twelve digits for it
HINT = "Count completed optimizer steps over the whole run: epochs and restarts do not begin a new count."

Call: TypeAlias = Literal["step", "due", "save"]


def whole_number(value: Any, what: str) -> int:
    """Return `value` as an int: an integer, one of NumPy's, or a tensor of one integer.

    Raises ConfigError for any other. Waits for a tensor on an accelerator.
    """
    dtype = str(getattr(value, "dtype", ""))
    try:
        if not isinstance(value, bool) and "bool" not in dtype:
            return operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise ConfigError(f"{what} is {value!r}, which is not an integer.", hint=HINT)


class StepCount:
    """The completed steps of one rank."""

    def __init__(self) -> None:
        self.last = 0  # the last completed step
        self.restored = 0
        self._num = 0  # completed since the restore
        self._num_saves = 0  # of these, steps that only `save` was called for
        self._stepped = 0  # the last step that `step` was called for
        self._saved = 0  # the last step that a call of `save` has captured

    def restore(self, step: int) -> None:
        """Continue after `step`; 0: training begins."""
        self.last = self.restored = step

    def complete(self, value: Any, call: Call) -> tuple[int, bool]:
        """Return the last completed step by the argument of `call`, and True if it is a new one.

        Raises ConfigError unless it is an integer above the step before. Several calls may be about one step:
        `due` or `step` and then `save`, and `save` again as long as the step has not been captured.
        """
        step = whole_number(value, "The step")
        is_new = step > self.last
        if not is_new and not self._may_repeat(step, call):
            raise ConfigError(self._why_refused(step), hint=HINT)
        if step > MAX_STEP:
            raise ConfigError(f"Step {step} is above {MAX_STEP:,}.", hint=HINT)
        if is_new:
            self.last = step
            self._num += 1
            self._num_saves += call == "save"
        if call == "step":
            self._stepped = step
        return step, is_new

    def captured(self) -> None:
        """Note that a call of `save` has captured the last step."""
        self._saved = self.last

    def _may_repeat(self, step: int, call: Call) -> bool:
        if step != self.last or self._num == 0:
            return False
        return {"step": step != self._stepped, "due": True, "save": step != self._saved}[call]

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

        `<how>` is `saves` in a loop that calls `save` alone, and `steps` in one that calls `step` or `due`.
        Only marks of the same kind are compared, for one rank may call `due` on behalf of the others.
        """
        return f"saves:{self._num}" if self._num == self._num_saves else f"steps:{self._num}"
