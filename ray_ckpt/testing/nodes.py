"""Nodes with their disks and agents: the shell of `actors/agent` around a NodeMachine."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from ray_ckpt.config import RunOptions
from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.node_machine import NodeMachine
from ray_ckpt.core.values import Token
from ray_ckpt.errors import RunSuperseded
from ray_ckpt.format.names import shard_file
from ray_ckpt.testing.oracle import Oracle
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
    Report,
    Work,
    file_entry,
    fragment_on_disk,
)
from ray_ckpt.testing.stores import Copy, Disk, Storage

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
    ) -> None:
        self.options = options
        self.ranks_per_node = ranks_per_node
        self.disk_bytes = disk_bytes
        self.relay_nodes = relay_nodes  # nodes of one relay; 0: no relays
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
        self.absent: frozenset[str] = frozenset()  # nodes whose agents do not answer a call to all agents
        self.waiting: dict[Token, tuple[str, Launcher | Member]] = {}  # coordinator and caller
        self.pins: dict[Token, tuple[str, str]] = {}  # requested pins: attempt, owner
        self.annotations: dict[Token, tuple[int, str, float]] = {}  # requested: step, metric, value
        self.drills: set[Token] = set()  # tokens of ended drills; a record's text is its token
        self.barriers: dict[Token, m.BarrierReached] = {}  # barriers at which members wait
        self.saved_at_s: dict[str, float] = {}  # attempt -> when the first rank captured it
        self.num_tokens = 0
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

    def members(self) -> Iterator[tuple[Launcher, Group, Member]]:
        for launcher in self.launchers.values():
            if launcher.group is not None:
                for member in launcher.group.members:
                    yield launcher, launcher.group, member

    def can_save(self, group: Group, member: Member) -> bool:
        """Return True if a member may save; training is collective, so no member is two saves ahead."""
        slowest = min(other.saved for other in group.members)
        return member.state == "training" and member.saved == slowest

    def _members(self, node: str) -> Iterator[Member]:
        for _, _, member in self.members():
            if member.node == node and member.state != "ended":
                yield member

    def live(self, service: str) -> set[str]:
        return {node.name for node in self.nodes.values() if node.is_alive and node.service == service}

    def _token(self) -> Token:
        self.num_tokens += 1
        return f"token-{self.num_tokens}"

    # -- the agent's shell -----------------------------------------------------------------------------

    def _start_agent(self, node: Node) -> Agent:
        """Return the node's agent, after starting it if necessary."""
        if node.agent is None:
            self.num_agents += 1
            node.agent = Agent(self.num_agents, NodeMachine(epoch=node.disk.epoch))
        return node.agent

    def _agent_does(self, name: str, event: n.NodeEvent) -> int | None:
        """Let an agent handle an event; return the agent's epoch if it refuses an order of a lower epoch."""
        agent = self.nodes[name].agent
        assert agent is not None
        refused = None
        for effect in agent.machine.handle(event):
            if isinstance(effect, n.RefuseOrder):
                refused = effect.epoch
            else:
                self._node_does(name, agent, effect)
        return refused

    def _node_does(self, name: str, agent: Agent, effect: n.NodeEffect) -> None:
        node = self.nodes[name]
        match effect:
            case n.PersistEpoch(epoch=epoch):
                node.disk.epoch = max(node.disk.epoch, epoch)
            case n.WriteShard(attempt=attempt, rank=rank):
                assert agent.machine.plan is not None
                file = shard_file(rank, agent.machine.plan.world_size)
                node.disk.write(attempt.directory)
                self.wire.append(Local(name, agent.number, effect, file))
            case n.SendCopy():
                self.wire.append(Local(name, agent.number, effect, at_s=self.now_s + self.copy_s))
            case n.WriteFragment() | n.DeleteFolder() | n.CheckPeer():
                self.wire.append(Local(name, agent.number, effect))
            case n.ReportStored() | n.ReportCopied() | n.ReportRefused():
                self.wire.append(Report(node.service, _report_of(name, effect)))
            case n.Release(rank=rank):
                for member in self._members(name):
                    member.busy.discard(rank)
            case n.ResolveSave():
                self._resolve(name, agent, effect)
            case n.ShowSaveSignal(signal=signal):
                agent.signal = signal
            case n.ForgetRun(kept=kept):
                self._forget_run(node, agent, kept)
            case n.EndSession(session=session):
                for member in self._members(name):
                    if member.plan is not None and member.plan.session <= session:
                        member.state = "ended"

    def _resolve(self, name: str, agent: Agent, effect: n.ResolveSave) -> None:
        attempt = effect.attempt
        self.oracle.settled(attempt, effect.level)
        if agent.machine.is_deleted(attempt.attempt):
            self.oracle.gave_up(attempt, agent.machine.epoch)
        if isinstance(effect.error, RunSuperseded):
            for member in self._members(name):
                if member.plan is not None and member.plan.has(attempt):
                    member.state = "ended"

    def _forget_run(self, node: Node, agent: Agent, kept: Collection[str]) -> None:
        for directory in sorted(node.disk.folders):
            if directory not in kept:
                self.oracle.deletes(node.disk, directory, self.storage)
                node.disk.delete(directory)
        node.disk.epoch = node.disk.epoch if node.disk.folders else 0
        agent.machine = NodeMachine(epoch=node.disk.epoch)

    def _local(self, message: Local, fate: Fate) -> None:
        """Carry out local work; lost work means that the disk or the peer has failed."""
        node = self.nodes[message.node]
        agent = node.agent
        if agent is None or agent.number != message.agent:
            return
        match message.work:
            case n.WriteShard(attempt=attempt, rank=rank):
                if fate == "lost":
                    self._agent_does(node.name, n.SaveFailed(attempt=attempt, rank=rank, reason="disk full"))
                    return
                node.disk.write(attempt.directory, message.file)
                files = (file_entry(attempt, message.file),)
                self._agent_does(node.name, n.ShardWritten(attempt=attempt, rank=rank, files=files, rows=()))
            case n.WriteFragment(fragment=fragment):
                held = fragment_on_disk(fragment)
                node.disk.put(held, tuple(file.name for file in fragment.files))
                self._arrived(node, (held.attempt.attempt, held.node_index))
                self._agent_does(node.name, n.FragmentWritten(attempt=held.attempt, entry=held.fragment))
            case n.SendCopy() as work:
                self._send(node, message, work, fate)
            case n.CheckPeer(peer=peer):
                self._agent_does(node.name, n.PeerReturned(peer=peer))
            case n.DeleteFolder(directory=directory):
                self.oracle.deletes(node.disk, directory, self.storage)
                node.disk.delete(directory)
            case event:
                self._agent_does(node.name, event)

    def _send(self, node: Node, message: Local, work: n.SendCopy, fate: Fate) -> None:
        copy, holder = (work.attempt.attempt, work.node_index), work.holder
        is_silent = message.is_silent or not self.reaches(node.name, holder)
        if is_silent and not message.is_silent:
            self._send_into_silence(node, copy, holder)
            if self.silent_s:
                self.wire.append(replace(message, at_s=self.now_s + self.silent_s, is_silent=True))
                return
        error = "no sign of life" if is_silent else self._send_copy(node, copy, holder, fate)
        ended = n.CopyEnded(
            attempt=work.attempt,
            node_index=work.node_index,
            holder=holder,
            epoch=work.epoch,
            error=error,
            is_unreachable=is_silent,
        )
        self._agent_does(node.name, ended)

    def reaches(self, name: str, peer: str) -> bool:
        """Return True if the agent on `peer` answers the node `name`."""
        node = self.nodes[peer]
        is_there = node.is_alive and node.agent is not None
        return is_there and (name, peer) not in self.silent and (peer, name) not in self.silent

    def cut(self, name: str, peer: str) -> None:
        """Lose all packets from the node `name` to the node `peer` from now on."""
        self.clock += 1
        self.silent[name, peer] = True

    def mend(self, name: str, peer: str) -> None:
        self.clock += 1
        self.silent.pop((name, peer), None)

    def _send_into_silence(self, source: Node, copy: Copy, name: str) -> None:
        """Deliver a copy that was under way if only answers are lost; later copies do not connect."""
        if (source.name, name) not in self.silent and self.silent.get((name, source.name)):
            self.silent[name, source.name] = False
            self._send_copy(source, copy, name, "unanswered")

    def _send_copy(self, source: Node, copy: Copy, name: str, fate: Fate) -> str | None:
        """Write a copy to another node's disk, the fragment last; a lost copy leaves only its other files."""
        holder = self.nodes[name]
        held = source.disk.fragments.get(copy)
        if held is None or not source.disk.has(copy) or copy in source.disk.rotten:
            return "not here"
        if not holder.is_alive or holder.agent is None:
            return "the peer does not answer"
        if holder.agent.machine.is_deleted(copy[0]):
            return "it is being deleted there"
        listed = source.disk.listed[copy]
        holder.disk.write(held.attempt.directory, *listed)
        if fate == "lost":
            return "the peer went away"
        holder.disk.put(held, listed)
        self._arrived(holder, copy)
        return None if fate == "delivered" else "the peer did not answer"

    def _arrived(self, node: Node, copy: Copy) -> None:
        if node.disk.has_intact(copy):
            node.disk.since[copy] = self.clock
            self.oracle.stored(node.disk, copy)

    def crash_agent(self, name: str) -> None:
        self.clock += 1
        self.nodes[name].agent = None
        self._lose_local(name)
        for member in self._members(name):
            member.busy = set()

    def _lose_local(self, name: str) -> None:
        """Drop the work of an agent that has ended; the agent's uploads stay unfinished."""
        for message in self.wire:
            match message:
                case Work(effect=m.Drain(attempt=attempt, node_index=index, node_id=node)) if node == name:
                    if not self.storage.is_away:
                        self.storage.leave_upload(attempt, index, self.now_s)
        self.wire = [w for w in self.wire if not (isinstance(w, Local) and w.node == name)]


def _report_of(name: str, effect: n.ReportStored | n.ReportCopied | n.ReportRefused) -> m.Event:
    """Return the event that the coordinator receives for a node's report."""
    match effect:
        case n.ReportStored():
            return m.NodeStored(
                attempt=effect.attempt,
                node_index=effect.node_index,
                node_id=name,
                fragment=effect.fragment,
                size_bytes=effect.size_bytes,
                replicated=effect.replicated,
                metrics=effect.metrics,
                epoch=effect.epoch,
            )
        case n.ReportCopied():
            return m.ReplicaEnded(
                attempt=effect.attempt,
                node_index=effect.node_index,
                holder=effect.holder,
                error=effect.error,
                epoch=effect.epoch,
                source=name,
                is_unreachable=effect.is_unreachable,
            )
        case n.ReportRefused(attempt=attempt, ranks=ranks, reason=reason):
            return m.SaveRefused(attempt=attempt, ranks=ranks, reason=reason)
