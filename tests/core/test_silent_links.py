"""Stories of nodes that do not reach each other: saves go elsewhere, or are committed with what there is."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest

from ray_ckpt.core import messages as m
from ray_ckpt.core.links import SILENT_FOR_S
from ray_ckpt.core.open_attempts import MAX_OPEN_ATTEMPTS
from ray_ckpt.format import records as r
from ray_ckpt.types import Level
from tests.core.driver import Harness, StoreMode, of, one, ops


def committed(effects: Iterable[object]) -> list[tuple[int, Level, int]]:
    return [(op.step, op.level, op.replicas) for op in ops(effects) if isinstance(op, r.Commit)]


def dropped(effects: Iterable[object]) -> list[int]:
    return [effect.attempt.step for effect in of(effects, m.NotifyOutcome) if effect.error is not None]


def copies(effects: Iterable[object]) -> list[str]:
    return [f"{copy.node_index} {copy.source}>{copy.holder}" for copy in of(effects, m.Replicate)]


def stored(run: Harness, step: int, *nodes: str) -> tuple[m.Effect, ...]:
    return run.feed(*(run.stored(run.attempt(step), node) for node in nodes))


def copied(
    run: Harness, step: int, source: str, holder: str, *, reached: bool = True
) -> tuple[m.Effect, ...]:
    return run.feed(run.copied(run.attempt(step), source, holder, reached=reached))


def test_at_the_limit_the_newest_complete_attempt_is_committed_as_it_is() -> None:
    """Copies that take long cost the older attempts their turn, and no more."""
    run = Harness("ab")
    run.open("ab")
    for step in range(1, MAX_OPEN_ATTEMPTS + 1):
        assert not dropped(stored(run, step, "a", "b"))
    effects = stored(run, 9, "a")
    assert committed(effects) == [(8, Level.LOCAL, 0)], "9 is not complete yet"
    assert dropped(effects) == [1, 2, 3, 4, 5, 6, 7], "a newer one is in the log, at last"
    copied(run, 8, "a", "b")
    promote = ops(copied(run, 8, "b", "a"))
    assert [op.level for op in promote if isinstance(op, r.Promote)] == [Level.REPLICATED]


def test_no_complete_attempt_gives_way_to_newer_ones_that_are_incomplete() -> None:
    run = Harness("ab")
    run.open("ab")
    stored(run, 1, "a", "b")
    for step in range(2, MAX_OPEN_ATTEMPTS + 1):
        assert not committed(stored(run, step, "a"))
    effects = stored(run, 9, "a")
    assert (committed(effects), dropped(effects)) == ([(1, Level.LOCAL, 0)], [])


def test_of_attempts_that_are_all_incomplete_the_oldest_is_dropped() -> None:
    run = Harness("ab")
    run.open("ab")
    for step in range(1, MAX_OPEN_ATTEMPTS + 1):
        stored(run, step, "a")
    effects = stored(run, 9, "a")
    assert (committed(effects), dropped(effects)) == ([], [1])


def test_what_nodes_hold_is_counted_before_the_limit_is_looked_at() -> None:
    """A restarted coordinator finds more open attempts than the limit: the complete one among them stays."""
    run = Harness("ab")
    run.open("ab")
    plan = run.plan
    for step in range(2, MAX_OPEN_ATTEMPTS + 2):
        run.stored(run.attempt(step), "a")
    for node in "ab":
        run.stored(run.attempt(1), node)
    run.start_coordinator()
    effects = run.feed(m.GroupRecovered(plan=plan, inventories=run.inventories()))
    assert (committed(effects), dropped(effects)) == ([(1, Level.LOCAL, 0)], [])


@pytest.mark.parametrize("store", ["ok", "held", "silent"])
def test_no_complete_attempt_is_dropped_but_for_a_newer_complete_one(store: StoreMode) -> None:
    """Whatever order they come in, and also while the store does not take records."""
    for seed in range(10):
        chance, run = Random(seed), Harness("ab")
        run.open("ab")
        run.store_mode = store
        complete: set[int] = set()
        for step in range(1, 60):
            nodes = chance.choice(["a", "b", "ab", "ba"])
            effects = stored(run, step, *nodes)
            complete |= {step} if len(nodes) == 2 else set()
            gone = complete & set(dropped(effects))
            assert all(step < max(complete) for step in gone)
            assert max(complete, default=0) not in gone
        if store == "held":
            run.confirm()
        last = max((op.step for op in run.records if isinstance(op, r.Commit)), default=0)
        assert store == "silent" or last > 40


def test_an_unreachable_holder_delays_one_attempt_and_no_later_one() -> None:
    run = Harness("abc")
    run.open("ab")
    stored(run, 1, "a", "b")
    assert not committed(copied(run, 1, "b", "a"))
    effects = copied(run, 1, "a", "b", reached=False)
    assert copies(effects) == ["0 a>c"]
    (warning,) = of(effects, m.Warn)
    assert "Node a does not reach node b" in warning.text
    assert committed(copied(run, 1, "a", "c")) == [(1, Level.REPLICATED, 1)]
    stored(run, 2, "a", "b")
    copied(run, 2, "b", "a")
    effects = copied(run, 2, "a", "b", reached=False)
    assert copies(effects) == ["0 a>c"]
    assert not of(effects, m.Warn), "logged once"
    effects = copied(run, 2, "a", "c", reached=False)
    assert copies(effects) == [], "b is known to be silent"
    assert committed(effects) == [(2, Level.LOCAL, 0)]


def test_without_another_holder_a_save_is_committed_as_it_is_and_repaired_when_the_link_works() -> None:
    run = Harness("ab")
    run.open("ab")
    stored(run, 1, "a", "b")
    copied(run, 1, "b", "a")
    assert committed(copied(run, 1, "a", "b", reached=False)) == [(1, Level.LOCAL, 0)]
    requested = 0
    for _ in range(300):  # seconds
        if copies(run.tick(1.0)):
            requested += 1
            copied(run, 1, "a", "b", reached=False)
    assert requested == pytest.approx(300 / (SILENT_FOR_S + 1), abs=12)
    waited_s = 0
    while not copies(run.tick(1.0)):
        waited_s += 1
    assert waited_s <= SILENT_FOR_S + 1
    copied(run, 1, "a", "b")
    assert run.checkpoint(run.attempt(1)).level is Level.REPLICATED


def test_a_copy_that_came_although_it_was_given_up_is_deleted_with_its_checkpoint() -> None:
    """Only the answer to the copy was lost; the node that has it is not in the group and no known holder."""
    run = Harness("abcd", keep_last=1, remote_every=1000)
    run.open("ab")
    stored(run, 1, "a", "b")
    copied(run, 1, "b", "a")
    copied(run, 1, "a", "b", reached=False)
    copied(run, 1, "a", "c", reached=False)
    assert committed(copied(run, 1, "a", "d")) == [(1, Level.REPLICATED, 1)]
    run.tick(1.0)
    effects = run.save(2)
    assert {delete.place for delete in of(effects, m.Delete)} == {*"abcd", m.REMOTE}


def test_a_drop_is_sent_to_nodes_that_may_have_a_copy() -> None:
    run = Harness("abc")
    run.open("ab")
    stored(run, 1, "a")
    assert copies(copied(run, 1, "a", "b", reached=False)) == ["0 a>c"]
    copied(run, 1, "a", "c", reached=False)
    refused = m.SaveRefused(attempt=run.attempt(1), ranks=(1,), reason="busy")
    assert one(run.feed(refused), m.NotifyOutcome).nodes == ("a", "b", "c")
