"""Putting a finished run away: the run's copies are deleted from the nodes, then the service forgets the run.

The end of a run is in its log, so a restarted coordinator continues to put the run away. Nothing is deleted
before `retire_grace_s` has passed, so that a next group can restore from the nodes in this time. Checkpoints
that only nodes hold are first retired in the log, or drained if a policy or a pin keeps them. Once nodes have
the order to forget the run, this coordinator accepts no group any more: a later group opens the run with a
new epoch, so that late orders are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from ray_ckpt.core import messages as m
from ray_ckpt.core.context import Context
from ray_ckpt.core.drain import Drains
from ray_ckpt.core.retention import NEWEST_ITEMS, decide_at_end, policies_of
from ray_ckpt.format import records as r
from ray_ckpt.types import CheckpointInfo, Level

WANTED_S = 300.0  # from the opening of a run to its group: the time for which a launcher waits for agents
AGAIN_S = 30.0  # pause before the order is sent to the nodes again
MAX_TRIES = 10  # orders; then the remaining copies stay on the nodes until the run is opened again


class Closing:
    """The steps from the end of a run until the nodes and the service have forgotten the run."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._due_s: float | None = None  # monotonic time; None: the run has not finished
        self._kept: tuple[str, ...] = ()
        self._tries = 0
        self._again_s: float | None = None  # None: no order was sent, or the answer is awaited

    @property
    def is_due(self) -> bool:
        """True if the run has finished and the grace period is over."""
        return self._due_s is not None and self._context.now_s >= self._due_s

    @property
    def is_begun(self) -> bool:
        """True if nodes have the order to forget the run, which cannot be withdrawn."""
        return self._tries > 0

    def looked(self) -> None:
        """Postpone the next look at all checkpoints, which would follow the next event."""
        self._due_s = self._context.now_s + self._context.live_pause_s

    def finished(self) -> None:
        self._due_s = self._context.now_s + self._context.options.retire_grace_s

    def wanted(self) -> Iterable[m.Effect]:
        """Postpone the deletion, because a launcher is about to open a group that restores from the nodes."""
        if self._due_s is not None:
            wait_s = max(WANTED_S, self._context.options.retire_grace_s)
            self._due_s = max(self._due_s, self._context.now_s + wait_s)
        return ()

    def stop(self) -> None:
        """Do not put the run away, because a new group has opened the run."""
        self._due_s = None

    def empty_nodes(self, drains: Drains, *, busy: Collection[str]) -> Iterator[m.Evict]:
        """Retire, drain or evict the checkpoints on nodes. `busy` are attempts that wait for a drain anyway.

        A checkpoint that must be drained, but has no intact copy on live nodes, is left where it is. One that
        is kept only for its items on the storage path is recorded as lost, as these are all that stays of it.
        """
        context, history = self._context, self._context.history
        for decision in decide_at_end(context.retention_view(busy), policies_of(context.options)):
            checkpoint = decision.checkpoint
            if not decision.kept:
                context.ledger.append(r.Retired(attempt=checkpoint.id.attempt, reason="the run has finished"))
            elif decision.reasons == (NEWEST_ITEMS,):
                if any(map(self._is_safe, history.lineage()[-1:])):
                    reason = "the run has finished, and keeps only items of it"
                    context.ledger.append(r.Lost(attempt=checkpoint.id.attempt, reason=reason))
            elif drains.has_room and context.holders.has_all(checkpoint):
                drains.start(checkpoint)
        for checkpoint in filter(self._is_safe, history.live()):
            for node in sorted(context.holders.may_have(checkpoint.id.attempt)):
                context.holders.remove_all(checkpoint.id.attempt, node)
                yield m.Evict(attempt=checkpoint.id, node_id=node)

    def _is_safe(self, checkpoint: CheckpointInfo) -> bool:
        """Return True if a checkpoint is on the storage path and no damage is known or suspected there."""
        is_unsafe = checkpoint.id.attempt in self._context.holders.unsafe_remote
        return checkpoint.level >= Level.DURABLE and not is_unsafe

    def begin(self) -> m.PutAway:
        """Order all nodes to forget the run; call only if nothing is under way and no record waits."""
        live, keeps_all = self._context.history.live(), self._context.options.keep_local_at_end
        self._kept = tuple(sorted(c.directory for c in live if keeps_all or not self._is_safe(c)))
        return self._order()

    def _order(self) -> m.PutAway:
        self._tries, self._again_s = self._tries + 1, None
        return m.PutAway(kept=self._kept)

    def ended(self, event: m.PutAwayEnded) -> Iterator[m.Effect]:
        if event.error is None:
            yield m.CloseRun()
        elif self._tries < MAX_TRIES:
            self._again_s = self._context.now_s + AGAIN_S
        else:
            yield m.Warn(text=f"Copies stay on nodes although the run has finished: {event.error}")
            yield m.CloseRun()

    def ticked(self) -> Iterator[m.PutAway]:
        if self._again_s is not None and self._context.now_s >= self._again_s:
            yield self._order()
