"""Failures in the log, on which automatic intervals depend."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ray_ckpt.core.history import RunHistory
from ray_ckpt.core.interval_model import FailureRate
from ray_ckpt.core.save_intervals import failures_in
from ray_ckpt.format import records as r
from ray_ckpt.format.digest import digest
from ray_ckpt.types import END_CAUSES, ROLLBACK_PREFIX, EndCause
from tests.core.test_history import CREATE, commit, session


def history(*ops: tuple[float, r.Op]) -> RunHistory:
    """Return the history of records at Unix times."""
    found = RunHistory()
    begun: list[tuple[float, r.Op]] = [(0.0, CREATE), (0.0, r.Epoch()), *ops]
    for time_s, op in begun:
        record = r.LogRecord(
            seq=found.next_seq,
            epoch=0 if isinstance(op, r.Create) else 1,
            writer="w",
            prev=found.last_digest,
            time_s=time_s,
            op=op,
        )
        found.apply(record, digest(r.encode_record(record)))
    return found


def ended(number: int, cause: EndCause, last_at_s: float | None = None) -> r.Ended:
    return r.Ended(session=number, cause=cause, step=0, first_at_s=None, last_at_s=last_at_s, stalled_s=None)


@pytest.mark.parametrize("cause", END_CAUSES)
def test_ends_by_will_are_no_failures(cause: EndCause) -> None:
    log = ((100.0, session(1)), (400.0, ended(1, cause, 350.0)))
    count = int(cause not in ("finished", "replaced"))
    assert failures_in(history(*log)) == FailureRate(count=count, exposed_s=250.0)
    assert failures_in(history(*log, (900.0, session(2)))) == FailureRate(count=count, exposed_s=250.0)


def test_a_session_that_another_followed_without_a_report_has_failed() -> None:
    log = ((100.0, session(1)), (300.0, commit(10)), (900.0, replace(session(2), num_nodes=3)))
    assert failures_in(history(*log)) == FailureRate(count=1, exposed_s=200.0)
    trained = (1000.0, commit(20, of_session=2))
    assert failures_in(history(*log, trained)) == FailureRate(count=1, exposed_s=500.0)


def test_nobody_trains_in_the_session_of_a_rollback() -> None:
    rollback = replace(session(2, resumed_from=10), service=f"{ROLLBACK_PREFIX}x")
    log = ((100.0, session(1)), (300.0, commit(10)), (300.0, ended(1, "finished")), (900.0, rollback))
    assert failures_in(history(*log, (950.0, session(3)))) == FailureRate(count=0, exposed_s=200.0)
