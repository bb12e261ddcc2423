"""Callers that open groups: several worker groups that join one, and launchers that wait for each other."""

from __future__ import annotations

import pytest

from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.values import GroupNode, SessionPlan
from ray_ckpt.engine.groups import OWNER_GONE_S, PARTS_WAIT_S, group_nodes
from ray_ckpt.engine.launchers import LOOK_EVERY_S, OWNER_DEAD_S
from ray_ckpt.engine.ports import GroupRequested, LauncherSeen, OwnerChecked, PartRequested, ServiceEnding
from ray_ckpt.errors import CheckpointError, RunInUse, Unavailable
from ray_ckpt.preemption.notice import Notice
from ray_ckpt.types import GroupPart, LaunchTimes
from tests.core.driver import RUN_UID, START_S
from tests.engine.driver import NO_ANSWER, Story

PARTS = (GroupPart(name="actor", world_size=2), GroupPart(name="critic", world_size=1))


def join(
    story: Story,
    token: str,
    part: str,
    nodes: str,
    parts: tuple[GroupPart, ...] = PARTS,
    owner: str = "me",
) -> None:
    story.host.handle(
        PartRequested(token=token, parts=parts, part=part, nodes=tuple(nodes), resume="auto", owner=owner)
    )


def replied(story: Story, token: str) -> SessionPlan:
    plan = story.ports.replies[token]
    assert isinstance(plan, SessionPlan)
    return plan


def error_of(story: Story, token: str) -> CheckpointError:
    error = story.ports.replies[token]
    assert isinstance(error, CheckpointError)
    return error


def test_the_times_of_a_launch_are_in_the_history() -> None:
    story = Story("ab")
    nodes = story.harness.group("ab").nodes
    launch = LaunchTimes(noticed_at_s=1.0, previous_ended_at_s=2.0, started_at_s=3.0)
    story.host.handle(GroupRequested(token="1", nodes=nodes, resume="auto", owner="me", launch=launch))
    info = story.host.machine.history.session
    assert info is not None and replied(story, "1").session == info.session
    assert (info.noticed_at_s, info.previous_ended_at_s, info.started_at_s) == (1.0, 2.0, 3.0)


# -- parts -------------------------------------------------------------------------------------------


def test_ranks_are_in_the_order_of_the_parts_whichever_joins_first() -> None:
    story = Story("abcd")
    join(story, "1", "critic", "c")
    join(story, "2", "critic", "d")  # a part that comes again replaces itself
    assert not story.ports.replies and story.host.groups.is_wanted
    join(story, "3", "actor", "ab")
    plan = replied(story, "3")
    assert {rank: node.node_id for node in plan.nodes for rank in node.ranks} == {0: "a", 1: "b", 2: "d"}
    assert replied(story, "1") is replied(story, "2") is plan
    assert not story.host.groups.is_wanted


def test_all_parts_get_the_error_of_the_group() -> None:
    story = Story("abc")
    story.request("other", owner="other")
    join(story, "1", "critic", "c")
    join(story, "2", "actor", "ab")
    story.tick(OWNER_GONE_S)
    assert all(isinstance(error_of(story, token), RunInUse) for token in "12")


def test_a_part_that_has_given_up_is_no_longer_counted() -> None:
    story = Story("abc")
    join(story, "1", "critic", "c")
    story.tick(PARTS_WAIT_S)
    with pytest.raises(Unavailable, match="the parts actor have not joined"):
        raise error_of(story, "1")
    join(story, "2", "actor", "ab")
    assert "2" not in story.ports.replies


def test_parts_of_another_division_replace_the_waiting_ones() -> None:
    story = Story("ab")
    join(story, "1", "critic", "a")
    join(story, "2", "all", "ab", parts=(GroupPart(name="all", world_size=2),))
    assert isinstance(error_of(story, "1"), Unavailable)
    assert replied(story, "2").world_size == 2


def test_ranks_by_node() -> None:
    assert group_nodes(["a", "b", "a"]) == (
        GroupNode(node_id="a", ranks=(0, 2)),
        GroupNode(node_id="b", ranks=(1,)),
    )


# -- two launchers -----------------------------------------------------------------------------------


def test_a_launcher_waits_until_the_other_is_found_dead() -> None:
    story = Story()
    story.request("1", owner="first")
    story.request("2", owner="second")
    story.tick(1.0)
    assert "2" not in story.ports.replies and story.ports.looked_for[-1] == "first"
    story.dead.add("first")
    story.tick(1.0)
    assert replied(story, "2").owner == "second"


