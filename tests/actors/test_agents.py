"""The coordinator's record of agents: replaced ones, and ones that are no longer needed."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from ray_ckpt.actors.coordinator.agents import Agents
from ray_ckpt.actors.messages import AgentCard
from ray_ckpt.transport.credentials import ServiceKeys

CARD = AgentCard(node_id="n", endpoint="grpc+tls://10.0.0.1:1", staging="")


async def answered(card: AgentCard) -> AgentCard:
    return card


def make() -> Agents:
    return Agents(ServiceKeys.make(datetime.now(UTC), encrypt=False), ThreadPoolExecutor(1))


def test_the_late_card_of_a_replaced_agent_is_dropped() -> None:
    """Its successor would be given the address of a dead process, for copies and restores."""

    async def read(is_replaced: bool) -> dict[str, AgentCard]:
        agents, answer = make(), asyncio.get_running_loop().create_future()
        old = AgentCard(node_id="n", endpoint="grpc+tls://10.0.0.1:1", staging="")
        agents._actors["n"] = SimpleNamespace(card=SimpleNamespace(remote=lambda: answer))
        agents.cards["n"] = old
        reading = asyncio.ensure_future(agents.read_cards())
        await asyncio.sleep(0)
        if is_replaced:
            agents.forget("n")
        answer.set_result(old)
        await reading
        return agents.cards

    assert asyncio.run(read(is_replaced=False)).keys() == {"n"}
    assert asyncio.run(read(is_replaced=True)) == {}


def test_no_agent_is_started_once_the_service_ends() -> None:
    agents = make()
    agents.close()
    assert asyncio.run(agents.request("n", "card")) is None
    assert not agents.nodes


def test_other_work_goes_on_while_ray_starts_no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's control store may hang."""
    may_go = threading.Event()

    def start(agents: Agents, node: str) -> SimpleNamespace:
        assert may_go.wait(10), "the loop is blocked"
        return SimpleNamespace(card=SimpleNamespace(remote=lambda: answered(CARD)))

    monkeypatch.setattr(Agents, "start", start)

    async def story() -> AgentCard:
        asked = asyncio.ensure_future(make().request("n", "card"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        may_go.set()
        found: AgentCard = await asked
        return found

    assert asyncio.run(story()) is CARD


def test_an_agent_that_starts_while_the_service_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[object] = []
    exits = SimpleNamespace(exit=SimpleNamespace(remote=ended.append))

    def start(agents: Agents, node: str) -> SimpleNamespace:
        agents.close()
        agents.end_all()
        return exits

    monkeypatch.setattr(Agents, "start", start)
    agents = make()
    assert asyncio.run(agents.request("n", "card")) is None
    assert ended == [None] and not agents.nodes
