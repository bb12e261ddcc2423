"""State that the parts of the run machine share; only one part writes each field."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ray_ckpt.config import RunOptions
from ray_ckpt.core.history import RunHistory
from ray_ckpt.core.holders import Holders
from ray_ckpt.core.ledger import Ledger
from ray_ckpt.core.links import Links
from ray_ckpt.core.messages import Warn
from ray_ckpt.core.placement import place_replicas
from ray_ckpt.core.retention import RetentionView
from ray_ckpt.core.values import SessionKey, SessionPlan
from ray_ckpt.telemetry import Metric, Sample
from ray_ckpt.types import CheckpointInfo

CLOCK_S = 0.01  # resolution of the machine's time: there may be thousands of events in a second
MAX_SAVE_SIGNALS = 64  # last announced steps; they distinguish a late rank from a rank that saves alone
VISITED_PER_S = 1000  # nodes that a periodic check visits per second; a visit takes 10 us
LIVE_VISITED_PER_S = 5000  # live checkpoints that a periodic check visits per second; a visit takes 4 us
MAX_WARNINGS = 256  # last texts that are not repeated; older texts may be repeated
MAX_SAMPLES = 1000  # measurements that wait to be taken, which happens after each event


@dataclass(slots=True)
class Context:
    """Shared state of one run machine. Only the owner of a field writes the field, which a test checks.

    | Field | Owner |
    |---|---|
    | `options`, `now_s`, `wall_s`, `draining`, `leaves_at_s` | `run_machine` |
    | `domains`, `spares`, `replica_nodes` | `run_machine` |
    | `plan`, `found_session_key` | `sessions` |
    | `save_signals` | `save_steps` |
    | `warned`, `samples` | `context`, through `warn_once`, `measure` and `take_samples` |
    | `ledger`, `holders`, `links` | `context`; set once, changed through their methods |
    """

    options: RunOptions
    ledger: Ledger
    holders: Holders = field(default_factory=Holders)
    links: Links = field(default_factory=Links)
    plan: SessionPlan | None = None  # the plan of the group at work
    draining: frozenset[str] = frozenset()  # live nodes that will leave soon
    leaves_at_s: Mapping[str, float] = field(default_factory=dict)  # draining node -> time (monotonic)
    domains: Mapping[str, str] = field(default_factory=dict)  # failure domain by node
    spares: frozenset[str] = frozenset()  # live nodes with the label of spares, also those of the group
    replica_nodes: frozenset[str] = frozenset()  # live nodes with the label of `options.replica_nodes`
    save_signals: deque[tuple[SessionKey, int]] = field(
        default_factory=lambda: deque(maxlen=MAX_SAVE_SIGNALS)
    )
    found_session_key: SessionKey | None = None  # the session that a restarted coordinator found at work
    now_s: float = 0.0  # monotonic time
    wall_s: float = 0.0  # Unix time
    warned: dict[str, None] = field(default_factory=dict)
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))

    @property
    def history(self) -> RunHistory:
        """The history of the run from the confirmed records of the log."""
        return self.ledger.history

    @property
    def newest(self) -> CheckpointInfo | None:
        """The newest checkpoint of the lineage that can be read, from which the next group would resume.

        If none can be read now, the newest one.
        """
        return self.newest_readable() or next(reversed(self.history.lineage()), None)

    def newest_readable(self, *, without: Container[str] = ()) -> CheckpointInfo | None:
        """Return the newest checkpoint of the lineage that can be read, those in `without` aside; or None.

        A drain may know of damage in a checkpoint that seems readable until a scrub has read it.
        """
        found = (c for c in reversed(self.history.lineage()) if c.id.attempt not in without)
        return next(filter(self.holders.can_serve, found), None)

    def paced(self, period_s: float) -> float:
        """Return the period of a check that visits all nodes: `period_s`, or longer in a large cluster."""
        return max(period_s, len(self.holders.live) / VISITED_PER_S)

    @property
    def live_pause_s(self) -> float:
        """Pause between two checks that visit all live checkpoints: whole seconds, 0 for some thousands."""
        return len(self.history.live()) // LIVE_VISITED_PER_S

    def session_nodes(self) -> tuple[str, ...]:
        """Return the nodes of the group at work."""
        return tuple(n.node_id for n in self.plan.nodes) if self.plan else ()

    @property
    def is_leaving(self) -> bool:
        """True if no node of the group at work stays; without a group, if no live node stays."""
        live, draining = self.holders.live, self.draining
        if not draining:  # the usual case, tested first because each event calls this
            return False
        nodes = (node.node_id for node in self.plan.nodes) if self.plan else iter(live)
        return all(node in draining or node not in live for node in nodes)

    @property
    def may_hold(self) -> frozenset[str]:
        """The live nodes that may get copies: they stay, and have the label of `options.replica_nodes`."""
        staying = self.holders.live - self.draining
        return staying & self.replica_nodes if self.options.replica_nodes else staying

    def place(self, training_nodes: Sequence[str], replicas: int) -> Mapping[str, tuple[str, ...]]:
        """Return the holders of each training node's copies, as the options of the run place them."""
        copies = self.options.copies
        return place_replicas(
            training_nodes=training_nodes,
            live_nodes=self.holders.live,
            replicas=replicas,
            domains=self.domains,
            draining=self.draining,
            near=copies.count("rack"),
            num_outside=copies.count("spread") if copies else 1,
            labelled=self.replica_nodes if self.options.replica_nodes else None,
        )

    def retention_view(self, busy: Collection[str] = frozenset()) -> RetentionView:
        """Return the input of decisions on retention now; `busy` are attempts in use."""
        return RetentionView(
            live=self.history.live(),
            lineage=self.history.lineage(),
            now_s=self.wall_s,
            busy=busy,
            unsafe_remote=self.holders.unsafe_remote,
            is_readable=self.holders.can_serve,
        )

    def measure(self, metric: Metric, value: float = 1.0, **labels: str) -> None:
        """Note a measurement for metrics; no decision depends on it."""
        self.samples.append(Sample(metric=metric, value=value, labels=labels))

    def take_samples(self) -> tuple[Sample, ...]:
        """Return the measurements since the last call."""
        samples = tuple(self.samples)
        self.samples.clear()
        return samples

    def warn_once(self, text: str, *, is_expected: bool = False, about: str = "") -> Iterator[Warn]:
        """Yield a warning unless it is one of the last MAX_WARNINGS: one of this text, or `about` the same.

        `about` is for texts with an error of a store, which may differ each time, as by a request's number.
        """
        key = about or text
        if key not in self.warned:
            self.warned[key] = None
            if len(self.warned) > MAX_WARNINGS:
                del self.warned[next(iter(self.warned))]
            yield Warn(text=text, is_expected=is_expected)


def names_of(nodes: Iterable[str]) -> str:
    """Return shortened node ids as a text for users."""
    return ", ".join(sorted(node[:12] for node in nodes))
