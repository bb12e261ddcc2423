"""Repair: copies come back after any losses, where they should be and no faster than allowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from ray_ckpt.core import repair
from ray_ckpt.core.holders import Holders
from ray_ckpt.core.links import SILENT_FOR_S, Links
from ray_ckpt.core.messages import ReplicaEnded, Replicate
from ray_ckpt.core.rate_budget import SLACK_S, Budget
from ray_ckpt.core.repair import LOST_AFTER_S, Losses, Repairs, worth_copies
from ray_ckpt.types import CheckpointInfo, Level
from tests.core.records import checkpoint, holders_of
from tests.support.examples import every_few

RACKS = {"a": "r1", "b": "r1", "c": "r2", "d": "r2"}


def unlimited() -> Budget:
    return Budget(bytes_per_s=1e12, burst_bytes=1e12)


def assign(
    repairs: Repairs,
    checkpoints: Sequence[CheckpointInfo],
    holders: Holders,
    *,
    replicas: int = 1,
    domains: dict[str, str] | None = None,
    draining: str = "",
    links: Links | None = None,
    budget: Budget | None = None,
    now_s: float = 0.0,
    spares: str = "",
    may_hold: str | None = None,
    limit_bytes_per_s: int | None = None,
) -> list[str]:
    """Return the copies to start, as step, fragment, source and holder: "7.0 a>b"."""
    return [
        f"{copy.attempt.step}.{copy.node_index} {copy.source}>{copy.holder}"
        for copy in repairs.assign(
            checkpoints=checkpoints,
            holders=holders,
            replicas=replicas,
            domains=domains or {},
            draining=frozenset(draining),
            links=links or Links(),
            budget=budget or unlimited(),
            now_s=now_s,
            spares=frozenset(spares),
            may_hold=None if may_hold is None else frozenset(may_hold),
            limit_bytes_per_s=limit_bytes_per_s,
        )
    ]


def ended(
    step: int, holder: str, *, index: int = 0, error: str | None = None, is_unreachable: bool = False
) -> ReplicaEnded:
    return ReplicaEnded(
        attempt=checkpoint(step).id,
        node_index=index,
        holder=holder,
        error=error,
        is_unreachable=is_unreachable,
    )


# -- stories -----------------------------------------------------------------------------------------


def test_the_newest_and_what_is_not_on_the_storage_path_are_worth_copies() -> None:
    lineage = [
        checkpoint(1, level=Level.DURABLE),
        checkpoint(2, level=Level.LOCAL),
        checkpoint(3, level=Level.DURABLE),
    ]
    assert [c.step for c in worth_copies(lineage)] == [3, 2]
    assert worth_copies([]) == ()


def test_a_lost_copy_is_made_again_on_another_node_and_only_once() -> None:
    repairs, holders = Repairs(), holders_of("abc", {7: ("a", "bc")})
    newest = [checkpoint(7, num_nodes=2)]
    assert assign(repairs, newest, holders) == ["7.0 a>b"], "b and c hold as much: by name"
    assert repairs.deficit == 1
    assert assign(repairs, newest, holders) == [], "it is under way"
    holders.add(newest[0].id.attempt, 0, "b")
    repairs.ended(ended(7, "b"), 0.0)
    assert assign(repairs, newest, holders) == []
    assert repairs.deficit == 0


def test_only_nodes_that_may_hold_copies_get_them() -> None:
    repairs, holders = Repairs(), holders_of("abst", {7: ("as", "a", "s")})
    newest = [checkpoint(7, num_nodes=3)]
    assert assign(repairs, newest, holders, may_hold="s") == ["7.1 a>s"], "s has fragment 2 and no peer"
    assert repairs.deficit == 1
    assert assign(repairs, newest, holders, may_hold="st") == ["7.2 s>t"]
    assert assign(Repairs(), newest, holders, may_hold="s", draining="s") == []


def test_each_spare_gets_every_fragment_of_the_newest_checkpoint_alone() -> None:
    repairs, holders = Repairs(), holders_of("abst", {7: ("ab", "ab"), 9: ("abs", "ab")})
    checkpoints = [checkpoint(step, num_nodes=2) for step in (9, 7)]
    started = assign(repairs, checkpoints, holders, spares="st")
    assert sorted(copy.partition(" ")[0] + copy[-1] for copy in started) == ["9.0t", "9.1s", "9.1t"]
    assert repairs.deficit == 0, "nothing is missing without them"
    assert assign(repairs, checkpoints, holders, spares="st") == [], "they are under way"


def test_copies_for_spares_come_after_all_others_and_within_the_budget() -> None:
    holders = holders_of("abcs", {7: ("a",), 9: ("ab",)})
    checkpoints = [checkpoint(step) for step in (9, 7)]
    assert assign(Repairs(), checkpoints, holders, spares="s")[1:] == ["9.0 b>s"]
    nbytes = checkpoints[0].size_bytes
    small = Budget(bytes_per_s=nbytes / 100, burst_bytes=nbytes)
    assert assign(Repairs(), checkpoints, holders, spares="s", budget=small) == ["7.0 a>c"]
    assert assign(Repairs(), checkpoints, holders, spares="s", draining="s") == ["7.0 a>c"]


def test_no_more_copies_are_wanted_than_there_are_nodes() -> None:
    repairs, holders = Repairs(), holders_of("ab", {7: ("ab",)})
    assert assign(repairs, [checkpoint(7)], holders, replicas=3) == []
    assert repairs.deficit == 0


def test_a_fragment_that_is_nowhere_cannot_be_repaired() -> None:
    repairs, holders = Repairs(), holders_of("ab", {7: ("", "ab")})
    assert assign(repairs, [checkpoint(7, num_nodes=2)], holders) == []
    assert repairs.deficit == 0


def test_a_holder_in_another_domain_comes_before_an_idle_one() -> None:
    holders = holders_of("abcd", {7: ("a", "cd", "cd")})
    newest = [checkpoint(7, num_nodes=3)]
    assert assign(Repairs(), newest, holders, domains=RACKS) == ["7.0 a>c"]
    assert assign(Repairs(), newest, holders) == ["7.0 a>b"], "without domains the idle one"


def test_two_copies_at_once_go_to_two_domains() -> None:
    domains = {"a": "r1", "b": "r2", "c": "r2", "d": "r3"}
    holders = holders_of("abcd", {7: ("a",)})
    assert assign(Repairs(), [checkpoint(7)], holders, replicas=2, domains=domains) == ["7.0 a>b", "7.0 a>d"]


def test_two_fragments_at_once_go_to_two_nodes() -> None:
    holders = holders_of("abc", {7: ("a", "a")})
    assert assign(Repairs(), [checkpoint(7, num_nodes=2)], holders) == ["7.0 a>b", "7.1 a>c"]


def test_checkpoints_that_share_most_bytes_go_to_one_node_one_after_the_other() -> None:
    """The node links what it has of the one before, if that is complete there."""
    saved = [replace(checkpoint(step), shared_bytes=90) for step in (9, 8, 7)]
    holders = holders_of("acd", dict.fromkeys((9, 8, 7), ("a",)))
    repairs = Repairs()
    copies = []
    for step in (9, 8, 7):
        copies += assign(repairs, saved, holders)
        assert assign(repairs, saved, holders) == []
        repairs.ended(ended(step, "c"), 0.0)
        holders.add(checkpoint(step).id.attempt, 0, "c")
    assert copies == ["9.0 a>c", "8.0 a>c", "7.0 a>c"]
    assert assign(repairs, saved, holders) == []


def test_a_source_that_stays_is_used_before_one_that_leaves() -> None:
    holders = holders_of("abc", {7: ("ab",)})
    assert assign(Repairs(), [checkpoint(7)], holders, draining="a") == ["7.0 b>c"]


def test_what_only_a_leaving_node_holds_comes_first_then_the_newest_then_the_rarest() -> None:
    holders = holders_of("abcdx", {7: ("ab", "x"), 8: ("a", "ab"), 9: ("abc", "ab")})
    checkpoints = [checkpoint(step, num_nodes=2) for step in (9, 8, 7)]
    started = assign(Repairs(), checkpoints, holders, replicas=2, draining="x")
    order = [copy.split()[0] for copy in started]
    assert order == ["7.1", "7.1", "7.1", "9.1", "8.0", "8.0", "8.1", "7.0"]
    assert not any(copy.endswith(">x") for copy in started)


def test_a_copy_on_a_leaving_node_does_not_count_even_without_replicas() -> None:
    holders = holders_of("ab", {7: ("a",)})
    assert assign(Repairs(), [checkpoint(7)], holders, replicas=0) == []
    assert assign(Repairs(), [checkpoint(7)], holders, replicas=0, draining="a") == ["7.0 a>b"]


def test_a_failed_copy_waits_twice_as_long_each_time_and_tries_the_other_holders_first() -> None:
    repairs, holders, newest = Repairs(), holders_of("abc", {7: ("a",)}), [checkpoint(7)]
    now_s, starts = 0.0, []
    while now_s < 1000.0:
        for copy in assign(repairs, newest, holders, now_s=now_s):
            starts.append((copy[-1], now_s))
            repairs.ended(ended(7, copy[-1], error="disk full"), now_s)
        now_s += 1.0
    assert starts == [("b", 0.0), ("c", 2.0), ("b", 6.0), ("c", 14.0), ("b", 30.0), ("c", 62.0)]
    holders.live |= {"d"}
    assert assign(repairs, newest, holders, now_s=now_s) == ["7.0 a>d"], "a new node is tried at once"


def test_pauses_stop_growing_and_every_node_gets_its_tries() -> None:
    nodes = {f"n{i:03d}" for i in range(501)}
    repairs, holders, newest = Repairs(), holders_of(nodes, {7: (["n000"],)}), [checkpoint(7)]
    now_s, num_tries = 0.0, 0
    while copies := assign(repairs, newest, holders, now_s=now_s):
        repairs.ended(ended(7, copies[0].partition(">")[2], error="digest differs"), now_s)
        assert assign(repairs, newest, holders, now_s=now_s + 1.0) == []
        now_s, num_tries = now_s + repair.MAX_RETRY_S, num_tries + 1
    assert num_tries == 500 * repair.MAX_TRIES


def test_another_source_is_tried_after_a_failure() -> None:
    repairs, holders, newest = Repairs(), holders_of("abc", {7: ("ab",)}), [checkpoint(7)]
    assert assign(repairs, newest, holders, replicas=2) == ["7.0 a>c"]
    repairs.ended(ended(7, "c", error="digest differs"), 0.0)
    assert assign(repairs, newest, holders, replicas=2, now_s=2.0) == ["7.0 b>c"]


@pytest.mark.parametrize("size_bytes", [1, 300 * 10**9])
@pytest.mark.parametrize("limit_bytes_per_s", [None, 8 << 20])
def test_a_copy_that_does_not_answer_in_the_time_of_its_bytes_counts_as_failed(
    size_bytes: int, limit_bytes_per_s: int | None
) -> None:
    """Eight copies may share a limit of 8 MiB/s."""
    repairs, holders = Repairs(), holders_of("abc", {7: ("a",)})
    newest = [replace(checkpoint(7), size_bytes=size_bytes)]

    def look(now_s: float) -> list[str]:
        return assign(repairs, newest, holders, now_s=now_s, limit_bytes_per_s=limit_bytes_per_s)

    time_s = SLACK_S + size_bytes / ((1 << 20) if limit_bytes_per_s else (10 << 20))
    assert look(0.0) == ["7.0 a>b"]
    assert look(time_s) == look(time_s + 1) == []
    assert look(time_s + 1 + repair.RETRY_S) == ["7.0 a>c"]


def test_an_unreachable_holder_is_not_blamed_and_is_tried_again_while_it_is_silent() -> None:
    """Ten minutes of silence do not make the pauses grow, and what was not sent is not paid for."""
    repairs, holders, newest, links = Repairs(), holders_of("ab", {7: ("a",)}), [checkpoint(7)], Links()
    budget = Budget(bytes_per_s=newest[0].size_bytes / 100.0, burst_bytes=newest[0].size_bytes)
    now_s, starts = 0.0, list[float]()
    while now_s < 600.0:
        for copy in assign(repairs, newest, holders, links=links, budget=budget, now_s=now_s):
            assert copy == "7.0 a>b"
            starts.append(now_s)
            links.failed("a", "b", now_s)
            budget.give_back(repairs.ended(ended(7, "b", error="silent", is_unreachable=True), now_s))
        now_s += 1.0
    assert starts == [SILENT_FOR_S * i for i in range(int(600 / SILENT_FOR_S))]


def test_a_silent_link_is_left_out_while_another_node_can_take_or_send_the_copy() -> None:
    links = Links()
    links.failed("a", "b", 0.0)
    assert assign(Repairs(), [checkpoint(7)], holders_of("abc", {7: ("a",)}), links=links) == ["7.0 a>c"]
    two_sources = holders_of("abc", {7: ("ac",)})
    assert assign(Repairs(), [checkpoint(7)], two_sources, replicas=2, links=links) == ["7.0 c>b"]
    links.worked("a", "b")
    assert assign(Repairs(), [checkpoint(7)], two_sources, replicas=2, links=links) == ["7.0 a>b"]
    links.failed("a", "b", 0.0)
    links.forget({"b"})
    assert links.works("a", "b", 0.0), "a node of that name is another one"


@pytest.mark.parametrize("dead", "ab")
def test_the_death_of_either_end_is_no_failure(dead: str) -> None:
    repairs, holders, newest = Repairs(), holders_of("abcd", {7: ("ad",)}), [checkpoint(7)]
    assert assign(repairs, newest, holders, replicas=2) == ["7.0 a>b"]
    holders.lose(frozenset(dead))
    holders.live -= {dead}
    repairs.lost({dead})
    started = assign(repairs, newest, holders, replicas=2)
    assert started == (["7.0 d>b", "7.0 d>c"] if dead == "a" else ["7.0 a>c"]), "at once"


def test_at_most_so_many_are_under_way() -> None:
    num_nodes = 3 * repair.MAX_ACTIVE
    repairs, holders = Repairs(), holders_of("abc", {7: ["a"] * num_nodes})
    newest = [checkpoint(7, num_nodes=num_nodes)]
    assert len(assign(repairs, newest, holders)) == repair.MAX_ACTIVE
    assert assign(repairs, newest, holders) == []
    repairs.ended(ended(7, "b", index=0, error="no"), 0.0)
    assert len(assign(repairs, newest, holders)) == 1


def test_copies_of_a_retired_checkpoint_end_quietly() -> None:
    repairs, holders = Repairs(), holders_of("abc", {7: ("a",), 8: ("a",)})
    assert assign(repairs, [checkpoint(7)], holders) == ["7.0 a>b"]
    assert assign(repairs, [checkpoint(8)], holders) == ["8.0 a>c"]
    repairs.ended(ended(7, "b", error="gone"), 0.0)
    repairs.ended(ended(7, "b", error="gone"), 0.0)
    repairs.ended(ended(6, "b"), 0.0)
    assert assign(repairs, [checkpoint(8)], holders) == []
    assert not repairs._problems, "nothing is remembered of what is gone"


def test_the_budget_holds_copies_back() -> None:
    repairs, holders = Repairs(), holders_of("ab", {7: ("a", "a", "a")})
    newest, budget = [checkpoint(7, num_nodes=3, size_bytes=300)], Budget(bytes_per_s=10, burst_bytes=100)
    assert len(assign(repairs, newest, holders, budget=budget)) == 1
    assert assign(repairs, newest, holders, budget=budget, now_s=9.0) == []
    assert len(assign(repairs, newest, holders, budget=budget, now_s=10.5)) == 1


def test_what_only_leaving_nodes_hold_waits_for_no_budget() -> None:
    repairs, holders = Repairs(), holders_of("abc", {7: ("a", "a", "a"), 6: ("b", "b", "b")})
    both = [checkpoint(step, num_nodes=3, size_bytes=300) for step in (7, 6)]
    budget = Budget(bytes_per_s=10, burst_bytes=0)
    started = assign(repairs, both, holders, draining="a", budget=budget)
    assert len(started) >= 3 and all(copy.startswith("7.") for copy in started[:3])


# -- any losses --------------------------------------------------------------------------------------


class World:
    """A cluster that loses and gains nodes while repair is at work; checks each copy when it is started."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.replicas = self.random.randint(0, 3)
        self.domains = {f"n{i:02d}": f"r{i % 3}" for i in range(40)}
        self.spare = sorted(self.domains)
        self.repairs, self.holders = Repairs(), Holders()
        self.budget = Budget(bytes_per_s=self.random.choice([20, 1e6]), burst_bytes=200)
        self.draining: set[str] = set()
        self.under_way: list[Replicate] = []
        self.failures: dict[tuple[str, int, str], int] = {}
        self.now_s = 0.0
        self.started_bytes = 0.0
        for _ in range(self.random.randint(3, 9)):
            self.join()
        num_nodes = self.random.randint(1, 6)
        self.checkpoints = [checkpoint(step, num_nodes=num_nodes) for step in (9, 8, 7)]
        for c in self.checkpoints:
            for index in range(num_nodes):
                for node in self.random.sample(sorted(self.holders.live), 2):
                    self.holders.add(c.id.attempt, index, node)

    def join(self) -> None:
        if self.spare:
            self.holders.live |= {self.spare.pop(0)}

    def lose(self, node: str) -> None:
        self.draining.discard(node)
        self.holders.live -= {node}
        self.holders.lose(frozenset({node}))
        self.repairs.lost({node})

    def repair(self) -> None:
        self.now_s += 1.0
        for copy in self.repairs.assign(
            checkpoints=self.checkpoints,
            holders=self.holders,
            replicas=self.replicas,
            domains=self.domains,
            draining=self.draining,
            links=Links(),
            budget=self.budget,
            now_s=self.now_s,
        ):
            self.check(copy)
            self.under_way.append(copy)
        assert len(self.repairs._active) <= repair.MAX_ACTIVE

    def check(self, copy: Replicate) -> None:
        held = self.holders.of(copy.attempt.attempt, copy.node_index)
        assert copy.source in held & self.holders.live
        assert copy.holder in self.holders.live - self.draining - held
        where = [(c.attempt, c.node_index, c.holder) for c in self.repairs._active]
        assert len(set(where)) == len(where), "one copy of a fragment per node"
        if held - self.draining:
            self.started_bytes += self.checkpoints[0].size_bytes / self.checkpoints[0].num_nodes
        burst = max(self.budget.burst_bytes, 100)
        assert self.started_bytes <= burst + self.budget.bytes_per_s * self.now_s + 100

    def answer(self, *, faulty: bool) -> None:
        """Let one copy arrive, fail (at most twice per fragment and holder), or end without an answer."""
        if not self.under_way:
            return
        copy = self.under_way.pop(self.random.randrange(len(self.under_way)))
        if copy.source not in self.holders.live:
            return
        where = (copy.attempt.attempt, copy.node_index, copy.holder)
        fails = faulty and self.random.random() < 0.3 and self.failures.get(where, 0) < 2
        if fails:
            self.failures[where] = self.failures.get(where, 0) + 1
            if self.random.random() < 0.2:
                return
        else:
            self.holders.add(*where)
        self.repairs.ended(
            ReplicaEnded(
                attempt=copy.attempt,
                node_index=copy.node_index,
                holder=copy.holder,
                error="disk full" if fails else None,
            ),
            self.now_s,
        )

    def step(self) -> None:
        what = self.random.random()
        nodes = sorted(self.holders.live)
        if what < 0.05 and len(nodes) > 1:
            self.lose(self.random.choice(nodes))
        elif what < 0.10:
            self.join()
        elif what < 0.15:
            self.draining ^= {self.random.choice(nodes)}
        elif what < 0.6:
            self.answer(faulty=True)
        self.repair()

    def copies(self, c: CheckpointInfo, index: int) -> frozenset[str]:
        return self.holders.of(c.id.attempt, index) & self.holders.live - self.draining


