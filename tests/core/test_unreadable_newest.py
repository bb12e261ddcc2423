"""The newest checkpoint cannot be read: older ones stay, and are uploaded and restored in its place."""

from __future__ import annotations

from typing import Any

import pytest

from ray_ckpt.core import messages as m
from ray_ckpt.core.maintenance import MAINTENANCE_S
from ray_ckpt.core.values import DiskSpace
from ray_ckpt.format.names import shard_file
from ray_ckpt.types import AttemptId, CheckpointInfo, Level
from tests.core.driver import Harness, of, one
from tests.core.test_item_uploads import export

FULL = DiskSpace(free_bytes=50, total_bytes=1000)
GRACE_S = 60.0


def run_on(nodes: str = "ab", group: str = "ab", **options: Any) -> Harness:
    wanted: dict[str, Any] = {"remote_every": 1000, **options}
    run = Harness(nodes, inventory_wait_s=0.0, **wanted)
    run.open(group)
    return run


def run_with_holders() -> Harness:
    """A group on a and b, whose copies are on c and d."""
    run = Harness("abcd", inventory_wait_s=0.0, remote_every=1000, keep_last=2, replica_nodes="role=holder")
    run.feed(m.NodesSeen(live=frozenset("abcd"), replica_nodes=frozenset("cd")))
    run.open("ab")
    assert {node.holders for node in run.plan.nodes} == {("c",), ("d",)}
    return run


def scrubbed(run: Harness, attempt: AttemptId, place: str) -> tuple[m.Effect, ...]:
    """A scrub finds fragment 0 damaged at a place; a node deletes its copy."""
    if place != m.REMOTE:
        run.disks[place].fragments.pop((attempt.attempt, 0), None)
    ended = m.ScrubEnded(attempt=attempt, node_index=0, place=place, damage=(shard_file(0, 2),), error=None)
    return run.feed(ended, run.ticked)


def unreadable(run: Harness, step: int) -> AttemptId:
    """Let all copies of a part of a checkpoint be found damaged."""
    attempt = run.attempt(step)
    for node in run.machine.view.holders_of(attempt.attempt, 0):
        scrubbed(run, attempt, node)
    if run.checkpoint(attempt).level is Level.DURABLE:
        scrubbed(run, attempt, m.REMOTE)
    return attempt


def durable(run: Harness, step: int) -> AttemptId:
    run.save(step)
    attempt = run.attempt(step)
    run.drain_all(run.feed(m.DrainRequested(token=f"upload {step}", attempt=attempt.attempt)))
    assert run.checkpoint(attempt).level is Level.DURABLE
    return attempt


def saved_without_copies(run: Harness, step: int) -> None:
    """Save a step whose copies fail, as the disks of their holders are full."""
    attempt = run.attempt(step)
    copies = [(node.node_id, holder) for node in run.plan.nodes for holder in node.holders]
    effects = run.feed(
        *(run.stored(attempt, node.node_id) for node in run.plan.nodes),
        *(run.copied(attempt, node, holder, error="full") for node, holder in copies),
    )
    for copy in of(effects, m.Replicate):
        where: Any = {"node_index": copy.node_index, "holder": copy.holder, "source": copy.source}
        run.feed(m.ReplicaEnded(attempt=attempt, error="full", **where))
    assert run.checkpoint(attempt).level is Level.LOCAL


def replied(effects: tuple[m.Effect, ...]) -> int:
    """Return the step with which the request to finish was answered."""
    value = one(effects, m.Reply).value
    assert isinstance(value, CheckpointInfo)
    return value.step


def live(run: Harness) -> list[int]:
    return [c.step for c in run.machine.history.live()]


@pytest.mark.parametrize("replicas", [0, 1])
def test_the_last_readable_one_stays_on_full_disks(replicas: int) -> None:
    run = run_on(keep_last=3, replicas=replicas)
    run.save(10)
    run.save(20)
    unreadable(run, 20)
    run.feed(m.NodesSeen(live=frozenset("ab"), disks={"a": FULL, "b": FULL}))
    run.tick(MAINTENANCE_S)
    assert live(run) == [10, 20]
    run.open()
    assert run.plan.resume is not None and run.plan.resume.checkpoint.step == 10


