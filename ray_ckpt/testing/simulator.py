"""A world in which real machines run: clusters with nodes, agents and coordinators on one storage path.

Whoever schedules calls the methods under "what can happen"; each is one step, after which the oracle has
looked at everything. What was sent lies in `wire` until it is delivered, in any order, twice, or not at all.
A world knows neither chance nor a clock: the scheduler passes both in. It can be pickled, for copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from ray_ckpt.config import Resume, RunOptions
from ray_ckpt.core import messages as m
from ray_ckpt.core import node as n
from ray_ckpt.core.claim import check_claim
from ray_ckpt.core.coordinator import RunMachine
from ray_ckpt.errors import CheckpointError, RunInUse, RunSuperseded, Unavailable
from ray_ckpt.format.digest import digest
from ray_ckpt.format.names import fragment_file, make_attempt, shard_file
from ray_ckpt.format.records import LogRecord
from ray_ckpt.storage.log_store import TRIM_AFTER_S, trim_log, write_snapshot
from ray_ckpt.testing.oracle import Oracle
from ray_ckpt.testing.stores import FILE_BYTES, Copy, Disk, Storage
from ray_ckpt.types import AttemptId, FileEntry, Fragment, RankRestore

RUN = "gpt"
RUN_UID = digest(RUN.encode())
START_S = 1_790_000_000.0  # Unix time at which the world begins
DISK_BYTES = 100_000  # of each node; a smaller one makes room by retention
MAX_AHEAD = 1  # saves that a rank may be ahead of the slowest of its group: training is collective

Fate: TypeAlias = Literal["heard", "lost", "unheard"]
"""Of a message: carried out and answered; not carried out; carried out, but the answer is lost."""


# -- who there is ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Agent:
    """The process of a node that keeps its disk; a new one gets a new number."""

    number: int
    machine: n.NodeMachine


@dataclass(slots=True)
class Node:
    name: str
    service: str
    disk: Disk
    domain: str
    since: int  # number of the event with which it came
    agent: Agent | None = None
    is_alive: bool = True
    is_draining: bool = False


@dataclass(slots=True)
class Coordinator:
    """One process, for one claim of the run. Whoever has stepped down is down for good."""

    name: str
    service: str
    machine: RunMachine
    skew_s: float  # of its monotonic clock
    wall_skew_s: float
    opened: set[str] = field(default_factory=set)  # nodes whose agents know the run from it
    starting: dict[tuple[m.Token, ...], set[str]] = field(default_factory=dict)  # and who has not answered
    is_up: bool = True
    is_frozen: bool = False
    takes_over: bool = False  # it is to look for the group at work once it is open
    ticked_s: float | None = None
    waits_since_s: float | None = None  # the store has not answered


@dataclass(slots=True)
class Member:
    """The ranks of a training group on one node."""

    node: str
    ranks: tuple[int, ...]
    state: Literal["waiting", "reading", "training", "ended"] = "waiting"
    plan: m.SessionPlan | None = None
    saved: int = 0  # how many of the group's saves it has made
    busy: set[int] = field(default_factory=set)  # ranks whose arena is not given back yet
    error: CheckpointError | None = None  # that its ranks were told


@dataclass(slots=True)
class Group:
    members: list[Member]
    steps: list[int] = field(default_factory=list)  # that are saved, in order


@dataclass(slots=True)
class Launcher:
    """A driver: it opens group after group until it is done, or the run is somebody else's."""

    name: str
    service: str
    resume: Resume = "auto"
    state: Literal["idle", "asking", "running", "done", "dead"] = "idle"
    group: Group | None = None
    error: CheckpointError | None = None
    dead_owner: str = ""
    finished: bool = False


# -- what is under way -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Order:
    """A coordinator's call to an agent."""

    node: str
    event: n.NodeEvent
    sender: str
    answer: tuple[Any, ...] = ()  # what the sender waits for: ("start", tokens) or ("delete", attempt)


@dataclass(frozen=True, slots=True)
class Report:
    """An agent's call to the coordinator of its service, by name."""

    service: str
    event: m.Event
    token: m.Token = ""  # set if it waits for a reply


