"""Content of a report: the facts of a catalog, and conclusions from them.

Only the log is read, no file of a checkpoint: the report shows only the damage that scrubs and drills have
recorded in the log. `now_s` is the time by the reader's clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from ray_ckpt.analysis.goodput import Goodput, Seconds, measure_goodput
from ray_ckpt.analysis.session_history import CLOCK_SLACK_S, save_s
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.texts import count_text, duration_text, short_text, tiers_text, utc_text
from ray_ckpt.types import FAILURES, CheckpointInfo, EndCause, Level, SessionInfo

MAX_EVENTS = 20_000  # newest events in the log; the page draws events in bins anyway
MAX_CHECKPOINTS = 40  # newest checkpoints in the table
MAX_TROUBLES = 30  # newest interruptions in the table
MAX_SESSIONS = 100  # newest sessions in the lineage
MAX_IN_CLUSTER = 20  # newest checkpoints without a durable copy that are named
MAX_DRILLS = 10  # newest checkpoints whose drill is named
MAX_METRICS = 3  # metrics of a checkpoint, the first by name
MAX_QUIET_S = 86_400.0  # time without a checkpoint until a warning, if the usual interval is unknown
OVERDUE = 3.0  # number of usual intervals without a checkpoint until a warning, for an open session
RECENT_SAVES = 50  # newest saves, from which the usual interval is computed
SAME_S = 0.05  # bounds that differ by less are printed as one time
ALL_MEASURED = 99.95  # percent of the wall time: the rest would be printed as zero

Tone: TypeAlias = Literal["good", "warn", "bad", "plain"]

CAUSE_TEXT: Mapping[EndCause, str] = {
    "finished": "finished",
    "process": "process failed",
    "node": "node lost",
    "preemption": "node left after a notice",
    "replaced": "replaced by another launcher",
    "launcher": "launcher died or was stopped",
}
_DRAWN_OPS = ("retired", "collected", "lost", "pin", "unpin", "verified", "drilled", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A record of the log: `op` is the name in the log, `time_s` is in Unix seconds."""

    op: str
    time_s: float
    step: int | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The end of a session and its consequences; `next_session` is None until another session follows.

    `steps_lost` is in steps, `recovery` in seconds; see `goodput.Interruption`. `recovery` extends through
    sessions without a step up to the first step of a later one, and is None if there is no such step;
    `is_waiting` is then true if the session that follows may still do a step. `restore_s` is the time that
    the next session's slowest rank took to restore, `read_bytes` the bytes that the next session read, by
    tier. `phases` are those of the recovery up to the next session; see `goodput.Interruption`.
    """

    cause: EndCause | None
    ended_s: float
    session: int
    next_session: int | None
    steps_lost: Seconds | None
    recovery: Seconds | None
    is_waiting: bool
    restore_s: float | None = None
    read_bytes: Mapping[str, float] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Durations of one phase of saves, in seconds, over the `count` saves for which the log has the phase.

    99 % of the saves take no longer than `p99_s`.
    """

    name: str
    what: str
    count: int
    median_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Answer to a first question about a run: `head` in a few words, `text` in one or two sentences."""

    tone: Tone
    title: str
    head: str
    text: str


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Facts of a run: `checkpoints` are all in the log, in log order; `lineage` are the live ones on it."""

    run_name: str
    run_uid: str
    where: str
    now_s: float
    sessions: Sequence[SessionInfo]
    checkpoints: Sequence[CheckpointInfo]
    lineage: Sequence[CheckpointInfo]
    events: Sequence[Event]

    @cached_property
    def goodput(self) -> Goodput:
        return measure_goodput(self.sessions, self.checkpoints)

    @cached_property
    def by_attempt(self) -> Mapping[str, CheckpointInfo]:
        return {info.id.attempt: info for info in self.checkpoints}

    @cached_property
    def live(self) -> Sequence[CheckpointInfo]:
        return [info for info in self.checkpoints if info.state == "live"]

    @cached_property
    def in_cluster(self) -> Sequence[CheckpointInfo]:
        """Live checkpoints that are not on the storage path and would be lost with the cluster."""
        return [info for info in self.live if info.level < Level.DURABLE]

    @cached_property
    def exported(self) -> Sequence[CheckpointInfo]:
        """Live and lost checkpoints with items alone on the storage path, on the lineage or not."""
        return [info for info in self.checkpoints if info.kept_items]

    @cached_property
    def interval_s(self) -> float | None:
        """Median time between recent commits of a session; None for fewer than three."""
        recent = self.checkpoints[-RECENT_SAVES:]
        gaps = [
            b.committed_at_s - a.committed_at_s
            for a, b in pairwise(recent)
            if a.id.session == b.id.session and b.committed_at_s > a.committed_at_s
        ]
        return median(gaps) if len(gaps) >= 2 else None

    @cached_property
    def problems(self) -> Sequence[Problem]:
        """Ends of sessions in their order, including the end of the last session if it failed.

        The end of a session without training is left out: it interrupts no training.
        """
        found = self.goodput
        known = {info.session: info for info in self.sessions}
        times = {span.session: span for span in found.spans}
        problems = [
            Problem(
                cause=each.cause,
                ended_s=each.last_known_s,
                session=each.after_session,
                next_session=each.session,
                steps_lost=each.steps_lost,
                recovery=self._recovery(number),
                is_waiting=self._is_waiting(number),
                restore_s=known[each.session].restore_s,
                read_bytes=known[each.session].read_bytes,
                phases=each.phases,
            )
            for number, each in enumerate(found.interruptions)
            if not known[each.after_session].is_offline
        ]
        last = self.sessions[-1] if self.sessions else None
        if last is not None and last.ended is not None and last.ended.cause in FAILURES:
            left = max(0, last.ended.step - self.newest_step)
            problems.append(
                Problem(
                    cause=last.ended.cause,
                    ended_s=times[last.session].last_s,
                    session=last.session,
                    next_session=None,
                    steps_lost=Seconds(left, left, left),
                    recovery=None,
                    is_waiting=True,
                )
            )
        return problems

    @cached_property
    def _stepped_after(self) -> Sequence[int | None]:
        """Number of the first interruption, from each one on, after which a session did a step, or None."""
        found: list[int | None] = []
        first: int | None = None
        for number, each in reversed(list(enumerate(self.goodput.interruptions))):
            first = number if each.recovery is not None else first
            found.append(first)
        return found[::-1]

    def _recovery(self, number: int) -> Seconds | None:
        """Return the time without steps after an interruption, including sessions without steps.

        Time that is not counted is left out.
        """
        each, stepped = self.goodput.interruptions[number], self._stepped_after[number]
        if stepped is None or stepped == number:
            return each.recovery
        last = self.goodput.interruptions[stepped]
        assert last.recovery is not None
        old, times = self.goodput.spans[number], self.goodput.spans[stepped]
        passed = self.goodput.spans[number : stepped + 1]
        gaps_s = [later.opened_s - earlier.closed_s for earlier, later in pairwise(passed)]  # not counted
        down_s = each.opened_at_s - old.last_s - gaps_s[0]
        # from the first session without a step until the last such session was down
        between_s = times.last_s - each.opened_at_s - sum(gaps_s[1:])
        end = self.sessions[number].ended
        is_reported = old.measured or (end is not None and end.last_at_s is not None)
        if is_reported or old.session not in self._committed:
            down = Seconds(down_s, down_s, down_s)
        else:
            down = Seconds(0.0, down_s, each.opened_at_s - each.last_known_s - gaps_s[0])
        return down + Seconds(between_s, between_s, between_s) + last.recovery

    def _is_waiting(self, number: int) -> bool:
        """Return whether the training after an interruption is the last session, open and without a step.

        Rollbacks and imports may lie between the two; after the last of them a training may follow.
        """
        last = len(self.sessions) - 1
        later = range(number + 1, last)
        trained = next((k for k in later if not self.sessions[k].is_offline), last)
        return trained == last and self.sessions[last].ended is None and self._stepped_after[number] is None

    @cached_property
    def _committed(self) -> frozenset[int]:
        """Sessions with commits."""
        return frozenset(info.id.session for info in self.checkpoints)

    @property
    def newest_step(self) -> int:
        """Step from which a restart would continue, perhaps of another run; 0 for a start from scratch."""
        if self.lineage:
            return self.lineage[-1].step
        return (self.sessions[-1].origin_step or 0) if self.sessions else 0

    def age_s(self, time_s: float) -> float:
        """Return the seconds since a Unix time; 0 if this clock is behind the log's."""
        return max(0.0, self.now_s - time_s)

    @cached_property
    def phases(self) -> Sequence[Phase]:
        found = (_phase(name, what, map(read, self.checkpoints)) for name, what, read in PHASES)
        return [phase for phase in found if phase is not None]


