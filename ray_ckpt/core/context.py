"""What the parts of the run machine share."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ray_ckpt.config import RunOptions
from ray_ckpt.core.history import RunHistory
from ray_ckpt.core.ledger import Ledger
from ray_ckpt.core.links import Links
from ray_ckpt.core.messages import Warn
from ray_ckpt.core.values import Inventory, SessionKey, SessionPlan
from ray_ckpt.telemetry import Metric, Sample
from ray_ckpt.types import CheckpointInfo, Level

MAX_SAVE_SIGNALS = 64  # steps that were named last, by which a late rank is told from one that saves alone
MAX_WARNINGS = 256  # said once each; after that they may repeat
MAX_SAMPLES = 1000  # of metrics that nobody has taken yet; taken after each event


class Holders:
    """Which live nodes hold which fragment of which attempt, complete and fsynced."""

    def __init__(self) -> None:
        self.live: frozenset[str] = frozenset()
        self.bad_remote: set[str] = set()  # live attempts whose copy on the storage path is damaged
        self._nodes: dict[str, dict[int, set[str]]] = {}
        self._tried: dict[str, set[str]] = {}  # attempt -> nodes that may have files of a copy that failed
        self._disks: dict[str, str] = {}  # disk -> the node that it was last found on
        self._left: set[str] = set()  # nodes whose disk was found on another since; their late words are void

    def add(self, attempt: str, node_index: int, node: str) -> None:
        if node not in self.live or node in self._left:
            return  # late words about a dead node
        self._nodes.setdefault(attempt, {}).setdefault(node_index, set()).add(node)

    def of(self, attempt: str, node_index: int) -> frozenset[str]:
        return frozenset(self._nodes.get(attempt, {}).get(node_index, ()))

    def anywhere(self, attempt: str) -> frozenset[str]:
        """Nodes that hold any part of it."""
        return frozenset().union(*self._nodes.get(attempt, {}).values())

    def note_tried(self, attempt: str, node: str) -> None:
        """Note that a copy to a node failed: all or part of it may lie there."""
        self._tried.setdefault(attempt, set()).add(node)

    def may_have(self, attempt: str) -> frozenset[str]:
        """Live nodes that hold any part of it, or have been sent one."""
        return self.live & self.anywhere(attempt).union(self._tried.get(attempt, ()))

    def num_copies(self, attempt: str, num_nodes: int) -> int:
        """Copies besides the first that every fragment has; -1 if a fragment is held by nobody."""
        return min(len(self.of(attempt, index)) for index in range(num_nodes)) - 1

    def has_all(self, checkpoint: CheckpointInfo) -> bool:
        """Whether live nodes hold every part of it."""
        return self.num_copies(checkpoint.id.attempt, checkpoint.num_nodes) >= 0

    def can_serve(self, checkpoint: CheckpointInfo) -> bool:
        """Whether every part of it can be read from a live node or the storage path."""
        is_remote = checkpoint.level >= Level.DURABLE and checkpoint.id.attempt not in self.bad_remote
        return is_remote or self.has_all(checkpoint)

    def count(self, attempt: str, node: str) -> int:
        """How many fragments of it a node holds."""
        return sum(node in nodes for nodes in self._nodes.get(attempt, {}).values())

    def remove(self, attempt: str, node_index: int, node: str) -> None:
        """One copy is no good any more."""
        self._nodes.get(attempt, {}).get(node_index, set()).discard(node)

    def remove_all(self, attempt: str, node: str) -> None:
        """A node gives up all that it holds of it."""
        for nodes in self._nodes.get(attempt, {}).values():
            nodes.discard(node)

    def forget(self, attempt: str) -> None:
        self._nodes.pop(attempt, None)
        self._tried.pop(attempt, None)

    def seen(self, live: frozenset[str]) -> None:
        """Note which nodes are alive."""
        self.live = live

    def lose(self, nodes: frozenset[str]) -> None:
        for fragments in self._nodes.values():
            for holders in fragments.values():
                holders -= nodes

    def learn(self, inventories: Mapping[str, Inventory], run_uid: str) -> None:
        """Replace what is known of these nodes by what they say."""
        self.lose(frozenset(inventories))
        self.live |= frozenset(inventories)
        for node, inventory in inventories.items():
            before = self._disks.get(inventory.disk, node)
            if inventory.disk and before != node:  # the machine has come back before its death was noticed
                self.lose(frozenset({before}))
                self._left = (self._left | {before}) & self.live
            self._left.discard(node)
            self._disks[inventory.disk] = node
        for node, inventory in inventories.items():
            for held in inventory.fragments:
                if held.attempt.run_uid == run_uid:
                    self.add(held.attempt.attempt, held.node_index, node)

    def table(self) -> dict[str, dict[int, tuple[str, ...]]]:
        """For people: attempt -> fragment -> nodes."""
        return {a: {i: tuple(sorted(n)) for i, n in f.items()} for a, f in self._nodes.items()}


@dataclass(slots=True)
class Context:
    """One per run machine; its parts read and write it, nobody else does."""

    options: RunOptions
    ledger: Ledger
    holders: Holders = field(default_factory=Holders)
    links: Links = field(default_factory=Links)
    plan: SessionPlan | None = None
    draining: frozenset[str] = frozenset()
    leaves_at_s: Mapping[str, float] = field(default_factory=dict)  # of draining nodes (monotonic), if known
    save_signals: deque[tuple[SessionKey, int]] = field(
        default_factory=lambda: deque(maxlen=MAX_SAVE_SIGNALS)
    )
    found_session_key: SessionKey | None = (
        None  # of the session that was at work when this coordinator was started
    )
    domains: Mapping[str, str] = field(default_factory=dict)
    now_s: float = 0.0  # monotonic
    wall_s: float = 0.0  # Unix time
    warned: dict[str, None] = field(default_factory=dict)
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))

    @property
    def history(self) -> RunHistory:
        return self.ledger.history

    def session_nodes(self) -> tuple[str, ...]:
        return tuple(n.node_id for n in self.plan.nodes) if self.plan else ()

    def measure(self, metric: Metric, value: float = 1.0, **labels: str) -> None:
        """For people and alerts; nothing is decided by it."""
        self.samples.append(Sample(metric=metric, value=value, labels=labels))

    def take_samples(self) -> tuple[Sample, ...]:
        """Return the measurements since the last call."""
        samples = tuple(self.samples)
        self.samples.clear()
        return samples

    def warn_once(self, text: str, *, is_expected: bool = False) -> Iterator[Warn]:
        if text not in self.warned:
            self.warned[text] = None
            if len(self.warned) > MAX_WARNINGS:
                del self.warned[next(iter(self.warned))]
            yield Warn(text=text, is_expected=is_expected)


def names_of(nodes: Iterable[str]) -> str:
    """Node ids as a person reads them."""
    return ", ".join(sorted(node[:12] for node in nodes))
