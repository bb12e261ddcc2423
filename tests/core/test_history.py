"""Replay of a log: what is accepted, what is refused, and which checkpoints are on the lineage."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_ckpt.core.history import RunHistory
from ray_ckpt.errors import FormatError
from ray_ckpt.format import records as r
from ray_ckpt.format.digest import digest
from ray_ckpt.types import Level

UID = digest(b"run")
CREATE = r.Create(run_uid=UID, run_name="gpt", format=1)


def name(number: int) -> str:
    return f"{number:016x}"


def session(number: int, *, resumed_from: int | None = None) -> r.Session:
    return r.Session(
        session=number,
        service="s",
        after=number - 1 or None,
        resumed_from=None if resumed_from is None else name(resumed_from),
        world_size=2,
        num_nodes=1,
    )


def commit(number: int, *, of_session: int = 1, level: Level = Level.LOCAL) -> r.Commit:
    return r.Commit(
        session=of_session,
        step=number,
        attempt=name(number),
        level=level,
        replicas=0,
        world_size=2,
        num_nodes=1,
        size_bytes=10,
        root_digest=digest(b""),
        metrics={},
    )


class Log:
    """Builds a valid chain; `record` says what the next record would be."""

    def __init__(self, *ops: r.Op) -> None:
        self.history = RunHistory()
        self.epoch = 1
        self.add(*ops)

    def record(self, op: r.Op) -> r.LogRecord:
        return r.LogRecord(
            seq=self.history.next_seq,
            epoch=0 if isinstance(op, r.Create) else self.epoch,
            writer="w",
            prev=self.history.last_digest,
            time_s=0.0,
            op=op,
        )

    def add(self, *ops: r.Op) -> None:
        for op in ops:
            record = self.record(op)
            self.history.apply(record, digest(r.encode_record(record)))

    @property
    def lineage(self) -> list[int]:
        return [c.step for c in self.history.lineage()]


def begun(*ops: r.Op) -> Log:
    return Log(CREATE, r.Epoch(), session(1), *ops)


def test_a_checkpoints_life() -> None:
    log = begun(commit(10), commit(20))
    log.add(r.Promote(attempt=name(10), level=Level.REPLICATED, replicas=2))
    log.add(r.Promote(attempt=name(10), level=Level.LOCAL, replicas=1))
    ten = log.history.checkpoints[name(10)]
    assert (ten.level, ten.replicas, ten.seq) == (Level.REPLICATED, 2, 3), "a level never falls"
    log.add(r.Retired(attempt=name(10), reason="old"), r.Lost(attempt=name(20), reason="nodes"))
    assert log.history.live() == ()
    log.add(r.Collected(attempt=name(10)))
    assert [c.state for c in log.history.checkpoints.values()] == ["collected", "lost"]


def test_the_lineage_follows_the_branches() -> None:
    log = begun(commit(10), commit(20))
    log.add(session(2, resumed_from=10), commit(15, of_session=2))
    assert log.lineage == [10, 15]
    log.add(session(3, resumed_from=15), session(4, resumed_from=15), commit(18, of_session=4))
    assert log.lineage == [10, 15, 18]
    log.add(session(5))
    assert log.lineage == []
    log.add(commit(1, of_session=5), session(6, resumed_from=20))
    assert log.lineage == [10, 20]


def test_a_commit_of_the_session_before_is_off_the_lineage() -> None:
    log = begun(commit(10), session(2, resumed_from=10), commit(20, of_session=1))
    assert log.lineage == [10]
    assert [c.step for c in log.history.live()] == [10, 20]


def test_retired_ancestors_do_not_cut_the_lineage() -> None:
    log = begun(commit(10), commit(20), session(2, resumed_from=20), r.Retired(attempt=name(20), reason="x"))
    assert log.lineage == [10]


@pytest.mark.parametrize(
    "op",
    [
        CREATE,
        commit(10),
        commit(30, of_session=9),
        session(1),
        session(2, resumed_from=99),
        r.Promote(attempt=name(99), level=Level.LOCAL, replicas=0),
        r.Retired(attempt=name(99), reason="x"),
        r.Collected(attempt=name(99)),
        r.Lost(attempt=name(99), reason="x"),
    ],
)
def test_impossible_records_are_refused_and_change_nothing(op: r.Op) -> None:
    log = begun(commit(10))
    before = (log.history.next_seq, log.history.last_digest, dict(log.history.checkpoints))
    with pytest.raises(FormatError):
        log.add(op)
    assert (log.history.next_seq, log.history.last_digest, dict(log.history.checkpoints)) == before


def test_a_record_must_follow_the_one_before() -> None:
    log = begun()
    record = log.record(commit(10))
    for wrong in (
        replace(record, seq=record.seq + 1),
        replace(record, seq=record.seq - 1),
        replace(record, prev=digest(b"another")),
        replace(record, epoch=0),
    ):
        with pytest.raises(FormatError):
            log.history.apply(wrong, "")
    with pytest.raises(FormatError, match="starts with one create"):
        Log(r.Epoch())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=30), st.randoms(use_true_random=False))
def test_any_branching_gives_a_lineage_that_is_its_sessions_prefix(
    choices: list[int], random: object
) -> None:
    """The lineage of a session is its parent's up to the branch point, then its own commits."""
    log, step, number = begun(), 0, 1
    for choice in choices:
        if choice:
            step += 1
            log.add(commit(step, of_session=number))
        else:
            before = log.lineage
            at = None if not before else before[step % len(before)]
            number += 1
            log.add(session(number, resumed_from=at))
            assert log.lineage == ([] if at is None else before[: before.index(at) + 1])
    assert log.lineage == sorted(log.lineage)
