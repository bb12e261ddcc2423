"""The run machine: everything the coordinator decides about one run (see PROTOCOL.md).

One door: `handle(event) -> effects`. A decision that others may see goes into the log first; its effects
follow when the store has confirmed the record. One record is in flight at a time, so the log is a total
order and a lost race is noticed at once. What depends on the whole log (which checkpoint a group restores,
what retention gives up, whether a run is finished) is decided only while no record is pending.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import singledispatchmethod
from typing import Any

from ray_ckpt.config import RunOptions
from ray_ckpt.core import messages as m
from ray_ckpt.core.context import Context
from ray_ckpt.core.deletions import Deletions
from ray_ckpt.core.drain import Drains
from ray_ckpt.core.groups import Groups
from ray_ckpt.core.history import RunHistory
from ray_ckpt.core.ledger import Ledger
from ray_ckpt.core.retention import choose_retirements
from ray_ckpt.core.saves import Saves
from ray_ckpt.errors import CheckpointError, Fenced, RunSuperseded, Unavailable
from ray_ckpt.format import records as r
from ray_ckpt.types import AttemptId, CheckpointInfo, Level, RankRestore

# Until its fence is in the log, a coordinator knows neither what was committed nor that it may speak.
_BEFORE_THE_FENCE = (m.LogOpened, m.Appended, m.Ticked, m.NodesSeen)


class RunMachine:
    """State and decisions of one run. `writer` identifies this coordinator in the log."""

    def __init__(self, *, options: RunOptions, writer: str) -> None:
        self._context = Context(options, Ledger(writer))
        self._groups = Groups(self._context)
        self._saves = Saves(self._context)
        self._drains = Drains()
        self._deletions = Deletions()
        self._retire_due = False
        self._finishing: list[m.Token] = []
        self._wall_s = 0.0
        self._early: list[m.Event] = []  # came before the fence; bounded by the callers that wait for it
        self._fenced = False

    def handle(self, event: m.Event) -> tuple[m.Effect, ...]:
        """Apply one event; the effects are to be carried out in order."""
        if self._fenced:
            return tuple(self._refuse(event))
        if not self.is_open and not isinstance(event, _BEFORE_THE_FENCE):
            self._early.append(event)
            return ()
        effects = [*self._on(event), *self._decide()]
        if not self._fenced and (append := self._ledger.next(self._wall_s)) is not None:
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
    def plan(self) -> m.SessionPlan | None:
        """The group at work."""
        return self._context.plan

    @property
    def restores(self) -> tuple[RankRestore, ...]:
        """How the group at work got its state."""
        return self._groups.restores

    @property
    def holders(self) -> dict[str, dict[int, tuple[str, ...]]]:
        """Who holds which fragment of which attempt."""
        return self._context.holders.table()

    @property
    def _ledger(self) -> Ledger:
        return self._context.ledger

    # -- the log -------------------------------------------------------------------------------------

    @singledispatchmethod
    def _on(self, event: Any) -> Iterable[m.Effect]:
        raise TypeError(f"unknown event {event!r}")

    @_on.register
    def _(self, event: m.LogOpened) -> Iterable[m.Effect]:
        self._ledger.open(event)
        return ()

    @_on.register
    def _(self, event: m.Appended) -> Iterator[m.Effect]:
        op = self._ledger.settle(event, self._context.now_s)
        if op == "unknown":
            yield from self._saves.shed()
            yield from self._context.warn_once(
                f"The log did not answer for record {event.seq}; trying again."
            )
        elif op == "lost":
            yield from self._step_down(event.seq)
        elif not isinstance(op, str):
            yield from self._logged(op)

    def _logged(self, op: r.Op) -> Iterator[m.Effect]:
        """A record is a fact now: its effects may be seen."""
        match op:
            case r.Epoch():
                early, self._early = self._early, []
                for event in early:
                    yield from self._on(event)
            case r.Session():
                self._saves.begin_session()
                yield from self._groups.session_logged()
            case r.Commit(attempt=attempt):
                yield from self._committed(self.history.checkpoints[attempt])
            case r.Promote(attempt=attempt):
                checkpoint = self.history.checkpoints[attempt]
                nodes = self._context.session_nodes()
                yield m.Publish(
                    attempt=checkpoint.id,
                    level=checkpoint.level,
                    error=None,
                    nodes=nodes,
                    epoch=self._ledger.epoch,
                )
                self._retire_due = True
            case r.Retired(attempt=attempt):
                checkpoint = self.history.checkpoints[attempt]
                yield from self._deletions.start(checkpoint, self._context.holders.anywhere(attempt))
            case r.Collected(attempt=attempt):
                self._context.holders.forget(attempt)
            case _:
                return

    def _committed(self, checkpoint: CheckpointInfo) -> Iterator[m.Effect]:
        yield from self._saves.committed(checkpoint)
        if len(self.history.checkpoints) % self.options.remote_every == 0:
            self._drains.start(checkpoint)
            yield from self._assign_drains()
        self._retire_due = True
        if self.plan is not None and checkpoint.id.session == self.plan.session:
            yield from self._groups.release_strays()

    def _step_down(self, seq: int) -> Iterator[m.Effect]:
        self._fenced = True
        error = Fenced(f"Another coordinator wrote record {seq} of run {self.history.run_name}.")
        yield from self._groups.fail(error)
        yield from self._fail_finishing(error)
        for event in self._early:
            yield from self._refuse(event)
        yield m.StepDown(error=error)

    def _refuse(self, event: m.Event) -> Iterator[m.Effect]:
        if isinstance(event, m.GroupOpened | m.NodeRestored | m.FinishAsked):
            name = self.history.run_name
            yield m.Fail(token=event.token, error=Fenced(f"Another coordinator owns run {name}."))

    # -- decisions on the whole log --------------------------------------------------------------------

    def _decide(self) -> Iterator[m.Effect]:
        if self._fenced or self._ledger.pending or not self.is_open:
            return
        yield from self._groups.decide()
        if self._retire_due and not self._ledger.pending:
            self._retire_due = False
            self._retire()
        if self._finishing and not self._saves and not self._ledger.pending:
            yield from self._finish()

    def _retire(self) -> None:
        for choice in choose_retirements(
            live=self.history.live(),
            lineage=self.history.lineage(),
            keep_last=self.options.keep_last,
            busy=self._drains.attempts | self._groups.busy(),
        ):
            self._ledger.append(r.Retired(attempt=choice.attempt, reason=choice.reason))

    def _finish(self) -> Iterator[m.Effect]:
        lineage = self.history.lineage()
        newest = lineage[-1] if lineage else None
        if newest is None or newest.level >= Level.DURABLE:
            tokens, self._finishing = self._finishing, []
            for token in tokens:
                yield m.Reply(token=token, value=newest)
        elif newest.id.attempt not in self._drains.attempts:
            self._drains.start(newest)
            yield from self._assign_drains()

    def _fail_finishing(self, error: CheckpointError) -> Iterator[m.Effect]:
        tokens, self._finishing = self._finishing, []
        for token in tokens:
            yield m.Fail(token=token, error=error)

    # -- groups and saves ------------------------------------------------------------------------------

    @_on.register
    def _(self, event: m.GroupOpened) -> Iterator[m.Effect]:
        error = RunSuperseded("A newer training group has opened this run.")
        yield from self._fail_finishing(error)
        yield from self._saves.end_session(error)
        yield from self._groups.opened(event)

    @_on.register
    def _(self, event: m.InventoryTaken) -> Iterable[m.Effect]:
        self._groups.inventory_taken(event)
        return ()

    @_on.register
    def _(self, event: m.GroupFound) -> Iterable[m.Effect]:
        self._groups.found(event)
        return ()

    @_on.register
    def _(self, event: m.NodeRestored) -> Iterator[m.Effect]:
        yield from self._groups.node_restored(event)

    @_on.register
    def _(self, event: m.NodeStored) -> Iterator[m.Effect]:
        yield from self._saves.stored(event)

    @_on.register
    def _(self, event: m.ReplicaEnded) -> Iterator[m.Effect]:
        yield from self._saves.replica_ended(event)

    @_on.register
    def _(self, event: m.SaveRefused) -> Iterator[m.Effect]:
        yield from self._saves.refused(event)

    @_on.register
    def _(self, event: m.RanksProgressed) -> Iterator[m.Effect]:
        yield from self._saves.progressed(event)

    @_on.register
    def _(self, event: m.FinishAsked) -> Iterable[m.Effect]:
        self._finishing.append(event.token)
        return ()

    # -- deletion and draining -------------------------------------------------------------------------

    @_on.register
    def _(self, event: m.DeleteEnded) -> Iterable[m.Effect]:
        self._collected(self._deletions.ended(event))
        return ()

    def _collected(self, attempts: Iterable[str]) -> None:
        for attempt in attempts:
            self._ledger.append(r.Collected(attempt=attempt))

    def _redo_deletes(self) -> Iterator[m.Effect]:
        if self.is_open:
            collecting = {op.attempt for op in self._ledger.pending if isinstance(op, r.Collected)}
            checkpoints = self.history.checkpoints.values()
            retired = [c for c in checkpoints if c.state == "retired" and c.id.attempt not in collecting]
            yield from self._deletions.redo(retired, self._context.holders.live, self._context.now_s)

    def _assign_drains(self) -> Iterator[m.Effect]:
        for checkpoint in self._drains.give_up_orphans(self._context.holders):
            yield from self._drain_failed(checkpoint.id, "no live node holds all of it")
        yield from self._drains.assign(self._context.holders, self._context.now_s)

    @_on.register
    def _(self, event: m.DrainEnded) -> Iterator[m.Effect]:
        outcome = self._drains.ended(event, self._context.now_s)
        if event.error is not None:
            yield m.Warn(
                text=f"Step {event.attempt.step}: draining fragment {event.node_index}: {event.error}"
            )
        if outcome == "complete":
            yield m.WriteDescription(checkpoint=self.history.checkpoints[event.attempt.attempt])
        elif outcome == "given up":
            yield from self._drain_failed(event.attempt, event.error)

    def _drain_failed(self, attempt: AttemptId, reason: str | None) -> Iterator[m.Effect]:
        error = Unavailable(f"Step {attempt.step} did not reach the storage path: {reason}")
        yield m.Warn(text=str(error))
        lineage = self.history.lineage()
        if lineage and lineage[-1].id == attempt:
            yield from self._fail_finishing(error)

    @_on.register
    def _(self, event: m.DescriptionWritten) -> Iterator[m.Effect]:
        checkpoint = self.history.checkpoints[event.attempt.attempt]
        self._drains.finish(event.attempt.attempt)
        if event.error is not None:
            yield from self._drain_failed(event.attempt, event.error)
        elif checkpoint.state == "live":
            self._ledger.append(
                r.Promote(attempt=event.attempt.attempt, level=Level.DURABLE, replicas=checkpoint.replicas)
            )

    # -- time and nodes --------------------------------------------------------------------------------

    @_on.register
    def _(self, event: m.Ticked) -> Iterator[m.Effect]:
        self._context.now_s, self._wall_s = event.now_s, event.wall_s
        if (again := self._ledger.retry(event.now_s)) is not None:
            yield again
        yield from self._saves.ticked()
        yield from self._groups.ticked()
        yield from self._redo_deletes()
        yield from self._assign_drains()

    @_on.register
    def _(self, event: m.NodesSeen) -> Iterator[m.Effect]:
        lost = self._context.holders.live - event.live
        self._context.holders.live = event.live
        if lost:
            self._context.holders.lose(lost)
            yield from self._saves.nodes_lost(lost)
            self._collected(self._deletions.lost(lost))
            self._drains.lost(lost)
            yield from self._assign_drains()
