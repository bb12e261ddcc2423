"""The host of a run: effects become calls, answers become events, and callers are answered once."""

from __future__ import annotations

import errno
from collections.abc import Set
from dataclasses import replace

import pytest

from ray_ckpt.config import RunOptions
from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.values import GroupPlaces, SessionPlan
from ray_ckpt.engine.answers import DRAIN_SLACK_S, drain_bound_s
from ray_ckpt.engine.idle_agents import IdleAgents
from ray_ckpt.engine.opened_nodes import FAILED_AGAIN_S, SLOW_NODE_S
from ray_ckpt.engine.ports import (
    AgentDied,
    Answered,
    ExitRefused,
    Failure,
    GroupFound,
    OpenOnNode,
    RunOpened,
    UpdatePeer,
)
from ray_ckpt.engine.run_host import INVENTORY_AGAIN_S, TAKE_OVER_AGAIN_S
from ray_ckpt.errors import ConfigError, StoragePathError, Unavailable
from ray_ckpt.types import AttemptId, ParityGroup
from tests.engine.driver import EMPTY, NO_ANSWER, Story, trained

IDLE_S = RunOptions().agent_idle_s


def test_a_group_gets_its_plan_when_all_nodes_have_it() -> None:
    story = Story()
    story.silent_orders = {n.SessionStarted}
    story.request("1")
    first, second = story.calls(n.SessionStarted)
    story.answer(first)
    assert "1" not in story.ports.replies
    story.answer(second)
    story.answer(second)  # an answer that comes twice
    assert story.ports.replies["1"] == story.host.machine.plan


def test_a_group_fails_when_a_node_does_not_take_the_plan() -> None:
    story = Story()
    story.silent_orders = {n.SessionStarted}
    story.request("1")
    story.answer(story.calls(n.SessionStarted)[0], NO_ANSWER)
    assert isinstance(story.ports.replies["1"], Unavailable)


def test_a_refused_order_makes_the_coordinator_step_down_and_end() -> None:
    story = trained()
    story.failures = {"b": Failure(text="it obeys another", epoch=99)}
    story.host.handle(AgentDied(node="b"))
    assert story.ports.ends_process is True


@pytest.mark.parametrize("checks", [False, True])
def test_a_node_without_the_storage_path_counts_when_the_run_is_opened_anew(checks: bool) -> None:
    story = Story()
    story.failures = {"b": Failure(text="not there", error=StoragePathError("not there"))}
    story.host.handle(RunOpened(token="open", checks_storage=checks))
    assert isinstance(story.ports.replies["open"], StoragePathError) == checks
    assert story.host.nodes.opened == (set() if checks else {"a"})


def test_an_error_of_a_nodes_configuration_fails_the_group() -> None:
    story = Story()
    story.failures = {"b": Failure(text="no zstd", error=ConfigError("no zstd"))}
    story.request("1")
    assert isinstance(story.ports.replies["1"], ConfigError)


BAD_DISK = Failure(text="EIO", error=OSError(errno.EIO, "the disk is broken"))


def test_an_error_of_a_node_that_is_not_of_the_group_ends_no_restart() -> None:
    story = trained("abc")
    story.failures = {"c": BAD_DISK}
    story.host.handle(RunOpened(token="open", checks_storage=True))
    assert story.ports.replies["open"] is None
    story.request("again", "ab")
    assert isinstance(story.ports.replies["again"], SessionPlan)
    assert story.host.nodes.opened == {"a", "b"}
    story.request("elsewhere", "ac")
    assert story.ports.replies["elsewhere"] is BAD_DISK.error, "its own nodes must be in order"


def test_a_node_with_an_error_fails_the_first_group_of_a_run() -> None:
    """The user is there, and learns it before the run depends on the node."""
    story = Story("abc")
    story.failures = {"c": BAD_DISK}
    story.request("1", "ab")
    assert story.ports.replies["1"] is BAD_DISK.error


