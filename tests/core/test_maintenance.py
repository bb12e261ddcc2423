"""Stories of what the run machine does between saves: new copies, room on disks, scrubbing, what is lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from ray_ckpt.core import context, maintenance
from ray_ckpt.core import messages as m
from ray_ckpt.core.maintenance import MAINTENANCE_S, RESTART_S, RESTORE_S
from ray_ckpt.core.repair import LOST_AFTER_S
from ray_ckpt.core.retention import RetentionView
from ray_ckpt.core.scrub import MAX_TRIES
from ray_ckpt.core.values import DiskSpace, RankProgress
from ray_ckpt.format import records as r
from ray_ckpt.types import AttemptId, Level
from tests.core.driver import Harness, of, one, ops

DAY_S = 24 * 3600.0
CHECKPOINT_BYTES = 400  # of a group of two nodes in the driver; a fragment has half of it
ROOMY = DiskSpace(free_bytes=900, total_bytes=1000)
FULL = DiskSpace(free_bytes=50, total_bytes=1000)


def run_on(nodes: str, group: str = "ab", **options: Any) -> Harness:
    run = Harness(nodes, inventory_wait_s=0.0, **options)
    run.open(group)
    return run


def look(run: Harness) -> tuple[m.Effect, ...]:
    """Let the machine decide on maintenance once more."""
    return run.tick(MAINTENANCE_S)


def see(run: Harness, *, draining: str = "", **disks: DiskSpace) -> tuple[m.Effect, ...]:
    """Report the nodes: the live ones, those that leave, and the space of their disks."""
    return run.feed(m.NodesSeen(live=frozenset(run.live), draining=frozenset(draining), disks=disks))


def carry_out(run: Harness, copies: Iterable[m.Replicate]) -> tuple[m.Effect, ...]:
    """Let the copies arrive."""
    effects: list[m.Effect] = []
    for copy in copies:
        held = run.disks[copy.source].fragments[copy.attempt.attempt, copy.node_index]
        run.disks[copy.holder].put(held)
        effects += run.feed(
            m.ReplicaEnded(attempt=copy.attempt, node_index=copy.node_index, holder=copy.holder, error=None)
        )
    return tuple(effects)


def durable(run: Harness, step: int) -> AttemptId:
    """Save a step, with its copies on nodes and on the storage path."""
    run.drain_all(run.save(step))
    attempt = run.attempt(step)
    assert run.checkpoint(attempt).level is Level.DURABLE
    return attempt


def scrubbed(
    run: Harness, scrub: m.Scrub, *, damage: tuple[str, ...] = (), error: str | None = None
) -> tuple[m.Effect, ...]:
    attempt, index, place = scrub.attempt, scrub.node_index, scrub.place
    return run.feed(m.ScrubEnded(attempt=attempt, node_index=index, place=place, damage=damage, error=error))


# -- repair ------------------------------------------------------------------------------------------


def test_an_idle_spare_gets_the_newest_checkpoint_if_it_has_room() -> None:
    run = run_on("abst", spare_nodes="role=spare", low_watermark=0.5)
    run.feed(
        m.NodesSeen(
            live=frozenset(run.live),
            spares=frozenset("bst"),  # b trains
            disks={"s": ROOMY, "t": DiskSpace(free_bytes=500 + CHECKPOINT_BYTES - 1, total_bytes=1000)},
        )
    )
    run.save(10)
    copies = of(look(run), m.Replicate)
    assert {(c.node_index, c.holder) for c in copies} == {(0, "s"), (1, "s")}
    assert run.machine.view.copies_missing == 0
    carry_out(run, copies)
    assert not of(look(run), m.Replicate)
    run.save(20)
    assert {(c.attempt.step, c.holder) for c in of(look(run), m.Replicate)} == {(20, "s")}


def test_copies_are_made_again_once_the_next_group_has_its_state() -> None:
    run = run_on("abcd")
    run.save(10)
    assert not of((*run.lose("b"), *look(run)), m.Replicate), "the group will restart"
    run.feed(run.group("ac"))
    assert not of(look(run), m.Replicate)
    assert run.machine.view.copies_missing == 2
    run.feed(run.restored("a"), run.restored("c"))
    copies = of(look(run), m.Replicate)
    assert {(c.node_index, c.source) for c in copies} == {(0, "a"), (1, "a")}


@pytest.mark.parametrize("has_group", [False, True])
def test_copies_are_made_again_while_a_group_does_not_come_to_train(has_group: bool) -> None:
    run = run_on("abcd")
    run.save(10)
    run.lose("b")
    found: list[m.Replicate] = []
    for _ in range(int(RESTORE_S if has_group else RESTART_S) - 1):
        if has_group:  # each fails soon
            run.feed(run.group("ac"))
        found += of(look(run), m.Replicate)
    assert not found
    if has_group:
        run.feed(run.group("ac"))
    assert {c.node_index for c in of((*look(run), *look(run)), m.Replicate)} == {0, 1}


def test_a_new_coordinator_lets_the_group_restore_first() -> None:
    run = run_on("abcd")
    run.save(10)
    run.live.discard("b")
    run.start_coordinator()
    run.feed(run.group("ac"))
    assert not of(look(run), m.Replicate)
    run.feed(run.restored("a"), run.restored("c"))
    assert {c.node_index for c in of(look(run), m.Replicate)} == {0, 1}


def test_a_series_of_losses_does_not_keep_repair_from_beginning() -> None:
    run = run_on("abcdefgh")
    run.save(10)
    run.lose("b")
    for node in "fgh":  # each while the group restores
        run.feed(run.group("ac"))
        for _ in range(int(RESTORE_S / 3) - 1):
            assert not of(look(run), m.Replicate)
        run.lose(node)
    effects = [effect for _ in range(5) for effect in look(run)]
    assert {copy.node_index for copy in of(effects, m.Replicate)} == {0, 1}


def test_a_loss_after_the_group_has_trained_with_all_its_nodes_counts_anew() -> None:
    run = run_on("abcd")
    run.save(10)
    run.lose("b")
    run.open("ac")
    carry_out(run, of(look(run), m.Replicate))
    run.save(20)
    run.tick(RESTORE_S)
    assert not of((*run.lose("c"), *look(run)), m.Replicate)
    run.open("ad")
    assert of(look(run), m.Replicate)


def test_what_a_node_takes_along_when_it_leaves_is_copied_while_the_group_restores() -> None:
    run = run_on("abcd")
    run.save(10)
    run.lose("b")
    run.feed(run.group("ac"))
    effects = (*see(run, draining="a"), *look(run))
    assert {(c.node_index, c.source) for c in of(effects, m.Replicate)} == {(0, "a"), (1, "a")}


def test_copies_of_labelled_nodes_are_made_again_on_labelled_nodes() -> None:
    run = Harness("abstu", inventory_wait_s=0.0, replica_nodes="role=store")

    def lose(nodes: str) -> tuple[m.Effect, ...]:
        run.live -= set(nodes)
        labelled = frozenset("stu").intersection(run.live)
        return run.feed(m.NodesSeen(live=frozenset(run.live), replica_nodes=labelled))

    lose("")
    run.open("ab")
    run.save(10)
    assert not of(look(run), m.Replicate)
    assert run.machine.plan is not None
    held = {node.holders for node in run.machine.plan.nodes}
    assert held == {("s",), ("t",)}
    copies = of((*lose("s"), *look(run)), m.Replicate)
    assert {(c.source, c.holder) for c in copies} == {("a", "u")}, "b is free, but has no label"
    carry_out(run, copies)
    look(run)
    assert run.machine.view.copies_missing == 0
    lose("tu")
    look(run)
    assert run.machine.view.copies_missing == 0, "no node may hold one"


def test_what_a_dead_node_held_is_copied_to_another() -> None:
    run = run_on("abc")
    run.save(10)
    attempt = run.attempt(10)
    copies = of(run.lose_long_ago("b"), m.Replicate)
    assert {(c.node_index, c.source, c.holder) for c in copies} == {(0, "a", "c"), (1, "a", "c")}
    assert run.machine.view.copies_missing == 2
    carry_out(run, copies)
    look(run)
    assert run.machine.view.copies_missing == 0
    assert run.machine.view.holders[attempt.attempt] == {0: ("a", "c"), 1: ("a", "c")}
    assert not of(look(run), m.Replicate)


def test_copies_that_could_not_be_made_at_the_commit_raise_its_level_later() -> None:
    run = run_on("ab", goal_timeout_s=5.0)
    attempt = run.attempt(10)
    run.feed(run.stored(attempt, "a"), run.stored(attempt, "b"))
    run.feed(*(run.copied(attempt, s, h, error="refused") for s, h in (("a", "b"), ("b", "a"))))
    assert run.checkpoint(attempt).level is Level.LOCAL
    effects = carry_out(run, of(look(run), m.Replicate))
    assert ops(effects) == [r.Promote(attempt=attempt.attempt, level=Level.REPLICATED, replicas=1)]
    assert {p.level for p in of(effects, m.NotifyOutcome)} == {Level.REPLICATED}


def test_repair_keeps_to_its_budget() -> None:
    run = run_on("abc", repair_bytes_per_s=CHECKPOINT_BYTES // 4)
    run.save(10)
    assert len(of(run.lose_long_ago("b"), m.Replicate)) == 1, "one fragment is more than a second's worth"
    assert not of(look(run), m.Replicate)
    assert len(of(look(run), m.Replicate)) == 1


def test_a_copy_whose_holder_dies_goes_to_another_node_at_once() -> None:
    run = run_on("abcd")
    run.save(10)
    first = {c.node_index: c.holder for c in of(run.lose_long_ago("b"), m.Replicate)}
    assert set(first.values()) == {"c", "d"}
    again = of(run.lose_long_ago("c"), m.Replicate)
    assert [(c.node_index, c.holder) for c in again] == [(i, "d") for i, node in first.items() if node == "c"]


def test_what_only_a_leaving_node_holds_moves_first() -> None:
    run = run_on("abc", replicas=0, repair_bytes_per_s=CHECKPOINT_BYTES // 4)
    run.save(10)
    run.save(20)
    assert not of(look(run), m.Replicate)
    copies = of(see(run, draining="b"), m.Replicate)  # at once: they wait for no budget
    assert [(c.attempt.step, c.node_index, c.source) for c in copies] == [(20, 1, "b"), (10, 1, "b")]
    assert all(copy.holder in "ac" for copy in copies)


@pytest.mark.parametrize("replicas", [0, 1])
def test_what_a_leaving_node_holds_is_not_uploaded_if_others_get_copies(replicas: int) -> None:
    run = run_on("abc", "abc", replicas=replicas, remote_every=1000)
    run.save(10)
    copies = of(see(run, draining="a"), m.Replicate)
    effects = [*carry_out(run, copies), *look(run), *run.save(20), *look(run)]
    assert copies and not of([*run.transcript, *effects], m.Drain)


def test_what_only_leaving_nodes_hold_is_uploaded_once_a_copy_has_failed() -> None:
    run = run_on("abc", "abc", replicas=0, remote_every=1000)
    run.save(10)
    (copy,) = of(see(run, draining="a"), m.Replicate)
    failed = m.ReplicaEnded(
        attempt=copy.attempt, node_index=0, source="a", holder=copy.holder, error="the disk is full"
    )
    assert {drain.attempt.step for drain in of((*run.feed(failed), *look(run)), m.Drain)} == {10}


def test_the_newest_is_uploaded_beside_the_copies_if_no_node_of_the_group_stays() -> None:
    """The node that stays may have no room for them."""
    run = run_on("abh", remote_every=1000)
    run.save(10)
    effects = see(run, draining="ab")
    assert {copy.holder for copy in of(effects, m.Replicate)} == {"h"}
    assert {drain.attempt.step for drain in of(effects, m.Drain)} == {10}


def test_without_a_group_nothing_is_repaired() -> None:
    run = run_on("abc")
    run.save(10)
    finishing = run.feed(m.FinishRequested(token="end", ends_group=True))
    run.drain_all(finishing)
    assert run.machine.plan is None
    assert not of([*run.lose("b"), *look(run)], m.Replicate)


def test_a_copy_of_what_was_retired_meanwhile_is_removed() -> None:
    run = run_on("abc", keep_last=1)
    run.save(10)
    old = run.attempt(10)
    copies = [c for c in of(run.lose_long_ago("b"), m.Replicate) if c.attempt == old]
    run.live.add("b")
    see(run)
    run.open("ab")
    run.save(20)
    assert run.checkpoint(old).state in ("retired", "collected")
    (reported,) = of(carry_out(run, copies[:1]), m.NotifyOutcome)
    assert (reported.attempt, reported.nodes) == (old, ("c",)) and reported.error is not None


# -- room --------------------------------------------------------------------------------------------


def test_only_durable_checkpoints_leave_the_nodes_and_never_the_newest() -> None:
    run = run_on("ab", remote_every=1, keep_local=1, keep_last=3)
    old, new = durable(run, 10), durable(run, 20)
    evicted = of(look(run), m.Evict)
    assert {(e.attempt, e.node_id) for e in evicted} == {(old, "a"), (old, "b")}
    assert run.machine.view.holders[new.attempt] == {0: ("a", "b"), 1: ("a", "b")}
    assert not any(run.machine.view.holders[old.attempt].values())
    again = look(run)
    assert not of(again, m.Evict) and not of(again, m.Replicate), "nor are they made again"
    assert run.checkpoint(old).state == "live"


def test_files_of_a_copy_that_failed_go_with_the_copies() -> None:
    run = run_on("abc", remote_every=1, keep_local=1, keep_last=3)
    old = run.attempt(10)
    run.feed(run.stored(old, "a"), run.stored(old, "b"), run.copied(old, "a", "b"))
    (copy,) = of(run.feed(run.copied(old, "b", "a", error="full")), m.Replicate)
    assert copy.holder == "c"
    run.drain_all(run.feed(run.copied(old, "b", "c", error="full")))
    durable(run, 20)
    assert {(e.attempt, e.node_id) for e in of(look(run), m.Evict)} == {(old, node) for node in "abc"}
    assert not of(look(run), m.Evict)


def test_what_an_eviction_has_left_goes_after_the_next_inventory() -> None:
    run = run_on("ab", remote_every=1, keep_local=1, keep_last=3)
    old, new = durable(run, 10), durable(run, 20)
    assert len(of(look(run), m.Evict)) == 2
    run.disks["a"].delete(old.attempt)
    for copy in ((old.attempt, 0), (old.attempt, 1), (new.attempt, 0)):  # their folders stay
        del run.disks["b"].fragments[copy]
    run.open("ab")
    assert [(e.attempt, e.node_id) for e in of(look(run), m.Evict)] == [(old, "b")]
    assert not of(look(run), m.Evict)


def test_what_is_left_of_a_damaged_copy_is_deleted_with_its_checkpoint() -> None:
    run = Harness("abcd", inventory_wait_s=0.0, keep_last=1, replica_nodes="role=store")
    run.feed(m.NodesSeen(live=frozenset("abcd"), replica_nodes=frozenset("cd")))
    run.open("ab")
    run.save(10)
    old = run.attempt(10)
    scrubbed(run, m.Scrub(attempt=old, node_index=0, place="c"), damage=("shard",))
    assert "c" not in run.machine.view.holders[old.attempt][0]
    effects = run.save(20)
    assert {d.place for d in of(effects, m.Delete) if d.attempt == old.attempt} == {*"abcd", m.REMOTE}


def test_what_is_below_durable_stays_on_the_nodes() -> None:
    run = run_on("ab", remote_every=100, keep_local=1, keep_last=3)
    for step in (10, 20, 30):
        run.save(step)
    see(run, a=FULL, b=FULL)
    assert not of(look(run), m.Evict)


def test_what_a_group_restores_stays_on_the_nodes() -> None:
    run = run_on("ab", remote_every=1, keep_local=1, keep_last=3)
    old = durable(run, 10)
    new = durable(run, 20)
    run.feed(run.group("ab"))
    run.feed(run.restored("a"), run.restored("b", damage=["x"]))
    assert run.plan.resume is not None and run.plan.resume.checkpoint.id == old
    assert old not in {e.attempt for e in of(look(run), m.Evict)}
    run.feed(run.restored("a"), run.restored("b"))
    assert run.checkpoint(new).state == "live"


def test_what_is_being_drained_stays_on_the_nodes() -> None:
    run = run_on("ab", remote_every=1, keep_local=1, keep_last=3)
    old = durable(run, 10)
    drains = scrubbed(run, m.Scrub(attempt=old, node_index=0, place=m.REMOTE), damage=("shard",))
    durable(run, 20)
    assert not of(look(run), m.Evict)
    run.drain_all(drains)
    assert {e.attempt for e in of(look(run), m.Evict)} == {old}


def test_a_full_disk_gives_up_the_copies_of_older_durable_checkpoints() -> None:
    run = run_on("ab", remote_every=1, keep_local=3)
    steps = [durable(run, step) for step in (10, 20, 30)]
    assert not of(look(run), m.Evict)
    see(run, a=FULL, b=ROOMY)
    assert {(e.attempt, e.node_id) for e in of(look(run), m.Evict)} <= {(steps[0], "a"), (steps[1], "a")}
    assert not any("a" in nodes for nodes in run.machine.view.holders[steps[0].attempt].values())
    assert run.machine.view.holders[steps[0].attempt][1] == ("b",)


def test_a_full_disk_of_a_run_without_checkpoints_evicts_nothing() -> None:
    run = run_on("ab")
    see(run, a=FULL)
    assert not of(look(run), m.Evict)


def test_a_disk_is_acted_on_once_per_reading() -> None:
    run = run_on("ab", remote_every=1, keep_local=3, high_watermark=0.9, low_watermark=0.89)
    for step in (10, 20, 30):
        durable(run, step)
    see(run, a=FULL)
    assert len(of(look(run), m.Evict)) == 1
    assert not of([*look(run), *look(run)], m.Evict), "the next reading will show what it was good for"
    see(run, a=FULL)
    assert len(of(look(run), m.Evict)) == 1


@pytest.mark.parametrize(("linked", "num_evicted"), [(0, 1), (0.8, 2), (1, 0)])
def test_a_full_disk_counts_what_checkpoints_share_as_kept(linked: float, num_evicted: int) -> None:
    run = run_on("ab", remote_every=1, keep_local=3, high_watermark=0.9, low_watermark=0.895)
    durable(run, 10)
    size_bytes = run.machine.history.live()[0].size_bytes // 2  # on each of two nodes
    run.linked_bytes = int(linked * size_bytes)
    for step in (20, 30):
        durable(run, step)
    total = 100 * size_bytes
    see(run, a=DiskSpace(free_bytes=total * 9 // 100, total_bytes=total), b=ROOMY)
    assert len(of(look(run), m.Evict)) == num_evicted


def test_a_full_disk_without_durable_copies_makes_checkpoints_go_but_never_the_newest_of_a_level() -> None:
    run = run_on("abc", remote_every=100, keep_last=5)
    for step in (10, 20, 30):
        run.save(step)
    local = run.attempt(40)
    run.feed(run.stored(local, "a"), run.stored(local, "b"))
    run.feed(*(run.copied(local, s, h, error="full") for s, h in (("a", "b"), ("b", "a"))))
    run.feed(*(run.copied(local, s, "c", error="full") for s in "ab"))
    kept = {c.level: c.step for c in run.machine.history.lineage()}
    assert kept == {Level.REPLICATED: 30, Level.LOCAL: 40}
    see(run, a=FULL, b=FULL)
    effects = look(run)
    assert [c.step for c in run.machine.history.live()] == [30, 40]
    assert {d.place for d in of(effects, m.Delete)} <= {"a", "b", "c", m.REMOTE}


def test_a_full_disk_stays_full_until_it_is_read_again_whatever_is_read_of_others() -> None:
    """Each reading covers some nodes only in a large cluster."""
    run = run_on("abc", "abc", remote_every=100, keep_last=2)
    run.save(10)
    see(run, c=FULL)
    look(run)
    see(run, b=ROOMY)
    look(run)
    run.save(20)
    assert [c.step for c in run.machine.history.live()] == [20]
    run.lose("c")
    look(run)
    run.open("ab")
    run.save(30)
    assert [c.step for c in run.machine.history.live()] == [20, 30]


def test_a_disk_that_others_fill_gives_up_no_checkpoint_of_a_run_without_files_there() -> None:
    run = run_on("abc", remote_every=100, keep_last=3)
    for step in (10, 20, 30):
        run.save(step)
    assert not run.disks["c"].folders
    see(run, a=ROOMY, b=ROOMY, c=FULL)
    look(run)
    run.save(40)
    assert [c.step for c in run.machine.history.live()] == [20, 30, 40]


def test_a_full_disk_gives_up_only_checkpoints_that_it_holds() -> None:
    run = run_on("abc", "ab", remote_every=100, keep_last=5)
    for step in (10, 20):
        run.save(step)
    run.open("bc")
    for step in (30, 40):
        run.save(step)
    see(run, c=FULL)
    look(run)
    assert [c.step for c in run.machine.history.live()] == [10, 20, 40]


def test_readings_that_arrive_one_after_the_other_all_count() -> None:
    run = run_on("ab", remote_every=1, keep_local=3)
    for step in (10, 20, 30):
        durable(run, step)
    look(run)
    see(run, a=FULL)
    see(run, b=FULL)
    assert {e.node_id for e in of(look(run), m.Evict)} == {"a", "b"}


def test_room_on_a_disk_ends_the_pressure() -> None:
    run = run_on("ab", remote_every=100, keep_last=2)
    run.save(10)
    see(run, a=FULL)
    look(run)
    see(run, a=ROOMY)
    look(run)
    run.save(20)
    run.save(30)
    look(run)
    assert [c.step for c in run.machine.history.live()] == [20, 30]


def test_many_live_checkpoints_are_visited_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_on("abc", keep_last=3)
    for step in (10, 20, 30):
        run.save(step)
    monkeypatch.setattr(context, "LIVE_VISITED_PER_S", 1)
    visits: list[int] = []

    def choose_evictions(view: RetentionView, *, keep_local: int) -> tuple[str, ...]:
        visits.append(len(view.live))
        return ()

    monkeypatch.setattr(maintenance, "choose_evictions", choose_evictions)
    for _ in range(9):
        look(run)
    assert visits == [3, 3, 3]
    run.lose("c")
    assert visits == [3, 3, 3, 3], "the loss of a node is no reason to wait"


# -- scrub -------------------------------------------------------------------------------------------


def scrubbing() -> Harness:
    """Return a run with step 10 on two nodes of three."""
    run = run_on("abc", scrub_bytes_per_s=10_000, scrub_every_s=DAY_S)
    run.save(10)
    return run


def test_scrub_warns_once_that_the_copies_which_are_due_take_longer_than_the_period() -> None:
    run = run_on("abc", scrub_bytes_per_s=1, scrub_every_s=500.0)  # four copies of 200 bytes
    run.save(10)
    assert not [warning for warning in of(run.tick(499.0), m.Warn) if "scrub_every_s" in warning.text]
    effects = (*run.tick(2.0), *look(run), *look(run))
    (warning,) = [warning for warning in of(effects, m.Warn) if "scrub_every_s" in warning.text]
    assert "within scrub_every_s, 500 s" in warning.text


def walk(run: Harness, *, bad: str = "") -> list[m.Effect]:
    """Read every copy a day later, when the machine orders it; fragment 0 on `bad` is damaged."""
    effects, num_read = list(run.tick(DAY_S)), 0
    while len(scrubs := of(effects, m.Scrub)) > num_read:
        scrub, num_read = scrubs[num_read], num_read + 1
        damage = ("shard",) if (scrub.node_index, scrub.place) == (0, bad) else ()
        effects += [*scrubbed(run, scrub, damage=damage), *look(run)]
    return effects


def test_a_round_over_every_copy_is_recorded() -> None:
    run = scrubbing()
    attempt = run.attempt(10)
    effects = walk(run)
    read = [(s.node_index, s.place) for s in of(effects, m.Scrub)]
    assert sorted(read) == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    assert [op for op in run.records if isinstance(op, r.Verified)] == [r.Verified(attempt=attempt.attempt)]
    assert run.checkpoint(attempt).verified_at_s is not None
    assert not of(look(run), m.Scrub), "not again before it is due"


def test_a_copy_that_cannot_be_read_is_named_once_in_a_round() -> None:
    run = scrubbing()
    effects, num_read, num_failed = list(run.tick(DAY_S)), 0, 0
    while len(scrubs := of(effects, m.Scrub)) > num_read:
        scrub, num_read = scrubs[num_read], num_read + 1
        fails = (scrub.node_index, scrub.place) == (0, "a")
        num_failed += fails
        error = "read-only file system" if fails else None
        effects += [*scrubbed(run, scrub, error=error), *look(run)]
    assert num_failed == MAX_TRIES
    warning = one(effects, m.Warn)
    assert warning.text == "Step 10: the copy on node a cannot be read: read-only file system"
    assert not [op for op in run.records if isinstance(op, r.Verified)]


def test_a_damaged_copy_is_made_again_and_the_next_round_is_good() -> None:
    run = scrubbing()
    attempt = run.attempt(10)
    effects = walk(run, bad="b")
    assert any("damaged" in warn.text for warn in of(effects, m.Warn))
    assert "b" not in run.machine.view.holders[attempt.attempt][0]
    copy = one(effects, m.Replicate)
    assert (copy.node_index, copy.source) == (0, "a")
    assert run.checkpoint(attempt).verified_at_s is None
    carry_out(run, [copy])
    assert len(run.machine.view.holders[attempt.attempt][0]) == 2
    walk(run)
    assert run.checkpoint(attempt).verified_at_s is not None


def test_damage_to_a_file_that_checkpoints_share_concerns_each_of_them() -> None:
    run = run_on("ab")
    for step in (10, 20):
        run.save(step)
    first, second = run.attempt(10), run.attempt(20)
    effects = run.feed(
        m.ScrubEnded(
            attempt=second, node_index=0, place="b", damage=("shard",), shared=((first, 0),), error=None
        )
    )
    assert [f"Step {step}: the copy on node b is damaged: shard." for step in (20, 10)] == [
        warning.text for warning in of(effects, m.Warn)
    ]
    for attempt in (first, second):
        assert run.machine.view.holders[attempt.attempt][0] == ("a",)


def test_a_save_that_lost_a_shared_file_before_its_report_came_is_no_checkpoint() -> None:
    """The save has linked damaged bytes, which a scrub of an earlier checkpoint then takes from both."""
    run = run_on("ab", replicas=0)
    run.save(10)
    first, second = run.attempt(10), run.attempt(20)
    shared = ((second, 0),)
    run.feed(
        m.ScrubEnded(attempt=first, node_index=0, place="a", damage=("shard",), shared=shared, error=None)
    )
    effects = run.feed(*(run.stored(second, node) for node in "ab"))
    assert not [op for op in ops(effects) if isinstance(op, r.Commit)]
    outcome = one(effects, m.NotifyOutcome)
    assert outcome.error is not None and "a part of it is on no live node" in outcome.error.message


def test_a_copy_that_lost_a_shared_file_counts_again_when_it_is_made_anew() -> None:
    run = run_on("ab")
    run.save(10)
    first, second = run.attempt(10), run.attempt(20)
    shared = ((second, 0),)
    run.feed(
        m.ScrubEnded(attempt=first, node_index=0, place="b", damage=("shard",), shared=shared, error=None)
    )
    run.save(20)  # its reports come after the scrub
    assert run.machine.view.holders[second.attempt][0] == ("a",)
    assert run.checkpoint(second).level is Level.LOCAL
    carry_out(run, of(run.tick(MAINTENANCE_S), m.Replicate))
    assert run.machine.view.holders[second.attempt][0] == ("a", "b")


def test_a_drain_names_a_durable_checkpoint_once_and_not_after_damage() -> None:
    run = run_on("ab", remote_every=1)
    first = durable(run, 10)
    drains = of(run.save(20), m.Drain)
    assert {drain.like for drain in drains} == {first.directory}
    again = [
        drain
        for effects in (run.drained(drain, error="no network") for drain in drains)
        for drain in of((*effects, *run.tick(600.0)), m.Drain)
    ]
    assert again and {drain.like for drain in again} == {""}


def test_a_damaged_copy_is_not_counted_on() -> None:
    run = run_on("ab")
    run.save(10)
    run.save(20)
    progress(run, 25, 20)
    assert exposed(run)["a"] == (20, "peer", 5)
    scrubbed(run, m.Scrub(attempt=run.attempt(20), node_index=0, place="b"), damage=("shard",))
    assert exposed(run) == {"a": (10, "peer", 15), "b": (20, "peer", 5)}


def test_a_damaged_copy_on_the_storage_path_is_drained_again_and_promoted_once() -> None:
    run = run_on("ab", remote_every=1)
    attempt = durable(run, 10)
    effects = scrubbed(run, m.Scrub(attempt=attempt, node_index=0, place=m.REMOTE), damage=("shard",))
    assert {d.node_index for d in of(effects, m.Drain)} == {0, 1}
    reported = run.drain_all(effects)
    assert one(reported, m.WriteDescription).checkpoint.id == attempt
    assert len([op for op in run.records if isinstance(op, r.Promote)]) == 1
    assert len(run.machine.view.holders[attempt.attempt][0]) == 2, "the nodes' copies are as good as before"


@pytest.mark.parametrize("state", ["retired", "unknown"])
def test_damage_of_what_is_not_live_starts_no_drain(state: str) -> None:
    run = run_on("ab", remote_every=1, keep_last=1)
    attempt = durable(run, 10)
    durable(run, 20)
    assert run.checkpoint(attempt).state != "live"
    if state == "unknown":
        attempt = run.attempt(99)
    scrub = m.Scrub(attempt=attempt, node_index=0, place=m.REMOTE)
    assert not of(scrubbed(run, scrub, damage=("shard",)), m.Drain)


# -- lost --------------------------------------------------------------------------------------------


def without_a_source() -> tuple[Harness, AttemptId]:
    """Step 10 was on a and b only, and b is gone; a group trains on."""
    run = run_on("abc", replicas=0)
    run.save(10)
    attempt = run.attempt(10)
    run.lose("b")
    run.open("ac", resume="never")
    return run, attempt


def test_what_no_node_holds_any_more_is_recorded_as_lost_after_a_day() -> None:
    run = run_on("abc", replicas=0, keep_last=5)
    run.save(10)
    run.open("ac")
    run.save(20)
    old = next(c.id for c in run.machine.history.lineage() if c.step == 10)
    run.lose("b")
    look(run)
    assert not ops(run.tick(LOST_AFTER_S - 2 * MAINTENANCE_S))
    assert [type(op) for op in ops(look(run))] == [r.Lost]
    assert run.checkpoint(old).state == "lost"
    assert [c.step for c in run.machine.history.live()] == [20]


def test_a_lost_checkpoint_is_deleted_from_the_storage_path_when_a_newer_one_is_there() -> None:
    run = run_on("ab", remote_every=1, keep_last=1, keep_every=10, keep_local=1)
    lost = durable(run, 10)
    durable(run, 19)
    assert {e.attempt for e in of(look(run), m.Evict)} == {lost}
    scrubbed(run, m.Scrub(attempt=lost, node_index=0, place=m.REMOTE), damage=("x",))
    look(run)
    run.tick(LOST_AFTER_S)
    assert run.checkpoint(lost).state == "lost"
    run.save(20)
    assert run.checkpoint(lost).state == "retired"
    assert m.REMOTE in {d.place for d in of(run.transcript, m.Delete) if d.attempt == lost.attempt}


def test_a_lost_checkpoint_stays_when_the_newer_one_is_retired_with_it() -> None:
    """The newer one is being uploaded when the group goes back to an older one."""
    run = run_on("a", "a", replicas=0, keep_last=3)
    for step in (10, 20, 30):
        run.save(step)
    oldest, lost, newer = map(run.attempt, (10, 20, 30))
    run.drain_all(run.feed(m.DrainRequested(token="first", attempt=oldest.attempt)))
    scrubbed(run, m.Scrub(attempt=lost, node_index=0, place="a"), damage=("x",))
    look(run)
    run.tick(LOST_AFTER_S)
    assert run.checkpoint(lost).state == "lost"
    upload = run.feed(m.DrainRequested(token="newer", attempt=newer.attempt))
    run.open("a", resume="step:10")
    assert run.checkpoint(newer).state == "live", "it is being read"
    run.drain_all(upload)
    assert run.checkpoint(newer).state != "live" and run.checkpoint(oldest).state == "live"
    assert run.checkpoint(lost).state == "lost", "nothing newer is on the storage path"


def test_nothing_is_called_lost_while_it_may_be_the_last_hope() -> None:
    run, attempt = without_a_source()
    for _ in range(3):
        assert not [op for op in ops(run.tick(2 * LOST_AFTER_S)) if isinstance(op, r.Lost)]
    assert run.checkpoint(attempt).state == "live"


# -- queries of the machine -------------------------------------------------------------------------


def exposed(run: Harness) -> dict[str, tuple[int | None, str | None, int]]:
    return {e.node_id: (e.step, e.tier, e.steps_at_risk) for e in run.machine.view.exposure()}


def progress(run: Harness, step: int, saved_step: int) -> None:
    ranks = {k: RankProgress(step=step, saved_step=saved_step) for k in (0, 1)}
    run.feed(m.RanksProgressed(session_key=run.plan.session_key, ranks=ranks))


def test_exposure_shows_what_each_death_would_cost() -> None:
    run = run_on("abc", remote_every=100)
    progress(run, 5, -1)
    assert exposed(run) == {"a": (None, None, 5), "b": (None, None, 5)}
    run.save(10)
    progress(run, 15, 10)
    assert exposed(run) == {"a": (10, "peer", 5), "b": (10, "peer", 5)}
    run.lose_long_ago("b")
    assert exposed(run)["a"] == (None, None, 15), "until the new copies are there"
    carry_out(run, of(run.transcript, m.Replicate))
    assert exposed(run)["a"] == (10, "peer", 5)


def test_exposure_of_what_only_the_storage_path_would_have() -> None:
    run = run_on("ab", replicas=0, remote_every=1)
    durable(run, 10)
    run.store_mode = "held"
    progress(run, 12, 10)
    assert exposed(run) == {"a": (10, "remote", 2), "b": (10, "remote", 2)}


def test_without_a_group_nothing_is_exposed_and_no_node_needed() -> None:
    run = Harness("ab")
    assert run.machine.view.exposure() == ()
    assert run.machine.view.needed_nodes() == frozenset()


def test_needed_are_the_group_its_holders_and_who_holds_what_is_not_durable() -> None:
    run = run_on("abcd", remote_every=1)
    assert run.machine.view.needed_nodes() == frozenset("ab")
    effects = run.save(10)
    run.feed(run.group("cd"))
    run.feed(run.restored("c"), run.restored("d"))
    assert run.machine.view.needed_nodes() == frozenset("abcd")
    run.drain_all(effects)
    assert run.machine.view.needed_nodes() == frozenset("cd")


@pytest.mark.parametrize("label", ["replica_nodes", "spare_nodes"])
def test_nodes_with_a_label_for_copies_are_needed_while_a_group_is_at_work(label: str) -> None:
    options: dict[str, Any] = {label: "role=storage"}
    run = Harness("ast", inventory_wait_s=0.0, **options)
    facts: dict[str, Any] = {label.replace("spare_node", "spare"): frozenset("stu")}
    run.feed(m.NodesSeen(live=frozenset("ast"), **facts))
    assert run.machine.view.needed_nodes() == frozenset()
    run.open("a")
    assert run.machine.view.needed_nodes() == frozenset("ast"), "the agent of u has not opened the run"
    for _ in range(2):  # the first one ends the session, the second one its group
        run.feed(m.OwnerDied(owner=run.plan.owner))
    assert run.machine.view.needed_nodes() == frozenset()


def test_idle_holders_of_a_small_group_are_needed() -> None:
    run = run_on("abc", group="a", replicas=1)
    assert run.machine.view.needed_nodes() == frozenset("ab")
