"""Who there is in a simulated world, and what is under way between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ray_ckpt.config import Resume
from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.node_machine import NodeMachine
from ray_ckpt.core.run_machine import RunMachine
from ray_ckpt.core.values import SessionPlan, StoredFragment, Token
from ray_ckpt.errors import CheckpointError
from ray_ckpt.format.digest import digest
from ray_ckpt.format.names import fragment_file
from ray_ckpt.format.records import LogRecord
from ray_ckpt.format.save_signal import SaveSignal
from ray_ckpt.testing.stores import FILE_BYTES, Disk
from ray_ckpt.types import AttemptId, FileEntry, Fragment

Fate: TypeAlias = Literal["heard", "lost", "unheard"]
"""Of a message: carried out and answered; not carried out; carried out, but the answer is lost."""


# -- who there is ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Agent:
    """The process of a node that keeps its disk; a new one gets a new number."""

    number: int
    machine: NodeMachine
    shown: SaveSignal | None = None  # where its ranks look


@dataclass(slots=True)
class Node:
    name: str
    service: str
    disk: Disk
    domain: str
    since: int  # number of the event with which it came
    agent: Agent | None = None
    is_alive: bool = True
    is_draining: bool = False


@dataclass(slots=True)
class Coordinator:
    """One process, for one claim of the run. Whoever has stepped down is down for good."""

    name: str
    service: str
    machine: RunMachine
    skew_s: float  # of its monotonic clock
    wall_skew_s: float
    opened: set[str] = field(default_factory=set)  # nodes whose agents know the run from it
    starting: dict[tuple[Token, ...], set[str]] = field(default_factory=dict)  # and who has not answered
    is_ready: bool = False  # nodes have been asked to open the run
    is_up: bool = True
    is_frozen: bool = False
    takes_over: bool = False  # it is to look for the group at work once it is open
    ticked_s: float | None = None
    waits_since_s: float | None = None  # the store has not answered

    @property
    def num_pending(self) -> int:
        """Records that it has decided and that are not in the log."""
        return len(self.machine._ledger.pending)


@dataclass(slots=True)
class Member:
    """The ranks of a training group on one node."""

    node: str
    ranks: tuple[int, ...]
    state: Literal["waiting", "reading", "training", "ended"] = "waiting"
    plan: SessionPlan | None = None
    saved: int = 0  # how many of the group's saves it has made
    missed: int = 0  # the word of a step that it was past
    met: int = 0  # the number of the last meeting before a barrier whose end it was told
    went: int = 0  # and of the last that all have come to
    busy: set[int] = field(default_factory=set)  # ranks whose arena is not given back yet
    error: CheckpointError | None = None  # that its ranks were told


@dataclass(slots=True)
class Group:
    members: list[Member]
    steps: list[int] = field(default_factory=list)  # that are saved, in order


@dataclass(slots=True)
class Launcher:
    """A driver: it opens group after group until it is done, or the run is somebody else's."""

    name: str
    service: str
    resume: Resume = "auto"
    state: Literal["idle", "asking", "running", "done", "dead"] = "idle"
    group: Group | None = None
    error: CheckpointError | None = None
    dead_owner: str = ""
    finished: bool = False


# -- what is under way -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Order:
    """A coordinator's call to an agent."""

    node: str
    event: n.NodeEvent
    sender: str
    answer: tuple[Any, ...] = ()  # what the sender waits for: ("start", tokens) or ("delete", attempt)


@dataclass(frozen=True, slots=True)
class Report:
    """An agent's call to the coordinator of its service, by name."""

    service: str
    event: m.Event
    token: Token = ""  # set if it waits for a reply


@dataclass(frozen=True, slots=True)
class Answer:
    """To one coordinator process; void if that is gone."""

    coordinator: str
    events: tuple[m.Event, ...]


@dataclass(frozen=True, slots=True)
class Create:
    """A record on its way to the store. Nobody waits for it any more once it is late."""

    coordinator: str
    record: LogRecord
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """An effect that a coordinator's shell carries out outside of the machine."""

    coordinator: str
    effect: m.Effect


@dataclass(frozen=True, slots=True)
class Local:
    """Work of one agent process on its node, or a word of the node's ranks to it."""

    node: str
    agent: int  # its number; a later one does not go on with it
    work: n.NodeEvent | n.WriteShard | n.WriteFragment | n.SendCopy | n.DeleteFolder | n.CheckPeer
    file: str = ""  # of a WriteShard
    at_s: float = 0.0  # not before that
    is_silent: bool = False  # a copy whose peer gives no sign of life


@dataclass(frozen=True, slots=True)
class Replied:
    """A reply to whoever waits under this token."""

    token: Token
    value: object
    error: CheckpointError | None


Message: TypeAlias = Order | Report | Answer | Create | Work | Local | Replied
NETWORK = (Order, Report, Work)  # may be lost and doubled


def file_entry(attempt: AttemptId, name: str) -> FileEntry:
    return FileEntry(name=name, size_bytes=FILE_BYTES, digest=digest(f"{attempt.attempt}/{name}".encode()))


def fragment_on_disk(fragment: Fragment) -> StoredFragment:
    """What an inventory tells of a fragment that has been written."""
    own = file_entry(fragment.attempt, fragment_file(fragment.node_index, fragment.num_nodes))
    return StoredFragment(
        attempt=fragment.attempt,
        node_index=fragment.node_index,
        num_nodes=fragment.num_nodes,
        ranks=fragment.ranks,
        files=(*fragment.files, own),
        replicated=fragment.replicated,
        metrics=fragment.metrics,
    )
