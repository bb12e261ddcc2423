"""Messages that come late, doubled or in another order than they were sent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ray_ckpt.core import messages as m
from ray_ckpt.core.open_attempts import MAX_DROPPED
from ray_ckpt.format import records as r
from ray_ckpt.types import AttemptId
from tests.core.driver import Disk, Harness, of


def committed(run: Harness) -> list[int]:
    return [op.step for op in run.records if isinstance(op, r.Commit)]


def test_a_report_that_came_after_its_node_had_listed_its_files_counts() -> None:
    run = Harness()
    run.open()
    at = run.attempt(10)
    run.feed(run.stored(at, "a"))
    opened = replace(run.group("ab"), asked_s=run.now_s)  # the inventories are taken here
    run.tick(1.0)
    run.feed(run.stored(at, "b"))
    run.feed(opened)
    assert committed(run) == [10]


def test_a_report_from_before_the_question_does_not_count() -> None:
    run = Harness()
    run.open()
    at = run.attempt(10)
    run.feed(run.stored(at, "b"))
    run.tick(1.0)
    lost = {node: replace(found, fragments=()) for node, found in run.inventories().items()}
    opened = replace(run.group("ab"), asked_s=run.now_s, inventories=lost)
    run.feed(run.stored(at, "a"))
    run.feed(opened)
    assert committed(run) == [], "b has lost what it had stored"


@pytest.mark.parametrize(("replicas", "place"), [(1, "b"), (0, "a")])
def test_a_commit_that_waits_does_not_count_what_a_scrub_took(replicas: int, place: str) -> None:
    run = Harness(replicas=replicas)
    run.open()
    run.save(10)
    run.store_mode = "held"
    run.save(20)
    run.save(30)
    shared = ((run.attempt(30), 0),)
    scrubbed = m.ScrubEnded(
        attempt=run.attempt(10), node_index=0, place=place, damage=("x",), error=None, shared=shared
    )
    run.feed(scrubbed)
    for _ in range(3):
        run.confirm()
    found = [op.replicas for op in run.records if isinstance(op, r.Commit) and op.step == 30]
    assert found == ([0] if replicas else [])


def test_reports_that_nodes_repeat_do_not_wait_for_the_log() -> None:
    run = Harness()
    run.open()
    key = run.plan.session_key
    run.store_mode = "silent"
    run.start_coordinator()
    for _ in range(5_000):
        run.machine.handle(m.RanksProgressed(session_key=key, ranks={}))
    assert len(run.machine._early) < 100


def test_doubled_late_reports_do_not_make_the_coordinator_forget_a_drop() -> None:
    run = Harness()
    run.open()
    old = run.attempt(5)
    run.open()
    at = run.attempt(10)
    run.feed(m.SaveRefused(attempt=at, ranks=(0,), reason="disk full"))
    late = replace(run.stored(at, "a"), attempt=old)
    for _ in range(MAX_DROPPED):
        run.feed(late)
    run.feed(run.stored(at, "a"), run.stored(at, "b"), run.copied(at, "a", "b"), run.copied(at, "b", "a"))
    assert committed(run) == []


def test_a_late_inventory_of_a_node_whose_disk_is_elsewhere_is_ignored() -> None:
    run = Harness("ab")
    run.open()
    run.save(10)
    disk = replace(run.disks["b"].inventory(), disk="D")
    run.feed(m.NodesJoined(inventories={"b": disk}), m.NodesSeen(live=frozenset("ac")))
    run.feed(m.NodesJoined(inventories={"c": disk}), m.NodesJoined(inventories={"b": disk}))
    run.feed(m.NodesSeen(live=frozenset("ac")))
    assert run.machine.view.holders[run.attempt(10).attempt][0] == ("a", "c")


def test_a_node_that_missed_the_go_gets_it_from_the_next_coordinator() -> None:
    run = Harness()
    run.open()
    run.save(10)
    run.feed(run.group("ab"))
    found = run.plan
    run.feed(run.restored("a"), run.restored("b"))
    run.start_coordinator()
    run.feed(m.GroupRecovered(plan=found, inventories=run.inventories()))
    assert of(run.feed(run.restored("b")), m.Reply)


def test_a_group_that_is_found_keeps_the_step_that_it_was_to_resume_from() -> None:
    run = Harness()
    run.open()
    run.save(10)
    run.save(20)
    run.feed(run.group("ab", resume="step:20"))
    found = run.plan
    run.start_coordinator()
    run.feed(m.GroupRecovered(plan=found, inventories=run.inventories()))
    effects = run.feed(run.restored("a", damage=["x"]), run.restored("b", damage=["x"]))
    assert not of(effects, m.StartSession)


def test_what_was_retired_while_a_node_was_away_is_deleted_when_it_joins() -> None:
    run = Harness("abc", keep_last=1, replicas=2)
    run.open("ab")
    run.save(10)
    old = replace(run.disks["c"].inventory(), disk="D")
    run.lose("c")
    for step in (20, 30, 40):
        run.save(step)
    effects = run.feed(m.NodesSeen(live=frozenset("abd")), m.NodesJoined(inventories={"d": old}))
    (deleted,) = of(effects, m.DeleteLocalOrphans)
    assert (deleted.node_id, deleted.directories) == ("d", (run.attempt(10).directory,))
    assert run.attempt(10).attempt not in run.machine.view.holders or not any(
        "d" in nodes for nodes in run.machine.view.holders[run.attempt(10).attempt].values()
    )


def joined(run: Harness, node: str, *attempts: AttemptId) -> list[str]:
    """Let a node join that lists the folders of these attempts, none complete; return those deleted there."""
    disk = Disk(folders={attempt.attempt: attempt.directory for attempt in attempts})
    return deleted(run.feed(m.NodesJoined(inventories={node: disk.inventory()})))


def deleted(effects: tuple[m.Effect, ...]) -> list[str]:
    return [directory for order in of(effects, m.DeleteLocalOrphans) for directory in order.directories]


def test_parts_of_what_was_retired_are_deleted_on_a_node_that_joins() -> None:
    run = Harness("abc", keep_last=1)
    run.open("ab")
    for step in (10, 20):
        run.save(step)
    old, new = run.attempt(10), run.attempt(20)
    assert joined(run, "c", old, new) == [old.directory]


def test_folders_of_unknown_attempts_on_a_node_that_joins_go_after_the_next_commit() -> None:
    run = Harness("abc", keep_last=2)
    run.open("ab")
    run.save(10)
    before = run.attempt(15)
    run.open("ab")
    run.save(20)
    current = run.attempt(20)
    assert not joined(run, "c", before, current)
    assert deleted(run.save(30)) == [before.directory]
    assert not deleted(run.save(40))


def test_folders_of_saves_that_may_be_under_way_stay_on_a_node_that_joins() -> None:
    """The node may be a holder, and its folder one of which no node has reported a part yet."""
    run = Harness("abc", keep_last=2)
    run.open("ab")
    run.save(10)
    newer = run.attempt(30)
    assert not joined(run, "c", newer)
    assert not deleted(run.save(20))
    assert not deleted(run.save(30)), "it is committed now"
    assert not joined(run, "c", run.attempt(45))
    assert not deleted(run.save(40))
    assert deleted(run.save(50)) == [run.attempt(45).directory], "it was overtaken"


def test_a_newer_group_does_not_use_the_folders_that_joined_before_it() -> None:
    run = Harness("abc")
    run.open("ab")
    run.save(10)
    assert not joined(run, "c", run.attempt(15))
    run.open("ab")
    assert not deleted(run.save(20)), "its own inventory does not list the folder"


@pytest.mark.parametrize("is_older", [True, False])
def test_a_copy_that_a_scrub_took_does_not_count_by_an_older_inventory(is_older: bool) -> None:
    run = Harness()
    run.open()
    run.save(10)
    saved = run.attempt(10)
    opened = replace(run.group("ab"), asked_s=run.now_s)  # has the copy on b
    run.tick(1.0)
    scrubbed = m.ScrubEnded(attempt=saved, node_index=0, place="b", damage=("x",), error=None)
    run.feed(scrubbed)
    run.feed(opened if is_older else replace(opened, asked_s=run.now_s + 1.0))
    assert run.machine.view.holders[saved.attempt][0] == (("a",) if is_older else ("a", "b"))
