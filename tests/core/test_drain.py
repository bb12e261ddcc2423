"""Stories of drains that meet a store that is away, damaged copies, full disks, and the end of the run."""

from __future__ import annotations

from typing import Any

import pytest

from ray_ckpt.core import drain as core_drain
from ray_ckpt.core import messages as m
from ray_ckpt.core.drain import DAMAGED_AGAIN_S, MAX_ACTIVE, MAX_QUEUED, MAX_RETRY_S
from ray_ckpt.core.holders import Holders
from ray_ckpt.core.maintenance import MAINTENANCE_S
from ray_ckpt.core.values import DiskSpace
from ray_ckpt.errors import Fenced, RunSuperseded
from ray_ckpt.types import Level
from tests.core.driver import Harness, of, one

HOUR_S = 3600.0
FULL = DiskSpace(free_bytes=50, total_bytes=1000)


def run_on(nodes: str, group: str = "", **options: Any) -> Harness:
    run = Harness(nodes, inventory_wait_s=0.0, **{"remote_every": 1, **options})
    run.open(group or nodes)
    return run


def keep_failing(run: Harness, drains: list[m.Drain], seconds: float, tick_s: float = 1.0) -> list[m.Drain]:
    """Let the store take nothing for `seconds`; return the drains that are ordered in the end."""
    end_s = run.now_s + seconds
    while run.now_s < end_s:
        requested = [
            e for drain in drains for e in of(run.drained(drain, error="the store is away"), m.Drain)
        ]
        drains = [*requested, *of(run.tick(tick_s), m.Drain)]
    return drains


def steps(drains: list[m.Drain]) -> set[int]:
    return {drain.attempt.step for drain in drains}


# -- by request -------------------------------------------------------------------------------------


def test_what_is_not_due_is_drained_on_request() -> None:
    run = run_on("ab", remote_every=100)
    run.save(10)
    assert not of(run.save(20), m.Drain)
    attempt = run.attempt(10)
    reported = run.feed(m.DrainRequested(token="want", attempt=attempt.attempt))
    assert {(d.attempt.step, d.node_index) for d in of(reported, m.Drain)} == {(10, 0), (10, 1)}
    assert one(reported, m.Reply).token == "want"
    for drain in of(reported, m.Drain):
        ended = run.drained(drain)
    run.feed(m.DescriptionWritten(attempt=one(ended, m.WriteDescription).checkpoint.id, error=None))
    assert run.checkpoint(attempt).level is Level.DURABLE
    again = run.feed(m.DrainRequested(token="again", attempt=attempt.attempt))
    assert not of(again, m.Drain) and one(again, m.Reply).token == "again"


def test_what_is_retired_is_not_drained_for_anybody() -> None:
    run = run_on("a", remote_every=100, keep_last=1)
    for step in (10, 20):
        run.save(step)
    assert run.checkpoint(run.attempt(10)).state == "retired"
    reported = run.feed(m.DrainRequested(token="want", attempt=run.attempt(10).attempt))
    assert "is retired" in str(one(reported, m.Fail).error) and not of(reported, m.Drain)


# -- callers that wait -------------------------------------------------------------------------------


def waits(run: Harness, step: int, within_s: float = 60.0) -> m.DrainRequested:
    return m.DrainRequested(token=f"wait-{step}", attempt=run.attempt(step).attempt, within_s=within_s)


def test_a_caller_waits_for_its_own_checkpoint_however_many_are_saved_meanwhile() -> None:
    run = run_on("ab", remote_every=1000, keep_last=3)
    run.save(10)
    drains = of(run.feed(waits(run, 10)), m.Drain)
    assert steps(drains) == {10}
    for step in range(20, 80, 10):  # the upload takes as long as these saves
        assert not of(run.save(step), m.Drain), "the caller does not wait for these"
        assert not of(run.tick(1.0), m.Drain)
    run.feed(run.stored(run.attempt(80), "a"))  # an attempt is always open
    run.drain_all(drains)
    assert one(run.tick(0.5), m.Reply) == m.Reply(token="wait-10", value=run.checkpoint(run.attempt(10)))
    run.save(90)
    assert not of(run.tick(1.0), m.Drain) and not run.machine._drains.attempts


