"""Writer of the log: one record in flight, a queue of the next records, and the confirmed history."""

from __future__ import annotations

from collections import deque
from typing import Literal

from ray_ckpt.core.history import RunHistory
from ray_ckpt.core.messages import Append, Appended, LogOpened
from ray_ckpt.format import records as r
from ray_ckpt.format.digest import digest

FORMAT_VERSION = 1
RETRY_S = 2.0  # pause before a create that the store did not answer is tried again


class Ledger:
    """The records that this coordinator has written, is writing and will write, in that order.

    A record gets its number and the digest of its predecessor when it is sent. So if another writer has
    written a record in the meantime, this writer's create fails with "exists".
    """

    def __init__(self, *, writer: str, service: str) -> None:
        self.history = RunHistory()
        self.epoch = 0
        self.service = service
        self._writer = writer
        self._queue: deque[r.Op] = deque()
        self._inflight: r.LogRecord | None = None
        self._sent_s = 0.0  # time at which the record in flight was first sent
        self._retry_at_s: float | None = None

    def open(self, event: LogOpened) -> None:
        """Replay the log and queue this coordinator's epoch record; in a new run, after a `create` record."""
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
        """True if this coordinator's epoch record is in the log."""
        return self.epoch > 0 and self.history.epoch == self.epoch

    @property
    def pending(self) -> tuple[r.Op, ...]:
        """Operations that are decided, but not yet confirmed by the store, oldest first."""
        inflight = (self._inflight.op,) if self._inflight else ()
        return (*inflight, *self._queue)

    @property
    def is_settled(self) -> bool:
        """True if no operation is pending: every decided operation is in the log."""
        return self._inflight is None and not self._queue

    def append(self, op: r.Op) -> None:
        self._queue.append(op)

    def withdraw(self, op: r.Op) -> None:
        """Remove an operation from the queue; it must not be in flight."""
        self._queue.remove(op)

    def is_silent(self, now_s: float, wait_s: float) -> bool:
        """Return True if the record in flight has had no confirmation from the store for `wait_s`."""
        return self._inflight is not None and now_s - self._sent_s >= wait_s

    def projected(self) -> RunHistory:
        """Return the history as it will be when all pending operations are confirmed."""
        history, epoch = self.history.copy(), self.epoch
        for op in self.pending:
            history.apply(self._record(history, op, epoch, 0.0), "")
        return history

    def amend(self, op: r.Op, by: r.Op) -> None:
        """Replace an operation in the queue; it must not be in flight."""
        self._queue[self._queue.index(op)] = by

    def waiting(self) -> tuple[r.Op, ...]:
        """Return the operations in the queue, without the operation in flight."""
        return tuple(self._queue)

    def next(self, now_s: float, wall_s: float) -> Append | None:
        """Return the next record to create; None if a record is in flight or the queue is empty."""
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
        """Process the store's answer; return the op that is now confirmed, or the reason why none is."""
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
        """Return the record in flight again, with the same bytes, RETRY_S after an unknown outcome."""
        if self._inflight is None or self._retry_at_s is None or now_s < self._retry_at_s:
            return None
        self._retry_at_s = None
        return Append(record=self._inflight)
