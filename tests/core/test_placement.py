"""Placement of replicas: never itself, no doubles, as many as there can be, in closed groups."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ray_ckpt.core.placement import place_replicas

clusters = st.tuples(st.integers(1, 40), st.integers(0, 10), st.integers(0, 4))


def place(cluster: tuple[int, int, int]) -> tuple[list[str], list[str], dict[str, tuple[str, ...]]]:
    num_training, num_idle, replicas = cluster
    training = [f"t{i:02d}" for i in range(num_training)]
    idle = [f"i{i:02d}" for i in range(num_idle)]
    placed = place_replicas(training_nodes=training, live_nodes={*training, *idle}, replicas=replicas)
    return training, idle, dict(placed)


@given(clusters)
def test_every_node_gets_as_many_other_holders_as_there_can_be(cluster: tuple[int, int, int]) -> None:
    training, idle, placed = place(cluster)
    assert list(placed) == training
    for node, holders in placed.items():
        assert node not in holders
        assert len(set(holders)) == len(holders) == min(cluster[2], len(training) + len(idle) - 1)


@given(clusters)
def test_groups_are_closed_and_idle_nodes_help_only_where_needed(cluster: tuple[int, int, int]) -> None:
    training, idle, placed = place(cluster)
    replicas = cluster[2]
    if len(training) > replicas:
        assert not {h for holders in placed.values() for h in holders} & set(idle)
    whole = len(training) // (replicas + 1) - 1  # groups before the last, which takes the remainder
    for first in range(0, max(whole, 0) * (replicas + 1), replicas + 1):
        group = set(training[first : first + replicas + 1])
        for node in group:
            assert {node, *placed[node]} == group


@given(clusters)
def test_copies_are_spread_evenly(cluster: tuple[int, int, int]) -> None:
    """Among training nodes no one holds more than it gives away, unless idle ones help."""
    training, _, placed = place(cluster)
    if len(training) > cluster[2]:
        held = [sum(node in holders for holders in placed.values()) for node in training]
        assert set(held) == {cluster[2]}


def test_the_examples() -> None:
    def placed(training: str, live: str, replicas: int) -> dict[str, str]:
        found = place_replicas(training_nodes=list(training), live_nodes=set(live), replicas=replicas)
        return {node: "".join(holders) for node, holders in found.items()}

    assert placed("ab", "ab", 1) == {"a": "b", "b": "a"}
    assert placed("abcde", "abcde", 1) == {"a": "b", "b": "a", "c": "d", "d": "e", "e": "c"}
    assert placed("ab", "abyz", 2) == {"a": "by", "b": "ya"}
    assert placed("a", "az", 1) == {"a": "z"}
    assert placed("a", "a", 3) == {"a": ""}
    assert placed("aab", "ab", 1) == {"a": "b", "b": "a"}
    assert placed("", "ab", 1) == {}
