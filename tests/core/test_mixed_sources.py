"""Stories of a durable checkpoint whose intact parts are partly on nodes, partly on the storage path."""

from __future__ import annotations

from typing import Any

import pytest

from ray_ckpt.core import messages as m
from ray_ckpt.core.maintenance import MAINTENANCE_S
from ray_ckpt.core.repair import LOST_AFTER_S
from ray_ckpt.format import records as r
from ray_ckpt.format.names import shard_file
from ray_ckpt.types import AttemptId
from tests.core.driver import Harness, of, one, ops

SHARD, STILL = shard_file(0, 2), shard_file(0, 2, 1)


def run_with(*steps: int, **options: Any) -> Harness:
    """Return a run whose steps are durable. Node a has fragment 0 of each, and no node has fragment 1."""
    run = Harness("ab", inventory_wait_s=0.0, **{"replicas": 0, "remote_every": 1, "keep_last": 9, **options})
    run.open("ab")
    for step in steps:
        run.drain_all(run.save(step))
    run.lose("b")
    run.open("a")
    return run


def attempts(run: Harness) -> dict[int, AttemptId]:
    return {c.step: c.id for c in run.machine.history.live()}


def read(run: Harness, attempt: AttemptId, index: int, *damage: str) -> tuple[m.Effect, ...]:
    """Return what follows from a read of a fragment on the storage path."""
    event = m.ScrubEnded(attempt=attempt, node_index=index, place=m.REMOTE, damage=damage, error=None)
    return run.feed(event, run.ticked)


def uploads(effects: tuple[m.Effect, ...]) -> set[tuple[int, int, str, str]]:
    return {(d.attempt.step, d.node_index, d.node_id, d.like) for d in of(effects, m.Drain)}


def test_a_group_restores_it_and_the_bad_part_is_uploaded_from_its_node() -> None:
    run = run_with(10, 20)
    newest = attempts(run)[20]
    effects = read(run, newest, 0, SHARD)
    assert uploads(effects) == {(20, 0, "a", "")}, "no node has the other part"
    again = run.open("a")
    assert run.plan.resume is not None and run.plan.resume.checkpoint.id == newest
    assert run.plan.resume.holders == (("a",), ()) and not of(again, m.Warn)
    effects = (*run.drain_all(effects), *run.tick(MAINTENANCE_S))
    assert not run.machine._context.holders.unsafe_remote and not of(effects, m.Drain)
    assert [op.fragments for op in run.records if isinstance(op, r.Damaged)] == ["0", ""]


def test_it_is_not_lost() -> None:
    run = run_with(10, 20, 30)
    for drain in of(read(run, attempts(run)[20], 0, SHARD), m.Drain):
        run.drained(drain, error="no space")
    effects = [effect for _ in range(3) for effect in run.tick(LOST_AFTER_S)]
    assert not [op for op in ops(effects) if isinstance(op, r.Lost)]


def test_an_older_one_is_restored_if_the_bad_part_is_on_no_node() -> None:
    run = run_with(10, 20)
    assert not uploads(read(run, attempts(run)[20], 1, SHARD))
    assert "step 10 is restored instead" in one(run.open("a"), m.Warn).text


def test_the_upload_of_one_part_proves_nothing_about_others() -> None:
    run = run_with(10, 20)
    first, second = attempts(run).values()
    read(run, first, 1, STILL)
    effects = read(run, second, 0, SHARD)
    holders = run.machine._context.holders
    assert holders.suspect_remote == {second.attempt: {1}}
    run.drain_all(effects)
    assert holders.bad_remote == {first.attempt: {1}} and holders.suspect_remote == {second.attempt: {1}}
    read(run, second, 1)
    assert holders.unsafe_remote == {first.attempt}


@pytest.mark.parametrize("is_suspect", [False, True])
def test_a_finish_waits_for_the_upload_of_what_may_be_damaged_of_the_newest(is_suspect: bool) -> None:
    run = run_with(10, 20)
    first, newest = attempts(run).values()
    effects = read(run, first if is_suspect else newest, 0, STILL)
    run.drain_all(effects if is_suspect else ())
    finished = run.feed(m.FinishRequested(token="end", ends_group=True))
    assert not of(finished, m.Reply)
    effects = finished if is_suspect else effects
    assert uploads(effects) == {(20, 0, "a", "")}
    assert one(run.drain_all(effects), m.Reply).value == run.checkpoint(newest)
