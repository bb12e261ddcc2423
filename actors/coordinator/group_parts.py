"""Assemble one training group from several worker groups, such as an actor's and a critic's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from ray_ckpt.actors.messages import Joined
from ray_ckpt.core.values import GroupNode
from ray_ckpt.errors import Unavailable
from ray_ckpt.types import GroupPart

PARTS_WAIT_S = 300.0  # longest wait for the other parts of a group, whose processes may still be starting


class PendingGroup:
    """Parts of a group that wait for the other parts; the last part to arrive opens the group for all."""

    def __init__(self, parts: tuple[GroupPart, ...]) -> None:
        self.parts = parts
        self.nodes: dict[str, tuple[str, ...]] = {}  # part -> the node of each of its ranks
        self._joined: asyncio.Future[Joined] = asyncio.get_running_loop().create_future()

    @property
    def is_open(self) -> bool:
        """True if the group has been opened, or has failed to open."""
        return self._joined.done()

    def add(self, part: str, nodes: tuple[str, ...]) -> bool:
        """Add a part, or replace its earlier entry. Return whether all parts have arrived."""
        self.nodes[part] = nodes
        return len(self.nodes) == len(self.parts)

    async def open(self, open_group: Callable[[tuple[GroupNode, ...]], Awaitable[Joined]]) -> None:
        """Open the group and pass the result, or the error, to all parts."""
        nodes = [node for part in self.parts for node in self.nodes[part.name]]
        try:
            self._joined.set_result(replace(await open_group(group_nodes(nodes)), parts=self.parts))
        except Exception as error:
            self._joined.set_exception(error)

    async def wait(self, part: str, run_name: str) -> Joined:
        """Wait for the other parts. Raise Unavailable, and withdraw `part`, if they do not arrive."""
        try:
            return await asyncio.wait_for(asyncio.shield(self._joined), PARTS_WAIT_S)
        except TimeoutError:
            missing = ", ".join(p.name for p in self.parts if p.name not in self.nodes)
            self.nodes.pop(part, None)  # the group must not open with ranks that have given up
            raise Unavailable(f"Run {run_name}: the parts {missing} have not joined.") from None


def group_nodes(nodes: Sequence[str]) -> tuple[GroupNode, ...]:
    """Return the nodes with their ranks, where rank k runs on `nodes[k]`."""
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    return tuple(GroupNode(node_id=node, ranks=tuple(ranks)) for node, ranks in by_node.items())
