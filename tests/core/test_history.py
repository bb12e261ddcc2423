"""Replay of a log: what is accepted, what is refused, and which checkpoints are on the lineage."""

from __future__ import annotations

from dataclasses import fields, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ckpt.core.history import RunHistory
from ray_ckpt.errors import FormatError
from ray_ckpt.format import records as r
from ray_ckpt.format.digest import digest
from ray_ckpt.format.snapshot import decode_snapshot, encode_snapshot
from ray_ckpt.types import Level
from tests.support.examples import every_few, examples

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
    """Builds a valid chain; `record` returns the next record."""

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


def test_a_new_session_has_a_number_of_its_own_also_after_one_that_was_logged_late() -> None:
    assert RunHistory().next_session == 1
    log = Log(CREATE, session(1), session(2))
    assert log.history.next_session == 3
    log = Log(CREATE, session(2), session(1))
    assert log.history.session is not None and log.history.session.session == 1
    assert log.history.next_session == 3


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


def test_pins_and_scrubs_of_a_live_checkpoint() -> None:
    log = begun(commit(10))
    log.add(r.Pin(attempt=name(10), owner="eval", expires_at_s=5.0))
    log.add(r.Pin(attempt=name(10), owner="paper", expires_at_s=None))
    log.add(r.Pin(attempt=name(10), owner="eval", expires_at_s=9.0))
    log.add(r.Verified(attempt=name(10)))
    ten = log.history.checkpoints[name(10)]
    assert ten.pins == {"eval": 9.0, "paper": None} and ten.verified_at_s == 0.0
    log.add(r.Unpin(attempt=name(10), owner="eval"), r.Unpin(attempt=name(10), owner="nobody"))
    assert log.history.checkpoints[name(10)].pins == {"paper": None}
    assert log.history.live() == (log.history.checkpoints[name(10)],)


def test_later_metrics_are_added_and_the_last_value_of_a_name_counts() -> None:
    log = begun(replace(commit(10), metrics={"loss": 1.0}))
    log.add(
        r.Annotated(attempt=name(10), metrics={"accuracy": 0.5, "loss": 2.0}),
        r.Annotated(attempt=name(10), metrics={"accuracy": 0.75}),
    )
    ten = log.history.checkpoints[name(10)]
    assert ten.metrics == {"loss": 2.0, "accuracy": 0.75}
    assert RunHistory.from_snapshot(log.history.to_snapshot(0.0)).live() == (ten,)


def test_a_checkpoint_is_not_given_more_metrics_than_allowed() -> None:
    """A commit may have brought more: those stay, and can be changed."""
    many = {str(number): 0.0 for number in range(r.MAX_METRICS)}
    log = begun(replace(commit(10), metrics=many), replace(commit(20), metrics={**many, "more": 0.0}))
    for step in (10, 20):
        with pytest.raises(FormatError, match="more than 100 metrics"):
            log.add(r.Annotated(attempt=name(step), metrics={"new": 1.0}))
        log.add(r.Annotated(attempt=name(step), metrics={"0": 1.0}))
        assert log.history.checkpoints[name(step)].metrics["0"] == 1.0


def test_what_waited_behind_a_retirement_changes_nothing() -> None:
    """A copy, a scrub or a loss that is reported before a retirement is confirmed is recorded after it."""
    log = begun(commit(10), r.Retired(attempt=name(10), reason="old"))
    before = log.history.checkpoints[name(10)]
    late = (
        r.Promote(attempt=name(10), level=Level.DURABLE, replicas=2),
        r.Verified(attempt=name(10)),
        r.Annotated(attempt=name(10), metrics={"loss": 1.0}),
        r.Lost(attempt=name(10), reason="nodes"),
    )
    log.add(*late)
    assert log.history.checkpoints[name(10)] == before and log.history.live() == ()
    log.add(r.Collected(attempt=name(10)), *late)
    assert log.history.checkpoints[name(10)].state == "collected"


@pytest.mark.parametrize(
    ("before", "op"),
    [
        ([r.Retired(attempt=name(10), reason="x")], r.Retired(attempt=name(10), reason="x")),
        ([], r.Collected(attempt=name(10))),
        ([r.Lost(attempt=name(10), reason="x")], r.Collected(attempt=name(10))),
        ([r.Lost(attempt=name(10), reason="x")], r.Pin(attempt=name(10), owner="o", expires_at_s=None)),
        (
            [r.Retired(attempt=name(10), reason="x")],
            r.Pin(attempt=name(10), owner="o", expires_at_s=None),
        ),
        (
            [r.Retired(attempt=name(10), reason="x"), r.Collected(attempt=name(10))],
            r.Collected(attempt=name(10)),
        ),
        (
            [r.Retired(attempt=name(10), reason="x"), r.Collected(attempt=name(10))],
            r.Retired(attempt=name(10), reason="x"),
        ),
    ],
)
def test_a_checkpoint_goes_through_its_states_in_order(before: list[r.Op], op: r.Op) -> None:
    log = begun(commit(10), *before)
    seen = log.history.to_snapshot(0.0)
    with pytest.raises(FormatError, match="checkpoint cannot be"):
        log.add(op)
    assert log.history.to_snapshot(0.0) == seen


def test_a_lost_checkpoint_may_be_retired() -> None:
    log = begun(commit(10), r.Lost(attempt=name(10), reason="x"))
    read = RunHistory.from_snapshot(log.history.to_snapshot(0.0))
    assert [c.step for c in log.history.lost()] == [10] and read.lost() == log.history.lost()
    log.add(r.Retired(attempt=name(10), reason="x"))
    assert log.history.checkpoints[name(10)].state == "retired" and not log.history.lost()


