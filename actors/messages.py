"""Control messages between ranks, agents and the coordinator: small, and without tensors."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ray_ckpt.actors.pickling import pickle_quickly
from ray_ckpt.catalog.uri import Origin
from ray_ckpt.config import RunOptions
from ray_ckpt.core.attempts import SaveUnderway
from ray_ckpt.core.awaited import Awaited
from ray_ckpt.core.drain import DrainUnderway
from ray_ckpt.core.loss_scenarios import LiveCheckpoint
from ray_ckpt.core.messages import NodeStored, RanksProgressed, ReplicaEnded
from ray_ckpt.core.values import RankProgress, SessionKey, SessionNode, SessionPlan
from ray_ckpt.engine.ports import Failure
from ray_ckpt.engine.stopping import RunState
from ray_ckpt.errors import CheckpointError
from ray_ckpt.format.records import LogRecord
from ray_ckpt.location import Location
from ray_ckpt.storage.remote.tier import RemoteRef
from ray_ckpt.transport.credentials import Credentials, ServiceKeys
from ray_ckpt.types import (
    AttemptId,
    CheckpointInfo,
    Exposure,
    FileEntry,
    GroupPart,
    ParityGroup,
    RankRestore,
    SaveFacts,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """The definition of a run: its name, its storage path, its options."""

    name: str
    storage_path: str
    options: RunOptions

    @property
    def key(self) -> str:
        return str(Location.parse(self.storage_path) / self.name)

    @property
    def storage(self) -> RemoteRef:
        options = self.options.storage_options or {}
        return RemoteRef(
            storage_path=self.storage_path, run_name=self.name, options=tuple(sorted(options.items()))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """Order of the coordinator to an agent: open a run."""

    spec: RunSpec
    run_uid: str
    nonce: str
    epoch: int  # of the coordinator that sends the order
    known: SessionKey = (0, 0)  # the answer has the plan of a newer session only


@dataclass(frozen=True, slots=True, kw_only=True)
class PutAwayRun:
    """Order of the coordinator to an agent, open run or not: delete a finished run except `kept`."""

    spec: RunSpec
    run_uid: str
    kept: tuple[str, ...]  # folders of checkpoints that stay
    epoch: int  # of the coordinator that sends the order


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceCard:
    """Report of an agent to a restarted coordinator: the service, and the runs open or to be put away."""

    keys: ServiceKeys
    service: str
    runs: tuple[OpenedRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCard:
    """An agent's address and staging folders."""

    node_id: str
    endpoint: str
    staging: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """A run, with the plan of its current group, for a coordinator that may not know the run."""

    spec: RunSpec
    run_uid: str
    plan: SessionPlan | None
    epoch: int  # the highest epoch from which the agent received an order
    is_finished: bool = False  # it has no group any more, and will be put away
    failed: SessionKey | None = None  # its last session, if that failed: its newest checkpoint is uploaded


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCard:
    """Report of a rank, whose agent is lost, to a coordinator that may know nothing of the group."""

    service: str
    run: OpenedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStart:
    """Order of the coordinator to the agents of a group: the plan, and the addresses of the agents.

    Both are `packed`, once for all agents: at 10,000 nodes they are 3 MB and take 0.1 s to pickle.
    """

    packed: bytes
    spec: RunSpec
    epoch: int  # of the coordinator that sends the order
    relay: str = ""  # the node whose agent gathers the reports of the addressee; "" for none

    @staticmethod
    def pack(plan: SessionPlan, endpoints: Mapping[str, str]) -> bytes:
        """Return the plan, and the addresses by node, as the content of `packed`."""
        return zlib.compress(pickle.dumps((plan, dict(endpoints))), 1)

    def unpack(self) -> tuple[SessionPlan, dict[str, str]]:
        """Return the plan, and the addresses by node."""
        found: tuple[SessionPlan, dict[str, str]] = pickle.loads(zlib.decompress(self.packed))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOrder:
    """One call that a relay passes on to the agents of several nodes, with a number for each node."""

    nodes: tuple[tuple[int, str], ...]  # (number, node)
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedAnswers:
    """Answers to passed orders, by number; orders in none of the fields have no answer yet."""

    values: Mapping[int, Any] = field(default_factory=dict)
    failures: Mapping[int, Failure] = field(default_factory=dict)
    undelivered: tuple[int, ...] = ()  # the relay did not reach the agent