def test_a_caller_waits_until_a_damaged_copy_is_uploaded_again() -> None:
    run = run_on("ab")
    run.drain_all(run.save(10))
    scrub = m.ScrubEnded(
        attempt=run.attempt(10), node_index=0, place=m.REMOTE, damage=("a file",), error=None
    )
    drains = run.feed(scrub)
    assert not of(run.feed(waits(run, 10)), m.Reply)
    run.drain_all(drains)
    assert one(run.tick(0.5), m.Reply).token == "wait-10"


def test_a_caller_is_answered_when_its_time_is_up_and_nothing_is_drained_for_it_any_more() -> None:
    run = run_on("ab", remote_every=1000, keep_last=10)
    run.save(10)
    drains = of(run.feed(waits(run, 10, within_s=60.0)), m.Drain)
    run.tick(59.0)
    assert not of(run.transcript, m.Fail)
    assert "Step 10 is not on the storage path yet" in str(one(run.tick(1.0), m.Fail).error)
    run.drain_all(drains)
    run.save(20)
    assert not of(run.tick(1.0), m.Drain) and not of(run.transcript[-3:], m.Reply)


def test_of_many_callers_the_one_that_has_waited_longest_is_next() -> None:
    run = run_on("ab", remote_every=1, keep_last=50)
    waiting = list(range(10, 150, 10))
    effects: list[m.Effect] = []
    for step in waiting:
        effects += [*run.save(step), *run.feed(waits(run, step, within_s=HOUR_S))]
        assert len(run.machine._drains.attempts) <= MAX_ACTIVE + MAX_QUEUED
    while waiting:
        effects = [*run.drain_all(effects), *run.tick(1.0)]
        answered = [int(reply.token.removeprefix("wait-")) for reply in of(effects, m.Reply)]
        assert answered[:1] == waiting[:1]
        waiting = [step for step in waiting if step not in answered]


def test_a_caller_gets_the_reason_why_its_checkpoint_does_not_become_durable() -> None:
    run = run_on("ab", remote_every=1000, keep_last=1)
    run.save(10)
    run.save(20)
    assert "Step 10 is retired" in str(one(run.feed(waits(run, 10)), m.Fail).error)
    run.feed(waits(run, 20))
    (failed,) = of(run.lose("a", "b"), m.Fail)
    assert failed.token == "wait-20" and "no live node holds all of it" in str(failed.error)


def test_the_end_of_a_run_goes_before_a_caller_that_waits() -> None:
    run = run_on("ab", remote_every=1000)
    run.save(10)
    assert not any(drain.is_urgent for drain in of(run.feed(waits(run, 10)), m.Drain))
    run.save(20)
    drains = of(run.feed(m.FinishRequested(token="finish")), m.Drain)
    assert steps(drains) == {20} and all(drain.is_urgent for drain in drains)
    for drain in drains:
        run.drained(drain, error="503")
    again = [drain for drain in of(run.tick(30.0), m.Drain) if drain.attempt.step == 20]
    assert again and all(drain.is_urgent for drain in again)


def test_a_caller_that_waits_is_answered_when_its_group_ends() -> None:
    run = run_on("ab", remote_every=1000)
    run.save(10)
    drains = of(run.feed(waits(run, 10)), m.Drain)
    run.save(20)
    run.feed(m.FinishRequested(token="finish", ends_group=True))
    run.drain_all(of(run.transcript, m.Drain)[len(drains) :])
    failed = [effect for effect in of(run.tick(1.0), m.Fail) if effect.token == "wait-10"]
    assert isinstance(failed[0].error, RunSuperseded)


@pytest.mark.parametrize("end", ["a newer group", "another coordinator"])
def test_a_caller_that_waits_is_answered_when_its_group_has_lost_the_run(end: str) -> None:
    run = run_on("ab", remote_every=1000)
    run.save(10)
    run.feed(waits(run, 10))
    lost = run.group("ab") if end == "a newer group" else m.OrderRefused(epoch=99)
    failed = [effect for effect in of(run.feed(lost), m.Fail) if effect.token == "wait-10"]
    assert isinstance(failed[0].error, RunSuperseded if end == "a newer group" else Fenced)
    assert not of(run.tick(1.0), m.Fail), "once"


