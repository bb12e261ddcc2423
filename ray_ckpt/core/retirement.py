"""Retirement of checkpoints that no policy or rule keeps, and the deletion of their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ray_ckpt.core import messages as m
from ray_ckpt.core.context import Context
from ray_ckpt.core.deletions import Deletions
from ray_ckpt.core.drain import Drains
from ray_ckpt.core.maintenance import Maintenance
from ray_ckpt.core.retention import NEWEST_ITEMS, decide, outlived, pinned_aside, policies_of
from ray_ckpt.core.sessions import Sessions
from ray_ckpt.format import records as r
from ray_ckpt.types import CheckpointInfo, Level

GATHER_S = 1.0  # short, as nodes may lack the room; creating a record takes some 0.1 s


class Retirement:
    """Applier of the retention policies; deletes a checkpoint's bytes after its retirement is logged."""

    def __init__(
        self,
        context: Context,
        *,
        sessions: Sessions,
        drains: Drains,
        item_uploads: Drains,
        maintenance: Maintenance,
    ) -> None:
        self._context, self._item_uploads = context, item_uploads
        self._sessions, self._drains, self._maintenance = sessions, drains, maintenance
        self._deletions = Deletions()
        self._logged: dict[str, CheckpointInfo] = {}  # retired in the log, to be deleted together
        self._delete_by_s = 0.0  # longest wait of the oldest one for records of further retirements
        self.is_due = False

    def busy(self) -> set[str]:
        """Return the attempts that a drain or the current session is reading."""
        return self._drains.attempts | self._item_uploads.attempts | self._sessions.busy()

    def decide(self) -> Iterable[m.Effect]:
        """Retire what nothing keeps; drain what a pin, or a policy other than `KeepLast`, keeps."""
        self.is_due = False
        context = self._context
        is_on_crowded = self._maintenance.is_on_crowded
        stuck = (self._drains.stuck | self._item_uploads.stuck) - self._sessions.busy()
        stuck = set(filter(is_on_crowded, stuck))  # a stuck drain must not keep a checkpoint on a full disk
        view = context.retention_view(self.busy() - stuck)
        old = {c.id.attempt for c in (*view.lineage[: -context.options.keep_last], *pinned_aside(view))}
        old -= self._item_uploads.attempts
        choices = decide(view, policies_of(context.options))
        if self._maintenance.is_crowded:
            pressed = decide(view, policies_of(context.options), pressure=True)
            choices = tuple(
                less if not less.kept and is_on_crowded(less.checkpoint.id.attempt) else choice
                for choice, less in zip(choices, pressed, strict=True)
            )
        for choice in choices:
            checkpoint = choice.checkpoint
            is_old = checkpoint.id.attempt in old and choice.reasons != (NEWEST_ITEMS,)
            if not choice.kept:
                context.ledger.append(r.Retired(attempt=checkpoint.id.attempt, reason=choice.reasons[0]))
            elif is_old and checkpoint.level < Level.DURABLE:
                self._drains.start(checkpoint)
        kept = replace(view, live=tuple(choice.checkpoint for choice in choices if choice.kept))
        for checkpoint in outlived(context.history.lost(), kept):
            reason = "it is lost, and a newer one is on the storage path"
            context.ledger.append(r.Retired(attempt=checkpoint.id.attempt, reason=reason))
        return ()

    def logged(self, checkpoint: CheckpointInfo) -> Iterator[m.Effect]:
        """Delete the bytes of retired checkpoints together once no record of a retirement is pending."""
        context = self._context
        self._drains.finish(checkpoint.id.attempt)
        self._item_uploads.finish(checkpoint.id.attempt)
        if not self._logged:
            self._delete_by_s = context.now_s + GATHER_S
        self._logged[checkpoint.id.attempt] = checkpoint
        if not any(isinstance(op, r.Retired) for op in context.ledger.pending):
            yield from self._delete_logged()

    def _delete_logged(self) -> Iterator[m.Effect]:
        context, logged = self._context, self._logged
        self._logged = {}
        for attempt, checkpoint in logged.items():
            # Nodes without a complete fragment count too: a copy that was cut off leaves files.
            places = context.holders.may_have(attempt).union(context.session_nodes())
            yield from self._deletions.start(
                checkpoint,
                places & context.holders.live,
                now_s=context.now_s,
                grace_s=context.options.retire_grace_s,
            )

    def delete_ended(self, event: m.DeleteEnded) -> Iterable[m.Effect]:
        self._collected(self._deletions.ended(event))
        return ()

    def nodes_lost(self, lost: frozenset[str]) -> None:
        """Count the deletion on dead nodes as done, because their copies are gone too."""
        self._collected(self._deletions.lost(lost))

    def ticked(self) -> Iterator[m.Effect]:
        """Repeat deletions that failed, and deletions that an earlier coordinator did not finish."""
        context = self._context
        if self._logged and context.now_s >= self._delete_by_s:  # the store is slow
            yield from self._delete_logged()
        if not context.ledger.is_open or not self._deletions.is_due(context.now_s):
            return
        begun = {op.attempt for op in context.ledger.pending if isinstance(op, r.Collected)} | {*self._logged}
        checkpoints = context.history.checkpoints.values()
        yield from self._deletions.redo(
            [c for c in checkpoints if c.state == "retired" and c.id.attempt not in begun],
            context.holders.live,
            now_s=context.now_s,
            grace_s=context.options.retire_grace_s,
        )

    def _collected(self, attempts: Iterable[str]) -> None:
        for attempt in attempts:
            self._context.ledger.append(r.Collected(attempt=attempt))
