"""How often the coordinator reads the disks of its nodes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from ray_ckpt.actors.coordinator.disks import (
    IDLE_EVERY_S,
    LOOK_EVERY_S,
    MAX_AT_A_TICK,
    DiskReadings,
    read_disk,
)
from ray_ckpt.actors.coordinator.engine import Engine
from ray_ckpt.actors.coordinator.run import Run
from ray_ckpt.actors.coordinator.status import StatusReader
from ray_ckpt.actors.coordinator.watch import TICK_S
from ray_ckpt.actors.messages import PassedAnswers, PassedOrder
from ray_ckpt.core import messages as m
from ray_ckpt.core.values import DiskSpace
from ray_ckpt.format import records as r
from tests.actors.test_overview import trained
from tests.actors.test_shutdown import SPEC, make_engine, training
from tests.core.driver import Harness

SIZE = 10_000


def test_an_agent_that_is_found_dead_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a node without ranks nothing else may notice its death."""
    restarted: list[str] = []

    async def restart(node: str) -> None:
        restarted.append(node)

    def died(run_uid: str) -> None:
        raise ray.exceptions.ActorDiedError

    async def look() -> None:
        engine = make_engine()
        run = training(engine)
        monkeypatch.setattr(engine, "restart_agent", restart)
        run.host.nodes.opened = frozenset("a")
        for node in "ab":
            engine.agents._actors[node] = SimpleNamespace(disk=SimpleNamespace(remote=died))
            await read_disk(engine, run, node, 60.0)
        await read_disk(engine, run, "not here", 60.0)
        await asyncio.sleep(0)  # the restarts that were begun

    asyncio.run(look())
    assert restarted == ["a"]


