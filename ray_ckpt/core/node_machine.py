"""The node machine: the decisions of one agent about one run's saves (see PROTOCOL.md).

The machine gathers the events of the node's ranks, so that a node reports to the coordinator once per phase.
The machine keeps the order: shard files, then the fragment, then the report. Only files that are fsynced on
this node are copied to other nodes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ray_ckpt.core import node_messages as n
from ray_ckpt.core.replica_findings import merged
from ray_ckpt.core.step_states import keep, salvage_of
from ray_ckpt.core.values import Captured, SessionKey, SessionNode, SessionPlan
from ray_ckpt.errors import CheckpointError, RunSuperseded, Unavailable
from ray_ckpt.format.names import attempt_of
from ray_ckpt.types import AttemptId, FileEntry, Fragment, Level, Watched

MAX_UNSETTLED = 8  # reported saves without an answer; a live coordinator answers within seconds
MAX_SETTLED = 256  # outcomes kept to answer late requests


@dataclass(slots=True, kw_only=True)
class _Save:
    attempt: AttemptId
    here: SessionNode
    num_nodes: int
    is_salvage: bool = False
    sealed: set[int] = field(default_factory=set)
    replicated: set[str] = field(default_factory=set)
    written: dict[int, n.ShardWritten] = field(default_factory=dict)
    metrics: Mapping[str, float] | None = None
    watched: dict[int, tuple[Watched, ...]] = field(default_factory=dict)  # by rank
    fragment: FileEntry | None = None  # set when all files of this node's part are on its disk


class NodeMachine:
    """Saves of one run on one node. `epoch` is the highest epoch recorded on this node's disk."""

    def __init__(self, *, epoch: int = 0) -> None:
        self.plan: SessionPlan | None = None
        self.here: SessionNode | None = None
        self.is_released = False  # the launcher has ended the run
        self.is_finished = False  # the launcher has not given the run up, so the run will be put away
        self._frees = False  # no group is at work, and memory is freed once no shard is written from it
        self._writing: set[tuple[str, int]] = set()  # attempts and ranks whose shards are being written
        self._ended: SessionKey = (0, 0)  # the newest session known to be over
        self._saves: dict[str, _Save] = {}
        self.epoch = epoch
        self.outcomes: OrderedDict[str, n.SaveOutcome] = OrderedDict()
        self._deleted: OrderedDict[str, bool] = OrderedDict()  # attempt -> was only evicted from this node
        self._unreachable: set[str] = set()  # peers to probe until they answer
        self._kept: dict[int, dict[int, str]] = {}  # rank -> step -> class, of the own states kept here
        self._offers: dict[int, tuple[int, ...]] = {}  # rank -> finished steps, for a salvage
        self._has_order = False  # for a salvage of this session

    def handle(self, event: n.NodeEvent) -> tuple[n.NodeEffect, ...]:
        """Apply one event and return the effects, to be carried out in order.

        An order of a higher epoch returns PersistEpoch alone, and is repeated after EpochPersisted.
        """
        if isinstance(event, n.Order) and event.epoch < self.epoch:
            return (n.RefuseOrder(epoch=self.epoch),)
        if isinstance(event, n.Order) and event.epoch > self.epoch:
            return (n.PersistEpoch(epoch=event.epoch),)
        return tuple(self._on(event))

    def incomplete(self) -> tuple[Captured, ...]:
        """Return the saves, at most MAX_UNSETTLED, that only some ranks of this node have captured."""
        return tuple(
            Captured(attempt=save.attempt, ranks=tuple(sorted(save.sealed)))
            for save in self._saves.values()
            if len(save.sealed) < len(save.here.ranks) and not save.is_salvage
        )

    def is_deleted(self, attempt: str) -> bool:
        """Return True if this node is deleting the attempt's files, which then must not be counted."""
        outcome = self.outcomes.get(attempt)
        return attempt in self._deleted or (outcome is not None and outcome.is_deleted)

    def is_unwanted(self, attempt: str) -> bool:
        """Return True if this node knows that the attempt was deleted everywhere: retired or dropped."""
        return self.is_deleted(attempt) and not self._deleted.get(attempt, False)

    @property
    def failed(self) -> SessionKey | None:
        """Return the last session if its launcher has given it up, or has died; None after any other."""
        return self._ended if self.is_released and not self.is_finished else None

    def is_saving(self, attempt: AttemptId) -> bool:
        """Return True if a save is under way on this node: it will have an outcome."""
        return attempt.attempt in self._saves

    def outcome(self, attempt: AttemptId, level: Level) -> n.SaveOutcome | None:
        """Return the outcome of an attempt that has reached `level` or is dropped, else None.

        An attempt of a session that is over has no other outcome. It may still reach a level above LOCAL, but
        no caller waits for that once the run is released.
        """
        known, is_unknown = self.outcomes.get(attempt.attempt), attempt.attempt not in self._saves
        is_settled = known is not None and (known.error is not None or (known.level or 0) >= level)
        is_lost = self.is_released or (known is None and is_unknown and level is Level.LOCAL)
        if not is_settled and is_lost and self.is_over((attempt.epoch, attempt.session)):
            error = RunSuperseded(f"Step {attempt.step} is of a session that has ended.")
            return n.SaveOutcome(level=None, error=error)
        return known if is_settled else None

    def is_over(self, session_key: SessionKey) -> bool:
        """Return True if this node knows that a session has ended."""
        is_older = self.plan is not None and session_key < self.plan.session_key
        return is_older or session_key <= self._ended

    def reaches(self, peer: str) -> bool:
        """Return False from when a peer could not be reached until the peer answers again."""
        return peer not in self._unreachable

    def _on(self, event: n.NodeEvent) -> Iterable[n.NodeEffect]:
        handler = _HANDLERS.get(type(event))
        if handler is None:
            raise TypeError(f"unknown event {event!r}")
        return handler(self, event)

    def _on_session_started(self, event: n.SessionStarted) -> Iterator[n.NodeEffect]:
        last = self.plan
        if self.is_over(event.plan.session_key):
            return  # a late order, for a group that has ended
        error = RunSuperseded("A newer training group has opened this run.")
        for save in list(self._saves.values()):
            if not event.plan.has(save.attempt):
                yield from self._settle(save.attempt, None, error, keep_files=True)
        self.plan = event.plan
        self.here = next((n for n in event.plan.nodes if n.node_id == event.node_id), None)
        if last is None or last.session_key < event.plan.session_key:  # else the order is repeated
            self.is_released = self.is_finished = self._frees = False
            self._writing.clear()
            self._kept, self._offers, self._has_order = {}, {}, False
            yield n.BeginSession(plan=event.plan, replaced=last.session_key if last is not None else None)

    def _on_session_ended(self, event: n.SessionEnded) -> Iterator[n.NodeEffect]:
        if self.plan is not None and self.plan.session_key > event.session_key:
            return
        self._ended = max(self._ended, event.session_key)
        for save in list(self._saves.values()):
            yield from self._settle(save.attempt, None, event.error, keep_files=True)
        self.plan = self.here = None
        yield n.EndSession(session_key=event.session_key, error=event.error)
        self._frees = self._frees or event.frees
        yield from self._free()

    def _on_run_released(self, event: n.RunReleased) -> Iterator[n.NodeEffect]:
        if self.plan is None or self.plan.session_key <= event.session_key:
            self._ended = max(self._ended, event.session_key)
            self.is_released, self.is_finished = True, event.is_finished
            error = RunSuperseded("The launcher has ended the run.")
            yield n.EndSession(session_key=event.session_key, error=error)
            self._frees = True
            yield from self._free()

    def _free(self) -> Iterator[n.FreeMemory]:
        """Free the memory of a group that is over, unless a shard is being written from it."""
        if self._frees and not self._writing:
            self._frees = False
            yield n.FreeMemory()

    def _on_run_put_away(self, event: n.RunPutAway) -> Iterator[n.NodeEffect]:
        error = RunSuperseded("The launcher has ended the run.")
        for save in list(self._saves.values()):
            yield from self._settle(save.attempt, None, error, keep_files=True)
        plan, self.plan, self.here = self.plan, None, None
        if plan is not None:
            yield n.EndSession(session_key=plan.session_key, error=error)
        yield n.ForgetRun(kept=event.kept)

    def _on_shard_sealed(self, event: n.ShardSealed) -> Iterator[n.NodeEffect]:
        plan, here, name = self.plan, self.here, event.attempt.attempt
        if (
            known := self.outcomes.get(name)
        ) is not None:  # the save was dropped, or it is committed and must not be written again
            yield n.Release(attempt=event.attempt, rank=event.rank)
            yield n.ResolveSave(attempt=event.attempt, level=known.level, error=known.error)
            return
        is_lost = plan is not None and event.attempt == salvage_of(plan, event.attempt.step)
        is_lost &= name not in self._saves  # the agent that had the order for this salvage has died
        if (
            plan is None
            or here is None
            or is_lost
            or not plan.has(event.attempt)
            or event.rank not in here.ranks
        ):
            yield n.Release(attempt=event.attempt, rank=event.rank)
            yield from self._settle(event.attempt, None, self._stray_error(event.attempt), keep_files=True)
            return
        if name not in self._saves:
            yield from self._forget_oldest()
        save = self._saves.setdefault(
            name, _Save(attempt=event.attempt, here=here, num_nodes=len(plan.nodes))
        )
        if event.rank in save.sealed:
            return
        save.sealed.add(event.rank)
        save.replicated.update(event.replicated)
        save.watched[event.rank] = event.watched
        if event.metrics is not None:
            save.metrics = event.metrics
        self._writing.add((name, event.rank))
        yield n.WriteShard(attempt=event.attempt, rank=event.rank)

    def _stray_error(self, attempt: AttemptId) -> CheckpointError:
        """Return the error for a save of a session that is not at work here."""
        if self.plan is None and not self.is_over((attempt.epoch, attempt.session)):
            return Unavailable(f"Step {attempt.step} is not saved: the new agent has no session yet.")
        return RunSuperseded(f"Step {attempt.step} is of a session that has ended.")

    def _on_shard_written(self, event: n.ShardWritten) -> Iterator[n.NodeEffect]:
        self._writing.discard((event.attempt.attempt, event.rank))
        yield n.Release(attempt=event.attempt, rank=event.rank)
        save, plan = self._saves.get(event.attempt.attempt), self.plan
        if save is None or plan is None:
            yield from self._written_late(event.attempt)
            yield from self._free()
            return
        save.written[event.rank] = event
        yield from self._free()
        here = save.here
        if len(save.written) == len(here.ranks):
            written = [save.written[rank] for rank in here.ranks]
            yield n.WriteFragment(
                fragment=Fragment(
                    attempt=event.attempt,
                    node_index=here.node_index,
                    num_nodes=save.num_nodes,
                    world_size=plan.world_size,
                    ranks=here.ranks,
                    files=tuple(f for w in written for f in w.files),
                    rows=tuple(row for w in written for row in w.rows),
                    replicated=tuple(sorted(save.replicated)),
                    metrics=save.metrics,
                )
            )

    def _on_save_failed(self, event: n.SaveFailed) -> Iterator[n.NodeEffect]:
        name = event.attempt.attempt
        self._writing.discard((name, event.rank))
        yield n.Release(attempt=event.attempt, rank=event.rank)
        if name in self.outcomes:
            yield from self._written_late(event.attempt)
        else:
            yield n.ReportRefused(attempt=event.attempt, ranks=(event.rank,), reason=event.reason)
            yield from self._settle(event.attempt, None, Unavailable(event.reason))
        yield from self._free()

    def _on_fragment_written(self, event: n.FragmentWritten) -> Iterator[n.NodeEffect]:
        save = self._saves.get(event.attempt.attempt)
        if save is None or self.here is None:
            yield from self._written_late(event.attempt)
            return
        save.fragment = event.entry
        yield from self._report(save)

    def _written_late(self, attempt: AttemptId) -> Iterator[n.NodeEffect]:
        """Delete the files of a save dropped in the meantime; leave any other save to the coordinator."""
        if self.is_deleted(attempt.attempt):
            yield n.DeleteFolder(directory=attempt.directory)

    def _on_epoch_persisted(self, event: n.EpochPersisted) -> Iterable[n.NodeEffect]:
        self.epoch = max(self.epoch, event.epoch)
        return ()

    def _on_epoch_seen(self, event: n.EpochSeen) -> Iterable[n.NodeEffect]:
        return ()

    def _on_exit_ordered(self, event: n.ExitOrdered) -> Iterator[n.NodeEffect]:
        if self.plan is not None and not self.is_released and self.plan.session_key >= event.session_key:
            yield n.RefuseExit()

    def _on_save_step_announced(self, event: n.SaveStepAnnounced) -> Iterator[n.NodeEffect]:
        if self.plan is not None and self.plan.session_key == event.session_key:
            yield n.ShowSaveSignal(signal=event.signal)

    # -- salvages --------------------------------------------------------------------------------------

    def _on_step_state_kept(self, event: n.StepStateKept) -> Iterator[n.NodeEffect]:
        """Note a state that is kept here; one of an own rank is kept by a peer as well."""
        if self.plan is None or self.plan.session_key != event.session_key:
            return
        keep(self._kept, event.rank, event.step, event.holds)
        if self.here is not None and event.rank in self.here.ranks and len(self.plan.nodes) > 1:
            others = {node.node_id for node in self.plan.nodes} - {self.here.node_id}
            after = self.plan.nodes[(self.here.node_index + 1) % len(self.plan.nodes)].node_id
            peer = next((holder for holder in self.here.holders if holder in others), after)
            yield n.SendStepState(session_key=event.session_key, rank=event.rank, step=event.step, peer=peer)

    def _on_survivor_offered(self, event: n.SurvivorOffered) -> Iterator[n.NodeEffect]:
        if self.plan is not None and self.plan.session_key == event.session_key:
            self._offers[event.rank] = event.steps
            yield from self._report_survivors(event.session_key)

    def _on_survivors_asked(self, event: n.SurvivorsAsked) -> Iterator[n.NodeEffect]:
        if self.plan is not None and self.plan.session_key == event.session_key:
            yield n.AskRanks()
            yield from self._report_survivors(event.session_key)

    def _report_survivors(self, session_key: SessionKey) -> Iterator[n.NodeEffect]:
        kept = {rank: dict(steps) for rank, steps in self._kept.items()}
        yield n.ReportSurvivors(
            session_key=session_key, offers=dict(self._offers), kept=kept, was_decided=self._has_order
        )

    def _on_salvage_ordered(self, event: n.SalvageOrdered) -> Iterator[n.NodeEffect]:
        """Write the own states of ranks that do not save, and let the other ranks save."""
        salvage, attempt = event.salvage, event.salvage.attempt
        if self.plan is None or self.here is None or self.plan.session_key != salvage.session_key:
            return
        self._has_order |= attempt is not None
        here = next((node for node in salvage.nodes if node.node_id == self.here.node_id), None)
        is_new = attempt is not None and attempt.attempt not in {*self._saves, *self.outcomes}
        if attempt is not None and here is not None and is_new:
            yield from self._forget_oldest()
            num_nodes = len(salvage.nodes)
            self._saves[attempt.attempt] = _Save(
                attempt=attempt, here=here, num_nodes=num_nodes, is_salvage=True
            )
            for rank in here.ranks:
                if rank not in salvage.savers:
                    yield n.WriteStepState(attempt=attempt, rank=rank)
        yield n.AnswerOffers(salvage=salvage)

    # -- copies and deletions --------------------------------------------------------------------------

    def _on_copy_ordered(self, event: n.CopyOrdered) -> Iterator[n.NodeEffect]:
        yield self._copy(event.attempt, event.node_index, event.holder, is_repair=True)

    def _copy(
        self, attempt: AttemptId, node_index: int, holder: str, *, is_repair: bool = False
    ) -> n.SendCopy | n.ReportCopied:
        """Send a copy, or report at once that its holder cannot be reached."""
        if self.reaches(holder):
            return n.SendCopy(
                epoch=self.epoch, attempt=attempt, node_index=node_index, holder=holder, is_repair=is_repair
            )
        return n.ReportCopied(
            epoch=self.epoch,
            attempt=attempt,
            node_index=node_index,
            holder=holder,
            error="it has not answered since an earlier copy.",
            is_unreachable=True,
        )

    def _on_copy_ended(self, event: n.CopyEnded) -> Iterator[n.NodeEffect]:
        if event.is_unreachable and self.reaches(event.holder):
            self._unreachable.add(event.holder)
            yield n.CheckPeer(peer=event.holder)
        yield n.ReportCopied(
            epoch=event.epoch,
            attempt=event.attempt,
            node_index=event.node_index,
            holder=event.holder,
            error=event.error,
            fragment=event.fragment,
            is_unreachable=event.is_unreachable,
            is_damage=event.is_damage,
        )

    def _on_peer_returned(self, event: n.PeerReturned) -> Iterable[n.NodeEffect]:
        self._unreachable.discard(event.peer)
        return ()

    def _on_delete_ordered(self, event: n.DeleteOrdered) -> Iterator[n.NodeEffect]:
        for directory in event.directories:
            name = attempt_of(directory)
            self._deleted[name] = directory in event.evicted and not self.is_unwanted(name)
            while len(self._deleted) > MAX_SETTLED:
                self._deleted.popitem(last=False)
            yield n.DeleteFolder(directory=directory)

    def _on_coordinator_returned(self, event: n.CoordinatorReturned) -> Iterator[n.NodeEffect]:
        if self.here is not None:
            for save in list(self._saves.values()):
                yield from self._report(save)

    def _report(self, save: _Save) -> Iterator[n.NodeEffect]:
        """Report a save that is complete on this node, and send its copies; repeating this is harmless."""
        here = save.here
        if save.fragment is None:
            return
        files = (save.fragment, *(f for rank in here.ranks for f in save.written[rank].files))
        yield n.ReportStored(
            epoch=self.epoch,
            attempt=save.attempt,
            node_index=here.node_index,
            fragment=save.fragment,
            size_bytes=sum(file.size_bytes for file in files),
            replicated=tuple(sorted(save.replicated)),
            metrics=save.metrics,
            watched=merged(save.watched),
        )
        for holder in here.holders:
            yield self._copy(save.attempt, here.node_index, holder)

    def _on_outcome_notified(self, event: n.OutcomeNotified) -> Iterator[n.NodeEffect]:
        known = self.outcomes.get(event.attempt.attempt)
        if known is None or known.error is None:
            level = event.level
            if known is not None and known.level is not None and level is not None:
                level = max(level, known.level)
            yield from self._settle(event.attempt, level, event.error)
            yield from self._free()
        elif event.error is not None:  # a drop is final; the coordinator repeats it after a late copy
            self.outcomes[event.attempt.attempt] = replace(known, is_deleted=True)
            yield n.DeleteFolder(directory=event.attempt.directory)

    def _forget_oldest(self) -> Iterator[n.NodeEffect]:
        """Settle the oldest saves while the coordinator is silent; keep files, as a save may be committed."""
        while len(self._saves) >= MAX_UNSETTLED:
            save = next(iter(self._saves.values()))
            error = Unavailable(f"The coordinator never reported how step {save.attempt.step} ended.")
            yield from self._settle(save.attempt, None, error, keep_files=True)

    def _settle(
        self,
        attempt: AttemptId,
        level: Level | None,
        error: CheckpointError | None,
        *,
        keep_files: bool = False,
    ) -> Iterator[n.NodeEffect]:
        """Record the outcome and delete the files of a dropped save.

        A rank that is still writing finds the outcome when the write ends. When a new session ends a save,
        the save may have been committed a moment ago; `keep_files` then keeps the save's files until the
        coordinator lists these files as orphans.
        """
        self._saves.pop(attempt.attempt, None)
        is_deleted = error is not None and not keep_files
        self.outcomes[attempt.attempt] = n.SaveOutcome(level=level, error=error, is_deleted=is_deleted)
        while len(self.outcomes) > MAX_SETTLED:
            self.outcomes.popitem(last=False)
        yield n.ResolveSave(attempt=attempt, level=level, error=error)
        if is_deleted:
            yield n.DeleteFolder(directory=attempt.directory)


