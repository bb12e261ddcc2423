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
        self._retry_at_s = 0.0

    def start(self, checkpoint: CheckpointInfo, nodes: Iterable[str]) -> Iterator[Delete]:
        """Delete a checkpoint on these nodes and on the storage path; a place at work is not asked again."""
        attempt = checkpoint.id.attempt
        places = self._places.setdefault(attempt, {REMOTE, *nodes})
        asked = self._asked.setdefault(attempt, set())
        for place in sorted(places - asked):
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
        self, retired: Iterable[CheckpointInfo], nodes: Collection[str], now_s: float
    ) -> Iterator[Delete]:
        """Ask again where a delete failed, and for what an earlier coordinator left undone."""
        if now_s >= self._retry_at_s:
            self._retry_at_s = now_s + RETRY_S
            for checkpoint in retired:
                yield from self.start(checkpoint, nodes)

    def _gone(self, attempt: str) -> Iterator[str]:
        if not self._places[attempt]:
            del self._places[attempt], self._asked[attempt]
            yield attempt
