"""One session on one node: the progress of the node's ranks, barriers, and the end of the restore."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.barriers import BARRIER_S
from ray_ckpt.core.progress import PROGRESS_GATHER_S, progress_period_s
from ray_ckpt.core.values import RankProgress, Salvage, SessionPlan, Token
from ray_ckpt.engine.node_ports import (
    AskAwaited,
    BarrierDue,
    ProgressDue,
    RankMet,
    RankProgressed,
    RankRestored,
    ReportAnswered,
    SessionTimer,
    SurvivorCame,
    WaitingDue,
)
from ray_ckpt.errors import Fenced, RunConflict, RunSuperseded, Unavailable
from ray_ckpt.types import RankRestore

if TYPE_CHECKING:
    from ray_ckpt.engine.node_host import NodeHost

MAX_BARRIERS = 16  # barriers kept so that late ranks get the result; the coordinator keeps more
BARRIER_GATHER_S = 1.0  # wait for all ranks of a node at a barrier; then the ranks present are reported
PROGRESS_WAITS = 0.8  # share of the period for which a relay may keep a report, to send it with others
RESTORED_AGAIN_S = 2.0  # between a node's reports of its ranks that have restored and wait for others
TAKEN_S = 10.0  # a report that fails later was taken by a coordinator, which has died since
NO_COORDINATOR_S = 300.0  # without a coordinator, ranks that have restored wait; a restart of one is shorter


@dataclass(slots=True)
class _Barrier:
    """Ranks of this node at a barrier, and the answer once the barrier has ended for the whole group."""

    ranks: set[int] = field(default_factory=set)
    tokens: list[Token] = field(default_factory=list)
    is_reported: bool = False  # all ranks of this node are at the barrier, which was reported
    until_s: float = 0.0  # when a report that the coordinator does not take is given up
    answer: tuple[int, ...] | Exception | None = None


class NodeSession:
    """The reports and waits of the ranks of one session. A new session gets a new object."""

    def __init__(self, host: NodeHost, plan: SessionPlan) -> None:
        self.plan = plan
        self._host = host
        self._progress: dict[int, RankProgress] = {}  # by rank, until it is forwarded
        self._missed: dict[int, int] = {}  # the last save signal that each rank read too late
        self._is_urgent = False  # a save step waits for the next report of progress
        self._barriers: dict[int, _Barrier] = {}  # by the number of the barrier
        self._met = 0  # the highest barrier that all ranks have reached
        self._restored: dict[int, RankRestore] = {}
        self._restoring: list[Token] = []  # callers that wait for the group's restore
        self._reports_waiting = False  # a report of the ranks that wait is due
        self._is_lost = False  # no coordinator has the report that all ranks have restored: it is repeated
        self._reported_s = 0.0  # when it was sent last
        self._until_s = 0.0  # when a report that no coordinator takes is given up
        self._answered: Unavailable | None = None  # a coordinator's first error
        self._asking: list[Token] = []  # ranks that wait to be asked for an offer
        self._is_asked = False
        self._offering: list[Token] = []  # ranks that have made an offer for a salvage
        self._salvage: Salvage | None = None
        self._is_restored = False  # all ranks of the group have restored
        self._is_training = False  # a rank of this node has reported its progress

    @property
    def _ranks(self) -> tuple[int, ...]:
        here = self._host.machine.here
        return here.ranks if here is not None else ()

    def supersede(self, plan: SessionPlan) -> None:
        """End the waits of this session, because that of `plan` begins; ranks of its group restore again."""
        if plan.continues(self.plan.session_key):
            tokens, self._restoring = self._restoring, []
            for token in tokens:
                self._host.ports.reply(token, False)
        self.fail(RunSuperseded("A newer session owns this run."))

    def fail(self, error: Exception) -> None:
        """Raise `error` in all waits."""
        self._fail_restore(error)
        for number in self._barriers:
            self._end_barrier(number, error)
        asking, self._asking = self._asking, []
        for token in asking:
            self._host.ports.reply(token, False)
        offering, self._offering = self._offering, []
        for token in offering:
            self._host.ports.fail(token, error)

    def rank_came(self, event: RankProgressed | RankMet | RankRestored | SurvivorCame | AskAwaited) -> None:
        match event:
            case RankProgressed():
                self._progressed(event)
            case RankMet():
                self._came(event)
            case RankRestored():
                self._rank_restored(event)
            case AskAwaited(token=token):
                self._asking.append(token)
                self._answer_survivors()
            case SurvivorCame(token=token, rank=rank, steps=steps):
                self._offering.append(token)
                key = self.plan.session_key
                self._host.handle(n.SurvivorOffered(session_key=key, rank=rank, steps=steps))
                self._answer_survivors()

    def due(self, event: SessionTimer) -> None:
        match event:
            case ProgressDue():
                self._forward_progress()
            case BarrierDue():
                self._barrier_due(event)
            case WaitingDue():
                self._report_waiting()

    def answered(self, event: ReportAnswered) -> None:
        match event.report:
            case m.BarrierReached():
                self._barrier_answered(event.report, event)
            case m.NodeRestored():
                self._restore_answered(event)
            case m.RanksRestored() if event.error is None:  # an agent that died had answered other ranks here
                self._go()

    def salvage(self, effect: n.AskRanks | n.AnswerOffers) -> None:
        """Ask the ranks for an offer, or answer their offers with the decision."""
        self._is_asked = True
        if isinstance(effect, n.AnswerOffers):
            self._salvage = effect.salvage
        self._answer_survivors()

    def _answer_survivors(self) -> None:
        if self._is_asked:
            asking, self._asking = self._asking, []
            for token in asking:
                self._host.ports.reply(token, True)
        if self._salvage is not None:
            offering, self._offering = self._offering, []
            for token in offering:
                self._host.ports.reply(token, self._salvage)

    # -- progress ------------------------------------------------------------------------------------

    def _progressed(self, event: RankProgressed) -> None:
        """Record the progress of a rank; forward the progress of all ranks together."""
        if not self._is_training and not self._restored:  # an agent that came late prepares in vain
            self._host.ports.free_restore()
        self._is_training = True
        due, missed = ProgressDue(session_key=self.plan.session_key), event.progress.missed
        if missed != self._missed.get(event.rank, 0):
            self._missed[event.rank], self._is_urgent = missed, True
            self._host.ports.later(PROGRESS_GATHER_S, due)
        elif not self._progress:
            self._host.ports.later(progress_period_s(len(self.plan.nodes)), due)
        self._progress[event.rank] = event.progress

    def _forward_progress(self) -> None:
        ranks, self._progress = self._progress, {}
        if not ranks:  # forwarded early
            return
        event = m.RanksProgressed(
            session_key=self.plan.session_key,
            ranks=ranks,
            captured=self._host.machine.incomplete(),
            met=self._met,
        )
        may_wait_s = 0.0 if self._is_urgent else PROGRESS_WAITS * progress_period_s(len(self.plan.nodes))
        self._is_urgent = False
        self._host.ports.report(event, may_wait_s)

    # -- barriers ------------------------------------------------------------------------------------

    def _came(self, event: RankMet) -> None:
        """Add a rank that waits at a barrier; report when all ranks of this node have come."""
        if event.rank not in self._ranks:
            self._host.ports.fail(event.token, RunSuperseded("A newer session owns this run."))
            return
        barrier = self._barriers.get(event.number)
        if barrier is None:
            barrier = self._barriers[event.number] = _Barrier()
            if len(self._barriers) > MAX_BARRIERS:
                oldest = next(iter(self._barriers))
                self._end_barrier(oldest, Unavailable(f"More than {MAX_BARRIERS} barriers are open."))
                del self._barriers[oldest]
            due = BarrierDue(session_key=self.plan.session_key, number=event.number, is_repeated=False)
            self._host.ports.later(BARRIER_GATHER_S, due)
        barrier.tokens.append(event.token)
        barrier.ranks.add(event.rank)
        if barrier.answer is not None:
            self._end_barrier(event.number, barrier.answer)
        elif barrier.ranks >= set(self._ranks) and not barrier.is_reported:
            self._begin_report(event.number, barrier)

    def _barrier_due(self, event: BarrierDue) -> None:
        """Report a barrier whose ranks have not all come in time, or repeat a report that failed."""
        barrier = self._barriers.get(event.number)
        if barrier is None or barrier.answer is not None:
            return
        if event.is_repeated:
            self._report_barrier(event.number, barrier)
        elif not barrier.is_reported:
            self._begin_report(event.number, barrier)

    def _begin_report(self, number: int, barrier: _Barrier) -> None:
        barrier.is_reported = barrier.ranks >= set(self._ranks)
        barrier.until_s = self._host.ports.now_s() + BARRIER_S
        self._report_barrier(number, barrier)

    def _report_barrier(self, number: int, barrier: _Barrier) -> None:
        self._host.ports.report(
            m.BarrierReached(
                token="",
                session_key=self.plan.session_key,
                number=number,
                ranks=tuple(sorted(barrier.ranks)),
            )
        )

    def _barrier_answered(self, report: m.BarrierReached, event: ReportAnswered) -> None:
        barrier, error = self._barriers.get(report.number), event.error
        if barrier is None or barrier.answer is not None:
            return
        if isinstance(event.value, m.BarrierAnswer):
            missing = event.value.missing
            self._met = self._met if missing else max(self._met, report.number)
            self._end_barrier(report.number, missing)
        elif error is not None:
            if isinstance(error, RunConflict) or self._host.ports.now_s() > barrier.until_s:
                self._end_barrier(report.number, error)
            else:  # ranks of other nodes may have passed, and wait for this node in the next step
                due = BarrierDue(session_key=report.session_key, number=report.number, is_repeated=True)
                self._host.ports.later(BARRIER_GATHER_S, due)

    def _end_barrier(self, number: int, answer: tuple[int, ...] | Exception) -> None:
        """Answer the callers at a barrier; later callers get the first answer too."""
        barrier = self._barriers[number]
        barrier.answer = answer if barrier.answer is None else barrier.answer
        tokens, barrier.tokens = barrier.tokens, []
        for token in tokens:
            if isinstance(barrier.answer, Exception):
                self._host.ports.fail(token, barrier.answer)
            else:
                self._host.ports.reply(token, barrier.answer)

    # -- restore -------------------------------------------------------------------------------------

    def _rank_restored(self, event: RankRestored) -> None:
        """Add a rank that has restored; report when all ranks of this node have restored."""
        if event.report.rank not in self._ranks:
            self._host.ports.fail(event.token, RunSuperseded("A newer session owns this run."))
            return
        if self._is_restored:
            self._host.ports.reply(event.token, True)
            return
        self._restored[event.report.rank] = event.report
        self._restoring.append(event.token)
        self.report_restored()
        if not self._reports_waiting:
            self._reports_waiting = True
            self._host.ports.later(RESTORED_AGAIN_S, WaitingDue(session_key=self.plan.session_key))

    def report_restored(self) -> None:
        """Report that all ranks of this node have restored, if they have.

        A new coordinator needs the report although an earlier one has answered it: other nodes may wait.
        """
        if len(self._restored) == len(self._ranks):
            self._is_lost, self._reported_s = False, self._host.ports.now_s()
            ranks, key = tuple(self._restored.values()), self.plan.session_key
            node_id = self._host.node_id
            self._host.ports.report(m.NodeRestored(token="", session_key=key, node_id=node_id, ranks=ranks))

    def _report_waiting(self) -> None:
        """Report the ranks that have restored, repeatedly while they wait for others."""
        self._reports_waiting = bool(self._restoring)
        if self._restoring:
            ranks, key = tuple(sorted(self._restored)), self.plan.session_key
            node_id = self._host.node_id
            if self._is_lost:
                self.report_restored()
            else:
                self._host.ports.report(m.RanksRestored(session_key=key, node_id=node_id, ranks=ranks))
            self._host.ports.later(RESTORED_AGAIN_S, WaitingDue(session_key=key))

    def _restore_answered(self, event: ReportAnswered) -> None:
        """Let the ranks train, unless the coordinator begins another session; a lost report is repeated."""
        error, now_s = event.error, self._host.ports.now_s()
        if not self._until_s or now_s - self._reported_s > TAKEN_S:  # a coordinator had the last report
            self._until_s = now_s + NO_COORDINATOR_S
        if isinstance(error, Unavailable | Fenced) and now_s <= self._until_s:
            self._is_lost = True
            if isinstance(error, Unavailable) and error.fields.get("reached", True):
                self._answered = self._answered or error  # no session begins: the repeated report is refused
        elif error is not None:
            is_over = isinstance(error, RunSuperseded)
            self._fail_restore((self._answered if is_over else None) or error)
        elif event.value is None:
            self._go()

    def _go(self) -> None:
        """Let the ranks train."""
        if self._is_restored:
            return
        self._is_restored = True
        self._host.ports.free_restore()
        if len(self._restored) == len(self._ranks):  # else a rank trains already, and has an arena here
            self._host.ports.free_arenas()  # processes of the last session may still write into its arenas
        tokens, self._restoring = self._restoring, []
        for token in tokens:
            self._host.ports.reply(token, True)

    def _fail_restore(self, error: Exception) -> None:
        tokens, self._restoring = self._restoring, []
        for token in tokens:
            self._host.ports.fail(token, error)
