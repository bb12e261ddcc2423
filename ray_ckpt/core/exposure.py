"""Exposure: the number of steps that would be lost if a node of the group died now, for each node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Literal

from ray_ckpt.core.holders import Holders
from ray_ckpt.core.values import SessionNode
from ray_ckpt.types import CheckpointInfo, Exposure, Level

NOWHERE = ""  # stands for the holder of a fragment that no live node holds


def exposure(
    plan_nodes: Sequence[SessionNode], lineage: Sequence[CheckpointInfo], holders: Holders, step: int
) -> tuple[Exposure, ...]:
    """Return for each node the newest checkpoint that would be left if the node died.

    `step` is the last completed step. Each checkpoint is visited once, newest first, until a checkpoint is
    found for every node.
    """
    found: dict[str, Exposure] = {}
    waiting = list(plan_nodes)
    for checkpoint in reversed(lineage):
        if not waiting:
            break
        alone = holders.fatal(checkpoint.id.attempt, checkpoint.num_nodes)
        only = {index: nodes or {NOWHERE} for index, nodes in alone.items()}
        fatal = set().union(*only.values())  # nodes whose loss alone loses a fragment on nodes
        at_risk = fatal
        if checkpoint.level >= Level.DURABLE:
            bad = holders.bad_remote.get(checkpoint.id.attempt, set())
            at_risk = set().union(*(only[index] for index in bad & only.keys()))
        left = [n for n in waiting if not at_risk & {NOWHERE, n.node_id}]
        for node in left:
            found[node.node_id] = Exposure(
                node_id=node.node_id,
                step=checkpoint.step,
                tier=_tier(checkpoint, only, fatal, node, len(plan_nodes)),
                steps_at_risk=max(step - checkpoint.step, 0),
            )
        waiting = [n for n in waiting if n.node_id not in found]
    for node in waiting:
        found[node.node_id] = Exposure(node_id=node.node_id, step=None, tier=None, steps_at_risk=step)
    return tuple(found[n.node_id] for n in plan_nodes)


def _tier(
    checkpoint: CheckpointInfo,
    only: Mapping[int, Set[str]],
    fatal: Set[str],
    node: SessionNode,
    num_nodes: int,
) -> Literal["peer", "remote"]:
    """Return the tier that still has the node's part; a group of another size may need any part."""
    needed = only.get(node.node_index, frozenset())
    if checkpoint.num_nodes != num_nodes:
        needed = fatal
    return "remote" if needed & {NOWHERE, node.node_id} else "peer"
