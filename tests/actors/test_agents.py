"""The coordinator's record of agents: replaced ones, and ones that are no longer needed."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from types import SimpleNamespace

from ray_ckpt.actors.coordinator.agents import Agents
from ray_ckpt.actors.messages import AgentCard
from ray_ckpt.transport.credentials import ServiceKeys


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
