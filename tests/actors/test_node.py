"""Resources that all runs of an agent share; without Ray."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ray_ckpt.actors.agent.node import Node
from ray_ckpt.actors.agent.rank_endpoints import RankEndpoints
from ray_ckpt.errors import ConfigError
from ray_ckpt.preemption.cloud import METADATA_ENV
from ray_ckpt.preemption.notice import Notice
from ray_ckpt.transport.credentials import ServiceKeys


def test_a_wrong_name_of_a_cloud_is_an_error_of_each_run_that_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a second try would train without notices."""
    node = Node("n", ServiceKeys.make(datetime.now(UTC)))
    monkeypatch.setenv(METADATA_ENV, "amazon")
    for _ in range(2):
        with pytest.raises(ConfigError, match=METADATA_ENV):
            node.watch_cloud()

    async def corrected() -> bool:
        monkeypatch.setenv(METADATA_ENV, "off")
        node.watch_cloud()
        return node._watches_cloud

    assert asyncio.run(corrected())


def test_a_signal_to_a_rank_is_reported_for_the_run_of_the_rank() -> None:
    reported: list[tuple[object, ...]] = []

    async def report(*arguments: object) -> None:
        reported.append(arguments)

    endpoints, notice = RankEndpoints(), Notice("sigterm", "", 25.0)
    endpoints._node = cast(Any, SimpleNamespace(node_id="n", report=report))
    asyncio.run(endpoints.notify_preemption("run A", notice))
    assert reported == [("node_preempted", "n", notice, "run A")]
