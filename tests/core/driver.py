"""One run machine in one process, without Ray: a memory store under its log, fake nodes around it.

`Harness` carries out appends to the log and nothing else; a story passes it events and asserts the effects.
`Cluster` adds a NodeMachine per node and a wire whose messages the caller delivers in any order, twice, or
not at all. Both have a manual clock and the same disks, which a node's death takes away. Nothing here has a
clock or chance of its own: the caller passes both in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from ray_ckpt.config import Resume, RunOptions
from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.maintenance import RESTART_S
from ray_ckpt.core.node_machine import NodeMachine
from ray_ckpt.core.run_machine import RunMachine
from ray_ckpt.core.values import (
    GroupNode,
    Inventory,
    SessionKey,
    SessionNode,
    SessionPlan,
    StoredFragment,
    StoredParity,
)
from ray_ckpt.errors import FormatError
from ray_ckpt.format import records as r
from ray_ckpt.format.digest import digest
from ray_ckpt.format.names import fragment_file, make_attempt, record_file, shard_file
from ray_ckpt.format.records import encode_record
from ray_ckpt.storage.log_store import CreateResult, MemoryLogStore, read_log
from ray_ckpt.testing.parts import file_entry, fragment_on_disk
from ray_ckpt.testing.stores import FILE_BYTES
from ray_ckpt.types import UNKNOWN_LAUNCH, AttemptId, CheckpointInfo, LaunchTimes, RankRestore, SaveFacts

RUN = "gpt"
SERVICE = "service-1"
RUN_UID = digest(RUN.encode())
START_S = 1_790_000_000.0

MAX_DELIVERIES = 5_000  # before `settle` calls it a loop

T = TypeVar("T")
StoreMode = Literal["ok", "silent", "answers lost", "held"]
"""silent: nothing is written, nothing answered; answers lost: written, not answered; held: see `confirm`."""


def of(effects: Iterable[object], kind: type[T]) -> list[T]:
    return [effect for effect in effects if isinstance(effect, kind)]


def one(effects: Iterable[object], kind: type[T]) -> T:
    (found,) = of(effects, kind)
    return found


def ops(effects: Iterable[object]) -> list[r.Op]:
    """Return the operations of the appends among `effects`."""
    return [effect.record.op for effect in of(effects, m.Append)]


@dataclass(slots=True)
class Disk:
    """A node's staging folder: the fragments that are complete there, and every folder."""

    fragments: dict[tuple[str, int], StoredFragment] = field(default_factory=dict)
    folders: dict[str, str] = field(default_factory=dict)  # attempt -> directory
    parities: list[StoredParity] = field(default_factory=list)

    def put(self, held: StoredFragment) -> None:
        self.fragments[held.attempt.attempt, held.node_index] = held
        self.folders[held.attempt.attempt] = held.attempt.directory

    def delete(self, attempt: str) -> None:
        self.folders.pop(attempt, None)
        self.fragments = {k: held for k, held in self.fragments.items() if k[0] != attempt}

    def inventory(self) -> Inventory:
        return Inventory(
            fragments=tuple(self.fragments.values()),
            directories=tuple(sorted(self.folders.values())),
            parities=tuple(self.parities),
        )


