"""Goodput of a run: measured where its log has the facts, else estimated from openings and commits.

    goodput = time of steps whose effect survived / wall time

A step counts once, and only if the newest state comes from it. A session is measured where its log has its
restore, first and last step, and end (`SessionEnd`); otherwise its times are estimated, between two bounds
that hold for any step time and interval. `docs/operations/goodput.md` has the rules. The estimates of goodput
and of all causes of badput add up to the wall time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeAlias

from ray_ckpt.analysis.session_history import (
    Commit,
    SessionHistory,
    StepRate,
    ratio,
    session_histories,
    step_rate,
)
from ray_ckpt.core.recovery import RecoveryTimes, recovery_phases
from ray_ckpt.types import END_CAUSES, CheckpointInfo, EndCause, SessionInfo

_ENDS: Mapping[EndCause, str] = {
    "finished": "its launcher had finished",
    "process": "a process failed",
    "node": "a node was lost",
    "preemption": "a node left after a notice",
    "replaced": "another launcher took the run",
    "launcher": "its launcher died or was stopped",
}

CAUSES: Mapping[str, str] = {
    "group_start": "from the opening of a session until its ranks restored",
    "restore": "reading the state and putting it into place, by the slowest rank",
    "startup": "from then on to the first step",
    "stalls": "saves held up training",
    "lost_steps": "steps whose effect was lost",
    **{f"down_{cause}": f"from the last step to the next session: {_ENDS[cause]}" for cause in END_CAUSES},
    "down_unknown": "from the last step to the next session: the cause is unknown",
    "no_commit": "sessions without a commit whose steps are not in the log",
}
"""Causes of badput, with a description of each."""

COLOURS: Mapping[str, str] = {
    "goodput": "#009e73",
    "group_start": "#56b4e9",
    "restore": "#0072b2",
    "startup": "#f0b400",
    "stalls": "#cc79a7",
    "lost_steps": "#d55e00",
    "down_node": "#20272e",
    "down_process": "#434e59",
    "down_preemption": "#66737f",
    "down_launcher": "#8995a1",
    "down_replaced": "#a8b2bc",
    "down_finished": "#c5cdd4",
    "down_unknown": "#e1e6ea",
    "no_commit": "#7a5230",
}
"""Colours of goodput and badput in pictures: from Okabe and Ito, for the colour-blind; greys for down."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """A time in seconds: `low` <= `estimate` <= `high`."""

    low: float
    estimate: float
    high: float

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.low + other.low, self.estimate + other.estimate, self.high + other.high)


ZERO = Seconds(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """The gap between two sessions: a failure, an end or a rollback; `cause` is None if the log lacks it.

    `last_known_s` and `opened_at_s` are Unix times: of the last known event of the session before, and of the
    opening of the session after. `known_steps_lost` counts steps that were committed and are not in the
    restored state; it is 0 if the next session continues from a higher step. `steps_lost` also counts
    uncommitted steps. `recovery` is the time without steps until the next session's first step, less the time
    that is not counted; it is None if no step of that session is known. `is_rollback` or
    `is_import` mean that the session before belongs to a rollback or an import and did not train. `phases`
    has the seconds of those phases of `ray_ckpt.core.recovery.PHASES` that are known, in their order. If the
    sessions before and after are measured, the phases add up to `recovery`.
    """

    after_session: int
    session: int
    last_known_s: float
    opened_at_s: float
    known_steps_lost: int
    steps_lost: Seconds | None  # in steps, not seconds; None if the time per step is unknown
    recovery: Seconds | None
    cause: EndCause | None = None
    is_rollback: bool = False
    is_import: bool = False
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsOverTime:
    """A point of progress: `step` steps were done at Unix time `time_s`.

    `survived` means that the newest state comes from these steps.
    """

    session: int
    time_s: float
    step: int
    survived: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpan:
    """The moments of a session, as Unix times in their order, measured or estimated.

    The session opened, began to restore, had its state, began its first step, ended the last step that
    survived and its last step (`last_step`), and closed: the next session opened, or the log ends. Without
    steps `first_s`, `survived_s` and `last_s` are equal; without a restore the first three times are.
    """

    session: int
    opened_s: float
    restoring_s: float
    ready_s: float
    first_s: float
    survived_s: float
    last_s: float
    closed_s: float
    first_step: int
    last_step: int
    cause: EndCause | None
    measured: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Division of the wall time of a run into goodput and causes of badput.

    `step` is the newest on the lineage; `steps_lost` is the number of committed steps that are not on it.
    `step_s` is the mean time of a step, measured or between commits. `clock_back_s` is the most by which a
    clock went back; times near such a jump are wrong by up to that much. `measured_s` is the part of the wall
    time that is not estimated. `not_counted_s`, between a finished session and the next one, or between an
    import and the first training, is not part of the wall time.
    """

    wall_s: float
    productive: Seconds
    badput: Mapping[str, Seconds]  # by the names of CAUSES
    step: int
    steps_lost: int
    step_s: float | None
    clock_back_s: float
    interruptions: Sequence[Interruption]
    progress: Sequence[StepsOverTime]
    spans: Sequence[SessionSpan]
    measured_s: float = 0.0
    not_counted_s: float = 0.0

    @property
    def lost(self) -> Seconds:
        """All badput. Its bounds are closer than the sums of the causes' bounds, as causes share the time."""
        p = self.productive
        return Seconds(self.wall_s - p.high, self.wall_s - p.estimate, self.wall_s - p.low)

    @property
    def ratios(self) -> Seconds | None:
        """Goodput as parts of 1, lowest, estimated, highest; None without wall time."""
        if not self.wall_s:
            return None
        p = self.productive
        return Seconds(*(time_s / self.wall_s for time_s in (p.low, p.estimate, p.high)))


