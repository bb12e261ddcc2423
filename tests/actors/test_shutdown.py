"""Conditions under which the coordinator ends a run, its session, or the service."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from ray_ckpt import telemetry
from ray_ckpt.actors.coordinator import engine as coordinator_engine
from ray_ckpt.actors.coordinator.actor import Coordinator
from ray_ckpt.actors.coordinator.engine import Engine
from ray_ckpt.actors.coordinator.gauges import Gauges
from ray_ckpt.actors.coordinator.run import Run
from ray_ckpt.actors.coordinator.runs import Runs
from ray_ckpt.actors.messages import RunSpec
from ray_ckpt.config import RunOptions
from ray_ckpt.errors import Unavailable
from ray_ckpt.telemetry import Sample
from ray_ckpt.transport.credentials import ServiceKeys
from tests.actors.test_overview import service, trained, view_of
from tests.core.driver import START_S, Harness

SPEC = RunSpec(name="gpt", storage_path="/shared/runs", options=RunOptions())


def make_engine() -> Engine:
    return Engine(ServiceKeys.make(datetime.now(UTC), encrypt=False))


def training(engine: Engine, harness: Harness | None = None, spec: RunSpec = SPEC) -> Run:
    """Return an open run with the machine of a harness, by default one whose group trains."""
    run = engine.new_run(spec)
    run.host.machine = (harness or trained()).machine
    engine.runs.open[spec.key] = run
    return run


def test_a_group_that_opens_during_the_overview_keeps_the_service() -> None:
    engine = make_engine()
    runs, run = engine.runs, training(engine)
    assert runs.objections(service(), START_S) == ("run gpt is training on 2 rank(s)",)
    gone = replace(view_of(trained(), owner_lives=False), where=SPEC.key)
    assert run.machine.view.owner == gone.owner
    assert runs.objections(service(gone), START_S) == ()
    assert runs.objections(service(replace(gone, owner="another")), START_S)


def test_a_launcher_that_waits_for_agents_keeps_the_service_until_it_is_answered() -> None:
    runs = Runs()
    with runs.in_use("gpt"):
        with runs.in_use("gpt"):
            assert runs.objections(service(), START_S) == ("run gpt is being opened",)
        assert runs.objections(service(), START_S) == ("run gpt is being opened",)
    assert runs.objections(service(), START_S) == ()


def test_a_finished_run_with_a_needed_checkpoint_on_nodes_only_keeps_the_service() -> None:
    engine, harness = make_engine(), trained()
    run = training(engine, harness)
    view = replace(view_of(harness), needed_in_cluster=(10,))
    engine.runs.put_away(run, view)
    assert engine.runs.objections(service(), START_S) == ("run gpt has step 10 in the cluster only",)


def test_a_finished_run_is_reported_for_a_while_and_a_run_that_continues_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An alert looks for runs that trained a quarter of an hour ago and no longer report."""
    reported: list[float] = []
    now_s = 1e6
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    engine = make_engine()
    run = training(engine)
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


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_run_that_was_opened_again_here_does_not_end_the_process(
    is_replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploads of the old one may still end, and its record finds that of the new one."""
    exits: list[int] = []
    monkeypatch.setattr(coordinator_engine, "EXIT_AFTER_S", 0.0)
    monkeypatch.setattr(coordinator_engine, "os", SimpleNamespace(_exit=exits.append))

    async def story() -> None:
        engine = make_engine()
        run = training(engine)
        current = training(engine) if is_replaced else None
        engine.drop(run, ends_process=True)
        await asyncio.sleep(0.01)
        assert engine.runs.open.get(SPEC.key) is current

    asyncio.run(story())
    assert exits == ([] if is_replaced else [1])


@pytest.mark.parametrize("is_saved", [False, True])
def test_the_error_of_a_run_that_cannot_end_names_the_cause(is_saved: bool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    spec = RunSpec(name="gpt", storage_path=str(tmp_path / "file"), options=RunOptions())  # takes no records
    coordinator, harness = Coordinator(), trained()
    if is_saved:
        harness.save(10)
    training(coordinator.engine, harness, spec)
    reported = "last checkpoint is not on the storage path" if is_saved else "log takes no records"
    with pytest.raises(Unavailable, match=reported):
        asyncio.run(coordinator.finish(spec.key, 0.1, False))


def test_a_service_that_ends_takes_no_group() -> None:
    coordinator = Coordinator()
    training(coordinator.engine)
    coordinator.engine.runs.is_ending = True
    for call in (coordinator.open_run(SPEC, "me"), coordinator.open_group(SPEC.key, (), "auto", "me")):
        with pytest.raises(Unavailable, match="being stopped"):
            asyncio.run(call)
