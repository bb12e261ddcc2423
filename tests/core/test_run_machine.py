"""Stories of the run machine: events in, effects asserted. The machine's rules are in its docstring."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from ray_ckpt.core import messages as m
from ray_ckpt.core.maintenance import MAINTENANCE_S
from ray_ckpt.core.retirement import GATHER_S
from ray_ckpt.core.sessions import MAX_REREADS, REREAD_S
from ray_ckpt.core.values import RankProgress
from ray_ckpt.errors import (
    CollectiveError,
    ConfigError,
    Fenced,
    RestoreError,
    RunSuperseded,
    SaveNotCollective,
    Unavailable,
)
from ray_ckpt.format import records as r
from ray_ckpt.format.digest import root_digest
from ray_ckpt.format.names import fragment_file, make_attempt, record_file, shard_file
from ray_ckpt.testing.parts import file_entry
from ray_ckpt.types import AttemptId, Level, RootOf
from tests.core.driver import RUN, RUN_UID, SERVICE, Cluster, Harness, of, one, ops


def commits(effects: Iterable[object]) -> list[tuple[int, Level, int]]:
    return [(op.step, op.level, op.replicas) for op in ops(effects) if isinstance(op, r.Commit)]


def dropped(effects: Iterable[object]) -> list[m.NotifyOutcome]:
    return [publish for publish in of(effects, m.NotifyOutcome) if publish.error is not None]


def live_steps(harness: Harness) -> list[int]:
    return [c.step for c in harness.machine.history.live()]


# -- a run begins ------------------------------------------------------------------------------------


def test_a_new_run_writes_create_and_epoch_then_a_session_per_group() -> None:
    run = Harness("ab")
    assert run.records == [r.Create(run_uid=RUN_UID, run_name=RUN, format=1), r.Epoch(service=SERVICE)]
    assert run.machine.is_open

    effects = run.feed(run.group("ab", token="t"))
    assert ops(effects) == [
        r.Session(
            session=1,
            service=SERVICE,
            opened_by=1,
            owner="driver",
            retention="last=3",
            after=None,
            resumed_from=None,
            world_size=2,
            num_nodes=2,
        )
    ]
    start = one(effects, m.StartSession)
    assert (start.tokens, start.plan.resume) == (("t",), None)
    assert [(n.node_id, n.node_index, n.ranks, n.holders) for n in start.plan.nodes] == [
        ("a", 0, (0,), ("b",)),
        ("b", 1, (1,), ("a",)),
    ]
    assert not run.feed(run.restored("a")), "nobody trains before all have their state"
    assert run.feed(run.restored("b")) == (
        m.Reply(token="restored-a", value=None),
        m.Reply(token="restored-b", value=None),
    )


def test_nothing_is_started_before_its_record_is_confirmed() -> None:
    run = Harness("ab")
    run.store_mode = "held"
    assert [type(e) for e in run.feed(run.group("ab"))] == [m.Append]
    assert one(run.confirm(), m.StartSession).plan.session == 1


def test_a_second_coordinator_fences_with_the_next_epoch() -> None:
    run = Harness("ab")
    run.start_coordinator()
    assert run.records[1:] == [r.Epoch(service=SERVICE), r.Epoch(service=SERVICE)]
    assert run.machine.history.epoch == 2


def test_a_coordinator_calls_nothing_dropped_before_its_fence_is_confirmed() -> None:
    """The old one's last commit may still be on its way into the store."""
    run = Harness("ab")
    run.open("ab")
    stored = run.stored(run.attempt(10), "a")
    run.store_mode = "held"
    run.start_coordinator()
    assert not dropped(run.feed(stored))


def test_a_restarted_coordinator_goes_on_with_the_group_it_finds() -> None:
    run = Harness("ab")
    run.open("ab")
    plan, events = run.plan, run.attempt(10)
    stored = [run.stored(events, "a"), run.stored(events, "b")]
    run.copied(events, "a", "b")
    copied = run.copied(events, "b", "a")
    run.disks["a"].delete(events.attempt)
    run.start_coordinator()
    run.feed(m.GroupRecovered(plan=plan, inventories=run.inventories()))
    assert run.plan == plan
    assert commits(run.feed(*stored, copied)) == [(10, Level.REPLICATED, 1)]
    other = m.GroupRecovered(plan=replace(plan, session=0), inventories=run.inventories())
    run.start_coordinator()
    superseded = one(run.feed(other), m.Supersede)
    assert (superseded.nodes, superseded.session_key) == (("a", "b"), (1, 0))
    assert run.machine.plan is None, "its session is not the log's last"


def test_what_is_complete_on_the_nodes_counts_when_a_group_is_found() -> None:
    """Also if no agent is left that would report it again."""
    run = Harness("ab")
    run.open("ab")
    plan, attempt = run.plan, run.attempt(10)
    for node in "ab":
        run.stored(attempt, node)
    run.copied(attempt, "a", "b"), run.copied(attempt, "b", "a")
    run.start_coordinator()
    found = m.GroupRecovered(plan=plan, inventories=run.inventories())
    assert commits(run.feed(found)) == [(10, Level.REPLICATED, 1)]


def test_a_restarted_coordinator_does_not_end_a_group_before_it_has_looked_for_it() -> None:
    """Between its fence and GroupRecovered nodes may report; RunSuperseded would end their training."""
    run = Harness("ab")
    run.open("ab")
    stored, plan = run.stored(run.attempt(10), "a"), run.plan
    run.start_coordinator()
    assert run.machine.is_open
    effects = [*run.feed(stored), *run.feed(m.GroupRecovered(plan=plan, inventories=run.inventories()))]
    assert not dropped(effects)


def test_a_group_that_is_found_late_does_not_come_back() -> None:
    run = Harness("ab")
    run.open("ab")
    old, stored = run.plan, [run.stored(run.attempt(10), node) for node in "ab"]
    run.start_coordinator()
    run.store_mode = "held"
    run.feed(run.group("ab"))  # its session is on the way into the log
    run.feed(m.GroupRecovered(plan=old, inventories=run.inventories()))
    assert run.machine.plan is None
    run.feed(*stored)
    run.confirm()
    run.confirm()
    commit, session = run.records[-2:]
    assert isinstance(commit, r.Commit) and isinstance(session, r.Session)
    assert session.resumed_from == commit.attempt, "what was complete is what the new group gets"


def test_a_single_node_logs_once_that_checkpoints_are_local() -> None:
    """The line is no warning, as a new user sees it first. The host adds the name of the run."""
    run = Harness("a")
    reported = one(run.open("a"), m.Warn)
    assert reported.is_expected and "one node" in reported.text and "replicas=0" in reported.text
    assert not of(run.open("a"), m.Warn)
    assert commits(run.save(10)) == [(10, Level.LOCAL, 0)]
    assert not of(Harness("a", replicas=0).open("a"), m.Warn)
    few = one(Harness("ab", replicas=2).open("ab"), m.Warn)
    assert not few.is_expected and "cannot hold 2 replica(s)" in few.text
    assert all("gpt" not in warning.text for warning in (reported, few))


def seen(run: Harness, racks: str = "", replica_nodes: str = "") -> tuple[m.Effect, ...]:
    domains = dict(zip(sorted(run.live), racks, strict=True)) if racks else {}
    return run.feed(
        m.NodesSeen(live=frozenset(run.live), domains=domains, replica_nodes=frozenset(replica_nodes))
    )


