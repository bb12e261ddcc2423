"""The interval between saves: least waste, within its bounds, and the same from the same events."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from ray_ckpt.core.interval_model import (
    DAY_S,
    FIRST_INTERVAL_S,
    LEAST_SAVES,
    MAX_INTERVAL_S,
    MEASURED_SAVES,
    PRIOR_NODE_MTBF_S,
    FailureRate,
    IntervalModel,
    best_interval_s,
    loss_rate_per_s,
    remote_interval_s,
    waste,
)

HOUR_S = 3_600.0
NO_BUDGET = 1.0


def least_waste(stall_s: float, rate_per_s: float) -> tuple[float, float]:
    """Search a fine grid for the interval with the least waste; return the interval and the waste."""
    grid = [stall_s + 10 ** (k / 400) * 1e-3 / rate_per_s * 1e-3 for k in range(3_000)]
    found = min((waste(x, save_stall_s=stall_s, failure_rate_per_s=rate_per_s), x) for x in grid)
    return found[1], found[0]


def simulated_waste(
    interval_s: float, stall_s: float, latency_s: float, restart_s: float, mtbf_s: float
) -> float:
    """Simulate the module's model with random failures; return the share of time that is wasted."""
    chance = random.Random(1)
    total_s = kept_s = 0.0
    for _ in range(200_000):
        stretch_s = chance.expovariate(1 / mtbf_s)
        total_s += stretch_s
        late_s = max(0.0, latency_s - stall_s)
        kept_s += max(0, (stretch_s - late_s) // interval_s) * (interval_s - stall_s)
        while (failed_s := chance.expovariate(1 / mtbf_s)) < restart_s:
            total_s += failed_s
        total_s += restart_s
    return 1 - kept_s / total_s


# -- the formula -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [1e-6, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 1.0, 1.9])
def test_the_best_interval_has_the_least_waste(ratio: float) -> None:
    """`ratio` of the stall to the mean time between failures; at 0.1 Young's rule alone is 7 % off."""
    mtbf_s = 1_000.0
    rate = 1 / mtbf_s
    best_s = best_interval_s(
        save_stall_s=ratio * mtbf_s, failure_rate_per_s=rate, least_s=0.0, budget=NO_BUDGET
    )
    if best_s >= MAX_INTERVAL_S:  # the same, in shorter seconds
        mtbf_s, rate = 100.0, 1 / 100
        best_s = best_interval_s(
            save_stall_s=ratio * mtbf_s, failure_rate_per_s=rate, least_s=0.0, budget=NO_BUDGET
        )
    grid_s, least = least_waste(ratio * mtbf_s, rate)
    assert best_s == pytest.approx(grid_s, rel=0.03)
    assert waste(best_s, save_stall_s=ratio * mtbf_s, failure_rate_per_s=rate) <= least + 1e-3


def test_it_is_youngs_where_a_stall_is_short() -> None:
    best_s = best_interval_s(save_stall_s=0.2, failure_rate_per_s=1 / (3 * HOUR_S), least_s=0.0)
    assert best_s == pytest.approx(math.sqrt(2 * 0.2 * 3 * HOUR_S), rel=0.01)


@pytest.mark.parametrize(
    ("stall_s", "mtbf_h", "interval_s", "wasted"),
    [
        (120, 3, 1610, 0.149),
        (30, 7.9, 1306, 0.046),
        (2, 7.9, 337, 0.012),
        (0.5, 3, 104, 0.0096),
        (0.2, 3, 66, 0.0061),
    ],
)
def test_the_field_s_table(stall_s: float, mtbf_h: float, interval_s: float, wasted: float) -> None:
    """Young's intervals and their waste to first order, for stalls of a file system down to memory's."""
    rate = 1 / (mtbf_h * HOUR_S)
    best_s = best_interval_s(save_stall_s=stall_s, failure_rate_per_s=rate, least_s=0.0, budget=NO_BUDGET)
    assert best_s == pytest.approx(interval_s, rel=0.03)
    found = waste(best_s, save_stall_s=stall_s, failure_rate_per_s=rate)
    assert found == pytest.approx(wasted, rel=0.05)


@pytest.mark.parametrize(
    ("interval_s", "stall_s", "latency_s", "restart_s"),
    [(100.0, 1.0, 0.0, 0.0), (100.0, 1.0, 80.0, 60.0), (900.0, 120.0, 200.0, 300.0)],
)
def test_the_waste_is_what_chance_gives(
    interval_s: float, stall_s: float, latency_s: float, restart_s: float
) -> None:
    mtbf_s = 1_200.0
    expected = waste(
        interval_s,
        save_stall_s=stall_s,
        failure_rate_per_s=1 / mtbf_s,
        latency_s=latency_s,
        restart_s=restart_s,
    )
    assert simulated_waste(interval_s, stall_s, latency_s, restart_s, mtbf_s) == pytest.approx(
        expected, abs=0.004
    )


def test_the_waste_to_first_order_is_stalls_and_half_an_interval_and_the_latency() -> None:
    found = waste(100.0, save_stall_s=0.5, failure_rate_per_s=1e-6, latency_s=20.0, restart_s=30.0)
    assert found == pytest.approx(0.5 / 100 + 1e-6 * (50 + 20 + 30), rel=0.01)


def test_the_waste_of_extremes_is_a_number() -> None:
    assert waste(10.0, save_stall_s=1.0, failure_rate_per_s=0.0) == pytest.approx(0.1)
    assert waste(10.0, save_stall_s=20.0, failure_rate_per_s=1e-3) == 1.0
    assert waste(1e6, save_stall_s=1.0, failure_rate_per_s=1.0) == pytest.approx(1.0)


# -- its bounds --------------------------------------------------------------------------------------


def test_no_interval_is_shorter_than_a_save_takes() -> None:
    assert best_interval_s(save_stall_s=0.01, failure_rate_per_s=1e-3, least_s=47.0) == 47.0


def test_stalls_stay_within_the_budget() -> None:
    assert best_interval_s(save_stall_s=3.0, failure_rate_per_s=1e-3, least_s=0.0) == pytest.approx(300.0)
    assert best_interval_s(
        save_stall_s=3.0, failure_rate_per_s=1e-3, least_s=0.0, budget=0.02
    ) == pytest.approx(150.0)


def test_a_run_that_never_fails_saves_at_the_longest_interval() -> None:
    assert best_interval_s(save_stall_s=0.1, failure_rate_per_s=0.0, least_s=1.0) == MAX_INTERVAL_S
    assert best_interval_s(save_stall_s=0.1, failure_rate_per_s=1e-12, least_s=1.0) == MAX_INTERVAL_S


def test_the_budget_and_the_latency_come_before_the_longest_interval() -> None:
    assert best_interval_s(save_stall_s=60.0, failure_rate_per_s=1e-4, least_s=0.0) == pytest.approx(6_000.0)
    assert best_interval_s(save_stall_s=0.1, failure_rate_per_s=0.0, least_s=4_000.0) == 4_000.0


# -- failures ----------------------------------------------------------------------------------------


def test_without_failures_the_rate_is_the_published_one_and_falls_with_time() -> None:
    assert FailureRate().per_s(8) == pytest.approx(8 / PRIOR_NODE_MTBF_S)
    assert FailureRate(exposed_s=PRIOR_NODE_MTBF_S).per_s(1) < FailureRate().per_s(1)


def test_the_prior_fits_the_published_clusters_within_an_order_of_magnitude() -> None:
    for mtbf_h, num_nodes in ((3.1, 2_048), (7.9, 128)):
        assert 0.1 < FailureRate().per_s(num_nodes) * mtbf_h * HOUR_S < 10


def test_what_is_measured_outweighs_the_prior() -> None:
    mtbf_s = 3 * HOUR_S
    seen = FailureRate(count=80, exposed_s=80 * mtbf_s * 2_048)
    assert 1 / seen.per_s(2_048) == pytest.approx(mtbf_s, rel=0.02)
    flaky = FailureRate(count=5, exposed_s=5 * 8 * DAY_S)  # eight nodes that fail each day
    assert 1 / flaky.per_s(8) < 3 * DAY_S < 1 / FailureRate().per_s(8)


# -- the remote tier ---------------------------------------------------------------------------------


def test_the_rarer_only_the_storage_path_helps_the_rarer_is_a_drain() -> None:
    rates = [loss_rate_per_s(node_rate_per_s=1e-6, num_nodes=64, replicas=replicas) for replicas in (0, 1, 2)]
    assert rates[0] == pytest.approx(64e-6)  # every loss of a node
    assert rates[0] > 50 * rates[1] > 50 * rates[2] > 0
    intervals = [remote_interval_s(drain_s=60.0, failure_rate_per_s=rate) for rate in rates]
    assert intervals == sorted(intervals)


def test_one_drain_at_a_time_and_the_link_is_not_always_busy() -> None:
    assert remote_interval_s(drain_s=60.0, failure_rate_per_s=1.0) == pytest.approx(300.0)
    assert remote_interval_s(drain_s=60.0, failure_rate_per_s=1.0, slowdown=0.0) == 60.0


def test_a_drain_s_interval_balances_its_slowdown_with_what_is_lost() -> None:
    found = remote_interval_s(drain_s=60.0, failure_rate_per_s=1e-5, slowdown=0.1)
    assert found == pytest.approx(best_interval_s(save_stall_s=6.0, failure_rate_per_s=1e-5, least_s=60.0))


# -- as a run goes -----------------------------------------------------------------------------------


def measured(
    pace: IntervalModel, *, stall_s: float = 0.5, latency_s: float = 10.0, times: int = LEAST_SAVES
) -> IntervalModel:
    for _ in range(times):
        pace.saved(stall_s, latency_s)
    return pace


def test_the_first_saves_come_soon_and_no_sooner_than_one_takes() -> None:
    pace = IntervalModel(num_nodes=8)
    assert pace.interval_s == pace.remote_interval_s == FIRST_INTERVAL_S
    pace.saved(0.5, 90.0)
    assert pace.interval_s == 90.0
    assert measured(pace).interval_s > 90.0


def test_failures_bring_saves_closer_and_quiet_time_spreads_them() -> None:
    pace = measured(IntervalModel(num_nodes=8))
    calm_s = pace.interval_s
    for _ in range(5):
        pace.trained(6 * HOUR_S)
        pace.failed()
    stormy_s = pace.interval_s
    pace.trained(30 * DAY_S)
    assert stormy_s < pace.interval_s < calm_s
    assert pace.failures == FailureRate(count=5, exposed_s=8 * (30 * HOUR_S + 30 * DAY_S))


def test_a_larger_group_fails_more_often() -> None:
    small, large = (measured(IntervalModel(num_nodes=n)) for n in (8, 800))
    assert large.interval_s == pytest.approx(small.interval_s / 10, rel=0.01)


@pytest.mark.parametrize(
    "outlier", [lambda pace: pace.saved(300.0, 900.0), lambda pace: pace.saved(0.0, 0.0)]
)
def test_a_few_outliers_change_nothing(outlier: Callable[[IntervalModel], None]) -> None:
    pace = measured(IntervalModel(num_nodes=64), times=MEASURED_SAVES)
    before_s = pace.interval_s
    for _ in range(MEASURED_SAVES // 3):
        outlier(pace)
    assert pace.interval_s == before_s


def test_what_has_changed_is_forgotten() -> None:
    pace = measured(IntervalModel(num_nodes=512), times=1_000)
    measured(pace, stall_s=2.0, latency_s=30.0, times=MEASURED_SAVES)
    assert pace.interval_s == measured(IntervalModel(num_nodes=512), stall_s=2.0, latency_s=30.0).interval_s


def test_drains_of_a_run_with_replicas_are_rarer() -> None:
    paces = [IntervalModel(num_nodes=1_024, replicas=replicas) for replicas in (0, 1)]
    for pace in paces:
        pace.drained(30.0)
    assert 30.0 < paces[0].remote_interval_s < paces[1].remote_interval_s


def test_the_same_events_give_the_same_intervals() -> None:
    def replay(seed: int) -> list[float]:
        chance, pace, found = random.Random(seed), IntervalModel(num_nodes=64), []
        for _ in range(500):
            match chance.randrange(8):
                case 0:
                    pace.failed()
                case 1:
                    pace.drained(chance.uniform(10, 60))
                case 2:
                    pace.trained(chance.uniform(0, DAY_S))
                case _:
                    pace.saved(chance.uniform(0.1, 1.0), chance.uniform(1.0, 20.0))
            found += [pace.interval_s, pace.remote_interval_s]
        return found

    assert replay(7) == replay(7) != replay(8)
