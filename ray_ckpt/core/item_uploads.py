"""Uploads of some items alone (option `remote_items`): which commits are due, and the records of the uploads.

`Drains` assigns the parts to nodes, as for whole checkpoints. A commit whose whole checkpoint is on the
storage path, or on the way there, needs no such upload. Only one runs and one waits, so that newer items are
not held up by older ones and retention keeps few checkpoints for them.
"""

from __future__ import annotations

from collections.abc import Iterator

from ray_ckpt import telemetry
from ray_ckpt.core import messages as m
from ray_ckpt.core.context import Context
from ray_ckpt.core.drain import Drains
from ray_ckpt.core.drain_policy import DrainPolicy
from ray_ckpt.format import records as r
from ray_ckpt.types import AttemptId, CheckpointInfo, Level


class ItemUploads:
    """The start and the end of uploads of items; `uploads` are those under way, `drains` of whole ones."""

    def __init__(self, context: Context, *, drains: Drains, uploads: Drains) -> None:
        self._context = context
        self._drains, self._uploads = drains, uploads
        self._policy = DrainPolicy()

    def is_due(self, checkpoint: CheckpointInfo) -> bool:
        """Count a commit and return True if its items are due; call for all commits in log order."""
        options = self._context.options
        every, every_s = options.remote_items_every, options.remote_items_every_s
        if options.remote_items and every is None and every_s is None:
            every = 1
        return self._policy.committed(checkpoint, every=every, every_s=every_s)

    def committed(self, checkpoint: CheckpointInfo) -> None:
        if self.is_due(checkpoint):
            self._start(checkpoint)

    def start_again(self) -> None:
        """Start uploads that are due and not under way: displaced, without a source, or of a dead process.

        Items that would not be the newest ones of the lineage on the storage path are left out.
        """
        if not self._context.options.remote_items:
            return
        history = self._context.history
        due = {checkpoint.id.attempt for checkpoint in self._policy.undrained(history.checkpoints)}
        for checkpoint in reversed(history.lineage()):
            name = checkpoint.id.attempt
            if name in due and self._uploads.has_room and self._context.holders.has_all(checkpoint):
                self._start(checkpoint)
            under_way = self._uploads.attempts | self._drains.attempts
            if checkpoint.exported or checkpoint.level is Level.DURABLE or name in under_way:
                return

    def _start(self, checkpoint: CheckpointInfo) -> None:
        name = checkpoint.id.attempt
        is_provable = checkpoint.root_of == "fragments"  # always, but for commits of older versions
        if not checkpoint.exported and name not in self._drains.attempts and is_provable:
            self._uploads.start(checkpoint)

    def assign(self) -> Iterator[m.Effect]:
        for checkpoint, reason in self._uploads.give_up():
            yield from self._failed(checkpoint.id, reason)
        yield from self._uploads.assign()

    def nodes_lost(self, lost: frozenset[str]) -> Iterator[m.Effect]:
        self._uploads.lost(lost)
        yield from self.assign()

    def ended(self, event: m.DrainEnded) -> Iterator[m.Effect]:
        """Note the end of the upload of one part."""
        self._uploads.ended(event)
        if event.error is not None:
            self._context.measure(telemetry.FAILURES, cause="drain")
            text = f"Step {event.attempt.step}: uploading {event.items} of fragment {event.node_index}"
            yield from self._context.warn_once(f"{text}: {event.error}")
        yield from self.assign()

    def described(self, event: m.DescriptionWritten, exported: r.Exported) -> Iterator[m.Effect]:
        """Record items that are complete on the storage path; the level of their checkpoint is the same."""
        self._uploads.described(event)
        if event.is_damage:
            yield from self._failed(event.attempt, str(event.error))
        elif event.error is not None:
            text = f"Step {event.attempt.step}: describing its {exported.items}: {event.error}"
            yield from self._context.warn_once(text)
        elif self._context.history.checkpoints[exported.attempt].state in ("live", "lost"):
            self._context.ledger.append(exported)

    def _failed(self, attempt: AttemptId, reason: str) -> Iterator[m.Effect]:
        text = f"Items of step {attempt.step} did not reach the storage path: {reason}"
        yield from self._context.warn_once(text)
