"""Goodput of logs whose goodput is known, what holds of every log, of a simulated run, and the command."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import tzset
from typing import Any

import pytest
from typer.testing import CliRunner

from ray_ckpt.analysis.goodput import (
    CAUSES,
    COLOURS,
    Goodput,
    Seconds,
    measure_goodput,
)
from ray_ckpt.cli import app
from ray_ckpt.cli.goodput import _beginnings, _print, draw
from ray_ckpt.cli.output import Output
from ray_ckpt.errors import ConfigError
from ray_ckpt.format import names, records
from ray_ckpt.texts import local_time_text
from ray_ckpt.types import END_CAUSES, CheckpointInfo, EndCause, Level, SessionEnd, SessionInfo
from tests.support.examples import every_few
from tests.support.sample_run import START_S, RunLog, make_checkpoint, write_run

UID = "0" * 32


class Log:
    """Sessions and commits at given times, as a history has them."""

    def __init__(self) -> None:
        self.sessions: list[SessionInfo] = []
        self.commits: list[CheckpointInfo] = []
        self.seq = 1

    def session(self, at_s: float, resumed: CheckpointInfo | None = None, service: str = "cluster") -> Log:
        self.seq += 1
        self.sessions.append(
            SessionInfo(
                session=len(self.sessions) + 1,
                parent=len(self.sessions) or None,
                resumed_from=resumed.id.attempt if resumed else None,
                world_size=1,
                num_nodes=1,
                opened_at_s=at_s,
                service=service,
            )
        )
        return self

    def restored(self, at_s: float, origin_step: int | None = None, *, restore_s: float | None = None) -> Log:
        self.sessions[-1] = replace(
            self.sessions[-1], restored_at_s=at_s, origin_step=origin_step, restore_s=restore_s
        )
        return self

    def ended(
        self,
        cause: EndCause,
        step: int,
        first_s: float | None,
        last_s: float | None,
        stalled_s: float | None = None,
    ) -> Log:
        end = SessionEnd(cause=cause, step=step, first_at_s=first_s, last_at_s=last_s, stalled_s=stalled_s)
        self.sessions[-1] = replace(self.sessions[-1], ended=end)
        return self

    def commit(
        self, at_s: float, step: int, lag_s: float | None = None, stall_s: float | None = None
    ) -> CheckpointInfo:
        self.seq += 1
        session = len(self.sessions)
        attempt = names.make_attempt(run_uid=UID, session=session, step=step, attempt=self.seq)
        info = CheckpointInfo(
            id=attempt,
            seq=self.seq,
            level=Level.LOCAL,
            world_size=1,
            num_nodes=1,
            size_bytes=1,
            root_digest=UID,
            committed_at_s=at_s,
            metrics={},
            capture_s=None if lag_s is None else lag_s / 4,
            local_s=None if lag_s is None else lag_s / 4,
            replicate_s=None if lag_s is None else lag_s / 2,
            stall_s=stall_s,
        )
        self.commits.append(info)
        return info

    def lost(self, *gone: CheckpointInfo) -> None:
        self.commits = [replace(c, state="lost") if c in gone else c for c in self.commits]

    def goodput(self) -> Goodput:
        """Goodput as it is estimated where the log has no session's first step."""
        ends = [info.ended and replace(info.ended, first_at_s=None) for info in self.sessions]
        sessions = [replace(info, ended=end) for info, end in zip(self.sessions, ends, strict=True)]
        return measure_goodput(sessions, self.commits)

    def by_commits(self) -> Goodput:
        """Goodput as it is estimated where the log has only commits: no restores and no times of ends."""
        sessions = [
            replace(
                info,
                restored_at_s=None,
                restore_s=None,
                ended=info.ended and replace(info.ended, first_at_s=None, last_at_s=None),
            )
            for info in self.sessions
        ]
        return measure_goodput(sessions, self.commits)

    def measured(self) -> Goodput:
        return measure_goodput(self.sessions, self.commits)


def exactly(time_s: float) -> Seconds:
    return Seconds(time_s, time_s, time_s)


def test_a_run_without_failures_loses_what_it_took_to_begin() -> None:
    """A step takes 1 s; the first one begins after 20 s."""
    log = Log().session(1000.0)
    for step in (10, 20, 30):
        log.commit(1020.0 + step, step)
    found = log.goodput()
    assert (found.wall_s, found.step, found.steps_lost, found.step_s) == (50.0, 30, 0, 1.0)
    assert found.productive == Seconds(20.0, 30.0, 50.0)
    assert found.badput["startup"] == Seconds(0.0, 20.0, 30.0)
    assert {c: time.estimate for c, time in found.badput.items() if time.estimate} == {"startup": 20.0}
    assert set(found.badput) == set(CAUSES)
    assert found.ratios == Seconds(0.4, 0.6, 1.0)
    assert found.interruptions == []


def test_a_failure_costs_half_an_interval_the_gap_and_the_start() -> None:
    """Saves every 10 s; after the last one 50 s pass until the next session, which restores for 15 s."""
    log = Log().session(0.0)
    log.commit(10.0, 10)
    last = log.commit(20.0, 20)
    log.session(70.0, last)
    log.commit(95.0, 30)
    log.commit(105.0, 40)
    found = log.goodput()
    assert found.wall_s == 105.0
    assert found.productive == Seconds(20.0, 40.0, 20.0 + 10.0 + 25.0)
    assert found.badput["startup"] == Seconds(0.0, 15.0, 35.0)
    assert found.badput["lost_steps"] == Seconds(0.0, 5.0, 50.0)
    assert found.badput["down_unknown"] == Seconds(0.0, 45.0, 50.0)
    (failure,) = found.interruptions
    assert (failure.known_steps_lost, failure.steps_lost) == (0, Seconds(0.0, 5.0, 50.0))
    assert failure.recovery == Seconds(0.0, 60.0, 75.0)
    assert (failure.last_known_s, failure.opened_at_s) == (20.0, 70.0)


