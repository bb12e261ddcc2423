"""Who holds whose copies: fixed groups of nodes, so that few pairs of losses are fatal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def place_replicas(
    *, training_nodes: Sequence[str], live_nodes: Iterable[str], replicas: int
) -> Mapping[str, tuple[str, ...]]:
    """For each training node the nodes that hold its copies, never itself.

    Training nodes form groups of `replicas + 1` in the given order, and each holds the others' copies; a
    remainder joins the last group. Groups lose data only if a whole group is lost, where a ring loses it
    with any `replicas + 1` neighbours (GEMINI, SOSP 2023, section 4). With fewer training nodes than a
    group needs, idle live nodes fill it up; the result has fewer holders where there are not enough nodes.
    """
    nodes = list(dict.fromkeys(training_nodes))
    idle = sorted(set(live_nodes) - set(nodes))
    size = replicas + 1
    starts = list(range(0, max(len(nodes) - size, 0) + 1, size)) or [0]
    groups = [nodes[a:b] for a, b in zip(starts, [*starts[1:], len(nodes)], strict=True)]
    placed: dict[str, tuple[str, ...]] = {}
    for group in groups:
        ring = group if len(group) >= size else group + idle[: size - len(group)]
        for node in group:
            at = ring.index(node)
            placed[node] = tuple((ring[at + 1 :] + ring[:at])[:replicas])
    return placed
