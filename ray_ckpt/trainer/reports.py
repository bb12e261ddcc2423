"""Reports of committed checkpoints to the launcher, at steps that all ranks reach."""

from __future__ import annotations

import logging
import time
from concurrent.futures import wait

from ray_ckpt.core.awaited import ranks_text
from ray_ckpt.core.barriers import BARRIER_S
from ray_ckpt.core.values import SessionKey
from ray_ckpt.errors import CollectiveError, RunConflict
from ray_ckpt.trainer.link import Reporter, SignalLink
from ray_ckpt.trainer.outcomes import Outcomes

log = logging.getLogger("ray_ckpt")

FIRST_REPORT_STEPS = 10  # after the restore and two saves: by then a rank that saves alone is found
MAX_DOUBLED = 10  # limit of doublings of the steps to the next report while a rank misses reports
BARRIER_SLACK_S = 40.0  # extra wait, in case the coordinator restarts: all ranks need one answer
CHECK_S = 1.0  # between checks of the outcomes of saves while this rank waits for other ranks


class Reports:
    """Decides at which steps this rank reports. A report is a barrier, so no rank may enter it alone."""

    def __init__(self, link: SignalLink, reporter: Reporter | None, outcomes: Outcomes) -> None:
        self._link = link
        self._reporter = reporter if link.options.ray_report else None
        self._outcomes = outcomes
        self._session_key: SessionKey = (0, 0)
        self._num_missed = 0  # reports missed since the last report of all ranks
        self.next_step = 0

    def begin(self, session_key: SessionKey, step: int) -> None:
        """Begin a session after `step`."""
        self._session_key = session_key
        save_steps = self._link.options.steps_between_saves or 0
        self.next_step = step + max(FIRST_REPORT_STEPS, 2 * save_steps)

    def report_if_due(self, step: int) -> None:
        """Report if the step is due, not by the number of saves: a rank that missed a save has fewer."""
        if step >= self.next_step:
            self.report(step)

    def report(self, step: int) -> None:
        """Report after `step` if all ranks reach this report."""
        if self._reporter is None:
            return
        if self._all_come(self.next_step, step):
            self.next_step = self._reporter.report(self._outcomes.newest, step)
            self._num_missed = 0
        else:  # the next step is the same on all ranks, also on late ranks
            self.next_step += FIRST_REPORT_STEPS << min(self._num_missed, MAX_DOUBLED)
            self._num_missed += 1

    def _all_come(self, number: int, step: int) -> bool:
        """Return True if all ranks reach the report of that number. Raises misuse found during the wait."""
        if self._link.identity.world_size == 1:
            return True
        end_s = time.monotonic() + BARRIER_S + BARRIER_SLACK_S
        try:
            answer = self._link.reach_barrier(self._session_key, number)
            while not answer.done() and time.monotonic() < end_s:
                wait((answer,), CHECK_S)
                self._outcomes.check()
            missing = answer.result(0)
        except (CollectiveError, RunConflict):
            raise
        except Exception as error:  # no service answers, so no other rank enters the report either
            reason = str(error) or "the coordinator does not answer"
            log.warning("step %d is not reported to Ray Train: %s", step, reason)
            return False
        if missing:
            log.warning(
                "step %d is not reported to Ray Train: rank(s) %s did not come to it within %.0f s; "
                "call step on every rank, after every step",
                step,
                ranks_text(missing),
                BARRIER_S,
            )
        return not missing