def test_steps_that_were_committed_and_lost_are_known_badput() -> None:
    """The second session goes back to step 10 of 40: 30 s of steps were for nothing, to the second."""
    log = Log().session(0.0)
    first = log.commit(10.0, 10)
    for step in (20, 30, 40):
        log.commit(float(step), step)
    log.session(40.0, first)
    log.commit(50.0, 20)
    log.commit(60.0, 30)
    found = log.goodput()
    assert found.badput["lost_steps"] == exactly(30.0)
    assert (found.steps_lost, found.step) == (30, 30)
    assert found.interruptions[0].known_steps_lost == 30
    assert found.productive.estimate == 30.0 and found.lost.estimate == 30.0
    assert [p.survived for p in found.progress] == [True, True, False, False, False, True, True, True]


def test_a_session_off_the_lineage_counts_for_nothing() -> None:
    log = Log().session(0.0)
    first = log.commit(10.0, 10)
    log.commit(20.0, 20)
    log.session(20.0, first)
    log.commit(30.0, 20)
    log.commit(40.0, 30)
    log.session(40.0, first)
    log.commit(50.0, 20)
    found = log.goodput()
    assert found.productive == Seconds(0.0, 20.0, 20.0)
    assert found.badput["lost_steps"].estimate == 10.0 + 20.0
    assert (found.step, found.steps_lost) == (20, 30)


def test_sessions_without_a_commit_are_lost_entirely() -> None:
    log = Log().session(0.0)
    last = log.commit(10.0, 10)
    log.commit(20.0, 20)
    log.session(20.0, last).session(100.0, last).session(130.0, last)
    found = log.goodput()
    assert found.badput["no_commit"] == exactly(110.0)
    assert (found.step, found.wall_s) == (10, 130.0)
    assert [i.recovery for i in found.interruptions] == [None, None, None]
    assert [i.known_steps_lost for i in found.interruptions] == [10, 0, 0]


def test_steps_that_only_lost_checkpoints_had_are_lost() -> None:
    """All nodes are gone, and nothing was durable: a restart begins from scratch."""
    log = Log().session(0.0)
    saved = [log.commit(10.0 * k, 10 * k) for k in (1, 2, 3)]
    log.ended("node", 30, first_s=0.0, last_s=30.0, stalled_s=0.0)
    log.lost(*saved)
    for found in (log.goodput(), log.measured()):
        assert (found.productive.high, found.badput["lost_steps"].estimate) == (0.0, 30.0)
        assert (found.step, found.steps_lost, found.wall_s) == (0, 30, 30.0)
        assert not any(p.survived for p in found.progress)


def test_behind_a_lost_checkpoint_the_newest_live_one_counts() -> None:
    log = Log().session(0.0)
    _, second, third = (log.commit(10.0 * k, 10 * k) for k in (1, 2, 3))
    log.lost(second)
    assert (log.goodput().step, log.goodput().steps_lost) == (30, 0), "its effect is in the third"
    log.commits[1] = replace(log.commits[1], state="retired")
    log.lost(third)
    found = log.goodput()
    assert (found.step, found.steps_lost) == (10, 20), "what was retired is no help"
    assert (found.productive.estimate, found.badput["lost_steps"]) == (10.0, exactly(20.0))


def test_what_a_kept_session_went_on_from_counts_though_it_is_lost() -> None:
    log = Log().session(0.0)
    first, last = log.commit(10.0, 10), log.commit(20.0, 20)
    log.session(20.0, last)
    newest = log.commit(30.0, 30)
    log.lost(last)
    assert (log.goodput().step, log.goodput().productive.estimate) == (30, 30.0)
    log.lost(newest)
    found = log.goodput()
    assert (found.step, found.steps_lost, found.productive.estimate) == (first.step, 20, 10.0)


def test_going_forward_to_a_higher_step_loses_none_by_number() -> None:
    log = Log().session(0.0)
    first = log.commit(10.0, 10)
    last = log.commit(20.0, 20)
    log.session(20.0, first)
    log.commit(25.0, 15)
    log.session(30.0, last)
    log.commit(40.0, 30)
    found = log.goodput()
    assert [i.known_steps_lost for i in found.interruptions] == [10, 0]
    assert (found.step, found.steps_lost) == (30, 5), "5 of the second session; 20 is on the lineage again"


def test_a_commit_with_a_lower_step_adds_no_steps() -> None:
    log = Log().session(0.0)
    for time_s, step in ((10.0, 10), (20.0, 20), (25.0, 15), (30.0, 20)):
        log.commit(time_s, step)
    found = log.goodput()
    assert (found.step, found.steps_lost, found.step_s) == (20, 0, 2.0)
    assert [p.step for p in found.progress] == [0, 10, 20, 20, 20]


def test_a_clock_that_goes_back_stands_still() -> None:
    log = Log().session(100.0)
    log.commit(110.0, 10)
    last = log.commit(120.0, 20)
    log.session(60.0, last)
    log.commit(115.0, 30)
    log.commit(130.0, 40)
    found = log.goodput()
    assert (found.wall_s, found.clock_back_s) == (30.0, 60.0)
    assert found.productive.estimate == 30.0


def test_a_log_without_measured_time_gives_no_ratio() -> None:
    assert Log().goodput().ratios is None
    found = Log().session(5.0).goodput()
    assert (found.wall_s, found.ratios, found.step_s, found.step) == (0.0, None, None, 0)
    log = Log().session(5.0)
    log.commit(25.0, 10)
    assert log.goodput().productive == Seconds(0.0, 20.0, 20.0), (
        "one commit gives no pace: all of it is steps"
    )