class GatheredReport(NamedTuple):
    """A call to the coordinator that a relay sends together with others; a tuple, as there are thousands."""

    method: str
    arguments: tuple[Any, ...]
    waits: bool  # the answer comes only when other nodes have reported
    may_wait_s: float = 0.0  # for how long the relay may keep the report, to send it with more others


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredAnswer:
    """The coordinator's answer to a gathered report: a value or an error."""

    value: Any = None
    error: CheckpointError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Answer to a rank that joins: the run, and the nodes whose agents serve the ranks."""

    run_uid: str
    spec: RunSpec
    session_key: SessionKey  # of the group when it opened; it may go on in later ones
    world_size: int
    nodes: Mapping[int, str]  # rank -> node id
    parts: tuple[GroupPart, ...] = ()  # parts of the group, in rank order; () for an undivided group
    origin: Origin | None = None  # checkpoint of another run to begin with, if this run has none


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """State of a run, for the command line and tests."""

    run_uid: str
    records: tuple[LogRecord, ...]
    newest: CheckpointInfo | None
    holders: Mapping[str, Mapping[int, tuple[str, ...]]]
    nodes: tuple[SessionNode, ...]  # of the current group
    restores: tuple[RankRestore, ...]  # of the current group
    agents: tuple[AgentCard, ...] = field(default_factory=tuple)
    exposure: tuple[Exposure, ...] = ()  # for each node of the group: the loss if the node died now
    copies_missing: int = 0  # fragment copies that repair still has to make


# Views of a service. Ages are seconds by the coordinator's clock at the time of the call.


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestView:
    """The newest checkpoint of the lineage that has reached `level`, and the number of steps since then."""

    level: str
    step: int
    age_s: float
    steps_behind: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskView:
    """Space of the file systems of a node's staging folders; `is_full` means above the high watermark."""

    free_bytes: int
    total_bytes: int
    reserve_bytes: int
    is_full: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node with ranks of a run's group, or with copies of the run's checkpoints."""

    node_id: str
    ranks: tuple[int, ...]
    holders: tuple[str, ...]  # nodes with copies of this node's fragments
    is_live: bool
    is_draining: bool
    gone_in_s: float | None  # until a leaving node is gone; None: not known
    domain: str  # its failure domain, "" if not known
    exposure: Exposure | None  # None for a node outside the group
    disk: DiskView | None  # at the last reading; None: not read yet
    parity_group: int | None = None  # position of its group in `RunView.parity_groups`; None without parity


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One run of a service.

    `state` is "opening" until the log of the run is claimed, then "restoring" until all ranks have their
    state, then "training"; "gone" if the launcher died without ending the run; "finished", or "failed" if the
    launcher gave the run up or has been dead for about a minute; "idle" without a group.
    """

    name: str
    where: str  # `<storage_path>/<name>`
    run_uid: str
    epoch: int
    state: RunState
    owner: str  # the launcher of the group, "" without a group
    session: int | None
    world_size: int
    step: int  # the last step that a rank has reported
    step_s: float  # time of a recent step; 0: not known
    interval_s: float  # current time between saves; 0: not known
    newest: tuple[NewestView, ...]  # by level, lowest first; without levels that no checkpoint has reached
    nodes: tuple[NodeView, ...]
    saves: tuple[SaveUnderway, ...]
    drains: tuple[DrainUnderway, ...]
    sent_bytes: Mapping[str, int]  # bytes sent of unfinished uploads, by attempt
    copies_missing: int
    records_waiting: int  # records not yet in the log
    live: int  # number of live checkpoints
    in_cluster_only: tuple[int, ...]  # steps of live checkpoints that are not on the storage path
    needed_in_cluster: tuple[int, ...]  # of these: newer than any on the storage path, pinned, or in upload
    warning: str  # the last warning, "" if there was none
    warning_age_s: float | None
    suspect: str = ""  # `RunHistory.suspect_text`
    shared_bytes: int = 0  # of the newest checkpoint, linked to earlier ones on the nodes
    damaged: tuple[int, ...] = ()  # steps of live checkpoints that are damaged on the storage path by the log
    exported: str = ""  # the newest items that were uploaded alone, with their step
    is_put_away: bool = False  # the run has finished, and its files on the nodes are deleted
    awaited: tuple[Awaited, ...] = ()  # ranks whose restore, save or progress report others wait for
    parity_groups: tuple[ParityGroup, ...] = ()  # of the session; () if its saves have copies instead


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainingView:
    """A node that is about to go, as announced by a cloud's service or a signal."""

    node_id: str
    source: str
    in_s: float | None  # until the node is gone; None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceView:
    """The service of a cluster: plain values, no secrets."""

    version: str  # version of ray_ckpt on the coordinator's node
    protocol: int
    ray_version: str
    coordinator_node: str
    coordinator_host: str
    up_s: float  # since the last start of the coordinator
    is_encrypted: bool
    nodes: tuple[str, ...]  # live nodes
    agents: tuple[AgentCard, ...]
    leaving: tuple[DrainingView, ...]
    runs: tuple[RunView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillSources:
    """Input of drills and verification: live checkpoints, their locations, and credentials to read them."""

    live: tuple[LiveCheckpoint, ...]
    endpoints: Mapping[str, str]  # addresses of the agents, by node
    domains: Mapping[str, str]  # failure domains of all live nodes; "" if not known
    credentials: Credentials = field(repr=False)
    storage: RemoteRef
    last_step: int  # last step that the run completed, or 0


pickle_quickly(
    AttemptId,
    FileEntry,
    SaveFacts,
    RankProgress,
    NodeStored,
    ReplicaEnded,
    RanksProgressed,
    GatheredAnswer,
    Failure,
    shared={AttemptId},
)
