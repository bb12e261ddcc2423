"""The registry of copies on nodes."""

from __future__ import annotations

from collections.abc import Mapping, Set

from ray_ckpt.core.values import Inventory
from ray_ckpt.types import CheckpointInfo, Level


class Holders:
    """The live nodes that hold a complete and fsynced copy of each fragment of each attempt."""

    def __init__(self) -> None:
        self.live: frozenset[str] = frozenset()
        self.bad_remote: set[str] = set()  # live attempts whose copy on the storage path is damaged
        self._nodes: dict[str, dict[int, set[str]]] = {}  # attempt -> fragment -> nodes
        self._fragments: dict[str, dict[str, set[int]]] = {}  # the same as attempt -> node -> fragments
        self._tried: dict[str, set[str]] = {}  # attempt -> nodes that may have files of a failed copy
        self._disks: dict[str, str] = {}  # disk -> the node on which the disk was last found
        self._left: set[str] = set()  # nodes whose disk is on another node now: ignore their late reports

    def add(self, attempt: str, node_index: int, node: str) -> None:
        if node not in self.live or node in self._left:
            return  # the report is late: the node is dead
        self._nodes.setdefault(attempt, {}).setdefault(node_index, set()).add(node)
        self._fragments.setdefault(attempt, {}).setdefault(node, set()).add(node_index)

    def of(self, attempt: str, node_index: int) -> frozenset[str]:
        return frozenset(self._nodes.get(attempt, {}).get(node_index, ()))

    def fragments(self, attempt: str) -> Mapping[int, Set[str]]:
        """Return the nodes that hold each fragment; fragments that no node ever held are missing."""
        return self._nodes.get(attempt, {})

    def anywhere(self, attempt: str) -> frozenset[str]:
        """Return the nodes that hold any part of an attempt."""
        return frozenset(self._fragments.get(attempt, ()))

    def note_tried(self, attempt: str, node: str) -> None:
        """Note that a copy to a node failed, so that all or some of its files may be on the node."""
        self._tried.setdefault(attempt, set()).add(node)

    def may_have(self, attempt: str) -> frozenset[str]:
        """Return the live nodes that hold any part of an attempt, or to which a copy was tried."""
        return self.live & self.anywhere(attempt).union(self._tried.get(attempt, ()))

    def num_copies(self, attempt: str, num_nodes: int) -> int:
        """Return the number of extra copies that every fragment has; -1 if a fragment has no copy at all."""
        fragments = self._nodes.get(attempt, {})
        return -1 if len(fragments) < num_nodes else min(map(len, fragments.values())) - 1

    def has_all(self, checkpoint: CheckpointInfo) -> bool:
        """Return True if live nodes hold every part of a checkpoint."""
        return self.num_copies(checkpoint.id.attempt, checkpoint.num_nodes) >= 0

    def can_serve(self, checkpoint: CheckpointInfo) -> bool:
        """Return True if every part of a checkpoint can be read from a live node or the storage path."""
        is_remote = checkpoint.level >= Level.DURABLE and checkpoint.id.attempt not in self.bad_remote
        return is_remote or self.has_all(checkpoint)

    def count(self, attempt: str, node: str) -> int:
        """Return the number of the attempt's fragments that a node holds."""
        return len(self._fragments.get(attempt, {}).get(node, ()))

    def remove(self, attempt: str, node_index: int, node: str) -> None:
        """Remove a copy from the registry, because the copy is damaged."""
        held = self._fragments.get(attempt, {})
        if node_index in held.get(node, ()):
            self._nodes[attempt][node_index].discard(node)
            held[node].discard(node_index)
            if not held[node]:
                del held[node]

    def remove_all(self, attempt: str, node: str) -> None:
        """Remove the copies of an attempt on a node from the registry, because they are evicted."""
        for node_index in self._fragments.get(attempt, {}).pop(node, ()):
            self._nodes[attempt][node_index].discard(node)

    def forget(self, attempt: str) -> None:
        self._nodes.pop(attempt, None)
        self._fragments.pop(attempt, None)
        self._tried.pop(attempt, None)

    def seen(self, live: frozenset[str]) -> None:
        """Set the live nodes."""
        self.live = live

    def lose(self, nodes: frozenset[str]) -> None:
        for attempt, held in self._fragments.items():
            for node in nodes & held.keys():
                self.remove_all(attempt, node)

    def learn(self, inventories: Mapping[str, Inventory], run_uid: str) -> None:
        """Replace the registered copies on these nodes by the inventories of the nodes."""
        self.lose(frozenset(inventories))
        self.live |= frozenset(inventories)
        for node, inventory in inventories.items():
            before = self._disks.get(inventory.disk, node)
            if inventory.disk and before != node:  # the machine returned before its loss was noticed
                self.lose(frozenset({before}))
                self._left = (self._left | {before}) & self.live
            self._left.discard(node)
            self._disks[inventory.disk] = node
        for node, inventory in inventories.items():
            for held in inventory.fragments:
                if held.attempt.run_uid == run_uid:
                    self.add(held.attempt.attempt, held.node_index, node)

    def table(self) -> dict[str, dict[int, tuple[str, ...]]]:
        """Return a map of attempt -> fragment -> nodes, for status."""
        return {a: {i: tuple(sorted(n)) for i, n in f.items()} for a, f in self._nodes.items()}
