"""Parity files that give wrong bytes, or that a scrub has taken away, and messages of an earlier time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from ray_ckpt.core import messages as m
from ray_ckpt.core.drain import COMPUTED_S
from ray_ckpt.core.maintenance import MAINTENANCE_S
from ray_ckpt.core.parity_files import tolerance
from ray_ckpt.core.repair import RETRY_S
from ray_ckpt.format.names import parity_file
from ray_ckpt.types import AttemptId, Level
from tests.core.driver import Disk, Harness, of, one
from tests.core.test_parity_groups import coded, harness, keep, read, save


def carry_out(run: Harness, effects: Iterable[m.Effect], *, bad_step: int | None = None) -> list[m.Code]:
    """Let repair and scrubs do what they order for two minutes; return the orders.

    Fragments of `bad_step` are computed with wrong bytes.
    """
    orders: list[m.Code] = []
    effects = list(effects)
    for _ in range(60):
        codes, scrubs = of(effects, m.Code), of(effects, m.Scrub)
        orders += codes
        effects = [*run.tick(RETRY_S)]
        for code in codes:
            is_wrong = code.attempt.step == bad_step and not code.is_parity
            if code.is_parity:
                keep(run, code)
            end = coded(code, error="wrong bytes" if is_wrong else None)
            effects += run.feed(replace(end, is_damage=is_wrong))
        for scrub in scrubs:
            effects += run.feed(read(scrub))
    return orders


def tolerates(run: Harness, attempt: AttemptId) -> int:
    return min(map(tolerance, run.machine.view.parity_groups(attempt.attempt)))


def distrusted() -> tuple[Harness, AttemptId, Disk]:
    """Return a run without node b whose parity of step 20 was found to be wrong, that step, the disk of b."""
    run = harness("abcdef", scrub_bytes_per_s=0, inventory_wait_s=0.0)
    save(run, 10)
    save(run, 20)
    disk, attempt = run.disks["b"], run.attempt(20)
    carry_out(run, run.lose_long_ago("b"), bad_step=20)
    assert tolerates(run, attempt) == -1
    return run, attempt, disk


def come_back(run: Harness, disk: Disk) -> tuple[m.Effect, ...]:
    """Let node b come back, so that all members of the group are there."""
    run.disks["b"] = disk
    run.live.add("b")
    return run.feed(m.NodesSeen(live=frozenset(run.live)), m.NodesJoined(inventories={"b": disk.inventory()}))


def test_wrong_parity_is_in_no_later_inventory_and_the_next_group_gets_an_older_checkpoint() -> None:
    run, attempt, _ = distrusted()
    run.open("acde")
    assert tolerates(run, attempt) == -1
    assert run.plan.resume is not None and run.plan.resume.checkpoint.step == 10


def test_agents_that_start_again_do_not_bring_wrong_parity_back() -> None:
    run, attempt, _ = distrusted()
    run.feed(m.NodesJoined(inventories={node: run.disks[node].inventory() for node in "acd"}))
    assert tolerates(run, attempt) == -1


def test_a_node_with_nothing_but_wrong_parity_is_emptied_with_its_checkpoint() -> None:
    run, attempt, _ = distrusted()
    run.disks["f"].parities += [held for held in run.disks["c"].parities if held.attempt == attempt]
    run.feed(m.NodesJoined(inventories={"f": run.disks["f"].inventory()}))
    assert "f" in run.machine._context.holders.may_have(attempt.attempt)


def test_parity_that_is_made_anew_counts_in_reports_and_inventories() -> None:
    run, attempt, disk = distrusted()
    orders = carry_out(run, come_back(run, disk))
    assert {code.node_id for code in orders if code.attempt == attempt and code.is_parity} == set("abcd")
    assert tolerates(run, attempt) == 2
    run.open("abcd")
    assert tolerates(run, attempt) == 2


def test_parity_that_was_wrong_is_made_anew_without_links_to_earlier_parity() -> None:
    run, attempt, disk = distrusted()
    orders = carry_out(run, come_back(run, disk))
    assert {code.is_anew for code in orders if code.attempt == attempt and code.is_parity} == {True}
    assert not any(code.is_anew for code in orders if code.attempt != attempt or not code.is_parity)


def test_parity_that_a_scrub_has_taken_away_may_be_linked() -> None:
    """The bytes from which it was made are not in doubt."""
    run = harness()
    save(run, 10)
    damage = read(m.Scrub(attempt=run.attempt(10), node_index=2, place="c"), parity_file(2, 4))
    assert not one((*run.feed(damage), *run.tick(2.0)), m.Code).is_anew


def test_a_node_that_finds_its_earlier_shard_bad_has_it_read_and_the_group_links_no_parity() -> None:
    run = harness(scrub_bytes_per_s=0)
    save(run, 10)
    earlier, attempt = run.attempt(10), run.attempt(20)
    effects = list(run.feed(*(run.stored(attempt, node) for node in "abd")))
    stored = run.stored(attempt, "c")
    facts = replace(stored.facts, is_rewritten=True, bad_copies=(earlier.attempt, "of another run"))
    effects += run.feed(replace(stored, facts=facts))
    codes = of(effects, m.Code)
    assert [code.is_anew for code in codes] == [True] * 4
    scrubs = of([*effects, *run.tick(MAINTENANCE_S)], m.Scrub)
    assert scrubs == [m.Scrub(attempt=earlier, node_index=2, place="c")]
    ends = [coded(code, error="busy" if code.node_index == 0 else None) for code in codes]
    repairs = [effect for _ in range(50) for effect in run.tick(2.0)] if run.feed(*ends) else []
    assert [(code.node_index, code.is_anew) for code in of(repairs, m.Code)] == [(0, True)]
    assert not any(code.is_anew for code in of(run.save(30), m.Code))


def test_an_order_that_was_under_way_when_parity_is_distrusted_proves_nothing() -> None:
    run, attempt, disk = distrusted()
    codes = [code for code in of((*come_back(run, disk), *run.tick(2.0)), m.Code) if code.attempt == attempt]
    assert codes
    run.machine._context.holders.distrust_parity(attempt.attempt, codes[0].places.group)
    run.feed(*map(coded, codes))
    (places,) = run.machine.view.parity_groups(attempt.attempt)
    assert not any(places.parities)
    carry_out(run, run.tick(2.0))
    assert tolerates(run, attempt) == 2, "they are ordered again"


def test_a_parity_file_that_a_scrub_has_taken_away_is_not_in_an_older_inventory() -> None:
    run = harness()
    save(run, 10)
    attempt = run.attempt(10)
    opened = replace(run.group("abcd"), asked_s=run.now_s)  # the inventories are taken here
    run.tick(5.0)
    damage = read(m.Scrub(attempt=attempt, node_index=2, place="c"), parity_file(2, 4))
    code = one((*run.feed(damage), *run.tick(2.0)), m.Code)
    run.feed(opened)
    assert tolerates(run, attempt) == 1
    run.feed(coded(code))
    assert tolerates(run, attempt) == 2
    run.tick(5.0)
    run.feed(replace(run.group("abcd"), asked_s=run.now_s))
    assert tolerates(run, attempt) == 2


def test_a_late_report_of_a_parity_file_that_a_scrub_has_taken_away_does_not_count() -> None:
    run = harness(goal_timeout_s=10.0)
    codes = of(run.save(10), m.Code)
    run.feed(*map(coded, codes[:2] + codes[3:]))
    run.tick(20.0)
    assert run.checkpoint(run.attempt(10)).replicas == 1
    run.feed(read(m.Scrub(attempt=run.attempt(10), node_index=2, place="c"), parity_file(2, 4)))
    run.feed(coded(codes[2]))
    assert tolerates(run, run.attempt(10)) == 1
    carry_out(run, run.tick(2.0))
    assert tolerates(run, run.attempt(10)) == 2


@pytest.mark.parametrize(("bad", "is_read"), [("a", True), ("ab", True), ("abc", False)])
def test_the_only_copy_that_a_restore_finds_damaged_is_read_at_once_if_its_group_can_compute_it(
    bad: str, is_read: bool
) -> None:
    run = harness("abcdef", inventory_wait_s=0.0)
    save(run, 10)
    run.feed(run.group("abcd"))
    effects = run.feed(*(run.restored(node, bad_nodes=list(bad)) for node in "abcd"))
    scrubs = of([*effects, *run.tick(MAINTENANCE_S)], m.Scrub)
    assert [scrub.place for scrub in scrubs] == ["a"] * is_read, "one at a time"


def test_the_end_of_a_launcher_uploads_an_older_checkpoint_if_repair_cannot_compute_the_newest() -> None:
    run = harness("abcdef", inventory_wait_s=0.0, keep_last=9)
    save(run, 10)
    save(run, 20)
    older = run.attempt(10)
    run.machine._context.holders.report(older.attempt, 1, "e")  # computed there before
    effects = [*run.lose("b")]
    for at in range(int(COMPUTED_S / 10.0) + 20):
        events: list[m.Event] = [coded(code, error="disk full") for code in of(effects, m.Code)]
        drains = of(effects, m.Drain)
        events += [m.OwnerDied(owner="driver")] * (at < 30)
        effects = [*(effect for drain in drains for effect in run.drained(drain)), *run.feed(*events)]
        effects += run.tick(10.0)
        effects += [
            effect
            for each in of(effects, m.WriteDescription)
            for effect in run.feed(m.DescriptionWritten(attempt=each.checkpoint.id, error=None))
        ]
    assert run.checkpoint(older).level is Level.DURABLE
