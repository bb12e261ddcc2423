"""Schedules by chance: whatever happens, the promises hold after each step, and in the end all works again.

A schedule is a function of its seed. To replay one: python -m ray_ckpt.testing --seeds SEED:SEED+1
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from ray_ckpt.testing import silences
from ray_ckpt.testing.exhaustive import SCENES
from ray_ckpt.testing.oracle import Violation
from ray_ckpt.testing.schedules import NUM_EVENTS, play

SOAK_S = float(os.environ.get("RAY_CKPT_SOAK_S", "60"))
NUM_SCHEDULES = 300  # more: python -m ray_ckpt.testing --seeds 300:20000
QUICK_SCHEDULES = 15  # the other seeds are slow tests
CHUNK = 15  # schedules of one test
LARGE = range(6, 61)  # nodes of a large cluster; more: --nodes 6:61
NUM_SILENCES = 40  # more: python -m ray_ckpt.testing --silences 40:2000
QUICK_SILENCES = 5
CHUNK_OF_SILENCES = 5


def chunks(num_seeds: int, num_quick: int, chunk: int) -> list[Any]:
    """Return the first seed of each chunk; those after the quick ones are slow."""
    return [
        pytest.param(first, marks=pytest.mark.slow if first >= num_quick else ())
        for first in range(0, num_seeds, chunk)
    ]


@pytest.mark.parametrize("first", chunks(NUM_SCHEDULES, QUICK_SCHEDULES, CHUNK))
def test_the_promises_hold_under_any_schedule(first: int) -> None:
    for seed in range(first, first + CHUNK):
        assert play(seed).events.total() == NUM_EVENTS


def test_a_session_that_is_logged_late_has_a_lower_number_than_one_before_it() -> None:
    play(1_000_904)  # two clusters, and a store that was away


def test_the_promises_hold_in_large_clusters() -> None:
    played = [play(seed, sizes=LARGE) for seed in range(6)]
    assert sum(schedule.num_commits for schedule in played) > 15


@pytest.mark.parametrize("first", chunks(NUM_SILENCES, QUICK_SILENCES, CHUNK_OF_SILENCES))
def test_commits_go_on_while_links_are_silent(first: int) -> None:
    """And copies are complete soon after; see `ray_ckpt.testing.silences`."""
    for seed in range(first, first + CHUNK_OF_SILENCES):
        assert silences.play(seed).num_commits > 0


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 60)
def test_the_promises_hold_for_the_requested_time() -> None:
    """Seeds beyond those of every run, for RAY_CKPT_SOAK_S seconds (`make soak SECONDS=...`)."""
    end_s, seed = time.monotonic() + SOAK_S, NUM_SCHEDULES
    while time.monotonic() < end_s:
        play(seed)
        seed += 1
    print(f"{seed - NUM_SCHEDULES} schedules of {NUM_EVENTS} events, seeds {NUM_SCHEDULES} to {seed - 1}")


def test_a_seed_replays() -> None:
    assert play(7) == play(7)


def test_schedules_do_what_they_are_for() -> None:
    """Enough commits, sessions and faults happen that the checks have something to look at."""
    played = [play(seed, num_events=100) for seed in range(20)]
    events = sum((p.events for p in played), start=type(played[0].events)())
    assert sum(p.num_commits for p in played) > 50
    assert sum(p.num_sessions for p in played) > 50
    assert {"node_goes", "coordinator_restarts", "coordinator_freezes", "store_changes"} <= set(events)


def test_the_oracle_sees_a_lost_checkpoint() -> None:
    """The checks are only worth something if they fail when they should."""
    world = SCENES["collector"]().world
    (checkpoint,) = world.oracle.history.live()
    world.oracle.check(world)
    for node in world.nodes.values():
        node.disk.delete(checkpoint.directory)
    world.oracle.stale = True
    with pytest.raises(Violation, match=f"P2: step {checkpoint.step} has lost fragment 0"):
        world.oracle.check(world)
