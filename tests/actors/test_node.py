"""Resources that all runs of an agent share; without Ray."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest

from ray_ckpt.actors.agent.node import Node
from ray_ckpt.errors import ConfigError
from ray_ckpt.preemption.cloud import METADATA_ENV
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
