"""Nodes with their disks and agents: the real host of a node with faulty ports, and its ranks' calls."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ray_ckpt.config import RunOptions
from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.node_machine import NodeMachine
from ray_ckpt.core.values import GroupPlaces, Token
from ray_ckpt.engine.node_host import NodeHost
from ray_ckpt.engine.node_ports import (
    EndAwaited,
    NodeHostEvent,
    OrderReceived,
    OutcomeAwaited,
    PeerProbed,
    ProbePeer,
    RankMet,
    RankRestored,
    SurvivorCame,
    WorkEnded,
)
from ray_ckpt.engine.ports import OpenOnNode
from ray_ckpt.errors import Unavailable
from ray_ckpt.format.names import is_still_name
from ray_ckpt.format.parity import is_decodable
from ray_ckpt.testing.node_ports import WireNodePorts
from ray_ckpt.testing.oracle import Oracle, must
from ray_ckpt.testing.parts import (
    Agent,
    Coordinator,
    Fate,
    Group,
    Launcher,
    Local,
    Member,
    Message,
    Node,
    OrderCall,
    RankCall,
    Replied,
    Report,
    Reporter,
    Work,
    file_entry,
    fragment_on_disk,
)
from ray_ckpt.testing.stores import FILE_BYTES, Copy, Disk, Parity, Storage
from ray_ckpt.types import AttemptId, FileEntry

DISK_BYTES = 100_000  # size of each node's disk; on a smaller disk, retention evicts for space


class Nodes:
    """The part of a world with its state and with the events on its nodes."""

    def __init__(
        self,
        options: RunOptions,
        clusters: Mapping[str, int],
        *,
        ranks_per_node: int = 1,
        disk_bytes: int = DISK_BYTES,
        relay_nodes: int = 0,
        has_still_files: bool = False,
    ) -> None:
        self.options = options
        self.ranks_per_node = ranks_per_node
        self.disk_bytes = disk_bytes
        self.relay_nodes = relay_nodes  # nodes of one relay; 0: no relays
        self.has_still_files = has_still_files  # ranks have slices that stay the same from save to save
        self.now_s = 0.0
        self.copy_s = 0.0  # duration of a copy
        self.silent_s = 0.0  # time after which a sender gives up on a silent peer
        # Links (from, to) that lose packets; True: the connection is still open.
        self.silent: dict[tuple[str, str], bool] = {}
        self.clock = 0  # number of events so far
        self.storage = Storage()
        self.oracle = Oracle()
        self.nodes: dict[str, Node] = {}
        self.coordinators: dict[str, Coordinator] = {}
        self.current: dict[str, str] = {}  # service -> name of its current coordinator
        self.launchers: dict[str, Launcher] = {}
        self.wire: list[Message] = []
        self.disks_fail = False  # True: disks often cannot delete a folder
        self.timers: list[Local] = []  # timers of agents; those that are due go to the wire
        self.absent: frozenset[str] = frozenset()  # nodes whose agents do not answer a call to all agents
        self.waiting: dict[Token, tuple[str, Launcher | Reporter]] = {}  # coordinator and caller
        self.order_calls: dict[Token, OrderCall] = {}  # orders that agents carry out
        self.rank_calls: dict[Token, RankCall] = {}  # not answered yet
        self.rank_replies: dict[Token, RankCall] = {}  # with an answer on the wire
        self.pins: dict[Token, tuple[str, str]] = {}  # requested pins: attempt, owner
        self.annotations: dict[Token, tuple[int, str, float]] = {}  # requested: step, metric, value
        self.drills: set[Token] = set()  # tokens of ended drills; a record's text is its token
        self.barriers: dict[Token, m.BarrierReached] = {}  # barriers that agents have reported
        self.saved_at_s: dict[str, float] = {}  # attempt -> when the first rank captured it
        self.num_tokens = 0
        self.num_orders = 0
        self.num_agents = 0
        for service, size in clusters.items():
            for _ in range(size):
                self.join(service)

    def join(self, service: str, disk: Disk | None = None) -> Node:
        """Add a machine with a new node id, and with a new disk or the given disk."""
        self.clock += 1
        name = f"{service}-{len(self.nodes)}"
        domain = f"rack-{len(self.nodes) % 2}"
        node = Node(name, service, disk or Disk(f"disk-{name}"), domain, since=self.clock)
        self.nodes[name] = node
        return node

    def disks(self) -> Iterable[Disk]:
        """Return each disk once: a disk may have been on several nodes."""
        return {id(node.disk): node.disk for node in self.nodes.values()}.values()

    def members(self) -> Iterator[tuple[Launcher, Group, Member]]:
        for launcher in self.launchers.values():
            if launcher.group is not None:
                for member in launcher.group.members:
                    yield launcher, launcher.group, member

    def can_save(self, group: Group, member: Member) -> bool:
        """Return True if a member may save; training is collective, so no member is two saves ahead."""
        slowest = min(other.saved for other in group.members)
        return member.state == "training" and member.saved == slowest and not group.dead

    def members_on(self, node: str) -> Iterator[Member]:
        for _, _, member in self.members():
            if member.node == node and member.state != "ended":
                yield member

    def live(self, service: str) -> set[str]:
        return {node.name for node in self.nodes.values() if node.is_alive and node.service == service}

    def report(self, node: str, number: int, event: m.Event) -> None:
        """Send a report of an agent to the coordinator of its service."""
        token = ""
        if isinstance(event, m.BarrierReached | m.NodeRestored):
            token = self._token()
            event = replace(event, token=token)
            self.waiting[token] = ("", Reporter(node, number, event))
            if isinstance(event, m.BarrierReached):
                self.barriers[token] = event
        agent = self.nodes[node].agent
        relay = agent.route.via(self.now_s) if agent is not None else ""
        self.wire.append(Report(self.nodes[node].service, event, token, node, relay))

    def _token(self) -> Token:
        self.num_tokens += 1
        return f"token-{self.num_tokens}"

    # -- agents ----------------------------------------------------------------------------------------

    def _start_agent(self, node: Node) -> Agent:
        """Return the node's agent, after starting it if necessary."""
        if node.agent is None:
            self.num_agents += 1
            node.agent = Agent(self.num_agents, self._new_host(node, self.num_agents))
        return node.agent

    def _new_host(self, node: Node, number: int) -> NodeHost:
        machine = NodeMachine(epoch=node.disk.epoch)
        return NodeHost(machine, WireNodePorts(self, node.name, number), node.name)

    def _to_agent(self, node: Node, event: n.NodeEvent | NodeHostEvent) -> None:
        assert node.agent is not None
        node.agent.host.handle(event)
        if isinstance(event, n.SaveFailed):
            self._note_drop(node.agent, event.attempt.attempt)

    def _note_drop(self, agent: Agent, attempt: str) -> None:
        if agent.machine.is_deleted(attempt):
            self.oracle.gave_up(attempt, agent.machine.epoch)

    def call_agent(
        self,
        member: Member,
        event: OutcomeAwaited | EndAwaited | RankMet | RankRestored | SurvivorCame,
    ) -> None:
        """Let a rank call its agent, and wait for the answer; nothing happens if there is no agent."""
        agent = self.nodes[member.node].agent
        if agent is None:
            return
        assert member.plan is not None
        self.rank_calls[event.token] = RankCall(member, member.plan, event, agent.number)
        self.wire.append(Local(member.node, agent.number, event))

    def agent_answered(self, name: str, token: Token, value: object, error: Exception | None) -> None:
        """Handle the answer of an agent to a coordinator or a rank."""
        if (order := self.order_calls.pop(token, None)) is not None:
            self._order_answered(self.nodes[name], order, value, error)
        elif (call := self.rank_calls.pop(token, None)) is not None:
            self.rank_replies[token] = call
            agent = self.nodes[name].agent
            if agent is not None and error is None:
                self._check_answer(agent, call, value)
            self.wire.append(Replied(token, value, error))

    def _order_answered(self, node: Node, done: OrderCall, value: object, error: Exception | None) -> None:
        raise NotImplementedError  # see Coordinators

    def _keep(self, node: Node, agent: Agent, work: n.StepStateKept) -> None:
        raise NotImplementedError  # see Survivors

    def _send_state(self, node: Node, agent: Agent, work: n.SendStepState, fate: Fate) -> None:
        raise NotImplementedError  # see Survivors

    def _write_state(self, node: Node, agent: Agent, work: n.WriteStepState, fate: Fate) -> None:
        raise NotImplementedError  # see Survivors

    def _check_answer(self, agent: Agent, call: RankCall, value: object) -> None:
        """Check an answer against the orders and calls so far."""
        event, key = call.event, call.plan.session_key
        if isinstance(value, n.SaveOutcome) and isinstance(event, OutcomeAwaited):
            self.oracle.settled(event.attempt, value.level)
            self._note_drop(agent, event.attempt.attempt)
        if isinstance(event, EndAwaited):
            is_over = key <= agent.ended or key < agent.began
            must(is_over, "P7", f"ranks of session {key} are sent its end, and it has not ended")
        if isinstance(event, RankMet) and value == ():
            self.oracle.entered(key, event.number)

    def check_session(self, node: Node, order: n.Order) -> None:
        """Check that an order that was carried out leaves a newer session at work."""
        agent = node.agent
        assert agent is not None
        plan = agent.machine.plan
        if plan is not None:
            text = f"{node.name} goes back to session {plan.session_key}, and {agent.over} is over"
            must(plan.session_key > agent.over, "P7", text)
        if isinstance(order, n.RunReleased) and plan is not None and plan.session_key > order.session_key:
            must(agent.host.plan is not None, "P7", f"{node.name} releases session {plan.session_key}")
        if isinstance(order, n.SessionEnded):
            agent.over = max(agent.over, order.session_key)
        elif isinstance(order, n.SessionStarted) and plan is not None:
            agent.over = max(agent.over, (plan.epoch, plan.session - 1))

    def check_callers(self, node: Node, order: n.Order) -> None:
        """Check that an order that was carried out has woken the ranks that wait for it."""
        for call in self.rank_calls.values():
            if node.agent is None or call.agent != node.agent.number or not call.has_arrived:
                continue
            match order, call.event:
                case n.OutcomeNotified(), OutcomeAwaited(attempt=attempt, level=level):
                    is_for = attempt == order.attempt
                    is_for &= order.error is not None or (order.level or 0) >= level
                    text = f"the outcome of step {attempt.step}"
                case n.SessionEnded(session_key=key), EndAwaited(session_key=awaited):
                    is_for = awaited <= key
                    text = f"the end of session {awaited}"
                case n.SessionStarted(plan=plan), EndAwaited(session_key=awaited):
                    is_for = awaited < plan.session_key
                    text = f"the end of session {awaited}"
                case n.RunReleased(session_key=key), waiting if node.agent.machine.is_released:
                    is_for = call.plan.session_key <= key
                    text = f"the end of the run, for which {type(waiting).__name__} waits"
                case _:
                    continue
            must(not is_for, "P7", f"ranks on {node.name} are not sent {text}")

    def _open_again(self, node: Node) -> None:
        """Open the run for the callers that ask while it is being put away: an agent takes turns."""
        for token, done in list(self.order_calls.items()):
            order = done.message.call.order
            if done.message.call.node == node.name and isinstance(order, OpenOnNode):
                self._to_agent(node, OrderReceived(token=token, order=n.EpochSeen(epoch=order.epoch)))

    def _forget_run(self, node: Node, agent: Agent, kept: Collection[str]) -> None:
        for directory in sorted(node.disk.folders):
            if directory not in kept:
                self.oracle.deletes(node, directory, self.storage)
                node.disk.delete(directory)
        node.disk.epoch = node.disk.epoch if node.disk.folders else 0

    def _local(self, message: Local, fate: Fate) -> None:
        """Carry out local work; lost work means that the disk or the peer has failed."""
        node = self.nodes[message.node]
        agent, work, token = node.agent, message.work, message.token
        if agent is None or agent.number != message.agent:
            return
        failure = OSError("disk full") if fate == "lost" else None
        match work:
            case n.WriteShard(attempt=attempt, rank=rank) if failure is not None:
                self._to_agent(node, n.SaveFailed(attempt=attempt, rank=rank, reason=str(failure)))
            case n.WriteShard(attempt=attempt, rank=rank):
                files = self._write_shards(node, agent, attempt, message.files)
                self._to_agent(node, n.ShardWritten(attempt=attempt, rank=rank, files=files, rows=()))
            case n.WriteFragment(fragment=fragment):
                held = fragment_on_disk(fragment)
                node.disk.put(held, tuple(file.name for file in fragment.files))
                self._arrived(node, (held.attempt.attempt, held.node_index))
                self._to_agent(node, n.FragmentWritten(attempt=held.attempt, entry=held.fragment))
            case n.StepStateKept():
                self._keep(node, agent, work)
            case n.SendStepState():
                self._send_state(node, agent, work, fate)
            case n.WriteStepState():
                self._write_state(node, agent, work, fate)
            case n.SendCopy():
                self._send(node, message, work, fate)
            case ProbePeer(peer=peer, until_s=until_s):
                is_there = self.reaches(node.name, peer)
                self._to_agent(node, PeerProbed(peer=peer, is_there=is_there, until_s=until_s))
            case n.PersistEpoch(epoch=epoch):
                if failure is None:
                    node.disk.epoch = max(node.disk.epoch, epoch)
                self._to_agent(node, WorkEnded(work=work, token=token, error=failure))
            case n.DeleteFolder(directory=directory):
                fails = fate == "lost" or (self.disks_fail and self.clock % 4 == 0)
                failure = OSError("io") if fails and directory in node.disk.folders else None
                if failure is None:
                    self.oracle.deletes(node, directory, self.storage)
                    node.disk.delete(directory)
                self._to_agent(node, WorkEnded(work=work, token=token, error=failure))
            case n.ForgetRun(kept=kept):
                host = agent.host
                if failure is None:
                    self._forget_run(node, agent, kept)
                    agent.host = self._new_host(node, agent.number)
                    agent.began = agent.ended = agent.over = (0, 0)
                host.handle(WorkEnded(work=work, token=token, error=failure))
                self._open_again(node)
            case OutcomeAwaited() | EndAwaited() | RankMet() | RankRestored() | SurvivorCame():
                if work.token in self.rank_calls:
                    self.rank_calls[work.token].has_arrived = True
                self._to_agent(node, work)
            case event:
                self._to_agent(node, event)

    def _write_shards(
        self, node: Node, agent: Agent, attempt: AttemptId, files: Sequence[str]
    ) -> tuple[FileEntry, ...]:
        """Write the shards of a rank; link those that an earlier checkpoint on the disk has."""
        for file in files:
            if is_still_name(file) and node.disk.link(attempt.directory, file):
                agent.shared[attempt.attempt] += FILE_BYTES
            else:
                node.disk.write(attempt.directory, file)
        return tuple(file_entry(attempt, file) for file in files)

    def _send(self, node: Node, message: Local, work: n.SendCopy, fate: Fate) -> None:
        holder = work.holder
        is_silent = message.is_silent or not self.reaches(node.name, holder)
        if is_silent and not message.is_silent:
            self._send_into_silence(node, work)
            if self.silent_s:
                self.wire.append(replace(message, at_s=self.now_s + self.silent_s, is_silent=True))
                return
        if not is_silent and self._obeys_less(holder, work.epoch):
            self.wire.append(message)  # the holder answers when it obeys the epoch of the source
            return
        error = "no sign of life" if is_silent else self._send_copy(node, work, fate)
        sent = node.disk.fragments.get((work.attempt.attempt, work.node_index))
        ended = n.CopyEnded(
            attempt=work.attempt,
            node_index=work.node_index,
            holder=holder,
            epoch=work.epoch,
            error=error,
            fragment=sent.fragment if sent is not None and error is None else None,
            is_unreachable=is_silent,
        )
        self._to_agent(node, ended)

    def _obeys_less(self, name: str, epoch: int) -> bool:
        """Return True if the node obeys a lower epoch than `epoch`, which the node then begins to persist."""
        node = self.nodes[name]
        if not node.is_alive or node.agent is None or node.agent.machine.epoch >= epoch:
            return False
        order = OrderReceived(token=self._token(), order=n.EpochSeen(epoch=epoch))
        self._to_agent(node, order)
        return True

    def reaches(self, name: str, peer: str) -> bool:
        """Return True if the agent on `peer` answers the node `name`."""
        node = self.nodes[peer]
        is_there = node.is_alive and node.agent is not None
        return is_there and (name, peer) not in self.silent and (peer, name) not in self.silent

    def _serves(self, name: str, peer: str) -> bool:
        """Return True if the node `name` can read from the disk of the node `peer`."""
        node = self.nodes[peer]
        return (name == peer and node.is_alive and node.agent is not None) or self.reaches(name, peer)

    def decodable(self, attempt: AttemptId, places: GroupPlaces, reader: str) -> Parity | None:
        """Return a parity file of a group if the reader can compute all lost members, else None."""
        lost, without, parity = set[int](), set[int](), None
        for at, member in enumerate(places.group.members):
            copy = attempt.attempt, member
            held = [self.nodes[name].disk for name in places.fragments[at] if self._serves(reader, name)]
            if not any(disk.has_intact(copy) for disk in held):
                lost.add(at)
            coded = [self.nodes[name].disk for name in places.parities[at] if self._serves(reader, name)]
            found = next((disk.parities[copy] for disk in coded if copy in disk.parities), None)
            parity = found or parity
            if found is None:
                without.add(at)
        return parity if is_decodable(places.group, lost, without) else None

    def cut(self, name: str, peer: str) -> None:
        """Lose all packets from the node `name` to the node `peer` from now on."""
        self.clock += 1
        self.silent[name, peer] = True

    def mend(self, name: str, peer: str) -> None:
        self.clock += 1
        self.silent.pop((name, peer), None)

    def _send_into_silence(self, source: Node, work: n.SendCopy) -> None:
        """Deliver a copy that was under way if only answers are lost; later copies do not connect."""
        name = work.holder
        if (source.name, name) not in self.silent and self.silent.get((name, source.name)):
            self.silent[name, source.name] = False
            self._send_copy(source, work, "unanswered")

    def _send_copy(self, source: Node, work: n.SendCopy, fate: Fate) -> str | None:
        """Write a copy to another node's disk, the fragment last; a lost copy leaves only its other files."""
        holder, copy = self.nodes[work.holder], (work.attempt.attempt, work.node_index)
        held = source.disk.fragments.get(copy)
        if held is None or not source.disk.has(copy) or copy in source.disk.rotten:
            return "not here"
        if not holder.is_alive or holder.agent is None:
            return "the peer does not answer"
        if holder.agent.machine.is_deleted(copy[0]):
            return "it is being deleted there"
        listed, bad = source.disk.listed[copy], source.disk.bad_still_files(copy)
        for file in listed:
            if is_still_name(file) and holder.disk.link(held.attempt.directory, file, is_read=work.is_repair):
                continue  # no bytes of the source are read
            if file in bad:
                return "its bytes differ from the digest"
            holder.disk.write(held.attempt.directory, file)
        if fate == "lost":
            return "the peer went away"
        holder.disk.put(held, listed)
        self._arrived(holder, copy)
        return None if fate == "delivered" else "the peer did not answer"

    def _arrived(self, node: Node, copy: Copy) -> None:
        disk = node.disk
        if disk.has(copy) and copy not in disk.rotten:
            disk.since[copy] = self.clock
            self.oracle.stored(disk, copy)
            if disk.bad_still_files(copy):  # linked to bytes that were damaged before
                self.oracle.corrupted(disk, copy)

    def crash_agent(self, name: str) -> None:
        self.clock += 1
        self.nodes[name].agent = None
        self._lose_local(name)
        for member in self.members_on(name):
            member.busy = set()

    def _lose_local(self, name: str) -> None:
        """Drop the work of an agent that has ended; its callers get an error, its uploads stay unfinished."""
        for message in self.wire:
            match message:
                case Work(effect=m.Drain() as drain) if drain.node_id == name and not self.storage.is_away:
                    self.storage.leave_upload(drain.attempt, drain.node_index, drain.items, self.now_s)
        self.wire = [w for w in self.wire if not (isinstance(w, Local) and w.node == name)]
        self.timers = [timer for timer in self.timers if timer.node != name]
        died = Unavailable("The agent died.")
        for token in [token for token, call in self.rank_calls.items() if call.member.node == name]:
            self.agent_answered(name, token, None, died)
        for token, order in list(self.order_calls.items()):
            if order.message.call.node == name:
                del self.order_calls[token]
                self._order_answered(self.nodes[name], order, None, died)
