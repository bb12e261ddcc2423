"""Processes, machines and launchers of a simulated world, and the messages between them."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from ray_ckpt.config import Resume, RunOptions
from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.node_machine import NodeMachine
from ray_ckpt.core.run_machine import RunMachine
from ray_ckpt.core.values import Inventory, SessionKey, SessionPlan, StoredFragment, Token
from ray_ckpt.engine.deletes import NodeDeletes
from ray_ckpt.engine.idle_agents import IdleAgents
from ray_ckpt.engine.node_host import NodeHost
from ray_ckpt.engine.node_ports import (
    EndAwaited,
    NodeHostEvent,
    NodeWork,
    OutcomeAwaited,
    RankMet,
    RankRestored,
    SurvivorCame,
)
from ray_ckpt.engine.ports import Call, HostEvent, StorageEffect
from ray_ckpt.engine.relays import Batch, OrderRelays, ReportRoute
from ray_ckpt.engine.run_host import RunHost
from ray_ckpt.format.digest import digest
from ray_ckpt.format.names import fragment_file, is_still_name
from ray_ckpt.format.records import LogRecord
from ray_ckpt.format.save_signal import SaveSignal
from ray_ckpt.testing.stores import FILE_BYTES, Disk, still_version
from ray_ckpt.types import AttemptId, FileEntry, Fragment

Fate: TypeAlias = Literal["delivered", "lost", "unanswered"]
"""A `lost` message is not carried out; an `unanswered` message is carried out, but its answer is lost."""


# -- actors --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Agent:
    """The agent process of a node; each new process gets a new number."""

    number: int
    host: NodeHost
    signal: SaveSignal | None = None  # the signal on the page that the node's ranks read
    route: ReportRoute = field(default_factory=ReportRoute)
    began: SessionKey = (0, 0)  # the newest session that an order has begun
    ended: SessionKey = (0, 0)  # the newest session that an order has ended
    over: SessionKey = (0, 0)  # the newest session that is surely over: its end is carried out
    states: dict[int, dict[int, int]] = field(default_factory=dict)  # own states kept: rank -> step -> state
    shared: Counter[str] = field(default_factory=Counter)  # attempt -> bytes in still files that were linked

    @property
    def machine(self) -> NodeMachine:
        return self.host.machine


@dataclass(slots=True)
class Node:
    name: str
    service: str
    disk: Disk
    domain: str
    since: int  # number of the event that added the node
    agent: Agent | None = None
    is_alive: bool = True
    is_draining: bool = False


@dataclass(slots=True)
class Coordinator:
    """A coordinator process, with one claim of the run; after stepping down, the process stays down."""

    name: str
    service: str
    host: RunHost
    skew_s: float  # error of the process's monotonic clock
    wall_skew_s: float
    agents: set[str] = field(default_factory=set)  # nodes that have an agent, as far as the process knows
    is_up: bool = True
    is_frozen: bool = False
    waits_since_s: float | None = None  # when the store became silent
    absent: set[str] = field(default_factory=set)  # nodes that once did not answer when the run was opened
    idle: IdleAgents = field(default_factory=IdleAgents)
    left: set[tuple[str, str]] = field(default_factory=set)  # (node, folder) that could not be deleted
    relays: OrderRelays = field(default_factory=lambda: OrderRelays(0))
    calls: list[Call] = field(default_factory=list)  # calls of this event, not sent yet
    deleted: set[tuple[str, str]] = field(default_factory=set)  # folders that nodes have ever deleted

    @property
    def machine(self) -> RunMachine:
        return self.host.machine

    @property
    def num_pending(self) -> int:
        """Number of decided records that are not in the log yet."""
        return len(self.machine._ledger.pending)


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenInventory(Inventory):
    """An inventory, with the number of the event that took it and the number of the agent."""

    at: int
    agent: int


@dataclass(slots=True)
class Member:
    """The ranks of a training group on one node."""

    node: str
    ranks: tuple[int, ...]
    state: Literal["waiting", "reading", "training", "ended"] = "waiting"
    plan: SessionPlan | None = None
    saved: int = 0  # number of the group's saves that the member has made
    missed: int = 0  # number of the save signal whose step was already over
    met: int = 0  # number of the last barrier with a received answer
    busy: set[int] = field(default_factory=set)  # ranks whose arena is not released yet
    read: set[int] = field(default_factory=set)  # ranks that have read their state by the plan
    error: Exception | None = None  # the error that the ranks received


@dataclass(slots=True)
class Group:
    members: list[Member]
    steps: list[int] = field(default_factory=list)  # steps of the group's saves, in order
    done: dict[int, int] = field(default_factory=dict)  # rank -> its last finished step, with salvages
    dead: set[int] = field(default_factory=set)  # ranks that died alone
    offered: set[int] = field(default_factory=set)  # ranks that have offered their state for a salvage


@dataclass(slots=True)
class Launcher:
    """A driver that opens group after group until the run has finished or is lost to another launcher."""

    name: str
    service: str
    resume: Resume = "auto"
    state: Literal["idle", "asking", "running", "done", "dead"] = "idle"
    group: Group | None = None
    error: Exception | None = None
    finished: bool = False
    is_job: bool = False  # a job may end before its detached actors, so its death ends no session
    died_s: float | None = None  # when its process ended
    wanted: dict[Token, tuple[str, ...]] = field(default_factory=dict)  # request -> the node of each rank

    def end(self, state: Literal["done", "dead"], now_s: float) -> None:
        """End the launcher's process, if it has not ended before."""
        self.died_s = now_s if self.died_s is None else self.died_s
        self.state = state