def test_the_last_readable_one_with_copies_stays() -> None:
    run = run_on("abc", keep_last=2)
    run.save(10)
    run.save(20)
    unreadable(run, 20)
    saved_without_copies(run, 30)
    assert live(run) == [10, 20, 30]
    run.lose("b")
    run.open("a")
    assert run.plan.resume is not None and run.plan.resume.checkpoint.step == 10


def test_an_intact_durable_one_that_the_group_has_left_stays_while_the_older_one_is_damaged() -> None:
    run = run_on(keep_last=3, keep_local=1)
    older, left = durable(run, 10), durable(run, 20)
    run.tick(MAINTENANCE_S)
    run.open(resume="step:10")
    scrubbed(run, older, m.REMOTE)
    run.save(30)
    assert run.checkpoint(left).state == "live"
    durable(run, 40)
    assert run.checkpoint(left).state == "retired", "a newer one is intact"


def test_the_newest_items_stay_beside_a_damaged_durable_one() -> None:
    run = run_on(keep_last=2, remote_items=("model",), remote_items_every=2)
    durable(run, 10)
    effects = run.save(20)
    items = run.attempt(20)
    export(run, effects)
    assert run.checkpoint(items).exported
    durable(run, 30)
    unreadable(run, 30)
    for step in (40, 50):
        run.save(step)
    assert run.checkpoint(items).state == "live"


def test_a_finished_run_uploads_the_newest_one_that_can_be_read() -> None:
    run = run_on(keep_last=3, retire_grace_s=GRACE_S)
    durable(run, 10)
    run.save(20)
    readable = run.attempt(20)
    durable(run, 30)
    unreadable(run, 30)
    effects = run.feed(m.FinishRequested(token="end", ends_group=True))
    assert {drain.attempt.step for drain in of(effects, m.Drain)} == {20}
    assert replied(run.drain_all(effects)) == 30
    assert run.checkpoint(readable).level is Level.DURABLE


@pytest.mark.parametrize("has_failed", [True, False])
def test_the_end_of_a_run_uploads_the_one_from_which_the_next_group_would_resume(has_failed: bool) -> None:
    run = run_with_holders()
    run.save(10)
    readable = run.attempt(10)
    saved_without_copies(run, 20)
    run.lose("b")
    effects = run.feed(m.FinishRequested(token="end", ends_group=True, has_failed=has_failed))
    assert {drain.attempt.step for drain in of(effects, m.Drain)} == {10}
    effects = run.drain_all(effects)
    assert run.checkpoint(readable).level is Level.DURABLE
    if has_failed:
        assert replied(effects) == 10
    else:
        assert "Step 20 did not reach the storage path" in str(one(effects, m.Fail).error)


def test_nodes_that_are_needed_while_no_group_is_at_work_hold_what_can_be_restored() -> None:
    run = run_with_holders()
    run.save(10)
    saved_without_copies(run, 20)
    run.lose("b")
    kept = list(dict.fromkeys(c.step for c in run.machine.view._kept_alone()))
    assert kept == [20, 10], "d alone has a part of step 10, and b may come back with its part of step 20"


def test_nodes_that_leave_upload_the_newest_one_that_can_be_read() -> None:
    run = run_on("abc", keep_last=2)
    run.save(10)
    run.save(20)
    unreadable(run, 20)
    left_s = dict.fromkeys("abc", 120.0)
    effects = run.feed(m.NodesSeen(live=frozenset("abc"), draining=frozenset("abc"), left_s=left_s))
    assert {drain.attempt.step for drain in of(effects, m.Drain)} == {10}


