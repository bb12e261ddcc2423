"""The registry of parity groups: which nodes hold the parity files of each attempt, and which make some."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from itertools import combinations

from ray_ckpt.core.messages import Code, CodeEnded
from ray_ckpt.core.values import GroupPlaces
from ray_ckpt.format.parity import is_decodable
from ray_ckpt.types import ParityGroup


class ParityFiles:
    """The parity groups of each attempt, and the live nodes with the parity file of each member.

    The groups of an attempt never change.
    """

    def __init__(self) -> None:
        self._groups: dict[str, list[ParityGroup]] = {}  # by attempt
        self._group_of: dict[str, dict[int, ParityGroup]] = {}  # attempt -> member -> its group
        self._nodes: dict[str, dict[int, set[str]]] = {}  # attempt -> member -> nodes with its parity file
        self._members: dict[str, dict[str, set[int]]] = {}  # the same as attempt -> node -> members
        # orders without an answer: (attempt, member, whether of its parity file) -> node
        self._made: dict[tuple[str, int, bool], str] = {}
        self._wrong: dict[str, set[ParityGroup]] = {}  # attempt -> groups whose files give wrong bytes
        self._unlinked: dict[str, set[ParityGroup]] = {}  # attempt -> groups whose earlier files may be wrong
        # attempt -> (member, node): when a scrub took a file away
        self._taken_s: dict[str, dict[tuple[int, str], float]] = {}
        # attempt -> (member, node) of files that were ordered since they were bad; True: and are made
        self._anew: dict[str, dict[tuple[int, str], bool]] = {}

    def know(self, attempt: str, groups: Iterable[ParityGroup]) -> None:
        """Note the groups of an attempt."""
        known = self._group_of.setdefault(attempt, {})
        for group in groups:
            if known.keys().isdisjoint(group.members):
                known.update(dict.fromkeys(group.members, group))
                self._groups.setdefault(attempt, []).append(group)

    def add(self, attempt: str, group: ParityGroup, member: int, node: str) -> None:
        self.know(attempt, (group,))
        if self._group_of[attempt].get(member) == group:
            self._nodes.setdefault(attempt, {}).setdefault(member, set()).add(node)
            self._members.setdefault(attempt, {}).setdefault(node, set()).add(member)

    def report(self, attempt: str, group: ParityGroup, member: int, node: str) -> None:
        """Add a file that its node has made, unless it was ordered before it was found to be bad."""
        anew = self._anew.get(attempt, {})
        if (member, node) in anew:
            anew[member, node] = True
        elif self._was_bad(attempt, member, node):
            return
        self.add(attempt, group, member, node)

    def learn(self, attempt: str, group: ParityGroup, member: int, node: str, asked_s: float) -> bool:
        """Add a file of an inventory that was asked for at `asked_s`. Return False if the file is bad.

        The files of a wrong group stay on their nodes until they are made anew.
        """
        is_made = self._anew.get(attempt, {}).get((member, node), False)
        is_wrong = self.is_wrong(attempt, member) and not is_made
        if is_wrong or self._taken_s.get(attempt, {}).get((member, node), -math.inf) >= asked_s:
            return False
        self.add(attempt, group, member, node)
        return True

    def is_wrong(self, attempt: str, member: int) -> bool:
        """Return True if the files of a member's group have given wrong bytes."""
        return self.group_of(attempt, member) in self._wrong.get(attempt, ())

    def may_not_link(self, attempt: str, group: ParityGroup) -> None:
        """Note that the files of a group may not be links to those of an earlier save, which may be wrong."""
        self._unlinked.setdefault(attempt, set()).add(group)

    def is_anew(self, attempt: str, member: int) -> bool:
        """Return True if a parity file of a member's group is to be made without links."""
        group = self.group_of(attempt, member)
        return self.is_wrong(attempt, member) or group in self._unlinked.get(attempt, ())

    def _was_bad(self, attempt: str, member: int, node: str) -> bool:
        return self.is_wrong(attempt, member) or (member, node) in self._taken_s.get(attempt, {})

    def distrust(self, attempt: str, group: ParityGroup) -> None:
        """Remove the files of a group that give wrong bytes; only those that are ordered later count."""
        self._wrong.setdefault(attempt, set()).add(group)
        for member in group.members:
            for node in sorted(self.of(attempt, member)):
                self.remove(attempt, member, node)
        anew = self._anew.get(attempt, {})
        self._anew[attempt] = {key: made for key, made in anew.items() if key[0] not in group.members}

    def take_away(self, attempt: str, member: int, node: str, now_s: float) -> None:
        """Remove a damaged file, which a scrub has taken away."""
        self._taken_s.setdefault(attempt, {})[member, node] = now_s
        self._anew.get(attempt, {}).pop((member, node), None)
        self.remove(attempt, member, node)

    def ordered(self, order: Code) -> None:
        """Note that a node makes a file until its answer comes or it is lost."""
        name, member, node = order.attempt.attempt, order.node_index, order.node_id
        self._made[name, member, order.is_parity] = node
        if order.is_parity and self._was_bad(name, member, node):
            self._anew.setdefault(name, {}).setdefault((member, node), False)

    def ended(self, event: CodeEnded) -> None:
        key = event.attempt.attempt, event.node_index, event.is_parity
        if self._made.get(key) == event.node_id:
            del self._made[key]

    def makers_lost(self, lost: Set[str]) -> None:
        """Forget the orders to dead nodes; those to others get their answers, whoever has the run."""
        self._made = {key: node for key, node in self._made.items() if node not in lost}

    def is_made(self, attempt: str, member: int, is_parity: bool) -> bool:
        """Return True while a node makes a member's files, or its parity file."""
        return (attempt, member, is_parity) in self._made

    @property
    def makers(self) -> frozenset[str]:
        """The nodes that make files."""
        return frozenset(self._made.values())

    def groups(self, attempt: str) -> Sequence[ParityGroup]:
        return self._groups.get(attempt, ())

    def group_of(self, attempt: str, member: int) -> ParityGroup | None:
        return self._group_of.get(attempt, {}).get(member)

    def of(self, attempt: str, member: int) -> Set[str]:
        return self._nodes.get(attempt, {}).get(member, frozenset())

    def anywhere(self, attempt: str) -> frozenset[str]:
        """Return the nodes that hold a parity file of an attempt."""
        return frozenset(self._members.get(attempt, ()))

    def share(self, attempt: str, node: str) -> float:
        """Return the size of the attempt's parity files on a node, as a multiple of a member's size."""
        groups = map(
            self._group_of.get(attempt, {}).__getitem__, self._members.get(attempt, {}).get(node, ())
        )
        return sum(group.parity / group.num_data for group in groups)

    def remove(self, attempt: str, member: int, node: str) -> None:
        self._nodes.get(attempt, {}).get(member, set()).discard(node)
        members = self._members.get(attempt, {})
        members.get(node, set()).discard(member)
        if not members.get(node):
            members.pop(node, None)

    def remove_all(self, attempt: str, node: str) -> None:
        for member in self._members.get(attempt, {}).pop(node, ()):
            self._nodes[attempt][member].discard(node)

    def lose(self, lost: Set[str]) -> None:
        for attempt, members in self._members.items():
            for node in lost & members.keys():
                self.remove_all(attempt, node)

    def forget(self, attempt: str) -> None:
        self._groups.pop(attempt, None)
        self._group_of.pop(attempt, None)
        for known in (self._nodes, self._members, self._wrong, self._unlinked, self._taken_s, self._anew):
            known.pop(attempt, None)


