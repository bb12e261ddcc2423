"""One attempt at a save as the coordinator sees it, and when it may be committed."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from ray_ckpt.core.messages import NodeStored, SessionNode
from ray_ckpt.format.digest import root_digest
from ray_ckpt.types import AttemptId, FileEntry


@dataclass(slots=True, kw_only=True)
class Attempt:
    """Who has stored what, and which copies are still on their way."""

    id: AttemptId
    nodes: tuple[SessionNode, ...]
    started_s: float
    stored: dict[int, NodeStored] = field(default_factory=dict)
    awaited: dict[int, set[str]] = field(default_factory=dict)  # node_index -> who is to get a copy
    copies: dict[int, set[str]] = field(default_factory=dict)  # node_index -> other nodes that hold it
    failed: dict[int, set[str]] = field(default_factory=dict)  # node_index -> nodes that could not
    committing: bool = False

    def store(self, event: NodeStored) -> None:
        """A node has everything of its own, and sends its copies now."""
        if event.node_index not in self.stored:
            index = event.node_index  # copies may have ended before this message came
            ended = self.copies.get(index, set()) | self.failed.get(index, set())
            if waiting := set(self.nodes[index].holders) - ended:
                self.awaited.setdefault(index, set()).update(waiting)
        self.stored[event.node_index] = event

    def replace(self, node_index: int, holder: str, live: Set[str]) -> str | None:
        """A copy did not get there, or is gone: the node to try next, None if there is no other."""
        self.failed.setdefault(node_index, set()).add(holder)
        self._ended(node_index, holder)
        self.copies.setdefault(node_index, set()).discard(holder)
        others = self.others(node_index, live)
        if not others:
            return None
        self.awaited.setdefault(node_index, set()).add(others[0])
        return others[0]

    def others(self, node_index: int, live: Set[str]) -> list[str]:
        """Nodes of `live` that may be sent a copy: they hold none, await none and have not failed."""
        taken = (self.failed, self.awaited, self.copies)
        return sorted(
            live - {self.nodes[node_index].node_id}.union(*(t.get(node_index, set()) for t in taken))
        )

    def arrive(self, node_index: int, holder: str) -> None:
        """A copy is fsynced on `holder`."""
        self._ended(node_index, holder)
        self.copies.setdefault(node_index, set()).add(holder)

    def _ended(self, node_index: int, holder: str) -> None:
        awaited = self.awaited.get(node_index, set())
        awaited.discard(holder)
        if not awaited:
            self.awaited.pop(node_index, None)

    @property
    def is_local(self) -> bool:
        return len(self.stored) == len(self.nodes)

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        return tuple(sorted(r for n in self.nodes if n.node_index not in self.stored for r in n.ranks))

    @property
    def disagrees(self) -> bool:
        """The ranks of a part differ in what each of them takes for common to them; `<part>:<digest>`."""
        found = {name for stored in self.stored.values() for name in stored.replicated}
        return len(found) > len({name.rpartition(":")[0] for name in found})

    def reaches_goal(self) -> bool:
        """Local everywhere, and each fragment has all the copies that it can still get."""
        return self.is_local and not self.awaited

    def files(self) -> tuple[FileEntry, ...]:
        return tuple(f for stored in self.stored.values() for f in stored.files)

    def root(self) -> str:
        return root_digest(self.files())

    def size_bytes(self) -> int:
        return sum(f.size_bytes for f in self.files())

    def metrics(self) -> Mapping[str, float]:
        return next((s.metrics for s in self.stored.values() if s.metrics is not None), {})
