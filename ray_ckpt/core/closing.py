"""Putting a finished run away: its copies leave the nodes, then the service forgets the run.

The end of a run is in its log, so a restarted coordinator goes on with it. Nothing is deleted before
`retire_grace_s` has passed, in which a next group restores from the nodes. Checkpoints that only nodes have
are retired in the log first, or drained if a policy or a pin keeps them. Once nodes have the order to forget
the run, this coordinator takes no group any more: the run is opened again with a new epoch, so that late
orders are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from ray_ckpt.core import messages as m
from ray_ckpt.core.context import Context
from ray_ckpt.core.drain import Drains
from ray_ckpt.core.retention import RetentionView, decide_at_end, policies_of
from ray_ckpt.format import records as r
from ray_ckpt.types import CheckpointInfo, Level

WANTED_S = 300.0  # from the opening of a run to its group: as long as a launcher waits for agents
AGAIN_S = 30.0  # before nodes get the order again
MAX_TRIES = 10  # after that, leftovers stay on the nodes until the run is opened again


class Closing:
    """From the end of a run to the moment when nothing of it is left here."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._due_s: float | None = None  # monotonic; None: the run has not finished
        self._kept: tuple[str, ...] = ()
        self._tries = 0
        self._again_s: float | None = None  # None: no order was sent, or its answer is awaited

    @property
    def is_due(self) -> bool:
        """The run has finished, and the grace is over."""
        return self._due_s is not None and self._context.now_s >= self._due_s

    @property
    def is_begun(self) -> bool:
        """Nodes have the order to forget the run: there is no way back."""
        return self._tries > 0

    def finished(self) -> None:
        self._due_s = self._context.now_s + self._context.options.retire_grace_s

    def wanted(self) -> Iterable[m.Effect]:
        """Wait for a group that a launcher is about to open, which will restore from the nodes."""
        if self._due_s is not None:
            wait_s = max(WANTED_S, self._context.options.retire_grace_s)
            self._due_s = max(self._due_s, self._context.now_s + wait_s)
        return ()

    def stop(self) -> None:
        """Do not put the run away: a group has come."""
        self._due_s = None

    def empty_nodes(self, drains: Drains, *, busy: Collection[str], wall_s: float) -> Iterator[m.Evict]:
        """Retire, drain or evict the checkpoints on nodes. `busy` are attempts that wait for a drain anyway.

        A checkpoint that is to be drained and has no intact copy on live nodes stays where it is.
        """
        context, history = self._context, self._context.history
        view = RetentionView(live=history.live(), lineage=history.lineage(), now_s=wall_s, busy=busy)
        for decision in decide_at_end(view, policies_of(context.options)):
            checkpoint = decision.checkpoint
            if not decision.kept:
                context.ledger.append(r.Retired(attempt=checkpoint.id.attempt, reason="the run has finished"))
            elif drains.has_room and context.holders.has_all(checkpoint):
                drains.start(checkpoint)
        for checkpoint in filter(self._is_safe, history.live()):
            for node in sorted(context.holders.anywhere(checkpoint.id.attempt)):
                context.holders.remove_all(checkpoint.id.attempt, node)
                yield m.Evict(attempt=checkpoint.id, node_id=node)

    def _is_safe(self, checkpoint: CheckpointInfo) -> bool:
        """Return True if the storage path has a checkpoint, and no damage to it is known."""
        is_bad = checkpoint.id.attempt in self._context.holders.bad_remote
        return checkpoint.level >= Level.DURABLE and not is_bad

    def begin(self) -> m.PutAway:
        """Order all nodes to forget the run. Called when nothing is under way or waits for the log."""
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
