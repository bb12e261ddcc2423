"""Stories of damage in a still file on the storage path, which other checkpoints there may share by links."""

from __future__ import annotations

from typing import Any

import pytest

from ray_ckpt.core import messages as m
from ray_ckpt.core.drain import DAMAGED_AGAIN_S
from ray_ckpt.core.maintenance import MAINTENANCE_S
from ray_ckpt.core.scrub import AGAIN_S, MAX_TRIES
from ray_ckpt.format.names import fragment_file, shard_file, state_file
from ray_ckpt.types import AttemptId, Level
from tests.core.driver import Harness, of, one

STILL = shard_file(0, 2, 1)
STEPS = (10, 20, 30)


def run_with(steps: tuple[int, ...] = STEPS, **options: Any) -> Harness:
    """Return a run on two nodes whose steps are durable, without scrub rounds that are due."""
    run = Harness("ab", inventory_wait_s=0.0, **{"remote_every": 1, "keep_last": 9, **options})
    run.open("ab")
    for step in steps:
        run.drain_all(run.save(step))
        assert run.checkpoint(run.attempt(step)).level is Level.DURABLE
    return run


def read(
    run: Harness, attempt: AttemptId, *damage: str, error: str | None = None, index: int = 0
) -> tuple[m.Effect, ...]:
    """Return what follows from a read of a fragment on the storage path."""
    return run.feed(
        m.ScrubEnded(attempt=attempt, node_index=index, place=m.REMOTE, damage=damage, error=error)
    )


def found(run: Harness, step: int, *damage: str) -> tuple[m.Effect, ...]:
    """Let a round find damage in a checkpoint, and repair it."""
    effects = read(run, run.attempt(step), *damage)
    assert {drain.like for drain in of(effects, m.Drain)} == {""}
    return (*effects, *run.drain_all(effects))


def suspects(run: Harness, effects: tuple[m.Effect, ...], *bad: int) -> list[int]:
    """Carry out reads of the storage path, which find the steps `bad` damaged; return the steps read."""
    steps: list[int] = []
    while scrubs := of(effects, m.Scrub):
        scrub = one(scrubs, m.Scrub)
        assert (scrub.place, scrub.node_index) == (m.REMOTE, 0)
        steps.append(scrub.attempt.step)
        damage = (STILL,) if scrub.attempt.step in bad else ()
        ended = read(run, scrub.attempt, *damage)
        effects = (*ended, *run.drain_all(ended), *run.tick(MAINTENANCE_S))
    return steps


def likes(effects: tuple[m.Effect, ...]) -> set[str]:
    return {drain.like for drain in of(effects, m.Drain)}


def test_the_others_are_read_at_once_and_no_upload_shares_their_files_until_then() -> None:
    run = run_with()
    effects = found(run, 20, STILL)
    saved = run.save(40)
    assert likes(saved) == {run.attempt(20).directory}, "it has new files; the others have not been read"
    run.drain_all(saved)
    assert suspects(run, effects) == [10, 30], "step 40 came later"
    assert likes(run.save(50)) == {run.attempt(40).directory}


def test_what_shares_the_damage_is_uploaded_anew_and_nothing_is_read_twice() -> None:
    run = run_with((10, 20, 30, 40))
    effects = found(run, 20, STILL)
    assert suspects(run, effects, 30) == [10, 30, 40]
    assert not run.machine._drains.attempts and not run.machine._context.holders.unsafe_remote
    assert likes(run.save(50)) == {run.attempt(40).directory}


def test_the_others_are_read_at_once_when_a_file_was_damaged_and_mended() -> None:
    run = run_with()
    ended = m.ScrubEnded(
        attempt=run.attempt(20), node_index=0, place=m.REMOTE, damage=(), error=None, mended=(STILL,)
    )
    effects = run.feed(ended)
    assert "is mended: " in one(effects, m.Warn).text
    assert not of(effects, m.Drain)
    assert suspects(run, (*effects, *run.tick(MAINTENANCE_S))) == [10, 30]
    assert not run.machine._context.holders.unsafe_remote


def test_what_was_damaged_before_another_is_mended_is_read_again() -> None:
    """The node that had read it did not have the file."""
    run = run_with(keep_local=1)
    run.tick(MAINTENANCE_S)
    first, second = run.attempt(10), run.attempt(30)
    effects = read(run, first, STILL)
    holders = run.machine._context.holders
    assert not of(effects, m.Drain) and holders.bad_remote.keys() == {first.attempt}, "it is on no node"
    mended = m.ScrubEnded(
        attempt=second, node_index=0, place=m.REMOTE, damage=(), error=None, mended=(STILL,)
    )
    effects = (*effects, *run.feed(mended), *run.tick(MAINTENANCE_S))
    assert sorted(suspects(run, effects)) == [10, 20, 30]
    assert not holders.bad_remote and not holders.unsafe_remote


