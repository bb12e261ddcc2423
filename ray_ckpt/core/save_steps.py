"""Agreed steps: time and danger turned into a step number after which all ranks save.

Ranks decide from the step number alone, so that nothing is collective on the way of a step. What is due by
time, or because a node is about to go, is named as a step that lies ahead of the fastest rank by as long as
the word needs to get to all of them. It goes into memory that ranks read at each step. A rank that is past
it says so (`RankProgress.missed`); then the word is void, what the others saved is dropped, and a later step
is named with more time to get around.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from ray_ckpt.core import messages as m
from ray_ckpt.core.context import MAX_SAVE_SIGNALS, Context, names_of
from ray_ckpt.core.saves import Saves
from ray_ckpt.core.values import RankProgress, SessionKey
from ray_ckpt.format.save_signal import NUMBERS, SaveSignal
from ray_ckpt.types import AttemptId

REACH_S = 1.0  # a word gets to the pages of all nodes in that time; twice that after a miss, and so on
MAX_REACH_S = 32.0  # REACH_S doubles up to this after each step that came too late
REPORT_DELAY_S = 1.0  # what a node gathers before it tells where its ranks are
LEAST_AHEAD = 2  # steps; the next one may be ending right now
OVERDUE_S = 120.0  # past its time; Ray Train waits as long for a node whose time is not known
SETTLE_S = 10.0  # beyond the time to the step: no rank has opened its save, so none will


@dataclass(slots=True)
class _Reported:
    """The last word of a rank, and when it came."""

    progress: RankProgress
    at_s: float


@dataclass(slots=True)
class _Announced:
    signal: SaveSignal
    settled_by_s: float  # then it is given up
    was_open: bool = False  # its attempt has been seen


class SaveSteps:
    """Names one step at a time for the group that trains."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._session_key: SessionKey | None = None  # of the session that all below is of
        self._reported: dict[int, _Reported] = {}
        self._announced: _Announced | None = None
        self._number = 0
        self._reach_s = REACH_S
        self._last_s = 0.0  # when the last step was named, or training began
        self._too_late = False
        self._urgent: deque[tuple[SessionKey, int]] = deque(
            maxlen=MAX_SAVE_SIGNALS
        )  # steps named in emergencies
        self._over_s: dict[str, float] = {}  # since when the time of leaving nodes is over or not known

    def is_urgent(self, attempt: AttemptId) -> bool:
        """Whether its step was named because a node leaves."""
        return ((attempt.epoch, attempt.session), attempt.step) in self._urgent

    # -- what ranks say ----------------------------------------------------------------------------------

    def progressed(self, event: m.RanksProgressed) -> None:
        context = self._context
        if context.plan is None or event.session_key != context.plan.session_key:
            return
        self._enter(event.session_key)
        self._reported |= {rank: _Reported(progress, context.now_s) for rank, progress in event.ranks.items()}
        announced = self._announced
        if announced is not None and any(p.missed == announced.signal.word for p in event.ranks.values()):
            self._announced, self._last_s = None, -math.inf
            self._reach_s = min(2 * self._reach_s, MAX_REACH_S)

    def _enter(self, session_key: SessionKey) -> None:
        if session_key != self._session_key:
            self._session_key, self._reported, self._announced = session_key, {}, None
            self._reach_s, self._last_s, self._too_late = REACH_S, self._context.now_s, False
            # A restarted coordinator's words are other ones, unless it comes after 1000 of its predecessor's.
            self._number = self._context.ledger.epoch * 1000 % NUMBERS

    # -- time ------------------------------------------------------------------------------------------

    def ticked(self, saves: Saves, *, is_training: bool, interval_s: float | None) -> Iterator[m.Effect]:
        """Name a step if one is due and the last one is settled. `interval_s`: between saves by time."""
        plan = self._context.plan
        if plan is None or not is_training:
            return
        self._enter(plan.session_key)
        self._settle(saves)
        if self._announced is not None or not self._reported:
            return
        leaving = self._leaving()
        if leaving:
            yield from self._name_urgent(leaving, saves)
        elif interval_s is not None and self._context.now_s - self._last_s >= interval_s:
            yield self._name(urgent=False)

    def _leaving(self) -> frozenset[str]:
        """Nodes of the group that are about to go; not those that should be gone for long, or were never
        given a time: without an end, nothing but saves would be done for them."""
        context, now_s = self._context, self._context.now_s
        if not context.draining:  # as nearly always; this is asked with each event
            return frozenset()
        found = context.draining.intersection(context.session_nodes())
        self._over_s = {
            n: self._over_s.get(n, now_s) for n in found if context.leaves_at_s.get(n, now_s) <= now_s
        }
        return frozenset(n for n in found if now_s - self._over_s.get(n, now_s) <= OVERDUE_S)

    def _name_urgent(self, leaving: frozenset[str], saves: Saves) -> Iterator[m.Effect]:
        """One save after the other, as long as one can still be complete before the first node goes."""
        if saves.is_busy(SETTLE_S):  # what disk and network give is the one's that is on its way
            return
        context = self._context
        ends = [context.leaves_at_s[node] for node in leaving if node in context.leaves_at_s]
        ends = [at_s for at_s in ends if at_s > context.now_s]  # Ray ends nobody whose time is over
        needed_s = self._time_to(self._step_ahead(urgent=True)) + saves.latency_s
        if ends and context.now_s + needed_s > min(ends):
            if not self._too_late:
                self._too_late = True
                yield m.Warn(
                    text=f"Node(s) {names_of(leaving)} leave in {max(min(ends) - context.now_s, 0):.0f} s; "
                    f"another save would take {needed_s:.0f} s and is not begun."
                )
            return
        self._too_late = False
        yield self._name(urgent=True)

    def _name(self, *, urgent: bool) -> m.AnnounceSaveStep:
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

    def _settle(self, saves: Saves) -> None:
        """The named step is over once its attempt has been open and is not any more, or never came."""
        announced = self._announced
        if announced is None:
            return
        if saves.has_step(announced.signal.step) or self._is_written(announced, saves):
            announced.was_open = True
        elif announced.was_open or self._is_over(announced, saves):
            self._announced = None
            self._reach_s = max(self._reach_s / 2, REACH_S)

    def _is_written(self, announced: _Announced, saves: Saves) -> bool:
        """Ranks have captured it, and no node has written it yet: no attempt is open so far."""
        step, limit_s = announced.signal.step, self._context.options.attempt_timeout_s
        is_captured = any(reported.progress.saved_step >= step for reported in self._reported.values())
        is_in_time = self._context.now_s <= announced.settled_by_s + limit_s
        return is_captured and is_in_time and saves.ended_step < step

    def _is_over(self, announced: _Announced, saves: Saves) -> bool:
        """Nobody came in time; or it was opened and committed or dropped between two looks."""
        lineage, step = self._context.history.lineage(), announced.signal.step
        is_committed = bool(lineage) and lineage[-1].step >= step
        return self._context.now_s > announced.settled_by_s or is_committed or saves.ended_step >= step

    # -- where ranks are -------------------------------------------------------------------------------

    def _step_ahead(self, *, urgent: bool) -> int:
        """The first step that no rank will have completed when the word is on every node."""
        now_s, reach_s = self._context.now_s, self._reach_s
        ahead = [
            math.floor(
                reported.progress.step + _steps(reported, now_s - reported.at_s + REPORT_DELAY_S + reach_s)
            )
            + 1
            for reported in self._reported.values()
        ]
        last = max(reported.progress.step for reported in self._reported.values())
        return max(*ahead, last + 1 if urgent else last + LEAST_AHEAD)

    def _time_to(self, step: int) -> float:
        """Seconds from now until the slowest rank has completed that step."""
        now_s = self._context.now_s
        return max(
            (_left_s(reported, step, now_s - reported.at_s) for reported in self._reported.values()),
            default=0.0,
        )


def _steps(reported: _Reported, seconds: float) -> float:
    """Steps that a rank may complete from its last completed one on, `seconds` after its word was sent.

    When it was sent the next step was not complete, however long it takes: an evaluation may end right then.
    """
    if reported.progress.step_s <= 0:  # not known yet
        return float(LEAST_AHEAD - 1)
    return (min(reported.progress.since_s, reported.progress.step_s) + seconds) / reported.progress.step_s


def _left_s(reported: _Reported, step: int, seconds: float) -> float:
    """Until a rank has completed `step`, `seconds` after its word came; of the next step one may be over."""
    progress = reported.progress
    done_s = min(progress.since_s, progress.step_s) + seconds
    return max(0.0, (step - progress.step) * progress.step_s - done_s)
