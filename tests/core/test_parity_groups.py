"""Parity groups: who makes which file, what a commit promises, and what is made again after a loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_ckpt.core import messages as m
from ray_ckpt.core.drain import COMPUTED_S
from ray_ckpt.core.holders import Holders
from ray_ckpt.core.parity_files import tolerance
from ray_ckpt.core.placement import crowded_domain, place_groups
from ray_ckpt.core.repair import RETRY_S
from ray_ckpt.core.values import GroupPlaces, StoredParity
from ray_ckpt.errors import ConfigError
from ray_ckpt.types import Level, ParityGroup
from tests.core.driver import Harness, of, one

NODES = "abcd"


def harness(nodes: str = NODES, **options: Any) -> Harness:
    found = Harness(nodes, **{"parity": (2, 2), "remote_every": 1000, **options})
    found.open(NODES)
    return found


def coded(code: m.Code, *, error: str | None = None) -> m.CodeEnded:
    return m.CodeEnded(
        attempt=code.attempt,
        node_index=code.node_index,
        node_id=code.node_id,
        is_parity=code.is_parity,
        group=code.places.group,
        error=error,
    )


def save(run: Harness, step: int, *, failed: str = "") -> tuple[m.Effect, ...]:
    """Save a step; the parity files of the nodes in `failed` cannot be made."""
    codes = of(run.save(step), m.Code)
    for code in codes:
        if code.node_id not in failed:
            keep(run, code)
    events = (coded(code, error="disk full" if code.node_id in failed else None) for code in codes)
    return run.feed(*events)


def keep(run: Harness, code: m.Code) -> None:
    """Put the parity file of an order on its node's disk."""
    found = StoredParity(attempt=code.attempt, node_index=code.node_index, group=code.places.group)
    run.disks[code.node_id].parities.append(found)


# -- placement ---------------------------------------------------------------------------------------


