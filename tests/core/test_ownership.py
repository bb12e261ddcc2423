"""Stories of who may have a run: launchers, services, and nodes that remember another log."""

from __future__ import annotations

import pytest

from ray_ckpt.core import messages as m
from ray_ckpt.core.history import RunHistory
from ray_ckpt.core.ownership import RunMark, check_claim, check_marks
from ray_ckpt.errors import CheckpointError, Fenced, RunConflict, RunInUse, RunSuperseded
from ray_ckpt.format import records as r
from ray_ckpt.storage.log_store import read_log
from tests.core.driver import RUN, RUN_UID, SERVICE, Harness, of, one, ops

OTHER_SERVICE = "service-2"
OTHER_UID = "f" * 32


def open_group(run: Harness, owner: str, *, dead_owner: str = "") -> CheckpointError | None:
    """Open a group of this launcher, which trains; return the error if it may not open."""
    effects = run.feed(run.group("ab", owner=owner, dead_owner=dead_owner))
    if failures := of(effects, m.Fail):
        return failures[0].error
    run.feed(*(run.restored(node) for node in "ab"))
    return None


def history_of(run: Harness) -> RunHistory:
    """Return the log as a coordinator finds it that is about to claim it."""
    history = RunHistory()
    for record, digest in read_log(run.store):
        history.apply(record, digest)
    return history


# -- before anything is written ----------------------------------------------------------------------


def test_a_restarted_coordinator_goes_on_only_with_a_session_of_its_own_service() -> None:
    run = Harness("ab")
    check_claim(history_of(run), service=OTHER_SERVICE, owner=None)  # nobody has had a group yet
    run.open("ab")
    check_claim(history_of(run), service=SERVICE, owner=None)
    with pytest.raises(RunSuperseded, match="in session 1") as caught:
        check_claim(history_of(run), service=OTHER_SERVICE, owner=None)
    assert caught.value.hint


def test_a_launcher_takes_over_whatever_it_finds_at_its_first_group() -> None:
    run = Harness("ab")
    run.open("ab")
    check_claim(history_of(run), service=OTHER_SERVICE, owner="another driver")
    check_claim(history_of(run), service=SERVICE, owner="another driver")


@pytest.mark.parametrize("service", [SERVICE, OTHER_SERVICE])
def test_a_launcher_that_lost_the_run_does_not_get_it_back(service: str) -> None:
    """Or two launchers would take it from each other for ever."""
    run = Harness("ab")
    run.open("ab")
    other = Harness("ab", service=service, store=run.store)
    assert open_group(other, "another driver") is None
    history = history_of(run)
    with pytest.raises(RunSuperseded, match="in session 2"):
        check_claim(history, service=SERVICE, owner="driver")
    check_claim(history, service=service, owner="another driver")
    other.start_coordinator()
    assert isinstance(open_group(Harness("ab", store=run.store), "driver"), RunSuperseded)


def test_a_snapshot_does_not_make_a_launcher_forget_that_it_had_the_run() -> None:
    run = Harness("ab")
    run.open("ab")
    assert open_group(Harness("ab", service=OTHER_SERVICE, store=run.store), "another driver") is None
    history = RunHistory.from_snapshot(history_of(run).to_snapshot(0.0))
    with pytest.raises(RunSuperseded):
        check_claim(history, service=SERVICE, owner="driver")


@pytest.mark.parametrize(
    ("uid", "epochs_more", "found"),
    [(OTHER_UID, 0, f"run {OTHER_UID}, and there is run {RUN_UID}"), (RUN_UID, 1, "have seen epoch 2")],
)
def test_nodes_that_know_another_log_stop_the_run(uid: str, epochs_more: int, found: str) -> None:
    history = history_of(Harness("ab"))
    same = RunMark(run_uid=RUN_UID, epoch=history.epoch)
    check_marks(history, run_name=RUN, marks=[same], resume="auto")
    with pytest.raises(RunConflict, match=found) as caught:
        marks = [RunMark(run_uid=uid, epoch=history.epoch + epochs_more)]
        check_marks(history, run_name=RUN, marks=marks, resume="auto")
    assert "nothing is deleted" in str(caught.value.hint)


def test_a_run_that_was_started_over_on_purpose_goes_on() -> None:
    """resume="never" left the old uid behind; the nodes that took part since know the new one."""
    history = history_of(Harness("ab"))
    old, new = RunMark(run_uid=OTHER_UID, epoch=9), RunMark(run_uid=RUN_UID, epoch=history.epoch)
    check_marks(history, run_name=RUN, marks=[old, new], resume="auto")


def test_an_empty_log_where_nodes_hold_checkpoints_stops_the_run() -> None:
    with pytest.raises(RunConflict, match="there is no log"):
        check_marks(RunHistory(), run_name=RUN, marks=[RunMark(run_uid=RUN_UID, epoch=3)], resume="auto")


def test_who_starts_over_on_purpose_may_leave_another_run_behind_but_no_newer_state_of_this_one() -> None:
    history = history_of(Harness("ab"))
    marks = [RunMark(run_uid=OTHER_UID, epoch=9)]
    check_marks(history, run_name=RUN, marks=marks, resume="never")
    check_marks(RunHistory(), run_name=RUN, marks=marks, resume="never")
    newer = RunMark(run_uid=RUN_UID, epoch=history.epoch + 1)
    with pytest.raises(RunConflict):
        check_marks(history, run_name=RUN, marks=[newer], resume="never")


# -- while a group is at work ------------------------------------------------------------------------


