"""Damage on the storage path is in the log: a restarted coordinator knows what a scrub has found."""

from __future__ import annotations

from typing import Any

import pytest

from ray_ckpt.core import messages as m
from ray_ckpt.core.maintenance import MAINTENANCE_S
from ray_ckpt.errors import FormatError
from ray_ckpt.format import records as r
from ray_ckpt.format.names import shard_file
from ray_ckpt.types import AttemptId, Level
from tests.core.driver import Harness, of

SHARD, STILL = shard_file(0, 1), shard_file(0, 1, 1)


def run_with(*steps: int, **options: Any) -> Harness:
    run = Harness("ab", inventory_wait_s=0.0, **{"remote_every": 1, "keep_last": 1, **options})
    run.open("ab")
    for step in steps:
        run.drain_all(run.save(step))
        assert run.checkpoint(run.attempt(step)).level is Level.DURABLE
    return run


def read(run: Harness, attempt: AttemptId, index: int, *damage: str) -> tuple[m.Effect, ...]:
    """Return what follows from a read of a fragment on the storage path."""
    event = m.ScrubEnded(attempt=attempt, node_index=index, place=m.REMOTE, damage=damage, error=None)
    return run.feed(event, run.ticked)


def damaged(run: Harness) -> list[str]:
    """Return the fragments of the `damaged` records in the log, oldest first."""
    return [op.fragments for op in run.records if isinstance(op, r.Damaged)]


def states(run: Harness) -> dict[int, str]:
    return {c.step: c.state for c in run.machine.history.checkpoints.values()}


def restarted(run: Harness) -> tuple[m.Effect, ...]:
    """Restart the coordinator, and let the group open again."""
    known = len(run.transcript)
    run.start_coordinator()
    run.open("ab")
    run.tick(MAINTENANCE_S)
    return tuple(run.transcript[known:])


def test_damage_is_recorded_until_an_upload_has_replaced_it() -> None:
    run = run_with(10)
    effects = (*read(run, run.attempt(10), 1, SHARD), *read(run, run.attempt(10), 0, SHARD))
    assert damaged(run) == ["1", "0,1"] and run.checkpoint(run.attempt(10)).damaged == "0,1"
    run.drain_all(effects)
    run.tick()
    assert damaged(run) == ["1", "0,1", ""] and run.checkpoint(run.attempt(10)).damaged == ""


def test_what_is_found_again_is_recorded_once() -> None:
    run = run_with(10)
    for _ in range(3):
        read(run, run.attempt(10), 0, SHARD)
    assert damaged(run) == ["0"]


def test_a_restart_keeps_the_older_intact_checkpoint_until_there_is_another() -> None:
    run = run_with(10, 20, keep_last=2)
    bad = run.attempt(20)
    read(run, bad, 0, SHARD)
    run.save(30)  # its upload, and the new one of step 20, take long
    effects = restarted(run)
    scrubs = {(scrub.attempt, scrub.node_index, scrub.place) for scrub in of(effects, m.Scrub)}
    assert scrubs == {(bad, 0, m.REMOTE)}, "what was damaged is read again, and nothing else"
    assert states(run) == {10: "live", 20: "live", 30: "live"}
    read(run, bad, 0)
    run.save(40)
    assert damaged(run) == ["0", ""] and states(run)[10] != "live"


def test_what_is_still_damaged_after_a_restart_is_uploaded_again() -> None:
    run = run_with(10)
    bad = run.attempt(10)
    read(run, bad, 1, SHARD)
    restarted(run)
    effects = (*read(run, bad, 1, SHARD), *run.tick(MAINTENANCE_S))
    assert damaged(run) == ["1"]
    assert {drain.attempt for drain in of(effects, m.Drain)} == {bad}
    run.drain_all(effects)
    run.tick()
    assert damaged(run) == ["1", ""]


