"""The ports of a run's host: calls to agents, work on storage, and the events that come back.

`actors/` implements the ports on Ray, and `testing/` implements them with faults. No method of a port blocks.
Each call, and each work on storage, is answered by one `Answered` event, perhaps before the method returns.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ray_ckpt.config import Resume
from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.values import GroupNode, SessionKey, SessionPlan, Token
from ray_ckpt.engine.deletes import NodeDeletes
from ray_ckpt.telemetry import Sample
from ray_ckpt.types import UNKNOWN_LAUNCH, GroupPart, LaunchTimes

AGENT_CALL_S = 60.0  # longest wait for an answer from an agent

StorageEffect: TypeAlias = (
    m.Append | m.Delete | m.DeleteOrphans | m.SweepRemote | m.WriteDescription | m.WriteSnapshot
)
"""Effects on the log and on the storage path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOnNode:
    """Start the node's agent if there is none, open the run there, and return the node's `Inventory`."""

    epoch: int
    number: int  # of the round in which all nodes are opened; 0: a node that joined
    known: SessionKey = (0, 0)  # the inventory has the plan of a newer session only


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePeer:
    """Take the current address of the agent of another node."""

    node: str


AgentOrder: TypeAlias = n.Order | m.Code | m.Drain | m.Scrub | OpenOnNode | UpdatePeer


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call to the agent of a node; the answer ends `work`. None: nothing waits for the answer."""

    node: str
    order: AgentOrder
    work: m.Effect | NodeDeletes | None = None
    bound_s: float = AGENT_CALL_S  # a call without an answer for this time has failed
    num_tries: int = 0  # that came before, for an order that is sent again

    @property
    def is_awaited(self) -> bool:
        """False if only a failure of the call matters to the host."""
        return self.work is not None or isinstance(self.order, OpenOnNode | n.SessionStarted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The failure of a call or of work on storage; the call may have been carried out all the same."""

    text: str
    error: Exception | None = None  # the error that the agent raised
    epoch: int | None = None  # the agent obeys a coordinator with this higher epoch
    is_damage: bool = False  # stored bytes differ from the commit
    is_dead: bool = False  # the node has no agent, or its agent has died


# -- events of the host, in addition to those of the run machine -------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The answer to a call or to work on storage. The value is None if the host needs no value.

    The value for a DeleteOrdered maps the folders that could not be deleted to the reasons.
    """

    to: Call | StorageEffect
    value: object = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherSeen:
    """The answer to `Ports.look_for`. A launcher that is found dead does not return under its name."""

    owner: str
    is_alive: bool
    ends_runs: bool = True  # True: it ends its runs itself, so its death ends a session


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerChecked:
    """A launcher is about to start a group: reply when it may, fail if another launcher has the run."""

    token: Token
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequested:
    """A launcher opens a group, whose processes run on `nodes`. The reply is the session's plan."""

    token: Token
    nodes: tuple[GroupNode, ...]
    resume: Resume
    owner: str
    launch: LaunchTimes = UNKNOWN_LAUNCH


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRequested:
    """One of several worker groups joins the group; `nodes` has the node of each rank of `part`."""

    token: Token
    parts: tuple[GroupPart, ...]
    part: str
    nodes: tuple[str, ...]
    resume: Resume
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogAwaited:
    """A caller waits until this coordinator's epoch is in the log. Fenced if another one has the run."""

    token: Token


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOpened:
    """A caller opens the run on all live nodes; the reply is sent when it is open there."""

    token: Token
    checks_storage: bool  # True: fail if a node does not find the storage path


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFound:
    """Agents, or a rank whose agent is new, have this plan of a group that this coordinator does not know.

    The host continues with the group once the log is open, unless the host has a group.
    """

    plan: SessionPlan
    num_tries: int = 0  # that a node of the group has ended with an error


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceEnding:
    """The service is being stopped: fail all callers that wait to open a group, and all later ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentDied:
    """The agent of a node was found dead, and the node may get a new one."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRefused:
    """The agent of a node that seemed idle does not end, since a group is at work there."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InventoryDue:
    """The pause before the inventory is taken again is over."""

    token: Token


HostEvent: TypeAlias = (
    Answered
    | LauncherSeen
    | OwnerChecked
    | GroupRequested
    | PartRequested
    | LogAwaited
    | RunOpened
    | ServiceEnding
    | GroupFound
    | AgentDied
    | ExitRefused
    | InventoryDue
)


# -- ports -------------------------------------------------------------------------------------------


class Agents(Protocol):
    def call(self, call: Call) -> None:
        """Begin a call; OpenOnNode and RunPutAway start an agent on a live node that has none."""

    def agents(self) -> Set[str]:
        """Return the nodes with an agent, as far as is known."""

    def revive(self, node: str) -> None:
        """Begin to check an agent that did not answer; `AgentDied` follows if the agent is dead."""


class Storage(Protocol):
    def start(self, work: StorageEffect) -> None:
        """Begin work on the log or on the storage path."""


class Cluster(Protocol):
    def look(self) -> None:
        """Begin to read the cluster's nodes; `NodesSeen` with all live nodes is the answer."""

    def look_for(self, owner: str) -> None:
        """Begin to check if a launcher is alive; `LauncherSeen` is the answer."""


class Callers(Protocol):
    def reply(self, token: Token, value: object) -> None: ...

    def fail(self, token: Token, error: Exception) -> None: ...


class Clock(Protocol):
    def now_s(self) -> float:
        """Return monotonic seconds."""

    def wall_s(self) -> float:
        """Return Unix seconds."""

    def later(self, delay_s: float, event: HostEvent) -> None:
        """Send an event to the host after a time."""


class Process(Protocol):
    def step_down(self, error: Exception, *, ends_process: bool) -> None:
        """Give up the run; end this process if a newer coordinator of the service has the run."""

    def close(self) -> None:
        """Drop the run, which has finished and is put away."""

    def warn(self, warning: m.Warn) -> None: ...

    def observe(self, event: m.Event) -> None:
        """Observe an event that the machine handles next; for the simulator's checks."""

    def measure(self, samples: tuple[Sample, ...]) -> None:
        """Record measurements as metrics."""


class Ports(Agents, Storage, Cluster, Callers, Clock, Process, Protocol):
    """All ports of a run's host."""