PHASES: Sequence[tuple[str, str, Callable[[CheckpointInfo], float | None]]] = (
    ("stall", "training was held up", lambda info: info.stall_s),
    ("capture", "until the state was copied into memory", lambda info: info.capture_s),
    ("local", "until all nodes had it on disk", lambda info: info.local_s),
    ("replicate", "the commit waited for copies", lambda info: info.replicate_s),
    ("save", "capture, local and replicate together", save_s),
    ("drain", "from the commit until it was on the storage path", lambda info: info.drain_s),
)


def _phase(name: str, what: str, times_s: Iterable[float | None]) -> Phase | None:
    known_s = sorted(time_s for time_s in times_s if time_s is not None)
    if not known_s:
        return None
    return Phase(
        name=name,
        what=what,
        count=len(known_s),
        median_s=median(known_s),
        p99_s=known_s[math.ceil(0.99 * len(known_s)) - 1],
        max_s=known_s[-1],
    )


def read_report(catalog: Catalog, now_s: float) -> RunReport:
    """Return the facts of a run at Unix time `now_s`. Errors are those of the catalog."""
    return RunReport(
        run_name=catalog.run_name,
        run_uid=catalog.run_uid,
        where=catalog.where,
        now_s=now_s,
        sessions=catalog.sessions,
        checkpoints=catalog.list(all=True),
        lineage=catalog.lineage,
        events=drawn_events(catalog.events()),
    )