# -- the store is away -------------------------------------------------------------------------------


def test_a_drain_is_tried_for_as_long_as_the_store_is_away() -> None:
    run = run_on("ab")
    drains = of(run.save(10), m.Drain)
    drains = keep_failing(run, drains, 3 * HOUR_S, tick_s=30.0)
    for _ in range(int(MAX_RETRY_S)):
        drains += of(run.tick(1.0), m.Drain)
    assert {d.node_index for d in drains} == {0, 1}
    for drain in drains:
        reported = run.drained(drain)
    run.feed(m.DescriptionWritten(attempt=one(reported, m.WriteDescription).checkpoint.id, error=None))
    assert run.checkpoint(run.attempt(10)).level is Level.DURABLE


def test_the_pauses_between_tries_double_up_to_a_minute() -> None:
    run = run_on("a")
    (drain,) = of(run.save(10), m.Drain)
    pauses = []
    for _ in range(8):
        run.drained(drain, error="away")
        began_s = run.now_s
        while not (again := of(run.tick(1.0), m.Drain)):
            pass
        (drain,) = again
        pauses.append(run.now_s - began_s)
    assert pauses == [2, 4, 8, 16, 32, 60, 60, 60]


def test_a_store_that_fails_for_a_year_breaks_no_arithmetic() -> None:
    assert core_drain._pause_s(10**6) == MAX_RETRY_S


def test_a_store_that_is_away_is_reported_once_per_fragment() -> None:
    run = run_on("ab")
    keep_failing(run, of(run.save(10), m.Drain), HOUR_S, tick_s=10.0)
    assert len(of(run.transcript, m.Warn)) == 2