def test_an_upload_under_way_shares_no_more_and_is_read_when_it_is_durable() -> None:
    run = run_with((10,))
    first, second = of(run.save(20), m.Drain)
    assert first.like == second.like == run.attempt(10).directory
    effects = (*read(run, run.attempt(10), STILL), *run.tick(MAINTENANCE_S))
    assert not of(effects, m.Scrub), "it is not complete yet"
    lost = (*run.lose("b"), *run.tick(MAINTENANCE_S))
    again = one([drain for drain in of(lost, m.Drain) if drain.attempt == second.attempt], m.Drain)
    assert again.like == "", "the first order of this fragment died with its node"
    run.drain_all([first, again])
    assert run.checkpoint(first.attempt).level is Level.DURABLE
    assert suspects(run, run.tick(MAINTENANCE_S)) == [20]


def test_copies_on_nodes_stay_until_the_ones_on_the_storage_path_were_read() -> None:
    run = run_with((10, 20), keep_local=1)
    assert {evict.attempt.step for evict in of(run.tick(MAINTENANCE_S), m.Evict)} == {10}
    effects = read(run, run.attempt(10), STILL)
    saved = run.save(30)
    effects = (*effects, *saved, *run.drain_all(saved), *run.tick(MAINTENANCE_S))
    assert run.checkpoint(run.attempt(30)).level is Level.DURABLE and not of(effects, m.Evict)
    assert one(effects, m.Scrub).attempt == run.attempt(20)
    effects = (*read(run, run.attempt(20)), *run.tick(MAINTENANCE_S))
    assert {evict.attempt.step for evict in of(effects, m.Evict)} == {20}


def test_a_finished_run_keeps_the_copies_of_suspects_on_its_nodes() -> None:
    run = run_with((10, 20, 30), retire_grace_s=60.0)
    bad, suspect, newest = (run.attempt(step) for step in (10, 20, 30))
    run.drain_all(read(run, bad, STILL))
    run.drain_all(run.feed(m.FinishRequested(token="end", ends_group=True)))
    for _ in range(3):
        run.feed(m.RemoteListed(number=of(run.transcript, m.SweepRemote)[-1].number))
        run.tick(61.0)
    assert {evict.attempt for evict in of(run.transcript, m.Evict)} == {bad, newest}, "they have new files"
    assert one(run.transcript, m.PutAway).kept == (suspect.directory,)


@pytest.mark.parametrize("is_suspect", [False, True])
def test_a_run_does_not_end_with_a_last_checkpoint_that_may_be_damaged(is_suspect: bool) -> None:
    """After the answer the nodes, with the only intact copies, may be gone."""
    run = run_with((10, 20))
    attempt = run.attempt(20)
    drains = of(read(run, run.attempt(10) if is_suspect else attempt, STILL), m.Drain)
    if is_suspect:
        run.drain_all(drains)
    effects = run.feed(m.FinishRequested(token="end", ends_group=True))
    assert not of(effects, m.Reply)
    drains = of(effects, m.Drain) if is_suspect else drains
    assert {(drain.attempt, drain.like) for drain in drains} == {(attempt, "")}
    assert one(run.drain_all(drains), m.Reply).value == run.checkpoint(attempt)


def test_a_run_ends_with_a_damaged_last_checkpoint_that_is_on_no_node() -> None:
    run = run_with((10, 20))
    run.lose("a", "b")
    read(run, run.attempt(20), STILL)
    assert one(run.feed(m.FinishRequested(token="end")), m.Reply).token == "end"


def test_a_finish_fails_if_the_good_copies_of_a_damaged_last_checkpoint_are_lost_meanwhile() -> None:
    run = run_with((10, 20))
    read(run, run.attempt(20), STILL)
    run.feed(m.FinishRequested(token="end"))
    assert one(run.lose("a", "b"), m.Fail).token == "end"


def test_nodes_that_all_leave_upload_a_damaged_last_checkpoint_first() -> None:
    run = run_with((10, 20))
    drains = read(run, run.attempt(10), STILL)
    for drain in of(drains, m.Drain):
        run.drained(drain)  # not described yet
    leaving = m.NodesSeen(live=frozenset("ab"), draining=frozenset("ab"), left_s={"a": 600.0, "b": 600.0})
    rescued = run.feed(leaving)
    assert {(drain.attempt.step, drain.like) for drain in of(rescued, m.Drain)} == {(20, "")}
    run.drain_all(rescued)
    assert not of((*run.feed(leaving), *run.tick(1.0)), m.Drain)


def test_a_node_outside_the_group_is_needed_while_the_copy_on_the_storage_path_is_a_suspect() -> None:
    run = Harness("abcd", inventory_wait_s=0.0, remote_every=1, keep_last=9)
    run.open("ab")
    for step in (10, 20):
        run.drain_all(run.save(step))
    bad = run.attempt(10)
    run.feed(run.group("cd"))
    run.feed(run.restored("c"), run.restored("d"))
    assert run.machine.view.needed_nodes() == frozenset("cd")
    effects = read(run, bad, STILL)
    effects = (*effects, *run.drain_all(effects), *run.tick(MAINTENANCE_S))
    assert run.machine.view.needed_nodes() == frozenset("abcd")
    assert suspects(run, effects) == [20]
    assert run.machine.view.needed_nodes() == frozenset("cd")