def holders(run: Harness) -> dict[str, tuple[str, ...]]:
    assert run.machine.plan is not None
    return {node.node_id: node.holders for node in run.machine.plan.nodes}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replica_nodes": "role=store"}, "No live node has the label role=store"),
        ({"replicas": 2, "copies": ("rack", "spread")}, "no live node has a failure domain"),
    ],
)
def test_the_first_group_is_refused_without_the_labels_that_its_options_name(
    options: dict[str, Any], message: str
) -> None:
    run = Harness("abs", **options)
    seen(run)
    error = one(run.feed(run.group("ab")), m.Fail).error
    assert isinstance(error, ConfigError) and message in str(error)
    assert error.fields["option"] in options and "ray start --labels" in error.hint
    seen(run, racks="112", replica_nodes="s")
    assert not of(run.open("ab"), m.Fail)
    seen(run)
    assert of(run.open("ab"), m.Warn) and not of(run.open("ab"), m.Fail), "a later group is only warned"


def test_labelled_nodes_alone_hold_copies() -> None:
    run = Harness("abcst", replica_nodes="role=store")
    seen(run, replica_nodes="st")
    run.open("abc")
    assert holders(run) == {"a": ("s",), "b": ("t",), "c": ("s",)}
    attempt = run.attempt(10)
    run.feed(*(run.stored(attempt, node) for node in "abc"))
    failed = run.feed(run.copied(attempt, "a", "s", error="refused"))
    assert [effect.holder for effect in of(failed, m.Replicate)] == ["t"], (
        "the free nodes b and c are not asked"
    )


def test_copies_without_room_outside_of_their_domain_cause_one_warning() -> None:
    run = Harness("abcde", replicas=2, copies=("rack", "spread"))
    seen(run, racks="11111")
    warned = one(run.open("abcde"), m.Warn)
    assert "5 node(s), such as a, have fewer than 1 copies outside of their failure domain" in warned.text
    assert not of(run.open("abcde"), m.Warn)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("abc", "3 training nodes do not fill groups of 6 + 2: the smallest parity group is of 1 + 2"),
        ("abcdefghi", "9 training nodes do not fill groups of 6 + 2: the smallest parity group is of 2 + 2"),
        ("abcdefgh", ""),
    ],
)
def test_parity_groups_that_are_not_filled_are_told_once(nodes: str, expected: str) -> None:
    run = Harness(nodes, parity=(6, 2))
    seen(run)
    texts = [effect.text for effect in of(run.open(nodes), m.Warn)]
    assert [expected in text for text in texts] == [True] * bool(expected)
    assert not expected or "2.00 times the state" in texts[0] or "3.00 times the state" in texts[0]
    assert not of(run.open(nodes), m.Warn)


def test_a_label_that_no_node_has_causes_one_warning() -> None:
    run = Harness("abcd", failure_domain="rakc", spare_nodes="role=sapre")
    run.feed(m.NodesSeen(live=frozenset("abcd")))
    texts = [warned.text for warned in of(run.open("abcd"), m.Warn)]
    assert len(texts) == 2 and all("no node has this label now" in text for text in texts)
    assert texts[0].startswith("failure_domain is 'rakc'")
    assert texts[1].startswith("spare_nodes is 'role=sapre'")
    assert not of(run.open("abcd"), m.Warn)


def test_a_label_that_one_node_has_causes_no_warning() -> None:
    run = Harness("abcd", failure_domain="rack", spare_nodes="role=spare")
    run.feed(m.NodesSeen(live=frozenset("abcd"), domains={"a": "r1", "b": ""}, spares=frozenset("d")))
    assert not [w for w in of(run.open("abcd"), m.Warn) if "label" in w.text]


def test_a_domain_with_too_few_nodes_for_its_copies_causes_one_warning() -> None:
    run = Harness("abcd", replicas=2, copies=("rack", "spread"))
    seen(run, racks="1123")
    warned = one(run.open("abcd"), m.Warn)
    assert "2 node(s), such as c, have fewer than 1 copies in their failure domain" in warned.text
    placed = holders(run)
    assert placed["a"][0] == "b" and placed["b"][0] == "a" and all(len(set(h)) == 2 for h in placed.values())
    assert not of(run.open("abcd"), m.Warn)


@pytest.mark.parametrize("racks", ["1122", "2211", "111222"])
def test_all_copies_are_outside_of_the_domain_if_the_options_ask_for_that(racks: str) -> None:
    nodes = "abcdef"[: len(racks)]
    run = Harness(nodes, replicas=2, copies=("spread", "spread"))
    seen(run, racks=racks)
    assert not of(run.open(nodes), m.Warn)
    rack_of = dict(zip(nodes, racks, strict=True))
    for node, found in holders(run).items():
        assert len(found) == 2 and all(rack_of[other] != rack_of[node] for other in found)


@pytest.mark.parametrize(
    ("racks", "options", "failed", "expected"),
    [
        ("112233", {"replicas": 1}, 0, "23"),
        ("111222", {"replicas": 2, "copies": ("rack", "spread")}, 0, "1"),
        ("111222", {"replicas": 2, "copies": ("rack", "spread")}, 1, "2"),
        ("112233", {"replicas": 2}, 0, "23"),
    ],
)
def test_a_copy_in_place_of_one_that_failed_is_in_a_domain_as_the_options_ask(
    racks: str, options: dict[str, Any], failed: int, expected: str
) -> None:
    nodes = "abcdef"
    run = Harness(nodes, **options)
    seen(run, racks=racks)
    run.open(nodes)
    rack_of, holder = dict(zip(nodes, racks, strict=True)), holders(run)["a"][failed]
    attempt = run.attempt(10)
    run.feed(*(run.stored(attempt, node) for node in nodes))
    moved = one(run.feed(run.copied(attempt, "a", holder, error="disk full")), m.Replicate)
    assert rack_of[moved.holder] in expected
    other = {rack_of[node] for node in holders(run)["a"] if node != holder}
    assert options["replicas"] == 1 or rack_of[moved.holder] not in other


def test_copies_in_place_of_those_that_failed_are_shared_out() -> None:
    run = Harness("abcdef")
    run.open("abcdef")
    attempt = run.attempt(10)
    run.feed(*(run.stored(attempt, node) for node in "abcdef"))
    placed = holders(run)
    events = [run.copied(attempt, node, placed[node][0], error="disk full") for node in "abc"]
    moved = [one(run.feed(event), m.Replicate).holder for event in events]
    assert len(set(moved)) > 1


# -- a save ------------------------------------------------------------------------------------------


def test_a_commit_waits_for_every_node_and_every_replica() -> None:
    run = Harness("ab")
    run.open("ab")
    attempt = run.attempt(10)
    stored_a, stored_b = run.stored(attempt, "a"), run.stored(attempt, "b")
    assert not run.feed(stored_a, run.copied(attempt, "a", "b"), stored_b)
    effects = run.feed(run.copied(attempt, "b", "a"))
    assert [type(e) for e in effects] == [m.Append, m.NotifyOutcome]
    (op,) = ops(effects)
    assert op == r.Commit2(
        session=1,
        step=10,
        attempt=attempt.attempt,
        level=Level.REPLICATED,
        replicas=1,
        world_size=2,
        num_nodes=2,
        size_bytes=stored_a.size_bytes + stored_b.size_bytes,
        root_digest=root_digest((stored_a.fragment, stored_b.fragment)),
        metrics={"loss": 0.1},
        replicate_s=0.0,
    )
    assert one(effects, m.NotifyOutcome) == m.NotifyOutcome(
        attempt=attempt, level=Level.REPLICATED, error=None, nodes=("a", "b"), epoch=1
    )


def test_a_copy_that_arrives_before_its_source_reports_counts() -> None:
    run = Harness("ab")
    run.open("ab")
    attempt = run.attempt(10)
    copies = [run.copied(attempt, "a", "b"), run.copied(attempt, "b", "a")]
    stored = [run.stored(attempt, "a"), run.stored(attempt, "b")]
    assert commits(run.feed(*copies, *stored)) == [(10, Level.REPLICATED, 1)]