_BEFORE_STEPS = ("group_start", "restore", "startup")  # causes before a session's first step
_Parts: TypeAlias = Mapping[str, Seconds]  # a session's time: productive, and by causes of badput


def measure_goodput(sessions: Sequence[SessionInfo], checkpoints: Iterable[CheckpointInfo]) -> Goodput:
    """Return the goodput of a run from its sessions and all its checkpoints, of any state, in log order.

    Time and memory grow with the number of sessions and checkpoints.
    """
    histories, clock_back_s = session_histories(sessions, {c.id.attempt: c for c in checkpoints})
    pace = step_rate(histories)
    found = [(history, *(_from_facts(history) or _from_estimates(history, pace))) for history in histories]
    parts = [part for _, part, _, _ in found]
    sure = [(part, span) for history, part, span, _ in found if span.measured and not history.is_jumpy]
    steps = sum(span.last_step - span.first_step for _, span in sure)
    stepped_s = sum(span.last_s - span.first_s - part.get("stalls", ZERO).estimate for part, span in sure)
    idle_s = sum(new.opened_s - old.ended_s for old, new in pairwise(histories))
    return Goodput(
        wall_s=histories[-1].ended_s - histories[0].opened_s - idle_s if histories else 0.0,
        productive=sum((part["productive"] for part in parts), ZERO),
        badput={cause: sum((part.get(cause, ZERO) for part in parts), ZERO) for cause in CAUSES},
        step=next((_kept_step(history) for history in reversed(histories) if history.kept), 0),
        steps_lost=sum(history.last_step - _kept_step(history) for history in histories),
        step_s=ratio(stepped_s, steps) or pace.step_s,
        clock_back_s=clock_back_s,
        interruptions=[_interruption(old[:3], new[:3], pace) for old, new in pairwise(found)],
        progress=[point for history, _, span, _ in found for point in _progress(history, span)],
        spans=[replace(s, measured=s.measured and not history.is_jumpy) for history, _, s, _ in found],
        measured_s=sum(known_s for history, _, _, known_s in found if not history.is_jumpy),
        not_counted_s=idle_s,
    )


def _span(
    history: SessionHistory,
    first_s: float,
    survived_s: float,
    last_s: float,
    last_step: int,
    *,
    measured: bool,
) -> SessionSpan:
    return SessionSpan(
        session=history.session,
        opened_s=history.opened_s,
        restoring_s=min(history.restoring_s, history.ready_s),
        ready_s=history.ready_s,
        first_s=first_s,
        survived_s=survived_s,
        last_s=last_s,
        closed_s=history.ended_s,
        first_step=history.first_step,
        last_step=last_step,
        cause=history.cause,
        measured=measured,
    )


