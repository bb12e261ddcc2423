"""Bulk threads of the agent yield to the training, and drains to copies between nodes; others do not."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ray_ckpt.actors.agent.priority import (
    IO_PRIORITY,
    NICENESS,
    ActiveCopies,
    DrainRateLimiter,
    yield_to_training,
)
from ray_ckpt.transport.sending import Limiter


def priorities() -> tuple[int, str]:
    thread = threading.get_native_id()
    io = subprocess.run(["ionice", "-p", str(thread)], capture_output=True, text=True, check=True)
    return os.getpriority(os.PRIO_PROCESS, thread), io.stdout.strip()


def test_a_bulk_thread_yields_and_those_that_it_starts_do_too() -> None:
    before = priorities()
    with ThreadPoolExecutor(1, initializer=yield_to_training) as pool:
        nice, io = pool.submit(priorities).result()
        assert nice == NICENESS and io == f"best-effort: prio {IO_PRIORITY}"

        def inner() -> tuple[int, str]:
            with ThreadPoolExecutor(1) as more:
                return more.submit(priorities).result()

        assert pool.submit(inner).result() == (nice, io)
    assert priorities() == before


def test_a_drain_waits_for_copies_and_not_for_ever() -> None:
    copies = ActiveCopies()
    pace = DrainRateLimiter(Limiter(), copies, yields_s=0.05)
    gone: list[int] = []

    def drain() -> None:
        for block in range(3):
            pace.wait(1)
            gone.append(block)

    with copies.one(), copies.one():
        begun_s = time.monotonic()
        drain()
        assert time.monotonic() - begun_s >= 3 * 0.05, "each block gives way to copies"
        gone.clear()
        patient = DrainRateLimiter(Limiter(), copies, yields_s=60.0)
        waiting = threading.Thread(target=patient.wait, args=(1,))
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
    waiting.join(10)
    assert not waiting.is_alive(), "the end of the last copy lets it go"
    drain()
    assert gone == [0, 1, 2]


def test_a_drain_keeps_to_its_bandwidth() -> None:
    slept: list[float] = []
    limiter = Limiter(100.0, clock=lambda: 0.0, sleep=slept.append)
    pace = DrainRateLimiter(limiter, ActiveCopies())
    for _ in range(3):
        pace.wait(100)
    assert slept == pytest.approx([1.0, 2.0])
