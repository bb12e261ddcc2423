"""Worker groups that join one training group: the last one opens it for all."""

from __future__ import annotations

import asyncio

import pytest

from ray_ckpt.actors.coordinator import group_parts
from ray_ckpt.actors.coordinator.group_parts import PendingGroup
from ray_ckpt.actors.messages import Joined, RunSpec
from ray_ckpt.config import RunOptions
from ray_ckpt.core.values import GroupNode
from ray_ckpt.errors import RunInUse, Unavailable
from ray_ckpt.types import GroupPart

PARTS = (GroupPart(name="actor", world_size=2), GroupPart(name="critic", world_size=1))
SPEC = RunSpec(name="gpt", storage_path="/shared/runs", options=RunOptions())


async def opened(nodes: tuple[GroupNode, ...]) -> Joined:
    ranks = {rank: node.node_id for node in nodes for rank in node.ranks}
    return Joined(run_uid="uid", spec=SPEC, world_size=len(ranks), nodes=ranks)


def test_ranks_are_in_the_order_of_the_parts_whichever_joins_first() -> None:
    async def story() -> Joined:
        group = PendingGroup(PARTS)
        assert not group.add("critic", ("c",))
        assert not group.add("critic", ("d",)), "a part that comes again replaces itself"
        waiting = asyncio.ensure_future(group.wait("critic", "gpt"))
        assert group.add("actor", ("a", "b"))
        await group.open(opened)
        assert group.is_open
        joined = await group.wait("actor", "gpt")
        assert await waiting == joined
        return joined

    joined = asyncio.run(story())
    assert joined.nodes == {0: "a", 1: "b", 2: "d"} and joined.parts == PARTS


def test_all_parts_get_the_error_of_the_group() -> None:
    async def refused(nodes: tuple[GroupNode, ...]) -> Joined:
        raise RunInUse("another launcher has it")

    async def story() -> None:
        group = PendingGroup(PARTS)
        group.add("critic", ("c",))
        group.add("actor", ("a", "b"))
        await group.open(refused)
        for part in ("actor", "critic"):
            with pytest.raises(RunInUse, match="another launcher"):
                await group.wait(part, "gpt")

    asyncio.run(story())


def test_a_part_that_has_given_up_is_no_longer_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_parts, "PARTS_WAIT_S", 0.01)

    async def story() -> None:
        group = PendingGroup(PARTS)
        group.add("critic", ("c",))
        with pytest.raises(Unavailable, match="the parts actor have not joined"):
            await group.wait("critic", "gpt")
        assert not group.add("actor", ("a", "b"))

    asyncio.run(story())


def test_ranks_by_node() -> None:
    assert group_parts.group_nodes(["a", "b", "a"]) == (
        GroupNode(node_id="a", ranks=(0, 2)),
        GroupNode(node_id="b", ranks=(1,)),
    )
