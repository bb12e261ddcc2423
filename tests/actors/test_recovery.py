"""Services and ranks go on after failed calls to agents or to Ray, and after an agent was replaced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from ray_ckpt.actors import names
from ray_ckpt.actors.agent.node import Node
from ray_ckpt.actors.agent.relay import OtherAgents
from ray_ckpt.actors.coordinator import ports as ports_module
from ray_ckpt.actors.coordinator.actor import Coordinator
from ray_ckpt.actors.coordinator.engine import Engine
from ray_ckpt.actors.coordinator.opening import RunOpener, _has_begun
from ray_ckpt.actors.coordinator.ports import RayPorts
from ray_ckpt.actors.coordinator.recovery import Recovery
from ray_ckpt.actors.messages import (
    AgentCard,
    GroupCard,
    Joined,
    OpenedRun,
    PassedAnswers,
    PassedOrder,
    RunSpec,
    ServiceCard,
)
from ray_ckpt.actors.rank_link import RayLink
from ray_ckpt.core import messages as m
from ray_ckpt.core.node_messages import DeleteOrdered, RunReleased
from ray_ckpt.core.ownership import RunMark
from ray_ckpt.core.values import SessionKey, SessionPlan
from ray_ckpt.engine.deletes import NodeDeletes
from ray_ckpt.engine.ports import AgentDied, Answered, Call, Failure, GroupFound, OpenOnNode
from ray_ckpt.errors import RunSuperseded, StagingError, StoragePathError, Unavailable
from ray_ckpt.format import records as r
from ray_ckpt.preemption.notice import Notice
from ray_ckpt.trainer import waiting
from ray_ckpt.transport.credentials import ServiceKeys
from tests.actors.test_overview import trained
from tests.actors.test_shutdown import SPEC, make_engine, training
from tests.core.driver import Harness


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


@pytest.mark.parametrize(
    ("failure", "num_calls"),
    [
        (Failure(text="the connection broke"), len(ports_module.SEND_AGAIN_S)),
        (Failure(text="dead", is_dead=True), 0),
        (Failure(text="stale", epoch=9), 0),
    ],
)
def test_the_end_of_a_run_is_sent_again_if_it_does_not_arrive(
    failure: Failure, num_calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that misses it keeps the memory of the run's saves."""
    monkeypatch.setattr(ports_module, "SEND_AGAIN_S", (0.0,) * len(ports_module.SEND_AGAIN_S))
    sent: list[Call] = []

    async def fail() -> None:
        engine = make_engine()
        run = training(engine)
        record_events(engine, monkeypatch)
        ports = RayPorts(engine, run)
        monkeypatch.setattr(ports, "call", sent.append)
        monkeypatch.setattr(ports, "agents", lambda: {"a"})
        epoch = run.host.machine.epoch
        order = RunReleased(session_key=(1, 1), is_finished=False, epoch=epoch)
        ports._end(Call(node="a", order=order), None, failure)
        num_failed = 0
        for _ in range(10):
            await asyncio.sleep(0.01)
            if sent[num_failed:]:
                num_failed = len(sent)
                ports._end(sent[-1], None, failure)

    asyncio.run(fail())
    assert [call.num_tries for call in sent] == list(range(1, num_calls + 1))