@pytest.mark.parametrize("is_first", [True, False])
def test_a_finish_waits_for_an_upload_of_which_a_dead_node_has_made_its_part(is_first: bool) -> None:
    run = run_on(replicas=0)
    durable(run, 10)
    run.save(20)
    attempt = run.attempt(20)
    orders = of(run.feed(m.DrainRequested(token="t", attempt=attempt.attempt)), m.Drain)
    by_node = {order.node_id: order for order in orders}
    run.drained(by_node["b"])
    finish = m.FinishRequested(token="end", ends_group=True, has_failed=True)
    effects = run.feed(finish) if is_first else ()
    effects += run.lose("b")
    effects += () if is_first else run.feed(finish)
    effects += run.tick(1.0)
    assert not of(effects, m.Reply) and not of(effects, m.Fail)
    effects = run.drained(by_node["a"])
    assert of(effects, m.WriteDescription)
    assert replied(run.feed(m.DescriptionWritten(attempt=attempt, error=None))) == 20


@pytest.mark.parametrize("has_failed", [True, False])
def test_a_finish_that_loses_the_newest_one_meanwhile_uploads_an_older_one(has_failed: bool) -> None:
    run = run_with_holders()
    run.save(10)
    older = run.attempt(10)
    saved_without_copies(run, 20)
    finish = m.FinishRequested(token="end", ends_group=True, has_failed=has_failed)
    assert {drain.attempt.step for drain in of(run.feed(finish), m.Drain)} == {20}
    effects = run.lose("b")
    assert not of(effects, m.Reply) and not of(effects, m.Fail)
    effects = run.drain_all(effects)
    assert run.checkpoint(older).level is Level.DURABLE
    assert replied(effects) == 10 if has_failed else of(effects, m.Fail)


def damaged_in_drain(run: Harness, effects: tuple[m.Effect, ...]) -> tuple[m.Effect, ...]:
    """Let the drain of step 20 find the copy of node a damaged, which no scrub has read yet."""
    order = next(each for each in of(effects, m.Drain) if (each.attempt.step, each.node_id) == (20, "a"))
    index = order.node_index
    ended = m.DrainEnded(attempt=order.attempt, node_index=index, node_id="a", error="bad", is_damage=True)
    return run.feed(ended)


@pytest.mark.parametrize("has_failed", [True, False])
def test_a_finish_whose_drain_finds_the_damage_uploads_an_older_one(has_failed: bool) -> None:
    run = run_on(replicas=0, keep_last=5)
    run.save(10)
    older = run.attempt(10)
    run.save(20)
    finish = m.FinishRequested(token="end", ends_group=True, has_failed=has_failed)
    effects = damaged_in_drain(run, run.feed(finish))
    assert not of(effects, m.Reply) and not of(effects, m.Fail)
    assert {drain.attempt.step for drain in of(effects, m.Drain)} == {10}
    effects = run.drain_all(effects)
    assert run.checkpoint(older).level is Level.DURABLE
    assert replied(effects) == 10 if has_failed else of(effects, m.Fail)
    assert not of(effects, m.Drain), "step 20 is not tried again before the answer"


def test_the_end_of_a_launcher_uploads_an_older_one_if_the_drain_finds_damage() -> None:
    run = run_on(replicas=0, keep_last=5)
    run.save(10)
    older = run.attempt(10)
    run.save(20)
    effects: tuple[m.Effect, ...] = ()
    for _ in range(3):
        effects += run.feed(m.OwnerDied(owner="driver"))
        effects += run.tick(10.0)
    effects = damaged_in_drain(run, effects)
    assert {drain.attempt.step for drain in of(effects, m.Drain)} == {10}
    run.drain_all(effects)
    assert run.checkpoint(older).level is Level.DURABLE


def test_nodes_that_leave_upload_an_older_one_if_the_drain_finds_damage() -> None:
    run = run_on(replicas=0, keep_last=5)
    run.save(10)
    run.save(20)
    leaving = m.NodesSeen(live=frozenset("ab"), draining=frozenset("ab"), left_s=dict.fromkeys("ab", 120.0))
    effects = damaged_in_drain(run, run.feed(leaving))
    assert {drain.attempt.step for drain in of(effects, m.Drain)} == {10}
