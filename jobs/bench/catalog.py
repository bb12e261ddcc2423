"""Time to list a long run: a snapshot and the records after it, as files on disk.

CPU time is measured, because the files are in the page cache; a slow store adds the time to read them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from jobs.bench.context import Context
from jobs.bench.long_log import LongLog
from jobs.bench.row import Row, measure
from ray_ckpt import Catalog
from ray_ckpt.format import names
from ray_ckpt.storage.log_store import CreateResult, PosixLogStore, create_record, write_snapshot

NUM_CHECKPOINTS = 100_000
QUICK_CHECKPOINTS = 2_000
NUM_RECORDS = 1_000  # records after the snapshot; then the next snapshot is due
LIMIT_S = 1.0  # DESIGN section 7


def rows(context: Context, num_checkpoints: int = 0, num_records: int = NUM_RECORDS) -> Iterator[Row]:
    """Measure `Catalog(path).list()` without a cache, and then `to_arrow()`."""
    num_checkpoints = num_checkpoints or (QUICK_CHECKPOINTS if context.quick else NUM_CHECKPOINTS)
    with context.temporary() as folder:
        run = folder / "bench"
        _write_run(run, num_checkpoints, num_records)

        def list_s() -> float:
            started_s = time.process_time()
            found = Catalog(run).list()
            used_s = time.process_time() - started_s
            assert len(found) == num_checkpoints
            return used_s

        what = f"CPU to list {num_checkpoints:,} checkpoints, snapshot and {num_records:,} records"
        yield measure("list", what, "s", list_s, repeat=context.repeat, limit=LIMIT_S)
        catalog = Catalog(run)

        def table_s() -> float:
            started_s = time.process_time()
            found = catalog.to_arrow()
            used_s = time.process_time() - started_s
            assert found.num_rows == num_checkpoints
            return used_s

        what = f"CPU to make an Arrow table of {num_checkpoints:,} checkpoints"
        yield measure("list-table", what, "s", table_s, repeat=context.repeat, limit=LIMIT_S)


def _write_run(run: Path, num_checkpoints: int, num_records: int) -> None:
    """Write record 0, a snapshot, and one commit per later record."""
    folder = run / names.SERVICE_DIR / names.LOG_DIR
    folder.mkdir(parents=True)
    store = PosixLogStore(folder)
    log = LongLog(num_checkpoints - num_records)
    outcomes = [
        create_record(store, 0, log.data),
        write_snapshot(store, log.history.to_snapshot(log.now_s)),
        *(create_record(store, log.history.next_seq, log.commit()) for _ in range(num_records)),
    ]
    assert set(outcomes) == {CreateResult.OK}