def test_a_copy_that_fails_before_its_source_reports_is_sent_elsewhere() -> None:
    run = Harness("abc")
    run.open("ab")
    attempt = run.attempt(10)
    effects = run.feed(run.copied(attempt, "a", "b", error="no"))
    assert [e.holder for e in of(effects, m.Replicate)] == ["c"]
    effects = run.feed(run.copied(attempt, "a", "c"), run.copied(attempt, "b", "a"))
    effects = run.feed(run.stored(attempt, "a"), run.stored(attempt, "b"))
    assert commits(effects) == [(10, Level.REPLICATED, 1)]


def test_after_the_goal_timeout_a_local_checkpoint_is_committed_and_promoted_later() -> None:
    run = Harness("ab", goal_timeout_s=60)
    run.open("ab")
    assert not run.save(10, copies=False)
    attempt = run.attempt(10)
    assert not run.feed(run.copied(attempt, "a", "b"))
    assert not run.tick(60)
    assert commits(run.tick(1)) == [(10, Level.LOCAL, 0)]

    effects = run.feed(run.copied(attempt, "b", "a"))
    assert ops(effects) == [r.Promote(attempt=attempt.attempt, level=Level.REPLICATED, replicas=1)]
    assert one(effects, m.NotifyOutcome).level is Level.REPLICATED
    assert run.checkpoint(attempt).level is Level.REPLICATED


def test_a_failed_copy_goes_to_another_node() -> None:
    run = Harness("abc")
    run.open("ab")
    run.save(10, copies=False)
    attempt = run.attempt(10)
    effects = run.feed(run.copied(attempt, "a", "b", error="disk full"))
    assert one(effects, m.Replicate) == m.Replicate(attempt=attempt, node_index=0, source="a", holder="c")
    assert "disk full" in one(effects, m.Warn).text
    assert commits(run.feed(run.copied(attempt, "b", "a"), run.copied(attempt, "a", "c"))) == [
        (10, Level.REPLICATED, 1)
    ]


def test_without_another_node_the_commit_is_made_at_the_level_reached() -> None:
    run = Harness("ab")
    run.open("ab")
    run.save(10, copies=False)
    attempt = run.attempt(10)
    assert not commits(run.feed(run.copied(attempt, "a", "b", error="disk full")))
    assert commits(run.feed(run.copied(attempt, "b", "a"))) == [(10, Level.LOCAL, 0)]


def test_two_failed_copies_of_a_fragment_go_to_two_other_nodes() -> None:
    run = Harness("abcde", replicas=2)
    run.open("abc")
    attempt = run.attempt(10)
    run.feed(run.stored(attempt, "a"))
    effects = run.feed(*(run.copied(attempt, "a", holder, error="no") for holder in "bc"))
    assert sorted(e.holder for e in of(effects, m.Replicate)) == ["d", "e"]


def test_giving_up_one_copy_still_waits_for_the_others() -> None:
    run = Harness("abc", replicas=2)
    run.open("abc")
    attempt = run.attempt(10)
    run.feed(*(run.stored(attempt, node) for node in "abc"))
    for node, others in (("b", "ac"), ("c", "ab")):
        run.feed(*(run.copied(attempt, node, other) for other in others))
    assert not commits(run.feed(run.copied(attempt, "a", "b", error="no")))
    assert commits(run.feed(run.copied(attempt, "a", "c"))) == [(10, Level.REPLICATED, 1)]


def test_a_copy_whose_holder_died_before_the_commit_does_not_count() -> None:
    run = Harness("abc")
    run.open("ab")
    attempt = run.attempt(10)
    run.feed(run.stored(attempt, "a"), run.copied(attempt, "a", "b", error="no"))
    run.feed(run.copied(attempt, "a", "c"), run.stored(attempt, "b"))
    effects = [*run.lose("c"), *run.feed(run.copied(attempt, "b", "a"))]
    effects += run.tick(run.options.goal_timeout_s + 1)
    assert commits(effects) in ([(10, Level.LOCAL, 0)], [])


def test_late_reports_about_a_dead_node_do_not_count() -> None:
    run = Harness("abc", inventory_wait_s=0)
    run.open("ab")
    attempt = run.attempt(10)
    run.feed(run.stored(attempt, "a"), run.stored(attempt, "b"), run.copied(attempt, "a", "b"))
    late = run.copied(attempt, "b", "a", error="slow"), run.copied(attempt, "b", "c")
    run.lose("c")
    effects = [*run.feed(*late), *run.tick(61)]
    assert commits(effects) == [(10, Level.LOCAL, 0)], "c is dead"
    assert "c" not in run.machine.view.holders[attempt.attempt][1]


def test_messages_that_come_twice_commit_once() -> None:
    run = Harness("ab")
    run.open("ab")
    attempt = run.attempt(10)
    events: list[m.Event] = [run.stored(attempt, "a"), run.stored(attempt, "b")]
    events += [run.copied(attempt, "a", "b"), run.copied(attempt, "b", "a")]
    assert len(commits(run.feed(*[e for e in events for _ in range(2)], *events))) == 1
    late = run.feed(run.stored(attempt, "b"))
    reported = m.NotifyOutcome(attempt=attempt, level=Level.REPLICATED, error=None, nodes=("b",), epoch=1)
    assert late == (reported,)


def test_an_answer_for_another_record_changes_nothing() -> None:
    run = Harness("ab")
    run.open("ab")
    seq = run.machine.history.next_seq
    assert not run.feed(m.Appended(seq=seq, outcome="ok"), m.Appended(seq=seq - 1, outcome="exists"))
    assert run.machine.is_open


# -- a save that fails -------------------------------------------------------------------------------


def test_a_missing_rank_is_named_and_its_attempt_dropped() -> None:
    run = Harness("ab", attempt_timeout_s=60)
    run.open("ab")
    run.save(10)
    attempt = run.attempt(20)
    run.feed(run.stored(attempt, "a"))
    assert not run.tick(60)
    effects = run.tick(1)
    (publish,) = dropped(effects)
    assert (publish.attempt, publish.level, publish.nodes) == (attempt, None, ("a", "b"))
    assert isinstance(publish.error, Unavailable) and "Rank(s) 1 did not finish" in str(publish.error)
    assert not commits(run.feed(run.stored(attempt, "b"))), "late messages of a dropped attempt"


def test_a_save_on_rank_0_only_is_found_when_the_others_have_passed_it() -> None:
    run = Harness("ab")
    run.open("ab")
    attempt = run.attempt(10)
    run.feed(run.stored(attempt, "a"))
    at = m.RanksProgressed(session_key=(1, 1), ranks={1: RankProgress(step=10, saved_step=0)})
    assert not run.feed(at), "rank 1 may be about to save"
    past = m.RanksProgressed(session_key=(1, 1), ranks={1: RankProgress(step=11, saved_step=0)})
    (publish,) = dropped(run.feed(past))
    assert isinstance(publish.error, SaveNotCollective)
    assert publish.error.fields == {"step": 10, "missing_ranks": (1,)}


def test_a_slow_rank_that_has_saved_the_step_is_not_accused() -> None:
    run = Harness("ab")
    run.open("ab")
    run.feed(run.stored(run.attempt(10), "a"))
    progress = m.RanksProgressed(session_key=(1, 1), ranks={1: RankProgress(step=12, saved_step=10)})
    assert not run.feed(progress)
    other = m.RanksProgressed(session_key=(1, 7), ranks={1: RankProgress(step=12, saved_step=0)})
    assert not run.feed(other)


def test_a_save_on_rank_0_only_is_found_by_the_timeout_too() -> None:
    run = Harness("ab")
    run.open("ab")
    run.feed(run.stored(run.attempt(10), "a"))
    run.tick(55)
    run.feed(m.RanksProgressed(session_key=(1, 1), ranks={1: RankProgress(step=0, saved_step=0)}))
    (publish,) = dropped(run.tick(6))
    assert isinstance(publish.error, SaveNotCollective)


