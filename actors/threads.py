"""Threads that exist only while they have work, so that an idle run has no threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(pool: Executor, work: Callable[..., T], *args: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(pool, work, *args)


class BriefThreads:
    """Pool of at most `count` threads. Hanging work keeps its thread, and other work may have to wait.

    `initializer` runs first in each thread. Methods may be called from several threads.
    """

    def __init__(self, count: int, name: str, initializer: Callable[[], None] | None = None) -> None:
        self._count = count
        self._name = name
        self._initializer = initializer
        self._lock = threading.Lock()  # guards the fields below
        self._pool: ThreadPoolExecutor | None = None
        self._pending = 0  # number of calls that have not ended, awaited or not

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Return `work(*args)`, run in one of the threads."""
        return await asyncio.wrap_future(self._submit(work, *args))

    def _submit(self, work: Callable[..., T], *args: Any) -> Future[T]:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._count, self._name, self._initializer)
            future = self._pool.submit(work, *args)
            self._pending += 1
        future.add_done_callback(self._ended)
        return future

    def _ended(self, _: Future[Any]) -> None:
        with self._lock:
            self._pending -= 1
            if not self._pending and self._pool is not None:
                self._pool.shutdown(wait=False)
                self._pool = None
