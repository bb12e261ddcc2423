"""One attempt at a save as the coordinator sees it, and when it may be committed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ray_ckpt.core.messages import NodeStored, SessionNode
from ray_ckpt.format.digest import root_digest
from ray_ckpt.types import AttemptId, FileEntry


@dataclass(slots=True, kw_only=True)
class Attempt:
    """Who has stored what. `goal` is the number of copies on other nodes that the commit waits for."""

    id: AttemptId
    nodes: tuple[SessionNode, ...]
    started_s: float
    stored: dict[int, NodeStored] = field(default_factory=dict)
    copies: dict[int, set[str]] = field(default_factory=dict)  # node_index -> other nodes that hold it
    failed: dict[int, set[str]] = field(default_factory=dict)  # node_index -> holders that could not
    given_up: set[int] = field(default_factory=set)  # node indexes without any holder left to ask
    committing: bool = False

    @property
    def is_local(self) -> bool:
        return len(self.stored) == len(self.nodes)

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        return tuple(sorted(r for n in self.nodes if n.node_index not in self.stored for r in n.ranks))

    @property
    def disagrees(self) -> bool:
        """The ranks differ in what each of them takes for common to all."""
        return len({name for stored in self.stored.values() for name in stored.replicated}) > 1

    def reaches_goal(self) -> bool:
        """Local everywhere, and each fragment has all the copies that it can still get."""
        return self.is_local and all(
            len(self.copies.get(n.node_index, ())) >= len(n.holders) or n.node_index in self.given_up
            for n in self.nodes
        )

    def files(self) -> tuple[FileEntry, ...]:
        return tuple(f for stored in self.stored.values() for f in stored.files)

    def root(self) -> str:
        return root_digest(self.files())

    def size_bytes(self) -> int:
        return sum(f.size_bytes for f in self.files())

    def metrics(self) -> Mapping[str, float]:
        return next((s.metrics for s in self.stored.values() if s.metrics is not None), {})