def test_a_restart_waits_only_a_while_for_nodes_that_are_not_of_the_group() -> None:
    story = trained("abcd")
    story.silent = {"b", "c", "d"}
    story.request("again", "ab")
    story.tick(SLOW_NODE_S)
    assert "again" not in story.ports.replies, "b is of the group"
    story.silent = set()
    late = story.calls(OpenOnNode)[-4:]
    story.answer(next(call for call in late if call.node == "b"))
    assert "again" not in story.ports.replies
    story.tick()
    assert isinstance(story.ports.replies["again"], SessionPlan)
    story.tick()
    assert story.host.nodes.opened == set("abcd"), "the others join when they answer"
    story.answer(next(call for call in late if call.node == "c"))


def test_each_restart_waits_only_a_while_for_a_node_that_hangs() -> None:
    story = trained("abc")
    story.silent = {"c"}
    for token in ("2", "3", "4"):
        story.request(token)
        assert token not in story.ports.replies
        story.tick(SLOW_NODE_S)
        assert isinstance(story.ports.replies[token], SessionPlan)
        story.restore("ab")
        for call in story.calls(OpenOnNode):
            if call.node == "c":
                story.answer(call, Failure(text="its agent does not answer"))
    story.silent = set()
    story.tick()
    assert story.host.nodes.opened == {"a", "b", "c"}


def test_a_restart_waits_for_agents_that_are_being_started() -> None:
    """Otherwise the group's copies are placed without them, for all of its session."""
    story = trained("ab")
    story.nodes.add("c")
    story.silent = {"c"}
    story.request("again", "ab")
    story.tick(SLOW_NODE_S)
    assert "again" not in story.ports.replies


def test_the_copies_of_a_node_with_an_error_in_a_later_inventory_still_count() -> None:
    story = trained("abc")
    story.failures = {"c": BAD_DISK}
    story.harness_effect(m.RequestInventory(token=""))
    story.tick(INVENTORY_AGAIN_S)
    assert story.host.nodes.opened == {"a", "b", "c"}


def test_a_node_with_an_error_is_tried_again_after_a_while() -> None:
    story = trained("abc")
    story.failures = {"c": BAD_DISK}
    story.request("again", "ab")
    story.tick()
    assert story.host.nodes.opened == {"a", "b"}
    count = len(story.calls(OpenOnNode))
    story.tick(FAILED_AGAIN_S / 2)
    assert len(story.calls(OpenOnNode)) == count
    story.tick(FAILED_AGAIN_S)
    assert len(story.calls(OpenOnNode)) == count + 1
    story.failures = {}
    story.tick(FAILED_AGAIN_S)
    assert story.host.nodes.opened == {"a", "b"}, "the pause is twice as long"
    story.tick(FAILED_AGAIN_S)
    assert story.host.nodes.opened == {"a", "b", "c"}


def test_the_first_group_of_a_run_waits_for_all_nodes() -> None:
    story = Story("abc")
    story.silent = {"c"}
    story.request("1", "ab")
    story.tick(SLOW_NODE_S)
    assert "1" not in story.ports.replies


def test_an_inventory_is_taken_again_after_a_while() -> None:
    story = trained()
    story.host.handle(m.NodesSeen(live=frozenset("ab")))
    count = len(story.calls(OpenOnNode))
    story.host.apply(m.Ticked(now_s=story.now_s, wall_s=0.0))
    story.harness_effect(m.RequestInventory(token="1"))
    story.tick(INVENTORY_AGAIN_S / 2)
    assert len(story.calls(OpenOnNode)) == count
    story.tick(INVENTORY_AGAIN_S)
    assert len(story.calls(OpenOnNode)) == count + 2


def test_a_recovery_is_tried_again_after_an_error() -> None:
    story = Story()
    story.request("1")
    plan = story.host.machine.plan
    assert plan is not None
    story.failures = {"b": Failure(text="no zstd", error=ConfigError("no zstd"))}
    story.recover(plan)
    assert story.host.is_recovering
    story.failures = {}
    story.tick(TAKE_OVER_AGAIN_S)
    assert not story.host.is_recovering


