"""The sessions of a log with their commits and times; times are put in order where clocks disagree."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import NamedTuple

from ray_ckpt.types import CheckpointInfo, EndCause, SessionEnd, SessionInfo

CLOCK_SLACK_S = 1.0  # by which clocks of coordinators may differ; times in the log are no finer


class Commit(NamedTuple):
    """A commit; `lag_s` is the time since its step's end, `stall_s` the time that training waited."""

    time_s: float
    step: int
    lag_s: float | None
    stall_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionHistory:
    """A session with its commits, whose times and steps are in order.

    `info` is the session as the log has it. `kept` is the number of commits on the lineage. `cause` is the
    cause of the session's end; for a session without training, a rollback or an import, that of the previous
    session's end, and "finished" before the first training. `is_jumpy` means that a clock jumped.
    """

    info: SessionInfo
    session: int
    opened_s: float
    restored_s: float | None
    restore_s: float | None  # duration of the restore
    ended_s: float
    first_step: int
    commits: tuple[Commit, ...]
    kept: int
    end: SessionEnd | None
    cause: EndCause | None
    is_offline: bool
    is_jumpy: bool

    @property
    def ready_s(self) -> float:
        """Unix time at which all ranks had their state."""
        return self.opened_s if self.restored_s is None else self.restored_s

    @property
    def restoring_s(self) -> float:
        """Unix time at which the slowest rank began to restore; `ready_s` if the duration is unknown."""
        return max(self.opened_s, self.ready_s - (self.restore_s or 0.0))

    @property
    def last_step(self) -> int:
        return self.commits[-1].step if self.commits else self.first_step

    @property
    def last_s(self) -> float:
        return self.commits[-1].time_s if self.commits else self.opened_s

    @property
    def span(self) -> tuple[float, int]:
        """Seconds and steps from the session's first commit to its last commit."""
        if not self.commits:
            return 0.0, 0
        return self.last_s - self.commits[0].time_s, self.last_step - self.commits[0].step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRate:
    """Seconds per step and per save of the run, between commits; None where nothing was measured."""

    step_s: float | None
    interval_s: float | None


def session_histories(
    sessions: Sequence[SessionInfo], known: Mapping[str, CheckpointInfo]
) -> tuple[list[SessionHistory], float]:
    """Return each session with its commits, and the largest backward jump of the clock in seconds."""
    commits: defaultdict[int, list[CheckpointInfo]] = defaultdict(list)
    for checkpoint in known.values():
        commits[checkpoint.id.session].append(checkpoint)
    ends = _branch_points(sessions, known, commits)
    logged_s = list(_moments(sessions, commits))
    in_order_s, back_s = _in_order(logged_s)
    moved = [abs(b - a) > CLOCK_SLACK_S for a, b in zip(logged_s, in_order_s, strict=True)]
    histories: list[SessionHistory] = []
    at = 0  # index of the session's first moment
    cause: EndCause | None = "finished"  # before the first training, the time is not counted either
    for info in sessions:
        own = commits[info.session]
        has_restore = info.restored_at_s is not None
        count = 1 + has_restore + len(own)
        times_s = in_order_s[at : at + count]
        opened_s, is_jumpy = times_s[0], any(moved[at : at + count + 1])  # including the next opening
        at += count
        if histories:
            histories[-1] = _until(histories[-1], opened_s)
        first = _first_step(info, own, known)
        steps = islice(accumulate((c.step for c in own), max, initial=first), 1, None)
        times_of_own = zip(own, times_s[1 + has_restore :], steps, strict=True)
        points = tuple(Commit(time_s, step, save_s(c), c.stall_s) for c, time_s, step in times_of_own)
        last_at_s = info.ended.last_at_s if info.ended else None
        if not info.is_offline:
            cause = info.ended.cause if info.ended else None
        end = ends.get(info.session, -1)
        histories.append(
            SessionHistory(
                info=info,
                session=info.session,
                opened_s=opened_s,
                restored_s=times_s[1] if has_restore else None,
                restore_s=info.restore_s,
                ended_s=max(times_s[-1], last_at_s or times_s[-1]),
                first_step=first,
                commits=points,
                kept=sum(c.seq <= end for c in own),
                end=info.ended,
                cause=cause,
                is_offline=info.is_offline,
                is_jumpy=is_jumpy,
            )
        )
    return histories, back_s