@pytest.mark.parametrize("seed", every_few(range(150)))
def test_copies_come_back_after_any_losses(seed: int) -> None:
    world = World(seed)
    for _ in range(200):
        world.step()
    somewhere = [
        (c, i)
        for c in world.checkpoints
        for i in range(c.num_nodes)
        if world.holders.of(c.id.attempt, i) & world.holders.live
    ]
    while world.now_s < 5000 and (world.repairs.deficit or world.repairs._active):
        world.repair()
        world.answer(faulty=False)
    wanted = min(world.replicas + 1, len(world.holders.live - world.draining))
    for c, index in somewhere:
        assert len(world.copies(c, index)) >= wanted, (seed, c.step, index)
    assert world.repairs.deficit == 0
    assert not world.repairs._active


# -- losses ------------------------------------------------------------------------------------------


def lost(losses: Losses, lineage: Sequence[CheckpointInfo], holders: Holders, now_s: float) -> list[int]:
    return [c.step for c in losses.due(live=lineage, lineage=lineage, holders=holders, now_s=now_s)]


def test_what_has_no_source_for_a_day_is_lost_if_a_newer_one_can_be_read() -> None:
    losses, lineage = Losses(), [checkpoint(7, num_nodes=2), checkpoint(8)]
    holders = holders_of("ab", {7: ("a", ""), 8: ("b",)})
    assert lost(losses, lineage, holders, 0.0) == []
    assert lost(losses, lineage, holders, LOST_AFTER_S - 1) == []
    assert lost(losses, lineage, holders, LOST_AFTER_S) == [7]


