"""Arguments of `connect` that cannot be, refused before Ray is used."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray

from ray_ckpt.actors import connecting
from ray_ckpt.actors.connecting import begin_connect, connect
from ray_ckpt.errors import ConfigError
from ray_ckpt.preemption.notice import Notice
from ray_ckpt.preemption.sigterm import TermSignal


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_late() -> None:
        raise AssertionError("Ray is used")

    monkeypatch.setattr(ray, "get_runtime_context", too_late)


@pytest.mark.parametrize("begin", [connect, begin_connect])
@pytest.mark.parametrize(("rank", "world_size"), [(3, 1), (2, 2), (-1, 1), (0, 0)])
def test_a_rank_outside_of_the_group_is_refused(
    begin: Callable[..., object], rank: int, world_size: int, tmp_path: Path
) -> None:
    """A program that gives `rank` and forgets `world_size` has the first pair."""
    with pytest.raises(ConfigError, match=f"rank {rank} of {world_size}") as caught:
        begin(run="gpt", storage_path=str(tmp_path), rank=rank, world_size=world_size)
    assert "world_size" in caught.value.hint


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": "0"}, "rank is '0', which is not an integer. Give an int, such as rank=int(os.environ"),
        ({"world_size": 1.0}, "world_size is 1.0, which is not an integer."),
        ({"rank": True, "world_size": 2}, "rank is True, which is not an integer."),
        ({"part": "actor"}, "part is 'actor', and parts is not set. Give all processes the same `parts`"),
        ({"part": "actor", "parts": ["actor"]}, "parts is ['actor']. Give"),
        ({"part": "actor", "parts": {"actor": "1"}}, "parts is {'actor': '1'}. Give"),
        ({"part": "the actor", "parts": {"the actor": 1}}, "parts is {'the actor': 1}. Give"),
        ({"part": 1, "parts": {1: 1}}, "parts is {1: 1}. Give"),
        (
            {"part": "actor", "parts": {"actor": 2}},
            "part 'actor' with 1 ranks, and the parts are actor with 2",
        ),
        ({"parts": {"actor": 1}}, "part '' with 1 ranks"),
    ],
)
def test_wrong_parts_and_ranks_are_refused(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        connect(run="gpt", storage_path=str(tmp_path), **arguments)
    assert message in str(caught.value)


@pytest.fixture
def previous() -> Iterator[list[int]]:
    """The signals that reach the handler from before `connect`."""
    got: list[int] = []
    known = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    yield got
    if connecting._signal is not None:
        connecting._signal.uninstall()
    for thread in threading.enumerate():
        if thread.name == "ray-ckpt-sigterm":
            thread.join(10.0)  # it may still pass a signal on, which `known` would not survive
            assert not thread.is_alive()
    signal.signal(signal.SIGTERM, known)


@pytest.mark.parametrize("has_open", [True, False])
def test_a_process_whose_checkpointers_are_closed_ends_at_once(
    has_open: bool, previous: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    notices: list[Notice] = []
    noticed = threading.Event()

    def notify(notice: Notice) -> None:
        notices.append(notice)
        noticed.set()

    monkeypatch.setattr(connecting, "open_checkpointers", {object()} if has_open else set())
    connecting._watch_signals(cast(Any, SimpleNamespace(notify_preemption=notify)))
    assert isinstance(connecting._signal, TermSignal)
    signal.raise_signal(signal.SIGTERM)
    assert noticed.wait(10.0) and [notice.source for notice in notices] == ["sigterm"]
    end_s = time.monotonic() + (0.3 if has_open else 10.0)
    while not previous and time.monotonic() < end_s:
        time.sleep(0.01)
    assert previous == ([] if has_open else [signal.SIGTERM])
