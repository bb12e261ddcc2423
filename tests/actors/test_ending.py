"""What keeps the coordinator from ending the service, and what it knows of agents that were replaced."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ray_ckpt.actors.coordinator import Coordinator, Run
from ray_ckpt.actors.wire import AgentCard, RunSpec, ServiceView
from ray_ckpt.config import RunOptions
from ray_ckpt.errors import Unavailable
from tests.actors.test_overview import service, trained, view_of

SPEC = RunSpec(name="gpt", storage_path="/shared/runs", options=RunOptions())


def newcomers(coordinator: Coordinator, view: ServiceView) -> tuple[str, ...]:
    return coordinator._newcomers(view)


def at_work() -> tuple[Coordinator, Run]:
    """A coordinator whose only run trains."""
    coordinator, run = Coordinator(), Run(SPEC, "east")
    run.machine = trained().machine
    coordinator._runs[SPEC.key] = run
    return coordinator, run


def test_a_group_that_came_while_the_others_were_looked_at_keeps_the_service() -> None:
    coordinator, run = at_work()
    assert newcomers(coordinator, service()) == ("run gpt is being opened",)
    view = view_of(trained())
    assert view.owner == run.machine.owner
    assert newcomers(coordinator, service(replace(view, where=SPEC.key))) == ()


def test_a_launcher_that_waits_for_agents_keeps_the_service_until_it_is_answered() -> None:
    coordinator = Coordinator()
    with coordinator._in_use("gpt"), coordinator._in_use("gpt"):
        assert newcomers(coordinator, service()) == ("run gpt is being opened",)
    assert newcomers(coordinator, service()) == () and not coordinator._users


def test_a_service_that_ends_takes_no_group() -> None:
    coordinator, _ = at_work()
    coordinator._is_ending = True
    for call in (coordinator.open_run(SPEC, "me"), coordinator.open_group(SPEC.key, (), "auto", "me")):
        with pytest.raises(Unavailable, match="being stopped"):
            asyncio.run(call)


def test_the_card_of_an_agent_that_was_replaced_meanwhile_is_not_kept() -> None:
    """Its successor would be given the address of a dead process, for copies and restores."""

    async def read(is_replaced: bool) -> dict[str, AgentCard]:
        coordinator, answer = Coordinator(), asyncio.get_running_loop().create_future()
        old = AgentCard(node_id="n", endpoint="grpc+tls://10.0.0.1:1", staging="")
        card = SimpleNamespace(remote=lambda: answer)
        coordinator._agents["n"], coordinator._cards["n"] = SimpleNamespace(card=card), old
        reading = asyncio.ensure_future(coordinator._read_card("n"))
        await asyncio.sleep(0)
        if is_replaced:
            coordinator._forget("n")
        answer.set_result(old)
        await reading
        return coordinator._cards

    assert asyncio.run(read(is_replaced=False)).keys() == {"n"}
    assert asyncio.run(read(is_replaced=True)) == {}