def random_log(seed: int) -> Log:
    """Sessions of chance that resume from a commit of chance, or from scratch, with clocks that jump."""
    chance = random.Random(seed)
    log, now_s = Log(), 1e9
    for _ in range(chance.randint(1, 8)):
        now_s += chance.choice((0.0, 1.0, 300.0, -50.0))
        resumed = chance.choice([*log.commits[-5:], None])
        log.session(now_s, resumed)
        step = resumed.step if resumed else 0
        for _ in range(chance.randint(0, 6)):
            now_s += chance.choice((0.0, 10.0, 11.5, -3.0))
            step += chance.choice((1, 10, 10))
            log.commit(now_s, step)
    return log


@pytest.mark.parametrize("seed", every_few(range(300)))
def test_goodput_and_badput_add_up_to_the_wall_time(seed: int) -> None:
    found = random_log(seed).goodput()
    causes: Sequence[Seconds] = list(found.badput.values())
    for time in (found.productive, found.lost, *causes):
        assert -1e-6 <= time.low <= time.estimate + 1e-6 and time.estimate <= time.high + 1e-6
        assert time.high <= found.wall_s + 1e-6
    assert found.productive.estimate + sum(c.estimate for c in causes) == pytest.approx(found.wall_s)
    assert sum(c.low for c in causes) <= found.lost.low + 1e-6
    assert sum(c.high for c in causes) >= found.lost.high - 1e-6
    assert found.steps_lost >= 0
    for each in found.interruptions:
        assert each.steps_lost is None or each.known_steps_lost == each.steps_lost.low
        assert each.opened_at_s >= each.last_known_s


@pytest.mark.parametrize("seed", every_few(range(50)))
def test_the_bounds_hold_for_a_training_whose_steps_are_known(seed: int) -> None:
    """A training with steps of one second, saves every 20 that commit at once, and deaths by chance."""
    chance = random.Random(seed)
    log, now_s, saved, useful_s = Log(), 0.0, None, 0
    for _ in range(5):
        log.session(now_s, saved)
        now_s += chance.uniform(5, 40)  # restoring
        step = saved.step if saved else 0
        for _ in range(chance.randint(0, 100)):
            now_s, step = now_s + 1.0, step + 1
            if step % 20 == 0:
                useful_s += step - (saved.step if saved else 0)
                saved = log.commit(now_s, step)
        now_s += chance.uniform(10, 60)  # missed, started again
    found = log.goodput()
    assert found.productive.low <= useful_s <= found.productive.high + 1e-6
    assert found.step == useful_s and found.steps_lost == 0
    if all(any(a.id.session == b.session for a in log.commits[1:]) for b in log.sessions) and found.step_s:
        assert found.productive.estimate == pytest.approx(useful_s, rel=0.2)


# Measured


def test_a_session_that_is_reported_to_its_end_is_measured() -> None:
    """Ready after 12 s, first step at 20 s, a step each second, saves held it up for 1.5 s each.

    The restore time of the second session is not reported.
    """
    log = Log().session(0.0).restored(12.0, restore_s=0.2)
    log.commit(34.0, 10, lag_s=4.0, stall_s=1.5)
    last = log.commit(45.5, 20, lag_s=4.0, stall_s=1.5)
    log.ended("node", 25, first_s=20.0, last_s=48.0, stalled_s=3.0)
    log.session(100.0, last).restored(110.0)
    log.commit(131.5, 30, lag_s=1.5, stall_s=0.0)
    log.ended("finished", 30, first_s=120.0, last_s=130.0, stalled_s=0.0)
    found = log.measured()
    assert (found.wall_s, found.measured_s, found.step, found.step_s) == (131.5, 131.5, 30, 1.0)
    assert found.productive == exactly(20.0 + 10.0)
    spent = {cause: time.estimate for cause, time in found.badput.items() if time.high}
    assert spent == {
        "group_start": pytest.approx(11.8 + 10.0),
        "restore": pytest.approx(0.2),
        "startup": 8.0 + 10.0,
        "stalls": 3.0,
        "lost_steps": 5.0,
        "down_node": 52.0,
        "down_finished": 1.5,
    }
    (failure,) = found.interruptions
    assert failure.cause == "node" and failure.recovery == exactly(52.0 + 20.0)
    assert (failure.steps_lost, failure.known_steps_lost, failure.last_known_s) == (exactly(5), 0, 48.0)
    assert [(p.time_s, p.step, p.survived) for p in found.progress if p.session == 1] == [
        (0.0, 0, True),
        (20.0, 0, True),
        (30.0, 10, True),
        (41.5, 20, True),
        (48.0, 25, False),
    ]


def test_a_commit_that_came_after_its_session_is_placed_by_its_step() -> None:
    """A coordinator found the save of step 50 a quarter of an hour later."""
    log = Log().session(0.0)
    log.ended("process", 100, first_s=0.0, last_s=100.0)
    held = log.commit(900.0, 50, lag_s=2.0)
    log.session(900.0, held)
    assert log.measured().badput["lost_steps"] == exactly(50.0)


def test_a_session_without_a_report_is_estimated_from_its_restore_on() -> None:
    log = Log().session(0.0).restored(30.0, restore_s=20.0)
    log.commit(50.0, 10)
    log.commit(60.0, 20)
    found = log.measured()
    assert found.measured_s == 30.0 and found.badput["restore"] == exactly(20.0)
    assert found.badput["group_start"] == exactly(10.0)
    assert [t.restoring_s for t in found.spans] == [10.0]
    assert found.productive == Seconds(10.0, 20.0, 30.0)
    assert found.badput["startup"] == Seconds(0.0, 10.0, 20.0)


def test_a_session_whose_coordinator_was_restarted_is_measured_from_its_last_commit_on() -> None:
    """The beginning of the session's first step is not known; the last one ended at 75 s, after 25 steps."""
    log = Log().session(0.0)
    log.commit(50.0, 10)
    last = log.commit(60.0, 20)
    log.ended("node", 25, None, 75.0).session(100.0, last)
    found = log.measured()
    assert (found.badput["lost_steps"], found.badput["down_node"]) == (exactly(15.0), exactly(25.0))
    assert found.measured_s == 25.0 and found.interruptions[0].steps_lost == exactly(5)
    assert found.badput["startup"] == Seconds(0.0, 40.0, 50.0), "at the pace between commits"