# Measured


def _from_facts(history: SessionHistory) -> tuple[_Parts, SessionSpan, float] | None:
    """Return a session's parts, span and measured seconds (the whole session); None if facts are missing."""
    if history.is_offline:
        whole_s, s = history.ended_s - history.opened_s, history.opened_s
        down = f"down_{history.cause or 'unknown'}"
        span = _span(history, s, s, s, history.first_step, measured=True)
        span = replace(span, restoring_s=s, ready_s=s)
        return {"productive": ZERO, down: _exactly(whole_s)}, span, whole_s
    measured = _measured_span(history)
    if measured is None:
        return None
    return _measured_parts(history, measured), measured, measured.closed_s - measured.opened_s


def _from_estimates(history: SessionHistory, pace: StepRate) -> tuple[_Parts, SessionSpan, float]:
    """Return parts, span and measured seconds of a session without all facts.

    The restore is measured; the time after the last step is measured if the end of this step is known.
    """
    last_at_s = history.end.last_at_s if history.end else None
    guess = _estimated(history, pace, last_at_s)
    known_s = history.ready_s - history.opened_s
    if last_at_s is not None:
        known_s += guess.get("down", ZERO).estimate
    down = f"down_{history.cause or 'unknown'}"
    part = {down if cause == "down" else cause: time for cause, time in guess.items()}
    part["group_start"] = _exactly(history.restoring_s - history.opened_s)
    part["restore"] = _exactly(history.ready_s - history.restoring_s)
    kept_s, gone_s = _stalls_between_commits(history)
    part["productive"] = _less(part["productive"], kept_s)
    if gone_s:
        part["lost_steps"] = _less(part["lost_steps"], gone_s)
    part["stalls"] = _exactly(kept_s + gone_s)
    return part, _estimated_span(history, guess), known_s


def _stalls_between_commits(history: SessionHistory) -> tuple[float, float]:
    """Return how long saves held up surviving and lost steps, from the stalls that commits record.

    The last commit's stall is left out, because the stall lies in the estimated time.
    """
    times_s = [commit.time_s for commit in history.commits]
    stalls_s = [commit.stall_s or 0.0 for commit in history.commits]
    newest = max(0, history.kept - 1)  # index of the newest commit that survived
    if not times_s:
        return 0.0, 0.0
    kept_s = min(sum(stalls_s[:newest]), times_s[newest] - times_s[0])
    return kept_s, min(sum(stalls_s[newest:-1]), times_s[-1] - times_s[newest])


def _measured_span(history: SessionHistory) -> SessionSpan | None:
    """Return the span of a session whose log has all facts, else None.

    A session that ended without steps and commits counts as down once it had its state.
    """
    end = history.end
    if end is None:
        return None
    ready_s = history.ready_s
    if end.first_at_s is None or end.last_at_s is None:
        if max(end.step, history.last_step) > history.first_step:
            return None  # there were steps, but a coordinator died in between
        first_s = last_s = survived_s = ready_s
    else:
        first_s = _within(end.first_at_s, ready_s, history.ended_s)
        last_s = _within(end.last_at_s, first_s, history.ended_s)
        survived_s = first_s
        if history.kept:
            newest = history.commits[history.kept - 1]
            survived_s = last_s
            if newest.step < end.step:
                survived_s = _step_done_s(history, newest, end.step, first_s, last_s)
    last_step = max(end.step, history.last_step)
    return _span(history, first_s, survived_s, last_s, last_step, measured=True)


def _step_done_s(
    history: SessionHistory, commit: Commit, last_step: int, first_s: float, last_s: float
) -> float:
    """Return the Unix time at which a commit's step was done, from `first_s` to `last_s`."""
    if commit.lag_s is not None and commit.time_s <= last_s:
        return _within(commit.time_s - commit.lag_s, first_s, last_s)
    part = ratio(commit.step - history.first_step, last_step - history.first_step) or 0.0
    return min(first_s + min(part, 1.0) * (last_s - first_s), max(commit.time_s, first_s))


