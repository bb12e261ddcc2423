"""Commits that are drained regularly: by number, by time, and the same after a restart."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ray_ckpt.core import messages as m
from ray_ckpt.core.drain_policy import DrainPolicy
from ray_ckpt.core.maintenance import MAINTENANCE_S
from ray_ckpt.types import Level
from tests.core.driver import Harness, of
from tests.core.records import checkpoint
from tests.support.examples import every_few


def due(times_s: list[float], *, every: int = 1000, every_s: float | None = None) -> list[int]:
    """Return the numbers, from 1, of the commits at these times that are due."""
    cadence = DrainPolicy()
    return [
        number
        for number, time_s in enumerate(times_s, 1)
        if cadence.committed(checkpoint(number, committed_at_s=time_s), every=every, every_s=every_s)
    ]


def drained(run: Harness, step: int, after_s: float) -> bool:
    """Save a step after some seconds; return True if the save is drained."""
    run.tick(after_s)
    return any(drain.attempt.step == step for drain in of(run.save(step), m.Drain))


def test_time_counts_from_the_first_commit_and_then_from_the_last_that_was_due() -> None:
    assert due([0, 99, 100, 150, 250, 251, 360], every_s=100.0) == [3, 5, 7]


def test_number_and_time_are_due_each_for_itself() -> None:
    assert due([0, 10, 20, 30, 40, 100, 110, 120], every=3, every_s=50.0) == [3, 6]
    assert due([0, 60, 70, 80, 140], every=4, every_s=50.0) == [2, 4, 5]


def test_without_a_period_only_the_number_counts() -> None:
    assert due([0, 1e9, 2e9, 3e9], every=2) == [2, 4]


def test_a_clock_that_was_ahead_holds_up_nothing() -> None:
    assert due([0, 100, 1e6, 210, 220, 320], every_s=100.0) == [2, 3, 4, 6]


@pytest.mark.parametrize("seed", every_few(range(20)))
def test_a_restarted_coordinator_finds_the_same_ones_due(seed: int) -> None:
    chance = random.Random(seed)
    times = [chance.uniform(0, 1000) for _ in range(60)]
    every, every_s = chance.choice([1, 3, 1000]), chance.choice([None, 50.0, 400.0])
    commits = [checkpoint(step, committed_at_s=time) for step, time in enumerate(times, 1)]
    one, other = DrainPolicy(), DrainPolicy()
    expected = [c for c in commits if one.committed(c, every=every, every_s=every_s)]
    for c in commits:
        other.committed(c, every=every, every_s=every_s)
    history = {c.id.attempt: c for c in commits}
    assert other.undrained(history) == one.undrained(history) == tuple(reversed(expected))


def test_what_is_durable_or_gone_needs_no_drain_any_more() -> None:
    cadence = DrainPolicy()
    commits = {c.id.attempt: c for c in (checkpoint(step) for step in (1, 2, 3, 4))}
    for c in commits.values():
        cadence.committed(c, every=1, every_s=None)
    one, two, three, four = commits.values()
    commits |= {
        two.id.attempt: replace(two, level=Level.DURABLE),
        three.id.attempt: replace(three, state="retired"),
    }
    assert cadence.undrained(commits) == (four, one)


def test_a_commit_is_drained_when_the_last_drained_one_is_old_enough() -> None:
    run = Harness("ab", remote_every=1000, remote_every_s=600.0)
    run.open("ab")
    reported = [drained(run, 10 * number, 200.0) for number in range(1, 9)]
    assert reported == [False, False, False, True, False, False, True, False]


def test_a_restarted_coordinator_goes_on_with_the_same_period() -> None:
    run = Harness("ab", remote_every=1000, remote_every_s=600.0)
    run.open("ab")
    assert [drained(run, step, 300.0) for step in (10, 20, 30)] == [False, False, True]
    run.start_coordinator()
    run.open("ab")
    assert [drained(run, step, 290.0) for step in (40, 50, 60)] == [False, False, True]


def test_a_drain_that_died_with_its_coordinator_is_begun_again() -> None:
    run = Harness("ab", remote_every=2, keep_last=3)
    run.open("ab")
    run.save(10)
    assert {d.attempt.step for d in of(run.save(20), m.Drain)} == {20}
    run.start_coordinator()
    effects = [*run.open("ab"), *run.tick(MAINTENANCE_S), *run.tick(MAINTENANCE_S)]
    drains = of(effects, m.Drain)
    assert [(d.attempt.step, d.node_index) for d in drains] == [(20, 0), (20, 1)]
    run.drain_all(drains)
    assert [c.level for c in run.machine.history.live() if c.step == 20] == [Level.DURABLE]
    assert not of(run.tick(MAINTENANCE_S), m.Drain)
