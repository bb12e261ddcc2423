"""Scrub: every copy is read in its turn, and only copies that were read and intact count as verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from ray_ckpt.core import scrub
from ray_ckpt.core.holders import Holders
from ray_ckpt.core.messages import REMOTE, Scrub, ScrubEnded
from ray_ckpt.core.rate_budget import LEAST_BYTES_PER_S, Budget
from ray_ckpt.core.scrub import AGAIN_S, MAX_TRIES, SLACK_S, Scrubs
from ray_ckpt.format.records import Verified
from ray_ckpt.types import CheckpointInfo, Level
from tests.core.records import checkpoint, holders_of
from tests.support.examples import every_few

EVERY_S = 100_000.0
DUE_S = EVERY_S + 1.0


def next_of(
    scrubs: Scrubs,
    live: Sequence[CheckpointInfo],
    holders: Holders,
    *,
    now_s: float = 0.0,
    wall_s: float = DUE_S,
    budget: Budget | None = None,
) -> str:
    """Return the next action: "7.0 a" (read), "verified 7", or ""."""
    budget = budget or Budget(bytes_per_s=1e12, burst_bytes=1e12)
    found = list(
        scrubs.assign(live=live, holders=holders, every_s=EVERY_S, budget=budget, now_s=now_s, wall_s=wall_s)
    )
    assert len(found) <= 1
    for what in found:
        if isinstance(what, Scrub):
            return f"{what.attempt.step}.{what.node_index} {what.place}"
        return f"verified {int(what.attempt, 16)}"
    return ""


def ended(name: str, *damage: str, error: str | None = None) -> ScrubEnded:
    """Return the end of the read with this name, such as "7.0 a"."""
    where, place = name.split()
    step, index = where.split(".")
    attempt = checkpoint(int(step)).id
    return ScrubEnded(attempt=attempt, node_index=int(index), place=place, damage=damage, error=error)


# -- stories -----------------------------------------------------------------------------------------


def test_every_copy_is_read_once_then_the_checkpoint_is_verified() -> None:
    scrubs, holders = Scrubs(), holders_of("ab", {7: ("ab", "b")})
    live = [checkpoint(7, num_nodes=2, level=Level.DURABLE)]
    seen = []
    while not (what := next_of(scrubs, live, holders)).startswith("verified"):
        assert next_of(scrubs, live, holders) == "", "one at a time"
        scrubs.ended(ended(what))
        seen.append(what)
    assert seen == ["7.0 a", "7.0 b", "7.0 remote", "7.1 b", "7.1 remote"]
    assert what == "verified 7"
    assert next_of(scrubs, live, holders) == "", "although the record is not in the log yet"
    live = [replace(live[0], verified_at_s=DUE_S)]
    assert next_of(scrubs, live, holders, now_s=EVERY_S - 1, wall_s=DUE_S + EVERY_S - 1) == ""
    assert next_of(scrubs, live, holders, now_s=EVERY_S, wall_s=DUE_S + EVERY_S) == "7.0 a"


def test_the_one_verified_longest_ago_comes_first() -> None:
    live = [
        checkpoint(7, verified_at_s=50.0),
        checkpoint(8, committed_at_s=40.0),
        checkpoint(9, committed_at_s=DUE_S),
    ]
    holders = holders_of("a", {7: ("a",), 8: ("a",), 9: ("a",)})
    assert next_of(Scrubs(), live, holders, wall_s=39.0 + EVERY_S) == ""
    assert next_of(Scrubs(), live, holders, wall_s=40.0 + EVERY_S) == "8.0 a"
    assert next_of(Scrubs(), live, holders, wall_s=50.0 + EVERY_S) == "8.0 a"
    assert next_of(Scrubs(), live[:1], holders, wall_s=50.0 + EVERY_S) == "7.0 a"


def test_a_time_from_a_clock_that_was_far_ahead_is_not_believed() -> None:
    live, holders = [checkpoint(7, verified_at_s=9 * EVERY_S)], holders_of("a", {7: ("a",)})
    assert next_of(Scrubs(), live, holders, wall_s=EVERY_S) == "7.0 a"
    assert next_of(Scrubs(), live, holders, wall_s=9 * EVERY_S - 3600) == "", "an hour of skew is no cause"


def test_damage_is_followed_by_a_whole_round_later() -> None:
    scrubs, live = Scrubs(), [checkpoint(7, num_nodes=2)]
    holders = holders_of("abc", {7: ("ab", "b")})
    assert next_of(scrubs, live, holders) == "7.0 a"
    scrubs.ended(ended("7.0 a", "shard-0"))
    for name in ("7.0 b", "7.1 b"):
        assert next_of(scrubs, live, holders) == name, "what else is bad shall be known too"
        scrubs.ended(ended(name))
    assert next_of(scrubs, live, holders) == ""
    repaired = holders_of("abc", {7: ("bc", "b")})
    assert next_of(scrubs, live, repaired, now_s=AGAIN_S - 1) == ""
    for name in ("7.0 b", "7.0 c", "7.1 b"):
        assert next_of(scrubs, live, repaired, now_s=AGAIN_S) == name
        scrubs.ended(ended(name))
    assert next_of(scrubs, live, repaired, now_s=AGAIN_S) == "verified 7"


def test_damage_that_is_reported_after_the_time_out_spoils_the_round() -> None:
    """A read may take as long as its bytes at LEAST_BYTES_PER_S."""
    live = [replace(checkpoint(7), size_bytes=100 * LEAST_BYTES_PER_S)]
    scrubs, holders = Scrubs(), holders_of("ab", {7: ("ab",)})
    assert next_of(scrubs, live, holders) == "7.0 a"
    assert next_of(scrubs, live, holders, now_s=SLACK_S + 100) == ""
    late_s = SLACK_S + 101
    assert next_of(scrubs, live, holders, now_s=late_s) == "7.0 b"
    scrubs.ended(ended("7.0 a", "shard-0"))
    scrubs.ended(ended("7.0 b"))
    assert next_of(scrubs, live, holders, now_s=late_s) == "7.0 a", "the read that timed out, again"
    scrubs.ended(ended("7.0 a"))
    assert next_of(scrubs, live, holders, now_s=late_s) == ""


def test_what_cannot_be_read_is_tried_again_after_the_others_and_spoils_the_round() -> None:
    scrubs, live, holders = Scrubs(), [checkpoint(7)], holders_of("ab", {7: ("ab",)})
    requested = []
    while (what := next_of(scrubs, live, holders)) != "":
        requested.append(what)
        scrubs.ended(ended(what, error="EIO" if what.endswith("a") else None))
    assert requested == ["7.0 a", "7.0 b", *["7.0 a"] * (MAX_TRIES - 1)]


def test_one_failed_read_that_works_later_spoils_nothing() -> None:
    scrubs, live, holders = Scrubs(), [checkpoint(7)], holders_of("a", {7: ("a",)})
    assert next_of(scrubs, live, holders) == "7.0 a"
    scrubs.ended(ended("7.0 a", error="busy"))
    assert next_of(scrubs, live, holders) == "7.0 a"
    scrubs.ended(ended("7.0 a"))
    assert next_of(scrubs, live, holders) == "verified 7"


def test_a_copy_that_dies_is_left_out_and_one_good_copy_is_enough() -> None:
    scrubs, live, holders = Scrubs(), [checkpoint(7)], holders_of("ab", {7: ("ab",)})
    assert next_of(scrubs, live, holders) == "7.0 a"
    holders.lose(frozenset("a"))
    holders.live -= {"a"}
    assert next_of(scrubs, live, holders) == "7.0 b", "the dead do not answer"
    scrubs.ended(ended("7.0 a"))
    scrubs.ended(ended("7.0 b"))
    assert next_of(scrubs, live, holders) == "verified 7"


def test_nothing_is_verified_that_nobody_has_read() -> None:
    scrubs, live, holders = Scrubs(), [checkpoint(7, num_nodes=2)], holders_of("ab", {7: ("a", "b")})
    assert next_of(scrubs, live, holders) == "7.0 a"
    scrubs.ended(ended("7.0 a"))
    holders.lose(frozenset("b"))
    holders.live -= {"b"}
    assert next_of(scrubs, live, holders) == "", "fragment 1 is gone"
    assert next_of(scrubs, live, holders, now_s=AGAIN_S) == "", "and without it there is no round"


def test_scrub_is_behind_if_the_copies_that_are_due_take_longer_than_the_period() -> None:
    """Three fragments of 1e6 bytes have a copy on a node and one on the storage path."""
    live = [replace(checkpoint(7, num_nodes=3, level=Level.DURABLE), size_bytes=3_000_000)]
    holders, needed = holders_of("abc", {7: ("a", "b", "c")}), 6e6 / EVERY_S
    cases = (
        (Budget(0.99 * needed, 0.0), DUE_S, True),
        (Budget(1.01 * needed, 0.0), DUE_S, False),
        (Budget(1e9, 1e9 * EVERY_S / 5), DUE_S, True),  # one read per burst
        (Budget(0.99 * needed, 0.0), EVERY_S - 1, False),  # nothing is due
        (Budget(0.0, 0.0), DUE_S, False),  # off
    )
    for budget, wall_s, is_behind in cases:
        scrubs = Scrubs()
        next_of(scrubs, live, holders, wall_s=wall_s, budget=budget)
        assert scrubs.is_behind == is_behind


def test_a_suspect_copy_is_read_first_and_proves_nothing_about_others() -> None:
    scrubs, holders = Scrubs(), holders_of("ab", {7: ("ab",), 8: ("ab",)})
    live = [checkpoint(7), checkpoint(8)]
    assert next_of(scrubs, live, holders) == "7.0 a"
    scrubs.suspect(Scrub(attempt=checkpoint(8).id, node_index=0, place="b"))
    scrubs.ended(ended("7.0 a", "shard"))
    assert next_of(scrubs, live, holders) == "8.0 b"
    scrubs.ended(ended("8.0 b"))
    assert next_of(scrubs, live, holders) == "7.0 b"
    scrubs.ended(ended("7.0 b", "shard"))
    assert next_of(scrubs, live, holders) == "", "step 7 was bad on both nodes"
    assert next_of(scrubs, live, holders) == "8.0 a", "a round reads all copies"


def test_a_suspect_that_cannot_be_read_is_tried_again_a_few_times() -> None:
    scrubs, holders = Scrubs(), holders_of("a", {7: ("a",)})
    scrubs.suspect(Scrub(attempt=checkpoint(7).id, node_index=0, place="a"))
    for _ in range(MAX_TRIES):
        assert next_of(scrubs, [checkpoint(7)], holders, wall_s=0.0) == "7.0 a", "no round is due"
        scrubs.ended(ended("7.0 a", error="time-out"))
    assert next_of(scrubs, [checkpoint(7)], holders, wall_s=0.0) == ""


def test_a_suspect_that_cannot_be_read_spoils_no_round_and_one_that_shares_bad_bytes_does() -> None:
    scrubs, holders = Scrubs(), holders_of("a", {7: ("a",), 8: ("a",)})
    live = [checkpoint(7), checkpoint(8, verified_at_s=DUE_S)]
    suspect = Scrub(attempt=checkpoint(8).id, node_index=0, place="a")
    scrubs.suspect(suspect)
    for _ in range(MAX_TRIES):
        assert next_of(scrubs, live, holders) == "8.0 a"
        scrubs.ended(ended("8.0 a", error="time-out"))
    assert next_of(scrubs, live, holders) == "7.0 a"
    scrubs.ended(ended("7.0 a"))
    scrubs.suspect(suspect)
    assert next_of(scrubs, live, holders) == "8.0 a"
    scrubs.ended(replace(ended("8.0 a", "shard"), shared=((checkpoint(7).id, 0),)))
    assert next_of(scrubs, live, holders) == "", "step 7 is not verified: its copy was taken away"


def test_a_round_reads_a_copy_again_that_became_a_suspect_while_its_read_failed() -> None:
    scrubs, live, holders = Scrubs(), [checkpoint(7)], holders_of("ab", {7: ("ab",)})
    assert next_of(scrubs, live, holders) == "7.0 a"
    scrubs.suspect(Scrub(attempt=checkpoint(7).id, node_index=0, place="a"))
    scrubs.ended(ended("7.0 a", error="time-out"))
    for _ in range(MAX_TRIES):
        assert next_of(scrubs, live, holders) == "7.0 a"
        scrubs.ended(ended("7.0 a", error="time-out"))
    assert next_of(scrubs, live, holders) == "7.0 b"
    scrubs.ended(ended("7.0 b"))
    for _ in range(MAX_TRIES - 1):
        assert next_of(scrubs, live, holders) == "7.0 a"
        scrubs.ended(ended("7.0 a", error="time-out"))
    assert next_of(scrubs, live, holders) == "", "one copy was never read"


def test_a_suspect_on_the_storage_path_is_read_after_those_on_nodes_and_once_it_is_durable() -> None:
    scrubs, holders = Scrubs(), holders_of("a", {7: ("a",), 8: ("a",)})
    live = [checkpoint(7, level=Level.DURABLE), checkpoint(8)]
    for step, place in ((8, REMOTE), (7, REMOTE), (8, "a")):
        scrubs.suspect(Scrub(attempt=checkpoint(step).id, node_index=0, place=place))
    for name in ("8.0 a", "7.0 remote"):
        assert next_of(scrubs, live, holders, wall_s=0.0) == name
        scrubs.ended(ended(name))
    assert next_of(scrubs, live, holders, wall_s=0.0) == "" and len(scrubs.suspect_remote) == 1
    live[1] = checkpoint(8, level=Level.DURABLE)
    assert next_of(scrubs, live, holders, wall_s=0.0) == "8.0 remote"
    scrubs.ended(ended("8.0 remote", "shard"))
    assert not scrubs.suspect_remote


def test_a_suspect_without_a_checkpoint_or_a_holder_is_forgotten() -> None:
    scrubs, holders = Scrubs(), holders_of("a", {7: ("a",)})
    scrubs.suspect(Scrub(attempt=checkpoint(7).id, node_index=0, place="b"))
    scrubs.suspect(Scrub(attempt=checkpoint(8).id, node_index=0, place="a"))
    assert next_of(scrubs, [checkpoint(7)], holders, wall_s=0.0) == ""


def test_a_retired_checkpoint_is_not_read_on() -> None:
    scrubs, holders = Scrubs(), holders_of("ab", {7: ("ab",), 8: ("a",)})
    assert next_of(scrubs, [checkpoint(7), checkpoint(8)], holders) == "7.0 a"
    assert next_of(scrubs, [checkpoint(8)], holders) == "", "its last read is under way"
    scrubs.ended(ended("7.0 a", "deleted"))
    assert next_of(scrubs, [checkpoint(8)], holders) == "8.0 a"
    scrubs.ended(ended("8.0 a"))
    assert next_of(scrubs, [checkpoint(8)], holders) == "verified 8"


def test_reports_about_other_reads_change_nothing() -> None:
    scrubs, live, holders = Scrubs(), [checkpoint(7)], holders_of("ab", {7: ("ab",)})
    scrubs.ended(ended("7.0 a"))
    assert next_of(scrubs, live, holders) == "7.0 a"
    for name in ("7.0 b", "6.0 a", "7.1 a"):
        scrubs.ended(ended(name))
        assert next_of(scrubs, live, holders) == ""
    scrubs.ended(ended("7.0 a"))
    scrubs.ended(ended("7.0 a"))
    assert next_of(scrubs, live, holders) == "7.0 b"


def test_the_budget_holds_reads_back_and_loses_none() -> None:
    scrubs, live, holders = Scrubs(), [checkpoint(7, size_bytes=100)], holders_of("ab", {7: ("ab",)})
    budget = Budget(bytes_per_s=10, burst_bytes=100)
    assert next_of(scrubs, live, holders, budget=budget) == "7.0 a"
    scrubs.ended(ended("7.0 a"))
    assert next_of(scrubs, live, holders, budget=budget, now_s=9.0) == ""
    assert next_of(scrubs, live, holders, budget=budget, now_s=10.5) == "7.0 b"
    nothing = Budget(bytes_per_s=0, burst_bytes=100)
    assert next_of(Scrubs(), live, holders, budget=nothing, now_s=1e9) == ""


# -- any faults --------------------------------------------------------------------------------------


class World:
    """Live checkpoints on a few nodes and the storage path, some of their copies bad; a log of `Verified`."""

    START_S = 1_790_000_000.0

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.every_s = 200.0
        self.budget = Budget(bytes_per_s=100, burst_bytes=100)
        self.scrubs, self.holders = Scrubs(), Holders()
        self.nodes = [f"n{i}" for i in range(self.random.randint(2, 5))]
        self.holders.live = frozenset(self.nodes)
        self.live: dict[str, CheckpointInfo] = {}
        self.bad: dict[Scrub, float] = {}  # since when
        self.read_s: dict[Scrub, float] = {}  # when each copy was last read and found good
        self.now_s = 0.0
        self.running: Scrub | None = None
        for step in range(1, self.random.randint(2, 5)):
            self.commit(step)

    def commit(self, step: int) -> None:
        num_nodes, level = self.random.randint(1, 3), self.random.choice(list(Level))
        c = checkpoint(step, num_nodes=num_nodes, level=level, committed_at_s=self.START_S + self.now_s)
        self.live[c.id.attempt] = c
        for index in range(num_nodes):
            for node in self.random.sample(self.nodes, min(self.random.randint(1, 2), len(self.nodes))):
                self.holders.add(c.id.attempt, index, node)

    def copies(self, c: CheckpointInfo) -> list[Scrub]:
        remote = [REMOTE] if c.level >= Level.DURABLE else []
        return [
            Scrub(attempt=c.id, node_index=i, place=place)
            for i in range(c.num_nodes)
            for place in (*sorted(self.holders.of(c.id.attempt, i)), *remote)
        ]

    def all_copies(self) -> list[Scrub]:
        return [copy for c in self.live.values() for copy in self.copies(c)]

    def tick(self, *, faulty: bool) -> None:
        self.now_s += 1.0
        if self.running is not None and self.random.random() < 0.7:
            self.answer(self.running, faulty=faulty)
        for what in self.scrubs.assign(
            live=tuple(self.live.values()),
            holders=self.holders,
            every_s=self.every_s,
            budget=self.budget,
            now_s=self.now_s,
            wall_s=self.START_S + self.now_s,
        ):
            if isinstance(what, Verified):
                self.verified(what)
            else:
                assert what in self.all_copies()
                self.running = what

    def answer(self, copy: Scrub, *, faulty: bool) -> None:
        """End a read, or let it fail; a damaged copy is replaced by a good one at once."""
        self.running = None
        error = "busy" if faulty and self.random.random() < 0.1 else None
        damage = ("bad",) if copy in self.bad and error is None else ()
        if not damage and error is None:
            self.read_s[copy] = self.now_s
        self.scrubs.ended(
            ScrubEnded(
                attempt=copy.attempt,
                node_index=copy.node_index,
                place=copy.place,
                damage=damage,
                error=error,
            )
        )
        if damage:
            del self.bad[copy]

    def verified(self, op: Verified) -> None:
        """Assert that this round read every fragment, and that now bad copies were good when read."""
        c = self.live[op.attempt]
        before_s = -1.0 if c.verified_at_s is None else c.verified_at_s - self.START_S
        reads = [(copy.node_index, at) for copy, at in self.read_s.items() if copy.attempt == c.id]
        for index in range(c.num_nodes):
            assert any(at > before_s for i, at in reads if i == index)
        for copy in set(self.copies(c)) & set(self.bad):
            assert self.bad[copy] >= self.read_s[copy]
        self.live[op.attempt] = replace(c, verified_at_s=self.START_S + self.now_s)

    def disturb(self) -> None:
        what = self.random.random()
        copies = self.all_copies()
        if what < 0.01 and copies:
            self.bad.setdefault(self.random.choice(copies), self.now_s)
        elif what < 0.02 and len(self.live) > 1:
            self.live.pop(self.random.choice(sorted(self.live)))
        elif what < 0.03 and len(self.live) < 6:
            self.commit(10 + int(self.now_s))
        elif what < 0.035 and len(self.holders.live) > 1:
            node = self.random.choice(sorted(self.holders.live))
            self.holders.lose(frozenset({node}))
            self.holders.live -= {node}
            self.nodes.remove(node)


@pytest.mark.parametrize("seed", every_few(range(60)))
def test_everything_is_read_in_the_time_that_its_bytes_need(seed: int) -> None:
    world = World(seed)
    num_copies = len(world.all_copies())
    for _ in range(int(4 * world.every_s)):
        world.tick(faulty=False)
    round_s = 5.0 * num_copies  # a copy takes at most a second of the budget, and a few until it is answered
    for copy in world.all_copies():
        assert world.now_s - world.read_s[copy] <= world.every_s + round_s + 10, (seed, copy)


@pytest.mark.parametrize("seed", every_few(range(60)))
def test_bad_copies_are_found_whatever_else_happens(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "AGAIN_S", 20.0)
    monkeypatch.setattr(scrub, "SLACK_S", 30.0)
    world = World(seed)
    for _ in range(1500):
        world.disturb()
        world.tick(faulty=True)
    for _ in range(int(8 * world.every_s)):
        world.tick(faulty=False)
    readable = [c for c in world.live.values() if world.holders.can_serve(c)]
    left = [copy for c in readable for copy in world.copies(c) if copy in world.bad]
    assert not left, seed
    for c in readable:
        assert c.verified_at_s is not None
        assert world.START_S + world.now_s - c.verified_at_s < 5 * world.every_s, (seed, c.step)
