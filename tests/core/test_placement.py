"""Placement of replicas: never itself, no doubles, as many as there can be, in closed groups."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ckpt.core.placement import domain_of, place_replicas

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


# -- failure domains and nodes that leave ------------------------------------------------------------


@dataclass(frozen=True)
class Fleet:
    training: list[str]
    live: set[str]
    draining: set[str]
    domains: dict[str, str]
    replicas: int

    def place(
        self, near: int = 0, num_outside: int = 1, labelled: set[str] | None = None
    ) -> dict[str, tuple[str, ...]]:
        return dict(
            place_replicas(
                training_nodes=self.training,
                live_nodes=self.live,
                replicas=self.replicas,
                domains=self.domains,
                draining=self.draining,
                near=near,
                num_outside=num_outside,
                labelled=labelled,
            )
        )

    def domain(self, node: str) -> str:
        return domain_of(node, self.domains)


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    """Nodes in racks of any size, some without a rack, some idle, draining or dead."""
    racks = draw(st.lists(st.sampled_from(["r1", "r2", "r3", "r4", ""]), min_size=1, max_size=30))
    nodes = [f"n{i:02d}" for i in range(len(racks))]
    kinds = draw(st.lists(st.sampled_from("ttttid-"), min_size=len(nodes), max_size=len(nodes)))
    training = [n for n, kind in zip(nodes, kinds, strict=True) if kind in "td-"]
    return Fleet(
        training=draw(st.permutations(training)),
        live={n for n, kind in zip(nodes, kinds, strict=True) if kind != "-"},
        draining={n for n, kind in zip(nodes, kinds, strict=True) if kind == "d"},
        domains=dict(zip(nodes, racks, strict=True)),
        replicas=draw(st.integers(0, 4)),
    )


@given(fleets())
def test_nodes_that_leave_or_are_dead_hold_nothing(fleet: Fleet) -> None:
    able = fleet.live - fleet.draining
    placed = fleet.place()
    assert list(placed) == fleet.training
    assert placed == fleet.place(), "the same every time"
    for node, holders in placed.items():
        assert node not in holders
        assert set(holders) <= able
        assert len(set(holders)) == len(holders) == min(fleet.replicas, len(able - {node}))


@given(fleets())
def test_no_holder_is_overloaded(fleet: Fleet) -> None:
    """A group has at most 2 * replicas + 1 members; nodes that leave are shared out over all others."""
    held = Counter(h for holders in fleet.place().values() for h in holders)
    leaving = [n for n in fleet.training if n not in fleet.live - fleet.draining]
    if held:
        assert max(held.values()) <= 2 * fleet.replicas + len(leaving)


@given(fleets())
def test_a_copy_is_in_another_domain_wherever_a_group_has_one(fleet: Fleet) -> None:
    """Two domains or more, and each small enough to give every group at most one node: one may be lost."""
    members = [n for n in fleet.training if n in fleet.live - fleet.draining]
    size = fleet.replicas + 1
    sizes = Counter(map(fleet.domain, members))
    whole = len(members) % size == 0 and members
    if fleet.replicas and whole and max(sizes.values()) <= len(members) // size:
        placed = fleet.place()
        for node in members:
            domains = [fleet.domain(n) for n in (node, *placed[node])]
            assert len(set(domains)) == size


@given(st.integers(1, 4), st.integers(0, 4), st.integers(1, 9), st.randoms(use_true_random=False))
def test_with_equal_racks_the_loss_of_one_loses_no_data(
    replicas: int, more_racks: int, rack_size: int, chance: object
) -> None:
    num_racks = replicas + 1 + more_racks
    domains = {f"n{i:03d}": f"r{i % num_racks}" for i in range(num_racks * rack_size)}
    training = sorted(domains)
    chance.shuffle(training)  # type: ignore[attr-defined]
    placed = place_replicas(training_nodes=training, live_nodes=training, replicas=replicas, domains=domains)
    for node, holders in placed.items():
        assert len(holders) == replicas
        assert {domains[h] for h in holders} - {domains[node]}
        if num_racks * rack_size % (replicas + 1) == 0:
            assert len({domains[n] for n in (node, *holders)}) == replicas + 1


def test_a_large_rack_is_spread_over_the_groups() -> None:
    domains = dict.fromkeys("abcd", "big") | dict.fromkeys("ef", "r2") | dict.fromkeys("gh", "r3")
    placed = place_replicas(training_nodes="abcdefgh", live_nodes="abcdefgh", replicas=1, domains=domains)
    assert all(domains[node] != domains[holder] for node, (holder,) in placed.items())


def test_two_racks_and_a_remainder_still_survive_a_rack() -> None:
    domains = {"a": "r1", "b": "r2", "c": "r2"}
    placed = place_replicas(training_nodes="abc", live_nodes="abc", replicas=1, domains=domains)
    assert placed == {"a": ("c",), "b": ("a",), "c": ("a",)}


def test_idle_nodes_of_another_rack_fill_a_group_first() -> None:
    domains = {"a": "r1", "x": "r1", "y": "r2"}
    placed = place_replicas(training_nodes="a", live_nodes="axy", replicas=1, domains=domains)
    assert placed == {"a": ("y",)}


def test_the_nodes_that_fill_a_group_are_of_different_racks_too() -> None:
    domains = {"a": "r1", "x": "r2", "y": "r2", "z": "r3"}
    placed = place_replicas(training_nodes="a", live_nodes="axyz", replicas=2, domains=domains)
    assert placed == {"a": ("x", "z")}


def test_the_copies_of_leaving_nodes_are_shared_out() -> None:
    placed = place_replicas(training_nodes="abcdef", live_nodes="abcdef", replicas=1, draining=set("bdef"))
    assert placed == {"a": ("c",), "b": ("a",), "c": ("a",), "d": ("c",), "e": ("a",), "f": ("c",)}


@pytest.mark.parametrize(("num_domains", "replicas"), [(2, 2), (3, 3)])
def test_the_first_holder_is_outside_of_the_domain(num_domains: int, replicas: int) -> None:
    """It gets the states of steps for a salvage, and the first copy."""
    nodes = [f"n{at:02d}" for at in range(12)]
    domains = {node: f"r{at % num_domains}" for at, node in enumerate(nodes)}
    placed = place_replicas(training_nodes=nodes, live_nodes=nodes, replicas=replicas, domains=domains)
    assert all(domains[holders[0]] != domains[node] for node, holders in placed.items())


def test_a_holder_that_was_added_outside_of_the_domain_is_the_first() -> None:
    domains = dict(zip("abcdefgh", "AABBCCCC", strict=True))
    placed = place_replicas(training_nodes="abcdefgh", live_nodes="abcdefgh", replicas=2, domains=domains)
    assert all(domains[holders[0]] != domains[node] for node, holders in placed.items())


def test_ten_thousand_nodes_are_placed() -> None:
    nodes = [f"n{i:05d}" for i in range(10_000)]
    domains = {node: f"r{i // 40}" for i, node in enumerate(nodes)}
    placed = place_replicas(training_nodes=nodes, live_nodes=nodes, replicas=2, domains=domains)
    assert all(len({domains[n] for n in (node, *placed[node])}) == 3 for node in nodes)


# -- options `replica_nodes` and `copies` ------------------------------------------------------------


@given(fleets(), st.integers(0, 4), st.integers(1, 4), st.data())
def test_every_node_gets_the_holders_that_the_options_name(
    fleet: Fleet, near: int, num_outside: int, data: st.DataObject
) -> None:
    """With or without labelled nodes: as many as there can be, and as many of them near as there can be."""
    nodes = sorted(fleet.domains)
    labelled = data.draw(st.none() | st.sets(st.sampled_from(nodes)))
    near = min(near, fleet.replicas)
    placed = fleet.place(near=near, num_outside=num_outside, labelled=labelled)
    able = fleet.live - fleet.draining
    able = able if labelled is None else able & labelled
    for node in fleet.training:
        holders, others = placed[node], able - {node}
        assert set(holders) <= others
        assert len(set(holders)) == len(holders) == min(fleet.replicas, len(others))
        inside = {n for n in others if fleet.domains[node] and fleet.domain(n) == fleet.domain(node)}
        assert len(inside.intersection(holders)) >= min(near, len(inside))
        held = Counter(holder for found in placed.values() for holder in found)
        most = max([2 * fleet.replicas, *held.values()])
        outside = {n for n in others - inside if held[n] < most}
        wanted = fleet.replicas - near if near else min(fleet.replicas, num_outside)
        assert len(set(holders) - inside) >= wanted or not outside - set(holders), (
            "none is left that could hold more"
        )


@given(st.integers(1, 3), st.integers(0, 5), st.integers(1, 5), st.randoms(use_true_random=False))
def test_one_copy_in_the_rack_and_the_others_outside(
    replicas: int, more_racks: int, half: int, chance: Random
) -> None:
    """Equal racks: a rack's loss leaves a copy of all, and so does any other loss of `replicas` nodes."""
    num_racks = replicas + 1 + more_racks
    domains = {f"n{i:03d}": f"r{i % num_racks}" for i in range(num_racks * half * (replicas + 1))}
    training = sorted(domains)
    chance.shuffle(training)
    placed = place_replicas(
        training_nodes=training, live_nodes=training, replicas=replicas, domains=domains, near=1
    )
    for node, holders in placed.items():
        assert [domains[holder] == domains[node] for holder in holders] == [True] + [False] * (replicas - 1)
    held = Counter(holder for holders in placed.values() for holder in holders)
    assert max(held.values()) <= 2 * replicas


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 3))
def test_labelled_nodes_hold_equal_shares_in_few_sets(
    num_training: int, num_labelled: int, replicas: int
) -> None:
    training, labelled = (
        [f"t{i:02d}" for i in range(num_training)],
        {f"s{i:02d}" for i in range(num_labelled)},
    )
    placed = place_replicas(
        training_nodes=training, live_nodes={*training, *labelled}, replicas=replicas, labelled=labelled
    )
    held = Counter(holder for holders in placed.values() for holder in holders)
    if num_labelled >= replicas and num_labelled % replicas == 0:
        assert max(held.values()) - min((held[n] for n in labelled), default=0) <= 1
        assert len({frozenset(holders) for holders in placed.values()}) <= num_labelled // replicas
    assert set(held) <= labelled


