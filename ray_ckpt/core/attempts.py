"""One attempt at a save on the coordinator: the table of the attempt's states, and the attempt's copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ray_ckpt.core.awaited import ranks_text
from ray_ckpt.core.messages import NodeStored
from ray_ckpt.core.replica_findings import finding
from ray_ckpt.core.values import SessionNode
from ray_ckpt.format.digest import root_digest
from ray_ckpt.types import AttemptId, FileEntry, ParityGroup, SaveFacts

AttemptState: TypeAlias = Literal["writing", "copying", "committing", "committed", "dropped"]
AttemptEvent: TypeAlias = Literal["stored", "stored_by_all", "queued", "withdrawn", "logged", "dropped"]

TRANSITIONS: Mapping[AttemptState, Mapping[AttemptEvent, AttemptState]] = {
    # "writing" lasts until every node has the files of its own ranks
    "writing": {"stored": "writing", "stored_by_all": "copying", "dropped": "dropped"},
    # "copying" lasts until the holders have their copies, or the attempt has waited long enough
    "copying": {"stored_by_all": "copying", "queued": "committing", "dropped": "dropped"},
    # "committing" lasts while the commit record waits for the log; until it is sent, it can be withdrawn
    "committing": {"stored_by_all": "committing", "withdrawn": "copying", "logged": "committed"},
    "committed": {},
    "dropped": {},
}

COUNTS = ("/steps", "/saves")  # endings of the kinds of shared content that count steps (`StepCount.mark`)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveUnderway:
    """A save that is neither committed nor dropped, for status.

    `phase` is the state of the save's attempt. `copies` counts the copies that have arrived,
    `copies_awaited` those that have not; with parity, both count the parity files in place of copies.
    """

    step: int
    phase: AttemptState
    ranks_captured: int
    ranks_stored: int
    world_size: int
    copies: int = 0
    copies_awaited: int = 0
    size_bytes: int = 0  # size of the files stored so far
    age_s: float | None = None  # seconds since the first node had stored its files; None: no node has


@dataclass(slots=True, kw_only=True)
class Attempt:
    """An attempt: the nodes that have stored their part of it, and the copies that are still on their way."""

    id: AttemptId
    nodes: tuple[SessionNode, ...]
    started_s: float
    state: AttemptState = "writing"
    stored: dict[int, NodeStored] = field(default_factory=dict)
    awaited: dict[int, set[str]] = field(default_factory=dict)  # node_index -> nodes that will get a copy
    copies: dict[int, set[str]] = field(default_factory=dict)  # node_index -> other nodes that hold a copy
    versions: dict[int, set[FileEntry]] = field(default_factory=dict)  # node_index -> as nodes list it
    groups: tuple[ParityGroup, ...] = ()  # the parity groups of its nodes
    _group_of: dict[int, ParityGroup] = field(init=False)  # node_index -> the node's parity group
    coding: dict[int, str] = field(default_factory=dict)  # node_index -> node that makes its parity file
    failed: dict[int, set[str]] = field(default_factory=dict)  # node_index -> nodes whose copy failed
    reported_s: dict[tuple[int, str], float] = field(default_factory=dict)  # (node_index, node) -> time
    stored_s: float = 0.0  # time at which the last node had stored its own files
    commit_s: float = 0.0  # time at which the commit record was decided
    is_salvage: bool = False  # survivors save the step: ranks that do not take part are not missing
    story: list[str] = field(default_factory=list)  # the changes of `state`

    def __post_init__(self) -> None:
        self._group_of = {member: group for group in self.groups for member in group.members}

    def change(self, event: AttemptEvent) -> None:
        """Go to the next state; raise RuntimeError and change nothing if TRANSITIONS has no such pair."""
        state = TRANSITIONS[self.state].get(event)
        if state is None:
            story = ", ".join(self.story) or "nothing yet"
            raise RuntimeError(
                f"The attempt at step {self.id.step} ({self.id.attempt}) is {self.state} and cannot be "
                f"{event}. Its story: {story}."
            )
        if state != self.state:
            self.story.append(f"{event} -> {state}")
            self.state = state

    def store(self, event: NodeStored, now_s: float) -> None:
        """Note that a node has stored its own files and now sends the copies of them."""
        is_last = len(self.stored) + (event.node_index not in self.stored) == len(self.nodes)
        self.change("stored_by_all" if is_last else "stored")
        if event.node_index not in self.stored:
            self.stored_s = now_s
            index = event.node_index  # `ended` may not be empty: copies may end before this message arrives
            ended = self.copies.get(index, set()) | self.failed.get(index, set())
            if waiting := set(self.nodes[index].holders) - ended:
                self.awaited.setdefault(index, set()).update(waiting)
        self.stored[event.node_index] = event
        self.reported_s[event.node_index, event.node_id] = now_s
        self.list_version(event.node_index, event.fragment)

    def list_version(self, node_index: int, fragment: FileEntry) -> None:
        """Note the entry of a fragment on one of the nodes that hold it."""
        self.versions.setdefault(node_index, set()).add(fragment)

    def replace(
        self, node_index: int, holder: str, live: Set[str], order: Callable[[str], tuple[int, int, str]]
    ) -> str | None:
        """Note that a copy failed or was lost. Return the first node in its place; None if none is left."""
        self.failed.setdefault(node_index, set()).add(holder)
        self._ended(node_index, holder)
        self.copies.setdefault(node_index, set()).discard(holder)
        other = min(self.others(node_index, live), key=order, default=None)
        if other is not None:
            self.awaited.setdefault(node_index, set()).add(other)
        return other

    def others(self, node_index: int, live: Set[str]) -> Set[str]:
        """Return the nodes of `live` that hold no copy, await no copy and have not failed to take one."""
        taken = (self.failed, self.awaited, self.copies)
        return live - {self.nodes[node_index].node_id}.union(*(t.get(node_index, set()) for t in taken))

    def arrive(self, node_index: int, holder: str) -> None:
        """Note that `holder` has fsynced a copy."""
        self._ended(node_index, holder)
        self.copies.setdefault(node_index, set()).add(holder)

    def _ended(self, node_index: int, holder: str) -> None:
        awaited = self.awaited.get(node_index, set())
        awaited.discard(holder)
        if not awaited:
            self.awaited.pop(node_index, None)

    @property
    def is_local(self) -> bool:
        """True if every node has stored its own files."""
        return self.state != "writing"

    @property
    def is_committing(self) -> bool:
        return self.state == "committing"

    @property
    def is_ready(self) -> bool:
        """True if every node has stored its own files and no copy or parity file is awaited any more."""
        return self.is_local and not self.awaited and not self.coding

    def completed_group(self, node_index: int) -> ParityGroup | None:
        """Return the node's parity group if all of its nodes have stored their files, else None."""
        group = self._group_of.get(node_index)
        return group if group is not None and self.stored.keys() >= set(group.members) else None

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        return tuple(sorted(r for n in self.nodes if n.node_index not in self.stored for r in n.ranks))

    @property
    def disagrees(self) -> bool:
        """True if ranks report different values of content that they share (`<name>:<value>`)."""
        found = {name for stored in self.stored.values() for name in stored.replicated}
        return len(found) > len({name.rpartition(":")[0] for name in found})

    @property
    def finding(self) -> str:
        """The text about replicas that differ; "" if none do, or if nodes were found without reports."""
        return finding({stored.node_id: stored.watched for stored in self.stored.values()})

    @property
    def differing(self) -> tuple[int, ...]:
        """The indexes of fragments of which nodes list different bytes, so that no version is proven."""
        return tuple(sorted(index for index, found in self.versions.items() if len(found) > 1))

    def counts(self) -> str:
        """Return the step counts if they differ, such as `10 on rank(s) 0, 1; 9 on rank(s) 2`; "" if not."""
        by_kind: dict[str, dict[int, list[str]]] = {}  # kind of count -> node_index -> values
        for index, stored in sorted(self.stored.items()):
            for name in sorted(stored.replicated, key=lambda name: (len(name), name)):
                kind, _, value = name.rpartition(":")
                if kind.endswith(COUNTS):
                    by_kind.setdefault(kind, {}).setdefault(index, []).append(value)
        ranks: dict[str, list[int]] = {}  # values -> ranks of the nodes that reported these values
        for nodes in by_kind.values():
            if len({value for values in nodes.values() for value in values}) > 1:
                for index, values in nodes.items():
                    ranks.setdefault(" or ".join(values), []).extend(self.nodes[index].ranks)
        return "; ".join(f"{values} on rank(s) {ranks_text(where)}" for values, where in ranks.items())

    def underway(self, now_s: float, num_coded: int) -> SaveUnderway:
        """Return the attempt's status at monotonic time `now_s`, with `num_coded` parity files."""
        stored = sum(len(n.ranks) for n in self.nodes if n.node_index in self.stored)
        return SaveUnderway(
            step=self.id.step,
            phase=self.state,
            ranks_captured=stored,
            ranks_stored=stored,
            world_size=sum(len(n.ranks) for n in self.nodes),
            copies=sum(map(len, self.copies.values())) + num_coded,
            copies_awaited=sum(map(len, self.awaited.values())) + len(self.coding),
            size_bytes=self.size_bytes(),
            age_s=now_s - self.started_s,
        )

    def root(self) -> str:
        return root_digest(stored.fragment for stored in self.stored.values())

    def size_bytes(self) -> int:
        return sum(stored.size_bytes for stored in self.stored.values())

    def facts(self) -> SaveFacts:
        """Return mesh, shared bytes, and the slowest nodes' times, None if a node has not reported it."""
        return SaveFacts(
            mesh=next((stored.facts.mesh for stored in self.stored.values() if stored.facts.mesh), ""),
            stall_s=_slowest(stored.facts.stall_s for stored in self.stored.values()),
            capture_s=_slowest(stored.facts.capture_s for stored in self.stored.values()),
            local_s=_slowest(stored.facts.local_s for stored in self.stored.values()),
            shared_bytes=sum(stored.facts.shared_bytes for stored in self.stored.values()),
        )

    def metrics(self) -> Mapping[str, float]:
        return next((s.metrics for s in self.stored.values() if s.metrics is not None), {})


def _slowest(times_s: Iterable[float | None]) -> float | None:
    slowest_s = 0.0
    for time_s in times_s:
        if time_s is None:
            return None
        slowest_s = max(slowest_s, time_s)
    return slowest_s
