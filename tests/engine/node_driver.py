"""A node's host with ports that record work, reports and replies; the disk works at once or on demand."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.node_machine import NodeMachine
from ray_ckpt.core.values import SessionKey, SessionPlan, Token
from ray_ckpt.engine.node_host import NodeHost
from ray_ckpt.engine.node_ports import NodeHostEvent, NodeWork, OrderReceived, ReportAnswered, WorkEnded
from ray_ckpt.format.save_signal import SaveSignal
from ray_ckpt.types import AttemptId, SaveFacts
from tests.core.test_node_machine import plan


@dataclass
class NodePorts:
    """Records; work of `slow` kinds has to be ended by the test."""

    story: NodeStory
    works: list[tuple[NodeWork, Token]] = field(default_factory=list)
    reports: list[m.Event] = field(default_factory=list)
    replies: dict[Token, Any] = field(default_factory=dict)
    timers: list[tuple[float, NodeHostEvent]] = field(default_factory=list)
    memory: list[str] = field(default_factory=list)

    def start(self, work: NodeWork, token: Token = "") -> None:
        self.works.append((work, token))
        if isinstance(work, n.PersistEpoch | n.DeleteFolder | n.ForgetRun) and not self.story.is_slow:
            self.story.host.handle(WorkEnded(work=work, token=token))

    def report(self, event: m.Event, may_wait_s: float = 0.0) -> None:
        self.reports.append(event)
        self.may_wait_s = may_wait_s

    def begin(self, plan: SessionPlan) -> None:
        self.memory.append(f"begin {plan.session}")

    def release(self, attempt: AttemptId, rank: int) -> None:
        self.memory.append(f"release {rank}")

    def facts(self, attempt: AttemptId) -> SaveFacts:
        return SaveFacts(mesh="dp=2")

    def show(self, signal: SaveSignal | None) -> None:
        self.memory.append("show nothing" if signal is None else f"show {signal.step}")

    def free_restore(self) -> None:
        self.memory.append("free restore")

    def free_arenas(self) -> None:
        self.memory.append("free arenas")

    def free(self) -> None:
        self.memory.append("free")

    def reply(self, token: Token, value: object) -> None:
        assert token not in self.replies, "one reply"
        self.replies[token] = value

    def fail(self, token: Token, error: Exception) -> None:
        self.reply(token, error)

    def now_s(self) -> float:
        return self.story.now_s

    def later(self, delay_s: float, event: NodeHostEvent) -> None:
        self.timers.append((self.story.now_s + delay_s, event))


class NodeStory:
    """The host of node a, whose disk has epoch 1; ranks 0 and 1 are on it, and rank 2 on node b."""

    def __init__(self, node: str = "a") -> None:
        self.is_slow = False
        self.now_s = 0.0
        self.node = node
        self.ports = NodePorts(self)
        self.host = NodeHost(NodeMachine(epoch=1), self.ports, node)

    def order(self, token: str, order: n.Order) -> Any:
        """Send an order, and return the answer if there is one."""
        self.host.handle(OrderReceived(token=token, order=order))
        return self.ports.replies.get(token, "none")

    def start(self, session: int = 1, *, epoch: int = 1, left: tuple[SessionKey, ...] = ()) -> Any:
        started = n.SessionStarted(plan=replace(plan(session), left=left), node_id=self.node, epoch=epoch)
        return self.order(f"start {session} in {epoch} at {len(self.ports.replies)}", started)

    def end(self, error: Exception | None = None) -> None:
        """End the oldest work that was begun."""
        work, token = self.ports.works.pop(0)
        assert isinstance(work, n.PersistEpoch | n.DeleteFolder | n.ForgetRun)
        self.host.handle(WorkEnded(work=work, token=token, error=error))

    def answer(self, value: object = None, *, error: Exception | None = None) -> None:
        """Answer the oldest report."""
        self.host.handle(ReportAnswered(report=self.ports.reports.pop(0), value=value, error=error))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        for due_s, event in [timer for timer in self.ports.timers if timer[0] <= self.now_s]:
            self.ports.timers.remove((due_s, event))
            self.host.handle(event)
