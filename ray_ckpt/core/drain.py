"""Which node uploads which fragment to the remote tier, and when a checkpoint is there entirely."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Literal

from ray_ckpt.core.messages import Drain, DrainEnded
from ray_ckpt.types import CheckpointInfo

MAX_TRIES = 5  # per fragment and drain; then the checkpoint waits for the next drain
MAX_DRAINS = 2  # checkpoints on their way at a time; older ones that wait give way to newer ones


@dataclass(slots=True, kw_only=True)
class _Task:
    checkpoint: CheckpointInfo
    todo: set[int]
    running: dict[int, str] = field(default_factory=dict)  # node_index -> node that uploads it
    tries: dict[int, int] = field(default_factory=dict)


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
        waiting = [t for t in self._tasks.values() if not t.running]
        if len(self._tasks) >= MAX_DRAINS and waiting:
            del self._tasks[waiting[0].checkpoint.id.attempt]
        self._tasks[name] = _Task(checkpoint=checkpoint, todo=set(range(checkpoint.num_nodes)))

    def assign(self, holders: Mapping[str, Mapping[int, Set[str]]], live: Collection[str]) -> Iterator[Drain]:
        """Give each fragment that nobody uploads to a live holder."""
        for name, task in self._tasks.items():
            for index in sorted(task.todo - set(task.running)):
                nodes = sorted(n for n in holders.get(name, {}).get(index, ()) if n in live)
                tries = task.tries.get(index, 0)
                if nodes and tries < MAX_TRIES:
                    task.tries[index] = tries + 1
                    task.running[index] = nodes[tries % len(nodes)]
                    yield Drain(attempt=task.checkpoint.id, node_index=index, node_id=task.running[index])

    def ended(self, event: DrainEnded) -> Literal["more", "complete", "given up"]:
        """Note the end of one upload and tell how the checkpoint stands."""
        task = self._tasks.get(event.attempt.attempt)
        if task is None or task.running.get(event.node_index) != event.node_id:
            return "more"
        del task.running[event.node_index]
        if event.error is None:
            task.todo.discard(event.node_index)
        elif task.tries[event.node_index] >= MAX_TRIES:
            del self._tasks[event.attempt.attempt]
            return "given up"
        return "more" if task.todo else "complete"

    def finish(self, attempt: str) -> None:
        """The checkpoint needs no drain any more."""
        self._tasks.pop(attempt, None)

    def lost(self, nodes: Set[str]) -> None:
        for task in self._tasks.values():
            task.running = {i: n for i, n in task.running.items() if n not in nodes}
