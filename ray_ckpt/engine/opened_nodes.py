"""The nodes on which a run is open: all live nodes at first, then nodes that join or get a new agent."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.context import names_of
from ray_ckpt.core.values import Inventory, SessionKey, SessionPlan
from ray_ckpt.engine.ports import (
    Answered,
    Call,
    Failure,
    GroupFound,
    GroupRequested,
    InventoryDue,
    OpenOnNode,
    RunOpened,
    UpdatePeer,
)
from ray_ckpt.errors import CheckpointError, RunSuperseded, StorageNotShared, StoragePathError

if TYPE_CHECKING:
    from ray_ckpt.engine.run_host import RunHost, Waiting

_Both: TypeAlias = tuple[frozenset[str], frozenset[str], frozenset[str]]  # two sets and their intersection

log = logging.getLogger("ray_ckpt.coordinator")

OPEN_S = 240.0  # longest opening of a node: two starts of an agent
FAILED_AGAIN_S = 30.0  # until a node that had an error is tried again; doubled after each error
MAX_FAILED_S = 1800.0  # FAILED_AGAIN_S doubles up to this
SLOW_NODE_S = 10.0  # for which a run's later groups wait for nodes that are not their own
MAX_FINDS = 6  # tries to find a group at work, 5 s apart, until it goes on without its nodes with errors


@dataclass(slots=True)
class _Round:
    """The opening of the run on all live nodes, for one event."""

    event: Waiting
    asked: frozenset[str] = frozenset()
    pending: set[str] | None = None  # nodes that have not answered; None: live nodes are not known yet
    inventories: dict[str, Inventory] = field(default_factory=dict)
    renewed: set[str] = field(default_factory=set)  # nodes that got a new agent since the round began
    error: Exception | None = None
    asked_s: float = 0.0  # when it began


class OpenedNodes:
    """The nodes on which one run is open or being opened."""

    def __init__(self, host: RunHost) -> None:
        self._host = host
        self.opened: frozenset[str] = frozenset()  # nodes whose agents have opened the run
        self.skipped: set[str] = set()  # nodes that failed or are idle, until the next group opens
        self.is_ready = False  # the run has been opened on all nodes
        self._failed: dict[str, tuple[float, float]] = {}  # node with an error -> next try, pause before it
        self._late: set[str] = set()  # nodes without which a round has ended, until they answer
        self._joining: set[str] = set()  # nodes on which the run is being opened since they joined
        self._is_released = False  # the launcher has ended the run, and the agents were notified
        self._seen = m.NodesSeen(live=frozenset())  # the cluster at the last look
        self._in_session: dict[SessionKey, set[str]] = {}  # nodes whose agents have a session
        self._live_opened: _Both = (frozenset(), frozenset(), frozenset())
        self._members: tuple[SessionPlan | None, frozenset[str]] = (None, frozenset())  # nodes of a plan
        self._with_holders: tuple[SessionPlan | None, frozenset[str]] = (None, frozenset())
        self._renewing: set[str] = set()  # nodes with an order of `renew` that they have not answered
        self._rounds: dict[int, _Round] = {}
        self.asked_s = 0.0  # when the last round began that has ended
        self.silent: frozenset[str] = frozenset()  # nodes that did not answer in that round
        self._num_rounds = 0

    @property
    def live(self) -> frozenset[str]:
        """All live nodes of the cluster."""
        return self._seen.live

    @property
    def is_wanted(self) -> bool:
        """True while callers wait until the run is open on all nodes."""
        return bool(self._rounds)

    @property
    def is_opening(self) -> bool:
        """True while the run is being opened on nodes."""
        return bool(self._rounds or self._joining)

    def known(self) -> frozenset[str]:
        """Return the nodes that may hold files of the run, dead or alive."""
        return self.opened | self.skipped | self._joining

    def open_on_all(self, event: Waiting) -> None:
        """Start missing agents, open the run on all live nodes, and pass the inventories to the host.

        The round begins when this coordinator's epoch is in the log. An error of a node ends the round,
        except for nodes that a group of a run that has had one before can do without; see `_may_leave_out`.
        A launcher of such a run waits SLOW_NODE_S for nodes that are not of its group, and so does a
        restarted coordinator that finds a group at work.
        """
        self._num_rounds += 1
        self._rounds[self._num_rounds] = _Round(event)
        self.begin_rounds()

    def begin_rounds(self) -> None:
        """Look at the cluster for rounds that have not begun, once this coordinator's epoch is in the log."""
        waits = any(opening.pending is None for opening in self._rounds.values())
        if waits and self._host.machine.is_open:
            self._host.ports.look()

    def abandon(self) -> tuple[Waiting, ...]:
        """Drop all rounds, and return the events that wait for them."""
        rounds, self._rounds = self._rounds, {}
        return tuple(opening.event for opening in rounds.values())

    def seen(self, event: m.NodesSeen) -> None:
        """Handle a reading of the cluster: open the run on new nodes, or release the run after its end."""
        self._seen = event
        self._late &= event.live
        for number, opening in list(self._rounds.items()):
            if opening.pending is None and self._host.machine.is_open:
                self._begin(number, opening)
            elif opening.pending is not None and self._is_late(opening, opening.pending):
                late = names_of(opening.pending)
                log.warning("%s does not answer yet: the group does not wait for it", late)
                self._late |= opening.pending
                self._end(number, opening, is_late=True)
        if not self.is_ready:  # the log is still being opened
            return
        self._host.apply(self._now(self._live_and_opened(event.live), event))
        cause = self._host.machine.view.end_cause
        if (cause is not None) != self._is_released:
            self._is_released = cause is not None
            if cause is not None:
                released = n.RunReleased(
                    session_key=self._host.last_session_key,
                    is_finished=cause == "finished",
                    epoch=self._host.machine.epoch,
                )
                self._host.send(sorted(self.opened), released)
        if cause is None:
            self._try_failed()
            self.renew()
            if len(self._live_opened[2]) < len(event.live):
                for node in sorted(event.live - self.known()):
                    self._join(node)

    def _try_failed(self) -> None:
        """Open the run again on nodes that had an error when they joined."""
        now_s = self._host.ports.now_s()
        for node, (due_s, pause_s) in list(self._failed.items()):
            if node not in self.live or node not in self.skipped:
                del self._failed[node]
            elif now_s >= due_s:
                self._failed[node] = now_s + pause_s, pause_s
                self._join(node)

    def agent_died(self, node: str) -> None:
        """Open the run on a node whose agent has died; after the end of the run, only to upload from it."""
        if not self.is_ready or node not in self.live:
            return
        if self._host.machine.view.end_cause is None or node in self._host.needed_nodes():
            self._join(node)

    def is_known(self, node: str, plans: Mapping[str, SessionPlan | None]) -> bool:
        """Return whether a node's agent, with these plans by run uid, has the run and its session at work."""
        plan, uid = self._host.machine.plan, self._host.machine.history.run_uid
        is_member = plan is not None and node in self._members_of(plan)
        return uid in plans and not (is_member and plans[uid] is None)

    def find_group(self, node: str) -> None:
        """Read the inventory of a node again: its agent has a group, or copies although it is skipped."""
        is_read = self._host.is_without_group or node in self.skipped
        if self._host.machine.is_open and node in self.live and is_read:
            self._join(node)

    def ended_idle(self, nodes: set[str]) -> None:
        """Skip nodes whose idle agents have ended, so that only the next group starts agents there."""
        self.skipped |= nodes & self.opened
        self.opened -= nodes

    def has_session(self, node: str, session_key: SessionKey | None) -> None:
        """Record the session that the agent of a node has."""
        for key, nodes in list(self._in_session.items()):
            nodes.discard(node)
            if not nodes:
                del self._in_session[key]
        if session_key is not None:
            self._in_session.setdefault(session_key, set()).add(node)

    def renew(self) -> None:
        """Send the session at work to new agents of its nodes, and end older sessions on other nodes.

        An agent is new if it was started while there was no coordinator, or in the middle of a session.
        """
        host, plan = self._host, self._host.machine.plan
        if plan is None or host.is_starting:
            return
        if host.machine.view.is_training:
            self._end_older(plan)
        members, have = self._members_of(plan), self._in_session.get(plan.session_key, set())
        if len(members) == len(have):
            return
        new = (members & self.opened) - have
        for node in sorted(new - self._renewing):
            self._renewing.add(node)
            epoch = host.machine.epoch
            host.send((node,), n.SessionStarted(plan=plan, node_id=node, epoch=epoch))
            host.send((node,), n.CoordinatorReturned(epoch=epoch))

    def _end_older(self, plan: SessionPlan) -> None:
        """Have nodes that are not of the group free the memory of earlier groups.

        A group that has not restored yet may fail, and the next one may restore from that memory.
        """
        error = RunSuperseded("A newer training group has opened this run.")
        for key, nodes in list(self._in_session.items()):
            if key < plan.session_key and not plan.continues(key):
                others = (nodes & self.opened & self.live) - self._members_of(plan) - self._renewing
                for node in sorted(others):
                    self._renewing.add(node)
                    ended = n.SessionEnded(session_key=key, error=error, epoch=self._host.machine.epoch)
                    self._host.send((node,), ended)

    def answered(self, answer: Answered) -> None:
        """Handle the answer of a node to an order of this object; ignore other answers."""
        call = answer.to
        is_refused = answer.failure is not None and isinstance(answer.failure.error, CheckpointError)
        is_done = answer.failure is None or is_refused
        if isinstance(call, Call) and isinstance(call.order, n.SessionStarted):
            self._renewing.discard(call.node)
            if is_done:
                self.has_session(call.node, call.order.plan.session_key)
        if isinstance(call, Call) and isinstance(call.order, n.SessionEnded) and call.order.frees:
            self._renewing.discard(call.node)
            is_gone = answer.failure is not None and answer.failure.is_dead  # the agent, with its memory
            if (is_done or is_gone) and call.node in self._in_session.get(call.order.session_key, ()):
                self.has_session(call.node, None)
        if not isinstance(call, Call) or not isinstance(call.order, OpenOnNode):
            return
        inventory = answer.value if isinstance(answer.value, Inventory) else None
        if call.order.number == 0:
            self._joined(call.node, inventory, answer.failure)
            return
        number, opening = call.order.number, self._rounds.get(call.order.number)
        if opening is None or opening.pending is None or call.node not in opening.pending:
            return
        opening.pending.discard(call.node)
        error = answer.failure.error if answer.failure is not None else None
        if inventory is not None:
            opening.inventories[call.node] = inventory
            self._late.discard(call.node)
            if call.node not in opening.renewed:  # otherwise the inventory is that of the previous agent
                self.has_session(call.node, inventory.session_key)
        elif error is not None and self._may_leave_out(call.node, error, opening.event):
            log.warning("node %s is left out for now: %s", call.node[:12], error)
        else:
            opening.error = opening.error or error
        if not opening.pending:
            self._end(number, opening)

    def _begin(self, number: int, opening: _Round) -> None:
        if isinstance(opening.event, GroupRequested):
            nodes = {node.node_id for node in opening.event.nodes}
            self._host.notices.forget_signals(self._host.machine.history.run_uid, nodes)
        opening.asked, opening.pending = self.live, set(self.live)
        opening.asked_s = self._host.ports.now_s()
        for node in sorted(self.live):
            self._open(node, number)
        if not self.live:
            self._end(number, opening)

    def _end(self, number: int, opening: _Round, *, is_late: bool = False) -> None:
        del self._rounds[number]
        self.asked_s = opening.asked_s
        if opening.error is not None:
            self._host.opened_on_all(opening.event, opening.error)
            return
        self.silent = opening.asked - opening.inventories.keys() - opening.renewed
        kept = self.opened & self.live
        if self._decides(opening.event) and not is_late:
            kept -= self.silent
        self.opened, self.skipped, self.is_ready = kept.union(opening.inventories), set(), True
        self._host.apply(self._now(self.opened, self._seen))
        self._host.opened_on_all(opening.event, opening.inventories)

    def leave_out(self, silent: frozenset[str]) -> None:
        """Do without these nodes, which did not answer in the round of a group that is opened now."""
        if self.opened & silent:
            self.opened -= silent
            self._host.apply(self._now(self.opened & self.live, self._seen))

    def _decides(self, event: Waiting) -> bool:
        """Return whether the nodes that answered are all that the run's group has from now on.

        They are not if the group that asked may be refused, or is over: nodes that did not answer it, perhaps
        because they are slow to list their files, would be dead for another group.
        """
        match event:
            case GroupFound():
                return True
            case InventoryDue(token=token):
                view = self._host.machine.view
                return bool(view.opening_nodes) and token == view.opening_token
            case _:
                return False

    def _may_leave_out(self, node: str, error: Exception, event: Waiting) -> bool:
        """Return whether a round may go on without a node that has this error.

        The nodes of a group have to be in order, and all nodes at the first group of a run. If a node does
        not find the storage path, this is an error only for a RunOpened that checks it, since the path may be
        away for a while.
        """
        is_path = isinstance(error, StorageNotShared | StoragePathError)
        if isinstance(event, RunOpened) and event.checks_storage and is_path:
            return False
        return is_path or not self._is_needed(node, event)

    def _is_needed(self, node: str, event: Waiting) -> bool:
        """Return whether an event cannot go on without a node.

        A group at work goes on without a node whose disk takes no write, since saves are all that it costs.
        """
        if isinstance(event, GroupFound):
            return event.num_tries < MAX_FINDS and node in self._members_of(event.plan)
        if self._host.machine.history.session is None:
            return True
        match event:
            case GroupRequested(nodes=nodes):
                return any(member.node_id == node for member in nodes)
            case InventoryDue():
                return True  # otherwise its copies would count as lost
            case RunOpened():
                return False  # the nodes of the group are not known yet

    def _is_late(self, opening: _Round, pending: Set[str]) -> bool:
        """Return whether a group has waited long enough for nodes that it can do without.

        The agent of a node that has not opened the run before may be starting, and a new group waits for it.
        """
        if self._host.ports.now_s() - opening.asked_s < SLOW_NODE_S:
            return False
        match opening.event:
            case GroupRequested() | RunOpened(checks_storage=False) as event:
                is_starting = not pending <= self.opened | self._late
                return not is_starting and not any(self._is_needed(node, event) for node in pending)
            case GroupFound(plan=plan):
                return not pending & self._members_of(plan)
            case InventoryDue():
                return not pending & self._host.machine.view.opening_nodes
            case _:
                return False

    def _open(self, node: str, number: int) -> None:
        epoch = self._host.machine.history.epoch
        order = OpenOnNode(epoch=epoch, number=number, known=self._host.known_session_key)
        self._host.ports.call(Call(node=node, order=order, bound_s=OPEN_S))

    def _join(self, node: str) -> None:
        if node not in self._joining:
            self._joining.add(node)
            self._open(node, 0)

    def _joined(self, node: str, inventory: Inventory | None, failure: Failure | None) -> None:
        """Add a node that joined, or got a new agent, in the middle of a session."""
        self._joining.discard(node)
        if not self.is_ready and (inventory is None or inventory.session_key is None):
            return  # the run is opened on all nodes together, for a group
        if inventory is not None:
            is_known = any(node in nodes for nodes in (self.opened, self.skipped, self._planned()))
            self.skipped.discard(node)
            self._failed.pop(node, None)
            self._late.discard(node)
            self.opened |= {node}
            self.has_session(node, inventory.session_key)
            for opening in self._rounds.values():
                opening.renewed.add(node)
            if inventory.session_key is not None and self._host.is_without_group:
                if inventory.plan is not None:
                    self._host.handle(GroupFound(plan=inventory.plan))
                else:  # a group was known when the inventory was requested
                    self._join(node)
            else:
                self._host.apply(m.NodesJoined(inventories={node: inventory}))
            if is_known:  # orders and the next plan bring the addresses of the others
                self._update_peers(node)
            self.renew()
        elif failure is not None and failure.error is not None and failure.epoch is None:
            name = self._host.machine.history.run_name
            log.warning("node %s cannot hold checkpoints of %s: %s", node[:12], name, failure.error)
            self.skipped.add(node)
            _, pause_s = self._failed.get(node, (0.0, FAILED_AGAIN_S / 2))
            pause_s = min(2 * pause_s, MAX_FAILED_S)
            self._failed[node] = self._host.ports.now_s() + pause_s, pause_s
            if node in self.opened:  # with a new agent, perhaps; the group at work there can still save
                self.has_session(node, None)
                self.renew()

    def _update_peers(self, node: str) -> None:
        """Send the address of a new agent to the nodes of the group."""
        if (plan := self._host.machine.plan) is not None:
            self._host.send(sorted(self._members_of(plan) - {node}), UpdatePeer(node=node))

    def _planned(self) -> Set[str]:
        """Return the members of the group and the holders of their copies, computed once per plan."""
        plan = self._host.machine.plan
        if plan is not None and self._with_holders[0] is not plan:
            holders = (member.holders for member in plan.nodes)
            self._with_holders = (plan, self._members_of(plan).union(*holders))
        return self._with_holders[1] if plan is not None else frozenset()

    def _members_of(self, plan: SessionPlan) -> frozenset[str]:
        """Return the nodes of a plan, computed once per plan since every tick needs them."""
        if self._members[0] is not plan:
            self._members = (plan, frozenset(member.node_id for member in plan.nodes))
        return self._members[1]

    def _live_and_opened(self, live: frozenset[str]) -> frozenset[str]:
        """Return the live nodes that have opened the run: the same object until there is a change."""
        if self._live_opened[0] is not live or self._live_opened[1] is not self.opened:
            self._live_opened = (live, self.opened, live & self.opened)
        return self._live_opened[2]

    def _now(self, live: frozenset[str], seen: m.NodesSeen) -> m.NodesSeen:
        """Return `seen` with `live` and the notices; other facts stay those of all nodes, for placement."""
        notices, uid = self._host.notices, self._host.machine.history.run_uid
        return replace(
            seen,
            live=live,
            draining=seen.draining | notices.nodes(uid),
            left_s=notices.left_s(uid, seen.left_s, self._host.ports.wall_s()),
        )
