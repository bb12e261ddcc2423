"""Moments of a launch and a restore in the log, and the metric of a recovery's phases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ray_ckpt import telemetry
from ray_ckpt.core import messages as m
from ray_ckpt.core.history import RunHistory
from ray_ckpt.core.recovery import phases_until_restored
from ray_ckpt.core.values import RankProgress
from ray_ckpt.format import records as r
from ray_ckpt.types import ROLLBACK_PREFIX, LaunchTimes, SessionInfo
from tests.core.driver import START_S, Harness


def trained(run: Harness, step: int) -> None:
    """Save `step` and report that it ended now."""
    run.save(step)
    progress = RankProgress(step=step, saved_step=step, since_s=0.0, step_s=1.0, stall_s=0.0)
    for node in run.plan.nodes:
        event = m.RanksProgressed(session_key=run.plan.session_key, ranks=dict.fromkeys(node.ranks, progress))
        run.feed(event)


def launched(run: Harness) -> LaunchTimes:
    """Return the times of a launch: noticed after 3 s, ended after 7, started after 12; 13 s have passed."""
    now_s = START_S + run.now_s
    run.tick(13.0)
    return LaunchTimes(noticed_at_s=now_s + 3, previous_ended_at_s=now_s + 7, started_at_s=now_s + 12)


def restore(run: Harness, *, seconds: float = 4.0, damage: tuple[str, ...] = ()) -> None:
    """Let all ranks restore; rank k was connected k + 1 s before now."""
    now_s = START_S + run.now_s
    for node in run.plan.nodes:
        event = run.restored(node.node_id, damage=damage)
        ranks = tuple(replace(k, seconds=seconds, connected_at_s=now_s - 1.0 - k.rank) for k in event.ranks)
        run.feed(replace(event, ranks=ranks))


def sessions(run: Harness) -> list[r.Session]:
    return [op for op in run.records if isinstance(op, r.Session)]


def restores(run: Harness) -> list[r.Restored]:
    return [op for op in run.records if isinstance(op, r.Restored)]


def observed(run: Harness) -> dict[str, float]:
    """Return the seconds by phase that were measured since the last call; each phase at most once."""
    samples = [s for s in run.machine.take_samples() if s.metric is telemetry.RECOVERY]
    found = {sample.labels["phase"]: sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


def test_the_moments_are_in_the_log_and_in_its_snapshot() -> None:
    run = Harness("ab")
    run.open("ab")
    trained(run, 10)
    launch = launched(run)
    run.feed(run.group("ab", launch=launch))
    run.tick(10.0)
    restore(run)
    first, second = sessions(run)
    assert (first.noticed_at_s, first.previous_ended_at_s, first.started_at_s) == (None, None, None)
    found = (second.noticed_at_s, second.previous_ended_at_s, second.started_at_s)
    assert found == (launch.noticed_at_s, launch.previous_ended_at_s, launch.started_at_s)
    (restored,) = restores(run)
    assert restored.connected_at_s == START_S + run.now_s - 1.0, "of the last rank"
    info = run.machine.history.session
    assert info is not None and info.noticed_at_s == launch.noticed_at_s
    assert info.connected_at_s == restored.connected_at_s
    assert RunHistory.from_snapshot(run.machine.history.to_snapshot(0.0)).session == info


def test_the_metric_has_the_phases_until_the_state_was_there() -> None:
    run = Harness("ab")
    run.open("ab")
    trained(run, 10)
    assert observed(run) == {}
    run.feed(run.group("ab", launch=launched(run)))
    run.tick(10.0)
    restore(run, seconds=0.5)
    assert observed(run) == pytest.approx(
        {
            "noticed": 3.0,
            "ended": 4.0,
            "started": 5.0,
            "opened": 1.0,
            "connected": 9.0,
            "prepared": 0.5,
            "restored": 0.5,
        }
    )
    trained(run, 20)
    run.open("ab")
    assert list(observed(run)) == ["opened", "prepared", "restored"], "without a launcher's times"


def test_a_run_that_goes_on_after_its_end_has_not_recovered() -> None:
    run = Harness("ab")
    run.open("ab")
    trained(run, 10)
    effects = run.feed(m.FinishRequested(token="end", ends_group=True))
    run.drain_all(effects)
    run.feed(run.group("ab", launch=launched(run)))
    restore(run)
    assert len(restores(run)) == 1 and observed(run) == {}


def test_only_the_first_session_of_a_group_has_the_moments_of_its_launch() -> None:
    """The newest checkpoint is damaged, so the group restores an older one in a new session."""
    run = Harness("ab")
    run.open("ab")
    trained(run, 10)
    trained(run, 20)
    launch = launched(run)
    run.feed(run.group("ab", launch=launch))
    restore(run, damage=("x",))
    restore(run)
    assert [op.started_at_s for op in sessions(run)] == [None, launch.started_at_s, None]
    assert "noticed" not in observed(run)


@pytest.mark.parametrize(("service", "num_phases"), [("service-1", 3), (f"{ROLLBACK_PREFIX}me", 0)])
def test_a_group_after_a_rollback_has_not_recovered(service: str, num_phases: int) -> None:
    history = RunHistory()
    for number, opened_by in ((1, service), (2, "service-1")):
        history.sessions[number] = SessionInfo(
            session=number,
            parent=number - 1 or None,
            resumed_from=None,
            world_size=1,
            num_nodes=1,
            opened_at_s=100.0 * number,
            service=opened_by,
            started_at_s=100.0 * number - 1.0,
        )
    restored = r.Restored(session=2, seconds=4.0, read_bytes={})
    assert len(phases_until_restored(history, restored, 250.0)) == num_phases
    assert phases_until_restored(history, replace(restored, session=1), 150.0) == {}, "the first one"
    assert phases_until_restored(history, replace(restored, session=3), 250.0) == {}, "not in the log"
