"""Drains: the choice of the nodes that upload a checkpoint's fragments until all are on the storage path.

A failing store does not end a drain: each fragment is tried again from the next holder, after a growing
pause. A drain ends when the checkpoint's description is on the storage path, when no live node has an intact
copy of a remaining fragment, when retention retires the checkpoint, or when newer drains displace this drain
from the queue.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from ray_ckpt.core.context import Context, names_of
from ray_ckpt.core.messages import DescriptionWritten, Drain, DrainEnded, WriteDescription
from ray_ckpt.core.parity_files import lost_members
from ray_ckpt.core.values import ItemsPart
from ray_ckpt.format.digest import root_digest
from ray_ckpt.format.records import Exported
from ray_ckpt.types import AttemptId, CheckpointInfo, Level

RETRY_S = 2.0  # pause before the second try of a fragment; doubled before each further try
MAX_RETRY_S = 60.0  # longest pause between tries, so that a store that is back is used within a minute
MAX_DOUBLINGS = 5  # doublings of RETRY_S: enough to reach MAX_RETRY_S
MAX_ACTIVE = 2  # drains that upload at the same time
MAX_QUEUED = 4  # drains that wait for their turn; retention keeps each one, and new drains displace old ones
MAX_ACTIVE_ITEMS = MAX_QUEUED_ITEMS = 1  # the same for uploads of some items alone
PATIENT_TRIES = 5  # failed tries, about a minute; then the drain keeps no checkpoint if a disk is full
COMPUTED_S = 3600.0  # wait for repair, which reads parity groups one by one, and not for every checkpoint
DAMAGED_AGAIN_S = 3600.0  # pause after a drain that found no intact copy: time for scrub and repair


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainUnderway:
    """Public view of a drain.

    `state`: "waiting" for its turn or for a source, "uploading", "failing" after more than PATIENT_TRIES
    tries, "describing" when all bytes are on the storage path.
    """

    step: int
    attempt: str
    state: Literal["waiting", "uploading", "failing", "describing"]
    fragments: int
    fragments_done: int
    nodes: tuple[str, ...]  # nodes that upload at the moment
    size_bytes: int  # size of the whole checkpoint
    tries: int  # tries of the fragment that was tried most often
    age_s: float  # seconds since the drain was requested
    started_s: float | None  # seconds since the first upload began; None: the drain waits for its turn
    items: str = ""  # the only items that are uploaded; "": the whole checkpoint


@dataclass(slots=True, kw_only=True)
class _Task:
    checkpoint: CheckpointInfo
    items: str = ""  # the only items to upload, joined by commas; "": the whole checkpoint
    parts: dict[int, ItemsPart] = field(default_factory=dict)  # by node_index, of an upload of items
    requested_s: float  # monotonic time; so is `begun_s`
    begun_s: float | None = None
    fragments: frozenset[int]  # those to upload; `todo` are those that are left
    todo: set[int]
    waiting: set[int]  # fragments of `todo` to be uploaded as soon as the drain has its turn and a source
    paused: list[tuple[float, int]] = field(default_factory=list)  # heap of next try (monotonic), fragment
    running: dict[int, str] = field(default_factory=dict)  # node_index -> node that uploads the fragment
    unchecked: set[int]  # fragments of `waiting` and `paused` that may have no source
    computed: set[int] = field(default_factory=set)  # fragments that repair is to compute
    computed_s: float | None = None  # since when repair has computed none of them; None: there are none
    tries: dict[int, int] = field(default_factory=dict)
    like: AttemptId | None = None  # a durable checkpoint that may have the same shards
    most_tries: int = 0  # the maximum of `tries`, stored because each event reads it
    damaged: dict[int, dict[str, str]] = field(default_factory=dict)  # node_index -> node -> the node's error
    descriptions: int = 0  # tries of writing the description
    describe_at_s: float | None = None  # None: fragments are missing, or the description is being written
    is_other: bool = False  # all items are uploaded, but not from the fragments that were committed

    @property
    def is_started(self) -> bool:
        return bool(self.tries)

    @property
    def is_stuck(self) -> bool:
        return max(self.descriptions, self.most_tries) > PATIENT_TRIES

    def resume(self, now_s: float) -> None:
        """Let the fragments wait whose pause is over."""
        while self.paused and self.paused[0][0] <= now_s:
            self.waiting.add(heapq.heappop(self.paused)[1])

    def uploads_ended(self, now_s: float) -> None:
        """Note that all fragments are uploaded; call when the last one is."""
        self.describe_at_s = now_s
        if self.items:
            sources = root_digest(part.source for part in self.parts.values())
            self.is_other = sources != self.checkpoint.root_digest

    def exported(self) -> Exported | None:
        """Return the record of a complete upload of items; None for a drain."""
        if not self.items:
            return None
        parts = self.parts.values()
        return Exported(
            attempt=self.checkpoint.id.attempt,
            items=self.items,
            root_digest=root_digest(part.fragment for part in parts),
            size_bytes=sum(part.size_bytes for part in parts),
        )

    def underway(self, now_s: float) -> DrainUnderway:
        state: Literal["waiting", "uploading", "failing", "describing"] = "waiting"
        if self.is_stuck:
            state = "failing"
        elif not self.todo:
            state = "describing"
        elif self.running:
            state = "uploading"
        return DrainUnderway(
            step=self.checkpoint.step,
            attempt=self.checkpoint.id.attempt,
            state=state,
            fragments=self.checkpoint.num_nodes,
            fragments_done=self.checkpoint.num_nodes - len(self.todo),
            nodes=tuple(sorted(set(self.running.values()))),
            size_bytes=self.checkpoint.size_bytes,
            tries=self.most_tries,
            age_s=now_s - self.requested_s,
            started_s=None if self.begun_s is None else now_s - self.begun_s,
            items=self.items,
        )


class Drains:
    """The drains of a run. Any holder may upload a fragment, even twice: bytes and file names are equal.

    With `are_of_items` they upload only the items of the option `remote_items`.
    """

    def __init__(self, context: Context, *, are_of_items: bool = False) -> None:
        self._context = context
        self._are_of_items = are_of_items
        self._max_active = MAX_ACTIVE_ITEMS if are_of_items else MAX_ACTIVE
        self._max_tasks = self._max_active + (MAX_QUEUED_ITEMS if are_of_items else MAX_QUEUED)
        self._tasks: dict[str, _Task] = {}
        self._removed = context.holders.watch()  # attempts whose copies may have no source any more
        self._urgent = ""  # the attempt for which the end of the run, or leaving nodes, wait
        self.awaited = ""  # the attempt for which a rank has waited longest
        self._not_before_s: dict[str, float] = {}  # attempt whose drain found no intact copy -> next drain
        self._in_vain_s: dict[str, float] = {}  # attempt whose drain waited for repair in vain -> its end
        self._unshared: set[str] = set()  # attempts that were damaged after an upload that may have shared

    def __bool__(self) -> bool:
        """Return True if any drain waits or is under way."""
        return bool(self._tasks)

    @property
    def attempts(self) -> set[str]:
        return set(self._tasks)

    @property
    def stuck(self) -> set[str]:
        """Attempts whose uploads have failed more than PATIENT_TRIES times."""
        return {name for name, task in self._tasks.items() if task.is_stuck}

    def underway(self) -> tuple[DrainUnderway, ...]:
        """Return all drains in the order of their steps, the drains that have begun before the others."""
        found = [task.underway(self._context.now_s) for task in self._tasks.values()]
        return tuple(sorted(found, key=lambda drain: (drain.started_s is None, drain.step)))

    @property
    def put_off(self) -> set[str]:
        """Attempts without a drain that `start` refuses for a while, unless a user requests the drain."""
        known = self._context.history.checkpoints
        names = {*self._not_before_s, *self._in_vain_s} - self._tasks.keys()
        return {name for name in names if name in known and self._is_put_off(known[name])}

    @property
    def has_room(self) -> bool:
        """Return True if a new drain would not displace another drain."""
        return len(self._tasks) < self._max_tasks

    def start(
        self, checkpoint: CheckpointInfo, *, is_urgent: bool = False, is_requested: bool = False
    ) -> None:
        """Drain a checkpoint to the storage path, an urgent checkpoint before all others.

        After a drain that found no intact copy, the checkpoint is not drained again for DAMAGED_AGAIN_S, and
        after one that waited for repair in vain for COMPUTED_S, unless repair has done its work or a user
        requests the drain.
        """
        name, now_s = checkpoint.id.attempt, self._context.now_s
        self._in_vain_s = {n: at_s for n, at_s in self._in_vain_s.items() if now_s - at_s < COMPUTED_S}
        if not is_requested and self._is_put_off(checkpoint):
            return
        parts = self._to_upload(checkpoint)
        if is_urgent:
            self._urgent = name
        if name in self._tasks or not parts:
            return
        self._tasks[name] = _Task(
            checkpoint=checkpoint,
            items=self._context.options.exported_items if self._are_of_items else "",
            requested_s=now_s,
            fragments=frozenset(parts),
            todo=set(parts),
            waiting=set(parts),
            unchecked=set(parts),
        )
        if len(self._tasks) > self._max_tasks:
            del self._tasks[min(self._tasks, key=self._worth)]

    def _to_upload(self, checkpoint: CheckpointInfo) -> Collection[int]:
        every = range(checkpoint.num_nodes)
        return every if self._are_of_items else self._context.holders.to_upload(checkpoint)

    def _is_put_off(self, checkpoint: CheckpointInfo) -> bool:
        """Return True after a drain that found no intact copy of a part, or waited for repair in vain."""
        name, now_s = checkpoint.id.attempt, self._context.now_s
        if now_s < self._not_before_s.get(name, now_s):
            return True
        is_in_vain = now_s - self._in_vain_s.get(name, -math.inf) < COMPUTED_S
        return is_in_vain and not self._context.holders.holds(name, self._to_upload(checkpoint))

    def _worth(self, name: str) -> tuple[bool, bool, bool, int]:
        """Return the sort key of a drain; the lowest one, an old drain that has not begun, is displaced."""
        task = self._tasks[name]
        return name == self._urgent, name == self.awaited, task.is_started, task.checkpoint.seq

    def assign(self) -> Iterator[Drain | WriteDescription]:
        """Order a live holder to upload each waiting fragment; order the description of complete drains."""
        now_s = self._context.now_s
        uploads = [task for task in self._tasks.values() if task.todo]
        for task in sorted(uploads, key=self._turn)[: self._max_active]:
            given = set[int]()
            task.resume(now_s)
            for index in sorted(task.waiting):
                nodes = self._sources(task, index)
                tries = task.tries.get(index, 0)
                if nodes:
                    task.tries[index] = tries + 1
                    task.most_tries = max(task.most_tries, tries + 1)
                    task.begun_s = now_s if task.begun_s is None else task.begun_s
                    task.running[index] = nodes[(index + tries) % len(nodes)]
                    given.add(index)
                    yield Drain(
                        attempt=task.checkpoint.id,
                        node_index=index,
                        node_id=task.running[index],
                        like="" if tries or task.items else self._like(task),
                        items=task.items,
                        is_urgent=task.checkpoint.id.attempt == self._urgent,
                    )
            if given:  # build a new set, because an emptied set stays as slow to iterate as the full set
                task.waiting = task.waiting - given
        for name, task in self._tasks.items():
            if task.describe_at_s is not None and now_s >= task.describe_at_s:
                task.describe_at_s = None
                task.descriptions += 1
                checkpoint = self._context.history.checkpoints[name]
                yield WriteDescription(checkpoint=checkpoint, exported=task.exported())

    def _like(self, task: _Task) -> str:
        """Return the folder of the newest durable checkpoint; "" if the drained one may be damaged there.

        Also "" if it was found damaged after an upload that named a durable checkpoint.
        """
        unsafe = self._context.holders.unsafe_remote
        is_again = task.checkpoint.level >= Level.DURABLE  # it may have been mended in the meantime
        if is_again or task.checkpoint.id.attempt in unsafe | self._unshared:
            return ""
        if task.like is None or task.like.attempt in unsafe:
            durable = (
                c.id
                for c in reversed(self._context.history.live())
                if c.level is Level.DURABLE and c.id.attempt not in unsafe and c.id != task.checkpoint.id
            )
            task.like = next(durable, None)
        return "" if task.like is None else task.like.directory

    def _turn(self, task: _Task) -> tuple[bool, bool, bool, bool]:
        """Return the sort key: urgent, awaited, begun, new, then those that fail or only wait for repair."""
        name, is_held_up = task.checkpoint.id.attempt, task.is_stuck or task.unchecked == task.todo
        return name != self._urgent, name != self.awaited, is_held_up, not task.is_started

    def _sources(self, task: _Task, index: int) -> list[str]:
        """Return the live holders of a fragment whose copy is not known to be damaged."""
        holders = self._context.holders
        return sorted(
            (holders.of(task.checkpoint.id.attempt, index) & holders.live)
            - task.damaged.get(index, {}).keys()
        )

    def give_up(self) -> Iterator[tuple[CheckpointInfo, str]]:
        """End each drain that lacks an intact copy of a fragment on live nodes; yield it with the reason."""
        for name, task in list(self._tasks.items()):
            if task.is_other:
                del self._tasks[name]
                self._put_off(name)
                yield task.checkpoint, "a node has another version of a fragment than the one committed"
                continue
            if name in self._removed:
                self._check_all(task)
            lacking = self._lacking(task)
            if lacking is None:
                continue
            del self._tasks[name]
            reason = "no live node holds all of it"
            if task.unchecked:  # repair has had its time
                self._in_vain_s[name] = self._context.now_s
            if damaged := task.damaged.get(lacking):
                self._put_off(name)
                nodes, errors = names_of(damaged), "; ".join(sorted(set(damaged.values())))
                reason = f"fragment {lacking} is damaged on every node that has it, {nodes}: {errors}"
            yield task.checkpoint, reason
        self._removed.clear()

    def _check_all(self, task: _Task) -> None:
        """Check all fragments; a node whose damaged copy was removed may get a new one."""
        task.unchecked = task.todo - task.running.keys()
        for index, errors in task.damaged.items():
            here = self._context.holders.of(task.checkpoint.id.attempt, index)
            task.damaged[index] = {node: error for node, error in errors.items() if node in here}

    def _lacking(self, task: _Task) -> int | None:
        """Return a fragment without a source now or later, or None; look only where a source may be gone."""
        now_s = self._context.now_s
        lacking = {index for index in task.unchecked if not self._sources(task, index)}
        has_come = not task.computed <= lacking
        task.unchecked = {index for index in lacking if self._is_computed(task, index)}
        task.computed = set(task.unchecked)
        if not task.unchecked:
            task.computed_s = None
        elif task.computed_s is None or has_come:
            task.computed_s = now_s
        elif now_s - task.computed_s > COMPUTED_S and not any(map(partial(self._is_made, task), lacking)):
            return min(lacking)
        return min(lacking - task.unchecked, default=None)

    def _is_made(self, task: _Task, index: int) -> bool:
        """Return True while a node computes a fragment."""
        return self._context.holders.parity.is_made(task.checkpoint.id.attempt, index, is_parity=False)

    def _is_computed(self, task: _Task, index: int) -> bool:
        """Return True if repair may compute a fragment, which no node holds, from its parity group."""
        holders, name = self._context.holders, task.checkpoint.id.attempt
        if holders.of(name, index):
            return False
        places = holders.places_of(name, index)
        return places is not None and index not in lost_members(places)

    def _put_off(self, name: str) -> None:
        now_s = self._context.now_s
        self._not_before_s = {n: at_s for n, at_s in self._not_before_s.items() if at_s > now_s}
        self._not_before_s[name] = now_s + DAMAGED_AGAIN_S

    def ended(self, event: DrainEnded) -> None:
        """Note the end of one upload. If the copy was damaged, `assign` tries another holder at once."""
        task, index = self._tasks.get(event.attempt.attempt), event.node_index
        if task is None or task.running.get(index) != event.node_id or task.items != event.items:
            return
        del task.running[index]
        if event.error is None:
            if event.part is not None:
                task.parts[index] = event.part
            task.todo.discard(index)
            if not task.todo:
                task.uploads_ended(self._context.now_s)
            return
        task.unchecked.add(index)
        if event.is_damage:
            task.damaged.setdefault(index, {})[event.node_id] = event.error
            task.waiting.add(index)
        else:
            heapq.heappush(task.paused, (self._context.now_s + _pause_s(task.tries[index]), index))

    def described(self, event: DescriptionWritten) -> frozenset[int]:
        """Note the result of a description: after success or damage end its drain, else try again later.

        Return the fragments that the drain has uploaded, none if it has ended before.
        """
        name, task = event.attempt.attempt, self._tasks.get(event.attempt.attempt)
        if event.is_damage:
            self._put_off(name)
        if event.error is None:
            self._unshared.discard(name)
        if event.error is None or event.is_damage:
            self.finish(name)
        elif task is not None and not task.todo and task.describe_at_s is None:
            task.describe_at_s = self._context.now_s + _pause_s(task.descriptions)
        return frozenset() if task is None else task.fragments

    def start_unshared(self, attempt: str) -> AttemptId | None:
        """Begin a drain anew that is damaged on the storage path and may have shared files there.

        No order of it names a durable checkpoint then. Return the one that the orders named; None, and change
        nothing, if they named none.
        """
        task = self._tasks.get(attempt)
        if task is None or task.like is None:
            return None
        live = {checkpoint.id.attempt for checkpoint in self._context.history.live()}
        self._unshared = {attempt, *(self._unshared & live)}
        self.finish(attempt)
        self.start(task.checkpoint, is_requested=True)
        return task.like

    def finish(self, attempt: str) -> None:
        """Remove the drain of a checkpoint that needs no drain any more."""
        self._tasks.pop(attempt, None)

    def lost(self, nodes: Set[str]) -> None:
        """End the uploads of dead nodes without counting a try, because the store did not fail."""
        for task in self._tasks.values():
            ended = {index for index, node in task.running.items() if node in nodes}
            for index in ended:
                del task.running[index]
                task.tries[index] -= 1
            if ended:
                task.waiting |= ended
                task.unchecked |= ended
                task.most_tries = max(task.tries.values())


def _pause_s(tries: int) -> float:
    """Return the pause after `tries` tries; `tries` is at least 1."""
    return min(RETRY_S * 2.0 ** min(tries - 1, MAX_DOUBLINGS), MAX_RETRY_S)
