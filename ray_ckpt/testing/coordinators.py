"""Simulated coordinators: the real host of a run with faulty ports, and the delivery of messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.ownership import RunMark, check_log
from ray_ckpt.core.run_machine import RunMachine
from ray_ckpt.core.values import Inventory, ScrubResult, SessionKey, SessionPlan, Token
from ray_ckpt.engine.deletes import NodeDeletes
from ray_ckpt.engine.groups import group_nodes
from ray_ckpt.engine.node_ports import OrderReceived
from ray_ckpt.engine.notices import Notices
from ray_ckpt.engine.ports import (
    AgentOrder,
    Answered,
    Call,
    ExitRefused,
    Failure,
    GroupFound,
    GroupRequested,
    HostEvent,
    OpenOnNode,
    PartRequested,
    RunOpened,
    UpdatePeer,
)
from ray_ckpt.engine.relays import Batch
from ray_ckpt.engine.run_host import RunHost
from ray_ckpt.errors import Fenced, RunInUse, RunSuperseded, SaveNotCollective, Unavailable
from ray_ckpt.format import records as r
from ray_ckpt.format.digest import digest
from ray_ckpt.testing.oracle import accused, must
from ray_ckpt.testing.parts import (
    Agent,
    Answer,
    Coordinator,
    Create,
    Fate,
    Group,
    Launcher,
    Message,
    Node,
    Order,
    OrderCall,
    Pass,
    Replied,
    Report,
    TakenInventory,
    Work,
)
from ray_ckpt.testing.storage_work import STORAGE_WORK, StorageWork
from ray_ckpt.testing.wire_ports import NO_ANSWER, WirePorts
from ray_ckpt.types import GroupPart

RUN = "gpt"
RUN_UID = digest(RUN.encode())


class Coordinators(StorageWork):
    """The part of a world that runs coordinators."""

    def _feed(self, name: str, *events: m.Event | HostEvent) -> None:
        """Let the host of a coordinator handle events; without events, only the time passes."""
        process = self.coordinators[name]
        if process.is_up:
            process.host.advance()
            process.host.handle(*events)
        self._send_calls(process)

    def _send_calls(self, process: Coordinator) -> None:
        """Send the calls that an event has caused, some through relays."""
        calls, process.calls = process.calls, []
        for part in process.relays.divide(calls, process.agents, process.host.ports.now_s()):
            if isinstance(part, Batch):
                self.wire.append(Pass(part, process.name))
            else:
                self.wire.append(Order(part, process.name))

    def show_outcome(self, process: Coordinator, order: n.OutcomeNotified) -> None:
        attempt, error = order.attempt, order.error
        if isinstance(error, SaveNotCollective):
            accused(attempt, self.now_s - self.saved_at_s[attempt.attempt], self.options)
        self.oracle.gives_up(process.name, attempt, error, process.machine.view.live_nodes)

    def is_silent(self, process: Coordinator) -> bool:
        since_s = process.waits_since_s
        return since_s is not None and self.now_s - since_s >= self.options.store_wait_s

    def fail_tokens(self, name: str, error: Exception) -> None:
        for token, (coordinator, _) in self.waiting.items():
            if coordinator == name:
                self.wire.append(Replied(token, None, error))

    def _plans(self, service: str) -> list[SessionPlan]:
        """Return the plans of the groups at work, as agents report them to a new coordinator."""
        agents = (self.nodes[node].agent for node in sorted(self.live(service)))
        return [a.host.plan for a in agents if a is not None and a.host.plan is not None]

    def _open_log(
        self,
        service: str,
        *,
        owner: str | None,
        raises: bool = False,
        found: tuple[SessionPlan, ...] = (),
    ) -> Coordinator | None:
        """Start a coordinator that reads and claims the log; return None if the claim is refused.

        The coordinator looks for the group of an earlier one. `owner` is the launcher that opens the run,
        `found` are plans that ranks have sent.
        """
        event = self.storage.opened(run_name=RUN, fresh_uid=RUN_UID)
        disks = (self.nodes[node].disk for node in self.live(service))
        marks = [RunMark(run_uid=RUN_UID, epoch=disk.epoch) for disk in disks if disk.epoch]
        resume = self.launchers[owner].resume if owner is not None else "auto"
        try:
            check_log(event, service=service, owner=owner, marks=marks, resume=resume)
        except RunSuperseded:
            if raises:
                raise
            return None
        number = len(self.coordinators)
        name = f"{service}.c{number}"
        skews = (1_000.0 * number, 3_600.0 * (number % 3 - 1))
        machine = RunMachine(options=self.options, writer=name, service=service)
        host = RunHost(machine, WirePorts(self, name), Notices())
        self.coordinators[name] = process = Coordinator(name, service, host, *skews)
        process.relays.size = self.relay_nodes
        self.current[service] = name
        self._feed(name, event)
        if plans := [*found, *self._plans(service)]:
            self._feed(name, GroupFound(plan=max(plans, key=lambda plan: plan.session_key)))
        if owner is None and not host.is_recovering:
            self._feed(name, RunOpened(token="", checks_storage=False))
        if owner is not None:
            self._feed(name, m.RunWanted())
        return process

    def process_of(self, service: str) -> Coordinator | None:
        process = self.coordinators.get(self.current.get(service, ""))
        return process if process is not None and process.is_up else None

    def _supersede(self, service: str) -> None:
        """End the ranks of a restarted coordinator whose run now belongs to another service."""
        history = self.oracle.history
        error = RunSuperseded("The run was taken over by another service.")
        for plan in self._plans(service):
            for node in plan.nodes:
                ended = n.SessionEnded(session_key=plan.session_key, error=error, epoch=history.epoch)
                self.wire.append(Order(Call(node=node.node_id, order=ended), ""))
        self.current.pop(service, None)

    def _open_group(self, process: Coordinator, launcher: Launcher, size: int) -> None:
        nodes = sorted(self.live(process.service) - self.absent)[:size]
        if not nodes:
            return
        ranks = [node for node in nodes for _ in range(self.ranks_per_node)]
        token = self._requested(process, launcher, ranks)
        self._feed(
            process.name,
            GroupRequested(
                token=token, nodes=group_nodes(ranks), resume=launcher.resume, owner=launcher.name
            ),
        )

    def _open_parts(self, process: Coordinator, launcher: Launcher, size: int) -> None:
        """Let the two worker groups of a launcher join a group, the second one perhaps before the first.

        The workers of the first part may have died; they then join again, on other nodes.
        """
        nodes = sorted(self.live(process.service) - self.absent)
        first, second = nodes[:size], nodes[-1:]
        parts = tuple(GroupPart(name=name, world_size=len(x)) for name, x in (("a", first), ("b", second)))
        joins = (("b", second), ("a", first)) if self.clock % 2 else _joins_twice(first, second)
        for part, own in joins if nodes else ():
            token = self._requested(process, launcher, [*first, *second])
            request = PartRequested(
                token=token,
                parts=parts,
                part=part,
                nodes=tuple(own),
                resume=launcher.resume,
                owner=launcher.name,
            )
            self._feed(process.name, request)

    def _requested(self, process: Coordinator, launcher: Launcher, ranks: Sequence[str]) -> Token:
        """Record a launcher's request for a group, with the node of each rank."""
        token = self._token()
        launcher.state, launcher.error = "asking", None
        launcher.wanted[token] = tuple(ranks)
        self.waiting[token] = (process.name, launcher)
        return token

    def check_rivals(self, process: Coordinator, session: r.Session) -> None:
        """Check that a session takes the run from no living launcher of the same cluster.

        A launcher that has lost the run to another cluster does not take it back.
        """
        sessions = list(self.oracle.history.sessions.values())
        if any((s.service, s.owner) == (process.service, session.owner) for s in sessions):
            last = sessions[-1]
            text = f"{session.owner} takes the run back from {last.owner}"
            must(last.service == process.service, "P7", text)
        for launcher, group, member in self.members():
            is_rival = launcher.service == process.service and launcher.name != session.owner
            is_known = member.node not in process.absent
            if is_rival and is_known and self.is_at_work(launcher, group):
                must(False, "P7", f"{session.owner} takes the run from {launcher.name}, which is at work")

    def end_idle_agents(self, process: Coordinator) -> None:
        """End the agents whose nodes no run needs."""
        now_s = process.host.ports.now_s()
        for name in process.idle.take(process.agents, [process.host], now_s):
            process.agents.discard(name)
            if self.nodes[name].agent is None:
                continue
            self.send_order(Order(Call(node=name, order=process.host.exit_order()), process.name))

    def _exit_answered(self, node: Node, process: Coordinator | None, error: Exception | None) -> None:
        """End an idle agent, unless the agent refuses to end."""
        if error is not None:
            if isinstance(error, RunInUse) and process is not None:
                self.wire.append(Answer(process.name, (ExitRefused(node=node.name),)))
            return
        for launcher, group, member in self.members():
            is_at_work = self.is_at_work(launcher, group) and launcher.service == node.service
            text = f"the idle agent of {node.name} ends, and {launcher.name} is at work there"
            must(not is_at_work or member.node != node.name, "P7", text)
        self.crash_agent(node.name)

    def is_at_work(self, launcher: Launcher, group: Group) -> bool:
        """Return True if all nodes of a group train in the session that the log has last."""
        agents = [self.nodes[member.node].agent for member in group.members]
        return launcher.state == "running" and all(
            member.state == "training"
            and agent is not None
            and member.plan is not None
            and agent.host.plan == member.plan
            and not self.oracle.is_over(member.plan)
            for member, agent in zip(group.members, agents, strict=True)
        )

    def seen(self, process: Coordinator) -> m.NodesSeen:
        """Return the live nodes of a coordinator's cluster, with the disks of two thirds of them."""
        live = self.live(process.service)
        process.agents &= live
        nodes = [self.nodes[name] for name in sorted(live)]
        return m.NodesSeen(
            live=frozenset(live),
            draining=frozenset(node.name for node in nodes if node.is_draining),
            domains={node.name: node.domain for node in nodes},
            spares=frozenset(live) if self.options.spare_nodes else frozenset(),
            replica_nodes=frozenset(sorted(live)[::2]) if self.options.replica_nodes else frozenset(),
            disks={
                node.name: node.disk.space(self.disk_bytes)
                for index, node in enumerate(nodes)
                if node.name in process.host.nodes.opened and (index + self.clock) % 3
            },
        )

    # -- delivery ------------------------------------------------------------------------------------

    def _pass(self, message: Pass, fate: Fate) -> None:
        """Deliver calls to a relay, which passes them on."""
        batch, sender = message.batch, message.sender
        is_there = self._is_relay(batch.relay) and fate != "lost"
        if is_there:
            self.wire += [Order(call, sender, batch, number) for number, call in batch.calls.items()]
        if not is_there or fate == "unanswered":
            self._send_again(batch, sender)

    def _is_relay(self, name: str) -> bool:
        return self.nodes[name].is_alive and self.nodes[name].agent is not None

    def _send_again(self, batch: Batch, sender: str) -> None:
        """Let a coordinator send the calls that a relay has not answered again, without the relay."""
        process = self.coordinators[sender]
        if process.is_up:
            process.relays.failed(batch.relay, process.host.ports.now_s())
            self.wire += [Order(call, sender) for call in batch.give_up()]

    def _order(self, message: Order, fate: Fate) -> None:
        """Deliver a call to an agent; the sender may get the answer."""
        if fate == "lost":
            done = OrderCall(message, fate, 0)
            self._send_back(done, Answered(to=message.call, failure=NO_ANSWER))
        else:
            self.send_order(message, fate)

    def answer(self, name: str, answer: Answered) -> None:
        """Send the answer to a call to its coordinator."""
        process, call = self.coordinators.get(name), answer.to
        assert isinstance(call, Call)
        if process is None or not process.is_up:
            return
        if isinstance(call.order, OpenOnNode) and call.order.number:
            for index, message in enumerate(self.wire):
                if _is_of_round(message, name, call.order):
                    assert isinstance(message, Answer)
                    self.wire[index] = replace(message, events=(*message.events, answer))
                    return
            self.wire.append(Answer(name, (answer,)))
        elif process.is_frozen or isinstance(call.work, NodeDeletes | m.PutAway):
            self.wire.append(Answer(name, (answer,)))
        else:
            self._feed(name, answer)

    def _check_collected(self, process: Coordinator, attempt: str) -> None:
        """Check that no node has reported a folder of a collected checkpoint as not deleted."""
        directory = self.oracle.history.checkpoints[attempt].directory
        nodes = [self.nodes[name] for name, left in sorted(process.left) if left == directory]
        there = [x.name for x in nodes if x.agent is not None and x.name in process.host.nodes.opened]
        must(not there, "P8", f"{directory} is called collected, and nodes {there} have not deleted it")

    def send_order(self, message: Order, fate: Fate = "delivered") -> None:
        """Let the agent of a node handle a call; `_order_answered` follows, perhaps at once."""
        call, node, order = message.call, self.nodes[message.call.node], message.call.order
        process, agent = self.coordinators.get(message.sender), node.agent
        if node.is_alive and isinstance(order, OpenOnNode | n.RunPutAway):
            agent = self._start_agent(node)
            if process is not None:
                process.agents.add(node.name)
        if not node.is_alive or agent is None:
            # the files of a lost node count as deleted
            is_gone = not node.is_alive and isinstance(call.work, NodeDeletes)
            answer = Answered(to=call, failure=None if is_gone else NO_ANSWER)
            self._send_back(OrderCall(message, fate, 0), answer)
            return
        event: Any = n.EpochSeen(epoch=order.epoch) if isinstance(order, OpenOnNode) else order
        if event.epoch >= agent.machine.epoch:
            _note_order(agent, event)
        if isinstance(event, n.SessionStarted):
            agent.route.use(message.batch.relay if message.batch is not None else "")
        plan = agent.machine.plan
        if isinstance(event, n.SalvageOrdered) and plan and plan.session_key == event.salvage.session_key:
            self.oracle.salvages_step(event.salvage, plan)
        self.num_orders += 1
        token = f"order-{self.num_orders}"
        self.order_calls[token] = OrderCall(message, fate, agent.number)
        self._to_agent(node, OrderReceived(token=token, order=event))
        if isinstance(event, n.OutcomeNotified) and event.epoch == agent.machine.epoch:
            self.oracle.settled(event.attempt, event.level)
            self._note_drop(agent, event.attempt.attempt)

    def _order_answered(self, node: Node, done: OrderCall, value: object, error: Exception | None) -> None:
        """Handle an agent's answer to an order."""
        call, order = done.message.call, done.message.call.order
        process, answer = self.coordinators.get(done.message.sender), Answered(to=call, value=value)
        if process is not None and error is None:
            self._note_left(process, node, call, value if done.fate == "delivered" else None)
        if isinstance(error, Fenced):
            answer = Answered(to=call, failure=Failure(text=str(error), epoch=error.fields["epoch"]))
        elif error is not None or done.fate == "unanswered":
            answer = Answered(to=call, failure=NO_ANSWER)
        elif isinstance(order, OpenOnNode):
            answer = Answered(to=call, value=self._inventory(node.name, order.known))
        if error is None and not isinstance(order, OpenOnNode | n.RunPutAway):
            assert not isinstance(order, m.Code | m.Drain | m.Scrub | UpdatePeer)
            text = f"{node.name} has obeyed epoch {order.epoch}, and has {node.disk.epoch} on its disk"
            must(node.disk.epoch >= order.epoch, "P3", text)
            self.check_callers(node, order)
            self.check_session(node, order)
        if isinstance(order, n.ExitOrdered):
            self._exit_answered(node, process, error)
        else:
            self._send_back(done, answer)

    def _send_back(self, done: OrderCall, answer: Answered) -> None:
        """Send an answer to its coordinator, perhaps through a relay."""
        message, process = done.message, self.coordinators.get(done.message.sender)
        if process is None or not process.is_up:
            return
        if message.batch is not None:
            if done.fate != "delivered" or not self._is_relay(message.batch.relay):
                self._send_again(message.batch, message.sender)
                return
            if message.batch.answered(message.number) is None:
                return  # answered before
        self.answer(message.sender, answer)

    def _note_left(self, process: Coordinator, node: Node, call: Call, value: object) -> None:
        """Note the folders that a node has reported as not deleted, although a deletion waits for them."""
        if isinstance(call.order, OpenOnNode):  # the inventory has the folders that are left
            process.left = {left for left in process.left if left[0] != node.name}
        if isinstance(call.order, n.DeleteOrdered):
            deletes = call.work.deletes if isinstance(call.work, NodeDeletes) else ()
            awaited = {delete.directory for delete in deletes}
            left = {(node.name, directory) for directory in value} if isinstance(value, dict) else set()
            process.deleted |= {(node.name, directory) for directory in call.order.directories} - left
            left = {(name, directory) for name, directory in left if directory in awaited}
            process.left = (process.left | left) - process.deleted

    def _inventory(self, name: str, known: SessionKey) -> Inventory:
        node = self.nodes[name]
        assert node.agent is not None
        machine = node.agent.machine
        leaving = frozenset(held[0] for held in node.disk.fragments if machine.is_deleted(held[0]))
        self.oracle.copies.inventory_taken(node.disk, leaving)
        held, plan = node.disk.inventory(leaving=leaving), node.agent.host.plan
        return TakenInventory(
            fragments=held.fragments,
            directories=held.directories,
            session_key=plan.session_key if plan is not None else None,
            plan=plan if plan is not None and plan.session_key > known else None,
            disk=held.disk,
            parities=held.parities,
            at=self.clock,
            agent=node.agent.number,
        )

    def _gather(self, message: Report, fate: Fate) -> None:
        """Deliver a report to its relay, which sends it on; if no answer comes, the node sends it too."""
        is_taken = self._is_relay(message.relay) and fate != "lost"
        sent = replace(message, relay="")
        if is_taken:
            self.wire.append(sent)
        if not is_taken or fate == "unanswered":
            self.wire.append(sent)
            if (agent := self.nodes[message.node].agent) is not None:
                agent.route.failed(self.now_s)

    def _report(self, message: Report, fate: Fate) -> None:
        if message.relay:
            self._gather(message, fate)
            return
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
            if is_new and isinstance(message.record.op, r.Session):
                self.check_rivals(self.coordinators[message.coordinator], message.record.op)
            if is_new and isinstance(message.record.op, r.Collected):
                self._check_collected(self.coordinators[message.coordinator], message.record.op.attempt)
            if is_new:
                self.oracle.logged(self)
            outcome = "unknown" if fate == "unanswered" else outcome
        if not message.is_late:
            service = self.oracle.history.service if outcome == "exists" else ""
            answer = m.Appended(seq=message.record.seq, outcome=outcome, service=service)
            self.wire.append(Answer(message.coordinator, (answer,)))

    def _check_scrubbed(self, process: Coordinator, event: m.Event | HostEvent) -> None:
        """Check that a coordinator counts no copy of which a scrub has taken away a file."""
        match event:
            case Answered(to=Call(node=name, work=m.Scrub() as scrub), value=ScrubResult() as found):
                copies = [(scrub.attempt, scrub.node_index), *found.shared]
            case _:
                return
        if not (found.damage and process.is_up):
            return
        holders, disk = process.machine.view.holders, self.nodes[name].disk
        for attempt, index in copies:
            known = process.machine.history.checkpoints.get(attempt.attempt)
            if known is not None and known.state == "collected":
                continue  # its last files are being deleted, and nothing reads them
            counts = name in holders.get(attempt.attempt, {}).get(index, ())
            text = f"fragment {index} of step {attempt.step} counts on {name}, which has lost it"
            must(not counts or disk.has((attempt.attempt, index)), "P2", text)

    def _work(self, message: Work, fate: Fate) -> None:
        """Do the work of an effect on storage, or of an agent; the coordinator receives the answer."""
        effect = message.effect
        value, failure = STORAGE_WORK[type(effect)](self, message.coordinator, effect, fate)
        answer = Answered(to=message.to, value=value, failure=failure)
        self.wire.append(Answer(message.coordinator, (answer,)))


def _is_of_round(message: Message, name: str, order: AgentOrder) -> bool:
    """Return True if a message has answers of other nodes to the same order."""
    first = message.events[0] if isinstance(message, Answer) and message.coordinator == name else None
    return isinstance(first, Answered) and isinstance(first.to, Call) and first.to.order == order


def _joins_twice(first: list[str], second: list[str]) -> tuple[tuple[str, list[str]], ...]:
    """Return the parts that join a group; the first one joins again, on its nodes in another order."""
    return ("a", first[::-1]), ("a", first), ("b", second)


def _note_order(agent: Agent, order: n.Order) -> None:
    """Note the sessions that an order to an agent begins or ends."""
    match order:
        case n.SessionStarted(plan=plan):
            agent.began = max(agent.began, plan.session_key)
        case n.SessionEnded(session_key=key) | n.RunReleased(session_key=key):
            agent.ended = max(agent.ended, key)
        case n.RunPutAway():
            agent.ended = max(agent.ended, agent.began)