def test_a_rank_that_is_silent_or_has_saved_before_is_not_accused() -> None:
    run = Harness("ab")
    run.open("ab")
    run.feed(m.RanksProgressed(session_key=(1, 1), ranks={1: RankProgress(step=0, saved_step=0)}))
    run.feed(run.stored(run.attempt(10), "a"))
    (publish,) = dropped(run.tick(61))
    assert isinstance(publish.error, Unavailable), "its last report is a minute old"
    run.save(20)
    run.feed(run.stored(run.attempt(30), "a"))
    run.tick(55)
    run.feed(m.RanksProgressed(session_key=(1, 1), ranks={1: RankProgress(step=20, saved_step=20)}))
    (publish,) = dropped(run.tick(6))
    assert isinstance(publish.error, Unavailable)


def test_ranks_that_differ_in_what_they_share_get_an_error() -> None:
    run = Harness("ab")
    run.open("ab")
    attempt = run.attempt(10)
    run.feed(run.stored(attempt, "a"), run.stored(attempt, "b", replicated=("other",)))
    effects = run.feed(run.copied(attempt, "a", "b"), run.copied(attempt, "b", "a"))
    assert not commits(effects)
    (publish,) = dropped(effects)
    assert isinstance(publish.error, CollectiveError) and publish.nodes == ("a", "b")


def test_a_refused_save_is_dropped_for_all() -> None:
    run = Harness("ab")
    run.open("ab")
    attempt = run.attempt(10)
    run.feed(run.stored(attempt, "a"))
    (publish,) = dropped(run.feed(m.SaveRefused(attempt=attempt, ranks=(1,), reason="the disk is full")))
    assert "Rank(s) 1 could not take part: the disk is full" in str(publish.error)
    assert publish.nodes == ("a", "b")


def test_a_refusal_that_comes_first_drops_the_attempt_too() -> None:
    run = Harness("ab")
    run.open("ab")
    attempt = run.attempt(10)
    assert dropped(run.feed(m.SaveRefused(attempt=attempt, ranks=(1,), reason="busy")))
    late = dropped(run.feed(run.stored(attempt, "a"), run.stored(attempt, "a")))
    assert [publish.nodes for publish in late] == [("a",), ("a",)], "a missed outcome is sent again"


def test_a_newer_commit_drops_what_it_overtook() -> None:
    run = Harness("ab")
    run.open("ab")
    old = run.attempt(10)
    run.feed(run.stored(old, "a"))
    effects = run.save(20)
    assert commits(effects) == [(20, Level.REPLICATED, 1)]
    assert [p.attempt for p in dropped(effects)] == [old]


def test_a_nodes_death_drops_the_attempts_that_wait_for_it() -> None:
    run = Harness("ab")
    run.open("ab")
    attempt = run.attempt(10)
    run.feed(run.stored(attempt, "a"))
    (publish,) = dropped(run.lose("b"))
    assert "b died during the save" in str(publish.error)
    assert publish.nodes == ("a",)


def test_what_died_with_its_only_node_is_not_committed() -> None:
    run = Harness("ab")
    run.open("ab")
    attempt = run.attempt(10)
    run.feed(run.stored(attempt, "b"))
    effects = [*run.lose("b"), *run.feed(run.stored(attempt, "a"))]
    effects += [*run.tick(run.options.goal_timeout_s + 1), *run.tick(run.options.goal_timeout_s + 1)]
    assert not commits(effects), "fragment 1 is gone"
    assert dropped(effects)


def test_a_copy_that_arrives_after_the_drop_is_removed() -> None:
    run = Harness("abc")
    run.open("ab")
    attempt = run.attempt(10)
    run.feed(run.stored(attempt, "a"), run.copied(attempt, "a", "b", error="no"))  # c copies now
    drop = run.feed(m.SaveRefused(attempt=attempt, ranks=(1,), reason="busy"))
    late = run.feed(run.copied(attempt, "a", "c"))
    reported = {node for publish in dropped([*drop, *late]) for node in publish.nodes}
    assert "c" in reported, "or its copy stays on c's disk until the next session"


# -- sessions ----------------------------------------------------------------------------------------


def test_messages_of_an_older_session_are_answered_with_superseded() -> None:
    run = Harness("ab")
    run.open("ab")
    old, stored = run.attempt(10), run.stored(run.attempt(10), "a")
    run.open("ab")
    (publish,) = of(run.feed(stored), m.NotifyOutcome)
    assert (publish.attempt, publish.nodes) == (old, ("a",)) and isinstance(publish.error, RunSuperseded)
    fail = one(run.feed(run.restored("a", session_key=(1, 1))), m.Fail)
    assert isinstance(fail.error, RunSuperseded)
    assert not run.feed(m.SaveRefused(attempt=old, ranks=(0,), reason="x"))
    (publish,) = dropped(run.feed(run.copied(old, "a", "b")))
    assert publish.nodes == ("b",), "a copy of what is gone may go too"


def test_a_new_group_supersedes_those_that_wait() -> None:
    run = Harness("ab")
    run.feed(run.group("ab"))
    run.feed(run.restored("a"))
    attempt = run.attempt(10)
    run.feed(run.stored(attempt, "a"))
    effects = run.feed(run.group("ab"))
    assert [(f.token, type(f.error)) for f in of(effects, m.Fail)] == [("restored-a", RunSuperseded)]
    assert [p.attempt for p in dropped(effects)] == [attempt]
    assert one(effects, m.StartSession).plan.session == 2


def test_a_finish_that_waits_is_failed_by_a_new_group() -> None:
    run = Harness("ab")
    run.open("ab")
    run.save(10)
    run.feed(m.FinishRequested(token="finish"))
    effects = run.feed(run.group("ab"))
    assert "finish" in [f.token for f in of(effects, m.Fail)]


def test_a_late_inventory_of_a_superseded_group_opens_nothing() -> None:
    run = Harness("ab")
    run.open("ab")
    run.save(10)
    run.lose("b", "a")
    run.live |= {"a", "b"}
    request = one(run.feed(run.group("ab", token="old")), m.RequestInventory)
    run.feed(run.group("ab", token="new"))
    assert not run.feed(run.inventory(request.token))


def test_a_commit_in_flight_outlives_its_group() -> None:
    run = Harness("ab")
    run.open("ab")
    attempt = run.attempt(10)
    run.store_mode = "held"
    run.save(10)
    run.feed(run.group("ab"))
    effects = run.confirm()
    assert [type(op) for op in run.records[-3:]] == [r.Commit2, r.Ended, r.Session]
    assert [(p.attempt, p.level) for p in of(effects, m.NotifyOutcome)] == [(attempt, Level.REPLICATED)]


def test_what_is_being_committed_is_never_called_dropped() -> None:
    run = Harness("ab")
    run.open("ab")
    attempt = run.attempt(10)
    again = run.stored(attempt, "a")
    run.store_mode = "held"
    run.save(10)
    effects = [*run.feed(run.group("ab")), *run.feed(again)]
    assert not dropped(effects), "the node would delete the files of a checkpoint that is about to exist"


# -- restore -----------------------------------------------------------------------------------------


def test_the_newest_checkpoint_with_full_sources_is_restored() -> None:
    run = Harness("ab")
    run.open("ab")
    run.save(10)
    run.save(20)
    effects = run.feed(run.group("ab"))
    resume = one(effects, m.StartSession).plan.resume
    assert resume is not None
    assert (resume.checkpoint.step, resume.holders) == (20, (("a", "b"), ("a", "b")))
    for node in "ab":
        effects = run.feed(run.restored(node))
    (restored,) = of(ops(effects), r.Restored)
    assert restored.session == 2