def test_a_session_that_ended_before_its_first_step_was_down_for_its_cause() -> None:
    log = Log().session(0.0).restored(10.0).ended("process", 0, None, None).session(60.0)
    log.commit(80.0, 10)
    found = log.measured()
    assert (found.badput["group_start"].estimate, found.badput["down_process"]) == (10.0, exactly(50.0))
    assert found.badput["no_commit"] == exactly(0.0)


def test_times_that_contradict_the_order_of_things_are_cut() -> None:
    """Ranks' clocks are an hour ahead: all that is left for steps is the time that the log saw."""
    log = Log().session(0.0).restored(10.0).ended("node", 50, 3600.0, 3650.0, 99.0).session(60.0)
    found = log.measured()
    assert found.badput["startup"] == exactly(50.0) and found.badput["stalls"] == exactly(0.0)
    assert found.wall_s == 60.0


def test_steps_of_another_run_are_neither_done_nor_lost() -> None:
    """The run continues from step 50,000 of another run; it loses 80 steps of 2 s and its beginning."""
    log = Log().session(0.0).restored(30.0, origin_step=50_000)
    log.ended("node", 50_080, first_s=40.0, last_s=200.0, stalled_s=0.0)
    log.session(260.0).restored(290.0, origin_step=50_000)
    log.commit(400.0, 50_050, lag_s=0.0)
    log.ended("finished", 50_050, first_s=300.0, last_s=400.0, stalled_s=0.0)
    found = log.measured()
    assert found.interruptions[0].steps_lost == exactly(80)
    assert (found.badput["lost_steps"], found.productive) == (exactly(160.0), exactly(100.0))
    assert found.step_s == pytest.approx(2.0) and found.step == 50_050
    assert [p.step for p in found.progress][:2] == [50_000, 50_000]


def test_a_session_that_reported_no_step_has_lost_none() -> None:
    """The run begins anew twice, and of each 60 s none were steps."""
    log = Log().session(0.0).ended("process", 0, None, None)
    log.session(60.0).ended("node", 0, None, None)
    log.session(120.0)
    for step in (10, 20):
        last = log.commit(120.0 + step, step)
    log.ended("process", 20, first_s=120.0, last_s=140.0, stalled_s=0.0)
    log.session(150.0, last).ended("process", 20, None, None).session(210.0, last)
    found = log.measured()
    assert [i.steps_lost for i in found.interruptions] == [exactly(0)] * 4
    assert found.badput["down_process"] == exactly(60.0 + 10.0 + 60.0)
    assert found.badput["down_node"] == exactly(60.0) and found.measured_s == found.wall_s


def test_a_save_before_the_first_step_is_no_report_of_a_step() -> None:
    log = Log().session(0.0)
    begun = log.commit(5.0, 0)
    log.ended("process", 0, None, None).session(60.0, begun)
    found = log.measured()
    assert found.badput["down_process"] == exactly(60.0) and found.measured_s == 60.0


def test_stalls_of_a_session_at_work_are_those_of_its_commits() -> None:
    """The newest save's stall lies in time that is guessed."""
    log = Log().session(0.0).restored(10.0)
    saved = [log.commit(at_s, step, stall_s=1.5) for at_s, step in ((30.0, 10), (40.0, 20), (50.0, 30))]
    found = log.measured()
    assert found.badput["stalls"] == exactly(3.0)
    assert found.productive == Seconds(17.0, 17.0 + 10.0, 17.0 + 20.0)
    log.session(60.0, saved[1])
    log.commit(70.0, 30)
    found = log.measured()
    assert found.badput["stalls"] == exactly(3.0) and found.badput["lost_steps"].low == 10.0 - 1.5
    total = found.productive.estimate + sum(c.estimate for c in found.badput.values())
    assert total == pytest.approx(found.wall_s)


@pytest.mark.parametrize("cause", ["process", None])
def test_nobody_trains_in_a_rollback(cause: EndCause | None) -> None:
    """A rollback on Friday and training on Monday lose only the time after step 10."""
    log = Log().session(0.0)
    first = log.commit(10.0, 10)
    log.commit(20.0, 20)
    if cause:
        log.ended(cause, 20, first_s=0.0, last_s=20.0, stalled_s=0.0)
    weekend_s = 200_000.0
    log.session(30.0, first, "rollback-1").session(40.0, first, "rollback-2").session(weekend_s, first)
    log.commit(weekend_s + 10.0, 20)
    down = exactly(weekend_s - 30.0)
    for found in (log.measured(), log.goodput()):
        before, again, after = found.interruptions
        assert (again.steps_lost, after.steps_lost) == (exactly(0), exactly(0))
        assert before.steps_lost is not None and before.steps_lost.high <= 20
        assert [i.is_rollback for i in found.interruptions] == [False, True, True]
        assert (after.cause, before.cause, before.recovery) == (None, cause, None)
        assert found.badput[f"down_{cause or 'unknown'}"].estimate == pytest.approx(
            down.estimate + 10.0, abs=5.0
        )
        assert found.badput["no_commit"] == exactly(0.0)


def test_the_time_after_a_run_had_finished_is_not_counted() -> None:
    """Training took 100 s, the last commit came 2 s later, and the run was prolonged after five days."""
    days_s = 5 * 86400.0
    log = Log().session(0.0)
    last = log.commit(102.0, 100, lag_s=2.0)
    log.ended("finished", 100, first_s=0.0, last_s=100.0, stalled_s=0.0)
    log.session(days_s, last, "rollback-1").session(days_s + 50.0, last).restored(days_s + 60.0)
    log.ended("finished", 200, first_s=days_s + 60.0, last_s=days_s + 160.0, stalled_s=0.0)
    log.commit(days_s + 160.0, 200, lag_s=0.0)
    found = log.measured()
    assert found.wall_s == found.measured_s == pytest.approx(102.0 + 110.0)
    assert found.not_counted_s == pytest.approx(days_s + 50.0 - 102.0)
    assert found.badput["down_finished"].estimate == pytest.approx(2.0)
    assert found.ratios is not None and found.ratios.estimate == pytest.approx(200.0 / 212.0)
    assert found.interruptions[1].recovery == exactly(10.0)
    assert log.goodput().not_counted_s == found.not_counted_s


