"""Control messages between ranks, agents and the coordinator. Small; tensors never travel here."""

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
    """What a run is: its name, where its log lives, and how it is protected."""

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
    """The coordinator to an agent: this run is open now."""

    spec: RunSpec
    run_uid: str
    nonce: str
    epoch: int  # of the coordinator that speaks


@dataclass(frozen=True, slots=True, kw_only=True)
class PutAwayRun:
    """The coordinator to an agent, which may not know the run: it has finished, forget it but for `kept`."""

    spec: RunSpec
    run_uid: str
    kept: tuple[str, ...]  # folders of checkpoints
    epoch: int  # of the coordinator that speaks


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceCard:
    """An agent to a restarted coordinator: whose it is, and its runs that are open or to be put away."""

    keys: ServiceKeys
    service: str
    runs: tuple[OpenedRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCard:
    """An agent about itself."""

    node_id: str
    endpoint: str
    staging: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """An agent to a restarted coordinator: a run that is open here, and the group that is at work."""

    spec: RunSpec
    run_uid: str
    plan: SessionPlan | None
    epoch: int  # the highest that has spoken there


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStart:
    """The coordinator to the agents of a group: the plan, and how to reach its nodes."""

    plan: SessionPlan
    spec: RunSpec
    endpoints: Mapping[str, str]
    epoch: int  # of the coordinator that speaks


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """What a rank needs to know to link up with its agent."""

    run_uid: str
    spec: RunSpec
    world_size: int
    nodes: Mapping[int, str]  # rank -> node id
    parts: tuple[GroupPart, ...] = ()  # of the group, in the order of their ranks; () if it is one
    origin: Origin | None = None  # what it begins with, if the run has no checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """For people and tests: what the coordinator knows of a run."""

    run_uid: str
    records: tuple[LogRecord, ...]
    newest: CheckpointInfo | None
    holders: Mapping[str, Mapping[int, tuple[str, ...]]]
    nodes: tuple[SessionNode, ...]  # of the current group
    restores: tuple[RankRestore, ...]  # how the current group got its state
    agents: tuple[AgentCard, ...] = field(default_factory=tuple)
    exposure: tuple[Exposure, ...] = ()  # what the death of each node of the group would cost now
    copies_missing: int = 0  # fragment copies that repair has yet to make


# What people see of a service. Ages are seconds by the coordinator's clock when it was asked.


@dataclass(frozen=True, slots=True, kw_only=True)
class NewestView:
    """The newest checkpoint of the lineage that has reached `level`, and how far training is beyond it."""

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
    """A node that has to do with a run: ranks of its group run there, or copies are there."""

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
    step: int  # the last that a rank has told of
    step_s: float  # that a step takes, of late; 0: not known
    interval_s: float  # between saves, as they are due now; 0: not known
    newest: tuple[NewestView, ...]  # by level, lowest first; without what nothing has reached
    nodes: tuple[NodeView, ...]
    saves: tuple[SaveUnderway, ...]
    drains: tuple[DrainUnderway, ...]
    sent_bytes: Mapping[str, int]  # by drains, of the fragments that are on their way; by attempt
    copies_missing: int
    records_waiting: int  # for the log
    live: int  # checkpoints
    in_cluster_only: tuple[int, ...]  # steps of live checkpoints that are not on the storage path
    needed_in_cluster: tuple[int, ...]  # of these: newer than what is there, pinned, or on the way there
    warning: str  # the last one, "" if there was none
    warning_age_s: float | None
    is_put_away: bool = False  # it has finished, and this service has given up what it had of it
    awaited: tuple[Awaited, ...] = ()  # ranks that others wait for, to restore, save or report


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainingView:
    """A node that is about to go, by the word of a cloud's service or of a signal."""

    node_id: str
    source: str
    in_s: float | None  # None: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceView:
    """The service of a cluster, for people: plain values, no secrets."""

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
    """What drills and proofs read: the live checkpoints, where they are, and how a peer of the run reads."""

    live: tuple[LiveCheckpoint, ...]
    endpoints: Mapping[str, str]  # of the agents, by node
    domains: Mapping[str, str]  # of all live nodes; "" if not known
    credentials: Credentials = field(repr=False)
    storage: RemoteRef
    last_step: int  # that the run has completed, or 0
