"""The run machine: everything the coordinator decides about one run (see PROTOCOL.md).

One door: `handle(event) -> effects`. A decision that others may see goes into the log first; its effects
follow when the store has confirmed the record. One record is in flight at a time, so the log is a total
order and a lost race is noticed at once. What depends on the whole log (which checkpoint a group restores,
what retention gives up, whether a run is finished) is decided only while no record is pending.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ray_ckpt import telemetry
from ray_ckpt.config import RunOptions
from ray_ckpt.core import messages as m
from ray_ckpt.core.attempts import SaveUnderway
from ray_ckpt.core.awaited import Awaited
from ray_ckpt.core.barriers import Barriers
from ray_ckpt.core.closing import Closing
from ray_ckpt.core.context import Context
from ray_ckpt.core.deletions import Deletions
from ray_ckpt.core.drain import Drains, DrainUnderway
from ray_ckpt.core.drain_policy import DrainPolicy
from ray_ckpt.core.exposure import exposure
from ray_ckpt.core.gauges import gauges
from ray_ckpt.core.history import RunHistory
from ray_ckpt.core.ledger import Ledger
from ray_ckpt.core.log_requests import Requested, Requests
from ray_ckpt.core.maintenance import Maintenance
from ray_ckpt.core.ownership import is_rollback
from ray_ckpt.core.retention import RetentionView, decide, policies_of
from ray_ckpt.core.save_intervals import SaveIntervals
from ray_ckpt.core.save_steps import SaveSteps
from ray_ckpt.core.saves import Saves
from ray_ckpt.core.session_end import SessionEnd
from ray_ckpt.core.sessions import Sessions
from ray_ckpt.core.sweep import Sweeps
from ray_ckpt.errors import CheckpointError, ConfigError, Fenced, RunSuperseded, Unavailable
from ray_ckpt.format import records as r
from ray_ckpt.telemetry import Sample
from ray_ckpt.types import AttemptId, CheckpointInfo, EndCause, Exposure, Level, RankRestore

AWAITED_EVERY_S = 1.0  # every node asks once a second, and it costs time by ranks
CLOCK_S = 0.01  # how exactly the machine knows the time: thousands of events may come in a second
SNAPSHOT_EVERY = 1000  # records between two snapshots of the log: what a reader opens one by one
SNAPSHOT_RETRY_S = 60.0

# Until its fence is in the log, a coordinator knows neither what was committed nor that it may speak.
_BEFORE_THE_FENCE = (m.LogOpened, m.Appended, m.Ticked, m.NodesSeen)
_ANSWERED = (
    m.GroupOpened | m.NodeRestored | m.BarrierReached | m.FinishRequested | m.DrainRequested | Requested
)


class RunMachine:
    """State and decisions of one run.

    `writer` identifies this coordinator in the log, `service` the service of its cluster, over restarts.
    """

    def __init__(self, *, options: RunOptions, writer: str, service: str) -> None:
        self._ledger = Ledger(writer=writer, service=service)
        self._context = Context(options, self._ledger)
        self._sessions = Sessions(self._context)
        self._saves = Saves(self._context)
        self._barriers = Barriers(self._context)
        self._awaited: tuple[float, tuple[Awaited, ...]] | None = None  # and when it was found
        self._save_steps = SaveSteps(self._context)
        self._intervals = SaveIntervals(self._context)
        self._session_end = SessionEnd(self._context)
        self._drain_policy = DrainPolicy()
        self._drains = Drains(self._context)
        self._deletions = Deletions()
        self._sweeps = Sweeps(self._context)
        self._maintenance = Maintenance(self._context)
        self._retire_due = False
        self._requests = Requests(self._context)
        self._snapshot_seq = 0  # of the last snapshot of the log that is known
        self._snapshot_at_s = 0.0  # not before that
        self._is_writing_snapshot = False
        self._finishing: list[m.FinishRequested] = []
        self._end_cause: EndCause | None = None  # as the launcher has told it, until the next group comes
        self._closing = Closing(self._context)
        self._wall_s = 0.0
        self._early: list[m.Event] = []  # came before the fence; bounded by the callers that wait for it
        self._fenced = False

    def handle(self, event: m.Event) -> tuple[m.Effect, ...]:
        """Apply one event; the effects are to be carried out in order."""
        if self._fenced:
            return tuple(self._refuse(event))
        if self.is_closing:
            return tuple(self._while_closing(event))
        if not self._ledger.is_open and not isinstance(event, _BEFORE_THE_FENCE):
            self._early.append(event)
            return ()
        effects = [*self._on(event), *self._decide()]
        if not self._fenced and (append := self._next_append()) is not None:
            effects.append(append)
        return tuple(effects)

    # -- what others may read --------------------------------------------------------------------------

    @property
    def options(self) -> RunOptions:
        return self._context.options

    @options.setter
    def options(self, options: RunOptions) -> None:
        self._context.options = options

    @property
    def history(self) -> RunHistory:
        """What the log is known to say."""
        return self._ledger.history

    @property
    def is_open(self) -> bool:
        """This coordinator's epoch is in the log and nobody has taken over."""
        return self._ledger.is_open and not self._fenced

    @property
    def is_closing(self) -> bool:
        """The run is finished and its nodes are told to forget it: it has to be opened anew."""
        return self._closing.is_begun

    @property
    def epoch(self) -> int:
        """This coordinator's token: nodes obey no lower one than the highest that they have heard of."""
        return self._ledger.epoch

    @property
    def owner(self) -> str:
        """The launcher whose group is at work or being opened; "" if there is none."""
        return self._sessions.owner

    @property
    def is_idle(self) -> bool:
        """No group has the run, and this coordinator is not about to write anything."""
        return not self._sessions.owner_has_run and self._ledger.is_settled

    def take_samples(self) -> tuple[Sample, ...]:
        """What has been measured since this was asked last."""
        samples = tuple(self._context.samples)
        self._context.samples.clear()
        return samples

    def gauges(self) -> Iterator[Sample]:
        """How the run is doing now; costs time by nodes and live checkpoints."""
        yield from gauges(
            history=self.history,
            is_active=self._sessions.is_training and not self._session_end.is_over,
            last_step=self._saves.last_step,
            wall_s=self._wall_s,
            exposure=self.exposure(),
        )
        yield Sample(metric=telemetry.INTERVAL, value=self.save_interval_s)
        yield Sample(metric=telemetry.LATENCY, value=self._saves.last_save_s)
        yield Sample(metric=telemetry.COPIES_MISSING, value=self.copies_missing)
        yield Sample(metric=telemetry.DRAINS, value=len(self._drains.attempts))
        damaged = self._context.holders.bad_remote & {c.id.attempt for c in self.history.live()}
        yield Sample(metric=telemetry.DAMAGED, value=len(damaged))

    @property
    def copies_missing(self) -> int:
        """Copies of fragments that repair has yet to make."""
        return self._maintenance.copies_missing

    @property
    def end_cause(self) -> EndCause | None:
        """How the launcher has ended the run; None while it has not, or another group has come since."""
        return self._end_cause

    @property
    def is_training(self) -> bool:
        """The group at work has its state."""
        return self._sessions.is_training

    @property
    def last_step(self) -> int:
        """The last optimizer step that a rank of the group has told of, 0 if none has."""
        return self._saves.last_step

    @property
    def step_s(self) -> float:
        """Seconds that a step of the group takes, of late; 0: not known."""
        return self._saves.step_s

    @property
    def records_waiting(self) -> int:
        """Records that the log has not confirmed; many mean that its store is silent."""
        return len(self._ledger.pending)

    @property
    def saves_underway(self) -> tuple[SaveUnderway, ...]:
        return self._saves.underway()

    def awaited(self) -> tuple[Awaited, ...]:
        """Ranks that others wait for, to restore, to save or to report; as they were AWAITED_EVERY_S ago."""
        now_s = self._context.now_s
        if self._awaited is None or abs(now_s - self._awaited[0]) >= AWAITED_EVERY_S:
            saves, reported = self._saves.awaited(), self._saves.reported()
            found = (*self._sessions.awaited(), *saves, *self._barriers.awaited(reported))
            self._awaited = (now_s, found)
        return self._awaited[1]

    @property
    def drains_underway(self) -> tuple[DrainUnderway, ...]:
        return self._drains.underway()

    @property
    def leaving(self) -> dict[str, float | None]:
        """Live nodes that are about to go, with the seconds until then if that is known."""
        context = self._context
        return {
            node: context.leaves_at_s[node] - context.now_s if node in context.leaves_at_s else None
            for node in sorted(context.draining & context.holders.live)
        }

    @property
    def live_nodes(self) -> frozenset[str]:
        return self._context.holders.live

    @property
    def domains(self) -> dict[str, str]:
        """The failure domain of each node, "" if it is not known."""
        return dict(self._context.domains)

    @property
    def in_cluster_only(self) -> tuple[CheckpointInfo, ...]:
        """Live checkpoints that are not on the storage path, in log order."""
        return tuple(c for c in self.history.live() if c.level < Level.DURABLE)

    def exposure(self) -> tuple[Exposure, ...]:
        """For each node of the group at work: what its death would cost right now."""
        nodes = self.plan.nodes if self.plan else ()
        return exposure(nodes, self.history.lineage(), self._context.holders, self._saves.last_step)

    def needed_nodes(self) -> frozenset[str]:
        """Nodes that the group at work runs on or that hold its copies, and those that hold what is kept and
        nowhere else; between groups only what the next one would resume from counts.
        """
        nodes = {n for node in (self.plan.nodes if self.plan else ()) for n in (node.node_id, *node.holders)}
        kept = self.history.live() if self.plan else self.history.lineage()[-1:]
        alone = [c.id.attempt for c in kept if c.level < Level.DURABLE]
        return frozenset(nodes.union(*(self._context.holders.anywhere(attempt) for attempt in alone)))

    def objection(self, owner: str, dead_owner: str) -> CheckpointError | None:
        """Why this launcher may not open a group now; `dead_owner` was found dead."""
        return self._sessions.objection(owner, dead_owner)

    @property
    def plan(self) -> m.SessionPlan | None:
        """The group at work."""
        return self._context.plan

    @property
    def restores(self) -> tuple[RankRestore, ...]:
        """How the group at work got its state."""
        return self._sessions.restores

    @property
    def holders(self) -> dict[str, dict[int, tuple[str, ...]]]:
        """Who holds which fragment of which attempt."""
        return self._context.holders.table()

    # -- the log -------------------------------------------------------------------------------------

    def _next_append(self) -> m.Append | None:
        return self._ledger.next(self._context.now_s, self._wall_s)

    def _on(self, event: m.Event) -> Iterable[m.Effect]:
        handler = _HANDLERS.get(type(event))
        if handler is None:
            raise TypeError(f"unknown event {event!r}")
        return handler(self, event)

    def _on_log_opened(self, event: m.LogOpened) -> Iterable[m.Effect]:
        self._ledger.open(event)
        self._snapshot_seq = event.history.next_seq - 1 if event.history is not None else 0
        return ()

    def _on_appended(self, event: m.Appended) -> Iterator[m.Effect]:
        op = self._ledger.settle(event, self._context.now_s)
        if op == "unknown":
            self._context.measure(telemetry.FAILURES, cause="store")
            yield from self._saves.drop_excess()
            yield from self._context.warn_once(
                f"The log did not answer for record {event.seq}; trying again."
                + (f" {event.reason}" if event.reason else "")
            )
        elif op == "lost":
            yield from self._step_down(f"Another coordinator wrote record {event.seq}", event.service)
        elif not isinstance(op, str):
            yield from self._logged(op)

    def _logged(self, op: r.Op) -> Iterator[m.Effect]:
        """A record is a fact now: its effects may be seen."""
        match op:
            case r.Epoch():
                for checkpoint in self.history.checkpoints.values():
                    self._is_due(checkpoint)
                ended = self.history.session.ended if self.history.session is not None else None
                if ended is not None and ended.cause == "finished":
                    self._has_ended("finished")
                early, self._early = self._early, []
                for event in early:
                    yield from self._refuse(event) if self._fenced else self._on(event)
            case r.Session():
                yield from self._sessions.session_logged()
            case r.Commit(attempt=attempt):
                yield from self._committed(self.history.checkpoints[attempt])
            case r.Promote(attempt=attempt, level=level):
                if level is Level.DURABLE:
                    self._sweeps.became_durable()
                    self._intervals.durable(attempt)
                checkpoint = self.history.checkpoints[attempt]
                nodes = self._context.session_nodes()
                yield m.NotifyOutcome(
                    attempt=checkpoint.id,
                    level=checkpoint.level,
                    error=None,
                    nodes=nodes,
                    epoch=self._ledger.epoch,
                )
                self._retire_due = True
            case r.Retired(attempt=attempt):
                checkpoint = self.history.checkpoints[attempt]
                self._drains.finish(attempt)
                # Also where no whole fragment is: a copy that was cut off leaves files.
                places = self._context.holders.may_have(attempt).union(self._context.session_nodes())
                yield from self._deletions.start(
                    checkpoint,
                    places & self._context.holders.live,
                    now_s=self._context.now_s,
                    grace_s=self.options.retire_grace_s,
                )
            case r.Pin() | r.Unpin() | r.Annotated() | r.Drilled():
                self._retire_due = True
                yield from self._requests.logged()
            case r.Collected(attempt=attempt):
                self._context.holders.forget(attempt)
                self._context.holders.bad_remote.discard(attempt)
            case r.Note() as note:
                yield from self._sweeps.noted(note)
            case _:
                return

    def _committed(self, checkpoint: CheckpointInfo) -> Iterator[m.Effect]:
        yield from self._saves.committed(checkpoint)
        if not self._save_steps.is_urgent(checkpoint.id):  # what one costs in an emergency is no measure
            self._intervals.committed(self._saves.latency_s)
        if self._is_due(checkpoint):
            self._drains.start(checkpoint)
            yield from self._assign_drains()
        self._retire_due = True
        if self.plan is not None and checkpoint.id.session == self.plan.session:
            yield from self._sessions.release_orphans()

    @property
    def save_interval_s(self) -> float:
        """Seconds between saves, as they are due now; 0: not known."""
        by_time_s, every = self._intervals.interval_s or 0.0, self.options.steps_between_saves
        by_steps_s = (every or 0) * self._saves.step_s
        return min((s for s in (by_time_s, by_steps_s) if s > 0), default=0.0)

    def _is_due(self, checkpoint: CheckpointInfo) -> bool:
        every_s = self._intervals.remote_interval_s
        return self._drain_policy.committed(checkpoint, every=self.options.remote_every, every_s=every_s)

    def _on_order_refused(self, event: m.OrderRefused) -> Iterator[m.Effect]:
        if event.epoch > self.epoch:
            yield from self._step_down(f"The nodes obey epoch {event.epoch}", self._ledger.service)

    def _step_down(self, why: str, service: str) -> Iterator[m.Effect]:
        """The log is another's, of that service ("" if it is not known). If it is foreign, the group ends."""
        self._fenced = True
        error = Fenced(f"{why} of run {self.history.run_name}.")
        is_foreign = service not in ("", self._ledger.service)
        if is_foreign and self.plan is not None:
            name = self.history.run_name
            superseded = RunSuperseded(
                f"Another cluster has taken over run {name}.",
                hint="Stop one of the two, or give them different run names.",
            )
            if is_rollback(service):
                superseded = RunSuperseded(f"Run {name} was rolled back.", hint="Start its training again.")
            yield m.Supersede(
                nodes=self._context.session_nodes(), session_key=self.plan.session_key, error=superseded
            )
        yield from self._sessions.fail(error)
        yield from self._barriers.fail(error)
        yield from self._fail_finishing(error)
        for event in [*self._early, *self._requests.waiting]:
            yield from self._refuse(event)
        yield m.StepDown(error=error, is_foreign=is_foreign)

    def _refuse(self, event: m.Event) -> Iterator[m.Effect]:
        if isinstance(event, _ANSWERED):
            name = self.history.run_name
            error: CheckpointError = Fenced(f"Another coordinator owns run {name}.")
            if self.is_closing:
                error = Unavailable(f"Run {name} has finished and is being put away.", hint="Open it again.")
            yield m.Fail(token=event.token, error=error)

    # -- decisions on the whole log --------------------------------------------------------------------

    def _decide(self) -> Iterator[m.Effect]:
        ledger = self._ledger
        if self._fenced or not ledger.is_open:
            return
        if not ledger.is_settled:
            yield from self._sessions.decide_without_log()
            return
        yield from self._sessions.decide()
        if self._requests and self._ledger.is_settled:
            yield from self._requests.decide(self._saves)
        if self._retire_due and ledger.is_settled:
            self._retire_due = False
            self._retire()
        if self._maintenance.is_due and self._sessions.owner_has_run and ledger.is_settled:
            is_reported = bool(self._context.disks)
            yield from self._maintenance.decide(wall_s=self._wall_s, busy=self._busy())
            if is_reported and self._maintenance.is_crowded and self._ledger.is_settled:
                self._retire()
            self._drain_again()
        if self._context.draining:
            yield from self._leave()
        yield from self._sweeps.order_listing(self._wall_s)
        if self._finishing and not self._saves and self._ledger.is_settled:
            yield from self._finish()
        yield from self._snapshot()
        if self._closing.is_due and not self._sessions.owner_has_run:
            yield from self._put_away()

    def _leave(self) -> Iterator[m.Effect]:
        """All nodes are about to go: what survives that is on the storage path, so the newest goes there."""
        context, lineage = self._context, self.history.lineage()
        if context.holders.live - context.draining or not lineage:
            return
        ends = [at_s for node, at_s in context.leaves_at_s.items() if node in context.holders.live]
        fits = not ends or context.now_s + self._intervals.drain_s <= max(ends)
        if fits and lineage[-1].level < Level.DURABLE and lineage[-1].id.attempt not in self._drains.attempts:
            self._drains.start(lineage[-1], is_urgent=True)
            yield from self._assign_drains()

    def _drain_again(self) -> None:
        """What waits for a drain and has none: it is damaged on the storage path, or its drain gave way, had
        no source, or died with a coordinator.
        """
        holders, checkpoints = self._context.holders, self.history.checkpoints
        bad = [checkpoints[name] for name in sorted(holders.bad_remote & checkpoints.keys())]
        bad = [checkpoint for checkpoint in bad if checkpoint.state == "live"]
        holders.bad_remote.intersection_update(checkpoint.id.attempt for checkpoint in bad)
        for checkpoint in (*bad, *self._drain_policy.undrained(checkpoints)):
            is_new = checkpoint.id.attempt not in self._drains.attempts
            if is_new and self._drains.has_room and holders.has_all(checkpoint):
                self._drains.start(checkpoint)

    def _busy(self) -> set[str]:
        """Checkpoints that something reads at the moment."""
        return self._drains.attempts | self._sessions.busy()

    def _retire(self) -> None:
        """Decide what goes; what stays for longer than its place among the last goes to the storage path."""
        lineage, is_crowded = self.history.lineage(), self._maintenance.is_crowded
        busy = self._busy()
        if is_crowded:  # it is not kept for a storage path that does not take it
            busy -= self._drains.stuck - self._sessions.busy()
        view = RetentionView(live=self.history.live(), lineage=lineage, now_s=self._wall_s, busy=busy)
        old = {c.id.attempt for c in lineage[: -self.options.keep_last]}
        for choice in decide(view, policies_of(self.options), pressure=is_crowded):
            checkpoint = choice.checkpoint
            if not choice.kept:
                self._ledger.append(r.Retired(attempt=checkpoint.id.attempt, reason=choice.reasons[0]))
            elif checkpoint.level < Level.DURABLE and checkpoint.id.attempt in old:
                self._drains.start(checkpoint)

    def _snapshot(self) -> Iterator[m.Effect]:
        """From time to time the whole history goes into one file, so that readers need few records."""
        due = self.history.next_seq - 1 - self._snapshot_seq >= SNAPSHOT_EVERY
        if not due or self._is_writing_snapshot or self._context.now_s < self._snapshot_at_s:
            return
        if self._ledger.is_settled:
            self._is_writing_snapshot = True
            yield m.WriteSnapshot(seq=self.history.next_seq - 1)

    def _on_snapshot_written(self, event: m.SnapshotWritten) -> Iterator[m.Effect]:
        self._is_writing_snapshot = False
        if event.error is None:
            self._snapshot_seq = max(self._snapshot_seq, event.seq)
        else:
            self._snapshot_at_s = self._context.now_s + SNAPSHOT_RETRY_S
            yield from self._context.warn_once(f"The log's snapshot could not be written: {event.error}")

    def _finish(self) -> Iterator[m.Effect]:
        lineage = self.history.lineage()
        newest = lineage[-1] if lineage else None
        ends_group = any(event.ends_group for event in self._finishing)
        if newest is None or newest.level >= Level.DURABLE:
            if ends_group and self._end_tenure():
                return  # again when that is in the log: the cluster may go as soon as the launcher knows
            yield from self._sweeps.order_listing(self._wall_s, is_end=True)
            if ends_group:
                self._has_ended(_request_end(self._finishing))
            asked, self._finishing = self._finishing, []
            for event in asked:
                yield m.Reply(token=event.token, value=newest)
            if ends_group:
                yield from self._sessions.end(RunSuperseded("The launcher has ended the run."))
        else:
            self._drains.start(newest, is_urgent=True, is_requested=True)
            yield from self._assign_drains()

    def _has_ended(self, cause: EndCause) -> None:
        self._end_cause = cause
        if cause == "finished":
            self._closing.finished()

    def _put_away(self) -> Iterator[m.Effect]:
        """Empty the nodes of a finished run; when all of that is done and in the log, have it forgotten."""
        if self._finishing or self._requests or self._saves or not self._ledger.is_settled:
            return
        self._drain_again()
        if not self.options.keep_local_at_end:
            undrained = self._drain_policy.undrained(self.history.checkpoints)
            due = {c.id.attempt for c in undrained if self._context.holders.has_all(c)}
            busy = self._drains.attempts | due
            yield from self._closing.empty_nodes(self._drains, busy=busy, wall_s=self._wall_s)
        yield from self._assign_drains()
        yield from self._sweeps.order_listing(self._wall_s, is_end=True)
        is_collected = all(c.state != "retired" for c in self.history.checkpoints.values())
        is_busy = self._drains or self._sweeps.is_under_way or self._is_writing_snapshot
        if self._ledger.is_settled and is_collected and not is_busy:
            yield self._closing.begin()

    def _while_closing(self, event: m.Event) -> Iterator[m.Effect]:
        match event:
            case m.Ticked():
                self._context.now_s, self._wall_s = event.now_s, event.wall_s
                yield from self._closing.ticked()
            case m.PutAwayEnded():
                yield from self._closing.ended(event)
            case _:
                yield from self._refuse(event)

    def _on_run_wanted(self, event: m.RunWanted) -> Iterable[m.Effect]:
        self._closing.wanted()
        return ()

    def _on_put_away_ended(self, event: m.PutAwayEnded) -> Iterable[m.Effect]:
        return ()  # it was asked by a coordinator that has gone

    def _end_tenure(self) -> bool:
        """As those say who finish; False if that is in the log."""
        cause = _request_end(self._finishing)
        return self._session_end.end(cause, live=None if cause == "finished" else self._context.holders.live)

    def _fail_finishing(self, error: CheckpointError) -> Iterator[m.Effect]:
        ends_group = any(event.ends_group for event in self._finishing)
        if ends_group:
            self._end_tenure()
        asked, self._finishing = self._finishing, []
        for event in asked:
            yield m.Fail(token=event.token, error=error)
        if ends_group:
            yield from self._sessions.end(RunSuperseded("The launcher has ended the run."))

    # -- groups and saves ------------------------------------------------------------------------------

    def _on_group_opened(self, event: m.GroupOpened) -> Iterator[m.Effect]:
        if (objection := self._sessions.objection(event.owner, event.dead_owner)) is not None:
            yield m.Fail(token=event.token, error=objection)
            return
        error = RunSuperseded("A newer training group has opened this run.")
        yield from self._fail_finishing(error)
        self._context.holders.learn(event.inventories, self.history.run_uid)
        yield from self._saves.resume(event.inventories)  # words that were lost with the old group
        yield from self._saves.end_session(error)
        is_other = event.owner not in ("", self._sessions.owner)
        self._session_end.end("replaced" if is_other else "process", live=event.inventories)
        self._end_cause = None
        self._closing.stop()
        yield from self._sessions.opened(event)
        yield from self._saves.adopt(event.inventories)

    def _on_owner_died(self, event: m.OwnerDied) -> Iterable[m.Effect]:
        is_finishing = any(asked.ends_group for asked in self._finishing)
        if event.owner == self._sessions.owner and not is_finishing and self._ledger.is_settled:
            self._session_end.end("launcher", live=self._context.holders.live)
        return ()

    def _on_inventory_taken(self, event: m.InventoryTaken) -> Iterator[m.Effect]:
        if self._sessions.inventory_taken(event):
            yield from self._saves.adopt(event.inventories)

    def _on_group_recovered(self, event: m.GroupRecovered) -> Iterator[m.Effect]:
        if self._sessions.owner_has_run:  # a group has come meanwhile
            return
        self._context.holders.learn(event.inventories, self.history.run_uid)
        current = self.history.session
        session_key = (current.opened_by, current.session) if current is not None else (0, 0)
        if event.plan.session_key == session_key and self._end_cause == "finished":
            return  # its coordinator died between the record and the answer
        if event.plan.session_key > session_key:
            yield from self._saves.adopt(event.inventories)
        self._context.measure(telemetry.FAILURES, cause="coordinator")
        yield from self._sessions.found(event)
        if self._sessions.owner_has_run:
            self._end_cause = None
            self._closing.stop()
        yield from self._saves.resume(event.inventories)

    def _on_nodes_joined(self, event: m.NodesJoined) -> Iterator[m.Effect]:
        plans = {node: found.plan for node, found in event.inventories.items() if found.plan is not None}
        if plans and not self._sessions.owner_has_run:  # its agents did not answer when it was looked for
            newest = max(plans.values(), key=lambda plan: plan.session_key)
            yield from self._on(m.GroupRecovered(plan=newest, inventories=event.inventories))
            return
        renewed = frozenset(event.inventories) - frozenset(plans)
        died = renewed & self._context.holders.live  # others have only just joined
        self._context.measure(telemetry.FAILURES, len(died), cause="agent")
        self._context.holders.learn(event.inventories, self.history.run_uid)
        self._maintenance.nodes_changed(frozenset())
        for node, plan in plans.items():
            if self.plan is not None and plan.session_key < self.plan.session_key:
                error = RunSuperseded("A newer training group has opened this run.")
                yield m.Supersede(nodes=(node,), session_key=plan.session_key, error=error)
        yield from self._saves.resume(event.inventories)
        yield from self._saves.agents_lost(renewed)

    def _on_node_restored(self, event: m.NodeRestored) -> Iterator[m.Effect]:
        self._session_end.restored(event)
        yield from self._sessions.node_restored(event)

    def _on_ranks_restored(self, event: m.RanksRestored) -> Iterable[m.Effect]:
        self._sessions.ranks_restored(event)
        return ()

    def _on_barrier_reached(self, event: m.BarrierReached) -> Iterator[m.Effect]:
        yield from self._barriers.met(event)

    def _on_node_stored(self, event: m.NodeStored) -> Iterator[m.Effect]:
        if not self._is_stale(event):
            yield from self._saves.stored(event)

    def _on_replica_ended(self, event: m.ReplicaEnded) -> Iterator[m.Effect]:
        if self._is_stale(event):
            return
        yield from self._note_link(event)
        self._maintenance.copied(event)
        yield from self._saves.replica_ended(event)

    def _note_link(self, event: m.ReplicaEnded) -> Iterator[m.Effect]:
        """Note whether the holder answered the source, so that others are asked while it does not."""
        links, source, holder = self._context.links, event.source, event.holder
        if event.error is None:
            links.worked(source, holder)
        elif event.is_unreachable and links.failed(source, holder, self._context.now_s):
            yield m.Warn(
                text=f"Node {source[:12]} does not reach node {holder[:12]}: {event.error} "
                "Copies go to other nodes if there are any, else they are made when it answers again."
            )

    def _is_stale(self, event: m.NodeStored | m.ReplicaEnded) -> bool:
        """Said before the node heard of this coordinator: its predecessor may have had it deleted since.

        Nothing is lost: the inventory tells what is there, and CoordinatorReturned has it told again.
        """
        return event.epoch is not None and event.epoch < self.epoch

    def _on_save_refused(self, event: m.SaveRefused) -> Iterator[m.Effect]:
        yield from self._saves.refused(event)

    def _on_ranks_progressed(self, event: m.RanksProgressed) -> Iterator[m.Effect]:
        self._save_steps.progressed(event)
        self._intervals.progressed(event)
        self._session_end.progressed(event, self._wall_s)
        yield from self._barriers.progressed(event)
        yield from self._saves.progressed(event)

    def _on_finish_requested(self, event: m.FinishRequested) -> Iterable[m.Effect]:
        self._finishing.append(event)
        return ()

    def _on_scrub_ended(self, event: m.ScrubEnded) -> Iterator[m.Effect]:
        yield from self._maintenance.scrubbed(event)
        self._drain_again()
        yield from self._assign_drains()

    def _on_request(
        self, event: m.PinRequested | m.UnpinRequested | m.AnnotateRequested | m.DrillEnded
    ) -> Iterator[m.Effect]:
        yield from self._requests.add(event, self._saves)

    # -- deletion and draining -------------------------------------------------------------------------

    def _on_delete_ended(self, event: m.DeleteEnded) -> Iterable[m.Effect]:
        self._collected(self._deletions.ended(event))
        return ()

    def _collected(self, attempts: Iterable[str]) -> None:
        for attempt in attempts:
            self._ledger.append(r.Collected(attempt=attempt))

    def _redo_deletes(self) -> Iterator[m.Effect]:
        if self.is_open and self._deletions.is_due(self._context.now_s):
            collecting = {op.attempt for op in self._ledger.pending if isinstance(op, r.Collected)}
            checkpoints = self.history.checkpoints.values()
            retired = [c for c in checkpoints if c.state == "retired" and c.id.attempt not in collecting]
            yield from self._deletions.redo(
                retired,
                self._context.holders.live,
                now_s=self._context.now_s,
                grace_s=self.options.retire_grace_s,
            )

    def _assign_drains(self) -> Iterator[m.Effect]:
        self._intervals.draining(self._drains.attempts)
        for checkpoint, reason in self._drains.give_up():
            yield from self._drain_failed(checkpoint.id, reason)
        yield from self._drains.assign()

    def _on_drain_requested(self, event: m.DrainRequested) -> Iterator[m.Effect]:
        checkpoint = self.history.checkpoints.get(event.attempt)
        if checkpoint is None or checkpoint.state != "live":
            state = f"is {checkpoint.state}" if checkpoint else "does not exist"
            yield m.Fail(token=event.token, error=ConfigError(f"Checkpoint {event.attempt} {state}."))
            return
        if checkpoint.level < Level.DURABLE:
            self._drains.start(checkpoint)
            yield from self._assign_drains()
        yield m.Reply(token=event.token, value=None)

    def _on_drain_ended(self, event: m.DrainEnded) -> Iterator[m.Effect]:
        self._drains.ended(event)
        if event.error is not None:
            self._context.measure(telemetry.FAILURES, cause="drain")
            yield from self._context.warn_once(
                f"Step {event.attempt.step}: draining fragment {event.node_index}: {event.error}"
            )
        yield from self._assign_drains()

    def _drain_failed(self, attempt: AttemptId, reason: str) -> Iterator[m.Effect]:
        error = Unavailable(f"Step {attempt.step} did not reach the storage path: {reason}")
        yield from self._context.warn_once(str(error))
        lineage = self.history.lineage()
        if lineage and lineage[-1].id == attempt:
            yield from self._fail_finishing(error)

    def _on_description_written(self, event: m.DescriptionWritten) -> Iterator[m.Effect]:
        checkpoint = self.history.checkpoints[event.attempt.attempt]
        self._drains.described(event)
        if event.is_damage:
            yield from self._drain_failed(event.attempt, str(event.error))
        elif event.error is not None:
            yield from self._context.warn_once(f"Step {event.attempt.step}: describing it: {event.error}")
        else:
            self._maintenance.uploaded(event.attempt.attempt)
            if checkpoint.state == "live" and checkpoint.level < Level.DURABLE:
                self._ledger.append(
                    r.Promote(
                        attempt=event.attempt.attempt, level=Level.DURABLE, replicas=checkpoint.replicas
                    )
                )

    def _on_remote_listed(self, event: m.RemoteListed) -> Iterator[m.Effect]:
        yield from self._sweeps.listed(
            event,
            draining=self._drains.attempts,
            may_come=self._may_come if self._sessions.owner_has_run else None,
        )

    def _may_come(self, attempt: str) -> bool:
        """It is not in the log, and may be one day; asked only when inventory has been taken."""
        return self._saves.is_open(attempt) or bool(self._context.holders.anywhere(attempt))

    # -- time and nodes --------------------------------------------------------------------------------

    def _on_ticked(self, event: m.Ticked) -> Iterator[m.Effect]:
        self._context.now_s, self._wall_s = event.now_s, event.wall_s
        if (again := self._ledger.retry(event.now_s)) is not None:
            yield again
        yield from self._saves.ticked()
        is_training = self._sessions.is_training
        self._intervals.ticked(is_training=is_training)
        yield from self._save_steps.ticked(
            self._saves, is_training=is_training, interval_s=self._intervals.interval_s
        )
        yield from self._sessions.ticked()
        yield from self._barriers.ticked()
        yield from self._redo_deletes()
        if self._drains:
            yield from self._assign_drains()

    def _on_nodes_seen(self, event: m.NodesSeen) -> Iterator[m.Effect]:
        lost = self._context.holders.live - event.live
        context = self._context
        if event.live != context.holders.live or event.draining != context.draining:
            self._maintenance.nodes_changed(lost)
        context.holders.live, context.draining = event.live, event.draining
        context.leaves_at_s = {node: context.now_s + left_s for node, left_s in event.left_s.items()}
        context.domains, context.disks = event.domains, event.disks or context.disks
        if lost or event.draining:
            self._session_end.nodes_seen(lost)
        if lost:
            if missed := lost & self.needed_nodes():  # the agents of others may just have been ended
                self._context.measure(telemetry.FAILURES, len(missed), cause="node")
            self._context.holders.lose(lost)
            self._context.links.forget(lost)
            yield from self._saves.nodes_lost(lost)
            self._collected(self._deletions.lost(lost))
            self._drains.lost(lost)
            yield from self._assign_drains()


