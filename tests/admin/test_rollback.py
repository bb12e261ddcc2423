"""Rollbacks: the chosen checkpoint, the log afterwards, fencing, and the restore of the next group."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ray_ckpt.admin.rollback import (
    CREATE_TRIES,
    QUIET_S,
    LogTail,
    Rollback,
    plan_rollback,
    read_tail,
    roll_back,
)
from ray_ckpt.catalog.catalog import Catalog
from ray_ckpt.cli import app, main
from ray_ckpt.core import messages as m
from ray_ckpt.core.ownership import RunMark, check_claim, check_marks
from ray_ckpt.errors import ConfigError, Fenced, RunSuperseded, StoragePathError, Unavailable
from ray_ckpt.format import names, records
from ray_ckpt.location import Location
from ray_ckpt.storage.log_store import CreateResult, LogStore, MemoryLogStore
from ray_ckpt.storage.remote.tier import open_store
from ray_ckpt.types import ROLLBACK_PREFIX, SessionInfo
from tests.core.driver import RUN, RUN_UID, SERVICE, START_S, Harness, of, one
from tests.servers.stores import bucket_url
from tests.servers.strict_store import StrictStore
from tests.support.sample_run import RECORD_S, RunLog, SampleRun, copy_to, make_checkpoint, write_run
from tests.support.sample_run import START_S as SAMPLE_S

OTHER_SERVICE = "service-2"


def trained(*steps: int, **options: Any) -> Harness:
    """Return a run on two nodes that has saved these steps."""
    run = Harness("ab", keep_last=10, **options)
    run.open("ab")
    for step in steps:
        run.save(step)
    return run


def go_back(store: LogStore, *, before: int | None = None, to: int | None = None) -> SessionInfo:
    plan = plan_rollback(read_tail(store).history, before=before, to=to)
    return roll_back(store, plan, now_s=START_S, pause=refuse)


def refuse(_: float) -> None:
    raise AssertionError("waits")


def on(run: Harness, *, service: str = OTHER_SERVICE, **options: Any) -> Harness:
    """Another coordinator on the same log and the same nodes."""
    other = Harness("ab", service=service, store=run.store, keep_last=10, **options)
    other.disks = run.disks
    return other


# -- what is chosen ----------------------------------------------------------------------------------


def test_it_takes_the_newest_of_the_lineage_before_the_step() -> None:
    history = read_tail(trained(10, 20, 30, 40).store).history
    plan = plan_rollback(history, before=30)
    assert (plan.checkpoint.step, plan.session) == (20, 2)
    assert [c.step for c in plan.left_aside] == [30, 40]
    assert plan_rollback(history, to=30).checkpoint.step == 30
    assert plan_rollback(history, before=1_000).left_aside == ()


def test_a_plan_changes_nothing() -> None:
    run = trained(10, 20)
    history = read_tail(run.store).history
    before, seq = dict(run.store.objects), history.next_seq
    plan_rollback(history, before=20)
    assert (run.store.objects, history.next_seq, len(history.sessions)) == (before, seq, 1)


def test_only_the_lineage_counts_before_a_step_and_other_branches_for_one(tmp_path: Path) -> None:
    run = write_run(tmp_path, resume_at=20, resumed_steps=(25, 40))  # steps 30 and 40 of session 1 are aside
    history = read_tail(run.log.store).history
    assert plan_rollback(history, before=40).checkpoint.step == 25
    assert plan_rollback(history, to=40).checkpoint.id.session == 2
    plan = plan_rollback(history, to=30)
    assert plan.checkpoint.step == 30 and [c.step for c in plan.left_aside] == [25, 40]
    assert any("on another branch" in note for note in plan.notes())


def test_what_is_not_live_does_not_count(tmp_path: Path) -> None:
    run = write_run(tmp_path, durable=(10, 20), retired=(20,), lost=(30,))
    history = read_tail(run.log.store).history
    assert plan_rollback(history, before=40).checkpoint.step == 10
    for step in (20, 30):
        hint = "The nearest live steps are 10, 40."
        with pytest.raises(ConfigError, match=f"no live checkpoint of step {step}. {hint}"):
            plan_rollback(history, to=step)


def test_a_target_that_is_only_in_the_cluster_is_warned_about(tmp_path: Path) -> None:
    history = read_tail(write_run(tmp_path, durable=(10,)).log.store).history
    assert not [*plan_rollback(history, to=10).notes()]
    (note,) = plan_rollback(history, to=20).notes()
    assert "Step 20 is in the cluster only" in note


def test_a_target_that_is_damaged_on_the_storage_path_is_warned_about(tmp_path: Path) -> None:
    run = write_run(tmp_path, durable=(10, 20))
    run.log.append(records.Damaged(attempt=run.checkpoints[20].attempt.attempt, fragments="0,1"))
    history = read_tail(run.log.store).history
    assert not [*plan_rollback(history, to=10).notes()]
    (note,) = plan_rollback(history, to=20).notes()
    assert "Step 20 is damaged on the storage path (fragments 0,1): if its nodes lose it" in note


def test_a_target_after_the_first_finding_about_replicas_is_warned_about(tmp_path: Path) -> None:
    log = RunLog(folder=tmp_path / "gpt")
    log.create()
    log.session(1, after=None, world_size=2, num_nodes=2)
    saved = {step: make_checkpoint(log.attempt(1, step)) for step in (10, 20, 30, 40, 50)}
    for step, found in saved.items():
        log.commit(found, suspect="model.w: rank(s) 1 differ" if step in (30, 50) else None)
        log.drain(found)
    log.append(records.Retired(attempt=saved[30].attempt.attempt, reason="older than the last 3"))
    history = read_tail(log.store).history
    (note,) = plan_rollback(history, before=50).notes()
    assert note == (
        "Data-parallel replicas had drifted apart at step 30 already: the state of step 40 may be wrong."
    )
    assert not [*plan_rollback(history, before=30).notes()]
    rolled = go_back(log.store, before=30)
    assert rolled.resumed_from == saved[20].attempt.attempt
    history = read_tail(log.store).history
    assert history.suspect_text == "" and history.first_suspect is None
    assert "at step 30 already" in "".join(plan_rollback(history, to=50).notes()), "on the other branch"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            {"before": 10},
            "no live checkpoint before step 10 on its lineage. The nearest live steps are 10, 20.",
        ),
        ({"to": 15}, "no live checkpoint of step 15. The nearest live steps are 10, 20."),
        ({}, "Give --before STEP or --to STEP."),
        ({"before": 20, "to": 10}, "Give --before STEP or --to STEP."),
    ],
)
def test_without_a_target_it_lists_the_checkpoints(target: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_rollback(read_tail(trained(10, 20).store).history, **target)


def test_a_run_without_checkpoints_has_nothing_to_go_back_to() -> None:
    with pytest.raises(ConfigError, match="no live checkpoint at all"):
        plan_rollback(read_tail(trained().store).history, before=5)


# -- the log afterwards ------------------------------------------------------------------------------


def test_it_writes_an_epoch_and_a_session() -> None:
    run = trained(10, 20, 30, keep_every=100)
    before = read_tail(run.store).history
    session = go_back(run.store, before=30)
    history = read_tail(run.store).history
    epoch, opened = run.records[-2:]
    assert isinstance(epoch, records.Epoch) and isinstance(opened, records.Session)
    assert history.next_seq == before.next_seq + 2 and history.epoch == before.epoch + 1
    assert (
        history.session
        == session
        == SessionInfo(
            session=2,
            parent=1,
            resumed_from=plan_rollback(before, to=20).checkpoint.id.attempt,
            world_size=2,
            num_nodes=2,
            opened_at_s=START_S,
            opened_by=history.epoch,
            service=epoch.service,
            owner="ray-ckpt rollback --before 30",
            retention=before.sessions[1].retention,
        )
    )
    assert epoch.service.startswith(ROLLBACK_PREFIX) and "every_steps=100" in session.retention
    assert [c.step for c in history.lineage()] == [10, 20]
    assert [c.step for c in history.live()] == [10, 20, 30]


def test_once_more_writes_nothing() -> None:
    run = trained(10, 20, 30)
    first = go_back(run.store, before=30)
    there = dict(run.store.objects)
    assert go_back(run.store, before=30) == first and run.store.objects == there
    assert go_back(run.store, before=20).session == first.session + 1


def test_it_is_undone_by_going_to_what_was_left_aside() -> None:
    run = trained(10, 20, 30)
    go_back(run.store, before=20)
    go_back(run.store, to=30)
    assert [c.step for c in read_tail(run.store).history.lineage()] == [10, 20, 30]


def test_a_log_that_is_a_snapshot_only_is_enough(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    last_s = SAMPLE_S + RECORD_S * (run.log.seq - 1)
    run.log.snapshot(time_s=last_s)
    assert read_tail(run.log.store).last_s == last_s
    run.log.store.delete(names.record_file(run.log.seq - 1))
    tail = read_tail(run.log.store)
    assert tail.last_s is None and not tail.is_at_work(last_s)
    plan = plan_rollback(tail.history, before=30)
    roll_back(run.log.store, plan, now_s=last_s, pause=refuse)
    assert Catalog(run.folder).lineage[-1].step == 20


# -- the next group ----------------------------------------------------------------------------------


@pytest.mark.parametrize("service", [SERVICE, OTHER_SERVICE])
def test_the_next_group_restores_that_checkpoint_and_branches(service: str) -> None:
    run = trained(10, 20, 30)
    session = go_back(run.store, before=30)
    other = on(run, service=service)
    effects = other.feed(other.group("ab", owner="another"))
    plan = one(effects, m.StartSession).plan
    assert plan.resume is not None and plan.resume.checkpoint.step == 20
    assert plan.session == session.session + 1
    other.feed(*(other.restored(node) for node in "ab"))
    other.save(25)
    history = read_tail(run.store).history
    assert [c.step for c in history.lineage()] == [10, 20, 25]
    assert history.sessions[plan.session].parent == session.session


def test_what_is_left_aside_goes_by_retention() -> None:
    run = trained(10, 20, 30)
    go_back(run.store, before=20)
    other = on(run)
    other.feed(other.group("ab", owner="another"))
    assert [c.step for c in read_tail(run.store).history.live()] == [10, 20, 30]
    other.feed(*(other.restored(node) for node in "ab"))
    other.save(15)
    assert [c.step for c in read_tail(run.store).history.live()] == [10, 15]


def test_if_its_nodes_are_gone_an_older_one_is_taken() -> None:
    run = trained(10, 20, 30, inventory_wait_s=0.0)
    go_back(run.store, before=30)
    twenty = read_tail(run.store).history.lineage()[-1]
    for disk in run.disks.values():
        disk.delete(twenty.id.attempt)
    other = on(run, inventory_wait_s=0.0)
    plan = one(other.feed(other.group("ab", owner="another")), m.StartSession).plan
    assert plan.resume is not None and plan.resume.checkpoint.step == 10


def test_what_was_complete_and_not_recorded_does_not_come_back() -> None:
    """The old group stored step 40 on all nodes; its commit was not in the log when the run went back."""
    run = trained(10, 20, 30)
    run.store_mode = "silent"
    run.save(40)
    go_back(run.store, before=30)
    other = on(run)
    plan = one(other.feed(other.group("ab", owner="another")), m.StartSession).plan
    assert plan.resume is not None and plan.resume.checkpoint.step == 20
    assert 40 not in {c.step for c in read_tail(run.store).history.live()}


def test_any_launcher_may_open_the_run_and_a_restarted_coordinator_may_not() -> None:
    run = trained(10, 20)
    marks = [RunMark(run_uid=RUN_UID, epoch=run.machine.epoch)]
    go_back(run.store, before=20)
    history = read_tail(run.store).history
    check_marks(history, run_name=RUN, marks=marks, resume="auto")
    for service in (SERVICE, OTHER_SERVICE):
        check_claim(history, service=service, owner="another")
    check_claim(history, service=SERVICE, owner="driver")  # who had it; a rollback is no rival
    with pytest.raises(RunSuperseded, match="in session 2"):
        check_claim(history, service=SERVICE, owner=None)


def test_a_rollback_gives_the_run_to_nobody_who_had_lost_it() -> None:
    run = trained(10, 20)
    other = on(run)
    other.feed(other.group("ab", owner="another"))
    go_back(run.store, before=20)
    history = read_tail(run.store).history
    with pytest.raises(RunSuperseded):
        check_claim(history, service=SERVICE, owner="driver")


# -- who is at work ----------------------------------------------------------------------------------


def test_a_group_at_work_is_fenced_at_its_next_save() -> None:
    run = trained(10, 20)
    go_back(run.store, before=20)
    effects = run.save(30)
    superseded = one(effects, m.Supersede)
    assert isinstance(superseded.error, RunSuperseded) and set(superseded.nodes) == {"a", "b"}
    assert one(effects, m.StepDown).is_foreign
    assert 30 not in {c.step for c in read_tail(run.store).history.live()}


def test_a_coordinator_that_was_idle_gives_the_run_up_and_opens_it_again() -> None:
    run = trained(10, 20)
    go_back(run.store, before=20)
    effects = run.feed(run.group("ab", owner="another", dead_owner="driver"))
    assert isinstance(one(effects, m.Fail).error, Fenced) and of(effects, m.StepDown)
    run.start_coordinator()
    plan = one(run.feed(run.group("ab", owner="another")), m.StartSession).plan
    assert plan.resume is not None and plan.resume.checkpoint.step == 10


def test_young_records_are_taken_for_a_training_at_work() -> None:
    history = read_tail(trained(10).store).history
    tail = LogTail(history=history, last_s=1_000.0)
    assert tail.is_at_work(1_000.0 + QUIET_S - 1) and not tail.is_at_work(1_000.0 + QUIET_S + 1)
    assert tail.is_at_work(900.0)  # the clocks differ
    assert not tail.is_at_work(1_010.0, quiet_s=5.0)


def test_a_rollback_is_nobody_at_work() -> None:
    run = trained(10, 20)
    go_back(run.store, before=20)
    assert not read_tail(run.store).is_at_work(START_S)
    on(run)  # a coordinator opens the run
    assert read_tail(run.store).is_at_work(START_S)


# -- races and silence -------------------------------------------------------------------------------


class Between(MemoryLogStore):
    """A store in which something happens at the create of the record of a number."""

    def __init__(
        self, objects: dict[str, bytes], seq: int, happens: Callable[[str, bytes], CreateResult]
    ) -> None:
        super().__init__()
        self.objects, self._name, self._happens = objects, names.record_file(seq), happens
        self.requested = 0

    def create(self, name: str, data: bytes) -> CreateResult:
        if name != self._name:
            return super().create(name, data)
        self.requested += 1
        return self._happens(name, data)


def planned(run: Harness) -> tuple[Rollback, int]:
    """Return a plan, and the number of the next record."""
    history = read_tail(run.store).history
    return plan_rollback(history, before=20), history.next_seq


def test_a_faster_writer_is_reported_and_nothing_is_changed() -> None:
    run = trained(10, 20)
    plan, _ = planned(run)
    run.save(30)
    there = dict(run.store.objects)
    with pytest.raises(Fenced, match="Nothing was changed"):
        roll_back(run.store, plan, now_s=START_S, pause=refuse)
    assert run.store.objects == there


def test_who_comes_between_the_two_records_has_the_run() -> None:
    run = trained(10, 20)
    plan, seq = planned(run)

    def another_comes(name: str, data: bytes) -> CreateResult:
        other = on(run)
        other.feed(other.group("ab", owner="another"))
        return CreateResult.OK if run.store.objects[name] == data else CreateResult.EXISTS

    store = Between(run.store.objects, seq + 1, another_comes)
    with pytest.raises(Fenced, match="The training that had it is fenced, and nothing else was changed"):
        roll_back(store, plan, now_s=START_S, pause=refuse)
    assert read_tail(run.store).history.lineage()[-1].step == 20
    assert of(run.save(30), m.StepDown)


@pytest.mark.parametrize("record", [0, 1])
@pytest.mark.parametrize("is_written", [True, False])
def test_requests_are_repeated_if_their_answers_are_lost(record: int, is_written: bool) -> None:
    run = trained(10, 20)
    plan, seq = planned(run)
    pauses: list[float] = []

    def lost(name: str, data: bytes) -> CreateResult:
        if is_written or store.requested > 2:
            outcome = (
                CreateResult.OK if run.store.objects.setdefault(name, data) == data else CreateResult.EXISTS
            )
        return outcome if store.requested > 2 else CreateResult.UNKNOWN

    store = Between(run.store.objects, seq + record, lost)
    assert roll_back(store, plan, now_s=START_S, pause=pauses.append).session == 2
    assert len(pauses) == 2 and len(run.store.objects) == seq + 2


@pytest.mark.parametrize(("record", "message"), [(0, "It is unknown"), (1, "is fenced, and it is unknown")])
def test_a_store_that_stays_silent_ends_it_and_a_second_try_finds_out(record: int, message: str) -> None:
    run = trained(10, 20)
    plan, seq = planned(run)
    pauses: list[float] = []

    def silent(name: str, data: bytes) -> CreateResult:
        run.store.objects[name] = data
        return CreateResult.UNKNOWN

    store = Between(run.store.objects, seq + record, silent)
    with pytest.raises(Unavailable, match=message):
        roll_back(store, plan, now_s=START_S, pause=pauses.append)
    assert store.requested == CREATE_TRIES == len(pauses) + 1
    go_back(run.store, before=20)
    assert read_tail(run.store).history.lineage()[-1].step == 10


def test_a_store_that_cannot_create_once_is_refused() -> None:
    run = trained(10, 20)
    plan, seq = planned(run)
    store = Between(run.store.objects, seq, lambda name, data: CreateResult.UNSUPPORTED)
    with pytest.raises(StoragePathError, match="cannot create a file exclusively"):
        roll_back(store, plan, now_s=START_S, pause=refuse)


# -- the command -------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> SampleRun:
    """Steps 10 to 40 of session 1; 10 and 30 are durable. Its last record is of some time ago."""
    return write_run(tmp_path)


def command(*args: object, answer: str | None = None) -> str:
    result = CliRunner().invoke(app, [str(a) for a in args], input=answer, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def fails(capsys: pytest.CaptureFixture[str], *args: object, code: int = 2) -> str:
    """Return the one line on stderr of a command that exits with `code`."""
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    output = capsys.readouterr()
    assert caught.value.code == code and output.out == ""
    assert output.err.startswith("ray-ckpt: ") and output.err.count("\n") == 1
    return output.err


def commit_now(run: SampleRun, step: int) -> None:
    """Let a training save at this moment."""
    run.log.commit(make_checkpoint(run.log.attempt(1, step)))
    path = run.folder / "ray_ckpt" / "log" / names.record_file(run.log.seq - 1)
    record = records.decode_record(path.read_bytes())
    path.write_bytes(records.encode_record(replace(record, time_s=time.time())))


def test_the_command_shows_what_it_does_and_does_it(run: SampleRun) -> None:
    text = command("rollback", run.folder, "--before", 40, "--yes")
    assert "session 2 continues from step 30, durable" in text and "left aside" in text
    assert "after the first save of the next training" in text
    assert [line.split()[:2] for line in text.splitlines() if "loss" in line] == [["40", "replicated(1),"]]
    assert (
        "Session 2 is open" in text
        and "The launcher that had the run before may also continue with it." in text
    )
    assert [c.step for c in Catalog(run.folder).lineage] == [10, 20, 30]
    assert "was open already" in command("rollback", run.folder, "--before", 40)


def test_the_command_as_json(run: SampleRun) -> None:
    document = json.loads(command("rollback", run.folder, "--to", 20, "--yes", "--json"))
    assert (document["session"], document["step"], document["was_done"]) == (2, 20, False)
    assert [c["step"] for c in document["left_aside"]] == [30, 40]
    assert "in the cluster only" in document["notes"][0] and document["level"] == "replicated"
    assert json.loads(command("rollback", run.folder, "--to", 20, "--yes", "--json"))["was_done"]


def test_it_requests_confirmation_first(run: SampleRun, capsys: pytest.CaptureFixture[str]) -> None:
    for answer in ("n\n", ""):
        result = CliRunner().invoke(app, ["rollback", str(run.folder), "--before", "40"], input=answer)
        assert isinstance(result.exception, ConfigError) and "Nothing was changed" in str(result.exception)
        assert "Go back to step 30?" in result.stderr
    assert len(Catalog(run.folder).sessions) == 1
    result = CliRunner().invoke(app, ["rollback", str(run.folder), "--before", "40", "--json"], input="n\n")
    assert "left aside" in result.stderr and "session 2 continues from step 30" in result.stderr
    text = command("rollback", run.folder, "--before", 40, "--json", answer="y\n")
    assert json.loads(text[text.index("{") :])["step"] == 30  # before it, the answer as it was typed


def heeds_ctrl_c() -> None:
    """Undo what a shell does for a job in the background, from which these tests may be run."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_at_the_question_is_that(run: SampleRun) -> None:
    args = [sys.executable, "-m", "ray_ckpt.cli", "rollback", str(run.folder), "--before", "40"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process: Any
    with subprocess.Popen(args, **pipes, preexec_fn=heeds_ctrl_c) as process:  # type: ignore[call-overload]
        assert process.stderr.read(len("Go back to step 30?")) == b"Go back to step 30?"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert len(Catalog(run.folder).sessions) == 1


def test_tree_distinguishes_a_rollback_from_a_training(run: SampleRun) -> None:
    command("rollback", run.folder, "--to", 20, "--yes")
    (line,) = (line for line in command("tree", run.folder).splitlines() if "session 2" in line)
    assert "session 2  rolled back to step 20 of session 1" in line and "ranks" not in line
    sessions = json.loads(command("tree", run.folder, "--json"))["sessions"]
    assert [session["is_rollback"] for session in sessions] == [False, True]


def test_a_run_that_may_be_at_work_is_left_alone(run: SampleRun, capsys: pytest.CaptureFixture[str]) -> None:
    commit_now(run, 50)
    target = ("rollback", run.folder, "--before", 40, "--yes")
    error = fails(capsys, *target, code=1)
    assert "may be at work: its log has a record of" in error and "--even-if-at-work" in error
    assert len(Catalog(run.folder).sessions) == 1
    assert "a training that is at work is stopped" in command(*target, "--even-if-at-work")
    assert Catalog(run.folder).lineage[-1].step == 30


def test_the_quiet_time_of_a_run_is_an_option(run: SampleRun) -> None:
    commit_now(run, 50)
    command("rollback", run.folder, "--before", 40, "--yes", "--quiet-s", 0)
    assert Catalog(run.folder).lineage[-1].step == 30


@pytest.mark.parametrize("quiet_s", ["nan", "inf", "-1"])
def test_no_number_of_seconds_switches_the_look_off(
    run: SampleRun, capsys: pytest.CaptureFixture[str], quiet_s: str
) -> None:
    commit_now(run, 50)
    error = fails(capsys, "rollback", run.folder, "--before", 40, "--yes", f"--quiet-s={quiet_s}")
    assert "--quiet-s is" in error and len(Catalog(run.folder).sessions) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--before", 5],
            "no live checkpoint before step 5 on its lineage. The nearest live steps are 10, 20, 30, 40.",
        ),
        (["--to", 15], "no live checkpoint of step 15"),
        ([], "Give --before STEP or --to STEP."),
        (["--before", 40, "--to", 10], "Give --before STEP or --to STEP."),
        (["--before", 40, "--storage-option", "profile=a"], "takes no storage_options"),
    ],
)
def test_what_is_wrong_is_one_line(
    run: SampleRun, args: list[object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in fails(capsys, "rollback", run.folder, "--yes", *args)
    assert len(Catalog(run.folder).sessions) == 1


def test_there_must_be_a_run_and_its_log_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "There is no run at" in fails(capsys, "rollback", tmp_path / "nothing", "--before", 5)
    assert not (tmp_path / "nothing").exists()
    torn = write_run(tmp_path, "torn").folder
    (torn / "ray_ckpt" / "log" / names.record_file(2)).unlink()
    assert "no record 2" in fails(capsys, "rollback", torn, "--before", 40, "--yes", code=1)


def test_it_works_in_a_bucket(run: SampleRun, tmp_path: Path, strict: StrictStore, credentials: None) -> None:
    storage = Location.parse(bucket_url("s3", strict.endpoint, f"rollback/{uuid.uuid4().hex}"))
    copy_to(open_store(storage, None)[0], tmp_path)
    command("rollback", storage / "gpt", "--before", 40, "--yes")
    assert [c.step for c in Catalog(storage / "gpt").lineage] == [10, 20, 30]
    assert len(Catalog(run.folder).sessions) == 1


def test_the_command_has_an_example() -> None:
    assert "Example: ray-ckpt rollback" in command("rollback", "--help")
