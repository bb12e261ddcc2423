"""Announced save steps: the step after which all ranks save, chosen by time or because a node leaves.

Ranks decide from the step number alone, so a training step needs no collective operation. A save that is due
by time, or because a node is about to leave, is announced as a step ahead of the fastest rank, far enough for
the announcement to reach all ranks. Ranks read the announcement from shared memory at each step. A rank that
is past the step reports the miss (`RankProgress.missed`); then the announcement is void, the attempt of the
other ranks is dropped, and a later step is announced, with more time for the announcement to arrive.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from ray_ckpt.core import messages as m
from ray_ckpt.core.context import MAX_SAVE_SIGNALS, Context, names_of
from ray_ckpt.core.open_attempts import OpenAttempts
from ray_ckpt.core.progress import RankReport, SessionProgress
from ray_ckpt.core.save_times import SaveTimes
from ray_ckpt.core.values import SessionKey
from ray_ckpt.format.save_signal import NUMBERS, SaveSignal
from ray_ckpt.types import AttemptId

REACH_S = 1.0  # time for a signal to reach the pages of all nodes; doubled after each miss
MAX_REACH_S = 32.0  # limit of REACH_S, which doubles after each step announced too late
REPORT_DELAY_S = 1.0  # time for which a node gathers its ranks' progress before a report
LEAST_AHEAD = 2  # steps; the next step may be about to end
OVERDUE_S = 120.0  # limit of saves for a node past its end time; Ray Train waits as long without one
SETTLE_S = 10.0  # time after the expected end of the step: by then a save would be open


@dataclass(slots=True)
class _Announced:
    signal: SaveSignal
    settled_by_s: float  # after this time the announcement is given up
    was_open: bool = False  # the attempt at the step has been open


class SaveSteps:
    """Announcer of one save step at a time to the training group."""

    def __init__(
        self, context: Context, *, progress: SessionProgress, attempts: OpenAttempts, times: SaveTimes
    ) -> None:
        self._context = context
        self._progress, self._attempts, self._times = progress, attempts, times
        self._session_key: SessionKey | None = None  # the session of the fields below
        self._announced: _Announced | None = None
        self._number = 0
        self._reach_s = REACH_S
        self._last_s = 0.0  # when the last step was announced, or training began
        self._too_late = False
        self._urgent: deque[tuple[SessionKey, int]] = deque(maxlen=MAX_SAVE_SIGNALS)  # urgent steps
        self._over_s: dict[str, float] = {}  # leaving node -> since when its end time is past or unknown

    def is_urgent(self, attempt: AttemptId) -> bool:
        """Return True if an attempt's step was announced because a node is leaving."""
        return ((attempt.epoch, attempt.session), attempt.step) in self._urgent

    def progressed(self, event: m.RanksProgressed) -> None:
        """Void the announcement if a rank has missed the announced step."""
        plan = self._context.plan
        if plan is None or event.session_key != plan.session_key:
            return
        self._enter(event.session_key)
        announced = self._announced
        if announced is not None and any(p.missed == announced.signal.word for p in event.distinct):
            self._announced, self._last_s = None, -math.inf
            self._reach_s = min(2 * self._reach_s, MAX_REACH_S)

    def _enter(self, session_key: SessionKey) -> None:
        if session_key != self._session_key:
            self._session_key, self._announced = session_key, None
            self._reach_s, self._last_s, self._too_late = REACH_S, self._context.now_s, False
            # Numbers differ from those of the previous coordinator, unless the latter announced 1000 steps.
            self._number = self._context.ledger.epoch * 1000 % NUMBERS

    # -- time ------------------------------------------------------------------------------------------

    def ticked(self, *, is_training: bool, interval_s: float | None) -> Iterator[m.Effect]:
        """Announce a step if a save is due (every `interval_s`) and the last announcement is settled."""
        plan = self._context.plan
        if plan is None or not is_training:
            return
        self._enter(plan.session_key)
        self._settle()
        if self._announced is not None or not self._progress.reports():
            return
        leaving = self._leaving()
        if leaving:
            yield from self._announce_urgent(leaving)
        elif interval_s is not None and self._context.now_s - self._last_s >= interval_s:
            yield self._announce(urgent=False)

    def _leaving(self) -> frozenset[str]:
        """Return the nodes of the group that are about to leave.

        A node is left out if its end time has been past or unknown for more than OVERDUE_S: otherwise the
        group would do nothing but save for this node.
        """
        context, now_s = self._context, self._context.now_s
        if not context.draining:  # the usual case, tested first because each tick calls this
            return frozenset()
        found = context.draining.intersection(context.session_nodes())
        self._over_s = {
            n: self._over_s.get(n, now_s) for n in found if context.leaves_at_s.get(n, now_s) <= now_s
        }
        return frozenset(n for n in found if now_s - self._over_s.get(n, now_s) <= OVERDUE_S)

    def _announce_urgent(self, leaving: frozenset[str]) -> Iterator[m.Effect]:
        """Announce saves one after the other, while a save can be complete before the first node leaves."""
        if self._attempts.is_busy(SETTLE_S):  # the open save needs the whole disk and network
            return
        context = self._context
        ends = [context.leaves_at_s[node] for node in leaving if node in context.leaves_at_s]
        ends = [at_s for at_s in ends if at_s > context.now_s]  # Ray does not end a node after its time
        needed_s = self._time_to(self._step_ahead(urgent=True)) + self._times.latency_s
        if ends and context.now_s + needed_s > min(ends):
            if not self._too_late:
                self._too_late = True
                yield m.Warn(
                    text=f"Node(s) {names_of(leaving)} leave in {max(min(ends) - context.now_s, 0):.0f} s; "
                    f"another save would take {needed_s:.0f} s and is not begun."
                )
            return
        self._too_late = False
        yield self._announce(urgent=True)

    def _announce(self, *, urgent: bool) -> m.AnnounceSaveStep:
        context, plan = self._context, self._context.plan
        assert plan is not None
        step = self._step_ahead(urgent=urgent)
        self._number = self._number % (NUMBERS - 1) + 1
        signal = SaveSignal(step=step, number=self._number, urgent=urgent)
        settled_by_s = context.now_s + self._time_to(step) + SETTLE_S
        self._announced, self._last_s = _Announced(signal, settled_by_s), context.now_s
        context.save_signals.append((plan.session_key, step))
        if urgent:
            self._urgent.append((plan.session_key, step))
        return m.AnnounceSaveStep(session_key=plan.session_key, signal=signal, nodes=context.session_nodes())

    def _settle(self) -> None:
        """End the announcement once the attempt at its step has ended, or was not opened in time."""
        announced = self._announced
        if announced is None:
            return
        if self._attempts.has_step(announced.signal.step) or self._is_written(announced):
            announced.was_open = True
        elif announced.was_open or self._is_over(announced):
            self._announced = None
            self._reach_s = max(self._reach_s / 2, REACH_S)

    def _is_written(self, announced: _Announced) -> bool:
        """Return True if ranks have captured the step, but no node has written it, so no attempt is open."""
        step, limit_s = announced.signal.step, self._context.options.attempt_timeout_s
        is_captured = any(report.progress.saved_step >= step for report in self._progress.distinct())
        is_in_time = self._context.now_s <= announced.settled_by_s + limit_s
        return is_captured and is_in_time and self._progress.ended_step < step

    def _is_over(self, announced: _Announced) -> bool:
        """Return True if no attempt was opened in time, or one was opened and ended between two checks."""
        lineage, step = self._context.history.lineage(), announced.signal.step
        is_committed = bool(lineage) and lineage[-1].step >= step
        is_late = self._context.now_s > announced.settled_by_s
        return is_late or is_committed or self._progress.ended_step >= step

    # -- where ranks are -------------------------------------------------------------------------------

    def _step_ahead(self, *, urgent: bool) -> int:
        """Return the first step that no rank will have completed when the signal has reached every node."""
        now_s, reports = self._context.now_s, self._progress.distinct()
        margin_s = REPORT_DELAY_S + self._reach_s
        ahead = [
            math.floor(report.progress.step + _steps(report, now_s - report.at_s + margin_s)) + 1
            for report in reports
        ]
        last = max(report.progress.step for report in reports)
        return max(*ahead, last + 1 if urgent else last + LEAST_AHEAD)

    def _time_to(self, step: int) -> float:
        """Return the seconds from now until the slowest rank has completed that step."""
        now_s, reports = self._context.now_s, self._progress.distinct()
        return max((_left_s(report, step, now_s - report.at_s) for report in reports), default=0.0)


def _steps(report: RankReport, seconds: float) -> float:
    """Return the steps that a rank may complete in the `seconds` after its report was sent.

    The step that was under way at the report may end at once, however long it took: it may end with an
    evaluation.
    """
    progress = report.progress
    if progress.step_s <= 0:  # not measured yet
        return float(LEAST_AHEAD - 1)
    return (min(progress.since_s, progress.step_s) + seconds) / progress.step_s


def _left_s(report: RankReport, step: int, seconds: float) -> float:
    """Return the seconds until a rank has completed `step`, as of `seconds` after the rank's report."""
    progress = report.progress
    done_s = min(progress.since_s, progress.step_s) + seconds
    return max(0.0, (step - progress.step) * progress.step_s - done_s)
