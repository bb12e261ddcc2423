"""Progress of the current session: the last report of each rank, and the attempts that have ended.

No other module stores this progress. The record starts anew with each session.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ray_ckpt.core import messages as m
from ray_ckpt.core.captures import Captures
from ray_ckpt.core.context import Context
from ray_ckpt.core.values import RankProgress, SessionKey
from ray_ckpt.types import AttemptId

PROGRESS_GATHER_S = 0.9  # time to gather the reports of a node's ranks, one per rank and second
PROGRESS_NODE_S = 0.001  # period per node of a large group: a coordinator takes 1,000 reports in a second
MAX_PROGRESS_S = 10.0  # of the largest groups, so that their status stays current
FRESH_S = 10.0  # of a small group, whose nodes report once a second; older reports prove nothing
FRESH_PERIODS = 3  # of a large group: a report comes after a period, for most of which a relay may keep it


@dataclass(frozen=True, slots=True, eq=False)  # ranks share a report: compare by identity, which is fast
class RankReport:
    """The last report of a rank, and the monotonic time of its arrival."""

    progress: RankProgress
    at_s: float


def progress_period_s(num_nodes: int) -> float:
    """Return the seconds between two reports of progress by each node of a group."""
    return min(max(PROGRESS_GATHER_S, num_nodes * PROGRESS_NODE_S), MAX_PROGRESS_S)


def fresh_s(num_nodes: int) -> float:
    """Return the age in seconds beyond which a report of progress proves nothing."""
    return max(FRESH_S, FRESH_PERIODS * progress_period_s(num_nodes))


def merge(events: Sequence[m.RanksProgressed]) -> tuple[m.RanksProgressed, ...]:
    """Merge the reports of several nodes: events that differ in session or barrier stay apart.

    Ranks with the same steps and counts share one RankProgress with the largest of their times, so that the
    event stays small: neither its bytes nor the work to handle it grow with the number of nodes.
    """
    groups: dict[tuple[SessionKey, int], list[m.RanksProgressed]] = {}
    for event in events:
        groups.setdefault((event.session_key, event.met), []).append(event)
    return tuple(
        m.RanksProgressed(
            session_key=session_key,
            ranks=_shared({rank: found for event in group for rank, found in event.ranks.items()}),
            captured=tuple(captured for event in group for captured in event.captured),
            met=met,
        )
        for (session_key, met), group in groups.items()
    )


def _shared(ranks: Mapping[int, RankProgress]) -> dict[int, RankProgress]:
    alike: dict[RankProgress, list[RankProgress]] = {}
    for progress in ranks.values():
        alike.setdefault(_without_times(progress), []).append(progress)
    shared = {
        key: replace(
            key,
            since_s=max(each.since_s for each in found),
            step_s=max(each.step_s for each in found),
            stall_s=max(each.stall_s for each in found),
        )
        for key, found in alike.items()
    }
    return {rank: shared[_without_times(progress)] for rank, progress in ranks.items()}


def _without_times(progress: RankProgress) -> RankProgress:
    return replace(progress, since_s=0.0, step_s=0.0, stall_s=0.0)


class SessionProgress:
    """Reports of the ranks of one session; a new session begins without reports."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._begin((0, 0))

    def _begin(self, session_key: SessionKey) -> None:
        self._session_key = session_key
        self._reports: dict[int, RankReport] = {}
        self._distinct: tuple[RankReport, ...] | None = None  # of `_reports`; None: not listed yet
        self._saved_before: set[int] = set()  # ranks that have taken part in a save
        plan = self._context.plan
        self._fresh_s = fresh_s(len(plan.nodes) if plan is not None else 0)
        self._captures = Captures(self._fresh_s)
        self._idle_since_s: dict[int, float] = {}  # idle rank -> when others began to wait
        self._ended_step = self._last_step = 0
        self._num_ended = self._num_skipped = 0

    def _enter(self) -> None:
        plan = self._context.plan
        session_key = plan.session_key if plan is not None else (0, 0)
        if session_key != self._session_key:
            self._begin(session_key)

    # -- reports -------------------------------------------------------------------------------------

    def progressed(self, event: m.RanksProgressed, may_open: Callable[[AttemptId], bool]) -> bool:
        """Record a report; return False if it is from another session. `may_open`: see `OpenAttempts`."""
        self._enter()
        plan, now_s = self._context.plan, self._context.now_s
        if plan is None or event.session_key != plan.session_key:
            return False
        made = {id(progress): RankReport(progress, now_s) for progress in event.distinct}
        self._distinct = None
        self._reports |= {rank: made[id(progress)] for rank, progress in event.ranks.items()}
        self._last_step = max([self._last_step, *(progress.step for progress in event.distinct)])
        captured = [found for found in event.captured if may_open(found.attempt)]
        self._captures.reported(captured, event.distinct, now_s)
        self._saved_before |= {rank for found in captured for rank in found.ranks}
        return True

    def took_part(self, ranks: Iterable[int]) -> None:
        """Record that ranks have saved in this session, or refused to save."""
        self._enter()
        self._saved_before.update(ranks)

    def attempt_ended(self, attempt: AttemptId) -> None:
        """Record that an attempt was committed or dropped."""
        self._enter()
        if (attempt.epoch, attempt.session) == self._session_key:
            self._ended_step = max(self._ended_step, attempt.step)
            self._num_ended += 1

    def attempt_skipped(self) -> tuple[int, int]:
        """Count an attempt that a rank skipped; return the numbers of skipped and of ended attempts."""
        self._num_skipped += 1
        return self._num_skipped, self._num_ended

    # -- steps ---------------------------------------------------------------------------------------

    @property
    def captures(self) -> Captures:
        """Attempts that only some ranks have captured."""
        self._enter()
        return self._captures

    @property
    def ended_step(self) -> int:
        """The highest step whose attempt was committed or dropped; 0 if there is none."""
        self._enter()
        return self._ended_step

    @property
    def last_step(self) -> int:
        """The highest optimizer step that any rank has reported; 0 if there is no report."""
        self._enter()
        return self._last_step

    @property
    def step_s(self) -> float:
        """Median over the ranks of the seconds that a recent step took; 0 if no rank has reported a time."""
        times_s = [r.progress.step_s for r in self.reports().values() if r.progress.step_s > 0]
        return statistics.median(times_s) if times_s else 0.0

    def reports(self) -> dict[int, RankReport]:
        """Return the last report of each rank."""
        self._enter()
        return self._reports

    def distinct(self) -> tuple[RankReport, ...]:
        """Return the last reports without duplicates of objects that ranks share, as in a relay's report."""
        self._enter()
        if self._distinct is None:
            self._distinct = tuple(dict.fromkeys(self._reports.values()))
        return self._distinct

    def by_rank(self) -> dict[int, RankProgress]:
        """Return the progress of each rank by its last report."""
        return {rank: report.progress for rank, report in self.reports().items()}

    def num_saved(self) -> Counter[int]:
        """Return, for each step, the number of ranks whose last save was at that step."""
        return Counter(report.progress.saved_step for report in self.reports().values())

    # -- one rank ------------------------------------------------------------------------------------

    def has_saved(self, rank: int, step: int) -> bool:
        """Return True if the rank has reported a save at `step`; the save may not be on disk yet."""
        report = self._reports.get(rank)
        return report is not None and report.progress.saved_step == step and self._takes_part(rank, report)

    def is_idle(self, rank: int) -> bool:
        """Return True if a live rank has neither saved nor completed a step in this session."""
        report = self._reports.get(rank)
        if report is None or self._context.now_s - report.at_s > self._fresh_s:
            return False
        is_at_start = report.progress.step == report.progress.saved_step
        return is_at_start and not self._takes_part(rank, report)

    def note_idle(self, since_s: Mapping[int, float]) -> None:
        """Replace the idle ranks that others wait for; `since_s` has the start of each wait."""
        known_s, now_s = self._idle_since_s, self._context.now_s
        self._idle_since_s = {k: min(known_s.get(k, now_s), at_s) for k, at_s in since_s.items()}

    def idle_s(self, rank: int) -> float:
        """Return the seconds for which other ranks have waited for an idle rank."""
        return self._context.now_s - self._idle_since_s.get(rank, self._context.now_s)

    def has_passed(self, rank: int, step: int) -> bool:
        """Return True if, by its last report, a rank will never capture a step."""
        report = self._reports.get(rank)
        return report is not None and self._captures.has_passed(report.progress, step)

    def _takes_part(self, rank: int, report: RankReport) -> bool:
        return rank in self._saved_before or report.progress.saved_before is not None
