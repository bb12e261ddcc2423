"""Views of a service and its runs for status: values computed from the machines on request.

Nothing is changed. No tokens, keys or storage options appear in a view.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field

from ray_ckpt import telemetry
from ray_ckpt.actors.coordinator.run import Run
from ray_ckpt.actors.messages import DiskView, NewestView, NodeView, RunSpec, RunView
from ray_ckpt.analysis.goodput import measure_goodput
from ray_ckpt.config import RunOptions
from ray_ckpt.core.history import RunHistory
from ray_ckpt.core.run_machine import RunMachine
from ray_ckpt.core.values import DiskSpace, SessionNode
from ray_ckpt.engine.stopping import needed_in_cluster, run_state
from ray_ckpt.telemetry import Sample
from ray_ckpt.types import Level


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Facts about a run that the run's machine does not have."""

    disks: Mapping[str, DiskSpace]  # by node, from the last reading
    warning: str = ""  # the machine's last warning, "" if there was none
    warned_at_s: float = 0.0  # Unix time of the warning
    owner_lives: bool = True
    sent_bytes: Mapping[str, int] = field(default_factory=dict)  # bytes of unfinished uploads, by attempt


def view_of(
    run: Run, agents: Set[str], *, owner_lives: bool = True, sent_bytes: Mapping[str, int] | None = None
) -> RunView:
    """Return the view of a run as of now; `agents` are the nodes with an agent."""
    seen = Seen(
        disks=run.disks_of(agents),
        warning=run.warning[0],
        warned_at_s=run.warning[1],
        owner_lives=owner_lives,
        sent_bytes=sent_bytes or {},
    )
    return run_view(run.spec, run.machine, seen, wall_s=time.time())


def run_view(spec: RunSpec, machine: RunMachine, seen: Seen, *, wall_s: float) -> RunView:
    """Return the view of a run as of Unix time `wall_s`."""
    plan, history = machine.plan, machine.history
    only = machine.view.in_cluster_only
    return RunView(
        name=spec.name,
        where=spec.key,
        run_uid=history.run_uid,
        epoch=machine.epoch,
        state=run_state(machine, owner_lives=seen.owner_lives),
        owner=machine.view.owner,
        session=plan.session if plan else None,
        world_size=plan.world_size if plan else 0,
        step=_step(machine),
        step_s=machine.view.step_s,
        interval_s=machine.view.save_interval_s,
        newest=_newest(machine, wall_s),
        nodes=_nodes(spec, machine, seen.disks),
        saves=machine.view.saves_underway,
        drains=machine.view.drains_underway,
        sent_bytes=dict(seen.sent_bytes),
        copies_missing=machine.view.copies_missing,
        records_waiting=machine.view.records_waiting,
        live=len(history.live()),
        in_cluster_only=tuple(c.step for c in only),
        needed_in_cluster=needed_in_cluster(machine, wall_s),
        warning=seen.warning,
        warning_age_s=wall_s - seen.warned_at_s if seen.warning else None,
        suspect=machine.history.suspect_text,
        shared_bytes=next((c.shared_bytes for c in reversed(machine.history.lineage())), 0),
        damaged=tuple(c.step for c in machine.history.live() if c.damaged),
        exported=_exported(machine),
        awaited=machine.view.awaited(),
        parity_groups=plan.groups if plan else (),
    )


def _step(machine: RunMachine) -> int:
    """Return the last step that the current group is known to have completed; 0 without a group."""
    plan, lineage = machine.plan, machine.history.lineage()
    own = lineage[-1].step if plan is not None and lineage and lineage[-1].id.session == plan.session else 0
    return max(machine.view.last_step, own)


def _exported(machine: RunMachine) -> str:
    found = machine.history.exported
    return "" if found is None else f"{found.exported} of step {found.step}"


def _newest(machine: RunMachine, wall_s: float) -> tuple[NewestView, ...]:
    lineage, found = machine.history.lineage(), []
    for level in Level:
        reached = next((c for c in reversed(lineage) if c.level >= level), None)
        if reached is not None:
            behind = max(_step(machine) - reached.step, 0)
            age_s = wall_s - reached.committed_at_s
            found.append(NewestView(level=level.label, step=reached.step, age_s=age_s, steps_behind=behind))
    return tuple(found)


def _nodes(spec: RunSpec, machine: RunMachine, disks: Mapping[str, DiskSpace]) -> tuple[NodeView, ...]:
    """Return the group's nodes in the order of their ranks, then other nodes that hold live checkpoints."""
    group = {node.node_id: node for node in (machine.plan.nodes if machine.plan else ())}
    exposed = {found.node_id: found for found in machine.view.exposure()}
    leaving, domains, live = machine.view.leaving, machine.view.domains, machine.view.live_nodes
    groups = machine.plan.groups if machine.plan else ()
    group_of = {member: number for number, found in enumerate(groups) for member in found.members}
    return tuple(
        NodeView(
            node_id=node,
            ranks=_part(group, node).ranks,
            holders=_part(group, node).holders,
            is_live=node in live,
            is_draining=node in leaving,
            gone_in_s=leaving.get(node),
            domain=domains.get(node, ""),
            exposure=exposed.get(node),
            disk=_disk(spec, disks[node]) if node in disks else None,
            parity_group=group_of.get(_part(group, node).node_index),
        )
        for node in (*group, *sorted(machine.view.needed_nodes() - group.keys()))
    )


def _part(group: Mapping[str, SessionNode], node: str) -> SessionNode:
    return group.get(node) or SessionNode(node_id=node, node_index=-1, ranks=(), holders=())


def _disk(spec: RunSpec, disk: DiskSpace) -> DiskView:
    used = disk.total_bytes - disk.free_bytes
    return DiskView(
        free_bytes=disk.free_bytes,
        total_bytes=disk.total_bytes,
        reserve_bytes=spec.options.reserve_bytes,
        is_full=used > spec.options.high_watermark * disk.total_bytes,
    )


def disk_samples(disks: Mapping[str, DiskSpace], options: RunOptions) -> Iterator[Sample]:
    """Yield the space of the nodes with the fullest disks, and the spread over all nodes."""

    def fullness(node: str) -> tuple[bool, float, str]:
        """Return a key that changes rarely, since alerts wait until a node has been full for minutes."""
        disk = disks[node]
        room = disk.free_bytes - options.reserve_bytes
        return room >= 0, round(room / max(disk.total_bytes, 1), 2), node

    for node in heapq.nsmallest(telemetry.WORST_NODES, disks, key=fullness):
        disk, labels = disks[node], {"node": node}
        yield Sample(metric=telemetry.DISK_FREE, value=disk.free_bytes, labels=labels)
        yield Sample(metric=telemetry.DISK_TOTAL, value=disk.total_bytes, labels=labels)
        yield Sample(metric=telemetry.DISK_RESERVE, value=options.reserve_bytes, labels=labels)
    used = (1 - disk.free_bytes / max(disk.total_bytes, 1) for disk in disks.values())
    yield from telemetry.spread(telemetry.NODES_DISK_USED, used)


def goodput_samples(history: RunHistory) -> tuple[Sample, ...]:
    """Return goodput and badput, computed from the run's log; () until the log covers a non-zero time.

    The time of the computation grows with the length of the history.
    """
    found = measure_goodput(tuple(history.sessions.values()), history.checkpoints.values())
    if found.ratios is None:
        return ()
    badput = (
        Sample(metric=telemetry.BADPUT, value=lost.estimate, labels={"cause": cause})
        for cause, lost in found.badput.items()
    )
    return Sample(metric=telemetry.GOODPUT, value=found.ratios.estimate), *badput