def test_a_run_whose_launcher_is_alive_is_in_use() -> None:
    run = Harness("ab")
    run.open("ab")
    plan, before = run.plan, run.records
    error = open_group(run, "another driver")
    assert isinstance(error, RunInUse) and error.hint
    assert (run.plan, run.records) == (plan, before), "the group at work has not noticed"
    assert isinstance(run.machine.view.objection("another driver", "somebody else"), RunInUse)


def test_a_run_is_in_use_while_its_group_is_only_being_opened() -> None:
    run = Harness("ab")
    run.store_mode = "held"
    run.feed(run.group("ab", token="first"))
    effects = run.feed(run.group("ab", token="second", owner="another driver"))
    assert isinstance(one(effects, m.Fail).error, RunInUse)
    assert one(run.confirm(), m.StartSession).tokens == ("first",)


def test_a_run_whose_launcher_was_found_dead_is_taken_over() -> None:
    run = Harness("ab")
    run.open("ab")
    run.save(10)
    assert open_group(run, "another driver", dead_owner="driver") is None
    assert run.machine.view.owner == "another driver"
    assert run.plan.resume is not None and run.plan.resume.checkpoint.step == 10
    assert isinstance(open_group(run, "driver"), RunSuperseded), "it was not dead after all"


def test_the_launcher_at_work_may_open_its_next_group_at_any_time() -> None:
    run = Harness("ab")
    assert [open_group(run, "driver") for _ in range(3)] == [None] * 3
    assert run.plan.session == 3


def test_a_finished_group_frees_the_run() -> None:
    run = Harness("ab")
    run.open("ab")
    run.feed(m.FinishRequested(token="save only"))
    assert isinstance(open_group(run, "another driver"), RunInUse)
    assert one(run.feed(m.FinishRequested(token="end", ends_group=True)), m.Reply).token == "end"
    assert (run.machine.view.owner, run.machine.plan) == ("", None)
    assert open_group(run, "another driver") is None


def test_a_group_that_finishes_has_the_run_until_its_last_checkpoint_is_durable() -> None:
    run = Harness("ab")
    run.open("ab")
    run.save(10)
    drains = run.feed(m.FinishRequested(token="end", ends_group=True))
    assert isinstance(run.machine.view.objection("another driver", ""), RunInUse)
    reported = run.drain_all(drains)
    assert one(reported, m.Reply).token == "end"
    assert run.machine.view.objection("another driver", "") is None


def test_a_late_finish_does_not_end_the_group_of_another_launcher() -> None:
    run = Harness("ab", inventory_wait_s=0.0)
    run.feed(run.group("ab", owner="earlier"))
    run.save(10)
    run.feed(run.group("ab", owner="later", dead_owner="earlier"))
    late = m.FinishRequested(token="late", owner="earlier", ends_group=True)
    reported = run.feed(late)
    assert isinstance(one(reported, m.Fail).error, RunSuperseded)
    assert run.machine.view.owner == "later" and run.machine.view.end_cause is None
    ended = run.drain_all(run.feed(m.FinishRequested(token="end", owner="later", ends_group=True)))
    assert one(ended, m.Reply).token == "end" and run.machine.view.end_cause == "finished"


# -- another coordinator -----------------------------------------------------------------------------


def test_a_record_of_another_service_ends_the_group_before_this_coordinator_goes() -> None:
    run = Harness("ab")
    run.open("ab")
    Harness("xy", service=OTHER_SERVICE, store=run.store)
    effects = run.save(10)
    assert [type(e) for e in effects][-2:] == [m.Supersede, m.StepDown]
    supersede, down = one(effects, m.Supersede), one(effects, m.StepDown)
    assert (supersede.nodes, supersede.session_key) == (("a", "b"), (1, 1))
    assert isinstance(supersede.error, RunSuperseded)
    assert down.is_foreign and isinstance(down.error, Fenced)
    assert not of(effects, m.NotifyOutcome), "it must not decide the end of the save"


def test_a_newer_coordinator_of_the_own_service_gets_the_group_as_it_is() -> None:
    run = Harness("ab")
    run.open("ab")
    Harness("ab", store=run.store)
    effects = run.save(10)
    assert not of(effects, m.Supersede)
    assert not one(effects, m.StepDown).is_foreign


def test_callers_of_a_coordinator_that_goes_get_an_error() -> None:
    run = Harness("ab")
    run.open("ab")
    Harness("xy", service=OTHER_SERVICE, store=run.store)
    effects = run.feed(run.group("ab", token="waits"))
    assert isinstance(one(effects, m.Fail).error, Fenced)
    late = run.feed(run.group("ab", token="late"))
    assert isinstance(one(late, m.Fail).error, Fenced)
    assert run.tick(3600.0) == (), "it acts no more"


def test_a_node_that_obeys_a_higher_epoch_ends_this_coordinator() -> None:
    run = Harness("ab")
    run.open("ab")
    for epoch in (0, run.machine.epoch):
        assert run.feed(m.OrderRefused(epoch=epoch)) == ()
    effects = run.feed(m.OrderRefused(epoch=run.machine.epoch + 1))
    assert [type(e) for e in effects] == [m.StepDown]
    assert not one(effects, m.StepDown).is_foreign, "nodes obey the coordinators of their own service"
    assert not ops(run.save(10))


def test_a_coordinator_that_cannot_append_its_epoch_fails_the_early_requests() -> None:
    run = Harness("ab")
    run.open("ab")
    run.store_mode = "held"
    run.start_coordinator()
    assert run.feed(run.group("ab", token="early")) == ()
    Harness("ab", store=run.store)
    effects = run.confirm()
    assert isinstance(one(effects, m.Fail).error, Fenced)
    assert of(effects, m.StepDown)
    assert [op for op in run.records if isinstance(op, r.Session)][-1].session == 1
