"""A failure in one run, node or report of a coordinator does not reach the others."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ray_ckpt.actors.coordinator import agents as agents_module
from ray_ckpt.actors.coordinator import ports as ports_module
from ray_ckpt.actors.coordinator.opening import RunOpener
from ray_ckpt.actors.coordinator.ports import RayPorts
from ray_ckpt.actors.coordinator.watch import ClusterWatch
from ray_ckpt.actors.messages import AgentCard, GatheredReport
from ray_ckpt.actors.ray_cluster import NodesNow
from ray_ckpt.config import RunOptions
from ray_ckpt.core import messages as m
from ray_ckpt.errors import Fenced, RunInUse, Unavailable
from ray_ckpt.format.names import make_attempt
from ray_ckpt.storage.local import files
from ray_ckpt.storage.remote.tier import RemoteTier
from tests.actors.test_overview import trained
from tests.actors.test_shutdown import SPEC, make_engine, training
from tests.core.driver import Harness


async def alive(owner: str) -> bool:
    return True


def test_a_launcher_that_is_refused_changes_no_option_of_the_run_at_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ray_ckpt.engine.groups.OWNER_GONE_S", 0.0)

    async def run() -> None:
        engine = make_engine()
        at_work = training(engine)
        before = at_work.machine.options
        monkeypatch.setattr(engine, "is_alive", alive)
        other = replace(SPEC, options=RunOptions(keep_last=1, replicas=0))
        with pytest.raises(RunInUse):
            await asyncio.wait_for(RunOpener(engine, lambda: None).open(other, owner="job:other"), 10.0)
        assert at_work.machine.options is before and at_work.spec is SPEC

    asyncio.run(run())


def test_a_run_that_is_lost_while_it_is_opened_does_not_keep_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os._exit", lambda code: None)

    async def run() -> None:
        engine = make_engine()
        at_work = training(engine)
        opener = RunOpener(engine, lambda: None)

        async def is_overtaken(_: Any) -> bool:  # meanwhile the coordinator is fenced
            at_work.host.handle(m.OrderRefused(epoch=99))
            return False

        monkeypatch.setattr(opener, "_is_overtaken", is_overtaken)
        with pytest.raises(Fenced):
            await asyncio.wait_for(opener.open(SPEC, owner="me"), 10.0)
        assert not engine.runs.turn(SPEC.key).locked()

    asyncio.run(run())


def test_a_run_that_had_ended_is_opened_although_agents_still_have_its_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run() -> None:
        engine = make_engine()
        ended = training(engine, Harness())
        nobody = m.NodesSeen(live=frozenset())
        monkeypatch.setattr(RayPorts, "look", lambda _: ended.host.handle(nobody))
        opener = RunOpener(engine, lambda: None)

        async def open_log(*_: object) -> Any:  # the group is not found: its end is in the log
            return ended

        monkeypatch.setattr(opener, "_open_log", open_log)
        del engine.runs.open[SPEC.key]
        opened = opener.open(SPEC, owner=None, is_wanted=False, found=trained().plan)
        await asyncio.wait_for(opened, 10.0)
        assert ended.host.nodes.is_ready

    asyncio.run(run())


def remote(function: Callable[..., Any]) -> SimpleNamespace:
    return SimpleNamespace(remote=function)


def test_a_call_that_hangs_for_one_run_leaves_the_agent_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agents_module, "AGENT_START_S", 0.05)

    async def run() -> None:
        agents = make_engine().agents
        hanging: list[bool] = []

        async def card() -> AgentCard:
            return AgentCard(node_id="a", endpoint="e", staging="")

        async def open_run(order: object) -> None:
            hanging.append(True)
            await asyncio.Event().wait()

        agent = SimpleNamespace(card=remote(card), open_run=remote(open_run))
        monkeypatch.setattr(agents, "start", lambda node: agent)
        assert await agents.request("a", "open_run", None) is None
        assert set(agents.nodes) == {"a"} and hanging == [True]

    asyncio.run(run())


def test_an_error_in_a_run_keeps_no_other_run_from_its_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        engine = make_engine()
        one, other = training(engine), training(engine, spec=replace(SPEC, name="other"))
        seen = asyncio.Event()

        def fail(*_: object) -> None:
            raise AssertionError("a defect")

        async def recent() -> NodesNow:
            return NodesNow(
                live=frozenset("ab"), labels={}, draining=frozenset(), gone_at_s={}, read_s=time.monotonic()
            )

        monkeypatch.setattr(one.host, "handle", fail)
        monkeypatch.setattr(other.host, "handle", lambda *_: seen.set())
        monkeypatch.setattr(engine.agents.cluster, "recent", recent)
        watch = ClusterWatch(engine)
        watch.start()
        await asyncio.wait_for(seen.wait(), 10.0)
        watch.stop()

    asyncio.run(run())


def test_work_on_a_storage_path_that_hangs_holds_up_no_work_of_another_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without its description, no checkpoint of the other run would become durable."""
    reached, may_go = threading.Semaphore(0), threading.Event()

    def delete(tier: RemoteTier, directory: str) -> None:
        if directory == "hangs":
            reached.release()
            may_go.wait(30)

    monkeypatch.setattr(RemoteTier, "delete", delete)

    async def run() -> None:
        engine = make_engine()
        hanging, other = training(engine), training(engine, spec=replace(SPEC, name="other"))
        deleted = asyncio.Event()
        monkeypatch.setattr(hanging.host, "handle", lambda _: None)
        monkeypatch.setattr(other.host, "handle", lambda _: deleted.set())
        try:
            for _ in range(16):
                RayPorts(engine, hanging).start(m.Delete(attempt="a", directory="hangs", place=m.REMOTE))
            for _ in range(4):
                assert await asyncio.to_thread(reached.acquire, timeout=10)
            RayPorts(engine, other).start(m.Delete(attempt="b", directory="works", place=m.REMOTE))
            await asyncio.wait_for(deleted.wait(), 5.0)
        finally:
            may_go.set()

    asyncio.run(run())


