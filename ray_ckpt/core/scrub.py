"""Scrub: read every copy of every live checkpoint from time to time, to find damage before a restore.

A round is for one checkpoint. The round reads each copy on each live node once, and the copy on the storage
path if the checkpoint is durable, one `Scrub` after the other, within a budget. The checkpoint verified
longest ago is first. A checkpoint is due `every_s` after its last verification, or after its commit if it was
never verified. If reading all that is due takes longer than `every_s`, some are read later than twice
`every_s` after the last time; then `is_behind` is set. The run machine appends the `Verified` that ends a
good round; from this record a new coordinator computes which checkpoints are due. If a coordinator dies
during a round, the next coordinator begins the round anew.

A copy that an upload or a restore found damaged is read at once, before all rounds and without a budget. So
are fragments on the storage path that may share a damaged still file there (`suspect_remote`), after them.
One that a round cannot read there is such a suspect too, but is read again in a round only.

A node puts a damaged copy into quarantine. The run machine removes the node from the holders, so that repair
makes a new copy; after damage on the storage path, the machine drains the checkpoint again. The round
continues, to find all damage at once, but does not verify the checkpoint. The checkpoint has its next round
`AGAIN_S` later.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field

from ray_ckpt.core.holders import Holders
from ray_ckpt.core.messages import REMOTE, Scrub, ScrubEnded
from ray_ckpt.core.rate_budget import Budget, longest_s
from ray_ckpt.format.records import MAX_DAMAGED, Verified
from ray_ckpt.types import AttemptId, CheckpointInfo, Level

SLACK_S = 1800.0  # time of a read beyond that of a mean fragment: busy disks, larger fragments, parity files
MAX_TRIES = 3  # failed reads of one copy; after these a round cannot verify the checkpoint
AGAIN_S = 3600.0  # least time between two rounds of a checkpoint, good or bad: time for repairs


@dataclass(slots=True, kw_only=True)
class _Round:
    """One round over the copies that a checkpoint had when the round began."""

    checkpoint: CheckpointInfo
    todo: deque[Scrub]
    tries: Counter[Scrub] = field(default_factory=Counter)  # failed reads, by copy
    good: set[int] = field(default_factory=set)  # fragments with a good copy
    is_clean: bool = True  # no copy was damaged or unreadable

    @property
    def is_proof(self) -> bool:
        return self.is_clean and len(self.good) == self.checkpoint.num_nodes


class Scrubs:
    """The current round, of the copies of one checkpoint, and the copies that were found damaged."""

    def __init__(self) -> None:
        self._suspects: dict[Scrub, int] = {}  # with the tries to read it; only copies of live checkpoints
        self.is_behind = False  # reading all copies that were due at the last beginning takes too long
        self._round: _Round | None = None
        self._running: Scrub | None = None
        self._is_of_round = False  # the running read; False for a suspect's
        self._until_s = 0.0  # then it counts as failed
        self.unanswered: list[Scrub] = []  # reads without an answer that this round does not try again
        self._not_before_s: dict[str, float] = {}  # by attempt: earliest time of the next round

    def assign(
        self,
        *,
        live: Sequence[CheckpointInfo],
        holders: Holders,
        every_s: float,
        budget: Budget,
        now_s: float,
        wall_s: float,
        has_rounds: bool = True,
    ) -> Iterator[Scrub | Verified]:
        """Yield the copy to read now, or the record that ends a good round; at most one item per call.

        `now_s` is monotonic, for time-outs; `wall_s` is Unix time, for due rounds. The budget is for rounds.
        Without `has_rounds` only suspects are read.
        """
        if self._is_at_work(holders, now_s):
            return
        if self._suspects:
            known = {c.id: c for c in live}
            self._suspects = {
                scrub: tries
                for scrub, tries in self._suspects.items()
                if scrub.attempt in known and _is_there(scrub, holders)
                if tries < MAX_TRIES or scrub.place == REMOTE
            }
            durable = {c.id for c in live if c.level >= Level.DURABLE}
            if suspect := self._next_suspect(durable):
                self._suspects[suspect] += 1
                self._start(suspect, known[suspect.attempt], now_s, is_of_round=False)
                yield suspect
                return
        if not has_rounds:
            return
        if self._round is not None and all(c.id != self._round.checkpoint.id for c in live):
            self._round = None
        if self._round is None:
            due = self._due(live, holders, every_s, now_s, wall_s)
            self.is_behind = budget.bytes_per_s > 0 and _is_too_much(due, holders, budget, every_s)
            self._round = self._begin(due, holders)
        if self._round is None:
            return
        scrub, checkpoint = self._next(self._round, holders), self._round.checkpoint
        if scrub is None:
            if self._round.is_proof:
                yield Verified(attempt=checkpoint.id.attempt)
            self._not_before_s[checkpoint.id.attempt] = now_s + min(AGAIN_S, every_s)
            self._round = None
        elif budget.take(_mean_bytes(checkpoint), now_s):
            self._start(self._round.todo.popleft(), checkpoint, now_s, is_of_round=True)
            yield scrub

    def _start(self, scrub: Scrub, checkpoint: CheckpointInfo, now_s: float, *, is_of_round: bool) -> None:
        self._running, self._is_of_round = scrub, is_of_round
        self._until_s = now_s + longest_s(_mean_bytes(checkpoint), slack_s=SLACK_S)

    def suspect(self, scrub: Scrub) -> None:
        """Read this copy next; on the storage path, once its checkpoint is durable.

        A copy on the storage path stays a suspect until it has been read, if need be in a round.
        """
        self._suspects[scrub] = 0

    def suspect_stored(self, attempt: AttemptId, fragments: Iterable[int]) -> None:
        """Read these fragments of a checkpoint on the storage path next."""
        for index in sorted(fragments):
            self.suspect(Scrub(attempt=attempt, node_index=index, place=REMOTE))

    def renewed(self, attempt: AttemptId, fragments: Set[int]) -> None:
        """Forget suspects: these fragments of a checkpoint share no file on the storage path now."""
        for index in fragments:
            self.forget(Scrub(attempt=attempt, node_index=index, place=REMOTE))

    def forget(self, scrub: Scrub) -> None:
        """Do not read this copy before its round."""
        self._suspects.pop(scrub, None)

    @property
    def read_remote(self) -> set[str]:
        """The attempt that is being read on the storage path, if one is."""
        scrub = self._running
        return {scrub.attempt.attempt} if scrub is not None and scrub.place == REMOTE else set()

    @property
    def suspect_remote(self) -> dict[str, set[int]]:
        """Fragments that are to be read on the storage path, by attempt; some are still on the way there."""
        found: dict[str, set[int]] = {}
        for scrub in self._suspects:
            if scrub.place == REMOTE:
                found.setdefault(scrub.attempt.attempt, set()).add(scrub.node_index)
        return found

    def _next_suspect(self, durable: Set[AttemptId]) -> Scrub | None:
        """Return a suspect to read now, one on a node first: the next save there would link its bytes."""
        ready = (
            scrub
            for scrub, tries in self._suspects.items()
            if tries < MAX_TRIES and (scrub.place != REMOTE or scrub.attempt in durable)
        )
        return min(ready, key=lambda scrub: scrub.place == REMOTE, default=None)

    def ended(self, event: ScrubEnded) -> bool:
        """Record that a copy was read; a late report of damage counts too.

        Return True if the copy could not be read, and this round does not try again.
        """
        scrub = Scrub(attempt=event.attempt, node_index=event.node_index, place=event.place)
        bad = {event.attempt, *(attempt for attempt, _ in event.shared)} if event.damage else ()
        if self._round is not None and self._round.checkpoint.id in bad:
            self._round.is_clean = False
        if scrub != self._running:
            return False
        self._running = None
        if event.error is not None:
            return self._failed(scrub)
        self._suspects.pop(scrub, None)
        if self._round is not None and self._round.checkpoint.id == event.attempt and not event.damage:
            self._round.good.add(event.node_index)
        return False

    def _is_at_work(self, holders: Holders, now_s: float) -> bool:
        """Return True while an answer is awaited; stop for a dead node and after `longest_s`."""
        scrub = self._running
        if scrub is None:
            return False
        if scrub.place != REMOTE and scrub.place not in holders.live:
            self._running = None
        elif now_s > self._until_s:
            self._running = None
            if self._failed(scrub):
                self.unanswered.append(scrub)
        return self._running is not None

    def _failed(self, scrub: Scrub) -> bool:
        """Queue an unreadable copy of the round after the other copies, at most MAX_TRIES times in all.

        Return True if that was the last try.
        """
        if not self._is_of_round or self._round is None or self._round.checkpoint.id != scrub.attempt:
            return False  # a suspect stays in its own queue
        self._round.tries[scrub] += 1
        if self._round.tries[scrub] < MAX_TRIES:
            self._round.todo.append(scrub)
            return False
        self._round.is_clean = False
        if scrub.place == REMOTE:
            self._suspects.setdefault(scrub, MAX_TRIES)  # proves nothing until a round has read it
        return True

    def _due(
        self, live: Sequence[CheckpointInfo], holders: Holders, every_s: float, now_s: float, wall_s: float
    ) -> list[CheckpointInfo]:
        """Return the due checkpoints that have a source."""
        self._not_before_s = {name: at_s for name, at_s in self._not_before_s.items() if at_s > now_s}
        suspects = self.suspect_remote
        return [
            c
            for c in live
            if abs(wall_s - _last_s(c)) >= every_s  # a time in the far future came from a wrong clock
            or (c.level >= Level.DURABLE and c.id.attempt in suspects)
            if c.id.attempt not in self._not_before_s and holders.can_serve(c)
        ]

    def _begin(self, due: Sequence[CheckpointInfo], holders: Holders) -> _Round | None:
        """Return a round for the due checkpoint verified longest ago, or None."""
        if not due:
            return None
        checkpoint = min(due, key=_last_s)
        return _Round(checkpoint=checkpoint, todo=deque(_copies(checkpoint, holders)))

    def _next(self, round_: _Round, holders: Holders) -> Scrub | None:
        """Return the next copy that still exists, or None."""
        while round_.todo:
            scrub = round_.todo[0]
            if _is_there(scrub, holders):
                return scrub
            round_.todo.popleft()
        return None


def _is_there(scrub: Scrub, holders: Holders) -> bool:
    return scrub.place == REMOTE or scrub.place in holders.of(scrub.attempt.attempt, scrub.node_index)


def _mean_bytes(checkpoint: CheckpointInfo) -> float:
    return checkpoint.size_bytes / checkpoint.num_nodes


def _last_s(checkpoint: CheckpointInfo) -> float:
    """Return the Unix time when the checkpoint's bytes were last known to be good."""
    return checkpoint.committed_at_s if checkpoint.verified_at_s is None else checkpoint.verified_at_s


