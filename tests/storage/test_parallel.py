"""Calls in several threads, with results in order."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ray_ckpt.storage.parallel import map_in_order


def double(item: int) -> int:
    return 2 * item


@pytest.mark.parametrize("max_results", [0, 1, 3])
def test_results_are_in_order(max_results: int) -> None:
    found = map_in_order(double, range(50), threads=3, name="t", max_results=max_results)
    assert list(found) == [2 * item for item in range(50)]


def test_no_more_results_are_held_than_allowed() -> None:
    begun: list[int] = []
    found = map_in_order(begun.append, range(50), threads=3, name="t", max_results=5)
    next(found)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(found.close).result(timeout=10)
    assert len(begun) <= 6


def test_an_early_end_stops_calls_and_leaves_no_thread() -> None:
    stopped, calls = threading.Event(), threading.Semaphore(0)

    def wait_for_the_end(item: int) -> int:
        calls.release()
        if item:
            assert stopped.wait(10)
        return item

    found = map_in_order(wait_for_the_end, range(9), threads=2, name="early", stopped=stopped)
    assert next(found) == 0
    calls.acquire()
    assert not stopped.is_set()
    found.close()
    assert stopped.is_set()
    assert not [t for t in threading.enumerate() if t.name.startswith("ray_ckpt-early")]


def test_the_first_error_in_order_is_raised() -> None:
    stopped = threading.Event()

    def fail_after_two(item: int) -> int:
        if item > 1:
            raise ValueError(item)
        return item

    found = map_in_order(fail_after_two, range(9), threads=3, name="t", stopped=stopped)
    assert [next(found), next(found)] == [0, 1]
    with pytest.raises(ValueError, match="2"):
        next(found)
    assert stopped.is_set()


def test_a_complete_run_stops_nobody() -> None:
    stopped = threading.Event()
    assert list(map_in_order(double, [1], threads=3, name="t", stopped=stopped)) == [2]
    assert not stopped.is_set()