def drawn_events(log: pa.Table) -> Sequence[Event]:
    """Return the drawn events from a log's table of events, the newest MAX_EVENTS of them."""
    chosen = log.filter(pc.is_in(log["op"], pa.array(_DRAWN_OPS)))
    chosen = chosen.slice(max(0, chosen.num_rows - MAX_EVENTS)).select(("op", "time", "step", "text"))
    return [
        Event(op=row["op"], time_s=row["time"].timestamp(), step=row["step"], text=row["text"])
        for row in chosen.to_pylist()
        if row["time"] is not None
    ]


# Verdicts


def verdicts(report: RunReport) -> Sequence[Verdict]:
    """Return the answers to the first questions about a run, in order of importance."""
    found = (
        _protection(report),
        _damage(report),
        _replicas(report),
        _training(report),
        _last_trouble(report),
        _share(report),
        _checks(report),
    )
    return [verdict for verdict in found if verdict is not None]


def _protection(report: RunReport) -> Verdict:
    title = "A restart continues from"
    newest = report.lineage[-1] if report.lineage else None
    if newest is None:
        tone: Tone = "bad" if report.checkpoints else "warn"
        head = f"step {report.newest_step} of another run" if report.newest_step else "scratch"
        text = "The run has no live checkpoint."
        text += f" The storage path has {_items_text(report.exported[-1])}." if report.exported else ""
        return Verdict(tone=tone, title=title, head=head, text=text)
    age = f"saved {duration_text(report.age_s(newest.committed_at_s))} before this report"
    head = f"step {newest.step}"
    intact = [info for info in report.lineage if not info.damaged]
    safer = [info for info in intact if info.level > newest.level]
    durable = [info for info in intact if info.level is Level.DURABLE]
    alone = [_items_text(info) for info in report.lineage if info.exported]
    behind = (
        f" Without the cluster it would be step {durable[-1].step}."
        if durable
        else f" Without the cluster only {alone[-1]} would be left."
        if alone
        else _all_in_the_cluster(report)
    )
    if newest.level is Level.DURABLE:
        if not newest.damaged:
            return Verdict(tone="good", title=title, head=head, text=f"On the storage path, {age}.")
        text = f"Damaged on the storage path, or not readable there; {age}.{behind}"
        return Verdict(tone="warn" if durable else "bad", title=title, head=head, text=text)
    if newest.level is Level.REPLICATED:
        nodes = "any one node" if newest.replicas == 1 else f"any {newest.replicas} nodes"
        tone = "good" if behind.startswith(" Without") else "warn"
        what = f" of each of its parity groups ({newest.parity})" if newest.parity else ""
        text = f"By the log it survives the loss of {nodes}{what}; {age}.{behind}"
        return Verdict(tone=tone, title=title, head=head, text=text)
    fallback = f"from step {safer[-1].step}" if safer else "from nothing"
    text = f"On the nodes of its ranks only, {age}: if one is lost, a restart continues {fallback}.{behind}"
    return Verdict(tone="warn" if safer else "bad", title=title, head=head, text=text)