def test_the_time_between_an_import_and_the_first_training_is_not_counted() -> None:
    """A checkpoint was imported on Friday, and training began on Monday."""
    weekend_s = 200_000.0
    log = Log().session(0.0, service="import-1")
    imported = log.commit(2.0, 1000)
    log.session(weekend_s, imported).restored(weekend_s + 10.0)
    log.commit(weekend_s + 110.0, 1100, lag_s=0.0)
    log.ended("finished", 1100, first_s=weekend_s + 10.0, last_s=weekend_s + 110.0, stalled_s=0.0)
    found = log.measured()
    assert found.wall_s == found.measured_s == pytest.approx(2.0 + 110.0)
    assert found.not_counted_s == pytest.approx(weekend_s - 2.0)
    assert found.badput["down_unknown"] == exactly(0.0)
    assert found.ratios is not None and found.ratios.estimate == pytest.approx(100.0 / 112.0)
    (after,) = found.interruptions
    assert after.is_import and after.recovery == exactly(2.0 + 10.0)
    assert sum(after.phases.values()) == pytest.approx(12.0)


@pytest.mark.parametrize("ahead", range(4))
def test_one_moment_that_is_a_day_ahead_is_no_day(ahead: int) -> None:
    log = Log().session(1000.0)
    for number, (time_s, step) in enumerate(((1100.0, 10), (1200.0, 20), (1300.0, 30), (1400.0, 40))):
        last = log.commit(time_s + (86400.0 if number == ahead else 0.0), step)
    log.session(1500.0, last)
    log.commit(1600.0, 50)
    log.commit(1700.0, 60)
    found = log.measured()
    assert (found.wall_s, found.step) == (700.0, 60)
    assert found.clock_back_s > 86000.0


def test_what_lies_around_a_jump_of_a_clock_is_not_measured() -> None:
    log = Log()
    for at_s in (0.0, 100.0, 200.0):
        log.session(at_s, log.commits[-1] if log.commits else None)
        step = len(log.sessions) * 10
        log.commit(at_s + 50.0 + (3600.0 if at_s == 100.0 else 0.0), step, lag_s=0.0)
        log.ended("process", step, first_s=at_s, last_s=at_s + 90.0, stalled_s=0.0)
    log.session(300.0, log.commits[-1])
    found = log.measured()
    assert (found.wall_s, found.measured_s, found.clock_back_s) == (300.0, 200.0, 3550.0)
    assert [t.measured for t in found.spans[:3]] == [True, False, True]
    found = replace_times(log, by_s=-0.5).measured()
    assert 0.0 < found.clock_back_s < 1.0 and found.measured_s == found.wall_s, "clocks are no better"


def replace_times(log: Log, by_s: float) -> Log:
    """Return the same log with a wrong time of the second session's opening."""
    log.commits = [replace(c, committed_at_s=100.0 * k + 50.0) for k, c in enumerate(log.commits)]
    log.commits[0] = replace(log.commits[0], committed_at_s=100.0)
    log.sessions[1] = replace(log.sessions[1], opened_at_s=100.0 + by_s)
    return log


@dataclass
class Truth:
    """A simulated training's log, and what truly became of its time."""

    log: Log
    useful_s: float = 0.0
    useful_stalls_s: float = 0.0
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    steps_lost: list[int] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    sessions: int = 0
    not_counted_s: float = 0.0


SKEW_S = 0.2  # of a rank's clock against the coordinator's
JITTER = 0.3  # of a step's time


