"""An agent as a relay, and a node whose relay does not answer; without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
import ray

from ray_ckpt.actors import names
from ray_ckpt.actors.agent import node as node_module
from ray_ckpt.actors.agent import relay
from ray_ckpt.actors.agent.node import Node
from ray_ckpt.actors.agent.relay import MAX_BATCHES, MAX_GATHERED, OrderRelay, OtherAgents, ReportRelay
from ray_ckpt.actors.messages import GatheredAnswer, GatheredReport, PassedOrder
from ray_ckpt.core import messages as m
from ray_ckpt.core.values import RankProgress
from ray_ckpt.errors import Fenced, RunConflict, Unavailable
from ray_ckpt.transport.credentials import ServiceKeys


class Agent:
    """The handle of an agent whose calls `do` carries out."""

    def __init__(self, do: Callable[..., Any]) -> None:
        self._do = do

    def __getattr__(self, method: str) -> Any:
        return _Call(self._do, method)


class _Call:
    def __init__(self, do: Callable[..., Any], method: str) -> None:
        self._do, self._method = do, method

    async def remote(self, *arguments: Any) -> Any:
        return await self._do(self._method, *arguments)


def relay_with(monkeypatch: pytest.MonkeyPatch, **agents: Callable[..., Any]) -> OrderRelay:
    """Return a relay that reaches the agents of these nodes."""
    monkeypatch.setattr(relay, "POLL_S", 0.05)
    monkeypatch.setattr(relay, "GATHER_S", 0.0)
    return OrderRelay(agents_of(monkeypatch, **agents))


def agents_of(monkeypatch: pytest.MonkeyPatch, **agents: Callable[..., Any]) -> OtherAgents:
    """Return the agents of these nodes."""

    def get_actor(name: str, namespace: str) -> Agent:
        if (do := agents.get(name.removeprefix(names.agent_name("")))) is None:
            raise ValueError(name)
        return Agent(do)

    monkeypatch.setattr(ray, "get_actor", get_actor)
    return OtherAgents()


def order(*nodes: str, method: str = "delete") -> PassedOrder:
    return PassedOrder(nodes=tuple(enumerate(nodes)), method=method, arguments=("x",))


async def echo(method: str, argument: str) -> str:
    return f"{method} {argument}"


def test_answers_and_failures_of_agents_come_back_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuses(*_: str) -> None:
        cause = Fenced("It obeys epoch 7.", epoch=7)
        raise ray.exceptions.RayTaskError("delete", "", cause).as_instanceof_cause()

    async def died(*_: str) -> None:
        raise ray.exceptions.ActorDiedError

    relays = relay_with(monkeypatch, a=echo, b=refuses, c=died)
    answers = asyncio.run(relays.pass_on("1", (order("a", "b", "c", "unknown"),)))
    assert dict(answers.values) == {0: "delete x"}
    assert {number: failure.epoch for number, failure in answers.failures.items()} == {1: 7}
    assert sorted(answers.undelivered) == [2, 3], "the coordinator sends these without the relay"


def test_answers_of_slow_agents_are_requested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        may_go = asyncio.Event()

        async def slow(*_: str) -> str:
            await may_go.wait()
            return "late"

        relays = relay_with(monkeypatch, a=echo, b=slow)
        first = await relays.pass_on("1", (order("a", "b"),))
        assert dict(first.values) == {0: "delete x"}
        assert not (await relays.pass_on("1", ())).values, "nothing new"
        may_go.set()
        assert dict((await relays.pass_on("1", ())).values) == {1: "late"}
        with pytest.raises(Unavailable):
            await relays.pass_on("1", ())

    asyncio.run(run())


def test_a_relay_keeps_a_bounded_number_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: str) -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        relays = relay_with(monkeypatch, a=never)
        calls = [relays.pass_on(str(k), (order("a"),)) for k in range(MAX_BATCHES + 1)]
        await asyncio.gather(*calls)
        with pytest.raises(Unavailable):
            await relays.pass_on("0", ())
        await relays.pass_on(str(MAX_BATCHES), ())

    asyncio.run(run())


def report(step: int, rank: int = 0, method: str = "ranks_progressed") -> GatheredReport:
    ranks = {rank: RankProgress(step=step, saved_step=-1)}
    event = m.RanksProgressed(session_key=(1, 1), ranks=ranks)
    return GatheredReport(method=method, arguments=("uid", event), waits=False)


def gathered(*reports: GatheredReport, error: Exception | None = None) -> tuple[list[Any], list[int]]:
    """Return the answer of each sender, and the sizes of the messages to the coordinator."""
    sizes: list[int] = []

    async def send(sent: tuple[GatheredReport, ...]) -> tuple[GatheredAnswer, ...]:
        sizes.append(len(sent))
        if error is not None:
            raise error
        return tuple(
            GatheredAnswer(value=each.method, error=RunConflict("no") if each.method == "bad" else None)
            for each in sent
        )

    async def run() -> list[Any]:
        relays = ReportRelay(send)
        return await asyncio.gather(*map(relays.gather, reports), return_exceptions=True)

    return asyncio.run(run()), sizes


def test_reports_go_together_and_each_sender_gets_its_answer() -> None:
    answers, sizes = gathered(report(1, method="stored"), report(1, method="bad"), report(3, 1), report(3, 2))
    assert sizes == [3], "progress of two nodes is one report"
    assert answers[0] == "stored" and isinstance(answers[1], RunConflict)
    assert answers[2:] == ["ranks_progressed"] * 2
    _, sizes = gathered(*(report(1, method="stored") for _ in range(MAX_GATHERED + 1)))
    assert sizes == [MAX_GATHERED, 1]


@pytest.mark.parametrize("error", [Unavailable("The coordinator is away."), KeyError("bug")])
def test_after_any_error_no_sender_waits_for_ever(error: Exception) -> None:
    answers, _ = gathered(report(1), report(2, method="stored"), error=error)
    assert [type(answer) for answer in answers] == [Unavailable, Unavailable]


def test_reports_that_come_while_others_are_with_the_coordinator_are_sent_together() -> None:
    async def run() -> None:
        may_answer, sizes = asyncio.Event(), list[int]()

        async def send(sent: tuple[GatheredReport, ...]) -> tuple[GatheredAnswer, ...]:
            sizes.append(len(sent))
            await may_answer.wait()
            return tuple(GatheredAnswer(value=each.method) for each in sent)

        relays = ReportRelay(send)
        calls = [asyncio.ensure_future(relays.gather(report(1, method="stored")))]
        while not sizes:
            await asyncio.sleep(0)
        calls += [asyncio.ensure_future(relays.gather(report(1, method="stored"))) for _ in range(5)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(relays.gather(report(1, method="stored")), 0.01)
        barrier = GatheredReport(method="met", arguments=(), waits=True)
        calls.append(asyncio.ensure_future(relays.gather(barrier)))
        while len(sizes) < 2:
            await asyncio.sleep(0)
        assert sizes == [1, 1], "a barrier waits for no other report"
        may_answer.set()
        await asyncio.gather(*calls)
        assert sizes == [1, 1, 5], "the sender that gave up has reported itself"

    asyncio.run(run())


def request(
    monkeypatch: pytest.MonkeyPatch, through: Callable[..., Any], method: str
) -> tuple[list[Any], list[str]]:
    """Return the answers to two requests of a node with relay `r`, and the ways that they took."""
    monkeypatch.setattr(node_module, "REPORT_S", 0.05)
    ways: list[str] = []

    async def by_relay(method: str, sent: GatheredReport) -> Any:
        ways.append("r")
        return await through()

    async def direct(method: str, *_: Any) -> str:
        ways.append("direct")
        return "answer"

    async def run() -> list[Any]:
        node = Node("n", ServiceKeys.make(datetime.now(UTC)))
        agents_of(monkeypatch, **({} if through is is_unknown else {"r": by_relay}))
        monkeypatch.setattr(node, "_request", direct)
        node.route.use("r")
        return [(await asyncio.gather(node.request(method), return_exceptions=True))[0] for _ in range(2)]

    return asyncio.run(run()), ways


async def hangs() -> None:
    await asyncio.Event().wait()


async def has_died() -> None:
    raise ray.exceptions.ActorDiedError


async def is_cut_off() -> None:
    cause = Unavailable("The coordinator did not answer gathered.", reached=False)
    raise ray.exceptions.RayTaskError("gather", "", cause).as_instanceof_cause()


async def is_unknown() -> None:
    """Stand for a relay whose agent does not exist."""


@pytest.mark.parametrize("through", [hangs, has_died, is_cut_off, is_unknown])
def test_a_node_reports_itself_when_its_relay_does_not(
    through: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = ["direct", "direct"] if through is is_unknown else ["r", "direct", "direct"]
    assert request(monkeypatch, through, "node_stored") == (["answer"] * 2, ways)


def test_a_report_whose_answer_takes_long_leaves_a_relay_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "REPORT_S", 0.05)

    async def by_relay(method: str, sent: GatheredReport) -> None:
        await hangs()

    async def direct(method: str, *_: Any) -> str:
        return method

    async def run() -> None:
        node = Node("n", ServiceKeys.make(datetime.now(UTC)))
        agents_of(monkeypatch, r=by_relay)
        monkeypatch.setattr(node, "_request", direct)
        node.route.use("r")
        waiting = [asyncio.ensure_future(node.request(method)) for method in ("ranks_met", "node_restored")]
        await asyncio.sleep(0.1)
        assert not any(call.done() for call in waiting), "other nodes may need that long"
        assert await node.request("ranks_progressed") == "ranks_progressed"
        assert await asyncio.wait_for(asyncio.gather(*waiting), 10.0) == ["ranks_met", "node_restored"]

    asyncio.run(run())


def test_an_agent_that_did_not_answer_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> list[dict[str, Any]]:
        agents = agents_of(monkeypatch, a=echo)
        found = [await agents.find("ab"), await agents.find("a")]
        agents.forget("a")
        return [*found, await agents.find("a")]

    first, kept, again = asyncio.run(run())
    assert first.keys() == {"a"} and kept["a"] is first["a"]
    assert again["a"] is not first["a"], "it may have been replaced"


def test_the_coordinators_error_comes_through_the_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused() -> None:
        cause = RunConflict("Another group has the run.")
        raise ray.exceptions.RayTaskError("gather", "", cause).as_instanceof_cause()

    answers, ways = request(monkeypatch, refused, "node_stored")
    assert [type(answer) for answer in answers] == [RunConflict] * 2 and ways == ["r", "r"]


def test_requests_that_are_no_reports_need_no_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert request(monkeypatch, hangs, "make_durable")[1] == ["direct", "direct"]