def test_equal_deletions_on_many_nodes_are_one_order_of_the_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save of a large cluster retires a checkpoint, whose folder has the same name on each node."""
    folders = {"a": ("5",), "b": ("5",), "c": ("5", "6"), "d": ("5",)}

    async def delete() -> list[tuple[tuple[PassedOrder, ...], list[Any]]]:
        engine = make_engine()
        engine.relay_nodes = 2
        run = training(engine)
        events, sent = record_events(engine, monkeypatch), []

        async def pass_on(_name: str, orders: tuple[PassedOrder, ...]) -> PassedAnswers:
            numbers = [number for order in orders for number, _ in order.nodes]
            sent.append((orders, [order.arguments for order in orders]))
            return PassedAnswers(values=dict.fromkeys(numbers))

        for node in folders:
            engine.agents._actors[node] = SimpleNamespace(pass_on=SimpleNamespace(remote=pass_on))
            engine.agents.cards[node] = AgentCard(node_id=node, endpoint="", staging="/s")
        ports = RayPorts(engine, run)
        for node, directories in folders.items():
            work = NodeDeletes(node=node, directories=directories, deletes=())
            ports.call(Call(node=node, order=DeleteOrdered(directories=directories, epoch=1), work=work))
        await asyncio.sleep(0.05)
        assert [event.to.node for event in events] == list(folders)
        return sent

    first, second = asyncio.run(delete())
    epoch = first[1][0][-1]
    assert [[node for _, node in order.nodes] for order in first[0]] == [["a", "b"]]
    assert [[node for _, node in order.nodes] for order in second[0]] == [["c"], ["d"]]
    assert [arguments[1:] for arguments in (*first[1], *second[1])] == [
        (("5",), (), epoch),
        (("5", "6"), (), epoch),
        (("5",), (), epoch),
    ]


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


def test_recovery_begins_by_itself_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No agent of a finished run calls its restarted coordinator, which has to put the run away."""
    monkeypatch.setattr("ray_ckpt.actors.coordinator.recovery.TAKE_OVER_AGAIN_S", 0.0)

    async def look() -> int:
        engine, errors = make_engine(), [ray.exceptions.RaySystemError("no answer") for _ in range(2)]

        async def find() -> tuple[ServiceCard, ...]:
            if errors:
                raise errors.pop()
            return ()

        monkeypatch.setattr(engine.agents, "find", find)
        await asyncio.wait_for(Recovery(engine, RunOpener(engine, lambda: None)).begin(), 10.0)
        return len(errors)

    assert asyncio.run(look()) == 0


ASK_AGAIN_S = 0.2


class Restart:
    """A restarted coordinator that finds agents; they answer as `answer` says, by default with a group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nodes: str = "a") -> None:
        keys = ServiceKeys.make(datetime.now(UTC), encrypt=False)
        plan = trained().machine.plan
        assert plan is not None
        self.plan = plan
        run = OpenedRun(spec=SPEC, run_uid="uid", plan=plan, epoch=1)
        self.card = ServiceCard(keys=keys, service="old", runs=(run,))
        self.answer: Callable[[str], ServiceCard] = lambda node: self.card
        self.asked: list[tuple[str, float]] = []  # node, time (monotonic)
        self.opened: list[SessionPlan | None] = []  # groups with which runs were opened
        self.engine = make_engine()
        self.recovery = Recovery(self.engine, cast(RunOpener, SimpleNamespace(open=self._open)))

        async def live_nodes() -> tuple[str, ...]:
            return tuple(nodes)

        named = [{"name": names.agent_name(node)} for node in nodes]
        monkeypatch.setattr("ray.util.list_named_actors", lambda all_namespaces: named)
        monkeypatch.setattr("ray.get_actor", lambda name, namespace: self._agent(name[-1]))
        monkeypatch.setattr(self.engine.agents, "live_nodes", live_nodes)
        monkeypatch.setattr("ray_ckpt.actors.coordinator.recovery.ASK_AGAIN_S", ASK_AGAIN_S)
        monkeypatch.setattr("ray_ckpt.actors.coordinator.recovery.TAKE_OVER_AGAIN_S", 0.01)

    def nodes_asked(self) -> list[str]:
        return [node for node, _ in self.asked]

    def _agent(self, node: str) -> Any:
        async def describe() -> ServiceCard:
            self.asked.append((node, time.monotonic()))
            return self.answer(node)

        async def card() -> AgentCard:
            return AgentCard(node_id=node, endpoint=f"grpc+tls://{node}:1", staging="")

        return SimpleNamespace(describe=SimpleNamespace(remote=describe), card=SimpleNamespace(remote=card))

    async def _open(self, spec: RunSpec, *, found: SessionPlan | None, **_: Any) -> str:
        self.opened.append(found)
        return "uid"


def no_answer(node: str) -> ServiceCard:
    raise TimeoutError


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def test_who_waits_for_a_durable_checkpoint_waits_for_the_run_to_be_open_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank asks a restarted coordinator while that one reads the log."""
    restart = Restart(monkeypatch)

    async def wait() -> list[Any]:
        mounted = asyncio.Event()

        async def open(spec: RunSpec, **_: Any) -> str:
            await mounted.wait()
            return training(restart.engine).run_uid

        restart.recovery._opener = cast(RunOpener, SimpleNamespace(open=open))
        (found,) = restart.card.runs
        uid = training(restart.engine).run_uid
        restart.engine.runs.open.clear()
        restart.card = replace(restart.card, runs=(replace(found, run_uid=uid),))
        await restart.recovery.begin()
        coordinator = Coordinator()
        coordinator.engine, coordinator._recovery = restart.engine, restart.recovery
        durable = asyncio.ensure_future(coordinator.make_durable(uid, "f" * 16, 60.0))
        await asyncio.sleep(0.05)
        assert not durable.done()
        mounted.set()
        await until(lambda: restart.engine.runs.open)
        events = record_events(restart.engine, monkeypatch)
        await until(lambda: events)
        durable.cancel()
        return events

    (event,) = asyncio.run(wait())
    assert isinstance(event, m.DrainRequested) and event.within_s == 60.0


