"""Repair: make missing copies again in the background after a loss.

Every fragment of a checkpoint that is worth copies (`worth_copies`, then what a pin keeps off the lineage)
should be on `replicas + 1` live nodes that stay in the cluster, or on all of these nodes if they are fewer.
`Repairs` plans the copies, a few at a time and within a budget; the run machine orders them, adds new copies
to the holders and calls `ended`. Idle nodes that are spares (option `spare_nodes`) get copies of the newest
checkpoint when nothing else is to be copied. Repair writes no record: a new coordinator finds missing copies
by the inventories. A copy that arrives late or twice is an extra copy, which retention removes together with
the checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from ray_ckpt.core.holders import Holders
from ray_ckpt.core.links import Links
from ray_ckpt.core.messages import ReplicaEnded, Replicate
from ray_ckpt.core.parity_files import group_nodes
from ray_ckpt.core.placement import domain_of
from ray_ckpt.core.rate_budget import Budget, longest_s
from ray_ckpt.types import AttemptId, CheckpointInfo, Level

MAX_ACTIVE = 8  # copies under way: training comes first on the network
MAX_TRIES = 3  # failures of one fragment on one holder; a later checkpoint starts from 0
RETRY_S = 2.0  # pause before the next try of a fragment, doubled each time: a peer may restart
MAX_RETRY_S = 300.0  # longest pause between tries: time to clear a disk
LOST_AFTER_S = 24 * 3600.0  # after this time a lost node is not expected back


def worth_copies(lineage: Sequence[CheckpointInfo]) -> tuple[CheckpointInfo, ...]:
    """Return the lineage's newest checkpoint and all that are not on the storage path, newest first."""
    return tuple(c for c in reversed(lineage) if c is lineage[-1] or c.level < Level.DURABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    """A fragment with too few copies on nodes that stay, or with no copy on some spares."""

    checkpoint: CheckpointInfo
    recency: int  # 0: the newest checkpoint
    node_index: int
    staying: frozenset[str]  # holders that stay in the cluster
    draining: frozenset[str]  # holders that are about to leave the cluster
    missing: int
    beside: frozenset[str] = frozenset()  # nodes with other files of its parity group
    spares: frozenset[str] = frozenset()  # the only nodes that may take the copies, if not empty

    @property
    def urgency(self) -> tuple[bool, bool, int, int, int]:
        """Sort key: fragments on draining nodes only, then the newest checkpoint, then the fewest holders.

        Copies for spares come last.
        """
        return bool(self.staying), bool(self.spares), self.recency, len(self.staying), self.node_index


@dataclass(slots=True)
class _Problem:
    """Failed copies of one fragment; source and holder are both blamed, as the cause is unknown."""

    blame: Counter[str] = field(default_factory=Counter)  # failures per node
    pause_s: float = RETRY_S  # pause after the next failure
    not_before_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _ActiveCopy:
    until_s: float  # then the copy counts as failed
    taken_bytes: float  # bytes taken from the budget


class Repairs:
    """Copies under way, and the failures of earlier ones."""

    def __init__(self) -> None:
        self.deficit = 0  # missing copies, at the last `assign`, of fragments that have a copy
        self._active: dict[Replicate, _ActiveCopy] = {}
        self._problems: dict[tuple[str, int], _Problem] = {}

    def assign(
        self,
        *,
        checkpoints: Sequence[CheckpointInfo],
        holders: Holders,
        replicas: int,
        domains: Mapping[str, str],
        draining: Set[str],
        links: Links,
        budget: Budget,
        now_s: float,
        spares: Set[str] = frozenset(),
        may_hold: Set[str] | None = None,
        limit_bytes_per_s: float | None = None,
    ) -> Iterator[Replicate]:
        """Yield the copies to start now. `checkpoints` are worth copies, the most urgent ones first.

        `spares` are idle nodes with room, each of which gets all fragments of the newest checkpoint.
        `may_hold` are the nodes that may get the other copies; None for all that stay. A node sends all
        its copies together at the rate of `limit_bytes_per_s`.
        """
        self._expire(now_s)
        self._forget_others({c.id.attempt for c in checkpoints})
        staying = holders.live - draining
        may_hold = staying if may_hold is None else may_hold & staying
        needs = list(_needs(checkpoints, holders, staying, may_hold, replicas + 1))
        self.deficit = sum(need.missing for need in needs)
        needs += _spare_needs(checkpoints[:1], holders, spares & staying)
        if not needs:
            return
        sharing = {c.id: _sharing(c, checkpoints) for c in checkpoints}
        load = _load(checkpoints, holders) + Counter(copy.holder for copy in self._active)
        for need in sorted(needs, key=lambda need: need.urgency):
            for _ in range(need.missing - len(self._on_their_way(need))):
                if len(self._active) >= MAX_ACTIVE:
                    return
                others = sharing[need.checkpoint.id]
                alike = (_alike(need, others, holders) & may_hold) - need.staying
                if need.staying and not alike and self._is_like_one_on_its_way(need, others):
                    break
                copy = self._plan(need, may_hold, alike, domains, load, links, now_s)
                if copy is None:
                    break
                nbytes = need.checkpoint.size_bytes / need.checkpoint.num_nodes
                if need.staying and not budget.take(nbytes, now_s):  # an imminent loss needs no budget
                    return
                until_s = now_s + longest_s(nbytes, limit_bytes_per_s and limit_bytes_per_s / MAX_ACTIVE)
                self._active[copy] = _ActiveCopy(until_s, nbytes if need.staying else 0.0)
                load[copy.holder] += 1
                yield copy

    def is_copying(self, attempt: AttemptId, node_index: int) -> bool:
        """Return True if a copy of the fragment is under way, or waits only until others have ended."""
        waits = len(self._active) >= MAX_ACTIVE and (attempt.attempt, node_index) not in self._problems
        return waits or any((copy.attempt, copy.node_index) == (attempt, node_index) for copy in self._active)

    def ended(self, event: ReplicaEnded, now_s: float) -> float:
        """Record the end of a repair copy; return the bytes taken from the budget that were not sent.

        A holder that could not be reached is not blamed: the copy is ordered again as soon as the link to the
        holder may work again.
        """
        where, unused_bytes = (event.attempt, event.node_index, event.holder), 0.0
        for copy in list(self._active):
            if (copy.attempt, copy.node_index, copy.holder) == where:
                underway = self._active.pop(copy)
                if event.is_unreachable:
                    unused_bytes += underway.taken_bytes
                elif event.error is not None:
                    self._failed(copy, now_s)
        return unused_bytes

    def lost(self, nodes: Set[str]) -> None:
        """End copies from and to dead nodes without blaming a node."""
        self._active = {c: at for c, at in self._active.items() if not {c.source, c.holder} & nodes}

    def _plan(
        self,
        need: _Need,
        may_hold: Set[str],
        alike: Set[str],
        domains: Mapping[str, str],
        load: Counter[str],
        links: Links,
        now_s: float,
    ) -> Replicate | None:
        """Return the next copy of a fragment; None if the copy has to wait or no node can take the copy."""
        attempt, index = need.checkpoint.id, need.node_index
        problem = self._problems.get((attempt.attempt, index), _Problem())
        if now_s < problem.not_before_s:
            return None
        copies = need.staying | self._on_their_way(need)
        others = {n for n in (need.spares or may_hold) - copies if problem.blame[n] < MAX_TRIES}
        sending = Counter(copy.source for copy in self._active)
        for source in sorted(need.staying or need.draining, key=lambda n: (problem.blame[n], sending[n], n)):
            if reached := [n for n in others if links.works(source, n, now_s)]:
                taken = {domain_of(node, domains) for node in copies}
                return Replicate(
                    attempt=attempt,
                    node_index=index,
                    source=source,
                    holder=min(
                        reached,
                        key=lambda n: (
                            problem.blame[n] if need.beside else 0,
                            n in need.beside,
                            domain_of(n, domains) in taken,
                            problem.blame[n],
                            n not in alike,
                            load[n],
                            n,
                        ),
                    ),
                )
        return None

    def _on_their_way(self, need: _Need) -> frozenset[str]:
        where = (need.checkpoint.id, need.node_index)
        return frozenset(c.holder for c in self._active if (c.attempt, c.node_index) == where)

    def _is_like_one_on_its_way(self, need: _Need, others: Sequence[CheckpointInfo]) -> bool:
        """Return True if this fragment of one of the checkpoints that share its bytes is being copied.

        The holder of that copy can link most of this one afterwards.
        """
        ids = {c.id for c in others}
        return any(c.node_index == need.node_index and c.attempt in ids for c in self._active)

    def _failed(self, copy: Replicate, now_s: float) -> None:
        problem = self._problems.setdefault((copy.attempt.attempt, copy.node_index), _Problem())
        problem.blame.update((copy.source, copy.holder))
        problem.not_before_s = now_s + problem.pause_s
        problem.pause_s = min(2 * problem.pause_s, MAX_RETRY_S)

    def _expire(self, now_s: float) -> None:
        for copy, underway in list(self._active.items()):
            if now_s > underway.until_s:
                del self._active[copy]
                self._failed(copy, now_s)

    def _forget_others(self, attempts: Set[str]) -> None:
        """Forget problems of attempts not in `attempts`; copies under way stay until their end."""
        self._problems = {key: problem for key, problem in self._problems.items() if key[0] in attempts}


def _needs(
    checkpoints: Sequence[CheckpointInfo],
    holders: Holders,
    staying: Set[str],
    may_hold: Set[str],
    wanted: int,
) -> Iterator[_Need]:
    """Yield the fragments with at least one copy, but fewer on nodes that stay than wanted and possible."""
    wanted = min(wanted, len(staying))
    for recency, checkpoint in enumerate(checkpoints):
        for index, nodes in holders.fragments(checkpoint.id.attempt).items():
            if len(nodes) >= wanted and nodes <= staying:
                continue  # nearly all fragments, so this is what the time of a run goes into
            held = frozenset(nodes & holders.live)
            missing = min(wanted - len(held & staying), len(may_hold) - len(held & may_hold))
            if held and missing > 0:
                places = holders.places_of(checkpoint.id.attempt, index)
                yield _Need(
                    checkpoint=checkpoint,
                    recency=recency,
                    node_index=index,
                    staying=held & staying,
                    draining=held - staying,
                    missing=missing,
                    beside=group_nodes(places) if places is not None else frozenset(),
                )


def _sharing(checkpoint: CheckpointInfo, checkpoints: Sequence[CheckpointInfo]) -> list[CheckpointInfo]:
    """Return the other checkpoints that most likely share most of their bytes with this one."""
    same = [c for c in checkpoints if c.num_nodes == checkpoint.num_nodes]
    is_shared = any(2 * c.shared_bytes > c.size_bytes for c in same)
    return [c for c in same if c is not checkpoint] if is_shared else []


def _alike(need: _Need, others: Sequence[CheckpointInfo], holders: Holders) -> frozenset[str]:
    """Return the nodes that can link most of a fragment, as they have it of one of the other checkpoints."""
    return frozenset(node for other in others for node in holders.of(other.id.attempt, need.node_index))


def _spare_needs(newest: Sequence[CheckpointInfo], holders: Holders, spares: Set[str]) -> Iterator[_Need]:
    """Yield the fragments of the newest checkpoint that some spares lack."""
    for checkpoint in newest:
        for index, nodes in holders.fragments(checkpoint.id.attempt).items():
            if (lacking := spares - nodes) and (held := frozenset(nodes & holders.live)):
                yield _Need(
                    checkpoint=checkpoint,
                    recency=0,
                    node_index=index,
                    staying=held,
                    draining=frozenset(),
                    missing=len(lacking),
                    spares=frozenset(lacking),
                )


def _load(checkpoints: Sequence[CheckpointInfo], holders: Holders) -> Counter[str]:
    """Count the fragments of these checkpoints on each node."""
    load: Counter[str] = Counter()
    for checkpoint in checkpoints:
        for index in range(checkpoint.num_nodes):
            load.update(holders.of(checkpoint.id.attempt, index))
    return load


class Losses:
    """Unreadable checkpoints, each with the start of its outage; a new coordinator begins with none."""

    def __init__(self) -> None:
        self._since_s: dict[str, float] = {}

    def due(
        self,
        *,
        live: Sequence[CheckpointInfo],
        lineage: Sequence[CheckpointInfo],
        holders: Holders,
        now_s: float,
    ) -> tuple[CheckpointInfo, ...]:
        """Return the checkpoints to record as lost.

        A checkpoint is lost if it had no source during all of the last LOST_AFTER_S seconds, and a newer
        checkpoint of the lineage can be read.
        """
        gone = [c for c in live if not holders.can_serve(c)]
        self._since_s = {c.id.attempt: self._since_s.get(c.id.attempt, now_s) for c in gone}
        readable = next((c.seq for c in reversed(lineage) if holders.can_serve(c)), -1)
        return tuple(
            c for c in gone if c.seq < readable and now_s - self._since_s[c.id.attempt] >= LOST_AFTER_S
        )
