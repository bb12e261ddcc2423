"""Coordinator processes: what `actors/coordinator` does around a RunMachine, and how messages arrive."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.node_machine import NodeMachine
from ray_ckpt.core.ownership import check_claim
from ray_ckpt.core.run_machine import RunMachine
from ray_ckpt.core.values import GroupNode, Inventory, SessionPlan
from ray_ckpt.errors import CheckpointError, RunSuperseded, SaveNotCollective, Unavailable
from ray_ckpt.format.digest import digest
from ray_ckpt.storage.log_store import write_snapshot
from ray_ckpt.testing.nodes import Nodes
from ray_ckpt.testing.parts import (
    Agent,
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
from ray_ckpt.testing.stores import START_S
from ray_ckpt.types import AttemptId

RUN = "gpt"
RUN_UID = digest(RUN.encode())


class Coordinators(Nodes):
    """The part of a world that coordinators do."""

    # -- the coordinator's shell -------------------------------------------------------------------------

    def _tell(self, name: str, *events: m.Event) -> None:
        process = self.coordinators[name]
        if process.is_up and process.ticked_s != self.now_s:
            process.ticked_s = self.now_s
            wall_s = START_S + self.now_s + process.wall_skew_s
            self._carry_out(process, m.Ticked(now_s=self.now_s + process.skew_s, wall_s=wall_s))
        for event in events:
            if process.is_up:
                self._carry_out(process, event)

    def _carry_out(self, process: Coordinator, event: m.Event) -> None:
        if isinstance(event, m.Appended) and event.outcome == "ok":
            process.waits_since_s = None
        if isinstance(event, m.GroupOpened):
            self.oracle.group_opened(process.name, event.token)
        if isinstance(event, m.NodeStored):
            self.oracle.told_stored(process.name, event.attempt, event.node_index, event.node_id)
        if isinstance(event, m.GroupRecovered | m.GroupOpened | m.InventoryTaken | m.NodesJoined):
            for node, inventory in event.inventories.items():
                for held in inventory.fragments:
                    self.oracle.told_stored(process.name, held.attempt, held.node_index, node)
        for effect in process.machine.handle(event):
            self._do(process, effect)

    def _do(self, process: Coordinator, effect: m.Effect) -> None:
        name, epoch = process.name, process.machine.epoch
        match effect:
            case m.Append(record=record):
                process.waits_since_s = self.now_s if process.waits_since_s is None else process.waits_since_s
                self.oracle.appends(name, record)
                self.wire.append(Create(name, record))
            case m.StartSession(tokens=tokens, plan=plan):
                process.starting[tokens] = {node.node_id for node in plan.nodes}
                self.oracle.begun(plan, store_is_silent=self._is_silent(process))
                for node in plan.nodes:
                    self._send_plan(process, node.node_id, plan, ("start", tokens, plan))
            case m.Reply(token=token, value=value):
                if isinstance(value, m.BarrierAnswer):
                    self.oracle.met(name, self.barriers[token], value)
                self.wire.append(Replied(token, value, None))
            case m.Fail(token=token, error=failure):
                self.wire.append(Replied(token, None, failure))
            case m.NotifyOutcome(attempt=attempt, level=level, error=failed, nodes=nodes):
                if isinstance(failed, SaveNotCollective):
                    self.oracle.accused(attempt, self.now_s - self.saved_at_s[attempt.attempt], self.options)
                self.oracle.gives_up(name, attempt, failed, process.machine.view.live_nodes)
                told = n.OutcomeNotified(attempt=attempt, level=level, error=failed, epoch=effect.epoch)
                self.wire += [Order(node_told, told, name) for node_told in nodes]
            case m.Replicate(attempt=attempt, node_index=index, source=source, holder=holder):
                copy = n.CopyOrdered(attempt=attempt, node_index=index, holder=holder, epoch=epoch)
                self.wire.append(Order(source, copy, name))
            case m.Delete(attempt=gone, directory=directory, place=place) if place != m.REMOTE:
                order = n.DeleteOrdered(directories=(directory,), epoch=epoch)
                self.wire.append(Order(place, order, name, ("delete", gone)))
            case m.DeleteLocalOrphans(node_id=place, directories=directories):
                self.wire.append(Order(place, n.DeleteOrdered(directories=directories, epoch=epoch), name))
            case m.Evict(attempt=attempt, node_id=place):
                order = n.DeleteOrdered(directories=(attempt.directory,), epoch=epoch)
                self.wire.append(Order(place, order, name))
            case m.Supersede(nodes=nodes, session_key=session_key, error=failure):
                ended = n.SessionEnded(session_key=session_key, error=failure, epoch=epoch)
                self.wire += [Order(node_told, ended, name) for node_told in nodes]
            case m.StepDown(error=failure):
                self._step_down(process, failure)
            case m.AnnounceSaveStep(session_key=session_key, signal=signal, nodes=nodes):
                named = n.SaveStepAnnounced(session_key=session_key, signal=signal, epoch=epoch)
                self.wire += [Order(node_told, named, name) for node_told in nodes]
            case m.CloseRun():
                process.is_up = False
                if self.current.get(process.service) == name:
                    del self.current[process.service]
            case m.Warn():
                pass
            case _:
                self.wire.append(Work(name, effect))

    def _is_silent(self, process: Coordinator) -> bool:
        since_s = process.waits_since_s
        return since_s is not None and self.now_s - since_s >= self.options.store_wait_s

    def _step_down(self, process: Coordinator, error: CheckpointError) -> None:
        process.is_up = False
        if self.current.get(process.service) == process.name:
            del self.current[process.service]
        self._lose_tokens(process.name, error)

    def _lose_tokens(self, name: str, error: CheckpointError) -> None:
        for token, (asked, _) in self.waiting.items():
            if asked == name:
                self.wire.append(Replied(token, None, error))

    def _open_log(self, service: str, *, owner: str | None, raises: bool = False) -> Coordinator | None:
        """Read the log, and claim it if that is allowed."""
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
        self._tell(name, self.storage.opened(run_name=RUN, fresh_uid=RUN_UID), *wanted)
        return process

    def process_of(self, service: str) -> Coordinator | None:
        process = self.coordinators.get(self.current.get(service, ""))
        return process if process is not None and process.is_up else None

    def _supersede(self, service: str, plans: Iterable[SessionPlan]) -> None:
        """A restarted coordinator finds that the run is another service's: its ranks must stop."""
        history = self.oracle.history
        error = RunSuperseded("The run was taken over by another service.")
        for plan in plans:
            for node in plan.nodes:
                ended = n.SessionEnded(session_key=plan.session_key, error=error, epoch=history.epoch)
                self.wire.append(Order(node.node_id, ended, ""))
        self.current.pop(service, None)

    def _gather(self, process: Coordinator, absent: frozenset[str]) -> dict[str, Inventory]:
        """Open the run on all live nodes but those that do not answer; what they hold."""
        inventories = {}
        for node in sorted(self.live(process.service) - absent):
            if not process.is_up:
                break
            if (inventory := self._open_on(process, node)) is not None:
                inventories[node] = inventory
        process.opened, process.is_ready = set(inventories), True
        return inventories

    def _open_on(self, process: Coordinator, name: str) -> Inventory | None:
        """Start the node's agent if there is none, tell it the epoch, take inventory."""
        node = self.nodes[name]
        if node.agent is None:
            self.num_agents += 1
            node.agent = Agent(self.num_agents, NodeMachine(epoch=node.disk.epoch))
        agent = node.agent
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
                self._started(process, tokens, plan, message.node, reached and fate == "heard")
            case ("delete", attempt):
                is_gone = not node.is_alive or (reached and fate == "heard")
                error = None if is_gone else "the agent did not answer"
                ended = m.DeleteEnded(attempt=attempt, place=message.node, error=error)
                self.wire.append(Answer(process.name, (ended,)))

    def _obeys(self, node: str, event: n.NodeEvent, sender: str) -> bool:
        """An agent takes an order, or tells the sender that it has been fenced."""
        refused = self._agent_does(node, event)
        if refused is not None and sender in self.coordinators:
            self._tell(sender, m.OrderRefused(epoch=refused))
        return refused is None

    def _opened_late(self, message: Order) -> None:
        """A node that joined, or that has a new agent, gets the session at work."""
        process = self.coordinators[message.sender]
        inventory = self._open_on(process, message.node) if process.is_up else None
        if inventory is None:
            return
        process.opened.add(message.node)
        self._tell(process.name, m.NodesJoined(inventories={message.node: inventory}))
        plan = process.machine.plan
        if plan is not None and message.node in {node.node_id for node in plan.nodes}:
            self._send_plan(process, message.node, plan, ())
            returned = n.CoordinatorReturned(epoch=process.machine.epoch)
            self.wire.append(Order(message.node, returned, process.name))

    def _started(
        self, process: Coordinator, tokens: tuple[str, ...], plan: SessionPlan, node: str, is_reported: bool
    ) -> None:
        """All nodes have the plan: its tokens get it. One has not: they get an error."""
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
        self._tell(process.name, message.event)

    def _create(self, message: Create, fate: Fate) -> None:
        """lost: the create may still come to the store later, when nobody waits for it."""
        if fate == "lost" or self.storage.is_away:
            outcome: Literal["ok", "exists", "unknown"] = "unknown"
            if not message.is_late:
                self.wire.append(Create(message.coordinator, message.record, is_late=True))
        else:
            outcome, is_new = self.storage.create(message.record)
            if is_new:
                self.oracle.logged(message.record, self)
            outcome = "unknown" if fate == "unheard" else outcome
        if not message.is_late:
            service = self.oracle.history.service if outcome == "exists" else ""
            answer = m.Appended(seq=message.record.seq, outcome=outcome, service=service)
            self.wire.append(Answer(message.coordinator, (answer,)))

    def _work(self, name: str, effect: m.Effect, fate: Fate) -> None:
        done = fate != "lost" and not self.storage.is_away
        error = None if done and fate == "heard" else "time-out"
        answer: m.Event
        match effect:
            case m.RequestInventory(token=token):
                self.now_s += 1  # as long as it takes to ask
                process = self.coordinators[name]
                inventories = self._gather(process, frozenset()) if process.is_up else {}
                seen = self._seen(frozenset(inventories))
                self.wire.append(Answer(name, (seen, m.InventoryTaken(token=token, inventories=inventories))))
                return
            case m.Drain():
                answer = self._upload(effect, fate)
            case m.WriteDescription(checkpoint=checkpoint):
                whole = set(range(checkpoint.num_nodes))
                is_damage = self.storage.fragments.get(checkpoint.id.attempt) != whole
                if is_damage:
                    error = "a fragment is missing"
                elif done:
                    self.storage.describe(checkpoint, self.now_s)
                answer = m.DescriptionWritten(attempt=checkpoint.id, error=error, is_damage=is_damage)
            case m.Delete(attempt=gone, directory=directory):
                if done:
                    self.oracle.deletes_remote(gone)
                    self.storage.delete(directory)
                answer = m.DeleteEnded(attempt=gone, place=m.REMOTE, error=error)
            case m.SweepRemote(number=number, uploads_only=uploads_only):
                answer = self.storage.listed(number, self.now_s)
                if error is not None:
                    answer = m.RemoteListed(number=number, error=error)
                elif uploads_only:
                    answer = replace(answer, directories={})
            case m.DeleteOrphans():
                if done:
                    self.oracle.sweeps(effect, self)
                    self.storage.sweep(effect)
                return
            case m.PutAway(kept=kept):
                answer = self._put_away(self.coordinators[name], kept, fate)
            case m.WriteSnapshot(seq=seq):
                history = self.coordinators[name].machine.history
                if done and history.next_seq == seq + 1:
                    write_snapshot(self.storage.log, history.to_snapshot(START_S + self.now_s))
                answer = m.SnapshotWritten(seq=seq, error=error)
            case m.Scrub(attempt=attempt, node_index=index, place=place):
                answer = self._scrub(attempt, index, place, error)
            case _:
                raise TypeError(f"the world cannot do {effect!r}")
        self.wire.append(Answer(name, (answer,)))

    def _put_away(self, process: Coordinator, kept: tuple[str, ...], fate: Fate) -> m.PutAwayEnded:
        """Asked of all live nodes, whose agents are started for it; a lost call leaves one out."""
        nodes = sorted(self.live(process.service))
        for name in nodes[fate == "lost" :]:
            node = self.nodes[name]
            if node.agent is None:
                self.num_agents += 1
                node.agent = Agent(self.num_agents, NodeMachine(epoch=node.disk.epoch))
            self._obeys(name, n.RunPutAway(kept=kept, epoch=process.machine.epoch), process.name)
        return m.PutAwayEnded(error=None if fate == "heard" else "an agent did not answer")

    def _upload(self, drain: m.Drain, fate: Fate) -> m.DrainEnded:
        """One that is cut off leaves an unfinished upload behind."""
        attempt, index = drain.attempt, drain.node_index
        copy = (attempt.attempt, index)
        node = self.nodes[drain.node_id]
        is_here = node.agent is not None and node.disk.has(copy)
        is_damage = is_here and copy in node.disk.rotten
        error = None
        if self.storage.is_away:
            error = "time-out"
        elif not is_here or is_damage:
            error = "it is damaged" if is_damage else "not here"
        elif fate == "lost":
            self.storage.leave_upload(attempt, index, self.now_s)
            error = "the agent died"
        else:
            self.storage.put(attempt, index, self.now_s)
            error = "time-out" if fate == "unheard" else None
        return m.DrainEnded(
            attempt=attempt, node_index=index, node_id=drain.node_id, error=error, is_damage=is_damage
        )

    def _scrub(self, attempt: AttemptId, index: int, place: str, error: str | None) -> m.ScrubEnded:
        copy = (attempt.attempt, index)
        damage: tuple[str, ...] = ()
        node = self.nodes.get(place)
        if node is not None:
            if node.agent is None or not node.disk.has(copy):
                error = "not here"
            elif copy in node.disk.rotten and error is None:
                node.disk.quarantine(copy)  # into quarantine
                damage = ("a slice",)
        return m.ScrubEnded(attempt=attempt, node_index=index, place=place, damage=damage, error=error)
