"""Simulated coordinators: the shell of `actors/coordinator` around a RunMachine, and message delivery."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.ownership import check_claim
from ray_ckpt.core.run_machine import RunMachine
from ray_ckpt.core.values import GroupNode, Inventory, SessionPlan
from ray_ckpt.errors import CheckpointError, RunSuperseded, SaveNotCollective, Unavailable
from ray_ckpt.format.digest import digest
from ray_ckpt.testing.parts import (
    Answer,
    Coordinator,
    Create,
    Fate,
    Launcher,
    Order,
    Replied,
    Report,
    Work,
)
from ray_ckpt.testing.storage_work import STORAGE_WORK, StorageWork
from ray_ckpt.testing.stores import START_S

RUN = "gpt"
RUN_UID = digest(RUN.encode())


NodeEffect: TypeAlias = (
    m.NotifyOutcome
    | m.Replicate
    | m.Delete
    | m.DeleteLocalOrphans
    | m.Evict
    | m.Supersede
    | m.AnnounceSaveStep
)
"""Effects that the shell sends to nodes as orders."""


class Coordinators(StorageWork):
    """The part of a world that runs coordinators."""

    # -- the coordinator's shell -------------------------------------------------------------------------

    def _feed(self, name: str, *events: m.Event) -> None:
        """Let a coordinator handle events; send a tick first if time has passed."""
        process = self.coordinators[name]
        if process.is_up and process.ticked_s != self.now_s:
            process.ticked_s = self.now_s
            wall_s = START_S + self.now_s + process.wall_skew_s
            self._handle(process, m.Ticked(now_s=self.now_s + process.skew_s, wall_s=wall_s))
        for event in events:
            if process.is_up:
                self._handle(process, event)

    def _handle(self, process: Coordinator, event: m.Event) -> None:
        if isinstance(event, m.Appended) and event.outcome == "ok":
            process.waits_since_s = None
        self._show_oracle(process.name, event)
        for effect in process.machine.handle(event):
            self._perform(process, effect)

    def _show_oracle(self, name: str, event: m.Event) -> None:
        """Report to the oracle the facts that a coordinator receives with an event."""
        if isinstance(event, m.GroupOpened):
            self.oracle.group_opened(name, event.token)
        if isinstance(event, m.NodeStored):
            self.oracle.learns_stored(name, event.attempt, event.node_index, event.node_id)
        if isinstance(event, m.GroupRecovered | m.GroupOpened | m.InventoryTaken | m.NodesJoined):
            for node, inventory in event.inventories.items():
                for held in inventory.fragments:
                    self.oracle.learns_stored(name, held.attempt, held.node_index, node)

    def _perform(self, process: Coordinator, effect: m.Effect) -> None:
        name = process.name
        match effect:
            case m.Append(record=record):
                process.waits_since_s = self.now_s if process.waits_since_s is None else process.waits_since_s
                self.oracle.appends(name, record)
                self.wire.append(Create(name, record))
            case m.StartSession():
                self._start_session(process, effect)
            case m.Reply(token=token, value=value):
                if isinstance(value, m.BarrierAnswer):
                    self.oracle.met(name, self.barriers[token], value)
                self.wire.append(Replied(token, value, None))
            case m.Fail(token=token, error=failure):
                self.wire.append(Replied(token, None, failure))
            case m.StepDown(error=failure):
                self._end_process(process)
                self._fail_tokens(name, failure)
            case m.CloseRun():
                self._end_process(process)
            case m.Warn():
                pass
            case m.Delete(place=place) if place == m.REMOTE:
                self.wire.append(Work(name, effect))
            case effect if isinstance(effect, NodeEffect):
                if isinstance(effect, m.NotifyOutcome):
                    self._show_outcome(process, effect)
                answer = ("delete", effect.attempt) if isinstance(effect, m.Delete) else ()
                orders = _orders(effect, process.machine.epoch)
                self.wire += [Order(node, event, name, answer) for node, event in orders]
            case _:
                self.wire.append(Work(name, effect))

    def _start_session(self, process: Coordinator, effect: m.StartSession) -> None:
        tokens, plan = effect.tokens, effect.plan
        process.starting[tokens] = {node.node_id for node in plan.nodes}
        self.oracle.begun(plan, store_is_silent=self._is_silent(process))
        for node in plan.nodes:
            self._send_plan(process, node.node_id, plan, ("start", tokens, plan))

    def _show_outcome(self, process: Coordinator, effect: m.NotifyOutcome) -> None:
        attempt, error = effect.attempt, effect.error
        if isinstance(error, SaveNotCollective):
            self.oracle.accused(attempt, self.now_s - self.saved_at_s[attempt.attempt], self.options)
        self.oracle.gives_up(process.name, attempt, error, process.machine.view.live_nodes)

    def _is_silent(self, process: Coordinator) -> bool:
        since_s = process.waits_since_s
        return since_s is not None and self.now_s - since_s >= self.options.store_wait_s

    def _end_process(self, process: Coordinator) -> None:
        process.is_up = False
        if self.current.get(process.service) == process.name:
            del self.current[process.service]

    def _fail_tokens(self, name: str, error: CheckpointError) -> None:
        for token, (coordinator, _) in self.waiting.items():
            if coordinator == name:
                self.wire.append(Replied(token, None, error))

    def _open_log(self, service: str, *, owner: str | None, raises: bool = False) -> Coordinator | None:
        """Start a coordinator that reads and claims the log; return None if the claim is refused."""
        try:
            check_claim(self.oracle.history, service=service, owner=owner)
        except RunSuperseded:
            if raises:
                raise
            return None
        number = len(self.coordinators)
        name = f"{service}.c{number}"
        skews = (1_000.0 * number, 3_600.0 * (number % 3 - 1))
        machine = RunMachine(options=self.options, writer=name, service=service)
        self.coordinators[name] = process = Coordinator(name, service, machine, *skews, takes_over=True)
        self.current[service] = name
        wanted = () if owner is None else (m.RunWanted(),)
        self._feed(name, self.storage.opened(run_name=RUN, fresh_uid=RUN_UID), *wanted)
        return process

    def process_of(self, service: str) -> Coordinator | None:
        process = self.coordinators.get(self.current.get(service, ""))
        return process if process is not None and process.is_up else None

    def _supersede(self, service: str, plans: Iterable[SessionPlan]) -> None:
        """End the ranks of a restarted coordinator whose run now belongs to another service."""
        history = self.oracle.history
        error = RunSuperseded("The run was taken over by another service.")
        for plan in plans:
            for node in plan.nodes:
                ended = n.SessionEnded(session_key=plan.session_key, error=error, epoch=history.epoch)
                self.wire.append(Order(node.node_id, ended, ""))
        self.current.pop(service, None)

    def _gather(self, process: Coordinator, absent: frozenset[str]) -> dict[str, Inventory]:
        """Open the run on all live nodes that answer, and return the inventories of these nodes."""
        inventories = {}
        for node in sorted(self.live(process.service) - absent):
            if not process.is_up:
                break
            if (inventory := self._open_on(process, node)) is not None:
                inventories[node] = inventory
        process.opened, process.is_ready = set(inventories), True
        return inventories

    def _open_on(self, process: Coordinator, name: str) -> Inventory | None:
        """Start the node's agent if there is none, send the epoch to the agent, and take inventory."""
        node = self.nodes[name]
        agent = self._start_agent(node)
        if not self._obeys(name, n.EpochSeen(epoch=process.machine.epoch), process.name):
            return None
        leaving = frozenset(held[0] for held in node.disk.fragments if agent.machine.is_deleted(held[0]))
        return replace(node.disk.inventory(leaving=leaving), plan=agent.machine.plan)

    def _open_later(self, process: Coordinator, node: str) -> None:
        order = Order(node, n.EpochSeen(epoch=process.machine.epoch), process.name, ("open",))
        if order not in self.wire:
            self.wire.append(order)

    def _open_group(
        self, process: Coordinator, launcher: Launcher, size: int, absent: frozenset[str]
    ) -> None:
        inventories = self._gather(process, absent)
        nodes = sorted(inventories)[:size]
        if not nodes or not process.is_up:
            return
        token, width = self._token(), self.ranks_per_node
        event = m.GroupOpened(
            token=token,
            nodes=tuple(
                GroupNode(node_id=node, ranks=tuple(range(i * width, (i + 1) * width)))
                for i, node in enumerate(nodes)
            ),
            inventories=inventories,
            resume=launcher.resume,
            owner=launcher.name,
            dead_owner=launcher.dead_owner,
        )
        launcher.state, launcher.error = "asking", None
        self.waiting[token] = (process.name, launcher)
        self.oracle.group_requested(event, self)
        self.wire.append(Answer(process.name, (self._seen(frozenset(inventories)), event)))

    def _send_plan(self, process: Coordinator, node: str, plan: SessionPlan, answer: tuple[Any, ...]) -> None:
        event = n.SessionStarted(plan=plan, node_id=node, epoch=process.machine.epoch)
        self.wire.append(Order(node, event, process.name, answer))

    def _seen(self, live: frozenset[str]) -> m.NodesSeen:
        nodes = [self.nodes[name] for name in sorted(live)]
        return m.NodesSeen(
            live=live,
            draining=frozenset(node.name for node in nodes if node.is_draining),
            domains={node.name: node.domain for node in nodes},
            disks={node.name: node.disk.space(self.disk_bytes) for node in nodes},
        )

    # -- delivery ------------------------------------------------------------------------------------

    def _order(self, message: Order, fate: Fate) -> None:
        node = self.nodes[message.node]
        reached = fate != "lost" and node.is_alive
        if reached and message.answer == ("open",):
            self._opened_late(message)
        elif reached and node.agent is not None:
            reached = self._obeys(message.node, message.event, message.sender)
        else:
            reached = False
        process = self.coordinators.get(message.sender)
        if process is None or not process.is_up:
            return
        match message.answer:
            case ("start", tokens, plan):
                self._started(process, tokens, plan, message.node, reached and fate == "delivered")
            case ("delete", attempt):
                is_gone = not node.is_alive or (reached and fate == "delivered")
                error = None if is_gone else "the agent did not answer"
                ended = m.DeleteEnded(attempt=attempt, place=message.node, error=error)
                self.wire.append(Answer(process.name, (ended,)))

    def _obeys(self, node: str, event: n.NodeEvent, sender: str) -> bool:
        """Deliver an order to an agent; if the agent refuses, report the higher epoch to the sender."""
        refused = self._agent_does(node, event)
        if refused is not None and sender in self.coordinators:
            self._feed(sender, m.OrderRefused(epoch=refused))
        return refused is None

    def _opened_late(self, message: Order) -> None:
        """Open the run on a node that joined or has a new agent, and send it the current session."""
        process = self.coordinators[message.sender]
        inventory = self._open_on(process, message.node) if process.is_up else None
        if inventory is None:
            return
        process.opened.add(message.node)
        self._feed(process.name, m.NodesJoined(inventories={message.node: inventory}))
        plan = process.machine.plan
        if plan is not None and message.node in {node.node_id for node in plan.nodes}:
            self._send_plan(process, message.node, plan, ())
            returned = n.CoordinatorReturned(epoch=process.machine.epoch)
            self.wire.append(Order(message.node, returned, process.name))

    def _started(
        self, process: Coordinator, tokens: tuple[str, ...], plan: SessionPlan, node: str, is_reported: bool
    ) -> None:
        """Reply with the plan once all nodes have the plan, or with an error as soon as one node fails."""
        missing = process.starting.get(tokens)
        if missing is None:
            return
        missing.discard(node)
        if is_reported and missing:
            return
        del process.starting[tokens]
        error = None if is_reported else Unavailable(f"A node did not take session {plan.session}.")
        self.wire += [Replied(token, plan if error is None else None, error) for token in tokens]

    def _report(self, message: Report, fate: Fate) -> None:
        process = self.process_of(message.service)
        if process is None or fate == "lost":
            if message.token:
                self.wire.append(Replied(message.token, None, Unavailable("The coordinator did not answer.")))
            return
        if message.token in self.waiting:
            self.waiting[message.token] = (process.name, self.waiting[message.token][1])
        self._feed(process.name, message.event)

    def _create(self, message: Create, fate: Fate) -> None:
        """Create a record; a lost create may reach the store later, when no caller waits for its answer."""
        if fate == "lost" or self.storage.is_away:
            outcome: Literal["ok", "exists", "unknown"] = "unknown"
            if not message.is_late:
                self.wire.append(Create(message.coordinator, message.record, is_late=True))
        else:
            outcome, is_new = self.storage.create(message.record)
            if is_new:
                self.oracle.logged(message.record, self)
            outcome = "unknown" if fate == "unanswered" else outcome
        if not message.is_late:
            service = self.oracle.history.service if outcome == "exists" else ""
            answer = m.Appended(seq=message.record.seq, outcome=outcome, service=service)
            self.wire.append(Answer(message.coordinator, (answer,)))

    def _work(self, name: str, effect: m.Effect, fate: Fate) -> None:
        """Carry out an effect; the coordinator receives the answer."""
        match effect:
            case m.RequestInventory(token=token):
                self.now_s += 1  # the nodes take this time to answer
                process = self.coordinators[name]
                inventories = self._gather(process, frozenset()) if process.is_up else {}
                seen = self._seen(frozenset(inventories))
                self.wire.append(Answer(name, (seen, m.InventoryTaken(token=token, inventories=inventories))))
            case m.PutAway(kept=kept):
                self.wire.append(Answer(name, (self._put_away(self.coordinators[name], kept, fate),)))
            case _:
                answer = STORAGE_WORK[type(effect)](self, name, effect, fate)
                if answer is not None:
                    self.wire.append(Answer(name, (answer,)))

    def _put_away(self, process: Coordinator, kept: tuple[str, ...], fate: Fate) -> m.PutAwayEnded:
        """Order all live nodes to forget the run, with new agents if needed; a lost call skips one node."""
        nodes = sorted(self.live(process.service))
        for name in nodes[fate == "lost" :]:
            self._start_agent(self.nodes[name])
            self._obeys(name, n.RunPutAway(kept=kept, epoch=process.machine.epoch), process.name)
        return m.PutAwayEnded(error=None if fate == "delivered" else "an agent did not answer")


