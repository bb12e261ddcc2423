"""Parallel calls that wait for disks and stores, with results in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

AHEAD = 4  # calls per thread that may start before an earlier one has ended: a slow call then blocks no other

T = TypeVar("T")
R = TypeVar("R")


def map_in_order(
    function: Callable[[T], R],
    items: Iterable[T],
    *,
    threads: int,
    name: str,
    max_results: int = 0,
    stopped: threading.Event | None = None,
) -> Generator[R, None, None]:
    """Yield `function(item)` for each item in order, computed by `threads` threads.

    At most `max_results` results are in memory, by default AHEAD for each thread. After an exception, or when
    the caller closes the generator, calls that have not started are cancelled and `stopped` is set, which
    running calls may check; the generator waits for the running calls.
    """
    calls: deque[Future[R]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix=f"ray_ckpt-{name}")
    try:
        for item in items:
            if len(calls) == (max_results or AHEAD * threads):
                yield calls.popleft().result()
            calls.append(pool.submit(function, item))
        while calls:
            yield calls.popleft().result()
    except BaseException:
        if stopped is not None:
            stopped.set()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
