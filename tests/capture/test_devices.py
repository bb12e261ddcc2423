"""The path of accelerators, on a device that does everything later, in the order of its streams.

A stream is a queue that a thread works off; an event is a place in it. Copies and the training's own
operations are put into the current stream. Whoever forgets to wait for an event reads or overwrites the wrong
step.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import ray_ckpt.capture.snapshot as snapshot_module
from ray_ckpt.capture import overlap_guard as guard
from ray_ckpt.capture.arena import Mapping
from ray_ckpt.config import RunOptions
from ray_ckpt.trainer.checkpointer import Checkpointer
from tests.capture.local import LocalLink

SLOW_S = 0.05  # of an operation on the device: far longer than the host takes to enqueue it
LONG_S = 20.0


class Event:
    def __init__(self) -> None:
        self.passed = threading.Event()

    def record(self, stream: Stream) -> None:
        stream.put(self.passed.set)

    def synchronize(self) -> None:
        assert self.passed.wait(LONG_S)


class Stream:
    def __init__(self) -> None:
        self._work: queue.Queue[Callable[[], object]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def wait_event(self, event: Event) -> None:
        self.put(event.synchronize)

    def synchronize(self) -> None:
        event = Event()
        event.record(self)
        event.synchronize()

    def _run(self) -> None:
        while True:
            self._work.get()()


class Device:
    """Stands for `torch.cuda`: one device, whose current stream each thread can change."""

    def __init__(self) -> None:
        self.Event, self.Stream = Event, Stream
        self.training = Stream()
        self._current = threading.local()

    def current_stream(self, device: object = None) -> Stream:
        found: Stream = getattr(self._current, "stream", self.training)
        return found

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self._current.stream = stream
        try:
            yield
        finally:
            del self._current.stream


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()

    def slow_copy(part: Any) -> None:
        view, source = part.view, part.source

        def copy() -> None:
            time.sleep(SLOW_S)
            with torch.no_grad():
                view.copy_(source)

        made.current_stream().put(copy)

    def clone(source: torch.Tensor) -> torch.Tensor:
        target = torch.full_like(source.detach(), -1)

        def copy() -> None:
            with torch.no_grad():
                target.copy_(source)

        made.current_stream().put(copy)
        return target

    monkeypatch.setattr(snapshot_module, "_is_on_host", lambda source: False)
    monkeypatch.setattr(snapshot_module, "_clone", clone)
    monkeypatch.setattr(snapshot_module, "_copy_from_device", slow_copy)
    monkeypatch.setattr(torch, "get_device_module", lambda device: made)
    return made


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(4))


class Run:
    """Steps whose operations are enqueued: forward changes the buffer, the optimizer the weight."""

    def __init__(self, device: Device, **options: Any) -> None:
        self.device = device
        self.link = LocalLink(RunOptions(memory="single", max_block_s=LONG_S, **options))
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.ckpt = Checkpointer(link=self.link, model=self.model, optimizer=self.optimizer)
        self.ckpt.restore()

    def forward(self, step: int) -> None:
        def work() -> None:
            time.sleep(6 * SLOW_S)  # longer than all copies together
            self.model.count.data.fill_(step)

        self.device.training.put(work)

    def step(self, step: int) -> None:
        self.optimizer.step()  # no gradients: the hook, as the host sees it
        self.device.training.put(lambda: self.model.weight.data.fill_(step))

    def check(self, *steps: int) -> None:
        self.ckpt.flush()
        self.device.training.synchronize()
        deadline_s = time.monotonic() + LONG_S
        while sorted(self.link.files) != list(steps):
            assert time.monotonic() < deadline_s, (self.link.files.keys(), self.link.skipped)
            time.sleep(0.01)
        for step in steps:
            found = self.link.tensors(step)
            assert found["model.weight"].tolist() == [step] * 4, "of another step, or not copied yet"
            assert found["model.count"].tolist() == [step] * 4
        self.ckpt.close()


def test_a_checkpoint_is_of_one_step_although_everything_is_done_later(device: Device) -> None:
    run = Run(device)
    for step in (1, 2, 3):
        run.forward(step)
        run.step(step)
        start_s = time.monotonic()
        run.ckpt.save(step)
        assert time.monotonic() - start_s < SLOW_S * 2 + 0.5
    run.forward(4)
    run.step(4)
    run.check(1, 2, 3)


def test_the_host_does_not_wait_for_the_device_before_a_step(device: Device) -> None:
    run = Run(device)
    run.forward(1)
    run.step(1)
    run.ckpt.save(1)
    sealed = len(run.link.sealed)
    run.step(2)
    assert sealed == len(run.link.sealed) == 0, "the step waited on the host until all was copied"
    run.check(1)


def test_what_is_too_large_to_be_copied_on_the_device_is_waited_for(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_module, "MAX_CLONED_BYTES", 0)
    monkeypatch.setattr(snapshot_module, "_clone", lambda source: pytest.fail("cloned"))
    run = Run(device)
    run.forward(1)
    run.step(1)
    run.ckpt.save(1)
    run.forward(2)
    run.step(2)
    run.check(1)


def test_a_blocking_save_copies_nothing_on_the_device(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_module, "_clone", lambda source: pytest.fail("cloned"))
    run = Run(device, overlap=False)
    run.forward(1)
    run.step(1)
    run.ckpt.save(1)
    assert not guard.running._copies
    run.forward(2)
    run.step(2)
    run.check(1)


def test_memory_is_not_given_up_while_a_device_copies_into_it(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(device)
    run.forward(1)
    run.step(1)
    run.ckpt.save(1)
    saver = run.ckpt._saver
    assert saver is not None and saver._snapshot is not None
    (copied,), pending = [event.passed for _, _, event in saver._snapshot.device_copied], []
    monkeypatch.setattr(Mapping, "give_up", lambda mapping: pending.append(not copied.is_set()))
    saver.lose_agent()
    assert pending == [False]
    run.check(1)