def damage_text(found: Set[int], recorded: str) -> str:
    """Return the text of the record for these damaged fragments: the last MAX_DAMAGED of them.

    If there are more, the recorded ones stay while they are damaged. Rounds read fragments in order, so an
    outage of the storage path, and its end, take a few hundred records at most in a run of any size.
    """
    known = set(map(int, filter(None, recorded.split(","))))
    if len(known) == MAX_DAMAGED and known <= found:
        return recorded
    return ",".join(map(str, sorted(found)[-MAX_DAMAGED:]))


def _is_too_much(due: Iterable[CheckpointInfo], holders: Holders, budget: Budget, every_s: float) -> bool:
    """Return True if reading all copies of the due checkpoints takes longer than `every_s`.

    One read begins per call of `assign`, which is per burst of the budget.
    """
    left_bytes = every_s * budget.bytes_per_s
    for checkpoint in due:
        read_bytes = max(_mean_bytes(checkpoint), budget.burst_bytes)
        for _ in _copies(checkpoint, holders):
            left_bytes -= read_bytes
            if left_bytes < 0:
                return True
    return False


def _copies(checkpoint: CheckpointInfo, holders: Holders) -> Iterator[Scrub]:
    for index in range(checkpoint.num_nodes):
        remote = (REMOTE,) if checkpoint.level >= Level.DURABLE else ()
        for place in (*sorted(holders.of(checkpoint.id.attempt, index)), *remote):
            yield Scrub(attempt=checkpoint.id, node_index=index, place=place)