@pytest.mark.parametrize("report", ["NodeStored", "ExitRefused"])
def test_a_group_that_the_coordinator_does_not_know_is_found_by_what_its_agents_send(report: str) -> None:
    story = trained()
    plan, stored = story.host.machine.plan, story.harness.stored(story.harness.attempt(3), "b")
    assert plan is not None
    story.restart()
    assert story.host.machine.plan is None
    story.plans = {"b": plan}
    story.ports.calls.clear()
    story.host.handle(stored if report == "NodeStored" else ExitRefused(node="b"))
    assert story.host.machine.plan == plan
    assert [node for node, _ in story.sent(OpenOnNode)] == ["b", "a", "b"], "b joins, then the group is found"
    assert [node for node, _ in story.sent(n.SessionStarted)] == ["a"], "b has it"


def test_a_group_is_found_by_what_its_agents_send_to_a_coordinator_that_has_not_opened_the_run() -> None:
    story = trained()
    plan, stored = story.host.machine.plan, story.harness.stored(story.harness.attempt(3), "b")
    assert plan is not None
    story.restart(is_opened=False)
    story.tick()
    story.ports.calls.clear()
    story.host.handle(stored)
    assert not story.host.nodes.is_ready, "no agent has a plan, so the node alone is not counted as the run"
    assert story.host.nodes.opened == set()
    story.plans = {"b": plan}
    story.ports.calls.clear()
    story.host.handle(stored)
    assert story.host.machine.plan == plan
    assert [node for node, _ in story.sent(OpenOnNode)] == ["b", "a", "b"], "b joins, then the group is found"


def test_a_group_that_a_rank_reports_is_found_unless_a_group_is_known_or_the_run_has_ended() -> None:
    story = trained()
    plan = story.host.machine.plan
    assert plan is not None
    story.ports.calls.clear()
    story.host.handle(GroupFound(plan=plan))
    assert not story.ports.calls, "it is known"
    story.restart()
    story.host.handle(GroupFound(plan=plan))
    assert story.host.machine.plan == plan
    assert {node for node, _ in story.sent(n.SessionStarted)} == {"a", "b"}
    story.host.handle(m.FinishRequested(token="end", ends_group=True))
    story.tick(1.0)
    story.ports.calls.clear()
    story.host.handle(GroupFound(plan=plan))
    assert not story.ports.calls, "it has ended"


def ended(story: Story) -> list[tuple[str, tuple[int, int]]]:
    """Return the nodes that were ordered to end a session, with the session, and forget the orders."""
    found = [(node, order.session_key) for node, order in story.sent(n.SessionEnded)]
    story.ports.calls.clear()
    return found


def regrouped(silent: Set[str] = frozenset()) -> tuple[Story, SessionPlan]:
    """Return a story whose group on a and b has ended, with its plan; a group on a begins to restore."""
    story = trained("abc")
    first = story.host.machine.plan
    assert first is not None
    story.plans, story.silent = {"a": first, "b": first}, {*silent}
    story.request("2", nodes="a")
    return story, first


def test_a_node_without_ranks_of_the_group_ends_its_session_once_the_group_has_its_state() -> None:
    story, first = regrouped()
    story.tick(1.0)
    assert not ended(story), "a group with b may follow, and restore from its memory"
    story.failures = {"b": NO_ANSWER}
    story.restore("a")
    story.tick(1.0)
    story.tick(1.0)
    assert ended(story) == [("b", first.session_key)] * 2, "until b has answered"
    story.failures = {}
    story.silent_orders = {n.SessionEnded}
    story.tick(1.0)
    story.tick(1.0)
    (order,) = story.calls(n.SessionEnded)
    assert ended(story) == [("b", first.session_key)], "the order is on its way"
    story.answer(order)
    for _ in range(3):
        story.tick(1.0)
    assert not ended(story)


