"""Repair of parity groups: compute the files of lost members again, then make missing parity files.

A lost member is computed first, because a parity file is made from the files of all other members. The node
for it holds nothing of the group if there is such a node, so that one loss costs the group one member again.
Its parity file follows on the node that has its files. Repair writes no record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from ray_ckpt.core.holders import Holders
from ray_ckpt.core.messages import Code, CodeEnded
from ray_ckpt.core.parity_files import lost_members
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
        """Yield the files to compute now. `checkpoints` are worth copies and sorted from the newest."""
        attempts = {c.id.attempt for c in checkpoints}
        self._pauses = {key: pause for key, pause in self._pauses.items() if key[0] in attempts}
        self.deficit, staying = 0, holders.live - draining
        load = Counter(code.node_id for code in self._active)
        for checkpoint in checkpoints:
            for places in holders.places(checkpoint.id.attempt):
                for member, is_parity in _missing(places):
                    self.deficit += 1
                    key = (checkpoint.id.attempt, member, is_parity)
                    pause = self._pauses.get(key)
                    is_at_work = any(_key(code) == key for code in self._active)
                    is_early = pause is not None and now_s < pause.not_before_s
                    if is_at_work or is_early or len(self._active) >= MAX_CODING:
                        continue
                    blamed = pause.node if pause is not None else ""
                    node = _choose(places, member, is_parity, staying, domains, load, blamed)
                    nbytes = checkpoint.size_bytes / checkpoint.num_nodes * places.group.num_data
                    if not node or not budget.take(nbytes, now_s):
                        continue
                    code = Code(
                        attempt=checkpoint.id,
                        num_nodes=checkpoint.num_nodes,
                        node_index=member,
                        node_id=node,
                        is_parity=is_parity,
                        places=places,
                    )
                    self._active.add(code)
                    load[node] += 1
                    yield code

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


def _missing(places: GroupPlaces) -> Iterator[tuple[int, bool]]:
    """Yield the members whose files, or else whose parity files, are missing and can be computed."""
    lost = [at for at, nodes in enumerate(places.fragments) if not nodes]
    if lost:
        gone = lost_members(places)
        yield from ((member, False) for at in lost if (member := places.group.members[at]) not in gone)
        return
    yield from (
        (member, True)
        for member, nodes in zip(places.group.members, places.parities, strict=True)
        if not nodes
    )


def _choose(
    places: GroupPlaces,
    member: int,
    is_parity: bool,
    staying: Set[str],
    domains: Mapping[str, str],
    load: Counter[str],
    blamed: str,
) -> str:
    """Return the node that computes a file and keeps it; "" if no node can."""
    used = Counter(node for held in (*places.fragments, *places.parities) for node in held)
    if is_parity:
        homes = places.fragments[places.group.members.index(member)]
        return min(staying & set(homes), key=lambda n: (n == blamed, load[n], n), default="")
    taken = Counter(domain_of(node, domains) for node in used)
    return min(
        staying,
        key=lambda n: (n == blamed, used[n], taken[domain_of(n, domains)], load[n], n),
        default="",
    )
