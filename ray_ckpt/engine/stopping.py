"""The state of a run, and the reasons not to stop its service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from ray_ckpt.core.retention import pinned_by
from ray_ckpt.core.run_machine import RunMachine
from ray_ckpt.engine.run_host import RunHost
from ray_ckpt.types import Level

RunState: TypeAlias = Literal["opening", "restoring", "training", "gone", "finished", "failed", "idle"]


def run_state(machine: RunMachine, *, owner_lives: bool) -> RunState:
    """Return the state of a run, as `RunView` describes it."""
    if not machine.is_open:
        return "opening"
    if machine.view.owner and not owner_lives:
        return "gone"
    if machine.view.owner or machine.plan:
        return "training" if machine.view.is_training else "restoring" if machine.plan else "opening"
    if machine.view.end_cause is None:
        return "idle"
    return "finished" if machine.view.end_cause == "finished" else "failed"


def needed_in_cluster(machine: RunMachine, wall_s: float) -> tuple[int, ...]:
    """Return the steps of needed checkpoints that would be lost with the cluster.

    These checkpoints are newer than all checkpoints on the storage path, pinned, or being uploaded. Other
    checkpoints that are only in the cluster are about to be retired.
    """
    lineage = machine.history.lineage()
    durable = next((c.seq for c in reversed(lineage) if c.level >= Level.DURABLE), -1)
    wanted = {c.id.attempt for c in lineage if c.seq > durable}
    wanted |= {drain.attempt for drain in machine.view.drains_underway if not drain.items}
    only = machine.view.in_cluster_only
    return tuple(c.step for c in only if c.id.attempt in wanted or pinned_by(c, wall_s))


def objections(host: RunHost, name: str, *, dead_owner: str, wall_s: float) -> tuple[str, ...]:
    """Return the reasons not to stop the service of an open run now.

    `dead_owner` is a launcher that was found dead; its run may stop, unless another launcher has opened a
    group since.
    """
    machine = host.machine
    owner_lives = not dead_owner or machine.view.owner != dead_owner
    state = run_state(machine, owner_lives=owner_lives)
    found = []
    if state in ("opening", "restoring", "training"):
        world_size = machine.plan.world_size if machine.plan is not None else 0
        found.append(f"run {name} is {state} on {f'{world_size} rank(s)' if world_size else 'its group'}")
    elif host.groups.is_wanted or host.nodes.is_wanted or host.is_recovering:
        found.append(f"run {name} is being opened")
    return (*found, *only_here(name, needed_in_cluster(machine, wall_s)))


def only_here(name: str, steps: Sequence[int]) -> tuple[str, ...]:
    """Return the objection of a run with needed checkpoints that are in the cluster only."""
    return (f"run {name} has {steps_text(steps)} in the cluster only",) if steps else ()


def steps_text(steps: Sequence[int], *, most: int = 10) -> str:
    """Return a text such as `steps 10, 20`, with the last `most` steps."""
    more = f"{len(steps) - most} more and " if len(steps) > most else ""
    return f"step{'s' if len(steps) > 1 else ''} {more}{', '.join(map(str, steps[-most:]))}"
