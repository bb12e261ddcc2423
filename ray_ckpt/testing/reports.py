"""The copies that coordinators know by reports of nodes, for the oracle."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import TypeAlias

from ray_ckpt.testing.parts import Node
from ray_ckpt.testing.stores import Copy, Disk

Reports: TypeAlias = dict[tuple[str, str], set[tuple[int, str]]]
"""(coordinator, attempt) -> fragments, each with a node."""


@dataclass(slots=True)
class KnownCopies:
    """The copies that nodes have reported to each coordinator, and which of them were deleted since."""

    _stored: Reports = field(default_factory=dict)  # by the nodes of the group
    _all: Reports = field(default_factory=dict)  # also copies, and what was reported before a plan was known
    # (attempt, fragment, node) of copies that were deleted and not reported since
    _deleted: set[tuple[str, int, str]] = field(default_factory=set)
    _leaving: set[tuple[str, str]] = field(default_factory=set)  # (disk, attempt): inventories leave it out

    def begins(self, coordinator: str) -> None:
        """Forget the reports that a coordinator got without a plan: nodes repeat them after it has one."""
        self._stored = {key: copies for key, copies in self._stored.items() if key[0] != coordinator}

    def stored(self, coordinator: str, attempt: str, index: int, node: str) -> None:
        """Record that a coordinator receives a report of a complete fragment on `node`."""
        self._stored.setdefault((coordinator, attempt), set()).add((index, node))
        self.copied(coordinator, attempt, index, node)

    def copied(self, coordinator: str, attempt: str, index: int, node: str) -> None:
        """Record that a coordinator receives a report of a complete copy on `node`."""
        self._all.setdefault((coordinator, attempt), set()).add((index, node))
        self._deleted.discard((attempt, index, node))

    def inventory_taken(self, disk: Disk, leaving: Set[str]) -> None:
        """Record that an inventory leaves out the attempts in `leaving`, which are being deleted."""
        self._leaving |= {(disk.name, attempt) for attempt in leaving}

    def written(self, disk: Disk, copy: Copy) -> None:
        """Record that a disk has a copy again."""
        self._leaving.discard((disk.name, copy[0]))

    def deleted(self, node: Node, copy: Copy) -> None:
        """Record that a node deletes a copy."""
        self._deleted.add((*copy, node.name))

    def counts(self, coordinators: Set[str], copy: Copy, node: Node) -> bool:
        """Return whether one of these coordinators counts a copy on a node."""
        attempt, index = copy
        if (node.disk.name, attempt) in self._leaving:
            return False
        return any((index, node.name) in self._all.get((name, attempt), ()) for name in coordinators)

    def fragments(self, coordinator: str, attempt: str, live: Set[str] | None) -> set[int]:
        """Return the fragments reported to a coordinator, on `live` nodes that have them still.

        Without `live`, all reports that it ever had count.
        """
        if live is None:
            return {index for index, _ in self._all.get((coordinator, attempt), ())}
        copies = self._stored.get((coordinator, attempt), ())
        return {i for i, node in copies if node in live and (attempt, i, node) not in self._deleted}
