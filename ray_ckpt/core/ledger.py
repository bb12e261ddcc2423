"""Writer of the log: one record in flight, the next ones in a queue, and the confirmed history."""

from __future__ import annotations

from collections import deque
from typing import Literal

from ray_ckpt.core.history import RunHistory
from ray_ckpt.core.messages import Append, Appended, LogOpened
from ray_ckpt.format import records as r
from ray_ckpt.format.digest import digest

FORMAT_VERSION = 1
RETRY_S = 2.0  # between tries of a create that the store did not answer


class Ledger:
    """The records that this coordinator has written, is writing and will write, in that order.

    A record's number and the digest of its predecessor are fixed when it goes out. So this writer notices any
    record that another one writes in between: its own create then fails with "exists".
    """

    def __init__(self, *, writer: str, service: str) -> None:
        self.history = RunHistory()
        self.epoch = 0
        self.service = service
        self._writer = writer
        self._queue: deque[r.Op] = deque()
        self._inflight: r.LogRecord | None = None
        self._sent_s = 0.0  # when the record in flight was first sent
        self._retry_at_s: float | None = None

    def open(self, event: LogOpened) -> None:
        """Replay the log and queue this coordinator's fence; the log of a new run begins with a `create`."""
        self.history = event.history or self.history
        for record, record_digest in event.records:
            self.history.apply(record, record_digest)
        if self.history.next_seq == 0:
            uid, name = event.fresh_uid, event.run_name
            self.append(r.Create(run_uid=uid, run_name=name, format=FORMAT_VERSION))
        self.epoch = self.history.epoch + 1
        self.append(r.Epoch(service=self.service))

    @property
    def is_open(self) -> bool:
        """Return True if this coordinator's fence is in the log."""
        return self.epoch > 0 and self.history.epoch == self.epoch

    @property
    def pending(self) -> tuple[r.Op, ...]:
        """Operations that are decided and not yet confirmed, oldest first."""
        inflight = (self._inflight.op,) if self._inflight else ()
        return (*inflight, *self._queue)

    @property
    def is_settled(self) -> bool:
        """Return True if nothing is pending: the log has all that was decided."""
        return self._inflight is None and not self._queue

    def append(self, op: r.Op) -> None:
        self._queue.append(op)

    def withdraw(self, op: r.Op) -> None:
        """Remove a record that has not gone out yet."""
        self._queue.remove(op)

    def is_silent(self, now_s: float, wait_s: float) -> bool:
        """Return True if the store has not confirmed the record in flight for `wait_s`."""
        return self._inflight is not None and now_s - self._sent_s >= wait_s

    def projected(self) -> RunHistory:
        """Return the history as it will be once everything pending is confirmed."""
        history, epoch = self.history.copy(), self.epoch
        for op in self.pending:
            history.apply(self._record(history, op, epoch, 0.0), "")
        return history

    def amend(self, op: r.Op, by: r.Op) -> None:
        """Replace a record that has not gone out yet."""
        self._queue[self._queue.index(op)] = by

    def waiting(self) -> tuple[r.Op, ...]:
        """Return the records that have not gone out yet."""
        return tuple(self._queue)

    def next(self, now_s: float, wall_s: float) -> Append | None:
        """Return the record to create now, if the one before it is confirmed."""
        if self._inflight is not None or not self._queue:
            return None
        self._inflight = self._record(self.history, self._queue.popleft(), self.epoch, wall_s)
        self._sent_s = now_s
        return Append(record=self._inflight)

    def _record(self, history: RunHistory, op: r.Op, epoch: int, wall_s: float) -> r.LogRecord:
        return r.LogRecord(
            seq=history.next_seq,
            epoch=0 if isinstance(op, r.Create) else epoch,
            writer=self._writer,
            prev=history.last_digest,
            time_s=wall_s,
            op=op,
        )

    def settle(self, event: Appended, now_s: float) -> r.Op | Literal["unknown", "lost", "stale"]:
        """Take the store's answer. Return the op that is confirmed now, or the reason why there is none."""
        record = self._inflight
        if record is None or record.seq != event.seq:
            return "stale"
        if event.outcome == "unknown":
            self._retry_at_s = now_s + RETRY_S
            return "unknown"
        if event.outcome == "exists":
            return "lost"
        self._inflight, self._retry_at_s = None, None
        self.history.apply(record, digest(r.encode_record(record)))
        return record.op

    def retry(self, now_s: float) -> Append | None:
        """Return the record in flight once more, with the same bytes, if the store was silent long enough."""
        if self._inflight is None or self._retry_at_s is None or now_s < self._retry_at_s:
            return None
        self._retry_at_s = None
        return Append(record=self._inflight)
