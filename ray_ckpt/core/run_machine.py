"""The run machine: all decisions of the coordinator about one run (see PROTOCOL.md).

The machine has one entry point: `handle(event) -> effects`. A decision that others may see goes into the log
first; the effects of the decision follow when the store has confirmed the record. One record is in flight at
a time, so the log is a total order and a lost race is noticed at once. Decisions that depend on the whole log
(the checkpoint that a group restores, retirement, the end of a run) are taken only while no record is
pending.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ray_ckpt import telemetry
from ray_ckpt.config import RunOptions
from ray_ckpt.core import messages as m
from ray_ckpt.core.barriers import Barriers
from ray_ckpt.core.closing import Closing
from ray_ckpt.core.context import CLOCK_S, Context
from ray_ckpt.core.deletions import delete_retired
from ray_ckpt.core.drain import Drains
from ray_ckpt.core.drain_schedule import DrainSchedule
from ray_ckpt.core.finishing import Finishing
from ray_ckpt.core.history import RunHistory
from ray_ckpt.core.ledger import Ledger
from ray_ckpt.core.log_requests import Requested, Requests
from ray_ckpt.core.log_snapshots import LogSnapshots
from ray_ckpt.core.machine_view import MachineParts, MachineView
from ray_ckpt.core.maintenance import Maintenance
from ray_ckpt.core.missing_ranks import MissingRanks
from ray_ckpt.core.open_attempts import OpenAttempts
from ray_ckpt.core.ownership import is_offline, is_rollback
from ray_ckpt.core.progress import SessionProgress
from ray_ckpt.core.retirement import Retirement
from ray_ckpt.core.salvage import Salvages
from ray_ckpt.core.save_intervals import SaveIntervals
from ray_ckpt.core.save_steps import SaveSteps
from ray_ckpt.core.save_times import SaveTimes
from ray_ckpt.core.saves import Saves
from ray_ckpt.core.session_end import SessionEnd
from ray_ckpt.core.sessions import Sessions
from ray_ckpt.core.sweep import Sweeps
from ray_ckpt.core.values import SessionPlan
from ray_ckpt.errors import CheckpointError, Fenced, RunSuperseded, Unavailable
from ray_ckpt.format import records as r
from ray_ckpt.telemetry import Sample
from ray_ckpt.types import CheckpointInfo, Level

# Before its fence is in the log, a coordinator may lack commits or be superseded, so it handles only these.
_BEFORE_THE_FENCE = (m.LogOpened, m.Appended, m.Ticked, m.NodesSeen)
_ANSWERED = (
    m.GroupOpened
    | m.NodeRestored
    | m.BarrierReached
    | m.SalvageRequested
    | m.FinishRequested
    | m.DrainRequested
    | Requested
)


class RunMachine:
    """State and decisions of one run. `view` reads the state for status and metrics.

    `writer` identifies this coordinator in the log; `service` identifies the service of the coordinator's
    cluster and stays the same over restarts.
    """

    def __init__(self, *, options: RunOptions, writer: str, service: str) -> None:
        self._ledger = Ledger(writer=writer, service=service)
        context = self._context = Context(options, self._ledger)
        self._sessions = Sessions(context)
        self._progress = SessionProgress(context)
        self._times = SaveTimes(context)
        self._attempts = OpenAttempts(context, progress=self._progress, times=self._times)
        missing = MissingRanks(context, progress=self._progress, attempts=self._attempts)
        self._saves = Saves(context, progress=self._progress, attempts=self._attempts, missing=missing)
        self._barriers = Barriers(context)
        self._salvages = Salvages(context, attempts=self._attempts)
        self._save_steps = SaveSteps(
            context, progress=self._progress, attempts=self._attempts, times=self._times
        )
        self._intervals = SaveIntervals(context)
        self._session_end = SessionEnd(context)
        self._drains = Drains(context)
        self._item_uploads = Drains(context, are_of_items=True)
        self._sweeps = Sweeps(context)
        self._maintenance = Maintenance(context)
        self._requests = Requests(context)
        self._snapshots = LogSnapshots(context)
        self._closing = Closing(context)
        self._finishing = Finishing(
            context,
            sessions=self._sessions,
            session_end=self._session_end,
            sweeps=self._sweeps,
            closing=self._closing,
        )
        self._drain_schedule = DrainSchedule(
            context,
            drains=self._drains,
            item_uploads=self._item_uploads,
            intervals=self._intervals,
            maintenance=self._maintenance,
            finishing=self._finishing,
        )
        self._retirement = Retirement(
            context,
            sessions=self._sessions,
            drains=self._drains,
            item_uploads=self._item_uploads,
            maintenance=self._maintenance,
        )
        self._early: list[m.Event] = []  # events before the fence; bounded by the number of callers
        self._fenced = False
        self.view = MachineView(
            MachineParts(
                context=context,
                sessions=self._sessions,
                progress=self._progress,
                times=self._times,
                saves=self._saves,
                missing=missing,
                barriers=self._barriers,
                intervals=self._intervals,
                session_end=self._session_end,
                drains=self._drains,
                item_uploads=self._item_uploads,
                maintenance=self._maintenance,
                finishing=self._finishing,
            )
        )

    def handle(self, event: m.Event) -> tuple[m.Effect, ...]:
        """Apply one event and return the effects, to be carried out in order."""
        if self._fenced:
            return tuple(self._refuse(event))
        if self.is_closing:
            return tuple(self._while_closing(event))
        if not self._ledger.is_open and isinstance(event, m.RanksProgressed | m.RanksRestored):
            return ()  # nodes repeat these
        if not self._ledger.is_open and not isinstance(event, _BEFORE_THE_FENCE):
            self._early.append(event)
            return ()
        effects = [*self._on(event), *self._decide()]
        if not self._fenced:
            append = self._ledger.next(self._context.now_s, self._context.wall_s)
            if append is not None:
                effects.append(append)
        return tuple(effects)

    def take_samples(self) -> tuple[Sample, ...]:
        """Return the measurements since the last call."""
        return self._context.take_samples()

    @property
    def options(self) -> RunOptions:
        return self._context.options

    @options.setter
    def options(self, options: RunOptions) -> None:
        self._context.options = options

    @property
    def history(self) -> RunHistory:
        """The run as the confirmed records of the log describe it."""
        return self._ledger.history

    @property
    def is_open(self) -> bool:
        """The epoch of this coordinator is in the log, and no other coordinator has taken over."""
        return self._ledger.is_open and not self._fenced

    @property
    def is_closing(self) -> bool:
        """The run has finished, and nodes were ordered to forget it: the run has to be opened anew."""
        return self._closing.is_begun

    @property
    def epoch(self) -> int:
        """The epoch of this coordinator: nodes refuse orders with an epoch below the highest seen."""
        return self._ledger.epoch

    @property
    def plan(self) -> SessionPlan | None:
        """The plan of the current group, or None."""
        return self._context.plan

    # -- the log -------------------------------------------------------------------------------------

    def _on(self, event: m.Event) -> Iterable[m.Effect]:
        handler = _HANDLERS.get(type(event))
        if handler is None:
            raise TypeError(f"unknown event {event!r}")
        return handler(self, event)

    def _on_log_opened(self, event: m.LogOpened) -> Iterable[m.Effect]:
        self._ledger.open(event)
        self._snapshots.opened(event)
        return ()

    def _on_appended(self, event: m.Appended) -> Iterator[m.Effect]:
        op = self._ledger.settle(event, self._context.now_s)
        if op == "unknown":
            self._context.measure(telemetry.FAILURES, cause="store")
            yield from self._attempts.drop_excess(event.reason)
            reason = f" {event.reason}" if event.reason else ""
            yield from self._context.warn_once(
                f"The log did not take record {event.seq}; trying again.{reason}",
                about=f"record {event.seq}, {'with' if reason else 'without'} a reason",
            )
        elif op == "lost":
            yield from self._step_down(f"Another coordinator wrote record {event.seq}", event.service)
        elif not isinstance(op, str):
            yield from self._logged(op)

    def _logged(self, op: r.Op) -> Iterator[m.Effect]:
        """Yield the effects of a record that the store has just confirmed."""
        checkpoints = self.history.checkpoints
        match op:
            case r.Epoch():
                yield from self._opened()
            case r.Session():
                yield from self._sessions.session_logged()
            case r.Commit(attempt=attempt):
                yield from self._committed(checkpoints[attempt])
            case r.Promote(attempt=attempt, level=level):
                if level is Level.DURABLE:
                    self._sweeps.became_durable()
                    self._intervals.durable(attempt)
                yield from self._saves.promoted(checkpoints[attempt])
                self._retirement.is_due = True
            case r.Exported():
                self._sweeps.became_durable()
                self._retirement.is_due = True
            case r.Retired(attempt=attempt):
                yield from self._retirement.logged(checkpoints[attempt])
            case r.Pin() | r.Unpin() | r.Annotated() | r.Drilled():
                self._retirement.is_due = True
                yield from self._requests.logged()
            case r.Collected(attempt=attempt):
                self._context.holders.forget(attempt)
                self._context.holders.bad_remote.pop(attempt, None)
            case r.Note() as note:
                yield from self._sweeps.noted(note)
            case _:
                return

    def _opened(self) -> Iterator[m.Effect]:
        """Begin after the fence is in the log, and handle the events that came before the fence."""
        for checkpoint in self.history.checkpoints.values():
            self._drain_schedule.recount(checkpoint)
        self._maintenance.opened()
        ended = self.history.session.ended if self.history.session is not None else None
        if ended is not None and ended.cause == "finished":
            self._finishing.ended("finished")
        early, self._early = self._early, []
        for event in early:
            yield from self._refuse(event) if self._fenced else self._on(event)

    def _committed(self, checkpoint: CheckpointInfo) -> Iterator[m.Effect]:
        yield from self._attempts.committed(checkpoint)
        if not self._save_steps.is_urgent(checkpoint.id):  # urgent saves are not typical
            self._intervals.committed(self._times.latency_s)
        yield from self._drain_schedule.committed(checkpoint)
        self._retirement.is_due = True
        if self.plan is not None and checkpoint.id.session == self.plan.session:
            yield from self._sessions.release_orphans(checkpoint, self._attempts.is_open)

    def _on_order_refused(self, event: m.OrderRefused) -> Iterator[m.Effect]:
        if event.epoch > self.epoch:
            yield from self._step_down(f"The nodes obey epoch {event.epoch}", self._ledger.service)

    def _step_down(self, why: str, service: str) -> Iterator[m.Effect]:
        """Give up the run to `service`, the log's writer ("": unknown); a foreign service ends the group."""
        self._fenced = True
        error = Fenced(f"{why} of run {self.history.run_name}.")
        is_foreign = service not in ("", self._ledger.service)
        if is_foreign and self.plan is not None:
            name = self.history.run_name
            superseded = RunSuperseded(
                f"Another cluster has taken over run {name}.",
                hint="Stop one of the two, or give them different run names.",
            )
            if is_offline(service):
                what = "was rolled back" if is_rollback(service) else "has an imported checkpoint"
                superseded = RunSuperseded(f"Run {name} {what}.", hint="Start its training again.")
            yield m.Supersede(
                nodes=self._context.session_nodes(), session_key=self.plan.session_key, error=superseded
            )
        yield from self._sessions.fail(error)
        yield from self._barriers.fail(error)
        yield from self._salvages.fail(error)
        yield from self._finishing.fail(error)
        yield from self._drain_schedule.fail(error)
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
        """Take the decisions of _DECISIONS that are due, if no record is waiting to be logged."""
        ledger = self._ledger
        if self._fenced or not ledger.is_open:
            return
        if not ledger.is_settled:
            yield from self._sessions.decide_without_log()
            return
        for is_due, decide, appends in _DECISIONS:
            if is_due(self) and (not appends or ledger.is_settled):
                yield from decide(self)

    def _maintain(self) -> Iterator[m.Effect]:
        busy = self._retirement.busy()
        if not self._sessions.owner_has_run:
            yield from self._maintenance.compute(busy)
            return
        yield from self._maintenance.decide(busy=busy, is_training=self._sessions.is_training)
        if self._maintenance.found_crowded and self._ledger.is_settled:
            self._retirement.decide()
        self._drain_schedule.start_again()

    def _put_away(self) -> Iterator[m.Effect]:
        """Empty the nodes of a finished run; close the run when the nodes are empty and this is logged."""
        self._closing.looked()
        self._drain_schedule.start_again(is_end=True)
        if not self.options.keep_local_at_end:
            busy = self._drains.attempts | self._drain_schedule.undrained()
            yield from self._closing.empty_nodes(self._drains, busy=busy)
        yield from self._drain_schedule.assign()
        yield from self._sweeps.order_listing(self._context.wall_s, is_end=True)
        is_collected = all(c.state != "retired" for c in self.history.checkpoints.values())
        is_uploading = self._drains or self._item_uploads or self._maintenance.is_computing
        is_busy = is_uploading or self._sweeps.is_under_way or self._snapshots.is_writing
        if self._ledger.is_settled and is_collected and not is_busy:
            yield self._closing.begin()

    def _while_closing(self, event: m.Event) -> Iterator[m.Effect]:
        match event:
            case m.Ticked():
                self._context.now_s, self._context.wall_s = event.now_s, event.wall_s
                yield from self._closing.ticked()
            case m.PutAwayEnded():
                yield from self._closing.ended(event)
            case _:
                yield from self._refuse(event)

    # -- groups and saves ------------------------------------------------------------------------------

    def _on_group_opened(self, event: m.GroupOpened) -> Iterator[m.Effect]:
        if (objection := self._sessions.objection(event.owner, event.dead_owner)) is not None:
            yield m.Fail(token=event.token, error=objection)
            return
        error = RunSuperseded("A newer training group has opened this run.")
        yield from self._finishing.fail(error)
        yield from self._drain_schedule.fail(error)
        asked_s = event.asked_s - CLOCK_S
        self._context.holders.learn(event.inventories, self.history.run_uid, asked_s=asked_s)
        self._saves.count_reports(asked_s)
        yield from self._saves.count_inventory(event.inventories)  # reports may have been lost
        yield from self._saves.end_session(error)
        is_other = event.owner not in ("", self._sessions.owner)
        self._session_end.end("replaced" if is_other else "process", live=event.inventories)
        self._finishing.group_came()
        yield from self._sessions.opened(event)
        yield from self._saves.recover(event.inventories)

    def _on_owner_died(self, event: m.OwnerDied) -> Iterator[m.Effect]:
        """Record the end of a dead launcher's session, and end its group once no save is under way.

        The event comes every few seconds. The newest checkpoint is drained, as after a run that failed.
        """
        is_at_work = event.owner == self._sessions.owner and not self._finishing.ends_group
        if not is_at_work or not self._ledger.is_settled:
            return
        if self._session_end.end("launcher", live=self._context.holders.live) or self._attempts:
            return
        is_written = self._session_end.since_s() < self.options.attempt_timeout_s
        if is_written and self._saves.underway():  # nodes still write what ranks have captured
            return
        self._finishing.ended("launcher")
        yield from self._sessions.end(RunSuperseded("The launcher has died."))
        if (newest := self._context.newest) and self._context.holders.needs_upload(newest):
            yield from self._drain_schedule.bring(newest)

    def _on_inventory_taken(self, event: m.InventoryTaken) -> Iterator[m.Effect]:
        if self._sessions.inventory_taken(event):
            yield from self._saves.recover(event.inventories)

    def _on_group_recovered(self, event: m.GroupRecovered) -> Iterator[m.Effect]:
        if self._sessions.owner_has_run:  # a new group has opened in the meantime
            return
        self._context.holders.learn(event.inventories, self.history.run_uid)
        current = self.history.session
        session_key = (current.opened_by, current.session) if current is not None else (0, 0)
        if event.plan.session_key == session_key and self._finishing.end_cause == "finished":
            return  # the earlier coordinator died between the record and the answer
        if event.plan.session_key > session_key:
            yield from self._saves.recover(event.inventories)
        self._context.measure(telemetry.FAILURES, cause="coordinator")
        yield from self._sessions.found(event)
        if self._sessions.owner_has_run:
            self._finishing.group_came()
        yield from self._saves.count_inventory(event.inventories)

    def _on_nodes_joined(self, event: m.NodesJoined) -> Iterator[m.Effect]:
        inventories = event.inventories.items()
        keys = {node: found.session_key for node, found in inventories if found.session_key is not None}
        renewed = frozenset(event.inventories) - frozenset(keys)
        died = renewed & self._context.holders.live  # the other nodes have only just joined
        self._context.measure(telemetry.FAILURES, len(died), cause="agent")
        self._context.holders.learn(event.inventories, self.history.run_uid)
        self._maintenance.nodes_changed(frozenset())
        for node, session_key in keys.items():
            plan = self.plan
            if plan is not None and session_key < plan.session_key and not plan.continues(session_key):
                error = RunSuperseded("A newer training group has opened this run.")
                yield m.Supersede(nodes=(node,), session_key=session_key, error=error)
        yield from self._saves.count_inventory(event.inventories)
        yield from self._saves.agents_lost(renewed)
        yield from delete_retired(event.inventories, self.history.checkpoints, self._context.holders)
        self._sessions.joined(event.inventories)

    def _on_node_restored(self, event: m.NodeRestored) -> Iterator[m.Effect]:
        self._session_end.restored(event)
        yield from self._sessions.node_restored(event)
        if (found := self._sessions.take_bad_nodes()) is not None:
            attempt, nodes = found
            self._maintenance.suspect(attempt, nodes, is_restored=self._sessions.is_training)

    def _on_node_stored(self, event: m.NodeStored) -> Iterator[m.Effect]:
        if not self._is_stale(event):
            yield from self._saves.stored(event)
            for known in filter(None, map(self.history.checkpoints.get, event.facts.bad_copies)):
                self._maintenance.suspect(known.id, {event.node_id})

    def _on_replica_ended(self, event: m.ReplicaEnded) -> Iterator[m.Effect]:
        if self._is_stale(event):
            return
        yield from self._saves.note_link(event)
        self._maintenance.copied(event)
        yield from self._saves.replica_ended(event)

    def _on_code_ended(self, event: m.CodeEnded) -> Iterator[m.Effect]:
        yield from self._maintenance.coded(event)
        yield from self._saves.code_ended(event)

    def _is_stale(self, event: m.NodeStored | m.ReplicaEnded) -> bool:
        """Return True for a report to the previous coordinator, which may have deleted the files afterwards.

        The report is not needed: the inventory lists the files, and CoordinatorReturned makes the node report
        again.
        """
        return event.epoch is not None and event.epoch < self.epoch

    def _on_ranks_progressed(self, event: m.RanksProgressed) -> Iterator[m.Effect]:
        self._sessions.progressed(event)
        self._save_steps.progressed(event)
        self._intervals.progressed(event)
        self._session_end.progressed(event, self._context.wall_s)
        yield from self._barriers.progressed(event)
        yield from self._saves.progressed(event)

    # -- upkeep, time and nodes ------------------------------------------------------------------------

    def _on_scrub_ended(self, event: m.ScrubEnded) -> Iterator[m.Effect]:
        yield from self._maintenance.scrubbed(event)
        for attempt in self._attempts:
            if attempt.is_committing:
                yield from self._attempts.reconsider(attempt)
        self._drain_schedule.start_again()
        yield from self._drain_schedule.assign()

    def _on_remote_listed(self, event: m.RemoteListed) -> Iterator[m.Effect]:
        yield from self._sweeps.listed(
            event,
            uploading=self._drains.attempts | self._item_uploads.attempts | self._maintenance.mending,
            may_come=self._may_come if self._sessions.owner_has_run else None,
        )

    def _may_come(self, attempt: str) -> bool:
        """Return True if an attempt that is not in the log may still be committed.

        Called only after an inventory was taken.
        """
        return self._attempts.is_open(attempt) or bool(self._context.holders.anywhere(attempt))

    def _on_ticked(self, event: m.Ticked) -> Iterator[m.Effect]:
        self._context.now_s, self._context.wall_s = event.now_s, event.wall_s
        if (again := self._ledger.retry(event.now_s)) is not None:
            yield again
        yield from self._saves.ticked()
        is_training = self._sessions.is_training
        self._intervals.ticked(is_training=is_training)
        yield from self._save_steps.ticked(is_training=is_training, interval_s=self._intervals.interval_s)
        yield from self._sessions.ticked()
        yield from self._barriers.ticked()
        yield from self._salvages.ticked()
        yield from self._retirement.ticked()
        yield from self._drain_schedule.ticked()

    def _on_nodes_seen(self, event: m.NodesSeen) -> Iterator[m.Effect]:
        context = self._context
        lost: frozenset[str] = frozenset()
        if event.live is not context.holders.live:  # equal sets are mostly one object
            lost = context.holders.live - event.live
        if lost or len(event.live) != len(context.holders.live) or event.draining != context.draining:
            self._maintenance.nodes_changed(lost)
        context.holders.seen(event.live)
        context.draining, context.domains, context.spares = event.draining, event.domains, event.spares
        context.replica_nodes = event.replica_nodes
        context.leaves_at_s = {node: context.now_s + left_s for node, left_s in event.left_s.items()}
        if event.disks:
            self._maintenance.disks_seen(event.disks)
        if lost or event.draining:
            self._session_end.nodes_seen(lost)
        if lost:
            if missed := lost & self.view.needed_nodes():  # on other nodes, an idle agent may just have ended
                context.measure(telemetry.FAILURES, len(missed), cause="node")
            context.holders.lose(lost)
            context.links.forget(lost)
            yield from self._saves.nodes_lost(lost)
            self._retirement.nodes_lost(lost)
            yield from self._drain_schedule.nodes_lost(lost)


