"""Goodput of logs whose goodput is known, what holds of every log, and the command."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ray_ckpt.cli import app
from ray_ckpt.format import names
from ray_ckpt.goodput import CAUSES, Goodput, Seconds, estimate_goodput
from ray_ckpt.types import CheckpointInfo, Level, SessionInfo
from tests.sample_run import write_run

UID = "0" * 32


class Log:
    """Sessions and commits at given times, as a history has them."""

    def __init__(self) -> None:
        self.sessions: list[SessionInfo] = []
        self.commits: list[CheckpointInfo] = []
        self.seq = 1

    def session(self, at_s: float, resumed: CheckpointInfo | None = None) -> Log:
        self.seq += 1
        self.sessions.append(
            SessionInfo(
                session=len(self.sessions) + 1,
                parent=len(self.sessions) or None,
                resumed_from=resumed.id.attempt if resumed else None,
                world_size=1,
                num_nodes=1,
                opened_at_s=at_s,
            )
        )
        return self

    def commit(self, at_s: float, step: int) -> CheckpointInfo:
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
        )
        self.commits.append(info)
        return info

    def goodput(self) -> Goodput:
        return estimate_goodput(self.sessions, self.commits)


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
    assert [found.badput[c].estimate for c in CAUSES] == [20.0, 0.0, 0.0, 0.0]
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
    assert found.badput["down"] == Seconds(0.0, 45.0, 50.0)
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


@pytest.mark.parametrize("seed", range(300))
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


@pytest.mark.parametrize("seed", range(50))
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


# The command


def run_cli(*args: object) -> str:
    result = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_says_where_the_time_went(tmp_path: Path) -> None:
    """Records are 30 s apart: session 1 at 60, commits from 90 on, session 2 of step 30 at 300."""
    run = write_run(tmp_path, resume_at=30, resumed_steps=(40, 50))
    text = run_cli("goodput", run.folder)
    assert "run gpt  goodput " in text and "10 committed steps lost" in text and "1 to 2" in text
    for cause in CAUSES:
        assert cause in text
    document = json.loads(run_cli("goodput", run.folder, "--json"))
    assert (document["step"], document["steps_lost"]) == (50, 10)
    total = document["productive_s"]["estimate"] + sum(t["estimate"] for t in document["badput_s"].values())
    assert total == pytest.approx(document["wall_s"]) and document["wall_s"] > 0
    assert len(document["interruptions"]) == 1
    assert "\x1b" not in text and "Example: ray-ckpt goodput" in run_cli("goodput", "--help")


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
