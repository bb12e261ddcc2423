"""An agent whose storage path hangs: other runs go on, and no work piles up."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_ckpt.actors.agent import actor
from ray_ckpt.actors.agent.actor import NodeAgent
from ray_ckpt.actors.agent.node import Node
from ray_ckpt.actors.agent.run import DRAIN_THREADS
from ray_ckpt.actors.agent.runs import NodeRuns
from ray_ckpt.actors.messages import OpenRun, RunSpec
from ray_ckpt.config import RunOptions
from ray_ckpt.core.values import Inventory
from ray_ckpt.errors import Unavailable
from ray_ckpt.format.names import make_attempt
from ray_ckpt.preemption.cloud import METADATA_ENV
from ray_ckpt.storage.remote.tier import RemoteTier
from ray_ckpt.transport.credentials import ServiceKeys

UID = "a" * 32
ATTEMPT, OTHER = (make_attempt(run_uid=UID, session=1, step=step, attempt=0) for step in (1, 2))


def make_agent() -> NodeAgent:
    """Return an agent without a server, whose constructor would need Ray."""
    agent = object.__new__(NodeAgent)
    agent._node = Node("node", ServiceKeys.make(datetime.now(UTC)))
    agent._runs = NodeRuns(agent._node)
    return agent


def spec_of(tmp_path: Path, name: str = "run") -> RunSpec:
    options = RunOptions(staging=str(tmp_path / "staging"))
    return RunSpec(name=name, storage_path=str(tmp_path), options=options)


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
        agent = make_agent()
        monkeypatch.setattr(agent._node, "count_bytes", lambda *_: None)
        run = await agent._runs.take_up(spec_of(tmp_path), UID)

        def order(attempt: Any) -> asyncio.Future[None]:
            return asyncio.ensure_future(agent.drain(UID, attempt, 0, "", 0))

        orders = []
        for _ in range(DRAIN_THREADS):
            orders.append(order(ATTEMPT))
            assert await asyncio.to_thread(begun.acquire, timeout=10)
        orders += [order(ATTEMPT) for _ in range(5)] + [order(OTHER)]
        while run.drain_threads._pending < len(orders):  # until all wait for a thread
            await asyncio.sleep(0)
        may_go.set()
        return await asyncio.gather(*orders, return_exceptions=True)

    *superseded, last, other = asyncio.run(story())
    assert last is None and other is None
    assert [type(found) for found in superseded[DRAIN_THREADS:]] == [Unavailable] * 4
    assert uploads == [1] * DRAIN_THREADS + [1, 2]


def test_an_urgent_upload_does_not_wait_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go = threading.Semaphore(0), threading.Event()

    def upload(run: Any, attempt: Any, *_: Any) -> tuple[int, int]:
        if attempt is ATTEMPT:
            begun.release()
            may_go.wait(10)
        return 1, 0

    monkeypatch.setattr(actor, "upload", upload)

    async def story() -> None:
        agent = make_agent()
        monkeypatch.setattr(agent._node, "count_bytes", lambda *_: None)
        await agent._runs.take_up(spec_of(tmp_path), UID)
        others = [
            asyncio.ensure_future(agent.drain(UID, ATTEMPT, index, "", 0)) for index in range(DRAIN_THREADS)
        ]
        for _ in others:
            assert await asyncio.to_thread(begun.acquire, timeout=10)
        try:
            await asyncio.wait_for(agent.drain(UID, OTHER, 0, "", 0, True), 5)
        finally:
            may_go.set()
        await asyncio.gather(*others)

    asyncio.run(story())


def test_of_uploads_of_items_that_wait_only_the_last_order_is_carried_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go = threading.Event(), threading.Event()
    uploads: list[tuple[int, str]] = []

    def upload_items(run: Any, attempt: Any, node_index: int, items: str, copies: Any) -> Any:
        uploads.append((attempt.step, items))
        begun.set()
        may_go.wait(10)
        return SimpleNamespace(size_bytes=1)

    monkeypatch.setattr(actor, "upload_items", upload_items)

    async def story() -> list[Any]:
        agent = make_agent()
        monkeypatch.setattr(agent._node, "count_bytes", lambda *_: None)
        run = await agent._runs.take_up(spec_of(tmp_path), UID)

        def order(attempt: Any, items: str) -> asyncio.Future[Any]:
            return asyncio.ensure_future(agent.upload_items(UID, attempt, 0, items, 0))

        orders = [order(ATTEMPT, "model")]
        assert await asyncio.to_thread(begun.wait, 10)
        orders += [order(ATTEMPT, "model") for _ in range(5)] + [order(ATTEMPT, "ema"), order(OTHER, "model")]
        while run.item_threads._pending < len(orders):  # until all wait for the thread
            await asyncio.sleep(0)
        may_go.set()
        return await asyncio.gather(*orders, return_exceptions=True)

    answers = asyncio.run(story())
    assert [type(found) for found in answers[1:5]] == [Unavailable] * 4
    assert uploads == [(1, "model"), (1, "model"), (1, "ema"), (2, "model")]


def test_a_run_opens_while_the_storage_path_of_another_run_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(METADATA_ENV, "off")
    reached, may_go = threading.Semaphore(0), threading.Event()

    def check_shared(tier: RemoteTier, nonce: str, *, node: str) -> None:
        if nonce == "hangs":
            reached.release()
            may_go.wait(10)

    monkeypatch.setattr(RemoteTier, "check_shared", check_shared)

    async def story() -> None:
        agent = make_agent()

        def open_run(name: str, uid: str) -> asyncio.Future[Inventory]:
            order = OpenRun(spec=spec_of(tmp_path, name), run_uid=uid, nonce=name, epoch=1)
            return asyncio.ensure_future(agent.open_run(order))

        hanging = [open_run("hangs", UID) for _ in range(8)]
        assert await asyncio.to_thread(reached.acquire, timeout=10)
        try:
            await asyncio.wait_for(open_run("lives", "b" * 32), 5)
        finally:
            may_go.set()
        await asyncio.gather(*hanging)

    asyncio.run(story())
