"""The phases of recoveries, of logs whose recoveries are known, and in the output of `ray-ckpt goodput`."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_ckpt.core.recovery import PHASES
from ray_ckpt.format import records
from tests.analysis.test_goodput import Log, exactly, run_cli, simulate
from tests.support.examples import every_few
from tests.support.sample_run import START_S, RunLog, write_run


def recovered(*, noticed_s: float | None, ended_s: float | None, started_s: float | None) -> Log:
    """Return a log whose last step ended at 50 s; the session that followed began its first step at 100 s.

    That session opened at 80 s, was connected at 82, began to restore at 90 and had its state at 95.
    """
    log = Log().session(0.0)
    last = log.commit(40.0, 40, lag_s=0.0, stall_s=0.0)
    log.ended("process", 50, first_s=0.0, last_s=50.0, stalled_s=0.0)
    log.session(80.0, last).restored(95.0, restore_s=5.0)
    log.sessions[-1] = replace(
        log.sessions[-1],
        noticed_at_s=noticed_s,
        previous_ended_at_s=ended_s,
        started_at_s=started_s,
        connected_at_s=82.0,
    )
    return log.ended("finished", 60, first_s=100.0, last_s=120.0, stalled_s=0.0)


def phases_of(log: Log) -> dict[str, float]:
    (failure,) = log.measured().interruptions
    return dict(failure.phases)


AFTER_OPENING = {"connected": 2.0, "prepared": 8.0, "restored": 5.0, "first_step": 5.0}


def test_the_phases_of_a_measured_recovery_add_up_to_it() -> None:
    log = recovered(noticed_s=53.0, ended_s=60.0, started_s=78.0)
    found = phases_of(log)
    assert found == {"noticed": 3.0, "ended": 7.0, "started": 18.0, "opened": 2.0, **AFTER_OPENING}
    assert list(found) == list(PHASES)
    assert log.measured().interruptions[0].recovery == exactly(50.0)


def test_an_unknown_moment_joins_two_phases() -> None:
    """A log that is older than the moments of launchers has one phase until the session was open."""
    found = phases_of(recovered(noticed_s=None, ended_s=60.0, started_s=None))
    assert found == {"ended": 10.0, "opened": 20.0, **AFTER_OPENING}
    found = phases_of(recovered(noticed_s=None, ended_s=None, started_s=None))
    assert found == {"opened": 30.0, **AFTER_OPENING}


def test_a_phase_whose_beginning_is_not_in_the_log_is_left_out() -> None:
    """The coordinator died with the first session, and the second one is at work."""
    log = recovered(noticed_s=53.0, ended_s=60.0, started_s=78.0)
    log.sessions = [replace(info, ended=None) for info in log.sessions]
    assert phases_of(log) == {
        "ended": 7.0,
        "started": 18.0,
        "opened": 2.0,
        "connected": 2.0,
        "prepared": 8.0,
        "restored": 5.0,
    }


def test_a_save_that_is_found_later_does_not_hide_the_launch() -> None:
    """The commit of an unrecorded save is written when the next group opens, after its processes started."""
    log = recovered(noticed_s=53.0, ended_s=60.0, started_s=78.0)
    log.sessions[0] = replace(log.sessions[0], ended=None)
    log.commits[0] = replace(log.commits[0], committed_at_s=79.0)
    assert phases_of(log) == {"ended": 7.0, "started": 18.0, "opened": 2.0, **AFTER_OPENING}


def test_the_end_of_a_last_step_is_enough_for_the_first_phase() -> None:
    """A restarted coordinator knows the last step, and not the first one."""
    log = recovered(noticed_s=53.0, ended_s=60.0, started_s=78.0)
    log.ended("finished", 60, None, 120.0)
    end = log.sessions[0].ended
    assert end is not None
    log.sessions[0] = replace(log.sessions[0], ended=replace(end, first_at_s=None))
    assert phases_of(log)["noticed"] == 3.0 and "first_step" not in phases_of(log)


@pytest.mark.parametrize("off_s", [-3600.0, -20.0, 15.0, 3600.0])
def test_clocks_that_differ_move_time_between_phases_and_add_none(off_s: float) -> None:
    """The launcher's clock and then those of the ranks are off."""
    launcher = recovered(noticed_s=53.0 + off_s, ended_s=60.0 + off_s, started_s=78.0 + off_s)
    ranks = recovered(noticed_s=53.0, ended_s=60.0, started_s=78.0)
    ranks.sessions[-1] = replace(ranks.sessions[-1], connected_at_s=82.0 + off_s)
    for log in (launcher, ranks):
        found = phases_of(log)
        assert sum(found.values()) == 50.0 and min(found.values()) >= 0.0
        assert found["restored"] == 5.0 and found["first_step"] == 5.0
    assert phases_of(launcher)["connected"] == 2.0
    assert phases_of(ranks)["opened"] == 2.0