# -- calls that wait at an agent -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OrderCall:
    """A call of a coordinator that an agent has received and not answered yet."""

    message: Order
    fate: Fate
    agent: int  # number of the agent


@dataclass(slots=True)
class RankCall:
    """A call of a rank that waits at the agent of its node."""

    member: Member
    plan: SessionPlan  # of the ranks
    event: OutcomeAwaited | EndAwaited | RankMet | RankRestored | SurvivorCame
    agent: int  # number of the agent
    has_arrived: bool = False


@dataclass(frozen=True, slots=True)
class Reporter:
    """An agent that waits for the coordinator's answer to a report."""

    node: str
    agent: int  # number of the agent
    event: m.Event


# -- messages ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Order:
    """A coordinator's call to an agent, perhaps passed on by the relay of a batch."""

    call: Call
    sender: str
    batch: Batch | None = None
    number: int = 0  # in the batch


@dataclass(frozen=True, slots=True)
class Pass:
    """A coordinator's calls to several agents, on their way to a relay."""

    batch: Batch
    sender: str


@dataclass(frozen=True, slots=True)
class Report:
    """An agent's call to the coordinator of its service, by name."""

    service: str
    event: m.Event
    token: Token = ""  # of the awaited reply; empty if no caller waits
    node: str = ""  # of the agent
    relay: str = ""  # the node to whose agent the report goes first; "" for none


@dataclass(frozen=True, slots=True)
class Answer:
    """Events for one coordinator process; void if the process is gone."""

    coordinator: str
    events: tuple[m.Event | HostEvent, ...]
    at_s: float = 0.0  # time of the events: no earlier than this


@dataclass(frozen=True, slots=True)
class Create:
    """A record on its way to the store; no coordinator waits for the answer to a late create."""

    coordinator: str
    record: LogRecord
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """Work on storage, or work of an agent, for a coordinator."""

    coordinator: str
    to: Call | StorageEffect

    @property
    def effect(self) -> m.Effect:
        effect = self.to.work if isinstance(self.to, Call) else self.to
        assert effect is not None and not isinstance(effect, NodeDeletes)
        return effect


@dataclass(frozen=True, slots=True)
class Local:
    """Work of one agent process on its node, or a message of the node's ranks to the agent."""

    node: str
    agent: int  # number of the agent; a later agent does not continue the work
    work: n.NodeEvent | NodeHostEvent | NodeWork
    files: tuple[str, ...] = ()  # of a WriteShard
    at_s: float = 0.0  # earliest time of delivery
    is_silent: bool = False  # the peer of the copy does not answer
    token: Token = ""  # as the host has given it


@dataclass(frozen=True, slots=True)
class Replied:
    """A reply to the caller that waits with this token."""

    token: Token
    value: object
    error: Exception | None


Message: TypeAlias = Order | Pass | Report | Answer | Create | Work | Local | Replied
NETWORK = (Order, Pass, Report, Work)  # messages that may be lost or doubled


def label_of(message: Message) -> str:
    """Return the name of the content of a message, for the story of a schedule."""
    content = getattr(message, "event", None) or getattr(message, "effect", None)
    content = content or getattr(message, "work", None)
    if isinstance(message, Order):
        content = message.call.order
    if isinstance(message, Pass):
        return "Pass " + " ".join(type(call.order).__name__ for call in message.batch.calls.values())
    if isinstance(message, Create):
        content = message.record.op
    elif isinstance(message, Answer):
        content = message.events[-1]
    return type(content or message).__name__


def file_entry(attempt: AttemptId, name: str) -> FileEntry:
    """Return the entry of a file; its bytes follow from the attempt or, in a still file, from the version."""
    content = still_version(attempt.directory) if is_still_name(name) else attempt.attempt
    return FileEntry(name=name, size_bytes=FILE_BYTES, digest=digest(f"{content}/{name}".encode()))


def fragment_on_disk(fragment: Fragment) -> StoredFragment:
    """Return the entry of a written fragment in an inventory."""
    return StoredFragment(
        attempt=fragment.attempt,
        node_index=fragment.node_index,
        num_nodes=fragment.num_nodes,
        fragment=file_entry(fragment.attempt, fragment_file(fragment.node_index, fragment.num_nodes)),
        size_bytes=FILE_BYTES * (1 + len(fragment.files)),
        ranks=fragment.ranks,
        replicated=fragment.replicated,
        metrics=fragment.metrics,
    )


def random_options(chance: random.Random, *, keep_local_at_end: bool) -> RunOptions:
    """Return options of a run that `chance` has drawn."""
    return RunOptions(
        keep_last=chance.choice([1, 2, 3]),
        replicas=chance.choice([0, 1, 1, 1, 2]),
        remote_every=chance.choice([1, 2, 5]),
        remote_every_s=chance.choice([None, None, 60.0]),
        keep_local=chance.choice([1, 2]),
        retire_grace_s=chance.choice([0.0, 60.0]),
        scrub_every_s=chance.choice([100.0, 7 * 24 * 3600.0]),
        keep_best=chance.choice([None, ("eval", "max", 1)]),
        keep_local_at_end=keep_local_at_end,
        agent_idle_s=chance.choice([20.0, 100.0, 600.0]),
    )


def item_options(chance: random.Random, options: RunOptions) -> RunOptions:
    """Return the options with items that are uploaded alone, from most of the commits."""
    return replace(
        options,
        remote_items=chance.choice([("model",), ("model", "ema")]),
        remote_items_every=chance.choice([None, 1, 1, 2]),
        remote_items_every_s=chance.choice([None, None, 30.0]),
        remote_every=chance.choice([2, 5, 1000]),
        remote_every_s=None,
    )