def test_damage_found_after_a_restart_adds_to_what_was_not_read_again_yet() -> None:
    run = run_with(10)
    bad = run.attempt(10)
    read(run, bad, 1, SHARD)
    restarted(run)
    read(run, bad, 0, SHARD)
    assert damaged(run) == ["1", "0,1"]


@pytest.mark.parametrize("is_mended", [False, True])
def test_what_may_share_a_damaged_still_file_is_read_after_a_restart_too(is_mended: bool) -> None:
    run = run_with(10, 20, 30, keep_last=9)
    attempts = [run.attempt(step) for step in (10, 20, 30)]
    read(run, attempts[1], 0, STILL)
    restarted(run)
    if is_mended:
        mended = m.ScrubEnded(
            attempt=attempts[1], node_index=0, place=m.REMOTE, damage=(), mended=(STILL,), error=None
        )
        effects = run.feed(mended, run.ticked)
    else:
        effects = read(run, attempts[1], 0, STILL)
    steps = []
    while scrubs := of((*effects, *run.tick(MAINTENANCE_S)), m.Scrub):
        steps += [scrub.attempt.step for scrub in scrubs]
        effects = read(run, scrubs[-1].attempt, 0)
    assert sorted(steps) == [10, 30]


def evict(run: Harness, *steps: int) -> None:
    """Carry out the evictions that are due, which are those of `steps`."""
    evictions = of(run.tick(MAINTENANCE_S), m.Evict)
    for effect in evictions:
        run.disks[effect.node_id].delete(effect.attempt.attempt)
    assert {effect.attempt.step for effect in evictions} == {*steps}


def unsafe(run: Harness) -> set[int]:
    """Return the steps that are or may be damaged on the storage path."""
    context = run.machine._context
    return {context.history.checkpoints[name].step for name in context.holders.unsafe_remote}


def reads(run: Harness, effects: tuple[m.Effect, ...], *bad: int, damage: str = STILL) -> list[int]:
    """Carry out the reads of a fragment that are ordered, which find the steps `bad` damaged."""
    steps: list[int] = []
    while scrubs := of((*effects, *run.tick(MAINTENANCE_S)), m.Scrub):
        scrub = scrubs[-1]
        assert (scrub.node_index, scrub.place) == (0, m.REMOTE)
        steps.append(scrub.attempt.step)
        effects = read(run, scrub.attempt, 0, *([damage] if scrub.attempt.step in bad else []))
    return steps


def test_a_restart_keeps_what_may_share_a_damaged_still_file_until_it_was_read() -> None:
    run = run_with(10, 20, 30, keep_last=4, keep_local=1)
    attempts = {step: run.attempt(step) for step in (10, 20, 30)}
    evict(run, 10, 20)
    read(run, attempts[20], 0, STILL)
    read(run, attempts[10], 0)
    effects = restarted(run)
    for step in (40, 50, 60, 70):  # their uploads take long
        effects = (*effects, *run.save(step))
    assert {drain.like for drain in of(effects, m.Drain)} == {""} and not of(effects, m.Evict)
    assert {states(run)[step] for step in attempts} == {"live"}
    assert reads(run, effects, 20) == [20, 10, 30]
    run.save(80)
    assert {step: states(run)[step] for step in attempts} == {10: "retired", 20: "retired", 30: "live"}


def test_damage_in_a_file_of_its_own_concerns_one_checkpoint_after_a_restart_too() -> None:
    run = run_with(10, 20, 30, keep_last=9, keep_local=1)
    evict(run, 10, 20)
    read(run, run.attempt(20), 0, SHARD)
    for _ in range(2):
        effects = restarted(run)
        assert unsafe(run) == {10, 20, 30}
        assert reads(run, effects, 20, damage=SHARD) == [20]
        assert unsafe(run) == {20}


def test_what_may_share_files_that_were_replaced_is_read_once() -> None:
    """The coordinator may die between the end of an upload and its record."""
    run = run_with(10, 20, 30, keep_last=9)
    read(run, run.attempt(20), 0, STILL)
    assert reads(run, restarted(run)) == [20, 10, 30]
    assert damaged(run) == ["0", ""] and not unsafe(run)
    assert not reads(run, restarted(run))