def simulate(seed: int, *, share: float = 1.0) -> Truth:
    """Simulate sessions that restore, start, step and save, and die at a random moment.

    A part `share` of them report their end. Commits come late, and those that would come after a death are
    lost. Most resumes go back to the newest checkpoint.
    """
    chance = random.Random(seed)
    step_s, every = chance.uniform(0.5, 5.0), chance.randint(5, 40)
    truth, now_s = Truth(Log()), 1e9
    done: dict[str, list[tuple[int, float, float]]] = {}  # attempt -> (session, step time, stall) of its past
    saved: CheckpointInfo | None = None
    down_s, last_cause = 0.0, ""
    past: list[tuple[int, float, float]] = []
    for number in range(1, chance.randint(3, 9)):
        log = truth.log.session(now_s, saved)
        past = list(done[saved.id.attempt]) if saved else []
        step = saved.step if saved else 0
        group_s, restore_s, startup_s = chance.uniform(1, 30), chance.uniform(1, 60), chance.uniform(0, 30)
        log.restored(now_s + group_s + restore_s, restore_s=restore_s)
        now_s += group_s + restore_s + startup_s
        truth.spent["group_start"] += group_s
        truth.spent["restore"] += restore_s
        truth.spent["startup"] += startup_s
        if number > 1:
            truth.recovery_s.append(down_s + group_s + restore_s + startup_s)
        skew_s = chance.uniform(-SKEW_S, SKEW_S)
        first_s, own, stalled_s = now_s, [], 0.0
        pending: list[tuple[float, int, float, float, int]] = []
        for _ in range(chance.randint(1, 6 * every)):
            took_s = step_s * chance.uniform(1 - JITTER, 1 + JITTER)
            now_s, step = now_s + took_s, step + 1
            own.append([took_s, 0.0])
            if step % every == 0:
                lag_s, stall_s = chance.uniform(0.1, 0.8) * every * step_s, chance.uniform(0, step_s)
                pending.append((now_s + lag_s, step, lag_s, stall_s, len(own)))
                now_s, own[-1][1] = now_s + stall_s, stall_s
                stalled_s += stall_s
        last_s = now_s
        cause = chance.choice(END_CAUSES)
        gap_s = down_s = chance.uniform(40, 400) + (every * step_s if cause == "finished" else 0.0)
        commits = []
        for at_s, at_step, lag_s, stall_s, count in pending:
            if at_s <= last_s or cause == "finished":
                commits.append(log.commit(at_s, at_step, lag_s, stall_s))
                done[commits[-1].id.attempt] = [*past, *((number, t, s) for t, s in own[:count])]
        if chance.random() < share:
            log.ended(cause, step, first_s + skew_s, last_s + skew_s, stalled_s)
        elif chance.random() < 0.5:
            log.ended(cause, step, None, last_s + skew_s)  # its coordinator was restarted
        truth.spent["stalls"] += stalled_s
        now_s += gap_s
        if cause == "finished":  # after its last commit nobody wanted to train
            down_s = max([last_s, *(c.committed_at_s for c in commits)]) - last_s
            truth.not_counted_s += gap_s - down_s
        truth.spent[f"down_{cause}"] += down_s
        truth.spent["lost_steps"] += sum(t for t, _ in own)
        old = chance.choice(log.commits) if log.commits else None  # on another branch, it may be
        saved = chance.choice([old, saved, *commits[-2:], *commits[-1:] * 4]) if commits else saved
        truth.steps_lost.append(max(0, step - (saved.step if saved else 0)))
        truth.sessions = number
        last_cause, final_down_s = cause, down_s
        final_gap_s = gap_s - down_s
    # the newest state is the last checkpoint of the last session, or what that one resumed from
    final = truth.log.commits[-1] if commits else None
    kept = done[final.id.attempt] if final else (past if saved is None else done[saved.id.attempt])
    truth.useful_s = sum(t for _, t, _ in kept)
    truth.useful_stalls_s = sum(s for _, _, s in kept)
    truth.spent["lost_steps"] -= truth.useful_s
    end_s = max(last_s, truth.log.commits[-1].committed_at_s) if commits else last_s
    truth.spent[f"down_{last_cause}"] += end_s - last_s - final_down_s
    truth.not_counted_s -= final_gap_s
    truth.steps_lost.pop()
    return truth


@pytest.mark.parametrize("seed", every_few(range(150)))
def test_measured_goodput_is_that_of_a_simulated_run(seed: int) -> None:
    truth = simulate(seed)
    found = truth.log.measured()
    near = pytest.approx
    slack_s = truth.sessions * (2 * SKEW_S + 2 * 5.0 * JITTER)
    assert found.productive.estimate == near(truth.useful_s, abs=slack_s)
    for cause, spent_s in truth.spent.items():
        assert found.badput[cause].estimate == near(spent_s, abs=slack_s), cause
    assert found.measured_s == near(found.wall_s)
    assert found.not_counted_s == near(truth.not_counted_s, abs=slack_s)
    assert [i.steps_lost.estimate for i in found.interruptions if i.steps_lost] == truth.steps_lost
    recovered = [i.recovery.estimate for i in found.interruptions if i.recovery]
    assert recovered == near(truth.recovery_s, abs=2 * SKEW_S + 1e-3)
    estimated = truth.log.goodput()
    known = [cause for cause in CAUSES if cause in ("group_start", "restore") or cause.startswith("down_")]
    assert estimated.wall_s == found.wall_s
    assert estimated.measured_s == near(sum(estimated.badput[cause].estimate for cause in known))
    by_commits = truth.log.by_commits()
    assert by_commits.measured_s == 0.0
    for bounds in (estimated.productive, by_commits.productive):
        assert bounds.low <= truth.useful_s + truth.useful_stalls_s + slack_s
        assert truth.useful_s <= bounds.high + slack_s


@pytest.mark.parametrize("seed", every_few(range(150)))
def test_unreported_time_stays_between_its_bounds(seed: int) -> None:
    truth = simulate(seed, share=0.5)
    found = truth.log.measured()
    slack_s = truth.sessions * (2 * SKEW_S + 2 * 5.0 * JITTER)
    assert found.productive.low <= truth.useful_s + truth.useful_stalls_s + slack_s
    assert truth.useful_s <= found.productive.high + slack_s
    assert found.productive.estimate + found.lost.estimate == pytest.approx(found.wall_s)
    width_s = found.productive.high - found.productive.low
    estimated = truth.log.goodput().productive
    assert width_s <= estimated.high - estimated.low + 1e-6, "facts make no bounds wider"


def impossible_facts(chance: random.Random, info: SessionInfo) -> dict[str, Any]:
    """Return random facts: when a session had its state, and how it ended."""
    near_s = info.opened_at_s + chance.choice((-100.0, 0.0, 5.0, 60.0))
    end = SessionEnd(
        cause=chance.choice(END_CAUSES),
        step=chance.randint(0, 80),
        first_at_s=chance.choice((near_s, None)),
        last_at_s=chance.choice((near_s + 50.0, near_s, None)),
        stalled_s=chance.choice((0.0, 7.0, 1e6, None)),
    )
    restored_s = chance.choice((None, near_s, info.opened_at_s + 3.0))
    service = chance.choice(("cluster", "cluster", "rollback-1"))
    return {"restored_at_s": restored_s, "ended": chance.choice((end, None)), "service": service}


@pytest.mark.parametrize("seed", every_few(range(200)))
def test_measured_times_add_up_whatever_is_in_the_log(seed: int) -> None:
    """Logs of chance with facts of chance, most of them impossible."""
    chance, log = random.Random(seed), random_log(seed)
    log.sessions = [replace(info, **impossible_facts(chance, info)) for info in log.sessions]
    found = log.measured()
    for time in (found.productive, *found.badput.values()):
        assert -1e-6 <= time.low <= time.estimate + 1e-6 and time.estimate <= time.high + 1e-6
    total = found.productive.estimate + sum(c.estimate for c in found.badput.values())
    assert total == pytest.approx(found.wall_s, abs=1e-5)
    assert 0 <= found.measured_s <= found.wall_s + 1e-6
    for t in found.spans:
        assert t.opened_s <= t.ready_s <= t.first_s <= t.survived_s <= t.last_s + 1e-6
        assert t.last_s <= t.closed_s + 1e-6


