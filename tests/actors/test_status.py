"""Status of a run whose storage path hangs: the rest of the service goes on."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from ray_ckpt.actors.coordinator import status
from ray_ckpt.actors.coordinator.engine import CONTROL_THREADS
from ray_ckpt.actors.coordinator.status import StatusReader
from ray_ckpt.actors.threads import in_thread
from tests.actors.test_shutdown import make_engine, training


def test_a_hanging_log_takes_no_thread_from_the_calls_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without these threads the coordinator sees no node any more, for any run."""
    reached, may_go = threading.Semaphore(0), threading.Event()

    def hang(store: Any) -> Any:
        reached.release()
        may_go.wait(30)
        raise OSError("the storage path is away")

    monkeypatch.setattr(status, "read_run", hang)

    async def story() -> None:
        engine = make_engine()
        run, reader = training(engine), StatusReader(engine)
        calls = [asyncio.ensure_future(reader.status(run)) for _ in range(CONTROL_THREADS)]
        for _ in calls:
            assert await asyncio.to_thread(reached.acquire, timeout=10)
        try:
            await asyncio.wait_for(in_thread(engine.control_io, int), 2.0)
        finally:
            may_go.set()
        errors = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(error) for error in errors] == [OSError] * CONTROL_THREADS

    asyncio.run(story())
