"""Waiting for the outcome of a save whose files take minutes to write; without Ray."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ray_ckpt.actors.agent import rank_endpoints
from ray_ckpt.actors.agent.rank_endpoints import RankEndpoints
from ray_ckpt.actors.callers import Callers
from ray_ckpt.config import RunOptions
from ray_ckpt.core.node_messages import SaveOutcome
from ray_ckpt.engine.node_ports import CallerLeft
from ray_ckpt.types import Level
from tests.core.test_node_machine import UID, attempt, published, sealed
from tests.engine.node_driver import NodeStory


class SlowNode:
    """The agent of a node that has begun a session; each wait of a call ends after 0.05 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rank_endpoints, "OUTCOME_SLACK_S", 0.03)
        self.story = NodeStory()
        self.story.start()
        host = self.story.host
        callers = Callers(lambda token: host.handle(CallerLeft(token=token)))
        monkeypatch.setattr(self.story.ports, "reply", callers.reply)
        options = RunOptions(attempt_timeout_s=0.01, goal_timeout_s=0.01)
        run = SimpleNamespace(
            spec=SimpleNamespace(options=options),
            machine=host.machine,
            annotating=0,
            request=lambda event: callers.request(lambda token: host.handle(event(token))),
        )
        self.annotated: list[int] = []
        self.endpoints = RankEndpoints()
        self.endpoints._runs = cast(Any, SimpleNamespace(get=lambda uid: run))
        self.endpoints._node = cast(Any, SimpleNamespace(request=self.request))

    async def request(self, method: str, run_uid: str, step: int, metrics: object) -> None:
        self.annotated.append(step)

    async def commit_late(self, step: int, waiting: asyncio.Task[Any]) -> None:
        """Commit the save of a step long after the limit of a wait."""
        await asyncio.sleep(0.3)
        assert not waiting.done()
        self.story.order("commit", published(attempt(step), Level.LOCAL))


def test_a_save_that_is_being_written_is_waited_for_until_its_outcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def save() -> SaveOutcome:
        node = SlowNode(monkeypatch)
        node.story.host.handle(sealed(attempt(10), 0))
        waiting = asyncio.create_task(node.endpoints.await_outcome(UID, attempt(10), Level.LOCAL))
        await node.commit_late(10, waiting)
        return await waiting

    assert asyncio.run(save()).level is Level.LOCAL


def test_an_outcome_that_comes_at_the_moment_of_the_limit_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def save() -> SaveOutcome:
        node = SlowNode(monkeypatch)
        node.story.host.handle(sealed(attempt(10), 0))
        waiting = asyncio.create_task(node.endpoints.await_outcome(UID, attempt(10), Level.LOCAL))
        await asyncio.sleep(0.01)
        committed = published(attempt(10), Level.LOCAL)
        asyncio.get_running_loop().call_later(0.06, node.story.order, "commit", committed)
        time.sleep(0.2)  # both timers are due in the next pass of the loop, that of the limit first
        return await waiting

    assert asyncio.run(save()).level is Level.LOCAL


def test_metrics_wait_for_a_save_that_is_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    async def annotate() -> list[int]:
        node = SlowNode(monkeypatch)
        node.story.host.handle(sealed(attempt(10), 0))
        waiting = asyncio.create_task(node.endpoints.annotate(UID, 10, {"loss": 0.5}, attempt(10)))
        await node.commit_late(10, waiting)
        await waiting
        return node.annotated

    assert asyncio.run(annotate()) == [10]


@pytest.mark.parametrize("level", [Level.LOCAL, Level.REPLICATED])
def test_a_wait_for_what_may_never_come_has_a_limit(level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank here has saved step 10, or its copies are missing: the caller decides."""

    async def wait() -> None:
        node = SlowNode(monkeypatch)
        if level > Level.LOCAL:
            node.story.host.handle(sealed(attempt(10), 0))
            node.story.order("commit", published(attempt(10), Level.LOCAL))
        with pytest.raises(TimeoutError):
            await node.endpoints.await_outcome(UID, attempt(10), level)
        assert not node.story.host._outcomes

    asyncio.run(wait())