def test_a_launcher_that_lives_keeps_the_run() -> None:
    story = Story()
    story.request("1", owner="first")
    story.request("2", owner="second")
    story.tick(OWNER_GONE_S)
    assert isinstance(error_of(story, "2"), RunInUse)
    assert story.host.machine.view.owner == "first"


def test_a_launcher_is_refused_before_it_starts_its_processes() -> None:
    story = Story()
    story.request("1", owner="first")
    story.host.handle(OwnerChecked(token="2", owner="first"), OwnerChecked(token="3", owner="second"))
    assert story.ports.replies["2"] is None and "3" not in story.ports.replies
    story.tick(OWNER_GONE_S)
    assert isinstance(error_of(story, "3"), RunInUse)


def test_no_group_opens_before_the_group_at_work_is_found() -> None:
    """A second launcher would take the run from a living one while a restarted coordinator recovers."""
    story = Story()
    story.request("1", owner="first")
    story.ports.calls.clear()
    story.silent = {"b"}
    story.recover(replied(story, "1"))
    story.silent = set()
    story.request("2", owner="second")
    assert story.host.is_recovering and "2" not in story.ports.replies
    opening = next(call for call in story.ports.calls if call.node == "b")
    story.answer(opening, NO_ANSWER)
    assert not story.host.is_recovering and story.host.machine.view.owner == "first"
    assert {node for node, _ in story.sent(n.CoordinatorReturned)} == {"a"}
    assert [node for node, _ in story.sent(n.SessionStarted)] == ["a"], "its agent is new"
    story.tick(OWNER_GONE_S)
    assert isinstance(error_of(story, "2"), RunInUse)


def test_a_service_that_ends_takes_no_group() -> None:
    story = Story()
    story.silent = {"b"}
    story.request("1")
    join(story, "2", "actor", "ab")
    story.host.handle(ServiceEnding())
    story.request("3")
    for token in "123":
        with pytest.raises(Unavailable, match="being stopped"):
            raise error_of(story, token)


# -- signals -----------------------------------------------------------------------------------------


def test_a_signal_to_a_process_of_another_run_is_neither_passed_on_nor_forgotten() -> None:
    story = Story()
    story.host.notices.add("a", Notice("sigterm", "", START_S + 25), START_S, "another")
    story.request("1")
    story.tick()
    seen = [event for event in story.seen_events if isinstance(event, m.NodesSeen)]
    assert seen and not any(event.draining or event.left_s for event in seen)
    assert story.host.notices.nodes("another") == {"a"}


def test_a_new_group_gets_no_signal_to_a_process_of_the_last_one() -> None:
    story = Story()
    story.request("1")
    story.host.notices.add("a", Notice("sigterm", "", START_S + 25), START_S, RUN_UID)
    story.tick()
    assert [event for event in story.seen_events if isinstance(event, m.NodesSeen)][-1].draining == {"a"}
    story.request("2")
    assert [event for event in story.seen_events if isinstance(event, m.NodesSeen)][-1].draining == set()


# -- the death of a launcher -------------------------------------------------------------------------


def test_a_launcher_that_stays_dead_has_its_session_ended() -> None:
    story = Story()
    story.request("1", owner="first")
    story.host.notices.add("a", Notice("sigterm", "", START_S + 25), START_S, RUN_UID)
    story.tick(LOOK_EVERY_S)
    assert story.host.notices.nodes(RUN_UID) == {"a"}
    story.dead.add("first")
    story.tick(LOOK_EVERY_S)
    assert not story.host.notices.nodes(RUN_UID), "the processes of the group got the signal"
    story.tick(OWNER_DEAD_S - 1.0)
    assert not story.ended()
    story.tick(LOOK_EVERY_S)
    assert [op.cause for op in story.ended()] == ["launcher"]


def test_the_death_of_a_job_ends_no_session() -> None:
    """A job may end long before its detached actors."""
    story = Story()
    story.request("1", owner="job")
    seen = LauncherSeen(owner="job", is_alive=False, ends_runs=False)
    story.unknown.add("job")
    for _ in range(6):
        story.tick(LOOK_EVERY_S)
        story.host.handle(seen)
    assert not story.ended()