@dataclass(frozen=True, slots=True)
class Answer:
    """To one coordinator process; void if that is gone."""

    coordinator: str
    events: tuple[m.Event, ...]


@dataclass(frozen=True, slots=True)
class Create:
    """A record on its way to the store. Nobody waits for it any more once it is late."""

    coordinator: str
    record: LogRecord
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """An effect that a coordinator's shell carries out outside of the machine."""

    coordinator: str
    effect: m.Effect


@dataclass(frozen=True, slots=True)
class Local:
    """Work of one agent process on its node, or a word of the node's ranks to it."""

    node: str
    agent: int
    work: n.NodeEvent | n.WriteShard | n.WriteFragment | n.SendCopy | n.DeleteFolder


@dataclass(frozen=True, slots=True)
class Told:
    """A reply to whoever waits under this token."""

    token: m.Token
    value: object
    error: CheckpointError | None


Message: TypeAlias = Order | Report | Answer | Create | Work | Local | Told
NETWORK = (Order, Report, Work)  # may be lost and doubled


def _file(attempt: AttemptId, name: str) -> FileEntry:
    return FileEntry(name=name, size_bytes=FILE_BYTES, digest=digest(f"{attempt.attempt}/{name}".encode()))


class World:
    """See the module."""

    def __init__(
        self,
        options: RunOptions,
        clusters: Mapping[str, int],
        *,
        ranks_per_node: int = 1,
        disk_bytes: int = DISK_BYTES,
    ) -> None:
        self.options = options
        self.ranks_per_node = ranks_per_node
        self.disk_bytes = disk_bytes
        self.now_s = 0.0
        self.clock = 0  # events so far
        self.storage = Storage()
        self.oracle = Oracle()
        self.nodes: dict[str, Node] = {}
        self.coordinators: dict[str, Coordinator] = {}
        self.current: dict[str, str] = {}  # service -> the coordinator that its name leads to
        self.launchers: dict[str, Launcher] = {}
        self.wire: list[Message] = []
        self.waiting: dict[m.Token, tuple[str, Launcher | Member]] = {}  # with the coordinator that was asked
        self.num_tokens = 0
        self.num_agents = 0
        for service, size in clusters.items():
            for _ in range(size):
                self.join(service)

    # -- what can happen: messages ---------------------------------------------------------------------

    def deliver(self, index: int, fate: Fate = "heard", *, twice: bool = False) -> None:
        """Carry out a message of the wire; `twice`: it stays, and comes again."""
        message = self.wire[index] if twice else self.wire.pop(index)
        self.clock += 1
        match message:
            case Order():
                self._order(message, fate)
            case Report():
                self._report(message, fate)
            case Answer(coordinator=name, events=events):
                self._tell(name, *events)
            case Create():
                self._create(message, fate)
            case Work(coordinator=name, effect=effect):
                self._work(name, effect, fate)
            case Local():
                self._local(message, fate)
            case Told():
                self._told(message)
        self.oracle.check(self)

    def can_deliver(self, message: Message) -> bool:
        """A frozen process hears nothing, and what only it can do is not done."""
        match message:
            case Answer(coordinator=name):
                return not self.coordinators[name].is_frozen
            case Report(service=service):
                process = self.coordinators.get(self.current.get(service, ""))
                return process is None or not process.is_frozen
            case Create(is_late=False):
                return True
            case _:
                return True

    # -- what can happen: time and coordinators --------------------------------------------------------

    def wait(self, seconds: float) -> None:
        self.clock += 1
        self.now_s += seconds

    def tick(self, name: str) -> None:
        """A coordinator looks at the clock and at its nodes."""
        self.clock += 1
        process = self.coordinators[name]
        live = self._live(process.service)
        if process.opened:
            seen = frozenset(live) & process.opened
            self._tell(name, self._seen(seen))
            for node in sorted(live - process.opened):
                self._open_later(process, node)
        else:
            self._tell(name)
        self.oracle.check(self)

    def start_coordinator(self, service: str) -> None:
        """Ray starts a process under the service's name again; it looks for agents with open runs."""
        self.clock += 1
        agents = [a for node in sorted(self._live(service)) if (a := self.nodes[node].agent) is not None]
        plans = [a.machine.plan for a in agents if a.machine.plan is not None]
        if not agents:
            self.current.pop(service, None)
        elif not self.storage.is_away:
            process = self._open_log(service, owner=None)
            if process is None:
                self._supersede(service, plans)
            else:
                process.takes_over = True
        self.oracle.check(self)

    def take_over(self, name: str, absent: frozenset[str] = frozenset()) -> None:
        """An opened coordinator finds the group that an earlier one left; `absent` agents do not answer."""
        self.clock += 1
        process = self.coordinators[name]
        process.takes_over = False
        inventories = self._gather(process, absent)
        plans = [
            plan
            for node in inventories
            if (agent := self.nodes[node].agent) is not None and (plan := agent.machine.plan) is not None
        ]
        if plans and process.is_up:
            plan = max(plans, key=lambda p: (p.epoch, p.session))
            found = m.GroupFound(plan=plan, inventories=inventories)
            self.wire.append(Answer(name, (self._seen(frozenset(inventories)), found)))
            epoch = process.machine.epoch
            for node in sorted(inventories):
                self.wire.append(Order(node, n.CoordinatorReturned(epoch=epoch), name))
        self.oracle.check(self)

    def kill_coordinator(self, name: str) -> None:
        """What it sent stays on its way; who waits for it is told that it is gone."""
        self.clock += 1
        self.coordinators[name].is_up = False
        self._lose_tokens(name, Unavailable("The coordinator died."))
        self.wire = [
            Create(w.coordinator, w.record, is_late=True)
            if isinstance(w, Create) and w.coordinator == name
            else w
            for w in self.wire
            if not (isinstance(w, Answer) and w.coordinator == name)
        ]

    def freeze(self, name: str) -> None:
        self.clock += 1
        self.coordinators[name].is_frozen = True

    def thaw(self, name: str) -> None:
        self.clock += 1
        self.coordinators[name].is_frozen = False

    def set_clock(self, name: str, wall_skew_s: float) -> None:
        self.clock += 1
        self.coordinators[name].wall_skew_s = wall_skew_s

    # -- what can happen: nodes ------------------------------------------------------------------------

    def join(self, service: str, disk: Disk | None = None) -> Node:
        """A machine comes; its node id is new, its disk may be one of before."""
        self.clock += 1
        name = f"{service}-{len(self.nodes)}"
        domain = f"rack-{len(self.nodes) % 2}"
        node = Node(name, service, disk or Disk(f"disk-{name}"), domain, since=self.clock)
        self.nodes[name] = node
        return node

    def lose_node(self, name: str, *, disk: Literal["destroyed", "kept"]) -> None:
        """A machine goes, for good or until its disk comes back."""
        self.clock += 1
        node = self.nodes[name]
        node.is_alive, node.agent = False, None
        if disk == "destroyed":
            node.disk.destroy()
            self.oracle.destroyed(node.disk)
        for member in self._members(name):
            member.state = "ended"
        self._lose_local(name)
        self.oracle.check(self)

    def return_disk(self, name: str) -> None:
        """The machine of a node that was away comes back, as another node."""
        self.join(self.nodes[name].service, self.nodes[name].disk)

    def crash_agent(self, name: str) -> None:
        self.clock += 1
        self.nodes[name].agent = None
        self._lose_local(name)
        for member in self._members(name):
            member.busy = set()

    def revive(self, name: str) -> None:
        """A rank has found that its agent is gone."""
        self.clock += 1
        process = self._process(self.nodes[name].service)
        if process is not None:
            self._open_later(process, name)

    def rot(self, name: str, copy: Copy) -> None:
        """Bytes of a copy go bad."""
        self.clock += 1
        disk = self.nodes[name].disk
        disk.rotten.add(copy)
        self.oracle.rotted(disk, copy)

    # -- what can happen: launchers and ranks ----------------------------------------------------------

    def launch(self, name: str, size: int, absent: frozenset[str] = frozenset()) -> None:
        """A launcher takes its next step towards a new group of `size` nodes; its old ranks have ended."""
        self.clock += 1
        launcher = self.launchers[name]
        self._end_group(launcher)
        launcher.state = "idle"
        process = self._process(launcher.service)
        if process is None or not process.is_up:
            if not self.storage.is_away:
                try:
                    self._open_log(launcher.service, owner=name, raises=True)
                except RunSuperseded as error:
                    self._give_up(launcher, error)
        elif process.machine.is_open and not process.is_frozen:
            self._open_group(process, launcher, size, absent)
        self.oracle.check(self)

    def kill_launcher(self, name: str) -> None:
        self.clock += 1
        self._end_group(self.launchers[name])
        self.launchers[name].state = "dead"

    def kill_ranks(self, name: str) -> None:
        """A worker dies; the group ends, its launcher lives."""
        self.clock += 1
        self._end_group(self.launchers[name])
        self.launchers[name].state = "idle"

    def read_state(self, member: Member, owner: str) -> None:
        """The ranks of a node read what their agent says, and report."""
        self.clock += 1
        agent = self.nodes[member.node].agent
        plan = agent.machine.plan if agent is not None else None
        if plan is None or plan.owner != owner or plan == member.plan:
            return
        member.plan, member.state = plan, "reading"
        self.oracle.restores(plan)
        damage = tuple(self._damage(plan, member.node))
        self.oracle.read(plan, damage)
        token = self._token()
        ranks = tuple(RankRestore(rank=k, damage=damage) for k in member.ranks)
        event = m.NodeRestored(token=token, session=plan.session, node_id=member.node, ranks=ranks)
        self.waiting[token] = ("", member)
        self.wire.append(Report(self.nodes[member.node].service, event, token))

    def save(self, group: Group, member: Member, gap: int) -> None:
        """The ranks of a node capture the group's next save; the first of them names the step."""
        self.clock += 1
        agent = self.nodes[member.node].agent
        assert member.plan is not None
        if member.saved == len(group.steps):
            last = group.steps[-1] if group.steps else _resumed_step(member.plan)
            group.steps.append(last + gap)
        step = group.steps[member.saved]
        member.saved += 1
        attempt = make_attempt(
            run_uid=member.plan.run_uid,
            session=member.plan.session,
            step=step,
            attempt=0,
            epoch=member.plan.epoch,
        )
        self.oracle.saves(attempt, member.plan)
        for rank in member.ranks if agent is not None else ():
            assert agent is not None
            event: n.NodeEvent = n.ShardSealed(
                attempt=attempt, rank=rank, replicated="same", metrics={"loss": 1.0} if rank == 0 else None
            )
            if rank in member.busy:
                event = n.SaveFailed(attempt=attempt, rank=rank, reason="busy")
            member.busy.add(rank)
            self.wire.append(Local(member.node, agent.number, event))

    def finish(self, name: str, *, ends_group: bool = False) -> None:
        """A launcher wants the last checkpoint on the storage path, perhaps because its training is over."""
        self.clock += 1
        launcher = self.launchers[name]
        process = self._process(launcher.service)
        if process is not None and not process.is_frozen:
            token = self._token()
            self.waiting[token] = (process.name, launcher)
            asked = m.FinishAsked(token=token, ends_group=ends_group)
            self.wire.append(Answer(process.name, (asked,)))
        if ends_group:
            self._end_group(launcher)
            launcher.state = "done"

    def trim_log(self) -> None:
        """Somebody writes a snapshot of the log; what the one before covers goes a day later."""
        self.clock += 1
        if self.oracle.history.next_seq:
            wall_s = START_S + self.now_s
            write_snapshot(self.storage.log, self.oracle.history.to_snapshot(wall_s))
            trim_log(self.storage.log, wall_s + TRIM_AFTER_S + 1.0)
        self.oracle.check_log(self)

    def members(self) -> Iterator[tuple[Launcher, Group, Member]]:
        for launcher in self.launchers.values():
            if launcher.group is not None:
                for member in launcher.group.members:
                    yield launcher, launcher.group, member

    def can_save(self, group: Group, member: Member) -> bool:
        slowest = min(other.saved for other in group.members)
        return member.state == "training" and member.saved <= slowest + MAX_AHEAD - 1

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
        for effect in process.machine.handle(event):
            self._do(process, effect)

    def _do(self, process: Coordinator, effect: m.Effect) -> None:
        name, epoch = process.name, process.machine.epoch
        match effect:
            case m.Append(record=record):
                process.waits_since_s = self.now_s if process.waits_since_s is None else process.waits_since_s
                self.wire.append(Create(name, record))
            case m.StartSession(tokens=tokens, plan=plan):
                process.starting[tokens] = {node.node_id for node in plan.nodes}
                self.oracle.begun(plan, store_is_silent=self._is_silent(process))
                for node in plan.nodes:
                    self._send_plan(process, node.node_id, plan, ("start", tokens, plan))
            case m.Reply(token=token, value=value):
                self.wire.append(Told(token, value, None))
            case m.Fail(token=token, error=failure):
                self.wire.append(Told(token, None, failure))
            case m.Publish(attempt=attempt, level=level, error=failed, nodes=nodes):
                told = n.Published(attempt=attempt, level=level, error=failed, epoch=effect.epoch)
                self.wire += [Order(node_told, told, name) for node_told in nodes]
            case m.Replicate(attempt=attempt, node_index=index, source=source, holder=holder):
                copy = n.CopyOrdered(attempt=attempt, node_index=index, holder=holder, epoch=epoch)
                self.wire.append(Order(source, copy, name))
            case m.Delete(attempt=gone, directory=directory, place=place) if place != m.REMOTE:
                order = n.DeleteOrdered(directories=(directory,), epoch=epoch)
                self.wire.append(Order(place, order, name, ("delete", gone)))
            case m.DeleteStrays(node_id=place, directories=directories):
                self.wire.append(Order(place, n.DeleteOrdered(directories=directories, epoch=epoch), name))
            case m.Evict(attempt=attempt, node_id=place):
                order = n.DeleteOrdered(directories=(attempt.directory,), epoch=epoch)
                self.wire.append(Order(place, order, name))
            case m.Supersede(nodes=nodes, session=session, error=failure):
                ended = n.SessionEnded(session=session, error=failure, epoch=epoch)
                self.wire += [Order(node_told, ended, name) for node_told in nodes]
            case m.StepDown(error=failure):
                self._step_down(process, failure)
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
                self.wire.append(Told(token, None, error))

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
        self.coordinators[name] = process = Coordinator(name, service, machine, *skews)
        self.current[service] = name
        self._tell(name, self.storage.opened(run_name=RUN, fresh_uid=RUN_UID))
        return process

    def _process(self, service: str) -> Coordinator | None:
        process = self.coordinators.get(self.current.get(service, ""))
        return process if process is not None and process.is_up else None

    def _supersede(self, service: str, plans: Iterable[m.SessionPlan]) -> None:
        """A restarted coordinator finds that the run is another service's: its ranks must stop."""
        history = self.oracle.history
        error = RunSuperseded("The run was taken over by another service.")
        for plan in plans:
            for node in plan.nodes:
                ended = n.SessionEnded(session=plan.session, error=error, epoch=history.epoch)
                self.wire.append(Order(node.node_id, ended, ""))
        self.current.pop(service, None)

    def _gather(self, process: Coordinator, absent: frozenset[str]) -> dict[str, m.Inventory]:
        """Open the run on all live nodes but those that do not answer; what they hold."""
        inventories = {}
        for node in sorted(self._live(process.service) - absent):
            if not process.is_up:
                break
            if (inventory := self._open_on(process, node)) is not None:
                inventories[node] = inventory
        process.opened = set(inventories)
        return inventories

    def _open_on(self, process: Coordinator, name: str) -> m.Inventory | None:
        """Start the node's agent if there is none, tell it the epoch, take inventory."""
        node = self.nodes[name]
        if node.agent is None:
            self.num_agents += 1
            node.agent = Agent(self.num_agents, n.NodeMachine(epoch=node.disk.epoch))
        agent = node.agent
        if not self._agent_does(name, n.EpochSeen(epoch=process.machine.epoch), process.name):
            return None
        leaving = frozenset(held[0] for held in node.disk.fragments if agent.machine.is_deleted(held[0]))
        return node.disk.inventory(leaving=leaving)

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
                m.GroupNode(node_id=node, ranks=tuple(range(i * width, (i + 1) * width)))
                for i, node in enumerate(nodes)
            ),
            inventories=inventories,
            resume=launcher.resume,
            owner=launcher.name,
            dead_owner=launcher.dead_owner,
        )
        launcher.state, launcher.error = "asking", None
        self.waiting[token] = (process.name, launcher)
        self.oracle.group_opened(process.name, event, self)
        self.wire.append(Answer(process.name, (self._seen(frozenset(inventories)), event)))

    def _send_plan(
        self, process: Coordinator, node: str, plan: m.SessionPlan, answer: tuple[Any, ...]
    ) -> None:
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

    def _live(self, service: str) -> set[str]:
        return {node.name for node in self.nodes.values() if node.is_alive and node.service == service}

    # -- delivery ------------------------------------------------------------------------------------

    def _order(self, message: Order, fate: Fate) -> None:
        node = self.nodes[message.node]
        reached = fate != "lost" and node.is_alive
        if reached and message.answer == ("open",):
            self._opened_late(message)
        elif reached and node.agent is not None:
            reached = self._agent_does(message.node, message.event, message.sender)
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

    def _opened_late(self, message: Order) -> None:
        """A node that joined, or that has a new agent, gets the session at work."""
        process = self.coordinators[message.sender]
        if not process.is_up or self._open_on(process, message.node) is None:
            return
        process.opened.add(message.node)
        plan = process.machine.plan
        if plan is not None and message.node in {node.node_id for node in plan.nodes}:
            self._send_plan(process, message.node, plan, ())

    def _started(
        self, process: Coordinator, tokens: tuple[str, ...], plan: m.SessionPlan, node: str, is_told: bool
    ) -> None:
        """All nodes have the plan: its tokens get it. One has not: they get an error."""
        missing = process.starting.get(tokens)
        if missing is None:
            return
        missing.discard(node)
        if is_told and missing:
            return
        del process.starting[tokens]
        error = None if is_told else Unavailable(f"A node did not take session {plan.session}.")
        self.wire += [Told(token, plan if error is None else None, error) for token in tokens]

    def _report(self, message: Report, fate: Fate) -> None:
        process = self._process(message.service)
        if process is None or fate == "lost":
            if message.token:
                self.wire.append(Told(message.token, None, Unavailable("The coordinator did not answer.")))
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
            case m.AskInventory(token=token):
                self.now_s += 1  # as long as it takes to ask
                process = self.coordinators[name]
                inventories = self._gather(process, frozenset()) if process.is_up else {}
                seen = self._seen(frozenset(inventories))
                self.wire.append(Answer(name, (seen, m.InventoryTaken(token=token, inventories=inventories))))
                return
            case m.Drain(attempt=attempt, node_index=index, node_id=node):
                if done and not self._upload(node, attempt.attempt, index):
                    error = "not here"
                answer = m.DrainEnded(attempt=attempt, node_index=index, node_id=node, error=error)
            case m.WriteDescription(checkpoint=checkpoint):
                whole = set(range(checkpoint.num_nodes))
                if self.storage.fragments.get(checkpoint.id.attempt) != whole:
                    error = "a fragment is missing"
                elif done:
                    self.storage.described.add(checkpoint.id.attempt)
                answer = m.DescriptionWritten(attempt=checkpoint.id, error=error)
            case m.Delete(attempt=gone):
                if done:
                    self.oracle.deletes_remote(gone)
                    self.storage.delete(gone)
                answer = m.DeleteEnded(attempt=gone, place=m.REMOTE, error=error)
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

    def _upload(self, name: str, attempt: str, index: int) -> bool:
        node = self.nodes[name]
        if node.agent is None or not node.disk.has((attempt, index)) or (attempt, index) in node.disk.rotten:
            return False
        self.storage.fragments.setdefault(attempt, set()).add(index)
        return True

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

    # -- the agent's shell -----------------------------------------------------------------------------

    def _agent_does(self, name: str, event: n.NodeEvent, sender: str = "") -> bool:
        """False if the agent has heard of a higher epoch."""
        agent = self.nodes[name].agent
        assert agent is not None
        taken = True
        for effect in agent.machine.handle(event):
            if isinstance(effect, n.RefuseOrder):
                taken = False
                if sender in self.coordinators:
                    self._tell(sender, m.OrderRefused(epoch=effect.epoch))
            else:
                self._node_does(name, agent, effect)
        return taken

    def _node_does(self, name: str, agent: Agent, effect: n.NodeEffect) -> None:
        node = self.nodes[name]
        service = node.service
        match effect:
            case n.PersistEpoch(epoch=epoch):
                node.disk.epoch = max(node.disk.epoch, epoch)
            case n.WriteShard(attempt=attempt, rank=rank):
                file = self._shard(agent, rank)
                if file:
                    node.disk.write(attempt.directory)
                    self.wire.append(Local(name, agent.number, effect))
            case n.WriteFragment() | n.SendCopy() | n.DeleteFolder():
                self.wire.append(Local(name, agent.number, effect))
            case n.TellStored():
                stored = m.NodeStored(
                    attempt=effect.attempt,
                    node_index=effect.node_index,
                    node_id=name,
                    files=effect.files,
                    replicated=effect.replicated,
                    metrics=effect.metrics,
                )
                self.wire.append(Report(service, stored))
            case n.TellRefused(attempt=attempt, ranks=ranks, reason=reason):
                refused = m.SaveRefused(attempt=attempt, ranks=ranks, reason=reason)
                self.wire.append(Report(service, refused))
            case n.Release(rank=rank):
                for member in self._members(name):
                    member.busy.discard(rank)
            case n.Settle(attempt=attempt, level=level, error=error):
                self.oracle.settled(attempt, level)
                if isinstance(error, RunSuperseded):
                    self._end_members(name, attempt.session)
            case n.EndSession(session=session):
                self._end_members(name, session)

    def _end_members(self, name: str, session: int) -> None:
        for member in self._members(name):
            if member.plan is not None and member.plan.session <= session:
                member.state = "ended"

    def _shard(self, agent: Agent, rank: int) -> str:
        plan = agent.machine.plan
        return shard_file(rank, plan.world_size) if plan is not None else ""

    def _local(self, message: Local, fate: Fate) -> None:
        """lost: the disk or the peer failed."""
        node = self.nodes[message.node]
        agent = node.agent
        if agent is None or agent.number != message.agent:
            return
        match message.work:
            case n.WriteShard(attempt=attempt, rank=rank):
                if fate == "lost":
                    self._agent_does(node.name, n.SaveFailed(attempt=attempt, rank=rank, reason="disk full"))
                    return
                file = self._shard(agent, rank)
                node.disk.write(attempt.directory, file)
                files = (_file(attempt, file),)
                self._agent_does(node.name, n.ShardWritten(attempt=attempt, rank=rank, files=files, rows=()))
            case n.WriteFragment(fragment=fragment):
                held = fragment_on_disk(fragment)
                node.disk.put(held)
                self._arrived(node, (held.attempt.attempt, held.node_index))
                self._agent_does(node.name, n.FragmentWritten(attempt=held.attempt, entry=held.files[-1]))
            case n.SendCopy(attempt=attempt, node_index=index, holder=holder):
                error = self._send_copy(node, (attempt.attempt, index), holder, fate)
                ended = m.ReplicaEnded(attempt=attempt, node_index=index, holder=holder, error=error)
                self.wire.append(Report(node.service, ended))
            case n.DeleteFolder(directory=directory):
                self.oracle.deletes(node.disk, directory, self.storage)
                node.disk.delete(directory)
            case event:
                self._agent_does(node.name, event)

    def _send_copy(self, source: Node, copy: Copy, name: str, fate: Fate) -> str | None:
        """To the other node's disk, the fragment last; what is cut off leaves the other files there."""
        holder = self.nodes[name]
        held = source.disk.fragments.get(copy)
        if held is None or not source.disk.has(copy) or copy in source.disk.rotten:
            return "not here"
        if not holder.is_alive or holder.agent is None:
            return "the peer does not answer"
        holder.disk.write(held.attempt.directory, *(file.name for file in held.files[:-1]))
        if fate == "lost":
            return "the peer went away"
        holder.disk.put(held)
        self._arrived(holder, copy)
        return None if fate == "heard" else "the peer did not answer"

    def _arrived(self, node: Node, copy: Copy) -> None:
        if node.disk.has_intact(copy):
            node.disk.since[copy] = self.clock
            self.oracle.stored(node.disk, copy)

    def _lose_local(self, name: str) -> None:
        self.wire = [w for w in self.wire if not (isinstance(w, Local) and w.node == name)]

    # -- ranks and launchers ---------------------------------------------------------------------------

    def _damage(self, plan: m.SessionPlan, reader: str) -> Iterator[str]:
        """Fragments of which the ranks find no intact source."""
        if plan.resume is None or self.storage.holds(plan.resume.checkpoint):
            return
        attempt = plan.resume.checkpoint.id.attempt
        for index, holders in enumerate(plan.resume.holders):
            sources = [self.nodes[name] for name in {*holders, reader}]
            if not any(
                s.is_alive and s.agent is not None and s.disk.has_intact((attempt, index)) for s in sources
            ):
                yield f"fragment {index}"

    def _told(self, message: Told) -> None:
        asked = self.waiting.pop(message.token, None)
        match asked:
            case (_, Launcher() as launcher) if launcher.state != "dead":
                self._launcher_told(launcher, message)
            case (_, Member() as member) if member.state != "ended":
                self._member_told(member, message)

    def _launcher_told(self, launcher: Launcher, message: Told) -> None:
        if isinstance(message.error, RunInUse):
            self._refused(launcher, message.error)
        elif isinstance(message.error, RunSuperseded) and launcher.state == "asking":
            self._give_up(launcher, message.error)
        elif message.error is not None:
            launcher.error = message.error
            if launcher.state == "asking":
                launcher.state = "idle"
        elif isinstance(message.value, m.SessionPlan):
            if launcher.state == "asking":
                members = [Member(node.node_id, node.ranks) for node in message.value.nodes]
                launcher.state, launcher.group, launcher.dead_owner = "running", Group(members), ""
        else:
            launcher.finished = True
            self.oracle.finished(message.value)

    def _refused(self, launcher: Launcher, error: CheckpointError) -> None:
        """Another launcher has the run: wait for it, or name it dead."""
        owner = str(error.fields.get("owner", ""))
        other = self.launchers.get(owner)
        launcher.state, launcher.error = "idle", error
        if other is not None and other.state in ("dead", "done"):
            launcher.dead_owner = owner

    def _member_told(self, member: Member, message: Told) -> None:
        if message.error is not None:
            member.state, member.error = "ended", message.error
        elif isinstance(message.value, m.SessionPlan):
            member.state = "waiting"
        else:
            assert member.plan is not None
            member.state = "training"
            self.oracle.go(member.plan)

    def _give_up(self, launcher: Launcher, error: CheckpointError) -> None:
        self._end_group(launcher)
        launcher.state, launcher.error = "done", error

    def _end_group(self, launcher: Launcher) -> None:
        if launcher.group is not None:
            for member in launcher.group.members:
                member.state = "ended"
        launcher.group = None

    def _members(self, node: str) -> Iterator[Member]:
        for _, _, member in self.members():
            if member.node == node and member.state != "ended":
                yield member

    def _token(self) -> m.Token:
        self.num_tokens += 1
        return f"token-{self.num_tokens}"


def _resumed_step(plan: m.SessionPlan) -> int:
    return plan.resume.checkpoint.step if plan.resume is not None else 0


def fragment_on_disk(fragment: Fragment) -> m.HeldFragment:
    """What an inventory tells of a fragment that has been written."""
    own = _file(fragment.attempt, fragment_file(fragment.node_index, fragment.num_nodes))
    return m.HeldFragment(
        attempt=fragment.attempt,
        node_index=fragment.node_index,
        num_nodes=fragment.num_nodes,
        ranks=fragment.ranks,
        files=(*fragment.files, own),
        replicated=fragment.replicated,
        metrics=fragment.metrics,
    )