class Nodes:
    """Agents of a run that answer how much of their disks is free, and readings for a while."""

    def __init__(self, engine: Engine, *runs: Run, num_nodes: int) -> None:
        self.names = [f"n{k:05d}" for k in range(num_nodes)]
        self.free = dict.fromkeys(self.names, SIZE // 2)
        self.readings = Counter[tuple[str, str]]()  # by run uid and node
        self.calls = self.most = 0  # all calls of the coordinator; the most of one tick
        self._due, self._now_s = DiskReadings(engine), 1e6
        for name in self.names:
            disk, pass_on = (SimpleNamespace(remote=x) for x in (self._disk_of(name), self._pass_on))
            engine.agents._actors[name] = SimpleNamespace(disk=disk, pass_on=pass_on)
        for run in runs:
            run.host.nodes.opened = frozenset(self.names)

    def _disk_of(self, name: str) -> Callable[[str], Awaitable[DiskSpace]]:
        async def disk(run_uid: str) -> DiskSpace:
            self.readings[run_uid, name] += 1
            self.calls += 1
            return DiskSpace(free_bytes=self.free[name], total_bytes=SIZE)

        return disk

    async def _pass_on(self, name: str, orders: tuple[PassedOrder, ...]) -> PassedAnswers:
        (order,) = orders
        values = {number: await self._disk_of(node)(*order.arguments) for number, node in order.nodes}
        self.calls -= len(values) - 1
        return PassedAnswers(values=values)

    async def wait(self, seconds: float) -> Counter[tuple[str, str]]:
        """Return the readings of this time."""
        self.readings.clear()
        for _ in range(round(seconds / TICK_S)):
            before = self.calls
            self._due.begin_due(self._now_s)
            self._now_s += TICK_S
            for _ in range(4):
                await asyncio.sleep(0)
            self.most = max(self.most, self.calls - before)
        return Counter(self.readings)


def idle() -> Harness:
    """Return a run whose group has ended without finishing it."""
    run = trained()
    run.feed(m.FinishRequested(token="end", ends_group=True, has_failed=True))
    assert run.machine.view.is_idle
    return run


def test_in_a_small_cluster_each_disk_is_read_every_ten_seconds() -> None:
    async def reads() -> None:
        engine = make_engine()
        run = training(engine)
        nodes = Nodes(engine, run, num_nodes=10)
        assert set((await nodes.wait(TICK_S)).values()) == {1}, "at once"
        assert run.disks == run.seen_disks and run.disks.keys() == set(nodes.names)
        await nodes.wait(LOOK_EVERY_S - TICK_S)
        assert set((await nodes.wait(10 * LOOK_EVERY_S)).values()) == {10}
        del engine.agents._actors["n00003"]
        await nodes.wait(2 * LOOK_EVERY_S)
        assert "n00003" not in run.seen_disks

    asyncio.run(reads())


def test_in_a_large_cluster_each_disk_has_its_turn_and_the_fullest_are_read_as_often_as_ever() -> None:
    async def reads() -> None:
        engine = make_engine()
        run = training(engine)
        nodes = Nodes(engine, run, num_nodes=1_000)
        nodes.free["n00777"] = 1
        first = await nodes.wait(1_000 * TICK_S / MAX_AT_A_TICK + LOOK_EVERY_S)
        assert len(first) == 1_000 and nodes.most <= MAX_AT_A_TICK
        later = await nodes.wait(10 * LOOK_EVERY_S)
        assert later.total() <= MAX_AT_A_TICK * 10 * LOOK_EVERY_S / TICK_S
        assert later[run.run_uid, "n00777"] >= 9 and len(later) == 1_000

    asyncio.run(reads())


def test_with_relays_one_call_reads_the_disks_of_many_nodes() -> None:
    async def reads() -> None:
        engine = make_engine()
        engine.relay_nodes = 64
        run = training(engine)
        nodes = Nodes(engine, run, num_nodes=1_000)
        nodes.free["n00777"] = 1
        first = await nodes.wait(16 * TICK_S)
        assert len(first) == len(run.seen_disks) == 1_000 and nodes.calls == 16
        assert run.seen_disks["n00777"].free_bytes == 1
        later = await nodes.wait(10 * LOOK_EVERY_S)
        assert set(later.values()) == {10}, "all are read again, each time"

    asyncio.run(reads())


def test_disks_of_an_idle_run_are_read_rarely_and_runs_share_the_readings() -> None:
    async def reads() -> None:
        engine = make_engine()
        busy = training(engine)
        quiet = training(engine, idle(), replace(SPEC, name="quiet"))
        quiet.host.machine.history.run_uid = "quiet"
        nodes = Nodes(engine, busy, quiet, num_nodes=3)
        await nodes.wait(LOOK_EVERY_S)
        found = await nodes.wait(2 * IDLE_EVERY_S)
        assert {found["quiet", node] for node in nodes.names} == {2}
        assert {found[busy.run_uid, node] for node in nodes.names} == {2 * IDLE_EVERY_S / LOOK_EVERY_S}

    asyncio.run(reads())


def unsettled() -> Harness:
    """Return a run without a group that has a record left to write, as while the storage path is away."""
    run = idle()
    run.machine._context.ledger.append(r.Collected(attempt="x"))
    assert not run.machine.view.has_group and not run.machine.view.is_idle
    return run


@pytest.mark.parametrize("quiet", [idle, unsettled])
@pytest.mark.parametrize("relay_nodes", [0, 64])
def test_many_runs_without_a_group_do_not_delay_a_run_at_work(
    quiet: Callable[[], Harness], relay_nodes: int
) -> None:
    async def reads() -> None:
        engine = make_engine()
        engine.relay_nodes = relay_nodes
        harness = quiet()
        others = [training(engine, harness, replace(SPEC, name=f"quiet{k:03}")) for k in range(300)]
        busy = training(engine)
        harness.machine.history.run_uid = "quiet"
        nodes = Nodes(engine, *others, busy, num_nodes=3)
        found = await nodes.wait(TICK_S)
        assert {found[busy.run_uid, node] for node in nodes.names} == {1}, "at once"
        await nodes.wait(LOOK_EVERY_S - TICK_S)
        found = await nodes.wait(5 * LOOK_EVERY_S)
        assert {found[busy.run_uid, node] for node in nodes.names} == {5}
        assert all(run.seen_disks.keys() == set(nodes.names) for run in others), "each has its turn"

    asyncio.run(reads())


@pytest.mark.parametrize(("num_nodes", "num_read"), [(3, 3), (1_000, 0)])
def test_status_reads_the_disks_of_an_idle_run_of_few_nodes(num_nodes: int, num_read: int) -> None:
    async def reads() -> None:
        engine = make_engine()
        run = training(engine, idle())
        nodes = Nodes(engine, run, num_nodes=num_nodes)
        reader: Any = StatusReader(engine)
        await reader._view(run)
        assert nodes.readings.total() == len(run.seen_disks) == num_read

    asyncio.run(reads())
