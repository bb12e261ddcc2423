"""Parity groups: who makes which file, what a commit promises, and what is made again after a loss."""

from __future__ import annotations

import re
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
from ray_ckpt.core.maintenance import RESTART_S
from ray_ckpt.core.parity_files import tolerance
from ray_ckpt.core.placement import crowded_domain, place_groups
from ray_ckpt.core.repair import RETRY_S
from ray_ckpt.core.values import GroupPlaces, RankProgress, StoredParity
from ray_ckpt.errors import ConfigError
from ray_ckpt.types import Level, ParityGroup
from tests.core.driver import Disk, Harness, of, one
from tests.support.code_blocks import ROOT

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
        assert max(sizes) <= num_data + parity or (nodes, num_data, parity) == (5, 2, 2)
        for rack, total in Counter(domains.values()).items():
            for group in groups:
                count = sum(domains[names[at]] == rack for at in group.members)
                assert count <= -(-total // len(groups))


def test_the_page_of_the_service_has_the_groups_and_their_disk() -> None:
    page = (ROOT / "docs/operations/service.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([\d+, ]+) \| ([\d., ]+)(?: times)? \|$", page, re.MULTILINE)
    assert len(rows) >= 5
    for nodes, shown, disk in rows:
        groups = place_groups([f"n{at}" for at in range(int(nodes))], num_data=6, parity=2)
        assert shown == ", ".join(f"{group.num_data}+{group.parity}" for group in groups), nodes
        assert disk == ", ".join(f"{group.size / group.num_data:.2f}" for group in groups), nodes


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


def test_a_node_knows_how_much_it_stores_for_the_others_of_its_group() -> None:
    """Three nodes are less than the option asks for, so each stores more of the others."""
    run = Harness("abc", parity=(6, 1))
    run.open("abc")
    group = run.plan.group_of(2)
    assert group is not None and (group.parity, group.num_data) == (1, 2)
    assert run.plan.group_of(3) is None


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
    assert (run.checkpoint(attempt).replicas, run.checkpoint(attempt).parity) == (2, "2+2")


def test_status_counts_the_parity_files_that_are_made_and_those_that_are_awaited() -> None:
    run = harness()
    codes = of(run.save(10), m.Code)
    counts = []
    for code in codes:
        (save,) = run.machine.view.saves_underway
        counts.append((save.copies, save.copies_awaited))
        run.feed(coded(code, error="disk full" if code.node_id == "b" else None))
    assert counts == [(0, 4), (1, 3), (1, 2), (2, 1)], "the file of the second node could not be made"


def test_status_counts_no_parity_file_of_a_lost_node() -> None:
    run = harness()
    codes = of(run.save(10), m.Code)
    run.feed(*map(coded, codes[:3]))
    run.lose("a")
    (save,) = run.machine.view.saves_underway
    assert (save.copies, save.copies_awaited) == (2, 1)


@pytest.mark.parametrize(("failed", "replicas"), [("", 2), ("a", 1), ("ab", 0), ("abcd", 0)])
def test_a_commit_promises_what_the_parity_files_that_were_made_allow(failed: str, replicas: int) -> None:
    run = harness()
    save(run, 10, failed=failed)
    found = run.checkpoint(run.attempt(10))
    assert found.replicas == replicas
    assert found.level is (Level.REPLICATED if replicas else Level.LOCAL)
    assert found.parity == ("2+2" if replicas else "")


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
    found = run.checkpoint(run.attempt(10))
    assert (found.level, found.parity) == (Level.LOCAL, "")
    run.feed(*map(coded, codes))
    found = run.checkpoint(run.attempt(10))
    assert (found.level, found.replicas, found.parity) == (Level.REPLICATED, 2, "2+2")


def test_copies_that_a_later_session_makes_are_not_called_parity() -> None:
    run = harness()
    save(run, 10)
    attempt, holders = run.attempt(10), run.machine._attempts._context.holders
    assert run.checkpoint(attempt).parity == "2+2"
    for index in range(4):
        holders.add(attempt.attempt, index, NODES[(index + 1) % 4])
    assert run.machine._attempts._parity(attempt.attempt, 2) == "2+2", "each has one copy"
    assert run.machine._attempts._parity(attempt.attempt, 1) is None


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
    effects = [*run.lose_long_ago("b"), *run.tick(2.0)]
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
    run.lose_long_ago("a", again.node_id)
    assert run.machine.view.parity_groups(code.attempt.attempt)[0].fragments[2] == ("c",)
    assert run.machine.view.exposure()


def tolerated(run: Harness, step: int) -> int:
    return min(map(tolerance, run.machine.view.parity_groups(run.attempt(step).attempt)))


def arrived(copy: m.Replicate) -> m.ReplicaEnded:
    return m.ReplicaEnded(
        attempt=copy.attempt, node_index=copy.node_index, holder=copy.holder, source=copy.source, error=None
    )


def read(scrub: m.Scrub, *damage: str) -> m.ScrubEnded:
    return m.ScrubEnded(
        attempt=scrub.attempt, node_index=scrub.node_index, place=scrub.place, damage=damage, error=None
    )


def rebuild(run: Harness, effects: Iterable[m.Effect] = ()) -> list[m.Code]:
    """Let repair do all that it finds; return its orders."""
    codes: list[m.Code] = []
    while found := [code for code in of([*effects, *run.tick(2.0)], m.Code) if code not in codes]:
        codes += found
        effects = run.feed(*map(coded, found))
    return codes


@pytest.mark.parametrize("parity", [(6, 2), (7, 1)])
def test_a_parity_file_reads_m_parts_and_a_lost_member_k(parity: tuple[int, int]) -> None:
    """Each of the m blocks of a parity file is as large as 1/k of a part, and computed from k of these."""
    nodes = "abcdefgh"
    run = Harness(nodes, parity=parity, remote_every=1000)
    run.open(nodes)
    codes = of(run.save(10), m.Code)
    one_part = codes[0].read_bytes // parity[1]
    assert {code.read_bytes for code in codes} == {parity[1] * one_part}
    run.feed(*map(coded, codes))
    again = rebuild(run, run.lose_long_ago("b"))
    num_read = {code.is_parity: code.read_bytes // one_part for code in again}
    assert num_read == {False: parity[0], True: parity[1]}


def test_members_that_share_a_node_part_when_a_node_comes() -> None:
    run = harness("abcd")
    save(run, 10)
    rebuild(run, run.lose_long_ago("b"))
    assert tolerated(run, 10) == 1, "a node has two members, as no other is there"
    assert run.machine.view.copies_missing == 0
    run.disks["e"] = Disk()
    codes = rebuild(run, run.feed(m.NodesSeen(live=frozenset("acde"))))
    assert [(code.node_id, code.is_parity) for code in codes] == [("e", False), ("e", True)]
    moved = codes[0]
    assert moved.places.fragments[moved.node_index], "it is copied"
    assert moved.read_bytes < codes[1].read_bytes
    assert tolerated(run, 10) == 2
    assert not rebuild(run), "one move is enough"


def test_two_members_that_are_lost_get_a_node_each() -> None:
    """One of the free nodes is of a domain that the group does not have."""
    run = harness("abcdef")
    save(run, 10)
    domains = {**dict.fromkeys("abcde", "left"), "f": "right"}
    run.feed(m.NodesSeen(live=frozenset("abcdef"), domains=domains))
    run.feed(m.NodesSeen(live=frozenset("cdef"), domains=domains))
    codes = rebuild(run, run.tick(RESTART_S))
    assert {code.node_id for code in codes if not code.is_parity} == {"e", "f"}
    assert len(codes) == 4
    assert tolerated(run, 10) == 2


def test_what_a_leaving_node_has_goes_beside_no_other_member() -> None:
    run = harness("abcde")
    save(run, 10)
    run.save(20)  # without parity files: node e has no more fragments than the others
    copies = of(run.feed(m.NodesSeen(live=frozenset("abcde"), draining=frozenset("b"))), m.Replicate)
    copies += of(run.tick(2.0), m.Replicate)
    assert {(copy.attempt.step, copy.node_index, copy.holder) for copy in copies} >= {(10, 1, "e")}
    run.feed(*map(arrived, copies))
    codes = [code for code in rebuild(run) if code.attempt.step == 10]
    assert [(code.node_index, code.node_id, code.is_parity) for code in codes] == [(1, "e", True)]
    run.lose("b")
    assert tolerated(run, 10) == 2


@given(
    changes=st.lists(
        st.tuples(
            st.sampled_from(["lose", "lose", "come", "leave", "harm"]),
            st.sampled_from("abcdefg"),
            st.integers(0, 3),
        ),
        max_size=6,
    )
)
def test_repair_ends_with_a_node_for_each_member_if_there_are_enough(
    changes: list[tuple[str, str, int]],
) -> None:
    """Whatever happens, as long as no file is lost for good, and each change is repaired before the next."""
    run = harness("abcdefg")
    save(run, 10)
    attempt, live, draining = run.attempt(10), frozenset("abcdefg"), frozenset[str]()

    def whereabouts() -> GroupPlaces:
        return run.machine.view.parity_groups(attempt.attempt)[0]

    for kind, node, member in changes:
        effects: list[m.Effect] = []
        if kind == "come" or node not in live:
            live |= {node}
        elif kind == "lose" and len(live) > 3:
            live -= {node}
        elif kind == "leave":
            draining = frozenset(node)
        elif kind == "harm":
            files = (f"parity-{member:05d}-of-00004.bin", "shard")[len(changes) % 2 :]
            for place in whereabouts().fragments[member]:
                effects += run.feed(read(m.Scrub(attempt=attempt, node_index=member, place=place), *files))
        draining &= live
        effects += run.feed(m.NodesSeen(live=live, draining=draining))
        effects += run.tick(RESTART_S)  # repair waits for no group any more
        for _ in range(30):
            copies, codes = of(effects, m.Replicate), of(effects, m.Code)
            effects = [*run.feed(*map(arrived, copies), *map(coded, codes)), *run.tick(2.0)]
        assert not of(effects, m.Code) and not of(effects, m.Replicate), "it comes to an end"
        assert run.machine.view.copies_missing == 0
    staying, places = live - draining, whereabouts()
    homes = [
        staying & set(held) & set(parity)
        for held, parity in zip(places.fragments, places.parities, strict=True)
    ]
    if len(staying) >= 4:
        assert tolerance(places) == 2
        assert all(homes)


def test_a_group_without_any_parity_file_is_found_after_a_restart() -> None:
    """Another group of the same checkpoint has some."""
    nodes = "abcdefgh"
    run = Harness(nodes, parity=(2, 2), remote_every=1000)
    run.open(nodes)
    codes = of(run.save(10), m.Code)
    first = codes[0].places.group
    made = [code for code in codes if code.places.group == first]
    for code in made:
        keep(run, code)
    others = [code for code in codes if code not in made]
    run.feed(*map(coded, made), *(coded(code, error="disk full") for code in others))
    plan = run.plan
    run.start_coordinator()
    trains = m.RanksProgressed(session_key=plan.session_key, ranks={0: RankProgress(step=11, saved_step=10)})
    effects = run.feed(m.GroupRecovered(plan=plan, inventories=run.inventories()), trains)
    assert {code.node_index for code in rebuild(run, effects)} == {code.node_index for code in others}
    assert tolerated(run, 10) == 2


def test_parity_that_gives_wrong_bytes_no_longer_counts() -> None:
    """First all files of the group are read; they are good, so repair does not try without end."""
    run = harness("abcdef", scrub_bytes_per_s=0)
    save(run, 10)
    places = set[str]()
    effects: list[m.Effect] = [*run.lose_long_ago("b")]
    tries = 0
    for _ in range(40):
        effects += run.tick(RETRY_S)
        codes, scrubs, effects = of(effects, m.Code), of(effects, m.Scrub), []
        tries += len(codes)
        places |= {scrub.place for scrub in scrubs}
        effects += run.feed(*(replace(coded(code, error="wrong bytes"), is_damage=True) for code in codes))
        for scrub in scrubs:
            effects += run.feed(read(scrub))
    assert places == set("acd")
    assert 3 <= tries <= 6
    assert any("fragment 1 cannot be computed" in warn.text for warn in of(run.transcript, m.Warn))
    assert tolerated(run, 10) == -1, "it is no longer offered for a restore"
    assert run.machine.view.copies_missing == 0


def test_a_member_that_was_damaged_is_found_before_the_parity_is_doubted() -> None:
    """Node c has a bad file: with P and Q, both members can be computed without it."""
    run = harness("abcdef", scrub_bytes_per_s=0)
    save(run, 10)
    (code,) = of([*run.lose_long_ago("b"), *run.tick(2.0)], m.Code)
    effects: list[m.Effect] = [*run.feed(replace(coded(code, error="wrong bytes"), is_damage=True))]
    is_found = False
    for _ in range(40):
        effects += run.tick(RETRY_S)
        scrubs, codes, effects = of(effects, m.Scrub), of(effects, m.Code), []
        for code in codes:
            end = coded(code, error=None if is_found else "wrong bytes")
            effects += run.feed(replace(end, is_damage=not is_found))
        for scrub in scrubs:
            is_found |= scrub.place == "c"
            effects += run.feed(read(scrub, *["shard"] * (scrub.place == "c")))
    assert is_found
    assert tolerated(run, 10) == 2


def test_the_end_of_a_run_uploads_what_can_be_computed() -> None:
    """A node is lost when nobody trains any more; a checkpoint that is due lacks its part."""
    run = harness("abcdef", remote_every=1, retire_grace_s=60.0)
    drains = of(save(run, 10), m.Drain)
    run.drain_all(save(run, 20))
    run.feed(m.FinishRequested(token="end", ends_group=True, has_failed=False))
    assert run.machine.plan is None
    effects: list[m.Effect] = [*run.lose("b")]
    for drain in drains:
        if drain.node_id != "b":
            effects += run.drained(drain)
    for _ in range(60):
        codes, drains = of(effects, m.Code), of(effects, m.Drain)
        effects = [*run.feed(*map(coded, codes)), *run.drain_all(effects)]
        assert all(drain.node_id != "b" for drain in drains)
        effects += run.tick(2.0)
        for delete in of(effects, m.Delete):
            run.feed(m.DeleteEnded(attempt=delete.attempt, place=delete.place, error=None))
        for listing in of(effects, m.SweepRemote):
            effects += run.feed(m.RemoteListed(number=listing.number))
    levels = {c.step: (c.state, c.level) for c in run.machine.history.checkpoints.values()}
    assert levels == {10: ("live", Level.DURABLE), 20: ("live", Level.DURABLE)}


def fail_codes(run: Harness, effects: Iterable[m.Effect]) -> None:
    run.feed(*(coded(code, error="disk full") for code in of(effects, m.Code)))


def test_a_drain_waits_a_while_for_a_member_that_may_be_computed() -> None:
    """It waits while the next group opens, too; but repair may take long."""
    run = harness("abcdef", remote_every=1)
    for drain in of(save(run, 10), m.Drain):
        if drain.node_index != 1:
            run.drained(drain)
    fail_codes(run, run.lose("b"))
    fail_codes(run, run.feed(run.group("acde")))
    for seconds in (0.0, COMPUTED_S - 1.0):
        fail_codes(run, run.tick(seconds))
        assert [drain.step for drain in run.machine.view.drains_underway] == [10]
    fail_codes(run, run.tick(2.0))
    assert not run.machine.view.drains_underway
    assert any("Step 10 did not reach the storage path" in w.text for w in of(run.transcript, m.Warn))


def test_drains_that_only_wait_for_repair_let_others_pass() -> None:
    """Two places are all there is."""
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


def test_damage_to_a_shared_shard_and_a_parity_file_costs_another_save_its_shard_alone() -> None:
    run = harness()
    save(run, 10)
    save(run, 20)
    scrub = m.Scrub(attempt=run.attempt(20), node_index=2, place="c")
    files = ("shard-00002.1-of-00004.safetensors", "parity-00002-of-00004.bin")
    run.feed(replace(read(scrub, *files), shared=((run.attempt(10), 2),)))
    (places,) = run.machine.view.parity_groups(run.attempt(10).attempt)
    assert (places.fragments[2], places.parities[2]) == ((), ("c",))


def test_only_still_files_are_damaged_in_other_saves_too() -> None:
    for files, expected in (
        (("shard-00002-of-00004.safetensors", "parity-00002.1-of-00004.bin"), (("c",), ())),
        (("shard-00002.1-of-00004.safetensors", "parity-00002.1-of-00004.bin"), ((), ())),
    ):
        run = harness()
        save(run, 10)
        save(run, 20)
        scrub = m.Scrub(attempt=run.attempt(20), node_index=2, place="c")
        run.feed(replace(read(scrub, *files), shared=((run.attempt(10), 2),)))
        (places,) = run.machine.view.parity_groups(run.attempt(10).attempt)
        assert (places.fragments[2], places.parities[2]) == expected


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
            holders.report_parity("x", group, index, node)
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
    holders.report_parity("x", group, 0, "z")
    assert holders.anywhere("x") == frozenset()
    holders.report_parity("x", group, 0, "a")
    assert holders.anywhere("x") == {"a"}
    holders.remove_all("x", "a")
    assert holders.anywhere("x") == frozenset()


def test_what_a_group_reads_does_not_depend_on_groups_that_have_not_stored() -> None:
    """The bound of its computations follows from these bytes."""
    nodes = "abcdefgh"
    run = Harness(nodes, parity=(2, 2))
    run.open(nodes)
    attempt = run.attempt(10)
    codes = [code for node in nodes for code in of(run.feed(run.stored(attempt, node)), m.Code)]
    assert len(codes) == 8 and len({code.read_bytes for code in codes}) == 1