@given(
    nodes=st.integers(1, 60),
    num_data=st.integers(2, 8),
    parity=st.integers(1, 2),
    racks=st.integers(1, 12),
)
def test_groups_are_even_and_spread_a_domain_as_far_as_they_can(
    nodes: int, num_data: int, parity: int, racks: int
) -> None:
    names = [f"n{at}" for at in range(nodes)]
    domains = {name: f"rack-{at % racks}" for at, name in enumerate(names)}
    groups = place_groups(names, num_data=num_data, parity=parity, domains=domains)
    assert bool(groups) == (nodes > parity)
    if groups:
        sizes = [group.size for group in groups]
        assert sorted(at for group in groups for at in group.members) == list(range(nodes))
        assert max(sizes) - min(sizes) <= 1 and min(sizes) > parity
        assert max(sizes) <= num_data + parity or min(sizes) < 2 * (parity + 1)
        for rack, total in Counter(domains.values()).items():
            for group in groups:
                count = sum(domains[names[at]] == rack for at in group.members)
                assert count <= -(-total // len(groups))


def test_a_domain_with_too_many_nodes_of_a_group_is_named() -> None:
    names = list("abcdefgh")
    racks = {name: "left" if name < "e" else "right" for name in names}
    groups = place_groups(names, num_data=6, parity=2, domains=racks)
    assert crowded_domain(groups, names, racks) == "left"
    assert crowded_domain(groups, names, {name: f"rack-{at // 2}" for at, name in enumerate(names)}) == ""
    assert crowded_domain(groups, names, {}) == ""


@pytest.mark.parametrize("parity", [(1, 1), (2, 3), (33, 2), (6,), "6+2", (6, 2, 1), (True, 1)])
def test_a_parity_that_cannot_be_is_refused(parity: object) -> None:
    with pytest.raises(ConfigError, match="parity is"):
        Harness(parity=parity)
    with pytest.raises(ConfigError, match="both set"):
        Harness(parity=(6, 2), replicas=2)


def test_too_few_nodes_and_crowded_domains_are_warned_of() -> None:
    run = Harness("ab", parity=(2, 2))
    assert any("needs 3 training nodes, and there are 2" in w.text for w in of(run.open("ab"), m.Warn))
    run = Harness("abcd", parity=(2, 1))
    run.feed(m.NodesSeen(live=frozenset("abcd"), domains=dict.fromkeys("abc", "left")))
    assert any("failure domain left" in w.text for w in of(run.open("abcd"), m.Warn))


# -- saves -------------------------------------------------------------------------------------------


def test_a_group_codes_when_all_of_its_nodes_have_stored_and_the_commit_waits_for_it() -> None:
    run = harness()
    attempt = run.attempt(10)
    assert all(not node.holders for node in run.plan.nodes)
    effects = run.feed(*(run.stored(attempt, node) for node in "abc"))
    assert not of(effects, m.Code) and not of(effects, m.Replicate)
    codes = of(run.feed(run.stored(attempt, "d")), m.Code)
    assert [(code.node_id, code.node_index, code.is_parity) for code in codes] == [
        (node, at, True) for at, node in enumerate(NODES)
    ]
    assert codes[0].places.fragments == (("a",), ("b",), ("c",), ("d",))
    assert not of(run.feed(run.stored(attempt, "d")), m.Code), "a report that comes twice"
    assert not of(run.feed(*map(coded, codes[:3])), m.NotifyOutcome)
    outcome = one(run.feed(coded(codes[3])), m.NotifyOutcome)
    assert outcome.level is Level.REPLICATED
    assert run.checkpoint(attempt).replicas == 2


@pytest.mark.parametrize(("failed", "replicas"), [("", 2), ("a", 1), ("ab", 0), ("abcd", 0)])
def test_a_commit_promises_what_the_parity_files_that_were_made_allow(failed: str, replicas: int) -> None:
    run = harness()
    save(run, 10, failed=failed)
    found = run.checkpoint(run.attempt(10))
    assert found.replicas == replicas
    assert found.level is (Level.REPLICATED if replicas else Level.LOCAL)


def test_a_node_that_dies_while_its_group_codes_lowers_the_promise() -> None:
    run = harness()
    codes = of(run.save(10), m.Code)
    run.feed(*map(coded, codes[:3]))
    run.lose("d")
    assert run.checkpoint(run.attempt(10)).replicas == 1
    lost = harness()
    lost.save(10)
    lost.lose("d")
    assert lost.attempt(10).attempt not in lost.machine.history.checkpoints, "nothing can compute its part"


def test_without_an_answer_the_commit_is_made_in_time_and_promoted_later() -> None:
    run = harness()
    codes = of(run.save(10), m.Code)
    run.tick(run.options.goal_timeout_s + 1)
    assert run.checkpoint(run.attempt(10)).level is Level.LOCAL
    run.feed(*map(coded, codes))
    found = run.checkpoint(run.attempt(10))
    assert (found.level, found.replicas) == (Level.REPLICATED, 2)


def test_a_late_report_does_not_count_the_copies_of_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = "".join(map(chr, range(ord("A"), ord("A") + 40)))
    run = Harness(nodes, parity=(2, 2), remote_every=1000)
    run.open(nodes)
    codes = of(run.save(10), m.Code)
    run.tick(run.options.goal_timeout_s + 1)
    counted = Counter[ParityGroup]()

    def count(places: GroupPlaces) -> int:
        counted[places.group] += 1
        return tolerance(places)

    monkeypatch.setattr("ray_ckpt.core.holders.tolerance", count)
    run.feed(*map(coded, codes))
    assert run.checkpoint(run.attempt(10)).replicas == 2
    assert len(counted) == 10 and counted.total() < 3 * len(codes)


def test_a_restarted_coordinator_orders_only_what_is_missing() -> None:
    run = harness()
    codes = of(run.save(10), m.Code)
    attempt, plan = run.attempt(10), run.plan
    run.start_coordinator()
    for code in codes[:2]:
        keep(run, code)
    effects = run.feed(m.GroupRecovered(plan=plan, inventories=run.inventories()))
    again = of(effects, m.Code)
    assert [code.node_id for code in again] == ["c", "d"]
    run.feed(*map(coded, again))
    assert run.checkpoint(attempt).replicas == 2


def test_parity_of_a_dropped_save_is_deleted() -> None:
    run = harness()
    codes = of(run.save(10), m.Code)
    run.lose("d")
    outcome = one(run.feed(coded(codes[0])), m.NotifyOutcome)
    assert outcome.error is not None and outcome.nodes == ("a",)


# -- losses ------------------------------------------------------------------------------------------


def test_a_group_restores_what_can_be_computed_and_no_more() -> None:
    for lost in combinations(NODES, 2):
        run = harness("abcdef", inventory_wait_s=0.0)
        save(run, 10)
        run.lose(*lost)
        run.open("ef")
        resume = run.plan.resume
        assert resume is not None and resume.checkpoint.step == 10
        (places,) = resume.groups
        assert [not held for held in places.fragments] == [node in lost for node in NODES]
    run = harness("abcdef", inventory_wait_s=0.0)
    save(run, 10)
    run.lose("a", "b", "c")
    run.feed(run.group("ef"))
    run.tick(1.0)
    assert any(isinstance(effect, m.Fail) for effect in run.transcript)


def test_a_lost_member_is_made_again_before_its_parity() -> None:
    run = harness("abcdef")
    save(run, 10)
    effects = [*run.lose("b"), *run.tick(2.0)]
    code = one(effects, m.Code)
    assert (code.node_index, code.is_parity) == (1, False) and code.node_id in "ef"
    assert not of(effects, m.Replicate)
    assert not of(run.feed(coded(code, error="a peer died")), m.Code)
    again = one([*run.tick(RETRY_S / 2), *run.tick(RETRY_S)], m.Code)
    assert again.node_id != code.node_id, "the node that failed is the last to be tried again"
    parity = one([*run.feed(coded(again)), *run.tick(2.0)], m.Code)
    assert (parity.node_index, parity.node_id, parity.is_parity) == (1, again.node_id, True)
    run.feed(coded(parity))
    assert not of(run.tick(2.0), m.Code) and run.machine.view.copies_missing == 0
    run.lose("a", again.node_id)
    assert run.machine.view.parity_groups(code.attempt.attempt)[0].fragments[2] == ("c",)
    assert run.machine.view.exposure()


def test_a_drain_waits_a_while_for_a_member_that_may_be_computed() -> None:
    """It waits while the next group opens, too; but repair needs a group, and may not come to an old save."""
    run = harness("abcdef", remote_every=1)
    for drain in of(save(run, 10), m.Drain):
        if drain.node_index != 1:
            run.drained(drain)
    run.lose("b")
    run.feed(run.group("acde"))
    for seconds in (0.0, COMPUTED_S - 1.0):
        run.tick(seconds)
        assert [drain.step for drain in run.machine.view.drains_underway] == [10]
    run.tick(2.0)
    assert not run.machine.view.drains_underway
    assert any("Step 10 did not reach the storage path" in w.text for w in of(run.transcript, m.Warn))


def test_drains_that_only_wait_for_repair_let_others_pass() -> None:
    """Two places are all there is, and repair does not come to checkpoints that are off the lineage."""
    run = harness("abcdef", inventory_wait_s=0.0, keep_last=10)
    for step in (10, 20, 30):
        save(run, step)
    pinned = [run.attempt(step) for step in (20, 30)]
    for attempt in pinned:
        run.feed(m.PinRequested(token="pin", attempt=attempt.attempt, owner="me", expires_at_s=None))
    run.open("abcd", resume="step:10")
    run.lose("b")
    run.open("acde")
    for attempt in pinned:
        for drain in of(run.feed(m.DrainRequested(token="want", attempt=attempt.attempt)), m.Drain):
            run.drained(drain)
    assert [drain.fragments_done for drain in run.machine.view.drains_underway] == [3, 3]
    save(run, 40)
    last = run.attempt(40)
    effects = run.feed(m.DrainRequested(token="want", attempt=last.attempt))
    assert {(drain.attempt, drain.node_index) for drain in of(effects, m.Drain)} == {
        (last, index) for index in range(4)
    }


def test_a_checkpoint_that_was_saved_without_parity_gets_it() -> None:
    run = Harness(NODES, remote_every=1000, replicas=0)
    run.open(NODES)
    run.save(10)
    run.options = run.machine.options = replace(run.options, parity=(2, 2))
    assert run.checkpoint(run.attempt(10)).level is Level.LOCAL
    codes: list[m.Code] = []
    while found := of(run.tick(2.0), m.Code):
        codes += found
        run.feed(*map(coded, found))
    assert sorted(code.node_id for code in codes) == list(NODES)
    assert run.checkpoint(run.attempt(10)).replicas == 2


def test_damage_to_a_parity_file_is_repaired_and_costs_no_fragment() -> None:
    run = harness()
    save(run, 10)
    attempt = run.attempt(10)
    damage = m.ScrubEnded(
        attempt=attempt, node_index=2, place="c", damage=("parity-00002-of-00004.bin",), error=None
    )
    code = one([*run.feed(damage), *run.tick(2.0)], m.Code)
    assert (code.node_index, code.node_id, code.is_parity) == (2, "c", True)
    assert code.places.fragments[2] == ("c",)


def test_the_death_of_one_node_of_a_coded_group_costs_nothing() -> None:
    run = harness()
    save(run, 10)
    assert {(e.step, e.tier) for e in run.machine.view.exposure()} == {(10, "peer")}
    run = harness()
    save(run, 10, failed="abcd")
    assert {e.step for e in run.machine.view.exposure()} == {None}


# -- tolerance, against all losses ---------------------------------------------------------------------


def _places(group: ParityGroup, fragments: Iterable[str], parities: Iterable[str]) -> GroupPlaces:
    return GroupPlaces(
        group=group, fragments=tuple(map(tuple, fragments)), parities=tuple(map(tuple, parities))
    )


def test_what_a_group_tolerates() -> None:
    group = ParityGroup(members=(0, 1, 2, 3), parity=2)
    assert tolerance(_places(group, "abcd", "abcd")) == 2
    assert tolerance(_places(group, "abcd", ["a", "b", "c", ""])) == 1
    assert tolerance(_places(group, ["a", "b", "c", ""], ["a", "b", "c", ""])) == 1
    assert tolerance(_places(group, ["a", "b", "c", "a"], ["a", "b", "c", "e"])) == 1, "a has two members"
    assert tolerance(_places(group, ["a", "b", "", ""], ["a", "b", "", ""])) == 0
    assert tolerance(_places(group, ["a", "", "", ""], ["a", "", "", ""])) == -1
    assert tolerance(_places(group, ["abe"] * 4, [""] * 4)) == 2, "copies count too"
    assert tolerance(_places(group, ["ab"] * 4, [""] * 4)) == 1


@given(
    changes=st.lists(
        st.tuples(
            st.sampled_from(["copy", "copy", "parity", "lose"]), st.integers(0, 4), st.sampled_from("abcdef")
        )
    )
)
def test_a_search_for_too_few_copies_agrees_with_their_number(changes: list[tuple[str, int, str]]) -> None:
    holders, group = Holders(), ParityGroup(members=(0, 2, 3), parity=1)
    holders.seen(frozenset("abcdef"))
    holders.parity.know("x", [group])
    for kind, index, node in [("copy", at, node) for at, node in enumerate("abcde")] + changes:
        if kind == "copy":
            holders.add("x", index, node)
        elif kind == "lose":
            holders.lose(frozenset(node))
        elif index in group.members:
            holders.add_parity("x", group, index, node)
        copies = holders.num_copies("x", 5)
        assert [holders.tolerates("x", 5, losses) for losses in range(4)] == [
            losses <= copies for losses in range(4)
        ]
        (places,) = holders.places("x")
        found = [holders.places_of("x", member) for member in range(5)]
        assert found == [places if member in group.members else None for member in range(5)]


def test_late_reports_of_a_dead_node_do_not_count() -> None:
    holders = Holders()
    holders.seen(frozenset("ab"))
    group = ParityGroup(members=(0, 1), parity=1)
    holders.add_parity("x", group, 0, "z")
    assert holders.anywhere("x") == frozenset()
    holders.add_parity("x", group, 0, "a")
    assert holders.anywhere("x") == {"a"}
    holders.remove_all("x", "a")
    assert holders.anywhere("x") == frozenset()
