"""Times of a launch and of connections, which clients send to the service; no cluster is needed."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
import ray

from ray_ckpt.actors import client
from ray_ckpt.actors.client import open_group
from ray_ckpt.actors.live_run import LiveRun
from ray_ckpt.actors.messages import Joined, RunSpec
from ray_ckpt.actors.names import COORDINATOR, PROTOCOL_VERSION, agent_name
from ray_ckpt.actors.rank_link import RayLink
from ray_ckpt.config import RunOptions
from ray_ckpt.core.log_requests import MAX_OWNER
from ray_ckpt.core.values import RankProgress
from ray_ckpt.errors import ConfigError, Unavailable
from ray_ckpt.restore.reader import RestoreTicket
from ray_ckpt.trainer import waiting
from ray_ckpt.types import GroupPart, LaunchTimes, RankRestore
from tests.core.test_node_machine import attempt

SPEC = RunSpec(name="run", storage_path="/runs", options=RunOptions())
JOINED = Joined(run_uid="0" * 32, spec=SPEC, session_key=(1, 7), world_size=1, nodes={0: "a"})


class Actor:
    """A handle whose calls are recorded by method; their answers are None."""

    def __init__(self) -> None:
        self.calls: dict[str, tuple[Any, ...]] = {}

    def __getattr__(self, method: str) -> Any:
        def remote(*args: Any) -> Any:
            self.calls[method] = args
            answer: Future[None] = Future()
            answer.set_result(None)
            return SimpleNamespace(future=lambda: answer)

        return SimpleNamespace(remote=remote)


def test_the_times_of_a_launch_are_sent_to_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    actor, launch = Actor(), LaunchTimes(noticed_at_s=1.0, started_at_s=2.0)
    monkeypatch.setattr(client, "coordinator", lambda: actor)
    monkeypatch.setattr(client, "get_result", lambda call, timeout_s: None)
    open_group(SPEC, ["a", "b"], owner="me", launch=launch)
    assert actor.calls["open_group"][-2:] == ("me", launch)


def test_a_rank_reports_when_it_was_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RayLink, "_named", lambda link: False)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    before_s = time.time()
    link = RayLink(replace(JOINED, world_size=2, nodes={0: "a", 1: "b"}), 1)
    after_s = time.time()
    link._handle = actor = Actor()
    link.restored((1, 7), RankRestore(rank=1, seconds=2.0)).result(1.0)
    _, session_key, report, _ = actor.calls["report_restored"]
    assert (session_key, report.rank, report.seconds) == ((1, 7), 1, 2.0)
    assert before_s <= report.connected_at_s <= after_s


def test_no_call_without_ray_starts_another_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray begins with `ray.init()` in a process that calls an actor without being connected."""

    def init(*args: Any, **options: Any) -> NoReturn:
        pytest.fail("a cluster would be started")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr("ray._private.auto_init_hook.auto_init_ray", init)
    link = RayLink(JOINED, 0)
    for handle in (None, Actor()):
        link._handle = handle
        link.progress((1, 1), RankProgress(step=1, saved_step=0))
        link.skip(attempt(10), "no room")
        link.recover()
        with pytest.raises(Unavailable, match="has left its Ray cluster"):
            link.signal_page()
    monkeypatch.setattr("ray_ckpt.actors.ray_cluster.find_cluster", lambda: None)
    with pytest.raises(ConfigError, match="no Ray cluster on this machine"):
        LiveRun("/runs/run")


def test_calls_of_a_restore_are_made_again_to_the_next_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """P7: an agent that dies in a restore costs a moment."""
    monkeypatch.setattr(waiting, "RECOVER_POLL_S", 0.0)
    dead = ray.exceptions.RayActorError()
    ticket = RestoreTicket(session_key=(1, 1), checkpoint=None)
    answers: list[Any] = [dead, dead, ticket]

    def get(call: Any, timeout: float | None) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    found: list[str] = []

    def get_actor(name: str, namespace: str) -> Actor:
        found.append(name)
        return Actor()

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(RayLink, "_named", lambda link: False)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    link = RayLink(JOINED, 0)
    assert link.ticket() is ticket and not answers
    assert found.count(agent_name("a")) == 3 and found.count(COORDINATOR) == 2

    answers = [ray.exceptions.RayTaskError("get_ticket", "trace", ValueError("a bug"))]
    with pytest.raises(Unavailable, match="trace"):
        link.ticket()


def _unknown(name: str) -> NoReturn:
    raise ValueError(name)