def test_the_memory_of_an_agent_that_died_needs_no_order() -> None:
    story, first = regrouped()
    story.failures = {"b": Failure(text="its agent has died", is_dead=True)}
    story.restore("a")
    for _ in range(3):
        story.tick(1.0)
    assert ended(story) == [("b", first.session_key)]


def test_a_node_that_joins_while_a_newer_group_restores_keeps_the_memory_of_the_older_one() -> None:
    story, first = regrouped(silent={"b"})
    story.tick(SLOW_NODE_S + 1.0)
    story.tick(1.0)
    assert story.host.machine.plan is not None and story.host.machine.plan.session == 2
    late = [call for call in story.calls(OpenOnNode) if call.node == "b"][-1]
    story.silent = set()
    story.host.handle(Answered(to=late, value=replace(EMPTY, session_key=first.session_key)))
    assert [order.frees for _, order in story.sent(n.SessionEnded)] == [False]
    story.ports.calls.clear()
    story.restore("a")
    story.tick(1.0)
    assert [order.frees for _, order in story.sent(n.SessionEnded)] == [True]


def test_a_restarted_coordinator_ends_older_sessions_too_and_no_node_that_takes_part_again() -> None:
    story, first = regrouped()
    second = story.host.machine.plan
    assert second is not None and second != first
    story.plans["a"] = second
    story.recover(second)
    story.tick(1.0)
    assert not ended(story), "it restores"
    story.restore("a")
    story.tick(1.0)
    assert ended(story) == [("b", first.session_key)]
    story.request("3", nodes="ab")
    third = story.host.machine.plan
    assert third is not None and third.session > second.session
    story.restore("ab")
    for _ in range(3):
        story.tick(1.0)
    assert not ended(story)


def test_a_node_with_a_new_agent_gets_the_session_and_its_peers_the_address() -> None:
    story = trained()
    story.ports.calls.clear()
    story.host.handle(AgentDied(node="b"), AgentDied(node="b"))
    assert [node for node, _ in story.sent(OpenOnNode)] == ["b"]
    assert {node for node, _ in story.sent(n.SessionStarted)} == {"b"}
    assert {node for node, _ in story.sent(UpdatePeer)} == {"a"}


@pytest.mark.parametrize("saves", [False, True])
def test_after_the_end_a_run_is_opened_only_where_an_upload_needs_an_agent(saves: bool) -> None:
    story = trained()
    if saves:
        story.commit(3)
    for _ in range(2):
        story.host.handle(m.OwnerDied(owner="me"))
    story.tick(1.0)
    assert story.host.machine.view.end_cause == "launcher" and story.sent(n.RunReleased)
    story.ports.calls.clear()
    story.host.handle(AgentDied(node="b"))
    assert bool(story.sent(OpenOnNode)) == saves


def test_a_member_gets_the_session_though_its_new_agent_does_not_find_the_storage_path() -> None:
    story = trained()
    story.failures = {"b": Failure(text="not there", error=StoragePathError("not there"))}
    story.ports.calls.clear()
    story.host.handle(AgentDied(node="b"))
    story.failures = {}
    assert [node for node, _ in story.sent(n.SessionStarted)] == ["b"]
    story.host.handle(story.harness.stored(story.harness.attempt(3), "b"))
    assert [node for node, _ in story.sent(OpenOnNode)] == ["b", "b"], "it is opened again at its next save"


def test_an_agent_is_known_by_its_run_and_by_its_session_where_the_group_is() -> None:
    story = trained("abc")
    nodes, uid, plan = story.host.nodes, story.host.machine.history.run_uid, story.host.machine.plan
    assert plan is not None and {node.node_id for node in plan.nodes} == {"a", "b"}
    assert nodes.is_known("a", {uid: plan}) and nodes.is_known("c", {uid: None})
    assert not nodes.is_known("a", {uid: None}), "a new agent there has no session"
    assert not nodes.is_known("c", {}), "another run has started it"


