"""Stories of pins: a named hold on a checkpoint, in the log."""

from __future__ import annotations

import pytest

from ray_ckpt.core import messages as m
from ray_ckpt.errors import ConfigError, Fenced
from ray_ckpt.format import records as r
from ray_ckpt.types import Level
from tests.core.driver import START_S, Harness, of, one, ops


def trained(*, saves: int = 2) -> Harness:
    """Return a run of steps 10, 20, ... that keeps only the last one and pinned ones."""
    run = Harness("ab", keep_last=1, remote_every=1)
    run.open("ab")
    for step in range(10, 10 * saves + 10, 10):
        save(run, step)
    return run


def save(run: Harness, step: int) -> None:
    """Drain a checkpoint, so that no older one is the newest on the storage path."""
    run.drain_all(run.save(step))


def pin(run: Harness, attempt: str, *, owner: str = "me", for_s: float | None = None) -> m.PinRequested:
    end_s = None if for_s is None else START_S + run.now_s + for_s
    return m.PinRequested(token=f"pin-{owner}", attempt=attempt, owner=owner, expires_at_s=end_s)


def unpin(attempt: str, *, owner: str = "me") -> m.UnpinRequested:
    return m.UnpinRequested(token=f"unpin-{owner}", attempt=attempt, owner=owner)


def newest(run: Harness) -> str:
    return run.machine.history.lineage()[-1].id.attempt


def live_steps(run: Harness) -> list[int]:
    return [c.step for c in run.machine.history.live()]


def test_what_is_pinned_outlives_its_retention() -> None:
    run = trained(saves=1)
    effects = run.feed(pin(run, newest(run)))
    assert one(effects, m.Reply) == m.Reply(token="pin-me", value=None)
    save(run, 20)
    save(run, 30)
    assert live_steps(run) == [10, 30]


def test_a_pin_outlives_its_coordinator() -> None:
    run = trained(saves=1)
    run.feed(pin(run, newest(run)))
    run.start_coordinator()
    run.open("ab")
    save(run, 20)
    save(run, 30)
    assert live_steps(run) == [10, 30]


def test_a_pin_is_confirmed_when_it_is_in_the_log() -> None:
    run = trained(saves=1)
    requested = pin(run, newest(run))
    run.store_mode = "held"
    effects = run.feed(requested)
    assert ops(effects) == [r.Pin(attempt=requested.attempt, owner="me", expires_at_s=None)]
    assert not of(effects, m.Reply)
    assert of(run.confirm(), m.Reply)


def test_pins_are_requested_one_after_the_other_and_each_is_answered() -> None:
    run = trained(saves=1)
    attempt = newest(run)
    run.store_mode = "held"
    run.feed(pin(run, attempt, owner="one"), pin(run, attempt, owner="two"), unpin(attempt, owner="one"))
    tokens = [reply.token for reply in of(run.confirm(), m.Reply)]
    assert tokens == ["pin-one", "pin-two", "unpin-one"]
    assert run.machine.history.checkpoints[attempt].pins == {"two": None}


def test_a_pin_ends_when_its_time_is_over() -> None:
    run = trained(saves=1)
    run.feed(pin(run, newest(run), for_s=100.0))
    run.tick(99.0)
    save(run, 20)
    assert live_steps(run) == [10, 20]
    run.tick(2.0)
    save(run, 30)
    assert live_steps(run) == [30]


def test_who_takes_the_pin_away_gives_the_checkpoint_up() -> None:
    run = trained(saves=1)
    attempt = newest(run)
    run.feed(pin(run, attempt, owner="one"), pin(run, attempt, owner="two"))
    assert one(run.feed(unpin(attempt, owner="one")), m.Reply).token == "unpin-one"
    save(run, 20)
    assert live_steps(run) == [10, 20], "another still holds it"
    run.feed(unpin(attempt, owner="two"))
    save(run, 30)
    assert live_steps(run) == [30]


