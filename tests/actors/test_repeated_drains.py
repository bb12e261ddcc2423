"""Uploads that are ordered again, because the storage path hangs and the coordinator gets no answer."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ray_ckpt.actors.agent import actor
from ray_ckpt.actors.agent.actor import NodeAgent
from ray_ckpt.actors.agent.node import Node
from ray_ckpt.actors.agent.run import DRAIN_THREADS
from ray_ckpt.actors.agent.runs import NodeRuns
from ray_ckpt.actors.messages import RunSpec
from ray_ckpt.config import RunOptions
from ray_ckpt.errors import Unavailable
from ray_ckpt.format.names import make_attempt
from ray_ckpt.transport.credentials import ServiceKeys

UID = "a" * 32
ATTEMPT, OTHER = (make_attempt(run_uid=UID, session=1, step=step, attempt=0) for step in (1, 2))


def test_of_uploads_that_wait_for_a_thread_only_the_last_order_is_carried_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them would read and send all bytes again when the storage path is back."""
    begun, may_go = threading.Semaphore(0), threading.Event()
    uploads: list[int] = []

    def upload(run: Any, attempt: Any, *_: Any) -> tuple[int, int]:
        uploads.append(attempt.step)
        begun.release()
        may_go.wait(10)
        return 1, 0

    monkeypatch.setattr(actor, "upload", upload)

    async def story() -> list[Any]:
        agent = object.__new__(NodeAgent)  # its constructor needs Ray
        agent._node = Node("node", ServiceKeys.make(datetime.now(UTC)))
        monkeypatch.setattr(agent._node, "count_bytes", lambda *_: None)
        agent._runs = NodeRuns(agent._node)
        options = RunOptions(staging=str(tmp_path / "staging"))
        await agent._runs.take_up(RunSpec(name="run", storage_path=str(tmp_path), options=options), UID)

        def order(attempt: Any) -> asyncio.Future[None]:
            return asyncio.ensure_future(agent.drain(UID, attempt, 0, "", 0))

        orders = [order(ATTEMPT) for _ in range(DRAIN_THREADS)]
        for _ in orders:
            assert await asyncio.to_thread(begun.acquire, timeout=10)
        orders += [order(ATTEMPT) for _ in range(5)] + [order(OTHER)]
        await asyncio.sleep(0.01)
        may_go.set()
        return await asyncio.gather(*orders, return_exceptions=True)

    *superseded, last, other = asyncio.run(story())
    assert last is None and other is None
    assert [type(found) for found in superseded[DRAIN_THREADS:]] == [Unavailable] * 4
    assert uploads == [1] * DRAIN_THREADS + [1, 2]
