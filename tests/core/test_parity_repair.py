"""Repair of parity groups when nodes fail, when much is to be done, and when nobody trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from ray_ckpt.core import messages as m
from ray_ckpt.core.drain import COMPUTED_S
from ray_ckpt.core.repair import MAX_RETRY_S, RETRY_S
from ray_ckpt.types import Level
from tests.core.driver import Harness, of
from tests.core.test_parity_groups import coded, harness, read, save, tolerated


def play(
    run: Harness, effects: Iterable[m.Effect], seconds: float, fails: Callable[[m.Code], bool]
) -> list[m.Code]:
    """Let time pass in steps of 2 s while nodes carry out orders or fail; return the orders."""
    orders: list[m.Code] = []
    for _ in range(int(seconds / 2.0)):
        codes = of(effects, m.Code)
        orders += codes
        ends = [coded(code, error="disk full" if fails(code) else None) for code in codes]
        effects = [*run.feed(*ends), *run.tick(2.0)]
    return orders


def test_nodes_that_fail_do_not_keep_repair_from_others() -> None:
    run = harness("abcdefgh")
    save(run, 10)
    orders = play(run, run.lose_long_ago("b"), 60.0, lambda code: code.node_id in "ef")
    assert [code.node_id for code in orders] == ["e", "f", "g", "g"]
    assert tolerated(run, 10) == 2


def test_a_free_node_that_always_fails_is_tried_less_and_less_often() -> None:
    """Meanwhile the member shares a node, and is not copied from one such node to another."""
    run = harness("abcde")
    save(run, 10)
    seconds = 10 * MAX_RETRY_S
    orders = play(run, run.lose("b"), seconds, lambda code: code.node_id == "e")
    tries = Counter(code.node_id for code in orders)
    assert 10 <= tries["e"] <= 20
    assert len(orders) == tries["e"] + 2, "and its files and its parity file beside another member"
    assert tolerated(run, 10) == 1


def test_a_group_that_lacks_a_member_comes_before_parity_files_of_others() -> None:
    nodes = "abcdefgh"
    run = Harness(nodes + "xyz", parity=(2, 2), remote_every=1000)
    run.open(nodes)
    codes = of(run.save(10), m.Code)
    first = codes[0].places.group
    run.feed(*(coded(code, error="disk full" if code.places.group == first else None) for code in codes))
    lost = next(node for at, node in enumerate(nodes) if at not in first.members)
    orders = play(run, run.lose_long_ago(lost), 60.0, lambda code: False)
    assert (orders[0].node_index, orders[0].is_parity) == (nodes.index(lost), False)
    assert len(orders) == 2 + first.size


def test_repair_leaves_to_saves_what_they_still_make() -> None:
    """The parity of large fragments takes longer than commits wait."""
    run = harness(goal_timeout_s=60.0)
    codes = of(run.save(10), m.Code)
    assert not play(run, (), 600.0, lambda code: False)
    assert run.checkpoint(run.attempt(10)).level is Level.LOCAL
    run.feed(*map(coded, codes))
    assert run.checkpoint(run.attempt(10)).replicas == 2


def test_doubts_end_with_the_damage() -> None:
    """Another file is damaged later; then all files are read again before the parity is doubted."""
    run = harness("abcdefgh", scrub_bytes_per_s=0)
    save(run, 10)
    for damaged in "cd":
        home = run.machine.view.parity_groups(run.attempt(10).attempt)[0].fragments[1]
        effects: list[m.Effect] = [*run.lose_long_ago(*home)]
        is_found = False
        for _ in range(30):
            scrubs, codes = of(effects, m.Scrub), of(effects, m.Code)
            effects = [*run.tick(RETRY_S)]
            for code in codes:
                is_wrong = not is_found and (code.node_index, code.is_parity) == (1, False)
                end = coded(code, error="wrong bytes" if is_wrong else None)
                effects += run.feed(replace(end, is_damage=is_wrong))
            for scrub in scrubs:
                is_found |= scrub.place == damaged
                effects += run.feed(read(scrub, *["shard"] * (scrub.place == damaged)))
        assert is_found and tolerated(run, 10) == 2


def test_parity_is_not_doubted_because_of_a_copy_that_cannot_be_read() -> None:
    run = harness("abcdef", scrub_bytes_per_s=0)
    save(run, 10)
    effects: list[m.Effect] = [*run.lose("b")]
    for _ in range(200):
        scrubs, codes = of(effects, m.Scrub), of(effects, m.Code)
        effects = [*run.tick(RETRY_S)]
        effects += run.feed(
            *(replace(coded(code, error="wrong bytes"), is_damage=True) for code in codes),
            *(replace(read(scrub), error="I/O error" if scrub.place == "c" else None) for scrub in scrubs),
        )
    assert tolerated(run, 10) == 1


def ended_with_a_loss(*, requests: bool = False) -> tuple[Harness, list[m.Effect]]:
    """Return a finished run that has lost a member of step 10, which is due; step 20 is on the storage path.

    With `requests` step 20 is not there, and the finish waits for it.
    """
    run = harness("abcdef", remote_every=1000 if requests else 1, retire_grace_s=60.0)
    drains = of(save(run, 10), m.Drain)
    if not requests:
        run.drain_all(save(run, 20))
        run.feed(m.FinishRequested(token="end", ends_group=True, has_failed=False))
        assert run.machine.plan is None
    effects: list[m.Effect] = [*run.lose("b")]
    for drain in drains:
        if drain.node_id != "b":
            effects += run.drained(drain)
    if requests:
        effects += run.feed(m.FinishRequested(token="end", ends_group=True, has_failed=False))
    return run, effects


def wait(run: Harness, effects: Iterable[m.Effect], seconds: float, tick_s: float = 2.0) -> list[m.Code]:
    """Let uploads and listings happen, and nobody compute anything; return the orders to compute."""
    orders = of(effects, m.Code)
    for _ in range(int(seconds / tick_s)):
        found = [*run.drain_all(effects), *run.tick(tick_s)]
        for listing in of(found, m.SweepRemote):
            found += run.feed(m.RemoteListed(number=listing.number))
        for delete in of(found, m.Delete):
            found += run.feed(m.DeleteEnded(attempt=delete.attempt, place=delete.place, error=None))
        orders += of(found, m.Code)
        effects = found
    return orders


def level(run: Harness, step: int) -> Level:
    (found,) = (c.level for c in run.machine.history.checkpoints.values() if c.step == step)
    return found


def test_an_upload_waits_for_a_computation_as_long_as_it_takes() -> None:
    for requests in (False, True):
        run, effects = ended_with_a_loss(requests=requests)
        (order,) = wait(run, effects, 2 * COMPUTED_S, tick_s=30.0)
        assert level(run, 10) is Level.REPLICATED
        assert not of(run.transcript, m.PutAway) and not of(run.transcript, m.Fail)
        wait(run, run.feed(coded(order)), 100.0)
        assert level(run, 10) is Level.DURABLE
        assert of(run.transcript, m.PutAway)


def test_an_upload_waits_no_longer_for_computations_that_fail() -> None:
    """Each is tried again, so that one is nearly always under way."""
    for requests in (False, True):
        run, effects = ended_with_a_loss(requests=requests)
        for _ in range(int(3 * COMPUTED_S / 10.0)):
            codes = of(effects, m.Code)
            found = [*run.drain_all(effects), *run.tick(10.0)]
            found += run.feed(*(coded(code, error="disk full") for code in codes))
            for listing in of(found, m.SweepRemote):
                found += run.feed(m.RemoteListed(number=listing.number))
            effects = found
        assert len(of(run.transcript, m.Code)) > 15
        assert of(run.transcript, m.Fail if requests else m.PutAway)
        assert not run.machine.view.drains_underway


def test_orders_outlive_the_group_that_they_were_given_under() -> None:
    """After a loss the launcher opens a new group, which takes inventories."""
    run = harness("abcdefgh", inventory_wait_s=0.0)
    save(run, 10)
    orders = of([*run.lose_long_ago("b", "c"), *run.tick(2.0)], m.Code)
    assert {order.node_index for order in orders} == {1, 2}
    run.feed(run.group("adef"))
    run.feed(coded(orders[0]))
    assert not [code for code in of(run.tick(2.0), m.Code) if code.node_index == orders[1].node_index]
    assert orders[1].node_id in run.machine.view.needed_nodes()


def test_a_doubt_about_a_member_ends_when_a_node_has_it() -> None:
    run = harness("abcdef", scrub_bytes_per_s=0)
    save(run, 10)
    (order,) = of([*run.lose_long_ago("b"), *run.tick(2.0)], m.Code)
    effects = run.feed(replace(coded(order, error="wrong bytes"), is_damage=True))
    for _ in range(5):
        effects = (*run.feed(*map(read, of(effects, m.Scrub))), *run.tick(0.1))
    assert run.machine._maintenance._doubts
    run.machine._context.holders.seen(frozenset("abcdef"))
    run.machine._context.holders.report(run.attempt(10).attempt, 1, "b")
    run.tick(MAX_RETRY_S)
    assert not run.machine._maintenance._doubts


def test_a_run_is_put_away_when_nobody_computes_any_more() -> None:
    """Those are the orders of the last save: what comes later would be left on the nodes."""
    run = harness("abcdef", remote_every=1, retire_grace_s=60.0, goal_timeout_s=10.0)
    codes = of(run.save(10), m.Code)
    wait(run, run.tick(20.0), 20.0)
    wait(run, run.feed(m.FinishRequested(token="end", ends_group=True, has_failed=False)), 300.0)
    assert not of(run.transcript, m.PutAway)
    wait(run, run.feed(*map(coded, codes)), 10.0)
    assert of(run.transcript, m.PutAway)


def test_wrong_bytes_are_looked_into_when_nobody_trains_too() -> None:
    run, effects = ended_with_a_loss()
    read_on = set[str]()
    for _ in range(100):
        scrubs, codes = of(effects, m.Scrub), of(effects, m.Code)
        read_on |= {scrub.place for scrub in scrubs}
        effects = [*run.tick(RETRY_S)]
        for code in codes:
            is_wrong = "c" not in read_on
            end = coded(code, error="wrong bytes" if is_wrong else None)
            effects += run.feed(replace(end, is_damage=is_wrong))
        effects += run.feed(*(read(scrub, *["shard"] * (scrub.place == "c")) for scrub in scrubs))
        effects += run.drain_all(effects)
    assert level(run, 10) is Level.DURABLE


def test_what_is_lost_is_computed_on_a_leaving_node_if_all_leave() -> None:
    """It is uploaded from there."""
    run = harness("abcd", remote_every=1000)
    save(run, 10)
    effects = [
        *run.feed(*(coded(code, error="it leaves") for code in of(run.lose_long_ago("b"), m.Code))),
        *run.feed(m.NodesSeen(live=frozenset("acd"), draining=frozenset("acd"))),
    ]
    orders = play(run, effects, 20.0, lambda code: False)
    assert [(code.node_index, code.is_parity) for code in orders] == [(1, False)]


def test_a_node_that_computes_is_needed() -> None:
    """An idle agent would end otherwise."""
    run = harness("abcde")
    save(run, 10)
    (order,) = of([*run.lose_long_ago("b"), *run.tick(2.0)], m.Code)
    assert order.node_id == "e" and "e" in run.machine.view.needed_nodes()


def test_what_is_lost_is_computed_before_a_node_of_its_group_leaves() -> None:
    """Also while the next group restores: later there may be too few files."""
    run = harness("abcdef")
    save(run, 10)
    run.lose("b")
    run.feed(run.group("aef"))
    assert not of(run.tick(2.0), m.Code)
    leaving = m.NodesSeen(live=frozenset(run.live), draining=frozenset("c"))
    assert {code.node_index for code in of((*run.feed(leaving), *run.tick(2.0)), m.Code)} == {1}
