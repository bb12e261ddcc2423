"""Stories of unlucky orders: each was a fault that a review of the protocol found."""

from __future__ import annotations

from dataclasses import replace

from ray_ckpt.core import messages as m
from ray_ckpt.core import node_messages as n
from ray_ckpt.core.node_machine import NodeMachine
from ray_ckpt.core.values import RankProgress
from ray_ckpt.errors import RunSuperseded
from ray_ckpt.format import records as r
from ray_ckpt.format.names import make_attempt
from ray_ckpt.types import Level
from tests.core.driver import RUN_UID, Harness, of, one
from tests.core.test_maintenance import durable, look, run_on, scrubbed
from tests.core.test_node_machine import plan
from tests.core.test_recovered_attempts import commits, hold, resumed_step, trained
from tests.core.test_store_away import STORE_WAIT_S, away, back, next_group, story


def test_a_held_resume_point_is_recorded_with_its_session_by_the_next_coordinator() -> None:
    run = away()
    run.save(20)
    plan = next_group(run)
    run.save(30)
    run.store_mode = "ok"
    run.start_coordinator()
    effects = run.feed(m.GroupRecovered(plan=plan, inventories=run.inventories()))
    assert not of(effects, m.Supersede) and not [p for p in of(effects, m.NotifyOutcome) if p.error]
    assert run.plan == plan
    assert story(run.records)[-3:] == [("commit", 20), ("session", 2), ("commit", 30)]
    assert [c.step for c in run.machine.history.lineage()] == [10, 20, 30]


def test_the_report_of_a_node_about_a_session_of_the_same_number_does_not_count() -> None:
    run = away()
    run.feed(run.group("ab"))
    run.tick(STORE_WAIT_S)
    late = run.restored("a")  # of session 2 of epoch 1
    run.store_mode = "ok"
    run.start_coordinator()
    run.feed(run.group("ab"))
    assert (run.plan.session, run.plan.epoch) == (2, 2)
    assert isinstance(one(run.feed(late), m.Fail).error, RunSuperseded)
    assert not of(run.feed(run.restored("b")), m.Reply), "a has not restored in this session"


def test_the_end_of_a_session_of_the_same_number_leaves_the_one_at_work() -> None:
    machine = NodeMachine(epoch=2)
    machine.handle(n.SessionStarted(plan=replace(plan(), epoch=2), node_id="a", epoch=2))
    machine.handle(n.SessionEnded(session_key=(1, 1), error=RunSuperseded("over"), epoch=2))
    assert machine.plan is not None


def test_a_commit_that_waits_does_not_overtake_the_saves_of_a_newer_session() -> None:
    run = away()
    run.save(20)
    run.save(30)
    lost = make_attempt(run_uid=RUN_UID, epoch=1, session=1, step=30, attempt=0)
    for disk in run.disks.values():
        disk.delete(lost.attempt)
    built_on = next_group(run).resume
    assert built_on is not None and built_on.checkpoint.step == 20
    effects = run.save(25)
    assert not of(effects, m.Warn)
    assert ("commit", 25) in story(back(run))


def test_a_held_commit_does_not_end_an_open_save_of_a_newer_session() -> None:
    run = away()
    run.save(20)
    run.save(30)
    lost = make_attempt(run_uid=RUN_UID, epoch=1, session=1, step=30, attempt=0)
    for disk in run.disks.values():
        disk.delete(lost.attempt)
    next_group(run)
    run.feed(run.stored(run.attempt(25), "a"))
    back(run)
    run.feed(run.stored(run.attempt(25), "b"))
    run.feed(run.copied(run.attempt(25), "a", "b"), run.copied(run.attempt(25), "b", "a"))
    assert story(run.records)[-1] == ("commit", 25)


def test_callers_that_wait_for_a_group_that_its_launcher_ends_get_an_answer() -> None:
    run = Harness("abc", replicas=0, remote_every=1)
    run.open("ab")
    run.save(10)
    run.lose("b")
    requested = run.feed(run.group("ac", token="waits"))
    assert of(requested, m.RequestInventory)
    effects = [*run.feed(m.FinishRequested(token="end", ends_group=True))]
    effects += run.tick(0.0)
    tokens = {e.token for e in effects if isinstance(e, m.Reply | m.Fail)}
    assert tokens == {"end", "waits"}