def test_a_session_that_was_not_measured_bounds_the_moments_of_its_launcher() -> None:
    log = recovered(noticed_s=-3600.0, ended_s=-3590.0, started_s=78.0)
    log.sessions[0] = replace(log.sessions[0], ended=None)
    assert phases_of(log)["started"] == 78.0, "since the first session opened"


def test_after_a_finished_session_only_counted_time_is_in_phases() -> None:
    """The first session ended at 50 s and committed at 52; the launch of the second one took the rest."""
    log = recovered(noticed_s=None, ended_s=None, started_s=78.0)
    log.commits[0] = replace(log.commits[0], committed_at_s=52.0)
    log.ended("finished", 60, first_s=100.0, last_s=120.0, stalled_s=0.0)
    end = log.sessions[0].ended
    assert end is not None
    log.sessions[0] = replace(log.sessions[0], ended=replace(end, cause="finished"))
    found = log.measured()
    assert found.not_counted_s == 28.0
    assert phases_of(log) == {"opened": 2.0, **AFTER_OPENING}
    assert found.interruptions[0].recovery == exactly(22.0)


@pytest.mark.parametrize("seed", every_few(range(50)))
def test_phases_add_up_to_the_recoveries_of_a_simulated_run(seed: int) -> None:
    """The moments of launchers and ranks are any."""
    chance = random.Random(seed)
    log = simulate(seed).log
    known_s = [info.opened_at_s for info in log.sessions]
    for number, info in enumerate(log.sessions):
        moments = ("noticed_at_s", "previous_ended_at_s", "started_at_s", "connected_at_s")
        picked = [name for name in moments if chance.random() < 0.7]
        times: dict[str, Any] = {name: chance.uniform(known_s[0] - 1e3, known_s[-1] + 1e3) for name in picked}
        log.sessions[number] = replace(info, **times)
    found = [each for each in log.measured().interruptions if each.recovery is not None]
    for each in found:
        assert each.recovery is not None
        assert sum(each.phases.values()) == pytest.approx(each.recovery.estimate)
        assert list(each.phases) == [name for name in PHASES if name in each.phases]
        assert min(each.phases.values()) >= 0.0
    assert len(found) > 0


def test_the_command_shows_the_phases(tmp_path: Path) -> None:
    log = RunLog(folder=tmp_path / "gpt")
    log.create()
    log.session(1, after=None, world_size=2, num_nodes=2)
    at = {"first_at_s": START_S + 70, "last_at_s": START_S + 100, "stalled_s": 0.0}
    log.append(records.Ended(session=1, cause="process", step=130, **at))
    opened = records.Session(
        session=2,
        service="s",
        after=1,
        resumed_from=None,
        world_size=2,
        num_nodes=2,
        noticed_at_s=START_S + 103,
        previous_ended_at_s=START_S + 110,
        started_at_s=START_S + 117.5,
    )
    log.append(opened)
    text = run_cli("goodput", tmp_path / "gpt")
    (row,) = [line.strip() for line in text.splitlines() if "noticed" in line]
    assert re.fullmatch(r"1 to 2 +noticed 3\.0 s, ended 7\.0 s, started 7\.5 s, opened [\d.]+ s", row)
    (failure,) = json.loads(run_cli("goodput", tmp_path / "gpt", "--json"))["interruptions"]
    assert list(failure["phases"]) == ["noticed", "ended", "started", "opened"]
    assert failure["phases"]["ended"] == pytest.approx(7.0)


def test_the_command_shows_no_phases_where_none_are_known(tmp_path: Path) -> None:
    text = run_cli("goodput", write_run(tmp_path, resume_at=30, resumed_steps=(40, 50)).folder)
    assert "1 to 2" in text and "phases" not in text
