"""Repair of parity groups: compute the files of lost members again, then make missing parity files.

Each member should have a node of its own, its *home*, with its files and its parity file: then one loss costs
the group one member. A lost member is computed first, because a parity file is made from the files of all
other members. If no node is free, it shares one, and moves when a node comes. Repair writes no record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain

from ray_ckpt.core.holders import Holders
from ray_ckpt.core.messages import Code, CodeEnded
from ray_ckpt.core.parity_files import is_whole, lost_members, tolerance
from ray_ckpt.core.placement import domain_of
from ray_ckpt.core.rate_budget import Budget
from ray_ckpt.core.repair import MAX_RETRY_S, RETRY_S
from ray_ckpt.core.values import GroupPlaces
from ray_ckpt.types import CheckpointInfo

MAX_CODING = 2  # at work at a time: each reads the files of a whole group while the group trains


@dataclass(slots=True)
class _Problem:
    """Failures of one file; a node that has failed less often is tried first."""

    blame: Counter[str] = field(default_factory=Counter)  # failures per node
    pause_s: float = RETRY_S  # pause after the next failure
    not_before_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """A file of a group that is to be made."""

    checkpoint: CheckpointInfo
    places: GroupPlaces
    homes: Mapping[int, str]
    member: int
    is_parity: bool
    urgency: tuple[bool, int, int]  # lost members first, by checkpoint and by the losses that are left

    @property
    def at(self) -> int:
        return self.places.group.members.index(self.member)

    @property
    def key(self) -> tuple[str, int, bool]:
        return self.checkpoint.id.attempt, self.member, self.is_parity


class ParityRepairs:
    """Files that are being made for repair, and the failures of earlier tries."""

    def __init__(self) -> None:
        self.deficit = 0  # files that were missing at the last `assign` and can be made
        self._active: set[Code] = set()
        self._problems: dict[tuple[str, int, bool], _Problem] = {}

    def assign(
        self,
        *,
        checkpoints: Sequence[CheckpointInfo],
        read: Sequence[CheckpointInfo],
        holders: Holders,
        domains: Mapping[str, str],
        draining: Set[str],
        budget: Budget | None,
        now_s: float,
    ) -> Iterator[Code]:
        """Yield the files to make now, within the budget if there is one.

        `checkpoints` are in the order of their importance; of those in `read` only lost members are needed.
        """
        attempts = {c.id.attempt for c in (*checkpoints, *read)}
        self._problems = {key: found for key, found in self._problems.items() if key[0] in attempts}
        self._active = {code for code in self._active if code.attempt.attempt in attempts}
        staying = holders.live - draining
        tasks = list(_tasks(checkpoints, holders, staying))
        tasks += _tasks(read, holders, staying, after=len(checkpoints), only_lost=True)
        self.deficit = len(tasks)
        for task in sorted(tasks, key=lambda task: task.urgency):
            if len(self._active) >= MAX_CODING:
                return
            problem = self._problems.get(task.key, _Problem())
            if holders.parity.is_made(*task.key) or now_s < problem.not_before_s:
                continue
            node = self._choose(task, holders.live, staying, domains, problem.blame)
            if node is None:
                continue
            is_anew = task.is_parity and holders.parity.is_anew(task.checkpoint.id.attempt, task.member)
            code = _order(task, node, is_anew=is_anew)
            if budget is not None and not budget.take(code.read_bytes, now_s):
                return
            self._active.add(code)
            yield code

    def _choose(
        self,
        task: _Task,
        live: Set[str],
        staying: Set[str],
        domains: Mapping[str, str],
        blame: Counter[str],
    ) -> str | None:
        """Return the node that makes a file and keeps it; None if no node can."""
        places, load = task.places, Counter(code.node_id for code in self._active)
        held = places.fragments[task.at]
        if task.is_parity:
            home = {task.homes[task.at]} if task.at in task.homes else staying & set(held)
            return min(home, key=lambda n: (blame[n], load[n], n), default=None)
        of_group = (
            c for c in self._active if (c.attempt, c.places.group) == (task.checkpoint.id, places.group)
        )
        coming = {code.node_id for code in of_group}
        used = Counter(chain(*places.fragments, *places.parities, coming))
        taken = Counter(domain_of(node, domains) for node in used)
        shared = coming.union(task.homes.values())
        able = staying - shared if held else staying or live  # a copy on the node of another helps nobody
        return min(
            able,
            key=lambda n: (blame[n], n in shared, used[n], taken[domain_of(n, domains)], load[n], n),
            default=None,
        )

    def ended(self, event: CodeEnded, now_s: float) -> None:
        """Record the end of a computation; the next try of a file that failed waits."""
        for code in list(self._active):
            if code.attempt == event.attempt and _key(code) == _key(event) and code.node_id == event.node_id:
                self._active.remove(code)
                if event.error is None:
                    self._problems.pop(_key(code), None)
                    continue
                problem = self._problems.setdefault(_key(code), _Problem())
                problem.blame[code.node_id] += 1
                problem.not_before_s = now_s + problem.pause_s
                problem.pause_s = min(2 * problem.pause_s, MAX_RETRY_S)

    def lost(self, nodes: Set[str]) -> None:
        """End the work of dead nodes without a pause."""
        self._active = {code for code in self._active if code.node_id not in nodes}


def _key(code: Code | CodeEnded) -> tuple[str, int, bool]:
    return code.attempt.attempt, code.node_index, code.is_parity


def _order(task: _Task, node: str, *, is_anew: bool) -> Code:
    checkpoint, places = task.checkpoint, task.places
    is_copied = bool(places.fragments[task.at])
    num_read = 1 if is_copied else places.group.num_data
    if task.is_parity:
        num_read = places.group.parity  # a part of each member's files for each block of the parity file
    return Code(
        attempt=checkpoint.id,
        num_nodes=checkpoint.num_nodes,
        node_index=task.member,
        node_id=node,
        is_parity=task.is_parity,
        places=places,
        read_bytes=num_read * checkpoint.size_bytes // checkpoint.num_nodes,
        is_anew=is_anew,
    )


def _tasks(
    checkpoints: Sequence[CheckpointInfo],
    holders: Holders,
    staying: Set[str],
    *,
    after: int = 0,
    only_lost: bool = False,
) -> Iterator[_Task]:
    """Yield what the groups of checkpoints lack."""
    for recency, checkpoint in enumerate(checkpoints, start=after):
        for places in holders.places(checkpoint.id.attempt):
            if is_whole(places) and staying >= {*chain(*places.fragments)}:
                continue  # nearly all groups
            homes = _homes(places, staying)
            is_lost = not all(places.fragments)
            left = tolerance(places) if is_lost else 0
            for member, is_parity in _missing(places, homes, staying):
                if is_lost or not only_lost:
                    yield _Task(
                        checkpoint=checkpoint,
                        places=places,
                        homes=homes,
                        member=member,
                        is_parity=is_parity,
                        urgency=(not is_lost, recency, left),
                    )


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
    num_free = len(staying) - len(homes)
    for at, member in enumerate(places.group.members):
        is_sharing = at not in homes and not staying.isdisjoint(places.fragments[at])
        if is_sharing and num_free:
            num_free -= 1
            yield member, False
        has_parity = homes[at] in places.parities[at] if at in homes else places.parities[at]
        if not has_parity and not staying.isdisjoint(places.fragments[at]):
            yield member, True