class Harness:
    """A run machine, its log and its nodes' disks. Each method returns the effects, in order."""

    def __init__(
        self,
        nodes: str = "ab",
        *,
        ranks_per_node: int = 1,
        service: str = SERVICE,
        store: MemoryLogStore | None = None,
        **options: Any,
    ) -> None:
        self.options = RunOptions(**{"retire_grace_s": 0.0, "scrub_bytes_per_s": 0, **options})
        self.service = service
        self.store = store or MemoryLogStore()
        self.store_mode: StoreMode = "ok"
        self.ranks_per_node = ranks_per_node
        self.linked_bytes = 0  # of each node's files of a save
        self.now_s = 0.0
        self.disks = {node: Disk() for node in nodes}
        self.live = set(nodes)
        self.held: list[m.Append] = []
        self.transcript: list[m.Effect] = []
        self.num_coordinators = 0
        self.num_groups = 0
        self.start_coordinator()

    # -- the coordinator and its log -----------------------------------------------------------------

    def start_coordinator(self) -> tuple[m.Effect, ...]:
        """Start a new process, which has only the log."""
        self.num_coordinators += 1
        self.machine = RunMachine(
            options=self.options,
            writer=f"coordinator-{self.num_coordinators}-{self.service}",
            service=self.service,
        )
        opened = m.LogOpened(records=read_log(self.store), run_name=RUN, fresh_uid=RUN_UID)
        seen = m.NodesSeen(live=frozenset(self.live))
        return (*self.tick(), *self.feed(opened, seen))

    def feed(self, *events: m.Event) -> tuple[m.Effect, ...]:
        """Handle `events`, and the store's answers to their appends; return the effects."""
        effects: list[m.Effect] = []
        todo = deque(events)
        while todo:
            for effect in self.machine.handle(todo.popleft()):
                effects.append(effect)
                if isinstance(effect, m.Append):
                    todo.extend(self.append(effect))
        self.transcript += effects
        return tuple(effects)

    def append(self, effect: m.Append) -> tuple[m.Appended, ...]:
        seq = effect.record.seq
        if self.store_mode == "held":
            self.held.append(effect)
            return ()
        if self.store_mode == "silent":
            return (m.Appended(seq=seq, outcome="unknown"),)
        outcome = self.store.create(record_file(seq), encode_record(effect.record))
        if self.store_mode == "answers lost":
            return (m.Appended(seq=seq, outcome="unknown"),)
        if outcome is CreateResult.OK:
            return (m.Appended(seq=seq, outcome="ok"),)
        return (m.Appended(seq=seq, outcome="exists", service=self._service_in_log()),)

    def _service_in_log(self) -> str:
        """Return the service of the last epoch; "" if the log cannot be read."""
        try:
            return [op.service for op in self.records if isinstance(op, r.Epoch)][-1]
        except FormatError:
            return ""

    def confirm(self, *, hold_next: bool = False) -> tuple[m.Effect, ...]:
        """Carry out the held appends; what follows from them is held again or carried out."""
        self.store_mode = "ok"
        held, self.held = self.held, []
        answers = [answer for effect in held for answer in self.append(effect)]
        self.store_mode = "held" if hold_next else "ok"
        return self.feed(*answers)

    def tick(self, seconds: float = 0.0) -> tuple[m.Effect, ...]:
        self.now_s += seconds
        return self.feed(self.ticked)

    @property
    def ticked(self) -> m.Ticked:
        return m.Ticked(now_s=self.now_s, wall_s=START_S + self.now_s)

    @property
    def records(self) -> list[r.Op]:
        """The operations in the log."""
        return [record.op for record, _ in read_log(self.store)]

    def checkpoint(self, attempt: AttemptId) -> CheckpointInfo:
        return self.machine.history.checkpoints[attempt.attempt]

    # -- groups --------------------------------------------------------------------------------------

    def group(
        self,
        nodes: str,
        *,
        token: str = "",
        resume: Resume = "auto",
        owner: str = "driver",
        dead_owner: str = "",
        launch: LaunchTimes = UNKNOWN_LAUNCH,
    ) -> m.GroupOpened:
        """Return the event of a group on `nodes`, with what the live nodes hold now."""
        if not token:
            self.num_groups += 1
            token = f"group-{self.num_groups}"
        width = self.ranks_per_node
        return m.GroupOpened(
            token=token,
            nodes=tuple(
                GroupNode(node_id=node, ranks=tuple(range(i * width, (i + 1) * width)))
                for i, node in enumerate(nodes)
            ),
            inventories=self.inventories(),
            resume=resume,
            owner=owner,
            dead_owner=dead_owner,
            launch=launch,
        )

    def inventory(self, token: str) -> m.InventoryTaken:
        """Return the answer to RequestInventory."""
        return m.InventoryTaken(token=token, inventories=self.inventories())

    def inventories(self) -> dict[str, Inventory]:
        return {node: self.disks[node].inventory() for node in sorted(self.live)}

    def restored(
        self,
        node: str,
        *,
        session_key: SessionKey | None = None,
        damage: Sequence[str] = (),
        is_unreachable: bool = False,
        bad_nodes: Sequence[str] = (),
    ) -> m.NodeRestored:
        """Return the event that all ranks of `node` have restored, with the token `restored-<node>`."""
        report = RankRestore(
            rank=0, damage=tuple(damage), is_unreachable=is_unreachable, bad_nodes=tuple(bad_nodes)
        )
        plan = self.plan
        here = next((p for p in plan.nodes if p.node_id == node), None)
        ranks = here.ranks if here else ()
        return m.NodeRestored(
            token=f"restored-{node}",
            session_key=session_key or plan.session_key,
            node_id=node,
            ranks=tuple(replace(report, rank=rank) for rank in ranks),
        )

    def open(self, nodes: str = "ab", *, resume: Resume = "auto") -> tuple[m.Effect, ...]:
        """Open a group on `nodes`, which restores without damage and trains."""
        effects = self.feed(self.group(nodes, resume=resume))
        return (*effects, *self.feed(*(self.restored(node) for node in nodes)))

    @property
    def plan(self) -> SessionPlan:
        assert self.machine.plan is not None
        return self.machine.plan

    def lose(self, *nodes: str) -> tuple[m.Effect, ...]:
        """Nodes die, and their disks with them."""
        for node in nodes:
            self.live.discard(node)
            self.disks[node] = Disk()
        return self.feed(m.NodesSeen(live=frozenset(self.live)))

    def lose_long_ago(self, *nodes: str) -> tuple[m.Effect, ...]:
        """As `lose`; then so much time passes that repair no longer waits for a group."""
        seconds = int(RESTART_S)  # one by one: the upkeep is as slow as the ticks
        return (*self.lose(*nodes), *(effect for _ in range(seconds) for effect in self.tick(1.0)))

    # -- saves, as events ------------------------------------------------------------------------------

    def attempt(self, step: int, *, number: int = 0) -> AttemptId:
        return make_attempt(
            run_uid=RUN_UID, epoch=self.plan.epoch, session=self.plan.session, step=step, attempt=number
        )

    def stored(self, attempt: AttemptId, node: str, *, replicated: Sequence[str] = ("same",)) -> m.NodeStored:
        here = next(p for p in self.plan.nodes if p.node_id == node)
        held = self._held(attempt, here)
        self.disks[node].put(held)
        return m.NodeStored(
            attempt=attempt,
            node_index=here.node_index,
            node_id=node,
            fragment=held.fragment,
            size_bytes=held.size_bytes,
            replicated=tuple(replicated),
            metrics={"loss": 1.0 / attempt.step} if 0 in here.ranks else None,
            facts=SaveFacts(shared_bytes=self.linked_bytes),
        )

    def _held(self, attempt: AttemptId, node: SessionNode) -> StoredFragment:
        num = len(self.plan.nodes)
        return StoredFragment(
            attempt=attempt,
            node_index=node.node_index,
            num_nodes=num,
            fragment=file_entry(attempt, fragment_file(node.node_index, num)),
            size_bytes=FILE_BYTES * (1 + len(node.ranks)),
            ranks=node.ranks,
            replicated=("same",),
            metrics={"loss": 1.0 / attempt.step} if 0 in node.ranks else None,
        )

    def copied(
        self, attempt: AttemptId, node: str, holder: str, *, error: str | None = None, reached: bool = True
    ) -> m.ReplicaEnded:
        """Return the event of the copy of `node`'s fragment to `holder`."""
        here = next(p for p in self.plan.nodes if p.node_id == node)
        sent = self._held(attempt, here) if error is None and reached else None
        if sent is not None:
            self.disks[holder].put(sent)
        return m.ReplicaEnded(
            attempt=attempt,
            node_index=here.node_index,
            holder=holder,
            source=node,
            error=error if reached else "no sign of life",
            fragment=None if sent is None else sent.fragment,
            is_unreachable=not reached,
        )

    def save(self, step: int, *, copies: bool = True) -> tuple[m.Effect, ...]:
        """Store the checkpoint of `step` on every node, and let every planned copy arrive."""
        attempt = self.attempt(step)
        events: list[m.Event] = [self.stored(attempt, p.node_id) for p in self.plan.nodes]
        if copies:
            events += [self.copied(attempt, p.node_id, h) for p in self.plan.nodes for h in p.holders]
        return self.feed(*events)

    def drained(
        self, drain: m.Drain, *, error: str | None = None, is_damage: bool = False
    ) -> tuple[m.Effect, ...]:
        return self.feed(
            m.DrainEnded(
                attempt=drain.attempt,
                node_index=drain.node_index,
                node_id=drain.node_id,
                error=error,
                is_damage=is_damage,
            )
        )

    def drain_all(self, effects: Iterable[object]) -> tuple[m.Effect, ...]:
        """Carry out every Drain among `effects` and, when it comes to that, the description."""
        reported = [e for drain in of(effects, m.Drain) for e in self.drained(drain)]
        for write in of(reported, m.WriteDescription):
            reported += self.feed(m.DescriptionWritten(attempt=write.checkpoint.id, error=None))
        return tuple(reported)


