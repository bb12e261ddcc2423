"""A restarted coordinator, until it has found the group at work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ray_ckpt.core import messages as m
from ray_ckpt.core.values import Inventory, SessionPlan
from ray_ckpt.engine.opened_nodes import MAX_FINDS, SLOW_NODE_S
from ray_ckpt.engine.ports import (
    AgentDied,
    Answered,
    Failure,
    GroupFound,
    HostEvent,
    InventoryDue,
    LogAwaited,
    OpenOnNode,
    OwnerChecked,
    RunOpened,
)
from ray_ckpt.engine.run_host import TAKE_OVER_AGAIN_S
from ray_ckpt.errors import ConfigError, Fenced, RunSuperseded
from ray_ckpt.types import CheckpointInfo
from tests.engine.driver import NO_ANSWER, Story, trained

BAD = Failure(text="no zstd", error=ConfigError("no zstd"))


def planned(story: Story) -> SessionPlan:
    plan = story.host.machine.plan
    assert plan is not None
    return plan


def inventories(story: Story, plan: SessionPlan) -> dict[str, Inventory]:
    """Return those of nodes on which the group with this plan is at work, for a coordinator that knows it."""
    disks = story.harness.disks
    return {node: replace(disks[node].inventory(), session_key=plan.session_key) for node in "ab"}


def test_the_calls_of_a_group_wait_until_the_group_is_found() -> None:
    story = trained()
    key = planned(story).session_key
    story.silent = {"b"}
    story.recover(planned(story))
    met = m.BarrierReached(token="barrier", session_key=key, number=7, ranks=(0,))
    story.host.handle(met, m.SalvageRequested(token="salvage"))
    assert not {"barrier", "salvage"} & story.ports.replies.keys()
    story.answer(next(call for call in reversed(story.calls(OpenOnNode)) if call.node == "b"))
    assert not story.host.is_recovering and "barrier" not in story.ports.replies
    story.host.handle(replace(met, token="other", ranks=(1,)))
    for token in ("barrier", "other"):
        assert story.ports.replies[token] == m.BarrierAnswer(missing=())


def test_a_finish_waits_for_the_save_that_only_the_nodes_know() -> None:
    story = trained()
    story.commit(3)
    plan, attempt = planned(story), story.harness.attempt(6)
    for node in "ab":  # their reports do not arrive
        story.harness.stored(attempt, node)
    held = {
        node: replace(story.harness.disks[node].inventory(), session_key=plan.session_key) for node in "ab"
    }
    story.silent = {"a", "b"}
    story.recover(plan)
    story.host.handle(m.FinishRequested(token="finish", ends_group=True))
    story.silent = set()
    for call in story.calls(OpenOnNode)[-2:]:
        story.host.handle(Answered(to=call, value=held[call.node]))
    for _ in range(200):
        story.tick(5.0)
        for work in [work for work in story.ports.works if isinstance(work, m.WriteDescription)]:
            story.ports.works.remove(work)
            story.host.handle(Answered(to=work))
    last = story.ports.replies["finish"]
    assert isinstance(last, CheckpointInfo) and last.step == 6


def test_a_rank_that_waits_for_the_storage_path_waits_until_it_is_known_who_has_its_checkpoint() -> None:
    story = trained()
    story.commit(3)
    plan, attempt = planned(story), story.harness.attempt(3).attempt
    held = {
        node: replace(story.harness.disks[node].inventory(), session_key=plan.session_key) for node in "ab"
    }
    story.silent = {"a", "b"}
    story.recover(plan)
    story.host.handle(m.DrainRequested(token="durable", attempt=attempt, within_s=60.0))
    assert not story.calls(m.Drain) and "durable" not in story.ports.replies
    for call in story.calls(OpenOnNode)[-2:]:
        story.host.handle(Answered(to=call, value=held[call.node]))
    assert {call.node for call in story.calls(m.Drain)} == {"a", "b"}


def test_calls_that_wait_for_a_group_fail_with_their_host() -> None:
    story = trained()
    key = planned(story).session_key
    story.silent = {"b"}
    story.recover(planned(story))
    story.host.handle(m.BarrierReached(token="barrier", session_key=key, number=7, ranks=(0,)))
    fenced = Failure(text="it obeys another", epoch=99)
    story.answer(next(call for call in reversed(story.calls(OpenOnNode)) if call.node == "b"), fenced)
    assert isinstance(story.ports.replies["barrier"], Fenced)


@pytest.mark.parametrize("event", [RunOpened(token="x", checks_storage=False), LogAwaited(token="x")])
def test_a_call_to_a_host_that_has_stepped_down_fails(event: HostEvent) -> None:
    story = trained()
    story.failures = {"b": Failure(text="it obeys another", epoch=99)}
    story.host.handle(AgentDied(node="b"))
    story.host.handle(event, OwnerChecked(token="y", owner="me"))
    assert isinstance(story.ports.replies["x"], Fenced) and isinstance(story.ports.replies["y"], Fenced)


def test_a_group_is_found_although_a_node_that_is_not_of_it_cannot_open_the_run() -> None:
    story = Story("abc")
    story.request("1")
    story.restore("ab")
    plan = planned(story)
    story.failures = {"c": BAD}
    story.recover(plan)
    assert not story.host.is_recovering and planned(story) == plan


def test_only_one_try_to_find_a_group_goes_on() -> None:
    story = Story()
    story.request("1")
    plan = planned(story)
    story.failures = {"b": BAD}
    story.recover(plan)
    for _ in range(MAX_FINDS - 1):
        story.host.handle(GroupFound(plan=plan))
        story.ports.calls.clear()
        story.tick(TAKE_OVER_AGAIN_S)
        assert len(story.calls(OpenOnNode)) == 2, "one round"
    story.failures = {}
    story.tick(TAKE_OVER_AGAIN_S)
    assert not story.host.is_recovering


def test_a_group_goes_on_without_a_node_of_its_own_whose_disk_takes_no_write() -> None:
    """Otherwise no group could open until somebody looks."""
    story = trained("abc")
    plan = planned(story)
    story.failures = {"b": Failure(text="full", error=OSError(28, "No space left on device"))}
    story.recover(plan)
    met = m.BarrierReached(token="barrier", session_key=plan.session_key, number=7, ranks=(0,))
    story.host.handle(met)
    for _ in range(MAX_FINDS - 1):
        story.tick(TAKE_OVER_AGAIN_S)
    assert story.host.is_recovering
    story.tick(TAKE_OVER_AGAIN_S)
    assert not story.host.is_recovering and planned(story) == plan
    assert story.host.nodes.opened == {"a", "c"}
    story.request("2", "ac")
    assert isinstance(story.ports.replies["2"], SessionPlan)


def test_a_group_is_found_although_a_node_that_is_not_of_it_hangs() -> None:
    story = trained("abc")
    plan = planned(story)
    story.silent = {"c"}
    story.recover(plan)
    story.tick(SLOW_NODE_S / 2)
    assert story.host.is_recovering
    story.tick(SLOW_NODE_S)
    assert not story.host.is_recovering and planned(story) == plan
    story.request("2")
    story.tick(SLOW_NODE_S)
    assert isinstance(story.ports.replies["2"], SessionPlan), "c is waited for no longer than before"


def test_a_member_that_hangs_is_waited_for_until_its_call_ends() -> None:
    story = trained("abc")
    story.silent = {"b"}
    story.recover(planned(story))
    story.tick(SLOW_NODE_S)
    assert story.host.is_recovering


def test_a_member_that_is_slow_to_list_its_files_is_not_dead() -> None:
    story = trained()
    attempt = story.harness.attempt(6)
    story.host.handle(story.harness.stored(attempt, "a"))
    story.failures = {"b": NO_ANSWER}
    story.host.handle(RunOpened(token="2", checks_storage=False), OwnerChecked(token="3", owner="other"))
    assert story.host.machine.view.live_nodes == {"a", "b"}
    story.failures = {}
    story.host.handle(story.harness.stored(attempt, "b"))
    assert not isinstance(story.ports.replies.get("2"), RunSuperseded)
    assert story.host.machine.view.live_nodes == {"a", "b"}


def test_a_launcher_that_waits_for_the_run_takes_no_node_from_the_group_that_has_it() -> None:
    story = trained("abc")
    story.failures = {"b": NO_ANSWER, "c": NO_ANSWER}
    story.request("2", owner="other")
    assert story.host.machine.view.live_nodes == {"a", "b", "c"}, "the launcher may be refused"
    story.dead = {"me"}
    story.tick()
    assert story.host.machine.view.owner == "other" and story.host.machine.view.live_nodes == {"a"}


def test_an_inventory_for_a_group_that_is_over_takes_no_node_from_the_next() -> None:
    story = trained()
    story.failures = {"b": NO_ANSWER}
    story.host.handle(InventoryDue(token="over"))
    assert story.host.machine.view.live_nodes == {"a", "b"}


def test_a_node_that_joins_while_others_are_asked_is_not_silent() -> None:
    story = trained()
    story.silent = {"b"}
    story.request("2")
    story.nodes.add("c")
    story.tick()
    story.answer(next(call for call in reversed(story.calls(OpenOnNode)) if call.node == "b"))
    assert story.host.machine.view.live_nodes == {"a", "b", "c"}
