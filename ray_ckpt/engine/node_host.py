"""The host of a node machine: the events of a run on one node, and the only interpretation of its effects.

The agent's actor and the simulator use the same host with different ports. The host waits for nothing:
answers, ends of work and the time arrive as events.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.awaited import Awaited
from ray_ckpt.core.node_machine import NodeMachine
from ray_ckpt.core.values import SessionKey, SessionPlan, Token
from ray_ckpt.engine.node_ports import (
    AskAwaited,
    BarrierDue,
    CallerLeft,
    EndAwaited,
    NodeHostEvent,
    NodePorts,
    OrderReceived,
    OutcomeAwaited,
    PeerProbed,
    ProbeDue,
    ProbePeer,
    ProgressDue,
    RankMet,
    RankProgressed,
    RankRestored,
    ReportAnswered,
    SessionAwaited,
    SurvivorCame,
    WaitingDue,
    WorkEnded,
)
from ray_ckpt.engine.node_session import NodeSession
from ray_ckpt.errors import (
    AgentLost,
    CheckpointError,
    Fenced,
    RunInUse,
    RunSuperseded,
    Unavailable,
    named_text,
)

log = logging.getLogger("ray_ckpt.agent")

PROBE_EVERY_S = 2.0  # between probes of a peer, short so that copies are complete soon after its return
PROBE_FOR_S = 3600.0  # then only the next copy probes again, since the node may be gone for good


@dataclass(slots=True)
class _Order:
    """An order that is being carried out."""

    pending: int = 1  # work whose end is awaited, and the handling of the order itself
    left: dict[str, str] = field(default_factory=dict)  # folders that could not be deleted, with the errors
    error: Exception | None = None  # the first other error


class NodeHost:
    """One run on the node `node_id`."""

    def __init__(self, machine: NodeMachine, ports: NodePorts, node_id: str) -> None:
        self.machine = machine
        self.ports = ports
        self.node_id = node_id
        self.session: NodeSession | None = None  # the session at work
        self.awaited: tuple[Awaited, ...] = ()  # ranks that the group waits for, by the coordinator's answer
        self._queue: deque[n.NodeEvent | NodeHostEvent] = deque()  # events during the handling of another
        self._is_handling = False
        self._orders: dict[Token, _Order] = {}
        self._held: list[OrderReceived] = []  # orders whose epoch is not durable yet
        self._persisting: int | None = None  # the epoch that is being written
        self._outcomes: dict[Token, OutcomeAwaited] = {}
        self._ends: dict[Token, SessionKey] = {}  # callers that wait for the end of a session
        self._beginnings: dict[Token, SessionKey] = {}  # callers that wait for their session to begin
        self._end: tuple[SessionKey, CheckpointError] | None = (
            None  # the last session that is over, and the reason
        )

    @property
    def plan(self) -> SessionPlan | None:
        """The plan of the group at work."""
        return None if self.machine.is_released else self.machine.plan

    def handle(self, *events: n.NodeEvent | NodeHostEvent) -> None:
        """Handle events in order; events that arrive during another event are handled after it."""
        self._queue.extend(events)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._queue:
                self._handle(self._queue.popleft())
        finally:
            self._is_handling = False

    def _handle(self, event: n.NodeEvent | NodeHostEvent) -> None:
        match event:
            case OrderReceived():
                self._obey(event)
            case WorkEnded(work=n.PersistEpoch(epoch=epoch), error=error):
                self._persisted(epoch, error)
            case WorkEnded(work=n.DeleteFolder(directory=directory), token=token, error=error):
                if error is not None:
                    log.warning("%s is not deleted: %s", directory, error)
                    if token in self._orders:
                        self._orders[token].left[directory] = named_text(error)
                self._order_step(token)
            case WorkEnded(token=token, error=error):
                self._order_step(token, error)
            case OutcomeAwaited():
                self._outcomes[event.token] = event
                self._reply_outcomes(event.token)
            case EndAwaited(token=token, session_key=key):
                self._ends[token] = key
                self._reply_ends()
            case SessionAwaited(token=token, session_key=key):
                self._beginnings[token] = key
                self._reply_beginnings()
            case CallerLeft(token=token):
                self._outcomes.pop(token, None)
                self._ends.pop(token, None)
                self._beginnings.pop(token, None)
            case RankProgressed() | RankMet() | RankRestored() | SurvivorCame() | AskAwaited():
                self._rank_came(event)
            case ReportAnswered(report=m.RanksProgressed() | m.RanksRestored(), value=tuple() as awaited):
                self.awaited = awaited
            case ReportAnswered(report=m.BarrierReached() | m.NodeRestored() | m.RanksRestored() as report):
                if self.session is not None and self.session.plan.session_key == report.session_key:
                    self.session.answered(event)
            case ReportAnswered():
                pass
            case ProgressDue() | BarrierDue() | WaitingDue():
                if self.session is not None and self.session.plan.session_key == event.session_key:
                    self.session.due(event)
            case ProbeDue(peer=peer, until_s=until_s):
                self._probe(peer, until_s)
            case PeerProbed():
                self._probed(event)
            case _:
                self._apply(event)

    def _apply(self, event: n.NodeEvent, token: Token = "") -> None:
        """Let the machine handle an event, and carry out the effects; `token` is that of an order."""
        for effect in self.machine.handle(event):
            self._carry_out(effect, token)

    def _rank_came(self, event: RankProgressed | RankMet | RankRestored | SurvivorCame | AskAwaited) -> None:
        """Pass an event of a rank to the session at work, if the event is of that session.

        A rank that has restored in a session that its group has left restores again: its agent died before
        it could send the rank to the new session.
        """
        plan = self.session.plan if self.session is not None else None
        if self.session is not None and self.session.plan.session_key == event.session_key:
            self.session.rank_came(event)
        elif isinstance(event, RankRestored) and plan is not None and event.session_key in plan.left:
            self.ports.reply(event.token, False)
        elif not isinstance(event, RankProgressed):
            error: CheckpointError = RunSuperseded("A newer session owns this run.")
            if plan is None:
                error = AgentLost("The run has no session here.")
            self.ports.fail(event.token, error)

    # -- orders --------------------------------------------------------------------------------------

    def _obey(self, event: OrderReceived) -> None:
        effects = self.machine.handle(event.order)
        if any(isinstance(effect, n.PersistEpoch) for effect in effects):
            self._held.append(event)
            self._persist()
            return
        self._orders[event.token] = _Order()
        for effect in effects:
            self._carry_out(effect, event.token)
        if isinstance(event.order, n.CoordinatorReturned) and self.session is not None:
            self.session.report_restored()
        self._order_step(event.token)

    def _order_step(self, token: Token, error: Exception | None = None) -> None:
        """Note that a part of an order has ended; answer the sender after the last part."""
        order = self._orders.get(token)
        if order is None:
            return
        order.pending -= 1
        order.error = order.error or error
        if not order.pending:
            del self._orders[token]
            if order.error is None:
                self.ports.reply(token, order.left or None)
            else:
                self.ports.fail(token, order.error)

    def _persist(self) -> None:
        """Make the highest epoch of the held orders durable."""
        if self._held and self._persisting is None:
            self._persisting = max(event.order.epoch for event in self._held)
            self.ports.start(n.PersistEpoch(epoch=self._persisting))

    def _persisted(self, epoch: int, error: Exception | None) -> None:
        """Repeat the held orders, or fail them if their epoch could not be written."""
        self._persisting = None
        held, self._held = self._held, []
        if error is None:
            self._apply(n.EpochPersisted(epoch=epoch))
        for event in held:
            if error is not None and event.order.epoch <= epoch:
                self.ports.fail(event.token, error)
            else:
                self._obey(event)

    # -- effects -------------------------------------------------------------------------------------

    def _carry_out(self, effect: n.NodeEffect, token: Token) -> None:
        ports = self.ports
        match effect:
            case n.DeleteFolder() | n.ForgetRun():
                if token:
                    self._orders[token].pending += 1
                if isinstance(effect, n.ForgetRun):
                    self._end_callers(Unavailable("The run has finished.", hint="Open it again."))
                    ports.free()
                ports.start(effect, token)
            case n.WriteShard() | n.WriteStepState() | n.SendStepState() | n.WriteFragment() | n.SendCopy():
                ports.start(effect)
            case n.AskRanks() | n.AnswerOffers() if self.session is not None:
                self.session.salvage(effect)
            case n.AskRanks() | n.AnswerOffers():
                pass
            case n.ReportStored() | n.ReportCopied() | n.ReportRefused() | n.ReportSurvivors():
                ports.report(self._report_of(effect))
            case n.CheckPeer(peer=peer):
                due = ProbeDue(peer=peer, until_s=ports.now_s() + PROBE_FOR_S)
                ports.later(PROBE_EVERY_S, due)
            case n.Release(attempt=attempt, rank=rank):
                ports.release(attempt, rank)
            case n.ResolveSave():
                self._reply_outcomes(*self._outcomes)
            case n.ShowSaveSignal(signal=signal):
                ports.show(signal)
            case n.BeginSession():
                self._begin(effect)
            case n.EndSession(session_key=key, error=error):
                if self.session is not None:
                    self.session.fail(error)
                    self.session = None
                self._end_session(key, error)
                self._reply_beginnings()
                self._reply_outcomes(*self._outcomes)
            case n.FreeMemory():
                ports.free()
            case n.RefuseOrder(epoch=epoch):
                text = f"Node {self.node_id[:12]} obeys epoch {epoch}."
                self._orders[token].error = Fenced(text, epoch=epoch)
            case n.RefuseExit():
                self._orders[token].error = RunInUse(f"A group trains on node {self.node_id[:12]}.")
            case n.PersistEpoch():
                raise AssertionError("only an order has a higher epoch")

    def _report_of(
        self, effect: n.ReportStored | n.ReportCopied | n.ReportRefused | n.ReportSurvivors
    ) -> m.Event:
        """Return the event that the coordinator receives for a report of the machine."""
        match effect:
            case n.ReportStored(attempt=attempt):
                return m.NodeStored(
                    attempt=attempt,
                    node_index=effect.node_index,
                    node_id=self.node_id,
                    fragment=effect.fragment,
                    size_bytes=effect.size_bytes,
                    replicated=effect.replicated,
                    metrics=effect.metrics,
                    epoch=effect.epoch,
                    facts=self.ports.facts(attempt),
                    watched=effect.watched,
                )
            case n.ReportCopied(attempt=attempt):
                return m.ReplicaEnded(
                    attempt=attempt,
                    node_index=effect.node_index,
                    holder=effect.holder,
                    error=effect.error,
                    fragment=effect.fragment,
                    epoch=effect.epoch,
                    source=self.node_id,
                    is_unreachable=effect.is_unreachable,
                    is_damage=effect.is_damage,
                )
            case n.ReportSurvivors(session_key=key, offers=offers, kept=kept, was_decided=was_decided):
                return m.SurvivorsReported(
                    session_key=key,
                    node_id=self.node_id,
                    offers=offers,
                    kept=kept,
                    was_decided=was_decided,
                )
            case n.ReportRefused(attempt=attempt, ranks=ranks, reason=reason):
                return m.SaveRefused(attempt=attempt, ranks=ranks, reason=reason)

    def _begin(self, effect: n.BeginSession) -> None:
        error = RunSuperseded("A newer training group has opened this run.")
        if effect.replaced is not None:
            self._end_session(effect.replaced, error)
        if self.session is not None:
            self.session.supersede(effect.plan)
        self.session = NodeSession(self, effect.plan)
        self.ports.begin(effect.plan)
        self.ports.show(None)
        self._end = ((effect.plan.epoch, effect.plan.session - 1), error)  # all earlier sessions are over
        self._reply_ends()
        self._reply_beginnings()
        self._reply_outcomes(*self._outcomes)

    def _probe(self, peer: str, until_s: float) -> None:
        """Probe a silent peer until it answers, so that no save has to wait for a peer that is gone."""
        if self.machine.is_released or self.ports.now_s() >= until_s:
            self._apply(n.PeerReturned(peer=peer))
        else:
            self.ports.start(ProbePeer(peer=peer, until_s=until_s))

    def _probed(self, event: PeerProbed) -> None:
        if event.is_there:
            self._apply(n.PeerReturned(peer=event.peer))
        else:
            self.ports.later(PROBE_EVERY_S, ProbeDue(peer=event.peer, until_s=event.until_s))

    # -- callers -------------------------------------------------------------------------------------

    def _reply_outcomes(self, *tokens: Token) -> None:
        """Reply to those callers whose save has ended or has reached their level."""
        for token in tokens:
            event = self._outcomes[token]
            if (outcome := self.machine.outcome(event.attempt, event.level)) is not None:
                del self._outcomes[token]
                self.ports.reply(token, outcome)

    def _reply_beginnings(self) -> None:
        """Reply to the ranks whose group is at work here, and fail those of a group that is over."""
        plan = self.session.plan if self.session is not None else None
        for token, session_key in list(self._beginnings.items()):
            if plan is not None and plan.continues(session_key):
                del self._beginnings[token]
                self.ports.reply(token, None)
            elif self.machine.is_over(session_key):
                del self._beginnings[token]
                self.ports.fail(token, RunSuperseded("A newer session owns this run."))

    def _end_session(self, session_key: SessionKey, error: CheckpointError) -> None:
        if self._end is None or session_key >= self._end[0]:
            self._end = (session_key, error)
        self._reply_ends()

    def _reply_ends(self) -> None:
        """Reply to the callers that wait for a session that is over."""
        if self._end is None:
            return
        last, error = self._end
        for token, session_key in list(self._ends.items()):
            if session_key <= last:
                del self._ends[token]
                self.ports.reply(token, error)

    def _end_callers(self, error: CheckpointError) -> None:
        """Fail the callers that wait here: this host gets no more events of the run."""
        tokens = (*self._outcomes, *self._ends, *self._beginnings)
        self._outcomes, self._ends, self._beginnings = {}, {}, {}
        for token in tokens:
            self.ports.fail(token, error)
