"""Control messages between ranks, agents and the coordinator. They are small; none has tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ray_ckpt.catalog.uri import Origin
from ray_ckpt.config import RunOptions
from ray_ckpt.core.attempts import SaveUnderway
from ray_ckpt.core.awaited import Awaited
from ray_ckpt.core.drain import DrainUnderway
from ray_ckpt.core.loss_scenarios import LiveCheckpoint
from ray_ckpt.core.values import SessionNode, SessionPlan
from ray_ckpt.format.records import LogRecord
from ray_ckpt.location import Location
from ray_ckpt.storage.remote.tier import RemoteRef
from ray_ckpt.transport.credentials import Credentials, ServiceKeys
from ray_ckpt.types import CheckpointInfo, Exposure, GroupPart, RankRestore


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
    epoch: int  # of the coordinator that speaks


@dataclass(frozen=True, slots=True, kw_only=True)
class PutAwayRun:
    """Order of the coordinator to an agent, with or without the run: delete a finished run except `kept`."""

    spec: RunSpec
    run_uid: str
    kept: tuple[str, ...]  # folders of checkpoints
    epoch: int  # of the coordinator that speaks


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceCard:
    """Report of an agent to a restarted coordinator: its service, runs that are open or to be put away."""

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
    """A run in a ServiceCard, and the group that is at work."""

    spec: RunSpec
    run_uid: str
    plan: SessionPlan | None
    epoch: int  # the highest epoch from which the agent received an order


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStart:
    """Order of the coordinator to the agents of a group: the plan, and the addresses of its nodes."""

    plan: SessionPlan
    spec: RunSpec
    endpoints: Mapping[str, str]
    epoch: int  # of the coordinator that speaks


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Answer to a rank that joins: the run, and the nodes whose agents serve the ranks."""

    run_uid: str
    spec: RunSpec
    world_size: int
    nodes: Mapping[int, str]  # rank -> node id
    parts: tuple[GroupPart, ...] = ()  # of the group, in the order of their ranks; () if it is one
    origin: Origin | None = None  # checkpoint of another run to begin with, if this one has none


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
    exposure: tuple[Exposure, ...] = ()  # loss if a node of the group died now, for each node
    copies_missing: int = 0  # fragment copies that repair has yet to make


# Views of a service. Ages are seconds by the coordinator's clock at the time of the call.


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestView:
    """The newest checkpoint of the lineage that has reached `level`, and the steps since."""

    level: str
    step: int
    age_s: float
    steps_behind: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskView:
    """The file systems of a node's staging folders, bytes. `is_full`: above the high watermark."""

    free_bytes: int
    total_bytes: int
    reserve_bytes: int
    is_full: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node with ranks of a run's group, or with copies of its checkpoints."""

    node_id: str
    ranks: tuple[int, ...]
    holders: tuple[str, ...]  # of its copies
    is_live: bool
    is_draining: bool
    gone_in_s: float | None  # of a leaving node; None: not known
    domain: str  # its failure domain, "" if not known
    exposure: Exposure | None  # of a node of the group
    disk: DiskView | None  # as last looked at


RunState: TypeAlias = Literal["opening", "restoring", "training", "gone", "finished", "failed", "idle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One run of a service.

    `state`: "opening" until its log is claimed, "restoring" until all ranks have their state, "training";
    "gone" when its launcher is dead and has not ended the run; "finished", or "failed" when its launcher gave
    it up; "idle" without a group.
    """

    name: str
    where: str  # `<storage_path>/<name>`
    run_uid: str
    epoch: int
    state: RunState
    owner: str  # the launcher of its group, "" without one
    session: int | None
    world_size: int
    step: int  # the last that a rank has reported
    step_s: float  # time of a recent step; 0: not known
    interval_s: float  # between saves, at present; 0: not known
    newest: tuple[NewestView, ...]  # by level, lowest first; levels that none has reached are left out
    nodes: tuple[NodeView, ...]
    saves: tuple[SaveUnderway, ...]
    drains: tuple[DrainUnderway, ...]
    sent_bytes: Mapping[str, int]  # of unfinished uploads, by attempt
    copies_missing: int
    records_waiting: int  # for the log
    live: int  # checkpoints
    in_cluster_only: tuple[int, ...]  # steps of live checkpoints that are not on the storage path
    needed_in_cluster: tuple[int, ...]  # of these: newer than any there, pinned, or being uploaded
    warning: str  # the last one, "" if there was none
    warning_age_s: float | None
    is_put_away: bool = False  # it has finished, and its files on the nodes are deleted
    awaited: tuple[Awaited, ...] = ()  # ranks that others wait for, to restore, save or report progress


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainingView:
    """A node that is about to go, as a cloud's service or a signal announces."""

    node_id: str
    source: str
    in_s: float | None  # None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceView:
    """The service of a cluster: plain values, no secrets."""

    version: str  # of ray_ckpt, where the coordinator runs
    protocol: int
    ray_version: str
    coordinator_node: str
    coordinator_host: str
    up_s: float  # since the coordinator was started, or restarted
    is_encrypted: bool
    nodes: tuple[str, ...]  # live ones
    agents: tuple[AgentCard, ...]
    leaving: tuple[DrainingView, ...]
    runs: tuple[RunView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillSources:
    """Input of drills and verification: live checkpoints, where they are, and credentials to read them."""

    live: tuple[LiveCheckpoint, ...]
    endpoints: Mapping[str, str]  # of the agents, by node
    domains: Mapping[str, str]  # of all live nodes; "" if not known
    credentials: Credentials = field(repr=False)
    storage: RemoteRef
    last_step: int  # completed by the run, or 0