def test_damage_that_cannot_be_repaired_makes_suspects_once() -> None:
    run = run_with()
    effects = read(run, run.attempt(20), STILL)
    drains = of(effects, m.Drain)
    assert suspects(run, effects) == [10, 30]
    for drain in drains:
        run.drained(drain, error="no space")
    effects = (*read(run, run.attempt(20), STILL), *run.tick(MAINTENANCE_S))
    assert not of(effects, m.Scrub)


def test_an_upload_that_is_ordered_again_shares_no_file_of_what_was_found_damaged_since() -> None:
    run = Harness("abc", inventory_wait_s=0.0, remote_every=1, keep_last=9)
    run.open("abc")
    run.drain_all(run.save(10))
    old = run.attempt(10)
    assert likes(run.save(20)) == {old.directory}
    read(run, old, fragment_file(0, 3))
    again = [drain for drain in of(run.lose("c"), m.Drain) if drain.attempt == run.attempt(20)]
    assert again and likes(tuple(again)) == {""}


def described_as_damaged(run: Harness, effects: tuple[m.Effect, ...]) -> tuple[m.Effect, ...]:
    """Carry out uploads, whose description finds a file cut short; return what follows."""
    ended = [effect for drain in of(effects, m.Drain) for effect in run.drained(drain)]
    attempt = one(ended, m.WriteDescription).checkpoint.id
    return run.feed(m.DescriptionWritten(attempt=attempt, error="it is cut short", is_damage=True))


@pytest.mark.parametrize("is_end", [False, True])
def test_an_upload_that_shared_a_file_and_is_damaged_is_repeated_without_sharing(is_end: bool) -> None:
    """The shared file may have been damaged where it came from, which is read at once."""
    run = run_with((10,))
    origin = run.attempt(10)
    saved = run.save(20)
    assert likes(saved) == {origin.directory}
    if is_end:
        run.feed(m.FinishRequested(token="end"))
    effects = described_as_damaged(run, saved)
    assert not of(effects, m.Fail)
    assert "without files of step 10: it is cut short" in one(effects, m.Warn).text
    assert likes(effects) == {""} and {drain.attempt for drain in of(effects, m.Drain)} == {run.attempt(20)}
    effects = (*effects, *run.drain_all(effects))
    assert run.checkpoint(run.attempt(20)).level is Level.DURABLE
    if is_end:
        assert one(effects, m.Reply).value == run.checkpoint(run.attempt(20))
        assert not of((*effects, *run.tick(MAINTENANCE_S)), m.Scrub), "no round would read the rest of them"
        return
    scrubs = []
    while found := of((*effects, *run.tick(MAINTENANCE_S)), m.Scrub):
        scrubs.append(one(found, m.Scrub))
        effects = read(run, origin, index=scrubs[-1].node_index)
    assert scrubs == [m.Scrub(attempt=origin, node_index=index, place=m.REMOTE) for index in (0, 1)]


def test_an_upload_that_is_damaged_although_it_shared_no_file_is_given_up_for_a_while() -> None:
    run = run_with((10,))
    effects = described_as_damaged(run, run.save(20))
    effects = described_as_damaged(run, effects)
    assert "did not reach the storage path" in one(effects, m.Warn).text
    again = (*run.tick(DAMAGED_AGAIN_S), *run.tick(MAINTENANCE_S))
    assert likes(again) == {""} and {drain.attempt.step for drain in of(again, m.Drain)} == {20}


@pytest.mark.parametrize("file", [shard_file(0, 2), state_file(0, 2)])
def test_damage_in_a_file_of_its_own_concerns_one_checkpoint(file: str) -> None:
    run = run_with()
    effects = found(run, 20, file)
    assert not of((*effects, *run.tick(MAINTENANCE_S)), m.Scrub)


def test_a_suspect_that_cannot_be_read_stays_one_until_a_round_has_read_it() -> None:
    run = run_with((10, 20), scrub_bytes_per_s=10_000)
    effects = found(run, 10, STILL)
    suspect = run.attempt(20)
    for _ in range(MAX_TRIES):
        assert one(effects, m.Scrub).attempt == suspect
        effects = (*read(run, suspect, error="EIO"), *run.tick(MAINTENANCE_S))
    assert run.machine._context.holders.unsafe_remote == {suspect.attempt}
    places = []
    while scrubs := of(effects, m.Scrub):
        scrub = one(scrubs, m.Scrub)
        places.append((scrub.attempt, scrub.node_index, scrub.place))
        ended = m.ScrubEnded(
            attempt=scrub.attempt, node_index=scrub.node_index, place=scrub.place, damage=(), error=None
        )
        effects = (*run.feed(ended), *run.tick(MAINTENANCE_S))
    assert places == [(suspect, index, place) for index in (0, 1) for place in ("a", "b", m.REMOTE)]
    assert not run.machine._context.holders.unsafe_remote
    assert not of(run.tick(AGAIN_S), m.Scrub)