class _Decision(NamedTuple):
    is_due: Callable[[RunMachine], object]
    decide: Callable[[RunMachine], Iterable[m.Effect]]
    appends: bool = True  # if True, skipped after an earlier decision has appended a record


_DECISIONS = (  # taken in this order, after each event, while no record is pending
    _Decision(lambda run: run._sessions.is_choosing, lambda run: run._sessions.decide()),
    _Decision(lambda run: run._requests, lambda run: run._requests.decide(run._attempts)),
    _Decision(lambda run: run._maintenance.has_news, lambda run: run._maintenance.record_damage()),
    _Decision(lambda run: run._retirement.is_due, lambda run: run._retirement.decide()),
    _Decision(lambda run: run._maintenance.is_due, RunMachine._maintain),
    _Decision(
        lambda run: run._drain_schedule.is_rescue_due, lambda run: run._drain_schedule.rescue(), appends=False
    ),
    _Decision(lambda run: True, lambda run: run._sweeps.order_listing(run._context.wall_s), appends=False),
    _Decision(lambda run: run._finishing and not run._attempts, lambda run: run._drain_schedule.finish()),
    _Decision(lambda run: run._snapshots.is_due, lambda run: run._snapshots.write()),
    _Decision(
        lambda run: (
            run._closing.is_due
            and not (run._sessions.owner_has_run or run._finishing or run._requests or run._attempts)
        ),
        RunMachine._put_away,
    ),
)

