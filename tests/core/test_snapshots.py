"""Stories of the log's snapshots as the run machine sees them."""

from __future__ import annotations

import pytest

from ray_ckpt.core import log_snapshots
from ray_ckpt.core import messages as m
from ray_ckpt.core.history import RunHistory
from ray_ckpt.core.log_snapshots import SNAPSHOT_RETRY_S
from ray_ckpt.core.run_machine import RunMachine
from ray_ckpt.format import records as r
from ray_ckpt.storage.log_store import read_log
from tests.core.driver import RUN, RUN_UID, SERVICE, Harness, of, one, ops

EVERY = 6


@pytest.fixture(autouse=True)
def _few_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_snapshots, "SNAPSHOT_EVERY", EVERY)


def grown() -> tuple[Harness, m.WriteSnapshot]:
    """Return a run whose log has become long enough for a snapshot, and the order to write it."""
    run = Harness("ab", keep_last=100)
    run.open("ab")
    for step in range(1, 100):
        if writes := of(run.save(step), m.WriteSnapshot):
            return run, writes[0]
    raise AssertionError("no snapshot")


def history_of(run: Harness, *, seq: int | None = None) -> RunHistory:
    """Return the log's records, up to number `seq`."""
    history = RunHistory()
    for record, digest in read_log(run.store)[: None if seq is None else seq + 1]:
        history.apply(record, digest)
    return history


def written(write: m.WriteSnapshot, *, error: str | None = None) -> m.SnapshotWritten:
    return m.SnapshotWritten(seq=write.seq, error=error)


def test_a_snapshot_is_due_after_so_many_records() -> None:
    run, write = grown()
    assert write.seq == EVERY == len(run.records) - 1, "it covers all that is confirmed"
    assert not of(run.save(50), m.WriteSnapshot), "one at a time"
    run.feed(written(write))
    more = [e for step in range(51, 60) for e in run.save(step)]
    assert one(more, m.WriteSnapshot).seq == 2 * EVERY


def test_no_snapshot_is_ordered_while_a_record_is_on_its_way() -> None:
    run = Harness("ab", keep_last=100)
    run.open("ab")
    while len(run.records) < EVERY:
        run.save(len(run.records))
    run.store_mode = "held"
    assert not of(run.save(90), m.WriteSnapshot)
    run.save(91)
    assert not of(run.confirm(hold_next=True), m.WriteSnapshot), "the next one is on its way already"
    assert one(run.confirm(), m.WriteSnapshot).seq == len(run.records) - 1


def test_a_snapshot_waits_for_what_follows_from_the_last_record() -> None:
    run = Harness("ab", keep_last=1)
    run.open("ab")
    while not (writes := of(run.save(len(run.records)), m.WriteSnapshot)):
        pass
    assert isinstance(run.records[EVERY], r.Commit), "long enough, but it retires the one before"
    assert [write.seq for write in writes] == [EVERY + 1]


def test_a_snapshot_that_could_not_be_written_is_tried_again_later() -> None:
    run, write = grown()
    effects = run.feed(written(write, error="no space"))
    assert ["no space" in warn.text for warn in of(effects, m.Warn)] == [True]
    assert not of(effects, m.WriteSnapshot)
    run.save(50)
    assert not of(run.tick(SNAPSHOT_RETRY_S - 1.0), m.WriteSnapshot)
    again = one(run.tick(1.0), m.WriteSnapshot)
    assert again.seq == write.seq + 1, "with what has come since"
    assert not of(run.feed(written(again)), m.WriteSnapshot)


def restart_from(run: Harness, *, snapshot_seq: int | None) -> tuple[RunMachine, list[m.Effect]]:
    """Return a coordinator that opens the log from a snapshot and later records, or from all records."""
    machine = RunMachine(options=run.options, writer="next", service=SERVICE)
    records, history = read_log(run.store), None
    if snapshot_seq is not None:
        snapshot = history_of(run, seq=snapshot_seq).to_snapshot(0.0)
        history, records = RunHistory.from_snapshot(snapshot), records[snapshot_seq + 1 :]
    opened = m.LogOpened(records=records, history=history, run_name=RUN, fresh_uid=RUN_UID)
    effects = list(machine.handle(opened))
    effects += machine.handle(m.Appended(seq=one(effects, m.Append).record.seq, outcome="ok"))
    return machine, effects


@pytest.mark.parametrize("records_after", [0, 1, 3])
def test_a_log_opened_from_a_snapshot_is_the_log_opened_from_all_records(records_after: int) -> None:
    run, write = grown()
    run.feed(written(write))
    for step in range(60, 60 + records_after):
        run.save(step)
    whole, from_all = restart_from(run, snapshot_seq=None)
    short, from_snapshot = restart_from(run, snapshot_seq=write.seq)
    assert of(from_snapshot, m.Append) == of(from_all, m.Append), "the same fence, with the same bytes"
    assert ops(from_snapshot) == [r.Epoch(service=SERVICE)]
    assert short.history.to_snapshot(0.0) == whole.history.to_snapshot(0.0)
    assert short.history.lineage() == whole.history.lineage() != ()
    assert short.epoch == whole.epoch == 2


def test_a_new_coordinator_counts_from_the_snapshot_that_it_found() -> None:
    run, write = grown()
    _, from_snapshot = restart_from(run, snapshot_seq=write.seq)
    assert not of(from_snapshot, m.WriteSnapshot)
    _, from_all = restart_from(run, snapshot_seq=None)
    assert one(from_all, m.WriteSnapshot).seq == write.seq + 1, "the epoch is its last record"


def test_a_fenced_coordinator_writes_no_snapshot() -> None:
    run = Harness("ab", keep_last=100)
    run.open("ab")
    Harness("ab", store=run.store)
    assert of(run.save(1), m.StepDown)
    assert not of([*run.tick(3600.0), *run.tick(3600.0)], m.WriteSnapshot)
