"""Control messages between ranks, agents and the coordinator. Small; tensors never travel here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ray_ckpt.config import RunOptions
from ray_ckpt.core.messages import SessionNode, SessionPlan
from ray_ckpt.format.records import LogRecord
from ray_ckpt.location import Location
from ray_ckpt.origin import Origin
from ray_ckpt.storage.remote import RemoteRef
from ray_ckpt.transport.credentials import ServiceKeys
from ray_ckpt.types import CheckpointInfo, Exposure, Part, RankRestore


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
class ServiceCard:
    """An agent to a restarted coordinator: whose it is, and the runs that are open on it."""

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
    parts: tuple[Part, ...] = ()  # of the group, in the order of their ranks; () if it is one
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
