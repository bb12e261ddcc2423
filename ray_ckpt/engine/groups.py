"""Callers that open groups: launchers that wait for each other, and groups of several worker groups.

A launcher that finds the run at work under another launcher waits for the other's death. A group of several
parts, such as an actor's and a critic's workers, opens when its last part joins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ray_ckpt.core import messages as m
from ray_ckpt.core.values import GroupNode, Inventory, Token
from ray_ckpt.engine.ports import GroupRequested, LauncherSeen, OwnerChecked, PartRequested
from ray_ckpt.errors import Unavailable
from ray_ckpt.types import GroupPart

if TYPE_CHECKING:
    from ray_ckpt.engine.run_host import RunHost

OWNER_GONE_S = 10.0  # until Ray reports an ended launcher as dead; a launcher still alive keeps the run
PARTS_WAIT_S = 300.0  # longest wait for the other parts of a group, whose processes may still be starting


@dataclass(slots=True)
class _Claim:
    """A launcher that waits for the run; `inventories` is empty unless the launcher opens a group."""

    event: OwnerChecked | GroupRequested
    inventories: dict[str, Inventory]
    until_s: float  # end of the wait for the death of another launcher
    asked_s: float  # when the nodes were asked for the inventories
    silent: frozenset[str]  # the nodes that did not answer


@dataclass(slots=True)
class _Join:
    """Callers of one part of a group."""

    nodes: tuple[str, ...]  # the node of each rank of the part, by the last caller
    since_s: float
    tokens: list[Token] = field(default_factory=list)


class Groups:
    """The callers that wait to open a group of one run."""

    def __init__(self, host: RunHost) -> None:
        self._host = host
        self._claims: list[_Claim] = []
        self._parts: tuple[GroupPart, ...] = ()  # of the group that waits for parts
        self._joins: dict[str, _Join] = {}  # by part
        self._shared: dict[Token, tuple[Token, ...]] = {}  # token of a group -> the callers of its parts

    @property
    def is_wanted(self) -> bool:
        """True if a launcher waits to open a group."""
        return bool(self._claims or self._joins)

    # -- replies -------------------------------------------------------------------------------------

    def reply(self, token: Token, value: object) -> None:
        for caller in self._shared.pop(token, (token,)):
            self._host.ports.reply(caller, value)

    def fail(self, token: Token, error: Exception) -> None:
        for caller in self._shared.pop(token, (token,)):
            self._host.ports.fail(caller, error)

    def end(self, error: Exception) -> None:
        """Fail all callers that wait here, because the host's run is over."""
        joins, self._joins = self._joins, {}
        claims, self._claims = self._claims, []
        for token in [t for join in joins.values() for t in join.tokens] + [c.event.token for c in claims]:
            self.fail(token, error)

    # -- two launchers -------------------------------------------------------------------------------

    def check(self, event: OwnerChecked) -> None:
        """Reply when a launcher may open a group, or fail the call with the machine's objection."""
        self._add(event, {})

    def open(self, event: GroupRequested, inventories: dict[str, Inventory]) -> None:
        """Open a group with the inventories of all live nodes."""
        self._add(event, inventories)

    def _add(self, event: OwnerChecked | GroupRequested, inventories: dict[str, Inventory]) -> None:
        until_s = self._host.ports.now_s() + OWNER_GONE_S
        nodes = self._host.nodes
        self._claims.append(_Claim(event, inventories, until_s, nodes.asked_s, nodes.silent))
        self.proceed()

    def proceed(self) -> None:
        """Pass on the launchers that have no rival; begin to check if the rivals of the others are alive."""
        if self._host.is_recovering:
            return
        for claim in list(self._claims):
            if claim in self._claims:
                rival = self._host.machine.view.owner
                if rival in ("", claim.event.owner):
                    self._grant(claim, "")
                else:
                    self._host.ports.look_for(rival)

    def launcher_seen(self, event: LauncherSeen) -> None:
        """Pass on the launchers whose rival is dead, and those that have waited too long for its death."""
        now_s = self._host.ports.now_s()
        for claim in list(self._claims):
            rival = self._host.machine.view.owner
            if claim not in self._claims or event.owner != rival or rival == claim.event.owner:
                continue
            if not event.is_alive:
                self._grant(claim, rival)
            elif now_s >= claim.until_s:
                self._grant(claim, "")

    def _grant(self, claim: _Claim, dead_owner: str) -> None:
        """Pass a launcher on to the machine, which raises an objection if a living launcher has the run."""
        self._claims.remove(claim)
        event, machine = claim.event, self._host.machine
        objection = machine.view.objection(event.owner, dead_owner)
        if isinstance(event, GroupRequested):
            if objection is None:
                self._host.nodes.leave_out(claim.silent)
            self._host.apply(
                m.GroupOpened(
                    token=event.token,
                    nodes=event.nodes,
                    inventories=claim.inventories,
                    resume=event.resume,
                    owner=event.owner,
                    dead_owner=dead_owner,
                    launch=event.launch,
                    asked_s=claim.asked_s,
                )
            )
        elif objection is not None:
            self.fail(event.token, objection)
        else:
            self.reply(event.token, None)

    # -- parts of a group ------------------------------------------------------------------------------

    def join(self, event: PartRequested) -> None:
        """Add a part; the last part opens the group for all. A part that joins again replaces its entry."""
        if event.parts != self._parts:
            self._withdraw(list(self._joins), "The parts of the group have changed.")
            self._parts = event.parts
        known = self._joins.get(event.part)
        join = _Join(event.nodes, self._host.ports.now_s(), [*(known.tokens if known else ()), event.token])
        self._joins[event.part] = join
        if len(self._joins) < len(event.parts):
            return
        joins, self._joins = self._joins, {}
        self._shared[event.token] = tuple(token for join in joins.values() for token in join.tokens)
        nodes = [node for part in event.parts for node in joins[part.name].nodes]
        group = GroupRequested(
            token=event.token, nodes=group_nodes(nodes), resume=event.resume, owner=event.owner
        )
        self._host.handle(group)

    def ticked(self) -> None:
        """Give up parts that have waited for too long, and check the rivals again."""
        over_s = self._host.ports.now_s() - PARTS_WAIT_S
        if late := [name for name, join in self._joins.items() if join.since_s <= over_s]:
            missing = ", ".join(part.name for part in self._parts if part.name not in self._joins)
            self._withdraw(late, f"the parts {missing} have not joined.")
        self.proceed()

    def _withdraw(self, names: Sequence[str], why: str) -> None:
        """Fail parts; the group must not open with ranks that have given up."""
        for name in names:
            for token in self._joins.pop(name).tokens:
                text = f"Run {self._host.machine.history.run_name}: {why}"
                self._host.ports.fail(token, Unavailable(text))


def group_nodes(nodes: Sequence[str]) -> tuple[GroupNode, ...]:
    """Return the nodes with their ranks, where rank k runs on `nodes[k]`."""
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    return tuple(GroupNode(node_id=node, ranks=tuple(ranks)) for node, ranks in by_node.items())
