"""Bytes of retired checkpoints: where they still are, and when all of them are gone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Set

from ray_ckpt.core.messages import REMOTE, Delete, DeleteEnded
from ray_ckpt.types import CheckpointInfo

RETRY_S = 30.0  # between tries at places that failed; nothing waits for it


class Deletions:
    """Places per retired checkpoint. It all follows from the log: a new coordinator starts with `redo`."""

    def __init__(self) -> None:
        self._places: dict[str, set[str]] = {}
        self._asked: dict[str, set[str]] = {}  # places that have been asked and have not answered
        self._readers_until_s: dict[str, float] = {}  # until then the storage path keeps its copy
        self._retry_at_s = 0.0

    def start(
        self, checkpoint: CheckpointInfo, nodes: Iterable[str], *, now_s: float, grace_s: float
    ) -> Iterator[Delete]:
        """Delete a checkpoint on these nodes and, `grace_s` later, on the storage path.

        A place at work is not asked again. The grace is for those who read the storage path from outside;
        the nodes' readers are known, and protected from retirement.
        """
        attempt = checkpoint.id.attempt
        places = self._places.setdefault(attempt, {REMOTE, *nodes})
        asked = self._asked.setdefault(attempt, set())
        until_s = self._readers_until_s.setdefault(attempt, now_s + grace_s)
        waiting = {REMOTE} if now_s < until_s else set()
        if waiting:
            self._retry_at_s = min(self._retry_at_s, until_s)
        for place in sorted(places - asked - waiting):
            asked.add(place)
            yield Delete(attempt=attempt, directory=checkpoint.directory, place=place)

    def ended(self, event: DeleteEnded) -> Iterator[str]:
        """Note the end of one; yields the attempt when it is gone everywhere."""
        places = self._places.get(event.attempt)
        if places is None:
            return
        self._asked[event.attempt].discard(event.place)
        if event.error is None:
            places.discard(event.place)
            yield from self._gone(event.attempt)

    def lost(self, nodes: Set[str]) -> Iterator[str]:
        """Nodes died, and what they held with them."""
        for attempt, places in list(self._places.items()):
            places -= nodes
            yield from self._gone(attempt)

    def redo(
        self, retired: Iterable[CheckpointInfo], nodes: Collection[str], *, now_s: float, grace_s: float
    ) -> Iterator[Delete]:
        """Ask where the grace is over or a delete failed, and for what an earlier coordinator left undone."""
        self._retry_at_s = now_s + RETRY_S
        for checkpoint in retired:
            yield from self.start(checkpoint, nodes, now_s=now_s, grace_s=grace_s)

    def is_due(self, now_s: float) -> bool:
        """Time to redo."""
        return now_s >= self._retry_at_s

    def _gone(self, attempt: str) -> Iterator[str]:
        if not self._places[attempt]:
            del self._places[attempt], self._asked[attempt], self._readers_until_s[attempt]
            yield attempt