# The command


def run_cli(*args: object) -> str:
    result = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_shows_where_the_time_went(tmp_path: Path) -> None:
    """Records are 30 s apart: session 1 at 60, commits from 90 on, session 2 of step 30 at 300."""
    run = write_run(tmp_path, resume_at=30, resumed_steps=(40, 50))
    text = run_cli("goodput", run.folder)
    assert "run gpt  goodput " in text and "measured 0 % of it" in text
    assert "10 committed steps lost" in text and "1 to 2" in text
    for cause in ("goodput", *(cause for cause in CAUSES if not cause.startswith("down_")), "down_unknown"):
        assert cause in text
    document = json.loads(run_cli("goodput", run.folder, "--json"))
    assert (document["step"], document["steps_lost"], document["measured_s"]) == (50, 10, 0.0)
    total = document["productive_s"]["estimate"] + sum(t["estimate"] for t in document["badput_s"].values())
    assert total == pytest.approx(document["wall_s"]) and document["wall_s"] > 0
    assert set(document["badput_s"]) == set(CAUSES)
    assert len(document["interruptions"]) == 1
    assert "\x1b" not in text and "Example: ray-ckpt goodput" in run_cli("goodput", "--help")


def test_the_command_shows_what_was_measured(tmp_path: Path) -> None:
    """Session 1 opens at 60 s, is ready at 90, steps from 100 to 170 and loses its node."""
    log = RunLog(folder=tmp_path / "gpt")
    log.create()
    log.session(1, after=None, world_size=2, num_nodes=2)
    log.append(records.Restored(session=1, seconds=21.0, read_bytes={"peer": 5e9}))
    saved = make_checkpoint(log.attempt(1, 80))
    log.commit(saved)
    at = {"first_at_s": START_S + 100, "last_at_s": START_S + 170, "stalled_s": 0.0}
    log.append(records.Ended(session=1, cause="node", step=130, **at))
    log.session(2, after=saved, world_size=2, num_nodes=2)
    document = json.loads(run_cli("goodput", tmp_path / "gpt", "--json"))
    assert document["productive_s"]["estimate"] == pytest.approx(20.0), "by its commit at 120"
    text = run_cli("goodput", tmp_path / "gpt")
    assert "measured 100 % of it" in text and "down_node" in text and "down_process" not in text
    (failure,) = document["interruptions"]
    assert failure["cause"] == "node" and failure["steps_lost"]["estimate"] == 50


def test_a_run_that_has_not_trained_is_no_error(tmp_path: Path) -> None:
    text = run_cli("goodput", write_run(tmp_path, steps=()).folder)
    assert "unknown: the log has one moment" in text
    assert json.loads(run_cli("goodput", tmp_path / "gpt", "--json"))["goodput"] is None


def test_a_snapshot_does_not_change_the_answer(tmp_path: Path) -> None:
    run = write_run(tmp_path, resume_at=30, resumed_steps=(40, 50), collected=(10,))
    before = json.loads(run_cli("goodput", run.folder, "--json"))
    run.log.snapshot(time_s=2e9)
    for seq in range(1, run.log.seq):
        (run.folder / names.SERVICE_DIR / names.LOG_DIR / names.record_file(seq)).unlink()
    assert json.loads(run_cli("goodput", run.folder, "--json")) == before


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = write_run(tmp_path, resume_at=30, resumed_steps=(40, 50))
    run_cli("goodput", run.folder, "--plot", tmp_path / "goodput.png")
    assert (tmp_path / "goodput.png").read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.glob(".goodput*")) == []


def test_the_plot_replaces_no_file_without_force(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run, file = write_run(tmp_path, resume_at=30, resumed_steps=(40, 50)), tmp_path / "mine.png"
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"mine\.png is there already") as caught:
        run_cli("goodput", run.folder, "--plot", file)
    assert "--force" in caught.value.hint and file.read_text() == "mine"
    run_cli("goodput", run.folder, "--plot", file, "--force")
    assert file.read_bytes().startswith(b"\x89PNG")
    for name in ("goodput.svg", "goodput", "goodput.png.txt"):
        with pytest.raises(ConfigError, match="is not the name of a PNG"):
            run_cli("goodput", run.folder, "--plot", tmp_path / name)
        assert not (tmp_path / name).exists()
    with pytest.raises(ConfigError, match="There is no folder"):
        run_cli("goodput", run.folder, "--plot", tmp_path / "no folder" / "goodput.png")


def title_of(monkeypatch: pytest.MonkeyPatch, run_name: str, found: Goodput) -> tuple[str, bool]:
    """Return the picture's title, and whether all that is drawn lies in the picture."""
    from matplotlib import figure as figures

    seen: list[tuple[str, bool]] = []
    save = figures.Figure.savefig

    def savefig(figure: figures.Figure, *args: Any, **options: Any) -> None:
        save(figure, *args, **options)
        axis = figure.axes[0]
        box = axis.title.get_window_extent()
        seen.append((axis.get_title(), box.x0 >= 0 and box.x1 <= figure.bbox.x1))

    monkeypatch.setattr(figures.Figure, "savefig", savefig)
    assert draw(run_name, found).startswith(b"\x89PNG")
    return seen[0]