@pytest.mark.parametrize("limit_s", [60.0, 0.0])
def test_a_finish_is_requested_again_from_a_coordinator_that_ray_restarts(
    limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may die in the upload of the last checkpoint, which the end of the launcher would end."""
    monkeypatch.setattr(client, "AGAIN_S", 0.001)
    actor, newest = Actor(), object()
    dead, restarting = ray.exceptions.RayActorError(), ray.exceptions.ActorUnavailableError("restarts", None)
    answers: list[Any] = [dead, restarting, newest]

    def get(call: Any, timeout: float) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    names = ["coordinator"]  # of actors that Ray knows
    monkeypatch.setattr(client, "coordinator", lambda: actor)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: names[0] if names else _unknown(name))
    spec = replace(SPEC, options=RunOptions(finish_timeout_s=limit_s))
    if limit_s:
        assert client.finish_run(spec, owner="driver") is newest
        key, left_s, _, owner = actor.calls["finish"]
        assert (key, owner) == (SPEC.key, "driver") and 0.0 < left_s < limit_s
        answers = [dead, None]
        client.salvage(spec)
        assert not answers
        answers, names = [dead, newest], []
        with pytest.raises(Unavailable):
            client.finish_run(spec, owner="driver")
        assert answers == [newest], "a service that was stopped is not started again"
    else:
        with pytest.raises(Unavailable):
            client.finish_run(spec, owner="driver")
        answers = [ray.exceptions.RayTaskError("finish", "trace", Unavailable("not uploaded"))]
        with pytest.raises(Unavailable, match="not uploaded"):
            client.finish_run(SPEC, owner="driver")


@pytest.mark.parametrize("opens", ["run", "group", "part"])
@pytest.mark.parametrize("num_deaths", [1, 2, 5])
def test_runs_and_groups_are_opened_by_a_coordinator_that_ray_restarts(
    opens: str, num_deaths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it dies before it has answered the first call, which asks for its version."""
    monkeypatch.setattr(client, "AGAIN_S", 0.001)
    actor, joined = Actor(), object()
    deaths: list[object] = [ray.exceptions.RayActorError() for _ in range(num_deaths)]
    last = [None] if opens == "run" else [None, joined]
    answers: list[Any] = [PROTOCOL_VERSION, deaths.pop(), *deaths, PROTOCOL_VERSION, *last]

    def get(call: Any, timeout: float) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: actor)
    if opens == "run":
        assert client.open_run("run", "/runs", RunOptions(), owner="me") == SPEC
    elif opens == "group":
        assert open_group(SPEC, ["a"], owner="me") is joined
    else:
        parts = (GroupPart(name="p", world_size=1), GroupPart(name="q", world_size=1))
        assert client.open_part(SPEC, parts, "p", ["a"], owner="me") is joined
        assert actor.calls["open_part"] == (SPEC.key, parts, "p", ("a",), "auto", "me")
    assert not answers


def test_a_group_is_not_opened_for_ever_without_a_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[object] = []

    def get(call: Any, timeout: float) -> Any:
        tries.append(call)
        raise ray.exceptions.RayActorError

    monkeypatch.setattr(client, "AGAIN_S", 0.001)
    monkeypatch.setattr(client, "OPEN_S", 0.1)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: Actor())
    start_s = time.monotonic()
    with pytest.raises(Unavailable):
        open_group(SPEC, ["a"], owner="me")
    assert len(tries) > client.OPEN_TRIES and time.monotonic() - start_s < 10.0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"owner": ""}, "The owner is not a valid name. Give as owner"),
        ({"owner": "a\nb"}, "The owner is not a valid name"),
        ({"owner": "x" * (MAX_OWNER + 1)}, "The owner is not a valid name"),
        ({"owner": 7}, "The owner is not a valid name"),
        ({"expires_in_s": 0}, "expires_in_s is 0. Set it to a number of seconds above 0"),
        ({"expires_in_s": float("nan")}, "expires_in_s is nan"),
        ({"expires_in_s": float("inf")}, "expires_in_s is inf"),
        ({"expires_in_s": "1d"}, "expires_in_s is '1d'"),
        ({"step": "10"}, "The step is '10', which is not an integer"),
        ({"step": True}, "The step is True, which is not an integer"),
    ],
)
def test_a_wrong_pin_is_refused_before_it_is_sent(
    monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], message: str
) -> None:
    actor = Actor()
    monkeypatch.setattr(client, "coordinator", lambda: actor)
    monkeypatch.setattr(client, "get_result", lambda call, timeout_s: None)
    good: dict[str, Any] = {"run": "gpt", "storage_path": "/runs", "step": 10, "owner": "me"}
    with pytest.raises(ConfigError) as caught:
        client.pin(**good | wrong)
    assert message in str(caught.value) and not actor.calls
    client.pin(**good | {"step": np.int64(10), "expires_in_s": np.float32(5)})
    client.pin(**good)
    client.unpin(**good | {"owner": ""})  # an older version may have made it
    assert actor.calls["pin"][1:] == (10, "me", None) and actor.calls["unpin"][1:] == (10, "")