def _all_in_the_cluster(report: RunReport) -> str:
    stored = [info for info in report.live if info.level is Level.DURABLE]
    others = [info.step for info in stored if not info.damaged]
    if others:
        what = f"step {others[-1]}, from which this run does not descend"
    elif report.exported:
        what = f"only {_items_text(report.exported[-1])}"
    elif stored:
        return " Only damaged checkpoints are on the storage path: without the cluster all may be lost."
    else:
        return " Nothing is on the storage path: without the cluster all would be lost."
    return f" On the storage path is {what}: without the cluster a restart would begin anew."


def _items_text(info: CheckpointInfo) -> str:
    return f"{short_text(info.exported)} of step {info.step}"


def _training(report: RunReport) -> Verdict | None:
    if not report.sessions:
        return Verdict(tone="plain", title="Training", head="has not begun", text="The run has no session.")
    last = report.sessions[-1]
    title = f"Training, session {last.session}"
    if last.is_rollback:
        source = report.by_attempt.get(last.resumed_from or "")
        head = f"rolled back to step {source.step}" if source else "rolled back"
        text = f"At {utc_text(last.opened_at_s)}; the run was not opened since."
        return Verdict(tone="plain", title=title, head=head, text=text)
    if last.is_import:
        text = f"At {utc_text(last.opened_at_s)}; the run was not opened since."
        return Verdict(tone="plain", title=title, head=f"imported step {report.newest_step}", text=text)
    ranks = group_text(last)
    if last.ended is None:
        own = [info for info in report.checkpoints if info.id.session == last.session]
        seen_s = own[-1].committed_at_s if own else last.opened_at_s
        quiet_s = report.age_s(seen_s)
        usual = report.interval_s
        is_late = quiet_s > (MAX_QUIET_S if usual is None else OVERDUE * usual)
        rhythm = "" if usual is None else f", where one came about every {duration_text(usual)}"
        what = "the last checkpoint" if own else "it opened"
        text = f"{ranks}. {duration_text(quiet_s)} since {what}{rhythm}."
        text += " It may be stuck, or have died without a record." if is_late else ""
        return Verdict(tone="warn" if is_late else "good", title=title, head="open", text=text)
    end = last.ended
    at = f" at {utc_text(end.last_at_s)}" if end.last_at_s is not None else ""
    if end.cause not in FAILURES:
        return Verdict(
            tone="good", title=title, head=CAUSE_TEXT[end.cause], text=f"Step {end.step}{at}; {ranks}."
        )
    lost = max(0, end.step - report.newest_step)
    cost = f"{count_text(lost, 'step')} lost" if lost else "no step is lost"
    text = f"It came to step {end.step}{at}; {cost}. No session has followed."
    return Verdict(tone="bad", title=title, head=f"down: {CAUSE_TEXT[end.cause]}", text=text)


def _last_trouble(report: RunReport) -> Verdict | None:
    failed = [t for t in report.problems if t.cause in FAILURES]
    if not failed:
        unknown = sum(t.cause is None for t in report.problems)
        text = "No session has failed."
        if unknown:
            text = f"{count_text(unknown, 'session')} ended for an unknown cause."
        return Verdict(tone="plain", title="Last failure", head="none known", text=text)
    last = failed[-1]
    cause = CAUSE_TEXT[last.cause].capitalize() if last.cause else ""
    lost = "an unknown number of steps"
    if last.steps_lost is not None:
        number = estimate_text(last.steps_lost)
        lost = f"{number} step{'' if number == '1' else 's'}"
    again = "No commit since."
    tone: Tone = "warn"
    if last.recovery is not None:
        again = f"Training again after {duration_text(last.recovery.estimate)}."
        tone = "plain"
    if last.next_session is None:
        again, tone = "Nothing has followed.", "bad"
    read = f" It read {tiers_text(last.read_bytes)}." if last.read_bytes else ""
    text = f"{cause} at {utc_text(last.ended_s)}. {again}{read}"
    return Verdict(tone=tone, title=f"Last failure, of {len(failed)}", head=f"lost {lost}", text=text)


