"""Stories of attempts that are complete on the nodes and not in the log: completeness is a fact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ray_ckpt.core import messages as m
from ray_ckpt.core.open_attempts import MAX_WAITING_COMMITS
from ray_ckpt.errors import CollectiveError
from ray_ckpt.format import records as r
from ray_ckpt.format.digest import root_digest
from ray_ckpt.types import AttemptId, FileEntry, Level
from tests.core.driver import Harness, of, one

BOTH_WAYS = [("a", "b"), ("b", "a")]


def trained(nodes: str = "ab", group: str = "ab", **options: Any) -> Harness:
    """Return a run with a group at work and step 10 in the log."""
    run = Harness(nodes, inventory_wait_s=0.0, **options)
    run.open(group)
    run.save(10)
    return run


def hold(run: Harness, step: int, nodes: str = "ab", *, copies: Sequence[tuple[str, str]] = ()) -> AttemptId:
    """Store a step on the nodes without a report. `copies` are (source, holder)."""
    attempt = run.attempt(step)
    for node in nodes:
        run.stored(attempt, node)
    for source, holder in copies:
        run.copied(attempt, source, holder)
    return attempt


def commits(run: Harness) -> list[int]:
    return [op.step for op in run.records if isinstance(op, r.Commit)]


def resumed_step(run: Harness) -> int | None:
    resume = run.plan.resume
    return None if resume is None else resume.checkpoint.step


@pytest.mark.parametrize("restarted", [False, True])
def test_a_complete_attempt_is_committed_before_the_next_group_chooses(restarted: bool) -> None:
    run = trained()
    attempt = hold(run, 20)
    if restarted:
        run.start_coordinator()
    effects = run.open("ab")
    assert resumed_step(run) == 20
    assert any("not recorded" in warn.text for warn in of(effects, m.Warn)) is restarted
    commit, session = [op for op in run.records[:-1] if not isinstance(op, r.Ended)][-2:]
    assert isinstance(session, r.Session) and session.resumed_from == attempt.attempt
    assert isinstance(commit, r.Commit)
    assert commit.root_digest == root_digest(fragments_of(run, attempt)), "as if all reports had come in time"
    assert (commit.session, commit.level, commit.replicas) == (1, Level.LOCAL, 0)
    assert (commit.world_size, commit.num_nodes, commit.size_bytes) == (2, 2, 400)


def test_the_nodes_of_an_attempt_whose_commit_is_being_written_are_needed() -> None:
    run = Harness("abcd", inventory_wait_s=0.0, remote_every=1)
    run.open("ab")
    run.drain_all(run.save(10))
    hold(run, 20)
    run.start_coordinator()
    run.store_mode = "held"
    run.feed(run.group("cd"))
    assert run.machine.view.needed_nodes() == frozenset("abcd")


def fragments_of(run: Harness, attempt: AttemptId) -> list[FileEntry]:
    held = [held for disk in run.disks.values() for held in disk.fragments.values()]
    return [each.fragment for each in held if each.attempt == attempt]


def test_copies_count_for_the_level_and_stand_in_for_a_dead_node() -> None:
    run = trained()
    hold(run, 20, copies=BOTH_WAYS)
    run.start_coordinator()
    run.open("ab")
    assert run.machine.history.lineage()[-1].level is Level.REPLICATED

    run = trained("abc")
    hold(run, 20, copies=BOTH_WAYS)
    run.lose("b")
    run.start_coordinator()
    run.open("ac")
    assert resumed_step(run) == 20


def test_metrics_come_from_the_fragment_of_rank_0() -> None:
    run = trained()
    attempt = hold(run, 20)
    run.start_coordinator()
    run.open("ab")
    assert run.checkpoint(attempt).metrics == {"loss": 1.0 / 20}


def test_an_incomplete_attempt_is_no_checkpoint() -> None:
    run = trained()
    attempt = hold(run, 20, "a", copies=[("a", "b")])
    run.start_coordinator()
    run.open("ab")
    assert (resumed_step(run), commits(run)) == (10, [10])
    orphans = of(run.save(20), m.DeleteLocalOrphans)
    assert {stray.directories for stray in orphans} == {(attempt.directory,)}


def test_a_dropped_attempt_stays_dropped() -> None:
    run = trained()
    attempt = run.attempt(20)
    run.feed(run.stored(attempt, "a"))
    run.feed(m.SaveRefused(attempt=attempt, ranks=(1,), reason="disk full"))
    hold(run, 20)  # b wrote it all the same, and both are slow to delete
    run.open("ab")
    assert (resumed_step(run), commits(run)) == (10, [10])


def test_an_attempt_of_an_older_session_stays_out() -> None:
    """A newer session has not built on it; its group may have trained past it in another way."""
    run = trained()
    hold(run, 20)
    inventories = run.inventories()
    for disk in run.disks.values():
        disk.delete(run.attempt(20).attempt)
    run.open("ab")
    group = run.group("ab")
    run.start_coordinator()
    run.feed(replace(group, inventories=inventories))
    assert (resumed_step(run), commits(run)) == (10, [10])


def test_an_attempt_of_another_run_stays_out() -> None:
    run = trained()
    other = replace(run.attempt(20), run_uid="f" * 32)
    for node in "ab":
        run.stored(other, node)
    run.start_coordinator()
    effects = run.open("ab")
    assert commits(run) == [10]
    assert not of(effects, m.NotifyOutcome), "nor is it dropped: it is not this run's to judge"


def test_an_attempt_whose_ranks_disagree_is_dropped() -> None:
    run = trained()
    attempt = hold(run, 20)
    disk = run.disks["b"]
    disk.put(replace(disk.fragments[attempt.attempt, 1], replicated=("other",)))
    run.start_coordinator()
    effects = run.open("ab")
    (drop,) = [p for p in of(effects, m.NotifyOutcome) if p.error]
    assert isinstance(drop.error, CollectiveError)
    assert (drop.attempt, drop.nodes) == (attempt, ("a", "b"))
    assert (resumed_step(run), commits(run)) == (10, [10])


def test_of_many_complete_attempts_the_newest_are_committed_in_step_order() -> None:
    run = trained()
    for step in (40, 20, 30):
        hold(run, step)
    run.start_coordinator()
    run.open("ab")
    assert commits(run) == [10, 30, 40][: 1 + MAX_WAITING_COMMITS]
    assert resumed_step(run) == 40


def test_what_was_overtaken_is_not_committed_behind_the_newer_step() -> None:
    run = trained()
    old = hold(run, 5)
    run.start_coordinator()
    effects = run.open("ab")
    assert commits(run) == [10]
    assert [p.attempt for p in of(effects, m.NotifyOutcome) if p.error] == [old], "so its folders may go"


def test_an_attempt_that_a_later_inventory_completes_is_adopted_too() -> None:
    run = trained("abc", replicas=0)
    run.options = replace(run.options, inventory_wait_s=10.0)
    hold(run, 20)
    run.start_coordinator()
    group = run.group("ac", token="waits")
    without_b = {node: held for node, held in group.inventories.items() if node != "b"}
    effects = run.feed(replace(group, inventories=without_b))
    assert one(effects, m.RequestInventory).token == "waits"
    assert commits(run) == [10], "a part of step 20 is on b only"
    run.feed(run.inventory("waits"))
    assert (commits(run), resumed_step(run)) == ([10, 20], 20)


def test_late_reports_about_an_adopted_attempt_change_nothing() -> None:
    run = trained()
    attempt = run.attempt(20)
    late: list[m.Event] = [run.stored(attempt, node) for node in "ab"]
    late += [run.copied(attempt, "a", "b"), run.copied(attempt, "b", "a")]
    run.start_coordinator()
    run.store_mode = "held"
    run.feed(run.group("ab"))
    assert run.feed(*late) == (), "its commit is on the way"
    run.confirm()
    assert resumed_step(run) == 20
    records = run.records
    effects = run.feed(*late)
    assert run.records == records, "it is committed once"
    assert {(p.attempt, p.level, p.error) for p in of(effects, m.NotifyOutcome)} == {
        (attempt, Level.REPLICATED, None)
    }


def test_copies_that_end_after_the_adoption_raise_the_level() -> None:
    run = trained()
    attempt = hold(run, 20)
    copied = [run.copied(attempt, "a", "b"), run.copied(attempt, "b", "a")]
    for node, index in (("a", 1), ("b", 0)):
        del run.disks[node].fragments[attempt.attempt, index]
    run.start_coordinator()
    run.open("ab")
    assert run.checkpoint(attempt).level is Level.LOCAL
    run.feed(*copied)
    assert run.checkpoint(attempt).level is Level.REPLICATED


def test_what_was_never_reported_counts_as_stored_when_its_group_is_found() -> None:
    run = trained()
    plan = run.plan
    attempt = hold(run, 20, copies=BOTH_WAYS)
    run.start_coordinator()
    run.feed(m.GroupRecovered(plan=plan, inventories=run.inventories()))
    assert commits(run) == [10, 20]
    assert run.checkpoint(attempt).level is Level.REPLICATED


# -- in the middle of a session ----------------------------------------------------------------------


def test_a_node_with_a_new_agent_completes_the_attempt_that_waited_for_it() -> None:
    """The old agent wrote its part and died before its report."""
    run = trained(replicas=0)
    attempt = run.attempt(20)
    run.feed(run.stored(attempt, "a"))
    run.stored(attempt, "b")
    assert commits(run) == [10]
    run.feed(m.NodesJoined(inventories={"b": run.disks["b"].inventory()}))
    assert commits(run) == [10, 20]


def test_a_node_that_comes_back_with_its_disk_holds_again_what_it_held() -> None:
    run = trained("abc", replicas=1)
    attempt = run.attempt(10)
    kept = run.disks["b"]
    run.lose("b")
    assert run.machine.view.copies_missing == 2
    run.live.add("b")
    run.disks["b"] = kept
    run.feed(m.NodesSeen(live=frozenset("abc")))
    run.feed(m.NodesJoined(inventories={"b": kept.inventory()}))
    assert run.machine.view.copies_missing == 0
    assert run.machine.view.holders[attempt.attempt] == {0: ("a", "b"), 1: ("a", "b")}


def test_what_a_node_that_comes_late_has_of_another_session_stays_out() -> None:
    run = trained(replicas=0)
    old = hold(run, 20)
    disks = {node: disk.inventory() for node, disk in run.disks.items()}
    for disk in run.disks.values():
        disk.delete(old.attempt)
    run.open("ab")
    run.feed(m.NodesJoined(inventories=disks))
    assert commits(run) == [10]


# -- fragments of which nodes hold different bytes -----------------------------------------------------


def alter(run: Harness, node: str, attempt: AttemptId, index: int) -> None:
    """Change the fragment on a node in bytes that it can be read without."""
    disk, copy = run.disks[node], (attempt.attempt, index)
    held = disk.fragments[copy]
    disk.fragments[copy] = replace(held, fragment=replace(held.fragment, digest="f" * 32))


@pytest.mark.parametrize("node", ["a", "b"])
def test_an_attempt_is_not_recovered_if_nodes_hold_different_versions_of_a_fragment(node: str) -> None:
    """Nothing shows which version was written, and none has as many copies as there are holders."""
    run = trained()
    attempt = hold(run, 20, copies=BOTH_WAYS)
    alter(run, node, attempt, 0)
    run.start_coordinator()
    effects = run.open("ab")
    assert commits(run) == [10] and resumed_step(run) == 10
    outcome = next(o for o in of(effects, m.NotifyOutcome) if o.attempt == attempt)
    assert "different versions of fragment(s) 0" in str(outcome.error) and outcome.nodes == ("a", "b")


def test_one_version_that_is_left_is_recovered_as_it_is() -> None:
    run = trained()
    attempt = hold(run, 20, copies=BOTH_WAYS)
    alter(run, "b", attempt, 0)
    run.lose("a")
    run.start_coordinator()
    run.open("b")
    commit = next(op for op in run.records if isinstance(op, r.Commit) and op.step == 20)
    assert (commit.root_of, commit.replicas) == ("fragments", 0)
    assert commit.root_digest == root_digest(fragments_of(run, attempt))


def test_a_report_that_differs_from_what_was_found_is_not_committed() -> None:
    run = trained()
    plan, attempt = run.plan, run.attempt(20)
    reports = [run.stored(attempt, node) for node in "ab"]
    for source, holder in BOTH_WAYS:
        run.copied(attempt, source, holder)
    alter(run, "b", attempt, 0)  # the copy of the fragment of a
    run.disks["a"].delete(attempt.attempt)  # reports of a come later
    run.start_coordinator()
    run.feed(m.GroupRecovered(plan=plan, inventories=run.inventories()))
    effects = run.feed(*reports, *(run.copied(attempt, source, holder) for source, holder in BOTH_WAYS))
    assert commits(run) == [10]
    assert any("different versions" in str(o.error) for o in of(effects, m.NotifyOutcome))


def test_a_node_that_joins_with_another_version_stops_the_commit() -> None:
    run = trained("abc")
    attempt = run.attempt(20)
    run.feed(run.stored(attempt, "a"), run.stored(attempt, "b"), run.copied(attempt, "a", "b"))
    run.disks["c"].put(run.disks["a"].fragments[attempt.attempt, 0])
    alter(run, "c", attempt, 0)
    run.feed(m.NodesJoined(inventories={"c": run.disks["c"].inventory()}))
    effects = run.feed(run.copied(attempt, "b", "a"))
    assert commits(run) == [10]
    assert any("different versions" in str(o.error) for o in of(effects, m.NotifyOutcome))


def test_a_copy_of_another_version_than_the_one_found_stops_the_commit() -> None:
    """The report of the writer is lost, so only the copy shows which version the writer had."""
    run = trained("abc")
    attempt = run.attempt(20)
    run.stored(attempt, "a")
    run.feed(run.stored(attempt, "b"), run.copied(attempt, "b", "a"), run.copied(attempt, "a", "b"))
    run.disks["c"].put(run.disks["a"].fragments[attempt.attempt, 0])
    alter(run, "c", attempt, 0)
    effects = run.feed(m.NodesJoined(inventories={"c": run.disks["c"].inventory()}))
    assert commits(run) == [10]
    assert any("different versions" in str(o.error) for o in of(effects, m.NotifyOutcome))
