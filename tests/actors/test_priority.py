"""Bulk threads of the agent yield to the training; others do not."""

from __future__ import annotations

import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

from ray_ckpt.actors.priority import IO_PRIORITY, NICENESS, yield_to_training


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