def test_a_copy_has_a_life_of_its_own() -> None:
    log = begun(commit(10))
    copy, before = log.history.copy(), log.history.to_snapshot(0.0)
    log.add(commit(20), session(2), r.Retired(attempt=name(10), reason="x"))
    assert copy.to_snapshot(0.0) == before
    assert [c.step for c in copy.lineage()] == [10] and copy.live() == before.checkpoints


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
        r.Pin(attempt=name(99), owner="o", expires_at_s=None),
        r.Unpin(attempt=name(99), owner="o"),
        r.Verified(attempt=name(99)),
        r.Annotated(attempt=name(99), metrics={}),
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


@examples(100)
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


def random_op(history: RunHistory, random: Random, number: int) -> r.Op:
    """Draw an op, often one that `history` accepts."""
    known = list(history.checkpoints) or [name(0)]
    attempt, current = random.choice(known), history.session
    owner = random.choice(("eval", "paper"))
    kinds: list[tuple[int, r.Op]] = [
        (3, commit(number, of_session=random.choice(list(history.sessions) or [1]))),
        (1, session((current.session if current else 0) + 1)),
        (
            1,
            replace(
                session(number + 100),
                resumed_from=attempt,
                after=current.session if current else None,
                owner="driver",
                retention="last 3",
            ),
        ),
        (1, r.Epoch(service=random.choice("ab"))),
        (1, r.Note(text="x")),
        (2, r.Promote(attempt=attempt, level=random.choice(list(Level)), replicas=random.randrange(3))),
        (1, r.Lost(attempt=attempt, reason="x")),
        (2, r.Retired(attempt=attempt, reason="x")),
        (2, r.Collected(attempt=attempt)),
        (1, r.Pin(attempt=attempt, owner=owner, expires_at_s=random.choice((None, 7.5)))),
        (1, r.Unpin(attempt=attempt, owner=owner)),
        (1, r.Verified(attempt=attempt)),
        (1, r.Annotated(attempt=attempt, metrics={random.choice("ab"): random.random()})),
    ]
    (op,) = random.choices([op for _, op in kinds], [weight for weight, _ in kinds])
    return op


def grow(log: Log, random: Random, num_ops: int) -> list[tuple[r.LogRecord, str]]:
    """Add random ops; return the accepted records. A refused record must not change anything."""
    added = []
    for _ in range(num_ops):
        log.epoch += random.randrange(10) == 0
        op = random_op(log.history, random, log.history.next_seq)
        if isinstance(op, r.Commit):
            op = replace(op, metrics={"loss": random.random(), "lr": 0.1} if random.randrange(2) else {})
        record = replace(log.record(op), time_s=random.uniform(0, 1e9))
        data, before = digest(r.encode_record(record)), log.history.to_snapshot(0.0)
        try:
            log.history.apply(record, data)
        except FormatError:
            assert log.history.to_snapshot(0.0) == before
        else:
            added.append((record, data))
    return added


@pytest.mark.parametrize("seed", every_few(range(40)))
def test_a_history_from_a_snapshot_is_the_same_and_goes_on_the_same(seed: int) -> None:
    random = Random(seed)
    log = Log(CREATE)
    grow(log, random, random.randrange(60))
    snapshot = log.history.to_snapshot(123.0)
    again = RunHistory.from_snapshot(decode_snapshot(encode_snapshot(snapshot)))
    assert again.to_snapshot(123.0) == snapshot
    for record, record_digest in grow(log, random, 40):
        again.apply(record, record_digest)
    assert again.to_snapshot(0.0) == log.history.to_snapshot(0.0)
    assert (again.live(), again.lineage()) == (log.history.live(), log.history.lineage())
    assert again.session == log.history.session


@pytest.mark.parametrize("seed", every_few(range(20)))
def test_live_and_lineage_follow_their_definitions(seed: int) -> None:
    log = Log(CREATE)
    grow(log, Random(seed), 119)
    history = log.history
    before = history.live(), history.lineage()
    assert history.live() is before[0] and history.lineage() is before[1], "until the next record"
    grow(log, Random(seed + 1), 1)
    known = history.checkpoints.values()
    assert history.live() == tuple(c for c in known if c.state == "live")
    lineage, session, last_seq = [], history.session, history.next_seq
    while session is not None:
        number = session.session
        lineage += [c for c in known if c.id.session == number and c.seq <= last_seq and c.state == "live"]
        branch = history.checkpoints.get(session.resumed_from or "")
        session, last_seq = (history.sessions[branch.id.session], branch.seq) if branch else (None, 0)
    assert list(history.lineage()) == sorted(lineage, key=lambda c: c.seq)


def test_each_commit_keeps_the_kind_of_its_root_digest() -> None:
    """A run goes on in a newer version: its older root digests are those of all files."""
    known = commit(20)
    newer = r.Commit2(**{field.name: getattr(known, field.name) for field in fields(known)})
    history = begun(commit(10), newer).history
    kinds = {checkpoint.step: checkpoint.root_of for checkpoint in history.live()}
    assert kinds == {10: "files", 20: "fragments"}
    again = RunHistory.from_snapshot(decode_snapshot(encode_snapshot(history.to_snapshot(0.0))))
    assert again.checkpoints == history.checkpoints