def test_the_end_of_an_upload_looks_at_no_other_fragment(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 10,000 nodes, each end would otherwise visit 60,000 fragments that are paused or queued."""
    run = run_on("abcdefghij")
    drains = [drain for step in range(1, 7) for drain in of(run.save(step), m.Drain)]
    looked, find = [], Holders.of

    def count(holders: Holders, attempt: str, node_index: int) -> frozenset[str]:
        looked.append(node_index)
        return find(holders, attempt, node_index)

    monkeypatch.setattr(Holders, "of", count)
    for drain in drains:
        run.drained(drain, error="the store is away")
    assert run.machine.view.drains_underway and 0 < len(looked) <= 2 * len(drains)


def test_what_is_under_way_and_waits_is_bounded_and_newer_ones_come_first() -> None:
    run = run_on("ab", keep_last=100)
    tried: list[m.Drain] = []
    for number in range(1, 21):
        tried += of(run.save(10 * number), m.Drain)
    assert steps(tried) == {10, 20}, "MAX_ACTIVE of them"
    assert len(run.machine._drains.attempts) == MAX_ACTIVE + MAX_QUEUED
    for _ in range(40):  # the store is back
        tried += of(run.drain_all(tried[-4:]), m.Drain)
        tried += of(run.tick(MAINTENANCE_S), m.Drain)
    order = list(dict.fromkeys(drain.attempt.step for drain in tried))
    assert order[2:6] == [170, 180, 190, 200], "the others gave way"
    assert {c.level for c in run.machine.history.live()} == {Level.DURABLE}, "and had their turn later"


def test_a_drain_that_is_only_described_leaves_its_turn_to_the_next() -> None:
    run = run_on("a", keep_last=10)
    drains = [drain for step in range(10, 10 * (MAX_ACTIVE + 3), 10) for drain in of(run.save(step), m.Drain)]
    assert steps(drains) == {10, 20}
    effects = run.drained(drains[0])
    assert of(effects, m.WriteDescription) and steps(of(effects, m.Drain)) == {30}
    assert not of(run.tick(1.0), m.Drain)


def test_a_full_disk_waits_a_while_for_a_store_that_is_away() -> None:
    run = run_on("ab", keep_last=1, replicas=0)
    drains = of(run.save(10), m.Drain)
    run.drain_all(of(run.save(20), m.Drain))
    old = run.attempt(10)
    states = []
    for _ in range(4):
        drains = keep_failing(run, drains, MAX_RETRY_S)
        run.feed(m.NodesSeen(live=frozenset("ab"), disks={"a": FULL}))
        run.tick(MAINTENANCE_S)
        states.append(run.checkpoint(old).state == "live")
    assert (states[0], states[-1]) == (True, False)
    assert old.attempt not in run.machine._drains.attempts
    assert not keep_failing(run, drains, 2 * MAX_RETRY_S)


def test_checkpoints_that_fail_for_reasons_of_their_own_let_others_pass() -> None:
    """Two places are all there is; what cannot be described must not keep them while the store is well."""
    run = run_on("ab")
    requested = []
    for step in (10, 20):
        for drain in of(run.save(step), m.Drain):
            requested += of(run.drained(drain), m.WriteDescription)
    assert len(requested) == MAX_ACTIVE
    while run.now_s < HOUR_S:
        for order in requested:
            run.feed(m.DescriptionWritten(attempt=order.checkpoint.id, error="no right to read"))
        requested = of(run.tick(1.0), m.WriteDescription)
    assert {drain.attempt for drain in of(run.save(30), m.Drain)} == {run.attempt(30)}


def test_a_description_that_the_store_does_not_take_is_written_again() -> None:
    run = run_on("ab")
    drains = of(run.save(10), m.Drain)
    run.feed(m.FinishRequested(token="finish"))
    reported = [e for drain in drains for e in run.drained(drain)]
    write = one(reported, m.WriteDescription)
    for pause_s in (2.0, 4.0):
        run.feed(m.DescriptionWritten(attempt=write.checkpoint.id, error="503"))
        early = run.tick(pause_s - 1.0)
        assert not of(early, m.WriteDescription) and not of(early, m.Drain)
        write = one(run.tick(1.0), m.WriteDescription)
    assert not of(run.transcript, m.Fail)
    reported = [*run.feed(m.DescriptionWritten(attempt=write.checkpoint.id, error=None))]
    assert one(reported, m.Reply).token == "finish"


def test_other_bytes_on_the_storage_path_end_the_drain_and_fail_the_finish() -> None:
    run = run_on("ab")
    drains = of(run.save(10), m.Drain)
    run.feed(m.FinishRequested(token="finish"))
    for drain in drains:
        run.drained(drain)
    attempt = run.attempt(10)
    effects = run.feed(m.DescriptionWritten(attempt=attempt, error="other bytes", is_damage=True))
    assert "other bytes" in str(one(effects, m.Fail).error)
    assert run.checkpoint(attempt).level is Level.REPLICATED
    for _ in range(3):
        assert not of(run.tick(MAINTENANCE_S), m.Drain), "not at once"
    again = [*run.tick(DAMAGED_AGAIN_S), *run.tick(MAINTENANCE_S)]
    assert len(of(again, m.Drain)) == 2


# -- holders that fail -------------------------------------------------------------------------------


def test_after_a_failure_the_next_holder_is_tried() -> None:
    run = run_on("abc", replicas=2)
    drain = next(d for d in of(run.save(10), m.Drain) if d.node_index == 1)
    nodes = []
    for _ in range(6):
        nodes.append(drain.node_id)
        run.drained(drain, error="no route")
        drain = one(run.tick(MAX_RETRY_S), m.Drain)
    assert nodes == ["b", "c", "a", "b", "c", "a"]


def test_a_damaged_copy_is_left_for_another_holder_at_once() -> None:
    run = run_on("abc", replicas=2)
    first, *others = of(run.save(10), m.Drain)
    second = one(run.drained(first, error="shard 0 is damaged", is_damage=True), m.Drain)
    third = one(run.drained(second, error="shard 0 is damaged", is_damage=True), m.Drain)
    assert [d.node_id for d in (first, second, third)] == ["a", "c", "b"]
    again = one([*run.drained(third, error="503"), *run.tick(MAX_RETRY_S)], m.Drain)
    assert again == third, "the others are no source"
    run.drain_all([again, *others])
    assert run.checkpoint(run.attempt(10)).level is Level.DURABLE


def test_a_damaged_copy_is_scrubbed_at_once() -> None:
    run = run_on("ab")
    first, _ = of(run.save(10), m.Drain)
    scrub = one(run.drained(first, error="shard 0 is damaged", is_damage=True), m.Scrub)
    assert scrub == m.Scrub(attempt=first.attempt, node_index=first.node_index, place=first.node_id)
    run.feed(
        m.ScrubEnded(attempt=first.attempt, node_index=0, place=first.node_id, damage=("shard",), error=None)
    )
    assert first.node_id not in run.machine.view.holders[first.attempt.attempt].get(0, ())


@pytest.mark.parametrize("is_damage", [True, False])
def test_a_source_whose_copy_fails_because_of_it_is_scrubbed_at_once(is_damage: bool) -> None:
    run = run_on("abc")
    run.save(10)
    saved = run.attempt(10)
    copy = of(run.lose_long_ago("b"), m.Replicate)[0]
    failed = m.ReplicaEnded(
        attempt=saved,
        node_index=copy.node_index,
        holder=copy.holder,
        source=copy.source,
        error="it arrived with other bytes",
        is_damage=is_damage,
    )
    expected = [m.Scrub(attempt=saved, node_index=copy.node_index, place=copy.source)] * is_damage
    assert of(run.feed(failed), m.Scrub) == expected


def test_a_drain_without_an_intact_copy_is_given_up_by_name() -> None:
    run = run_on("ab")
    first, other = of(run.save(10), m.Drain)
    run.feed(m.FinishRequested(token="finish"))
    run.drained(other)
    second = one(run.drained(first, error="slice x of shard 0", is_damage=True), m.Drain)
    effects = run.drained(second, error="slice y of shard 0", is_damage=True)
    assert not of(effects, m.Drain)
    text = one(effects, m.Fail).error.message
    assert "Step 10" in text and "fragment 0 is damaged on every node that has it, a, b" in text
    assert "slice x of shard 0; slice y of shard 0" in text
    assert any(warn.text == text for warn in of(effects, m.Warn))


def test_a_copy_that_is_made_anew_counts_although_the_one_before_was_damaged() -> None:
    run = run_on("ab")
    drains = of(run.save(10), m.Drain)
    (first,) = [drain for drain in drains if drain.node_index == 0]
    second = one(run.drained(first, error="damaged", is_damage=True), m.Drain)
    scrub = one(run.transcript, m.Scrub)
    assert (scrub.node_index, scrub.place) == (0, first.node_id)
    run.feed(m.ScrubEnded(attempt=scrub.attempt, node_index=0, place=scrub.place, damage=("x",), error=None))
    source, holder = second.node_id, first.node_id
    run.feed(m.ReplicaEnded(attempt=scrub.attempt, node_index=0, source=source, holder=holder, error=None))
    run.drained(second, error="the store is away")
    run.lose(second.node_id)
    assert not [w for w in of(run.transcript, m.Warn) if "did not reach" in w.text]
    assert {drain.node_id for drain in of(run.tick(MAX_RETRY_S), m.Drain)} == {first.node_id}


def test_what_was_found_damaged_everywhere_is_drained_again_later_or_when_the_run_ends() -> None:
    run = run_on("a")
    (drain,) = of(run.save(10), m.Drain)
    run.drained(drain, error="damaged", is_damage=True)
    for _ in range(3):
        assert not of(run.tick(MAINTENANCE_S), m.Drain)
    (drain,) = of(run.feed(m.FinishRequested(token="finish")), m.Drain)
    assert one(run.drained(drain, error="damaged", is_damage=True), m.Fail).token == "finish"
    (drain,) = of([*run.tick(DAMAGED_AGAIN_S), *run.tick(MAINTENANCE_S)], m.Drain)
    run.drain_all([drain])
    assert run.checkpoint(run.attempt(10)).level is Level.DURABLE


def test_nodes_that_all_leave_do_not_read_a_damaged_copy_again_and_again() -> None:
    run = run_on("ab", replicas=0, remote_every=1000)
    run.save(10)
    leaving = m.NodesSeen(live=frozenset("ab"), draining=frozenset("ab"), left_s={"a": 600.0, "b": 600.0})
    drains = of(run.feed(leaving), m.Drain)
    assert drains
    for drain in drains:
        assert not of(run.drained(drain, error="damaged", is_damage=True), m.Drain)
    assert not of(run.tick(5.0), m.Drain)
    assert of(run.feed(m.FinishRequested(token="finish")), m.Drain), "except on request"


def test_nodes_that_all_leave_upload_the_newest_first_although_it_waits_behind_others() -> None:
    run = run_on("ab")
    older = [drain for step in (10, 20) for drain in of(run.save(step), m.Drain)]
    assert steps(older) == {10, 20} and not any(drain.is_urgent for drain in older)
    run.feed(m.NodesSeen(live=frozenset("ab"), draining=frozenset("ab"), left_s={"a": 120.0, "b": 120.0}))
    drains = of(run.save(30), m.Drain)
    assert [(d.attempt.step, d.node_index, d.is_urgent) for d in drains] == [(30, 0, True), (30, 1, True)]


def test_the_death_of_the_last_intact_holder_ends_the_drain() -> None:
    run = run_on("ab")
    first, other = of(run.save(10), m.Drain)
    run.drained(other)
    moved = one(run.drained(first, error="damaged", is_damage=True), m.Drain)
    assert moved.node_id == "b"
    effects = run.lose("b")
    assert not of(effects, m.Drain)
    assert any("damaged on every node that has it, a: damaged" in warn.text for warn in of(effects, m.Warn))


# -- the end of the run ------------------------------------------------------------------------------


def test_a_finish_drains_the_last_one_although_its_drain_was_given_up() -> None:
    run = run_on("ab", replicas=0)
    run.save(10)
    part = run.disks["b"]
    run.lose("b")
    assert any("no live node" in warn.text for warn in of(run.transcript, m.Warn))
    run.tick(MAINTENANCE_S)
    assert not run.machine._drains.attempts, "there is nothing to begin with"
    run.live.add("b")
    run.disks["b"] = part
    run.feed(m.NodesSeen(live=frozenset("ab")), m.NodesJoined(inventories={"b": part.inventory()}))
    effects = run.feed(m.FinishRequested(token="finish"))
    assert one(run.drain_all(of(effects, m.Drain)), m.Reply).token == "finish"


def test_the_last_one_goes_first_when_others_are_under_way() -> None:
    run = run_on("ab", keep_last=10, remote_every=1000)
    run.save(10)
    run.machine.options = run.options = type(run.options)(retire_grace_s=0.0, keep_last=10, remote_every=1)
    drains = [*of(run.save(20), m.Drain), *of(run.save(30), m.Drain)]
    keep_failing(run, drains, 5.0)
    assert not of(run.save(40), m.Drain), "two are under way"
    effects = run.feed(m.FinishRequested(token="finish"))
    assert steps(of(effects, m.Drain)) == {40}
    assert one(run.drain_all(of(effects, m.Drain)), m.Reply).token == "finish"


def test_a_run_that_waits_for_one_after_the_other_has_a_bounded_number_of_drains() -> None:
    run = run_on("ab", keep_last=100)
    for number in range(1, 30):
        run.save(10 * number)
        run.feed(m.FinishRequested(token=f"durable-{number}"))
        assert len(run.machine._drains.attempts) <= MAX_ACTIVE + MAX_QUEUED
        assert run.attempt(10 * number).attempt in run.machine._drains.attempts


@pytest.mark.parametrize("seconds", [30.0, 600.0])
def test_the_end_of_the_run_waits_for_a_store_that_is_away(seconds: float) -> None:
    run = run_on("ab", remote_every=1000)
    run.save(10)
    drains = of(run.feed(m.FinishRequested(token="finish")), m.Drain)
    drains = keep_failing(run, drains, seconds)
    assert not of(run.transcript, m.Fail)
    while len(drains) < 2:
        drains += of(run.tick(1.0), m.Drain)
    assert one(run.drain_all(drains), m.Reply).token == "finish"
