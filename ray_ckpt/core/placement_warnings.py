"""Warnings, once each, if a group's nodes cannot hold copies or parity as the options of the run say."""

from __future__ import annotations

from collections.abc import Iterator

from ray_ckpt.core.context import Context, names_of
from ray_ckpt.core.messages import Warn
from ray_ckpt.core.placement import crowded_domain, same_domain
from ray_ckpt.core.values import SessionPlan


def warn_of_placement(context: Context, plan: SessionPlan) -> Iterator[Warn]:
    """Yield a warning for each promise of the options that the plan of a new session does not keep."""
    yield from _warn_of_labels(context)
    if context.options.parity is not None:
        yield from _warn_of_groups(context, plan, *context.options.parity)
    else:
        yield from _warn_of_domains(context, plan)
        yield from _warn_of_few_copies(context, plan)


def _warn_of_labels(context: Context) -> Iterator[Warn]:
    """Warn if no live node has a label that the options name: it may be misspelt, or its nodes join later."""
    options, live = context.options, context.holders.live
    domain = options.failure_domain
    if domain not in ("auto", "none") and not any(context.domains.get(node) for node in live):
        yield from context.warn_once(
            f"failure_domain is {domain!r}, and no node has this label now: nodes count as independent, so "
            "all copies may be in one rack or zone."
        )
    if options.spare_nodes and not context.spares & live:
        yield from context.warn_once(
            f"spare_nodes is {options.spare_nodes!r}, and no node has this label now: checkpoints are copied "
            "to spare nodes when some join."
        )


def _warn_of_few_copies(context: Context, plan: SessionPlan) -> Iterator[Warn]:
    copies, num_live = min(len(n.holders) for n in plan.nodes), len(context.holders.live)
    if copies >= context.options.replicas:
        return
    if num_live == 1:
        yield from context.warn_once(
            "The cluster has one node, so no checkpoint has a copy on another: if the node is lost, "
            "training goes on from the newest one on the storage path. Set replicas=0 if it stays so.",
            is_expected=True,
        )
        return
    level = f"replicated on {copies} other node(s)" if copies else "local"
    able = f"{num_live} live node(s)"
    if label := context.options.replica_nodes:
        able = f"{len(context.may_hold)} live node(s) with the label {label}"
    yield from context.warn_once(
        f"Checkpoints are {level} until drained: {able} cannot hold {context.options.replicas} replica(s)."
    )


def _warn_of_domains(context: Context, plan: SessionPlan) -> Iterator[Warn]:
    """Warn if nodes have fewer copies inside or outside of their failure domain than `copies` asks for."""
    copies, lacking_in, lacking_out = context.options.copies, [], []
    for node in plan.nodes:
        num_inside = sum(same_domain(node.node_id, other, context.domains) for other in node.holders)
        if num_inside < copies.count("rack"):
            lacking_in.append(node.node_id)
        if len(node.holders) - num_inside < copies.count("spread"):
            lacking_out.append(node.node_id)
    for lacking, place, where, too_few in (
        (lacking_in, "rack", "in", "it has"),
        (lacking_out, "spread", "outside of", "there are"),
    ):
        if lacking:
            yield from context.warn_once(
                f"{len(lacking)} node(s), such as {names_of(lacking[:1])}, have fewer than "
                f"{copies.count(place)} copies {where} their failure domain: {too_few} too few nodes that "
                "may hold copies."
            )


def _warn_of_groups(context: Context, plan: SessionPlan, num_data: int, parity: int) -> Iterator[Warn]:
    """Warn if there are too few nodes for groups of that size, or if a failure domain has too many of one."""
    if not plan.groups:
        yield from context.warn_once(
            f"Checkpoints are local until drained: parity that allows for {parity} lost node(s) needs "
            f"{parity + 1} training nodes, and there are {len(plan.nodes)}. Set parity=None for copies."
        )
        return
    if domain := crowded_domain(plan.groups, [n.node_id for n in plan.nodes], context.domains):
        yield from context.warn_once(
            f"The loss of failure domain {domain} loses checkpoints until they are drained: it has more "
            f"than {parity} node(s) of a parity group. Use replicas, or nodes of more domains."
        )
    if (least := min(group.num_data for group in plan.groups)) < num_data:
        times = f"{1 + parity / least:.2f} times the state"
        yield from context.warn_once(
            f"{len(plan.nodes)} training nodes do not fill groups of {num_data} + {parity}: the smallest "
            f"parity group is of {least} + {parity}, whose saves take {times}.",
            is_expected=True,
        )