def test_a_pin_is_made_longer_by_its_owner() -> None:
    run = trained(saves=1)
    attempt = newest(run)
    run.feed(pin(run, attempt, for_s=10.0), pin(run, attempt, for_s=1000.0))
    run.tick(100.0)
    save(run, 20)
    assert live_steps(run) == [10, 20]


@pytest.mark.parametrize("kind", ["retired", "unknown"])
def test_what_is_not_live_cannot_be_pinned(kind: str) -> None:
    run = trained()
    gone = next(iter(run.machine.history.checkpoints)) if kind == "retired" else "0" * 16
    records = run.records
    failed = one(run.feed(pin(run, gone)), m.Fail)
    assert failed.token == "pin-me" and isinstance(failed.error, ConfigError) and failed.error.hint
    assert run.records == records


def test_a_pin_of_nothing_does_not_hold_up_the_next_one() -> None:
    run = trained()
    run.feed(pin(run, "0" * 16, owner="one"), pin(run, newest(run), owner="two"))
    run.tick()
    assert one(run.transcript, m.Fail).token == "pin-one"
    assert "pin-two" in [reply.token for reply in of(run.transcript, m.Reply)]


def test_the_pin_of_a_retired_checkpoint_can_still_be_taken_away() -> None:
    run = trained(saves=1)
    attempt = newest(run)
    run.feed(pin(run, attempt, for_s=1.0))
    run.tick(2.0)
    save(run, 20)
    assert run.machine.history.checkpoints[attempt].state != "live"
    assert one(run.feed(unpin(attempt)), m.Reply).token == "unpin-me"


def test_a_pin_that_comes_after_the_decision_to_retire_comes_too_late() -> None:
    run = trained(saves=1)
    attempt = newest(run)
    drains = run.save(20)
    run.store_mode = "held"
    run.drain_all(drains)
    assert of(run.confirm(hold_next=True), m.Append), "the retirement follows from the promotion"
    run.feed(pin(run, attempt))
    effects = run.confirm()
    assert run.machine.history.checkpoints[attempt].state == "retired"
    assert isinstance(one(effects, m.Fail).error, ConfigError)


def test_what_is_pinned_beyond_its_place_among_the_last_goes_to_the_storage_path() -> None:
    run = Harness("ab", keep_last=1, remote_every=100)
    run.open("ab")
    run.save(10)
    pinned = run.attempt(10)
    run.feed(pin(run, pinned.attempt))
    run.save(20)
    assert {drain.attempt for drain in of(run.tick(), m.Drain)} == {pinned}


def test_what_is_pinned_off_the_lineage_is_repaired_and_goes_to_the_storage_path() -> None:
    run = Harness("abcd", keep_last=2, remote_every=100, inventory_wait_s=0.0)
    run.open("ab")
    for step in (10, 20):
        run.save(step)
    pinned = run.attempt(20)
    run.feed(pin(run, pinned.attempt))
    run.open("ab", resume="step:10")
    copies = of(run.lose_long_ago("a"), m.Replicate)
    assert {(c.attempt.step, c.node_index) for c in copies} == {(10, 0), (10, 1), (20, 0), (20, 1)}
    assert [c.attempt.step for c in copies] == [10, 10, 20, 20], "the newest of the lineage is first"
    run.open("bc")
    run.save(30)
    drains = of(run.tick(), m.Drain)
    assert {drain.attempt for drain in drains} == {pinned}
    run.drain_all(drains)
    assert run.checkpoint(pinned).level is Level.DURABLE


def test_a_waiting_pin_fails_when_the_coordinator_steps_down() -> None:
    run = trained(saves=1)
    run.store_mode = "held"
    run.feed(pin(run, newest(run), owner="one"), pin(run, newest(run), owner="two"))
    Harness("ab", store=run.store)
    effects = run.confirm()
    assert {(f.token, type(f.error)) for f in of(effects, m.Fail)} == {
        ("pin-one", Fenced),
        ("pin-two", Fenced),
    }
    late = one(run.feed(pin(run, newest(run), owner="late")), m.Fail)
    assert isinstance(late.error, Fenced)
