"""Which node uploads which fragment to the remote tier, and when a checkpoint is there entirely.

A store that fails ends no drain: its fragments are tried again, each time on the next holder, at a growing
distance. A drain ends when the checkpoint is described there, when no live node has an intact copy of a part
that is left, when retention gives the checkpoint up, or when it waits for its turn and newer ones do too.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Literal

from ray_ckpt.core.context import Context, names_of
from ray_ckpt.core.messages import DescriptionWritten, Drain, DrainEnded, WriteDescription
from ray_ckpt.types import CheckpointInfo

RETRY_S = 2.0  # before the second try of a fragment, doubled each time
MAX_RETRY_S = 60.0  # between tries: a store that is back after hours is noticed within a minute
MAX_DOUBLINGS = 5  # reach that
MAX_ACTIVE = 2  # checkpoints on their way at a time
MAX_QUEUED = 4  # and waiting for their turn, each kept by retention; older ones give way to newer ones
PATIENT_TRIES = 5  # that failed, in a minute; after that a full disk need not wait for the drain
DAMAGED_AGAIN_S = 3600.0  # after a drain that found no intact copy: time for scrub and repair


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainUnderway:
    """A checkpoint on its way to the storage path, as others may see it.

    `state`: "waiting" for its turn or for a source, "uploading", "failing" while the store has not taken it
    for a while, "describing" when all of its bytes are there.
    """

    step: int
    attempt: str
    state: Literal["waiting", "uploading", "failing", "describing"]
    fragments: int
    fragments_done: int
    nodes: tuple[str, ...]  # that upload at the moment
    size_bytes: int  # of the whole checkpoint
    tries: int  # of the fragment that was tried most
    age_s: float  # since it was asked for
    started_s: float | None  # for so long it has been on its way; None: it waits for its turn


@dataclass(slots=True, kw_only=True)
class _Task:
    checkpoint: CheckpointInfo
    asked_s: float  # monotonic, as `begun_s`
    begun_s: float | None = None
    todo: set[int]
    waiting: set[int]  # those of `todo` that nobody uploads
    running: dict[int, str] = field(default_factory=dict)  # node_index -> node that uploads it
    tries: dict[int, int] = field(default_factory=dict)
    most_tries: int = 0  # of them; looked at with each event
    not_before_s: dict[int, float] = field(default_factory=dict)
    damaged: dict[int, dict[str, str]] = field(default_factory=dict)  # node_index -> node -> what it says
    descriptions: int = 0  # tries
    describe_at_s: float | None = None  # None: not all is there, or it is being written

    @property
    def is_started(self) -> bool:
        return bool(self.tries)

    @property
    def is_stuck(self) -> bool:
        return max(self.descriptions, self.most_tries) > PATIENT_TRIES

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
            age_s=now_s - self.asked_s,
            started_s=None if self.begun_s is None else now_s - self.begun_s,
        )


class Drains:
    """Any holder of a fragment may upload it: the bytes and names are the same, so twice is harmless."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._tasks: dict[str, _Task] = {}
        self._urgent = ""  # the attempt that the end of the run waits for
        self._not_before_s: dict[str, float] = {}  # attempts of which no intact copy was found

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._tasks)

    @property
    def attempts(self) -> set[str]:
        return set(self._tasks)

    @property
    def stuck(self) -> set[str]:
        """Those that the storage path has not taken for a while."""
        return {name for name, task in self._tasks.items() if task.is_stuck}

    def underway(self) -> tuple[DrainUnderway, ...]:
        """All of them, those on their way first."""
        found = [task.underway(self._context.now_s) for task in self._tasks.values()]
        return tuple(sorted(found, key=lambda drain: (drain.started_s is None, drain.step)))

    @property
    def has_room(self) -> bool:
        """One more would not make another give way."""
        return len(self._tasks) < MAX_ACTIVE + MAX_QUEUED

    def start(self, checkpoint: CheckpointInfo, *, is_urgent: bool = False, is_asked: bool = False) -> None:
        """Bring a checkpoint to the storage path; before others if it is urgent, and also if no intact copy
        was found a while ago if somebody asks for it, who is told.
        """
        name, now_s = checkpoint.id.attempt, self._context.now_s
        if not is_asked and now_s < self._not_before_s.get(name, now_s):
            return
        if is_urgent:
            self._urgent = name
        if name in self._tasks:
            return
        parts = range(checkpoint.num_nodes)
        self._tasks[name] = _Task(checkpoint=checkpoint, asked_s=now_s, todo=set(parts), waiting=set(parts))
        if len(self._tasks) > MAX_ACTIVE + MAX_QUEUED:
            del self._tasks[min(self._tasks, key=self._worth)]

    def _worth(self, name: str) -> tuple[bool, bool, int]:
        """The least gives way: an old one that has not begun."""
        task = self._tasks[name]
        return name == self._urgent, task.is_started, task.checkpoint.seq

    def assign(self) -> Iterator[Drain | WriteDescription]:
        """Give each fragment that nobody uploads to a live holder; describe what is there entirely."""
        now_s = self._context.now_s
        for task in sorted(self._tasks.values(), key=self._turn)[:MAX_ACTIVE]:
            given = set[int]()
            for index in sorted(task.waiting):
                nodes = self._sources(task, index)
                tries = task.tries.get(index, 0)
                if nodes and now_s >= task.not_before_s.get(index, 0.0):
                    task.tries[index] = tries + 1
                    task.most_tries = max(task.most_tries, tries + 1)
                    task.begun_s = now_s if task.begun_s is None else task.begun_s
                    task.running[index] = nodes[(index + tries) % len(nodes)]
                    given.add(index)
                    yield Drain(attempt=task.checkpoint.id, node_index=index, node_id=task.running[index])
            if given:
                task.waiting = (
                    task.waiting - given
                )  # a new set: an emptied one is as slow to look through as before
        for name, task in self._tasks.items():
            if task.describe_at_s is not None and now_s >= task.describe_at_s:
                task.describe_at_s = None
                task.descriptions += 1
                yield WriteDescription(checkpoint=self._context.history.checkpoints[name])

    def _turn(self, task: _Task) -> tuple[bool, bool, bool]:
        """Of equals the one that was asked for first; those that fail again and again let others pass."""
        return task.checkpoint.id.attempt != self._urgent, task.is_stuck, not task.is_started

    def _sources(self, task: _Task, index: int) -> list[str]:
        """Live nodes whose copy of a fragment is not known to be damaged."""
        holders = self._context.holders
        return sorted(
            (holders.of(task.checkpoint.id.attempt, index) & holders.live)
            - task.damaged.get(index, {}).keys()
        )

    def give_up(self) -> Iterator[tuple[CheckpointInfo, str]]:
        """End drains of which no live node has a part that is left, intact; each with the reason."""
        for name, task in list(self._tasks.items()):
            lacking = next((index for index in task.waiting if not self._sources(task, index)), None)
            if lacking is None:
                continue
            del self._tasks[name]
            reason = "no live node holds all of it"
            if damaged := task.damaged.get(lacking):
                self._put_off(name)
                nodes, says = names_of(damaged), "; ".join(sorted(set(damaged.values())))
                reason = f"fragment {lacking} is damaged on every node that has it, {nodes}: {says}"
            yield task.checkpoint, reason

    def _put_off(self, name: str) -> None:
        now_s = self._context.now_s
        self._not_before_s = {n: at_s for n, at_s in self._not_before_s.items() if at_s > now_s}
        self._not_before_s[name] = now_s + DAMAGED_AGAIN_S

    def ended(self, event: DrainEnded) -> None:
        """Note the end of one upload. What was damaged there is read from another holder, at once."""
        task, index = self._tasks.get(event.attempt.attempt), event.node_index
        if task is None or task.running.get(index) != event.node_id:
            return
        del task.running[index]
        if event.error is None:
            task.todo.discard(index)
            if not task.todo:
                task.describe_at_s = self._context.now_s
            return
        task.waiting.add(index)
        if event.is_damage:
            task.damaged.setdefault(index, {})[event.node_id] = event.error
        else:
            task.not_before_s[index] = self._context.now_s + _pause_s(task.tries[index])

    def described(self, event: DescriptionWritten) -> None:
        """The description is there, or comes again; unless what it would describe is damaged there."""
        name, task = event.attempt.attempt, self._tasks.get(event.attempt.attempt)
        if event.is_damage:
            self._put_off(name)
        if event.error is None or event.is_damage:
            self.finish(name)
        elif task is not None and not task.todo and task.describe_at_s is None:
            task.describe_at_s = self._context.now_s + _pause_s(task.descriptions)

    def finish(self, attempt: str) -> None:
        """The checkpoint needs no drain any more."""
        self._tasks.pop(attempt, None)

    def lost(self, nodes: Set[str]) -> None:
        """Uploads of dead nodes have ended; that is no failure of the store."""
        for task in self._tasks.values():
            for index, node in list(task.running.items()):
                if node in nodes:
                    del task.running[index]
                    task.waiting.add(index)
                    task.tries[index] -= 1
                    task.most_tries = max(task.tries.values())


def _pause_s(tries: int) -> float:
    """After so many tries, one at least."""
    return min(RETRY_S * 2.0 ** min(tries - 1, MAX_DOUBLINGS), MAX_RETRY_S)
