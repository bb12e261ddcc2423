"""The host of a run machine: the events of a run, and the only interpretation of the machine's effects.

The coordinator's actor and the simulator use the same host with different ports. The host waits for nothing:
answers and the time arrive as events.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Set
from dataclasses import replace
from typing import TypeAlias

from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.context import CLOCK_S
from ray_ckpt.core.rate_budget import longest_s
from ray_ckpt.core.run_machine import RunMachine
from ray_ckpt.core.values import Inventory, SessionKey, Token
from ray_ckpt.engine.answers import drain_bound_s, event_of
from ray_ckpt.engine.deletes import NodeDeletes, folders_left, together
from ray_ckpt.engine.groups import Groups
from ray_ckpt.engine.launchers import LauncherWatch
from ray_ckpt.engine.notices import Notices
from ray_ckpt.engine.opened_nodes import OPEN_S, OpenedNodes
from ray_ckpt.engine.ports import (
    AgentDied,
    AgentOrder,
    Answered,
    Call,
    ExitRefused,
    Failure,
    GroupFound,
    GroupRequested,
    HostEvent,
    InventoryDue,
    LauncherSeen,
    LogAwaited,
    OpenOnNode,
    OwnerChecked,
    PartRequested,
    Ports,
    RunOpened,
    ServiceEnding,
)
from ray_ckpt.errors import Unavailable

log = logging.getLogger("ray_ckpt.coordinator")

INVENTORY_AGAIN_S = 1.0  # wait before an inventory is taken again
TAKE_OVER_AGAIN_S = 5.0  # until a host again tries to continue with a group that it has found

Waiting: TypeAlias = RunOpened | GroupRequested | GroupFound | InventoryDue
"""Events that wait until the run is open on all live nodes."""

_OfGroup: TypeAlias = (
    m.BarrierReached | m.NodeRestored | m.SalvageRequested | m.DrainRequested | m.FinishRequested
)


class RunHost:
    """One run of a coordinator; `notices` are those of the service."""

    def __init__(self, machine: RunMachine, ports: Ports, notices: Notices) -> None:
        self.machine = machine
        self.ports = ports
        self.notices = notices
        self.nodes = OpenedNodes(self)
        self.groups = Groups(self)
        self.launchers = LauncherWatch(self)
        self._ticked_s = -math.inf
        self._queue: deque[m.Event | HostEvent] = deque()  # events that arrive while another is handled
        self._is_handling = False
        self._starting: dict[tuple[Token, ...], set[str]] = {}  # callers -> nodes without their plan
        self._putting_away: set[str] = set()  # nodes that have not answered the last RunPutAway
        self._put_away_error: str | None = None
        self._found: GroupFound | None = None  # a group at work under an earlier coordinator
        self._held: list[_OfGroup] = []  # of that group and its launcher, one for each caller
        self._over: Exception | None = None  # the reason why this host takes no callers any more
        self._begun: SessionKey = (0, 0)  # the last session that this coordinator has begun
        self._num_scrubs = 0
        self._was_open = False  # the epoch of this coordinator has been in the log
        self._awaiting_log: list[Token] = []  # callers that wait for the epoch of this coordinator

    @property
    def is_recovering(self) -> bool:
        """True until the group of an earlier coordinator is found; no other group may open before."""
        return self._found is not None

    @property
    def is_starting(self) -> bool:
        """True while nodes of a group have not answered the order to start its session."""
        return bool(self._starting)

    @property
    def last_session_key(self) -> SessionKey:
        """The newest session that this coordinator knows, logged or not."""
        last = self.machine.history.session
        return max(self._begun, (last.opened_by, last.session) if last is not None else (0, 0))

    @property
    def known_session_key(self) -> SessionKey:
        """The session of the group at work or the one that is being looked for; (0, 0) if there is none."""
        if self._found is not None:
            return self._found.plan.session_key
        return (0, 0) if self.is_without_group else self.last_session_key

    @property
    def is_without_group(self) -> bool:
        """True while no group of this run is at work or is being looked for; False after the run's end."""
        view = self.machine.view
        return not (self.is_recovering or view.has_group) and view.end_cause is None

    def needed_nodes(self) -> Set[str]:
        """Return the nodes whose agents may not end: the machine's, and all while a group is being opened."""
        needed = self.machine.view.needed_nodes()
        return needed | self.nodes.live if self.nodes.is_opening or self.groups.is_wanted else needed

    def exit_order(self) -> n.ExitOrdered:
        """Return the order with which an idle agent ends, unless a group is at work there."""
        return n.ExitOrdered(session_key=self.last_session_key, epoch=self.machine.epoch)

    def handle(self, *events: m.Event | HostEvent) -> None:
        """Handle events in order; events that arrive during another event are handled after it."""
        self._queue.extend(events)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._queue:
                self.advance()
                self._handle(self._queue.popleft())
        finally:
            self._is_handling = False

    def advance(self) -> None:
        """Send the time to the machine, if some has passed since the last event."""
        now_s = self.ports.now_s()
        if now_s - self._ticked_s >= CLOCK_S:
            self._ticked_s = now_s
            self.apply(m.Ticked(now_s=now_s, wall_s=self.ports.wall_s()))

    def apply(self, event: m.Event) -> None:
        """Let the machine handle an event, and carry out the effects."""
        self.ports.observe(event)
        self._was_open = self._was_open or self.machine.is_open
        if effects := self.machine.handle(event):
            for effect in together(effects):
                self._carry_out(effect)
        self.ports.measure(self.machine.take_samples())

    def _handle(self, event: m.Event | HostEvent) -> None:
        match event:
            case Answered():  # the first three are those of which each save has several per node
                self._answered(event)
            case m.ReplicaEnded():
                self.apply(event)
            case m.NodeStored(attempt=attempt, node_id=node):
                self.apply(event)
                if (attempt.epoch, attempt.session) >= self.last_session_key:
                    self.nodes.find_group(node)
            case m.NodesSeen():
                self.nodes.seen(event)
                self.groups.ticked()
                self.launchers.ticked()
            case OwnerChecked() | PartRequested() | GroupRequested() | RunOpened() | LogAwaited() if (
                self._over
            ):
                self.groups.fail(event.token, self._over)
            case (
                m.BarrierReached()
                | m.NodeRestored()
                | m.SalvageRequested()
                | m.DrainRequested()
                | m.FinishRequested()
            ) if self.is_recovering:
                self._held.append(event)
            case LauncherSeen():
                self.launchers.seen(event)
                self.groups.launcher_seen(event)
            case OwnerChecked():
                self.groups.check(event)
            case PartRequested():
                self.groups.join(event)
            case GroupRequested() | RunOpened() | InventoryDue():
                self.nodes.open_on_all(event)
            case GroupFound():
                if self.is_without_group or event is self._found:  # the latter is a further try
                    self._found = event
                    self.nodes.open_on_all(event)
            case AgentDied(node=node):
                self.nodes.agent_died(node)
            case ExitRefused(node=node):
                self.nodes.find_group(node)
            case m.Appended():
                self.apply(event)
                self._log_answered()
            case LogAwaited(token=token):
                self._awaiting_log.append(token)
                self._log_answered()
            case ServiceEnding():
                self._end_callers(_ending())
            case _:
                self.apply(event)

    # -- effects -------------------------------------------------------------------------------------

    def send(self, nodes: Iterable[str], order: AgentOrder) -> None:
        """Send an order that needs no answer. The next session at the latest repairs the loss of an order."""
        for node in nodes:
            self.ports.call(Call(node=node, order=order))

    def _carry_out(self, effect: m.Effect | NodeDeletes) -> None:
        ports, epoch = self.ports, self.machine.epoch
        match effect:
            case m.Reply(token=token, value=value):
                self.groups.reply(token, value)
            case m.Fail(token=token, error=error):
                self.groups.fail(token, error)
            case m.NotifyOutcome(attempt=attempt, level=level, error=problem, nodes=nodes):
                outcome = n.OutcomeNotified(attempt=attempt, level=level, error=problem, epoch=effect.epoch)
                self.send(nodes, outcome)
            case m.AnnounceSaveStep(session_key=session_key, signal=signal, nodes=nodes):
                self.send(nodes, n.SaveStepAnnounced(session_key=session_key, signal=signal, epoch=epoch))
            case m.AskSurvivors(session_key=session_key, nodes=nodes):
                self.send(nodes, n.SurvivorsAsked(session_key=session_key, epoch=epoch))
            case m.OrderSalvage(salvage=salvage, nodes=nodes):
                self.send(nodes, n.SalvageOrdered(salvage=salvage, epoch=epoch))
            case m.Replicate(attempt=attempt, node_index=index, source=node, holder=holder):
                copy = n.CopyOrdered(attempt=attempt, node_index=index, holder=holder, epoch=epoch)
                self.send((node,), copy)
            case m.Supersede(nodes=nodes, session_key=session_key, error=problem):
                frees = self.machine.view.is_training
                ended = n.SessionEnded(session_key=session_key, error=problem, epoch=epoch, frees=frees)
                self.send(nodes, ended)
            case m.StartSession():
                self._start_session(effect)
            case m.RequestInventory(token=token):
                ports.later(INVENTORY_AGAIN_S, InventoryDue(token=token))
            case m.PutAway():
                self._put_away(effect)
            case NodeDeletes():
                self._delete(effect)
            case m.Evict() | m.DeleteLocalOrphans():
                raise TypeError(f"{effect!r} is no order of its own, see `together`")
            case m.Drain(attempt=attempt, node_id=node):
                checkpoint = self.machine.history.checkpoints[attempt.attempt]
                bound_s = drain_bound_s(checkpoint, self.machine.options)
                ports.call(Call(node=node, order=effect, work=effect, bound_s=bound_s))
            case m.Code(node_id=node):
                bound_s = longest_s(effect.read_bytes, self.machine.options.replicate_bytes_per_s)
                ports.call(Call(node=node, order=effect, work=effect, bound_s=bound_s))
            case m.Scrub():
                self._scrub(effect)
            case m.Warn():
                ports.warn(effect)
            case m.StepDown(error=problem, is_foreign=is_foreign):
                # A coordinator that was open and lost the run to a newer one of its service is not needed.
                ports.step_down(problem, ends_process=self._was_open and not is_foreign)
                self._end_callers(problem)
            case m.CloseRun():
                ports.close()
                self._end_callers(Unavailable("The run has finished.", hint="Open it again."))
            case _:
                ports.start(effect)

    def _start_session(self, effect: m.StartSession) -> None:
        """Send the plan to all nodes of the group; the callers are answered when all nodes have it."""
        plan, epoch = effect.plan, self.machine.epoch
        self._begun = plan.session_key
        self._starting[effect.tokens] = {node.node_id for node in plan.nodes}
        for node in plan.nodes:
            order = n.SessionStarted(plan=plan, node_id=node.node_id, epoch=epoch)
            self.ports.call(Call(node=node.node_id, order=order, work=effect))

    def _put_away(self, effect: m.PutAway) -> None:
        """Order all live nodes that may hold files of the run to delete them."""
        nodes = self.nodes.known() | self.ports.agents()
        self._putting_away, self._put_away_error = set(nodes & self.nodes.live), None
        order = n.RunPutAway(kept=effect.kept, epoch=self.machine.epoch)
        for node in sorted(self._putting_away):
            self.ports.call(Call(node=node, order=order, work=effect, bound_s=OPEN_S))
        if not self._putting_away:
            self.handle(m.PutAwayEnded(error=None))

    def _delete(self, work: NodeDeletes) -> None:
        """Delete folders on a node; without an agent, its next inventory shows what is left."""
        if work.node in self.ports.agents():
            order = work.order(epoch=self.machine.epoch)
            self.ports.call(Call(node=work.node, order=order, work=work))
        else:
            self.handle(*(Answered(to=delete) for delete in work.deletes))

    def _scrub(self, effect: m.Scrub) -> None:
        """Scrub a copy on its node; the nodes take turns to scrub what is on the storage path.

        Those that have this fragment of the newest checkpoint are first: they may mend a still shard.
        """
        node, machine = effect.place, self.machine
        if node == m.REMOTE:
            able = self.nodes.opened & self.ports.agents()
            newest = [c.id.attempt for c in machine.history.lineage()[-1:]]
            alike = (machine.view.holders_of(name, effect.node_index) for name in newest)
            nodes = sorted(able.intersection(*alike) or able)
            self._num_scrubs += 1
            node = nodes[self._num_scrubs % len(nodes)] if nodes else ""
        self.ports.call(Call(node=node, order=effect, work=effect, bound_s=math.inf))

    # -- answers -------------------------------------------------------------------------------------

    def _answered(self, event: Answered) -> None:
        to, failure = event.to, event.failure
        if failure is not None and failure.epoch is not None:
            self.apply(m.OrderRefused(epoch=failure.epoch))
        if failure is not None and failure.is_dead and isinstance(to, Call):
            self._check_agent(to)
        match to.work if isinstance(to, Call) else to:
            case None:
                self.nodes.answered(event)
            case m.StartSession() as work:
                assert isinstance(to, Call)
                self._started(work, to.node, failure)
            case m.PutAway():
                assert isinstance(to, Call)
                self._was_put_away(to.node, failure)
            case NodeDeletes() as work:
                self._deleted(work, event)
            case _:
                self._end(event)

    def _check_agent(self, call: Call) -> None:
        """Look whether an agent is dead: perhaps no rank runs on its node that has noticed it."""
        if call.node in self.nodes.opened and not isinstance(call.order, OpenOnNode | n.RunPutAway):
            self.ports.revive(call.node)

    def _deleted(self, work: NodeDeletes, answer: Answered) -> None:
        """End each deletion of an order; the node's next inventory shows evicted folders that are left."""
        failure = answer.failure.text if answer.failure is not None else None
        left = folders_left(work, answer.value, failure)
        for delete in work.deletes:
            text = left.get(delete.directory)
            self._end(Answered(to=delete, failure=Failure(text=text) if text is not None else None))

    def _end(self, answer: Answered) -> None:
        if (event := event_of(answer)) is not None:
            self.apply(event)

    def _started(self, effect: m.StartSession, node: str, failure: Failure | None) -> None:
        """Reply with the plan once all nodes have it, or with an error as soon as one node fails."""
        missing = self._starting.get(effect.tokens)
        if missing is None:
            return
        missing.discard(node)
        if failure is None:
            self.nodes.has_session(node, effect.plan.session_key)
            if missing:
                return
        del self._starting[effect.tokens]
        for token in effect.tokens:
            if failure is None:
                self.groups.reply(token, effect.plan)
            else:
                text = f"A node did not take session {effect.plan.session}: {failure.text}"
                self.groups.fail(token, Unavailable(text))

    def _was_put_away(self, node: str, failure: Failure | None) -> None:
        if failure is not None and failure.epoch is None and node in self.nodes.live:
            self._put_away_error = f"node {node[:12]}: {failure.text}"
        if node in self._putting_away:
            self._putting_away.discard(node)
            if not self._putting_away:
                self.apply(m.PutAwayEnded(error=self._put_away_error))

    # -- the run is open on all nodes ------------------------------------------------------------------

    def opened_on_all(self, event: Waiting, found: dict[str, Inventory] | Exception) -> None:
        """Continue with an event that waited for the inventories of all live nodes, or for their error."""
        match event:
            case RunOpened(token=token) | GroupRequested(token=token) if isinstance(found, Exception):
                self.groups.fail(token, found)
            case RunOpened(token=token):
                self.groups.reply(token, None)
            case GroupRequested() if not isinstance(found, Exception):
                self.groups.open(event, found)
            case InventoryDue(token=token) if isinstance(found, Exception):
                log.warning("%s: a node could not take inventory: %s", self.machine.history.run_name, found)
                self.apply(m.InventoryTaken(token=token, inventories={}))
            case InventoryDue(token=token):
                assert not isinstance(found, Exception)
                self.apply(m.InventoryTaken(token=token, inventories=found))
            case GroupFound():
                self._recover(event, found)

    def _recover(self, event: GroupFound, found: dict[str, Inventory] | Exception) -> None:
        """Continue with the group of an earlier coordinator, unless the log is of another run.

        After an error of a node of the group, this is tried again; see `OpenedNodes`.
        """
        is_ours = event.plan.run_uid == self.machine.history.run_uid
        if isinstance(found, Exception) and is_ours:
            self._found = replace(event, num_tries=event.num_tries + 1)
            self.ports.later(TAKE_OVER_AGAIN_S, self._found)
            return
        self._found = None
        if is_ours and not isinstance(found, Exception):
            plans = [inventory.plan for inventory in found.values() if inventory.plan is not None]
            newest = max((event.plan, *plans), key=lambda plan: plan.session_key)
            self.apply(m.GroupRecovered(plan=newest, inventories=found))
            self.send(sorted(found), n.CoordinatorReturned(epoch=self.machine.epoch))
            self.nodes.renew()
        held, self._held = self._held, []
        self.handle(*held)
        self.groups.proceed()

    def _log_answered(self) -> None:
        """Answer the callers that wait for the log, once this coordinator's epoch is in it."""
        if self.machine.is_open:
            awaiting, self._awaiting_log = self._awaiting_log, []
            for token in awaiting:
                self.groups.reply(token, None)
            self.nodes.begin_rounds()

    def _end_callers(self, error: Exception) -> None:
        """Fail all callers that wait for the log, the nodes, a group or other launchers, and later ones."""
        self._over = error
        awaiting, self._awaiting_log = self._awaiting_log, []
        held, self._held = self._held, []
        for token in (*awaiting, *(event.token for event in held)):
            self.groups.fail(token, error)
        self.groups.end(error)
        for event in self.nodes.abandon():
            if not isinstance(event, GroupFound | InventoryDue):
                self.groups.fail(event.token, error)


def _ending() -> Unavailable:
    return Unavailable("The service is being stopped.", hint="Start it again with `ray-ckpt up`.")