def test_a_plan_has_the_digests_of_the_committed_fragments_if_inventories_prove_them() -> None:
    run = Harness("abc")
    run.open("ab")
    run.save(10)
    attempt = run.attempt(10)
    digests = tuple(run.stored(attempt, node).fragment.digest for node in "ab")
    resume = one(run.feed(run.group("ab")), m.StartSession).plan.resume
    assert resume is not None and resume.fragments == digests
    run.feed(*(run.restored(node) for node in "ab"))

    group = run.group("ab")
    here = group.inventories["a"]
    other = [replace(f, fragment=replace(f.fragment, digest="f" * 32)) for f in here.fragments]
    found = {"a": replace(here, fragments=tuple(other))}
    resume = one(
        run.feed(replace(group, inventories={**group.inventories, **found})), m.StartSession
    ).plan.resume
    assert resume is not None and resume.fragments == (), "a node has another version"


def test_fragments_are_not_proven_by_a_root_digest_of_all_files() -> None:
    """Nodes list their fragments only. The restore then reads all of them, and compares their files too."""
    run = Harness("ab")
    run.open("ab")
    run.save(10)
    known = run.machine.history.checkpoints
    (name,) = known
    fragments = [held.fragment for held in run.disks["a"].fragments.values()]
    files = [*fragments, file_entry(known[name].id, shard_file(0, 2))]
    for root_of, proven in (("files", 0), ("fragments", 2)):
        of_that: RootOf = "files" if root_of == "files" else "fragments"
        known[name] = replace(known[name], root_of=of_that, root_digest=root_digest(files, of_that))
        resume = one(run.feed(run.group("ab")), m.StartSession).plan.resume
        assert resume is not None and len(resume.fragments) == proven


def test_a_group_on_other_nodes_restores_from_peers() -> None:
    run = Harness("abc")
    run.open("ab")
    run.save(10)
    run.lose("a")
    resume = one(run.feed(run.group("bc")), m.StartSession).plan.resume
    assert resume is not None and resume.holders == (("b",), ("b",))


def test_a_restore_waits_for_nodes_that_may_return() -> None:
    run = Harness("ab", replicas=0)
    run.open("ab")
    run.save(10)
    run.live.discard("b")  # its disk stays
    run.feed(m.NodesSeen(live=frozenset("a")))
    request = one(run.feed(run.group("a", token="t")), m.RequestInventory)
    assert (request.token, run.machine.plan) == ("t", None)

    run.live.add("b")
    effects = run.feed(run.inventory("t"))
    start = one(effects, m.StartSession)
    assert start.tokens == ("t",)
    assert start.plan.resume is not None and start.plan.resume.holders == (("a",), ("b",))


def test_after_the_wait_a_restore_falls_back_to_a_durable_one_with_a_warning() -> None:
    run = Harness("ab", replicas=0, inventory_wait_s=10, remote_every=1)
    run.open("ab")
    run.drain_all(run.save(10))
    run.save(20)
    run.lose("b")
    assert of(run.feed(run.group("a", token="t")), m.RequestInventory)
    assert not run.tick(9), "an inventory is on its way"
    assert of(run.feed(run.inventory("t")), m.RequestInventory)
    run.tick(1)
    effects = run.feed(run.inventory("t"))
    resume = one(effects, m.StartSession).plan.resume
    assert resume is not None and (resume.checkpoint.step, resume.holders) == (10, (("a",), ()))
    assert "Step 20 has lost all copies of a part; step 10 is restored instead" in one(effects, m.Warn).text


def test_after_the_wait_a_restore_falls_back_to_an_older_one() -> None:
    run = Harness("abc", inventory_wait_s=0)
    run.open("ab")
    run.save(10)
    run.save(20, copies=False)
    run.tick(61)
    run.lose("b")
    effects = run.feed(run.group("ac"))
    resume = one(effects, m.StartSession).plan.resume
    assert resume is not None and resume.checkpoint.step == 10


def test_damage_on_one_node_takes_all_to_the_older_checkpoint_in_a_new_session() -> None:
    run = Harness("ab")
    run.open("ab")
    run.save(10)
    run.save(20)
    run.feed(run.group("ab"))
    assert not run.feed(run.restored("a"))
    effects = run.feed(run.restored("b", damage=["shard-00001: model.weight"]))
    assert "Step 20 cannot be restored: no intact copy of shard-00001" in of(effects, m.Warn)[0].text
    start = one(effects, m.StartSession)
    assert start.tokens == ("restored-a", "restored-b")
    assert (start.plan.session, start.plan.resume and start.plan.resume.checkpoint.step) == (3, 10)
    assert [session for _, session in start.plan.left] == [2]
    assert not of(effects, m.Reply)
    assert len(of([*run.feed(run.restored("a")), *run.feed(run.restored("b"))], m.Reply)) == 2


def test_a_checkpoint_whose_sources_were_not_reached_is_read_again_by_all() -> None:
    run = Harness("ab")
    run.open("ab")
    run.save(10)
    run.save(20)
    run.feed(run.group("ab", token="t"))
    cut_off = run.restored("b", damage=["shard-00001: model.weight"], is_unreachable=True, bad_nodes=["a"])
    effects = run.feed(run.restored("a"), cut_off)
    assert one(effects, m.RequestInventory).token == "t"
    assert "Step 20 is read again in 2 s: no source was reached of shard-00001" in of(effects, m.Warn)[0].text
    assert not of(run.feed(run.inventory("t")), m.StartSession), "the pause is not over"
    start = one(run.tick(REREAD_S), m.StartSession)
    assert start.tokens == ("restored-a", "restored-b")
    assert (start.plan.session, start.plan.resume and start.plan.resume.checkpoint.step) == (3, 20)
    effects = run.feed(run.restored("a"), run.restored("b"), run.ticked)
    assert [reply.token for reply in of(effects, m.Reply)] == ["restored-a", "restored-b"]
    assert not of(run.tick(MAINTENANCE_S), m.Scrub), "b may have read bad bytes of another session"


def test_sources_that_never_return_cost_an_older_checkpoint_after_a_bounded_time() -> None:
    run = Harness("ab")
    run.open("ab")
    run.save(10)
    run.save(20)
    run.feed(run.group("ab", token="t"))
    begun_s, steps = run.now_s, list[int]()
    while not steps or steps[-1] == 20:
        effects = run.feed(run.restored("a"), run.restored("b", damage=["x"], is_unreachable=True))
        if not of(effects, m.StartSession):
            run.feed(run.inventory("t"))
            run.tick(REREAD_S * 2 ** len(steps) - 1)
            assert not run.machine.view.awaited(), "all ranks have come"
            effects = run.tick(1)
        resume = one(effects, m.StartSession).plan.resume
        assert resume is not None
        steps.append(resume.checkpoint.step)
    assert steps == [20] * MAX_REREADS + [10]
    assert run.now_s - begun_s == REREAD_S * (2**MAX_REREADS - 1)


def test_damage_that_no_source_can_mend_is_not_read_again() -> None:
    run = Harness("ab")
    run.open("ab")
    run.save(10)
    run.save(20)
    run.feed(run.group("ab"))
    effects = run.feed(run.restored("a", damage=["x"], is_unreachable=True), run.restored("b", damage=["y"]))
    resume = one(effects, m.StartSession).plan.resume
    assert resume is not None and resume.checkpoint.step == 10


def test_an_older_checkpoint_is_restored_if_the_sources_turn_out_to_be_lost() -> None:
    run = Harness("abc", inventory_wait_s=0)
    run.open("ab")
    run.save(10)
    run.save(20, copies=False)
    run.tick(61)
    run.feed(run.group("ac", token="t"))
    run.feed(run.restored("a"), run.restored("c", damage=["x"], is_unreachable=True))
    run.lose("b")
    run.feed(run.inventory("t"))
    resume = one(run.tick(REREAD_S), m.StartSession).plan.resume
    assert resume is not None and resume.checkpoint.step == 10


