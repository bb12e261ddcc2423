"""Snapshots of the log: the whole history in one file, so that a reader opens few records."""

from __future__ import annotations

from collections.abc import Iterator

from ray_ckpt.core import messages as m
from ray_ckpt.core.context import Context

SNAPSHOT_EVERY = 1000  # records between two snapshots; a reader opens up to this number one by one
SNAPSHOT_RETRY_S = 60.0  # pause after a snapshot that could not be written


class LogSnapshots:
    """The schedule of snapshots: one after every SNAPSHOT_EVERY records, one at a time."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._last_seq = 0  # the number of the last record in the last known snapshot
        self._not_before_s = 0.0
        self.is_writing = False

    def opened(self, event: m.LogOpened) -> None:
        self._last_seq = event.history.next_seq - 1 if event.history is not None else 0

    @property
    def is_due(self) -> bool:
        """True if the last snapshot is SNAPSHOT_EVERY records old and no snapshot is being written."""
        if self.is_writing or self._context.history.next_seq - 1 - self._last_seq < SNAPSHOT_EVERY:
            return False
        return self._context.now_s >= self._not_before_s

    def write(self) -> Iterator[m.Effect]:
        """Start a snapshot; call while no record waits for the log."""
        self.is_writing = True
        yield m.WriteSnapshot(seq=self._context.history.next_seq - 1)

    def written(self, event: m.SnapshotWritten) -> Iterator[m.Effect]:
        """Note the end of a snapshot; a failed snapshot is tried again after SNAPSHOT_RETRY_S."""
        self.is_writing = False
        if event.error is None:
            self._last_seq = max(self._last_seq, event.seq)
        else:
            self._not_before_s = self._context.now_s + SNAPSHOT_RETRY_S
            yield from self._context.warn_once(f"The log's snapshot could not be written: {event.error}")
