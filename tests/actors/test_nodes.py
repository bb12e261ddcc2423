"""The coordinator's one list of nodes: how often it is read, by whom, and what a run sees of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ray_ckpt.actors import ray_cluster
from ray_ckpt.actors.coordinator import nodes as node_list
from ray_ckpt.actors.coordinator.engine import Engine
from ray_ckpt.actors.coordinator.nodes import NodeList, period_s, seen_by
from ray_ckpt.actors.coordinator.watch import TICK_S, ClusterWatch
from ray_ckpt.actors.messages import RunSpec
from ray_ckpt.config import RunOptions
from ray_ckpt.transport.credentials import ServiceKeys

WALL_S = 1_790_000_000.0
RACK = "rack"
DRAINING = "ray._private.state.state.get_draining_nodes"


class FakeRay:
    """The two calls of Ray from which a reading is made."""

    def __init__(self, num_nodes: int) -> None:
        self.live = [f"node{k:05d}" for k in range(num_nodes)]
        self.draining: dict[str, int] = {}
        self.readings = 0
        self._at_work = self.most_at_work = 0  # readings that have begun and not ended, now and at most
        self.gate = threading.Event()  # readings wait for it
        self.gate.set()

    def nodes(self) -> list[dict[str, Any]]:
        self.readings += 1
        self._at_work += 1
        self.most_at_work = max(self.most_at_work, self._at_work)
        self.gate.wait(10.0)
        self._at_work -= 1
        dead = {"NodeID": "dead", "Alive": False, "Labels": {RACK: "r9"}}
        alive = (
            {"NodeID": node, "Alive": True, "Labels": {RACK: f"r{k % 2}"}} for k, node in enumerate(self.live)
        )
        return [dead, *alive]

    def get_draining_nodes(self) -> dict[str, int]:
        return self.draining


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay(4)
    monkeypatch.setattr("ray.nodes", fake.nodes)
    monkeypatch.setattr(DRAINING, fake.get_draining_nodes)
    return fake


@pytest.fixture
def io() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30.0))


def test_a_tick_reads_the_nodes_once_for_all_runs(fake: FakeRay, tmp_path: Path) -> None:
    async def ticks() -> None:
        engine = Engine(ServiceKeys.make(datetime.now(UTC), encrypt=False))
        for name, domain in (("a", "none"), ("b", RACK), ("c", RACK)):
            options = RunOptions(failure_domain=domain, spare_nodes=f"{RACK}=r1" if name == "b" else "")
            options = replace(options, replica_nodes=options.spare_nodes)
            spec = RunSpec(name=name, storage_path=str(tmp_path), options=options)
            engine.runs.open[spec.key] = engine.new_run(spec)
        watch = ClusterWatch(engine)
        await watch._tick()
        assert fake.readings == 1
        a, b, c = (run.host.nodes._seen for run in engine.runs)
        assert a.live == b.live == c.live == frozenset(fake.live)
        assert set(a.domains.values()) == {""} and set(b.domains.values()) == {"r0", "r1"}
        assert b.domains is c.domains, "runs with the same option share what was computed"
        assert b.spares == {node for node, rack in b.domains.items() if rack == "r1"} and not c.spares
        assert (b.replica_nodes, c.replica_nodes) == (b.spares, c.spares)
        await asyncio.sleep(TICK_S)
        fake.live.pop()
        await watch._tick()
        assert fake.readings == 2, "in a small cluster each tick reads the nodes"
        assert all(run.host.nodes.live == frozenset(fake.live) for run in engine.runs)

    run(ticks())


def test_the_larger_the_cluster_the_rarer_are_readings(fake: FakeRay, io: ThreadPoolExecutor) -> None:
    assert period_s(0) == period_s(100) == TICK_S, "as often as the runs have ticks"
    periods = [period_s(n) for n in (500, 1_000, 2_000, 5_000, 20_000)]
    assert periods == sorted(periods) and period_s(2_000) >= 2.0
    assert period_s(10**6) == node_list.MOST_PERIOD_S
    fake.live = [f"node{k:05d}" for k in range(2_000)]

    async def reads() -> None:
        cluster = NodeList(io)
        first = await cluster.recent()
        await asyncio.sleep(TICK_S)
        assert await cluster.recent() is first and fake.readings == 1
        assert await cluster.now() is not first and fake.readings == 2, "a new group wants all nodes"
        assert await cluster.recent() is not first and fake.readings == 2, "its reading is for all"

    run(reads())


def test_callers_share_a_reading_that_begins_after_their_calls(fake: FakeRay, io: ThreadPoolExecutor) -> None:
    """A reading that has begun may lack a node that joined since: it answers no later call."""

    async def reads() -> None:
        cluster = NodeList(io)
        fake.gate.clear()
        early = asyncio.ensure_future(cluster.now())
        while fake.readings == 0:
            await asyncio.sleep(0.001)
        fake.live.append("new")
        late = [asyncio.ensure_future(cluster.now()) for _ in range(100)]
        for _ in range(3):  # all calls are made, and wait
            await asyncio.sleep(0)
        fake.gate.set()
        await early
        found = await asyncio.gather(*late)
        assert all("new" in nodes.live for nodes in found)
        assert fake.readings == 2 and fake.most_at_work == 1, "readings do not overlap"

    run(reads())


def test_a_failed_reading_fails_its_callers_and_the_next_one_is_tried(
    fake: FakeRay, io: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> dict[str, int]:
        raise ConnectionError("the control store is away")

    async def reads() -> None:
        cluster = NodeList(io)
        with monkeypatch.context() as patch:
            patch.setattr(DRAINING, away)
            with pytest.raises(ConnectionError):
                await cluster.recent()
        assert (await cluster.recent()).live == frozenset(fake.live)

    run(reads())


def test_the_time_until_a_node_goes_is_counted_from_now(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: WALL_S)
    a, b = fake.live[:2]
    fake.draining = {a: int((WALL_S + 30) * 1000), b: 0, "dead": 0}
    nodes, options = ray_cluster.nodes_now(), RunOptions()
    assert seen_by(nodes, options).left_s == {a: 30.0}
    monkeypatch.setattr(time, "time", lambda: WALL_S + 5)
    later = seen_by(nodes, options)
    assert later.left_s == {a: 25.0} and later.draining == {a, b}