def test_the_picture_shows_how_certain_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with one commit: all of its time may have been steps, or nearly none."""
    pytest.importorskip("matplotlib")
    log = Log().session(0.0)
    log.commit(100.0, 10)
    title, is_inside = title_of(monkeypatch, "W" * 99 + "$" * 101, log.measured())
    assert "goodput 100.0 % (0.0 to 100.0 %)  measured 0 % of it" in title and is_inside


@pytest.mark.filterwarnings("error")
def test_a_picture_of_no_time_warns_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    for log in (Log(), Log().session(5.0)):
        title, _ = title_of(monkeypatch, "gpt", log.measured())
        assert title == "gpt\ngoodput unknown: the log has one moment"


def test_days_that_are_not_counted_are_not_drawn() -> None:
    log = Log().session(0.0)
    last = log.commit(100.0, 10)
    log.ended("finished", 10, first_s=0.0, last_s=100.0, stalled_s=0.0)
    log.session(86400.0, last)
    log.commit(86500.0, 20)
    assert _beginnings(log.measured()) == {1: 0.0, 2: 86300.0}


def printed(log: Log) -> str:
    """Return the output of the command."""
    out = io.StringIO()
    _print(Output(file=out, width=200), "gpt", log.measured())
    return out.getvalue()


def test_what_is_not_all_measured_is_not_called_so() -> None:
    """1000 s are known up to the restore of the last session; the 3.5 s since then are not."""
    log = Log().session(0.0)
    last = log.commit(900.0, 10)
    log.ended("process", 10, first_s=0.0, last_s=900.0, stalled_s=0.0)
    log.session(900.0, last).restored(996.5)
    log.commit(1000.0, 11)
    text = printed(log)
    assert "measured 99 % of it" in text and "Times that are not in the log are estimated" in text
    assert "cause " in text and " measured " not in text.splitlines()[3], "the column has estimates too"


def test_one_committed_step_is_no_steps() -> None:
    log = Log().session(0.0)
    first = log.commit(10.0, 10)
    log.commit(20.0, 11)
    log.session(30.0, first)
    assert "step 10, 1 committed step lost;" in printed(log)


@pytest.mark.parametrize("jump_s", [86400.0, -86400.0])
def test_a_jump_of_a_clock_is_reported_in_either_direction(jump_s: float) -> None:
    log = Log().session(1e6)
    log.commit(1e6 + 60.0, 10)
    log.commit(1e6 + 120.0 + jump_s, 20)
    log.commit(1e6 + 180.0, 30)
    log.commit(1e6 + 240.0, 40)
    text = printed(log)
    assert "Clocks differed or jumped by up to 24.0 h; times around there are wrong" in text
    assert "wall 4.0 min" in text and "missing" not in text


@pytest.mark.parametrize(
    "zone, text",
    [
        ("UTC", "2026-09-21 14:13:20Z"),
        ("Europe/Berlin", "2026-09-21 16:13:20+02"),
        ("Asia/Kolkata", "2026-09-21 19:43:20+05:30"),
        ("America/St_Johns", "2026-09-21 11:43:20-02:30"),
    ],
)
def test_a_time_names_its_zone(monkeypatch: pytest.MonkeyPatch, zone: str, text: str) -> None:
    try:
        with monkeypatch.context() as patch:
            patch.setenv("TZ", zone)
            tzset()
            assert local_time_text(1_790_000_000.0) == text
            last_s = 253_402_300_799.0  # of the year 9999 in UTC; east of it another year, without a calendar
            assert (local_time_text(last_s) == "?") == ("+" in text)
    finally:
        tzset()


def test_a_clock_that_went_back_makes_no_steps_undone() -> None:
    """The reported end of the session lies before the commit that it made."""
    log = Log().session(0.0)
    log.sessions[-1] = replace(
        log.sessions[-1], ended=SessionEnd(cause="process", step=0, first_at_s=1.0, last_at_s=2.0)
    )
    log.commit(10.0, 5)
    last = log.commit(20.0, 10)
    log.session(30.0, last)
    (failure,) = log.measured().interruptions
    assert failure.steps_lost is not None and failure.steps_lost.estimate == 0.0


def test_a_crash_loop_is_down(tmp_path: Path) -> None:
    run = write_run(tmp_path, steps=(10,))
    newest = run.checkpoints[10]
    for number in range(2, 6):
        end = records.Ended(
            session=number - 1, cause="process", step=10, first_at_s=None, last_at_s=None, stalled_s=None
        )
        run.log.append(end)
        run.log.session(number, after=newest, world_size=2, num_nodes=2)
    (line,) = (line for line in run_cli("goodput", run.folder).splitlines() if "down_process" in line)
    assert "no_commit" not in line and "85.0 %" in line


def test_the_command_shows_what_is_not_counted(tmp_path: Path) -> None:
    """The first session finishes with its last commit at 120; the second one opens a minute later."""
    log = RunLog(folder=tmp_path / "gpt")
    log.create()
    log.session(1, after=None, world_size=2, num_nodes=2)
    saved = make_checkpoint(log.attempt(1, 80))
    log.commit(saved)
    at = {"first_at_s": START_S + 60, "last_at_s": START_S + log.seq * 30 - 30, "stalled_s": 0.0}
    log.append(records.Ended(session=1, cause="finished", step=80, **at))
    log.append(records.Session(session=2, service="s", after=1, resumed_from=None, world_size=2, num_nodes=2))
    text = run_cli("goodput", tmp_path / "gpt")
    assert "not counted: " in text and " after the run had finished" in text
    document = json.loads(run_cli("goodput", tmp_path / "gpt", "--json"))
    assert document["not_counted_s"] == 60.0 and document["badput_s"]["down_finished"]["high"] == 0.0
    report = json.loads(run_cli("report", tmp_path / "gpt", "--json"))
    assert (report["goodput"]["not_counted_s"], report["goodput"]["clock_back_s"]) == (60.0, 0.0)


def test_each_part_has_a_colour_of_its_own() -> None:
    """Both halves of the picture use the same colours, and so does a notebook."""
    assert set(COLOURS) == {"goodput", *CAUSES} and len(set(COLOURS.values())) == len(COLOURS)