def test_all_calls_of_a_node_that_repeats_its_report_are_answered() -> None:
    """The sender of the newest one may have given up, as the one of an earlier one."""
    run = Harness("ab")
    run.feed(run.group("ab"))
    again = replace(run.restored("a"), token="again")
    assert not run.feed(run.restored("a"), again)
    replies = of(run.feed(run.restored("b")), m.Reply)
    assert [(reply.token, reply.value) for reply in replies] == [
        ("restored-a", None),
        ("again", None),
        ("restored-b", None),
    ]


def test_a_report_that_is_repeated_after_the_decision_decides_nothing() -> None:
    run = Harness("ab")
    run.open("ab")
    run.save(10)
    run.feed(run.group("ab", token="t"))
    old = run.restored("b", damage=["x"], is_unreachable=True)
    run.feed(run.restored("a"), old)
    assert not run.feed(replace(old, token="again"), replace(run.restored("a"), token="also"))
    run.feed(run.inventory("t"))
    start = one(run.tick(REREAD_S), m.StartSession)
    assert start.tokens == ("restored-a", "restored-b", "again", "also")
    late = run.feed(replace(old, token="late"))
    assert late == (m.Reply(token="late", value=False),), "the plan of the next session is on its way"


def test_a_copy_that_a_restore_finds_damaged_is_scrubbed_at_once() -> None:
    run = Harness("abc")
    run.open("ab")
    run.save(10)
    run.feed(run.group("ab"))
    assert not run.feed(run.restored("a", bad_nodes=["b", "c"])), "others may still read intact rows there"
    scrubs = of([*run.feed(run.restored("b")), *run.tick(MAINTENANCE_S)], m.Scrub)
    assert [(scrub.attempt.step, scrub.place) for scrub in scrubs] == [(10, "b")], "c has no copy"


def test_the_only_copies_of_what_was_restored_are_left_to_the_next_round() -> None:
    """The intact rows of two bad copies have made a whole one; a scrub now would take both away."""
    run = Harness("ab")
    run.open("ab")
    run.save(10)
    run.feed(run.group("ab"))
    run.feed(run.restored("a", bad_nodes=["a", "b"]))
    assert not of([*run.feed(run.restored("b")), *run.tick(MAINTENANCE_S)], m.Scrub)


def test_bad_copies_of_what_could_not_be_restored_are_scrubbed_in_the_next_session() -> None:
    run = Harness("ab")
    run.open("ab")
    run.save(10)
    run.save(20)
    run.feed(run.group("ab"))
    effects = [*run.feed(run.restored("a"), run.restored("b", damage=["x"], bad_nodes=["a", "b"]))]
    effects += [*run.feed(run.restored("a")), *run.feed(run.restored("b")), *run.tick(MAINTENANCE_S)]
    assert [(scrub.attempt.step, scrub.place) for scrub in of(effects, m.Scrub)][:1] == [(20, "a")]


def test_the_branch_left_behind_by_damage_goes_when_the_new_one_has_its_level() -> None:
    run = Harness("ab")
    run.open("ab")
    run.save(10)
    run.save(20)
    run.feed(run.group("ab"))
    run.feed(run.restored("a"), run.restored("b", damage=["x"]))
    run.feed(run.restored("a"), run.restored("b"))
    assert [c.step for c in run.machine.history.lineage()] == [10]
    assert live_steps(run) == [10, 20]
    run.save(15)
    assert [c.step for c in run.machine.history.lineage()] == [10, 15]
    assert live_steps(run) == [10, 15]


def test_with_nothing_intact_everyone_gets_a_restore_error() -> None:
    run = Harness("ab", inventory_wait_s=0)
    run.open("ab")
    run.save(10)
    run.feed(run.group("ab"))
    effects = run.feed(run.restored("a"), run.restored("b", damage=["all of it"]))
    fails = of(effects, m.Fail)
    assert [f.token for f in fails] == ["restored-a", "restored-b"]
    assert all(isinstance(f.error, RestoreError) and f.error.hint for f in fails)
    assert not of(effects, m.StartSession)


def test_lost_sources_give_a_restore_error_that_names_the_steps() -> None:
    run = Harness("ab", inventory_wait_s=0)
    run.open("ab")
    run.save(10)
    run.lose("a", "b")
    run.live.add("a")
    fail = one(run.feed(run.group("a", token="t")), m.Fail)
    assert fail.token == "t" and isinstance(fail.error, RestoreError)
    assert "recorded steps without a full set of copies: 10" in str(fail.error)


def test_resume_never_starts_from_scratch() -> None:
    run = Harness("ab")
    run.open("ab")
    run.save(10)
    effects = run.feed(run.group("ab", resume="never"))
    assert one(effects, m.StartSession).plan.resume is None
    assert run.machine.history.lineage() == ()
    assert live_steps(run) == [10], "the old branch stays until the new one has its level"


def test_a_group_that_leaves_checkpoints_aside_warns_that_they_will_be_deleted() -> None:
    def warned(resume: str) -> list[str]:
        texts = [warned.text for warned in of(run.open("ab", resume=resume), m.Warn)]
        return [text for text in texts if "resume=" in text]

    run = Harness("ab", keep_last=3)
    assert not warned("never"), "the run has no checkpoint"
    for step in (10, 20, 30):
        run.save(step)
    assert not warned("auto")
    assert warned("step:20") == [
        "resume='step:20' leaves 1 checkpoint aside, the newest of step 30: deleted from the first saves on, "
        "unless pinned. To keep checkpoints, pin them or use another run name."
    ]
    run.save(25)
    first = next(c for c in run.machine.history.live() if c.step == 10)
    run.feed(m.PinRequested(token="pin", attempt=first.id.attempt, owner="me", expires_at_s=None))
    (text,) = warned("never")
    assert "resume='never' leaves 2 checkpoints aside, the newest of step 25" in text
    assert not warned("never"), "once"
    run.save(5)
    assert live_steps(run) == [10, 5]


def test_resume_must_needs_a_checkpoint() -> None:
    run = Harness("ab")
    fail = one(run.feed(run.group("ab", token="t", resume="must")), m.Fail)
    assert (fail.token, type(fail.error)) == ("t", RestoreError)
    assert "has no checkpoint to resume from. Check the run's name and storage_path" in str(fail.error)
    run.open("ab")
    run.save(10)
    assert one(run.feed(run.group("ab", resume="must")), m.StartSession).plan.resume is not None


@pytest.mark.parametrize("option", ["resume", "init_from"])
def test_a_named_checkpoint_that_is_ignored_causes_a_warning(option: str) -> None:
    """Not in a restart by the launcher that has begun with it."""

    def ignored(owner: str) -> list[str]:
        effects = run.feed(run.group("ab", owner=owner, dead_owner="first"))
        assert of(effects, m.StartSession)
        run.feed(*(run.restored(node) for node in "ab"))
        return [warned.text for warned in of(effects, m.Warn) if "is ignored" in warned.text]

    options: dict[str, Any] = {option: "s3://bucket/other"}
    run = Harness("ab", **options)
    assert not ignored("first"), "the run has no checkpoint"
    run.save(10)
    assert not ignored("first")
    (text,) = ignored("second")
    assert text.startswith(f"The run goes on from its own step 10: {option} is ignored")
    assert not ignored("second")


def test_without_a_named_checkpoint_nothing_is_ignored() -> None:
    run = Harness("ab")
    run.open("ab")
    run.save(10)
    effects = run.feed(run.group("ab", owner="second", dead_owner="driver"))
    assert of(effects, m.StartSession) and not of(effects, m.Warn)