_HANDLERS: Mapping[type[n.NodeEvent], Callable[[NodeMachine, Any], Iterable[n.NodeEffect]]] = {
    n.SessionStarted: NodeMachine._on_session_started,
    n.SessionEnded: NodeMachine._on_session_ended,
    n.RunReleased: NodeMachine._on_run_released,
    n.RunPutAway: NodeMachine._on_run_put_away,
    n.ShardSealed: NodeMachine._on_shard_sealed,
    n.ShardWritten: NodeMachine._on_shard_written,
    n.StepStateKept: NodeMachine._on_step_state_kept,
    n.SurvivorOffered: NodeMachine._on_survivor_offered,
    n.SurvivorsAsked: NodeMachine._on_survivors_asked,
    n.SalvageOrdered: NodeMachine._on_salvage_ordered,
    n.SaveFailed: NodeMachine._on_save_failed,
    n.FragmentWritten: NodeMachine._on_fragment_written,
    n.EpochPersisted: NodeMachine._on_epoch_persisted,
    n.EpochSeen: NodeMachine._on_epoch_seen,
    n.ExitOrdered: NodeMachine._on_exit_ordered,
    n.SaveStepAnnounced: NodeMachine._on_save_step_announced,
    n.CopyOrdered: NodeMachine._on_copy_ordered,
    n.CopyEnded: NodeMachine._on_copy_ended,
    n.PeerReturned: NodeMachine._on_peer_returned,
    n.DeleteOrdered: NodeMachine._on_delete_ordered,
    n.CoordinatorReturned: NodeMachine._on_coordinator_returned,
    n.OutcomeNotified: NodeMachine._on_outcome_notified,
}
