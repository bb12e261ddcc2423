"""The ports of a simulated coordinator: its calls and answers are messages on the world's wire."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.values import Token
from ray_ckpt.engine.ports import (
    AgentDied,
    Answered,
    Call,
    Failure,
    HostEvent,
    LauncherSeen,
    OpenOnNode,
    StorageEffect,
    UpdatePeer,
)
from ray_ckpt.telemetry import Sample
from ray_ckpt.testing.oracle import must
from ray_ckpt.testing.parts import (
    Answer,
    Coordinator,
    Create,
    Order,
    Replied,
    Work,
)
from ray_ckpt.testing.stores import START_S

if TYPE_CHECKING:
    from ray_ckpt.testing.coordinators import Coordinators

NO_ANSWER = Failure(text="the agent did not answer")


@dataclass(slots=True)
class WirePorts:
    """The ports of a simulated coordinator: calls and answers are messages on the world's wire."""

    world: Coordinators
    name: str

    @property
    def process(self) -> Coordinator:
        return self.world.coordinators[self.name]

    def _answer(self, *events: m.Event | HostEvent, at_s: float = 0.0) -> None:
        self.world.wire.append(Answer(self.name, events, at_s))

    # -- agents and storage --------------------------------------------------------------------------

    def call(self, call: Call) -> None:
        world, order = self.world, call.order
        match order:
            case OpenOnNode(number=number) if number:
                self._open_now(call)
                return
            case m.Code() | m.Drain() | m.Scrub():
                world.wire.append(Work(self.name, call))
                return
            case UpdatePeer():  # a world has no addresses
                return
            case n.SessionStarted(plan=plan) if call.work is not None:
                world.oracle.begun(plan, store_is_silent=world.is_silent(self.process))
            case n.OutcomeNotified():
                world.show_outcome(self.process, order)
        self.process.calls.append(call)

    def _open_now(self, call: Call) -> None:
        """Send the order to open the run at once; answers that come at the same time are one message."""
        is_absent = call.node in self.world.absent
        if is_absent:
            self.process.absent.add(call.node)
        if is_absent:
            self.world.answer(self.name, Answered(to=call, failure=NO_ANSWER))
        else:
            self.world.send_order(Order(call, self.name))

    def agents(self) -> Set[str]:
        return self.process.agents

    def revive(self, node: str) -> None:
        if self.world.nodes[node].agent is None:
            self.process.agents.discard(node)
            self._answer(AgentDied(node=node))

    def start(self, work: StorageEffect) -> None:
        if isinstance(work, m.Append):
            process, now_s = self.process, self.world.now_s
            process.waits_since_s = now_s if process.waits_since_s is None else process.waits_since_s
            self.world.oracle.appends(self.name, work.record)
            self.world.wire.append(Create(self.name, work.record))
        else:
            self.world.wire.append(Work(self.name, work))

    # -- cluster, callers, clock -----------------------------------------------------------------------

    def look(self) -> None:
        self.process.host.handle(self.world.seen(self.process))

    def look_for(self, owner: str) -> None:
        launcher = self.world.launchers[owner]
        is_alive = launcher.state not in ("dead", "done")
        seen = LauncherSeen(owner=owner, is_alive=is_alive, ends_runs=not launcher.is_job)
        if not any(isinstance(x, Answer) and x.events == (seen,) for x in self.world.wire):
            self._answer(seen)

    def reply(self, token: Token, value: object) -> None:
        if isinstance(value, m.BarrierAnswer):
            self.world.oracle.met(self.name, self.world.barriers[token], value)
        self.world.wire.append(Replied(token, value, None))

    def fail(self, token: Token, error: Exception) -> None:
        self.world.wire.append(Replied(token, None, error))

    def now_s(self) -> float:
        return self.world.now_s + self.process.skew_s

    def wall_s(self) -> float:
        return START_S + self.world.now_s + self.process.wall_skew_s

    def later(self, delay_s: float, event: HostEvent) -> None:
        self._answer(event, at_s=self.world.now_s + delay_s)

    # -- process -------------------------------------------------------------------------------------

    def step_down(self, error: Exception, *, ends_process: bool) -> None:
        self.close()
        self.world.fail_tokens(self.name, error)

    def close(self) -> None:
        process, current = self.process, self.world.current
        process.is_up = False
        if current.get(process.service) == process.name:
            del current[process.service]

    def warn(self, warning: m.Warn) -> None:
        pass

    def measure(self, samples: tuple[Sample, ...]) -> None:
        pass

    def observe(self, event: m.Event) -> None:
        """Report to the oracle the facts that a coordinator receives with an event."""
        oracle = self.world.oracle
        if isinstance(event, m.NodesSeen):
            self._count_lost(event)
        if isinstance(event, m.Appended) and event.outcome == "ok":
            self.process.waits_since_s = None
        if isinstance(event, m.GroupOpened):
            if self.process.machine.view.objection(event.owner, event.dead_owner) is not None:
                return  # a group that is refused: its inventories do not count
            oracle.group_opened(self.name, event)
            if event.dead_owner:
                is_dead = self.world.launchers[event.dead_owner].state in ("dead", "done")
                must(is_dead, "P7", f"{event.owner} takes the run from {event.dead_owner}, which is alive")
        if isinstance(event, m.OwnerDied):
            oracle.owner_died(self.world.launchers[event.owner], self.world.now_s)
        if isinstance(event, m.GroupRecovered | m.GroupOpened):
            oracle.copies.begins(self.name)
        if isinstance(event, m.NodeStored | m.ReplicaEnded):
            epoch = self.process.machine.epoch
            if (epoch if event.epoch is None else event.epoch) < epoch:
                return  # to an earlier coordinator, whose orders may delete the files
        if isinstance(event, m.NodeStored):
            oracle.copies.stored(self.name, event.attempt.attempt, event.node_index, event.node_id)
        if isinstance(event, m.ReplicaEnded) and event.error is None:
            oracle.copies.copied(self.name, event.attempt.attempt, event.node_index, event.holder)
        if isinstance(event, m.GroupRecovered | m.GroupOpened | m.InventoryTaken | m.NodesJoined):
            for node, inventory in event.inventories.items():
                for held in inventory.fragments:
                    oracle.copies.stored(self.name, held.attempt.attempt, held.node_index, node)

    def _count_lost(self, event: m.NodesSeen) -> None:
        """Count the retired folders of lost nodes as deleted, as the machine does."""
        process, checkpoints = self.process, self.process.machine.history.checkpoints.values()
        lost = process.machine.view.live_nodes - event.live
        retired = [c.directory for c in checkpoints if c.state == "retired"] if lost else []
        process.deleted |= {(node, directory) for node in lost for directory in retired}
        process.left -= process.deleted