def test_a_group_resumes_from_a_commit_that_was_in_flight() -> None:
    run = Harness("ab", keep_last=1)
    run.open("ab")
    run.save(10)
    run.store_mode = "held"
    run.save(20)
    assert not run.feed(run.group("ab")), "the log may get a newer checkpoint"
    effects = run.confirm()
    resume = one(effects, m.StartSession).plan.resume
    assert resume is not None and resume.checkpoint.step == 20
    assert live_steps(run) == [20]
    assert {d.attempt for d in of(effects, m.Delete)}.isdisjoint({resume.checkpoint.id.attempt})


def test_what_a_group_resumes_from_is_not_retired_before_it_trains() -> None:
    run = Harness("ab", keep_last=1)
    run.open("ab")
    run.save(10, copies=False)
    run.tick(61)
    run.save(20)
    run.feed(run.group("ab"))
    run.feed(run.restored("a"), run.restored("b", damage=["x"]))  # nothing older is left
    run.open("ab")
    attempt = run.attempt(30)
    run.save(30)
    run.feed(run.group("ab"))
    effects = run.tick(1000)
    assert not of(effects, m.Delete) and attempt.attempt in run.machine.history.checkpoints


def test_two_groups_that_open_at_once_get_one_session_and_a_sound_log() -> None:
    run = Harness("ab")
    run.store_mode = "held"
    run.feed(run.group("ab", token="one"))
    effects = run.feed(run.group("b", token="two"))
    assert [f.token for f in of(effects, m.Fail)] == ["one"]
    start = one(run.confirm(), m.StartSession)
    assert (start.tokens, start.plan.world_size) == (("two",), 1)
    assert [op.session for op in run.records if isinstance(op, r.Session)] == [1, 2]
    assert run.start_coordinator() and run.machine.is_open, "anyone can read the log"


# -- the log's answers -------------------------------------------------------------------------------


def test_an_unknown_append_is_tried_again_with_the_same_bytes() -> None:
    run = Harness("ab")
    run.open("ab")
    run.store_mode = "answers lost"
    effects = run.save(10)
    first = one(effects, m.Append).record
    assert not of(effects, m.NotifyOutcome), "not acknowledged"
    assert "did not take record" in one(effects, m.Warn).text
    run.store_mode = "ok"
    assert not run.tick(1)
    effects = run.tick(1)
    assert one(effects, m.Append).record == first
    assert one(effects, m.NotifyOutcome).level is Level.REPLICATED


def test_a_record_of_another_coordinator_fences_this_one() -> None:
    run = Harness("ab")
    run.open("ab")
    run.save(5)
    run.feed(run.group("ab"))
    run.feed(run.restored("a"))
    run.feed(m.FinishRequested(token="finish"))
    run.store.objects[record_file(run.machine.history.next_seq)] = b"another's"
    effects = run.save(10)
    assert isinstance(one(effects, m.StepDown).error, Fenced)
    assert {f.token for f in of(effects, m.Fail)} == {"restored-a", "finish"}
    assert all(isinstance(f.error, Fenced) for f in of(effects, m.Fail))
    assert not of(effects, m.NotifyOutcome)

    assert not run.machine.is_open
    assert not run.tick(1000)
    assert not run.feed(m.NodesSeen(live=frozenset()), run.copied(run.attempt(20), "a", "b"))
    (fail,) = run.feed(run.group("ab", token="late"))
    assert isinstance(fail, m.Fail) and fail.token == "late" and isinstance(fail.error, Fenced)


def test_while_the_store_is_silent_at_most_two_commits_wait() -> None:
    run = Harness("ab", keep_last=10)
    run.open("ab")
    run.store_mode = "silent"
    effects = [*run.save(10)]  # in flight
    for step in (20, 30, 40, 50):
        effects += run.save(step)
        effects += run.tick(2)
    assert [p.attempt.step for p in dropped(effects)] == [20, 30]
    assert all(isinstance(p.error, Unavailable) for p in dropped(effects))
    run.store_mode = "ok"
    effects = [*run.tick(2)]
    assert [step for step, _, _ in commits(effects)] == [10, 40, 50]
    assert [p.attempt.step for p in of(effects, m.NotifyOutcome)] == [10, 40, 50]


# -- retention ---------------------------------------------------------------------------------------


def test_retention_keeps_the_last_and_retires_only_by_the_log() -> None:
    run = Harness("ab", keep_last=2)
    run.open("ab")
    first = run.attempt(10)
    run.save(10)
    run.save(20)
    run.store_mode = "held"
    assert not of(run.save(30), m.Delete)
    effects = run.confirm(hold_next=True)
    assert ops(effects) == [r.Retired(attempt=first.attempt, reason="no policy keeps it")]
    assert not of(effects, m.Delete), "the record is not confirmed"

    deletes = of(run.confirm(), m.Delete)
    assert [d.place for d in deletes] == ["a", "b", m.REMOTE]
    assert {d.directory for d in deletes} == {first.directory}


def many_to_retire(keep: int = 1) -> Harness:
    """Return a run with 5 checkpoints, of which the next decision retires all but `keep`; the log is held."""
    run = Harness("ab", keep_last=10)
    run.open("ab")
    for step in range(10, 60, 10):
        run.save(step)
    run.machine.options = replace(run.machine.options, keep_last=keep)
    run.store_mode = "held"
    run.save(60)
    return run


def test_checkpoints_that_are_retired_together_are_deleted_together() -> None:
    run = many_to_retire()
    found = []
    while run.held:
        deletes = of(run.confirm(hold_next=True), m.Delete)
        found.append(len({delete.attempt for delete in deletes}))
    assert [num for num in found if num] == [5] and len(found) > 5


def test_a_slow_store_does_not_keep_what_is_retired_on_disk() -> None:
    run = many_to_retire()
    run.confirm(hold_next=True)  # the commit
    assert not of(run.confirm(hold_next=True), m.Delete) and not of(run.tick(GATHER_S / 2), m.Delete)
    assert len({delete.attempt for delete in of(run.tick(GATHER_S), m.Delete)}) == 1


def test_a_checkpoint_is_collected_when_all_places_have_answered() -> None:
    run = Harness("ab", keep_last=1)
    run.open("ab")
    first = run.attempt(10)
    run.save(10)
    deletes = of(run.save(20), m.Delete)
    ended = [m.DeleteEnded(attempt=first.attempt, place=d.place, error=None) for d in deletes]
    assert not run.feed(m.DeleteEnded(attempt=first.attempt, place="a", error="busy"))
    assert not run.feed(*ended[:-1], ended[0])
    assert ops(run.feed(ended[-1])) == [r.Collected(attempt=first.attempt)]
    assert not run.feed(*ended)
    assert run.checkpoint(first).state == "collected"


def test_a_failed_delete_is_ordered_again_and_a_dead_node_forgotten() -> None:
    run = Harness("ab", keep_last=1)
    run.open("ab")
    first = run.attempt(10)
    run.save(10)
    run.save(20)
    run.feed(m.DeleteEnded(attempt=first.attempt, place=m.REMOTE, error=None))
    run.feed(m.DeleteEnded(attempt=first.attempt, place="a", error="busy"))
    assert [d.place for d in of(run.tick(31), m.Delete)] == ["a"], "b is still at it"
    run.feed(m.DeleteEnded(attempt=first.attempt, place="a", error=None))
    assert ops(run.lose("b")) == [r.Collected(attempt=first.attempt)]


def test_a_new_coordinator_finishes_the_deletes_of_the_old_one() -> None:
    run = Harness("ab", keep_last=1)
    run.open("ab")
    first = run.attempt(10)
    run.save(10)
    run.save(20)
    assert r.Retired(attempt=first.attempt, reason="no policy keeps it") in run.records
    effects = [*run.start_coordinator(), *run.tick(31)]
    assert {d.place for d in of(effects, m.Delete)} == {"a", "b", m.REMOTE}


