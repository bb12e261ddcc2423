"""The reasons not to stop a service: groups, and needed checkpoints that are on its nodes only."""

from __future__ import annotations

from ray_ckpt.engine.ports import OwnerChecked
from ray_ckpt.engine.stopping import objections, steps_text
from tests.core.driver import START_S
from tests.engine.driver import Story


def reasons(story: Story, *, dead_owner: str = "") -> tuple[str, ...]:
    return objections(story.host, "gpt", dead_owner=dead_owner, wall_s=START_S + story.now_s)


def test_nothing_stops_the_end_of_a_service_that_is_not_needed() -> None:
    story = Story()
    assert reasons(story) == ()
    story.request("1", owner="me")
    story.restore("ab")
    assert reasons(story, dead_owner="me") == ()


def test_a_group_at_work_and_checkpoints_on_nodes_only_stop_the_end() -> None:
    story = Story()
    story.request("1", owner="me")
    assert reasons(story) == ("run gpt is restoring on 2 rank(s)",)
    story.restore("ab")
    assert reasons(story) == ("run gpt is training on 2 rank(s)",)
    assert reasons(story, dead_owner="another") == reasons(story), "it has opened the run since"
    story.commit(10)
    assert reasons(story, dead_owner="me") == ("run gpt has step 10 in the cluster only",)


def test_a_launcher_that_waits_stops_the_end() -> None:
    story = Story()
    story.silent = {"b"}
    story.request("1")
    assert reasons(story) == ("run gpt is being opened",)
    story = Story()
    story.request("1", owner="first")
    story.dead.add("first")
    story.unknown.add("first")
    story.host.handle(OwnerChecked(token="2", owner="second"))
    assert reasons(story, dead_owner="first") == ("run gpt is being opened",)


def test_many_steps_are_named_by_the_last() -> None:
    assert steps_text((5,)) == "step 5" and steps_text((5, 6)) == "steps 5, 6"
    assert steps_text(range(30), most=2) == "steps 28 more and 28, 29"
