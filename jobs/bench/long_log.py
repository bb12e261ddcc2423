"""The log of a long run: a training of years without retired checkpoints."""

from __future__ import annotations

from ray_ckpt.core.history import RunHistory
from ray_ckpt.format import records as r
from ray_ckpt.format.digest import digest
from ray_ckpt.format.names import make_attempt
from ray_ckpt.types import Level

RUN = "bench"
RUN_UID = "0" * 32
EVERY_S = 600.0  # interval between checkpoints
EVERY_STEPS = 100
STEPS_PER_EPOCH = 10_000
REMOTE_EVERY = 10  # one checkpoint of this number is durable
START_S = 1_790_000_000.0  # Unix time of the log's first record


class LongLog:
    """A history that grows by real records; `data` are the bytes of the first one."""

    def __init__(self, num_checkpoints: int) -> None:
        self.history = RunHistory()
        self.data = self._append(r.Create(run_uid=RUN_UID, run_name=RUN, format=1))
        self._append(r.Epoch(service="bench"))
        session = r.Session(
            session=1,
            opened_by=1,
            service="bench",
            after=None,
            resumed_from=None,
            world_size=64,
            num_nodes=8,
        )
        self._append(session)
        for _ in range(num_checkpoints):
            self.commit()

    @property
    def now_s(self) -> float:
        return START_S + self.history.next_seq * EVERY_S

    def commit(self) -> bytes:
        """Add one more commit to the history and return its bytes."""
        number = len(self.history.checkpoints) + 1
        step = number * EVERY_STEPS
        attempt = make_attempt(run_uid=RUN_UID, epoch=1, session=1, step=step, attempt=0)
        return self._append(
            r.Commit(
                session=1,
                step=step,
                attempt=attempt.attempt,
                level=Level.REPLICATED if number % REMOTE_EVERY else Level.DURABLE,
                replicas=1,
                world_size=64,
                num_nodes=8,
                size_bytes=10**12,
                root_digest=digest(attempt.attempt.encode()),
                metrics={"loss": 1 / step + number % 7, "epoch": float(step // STEPS_PER_EPOCH)},
            )
        )

    def _append(self, op: r.Op) -> bytes:
        seq = self.history.next_seq
        record = r.LogRecord(
            seq=seq,
            epoch=min(seq, 1),
            writer="bench",
            prev=self.history.last_digest,
            time_s=self.now_s,
            op=op,
        )
        data = r.encode_record(record)
        self.history.apply(record, digest(data))
        return data
