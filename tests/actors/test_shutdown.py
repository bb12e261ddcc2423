"""What keeps the coordinator from ending the service."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ray_ckpt import telemetry
from ray_ckpt.actors import ray_cluster as ray_state
from ray_ckpt.actors.coordinator.actor import OWNER_DEAD_S, Coordinator
from ray_ckpt.actors.coordinator.run import Run
from ray_ckpt.actors.messages import RunSpec, ServiceView
from ray_ckpt.config import RunOptions
from ray_ckpt.core import messages as m
from ray_ckpt.errors import Unavailable
from ray_ckpt.telemetry import Sample
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


def test_a_finished_run_is_told_of_for_a_while_and_one_that_goes_on_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An alert looks for runs that trained a quarter of an hour ago and of which nothing is heard."""
    reported: list[float] = []
    now_s = 1e6
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    coordinator, run = at_work()
    run.goodput_s = math.inf

    def record(name: str, sample: Sample) -> None:
        if sample.metric is telemetry.ACTIVE:
            reported.append(sample.value)

    monkeypatch.setattr(coordinator._meters, "record", record)
    coordinator._set_gauges()
    assert reported == [1.0]
    reported.clear()
    run.machine._end_cause = "finished"
    for _ in range(40):
        now_s += 60.0
        coordinator._set_gauges()
    assert set(reported) == {2.0} and 15 < len(reported) <= 20
    reported.clear()
    run.machine._end_cause = None
    now_s += 60.0
    coordinator._set_gauges()
    run.machine._end_cause = "finished"
    now_s += 60.0
    coordinator._set_gauges()
    assert reported == [1.0, 2.0]


def test_a_launcher_that_stays_dead_has_its_session_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[m.Event] = []
    lives, now_s = True, 100.0
    monkeypatch.setattr(ray_state, "is_alive", lambda owner: lives)
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(ray_state, "is_controller", lambda owner: bool(owner))
    coordinator, run = at_work()
    monkeypatch.setattr(coordinator, "_handle", lambda run, event: reported.append(event))

    def look(at_s: float) -> int:
        nonlocal now_s
        now_s = at_s
        asyncio.run(coordinator._check_owners())
        return len(reported)

    assert look(100.0) == 0
    lives = False
    assert look(110.0) == look(110.0 + OWNER_DEAD_S - 1) == 0
    assert look(110.0 + OWNER_DEAD_S) == 1
    assert reported == [m.OwnerDied(owner=run.machine.owner)]
    assert not run.machine.end_cause
    lives = True  # another launcher of this name, say
    assert look(200.0) == 1
    lives = False
    assert look(300.0) == 1


def test_agents_rest_once_the_run_has_ended_however_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launcher may have gone when its last checkpoint became durable."""
    sent: list[tuple[str, str]] = []
    coordinator, run = Coordinator(), Run(SPEC, "east")
    harness = trained()
    run.machine, run.is_ready, run.opened = harness.machine, True, {"a", "b"}
    coordinator._runs[SPEC.key] = run
    monkeypatch.setattr(coordinator, "_handle", lambda run, event: None)
    monkeypatch.setattr(coordinator, "_send", lambda run, node, method, *args: sent.append((node, method)))
    seen = ray_state.NodesNow(live=("a", "b"), draining=frozenset(), left_s={}, domains={})

    coordinator._tick_run(run, seen)
    effects = [*harness.save(10), *harness.tell(m.FinishRequested(token="end", ends_group=True))]
    coordinator._tick_run(run, seen)
    assert not sent
    harness.drain_all(effects)
    coordinator._tick_run(run, seen)
    coordinator._tick_run(run, seen)
    assert sorted(sent) == [("a", "rest"), ("b", "rest")]
    harness.open("ab")
    coordinator._tick_run(run, seen)
    assert not run.is_resting


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_run_that_cannot_end_says_what_it_waits_for(is_saved: bool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    spec = RunSpec(name="gpt", storage_path=str(tmp_path / "file"), options=RunOptions())  # takes no records
    coordinator, run, harness = Coordinator(), Run(spec, "east"), trained()
    if is_saved:
        harness.save(10)
    run.machine = harness.machine
    coordinator._runs[spec.key] = run
    reported = "last checkpoint is not on the storage path" if is_saved else "log takes no records"
    with pytest.raises(Unavailable, match=reported):
        asyncio.run(coordinator.finish(spec.key, 0.1, False))


def test_a_service_that_ends_takes_no_group() -> None:
    coordinator, _ = at_work()
    coordinator._is_ending = True
    for call in (coordinator.open_run(SPEC, "me"), coordinator.open_group(SPEC.key, (), "auto", "me")):
        with pytest.raises(Unavailable, match="being stopped"):
            asyncio.run(call)
