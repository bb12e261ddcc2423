"""A copy on the storage path that cannot be read proves nothing: other copies stay until a read succeeds."""

from __future__ import annotations

from typing import Any

import pytest

from ray_ckpt.core import messages as m
from ray_ckpt.core.maintenance import MAINTENANCE_S
from ray_ckpt.core.scrub import AGAIN_S, MAX_TRIES, SLACK_S
from ray_ckpt.format import records as r
from ray_ckpt.types import Level
from tests.core.driver import Harness, of

EVERY_S = 7200.0


def run_with(*steps: int, **options: Any) -> Harness:
    options = {"keep_last": 9, "keep_local": 1, "scrub_bytes_per_s": 10**9, **options}
    run = Harness("ab", inventory_wait_s=0.0, remote_every=1, scrub_every_s=EVERY_S, **options)
    run.open("ab")
    for step in steps:
        save(run, step)
    return run


def save(run: Harness, step: int) -> None:
    run.drain_all(run.save(step))
    run.tick(MAINTENANCE_S)
    assert run.checkpoint(run.attempt(step)).level is Level.DURABLE


def play(run: Harness, seconds: float, *bad: int) -> list[int]:
    """Let time pass and scrubs read; those of the steps `bad` on the storage path fail. Return the failed."""
    failed: list[int] = []
    effects: tuple[m.Effect, ...] = ()
    end_s = run.now_s + seconds
    while run.now_s < end_s:
        events = []
        for scrub in of(effects, m.Scrub):
            is_bad = scrub.place == m.REMOTE and scrub.attempt.step in bad and scrub.node_index == 0
            failed += [scrub.attempt.step] if is_bad else []
            error = "[Errno 5] Input/output error" if is_bad else None
            events.append(
                m.ScrubEnded(
                    attempt=scrub.attempt,
                    node_index=scrub.node_index,
                    place=scrub.place,
                    damage=(),
                    error=error,
                )
            )
        effects = (*run.feed(*events), *run.tick(MAINTENANCE_S if events else 30.0))
    return failed


def evicted(run: Harness) -> set[int]:
    return {effect.attempt.step for effect in of(run.transcript, m.Evict)}


def states(run: Harness) -> dict[int, str]:
    return {c.step: c.state for c in run.machine.history.checkpoints.values()}


def damaged(run: Harness) -> list[str]:
    """Return the fragments of the `damaged` records in the log, oldest first."""
    return [op.fragments for op in run.records if isinstance(op, r.Damaged)]


def test_the_copies_on_nodes_stay_until_a_read_succeeds() -> None:
    run = run_with(10)
    assert play(run, EVERY_S + 600.0, 10) == [10] * MAX_TRIES
    assert any("cannot be read: [Errno 5]" in warn.text for warn in of(run.transcript, m.Warn))
    save(run, 20)
    save(run, 30)
    assert evicted(run) == {20}
    play(run, AGAIN_S + 600.0)
    assert evicted(run) == {10, 20} and not run.machine._context.holders.unsafe_remote


def test_an_older_durable_checkpoint_stays_until_a_read_succeeds() -> None:
    run = run_with(10, 20, keep_last=2)
    play(run, EVERY_S + 600.0, 20)
    run.save(30)  # its upload takes long
    run.save(40)
    assert states(run) == {10: "live", 20: "live", 30: "live", 40: "live"}
    play(run, AGAIN_S + 600.0)
    run.save(50)
    assert states(run)[10] == "retired"


def test_it_is_read_a_few_times_in_each_round_and_is_still_a_source() -> None:
    run = run_with(10)
    play(run, EVERY_S + 600.0, 10)
    hours = 12
    failed = play(run, hours * AGAIN_S, 10)
    assert MAX_TRIES * (hours - 2) <= len(failed) <= MAX_TRIES * hours
    assert run.machine._context.holders.can_serve(run.checkpoint(run.attempt(10)))
    assert damaged(run) == ["0"]