@pytest.mark.parametrize("has_group", [True, False])
def test_agents_that_hang_are_not_waited_for_once_the_groups_of_all_runs_are_found(
    has_group: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that has the run without its group may have answered before the agents of the group."""
    restart = Restart(monkeypatch, "ab")
    monkeypatch.setattr("ray_ckpt.actors.coordinator.agents.LATE_S", 0.05)

    async def restarted() -> None:
        thawed = asyncio.Event()

        async def ask(node: str) -> ServiceCard | None:
            if node == "b":
                await thawed.wait()
                return None
            (run,) = restart.card.runs
            finished = replace(run, run_uid="other", plan=None, is_finished=True)
            failed = replace(run, run_uid="failed", plan=None, failed=(1, 1))
            found = run if has_group else replace(run, plan=None)
            return replace(restart.card, runs=(found, finished, failed))

        monkeypatch.setattr(restart.engine.agents, "ask", ask)
        finding = asyncio.ensure_future(restart.engine.agents.find())
        await asyncio.sleep(0.5)
        assert finding.done() == has_group
        assert restart.engine.agents.silent.keys() == ({"b"} if has_group else set())
        thawed.set()
        assert [card.service for card in await finding] == ["old"]

    asyncio.run(restarted())


@pytest.mark.parametrize("is_at_work", [True, False])
def test_the_mark_of_a_node_that_hangs_is_not_waited_for_while_a_group_is_at_work(
    is_at_work: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    restart = Restart(monkeypatch, "ab")
    monkeypatch.setattr("ray_ckpt.actors.coordinator.agents.LATE_S", 0.05)
    mark = RunMark(run_uid="0" * 32, epoch=3)

    async def read() -> tuple[tuple[RunMark, ...], Exception | None]:
        thawed = asyncio.Event()

        async def request(node: str, method: str, spec: RunSpec) -> tuple[RunMark, ...]:
            if node == "b":
                await thawed.wait()
            return (mark,)

        monkeypatch.setattr(restart.engine.agents, "request", request)
        opener = RunOpener(restart.engine, lambda: None)
        reading = asyncio.ensure_future(opener._read_marks(SPEC, is_at_work=is_at_work))
        await asyncio.sleep(0.5)
        assert reading.done() == is_at_work
        thawed.set()
        return await reading

    assert asyncio.run(read()) == ((mark,) if is_at_work else (mark, mark), None)


def test_a_run_has_begun_with_the_first_session_in_its_log() -> None:
    history = trained().machine.history
    fresh = m.LogOpened(records=(), history=None, run_name="gpt", fresh_uid="0" * 32)
    assert not _has_begun(fresh) and _has_begun(replace(fresh, history=history))
    session = r.Session(session=1, service="s", after=None, resumed_from=None, world_size=1, num_nodes=1)
    ops: tuple[r.Op, ...] = (r.Epoch(), session)
    records = [
        (r.LogRecord(seq=seq, epoch=1, writer="a", prev="", time_s=0.0, op=op), "")
        for seq, op in enumerate(ops)
    ]
    assert not _has_begun(replace(fresh, records=tuple(records[:1])))
    assert _has_begun(replace(fresh, records=tuple(records)))


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_node_whose_folder_cannot_be_used_ends_the_first_start_of_a_run_alone(
    has_begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restart, mark = Restart(monkeypatch, "abc"), RunMark(run_uid="0" * 32, epoch=3)

    async def request(node: str, method: str, spec: RunSpec) -> tuple[RunMark, ...]:
        if node == "b":
            raise StagingError("the folder is not writable")
        return (mark,)

    class Checked(Exception):
        """The log is read, and checked with the marks of the other nodes."""

    def check(event: m.LogOpened, *, marks: Sequence[RunMark], **_: object) -> None:
        raise Checked(*marks)

    monkeypatch.setattr(restart.engine.agents, "request", request)
    monkeypatch.setattr("ray_ckpt.actors.coordinator.opening.check_log", check)
    monkeypatch.setattr("ray_ckpt.actors.coordinator.opening._has_begun", lambda event: has_begun)
    opener, spec = RunOpener(restart.engine, lambda: None), replace(SPEC, storage_path=str(tmp_path))
    with pytest.raises(Checked if has_begun else StagingError) as caught:
        asyncio.run(opener._open_log(spec, "me", True, None))
    assert caught.value.args == (mark, mark) if has_begun else "not writable" in str(caught.value)


def test_an_agent_that_does_not_answer_is_asked_again_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that is saved by time alone sends no report by which it could be found."""
    restart = Restart(monkeypatch)

    async def restarted() -> None:
        restart.answer = lambda node: restart.card if len(restart.asked) == 3 else no_answer(node)
        await restart.recovery.ready()
        await until(lambda: restart.opened)
        await asyncio.sleep(2 * ASK_AGAIN_S)

    asyncio.run(restarted())
    assert restart.opened == [restart.plan]
    first, second, third = (asked_s for _, asked_s in restart.asked)
    assert min(second - first, third - second) >= ASK_AGAIN_S
    agents = restart.engine.agents
    assert (agents.keys, agents.service, set(agents.nodes)) == (restart.card.keys, "old", {"a"})


@pytest.mark.parametrize("error", [ray.exceptions.ActorDiedError(), ValueError("no such actor")])
def test_an_agent_that_has_died_is_not_asked_again(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    restart = Restart(monkeypatch, "ab")

    def dead(node: str) -> ServiceCard:
        raise error if node == "a" or len(restart.asked) > 2 else TimeoutError

    async def restarted() -> None:
        restart.answer = dead
        await restart.recovery.ready()
        await until(lambda: len(restart.asked) == 3)
        await asyncio.sleep(2 * ASK_AGAIN_S)

    asyncio.run(restarted())
    assert sorted(restart.nodes_asked()) == ["a", "b", "b"]
    assert not restart.engine.agents.silent and not restart.opened


def test_agents_that_do_not_answer_are_asked_again_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    restart = Restart(monkeypatch, "abcde")
    monkeypatch.setattr("ray_ckpt.actors.coordinator.recovery.MAX_ASKED", 2)
    ask, asking, most = restart.engine.agents.ask, 0, 0

    async def count(node: str) -> ServiceCard | None:
        nonlocal asking, most
        asking += 1
        most = max(most, asking)
        await asyncio.sleep(0.01)
        asking -= 1
        return await ask(node)

    async def restarted() -> None:
        restart.answer = no_answer
        await restart.recovery.ready()
        monkeypatch.setattr(restart.engine.agents, "ask", count)
        await until(lambda: len(restart.asked) >= 10)

    asyncio.run(restarted())
    assert most == 2
    assert sorted(restart.nodes_asked()[5:10]) == sorted("abcde"), "each in turn"


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "being opened"])
def test_a_group_that_is_found_late_goes_to_the_run_that_is_open(
    is_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another agent may have reported the run without its group, or a launcher may have opened it."""
    restart = Restart(monkeypatch)

    async def restarted() -> list[Any]:
        restart.answer = no_answer
        await restart.recovery.ready()
        restart.engine.agents._actors["b"], restart.engine.agents.service = SimpleNamespace(), "old"
        restart.answer = lambda node: restart.card
        async with restart.engine.runs.turn(SPEC.key):
            if not is_open:
                await until(lambda: len(restart.asked) == 2)
                await asyncio.sleep(0.1)
            training(restart.engine)
            events = record_events(restart.engine, monkeypatch)
        await until(lambda: events)
        return events

    assert asyncio.run(restarted()) == [GroupFound(plan=restart.plan)]
    assert not restart.opened


def test_a_late_agent_of_another_service_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its group would otherwise be ended, as by another cluster."""
    restart = Restart(monkeypatch)

    async def restarted() -> None:
        restart.answer = no_answer
        await restart.recovery.ready()
        restart.engine.agents._actors["b"] = SimpleNamespace()
        restart.answer = lambda node: restart.card
        await until(lambda: "a" in restart.engine.agents.nodes)
        await asyncio.sleep(0.1)

    asyncio.run(restarted())
    assert not restart.opened and restart.engine.agents.service != "old"


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


FAILED = {"failed": (9, 9), "failed before": (1, 1), "group": (9, 9)}  # the session that an agent reports


@pytest.mark.parametrize("state", ["failed", "failed before", "group", "not failed"])
def test_the_upload_of_a_failed_run_is_requested_again_unless_a_group_has_the_run(
    state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call for the run comes from its launcher, which has given up or is dead."""
    restart = Restart(monkeypatch, "ab")
    failed = OpenedRun(spec=SPEC, run_uid="uid", plan=None, epoch=1, failed=FAILED.get(state))
    opened = replace(failed, failed=None)
    restart.answer = lambda node: replace(restart.card, runs=(failed if node == "a" else opened,))
    events: list[list[Any]] = []  # of each opening

    async def open(spec: RunSpec, **_: Any) -> str:
        story = Harness("ab")
        if state == "failed before":  # the nodes of today's group have not answered yet
            story.open("ab")
            story.open("ab")
            story.start_coordinator()
        training(restart.engine, None if state == "group" else story)
        events.append(record_events(restart.engine, monkeypatch))
        return "uid"

    async def restarted() -> None:
        monkeypatch.setattr(restart.recovery._opener, "open", open)
        await restart.recovery.ready()
        await asyncio.sleep(0.1)

    asyncio.run(restarted())
    (found,) = events
    requests = [replace(event, token="") for event in found]
    finish = m.FinishRequested(token="", ends_group=True, has_failed=True)
    assert requests == ([finish] if state == "failed" else [])


def test_a_failed_run_whose_log_was_deleted_is_left_after_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def take_over(run: OpenedRun, tries: int) -> int:
        monkeypatch.setattr("ray_ckpt.actors.coordinator.recovery.TAKE_OVER_AGAIN_S", 0.0)
        monkeypatch.setattr("ray_ckpt.actors.coordinator.recovery.MAX_FAILED_TRIES", 3)
        engine, opened = make_engine(), 0

        async def open(spec: RunSpec, **_: Any) -> str:
            nonlocal opened
            opened += 1
            if opened > tries:
                return "uid"
            raise StoragePathError("it is not there", path=spec.storage_path)

        recovery = Recovery(engine, cast(RunOpener, SimpleNamespace(open=open)))
        await recovery._take_up(run)
        assert not engine.runs.is_opening
        return opened

    run = OpenedRun(spec=SPEC, run_uid="uid", plan=None, epoch=1)
    assert asyncio.run(take_over(run, 10)) == 11
    assert asyncio.run(take_over(replace(run, failed=(1, 1)), 10)) == 3


def test_a_group_whose_node_was_cut_off_is_told_that_a_newer_one_has_the_run() -> None:
    """Its agent may be alive, and be gone for Ray; so rank 0 asks the coordinator for another one."""

    async def told(session: int, left: tuple[SessionKey, ...] = ()) -> None:
        engine = make_engine()
        run = training(engine)
        plan = run.machine.plan
        assert plan is not None
        run.machine._context.plan = replace(plan, left=left)
        found = OpenedRun(
            spec=SPEC, run_uid=run.run_uid, plan=replace(plan, session=plan.session + session), epoch=1
        )
        recovery = Recovery(engine, RunOpener(engine, lambda: None))
        await recovery.find_group(GroupCard(service=engine.agents.service, run=found))

    with pytest.raises(RunSuperseded, match="A newer training group has opened this run"):
        asyncio.run(told(-1))
    asyncio.run(told(-1, left=((1, 0),)))
    asyncio.run(told(0))


def test_a_signal_to_a_process_of_a_group_that_is_over_changes_nothing() -> None:
    """A process that has closed its Checkpointer may live on, on a node where a later group trains."""

    async def leaving(session: int, left: tuple[SessionKey, ...] = ()) -> frozenset[str]:
        engine = make_engine()
        run = training(engine)
        plan = run.machine.plan
        assert plan is not None
        run.machine._context.plan = replace(plan, left=left)
        key = (plan.epoch, plan.session + session)
        await _coordinator_with(engine).node_preempted("a", Notice("sigterm", "", None), (run.run_uid, key))
        return engine.notices.nodes(run.run_uid)

    assert asyncio.run(leaving(0)) == {"a"}
    assert asyncio.run(leaving(-1)) == frozenset()
    assert asyncio.run(leaving(-1, left=((1, 0),))) == {"a"}, "its group goes on in the later session"


def test_a_notice_of_a_cloud_counts_for_all_runs() -> None:
    async def leaving() -> frozenset[str]:
        engine = make_engine()
        run = training(engine)
        await _coordinator_with(engine).node_preempted("a", Notice("aws", "", None))
        return engine.notices.nodes(run.run_uid)

    assert asyncio.run(leaving()) == {"a"}


def _coordinator_with(engine: Engine) -> Coordinator:
    coordinator = Coordinator()
    coordinator.engine = engine
    return coordinator


def test_what_ray_does_not_find_is_unavailable_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other error would end work of an agent in the background, or the training."""

    def no_answer(name: str, namespace: str) -> None:
        raise ray.exceptions.RaySystemError(f"no answer about {name}")

    engine = make_engine()
    monkeypatch.setattr(ray, "get_actor", no_answer)
    monkeypatch.setattr(RayLink, "_named", lambda link: False)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(waiting, "RECOVER_S", -1.0)
    with pytest.raises(Unavailable):
        asyncio.run(Node("a", engine.agents.keys)._request("overview"))
    assert asyncio.run(OtherAgents().find(["a"])) == {}
    link = RayLink(Joined(run_uid="0" * 32, spec=SPEC, session_key=(1, 1), world_size=1, nodes={0: "a"}), 0)
    link.recover()
    with pytest.raises(Unavailable):
        link.ticket()


def test_a_run_whose_storage_path_is_not_mounted_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The empty mount point gets no folders, in which a later save would be hidden by the mount."""
    engine, mount = make_engine(), tmp_path / "mount"
    mount.mkdir()
    opener = RunOpener(engine, lambda: None)

    async def no_marks(_: RunSpec, *, is_at_work: bool) -> tuple[tuple[RunMark, ...], None]:
        return (), None

    monkeypatch.setattr(opener, "_read_marks", no_marks)
    spec = replace(SPEC, storage_path=str(mount))
    with pytest.raises(StoragePathError, match="is not there any more"):
        asyncio.run(opener.open(spec, owner=None, is_wanted=False))
    assert not list(mount.iterdir()) and not engine.runs.open
