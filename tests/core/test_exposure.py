"""Exposure: for every node what its death would cost, against the slow definition."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from ray_ckpt.core.exposure import exposure
from ray_ckpt.core.holders import Holders
from ray_ckpt.core.values import SessionNode
from ray_ckpt.types import CheckpointInfo, Exposure, Level
from tests.core.records import checkpoint, holders_of
from tests.support.examples import every_few


def group(nodes: Sequence[str]) -> tuple[SessionNode, ...]:
    return tuple(
        SessionNode(node_id=node, node_index=index, ranks=(index,), holders=())
        for index, node in enumerate(nodes)
    )


def lines(found: Sequence[Exposure]) -> list[str]:
    return [f"{e.node_id}: {e.step} from {e.tier}, {e.steps_at_risk} steps" for e in found]


def test_a_node_costs_what_only_it_holds() -> None:
    lineage = [
        checkpoint(10, num_nodes=2, level=Level.DURABLE),
        checkpoint(20, num_nodes=2),
        checkpoint(30, num_nodes=2),
    ]
    holders = holders_of("ab", {10: ("a", ""), 20: ("ab", "ab"), 30: ("ab", "b")})
    assert lines(exposure(group("ab"), lineage, holders, 34)) == [
        "a: 30 from peer, 4 steps",
        "b: 20 from peer, 14 steps",
    ]


def test_what_is_on_the_storage_path_only_comes_from_there() -> None:
    lineage = [checkpoint(10, num_nodes=2, level=Level.DURABLE)]
    holders = holders_of("ab", {10: ("a", "ab")})
    assert lines(exposure(group("ab"), lineage, holders, 12)) == [
        "a: 10 from remote, 2 steps",
        "b: 10 from peer, 2 steps",
    ]


def test_what_is_damaged_on_the_storage_path_is_as_good_as_not_there() -> None:
    lineage = [
        checkpoint(10, num_nodes=2, level=Level.DURABLE),
        checkpoint(20, num_nodes=2, level=Level.DURABLE),
    ]
    holders = holders_of("ab", {10: ("", ""), 20: ("ab", "b")})
    holders.bad_remote[lineage[1].id.attempt] = {0, 1}
    assert lines(exposure(group("ab"), lineage, holders, 22)) == [
        "a: 20 from peer, 2 steps",
        "b: 10 from remote, 12 steps",
    ]


def test_an_intact_part_on_the_storage_path_counts_while_another_one_is_damaged() -> None:
    lineage = [
        checkpoint(10, num_nodes=2, level=Level.DURABLE),
        checkpoint(20, num_nodes=2, level=Level.DURABLE),
    ]
    holders = holders_of("ab", {10: ("", ""), 20: ("a", "")})
    holders.bad_remote[lineage[1].id.attempt] = {0}
    assert lines(exposure(group("ab"), lineage, holders, 22)) == [
        "a: 10 from remote, 12 steps",
        "b: 20 from remote, 2 steps",
    ]


def test_without_a_checkpoint_all_steps_are_at_risk() -> None:
    holders = holders_of("ab", {10: ("a", "b")})
    assert lines(exposure(group("ab"), [checkpoint(10, num_nodes=2)], holders, 12)) == [
        "a: None from None, 12 steps",
        "b: None from None, 12 steps",
    ]
    assert exposure(group("a"), [], Holders(), 0) == (
        Exposure(node_id="a", step=None, tier=None, steps_at_risk=0),
    )
    assert exposure((), [checkpoint(10)], holders, 12) == ()


def test_after_a_change_of_size_any_part_may_be_needed() -> None:
    lineage = [checkpoint(10, num_nodes=3, level=Level.DURABLE)]
    holders = holders_of("ab", {10: ("ab", "ab", "a")})
    assert [e.tier for e in exposure(group("ab"), lineage, holders, 12)] == ["remote", "peer"]


def by_definition(
    node: SessionNode, num_nodes: int, lineage: Sequence[CheckpointInfo], holders: Holders, step: int
) -> Exposure:
    """Take the node away and look at every fragment of every checkpoint."""
    for c in reversed(lineage):
        left = [holders.of(c.id.attempt, i) & holders.live - {node.node_id} for i in range(c.num_nodes)]
        if all(left) or c.level >= Level.DURABLE:
            mine = left[node.node_index] if c.num_nodes == num_nodes else all(left)
            tier = "peer" if mine else "remote"
            return Exposure(
                node_id=node.node_id,
                step=c.step,
                tier="peer" if tier == "peer" else "remote",
                steps_at_risk=step - c.step,
            )
    return Exposure(node_id=node.node_id, step=None, tier=None, steps_at_risk=step)


@pytest.mark.parametrize("seed", every_few(range(100)))
def test_any_cluster_as_by_definition(seed: int) -> None:
    random = Random(seed)
    nodes = [f"n{i}" for i in range(random.randint(1, 6))]
    lineage, held = [], {}
    for step in range(10, 10 * random.randint(1, 6), 10):
        num_nodes = random.choice([len(nodes), len(nodes), random.randint(1, 6)])
        level = random.choice([Level.LOCAL, Level.LOCAL, Level.REPLICATED, Level.DURABLE])
        lineage.append(checkpoint(step, num_nodes=num_nodes, level=level))
        held[step] = [random.sample(nodes, min(random.randint(0, 3), len(nodes))) for _ in range(num_nodes)]
    holders = holders_of(set(nodes), held)
    found = exposure(group(nodes), lineage, holders, 99)
    expected = [by_definition(n, len(nodes), lineage, holders, 99) for n in group(nodes)]
    assert list(found) == expected, seed


def test_a_thousand_nodes_that_are_all_exposed_are_looked_up_once_per_checkpoint() -> None:
    class Counting(Holders):
        calls = 0

        def of(self, attempt: str, node_index: int) -> frozenset[str]:
            self.calls += 1
            return super().of(attempt, node_index)

    nodes = [f"n{i:04d}" for i in range(1000)]
    lineage = [checkpoint(step, num_nodes=1000) for step in (10, 20, 30, 40)]
    holders = Counting()
    holders.live = frozenset(nodes)
    for c in lineage:
        for index, node in enumerate(nodes):
            holders.add(c.id.attempt, index, node)
    assert all(e.step is None for e in exposure(group(nodes), lineage, holders, 99))
    assert holders.calls == 4 * 1000