def _request_end(asked: Iterable[m.FinishRequested]) -> EndCause:
    return "process" if any(event.has_failed for event in asked) else "finished"


_HANDLERS: Mapping[type[m.Event], Callable[[RunMachine, Any], Iterable[m.Effect]]] = {
    m.LogOpened: RunMachine._on_log_opened,
    m.Appended: RunMachine._on_appended,
    m.OrderRefused: RunMachine._on_order_refused,
    m.SnapshotWritten: RunMachine._on_snapshot_written,
    m.RunWanted: RunMachine._on_run_wanted,
    m.PutAwayEnded: RunMachine._on_put_away_ended,
    m.GroupOpened: RunMachine._on_group_opened,
    m.OwnerDied: RunMachine._on_owner_died,
    m.InventoryTaken: RunMachine._on_inventory_taken,
    m.GroupRecovered: RunMachine._on_group_recovered,
    m.NodesJoined: RunMachine._on_nodes_joined,
    m.NodeRestored: RunMachine._on_node_restored,
    m.RanksRestored: RunMachine._on_ranks_restored,
    m.BarrierReached: RunMachine._on_barrier_reached,
    m.NodeStored: RunMachine._on_node_stored,
    m.ReplicaEnded: RunMachine._on_replica_ended,
    m.SaveRefused: RunMachine._on_save_refused,
    m.RanksProgressed: RunMachine._on_ranks_progressed,
    m.FinishRequested: RunMachine._on_finish_requested,
    m.ScrubEnded: RunMachine._on_scrub_ended,
    m.PinRequested: RunMachine._on_log_requested,
    m.UnpinRequested: RunMachine._on_log_requested,
    m.AnnotateRequested: RunMachine._on_log_requested,
    m.DrillEnded: RunMachine._on_log_requested,
    m.DeleteEnded: RunMachine._on_delete_ended,
    m.DrainRequested: RunMachine._on_drain_requested,
    m.DrainEnded: RunMachine._on_drain_ended,
    m.DescriptionWritten: RunMachine._on_description_written,
    m.RemoteListed: RunMachine._on_remote_listed,
    m.Ticked: RunMachine._on_ticked,
    m.NodesSeen: RunMachine._on_nodes_seen,
}
