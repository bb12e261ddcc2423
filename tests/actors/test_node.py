"""Resources that all runs of an agent share; without Ray."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ray_ckpt.actors.agent import node as module
from ray_ckpt.actors.agent import rank_endpoints as endpoints_module
from ray_ckpt.actors.agent.node import Node
from ray_ckpt.actors.agent.rank_endpoints import RankEndpoints
from ray_ckpt.errors import ConfigError, Unavailable
from ray_ckpt.preemption.cloud import METADATA_ENV
from ray_ckpt.preemption.notice import Notice
from ray_ckpt.transport.credentials import ServiceKeys
from tests.core.test_node_machine import attempt


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


class Away(Node):
    """Resources of an agent that reaches its coordinator only after some calls."""

    def __init__(self, num_failures: int, **fields: Any) -> None:
        super().__init__("n", ServiceKeys.make(datetime.now(UTC)))
        self.num_failures, self.fields, self.num_calls = num_failures, fields, 0

    async def request(self, method: str, *args: Any, may_wait_s: float = 0.0) -> Any:
        self.num_calls += 1
        self.arguments = (method, *args)
        if self.num_calls <= self.num_failures:
            raise Unavailable("It does not answer.", **self.fields)


@pytest.mark.parametrize(
    ("num_failures", "is_wanted", "is_reached", "num_calls"),
    [(2, True, False, 3), (99, True, False, 4), (99, False, False, 1), (99, True, True, 1)],
)
def test_a_report_that_does_not_arrive_is_repeated_while_its_save_is_under_way(
    num_failures: int, is_wanted: bool, is_reached: bool, num_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection may break for a moment; an error of the coordinator itself is final."""
    monkeypatch.setattr(module, "REPORT_AGAIN_S", (0.0, 0.0, 0.0))
    node = Away(num_failures, reached=is_reached)
    asyncio.run(node.report("node_stored", None, is_wanted=lambda: is_wanted))
    assert node.num_calls == num_calls


@pytest.mark.parametrize(
    ("num_failures", "is_reached", "timeout_s", "num_calls"),
    [(5, False, 60.0, 6), (5, True, 60.0, 1), (5, False, 0.0, 1)],
)
def test_who_waits_for_a_durable_checkpoint_asks_the_next_coordinator(
    num_failures: int, is_reached: bool, timeout_s: float, num_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray needs some seconds to restart one, and an upload may take an hour."""
    monkeypatch.setattr(endpoints_module, "COORDINATOR_AGAIN_S", 0.01)
    endpoints, node = RankEndpoints(), Away(num_failures, reached=is_reached)
    endpoints._node = node
    durable = endpoints.make_durable("uid", attempt(10), timeout_s)
    if num_calls > num_failures:
        asyncio.run(durable)
        method, run_uid, name, left_s = node.arguments
        assert (method, run_uid, name) == ("make_durable", "uid", attempt(10).attempt)
        assert 0.0 < left_s < timeout_s - 0.04
    else:
        with pytest.raises(Unavailable):
            asyncio.run(durable)
    assert node.num_calls == num_calls


def test_a_signal_to_a_rank_is_reported_for_the_run_of_the_rank() -> None:
    reported: list[tuple[object, ...]] = []

    async def report(*arguments: object) -> None:
        reported.append(arguments)

    endpoints, notice = RankEndpoints(), Notice("sigterm", "", 25.0)
    endpoints._node = cast(Any, SimpleNamespace(node_id="n", report=report))
    asyncio.run(endpoints.notify_preemption("run A", (1, 7), notice))
    assert reported == [("node_preempted", "n", notice, ("run A", (1, 7)))]
