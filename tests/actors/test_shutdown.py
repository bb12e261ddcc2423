"""When the coordinator may end a run, its session, or the service."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ray_ckpt import telemetry
from ray_ckpt.actors import ray_cluster
from ray_ckpt.actors.coordinator.actor import Coordinator
from ray_ckpt.actors.coordinator.engine import Engine
from ray_ckpt.actors.coordinator.gauges import Gauges
from ray_ckpt.actors.coordinator.launchers import OWNER_DEAD_S, Launchers
from ray_ckpt.actors.coordinator.run import Run
from ray_ckpt.actors.coordinator.runs import Runs
from ray_ckpt.actors.coordinator.watch import ClusterWatch
from ray_ckpt.actors.messages import RunSpec
from ray_ckpt.config import RunOptions
from ray_ckpt.core import messages as m
from ray_ckpt.errors import Unavailable
from ray_ckpt.telemetry import Sample
from ray_ckpt.transport.credentials import ServiceKeys
from tests.actors.test_overview import service, trained, view_of

SPEC = RunSpec(name="gpt", storage_path="/shared/runs", options=RunOptions())


def make_engine(run: Run | None = None) -> Engine:
    async def restart_agent(node: str) -> None:
        raise AssertionError(node)

    engine = Engine(ServiceKeys.make(datetime.now(UTC), encrypt=False), restart_agent)
    if run is not None:
        engine.runs.open[run.spec.key] = run
    return engine


def training() -> Run:
    run = Run(SPEC, "east")
    run.machine = trained().machine
    return run


def test_a_group_that_opens_during_the_overview_keeps_the_service() -> None:
    runs, run = Runs(), training()
    runs.open[SPEC.key] = run
    assert runs.newcomers(service()) == ("run gpt is being opened",)
    view = view_of(trained())
    assert view.owner == run.machine.view.owner
    assert runs.newcomers(service(replace(view, where=SPEC.key))) == ()


def test_a_launcher_that_waits_for_agents_keeps_the_service_until_it_is_answered() -> None:
    runs = Runs()
    with runs.in_use("gpt"):
        with runs.in_use("gpt"):
            assert runs.newcomers(service()) == ("run gpt is being opened",)
        assert runs.newcomers(service()) == ("run gpt is being opened",)
    assert runs.newcomers(service()) == () and not runs._users


def test_a_finished_run_is_reported_for_a_while_and_a_run_that_continues_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An alert looks for runs that trained a quarter of an hour ago and no longer report."""
    reported: list[float] = []
    now_s = 1e6
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    run = training()
    engine = make_engine(run)
    gauges = Gauges(engine)
    run.goodput_s = math.inf

    def record(name: str, sample: Sample) -> None:
        if sample.metric is telemetry.ACTIVE:
            reported.append(sample.value)

    monkeypatch.setattr(engine.meters, "record", record)
    gauges.set_due()
    assert reported == [1.0]
    reported.clear()
    run.machine._finishing.end_cause = "finished"
    for _ in range(40):
        now_s += 60.0
        gauges.set_due()
    assert set(reported) == {2.0} and 15 < len(reported) <= 20
    reported.clear()
    run.machine._finishing.end_cause = None
    now_s += 60.0
    gauges.set_due()
    run.machine._finishing.end_cause = "finished"
    now_s += 60.0
    gauges.set_due()
    assert reported == [1.0, 2.0]


def test_a_launcher_that_stays_dead_has_its_session_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[m.Event] = []
    lives, now_s = True, 100.0
    monkeypatch.setattr(ray_cluster, "is_alive", lambda owner: lives)
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(ray_cluster, "is_controller", lambda owner: bool(owner))
    run = training()
    engine = make_engine(run)
    launchers = Launchers(engine)
    monkeypatch.setattr(engine, "handle", lambda run, event: reported.append(event))

    def look(at_s: float) -> int:
        nonlocal now_s
        now_s = at_s
        asyncio.run(launchers.check_all())
        return len(reported)

    assert look(100.0) == 0
    lives = False
    assert look(110.0) == look(110.0 + OWNER_DEAD_S - 1) == 0
    assert look(110.0 + OWNER_DEAD_S) == 1
    assert reported == [m.OwnerDied(owner=run.machine.view.owner)]
    assert not run.machine.view.end_cause
    lives = True  # another launcher of this name, say
    assert look(200.0) == 1
    lives = False
    assert look(300.0) == 1


def test_agents_release_a_run_once_it_has_ended_however_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launcher may have gone when its last checkpoint became durable."""
    sent: list[tuple[str, str]] = []
    harness, run = trained(), Run(SPEC, "east")
    run.machine, run.is_ready, run.opened = harness.machine, True, {"a", "b"}
    engine = make_engine(run)
    watch = ClusterWatch(engine, Launchers(engine))
    monkeypatch.setattr(engine, "handle", lambda run, event: None)
    monkeypatch.setattr(engine, "send", lambda run, node, method, *args: sent.append((node, method)))
    seen = ray_cluster.NodesNow(live=("a", "b"), draining=frozenset(), left_s={}, domains={})

    watch.tick_run(run, seen)
    effects = [*harness.save(10), *harness.feed(m.FinishRequested(token="end", ends_group=True))]
    watch.tick_run(run, seen)
    assert not sent
    harness.drain_all(effects)
    watch.tick_run(run, seen)
    watch.tick_run(run, seen)
    assert sorted(sent) == [("a", "release_run"), ("b", "release_run")]
    harness.open("ab")
    watch.tick_run(run, seen)
    assert not run.is_released


@pytest.mark.parametrize("is_saved", [False, True])
def test_the_error_of_a_run_that_cannot_end_names_the_cause(is_saved: bool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    spec = RunSpec(name="gpt", storage_path=str(tmp_path / "file"), options=RunOptions())  # takes no records
    coordinator, run, harness = Coordinator(), Run(spec, "east"), trained()
    if is_saved:
        harness.save(10)
    run.machine = harness.machine
    coordinator._engine.runs.open[spec.key] = run
    reported = "last checkpoint is not on the storage path" if is_saved else "log takes no records"
    with pytest.raises(Unavailable, match=reported):
        asyncio.run(coordinator.finish(spec.key, 0.1, False))


def test_a_service_that_ends_takes_no_group() -> None:
    coordinator = Coordinator()
    coordinator._engine.runs.open[SPEC.key] = training()
    coordinator._engine.runs.is_ending = True
    for call in (coordinator.open_run(SPEC, "me"), coordinator.open_group(SPEC.key, (), "auto", "me")):
        with pytest.raises(Unavailable, match="being stopped"):
            asyncio.run(call)
