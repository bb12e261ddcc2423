"""Stories of a log that does not answer: saves and failed groups go on, and all is recorded later."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ray_ckpt.core import messages as m
from ray_ckpt.core.open_attempts import MAX_WAITING_COMMITS
from ray_ckpt.core.sessions import MAX_REREADS, MAX_WAITING_SESSIONS, REREAD_S
from ray_ckpt.core.values import RankProgress, SessionPlan
from ray_ckpt.errors import RunSuperseded, Unavailable
from ray_ckpt.format import records as r
from ray_ckpt.types import Level
from tests.core.driver import Harness, of, one, ops

STORE_WAIT_S = 5.0
RETRY_S = 10.0  # longer than the ledger waits before it repeats a create


def away(nodes: str = "ab", group: str = "ab", **options: Any) -> Harness:
    """Return a run whose group trains with step 10 in the log, and whose log no longer answers."""
    run = Harness(nodes, store_wait_s=STORE_WAIT_S, inventory_wait_s=0.0, **options)
    run.open(group)
    run.save(10)
    run.store_mode = "silent"
    return run


def back(run: Harness) -> list[r.Op]:
    """Let the log answer again; return the records that it gets."""
    before = len(run.records)
    run.store_mode = "ok"
    run.tick(RETRY_S)
    return run.records[before:]


def next_group(run: Harness, nodes: str = "ab") -> SessionPlan:
    """End the group; the next one gets its plan although the log is silent, and trains."""
    assert not of(run.feed(run.group(nodes)), m.StartSession)
    plan = one(run.tick(STORE_WAIT_S), m.StartSession).plan
    run.feed(*(run.restored(node) for node in nodes))
    return plan


def story(records: list[r.Op]) -> list[tuple[str, int]]:
    """Commits and sessions, in log order."""
    commits = {i: ("commit", op.step) for i, op in enumerate(records) if isinstance(op, r.Commit)}
    sessions = {i: ("session", op.session) for i, op in enumerate(records) if isinstance(op, r.Session)}
    return [line for _, line in sorted((commits | sessions).items())]


# -- saves -------------------------------------------------------------------------------------------


def test_commits_that_wait_are_in_the_log_in_step_order_when_it_is_back() -> None:
    run = away()
    for step in (20, 30):
        assert not of(run.save(step), m.NotifyOutcome), "no outcome is sent before its record is in the log"
    assert story(back(run)) == [("commit", 20), ("commit", 30)]


def test_of_many_that_wait_the_newest_stay_besides_the_one_in_flight() -> None:
    run = away()
    gone: list[m.NotifyOutcome] = []
    for step in range(20, 70, 10):
        gone += of(run.save(step), m.NotifyOutcome)
        gone += of(run.tick(RETRY_S), m.NotifyOutcome)
    assert [(p.attempt.step, type(p.error)) for p in gone] == [(30, Unavailable), (40, Unavailable)]
    assert story(back(run)) == [("commit", 20), ("commit", 50), ("commit", 60)]
    assert MAX_WAITING_COMMITS == 2


def test_a_commit_that_is_dropped_names_the_error_of_the_store() -> None:
    run = away()
    for step in (20, 30, 40, 50):
        run.save(step)
    seq = run.machine.history.next_seq
    refused = m.Appended(seq=seq, outcome="unknown", reason="403 AccessDenied")
    (gone,) = of(run.feed(refused), m.NotifyOutcome)
    assert gone.attempt.step == 30 and "its commit record. 403 AccessDenied" in str(gone.error)


# -- groups ------------------------------------------------------------------------------------------


def test_ranks_of_a_new_group_do_not_affect_a_waiting_commit_of_the_old_one() -> None:
    """The new ranks are past the step of the commit, and there are more of them."""
    run = away("abc")
    run.save(20)
    plan = next_group(run, "abc")
    past = RankProgress(step=25, saved_step=-1, since_s=0.0, step_s=1.0, stall_s=0.0)
    (rank,) = plan.nodes[2].ranks
    assert not of(
        run.feed(m.RanksProgressed(session_key=plan.session_key, ranks={rank: past})), m.NotifyOutcome
    )
    assert ("commit", 20) in story(back(run))
    assert [c.step for c in run.machine.history.live()] == [10, 20]


def test_a_group_that_fails_goes_on_from_the_newest_held_checkpoint() -> None:
    run = away()
    run.save(20)
    plan = next_group(run)
    assert (plan.session, plan.epoch) == (2, 1)
    assert plan.resume is not None and plan.resume.checkpoint.step == 20
    assert plan.resume.holders == (("a", "b"), ("a", "b"))
    run.save(30)
    assert story(run.records) == [("session", 1), ("commit", 10)], "the log knows nothing of all that"
    held = plan.resume.checkpoint.id.attempt
    records = back(run)
    assert story(records) == [("commit", 20), ("session", 2), ("commit", 30)]
    session = next(op for op in records if isinstance(op, r.Session))
    assert (session.opened_by, session.after, session.resumed_from) == (1, 1, held)
    assert [c.step for c in run.machine.history.lineage()] == [10, 20, 30]


def test_a_group_waits_for_the_log_before_it_goes_on_without() -> None:
    run = away()
    run.save(20)
    run.tick(100.0)
    run.feed(run.group("ab"))
    assert not of(run.tick(STORE_WAIT_S - 0.1), m.StartSession), "its own wait counts, not the log's silence"
    assert one(run.tick(0.1), m.StartSession).plan.session == 2


def test_a_log_that_is_only_slow_is_not_gone_round() -> None:
    """Each record is answered within the wait; so the group waits for all of them."""
    run = away()
    run.store_mode = "held"
    run.save(20)
    run.save(30)
    run.feed(run.group("ab"))
    for _ in range(2):
        assert not of(run.tick(STORE_WAIT_S - 1.0), m.StartSession)
        run.confirm(hold_next=True)
    started = one(run.confirm(), m.StartSession).plan
    assert started.resume is not None and started.resume.checkpoint.step == 30


def test_a_session_that_was_in_flight_is_not_opened_twice() -> None:
    run = Harness("ab", store_wait_s=STORE_WAIT_S)
    run.store_mode = "silent"
    run.feed(run.group("ab"))
    plan = one(run.tick(STORE_WAIT_S), m.StartSession).plan
    run.feed(run.restored("a"), run.restored("b"))
    effects = [*run.tick(RETRY_S)]
    assert story(back(run)) == [("session", 1)]
    assert not of(effects, m.StartSession) and run.plan == plan
    run.save(10)
    assert story(run.records) == [("session", 1), ("commit", 10)]


def test_what_a_waiting_session_builds_on_is_never_shed() -> None:
    run = away()
    for step in (20, 30):
        run.save(step)
    plan = next_group(run)
    assert plan.resume is not None and plan.resume.checkpoint.step == 30
    reported: list[m.NotifyOutcome] = []
    for step in (40, 50, 60, 70):
        reported += of(run.save(step), m.NotifyOutcome)
        reported += of(run.tick(RETRY_S), m.NotifyOutcome)
    assert [p.attempt.step for p in reported if p.error] == [40, 50]
    expected = [("commit", 20), ("commit", 30), ("session", 2), ("commit", 60), ("commit", 70)]
    assert story(back(run)) == expected


def test_each_failed_group_builds_on_the_one_before() -> None:
    run = away()
    run.save(20)
    next_group(run)
    run.save(30)
    plan = next_group(run)
    assert plan.session == 3
    assert plan.resume is not None and plan.resume.checkpoint.step == 30
    run.save(40)
    expected = [("commit", 20), ("session", 2), ("commit", 30), ("session", 3), ("commit", 40)]
    assert story(back(run)) == expected
    assert [c.step for c in run.machine.history.lineage()] == [20, 30, 40], "10 was beyond keep_last"


def test_sessions_that_wait_are_bounded() -> None:
    run = away()
    run.save(20)
    for session in range(2, 2 + MAX_WAITING_SESSIONS):
        assert next_group(run).session == session
    run.feed(run.group("ab", token="one too many"))
    failed = one(run.tick(STORE_WAIT_S), m.Fail)
    assert failed.token == "one too many" and isinstance(failed.error, Unavailable)
    back(run)
    assert run.open("ab") and run.plan.session == 2 + MAX_WAITING_SESSIONS


def test_a_checkpoint_that_only_the_storage_path_has_is_not_chosen() -> None:
    run = Harness("abc", replicas=0, remote_every=1, store_wait_s=STORE_WAIT_S, inventory_wait_s=0.0)
    run.open("bc")
    run.save(10)
    run.open("ab")
    run.drain_all(run.save(20))
    assert run.machine.history.lineage()[-1].level is Level.DURABLE
    run.store_mode = "silent"
    run.save(30)
    run.lose("a")
    run.feed(run.group("bc"))
    plan = one(run.tick(STORE_WAIT_S), m.StartSession).plan
    assert plan.resume is not None and plan.resume.checkpoint.step == 10


def test_a_checkpoint_that_only_the_storage_path_has_is_read_again_without_the_log() -> None:
    """The storage path neither serves reads nor takes records: that is no reason for an older checkpoint."""
    run = Harness("abc", replicas=0, remote_every=1, store_wait_s=STORE_WAIT_S, inventory_wait_s=0.0)
    run.open("bc")
    run.save(10)
    run.open("ab")
    run.drain_all(run.save(20))
    run.lose("a")
    run.feed(run.group("bc", token="t"))
    run.store_mode = "silent"
    steps = []
    for _ in range(MAX_REREADS + 1):
        assert run.plan.resume is not None
        steps.append(run.plan.resume.checkpoint.step)
        run.feed(run.restored("b", damage=["x"], is_unreachable=True), run.restored("c"))
        run.feed(run.inventory("t"))
        run.tick(REREAD_S * 2**MAX_REREADS)
        run.tick(STORE_WAIT_S)
    assert steps == [20] * (MAX_REREADS + 1)
    assert run.plan.resume is not None and run.plan.resume.checkpoint.step == 10


def test_without_the_log_a_group_of_a_new_run_starts_from_scratch() -> None:
    run = Harness("ab", store_wait_s=STORE_WAIT_S)
    run.store_mode = "silent"
    run.feed(run.group("ab"))
    assert one(run.tick(STORE_WAIT_S), m.StartSession).plan.resume is None


def test_a_log_that_somebody_else_wrote_meanwhile_ends_the_group_that_went_on() -> None:
    run = away()
    run.save(20)
    next_group(run)
    before = run.records
    other = Harness("xy", service="service-2", store=run.store)
    run.store_mode = "ok"
    effects = run.tick(RETRY_S)
    supersede = one(effects, m.Supersede)
    assert (supersede.nodes, supersede.session_key[1]) == (("a", "b"), 2)
    assert isinstance(supersede.error, RunSuperseded)
    assert one(effects, m.StepDown).is_foreign
    assert other.records == [*before, r.Epoch(service="service-2")], "nothing of this came into the log"


def test_the_checkpoint_of_a_session_that_waits_is_kept_when_the_log_is_back() -> None:
    """Retention is decided on the whole log only, and a group that restores keeps what it reads."""
    run = away(keep_last=1)
    run.save(20)
    run.feed(run.group("ab"))
    run.tick(STORE_WAIT_S)
    assert not [op for op in back(run) if isinstance(op, r.Retired) and op.attempt == held(run)]
    run.feed(run.restored("a"), run.restored("b"))
    run.save(30)
    assert [c.step for c in run.machine.history.live()] == [30]


def held(run: Harness) -> str:
    assert run.plan.resume is not None
    return run.plan.resume.checkpoint.id.attempt


# -- the coordinator dies too ------------------------------------------------------------------------


def test_a_group_that_went_on_is_recorded_by_the_next_coordinator() -> None:
    run = away()
    run.store_mode = "silent"
    plan = provisional_on_logged(run)
    run.save(20)
    run.store_mode = "ok"
    run.start_coordinator()
    run.feed(m.GroupRecovered(plan=plan, inventories=run.inventories()))
    assert run.plan == plan
    session = [op for op in run.records if isinstance(op, r.Session)][-1]
    assert (session.session, session.opened_by, session.after) == (2, 1, 1)
    assert session.resumed_from == held(run)
    assert story(run.records)[-2:] == [("session", 2), ("commit", 20)]
    run.save(30)
    newest = run.machine.history.lineage()[-1]
    assert (newest.step, newest.id.epoch, run.machine.epoch) == (30, 1, 2)
    run.open("ab")
    assert (run.plan.session, run.plan.epoch) == (3, 2)


def test_a_group_that_went_on_is_over_if_its_number_is_taken() -> None:
    """Two clusters began a session without the log; the one with the lower epoch was recorded first."""
    run = away()
    run.store_mode = "silent"
    plan = provisional_on_logged(run)
    run.store_mode = "ok"
    run.start_coordinator()
    run.feed(m.GroupRecovered(plan=plan, inventories=run.inventories()))
    run.start_coordinator()
    effects = run.feed(
        m.GroupRecovered(plan=replace(plan, epoch=2, owner="other"), inventories=run.inventories())
    )
    assert one(effects, m.Supersede).session_key == (2, 2)
    assert [op.session for op in run.records if isinstance(op, r.Session)] == [1, 2]


def provisional_on_logged(run: Harness) -> SessionPlan:
    """Return a group that goes on from step 10, which is in the log, while its session is not."""
    run.feed(run.group("ab"))
    plan = one(run.tick(STORE_WAIT_S), m.StartSession).plan
    run.feed(run.restored("a"), run.restored("b"))
    assert plan.resume is not None and plan.resume.checkpoint.step == 10
    return plan


def test_a_group_whose_resume_point_never_came_into_the_log_is_ended() -> None:
    run = away()
    run.save(20)
    plan = next_group(run)
    run.save(30)
    for disk in run.disks.values():
        disk.delete(held(run))
    run.store_mode = "ok"
    run.start_coordinator()
    effects = run.feed(m.GroupRecovered(plan=plan, inventories=run.inventories()))
    supersede = one(effects, m.Supersede)
    assert (supersede.nodes, supersede.session_key[1]) == (("a", "b"), 2)
    assert isinstance(supersede.error, RunSuperseded)
    assert run.machine.plan is None
    assert story(run.records) == [("session", 1), ("commit", 10)]


def test_numbers_that_meet_are_not_taken_for_each_other() -> None:
    """Session 2 of epoch 1 never came into the log; session 2 of epoch 2 did."""
    run = away()
    old = provisional_on_logged(run)
    saved = run.attempt(20)
    late = [run.stored(saved, node) for node in "ab"]
    run.store_mode = "ok"
    run.start_coordinator()
    run.open("ab")
    new = run.plan
    assert (old.session, old.epoch, new.session, new.epoch) == (2, 1, 2, 2)
    effects = run.feed(*late)
    assert not ops(effects), "not of the session at work, whatever its number"
    assert {type(p.error) for p in of(effects, m.NotifyOutcome)} == {RunSuperseded}
    same_step = run.attempt(20)
    assert same_step.attempt != saved.attempt
    run.save(20)
    assert run.machine.history.lineage()[-1].id == same_step
    late_plan = m.GroupRecovered(plan=old, inventories=run.inventories())
    assert run.feed(late_plan) == (), "a group is at work"
    run.start_coordinator()
    assert one(run.feed(late_plan), m.Supersede).session_key[1] == old.session
    assert run.machine.plan is None


def test_what_a_session_that_never_came_into_the_log_has_saved_is_not_adopted() -> None:
    run = away()
    provisional_on_logged(run)
    lost = run.attempt(20)
    for node in "ab":
        run.stored(lost, node)
    run.store_mode = "ok"
    run.start_coordinator()
    run.open("ab")
    assert run.plan.resume is not None and run.plan.resume.checkpoint.step == 10
    orphans = of(run.save(30), m.DeleteLocalOrphans)
    assert {(s.node_id, s.directories) for s in orphans} == {(n, (lost.directory,)) for n in "ab"}


def test_a_later_session_of_an_earlier_coordinator_is_not_recorded() -> None:
    """Sessions 2 and 3 of epoch 1 are not in the log, session 2 of epoch 2 is."""
    run = away()
    provisional_on_logged(run)
    old = next_group(run)
    assert (old.session, old.epoch) == (3, 1)
    run.store_mode = "ok"
    run.start_coordinator()
    run.open("ab")
    assert (run.plan.session, run.plan.epoch) == (2, 2)
    run.start_coordinator()
    effects = run.feed(m.GroupRecovered(plan=old, inventories=run.inventories()))
    assert one(effects, m.Supersede).session_key[1] == 3
    assert [op.session for op in run.records if isinstance(op, r.Session)] == [1, 2]


def test_late_reports_about_a_held_attempt_do_not_drop_it() -> None:
    run = away()
    attempt = run.attempt(20)
    late = [run.stored(attempt, node) for node in "ab"]
    plan = next_group(run)
    assert plan.resume is not None and plan.resume.checkpoint.id == attempt, "the inventories showed it"
    assert run.feed(*late) == ()
    assert story(back(run)) == [("commit", 20), ("session", 2)]


def test_an_attempt_of_a_session_that_is_not_found_yet_is_not_called_dropped() -> None:
    """The nodes report before the coordinator knows of their group."""
    run = away()
    plan = provisional_on_logged(run)
    attempt = run.attempt(20)
    stored = [run.stored(attempt, node) for node in "ab"]
    run.copied(attempt, "a", "b")
    run.copied(attempt, "b", "a")
    run.store_mode = "ok"
    run.start_coordinator()
    assert run.feed(*stored) == ()
    run.feed(m.GroupRecovered(plan=plan, inventories=run.inventories()))
    assert story(run.records)[-2:] == [("session", 2), ("commit", 20)]


@pytest.mark.parametrize("logged", [False, True])
def test_a_found_group_that_is_older_than_the_logs_session_is_ended(logged: bool) -> None:
    run = away()
    plan = run.plan
    if logged:
        run.store_mode = "ok"
        run.open("ab")
    run.store_mode = "ok"
    run.start_coordinator()
    effects = run.feed(m.GroupRecovered(plan=plan, inventories=run.inventories()))
    assert bool(of(effects, m.Supersede)) is logged
    assert (run.machine.plan is None) is logged


def test_the_reason_for_a_silent_log_is_in_the_warning() -> None:
    run = away()
    run.save(20)
    seq = run.machine.history.next_seq
    warned = one(run.feed(m.Appended(seq=seq, outcome="unknown", reason="/x is not there any more.")), m.Warn)
    assert warned.text == f"The log did not take record {seq}; trying again. /x is not there any more."


def test_a_log_that_refuses_a_record_is_warned_of_once_whatever_the_error_says() -> None:
    run = away()
    run.save(20)
    seq = run.machine.history.next_seq
    for number in range(3):
        answer = m.Appended(seq=seq, outcome="unknown", reason=f"AccessDenied, request {number}")
        assert len(of(run.feed(answer), m.Warn)) == (number == 0)
        run.tick(RETRY_S)
