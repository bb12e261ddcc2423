"""The replica watch's rule: replicas that report different digests of the same bytes are a finding.

A finding changes no decision: the checkpoint is committed and training goes on. Its text is in the commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ray_ckpt.core.awaited import ranks_text
from ray_ckpt.types import Watched

MAX_NAMED = 4  # differences in the text of a finding; the log keeps the text in each commit
MAX_TEXT = 500  # characters of that text; names of tensors may be long


def merged(reports: Mapping[int, Iterable[Watched]]) -> tuple[Watched, ...]:
    """Return the reports of a node's ranks, by rank, with equal reports merged into one."""
    ranks: dict[Watched, list[int]] = {}
    for rank, found in sorted(reports.items()):
        for watched in found:
            ranks.setdefault(watched, []).append(rank)
    return tuple(replace(watched, ranks=tuple(where)) for watched, where in ranks.items())


def finding(reports: Mapping[str, Sequence[Watched]]) -> str:
    """Return the text about replicas that differ, from the reports by node; "" if all are equal.

    Reports of the same group are about the same bytes. More than half of at least 3 replicas outvote the
    others; else the text says that it is not known which are wrong.
    """
    groups: dict[str, list[tuple[str, Watched]]] = {}
    for node, found in sorted(reports.items()):
        for watched in found:
            groups.setdefault(watched.group, []).append((node, watched))
    texts = [text for _, members in sorted(groups.items()) for text in _differences(members)]
    if len(texts) > MAX_NAMED:
        texts = [*texts[:MAX_NAMED], f"{len(texts) - MAX_NAMED} more"]
    return "; ".join(texts)[:MAX_TEXT]


def _differences(members: Sequence[tuple[str, Watched]]) -> Iterable[str]:
    """Yield a text for each piece of a group of which its members report several digests."""
    names = next((watched.names for _, watched in members if watched.names), ())
    node_of = {rank: node for node, watched in members for rank in watched.ranks}
    for index in range(min(len(watched.digests) for _, watched in members)):
        votes: dict[str, list[int]] = {}
        for _, watched in members:
            votes.setdefault(watched.digests[index], []).extend(watched.ranks)
        if len(votes) == 1:
            continue
        name = names[index] if index < len(names) else "tensors whose names were not reported"
        sides = sorted((sorted(ranks) for ranks in votes.values()), key=lambda ranks: (-len(ranks), ranks))
        if len(sides[0]) * 2 > len(node_of) >= 3:
            wrong = tuple(sorted(rank for side in sides[1:] for rank in side))
            nodes = ", ".join(node[:12] for node in sorted({node_of[rank] for rank in wrong})[:MAX_NAMED])
            yield f"{name}: rank(s) {ranks_text(wrong)} on node(s) {nodes} differ from {len(sides[0])} others"
        else:
            groups = " and ".join(f"rank(s) {ranks_text(tuple(side))}" for side in sides[:MAX_NAMED])
            yield f"{name}: {groups} differ, no majority shows which is wrong"
