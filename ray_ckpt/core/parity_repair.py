"""Repair of parity groups: compute the files of lost members again, then make missing parity files.

Each member should have a node of its own, its *home*, with its files and its parity file: then one loss costs
the group one member. A lost member is computed first, because a parity file is made from the files of all
other members. If no node is free, it shares one, and moves when a node comes. Repair writes no record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain

from ray_ckpt.core.holders import Holders
from ray_ckpt.core.messages import Code, CodeEnded
from ray_ckpt.core.parity_files import is_whole, lost_members
from ray_ckpt.core.placement import domain_of
from ray_ckpt.core.rate_budget import Budget
from ray_ckpt.core.repair import MAX_RETRY_S, RETRY_S
from ray_ckpt.core.values import GroupPlaces
from ray_ckpt.types import CheckpointInfo

MAX_CODING = 2  # at work at a time: each reads the files of a whole group while the group trains


@dataclass(slots=True)
class _Pause:
    """The pause after a failure; the node that failed is the last one that is tried again."""

    node: str
    pause_s: float = RETRY_S
    not_before_s: float = 0.0


class ParityRepairs:
    """Files that are being computed, and the failures of earlier tries."""

    def __init__(self) -> None:
        self.deficit = 0  # files that were missing at the last `assign` and can be computed
        self._active: set[Code] = set()
        self._pauses: dict[tuple[str, int, bool], _Pause] = {}

    @property
    def is_at_work(self) -> bool:
        return bool(self._active)

    def assign(
        self,
        *,
        checkpoints: Sequence[CheckpointInfo],
        holders: Holders,
        domains: Mapping[str, str],
        draining: Set[str],
        budget: Budget,
        now_s: float,
    ) -> Iterator[Code]:
        """Yield the files to make now. `checkpoints` are in the order of their importance."""
        attempts = {c.id.attempt for c in checkpoints}
        self._pauses = {key: pause for key, pause in self._pauses.items() if key[0] in attempts}
        self.deficit, staying = 0, holders.live - draining
        for checkpoint in checkpoints:
            for places in holders.places(checkpoint.id.attempt):
                if is_whole(places) and staying.issuperset(chain(*places.fragments)):
                    continue  # nearly all groups
                homes = _homes(places, staying)
                for member, is_parity in _missing(places, homes, staying):
                    self.deficit += 1
                    key = (checkpoint.id.attempt, member, is_parity)
                    is_at_work = any(_key(code) == key for code in self._active)
                    pause = self._pauses.get(key)
                    is_early = pause is not None and now_s < pause.not_before_s
                    if is_at_work or is_early or len(self._active) >= MAX_CODING:
                        continue
                    code = self._plan(checkpoint, places, member, is_parity, homes, staying, domains)
                    if code is not None and budget.take(code.read_bytes, now_s):
                        self._active.add(code)
                        yield code

    def _plan(
        self,
        checkpoint: CheckpointInfo,
        places: GroupPlaces,
        member: int,
        is_parity: bool,
        homes: Mapping[int, str],
        staying: Set[str],
        domains: Mapping[str, str],
    ) -> Code | None:
        """Return the order to make a file of a group; None if no node can take it."""
        load = Counter(code.node_id for code in self._active)
        pause = self._pauses.get((checkpoint.id.attempt, member, is_parity))
        blamed = pause.node if pause is not None else ""
        held = places.fragments[at := places.group.members.index(member)]
        if is_parity:
            home = {homes[at]} if at in homes else staying & set(held)
            node = min(home, key=lambda n: (n == blamed, load[n], n), default="")
        else:
            of_group = (
                c for c in self._active if (c.attempt, c.places.group) == (checkpoint.id, places.group)
            )
            coming = {code.node_id for code in of_group}
            used = Counter(chain(*places.fragments, *places.parities, coming))
            taken = Counter(domain_of(node, domains) for node in used)
            shared = coming.union(homes.values())
            node = min(
                staying,
                key=lambda n: (n == blamed, n in shared, used[n], taken[domain_of(n, domains)], load[n], n),
                default="",
            )
        num_read = 1 if held and not is_parity else places.group.num_data
        order = Code(
            attempt=checkpoint.id,
            num_nodes=checkpoint.num_nodes,
            node_index=member,
            node_id=node,
            is_parity=is_parity,
            places=places,
            read_bytes=num_read * checkpoint.size_bytes // checkpoint.num_nodes,
        )
        return order if node else None

    def ended(self, event: CodeEnded, now_s: float) -> None:
        """Record the end of a computation; the next try of a file that failed waits."""
        for code in list(self._active):
            if code.attempt == event.attempt and _key(code) == _key(event) and code.node_id == event.node_id:
                self._active.remove(code)
                if event.error is None:
                    self._pauses.pop(_key(code), None)
                    continue
                pause = self._pauses.setdefault(_key(code), _Pause(code.node_id))
                pause.node, pause.not_before_s = code.node_id, now_s + pause.pause_s
                pause.pause_s = min(2 * pause.pause_s, MAX_RETRY_S)

    def lost(self, nodes: Set[str]) -> None:
        """End the work of dead nodes without a pause."""
        self._active = {code for code in self._active if code.node_id not in nodes}


def _key(code: Code | CodeEnded) -> tuple[str, int, bool]:
    return code.attempt.attempt, code.node_index, code.is_parity


def _homes(places: GroupPlaces, staying: Set[str]) -> dict[int, str]:
    """Give members, by position, staying nodes of their own that have their files, as far as possible."""
    homes: dict[int, str] = {}
    for at in sorted(range(places.group.size), key=lambda at: len(places.fragments[at])):
        free = staying & set(places.fragments[at]) - set(homes.values())
        if free:
            homes[at] = min(free, key=lambda node: (node not in places.parities[at], node))
    return homes


def _missing(places: GroupPlaces, homes: Mapping[int, str], staying: Set[str]) -> Iterator[tuple[int, bool]]:
    """Yield the members whose files, or whose parity files, are to be made; the latter if none is lost.

    A member that shares its node is to be made anew for each node that is free. A member on nodes that leave
    is copied by `Repairs`.
    """
    lost = [at for at, nodes in enumerate(places.fragments) if not nodes]
    if lost:
        gone = lost_members(places)
        yield from ((member, False) for at in lost if (member := places.group.members[at]) not in gone)
        return
    num_free = len(staying - set(homes.values()))
    for at, member in enumerate(places.group.members):
        is_sharing = at not in homes and not staying.isdisjoint(places.fragments[at])
        if is_sharing and num_free:
            num_free -= 1
            yield member, False
        has_parity = homes[at] in places.parities[at] if at in homes else places.parities[at]
        if not has_parity:
            yield member, True
