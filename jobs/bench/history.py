"""A run of years without retired checkpoints: the time to list it, and the cost of its retention.

CPU time is measured, because the files are in the page cache; a slow store adds the time to read them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from jobs.bench.context import Context
from jobs.bench.row import Row, measure
from ray_ckpt import Catalog
from ray_ckpt.config import RunOptions
from ray_ckpt.core.history import RunHistory
from ray_ckpt.core.retention import (
    RetentionView,
    choose_evictions,
    choose_evictions_for_space,
    decide,
    policies_of,
)
from ray_ckpt.format import names
from ray_ckpt.format import records as r
from ray_ckpt.format.digest import digest
from ray_ckpt.storage.log_store import CreateResult, PosixLogStore, create_record, write_snapshot
from ray_ckpt.types import Level

T = TypeVar("T")

NUM_CHECKPOINTS = 100_000
QUICK_CHECKPOINTS = 2_000
NUM_RECORDS = 1_000  # records after the snapshot; then the next snapshot is due
LIMIT_S = 1.0  # limit of the row; the coordinator does nothing else during retention
DISK_BYTES = 10**16  # disk is full, so that retention also has to free space
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
        self.data = self._append(r.Create(run_uid=RUN_UID, run_name="bench", format=1))
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
        attempt = names.make_attempt(run_uid=RUN_UID, epoch=1, session=1, step=step, attempt=0)
        commit = r.Commit2(
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
        return self._append(commit)

    def _append(self, op: r.Op) -> bytes:
        seq, prev = self.history.next_seq, self.history.last_digest
        epoch = min(seq, 1)
        record = r.LogRecord(seq=seq, epoch=epoch, writer="bench", prev=prev, time_s=self.now_s, op=op)
        data = r.encode_record(record)
        self.history.apply(record, digest(data))
        return data


def catalog_rows(context: Context, num_checkpoints: int = 0, num_records: int = NUM_RECORDS) -> Iterator[Row]:
    """Measure `Catalog(path).list()` of a snapshot and the records after it, and then `to_arrow()`."""
    num = num_checkpoints or (QUICK_CHECKPOINTS if context.quick else NUM_CHECKPOINTS)
    log = LongLog(num - num_records)
    with context.temporary() as run:
        folder = run / names.SERVICE_DIR / names.LOG_DIR
        folder.mkdir(parents=True)
        store = PosixLogStore(folder)
        outcomes = [
            create_record(store, 0, log.data),
            write_snapshot(store, log.history.to_snapshot(log.now_s)),
            *(create_record(store, log.history.next_seq, log.commit()) for _ in range(num_records)),
        ]
        assert set(outcomes) == {CreateResult.OK}
        what = f"list {num:,} checkpoints, snapshot and {num_records:,} records"
        yield _cpu_row(context, "list", what, lambda: Catalog(run).list(), lambda found: len(found) == num)
        catalog = Catalog(run)
        what = f"make an Arrow table of {num:,} checkpoints"
        yield _cpu_row(context, "list-table", what, catalog.to_arrow, lambda found: found.num_rows == num)


def retention_rows(context: Context, num_checkpoints: int = 0) -> Iterator[Row]:
    """Measure one decision from the history, with every policy in use, and the effects of the decision."""
    num = num_checkpoints or (QUICK_CHECKPOINTS if context.quick else NUM_CHECKPOINTS)
    log = LongLog(num)
    options = RunOptions(
        keep_every=10 * EVERY_STEPS,
        keep_every_s=10 * EVERY_S,
        keep_best=("loss", "min", 10),
        keep_milestones=(0.25, 0.5, 0.75),
        total_steps=num * EVERY_STEPS,
        keep_epochs=True,
        ttl_s=num * EVERY_S / 2,
    )

    def decide_all() -> tuple[int, bool, bool]:
        view = RetentionView(live=log.history.live(), lineage=log.history.lineage(), now_s=log.now_s)
        decisions = decide(view, policies_of(options))
        evicted = choose_evictions(view, keep_local=options.keep_local)
        for_space = choose_evictions_for_space(
            view,
            held_bytes={c.id.attempt: c.size_bytes // c.num_nodes for c in view.live},
            free_bytes=0,
            total_bytes=DISK_BYTES,
            high_watermark=options.high_watermark,
            low_watermark=options.low_watermark,
        )
        return len(decisions), bool(evicted), bool(for_space)

    what = f"decide on retention and eviction over {num:,} checkpoints, all policies"
    yield _cpu_row(context, "retention", what, decide_all, lambda found: found == (num, True, True))


def _cpu_row(
    context: Context, name: str, what: str, work: Callable[[], T], is_right: Callable[[T], bool]
) -> Row:
    def used_s() -> float:
        started_s = time.process_time()
        found = work()
        used_s = time.process_time() - started_s
        assert is_right(found)
        return used_s

    return measure(name, f"CPU to {what}", "s", used_s, repeat=context.repeat, limit=LIMIT_S)