def lost_members(places: GroupPlaces, lost_nodes: Set[str] = frozenset()) -> frozenset[int]:
    """Return the members whose files can neither be read nor computed once these nodes are lost."""

    def gone(held: Iterable[tuple[str, ...]]) -> set[int]:
        return {at for at, nodes in enumerate(held) if lost_nodes >= set(nodes)}

    lost = gone(places.fragments)
    if not lost or is_decodable(places.group, lost, gone(places.parities)):
        return frozenset()
    return frozenset(places.group.members[at] for at in lost)


def computed_members(groups: Iterable[GroupPlaces]) -> frozenset[int]:
    """Return the members of groups whose files can be read or computed."""
    return frozenset().union(*(set(places.group.members) - lost_members(places) for places in groups))


def group_nodes(places: GroupPlaces) -> frozenset[str]:
    """Return the nodes that hold a file of a group."""
    return frozenset(node for held in (*places.fragments, *places.parities) for node in held)


def left_places(places: GroupPlaces, survivors: Callable[[Iterable[str]], tuple[str, ...]]) -> GroupPlaces:
    """Return the places of a group that are left on `survivors` of the nodes."""
    return replace(
        places,
        fragments=tuple(map(survivors, places.fragments)),
        parities=tuple(map(survivors, places.parities)),
    )


def tolerance(places: GroupPlaces) -> int:
    """Return the number of nodes, up to the group's parity, any of which may be lost; -1 if a file is lost.

    Copies of members count too: a group without parity files tolerates what its copies do.
    """
    least = min(map(len, places.fragments)) - 1
    if least < places.group.parity and not is_whole(places):
        nodes = sorted(group_nodes(places))
        for count in range(least + 1, places.group.parity + 1):
            if any(lost_members(places, set(lost)) for lost in combinations(nodes, count)):
                return count - 1
    return max(least, places.group.parity)


def is_whole(places: GroupPlaces) -> bool:
    """Return True if each member has a node of its own with its fragment and its parity file."""
    homes = [
        set(held).intersection(coded) for held, coded in zip(places.fragments, places.parities, strict=True)
    ]
    return all(homes) and len(set().union(*homes)) == sum(map(len, homes))


def fatal_nodes(places: GroupPlaces) -> Mapping[int, frozenset[str]]:
    """Return by member the nodes whose loss alone loses the member's files."""
    found: dict[int, set[str]] = {}
    for node in group_nodes(places):
        for member in lost_members(places, {node}):
            found.setdefault(member, set()).add(node)
    return {member: frozenset(nodes) for member, nodes in found.items()}
