"""A run's host on a memory log, with ports that record calls; its agents answer, are silent, or fail."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from ray_ckpt.core import messages as m
from ray_ckpt.core.node_messages import DeleteOrdered
from ray_ckpt.core.values import Inventory, SessionPlan, Token
from ray_ckpt.engine.notices import Notices
from ray_ckpt.engine.ports import (
    Answered,
    Call,
    Failure,
    GroupFound,
    GroupRequested,
    HostEvent,
    LauncherSeen,
    OpenOnNode,
    RunOpened,
    StorageEffect,
)
from ray_ckpt.engine.run_host import RunHost
from ray_ckpt.format import records as r
from ray_ckpt.telemetry import Sample
from tests.core.driver import START_S, Harness

NO_ANSWER = Failure(text="no answer")
PLANTED = m.RunWanted()
EMPTY = Inventory(fragments=(), directories=())


@dataclass
class Ports:
    """Records; agents answer at once unless they are in `silent`, launchers are alive unless in `dead`."""

    story: Story
    calls: list[Call] = field(default_factory=list)
    works: list[StorageEffect] = field(default_factory=list)
    replies: dict[Token, Any] = field(default_factory=dict)
    looked_for: list[str] = field(default_factory=list)
    timers: list[tuple[float, HostEvent]] = field(default_factory=list)
    revived: list[str] = field(default_factory=list)
    ends_process: bool | None = None
    is_closed: bool = False

    def call(self, call: Call) -> None:
        self.calls.append(call)
        story = self.story
        if call.node in story.silent or type(call.order) in story.silent_orders:
            return
        failure = story.failures.get(call.node)
        value: object = None
        if isinstance(call.order, OpenOnNode) and failure is None:
            plan = story.plans.get(call.node)
            key = plan.session_key if plan is not None else None
            is_new = key is not None and key > call.order.known
            value = replace(EMPTY, session_key=key, plan=plan if is_new else None)
        if isinstance(call.order, DeleteOrdered) and failure is None:
            value = dict.fromkeys(story.stuck.intersection(call.order.directories), "the disk failed")
        story.host.handle(Answered(to=call, value=value, failure=failure))

    def agents(self) -> Set[str]:
        return self.story.nodes

    def revive(self, node: str) -> None:
        self.revived.append(node)

    def start(self, work: StorageEffect) -> None:
        self.works.append(work)
        if isinstance(work, m.Append):
            self.story.host.handle(*self.story.harness.append(work))

    def look(self) -> None:
        self.story.host.handle(self.story.seen())

    def look_for(self, owner: str) -> None:
        self.looked_for.append(owner)
        if owner not in self.story.unknown:
            is_alive = owner not in self.story.dead
            self.story.host.handle(LauncherSeen(owner=owner, is_alive=is_alive))

    def reply(self, token: Token, value: object) -> None:
        self.replies[token] = value

    def fail(self, token: Token, error: Exception) -> None:
        self.replies[token] = error

    def now_s(self) -> float:
        return self.story.now_s

    def wall_s(self) -> float:
        return START_S + self.story.now_s

    def later(self, delay_s: float, event: HostEvent) -> None:
        self.timers.append((self.story.now_s + delay_s, event))

    def step_down(self, error: Exception, *, ends_process: bool) -> None:
        self.ends_process = ends_process

    def close(self) -> None:
        self.is_closed = True

    def warn(self, warning: m.Warn) -> None:
        pass

    def observe(self, event: m.Event) -> None:
        self.story.seen_events.append(event)

    def measure(self, samples: tuple[Sample, ...]) -> None:
        pass


class Story:
    """A host whose log is open; `tick` lets time pass and the cluster be seen."""

    def __init__(self, nodes: Iterable[str] = "ab") -> None:
        self.nodes = set(nodes)
        self.silent: set[str] = set()  # nodes whose agents do not answer yet
        self.silent_orders: set[type] = set()
        self.failures: dict[str, Failure] = {}  # nodes whose agents fail -> the failure
        self.plans: dict[str, SessionPlan] = {}  # node -> the plan that its agent has
        self.stuck: set[str] = set()  # folders that no agent can delete
        self.dead: set[str] = set()  # launchers that are dead
        self.unknown: set[str] = set()  # launchers for which the cluster does not answer
        self.now_s = 0.0
        self.seen_events: list[m.Event] = []  # that the machine was to handle
        self.harness = Harness("".join(sorted(self.nodes)))
        self.ports = Ports(self)
        self.host = RunHost(self.harness.machine, self.ports, Notices())

    def seen(self) -> m.NodesSeen:
        return m.NodesSeen(live=frozenset(self.nodes))

    def tick(self, seconds: float = 0.0) -> None:
        self.now_s += seconds
        for due_s, event in [timer for timer in self.ports.timers if timer[0] <= self.now_s]:
            self.ports.timers.remove((due_s, event))
            self.host.handle(event)
        self.host.handle(self.seen())

    def request(self, token: str, nodes: str = "ab", *, owner: str = "me") -> None:
        group = self.harness.group(nodes, owner=owner)
        self.host.handle(GroupRequested(token=token, nodes=group.nodes, resume="auto", owner=owner))

    def restore(self, nodes: str) -> None:
        """Let all ranks of the group restore."""
        self.host.handle(*(self.harness.restored(node) for node in nodes))

    def commit(self, step: int) -> None:
        """Let all nodes store a save and its copies."""
        attempt = self.harness.attempt(step)
        self.host.handle(*(self.harness.stored(attempt, node.node_id) for node in self.harness.plan.nodes))
        copies = [(node.node_id, holder) for node in self.harness.plan.nodes for holder in node.holders]
        self.host.handle(*(self.harness.copied(attempt, node, holder) for node, holder in copies))

    def recover(self, plan: SessionPlan) -> None:
        """Replace the host by that of a new coordinator, which finds a group with this plan."""
        self._replace_host()
        self.host.handle(GroupFound(plan=plan))

    def restart(self, *, is_opened: bool = True) -> None:
        """Replace the host by that of a new coordinator, which finds no group, and may open the run."""
        self._replace_host()
        if is_opened:
            self.host.handle(RunOpened(token="opened", checks_storage=False))

    def _replace_host(self) -> None:
        self.harness.start_coordinator()
        self.host = RunHost(self.harness.machine, self.ports, Notices())

    def harness_effect(self, *effects: m.Effect) -> None:
        """Have the host carry out effects as if the machine had returned them for one event."""
        machine, handle = self.host.machine, self.host.machine.handle
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(machine, "handle", lambda event: effects if event is PLANTED else handle(event))
            self.host.handle(PLANTED)

    def calls(self, kind: type) -> list[Call]:
        return [call for call in self.ports.calls if isinstance(call.order, kind)]

    def sent(self, kind: type) -> list[tuple[str, Any]]:
        """Return the orders of a kind, with their nodes."""
        return [(call.node, call.order) for call in self.ports.calls if isinstance(call.order, kind)]

    def answer(self, call: Call, failure: Failure | None = None) -> None:
        """Answer a call of an agent that was silent."""
        value = EMPTY if isinstance(call.order, OpenOnNode) and failure is None else None
        self.host.handle(Answered(to=call, value=value, failure=failure))

    def ended(self) -> list[r.Ended]:
        """Return the records of ended sessions."""
        return [
            x.record.op
            for x in self.ports.works
            if isinstance(x, m.Append) and isinstance(x.record.op, r.Ended)
        ]


def trained(nodes: str = "ab") -> Story:
    """Return a story with a group on the nodes a and b that trains."""
    story = Story(nodes)
    story.request("1")
    story.restore("ab")
    return story