def test_a_node_that_does_not_answer_is_tried_again_and_one_with_an_error_is_not() -> None:
    story = trained()
    story.nodes |= {"c", "d"}
    story.failures = {"c": NO_ANSWER, "d": Failure(text="no zstd", error=ConfigError("no zstd"))}
    story.tick(1.0)
    story.tick(1.0)
    opened = [node for node, _ in story.sent(OpenOnNode)]
    assert (opened.count("c"), opened.count("d")) == (2, 1)


def test_agents_release_a_run_once_it_has_ended_however_late() -> None:
    """Its launcher may have gone when its last checkpoint became durable."""
    story = trained()
    story.tick(1.0)
    story.host.handle(m.FinishRequested(token="end", ends_group=True))
    story.tick(1.0)
    story.tick(1.0)
    released = n.RunReleased(session_key=(1, 1), is_finished=True, epoch=1)
    assert story.sent(n.RunReleased) == [("a", released), ("b", released)]
    story.request("2")
    story.tick(1.0)
    story.host.handle(m.FinishRequested(token="failed", ends_group=True, has_failed=True))
    story.tick(1.0)
    assert [order.is_finished for _, order in story.sent(n.RunReleased)] == [True, True, False, False]


@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "training"])
def test_nodes_get_no_calls_while_nothing_is_saved(is_idle: bool) -> None:
    """The host sends none by itself: in a large cluster each periodic message to all nodes costs a core."""
    story = trained()
    story.tick(1.0)
    if is_idle:
        story.host.handle(m.FinishRequested(token="end", ends_group=True, has_failed=True))
        story.tick(1.0)
        assert story.sent(n.RunReleased)
    story.ports.calls.clear()
    story.ports.looked_for.clear()
    for _ in range(1_000):
        story.tick(3.6)
    assert not story.ports.calls
    assert len(story.ports.looked_for) == (0 if is_idle else 333), "a check of the launcher, every third tick"


def test_an_order_to_a_node_without_an_agent_fails_at_once() -> None:
    story = trained()
    delete = m.Delete(attempt="x", directory="x", place="gone")
    story.harness_effect(delete)  # its folder is an orphan for the next group
    assert not story.sent(n.DeleteOrdered)


def test_the_death_of_an_agent_on_a_node_without_ranks_is_noticed() -> None:
    """Such as a node that holds copies only: no rank there reports it."""
    story = trained("abc")
    story.failures = {"c": Failure(text="dead", is_dead=True)}
    story.ports.calls.clear()
    story.harness_effect(m.Delete(attempt="x", directory="x", place="c"))
    assert story.ports.revived == ["c"]
    story.host.handle(AgentDied(node="c"))
    assert [node for node, _ in story.sent(OpenOnNode)] == ["c"]
    assert story.ports.revived == ["c"], "the order to open the run starts an agent by itself"


def test_a_group_that_starts_again_gets_no_plans_that_the_coordinator_knows() -> None:
    """A plan grows with the group, so those of all nodes would grow with its square."""
    story = trained()
    plan = story.host.machine.plan
    assert plan is not None
    story.plans = dict.fromkeys("ab", plan)
    story.ports.calls.clear()
    story.request("again")
    orders = [call.order for call in story.calls(OpenOnNode)]
    assert [order.known for order in orders if isinstance(order, OpenOnNode)] == [plan.session_key] * 2
    assert story.host.machine.plan is not plan


def test_a_plan_that_was_known_when_the_inventory_was_requested_is_requested_again() -> None:
    story = trained()
    plan = story.host.machine.plan
    assert plan is not None
    story.restart()
    story.silent = {"b"}
    story.host.handle(AgentDied(node="b"))
    joins = story.calls(OpenOnNode)[-1]
    story.silent, story.plans = set(), {"b": plan}
    story.host.handle(Answered(to=joins, value=replace(EMPTY, session_key=plan.session_key)))
    assert story.host.machine.plan == plan