def test_a_read_without_an_answer_proves_nothing_either() -> None:
    run = run_with(10)
    run.tick(EVERY_S)
    for _ in range(40):
        for scrub in of(run.tick(SLACK_S), m.Scrub):
            if scrub.place != m.REMOTE:
                run.feed(
                    m.ScrubEnded(
                        attempt=scrub.attempt,
                        node_index=scrub.node_index,
                        place=scrub.place,
                        damage=(),
                        error=None,
                    )
                )
    assert any(
        "the storage path cannot be read: no answer" in warn.text for warn in of(run.transcript, m.Warn)
    )
    assert damaged(run)[-1] == "0,1", "a later coordinator and the end of the run know it"
    save(run, 20)
    save(run, 30)
    assert evicted(run) == {20}


def test_a_restarted_coordinator_reads_it_again_at_once_and_keeps_what_there_is_until_then() -> None:
    run = run_with(10)
    unreadable = run.attempt(10)
    play(run, EVERY_S + 600.0, 10)
    save(run, 20)
    assert damaged(run) == ["0"]
    run.start_coordinator()
    known = len(run.transcript)
    run.open("ab")
    run.tick(MAINTENANCE_S)
    effects = run.transcript[known:]
    scrubs = [(scrub.attempt, scrub.node_index, scrub.place) for scrub in of(effects, m.Scrub)]
    assert scrubs[0] == (unreadable, 0, m.REMOTE) and not of(effects, m.Evict)
    run.feed(
        m.ScrubEnded(attempt=unreadable, node_index=0, place=m.REMOTE, damage=(), error=None), run.ticked
    )
    play(run, 600.0)
    assert damaged(run) == ["0", ""] and 10 in evicted(run)


@pytest.mark.parametrize("ends_group", [False, True])
def test_a_finish_uploads_it_again(ends_group: bool) -> None:
    run = run_with(10)
    play(run, EVERY_S + 600.0, 10)
    effects = run.feed(m.FinishRequested(token="end", ends_group=ends_group))
    assert {drain.attempt.step for drain in of(effects, m.Drain)} == {10} and not of(effects, m.Reply)
    assert of((*run.drain_all(effects), *run.tick(MAINTENANCE_S)), m.Reply)
    assert damaged(run) == ["0", ""] and not run.machine._context.holders.unsafe_remote


def test_a_finished_run_uploads_it_again_before_its_nodes_are_emptied() -> None:
    run = run_with(10, retire_grace_s=60.0)
    play(run, EVERY_S + 600.0, 10)
    save(run, 20)
    run.feed(m.FinishRequested(token="end", ends_group=True))
    effects = tuple(effect for _ in range(70) for effect in run.tick(MAINTENANCE_S))
    assert {drain.attempt.step for drain in of(effects, m.Drain)} == {10}
    assert 10 not in evicted(run) and not of(effects, m.PutAway)
    run.drain_all(effects)
    for _ in range(70):
        run.feed(m.RemoteListed(number=of(run.transcript, m.SweepRemote)[-1].number))
        run.tick(MAINTENANCE_S)
    assert 10 in evicted(run) and of(run.transcript, m.PutAway)[0].kept == ()


def test_an_outage_of_the_storage_path_takes_few_records_in_a_run_on_many_nodes() -> None:
    nodes = "".join(map(chr, range(0x100, 0x100 + 300)))
    run = Harness(nodes, inventory_wait_s=0.0, remote_every=1, scrub_every_s=EVERY_S, scrub_bytes_per_s=10**9)
    run.open(nodes)
    save(run, 10)

    def read(seconds: float, error: str | None) -> None:
        effects: tuple[m.Effect, ...] = ()
        end_s = run.now_s + seconds
        while run.now_s < end_s:
            events = [
                m.ScrubEnded(
                    attempt=scrub.attempt,
                    node_index=scrub.node_index,
                    place=scrub.place,
                    damage=(),
                    error=error if scrub.place == m.REMOTE else None,
                )
                for scrub in of(effects, m.Scrub)
            ]
            effects = (*run.feed(*events), *run.tick(10.0 if events else 60.0))

    read(EVERY_S + 18_000.0, "[Errno 5] Input/output error")
    assert len(run.machine._maintenance._unread[run.attempt(10).attempt]) == 300
    assert len(damaged(run)) <= r.MAX_DAMAGED
    read(AGAIN_S + 18_000.0, None)
    assert not run.machine._maintenance.unread and damaged(run)[-1] == ""
    assert len(damaged(run)) <= 3 * r.MAX_DAMAGED
