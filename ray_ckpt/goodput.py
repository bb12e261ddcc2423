"""Goodput of a run, estimated from its log alone.

    goodput = time of steps whose effect survived / wall time

A step counts if the newest state comes from it, and once: what was lost and done again is badput. That is
the "runtime goodput" of Google's ml-goodput-measurement: productive step time / elapsed time, without the
progress that a disruption wasted. It can rise while the job as a whole gets slower, by slower steps say, so
wall time stands beside it.

A log has the opening of each session and the time and step of each commit, and no steps. So:

- Between two commits of a session all time counts as time of steps: stalls, evaluation and slow data in there
  are not seen. A commit comes a little later than its step, by what writing and copying take.
- From the opening of a session to its first commit it restored and then trained. How long each took is not
  known; the estimate takes the session's own pace between commits, else the run's, else all of it as steps.
- From the last commit of a session to the opening of the next one it trained on, died, and was missed. The
  estimate of the steps in there is half an interval between saves, what a failure costs on average when it
  comes at any time (Young 1974), and never more than there was time.
- A session from scratch is taken to begin at step 0, also one that began with a checkpoint of another run.
- Wall time runs from the first session's opening to the last thing that a session did by the log; what has
  happened since is not known.
- A run that somebody ended and prolonged looks as one that failed; a rollback is a session of its own.
- Times are those of coordinators' clocks. One that went back is taken as standing still.

So each time is an estimate between two bounds that hold whatever pace and interval the estimate assumes. The
estimates of goodput and of all causes of badput add up to the wall time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ray_ckpt.types import CheckpointInfo, SessionInfo

__all__ = ["Goodput", "Interruption", "Progress", "Seconds", "estimate_goodput"]

CAUSES: Mapping[str, str] = {
    "startup": "from the opening of a session to its first step",
    "lost_steps": "steps whose effect was lost",
    "down": "from the last step before an interruption to the next session",
    "no_commit": "sessions that committed nothing",
}


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
    """What stands between two sessions: a failure, an end, a rollback; the log does not tell which.

    `last_known_s` and `opened_at_s` are Unix times: the last that the log knows of the session before, and
    the opening of the one after. `known_steps_lost` were committed and are not in what was restored; going on
    from a higher step loses none. `steps_lost` adds those that no commit tells of. `recovery` is the time
    without steps until the next session's first one, None where that session committed nothing.
    """

    after_session: int
    session: int
    last_known_s: float
    opened_at_s: float
    known_steps_lost: int
    steps_lost: Seconds | None  # in steps, not seconds; None where the pace is not known
    recovery: Seconds | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A moment that the log knows: `step` steps were done at Unix time `time_s`. `survived`: see Goodput."""

    session: int
    time_s: float
    step: int
    survived: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """What became of the wall time of a run.

    `step` is the newest on the lineage; `steps_lost` were committed and are not on it. `step_s` is the mean
    time of a step between commits. `clock_back_s` is by how much clocks went back, at most at a time.
    """

    wall_s: float
    productive: Seconds
    badput: Mapping[str, Seconds]  # by the names of CAUSES
    step: int
    steps_lost: int
    step_s: float | None
    clock_back_s: float
    interruptions: Sequence[Interruption]
    progress: Sequence[Progress]

    @property
    def lost(self) -> Seconds:
        """All badput. Its bounds are closer than the sums of the causes': what one is not, another one is."""
        p = self.productive
        return Seconds(self.wall_s - p.high, self.wall_s - p.estimate, self.wall_s - p.low)

    @property
    def ratios(self) -> Seconds | None:
        """Goodput as parts of 1, lowest, estimated, highest; None without wall time."""
        if not self.wall_s:
            return None
        p = self.productive
        return Seconds(*(time_s / self.wall_s for time_s in (p.low, p.estimate, p.high)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tenure:
    """A session with its commits, times in order. `kept`: how many of the commits are on the lineage."""

    session: int
    opened_s: float
    ended_s: float
    first_step: int
    commits: tuple[tuple[float, int], ...]  # (time, step), both rising
    kept: int

    @property
    def last_step(self) -> int:
        return self.commits[-1][1] if self.commits else self.first_step

    @property
    def last_s(self) -> float:
        return self.commits[-1][0] if self.commits else self.opened_s

    @property
    def span(self) -> tuple[float, int]:
        """Seconds and steps between its commits."""
        if not self.commits:
            return 0.0, 0
        return self.last_s - self.commits[0][0], self.last_step - self.commits[0][1]


def estimate_goodput(sessions: Sequence[SessionInfo], checkpoints: Iterable[CheckpointInfo]) -> Goodput:
    """The goodput of a run by its sessions and all its checkpoints, whatever has become of them, both in log
    order. Takes time and memory by the number of them.
    """
    known = {c.id.attempt: c for c in checkpoints}
    tenures, clock_back_s = _tenures(sessions, known)
    spans = [t.span for t in tenures]
    step_s = _ratio(sum(s for s, _ in spans), sum(n for _, n in spans))
    interval_s = _ratio(sum(s for s, _ in spans), sum(len(t.commits) - 1 for t in tenures if t.commits))
    parts = [_parts(t, step_s, interval_s) for t in tenures]
    return Goodput(
        wall_s=tenures[-1].ended_s - tenures[0].opened_s if tenures else 0.0,
        productive=sum((part.productive for part in parts), ZERO),
        badput={cause: sum((getattr(part, cause) for part in parts), ZERO) for cause in CAUSES},
        step=tenures[-1].last_step if tenures else 0,  # the last session is always on the lineage
        steps_lost=sum(t.last_step - _kept_step(t) for t in tenures),
        step_s=step_s,
        clock_back_s=clock_back_s,
        interruptions=[_interruption(*pair, step_s) for pair in pairwise(zip(tenures, parts, strict=True))],
        progress=[point for t in tenures for point in _progress(t)],
    )


def _tenures(
    sessions: Sequence[SessionInfo], known: Mapping[str, CheckpointInfo]
) -> tuple[list[_Tenure], float]:
    """Each session with its commits, and by how much the clock went back at most."""
    commits: defaultdict[int, list[CheckpointInfo]] = defaultdict(list)
    for checkpoint in known.values():
        commits[checkpoint.id.session].append(checkpoint)
    ends = _branch_points(sessions, known)
    tenures: list[_Tenure] = []
    now_s, back_s = -math.inf, 0.0

    def moment(time_s: float) -> float:
        nonlocal now_s, back_s
        if time_s < now_s:
            back_s = max(back_s, now_s - time_s)
        now_s = max(now_s, time_s)
        return now_s

    for info in sessions:
        opened_s = moment(info.opened_at_s)
        if tenures:
            tenures[-1] = replace(tenures[-1], ended_s=opened_s)
        first = known[info.resumed_from].step if info.resumed_from else 0
        done = first
        points: list[tuple[float, int]] = []
        for checkpoint in commits[info.session]:
            done = max(done, checkpoint.step)
            points.append((moment(checkpoint.committed_at_s), done))
        end = ends.get(info.session, -1)
        tenures.append(
            _Tenure(
                session=info.session,
                opened_s=opened_s,
                ended_s=now_s,
                first_step=first,
                commits=tuple(points),
                kept=sum(c.seq <= end for c in commits[info.session]),
            )
        )
    return tenures, back_s


def _branch_points(sessions: Sequence[SessionInfo], known: Mapping[str, CheckpointInfo]) -> dict[int, float]:
    """The last session and its ancestors, each with its last record that the newest state comes from."""
    by_number = {info.session: info for info in sessions}
    ends: dict[int, float] = {}
    info = sessions[-1] if sessions else None
    last_seq = math.inf
    while info is not None and info.session not in ends:
        ends[info.session] = last_seq
        branch = known[info.resumed_from] if info.resumed_from else None
        info = by_number[branch.id.session] if branch else None
        last_seq = branch.seq if branch else -1
    return ends


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What became of the time of one session, up to the opening of the next one."""

    productive: Seconds = ZERO
    startup: Seconds = ZERO
    lost_steps: Seconds = ZERO
    down: Seconds = ZERO
    no_commit: Seconds = ZERO


def _parts(tenure: _Tenure, run_step_s: float | None, run_interval_s: float | None) -> _Parts:
    if not tenure.commits:
        whole_s = tenure.ended_s - tenure.opened_s
        return _Parts(no_commit=Seconds(whole_s, whole_s, whole_s))
    first_s, first_step = tenure.commits[0]
    before_s = first_s - tenure.opened_s
    step_s = _ratio(*tenure.span) or run_step_s
    steps_s = before_s if step_s is None else min(before_s, step_s * (first_step - tenure.first_step))
    early = Seconds(0.0, steps_s, before_s)
    kept_s = tenure.commits[tenure.kept - 1][0] - first_s if tenure.kept else 0.0
    gone_s = tenure.last_s - first_s - kept_s
    tail_s = tenure.ended_s - tenure.last_s
    interval_s = _ratio(tenure.span[0], len(tenure.commits) - 1) or run_interval_s or before_s
    tail_steps_s = min(tail_s, interval_s / 2)
    kept, gone = Seconds(kept_s, kept_s, kept_s), Seconds(gone_s, gone_s, gone_s)
    gone += Seconds(0.0, tail_steps_s, tail_s)
    return _Parts(
        productive=kept + early if tenure.kept else ZERO,
        lost_steps=gone if tenure.kept else gone + early,
        startup=Seconds(0.0, before_s - steps_s, before_s),
        down=Seconds(0.0, tail_s - tail_steps_s, tail_s),
    )


def _interruption(
    before: tuple[_Tenure, _Parts], after: tuple[_Tenure, _Parts], run_step_s: float | None
) -> Interruption:
    (old, old_parts), (new, new_parts) = before, after
    known = max(0, old.last_step - new.first_step)
    step_s = _ratio(*old.span) or run_step_s
    tail_s = old.ended_s - old.last_s
    tail_steps_s = tail_s - old_parts.down.estimate - old_parts.no_commit.estimate
    return Interruption(
        after_session=old.session,
        session=new.session,
        last_known_s=old.last_s,
        opened_at_s=new.opened_s,
        known_steps_lost=known,
        steps_lost=None
        if step_s is None
        else Seconds(known, known + tail_steps_s / step_s, known + tail_s / step_s),
        recovery=old_parts.down + old_parts.no_commit + new_parts.startup if new.commits else None,
    )


def _progress(tenure: _Tenure) -> Iterable[Progress]:
    yield Progress(
        session=tenure.session,
        time_s=tenure.opened_s,
        step=tenure.first_step,
        survived=tenure.kept > 0,
    )
    for number, (time_s, step) in enumerate(tenure.commits):
        yield Progress(session=tenure.session, time_s=time_s, step=step, survived=number < tenure.kept)


def _kept_step(tenure: _Tenure) -> int:
    return tenure.commits[tenure.kept - 1][1] if tenure.kept else tenure.first_step


def _ratio(whole: float, count: float) -> float | None:
    """None where either is zero: nothing was measured."""
    return whole / count if whole > 0 and count > 0 else None