def test_a_group_whose_finish_failed_frees_the_run_all_the_same() -> None:
    run = Harness("ab", replicas=0)
    run.open("ab")
    run.save(10)
    run.feed(m.FinishRequested(token="end", ends_group=True))
    run.lose("b")
    run.tick(0.0)
    assert "end" in [f.token for f in of(run.transcript, m.Fail)] or run.machine.view.owner
    for _ in range(10):
        for drain in of(run.tick(100.0), m.Drain):
            run.drained(drain, error="no space")
    assert "end" in [f.token for f in of(run.transcript, m.Fail)]
    assert run.machine.view.objection("another driver", "") is None
    assert run.machine.view.end_cause == "process", "else no node frees the memory of the run"
    ended = [op.cause for op in run.records if isinstance(op, r.Ended)]
    assert ended == ["node"], "the next coordinator would put away a run that has finished"


def test_good_copies_stay_while_the_one_on_the_storage_path_is_known_to_be_damaged() -> None:
    run = run_on("ab", remote_every=1, keep_local=1, keep_last=3)
    old = durable(run, 10)
    effects = scrubbed(run, m.Scrub(attempt=old, node_index=0, place=m.REMOTE), damage=("x",))
    drains, new = of(effects, m.Drain), run.attempt(20)
    run.drain_all([d for d in of(run.save(20), m.Drain) if d.attempt == new])
    assert run.checkpoint(new).level is Level.DURABLE
    evicted = set()
    for _ in range(20):  # each drain is given up in the end, and begun again
        failed = [e for drain in drains for e in run.drained(drain, error="no space")]
        reported = [*failed, *run.tick(100.0)]
        evicted |= {e.attempt for e in of(reported, m.Evict)}
        drains = [d for d in of(reported, m.Drain) if d.attempt == old]
    assert drains and old not in evicted


def test_the_last_good_checkpoint_stays_while_the_newest_durable_one_is_known_to_be_damaged() -> None:
    run = run_on("ab", remote_every=1, keep_local=1, keep_last=3)
    good, bad = durable(run, 10), durable(run, 20)
    run.save(30)
    evicted = {e.attempt for e in of(look(run), m.Evict)}
    assert evicted == {good, bad}
    scrubbed(run, m.Scrub(attempt=bad, node_index=0, place=m.REMOTE), damage=("x",))
    drains = run.save(40)
    assert run.checkpoint(good).state == "live", "the drains of steps 30 and 40 have not ended"
    run.drain_all(drains)
    assert run.checkpoint(good).state == "retired" and run.checkpoint(run.attempt(40)).level is Level.DURABLE


def test_who_alone_holds_something_is_needed_between_two_groups() -> None:
    run = run_on("ab")
    run.save(10)
    run.start_coordinator()
    run.feed(run.group("ab"))
    run.feed(m.FinishRequested(token="x"))
    run.store_mode = "held"
    run.feed(run.group("ab", token="again"))
    assert run.machine.plan is None
    assert run.machine.view.needed_nodes() == frozenset("ab")


def test_a_session_that_waits_begins_without_the_reports_of_the_old_ranks() -> None:
    run = away()
    run.save(20)
    run.feed(m.RanksProgressed(session_key=(1, 1), ranks={0: RankProgress(step=25, saved_step=20)}))
    next_group(run)
    assert {e.steps_at_risk for e in run.machine.view.exposure()} == {0}


def test_attempts_of_a_found_group_are_recorded_in_step_order() -> None:
    run = trained(replicas=0)
    found = run.plan
    hold(run, 30)
    hold(run, 20)
    run.start_coordinator()
    run.feed(m.GroupRecovered(plan=found, inventories=run.inventories()))
    assert commits(run) == [10, 20, 30]


