"""Which node uploads which fragment to the remote tier, and when a checkpoint is there entirely."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Literal

from ray_ckpt.core.context import Holders
from ray_ckpt.core.messages import Drain, DrainEnded
from ray_ckpt.types import CheckpointInfo

MAX_TRIES = 5  # per fragment and drain; then the checkpoint waits for the next drain
RETRY_S = 2.0  # before the second try of a fragment, doubled each time: a store that is away for a minute
MAX_ACTIVE = 2  # checkpoints on their way at a time
MAX_QUEUED = 4  # and waiting for their turn, each kept by retention; older ones give way to newer ones


@dataclass(slots=True, kw_only=True)
class _Task:
    checkpoint: CheckpointInfo
    todo: set[int]
    waiting: set[int]  # those of `todo` that nobody uploads
    running: dict[int, str] = field(default_factory=dict)  # node_index -> node that uploads it
    tries: dict[int, int] = field(default_factory=dict)
    not_before_s: dict[int, float] = field(default_factory=dict)

    @property
    def is_started(self) -> bool:
        return bool(self.tries)


class Drains:
    """Any holder of a fragment may upload it: the bytes and names are the same, so twice is harmless."""

    def __init__(self) -> None:
        self._tasks: dict[str, _Task] = {}

    @property
    def attempts(self) -> set[str]:
        return set(self._tasks)

    def start(self, checkpoint: CheckpointInfo) -> None:
        name = checkpoint.id.attempt
        if name in self._tasks:
            return
        waiting = [name for name, task in self._tasks.items() if not task.is_started]
        if len(waiting) >= MAX_QUEUED:
            del self._tasks[waiting[0]]
        parts = range(checkpoint.num_nodes)
        self._tasks[name] = _Task(checkpoint=checkpoint, todo=set(parts), waiting=set(parts))

    def assign(self, holders: Holders, now_s: float) -> Iterator[Drain]:
        """Give each fragment of the oldest checkpoints that nobody uploads to a live holder."""
        for task in list(self._tasks.values())[:MAX_ACTIVE]:
            name = task.checkpoint.id.attempt
            for index in sorted(task.waiting):
                nodes = sorted(holders.of(name, index) & holders.live)
                tries = task.tries.get(index, 0)
                if nodes and now_s >= task.not_before_s.get(index, 0.0):
                    task.tries[index] = tries + 1
                    task.running[index] = nodes[(index + tries) % len(nodes)]
                    task.waiting.discard(index)
                    yield Drain(attempt=task.checkpoint.id, node_index=index, node_id=task.running[index])

    def give_up_orphans(self, holders: Holders) -> Iterator[CheckpointInfo]:
        """Checkpoints of which no live node holds a part that is still to be uploaded; their drains end."""
        for name, task in list(self._tasks.items()):
            if any(not holders.of(name, index) & holders.live for index in task.waiting):
                del self._tasks[name]
                yield task.checkpoint

    def ended(self, event: DrainEnded, now_s: float) -> Literal["more", "complete", "given up"]:
        """Note the end of one upload and tell how the checkpoint stands."""
        task, index = self._tasks.get(event.attempt.attempt), event.node_index
        if task is None or task.running.get(index) != event.node_id:
            return "more"
        del task.running[index]
        if event.error is None:
            task.todo.discard(index)
        elif task.tries[index] >= MAX_TRIES:
            del self._tasks[event.attempt.attempt]
            return "given up"
        else:
            task.waiting.add(index)
            task.not_before_s[index] = now_s + RETRY_S * 2 ** (task.tries[index] - 1)
        return "more" if task.todo else "complete"

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
