"""Snapshots of the log: the whole history in one file, so that readers need few records."""

from __future__ import annotations

from collections.abc import Iterator

from ray_ckpt.core import messages as m
from ray_ckpt.core.context import Context

SNAPSHOT_EVERY = 1000  # records between two snapshots of the log: what a reader opens one by one
SNAPSHOT_RETRY_S = 60.0  # after a snapshot that could not be written


class LogSnapshots:
    """Has a snapshot written every SNAPSHOT_EVERY records, one at a time."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._last_seq = 0  # of the last snapshot that is known
        self._not_before_s = 0.0
        self.is_writing = False

    def opened(self, event: m.LogOpened) -> None:
        self._last_seq = event.history.next_seq - 1 if event.history is not None else 0

    @property
    def is_due(self) -> bool:
        """Enough records lie behind the last snapshot, and none is being written."""
        if self.is_writing or self._context.history.next_seq - 1 - self._last_seq < SNAPSHOT_EVERY:
            return False
        return self._context.now_s >= self._not_before_s

    def write(self) -> Iterator[m.Effect]:
        """Start a snapshot. Called while no record waits for the log."""
        self.is_writing = True
        yield m.WriteSnapshot(seq=self._context.history.next_seq - 1)

    def written(self, event: m.SnapshotWritten) -> Iterator[m.Effect]:
        """Note the end of a snapshot; one that failed is tried again after SNAPSHOT_RETRY_S."""
        self.is_writing = False
        if event.error is None:
            self._last_seq = max(self._last_seq, event.seq)
        else:
            self._not_before_s = self._context.now_s + SNAPSHOT_RETRY_S
            yield from self._context.warn_once(f"The log's snapshot could not be written: {event.error}")
