"""The token bucket: what goes through in a time is bounded, and nothing waits for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ray_ckpt.core.rate_budget import SLACK_S, Budget, longest_s


def test_a_burst_goes_at_once_and_the_rest_at_the_rate() -> None:
    budget = Budget(bytes_per_s=10, burst_bytes=30)
    assert [budget.take(10, 0.0) for _ in range(4)] == [True, True, True, False]
    assert not budget.take(10, 0.9)
    assert budget.take(10, 1.0)
    assert [budget.take(10, 1e6) for _ in range(4)] == [True, True, True, False], "idle time is not saved up"


def test_what_is_larger_than_the_burst_waits_for_a_full_bucket_and_is_paid_for() -> None:
    budget = Budget(bytes_per_s=10, burst_bytes=30)
    assert budget.take(100, 0.0)
    assert not budget.take(1, 7.0), "70 bytes of debt"
    assert budget.take(1, 7.2)
    assert not budget.take(100, 9.9)
    assert budget.take(100, 10.2)


def test_a_rate_of_zero_allows_nothing_and_a_clock_that_goes_back_gives_nothing() -> None:
    assert not Budget(bytes_per_s=0, burst_bytes=30).take(0, 1e9)
    budget = Budget(bytes_per_s=10, burst_bytes=10)
    assert budget.take(10, 100.0)
    assert not budget.take(10, 50.0)
    assert not budget.take(10, 50.5)
    assert budget.take(10, 51.0)


@given(
    st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(0, 200)), max_size=60),
    st.integers(1, 100),
    st.integers(1, 100),
)
def test_in_any_time_no_more_than_rate_burst_and_one_item(
    items: list[tuple[float, int]], rate: int, burst: int
) -> None:
    budget, now_s, taken = Budget(bytes_per_s=rate, burst_bytes=burst), 0.0, 0
    for pause_s, nbytes in items:
        now_s += pause_s
        if budget.take(nbytes, now_s):
            taken += nbytes
    assert taken <= burst + rate * now_s + max((n for _, n in items), default=0) + 1e-6


@given(st.lists(st.integers(0, 200), min_size=1, max_size=30), st.integers(1, 100), st.integers(1, 100))
def test_everything_goes_in_the_time_that_its_bytes_need(sizes: list[int], rate: int, burst: int) -> None:
    budget, now_s = Budget(bytes_per_s=rate, burst_bytes=burst), 0.0
    for nbytes in sizes:
        while not budget.take(nbytes, now_s):
            now_s += 0.5
    assert now_s <= (sum(sizes) + burst) / rate + 0.5 * len(sizes)


def test_work_may_take_as_long_as_its_bytes_at_the_rate_of_its_limit() -> None:
    assert longest_s(0) == longest_s(0, 1 << 20) == SLACK_S
    assert longest_s(100 << 20) == longest_s(100 << 20, 1 << 30) == SLACK_S + 10
    assert longest_s(100 << 20, 1 << 20) == SLACK_S + 100