def test_labelled_nodes_of_other_racks_hold_the_copies() -> None:
    domains = {f"{kind}{rack}": f"r{rack}" for kind in "abs" for rack in range(3)}
    training = [node for node in domains if node[0] != "s"]
    placed = place_replicas(
        training_nodes=training,
        live_nodes=domains,
        replicas=1,
        domains=domains,
        labelled={"s0", "s1", "s2"},
    )
    assert all(domains[node] != domains[holder] for node, (holder,) in placed.items())
    assert set(Counter(placed.values()).values()) == {2}
    placed = place_replicas(
        training_nodes=training,
        live_nodes=domains,
        replicas=2,
        domains=domains,
        near=1,
        labelled={"s0", "s1", "s2"},
    )
    for node, (first, second) in placed.items():
        assert domains[first] == domains[node] != domains[second]


def test_a_set_with_the_node_itself_is_the_last_choice() -> None:
    domains = dict.fromkeys("abcd", "r1")  # sets: a and b, c and d
    placed = place_replicas(
        training_nodes="a", live_nodes="abcd", replicas=2, domains=domains, labelled=set("abcd")
    )
    assert placed == {"a": ("c", "d")}


def test_sets_outside_of_a_large_rack_share_its_load() -> None:
    training = [f"t{i}" for i in range(6)]
    domains = dict.fromkeys(training, "r0") | {f"s{i}": f"r{i}" for i in range(4)}
    placed = place_replicas(
        training_nodes=training,
        live_nodes=domains,
        replicas=1,
        domains=domains,
        labelled={"s0", "s1", "s2", "s3"},
    )
    assert Counter(placed.values()) == {("s1",): 2, ("s2",): 2, ("s3",): 2}


@pytest.mark.slow
def test_ten_thousand_nodes_are_placed_by_label_and_rack() -> None:
    nodes = [f"n{i:05d}" for i in range(10_000)]
    domains = {node: f"r{i // 40}" for i, node in enumerate(nodes)}
    options = {"live_nodes": nodes, "replicas": 2, "domains": domains, "near": 1}
    for labelled in (None, set(nodes[::4]), set(nodes)):
        placed = place_replicas(training_nodes=nodes, labelled=labelled, **options)  # type: ignore[arg-type]
        for node, holders in placed.items():
            assert [domains[holder] == domains[node] for holder in holders] == [True, False]