def _share(report: RunReport) -> Verdict | None:
    ratios = report.goodput.ratios
    if ratios is None:
        return None
    worst = max(report.goodput.badput, key=lambda cause: report.goodput.badput[cause].estimate)
    worst_s = report.goodput.badput[worst].estimate
    text = f"Of {duration_text(report.goodput.wall_s)}. "
    text += f"Most of the rest: {worst.replace('_', ' ')}, {duration_text(worst_s)}. " if worst_s else ""
    share = measured_percent(report.goodput)
    text += "Measured." if share == 100 else f"{share} % measured, the rest estimated."
    text += f" {clocks}" if (clocks := clocks_text(report.goodput)) else ""
    return Verdict(tone="plain", title="Goodput", head=f"{100 * ratios.estimate:.1f} %", text=text)


def _checks(report: RunReport) -> Verdict:
    drilled = max(
        (info for info in report.checkpoints if info.drilled_at_s is not None),
        key=lambda info: info.drilled_at_s or 0.0,
        default=None,
    )
    verified = max((info.verified_at_s for info in report.checkpoints if info.verified_at_s), default=None)
    scrub = (
        "No scrub yet." if verified is None else f"Last scrub {duration_text(report.age_s(verified))} ago."
    )
    title = "Recovery drill"
    if drilled is None:
        return Verdict(tone="plain", title=title, head="none yet", text=scrub)
    passed = drilled.drill.startswith("passed")
    at = duration_text(report.age_s(drilled.drilled_at_s or 0.0))
    text = f"Step {drilled.step}, {at} ago: {short_text(drilled.drill)}. {scrub}"
    head = "passed" if passed else "failed"
    return Verdict(tone="good" if passed else "bad", title=title, head=head, text=text)


def _damage(report: RunReport) -> Verdict | None:
    """Return the live checkpoints that are damaged on the storage path; None without one."""
    steps = [info.step for info in report.checkpoints if info.damaged and info.state == "live"]
    if not steps:
        return None
    text = f"Found by a scrub on the storage path, or not readable there; the newest is step {steps[-1]}."
    return Verdict(tone="bad", title="Damage", head=count_text(len(steps), "checkpoint"), text=text)


def _replicas(report: RunReport) -> Verdict | None:
    """Return the newest finding of the replica watch, and the step of the first; None without one."""
    found = [info for info in report.checkpoints if info.suspect]
    if not found:
        return None
    text = f"Step {found[-1].step}: {short_text(found[-1].suspect)}."
    if len(found) > 1:
        text += f" The first was at step {found[0].step} of session {found[0].id.session}."
    return Verdict(
        tone="bad", title="Replicas", head=f"differed at {count_text(len(found), 'save')}", text=text
    )


# Texts


def measured_percent(found: Goodput) -> int:
    """Return the measured part of the wall time in percent, rounded down; 100 from ALL_MEASURED on."""
    share = 100 * found.measured_s / found.wall_s
    return 100 if share >= ALL_MEASURED else math.floor(share)


def clocks_text(found: Goodput) -> str:
    """Return a warning if clocks jumped by more than the accepted difference; else an empty text."""
    if found.clock_back_s <= CLOCK_SLACK_S:
        return ""
    return (
        f"Clocks differed or jumped by up to {duration_text(found.clock_back_s)}; "
        "times around there are wrong by up to that much."
    )


def group_text(info: SessionInfo) -> str:
    """Return a text such as `16 ranks on 4 nodes`."""
    return f"{count_text(info.world_size, 'rank')} on {count_text(info.num_nodes, 'node')}"


def estimate_text(steps: Seconds) -> str:
    """Return `12`, or `12 (10 to 20)` for an estimate."""
    if steps.low == steps.high:
        return f"{steps.estimate:.0f}"
    return f"{steps.estimate:.0f} ({steps.low:.0f} to {steps.high:.0f})"


def range_text(time: Seconds) -> str:
    """Return `2.5 h`, or `2.5 h (2.0 h to 3.0 h)` for an estimate."""
    if time.high - time.low < SAME_S:
        return duration_text(time.estimate)
    return f"{duration_text(time.estimate)} ({duration_text(time.low)} to {duration_text(time.high)})"


def phase_text(phase: str) -> str:
    return phase.replace("_", " ")