def _orders(effect: NodeEffect, epoch: int) -> list[tuple[str, n.NodeEvent]]:
    """Return the orders of an effect, each with the node that receives the order."""
    match effect:
        case m.NotifyOutcome(attempt=attempt, level=level, error=error, nodes=nodes):
            outcome = n.OutcomeNotified(attempt=attempt, level=level, error=error, epoch=effect.epoch)
            return [(node, outcome) for node in nodes]
        case m.Replicate(attempt=attempt, node_index=index, source=source, holder=holder):
            return [(source, n.CopyOrdered(attempt=attempt, node_index=index, holder=holder, epoch=epoch))]
        case m.Delete(directory=directory, place=place):
            return [(place, n.DeleteOrdered(directories=(directory,), epoch=epoch))]
        case m.DeleteLocalOrphans(node_id=place, directories=directories):
            return [(place, n.DeleteOrdered(directories=directories, epoch=epoch))]
        case m.Evict(attempt=attempt, node_id=place):
            return [(place, n.DeleteOrdered(directories=(attempt.directory,), epoch=epoch))]
        case m.Supersede(nodes=nodes, session_key=session_key, error=failure):
            ended = n.SessionEnded(session_key=session_key, error=failure, epoch=epoch)
            return [(node, ended) for node in nodes]
        case m.AnnounceSaveStep(session_key=session_key, signal=signal, nodes=nodes):
            announced = n.SaveStepAnnounced(session_key=session_key, signal=signal, epoch=epoch)
            return [(node, announced) for node in nodes]