def test_an_error_in_a_report_is_the_answer_to_that_report(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    at_work = training(engine)

    def fail(*_: object) -> None:
        raise AssertionError("a defect")

    monkeypatch.setattr(at_work.host, "handle", fail)
    attempt = make_attempt(run_uid=at_work.run_uid, session=1, step=3, attempt=0)
    refused = m.SaveRefused(attempt=attempt, ranks=(0,), reason="busy")
    report = GatheredReport(method="save_refused", arguments=(refused,), waits=False, may_wait_s=0.0)
    answer = engine.take(report)
    assert answer is not None and isinstance(answer.error, Unavailable)


def test_a_record_that_the_store_refuses_has_the_error_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        engine = make_engine()
        at_work = training(engine)
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def refuse(*_: object) -> None:
            raise PermissionError("Operation not permitted: log")

        monkeypatch.setattr(at_work.host, "handle", answered.set_result)
        monkeypatch.setattr(ports_module, "encode_record", lambda _: b"{}")
        monkeypatch.setattr(files, "write_temporary", refuse)
        monkeypatch.setattr(RemoteTier, "missing", lambda _: "")  # its folder is there
        RayPorts(engine, at_work).start(m.Append(record=SimpleNamespace(seq=9)))  # type: ignore[arg-type]
        event = await asyncio.wait_for(answered, 10.0)
        assert (event.outcome, event.reason[:28]) == ("unknown", "Operation not permitted: log")

    asyncio.run(run())


@pytest.mark.parametrize("failing", ["create_record", "encode_record"])
def test_an_unexpected_error_of_an_append_is_an_answer_to_it(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    async def run() -> None:
        engine = make_engine()
        at_work = training(engine)
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def fail(*_: object) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(at_work.host, "handle", answered.set_result)
        monkeypatch.setattr(ports_module, "encode_record", lambda _: b"")
        monkeypatch.setattr(ports_module, failing, fail)
        RayPorts(engine, at_work).start(m.Append(record=SimpleNamespace(seq=9)))  # type: ignore[arg-type]
        event = await asyncio.wait_for(answered, 10.0)
        assert event.outcome == "unknown"

    asyncio.run(run())
