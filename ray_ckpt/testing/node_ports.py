"""The ports of a simulated agent: its work, reports and timers are messages on the world's wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.values import SessionPlan, Token
from ray_ckpt.engine.node_ports import NodeHostEvent, NodeWork
from ray_ckpt.format.names import STILL, shard_file
from ray_ckpt.format.save_signal import SaveSignal
from ray_ckpt.testing.parts import Agent, Local
from ray_ckpt.types import AttemptId, SaveFacts

if TYPE_CHECKING:
    from ray_ckpt.testing.nodes import Nodes


@dataclass(slots=True)
class WireNodePorts:
    """The ports of the agent `number` on the node `name`; a dead agent has no effect on its ranks."""

    world: Nodes
    name: str
    number: int

    @property
    def agent(self) -> Agent | None:
        agent = self.world.nodes[self.name].agent
        return agent if agent is not None and agent.number == self.number else None

    def start(self, work: NodeWork, token: Token = "") -> None:
        world, files, at_s = self.world, tuple[str, ...](), 0.0
        if isinstance(work, n.WriteShard) and self.agent is not None:
            plan = self.agent.host.machine.plan
            assert plan is not None
            numbers = (0, STILL) if world.has_still_files else (0,)
            files = tuple(shard_file(work.rank, plan.world_size, number) for number in numbers)
            world.nodes[self.name].disk.write(work.attempt.directory)
        if isinstance(work, n.WriteStepState):
            world.nodes[self.name].disk.write(work.attempt.directory)
        if isinstance(work, n.SendCopy):
            at_s = world.now_s + world.copy_s
        world.wire.append(Local(self.name, self.number, work, files, at_s, token=token))

    def report(self, event: m.Event, may_wait_s: float = 0.0) -> None:
        self.world.report(self.name, self.number, event)

    def begin(self, plan: SessionPlan) -> None:
        if self.agent is not None:
            self.agent.states = {}

    def release(self, attempt: AttemptId, rank: int) -> None:
        for member in self.world.members_on(self.name) if self.agent is not None else ():
            member.busy.discard(rank)

    def facts(self, attempt: AttemptId) -> SaveFacts:
        agent = self.agent
        return SaveFacts(shared_bytes=agent.shared[attempt.attempt] if agent is not None else 0)

    def show(self, signal: SaveSignal | None) -> None:
        if self.agent is not None:
            self.agent.signal = signal

    def free_restore(self) -> None: ...

    def free_arenas(self) -> None: ...

    def free(self) -> None: ...

    def reply(self, token: Token, value: object) -> None:
        self.world.agent_answered(self.name, token, value, None)

    def fail(self, token: Token, error: Exception) -> None:
        self.world.agent_answered(self.name, token, None, error)

    def now_s(self) -> float:
        return self.world.now_s

    def later(self, delay_s: float, event: NodeHostEvent) -> None:
        self.world.timers.append(Local(self.name, self.number, event, at_s=self.world.now_s + delay_s))