def test_a_source_that_returns_starts_the_day_again() -> None:
    losses, lineage = Losses(), [checkpoint(7), checkpoint(8)]
    away, back = holders_of("ab", {8: ("b",)}), holders_of("ab", {7: ("a",), 8: ("b",)})
    assert lost(losses, lineage, away, 0.0) == []
    assert lost(losses, lineage, back, 1.0) == []
    assert lost(losses, lineage, away, LOST_AFTER_S) == []
    assert lost(losses, lineage, away, 2 * LOST_AFTER_S) == [7]


def test_the_last_hope_is_never_called_lost() -> None:
    losses, lineage = Losses(), [checkpoint(7), checkpoint(8)]
    nothing = holders_of("ab", {})
    assert lost(losses, lineage, nothing, 0.0) == []
    assert lost(losses, lineage, nothing, 9 * LOST_AFTER_S) == [], "no newer one can be read"
    older_only = holders_of("ab", {7: ("a",)})
    assert lost(losses, lineage, older_only, 10 * LOST_AFTER_S) == [], "8 is newer than what is left"


def test_durable_checkpoints_are_not_lost_with_their_nodes() -> None:
    losses, lineage = Losses(), [checkpoint(7, level=Level.DURABLE), checkpoint(8)]
    holders = holders_of("ab", {8: ("b",)})
    assert lost(losses, lineage, holders, 0.0) == lost(losses, lineage, holders, 9 * LOST_AFTER_S) == []