def _measured_parts(history: SessionHistory, span: SessionSpan) -> dict[str, Seconds]:
    kept_s, gone_s = span.survived_s - span.first_s, span.last_s - span.survived_s
    kept_stall_s, gone_stall_s = _stalls(history, kept_s, gone_s)
    return {
        "productive": _exactly(kept_s - kept_stall_s),
        "lost_steps": _exactly(gone_s - gone_stall_s),
        "stalls": _exactly(kept_stall_s + gone_stall_s),
        "group_start": _exactly(span.restoring_s - span.opened_s),
        "restore": _exactly(span.ready_s - span.restoring_s),
        "startup": _exactly(span.first_s - span.ready_s),
        f"down_{span.cause}": _exactly(span.closed_s - span.last_s),
    }


def _stalls(history: SessionHistory, kept_s: float, gone_s: float) -> tuple[float, float]:
    """Return how long saves held up surviving steps and lost steps.

    A save holds up training after its step, so the last surviving save holds up lost steps, if there are any.
    """
    known = [commit.stall_s for commit in history.commits]
    stalled_s = history.end.stalled_s if history.end else None
    whole_s = sum(s or 0.0 for s in known) if stalled_s is None else stalled_s
    whole_s = min(whole_s, kept_s + gone_s)
    if not gone_s:
        return whole_s, 0.0
    if None in known:
        before_s = whole_s * kept_s / (kept_s + gone_s)
    else:
        before_s = min(sum(s or 0.0 for s in known[: max(0, history.kept - 1)]), kept_s)
    before_s = _within(before_s, whole_s - gone_s, whole_s)
    return before_s, whole_s - before_s


# Estimated


def _estimated(history: SessionHistory, pace: StepRate, last_at_s: float | None) -> dict[str, Seconds]:
    """Return the parts of a session's time from its restore to the opening of the next session.

    `last_at_s` is the time at which the session's last step ended, if known.
    """
    ready_s = history.ready_s
    if not history.commits:
        whole = _exactly(history.ended_s - ready_s)
        return {"productive": ZERO, "no_commit": whole}
    first_s, first_step = history.commits[0][:2]
    before_s = first_s - ready_s
    step_s = ratio(*history.span) or pace.step_s
    steps_s = before_s if step_s is None else min(before_s, step_s * (first_step - history.first_step))
    early = Seconds(0.0, steps_s, before_s)
    kept_s = history.commits[history.kept - 1].time_s - first_s if history.kept else 0.0
    gone_s = history.last_s - first_s - kept_s
    tail_s = history.ended_s - history.last_s
    interval_s = ratio(history.span[0], len(history.commits) - 1) or pace.interval_s or before_s
    tail = Seconds(0.0, min(tail_s, interval_s / 2), tail_s)
    if last_at_s is not None:
        tail = _exactly(_within(last_at_s - history.last_s, 0.0, tail_s))
    gone = _exactly(gone_s) + tail
    return {
        "productive": _exactly(kept_s) + early if history.kept else ZERO,
        "lost_steps": gone if history.kept else gone + early,
        "startup": Seconds(0.0, before_s - steps_s, before_s),
        "down": Seconds(tail_s - tail.high, tail_s - tail.estimate, tail_s - tail.low),
    }


def _estimated_span(history: SessionHistory, part: _Parts) -> SessionSpan:
    first_s = history.ready_s + part.get("startup", ZERO).estimate
    last_s = history.ended_s - part["down"].estimate if history.commits else first_s
    survived_s = max(first_s, history.commits[history.kept - 1].time_s) if history.kept else first_s
    last_step = max(history.last_step, history.end.step if history.end else 0)
    return _span(history, first_s, survived_s, last_s, last_step, measured=False)


# Interruptions and progress