# -- with node machines ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToCoordinator:
    event: m.Event


@dataclass(frozen=True, slots=True)
class ToNode:
    node: str
    event: n.NodeEvent


@dataclass(frozen=True, slots=True)
class Do:
    """An effect of the run machine that is yet to be carried out."""

    effect: m.Effect


Message = ToCoordinator | ToNode | Do


class Cluster(Harness):
    """Nodes that save, copy, drain, delete and restore. Messages lie in `wire` until they are delivered.

    `generations` counts the deaths of each node. A rank restores as soon as its node has the session.
    """

    def __init__(self, nodes: str = "ab", *, ranks_per_node: int = 1, **options: Any) -> None:
        self.wire: list[Message] = []
        self.machines = {node: NodeMachine() for node in nodes}
        self.remote: dict[str, set[int]] = {}
        self.described: set[str] = set()
        self.settled: list[tuple[str, n.ResolveSave]] = []
        self.failed_tokens: dict[str, Exception] = {}
        self.replies: dict[str, object] = {}
        self.stepped_down = False
        self.generations = dict.fromkeys(nodes, 0)
        self.drain_error: Callable[[m.Drain], str | None] = lambda _: None
        self.copy_error: Callable[[str], str | None] = lambda _: None  # by holder
        super().__init__(nodes, ranks_per_node=ranks_per_node, **options)

    def feed(self, *events: m.Event) -> tuple[m.Effect, ...]:
        """Handle events as an actor does: the effects of each event go out in order."""
        effects: list[m.Effect] = []
        for event in events:
            effects += self.machine.handle(event)
        self.transcript += effects
        self.wire += [Do(effect) for effect in effects]
        return tuple(effects)

    def start_coordinator(self) -> tuple[m.Effect, ...]:
        """Start another process: unsent effects are lost, and sent ones arrive before new ones."""
        sent, self.wire = [message for message in self.wire if isinstance(message, ToNode)], []
        for message in sent:
            self.deliver(message)
        self.wire = [message for message in self.wire if isinstance(message, ToNode)]
        return super().start_coordinator()

    def find_group(self) -> None:
        """Let a restarted coordinator find the group at work, and report to the nodes that it is back."""
        plans = [p for node in sorted(self.live) if (p := self.machines[node].plan) is not None]
        if plans:
            plan = max(plans, key=lambda p: p.session_key)
            self.wire.append(ToCoordinator(m.GroupRecovered(plan=plan, inventories=self.inventories())))
            self.wire += [
                ToNode(node, n.CoordinatorReturned(epoch=self.machine.epoch)) for node in sorted(self.live)
            ]

    def settle(self) -> None:
        """Deliver everything in the order in which it was sent."""
        for _ in range(MAX_DELIVERIES):
            if not self.wire:
                return
            self.deliver(self.wire.pop(0))
        raise AssertionError(f"the cluster does not come to rest: {self.wire[:5]}")

    def capture(self, step: int, *, number: int = 0) -> AttemptId:
        """Let every rank of the session capture `step`."""
        attempt = self.attempt(step, number=number)
        for node in self.plan.nodes:
            if node.node_id in self.live:
                for rank in node.ranks:
                    self.wire.append(ToNode(node.node_id, self._sealed(attempt, rank)))
        return attempt

    def lose(self, *nodes: str) -> tuple[m.Effect, ...]:
        for node in nodes:
            self.machines[node] = NodeMachine()
            self.generations[node] += 1
        self.wire = [w for w in self.wire if not (isinstance(w, ToNode) and w.node in nodes)]
        return super().lose(*nodes)

    def join(self, node: str) -> None:
        """Add a node, with a new id as in Ray. The coordinator finds the node at its next look."""
        self.disks[node], self.machines[node], self.generations[node] = Disk(), NodeMachine(), 0
        self.live.add(node)

    def deliver(self, message: Message) -> None:
        match message:
            case ToCoordinator(event=event):
                self.feed(event)
            case ToNode(node=node, event=node_event):
                if node in self.live:
                    machine = self.machines[node]
                    if isinstance(node_event, n.Order):
                        machine.handle(n.EpochPersisted(epoch=node_event.epoch))
                    for effect in machine.handle(node_event):
                        self._node_does(node, effect)
                    if isinstance(node_event, n.SessionStarted):
                        self.wire.append(ToCoordinator(self._restore(node_event.plan, node)))
            case Do(effect=effect):
                self._do(effect)

    # -- the coordinator's effects ---------------------------------------------------------------------

    def _do(self, effect: m.Effect) -> None:
        match effect:
            case m.Append():
                self.wire += [ToCoordinator(answer) for answer in self.append(effect)]
            case m.RequestInventory(token=token):
                self.now_s += 1  # the duration of the requests
                self.wire += [ToCoordinator(self.ticked), ToCoordinator(self.inventory(token))]
            case m.StartSession(plan=plan):
                for node in plan.nodes:
                    started = n.SessionStarted(plan=plan, node_id=node.node_id, epoch=self.machine.epoch)
                    self.wire.append(ToNode(node.node_id, started))
            case m.Reply(token=token, value=value):
                self.replies[token] = value
            case m.Fail(token=token, error=failure):
                self.failed_tokens[token] = failure
            case m.NotifyOutcome(attempt=attempt, level=level, error=error, nodes=notified, epoch=epoch):
                published = n.OutcomeNotified(attempt=attempt, level=level, error=error, epoch=epoch)
                self.wire += [ToNode(node, published) for node in notified]
            case m.Replicate(attempt=attempt, node_index=index, source=source, holder=holder):
                self._copy(source, attempt, index, holder)
            case m.Drain():
                self._drain(effect)
            case m.WriteDescription(checkpoint=checkpoint):
                whole = self.remote.get(checkpoint.id.attempt, set()) == set(range(checkpoint.num_nodes))
                assert whole, "described before all fragments were there"
                self.described.add(checkpoint.id.attempt)
                self.wire.append(ToCoordinator(m.DescriptionWritten(attempt=checkpoint.id, error=None)))
            case m.Delete(attempt=name, place=place):
                if place == m.REMOTE:
                    self.remote.pop(name, None)
                    self.described.discard(name)
                else:
                    self.disks[place].delete(name)
                self.wire.append(ToCoordinator(m.DeleteEnded(attempt=name, place=place, error=None)))
            case m.DeleteLocalOrphans(node_id=node_id, directories=directories):
                for attempt_name, directory in list(self.disks[node_id].folders.items()):
                    if directory in directories:
                        self.disks[node_id].delete(attempt_name)
            case m.StepDown():
                self.stepped_down = True
            case m.Warn():
                pass

    def _restore(self, plan: SessionPlan, node_id: str) -> m.NodeRestored:
        """Return the event of a node's ranks that have read the sources of the resume point."""
        node = next(node for node in plan.nodes if node.node_id == node_id)
        damage: tuple[str, ...] = ()
        if plan.resume is not None:
            checkpoint = plan.resume.checkpoint
            name = checkpoint.id.attempt
            damage = tuple(
                f"fragment {i}"
                for i, holders in enumerate(plan.resume.holders)
                if name not in self.described
                and not any((name, i) in self.disks[h].fragments for h in holders if h in self.live)
            )
        return m.NodeRestored(
            token=f"restored-{plan.session}-{node.node_id}",
            session_key=plan.session_key,
            node_id=node.node_id,
            ranks=tuple(RankRestore(rank=k, damage=damage) for k in node.ranks),
        )

    def _drain(self, effect: m.Drain) -> None:
        name, index = effect.attempt.attempt, effect.node_index
        error = self.drain_error(effect)
        if effect.node_id not in self.live or (name, index) not in self.disks[effect.node_id].fragments:
            error = "not here"
        if error is None:
            self.remote.setdefault(name, set()).add(index)
        ended = m.DrainEnded(attempt=effect.attempt, node_index=index, node_id=effect.node_id, error=error)
        self.wire.append(ToCoordinator(ended))

    def _copy(self, source: str, attempt: AttemptId, index: int, holder: str) -> None:
        held = self.disks[source].fragments.get((attempt.attempt, index))
        error = self.copy_error(holder) if {source, holder} <= self.live else "the peer does not answer"
        error = error if held else "not here"
        if held and error is None:
            self.disks[holder].put(held)
        if source in self.live:
            ended = m.ReplicaEnded(attempt=attempt, node_index=index, holder=holder, error=error)
            self.wire.append(ToCoordinator(ended))

    # -- a node's effects ------------------------------------------------------------------------------

    def _node_does(self, node: str, effect: n.NodeEffect) -> None:
        match effect:
            case n.WriteShard(attempt=attempt, rank=rank):
                self.disks[node].folders[attempt.attempt] = attempt.directory
                files = (file_entry(attempt, shard_file(rank, self.plan_of(node).world_size)),)
                written = n.ShardWritten(attempt=attempt, rank=rank, files=files, rows=())
                self.wire.append(ToNode(node, written))
            case n.WriteFragment(fragment=fragment):
                held = fragment_on_disk(fragment)
                self.disks[node].put(held)
                self.wire.append(ToNode(node, n.FragmentWritten(attempt=held.attempt, entry=held.fragment)))
            case n.ReportStored():
                stored = m.NodeStored(
                    attempt=effect.attempt,
                    node_index=effect.node_index,
                    node_id=node,
                    fragment=effect.fragment,
                    size_bytes=effect.size_bytes,
                    replicated=effect.replicated,
                    metrics=effect.metrics,
                    epoch=effect.epoch,
                )
                self.wire.append(ToCoordinator(stored))
            case n.ReportRefused(attempt=attempt, ranks=ranks, reason=reason):
                self.wire.append(ToCoordinator(m.SaveRefused(attempt=attempt, ranks=ranks, reason=reason)))
            case n.SendCopy(attempt=attempt, node_index=index, holder=holder):
                self._copy(node, attempt, index, holder)
            case n.ResolveSave():
                self.settled.append((node, effect))
            case n.DeleteFolder(directory=directory):
                self.disks[node].delete(directory.rpartition("-")[2])
            case n.RefuseOrder() | n.BeginSession() | n.EndSession():
                pass
            case n.Release():
                pass

    def plan_of(self, node: str) -> SessionPlan:
        plan = self.machines[node].plan
        assert plan is not None
        return plan

    def _sealed(self, attempt: AttemptId, rank: int) -> n.ShardSealed:
        metrics = {"loss": 1.0} if rank == 0 else None
        return n.ShardSealed(attempt=attempt, rank=rank, replicated=("same",), metrics=metrics)