def _first_step(info: SessionInfo, own: Sequence[CheckpointInfo], known: Mapping[str, CheckpointInfo]) -> int:
    """Return the step with which a session begins; an import begins with its checkpoint."""
    if info.is_import and own:
        return own[0].step
    return known[info.resumed_from].step if info.resumed_from else info.origin_step or 0


def _until(history: SessionHistory, opened_s: float) -> SessionHistory:
    """Return the history, closed at the next opening, or at the last event if the session finished."""
    is_over = history.cause == "finished"
    return replace(history, ended_s=min(history.ended_s, opened_s) if is_over else opened_s)


def _moments(
    sessions: Sequence[SessionInfo], commits: Mapping[int, Sequence[CheckpointInfo]]
) -> Iterable[float]:
    """Yield the times of opening, restore and commits of each session, in log order."""
    for info in sessions:
        yield info.opened_at_s
        if info.restored_at_s is not None:
            yield info.restored_at_s
        yield from (checkpoint.committed_at_s for checkpoint in commits.get(info.session, ()))


def _in_order(logged_s: Sequence[float]) -> tuple[list[float], float]:
    """Return the times by a clock that never goes back, and the largest backward jump of the logged times.

    A single time that is later than the next two, while these two are not before the previous time, was taken
    from a wrong clock and is replaced by the next time.
    """
    times_s: list[float] = []
    back_s, newest_s = 0.0, -math.inf
    for number, time_s in enumerate(logged_s):
        back_s, newest_s = max(back_s, newest_s - time_s), max(newest_s, time_s)
        last_s, later_s = (times_s[-1] if times_s else -math.inf), logged_s[number + 1 : number + 3]
        if later_s and last_s <= min(later_s) and max(later_s) < time_s:
            time_s = later_s[0]
        times_s.append(max(last_s, time_s))
    return times_s, back_s


def save_s(info: CheckpointInfo) -> float | None:
    """Return the seconds from a save's beginning, the end of its step, to its commit; None if unknown."""
    if info.capture_s is None or info.local_s is None:
        return None
    return info.capture_s + info.local_s + (info.replicate_s or 0.0)


def _branch_points(
    sessions: Sequence[SessionInfo],
    known: Mapping[str, CheckpointInfo],
    commits: Mapping[int, Sequence[CheckpointInfo]],
) -> dict[int, float]:
    """Return, for the last session and its ancestors, the last record on which the newest state depends.

    The record is -1 for newer sessions without a remaining checkpoint.
    """
    by_number = {info.session: info for info in sessions}
    ends: dict[int, float] = {}
    info = sessions[-1] if sessions else None
    last_seq, is_found = math.inf, False
    while info is not None and info.session not in ends:
        if not is_found:
            last_seq = _newest_left([c for c in commits.get(info.session, ()) if c.seq <= last_seq])
            is_found = last_seq >= 0
        ends[info.session] = last_seq
        branch = known[info.resumed_from] if info.resumed_from else None
        info = by_number[branch.id.session] if branch else None
        last_seq = branch.seq if branch else -1
    return ends


def _newest_left(commits: Sequence[CheckpointInfo]) -> int:
    """Return the record of the newest checkpoint that contains a session's progress; -1 without one.

    The progress of retired and collected checkpoints is contained in newer ones. If the newest checkpoint is
    lost, a restart needs a live one.
    """
    if commits and commits[-1].state != "lost":
        return commits[-1].seq
    return max((c.seq for c in commits if c.state == "live"), default=-1)


def step_rate(histories: Sequence[SessionHistory]) -> StepRate:
    spans = [t.span for t in histories]
    spanned_s = sum(s for s, _ in spans)
    return StepRate(
        step_s=ratio(spanned_s, sum(n for _, n in spans)),
        interval_s=ratio(spanned_s, sum(len(t.commits) - 1 for t in histories if t.commits)),
    )


def ratio(whole: float, count: float) -> float | None:
    """Return `whole / count`, or None if either is not positive, as nothing was measured."""
    return whole / count if whole > 0 and count > 0 else None
