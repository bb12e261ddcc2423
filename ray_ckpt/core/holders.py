"""The registry of copies on nodes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Set
from itertools import chain

from ray_ckpt.core.parity_files import ParityFiles, computed_members, fatal_nodes, lost_members, tolerance
from ray_ckpt.core.values import GroupPlaces, Inventory
from ray_ckpt.format.names import attempt_of
from ray_ckpt.types import CheckpointInfo, Level, ParityGroup


class Holders:
    """The live nodes that hold a complete and fsynced copy of each fragment of each attempt.

    `parity` has the nodes with parity files, from which fragments that no node holds can be computed.
    """

    def __init__(self) -> None:
        self.live: frozenset[str] = frozenset()
        self.parity = ParityFiles()
        self.bad_remote: dict[str, set[int]] = {}  # attempt -> damaged fragments on the storage path
        self.suspect_remote: dict[str, set[int]] = {}  # attempt -> those that may share damaged files there
        self._nodes: dict[str, dict[int, set[str]]] = {}  # attempt -> fragment -> nodes
        self._fragments: dict[str, dict[str, set[int]]] = {}  # the same as attempt -> node -> fragments
        self._watches: list[set[str]] = []
        self._tried: dict[str, set[str]] = {}  # attempt -> nodes that may have files without a complete copy
        self._lacking: dict[str, int] = {}  # attempt -> fragment with too few copies for the last `tolerates`
        self._taken: dict[str, set[tuple[int, str]]] = {}  # attempt -> damaged copies that were removed
        self._taken_s: dict[str, dict[tuple[int, str], float]] = {}  # and when, also after `expect`
        self._disks: dict[str, str] = {}  # disk -> the node on which the disk was last found
        self._left: set[str] = set()  # nodes whose disk is on another node now: ignore their late reports

    def add(self, attempt: str, node_index: int, node: str) -> None:
        if not self.counts(node):
            return
        self._nodes.setdefault(attempt, {}).setdefault(node_index, set()).add(node)
        self._fragments.setdefault(attempt, {}).setdefault(node, set()).add(node_index)

    def counts(self, node: str) -> bool:
        """Return False for a node whose reports are late, because the node is dead."""
        return node in self.live and node not in self._left

    def report_parity(self, attempt: str, group: ParityGroup, member: int, node: str) -> None:
        """Add a parity file that is reported, unless it was found to be bad before the report came."""
        if self.counts(node):
            self.parity.report(attempt, group, member, node)

    def of(self, attempt: str, node_index: int) -> frozenset[str]:
        return frozenset(self._nodes.get(attempt, {}).get(node_index, ()))

    def fragments(self, attempt: str) -> Mapping[int, Set[str]]:
        """Return the nodes that hold each fragment; fragments that no node ever held are missing."""
        return self._nodes.get(attempt, {})

    def anywhere(self, attempt: str) -> frozenset[str]:
        """Return the nodes that hold any part of an attempt."""
        return frozenset(self._fragments.get(attempt, ())) | self.parity.anywhere(attempt)

    def note_tried(self, attempt: str, node: str) -> None:
        """Note that some files of an attempt, or all, may be on a node that does not count as a holder.

        A copy to the node failed, a scrub took the copy away, or the node lists an incomplete folder.
        """
        self._tried.setdefault(attempt, set()).add(node)

    def may_have(self, attempt: str) -> frozenset[str]:
        """Return the live nodes that hold any part of an attempt, or may have other files of it."""
        return self.live & self.anywhere(attempt).union(self._tried.get(attempt, ()))

    def num_copies(self, attempt: str, num_nodes: int) -> int:
        """Return the number of nodes any of which may be lost: -1 if a fragment can be read from no node.

        It is the least number of extra copies of a fragment, or what a parity group tolerates.
        """
        fragments, groups = self._nodes.get(attempt, {}), self.parity.groups(attempt)
        if not groups:
            return -1 if len(fragments) < num_nodes else min(map(len, fragments.values())) - 1
        found = [tolerance(places) for places in self.places(attempt)]
        coded = {member for group in groups for member in group.members}
        found += [len(fragments.get(index, ())) - 1 for index in range(num_nodes) if index not in coded]
        return min(found)

    def tolerates(self, attempt: str, num_nodes: int, losses: int) -> bool:
        """Return True if `num_copies` is at least `losses`.

        The search starts at the fragment that had too few copies in the last search, because each copy that
        arrives causes a search.
        """
        first = self._lacking.get(attempt, 0)
        for index in chain(range(first, num_nodes), range(first)):
            group = self.parity.group_of(attempt, index)
            if group is None:
                is_enough = len(self.of(attempt, index)) > losses
            else:  # the first member stands for its group
                is_enough = index != group.members[0] or tolerance(self._places(attempt, group)) >= losses
            if not is_enough:
                if index != first:  # an entry of 0 would make two states of one in `testing.exhaustive`
                    self._lacking[attempt] = index
                return False
        return True

    def places(self, attempt: str) -> tuple[GroupPlaces, ...]:
        """Return the nodes that hold the files of each parity group of an attempt."""
        return tuple(self._places(attempt, group) for group in self.parity.groups(attempt))

    def places_of(self, attempt: str, member: int) -> GroupPlaces | None:
        """Return the nodes that hold the files of a member's parity group; None if it is in no group."""
        group = self.parity.group_of(attempt, member)
        return None if group is None else self._places(attempt, group)

    def _places(self, attempt: str, group: ParityGroup) -> GroupPlaces:
        return GroupPlaces(
            group=group,
            fragments=tuple(tuple(sorted(self.of(attempt, member))) for member in group.members),
            parities=tuple(tuple(sorted(self.parity.of(attempt, member))) for member in group.members),
        )

    def has_all(self, checkpoint: CheckpointInfo) -> bool:
        """Return True if every part of a checkpoint can be read from live nodes, or computed there."""
        return self.has(checkpoint.id.attempt, range(checkpoint.num_nodes))

    def has(self, attempt: str, fragments: Collection[int]) -> bool:
        """Return True if these fragments can be read from live nodes, or computed there."""
        if self.holds(attempt, fragments):
            return True
        computed = computed_members(self.places(attempt))
        return all(self.of(attempt, index) for index in fragments if index not in computed)

    def holds_all(self, checkpoint: CheckpointInfo) -> bool:
        """Return True if live nodes hold every part of a checkpoint."""
        return self.holds(checkpoint.id.attempt, range(checkpoint.num_nodes))

    def holds(self, attempt: str, fragments: Collection[int]) -> bool:
        """Return True if live nodes hold these fragments, as they are read for an upload."""
        return all(self.of(attempt, index) for index in fragments)

    def fatal(self, attempt: str, num_nodes: int) -> dict[int, frozenset[str]]:
        """Return the nodes whose loss alone loses a fragment, by fragment; no nodes if it is lost already.

        Fragments that no loss of one node loses are missing.
        """
        held = {index: self.of(attempt, index) & self.live for index in range(num_nodes)}
        found = {index: nodes for index, nodes in held.items() if len(nodes) < 2}
        for places in self.places(attempt) if found else ():
            lost, fatal = lost_members(places), fatal_nodes(places)
            for member in places.group.members:
                found.pop(member, None)
                if member in lost or member in fatal:
                    found[member] = frozenset() if member in lost else fatal[member]
        return found

    def can_serve(self, checkpoint: CheckpointInfo) -> bool:
        """Return True if every part of a checkpoint can be read from a live node or the storage path."""
        if checkpoint.level < Level.DURABLE:
            return self.has_all(checkpoint)
        return self.has(checkpoint.id.attempt, self.bad_remote.get(checkpoint.id.attempt, ()))

    def to_upload(self, checkpoint: CheckpointInfo) -> Collection[int]:
        """Return the fragments that a drain uploads: all, if nodes have all or the storage path has none.

        Else those that are damaged on the storage path, or if none is known to be, those that may be.
        """
        if checkpoint.level < Level.DURABLE or self.has_all(checkpoint):
            return range(checkpoint.num_nodes)
        attempt = checkpoint.id.attempt
        return self.bad_remote.get(attempt, set()) or self.suspect_remote.get(attempt, set())

    def can_upload(self, checkpoint: CheckpointInfo) -> bool:
        """Return True if live nodes have what a drain uploads, or can compute it."""
        return self.has(checkpoint.id.attempt, self.to_upload(checkpoint))

    def needs_upload(self, checkpoint: CheckpointInfo) -> bool:
        """Return True if the storage path has no copy, or one that may be damaged and nodes can replace."""
        is_unsafe = checkpoint.id.attempt in self.unsafe_remote
        return checkpoint.level < Level.DURABLE or (is_unsafe and self.can_upload(checkpoint))

    @property
    def unsafe_remote(self) -> set[str]:
        """Attempts whose copy on the storage path is damaged or may be; their copies on nodes stay."""
        return self.bad_remote.keys() | self.suspect_remote.keys()

    def count(self, attempt: str, node: str) -> int:
        """Return the number of the attempt's fragments that a node holds."""
        return len(self._fragments.get(attempt, {}).get(node, ()))

    def expect(self, attempt: str, node_index: int, node: str) -> None:
        """Note that a node is to make a copy anew, of intact bytes: a report of it counts again."""
        self._taken.get(attempt, set()).discard((node_index, node))

    def report(self, attempt: str, node_index: int, node: str) -> None:
        """Add a copy that is reported, unless a scrub has taken it away before the report came."""
        if (node_index, node) not in self._taken.get(attempt, ()):
            self.add(attempt, node_index, node)

    def watch(self) -> set[str]:
        """Return a set to which attempts are added whose copies are removed; the caller takes them out."""
        self._watches.append(set())
        return self._watches[-1]

    def _removed(self, attempt: str) -> None:
        for attempts in self._watches:
            attempts.add(attempt)

    def remove(self, attempt: str, node_index: int, node: str, now_s: float) -> None:
        """Remove a copy from the registry, because the copy is damaged."""
        self._removed(attempt)
        self.note_tried(attempt, node)  # the other files stay there
        self._taken.setdefault(attempt, set()).add((node_index, node))
        self._taken_s.setdefault(attempt, {})[node_index, node] = now_s
        held = self._fragments.get(attempt, {})
        if node_index in held.get(node, ()):
            self._nodes[attempt][node_index].discard(node)
            held[node].discard(node_index)
            if not held[node]:
                del held[node]

    def remove_parity(self, attempt: str, member: int, node: str, now_s: float) -> None:
        """Remove a parity file from the registry, because the file is damaged."""
        self.note_tried(attempt, node)
        self.parity.take_away(attempt, member, node, now_s)

    def distrust_parity(self, attempt: str, group: ParityGroup) -> None:
        """Do not count the parity files of a group any more, because they give wrong bytes."""
        for member in group.members:
            for node in self.parity.of(attempt, member):
                self.note_tried(attempt, node)
        self.parity.distrust(attempt, group)

    def remove_all(self, attempt: str, node: str) -> None:
        """Remove the files of an attempt on a node from the registry, because they are evicted."""
        self._removed(attempt)
        self._tried.get(attempt, set()).discard(node)
        for node_index in self._fragments.get(attempt, {}).pop(node, ()):
            self._nodes[attempt][node_index].discard(node)
        self.parity.remove_all(attempt, node)

    def forget(self, attempt: str) -> None:
        self._nodes.pop(attempt, None)
        self._fragments.pop(attempt, None)
        self._tried.pop(attempt, None)
        self._lacking.pop(attempt, None)
        self._taken.pop(attempt, None)
        self._taken_s.pop(attempt, None)
        self.parity.forget(attempt)

    def seen(self, live: frozenset[str]) -> None:
        """Set the live nodes."""
        self.live = live

    def lose(self, nodes: frozenset[str]) -> None:
        for attempt, held in self._fragments.items():
            for node in nodes & held.keys():
                self.remove_all(attempt, node)
        self.parity.lose(nodes)

    def learn(self, inventories: Mapping[str, Inventory], run_uid: str, *, asked_s: float = math.inf) -> None:
        """Replace the registered copies on these nodes by the inventories of the nodes.

        A damaged copy that was removed after the nodes were asked, at `asked_s`, is in an older inventory.
        """
        inventories = {n: found for n, found in inventories.items() if n not in self._left}
        self.lose(frozenset(inventories))
        self.live |= frozenset(inventories)
        for node, inventory in inventories.items():
            before = self._disks.get(inventory.disk, node)
            if inventory.disk and before != node:  # the machine returned before its loss was noticed
                self.lose(frozenset({before}))
                self._left.add(before)
            self._disks[inventory.disk] = node
        for node, inventory in inventories.items():
            for held in inventory.fragments:
                name, index = held.attempt.attempt, held.node_index
                taken_s = self._taken_s.get(name, {}).get((index, node), -math.inf)
                if held.attempt.run_uid == run_uid and taken_s < asked_s:
                    self.add(name, index, node)
            for coded in inventory.parities:
                name, index = coded.attempt.attempt, coded.node_index
                is_counted = coded.attempt.run_uid == run_uid and self.counts(node)
                if is_counted and not self.parity.learn(name, coded.group, index, node, asked_s):
                    self.note_tried(name, node)
            complete = {held.attempt.attempt for held in inventory.fragments}
            complete |= {coded.attempt.attempt for coded in inventory.parities}
            for name in {*map(attempt_of, inventory.directories)} - complete:
                self.note_tried(name, node)

    def table(self) -> dict[str, dict[int, tuple[str, ...]]]:
        """Return a map of attempt -> fragment -> nodes, for status."""
        return {a: {i: tuple(sorted(n)) for i, n in f.items()} for a, f in self._nodes.items()}