_HANDLERS: Mapping[type[m.Event], Callable[[RunMachine, Any], Iterable[m.Effect]]] = {
    m.LogOpened: RunMachine._on_log_opened,
    m.Appended: RunMachine._on_appended,
    m.OrderRefused: RunMachine._on_order_refused,
    m.SnapshotWritten: lambda run, event: run._snapshots.written(event),
    m.GroupOpened: RunMachine._on_group_opened,
    m.GroupRecovered: RunMachine._on_group_recovered,
    m.NodesJoined: RunMachine._on_nodes_joined,
    m.InventoryTaken: RunMachine._on_inventory_taken,
    m.NodeRestored: RunMachine._on_node_restored,
    m.RanksRestored: lambda run, event: run._sessions.ranks_restored(event),
    m.RanksProgressed: RunMachine._on_ranks_progressed,
    m.BarrierReached: lambda run, event: run._barriers.met(event),
    m.SalvageRequested: lambda run, event: run._salvages.requested(event),
    m.SurvivorsReported: lambda run, event: run._salvages.reported(event),
    m.NodeStored: RunMachine._on_node_stored,
    m.ReplicaEnded: RunMachine._on_replica_ended,
    m.CodeEnded: RunMachine._on_code_ended,
    m.SaveRefused: lambda run, event: run._saves.refused(event),
    m.PinRequested: lambda run, event: run._requests.add(event, run._attempts),
    m.UnpinRequested: lambda run, event: run._requests.add(event, run._attempts),
    m.AnnotateRequested: lambda run, event: run._requests.add(event, run._attempts),
    m.DrillEnded: lambda run, event: run._requests.add(event, run._attempts),
    m.DrainRequested: lambda run, event: run._drain_schedule.requested(event),
    m.DrainEnded: lambda run, event: run._drain_schedule.ended(event),
    m.DescriptionWritten: lambda run, event: run._drain_schedule.described(event),
    m.DeleteEnded: lambda run, event: run._retirement.delete_ended(event),
    m.RemoteListed: RunMachine._on_remote_listed,
    m.ScrubEnded: RunMachine._on_scrub_ended,
    m.OwnerDied: RunMachine._on_owner_died,
    m.FinishRequested: lambda run, event: run._finishing.add(event),
    m.RunWanted: lambda run, _: run._closing.wanted(),
    m.PutAwayEnded: lambda run, _: (),  # an answer to an earlier coordinator
    m.NodesSeen: RunMachine._on_nodes_seen,
    m.Ticked: RunMachine._on_ticked,
}
