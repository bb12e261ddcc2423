"""Garbage collections wait while a restore or a capture makes objects for each tensor."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ray_ckpt.capture.gradients import Window
from ray_ckpt.collector import collector_paused
from ray_ckpt.errors import RestoreError
from ray_ckpt.restore.reader import RestoreTicket
from ray_ckpt.trainer.checkpointer import Checkpointer
from tests.capture.local import LocalLink


class Noting:
    """An object whose state_dict notes whether the garbage collector is enabled."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def state_dict(self) -> dict[str, Any]:
        self.found.append(gc.isenabled())
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class NoTicket(LocalLink):
    def ticket(self, *, early: bool = False) -> RestoreTicket:
        raise RestoreError("no ticket")


@pytest.fixture(params=[False, True])
def is_enabled(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Return whether the program uses the collector."""
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_a_restore_and_a_capture_pause_the_collector_of_a_program_that_uses_it(is_enabled: bool) -> None:
    noting = Noting()
    ckpt = Checkpointer(link=LocalLink(), position=noting)
    ckpt.restore()
    assert gc.isenabled() == is_enabled
    ckpt.step(1)
    assert ckpt.save(1)
    assert gc.isenabled() == is_enabled
    ckpt.close()
    assert len(noting.found) >= 2 and not any(noting.found)


def test_a_process_that_is_forked_in_a_pause_collects() -> None:
    """As the workers of a data loader whose state_dict makes its iterator."""
    gc.enable()
    with collector_paused(), collector_paused():
        assert not gc.isenabled()
        if (pid := os.fork()) == 0:
            os._exit(int(gc.isenabled()))
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert gc.isenabled()


def test_a_restore_that_fails_leaves_the_collector_as_it_was(is_enabled: bool) -> None:
    ckpt = Checkpointer(link=NoTicket(), position=Noting())
    with pytest.raises(RestoreError):
        ckpt.restore()
    assert gc.isenabled() == is_enabled


def test_the_marks_of_used_gradients_after_each_step_are_hardly_a_reason_to_collect() -> None:
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(10 * gc.get_threshold()[0])]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = torch.optim.SGD(params)
    window = Window([optimizer])
    phases: list[str] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        phases.append(phase)

    gc.enable()
    gc.callbacks.append(note)
    try:
        window._after_step(optimizer, (), {})
        gc.collect(0)
        assert phases[-2:] == ["start", "stop"]
        for param in params:
            param.grad = torch.ones_like(param)  # as backward does after zero_grad
        phases.clear()
        window._after_step(optimizer, (), {})
        assert phases.count("start") <= 1 and gc.isenabled()
    finally:
        gc.callbacks.remove(note)
        window.close()