def _interruption(
    before: tuple[SessionHistory, _Parts, SessionSpan],
    after: tuple[SessionHistory, _Parts, SessionSpan],
    pace: StepRate,
) -> Interruption:
    (old, old_parts, old_times), (new, new_parts, new_times) = before, after
    known = max(0, old.last_step - new.first_step)
    if old.end is not None or old.is_offline:
        steps_lost: Seconds | None = _exactly(max(0, old_times.last_step - new.first_step))
    else:
        steps_lost = _guessed_steps(old, old_times, known, pace)
    trained = bool(new.commits) or new_times.last_step > new_times.first_step
    return Interruption(
        after_session=old.session,
        session=new.session,
        last_known_s=_last_known_s(old),
        opened_at_s=new.opened_s,
        known_steps_lost=known,
        steps_lost=steps_lost,
        recovery=_idle(old_parts, ("down", "no_commit")) + _idle(new_parts, _BEFORE_STEPS)
        if trained
        else None,
        cause=None if old.is_offline else old.cause,
        is_rollback=old.is_offline and not old.commits,
        is_import=old.is_offline and bool(old.commits),
        phases=_phases(old, old_times, new),
    )


def _phases(old: SessionHistory, old_times: SessionSpan, new: SessionHistory) -> dict[str, float]:
    """Return the known phases of a recovery; after a finished session, of its end and the next start."""
    is_known = old_times.measured or (old.end is not None and old.end.last_at_s is not None)
    last_s = old_times.last_s if old_times.measured else _last_known_s(old)
    info = new.info
    if old.cause == "finished":  # the time between the sessions is not counted, and no launcher noticed it
        last_s = new.opened_s - (old.ended_s - last_s)
        info = replace(info, noticed_at_s=None, previous_ended_at_s=None, started_at_s=None)
    first_at_s = new.end.first_at_s if new.end is not None else None
    has_restore = new.restored_s is not None
    times = RecoveryTimes(
        since_s=old.opened_s,
        last_s=last_s if is_known else None,
        opened_s=new.opened_s,
        restoring_s=new.restoring_s if has_restore and new.restore_s is not None else None,
        ready_s=new.restored_s,
        first_s=None if first_at_s is None else _within(first_at_s, new.ready_s, new.ended_s),
    )
    return recovery_phases(times, info)


def _guessed_steps(old: SessionHistory, times: SessionSpan, known: int, pace: StepRate) -> Seconds | None:
    step_s = ratio(*old.span) or pace.step_s
    if step_s is None:
        return None
    tail_s = old.ended_s - old.last_s
    tail_steps_s = max(0.0, times.last_s - old.last_s) if old.commits else 0.0
    return Seconds(known, known + tail_steps_s / step_s, known + tail_s / step_s)


def _last_known_s(history: SessionHistory) -> float:
    if history.end is None or history.end.last_at_s is None:
        return history.last_s
    return _within(history.end.last_at_s, history.opened_s, history.ended_s)


def _idle(parts: _Parts, causes: tuple[str, ...]) -> Seconds:
    return sum((time for cause, time in parts.items() if cause.startswith(causes)), ZERO)


def _progress(history: SessionHistory, times: SessionSpan) -> Iterable[StepsOverTime]:
    def point(time_s: float, step: int, survived: bool) -> StepsOverTime:
        return StepsOverTime(session=history.session, time_s=time_s, step=step, survived=survived)

    yield point(history.opened_s, history.first_step, history.kept > 0)
    if times.measured or times.ready_s > times.opened_s:
        yield point(times.first_s, history.first_step, history.kept > 0)
    last_s = times.first_s
    for number, commit in enumerate(history.commits):
        done_s = commit.time_s
        if times.measured:
            done_s = _step_done_s(history, commit, times.last_step, times.first_s, times.last_s)
        last_s = max(last_s, done_s) if times.measured else done_s
        yield point(last_s, commit.step, number < history.kept)
    if times.measured and times.last_s > last_s:
        yield point(times.last_s, times.last_step, times.survived_s == times.last_s)


def _kept_step(history: SessionHistory) -> int:
    return history.commits[history.kept - 1].step if history.kept else history.first_step


def _exactly(time_s: float) -> Seconds:
    return Seconds(time_s, time_s, time_s)


def _less(time: Seconds, part_s: float) -> Seconds:
    return Seconds(time.low - part_s, time.estimate - part_s, time.high - part_s)


def _within(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