def test_the_group_is_not_told_of_the_address_of_a_new_node() -> None:
    story = trained()
    story.ports.calls.clear()
    story.nodes |= {"c"}
    story.tick(1.0)
    assert "c" in story.host.nodes.opened and not story.sent(UpdatePeer)
    story.host.nodes.opened -= {"b"}  # a coordinator that has found the group without a node of it
    story.host.handle(AgentDied(node="b"))
    assert {node for node, _ in story.sent(UpdatePeer)} == {"a"}
    story.ports.calls.clear()
    story.host.handle(AgentDied(node="c"))
    assert {node for node, _ in story.sent(UpdatePeer)} == {"a", "b"}


def test_the_death_of_an_agent_that_drains_is_noticed() -> None:
    story = trained()
    story.commit(10)
    story.failures = {"a": Failure(text="dead", is_dead=True)}
    checkpoint = story.host.machine.history.lineage()[-1]
    story.harness_effect(m.Drain(attempt=checkpoint.id, node_index=0, node_id="a"))
    assert story.ports.revived == ["a"]
    assert drain_bound_s(checkpoint, RunOptions()) > DRAIN_SLACK_S


def test_a_computation_may_take_as_long_as_its_bytes() -> None:
    """At 100 MB/s; it is not ordered again meanwhile."""
    story = trained()
    group = ParityGroup(members=(0, 1), parity=1)
    places = GroupPlaces(group=group, fragments=(("a",), ("b",)), parities=((), ()))
    attempt = AttemptId(run_uid="0" * 32, epoch=1, session=1, step=10, attempt="x")
    code = m.Code(
        attempt=attempt,
        num_nodes=2,
        node_index=0,
        node_id="a",
        is_parity=True,
        places=places,
        read_bytes=360 * 10**9,
    )
    for rate in (None, 1 << 20):
        story.host.machine.options = RunOptions(replicate_bytes_per_s=rate)
        story.harness_effect(code)
    usual, slow = (call.bound_s for call in story.ports.calls if call.work is code)
    assert usual > 360e9 / 100e6
    assert slow > 360e9 / (1 << 20)


# -- idle agents -------------------------------------------------------------------------------------


def test_an_agent_ends_when_no_run_needs_its_node() -> None:
    story, idle = trained(), IdleAgents()
    story.nodes |= {"c"}
    story.tick(1.0)
    assert idle.take(story.nodes, [story.host], story.now_s) == ()
    story.tick(IDLE_S + 1.0)
    assert idle.take(story.nodes, [story.host], story.now_s) == ("c",)
    count = len(story.calls(OpenOnNode))
    story.tick(1.0)
    assert len(story.calls(OpenOnNode)) == count, "only the next group starts an agent there"
    story.request("2")
    assert "c" in story.host.nodes.opened


def test_no_agent_ends_while_a_group_opens() -> None:
    """An agent could end between the inventory and the plan, and its group would fail."""
    story, idle = Story(), IdleAgents()
    assert idle.take(story.nodes, [story.host], story.now_s) == ()
    story.silent = {"b"}
    story.request("1")
    story.now_s += IDLE_S + 1.0
    assert idle.take(story.nodes, [story.host], story.now_s) == ()


def test_no_agent_ends_while_a_run_is_opened_whose_log_is_not_read_yet() -> None:
    idle, idle_s = IdleAgents(), RunOptions().agent_idle_s
    assert idle.take({"a"}, [], 0.0) == ()
    assert idle.take({"a"}, [], idle_s + 1.0, is_opening=True) == ()
    assert idle.take({"a"}, [], idle_s + 2.0) == (), "it was needed a second ago"
    assert idle.take({"a"}, [], 2 * idle_s + 3.0) == ("a",)
