"""Scenarios of losses: the checkpoints that would be left after a loss, and those that must survive it.

A scenario removes nodes and all data on these nodes. The level of a checkpoint determines the losses that it
must survive: a durable checkpoint must survive every loss of nodes; a checkpoint with `replicas` copies on
other nodes must survive the loss of `replicas` copies of each fragment. Only copies that the nodes have
reported count, so that a drill reports a checkpoint whose copies are not repaired yet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ray_ckpt.core.context import names_of
from ray_ckpt.core.history import RunHistory
from ray_ckpt.core.parity_files import computed_members, group_nodes, left_places
from ray_ckpt.core.values import GroupPlaces, SessionPlan
from ray_ckpt.errors import ConfigError
from ray_ckpt.types import CheckpointInfo, Level

MAX_NAMED = 10  # nodes or domains listed in a hint


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A loss of some nodes, or of all nodes if `remote_only`. A drill's log record contains `name`."""

    name: str
    lost: frozenset[str] = frozenset()
    remote_only: bool = False

    def survivors(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Return those of `nodes` that are left after the loss, in the same order."""
        return () if self.remote_only else tuple(node for node in nodes if node not in self.lost)


REMOTE_ONLY = Scenario(name="remote-only", remote_only=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveCheckpoint:
    """A live checkpoint, with the live nodes that hold each fragment and all files of the fragment.

    `homes` are the nodes that hold each fragment for the ranks on that node; "" if the node is not known.
    """

    checkpoint: CheckpointInfo
    holders: tuple[tuple[str, ...], ...]
    homes: tuple[str, ...] = ()
    on_lineage: bool = True
    groups: tuple[GroupPlaces, ...] = ()  # its parity groups

    def home(self, index: int) -> str:
        return self.homes[index] if index < len(self.homes) else ""


def live_checkpoints(
    history: RunHistory,
    holders: Mapping[str, Mapping[int, Sequence[str]]],
    plan: SessionPlan | None,
    places: Callable[[str], tuple[GroupPlaces, ...]] = lambda attempt: (),
) -> tuple[LiveCheckpoint, ...]:
    """Return the live checkpoints of a run in log order.

    `holders` maps attempt and fragment to nodes; `plan` is the plan of the group at work; `places` returns
    the parity groups of an attempt.
    """
    lineage = {c.id.attempt for c in history.lineage()}
    nodes = sorted(plan.nodes, key=lambda n: n.node_index) if plan is not None else ()
    homes = tuple(node.node_id for node in nodes)

    def of(checkpoint: CheckpointInfo) -> LiveCheckpoint:
        held = holders.get(checkpoint.id.attempt, {})
        return LiveCheckpoint(
            checkpoint=checkpoint,
            holders=tuple(tuple(held.get(index, ())) for index in range(checkpoint.num_nodes)),
            homes=homes if len(homes) == checkpoint.num_nodes else (),
            on_lineage=checkpoint.id.attempt in lineage,
            groups=places(checkpoint.id.attempt),
        )

    return tuple(map(of, history.live()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """A checkpoint after a loss: the remaining holders of each fragment, the fragment's home first."""

    live: LiveCheckpoint
    holders: tuple[tuple[str, ...], ...]
    is_remote: bool  # the checkpoint is also on the storage path
    is_covered: bool  # the checkpoint must survive the loss
    groups: tuple[GroupPlaces, ...]  # what is left of the parity groups
    problems: tuple[str, ...]  # texts for users: fragments without a copy, and the nodes of lost copies

    @property
    def checkpoint(self) -> CheckpointInfo:
        return self.live.checkpoint


def leftovers(live: LiveCheckpoint, scenario: Scenario) -> Leftovers:
    """Return the state of a checkpoint after the loss of `scenario`."""

    def by_home(index: int) -> tuple[str, ...]:
        left = scenario.survivors(live.holders[index])
        return tuple(sorted(left, key=lambda node: (node != live.home(index), node)))

    holders = tuple(by_home(index) for index in range(len(live.holders)))
    is_remote = live.checkpoint.level >= Level.DURABLE
    groups = tuple(left_places(places, scenario.survivors) for places in live.groups)
    return Leftovers(
        live=live,
        holders=holders,
        is_remote=is_remote,
        is_covered=_is_covered(live, scenario),
        groups=groups,
        problems=() if is_remote else tuple(_missing(live, holders, groups, scenario)),
    )


def _missing(
    live: LiveCheckpoint, left: Sequence[Sequence[str]], groups: Sequence[GroupPlaces], scenario: Scenario
) -> Iterator[str]:
    if scenario.remote_only:
        yield "it is not on the storage path"
        return
    computed = computed_members(groups)
    for index, held in enumerate(live.holders):
        if index in computed:
            continue
        if not held:
            yield f"fragment {index}: no live node holds it"
        elif not left[index]:
            yield f"fragment {index}: its only copies are on {names_of(held)}"


def _is_covered(live: LiveCheckpoint, scenario: Scenario) -> bool:
    checkpoint = live.checkpoint
    if checkpoint.level >= Level.DURABLE:
        return True
    if scenario.remote_only:
        return False
    if checkpoint.level is Level.LOCAL and not all(live.holders):  # a fragment was lost before this loss
        return False
    copies = checkpoint.replicas if checkpoint.level is Level.REPLICATED else 0
    holding = list(map(frozenset, live.holders))
    if copies and not all(len(nodes) > copies for nodes in holding):
        for places in live.groups:  # any node of a group may hold what computes a fragment
            for member in places.group.members:
                holding[member] = group_nodes(places)
    return all(len(scenario.lost & nodes) <= copies for nodes in holding)


# -- scenarios ---------------------------------------------------------------------------------------


def lose_node(prefix: str, nodes: Collection[str]) -> Scenario:
    """Return the loss of the live node whose id begins with `prefix`.

    Raise ConfigError unless exactly one live node has such an id.
    """
    found = [node for node in nodes if prefix and node.startswith(prefix)]
    if len(found) != 1:
        what = "No live node" if not found else f"{len(found)} live nodes"
        there = names_of(sorted(found or nodes)[:MAX_NAMED])
        raise ConfigError(
            f"{what} with an id that begins with {prefix!r}.", hint=f"There are {there}.", node=prefix
        )
    return Scenario(name=f"lose-node {found[0][:12]}", lost=frozenset(found))


def lose_rack(domain: str, domains: Mapping[str, str]) -> Scenario:
    """Return the loss of all live nodes in a failure domain; `domains` maps each live node to its domain.

    Raise ConfigError if the domain has no live node.
    """
    lost = frozenset(node for node, found in domains.items() if domain and found == domain)
    if not lost:
        known = sorted({found for found in domains.values() if found})[:MAX_NAMED]
        hint = f"There are {', '.join(known)}." if known else "No node has one; see option failure_domain."
        raise ConfigError(f"No live node is in the failure domain {domain!r}.", hint=hint, domain=domain)
    return Scenario(name=f"lose-rack {domain}", lost=lost)


def scenarios(live: Sequence[LiveCheckpoint], domains: Mapping[str, str]) -> tuple[Scenario, ...]:
    """Return each loss that would cost a copy: of a node, a domain and, if a copy is durable, of all nodes.

    The order is fixed, so that the same seed chooses the same scenario.
    """
    holding = {node for c in live for nodes in c.holders for node in nodes}
    racks = {domain for node, domain in domains.items() if domain and node in holding}
    found = [lose_node(node, [node]) for node in sorted(holding)]
    found += [lose_rack(domain, domains) for domain in sorted(racks)]
    if any(c.checkpoint.level >= Level.DURABLE for c in live):
        found.append(REMOTE_ONLY)
    return tuple(found)
