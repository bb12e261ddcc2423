"""Metrics of a run for people and alerts, from the machine alone."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ray_ckpt import telemetry
from ray_ckpt.core import messages as m
from ray_ckpt.core.gauges import gauges
from ray_ckpt.core.history import RunHistory
from ray_ckpt.format.records import Drilled
from ray_ckpt.telemetry import Metric
from ray_ckpt.types import AttemptId, Exposure
from tests.core.driver import Harness, of, one


def gauge(run: Harness, metric: Metric) -> list[float]:
    return [sample.value for sample in run.machine.view.gauges() if sample.metric is metric]


def counted(run: Harness, metric: Metric) -> Mapping[str, float]:
    """Return counts since the last call, by cause or place."""
    found: dict[str, float] = {}
    for sample in run.machine.take_samples():
        if sample.metric is metric:
            (label,) = sample.labels.values()
            found[label] = found.get(label, 0.0) + sample.value
    return found


def at_risk(*risks: int | None) -> tuple[dict[str, float], dict[str, float]]:
    """Return the series by node, and those over all nodes; None: all steps are at risk."""
    exposure = [
        Exposure(node_id=f"n{k:05d}", step=None if risk is None else 1, tier=None, steps_at_risk=risk or 0)
        for k, risk in enumerate(risks)
    ]
    found = list(gauges(history=RunHistory(), is_active=True, last_step=1, wall_s=0.0, exposure=exposure))
    nodes = {s.labels["node"]: s.value for s in found if s.metric is telemetry.AT_RISK}
    return nodes, {s.labels["stat"]: s.value for s in found if s.metric is telemetry.NODES_AT_RISK}


def durable(run: Harness, step: int) -> AttemptId:
    run.drain_all(run.save(step))
    return run.attempt(step)


def scrubbed(run: Harness, attempt: AttemptId, index: int, place: str, *damage: str) -> tuple[m.Effect, ...]:
    return run.feed(
        m.ScrubEnded(attempt=attempt, node_index=index, place=place, damage=damage, error=None), run.ticked
    )


def test_a_node_that_nothing_needs_is_no_failure_when_its_agent_is_ended() -> None:
    run = Harness("abcd", replicas=1)
    run.open("ab")
    run.save(10)
    counted(run, telemetry.FAILURES)
    run.lose("c", "d")
    assert not counted(run, telemetry.FAILURES)
    run.lose("b")
    assert counted(run, telemetry.FAILURES) == {"node": 1}


def test_no_node_of_a_finished_run_is_a_failure() -> None:
    run = Harness("ab")
    run.open("ab")
    durable(run, 10)
    run.drain_all(run.feed(m.FinishRequested(token="finish", ends_group=True)))
    counted(run, telemetry.FAILURES)
    run.lose("a", "b")
    assert not counted(run, telemetry.FAILURES)


def test_the_last_drill_that_passed_is_reported_after_its_checkpoint_is_gone() -> None:
    run = Harness("ab", keep_last=1, remote_every=1)
    run.open("ab")
    attempt = durable(run, 10)
    assert not gauge(run, telemetry.DRILLED_AT)
    for passed in (True, False):
        drilled = Drilled(
            attempt=attempt.attempt,
            scenario="remote only",
            passed=passed,
            seconds=1.0,
            read_bytes={},
            text="",
        )
        run.feed(m.DrillEnded(token=f"drill {passed}", result=drilled))
        run.now_s += 60
    (drilled_at_s,) = gauge(run, telemetry.DRILLED_AT)
    durable(run, 20)
    durable(run, 30)
    assert run.checkpoint(attempt).state != "live"
    assert gauge(run, telemetry.DRILLED_AT) == [drilled_at_s]


def test_a_drill_that_passed_is_known_from_a_snapshot() -> None:
    run = Harness("ab")
    run.open("ab")
    run.save(10)
    drilled = Drilled(
        attempt=run.attempt(10).attempt, scenario="node a", passed=True, seconds=1.0, read_bytes={}, text=""
    )
    run.feed(m.DrillEnded(token="drill", result=drilled))
    history = run.machine.history
    assert history.drilled_at_s is not None
    assert RunHistory.from_snapshot(history.to_snapshot(0.0)).drilled_at_s == history.drilled_at_s


def test_damage_on_the_storage_path_is_reported_until_it_is_repaired() -> None:
    run = Harness("ab", remote_every=1)
    run.open("ab")
    attempt = durable(run, 10)
    assert gauge(run, telemetry.DAMAGED) == [0]
    effects = scrubbed(run, attempt, 0, m.REMOTE, "shard") + scrubbed(run, attempt, 1, m.REMOTE, "shard")
    effects += scrubbed(run, attempt, 1, m.REMOTE, "shard")
    assert counted(run, telemetry.CORRUPT) == {"remote": 2}, "what is found once more is not more"
    assert gauge(run, telemetry.DAMAGED) == [1]
    run.drain_all(effects)
    assert counted(run, telemetry.REPAIRED) == {"remote": 2}
    assert gauge(run, telemetry.DAMAGED) == [0]


@pytest.mark.parametrize("place", ["a", m.REMOTE])
def test_what_a_scrub_misses_of_a_checkpoint_that_was_retired_meanwhile_is_no_damage(place: str) -> None:
    run = Harness("ab", remote_every=1, keep_last=1)
    run.open("ab")
    attempt = durable(run, 10)
    durable(run, 20)
    assert run.checkpoint(attempt).state != "live"
    assert not of(scrubbed(run, attempt, 0, place, "shard"), m.Warn)
    assert not counted(run, telemetry.CORRUPT) and gauge(run, telemetry.DAMAGED) == [0]


def test_damage_to_a_file_that_a_retired_checkpoint_shares_counts_for_the_others() -> None:
    run = Harness("ab", remote_every=1, keep_last=1)
    run.open("ab")
    retired, other = durable(run, 10), durable(run, 20)
    ended = m.ScrubEnded(
        attempt=retired,
        node_index=0,
        place="a",
        damage=("shard",),
        shared=((other, 0), (retired, 0)),
        error=None,
    )
    assert one(run.feed(ended), m.Warn).text == "Step 20: the copy on node a is damaged: shard."
    assert counted(run, telemetry.CORRUPT) == {"node": 1}


def test_damage_goes_with_its_checkpoint() -> None:
    run = Harness("ab", remote_every=1, keep_last=1, replicas=0)
    run.open("ab")
    attempt = durable(run, 10)
    run.lose("b")
    scrubbed(run, attempt, 1, m.REMOTE, "shard")
    assert gauge(run, telemetry.DAMAGED) == [1]
    run.open("a", resume="never")
    durable(run, 20)
    assert run.checkpoint(attempt).state != "live" and gauge(run, telemetry.DAMAGED) == [0]


def test_each_node_of_a_small_group_has_its_steps_at_risk() -> None:
    nodes, spread = at_risk(*range(10))
    assert nodes == {f"n{k:05d}": k for k in range(10)} and spread == {"max": 9, "p99": 9}
    assert at_risk() == ({}, {})


def test_of_many_nodes_only_the_worst_have_a_series_each() -> None:
    nodes, spread = at_risk(*range(10_000))
    assert nodes == {f"n{k:05d}": k for k in range(9_990, 10_000)}
    assert spread == {"max": 9_999, "p99": 9_899}
    nodes, _ = at_risk(7_000, *range(9_000))
    assert len(nodes) == telemetry.WORST_NODES and "n00000" not in nodes


def test_a_node_whose_death_would_cost_all_steps_is_worse_than_any_other() -> None:
    nodes, spread = at_risk(*[10**9] * 20, None)
    assert nodes["n00020"] == -1 and min(nodes.values()) == -1 and max(nodes.values()) == 10**9
    assert spread == {"max": -1, "p99": -1}
    assert at_risk(*[5] * 1_000, None)[1] == {"max": -1, "p99": 5}