def test_what_the_inventory_shows_complete_is_not_dropped_by_the_end_of_its_session() -> None:
    run = trained()
    at = run.attempt(20)
    run.feed(run.stored(at, "a"))
    run.stored(at, "b")
    run.open("ab")
    assert (commits(run), resumed_step(run)) == ([10, 20], 20)


def test_a_commit_that_waits_has_what_is_true_when_it_is_written() -> None:
    run = away()
    run.save(20)
    run.save(30)
    at = run.attempt(30)
    run.lose("b")
    back(run)
    known = run.machine.history.checkpoints.get(at.attempt)
    assert known is not None and known.level is Level.LOCAL


def test_a_node_that_missed_a_drop_gets_it_when_it_reports() -> None:
    run = Harness("ab")
    run.open("ab")
    at = run.attempt(10)
    run.feed(m.SaveRefused(attempt=at, ranks=(1,), reason="disk full"))
    (reported,) = of(run.feed(run.stored(at, "a")), m.NotifyOutcome)
    assert reported.error is not None and reported.nodes == ("a",)


def test_what_is_not_pinned_any_more_goes_at_once() -> None:
    run = Harness("ab", keep_last=1, remote_every=1)
    run.open("ab")
    run.drain_all(run.save(10))
    old = run.attempt(10).attempt
    run.feed(m.PinRequested(token="p", attempt=old, owner="me", expires_at_s=None))
    run.drain_all(run.save(20))
    run.feed(m.UnpinRequested(token="u", attempt=old, owner="me"))
    assert [c.step for c in run.machine.history.live()] == [20]


def test_doubled_reports_of_a_restore_are_noted_once() -> None:
    run = Harness("ab")
    run.open("ab")
    run.save(10)
    run.open("ab")
    run.feed(run.restored("a"), run.restored("b"))
    assert len([op for op in run.records if isinstance(op, r.Restored)]) == 1


def test_after_a_step_down_in_what_came_early_the_rest_is_refused() -> None:
    run = Harness("ab")
    run.store_mode = "held"
    run.start_coordinator()
    run.feed(m.OrderRefused(epoch=9), run.group("ab", token="early"))
    assert one(run.confirm(), m.Fail).token == "early"


def test_a_machine_that_returns_before_its_death_is_noticed_is_one_copy() -> None:
    run = trained(replicas=0)
    run.save(20)
    held = {node: replace(run.disks[node].inventory(), disk=f"disk of {node}") for node in "ab"}
    run.disks["c"] = run.disks["b"]
    run.live.add("c")
    run.feed(m.NodesJoined(inventories=held))
    run.feed(m.NodesJoined(inventories={"c": held["b"]}))
    attempt = run.machine.history.lineage()[-1].id.attempt
    assert run.machine.view.holders[attempt] == {0: ("a",), 1: ("c",)}


def test_the_last_reports_of_a_node_whose_disk_has_moved_count_for_nothing() -> None:
    run = trained(replicas=0)
    plan, attempt = run.plan, run.attempt(20)
    late = [run.stored(attempt, node) for node in "ab"]
    disk = replace(run.disks["b"].inventory(), disk="disk of b")
    run.feed(m.NodesJoined(inventories={"b": disk}))
    run.live.add("c")
    run.feed(m.NodesJoined(inventories={"c": disk}))
    run.feed(*late)
    assert run.machine.view.holders.get(attempt.attempt, {}).get(1, ()) in ((), ("c",))
    assert run.plan == plan


def test_what_a_failed_group_took_for_strays_is_not_deleted_by_the_group_that_is_found() -> None:
    run = trained(replicas=0)
    found = run.plan
    hold(run, 30)
    run.start_coordinator()
    run.disks["a"].folders["f" * 16] = "000000000040-" + "f" * 16  # being written
    run.feed(run.group("ab", token="fails", resume="step:7"))
    run.feed(m.GroupRecovered(plan=found, inventories=run.inventories()))
    assert run.plan == found
    assert not of(run.save(50), m.DeleteLocalOrphans)