def test_the_newest_of_each_level_stays() -> None:
    run = Harness("ab", keep_last=1, remote_every=3)
    run.open("ab")
    run.save(10)
    run.save(20)
    run.drain_all(run.save(30))
    for step in (40, 50):
        run.save(step)
    run.save(60, copies=False)
    run.tick(61)
    levels = {c.step: c.level for c in run.machine.history.live()}
    assert levels == {30: Level.DURABLE, 50: Level.REPLICATED, 60: Level.LOCAL}


def test_a_promotion_on_its_way_protects_its_checkpoint() -> None:
    """The newest durable checkpoint may be older than the last `keep_last` by the time it is durable."""
    run = Harness("ab", keep_last=1, remote_every=1000)
    run.open("ab")
    run.save(10)
    done = run.drain_all(run.feed(m.FinishRequested(token="t")))
    assert of(done, m.Reply)
    run.save(20)
    slow = run.attempt(20)
    drained = [e for d in of(run.feed(m.FinishRequested(token="u")), m.Drain) for e in run.drained(d)]
    assert of(drained, m.WriteDescription)
    run.save(30)
    run.store_mode = "held"
    run.save(40)  # its commit is in flight ...
    run.feed(m.DescriptionWritten(attempt=slow, error=None))  # ... when step 20 becomes durable
    run.confirm()
    assert 20 in [c.step for c in run.machine.history.live() if c.level is Level.DURABLE]


def test_strays_are_deleted_only_after_the_first_commit_of_the_session() -> None:
    run = Harness("ab")
    run.open("ab")
    stray = run.attempt(5)
    run.stored(stray, "a")  # on its disk, never reported
    run.save(10)
    effects = [*run.open("ab"), *run.tick(1000)]
    assert not of(effects, m.DeleteLocalOrphans)
    effects = [*run.save(20)]
    assert of(effects, m.DeleteLocalOrphans) == [
        m.DeleteLocalOrphans(node_id="a", directories=(stray.directory,))
    ]
    assert not of(run.save(30), m.DeleteLocalOrphans)


# -- draining ----------------------------------------------------------------------------------------


def test_every_kth_commit_is_drained() -> None:
    run = Harness("ab", remote_every=2)
    run.open("ab")
    assert [bool(of(run.save(step), m.Drain)) for step in (10, 20, 30, 40)] == [False, True, False, True]


def test_a_drain_is_described_when_complete_and_then_durable() -> None:
    run = Harness("ab", remote_every=1)
    run.open("ab")
    effects = run.save(10)
    attempt = run.attempt(10)
    first, second = of(effects, m.Drain)
    assert [(d.node_index, d.node_id) for d in (first, second)] == [(0, "a"), (1, "b")]
    assert not run.drained(first)
    assert not run.drained(first), "twice is harmless"
    write = one(run.drained(second), m.WriteDescription)
    assert write.checkpoint == run.checkpoint(attempt)
    effects = run.feed(m.DescriptionWritten(attempt=attempt, error=None))
    assert ops(effects) == [r.Promote(attempt=attempt.attempt, level=Level.DURABLE, replicas=1)]
    assert one(effects, m.NotifyOutcome).level is Level.DURABLE


def test_a_drain_goes_to_another_holder_when_its_node_fails_or_dies() -> None:
    run = Harness("ab", remote_every=1)
    run.open("ab")
    first, second = of(run.save(10), m.Drain)
    effects = [*run.drained(first, error="no route"), *run.tick(1)]
    assert "no route" in one(effects, m.Warn).text and not of(effects, m.Drain)
    again = one(run.tick(1), m.Drain)
    assert (again.node_index, again.node_id) == (0, "b")
    moved = of(run.lose("b"), m.Drain)
    assert [(d.node_index, d.node_id) for d in moved] == [(0, "a"), (1, "a")]
    assert not run.drained(second), "of the dead node"
    assert run.drain_all(moved)
    assert run.checkpoint(run.attempt(10)).level is Level.DURABLE


def test_a_drain_without_a_source_does_not_hold_up_the_others() -> None:
    run = Harness("abc", replicas=0, remote_every=1, inventory_wait_s=0)
    run.open("ab")
    run.drain_all(run.save(10))
    for step in (20, 30, 40):
        run.save(step)  # b dies with its fragment before it is drained
    run.lose("b")
    run.open("ac")
    effects = [*run.save(50), *run.tick(100)]
    fresh = [drain for drain in of(effects, m.Drain) if drain.attempt.step == 50]
    assert len(fresh) == 2, "or nothing of this run becomes durable any more"


def test_finish_drains_the_newest_and_then_replies() -> None:
    run = Harness("ab", remote_every=1000)
    run.open("ab")
    run.save(10)
    effects = run.feed(m.FinishRequested(token="finish"))
    assert len(of(effects, m.Drain)) == 2 and not of(effects, m.Reply)
    effects = run.drain_all(effects)
    reply = one(effects, m.Reply)
    assert reply == m.Reply(token="finish", value=run.checkpoint(run.attempt(10)))
    assert of(run.feed(m.FinishRequested(token="again")), m.Reply)


def test_finish_without_a_checkpoint_replies_at_once() -> None:
    run = Harness("ab")
    run.open("ab")
    assert run.feed(m.FinishRequested(token="finish")) == (m.Reply(token="finish", value=None),)


def test_finish_waits_for_the_save_under_way() -> None:
    run = Harness("ab")
    run.open("ab")
    attempt = run.attempt(10)
    run.feed(run.stored(attempt, "a"))
    assert not run.feed(m.FinishRequested(token="finish"))
    effects = run.feed(run.stored(attempt, "b"), run.copied(attempt, "a", "b"), run.copied(attempt, "b", "a"))
    assert of(run.drain_all(effects), m.Reply)


# -- the whole thing, with node machines -------------------------------------------------------------


def test_a_run_from_start_to_durable_through_its_nodes() -> None:
    run = Cluster("ab", ranks_per_node=2, keep_last=2)
    run.settle()
    run.feed(run.group("ab"))
    run.settle()
    assert set(run.replies) == {"restored-1-a", "restored-1-b"}
    for step in (10, 20, 30):
        run.capture(step)
        run.settle()
    run.feed(m.FinishRequested(token="finish"))
    run.settle()
    assert live_steps(run) == [20, 30]
    assert run.checkpoint(run.attempt(30)).level is Level.DURABLE
    assert "finish" in run.replies
    assert all(set(disk.folders) == {run.attempt(s).attempt for s in (20, 30)} for disk in run.disks.values())


@pytest.mark.parametrize("node", ["a", "b"])
def test_a_node_loss_restores_the_newest_from_its_peer(node: str) -> None:
    run = Cluster("abc")
    run.settle()
    run.feed(run.group("ab"))
    run.settle()
    for step in (10, 20):
        run.capture(step)
        run.settle()
    run.lose(node)
    run.settle()
    run.feed(run.group("abc".replace(node, "")))
    run.settle()
    assert run.plan.resume is not None and run.plan.resume.checkpoint.step == 20
    run.capture(30)
    run.settle()
    assert [c.step for c in run.machine.history.lineage()] == [10, 20, 30]


def test_an_attempt_of_another_run_is_not_taken() -> None:
    run = Harness("ab")
    run.open("ab")
    foreign = make_attempt(run_uid="0" * 32, session=1, step=10, attempt=0)
    stored = m.NodeStored(
        attempt=AttemptId(run_uid="0" * 32, session=1, step=10, attempt=foreign.attempt),
        node_index=0,
        node_id="a",
        fragment=file_entry(foreign, fragment_file(0, 2)),
        size_bytes=200,
        replicated=("same",),
        metrics=None,
    )
    assert dropped(run.feed(stored))
