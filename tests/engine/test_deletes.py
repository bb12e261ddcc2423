"""Deletions on nodes: one order for what is decided together, and an answer for each folder."""

from __future__ import annotations

from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.engine.deletes import MAX_DIRECTORIES, NodeDeletes, together
from ray_ckpt.engine.ports import Answered, Failure
from ray_ckpt.format.names import make_attempt
from ray_ckpt.types import AttemptId
from tests.engine.driver import Story, trained

UID = "0" * 32
WARN = m.Warn(text="something else")


def attempt(step: int) -> AttemptId:
    return make_attempt(run_uid=UID, epoch=1, session=1, step=step, attempt=0)


def delete(step: int, place: str) -> m.Delete:
    return m.Delete(attempt=attempt(step).attempt, directory=attempt(step).directory, place=place)


def ended(story: Story) -> list[m.DeleteEnded]:
    return [event for event in story.seen_events if isinstance(event, m.DeleteEnded)]


def test_deletions_on_a_node_are_one_order_and_other_effects_keep_their_order() -> None:
    first, second = delete(10, "a"), delete(20, "a")
    remote = delete(10, m.REMOTE)
    evict = m.Evict(attempt=attempt(30), node_id="a")
    orphans = m.DeleteLocalOrphans(node_id="b", directories=(attempt(40).directory, attempt(20).directory))
    also = delete(20, "b")
    found = list(together((first, WARN, orphans, remote, evict, second, also)))
    assert found == [
        WARN,
        remote,
        NodeDeletes(
            node="a",
            directories=tuple(attempt(step).directory for step in (10, 30, 20)),
            deletes=(first, second),
            evicted=(attempt(30).directory,),
        ),
        NodeDeletes(
            node="b",
            directories=tuple(attempt(step).directory for step in (40, 20)),
            deletes=(also,),
        ),
    ]
    assert next(together((also, orphans))) == found[-1], "a deletion with an answer keeps it"
    assert list(together(())) == []


def test_an_order_is_small_enough_to_be_answered_in_time() -> None:
    deletes = [delete(step, "a") for step in range(2 * MAX_DIRECTORIES + 1)]
    found = [order for order in together(deletes) if isinstance(order, NodeDeletes)]
    assert [len(order.directories) for order in found] == [MAX_DIRECTORIES, MAX_DIRECTORIES, 1]
    assert [delete for order in found for delete in order.deletes] == deletes


def test_each_folder_of_an_order_has_its_own_answer() -> None:
    story = trained()
    story.stuck = {attempt(20).directory}
    story.harness_effect(*(delete(step, "a") for step in (10, 20, 30)))
    ((node, order),) = story.sent(n.DeleteOrdered)
    assert node == "a" and order.directories == tuple(attempt(step).directory for step in (10, 20, 30))
    assert ended(story) == [
        m.DeleteEnded(
            attempt=attempt(step).attempt, place="a", error="the disk failed" if step == 20 else None
        )
        for step in (10, 20, 30)
    ]


def test_an_order_that_fails_has_deleted_nothing_and_a_node_without_an_agent_nothing_to_delete() -> None:
    story = trained()
    story.failures = {"a": Failure(text="no answer")}
    effects = (delete(10, "a"), m.Evict(attempt=attempt(5), node_id="a"), delete(10, "gone"))
    story.harness_effect(*effects)
    assert [node for node, _ in story.sent(n.DeleteOrdered)] == ["a"]
    assert [(event.place, event.error) for event in ended(story)] == [("a", "no answer"), ("gone", None)]


def test_an_order_without_a_deletion_that_waits_has_no_answer() -> None:
    story = trained()
    story.harness_effect(m.Evict(attempt=attempt(5), node_id="a"))
    (call,) = story.calls(n.DeleteOrdered)
    assert call.order == n.DeleteOrdered(
        directories=(attempt(5).directory,), evicted=(attempt(5).directory,), epoch=1
    )
    story.host.handle(Answered(to=call, value={attempt(5).directory: "the disk failed"}))
    assert not ended(story)
