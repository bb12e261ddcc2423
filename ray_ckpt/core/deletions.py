"""Deletion of retired checkpoints: the places that still hold their bytes, and the orders to delete them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set

from ray_ckpt.core.holders import Holders
from ray_ckpt.core.messages import REMOTE, Delete, DeleteEnded, DeleteLocalOrphans
from ray_ckpt.core.values import Inventory
from ray_ckpt.format.names import attempt_of
from ray_ckpt.types import CheckpointInfo

RETRY_S = 30.0  # pause before a failed deletion is tried again; long, because nothing waits for a deletion


class Deletions:
    """The places that still hold each retired checkpoint; `redo` rebuilds this state from the log."""

    def __init__(self) -> None:
        self._places: dict[str, set[str]] = {}
        self._ordered: dict[str, set[str]] = {}  # places that have not answered the order yet
        self._readers_until_s: dict[str, float] = {}  # time until which the storage path keeps its copy
        self._retry_at_s = 0.0

    def start(
        self, checkpoint: CheckpointInfo, nodes: Iterable[str], *, now_s: float, grace_s: float
    ) -> Iterator[Delete]:
        """Delete a checkpoint on these nodes and, `grace_s` later, on the storage path.

        A place that has not answered yet gets no second order. The grace period is for readers of the storage
        path, of which the coordinator has no list. Readers on the nodes are registered: a checkpoint that
        they read is not retired.
        """
        attempt = checkpoint.id.attempt
        places = self._places.setdefault(attempt, {REMOTE, *nodes})
        ordered = self._ordered.setdefault(attempt, set())
        until_s = self._readers_until_s.setdefault(attempt, now_s + grace_s)
        waiting = {REMOTE} if now_s < until_s else set()
        if waiting:
            self._retry_at_s = min(self._retry_at_s, until_s)
        for place in sorted(places - ordered - waiting):
            ordered.add(place)
            yield Delete(attempt=attempt, directory=checkpoint.directory, place=place)

    def ended(self, event: DeleteEnded) -> Iterator[str]:
        """Note the end of one deletion; yield the attempt if no place holds it any more."""
        places = self._places.get(event.attempt)
        if places is None:
            return
        self._ordered[event.attempt].discard(event.place)
        if event.error is None:
            places.discard(event.place)
            yield from self._gone(event.attempt)

    def lost(self, nodes: Set[str]) -> Iterator[str]:
        """Forget the copies on nodes that died; yield the attempts that no place holds any more."""
        for attempt, places in list(self._places.items()):
            places -= nodes
            yield from self._gone(attempt)

    def redo(
        self, retired: Iterable[CheckpointInfo], nodes: Collection[str], *, now_s: float, grace_s: float
    ) -> Iterator[Delete]:
        """Delete copies whose grace is over, whose deletion failed, or that an earlier coordinator left."""
        self._retry_at_s = now_s + RETRY_S
        for checkpoint in retired:
            yield from self.start(checkpoint, nodes, now_s=now_s, grace_s=grace_s)

    def is_due(self, now_s: float) -> bool:
        """Return True if it is time to call `redo`."""
        return now_s >= self._retry_at_s

    def _gone(self, attempt: str) -> Iterator[str]:
        if not self._places[attempt]:
            del self._places[attempt], self._ordered[attempt], self._readers_until_s[attempt]
            yield attempt


def delete_retired(
    inventories: Mapping[str, Inventory], checkpoints: Mapping[str, CheckpointInfo], holders: Holders
) -> Iterator[DeleteLocalOrphans]:
    """Order nodes that join to delete the checkpoints, or their parts, that were retired meanwhile."""
    for node, inventory in inventories.items():
        known = sorted({*map(attempt_of, inventory.directories)} & checkpoints.keys())
        retired = [name for name in known if checkpoints[name].state in ("retired", "collected")]
        for name in retired:
            holders.remove_all(name, node)
        if retired:
            directories = tuple(checkpoints[name].directory for name in retired)
            yield DeleteLocalOrphans(node_id=node, directories=directories)
