"""Services and ranks go on after failed calls to agents or to Ray, and after an agent was replaced."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from ray_ckpt.actors.agent.node import Node
from ray_ckpt.actors.agent.relay import OtherAgents
from ray_ckpt.actors.client import RayLink
from ray_ckpt.actors.coordinator.engine import Engine
from ray_ckpt.actors.coordinator.opening import RunOpener
from ray_ckpt.actors.coordinator.ports import RayPorts
from ray_ckpt.actors.coordinator.recovery import Recovery
from ray_ckpt.actors.messages import Joined, OpenedRun, RunSpec, ServiceCard
from ray_ckpt.core.values import SessionPlan
from ray_ckpt.engine.ports import AgentDied, Answered, Call, OpenOnNode
from ray_ckpt.errors import Unavailable
from tests.actors.test_shutdown import SPEC, make_engine, training


def record_events(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the events that the host of the only run gets from now on."""
    events: list[Any] = []
    (run,) = engine.runs
    monkeypatch.setattr(run.host, "handle", lambda *found: events.extend(found))
    return events


def put_agent(engine: Engine, runs: tuple[OpenedRun, ...] | None) -> None:
    """Let node a have an agent with these runs; None: it is dead."""

    async def describe() -> ServiceCard:
        if runs is None:
            raise ray.exceptions.ActorDiedError
        return ServiceCard(keys=engine.agents.keys, service="s", runs=runs)

    engine.agents._actors["a"] = SimpleNamespace(describe=SimpleNamespace(remote=describe))


@pytest.mark.parametrize(
    ("agent", "is_opened"),
    [("has the session", False), ("has no session", True), ("has no run", True), ("is dead", True)],
)
def test_a_run_is_opened_again_where_the_agent_lacks_it(
    agent: str, is_opened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run may have started the agent that lives when a rank reports the death of the last one."""

    async def restart() -> list[Any]:
        engine = make_engine()
        run = training(engine)
        plan: SessionPlan | None = run.machine.plan if agent == "has the session" else None
        opened = OpenedRun(spec=SPEC, run_uid=run.run_uid, plan=plan, epoch=1)
        runs: dict[str, tuple[OpenedRun, ...] | None] = {"has no run": (), "is dead": None}
        put_agent(engine, runs.get(agent, (opened,)))
        events = record_events(engine, monkeypatch)
        await engine.restart_agent("a")
        assert ("a" in engine.agents.nodes) == (agent != "is dead")
        return events

    assert asyncio.run(restart()) == ([AgentDied(node="a")] if is_opened else [])


def test_a_node_that_does_not_answer_in_time_is_left_out_of_an_opening(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error would fail the opening for all nodes."""

    async def wait() -> list[Any]:
        engine = make_engine()
        run = training(engine)
        events = record_events(engine, monkeypatch)
        call = Call(node="a", order=OpenOnNode(epoch=1, number=1), bound_s=0.01)
        await RayPorts(engine, run)._await(call, asyncio.get_running_loop().create_future())
        return events

    (answer,) = asyncio.run(wait())
    assert isinstance(answer, Answered) and answer.failure is not None
    assert answer.failure.error is None and "0.01 s" in answer.failure.text


def test_agents_are_looked_for_again_after_an_error_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look() -> int:
        engine, tries = make_engine(), 0

        async def find() -> tuple[ServiceCard, ...]:
            nonlocal tries
            tries += 1
            if tries == 1:
                raise ray.exceptions.RaySystemError("no answer")
            return ()

        monkeypatch.setattr(engine.agents, "find", find)
        recovery = Recovery(engine, RunOpener(engine, lambda: None))
        with pytest.raises(ray.exceptions.RaySystemError):
            await recovery.ready()
        await recovery.ready()
        await recovery.ready()
        return tries

    assert asyncio.run(look()) == 2


def test_a_run_is_taken_over_after_an_error_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    async def take_over() -> list[str]:
        monkeypatch.setattr("ray_ckpt.actors.coordinator.recovery.TAKE_OVER_AGAIN_S", 0.0)
        engine, opened = make_engine(), []

        async def open(spec: RunSpec, **_: Any) -> str:
            opened.append(spec.name)
            if len(opened) == 1:
                raise ray.exceptions.RaySystemError("no answer")
            return "uid"

        recovery = Recovery(engine, cast(RunOpener, SimpleNamespace(open=open)))
        await recovery._take_up(OpenedRun(spec=SPEC, run_uid="uid", plan=None, epoch=1))
        return opened

    assert asyncio.run(take_over()) == ["gpt", "gpt"]


def test_what_ray_does_not_find_is_unavailable_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other error would end work of an agent in the background, or the training."""

    def no_answer(name: str, namespace: str) -> None:
        raise ray.exceptions.RaySystemError(f"no answer about {name}")

    engine = make_engine()
    monkeypatch.setattr(ray, "get_actor", no_answer)
    monkeypatch.setattr(RayLink, "_named", lambda link: False)
    with pytest.raises(Unavailable):
        asyncio.run(Node("a", engine.agents.keys)._request("overview"))
    assert asyncio.run(OtherAgents().find(["a"])) == {}
    link = RayLink(Joined(run_uid="0" * 32, spec=SPEC, world_size=1, nodes={0: "a"}, origin=None), 0)
    link.recover()
    with pytest.raises(Unavailable):
        link.ticket()
