"""Threads of a run that are there only while they have work."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from ray_ckpt.actors.threads import BriefThreads

WAIT_S = 10.0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def alive() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("brief"))


def test_threads_end_with_their_work() -> None:
    async def story() -> None:
        threads = BriefThreads(2, "brief")
        assert await asyncio.gather(*(threads.run(int, text) for text in "123")) == [1, 2, 3]
        assert await threads.run(int, "4") == 4

    asyncio.run(story())
    wait_for(lambda: not alive())


def test_work_that_hangs_keeps_its_thread_and_takes_no_other() -> None:
    """Also when nobody waits for it any more."""
    end = threading.Event()
    running: list[str] = []

    def hang() -> None:
        running.append(threading.current_thread().name)
        end.wait(WAIT_S)

    async def story() -> None:
        threads = BriefThreads(2, "brief")
        for _ in range(5):
            try:
                await asyncio.wait_for(threads.run(hang), 0.05)
            except TimeoutError:
                assert len(alive()) <= 2
        assert len(running) == 2, "work that was given up before it began is not done"
        end.set()
        assert await threads.run(int, "1") == 1

    asyncio.run(story())
    wait_for(lambda: not alive())


def test_an_error_is_the_callers_and_the_thread_ends() -> None:
    async def story() -> str:
        try:
            await BriefThreads(1, "brief").run(int, "x")
        except ValueError as error:
            return str(error)
        return ""

    assert "x" in asyncio.run(story())
    wait_for(lambda: not alive())