@pytest.mark.parametrize("is_first", [False, True])
def test_two_damaged_ones_are_read_before_what_may_share_with_them_is_trusted(is_first: bool) -> None:
    run = run_with(10, 20, 30, keep_last=9, keep_local=1)
    evict(run, 10, 20)
    own, still = (run.attempt(step) for step in ((10, 20) if is_first else (20, 10)))
    read(run, own, 0, SHARD)
    read(run, still, 0, STILL)
    restarted(run)
    for attempt in (run.attempt(10), run.attempt(20)):
        assert unsafe(run) == {10, 20, 30}
        read(run, attempt, 0, SHARD if attempt == own else STILL)
    assert unsafe(run) == {10, 20, 30}


def test_an_upload_proves_nothing_about_what_may_share_the_files_before() -> None:
    run = run_with(10, 20, 30, keep_last=9)
    still, own = run.attempt(30), run.attempt(20)
    read(run, still, 0, STILL)
    read(run, own, 0, SHARD)
    restarted(run)
    run.drain_all(run.feed(m.FinishRequested(token="end", ends_group=False), run.ticked))
    assert unsafe(run) == {10, 20}
    read(run, own, 0, SHARD)
    assert unsafe(run) == {10, 20}


def test_of_many_damaged_fragments_all_are_read_again() -> None:
    """The record names the first ones only."""
    nodes = "".join(map(chr, range(0x100, 0x100 + r.MAX_DAMAGED + 2)))
    run = Harness(nodes, inventory_wait_s=0.0, remote_every=1, keep_last=1, replicas=0)
    run.open(nodes)
    run.drain_all(run.save(10))
    bad = run.attempt(10)
    for index in range(len(nodes)):
        read(run, bad, index, SHARD)
    run.start_coordinator()
    run.open(nodes)
    for index in range(r.MAX_DAMAGED):
        read(run, bad, index)
    assert damaged(run)[-1] == f"{r.MAX_DAMAGED},{r.MAX_DAMAGED + 1}"


def test_a_finished_run_is_mended_before_it_is_put_away_also_after_a_restart() -> None:
    run = run_with(10)
    bad = run.attempt(10)
    run.feed(m.FinishRequested(token="end", ends_group=True), run.ticked)
    read(run, bad, 0, SHARD)
    known = len(run.transcript)
    run.start_coordinator()
    run.feed(m.NodesJoined(inventories=run.inventories()))
    for _ in range(10):
        run.tick(MAINTENANCE_S)
    effects = run.transcript[known:]
    assert {drain.attempt for drain in of(effects, m.Drain)} == {bad} and not of(effects, m.PutAway)


def test_nothing_is_recorded_of_a_checkpoint_that_is_retired() -> None:
    run = run_with(10, 20)
    assert states(run)[10] != "live"
    read(run, run.attempt(10), 0, SHARD)
    assert damaged(run) == []


@pytest.mark.parametrize("num_bad", [r.MAX_DAMAGED, r.MAX_DAMAGED + 1])
def test_a_record_names_a_bounded_number_of_fragments(num_bad: int) -> None:
    fragments = ",".join(map(str, range(num_bad)))
    if num_bad <= r.MAX_DAMAGED:
        r.check_op(r.Damaged(attempt="0" * 16, fragments=fragments))
    else:
        with pytest.raises(FormatError, match="the format allows 100"):
            r.check_op(r.Damaged(attempt="0" * 16, fragments=fragments))


@pytest.mark.parametrize("fragments", ["1,", ",1", "01", "-1", "1 2", "a", "1,,2", "9999999999"])
def test_other_texts_are_refused(fragments: str) -> None:
    with pytest.raises(FormatError):
        r.check_op(r.Damaged(attempt="0" * 16, fragments=fragments))
